"""The rotation R(Θ, m) of Eq. (15) applied to queries and keys, in its equal forms.

`rotate` is the fast form, Eq. (34). `rotate_complex`, Eq. (12), `rotation_matrix`, Eq. (15), and `decay` check their
arguments and call `definition`. float16 and bfloat16 are widened to float32, rotated, and rounded once; float32 and
float64 are computed in their own dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from . import checks, definition
from .backend import Array, compute_dtype, from_numpy, given, namespace, on_host, result_array
from .definition import Features
from .phase import check_positions, cos_sin
from .theta import LAYOUTS, Rope, check_rope
from .tiles import each, tile_of, tiles

_TILE = 2**17  # elements that a core takes at a time where there is more than one pass, so that they stay in its caches


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


def rotation_tables(rope: Rope, positions: Any, like: Array) -> Tables:
    """The tables of `rotate` for these positions, for arrays of the dtype and backend of ``like``.

    >>> rope, x = Rope(4, 10000.0, "half"), np.ones((2, 3, 4), np.float32)
    >>> tables = rotation_tables(rope, [0, 1, 2], like=x)
    >>> bool((rotate(x, [0, 1, 2], rope, tables=tables) == rotate(x, [0, 1, 2], rope)).all())
    True
    """
    xp, dtype = namespace(like=like), compute_dtype("like", like)
    m = np.array(check_positions(on_host(positions), rope), np.int64)  # a copy, which nobody can change
    m.flags.writeable = False
    cos, sin = cos_sin(rope, m, dtype)
    if rope.layout == "half":
        first, second = np.concatenate((cos, cos), axis=-1), np.concatenate((-sin, sin), axis=-1)
        return Tables(rope, m, from_numpy(first, xp), from_numpy(second, xp))
    rotor = np.empty(cos.shape, np.result_type(dtype, np.complex64))
    rotor.real, rotor.imag = cos, sin
    return Tables(rope, m, from_numpy(rotor, xp), None)


def _check_fit(x: Array, m: np.ndarray[Any, Any], rope: Rope) -> tuple[int, ...]:
    """The shape of positions for one axis, if it fits x: none, or (…, n) with the first axes of x."""
    shape: tuple[int, ...] = m.shape if rope.axes is None else m.shape[1:]
    if x.ndim < 1 or x.shape[-1] != rope.head_dim:
        raise ValueError(f"the last axis of x must be head_dim, {rope.head_dim}, x had shape {x.shape}")
    fits = x.ndim > len(shape) and all(a in (1, b) for a, b in zip(shape[:-1], x.shape, strict=False))
    if shape and not (fits and shape[-1] == x.shape[-2]):
        rule = "they must be a scalar, (n,), or (…, n) with the first axes of x before n"
        raise ValueError(f"positions of shape {shape} do not fit x of shape {x.shape}: {rule}")
    return shape


def _aligned(table: Array, shape: tuple[int, ...], x: Array) -> Array:
    """A table (…, n, w) as a view that has the axes of x (…, h, n, d), of length 1 where it does not vary."""
    if not shape:
        return table.reshape(*(1,) * (x.ndim - 1), table.shape[-1])
    return table.reshape(*shape[:-1], *(1,) * (x.ndim - 1 - len(shape)), shape[-1], table.shape[-1])


def _as_complex(x: Array) -> Array | None:
    """x (…, 2p) as a complex view (…, p), or None where its memory does not allow it."""
    dtype = np.result_type(x.dtype, np.complex64)
    if isinstance(x, np.ndarray):
        return x.view(dtype) if x.strides[-1] == x.itemsize else None
    # A GPU reads complex numbers only at multiples of their size.
    return x.view(dtype) if x.flags.c_contiguous and x.data.ptr % dtype.itemsize == 0 else None


def rotate(x: Array, positions: Any, rope: Rope, *, tables: Tables | None = None, out: Array | None = None) -> Array:
    """R(Θ, m)·x, Eq. (34): x (…, n, d) of any float dtype and backend -> the same.

    >>> rope = Rope(head_dim=2, base=10000.0, layout="interleaved")
    >>> rotate(np.array([[1.0, 0.0], [1.0, 0.0]]), [0, 1], rope).round(6)
    array([[1.      , 0.      ],
           [0.540302, 0.841471]])

    ``positions`` are integers: a scalar, (n,), or (…, n) with the first axes of x, so (b, n) for x (b, h, n, d);
    for a rope with axes (axes, …, n). They are host data; an array on the device is copied to the host.
    ``tables`` from `rotation_tables` spare their computation; ``out`` takes the result, ``out=x`` rotates in place.
    """
    return _rotate(x, positions, rope, tables, out, inverse=False)


def unrotate(y: Array, positions: Any, rope: Rope, *, tables: Tables | None = None, out: Array | None = None) -> Array:
    """The inverse of `rotate`: Rᵀ/a², y (…, n, d) -> the same; it takes the same tables.

    >>> rope, x = Rope(64, 10000.0, "half"), np.ones((3, 64))
    >>> bool(np.allclose(unrotate(rotate(x, [7, 8, 9], rope), [7, 8, 9], rope), x, rtol=1e-15))
    True
    """
    return _rotate(y, positions, rope, tables, out, inverse=True)


def _rotate(x: Array, positions: Any, rope: Rope, tables: Tables | None, out: Array | None, inverse: bool) -> Array:
    xp = namespace(x=x, **given(out=out))
    dtype = compute_dtype("x", x)
    if tables is None:
        tables = rotation_tables(rope, positions, like=x)
    else:
        check_tables(tables, positions, rope, dtype, x)
    shape = _check_fit(x, tables.positions, rope)
    out = result_array(xp, x.shape, x.dtype, out)
    if out is not x and xp.may_share_memory(out, x):
        x = x.copy()  # they may overlap in any way, and a tile must not be overwritten before it is read
    turning = slice(rope.start, rope.start + rope.width)
    if out is not x and rope.width < rope.head_dim:
        for still in (slice(0, turning.start), slice(turning.stop, rope.head_dim)):
            out[..., still] = x[..., still]
    reads, writes = definition.pairs(rope.layout, rope.width)
    straight, crossed = tables.straight, tables.crossed
    if inverse:  # Rᵀ/a²
        reads, writes, a2 = writes, reads, rope.attention_factor**2
        straight, crossed = straight.conj() / a2, None if crossed is None else -crossed / a2
    straight = _aligned(straight, shape, x)
    crossed = None if crossed is None else _aligned(crossed, shape, x)
    _turn(xp, x[..., turning], out[..., turning], straight, crossed, reads, writes)
    return out


def check_tables(tables: Tables, positions: Any, rope: Rope, dtype: np.dtype[Any], x: Array) -> None:
    """Tables must be those of this rope, these positions, and x's backend and arithmetic."""
    if not isinstance(tables, Tables):
        raise TypeError(f"tables must come from rotation_tables, were {type(tables).__name__}")
    if tables.rope != rope:
        raise ValueError(f"tables were made for {tables.rope}, not for {rope}")
    own = tables.positions
    if positions is not own and not np.array_equal(check_positions(on_host(positions), rope), own):
        raise ValueError("tables were made for other positions")
    namespace(x=x, tables=tables.straight)
    if (made := tables.straight.real.dtype) != dtype:
        raise ValueError(f"tables were made for {made} arithmetic, x of dtype {x.dtype} needs {dtype}")


