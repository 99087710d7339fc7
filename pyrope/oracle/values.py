"""What becomes of the values before and after they are weighed, and whose queries, keys and values each head reads.

o = Σ w·v of the values given, or of what else: an argument of one row, or of one head, that is negated shows whom it
reaches, and values of many sizes show whether they are rounded, clipped, or otherwise not themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import definition
from ..backend import Array
from .measured import FEW, Ask, runs
from .report import Finding
from .responses import Response, examples, response
from .steps import Allowed, Call, Spec, weigh

ONES = 4  # features of all values that are 1
NEAR = {"float64": 1e-6, "float32": 3e-5, "float16": 4e-3, "bfloat16": 3e-2}  # relative error of what is read
MOST = 64  # rows, or heads, whose readers are looked for
NOT_SUMMED = "values: not only summed"
ROTATED, REORDERED = "values: rotated", "values: features in another order"
NAMES = {"v": "values", "k": "keys", "q": "queries"}
AXES = ("row", "batch"), ("head", "heads")  # of an array, and the step that may mix them


# ── Rows and heads ───────────────────────────────────────────────────────────────────────────────────────────────────


def sources(ask: Ask, call: Call, close: float, axes: Sequence[int] = (1, 0)) -> tuple[list[Finding], Call]:
    """Who reads the queries, keys and values of others, and a call in which each head has what it reads."""
    found, moved, base = list[Finding](), call, np.nan_to_num(ask(call))
    for axis, (what, step) in ((axis, AXES[axis]) for axis in axes):
        others = dict[str, Array]()
        for name in NAMES:
            x = getattr(call, name)
            reached = _reached(ask, call, base, name, axis) > close * np.abs(base).max()
            if not reached.any(axis=0).all():
                continue
            if (several := reached.sum(axis=0)).max() > 1:
                some = np.flatnonzero(reached.reshape(len(reached), -1)[:, several.argmax()])
                words = f"one {what} reads the {NAMES[name]} of {what}s {', '.join(map(str, some))}"
                return [Finding(f"{step}: {'keys ' * (name == 'k')}mixed", words)], call
            first = reached.argmax(axis=0)
            due = np.arange(len(x))[:, None] if axis == 0 else np.arange(first.shape[1]) * x.shape[1] // first.shape[1]
            if (first != due).any():
                others[name] = first
        if others:
            found.append(_misread(others, what, step))
            moved = replace(moved, **{name: _taken(getattr(moved, name), x, axis) for name, x in others.items()})
    return found, moved


def _reached(ask: Ask, call: Call, base: Array, name: str, axis: int) -> Array:
    """By how much each row, or head, of an argument that is negated changes the results of the heads, (count, b, h)."""
    given = getattr(call, name)
    off = np.zeros((given.shape[axis], *base.shape[:2]))
    for i in range(len(off) if len(off) <= MOST else 0):
        x = given.copy()
        np.moveaxis(x, axis, 0)[i] *= -1
        off[i] = np.abs(np.nan_to_num(ask(replace(call, **{name: x}))) - base).max(axis=(2, 3))
    return off


def _taken(x: Array, whose: Array, axis: int) -> Array:
    """x as each of the (b, h) heads reads it."""
    b, h = whose.shape
    x = x if x.shape[1] == h or axis == 1 else definition.repeat_heads(x, h)
    return x[whose, np.arange(h)] if axis == 0 else x[np.arange(b)[:, None], whose]


def _misread(others: dict[str, Array], what: str, step: str) -> Finding:
    """The queries, keys or values of others."""
    first = next(iter(others.values()))
    numbers = first[:, 0] if what == "row" else first[-1]
    listed, own, count = ", ".join(map(str, numbers[:8])), np.arange(len(numbers)), int(first.max()) + 1
    known = {f"{what} 0 for all": 0 * own, "tiled": own % count, "reversed": own[::-1]}
    how = next((words for words, x in known.items() if (numbers == x).all()), f"of other {what}s")
    whose = " and ".join(NAMES[name] for name in others)
    which = "" if whose == "values and keys" else f"{whose} "
    return Finding(f"{step}: {which}{how}", f"{what}s 0, 1, … read the {whose} of {what}s {listed}")


def uneven(ask: Ask, call: Call) -> list[Finding]:
    """Features of the output that are not made as most are: with values that are alike in all tokens, each feature is
    its own number times the sum of the weights."""
    d = call.v.shape[3]
    levels = 1 + np.random.default_rng(12).permutation(d) / d
    out = _finite(ask(replace(call, v=np.broadcast_to(levels, call.v.shape).astype(call.v.dtype))))[:, :, call.judged]
    sums = np.median(out / levels, axis=-1, keepdims=True)
    told = np.abs(sums[..., 0]) > 0.1 * np.abs(sums).max(initial=1e-300)
    each = out[told] / sums[told]
    odd = (np.abs(each - levels) > 0.4 / d + 0.01).any(axis=0)
    if not (told.any() and 0 < odd.sum() <= d / 4):
        return []
    some = np.median(each[:, odd], axis=0)
    if np.abs(np.sort(some) - np.sort(levels[odd])).max() < 0.4 / d:
        return [Finding(REORDERED, f"features {runs(odd)} of the values come out in one another's places")]
    words = " to ".join(dict.fromkeys(f"{x:.3g}" for x in np.quantile(some / levels[odd], (0, 1))))
    fact = f"features {runs(odd)} of the output are {words} times what they should be, beside the others"
    return [Finding("output: some features wrong", fact)]


# ── Values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Values:
    """The values of one call, of which each head reads those of ``due``; ``weights`` are those that were read."""

    def __init__(self, spec: Spec, ask: Ask, call: Call, weights: Array, offset: Array) -> None:
        self.spec, self.ask, self.call, self.weights, self.offset = spec, ask, call, weights, _finite(offset)
        self.close, self.rng = NEAR[spec.dtype.name], np.random.default_rng(12)

    def _spread(self, v: Array) -> Array:
        """The values that each head weighs."""
        return definition.repeat_heads(v.astype(np.float64), self.call.q.shape[1])

    def _asked(self, v: Array) -> Array:
        out = self.ask(replace(self.call, v=v.astype(self.call.v.dtype)))
        return _finite(out[:, :, self.call.judged] - self.offset)

    def summed(self, due: Call, answer: Array, allowed: Allowed) -> bool:
        """Whether the answer is the sum of the values that are read, times their weights."""
        room = 3 * allowed.worst + self.close * np.abs(answer).max(axis=-1, keepdims=True)
        out = self.weights @ self._spread(due.v) + self.offset
        return bool((np.abs(out - answer) <= room).all())

    def moved(self) -> Finding | None:
        """Values of which a feature comes out elsewhere, or in two, as those of a pair that is rotated."""
        v, feature = np.zeros_like(self.call.v), min(1 + getattr(self.spec.rope, "start", 0), self.call.v.shape[3] - 1)
        v[..., feature] = 1
        out = np.abs(self._asked(v)).max(axis=(0, 1, 2))
        reached = np.flatnonzero(out > 10 * self.close * out.max())
        if reached.tolist() in ([], [feature]):
            return None
        words = f"feature {feature} of the values comes out in features {', '.join(map(str, reached[:8]))}"
        turned = reached.size == 2 and self.spec.rope is not None
        return Finding(ROTATED if turned else REORDERED, words)

    def added(self) -> Iterator[Finding]:
        size = float(np.abs(self.offset).max(initial=0))
        if size > 10 * self.close:
            number = f"{self.offset.flat[0]:.4g}" if np.ptp(self.offset) < 0.01 * size else "something"
            yield Finding(f"output: {number} is added", f"for values of 0 it returns up to {size:.4g}")

    def changed(self, answer: Array) -> list[Finding]:
        """What comes out of values of many sizes; weights, read by values of 1, are divided by what becomes of 1."""
        read = [self._alike(sizes) for sizes in (False, True)]
        found = [response(v, y, self.close, scaled=not sure) for v, y, sure in read]
        best = next((i for i, x in enumerate(found) if x.function is not None), 0 if found[0].words else 1)
        (v, y, sure), told = read[best], found[best]
        one = y[..., :ONES] if told.function is None else told.function(np.ones((1, 1, 1, 1)))
        if not told.words or np.ptp(one) > 10 * self.close * np.abs(one).max():  # it depends on more than on the value
            once, twice = (self._asked(by * self.call.v.astype(np.float64)) for by in (1, 2))
            if (once * twice).sum() > 0.995 * np.linalg.norm(once) * np.linalg.norm(twice):
                return []
            return [Finding(NOT_SUMMED, "twice the values do not give twice the output")]
        self.weights = self.weights / one.flat[0] if one.flat[0] and sure else self.weights
        off = float(np.sqrt(np.nanmedian(np.square(y / np.where(v == 0, np.nan, v) - 1))))
        if told.function is None and off < 0.02:
            return [Finding(FEW, f"they are off by {off:.2g} of their size: of values, {examples(v, y)}")]
        step = "output" if self._after(told, answer) else "values"
        words = told.words.replace("each vector", "each vector or head")  # whose tokens all had the same value
        return [Finding(f"{step}: {words}", f"of values, {examples(v, y)}")]

    def _alike(self, sizes: bool) -> tuple[Array, Array, bool]:
        """A value (b, g, 1, d) that all tokens have, what comes out of it, and whether that is for sure: where
        weights should add up to 1. Elsewhere it is divided by their sum."""
        (b, h, _, _), (_, g, _, d) = self.call.q.shape, self.call.v.shape
        v = self.rng.standard_normal((b, g, 1, d)) * (2.0 ** self.rng.uniform(-6, 5, (b, g, 1, d)) if sizes else 1)
        v[..., :ONES] = 1
        v = v.astype(self.call.v.dtype)
        out = self._asked(np.broadcast_to(v, self.call.v.shape))[:, :: h // g]
        sums, due = (x[:, :: h // g].sum(axis=-1, keepdims=True) for x in (self.weights, self._due()))
        row = int(np.abs(due - 1).max(axis=(0, 1, 3)).argmin())
        sums, due = sums[:, :, row : row + 1], due[:, :, row]
        sure = bool(np.abs(due - 1).max() < 1e-3 and np.ptp(sums) < 1e-3 * np.abs(sums).max())
        return v.astype(np.float64), out[:, :, row : row + 1] / (1 if sure else sums), sure

    def _due(self) -> Array:
        return weigh(self.spec, self.call).weights

    def _after(self, found: Response, answer: Array) -> bool:
        """Whether it is the output, rather than each value, that is changed so."""
        if found.function is None:
            return False
        due = self._due()
        w = due if np.abs(due - self.weights).max() < 0.01 else self.weights  # it may be the output that is rounded
        changed = found.function(self.call.v.astype(np.float64))
        before, after = w @ self._spread(changed), found.function(w @ self._spread(self.call.v))
        return bool(np.abs(after - answer).mean() < 0.5 * np.abs(before - answer).mean())


def _finite(x: Any) -> Array:
    """With 0 in the place of what is not a number."""
    return np.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
