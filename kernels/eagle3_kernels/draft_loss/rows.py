"""Loss and gradient of rows of draft logits in closed form; a row's Vd logits are all that it looks at.

With q = softmax(z), p and P the teacher's distribution renormalised and not, m = [q < P], s = sum m q,
alpha = sum min(P, q) and L a term's own value:

    term             d term / dz
    soft_ce, kl      q - p
    hard_ce          q - onehot(argmax p)
    reverse_kl       q (log q - log p - L)
    tv               -q (m - s)
    lk_alpha         -q (m - s) / alpha
    lk_lambda        l (q - p) - (1 - l) q (m - s)        l = exp(-3 alpha)
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny
# logits of one pass, so that the passes after it find them in the core's cache
CACHED = 1 << 18


class RowLoss(NamedTuple):
    """row_loss fp32 [m], prediction int64 [m], alpha fp32 [m]: as in DraftLoss."""

    row_loss: Tensor
    prediction: Tensor
    alpha: Tensor


def loss_rows(
    z: Tensor,
    teacher: Tensor,
    teacher_lse: Tensor,
    taught: Tensor,
    row_weights: Tensor,
    terms: Mapping[str, float],
    wants_grad: bool,
) -> RowLoss:
    """The mix of terms of m rows; with `wants_grad`, z becomes row_weights * d row_loss / dz.

    A teacher that is not a number makes loss and gradient of its rows NaN, whatever the terms.

    Args:
        z: draft logits [m, Vd].
        teacher, teacher_lse: logits [R, Vd] and log-sum-exp [R] of the entries that `taught` [m] points to.
        row_weights: fp32 [m].
    """
    size, exact = max(1, CACHED // z.shape[1]) if z.device.type == "cpu" else len(z), z.float()
    parts = [
        _loss_rows(*part, terms, wants_grad)
        for part in zip(
            exact.split(size),
            (teacher[entries] for entries in taught.split(size)),
            teacher_lse[taught].split(size),
            row_weights.split(size),
            strict=True,
        )
    ]
    if wants_grad and exact is not z:
        z.copy_(exact)
    return RowLoss(*map(torch.cat, zip(*parts, strict=True)))


def _loss_rows(
    z: Tensor, teacher: Tensor, teacher_lse: Tensor, row_weights: Tensor, terms: Mapping[str, float], wants_grad: bool
) -> RowLoss:
    """The same for few enough rows, each with its own entry."""
    rows = _Rows(z, teacher.float(), teacher_lse[:, None])
    mix = _mixed([(weight, _SHARES[name](rows)) for name, weight in terms.items() if weight])
    if wants_grad:
        _turn_into_gradient(rows, mix)
        # a comparison hides a NaN that the loss has
        z.mul_(row_weights[:, None] + 0 * mix.loss)
    return RowLoss(mix.loss.squeeze(-1), rows.prediction.squeeze(-1), rows.alpha.squeeze(-1))


class _Rows:
    """What the terms are made of, made when first asked for: per row [m, 1], per row and token [m, Vd]."""

    def __init__(self, z: Tensor, t: Tensor, full_lse: Tensor):
        self.z, self.t = z, t
        z_max, self.prediction = z.max(-1, keepdim=True)
        self.q, self.p = z.softmax(-1), t.softmax(-1)
        # the largest probability is at least 1 / Vd: its logarithm is safe
        self.z_lse = z_max - self.q.gather(-1, self.prediction).log()
        self.t_lse = t.amax(-1, keepdim=True) - self.p.amax(-1, keepdim=True).log()
        self.mass = (self.t_lse - full_lse).exp()
        full_p = self.p * self.mass
        self.alpha = torch.minimum(full_p, self.q, out=full_p).sum(-1, keepdim=True)

    @cached_property
    def soft_ce(self) -> Tensor:
        return self.z_lse - (self.p * self.z).sum(-1, keepdim=True)

    @cached_property
    def kl(self) -> Tensor:
        return self.soft_ce + (self.p * self.t).sum(-1, keepdim=True) - self.t_lse

    @cached_property
    def reverse_kl(self) -> Tensor:
        return (self.q * (self.z - self.t)).sum(-1, keepdim=True) - self.z_lse + self.t_lse

    @cached_property
    def choice(self) -> Tensor:
        return self.t.argmax(-1, keepdim=True)


class _Share(NamedTuple):
    """A term of m rows: its value, and the factors of the four gradients that all terms are made of.

    p: q - p; choice: q - onehot; mass: -q (m - s); reverse: q (log q - log p - L). Each [m, 1] or a number.
    """

    loss: Tensor
    p: Tensor | float = 0.0
    choice: Tensor | float = 0.0
    mass: Tensor | float = 0.0
    reverse: Tensor | float = 0.0


def _hard_ce(rows: _Rows) -> _Share:
    # argmax hides a NaN of the teacher
    return _Share(rows.z_lse - rows.z.gather(-1, rows.choice) + 0 * rows.t_lse, choice=1.0)


def _lk_alpha(rows: _Rows) -> _Share:
    # 1 / alpha overflows below TINY: such a row has a large loss and no gradient
    safe = rows.alpha.clamp(min=TINY)
    return _Share(-safe.log(), mass=(rows.alpha >= TINY) / safe)


def _lk_lambda(rows: _Rows) -> _Share:
    keep = (-3 * rows.alpha).exp()
    return _Share(keep * rows.kl + (1 - keep) * (1 - rows.alpha), p=keep, mass=1 - keep)


_SHARES: dict[str, Callable[[_Rows], _Share]] = {
    "soft_ce": lambda rows: _Share(rows.soft_ce, p=1.0),
    "kl": lambda rows: _Share(rows.kl, p=1.0),
    "reverse_kl": lambda rows: _Share(rows.reverse_kl, reverse=1.0),
    "tv": lambda rows: _Share(1 - rows.alpha, mass=1.0),
    "lk_alpha": _lk_alpha,
    "lk_lambda": _lk_lambda,
    "hard_ce": _hard_ce,
}


def _mixed(shares: list[tuple[float, _Share]]) -> _Share:
    columns = [[weight * x for x in share] for weight, share in shares]
    loss, *factors = (sum(column) for column in zip(*columns, strict=True))
    assert isinstance(loss, Tensor)
    return _Share(loss, *factors)


def _turn_into_gradient(rows: _Rows, mix: _Share) -> None:
    """rows.z becomes d loss / dz; a gradient that no term has is not computed."""
    d_z, q = rows.z, rows.q
    if _given(mix.reverse):
        d_z.sub_(rows.t).sub_(rows.z_lse - rows.t_lse + rows.reverse_kl).mul_(q).mul_(mix.reverse)
    else:
        d_z.zero_()
    if _given(mix.mass):
        below = (q < rows.p * rows.mass).float()
        d_z.sub_(below.sub_((below * q).sum(-1, keepdim=True)).mul_(q).mul_(mix.mass))
    if _given(mix.choice):
        d_z.add_(q * mix.choice).scatter_add_(-1, rows.choice, -mix.choice * torch.ones_like(rows.alpha))
    if _given(mix.p):
        d_z.add_(q.sub_(rows.p).mul_(mix.p))


def _given(factor: Tensor | float) -> bool:
    return isinstance(factor, Tensor) or factor != 0
