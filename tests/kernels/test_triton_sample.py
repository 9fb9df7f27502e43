"""sample_nodes in Triton against its reference: the very integers of the noise, ties, chunks, filters, bad logits."""

# pyright: reportArgumentType=false, reportCallIssue=false
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from eagle3_kernels import sample_nodes as op
from eagle3_kernels.dispatch import set_kernels
from eagle3_kernels.sample_nodes import Filters, Purpose, check_tokens, kernel, perturbed_scores, reference
from eagle3_kernels.sample_nodes.noise import noise_integers, to_gumbel, to_uniform
from eagle3_kernels.sample_nodes.noise_kernel import gumbel, noise_key, uniform
from eagle3_kernels.sample_nodes.noise_kernel import noise_integers as integers_of
from eagle3_kernels.testing import device, poisoned

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rows(count: int, vocab: int, dtype: torch.dtype = torch.float32, spread: float = 2.0, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(count, vocab, generator=draw) * spread).to(dtype).to(device())


def roundings(noise: Tensor, integers: Tensor) -> float:
    """The largest error of Gumbel noise, in units of 2^-23 of it or of 1; a logarithm alone is off by 1."""
    exact = -(-(-to_uniform(integers.cpu()).double()).log1p()).log()
    return float(((noise.cpu() - exact).abs() / exact.abs().clamp(min=1)).max()) * 2**23


@triton.jit
def _noise(seed, position, ids, integers, coins, noise, PURPOSE: tl.constexpr, COUNT: tl.constexpr):
    lane = tl.arange(0, COUNT)
    key = noise_key(tl.load(seed), PURPOSE, tl.load(position))
    words = tl.load(ids + lane)
    tl.store(integers + lane, integers_of(key, words).to(tl.int64))
    tl.store(coins + lane, uniform(integers_of(key, words)))
    tl.store(noise + lane, gumbel(key, words))


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("seed, position", [(0, 0), (7, 100), (2**32 - 1, 2**31 - 1), (-3, 131_072), (2**40 + 5, 1)])
def test_noise_is_the_references(purpose, seed, position):
    """Integers and coins exactly; Gumbel noise to a few roundings."""
    ids = torch.cat([torch.arange(4000), torch.tensor([128_255, 2**31 - 1] * 48)]).int().to(device())
    keys = (torch.tensor([x], device=device()) for x in (seed, position))
    integers = torch.full(ids.shape, -1, dtype=torch.int64, device=device())
    coins, noise = (torch.full(ids.shape, torch.nan, device=device()) for _ in range(2))
    _noise[(1,)](*keys, ids, integers, coins, noise, PURPOSE=int(purpose), COUNT=len(ids))
    expected = noise_integers(seed, purpose, position, ids.cpu())
    assert torch.equal(integers.cpu(), expected)
    assert torch.equal(coins.cpu(), to_uniform(expected))
    assert roundings(noise, expected) <= 3


@triton.jit
def _gumbel_of_integers(integers, noise, COUNT: tl.constexpr):
    lane = tl.arange(0, COUNT)
    u = uniform(tl.load(integers + lane).to(tl.uint32))
    w = 1.0 - u
    tl.store(noise + lane, -tl.log(-(tl.log(w) - (u - (1.0 - w)) * (1.0 + u))))


def test_noise_is_precise_over_its_whole_range():
    """As `gumbel` computes it, on integers of every size: the tails decide who wins."""
    powers = torch.tensor([2**k + d for k in range(33) for d in (-1, 0, 1) if 0 <= 2**k + d < 2**32])
    spread = torch.linspace(0, 2**32 - 1, 4096 - len(powers), dtype=torch.float64).long()
    integers = torch.cat([powers, spread]).to(device())
    noise = torch.full(integers.shape, torch.nan, device=device())
    _gumbel_of_integers[(1,)](integers, noise, COUNT=len(integers))
    assert roundings(noise, integers) <= 3
    assert roundings(to_gumbel(integers.cpu()), integers) <= 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "count, vocab, block, programs", [(1, 1, 2, 9), (3, 40, 16, 9), (2, 1000, 64, 8), (5, 129, 32, 1)]
)
def test_greedy_is_the_references(dtype, count, vocab, block, programs, monkeypatch):
    """One chunk and several, blocks that do not divide; half steps make ties, and the lowest id wins them."""
    monkeypatch.setattr(kernel, "BLOCK", block)
    monkeypatch.setattr(kernel, "PROGRAMS", programs)
    logits = (rows(count, vocab, torch.float32) * 2).round().div(2).to(dtype)
    with poisoned():
        tokens = kernel.greedy_nodes(logits)
    expected = [min((row == row.max()).nonzero().flatten().tolist()) for row in logits.cpu().float()]
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == reference.greedy_nodes(logits.cpu()).tolist() == expected


