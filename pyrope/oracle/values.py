"""What becomes of the values before and after they are weighed: o = Σ w·v of the values given, or of what else.

Values of one key alone, values that are codes of their head and row, and values of many sizes show whether they are
turned, of another head, or rounded, clipped, or otherwise not themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np

from .. import definition
from ..backend import Array
from ..theta import Rope
from . import ways
from .measured import Ask, read
from .report import Finding
from .responses import Function, Response, examples, response
from .steps import EXACT, Allowed, Call, Spec, weigh

Change: TypeAlias = Callable[[Array, Call], Array]  # of the values of a call
UNREADABLE = {"batch: mixed", "heads: mixed", "values: not only summed"}  # so that there are no weights
ONES = 4  # features of all values that are 1
CLOSE = {"float64": 1e-6, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}  # relative error of what is read


class Values:
    """The values of one call; ``weights`` are those that were read, better ones if values are turned."""

    def __init__(self, spec: Spec, ask: Ask, call: Call, weights: Array, offset: Array) -> None:
        self.spec, self.ask, self.call, self.weights, self.offset = spec, ask, call, weights, _finite(offset)
        self.close = CLOSE[spec.dtype.name]
        self.v = self._spread(call.v.astype(np.float64))
        self.summed = True  # whether the answer is W·v
        self.rng = np.random.default_rng(12)

    def _spread(self, x: Array) -> Array:
        return definition.repeat_heads(x, self.call.q.shape[1])

    def _asked(self, v: Array) -> Array:
        out = self.ask(replace(self.call, v=v.astype(self.call.v.dtype)))
        return _finite(out[:, :, self.call.judged] - self.offset)

    def found(self, answer: Array, allowed: Allowed) -> list[Finding]:
        """Whether something is added to the output, and whether values are turned or those of other heads."""
        listed = list(self._added())
        self.summed = self._explains(self.weights @ self.v, answer, allowed)
        if self.summed or not np.isfinite(answer).any():
            return listed
        if turned := next(self._turned(), None):
            words, undo = turned
            own = self.ask
            self.ask = lambda call: own(replace(call, v=undo(call.v.astype(np.float64), call).astype(call.v.dtype)))
            w = read(self.ask, self.call).weights  # of values that are not exactly unit vectors
            self.weights = np.where(np.abs(w) > 1e-6 * np.abs(w).max(axis=-1, keepdims=True), w, 0)
            self.summed = True
            fact = f"what comes out of the value of one key alone is that value, {words}"
            listed.append(Finding(f"values: {words}", fact))
        listed += self._sources()
        if self.summed or any(x.fault in UNREADABLE for x in listed):
            return listed
        return [*listed, *(self._responses(answer) or self._not_summed())]

    def _not_summed(self) -> list[Finding]:
        once, twice = (self._asked(by * self.call.v.astype(np.float64)).reshape(1, -1) for by in (1, 2))
        if _parallel(once, twice):
            return []
        return [Finding("values: not only summed", "twice the values do not give twice the output")]

    def _explains(self, out: Array, answer: Array, allowed: Allowed) -> bool:
        off = np.abs(out + self.offset - answer)
        return bool((off <= 3 * allowed.worst + self.close * np.abs(answer).max(axis=-1, keepdims=True)).all())

    def _added(self) -> Iterator[Finding]:
        size = float(np.abs(self.offset).max(initial=0))
        if size > 10 * self.close:
            q = self.call.q[:, :, self.call.judged]
            same = (np.abs(self.offset - q) < 0.01 * np.abs(q) + self.close).mean() > 0.98
            flat = np.ptp(self.offset) < 0.01 * size
            number = f"{self.offset.flat[0]:.4g}" if flat else "something"
            how = "the queries are added" if same else f"{number} is added"
            yield Finding(f"output: {how}", f"for values of 0 it returns up to {size:.4g}")

    # ── Values that are turned, or features in another order ──

    def _turned(self) -> Iterator[tuple[str, Change]]:
        """What turns the value of one key as it is turned, in words, and what undoes it."""
        m, x = self.call.k.shape[2], np.zeros(self.call.v.shape)
        keys = sorted({0, 1 % m, m // 2, m - 1})
        x[:, :, keys] = self.rng.standard_normal(x.shape[-1])
        out = np.stack([self._alone(x, j) for j in keys], axis=1)
        for words, turn, undo in self._turns():
            if _parallel(turn(x, self.call)[:, 0, keys], out):
                if words:
                    yield words, undo
                return

    def _alone(self, x: Array, j: int) -> Array:
        """What comes out of the value of key j alone, (b, d): in the query that weighs it most."""
        v = np.zeros_like(x)
        v[:, :, j] = x[:, :, j]
        return np.stack([row[np.abs(row).max(axis=-1).argmax()] for row in self._asked(v)[:, 0]])

    def _turns(self) -> Iterator[tuple[str, Change, Change]]:
        yield "", _unchanged, _unchanged
        if self.spec.rope is not None:
            there, back = (
                partial(_rotated, rope=rope)
                for rope in (self.spec.rope.rotation_only, self.spec.rope.rotation_only.transposed)
            )
            yield "rotated", there, back
            yield "rotated backwards", back, there
        for words, (change, undo) in ways.VALUES.items():
            yield words, partial(_changed, by=change), partial(_changed, by=undo)

    # ── Values of other heads and rows ──

    def _sources(self) -> Iterator[Finding]:
        """Whose values each head and row reads: values are codes, the same in all tokens and features."""
        (b, g), h = self.call.v.shape[:2], self.call.q.shape[1]
        codes = np.arange(b * g).reshape(b, g, 1, 1)
        index, mirrored = (self._decoded(x) for x in (codes, codes[::-1, ::-1]))
        if index is None or mirrored is None or (index != b * g - 1 - mirrored).any():
            yield from self._leaks()
            return
        rows, heads = index // g, index % g
        self.summed = bool((rows != np.arange(b)[:, None]).any() or (heads != np.arange(h) * g // h).any())
        if (rows != np.arange(b)[:, None]).any():
            how = next((words for words, row in ways.row_maps(b) if (rows == row[:, None]).all()), "of other rows")
            yield Finding(f"batch: values {how}", f"rows 0, 1, … read the values of rows {_listed(rows[:, 0])}")
        if (heads != np.arange(h) * g // h).any():
            maps = ((words, i * g // h) for words, i in ways.head_maps(h, g))
            how = next((words for words, i in maps if (heads == i).all()), "of other heads")
            yield Finding(
                f"heads: values {how}", f"query heads 0, 1, … read the values of key heads {_listed(heads[0])}"
            )

    def _leaks(self) -> Iterator[Finding]:
        """Whether values of row 0, or of key head 0, alone reach other rows, or other heads."""
        h, g, size = self.call.q.shape[1], self.call.v.shape[1], np.abs(self.v).max()
        one_row, one_head = np.zeros(self.call.v.shape), np.zeros(self.call.v.shape)
        one_row[:1], one_head[:, :1] = self.call.v[:1], self.call.v[:, :1]
        once, twice = self._asked(one_row), self._asked(2 * one_row)
        if not _parallel(once.reshape(1, -1), twice.reshape(1, -1)):
            return  # no sum
        rows = np.abs(once).max(axis=(1, 2, 3))
        heads = np.abs(self._asked(one_head)).max(axis=(0, 2, 3))
        rows[0], heads[: h // g] = 0, 0
        for step, leak in (("batch", rows), ("heads", heads)):
            if leak.max(initial=0) > 100 * self.close * size:
                what = "row" if step == "batch" else "head"
                words = (
                    f"values of {what} 0 alone make up to {leak.max():.3g} in {what}s {_listed(np.flatnonzero(leak))}"
                )
                yield Finding(f"{step}: mixed", words)

    def _decoded(self, codes: Array) -> Array | None:
        """The code that each head and row returns, (b, h), if it is one of those given, in all tokens and features."""
        out, sums = (
            self._asked(np.broadcast_to(codes + 1.0, self.call.v.shape)),
            self.weights.sum(axis=-1, keepdims=True),
        )
        sure = np.abs(sums) > 0.3 * np.abs(self.weights).sum(axis=-1, keepdims=True)
        whose = np.where(sure, out / sums - 1, np.nan)
        typical = np.nan_to_num(np.rint(np.nanmedian(whose, axis=(2, 3))), nan=-1.0).astype(int)
        near = np.abs(whose - typical[:, :, None, None]) < 0.2
        known = near[np.isfinite(whose)].mean() > 0.98 and (typical >= 0).all() and (typical < codes.size).all()
        return typical if known else None

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


def _unchanged(x: Array, call: Call) -> Array:
    return x


def _rotated(x: Array, call: Call, rope: Rope) -> Array:
    return EXACT.turned(x, call.at()[1], rope)


def _changed(x: Array, call: Call, by: Function) -> Array:
    return by(x)


def _parallel(x: Array, y: Array) -> bool:
    """Whether vectors (…, d) point the same way."""
    lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return bool(((x * y).sum(axis=-1) > 0.995 * lengths)[lengths > 0].all())


def _listed(numbers: Array) -> str:
    return ", ".join(map(str, numbers[:8]))
