"""noise.py inside Triton kernels: the same integers, and Gumbel noise of them to a rounding or two."""

import triton
import triton.language as tl

from eagle3_kernels.sample_nodes.noise import _BELOW_ONE, _GOLDEN, _ROUNDS, Purpose

TARGET = tl.constexpr(int(Purpose.TARGET))
ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
RESIDUAL = tl.constexpr(int(Purpose.RESIDUAL))
GOLDEN = tl.constexpr(_GOLDEN)
BELOW_ONE = tl.constexpr(_BELOW_ONE)
SCALE = tl.constexpr(2.0**-32)
SHIFT_0, FACTOR_0 = (tl.constexpr(x) for x in _ROUNDS[0])
SHIFT_1, FACTOR_1 = (tl.constexpr(x) for x in _ROUNDS[1])
SHIFT_2 = tl.constexpr(_ROUNDS[2][0])


@triton.jit
def mix(x):
    """noise.mix of uint32 words."""
    x = (x ^ (x >> SHIFT_0)) * FACTOR_0
    x = (x ^ (x >> SHIFT_1)) * FACTOR_1
    return x ^ (x >> SHIFT_2)


@triton.jit
def _absorb(state, word):
    """Both halves of an int64 word."""
    state = mix((state ^ mix(word.to(tl.uint32))) + GOLDEN)
    return mix((state ^ mix((word >> 32).to(tl.uint32))) + GOLDEN)


@triton.jit
def noise_key(seed, purpose: tl.constexpr, position):
    """noise.hash_words(seed, purpose, position) of int64 scalars, uint32."""
    state = _absorb(tl.full((), GOLDEN, tl.uint32), seed)
    state = _absorb(state, tl.full((), purpose, tl.int64))
    return _absorb(state, position)


@triton.jit
def noise_integers(key, ids):
    """Uniform uint32 of each int32 id."""
    return mix(key ^ mix(ids.to(tl.uint32)))


@triton.jit
def uniform(integers):
    """noise.to_uniform, float32 in [0, 1)."""
    return tl.minimum((integers.to(tl.float32) + 0.5) * SCALE, BELOW_ONE)


@triton.jit
def gumbel(key, ids):
    """Standard Gumbel noise of each id, float32: -log(-log1p(-u))."""
    u = uniform(noise_integers(key, ids))
    # there is no log1p: log(w), and to first order what rounding 1 - u to w left out
    w = 1.0 - u
    log1p = tl.log(w) - (u - (1.0 - w)) * (1.0 + u)
    return -tl.log(-log1p)
