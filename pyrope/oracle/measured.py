"""The weights of one call, read with values that are unit vectors, beside what they should be, and which keys are seen.

o = W·v is linear in v: so the value e_c of key j alone returns the column W_j in feature c. Who sees whom is one of the
masks listed here, or told by the keys and queries that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from ..backend import Array
from . import rules
from .attention_calls import unit_values
from .candidate import UNIT
from .report import Finding, side_by_side
from .steps import Allowed, Call, Parts, Spec, seen, weigh

Ask: TypeAlias = Callable[[Call], Array]
Ways: TypeAlias = Iterator[tuple[str, Any]]
FEW = "precision: a step has few digits"
COMPARED = 1000  # results that are looked for in the places of others
BLOCKS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 100, 1000)  # usual numbers of tokens


def blocks(m: int) -> tuple[int, ...]:
    """Sizes of blocks that may show among m tokens, the usual ones first."""
    return tuple(dict.fromkeys([*(x for x in BLOCKS if x < m), *(range(2, m) if m <= 130 else ())]))


def where(call: Call, wrong: Array, some: Array, more: Mapping[str, Array] | None = None) -> str:
    """The places of ``some`` weights, bool (b, h, n, m), that are wrong, in words, if a simple rule has them all."""
    (i, j), (b, h) = call.places, some.shape[:2]
    i, row, head = i[:, None], np.arange(b)[:, None, None, None], np.arange(h)[:, None, None]
    columns = {"the key": j, "the query": i, "the distance": i - j, "the head": head, "the row": row}
    if call.chunks:
        of, first, stop = call.of, call.first, np.cumsum(call.chunks)[call.of]
        columns |= {"the key is of an earlier call": of[j] < of[i], "the query is of a later call": of[i] > 0}
        columns["tokens from the key to the call"] = first[i] - j
        columns["tokens from the key to the end of the call"] = stop[i] - j
    columns |= {f"the key is in the query's block of {x}": i // x == j // x for x in BLOCKS if x < j.size}
    listed = {name: np.broadcast_to(x, some.shape)[some] for name, x in (columns | dict(more or {})).items()}
    words = _rule(listed, np.broadcast_to(wrong, some.shape)[some])
    return f", {words}" if words else ""


def rows_where(limit: Allowed, answer: Array, what: str, at: Array) -> str:
    """Which rows (b, h, n) of an answer are wrong, in words; ``at`` are the places of the n."""
    row, head, i = (x.ravel() for x in np.indices(answer.shape[:3]))
    bad = (limit.error(answer) > limit.worst).any(axis=-1).ravel()
    return _rule({f"the {what}": at[i], "the head": head, "the row": row}, bad)


def _rule(columns: dict[str, Array], wrong: Array) -> str:
    rule = rules.simplest(columns, wrong)
    return f"where {rule.words}" if rule is not None and rule.share > 0.95 else ""


def elsewhere(truth: Array, answer: Array, room: float) -> str:
    """Which right results (b, h, n, d) are in the places of others, in words, if only right ones are returned."""
    due, got = (x.reshape(-1, x.shape[-1]) for x in (truth, answer))
    if len(due) > COMPARED:
        return ""
    off = np.array([np.abs(due - x).max(axis=-1) for x in got])
    own = np.arange(len(due))
    whose = np.where(off.diagonal() <= room, own, off.argmin(axis=1))
    moved = np.flatnonzero(whose != own)
    if not (off.min(axis=1) <= room).all() or not (np.abs(got[moved]) > room).any():  # zeros are any zeros
        return ""
    last = moved[-1]
    here, there = (
        "row {}, head {}, token {}".format(*np.unravel_index(i, truth.shape[:3])) for i in (last, whose[last])
    )
    return f"{here} has what belongs to {there}; so {len(moved)} of {len(due)} have right results of others"


def digits(off: float, spec: Spec) -> Finding | None:
    """The fault of relative errors of this size, if the rounding of a coarser dtype makes such."""
    near = {name: unit for name, unit in UNIT.items() if 0.1 * unit < off < 6 * unit and unit > UNIT[spec.dtype.name]}
    name = min(near, key=lambda name: abs(np.log(off / near[name])), default="")
    fact = f"errors are {off:.2g} of the size of the numbers, without a pattern, as if a step were rounded to {name}"
    return Finding(FEW, fact) if name else None


def read(ask: Ask, call: Call) -> tuple[Array, Array]:
    """W of the judged queries, (b, h, n, m), by one call for every d keys; and what is returned where all values are
    0, (b, h, n, d)."""
    *columns, offset = (ask(x)[:, :, call.judged] for x in unit_values(call))
    return np.concatenate([x - offset for x in columns], axis=-1)[..., : call.k.shape[2]], offset


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
    named = next((name for name, mask in masks(m.spec, m.call) if (mask == m.sees)[known].all()), None)
    if named is not None:
        return [Finding(named, fact)]
    if not extra.any() and not (missing & m.sees.any(axis=-1, keepdims=True)).any():
        rows = int((~m.sees.any(axis=-1, keepdims=True) & ~empty).sum())
        return [Finding("output: rows not written", f"zeros in {rows} rows{where(m.call, missing, m.visible)}")]
    ahead = where(m.call, extra, ~m.visible)
    back = where(m.call, missing, m.visible, {"the weight due": m.right.weights})
    how, both = "not seen" if missing.any() else "seen though hidden", missing.any() and extra.any()
    if both:
        how, back, ahead = f"{how}, and others seen", back and f"; missing{back}", ahead and f"; too many{ahead}"
    return [Finding(f"{'cache: keys' if m.call.chunks else 'keys:'} {how}", fact + back + ahead)]


def _fact(m: Measured, extra: Array, missing: Array) -> str:
    """The keys that the first wrong query sees, and which of them are too many or missing: long lists are cut off."""
    several = (extra | missing).any(axis=-1)
    at = tuple(np.argwhere(several)[0])
    keys = f"sees keys {runs(m.sees[at])}, expected {runs(m.visible[at])}"
    off = ", ".join(f"{words} {runs(x[at])}" for words, x in (("too many", extra), ("missing", missing)) if x[at].any())
    return f"{query_at(m.call, *at)} {keys}: {off}; {int(several.sum())} queries see other keys than they should"


def query_at(call: Call, row: Any, head: Any, i: Any) -> str:
    """The i-th of the judged queries, in words."""
    return f"{'query' if call.square else 'the query of token'} {call.places[0][i]} of row {row}, head {head},"


def masks(spec: Spec, call: Call) -> Ways:
    """Who else may see whom, or be summed in a total, (n, m) or (b, 1, n, m): by the step that is done otherwise."""
    (rows, j), m, w = call.places, call.k.shape[2], spec.window
    i, d, right = rows[:, None], np.subtract.outer(rows, j), seen(spec, call)
    given = seen(replace(spec, causal=False, window=None), call)
    near, causal = abs(d) < (m + len(rows) if w is None else w), (d >= 0) | (not spec.causal)
    yield from _options(call, causal, near)
    causal, near = causal & given, near & given
    yield from _causalities(call, d, near) if spec.causal else [("causality: not asked for", (d >= 0) & near)]
    if w is not None:
        yield "window: ignored", causal
        yield "window: one too wide", causal & (abs(d) <= w)
        yield "window: one too narrow", causal & (abs(d) < w - 1)
    for x in range(1, m) if len(rows) > 8 or w is not None else ():
        yield f"window: of {x}, not {w or 'asked for'}", causal & (abs(d) < x)
    if call.chunks:
        yield "cache: forgotten", right & (call.of[i] == call.of)
        yield "causality: missing within a call", (call.of <= call.of[i]) & near
    for x in blocks(m) if len(rows) > 8 and not call.chunks else ():  # of few queries, other rules may hold, too
        if spec.causal:
            yield f"causality: by blocks of {x}", (j // x <= i // x) & near
        yield f"blocks: state lost between blocks of {x}", right & (i // x == j // x)


def _causalities(call: Call, d: Array, near: Array) -> Ways:
    """Other causal masks, by the distances d (n, m), of the keys that are ``near`` enough."""
    (rows, j), m = call.places, call.k.shape[2]
    yield "causality: missing", near
    yield "causality: sees the next token", (d >= -1) & near
    yield "causality: does not see itself", (d > 0) & near
    yield "causality: inverted: sees the future", (d <= 0) & near
    first = call.first[rows[:, None]] if call.chunks else rows[:1]
    alone = np.bincount(call.of)[call.of[rows[:, None]]] == 1 if call.chunks else np.False_  # one token needs no mask
    for spared in (np.False_, (d >= 0) & alone) if first.any() else ():
        yield "causality: from the top left", ((j <= rows[:, None] - first) | spared) & near
    if call.positions is not None and (np.diff(call.positions) != 1).any():
        at = call.positions[:, None]
        own, of = at[..., np.clip(rows, 0, m - 1), None], at[..., None, :]
        for ties in (np.True_, d >= 0):  # positions that are the same
            yield "causality: by position", ((own > of) | (own == of) & ties) & near


def _options(call: Call, causal: Array, near: Array) -> Ways:
    """mask= and segments= as they may be misread."""
    right, (rows, _), n = causal & near, call.places, call.q.shape[2]
    mask, segments = call.options.get("mask"), call.options.get("segments")
    if mask is not None:
        mask = mask[..., np.arange(n)[call.judged], :]
        yield "mask=: ignored", right
        yield "mask=: instead of causality", mask & near
        yield "mask=: inverted", right & ~mask
        yield "mask=: of row 0 for all", right & mask[:1]
        if mask.shape[-1] == mask.shape[-2]:
            yield "mask=: transposed", right & mask.swapaxes(-1, -2)
    if segments is not None:
        own, of = segments[:, None, rows, None], segments[:, None, None]
        yield "segments=: ignored", right
        yield "segments=: instead of causality", (own == of) & near
        yield "segments=: of row 0 for all", right & (own[:1] == of[:1])
