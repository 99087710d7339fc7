"""The rotation R(Θ, m) of Eq. (15) applied to queries and keys, by Eq. (34) or, which is the same, Eq. (12).

`rotate` checks its arguments; `turn`, its core, does not. float16 and bfloat16 are widened to float32, rotated, and
rounded once; float32 and float64 are computed in their own dtype. `pyrope.definition` has the other forms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

import numpy as np

from . import checks, definition
from .backend import Array, compute_dtype, from_numpy, fused, namespace
from .definition import Features
from .phase import check_positions, fill_cos_sin
from .theta import LAYOUTS, Rope
from .tiles import each, tile_of, tiles

_TILE = 2**18  # elements that a core takes at a time, so that they stay in its caches


_pairs = lru_cache(definition.pairs)


@dataclass(frozen=True, eq=False)
class Tables:
    """What `rotate` multiplies with, made once by `rotation_tables` and used for every head and layer."""

    rope: Rope
    positions: np.ndarray[Any, np.dtype[np.int64]]
    straight: Array  # what a feature is multiplied with: cos + i·sin (…, n, p); for "half" cos, cos (…, n, r)
    crossed: Array | None  # what its partner is multiplied with, for "half" alone: −sin, sin (…, n, r)

    def part(self, rows: slice) -> Tables:
        """The tables of some of the positions."""
        crossed = None if self.crossed is None else self.crossed[..., rows, :]
        return Tables(self.rope, self.positions[..., rows], self.straight[..., rows, :], crossed)


def rotation_tables(positions: Any, rope: Rope, like: Array) -> Tables:
    """The tables of `rotate` for these positions, for arrays of the dtype and backend of ``like``.

    >>> rope, x = Rope(4, 10000.0, "half"), np.ones((2, 3, 4), np.float32)
    >>> tables = rotation_tables([0, 1, 2], rope, like=x)
    >>> bool((rotate(x, [0, 1, 2], rope, tables=tables) == rotate(x, [0, 1, 2], rope)).all())
    True
    """
    xp, dtype = namespace(like=like), compute_dtype("like", like)
    m = np.array(check_positions(positions, rope), np.int64)  # a copy, which nobody can change
    m.flags.writeable = False
    shape, p = m.shape if rope.axes is None else m.shape[1:], rope.pairs
    if rope.layout == "half":
        straight, crossed = np.empty((2, *shape, 2 * p), dtype)
        fill_cos_sin(m, rope, straight[..., :p], crossed[..., p:])
        straight[..., p:], crossed[..., :p] = straight[..., :p], -crossed[..., p:]
        return Tables(rope, m, from_numpy(straight, xp), from_numpy(crossed, xp))
    rotor = np.empty((*shape, p), np.result_type(dtype, np.complex64))
    fill_cos_sin(m, rope, rotor.real, rotor.imag)
    return Tables(rope, m, from_numpy(rotor, xp), None)


def rotate(x: Array, positions: Any, rope: Rope, *, tables: Tables | None = None, out: Array | None = None) -> Array:
    """R(Θ, m)·x, Eq. (34): x (…, n, d) of any float dtype and backend -> the same.

    >>> rope = Rope(head_dim=2, base=10000.0, layout="interleaved")
    >>> rotate(np.array([[1.0, 0.0], [1.0, 0.0]]), [0, 1], rope).round(6)
    array([[1.      , 0.      ],
           [0.540302, 0.841471]])

    ``positions`` are integers: a scalar, (n,), or (…, n) with the first axes of x, so (b, n) for x (b, h, n, d);
    for a rope with axes (axes, …, n). They are host data; an array on the device is copied to the host.
    ``tables`` from `rotation_tables` spare their computation; ``out`` takes the result, ``out=x`` rotates in place.
    With ``rope.transposed`` it turns back: RᵀR = a², where a is the rope's attention factor.
    """
    xp = namespace(x=x, out=x if out is None else out)
    tables = _checked_tables(positions, rope, tables, x)
    check_fit(x, tables)
    if out is None:
        return turn(x, tables, xp.empty(x.shape, x.dtype))
    if out.shape != x.shape or out.dtype != x.dtype:
        rule = f"out must have the shape and dtype of the result, {x.shape} {x.dtype}"
        raise ValueError(f"{rule}, had {out.shape} {out.dtype}")
    if xp is np and not out.flags.writeable:
        raise ValueError("out must be writable, was read-only")
    if out is not x and xp.may_share_memory(out, x):
        x = x.copy()  # they may overlap in any way, and a tile must not be overwritten before it is read
    return turn(x, tables, out)


def _checked_tables(positions: Any, rope: Rope, tables: Tables | None, x: Array) -> Tables:
    """Tables of this rope, these positions, and x's backend and arithmetic: those that were given, or new ones."""
    dtype = compute_dtype("x", x)
    if tables is None:
        return rotation_tables(positions, rope, like=x)
    if not isinstance(tables, Tables):
        raise TypeError(f"tables must come from rotation_tables, were {type(tables).__name__}")
    if tables.rope != rope:
        raise ValueError(f"tables were made for {tables.rope}, not for {rope}")
    own = tables.positions
    if positions is not own and not np.array_equal(check_positions(positions, rope), own):
        raise ValueError("tables were made for other positions")
    namespace(x=x, tables=tables.straight)
    if (made := tables.straight.real.dtype) != dtype:
        raise ValueError(f"tables were made for {made} arithmetic, x of dtype {x.dtype} needs {dtype}")
    return tables


