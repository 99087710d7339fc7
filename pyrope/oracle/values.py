"""What becomes of the values before and after they are weighed, and whose queries, keys and values each head reads.

o = Σ w·v of the values given, or of what else: an argument of one row, or of one head, that is negated shows whom it
reaches, and values of many sizes show whether they are rounded, clipped, or otherwise not themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from .. import definition
from ..backend import Array
from ..theta import Rope
from .measured import Ask, read
from .report import Finding
from .responses import Response, examples, response
from .steps import Allowed, Call, Spec, weigh

ONES = 4  # features of all values that are 1
NEAR = {"float64": 1e-6, "float32": 3e-5, "float16": 4e-3, "bfloat16": 3e-2}  # relative error of what is read
MOST = 64  # rows, or heads, whose readers are looked for
FEW = "precision: values, or their sums, have few digits"
NOT_SUMMED = "values: not only summed"
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
    known = {
        f"{what} 0 for all": 0 * own,
        "tiled": own % count,
        "reversed": own[::-1],
        "shifted by one": np.roll(own, 1),
    }
    how = next((words for words, x in known.items() if (numbers == x).all()), f"of other {what}s")
    whose = " and ".join(NAMES[name] for name in others)
    which = "" if whose == "values and keys" else f"{whose} "
    return Finding(f"{step}: {which}{how}", f"{what}s 0, 1, … read the {whose} of {what}s {listed}")


# ── Values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def order(ask: Ask, call: Call) -> Array | None:
    """Which feature of the values comes out in each feature, (d,), where they are in another order: all tokens have one
    value, of which no two features are alike."""
    d = call.v.shape[3]
    levels = np.random.default_rng(12).permutation(d)
    out = _finite(ask(replace(call, v=np.broadcast_to(1 + levels / d, call.v.shape).astype(call.v.dtype))))
    out = out[:, :, call.judged].reshape(-1, d)
    sums = out.mean(axis=1, keepdims=True) / (1 + levels / d).mean()
    told = np.abs(sums[:, 0]) > 0.1 * np.abs(sums).max(initial=1e-300)
    found = (out[told] / sums[told] - 1) * d
    whose = np.rint(np.median(found, axis=0)).astype(int) if told.any() else levels
    if (whose == levels).all() or (np.sort(whose) != np.arange(d)).any() or np.abs(found - whose).max() > 0.4:
        return None
    return np.asarray(np.argsort(levels)[whose])


def reordered(order: Array) -> Finding:
    """Of values whose features come out in this order."""
    own = np.arange(len(order))
    known = {
        "reversed": own[::-1],
        "halves exchanged": np.roll(own, len(own) // 2),
        "shifted by one": np.roll(own, 1),
        "shifted back by one": np.roll(own, -1),
        "even ones first": np.r_[own[::2], own[1::2]],
        "halves interleaved": np.argsort(np.r_[own[::2], own[1::2]], kind="stable"),
    }
    how = next((f": {words}" for words, x in known.items() if len(x) == len(own) and (order == x).all()), "")
    listed, off = ", ".join(map(str, order[:8])), int((order != own).sum())
    words = f"features 0, 1, … of the output hold features {listed}, … of the values{how}; {off} of {len(own)} differ"
    return Finding("values: features in another order", words)


class Values:
    """The values of one call, of which each head reads those of ``due``; ``weights`` are those that were read."""

    def __init__(self, spec: Spec, ask: Ask, call: Call, weights: Array, offset: Array) -> None:
        self.spec, self.ask, self.call, self.weights, self.offset = spec, ask, call, weights, _finite(offset)
        self.close, self.rng = NEAR[spec.dtype.name], np.random.default_rng(12)
        self.rotated = False

    def _spread(self, v: Array) -> Array:
        """The values that each head weighs."""
        return definition.repeat_heads(v.astype(np.float64), self.call.q.shape[1])

    def _asked(self, v: Array) -> Array:
        out = self.ask(replace(self.call, v=v.astype(self.call.v.dtype)))
        return _finite(out[:, :, self.call.judged] - self.offset)

    def summed(self, due: Call, answer: Array, allowed: Allowed) -> bool:
        """Whether the answer is the sum of the values that are read, times their weights; of rotated ones it is."""
        room = 3 * allowed.worst + self.close * np.abs(answer).max(axis=-1, keepdims=True)
        out = self.weights @ self._spread(due.v) + self.offset
        return self.rotated or bool((np.abs(out - answer) <= room).all())

    def turned(self) -> Iterator[Finding]:
        """Values that are turned, by whatever angles: weights are then read along what becomes of each value."""
        if self.spec.rope is None:
            return
        v, feature = np.zeros_like(self.call.v), self.spec.rope.start
        v[:, :, -1, feature] = 1
        out = np.abs(self._asked(v)).max(axis=(0, 1, 2))
        reached = np.flatnonzero(out > 10 * self.close * out.max())
        self.rotated = reached.size == 2
        if self.rotated:
            self.ask = partial(_along, self.ask, self.spec.rope, self.spec)
            w, _ = read(self.ask, self.call)
            self.weights = np.where(np.abs(w) > 1e-6 * np.abs(w).max(axis=-1, keepdims=True), w, 0)
            words = f"feature {feature} of the last value comes out in features {reached[0]} and {reached[1]}"
            yield Finding("values: rotated", words)

    def added(self) -> Iterator[Finding]:
        size = float(np.abs(self.offset).max(initial=0))
        if size > 10 * self.close:
            number = f"{self.offset.flat[0]:.4g}" if np.ptp(self.offset) < 0.01 * size else "something"
            yield Finding(f"output: {number} is added", f"for values of 0 it returns up to {size:.4g}")

    def changed(self, answer: Array) -> list[Finding]:
        """What comes out of values of many sizes; weights, read by values of 1, are divided by what becomes of 1."""
        read = [self._first(sizes) for sizes in (False, True)]
        found = [response(v, y, self.close, scaled=not sole) for v, y, sole in read]
        best = next((i for i, x in enumerate(found) if x.function is not None), 0 if found[0].words else 1)
        (v, y, sole), told = read[best], found[best]
        one = y[..., :ONES] if told.function is None else told.function(np.ones((1, 1, 1, 1)))
        if not told.words or np.ptp(one) > 10 * self.close * np.abs(one).max():  # it depends on more than on the value
            once, twice = (self._asked(by * self.call.v.astype(np.float64)) for by in (1, 2))
            if (once * twice).sum() > 0.995 * np.linalg.norm(once) * np.linalg.norm(twice):
                return []
            return [Finding(NOT_SUMMED, "twice the values do not give twice the output")]
        self.weights = self.weights / one.flat[0] if one.flat[0] and sole else self.weights
        off = float(np.sqrt(np.nanmedian(np.square(y / np.where(v == 0, np.nan, v)[..., :1, :] - 1))))
        if told.function is None and off < 0.02:
            return [Finding(FEW, f"they are off by {off:.2g} of their size: of values, {examples(v[..., :1, :], y)}")]
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
        changed = found.function(self.call.v.astype(np.float64))
        before, after = w @ self._spread(changed), found.function(w @ self._spread(self.call.v))
        return bool(np.abs(after - answer).mean() < 0.5 * np.abs(before - answer).mean())


def _along(ask: Ask, rope: Rope, spec: Spec, call: Call) -> Array:
    """What comes out of values of one feature each that are rotated, as if it came out in that feature: (b, h, n, d).
    The two features of a pair are asked for one after the other."""
    keys, features = np.nonzero(call.v[0, 0])
    if not keys.size:
        return ask(call)
    out, due = np.zeros(call.q.shape), weigh(spec, replace(call, judged=np.s_[:])).weights
    other = np.arange(rope.head_dim)
    first, second = (other[x].copy() for x in definition.pairs(rope.layout, rope.width, rope.start)[0])
    other[first], other[second] = second, first
    for mine in (np.isin(features, second), ~np.isin(features, second)):
        key, feature = keys[mine], features[mine]
        y = _finite(ask(replace(call, v=np.where(np.isin(np.arange(rope.head_dim), feature), call.v, 0))))
        y = np.stack((y[..., feature], np.where(other[feature] == feature, 0, y[..., other[feature]])))
        most = np.square(y).sum(axis=0).argmax(axis=2)[:, :, None]
        along = np.take_along_axis(y, most[None], axis=3)
        sign = np.sign(np.take_along_axis(due[..., key], most, axis=2))
        out[..., feature] = sign * (y * along).sum(axis=0) / (np.linalg.norm(along, axis=0) + 1e-300)
    return out


def _finite(x: Any) -> Array:
    """With 0 in the place of what is not a number."""
    return np.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
