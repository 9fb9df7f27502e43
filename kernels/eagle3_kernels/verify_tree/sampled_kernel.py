"""The rejection rules' walk, one program per slot: sums over the target's row at each visited node, and coins. Then
the draw where each walk ends, over chunks of that row.

After rejected children x_1..x_i the residual of an untried token v is max(0, a p(v) - b q(v)) with two scalars a, b,
as what falls to 0 stays there; a tried token keeps its own share. So nothing of size V is written, and no mass is the
difference of two larger ones: sums leave the children out, and add them back.
"""

import triton
import triton.language as tl

from eagle3_kernels.sample_nodes.noise_kernel import (
    ACCEPT,
    RESIDUAL,
    TARGET,
    gumbel,
    noise_integers,
    noise_key,
    uniform,
)

TARGET_ONLY, REJECTION, THRESHOLD = (tl.constexpr(i) for i in range(3))
NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _pick(values, lanes, lane):
    """The scalar at one lane."""
    return tl.sum(tl.where(lanes == lane, values, 0), 0)


@triton.jit
def _next(mask, rows, row, ROWS: tl.constexpr):
    """The first row of the mask after `row`, ROWS where there is none."""
    return tl.min(tl.where(mask & (rows > row), rows, ROWS), 0)


@triton.jit
def _tokens_apart(children, token, rows, ROWS: tl.constexpr):
    """Tokens of the children, -1 at other rows and where an earlier sibling has the same: it can never be drawn."""
    apart = tl.full((ROWS,), -1, tl.int32)
    row = _next(children, rows, -1, ROWS)
    while row < ROWS:
        x = _pick(token, rows, row)
        repeated = tl.max((apart == x).to(tl.int32), 0) > 0
        apart = tl.where((rows == row) & (repeated == 0), x, apart)
        row = _next(children, rows, row, ROWS)
    return apart


@triton.jit
def _is_apart(ids, start, apart, BLOCK: tl.constexpr):
    """Which ids of a block are tokens in `apart`."""
    # integers: AMD keeps a loop's booleans in scalar registers, of which there are too few
    found = tl.zeros((BLOCK,), tl.int32)
    here = tl.where((apart >= start) & (apart < start + BLOCK), apart, NO_ID)
    x = tl.min(here, 0)
    while x < NO_ID:
        found = tl.where(ids == x, 1, found)
        x = tl.min(tl.where(here > x, here, NO_ID), 0)
    return found > 0


@triton.jit
def _draft_mass(q_row, to_draft, ids, mask):
    """q of target ids, 0 where the draft has none."""
    draft = tl.load(to_draft + ids, mask=mask, other=-1)
    return tl.load(q_row + draft, mask=draft >= 0, other=0.0)


