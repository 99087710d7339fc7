"""How far a rotation, or attention, may be from the truth: roundings counted one by one, none of them measured.

Rotations first. u is the unit roundoff of a dtype, 2⁻²⁴ for float32. A library's power is taken to be good to 1 ulp =
2u, the same for cos and sin; every other operation rounds once, and every float64 parameter that meets a float32 array
is rounded once. Each grade of precision is a bound on the error of one output; a candidate has the first that holds:

- rounded once: the product is computed in a wider dtype (unit w) from an exact or a float64 angle:
  u·|out| + 4w·(|x·cos| + |y·sin|): table, product and sum in w, and the truth's own last place.
- tables or products in x's dtype: both are rounded to u, and the sum: 2u·(|x·cos| + |y·sin|) + u·|out|. An
  attention factor that multiplies a table brings another u.
- float64 angle (seen where x is float64), float32 angle: the angle's error, |z|·m·θ·`theta_bound`, on top of
  `float32_bound`'s 6 roundings in that dtype.
- float32 angle, and tables or products in x's dtype: the sum of the two.

Below its smallest normal number a dtype rounds to a fixed step, so that each of them also has half of that step for
each rounding: it matters in float16, where a sine of 10⁻⁶ has four bits.

Attention sums many roundings, so that its bounds count standard errors: six are allowed for any output, three for the
root of the mean square of all of them, where values and errors have random signs. `softmax_bounds` and `linear_bounds`
derive them, `angle_errors` what a float32 angle adds.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array
from ..definition import pairs
from ..phase import cos_sin
from ..theta import DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN, check_rope, frequencies
from .attention_steps import Parts
from .floats import NARROW, U32, U64, UNIT, Float64
from .truth import Spec

_EXACT = 2**24  # whole numbers up to here are float32 numbers
SECOND_ORDER = 1 + 2.0**-10  # products of roundings, far below the roundings themselves
# A float32 angle that is reduced to one turn first, or a table in fixed point, has an absolute error: up to this it is
# as good as a float32 angle, though not where that one is exact. A float16 table has 250 times as much.
_REDUCED = 2.0**-20
# A phase that wraps at 2³² for a turn has steps that are off by one unit at most, in all pairs alike: 1/40 of what one
# rounding of a float32 angle is off by where θ = 1.
_PHASE = 2 * math.pi * 2.0**-32
_FIXED = 1 / 16  # of a narrow dtype's unit: the same for a table in fixed point beside tables in that dtype
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
# What a candidate of this dtype can have, best first. In float32 the products are those of a float32 angle.
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
    if own := rope.axes is not None and rope.axes.series == "own":
        dealt = zip(rope.axes.assign(rope.pairs), rope.axes.widths(rope.pairs), strict=True)
        e = np.array([2 * j / width for (_, j), width in dealt])
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
        # Without a ramp, low = high, no pair lies in it: a span that is nothing beside 1 says that too.
        s, span = scaling.factor, max(scaling.high - scaling.low, 1e-9)
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
    if rope.axes is not None and not own:
        errors = errors[[index for _, index in rope.axes.assign(rope.pairs)]]
    return np.asarray(errors * U32 * SECOND_ORDER)


def _in_ramp(t: Any) -> Any:
    """Where a blend depends on t, or may do so after t was rounded."""
    return (t > -1e-3) & (t < 1 + 1e-3)


BY = ("power", "logarithm", "phase")  # how angles are made


def angle_bound(rope: Rope, *, by: str = "power", large: bool = False) -> Float64:
    """Relative error allowed to each float32 angle m·θ_i, (p,): that of θ_i, by a power or a logarithm, and one
    rounding more; two where m is ``large``, above 2²⁴, and is rounded itself. By a "phase" of 32 bits, the error is
    absolute: for each position one unit of the phase, and nothing else.

    Nothing is rounded at all in the first pair where θ₀ = base⁰ = 1, or that over a power of two: the power, the
    quotient, a ramp that has not begun or has ended, and the product with m ≤ 2²⁴ are exact. There a library's sine
    shows its own error.
    """
    if by == "phase":
        theta = frequencies(rope)
        return np.asarray(np.where(theta > 0, _PHASE / np.where(theta > 0, theta, 1), 0))
    bound = theta_bound(rope, tensor_length=True, logarithm=by == "logarithm") + (1 + large) * U32
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


def pair_errors(x: Any, positions: Any, rope: Rope, *, by: str = "power", tables: Any = None) -> PairErrors:
    """The measures of `PairErrors`, written in the order of the rope's layout; ``tables`` spare their computation."""
    first, second = (np.asarray(x, np.float64)[..., part] for part in pairs(rope.layout, rope.width, rope.start)[0])
    cos, sin = cos_sin(rope, positions) if tables is None else tables
    m = np.asarray(positions, np.float64)
    if rope.axes is None:
        m = np.broadcast_to(m[..., None], cos.shape)
    else:
        m = np.moveaxis(m[[axis for axis, _ in rope.axes.assign(rope.pairs)]], 0, -1)
    length = np.hypot(first, second) * rope.attention_factor
    size = length * (np.abs(m) * frequencies(rope))
    sums = np.abs(first * cos) + np.abs(second * sin), np.abs(second * cos) + np.abs(first * sin)
    exact, large = (angle_bound(rope, by=by, large=large) for large in (False, True))
    relative = np.broadcast_to(np.where(np.abs(m) <= _EXACT, exact, large), size.shape)
    both = ((value, value) for value in (size, relative, length))
    return PairErrors(*(_written(*pair, rope) for pair in (sums, *both)))


