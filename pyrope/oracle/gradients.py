"""What is wrong with gradients of attention: dq, dk and dv, each measured as a sum of the terms of the chain rule.

With weights w = softmax(s), o = w·v and the gradient g of o:

    dv = wᵀ·g      ds = w∘(g·vᵀ) − w∘D      D = Σ w∘(g·vᵀ)      dq = scale·Rᵀ(ds·k̃)      dk = scale·Rᵀ(dsᵀ·q̃)

So dq and dk have two terms, and least squares say how much of each there is: 1 and 0 if the row term D is missing, 8
and 8 if the scale is. Of Eq. (19) the two are those of the numerator and of the denominator. Terms are made as they
should be, and with a step done in another way. dv shows the weights, which are taken apart as those of a forward pass.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .. import definition
from ..backend import Array
from .candidate import UNIT
from .measured import Measured, read, rows_where
from .report import Finding
from .responses import Function, examples, response
from .steps import EXACT, SLOPES, Allowed, Call, Spec, cap_slope, spread, weigh
from .weights import CLOSE, apart, places

Ask: TypeAlias = Callable[[Call], list[Array]]
Fault: TypeAlias = tuple[str, str]  # and the fact
TENSORS = ("dq", "dk", "dv")
LOOSE = {"float64": 1e-4, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}  # of the largest number of a tensor
NEAR = {"float64": 1e-6, "float32": 3e-5, "float16": 4e-3, "bfloat16": 3e-2}  # of each number
GATHERED: dict[str, Function] = {  # the query heads that share a key head: (b, g, h/g, m, d) -> (b, g, m, d)
    "": lambda x: x.sum(axis=2),
    "shared key heads: the first query head alone": lambda x: x[:, :, 0],
    "shared key heads: the last query head alone": lambda x: x[:, :, -1],
    "shared key heads: the mean, not the sum": lambda x: x.mean(axis=2),
}
TILED, UNCROSSED, UNDIVIDED = "heads: tiled", "chain rule: not transposed", "chain rule: not divided by the normaliser"
TURNED = "chain rule: gradients of values rotated"
LAST = "blocks not added up: the last alone, from {} on"


# ── The terms of the chain rule ──────────────────────────────────────────────────────────────────────────────────────


class How(NamedTuple):
    """How a backward pass is finished: the name of the mistake for each step that is done in another way."""

    slope: str = ""  # of the softcap, or of the feature map
    turned: str = ""  # dq and dk back, dv not at all
    summed: str = ""  # over keys, for dq, or queries
    gathered: str = ""  # the heads that share a key head


@dataclass
class Chain:
    """The terms of dq, dk and dv, in float64."""

    spec: Spec
    call: Call

    def __post_init__(self) -> None:
        spec, (self.q, self.k, self.v) = self.spec, spread(self.call)
        phi = definition.FEATURE_MAPS[spec.feature_map or "identity"]
        self.fq, self.fk, (q_at, self.k_at) = phi(self.q), phi(self.k), self.call.at()
        self.tq, self.tk = EXACT.turned(self.fq, q_at, spec.turns), EXACT.turned(self.fk, self.k_at, spec.turns)
        self.parts, self.g = weigh(spec, self.call), np.asarray(self.call.g, np.float64)
        self.dw = self.g @ self.v.swapaxes(-1, -2)
        self.row = (self.parts.weights * self.dw).sum(axis=-1, keepdims=True)

    @cached_property
    def slopes(self) -> dict[str, Any]:
        """Of the softcap, as a factor of ds; of the feature map, as a function of q and k."""
        if self.spec.feature_map is None:
            missing = {"chain rule: softcap's derivative missing": np.ones(1)} if self.spec.softcap else {}
            return {"": cap_slope(self.parts.scores, self.spec.softcap), **missing}
        own, name = SLOPES[self.spec.feature_map], "chain rule: feature map's derivative"
        others = {f"{name} that of {other}": slope for other, slope in SLOPES.items() if slope is not own}
        return {"": own, f"{name} missing": np.ones_like, **others}

    @cached_property
    def turns(self) -> dict[str, Function]:
        """How dq and dk are turned back, (b, h, n, d)."""
        if (rope := self.spec.turns) is None:
            return {"": lambda x: x}
        at, name = np.asarray(self.call.positions, np.int64)[:, None], "chain rule: gradients"
        back, counted = partial(EXACT.turned, rope=rope.transposed), np.arange(at.shape[-1])
        return {
            "": partial(back, at=at),
            f"{name} not rotated back": lambda x: x,
            f"{name} rotated forwards, not back": partial(EXACT.turned, rope=rope, at=at),
            f"{name} rotated back by 0, 1, 2, …": partial(back, at=0 * at + counted),
            f"{name} rotated back by the positions of row 0": partial(back, at=0 * at + at[:1]),
        }

    def _gathered(self, x: Array, how: str) -> Array:
        (b, _, m, d), g = x.shape, self.call.k.shape[1]
        return x.reshape(b, -1, g, m, d).sum(axis=1) if how == TILED else GATHERED[how](x.reshape(b, g, -1, m, d))

    def ways(self, tensor: int) -> Iterator[tuple[How, list[Array]]]:
        """The terms of a tensor, as they are and in other ways: those that differ in the fewest steps first."""
        (n, m), shared = self.dw.shape[-2:], self.call.k.shape[1] < self.call.q.shape[1]
        gathered = [*GATHERED, TILED] if shared and tensor else [""]
        starts = sorted({((n if tensor else m) - 1) // x * x for x in (4, 8, 16, 32, 64, 128)} - {0})
        summed = ["", *[UNCROSSED] * (tensor > 0 and n == m), *map(LAST.format, starts)]
        slopes = [*self.slopes] if tensor < 2 else ["", *[UNDIVIDED] * (self.spec.feature_map is not None)]
        turned = [*self.turns] if tensor < 2 else ["", *[TURNED] * (self.spec.rope is not None)]
        listed = itertools.product(slopes, turned, summed, gathered)
        few = (How(*x) for x in listed if x.count("") > (2 if x[2].startswith("blocks") else 1))
        for how in sorted(few, key=lambda x: -x.count("")):
            yield how, self._value(how) if tensor == 2 else self._terms(tensor, how)

    def _summed(self, x: Array, tensor: int, how: str) -> Array:
        """Weights, or their gradients, as they are multiplied from the left: over keys for dq, over queries else."""
        x = x if tensor == 0 or how == UNCROSSED else x.swapaxes(-1, -2)
        return np.where(np.arange(x.shape[-1]) >= int(how.split()[-2]), x, 0) if how.startswith("blocks") else x

    def _value(self, how: How) -> list[Array]:
        w = self.parts.weights * (self.parts.total if how.slope else 1)
        x = self._summed(w, 2, how.summed) @ self.g
        x = EXACT.turned(x, self.k_at, self.spec.rope.transposed) if how.turned and self.spec.rope else x
        return [self._gathered(x, how.gathered)]

    def _terms(self, tensor: int, how: How) -> list[Array]:
        turn, (other, plain) = self.turns[how.turned], ((self.tk, self.fk), (self.tq, self.fq))[tensor]
        if self.spec.feature_map is not None:
            share = np.where(self.parts.seen, 1 / np.where(self.parts.total == 0, 1, self.parts.total), 0)
            slope = self.slopes[how.slope]((self.q, self.k)[tensor])
            first, second = (self._summed(x * share, tensor, how.summed) for x in (self.dw, -self.row))
            both = [turn(first @ other) * slope, second @ plain * slope]
        else:
            ds = self.parts.weights * self.slopes[how.slope] * self.spec.scale
            both = [turn(self._summed(ds * x, tensor, how.summed) @ other) for x in (self.dw, -self.row)]
        return [x if tensor == 0 else self._gathered(x, how.gathered) for x in both]


# ── What is wrong ────────────────────────────────────────────────────────────────────────────────────────────────────


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

    def __post_init__(self) -> None:
        self.loose, self.near = LOOSE[self.spec.dtype.name], NEAR[self.spec.dtype.name]

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
        damage = (self._incoming() or self._values()) if not all(explained.values()) else None
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
            return [("gradients: zero", "it is zero everywhere")]
        known = np.where(np.abs(truth) > 1e-3 * np.abs(truth).max(), answer, np.nan)  # small ones have larger errors
        each = (-1, 1, truth.shape[-1])
        found = response(truth.reshape(each), known.reshape(each), self.near)
        return [(f"gradients: {found.words}", examples(truth, answer))] if found.function is not None else []

    def _terms(self, chain: Chain, i: int) -> list[Fault]:
        """The faults and facts of one tensor, if some multiples of its terms, made in some way, are its numbers."""
        answer = self.answers[i]
        for how, terms in chain.ways(i):
            products = np.array([[(x * y).sum() for y in (*terms, answer)] for x in terms])
            much = np.linalg.pinv(products[:, :-1], rcond=1e-9, hermitian=True) @ products[:, -1]
            made = sum(a * x for a, x in zip(much, terms, strict=True))
            off, size = np.abs(made - answer).max(), np.abs(made).max()
            if off <= 4 * self.limits[i].worst.max() + self.loose * size and size > 0:
                fact = f"its {answer.size} numbers are those of this mistake, within {off:.1g}"
                return [*((fault, fact) for fault in how if fault), *self._multiples(much, i)]
        return []

    def _multiples(self, much: Array, i: int) -> Iterator[Fault]:
        """What the multiples of the terms are called: both the same, or the second another one."""
        first, close = float(much[0]), 20 * self.loose
        second = float(much[-1]) / first if abs(first) > close else float(much[-1])
        if abs(first - 1) > close and abs(first) > close:
            yield self._factor(first, i), f"it is {first:.4g} times what it should be"
        if abs(first) <= close:
            yield "chain rule: the first term missing", "it has nothing of the term with g·vᵀ"
        if len(much) > 1 and abs(second - 1) > close:
            term = "row term" if self.spec.feature_map is None else "denominator's derivative"
            how = "missing" if abs(second) <= close else f"times {second:.4g}"
            yield f"chain rule: {term} {how}", f"it has the {term} {round(second, 4) + 0.0:g} times, expected once"

    def _factor(self, factor: float, i: int) -> str:
        named, scale = {-1.0: "gradients: negated"}, self.spec.scale
        if self.spec.feature_map is None and i < 2:
            named |= {1 / scale: "chain rule: scale missing", scale: "chain rule: scale applied twice"}
        near = (words for x, words in named.items() if abs(factor / x - 1) < 20 * self.loose)
        return next(near, f"gradients: times {factor:.4g}")

    def _moved(self, i: int) -> list[Fault]:
        """Right gradients of other heads or rows."""
        whose = places(self.answers[i], self.limits[i])
        numbers = ", ".join(map(str, whose.ravel()[:8]))
        fact = f"the heads of all rows, 0, 1, …, return the gradients of {numbers}"
        return [("gradients: of other heads or rows", fact)] if (whose >= 0).all() else []

    def _by_weights(self) -> list[Finding]:
        """The weights that dv shows, taken apart as those of a forward pass."""
        weights = read(self._forward, self.call).weights
        found = apart(Measured(self.spec, self._forward, self.call, weights, CLOSE[self.spec.dtype.name][0]))
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

    def _values(self) -> Finding | None:
        """What becomes of the value of the first key, all others 0, feature by feature: g is feature i in query i."""
        step, count = self.call.q.shape[1] // self.call.k.shape[1], min(self.call.q.shape[2:])
        v, g = np.zeros_like(self.call.v), np.zeros_like(self.call.q)
        v[:, :, 0] = np.random.default_rng(4).standard_normal(v[:, :, 0].shape) * 3
        g[:, :, range(count), range(count)] = 1
        call = replace(self.call, v=v, g=g)
        terms = next(Chain(self.spec, call).ways(0))[1]
        got, due = self.ask(call)[0][:, ::step], np.sum(terms, axis=0)[:, ::step]
        x, squares = v.astype(np.float64), np.square(due).sum(axis=-1)
        much = np.where(squares > 1e-6 * squares.max(), (got * due).sum(axis=-1) / squares, np.nan)
        y = np.full((*v.shape[:2], 1, v.shape[-1]), np.nan)
        y[..., 0, :count] = much[..., :count] * x[:, :, 0, :count]
        return self._damaged("values:", "values", x, y)

    def _incoming(self) -> Finding | None:
        """What becomes of the g of the last query, all others 0: dv = w·f(g), of the key that weighs most."""
        step, g = self.call.q.shape[1] // self.call.k.shape[1], np.zeros_like(self.call.q)
        g[:, ::step, -1] = np.random.default_rng(3).standard_normal(g[:, ::step, -1].shape) * 3
        dv, w = self.ask(replace(self.call, g=g))[2], weigh(self.spec, self.call).weights[:, ::step, -1]
        best = np.abs(w).argmax(axis=-1)[..., None]
        y = np.take_along_axis(dv, best[..., None], axis=2) / np.take_along_axis(w, best, axis=-1)[..., None]
        return self._damaged("gradients: g", "g", g[:, ::step, ::-1].astype(np.float64), y)

    def _damaged(self, fault: str, what: str, x: Array, y: Array) -> Finding | None:
        """Which known function of x, (…, 1 or more, d), y (…, 1, d) is."""
        found = response(x, y, self.near)
        if found.function is None:
            return None
        return Finding(f"{fault} {found.words}", f"of {what}, {examples(x[..., :1, :], y)}")

    def _noise(self, i: int) -> list[Fault]:
        """What is left: how far off it is, and whether its errors are as a coarser dtype's."""
        truth, answer = self.limits[i].truth, self.answers[i]
        error = answer - truth
        off = float(np.sqrt(np.square(error).mean() / np.square(truth).mean()))
        alike = abs((error * truth).sum()) / np.sqrt(np.square(error).sum() * np.square(truth).sum())
        coarser = {name: unit for name, unit in UNIT.items() if unit > UNIT[self.spec.dtype.name]}
        for name in (name for name, unit in coarser.items() if 0.1 * unit < off < 4 * unit and alike < 0.2):
            fact = f"its errors are {off:.2g} of its size, without a pattern"
            return [(f"precision: as if a step were rounded to {name}", fact)]
        size = f"up to {np.abs(error).max():.3g}, its numbers are up to {np.abs(truth).max():.3g}"
        return [(f"unexplained: {TENSORS[i]}", f"off by {size}{self._where(i)}")]


def _merged(found: Iterable[tuple[str, str, int]]) -> list[Finding]:
    """Each fault once, with the tensors that have it."""
    by: dict[str, list[tuple[str, str]]] = {}
    for fault, fact, i in found:
        by.setdefault(fault, []).append((fact, TENSORS[i]))
    return [Finding(fault, f"{' and '.join(tensor for _, tensor in some)}: {some[0][0]}") for fault, some in by.items()]
