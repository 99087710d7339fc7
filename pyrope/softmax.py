"""Softmax attention, Eq. (2), in linear memory.

`attention` checks its arguments; `attend`, its core, does not. It takes a tile of queries at a time, and the keys that
any of them sees tile by tile, so that it never holds n × t scores. Positions decide who sees whom, not places in an
array. float16 and bfloat16 are computed in float32 and rounded once; float32 and float64 in their own dtype.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from . import checks
from .backend import Array, compute_dtype, from_numpy, fused, namespace, on_host
from .tiles import cuts, each, tile_of, tiles

Int64: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

_ROWS = 128  # queries in a tile on the host, over all heads that share a key head; more see more keys in vain
_SCORES = 2**18  # in a tile on the host: few enough for the caches, and many for each call
_DEVICE = 2**26  # scores in a tile on the GPU, where every launch costs: 256 MB
_FINE = 128  # keys: by so many they are skipped, or masked
_FEW = 64  # queries: for fewer the lengths of the keys cost more than they spare
_SAFE = 60.0  # exp of a score within ±60, and the sum of 10¹² of them, is an ordinary float32
_FAR = 2**62  # beyond any distance of two positions
_LOWEST = {np.dtype(name): float(np.finfo(name).min) for name in ("float32", "float64")}  # finite numbers


@dataclass(frozen=True)
class ScoreRule:
    """How scores come about, and which of them count: made once for all layers that share it."""

    q_at: Int64  # (…, 1, 1, n), on the host as is the next; axes have length 1 where nothing varies
    k_at: Int64  # (…, 1, 1, t)
    reach: tuple[int, int] | None  # the least and greatest q_at − k_at that is visible; None: all
    scale: float
    softcap: float | None = None

    @property
    def factor(self) -> float:
        """What queries are multiplied with: (q·k)·scale is one pass more over all scores, and overflows sooner."""
        return self.scale / (self.softcap or 1.0)


def reach(causal: bool, window: int | None) -> tuple[int, int] | None:
    """The least and the greatest q_position − k_position that is visible; None: all."""
    window = _FAR if window is None else window
    return (0 if causal else 1 - window, window - 1) if causal or window < _FAR else None


def attention(
    q: Array, k: Array, v: Array, *, causal: bool = False, q_positions: Any = None, k_positions: Any = None,
    mask: Array | None = None, window: int | None = None, softcap: float | None = None, scale: float | None = None
) -> Array:  # fmt: skip
    """softmax(q·kᵀ·scale)·v, Eq. (2): q (…, h, n, d), k (…, g, t, d), v (…, g, t, c) -> (…, h, n, c).

    >>> x = np.eye(3)[None]
    >>> attention(x, x, x, causal=True, scale=100.0).round(2)  # each finds itself
    array([[[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]]])

    Query head i reads key head i·g//h. A row that sees nothing is zeros. Values must be finite, since hidden ones are
    multiplied too, by 0.
    ``causal``: a query sees the keys with q_position − k_position ≥ 0; ``window``: those with a distance below
    it, on both sides if not causal. Positions are integers, (n,) or (…, n) with the first batch axes of q. Keys
    default to 0 … t−1, queries to the last n of the keys' (so n < t continues a cache). They decide nothing else.
    ``mask``, broadcastable to (…, h, n, t): bool, where True is visible, or float, added to the scores; −inf hides.
    ``scale`` defaults to 1/√d; ``softcap`` makes scores softcap·tanh(score/softcap), before any mask.
    """
    xp = namespace(q=q, k=k, v=v) if mask is None else namespace(q=q, k=k, v=v, mask=mask)
    rule = checked_rule(q, k, v, (causal, window), (q_positions, k_positions), (scale, softcap))
    mask = None if mask is None else _checked_mask(mask, (*q.shape[:-1], k.shape[-2]), k.shape[-3])
    out = attend(q, k, v, rule, mask)
    if xp is not np and not bool(_finite(xp, out.ravel())):
        check_overflow(q, k, rule, compute_dtype("q", q))  # on the host it was seen on the way
    return out


def checked_rule(
    q: Array, k: Array, v: Array, sees: tuple[Any, Any], positions: tuple[Any, Any], scores: tuple[Any, Any]
) -> ScoreRule:
    """The rule, if the arrays fit each other; of causal and window, the positions of q and k, scale and softcap."""
    dtype, (causal, window), (scale, softcap) = check_heads(q, k, v), sees, scores
    checks.flag("causal", causal)
    window = None if window is None else min(checks.integer("window", window, 1), _FAR)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else checks.in_range("scale", scale, dtype)
    if softcap is not None:
        softcap = checks.in_range("softcap", softcap, dtype)
        checks.in_range("scale/softcap, which queries are multiplied with,", scale / softcap, dtype)
    (n, t), batch, (q_at, k_at) = (q.shape[-2], k.shape[-2]), q.shape[:-3], positions
    # A token that comes after all keys, as in decoding, sees them all.
    last = q_at is None is k_at and n == 1 and (window is None or window >= t)
    if q_at is None and k_at is not None and n > t:
        raise ValueError(f"q_positions must be given: {n} queries cannot be the last of {t} keys")
    flat = (1,) * (len(batch) + 2)
    every = np.arange(t).reshape(*flat, t) if k_at is None else _positions("k_positions", k_at, batch, t)
    if q_at is not None:
        q_at = _positions("q_positions", q_at, batch, n)
    else:
        q_at = np.arange(t - n, t).reshape(*flat, n) if k_at is None else every[..., t - n :]
    return ScoreRule(q_at, every, None if last else reach(causal, window), scale, softcap)


def check_heads(q: Array, k: Array, v: Array) -> np.dtype[Any]:
    """The dtype of the arithmetic, if q (…, h, n, d), k (…, g, t, d) and v (…, g, t, c) fit each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        dtype = compute_dtype(name, x)
        if x.dtype != q.dtype:
            raise TypeError(f"q, k and v must have one dtype, {name} was {x.dtype} and q {q.dtype}: convert one")
    rule = "q (…, h, n, d), k (…, g, t, d) and v (…, g, t, c) must agree in …, g, t and d, with d, g and h at least 1"
    fits = q.ndim == k.ndim == v.ndim >= 3 and k.shape[:-3] == q.shape[:-3] and k.shape[:-1] == v.shape[:-1]
    if not fits or q.shape[-1] != k.shape[-1] or 0 in (q.shape[-1], q.shape[-3], k.shape[-3]):
        raise ValueError(f"{rule}, had shapes {q.shape}, {k.shape} and {v.shape}")
    if (h := q.shape[-3]) % (g := k.shape[-3]):
        raise ValueError(f"the {g} key heads must divide the {h} query heads: head i reads key head i·g//h")
    return dtype


