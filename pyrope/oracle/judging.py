"""Which known mistake gives the numbers that a candidate for attention returned.

A candidate answers some probes. What is right, and what each mistake would return, are computed in float64; an answer
fits a prediction if no output is further off than rounding explains, and far less than from what is right. If what is
right does not fit, the mistakes are tried one by one, then those with a number of their own (a scale, a base), then two
at a time. Those that fit are named; where several do, they cannot be told apart by these probes, and the report says
so.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from ..backend import Array
from .attention_faults import Changes, Fault
from .report import ErrorRow, Finding

Candidate: TypeAlias = Callable[..., Any]
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}  # half an ulp of 1


@dataclass(frozen=True)
class Probe:
    """What is given to a candidate."""

    name: str
    q: Array  # (b, h, n, d), of the candidate's dtype
    k: Array  # (b, g, m, d)
    v: Array  # (b, g, m, d), ±1
    options: dict[str, Array] = field(default_factory=dict)  # mask, segments
    at: Array | None = None  # (b, m), if positions are given
    pieces: tuple[int, ...] = ()  # how many tokens a candidate with a cache gets at a time
    random: bool = True  # values are random signs: errors cancel, so that their mean square says more than the worst

    @property
    def arguments(self) -> list[Array]:
        return [self.q, self.k, self.v] + ([] if self.at is None else [self.at])

    def wide(self) -> list[Array]:
        """The arguments in float64."""
        return [x.astype(np.float64) for x in self.arguments[:3]] + self.arguments[3:]


@dataclass(frozen=True)
class Prediction:
    """What an answer must be, and how far off it may be."""

    out: Array
    worst: Array  # for each output
    spread: float  # for the root of the mean square

    def ratio(self, answer: Array) -> float:
        """How far off an answer is: above 1, further than rounding explains."""
        lost = ~np.isfinite(self.out)
        if answer.shape != self.out.shape or (lost != ~np.isfinite(answer)).any():
            return math.inf
        error = np.where(lost, 0, np.abs(np.where(lost, 0, answer) - np.where(lost, 0, self.out)))
        return max(float((error / self.worst).max(initial=0)), math.sqrt((error**2).mean()) / self.spread)


@dataclass(frozen=True)
class Judge:
    """The answers of a candidate, and what can be said about them."""

    probes: Sequence[Probe]
    answers: Sequence[Array]  # in float64
    right: Sequence[Prediction]
    predict: Callable[[Changes, int], Prediction]  # for a mistake and a probe
    eps: float  # one ulp of 1

    @functools.cached_property
    def failed(self) -> list[int]:
        """The probes whose answers are not right."""
        return [i for i, (p, a) in enumerate(zip(self.right, self.answers, strict=True)) if p.ratio(a) > 1]

    def ratio(self, changes: Changes) -> float:
        """The greatest over all probes, or the first one above 1, small probes first."""
        worst = 0.0
        for i in sorted(range(len(self.probes)), key=lambda i: self.probes[i].k.size):
            worst = max(worst, self.predict(changes, i).ratio(self.answers[i]))
            if worst > 1:
                break
        return worst

    def explains(self, changes: Changes) -> bool:
        """Whether a mistake that fits also leaves less than half of each error: the bound of one that makes large
        numbers holds any small ones."""
        for i in self.failed:
            answer, right, out = self.answers[i], self.right[i], self.predict(changes, i).out
            if answer.shape != right.out.shape or not np.isfinite(answer).all():
                continue  # as predicted, and not as it should be
            error = np.abs(answer - right.out)
            bad = error > right.worst
            bad = bad if bad.any() else np.ones_like(bad)
            if not (np.abs(answer - out)[bad] ** 2).mean() < (error[bad] ** 2).mean() / 4:
                return False
        return True

    def errors(self) -> tuple[ErrorRow, ...]:
        """In ulps of 1, for each probe."""
        rows = []
        for probe, right, answer in zip(self.probes, self.right, self.answers, strict=True):
            if right.out.shape == answer.shape:
                off = np.abs(np.where(np.isfinite(answer), answer, np.inf) - right.out) / self.eps
                rows.append(ErrorRow(probe.name, float(off.max(initial=0)), float(np.median(off))))
        return tuple(rows)

    def seen(self, i: int) -> str:
        """What is wrong with an answer, in numbers."""
        right, answer, name = self.right[i], self.answers[i], self.probes[i].name
        if answer.shape != right.out.shape:
            return f'probe "{name}": the shape is {answer.shape}, must be {right.out.shape}'
        if not np.isfinite(answer).all():
            return f'probe "{name}": {(~np.isfinite(answer)).mean():.0%} of the outputs are not finite'
        error = np.abs(answer - right.out)
        rms = math.sqrt((error**2).mean())
        return (
            f'probe "{name}": outputs are off by up to {error.max():.2g}, {rms:.2g} in the mean square, '
            f"where rounding explains {right.worst.max():.2g} and {right.spread:.2g}"
        )

    def since(self, i: int) -> int | None:
        """The first token whose output is wrong."""
        right, answer = self.right[i], self.answers[i]
        if answer.shape != right.out.shape:
            return None
        bad = ~(np.abs(answer - right.out) <= right.worst)
        rows = np.flatnonzero(bad.any(axis=(0, 1, 3)))
        return int(rows[0]) if rows.size else None

    def tuned(self, make: Callable[[float], Changes], starts: Sequence[float]) -> Changes | None:
        """The best of these numbers, made better by Newton's steps on the first failed probe, if that is possible."""
        i = next((i for i in self.failed if self.probes[i].random), None)
        if i is None or self.answers[i].shape != self.right[i].out.shape or not np.isfinite(self.answers[i]).all():
            return None

        def rest(x: float) -> Array:
            return self.answers[i] - self.predict(make(x), i).out

        x = min(starts, key=lambda x: float(np.nan_to_num(rest(x) ** 2, nan=np.inf).mean()))
        for _ in range(8):
            here, step = rest(x), 1e-5 * x
            slope = (here - rest(x + step)) / step
            moved = x + float((here * slope).sum() / max(float((slope**2).sum()), 1e-300))
            if not 0.5 * x < moved < 2 * x:
                break
            x = moved
        return make(x)


