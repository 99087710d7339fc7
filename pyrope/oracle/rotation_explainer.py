"""What went wrong in a rotation that is not the expected one: its numbers are measured, and mistakes are searched.

Errors in the last digits alone have names of their own, since they cannot be predicted output by output; everything
else is named by `explain.search`, if a mistake predicts every output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from ..phase import cos_sin
from ..theta import Proportional, Rope, frequencies
from .explain import Change, Fault, Hypothesis, Suspect, findings, search
from .floats import U32, Float64, Int64
from .measure import Measured, axis_of_pairs, growth_of, measure, offset_of, phases
from .probe import Probe, along_axes, probe_positions
from .recipes import Block, Recipe, as_is, block_terms, one_series, recipe_of
from .report import Finding
from .rotation_evidence import RotationEvidence
from .rotation_faults import FAULTS, Measurements
from .rules import Explanation, low_precision, possible_bases, rounded, rules, slowed
from .sample import Sample, error_ratios
from .tolerance import bound, grades, pair_errors, theta_bound
from .trials import Expectation, first_wrong
from .truth import rotated

# What tests usually allow: rtol and atol of torch.testing.
_USUAL = {"float16": (1e-3, 1e-5), "bfloat16": (1.6e-2, 1e-5), "float32": (1.3e-6, 1e-5), "float64": (1e-7, 1e-7)}
# Behaviour that spoils what is read of the operator, so that nothing is left to explain.
SPOILING = {
    "state between calls",
    "output not written",
    "heads read as positions",
    "heads differ",
    "not linear",
    "depends on the length",
}
# Behaviour that a mistake of the operator may explain; then that mistake is named instead.
EXPLICABLE = {"rows differ", "not finite", "one row differs", "some lengths wrong"}


@dataclass
class RotationExplainer:
    """A candidate, what it is meant to be, and a sample of what it does."""

    probe: Probe
    rope: Rope
    sample: Sample
    grade: str  # the worst that is accepted
    faults: Mapping[str, Fault] = field(default_factory=lambda: FAULTS)  # the known mistakes
    measured: Measured = field(init=False)  # once something has to be explained
    expected: Expectation | None = None  # what the mistakes that were named predict of any other call
    _length: int | None = None  # the first position that is wrong, if some before it are right
    _ratio: Float64 | None = None  # the error of each output over what is allowed

    @cached_property
    def truth(self) -> Float64:
        return rotated(self.sample.x, self.sample.positions, self.rope)

    def findings(self, ratio: Float64) -> list[Finding]:
        """What explains the sample, where ``ratio`` is the error of each output over what the worst grade allows."""
        behaviour = self.probe.behaviour.keys()
        if behaviour & SPOILING:
            return []
        evidence = RotationEvidence(self.sample, self.rope, self.probe.dtype.name, ratio, set(behaviour), self.faults)
        self._ratio, self._length = ratio, self._first_wrong(ratio)
        lengths = tuple(self._first_wrong_of(axis) for axis in range(self.probe.axes or 0))
        known = evidence.known(self._measurements()._replace(length=self._length, lengths=lengths))
        if (subtle := self._subtle(ratio)) is not None:
            return [self._to_the_last_digit(subtle, evidence, known)]
        turns = [suspect for suspect in known if suspect[0].name == "2π rounded"]  # not before other frequencies
        known = [suspect for suspect in known if suspect not in turns]
        if matches := search(evidence, known, lambda: self._rules() + turns):
            recipe = evidence.recipe(matches[0])
            if not recipe.rounds:
                self.expected = Expectation(partial(evidence.expected, recipe), recipe.place is not as_is)
            return findings(matches, partial(self._words, evidence), self.since)
        return [] if behaviour & EXPLICABLE else [self.unexplained()]

    def _to_the_last_digit(self, subtle: Finding, evidence: RotationEvidence, known: list[Suspect]) -> Finding:
        """Where only the last digits are wrong, a mistake is named only if it predicts them."""
        fits: list[tuple[float, int, Fault, Change]] = []
        for fault, change in known:
            recipe = replace(recipe_of(self.rope), **change.fields)
            if fault.name != subtle.fault and self._to_the_last(recipe) and evidence.explains(recipe):
                fits.append((evidence.distance(recipe), len(fits), fault, change))
        if recursive := self.recursive():  # which look like a base that is no round number
            products = FAULTS["recursive frequencies"].changes(self.rope, Measurements())
            nearest = min(evidence.distance(replace(recipe_of(self.rope), **change.fields)) for change in products)
            if not fits or nearest <= 4 * min(fits)[0]:
                return recursive
        if fits:
            _, _, fault, change = min(fits)
            drifts = {fault.name, subtle.fault} == {"wrong base", "recursive frequencies"}
            return self._finding(fault, change, (subtle.fault,) if drifts else ())
        return subtle

    def _measurements(self) -> Measurements:
        """The numbers that faults leave open, measured."""
        positions = probe_positions(self.probe.max_position)
        operator = self.probe.operator(positions)
        self.measured = measured = measure(operator, positions, self.probe.unit, self.probe.step)
        if len(measured.theta) == self.rope.pairs:  # one pair for each frequency, in the order of Θ
            first = one_series(self.rope)
            measured = measured._replace(theta=measured.theta[first], uncertainty=measured.uncertainty[first])
        theta, p = measured.theta, len(measured.theta)
        block = self._block(operator, positions)
        if not p:
            return Measurements(block=block)
        period = self.rope.pairs if isinstance(self.rope.scaling, Proportional) else p
        bases = possible_bases(theta, period)
        slower: tuple[float, ...] = ()
        if len(self.measured.theta) == self.rope.pairs and (theta > 0).all():
            plain = self.rope.base ** -(np.arange(p) / p)
            slower = slowed(theta / plain, measured), slowed(theta[:1], measured, 1)
            expected = frequencies(self.rope)[first]
            bases += (
                possible_bases(theta * (plain / expected), p) if expected.all() else ()
            )  # LongRoPE's list taken off
        offset = int(measured.offset) if measured.offset == int(measured.offset) else None
        # A factor is the median of many roundings: rounded only as far as these reach.
        factor, (narrow, _) = rounded(measured.factor, self.probe.unit / 4), low_precision(measured)
        turning = {tuple(pair) for pair in self.measured.pairs.reads.tolist()}
        pairs = [tuple(pair) for pair in recipe_of(self.rope).reads.tolist()]
        owners = self._owners()
        return Measurements(
            bases, slower, offset, self._offsets(operator[:1], owners), factor, axis=owners, block=block, width=2 * p,
            turning=np.array([pair in turning for pair in pairs]) if turning <= {*pairs} else None,
            turn=self._turn(), growth=growth_of(operator, self.measured.pairs, positions), narrow=narrow,
            narrow_theta=self.measured.theta if narrow and self._near() else None,
        )  # fmt: skip

    def _turn(self) -> float | None:
        """What is taken for 2π where angles are reduced, if the first pair may show another number."""
        theta, expected = self.measured.theta, frequencies(self.rope)
        if len(theta) != len(expected) or not 0.9 < theta[0] / (expected[0] or np.inf) < 1.1:
            return None
        turn, known = 2 * np.pi * expected[0] / theta[0], 2 * self.measured.uncertainty[0] / theta[0]
        return None if abs(turn / (2 * np.pi) - 1) <= known else rounded(float(turn), float(known))

    def _near(self) -> bool:
        """Whether the measured frequencies are the expected ones, as far as a few roundings to bfloat16 let them be."""
        theta, expected = self.measured.theta, frequencies(self.rope)
        return len(theta) == len(expected) and bool((np.abs(theta - expected) <= 2.0**-5 * np.abs(expected)).all())

    def _block(self, operator: Float64, positions: Int64) -> Block | None:
        """What the features of every pair are multiplied with, if that is ±cos, ±sin, 1 or 0 in all pairs alike."""
        right, at = recipe_of(self.rope), self.probe.everywhere(positions)
        terms = block_terms(*cos_sin(replace(self.rope, direction=1), at))
        allowed = 8 * (self.probe.unit + U32) + 2 * theta_bound(self.rope).max() * np.abs(positions)[:, None]

        def factor(to: int, source: int) -> str | None:
            entry = operator[:, right.writes[:, to], right.reads[:, source]]
            fits = (name for name, term in terms.items() if (np.abs(entry - term) <= allowed * right.factor).all())
            return next(fits, None)

        rows = [(factor(to, 0), factor(to, 1)) for to in (0, 1)]
        return None if None in (*rows[0], *rows[1]) else (rows[0], rows[1])  # type: ignore[return-value]

    def _owners(self) -> Int64 | None:
        """Which axis turns each pair: the one that, alone, turns it as far as all do."""
        if self.probe.axes is None or len(self.measured.theta) != self.rope.pairs:
            return None
        return axis_of_pairs(self.probe, self.measured)

    def _offsets(self, at_zero: Float64, owners: Int64 | None) -> tuple[int | None, ...]:
        """By how many positions the pairs of each axis are ahead, where that is an integer."""
        measured, offsets = self.measured, []
        for axis in range(0 if owners is None else self.probe.axes or 0):
            own, phase = owners == axis, measured.direction * phases(at_zero, measured.pairs)[0]
            offset = offset_of(phase[own], measured.theta[own], self.probe.unit)
            offsets.append(int(offset) if offset == int(offset) else None)
        return tuple(offsets)

    def _first_wrong(self, ratio: Float64) -> int | None:
        """The first position that is wrong, as far as halving (by 64 at once) tells, if there are some before it."""
        order = np.argsort(self.sample.at)
        return self._halved(self.sample.at[order], np.asarray((ratio > 1).any(axis=(0, 2)))[order])

    def _first_wrong_of(self, axis: int) -> int | None:
        """The same of the positions of one axis, where those of all others are 0."""
        at = probe_positions(self.probe.max_position)
        return self._halved(at, self._wrong(at, axis), axis)

    def _halved(self, positions: Int64, wrong: Any, axis: int | None = None) -> int | None:
        k = int(np.argmax(wrong))
        if k < 4:
            return None
        low, high = int(positions[k - 1]), int(positions[k])
        while high - low > 1:
            at = np.unique(np.linspace(low, high, 66).astype(np.int64))
            bad = self._wrong(np.append(at, self.probe.max_position), axis)[:-1]
            bad[0], bad[-1] = False, True
            high = int(at[j := int(np.argmax(bad))])
            low = int(at[j - 1])
        return high

    def _wrong(self, at: Int64, axis: int | None) -> Any:
        """At which of these positions, of all axes or of one, the worst grade is missed."""
        worst = error_ratios(self._read(at, axis), self.rope, self.probe.dtype)[grades(self.probe.dtype)[-1]]
        return np.asarray((worst > 1).any(axis=(0, 2)))

    @cached_property
    def rules(self) -> list[Explanation]:
        """The published rules that have the frequencies that were measured."""
        return rules(self.measured, self.rope.head_dim)

    def _rules(self) -> list[Suspect]:
        """Rules that were not expected and have the frequencies that were measured."""
        fault, expected = FAULTS["another rescaling"], replace(self.rope, axes=None)
        others = [rule for rule in self.rules if rule.rope != expected]
        if not others or len(self.measured.theta) != self.rope.pairs:
            return []
        numbers = Measurements(rules=tuple(rule.words for rule in others), theta=self.measured.theta)
        return [(fault, change) for change in fault.changes(self.rope, numbers)]

    def _to_the_last(self, recipe: Recipe, angle_error: Float64 | None = None) -> bool:
        """Whether a recipe predicts every output as well as a float32 angle allows, or one with this relative error."""
        sample, writes = self.sample, np.sort(recipe_of(self.rope).writes.ravel())
        predicted = recipe.predict(sample.x, sample.positions)
        allowed = np.abs(sample.x) * self.probe.unit
        measures, dtype = pair_errors(sample.x, sample.positions, self.rope), self.probe.dtype
        measures = measures if angle_error is None else measures._replace(relative=angle_error)
        allowed[..., writes] = bound(grades(dtype)[-1], measures, predicted[..., writes], dtype, recipe.factor)
        with np.errstate(invalid="ignore"):
            return bool((np.abs(predicted - sample.y) <= allowed).all())

    def recurrence(self) -> bool:
        """Whether the angles are made by ggml's recurrence: it predicts what a float32 angle leaves open."""
        if self.rope.scaling is not None or self.rope.pairs < 3:
            return False
        ratio, right = np.float32(frequencies(self.rope)[1]), recipe_of(self.rope)
        ratios = (float(ratio + ulps * np.spacing(ratio)) for ulps in (0, 1, -1))  # a library's power is good to 1
        return any(self._to_the_last(replace(right, ratio=one), np.zeros(1)) for one in ratios)

    def recursive(self) -> Finding | None:
        """A running product can be as good as a logarithm: it is one if it predicts what that leaves open."""
        right, sample, fault = recipe_of(self.rope), self.sample, FAULTS["recursive frequencies"]
        measures = pair_errors(sample.x, sample.positions, self.rope)
        measures = measures._replace(relative=np.where(measures.relative > 0, 2 * U32, 0.0))  # the angle's own rounding
        writes = np.sort(right.writes.ravel())
        for change in fault.changes(self.rope, Measurements()):
            predicted = replace(right, **change.fields).predict(sample.x, sample.positions)[..., writes]
            allowed = bound(grades(self.probe.dtype)[-1], measures, predicted, self.probe.dtype, right.factor)
            if (np.abs(sample.y[..., writes] - predicted) <= allowed).all():
                return self._finding(fault, change)
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
        evidence = (
            f"{int(pairs.sum())} of {len(pairs)} pairs, from pair {int(np.argmax(pairs))} on, are off by up to "
            f"{ratio.max():.3g} times what a float32 angle allows"
        )
        if not pairs[0]:
            return FAULTS["recursive frequencies"].finding(evidence, self.since, ("fast sine",))
        cause = "angles that are reduced, or kept, in too few bits: a hardware sine, a short phase, a rounded 2π"
        fix = "reduce angles in float64 or in integers of 32 bits, or leave that to a full sine"
        return Finding("unexplained", f"{evidence}; {self._angle_errors()}", cause, fix, self.since)

    def _angle_errors(self) -> str:
        """How far off the angles are for each position, in words; all pairs of the sample's third head are (1, 0)."""
        writes, at = recipe_of(self.rope).writes, self.sample.at
        turned, right = (z[2][:, writes[:, 0]] + 1j * z[2][:, writes[:, 1]] for z in (self.sample.y, self.truth))
        rates = np.abs(np.angle(turned * right.conj()) / np.maximum(at, 1)[:, None])[at > at.max() // 16].max(axis=0)
        where = f"in the first pair, where a float32 angle is exact, and up to {rates[1:].max(initial=0):.2g} in others"
        return f"the error of the angle grows with the position, by up to {rates[0]:.2g} for each {where}"

    def _drifts(self) -> bool:
        """Whether errors of the frequencies change little from pair to pair, as those of a running product do."""
        theta, measured = frequencies(self.rope), self.measured
        if len(measured.theta) != len(theta) or not theta.all():
            return True  # not known to be otherwise
        known = 4 * measured.uncertainty / theta
        return bool((np.abs(np.diff(measured.theta / theta)) <= 8 * U32 + known[1:] + known[:-1]).all())

    def _words(self, evidence: RotationEvidence, hypothesis: Hypothesis, k: int) -> str:
        """The evidence for the k-th mistake of a hypothesis: how well the hypothesis predicts the outputs."""
        other = hypothesis.faults[1 - k].name if len(hypothesis.faults) > 1 else None
        return self._prediction(hypothesis.changes[k].note, evidence.recipe(hypothesis), other)

    def _prediction(self, note: str, recipe: Recipe, other: str | None = None) -> str:
        off = np.abs(recipe.predict(self.sample.x, self.sample.positions) - self.sample.y)
        missed = np.abs(self.sample.y - self.truth)
        subject = "this" if other is None else f"with {other} it"
        return (
            f"{note + '; ' if note else ''}{subject} predicts all {off.size} outputs to "
            f"{np.nanmax(off, initial=0):.2g}, where the expected rotation is off by up to "
            f"{np.nanmax(missed, initial=0):.2g}; {self.where()}"
        )

    def _finding(self, fault: Fault, change: Change, alternatives: tuple[str, ...] = ()) -> Finding:
        evidence = self._prediction(change.note, replace(recipe_of(self.rope), **change.fields))
        return fault.finding(evidence, self.since, alternatives)

    def unexplained(self) -> Finding:
        """What can be said of errors that no known mistake predicts."""
        parts = [self.where()]
        if measured := getattr(self, "measured", None):
            parts += self._oddities(measured)
        if self._switches():
            parts.insert(1, self._rule_beyond())
            return FAULTS["wrong beyond a position"].finding("; ".join(filter(None, parts)), self._length)
        mixed = None if self._ratio is None else self._scattered(self._ratio)
        if mixed and self._alone(self.sample.at[mixed[0]]):
            return FAULTS["one position wrong"].finding(parts[0])
        if mixed and self._whole_rows(mixed[0]):
            return FAULTS["some positions wrong"].finding("; ".join(filter(None, (parts[0], parts[-1]))))
        cause, fix = "not among the known mistakes", "compare the numbers above with yours; see also identify()"
        since = self.since if mixed is None else None  # else there is no "from there on"
        return Finding("unexplained", "; ".join(parts), cause, fix, since)

    def _whole_rows(self, rows: Any) -> bool:
        """Whether every feature that turns is wrong somewhere in these rows: then it is not about some of the pairs."""
        beyond: Any = np.asarray(self._ratio)[:, rows] > 1
        return bool(beyond.any(axis=(0, 1))[recipe_of(self.rope).writes].all())

    def _alone(self, wrong: Int64) -> bool:
        """Whether one position is wrong, and its neighbours, as many as there are in a short call, are not."""
        near = np.arange(max(int(wrong[0]) - 16, 0), min(int(wrong[0]) + 17, self.probe.max_position + 1))
        ratios = error_ratios(self._read(near), self.rope, self.probe.dtype)[grades(self.probe.dtype)[-1]]
        return bool((wrong == wrong[0]).all() and (near[(ratios > 1).any(axis=(0, 2))] == wrong[0]).all())

    def _rule_beyond(self) -> str:
        """The rule of the frequencies from the first wrong position on, in words, if one has them."""
        start = self._length or 0
        steps = np.array([0, *(2**k for k in range((self.probe.max_position - start).bit_length() - 1))])
        if self.probe.axes is not None or len(steps) < 4:
            return ""
        beyond = measure(self.probe.operator(start + steps), steps, self.probe.unit, self.probe.step)
        listed = ", or of ".join(rule.words for rule in rules(beyond, self.rope.head_dim))
        return f"from there on the frequencies are those of {listed}" if listed else ""

    def _switches(self) -> bool:
        """Whether nearly all is wrong from the first wrong position on, and far off at once: errors that grow slowly,
        until they exceed what is allowed, are something else."""
        if self._length is None or self._ratio is None or self._length < 16:
            return False
        rows = self._ratio.max(axis=(0, 2))[np.argsort(self.sample.at)]
        beyond = rows[np.sort(self.sample.at) >= self._length]
        return bool((beyond > 1).mean() > 0.9 and beyond[:3].min() > 64)

    def _scattered(self, ratio: Float64) -> tuple[Any, Any] | None:
        """The wrong rows, and the right ones beyond the first of them, where the positions are mixed. What may be off
        by the rounding of a float32 angle, far out, is not called right."""
        wrong, off = np.asarray((ratio > 1).any(axis=(0, 2))), np.abs(self.sample.y - self.truth)
        near = (off <= 16 * self.probe.unit * np.abs(self.truth).max()).all(axis=(0, 2))
        right = near & ~wrong & (self.sample.at > self.sample.at[wrong].min(initial=self.probe.max_position))
        return (wrong, right) if right.sum() > 3 else None

    def where(self) -> str:
        """The first wrong output, how many are wrong, and from which position on."""
        ratio = self._ratio
        if ratio is None:
            ratio = error_ratios(self.sample, self.rope, self.probe.dtype)[grades(self.probe.dtype)[-1]]
        if not (ratio > 1).any():
            return "no output is beyond what the worst grade allows"
        where = first_wrong(self.truth, self.sample.y, ratio > 1, self.sample.positions)
        features = np.flatnonzero((ratio > 1).any(axis=(0, 1)))
        first, last, only = int(features[0]), int(features[-1]), ""
        if last - first + 1 == features.size < ratio.shape[-1]:
            only = f", feature {first} alone" if first == last else f", {first} to {last}"
        where += f", in {features.size} of {ratio.shape[-1]} features{only}"
        if self._switches():
            where = f"right below position {self._length}, wrong from there on; {where}"
        elif mixed := self._scattered(ratio):
            bad, good = (np.unique(self.sample.at[rows]) for rows in mixed)
            listed = (", ".join(map(str, some[:6])) + (", …" if len(some) > 6 else "") for some in (bad, good))
            where = "wrong at positions {}, right at {}; ".format(*listed) + where
        elif self.since is not None and self.since > self.sample.at[(ratio > 1).any(axis=(0, 2))].min():
            where += f", from position {self.since} on by more than tests usually allow"
        lost = ~np.isfinite(self.sample.y).all(axis=(0, 2))
        if lost.any():
            start, first = (int(self.sample.at[rows].min()) for rows in (lost, (ratio > 1).any(axis=(0, 2))))
            where += f"; NaN or infinity from position {self._length or start if start == first else start} on"
        return where

    def _oddities(self, measured: Measured) -> list[str]:
        """What was measured, where it is not what was expected."""
        words, turning = [], 2 * len(measured.theta)
        expected = 2 * int(np.count_nonzero(frequencies(self.rope)))
        if turning != expected:
            words.append(f"{turning} features turn, {expected} expected")
        if measured.pairs.odd:
            words.append(f"{measured.pairs.odd} features belong to no pair")
        words += self._partners(measured) + self._rest()
        found = dict(zip(map(tuple, measured.pairs.reads.tolist()), measured.theta.tolist(), strict=True))
        pairs = [tuple(pair) for pair in recipe_of(self.rope).reads.tolist()]
        theta = np.array([found.get(pair, 0.0) for pair in pairs]) if found.keys() <= {*pairs} else measured.theta
        if len(theta) == self.rope.pairs and frequencies(self.rope).all() and theta.any():
            words += self._other_frequencies(theta, frequencies(self.rope))
        if measured.direction != self.rope.direction:
            words.append("it turns the other way")
        if abs(measured.factor / self.rope.attention_factor - 1) > 1e-3:
            words.append(f"the factor is {measured.factor:.6g}, {self.rope.attention_factor:.6g} expected")
        if measured.offset:
            words.append(f"the position offset is {measured.offset:g}")
        if self.rules and not self._switches():
            words.append("the frequencies are those of " + ", or of ".join(rule.words for rule in self.rules))
        turned = self._ratio is None or (self._ratio[..., recipe_of(self.rope).writes] > 1).any()
        return [*words, self._worst_block()] if turned else words

    def _partners(self, measured: Measured) -> list[str]:
        """Which features make a pair, where that is not as expected."""
        right = {tuple(sorted(map(int, pair))) for pair in recipe_of(self.rope).reads}
        got = sorted(tuple(sorted(map(int, pair))) for pair in measured.pairs.reads)
        if not got or right >= set(got):
            return []
        shown, meant = (", ".join(f"{a} and {b}" for a, b in some[:3]) for some in (got, sorted(right)))
        return [f"the pairs are {shown}, …, expected {meant}, …"]

    def _rest(self) -> list[str]:
        """What becomes of features that should stay as they are."""
        still = np.setdiff1d(np.arange(self.rope.head_dim), recipe_of(self.rope).writes)
        x, y = self.sample.x[:2][..., still], self.sample.y[:2][..., still]
        if not still.size or self._ratio is None or not (self._ratio[:2][..., still] > 1).any():
            return []
        factor = float((x * y).sum() / (x * x).sum())
        if np.abs(y - factor * x).max() <= 1e-2 * np.abs(y).max():
            return [f"features {still[0]} to {still[-1]}, which should stay, are multiplied with {factor:.6g}"]
        return [f"features {still[0]} to {still[-1]} should stay, and do not"]

    def _other_frequencies(self, theta: Float64, expected: Float64) -> list[str]:
        """How far off the measured frequencies are, and, if they are few, which."""
        off = theta / expected - 1
        pairs = np.flatnonzero(np.abs(off) > 1e-5)
        if not pairs.size:
            return []
        words = ", ".join(f"pair {i} turns by {theta[i]:.7g}, {expected[i]:.7g} expected" for i in pairs[:4])
        more = theta - expected
        fast, slow = (float(np.abs(part).max(initial=0)) for part in np.array_split(more, 2))
        # A phase of few bits is a little off, up and down, in most pairs; what is far off, or in some, is another rule.
        many = more.max() > 0 > more.min() and (np.abs(more) > max(fast, slow) / 32).mean() > 0.5
        if slow < 4 * fast < 16 * slow and max(fast, slow) < 1e-3 and many:
            grows = f"the error of the angle grows with the position, by up to {max(fast, slow):.2g} for each"
            bits = round(math.log2(np.pi / max(fast, slow)))
            return [f"{grows}, in fast and slow pairs alike, as that of a phase of {bits} bits for a turn: {words}, …"]
        if pairs.size <= 4:
            return [f"{words}, all others as expected"]
        same = np.abs(np.sort(theta) / np.sort(expected) - 1).max() <= 1e-5
        order = ", which are the expected ones in another order" if same else ""
        off_by = f"off by {off.min():+.2g} to {off.max():+.2g} of themselves"
        return [f"the frequencies of {pairs.size} of {len(theta)} pairs are {off_by}{order}: {words}, …"]

    def _worst_block(self) -> str:
        """The 2 × 2 block of the pair that is furthest off, beside the expected one: at the first wrong position or, if
        a few digits do not show it there, where the error is the largest."""
        off = np.nan_to_num(np.abs(self.sample.y - self.truth), nan=np.inf).max(axis=(0, 2))
        wrong = np.asarray(self._ratio is not None and (self._ratio > 1).any(axis=(0, 2)))
        positions = self.sample.at[wrong & (self.sample.at > 0)]
        first, worst = int(positions.min(initial=self.probe.max_position)), int(self.sample.at[off.argmax()])
        recipe, units = recipe_of(self.rope), np.eye(self.rope.head_dim)[:, None]
        for m, digits in ((first, 4), (worst, 4), (worst, 8), (worst, 12)):
            at = self.probe.everywhere(np.array([m]))
            operators = self.probe.operator(at)[0], rotated(units, at, self.rope)[:, 0].T
            blocks = [x[recipe.writes[:, :, None], recipe.reads[:, None, :]] for x in operators]  # (p, 2, 2)
            i = int(np.nan_to_num(np.abs(blocks[0] - blocks[1]), nan=np.inf).max(axis=(1, 2)).argmax())
            measured, expected = (
                np.array2string(block[i], precision=digits, suppress_small=True).replace("\n", "") for block in blocks
            )
            if measured != expected:
                break
        return f"at position {m}, pair {i} is multiplied with {measured}, expected {expected}"

    @cached_property
    def since(self) -> int | None:
        """The first position tried where the error exceeds what tests usually allow."""
        order = np.argsort(self.sample.at)
        wrong = self._visibly_wrong(self.sample)[order]
        if not wrong.any():
            return None
        positions, k = self.sample.at[order], int(np.argmax(wrong))
        if k and positions[k] - positions[k - 1] > 1:  # look closer, with the largest position of the call as before
            between = np.unique(np.linspace(positions[k - 1] + 1, positions[k], 48).astype(np.int64))
            closer = self._visibly_wrong(self._read(np.append(between, self.probe.max_position)))[:-1]
            if closer.any():
                return int(between[np.argmax(closer)])
        return int(positions[k])

    def _read(self, at: Int64, axis: int | None = None) -> Sample:
        """Dense vectors at these positions, of all axes or of one alone."""
        x, positions = self.probe.random(2, len(at), seed=9), along_axes(at, self.probe.axes)
        if axis is not None:
            positions = np.where(np.arange(len(positions))[:, None] == axis, at, 0)
        return Sample(x.astype(np.float64), self.probe.read(x, positions), positions)

    def _visibly_wrong(self, sample: Sample) -> Any:
        """At which of its rows tests with the usual tolerances would fail, and a right float32 pipeline would not."""
        rtol, atol = _USUAL[self.probe.dtype.name]
        truth = rotated(sample.x, sample.positions, self.rope)
        beyond = error_ratios(sample, self.rope, self.probe.dtype)[self.grade] > 1
        with np.errstate(invalid="ignore"):
            return (~(np.abs(sample.y - truth) <= atol + rtol * np.abs(truth)) & beyond).any(axis=(0, 2))
