"""When a run ends and what is due by then: steps, tokens, minutes, or a tau that rises no more. Knows counts alone."""

from eagle3_train.config import TrainConfig
from eagle3_train.state import RunState


def ended(state: RunState, config: TrainConfig) -> bool:
    """Whether the run is over: a limit is reached, or tau has not risen for `eval.patience` evaluations."""
    return share_done(state, config) >= 1 or 0 < config.eval.patience <= state.since_best


def due(every: int, state: RunState, config: TrainConfig) -> bool:
    """Whether what is done every so many steps (0: never) is to be done after this one; a run ends with all of it."""
    return every > 0 and (state.step % every == 0 or ended(state, config))


def share_done(state: RunState, config: TrainConfig) -> float:
    """Of the limit that is nearest; 1 or more: reached."""
    return max(at / end for at, end in _limits(state, config))


def schedule_place(state: RunState, new_tokens: int, config: TrainConfig) -> tuple[float, float]:
    """Where the step at hand, of `new_tokens`, stands in the learning rate's schedule, which ends where the run does:
    (place counted from 0, end), in steps, tokens or milliseconds, by the limit that is nearest.
    """
    after = RunState(state.step + 1, state.tokens + new_tokens, seconds=state.seconds)
    at, end = max(_limits(after, config), key=lambda limit: limit[0] / limit[1])
    return max(at - 1, 0), end


def _limits(state: RunState, config: TrainConfig) -> list[tuple[float, float]]:
    """(reached, limit) of every limit that is set."""
    # milliseconds, so that the schedule's units are small beside its warm-up
    clock = None if config.max_minutes is None else 60_000 * config.max_minutes
    pairs = [(state.step, config.max_steps), (state.tokens, config.max_tokens), (1000 * state.seconds, clock)]
    return [(at, end) for at, end in pairs if end is not None]
