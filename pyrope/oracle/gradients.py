"""What is wrong with gradients of attention: dq, dk and dv, each measured as a sum of the terms of the chain rule.

dq and dk have two terms (`steps.Backward`), and least squares say how much of each there is: 1 and 0 if the row term D
is missing, 8 and 8 if the scale is. Terms are made as they should be, and with a step done in another way. dv shows the
weights, which are taken apart as those of a forward pass.
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
from .measured import Measured, coarser, elsewhere, masks, read, rows_where, where
from .report import Finding, side_by_side
from .responses import examples, response
from .steps import EXACT, SLOPES, Allowed, Backward, Call, How, Spec, cap_slope, same, weigh
from .values import NEAR, sources
from .weights import CLOSE, apart

Ask: TypeAlias = Callable[[Call], list[Array]]
Fault: TypeAlias = tuple[str, str]  # and the fact
TENSORS = ("dq", "dk", "dv")
LOOSE = 1e-4  # of the largest number of a tensor, at least
OTHERS = "of others"
RULE = "chain rule:"
GATHERED: dict[str, Any] = {
    "shared key heads: the first query head alone": lambda x: x[:, :, 0],
    "shared key heads: the last query head alone": lambda x: x[:, :, -1],
    "heads: tiled": lambda x: x.reshape(len(x), -1, x.shape[1], *x.shape[3:]).sum(axis=1),
}


# ── The chain rule in other ways ─────────────────────────────────────────────────────────────────────────────────────


def ways(made: Backward, tensor: int, shown: Array | None) -> Iterator[tuple[list[str], How]]:
    """How a tensor may be made, and what is then wrong: in no step, in one, or in two. D may be ``shown`` to be another
    one."""
    steps = _linear_steps(made, tensor) if made.spec.feature_map else {}
    steps["back"], steps["left"] = _turns(made, tensor), {}
    if tensor and made.call.square:
        steps["left"] = {f"{RULE} not transposed": same}
    if tensor < 2:
        rows = {OTHERS: lambda w, dw: shown} if shown is not None else {}
        for words, axis in (("queries", -2), ("rows of the batch", (0, -1)), ("heads", (1, -1))):
            rows[f"summed over the {words}"] = partial(_summed, axis)
        rows["without the weights"] = lambda w, dw: dw.sum(axis=-1, keepdims=True)
        steps["row"] = {f"{RULE} {_term(made.spec)} {how}": row for how, row in rows.items()}
    steps["gather"] = GATHERED if tensor and made.call.k.shape[1] < made.call.q.shape[1] else {}
    for several in (0, 1, 2):
        for names in itertools.combinations(steps, several):
            for each in itertools.product(*(steps[name].items() for name in names)):
                yield [fault for fault, _ in each], How(**{x: y for x, (_, y) in zip(names, each, strict=True)})


def _summed(axes: Any, w: Array, dw: Array) -> Array:
    return np.asarray((w * dw).sum(axis=axes, keepdims=True))


def _term(spec: Spec) -> str:
    return "row term" if spec.feature_map is None else "denominator's derivative"


def _linear_steps(made: Backward, tensor: int) -> dict[str, dict[str, Any]]:
    """Other keys, or queries, that the derivatives are summed over, and what is turned back."""
    if tensor == 2:
        return {"slope": {f"{RULE} not divided by the normaliser": made.parts.total}}
    right, mask = made.parts.seen, f"{RULE} the mask of the {{}}'s derivative transposed"
    other, rope, at = right.swapaxes(-1, -2), made.spec.turns, made.sides[tensor][1]
    steps = {"seen": {mask.format("denominator"): (right, other), mask.format("numerator"): (other, right)}}
    if rope is None:
        return steps
    back = partial(EXACT.turned, at=at, rope=rope.transposed)
    return steps | {"plain": {f"{RULE} the denominator's derivative rotated back, too": back}}


def _turns(made: Backward, tensor: int) -> dict[str, Any]:
    """How gradients are turned back, (b, h, n, d)."""
    if made.spec.rope is None or made.spec.turns is None:
        return {}
    rope, at, name = made.spec.turns, made.at, f"{RULE} gradients"
    back, counted = partial(EXACT.turned, rope=rope.transposed), np.arange(at.shape[-1])
    if tensor == 2:
        return {f"{name} of values rotated": partial(EXACT.turned, at=at, rope=made.spec.rope.transposed)}
    return {
        f"{name} not rotated back": lambda x: x,
        f"{name} rotated forwards, not back": partial(EXACT.turned, rope=rope, at=at),
        f"{name} rotated back by 0, 1, 2, …": partial(back, at=0 * at + counted),
        f"{name} rotated back by the positions of row 0": partial(back, at=0 * at + at[:1]),
    }


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
        if exchanged := self._exchanged():
            return [exchanged]
        if lost := [i for i in wrong if not np.isfinite(self.answers[i]).all()]:
            names = ", ".join(TENSORS[i] for i in lost)
            return [Finding("gradients: not finite", f"NaN or infinity in {names}{self._where(lost[0])}")]
        if added := self._added():
            return [added]
        made = Backward(self.spec, self.call)
        self.shown = self._row_term(made)
        explained = {i: self._itself(i) or self._terms(made, i) or self._summed(i) for i in wrong}
        if 2 in wrong and not explained[2] and (found := self._by_weights()):
            told = {x.fault for x in found}
            own = ((*x, i) for i in wrong if i < 2 for x in explained[i] if x[0] not in told)
            return [*found, *_merged(own)]  # what is explained by the right weights is no consequence of others
        damage = self._damaged() if not all(explained.values()) else None
        left = {i: explained[i] or ([] if damage else self._noise(i)) for i in wrong}
        return [*_merged((fault, fact, i) for i in wrong for fault, fact in left[i]), *([damage] if damage else [])]

    def _exchanged(self) -> Finding | None:
        """Right gradients in the place of others."""
        same = [[j for j, limit in enumerate(self.limits) if x.shape == limit.truth.shape and limit.ratio(x) <= 1]
                for x in self.answers]  # fmt: skip
        moved = [i for i, js in enumerate(same) if js and i not in js]
        if not moved:
            return None
        words = ", ".join(f"{TENSORS[i]} is the right {TENSORS[same[i][0]]}" for i in moved)
        return Finding(f"gradients: exchanged, {' and '.join(TENSORS[i] for i in moved)}", words)

    def _added(self) -> Finding | None:
        """What is returned for a gradient g of zeros."""
        none = self.ask(replace(self.call, g=np.zeros_like(self.call.q)))
        size = [float(np.abs(np.nan_to_num(x)).max()) for x in none]
        names = [name for name, x, limit in zip(TENSORS, size, self.limits, strict=True) if x > limit.worst.max()]
        if not names:
            return None
        return Finding("gradients: something is added", f"for g = 0, {' and '.join(names)} are up to {max(size):.4g}")

    def _where(self, i: int) -> str:
        words = rows_where(self.limits[i], self.answers[i], "token", np.arange(self.answers[i].shape[2]))
        return f", {words}" if words else ""

    def _itself(self, i: int) -> list[Fault]:
        """What becomes of the gradient itself, if that is a known function."""
        truth, answer = self.limits[i].truth, self.answers[i]
        if np.abs(answer).max() <= 1e-9 * np.abs(truth).max():
            return [("gradients: zero", "zero everywhere")]
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

    def _row_term(self, made: Backward) -> Array | None:
        """D as dq shows it, if it is that of other queries."""
        (first, second), due = made.terms(0), -made.both[-1]
        squares = np.square(second).sum(axis=-1, keepdims=True)
        shown = ((self.answers[0] - first) * second).sum(axis=-1, keepdims=True) / squares * due
        shown = np.where(squares > 0, shown, due)  # a query that sees nothing shows nothing
        self.whose = elsewhere(due, shown, 10 * self.loose * float(np.abs(due).max()))
        return shown if self.whose else None

    def _terms(self, made: Backward, i: int) -> list[Fault]:
        """The faults and facts of one tensor, if some multiples of its terms, made in some way, are its numbers."""
        answer = self.answers[i]
        for faults, how in ways(made, i, self.shown):
            terms = made.terms(i, how)
            products = np.array([[(x * y).sum() for y in (*terms, answer)] for x in terms])
            much = np.linalg.pinv(products[:, :-1], rcond=1e-9, hermitian=True) @ products[:, -1]
            sums = sum(a * x for a, x in zip(much, terms, strict=True))
            off, size = np.abs(sums - answer).max(), np.abs(sums).max()
            if off <= 4 * self.limits[i].worst.max() + self.loose * size and size > 0:
                fact = f"all {answer.size} numbers are what this mistake makes, within {off:.1g}"
                facts = ((fault, self.whose if fault.endswith(OTHERS) else fact) for fault in faults)
                return [*facts, *self._multiples(much, i)]
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
            plain = np.sum(made.terms(i, How(slope=np.ones_like)), axis=0)
            ratio = np.where(np.abs(plain) > 0.05 * np.abs(plain).max(), answer / plain, np.nan)
            slopes = {"missing" if f == "identity" else f"that of {f}": slope(own) for f, slope in SLOPES.items()}
            due, features = (f[self.spec.feature_map](own) for f in (SLOPES, definition.FEATURE_MAPS))
            for words, x in (("queries and keys", own), ("features", features)):
                slopes[f"at turned {words}"] = SLOPES[self.spec.feature_map](EXACT.turned(x, at, rope))
            if faults := self._function("feature map's derivative", i, own, ratio, due, slopes):
                return faults
            if not due.all():
                return []
            answer = (answer - made.terms(i)[1]) / due
        answer = answer if rope is None else EXACT.turned(answer, at, rope) / rope.attention_factor**2
        other = turned.reshape(*answer.shape[:2], -1, own.shape[-1])  # of dk, those of all query heads of a group
        got = answer @ np.linalg.pinv(other)
        if np.abs(got @ other - answer).max() > 20 * self.loose * np.abs(answer).max():
            return []
        if i:
            got = np.moveaxis(got.reshape(*got.shape[:3], -1, call.q.shape[2]), 2, -1).reshape(made.parts.weights.shape)
        return self._pairs(made, i, got / self.spec.scale if self.spec.feature_map is None else got)

    def _short(self, i: int) -> tuple[Call, Array] | None:
        """The call, or its first tokens, and what it returns: no more than what its features tell apart."""
        call, step = self.call, self.call.q.shape[1] // self.call.k.shape[1] if i else 1
        most = call.q.shape[-1] // step
        if call.q.shape[2] * bool(i) <= most and call.k.shape[2] * (not i) <= most:
            return call, self.answers[i]
        if not call.square:
            return None
        few = {name: getattr(call, name)[:, :, :most] for name in ("q", "k", "v", "g")}
        at = None if call.positions is None else call.positions[:, :most]
        shapes = {"mask": np.s_[..., :most, :most], "segments": np.s_[:, :most]}
        call = replace(call, positions=at, options={x: y[shapes[x]] for x, y in call.options.items()}, **few)
        return call, self.ask(call)[i]

    def _pairs(self, made: Backward, i: int, got: Array) -> list[Fault]:
        """What is wrong with the gradients of pairs of a query and a key, (b, h, n, m)."""
        spec, call, parts, inner = self.spec, made.call, made.parts, made.both[0]
        weights, slope = 1 / parts.total, np.ones(got.shape)  # as if every key were seen
        if spec.feature_map is None:
            inner, slope = inner + made.both[-1], slope * cap_slope(parts.scores, spec.softcap)
            top = np.where(parts.seen, parts.scores, -np.inf).max(axis=-1, keepdims=True)
            weights = np.exp(parts.scores - top) / parts.total
        full, visible = weights * inner * slope, np.broadcast_to(parts.seen, got.shape)
        due = np.where(visible, full, 0)
        room = 20 * self.loose * float(np.abs(due).max())
        wrong, large = np.abs(got - due) > room, np.abs(full) > 3 * room
        if not wrong.any():
            return []
        extra, missing = wrong & ~visible, wrong & visible & (np.abs(got) < room)
        if not (wrong & visible & ~missing).any():
            sees = visible & ~missing | extra
            named = next((name for name, mask in masks(spec, call) if (mask == sees)[large].all()), "")
            both = (missing, "missing", large & visible), (extra, "too many", ~visible)
            words = [f"{int(x.sum())} {how}{where(call, x, some)}" for x, how, some in both if x.any()]
            how = "blocks not added up: pairs missing" if missing.any() else f"{RULE} hidden keys are summed"
            fact = f"of the {got.size} pairs of a query and a key in its sums, {' and '.join(words)}"
            return [(named or how, fact)]
        if spec.feature_map is not None:
            return []
        term, fact = f"{RULE} {_term(spec)} missing", "the row term is in it 0 times, expected once"
        for lost, dw in (([], inner), ([(term, fact)], made.both[0])):
            if found := self._slopes(made, i, got, weights * dw, slope):
                return [*lost, *found]
        return []

    def _slopes(self, made: Backward, i: int, got: Array, due: Array, slope: Array) -> list[Fault]:
        """The factors in the gradients of pairs, ``due`` times ``slope``, of which one is another function."""
        parts, cap, missing = made.parts, self.spec.softcap, np.ones(got.shape)
        tell = parts.seen & (np.abs(due) > 0.02 * np.abs(due).max(where=parts.seen, initial=0))
        if cap is not None:
            ratio, raw = np.where(tell, got / due, np.nan), np.arctanh(parts.scores / cap)
            other = cap * float(np.nanmedian(np.abs(raw) / np.arctanh(np.sqrt(np.clip(1 - ratio, 0, 1)))))
            others = {"missing": missing, f"that of a cap of {other:.4g}": 1 - np.tanh(raw * cap / other) ** 2}
            if faults := self._function("softcap's derivative", i, parts.scores, ratio, slope, others):
                return faults
        ratio = np.where(tell & (slope > 0.01), got / (due / parts.weights * slope), np.nan)
        return self._function("ds", i, parts.weights, ratio, parts.weights, {"without the weights": missing})

    def _function(self, name: str, i: int, x: Array, y: Array, due: Array, known: dict[str, Array]) -> list[Fault]:
        """What a factor y is, if it is a function of x other than the one due: from one x to the next it hardly
        changes."""
        some = np.isfinite(y)
        x, y, due = x[some], y[some], due[some]
        if y.size < 9 or self._near(due, y):
            return []
        much = {how: float((z[some] * y).sum() / np.square(z[some]).sum()) for how, z in known.items()}
        how = next((how for how, z in known.items() if self._near(much[how] * z[some], y)), "another function")
        each = y[x.argsort()]
        bends = each[1:-1] - (each[2:] + each[:-2]) / 2
        if how == "another function" and np.square(bends).sum() > 0.05 * np.square(y - y.mean()).sum():
            return []
        at = (int(np.abs(x - size).argmin()) for size in np.quantile(x, (0.1, 0.5, 0.9)))
        words = "; ".join(f"{y[j]:.4g} at {x[j]:.3g}, expected {due[j]:.4g}" for j in dict.fromkeys(at))
        factor = [much[how]] if abs(much.get(how, 1.0) - 1) > 20 * self.loose else []
        return [(f"{RULE} {name} {how}", f"comes out as {words}"), *self._multiples(np.array(factor or [1.0]), i)]

    def _near(self, x: Array, y: Array) -> bool:
        """Whether nearly all y are x."""
        return bool((np.abs(y - x) <= 50 * self.loose * (np.abs(x) + 0.1 * np.abs(x).max())).mean() > 0.985)

    def _multiples(self, much: Array, i: int) -> Iterator[Fault]:
        """What the multiples of the terms are called: both the same, or the second another one."""
        first, close = float(much[0]), 20 * self.loose
        second = float(much[-1]) / first if abs(first) > close else float(much[-1])
        if abs(first - 1) > close and abs(first) > close:
            yield self._factor(first, i), f"{side_by_side(first, 1.0, digits=4)[0]} times what is due"
        if abs(first) <= close:
            yield "chain rule: the first term missing", "nothing of the term with g·vᵀ is in it"
        if len(much) > 1 and abs(second - 1) > close:
            term = _term(self.spec)
            how = "missing" if abs(second) <= close else f"times {second:.4g}"
            yield f"chain rule: {term} {how}", f"the {term} is in it {round(second, 4) + 0.0:g} times, expected once"

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
        found = apart(Measured(self.spec, self._forward, self.call, weights, CLOSE[self.spec.dtype.name][0], self.call))
        return [replace(x, fact=f"in the weights that dv shows: {x.fact}") for x in found]

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

    def _damaged(self) -> Finding | None:
        """Which known function becomes of g, or of the values."""
        for fault, what, measure in (("gradients: g", "g", self._incoming), ("values:", "values", self._values)):
            x, y = measure()
            found = response(x, y, self.near)
            if found.function is not None and found.words != "zeros":
                return Finding(f"{fault} {found.words}", f"of {what}, {examples(x[..., :1, :], y)}")
        return None

    def _incoming(self) -> tuple[Array, Array]:
        """The g of the last query, all others 0, and what becomes of it: dv = w·f(g), of the key that weighs most."""
        step, g = self.call.q.shape[1] // self.call.k.shape[1], np.zeros_like(self.call.q)
        g[:, ::step, -1] = np.random.default_rng(3).standard_normal(g[:, ::step, -1].shape) * 3
        dv, w = self.ask(replace(self.call, g=g))[2], weigh(self.spec, self.call).weights[:, ::step, -1]
        best = np.abs(w).argmax(axis=-1)[..., None]
        y = np.take_along_axis(dv, best[..., None], axis=2) / np.take_along_axis(w, best, axis=-1)[..., None]
        return g[:, ::step, ::-1].astype(np.float64), y

    def _values(self) -> tuple[Array, Array]:
        """The value of the first key, all others 0, and what becomes of it, as dq has it for a g of feature i in query
        i: feature by feature."""
        step, count = self.call.q.shape[1] // self.call.k.shape[1], min(self.call.q.shape[2:])
        v, g = np.zeros_like(self.call.v), np.zeros_like(self.call.q)
        v[:, :, 0] = np.random.default_rng(4).standard_normal(v[:, :, 0].shape) * 3
        g[:, :, range(count), range(count)] = 1
        call = replace(self.call, v=v, g=g)
        got, due = self.ask(call)[0][:, ::step], np.sum(Backward(self.spec, call).terms(0), axis=0)[:, ::step]
        x, squares = v.astype(np.float64), np.square(due).sum(axis=-1)
        much = np.where(squares > 1e-6 * squares.max(), (got * due).sum(axis=-1) / squares, np.nan)
        y = np.full((*v.shape[:2], 1, v.shape[-1]), np.nan)
        y[..., 0, :count] = much[..., :count] * x[:, :, 0, :count]
        return x, y

    def _noise(self, i: int) -> list[Fault]:
        """What is left: how far off it is, and whether its errors are as a coarser dtype's."""
        truth, answer = self.limits[i].truth, self.answers[i]
        error = answer - truth
        off = float(np.sqrt(np.square(error).mean() / np.square(truth).mean()))
        alike = abs((error * truth).sum()) / np.sqrt(np.square(error).sum() * np.square(truth).sum())
        if (name := coarser(off, self.spec)) and alike < 0.2:
            fact = f"errors are {off:.2g} of the size of the numbers, without a pattern"
            return [(f"precision: as if a step were rounded to {name}", fact)]
        size = f"up to {np.abs(error).max():.3g}, where the numbers are up to {np.abs(truth).max():.3g}"
        return [(f"unexplained: {TENSORS[i]}", f"off by {size}{self._where(i)}")]


def _merged(found: Iterable[tuple[str, str, int]]) -> list[Finding]:
    """Each fault once, with the tensors that have it."""
    by: dict[str, list[tuple[str, str]]] = {}
    for fault, fact, i in found:
        by.setdefault(fault, []).append((fact, TENSORS[i]))
    return [Finding(fault, f"{', '.join(tensor for _, tensor in some)}: {some[0][0]}") for fault, some in by.items()]
