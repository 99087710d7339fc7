"""What is wrong with gradients of attention: dq, dk and dv, each measured as a sum of the terms of the chain rule.

With weights w = softmax(s), o = w·v and the gradient g of o:

    dv = wᵀ·g      ds = w∘(g·vᵀ) − w∘D      D = Σ w∘(g·vᵀ)      dq = scale·Rᵀ(ds·k̃)      dk = scale·Rᵀ(dsᵀ·q̃)

So dq and dk have two terms, and least squares say how much of each there is: 1 and 0 if the row term D is missing, 8
and 8 if the scale is. Of Eq. (19) the two are those of the numerator and of the denominator. dv shows the weights,
which are taken apart as those of a forward pass.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from ..backend import Array
from . import rules
from .candidate import UNIT
from .chain import Chain
from .measured import Measured, read
from .report import Finding
from .responses import examples, response
from .steps import Allowed, Call, Spec, weigh
from .weights import CLOSE, apart, places

Ask: TypeAlias = Callable[[Call], list[Array]]
TENSORS = ("dq", "dk", "dv")
LOOSE = {"float64": 1e-4, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}  # of the largest number of a tensor


def diagnose(spec: Spec, ask: Ask, call: Call, answers: Sequence[Array], limits: Sequence[Allowed]) -> list[Finding]:
    """What is wrong with the gradients of a call, causes before consequences; may raise `Unreadable`."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rows of NaN alone have no median
        return Gradients(spec, ask, call, answers, limits).found()