Named: TypeAlias = tuple[Fault, Changes]


def one_of(judge: Judge, named: Iterable[Named]) -> list[Finding]:
    """The mistake that fits, with the others that do; none if none does."""
    tried = list(named)
    fits = [(judge.ratio(changes), i) for i, (_, changes) in enumerate(tried)]
    fitting = [tried[i] for ratio, i in sorted(fits) if ratio <= 1 and judge.explains(tried[i][1])]
    if not fitting:
        return []
    fault, changes = fitting[0]
    others = dict.fromkeys(other.name for other, _ in fitting if other is not fault)
    return [_finding(judge, fault, changes, tuple(others))]


def two_of(judge: Judge, named: Sequence[Named]) -> list[Finding]:
    """Two mistakes at once: those that change something here, and fit together."""
    short = [i for i in judge.failed if judge.probes[i].k.shape[-2] <= 64] or judge.failed[:1]
    matter = [(f, c) for f, c in named if any(judge.predict(c, i).ratio(judge.right[i].out) > 1 for i in short)]
    pairs = [(a, b) for a, b in itertools.combinations(matter, 2) if a[0] is not b[0] and not set(a[1]) & set(b[1])]
    fits = [(judge.ratio({**a[1], **b[1]}), i) for i, (a, b) in enumerate(pairs)]
    fitting = [pairs[i] for ratio, i in sorted(fits) if ratio <= 1]
    together = [(a, b) for a, b in fitting if judge.explains({**a[1], **b[1]})]
    if not together:
        return []
    others = tuple(f"{a[0].name} with {b[0].name}" for a, b in together[1:4])
    return [_finding(judge, fault, changes, others) for fault, changes in together[0]]


def _finding(judge: Judge, fault: Fault, changes: Changes, others: tuple[str, ...] = ()) -> Finding:
    first = judge.failed[0]
    told = ", ".join(f"{name}={value!r}" for name, value in changes.items())
    evidence = f"{judge.seen(first)}. This mistake gives the numbers of all {len(judge.probes)} probes ({told})."
    return Finding(fault.name, evidence, fault.cause, fault.fix, judge.since(first), others)
