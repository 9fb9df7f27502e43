"""Training-time test: the head's multi-step rollout over packed documents (EAGLE-3, section 3.2), left-shift form.

Row t keeps the feature of position t. Step k feeds the embedding of x[t+1+k] and the row's previous output, at
rotary position t+k, and learns the teacher's distribution at t+1+k, i.e. predicts x[t+2+k].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eagle3.attention import AttentionCall
from eagle3.heads.eagle3 import Eagle3Head
from eagle3_kernels.draft_loss import DraftLoss, draft_loss
from eagle3_kernels.loss_terms import SOFT_CE
from eagle3_kernels.ttt_attention import ttt_attention
from eagle3_train.batches import PackedBatch, Supervision
from eagle3_train.config import TTTConfig


@dataclass(frozen=True)
class Teacher:
    """The target's word on every supervised row (entry r: at packed position rows[r] + 1).

    logits [R, Vd] at the draft vocabulary's tokens, in the target's dtype; lse fp32 [R] over the whole vocabulary;
    argmax int64 [R], a target id; in_vocab bool [R]: whether the head could propose it.
    """

    logits: Tensor
    lse: Tensor
    argmax: Tensor
    in_vocab: Tensor


@dataclass(frozen=True)
class TTTBatch:
    """What one rollout needs, made from a packed batch without gradients.

    features [T, F], embeds [T, H] (of the token itself), supervision: which rows count at which step.
    """

    batch: PackedBatch
    features: Tensor
    embeds: Tensor
    supervision: Supervision
    teacher: Teacher


class TTTOutput(NamedTuple):
    """loss: scalar; step_loss, step_alpha fp32 [steps]: sums over the rows that count; prediction int64 [steps, R]:
    the draft's argmax as a target id, -1 where the row does not count. A tuple, in which the hooks of sharded training
    find the tensors."""

    loss: Tensor
    step_loss: Tensor
    step_alpha: Tensor
    prediction: Tensor


# keys and values of one TTT step, by layer
StepKeys = dict[int, tuple[Tensor, Tensor]]


class TTTContext:
    """The head's attention at one TTT step: step 0 lends keys to everyone, later steps only to their own row.

    Step 0 brings every row and asks for `rows` or all of them, later steps bring and ask for `rows` alone. What was
    is handed in and what comes is kept apart, so a step can be computed twice.

    Args:
        past: keys and values of the steps before, oldest first.
    """

    def __init__(self, rows: Tensor, lengths: list[int], past: Sequence[StepKeys] = ()):
        self.rows, self.lengths, self.past = rows, lengths, past
        self.new: StepKeys = {}

    def attend(self, call: AttentionCall) -> Tensor:
        if call.softcap is not None or call.sinks is not None:
            raise RuntimeError(f"layer {call.layer}: the rollout's attention knows no soft-cap and no sinks")
        self.new[call.layer] = call.key, call.value
        (key, value), *own = [step[call.layer] for step in (*self.past, self.new)]
        rows = self.rows
        if own and call.query_rows is not None:
            raise RuntimeError(f"layer {call.layer}: step {len(own)} asks for some of its rows, not for all")
        if not own:
            everyone = torch.arange(key.shape[1], device=key.device)
            rows = everyone if call.query_rows is None else call.query_rows
        own_key, own_value = (
            torch.stack(x) if x else like.new_empty(0, like.shape[0], len(rows), like.shape[2])
            for x, like in (([k for k, _ in own], key), ([v for _, v in own], value))
        )
        return ttt_attention(call.query, key, value, own_key, own_value, rows, self.lengths, call.scaling, call.window)


class TTTRollout(nn.Module):
    """All TTT steps in one forward: the module that frameworks wrap (DDP, FSDP, DeepSpeed).

    Args:
        config: step weights and activation checkpointing; the number of steps is the supervision's.
        terms: name -> weight of the loss's terms (eagle3_kernels.loss_terms).
    """

    def __init__(self, head: Eagle3Head, config: TTTConfig | None = None, terms: Mapping[str, float] = SOFT_CE):
        super().__init__()
        self.head, self.config, self.terms = head, config or TTTConfig(), dict(terms)

    def forward(self, inputs: TTTBatch, normalisers: Tensor) -> TTTOutput:
        """Roll the head out over `inputs.supervision.counted.shape[0]` steps.

        Args:
            normalisers: fp32 [steps], N_k of the whole optimizer step (all micro-batches, all ranks).
        """
        head, counted, teacher = self.head, inputs.supervision.counted, inputs.teacher
        h = head.normed(self._outputs(inputs))
        step, row = counted.nonzero(as_tuple=True)
        # the teacher of row t at step k speaks at position t+k+1: the entry of row t+k, k further down
        taught = row + step
        # a teacher's choice that the head cannot propose is counted and not learned
        learned = teacher.in_vocab[taught].float()
        weights = learned * (self.config.decay**step) / normalisers.clamp(min=1)[step]
        if self.config.weights == "dpace":
            with torch.no_grad():
                alpha = self._loss(h, teacher, taught, weights).alpha
            weights = weights * dpace_weights(alpha, counted)
        result = self._loss(h, teacher, taught, weights)
        prediction = torch.full(counted.shape, -1, dtype=torch.int64, device=row.device)
        prediction[step, row] = head.to_target(result.prediction)
        sums = torch.zeros(2, len(counted), device=row.device)
        sums.index_add_(1, step, torch.stack((result.row_loss * learned, result.alpha)))
        return TTTOutput(result.loss, sums[0], sums[1], prediction)

    def _outputs(self, inputs: TTTBatch) -> Tensor:
        """The head's outputs [M, H] of the rows that count, step after step."""
        h, past, outputs = self.head.start(inputs.features), [], []
        for k, counted in enumerate(inputs.supervision.counted):
            if self.config.checkpointing and torch.is_grad_enabled():
                # nothing in a step is random
                h, keys = checkpoint(
                    self._step, h, inputs, tuple(past), k, use_reentrant=False, preserve_rng_state=False
                )
            else:
                h, keys = self._step(h, inputs, past, k)
            past.append(keys)
            outputs.append(h[counted])
        return torch.cat(outputs)

    def _step(self, h: Tensor, inputs: TTTBatch, past: Sequence[StepKeys], k: int) -> tuple[Tensor, StepKeys]:
        head, batch, rows = self.head, inputs.batch, inputs.supervision.rows
        at = torch.arange(len(batch.ids), device=rows.device) if k == 0 else rows
        # rows whose token lies past the packed row's end feed any embedding: nobody counts or attends to them
        following = (at + 1 + k).clamp(max=len(batch.ids) - 1)
        embeds = head.embed_tokens(batch.ids[following]) if head.config.owns_embedding else inputs.embeds[following]
        ctx = TTTContext(rows, batch.lengths, past)
        h = head.step(h, embeds, batch.positions[at] + k, ctx, rows if k == 0 else None)
        return h, ctx.new

    def _loss(self, h: Tensor, teacher: Teacher, taught: Tensor, weights: Tensor) -> DraftLoss:
        def loss(h: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            # a plain tuple: module hooks of sharded training rebuild what a module returns
            return tuple(draft_loss(h, weight, teacher.logits, teacher.lse, taught, weights, self.terms))

        return DraftLoss(*self.head.lm_head(h, loss))


def dpace_weights(alpha: Tensor, counted: Tensor) -> Tensor:
    """What each row's step is worth: the derivative of the row's expected accepted length E by log alpha_k.

    E = sum_m prod_{j<=m} alpha_j over the row's counted steps, so step k's weight is sum_{m>=k} prod_{j<=m} alpha_j:
    a step behind improbable ones is worth little (D-PACE).

    Args:
        alpha: fp32 [M], acceptance of the counted (step, row) pairs, step after step.
        counted: bool [steps, R].
    Returns:
        fp32 [M].
    """
    table = alpha.new_zeros(counted.shape)
    table[counted] = alpha
    return table.cumprod(0).flip(0).cumsum(0).flip(0)[counted]


def noisy(inputs: TTTBatch, std: float, seed: int, step: int) -> TTTBatch:
    """The same batch with Gaussian noise on its features; a document's noise depends on (seed, step, its ids) alone.

    Args:
        std: standard deviation; 0 = the batch itself.
    """
    if std == 0:
        return inputs
    features, noise = inputs.features, []
    for ids in inputs.batch.ids.cpu().split(inputs.batch.lengths):
        digest = blake2b(f"{seed},{step},".encode() + ids.numpy().tobytes(), digest_size=8).digest()
        # drawn on the CPU, so that it is the same on every device
        draw = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        noise.append(torch.randn(len(ids), features.shape[1], generator=draw))
    return replace(inputs, features=features + std * torch.cat(noise).to(features.device, features.dtype))
