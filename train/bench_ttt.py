"""Time and memory of one training step of the head: ours, the peer's (speculators 0.9.0) and the floor of both.

    python train/bench_ttt.py --peer /path/to/venv/bin/python [--lengths 256 1024] [--csv ttt.csv]
    python train/bench_ttt.py                       # no peer: ours and the floor, one line says so
    python train/bench_ttt.py --tiny                # seconds: small shapes, nothing to conclude from

One thread, fp32, one document, three TTT steps, SmolLM2's shapes with random weights; features and the target's last
hidden states are given. The timed part is the teacher's logits over the draft vocabulary (both sides make them),
forward and backward of the head, with the optimizer left out. Ours and the peer run in a process each, of which one
works at a time, in turns. The floor is the matrix products of the same shapes, forward and backward, and nothing else.
What ours makes of the target's whole vocabulary (log-sum-exp for alpha, argmax) belongs to the features, once per
document, and is told apart. Seconds are processor time, which neighbours on the machine disturb least; peak bytes are
of all tensors alive at once, above models and inputs.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PEER_VERSION = "0.9.0"
STEPS = 3


@dataclass(frozen=True)
class Case:
    """One measurement: S tokens, a share of them supervised, the head's lm_head frozen (the peer's default) or not."""

    length: int
    supervised: float = 1.0
    frozen: bool = True
    tiny: bool = False

    @property
    def shapes(self) -> dict[str, int]:
        """SmolLM2-135M's, with a draft vocabulary of 8192."""
        if self.tiny:
            sizes = (32, 64, 4, 2, 8, 300, 64)
        else:
            sizes = (576, 1536, 9, 3, 64, 49152, 8192)
        names = ("hidden", "inner", "heads", "kv_heads", "head_dim", "vocab", "draft_vocab")
        return dict(zip(names, sizes, strict=True))

    def __str__(self) -> str:
        lm_head = "frozen" if self.frozen else "trained"
        return f"S={self.length:<5} supervised={self.supervised:4.0%} lm_head {lm_head:7}"


@dataclass(frozen=True)
class Sample:
    """Processor seconds of the whole, of the teacher's draft logits in it, of attention alone (measured apart), of the
    target's whole vocabulary beside it; wall-clock seconds of the whole; peak bytes; the loss."""

    seconds: float
    teacher: float
    attention: float
    whole_vocabulary: float
    wall: float
    bytes: int
    loss: float


class Side(NamedTuple):
    """A head ready to be measured. `step` takes what `teach` gives; `teaches` where it makes the same itself."""

    model: nn.Module
    teach: Callable[[], Tensor]
    step: Callable[[Tensor], Tensor]
    teaches: bool = False
    attention: float = 0.0
    whole_vocabulary: float = 0.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help=f"python of a venv that holds speculators=={PEER_VERSION}")
    parser.add_argument("--lengths", type=int, nargs="*", default=[256, 1024])
    parser.add_argument("--ours", type=int, nargs="*", default=[512, 2048, 4096], help="lengths of ours alone")
    parser.add_argument("--supervised", type=float, nargs="+", default=[1.0, 0.6])
    parser.add_argument("--lm-head", choices=["frozen", "trained", "both"], default="both")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="small shapes: shows that the script runs")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--worker", choices=["ours", "peer"], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.worker:
        return _work(args.worker)
    records = list(_compare(args))
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for record in records for key in record)))
            writer.writeheader()
            writer.writerows(records)
    return 0


