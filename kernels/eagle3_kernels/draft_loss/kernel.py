"""draft_loss in Triton: loss and gradient of rows of logits, in place; the matrix products stay torch's.

The closed forms are those of rows.py. A row is read twice, thrice where a gradient needs a sum over all of it first.
"""

# pyright reads a launch as a plain call: constexpr parameters get plain values, num_warps is no parameter; and it takes
# tl.full for a function that never returns
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3_kernels.draft_loss.fused import GPU_CHUNK, loss_by_chunks
from eagle3_kernels.draft_loss.reference import DraftLoss
from eagle3_kernels.draft_loss.rows import TINY, RowLoss
from eagle3_kernels.loss_terms import LOSS_TERMS, SOFT_CE
from eagle3_kernels.testing import TRITON_TYPES, Case

# logits that a program looks at in a step
BLOCK, WARPS = 1024, 4
# their gradients need a sum over the row; gradients q - p
_LATE, _MASS = ("reverse_kl", "tv", "lk_alpha", "lk_lambda"), ("tv", "lk_alpha", "lk_lambda")
_NO_ID = tl.constexpr(2**31 - 1)
_TINY = tl.constexpr(TINY)
# no probability, but finite: 0 * -inf would be NaN
_NEVER = tl.constexpr(-1e30)


@triton.jit
def _lowest(best, best_id, last):
    """The lowest id of the largest value, `last` if nothing compares, as in a row of NaN."""
    found = tl.where(best == tl.max(best, 0), best_id, _NO_ID)
    return tl.minimum(tl.min(found, 0), last)


@triton.jit
def _larger(best, best_id, values, ids):
    """Lanes ascend in id, so a later equal never replaces."""
    return tl.maximum(best, values), tl.where(values > best, ids, best_id)


@triton.jit
def _add_exponentials(highest, total, values):
    """Online softmax: the largest value so far, and the sum of exponentials of differences to it."""
    higher = tl.maximum(highest, tl.max(values, 0))
    # nothing above -inf yet
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, total * tl.exp(highest - base) + tl.sum(tl.exp(values - base), 0)


@triton.jit
def _below(values, ids, V, highest):
    """Values at the ids, fp32, as differences to the largest."""
    loaded = tl.load(values + ids, mask=ids < V, other=0.0).to(tl.float32)
    return tl.where(ids < V, loaded - highest, _NEVER)


