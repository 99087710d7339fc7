"""How far a rotation may be from the truth: roundings counted one by one, none of them measured.

u is the unit roundoff of x's dtype, w that of the dtype it is computed in. A library's power is taken to be good to
1 ulp = 2u, the same for cos and sin; every other operation rounds once, and so does a float64 parameter that meets a
float32 array. Each grade of precision is a bound on the error of one output; a candidate has the first that holds:

- rounded once: the product is computed in a wider dtype (unit w) from an exact or a float64 angle:
  u·|out| + 4w·(|x·cos| + |y·sin|): table, product and sum in w, and the truth's own last place.
- tables or products in x's dtype: both are rounded to u, and the sum: 2u·(|x·cos| + |y·sin|) + u·|out|. An attention
  factor that multiplies a table brings another u.
- float64 angle (seen where x is float64), float32 angle (where x is float64, x keeps its bits at position 0, whatever
  the dtype of the tables is): the error of the angle (`angle_errors`), times the length of
  the pair, and 6 roundings in that dtype: cos and sin have 2, an attention factor brings 2 (itself and its product),
  the product with x has 1, the sum has u·|out| ≤ u·(|x·cos| + |y·sin|).
- float32 angle, and tables or products in x's dtype: the sum of the two.

Below its smallest normal number a dtype rounds to a fixed step, so that each of them also has half of that step for
each rounding: it matters in float16, where a sine of 10⁻⁶ has four bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..backend import Array
from ..definition import pairs, rotate
from ..files import dtype_named
from ..phase import cos_sin
from ..theta import DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN, check_rope, frequencies
from .candidate import UNIT

U32, U64 = UNIT["float32"], UNIT["float64"]
EXACT = 2**24  # whole numbers up to here are float32 numbers
SECOND_ORDER = 1 + 2.0**-10  # products of roundings, far below the roundings themselves
# A float32 angle that is reduced to one turn first, or a table in fixed point, has an absolute error: up to this it is
# as good as a float32 angle, though not where that one is exact. A float16 table has 250 times as much.
REDUCED = 2.0**-20
# A phase that wraps at 2³² for a turn has steps that are off by one unit at most, in all pairs alike: 1/40 of what one
# rounding of a float32 angle is off by where θ = 1.
PHASE = 2 * math.pi * 2.0**-32
FIXED = 1 / 16  # of a narrow dtype's unit: the same for a table in fixed point beside tables in that dtype
# Half the smallest subnormal number.
HALF_STEP = {"float16": 2.0**-25, "bfloat16": 2.0**-134, "float32": 2.0**-150, "float64": 2.0**-1074}

ONCE, TABLES, ANGLE64, ANGLE32, BOTH = GRADES = (
    "rounded once",
    "tables or products in x's dtype",
    "float64 angle",
    "float32 angle",
    "float32 angle, and tables or products in x's dtype",
)
# What a candidate of this dtype can have, best first. In float32 the products are those of a float32 angle.
APPLICABLE = {
    "float16": (ONCE, TABLES, ANGLE32, BOTH),
    "bfloat16": (ONCE, TABLES, ANGLE32, BOTH),
    "float32": (ONCE, TABLES, ANGLE32),
    "float64": (TABLES, ANGLE64, ANGLE32),
}


def float_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype, or the dtype of this name, if it is one of those that are judged."""
    try:
        known: np.dtype[Any] = dtype_named(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f"dtype must be one of {', '.join(UNIT)}, was {dtype!r}") from error
    if known.name not in UNIT or not known.isnative:
        raise TypeError(f"dtype must be one of {', '.join(UNIT)}, was {known}")
    return known


def exponents(rope: Rope) -> Array:
    """e of θ = base^(−e) without a rescaling, (p,): 2i/r, or that of the series of its axis."""
    if rope.axes is None:
        return 2 * np.arange(rope.pairs) / rope.width
    dealt = zip(rope.axes.assign(rope.pairs), rope.axes.widths(rope.pairs), strict=True)
    return np.array([2 * j / width for (_, j), width in dealt])


