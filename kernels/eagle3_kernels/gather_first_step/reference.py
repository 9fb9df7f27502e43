"""The definition of gather_first_step."""

import torch
from torch import Tensor

from eagle3_kernels.structures import FirstStep, Tree, Walk


def gather_first_step(tree: Tree, walk: Walk, starts: Tensor) -> FirstStep:
    """Pair the feature of every newly committed row with the token that follows it (the head's left shift).

    Args:
        starts: feature-buffer row of each slot's root [B]; its tree rows follow.
    Returns:
        Accepted drafts + 1 real rows per slot; padding repeats the root's row with token 0.
    """
    window = walk.path.shape[1]
    at = torch.arange(window, device=walk.path.device)
    # the token after path[i] is the token of path[i + 1], or the bonus at the end
    following = torch.nn.functional.pad(walk.path[:, 1:], (0, 1), value=-1).long()
    tokens = tree.tokens.gather(1, following.clamp(min=0)).where(following >= 0, 0)
    tokens = torch.where(at == walk.accepted[:, None], walk.bonus[:, None].to(tokens.dtype), tokens)
    return FirstStep(rows=starts[:, None] + walk.path.clamp(min=0), tokens=tokens, count=walk.accepted + 1)
