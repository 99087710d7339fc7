"""Softmax attention, Eq. (2): `attention_by_definition` as in the paper, `attention` in linear memory.

`attention` takes a block of queries at a time and the keys that any of them may see, so that it holds
block × m scores and never n × m. Who may see whom is a matter of positions, not of places in an array.
float16 and bfloat16 are computed in float32 and rounded once; float32 and float64 in their own dtype.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from . import checks
from .backend import Array, blocks, compute_dtype, from_numpy, namespace, on_host, piece

_ROWS = 256  # queries in a block of the host, over all heads that share a key head
_SMALL = 2**16  # scores: below that, calls cost more than arithmetic
_DEVICE = 2**26  # scores in a block of the GPU: 256 MB
_FEW = 64  # queries: for fewer the lengths of the keys cost more than they spare
_SAFE = 60.0  # exp of a score within ±60, and the sum of 10¹² of them, is an ordinary float32
_FAR = 2**62  # beyond any distance of two positions


@dataclass(frozen=True)
class _Case:
    """Checked arguments. The h query heads are g groups of r; axes of length 1 where something does not vary."""

    q: Array  # (…, g, r, n, d)
    k: Array  # (…, g, m, d)
    v: Array  # (…, g, m, e)
    mask: Array | None  # (…, g, r, n, m), bool or float
    q_at: np.ndarray[Any, Any]  # (…, 1, 1, n), int64, on the host as is the next
    k_at: np.ndarray[Any, Any]  # (…, 1, 1, m)
    reach: tuple[int, int] | None  # the least and greatest q_at − k_at that is seen; None: all
    scale: float
    softcap: float | None
    dtype: np.dtype[Any]  # of the arithmetic
    longest: Array | None = None  # (…, g): the greatest |k|², where it is worth knowing


def probabilities(scores: Array, axis: int = -1) -> Array:
    """Softmax along an axis, float32 or float64: positive and of sum 1; zeros where all scores are −inf.

    >>> probabilities(np.array([[0.0, 0.0], [1e4, -1e4], [-np.inf, -np.inf]]))
    array([[0.5, 0.5],
           [1. , 0. ],
           [0. , 0. ]])
    """
    xp = namespace(scores=scores)
    weights = scores.copy()
    return xp.divide(weights, _exponentials(xp, weights, axis), out=weights)


def _exponentials(xp: ModuleType, scores: Array, axis: int = -1, small: bool = False) -> Array:
    """Scores become exp(score − greatest), in place; returns their sum, or 1 where there is nothing to sum.

    Of scores that are known to be small the greatest need not be found and taken off: two passes less.
    """
    if small:
        total = xp.exp(scores, out=scores).sum(axis=axis, keepdims=True)
        return total + (total == 0)
    # exp(score) overflows float32 from 89 on; less the greatest score of the row, it is at most 1. In a row of −inf
    # alone that would be exp(−inf + inf) = NaN: there the lowest finite number is taken off, and all are exp(−inf) = 0.
    top = xp.maximum(scores.max(axis=axis, keepdims=True), float(np.finfo(scores.dtype).min))
    xp.exp(xp.subtract(scores, top, out=scores), out=scores)
    # Then 0/0 is NaN again. Any other sum has exp(0) = 1 in it, so that one not less than 1 changes just these rows.
    return xp.maximum(scores.sum(axis=axis, keepdims=True), 1.0)


def attention_by_definition(q: Array, k: Array, v: Array, **options: Any) -> Array:
    """Eq. (2) as it is written, with all n × m scores in memory: `attention`, with its options but for ``block``.

    >>> q, k, v = np.zeros((1, 1, 2)), np.zeros((1, 2, 2)), np.array([[[1.0], [3.0]]])
    >>> attention_by_definition(q, k, v)  # equal scores: the mean of the values
    array([[[2.]]])
    """
    namespace(q=q, k=k, v=v)
    scores = attention_scores(q, k, **options)
    values = _checked(q, k, v, **options).v[..., None, :, :]  # the r query heads of a group read the same ones
    *lead, h, n, m = scores.shape
    weights = (probabilities(scores) if m else scores).reshape(*lead, values.shape[-4], h // values.shape[-4], n, m)
    return (weights @ values).astype(q.dtype).reshape(*q.shape[:-1], v.shape[-1])  # Eq. (2)


def attention_scores(q: Array, k: Array, **options: Any) -> Array:
    """What Eq. (2) takes the softmax of, qᵀk/√d, with −inf where a key is not seen: (…, h, n, m), float32 or float64.

    >>> attention_scores(np.ones((1, 2, 4)), np.ones((1, 2, 4)), causal=True)
    array([[[  2., -inf],
            [  2.,   2.]]])
    """
    if unknown := set(options) - set(inspect.signature(_checked).parameters):
        raise TypeError(f"attention does not know {', '.join(sorted(unknown))}")
    xp = namespace(q=q, k=k, mask=options.get("mask"))
    case = _checked(q, k, k, **options)
    scores = (case.q.astype(case.dtype) * case.scale) @ case.k[..., None, :, :].swapaxes(-1, -2)  # qᵀk/√d
    if case.softcap is not None:
        scores = case.softcap * xp.tanh(scores / case.softcap)
    if k.shape[-2]:
        _apply(xp, case.mask, scores)
        if case.reach is not None:
            xp.copyto(scores, -math.inf, where=_hidden(xp, case.reach, case.q_at, case.k_at))
    return scores.reshape(*q.shape[:-1], k.shape[-2])


def _apply(xp: ModuleType, mask: Array | None, scores: Array) -> None:
    """A mask over scores (…, r, n, m), in place: what is hidden becomes −inf, what is a number is added."""
    if mask is not None and mask.dtype == bool:
        xp.copyto(scores, -math.inf, where=~mask)
    elif mask is not None:
        # scores += mask is a float64 sum where the mask is float64, rounded afterwards: converted first, it is not.
        # But what is finite must stay so: the lowest float64, a usual "almost −inf", becomes the lowest float32.
        if mask.dtype.itemsize > scores.dtype.itemsize:
            most = float(np.finfo(scores.dtype).max)
            mask = xp.where(abs(mask) == math.inf, mask, xp.clip(mask, -most, most))
        xp.add(scores, mask.astype(scores.dtype, copy=False), out=scores)


def _hidden(xp: ModuleType, reach: tuple[int, int], q_at: Array, k_at: Array) -> Array:
    """Whether keys (…, r, m) are out of reach of queries (…, r, n): (…, r, n, m)."""
    # Bounds on the keys and one comparison for each: with the n × m distances it would be twice the passes.
    at, keys = from_numpy(q_at, xp)[..., :, None], from_numpy(k_at, xp)[..., None, :]
    hidden = at < keys + reach[0]
    if reach[1] < _FAR - 1:
        hidden |= at > keys + reach[1]
    return hidden


def attention(
    q: Array, k: Array, v: Array, *, causal: bool = False, q_positions: Any = None, k_positions: Any = None,
    mask: Array | None = None, window: int | None = None, softcap: float | None = None, scale: float | None = None,
    block: int | None = None
) -> Array:  # fmt: skip
    """softmax(q·kᵀ·scale)·v, Eq. (2): q (…, h, n, d), k (…, g, m, d), v (…, g, m, e) -> (…, h, n, e).

    >>> x = np.eye(3)[None]
    >>> attention(x, x, x, causal=True, scale=100.0).round(2)  # each finds itself
    array([[[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]]])

    Query head i reads key head i·g//h. A row that sees nothing is zeros. Values must be finite: also a hidden one is
    multiplied, by 0.
    ``causal``: a query sees the keys with q_position − k_position ≥ 0; ``window``: those with a distance below
    it, on both sides if not causal. Positions are integers, (n,) or (…, n) with the first batch axes of q. Keys
    default to 0 … m−1, queries to the last n of the keys' (so n < m continues a cache). They decide only this.
    ``mask``, broadcastable to (…, h, n, m): bool, True is seen, or float, added to the scores; −inf hides.
    ``scale`` defaults to 1/√d; ``softcap`` c makes scores c·tanh(score/c), before any mask.
    ``block``: queries (and keys that can be skipped) at a time; it decides memory and speed, not the result.
    """
    xp = namespace(q=q, k=k, v=v, mask=mask)
    case = _checked(q, k, v, causal, q_positions, k_positions, mask, window, softcap, scale)
    tile = _ROWS if block is None else min(checks.integer("block", block, 1), max(k.shape[-2], 1))
    *lead, r, n, _ = case.q.shape
    m, heads = k.shape[-2], math.prod(lead)
    out = xp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    if not (out.size and m):
        return out
    # On the host as many key heads at a time as have few scores, or one, so that they stay in the caches (the matrix
    # products use all cores by themselves); on the GPU, where every launch costs, as much as memory allows.
    rows = min(n, block or max(1, _ROWS // r if xp is np else _DEVICE // (heads * r * m)))
    limit = _SMALL if xp is np else heads * r * rows * m
    spare = xp.empty(min(max(limit, r * rows * m), heads * r * rows * m), case.dtype)
    target, view, same = out.reshape(*lead, r, n, v.shape[-1]), None, case.q_at.size == n and case.k_at.size == m
    if xp is np and n >= _FEW and (mask is None or mask.dtype == bool):
        case = replace(case, longest=np.einsum("...d,...d->...", case.k, case.k).max(axis=-1))
    pieces = list(blocks((*lead, r * rows * m), limit))
    for start in range(0, n, rows):
        for i, index in enumerate(pieces):
            every = (slice(None),) * (len(lead) - len(index) + 1)
            index = (*index, *every, slice(start, start + rows))
            # Heads see alike, and rows of a batch where their positions are the same.
            if view is None or i == 0 or not same:
                view = _view(xp, case.reach, piece(case.q_at, index), piece(case.k_at, index[:-1]), tile)
            _attend(xp, case, index, view, spare, target)
    return out


class _View(NamedTuple):
    """Which keys a block of queries sees."""

    runs: list[tuple[slice, slice]]  # stretches of keys that any query sees, and the columns of their scores
    hidden: list[tuple[slice, Array]]  # columns where some are not seen, and which, (…, 1, rows, columns)


def _view(xp: ModuleType, reach: tuple[int, int] | None, q_at: Array, k_at: Array, tile: int) -> _View:
    m = k_at.shape[-1]
    if reach is None:
        return _View([(slice(0, m), slice(0, m))], [])
    seen, in_part = _tiles(reach, q_at, k_at, tile)
    view, start = _View([], []), 0
    for keys in _runs(seen, tile, m):
        stop = start + keys.stop - keys.start
        for some in _runs(in_part[keys.start // tile : -(-keys.stop // tile)], tile, stop - start):
            column = slice(start + some.start, start + some.stop)
            view.hidden.append((column, _hidden(xp, reach, q_at, k_at[..., keys][..., some])))
        view.runs.append((keys, slice(start, stop)))
        start = stop
    return view


def _attend(xp: ModuleType, case: _Case, index: tuple[Any, ...], view: _View, spare: Array, out: Array) -> None:
    """Eq. (2) for the queries at an index (…, g, r, n) and the keys that any of them sees, into out."""
    q, k, v = piece(case.q, index), piece(case.k, index[:-2]), piece(case.v, index[:-2])
    if not view.runs:
        return  # out is zeros
    (*lead, r, rows, d), width = q.shape, view.runs[-1][1].stop
    # (q·k)·scale goes over all scores once more, and overflows sooner; q·scale goes over q.
    queries = q.astype(case.dtype).reshape(*lead, r * rows, d)  # a copy: a group is one matrix
    queries *= case.scale / (case.softcap or 1.0)
    scores = spare[: math.prod(lead) * r * rows * width].reshape(*lead, r * rows, width)
    by_head = scores.reshape(*lead, r, rows, width)
    for keys, column in view.runs:
        xp.matmul(queries, k[..., keys, :].swapaxes(-1, -2), out=scores[..., column])
    if case.softcap is not None:
        xp.tanh(scores, out=scores)
        scores *= case.softcap
    if case.mask is not None:
        for keys, column in view.runs:
            _apply(xp, piece(case.mask, (*index, keys)), by_head[..., column])
    for column, hidden in view.hidden:
        xp.copyto(by_head[..., column], -math.inf, where=hidden)
    small = False
    if case.longest is not None:  # |q·k| ≤ |q||k|; NaN is not small
        longest = float(np.einsum("...d,...d->...", queries, queries).max()), float(case.longest[index[:-2]].max())
        small = math.sqrt(longest[0]) * math.sqrt(longest[1]) * (case.softcap or 1.0) <= _SAFE
    total = _exponentials(xp, scores, small=small)
    (keys, column), *others = view.runs
    product = scores[..., column] @ v[..., keys, :]
    for keys, column in others:
        product += scores[..., column] @ v[..., keys, :]
    # Weights that are divided by their sum cost a division for each score; the sum of the values, one for each of them.
    product /= total
    out[index] = product.reshape(*lead, r, rows, v.shape[-1])  # Eq. (2), rounded here


def _tiles(reach: tuple[int, int], q_at: Array, k_at: Array, tile: int) -> tuple[Array, Array]:
    """Which tiles of keys any of the queries sees; which of those need a mask."""
    starts = np.arange(0, k_at.shape[-1], tile)
    # All distances in a tile lie between these two, whatever the order of the positions is.
    near = q_at.min(axis=-1, keepdims=True) - np.maximum.reduceat(k_at, starts, axis=-1)
    far = q_at.max(axis=-1, keepdims=True) - np.minimum.reduceat(k_at, starts, axis=-1)
    others = tuple(range(near.ndim - 1))
    seen = ((far >= reach[0]) & (near <= reach[1])).any(axis=others)
    return seen, seen & ((near < reach[0]) | (far > reach[1])).any(axis=others)


def _runs(flags: Array, tile: int, length: int) -> list[slice]:
    """The stretches, of tiles in a row of this length, that are flagged."""
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False)) * tile
    return [slice(a, min(b, length)) for a, b in edges.reshape(-1, 2).tolist()]


def _checked(
    q: Array, k: Array, v: Array, causal: bool = False, q_positions: Any = None, k_positions: Any = None,
    mask: Array | None = None, window: int | None = None, softcap: float | None = None, scale: float | None = None
) -> _Case:  # fmt: skip
    """The arguments of `attention`, if they are what its docstring says."""
    for name, axes, x in (("q", "(…, h, n, d)", q), ("k", "(…, g, m, d)", k), ("v", "(…, g, m, e)", v)):
        dtype = compute_dtype(name, x)
        if x.dtype != q.dtype:
            raise TypeError(f"q, k and v must have one dtype, {name} was {x.dtype} and q {q.dtype}: convert one")
        if x.ndim < 3 or 0 in x.shape[-3::2][: 2 if name != "v" else 1]:
            raise ValueError(f"{name} must have shape {axes} with a head and a feature at least, had {x.shape}")
    (*batch, h, n, d), (g, m) = q.shape, k.shape[-3:-1]
    if list(k.shape) != [*batch, g, m, d] or list(v.shape[:-1]) != [*batch, g, m]:
        rule = "q (…, h, n, d), k (…, g, m, d) and v (…, g, m, e) must agree in …, g, m and d"
        raise ValueError(f"{rule}, had shapes {q.shape}, {k.shape} and {v.shape}")
    if h % g:
        raise ValueError(f"the {g} key heads must divide the {h} query heads: head i reads key head i·g//h")
    window = _FAR if window is None else checks.integer("window", window, 1)
    lowest = 0 if checks.flag("causal", causal) else 1 - window
    flat = (1,) * (len(batch) + 2)
    k_at = np.arange(m).reshape(*flat, m) if k_positions is None else _at("k_positions", k_positions, batch, m)
    if q_positions is not None:
        q_at = _at("q_positions", q_positions, batch, n)
    elif k_positions is None:
        q_at = np.arange(m - n, m).reshape(*flat, n)
    elif n <= m:
        q_at = k_at[..., m - n :]
    else:
        raise ValueError(f"q_positions must be given: {n} queries cannot be the last of {m} keys")
    # A token that comes after all keys, as in decoding, sees them all: nothing to look for.
    last = q_positions is None and k_positions is None and n == 1 and window >= m
    reach = (lowest, window - 1) if (causal or window < _FAR) and not last else None
    scale = 1 / math.sqrt(d) if scale is None else checks.real("scale", scale, 0, open=True)
    softcap = None if softcap is None else checks.real("softcap", softcap, 0, open=True)
    mask = None if mask is None else _checked_mask(mask, (*batch, h, n, m), g)
    q, k, v = q.reshape(*batch, g, h // g, n, d), _operand(k, dtype), _operand(v, dtype)
    return _Case(q, k, v, mask, q_at, k_at, reach, scale, softcap, dtype)


def _operand(x: Array, dtype: np.dtype[Any]) -> Array:
    """x, ready for matrix products: a copy only where the dtype or strided features ask for it."""
    return x if x.dtype == dtype and x.strides[-1] == x.itemsize else x.astype(dtype, order="C")


def _at(name: str, positions: Any, batch: list[int], length: int) -> np.ndarray[Any, Any]:
    """Positions on the host, as int64 (…, 1, 1, length)."""
    at = checks.positions(name, on_host(positions))
    *first, last = at.shape or (None,)
    if last != length or len(first) > len(batch) or any(a not in (1, b) for a, b in zip(first, batch, strict=False)):
        rule = f"({length},), or (…, {length}) with the first of the batch axes {tuple(batch)}"
        raise ValueError(f"{name} must have shape {rule}, had {at.shape}")
    return at.astype(np.int64, copy=False).reshape(*first, *(1,) * (len(batch) - len(first) + 2), length)


def _checked_mask(mask: Array, shape: tuple[int, ...], g: int) -> Array:
    """A mask that broadcasts to shape (…, h, n, m), as (…, g, r, n, m) with axes of length 1."""
    if mask.dtype != bool:
        compute_dtype("mask must be bool, where True is seen; one that is added", mask)
    full = (*(1,) * (len(shape) - mask.ndim), *mask.shape)
    if len(full) != len(shape) or any(a not in (1, b) for a, b in zip(full, shape, strict=True)):
        raise ValueError(f"mask must be broadcastable to (…, h, n, m), {shape}, had shape {mask.shape}")
    h = full[-3]
    return mask.reshape(*full[:-3], *((1, 1) if h == 1 else (g, h // g)), *full[-2:])