@dataclass
class Gradients:
    """Three gradients of one call, and what they should be."""

    spec: Spec
    ask: Ask
    call: Call
    answers: Sequence[Array]
    limits: Sequence[Allowed]

    def found(self) -> list[Finding]:
        wrong = [i for i in range(3) if self.limits[i].ratio(self.answers[i]) > 1]
        if exchanged := self._exchanged():
            return [exchanged]
        if lost := [i for i in wrong if not np.isfinite(self.answers[i]).all()]:
            names = ", ".join(TENSORS[i] for i in lost)
            return [Finding("gradients: not finite", f"NaN or infinity in {names}{self._where(lost[0])}")]
        if added := self._added():
            return [added]
        chain = Chain(self.spec, self.call)
        explained = {i: self._itself(i) or self._terms(chain, i) or self._moved(i) for i in wrong}
        if 2 in wrong and not explained[2] and (found := self._by_weights()):
            return found
        if 0 in wrong and not explained[0] and (another := self._row_term(chain)):
            return [another]  # and dk is wrong by the same
        left = [i for i in wrong if not explained[i]]
        named = _merged((fault, fact, TENSORS[i]) for i in wrong for fault, fact in explained[i])
        return [*named, *self._left(left)]

    def _exchanged(self) -> Finding | None:
        """Right gradients in the place of others."""
        same = [[j for j, limit in enumerate(self.limits) if x.shape == limit.truth.shape and limit.ratio(x) <= 1]
                for x in self.answers]  # fmt: skip
        moved = [i for i, js in enumerate(same) if js and i not in js]
        if not moved:
            return None
        words = ", ".join(f"{TENSORS[i]} is the right {TENSORS[same[i][0]]}" for i in moved)
        return Finding(f"gradients: exchanged, {' and '.join(TENSORS[i] for i in moved)}", words)

    def _moved(self, i: int) -> list[tuple[str, str]]:
        """Right gradients of other heads or rows."""
        whose = places(self.answers[i], self.limits[i])
        numbers = ", ".join(map(str, whose.ravel()[:8]))
        fact = f"the heads of all rows, 0, 1, …, return the gradients of {numbers}"
        return [("gradients: of other heads or rows", fact)] if (whose >= 0).all() else []

    def _added(self) -> Finding | None:
        """What is returned for a gradient g of zeros."""
        none = self.ask(replace(self.call, g=np.zeros_like(self.call.q)))
        size = [float(np.abs(np.nan_to_num(x)).max()) for x in none]
        names = [name for name, x, limit in zip(TENSORS, size, self.limits, strict=True) if x > limit.worst.max()]
        if not names:
            return None
        return Finding("gradients: something is added", f"for g = 0, {' and '.join(names)} are up to {max(size):.4g}")

    def _where(self, i: int) -> str:
        limit, answer = self.limits[i], self.answers[i]
        bad = (limit.error(answer) > limit.worst).any(axis=-1)
        row, head, token = (x.ravel() for x in np.indices(bad.shape))
        rule = rules.simplest({"the token": token, "the head": head, "the row": row}, bad.ravel())
        return f", where {rule.words}" if rule is not None and rule.share > 0.95 else ""

    # ── By the terms of the chain rule ──

    def _terms(self, chain: Chain, i: int) -> list[tuple[str, str]]:
        """The faults and facts of one tensor, if some multiples of its terms, made in some way, are its numbers."""
        answer, close = self.answers[i], LOOSE[self.spec.dtype.name]
        for how, terms in chain.ways(i):
            products = np.array([[(x * y).sum() for y in (*terms, answer)] for x in terms])
            much = np.linalg.pinv(products[:, :-1], rcond=1e-9, hermitian=True) @ products[:, -1]
            made = sum(a * x for a, x in zip(much, terms, strict=True))
            off, size = np.abs(made - answer).max(), np.abs(made).max()
            if off <= 4 * self.limits[i].worst.max() + close * size and size > 0:
                fact = f"its {answer.size} numbers are those of this mistake, within {off:.1g}"
                return [*((fault, fact) for fault in how if fault), *self._multiples(much, i)]
        return []

    def _multiples(self, much: Array, i: int) -> Iterator[tuple[str, str]]:
        """What the multiples of the terms are called: both the same, or the second another one."""
        first, close = float(much[0]), 20 * LOOSE[self.spec.dtype.name]
        second = float(much[-1]) / first if abs(first) > close else float(much[-1])
        if abs(first - 1) > close and abs(first) > close:
            yield self._factor(first, i), f"it is {first:.4g} times what it should be"
        if abs(first) <= close:
            yield "chain rule: the first term missing", "it has nothing of the term with g·vᵀ"
        if len(much) > 1 and abs(second - 1) > close:
            term = "row term" if self.spec.feature_map is None else "denominator's derivative"
            how = "missing" if abs(second) <= close else f"times {second:.4g}"
            yield f"chain rule: {term} {how}", f"it has the {term} {round(second, 4) + 0.0:g} times, expected once"

    def _row_term(self, chain: Chain) -> Finding | None:
        """Another multiple of the second term in each row of dq, if that is all that is wrong with it."""
        first, second = chain.terms(0)
        error, squares = self.answers[0] - first, np.square(second).sum(axis=-1, keepdims=True)
        much = (error * second).sum(axis=-1, keepdims=True) / np.where(squares == 0, 1, squares)
        room = 4 * self.limits[0].worst.max() + LOOSE[self.spec.dtype.name] * np.abs(first).max()
        if np.abs(error - much * second).max() > room or np.abs(much - 1).max() < 20 * LOOSE[self.spec.dtype.name]:
            return None
        term = "row term" if self.spec.feature_map is None else "denominator's derivative"
        some = ", ".join(f"{x:.4g}" for x in much[0, 0, -4:, 0])
        return Finding(f"chain rule: another {term}", f"the last rows of dq have {some} times the {term}, not once")

    def _factor(self, factor: float, i: int) -> str:
        close = 20 * LOOSE[self.spec.dtype.name]
        named = {-1.0: "gradients: negated"}
        if self.spec.feature_map is None and i < 2:
            scale = self.spec.scale
            named |= {1 / scale: "chain rule: scale missing", scale: "chain rule: scale applied twice"}
        near = (words for x, words in named.items() if abs(factor / x - 1) < close)
        return next(near, f"gradients: times {factor:.4g}")

    # ── By the weights that dv shows ──

    def _by_weights(self) -> list[Finding]:
        """The weights that dv shows, taken apart as those of a forward pass."""
        close = CLOSE[self.spec.dtype.name][0]
        weights = read(self._forward, self.call).weights
        found = apart(Measured(self.spec, self._forward, self.call, weights, close))
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

    # ── By numbers that are not themselves ──

    def _itself(self, i: int) -> list[tuple[str, str]]:
        """What becomes of the gradient itself, if that is a known function."""
        truth, answer = self.limits[i].truth, self.answers[i]
        if np.abs(answer).max() <= 1e-9 * np.abs(truth).max():
            return [("gradients: zero", "it is zero everywhere")]
        known = np.where(np.abs(truth) > 1e-3 * np.abs(truth).max(), answer, np.nan)  # small ones have larger errors
        each = (-1, 1, truth.shape[-1])
        found = response(truth.reshape(each), known.reshape(each), self.close)
        return [(f"gradients: {found.words}", examples(truth, answer))] if found.function is not None else []

    def _left(self, left: list[int]) -> list[Finding]:
        """What becomes of g or of the values; else where the numbers are wrong."""
        measures = [("gradients: g", "g", self._of_g)] * (2 in left) + [("values:", "values", self._of_values)]
        for name, what, measure in measures if left else ():
            x, y = measure()
            if (found := response(x, y, self.close)).function is not None:
                return [Finding(f"{name} {found.words}", f"of {what}, {examples(x[..., :1, :], y)}")]
        return [
            *_merged(x for i in left for x in self._noise(i)),
            *(self._unknown(i) for i in left if not self._noise(i)),
        ]

    def _noise(self, i: int) -> list[tuple[str, str, str]]:
        """Errors without a pattern, if they are of the size of a coarser dtype's: fault, fact, tensor."""
        truth, error = self.limits[i].truth, self.answers[i] - self.limits[i].truth
        off = float(np.sqrt(np.square(error).mean() / np.square(truth).mean()))
        alike = abs((error * truth).sum()) / np.sqrt(np.square(error).sum() * np.square(truth).sum())
        coarser = {name: unit for name, unit in UNIT.items() if unit > UNIT[self.spec.dtype.name]}
        near = [name for name, unit in coarser.items() if 0.1 * unit < off < 4 * unit and alike < 0.2]
        fault, fact = (
            "precision: as if a step were rounded to ",
            f"its errors are {off:.2g} of its size, without a pattern",
        )
        return [(fault + name, fact, TENSORS[i]) for name in near[:1]]

    @property
    def close(self) -> float:
        return {"float64": 1e-6, "float32": 3e-5, "float16": 4e-3, "bfloat16": 3e-2}[self.spec.dtype.name]

    def _of_g(self) -> tuple[Array, Array]:
        """The gradient of the last query, all others 0: dv = w·f(g), of the key that weighs most."""
        step = self.call.q.shape[1] // self.call.k.shape[1]
        g = np.zeros_like(self.call.q)
        g[:, ::step, -1] = np.random.default_rng(3).standard_normal(g[:, ::step, -1].shape) * 3
        dv, w = self.ask(replace(self.call, g=g))[2], weigh(self.spec, self.call).weights[:, ::step, -1]
        best = np.abs(w).argmax(axis=-1)[..., None]
        y = np.take_along_axis(dv, best[..., None], axis=2) / np.take_along_axis(w, best, axis=-1)[..., None]
        return g[:, ::step, ::-1].astype(np.float64), y

    def _of_values(self) -> tuple[Array, Array]:
        """The value of the first key, all others 0, feature by feature: g is feature i in query i."""
        step, count = self.call.q.shape[1] // self.call.k.shape[1], min(self.call.q.shape[2:])
        v, g = np.zeros_like(self.call.v), np.zeros_like(self.call.q)
        v[:, :, 0] = np.random.default_rng(4).standard_normal(v[:, :, 0].shape) * 3
        g[:, :, range(count), range(count)] = 1
        call = replace(self.call, v=v, g=g)
        got, due = self.ask(call)[0][:, ::step], np.sum(Chain(self.spec, call).terms(0), axis=0)[:, ::step]
        x, squares = v.astype(np.float64), np.square(due).sum(axis=-1)
        much = np.where(squares > 1e-6 * squares.max(), (got * due).sum(axis=-1) / squares, np.nan)
        y = np.full((*v.shape[:2], 1, v.shape[-1]), np.nan)
        y[..., 0, :count] = much[..., :count] * x[:, :, 0, :count]
        return x, y

    def _unknown(self, i: int) -> Finding:
        truth, answer = self.limits[i].truth, self.answers[i]
        alike = float((truth * answer).sum() / np.sqrt(np.square(truth).sum() * np.square(answer).sum()))
        off, size = np.abs(answer - truth).max(), np.abs(truth).max()
        fact = f"{TENSORS[i]} is off by up to {off:.3g}, its numbers are up to {size:.3g}"
        return Finding(
            f"unexplained: {TENSORS[i]}", f"{fact}; its correlation with the truth is {alike:.4f}{self._where(i)}"
        )


def _merged(found: Iterable[tuple[str, str, str]]) -> list[Finding]:
    """Each fault once, with the tensors that have it."""
    by: dict[str, list[tuple[str, str]]] = {}
    for fault, fact, tensor in found:
        by.setdefault(fault, []).append((fact, tensor))
    return [Finding(fault, f"{' and '.join(tensor for _, tensor in some)}: {some[0][0]}") for fault, some in by.items()]
