"""Softmax attention, Eq. (2): `attention_by_definition` as in the paper, `attention` in linear memory.

`attention` takes a block of queries at a time and the keys that any of them may see, so that it holds
block × m scores and never n × m. Who may see whom is a matter of positions, not of places in an array.
float16 and bfloat16 are computed in float32 and rounded once; float32 and float64 in their own dtype.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from . import checks
from .backend import Array, blocks, compute_dtype, from_numpy, namespace, on_host

_ROWS = 256  # queries in a block of the host, over all heads that share a key head
_SMALL = 2**16  # scores: below that, calls cost more than arithmetic
_DEVICE = 2**26  # scores in a block of the GPU: 256 MB
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


def _exponentials(xp: ModuleType, scores: Array, axis: int = -1) -> Array:
    """Scores become exp(score − greatest), in place; returns their sum, or 1 where there is nothing to sum."""
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
    xp = namespace(q=q, k=k, v=v, mask=options.get("mask"))
    if unknown := set(options) - set(inspect.signature(_checked).parameters):
        raise TypeError(f"attention_by_definition does not know {', '.join(sorted(unknown))}")
    case = _checked(q, k, v, **options)
    k, v = case.k[..., None, :, :], case.v[..., None, :, :]  # the r query heads of a group read the same ones
    scores = (case.q.astype(case.dtype) * case.scale) @ k.swapaxes(-1, -2)  # qᵀk/√d
    if case.softcap is not None:
        scores = case.softcap * xp.tanh(scores / case.softcap)
    if k.shape[-2]:
        _apply(xp, case.mask, scores)
        _hide(xp, case.reach, scores, case.q_at, case.k_at)
        scores = probabilities(scores)
    return (scores @ v).astype(q.dtype).reshape(*q.shape[:-1], v.shape[-1])  # Eq. (2)


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


def _hide(xp: ModuleType, reach: tuple[int, int] | None, scores: Array, q_at: Array, k_at: Array) -> None:
    """Scores (…, r, n, m) of keys out of reach become −inf, in place."""
    if reach is not None:
        away = from_numpy(q_at, xp)[..., :, None] - from_numpy(k_at, xp)[..., None, :]
        xp.copyto(scores, -math.inf, where=(away < reach[0]) | (away > reach[1]))


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
    starts, target = np.arange(0, m, tile), out.reshape(*lead, r, n, v.shape[-1])
    bounds = [extreme.reduceat(case.k_at, starts, axis=-1) for extreme in (np.minimum, np.maximum)]
    for index in blocks((*lead, r * rows * m), limit):
        every = (slice(None),) * (len(lead) - len(index) + 1)
        for start in range(0, n, rows):
            _attend(xp, case, (*index, *every, slice(start, start + rows)), tile, bounds, spare, target)
    return out


def _attend(
    xp: ModuleType, case: _Case, index: tuple[Any, ...], tile: int, bounds: list[Array], spare: Array, out: Array
) -> None:
    """Eq. (2) for the queries at an index (…, g, r, n) and the keys that any of them sees, into out."""
    q, k, v = _piece(case.q, index), _piece(case.k, index[:-2]), _piece(case.v, index[:-2])
    q_at, k_at = _piece(case.q_at, index), _piece(case.k_at, index[:-1])
    seen, in_part = _tiles(case.reach, q_at, *(_piece(bound, index[:-1]) for bound in bounds))
    runs = _runs(seen, tile, k.shape[-2])
    (*lead, r, rows, d), width = q.shape, sum(keys.stop - keys.start for keys in runs)
    if not width:
        return  # out is zeros
    # (q·k)·scale goes over all scores once more, and overflows sooner; q·scale goes over q.
    queries = q.astype(case.dtype).reshape(*lead, r * rows, d)  # a copy: a group is one matrix
    queries *= case.scale / (case.softcap or 1.0)
    scores = spare[: math.prod(lead) * r * rows * width].reshape(*lead, r * rows, width)
    by_head, columns, start = scores.reshape(*lead, r, rows, width), [], 0
    for keys in runs:
        columns.append(slice(start, start := start + keys.stop - keys.start))
        xp.matmul(queries, k[..., keys, :].swapaxes(-1, -2), out=scores[..., columns[-1]])
    if case.softcap is not None:
        xp.tanh(scores, out=scores)
        scores *= case.softcap
    for keys, column in zip(runs, columns, strict=True):
        part = by_head[..., column]
        if case.mask is not None:
            _apply(xp, _piece(case.mask, (*index, keys)), part)
        for some in _runs(in_part[keys.start // tile : -(-keys.stop // tile)], tile, part.shape[-1]):
            _hide(xp, case.reach, part[..., some], q_at, k_at[..., keys][..., some])
    total = _exponentials(xp, scores)
    product = scores[..., columns[0]] @ v[..., runs[0], :]
    for keys, column in zip(runs[1:], columns[1:], strict=True):
        product += scores[..., column] @ v[..., keys, :]
    # Weights that are divided by their sum cost a division for each score; the sum of the values, one for each of them.
    product /= total
    out[index] = product.reshape(*lead, r, rows, v.shape[-1])  # Eq. (2), rounded here


def _piece(x: Array, index: tuple[Any, ...]) -> Array:
    """x[index], where an axis of length 1 stands for one of any length."""
    each = zip(index, x.shape, strict=False)
    return x[tuple((slice(None) if isinstance(i, slice) else 0) if size == 1 else i for i, size in each)]


def _tiles(reach: tuple[int, int] | None, q_at: Array, least: Array, greatest: Array) -> tuple[Array, Array]:
    """Which tiles of keys, by their extreme positions, any of the queries sees; which of those need a mask."""
    if reach is None:
        return np.ones(least.shape[-1], bool), np.zeros(least.shape[-1], bool)
    # All distances in a tile lie between these two, whatever the order of the positions is.
    near, far = q_at.min(axis=-1, keepdims=True) - greatest, q_at.max(axis=-1, keepdims=True) - least
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
    for name, x in (("q", q), ("k", k), ("v", v)):
        dtype = compute_dtype(name, x)
        if x.dtype != q.dtype:
            raise TypeError(f"q, k and v must have one dtype, {name} was {x.dtype} and q {q.dtype}: convert one")
        if x.ndim < 3 or 0 in x.shape[-3::2][: 2 if name != "v" else 1]:
            axes = "(…, h, n, d)" if name == "q" else "(…, g, m, d)" if name == "k" else "(…, g, m, e)"
            raise ValueError(f"{name} must have shape {axes} with a head and a feature at least, had {x.shape}")
    (*batch, h, n, d), (g, m) = q.shape, k.shape[-3:-1]
    if list(k.shape) != [*batch, g, m, d] or list(v.shape[:-1]) != [*batch, g, m]:
        raise ValueError(
            f"q (…, h, n, d), k (…, g, m, d) and v (…, g, m, e) must agree in …, g, m and d, had shapes {q.shape}, "
            f"{k.shape} and {v.shape}"
        )
    if h % g:
        raise ValueError(f"the {g} key heads must divide the {h} query heads: head i reads key head i·g//h")
    window = _FAR if window is None else checks.integer("window", window, 1)
    lowest = 0 if checks.flag("causal", causal) else 1 - window
    k_at = _at("k_positions", range(m) if k_positions is None else k_positions, batch, m)
    if q_positions is None and k_positions is not None and n > m:
        raise ValueError(f"q_positions must be given: {n} queries cannot be the last of {m} keys")
    own = range(m - n, m) if k_positions is None else k_at[..., 0, 0, m - n :]
    q_at = _at("q_positions", own if q_positions is None else q_positions, batch, n)
    reach = (lowest, window - 1) if causal or window < _FAR else None
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
        raise ValueError(
            f"{name} must have shape ({length},), or (…, {length}) with the first of the batch axes "
            f"{tuple(batch)}, had {at.shape}"
        )
    return at.astype(np.int64).reshape(*first, *(1,) * (len(batch) - len(first) + 2), length)


def _checked_mask(mask: Array, shape: tuple[int, ...], g: int) -> Array:
    """A mask that broadcasts to shape (…, h, n, m), as (…, g, r, n, m) with axes of length 1."""
    if mask.dtype != bool:
        compute_dtype("mask must be bool, where True is seen; one that is added", mask)
    full = (*(1,) * (len(shape) - mask.ndim), *mask.shape)
    if len(full) != len(shape) or any(a not in (1, b) for a, b in zip(full, shape, strict=True)):
        raise ValueError(f"mask must be broadcastable to (…, h, n, m), {shape}, had shape {mask.shape}")
    h = full[-3]
    return mask.reshape(*full[:-3], *((1, 1) if h == 1 else (g, h // g)), *full[-2:])
