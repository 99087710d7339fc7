"""The calls that a candidate for attention is tried with: lengths, heads, batches, positions, memory, sizes, caches.

Random numbers of ordinary size are in every one of them. No call is labelled by hand with what it shows: `traits` reads
from its arrays what may matter to a kernel, and `rules` finds which trait separates the wrong calls from the right
ones. Which calls are made depends on the arguments of the check alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np

from ..backend import Array
from ..theta import frequencies
from .calls import held, held_positions
from .candidate import UNIT
from .steps import Call, Spec

BASE = 24  # tokens of the plain call
TRUTH, LARGEST = 2**24, 1_100_000_000  # multiplications of the truth of one call, and of a candidate in one call
LENGTHS = (
    65,
    1,
    130,
    16,
    300,
    7,
    257,
    128,
    2,
    64,
    513,
    33,
    77,
    100,
    3,
    192,
    255,
    1030,
    777,
    48,
    200,
    17,
    127,
    256,
    31,
    512,
)
MORE_LENGTHS = (320, 384, 400, 500, 511, 577, 600, 640, 729, 768, 900, 1000, 1023, 1024, 1500, 2048, 4096)
KEYS = (
    25, 129, 5000, 2, 64, 1025, 300, 65, 9, 513, 128, 2049, 80, 257, 33, 1000, 512, 384, 96, 256, 1024, 2048, 768, 1536,
)  # of one query  # fmt: skip
FEW = (
    (2, 24), (5, 24), (3, 300), (17, 300), (64, 192), (4, 1000), (40, 41), (9, 24), (70, 64), (5, 1), (64, 128),
    (16, 256), (130, 1200), (40, 2048),
)  # queries and keys  # fmt: skip
ROWS_OF_FEW = ((8, 1, 24), (4, 5, 40), (17, 1, 9), (4, 1, 300), (9, 3, 24), (33, 1, 65), (5, 2, 130))
BATCHES = (1, 4, 33, 5, 16, 9, 17, 8)
CHUNKS = ((8, 1, 1, 3), (1,) * 140, (300, 1, 17, 1, 200, 64, 33), (1, 2, 3, 5, 8, 13, 21, 34), (64, 1, 1, 64, 1))
LARGE = 6144.0  # a score whose difference to −6144 no exponential survives
SUPPLY = 2**14  # vectors of random numbers
SHAPES = 12  # where each new shape is compiled first
PRODUCTS = "products q·k beyond float16"


@dataclass(frozen=True)
class Scope:
    """Which calls are made."""

    options: frozenset[str] = frozenset()  # mask, segments: what the candidate has in its signature
    few_queries: bool = False  # calls with fewer queries than keys, and with more
    caches: bool = False
    groups: bool = False  # other numbers of key heads
    backward: bool = False
    effort: str = "usual"
    counted: bool = False  # positions are 0, 1, 2, … in every row: the candidate counts them
    compiled: bool = False  # few shapes
    queries: int | None = None  # of the plain call: the last of its tokens; None: all of them
    batch: int = 3  # of the plain call
    tokens: int | None = None  # of the plain call; None: as many as show the window


@lru_cache(4)
def supply(d: int, wide: bool) -> Array:
    """Many vectors of random numbers; in float64 all bits are random, so that values that are cut to float32 show."""
    return np.random.default_rng(d).standard_normal((SUPPLY, d), np.float64 if wide else np.float32)


class Draw:
    """Draws calls for a spec, from one seed."""

    def __init__(self, spec: Spec, top: int, scope: Scope) -> None:
        self.spec, self.top, self.scope, self.rng = spec, top, scope, np.random.default_rng(2104)
        self.supply, w = supply(spec.head_dim, spec.dtype == np.float64), spec.window
        self.near = BASE if w is None or w > 2 * BASE else BASE + w  # tokens of the plain call: a window ends in them

    def random(self, name: str, t: int, n: int | None = None, b: int = 2, g: int | None = None, **more: Any) -> Call:
        """Scores and values of a size of about 1, positions that rise by one from another start in each row."""
        spec, n = self.spec, t if n is None else n
        shift = 1.0 if (spec.feature_map or "").startswith("relu") else 0.0  # or nothing would be similar
        unit, g = (spec.scale * spec.head_dim**0.5) ** -0.5, g or spec.key_heads  # so that scores are about 1
        q, k, v = (self.normal(b, h, m) for h, m in ((spec.heads, n), (g, t), (g, t)))
        arrays = (x.astype(spec.dtype) for x in (q * unit + shift, k * unit + shift, v))
        starts = [0] if self.scope.counted else [3, 0, 7, 1]
        at = None if spec.rope is None else np.arange(t)[None] + np.resize(starts, b)[:, None]
        grad = self.normal(b, spec.heads, n).astype(spec.dtype) if self.scope.backward else None
        judged = slice(None) if self.scope.backward else self.rows(n, TRUTH // (b * spec.heads * t * 2 * spec.head_dim))
        q, k, v = arrays
        return replace(Call(name, q, k, v, positions=at, g=grad, judged=judged), **more)

    def plain(self) -> Call:
        """The first call, which a candidate must take."""
        scope = self.scope
        return self.random("plain", scope.tokens or self.near, scope.queries, b=scope.batch, needed=True)

    def normal(self, b: int, heads: int, n: int) -> Array:
        """Random numbers (b, heads, n, d): each head another part of one supply, which is quicker than to draw them."""
        starts = self.rng.integers(0, len(self.supply) - n, (b, heads, 1))
        return self.supply[starts + np.arange(n)]

    def rows(self, n: int, most: int) -> Any:
        """The queries of a long call that are judged: the first, the last, and others at random."""
        if n <= max(most, 12):
            return slice(None)
        some = self.rng.choice(n, max(most, 12) - 8, replace=False)
        return np.unique(np.concatenate((some, np.arange(3), np.arange(n - 5, n))))

    def apart(self, b: int, t: int, top: int) -> Array:
        """Positions that rise by more than one, unlike in each row."""
        return np.array([np.sort(self.rng.choice(max(top, t), t, replace=False)) for _ in range(b)], np.int64)

    def fits(self, b: int, n: int, t: int) -> bool:
        """Whether a call of this size is made at all."""
        times = 8 if self.scope.effort == "thorough" else 1
        return b * self.spec.heads * n * t * 2 * self.spec.head_dim <= LARGEST * times


def calls(draw: Draw) -> Iterator[Call]:
    """All calls, the plain one first, then one of each kind in turn, so that shapes change from call to call."""
    base, scope = draw.plain(), draw.scope
    yield base
    if scope.effort == "few":
        yield from () if scope.backward else unit_values(base)
        return
    batches = (
        draw.random(f"a batch of {b}", 10 if b < 40 else 3, b=b) for b in (*BATCHES, 1024 // draw.spec.heads + 1)
    )
    fewer = [g for g in range(draw.spec.key_heads - 1, 0, -1) if draw.spec.heads % g == 0]
    sizes = ("", draw.near, 2), (", 70 tokens", 70, 1)
    groups = (draw.random(f"{g} key heads{words}", t, g=g, b=b) for g in fewer for words, t, b in sizes)
    kinds = [_values(draw, base), _lengths(draw), batches, _memory(draw), _masks(draw)]
    kinds += [_positions(draw, base)] if draw.spec.rope is not None and not scope.counted else []
    kinds += [_edge(draw)] + [groups] * scope.groups
    kinds += [_decoding(draw)] * scope.few_queries + [_caches(draw)] * scope.caches
    mixed: Iterable[Call] = in_turn(kinds)
    if scope.backward:
        narrow = draw.spec.feature_map is not None and draw.spec.dtype == np.float16  # sums beyond 65504, or below 2⁻²⁴
        mixed = (call for call in mixed if _differentiable(call) and not (narrow and call.k.shape[2] > 130))
    yield from _few_shapes(base, mixed) if scope.compiled else mixed


def in_turn(kinds: Iterable[Iterable[Any]]) -> Iterator[Any]:
    return (x for turn in zip_longest(*kinds) for x in turn if x is not None)


def unit_values(call: Call) -> Iterator[Call]:
    """The same call with unit vectors for values, which returns the weights of d keys each, and with no values."""
    t, d = call.v.shape[2:]
    for start in range(0, t, d):
        v, count = np.zeros_like(call.v), min(d, t - start)
        v[:, :, range(start, start + count), range(count)] = 1
        yield replace(call, name=f"unit values from key {start} on", v=v, needed=False)
    yield replace(call, name="values of 0", v=np.zeros_like(call.v), needed=False)


def _few_shapes(base: Call, listed: Iterable[Call]) -> Iterator[Call]:
    shapes = {base.shape}
    for call in listed:
        if call.shape in shapes or (len(shapes) < SHAPES and not call.chunks):
            shapes.add(call.shape)
            yield call


def _differentiable(call: Call) -> bool:
    """Whether gradients are asked for: of calls whose truth can be had whole, with numbers of ordinary sizes."""
    n, t = call.q.shape[2], call.k.shape[2]
    plain = not (call.slack or call.alike or call.chunks) and bool(np.isfinite(call.q.astype(np.float32)).all())
    if call.q.dtype == np.float64 and call.positions is not None and not call.positions.any():
        return False  # where float32 angles are exact, but gradients that are turned in float32 are not
    return plain and call.q.shape[0] * call.q.shape[1] * max(n, 64) * t <= 2**21


# ── Kinds of calls ───────────────────────────────────────────────────────────────────────────────────────────────────


def _lengths(draw: Draw) -> Iterator[Call]:
    """As many queries as keys; positions rise by one, or by more, from 0 or from elsewhere, or start again."""
    spec, every = draw.spec, tuple(range(1, 131)) if not draw.scope.backward else ()
    more = MORE_LENGTHS if draw.scope.effort == "thorough" else ()
    listed = dict.fromkeys((*LENGTHS, spec.head_dim, spec.heads, *draw.rng.permutation(every).tolist(), *more))
    for i, n in enumerate(n for n in listed if draw.fits(1, n, n) and n + 8 <= draw.top):
        call = draw.random(f"{n} tokens", n, b=2 if i < len(LENGTHS) and n <= 64 else 1)
        if i >= len(LENGTHS) and not draw.scope.backward:
            call = replace(call, judged=draw.rows(n, 16))
        if spec.rope is not None and not draw.scope.counted:
            at, b = np.arange(n), len(call.q)
            other = draw.apart(b, n, min(draw.top, 2 * n + 8)), np.stack([at] * b), np.stack([at % (n // 2 + 1)] * b)
            call = replace(call, positions=(call.positions, *other)[i % 4])
        yield call


def _decoding(draw: Draw) -> Iterator[Call]:
    """Fewer queries than keys, which are the last of the tokens, and more: of one sequence or two, and of many."""
    one = ((1, t) for t in (draw.near, *KEYS))
    kinds = [((2 if t < 400 else 1, n, t) for n, t in some) for some in (FEW, one)] + [iter(ROWS_OF_FEW)]
    if draw.scope.effort == "thorough":
        more = ((24, 5), (70, 8), (131, 2), (400, 4), (1100, 1), (8200, 1))
        kinds.append((b, n, t) for t, b in more for n in (1, 2, 7, 16, 23))
    for b, n, t in in_turn(kinds):
        if draw.fits(b, n, t):
            words = f", a batch of {b}" * (b > 2)
            yield draw.random(f"{n} of {t} tokens{words}", t, n, b=b)


def _edge(draw: Draw) -> Iterator[Call]:
    """The end of a window that is too long for the other calls, with values that let one key too many show."""
    w, n = draw.spec.window, 8 if draw.scope.few_queries else (draw.spec.window or 0) + 12
    most = SUPPLY if draw.spec.rope is None else draw.top
    if w is not None and w > 2 * BASE and draw.fits(1, n, w + 12) and w + 20 < most:
        call = draw.random(f"the edge of a window of {w}", w + 12, n, b=1)
        call.v[:, :, :14] *= draw.spec.dtype.type(64)
        yield replace(call, judged=slice(max(n - 8, 0), n)) if not draw.scope.backward else call


def _caches(draw: Draw) -> Iterator[Call]:
    """Calls of a candidate with a cache: chunks, positions of their own, two caches at once."""
    thorough = ((1,) * 1100, (1000, 1, 1, 1100)) if draw.scope.effort == "thorough" else ()
    for chunks in (*CHUNKS, *thorough):
        size, t = f"{', '.join(map(str, chunks[:5]))}{', …' * (len(chunks) > 5)}", sum(chunks)
        if draw.fits(1, t, t) and t <= draw.top:
            yield draw.random(f"calls of {size} tokens", t, b=3 if t < 80 else 1 if t > 200 else 2, chunks=chunks)
    chunks = (5, 1, 1, 7, 1, 10)
    yield draw.random("two caches at once", 25, b=4, chunks=chunks, caches=2)
    yield draw.random("four caches, one token each", 9, b=4, chunks=(1,) * 9, caches=4)
    if draw.spec.rope is not None and not draw.scope.counted:
        for i, (name, at) in enumerate(_orders(draw, 25).items()):
            yield draw.random(f"cache: {name}", 25, b=3, chunks=(chunks, (8, 16, 1))[i % 2], positions=at)


def _orders(draw: Draw, t: int) -> dict[str, Array]:
    """Positions (3, t) that are far apart, start again, repeat, fall, or differ from row to row."""
    at, top, mixed = np.arange(t), draw.top, draw.rng.permutation(t)
    half = np.where(at < t // 2, at, at + 9)
    return {
        "positions that start again": np.stack([at % (t // 2), at % (t // 3), at % 5]),
        "positions far apart": draw.apart(3, t, top),
        "positions from 0 on": np.stack([at] * 3),
        "positions with a gap": np.stack([half, half + 2, half]),
        "positions far from 0": np.stack([at + top - t - 9] * 3),
        "positions of each row": np.stack([at + 40, at * 2, at[::-1] + top // 2]),
        "positions after padding": np.stack([np.maximum(at - 5, 0), at, np.maximum(at - 2, 0)]),
        "each position twice": np.stack([at // 2, at // 2 + 3, at // 2]),
        "positions that fall": np.stack([at[::-1], at[::-1] + 2, at[::-1]]),
        "unsorted positions": np.stack([mixed, mixed[::-1], mixed + 1]),
        "all at position 0": np.zeros((3, t), np.int64),
    }  # fmt: skip


def _positions(draw: Draw, base: Call) -> Iterator[Call]:
    """Positions in other orders, and of other kinds."""
    for t, b in ((base.k.shape[2], 3), (18, 2)):
        for name, at in _orders(draw, t).items():
            call = draw.random(f"{name}, {t} tokens", t, b=b, positions=at[:b])
            yield _short(draw, call) if name == "all at position 0" else call
    at = np.asarray(base.positions)
    for name, view in (*held_positions(at), ("one row, expanded", np.broadcast_to(at[:1], at.shape))):
        yield replace(base, name=f"positions held {name}", positions=view, needed=False)
    yield draw.random("positions that start again, one row", 18, b=1, positions=np.arange(18)[None] % 9)


def _short(draw: Draw, call: Call) -> Call:
    """Of float64: numbers that float32 holds, and their features, too: what is off at position 0 is no angle's."""
    if draw.spec.feature_map == "exp":
        return replace(call, q=np.zeros_like(call.q), k=np.zeros_like(call.k))
    linear = draw.spec.feature_map is not None
    q, k = (np.rint(np.abs(x) * 512) / 512 if linear else x.astype(np.float32) for x in (call.q, call.k))
    return replace(call, q=q.astype(draw.spec.dtype), k=k.astype(draw.spec.dtype))


