"""Asking a candidate for attention, and which known mistake gives the numbers that it returned.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from ..backend import Array
from ..theta import Rope
from .attention_faults import BEHAVIOUR, Changes, Fault
from .attention_steps import Case, LinearSteps, Parts, Steps, incremental as stepping, run
from .probe import Unreadable
from .report import ErrorRow, Finding, Report
from .tensors import UNIT

Candidate: TypeAlias = Callable[..., Any]
Begin: TypeAlias = Callable[[], Candidate] | None  # makes candidates with a cache
Named: TypeAlias = tuple[Fault, Changes]
SMALL = ("float16", "bfloat16")
OWN, ANGLES = "the dtype's own", "float32 angles"  # the precision of float32 and float64, and of float64
MANY = "many small weights"  # the probe of which a low-precision sum loses some
BASES = tuple(np.geomspace(10, 1e9, 33).tolist())


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
        ratios = error / np.maximum(self.worst, 1e-300)
        return max(float(ratios.max(initial=0)), math.sqrt((error**2).mean()) / self.spread)


@dataclass(frozen=True)
class Judge:
    """The answers of a candidate, and what can be said about them."""

    probes: Sequence[Probe]
    answers: Sequence[Array]  # in float64
    right: Sequence[Prediction]
    output: Callable[[Changes, int], Array]  # of a mistake, for a probe
    predict: Callable[[Changes, int], Prediction]  # the same, and how far off it may be
    eps: float  # one ulp of 1
    told: tuple[str, ...] = ()  # what is wrong with the answers, if that was said elsewhere

    @functools.cached_property
    def failed(self) -> list[int]:
        """The probes whose answers are not right."""
        return [i for i, (p, a) in enumerate(zip(self.right, self.answers, strict=True)) if p.ratio(a) > 1]

    def ratio(self, changes: Changes) -> float:
        """The greatest over all probes, or one above 1; infinite for what does not explain the errors."""
        if not self.explains(changes):
            return math.inf
        worst = 0.0
        for i in sorted(range(len(self.probes)), key=lambda i: self.probes[i].k.size):
            worst = max(worst, self.predict(changes, i).ratio(self.answers[i]))
            if worst > 1:
                break
        return worst

    def explains(self, changes: Changes) -> bool:
        """Whether a mistake leaves less than half of each error, since the bound of one that makes large numbers holds
        any small ones. That is quickly asked: most mistakes do not explain the first."""
        for i in self.failed:
            answer, right, out = self.answers[i], self.right[i], self.output(changes, i)
            if answer.shape != out.shape:
                return False
            if answer.shape != right.out.shape or not np.isfinite(answer).all():
                continue  # as predicted, and not as it should be
            error, rest = (answer - right.out) ** 2, (answer - out) ** 2
            bad = error > right.worst**2
            bad = bad if bad.any() else np.ones_like(bad)
            if not rest[bad].mean() < error[bad].mean() / 4:
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
        if self.told:
            return self.told[i]
        right, answer, name = self.right[i], self.answers[i], self.probes[i].name
        if answer.shape != right.out.shape:
            return f'probe "{name}": the shape is {answer.shape}, must be {right.out.shape}'
        if not np.isfinite(answer).all():
            return f'probe "{name}": {(~np.isfinite(answer)).mean():.0%} of the outputs are not finite'
        error = np.abs(answer - right.out)
        most = np.unravel_index(int((error / right.worst).argmax()), error.shape)  # for its tolerance
        told = (
            f'probe "{name}": outputs are off by up to {error.max():.2g}, by {error[most]:.2g} '
            f"where rounding explains {right.worst[most]:.2g}"
        )
        if not right.spread < math.inf:
            return told
        return f"{told}, and in the mean square by {math.sqrt((error**2).mean()):.2g} instead of {right.spread:.2g}"

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
            return self.answers[i] - self.output(make(x), i)

        x = first = min(starts, key=lambda x: float(np.nan_to_num(rest(x) ** 2, nan=np.inf).mean()))
        for _ in range(8):
            here, step = rest(x), 1e-5 * x
            slope = (here - rest(x + step)) / step
            moved = x + float((here * slope).sum() / max(float((slope**2).sum()), 1e-300))
            if not 0.5 * first < moved < 2 * first:
                break  # it is none of these numbers: nothing is near, and further off there may be no such number
            x = moved
        return make(x)


@dataclass(frozen=True)
class Task:
    """What a candidate is asked, and how its answers are judged."""

    subject: str
    expected: str  # in words
    case: Case
    dtype: str
    probes: Sequence[Probe]
    steps: Steps | LinearSteps  # the right ones, which a mistake changes
    faults: Mapping[str, Fault]
    measured: tuple[str, ...]  # those with a number in them, which are not tried as they stand
    low: Fault  # what noise above the dtype's is called
    truth: Callable[[Case, Probe], Array]
    bounds: Callable[[Case, str, Probe, Parts, int], tuple[Array, float]]  # of each output, and of the mean square
    small_grades: tuple[str, ...]  # of float16 and bfloat16, best first
    notes: tuple[str, ...] = ()

    @property
    def grades(self) -> tuple[str, ...]:
        """What the precision may be, best first."""
        if self.dtype in SMALL:
            return self.small_grades
        return (OWN, ANGLES) if self.dtype == "float64" and self.case.rope is not None else (OWN,)

    @functools.cached_property
    def right(self) -> list[tuple[Array, Parts]]:
        """The truth, and what the right steps go through, for each probe."""
        return [(self.truth(self.case, probe), self.run({}, probe)) for probe in self.probes]

    @property
    def known(self) -> list[Named]:
        """The mistakes that are tried as they stand."""
        plain = (fault for fault in self.faults.values() if fault.name not in self.measured)
        return [(fault, changes) for fault in plain for changes in fault.changes(self.case)]

    def run(self, changes: Changes, probe: Probe) -> Parts:
        return run(self.case, replace(self.steps, **changes), *probe.wide(), **probe.options)

    def judge(self, answers: Sequence[Array], level: int, told: tuple[str, ...] = ()) -> Judge:
        """By the tolerance of one of the grades."""
        bounds = functools.partial(self.bounds, self.case, self.dtype)

        def output(changes: Changes, i: int) -> Array:
            probe = self.probes[i]
            if not probe.pieces:
                return self.run(changes, probe).out
            return step_by_step(stepping(self.case, replace(self.steps, **changes))(), probe, probe.wide())

        def predict(changes: Changes, i: int) -> Prediction:
            probe = self.probes[i]
            parts = self.run(changes, probe)
            worst, spread = bounds(probe, parts, level)
            out = output(changes, i) if probe.pieces else parts.out
            return Prediction(out, worst.max() if "output" in changes else worst, spread)

        known = zip(self.probes, self.right, strict=True)
        right = [Prediction(out, *bounds(probe, parts, level)) for probe, (out, parts) in known]
        return Judge(self.probes, answers, right, output, predict, 2 * UNIT[self.dtype], told)

    def judges(self, answers: Sequence[Array]) -> list[Judge]:
        """One for each grade."""
        return [self.judge(answers, level) for level in range(len(self.grades))]


def examine(
    task: Task, fn: Candidate, incremental: Begin, explain: Callable[[Judge], list[Finding]], asked: int
) -> Report:
    """Asks a candidate, twice, and says what came of it. What is wrong is said by ``explain``; a grade below the one
    that was asked for, one of the task's, is wrong too."""
    try:
        answers, wrong = ask(fn, incremental, task.probes)
        judges = task.judges(answers)
        wrong += remembers(fn, incremental, judges[-1])
    except Unreadable as error:
        return Report(task.subject, task.expected, "wrong", (behaviour("fails", str(error)),), notes=task.notes)
    reached = next((level for level, judge in enumerate(judges) if not judge.failed), None)
    if reached is None:
        judge = judges[-1]
        named = nothing_finite(judge) or explain(judge) or low_precision(task, judge)
        wrong += named or symptoms(fn, task, judge)
    elif reached > asked:
        told = f'; the grade "{task.small_grades[asked]}" was asked for, "{task.grades[reached]}" was found'
        wrong += _too_rough(task, judges[asked], told)
    precision, verdict = None if reached is None else task.grades[reached], "wrong" if wrong else "right"
    return Report(task.subject, task.expected, verdict, tuple(wrong), precision, judges[-1].errors(), task.notes)