def check_fit(x: Array, tables: Tables) -> None:
    """The positions of one axis must be a scalar, or (…, n) with the first axes of x."""
    shape, d = tables.straight.shape[:-1], tables.rope.head_dim
    if x.ndim < 1 or x.shape[-1] != d:
        raise ValueError(f"the last axis of x must be head_dim, {d}, x had shape {x.shape}")
    fits = x.ndim > len(shape) and all(a in (1, b) for a, b in zip(shape[:-1], x.shape, strict=False))
    if shape and not (fits and shape[-1] == x.shape[-2]):
        rule = "they must be a scalar, (n,), or (…, n) with the first axes of x before n"
        raise ValueError(f"positions of shape {shape} do not fit x of shape {x.shape}: {rule}")


# ── The core: nothing is checked from here on ────────────────────────────────────────────────────────────────────────


def turn(x: Array, tables: Tables, out: Array) -> Array:
    """R·x into out, which is x itself or shares no memory with it: (…, n, d) -> (…, n, d)."""
    rope, factors = tables.rope, [tables.straight] if tables.crossed is None else [tables.straight, tables.crossed]
    ones = (1,) * (x.ndim - factors[0].ndim)  # as for positions (b, n) and x (b, h, n, d)
    factors = [table.reshape(*table.shape[:-2], *ones, *table.shape[-2:]) for table in factors]
    target = out
    if rope.width < rope.head_dim:
        first, last = rope.start, rope.start + rope.width
        if out is not x:
            out[..., :first], out[..., last:] = x[..., :first], x[..., last:]
        x, target = x[..., first:last], out[..., first:last]
    (_turn if namespace(x) is np else _turn_on_device)(x, target, factors, _pairs(rope.layout, rope.width))
    return out


def _turn(x: Array, out: Array, tables: list[Array], pairs: tuple[Features, Features]) -> None:
    """R·x over the rotated features, (…, n, r), into out, tile by tile."""
    rotor = tables[0]
    work: Callable[..., object] = partial(_turn_pairs, pairs) if len(tables) == 1 else _turn_halves
    adjacent = len(tables) == 1 and pairs[0] == pairs[1] and x.strides[-1] == out.strides[-1] == x.itemsize
    if adjacent and x.dtype == rotor.real.dtype:
        x, out, work = x.view(rotor.dtype), out.view(rotor.dtype), np.multiply  # Eq. (12)
    if x.size <= _TILE:
        work(x, *tables, out)
        return

    def some(index: tuple[Any, ...]) -> None:
        work(x[index], *[tile_of(table, index) for table in tables], out[index])

    each(some, tiles(x.shape, _TILE))