def _written(first: Any, second: Any, rope: Rope) -> Float64:
    """Values of the first and second features of the pairs in the order in which the layout writes them."""
    values, (one, other) = np.empty((*first.shape[:-1], rope.width)), pairs(rope.layout, rope.width)[1]
    values[..., one], values[..., other] = first, second
    return values


def float32_bound(x: Any, positions: Any, rope: Rope) -> Float64:
    """Error allowed to each feature of a rotation by a correct float32 pipeline, tables and all; 0 where nothing turns.

    The angle's error as above. cos and sin have 2, an attention factor brings 2 (itself and its product), the product
    with x has 1: 5u·(|x·cos| + |y·sin|). The sum has u·|out|, and |out| ≤ |x·cos| + |y·sin|: 6u.
    """
    measures = pair_errors(x, positions, rope)
    bound = np.zeros(np.shape(x))
    rounded = measures.size * measures.relative + 6 * U32 * measures.sums
    bound[..., rope.start : rope.start + rope.width] = rounded * SECOND_ORDER
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
    if grade == BOTH:
        rest += _FIXED * u * measures.length
    if grade == ANGLE64:
        rest += 6 * U64 * measures.sums
    if grade in (ANGLE32, BOTH):
        rest += measures.size * measures.relative + 6 * U32 * measures.sums + _REDUCED * measures.length
    if grade in (ONCE, LOW_TABLES) and dtype.name == "float64":
        rest -= measures.size * measures.relative * (U64 / U32)  # here a float64 angle is a grade of its own
    return np.asarray(rest * SECOND_ORDER)


# ── Attention ────────────────────────────────────────────────────────────────────────────────────────────────────────

OWN = "the dtype's own"  # of float32 and float64, with exact or float64 angles; ANGLE32 comes after it
# Of float16 and bfloat16, best first.
WEIGHTS, SCORES, FEATURES = "weights rounded", "scores rounded", "features rounded"
SOFTMAX_GRADES, LINEAR_GRADES = (ONCE, WEIGHTS, SCORES), (ONCE, FEATURES)


class Allowed(NamedTuple):
    """How far off outputs may be."""

    worst: Array  # each of them
    mean_square: float = math.inf  # the root of the mean of their squares

    def ratio(self, error: Array) -> float:
        """How large errors are: above 1, larger than rounding explains."""
        with np.errstate(all="ignore"):
            most = float((error / np.maximum(self.worst, 1e-300)).max(initial=0))
            return max(most, math.sqrt((error**2).mean()) / self.mean_square)


def attention_grades(dtype: str, rope: Rope | None, narrow: tuple[str, ...]) -> tuple[str, ...]:
    """The grades that right attention of this dtype can have, best first; ``narrow``: those of float16 and bfloat16."""
    if dtype in NARROW:
        return narrow
    return (OWN,) if rope is None else (OWN, ANGLE32)