# Asking


def behaviour(name: str, evidence: str) -> Finding:
    return Finding(name, evidence, BEHAVIOUR[name].cause, BEHAVIOUR[name].fix)


def call(fn: Candidate, *arguments: Array, told: str = "", **options: Array) -> Array:
    """What a candidate returns, of any float dtype; it is said in words when there is no such thing."""
    told = told or f"for q of shape {arguments[0].shape}, k and v {arguments[1].shape}, dtype {arguments[0].dtype}"
    try:
        with np.errstate(all="ignore"):
            out = np.asarray(fn(*arguments, **options))
    except (Exception, SystemExit) as error:
        lines = str(error).splitlines() or ["no message"]
        words = lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1].strip()}"
        raise Unreadable(f"it raises {type(error).__name__} ({words}) {told}") from error
    if out.dtype.kind != "f" and out.dtype.name not in UNIT:
        raise Unreadable(f"it returns {out.dtype} {told}")
    return out


def _answer(fn: Candidate, incremental: Begin, probe: Probe, given: list[Array]) -> Array:
    told = f'in the probe "{probe.name}", q {probe.q.shape}, k and v {probe.k.shape}, {probe.q.dtype}'
    if probe.pieces and incremental is not None:
        begin = incremental
        return call(lambda *arguments: step_by_step(begin(), probe, arguments), *given, told=told)
    return call(fn, *given, told=told, **{name: x.copy() for name, x in probe.options.items()})


