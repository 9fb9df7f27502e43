"""The definition of TTT attention: one softmax over all step-0 keys and the row's own keys. Slow, obvious."""

import torch
from torch import Tensor


def ttt_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    rows: Tensor,
    lengths: list[int],
    scaling: float,
    window: int | None = None,
) -> Tensor:
    """What row t of TTT step k sees (EAGLE-3, section 3.2; DESIGN section 4).

    Args:
        query: [Hq, R, d], step k's queries of the rows `rows`.
        key, value: [Hkv, T, d], [Hkv, T, dv], step-0 keys of the packed documents.
        own_key, own_value: [k, Hkv, R, d], [k, Hkv, R, dv]: the rows' keys of steps 1..k (k = 0: none).
        rows: int64 [R], ascending; row r's query belongs to packed row rows[r].
        lengths: tokens of each document, summing to T.
        scaling: factor on the scores.
        window: positions that a query looks back (its own included); None = all.
    Returns:
        [R, Hq, dv]. Query t sees step-0 keys j <= t of its document and its own keys of steps 1..k; the query
        stands at position t + k, the own key of step i at t + i.
    """
    steps, groups = own_key.shape[0], query.shape[0] // key.shape[0]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(rows.device)
    at = torch.arange(key.shape[1], device=rows.device)
    distance = rows[:, None] + steps - at
    visible = (documents[rows, None] == documents) & (at <= rows[:, None])
    own_distance = torch.arange(steps - 1, -1, -1, device=rows.device)
    own_visible = torch.ones(steps, dtype=torch.bool, device=rows.device)
    if window is not None:
        visible, own_visible = visible & (distance < window), own_distance < window
    key, value = (x.repeat_interleave(groups, 0) for x in (key, value))
    own_key, own_value = (x.repeat_interleave(groups, 1) for x in (own_key, own_value))
    scores = (query @ key.transpose(1, 2)).masked_fill(~visible, float("-inf"))
    own_scores = torch.einsum("hrd,khrd->hrk", query, own_key).masked_fill(~own_visible, float("-inf"))
    weights = (torch.cat((scores, own_scores), -1).float() * scaling).softmax(-1).to(value.dtype)
    prefix, own = weights[..., : key.shape[1]], weights[..., key.shape[1] :]
    return (prefix @ value + torch.einsum("hrk,khrd->hrd", own, own_value)).transpose(0, 1)
