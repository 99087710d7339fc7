"""Softmax attention, Eq. (2): `attention` in linear memory, `attention_by_definition` as in the paper.

`attention` takes a tile of queries at a time and the keys that any of them sees, so that it holds rows × m scores and
never n × m. Positions decide who sees whom, not places in an array. The other functions check their arguments and call
`definition`. float16 and bfloat16 are computed in float32 and rounded once; float32 and float64 in their own dtype.
"""

from __future__ import annotations

import inspect
import itertools
import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from . import checks, definition
from .backend import Array, compute_dtype, from_numpy, given, namespace, on_host
from .tiles import each, tile_of, tiles

_ROWS = 256  # queries in a tile on the host, over all heads that share a key head
_SMALL = 2**16  # scores: below that, calls cost more than arithmetic
_DEVICE = 2**26  # scores in a tile on the GPU: 256 MB
_FEW = 64  # queries: for fewer the lengths of the keys cost more than they spare
_SAFE = 60.0  # exp of a score within ±60, and the sum of 10¹² of them, is an ordinary float32
_FAR = 2**62  # beyond any distance of two positions


@dataclass(frozen=True)
class _Arguments:
    """Checked. The h query heads are g groups of r; axes have length 1 where something does not vary."""

    q: Array  # (…, g, r, n, d)
    k: Array  # (…, g, m, d)
    v: Array  # (…, g, m, e)
    mask: Array | None  # (…, g, r, n, m), bool or float
    q_at: np.ndarray[Any, Any]  # (…, 1, 1, n), int64, on the host as is the next
    k_at: np.ndarray[Any, Any]  # (…, 1, 1, m)
    causal: bool
    window: int  # _FAR: none
    reach: tuple[int, int] | None  # the least and greatest q_at − k_at that is visible; None: all
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
    namespace(scores=scores)
    return definition.softmax(scores.swapaxes(axis, -1)).swapaxes(axis, -1)


def _exponentials(xp: ModuleType, scores: Array, small: bool) -> tuple[Array, bool]:
    """Scores become exp(score − greatest of the row), in place; returns their sums, or 1 for a sum of nothing, and
    whether every row has a finite score.

    If all scores are known to be small, nothing is taken off, which saves two passes.
    """
    if small:
        total = xp.exp(scores, out=scores).sum(axis=-1, keepdims=True)
        return total + (total == 0), True
    # exp(score) overflows float32 from 89 on; less the greatest score of the row, it is at most 1. In a row of −inf
    # alone that would be exp(−inf + inf) = NaN: there the lowest finite number is taken off, and all are exp(−inf) = 0.
    greatest = scores.max(axis=-1, keepdims=True)
    top = xp.maximum(greatest, float(np.finfo(scores.dtype).min))
    xp.exp(xp.subtract(scores, top, out=scores), out=scores)
    # Then 0/0 is NaN again. Any other sum has exp(0) = 1 in it, so that one not less than 1 changes just these rows.
    return xp.maximum(scores.sum(axis=-1, keepdims=True), 1.0), bool(xp.isfinite(greatest).all())


def _check_overflow(q: Array, k: Array, factor: float, dtype: np.dtype[Any]) -> None:
    """Finite queries and keys must have scores in the range of the dtype: −inf would pass for a hidden key."""
    if not q.size or not k.size:
        return
    largest, most = [float(abs(x).max()) for x in (q, k)], float(np.finfo(dtype).max)
    if all(map(math.isfinite, largest)) and math.prod(largest) * q.shape[-1] * factor > most:
        sizes = f"queries reach {largest[0]:.3g}, keys {largest[1]:.3g}, and scale is {factor:.3g}"
        raise ValueError(f"scores must not exceed {dtype}, {most:.3g}: {sizes}; make them smaller, or use float64")


def attention_by_definition(q: Array, k: Array, v: Array, **options: Any) -> Array:
    """Eq. (2) as it is written, with all n × m scores in memory: `attention`, with its options except ``block``.

    >>> q, k, v = np.zeros((1, 1, 2)), np.zeros((1, 2, 2)), np.array([[[1.0], [3.0]]])
    >>> attention_by_definition(q, k, v)  # equal scores: the mean of the values
    array([[[2.]]])
    """
    xp = namespace(q=q, k=k, v=v, **given(mask=options.get("mask")))
    arguments = _by_definition(xp, q, k, v, options)
    if not k.shape[-2]:  # a row without keys has no greatest score
        return xp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    return definition.attention(**arguments).astype(q.dtype)


