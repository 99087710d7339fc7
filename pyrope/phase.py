"""cos(mθ) and sin(mθ), exact to the last bit or so at any position, and the same bits everywhere.

The naive form rounds θ, then m·θ, and asks for the sine of a large number: at m = 2³¹ it is off by 2e-7 in float64.
Here θ/2π is a 128-bit fixed-point fraction of a turn, so that m·θ modulo one turn is a wrapping integer product. The
nearest quarter turn is taken off, the rest becomes an angle of at most π/4 in two float64 numbers, and its sine and
cosine are short Taylor sums: integers, and IEEE additions and multiplications, the same on every platform and backend.

Error: θ/2π is off by at most 2⁻¹²⁹, so the angle by m·2⁻¹²⁹ of a turn. Where mθ comes so near to a multiple of π/2 that
this would show (nearer than m·2⁻⁷¹ of a turn: about one entry in 10¹¹, or none, unless the base was chosen for it), the
entry is computed anew from the 60-digit θ. Elsewhere the sums and their final rounding stay below 0.9 ulp in float64;
an attention factor a ≠ 1 brings its own rounding and that of the product: 2.5 ulp.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from . import checks
from .backend import on_host
from .theta import DECIMAL, TWO_PI, Rope, check_rope, exact_frequencies
from .tiles import cuts, each

Float64: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Int64: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Uint64: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]

_TILE = 2**16  # entries worked on at a time: with fewer, threads spend longer on waiting for the interpreter

# 2π·2⁻⁶⁴, one unit of the high limb as an angle: rounded, and as a sum of its upper 26 bits and the rest,
# so that products with the upper 26 bits of another number are exact (Dekker's way, without an fma).
with localcontext(DECIMAL):
    _UNIT = float(TWO_PI / 2**64)
    _UNIT_A = math.ldexp(math.floor(math.ldexp(_UNIT, 87)), -87)
    _UNIT_B = float(TWO_PI / 2**64 - Decimal(_UNIT_A))
_SIGN = np.uint64(1 << 63)  # of a float64

# 1/k! with the signs of the Taylor sums, highest order first: sin without its first term, cos without its first two.
_SIN = [(-1.0) ** (k // 2) / math.factorial(k) for k in range(17, 2, -2)]
_COS = [(-1.0) ** (k // 2) / math.factorial(k) for k in range(18, 3, -2)]


@lru_cache(maxsize=256)
def _turns(rope: Rope) -> list[Uint64]:
    """θ/2π modulo 1: its upper and its lower 64 bits, and of the latter the upper and the lower half, each (p,)."""
    with localcontext(DECIMAL):
        exact = [int((t / TWO_PI * 2**128).to_integral_value()) for t in exact_frequencies(rope)]
    parts = ((64, 64), (0, 64), (32, 32), (0, 32))
    return [np.array([t >> shift & 2**bits - 1 for t in exact], np.uint64) for shift, bits in parts]


def _taylor(z: Float64, coefficients: list[float]) -> Float64:
    out = z * coefficients[0]
    for coefficient in coefficients[1:-1]:
        out += coefficient
        out *= z
    out += coefficients[-1]
    return out


def _angle(rest: Int64, low: Uint64) -> tuple[Float64, Float64]:
    """(rest + low·2⁻⁶⁴)·2π·2⁻⁶⁴ as an unevaluated sum of two float64; |rest| ≤ 2⁶¹."""
    # The upper 54 bits convert exactly, the next 61 with one rounding far below what matters.
    head = (rest & -256).astype(np.float64)
    tail = ((low >> 11).view(np.int64) | (rest & 255) << 53) * 2.0**-53
    big = head + tail
    x = big * _UNIT
    big.view(np.int64)[...] &= -1 << 27  # its upper 26 bits; what they leave is in head
    head -= big
    head += tail
    error = big * _UNIT_A
    error -= x
    error += big * _UNIT_B
    error += head * _UNIT
    return x, error


def _cos_sin_tile(m: Int64, turns: list[Uint64], theta: tuple[Decimal, ...]) -> tuple[Float64, Float64]:
    """cos and sin for positions m of shape (rows, 1) or (rows, p), each (rows, p)."""
    size = np.abs(m).view(np.uint64)
    high, low, low_high, low_low = turns
    # m·θ/2π mod 1 and an eighth, upper 64 bits; size ≤ 2³¹, so the sum for the carry cannot overflow.
    turn = size * low_low
    turn >>= 32
    turn += size * low_high
    turn >>= 32
    turn += size * high
    turn += 2**61
    # Its first two bits are now the nearest quarter turn, the other 62 say how far from there.
    x, error = _angle((turn & (2**62 - 1)).view(np.int64) - 2**61, size * low)
    z = x * x
    half = z * 0.5
    lead = 1.0 - half
    # cos(x + e) = 1 − z/2 + (z²·C(z) − x·e), where 1 − z/2 is rounded: what that lost is taken up again.
    cos = _taylor(z, _COS)
    cos *= z
    cos *= z
    cos -= x * error
    cos += 1.0 - lead - half
    cos += lead
    # sin(x + e) = x + (x·z·S(z) + e·(1 − z/2)), all in the bracket small beside x.
    sin = _taylor(z, _SIN)
    sin *= z
    sin *= x
    error *= lead
    sin += error
    sin += x
    # A quarter turn more: (cos, sin) → (−sin, cos). Negated by the sign bit; sin is odd in m.
    odd = (turn & 2**62) != 0
    cos, sin = np.where(odd, sin, cos), np.where(odd, cos, sin)
    cos.view(np.uint64)[...] ^= (turn ^ turn << 1) & _SIGN
    sin.view(np.uint64)[...] ^= (turn ^ m.view(np.uint64)) & _SIGN
    for row, i in _near_quarters(x, size, theta):
        cos[row, i], sin[row, i] = _slowly(int(m[row, min(i, m.shape[1] - 1)]), theta[i])
    return cos, sin


def _near_quarters(x: Float64, size: Uint64, theta: tuple[Decimal, ...]) -> list[list[int]]:
    """Where |x| is so small that the last bits of θ/2π matter: below (m·2⁻⁷ + 2¹²) units of 2⁻⁶⁴ turns. Pairs that do
    not turn are exact."""
    largest, least = (float(size.max()) * 2.0**-7 + 4096.0) * _UNIT, np.abs(x)
    if least.min() > largest:  # one cheap pass, and nothing more for most tiles
        return []
    near = (least < (size * 2.0**-7 + 4096.0) * _UNIT) & (size != 0) & [bool(t) for t in theta]
    return np.argwhere(near).tolist()


def _slowly(m: int, theta: Decimal) -> tuple[float, float]:
    """cos(mθ) and sin(mθ) of one position very near to a multiple of a quarter turn, in decimal."""
    with localcontext(DECIMAL) as context:
        context.prec = 90
        turns = m * theta / TWO_PI
        quarter = int((4 * turns).to_integral_value())
        x = (turns - Decimal(quarter) / 4) * TWO_PI
        sin = float(x)  # |x| < 10⁻¹¹: the next terms of both sums are below 10⁻²² of the first
    return ((1.0, sin), (-sin, 1.0), (-1.0, -sin), (sin, -1.0))[quarter % 4]


def check_positions(value: Any, rope: Rope) -> np.ndarray[Any, np.dtype[np.integer[Any]]]:
    """Positions as an array, if they are integers of at most 2³¹ in size and fit the axes of a rope with fixed Θ."""
    axes, m = check_rope(rope).axes, checks.positions("positions", on_host(value))
    if axes is not None and (m.ndim == 0 or m.shape[0] != axes.count):
        rule = f"positions must have a first axis of {axes.count}, one row for each axis of the rope"
        raise ValueError(f"{rule}, had shape {m.shape}")
    return m


def cos_sin(positions: Any, rope: Rope, dtype: Any = np.float64) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """cos(mθ) and sin(mθ), times the attention factor: positions (…, n) -> two arrays (…, n, p).

    >>> rope = Rope(4, 10000.0, "interleaved")
    >>> cos, sin = cos_sin([0, 1, 2**31], rope)
    >>> sin.round(6)
    array([[ 0.      ,  0.      ],
           [ 0.841471,  0.01    ],
           [-0.97131 ,  0.694186]])

    Each number is within 1 ulp of the true one in float64 (2.5 where an attention factor multiplies it)
    and rounded from that once in the other dtypes. A rope with axes takes positions (axes, …, n).
    """
    m = check_positions(positions, rope)
    try:
        dtype = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"dtype must be float64, float32, float16 or ml_dtypes.bfloat16: {error}") from error
    if dtype.name not in ("float64", "float32", "float16", "bfloat16") or not dtype.isnative:
        raise TypeError(f"dtype must be float64, float32, float16 or bfloat16, was {dtype}")
    cos, sin = np.empty((2, *(m.shape if rope.axes is None else m.shape[1:]), rope.pairs), dtype)
    fill_cos_sin(m, rope, cos, sin)
    return cos, sin


def fill_cos_sin(m: np.ndarray[Any, Any], rope: Rope, cos: np.ndarray[Any, Any], sin: np.ndarray[Any, Any]) -> None:
    """`cos_sin` without its checks, into arrays (…, n, p) whose first axes are one behind the other in memory."""
    p, axes, factor = rope.pairs, rope.axes, rope.attention_factor
    cos, sin = cos.reshape(-1, p), sin.reshape(-1, p)
    owner = [0] if axes is None else [axis for axis, _ in axes.assign(p)]
    theta, turns = exact_frequencies(rope), _turns(rope)
    rounded = _eight_bits if cos.dtype.name == "bfloat16" else np.asarray

    def fill(tile: slice) -> None:
        # Only a tile is ever converted to int64 or spread over the pairs: positions may be as large as the result.
        at = np.stack([axis.flat[tile] for axis in (m[None] if axes is None else m)], axis=-1).astype(np.int64)
        c, s = _cos_sin_tile(at[:, owner], turns, theta)
        if factor != 1.0:
            c *= factor
            s *= factor
        cos[tile], sin[tile] = rounded(c), rounded(s if rope.direction == 1 else -s)

    each(fill, cuts(len(cos), max(1, _TILE // p)))


def _eight_bits(x: Float64) -> Float64:
    """x rounded to the 8 bits of bfloat16: ml_dtypes would round twice, by way of float32: 1 + 2⁻⁸ + 2⁻⁴⁰ to 1."""
    mantissa, exponent = np.frexp(x)
    return np.asarray(np.ldexp(np.rint(mantissa * 2**8), exponent - 8))
