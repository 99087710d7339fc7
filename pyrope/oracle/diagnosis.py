"""What the wrong rows of a rotation come from: where they are, what became of them, how the operator differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
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
# What is wrong in some rows, and what became of them, has a name of its own.
LEAK = "rows leak into each other"
BOTH = {("values of x", LOST): LEAK, ("largest number", LOST): LOST, ("position", LOST): LOST}
OF_POSITIONS = {" = ": "one position wrong", "≥": "wrong beyond a position", "≤ -": NEGATIVE}  # by what a rule says
CLOSE = {"float64": 1e-9, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}  # of what is read at position 0
ROUNDED, NAMED = ("rounded", "cut", "quantised"), ("bfloat16", "float16")  # the last have names of their own
# Right results in other places (…, h, n, d): where they are, and what puts them back.
PLACES: dict[str, Callable[[Array], Array]] = {
    "rows come out in reversed order": lambda y: y[..., ::-1, :],
    "each row comes out one row further": lambda y: np.roll(y, -1, axis=-2),
    "each row comes out one row earlier": lambda y: np.roll(y, 1, axis=-2),
    "heads come out in reversed order": lambda y: y[..., ::-1, :, :],
    "heads and rows exchanged in memory": lambda y: y.reshape(*y.shape[:-3], *y.shape[-2:-4:-1], -1).swapaxes(-2, -3),
}
Measurements: TypeAlias = tuple[tuple[str, str, str], ...]  # name, expected, measured


def diagnosed(check: RotationCheck) -> tuple[list[Finding], Measurements]:
    """The findings about wrong rows, causes first, and what was measured where nothing explains them."""
    if not any(one.wrong.any() for one in check.answers):
        return ([Finding(*check.state)] if check.state else []), ()
    (call, y), grade = check.sample, APPLICABLE[check.dtype][-1]
    expected, wrong = check.expected(call), Diagnosis(check)
    for words, back in PLACES.items() if expected.wrong(grade, y).any() else ():
        if not expected.wrong(grade, back(y)).any():
            return [wrong.finding("results in other places", words)], ()
    return wrong.findings(), wrong.measured


def described(check: RotationCheck) -> tuple[operator.Description | None, Array]:
    """What `operator` reads. Raises `Unreadable`."""
    plan, rope = check.plan, check.rope
    probe = operator.Probe(check.candidate, rope.head_dim, plan.dtype, plan.top, plan.axes)
    return operator.read(probe, operator.shape_of(rope))


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
        self._moved_away: dict[int, bool] = {}  # of calls: whether positions that are wrong there are right in another
        self.covered = np.zeros(len(self.x), bool)  # rows that what was found implies

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
        rows, looks = np.ones(len(self.x), bool), [*self._looks()]
        if looks[0].holds.any():  # what was not written may be anything, and changes from call to call
            return [self.finding(STALE, looks[0].words, looks[0].holds)]
        became, rule = self._became(rows), self._rule(rows)
        if self.check.state and (self.check.spoilt or self.some or became is None):
            return [Finding(*self.check.state, self._where(rows, rule))]
        clear = (became is not None and became.fault != ELSEWHERE) or (rule is not None and rule.exact)
        apart = [] if clear else [one for one in looks if 0.01 < one.holds.mean() < MOST]
        for one in apart:
            rows &= ~one.holds
        found = next(some for some in self._explanations(rows) if some) if rows.any() else []
        for one in apart:
            if (one.holds & ~self.covered).any():
                rule = self._rule(one.holds, among=True)
                found.append(self._by_rule(one.holds, one, rule if rule is not None and rule.exact else None))
        return found

    def _explanations(self, rows: Array) -> Iterator[list[Finding]]:
        """What these rows may come from: a mistake of positions, of some calls, of numbers, or of the operator. The
        first that finds something is right; the last one always does."""
        became = self._became(rows)
        rule = self._rule(rows, became if became is not None and became.general else None)
        exact = rule if rule is not None and rule.exact and self.some else None
        if became is not None and not became.general and not (exact and became.fault == ELSEWHERE):
            yield [self.finding(became.fault, became.words, rows, rule)]
        if became is not None and became.fault in (UNCHANGED, ZEROS, LOST) and not self.some:
            yield [self.finding(became.fault, became.words, rows)]
        if exact is None or exact.about in ("largest number", "values of x"):
            yield self._damaged(rows)
        yield self._leaking(rows)
        if exact is not None and exact.about != "position":
            yield [self._by_rule(rows, became, exact)]
        if exact is not None and became is None:
            yield self._damaged(rows)
        if exact is None or became is None:
            yield self._differing(rows)
        if rule is not None and self.some and rule.share > 0.5:
            yield [self._by_rule(rows, became, rule)]
        if became is not None:
            yield [self.finding(ELSEWHERE if became.general else became.fault, became.words, rows)]
        with suppress(Unreadable):
            description, _ = described(self.check)
            self.measured = () if description is None else tuple(s[:3] for s in description.sides(self.check.rope))
        yield [self.finding("unexplained", self._off(rows), rows, rule)]

    def finding(self, fault: str, fact: str, rows: Any = True, rule: Rule | None = None) -> Finding:
        """About these rows, or all."""
        rows = rows & np.ones(len(self.x), bool)
        where = self._where(rows, rule or self._rule(rows))
        return Finding(fault, fact, where, int(np.abs(self.at[:, rows]).max(axis=0).min()))

    def _by_rule(self, rows: Array, became: Became | None, rule: Rule | None) -> Finding:
        """A finding that is named by where it is, and what became of the rows there."""
        words, what = (self._off(rows), "") if became is None else (became.words, became.fault)
        if rule is None:
            return self.finding(what or "unexplained", words, rows)
        self.covered |= rule.holds[self.table.wrong]
        return self.finding(BOTH.get((rule.about, what)) or _name(rule), words, rows, rule)

    def _damaged(self, rows: Array) -> list[Finding]:
        with suppress(Unreadable):
            if (found := _damaged(self.check)) is not None:
                self.covered[:] = True
                return [self.finding(*found, rows)]
        return []

    def _leaking(self, rows: Array) -> list[Finding]:
        """Whether the outputs of a row, or of a head, change with the numbers of another one."""
        with suppress(Unreadable):
            if (fact := _leaks(self.check)) is not None:
                self.covered[:] = True
                return [self.finding(LEAK, fact, rows)]
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
        left = self._left_over(rows, description) if found else None
        if left is None:
            return []
        findings = [self.finding(found[0].fault, found[0].fact, rows)]
        return findings + [Finding(one.fault, one.fact) for one in found[1:]] + left

    def _left_over(self, rows: Array, description: operator.Description) -> list[Finding] | None:
        """What the description does not predict, where it says anything: a second mistake, or a note; None if that is
        most of it. Angles that are nearly right are left to the names of roundings."""
        if max(description.skew, description.uneven) > 0.1:
            return []  # it is no rotation, and tells the ladder's positions alone
        said = rows & (np.abs(self.at).max(axis=0) <= description.straight) & self.finite
        if isinstance(self.check.rope.scaling, LENGTH_DEPENDENT):  # it was read at the largest position
            said &= self.table.columns["greatest position"][self.table.wrong] == self.check.plan.top
        off = np.abs(description.predict(self.x, self.at) - self.y).max(axis=-1)
        self.covered |= off <= 0.4 * np.abs(self.x).max(axis=-1) * max(1.0, description.factor)
        left = said & ~self.covered
        if 2 * left.sum() > said.sum():
            return None
        if left.sum() > (1 - MOST) * said.sum():
            rule = self._rule(left, among=True)
            if rule is not None and rule.exact:
                return [self._by_rule(left, self._became(left), rule)]
            self.check.notes.append(f"this explains {said.sum() - left.sum():,} of {said.sum():,} wrong rows")
        return []

    # ── Where ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _rule(self, rows: Array, became: Became | None = None, among: bool = False) -> Rule | None:
        """The simplest statement about these wrong rows: about positions alone if few are right, about earlier calls if
        that says more. Other wrong rows, unless it is about what is special ``among`` them, and those that would be
        right with what they became, say nothing."""
        table, wrong = self.table, np.zeros(len(self.table.wrong), bool)
        wrong[np.flatnonzero(table.wrong)[rows]] = True
        silent = np.asarray(False if became is None else became.silent)
        speaks, columns = table.speaks & (wrong | among | ~(table.wrong | silent)), self._columns(wrong)
        if not (self.some or among):
            columns = {"position": columns["position"]}
        rule = simplest({name: column for name, column in columns.items() if "call" not in name}, wrong, speaks)
        if rule is not None and rule.exact:
            return rule
        other = simplest(columns, wrong, speaks)
        return rule if rule is not None and other is not None and other.share < rule.share + 0.05 else other

    def _columns(self, wrong: Array) -> dict[str, Array]:
        """The columns of the table; tails of blocks; the shape of x, if all that is wrong has one; the number of the
        call, if several calls are wrong."""
        answers, of = self.check.answers, self.table.answer
        columns = self.table.columns | dict(tails(self.table.columns, wrong))
        shapes = {answers[k].call.x.shape for k in np.unique(of[wrong])}
        if len(shapes) == 1:
            same = np.array([one.call.x.shape in shapes for one in answers])
            columns[f"x has the shape {shapes.pop()}"] = same[of]
        if len(np.unique(of[wrong])) < 3:
            del columns["number of the call"]
        if self.some and self._right_elsewhere(wrong):
            del columns["position"]
        return columns

    def _right_elsewhere(self, wrong: Array) -> bool:
        """Whether these rows of the table, all of one call, have positions that are right in another one."""
        answers, check = np.unique(self.table.answer[wrong]), self.check
        if len(answers) != 1:
            return False
        (k,), at = answers, self.at[:, wrong[self.table.wrong]]
        if k not in self._moved_away:
            some = at[:, np.unique(np.linspace(0, at.shape[1] - 1, FEW).astype(np.int64))]
            more = some.shape[1] == check.answers[k].call.x.shape[-2]  # as many rows might be wrong, too
            some = np.concatenate((some[:, :1], some), axis=1) if more else some
            call = Maker(check.plan).call((1, 3), some[0])
            call = call._replace(positions=some[0] if check.plan.axes is None else some)
            self._moved_away[k] = False
            with suppress(Unreadable):
                self._moved_away[k] = not check.compare(call, check.ask(call)).any()
        return self._moved_away[k]

    def _where(self, rows: Array, rule: Rule | None) -> str:
        """The rule, and the first wrong number."""
        if rule is not None and rule.exact:
            return f"exactly where {rule.words}; {self._first(rows)}"
        share = f", {rule.share:.0%} of those where {rule.words}" if rule is not None and rule.share > 0.5 else ""
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
        """How far off rows are, and in how many features."""
        plain = rows & self.finite & np.isfinite(self.y).all(axis=-1) & (np.abs(self.x).max(axis=-1) < 2.0**20)
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
        if finite.any() and np.ptp(y[finite]) == 0:
            yield Became("not linear", f"every output is {y[finite][0, 0]:g}", finite)
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
    one, four, zero = (np.nan_to_num(y) for y in _multiples(check))
    if zero.any():
        return "not linear", f"f(0) is not 0 but up to {np.abs(zero).max():.4g}: something is added"
    if (off := np.abs(four - 4 * one).max()) > 0.02 * np.abs(four).max():
        lengths = np.linalg.norm(_at_zero(check)[1], axis=-1)
        alike = f"; rows come out with lengths from {lengths.min():.4g} to {lengths.max():.4g}"
        return "not linear", f"f(4x) and 4·f(x) differ by up to {off:.4g}{alike}"
    return None


def _leaks(check: RotationCheck) -> str | None:
    """Which other rows or heads change when the numbers of one are put in another order, so that the greatest stays;
    None if no other does, or if that one does not: results in other places are no leak. Raises `Unreadable`."""
    plain = [one for one in check.answers if one.wrong.any() and one.call[2:5] == (PLAIN, PLAIN, USUAL)]
    for what, axis in (("row", -2), ("head", -3)):
        several = [one for one in plain if one.call.x.ndim >= -axis and one.call.x.shape[axis] > 1][:1]
        for (call, _, y, _), first in product(several, (False, True)):
            place = 0 if first else call.x.shape[axis] // 2
            own, x = np.arange(call.x.shape[axis]) == place, np.moveaxis(call.x.copy(), axis, 0)
            x[own] = x[own][..., ::-1]
            before, after = check.ask(call), check.ask(call._replace(x=np.moveaxis(x, 0, axis)))
            off, close = np.moveaxis(np.abs(after - before), axis, 0), 16 * check.unit * np.abs(before).max()
            changed = ~(off.reshape(len(own), -1) <= close).all(axis=-1)
            if not (np.isfinite(before).all() and changed[own].all() and np.abs(before - y).max() <= close):
                return None
            if (others := np.flatnonzero(changed & ~own)).size:
                most, k = off[others].max(), len(others)
                said = f"{k} other {what}s change, the first {what}" if k > 1 else f"another {what} changes,"
                return f"if the numbers of {what} {place} are others, {said} {others[0]}, by up to {most:.2g}"
    return None


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


def _multiples(check: RotationCheck) -> list[Array]:
    """f(x), f(4x) and f(0), in calls alike. Raises `Unreadable`."""
    maker = Maker(check.plan)
    call = maker.call((2,), maker.scattered(FEW))
    return [check.ask(call._replace(x=(call.x * k).astype(call.x.dtype))) for k in (1, 4, 0)]


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
