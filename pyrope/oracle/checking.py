"""`check_rotation` and `assert_rotation`: is a black box the rotation that a Rope means, and if not, what went wrong?

The truth comes from the definition and from exact tables, never from the candidate. A mistake is named only if it
predicts every output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .. import checks
from ..theta import LENGTH_DEPENDENT, Rope, check_rope
from .ask import Candidate, Unreadable, counts
from .backward_faults import BACKWARD
from .drawings import Readings, Side
from .explain import Change, Fault
from .floats import UNIT, Float64, Int64
from .probe import HARMLESS, Probe
from .readings import rotation_readings
from .recipes import recipe_of
from .report import ErrorRow, Finding, Report
from .rotation_evidence import BY_ROW
from .rotation_explainer import EXPLICABLE, SPOILING, RotationExplainer
from .rotation_faults import FAULTS, Measurements
from .sample import Graded, Sample, expected_of, graded, take_sample
from .tolerance import ANGLE32, BOTH, LOW_ANGLE, LOW_TABLES, ONCE, bound, decides_up_to, grades, pair_errors
from .trials import LENGTHS, POSITIONS, Expectation, at_the_switch, first_wrong, run_trials
from .truth import rotated

_LOW = tuple(f"{dtype} {what}" for dtype in ("bfloat16", "float16") for what in ("inverse", "positions", "angle"))
_NEGATED = "gradient negated"

_MADE = {  # how angles are made, where the bounds of a float32 power do not hold
    "logarithm": "the frequencies are worse than by a float32 power, and as good as by a float32 logarithm",
    "phase": "the angles are off by up to 2⁻³² of a turn for each position, as those of a phase of 32 bits are",
}


def check_rotation(
    fn: Candidate, rope: Rope, *, dtype: Any = np.float32, max_position: int | None = None, grade: str | None = None,
    equivalent: str = "right", min_position: int = 0, batched: bool = False, backward: bool = False,
) -> Report:  # fmt: skip
    """Whether fn(x, positions) -> rotated x, a black box on NumPy arrays, is the rotation of this rope.

    >>> import pyrope
    >>> rope, other = Rope(64, 500000.0, "half"), Rope(64, 10000.0, "half")
    >>> check_rotation(lambda x, positions: pyrope.rotate(x, positions, rope), rope).verdict
    'right'
    >>> check_rotation(lambda x, positions: pyrope.rotate(x, positions, other), rope).faults
    ('wrong base',)

    ``dtype`` is that of x; ``max_position`` the largest position to be tried: 131071, or what the length of the rope
    allows. A rope with axes is tried with positions (axes, n), as `rotate` takes them. Any precision from a float32
    angle on is right; ``grade``, one of `tolerance.GRADES`, asks for a better one. Features in another order, with the
    same scores, are "equivalent", which is right unless ``equivalent="wrong"`` refuses it. ``min_position`` is for
    candidates that take negative positions: it says down to which. ``batched`` claims that it takes positions (b, n) or
    (b, 1, n) for x (b, h, n, d), each row of the batch its own.

    With ``backward``, fn(g, positions) -> gradient of x is its backward pass, where g is the gradient of the result:
    Rᵀ·g, the rotation of ``rope.transposed``. None is taken for zeros, and no other order of features is right.
    """
    scaling = check_rope(rope).scaling
    if max_position is None and isinstance(scaling, LENGTH_DEPENDENT):
        max_position = max(int(scaling.length or 0) - 1, 1)  # the table may depend on the largest position
    probe = Probe(fn, rope.head_dim, dtype, max_position, None if rope.axes is None else rope.axes.count)
    if grade is not None:
        checks.choice("grade", grade, grades(probe.dtype))
    least = checks.integer("min_position", min_position, -checks.MAX_POSITION)
    if least > 0:
        raise ValueError(f"min_position must be 0, or negative where such positions are taken, was {least}")
    batched = checks.flag("batched", batched)
    strict = checks.choice("equivalent", equivalent, ("right", "wrong")) == "wrong"
    task = _Task("rotation", repr(rope), FAULTS)
    if checks.flag("backward", backward):
        rope, strict, task = rope.transposed, True, _Task("rotation, backward", f"the transpose of {rope!r}", BACKWARD)
        probe.fn = _with_gradient(fn, probe.notes)
    try:
        return _Check(probe, rope, grade or grades(probe.dtype)[-1], strict, least, batched, task).report()
    except Unreadable as error:
        failure = error.failure()
        fix = (_short_table(probe, error) or failure.fix) + _hint(rope)
        return Report(task.subject, task.expected, "not judged", failure=replace(failure, fix=fix))


def _short_table(probe: Probe, error: Unreadable) -> str:
    """What to do about a candidate that raises for large positions alone, whatever it says; empty if it does not."""
    if error.kind != "raised" or "took longer" in error.reason or isinstance(error.__cause__, MemoryError):
        return ""

    def takes(m: int) -> bool:
        try:
            probe.call(probe.random(3, 4), [0, min(1, m), m // 2, m])
        except Unreadable:
            return False
        return True

    low, high = 1, probe.max_position
    if takes(high) or not takes(low):
        return ""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if takes(middle) else (low, middle)
    short = f"if its table is meant to end there, give max_position={low} (--max-position {low}); if not, let it grow"
    return f"it takes positions up to {low}, and raises from {high} on: {short}"


def _hint(rope: Rope) -> str:
    """What a function may not have expected of this rope: positions of several axes, or heads that turn in part."""
    if rope.axes is not None:
        shape = f"this rope has {rope.axes.count} axes, so positions are ({rope.axes.count}, n)"
        text = "check dataclasses.replace(rope, axes=None), or say --head-dim, --base and --layout for --config"
        return f"; {shape}: for a function of text, {text}"
    if rope.placement == "suffix":
        part = f"Rope({rope.width}, {rope.base:g}, {rope.layout!r}{', scaling=…' if rope.scaling else ''})"
        shape = f"x has whole heads of {rope.head_dim} features, of which the last {rope.width} turn"
        return f"; {shape}: for a function of these alone, check {part}"
    return ""


def assert_rotation(fn: Candidate, rope: Rope, **options: Any) -> None:
    """Raises `Mismatch`, an AssertionError with the report of `check_rotation`, unless that is right or equivalent;
    `NotJudged`, from the candidate's own exception, if it could not be judged."""
    __tracebackhide__ = True
    check_rotation(fn, rope, **options).raise_unless_ok()