def _memory(draw: Draw) -> Iterator[Call]:
    """The same numbers, held in memory in other ways."""
    call = draw.random("", 9)
    given = {name: x for name, x in (("q", call.q), ("k", call.k), ("v", call.v), ("g", call.g)) if x is not None}
    for views in zip(*(held(x) for x in given.values()), strict=True):
        arrays = dict(zip(given, (view for _, view in views), strict=True))
        yield replace(call, name=f"arrays held {views[0][0]}", held=views[0][0], **arrays)


def _masks(draw: Draw) -> Iterator[Call]:
    """mask= with and without a row that sees nothing, as padding on the left, and segments=."""
    for t in (draw.near, 80):
        call, at = draw.random("mask", t, b=3), np.arange(t)
        mask = (draw.rng.random((3, 1, t, t)) < 0.6) | np.eye(t, dtype=bool)
        pad, cuts = np.array([[0], [3], [t - 6]]), np.array([[t // 3, t // 2], [1, t - 1], [t, t]])
        padded = np.broadcast_to((at >= pad)[:, None, None], mask.shape).copy()
        if "mask" in draw.scope.options:
            yield replace(call, options={"mask": mask})
            yield replace(call, name="mask with empty rows", options={"mask": mask & (at % 7 != 5)[:, None]})
            own = call.positions if call.positions is None else np.maximum(at - pad, 0)
            yield replace(call, name="padding", options={"mask": padded}, positions=own)
            yield replace(call, name="a mask of True alone", options={"mask": np.ones_like(mask)})
        if "segments" in draw.scope.options:
            segments = (at >= cuts[:, :1]).astype(np.int64) + (at >= cuts[:, 1:])
            begins = (cuts * (at[:, None, None] >= cuts)).max(axis=-1).T
            own = call.positions if call.positions is None else at - begins
            yield replace(call, name="segments", options={"segments": segments}, positions=own)
            yield replace(call, name="segments 1, 3 and 0", options={"segments": (2 * segments + 1) % 5})
    if "mask" in draw.scope.options and draw.scope.few_queries:
        call = draw.random("mask, 5 of 40 tokens", 40, 5, b=3)
        yield replace(call, options={"mask": draw.rng.random((3, 1, 5, 40)) < 0.6})


# ── Sizes of numbers ─────────────────────────────────────────────────────────────────────────────────────────────────


def _values(draw: Draw, base: Call) -> Iterator[Call]:
    """Numbers of other sizes: large, tiny, equal and zero values, small and sharp scores, NaN in one row."""
    spec, t, half = draw.spec, base.k.shape[2], draw.spec.dtype.name == "float16"
    every, row, size = np.s_[:], np.s_[:, :, 4], 2.0 ** ((6 if spec.feature_map is None else 2) if half else 30)
    listed: list[tuple[str, int, int, dict[str, tuple[Any, float]]]] = [
        ("large values", t, 3, {"v": (every, size)}), ("tiny values", t, 3, {"v": (every, 1 / size)}),
        ("one large value", 9, 2, {"v": (np.s_[:, :, 2], 100)}), ("NaN in one query", 9, 2, {"q": (row, np.nan)}),
        ("zero values", 9, 2, {"v": (np.s_[:, :, 1::3], 0)}), ("small queries", 9, 2, {"q": (every, 2.0**-8)}),
        ("zero queries and keys", 9, 2, {"q": (np.s_[:, :, 1::2], 0), "k": (np.s_[:, :, ::3], 0)}),
    ]  # fmt: skip
    if spec.feature_map != "exp":
        listed.append(("a large row of q", 9, 2, {"q": (row, 16 if half else 512)}))
    if spec.feature_map is None:
        listed.append(("sharp scores", t, 3, {"q": (every, 6)}))
        listed += [("scores of a hundred", t, 2, {"q": (every, 192)})] * (spec.dtype.itemsize > 2)
    if spec.softcap is not None:
        listed.append(("scores beyond the softcap", t, 3, {"q": (every, 18 * spec.softcap)}))
    for name, tokens, b, changes in listed:
        call = draw.random(name, tokens, b=b)
        for argument, (some, factor) in changes.items():
            getattr(call, argument)[some] *= spec.dtype.type(factor)
        yield replace(call, judged=np.r_[0:4, 5:9]) if np.isnan(call.q).any() else call
    equal = draw.random("equal values", 9)
    yield replace(equal, v=np.repeat(equal.v[:, :, :1], 9, axis=2))
    if spec.feature_map is not None:
        yield from _denominators(draw)
    elif (still := _still(spec)) is not None:
        large = min(LARGE, 60000 * spec.scale) if half else LARGE
        yield _saturated(draw, still, large, f"scores of ±{large:g}")
        if half and spec.scale < 0.5:
            yield _saturated(draw, still, 81920 * spec.scale, PRODUCTS)
        yield _many(draw, still)


def _saturated(draw: Draw, still: int, score: float, name: str) -> Call:
    """Scores of ± this, one positive in three: a query that sees no positive key returns the mean of the others.
    Products beyond float16 grow from key to key: cut off at its largest number, they are alike."""
    call, size, at = draw.random(name, BASE, b=3, alike=True), (score / draw.spec.scale) ** 0.5, np.arange(BASE)
    sign = np.where(at % 3, -1.0, 1.0) * np.array([1, 1, -1])[:, None]
    grown = np.where(sign > 0, 1 + at / 64, 1) if name == PRODUCTS else 1
    call.q[...], call.k[...] = 0, 0
    call.q[..., still], call.k[..., still] = 2 * size, (sign * grown)[:, None] * size / 2
    return call


def _many(draw: Draw, still: int) -> Call:
    """One weight near 1 and 127 that a sum in few bits loses, one by one."""
    spec, call = draw.spec, draw.random("many small weights", 128, b=2, alike=True)
    call.q[...], call.k[...], call.v[...] = 0, 0, np.abs(call.v)
    for row, unit in enumerate((UNIT["bfloat16"], UNIT["float16"])):
        score = -np.log(unit / 2.5)
        score = score if spec.softcap is None else spec.softcap * np.arctanh(min(score / spec.softcap, 0.9))
        call.q[row, ..., still] = call.k[row, :, 0, still] = (score / spec.scale) ** 0.5
    call.v[:, :, 0] *= spec.dtype.type(-1)
    return call


def _still(spec: Spec) -> int | None:
    """A feature that RoPE hardly turns, if there is one."""
    rope = spec.rope
    if rope is None or rope.width < rope.head_dim:
        return 0 if rope is None or rope.start else rope.width
    slow = bool(np.abs(frequencies(rope)[-1]) < 0.005)
    return (rope.pairs - 1 if rope.layout.startswith("half") else rope.width - 2) if slow else None


def _denominators(draw: Draw) -> Iterator[Call]:
    """Linear attention whose first denominators are small, mostly at position 0, where angles have no error: an eps of
    1e-6 may show, but not in float64."""
    loose = 0.0 if draw.spec.dtype == np.float64 else 1e-5
    inverse: dict[str, Callable[[Array], Array]] = {"relu": np.asarray, "relu2": np.sqrt}
    for size, slack in ((0.3, loose), (1e-3, 0.01)):
        call = draw.random(f"denominators of {size:g}", 7)
        small = (np.sqrt(size / draw.spec.head_dim) * draw.rng.uniform(0.5, 1.5, x.shape) for x in (call.q, call.k))
        q, k = (inverse.get(draw.spec.feature_map or "", np.log)(x).astype(draw.spec.dtype) for x in small)
        still = call.positions if draw.spec.dtype == np.float64 else np.zeros((2, 7), np.int64)
        yield replace(call, q=q, k=k, positions=still, slack=slack)


# ── What may matter to a kernel ──────────────────────────────────────────────────────────────────────────────────────


def traits(listed: list[Call]) -> dict[str, list[Any]]:
    """A column for each trait of these calls, in the order in which they were made."""
    rows = [_traits(x) | _position_traits(x) | _earlier_traits(x, listed[:i]) for i, x in enumerate(listed)]
    return {name: [row[name] for row in rows] for name in rows[0] if all(name in row for row in rows)}


def _traits(call: Call) -> dict[str, Any]:
    """Sizes of numbers are powers of two, so that no rule is about a number that one call happens to have."""
    (b, h, n, _), (g, t) = call.q.shape, call.k.shape[1:3]
    q, k, v = (np.nan_to_num(np.abs(x.astype(np.float64))) for x in (call.q, call.k, call.v))
    sizes = (float(2.0 ** round(np.log2(x.max(initial=0) + 1e-300))) for x in (q, k, v))
    return {
        "with a cache": bool(call.chunks), "caches at once": call.caches,
        "fewer queries than keys": n < t, "more queries than keys": n > t,
        "with a mask": "mask" in call.options, "with segments": "segments" in call.options,
        "calls of one cache": float(len(call.chunks) or 1), "queries": n, "keys": t, "batch": b,
        "rows times heads": b * h, "key heads": g, "tokens in one call": max(call.chunks, default=n),
        "NaN in another row": bool(np.isnan(call.q).any()), "held in memory": call.held or "plainly",
        **dict(zip(("largest |q|", "largest |k|", "largest |v|"), sizes, strict=True)),
        "zeros among values": bool((v == 0).any()), "zeros among queries": bool((q == 0).any()),
    }  # fmt: skip


def _position_traits(call: Call) -> dict[str, Any]:
    at = call.positions
    if at is None:
        return {}
    steps = np.diff(at, axis=1) if at.shape[1] > 1 else np.ones((len(at), 1), np.int64)
    return {
        "largest position": int(at.max(initial=0)), "first position": int(at[:, 0].max(initial=0)),
        "positions are int32": at.dtype == np.int32, "positions are consecutive": bool((steps == 1).all()),
        "positions rise by more than 1": bool((steps > 1).any()), "positions do not rise": bool((steps <= 0).any()),
        "positions begin at 0": bool((at[:, 0] == 0).all()), "rows begin apart": bool((at[:, 0] != at[0, 0]).any()),
        "rows with unlike steps": bool((steps != steps[:1]).any()),
    }  # fmt: skip


def _earlier_traits(call: Call, earlier: list[Call]) -> dict[str, Any]:
    (b, _, n, _), t = call.q.shape, call.k.shape[2]
    whole = [(*x.q.shape, x.k.shape[2]) for x in earlier if not x.chunks]
    return {
        "earlier calls": float(len(earlier)),
        "an earlier call had as many queries": any(x[2] == n for x in whole),
        "an earlier call had the same shape": any(x[:4] == call.q.shape for x in whole),
        "an earlier call had more keys": any(x[4] > t for x in whole),
        "an earlier call had a larger batch": any(x[0] > b for x in whole),
        "an earlier call had a cache": any(x.chunks for x in earlier),
    }
