"""The calls of a check, each a value with attributes; none has a name of its own.

The first half is for rotations and attention alike: lengths, the same numbers held in memory in different ways, orders
of positions, sizes of values, each with a label in words. The second half makes the calls of a rotation from them.
Which calls are made depends on the arguments alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array
from ..theta import LENGTH_DEPENDENT, Rope

DENSE = 130  # every length up to here is tried
LENGTHS = (
    *range(136, 257, 8), *range(288, 513, 32), *range(576, 1025, 64), 200, 255, 257, 300, 384, 400, 511, 513, 601, 700,
    1000, 1023, 1025, 1280, 1500, 2047, 2048, 2049, 3000, 4096, 4097, 5000, 8192, 8209,
)  # fmt: skip
HEADS = (*range(1, 18), 24, 31, 32, 33, 40, 48, 63, 64, 65, 71, 96, 128, 129, 257, 520, 1040)
BATCHES = (*range(1, 10), 12, 16, 17, 24, 32, 33, 40)
ALONE = (  # positions of single rows, as in decoding
    *range(13), 31, 63, 64, 65, 100, 127, 128, 255, 500, 512, 1000, 1023, 2047, 2048, 4095, 4096, 8191, 8192, 16384,
    32768, 50000, 65535, 65536, 100000,
)  # fmt: skip
LEADS = ((2,), (), (3,), (1, 2), (2, 2), (1,), (1, 1, 2))
GROUPS = ((1, 8), (1, 32), (2, 5), (2, 8), (2, 16), (2, 33), (3, 5), (4, 3), (4, 8), (8, 4), (1, 2, 3), (2, 1, 32))
# One head, as keys have in MQA, of a batch, and the rows; decoding of whole batches.
ONE_HEAD = ((2, 1, 5), (2, 1, 64), (2, 1, 512), (3, 1, 5), (3, 1, 100), (8, 1, 5), (8, 1, 128), (4, 1, 256), (16, 1, 7))
DECODING = ((4, 1), (4, 2), (8, 1), (8, 4), (16, 1), (16, 8))
OWN = ((3, 2, 5), (2, 2, 7), (5, 3, 1), (4, 1, 9), (17, 2, 5), (33, 2, 3), (2, 5, 130), (1, 2, 6), (8, 8, 8))
COMPILED = (1, 2, 8, 17, 64, 129, 1024)  # lengths where each new shape is compiled
FEW = 8  # rows of a call that is about something else
FARTHEST = 131071  # the largest position, unless another is asked for: what a cache of 131072 rows still has
LARGEST = 2**21  # numbers in the largest call: its truth takes about 0.05 s

PLAIN, REUSED = "contiguous", "where the call before had its x"
USUAL = "usual"


def held(x: Array) -> Iterator[tuple[str, Array]]:
    """The same numbers (…, n, d), held in memory in every way that an array can be."""
    shape, d, n = x.shape, x.shape[-1], x.shape[-2]
    wide, longer = np.full((*shape[:-1], 3 * d), 9, x.dtype), np.full((*shape[:-2], n + 5, d), 9, x.dtype)
    wide[..., d : 2 * d], longer[..., 2 : n + 2, :] = x, x
    yield "a part of a fused projection", wide[..., d : 2 * d]
    yield "a part of a longer array", longer[..., 2 : n + 2, :]
    yield "in Fortran order", np.asfortranarray(x)
    yield "every second number of an array", np.repeat(x, 2, axis=-1)[..., ::2]
    yield "with rows backwards", x[..., ::-1, :].copy()[..., ::-1, :]
    yield "shared by its heads", np.broadcast_to(x[:1], shape)
    yield "transposed, rows before heads", np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3)
    yield "not aligned to 64 bytes", _shifted(x, 16)
    yield "not aligned", _shifted(x, 1)
    yield "read-only", _frozen(x)


def held_positions(m: Array) -> Iterator[tuple[str, Array]]:
    """The same positions (…, n) in other ways."""
    yield "strided", np.repeat(m, 2, axis=-1)[..., ::2]
    yield "int32", m.astype(np.int32)
    yield "backwards in memory", m[..., ::-1].copy()[..., ::-1]
    yield "read-only", _frozen(m)


def _shifted(x: Array, offset: int) -> Array:
    raw = np.zeros(x.nbytes + 128, np.uint8)
    view: Array = np.ndarray(x.shape, x.dtype, raw.data, offset=-raw.ctypes.data % 64 + offset)
    view[...] = x
    return view


def _frozen(x: Array) -> Array:
    fixed = x.copy()
    fixed.flags.writeable = False
    return fixed


def orders(n: int) -> Iterator[Array]:
    """n positions in many orders: counted, falling, repeated, restarted, shifted, spaced, near powers of two."""
    c = np.arange(n)
    yield from (c[::-1], np.full(n, 5), 0 * c, c // 2, c % (n // 2), np.roll(c, 1), c + 1, np.maximum(c - 2, 0))
    yield np.where(np.abs(2 * c - n + 1) <= 1, n - 1 - c, c)  # the two in the middle exchanged
    yield from (step * c for step in (2, 3, 4, 8, 16, 64, 1000, 4096))
    yield from (edge - n // 2 + c for edge in (256, 2048, 4096, 32768, 65536))
    yield np.append(c[:-1], 9 * n)


def sizes(dtype: str) -> tuple[float, ...]:
    """What ordinary numbers of this dtype are multiplied with: very small to very large."""
    if dtype == "float16":
        return (2.0**-8, 2.0**-5, 4.0, 64.0, 2.0**10, 2.0**12)
    return (2.0**-100, 2.0**-60, 2.0**-24, 2.0**-14, 4.0, 64.0, 2.0**10, 2.0**20, 2.0**60, 2.0**100)


def contents(x: Array, dtype: str) -> Iterator[tuple[str, Array]]:
    """Other numbers in the place of ordinary ones (…, n, d): large, small, equal, whole, zero, and not finite."""
    for size in sizes(dtype):
        yield f"times 2^{round(math.log2(size))}", x * x.dtype.type(size)
    for power in (5, -5) if dtype == "float16" else (60, -60):
        one = x.copy()
        one[..., 0, :] *= x.dtype.type(2.0**power)
        yield f"a row times 2^{power}", one
    yield "ones and minus ones", np.copysign(np.ones_like(x), x)
    yield "all equal", np.full_like(x, 0.7)
    yield "zero", np.zeros_like(x)
    yield "a zero in each row", np.where(np.arange(x.shape[-1]) == np.arange(x.shape[-2])[:, None], 0, x)
    for label, value in (("0", 0.0), ("NaN", np.nan), ("infinity", np.inf)):
        one = x.copy()
        one[(0,) * (x.ndim - 2) + (1,)] = value
        yield f"a row of {label}", one


# ── The calls of a rotation ──────────────────────────────────────────────────────────────────────────────────────────


class RotationCall(NamedTuple):
    """fn(x, positions), with what is particular about it in words."""

    x: Array  # (…, n, d)
    positions: Array  # (n,) or (axes, n); with `own`, (b, n) or (b, 1, n), or (axes, …) of these
    memory: str = PLAIN  # how x is held
    places: str = PLAIN  # how positions are held
    values: str = USUAL  # what x holds
    own: str = ""  # "(b, n)" or "(b, 1, n)" where each row of the batch has positions of its own

    @property
    def at(self) -> Array:
        """int64 positions (axes, …, n) that broadcast to the axes of x but the last; one axis if they have none."""
        m = self.positions.astype(np.int64)
        m = m[..., None, :] if self.own == "(b, n)" else m
        m = m if m.ndim == (4 if self.own else 2) else m[None]
        return m.reshape(len(m), *[1] * (self.x.ndim - m.ndim), *m.shape[1:])

    def each(self) -> Array:
        """The position of every row, (axes, …, n)."""
        return np.broadcast_to(self.at, (len(self.at), *self.x.shape[:-1]))


@dataclass(frozen=True)
class Plan:
    """What is asked of a candidate: it decides which calls are made."""

    rope: Rope
    dtype: np.dtype[Any]
    top: int  # the largest position
    least: int = 0  # the least position
    batched: bool = False
    effort: str = "usual"
    worst: str = ""  # the worst grade that is accepted
    strict: bool = False  # whether features in another order are wrong
    backward: bool = False
    derived: str | None = None  # the framework whose derivative of the candidate is judged
    compiled: bool = False  # whether each new shape is compiled

    @property
    def axes(self) -> int | None:
        return None if self.rope.axes is None else self.rope.axes.count

    @property
    def expected(self) -> str:
        by = f", by the derivative that {self.derived} takes of the candidate" if self.derived else ""
        return f"the transpose of {self.rope.transposed!r}{by}" if self.backward else repr(self.rope)


class Maker:
    """Makes the calls of a plan; ordinary random numbers are in every one of them."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.d, self.top = plan, plan.rope.head_dim, plan.top
        self.few = 3 if plan.axes == 2 else 2  # heads: not as many as axes, or axes might be taken for heads
        self.rng = np.random.default_rng(2104)
        self.noise = self.rng.standard_normal((2**10, self.d)).astype(plan.dtype)

    def x(self, *shape: int) -> Array:
        rows, start = math.prod(shape), int(self.rng.integers(0, 1000))
        return np.take(self.noise, np.arange(start, start + rows), axis=0, mode="wrap").reshape(*shape, self.d)

    def at(self, positions: Any) -> Array:
        """Positions (…, n) as the candidate takes them; with axes another on each: m, m/2, m/3, …."""
        m = np.array(positions, np.int64)
        return m if self.plan.axes is None else np.stack([m // (j + 1) for j in range(self.plan.axes)])

    def scattered(self, n: int) -> Array:
        """n positions in no order, below 4n, none next to another where there is room; of long calls below n."""
        spread = 4 if 4 * n <= self.top and n <= 1024 else 1
        m = spread * np.arange(n) + self.rng.integers(0, 3, n) * (spread > 1) + 1
        return self.rng.permutation(np.minimum(m, self.top))

    def call(self, lead: tuple[int, ...], positions: Any) -> RotationCall:
        return RotationCall(self.x(*lead, len(positions)), self.at(positions))

    def opening(self) -> RotationCall:
        """A short call, made before all others: a longer one must not change it."""
        return self.call((self.few,), np.minimum([0, 1, 3, 4], self.top))

    def sample(self) -> RotationCall:
        """A few heads at each power of two, its neighbours, and many positions at random up to the largest."""
        top, least = self.top, self.plan.least
        some = [*range(14), top, *(2**k + step for k in range(2, top.bit_length()) for step in (-1, 0, 1))]
        some += [*self.rng.integers(top // 2, top, 76, endpoint=True), *self.rng.integers(0, top, 24, endpoint=True)]
        some += range(least, 0, max(1, -least // 8)) if least else []
        m = self.rng.permutation(np.unique([m for m in some if m <= top]))
        if self.plan.axes is None:
            return RotationCall(self.x(self.few, len(m)), m)
        spread = self.rng.integers(0, np.maximum(m, 0), (self.plan.axes, len(m)), endpoint=True)
        spread[np.arange(len(m)) % self.plan.axes, np.arange(len(m))] = m
        return RotationCall(self.x(self.few, len(m)), spread)

    def all(self) -> list[RotationCall]:
        """Every call but the opening and the sample."""
        rounds = {"few": 0, "usual": 1, "thorough": 3}[self.plan.effort]
        parts = [
            self.lengths,
            self.plain,
            self.memories,
            self.contents,
            self.one_head,
            *[self.batches] * self.plan.batched,
        ]
        calls = [call for _ in range(rounds) for part in parts for call in part()]
        return [call for call in calls if call.positions.max(initial=0) <= self.top]

    def lengths(self) -> Iterator[RotationCall]:
        """Each length with scattered positions, and counted from 0 or from elsewhere."""
        if self.plan.compiled:
            for n in COMPILED:
                yield from (self.call((2,), m) for m in (self.scattered(n), np.arange(n)))
            return
        long = [*LENGTHS, *(range(DENSE, 1100, 7) if self.plan.effort == "thorough" else ())]
        for k, n in enumerate(sorted({*range(DENSE + 1), *long, self.d // 2, self.d, self.d + 1})):
            lead = LEADS[k % len(LEADS)] if n <= 66 else LEADS[1 + k % 2 * 4] if n <= DENSE else ()
            start = (0, 500, 0, self.top + 1 - n, 0, 4096, 0, 1)[k % 8]
            if n > self.top + 1 or n * self.d > LARGEST:
                continue
            if n <= DENSE or k % 2:
                yield self.call(lead, self.scattered(n))
            if n <= DENSE or not k % 2:
                yield self.call(lead, np.arange(n) + (start if 0 <= start <= self.top + 1 - n else 0))

    def plain(self) -> Iterator[RotationCall]:
        """Ordinary numbers of many shapes, at positions in many orders."""
        for lead, m in self._shapes():
            if math.prod(lead) * len(m) * self.d <= LARGEST:
                yield self.call(lead, m)

    def _shapes(self) -> Iterator[tuple[tuple[int, ...], Any]]:
        """The axes of x before its rows, and the positions."""
        yield from (((2,), m) for n in (FEW, 21) for m in orders(n))
        leads = [*((h,) for h in HEADS), *((b, 2) for b in BATCHES), *GROUPS]
        yield from ((lead, self.scattered(min(5, self.top))) for lead in leads)
        yield from (((h,), self.scattered(h)) for h in (FEW, 16, 24))  # as many heads as rows
        for k, m in enumerate((*ALONE, self.top)):
            yield from ((lead, [m]) for lead in (LEADS[k % 3], (2, 3))[: 1 + (k % 3 == 0)])
        yield (32,), self.scattered(LARGEST // (32 * self.d))  # as a prompt: an index, or a grid, may end before it
        scaling, least = self.plan.rope.scaling, self.plan.least
        n = scaling.original_length if isinstance(scaling, LENGTH_DEPENDENT) else 0  # where a rope changes its rule
        for length in (n // 2, n - 1, n, n + 1, n + 2, 2 * n) if n else ():
            yield (2,), np.unique(np.maximum([1, length // 3, length // 2, length - 2, length - 1], 0))
        for lead in ((2,), (2, 3)) if least else ():
            yield lead, [-1, 0, least, -(-least // 2), max(-7, least), 1, -1, max(-2, least)]

    def memories(self) -> Iterator[RotationCall]:
        """The same numbers held in every way; other numbers in the very memory of the call before, and at the same
        positions; the same numbers at others."""
        x, m = self.x(2, FEW), self.at(self.scattered(FEW))
        yield from (RotationCall(view, m, memory=label) for label, view in held(x))
        yield from (RotationCall(x, view, places=label) for label, view in held_positions(m))
        yield from (RotationCall(self.x(2, FEW), m), RotationCall(x, self.at(self.scattered(FEW))))
        for _ in range(3):
            yield RotationCall(self.x(2, FEW), self.at(self.scattered(FEW)), memory=REUSED, places=REUSED)
        batch = np.ascontiguousarray(self.x(2, FEW, 4)).swapaxes(1, 2)
        yield RotationCall(batch, m, memory="transposed, rows before heads")

    def contents(self) -> Iterator[RotationCall]:
        for label, x in contents(self.x(2, FEW), self.plan.dtype.name):
            yield RotationCall(x, self.at(self.scattered(FEW)), values=label)

    def one_head(self) -> Iterator[RotationCall]:
        for *lead, n in ONE_HEAD:
            rows = min(n, self.top)
            if math.prod(lead) * rows * self.d <= LARGEST:
                yield self.call(tuple(lead), np.arange(rows) if n % 2 else self.scattered(rows))
        yield from (self.call(lead, [min(100 + k, self.top)]) for k, lead in enumerate(DECODING))

    def batches(self) -> Iterator[RotationCall]:
        """Rows of a batch with positions of their own, (b, n) and (b, 1, n)."""
        for b, h, n in OWN:
            if self.top < 4 * b * n:
                continue
            m = 3 * self.rng.permutation(b * n).reshape(b, n)
            counted = np.arange(n) + 11 * np.arange(b)[:, None]  # as in decoding: each its own start
            for each in (m, counted):
                yield RotationCall(self.x(b, h, n), self.at(each), own="(b, n)")
                yield RotationCall(self.x(b, h, n), self.at(each[:, None]), own="(b, 1, n)")
