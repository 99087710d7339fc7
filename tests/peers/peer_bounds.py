"""How far a correct float32 pipeline may be from the truth: roundings counted one by one, none of them measured.

u = 2⁻²⁴ is the unit roundoff of float32. A library's float32 power is taken to be good to 1 ulp = 2u, the same for
cos and sin; every other operation rounds once, and every float64 parameter that meets a float32 tensor is rounded once.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import pyrope
from pyrope import DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN

U32 = 2.0**-24
U64 = 2.0**-53
SECOND_ORDER = 1 + 2.0**-10  # products of roundings, far below the roundings themselves


def theta_bound(rope: Rope, *, tensor_length: bool = False) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Relative error allowed to each float32 θ_i of a correct float32 pipeline.

    w_i = 1/base^e with e = 2i/r: the exponent is rounded (e·ln base), base is rounded (e ≤ 1), the power has 2, the
    reciprocal 1, together at most 4 + e·ln base, in units of u. On top of it, for each rescaling:

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
    """
    r, scaling = rope.width, rope.scaling
    e = 2 * np.arange(rope.pairs) / r
    errors = 4 + e * math.log(rope.base)
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
        errors = 4 + e * log_base
        if tensor_length:
            rho = (3 * s * ratio + (s - 1) + g) / g
            errors = 3 + e * (k * rho + k * math.log(g) + 4) + e * log_base
    if rope.axes is not None:
        errors = errors[[index for _, index in rope.axes.assign(rope.pairs)]]
    return errors * U32 * SECOND_ORDER


def _in_ramp(t: Any) -> Any:
    """Where a blend depends on t, or may do so after t was rounded."""
    return (t > -1e-3) & (t < 1 + 1e-3)


def pair_errors(x: Any, positions: Any, rope: Rope) -> tuple[Any, Any, Any]:
    """What errors of a rotation of x are measured in, each like the rotated features (…, n, r), for rotate's layout.

    Returns |x·cos| + |y·sin|, |z|·|a·m·θ| (z a pair as a complex number, a the attention factor: an error of the angle,
    relative to it, times this is an error of the result), and the relative bound of a float32 angle.
    """
    start = 0 if rope.placement == "prefix" else rope.head_dim - rope.width
    turned = np.asarray(x, np.float64)[..., start : start + rope.width]
    p = rope.pairs
    if rope.layout == "half":
        first, second = turned[..., :p], turned[..., p:]
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
    cos, sin = pyrope.cos_sin(rope, positions)
    m = np.asarray(positions, np.float64)
    if rope.axes is None:
        m = np.broadcast_to(m[..., None], cos.shape)
    else:
        m = np.moveaxis(m[[axis for axis, _ in rope.axes.assign(p)]], 0, -1)
    size = np.hypot(first, second) * np.abs(m) * pyrope.frequencies(rope) * rope.attention_factor
    sums = np.abs(first * cos) + np.abs(second * sin), np.abs(second * cos) + np.abs(first * sin)
    relative = np.broadcast_to(theta_bound(rope) + U32, size.shape)  # the product m·θ is rounded once more
    return _written(*sums, rope), _written(size, size, rope), _written(relative, relative, rope)


def _written(first: Any, second: Any, rope: Rope) -> Any:
    """Values of the first and second features of the pairs in the order in which the layout writes them."""
    if rope.layout == "interleaved":
        return np.stack((first, second), -1).reshape(*first.shape[:-1], -1)
    return np.concatenate((first, second), -1)


def float32_bound(x: Any, positions: Any, rope: Rope) -> Any:
    """Error allowed to each feature of a rotation by a correct float32 pipeline, tables and all; 0 where nothing turns.

    The angle's error as above. cos and sin have 2, an attention factor brings 2 (itself and its product), the product
    with x has 1: 5u·(|x·cos| + |y·sin|). The sum has u·|out|, and |out| ≤ |x·cos| + |y·sin|: 6u.
    """
    sums, size, relative = pair_errors(x, positions, rope)
    bound = np.zeros(np.shape(x))
    start = 0 if rope.placement == "prefix" else rope.head_dim - rope.width
    bound[..., start : start + rope.width] = (size * relative + 6 * U32 * sums) * SECOND_ORDER
    return bound
