"""What the wrong rows of a rotation come from: where they are, what became of them, how the operator differs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np

from ..backend import Array
from ..definition import pairs
from ..theta import LENGTH_DEPENDENT, frequencies
from . import differences, operator
from .calls import FEW, PLAIN, REUSED, USUAL, Maker, RotationCall
from .candidate import Unreadable
from .comparison import POISON, RotationCheck
from .frequencies import listed
from .positions import ELSEWHERE, NEGATIVE, STATE, Became, moved
from .report import Finding, side_by_side
from .responses import Function, response
from .rows import ABOUT, COUNTED, tabulated, tails
from .rules import Rule, simplest
from .tolerance import APPLICABLE, Expected

SOME = 0.1  # of the rows are right: then there is a rule to be found
MOST = 0.98  # of the wrong rows became the same
UNCHANGED, ZEROS, LOST, STALE = "not rotated", "zeros returned", "not finite", "output not written"
NOTHING = UNCHANGED, ZEROS, LOST  # what rows may have become without a rotation
LEAK = "rows leak into each other"
OF_POSITIONS = {" = ": "one position wrong", "≥": "wrong beyond a position", "≤ -": NEGATIVE}  # by what a rule says
CLOSE = {"float64": 1e-9, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}  # of what is read at position 0
ROUNDED, NAMED = ("rounded", "cut", "quantised"), ("bfloat16", "float16")  # the last have names of their own
Measurements: TypeAlias = tuple[tuple[str, str, str], ...]  # name, expected, measured


def diagnosed(check: RotationCheck) -> tuple[list[Finding], Measurements]:
    """The findings about wrong rows, causes first, and what was measured where nothing explains them."""
    if not any(one.wrong.any() for one in check.answers):
        return ([Finding(*check.state)] if check.state else []), ()
    wrong = Diagnosis(check)
    return wrong.findings(), wrong.measured


def described(check: RotationCheck) -> tuple[operator.Description | None, Array]:
    """What `operator` reads. Raises `Unreadable`."""
    return operator.read(_probe(check), operator.shape_of(check.rope))


def _probe(check: RotationCheck) -> operator.Probe:
    plan = check.plan
    return operator.Probe(check.candidate, check.rope.head_dim, plan.dtype, plan.top, plan.axes)


class Diagnosis:
    """The findings of a check with W wrong rows; ``rows`` is everywhere a choice of these, bool (W,)."""

    def __init__(self, check: RotationCheck) -> None:
        self.check, self.table = check, tabulated(check.answers, check.plan.axes)
        parts = [*self._gathered()]
        self.x, self.y, self.truth, self.allowed = (np.concatenate([part[k] for part in parts]) for k in range(4))
        self.finite = np.isfinite(self.x).all(axis=-1)
        self.at = np.stack([facts["p"][self.table.wrong] for facts in self.table.facts])  # (axes, W)
        fully = np.mean([not one.wrong.any() for one in check.answers if one.call.positions.any()])
        self.some = check.right > SOME * check.turning or bool(fully > SOME / 2)  # whether some are right
        self.measured: Measurements = ()
        self.of_numbers = False  # whether what was found is about the numbers of all rows

    def _gathered(self) -> Iterator[tuple[Array, ...]]:
        """x, y, the truth and what is allowed of the wrong rows in the table, each (k, d)."""
        table, worst = self.table, APPLICABLE[self.check.dtype][-1]
        for k in np.unique(table.answer[table.wrong]):
            one, place = self.check.answers[k], table.place[table.wrong & (table.answer == k)]
            index = np.unravel_index(place, one.wrong.shape)
            y, call = one.y, RotationCall(one.call.x[index], one.call.each()[(slice(None), *index)])
            assert y is not None
            expected = self.check.expected(call, rope=self.check.rope_of(one.call))
            yield expected.x, y[index], expected.y, expected.allowed(worst)

    def findings(self) -> list[Finding]:
        """Of rows that hold nothing where others hold something else, the others are explained first."""
        rows, (stale, *looks) = np.ones(len(self.x), bool), self._looks()
        if stale.holds.any():  # what was not written may be anything, and changes from call to call
            return [self.finding(STALE, stale.words, stale.holds)]
        became, rule = self._became(rows), self._rule(rows)
        if self.check.state and (self.check.spoilt or self.some or became is None):
            return [Finding(*self.check.state, self._where(rows, rule))]
        clear = (became is not None and became.fault != ELSEWHERE) or (rule is not None and rule.exact)
        apart = [] if clear else [one for one in looks if 0.01 < one.holds.mean() < MOST]
        for one in apart:
            rows &= ~one.holds
        found = next(some for some in self._explanations(rows) if some) if rows.any() else []
        for one in () if self.of_numbers else apart:
            found.append(self.finding(one.fault, one.words, one.holds, self._rule(one.holds, among=True)))
        return found

    def _explanations(self, rows: Array) -> Iterator[list[Finding]]:
        """What these rows may come from: a mistake of positions, of some calls, of numbers, or of the operator. The
        first that finds something is right; the last one always does."""
        became = self._became(rows)
        rule = self._rule(rows, became if became is not None and became.general else None)
        exact = rule if rule is not None and rule.exact and self.some else None
        if became is not None and not became.general and not (exact and became.fault == ELSEWHERE):
            yield [self.finding(became.fault, became.words, rows, rule)]
        if became is not None and became.fault in NOTHING and not self.some:
            yield [self.finding(became.fault, became.words, rows)]
        if exact is None or exact.about in ("largest number", "values of x"):
            yield self._damaged(rows)
        with suppress(Unreadable):
            if (fact := _leaks(self.check)) is not None:
                yield [self.finding(LEAK, fact, rows)]
        if exact is not None and exact.about != "position":
            yield [self._by_rule(rows, became, exact)]
        if exact is None or became is None:
            yield self._differing(rows)
        if rule is not None and self.some and rule.share > 0.5:
            yield [self._by_rule(rows, became, rule)]
        if became is not None:
            elsewhere = became.general and became.fault not in NOTHING
            yield [self.finding(ELSEWHERE if elsewhere else became.fault, became.words, rows)]
        with suppress(Unreadable):
            description, _ = described(self.check)
            self.measured = () if description is None else tuple(s[:3] for s in description.sides(self.check.rope))
        yield [self.finding("unexplained", self._off(rows), rows, rule)]

    def finding(self, fault: str, fact: str, rows: Any = True, rule: Rule | None = None) -> Finding:
        """About these rows, or all."""
        rows = rows & np.ones(len(self.x), bool)
        where = self._where(rows, rule or self._rule(rows))
        return Finding(fault, fact, where, int(np.abs(self.at[:, rows]).max(axis=0).min()))

    def _by_rule(self, rows: Array, became: Became | None, rule: Rule) -> Finding:
        """A finding that is named by where it is, and what became of the rows there."""
        words, what = (self._off(rows), "") if became is None else (became.words, became.fault)
        leak = (rule.about, what) == ("values of x", LOST) and ("NaN" in rule.words or "infinity" in rule.words)
        return self.finding(LEAK if leak else LOST if what == LOST else _name(rule), words, rows, rule)

    def _damaged(self, rows: Array) -> list[Finding]:
        with suppress(Unreadable):
            if (found := _damaged(self.check)) is not None:
                self.of_numbers = True
                return [self.finding(*found, rows)]
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
            one = differences.pairing(reached, operator.shape_of(check.rope).sources(check.rope.head_dim))
            return [self.finding(one.fault, one.fact, rows)]
        found = differences.differences(description, check.rope)
        if not found or not self._predicts(description, rows):
            return []
        findings = [self.finding(found[0].fault, found[0].fact, rows)]
        return findings + [Finding(one.fault, one.fact) for one in found[1:]]

    def _predicts(self, description: operator.Description, rows: Array) -> bool:
        """Whether the description predicts most of the rows that it speaks of; a note says so if it does not predict
        all. Angles that are nearly right are left to the names of roundings."""
        if max(description.skew, description.uneven) > 0.1:
            return True  # it is no rotation, and tells the ladder's positions alone
        said = rows & (np.abs(self.at).max(axis=0) <= description.straight) & self.finite
        if isinstance(self.check.rope.scaling, LENGTH_DEPENDENT):  # it was read at the largest position
            said &= self.table.columns["greatest position"][self.table.wrong] == self.check.plan.top
        off = np.abs(description.predict(self.x, self.at) - self.y).max(axis=-1)
        left = said & ~(off <= 0.4 * np.abs(self.x).max(axis=-1) * max(1.0, description.factor))
        if (1 - MOST) * said.sum() < left.sum() <= said.sum() / 2:
            self.check.notes.append(f"this explains {said.sum() - left.sum():,} of {said.sum():,} wrong rows")
        return bool(2 * left.sum() <= said.sum())

    # ── Where ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _rule(self, rows: Array, became: Became | None = None, among: bool = False) -> Rule | None:
        """The simplest statement about these wrong rows, about positions alone if few are right. Those that would be
        right with what these became say nothing, nor do other wrong rows, unless these are to be told from ``among``
        them."""
        table, wrong = self.table, np.zeros(len(self.table.wrong), bool)
        wrong[np.flatnonzero(table.wrong)[rows]] = True
        silent = np.asarray(False if became is None else became.silent)
        columns = self._columns(wrong) if self.some or among else {"position": table.columns["position"]}
        speaks = table.speaks & (wrong | among | ~(table.wrong | silent))
        return simplest(columns, wrong, speaks)

    def _columns(self, wrong: Array) -> dict[str, Array]:
        """The columns of the table; tails of blocks; the shape of x, if all that is wrong has one. Of a whole
        call that is wrong alone, positions say nothing."""
        answers, of = self.check.answers, self.table.answer
        columns, calls = self.table.columns | dict(tails(self.table.columns, wrong)), np.unique(of[wrong])
        shapes = {answers[k].call.x.shape for k in calls}
        if len(shapes) == 1:
            same = np.array([one.call.x.shape in shapes for one in answers])
            columns[f"x has the shape {shapes.pop()}"] = same[of]
        alone = answers[calls[0]].wrong
        if len(calls) == 1 and alone.shape[-1] > 1 and alone.all():
            del columns["position"]
        return columns

    def _where(self, rows: Array, rule: Rule | None) -> str:
        """The rule, if it is exact or says more than how many are wrong, and the first wrong number."""
        if rule is not None and rule.exact:
            return f"exactly where {rule.words}; {self._first(rows)}"
        says = rule is not None and rule.share > max(0.5, 0.1 + rows.sum() / len(self.table.wrong))
        share = f", {rule.share:.0%} of those where {rule.words}" if rule is not None and says else ""
        looked = f"{int(rows.sum()):,} of the {len(self.table.wrong):,} rows looked at are wrong"
        return f"{looked}{share}; {self._first(rows)}"

    def _first(self, rows: Array) -> str:
        """The first wrong number: of the first wrong call, the row at the smallest position."""
        answer, place = (column[self.table.wrong] for column in (self.table.answer, self.table.place))
        own = np.flatnonzero(rows & (answer == answer[rows].min()))
        k = own[np.argmin(np.abs(self.at[:, own]).max(axis=0))]
        one = self.check.answers[answer[k]]
        f = int(np.argmax(~(np.abs(self.y[k] - self.truth[k]) <= self.allowed[k])))
        index = *(int(i) for i in np.unravel_index(place[k], one.wrong.shape)), f
        names = ("batch", "head", "row", "feature")[-len(index) :] if len(index) <= 4 else ("index",) * len(index)
        where = ", ".join(f"{axis} {i}" for axis, i in zip(names, index, strict=True))
        due, got = side_by_side(self.truth[k, f], self.y[k, f])
        at = ", ".join(map(str, self.at[:, k]))
        return f"x {one.call.x.shape} at position {at}, {where}: expected {due}, got {got}"

    def _off(self, rows: Array) -> str:
        """How far off these rows are, and in how many features; of rows of ordinary numbers, if there are any."""
        plain = rows & np.isfinite(self.y).all(axis=-1) & (np.abs(self.x).max(axis=-1) < 2.0**20)
        rows = plain if plain.any() else rows
        off, size = np.abs(self.y - self.truth)[rows], np.abs(self.truth[rows]).max()
        features = np.flatnonzero((off > self.allowed[rows]).any(axis=0))
        some = f", in {listed(features, 'feature')}" if 0 < len(features) < off.shape[-1] else ""
        return f"off by up to {np.nanmax(off, initial=0):.3g} where numbers are up to {size:.3g}{some}"

    # ── What became of rows ──────────────────────────────────────────────────────────────────────────────────────────

    def _became(self, rows: Array) -> Became | None:
        """What nearly all of these rows became, if that is one and the same thing."""
        return next((one for one in self._looks() if one.holds[rows].mean() >= MOST), None) or self._moved(rows)

    def _looks(self) -> Iterator[Became]:
        """What is seen at once: each holds for some rows."""
        x, y, finite = self.x, self.y, np.isfinite(self.y).all(axis=-1)
        poison = float(self.check.plan.dtype.type(POISON))
        # Among large numbers of few bits, that number may be a result by chance.
        stale = (y == poison).any(axis=-1) & (np.abs(x).max(axis=-1, initial=0) < POISON / 4)
        yield Became(STALE, "outputs are what stood in memory before", stale, True)
        yield Became(LOST, "NaN or infinity comes out", ~finite & self.finite, True)
        yield Became("not linear", "rows that are not finite come out as finite numbers", finite & ~self.finite)
        yield Became(ZEROS, "zeros come out", ~y.any(axis=-1), True)
        yield Became(UNCHANGED, "x comes back as it was", (y == x).all(axis=-1), True)
        factor = np.median(y / self.truth, axis=-1)
        if np.ptp(factor) < 1e-3 * abs(factor[0]) and abs(factor[0] - 1) > 1e-2:
            near = np.abs(y - factor[0] * self.truth) <= 4 * self.allowed * max(1.0, abs(factor[0]))
            yield Became("attention factor", f"rows are the right ones times {factor[0]:.6g}", near.all(axis=-1), True)

    def _moved(self, rows: Array) -> Became | None:
        """The positions that these rows are turned by instead of theirs, on any axis."""
        check, rope = self.check, self.check.rope
        rows = rows & np.isfinite(self.y).all(axis=-1) & self.finite
        if check.by_call or not rows.any():
            return None
        (a, b), (c, d) = pairs(rope.layout, rope.width, rope.start)
        x, y, theta = self.x[rows], self.y[rows], frequencies(rope) * rope.direction
        turned = np.nan_to_num((y[:, c] + 1j * y[:, d]) / (x[:, a] + 1j * x[:, b]) / rope.attention_factor)
        rest = np.delete(np.arange(x.shape[-1]), np.r_[c, d])
        changed = (np.abs(y - x)[:, rest] > self.allowed[rows][:, rest]).any(axis=-1)
        if np.median(np.abs(np.abs(turned) - 1)) > 0.01 + 4 * check.unit or changed.mean() > 1 - MOST:
            return None  # lengths are others, or what should stay does not: positions are not all
        which, narrow = np.flatnonzero(self.table.wrong)[rows], check.unit > 1e-4
        owner = np.array(check.tables(rope).owner)
        for axis, facts in enumerate(self.table.facts):
            found = moved(turned[:, owner == axis], theta[owner == axis], facts, which, narrow)
            if found is not None:
                return found._replace(words=found.words + (f", on axis {axis}" if rope.axes is not None else ""))
        return None


def _name(rule: Rule) -> str:
    """The mistake that a rule shows, by what it is about."""
    about, words = rule.about, rule.words
    if about == "order" and {*words.partition(" and ")[0].removeprefix("order: ").split(", or ")} <= {*COUNTED}:
        return "consecutive positions wrong"
    if REUSED in words or about.startswith("an earlier call"):
        return STATE
    if about == "position":
        return next((name for sign, name in OF_POSITIONS.items() if sign in words), ELSEWHERE)
    if about.startswith("the head"):
        return ABOUT["head"]
    return ABOUT.get(about, "some shapes wrong" if about.startswith("x has") else "some lengths wrong")


# ── Numbers that are changed before or after they turn: rounded, clipped, normalised, added to ───────────────────────


def _damaged(check: RotationCheck) -> tuple[str, str] | None:
    """The name and the fact, if numbers are changed. Raises `Unreadable`."""
    for low, high in _sizes(check.dtype):
        x, y = _at_zero(check, low, high)
        found = response(x, y[..., :1, :], CLOSE[check.dtype])
        if found.function is not None and (named := _of_numbers(check, found.words, found.function)):
            return named
    words = operator.not_linear(_probe(check))
    return ("not linear", words) if words else None


def _leaks(check: RotationCheck) -> str | None:
    """Whether a wrong row changes with the numbers of other rows or heads, in words. Raises `Unreadable`."""
    plain = (one for one in check.answers if one.wrong.any() and one.call[2:5] == (PLAIN, PLAIN, USUAL))
    if (one := next((one for one in plain if one.wrong.size > 1), None)) is None:
        return None
    (call, y, wrong), x = one, one.call.x[..., ::-1].copy()  # the greatest number of each row stays
    row = tuple(int(i) for i in np.argwhere(wrong)[-1])
    x[row] = call.x[row]
    before, after = check.ask(call), check.ask(call._replace(x=x))
    off, close = np.abs(after - before)[row].max(), 16 * check.unit * np.abs(before).max()
    if not np.abs(before - y).max() <= close or not off > close:
        return None
    return f"row {row} of x {call.x.shape} changes by up to {off:.2g} with the numbers of all others"


def _sizes(dtype: str) -> tuple[tuple[int, int], ...]:
    """Powers of two between which the numbers are that are followed."""
    return (0, 0), (-6, 6) if dtype == "float16" else (-14, 10)


def _at_zero(check: RotationCheck, low: int = 0, high: int = 0) -> tuple[Array, Array]:
    """Numbers of these sizes at position 0, where nothing turns, and what comes out: two float64 (2, n, d). Raises
    `Unreadable`."""
    maker = Maker(check.plan)
    x = maker.x(2, 4 * FEW)
    x = (x * 2.0 ** np.random.default_rng(8).uniform(low, high, x.shape)).astype(x.dtype)
    y = check.ask(RotationCall(x, maker.at(np.zeros(4 * FEW, np.int64))))
    return x.astype(np.float64), y / check.rope.attention_factor


def _of_numbers(check: RotationCheck, words: str, function: Function) -> tuple[str, str] | None:
    """The name and the fact, if the function explains a whole call: of x, or of the result."""
    one = max(check.answers, key=lambda one: one.wrong.sum() * (one.call.x.size < 2**16))
    expected = check.expected(one.call)
    before = Expected(expected.tables, function(expected.x), expected.positions, check.dtype).y
    errors = (np.abs(one.y - y)[one.wrong].max(axis=-1) for y in (expected.y, before, function(expected.y)))
    plain, of_x, of_results = (float(np.median(error)) for error in errors)
    if not min(of_x, of_results) <= 0.25 * plain:
        return None
    what, side = ("the numbers of x are", "input") if of_x <= of_results else ("the results are", "results")
    how = words.removeprefix("rounded to ")
    name = f"{side} rounded: {how.partition(',')[0]}" if words.startswith(ROUNDED) else "not linear"
    return f"{how} {side}" if how in NAMED else name, f"{what} {words}"