def test_ties_go_to_the_lowest_id_across_blocks_and_chunks(monkeypatch):
    """Equal scores in one lane of two blocks, in two chunks, everywhere."""
    monkeypatch.setattr(kernel, "BLOCK", 4)
    logits = torch.zeros(4, 40, device=device())
    logits[1, [9, 13, 33]] = logits[2, [31, 35]] = 1.0
    for programs in (1, 8, 40):
        monkeypatch.setattr(kernel, "PROGRAMS", programs)
        assert kernel.greedy_nodes(logits).tolist() == [0, 9, 31, 0]


def test_greedy_reads_rows_of_a_wider_buffer(monkeypatch):
    monkeypatch.setattr(kernel, "BLOCK", 16)
    wide = rows(6, 100)
    for view in (wide[::2, :50], wide[:, ::2], wide.t()):
        assert kernel.greedy_nodes(view).tolist() == view.max(-1).indices.tolist()
    assert kernel.greedy_nodes(wide[:0]).tolist() == []


BAD = {
    "nan": [0.0, torch.nan, 1.0],
    "nan first": [torch.nan, 5.0, 1.0],
    "inf": [0.0, torch.inf, torch.nan],
    "all forbidden": [-torch.inf] * 3,
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("block", [2, 16])
def test_rows_that_are_not_finite_are_marked_and_raise(name, block, monkeypatch):
    """Each beside a good row, greedy, sampled, with min-p; -inf itself is a forbidden token and no error."""
    monkeypatch.setattr(kernel, "BLOCK", block)
    logits = torch.tensor([BAD[name], [-torch.inf, 2.0, 1.0]], dtype=torch.float16, device=device())
    heat, keys, share = (torch.tensor(x, device=device()) for x in ([1.0, 1.0], [3, 3], [0.9, 0.9]))
    for marked in (
        kernel.greedy_nodes(logits),
        kernel.sample_rows(logits, heat, keys, keys),
        kernel.sample_rows(logits, heat, keys, keys, share),
        op.greedy_nodes(logits, checked=False),
        reference.greedy_nodes(logits),
        reference.sample_rows(logits, heat, keys, keys, share),
    ):
        assert marked[0] == -1
        assert marked[1] in (1, 2)
        with pytest.raises(FloatingPointError, match="not finite in float16"):
            check_tokens(marked.tolist(), logits.dtype)
    check_tokens(marked.tolist()[1:], logits.dtype)


@pytest.fixture
def forced():
    set_kernels("triton")
    yield
    set_kernels(None)


@pytest.mark.usefixtures("forced")
def test_the_public_ops_raise_by_themselves():
    bad = torch.tensor([[0.0, torch.nan], [0.0, 1.0]], dtype=torch.bfloat16, device=device())
    for call in (
        lambda: op.greedy_nodes(bad),
        lambda: op.sample_nodes(bad, [Filters(), Filters(1.0)], [0, 0], [0, 0]),
        lambda: op.sample_nodes(bad, [Filters(1.0, 1), Filters(1.0)], [0, 0], [0, 0]),
        lambda: op.sample_node(bad[0], Filters(1.0), 0, 0),
    ):
        with pytest.raises(FloatingPointError, match="not finite in bfloat16"):
            call()
    assert op.greedy_nodes(bad[1:]).tolist() == [1]


def drawn_alike(logits: Tensor, filters: list[Filters], seeds: list[int], positions: list[int], tokens: list[int]):
    """Each token is the reference's, or ties with it to 1e-5 of score (noise included)."""
    wanted = reference.sample_nodes(logits.cpu(), filters, seeds, positions).tolist()
    for row, each, seed, position, ours, theirs in zip(
        logits.cpu(), filters, seeds, positions, tokens, wanted, strict=True
    ):
        if ours != theirs:
            ids, scores = perturbed_scores(row, each, seed, position)
            kept = range(len(row)) if ids is None else ids.tolist()
            by_id = dict(zip(kept, scores.tolist(), strict=True))
            assert by_id[theirs] - by_id[ours] < 1e-5, (ours, theirs)
    return wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab, block, programs", [(7, 16, 9), (300, 64, 20), (1000, 512, 1)])
def test_draws_are_the_references(dtype, vocab, block, programs, monkeypatch):
    """Greedy, tempered and min-p rows in one launch; logits in bfloat16 tie often, and noise parts them."""
    monkeypatch.setattr(kernel, "BLOCK", block)
    monkeypatch.setattr(kernel, "PROGRAMS", programs)
    filters = [Filters(), Filters(1.0), Filters(0.6), Filters(1.7, min_p=0.3), Filters(1.0, min_p=1.0), Filters(0.1)]
    seeds, positions = [3, 2**32 - 1, 5, 2**40, -1, 0], [9, 0, 131_072, 7, 2**31 - 1, 1]
    logits = rows(6, vocab, dtype)
    with poisoned():
        tokens = kernel.sample_nodes(logits, filters, seeds, positions).tolist()
    wanted = drawn_alike(logits, filters, seeds, positions, tokens)
    # these seeds have no near tie
    assert tokens == wanted


def test_rows_with_an_order_are_the_references():
    """top-k and top-p rows among fused ones, and alone."""
    filters = [Filters(1.0, top_k=3), Filters(1.0), Filters(0.8, top_p=0.5), Filters(0.0, 5, 0.5), Filters(1.0, 4, 0.9)]
    assert [kernel.is_fused(each) for each in filters] == [False, True, False, True, False]
    logits, keys = rows(5, 60), [1, 2, 3, 4, 5]
    with poisoned():
        tokens = kernel.sample_nodes(logits, filters, keys, keys).tolist()
    assert tokens == reference.sample_nodes(logits, filters, keys, keys).tolist()
    assert kernel.sample_nodes(logits[:1], filters[:1], [1], [1]).tolist() == tokens[:1]
    assert kernel.sample_nodes(logits[:0], [], [], []).tolist() == []


@pytest.mark.usefixtures("forced")
def test_one_row_is_drawn_as_among_others():
    """What the engine calls for a visited node."""
    logits, settings_of = rows(4, 200), [Filters(), Filters(0.7), Filters(1.0, min_p=0.1), Filters(1.0, 5, 0.9)]
    together = op.sample_nodes(logits, settings_of, [1, 2, 3, 4], [5, 6, 7, 8]).tolist()
    alone = [op.sample_node(logits[r], settings_of[r], r + 1, r + 5) for r in range(4)]
    assert alone == together == [reference.sample_node(logits[r], settings_of[r], r + 1, r + 5) for r in range(4)]


@pytest.mark.full
def test_draws_follow_the_law():
    """1000 positions in one launch, eight tokens: counts within five deviations, and what min-p cuts never."""
    draws, p = 1000, torch.tensor([0.3, 0.25, 0.2, 0.1, 0.08, 0.04, 0.02, 0.01])
    logits = p.log().expand(draws, 8).contiguous().to(device())
    heat, seeds = torch.ones(draws, device=device()), torch.full((draws,), 11, device=device())
    share = torch.full((draws,), 0.25, device=device())
    positions = torch.arange(draws, device=device())
    for min_p, law in ((None, p), (share, p.where(p >= 0.25 * 0.3, 0))):
        law = law / law.sum()
        counts = kernel.sample_rows(logits, heat, seeds, positions, min_p).bincount(minlength=8).cpu()
        assert counts[law == 0].sum() == 0
        assert ((counts - draws * law).abs() <= 5 * (draws * law * (1 - law)).sqrt()).all()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.integers(1, 200),
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.3, 1.0, 2.0]), st.sampled_from([0.0, 0.05, 0.5])), min_size=1, max_size=4
    ),
    st.sampled_from(DTYPES),
    st.integers(0, 2**40),
    st.booleans(),
)
def test_any_rows_are_the_references(vocab, heats, dtype, seed, forbid):
    """Random rows, some tokens forbidden; equal to the reference but for ties to 1e-5."""
    logits = rows(len(heats), vocab, dtype, seed=seed % 1000)
    if forbid and vocab > 1:
        logits[:, 1::2] = -torch.inf
    filters = [Filters(heat, min_p=share) for heat, share in heats]
    keys = [seed + r for r in range(len(heats))]
    with pytest.MonkeyPatch.context() as patch, poisoned():
        patch.setattr(kernel, "BLOCK", 64)
        tokens = kernel.sample_nodes(logits, filters, keys, keys).tolist()
    # at the very edge of min-p a rounding decides: none of these laws has a token there
    drawn_alike(logits, filters, keys, keys, tokens)


@pytest.mark.full
@pytest.mark.parametrize(
    "dtype, count, vocab, block", list(itertools.product(DTYPES, (1, 3, 24, 60, 130), (33, 4096), (128, 2048)))
)
def test_grid(dtype, count, vocab, block, monkeypatch):
    monkeypatch.setattr(kernel, "BLOCK", block)
    logits = rows(count, vocab, dtype, seed=count)
    assert kernel.greedy_nodes(logits).tolist() == reference.greedy_nodes(logits.cpu()).tolist()
    filters = [
        Filters(*each) for each in itertools.islice(itertools.cycle([(0.0,), (0.7,), (1.0, 0, 1.0, 0.1)]), count)
    ]
    keys = list(range(count))
    drawn_alike(logits, filters, keys, keys, kernel.sample_nodes(logits, filters, keys, keys).tolist())
