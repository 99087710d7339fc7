"""What becomes of the values before and after they are weighed: o = Σ w·v of the values given, or of what else.

Values of one key alone, of one head and row alone, and of many sizes show whether they are turned, of another head, or
rounded, clipped, or otherwise not themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TypeAlias

import numpy as np

from .. import definition
from ..backend import Array
from .measured import Ask, read
from .report import Finding
from .responses import Response, examples, response
from .steps import EXACT, Allowed, Call, Spec, weigh

Change: TypeAlias = Callable[[Array, Call], Array]  # of the values of a call
UNREADABLE = {"batch: mixed", "heads: mixed", "values: not only summed"}  # so that there are no weights
ONES = 4  # features of all values that are 1
CLOSE = {"float64": 1e-6, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}  # relative error of what is read


def head_maps(h: int, g: int) -> Iterator[tuple[str, Array]]:
    """Which of the h spread key heads a query head may read instead of its own."""
    own, heads = np.arange(h), [np.arange(h) % g * (h // g), np.zeros(h, int), np.arange(h)[::-1], np.roll(range(h), 1)]
    for words, index in zip(("tiled", "head 0 for all", "reversed", "shifted by one"), heads, strict=True):
        if ((own * g // h) != (index * g // h)).any():
            yield words, index


def row_maps(b: int) -> Iterator[tuple[str, Array]]:
    """Which row of a batch may be read instead of the own one."""
    if b > 1:
        yield "row 0 for all", np.zeros(b, int)
        yield "rows reversed", np.arange(b)[::-1]
        yield "rows shifted by one", np.roll(np.arange(b), 1)


class Values:
    """The values of one call; ``weights`` are those that were read, better ones if values are turned."""

    def __init__(self, spec: Spec, ask: Ask, call: Call, weights: Array, offset: Array) -> None:
        self.spec, self.ask, self.call, self.weights, self.offset = spec, ask, call, weights, _finite(offset)
        self.close, self.rng = CLOSE[spec.dtype.name], np.random.default_rng(12)
        self.v = self._spread(call.v.astype(np.float64))

    def _spread(self, x: Array) -> Array:
        return definition.repeat_heads(x, self.call.q.shape[1])

    def _asked(self, v: Array) -> Array:
        out = self.ask(replace(self.call, v=v.astype(self.call.v.dtype)))
        return _finite(out[:, :, self.call.judged] - self.offset)

    def found(self, answer: Array, allowed: Allowed) -> list[Finding]:
        """What is added to the output, and whether values are turned, of other heads, or not themselves."""
        listed, room = list(self._added()), 3 * allowed.worst + self.close * np.abs(answer).max(axis=-1, keepdims=True)
        summed = (np.abs(self.weights @ self.v + self.offset - answer) <= room).all()
        if summed or not np.isfinite(answer).any():
            return listed
        if turned := next((words for words, turn, undo in self._turns() if self._undone(turn, undo, answer, room)), ""):
            fact = f"outputs are those of values that are {turned}"
            listed.append(Finding(f"values: {turned}", fact))
        elsewhere = list(self._sources())
        if turned or elsewhere:
            return [*listed, *elsewhere]
        return [*listed, *(self._responses(answer) or self._not_summed())]

    def _not_summed(self) -> list[Finding]:
        once, twice = (self._asked(by * self.call.v.astype(np.float64)).reshape(1, -1) for by in (1, 2))
        if _parallel(once, twice):
            return []
        return [Finding("values: not only summed", "twice the values do not give twice the output")]

    def _added(self) -> Iterator[Finding]:
        size = float(np.abs(self.offset).max(initial=0))
        if size > 10 * self.close:
            number = f"{self.offset.flat[0]:.4g}" if np.ptp(self.offset) < 0.01 * size else "something"
            yield Finding(f"output: {number} is added", f"for values of 0 it returns up to {size:.4g}")

    # ── Values that are turned, or features in another order ──

    def _turns(self) -> Iterator[tuple[str, Change, Change]]:
        """What may be done to values, in words, and what undoes it."""
        if self.spec.rope is not None:
            ropes = self.spec.rope.rotation_only, self.spec.rope.rotation_only.transposed
            there, back = (partial(lambda x, call, rope: EXACT.turned(x, call.at()[1], rope), rope=r) for r in ropes)
            yield "rotated", there, back
            yield "rotated backwards", back, there
        yield "features in reversed order", lambda x, call: x[..., ::-1], lambda x, call: x[..., ::-1]

    def _undone(self, turn: Change, undo: Change, answer: Array, room: Array) -> bool:
        """Whether weights that are read with values that undo it explain the answer: then they are kept."""
        own = self.ask

        def ask(call: Call) -> Array:
            return own(replace(call, v=undo(call.v.astype(np.float64), call).astype(call.v.dtype)))

        w, v = read(ask, self.call).weights, self._spread(turn(self.call.v.astype(np.float64), self.call))
        w = np.where(np.abs(w) > 1e-6 * np.abs(w).max(axis=-1, keepdims=True), w, 0)  # undone values are rounded
        if not (np.abs(w @ v + self.offset - answer) <= room + 10 * self.close * np.abs(v).max()).all():
            return False
        self.ask, self.weights = ask, w
        return True

    # ── Values of other heads and rows ──

    def _sources(self) -> Iterator[Finding]:
        """Which rows and key heads each head reads: all values are zeros but for those of one."""
        (b, g), h = self.call.v.shape[:2], self.call.q.shape[1]
        if b * g > 64:
            return
        size, reached = float(np.abs(self.v).max()), np.zeros((b, g, b, h), bool)
        for i, j in product(range(b), range(g)):
            v = np.zeros(self.call.v.shape)
            v[i, j] = size
            reached[i, j] = np.abs(self._asked(v)).max(axis=(2, 3)) > 100 * self.close * size
        rows, heads = np.any(reached, axis=1), np.any(reached, axis=0)  # (b, b, h), (g, b, h)
        own = np.arange(h) * g // h
        for what, step, by, due in (("row", "batch", rows, np.arange(b)[:, None]), ("head", "heads", heads, own)):
            first, count = by.argmax(axis=0), by.sum(axis=0)
            numbers = ", ".join(map(str, (first[:, 0] if what == "row" else first[0])[:8]))
            if (count > 1).any():
                several = ", ".join(map(str, np.flatnonzero(by.reshape(len(by), -1)[:, count.argmax()])))
                yield Finding(f"{step}: mixed", f"one {what} reads the values of {what}s {several}")
            elif (count == 1).all() and (first != due).any():
                maps = row_maps(b) if what == "row" else ((words, i * g // h) for words, i in head_maps(h, g))
                same = (words for words, i in maps if (first == (i[:, None] if what == "row" else i)).all())
                words = f"{what}s 0, 1, … read the values of {'key ' * (what == 'head')}{what}s {numbers}"
                yield Finding(f"{step}: values {next(same, f'of other {what}s')}", words)

    # ── Values that are not themselves ──

    def _responses(self, answer: Array) -> list[Finding]:
        """What comes out of values of many sizes; weights, read by values of 1, are divided by what becomes of 1."""
        read = [self._first(sizes) for sizes in (False, True)]
        found = [response(v, y, self.close, scaled=not sole) for v, y, sole in read]
        best = next((i for i, x in enumerate(found) if x.function is not None), 0 if found[0].words else 1)
        (v, y, sole), told = read[best], found[best]
        one = y[..., :ONES] if told.function is None else told.function(np.ones((1, 1, 1, 1)))
        if not told.words or np.ptp(one) > 10 * self.close * np.abs(one).max():
            return []  # it depends on more than on the value
        self.weights = self.weights / one.flat[0] if one.flat[0] and sole else self.weights
        step = "output" if self._after(told, answer) else "values"
        return [Finding(f"{step}: {told.words}", f"of values, {examples(v[..., :1, :], y)}")]

    def _first(self, sizes: bool) -> tuple[Array, Array, bool]:
        """Values (b, g, m, d), and what comes out of the first token: where a query sees one key alone, which is put
        first here, and else, up to a factor, where all values are alike."""
        shape, step = self.call.v.shape, self.call.q.shape[1] // self.call.v.shape[1]
        v = self.rng.standard_normal(shape) * (2.0 ** self.rng.uniform(-6, 5, shape) if sizes else 1)
        v[..., :ONES] = 1
        w, due = self.weights[:, ::step], weigh(self.spec, self.call).weights[:, ::step]
        w = np.where(np.isfinite(w), w, due)
        sees = np.abs(w) > 1e-6 * np.abs(w).max(axis=-1, keepdims=True)
        row = int((sees.sum(axis=-1) == 1).all(axis=(0, 1)).argmax())
        sole, key = bool((sees[:, :, row].sum(axis=-1) == 1).all()), int(sees[0, 0, row].argmax())
        v = (v if sole else np.broadcast_to(v[:, :, :1], shape)).astype(self.call.v.dtype)
        out, x = self._asked(v)[:, ::step], np.roll(v, -key if sole else 0, axis=2).astype(np.float64)
        sums = w.sum(axis=-1, keepdims=True)
        row = row if sole else int(np.abs(sums).min(axis=(0, 1, 3)).argmax())
        alike = sole and np.ptp(sums[:, :, row]) < 1e-3 * np.abs(sums[:, :, row]).max()
        return x, out[:, :, row : row + 1] / (1 if alike else sums[:, :, row : row + 1]), bool(alike)

    def _after(self, found: Response, answer: Array) -> bool:
        """Whether it is the output, rather than each value, that is changed so."""
        if found.function is None:
            return False
        due = weigh(self.spec, self.call).weights
        w = due if np.abs(due - self.weights).max() < 0.01 else self.weights  # it may be the output that is rounded
        before, after = w @ self._spread(found.function(self.call.v.astype(np.float64))), found.function(w @ self.v)
        return bool(np.abs(after - answer).mean() < 0.5 * np.abs(before - answer).mean())


def _finite(x: Array) -> Array:
    """With 0 in the place of what is not a number."""
    return np.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


def _parallel(x: Array, y: Array) -> bool:
    """Whether vectors (…, d) point the same way."""
    lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return bool(((x * y).sum(axis=-1) > 0.995 * lengths)[lengths > 0].all())