def angle_errors(rope: Rope, q: Array, k: Array, positions: Array, unit: float, norm: int = 1) -> Array:
    """How far off products of rotated vectors may be if their angles are computed with this unit roundoff.

    q (b, h, n, d) and k (b, h, m, d) are rotated, positions (b, m) -> (b, h, n, m). Queries and keys have the same θ,
    off by t of its size (`angle_bound`, by a power or by a logarithm), and each product with a position is rounded,
    above 2²⁴ the position, too. The angle between pair i of a query at m and of a key at n is then off by
    ε_i = θ_i·(|m − n|·t + (|m| + |n|)·unit), and by 6·unit for the tables and products of each of the two. Float32
    numbers at position 0 are not changed by cos 0 = 1 and sin 0 = 0, and have none of these 6: so it shows if something
    else is done in float32 there. A product is off by Σ |q_i||k_i|·ε_i at most. With ``norm`` 2 it is the root of
    Σ (|q_i||k_i|·ε_i)², a standard error where the signs of the pairs are random, as those of random vectors are; each
    of the summands of ε by itself, which is more.
    """
    first, second = pairs(rope.layout, rope.width, rope.start)[1]
    n, m, large = q.shape[-2], k.shape[-2], bool((np.abs(positions) > _EXACT).any())
    theta, relative = frequencies(rope), angle_bound(rope, by="logarithm", large=large) * (unit / U32)
    q_at, k_at = positions[:, None, m - n :], positions[:, None, :]
    rounded = theta * unit * (1 + large) * (relative > 0)
    given = (q, q_at), (k, k_at)  # the errors of each vector by itself are (b, h, n, p):
    own = [np.abs(at)[..., None] * rounded + 6 * unit * _inexact(x, at, rope)[..., None] for x, at in given]
    q, k = (np.hypot(x[..., first], x[..., second]) for x in (q, k))

    def product(q: Array, k: Array) -> Array:
        return q @ k.swapaxes(-1, -2) if norm == 1 else np.sqrt(np.square(q) @ np.square(k).swapaxes(-1, -2))

    distance = np.abs(q_at[..., :, None] - k_at[..., None, :])
    errors = product(q * (theta * relative), k) * distance + product(q * own[0], k) + product(q, k * own[1])
    return np.asarray(errors)


def _inexact(x: Array, positions: Array, rope: Rope) -> Array:
    """Whether tables and products in float32 change a vector: x (b, h, n, d), positions (b, 1, n) -> (b, h, n)."""
    with np.errstate(over="ignore"):
        short = (x == x.astype(np.float32)).all(axis=-1)
    return np.asarray(~(short & (positions == 0) & (rope.attention_factor == 1)))


def _angles(spec: Spec, grade: str, parts: Parts, positions: Array | None, norm: int = 1) -> Array:
    """What the angles of a grade add to products: float64 ones, or in float16 and bfloat16 always float32 ones."""
    if spec.rope is None or positions is None:
        return np.zeros(1)
    return angle_errors(spec.rope, parts.q, parts.k, positions, U64 if grade == OWN else U32, norm)


def softmax_bounds(
    spec: Spec, dtype: str, grade: str, parts: Parts, positions: Array | None = None, random: bool = True
) -> Allowed:
    """How far off softmax attention with these parts may be; positions (b, m) if it rotates by itself.

    Let u be the unit roundoff of the dtype, U that of its arithmetic (float32, or float64 for float64), s a score,
    t² = Σ(q_i k_i)² times the scale squared, w a weight.
    - A score is a sum of d products, each rounded: its standard error is at most U·√(d + 8)·(t + max|s|), the maximum
      that is subtracted included. RoPE inside adds what `angle_errors` says, times the scale, once: it is a bound.
    - Good kernels round weights to the dtype before they meet the values ("weights rounded": FlashAttention), or
      rotated vectors, scaled queries and scores, too ("scores rounded": eager attention in float16 or bfloat16). Ten
      roundings of the factors of a product, relative error uniform in ±u, give u·√(10/3)·t, three of the score (six
      with a softcap) u·|s|. Where nothing is ``random``, every score is one product of four roundings at most, 4u·|s|.
    - An output o moves by Σ w_j (v_j − o) δ_j for errors δ of scores: by Σ w|v − o|δ if all conspire, and by the root
      of Σ w²(v − o)²δ² in the mean square, since signs are random. With six and three standard errors, times e^Σwδ and
      e^4Σwδ for what is not linear in them; never more than 2·tanh(δ/2)·max|v|, which is what errors of at most δ can
      do to a mean. Rounding of weights adds 2u and of outputs u·|o| (2u²Σw²/3 and u²o²/3 to the mean square).
    - Weights may be exp(s − log Σ exp s), the logarithm rounded as it is summed, 4U·max|s| at most: that times |o|.
    """
    u, fine, narrow = UNIT[dtype], U64 if dtype == "float64" else U32, dtype in NARROW
    m, d = parts.k.shape[-2:]
    w, v, out = np.nan_to_num(np.abs(parts.weights)), parts.v, np.nan_to_num(parts.weights @ parts.v)
    with np.errstate(all="ignore"):
        terms = spec.scale * np.sqrt(np.square(parts.q) @ np.square(parts.k).swapaxes(-1, -2))
        scores = np.where((w > 0) & (np.abs(parts.scores) < 1e30), np.abs(parts.scores), 0)
    noise = np.square(fine * math.sqrt(d + 8) * (terms + scores.max(axis=-1, keepdims=True)))
    if grade == SCORES and random:
        noise += u**2 / 3 * (10 * np.square(terms) + (3 if spec.softcap is None else 6) * np.square(scores))
    most = 6 * np.sqrt(noise) + spec.scale * _angles(spec, grade, parts, positions)
    most += 4 * u * scores if grade == SCORES and not random else 0
    rounded = u * (narrow and grade != ONCE)
    tiny = (m + 1) * 2.0**-24 if dtype == "float16" else 0.0  # below the normal numbers
    total, size = w.sum(axis=-1, keepdims=True), float(np.abs(v).max())
    worst = _moved(w * most, v, out) * np.exp(np.minimum((w * most).sum(axis=-1, keepdims=True), 6))
    if (total < 1 + 1e-9).all():  # a mean, which it is not where the softmax is over the wrong axis
        most = np.where(w > 0, most, 0).max(axis=-1, keepdims=True)
        worst = np.minimum(worst, size * 2 * np.tanh(most / 2))
    logarithm = 4 * fine * scores.max(axis=-1, keepdims=True)
    worst += 2 * rounded + (1.01 * u + logarithm) * np.abs(out) + 4 * (m + 8) * fine + tiny
    if not random:
        return Allowed(worst)
    noise += np.square(spec.scale * _angles(spec, grade, parts, positions, norm=2) / 3)  # a bound, not tripled
    error = np.square(w) * noise
    square = error.sum(axis=-1, keepdims=True) * (size**2 + np.square(out)) - 2 * out * (error @ v)
    square *= np.exp(np.minimum(4 * (w * np.sqrt(noise)).sum(axis=-1, keepdims=True), 6))
    square += (u**2 / 3 + np.square(logarithm)) * np.square(out)
    square += np.square(w).sum(axis=-1, keepdims=True) * (rounded**2 / 1.5 + (16 * fine) ** 2)
    return Allowed(worst, 3 * math.sqrt(square.mean()) + 8 * fine + tiny)


