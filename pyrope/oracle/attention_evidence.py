"""Which mistakes predict what a candidate for attention answered: the evidence that wrong answers are explained by.

What is right, and what each mistake would return, are computed in float64. An answer fits a prediction if no output is
further off than rounding explains, and far less than from what is right.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array
from .ask import Candidate, Unreadable, last_call
from .attention_faults import Measurements, in_words
from .attention_steps import LinearSteps, Parts, Steps, incremental, run
from .explain import Change, Fault, Hypothesis, Suspect
from .floats import NARROW, UNIT
from .questions import MANY, Question
from .report import ErrorRow
from .tolerance import Allowed, attention_grades
from .truth import Spec

_PAIRS = 1000  # how many pairs of mistakes are tried at most, …
_EFFORT = 3e7  # … and how much work is put into them, in the unit of `Question.effort`
_USUAL = 3  # how many ways to make a mistake are tried on a part of the calls
# What questions may differ in.
_PROPERTIES: dict[str, Callable[[Question], Any]] = {
    "rows": lambda question: question.q.shape[0],
    "queries": lambda question: question.q.shape[-2],
    "keys": lambda question: question.k.shape[-2],
    "queries and keys": lambda question: "fewer" if question.q.shape[-2] < question.k.shape[-2] else "as many",
    "way to call": lambda question: "step by step" if question.calls else "at once",
    "options": lambda question: ", ".join(question.options) or "none",
}
# Mistakes of many sizes, that are hardly made together with another one: not tried in pairs.
_ALONE = {"online", "table", "diagonal", "dropped", "sinks"}


@dataclass(frozen=True)
class Kind:
    """Softmax or linear attention: what is right, how far off it may be, and how it goes wrong."""

    subject: str
    steps: Steps | LinearSteps  # the right ones, which a mistake changes
    truth: Callable[..., Array]  # (spec, q, k, v, …) -> the right output
    bounds: Callable[..., Allowed]  # (spec, dtype, grade, parts, positions, random)
    narrow_grades: tuple[str, ...]  # of float16 and bfloat16, best first
    faults: Mapping[str, Fault]
    low: Fault  # what noise above the dtype's is called
    measure: Callable[[AttentionEvidence, Candidate | None], Measurements]
    response: Callable[[AttentionEvidence], tuple[str, str]]  # to single scores or features: the mistake, and words


@dataclass(frozen=True, eq=False)
class Exam:
    """What a candidate is asked, and what is right."""

    kind: Kind
    expected: str  # in words
    spec: Spec
    dtype: str  # its name
    questions: Sequence[Question]
    notes: tuple[str, ...] = ()
    prefill: bool = False  # whether a candidate may mask fewer queries than keys from the top left

    @property
    def grades(self) -> tuple[str, ...]:
        """What the precision may be, best first."""
        return attention_grades(self.dtype, self.spec.rope, self.kind.narrow_grades)

    @functools.cached_property
    def right(self) -> list[tuple[Array, Parts]]:
        """The truth, and what the right steps go through, for each question."""
        return [(self.truth(question), self.run({}, question)) for question in self.questions]

    def truth(self, question: Question) -> Array:
        """The right answer."""
        with np.errstate(all="ignore"):
            return self.kind.truth(self.spec, *question.wide(), **question.options)

    def known(self, measured: Measurements) -> list[Suspect]:
        """The ways to make each known mistake, with the numbers that were measured."""
        return [(fault, change) for fault in self.kind.faults.values() for change in fault.changes(self.spec, measured)]

    def run(self, fields: Mapping[str, Any], question: Question) -> Parts:
        """The right steps, with these fields changed."""
        return run(self.spec, replace(self.kind.steps, **fields), *question.wide(), **question.options)

    def output(self, fields: Mapping[str, Any], question: Question) -> Array:
        """What a candidate with these changes answers, call by call if it is asked so."""
        if not question.calls:
            return self.run(fields, question).out
        if fields.get("output") == "transposed":
            return np.empty(0)  # calls of several lengths do not make one array
        step = incremental(self.spec, replace(self.kind.steps, **fields))()
        return call_by_call(step, question.calls, question.wide())

    def prediction(self, question: Question, out: Array) -> Prediction:
        """The truth about a question, and how far off an answer of the worst grade that there is may be."""
        with np.errstate(all="ignore"):
            return Prediction(out, self.allowed(self.grades[-1], question, self.run({}, question)))

    def allowed(self, grade: str, question: Question, parts: Parts) -> Allowed:
        return self.kind.bounds(self.spec, self.dtype, grade, parts, question.positions, question.random)


def call_by_call(step: Candidate, calls: Sequence[int], arguments: Iterable[Array]) -> Array:
    """What a candidate with a cache returns for the tokens of an array, so many in each call."""
    stops = np.cumsum(calls)[:-1]
    cut = [np.split(x, stops, axis=-2 if x.ndim > 2 else -1) for x in arguments]
    return np.concatenate([_array(step(*part)) for part in zip(*cut, strict=True)], axis=-2)


def _array(result: Any) -> Array:
    if not isinstance(result, np.ndarray):
        what = "nothing" if result is None else f"{type(result).__name__}, which is no NumPy array,"
        raise Unreadable(f"returns {what} from a step of incremental=", last_call(), "type")
    return result


class Prediction(NamedTuple):
    """What an answer must be, and how far off it may be."""

    out: Array
    allowed: Allowed

    def ratio(self, answer: Array) -> float:
        """How far off an answer is: above 1, further than rounding explains."""
        lost = ~np.isfinite(self.out)
        if answer.shape != self.out.shape or (lost != ~np.isfinite(answer)).any():
            return math.inf
        return self.allowed.ratio(np.where(lost, 0, np.abs(np.where(lost, 0, answer) - np.where(lost, 0, self.out))))


def first_wrong(right: Prediction, answer: Array, start: int = 0) -> str:
    """Where an answer is wrong: its first wrong token, with index, the number expected and the number that came. The
    answer begins at this token."""
    with np.errstate(all="ignore"):
        bad = ~(np.abs(answer - right.out) <= right.allowed.worst) & ~(np.isnan(answer) & np.isnan(right.out))
    if not bad.any():
        return "no output by itself is further off than rounding explains, but their mean square is"
    lost = bad & ~np.isfinite(answer)
    tokens = np.flatnonzero(bad.any(axis=(0, 1, 3)))
    b, h, e = (int(i) for i in np.argwhere(bad[:, :, tokens[0]])[0])
    where = f"first at token {start + tokens[0]} of row {b}, head {h}, feature {e}"
    words = f"{where}: expected {right.out[b, h, tokens[0], e]:.6g}, got {answer[b, h, tokens[0], e]:.6g}"
    words += f"; {int(bad.sum())} of {bad.size} outputs are wrong, in {tokens.size} of {bad.shape[2]} tokens"
    for name, axis in (("row", 0), ("head", 1)):
        places = np.flatnonzero(bad.any(axis=tuple({0, 1, 2, 3} - {axis})))
        if places.size < bad.shape[axis]:
            words += f", in {name}{'s' if places.size > 1 else ''} {', '.join(map(str, places))} only"
    if lost.any():
        words += (
            f"; {int(lost.sum())} are not finite, from token {start + np.flatnonzero(lost.any(axis=(0, 1, 3)))[0]} on"
        )
    return words


@dataclass(frozen=True, eq=False)
class AttentionEvidence:
    """The answers of a candidate, judged by the tolerance of a grade."""

    exam: Exam
    answers: Sequence[Array]  # in float64
    grade: str
    description: str = ""  # what is wrong with the answers, if that is described elsewhere
    asks: Callable[[Question], Array] | None = None  # asks the candidate something else; None: it has answered before

    remarks: list[str] = field(default_factory=list, init=False)  # about the search
    _right: dict[int, Prediction] = field(default_factory=dict, init=False)
    _work: dict[str, int] = field(default_factory=lambda: {"done": 0}, init=False)  # in the unit of `Question.effort`

    def right(self, i: int) -> Prediction:
        """What the answer to the i-th question must be; made when it is first asked for."""
        if i not in self._right:
            question, (out, parts) = self.exam.questions[i], self.exam.right[i]
            self._right[i] = Prediction(out, self.exam.allowed(self.grade, question, parts))
        return self._right[i]

    @property
    def holds(self) -> bool:
        """Whether all answers are right."""
        return all(self.right(i).ratio(answer) <= 1 for i, answer in enumerate(self.answers))

    @functools.cached_property
    def failed(self) -> list[int]:
        """The questions whose answers are not right."""
        return [i for i, answer in enumerate(self.answers) if self.right(i).ratio(answer) > 1]

    # ── Explaining them: `explain.Evidence` ──────────────────────────────────────────────────────────────────────────

    def fitting(self, hypotheses: Iterable[Hypothesis]) -> list[Hypothesis]:
        """Those that predict every answer, the nearest one first; if none does, noise of low precision, which no
        prediction meets, if that is how the answers look."""
        tried, ratios, before = self._affordable(list(hypotheses)), [], self._work["done"]
        with np.errstate(all="ignore"):
            for i, h in enumerate(tried):
                if len(h.faults) > 1 and self._work["done"] - before > _EFFORT:
                    self.remarks.append(f"the last {len(tried) - i} of these were left out: they take too long")
                    break
                ratios.append((math.inf if _is_noise(h.fields) else self._ratio(h.fields), i))
        fit = [tried[i] for ratio, i in sorted(ratios) if ratio <= 1]
        return fit or [h for h in tried if _is_noise(h.fields) and len(h.faults) == 1 and self.loses_weights]

    def matters(self, change: Change) -> bool:
        if _is_noise(change.fields) or change.fields.keys() & _ALONE:
            return False
        short = [i for i in self.failed if self.exam.questions[i].short] or self.failed[:1]
        short = sorted(short, key=lambda i: (self.exam.questions[i].k.shape[-2] == 1, self.exam.questions[i].effort))
        return any(self.right(i).ratio(self.exam.output(change.fields, self.exam.questions[i])) > 1 for i in short[:3])

    def _affordable(self, hypotheses: list[Hypothesis]) -> list[Hypothesis]:
        """All single mistakes; of pairs so many as take about a second, those of the usual ways to make each first."""
        most = min(_PAIRS, int(_EFFORT / min(self.exam.questions[i].effort for i in self.failed)))
        if len(hypotheses) <= most or len(hypotheses[0].faults) == 1:
            return hypotheses
        ways: dict[str, dict[str, int]] = {}
        for hypothesis in hypotheses:
            for fault, change in zip(hypothesis.faults, hypothesis.changes, strict=True):
                listed = ways.setdefault(fault.name, {})
                listed.setdefault(change.note, len(listed))

        def unusual(h: Hypothesis) -> int:
            return sum(ways[fault.name][change.note] for fault, change in zip(h.faults, h.changes, strict=True))

        self.remarks.append(f"of {len(hypotheses)} pairs of known mistakes the {most} likeliest were tried")
        return sorted(hypotheses, key=unusual)[:most]

    def predict(self, fields: Mapping[str, Any], i: int) -> Prediction:
        """What the answer to the i-th question is, with these changes."""
        question = self.exam.questions[i]
        parts = self.exam.run(fields, question)
        allowed = self.exam.allowed(self.grade, question, parts)
        if "output" in fields:  # in other places, the bounds of single outputs say nothing
            allowed = allowed._replace(worst=allowed.worst.max())
        if fields.get("batch") == "after another":  # what the rows before bring is not among the weights
            allowed = Allowed(allowed.worst.max())
        if not question.calls:
            return Prediction(parts.out, allowed)
        out = self.exam.output(fields, question)
        if "cache" in fields:  # the parts are those of one call, and say nothing about sums that begin anew
            grown = max(1.0, float(np.abs(out).max() / np.abs(parts.out).max()))
            allowed = Allowed(allowed.worst.max() * grown)
        return Prediction(out, allowed)

    def _ratio(self, fields: Mapping[str, Any]) -> float:
        """The greatest over all questions, or one above 1; infinite for what does not explain the errors."""
        if not self._explains(fields):
            return math.inf
        worst = 0.0
        for i in sorted(range(len(self.answers)), key=lambda i: self.exam.questions[i].effort):
            worst = max(worst, self.predict(fields, i).ratio(self.answers[i]))
            if worst > 1:
                break
        return worst

    def _explains(self, fields: Mapping[str, Any]) -> bool:
        """Whether a mistake leaves less than half of each error, since the bound of one that makes large numbers holds
        any small ones. That is quickly asked: most mistakes do not explain the first."""
        for i in sorted(self.failed, key=lambda i: self.exam.questions[i].effort):
            answer, right, out = self.answers[i], self.right(i), self.exam.output(fields, self.exam.questions[i])
            self._work["done"] += self.exam.questions[i].effort
            if answer.shape != out.shape:
                return False
            if answer.shape != right.out.shape or not np.isfinite(answer).all():
                continue  # as predicted, and not as it should be
            error, rest = np.square(answer - right.out), np.square(answer - out)
            bad = error > np.square(right.allowed.worst)
            bad = bad if bad.any() else np.ones_like(bad)
            if not (rest[bad].mean() < error[bad].mean() / 4 and rest.mean() < error.mean()):
                return False  # the second: one wrong number is not explained by what makes many wrong
        return True

    @property
    def loses_weights(self) -> bool:
        """Whether small weights are lost, among 128 tokens and among 100 of them, and all else is noise of a few times
        what is allowed."""
        ratios = {self.exam.questions[i].name: self.right(i).ratio(self.answers[i]) for i in self.failed}
        if not (ratios.pop(MANY, 0.0) > 1 and all(ratio < 4 for ratio in ratios.values()) and self.scattered):
            return False
        i = next(i for i in self.failed if self.exam.questions[i].name == MANY)
        if not self._lost(self.right(i).out, self.answers[i]):
            return False
        cut = self.exam.questions[i].first(100)
        again = self._asked(cut)
        return again is None or self._lost(self.exam.truth(cut), again)

    def _lost(self, right: Array, answer: Array) -> bool:
        """Whether the small weights of the question MANY, which raise the outputs above −1, are lost by narrow
        sums: those of its first row in bfloat16 alone, those of its second in float16, too. None is gained."""
        if answer.shape != right.shape or not np.isfinite(answer).all():
            return False
        narrow = self.exam.dtype if self.exam.dtype in NARROW else self.exam.spec.low.name
        shares = (answer[:, :, 64:] + 1) / (right[:, :, 64:] + 1)
        kept, lost = (shares[:0], shares) if narrow == "bfloat16" else (shares[:1], shares[1:])
        return bool(-0.25 <= lost.min() < 0.8 and lost.max() <= 1.25 and (abs(kept - 1) < 0.5).all())

    def _asked(self, question: Question) -> Array | None:
        """The answer to another question, if it can be had."""
        try:
            return None if self.asks is None else self.asks(question)
        except Unreadable:
            return None

    @functools.cached_property
    def scattered(self) -> bool:
        """Whether the errors are others when q and k are changed a little, as those of rounding are: those of any other
        mistake stay nearly the same, and so do those of a float32 angle, which position 0 does not have."""
        asked = {i: self.exam.questions[i] for i in self.failed if self.exam.questions[i].random}
        still = [i for i, question in asked.items() if question.positions is not None and not question.positions.any()]
        for i in still or [*asked][:3]:
            question, rng = self.exam.questions[i], np.random.default_rng(i)
            q, k = (
                (x * (1 + 2.0**-6 * rng.standard_normal(x.shape))).astype(x.dtype) for x in (question.q, question.k)
            )
            near = replace(question, q=q, k=k)
            if (answer := self._asked(near)) is None:
                continue
            if not answer.shape == self.answers[i].shape == self.right(i).out.shape:
                return False
            one, two = self.answers[i] - self.right(i).out, answer - self.exam.truth(near)
            if not (one * two).sum() <= 0.5 * math.sqrt(float(np.square(one).sum() * np.square(two).sum())):
                return False  # not finite, too
        return True

    def rounds_to(self, dtype: str) -> bool:
        """Whether the errors look like rounding to this dtype: in nearly all questions that show any, of its size, in
        most outputs, of both signs, in no relation to the right results, and others when q and k change a little."""
        usual = []
        for question, (out, _), answer in zip(self.exam.questions, self.exam.right, self.answers, strict=True):
            if not question.random or question.k.shape[-2] < 3 or answer.shape != out.shape:
                continue
            error, size = (answer - out)[..., -(out.shape[-2] // 2 + 1) :, :], math.sqrt(np.square(out).mean())
            spread = math.sqrt(np.square(error).mean())
            right = out[..., -error.shape[-2] :, :]
            usual.append(
                bool(np.isfinite(error).all())
                and spread >= UNIT[dtype] * size / 32
                and float(np.median(np.abs(error))) >= spread / 20
                and abs(float(error.mean())) <= spread / 3
                and abs(float((error * right).mean())) <= spread * size / 2
            )
        return len(usual) > 0 and sum(usual) >= 0.8 * len(usual) and self.scattered

    def tuned(
        self, fields: Callable[[float], Mapping[str, Any]], starts: Sequence[float], around: float = 2
    ) -> tuple[float, ...]:
        """The best of these numbers, made better by Newton's steps on the first question that failed, if possible, to
        one that is at most so many times as large or as small. None, if all that is asked at once is right."""
        asked = self.exam.questions
        i = next((i for i in self.failed if asked[i].random and not asked[i].calls), None)
        if i is None or self.answers[i].shape != self.right(i).out.shape or not np.isfinite(self.answers[i]).all():
            return ()

        def rest(x: float) -> Array:
            return self.answers[i] - self.exam.output(fields(x), self.exam.questions[i])

        x = first = min(starts, key=lambda x: float(np.nan_to_num(rest(x) ** 2, nan=np.inf).mean()))
        for _ in range(8):
            here, step = rest(x), 1e-5 * x
            slope = (here - rest(x + step)) / step
            moved = x + float((here * slope).sum() / max(float((slope**2).sum()), 1e-300))
            if not first / around < moved < around * first:
                break  # it is none of these numbers: nothing is near, and further off there may be no such number
            x = moved
        return (x,)

    def windows(self) -> tuple[int, ...]:
        """How many keys a causal query may see at most, if the first tokens that are wrong show it."""
        some = set()
        for i in self.failed if self.exam.spec.causal else ():
            question, token = self.exam.questions[i], self.since(i)
            if token and not question.calls and not question.options:  # at the first one it may have begun before
                some.add(question.k.shape[-2] - question.q.shape[-2] + token)
        return tuple(sorted(some))[:4]

    def scales(self) -> str:
        """The scale in calls of several lengths, in words, if it is another in each, and nothing else is wrong."""
        found: dict[int, float] = {}
        for i in self.failed:
            question, part = self.exam.questions[i], self.part([i])
            m = question.k.shape[-2]
            if not question.random or question.calls or m < 3 or m in found:
                continue
            for x in part.tuned(lambda x: {"scale": x}, np.geomspace(1 / 64, 64, 25).tolist()):
                if part.predict({"scale": x}, 0).ratio(part.answers[0]) <= 1:
                    found[m] = x * self.exam.spec.scale
        if len(found) < 2 or max(found.values()) < 1.01 * min(found.values()):
            return ""
        listed = ", ".join(f"{scale:.4g} with {m} keys" for m, scale in sorted(found.items()))
        return f"the scale is {listed}, {self.exam.spec.scale:.4g} expected"

    # ── In a part of the questions ──────────────────────────────────────────────────────────────────────────────────

    def part(self, listed: Sequence[int]) -> AttentionEvidence:
        """The answers to these questions alone."""
        exam = replace(self.exam, questions=[self.exam.questions[i] for i in listed])
        return replace(self, exam=exam, answers=[self.answers[i] for i in listed])

    def alike(self) -> list[Hypothesis]:
        """The single mistakes, each in its usual ways, that predict all of a few answers, if there is enough to see."""
        if max(question.k.shape[-2] for question in self.exam.questions) < 3:
            return []
        faults = [fault for fault in self.exam.kind.faults.values() if fault is not self.exam.kind.low]
        numbers = Measurements(windows=self.windows())
        ways = [(f, change) for f in faults for change in list(f.changes(self.exam.spec, numbers))[:_USUAL]]
        return self.fitting(Hypothesis((fault,), (change,)) for fault, change in ways)

    def separated(self) -> str:
        """What all questions with wrong answers have, and none with a right one, in words."""
        words = []
        for name, of in _PROPERTIES.items():
            wrong = {of(self.exam.questions[i]) for i in self.failed}
            others = (i for i in range(len(self.answers)) if i not in self.failed)
            right = {of(question) for question in (self.exam.questions[i] for i in others) if question.telling}
            if right and not wrong & right and max(len(wrong), len(right)) < 6:
                some = (", ".join(str(x) for x in sorted(part)) for part in (wrong, right))
                words.append("by {}: wrong {}; right {}".format(name, *some))
        return "; ".join(words)

    def multiple(self) -> str:
        """Whether all answers are the right ones times one number, in words."""
        pairs = [(self.right(i).out, answer) for i, answer in enumerate(self.answers)]
        if any(answer.shape != out.shape or not np.isfinite(answer).all() for out, answer in pairs):
            return ""
        factor = sum(float((x * y).sum()) for x, y in pairs) / sum(float((x * x).sum()) for x, _ in pairs)
        near = (factor and self.right(i).ratio(answer / factor) <= 1 for i, (_, answer) in enumerate(pairs))
        return f"all outputs are the right ones times {factor:.6g}" if all(near) else ""

    # ── Describing them ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def eps(self) -> float:
        """One ulp of 1."""
        return 2 * UNIT[self.exam.dtype]

    def errors(self) -> tuple[ErrorRow, ...]:
        """In ulps of 1, for each question."""
        rows = []
        for question, (out, _), answer in zip(self.exam.questions, self.exam.right, self.answers, strict=True):
            if out.shape == answer.shape:
                off = np.abs(np.where(np.isfinite(answer), answer, np.inf) - out)
                worst, typical = float(off.max(initial=0)), float(np.median(off))
                rows.append(ErrorRow(question.name, worst / self.eps, typical / self.eps, worst))
        return tuple(rows)

    def described(self) -> str:
        """What is wrong with the first answer that is wrong, in numbers."""
        if self.description:
            return self.description
        i = self.failed[0]
        (out, allowed), answer, name = self.right(i), self.answers[i], self.exam.questions[i].name
        if answer.shape != out.shape:
            return f'question "{name}": the shape is {answer.shape}, must be {out.shape}'
        where = first_wrong(self.right(i), answer)
        if not np.isfinite(answer).all():
            return f'question "{name}": {(~np.isfinite(answer)).mean():.0%} of the outputs are not finite; {where}'
        error = np.abs(answer - out)
        most = np.unravel_index(int((error / allowed.worst).argmax()), error.shape)  # for its tolerance
        largest, there = f"{error.max():.2g}", f"{error[most]:.2g}"
        words = f'question "{name}": outputs are off by up to {largest}{"" if there == largest else f", by {there}"} '
        words += f"where rounding explains {allowed.worst[most]:.2g}"
        if allowed.mean_square < math.inf:
            mean_square = math.sqrt((error**2).mean())
            words += f", and in the mean square by {mean_square:.2g} instead of {allowed.mean_square:.2g}"
        return f"{words}; {where}"

    def explained_by(self, hypothesis: Hypothesis, k: int) -> str:
        """The evidence for the k-th mistake of a hypothesis that fits."""
        if _is_noise(hypothesis.fields):
            return f"{self.described()}."
        where = f"all {len(self.answers)} questions" if len(self.answers) > 1 else "this case"
        words = in_words(hypothesis.changes[k])
        return f"{self.described()}. This mistake{f' ({words})' if words else ''} gives the numbers of {where}."

    def since(self, i: int) -> int | None:
        """The first token whose output is wrong."""
        (out, allowed), answer = self.right(i), self.answers[i]
        if answer.shape != out.shape:
            return None
        rows = np.flatnonzero((~(np.abs(answer - out) <= allowed.worst)).any(axis=(0, 1, 3)))
        return int(rows[0]) if rows.size else None


def _is_noise(fields: Mapping[str, Any]) -> bool:
    """Whether a change makes noise: low precision, whose last bits cannot be predicted."""
    return "low" in fields