def _turn(
    xp: ModuleType, x: Array, out: Array, straight: Array, crossed: Array | None, reads: Features, writes: Features
) -> None:
    """R·x over the rotated features, into out, tile by tile: in one pass where memory allows it, else in three."""
    dtype = straight.real.dtype
    # On the GPU every launch costs and there is no cache to keep to, so there is one tile.
    limit = _TILE if xp is np else max(x.size, 1)
    if crossed is None and reads == writes and x.dtype == dtype:
        source, target = _as_complex(x), _as_complex(out)
        if source is not None and target is not None:

            def multiply(index: tuple[Any, ...], _: None) -> None:  # Eq. (12), pairs (2i, 2i+1)
                # NumPy's vector code fuses the products, its scalar code does not: last bits depend on the tiles.
                xp.multiply(source[index], tile_of(straight, index), out=target[index])

            # One pass needs no cache, so that its tiles may be larger.
            each(tiles(source.shape, 4 * limit), multiply, lambda: None, spread=xp is np)
            return

    def turn(index: tuple[Any, ...], spare: Array) -> None:
        a, b, c = x[index], out[index], tile_of(straight, index)
        if crossed is not None:
            product = spare[0, : a.size].reshape(a.shape)
            if a.dtype != dtype:
                widened = spare[1, : a.size].reshape(a.shape)
                widened[...] = a
                _turn_half(xp, widened, widened, c, tile_of(crossed, index), product)
                b[...] = widened
            else:
                _turn_half(xp, a, b, c, tile_of(crossed, index), product)
            return
        z = spare.reshape(-1)[: a.size].view(c.dtype).reshape(*a.shape[:-1], a.shape[-1] // 2)
        z.real, z.imag = a[..., reads[0]], a[..., reads[1]]
        xp.multiply(z, c, out=z)  # Eq. (12)
        b[..., writes[0]], b[..., writes[1]] = z.real, z.imag

    def spare() -> Array:
        return xp.empty((2, min(max(limit, x.shape[-1]), x.size)), dtype)

    each(tiles(x.shape, limit), turn, spare, spread=xp is np)


def _turn_half(xp: ModuleType, x: Array, out: Array, straight: Array, crossed: Array, spare: Array) -> None:
    halves = (*x.shape[:-1], 2, x.shape[-1] // 2)
    swapped = x.reshape(halves)[..., ::-1, :]  # x̃ without its signs, which crossed has
    xp.multiply(swapped, crossed.reshape(*crossed.shape[:-1], *halves[-2:]), out=spare.reshape(halves))
    xp.multiply(x, straight, out=out)
    xp.add(out, spare, out=out)  # Eq. (34), pairs (i, i + r/2)


def rotate_complex(x: Array, positions: Any, rope: Rope) -> Array:
    """R(Θ, m)·x as a product of complex numbers, Eq. (12): `rotate` by the definition, slow.

    >>> rope, x = Rope(8, 10000.0, "half"), np.ones((1, 8))
    >>> bool(np.allclose(rotate_complex(x, [5], rope), rotate(x, [5], rope)))
    True
    """
    xp, dtype = namespace(x=x), compute_dtype("x", x)
    m = check_positions(on_host(positions), rope)
    shape = _check_fit(x, m, rope)
    cos, sin = (_aligned(from_numpy(table, xp), shape, x) for table in cos_sin(rope, m, dtype))
    reads, writes = definition.pairs(rope.layout, rope.width, rope.start)
    return definition.rotate_complex(x.astype(dtype), cos, sin, reads, writes).astype(x.dtype)


def rotation_matrix(m: Any, rope: Rope) -> np.ndarray[Any, np.dtype[np.float64]]:
    """R(Θ, m), Eq. (15), as a float64 matrix (d, d) that multiplies columns: the definition, slow.

    >>> rotation_matrix(1, Rope(4, 10000.0, "interleaved")).round(4)
    array([[ 0.5403, -0.8415,  0.    ,  0.    ],
           [ 0.8415,  0.5403,  0.    ,  0.    ],
           [ 0.    ,  0.    ,  1.    , -0.01  ],
           [ 0.    ,  0.    ,  0.01  ,  1.    ]])
    """
    cos, sin = cos_sin(rope, on_host(m))
    if cos.ndim != 1:
        raise ValueError(f"m must be one position, had shape {np.shape(m)}")
    reads, writes = definition.pairs(rope.layout, rope.width, rope.start)
    return np.asarray(definition.rotation_matrix(cos, sin, reads, writes, rope.head_dim))


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


def decay(distances: Any, rope: Rope) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The curve of Figure 2: (2/r)·Σ|S_j|, j = 1 … r/2, over relative distances m − n, float64, on the host.

    >>> decay([0, 10, 100], Rope(128, 10000.0, "interleaved")).round(2)
    array([32.5 , 17.95, 10.23])

    With S_j = Σ_{l<j} e^{i(m−n)θ_l}, Abel summation, Eq. (36), bounds a score by it, Eq. (37): with h_j the
    product of query and conjugate key of pair j, and h_{r/2} = 0,
    |Σ h_j e^{i(m−n)θ_j}| ≤ max|h_{j+1} − h_j| · (r/2) · decay(m − n).
    """
    # A bound on scores without the attention factor, as the paper has it.
    return np.asarray(definition.decay(*cos_sin(check_rope(rope).pure, on_host(distances))))