def _positions(name: str, positions: Any, batch: tuple[int, ...], length: int) -> Int64:
    """Positions on the host, as (…, 1, 1, length)."""
    at = checks.positions(name, on_host(positions))
    *first, last = at.shape or (None,)
    if last != length or len(first) > len(batch) or any(a not in (1, b) for a, b in zip(first, batch, strict=False)):
        rule = f"({length},), or (…, {length}) with the first of the batch axes {batch}"
        raise ValueError(f"{name} must have shape {rule}, had {at.shape}")
    return at.astype(np.int64, copy=False).reshape(*first, *(1,) * (len(batch) - len(first) + 2), length)


def _checked_mask(mask: Array, shape: tuple[int, ...], g: int) -> Array:
    """A mask that broadcasts to shape (…, h, n, t), as (…, g, r, n, t) with axes of length 1."""
    if mask.dtype != bool:
        compute_dtype("mask must be bool, where True is visible; one that is added", mask)
    full = (*(1,) * (len(shape) - mask.ndim), *mask.shape)
    if len(full) != len(shape) or any(a not in (1, b) for a, b in zip(full, shape, strict=True)):
        raise ValueError(f"mask must be broadcastable to (…, h, n, t), {shape}, had shape {mask.shape}")
    h = full[-3]
    return mask.reshape(*full[:-3], *((1, 1) if h == 1 else (g, h // g)), *full[-2:])


def check_overflow(q: Array, k: Array, rule: ScoreRule, dtype: np.dtype[Any]) -> None:
    """Finite queries and keys must have scores in the range of the dtype: −inf would pass for a hidden key."""
    if not q.size or not k.size:
        return
    largest, most = [float(abs(x).max()) for x in (q, k)], float(np.finfo(dtype).max)
    if all(map(math.isfinite, largest)) and math.prod(largest) * q.shape[-1] * rule.factor > most:
        sizes = f"queries reach {largest[0]:.3g}, keys {largest[1]:.3g}, and scale is {rule.factor:.3g}"
        raise ValueError(f"scores must not exceed {dtype}, {most:.3g}: {sizes}; make them smaller, or use float64")


# ── The core: arguments are not checked from here on ─────────────────────────────────────────────────────────────────


def attend(q: Array, k: Array, v: Array, rule: ScoreRule, mask: Array | None = None) -> Array:
    """Eq. (2): q (…, h, n, d), k (…, g, t, d), v (…, g, t, c), mask (…, g, r, n, t), h = g·r -> (…, h, n, c).

    On a GPU nothing waits for the device: where scores overflow, outputs are NaN.
    """
    xp, dtype, (*batch, h, n, d), (g, t) = namespace(q), compute_dtype("q", q), q.shape, k.shape[-3:-1]
    shape, lead, r = (*q.shape[:-1], v.shape[-1]), (*batch, g), h // g
    if not (math.prod(shape) and t):
        return xp.zeros(shape, q.dtype)
    groups, k, v = q.reshape(*lead, r, n, d), _operand(k, dtype), _operand(v, dtype)
    out = xp.empty(shape, q.dtype)
    target = out.reshape(*lead, r, n, shape[-1])
    longest = None
    if xp is np and n >= _FEW and (mask is None or mask.dtype == bool):
        longest = np.einsum("...d,...d->...", k, k).max(axis=-1)

    def some(index: tuple[Any, ...]) -> None:
        heads = index[: len(lead)]
        part = rule
        if rule.reach is not None:
            part = replace(rule, q_at=tile_of(rule.q_at, index), k_at=tile_of(rule.k_at, index[:-1]))
        bound = None if longest is None else longest[heads].max()
        seen = None if mask is None else tile_of(mask, index)
        target[index] = _attend(groups[index], k[heads], v[heads], part, seen, bound)  # rounded here

    each(some, pieces(xp, groups.shape[:-1], t), spread=xp is np, products=True)
    return out


def pieces(xp: ModuleType, shape: tuple[int, ...], t: int) -> Iterator[tuple[Any, ...]]:
    """Indices of tiles of queries of this shape, (…, g, r, n), which have up to t keys."""
    *lead, r, n = shape
    # On the host as many key heads at a time as have few scores, or one, so that they stay in the caches.
    rows = max(1, _ROWS // r if xp is np else _DEVICE // max(math.prod(lead) * r * t, 1))
    limit = _SCORES if xp is np else _DEVICE
    # The last queries first: if causal they see the most keys, and a thread should not be left with them in the end.
    for some, heads in itertools.product(cuts(n, rows)[::-1], tiles((*lead, r * min(rows, n) * t), limit)):
        yield (*heads, *(slice(None),) * (len(lead) - len(heads) + 1), some)


@np.errstate(all="ignore")  # what overflows is found afterwards; 0/0 is where nothing is seen; NaN stays NaN
def _attend(q: Array, k: Array, v: Array, rule: ScoreRule, mask: Array | None, bound: Any) -> Array:
    """The outputs of a tile of queries (…, r, n, d): (…, r, n, c)."""
    running = Running(q, rule, k.dtype, bound).see(k, v, mask)
    mean = running.mean()
    if running.whole:
        return mean
    check_overflow(q, k, rule, k.dtype)
    if not (finite := np.isfinite(mean)).all():
        # A sum of large values may overflow where their mean does not: then the values are made smaller first.
        again = Running(q, rule, k.dtype, None).see(k, v * 2.0**-32, mask).mean()
        mean = np.where(finite, mean, again * 2.0**32)
    return mean


class Running:
    """Softmax attention of a tile of queries to keys that come one tile after the other: outputs are numerator/total.

    Both are sums of exp(score − top), with top the greatest score so far: when that rises, they shrink. Where scores
    are known to be small, nothing is taken off, which saves two passes over them.
    """

    def __init__(self, q: Array, rule: ScoreRule, dtype: np.dtype[Any], bound: Any) -> None:
        self.rule, (*lead, r, n, d) = rule, q.shape
        self.shape, self.xp = (*lead, r, n), namespace(q)
        self.queries = q.astype(dtype, copy=False).reshape(*lead, r * n, d) * rule.factor  # keys shared: one matrix
        self.small = bound is not None and self._bounded(float(bound))
        self.numerator: Array = None  # (…, r·n, c)
        self.total: Array = None  # (…, r·n, 1)
        self.top: Array = None  # (…, r·n, 1)
        self.masked = rule.reach is not None  # whether a row may see nothing
        self.whole = True

    def _bounded(self, longest: float) -> bool:
        """Whether |score| ≤ |q||k| is small, by the greatest |k|²; NaN is not small."""
        own = float(np.einsum("...d,...d->...", self.queries, self.queries).max())
        lost = self.queries.shape[-1] * float(np.finfo(self.queries.dtype).tiny)  # squares below that are 0
        return math.sqrt(own + lost) * math.sqrt(longest + lost) * (self.rule.softcap or 1.0) <= _SAFE

    def see(self, k: Array, v: Array, mask: Array | None = None) -> Running:
        """Adds keys (…, t, d) and values (…, t, c) at the rule's positions; those that no query sees are skipped."""
        rows, t = math.prod(self.shape), k.shape[-2]
        width = min(t, max(1, (_SCORES if self.xp is np else _DEVICE) // rows))
        spare = self.xp.empty(rows * width, k.dtype)  # one for all tiles: fresh pages cost more than the arithmetic
        self.masked |= mask is not None
        marked = self.xp is not np and self.rule.reach is not None  # see _mask
        for keys, in_part in _stretches(self.rule, t, width, min(width, _FINE) if self.xp is np else width):
            masks = [] if mask is None else [_narrowed(self.xp, mask, keys, k.dtype)]
            self._add(k[..., keys, :], v[..., keys, :], keys if in_part or marked else None, masks, spare)
        return self

    def _add(self, k: Array, v: Array, far: slice | None, masks: list[Array], spare: Array) -> None:
        """Adds a tile of keys; ``far`` says where they are if some are out of reach."""
        xp, shape = self.xp, (*self.queries.shape[:-1], k.shape[-2])
        scores = xp.matmul(self.queries, k.swapaxes(-1, -2), out=spare[: math.prod(shape)].reshape(shape))
        if self.rule.softcap is not None:
            xp.tanh(scores, out=scores)
            scores *= self.rule.softcap
        by_head = scores.reshape(*self.shape, shape[-1])
        if self.rule.reach is not None and far is not None:
            at, others = from_numpy(self.rule.q_at, xp)[..., None], from_numpy(self.rule.k_at[..., None, far], xp)
            _mask(xp, by_head, at, others, *self.rule.reach, *masks)
        elif masks:
            _mask(xp, by_head, 0, 0, 0, 0, *masks)
        shrink = self._raise(scores)
        total = scores.sum(axis=-1, keepdims=True)
        numerator = scores @ v  # Eq. (2), but for the division
        if self.numerator is not None:
            numerator += self.numerator * shrink
            total += self.total * shrink
        self.numerator, self.total = numerator, total

    def _raise(self, scores: Array) -> Array | float:
        """exp(score − top) for every score, in place; returns what the sums so far must be multiplied with."""
        if self.small:
            self.xp.exp(scores, out=scores)
            return 1.0
        before, top = self.top, _top(self.xp, scores)[..., None]
        self.top = top if before is None else self.xp.maximum(top, before)
        _powers(self.xp, scores, self.top)
        return 1.0 if before is None else self.xp.exp(before - self.top)

    def mean(self) -> Array:
        """The outputs (…, r, n, c): zeros where nothing was seen, NaN where scores that were seen overflow; on the host
        ``whole`` then says that there are neither."""
        if self.numerator is None:
            return self.xp.zeros((*self.shape, 1), self.queries.dtype)
        mean: Array = self.numerator / self.total if self.xp is np or not self.masked else None
        self.whole = self.xp is not np or bool(np.isfinite(mean).all())
        if mean is None or not self.whole:
            mean = _mean(self.xp, self.numerator, self.total)
        return mean.reshape(*self.shape, -1)


def _stretches(rule: ScoreRule, t: int, width: int, step: int) -> list[tuple[slice, bool]]:
    """Stretches of at most so many keys that some query sees, and whether some query there does not see some key."""
    if rule.reach is None:
        return [(keys, False) for keys in cuts(t, width)]
    low, high = rule.reach
    starts = np.arange(0, t, step)
    # All distances to these keys lie between the two, whatever the order of the positions is.
    near = rule.q_at.min(axis=-1, keepdims=True) - np.maximum.reduceat(rule.k_at, starts, axis=-1)
    far = rule.q_at.max(axis=-1, keepdims=True) - np.minimum.reduceat(rule.k_at, starts, axis=-1)
    others = tuple(range(near.ndim - 1))
    seen, in_part = ((far >= low) & (near <= high)).any(axis=others), ((near < low) | (far > high)).any(axis=others)
    found: list[tuple[slice, bool]] = []
    for i in np.flatnonzero(seen).tolist():
        keys, part = slice(i * step, min((i + 1) * step, t)), bool(in_part[i])
        last, last_part = found[-1] if found else (slice(-1, -1), part)
        if last.stop == keys.start and last_part == part and keys.stop - last.start <= width:
            found[-1] = slice(last.start, keys.stop), part
        else:
            found.append((keys, part))
    return found


# ── Between the products: each is one launch on a GPU ────────────────────────────────────────────────────────────────


@fused
def _mask(xp: ModuleType, scores: Array, at: Any, others: Any, low: int, high: int, *mask: Array) -> None:
    """Applies a mask, if there is one, and hides keys that are out of reach: at (…, n, 1), others (…, 1, keys)."""
    if xp is not np:  # where nobody waits to look at it, what overflows is NaN: −inf would pass for hidden
        xp.copyto(scores, math.nan, where=scores == -math.inf)
    for one in mask:
        if one.dtype == bool:
            xp.copyto(scores, -math.inf, where=~one)
        else:
            scores += one
    # One comparison for each bound: computing the n × t distances first would take twice as many passes.
    xp.copyto(scores, -math.inf, where=(at < others + low) | (at > others + high))


@fused
def _top(xp: ModuleType, scores: Array) -> Array:
    """The greatest score of each row."""
    # In a row of −inf alone exp(score − top) would be exp(−inf + inf) = NaN: with the lowest finite number it is 0.
    top = scores.max(axis=-1) if xp is np else xp.max(scores, axis=-1)  # the method is quicker, and cannot be fused
    return xp.maximum(top, _LOWEST[scores.dtype])


@fused
def _powers(xp: ModuleType, scores: Array, top: Array) -> None:
    scores -= top  # exp(score) overflows float32 from 89 on; less the greatest, it is at most 1
    xp.exp(scores, out=scores)


@fused
def _mean(xp: ModuleType, numerator: Array, total: Array) -> Array:
    return xp.where(total == 0, 0, numerator / total)


@fused
def _finite(xp: ModuleType, x: Array) -> Array:
    return xp.all(xp.isfinite(x), axis=-1)


def _narrowed(xp: ModuleType, mask: Array, keys: slice, dtype: np.dtype[Any]) -> Array:
    """The mask of some keys: of bool as it is, of floats in the dtype of the scores."""
    mask = mask[..., keys] if mask.shape[-1] > 1 else mask
    if mask.dtype == bool:
        return mask
    # With a float64 mask, float32 scores + mask is a float64 sum, so the mask is converted first. But what is finite
    # must stay so: the lowest float64, which people use as "almost −inf", becomes the lowest float32.
    if mask.dtype.itemsize > dtype.itemsize:
        most = float(np.finfo(dtype).max)
        mask = xp.where(abs(mask) == math.inf, mask, xp.clip(mask, -most, most))
    return mask.astype(dtype, copy=False)


def _operand(x: Array, dtype: np.dtype[Any]) -> Array:
    """x, ready for matrix products: a copy only if its dtype or its stride needs one."""
    return x if x.dtype == dtype and x.strides[-1] == x.itemsize else x.astype(dtype, order="C")
