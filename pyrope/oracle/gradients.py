"""The gradients of attention: what is right, by the definition and the chain rule, and how far off it may be.

With weights w = softmax(s), scores s = scale·q̃·k̃ᵀ of rotated vectors, o = w·v and the gradient g of o:

    dv = wᵀ·g      dw = g·vᵀ      ds = w∘(dw − D)      D = Σ_j w_j dw_j = Σ_c g_c o_c, for each row
    dq = scale·Rᵀ(ds·k̃)      dk = scale·Rᵀ(dsᵀ·q̃)      keys and values: summed over the query heads that read them

and a softcap c multiplies ds by 1 − (s/c)². Linear attention, o = N·v/D with N = (Rφ(q))(Rφ(k))ᵀ and D = Σ φ(q)φ(k)ᵀ
over the keys that are seen, has dN = g·vᵀ/D and dD = −Σ_c g_c o_c/D, then φ′.

`Noisy` carries the variance of random roundings, and a bound of what is not random (angles), through the same steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .. import definition
from ..backend import Array
from ..theta import Rope
from .floats import NARROW, U32, U64, UNIT
from .tolerance import Allowed, pair_errors
from .truth import Spec, rotated, seen

_REDUCED = 2.0**-20  # a float32 angle that is reduced first has this absolute error: see `tolerance`


class Roundings(NamedTuple):
    """The unit roundoffs of an implementation: uniform errors in ±u have a variance of u²/3."""

    fine: float  # of its arithmetic
    coarse: float  # of what it stores between two steps; 0: the same
    angle: float
    step: float = 0.0  # half the smallest subnormal number of what it stores, where that matters

    @classmethod
    def of(cls, dtype: str, float32_angles: bool) -> Roundings:
        """Those that are left to an implementation of this dtype."""
        fine = U64 if dtype == "float64" else U32
        step = 2.0**-25 if dtype == "float16" else 0.0
        return cls(fine, UNIT[dtype] if dtype in NARROW else 0.0, U32 if float32_angles else fine, step)


@dataclass(frozen=True, eq=False)
class Noisy:
    """Numbers, the variance of the random errors of each, and a bound of those that are not random."""

    value: Array
    noise: Any = 0.0
    bound: Any = 0.0

    def each(self, change: Callable[[Array], Array]) -> Noisy:
        """The same change of all three, each as an array of the shape of the numbers."""
        zero = np.zeros_like(self.value)
        return Noisy(change(self.value), change(self.noise + zero), change(self.bound + zero))

    def times(self, other: Noisy) -> Noisy:
        a, b = self, other
        noise = np.square(a.value) * b.noise + np.square(b.value) * a.noise + a.noise * b.noise
        return Noisy(a.value * b.value, noise, abs(a.value) * b.bound + abs(b.value) * a.bound + a.bound * b.bound)

    def plus(self, other: Noisy, sign: float = 1.0) -> Noisy:
        return Noisy(self.value + sign * other.value, self.noise + other.noise, self.bound + other.bound)

    def scaled(self, by: Any) -> Noisy:
        """Times exact numbers."""
        return Noisy(self.value * by, self.noise * np.square(by), self.bound * abs(by))

    def rounded(self, *units: float) -> Noisy:
        """Rounded so often."""
        return Noisy(self.value, self.noise + sum(u * u for u in units) / 3 * np.square(self.value), self.bound)

    def stored(self, roundings: Roundings, times: int = 1) -> Noisy:
        """Rounded to what is stored between two steps, so often."""
        noise = times / 3 * (roundings.coarse**2 * np.square(self.value) + roundings.step**2)
        return Noisy(self.value, self.noise + noise, self.bound)

    def matmul(self, other: Noisy, roundings: Roundings) -> Noisy:
        """A sum of n products, each rounded, has U·√(n + 8) times the root of the sum of their squares as its standard
        error; factors and result that are stored in a narrow dtype are rounded twice each, and once."""
        a, b = self.each(np.asarray), other.each(np.asarray)
        squares = np.square(a.value) @ np.square(b.value)
        noise = np.square(a.value) @ b.noise + a.noise @ np.square(b.value) + a.noise @ b.noise
        noise += (roundings.fine**2 * (a.value.shape[-1] + 8) + 4 / 3 * roundings.coarse**2) * squares
        bound = abs(a.value) @ b.bound + a.bound @ abs(b.value) + a.bound @ b.bound
        return Noisy(a.value @ b.value, noise, bound).stored(roundings)

    def swapped(self) -> Noisy:
        return self.each(lambda part: part.swapaxes(-1, -2))

    def summed(self, axis: int, roundings: Roundings) -> Noisy:
        """The sum over an axis, which stays, of length 1."""
        noise = self.noise + roundings.fine**2 * (self.value.shape[axis] + 8) * np.square(self.value)
        total = Noisy(self.value, noise, self.bound).each(lambda part: part.sum(axis=axis, keepdims=True))
        return total.stored(roundings)

    def where(self, mask: Array) -> Noisy:
        return self.each(lambda part: np.where(mask, part, 0))

    def inverted(self) -> Noisy:
        """1 over it; 0 where it is 0."""
        one = np.divide(1, self.value, out=np.zeros_like(self.value), where=self.value != 0)
        return Noisy(one, self.noise * one**4, self.bound * one**2)

    def allowed(self, dtype: str) -> Allowed:
        """How far off an output of this dtype may be: six standard errors each, three in the mean square."""
        # Weights below the least number of a dtype may be 0, and Paddle has none below e⁻⁶⁴, times q and k, in float32.
        final, tiny = self.rounded(UNIT[dtype]), {"float16": 2.0**-24, "float64": 1e-300}.get(dtype, 1e-24)
        noise, bound = (part + np.zeros_like(self.value) for part in (final.noise, final.bound))
        mean_square = 3 * float(np.sqrt(noise.mean())) + float(np.sqrt(np.square(bound).mean())) + tiny
        return Allowed(6 * np.sqrt(noise) + 1.01 * UNIT[dtype] * abs(self.value) + bound + tiny, mean_square)


@dataclass(frozen=True)
class Backward:
    """How the backward pass is done, step by step; the defaults are right."""

    row_term: bool = True  # D is subtracted
    scale: int = 1  # how often the gradients of q and k are multiplied with the scale
    groups: str = "summed"  # or "first", "last": one of the query heads that read a key head; or "mean"; or "tiled"
    turned: str = "back"  # or "not", or "forwards"
    places: str = "given"  # or "counted": turned back by 0, 1, 2, …; or "first": by the positions of the first row
    values: bool = False  # turned, too
    transposed: bool = True  # weights and ds, for keys and values
    block: int = 0  # of softmax: what the last so many keys bring to q is all there is, and queries to k and v
    softcap: bool = True  # its derivative is multiplied with
    denominator: bool = True  # of linear attention: its derivative is added
    feature_map: bool = True  # of linear attention: its derivative is multiplied with
    causality: str = "by order"  # or "by position", and the window, too: of the forward pass
    times: float = 1.0


RIGHT = Backward()


def _turn(x: Noisy, at: Array, rope: Rope | None, roundings: Roundings) -> Noisy:
    """R·x: a float32 angle has the error that `tolerance.float32_bound` derives; in a narrow dtype tables and products
    may be rounded, too: five roundings of the length of a pair. Errors of x turn with it."""
    if rope is None:
        return x
    value, zero = rotated(x.value, at, rope), np.zeros_like(x.value)
    noise, bound = x.noise + zero, x.bound + zero
    turning = slice(rope.start, rope.start + rope.width)
    measures = pair_errors(x.value, at, rope, by="logarithm")
    angles = measures.size * measures.relative + 6 * U32 * measures.sums
    angles = angles * (roundings.angle / U32) + _REDUCED * measures.length * (roundings.angle == U32)
    bound[..., turning] = pair_errors(bound, at, rope).length + angles
    own = np.square(pair_errors(np.sqrt(noise), at, rope).length)
    noise[..., turning] = own + 5 / 3 * roundings.coarse**2 * np.square(measures.length)
    return Noisy(value, noise, bound)


def _spread(x: Noisy, h: int) -> Noisy:
    return x.each(lambda part: definition.repeat_heads(part, h))


def _gathered(x: Noisy, g: int, how: str, roundings: Roundings) -> Noisy:
    """The gradients of the heads (b, h, m, d) that were spread, as those of the g heads that they came from."""
    b, h, m, d = x.value.shape
    if how == "tiled":
        x = x.each(lambda part: part.reshape(b, h // g, g, m, d).swapaxes(1, 2))
    apart = x.each(lambda part: part.reshape(b, g, h // g, m, d))
    if how in ("first", "last"):
        return apart.each(lambda part: part[:, :, 0 if how == "first" else -1])
    total = apart.stored(roundings).summed(2, roundings).each(lambda part: part[:, :, 0])
    return total.scaled(g / h) if how == "mean" else total


def _returned(x: Noisy, at: Array, rope: Rope | None, how: str, roundings: Roundings) -> Noisy:
    """The gradient of a vector from that of the rotated vector."""
    if rope is None or how == "not":
        return x
    return _turn(x.stored(roundings), at, rope.transposed if how == "back" else rope, roundings)


def _places(positions: Any, n: int, m: int) -> tuple[Any, Any]:
    """The positions of queries and keys, (b, 1, n) and (b, 1, m)."""
    return (None, None) if positions is None else (positions[:, None, m - n :], positions[:, None])


def _back_at(steps: Backward, *places: Any) -> tuple[Any, ...]:
    """The positions (b, 1, n) by which gradients are turned back."""
    if steps.places == "given" or places[0] is None:
        return places
    if steps.places == "first":
        return tuple(np.broadcast_to(at[:1], at.shape) for at in places)
    m = max(at.shape[-1] for at in places)
    return tuple(np.broadcast_to(np.arange(m - at.shape[-1], m), at.shape) for at in places)


def _seen(spec: Spec, steps: Backward, q_at: Any, k_at: Any, n: int, m: int, *hidden: Any) -> Array:
    """Which of the m tokens each of the last n sees, as `truth.seen` has it, or by their positions."""
    if steps.causality == "by order":
        return seen(spec, n, m, *hidden)
    by_position = definition.visible(q_at, k_at, spec.causal, spec.window)
    return seen(replace(spec, causal=False, window=None), n, m, *hidden) & by_position


def softmax_gradients(
    spec: Spec, roundings: Roundings, q: Array, k: Array, v: Array, g: Array, positions: Any = None, mask: Any = None,
    segments: Any = None, steps: Backward = RIGHT,
) -> tuple[Noisy, Noisy, Noisy]:  # fmt: skip
    """dq, dk and dv of Eq. (2) in float64: q and g (b, h, n, d), k and v (b, g, m, d), positions and segments (b, m),
    mask (b, 1, n, m). The queries are the last n of the m tokens."""
    (_, h, n, _), m, r = q.shape, k.shape[-2], roundings
    q_at, k_at = _places(positions, n, m)
    visible = _seen(spec, steps, q_at, k_at, n, m, mask, segments)
    turned_q, turned_k = _turn(Noisy(q), q_at, spec.rope, r), _spread(_turn(Noisy(k), k_at, spec.rope, r), h)
    values, out = _spread(Noisy(v), h), Noisy(g)
    scores = turned_q.matmul(turned_k.swapped(), r).scaled(spec.scale).stored(r, 2)
    capped = definition.attention_scores(turned_q.value, turned_k.value, visible, spec.scale, spec.softcap)
    scores = Noisy(np.where(visible, capped, 0), scores.noise, scores.bound).stored(r).rounded(4 * r.fine)
    weights = _softmax(scores, definition.softmax(capped), r)
    dw = out.matmul(values.swapped(), r)
    # FlashAttention sums g∘o, with o as it was returned: its error is allowed beside that of the sum over the keys.
    o = weights.matmul(values, r)
    row, other = weights.times(dw).summed(-1, r), out.times(o).summed(-1, r)
    row = Noisy(row.value, np.maximum(row.noise, other.noise), np.maximum(row.bound, other.bound))
    ds = weights.times(dw.plus(row, -1.0) if steps.row_term else dw).stored(r).rounded(2 * r.fine)
    if spec.softcap is not None and steps.softcap:
        ds = ds.times(_cap_derivative(scores, spec.softcap, r)).stored(r).rounded(2 * r.fine)
    scale = steps.times * spec.scale**steps.scale
    last_q, last_k = (np.arange(size) >= (size - 1) // steps.block * steps.block if steps.block else True
                      for size in (n, m))  # fmt: skip
    q_back, k_back = _back_at(steps, q_at, k_at)
    dq = _returned(ds.where(last_k).matmul(turned_k, r).scaled(scale), q_back, spec.rope, steps.turned, r)
    both = (x.swapped().where(last_q) if steps.transposed or n != m else x for x in (ds, weights))
    spread = (x.matmul(y, r).scaled(z) for x, y, z in zip(both, (turned_q, out), (scale, steps.times), strict=True))
    dk, dv = (_gathered(x, k.shape[1], steps.groups, r) for x in spread)
    dv = _returned(dv, k_at, spec.rope, "back", r) if steps.values else dv
    return dq, _returned(dk, k_back, spec.rope, steps.turned, r), dv


def _softmax(scores: Noisy, weights: Array, r: Roundings) -> Noisy:
    """A weight has the relative error of its exponential, and that of the sum, which is their mean. What is not linear
    in the errors is at most e^δ times as much."""
    m = weights.shape[-1]
    top = abs(scores.value).max(axis=-1, keepdims=True)
    noise = scores.noise + r.fine**2 * (np.square(top) + m + 8)
    noise = noise + (np.square(weights) * noise).sum(axis=-1, keepdims=True)
    bound = scores.bound + (weights * scores.bound).sum(axis=-1, keepdims=True)
    most = np.exp(np.minimum(6 * np.sqrt(noise) + bound, 2))
    return Noisy(weights, np.square(weights * most) * noise, weights * most * bound).stored(r)


def _cap_derivative(scores: Noisy, cap: float, r: Roundings) -> Noisy:
    """1 − (s/c)², with s the capped score, of which it is computed."""
    s = scores.scaled(1 / cap)
    slope = 2 * abs(s.value)
    rounding = (4 * r.fine) ** 2 + 2 / 3 * r.coarse**2
    return Noisy(1 - np.square(s.value), np.square(slope) * s.noise + rounding, slope * s.bound + np.square(s.bound))


_DERIVATIVES: dict[str, Callable[[Array], Array]] = {
    "elu+1": lambda x: np.exp(np.minimum(x, 0)),
    "relu": lambda x: np.where(x > 0, 1.0, 0.0),
    "relu2": lambda x: 2 * np.maximum(x, 0),
    "exp": np.exp,
    "identity": np.ones_like,
}


def linear_gradients(
    spec: Spec, roundings: Roundings, q: Array, k: Array, v: Array, g: Array, positions: Array, steps: Backward = RIGHT
) -> tuple[Noisy, Noisy, Noisy]:
    """dq, dk and dv of Eq. (19), or without a rope of Eq. (18), in float64; shapes as in `softmax_gradients`."""
    (_, h, n, _), m, r = q.shape, k.shape[-2], roundings
    rope = None if spec.rope is None else spec.rope.pure
    q_at, k_at = _places(positions, n, m)
    visible = _seen(replace(spec, window=None), steps, q_at, k_at, n, m)
    phi, slope = definition.FEATURE_MAPS[spec.feature_map], _DERIVATIVES[spec.feature_map]
    fq, fk, values, out = Noisy(phi(q)), _spread(Noisy(phi(k)), h), _spread(Noisy(v), h), Noisy(g)
    fq, fk = (x.stored(r).rounded(2 * r.fine) for x in (fq, fk))
    tq, tk = _turn(fq, q_at, rope, r), _turn(fk, k_at, rope, r)
    total = fq.matmul(fk.swapped(), r).where(visible).summed(-1, r).inverted()  # 1/D
    products = tq.matmul(tk.swapped(), r).where(visible)
    weights = products.times(total).stored(r)
    shares = Noisy(np.zeros(g.shape), r.step**2 / 3)  # what is lost of g/D, where a kernel stores that
    o = weights.matmul(values, r)
    row = out.times(o).summed(-1, r).times(total).plus(shares.times(o).summed(-1, r)).stored(r)  # −dD
    dn = out.matmul(values.swapped(), r).times(total).plus(shares.matmul(values.swapped(), r))
    dn = dn.where(visible).stored(r)
    through = Noisy(np.broadcast_to(np.where(visible, 1.0, 0.0), dn.value.shape))

    def gradient(turned: Noisy, plain: Noisy, at: Array, x: Array) -> Noisy:
        back = _returned(turned, at, rope, steps.turned, r)
        back = back.plus(plain, -1.0) if steps.denominator else back
        return back.times(Noisy(slope(x)).rounded(2 * r.fine, r.coarse)) if steps.feature_map else back

    q_back, k_back = _back_at(steps, q_at, k_at)
    dq = gradient(dn.matmul(tk, r), row.times(through.matmul(fk, r)), q_back, q)
    spread = dn.swapped().matmul(tq, r), through.swapped().matmul(row.times(fq), r), weights.swapped().matmul(out, r)
    turned, plain, dv = (_gathered(x, k.shape[1], steps.groups, r) for x in spread)
    dv = dv.plus(_gathered(products.swapped().matmul(shares, r), k.shape[1], steps.groups, r))
    dv = _returned(dv, k_at, rope, "back", r) if steps.values else dv
    dk = gradient(turned, plain, k_back, k)
    return dq.scaled(steps.times), dk.scaled(steps.times), dv.scaled(steps.times)
