"""Softmax attention, Eq. (2), in linear memory.

`attention` checks its arguments; `attend`, its core, does not. It takes a tile of queries at a time, and the keys that
any of them sees tile by tile, so that it never holds n × m scores. Positions decide who sees whom, not places in an
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
from .backend import Array, compute_dtype, from_numpy, namespace, on_host
from .tiles import cuts, each, tile_of, tiles

Int64: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

_ROWS = 256  # queries in a tile on the host, over all heads that share a key head
_SCORES = 2**17  # in a tile on the host, so that they stay in the caches
_DEVICE = 2**26  # scores in a tile on the GPU, where every launch costs: 256 MB
_FINE = 128  # keys: by so many they are skipped, or masked
_FEW = 64  # queries: for fewer the lengths of the keys cost more than they spare
_SAFE = 60.0  # exp of a score within ±60, and the sum of 10¹² of them, is an ordinary float32
_FAR = 2**62  # beyond any distance of two positions


@dataclass(frozen=True)
class Rule:
    """How scores come about, and which of them count: made once for all layers that share it."""

    q_at: Int64  # (…, 1, 1, n), on the host as is the next; axes have length 1 where nothing varies
    k_at: Int64  # (…, 1, 1, m)
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
    """softmax(q·kᵀ·scale)·v, Eq. (2): q (…, h, n, d), k (…, g, m, d), v (…, g, m, e) -> (…, h, n, e).

    >>> x = np.eye(3)[None]
    >>> attention(x, x, x, causal=True, scale=100.0).round(2)  # each finds itself
    array([[[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]]])

    Query head i reads key head i·g//h. A row that sees nothing is zeros. Values must be finite, since hidden ones are
    multiplied too, by 0.
    ``causal``: a query sees the keys with q_position − k_position ≥ 0; ``window``: those with a distance below
    it, on both sides if not causal. Positions are integers, (n,) or (…, n) with the first batch axes of q. Keys
    default to 0 … m−1, queries to the last n of the keys' (so n < m continues a cache). They decide nothing else.
    ``mask``, broadcastable to (…, h, n, m): bool, where True is visible, or float, added to the scores; −inf hides.
    ``scale`` defaults to 1/√d; ``softcap`` c makes scores c·tanh(score/c), before any mask.
    """
    xp = namespace(q=q, k=k, v=v) if mask is None else namespace(q=q, k=k, v=v, mask=mask)
    rule = checked_rule(q, k, v, (causal, window), (q_positions, k_positions), (scale, softcap))
    mask = None if mask is None else _checked_mask(mask, (*q.shape[:-1], k.shape[-2]), k.shape[-3])
    out = attend(q, k, v, rule, mask)
    if xp is not np and not bool(xp.isfinite(out).all()):
        check_overflow(q, k, rule, compute_dtype("q", q))  # on the host it was seen on the way
    return out


def checked_rule(
    q: Array, k: Array, v: Array, sees: tuple[Any, Any], positions: tuple[Any, Any], scores: tuple[Any, Any]
) -> Rule:
    """The rule, if the arrays fit each other; of causal and window, the positions of q and k, scale and softcap."""
    dtype, (causal, window), (scale, softcap) = check_heads(q, k, v), sees, scores
    checks.flag("causal", causal)
    window = None if window is None else min(checks.integer("window", window, 1), _FAR)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else checks.in_range("scale", scale, dtype)
    if softcap is not None:
        softcap = checks.in_range("softcap", softcap, dtype)
        checks.in_range("scale/softcap, which queries are multiplied with,", scale / softcap, dtype)
    (n, m), batch, (q_at, k_at) = (q.shape[-2], k.shape[-2]), q.shape[:-3], positions
    # A token that comes after all keys, as in decoding, sees them all.
    last = q_at is None is k_at and n == 1 and (window is None or window >= m)
    if q_at is None and k_at is not None and n > m:
        raise ValueError(f"q_positions must be given: {n} queries cannot be the last of {m} keys")
    flat = (1,) * (len(batch) + 2)
    every = np.arange(m).reshape(*flat, m) if k_at is None else _positions("k_positions", k_at, batch, m)
    if q_at is not None:
        q_at = _positions("q_positions", q_at, batch, n)
    else:
        q_at = np.arange(m - n, m).reshape(*flat, n) if k_at is None else every[..., m - n :]
    return Rule(q_at, every, None if last else reach(causal, window), scale, softcap)


def check_heads(q: Array, k: Array, v: Array) -> np.dtype[Any]:
    """The dtype of the arithmetic, if q (…, h, n, d), k (…, g, m, d) and v (…, g, m, e) fit each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        dtype = compute_dtype(name, x)
        if x.dtype != q.dtype:
            raise TypeError(f"q, k and v must have one dtype, {name} was {x.dtype} and q {q.dtype}: convert one")
    rule = "q (…, h, n, d), k (…, g, m, d) and v (…, g, m, e) must agree in …, g, m and d, with d, g and h at least 1"
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
    """A mask that broadcasts to shape (…, h, n, m), as (…, g, r, n, m) with axes of length 1."""
    if mask.dtype != bool:
        compute_dtype("mask must be bool, where True is visible; one that is added", mask)
    full = (*(1,) * (len(shape) - mask.ndim), *mask.shape)
    if len(full) != len(shape) or any(a not in (1, b) for a, b in zip(full, shape, strict=True)):
        raise ValueError(f"mask must be broadcastable to (…, h, n, m), {shape}, had shape {mask.shape}")
    h = full[-3]
    return mask.reshape(*full[:-3], *((1, 1) if h == 1 else (g, h // g)), *full[-2:])


def check_overflow(q: Array, k: Array, rule: Rule, dtype: np.dtype[Any]) -> None:
    """Finite queries and keys must have scores in the range of the dtype: −inf would pass for a hidden key."""
    if not q.size or not k.size:
        return
    largest, most = [float(abs(x).max()) for x in (q, k)], float(np.finfo(dtype).max)
    if all(map(math.isfinite, largest)) and math.prod(largest) * q.shape[-1] * rule.factor > most:
        sizes = f"queries reach {largest[0]:.3g}, keys {largest[1]:.3g}, and scale is {rule.factor:.3g}"
        raise ValueError(f"scores must not exceed {dtype}, {most:.3g}: {sizes}; make them smaller, or use float64")


# ── The core: arguments are not checked from here on ─────────────────────────────────────────────────────────────────


def attend(q: Array, k: Array, v: Array, rule: Rule, mask: Array | None = None) -> Array:
    """Eq. (2): q (…, h, n, d), k (…, g, m, d), v (…, g, m, e), mask (…, g, r, n, m), h = g·r -> (…, h, n, e).

    On a GPU nothing waits for the device: where scores overflow, outputs are NaN.
    """
    xp, dtype, (*batch, h, n, d), (g, m) = namespace(q), compute_dtype("q", q), q.shape, k.shape[-3:-1]
    out = xp.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    if not (out.size and m):
        out[...] = 0
        return out
    lead, r = (*batch, g), h // g
    groups, target = q.reshape(*lead, r, n, d), out.reshape(*lead, r, n, v.shape[-1])
    k, v = _operand(k, dtype), _operand(v, dtype)
    longest = None
    if xp is np and n >= _FEW and (mask is None or mask.dtype == bool):
        longest = np.einsum("...d,...d->...", k, k).max(axis=-1)

    def some(index: tuple[Any, ...]) -> None:
        heads = index[: len(lead)]
        part = replace(rule, q_at=tile_of(rule.q_at, index), k_at=tile_of(rule.k_at, index[:-1]))
        bound = None if longest is None else longest[heads].max()
        seen = None if mask is None else tile_of(mask, index)
        target[index] = _attend(groups[index], k[heads], v[heads], part, seen, bound)  # rounded here

    each(some, pieces(xp, groups.shape[:-1], m), spread=xp is np, products=True)
    return out


def pieces(xp: ModuleType, shape: tuple[int, ...], m: int) -> Iterator[tuple[Any, ...]]:
    """Indices of tiles of queries of this shape, (…, g, r, n), which have up to m keys."""
    *lead, r, n = shape
    # On the host as many key heads at a time as have few scores, or one, so that they stay in the caches.
    rows = max(1, _ROWS // r if xp is np else _DEVICE // max(math.prod(lead) * r * m, 1))
    limit = _SCORES if xp is np else _DEVICE
    # The last queries first: if causal they see the most keys, and a thread should not be left with them in the end.
    for some, heads in itertools.product(cuts(n, rows)[::-1], tiles((*lead, r * min(rows, n) * m), limit)):
        yield (*heads, *(slice(None),) * (len(lead) - len(heads) + 1), some)


@np.errstate(all="ignore")  # what overflows is found afterwards; 0/0 is where nothing is seen; NaN stays NaN
def _attend(q: Array, k: Array, v: Array, rule: Rule, mask: Array | None, bound: Any) -> Array:
    """The outputs of a tile of queries (…, r, n, d): (…, r, n, e)."""
    dtype, running = k.dtype, Running(q, rule, k.dtype, bound).see(k, v, mask)
    mean = running.mean()
    if namespace(q) is not np or running.total is None:
        return mean
    if not (finite := np.isfinite(mean)).all() or not running.total.all():
        check_overflow(q, k, rule, dtype)
    if not finite.all():
        # A sum of large values may overflow where their mean does not: then the values are made smaller first.
        again = Running(q, rule, dtype, None).see(k, v * 2.0**-32, mask).mean()
        mean = np.where(finite, mean, again * 2.0**32)
    return mean


class Running:
    """Softmax attention of a tile of queries to keys that come one tile after the other: outputs are numerator/total.

    Both are sums of exp(score − top), with top the greatest score so far: when that rises, they shrink. Where scores
    are known to be small, nothing is taken off, which saves two passes over them.
    """

    def __init__(self, q: Array, rule: Rule, dtype: np.dtype[Any], bound: Any) -> None:
        self.rule, (*lead, r, n, d) = rule, q.shape
        self.shape, self.xp = (*lead, r, n), namespace(q)
        self.queries = q.astype(dtype, copy=False).reshape(*lead, r * n, d) * rule.factor  # keys shared: one matrix
        self.small = bound is not None and self._bounded(float(bound))
        self.numerator: Array = None  # (…, r·n, e)
        self.total: Array = None  # (…, r·n, 1)
        self.top: Array = None  # (…, r·n, 1)
        self.blind: Any = True  # whether no key was visible so far, on a GPU: one for all, or (…, r, n, 1)

    def _bounded(self, longest: float) -> bool:
        """Whether |score| ≤ |q||k| is small, by the greatest |k|²; NaN is not small."""
        own = float(np.einsum("...d,...d->...", self.queries, self.queries).max())
        lost = self.queries.shape[-1] * float(np.finfo(self.queries.dtype).tiny)  # squares below that are 0
        return math.sqrt(own + lost) * math.sqrt(longest + lost) * (self.rule.softcap or 1.0) <= _SAFE

    def see(self, k: Array, v: Array, mask: Array | None = None) -> Running:
        """Adds keys (…, m, d) and values (…, m, e) at the rule's positions; those that no query sees are skipped."""
        rows, m = math.prod(self.shape), k.shape[-2]
        width = min(m, max(1, (_SCORES if self.xp is np else _DEVICE) // rows))
        spare = self.xp.empty(rows * width, k.dtype)  # one for all tiles: fresh pages cost more than the arithmetic
        for keys, in_part in _stretches(self.rule, m, width):
            hidden, bias = _hidden(self.xp, self.rule, keys) if in_part else None, None
            if mask is not None:
                some = tile_of(mask, (*(slice(None),) * (mask.ndim - 1), keys))
                if mask.dtype == bool:
                    hidden = ~some if hidden is None else hidden | ~some
                else:
                    bias = _bias(self.xp, some, k.dtype)
            self._add(k[..., keys, :], v[..., keys, :], hidden, bias, spare)
        return self

    def _add(self, k: Array, v: Array, hidden: Array | None, bias: Array | None, spare: Array) -> None:
        xp, softcap = self.xp, self.rule.softcap
        shape = (*self.queries.shape[:-1], k.shape[-2])
        scores = xp.matmul(self.queries, k.swapaxes(-1, -2), out=spare[: math.prod(shape)].reshape(shape))
        if softcap is not None:
            xp.multiply(xp.tanh(scores, out=scores), softcap, out=scores)
        by_head = scores.reshape(*self.shape, shape[-1])
        if bias is not None:
            by_head += bias
        if hidden is not None:
            xp.copyto(by_head, -math.inf, where=hidden)
        if xp is not np:  # on the host it is seen from the totals
            unseen: Any = False if hidden is None else hidden
            unseen = unseen if bias is None else (bias == -math.inf) | unseen
            self.blind = self.blind & (unseen if unseen is False else unseen.all(axis=-1, keepdims=True))
        shrink = None if self.small else self._take_off(scores)
        total = xp.exp(scores, out=scores).sum(axis=-1, keepdims=True)
        numerator = scores @ v  # Eq. (2), but for the division
        if self.numerator is None:
            self.numerator, self.total = numerator, total
            return
        if shrink is not None:
            self.numerator *= shrink
            self.total *= shrink
        self.numerator += numerator
        self.total += total

    def _take_off(self, scores: Array) -> Array | None:
        """Subtracts the greatest score of each row so far; returns what the sums so far must be multiplied with."""
        # exp(score) overflows float32 from 89 on; less the greatest score, it is at most 1. In a row of −inf alone that
        # would be exp(−inf + inf) = NaN: there the lowest finite number is taken off, and all are exp(−inf) = 0.
        before, top = self.top, scores.max(axis=-1, keepdims=True)
        self.top = self.xp.maximum(top, float(np.finfo(scores.dtype).min) if before is None else before)
        scores -= self.top
        return None if before is None else self.xp.exp(before - self.top)

    def mean(self) -> Array:
        """The outputs (…, r, n, e): zeros where nothing was seen, NaN where scores that were seen overflow."""
        if self.numerator is None:
            return self.xp.zeros((*self.shape, 1), self.queries.dtype)
        mean = (self.numerator / self.total).reshape(*self.shape, -1)
        blind = self.blind
        if self.xp is np:
            blind = not self.total.all() and self.total.reshape(*self.shape, 1) == 0
        return mean if blind is False else self.xp.where(blind, 0, mean)


def _stretches(rule: Rule, m: int, width: int) -> list[tuple[slice, bool]]:
    """Stretches of at most so many keys that some query sees, and whether some query there does not see some key."""
    if rule.reach is None:
        return [(keys, False) for keys in cuts(m, width)]
    (low, high), step = rule.reach, min(width, _FINE)
    starts = np.arange(0, m, step)
    # All distances to these keys lie between the two, whatever the order of the positions is.
    near = rule.q_at.min(axis=-1, keepdims=True) - np.maximum.reduceat(rule.k_at, starts, axis=-1)
    far = rule.q_at.max(axis=-1, keepdims=True) - np.minimum.reduceat(rule.k_at, starts, axis=-1)
    others = tuple(range(near.ndim - 1))
    seen, in_part = ((far >= low) & (near <= high)).any(axis=others), ((near < low) | (far > high)).any(axis=others)
    found: list[tuple[slice, bool]] = []
    for i in np.flatnonzero(seen).tolist():
        keys, part = slice(i * step, min((i + 1) * step, m)), bool(in_part[i])
        last, last_part = found[-1] if found else (slice(-1, -1), part)
        if last.stop == keys.start and last_part == part and keys.stop - last.start <= width:
            found[-1] = slice(last.start, keys.stop), part
        else:
            found.append((keys, part))
    return found


def _hidden(xp: ModuleType, rule: Rule, keys: slice) -> Array:
    """Whether these keys are out of reach: (…, 1, n, keys)."""
    # One comparison for each bound: computing the n × m distances first would take twice as many passes.
    low, high = rule.reach or (-_FAR, _FAR)
    at, others = from_numpy(rule.q_at, xp)[..., :, None], from_numpy(rule.k_at[..., keys], xp)[..., None, :]
    hidden = at < others + low
    if high < _FAR - 1:
        hidden |= at > others + high
    return hidden


def _bias(xp: ModuleType, mask: Array, dtype: np.dtype[Any]) -> Array:
    """A float mask in the dtype of the scores."""
    # With a float64 mask, float32 scores + mask is a float64 sum, so the mask is converted first. But what is finite
    # must stay so: the lowest float64, which people use as "almost −inf", becomes the lowest float32.
    if mask.dtype.itemsize > dtype.itemsize:
        most = float(np.finfo(dtype).max)
        mask = xp.where(abs(mask) == math.inf, mask, xp.clip(mask, -most, most))
    return mask.astype(dtype, copy=False)


def _operand(x: Array, dtype: np.dtype[Any]) -> Array:
    """x, ready for matrix products: a copy only if its dtype or its stride needs one."""
    return x if x.dtype == dtype and x.strides[-1] == x.itemsize else x.astype(dtype, order="C")
