"""Training-time test: the head's multi-step rollout over packed documents (EAGLE-3, section 3.2), left-shift form.

Row t keeps the feature of position t. Step k feeds the embedding of x[t+1+k] and the row's previous output, at
rotary position t+k, and learns the teacher's distribution at t+1+k, i.e. predicts x[t+2+k].
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eagle3.attention import AttentionCall
from eagle3.heads.eagle3 import Eagle3Head
from eagle3_kernels.draft_loss import draft_loss
from eagle3_kernels.ttt_attention import ttt_attention
from eagle3_train.batches import PackedBatch, Supervision


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


@dataclass(frozen=True)
class TTTOutput:
    """loss: scalar; step_loss, step_alpha fp32 [steps]: sums over the rows that count; prediction int64 [steps, R]:
    the draft's argmax as a target id, -1 where the row does not count."""

    loss: Tensor
    step_loss: Tensor
    step_alpha: Tensor
    prediction: Tensor


class TTTContext:
    """The head's attention in training: step 0 lends keys to everyone, later steps only to their own row.

    Step 0 brings every row and asks for `rows` or all of them, later steps bring and ask for `rows` alone.
    """

    def __init__(self, rows: Tensor, lengths: list[int]):
        self.rows, self.lengths = rows, lengths
        self._keys: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        if call.softcap is not None or call.sinks is not None:
            raise RuntimeError(f"layer {call.layer}: the rollout's attention knows no soft-cap and no sinks")
        steps = self._keys.setdefault(call.layer, [])
        steps.append((call.key, call.value))
        (key, value), own = steps[0], steps[1:]
        if own:
            if call.query_rows is not None:
                raise RuntimeError(f"layer {call.layer}: step {len(own)} asks for some of its rows, not for all")
            rows = self.rows
        else:
            everyone = torch.arange(key.shape[1], device=key.device)
            rows = everyone if call.query_rows is None else call.query_rows
        own_key = (
            torch.stack([k for k, _ in own]) if own else call.key.new_empty(0, key.shape[0], len(rows), key.shape[2])
        )
        own_value = (
            torch.stack([v for _, v in own])
            if own
            else call.value.new_empty(0, value.shape[0], len(rows), value.shape[2])
        )
        return ttt_attention(call.query, key, value, own_key, own_value, rows, self.lengths, call.scaling, call.window)


class TTTRollout(nn.Module):
    """All TTT steps in one forward: the module that frameworks wrap (DDP, FSDP, DeepSpeed)."""

    def __init__(self, head: Eagle3Head, step_decay: float = 0.8):
        super().__init__()
        self.head, self.step_decay = head, step_decay

    def forward(self, inputs: TTTBatch, normalisers: Tensor) -> TTTOutput:
        """Roll the head out over `inputs.supervision.counted.shape[0]` steps.

        Args:
            normalisers: fp32 [steps], N_k of the whole optimizer step (all micro-batches, all ranks).
        """
        head, supervision, teacher = self.head, inputs.supervision, inputs.teacher
        steps = supervision.counted.shape[0]
        ctx = TTTContext(supervision.rows, inputs.batch.lengths)
        h, outputs = head.start(inputs.features), []
        for k in range(steps):
            h = self._step(h, inputs, ctx, k)
            outputs.append(h[supervision.counted[k]])
        step, row = supervision.counted.nonzero(as_tuple=True)
        # the teacher of row t at step k speaks at position t+k+1: the entry of row t+k, k further down
        taught = row + step
        # a teacher's choice that the head cannot propose is counted and not learned
        learned = teacher.in_vocab[taught].float()
        weights = learned * (self.step_decay**step) / normalisers.clamp(min=1)[step]
        result = draft_loss(
            head.normed(torch.cat(outputs)), head.lm_head.weight, teacher.logits, teacher.lse, taught, weights
        )
        prediction = torch.full(supervision.tokens.shape, -1, dtype=torch.int64, device=row.device)
        prediction[step, row] = head.to_target(result.prediction)
        sums = torch.zeros(2, steps, device=row.device)
        sums.index_add_(1, step, torch.stack((result.row_loss * learned, result.alpha)))
        return TTTOutput(result.loss, sums[0], sums[1], prediction)

    def _step(self, h: Tensor, inputs: TTTBatch, ctx: TTTContext, k: int) -> Tensor:
        head, batch, rows = self.head, inputs.batch, inputs.supervision.rows
        everyone = torch.arange(len(batch.ids), device=rows.device)
        at = everyone if k == 0 else rows
        # rows whose token lies past the packed row's end feed any embedding: nobody counts or attends to them
        following = (at + 1 + k).clamp(max=len(batch.ids) - 1)
        embeds = head.embed_tokens(batch.ids[following]) if head.config.owns_embedding else inputs.embeds[following]
        return head.step(h, embeds, batch.positions[at] + k, ctx, rows if k == 0 else None)