def ask(fn: Candidate, incremental: Begin, probes: Sequence[Probe]) -> tuple[list[Array], list[Finding]]:
    """The candidate's answers, in float64, whether it changed what it was given, and whether its dtype is another."""
    answers: list[Array] = []
    wrong: dict[str, Finding] = {}
    for probe in probes:
        given = [x.copy() for x in probe.arguments]
        answer = _answer(fn, incremental, probe, given)
        if not probe.pieces and any((a != b).any() for a, b in zip(given, probe.arguments, strict=True)):
            told = f'probe "{probe.name}": q, k or v changed'
            wrong.setdefault("inputs changed", behaviour("inputs changed", told))
        if answer.dtype != probe.q.dtype:
            told = f'probe "{probe.name}": q is {probe.q.dtype}, the result {answer.dtype}'
            wrong.setdefault("wrong dtype out", behaviour("wrong dtype out", told))
        answers.append(answer.astype(np.float64))
    return answers, list(wrong.values())


def remembers(fn: Candidate, incremental: Begin, judge: Judge) -> list[Finding]:
    """Whether the same calls in the reverse order, the last one twice in a row, return something else. Two right
    results may differ, by twice what rounding explains."""
    for i in reversed(range(len(judge.probes))):
        probe, before, right = judge.probes[i], judge.answers[i], judge.right[i]
        again = _answer(fn, incremental, probe, [x.copy() for x in probe.arguments]).astype(np.float64)
        if again.shape != before.shape:
            told = f"the shape was {before.shape}, then {again.shape}"
        else:
            with np.errstate(all="ignore"):
                near = np.abs(again - before) <= 2 * (
                    right.worst if before.shape == right.out.shape else right.worst.max()
                )
            off = ~(near | (again == before) | (np.isnan(again) & np.isnan(before)))
            told = f"{int(off.sum())} of {off.size} outputs differ" if off.any() else ""
        if told:
            return [behaviour("state between calls", f'probe "{probe.name}", the same call twice: {told}')]
    return []


def nothing_finite(judge: Judge) -> list[Finding]:
    """Outputs that are all NaN or infinite say nothing about what led to them."""
    if any(np.isfinite(answer).any() for answer in judge.answers):
        return []
    return [behaviour("not finite", "no output of any probe is finite")]


def step_by_step(step: Candidate, probe: Probe, arguments: Sequence[Array]) -> Array:
    stops = np.cumsum(probe.pieces)[:-1]
    cut = [np.split(x, stops, axis=-2 if x.ndim > 2 else -1) for x in arguments]
    return np.concatenate([np.asarray(step(*part)) for part in zip(*cut, strict=True)], axis=-2)


# Names for what is wrong


def beyond(task: Task, judge: Judge, measured: Iterable[Named]) -> list[Finding]:
    """If no mistake fits as it stands: those with a number in them, or two at once."""
    return one_of(judge, more := list(measured)) or two_of(judge, [*task.known, *more])


def other_bases(task: Task, judge: Judge, ropes: Iterable[Rope], starts: Sequence[float] = BASES) -> Iterator[Named]:
    """The bases that fit best, for these ropes."""
    if all(judge.probes[i].k.shape[-2] > 64 for i in judge.failed):
        return  # another base would show among fewer tokens
    for rope in ropes:
        changes = judge.tuned(functools.partial(_with_base, rope), starts)
        if changes is not None:
            yield task.faults["another base"], changes


def _with_base(rope: Rope, base: float) -> Changes:
    return {"rope": replace(rope, base=base)}