def theta_errors(rope: Rope) -> Array:
    """Relative error, in units of u, allowed to each float32 θ_i of a correct float32 pipeline, (p,).

    w_i = 1/base^e with e = 2i/r: the exponent is rounded (e·ln base), base is rounded (e ≤ 1), the power has 2, the
    reciprocal 1, together at most 4 + e·ln base. As exp(−e·ln base), which is MLX's way, the logarithm has 2, its
    product or quotient with i and r 1 each, all of them times e·ln base: 4 + 4·e·ln base with the exponential and the
    base. By a running product, which is ggml's way, pair i has the error of the ratio, 2, and one product's, 1, for
    each pair before it: 4 + 3i = 4 + 1.5·e·r. The greater of the last two is allowed. On top of it, for each rescaling:

    linear, longrope, proportional: the factor is rounded, and the product or quotient with it: 2.

    dynamic: base' may be computed in float32, where the length is a tensor. With g = s·N/L − (s − 1) and k = r/(r − 2):
    s, its product with N and the quotient by L are rounded, 3·s·N/L; s − 1 and g itself are: relative to g that is
    ρ = (3·s·N/L + (s − 1) + g)/g, the term that grows with s where N is just above L. g^k makes k·ρ of it, adds k·ln g
    for the rounded exponent and 2 for the power; base and the product add 2: all of this meets the exponent e.
    """
    scaling, e = check_rope(rope).scaling, exponents(rope)
    if isinstance(scaling, DynamicNTK):
        s, k = scaling.factor, rope.width / (rope.width - 2)
        ratio = max((scaling.length or 0) / scaling.original_length, 1.0)
        g = s * ratio - (s - 1)
        rho = (3 * s * ratio + (s - 1) + g) / g
        log_base = math.log(rope.base) + k * math.log(g)
        return np.maximum(4 * e * log_base, 1.5 * e * rope.width) + 4 + e * (k * rho + k * math.log(g) + 4)
    errors = 4 + np.maximum(4 * e * math.log(rope.base), 1.5 * e * rope.width)
    if isinstance(scaling, Linear | LongRoPE | Proportional):
        return errors + 2
    if isinstance(scaling, YaRN | Llama3):
        return errors + 5 + _blend_errors(rope, scaling, errors)
    return errors


def _blend_errors(rope: Rope, scaling: YaRN | Llama3, errors: Array) -> Array:
    """What the blend of a ramp adds to the errors of w_i, beside 5 for factors, products and the sum: (p,).

    θ = w·(t + (1 − t)/s). An error δ of t meets the difference of the two frequencies, (1 − 1/s)·w, relative to θ; so
    it does next to the ramp, where t may fall into it when it is rounded.

    yarn: t = 1 − (i − lo)/(hi − lo) has 1 rounding with whole lo and hi, and ½ for 1 − t. If they are not truncated,
    both and the difference i − lo are rounded as well: lo/(hi − lo) + 2 more; 4 + i·(step of t) is at least that.

    llama3: t = (L₀/λ − low)/(high − low), where L₀/λ has the errors of w and 3 more; low, the difference, the
    denominator and the quotient are rounded: (L₀/λ·(errors + 3) + low)/(high − low) + 3, and 1 − t once more.
    """
    s, theta, w = scaling.factor, frequencies(rope), rope.base ** -exponents(rope)
    if s == 1:
        return np.zeros_like(theta)
    kept = (theta / w - 1 / s) / (1 - 1 / s)  # t: 1 as it was, 0 divided by s
    inside = (kept > 1e-9) & (kept < 1 - 1e-9)
    near = inside | np.roll(inside, 1) | np.roll(inside, -1)
    if isinstance(scaling, Llama3):
        turns, span = scaling.original_length * w / (2 * math.pi), max(scaling.high - scaling.low, 1e-9)
        delta = (turns * (errors + 3) + scaling.low) / span + 4
    else:
        delta = 4 + np.arange(rope.pairs) * np.abs(np.diff(kept, append=kept[-1])).max(initial=0)
    return np.where(near, (1 - 1 / s) * delta * w / theta, 0)


def angle_errors(rope: Rope, m: Array) -> Array:
    """How far off a float32 angle m·θ_i may be, for positions (…, 1) or (…, p) -> (…, p).

    That is the error of θ_i and one rounding of the product; where m > 2²⁴ it is rounded itself. A phase of 32 bits is
    off by one unit for each position instead. Nothing is rounded at all in the first pair of a series where θ is 1, or
    that over a power of two: the power, the quotient, a ramp that has not begun or has ended, and the product with
    m ≤ 2²⁴ are exact. There a library's sine shows its own error.
    """
    theta, size = frequencies(rope), np.abs(np.asarray(m, np.float64))
    large = size > EXACT
    exact = (np.frexp(theta)[0] == 0.5) & (exponents(rope) == 0)
    relative = np.where(exact, 0, theta_errors(rope) + 1) + large
    return size * (theta * relative * U32 + PHASE * (theta > 0))


def decides_up_to(rope: Rope) -> int:
    """The position where a correct float32 angle may be half a turn off: beyond it a float32 pipeline is not decided.

    >>> decides_up_to(Rope(128, 10000.0, "half"))
    5398171
    """
    rates = (float(angle_errors(rope, np.array([[m]])).max() / m) for m in (EXACT, 2 * EXACT))
    small, large = (math.pi / max(rate, 1e-300) for rate in rates)
    return int(small if small <= EXACT else min(max(large, EXACT), 2**31))