def attention_scores(q: Array, k: Array, **options: Any) -> Array:
    """The scores whose softmax Eq. (2) takes, qᵀk/√d, −inf for hidden keys: (…, h, n, m), float32 or float64.

    >>> attention_scores(np.ones((1, 2, 4)), np.ones((1, 2, 4)), causal=True)
    array([[[  2., -inf],
            [  2.,   2.]]])
    """
    arguments = _by_definition(namespace(q=q, k=k, **given(mask=options.get("mask"))), q, k, k, options)
    arguments["k"] = definition.repeat_heads(arguments.pop("v"), q.shape[-3])  # k was given as the values, too
    return definition.attention_scores(**arguments)


def _by_definition(xp: ModuleType, q: Array, k: Array, v: Array, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `definition.attention`, from those of `attention`."""
    if unexpected := set(options) - set(inspect.signature(_checked).parameters):
        raise TypeError(f"attention() got unexpected options: {', '.join(sorted(unexpected))}")
    checked, given, bias = _checked(q, k, v, **options), options.get("mask"), 0
    q_at, k_at = (from_numpy(at[..., 0, :], xp) for at in (checked.q_at, checked.k_at))
    mask = definition.visible(q_at, k_at, checked.causal, checked.window)
    if given is not None and given.dtype == bool:
        mask = mask & given
    elif given is not None:
        bias = _bias(xp, given, checked.dtype)
    q, k, v = (x.astype(checked.dtype, copy=False) for x in (q, k, v))
    _check_overflow(q, k, checked.scale, checked.dtype)
    return {"q": q, "k": k, "v": v, "mask": mask, "scale": checked.scale, "softcap": checked.softcap, "bias": bias}


def _bias(xp: ModuleType, mask: Array, dtype: np.dtype[Any]) -> Array:
    """A float mask in the dtype of the scores."""
    # With a float64 mask, float32 scores + mask is a float64 sum, so the mask is converted first. But what is finite
    # must stay so: the lowest float64, which people use as "almost −inf", becomes the lowest float32.
    if mask.dtype.itemsize > dtype.itemsize:
        most = float(np.finfo(dtype).max)
        mask = xp.where(abs(mask) == math.inf, mask, xp.clip(mask, -most, most))
    return mask.astype(dtype, copy=False)


def _apply(xp: ModuleType, mask: Array | None, scores: Array) -> None:
    """A mask over scores (…, r, n, m), in place: hidden scores become −inf, numbers are added."""
    if mask is not None and mask.dtype == bool:
        xp.copyto(scores, -math.inf, where=~mask)
    elif mask is not None:
        xp.add(scores, _bias(xp, mask, scores.dtype), out=scores)


def _hidden(xp: ModuleType, reach: tuple[int, int], q_at: Array, k_at: Array) -> Array:
    """Whether keys (…, r, m) are out of reach of queries (…, r, n): (…, r, n, m)."""
    # One comparison for each bound: computing the n × m distances first would take twice as many passes.
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

    Query head i reads key head i·g//h. A row that sees nothing is zeros. Values must be finite, since hidden ones are
    multiplied too, by 0.
    ``causal``: a query sees the keys with q_position − k_position ≥ 0; ``window``: those with a distance below
    it, on both sides if not causal. Positions are integers, (n,) or (…, n) with the first batch axes of q. Keys
    default to 0 … m−1, queries to the last n of the keys' (so n < m continues a cache). They decide nothing else.
    ``mask``, broadcastable to (…, h, n, m): bool, where True is visible, or float, added to the scores; −inf hides.
    ``scale`` defaults to 1/√d; ``softcap`` c makes scores c·tanh(score/c), before any mask.
    ``block``: queries (and keys that can be skipped) at a time; it decides memory and speed, not the result.
    """
    xp = namespace(q=q, k=k, v=v, **given(mask=mask))
    checked = _checked(q, k, v, causal, q_positions, k_positions, mask, window, softcap, scale)
    width = _ROWS if block is None else min(checks.integer("block", block, 1), max(k.shape[-2], 1))
    *lead, r, n, _ = checked.q.shape
    m, heads = k.shape[-2], math.prod(lead)
    out = xp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    if not (out.size and m):
        return out
    # On the host as many key heads at a time as have few scores, or one, so that they stay in the caches; on the GPU,
    # where every launch costs, as much as memory allows.
    rows = min(n, block or max(1, _ROWS // r if xp is np else _DEVICE // (heads * r * m)))
    limit = _SMALL if xp is np else heads * r * rows * m
    target = out.reshape(*lead, r, n, v.shape[-1])
    same = checked.q_at.size == n and checked.k_at.size == m
    if xp is np and n >= _FEW and (mask is None or mask.dtype == bool):
        checked = replace(checked, longest=np.einsum("...d,...d->...", checked.k, checked.k).max(axis=-1))

    def spare() -> _Spare:
        return _Spare(xp.empty(min(max(limit, r * rows * m), heads * r * rows * m), checked.dtype))

    def attend(piece: tuple[int, tuple[Any, ...]], spare: _Spare) -> None:
        start, some = piece
        index = (*some, *(slice(None),) * (len(lead) - len(some) + 1), slice(start, start + rows))
        # All heads see the same keys, and all rows of a batch if their positions are the same.
        if spare.start != start or not same:
            spare.start, spare.view = start, _view(xp, checked, index, width)
        _attend(xp, checked, index, spare.view, spare.scores, target)

    # The last queries first: if causal they see the most keys, and a thread should not be left with them in the end.
    starts = range(0, n, rows)[::-1]
    each(itertools.product(starts, tiles((*lead, r * rows * m), limit)), attend, spare, spread=xp is np, products=True)
    return out


class _View(NamedTuple):
    """Which keys a tile of queries sees."""

    runs: list[tuple[slice, slice]]  # stretches of keys that some query sees, and the columns of their scores
    hidden: list[tuple[slice, Array]]  # columns with hidden scores, and which they are, (…, 1, rows, columns)


@dataclass
class _Spare:
    """What a thread keeps from tile to tile."""

    scores: Array  # memory
    start: int = -1  # the first of the queries that the view is for
    view: _View = _View([], [])


def _view(xp: ModuleType, checked: _Arguments, index: tuple[Any, ...], width: int) -> _View:
    """What the queries at an index (…, g, r, n) see; keys are skipped, or masked, by tiles of this width."""
    m, reach = checked.k_at.shape[-1], checked.reach
    if reach is None:
        return _View([(slice(0, m), slice(0, m))], [])
    q_at, k_at = tile_of(checked.q_at, index), tile_of(checked.k_at, index[:-1])
    visible, in_part = _tiles(reach, q_at, k_at, width)
    view, start = _View([], []), 0
    for keys in _runs(visible, width, m):
        stop = start + keys.stop - keys.start
        for some in _runs(in_part[keys.start // width : -(-keys.stop // width)], width, stop - start):
            column = slice(start + some.start, start + some.stop)
            view.hidden.append((column, _hidden(xp, reach, q_at, k_at[..., keys][..., some])))
        view.runs.append((keys, slice(start, stop)))
        start = stop
    return view


@np.errstate(over="ignore", invalid="ignore")  # what overflows is found afterwards; NaN stays NaN
def _attend(xp: ModuleType, checked: _Arguments, index: tuple[Any, ...], view: _View, spare: Array, out: Array) -> None:
    """Eq. (2) for the queries at an index (…, g, r, n) and the keys that any of them sees, into out."""
    q, k, v = tile_of(checked.q, index), tile_of(checked.k, index[:-2]), tile_of(checked.v, index[:-2])
    if not view.runs:
        return  # out is zeros
    (*lead, r, rows, d), columns = q.shape, view.runs[-1][1].stop
    # (q·k)·scale is one pass more over all scores, and overflows sooner; q·scale is a pass over q.
    queries = q.astype(checked.dtype).reshape(*lead, r * rows, d)  # a copy: a group is one matrix
    queries *= checked.scale / (checked.softcap or 1.0)
    scores = spare[: math.prod(lead) * r * rows * columns].reshape(*lead, r * rows, columns)
    by_head = scores.reshape(*lead, r, rows, columns)
    for keys, column in view.runs:
        xp.matmul(queries, k[..., keys, :].swapaxes(-1, -2), out=scores[..., column])
    if checked.softcap is not None:
        xp.tanh(scores, out=scores)
        scores *= checked.softcap
    if checked.mask is not None:
        for keys, column in view.runs:
            _apply(xp, tile_of(checked.mask, (*index, keys)), by_head[..., column])
    for column, hidden in view.hidden:
        xp.copyto(by_head[..., column], -math.inf, where=hidden)
    small = False
    if checked.longest is not None:  # |q·k| ≤ |q||k|; NaN is not small
        squares = np.einsum("...d,...d->...", queries, queries).max(), checked.longest[index[:-2]].max()
        lost = d * float(np.finfo(checked.dtype).tiny)  # smaller squares are 0, as of queries over a large softcap
        small = math.prod(math.sqrt(float(x) + lost) for x in squares) * (checked.softcap or 1.0) <= _SAFE
    total, finite = _exponentials(xp, scores, small)
    if not finite:
        _check_overflow(q, k, checked.scale / (checked.softcap or 1.0), checked.dtype)
    out[index] = _mean(xp, scores, total, v, view.runs).reshape(*lead, r, rows, v.shape[-1])  # Eq. (2), rounded here


def _mean(xp: ModuleType, weights: Array, total: Array, v: Array, runs: list[tuple[slice, slice]]) -> Array:
    """weights·v/total over the keys of the runs; weights may be overwritten."""

    def summed() -> Array:
        (keys, column), *others = runs
        product = weights[..., column] @ v[..., keys, :]
        for keys, column in others:
            product += weights[..., column] @ v[..., keys, :]
        return product

    # Dividing the weights would cost a division for each score; dividing the sum costs one for each output. But a sum
    # of large values may overflow where their mean does not: then the weights are divided after all.
    product = summed()
    product /= total
    if not bool(xp.isfinite(product).all()):
        weights /= total
        product = summed()
    return product


def _tiles(reach: tuple[int, int], q_at: Array, k_at: Array, width: int) -> tuple[Array, Array]:
    """Which tiles of keys some query sees, and which of those need a mask."""
    starts = np.arange(0, k_at.shape[-1], width)
    # All distances in a tile lie between these two, whatever the order of the positions is.
    near = q_at.min(axis=-1, keepdims=True) - np.maximum.reduceat(k_at, starts, axis=-1)
    far = q_at.max(axis=-1, keepdims=True) - np.minimum.reduceat(k_at, starts, axis=-1)
    others = tuple(range(near.ndim - 1))
    visible = ((far >= reach[0]) & (near <= reach[1])).any(axis=others)
    return visible, visible & ((near < reach[0]) | (far > reach[1])).any(axis=others)


def _runs(flags: Array, width: int, length: int) -> list[slice]:
    """The flagged stretches of a row of this length, which is cut into tiles of this width."""
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False)) * width
    return [slice(a, min(b, length)) for a, b in edges.reshape(-1, 2).tolist()]


def _checked(
    q: Array, k: Array, v: Array, causal: bool = False, q_positions: Any = None, k_positions: Any = None,
    mask: Array | None = None, window: int | None = None, softcap: float | None = None, scale: float | None = None
) -> _Arguments:  # fmt: skip
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
    window = _FAR if window is None else min(checks.integer("window", window, 1), _FAR)
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
    # A token that comes after all keys, as in decoding, sees them all.
    last = q_positions is None and k_positions is None and n == 1 and window >= m
    reach = (lowest, window - 1) if (causal or window < _FAR) and not last else None
    scale = 1 / math.sqrt(d) if scale is None else checks.in_range("scale", scale, dtype)
    if softcap is not None:
        softcap = checks.in_range("softcap", softcap, dtype)
        checks.in_range("scale/softcap, which queries are multiplied with,", scale / softcap, dtype)
    mask = None if mask is None else _checked_mask(mask, (*batch, h, n, m), g)
    q, k, v = q.reshape(*batch, g, h // g, n, d), _operand(k, dtype), _operand(v, dtype)
    return _Arguments(q, k, v, mask, q_at, k_at, causal, window, reach, scale, softcap, dtype)


def _operand(x: Array, dtype: np.dtype[Any]) -> Array:
    """x, ready for matrix products: a copy only if its dtype or its stride needs one."""
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
        compute_dtype("mask must be bool, where True is visible; one that is added", mask)
    full = (*(1,) * (len(shape) - mask.ndim), *mask.shape)
    if len(full) != len(shape) or any(a not in (1, b) for a, b in zip(full, shape, strict=True)):
        raise ValueError(f"mask must be broadcastable to (…, h, n, m), {shape}, had shape {mask.shape}")
    h = full[-3]
    return mask.reshape(*full[:-3], *((1, 1) if h == 1 else (g, h // g)), *full[-2:])
