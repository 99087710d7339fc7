"""What the wrong rows of a rotation come from: where they are, what became of them, how the operator differs."""

from __future__ import annotations

from contextlib import suppress
from typing import TypeAlias

import numpy as np

from ..backend import Array
from ..theta import LENGTH_DEPENDENT
from . import damage, differences, operator
from .calls import REUSED
from .candidate import Unreadable
from .comparison import Check
from .evidence import LOST, MOST, STALE, UNCHANGED, ZEROS, Evidence
from .positions import ELSEWHERE, STATE, Became
from .report import Finding
from .rows import ABOUT, COUNTED
from .rules import Rule

# What is wrong in some rows, and what became of them, has a name of its own.
BOTH = {
    ("head ≥ 1", UNCHANGED): "only the first head rotated",
    ("head of all ≥ 1", UNCHANGED): "only the first head rotated",
    ("row ≥ 1", UNCHANGED): "only the first row rotated",
    ("rows after it = 0", UNCHANGED): "last row not rotated",
    ("rows = 1", ""): "one row differs",
    ("values of x", LOST): "rows leak into each other",
    ("largest number", LOST): LOST,
    ("position", LOST): LOST,
}
Measurements: TypeAlias = tuple[tuple[str, str, str], ...]  # name, expected, measured


def diagnosed(check: Check) -> tuple[list[Finding], Measurements]:
    """The findings about wrong rows, causes first, and what was measured where nothing explains them."""
    if not any(one.wrong.any() for one in check.answers):
        return ([Finding(STATE, check.state)] if check.state else []), ()
    diagnosis = Diagnosis(check)
    return diagnosis.findings(), diagnosis.measured


def read_all(check: Check) -> None:
    """Makes every call that a diagnosis may make, for those who record the answers."""
    for size in damage.sizes(check.dtype):
        damage.at_zero(check, size)
    damage.multiples(check)
    described(check)


def described(check: Check) -> tuple[operator.Description | None, Array]:
    """What `operator` reads. Raises `Unreadable`."""
    plan, first = check.plan, operator.shape_of(check.rope)
    return operator.read(check.candidate, plan.head_dim, plan.dtype, plan.top, plan.axes, first)