def _moved(errors: Array, v: Array, out: Array) -> Array:
    """Σ errors·|v − out| over the keys, or more: |v − out| = 1 − v·out where v = ±1."""
    total = errors.sum(axis=-1, keepdims=True)
    if (np.abs(v) == 1).all() and (np.abs(out) <= 1 + 1e-9).all():
        return np.maximum(total - out * (errors @ v), 0)
    return np.asarray(total * (np.abs(v).max() + np.abs(out)))


def linear_sizes(parts: Parts) -> Array:
    """|φ(q)||φ(k)|/D, (b, h, n, m): what the weights would be if features and angles agreed."""
    q, k = (np.linalg.norm(x, axis=-1) for x in (parts.q, parts.k))
    return np.asarray(q[..., :, None] * k[..., None, :] * parts.scores)


def linear_bounds(
    spec: Spec, dtype: str, grade: str, parts: Parts, positions: Array | None = None, random: bool = True
) -> Allowed:
    """How far off linear attention with these parts may be; positions (b, n).

    With u and U as for softmax attention, D the denominator, P = |φ(q)||φ(k)|/D and w the weight of a key: a weight, a
    sum of d products divided by D, has a standard error of U·√(d + n + 8)·P, sums over n keys included. RoPE adds what
    `angle_errors` says, over D, once. Chunked kernels in float16 and bfloat16 round features, rotated or not, weights
    and states ("features rounded"): ten roundings of the factors of d products that add up at random, u·√(10/3)·P/√d,
    and three of the weight, u·|w|. Six of these are allowed for any output, summed over the keys as if all conspired,
    three times the root of the sum of squares for the mean square, both times max|v|; |o| times as much for the
    denominator, and 3u·|o| for the last roundings of all three.
    """
    u, fine = UNIT[dtype], U64 if dtype == "float64" else U32
    n, d = parts.k.shape[-2:]
    shares, w, sizes = (np.nan_to_num(np.abs(x)) for x in (parts.scores, parts.weights, linear_sizes(parts)))
    out, size = np.nan_to_num(np.abs(parts.weights @ parts.v)), float(np.abs(parts.v).max())
    noise = fine**2 * (d + n + 8) * np.square(sizes)
    if grade == FEATURES:
        noise += u**2 * (10 / 3 / d * np.square(sizes) + np.square(w))
    angle = shares * _angles(spec, grade, parts, positions)
    most = 6 * np.sqrt(noise) + angle
    noise += np.square(angle / 3)  # a bound, not tripled; features have no random signs: all pairs may add up
    tiny = 2.0**-24 * (n + 1) if dtype == "float16" else 0.0  # below the normal numbers
    worst = (size + out) * most.sum(axis=-1, keepdims=True) + 3 * u * out + 16 * fine + tiny
    if not random:
        return Allowed(worst)
    square = noise.sum(axis=-1, keepdims=True) * (size**2 + np.square(out)) + 3 * u**2 * np.square(out)
    return Allowed(worst, 3 * math.sqrt(square.mean()) + 16 * fine + tiny)
