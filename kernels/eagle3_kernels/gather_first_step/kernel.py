"""gather_first_step in Triton: one program per slot."""

# pyright reads a launch as a plain call: constexpr parameters get plain values, num_warps is no parameter
# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3_kernels.structures import FirstStep, Tree, Walk
from eagle3_kernels.testing import Case


@triton.jit
def gather_first_step_kernel(
    tokens_ptr,  # tree tokens [B, N]
    path_ptr,  # accepted rows [B, window], -1 padded
    accepted_ptr,  # accepted drafts [B]
    bonus_ptr,  # the token after the path [B]
    starts_ptr,  # feature row of each root [B]
    rows_out_ptr,  # [B, window]
    tokens_out_ptr,  # [B, window]
    count_out_ptr,  # [B]
    tokens_stride,
    path_stride,
    accepted_stride,
    bonus_stride,
    window,  # D + 1
    WINDOW: tl.constexpr,
):
    """Program (slot) writes its whole window; WINDOW is the next power of two."""
    slot = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WINDOW)
    path = path_ptr + slot * path_stride + at
    row = tl.load(path, mask=at < window, other=-1)
    following = tl.load(path + 1, mask=at + 1 < window, other=-1)
    accepted = tl.load(accepted_ptr + slot * accepted_stride)
    token = tl.load(tokens_ptr + slot * tokens_stride + following, mask=following >= 0, other=0)
    token = tl.where(at == accepted, tl.load(bonus_ptr + slot * bonus_stride).to(token.dtype), token)
    rows = tl.load(starts_ptr + slot) + tl.maximum(row, 0)
    out = slot * window + at
    tl.store(rows_out_ptr + out, rows, mask=at < window)
    tl.store(tokens_out_ptr + out, token, mask=at < window)
    tl.store(count_out_ptr + slot, accepted + 1)


def gather_first_step(tree: Tree, walk: Walk, starts: Tensor) -> FirstStep:
    """rows[b, i] = starts[b] + max(path[b, i], 0); tokens[b, i] = the token of path[b, i + 1], the bonus at the end.

    Reads the walk [B, D + 1] and a token per accepted row, writes 2 * B * (D + 1) + B integers.

    Args:
        starts: feature-buffer row of each slot's root [B]; its tree rows follow.
    Returns:
        Accepted drafts + 1 real rows per slot; padding repeats the root's row with token 0.
    """
    slots, window = walk.path.shape
    rows = torch.empty(slots, window, dtype=torch.promote_types(starts.dtype, walk.path.dtype), device=starts.device)
    tokens = torch.empty(slots, window, dtype=tree.tokens.dtype, device=starts.device)
    count = torch.empty(slots, dtype=walk.accepted.dtype, device=starts.device)
    tree_tokens, path = (t if t.stride(1) == 1 else t.contiguous() for t in (tree.tokens, walk.path))
    if slots:
        gather_first_step_kernel[(slots,)](
            tree_tokens,
            path,
            walk.accepted,
            walk.bonus,
            starts.contiguous(),
            rows,
            tokens,
            count,
            tree_tokens.stride(0),
            path.stride(0),
            walk.accepted.stride(0),
            walk.bonus.stride(0),
            window,
            WINDOW=triton.next_power_of_2(window),
            num_warps=1,
        )
    return FirstStep(rows, tokens, count)


COMPILE_CASES = [
    Case(
        "window 8",
        gather_first_step_kernel,
        {
            "tokens_ptr": "*i32",
            "path_ptr": "*i32",
            "accepted_ptr": "*i32",
            "bonus_ptr": "*i32",
            "starts_ptr": "*i64",
            "rows_out_ptr": "*i64",
            "tokens_out_ptr": "*i32",
            "count_out_ptr": "*i32",
            **dict.fromkeys(("tokens_stride", "path_stride", "accepted_stride", "bonus_stride", "window"), "i32"),
        },
        {"WINDOW": 8},
        num_warps=1,
    )
]
