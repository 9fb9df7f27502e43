"""Train an EAGLE-3 head with training-time test.

    accelerate launch train/train_draft.py --config recipes/base/smollm2-135m.yaml
    accelerate launch train/train_draft.py --config recipes/base/smollm2-135m.yaml --optim.lr 5e-4 --output runs/x

The loop below knows batches, steps and files; the rollout is eagle3_train.ttt, the head eagle3.heads.eagle3.
A run that was stopped goes on where its last checkpoint stands when the same command is given again.
"""

import os
import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.config import load_config
from eagle3.errors import Eagle3Error, one_line
from eagle3_train.config import TrainConfig
from eagle3_train.launch import start_all_processes
from eagle3_train.signals import TERMINATED, Terminated, Termination, lost_touch

if TYPE_CHECKING:
    from eagle3.heads.eagle3 import Eagle3Head
    from eagle3.target import Target
    from eagle3_train.run import Run

GO_ON = "the same command goes on from the last checkpoint"


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, 2 on bad input (one line on stderr), 1 if another process is lost, 130 on ^C, 143 on SIGTERM."""
    termination = Termination()
    try:
        config = load_config(TrainConfig, argv, description=__doc__)
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        # torch, transformers and accelerate are loaded only once the settings are known to be right
        if config.threads is not None:
            os.environ.setdefault("OMP_NUM_THREADS", str(config.threads))
        from eagle3_train.run import Run

        with Run(config) as run:
            _train(config, run, termination)
    # a full disk, a folder where a file should be, a path too long for the file system
    except (Eagle3Error, OSError) as error:
        print(one_line(error), file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not lost_touch(error):
            raise
        print(f"error: another process of this run ended or hangs; its own message says why, {GO_ON}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ninterrupted; {GO_ON}", file=sys.stderr)
        return 130
    except Terminated as end:
        print(f"\nterminated{end}; {GO_ON}", file=sys.stderr)
        return TERMINATED
    finally:
        termination.close()
    return 0


def _train(config: TrainConfig, run: "Run", termination: Termination) -> None:
    """The run in one piece, set-up, loop and end, so that it reads from the top."""
    import torch

    from eagle3_train.batches import Batches, supervise
    from eagle3_train.checkpoints import Checkpoints
    from eagle3_train.ema import EMA
    from eagle3_train.evaluate import Tally
    from eagle3_train.limits import due, ended, schedule_place, share_done
    from eagle3_train.optim import learning_rate, make_optimizer
    from eagle3_train.parallel import parallelize
    from eagle3_train.progress import Progress
    from eagle3_train.run import evaluate, load_parts, normalisers, over_ranks
    from eagle3_train.state import RunState
    from eagle3_train.tracking import peak_memory
    from eagle3_train.ttt import TTTRollout, noisy

    accelerator, steps = run.accelerator, config.ttt.steps
    parts = load_parts(config, run)
    target, head = parts.target, parts.head
    rollout = TTTRollout(head, config.ttt, config.loss)
    optimizer = make_optimizer(rollout.named_parameters(), config.optim)
    parallel = parallelize(accelerator, rollout, optimizer, config.optim.clip)
    ranks = accelerator.process_index, accelerator.num_processes
    batches = Batches(parts.rows.stream(config.seed), config.rows_per_step, config.tokens_per_batch, *ranks)

    checkpoints, average = Checkpoints(run.folder / "checkpoints", parallel), None
    state = RunState(rows=parts.rows.key)
    if (latest := checkpoints.latest()) is not None:
        state, average, changes = checkpoints.load(latest, config, head.config)
        changes += state.meet(parts.rows.key)
        run.note(f"resumed at step {state.step} from {latest}" + "".join(f"\n  changed: {c}" for c in changes))
    ema = EMA(parallel.local(), config.optim.ema, average)
    trial = EngineTrial(config, target)
    run.start(state, parts.record)
    progress = Progress(config.max_steps, state.step, config.log_every, enabled=run.is_main)
    autocast = torch.autocast(target.device.type, torch.bfloat16, enabled=config.autocast == "bfloat16")
    # since the last record; seconds are of updates alone
    tally, tokens, seconds, shown = Tally(steps), 0, 0.0, {}

    def try_engine() -> None:
        whole = parallel.plain(ema.averages).head
        # a target that is divided among the processes needs them all; they draft and emit alike
        if run.is_main or target.collective:
            taus, drafts = trial.run(whole)
            run.log({"step": state.step, "split": "engine", "tokens": state.tokens, **taus})
            run.log_drafts(drafts, state.step)
            progress.note(f"step {state.step}: engine " + "  ".join(f"{k} {v:.3f}" for k, v in taus.items()))
        accelerator.wait_for_everyone()

    if config.eval.engine_every and state.step == 0:
        try_engine()

    termination.deferred = True
    while not ended(state, config):
        began, step = time.monotonic(), state.step
        micro = [batch.to(target.device) for batch in batches.step(step)]
        supervisions = [supervise(batch, head.t2d, steps) for batch in micro]
        counts, new_tokens = normalisers(micro, supervisions, accelerator)
        for i, (batch, supervision) in enumerate(zip(micro, supervisions, strict=True)):
            inputs = noisy(parts.features.prepare(batch, supervision), config.ttt.feature_noise, config.seed, step)
            with parallel.micro_batch(last=i == len(micro) - 1):
                with autocast:
                    output = parallel(inputs, counts)
                parallel.backward(output.loss)
            tally.add(inputs, output)
        lr = learning_rate(*schedule_place(state, new_tokens, config), config.optim)
        grad_norm = parallel.step(lr, step + 1)
        ema.update(parallel.local(), step + 1)

        took = time.monotonic() - began
        seconds, state.seconds = seconds + took, state.seconds + parallel.mean(took)
        state.step = step + 1
        tokens, state.tokens = tokens + new_tokens, state.tokens + new_tokens
        if due(config.eval.every, state, config):
            plain = parallel.plain(ema.averages)
            held_out = evaluate(parts, plain, config, accelerator, autocast)
            shown["tau"] = held_out.tau
            run.log({"step": state.step, "split": "eval", "tokens": state.tokens, **held_out.rates()})
            progress.note(f"step {state.step}: held-out {held_out}")
            if state.judge(held_out.tau):
                run.export("best", plain.head, state)
        if due(config.eval.engine_every, state, config):
            try_engine()
        if due(config.log_every, state, config):
            record = {"step": state.step, "tokens": state.tokens, **over_ranks(tally, accelerator).rates()}
            speed = {"tokens_per_second": tokens / seconds, "peak_memory_bytes": peak_memory()}
            run.log({**record, "lr": lr, "grad_norm": grad_norm, **speed})
            shown["loss"] = record["loss"]
            tally, tokens, seconds = Tally(steps), 0, 0.0
        if config.max_steps is None:
            shown["done"] = share_done(state, config)
        progress.update(state.step, new_tokens, **shown)
        stopping = parallel.any(termination.asked)
        if stopping or due(config.save_every, state, config):
            checkpoints.save(state, config, head.config, ema.averages)
        if stopping and not ended(state, config):
            raise Terminated(f" after step {state.step}, which is saved")
    progress.close()
    run.export("last", parallel.plain(ema.averages).head, state)
    run.finish(state)


class EngineTrial:
    """Real tau, of a few prompts that the engine answers. The one place where training meets the runtime.

    Raises:
        Eagle3Error: the prompts cannot be read, or do not fit the target.
    """

    def __init__(self, config: TrainConfig, target: "Target"):
        from eagle3_infer.prompts import load_prompts, render, shipped_prompts_path
        from eagle3_infer.request import Request

        self.target, self.depth, self.requests = target, config.ttt.steps, []
        if config.eval.engine_every:
            prompts = load_prompts(Path(config.eval.prompts or shipped_prompts_path()), config.eval.prompt_count)
            options = config.data.template_options
            texts = [render(target.tokenizer, prompt.messages([]), options)[1] for prompt in prompts]
            new = config.eval.new_tokens
            self.requests = [Request(ids, max_new_tokens=new, prompt_id=i) for i, ids in enumerate(texts)]

    def run(self, head: "Eagle3Head") -> tuple[dict[str, float], list[dict[str, Any]]]:
        """tau of chain and tree with `head`, of which a copy in the target's dtype is used; the chain's drafts."""
        from eagle3_infer.config import TreeConfig
        from eagle3_infer.engine import Engine
        from eagle3_infer.watch import small, tau, told, watch

        head = deepcopy(head).to(self.target.dtype).eval()
        chain = watch(self.target, head, self.depth, self.requests)
        tree = Engine(self.target, head, TreeConfig(depth=self.depth), small(self.requests)).generate(self.requests)
        taus = {"chain_tau": tau([watched.result for watched in chain]), "tree_tau": tau(tree)}
        return taus, told(chain, self.target.tokenizer)


if __name__ == "__main__":
    start_all_processes()
    sys.exit(main())