@triton.jit
def _sums(p_row, q_row, to_draft, a, b, apart, V, WITH_Q: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of max(0, a p - b q) and of q over all tokens but those apart."""
    lanes = tl.arange(0, BLOCK)
    residual = tl.zeros((BLOCK,), tl.float32)
    draft = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        ids = start + lanes
        counts = (ids < V) & (_is_apart(ids, start, apart, BLOCK) == 0)
        share = a * tl.load(p_row + ids, mask=counts, other=0.0)
        if WITH_Q:
            q = _draft_mass(q_row, to_draft, ids, counts)
            share = share - b * q
            draft += q
        # NaN stays
        residual += tl.where(share < 0, 0.0, share)
    return tl.sum(residual, 0), tl.sum(draft, 0)


@triton.jit
def _target_only(p_row, key, children, token, rows, V, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The accepted child (ROWS = none), the tokens apart and what is left of p on them."""
    apart = _tokens_apart(children, token, rows, ROWS)
    share = tl.load(p_row + apart, mask=apart >= 0, other=0.0)
    outside, _ = _sums(p_row, p_row, p_row, 1.0, 0.0, apart, V, False, BLOCK)
    child = _next(children, rows, -1, ROWS)
    accepted, sibling = ROWS, 0
    while child < ROWS:
        mass = outside + tl.sum(share, 0)
        chance = _pick(share, rows, child) / mass
        share = tl.where(rows == child, 0.0, share)
        # where nothing is left, it is not rejected
        taken = (_coin(key, sibling) < chance) | (outside + tl.sum(share, 0) == 0)
        accepted = tl.where(taken, child, ROWS)
        child = tl.where(taken, ROWS, _next(children, rows, child, ROWS))
        sibling += 1
    return accepted, apart, share


@triton.jit
def _rejection(p_row, q_row, to_draft, key, children, token, rows, V, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The accepted child (ROWS = none), the tokens apart, what is left of p on them, and a, b for all others."""
    apart = _tokens_apart(children, token, rows, ROWS)
    share = tl.load(p_row + apart, mask=apart >= 0, other=0.0)
    # q of what was not tried; a child without any cannot be drawn and is skipped, a repeated one among them
    untried = _draft_mass(q_row, to_draft, apart, apart >= 0)
    a, b = 1.0, 0.0
    child = tl.min(tl.where(untried > 0, rows, ROWS), 0)
    accepted, tried, going = ROWS, child, True
    while going:
        left, outside_q = _sums(p_row, q_row, to_draft, a, b, apart, V, True, BLOCK)
        left += tl.sum(share, 0)
        going = (left > 0) & (child < ROWS)
        # where nothing is left, the last one is not rejected
        accepted = tl.where(left == 0, tried, accepted)
        if going:
            each = 1.0 / (outside_q + tl.sum(untried, 0))
            a, b, share = a / left, b / left + each, share / left
            chance = _pick(share, rows, child) / (_pick(untried, rows, child) * each)
            sibling = tl.sum((children & (rows < child)).to(tl.int32), 0)
            going = _coin(key, sibling) >= chance
            accepted = tl.where(going, ROWS, child)
            share = tl.maximum(share - untried * each, 0.0)
            untried = tl.where(rows == child, 0.0, untried)
            tried = child
            child = tl.min(tl.where(untried > 0, rows, ROWS), 0)
    return accepted, apart, share, a, b


@triton.jit
def _coin(key, sibling):
    return uniform(noise_integers(key, sibling + tl.zeros((), tl.int32)))


@triton.jit
def _threshold(p_row, children, token, rows, threshold, ROWS: tl.constexpr):
    """The likeliest child, the first of equals, if it reaches the threshold; else ROWS."""
    likely = tl.load(p_row + token, mask=children, other=-1.0)
    most = tl.max(likely, 0)
    best = tl.min(tl.where(children & (likely == most), rows, ROWS), 0)
    return tl.where(most >= threshold, best, ROWS)


@triton.jit
def walk_sampled(
    tokens,
    parent,
    source,
    p,
    q,
    to_draft,
    seeds,
    positions,
    walks,
    scales,
    apart_out,
    share_out,
    drawn_by_out,
    threshold,
    N,
    V,
    depth,
    q_rows,
    q_width,
    RULE: tl.constexpr,
    ROWS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Walk one slot's tree by a rule; program (slot).

    Pointers: tokens, parent, source int32 [B, N]; p fp32 [B, N, V]; q fp32 [B, q_rows, q_width], to_draft int32 [V]
    (-1 outside the draft's vocabulary), both and source read by REJECTION only; seeds, positions int64 [B]; written:
    walks int32 [B, depth + 3] = path (-1 padded), accepted, and the bonus left to the draw; of the residual to draw
    from: scales fp32 [B, 2] = a, b, apart int32, share fp32 [B, N] (-1 and 0 where it is p), drawn_by int32 [B].
    """
    slot = tl.program_id(0).to(tl.int64)
    rows, levels = tl.arange(0, ROWS), tl.arange(0, LEVELS)
    parent_of = tl.load(parent + slot * N + rows, mask=rows < N, other=-1)
    token = tl.load(tokens + slot * N + rows, mask=rows < N, other=-1)
    seed, root = tl.load(seeds + slot), tl.load(positions + slot)
    path = tl.full((LEVELS,), -1, tl.int32)
    a, b, share = 1.0, 0.0, tl.zeros((ROWS,), tl.float32)
    apart = tl.full((ROWS,), -1, tl.int32)
    level, child, drawn_by = -1, 0, 0
    while child < ROWS:
        row = child
        level += 1
        path = tl.where(levels == level, row, path)
        p_row = p + (slot * N + row) * V
        children = (parent_of == row) & (level < depth)
        child = _next(children, rows, -1, ROWS)
        a, b, apart = 1.0, 0.0, tl.full((ROWS,), -1, tl.int32)
        has_children = child < ROWS
        if has_children:
            key = noise_key(seed, ACCEPT, root + level + 1)
            if RULE == THRESHOLD:
                child = _threshold(p_row, children, token, rows, threshold, ROWS)
            elif RULE == TARGET_ONLY:
                child, apart, share = _target_only(p_row, key, children, token, rows, V, ROWS, BLOCK)
            else:
                drawn_by = tl.load(source + slot * N + child)
                q_row = q + (slot * q_rows + drawn_by) * q_width
                child, apart, share, a, b = _rejection(
                    p_row, q_row, to_draft, key, children, token, rows, V, ROWS, BLOCK
                )
    walks += slot * (depth + 3)
    tl.store(walks + levels, path, mask=levels <= depth)
    tl.store(walks + depth + 1, level)
    tl.store(scales + slot * 2, a)
    tl.store(scales + slot * 2 + 1, b)
    tl.store(apart_out + slot * N + rows, apart, mask=rows < N)
    tl.store(share_out + slot * N + rows, tl.where(apart >= 0, share, 0.0), mask=rows < N)
    tl.store(drawn_by_out + slot, drawn_by)


@triton.jit
def _end_key(seeds, positions, slot, level, apart):
    """The noise of the draw at a walk's end: its own where children were rejected, else the target's."""
    seed, position = tl.load(seeds + slot), tl.load(positions + slot) + level + 1
    key = noise_key(seed, TARGET, position)
    if tl.max(apart, 0) >= 0:
        key = noise_key(seed, RESIDUAL, position)
    return key


@triton.jit
def _score(share, key, ids, noisy):
    score = tl.log(tl.where(share > 0, share, 0.0))
    if noisy:
        score += gumbel(key, ids)
    return score


@triton.jit
def draw_chunk(
    p,
    q,
    to_draft,
    seeds,
    positions,
    greedy,
    walks,
    scales,
    apart_in,
    drawn_by,
    values,
    tokens,
    masses,
    N,
    V,
    depth,
    chunk,
    q_rows,
    q_width,
    WITH_Q: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best of log(max(0, a p - b q)) + noise in one chunk of the row where a walk ended; program (slot, part).

    Pointers: as walk_sampled's, what it wrote among them; greedy bool [B] or None; written: values fp32, tokens int32,
    masses fp32 [B, parts], the last of p itself.
    """
    slot, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = tl.arange(0, ROWS)
    level = tl.load(walks + slot * (depth + 3) + depth + 1)
    row = tl.load(walks + slot * (depth + 3) + level)
    apart = tl.load(apart_in + slot * N + rows, mask=rows < N, other=-1)
    key = _end_key(seeds, positions, slot, level, apart)
    noisy = tl.load(greedy + slot) == 0 if greedy is not None else True
    a, b = tl.load(scales + slot * 2), tl.load(scales + slot * 2 + 1)
    p_row = p + (slot * N + row) * V
    q_row = q + (slot * q_rows + tl.load(drawn_by + slot)) * q_width if WITH_Q else p_row
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_id = part * chunk + lanes
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, V), BLOCK):
        ids = start + lanes
        share = tl.load(p_row + ids, mask=ids < V, other=0.0)
        mass += share
        counts = (ids < V) & (_is_apart(ids, start, apart, BLOCK) == 0)
        share = a * share
        if WITH_Q:
            share = share - b * _draft_mass(q_row, to_draft, ids, counts)
        score = _score(tl.where(counts, share, 0.0), key, ids, noisy)
        best_id = tl.where(score > best, ids, best_id)
        best = tl.maximum(best, score)
    value = tl.max(best, 0)
    at = slot * tl.num_programs(1) + part
    tl.store(values + at, value)
    tl.store(tokens + at, tl.min(tl.where(best == value, best_id, NO_ID), 0))
    tl.store(masses + at, tl.sum(mass, 0))


@triton.jit
def draw_end(
    seeds,
    positions,
    greedy,
    walks,
    apart_in,
    share_in,
    values,
    tokens,
    masses,
    N,
    depth,
    parts,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The bonus: the best of a slot's chunks and of the tokens apart, lowest id at ties, -1 if p is no law there.

    Pointers: as draw_chunk's, whose output it reads; written: the bonus in walks. Program (slot).
    """
    slot, rows, part = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS), tl.arange(0, PARTS)
    walks += slot * (depth + 3)
    apart = tl.load(apart_in + slot * N + rows, mask=rows < N, other=-1)
    key = _end_key(seeds, positions, slot, tl.load(walks + depth + 1), apart)
    noisy = tl.load(greedy + slot) == 0 if greedy is not None else True
    own = _score(tl.load(share_in + slot * N + rows, mask=rows < N, other=0.0), key, apart, noisy)
    at = slot * parts + part
    best = tl.load(values + at, mask=part < parts, other=float("-inf"))
    ids = tl.load(tokens + at, mask=part < parts, other=NO_ID)
    top = tl.maximum(tl.max(best, 0), tl.max(own, 0))
    found = tl.min(tl.where(best == top, ids, NO_ID), 0)
    found = tl.minimum(found, tl.min(tl.where((apart >= 0) & (own == top), apart, NO_ID), 0))
    mass = tl.sum(tl.load(masses + at, mask=part < parts, other=0.0), 0)
    tl.store(walks + depth + 2, tl.where((mass > 0) & (mass < float("inf")), found, -1))
