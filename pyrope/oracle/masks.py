"""Which keys each query sees, against which it should: a band along the diagonal, or one of the masks of `ways`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..backend import Array
from . import rules, ways
from .report import Finding
from .steps import Call, Spec

MOST = 700  # tokens of a call that is made again with more of them


def tokens(call: Call, some: Array) -> dict[str, Array]:
    """What may matter about some weights, bool (b, h, n, m), as columns for `rules`."""
    (i, j), (b, h) = call.places, some.shape[:2]
    places = np.arange(b)[:, None, None, None], np.arange(h)[:, None, None], i[:, None], j
    row, head, i, j = (np.broadcast_to(x, some.shape)[some] for x in places)
    columns = {"the key": j, "the query": i, "the distance": i - j, "the head": head, "the row": row}
    if call.chunks:
        of = np.repeat(np.arange(len(call.chunks)), call.chunks)
        columns |= {"the key is of an earlier call": of[j] < of[i], "the query is of a later call": of[i] > 0}
    return columns


def runs(sees: Array) -> str:
    """Indices in words, such as "0 … 7, 9"."""
    at = np.flatnonzero(sees)
    parts = [(int(run[0]), int(run[-1])) for run in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1) if run.size]
    words = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} … {b}" for a, b in parts]
    return ", ".join([*words[:4], *["…"] * (len(words) > 4)]) or "none"


class Masks:
    """The keys that are seen, and those that should be, bool (b, h, n, m) each."""

    def __init__(self, spec: Spec, call: Call, sees: Array, visible: Array, again: Callable[[Call], Array]) -> None:
        self.spec, self.call, self.sees, self.visible = spec, call, sees, visible
        self.again = again  # what is seen in another call
        self.distance = call.places[0][:, None] - call.places[1]

    def found(self, known: Array) -> list[Finding]:
        """What differs, where it is known whether a key is seen."""
        extra, missing = self.sees & ~self.visible & known, ~self.sees & self.visible & known
        if not (extra | missing).any():
            return []
        fact, empty = self._fact(extra | missing), ~self.visible.any(axis=-1, keepdims=True)
        if extra.any() and not (extra & ~empty).any() and not missing.any():
            how = "mean of all values" if (self.sees | ~empty).all() else "not zeros"
            return [Finding(f"empty rows: {how}", f"queries that see no key have weights: {fact}")]
        several = len(np.unique(np.argwhere(extra | missing)[:, 2])) > 2 or self.call.q.shape[2] > 8
        several &= not self.call.options  # which may say it better
        if band := self._band(known) if several else []:
            return [Finding(fault, fact) for fault in band]
        names = [name for name, mask in self._masks(self.call) if (mask == self.sees)[known].all()]
        if names:
            return [Finding(self._one_of(names), fact)]
        if band := self._band(known):
            return [Finding(fault, fact) for fault in band]
        written = self.sees.any(axis=-1, keepdims=True) | empty
        if not extra.any() and not (missing & written).any():
            return [
                Finding(
                    "output: rows not written",
                    f"{int((~written).sum())} rows are zeros{self._where(missing, self.visible)}",
                )
            ]
        both = (("keys seen though hidden", extra, ~self.visible), ("keys not seen", missing, self.visible))
        step = "cache" if self.call.chunks else "keys"
        return [
            Finding(f"{step}: {how.removeprefix('keys ') if step == 'keys' else how}", f"{fact}{self._where(x, some)}")
            for how, x, some in both
            if x.any()
        ]

    def _masks(self, call: Call) -> Iterator[tuple[str, Array]]:
        keys, m = np.flatnonzero(self.sees.any(axis=(0, 1, 2))), self.sees.shape[-1]
        lost = np.setdiff1d(np.arange(m), keys)[:1] + 1
        sizes = (
            {int(keys.max()) + 1, m - int(keys.min()), m - 1 - int(keys.max()), *lost.tolist()} if keys.size else {1}
        )
        return ((f"{step}: {how}", mask) for step, how, mask in ways.masks(self.spec, call, sorted(sizes)))

    def _one_of(self, names: list[str]) -> str:
        """Of masks that are alike in this call, the one that also holds in calls of other lengths."""
        for call in self._longer() if len(names) > 1 else ():
            masks = {name: mask for name, mask in self._masks(call) if name in names}
            if any((mask != masks[names[0]]).any() for mask in masks.values()) if names[0] in masks else masks:
                sees = self.again(call)
                names = [name for name, mask in masks.items() if (mask == sees).all()] or names
        return names[0]

    def _longer(self) -> Iterator[Call]:
        """The same numbers again and again."""
        (n, m), call = (self.call.q.shape[2], self.call.k.shape[2]), self.call
        for more in (1, m // 3 + 2, m + 5, -1) if n * m < MOST**2 and not call.options and not call.chunks else ():
            q = np.take(call.q, range(n + more if n == m else n), axis=2, mode="wrap")
            k, v = (np.take(x, range(m + more), axis=2, mode="wrap") for x in (call.k, call.v))
            at = None if call.positions is None else call.positions[:, :1] + np.arange(m + more)
            yield replace(call, q=q, k=k, v=v, positions=at, judged=slice(None))

    def _fact(self, wrong: Array) -> str:
        b, h, i, _ = np.argwhere(wrong)[0]
        query, several = self.call.places[0][i], int(wrong.any(axis=-1).sum())
        got, due = runs(self.sees[b, h, i]), runs(self.visible[b, h, i])
        return f"query {query} of row {b}, head {h}, sees keys {got}, expected {due}; so do {several} queries in all"

    def _where(self, wrong: Array, some: Array) -> str:
        rule = rules.simplest(tokens(self.call, some), wrong[some])
        return f"; where {rule.words}" if rule is not None and rule.share > 0.95 else ""

    def _given(self) -> Any:
        """What mask= and segments= hide, True where nothing is given."""
        mask, segments, rows = self.call.options.get("mask"), self.call.options.get("segments"), self.call.places[0]
        seen = True if mask is None else mask[..., np.arange(mask.shape[-2])[self.call.judged], :]
        return seen if segments is None else seen & (segments[:, None, rows, None] == segments[:, None, None])

    def _band(self, known: Array) -> list[str]:
        """How far back and ahead each query sees, if that is all that differs."""
        d = self.distance
        inside = np.broadcast_to(d, self.sees.shape)[self.sees]
        low, high = int(inside.min()), int(inside.max())
        if (((d >= low) & (d <= high) & self._given()) != self.sees)[known].any():
            return []
        return list(dict.fromkeys([*self._ahead(low, d), *self._back(high, d)]))

    def _ahead(self, low: int, d: Array) -> Iterator[str]:
        """The least distance that is seen, against the expected one."""
        causal, w, least = self.spec.causal, self.spec.window, int(d.min())
        due = max(0 if causal else -w + 1 if w else least, least)
        if low == due:
            return
        if not causal:
            yield "causality: not asked for" if low == 0 else f"window: {self._width(1 - low)}"
            return
        corner = self.call.k.shape[2] - self.call.q.shape[2]
        named = {-1: "sees the next token", 1: "does not see itself", least: "missing"}
        named |= {corner: "from the top left"} if corner else {}
        other = f"sees {-low} tokens ahead" if low < 0 else f"sees no key nearer than {low}"
        yield f"causality: {named.get(low, other)}"

    def _back(self, high: int, d: Array) -> Iterator[str]:
        """The largest distance that is seen, against the expected one."""
        w, most = self.spec.window, int(d.max())
        if high != (most if w is None else min(w - 1, most)):
            kept = f"cache: the last {high + 1} tokens alone are kept"
            window = "window: ignored" if w is not None and high == most else f"window: {self._width(high + 1)}"
            yield kept if w is None and self.call.chunks else window

    def _width(self, width: int) -> str:
        w = self.spec.window
        if w is None:
            return f"of {width}, not asked for"
        named = {w // 2: "half as wide", w // 2 + 1: "half as wide", 2 * w: "twice as wide", 2 * w - 1: "twice as wide"}
        named |= {w + 1: "one too wide", w - 1: "one too narrow"}
        return named.get(width, f"of {width}, not {w}")