def one_of(judge: Judge, named: Iterable[Named]) -> list[Finding]:
    """The mistake that fits, with the others that do; none if none does."""
    tried = list(named)
    fits = [(judge.ratio(changes), i) for i, (_, changes) in enumerate(tried)]
    fitting = [tried[i] for ratio, i in sorted(fits) if ratio <= 1]
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
    together = [pairs[i] for ratio, i in sorted(fits) if ratio <= 1]
    if not together:
        return []
    others = tuple(f"{a[0].name} with {b[0].name}" for a, b in together[1:4])
    return [_finding(judge, fault, changes, others) for fault, changes in together[0]]


def _finding(judge: Judge, fault: Fault, changes: Changes, others: tuple[str, ...] = ()) -> Finding:
    first = judge.failed[0]
    told = ", ".join(f"{name}={value!r}" for name, value in changes.items())
    where = f"all {len(judge.probes)} probes" if len(judge.probes) > 1 else "this case"
    evidence = f"{judge.seen(first)}. This mistake gives the numbers of {where} ({told})."
    return Finding(fault.name, evidence, fault.cause, fault.fix, judge.since(first), others)


def lost_weights(task: Task, judge: Judge) -> list[Finding]:
    """A sum in low precision: small weights are lost, and all else is noise of a few times what is allowed."""
    ratios = {judge.probes[i].name: judge.right[i].ratio(judge.answers[i]) for i in judge.failed}
    return _too_rough(task, judge) if ratios.pop(MANY, 0.0) > 1 and all(ratio < 4 for ratio in ratios.values()) else []


def low_precision(task: Task, judge: Judge) -> list[Finding]:
    """Low precision inside: all would be well, or nearly so, at the tolerance of a smaller dtype."""
    smaller = [name for name in ("float32", *SMALL) if UNIT[name] > judge.eps]
    judges = {name: replace(task, dtype=name).judges(judge.answers)[-1] for name in smaller}
    for fits in (lambda again: not again.failed, functools.partial(lost_weights, task)):
        for name, again in judges.items():
            if fits(again):
                return _too_rough(task, judge, f", but within what {name} allows")
    return []


def _too_rough(task: Task, judge: Judge, told: str = "") -> list[Finding]:
    fault, first = task.low, judge.failed[0]
    return [Finding(fault.name, judge.seen(first) + told + ".", fault.cause, fault.fix, judge.since(first))]


def symptoms(fn: Candidate, task: Task, judge: Judge) -> list[Finding]:
    """What can be said without a mistake that fits: who influences whom, by changing keys that must not matter."""
    probe, right = judge.probes[0], judge.right[0]
    h, g, found = probe.q.shape[1], probe.k.shape[1], []

    def moved(keys: tuple[Any, ...], outputs: tuple[Any, ...]) -> bool:
        k, v = probe.k.copy(), probe.v.copy()
        k[keys], v[keys] = -k[keys], -v[keys]
        before = judge.answers[0]
        try:
            again = call(fn, probe.q.copy(), k, v, *probe.arguments[3:]).astype(np.float64)
        except Unreadable:  # though it took the same shapes before
            return False
        if again.shape != right.out.shape or before.shape != again.shape:
            return False
        with np.errstate(all="ignore"):
            off = np.abs(again - before) > 2 * np.broadcast_to(right.worst, before.shape)
        return bool(off[outputs].any())

    every, own = slice(None), slice(0, h - h // g)
    last = (every, every, slice(-1, None)), (every, every, slice(0, -1))
    trials: list[tuple[str, tuple[Any, ...], tuple[Any, ...], str]] = [
        ("batch rows mixed", (slice(1, None),), (0,), "keys of other rows change the first row"),
        ("heads mixed", (every, g - 1), (every, own), "keys of the last head change other heads"),
        ("not causal", *last, "the last key changes outputs before it"),
    ]
    for name, keys, outputs, told in trials:
        if (name != "not causal" or task.case.causal) and moved(keys, outputs):
            fault = task.faults[name]
            found.append(Finding(name, f"{judge.seen(judge.failed[0])}; {told}.", fault.cause, fault.fix))
    if found:
        return found
    evidence = judge.seen(judge.failed[0])
    if not np.isfinite(judge.answers[judge.failed[0]]).all():
        return [behaviour("not finite", evidence)]
    return [Finding("unexplained", evidence, "none of the known mistakes gives these numbers", "compare step by step")]