@triton.jit
def rows_kernel(
    logits,  # [C, V], last stride 1; with GRAD overwritten by row_weights * d row_loss / d logits
    teacher,  # [R, V], last stride 1
    teacher_lse,  # fp32 [R]
    taught,  # int64 [C], a row's entry of the teacher
    row_weights,  # fp32 [C]
    row_loss,  # written: fp32 [C]
    prediction,  # written: int64 [C]
    alpha,  # written: fp32 [C]
    V,
    logits_row,  # elements from a row to the next
    teacher_row,
    # weights of the terms; None = not in the mix
    soft_ce,
    kl,
    reverse_kl,
    tv,
    lk_alpha,
    lk_lambda,
    hard_ce,
    GRAD: tl.constexpr,
    LATE: tl.constexpr,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program row. A pass ends in sums over all threads: behind them it is safe to write where others have read."""
    row = tl.program_id(0)
    entry = tl.load(taught + row)
    weight = tl.load(row_weights + row)
    full_lse = tl.load(teacher_lse + entry).to(tl.float32)
    logits += row.to(tl.int64) * logits_row
    teacher += entry * teacher_row
    lanes = tl.arange(0, BLOCK)

    z_best = tl.full([BLOCK], float("-inf"), tl.float32)
    z_id = tl.full([BLOCK], _NO_ID, tl.int32)
    t_best, t_id = z_best, z_id
    z_max = tl.full([], float("-inf"), tl.float32)
    t_max = z_max
    z_sum = tl.full([], 0.0, tl.float32)
    t_sum = z_sum
    for start in range(0, V, BLOCK):
        ids = start + lanes
        z = tl.load(logits + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        t = tl.load(teacher + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        z_best, z_id = _larger(z_best, z_id, z, ids)
        z_max, z_sum = _add_exponentials(z_max, z_sum, z)
        t_max, t_sum = _add_exponentials(t_max, t_sum, t)
        if hard_ce is not None:
            t_best, t_id = _larger(t_best, t_id, t, ids)
    tl.store(prediction + row, _lowest(z_best, z_id, V - 1).to(tl.int64))
    z_log, t_log = tl.log(z_sum), tl.log(t_sum)
    inside = tl.exp((t_max - full_lse) + t_log)
    choice = 0
    if hard_ce is not None:
        choice = _lowest(t_best, t_id, V - 1)
    # comparisons hide a NaN that these have
    doubt = 0.0 * (z_sum + t_sum + inside)

    accepted = tl.zeros([BLOCK], tl.float32)
    below, soft_sum, kl_sum, reverse_sum, hard_sum = accepted, accepted, accepted, accepted, accepted
    for start in range(0, V, BLOCK):
        ids = start + lanes
        z, t = _below(logits, ids, V, z_max), _below(teacher, ids, V, t_max)
        q, log_q = tl.exp(z) / z_sum, z - z_log
        p, log_p = tl.exp(t) / t_sum, t - t_log
        full_p = p * inside
        accepted += tl.where(q < full_p, q, full_p)
        if MASS:
            below += tl.where(q < full_p, q, 0.0)
        if soft_ce is not None:
            soft_sum -= p * log_q
        if (kl is not None) or (lk_lambda is not None):
            kl_sum += p * (log_p - log_q)
        if reverse_kl is not None:
            reverse_sum += q * (log_q - log_p)
        if hard_ce is not None:
            hard_sum -= tl.where(ids == choice, log_q, 0.0)
        if GRAD and not LATE:
            d_z = tl.zeros([BLOCK], tl.float32)
            if soft_ce is not None:
                d_z += soft_ce * (q - p)
            if kl is not None:
                d_z += kl * (q - p)
            if hard_ce is not None:
                d_z += hard_ce * (q - tl.where(ids == choice, 1.0, 0.0))
            tl.store(logits + ids, (d_z * (weight + doubt)).to(logits.dtype.element_ty), mask=ids < V)

    chance = tl.sum(accepted, 0) + doubt
    tl.store(alpha + row, chance)
    loss = doubt
    # factors of the gradients q - p, -q (m - s)
    to_teacher = 0.0
    to_mass = 0.0
    if soft_ce is not None:
        loss += soft_ce * tl.sum(soft_sum, 0)
        to_teacher += soft_ce
    if kl is not None:
        loss += kl * tl.sum(kl_sum, 0)
        to_teacher += kl
    reverse = tl.sum(reverse_sum, 0)
    if reverse_kl is not None:
        loss += reverse_kl * reverse
    if hard_ce is not None:
        loss += hard_ce * tl.sum(hard_sum, 0)
    if tv is not None:
        loss += tv * (1 - chance)
        to_mass += tv
    if lk_alpha is not None:
        # below the smallest normal number 1 / alpha overflows: a large loss and no gradient
        safe = tl.maximum(chance, _TINY)
        loss -= lk_alpha * tl.log(safe)
        to_mass += tl.where(chance >= _TINY, lk_alpha / safe, 0.0)
    if lk_lambda is not None:
        keep = tl.exp(-3 * chance)
        loss += lk_lambda * (keep * tl.sum(kl_sum, 0) + (1 - keep) * (1 - chance))
        to_teacher += lk_lambda * keep
        to_mass += lk_lambda * (1 - keep)
    tl.store(row_loss + row, loss)

    if GRAD and LATE:
        mass = tl.sum(below, 0)
        weight += 0.0 * loss
        for start in range(0, V, BLOCK):
            ids = start + lanes
            z, t = _below(logits, ids, V, z_max), _below(teacher, ids, V, t_max)
            q, p = tl.exp(z) / z_sum, tl.exp(t) / t_sum
            d_z = to_teacher * (q - p)
            if MASS:
                d_z -= to_mass * q * (tl.where(q < p * inside, 1.0, 0.0) - mass)
            if reverse_kl is not None:
                d_z += reverse_kl * q * ((z - z_log) - (t - t_log) - reverse)
            if hard_ce is not None:
                d_z += hard_ce * (q - tl.where(ids == choice, 1.0, 0.0))
            tl.store(logits + ids, (d_z * weight).to(logits.dtype.element_ty), mask=ids < V)


def draft_loss(
    h: Tensor,
    weight: Tensor,
    teacher: Tensor,
    teacher_lse: Tensor,
    taught: Tensor,
    row_weights: Tensor,
    terms: Mapping[str, float] = SOFT_CE,
) -> DraftLoss:
    """See `draft_loss_reference`: same arguments, same result, differentiable once in `h` and `weight`."""
    return loss_by_chunks(loss_rows, GPU_CHUNK, h, weight, teacher, teacher_lse, taught, row_weights, terms)


def loss_rows(
    z: Tensor,
    teacher: Tensor,
    teacher_lse: Tensor,
    taught: Tensor,
    row_weights: Tensor,
    terms: Mapping[str, float],
    wants_grad: bool,
) -> RowLoss:
    """See rows.py: z [m, Vd] of any floating dtype becomes the gradient; nothing else of that size is made."""
    assert z.stride(-1) == 1, "a row of logits is contiguous"
    count, vocab = z.shape
    teacher = teacher if teacher.stride(-1) == 1 else teacher.contiguous()
    row_loss, alpha = (torch.empty(count, dtype=torch.float32, device=z.device) for _ in range(2))
    prediction = torch.empty(count, dtype=torch.int64, device=z.device)
    if count:
        with torch.cuda.device_of(z):
            rows_kernel[(count,)](
                *(z, teacher, teacher_lse, taught.contiguous(), row_weights.contiguous()),
                *(row_loss, prediction, alpha, vocab, z.stride(0), teacher.stride(0)),
                *(terms.get(name) or None for name in _ORDER),
                **_switches(terms, wants_grad),
                num_warps=WARPS,
            )
    return RowLoss(row_loss, prediction, alpha)


_ORDER = [name for name in rows_kernel.arg_names if name in LOSS_TERMS]


def _switches(terms: Mapping[str, float], wants_grad: bool) -> dict[str, bool | int]:
    late, mass = (any(terms.get(name) for name in names) for names in (_LATE, _MASS))
    return {"GRAD": wants_grad, "LATE": late, "MASS": mass, "BLOCK": BLOCK}


def _case(name: str, terms: tuple[str, ...], dtype: torch.dtype, wants_grad: bool = True, full: bool = False) -> Case:
    kind = TRITON_TYPES[dtype]
    signature = dict.fromkeys(("logits", "teacher"), f"*{kind}") | dict.fromkeys(("taught", "prediction"), "*i64")
    signature |= dict.fromkeys(("teacher_lse", "row_weights", "row_loss", "alpha"), "*fp32")
    signature |= dict.fromkeys(("V", "logits_row", "teacher_row"), "i32") | dict.fromkeys(terms, "fp32")
    absent = {term: None for term in _ORDER if term not in terms}
    return Case(
        f"{name} {kind}",
        rows_kernel,
        signature,
        absent | _switches(dict.fromkeys(terms, 1.0), wants_grad),
        WARPS,
        divisible=("V", "logits_row", "teacher_row"),
        full=full,
    )


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
COMPILE_CASES = [
    *(_case("soft_ce", ("soft_ce",), dtype) for dtype in (_BF16, _FP16, _FP32)),
    *(_case("all terms", LOSS_TERMS, dtype) for dtype in (_BF16, _FP32)),
    _case("evaluation", ("soft_ce",), _BF16, wants_grad=False),
    *(_case(term, (term,), _BF16, full=True) for term in LOSS_TERMS if term != "soft_ce"),
]
