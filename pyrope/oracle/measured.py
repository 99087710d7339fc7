"""The weights of one call, read with values that are unit vectors, beside what they should be, and which keys are seen.

o = W·v is linear in v: so the value e_c of key j alone returns the column W_j in feature c. Who sees whom is a band
along the diagonal, one of the masks listed here, or told by the keys and queries that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..backend import Array
from . import rules
from .attention_calls import unit_values
from .candidate import UNIT
from .report import Finding, side_by_side
from .steps import Allowed, Call, Parts, Spec, seen, weigh

Ask: TypeAlias = Callable[[Call], Array]
Ways: TypeAlias = Iterator[tuple[str, Any]]
COMPARED = 1000  # results that are looked for in the places of others
BLOCKS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 100, 1000)  # usual numbers of tokens


def blocks(m: int) -> tuple[int, ...]:
    """Sizes of blocks that may show among m tokens, the usual ones first."""
    return tuple(dict.fromkeys([*(x for x in BLOCKS if x < m), *(range(2, m) if m <= 130 else ())]))


def tokens(call: Call, some: Array) -> dict[str, Array]:
    """What may matter about some weights, bool (b, h, n, m), as columns for `rules`."""
    (i, j), (b, h) = call.places, some.shape[:2]
    places = np.arange(b)[:, None, None, None], np.arange(h)[:, None, None], i[:, None], j
    row, head, i, j = (np.broadcast_to(x, some.shape)[some] for x in places)
    columns = {"the key": j, "the query": i, "the distance": i - j, "the head": head, "the row": row}
    if call.chunks:
        of = call.of
        columns |= {"the key is of an earlier call": of[j] < of[i], "the query is of a later call": of[i] > 0}
    return columns


def where(call: Call, wrong: Array, some: Array) -> str:
    """The places of wrong weights, in words, if a simple rule has them all."""
    rule = rules.simplest(tokens(call, some), np.broadcast_to(wrong, some.shape)[some])
    return f", where {rule.words}" if rule is not None and rule.share > 0.95 else ""


def rows_where(limit: Allowed, answer: Array, what: str, at: Array) -> str:
    """Which rows (b, h, n) of an answer are wrong, in words; ``at`` are the places of the n."""
    row, head, i = (x.ravel() for x in np.indices(answer.shape[:3]))
    bad = (limit.error(answer) > limit.worst).any(axis=-1).ravel()
    rule = rules.simplest({f"the {what}": at[i], "the head": head, "the row": row}, bad)
    return f"where {rule.words}" if rule is not None and rule.share > 0.95 else ""


def elsewhere(truth: Array, answer: Array, room: float) -> str:
    """Which right results (b, h, n, d) are in the places of others, in words, if only right ones are returned."""
    due, got = (x.reshape(-1, x.shape[-1]) for x in (truth, answer))
    if len(due) > COMPARED:
        return ""
    off = np.array([np.abs(due - x).max(axis=-1) for x in got])
    own = np.arange(len(due))
    whose = np.where(off.diagonal() <= room, own, off.argmin(axis=1))
    if not (off.min(axis=1) <= room).all() or (whose == own).all():
        return ""
    last = np.flatnonzero(whose != own)[-1]
    here, there = (
        "row {}, head {}, token {}".format(*np.unravel_index(i, truth.shape[:3])) for i in (last, whose[last])
    )
    return f"{here} has what belongs to {there}; so {(whose != own).sum()} of {len(due)} have right results of others"


def coarser(off: float, spec: Spec) -> str:
    """The dtype whose rounding makes relative errors of this size, if it is coarser than that of the spec."""
    due = UNIT[spec.dtype.name]
    return next((name for name, unit in UNIT.items() if 0.1 * unit < off < 6 * unit and unit > due), "")


class Reading(NamedTuple):
    weights: Array  # (b, h, n, m) of the judged queries
    offset: Array  # (b, h, n, d): what it returns where all values are 0


def read(ask: Ask, call: Call) -> Reading:
    """W by one call for every d keys, and what is returned for no values."""
    *columns, offset = (ask(x)[:, :, call.judged] for x in unit_values(call))
    return Reading(np.concatenate([x - offset for x in columns], axis=-1)[..., : call.k.shape[2]], offset)


class Fit(NamedTuple):
    """How well weights are row factors times numerators."""

    share: float  # of the weights that are; NaN if no row has three
    factors: Array  # (b, h, n, 1)
    near: Array  # which ones


def fit(weights: Array, numerators: Array, some: Array, close: float, floor: float = 0.05) -> Fit:
    """The factor of each row is the median over some of its weights. A part of the largest is an error, too."""
    ratio = np.where(some & (numerators != 0), weights / numerators, np.nan)
    factors = np.nan_to_num(np.nanmedian(ratio, axis=-1, keepdims=True))
    right = factors * numerators
    size = np.abs(np.where(some, right, 0)).max(axis=-1, keepdims=True)
    near = np.abs(weights - right) <= close * (np.abs(right) + floor * size)
    counted = some & (some.sum(axis=-1, keepdims=True) > 2)
    return Fit(float(near[counted].mean()) if counted.any() else np.nan, factors, near)


class Numerators(NamedTuple):
    """Numerators as they were measured to be made, what is summed in their total, and how well they fit."""

    found: list[Finding]
    number: Any = None  # (b, h, n, m); None if they are not known
    plain: Any = None
    fit: Any = None
    scale: float = 1.0  # times the expected one


@dataclass(eq=False)
class Measured:
    """What was read in one call, (b, h, n, m), and how it was asked for."""

    spec: Spec
    ask: Ask
    call: Call
    read: Array
    close: float  # the relative error of a weight
    due: Call  # the same, with the queries and keys that each head reads

    def __post_init__(self) -> None:
        self.right: Parts = weigh(self.spec, self.due)
        self.linear = self.spec.feature_map is not None
        self.bad = ~np.isfinite(self.read).all(axis=-1, keepdims=True)  # which is told by itself
        self.weights: Array = np.where(self.bad, self.right.weights, self.read)
        top = np.abs(self.weights).max(axis=-1, keepdims=True)  # weights of both signs may be small by chance
        self.sees: Array = np.abs(self.weights) > (1e-6 * np.where(top == 0, 1, top) if self.linear else 1e-30)
        self.visible = np.broadcast_to(seen(self.spec, self.call), self.sees.shape)

    @cached_property
    def some(self) -> Array:
        """The weights by which numerators are compared: those that are seen and should be, unless these are few."""
        both = self.sees & self.visible & ~self.bad
        return np.asarray(both if both.sum() * 3 > self.sees.sum() else self.sees & ~self.bad)

    def top(self, scores: Array) -> Array:
        """The greatest visible score of each query, 0 if it sees nothing."""
        top = np.where(self.visible, scores, -np.inf).max(axis=-1, keepdims=True)
        return np.where(np.isfinite(top), top, 0)

    def sums(self) -> str:
        both = (np.round(w.sum(axis=-1), 7) for w in (self.weights, self.right.weights))  # beyond, they are rounded
        low, high, least, most = side_by_side(*(float(f(x)) for x in both for f in (np.min, np.max)), digits=4)
        return f"the weights of a query add up to {low} … {high}, expected {least} … {most}"


# ── Which keys are seen ──────────────────────────────────────────────────────────────────────────────────────────────


def runs(sees: Array) -> str:
    """Indices in words, such as "0 … 7, 9"."""
    at = np.flatnonzero(sees)
    parts = [(int(run[0]), int(run[-1])) for run in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1) if run.size]
    words = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} … {b}" for a, b in parts]
    return ", ".join([*words[:4], *["…"] * (len(words) > 4)]) or "none"


def masked(m: Measured, known: Array) -> list[Finding]:
    """What differs, where it is ``known`` whether a key is seen."""
    extra, missing = m.sees & ~m.visible & known, ~m.sees & m.visible & known
    if not (extra | missing).any():
        return []
    fact, empty = _fact(m, extra, missing), ~m.visible.any(axis=-1, keepdims=True)
    if extra.any() and not (extra & ~empty).any() and not missing.any():
        how = "mean of all values" if (m.sees | ~empty).all() else "not zeros"
        return [Finding(f"empty rows: {how}", f"queries that see no key have weights: {fact}")]
    several = (extra | missing).any(axis=(0, 1, 3)).sum() > 2 or m.call.q.shape[2] > 8 or m.spec.window is not None
    bands = [Finding(fault, fact) for fault in _band(m, known)] if several else []
    if bands and not m.call.options:  # which may say it better
        return bands
    if fault := next((fault for fault, mask in _masks(m.spec, m.call) if (mask == m.sees)[known].all()), ""):
        return [Finding(fault, fact)]
    if bands:
        return bands
    if not extra.any() and not (missing & m.sees.any(axis=-1, keepdims=True)).any():
        rows = int((~m.sees.any(axis=-1, keepdims=True) & ~empty).sum())
        return [Finding("output: rows not written", f"{rows} rows are zeros{where(m.call, missing, m.visible)}")]
    both = (("seen though hidden", extra, ~m.visible), ("not seen", missing, m.visible))
    step = "cache: keys" if m.call.chunks else "keys:"
    return [Finding(f"{step} {how}", fact + where(m.call, x, some)) for how, x, some in both if x.any()]


def _fact(m: Measured, extra: Array, missing: Array) -> str:
    """The keys that the first wrong query sees, and which of them are too many or missing: long lists are cut off."""
    several = (extra | missing).any(axis=-1)
    at = tuple(np.argwhere(several)[0])
    keys = f"sees keys {runs(m.sees[at])}, expected {runs(m.visible[at])}"
    off = ", ".join(f"{words} {runs(x[at])}" for words, x in (("too many", extra), ("missing", missing)) if x[at].any())
    query = f"query {m.call.places[0][at[2]]} of row {at[0]}, head {at[1]},"
    return f"{query} {keys}: {off}; so do {int(several.sum())} queries in all"


# ── Bands ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _band(m: Measured, known: Array) -> list[str]:
    """How far back and ahead each query sees, if that is all that differs."""
    d = m.call.places[0][:, None] - m.call.places[1]
    inside = np.broadcast_to(d, m.sees.shape)[m.sees]
    low, high = int(inside.min()), int(inside.max())
    if (((d >= low) & (d <= high)) != m.sees)[known].any():
        return []
    return list(dict.fromkeys([*_ahead(m, low, int(d.min())), *_back(m, high, int(d.max()))]))


def _ahead(m: Measured, low: int, least: int) -> Iterator[str]:
    """The least distance that is seen, against the expected one."""
    causal, w = m.spec.causal, m.spec.window
    if low == max(0 if causal else -w + 1 if w else least, least):
        return
    if not causal:
        yield "causality: not asked for" if low == 0 else f"window: {_width(w, 1 - low)}"
        return
    corner = m.call.k.shape[2] - m.call.q.shape[2]
    named = {-1: "sees the next token", 1: "does not see itself", least: "missing"}
    named |= {corner: "from the top left"} if corner else {}
    other = f"sees {-low} tokens ahead" if low < 0 else f"sees no key nearer than {low}"
    yield f"causality: {named.get(low, other)}"


def _back(m: Measured, high: int, most: int) -> Iterator[str]:
    """The largest distance that is seen, against the expected one."""
    w = m.spec.window
    if high != (most if w is None else min(w - 1, most)):
        kept = f"cache: the last {high + 1} tokens alone are kept"
        window = "window: ignored" if w is not None and high == most else f"window: {_width(w, high + 1)}"
        yield kept if w is None and m.call.chunks else window


def _width(w: int | None, width: int) -> str:
    if w is None:
        return f"of {width}, not asked for"
    named = {w // 2: "half as wide", w // 2 + 1: "half as wide", 2 * w: "twice as wide", 2 * w - 1: "twice as wide"}
    named |= {w + 1: "one too wide", w - 1: "one too narrow"}
    return named.get(width, f"of {width}, not {w}")


# ── Other masks, (n, m) or (b, 1, n, m) ──────────────────────────────────────────────────────────────────────────────


def _masks(spec: Spec, call: Call) -> Ways:
    """Who else may see whom, where that is no matter of one key, one query, or their distance."""
    rows, j = call.places
    i, m, w = rows[:, None], call.k.shape[2], spec.window
    causal, near = (j <= i) | (not spec.causal), abs(i - j) < (m if w is None else w)
    right = causal & near
    yield from _options(call, causal, near)
    if call.chunks:
        of, first = call.of, np.repeat(np.cumsum((0, *call.chunks[:-1])), call.chunks)
        yield "cache: forgotten", right & (of[i] == of)
        yield "causality: missing within a call", of <= of[i]
        for x in range(1, m):
            yield f"cache: the last {x} tokens of earlier calls alone are kept", right & (j >= first[i] - x)
    if w is not None:
        yield f"window: in blocks of {w}", causal & (i // w == j // w)
        yield from ((f"window: and the first {x} keys", causal & (near | (j < x))) for x in range(1, 9))
    if spec.causal:
        if call.positions is not None and (np.diff(call.positions) != 1).any():
            at = call.positions[:, None]
            yield "causality: by position", (at[..., np.clip(rows, 0, m - 1), None] >= at[..., None, :]) & near
        yield "causality: inverted: sees the future", (j >= i) & near
        for x in (2, 3, 4, 8, 1, 5, 6, 7, 16, 32):
            yield f"causality: the first {x} keys seen by all queries", ((j <= i) | (j < x)) & near
        for words, place in parts(m):
            yield f"causality: counted {words}", (place <= place[np.clip(i, 0, m - 1)]) & near
    for x in blocks(m) if len(rows) > 8 and not call.chunks else ():  # of few queries, other rules may hold, too
        same = i // x == j // x
        if spec.causal:
            yield f"causality: by blocks of {x}", (j // x <= i // x) & near
        yield f"blocks: state lost between blocks of {x}", right & same


def _options(call: Call, causal: Array, near: Array) -> Ways:
    """mask= and segments= as they may be misread."""
    right, (rows, _), n = causal & near, call.places, call.q.shape[2]
    mask, segments = call.options.get("mask"), call.options.get("segments")
    if mask is not None:
        mask = mask[..., np.arange(n)[call.judged], :]
        yield "mask=: ignored", right
        yield "mask=: inverted", right & ~mask
        yield "mask=: of row 0 for all", right & mask[:1]
        yield "mask=: instead of causality", mask & near
        if mask.shape[-1] == mask.shape[-2]:
            yield "mask=: transposed", right & mask.swapaxes(-1, -2)
    if segments is not None:
        own, of = segments[:, None, rows, None], segments[:, None, None]
        yield "segments=: ignored", right
        yield "segments=: instead of causality", (own == of) & near
        yield "segments=: of row 0 for all", right & (own[:1] == of[:1])
        yield "segments=: earlier segments are seen", right & (own >= of)


def parts(m: int) -> Iterator[tuple[str, Array]]:
    """The place of each of m tokens in its part, (m,), where a row is split among ranks."""
    j = np.arange(m)
    for ranks in (2, 4, 3, 8):
        yield f"in each of {ranks} parts", j % -(-m // ranks)
        firsts, chunks = j.copy(), np.array_split(j, 2 * ranks)
        for one, other in zip(chunks[:ranks], chunks[::-1], strict=False):
            firsts[other] = np.resize(one, len(other))
        yield f"by {ranks} ranks in a zigzag, those of the first chunk for both", firsts
