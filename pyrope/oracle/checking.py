"""`check_rotation` and `assert_rotation`: is a black box the rotation that a Rope means, and if not, what went wrong?

The truth comes from exact tables, never from the candidate. A candidate that misses it is explained by hypotheses: each
known fault, then each two of them, predicts what a box with that fault returns; numbers that a fault leaves open (a
base, an offset) are measured. Only a fault whose prediction holds for every output is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from .. import checks
from ..theta import LENGTH_DEPENDENT, Proportional, Rope, check_rope, frequencies
from .explaining import Hypothesis, Named, Riddle
from .faults import FAULTS, Found
from .identification import (
    Explanation,
    Measured,
    Sample,
    error_ratios,
    graded,
    measure,
    phases,
    possible_bases,
    rounded,
    rules,
    slowed,
    take_sample,
    true_rotation,
)
from .probe import Candidate, Float64, Int64, Probe, Unreadable, along_axes, probe_positions
from .recipes import Recipe, frequency_order, recipe_of
from .report import ErrorRow, Finding, Mismatch, Report
from .tensors import UNIT
from .tolerance import LOW_ANGLE, LOW_TABLES, ONCE, U32, bound, decides_up_to, grades, pair_errors

# What tests usually allow: rtol and atol of torch.testing.
_USUAL = {"float16": (1e-3, 1e-5), "bfloat16": (1.6e-2, 1e-5), "float32": (1.3e-6, 1e-5), "float64": (1e-7, 1e-7)}
# What is seen of these spoils what is read of the operator, so that nothing is left to explain …
_SPOILS = {"state between calls", "heads read as positions", "heads differ", "not linear", "depends on the length"}
# … and these may be what a fault of the operator does; then that is named instead.
_EXPLAINED = {"rows differ", "not finite"}
# What the words of a failure suggest.
_WRAP = "wrap it by pyrope.oracle.adapters"
_FAILURES = (
    ("positional argument", "its arguments are others than (x, positions)", f"{_WRAP}, such as from_cos_sin"),
    ("numpy.ndarray", "it takes the arrays of another library", f"{_WRAP}, such as from_torch, or say --framework"),
    ("it returns shape", "it takes its axes in another order, or more of them",
     f'{_WRAP}: with_axes, or say --axes, such as "bhnd"'),
)  # fmt: skip
_LOW = tuple(f"{dtype} {what}" for dtype in ("bfloat16", "float16") for what in ("inverse", "positions", "angle"))


def check_rotation(
    fn: Candidate, rope: Rope, *, dtype: Any = np.float32, max_position: int | None = None, grade: str | None = None
) -> Report:
    """Whether fn(x, positions) -> rotated x, a black box on NumPy arrays, is the rotation of this rope.

    >>> import pyrope
    >>> rope, other = Rope(64, 500000.0, "half"), Rope(64, 10000.0, "half")
    >>> check_rotation(lambda x, positions: pyrope.rotate(x, positions, rope), rope).verdict
    'right'
    >>> check_rotation(lambda x, positions: pyrope.rotate(x, positions, other), rope).faults
    ('wrong base',)

    ``dtype`` is that of x; ``max_position`` the largest position to be tried: 131071, or what the length of the rope
    allows. A rope with axes is tried with positions (axes, n), as `rotate` takes them. Any precision from a float32
    angle on is right; ``grade``, one of `tolerance.GRADES`, asks for a better one.
    """
    scaling = check_rope(rope).scaling
    if max_position is None and isinstance(scaling, LENGTH_DEPENDENT):
        max_position = max(int(scaling.length or 0) - 1, 1)  # the table may depend on the largest position
    probe = Probe(fn, rope.head_dim, dtype, max_position, None if rope.axes is None else rope.axes.count)
    if grade is not None:
        checks.choice("grade", grade, grades(probe.dtype))
    try:
        return _Check(probe, rope, grade or grades(probe.dtype)[-1]).report()
    except Unreadable as error:
        fault = FAULTS["fails"]
        cause, fix = next((told for words, *told in _FAILURES if words in str(error)), (fault.cause, fault.fix))
        return Report("rotation", repr(rope), "wrong", (Finding(fault.name, str(error), cause, fix),))


def assert_rotation(
    fn: Candidate, rope: Rope, *, dtype: Any = np.float32, max_position: int | None = None, grade: str | None = None
) -> None:
    """Raises `Mismatch`, an AssertionError with the report of `check_rotation`, unless that is right or equivalent."""
    __tracebackhide__ = True
    report = check_rotation(fn, rope, dtype=dtype, max_position=max_position, grade=grade)
    if not report.ok:
        raise Mismatch(report)


@dataclass
class _Check:
    """One run of `check_rotation`."""

    probe: Probe
    rope: Rope
    grade: str  # the worst that is right
    sample: Sample = field(init=False)
    truth: Float64 = field(init=False)  # of the sample
    measured: Measured = field(init=False)  # once something has to be explained

    @np.errstate(invalid="ignore", over="ignore")  # whatever the candidate returns
    def report(self) -> Report:
        probe, rope = self.probe, self.rope
        probe.behave()
        if isinstance(rope.scaling, LENGTH_DEPENDENT):
            probe.seen.pop("depends on the length", None)  # as it should
        self.sample = take_sample(probe, rope)
        self.truth = true_rotation(self.sample.x, self.sample.positions, rope)
        (found, ratios, logarithm), verdict, notes = graded(self.sample, rope, probe.dtype), "right", list(probe.notes)
        if found is None and (unpermuted := self._unpermuted()):
            verdict, self.sample, told = "equivalent", unpermuted[0], unpermuted[1]
            found, ratios, logarithm = graded(self.sample, rope, probe.dtype)
            notes.append(told)
        findings = list(self._behaviour())
        if found is None:
            findings += self._explained(Riddle(self.sample, rope, probe.dtype.name, ratios[grades(probe.dtype)[-1]]))
            names = {f.fault for f in findings}
            if any(name.startswith(_LOW) for name in names):
                found = LOW_ANGLE
            if names - self.probe.seen.keys():
                findings = [f for f in findings if f.fault not in _EXPLAINED]
        elif logarithm and (recursive := self._recursive()):
            findings.append(recursive)
        elif grades(probe.dtype).index(found) > grades(probe.dtype).index(self.grade):
            findings.append(self._coarse(found, ratios[self.grade]))
        elif logarithm:
            notes.append("the frequencies are worse than by a float32 power, and as good as by a float32 logarithm")
        if findings:
            verdict = "wrong"
        notes += self._undecided(found)
        return Report("rotation", repr(rope), verdict, tuple(findings), found, self._rows(), tuple(notes))

    def _behaviour(self) -> Iterator[Finding]:
        for name, evidence in self.probe.seen.items():
            yield Finding(name, evidence, FAULTS[name].cause, FAULTS[name].fix)

    def _coarse(self, found: str, ratio: Float64) -> Finding:
        fault = FAULTS["coarser than asked"]
        row = int(self.sample.at[np.unravel_index(int(ratio.argmax()), ratio.shape)[1]])
        evidence = (
            f"{found}; asked for: {self.grade}, whose bound is exceeded {ratio.max():.3g} times at position {row}"
        )
        return Finding(fault.name, evidence, fault.cause, fault.fix, self.since)

    # ── Equivalent: R' = U·R with the same signed permutation U at every position, so that scores are the same ───────

    def _unpermuted(self) -> tuple[Sample, str] | None:
        """The sample with the outputs in the expected order, if a signed permutation is all that differs."""
        if self.probe.seen.keys() & _SPOILS:
            return None
        at = np.array([0, self.probe.max_position])
        units = np.eye(self.rope.head_dim)[:, None].repeat(2, 1)
        expected = true_rotation(units, self.probe.everywhere(at), self.rope)[:, 0].T
        u = self.probe.operator(at)[0] @ np.linalg.inv(expected)
        whole = np.rint(np.nan_to_num(u))
        # Whole numbers that undo themselves, Uᵀ(U·y) = y, are a signed permutation; the sample decides that below.
        if np.abs(np.nan_to_num(u, nan=9) - whole).max() > 0.05 or (whole == np.eye(len(u))).all():
            return None
        moved = int((whole.diagonal() == 0).sum())
        sample = self.sample._replace(y=np.where(np.isfinite(self.sample.y), self.sample.y, 0) @ whole)
        if graded(sample, self.rope, self.probe.dtype).grade is None:
            return None
        return sample, self._order(whole, moved)

    def _order(self, u: Float64, moved: int) -> str:
        """What a signed permutation of the outputs means for the other side."""
        order = f"{moved} of {len(u)} outputs come out at another place"
        for layout in ("half", "interleaved"):
            other = replace(self.rope, layout=layout) if self.rope.layout == "interleaved-to-half" else None
            if other is None and self.rope.layout == "interleaved" and layout == "half":
                other = replace(self.rope, layout="interleaved-to-half")
            if other and (u[recipe_of(other).writes, recipe_of(self.rope).writes] == 1).all():
                order = f"pairs are written {layout}, expected was {self.rope.layout}"
        negative = int((u < 0).sum())
        order += f", {negative} with the other sign" if negative else ""
        return f"{order}. Scores are the same if queries and keys, cached ones too, are all made this way."

    # ── Wrong: which fault, or which two, predict every output ───────────────────────────────────────────────────────

    def _explained(self, riddle: Riddle) -> list[Finding]:
        if self.probe.seen.keys() & _SPOILS:
            return []
        changes = riddle.changes(self._found()._replace(length=self._first_wrong(riddle.ratio)))
        if (subtle := self._subtle(riddle.ratio)) is not None:
            return [self._to_the_last_digit(subtle, riddle, changes)]
        if not (matches := self._fitting(riddle, riddle.singles(changes))):
            rules = self._rules()
            changes, matches = changes + rules, self._fitting(riddle, riddle.singles(rules))
        if matches:
            best, *others = matches
            names = dict.fromkeys(h.faults[0].name for h in others)
            return [self._finding(best, tuple(name for name in names if name != best.faults[0].name))]
        if pairs := self._fitting(riddle, riddle.doubles(changes)):
            best = min(pairs, key=lambda h: sum(fault.generic for fault in h.faults))
            return [self._finding(best, self._instead(best, pairs, k), k) for k in (0, 1)]
        return [] if self.probe.seen.keys() & _EXPLAINED else [self._unexplained(riddle.ratio)]

    def _fitting(self, riddle: Riddle, hypotheses: Iterator[Hypothesis]) -> list[Hypothesis]:
        """Those that hold and, where rows differed or were not finite, would let them."""
        seen, at = self.probe.seen, self.sample.positions
        if "rows differ" in seen:
            hypotheses = (h for h in hypotheses if h.recipe.by_row(at))
        found = riddle.fitting(hypotheses)
        if "not finite" in seen:
            found = [h for h in found if not np.isfinite(h.recipe.predict(self.sample.x, at)).all()]
        return found

    def _to_the_last_digit(self, subtle: Finding, riddle: Riddle, changes: list[Named]) -> Finding:
        """Where only the last digits are wrong, a fault is named only if it predicts them."""
        if recursive := self._recursive():  # which look like a base that is no round number
            return recursive
        for h in riddle.singles(changes):
            name = h.faults[0].name
            if name != subtle.fault and self._to_the_last(h.recipe) and riddle.explains(h.recipe):
                drifts = {name, subtle.fault} == {"wrong base", "recursive frequencies"}
                return self._finding(h, (subtle.fault,) if drifts else ())
        return subtle

    def _instead(self, best: Hypothesis, pairs: list[Hypothesis], k: int) -> tuple[str, ...]:
        """Faults that could stand in the place of the k-th one of a pair."""
        kept = best.faults[1 - k].name
        names = [f.name for h in pairs for f in h.faults if kept in (h.faults[0].name, h.faults[1].name)]
        return tuple(n for n in dict.fromkeys(names) if n not in (kept, best.faults[k].name) and not FAULTS[n].generic)

    def _found(self) -> Found:
        """The numbers that faults leave open, measured."""
        positions = probe_positions(self.probe.max_position)
        self.measured = measured = measure(self.probe.operator(positions), positions, self.probe.unit, self.probe.step)
        if len(measured.theta) == self.rope.pairs:  # one pair for each frequency, in the order of Θ
            first = np.unique(frequency_order(self.rope), return_index=True)[1]
            measured = measured._replace(theta=measured.theta[first], uncertainty=measured.uncertainty[first])
        theta, p = measured.theta, len(measured.theta)
        if not p:
            return Found()
        period = self.rope.pairs if isinstance(self.rope.scaling, Proportional) else p
        bases = possible_bases(theta, period)
        slower: tuple[float, ...] = ()
        if len(self.measured.theta) == self.rope.pairs and (theta > 0).all():
            plain = self.rope.base ** -(np.arange(p) / p)
            slower = slowed(theta / plain, measured), slowed(theta[:1], measured, 1)
            bases += possible_bases(theta * (plain / frequencies(self.rope)[first]), p)  # LongRoPE's list taken off
        offset = int(measured.offset) if measured.offset == int(measured.offset) else None
        # A factor is the median of many roundings: rounded only as far as these reach.
        return Found(bases, slower, offset, rounded(measured.factor, self.probe.unit / 4), axis=self._owners())

    def _owners(self) -> Int64 | None:
        """Which axis turns each pair: the one that, alone, turns it as far as all do."""
        axes, measured, top = self.probe.axes, self.measured, self.probe.max_position
        if axes is None or len(measured.theta) != self.rope.pairs:
            return None
        at, far = np.array([top, top // 2, top // 3, min(7, top)]), []
        for axis in range(axes):
            positions = np.zeros((axes, len(at)), np.int64)
            positions[axis] = at
            turned = phases(self.probe.operator(positions), measured.pairs)
            off = turned - measured.direction * at[:, None] * measured.theta
            far.append(np.square(np.abs(np.exp(1j * off) - 1)).sum(axis=0))
        return np.asarray(np.argmin(far, axis=0))

    def _first_wrong(self, ratio: Float64) -> int | None:
        """The first position that is wrong, as far as halving (by 64 at once) tells, if there are some before it."""
        order = np.argsort(self.sample.at)
        positions, wrong = self.sample.at[order], np.asarray((ratio > 1).any(axis=(0, 2)))[order]
        k = int(np.argmax(wrong))
        if k < 4:
            return None
        low, high = int(positions[k - 1]), int(positions[k])
        while high - low > 1:
            at = np.unique(np.linspace(low, high, 66).astype(np.int64))
            sample = self._read(np.append(at, self.probe.max_position))
            worst = error_ratios(sample, self.rope, self.probe.dtype)[grades(self.probe.dtype)[-1]]
            bad = np.asarray((worst > 1).any(axis=(0, 2)))[:-1]
            bad[0], bad[-1] = False, True
            high = int(at[j := int(np.argmax(bad))])
            low = int(at[j - 1])
        return high

    @cached_property
    def rules(self) -> list[Explanation]:
        """The published rules that have the frequencies that were measured."""
        return rules(self.measured, self.rope.head_dim)

    def _rules(self) -> list[Named]:
        """Rules that were not expected and have the frequencies that were measured."""
        fault, expected = FAULTS["another rescaling"], replace(self.rope, axes=None)
        found = [rule for rule in self.rules if rule.rope != expected]
        if not found or len(self.measured.theta) != self.rope.pairs:
            return []
        told = Found(rules=tuple(rule.words for rule in found), theta=self.measured.theta)
        return [(fault, change) for change in fault.recipes(self.rope, told)]

    def _to_the_last(self, recipe: Recipe) -> bool:
        """Whether a recipe predicts every output as well as a float32 angle allows."""
        sample, writes = self.sample, np.sort(recipe_of(self.rope).writes.ravel())
        predicted = recipe.predict(sample.x, sample.positions)
        allowed = np.abs(sample.x) * self.probe.unit
        measures, dtype = pair_errors(sample.x, sample.positions, self.rope), self.probe.dtype
        allowed[..., writes] = bound(grades(dtype)[-1], measures, predicted[..., writes], dtype, recipe.factor)
        with np.errstate(invalid="ignore"):
            return bool((np.abs(predicted - sample.y) <= allowed).all())

    def _recursive(self) -> Finding | None:
        """A running product can be as good as a logarithm: it is one if it predicts what that leaves open."""
        right, sample, fault = recipe_of(self.rope), self.sample, FAULTS["recursive frequencies"]
        measures = pair_errors(sample.x, sample.positions, self.rope)
        measures = measures._replace(relative=np.where(measures.relative > 0, 2 * U32, 0.0))  # the angle's own rounding
        writes = np.sort(right.writes.ravel())
        for change in fault.recipes(self.rope, Found()):
            h = Hypothesis((fault,), (change.told,), replace(right, **change.fields))
            predicted = h.recipe.predict(sample.x, sample.positions)[..., writes]
            allowed = bound(grades(self.probe.dtype)[-1], measures, predicted, self.probe.dtype, right.factor)
            if (np.abs(sample.y[..., writes] - predicted) <= allowed).all():
                return self._finding(h, ())
        return None

    def _subtle(self, ratio: Float64) -> Finding | None:
        """Faults of the last digits: the expected rotation, only with an angle worse than float32's."""
        right, sample = recipe_of(self.rope), self.sample
        measures = pair_errors(sample.x, sample.positions, self.rope)
        allowed = np.zeros_like(sample.y)
        writes = np.sort(recipe_of(self.rope).writes.ravel())
        turned = bound(grades(self.probe.dtype)[-1], measures, self.truth[..., writes], self.probe.dtype, right.factor)
        # A hardware sine reduces its angle with a few roundings; a running product has four more with each pair.
        steps = np.zeros(self.rope.head_dim)
        steps[right.writes] = (4 * np.arange(self.rope.pairs) + 8)[:, None]
        allowed[..., writes] = turned + measures.size * steps[writes] * U32
        if not (np.abs(sample.y - self.truth) <= allowed).all():
            return None
        pairs: Any = np.asarray((ratio > 1).any(axis=(0, 1)))[right.writes].any(axis=1)  # (p,)
        if not pairs[0] and not self._drifts():
            return None
        first = "fast sine" if pairs[0] else "recursive frequencies"
        fault, other = FAULTS[first], () if pairs[0] else ("fast sine",)
        evidence = (
            f"{int(pairs.sum())} of {len(pairs)} pairs, from pair {int(np.argmax(pairs))} on, are off by up to "
            f"{ratio.max():.3g} times what a float32 angle allows"
        )
        return Finding(fault.name, evidence, fault.cause, fault.fix, self.since, other)

    def _drifts(self) -> bool:
        """Whether errors of the frequencies change little from pair to pair, as those of a running product do."""
        theta, measured = frequencies(self.rope), self.measured
        if len(measured.theta) != len(theta) or not theta.all():
            return True  # not known to be otherwise
        known = 4 * measured.uncertainty / theta
        return bool((np.abs(np.diff(measured.theta / theta)) <= 8 * U32 + known[1:] + known[:-1]).all())

    def _finding(self, h: Hypothesis, alternatives: tuple[str, ...], k: int = 0) -> Finding:
        fault = h.faults[k]
        off = np.abs(h.recipe.predict(self.sample.x, self.sample.positions) - self.sample.y)
        missed = np.abs(self.sample.y - self.truth)
        subject = "this" if len(h.faults) == 1 else f"with {h.faults[1 - k].name} it"
        evidence = (
            f"{h.told[k] + '; ' if h.told[k] else ''}{subject} predicts {off.size} outputs to {np.nanmedian(off):.2g} "
            f"(median), where the expected rotation is off by {np.nanmedian(missed):.2g} (median), "
            f"{np.nanmax(missed):.2g} (worst)"
        )
        return Finding(fault.name, evidence, fault.cause, fault.fix, self.since, alternatives)

    def _unexplained(self, ratio: Float64) -> Finding:
        where = int(self.sample.at[np.unravel_index(int(ratio.argmax()), ratio.shape)[1]])
        outside = (ratio > 1).any(axis=(0, 1))
        evidence = (
            f"{int((ratio > 1).sum())} of {ratio.size} outputs, in {int(outside.sum())} of {outside.size} features, "
            f"are beyond what a float32 angle allows, worst at position {where}; no known fault and no two predict them"
        )
        if len(self.measured.theta) == self.rope.pairs:
            off = self.measured.theta / np.maximum(frequencies(self.rope), 1e-300) - 1
            evidence += f"; measured frequencies are off by {off.min():+.2g} to {off.max():+.2g} of themselves"
        if self.measured.direction != self.rope.direction:
            evidence += "; it turns the other way"
        evidence += f"; the factor is {self.measured.factor:.6g}, the offset {self.measured.offset:g}"
        if self.rules:
            evidence += "; the frequencies are those of " + ", or of ".join(rule.words for rule in self.rules)
        cause, fix = "not among the known faults", "see what identify() reads of it"
        return Finding("unexplained", evidence, cause, fix, self.since)

    # ── What the report says besides ─────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def since(self) -> int | None:
        """The first position tried where the error exceeds what tests usually allow."""
        order = np.argsort(self.sample.at)
        seen = self._visible(self.sample)[order]
        if not seen.any():
            return None
        positions, k = self.sample.at[order], int(np.argmax(seen))
        if k and positions[k] - positions[k - 1] > 1:  # look closer, with the largest position of the call as before
            between = np.unique(np.linspace(positions[k - 1] + 1, positions[k], 48).astype(np.int64))
            closer = self._visible(self._read(np.append(between, self.probe.max_position)))[:-1]
            if closer.any():
                return int(between[np.argmax(closer)])
        return int(positions[k])

    def _read(self, at: Int64) -> Sample:
        """Dense vectors at these positions."""
        x, positions = self.probe.random(2, len(at), seed=9), along_axes(at, self.probe.axes)
        return Sample(x.astype(np.float64), self.probe.read(x, positions), positions)

    def _visible(self, sample: Sample) -> Any:
        """At which of its rows tests with the usual tolerances would fail, and a right float32 pipeline would not."""
        rtol, atol = _USUAL[self.probe.dtype.name]
        truth = true_rotation(sample.x, sample.positions, self.rope)
        beyond = error_ratios(sample, self.rope, self.probe.dtype)[self.grade] > 1
        with np.errstate(invalid="ignore"):
            return (~(np.abs(sample.y - truth) <= atol + rtol * np.abs(truth)) & beyond).any(axis=(0, 2))

    def _rows(self) -> tuple[ErrorRow, ...]:
        """Errors of the dense vectors by decade of the position, in ulps of the length of the pair."""
        recipe, positions = recipe_of(self.rope), self.sample.positions
        truth, y = true_rotation(self.sample.x[:2], positions, self.rope), self.sample.y[:2]
        length = np.hypot(truth[..., recipe.writes[:, 0]], truth[..., recipe.writes[:, 1]])
        ulp = 2 * UNIT[self.probe.dtype.name] * 2.0 ** np.floor(np.log2(np.maximum(length, 1e-30)))
        error = np.abs(y - truth)[..., recipe.writes].max(-1) / ulp
        return tuple(_decades(error, self.sample.at))

    def _undecided(self, found: str | None) -> list[str]:
        """What these outputs could not decide."""
        notes, top = [], self.probe.max_position
        if (limit := decides_up_to(self.rope)) < top:
            notes.append(f"a correct float32 angle may be half a turn off beyond position {limit}: not decided there")
        if found in (ONCE, LOW_TABLES) and self.probe.dtype.itemsize == 2:
            sample = self.sample
            measures = pair_errors(sample.x, sample.positions, self.rope)
            truth = self.truth[..., np.sort(recipe_of(self.rope).writes.ravel())]
            told = (
                bound(found, measures, truth, self.probe.dtype, self.rope.attention_factor)
                < measures.size * measures.relative / 10
            )
            if told.sum() < 16:
                notes.append(f"up to position {top} this dtype cannot tell a float32 angle from an exact one")
        return notes


def _decades(error: Float64, positions: Int64) -> Iterator[ErrorRow]:
    for k in range(-1, 10):
        low, high = (0, 0) if k < 0 else (10**k, min(10 ** (k + 1) - 1, int(positions.max())))
        inside = (positions >= low) & (positions <= high)
        if inside.any():
            part = error[:, inside]
            where = "position 0" if k < 0 else f"positions {low} to {high}"
            yield ErrorRow(where, float(np.max(part)), float(np.median(part)))