class ExactTables:
    """cos mθ and sin mθ of all positions that may be asked for, exact, and how far off float32 and float64 angles may
    be there: each (U, p), made once."""

    def __init__(self, rope: Rope, positions: Array) -> None:
        self.rope, self.known = rope, np.unique(positions)
        axes = 0 if rope.axes is None else rope.axes.count
        self.cos, self.sin = cos_sin(np.stack([self.known] * axes) if axes else self.known, rope)
        self.off32 = angle_errors(rope, self.known[:, None])
        relative = frequencies(rope) * (theta_errors(rope) + 2)
        self.off64 = np.abs(self.known)[:, None] * relative * U64
        self.owner = [axis for axis, _ in rope.axes.assign(rope.pairs)] if rope.axes is not None else [0] * rope.pairs

    def rows(self, positions: Array) -> Array:
        """Which rows of the tables these positions, of any shape, have."""
        return np.searchsorted(self.known, positions)

    def at(self, table: Array, rows: Array) -> Array:
        """These rows (axes, …, n) of a table: (…, n, p)."""
        if len(rows) == 1:
            return table[rows[0]]
        pair = np.arange(len(self.owner)).reshape(-1, *[1] * (rows.ndim - 1))
        return np.moveaxis(table[rows[self.owner], pair], 0, -1)


class Expected:
    """R(Θ, m)·x of one call, and how far off it each output may be: x (…, n, d), positions (axes, …, n) that broadcast
    to it, with one axis if the rope has none."""

    def __init__(self, tables: ExactTables, x: Array, positions: Array, dtype: str) -> None:
        self.tables, self.x, self.positions, self.dtype = tables, x, positions, dtype
        rope, self.rows = tables.rope, tables.rows(positions)
        self.cos, self.sin = tables.at(tables.cos, self.rows), tables.at(tables.sin, self.rows)
        self.reads, self.writes = pairs(rope.layout, rope.width, rope.start)
        self.y = rotate(x, self.cos, self.sin, self.reads, self.writes)

    def allowed(self, grade: str) -> Array:
        """The bound of this grade for each output, like x; derived at the head of this file."""
        factor, u = self.tables.rope.attention_factor, UNIT[self.dtype]
        w = U32 if self.dtype in ("float16", "bfloat16") else U64
        first, second = (np.abs(self.x[..., part]) for part in self.reads)
        cos, sin = np.abs(self.cos), np.abs(self.sin)
        length = np.sqrt(first * first + second * second) * factor
        fixed = length * (self._angle(grade) + 2 * HALF_STEP[self.dtype]) + 2 * HALF_STEP[self.dtype]
        more = {TABLES: 2 * u, ANGLE64: 2 * u + 6 * U64, ANGLE32: 6 * U32, BOTH: 2 * u + 6 * U32}.get(grade, 0.0)
        per_sum = 4 * w + more + u * (factor != 1 and grade in (TABLES, ANGLE64, BOTH))
        bound = np.abs(self.y) * u + HALF_STEP[self.dtype]  # what does not turn is copied
        for part, own, other in zip(self.writes, (first, second), (second, first), strict=True):
            bound[..., part] += per_sum * (own * cos + other * sin) + fixed
        if self.dtype == "float64" and grade == ANGLE32 and factor == 1:  # cos 0 = 1 in any dtype: x has all its bits
            still = np.broadcast_to(~self._angle32().any(axis=-1, keepdims=True), bound.shape)
            bound[still] = 16 * u * np.abs(self.x[still])
        return bound * SECOND_ORDER

    def _angle32(self) -> Array:
        return self.tables.at(self.tables.off32, self.rows)

    def _angle(self, grade: str) -> Any:
        """The error of the angle, (…, n, p)."""
        if grade in (ANGLE32, BOTH):
            fixed_point = FIXED * UNIT[self.dtype] if grade == BOTH else 0.0
            return self._angle32() + (REDUCED + fixed_point)
        if grade == TABLES and self.dtype == "float64":
            return 0.0  # here a float64 angle is a grade of its own
        return self.tables.at(self.tables.off64, self.rows)

    def ratio(self, grade: str, y: Array) -> Array:
        """Error over bound, like x: above 1, more than rounding explains."""
        with np.errstate(all="ignore"):
            ratio = np.where(y == self.y, 0.0, np.abs(y - self.y) / self.allowed(grade))
        return np.where(self._spoilt(y), 0.0, np.where(np.isnan(ratio), np.inf, ratio))

    def wrong(self, grade: str, y: Array) -> Array:
        """Which rows have an error above the bound, bool (…, n): the same as a ratio above 1, but faster."""
        with np.errstate(all="ignore"):
            beyond = ~(np.abs(y - self.y) <= self.allowed(grade))
        if not beyond.any():
            return np.zeros(y.shape[:-1], bool)
        return (self.ratio(grade, y) > 1).any(axis=-1)

    def _spoilt(self, y: Array) -> Array:
        """Rows (…, n, 1) that are not finite in x, and so may be anything in y but finite: NaN must not get lost."""
        return ~np.isfinite(self.x).all(axis=-1, keepdims=True) & ~np.isfinite(y).all(axis=-1, keepdims=True)
