"""What is wrong with gradients of attention: dq, dk and dv, each measured as a sum of the terms of the chain rule.

dq and dk have two terms (`steps.Backward`), and least squares say how much of each there is: 1 and 0 if the row term D
is missing, 8 and 8 if the scale is. Terms are made as they should be, and with one step done in another way. What no
multiples of terms explain is read pair by pair: the gradient of each score. dv shows the weights, which are taken apart
as those of a forward pass.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from .. import definition
from ..backend import Array
from ..theta import frequencies
from .candidate import Unreadable
from .measured import Measured, digits, elsewhere, masks, read, rows_where, where
from .positions import acts_at
from .report import Finding, side_by_side
from .responses import depends, examples, response
from .steps import EXACT, RIGHT, SLOPES, Allowed, Backward, Call, How, Spec, cap_slope, same, weigh
from .turning import other_positions
from .values import NEAR, sources
from .weights import CLOSE, apart

Ask: TypeAlias = Callable[[Call], list[Array]]
Fault: TypeAlias = tuple[str, str]  # and the fact
TENSORS = ("dq", "dk", "dv")
LOOSE = 1e-4  # of the largest number of a tensor, at least
RULE = "chain rule:"
ANOTHER = f"{RULE} another ds"
GATHERED: dict[str, Any] = {
    "shared key heads: the first query head alone": lambda x: x[:, :, 0],
    "shared key heads: the last query head alone": lambda x: x[:, :, -1],
    "heads: tiled": lambda x: x.reshape(len(x), -1, x.shape[1], *x.shape[3:]).sum(axis=1),
}


# ── The chain rule in other ways ─────────────────────────────────────────────────────────────────────────────────────


def ways(made: Backward, tensor: int, answer: Array, row: Array) -> Iterator[tuple[str, str, How]]:
    """How a tensor may be made, and what is then wrong: nothing, or one step, and how that is known; ``row`` is D as dq
    shows it."""
    yield "", "", RIGHT
    yield from _turned(made, tensor, answer)
    if tensor and made.call.square:
        yield f"{RULE} not transposed", "", How(left=same)
    if tensor and made.call.k.shape[1] < made.call.q.shape[1]:
        yield from ((fault, "", How(gather=gather)) for fault, gather in GATHERED.items())
    if tensor < 2:
        moved = elsewhere(-made.both[-1], row, 10 * LOOSE * float(np.abs(row).max()))
        yield f"{RULE} another {_term(made.spec)}", moved, How(row=row)


def _term(spec: Spec) -> str:
    return "row term" if spec.feature_map is None else "denominator's derivative"


def _turned(made: Backward, tensor: int, answer: Array) -> Iterator[tuple[str, str, How]]:
    """How gradients are turned back, (b, h, n, d), as the pairs of each token show it."""
    spec, rope, at = made.spec, made.spec.turns, made.at
    if spec.rope is None or rope is None:
        return
    back = partial(EXACT.turned, at=at, rope=(spec.rope if tensor == 2 else rope).transposed)
    if tensor == 2:
        yield f"{RULE} gradients of values rotated", "", How(back=back)
        return
    first, rest = made.terms(tensor, How(back=same))
    slope = np.ones(1)
    if spec.feature_map is None:
        first, rest = first + rest, np.zeros(1)
    else:
        yield f"{RULE} denominator's derivative rotated", "", How(plain=back)
        slope = SLOPES[spec.feature_map](made.call.k if tensor else made.call.q)
    reads, writes = definition.pairs(rope.layout, rope.width, rope.start)
    due, got = (x[..., reads[0]] + 1j * x[..., reads[1]] for x in (first / slope, (answer - rest) / slope))
    sums = (got * due.conj()).sum(axis=1)  # over the heads, (b, n, p)
    if np.abs(sums).sum() > 0.99 * np.abs(got * due).sum():  # or it is no rotation
        turn = rope.attention_factor * np.exp(1j * np.angle(sums))
        turned = partial(definition.rotate, cos=turn.real[:, None], sin=turn.imag[:, None], reads=reads, writes=writes)
        told = np.abs(sums).sum(axis=-1) > 1e-4 * np.abs(sums).sum(axis=-1).max()
        yield *_positions(made, np.where(told[..., None], turn.conj(), np.nan)), How(back=turned)


def _positions(made: Backward, turn: Array) -> tuple[str, str]:
    """Which mistake makes gradients turn back so, (b, n, p), NaN where it is not known: the positions that they act at,
    in words."""
    rope, p = made.spec.turns, np.broadcast_to(made.at[:, 0], turn.shape[:2])
    assert rope is not None
    theta = rope.direction * frequencies(rope)
    known, most = np.isfinite(turn).all(axis=-1), 2 * float(np.abs(p).max()) + 10
    acts = np.full(p.shape, np.nan)
    acts[known] = acts_at(turn[known], theta, most)[0]
    listed = [("not rotated back", 0 * p), ("rotated forwards, not back", -p)]
    words = next((words for words, x in listed if np.nanmax(np.abs(acts - x)) < 0.2), "")
    if words:
        return f"{RULE} gradients {words}", ""
    others = other_positions(replace(made.call, positions=p), p.astype(np.float64), [acts])
    words = next((f"as at {words}" for _, words, x in others if np.nanmax(np.abs(acts - x)) < 0.2), "")
    return f"{RULE} gradients rotated back by other angles", words


# ── What is wrong ────────────────────────────────────────────────────────────────────────────────────────────────────


def diagnose(spec: Spec, ask: Ask, call: Call, answers: Sequence[Array], limits: Sequence[Allowed]) -> list[Finding]:
    """What is wrong with the gradients of a call, causes before consequences; may raise `Unreadable`."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rows of NaN alone have no median
        return Gradients(spec, ask, call, answers, limits).found()


