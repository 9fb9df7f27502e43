"""Names of the draft loss's terms, and the check of a mix of them. Loads no torch: configs are checked by it."""

import difflib
import math
from collections.abc import Mapping
from types import MappingProxyType

# what each term is, its gradient and its source: draft_loss/reference.py, draft_loss/rows.py
LOSS_TERMS = ("soft_ce", "kl", "reverse_kl", "tv", "lk_alpha", "lk_lambda", "hard_ce")
SOFT_CE: Mapping[str, float] = MappingProxyType({"soft_ce": 1.0})


def check_terms(terms: Mapping[str, float]) -> None:
    """Raise ValueError for a name that is no term, a weight that is negative or not finite, or no weight above 0."""
    for name, weight in terms.items():
        if name not in LOSS_TERMS:
            near = difflib.get_close_matches(name, LOSS_TERMS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(LOSS_TERMS)}"
            raise ValueError(f"unknown term {name!r}; {hint}")
        if not 0 <= weight < math.inf:
            raise ValueError(f"the weight of {name} is {weight}; it must be 0 or more")
    if not any(terms.values()):
        raise ValueError(f"no term has a weight above 0: {dict(terms)}; one of {', '.join(LOSS_TERMS)} must")
