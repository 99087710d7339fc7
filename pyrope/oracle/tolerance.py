"""How far a rotation may be from the truth: roundings counted one by one, none of them measured.

u is the unit roundoff of a dtype, 2⁻²⁴ for float32. A library's power is taken to be good to 1 ulp = 2u, the same
for cos and sin; every other operation rounds once, and every float64 parameter that meets a float32 array is
rounded once. Each grade of precision is a bound on the error of one output; a candidate has the first that holds:

- rounded once: the product is computed in a wider dtype (unit w) from an exact or a float64 angle:
  u·|out| + 4w·(|x·cos| + |y·sin|): table, product and sum in w, and the truth's own last place.
- tables or products in x's dtype: both are rounded to u, and the sum: 2u·(|x·cos| + |y·sin|) + u·|out|. An
  attention factor that multiplies a table brings another u.
- float64 angle (seen where x is float64), float32 angle: the angle's error, |z|·m·θ·`theta_bound`, on top of
  `float32_bound`'s 6 roundings in that dtype.
- float32 angle, and tables or products in x's dtype: the sum of the two.

Below its smallest normal number a dtype rounds to a fixed step, so that each of them also has half of that step for
each rounding: it matters in float16, where a sine of 10⁻⁶ has four bits.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..phase import cos_sin
from ..theta import DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN, check_rope, frequencies
from .tensors import UNIT

Float64: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

U32 = 2.0**-24
U64 = 2.0**-53
_EXACT = 2**24  # whole numbers up to here are float32 numbers
SECOND_ORDER = 1 + 2.0**-10  # products of roundings, far below the roundings themselves
# Half the smallest subnormal number.
_STEP = {"float16": 2.0**-25, "bfloat16": 2.0**-134, "float32": 2.0**-150, "float64": 2.0**-1074}

ONCE, LOW_TABLES, ANGLE64, ANGLE32, BOTH, LOW_ANGLE = GRADES = (
    "rounded once",
    "tables or products in x's dtype",
    "float64 angle",
    "float32 angle",
    "float32 angle, and tables or products in x's dtype",
    "low-precision angle",
)
# What a candidate of this dtype can be told to have, best first. In float32 the products are those of a float32 angle.
_APPLICABLE = {
    "float16": (ONCE, LOW_TABLES, ANGLE32, BOTH),
    "bfloat16": (ONCE, LOW_TABLES, ANGLE32, BOTH),
    "float32": (ONCE, LOW_TABLES, ANGLE32),
    "float64": (LOW_TABLES, ANGLE64, ANGLE32),
}


def theta_bound(rope: Rope, *, tensor_length: bool = False, logarithm: bool = False) -> Float64:
    """Relative error allowed to each float32 θ_i of a correct float32 pipeline, (p,).

    w_i = 1/base^e with e = 2i/r: the exponent is rounded (e·ln base), base is rounded (e ≤ 1), the power has 2, the
    reciprocal 1, together at most 4 + e·ln base, in units of u. With ``logarithm``, w_i = exp(−e·ln base), as MLX has
    it: the logarithm has 2, its product or quotient with i and r 1 each, all of them times e·ln base: 4 + 4·e·ln base
    with the exponential and the base. On top of it, for each rescaling:

    linear, longrope, proportional: the factor is rounded, and the product or quotient with it: 2.

    yarn: w·((1 − γ) + γ/s), in float32 as a·γ' + b·γ'' with a = 1/(s·base^e): 2 for s, then 2 for product and sum.
    γ'' = 1 − γ has its own rounding, ½, and the error of γ; γ' = 1 − γ'' carries the same errors with the other sign,
    so that they meet the difference of the two frequencies, (1 − 1/s)·w, and another ½ that meets γ' alone: 1/s·w ≤ θ.
    γ = (i − lo)/(hi − lo) has 1 rounding with whole lo and hi. If they are not truncated, both and the difference
    i − lo are rounded as well: lo/(hi − lo) + 2 more.

    llama3: with E = 4 + e·ln base, t = (L₀/λ − low)/(high − low) where L₀/λ has E + 3; low, the difference, the
    denominator and the quotient are rounded: (L₀/λ·(E + 3) + low)/(high − low) + 3, and 1 − t once more. Its
    error meets (1 − 1/s)·w as above. Factors, products and the sum outside of t: 5.

    dynamic: θ_i = 1/base'^e. If the length is a Python integer, base' is computed in float64 and rounded once, as
    above with base' for base. If it is a tensor, as in a forward pass, base' is computed in float32. With g = s·N/L −
    (s − 1) and k = r/(r − 2): s, its product with N and the quotient by L are rounded, 3·s·N/L; s − 1 and g itself are:
    relative to g that is ρ = (3·s·N/L + (s − 1) + g)/g, the term that grows with s where N is just above L.
    g^k makes k·ρ of it, adds k·ln g for the rounded exponent and 2 for the power; base and the product add 2.
    All of this meets the exponent e: in all e·(k·ρ + k·ln g + 4) + e·ln base' + 3.

    >>> (theta_bound(Rope(4, 10000.0, "half")) * 2**24).round(1)
    array([4. , 8.6])
    """
    r, scaling = check_rope(rope).width, rope.scaling
    e = 2 * np.arange(rope.pairs) / r
    delta: Any
    steps = 4 if logarithm else 1
    errors = 4 + steps * e * math.log(rope.base)
    w = rope.base**-e
    if isinstance(scaling, Linear | LongRoPE | Proportional):
        errors = errors + 2
    elif isinstance(scaling, YaRN):
        s, log_base = scaling.factor, math.log(rope.base)
        lo, hi = (
            r * math.log(scaling.original_length / (2 * math.pi * beta)) / (2 * log_base)
            for beta in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            lo, hi = math.floor(lo), math.ceil(hi)
        lo, hi = max(lo, 0), min(hi, r - 1)
        hi += 0.001 * (lo == hi)
        gamma = (np.arange(rope.pairs) - lo) / (hi - lo)
        delta = 1.5 if scaling.truncate else 3.5 + abs(lo / (hi - lo))
        theta = w * (1 - np.clip(gamma, 0, 1) * (1 - 1 / s))
        errors = errors + 4.5 + np.where(_in_ramp(gamma), (1 - 1 / s) * delta * w / theta, 0)
    elif isinstance(scaling, Llama3):
        s, span = scaling.factor, scaling.high - scaling.low
        turns = scaling.original_length * w / (2 * math.pi)
        t = (turns - scaling.low) / span
        delta = (turns * (errors + 3) + scaling.low) / span + 4
        theta = w * (1 - (1 - np.clip(t, 0, 1)) * (1 - 1 / s))
        errors = errors + 5 + np.where(_in_ramp(t), (1 - 1 / s) * delta * w / theta, 0)
    elif isinstance(scaling, DynamicNTK):
        s, k = scaling.factor, r / (r - 2)
        ratio = max((scaling.length or 0) / scaling.original_length, 1.0)
        g = s * ratio - (s - 1)
        log_base = math.log(rope.base) + k * math.log(g)
        errors = 4 + steps * e * log_base
        if tensor_length:
            rho = (3 * s * ratio + (s - 1) + g) / g
            errors = 3 + e * (k * rho + k * math.log(g) + 4) + steps * e * log_base
    if rope.axes is not None:
        errors = errors[[index for _, index in rope.axes.assign(rope.pairs)]]
    return np.asarray(errors * U32 * SECOND_ORDER)


def _in_ramp(t: Any) -> Any:
    """Where a blend depends on t, or may do so after t was rounded."""
    return (t > -1e-3) & (t < 1 + 1e-3)


def angle_bound(rope: Rope, *, logarithm: bool = False, large: bool = False) -> Float64:
    """Relative error allowed to each float32 angle m·θ_i, (p,): that of θ_i, by a power or a logarithm, and one
    rounding more; two where m is ``large``, above 2²⁴, and is rounded itself.

    Nothing is rounded at all in the first pair where θ₀ = base⁰ = 1, or that over a power of two: the power, the
    quotient, a ramp that has not begun or has ended, and the product with m ≤ 2²⁴ are exact. There a library's sine
    shows its own error.
    """
    bound = theta_bound(rope, tensor_length=True, logarithm=logarithm) + (1 + large) * U32
    if math.frexp(float(frequencies(rope)[0]))[0] == 0.5:
        bound[0] = large * U32
    return bound


def decides_up_to(rope: Rope) -> int:
    """The position where a correct float32 angle may be half a turn off: beyond it a float32 pipeline is not decided.

    >>> decides_up_to(Rope(128, 10000.0, "half"))
    11823192
    """
    small, large = (
        math.pi / float((frequencies(rope) * angle_bound(rope, large=large)).max() or 1e-300) for large in (False, True)
    )
    return int(small if small <= _EXACT else min(max(large, _EXACT), 2**31))


class PairErrors(NamedTuple):
    """What errors of a rotation of x (…, n, d) are measured in, each like its rotated features (…, n, r)."""

    sums: Float64  # |x·cos| + |y·sin|
    size: Float64  # |z|·|a·m·θ|, z a pair as a complex number: a relative error of the angle, times this, is one of z
    relative: Float64  # the bound of a float32 angle, relative to it
    length: Float64  # a·|z|: the length of the pair


def pair_errors(x: Any, positions: Any, rope: Rope, *, logarithm: bool = False) -> PairErrors:
    """The measures of `PairErrors`, written in the order of the rope's layout."""
    start = 0 if rope.placement == "prefix" else rope.head_dim - rope.width
    turned = np.asarray(x, np.float64)[..., start : start + rope.width]
    p = rope.pairs
    if rope.layout == "half":
        first, second = turned[..., :p], turned[..., p:]
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
    cos, sin = cos_sin(rope, positions)
    m = np.asarray(positions, np.float64)
    if rope.axes is None:
        m = np.broadcast_to(m[..., None], cos.shape)
    else:
        m = np.moveaxis(m[[axis for axis, _ in rope.axes.assign(p)]], 0, -1)
    length = np.hypot(first, second) * rope.attention_factor
    size = length * (np.abs(m) * frequencies(rope))
    sums = np.abs(first * cos) + np.abs(second * sin), np.abs(second * cos) + np.abs(first * sin)
    exact, large = (angle_bound(rope, logarithm=logarithm, large=large) for large in (False, True))
    relative = np.broadcast_to(np.where(np.abs(m) <= _EXACT, exact, large), size.shape)
    both = ((value, value) for value in (size, relative, length))
    return PairErrors(*(_written(*pair, rope) for pair in (sums, *both)))


