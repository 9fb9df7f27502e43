"""Train an EAGLE-3 head with training-time test.

    accelerate launch train/train_draft.py --config recipes/base/smollm2-135m.yaml
    accelerate launch train/train_draft.py --config recipes/base/smollm2-135m.yaml --optim.lr 5e-4 --output runs/x

The loop below knows batches, steps and files; the rollout is eagle3_train.ttt, the head eagle3.heads.eagle3.
A run that was stopped goes on where its last checkpoint stands when the same command is given again.
"""

import os
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from eagle3.config import load_config
from eagle3.errors import Eagle3Error, one_line
from eagle3_train.config import TrainConfig

if TYPE_CHECKING:
    from eagle3_train.run import Run


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, 2 on bad input (one line on stderr), 130 when interrupted."""
    try:
        config = load_config(TrainConfig, argv, description=__doc__)
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        # torch, transformers and accelerate are loaded only once the settings are known to be right
        if config.threads is not None:
            os.environ.setdefault("OMP_NUM_THREADS", str(config.threads))
        from eagle3_train.run import Run

        with Run(config) as run:
            _train(config, run)
    except Eagle3Error as error:
        print(one_line(error), file=sys.stderr)
        return 2
    except OSError as error:
        # a full disk, a folder where a file should be, a path too long for the file system
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def _train(config: TrainConfig, run: "Run") -> None:
    """The run in one piece, set-up, loop and end, so that it reads from the top."""
    import torch

    from eagle3_train.batches import Batches, supervise
    from eagle3_train.evaluate import Tally
    from eagle3_train.optim import check_finite, learning_rate, make_optimizer, set_learning_rate
    from eagle3_train.progress import Progress
    from eagle3_train.run import evaluate, load_parts, normalisers, over_ranks
    from eagle3_train.state import Checkpoints, RunState
    from eagle3_train.ttt import TTTRollout

    accelerator, steps = run.accelerator, config.ttt.steps
    parts = load_parts(config, run)
    target, head = parts.target, parts.head
    rollout = TTTRollout(head, config.ttt, config.loss)
    wrapped, optimizer = accelerator.prepare(rollout, make_optimizer(rollout.named_parameters(), config.optim))
    ranks = accelerator.process_index, accelerator.num_processes
    batches = Batches(parts.rows.stream(config.seed), config.rows_per_step, config.tokens_per_batch, *ranks)

    checkpoints, state = Checkpoints(run.folder / "checkpoints", accelerator), RunState()
    if (latest := checkpoints.latest()) is not None:
        state, changes = checkpoints.load(latest, config, head.config)
        run.note(f"resumed at step {state.step} from {latest}" + "".join(f"\n  changed: {c}" for c in changes))
    run.start(state, parts.record)
    progress = Progress(config.max_steps, state.step, config.log_every, enabled=run.is_main)
    autocast = torch.autocast(target.device.type, torch.bfloat16, enabled=config.autocast == "bfloat16")
    # since the last record; seconds are of updates alone
    tally, tokens, seconds, shown = Tally(steps), 0, 0.0, {}

    for step in range(state.step, config.max_steps):
        began = time.monotonic()
        micro = [batch.to(target.device) for batch in batches.step(step)]
        supervisions = [supervise(batch, head.t2d, steps) for batch in micro]
        counts, new_tokens = normalisers(micro, supervisions, accelerator)
        for i, (batch, supervision) in enumerate(zip(micro, supervisions, strict=True)):
            inputs = parts.features.prepare(batch, supervision)
            with accelerator.no_sync(wrapped) if i < len(micro) - 1 else nullcontext():
                with autocast:
                    output = wrapped(inputs, counts)
                accelerator.backward(output.loss * run.loss_scale)
            tally.add(inputs, output)
        grad_norm = accelerator.clip_grad_norm_(wrapped.parameters(), config.optim.clip)
        check_finite(grad_norm, step + 1)
        lr = learning_rate(step, config.max_steps, config.optim)
        set_learning_rate(optimizer, lr)
        optimizer.step()
        optimizer.zero_grad()

        seconds += time.monotonic() - began
        state.step = step + 1
        tokens, state.tokens = tokens + new_tokens, state.tokens + new_tokens
        at_end = state.step == config.max_steps
        if state.step % config.log_every == 0 or at_end:
            record = {"step": state.step, "tokens": state.tokens, **over_ranks(tally, accelerator).rates()}
            run.log({**record, "lr": lr, "grad_norm": grad_norm, "tokens_per_second": tokens / seconds})
            shown["loss"] = record["loss"]
            tally, tokens, seconds = Tally(steps), 0, 0.0
        progress.update(state.step, new_tokens, **shown)
        if state.step % config.eval.every == 0 or at_end:
            held_out = evaluate(parts, rollout, config, accelerator, autocast)
            shown["tau"] = held_out.tau
            run.log({"step": state.step, "split": "eval", "tokens": state.tokens, **held_out.rates()})
            progress.note(f"step {state.step}: held-out {held_out}")
            if held_out.tau > state.best_tau:
                state.best_tau, state.best_step = held_out.tau, state.step
                run.export("best", head, state)
        if state.step % config.save_every == 0 or at_end:
            checkpoints.save(state, config, head.config)
    progress.close()
    run.export("last", head, state)
    run.finish(state)


if __name__ == "__main__":
    sys.exit(main())