def _turn_pairs(pairs: tuple[Features, Features], x: Array, rotor: Array, out: Array) -> None:
    (a, b), (c, d) = pairs
    z = np.empty((*x.shape[:-1], x.shape[-1] // 2), rotor.dtype)
    z.real, z.imag = x[..., a], x[..., b]
    z *= rotor  # Eq. (12): (x_a + i·x_b)·e^{imθ}
    out[..., c], out[..., d] = z.real, z.imag


def _turn_halves(x: Array, straight: Array, crossed: Array, out: Array) -> None:
    x = x.astype(straight.dtype, copy=False)
    halves = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    partners = halves[..., ::-1, :].copy().reshape(x.shape)  # first, so that every product is one pass over whole rows
    partners *= crossed  # x̃·sin
    y = np.multiply(x, straight, out=out if out.dtype == x.dtype else None)
    y += partners  # Eq. (34), pairs (i, i + r/2)
    if y is not out:
        out[...] = y


def _turn_on_device(x: Array, out: Array, tables: list[Array], pairs: tuple[Features, Features]) -> None:
    """The same in one launch, which reads x once and writes out once."""
    (a, b), (c, d) = pairs
    if pairs[0] != pairs[1] and namespace(x).may_share_memory(x, out):
        x = x.copy()  # another thread may write a feature before it is read
    cos, sin = (tables[0].real, tables[0].imag) if len(tables) == 1 else (tables[0][..., a], tables[1][..., b])
    _rotate_pairs(namespace(x), x[..., a], x[..., b], cos, sin, out[..., c], out[..., d])


@fused
def _rotate_pairs(xp: ModuleType, x1: Array, x2: Array, cos: Array, sin: Array, y1: Array, y2: Array) -> None:
    y, z = x1 * cos - x2 * sin, x2 * cos + x1 * sin  # Eq. (34), in the dtype of cos and sin
    y1[...], y2[...] = y, z  # which may be x1 and x2 themselves


# ── Weights for another layout ───────────────────────────────────────────────────────────────────────────────────────


def permute_weights(
    w: Array, heads: int, from_layout: str, to_layout: str, rotary_dim: int | None = None, placement: str = "prefix"
) -> Array:
    """The rows of a query or key projection in the order that another layout reads: w (heads·d, …) -> a copy.

    >>> permute_weights(np.arange(8), 2, "interleaved", "half")
    array([0, 2, 1, 3, 4, 6, 5, 7])

    For weights, biases, and (``heads=1``) the vectors of q/k norms. ``heads`` is the number of heads in w: for keys
    that of the keys. Scores are then the same in either layout; from and to exchanged, it is its own inverse.
    """
    xp = namespace(w=w)
    for name, layout in (("from_layout", from_layout), ("to_layout", to_layout)):
        checks.choice(name, layout, LAYOUTS)
    heads = checks.integer("heads", heads, 1)
    if w.ndim < 1 or w.shape[0] % heads or not w.shape[0]:
        raise ValueError(f"the first axis of w must be a multiple of heads, {heads}, w had shape {w.shape}")
    rope = Rope(w.shape[0] // heads, 10000.0, from_layout, rotary_dim, placement)  # checks the widths
    order, feature = np.arange(rope.head_dim), np.arange(rope.head_dim)
    reads = (definition.pairs(layout, rope.width, rope.start)[0] for layout in (from_layout, to_layout))
    for old, new in zip(*reads, strict=True):
        order[new] = feature[old]
    split = w.reshape(heads, rope.head_dim, *w.shape[1:])
    return xp.take(split, from_numpy(order, xp), axis=1).reshape(w.shape)
