"""Where the time of rounds went, in the parts that tables, pages and charts show. Reads the report's dict only."""

from collections.abc import Mapping
from typing import Any

from eagle3_infer.request import STAGES

# the stages that each sums, in the order of a stack; `rest` is what the adaptive tree's cost model calls so
PARTS = {
    "verify": ("verify",),
    "draft": ("draft",),
    "rest": tuple(stage for stage in STAGES if stage not in ("prefill", "verify", "draft")),
}
# the one part of a mode that is not timed by stage
WHOLE = "whole"
PART_NAMES = {**{part: part for part in PARTS}, WHOLE: "not timed by stage"}
ROUND_STAGES = tuple(stage for stages in PARTS.values() for stage in stages)


def timed_by_stage(mode: Mapping[str, Any]) -> bool:
    """Hugging Face and servers tell one time for all of a round; of no round there is nothing to tell apart."""
    return mode["rounds"] == 0 or bool(mode["seconds_by_stage"]["verify"])


def seconds_by_part(mode: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of all rounds by PARTS; all of them are WHOLE where they are not timed by stage.

    Args:
        mode: an entry of the report's `modes`.
    """
    seconds = mode["seconds_by_stage"]
    if not timed_by_stage(mode):
        return {WHOLE: sum(seconds[stage] for stage in ROUND_STAGES)}
    return {part: sum(seconds[stage] for stage in stages) for part, stages in PARTS.items()}