def _compare(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One line and one record per case."""
    sides = {"ours": Worker(sys.executable, "ours")}
    if args.peer and args.peer.exists():
        sides["peer"] = Worker(str(args.peer), "peer")
    else:
        print(f"no peer: give --peer, the python of a venv with speculators=={PEER_VERSION} (facts/peers.md)")
    frozen = {"frozen": [True], "trained": [False], "both": [True, False]}[args.lm_head]
    for case in [Case(n, s, f, args.tiny) for f in frozen for s in args.supervised for n in args.lengths]:
        floor = min(products(case) for _ in range(3))
        yield _report(
            case, floor, {name: _median(rounds) for name, rounds in _in_turns(sides, case, args.repeat).items()}
        )
    for case in [Case(n, 1.0, frozen[0], args.tiny) for n in args.ours]:
        rounds = _in_turns({"ours": sides["ours"]}, case, max(1, args.repeat // 2))
        yield _report(case, products(case), {"ours": _median(rounds["ours"])})
    for worker in sides.values():
        worker.close()


def _in_turns(sides: dict[str, "Worker"], case: Case, repeat: int) -> dict[str, list[Sample]]:
    rounds: dict[str, list[Sample]] = {name: [] for name in sides}
    for _ in range(repeat):
        for name, worker in sides.items():
            rounds[name].append(worker.measure(case))
    return rounds


def _median(rounds: list[Sample]) -> Sample:
    columns = {name: statistics.median(getattr(sample, name) for sample in rounds) for name in asdict(rounds[0])}
    return Sample(**columns | {"bytes": int(columns["bytes"])})


def _report(case: Case, floor: float, sides: dict[str, Sample]) -> dict[str, Any]:
    record: dict[str, Any] = asdict(case) | {"floor_seconds": floor}
    line = [f"{case}: floor {floor:.3f} s"]
    for name, side in sides.items():
        record |= {f"{name}_{key}": value for key, value in asdict(side).items()}
        shared = f" ({side.wall:.3f} by the wall)" if side.wall > 1.05 * side.seconds else ""
        line.append(
            f"{name} {side.seconds:.3f} s{shared}, teacher {side.teacher:.3f} of it, {side.bytes / 2**20:.0f} MiB"
        )
    mine, other = sides["ours"], sides.get("peer")
    line.append(f"ours / floor {mine.seconds / floor:.2f}")
    if other:
        line.append(f"ours / peer {mine.seconds / other.seconds:.2f} time, {mine.bytes / other.bytes:.2f} bytes")
    else:
        other_time = 1e3 * (mine.seconds - mine.attention) / case.length
        line.append(f"per token {mine.bytes / 2**10 / case.length:.0f} KiB, {other_time:.2f} ms without attention")
    line.append(f"apart: the target's whole vocabulary {mine.whole_vocabulary:.3f} s")
    print(" | ".join(line), flush=True)
    return record


class Worker:
    """A process that measures one side when it is told to, and sleeps else."""

    def __init__(self, python: str, side: str):
        self.command = [python, __file__, "--worker", side]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parent,
        )

    def measure(self, case: Case) -> Sample:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(asdict(case)), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("{"):
                return Sample(**json.loads(line))
        raise SystemExit(f"{' '.join(self.command)} ended with {self.process.wait()}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def _work(name: str) -> int:
    """Measure the cases that come on stdin, one JSON line each."""
    side, made, peak = None, None, 0
    for line in sys.stdin:
        case = Case(**json.loads(line))
        if side is None or made != case:
            side, made = (ours if name == "ours" else peer)(case), case
            # the first run of a shape fills caches
            _once(side)
            peak = peak_bytes(side)
        print(json.dumps(asdict(replace(_once(side), bytes=peak))), flush=True)
    return 0


def _once(side: Side) -> Sample:
    side.model.zero_grad()
    wall, start = time.perf_counter(), time.process_time()
    teacher = side.teach()
    taught = time.process_time()
    if side.teaches:
        wall, start, taught = time.perf_counter(), taught, taught + taught - start
    loss = side.step(teacher)
    seconds, wall = time.process_time() - start, time.perf_counter() - wall
    return Sample(seconds, taught - start, side.attention, side.whole_vocabulary, wall, 0, float(loss))


def peak_bytes(side: Side) -> int:
    """Most bytes of tensors alive at once, gradients included, above models and inputs: by torch's allocator."""
    from torch.profiler import ProfilerActivity, profile

    side.model.zero_grad()
    given = side.teach() if side.teaches else None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        side.step(side.teach() if given is None else given)
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events: list[Any] = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events, "the profiler saw no allocation"
    alive = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


def products(case: Case) -> float:
    """Seconds of the bare matrix products, forward and backward, of one step: the floor of both sides."""
    s, S = case.shapes, case.length
    supervised, H = round(S * case.supervised), s["hidden"]
    q, kv = s["heads"] * s["head_dim"], s["kv_heads"] * s["head_dim"]
    seconds = _linear(S, 3 * H, H, d_input=False)
    # the teacher's logits, then the draft's
    seconds += _linear(supervised, H, s["draft_vocab"], d_input=False, d_weight=False)
    seconds += STEPS * _linear(supervised, H, s["draft_vocab"], d_weight=not case.frozen)
    # keys and values: step 0 lends everyone's
    seconds += 2 * (_linear(S, 2 * H, kv) + (STEPS - 1) * _linear(supervised, 2 * H, kv))
    for size_in, size_out in ((2 * H, q), (q, H), (H, s["inner"]), (H, s["inner"]), (s["inner"], H)):
        seconds += STEPS * _linear(supervised, size_in, size_out)
    # a query sees half of the keys
    group = s["heads"] // s["kv_heads"] * supervised
    return seconds + STEPS * _attention(s["kv_heads"], group, S // 2, s["head_dim"])


def _linear(rows: int, size_in: int, size_out: int, d_input: bool = True, d_weight: bool = True) -> float:
    x, w, g = torch.randn(rows, size_in), torch.randn(size_out, size_in), torch.randn(rows, size_out)
    return _timed(lambda: (x @ w.T, d_input and g @ w, d_weight and g.T @ x))


def _attention(heads: int, rows: int, keys: int, size: int) -> float:
    q, k, p = torch.randn(heads, rows, size), torch.randn(heads, keys, size), torch.randn(heads, rows, keys)
    k_t, p_t = k.transpose(1, 2), p.transpose(1, 2)
    # scores, output; gradients of probabilities, values, queries, keys
    return _timed(lambda: (q @ k_t, p @ k, q @ k_t, p_t @ q, p @ k, p_t @ q))


def _timed(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(3):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times)


def inputs(case: Case) -> dict[str, Tensor]:
    """Features [S, 3H], last hidden states [S, H], token ids [S], span ids [S]: a prompt, then one reply."""
    draw, hidden = torch.Generator().manual_seed(0), case.shapes["hidden"]
    span_ids = torch.zeros(case.length, dtype=torch.int64)
    span_ids[max(1, round(case.length * (1 - case.supervised))) :] = 1
    return {
        "features": torch.randn(case.length, 3 * hidden, generator=draw),
        "states": torch.randn(case.length, hidden, generator=draw),
        "ids": torch.randint(0, case.shapes["draft_vocab"], (case.length,), generator=draw),
        "span_ids": span_ids,
    }


def ours(case: Case) -> Side:
    """Our rollout. The draft vocabulary is the target's first Vd tokens."""
    from eagle3.config import HeadConfig
    from eagle3.heads.eagle3 import Eagle3Head
    from eagle3.vocab import VocabMap
    from eagle3_train.batches import pack, supervise
    from eagle3_train.config import TTTConfig
    from eagle3_train.ttt import Teacher, TTTBatch, TTTRollout

    s, given = case.shapes, inputs(case)
    config = HeadConfig(
        hidden_size=s["hidden"],
        intermediate_size=s["inner"],
        num_attention_heads=s["heads"],
        num_key_value_heads=s["kv_heads"],
        head_dim=s["head_dim"],
        vocab_size=s["vocab"],
        draft_vocab_size=s["draft_vocab"],
        target_hidden_size=s["hidden"],
        capture_layers=(1, 14, 26),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        num_layers=1,
        **dict.fromkeys(("fc_norm", "norm_before_residual", "norm_output", "qk_norm", "attention_bias"), False),
        sliding_window=None,
    )
    t2d = torch.arange(s["vocab"]) < s["draft_vocab"]
    head = Eagle3Head(config, VocabMap(torch.zeros(s["draft_vocab"], dtype=torch.int64), t2d))
    embedding, target_head = _random_weights(head, case)
    head.lm_head.weight.requires_grad_(not case.frozen)
    batch = pack([{"input_ids": given["ids"], "span_ids": given["span_ids"]}])
    supervision = supervise(batch, t2d, STEPS)
    states, rollout = given["states"][supervision.rows + 1], TTTRollout(head, TTTConfig(steps=STEPS, decay=1.0))
    whole_head = 0.1 * torch.randn(s["vocab"], s["hidden"])
    start = time.process_time()
    parts = [
        (logits.logsumexp(-1), logits.argmax(-1)) for part in states.split(256) for logits in [part @ whole_head.T]
    ]
    whole_vocabulary = time.process_time() - start
    whole = torch.cat([lse for lse, _ in parts])
    del whole_head
    counts, in_vocab = supervision.counted.sum(1).float(), torch.ones(len(states), dtype=torch.bool)

    def step(logits: Tensor) -> Tensor:
        teacher = Teacher(logits, whole, torch.zeros(len(states), dtype=torch.int64), in_vocab)
        loss = rollout(TTTBatch(batch, given["features"], embedding[batch.ids], supervision, teacher), counts).loss
        loss.backward()
        return loss.detach()

    def teach() -> Tensor:
        return F.rms_norm(states, states.shape[-1:], eps=1e-5) @ target_head.T

    attention = sum(_our_attention(case, supervision.rows, k) for k in range(STEPS))
    return Side(head, teach, step, False, attention, whole_vocabulary)


def _our_attention(case: Case, rows: Tensor, step: int) -> float:
    """Seconds of one step's attention, forward and backward."""
    from eagle3_kernels.ttt_attention import ttt_attention

    s, count = case.shapes, len(rows)
    shapes = [(s["heads"], count), *[(s["kv_heads"], case.length)] * 2, *[(step, s["kv_heads"], count)] * 2]
    query, *keys = tensors = [torch.randn(*shape, s["head_dim"], requires_grad=True) for shape in shapes]
    key, value, own_key, own_value = keys
    cotangent = torch.randn(count, s["heads"], s["head_dim"])

    def run() -> None:
        out = ttt_attention(query, key, value, own_key, own_value, rows, [case.length], s["head_dim"] ** -0.5)
        torch.autograd.grad(out, tensors, cotangent)

    return _timed(run)


def peer(case: Case) -> Side:
    """speculators' EAGLE-3 model with eager attention and loss, called as its trainer calls it."""
    from importlib.metadata import version

    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    if version("speculators") != PEER_VERSION:
        raise SystemExit(f"the peer's venv holds speculators {version('speculators')}; figures are for {PEER_VERSION}")
    s, given = case.shapes, {name: x[None] for name, x in inputs(case).items()}
    layer = LlamaConfig(
        hidden_size=s["hidden"],
        intermediate_size=s["inner"],
        num_attention_heads=s["heads"],
        num_key_value_heads=s["kv_heads"],
        head_dim=s["head_dim"],
        vocab_size=s["vocab"],
        num_hidden_layers=1,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
    )
    layer._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=STEPS)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=s["draft_vocab"],
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=[2, 15, 27],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = Eagle3DraftModel(config).float()
    t2d = torch.arange(s["vocab"]) < s["draft_vocab"]
    model.load_vocab_mappings(t2d, torch.zeros(s["draft_vocab"], dtype=torch.int64))
    embedding, target_head = _random_weights(model, case)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(embedding)
        model.verifier_lm_head.weight.copy_(target_head)
    model.lm_head.weight.requires_grad_(not case.frozen)
    loss_config = resolve_loss_config("kl_div", "eager")
    states, supervised = given["states"][:, 1:], (given["span_ids"] != 0)[:, 1:]

    def step(_: Tensor) -> Tensor:
        _tokens, loss, _metrics = model(
            hidden_states=given["features"][:, :-1],
            input_ids=given["ids"][:, 1:],
            document_ids=torch.zeros(1, case.length - 1, dtype=torch.int64),
            loss_mask=supervised,
            verifier_last_hidden_states=states,
            ttt_steps=STEPS,
            ttt_step_loss_decay=1.0,
            loss_config=loss_config,
        )
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def teach() -> Tensor:
        return model.verifier_lm_head(model.verifier_norm(states))

    return Side(model, teach, step, teaches=True)


@torch.no_grad()
def _random_weights(model: nn.Module, case: Case) -> tuple[Tensor, Tensor]:
    """Fill the head's matrices; return an embedding [V, H] and the target's lm_head at the draft vocabulary [Vd, H]."""
    draw, s = torch.Generator().manual_seed(1), case.shapes
    # by shape, so that both sides' weights are alike whatever their names
    for parameter in sorted((p for p in model.parameters() if p.dim() == 2), key=lambda p: tuple(p.shape)):
        parameter.copy_(0.03 * torch.randn(parameter.shape, generator=draw))
    embedding, target_head = (
        0.1 * torch.randn(s[rows], s["hidden"], generator=draw) for rows in ("vocab", "draft_vocab")
    )
    return embedding, target_head


if __name__ == "__main__":
    sys.exit(main())
