"""Whether a function computes the gradients of attention, softmax or linear, and what it does wrong instead.

A candidate is ``fn(q, k, v, g) -> (dq, dk, dv)``, or with RoPE inside ``fn(q, k, v, g, positions)``, where g is the
gradient of the output, of the shape of q; if its signature has them, ``mask=`` and ``segments=`` as in a forward pass.
A wrong gradient is explained if one known mistake, of the backward pass or of the forward pass that it belongs to,
predicts all its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array
from ..theta import Rope
from .ask import Behaviour, Candidate, Unreadable, ask, last_call
from .attention_evidence import Prediction, first_wrong
from .attention_faults import ATTENTION, BEHAVIOUR, LINEAR
from .backward_faults import BACKWARD
from .explain import Change, Fault
from .floats import UNIT
from .gradients import Backward, Noisy, Roundings, linear_gradients, softmax_gradients
from .questions import LENGTH, ORDERS, Question, Questions
from .report import ErrorRow, Finding, Report
from .tolerance import ANGLE32, OWN
from .truth import Spec

TENSORS = ("dq", "dk", "dv")
_UNSUMMED = "key heads not summed"


# ── Mistakes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _steps(when: Callable[[Spec], bool], *ways: tuple[str, Backward]) -> Callable[..., Iterable[Change]]:
    """Changes of the backward pass, where they matter."""

    def changes(spec: Spec, measured: Any = None) -> Iterable[Change]:
        return [Change(note, {"steps": steps}) for note, steps in ways] if when(spec) else []

    return changes


def _always(spec: Spec) -> bool:
    return True


def _grouped(spec: Spec) -> bool:
    return spec.key_heads < spec.heads


def _turns(spec: Spec) -> bool:
    return spec.rope is not None


_SHARED = (
    Fault(_UNSUMMED, "the gradients of keys and values are those of a part of the query heads",
          "grouped heads: the gradient of one query head, or their mean, taken for that of the key head",
          "sum over the query heads that read a key head", "kernels", "heads",
          _steps(_grouped, ("the first query head of each group", Backward(groups="first")),
                 ("the last query head of each group", Backward(groups="last")),
                 ("the mean over each group", Backward(groups="mean")))),
    Fault("gradients not rotated back", "the gradients of q and k are those of the rotated vectors",
          "the transpose of the rotation is missing in the backward pass", "multiply by Rᵀ at the positions of q and k",
          "kernels", "rotation", _steps(_turns, ("", Backward(turned="not")))),
    replace(ATTENTION["heads tiled"], changes=_steps(_grouped, ("", Backward(groups="tiled")))),
    Fault("gradients of values rotated", "dv is turned by the positions of the keys",
          "the transpose of the rotation is applied to all three gradients", "rotate back dq and dk alone", "kernels",
          "rotation", _steps(_turns, ("", Backward(values=True)))),
    replace(BACKWARD["backward equals forward"], changes=_steps(_turns, ("", Backward(turned="forwards")))),
    replace(ATTENTION["positions ignored"],
            changes=_steps(_turns, ("the gradients are turned back by 0, 1, 2, …", Backward(places="counted")))),
    replace(ATTENTION["positions of a batch misread"],
            changes=_steps(_turns, ("the gradients of all rows are turned back by the positions of the first",
                                    Backward(places="first")))),
    replace(BACKWARD["accumulated twice"], changes=_steps(_always, ("", Backward(times=2.0)))),
)  # fmt: skip
_OF_SOFTMAX = (
    Fault("row term missing", "the gradients of q and k do not add up to 0 over the scores of a row",
          "ds = w∘dw: the derivative of the softmax without its second term, D = Σ g∘o", "ds = w∘(dw − D)", "kernels",
          "softmax", _steps(_always, ("", Backward(row_term=False)))),
    Fault("gradient without the scale", "the gradients of q and k are √d times too large",
          "ds is not multiplied with the scale of the scores", "dq = scale·ds·k, dk = scale·dsᵀ·q", "kernels", "scores",
          _steps(lambda spec: spec.scale != 1, ("", Backward(scale=0)))),
    Fault("gradient scaled twice", "the gradients of q and k are √d times too small",
          "q was scaled before, and ds is scaled, too: each gradient needs it once",
          "dq = scale·ds·k, dk = scale·dsᵀ·q", "kernels", "scores",
          _steps(lambda spec: spec.scale != 1, ("", Backward(scale=2)))),
    Fault("softcap's derivative missing", "gradients too large where scores are near the softcap",
          "the derivative of tanh is left out", "multiply ds with 1 − (s/c)²", "kernels", "scores",
          _steps(lambda spec: spec.softcap is not None, ("", Backward(softcap=False)))),
    Fault("not transposed", "dk or dv of a key sums over keys, not over the queries that see it",
          "ds·q or w·g, whose shapes fit where there are as many queries as keys", "dk = scale·dsᵀ·q, dv = wᵀ·g",
          "kernels", "output", _steps(_always, ("", Backward(transposed=False)))),
    Fault("blocks not added up", "gradients lack what all blocks but the last bring",
          "dq is written by each block of keys, or dk and dv by each block of queries, not added to",
          "begin with zeros, and add", "kernels", "blocks",
          _steps(_always, *((f"blocks of {n}", Backward(block=n)) for n in (16, 32, 64, 128)))),
)  # fmt: skip
# What is wrong with a term that is there: each row of dq has another multiple of it. By the mistake to leave it out.
_TERMS = {
    "row term missing": Fault(
          "another row term", "in each row of dq, what the second term of ds = w∘(dw − D) brings is multiplied",
          "D with another sign, or of another sum than Σ g∘o = Σ w∘dw", "D = Σ g∘o, summed over the features of a row",
          "kernels", "softmax"),
    "denominator's derivative missing": Fault(
          "another derivative of the denominator", "in each row of dq, what comes by the normaliser is multiplied",
          "dD with another sign, or divided by another power of D", "dD = −Σ g∘o/D", "kernels", "state"),
}  # fmt: skip
_OF_LINEAR = (
    Fault("denominator's derivative missing", "the gradients of q and k lack what comes by way of the normaliser",
          "only the numerator is differentiated", "dD = −Σ g∘o/D, times the plain features", "kernels", "state",
          _steps(_always, ("", Backward(denominator=False)))),
    Fault("feature map's derivative missing", "the gradients of q and k are those of their features",
          "φ′ is left out", "multiply with φ′(q) and φ′(k)", "kernels", "features",
          _steps(_always, ("", Backward(feature_map=False)))),
)  # fmt: skip


def _other_layout(rope: Rope) -> Rope:
    return replace(rope, layout="interleaved" if rope.layout.startswith("half") else "half")


def _with_rope(change: Callable[[Rope], Rope]) -> Callable[[Spec], Spec | None]:
    def other(spec: Spec) -> Spec | None:
        changed = None if spec.rope is None else change(spec.rope)
        return None if changed == spec.rope else replace(spec, rope=changed)

    return other


# The forward pass that a wrong backward pass belongs to: what else may be meant, and None where it changes nothing.
_FORWARD: dict[str, Callable[[Spec], Spec | None]] = {
    "not causal": lambda s: replace(s, causal=False) if s.causal else None,
    "causal by mistake": lambda s: None if s.causal else replace(s, causal=True),
    "window ignored": lambda s: None if s.window is None else replace(s, window=None),
    "softcap missing": lambda s: None if s.softcap is None else replace(s, softcap=None),
    "scale missing": lambda s: None if s.scale == 1 else replace(s, scale=1.0),
    "not rotated": lambda s: None if s.rope is None else replace(s, rope=None),
    "direction": _with_rope(lambda rope: replace(rope, direction=-rope.direction)),
    "wrong pairing": _with_rope(_other_layout),
    "scaling ignored": _with_rope(lambda rope: replace(rope, scaling=None)),
    "attention factor missing": _with_rope(lambda rope: rope.pure),
}  # fmt: skip


def _forward(other: Callable[[Spec], Spec | None], spec: Spec, measured: Any = None) -> Iterable[Change]:
    changed = other(spec)
    return [Change(_OF_FORWARD, {"spec": changed})] if changed else []


_OF_FORWARD = "these are the gradients of a forward pass with this mistake"
_BY_POSITION = _steps(
    lambda s: s.rope is not None and (s.causal or s.window is not None),
    (_OF_FORWARD, Backward(causality="by position")),
)


def _catalogue(own: Sequence[Fault], forward: Mapping[str, Fault]) -> dict[str, Fault]:
    """Mistakes of the backward pass, then those of the forward pass."""
    ways: dict[str, Callable[..., Iterable[Change]]] = {"causal by position": _BY_POSITION}
    ways |= {name: partial(_forward, way) for name, way in _FORWARD.items() if name in forward}
    others = [replace(forward[name], changes=changes) for name, changes in ways.items()]
    return {fault.name: fault for fault in (*own, *_SHARED, *others)}


_EXCHANGED = Fault("gradients exchanged", "the right gradients in the place of others",
                   "the results are returned in another order", "return dq, dk, dv", "kernels", "output")  # fmt: skip

_MULTIPLIED = Fault("gradient times a number", "a gradient is the right one times one number",
                    "another sign, a logarithm of another base, a mean for a sum, or a factor that is left out or "
                    "there twice", "divide by this number: put in the factor that is missing, or leave out the other",
                    "kernels", "output")  # fmt: skip
# In words of their own: what these say of a rotation is no matter of attention.
_OWN = {
    "no gradient": replace(BACKWARD["no gradient"], cause="this input is cut off: detached, a constant to the backward "
                           "pass, or its gradient is not computed, or not returned",
                           fix="compute it: dq = scale·ds·k, dk = scale·dsᵀ·q, dv = wᵀ·g, and return all three"),
    "not finite": replace(BEHAVIOUR["not finite"], symptom="NaN or infinity from finite q, k, v and g",
                          cause="exp of a score that overflows, 0·∞ where keys are hidden, or a division by the sum of "
                          "a row that sees nothing",
                          fix="subtract the maximum of a row before exp, and give hidden keys a weight of 0"),
    "wrong dtype out": replace(BEHAVIOUR["wrong dtype out"], symptom="a gradient has another dtype than its input",
                               cause="it is computed in another dtype, and not cast back",
                               fix="return each gradient in the dtype of its input"),
}  # fmt: skip


class Gradients(NamedTuple):
    """Softmax or linear attention: its gradients, and how these go wrong."""

    subject: str
    truth: Callable[..., tuple[Noisy, Noisy, Noisy]]
    faults: Mapping[str, Fault]


SOFTMAX_GRADIENTS = Gradients("attention, backward", softmax_gradients, _catalogue(_OF_SOFTMAX, ATTENTION))
LINEAR_GRADIENTS = Gradients("linear attention, backward", linear_gradients, _catalogue(_OF_LINEAR, LINEAR))


# ── Questions ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class Asked:
    """A question with the gradient of its output, and what came back."""

    spec: Spec
    question: Question
    g: Array
    answers: dict[str, Array] = field(default_factory=dict)  # in float64, by tensor

    @property
    def arguments(self) -> dict[str, Array]:
        given = {**self.question.arguments, "g": self.g}
        return {name: given[name] for name in ("q", "k", "v", "g", "positions") if name in given}

    def gradients(self, kind: Gradients, roundings: Roundings, fields: Mapping[str, Any]) -> dict[str, Noisy]:
        """What is right, or with other fields what a mistake predicts."""
        spec = fields.get("spec", self.spec)
        steps = {"steps": fields["steps"]} if "steps" in fields else {}
        q, k, v, *positions = self.question.wide()
        g, at = self.g.astype(np.float64), dict(zip(("positions",), positions, strict=False))
        with np.errstate(all="ignore"):
            made = kind.truth(spec, roundings, q, k, v, g, **at, **self.question.options, **steps)
        return dict(zip(TENSORS, made, strict=True))


def softmax_questions(draw: Questions, accepted: set[str]) -> list[Question]:
    """What is asked of the gradients of softmax attention."""
    spec, near = draw.spec, LENGTH
    near += spec.window if spec.window is not None and spec.window <= 2 * LENGTH else 0
    questions = _questions(draw, near)
    if draw.dtype == np.float32:  # exp of scores of a hundred overflows; a narrow dtype would round them beyond use
        sharp = draw.random(SHARP, near, batch=1)
        questions.append(replace(sharp, q=32 * sharp.q))
    questions += [draw.masked("mask", near), draw.padded(near)] if "mask" in accepted else []
    return questions + ([draw.packed(near)] if "segments" in accepted else [])


def linear_questions(draw: Questions) -> list[Question]:
    return _questions(draw, LENGTH)


def _questions(draw: Questions, near: int) -> list[Question]:
    questions = [draw.random("random", near), draw.random("one token", 1), draw.random("a few tokens", 7, batch=2)]
    questions += [draw.random(name, n, batch=1) for name, n in LENGTHS.items()]
    questions += [draw.random("a batch of four", 5, batch=4), _view(draw.random(VIEWS, near))]
    if draw.spec.rope is not None:
        questions += [draw.random("far apart", near, far=True), draw.orders(near)]
    return questions


LENGTHS = {f"{n} tokens": n for n in (64, 128, 130)}
SHARP = "large scores"
VIEWS = "q, k and v with heads and tokens exchanged in memory"


def _view(question: Question) -> Question:
    q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (question.q, question.k, question.v))
    return replace(question, q=q, k=k, v=v)


def _asked(spec: Spec, question: Question) -> Asked:
    """With a gradient at random. Features of relu that are exactly 0 have two derivatives: they are moved."""
    g = np.random.default_rng(question.q.size).standard_normal(question.q.shape).astype(question.q.dtype)
    if spec.feature_map.startswith("relu"):
        q, k = (np.where(x == 0, x.dtype.type(0.5), x) for x in (question.q, question.k))
        question = replace(question, q=q, k=k)
    return Asked(spec, question, g)


def _answered(fn: Candidate, asked: Asked, behaviour: Behaviour) -> Asked:
    """The gradients that a candidate returns, None as zeros, and heads that it did not sum as their sum."""
    like = dict(zip(TENSORS, (asked.question.q, asked.question.k, asked.question.v), strict=True))
    call = f'in the question "{asked.question.name}", q {asked.question.q.shape}, k and v {asked.question.k.shape}'
    others = list[str]()  # dtypes, in words

    def flat(*arrays: Any, **options: Any) -> Array:
        out = fn(*arrays, **options)
        parts = (None, None, None) if out is None else out
        if not isinstance(parts, tuple | list) or len(parts) != 3:
            what = f"{len(parts)} results" if isinstance(parts, tuple | list) else type(parts).__name__
            raise Unreadable(f"returns {what} instead of (dq, dk, dv)", last_call(), "gradients")
        every = [_part(name, x, like[name], behaviour) for name, x in zip(TENSORS, parts, strict=True)]
        differ = [(name, x) for name, x in zip(TENSORS, every, strict=True) if x.dtype != like[name].dtype]
        others.extend(f"{name} is {x.dtype}, the input {like[name].dtype}" for name, x in differ)
        return np.concatenate([x.ravel() for x in every])

    seen = Behaviour()
    out = ask(flat, asked.arguments, asked.question.options, call, seen).astype(np.float64)
    seen.pop("wrong dtype out", None)  # of all three together: it does not say which
    for name, observation in (seen | ({"wrong dtype out": ", ".join(others)} if others else {})).items():
        behaviour.setdefault(name, observation)
    parts = np.split(out, np.cumsum([x.size for x in like.values()])[:-1])
    shaped = {name: part.reshape(x.shape) for (name, x), part in zip(like.items(), parts, strict=True)}
    return replace(asked, answers=shaped)


def _part(name: str, x: Any, like: Array, behaviour: Behaviour) -> Array:
    if x is None:
        return np.zeros_like(like)
    if not isinstance(x, np.ndarray):
        raise Unreadable(f"returns {type(x).__name__} as {name}, which is no NumPy array,", last_call(), "type")
    b, g, m, d = like.shape
    if x.ndim == 4 and x.shape != like.shape and x.shape[1] % g == 0 and x.shape == (b, x.shape[1], m, d):
        evidence = f"{name} has the shape {x.shape}, one for each query head, expected {like.shape}"
        behaviour.setdefault(_UNSUMMED, evidence)
        return x.reshape(b, g, -1, m, d).sum(axis=2, dtype=x.dtype)
    if x.shape != like.shape:
        raise Unreadable(f"returns {name} of shape {x.shape} instead of {like.shape}", last_call(), "shape")
    return x


# ── The check ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class GradientCheck:
    """One run of a check of gradients."""

    kind: Gradients
    dtype: str
    expected: str
    asked: list[Asked] = field(default_factory=list)
    behaviour: Behaviour = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @np.errstate(all="ignore")  # whatever the gradients are
    def report(self, fn: Candidate, spec: Spec, questions: Iterable[Question], grouped: Questions | None) -> Report:
        """Asks everything, key heads that are shared too, and judges the answers."""
        try:
            self._ask(fn, [(spec, question) for question in questions], grouped)
            precision, wrong = self._judged()
            findings = [self._behaviour(name, evidence) for name, evidence in self._watched(fn).items()]
        except Unreadable as error:  # in a first call, or in one that was answered before
            return Report(self.kind.subject, self.expected, "not judged", failure=error.failure())
        if "state between calls" not in self.behaviour:
            findings += self._explained(wrong)
        verdict = "wrong" if findings else "right"
        errors = tuple(self._error_row(name) for name in TENSORS)
        found = tuple(findings)
        return Report(self.kind.subject, self.expected, verdict, found, precision, errors, tuple(self.notes))

    def explained(self, asked: Asked, name: str) -> list[Finding]:
        """What explains a wrong gradient, if that is known: the answer to one question."""
        self.asked, self.roundings = [asked], Roundings.of(self.dtype, True)
        self.right = [asked.gradients(self.kind, self.roundings, {})]
        return [finding for finding in self._explained({name: [asked]}) if finding.fault != "unexplained"]

    def _ask(self, fn: Candidate, listed: Sequence[tuple[Spec, Question]], grouped: Questions | None) -> None:
        """Asks everything; what is refused is a note, unless it is all. Key heads that are shared need not be taken:
        gradients of another shape than that of k are no answer then."""
        refused, errors = dict[str, str](), list[Unreadable]()
        for spec, question in listed:
            try:
                self.asked.append(_answered(fn, _asked(spec, question), self.behaviour))
            except Unreadable as error:
                refused[question.name] = error.reason
                errors.append(error)
        if not self.asked:
            raise errors[0]
        if grouped is not None:
            seen, question = Behaviour(), grouped.random("grouped heads", LENGTH, batch=2)
            try:
                asked = _answered(fn, _asked(grouped.spec, question), seen)
                self.asked += [] if _UNSUMMED in seen else [asked]
            except Unreadable as error:
                seen[_UNSUMMED] = error.reason
            if _UNSUMMED in seen:
                refused[question.name] = seen[_UNSUMMED]
        if refused:
            self.notes.append(f"not taken by the candidate: {', '.join(refused)}; {next(iter(refused.values()))}")

    def _judged(self) -> tuple[str | None, dict[str, list[Asked]]]:
        """The precision, and where each tensor is wrong at the tolerance of the worst one that is accepted."""
        angles = [False, True] if self.dtype == "float64" and self.asked[0].spec.rope is not None else [True]
        for float32 in angles:
            self.roundings = Roundings.of(self.dtype, float32)
            self.right = [asked.gradients(self.kind, self.roundings, {}) for asked in self.asked]
            wrong: dict[str, list[Asked]] = {}
            for asked, right in zip(self.asked, self.right, strict=True):
                for name in TENSORS:
                    if self._prediction(right[name]).ratio(asked.answers[name]) > 1:
                        wrong.setdefault(name, []).append(asked)
            if not wrong:
                return ANGLE32 if float32 and len(angles) > 1 else OWN, wrong
        return None, wrong

    def _prediction(self, gradient: Noisy) -> Prediction:
        return Prediction(gradient.value, gradient.allowed(self.dtype))

    def _watched(self, fn: Candidate) -> Behaviour:
        """What the candidate does beside its arithmetic; among it, whether the first call returns the same again, and
        keeps it during the next."""
        first, right, kept = self.asked[0], self.right[0], list[Any]()

        def keeping(*arrays: Any, **options: Any) -> Any:
            kept.append(fn(*arrays, **options))
            return kept[-1]

        again = _answered(keeping, first, Behaviour()).answers
        parts = [x for x in kept[-1] or () if isinstance(x, np.ndarray)]
        before = [x.copy() for x in parts]
        _answered(fn, replace(first, g=-first.g), Behaviour())
        if any(not np.array_equal(x, y, equal_nan=True) for x, y in zip(before, parts, strict=True)):
            self.behaviour["result overwritten"] = "gradients changed during the next call, with another g"
        for name in TENSORS:
            most = 2 * self._prediction(right[name]).allowed.worst
            same = (np.abs(again[name] - first.answers[name]) <= most) | (again[name] == first.answers[name])
            if not (same | (np.isnan(again[name]) & np.isnan(first.answers[name]))).all():
                self.behaviour["state between calls"] = f"{name} of the same call differs later"
        return self.behaviour

    def _behaviour(self, name: str, evidence: str) -> Finding:
        return {**BEHAVIOUR, **_OWN, **self.kind.faults}[name].finding(evidence)

    def _explained(self, wrong: Mapping[str, list[Asked]]) -> list[Finding]:
        """A finding for each mistake that predicts wrong gradients, those of most tensors first; then what is left."""
        left, findings = dict(wrong), []
        for name in list(left):
            if not any(asked.answers[name].any() for asked in self.asked):
                findings.append(_OWN["no gradient"].finding(f"{name} is zero, or None, in all questions"))
                del left[name]
        known = [(fault, change) for fault in self.kind.faults.values() for change in self._changes(fault)]
        while left:
            fits = [(self._predicted(change.fields, left), fault, change) for fault, change in known]
            where, (names, fault, change) = "all", max(fits, key=lambda fit: len(fit[0]))  # the first of the best
            if not names and not self._special(left):
                fits = [(self._predicted(change.fields, left, part=True), fault, change) for fault, change in known]
                where, (names, fault, change) = "these", max(fits, key=lambda fit: len(fit[0]))
            if not names:
                break
            several = f"{', '.join(names)}: this predicts all numbers in {where} questions"
            if where == "these":
                several += f", the others are right: {', '.join(asked.question.name for asked in left[names[0]])}"
            findings.append(fault.finding("; ".join(filter(None, (several, change.note, self._where(left))))))
            left = {name: asked for name, asked in left.items() if name not in names}
        if times := {name: number for name in left if (number := self._factor(name)) is not None}:
            words = ", ".join(f"{name} is the right one times {number:.4g}" for name, number in times.items())
            some = {name: left[name] for name in times}
            findings.append(_MULTIPLIED.finding(f"{words.replace('-', '−')}; {self._where(some)}"))
            left = {name: asked for name, asked in left.items() if name not in times}
        return findings + ([self._otherwise(left) or self._unexplained(left)] if left else [])

    def _factor(self, name: str) -> float | None:
        """The number that a gradient is too large by, in all questions; None if there is no such number."""
        pairs = [(asked.answers[name], right[name]) for asked, right in zip(self.asked, self.right, strict=True)]
        products = sum(float((answer * right.value).sum()) for answer, right in pairs)
        squares = sum(float(np.square(right.value).sum()) for _, right in pairs)
        factor = products / squares if squares else math.nan
        if not math.isfinite(factor) or abs(factor) < 1e-6 or abs(factor - 1) < 1e-5:
            return None
        fits = all(self._prediction(right.scaled(factor)).ratio(answer) <= 1 for answer, right in pairs)
        return factor if fits else None

    def _otherwise(self, wrong: Mapping[str, list[Asked]]) -> Finding | None:
        """Gradients that are those of another tensor, or have another multiple of one term in each row of dq."""
        right = {id(asked): made for asked, made in zip(self.asked, self.right, strict=True)}
        for name, other in ((name, other) for name in wrong for other in TENSORS if other != name):
            pairs = [(self._prediction(right[id(asked)][other]), asked.answers[name]) for asked in wrong[name]]
            if all(prediction.ratio(answer) <= 1 for prediction, answer in pairs):
                return _EXCHANGED.finding(f"{name} is the right {other}; {self._where(wrong)}")
        for missing, fault in _TERMS.items() if "dq" in wrong else ():
            if missing in self.kind.faults and (words := self._multiple(wrong["dq"], missing)):
                return fault.finding(f"{', '.join(wrong)}: wrong; dq has {words}; {self._where(wrong)}")
        return None

    def _multiple(self, wrong: Sequence[Asked], missing: str) -> str:
        """How much of a term each row of dq has, in words, if that is all that is wrong."""
        (change,), listed = self.kind.faults[missing].changes(wrong[0].spec, None), ""
        for asked in wrong:
            right, without = (asked.gradients(self.kind, self.roundings, x)["dq"] for x in ({}, change.fields))
            error, term = asked.answers["dq"] - right.value, right.value - without.value
            squares = np.square(term).sum(axis=-1, keepdims=True)
            much = (error * term).sum(axis=-1, keepdims=True) / np.where(squares == 0, 1, squares)
            most = sum(self._prediction(x).allowed.worst for x in (right, without)) * (1 + np.abs(much))
            if not (np.abs(error - much * term) <= 2 * most).all():  # not finite, too
                return ""
            some = ", ".join(f"{x:.4g}" for x in 1 + much[0, 0, :4, 0])
            listed = listed or f"{some} … times the term in its first rows, expected once"
        return listed

    def _changes(self, fault: Fault) -> Iterator[Change]:
        """The ways to make a mistake, with key heads that are shared, if some questions have them."""
        specs = sorted({asked.spec for asked in self.asked}, key=lambda spec: spec.key_heads)
        yield from fault.changes(specs[0], None)

    def _predicted(self, fields: Mapping[str, Any], wrong: Mapping[str, list[Asked]], part: bool = False) -> list[str]:
        """The wrong tensors that a mistake predicts in every question, or in those alone where they are wrong."""
        names = list(wrong)
        for asked in sorted(self.asked, key=lambda asked: asked not in next(iter(wrong.values()))):  # wrong ones first
            made = asked.gradients(self.kind, self.roundings, self._own(fields, asked))
            names = [
                name for name in names
                if (part and asked not in wrong[name]) or self._prediction(made[name]).ratio(asked.answers[name]) <= 1
            ]  # fmt: skip
            if not names:
                break
        return names

    def _own(self, fields: Mapping[str, Any], asked: Asked) -> Mapping[str, Any]:
        """The fields of a mistake for a question with another number of key heads."""
        if "spec" not in fields:
            return fields
        return {**fields, "spec": replace(fields["spec"], key_heads=asked.spec.key_heads)}

    def _where(self, wrong: Mapping[str, list[Asked]]) -> str:
        """The first wrong tensor, in its first wrong question: which number is wrong, and how many are."""
        name, (asked, *others) = next(iter(wrong.items()))
        right = self.right[self.asked.index(asked)][name]
        first = first_wrong(self._prediction(right), asked.answers[name])
        more = f"; also in {len(others)} other questions" if others else ""
        return f'{name} in the question "{asked.question.name}": {first}{more}'

    def _special(self, wrong: Mapping[str, list[Asked]]) -> str:
        """The mistake that all calls with wrong gradients tell by their kind, if others are right."""
        names = {asked.question.name for some in wrong.values() for asked in some}
        kinds = {VIEWS: "strides ignored", ORDERS: "order of positions matters", SHARP: "softmax overflows"}
        if len(names) == 1 and len(self.asked) > 1 and (fault := kinds.get(*names)):
            return fault
        return "some lengths wrong" if names < LENGTHS.keys() else ""

    def _unexplained(self, wrong: Mapping[str, list[Asked]]) -> Finding:
        """What is wrong in one kind of calls, or without an explanation."""
        where = f"{', '.join(wrong)}: wrong; {self._where(wrong)}"
        if fault := self._special(wrong):
            names = sorted({asked.question.name for some in wrong.values() for asked in some})
            return {**BEHAVIOUR, **ATTENTION}[fault].finding(f"{where}; wrong: {', '.join(names)}")
        if not all(np.isfinite(x).all() for asked in self.asked for x in asked.answers.values()):
            return _OWN["not finite"].finding(where)
        cause, fix = (
            "none of the known mistakes gives these numbers",
            "compare step by step: dv first, dq and dk last",
        )
        return Finding("unexplained", where, cause, fix)

    def _error_row(self, name: str) -> ErrorRow:
        """The errors of a tensor over all questions, in units of the last place of its typical size."""
        out, right = (
            np.concatenate([x.ravel() for x in some])
            for some in ((asked.answers[name] for asked in self.asked), (right[name].value for right in self.right))
        )
        off, ulp = np.abs(out - right), 2 * UNIT[self.dtype] * float(np.sqrt(np.square(right).mean()))
        worst, typical = float(np.max(off)), float(np.median(off))
        return ErrorRow(f"{name}, all questions", worst / ulp, typical / ulp, worst)
