"""Hypothesis strategies: ropes of every kind, positions, and arrays of every dtype and memory layout."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from optional import package

from pyrope import Axes, DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN
from pyrope.theta import LAYOUTS

package("ml_dtypes")  # gives NumPy the name bfloat16

DTYPES = {name: np.dtype(name) for name in ("float16", "bfloat16", "float32", "float64")}
# The unit roundoff of a dtype, and that of the dtype that pyrope computes in.
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
COMPUTE_UNIT = {"float16": 2.0**-24, "bfloat16": 2.0**-24, "float32": 2.0**-24, "float64": 2.0**-53}

bases = st.one_of(st.sampled_from([10000.0, 500000.0, 1e6, 1e12, 1.0001]), st.floats(1.001, 1e12))
factors = st.one_of(st.sampled_from([1.0, 2.0, 8.0]), st.floats(1.0, 64.0))
lengths = st.integers(2, 10**6)
layouts = st.sampled_from(LAYOUTS)
dtypes = st.sampled_from(sorted(DTYPES)).map(DTYPES.__getitem__)


def positions(limit: int = 2**31) -> st.SearchStrategy[int]:
    """Single positions: small ones, any, and those at and around powers of two."""
    powers = st.integers(0, limit.bit_length() - 1).flatmap(
        lambda k: st.sampled_from([2**k - 1, 2**k, min(2**k + 1, limit)])
    )
    return st.one_of(st.integers(-8, 8), st.integers(-limit, limit), powers, powers.map(lambda m: -m))


@st.composite
def scalings(draw, pairs: int, full: bool):
    """None or any rescaling of a rope of this many pairs, with its length fixed; ``full``: all features turn."""
    kinds = ["none", "linear", "yarn", "longrope", "llama3"] + ["dynamic"] * (pairs > 1) + ["proportional"] * full
    kind = draw(st.sampled_from(kinds))
    if kind == "none":
        return None
    if kind == "linear":
        return Linear(draw(factors))
    if kind == "dynamic":
        original = draw(lengths)
        return DynamicNTK(draw(factors), original, draw(st.integers(1, 16 * original)))
    if kind == "llama3":
        low = draw(st.floats(0.25, 4.0))
        return Llama3(draw(factors), low, low + draw(st.just(0.0) | st.floats(0.25, 8.0)), draw(lengths))
    if kind == "proportional":
        return Proportional(draw(st.floats(min(1.0, 1.001 / pairs), 1.0)), draw(factors))
    attention = draw(st.none() | st.floats(0.25, 4.0))
    if kind == "longrope":
        listed = st.lists(st.floats(0.05, 80.0), min_size=pairs, max_size=pairs)
        return LongRoPE(draw(listed), draw(listed), draw(factors), draw(lengths), attention, draw(lengths))
    mscales = draw(st.sampled_from([(None, None), (1.0, None), (0.707, 0.707), (1.0, 0.5), (0.0, 1.0)]))
    slow = draw(st.floats(0.5, 4.0))
    fast = slow + draw(st.just(0.0) | st.floats(0.01, 60.0))
    return YaRN(draw(factors), draw(lengths), fast, slow, attention, *mscales, draw(st.booleans()))


@st.composite
def ropes(draw, max_pairs: int = 16, layout=layouts, with_axes: bool | None = None):
    pairs = draw(st.integers(1, max_pairs))
    still = draw(st.sampled_from([0, 0, 1, 3]))  # pairs of features that are not rotated
    scaling = draw(scalings(pairs, full=still == 0))
    axes = None
    if with_axes or (with_axes is None and draw(st.integers(0, 3)) == 0):
        axes = draw(_axes(pairs, own=scaling is None or isinstance(scaling, Linear)))
    return Rope(
        2 * (pairs + still), draw(bases), draw(layout), 2 * pairs, draw(st.sampled_from(["prefix", "suffix"])),
        scaling, axes, draw(st.sampled_from([1, -1])),
    )  # fmt: skip


@st.composite
def _axes(draw, pairs: int, own: bool):
    even, more = ["axial", "pixtral"] * (pairs % 2 == 0), ["listed"] * (pairs > 1)
    style = draw(st.sampled_from(["sections", "interleaved", *even, *more]))
    if style in ("axial", "pixtral"):
        return Axes(style)
    series = draw(st.sampled_from(["shared", "own"])) if own else "shared"
    if style == "listed":
        count = draw(st.integers(1, min(pairs, 4)))
        rest = draw(st.lists(st.integers(0, count - 1), min_size=pairs - count, max_size=pairs - count))
        return Axes(style, draw(st.permutations([*range(count), *rest])), series)
    first = draw(st.integers(0, pairs))
    second = draw(st.integers(0, pairs - first))
    return Axes(style, (pairs - first - second, first, second), series)


@st.composite
def position_arrays(draw, rope: Rope, shape: tuple[int, ...], limit: int = 2**31):
    """Positions (…, n) for a rope, with its axes in front if it has some."""
    full = shape if rope.axes is None else (rope.axes.count, *shape)
    flat = draw(st.lists(positions(limit), min_size=int(np.prod(full)), max_size=int(np.prod(full))))
    kind = draw(st.sampled_from([np.int64, np.int64, np.int32])) if limit < 2**31 else np.int64
    return np.array(flat, kind).reshape(full)


@st.composite
def arrays(draw, shape: tuple[int, ...], dtype: np.dtype):
    """Normal numbers of a dtype: contiguous, strided, with its axes in another order in memory, or read-only."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.standard_normal(shape).astype(dtype)
    kind = draw(st.sampled_from(["contiguous", "strided", "offset", "transposed", "read-only"]))
    if kind == "strided":
        wide = np.zeros((*shape[:-1], 2 * shape[-1]), dtype)
        wide[..., ::2] = x
        x = wide[..., ::2]
    elif kind == "offset":
        wide = np.zeros((*shape[:-1], shape[-1] + 3), dtype)
        wide[..., 1:-2] = x
        x = wide[..., 1:-2]
    elif kind == "transposed":
        x = np.ascontiguousarray(x.T).T
    elif kind == "read-only":
        x.flags.writeable = False
    return x


def to_backend(x: np.ndarray, xp) -> object:
    """An array on a backend with the memory layout that it has on the host."""
    import pyrope

    if xp is np:
        return x
    if x.flags.c_contiguous:
        return pyrope.from_numpy(x, xp)
    order = sorted(range(x.ndim), key=lambda i: -abs(x.strides[i]))
    moved = pyrope.from_numpy(np.ascontiguousarray(x.transpose(order)), xp)
    back = moved.transpose(*np.argsort(order).tolist())
    if x.strides[-1] == 2 * x.itemsize:  # strided: spread out again
        wide = xp.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        wide[..., ::2] = back
        return wide[..., ::2]
    return back
