"""Train an EAGLE-3 head with training-time test.

    accelerate launch train/train_draft.py --config recipes/base/smollm2-135m.yaml
    accelerate launch train/train_draft.py --config recipes/base/smollm2-135m.yaml --optim.lr 5e-4 --output runs/x

The loop below knows batches, steps and files; the rollout is eagle3_train.ttt, the head eagle3.heads.eagle3.
A run that was stopped goes on where its last checkpoint stands when the same command is given again.
"""

import os
import sys
from contextlib import nullcontext

from eagle3.config import load_config
from eagle3.errors import Eagle3Error
from eagle3_train.config import TrainConfig


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, 2 on bad input (one line on stderr), 130 when interrupted."""
    try:
        config = load_config(TrainConfig, argv, description=__doc__)
        # torch, transformers and accelerate are loaded only once the settings are known to be right
        if config.threads is not None:
            os.environ.setdefault("OMP_NUM_THREADS", str(config.threads))
        _train(config)
    except Eagle3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def _train(config: TrainConfig) -> None:
    import torch

    from eagle3_train.batches import Batches
    from eagle3_train.evaluate import Tally
    from eagle3_train.optim import learning_rate, make_optimizer, set_learning_rate
    from eagle3_train.progress import Progress
    from eagle3_train.run import Run, evaluate, load_parts, normalisers
    from eagle3_train.state import Checkpoints, RunState
    from eagle3_train.ttt import TTTRollout

    run = Run(config)
    accelerator, steps = run.accelerator, config.ttt.steps
    parts = load_parts(config, run)
    target, head = parts.target, parts.head
    rollout = TTTRollout(head, config.ttt.decay)
    rollout, optimizer = accelerator.prepare(rollout, make_optimizer(rollout.parameters(), config.optim))
    rank, world = accelerator.process_index, accelerator.num_processes
    batches = Batches(parts.train_rows, config.rows_per_batch, config.seed, rank, world)

    checkpoints, state = Checkpoints(run.folder / "checkpoints", accelerator), RunState()
    if (latest := checkpoints.latest()) is not None:
        state, changes = checkpoints.load(latest, config, head.config)
        run.note(f"resumed at step {state.step} from {latest}" + "".join(f"\n  changed: {c}" for c in changes))
    run.start(state, {"head": head.config, "parameters": sum(p.numel() for p in head.parameters())})
    progress = Progress(config.max_steps, state.step, config.log_every, enabled=run.is_main)
    autocast = torch.autocast(target.device.type, torch.bfloat16, enabled=config.autocast == "bfloat16")
    tally, logged_tokens, tau = Tally(steps), state.tokens, None

    for step in range(state.step, config.max_steps):
        first = step * config.accumulation
        micro = [batches.batch(first + i).to(target.device) for i in range(config.accumulation)]
        counts = normalisers(micro, head.t2d, steps, accelerator)
        for i, batch in enumerate(micro):
            inputs = parts.features.prepare(batch, steps)
            with accelerator.no_sync(rollout) if i < len(micro) - 1 else nullcontext():
                with autocast:
                    output = rollout(inputs, counts)
                # the counts are global, so gradients must add up over ranks: undo the mean that DDP takes
                accelerator.backward(output.loss * world)
            tally.add_rates(inputs, output)
        grad_norm = accelerator.clip_grad_norm_(rollout.parameters(), config.optim.clip)
        lr = learning_rate(step, config.max_steps, config.optim)
        set_learning_rate(optimizer, lr)
        optimizer.step()
        optimizer.zero_grad()

        state.step = step + 1
        tokens = sum(len(batch.ids) for batch in micro) * world
        state.tokens += tokens
        at_end = state.step == config.max_steps
        progress.update(state.step, tokens, loss=tally.rates()["loss"], tau=tau)
        if state.step % config.log_every == 0 or at_end:
            speed = (state.tokens - logged_tokens) / run.seconds()
            record = {"step": state.step, "tokens": state.tokens, **tally.rates(), "lr": lr}
            run.log({**record, "grad_norm": float(grad_norm), "tokens_per_second": speed})
            tally, logged_tokens = Tally(steps), state.tokens
        if state.step % config.eval_every == 0 or at_end:
            held_out = evaluate(parts, rollout, config, accelerator, autocast)
            tau, rates = held_out.tau, held_out.rates()
            run.log({"step": state.step, "split": "eval", "tokens": state.tokens, "tau": tau, **rates})
            accepted = " ".join(f"{rate:.2f}" for rate in rates["accept"])
            progress.note(f"step {state.step}: held-out tau {tau:.3f}  loss {rates['loss']:.3f}  accept {accepted}")
            if tau > state.best_tau:
                state.best_tau, state.best_step = tau, state.step
                run.export("best", head, state)
        if state.step % config.save_every == 0 or at_end:
            checkpoints.save(state, config, head.config)
    progress.close()
    run.export("last", head, state)
    run.finish(state)


if __name__ == "__main__":
    sys.exit(main())
