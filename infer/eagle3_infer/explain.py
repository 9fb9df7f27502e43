"""Why two modes parted: every divergence replayed in fp32 through `verify.py`."""

from eagle3.target import Target
from eagle3_infer.bench import Bench
from eagle3_infer.compare import Explain


def replay_explainer(target: Target, bench: Bench) -> Explain: ...