class Diagnosis:
    """The findings of a check; ``rows`` is everywhere a choice of its wrong rows, bool (W,)."""

    def __init__(self, check: Check) -> None:
        self.check, self.evidence = check, Evidence(check)
        self.measured: Measurements = ()
        self.covered = np.zeros(len(self.evidence.x), bool)  # rows that what was found implies

    def findings(self) -> list[Finding]:
        evidence, check = self.evidence, self.check
        rows, looks = np.ones(len(evidence.x), bool), [*evidence.looks()]
        if looks[0].holds.any():  # what was not written may be anything, and changes from call to call
            return [self._finding(STALE, looks[0].words, looks[0].holds)]
        became, rule = evidence.became(rows), evidence.rule(rows)
        if check.state and (check.spoilt or evidence.some or became is None):
            return [Finding(STATE, check.state, evidence.where(rows, rule))]
        apart = [one for one in looks if 0.01 < one.holds.mean() < MOST]
        if became is not None or (rule is not None and rule.exact):
            apart = []
        for one in apart:  # some rows hold nothing: others may say more
            rows &= ~one.holds
        first = self._explained(rows) if rows.any() else []
        apart = [one for one in apart if (one.holds & ~self.covered).any()]
        return first + [self._by_rule(one.holds, one, evidence.rule(one.holds, among=True)) for one in apart]

    def _explained(self, rows: Array) -> list[Finding]:
        """What these rows come from: a mistake of positions, of some calls, of numbers, or of the operator."""
        evidence = self.evidence
        became = evidence.became(rows)
        rule = evidence.rule(rows, became if became is not None and became.general else None)
        exact = rule if rule is not None and rule.exact and evidence.some else None
        if became is not None and not became.general and not (exact and became.fault == ELSEWHERE):
            return [self._finding(became.fault, became.words, rows, rule)]
        if exact is not None and exact.about in ("largest number", "values of x") and (found := self._damaged(rows)):
            return found
        if exact is not None and exact.about != "position":
            return [self._by_rule(rows, became, exact)]
        if became is not None and became.fault in (UNCHANGED, ZEROS, LOST) and not evidence.some:
            return [self._finding(became.fault, became.words, rows)]
        if (became is None or exact is None) and (found := self._damaged(rows) or self._differing(rows)):
            return found
        if rule is not None and evidence.some and rule.share > 0.5:
            return [self._by_rule(rows, became, rule)]
        if became is not None:
            return [self._finding(ELSEWHERE if became.general else became.fault, became.words, rows)]
        with suppress(Unreadable):
            description, _ = described(self.check)
            self.measured = () if description is None else description.rows(self.check.rope)
        return [self._finding("unexplained", evidence.off(rows), rows, rule)]

    def _finding(self, fault: str, fact: str, rows: Array, rule: Rule | None = None) -> Finding:
        where = self.evidence.where(rows, rule or self.evidence.rule(rows))
        return Finding(fault, fact, where, int(np.abs(self.evidence.at[:, rows]).max(axis=0).min()))

    def _by_rule(self, rows: Array, became: Became | None, rule: Rule | None) -> Finding:
        """A finding that is named by where it is, and what became of the rows there."""
        words, what = (self.evidence.off(rows), "") if became is None else (became.words, became.fault)
        if rule is None:
            return self._finding(what or "unexplained", words, rows)
        self.covered |= rule.holds[self.evidence.table.wrong]
        first = rule.words.partition(" and ")[0].partition(" (")[0]
        name = BOTH.get((first, what)) or BOTH.get((first, "")) or BOTH.get((rule.about, what)) or _name(rule)
        return self._finding(name, words, rows, rule)

    def _damaged(self, rows: Array) -> list[Finding]:
        with suppress(Unreadable):
            if (found := damage.damaged(self.check)) is not None:
                self.covered[:] = True
                return [self._finding(*found, rows)]
        return []

    def _differing(self, rows: Array) -> list[Finding]:
        """How the operator that is read with unit vectors differs from the expected one."""
        check = self.check
        try:
            description, reached = described(check)
        except Unreadable as error:
            check.notes.append(f"the operator could not be read: {error}")
            return []
        if description is None:
            one = differences.pairing(reached, operator.shape_of(check.rope).sources(check.plan.head_dim))
            return [self._finding(one.fault, one.fact, rows)]
        found = differences.differences(description, check.rope)
        left = self._left_over(rows, description) if found else None
        if left is None:
            return []
        findings = [self._finding(found[0].fault, found[0].fact, rows)]
        return findings + [Finding(one.fault, one.fact) for one in found[1:]] + left

    def _left_over(self, rows: Array, description: operator.Description) -> list[Finding] | None:
        """What the description does not predict, where it says anything: a second mistake, or a note; None if that is
        most of it. Angles that are nearly right are left to the names of roundings."""
        evidence, several = self.evidence, self.check.plan.axes is not None
        said = (np.abs(evidence.at).max(axis=0) <= description.straight) & evidence.finite
        if isinstance(self.check.rope.scaling, LENGTH_DEPENDENT):  # it was read at the largest position
            said &= evidence.column("greatest position") == self.check.plan.top
        due = description.predict(evidence.x, evidence.at if several else evidence.at[0])
        off = np.abs(due - evidence.y).max(axis=-1)
        self.covered |= off <= 0.4 * np.abs(evidence.x).max(axis=-1) * max(1.0, description.factor)
        said, left = said & rows, said & rows & ~self.covered
        if 2 * left.sum() > said.sum():
            return None
        if left.sum() > (1 - MOST) * said.sum():
            rule = evidence.rule(left, among=True)
            if rule is not None and rule.exact:
                return [self._by_rule(left, evidence.became(left), rule)]
            self.check.notes.append(f"this explains {said.sum() - left.sum():,} of {said.sum():,} wrong rows")
        return []


def _name(rule: Rule) -> str:
    """The mistake that a rule shows, by what it is about."""
    about, words = rule.about, rule.words
    if about == "order" and {*words.partition(" and ")[0].removeprefix("order: ").split(", or ")} <= {*COUNTED}:
        return "consecutive positions wrong"
    if REUSED in words or about.startswith("an earlier call"):
        return STATE
    if about == "position":
        return "one position wrong" if " = " in words else "wrong beyond a position" if "≥" in words else ELSEWHERE
    return ABOUT.get(about, "some shapes wrong" if about.startswith("x has") else "some lengths wrong")
