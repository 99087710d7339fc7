"""The truth, by mpmath at 80 digits and from the published formulas.

No number comes from pyrope; where mpmath's cosines and sines belong in a head is what `pyrope.definition` says.
"""

from __future__ import annotations

import numpy as np
from optional import package

from pyrope import DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN, definition

mpmath = package("mpmath")
mpf = mpmath.mpf

MP = mpmath.mp.clone() if hasattr(mpmath.mp, "clone") else mpmath.MPContext()
MP.dps = 80


def theta(rope: Rope) -> list[mpf]:
    """Θ of a resolved rope, one for each pair."""
    r, base, s = rope.width, MP.mpf(rope.base), rope.scaling
    w = [MP.power(base, MP.mpf(-2 * i) / r) for i in range(r // 2)]
    if isinstance(s, Linear):
        w = [x / MP.mpf(s.factor) for x in w]
    elif isinstance(s, DynamicNTK):
        f, length = MP.mpf(s.factor), max(s.length, s.original_length)
        grown = base * MP.power(f * length / s.original_length - (f - 1), MP.mpf(r) / (r - 2))
        w = [MP.power(grown, MP.mpf(-2 * i) / r) for i in range(r // 2)]
    elif isinstance(s, LongRoPE):
        w = [x / MP.mpf(f) for x, f in zip(w, s.long if s.length > s.original_length else s.short, strict=True)]
    elif isinstance(s, Llama3):
        w = [_llama3(x, s) for x in w]
    elif isinstance(s, YaRN):
        w = _yarn(w, base, r, s)
    elif isinstance(s, Proportional):
        turning = int(s.fraction * r // 2)
        w = [x / MP.mpf(s.factor) if i < turning else MP.mpf(0) for i, x in enumerate(w)]
    if rope.axes is None:
        return w
    p, style, sections = r // 2, rope.axes.style, rope.axes.sections
    assert style in ("axial", "pixtral") or (len(sections) if style == "listed" else sum(sections)) == p
    if rope.axes.series == "own":
        owners, factor = axis(rope), MP.mpf(1 if s is None else s.factor)
        within = [owners[:i].count(owner) for i, owner in enumerate(owners)]
        return [MP.power(base, MP.mpf(-j) / owners.count(a)) / factor for j, a in zip(within, owners, strict=True)]
    if style == "axial":
        return w[::2] * 2
    return w[::2] + w[1::2] if style == "pixtral" else w


def axis(rope: Rope) -> list[int]:
    """The axis that turns each pair."""
    p, sections = rope.width // 2, rope.axes.sections
    if rope.axes.style == "sections":
        return sum(([j] * n for j, n in enumerate(sections)), [])
    if rope.axes.style == "listed":
        return list(sections)
    if rope.axes.style == "interleaved":
        axes, k = [0] * p, len(sections)
        for j in range(1, k):
            axes[j : k * sections[j] : k] = [j] * len(axes[j : k * sections[j] : k])
        return axes
    return [0] * (p // 2) + [1] * (p // 2)


def _llama3(w: mpf, s: Llama3) -> mpf:
    wavelength, f = 2 * MP.pi / w, MP.mpf(s.factor)
    if wavelength > s.original_length / MP.mpf(s.low):
        return w / f
    if wavelength < s.original_length / MP.mpf(s.high):
        return w
    t = (s.original_length / wavelength - MP.mpf(s.low)) / (MP.mpf(s.high) - MP.mpf(s.low))
    return w * ((1 - t) / f + t)


def _yarn(w: list[mpf], base: mpf, r: int, s: YaRN) -> list[mpf]:
    def c(t: float) -> mpf:
        return r * MP.log(s.original_length / (2 * MP.pi * MP.mpf(t))) / (2 * MP.log(base))

    low, high = c(s.beta_fast), c(s.beta_slow)
    if s.truncate:
        low, high = MP.floor(low), MP.ceil(high)
    low, high = max(low, MP.mpf(0)), min(high, MP.mpf(r - 1))
    high = high + MP.mpf("0.001") if low == high else high
    ramp = [min(max((i - low) / (high - low), MP.mpf(0)), MP.mpf(1)) for i in range(len(w))]
    return [x * ((1 - g) + g / MP.mpf(s.factor)) for x, g in zip(w, ramp, strict=True)]


def attention_factor(rope: Rope) -> mpf:
    s = rope.scaling
    if not isinstance(s, YaRN | LongRoPE):
        return MP.mpf(1)
    if s.attention_factor is not None:
        return MP.mpf(s.attention_factor)
    if isinstance(s, LongRoPE):
        return MP.sqrt(1 + MP.log(MP.mpf(s.factor)) / MP.log(s.original_length))

    def g(k: float) -> mpf:
        return MP.mpf("0.1") * MP.mpf(k) * MP.log(MP.mpf(s.factor)) + 1

    return g(s.mscale) / g(s.mscale_all_dim) if s.mscale and s.mscale_all_dim else g(1)


def pair_positions(rope: Rope, m) -> list[int]:
    """The position that turns each pair: m is one integer, or one for each axis."""
    return [int(m)] * (rope.width // 2) if rope.axes is None else [int(m[a]) for a in axis(rope)]


def cos_sin(rope: Rope, m) -> tuple[list[mpf], list[mpf]]:
    """cos and sin of one position, times the attention factor."""
    a = attention_factor(rope)
    angles = [rope.direction * n * t for n, t in zip(pair_positions(rope, m), theta(rope), strict=True)]
    return [a * MP.cos(x) for x in angles], [a * MP.sin(x) for x in angles]


def tables(rope: Rope, m: np.ndarray, axes: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of positions (…, n), each correctly rounded to float64: two arrays (…, n, p).

    If ``axes`` is given, they broadcast to arrays (…, n, d) of that many axes, whose first axes the positions share.
    """
    m = np.asarray(m)
    each = m if rope.axes is None else np.moveaxis(m, 0, -1)
    shape = each.shape if rope.axes is None else each.shape[:-1]
    both = np.empty((2, *shape, rope.pairs))
    for index in np.ndindex(shape):
        both[(slice(None), *index)] = np.array(cos_sin(rope, each[index]), float)
    if axes:
        both = both.reshape(2, *shape[:-1], *(1,) * (axes - 1 - max(len(shape), 1)), *(shape[-1:] or (1,)), rope.pairs)
    return both[0], both[1]


def matrix(rope: Rope, m) -> np.ndarray:
    """R(Θ, m) by the definition, each entry correctly rounded to float64."""
    return definition.rotation_matrix(
        *tables(rope, m), *definition.pairs(rope.layout, rope.width, rope.start), rope.head_dim
    )


def activation(name: str, x: float) -> mpf:
    """act(x) of one number."""
    x = MP.mpf(x)
    if name == "gelu":
        return x * MP.erfc(-x / MP.sqrt(2)) / 2
    if name == "gelu_tanh":
        return x * (1 + MP.tanh(MP.sqrt(2 / MP.pi) * (x + MP.mpf("0.044715") * x**3))) / 2
    return x / (1 + MP.exp(-x)) if name == "silu" else max(x, MP.mpf(0))