class _Task(NamedTuple):
    """What a candidate is asked to do, in words, and how that goes wrong."""

    subject: str
    expected: str
    faults: Mapping[str, Fault]


def _with_gradient(fn: Candidate, notes: list[str]) -> Candidate:
    """fn, with zeros for None, by which a framework says that there is no gradient, and a note about it."""
    note = "it returns None, which is taken for a gradient of zeros"

    def candidate(g: Any, positions: Any) -> Any:
        result = fn(g, positions)
        if result is None and note not in notes:
            notes.append(note)
        return np.zeros_like(g) if result is None else result

    return candidate


def _from_zero(positions: Int64) -> Int64:
    """Positions of a call, of which each run that counts up by one begins at 0: what is left if an offset is lost."""
    rows = np.arange(positions.shape[-1])
    begins = np.diff(positions, prepend=positions[..., :1]) != 1
    return rows - np.maximum.accumulate(np.where(begins, rows, 0), axis=-1)


def _finding(name: str, evidence: str) -> Finding:
    return FAULTS[name].finding(evidence)


@dataclass
class _Check:
    """One run of `check_rotation`."""

    probe: Probe
    rope: Rope
    worst: str  # the worst grade that is accepted
    strict: bool  # whether features in another order are wrong
    least: int  # the least position that is tried, negative or 0
    batched: bool  # whether positions of their own for each row of a batch are tried
    task: _Task
    explainer: RotationExplainer = field(init=False)
    by_call: bool = False  # whether a table depends on the largest position of its call
    order: Float64 | None = None  # of an equivalent candidate: what brings its outputs into the expected order

    @np.errstate(invalid="ignore", over="ignore")  # whatever the candidate returns
    def report(self) -> Report:
        probe, rope = self.probe, self.rope
        probe.behave()
        if isinstance(rope.scaling, LENGTH_DEPENDENT) and probe.behaviour.pop("depends on the length", ""):
            self.by_call = True  # as it should, or may
            probe.notes.append(
                "its frequencies follow the largest position of each call: judged were only calls that hold position "
                f"{probe.max_position}, where they must be those of the expected length, and some near the original one"
            )
        placed = self._placed()
        sample, verdict = take_sample(probe, rope), "right"
        notes = list(probe.notes)
        result = graded(sample, rope, probe.dtype)
        if result.grade is None and (equivalent := self._unpermuted(sample)):
            self.order, order = equivalent
            sample = sample._replace(y=np.where(np.isfinite(sample.y), sample.y, 0) @ self.order)
            verdict, result = "equivalent", graded(sample, rope, probe.dtype)
            notes.append(order)
        if result.grade is None and (short := self._in_short_calls(len(sample.at))):
            sample, result = short, graded(short, rope, probe.dtype)
        self.explainer = RotationExplainer(probe, rope, sample, self.worst, self.task.faults)
        result = self._with_recurrence(result)
        if result.grade is not None:
            self.explainer.expected = Expectation(partial(self._expected, result.by))
        grade, findings = result.grade, list(self._behaviour())
        if placed is not None:
            findings.append(placed)
        elif grade is None:
            findings += self._explained(result.ratios[grades(probe.dtype)[-1]], notes)
            names = {finding.fault for finding in findings}
            grade = LOW_ANGLE if any(name.startswith(_LOW) for name in names) else None
            if names - probe.behaviour.keys():
                findings = [finding for finding in findings if finding.fault not in EXPLICABLE]
        elif result.by == "logarithm" and (recursive := self.explainer.recursive()):
            findings.append(recursive)
        elif grades(probe.dtype).index(grade) > grades(probe.dtype).index(self.worst):
            findings.append(self._coarse(grade, result.ratios[self.worst]))
        elif grade in (ANGLE32, BOTH) and self.explainer.recurrence():
            notes.append("each angle is the one before times a ratio, as in ggml: about as good as a float32 angle")
        elif result.by in _MADE:
            notes.append(_MADE[result.by])
        if placed is None:
            findings = self._with_some_calls([self._with_place(finding) for finding in findings], notes)
        if verdict == "equivalent" and self.strict:
            notes.remove(order)
            findings.append(self.task.faults[self._name_of_order()].finding(order))
        verdict = "wrong" if findings else verdict
        notes += self._undecided(grade)
        rows, readings = self._rows(), self._readings(result, grade)
        subject, expected, _ = self.task
        return Report(subject, expected, verdict, tuple(findings), grade, rows, tuple(notes), readings=readings)

    def _readings(self, result: Graded, grade: str | None) -> Readings | None:
        """What the page of the report shows: nothing, if the candidate cannot be read once more."""
        order = grades(self.probe.dtype)
        accepted = result.grade is not None and order.index(result.grade) <= order.index(self.worst)
        beyond = None if accepted else result.ratios[self.worst]
        precision = Side("precision", f"{self.worst}, or better", grade or "worse", accepted)
        measured = getattr(self.explainer, "measured", None)
        try:
            return rotation_readings(self.probe, self.rope, self.explainer.sample, measured, beyond, precision)
        except Exception:  # the verdict does not depend on this
            return None

    def _behaviour(self) -> list[Finding]:
        return [_finding(name, evidence) for name, evidence in self.probe.behaviour.items()]

    def _placed(self) -> Finding | None:
        """A mistake in which rows turn by the positions of other rows, if it predicts two calls that show whose: then
        nothing else that was seen of rows and lengths is to blame."""
        probe, behaviour = self.probe, self.probe.behaviour
        odd = behaviour.keys() & {*BY_ROW, "depends on the length"}
        if not odd or behaviour.keys() - odd - HARMLESS or probe.max_position < 30 or self.by_call:
            return None
        calls = [np.array([9, 4, 17, 17, 30, 4, 12]), np.array([0, 1, 2, 0, 1, 2, 3])]
        calls += [np.array([5, 6, 7, 2, 3, 4, 9])] * counts()  # runs that do not begin at 0
        xs, at = [probe.random(2, 7, seed=10 + k) for k in range(len(calls))], [probe.apart(one) for one in calls]
        x = [one.astype(np.float64) for one in xs]
        try:
            y = [probe.hand_over(*call) for call in zip(xs, at, strict=True)]
        except Unreadable:
            return None
        allowed, right = 64 * max(probe.unit, UNIT["float32"]), recipe_of(self.rope)
        for name, fault in self.task.faults.items():
            changes = [*fault.changes(self.rope, Measurements())]
            if name == "positions ignored" and counts():
                changes.append(Change("the offset is ignored: positions in a row begin at 0", {"place": _from_zero}))
            for change in changes:
                recipe = replace(right, **change.fields) if change.fields.keys() == {"place"} else right
                if not recipe.by_others(at[-1 if recipe.place is _from_zero else 0]):
                    continue
                predicted = [recipe.predict(*call) for call in zip(x, at, strict=True)]
                if all(np.abs(p - q).max() <= allowed * right.factor * 4 for p, q in zip(predicted, y, strict=True)):
                    for seen in odd:
                        del behaviour[seen]
                    truth = right.predict(x[0], at[0])
                    bad = ~(np.abs(y[0] - truth) <= allowed * right.factor * 4)
                    where = f"; {first_wrong(truth, y[0], bad, at[0])}" if bad.any() else ""
                    note = f"{change.note}, " if change.note else ""
                    return fault.finding(f"{note}as in a call at {', '.join(map(str, calls[0]))}{where}")
        return None

    def _expected(self, by: str, x: Float64, positions: Int64, rope: Rope | None = None) -> tuple[Float64, Float64]:
        """What a call must return, in the candidate's own order of features, and how far off each output may be."""
        worst = grades(self.probe.dtype)[-1]
        truth, allowed = expected_of(x, positions, rope or self.rope, self.probe.dtype, by, (worst,))
        if self.order is None:
            return truth, allowed[worst]
        return truth @ self.order.T, allowed[worst] @ np.abs(self.order).T

    def _with_recurrence(self, result: Graded) -> Graded:
        """ggml's recurrence is the most used RoPE of all: a little worse than a float32 angle, it is taken for one."""
        worst = grades(self.probe.dtype)[-1]
        ratio = result.ratios[worst]
        if result.grade is not None or not 1 < ratio.max() < 4 or not self.explainer.recurrence():
            return result
        return result._replace(grade=worst, ratios={**result.ratios, worst: np.minimum(ratio, 1)})

    def _explained(self, ratio: Float64, notes: list[str]) -> list[Finding]:
        """What explains a wrong candidate. That it is wrong does not depend on this: an error in here is a note."""
        try:
            return self.explainer.findings(ratio)
        except (Unreadable, KeyboardInterrupt):
            raise
        except Exception as error:
            notes.append(f"the search for an explanation ended in {type(error).__name__}: {error}")
            return [self.explainer.unexplained()]

    def _with_place(self, finding: Finding) -> Finding:
        """Results that are not finite, with the position from which on they are so; what differs from call to call, or
        within one, with the first wrong output of a short call, if it has one."""
        if finding.fault == "not finite":
            return replace(finding, evidence=f"{finding.evidence}; {self.explainer.where()}")
        if finding.fault not in self.probe.behaviour.keys() - HARMLESS or self.by_call:
            return finding
        x = self.probe.random(3, 5, seed=10)
        at = self.probe.apart(np.minimum([9, 4, 0, 17, 1], self.probe.max_position))
        with suppress(Unreadable):
            truth, allowed = self._expected("logarithm", x.astype(np.float64), at)
            y = self.probe.hand_over(x, at)
            if (bad := ~(np.abs(y - truth) <= 4 * allowed)).any():
                where = f"in a call of shape {x.shape}, {first_wrong(truth, y, bad, at)}"
                return replace(finding, evidence=f"{finding.evidence}; {where}")
        return finding

    def _in_short_calls(self, n: int) -> Sample | None:
        """The sample from calls of seven rows, if these are right where one long call is not."""
        probe = self.probe
        if isinstance(self.rope.scaling, LENGTH_DEPENDENT) or probe.behaviour.keys() - {LENGTHS, *HARMLESS}:
            return None
        if probe.single == "seven rows":  # it was read so: longer calls are refused
            return None
        probe.single = "seven rows"
        sample = take_sample(probe, self.rope)
        if graded(sample, self.rope, probe.dtype).grade is None:
            probe.single = None
            return None
        probe.behaviour.setdefault(LENGTHS, f"right in calls of 7 rows, wrong in one of {n}")
        return sample

    def _with_some_calls(self, findings: list[Finding], notes: list[str]) -> list[Finding]:
        """The findings, with what goes wrong in calls of a special kind, if it is known what is right in all others."""
        if self.explainer.expected is None or self.probe.behaviour.keys() - {LENGTHS, *HARMLESS}:
            return findings
        named = set(self.probe.behaviour)
        expected, few = self.explainer.expected, bool({finding.fault for finding in findings} - named)
        try:
            wrong, refused = run_trials(self.probe, expected, self.by_call, self.least, self.batched, few=few)
        except Unreadable:  # too little is taken for "right", but not for what is known to be wrong
            if findings:
                return findings
            raise
        scaling = self.rope.scaling
        if self.by_call and isinstance(scaling, LENGTH_DEPENDENT) and not (findings or wrong):
            wrong = at_the_switch(self.probe, self.rope, scaling.original_length, partial(self._expected, "logarithm"))
        self.probe.look_again()
        notes += refused
        new = {**{name: words for name, words in self.probe.behaviour.items() if name not in named}, **wrong}
        explained = {LENGTHS} if POSITIONS in wrong and LENGTHS not in wrong else set()  # by the order of two rows
        kept = [finding for finding in findings if finding.fault not in {*new, *explained}]
        return kept + [_finding(name, evidence) for name, evidence in new.items()]

    def _coarse(self, grade: str, ratio: Float64) -> Finding:
        sample = self.explainer.sample
        position = int(sample.at[np.unravel_index(int(ratio.argmax()), ratio.shape)[1]])
        exceeded = f"whose bound is exceeded {ratio.max():.3g} times at position {position}"
        evidence = f"{grade}; asked for: {self.worst}, {exceeded}"
        return FAULTS["coarser than asked"].finding(evidence, self.explainer.since)

    # ── Equivalent: R' = U·R with the same signed permutation U at every position, so that scores are the same ───────

    def _unpermuted(self, sample: Sample) -> tuple[Float64, str] | None:
        """The signed permutation that brings outputs into the expected order, if that is all that differs."""
        if self.probe.behaviour.keys() & SPOILING:
            return None
        at = np.array([0, self.probe.max_position])
        units = np.eye(self.rope.head_dim)[:, None].repeat(2, 1)
        expected = rotated(units, self.probe.everywhere(at), self.rope)[:, 0].T
        u = self.probe.operator(at)[0] @ np.linalg.inv(expected)
        rounded = np.rint(np.nan_to_num(u))
        # Whole numbers that undo themselves, Uᵀ(U·y) = y, are a signed permutation; the sample decides that below.
        if np.abs(np.nan_to_num(u, nan=9) - rounded).max() > 0.05 or (rounded == np.eye(len(u))).all():
            return None
        moved = int((rounded.diagonal() == 0).sum())
        ordered = sample._replace(y=np.where(np.isfinite(sample.y), sample.y, 0) @ rounded)
        if graded(ordered, self.rope, self.probe.dtype).grade is None:
            return None
        return rounded, self._order(rounded, moved)

    def _name_of_order(self) -> str:
        """What another order of features is called where it is wrong: of gradients, the sign alone has a name."""
        negated = self.order is not None and bool((self.order == -np.eye(len(self.order))).all())
        return _NEGATED if negated and _NEGATED in self.task.faults else "another order of features"

    def _order(self, u: Float64, moved: int) -> str:
        """What a signed permutation of the outputs means for the other side."""
        order = f"{moved} of {len(u)} outputs come out in another place"
        if (u == -np.eye(len(u))).all() and self.task.faults is not FAULTS:
            return "at every position all outputs are those expected, with the other sign"
        reads = self.rope.layout.partition("-to-")[0]
        for layout in ("half", "interleaved"):
            other = replace(self.rope, layout=layout if layout == reads else f"{reads}-to-{layout}")
            if other != self.rope and (u[recipe_of(other).writes, recipe_of(self.rope).writes] == 1).all():
                order = f"pairs are written {layout}, expected was {self.rope.layout}"
        negative = int((u < 0).sum())
        order += f", {negative} with the other sign" if negative else ""
        if self.task.faults is not FAULTS:
            return order
        return f"{order}. Scores are the same if queries and keys, cached ones too, are all made this way."

    def _rows(self) -> tuple[ErrorRow, ...]:
        """Errors of the dense vectors by decade of the position, in ulps of the length of the pair."""
        recipe, sample = recipe_of(self.rope), self.explainer.sample
        truth, y = self.explainer.truth[:2], sample.y[:2]
        length = np.hypot(truth[..., recipe.writes[:, 0]], truth[..., recipe.writes[:, 1]])
        ulp = 2 * UNIT[self.probe.dtype.name] * 2.0 ** np.floor(np.log2(np.maximum(length, 1e-30)))
        off = np.abs(y - truth)[..., recipe.writes].max(-1)
        return tuple(_decades(off, ulp, sample.at))

    def _undecided(self, grade: str | None) -> list[str]:
        """What these outputs could not decide."""
        notes, top = [], self.probe.max_position
        if (limit := decides_up_to(self.rope)) < top:
            notes.append(f"a correct float32 angle may be half a turn off beyond position {limit}: not decided there")
        if grade in (ONCE, LOW_TABLES) and self.probe.dtype.itemsize == 2:
            sample, truth = self.explainer.sample, self.explainer.truth
            measures = pair_errors(sample.x, sample.positions, self.rope)
            turning = truth[..., np.sort(recipe_of(self.rope).writes.ravel())]
            allowed = bound(grade, measures, turning, self.probe.dtype, self.rope.attention_factor)
            if (allowed < measures.size * measures.relative / 10).sum() < 16:
                notes.append(f"up to position {top} this dtype cannot tell a float32 angle from an exact one")
        return notes


def _decades(off: Float64, ulp: Float64, positions: Int64) -> Iterator[ErrorRow]:
    for k in range(-1, 10):
        low, high = (0, 0) if k < 0 else (10**k, min(10 ** (k + 1) - 1, int(positions.max())))
        inside = (positions >= low) & (positions <= high)
        if inside.any():
            ulps = (off / ulp)[:, inside]
            where = "position 0" if k < 0 else f"positions {low} to {high}"
            yield ErrorRow(where, float(np.max(ulps)), float(np.median(ulps)), float(np.max(off[:, inside])))