class Gradients:
    """Three gradients of one call, and what they should be."""

    def __init__(self, spec: Spec, ask: Ask, call: Call, answers: Sequence[Array], limits: Sequence[Allowed]) -> None:
        self.spec, self.ask, self.call, self.answers, self.limits = spec, ask, call, answers, limits
        self.near, self.loose = NEAR[spec.dtype.name], max(NEAR[spec.dtype.name], LOOSE)
        self.wrong = [i for i in range(3) if limits[i].ratio(answers[i]) > 1]

    def found(self) -> list[Finding]:
        wrong = self.wrong
        if lost := [i for i in wrong if not np.isfinite(self.answers[i]).all()]:
            names = ", ".join(TENSORS[i] for i in lost)
            return [Finding("gradients: not finite", f"NaN or infinity in {names}{self._where(lost[0])}")]
        made = Backward(self.spec, self.call)
        row = self._row_term(made)
        explained = {i: self._itself(i) or self._terms(made, i, row) or self._summed(i) for i in wrong}
        if 2 in wrong and not explained[2] and (found := self._by_weights()):
            told = {x.fault for x in found}
            own = ((*x, i) for i in wrong if i < 2 for x in explained[i] if x[0] not in {*told, ANOTHER})
            return [*found, *_merged(own)]  # what is explained by the right weights is no consequence of others
        if not all(explained.values()) and (damaged := self._incoming()):
            return [damaged]
        return _merged((*x, i) for i in wrong for x in explained[i] or self._noise(i))

    def _where(self, i: int) -> str:
        words = rows_where(self.limits[i], self.answers[i], "token", np.arange(self.answers[i].shape[2]))
        return f", {words}" if words else ""

    def _itself(self, i: int) -> list[Fault]:
        """What becomes of the gradient itself, if that is a known function."""
        truth, answer = self.limits[i].truth, self.answers[i]
        if np.abs(answer).max() <= 1e-9 * np.abs(truth).max():
            return [("gradients: zero", "zero everywhere")]
        for name, limit in zip(TENSORS, self.limits, strict=True):
            if limit.truth.shape == answer.shape and limit.ratio(answer) <= 1:
                return [("gradients: exchanged", f"it is the right {name}")]
        if words := elsewhere(truth, answer, 2 * self.limits[i].worst.max()):
            return [("gradients: in other places", words)]
        size, each = np.abs(truth), (-1, 1, truth.shape[-1])
        # The errors of small numbers are larger.
        for small in (size <= 1e-3 * size.max(), size < self.limits[i].worst / (6 * self.near)):
            known = np.where(small, np.nan, answer)
            found = response(truth.reshape(each), known.reshape(each), self.near)
            if found.function is not None:
                return [(f"gradients: {found.words}", examples(truth, answer))]
        return []

    def _row_term(self, made: Backward) -> Array:
        """D as dq shows it, by least squares over the features of each query."""
        (first, second), due = made.terms(0), -made.both[-1]
        squares = np.square(second).sum(axis=-1, keepdims=True)
        share = ((self.answers[0] - first) * second).sum(axis=-1, keepdims=True) / squares
        return np.where(squares > 0, share, 1) * due  # a query that sees nothing shows nothing

    def _terms(self, made: Backward, i: int, row: Array) -> list[Fault]:
        """The faults and facts of one tensor, if some multiples of its terms, made in some way, are its numbers."""
        answer = self.answers[i]
        for fault, known, how in ways(made, i, answer, row):
            terms = made.terms(i, how)
            products = np.array([[(x * y).sum() for y in (*terms, answer)] for x in terms])
            much = np.linalg.pinv(products[:, :-1], rcond=1e-9, hermitian=True) @ products[:, -1]
            sums = sum(a * x for a, x in zip(much, terms, strict=True))
            off, size = np.abs(sums - answer).max(), np.abs(sums).max()
            if off <= 4 * self.limits[i].worst.max() + self.loose * size and size > 0:
                fact = f"all {answer.size} numbers are what this mistake makes, within {off:.1g}"
                return [*([(fault, known or fact)] if fault else []), *self._multiples(much, i)]
        return []

    def _summed(self, i: int) -> list[Fault]:
        """What dq, or dk, is the sum of: the gradients of the scores, or of the numerators, by least squares."""
        short = self._short(i) if i < 2 else None
        if short is None:
            return []
        call, answer = short
        made = Backward(self.spec, call)
        (_, at, turned, _), rope, own = made.sides[i], self.spec.turns, call.k if i else call.q
        if self.spec.feature_map is not None:
            (first, second), slope = made.terms(i), SLOPES[self.spec.feature_map](own)
            if self._near(answer * slope, first + second):
                return [(f"{RULE} feature map's derivative missing", "they are what is due once multiplied with φ′")]
            if not slope.all():
                return []
            some = np.abs(due := first + second) > 0.05 * np.abs(due).max()
            x, right, ratio = own[some], slope[some], (answer / due * slope)[some]
            if depends(x, ratio / right) and not self._near(right, ratio):
                return [(f"{RULE} feature map's derivative another function", f"of x, φ′ {examples(x, ratio)}")]
            answer = (answer - second) / slope
        answer = answer if rope is None else EXACT.turned(answer, at, rope) / rope.attention_factor**2
        other = turned.reshape(*answer.shape[:2], -1, own.shape[-1])  # of dk, those of all query heads of a group
        got = answer @ np.linalg.pinv(other)
        if np.abs(got @ other - answer).max() > 20 * self.loose * np.abs(answer).max():
            return []
        if i:
            got = np.moveaxis(got.reshape(*got.shape[:3], -1, call.q.shape[2]), 2, -1).reshape(made.parts.weights.shape)
        return self._pairs(made, got / self.spec.scale if self.spec.feature_map is None else got)

    def _short(self, i: int) -> tuple[Call, Array] | None:
        """The call, or its first tokens, and what it returns: no more tokens than what its features tell apart."""
        call, most = self.call, self.call.q.shape[-1] // 2
        most //= call.q.shape[1] // call.k.shape[1] if i else 1
        if max(call.q.shape[2], call.k.shape[2]) <= most:
            return call, self.answers[i]
        if not call.square:
            return None
        few = {name: getattr(call, name)[:, :, :most] for name in ("q", "k", "v", "g")}
        at = None if call.positions is None else call.positions[:, :most]
        shapes = {"mask": np.s_[..., :most, :most], "segments": np.s_[:, :most]}
        call = replace(call, positions=at, options={x: y[shapes[x]] for x, y in call.options.items()}, **few)
        return call, self.ask(call)[i]

    def _pairs(self, made: Backward, got: Array) -> list[Fault]:
        """What is wrong with the gradients of pairs of a query and a key, (b, h, n, m)."""
        parts, softmax = made.parts, self.spec.feature_map is None
        weights, inner, slope = 1 / parts.total, made.both[0], np.ones(1)  # as if every key were seen
        if softmax:
            top = np.where(parts.seen, parts.scores, -np.inf).max(axis=-1, keepdims=True)
            weights, inner = np.exp(parts.scores - top) / parts.total, sum(made.both)
            slope = cap_slope(parts.scores, self.spec.softcap)
        full, visible = weights * inner * slope, np.broadcast_to(parts.seen, got.shape)
        room = 20 * self.loose * float(np.abs(np.where(visible, full, 0)).max())
        wrong = np.abs(got - np.where(visible, full, 0)) > room
        extra, missing = wrong & ~visible, wrong & visible & (np.abs(got) < room)
        if not (wrong & visible & ~missing).any():
            return self._hidden(made.call, extra, missing, np.abs(full) > 3 * room) if wrong.any() else []
        large = visible & (np.abs(full) > 3 * room)
        if not softmax or np.square(got - full)[large].mean() < 1e-3 * np.square(full)[large].mean():
            return []  # of a rounding, for all that is known
        factors = {"softcap's derivative": weights * inner, "factor w of ds": inner * slope}
        near = (f"{RULE} {name} missing" for name, x in factors.items() if self._near(got, np.where(visible, x, 0)))
        low, high = np.quantile((got / full)[large], (0.05, 0.95))
        words = f"most gradients of scores are {low:.3g} to {high:.3g} times what they should be"
        return [(next(near, ANOTHER), words)]

    def _hidden(self, call: Call, extra: Array, missing: Array, large: Array) -> list[Fault]:
        """Which pairs are in the sums, where others should be; those told are ``large``."""
        visible = np.broadcast_to(weigh(self.spec, call).seen, extra.shape)
        sees = visible & ~missing | extra
        named = next((name for name, mask in masks(self.spec, call) if (mask == sees)[large].all()), "")
        both = (missing, "missing", large & visible), (extra, "too many", ~visible)
        words = [f"{int(x.sum())} {how}{where(call, x, some)}" for x, how, some in both if x.any()]
        how = f"{RULE} pairs missing" if missing.any() else f"{RULE} hidden keys are summed"
        return [(named or how, f"of the {extra.size} pairs of a query and a key in its sums, {' and '.join(words)}")]

    def _near(self, x: Array, y: Array) -> bool:
        """Whether nearly all y are x."""
        return bool((np.abs(y - x) <= 50 * self.loose * (np.abs(x) + 0.1 * np.abs(x).max())).mean() > 0.985)

    def _multiples(self, much: Array, i: int) -> Iterator[Fault]:
        """What the multiples of the terms are called: both the same, or the second another one."""
        first, second, close = much[0], much[-1] / much[0], 5 * self.loose
        if abs(first - 1) > close:
            yield self._factor(float(first), i), f"{side_by_side(float(first), 1.0, digits=4)[0]} times what is due"
        if abs(second - 1) > close:
            how = "missing" if abs(second) <= close else f"times {second:.4g}"
            words = f"the {_term(self.spec)} is in it {round(second, 4) + 0.0:g} times, expected once"
            yield f"{RULE} {_term(self.spec)} {how}", words

    def _factor(self, factor: float, i: int) -> str:
        named, scale = {-1.0: "gradients: negated"}, self.spec.scale
        if self.spec.feature_map is None and i < 2:
            named |= {1 / scale: "chain rule: scale missing", scale: "chain rule: scale applied twice"}
        if i and 0 not in self.wrong:
            named[self.call.k.shape[1] / self.call.q.shape[1]] = "shared key heads: the mean, not the sum"
        near = (words for x, words in named.items() if abs(factor / x - 1) < 20 * self.loose)
        return next(near, f"gradients: times {factor:.4g}")

    def _by_weights(self) -> list[Finding]:
        """Rows of the batch that reach the dv of others, or the weights that dv shows, taken apart as those of a
        forward pass."""
        if mixed := sources(lambda call: self.ask(call)[2], self.call, 10 * self.loose, axes=(0,))[0]:
            return mixed
        weights, _ = read(self._forward, self.call)
        sums = weights.swapaxes(-1, -2) @ np.asarray(self.call.g, np.float64)
        sums = sums.reshape(*self.call.k.shape[:2], -1, *sums.shape[2:]).sum(axis=2)
        if np.abs(sums - self.answers[2]).max() > 20 * self.loose * np.abs(sums).max():
            return []
        found = apart(Measured(self.spec, self._forward, self.call, weights, CLOSE[self.spec.dtype.name][0], self.call))
        return [replace(x, fact=f"in the weights that dv shows: {x.fact}") for x in found]

    def _incoming(self) -> Finding | None:
        """What becomes of g, (b, g, 1, d): that of the last query, of one head of each group, all others 0, is in dv,
        times a weight."""
        step, g = self.call.q.shape[1] // self.call.k.shape[1], np.zeros_like(self.call.q)
        g[:, ::step, -1] = np.random.default_rng(3).standard_normal(g[:, ::step, -1].shape) * 3
        try:
            dv, w = self.ask(replace(self.call, g=g))[2], weigh(self.spec, self.call).weights[:, ::step, -1]
        except Unreadable:  # it may be recorded calls
            return None
        best = np.abs(w).argmax(axis=-1)[..., None]
        y = np.take_along_axis(dv, best[..., None], axis=2) / np.take_along_axis(w, best, axis=-1)[..., None]
        x = g[:, ::step, ::-1].astype(np.float64)
        found = response(x, y, self.near)
        lost = found.function is None or found.words == "zeros"
        return None if lost else Finding(f"gradients: g {found.words}", f"of g, {examples(x[..., :1, :], y)}")

    def _forward(self, call: Call) -> Array:
        """What a forward pass with these weights returns for values that are unit vectors, or zeros: by unit vectors
        for g, of one query head of each group at a time, dv = Wᵀ·g."""
        (b, h, n, d), step = call.q.shape, call.q.shape[1] // call.k.shape[1]
        keys, columns = np.nonzero(call.v[0, 0])
        out = np.zeros((b, h, n, d))
        for head, start in itertools.product(range(step if keys.size else 0), range(0, n, d)):
            g, count = np.zeros_like(call.q), min(d, n - start)
            g[:, head::step, range(start, start + count), range(count)] = 1
            dv = self.ask(replace(call, g=g))[2][:, :, keys, :count]
            out[:, head::step, start : start + count, columns] = dv.swapaxes(-1, -2)
        return out

    def _noise(self, i: int) -> list[Fault]:
        """What is left: how far off it is, and whether its errors are as a coarser dtype's."""
        truth, answer = self.limits[i].truth, self.answers[i]
        error = answer - truth
        off = float(np.sqrt(np.square(error).mean() / np.square(truth).mean()))
        even = np.median(np.abs(error)) > 0.1 * np.sqrt(np.square(error).mean())  # large errors of some are no rounding
        patterns = truth, np.ones_like(truth), np.asarray((self.call.q, self.call.k, self.call.v)[i], np.float64)
        alike = [abs((error * x).sum()) / np.sqrt(np.square(error).sum() * np.square(x).sum()) for x in patterns]
        if even and max(alike) < 0.2 and (few := digits(off, self.spec)):
            return [(few.fault, few.fact)]
        if alike[1] > 0.99:
            return [("gradients: something is added", f"{error.mean():.3g} is added to each number")]
        size = f"up to {np.abs(error).max():.3g}, where the numbers are up to {np.abs(truth).max():.3g}"
        return [(f"unexplained: {TENSORS[i]}", f"off by {size}{self._where(i)}")]


def _merged(found: Iterable[tuple[str, str, int]]) -> list[Finding]:
    """Each fault once, with the tensors that have it."""
    by: dict[str, list[tuple[str, str]]] = {}
    for fault, fact, i in found:
        by.setdefault(fault, []).append((fact, TENSORS[i]))
    likewise = {fault: "".join(f"; {tensor} likewise" for _, tensor in some[1:]) for fault, some in by.items()}
    return [Finding(fault, f"{some[0][1]}: {some[0][0]}{likewise[fault]}") for fault, some in by.items()]