def _written(first: Any, second: Any, rope: Rope) -> Float64:
    """Values of the first and second features of the pairs in the order in which the layout writes them."""
    if rope.layout == "interleaved":
        return np.stack((first, second), -1).reshape(*first.shape[:-1], -1)
    return np.concatenate((first, second), -1)


def float32_bound(x: Any, positions: Any, rope: Rope) -> Float64:
    """Error allowed to each feature of a rotation by a correct float32 pipeline, tables and all; 0 where nothing turns.

    The angle's error as above. cos and sin have 2, an attention factor brings 2 (itself and its product), the product
    with x has 1: 5u·(|x·cos| + |y·sin|). The sum has u·|out|, and |out| ≤ |x·cos| + |y·sin|: 6u.
    """
    measures = pair_errors(x, positions, rope)
    bound = np.zeros(np.shape(x))
    start = 0 if rope.placement == "prefix" else rope.head_dim - rope.width
    rounded = measures.size * measures.relative + 6 * U32 * measures.sums
    bound[..., start : start + rope.width] = rounded * SECOND_ORDER
    return bound


def grades(dtype: np.dtype[Any]) -> tuple[str, ...]:
    """The grades that a correct candidate of this dtype can have, best first."""
    return _APPLICABLE[dtype.name]


def bound(grade: str, measures: PairErrors, truth: Float64, dtype: np.dtype[Any], factor: float = 1.0) -> Float64:
    """Error allowed to the rotated features of this truth, (…, n, r), by a grade; derived at the head of this file."""
    u, w = UNIT[dtype.name], U32 if dtype.itemsize == 2 else U64
    rest = u * np.abs(truth) + 4 * w * measures.sums + measures.size * measures.relative * (U64 / U32)
    rest += _STEP[dtype.name] * (2 + 2 * measures.length)
    if grade in (LOW_TABLES, ANGLE64, BOTH):
        rest += (2 + (factor != 1.0)) * u * measures.sums
    if grade == ANGLE64:
        rest += 6 * U64 * measures.sums
    if grade in (ANGLE32, BOTH):
        rest += measures.size * measures.relative + 6 * U32 * measures.sums
    if grade in (ONCE, LOW_TABLES) and dtype.name == "float64":
        rest -= measures.size * measures.relative * (U64 / U32)  # here a float64 angle is a grade of its own
    return np.asarray(rest * SECOND_ORDER)
