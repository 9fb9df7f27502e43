"""Why two modes of a bench part: each divergence decided again in fp32 (`replay.Replay`), then judged.

Rounding explains a divergence only if every way of decoding agrees in fp32, and only if the tokens were so close
that rounding can swap them. Anything else is a bug.
"""

import torch

from eagle3.target import Target
from eagle3_infer.bench import Bench
from eagle3_infer.compare import Explain
from eagle3_infer.replay import Replay, Verdict
from eagle3_infer.report import Divergence, Output
from eagle3_infer.request import Request
from eagle3_infer.sampling import Sampler
from eagle3_infer.settings import HF_KEYS

# a lead in logits that no change of the row count can undo, far above what was ever seen (bf16: about 0.3)
LARGEST_GAP = {torch.float32: 1e-3, torch.float16: 1.0, torch.bfloat16: 4.0}


def replay_explainer(target: Target, bench: Bench) -> Explain:
    """A classifier of divergences for `compare_modes`."""
    replay = Replay(target, bench.head)
    plans = {plan.key: plan for plan in bench.plans}
    # where plain and HF agree, leaving one is leaving the other
    known: dict[tuple, Verdict | None] = {}
    requests = {(turn.prompt.id, turn.turn): turn.request for turn in bench.turns}

    def explain(output: Output, reference: Output, position: int) -> Divergence:
        request, plan = requests[output.place], plans[output.mode]
        bench.progress.show(f"replaying {output.mode} against {reference.mode}, prompt {output.id}")
        key = (output.place, output.mode, *reference.token_ids)
        if key not in known:
            known[key] = replay.explain(request, reference.token_ids, output.token_ids, plan.tree, plan.rule)
        found = known[key]
        assert found is not None and found.position == position
        kind, detail = found.kind, ""
        if found.gap is None:
            detail = "one of them ended here: a stop rule"
        elif kind == "bug":
            detail = f"fp32 decides {found.exact_plain} plainly and {found.exact_tree} through the drafts"
        elif found.gap > largest_gap(target, request):
            kind, detail = "bug", "fp32 agrees, but no rounding undoes such a lead"
        elif {output.mode, reference.mode} & set(HF_KEYS):
            stock = stock_decision(replay.exact_models()[0], request, reference.token_ids[:position])
            if stock != found.exact_plain:
                kind, detail = "bug", f"fp32 decides {found.exact_plain} here and {stock} in transformers"
        return Divergence(output.id, output.turn, output.mode, reference.mode, position, kind, found.gap, detail)

    return explain


def largest_gap(target: Target, request: Request) -> float:
    """The temperature divides logits, and so widens the gaps that rounding makes."""
    return LARGEST_GAP[target.dtype] / (request.sampling.temperature or 1.0)


def stock_decision(target: Target, request: Request, output: list[int]) -> int:
    """The greedy token after the prompt and `output` by transformers' own attention, penalties applied."""
    tokens = [*request.prompt_ids, *output]
    with target.stock() as model:
        row = torch.tensor([tokens], device=target.device)
        logits = model(input_ids=row, use_cache=False).logits[0, -1].float()
    eos_ids = target.eos_ids if request.eos_ids is None else request.eos_ids
    return int(Sampler.of(request, eos_ids).process(logits, tokens).argmax())
