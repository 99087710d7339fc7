"""What became of the wrong rows of a rotation: where they are, what they hold, and how the operator differs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from ..backend import Array
from ..definition import pairs
from ..theta import LENGTH_DEPENDENT, frequencies
from . import differences, operator
from .calls import FEW, REUSED, Call, Maker
from .candidate import Unreadable
from .comparison import POISON, Check
from .positions import ELSEWHERE, Became, moved
from .report import Finding
from .responses import Function, fits, forms
from .rows import ABOUT, COUNTED, tabulated, tails
from .rules import Rule, simplest
from .tolerance import APPLICABLE, Expected

SOME = 0.1  # of the rows are right: then there is a rule to be found
MOST = 0.98  # of the wrong rows are explained by the same
UNCHANGED, ZEROS, LOST, STALE = "not rotated", "zeros returned", "not finite", "output not written"
CONSECUTIVE, STATE = "consecutive positions wrong", "state between calls"
VALUES = "largest number", "values of x"
DAMAGED = ("input", "results", "rounded", "not linear")
LEAK = "rows leak into each other"
# What is wrong in some rows, and what became of them, has a name of its own.
BOTH = {
    ("head ≥ 1", UNCHANGED): "only the first head rotated",
    ("head of all ≥ 1", UNCHANGED): "only the first head rotated",
    ("row ≥ 1", UNCHANGED): "only the first row rotated", ("rows after it = 0", UNCHANGED): "last row not rotated",
    ("rows = 1", ""): "one row differs", ("values of x", LOST): LEAK, ("largest number", LOST): LOST,
    ("position", LOST): LOST,
}  # fmt: skip
CLOSE = {"float64": 1e-9, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}  # of what is read at position 0
Measured = tuple[tuple[str, str, str], ...]


def diagnosed(check: Check) -> tuple[list[Finding], Measured]:
    """The findings about wrong rows, causes first, and what was measured where nothing explains them."""
    if not any(one.wrong.any() for one in check.answers):
        return ([Finding(STATE, check.state)] if check.state else []), ()
    return Diagnosis(check).findings()


def described(check: Check) -> tuple[operator.Description | None, Array]:
    """What `operator` reads. Raises `Unreadable`."""
    plan, first = check.plan, operator.shape_of(check.rope)
    return operator.read(check.candidate, plan.head_dim, plan.dtype, plan.top, plan.axes, first)


def read_all(check: Check) -> None:
    """Makes the calls that a diagnosis may make, for those who record the answers."""
    Diagnosis.at_zero(check)
    Diagnosis.multiples(check)
    described(check)


class Diagnosis:
    """The wrong rows of a check, W of them."""

    def __init__(self, check: Check) -> None:
        self.check, self.table = check, tabulated(check.answers, check.plan.axes)
        parts = [*self._gathered()]
        self.x, self.y, self.truth, self.allowed = (np.concatenate([part[k] for part in parts]) for k in range(4))
        fully = np.mean([not one.wrong.any() for one in check.answers if one.call.positions.any()])
        self.some = check.right > SOME * check.turning or bool(fully > SOME / 2)
        self.measured: Measured = ()
        self._rules: dict[bytes, Rule | None] = {}

    def _gathered(self) -> Iterator[tuple[Array, ...]]:
        """x, y, the truth and what is allowed of the wrong rows in the table, each (k, d)."""
        table, answers = self.table, self.check.answers
        for k in np.unique(table.answer[table.wrong]):
            one, place = answers[k], table.place[table.wrong & (table.answer == k)]
            index = np.unravel_index(place, one.wrong.shape)
            expected = self.check.expected(_rows_of(one.call, index))
            assert one.y is not None
            yield expected.x, one.y[index], expected.y, expected.allowed(APPLICABLE[self.check.dtype][-1])

    # ── Findings ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def findings(self) -> tuple[list[Finding], Measured]:
        rows, found = np.ones(len(self.x), bool), list[Finding]()
        looks = [one for one in self.looks() if one.holds.any()]
        if stale := [one for one in looks if one.fault == STALE]:
            return [self.finding(STALE, stale[0].words, stale[0].holds)], ()
        became = self.became(rows)
        if self.check.state and (self.check.spoilt or self.some or became is None):
            return [Finding(STATE, self.check.state, self.where(rows, self.rule(rows)))], ()
        rule = self.rule(rows)
        if became is None and (rule is None or not rule.exact):
            apart = [one for one in looks if 0.01 < one.holds.mean() < MOST]
            for one in apart:  # some rows hold nothing: others may say more
                rows &= ~one.holds
            found = [self.by_rule(one.holds, one, self.rule(one.holds, among=True)) for one in apart]
        first = self.explained(rows) if rows.any() else []
        said = {one.fault for one in first}
        if any(one.partition(":")[0].endswith(DAMAGED) for one in said):  # numbers that are lost are a consequence
            said |= {ZEROS, LOST, "not linear"}
        return first + [one for one in found if one.fault not in said], self.measured

    def explained(self, rows: Array) -> list[Finding]:
        """What these wrong rows, bool (W,), come from."""
        became = self.became(rows)
        rule = self.rule(rows, became if became is not None and became.general else None)
        exact = rule is not None and rule.exact and self.some
        if found := self.switched(rows):
            return found
        if became is not None and not became.general and not (exact and became.fault == ELSEWHERE):
            return [self.finding(became.fault, became.words, rows, rule)]
        if exact and rule is not None and rule.about in VALUES and (found := self.damaged(rows)):
            return found
        if exact and rule is not None and rule.about != "position":
            return [self.by_rule(rows, became, rule)]
        if became is not None and became.fault in (UNCHANGED, ZEROS, LOST) and not self.some:
            return [self.finding(became.fault, became.words, rows)]
        if not (exact and became is not None) and (found := self.damaged(rows) or self.differing(rows)):
            return found
        if rule is not None and self.some and rule.share > 0.5:
            return [self.by_rule(rows, became, rule)]
        if became is not None:
            return [self.finding(ELSEWHERE if became.general else became.fault, became.words, rows)]
        return [self.unexplained(rows, rule)]

    def by_rule(self, rows: Array, became: Became | None, rule: Rule | None) -> Finding:
        """A finding that is named by where it is, unless what became of the rows says more."""
        words = became.words if became is not None else self.off(rows)
        if rule is None:
            return self.finding(became.fault if became is not None else "unexplained", words, rows)
        first = rule.words.partition(" and ")[0].partition(" (")[0]
        what = became.fault if became is not None else ""
        name = BOTH.get((first, what)) or BOTH.get((first, "")) or BOTH.get((rule.about, what)) or _name(rule)
        return self.finding(name, words, rows, rule)

    def finding(self, fault: str, fact: str, rows: Array, rule: Rule | None = None) -> Finding:
        position = np.abs(self.table.columns["position"][self.table.wrong][rows])
        return Finding(fault, fact, self.where(rows, rule or self.rule(rows)), int(position.min()))

    def unexplained(self, rows: Array, rule: Rule | None) -> Finding:
        with suppress(Unreadable):
            description, _ = described(self.check)
            self.measured = () if description is None else description.rows(self.check.rope)
        return self.finding("unexplained", self.off(rows), rows, rule)

    # ── Where ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def rule(self, rows: Array, became: Became | None = None, among: bool = False) -> Rule | None:
        """The simplest statement about these wrong rows. Other wrong rows, unless it is about what is special ``among``
        them, and those that would be right with what they became, say nothing."""
        silent = np.zeros(1, bool) if became is None else np.asarray(became.silent)
        key = rows.tobytes() + silent.tobytes() + bytes([among])
        if key not in self._rules:
            wrong, table = np.zeros(len(self.table.wrong), bool), self.table
            wrong[np.flatnonzero(table.wrong)[rows]] = True
            speaks = table.speaks & (wrong | among | ~(table.wrong | silent))
            self._rules[key] = _simplest(self._columns(wrong), wrong, speaks)
        return self._rules[key]

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
        return columns

    def where(self, rows: Array, rule: Rule | None) -> str:
        count, total = int(rows.sum()), len(self.table.wrong)
        if rule is not None and rule.exact:
            return f"exactly where {rule.words}; {self.first(rows)}"
        share = (
            f", {rule.share:.0%} of those where {rule.words}"
            if rule is not None and rule.share > 0.5 and self.some
            else ""
        )
        return f"{count:,} of {total:,} rows looked at{share}; {self.first(rows)}"

    def first(self, rows: Array) -> str:
        """The first wrong number: of the first wrong call, the row at the smallest position."""
        table = self.table
        answer, place = (column[table.wrong] for column in (table.answer, table.place))
        position = np.abs(table.columns["position"][table.wrong])
        own = np.flatnonzero(rows & (answer == answer[rows].min()))
        k = own[np.argmin(position[own])]
        one = self.check.answers[answer[k]]
        with np.errstate(all="ignore"):
            f = int(np.argmax(~(np.abs(self.y[k] - self.truth[k]) <= self.allowed[k])))
        index = *(int(i) for i in np.unravel_index(place[k], one.wrong.shape)), f
        at = ", ".join(map(str, one.call.each()[(slice(None), *index[:-1])]))
        due, got = self.truth[k, f], self.y[k, f]
        digits = next((n for n in range(6, 17) if f"{due:.{n}g}" != f"{got:.{n}g}"), 17)
        return (
            f"x {one.call.x.shape} at position {at}, {_index(index)}: expected {due:.{digits}g}, got {got:.{digits}g}"
        )

    def off(self, rows: Array) -> str:
        """How far off rows are."""
        rows = rows & np.isfinite(self.truth).all(axis=-1) if np.isfinite(self.truth[rows]).any() else rows
        off = np.abs(self.y - self.truth)[rows]
        features = np.flatnonzero((off > self.allowed[rows]).any(axis=0))
        most = np.nanmax(np.abs(self.truth[rows]), initial=0)
        size = f"off by up to {np.nanmax(off, initial=0):.3g} where numbers are up to {most:.3g}"
        if len(features) == off.shape[-1] or not len(features):
            return size
        some = ", ".join(map(str, features[:4])) + (", …" if len(features) > 4 else "")
        return f"{size}, in {len(features)} of {off.shape[-1]} features: {some}"

    # ── What became of rows ──────────────────────────────────────────────────────────────────────────────────────────

    def looks(self) -> Iterator[Became]:
        """What is seen at once: each holds for some rows."""
        x, y, one = self.x, self.y, self.check.plan.dtype.type(POISON)
        finite = np.isfinite(y).all(axis=-1)
        # Among large numbers of few bits it may be a result by chance.
        stale = (y == float(one)).any(axis=-1) & (np.abs(x).max(axis=-1, initial=0) < POISON / 4)
        yield Became(STALE, "outputs are what stood in memory before", stale, True)
        yield Became(LOST, "NaN or infinity comes out", ~finite & np.isfinite(x).all(axis=-1), True)
        yield Became(
            "not linear", "a row that is not finite comes out as finite numbers", finite & ~np.isfinite(x).all(axis=-1)
        )
        yield Became(ZEROS, "zeros come out", ~y.any(axis=-1), True)
        yield Became(UNCHANGED, "x comes back as it was", (y == x).all(axis=-1), True)
        yield Became("heads differ", "the right result of another head comes out", self._of_other_rows(), True)
        if finite.any() and np.ptp(y[finite]) == 0 and y[finite].any():
            yield Became("not linear", f"every output is {y[finite][0, 0]:g}", finite)
        factor = np.median(y / self.truth, axis=-1)
        if np.isfinite(factor).all() and np.ptp(factor) < 1e-3 * abs(factor[0]) and abs(factor[0] - 1) > 1e-2:
            near = np.abs(y - factor[0] * self.truth) <= 4 * self.allowed * max(1.0, abs(factor[0]))
            yield Became("attention factor", f"rows are the right ones times {factor[0]:.6g}", near.all(axis=-1), True)

    def _of_other_rows(self) -> Array:
        """Rows that hold what is right for another head, or another row of the batch."""
        holds, table = np.zeros(len(self.x), bool), self.table
        answers, places = table.answer[table.wrong], table.place[table.wrong]
        for k in np.unique(answers)[:8]:
            one, own = self.check.answers[k], np.flatnonzero(answers == k)
            n = one.wrong.shape[-1]
            if one.wrong.size == n or one.call.own or one.wrong.size > 4096:
                continue
            truth = self.check.expected(one.call).y.reshape(-1, n, self.x.shape[-1])
            for i in own:
                near = (np.abs(truth[:, places[i] % n] - self.y[i]) <= 2 * self.allowed[i]).all(axis=-1)
                near[places[i] // n] = False  # itself
                holds[i] = near.any()
        return holds

    def became(self, rows: Array) -> Became | None:
        """What nearly all of these rows became, if that is one and the same thing."""
        for one in self.looks():
            if one.holds[rows].mean() >= MOST:
                return one
        return self.moved(rows)

    def moved(self, rows: Array) -> Became | None:
        """The positions that these rows are turned by instead of theirs, on any axis."""
        check, rope = self.check, self.check.rope
        if check.by_call or not np.isfinite(self.y[rows]).all(axis=-1).any():
            return None
        (a, b), (c, d) = pairs(rope.layout, rope.width, rope.start)
        rows = rows & np.isfinite(self.y).all(axis=-1) & np.isfinite(self.x).all(axis=-1)
        x, y, theta = self.x[rows], self.y[rows], frequencies(rope) * rope.direction
        turned = np.nan_to_num((y[:, c] + 1j * y[:, d]) / (x[:, a] + 1j * x[:, b]) / rope.attention_factor)
        if np.median(np.abs(np.abs(turned) - 1)) > 0.01 + 4 * check.unit:
            return None
        owner = np.array([0] * rope.pairs if rope.axes is None else [axis for axis, _ in rope.axes.assign(rope.pairs)])
        for axis, facts in enumerate(self.table.facts):
            which, own = np.flatnonzero(self.table.wrong)[rows], owner == axis
            if (found := moved(turned[:, own], theta[own], facts, which, check.unit > 1e-4)) is not None:
                rest = np.delete(np.arange(self.x.shape[-1]), np.r_[c, d])
                if (np.abs(y - x)[:, rest] > self.allowed[rows][:, rest]).any(axis=-1).mean() > 1 - MOST:
                    return None  # what should stay does not: positions are not all
                words = found.words + (f", on axis {axis}" if rope.axes is not None else "")
                return found._replace(words=words)
        return None

    def switched(self, rows: Array) -> list[Finding]:
        """Of a candidate whose Θ follows the length of the call: whether it changes at another length than due."""
        check, scaling = self.check, self.check.rope.scaling
        if not check.by_call or not isinstance(scaling, LENGTH_DEPENDENT):
            return []
        original = scaling.original_length
        causes = {
            original: "compared by >= instead of >",
            original + 1: "compared as the largest position, which is one less",
        }
        for one in (one for one in check.answers if one.wrong.any()):
            length = int(one.call.positions.max()) + 1
            other = original if length > original else original + 1
            if length in causes and not check.compare(one.call, one.y, check.rope.at(other)).any():
                fact = f"a call of length {length} has the Θ of length {other}: the length is {causes[length]}"
                return [self.finding("switch at another length", fact, rows)]
        lengths = {int(one.call.positions.max()) + 1 for one in check.answers if one.wrong.any()}
        if lengths <= {*causes}:
            return [self.finding("switch at another length", self.off(rows), rows)]
        return []

    # ── Numbers that are damaged ─────────────────────────────────────────────────────────────────────────────────────

    @staticmethod
    def at_zero(check: Check, size: float = 1.0) -> tuple[Array, Array]:
        """Ordinary numbers, times a size, at position 0, where nothing turns, and what comes out: two (2, n, d)."""
        maker = Maker(check.plan)
        x = maker.x(2, 4 * FEW) * check.plan.dtype.type(size)
        y = check.ask(Call(x, maker.at(np.zeros(4 * FEW, np.int64))))
        return x.astype(np.float64), y / check.rope.attention_factor

    @staticmethod
    def multiples(check: Check) -> list[Array]:
        """f(x), f(4x) and f(0), in calls alike."""
        maker = Maker(check.plan)
        call = maker.call((2,), maker.scattered(FEW))
        return [check.ask(call._replace(x=(call.x * k).astype(call.x.dtype))) for k in (1, 4, 0)]

    def damaged(self, rows: Array) -> list[Finding]:
        """Whether numbers are rounded, clipped, or otherwise changed before or after they turn."""
        check = self.check
        for size in (1.0, 2.0**6, 2.0**-6) if check.dtype == "float16" else (1.0, 2.0**10, 2.0**-14):
            with suppress(Unreadable):
                x, y = self.at_zero(check, size)
                close = CLOSE[check.dtype]
                if _share(x, y, close) == 1 or not np.isfinite(y).all():
                    continue
                found = max(forms(x, y), key=lambda form: _share(form[1](x), y, close))
                if fits(found[1](x), y, close) and (how := self._damage(*found)):
                    return [self.finding(*how, rows)]
        with suppress(Unreadable):
            return [self.finding("not linear", words, rows) for words in self._not_linear()]
        return []

    def _damage(self, words: str, function: Function) -> tuple[str, str] | None:
        """The name and the fact, if the function explains a whole call: of x, or of the result."""
        one = max(self.check.answers, key=lambda one: one.wrong.sum() * (one.call.x.size < 2**16))
        expected = self.check.expected(one.call)
        damaged = Expected(expected.tables, function(expected.x), expected.positions, self.check.dtype).y
        off = [
            np.median(np.abs(one.y - z)[one.wrong].max(axis=-1)) for z in (expected.y, damaged, function(expected.y))
        ]
        if not min(off[1:]) <= 0.25 * off[0]:
            return None
        what, side = ("the numbers of x are", "input") if off[1] <= off[2] else ("the results are", "results")
        dtype = words.removeprefix("rounded to ")
        name = f"{dtype} {side}" if dtype in ("bfloat16", "float16") else "not linear"
        if name == "not linear" and words.startswith(("rounded", "cut", "quantised")):
            name = f"{side} rounded: {dtype.partition(',')[0]}"
        return name, f"{what} {words}"

    def _not_linear(self) -> Iterator[str]:
        one, four, zero = (np.nan_to_num(y) for y in self.multiples(self.check))
        if zero.any():
            yield f"f(0) is not 0 but up to {np.abs(zero).max():.4g}: something is added"
        elif (off := np.abs(four - 4 * one).max()) > 0.02 * np.abs(four).max():
            x, y = self.at_zero(self.check)
            scale = (x * y).sum(axis=-1) / (x * x).sum(axis=-1)
            length = np.linalg.norm(y, axis=-1)
            rowwise = np.abs(y - scale[..., None] * x).max() < 1e-2 * np.abs(y).max()
            same = (
                f"rows come out with the length {np.median(length):.4g}, whatever theirs was; "
                if rowwise and np.ptp(length) < 1e-2 * length.max()
                else ""
            )
            yield f"{same}f(4x) and 4·f(x) differ by up to {off:.4g}"

    # ── The operator ─────────────────────────────────────────────────────────────────────────────────────────────────

    def differing(self, rows: Array) -> list[Finding]:
        """How the operator that is read with unit vectors differs from the expected one."""
        check, d = self.check, self.check.plan.head_dim
        try:
            description, reached = described(check)
        except Unreadable as error:
            check.notes.append(f"the operator could not be read: {error}")
            return []
        if description is None:
            due = operator.shape_of(check.rope).sources(d)
            one = differences.pairing(reached, due)
            return [self.finding(one.fault, one.fact, rows)]
        found = differences.differences(description, check.rope, check.dtype)
        if not found:
            return []
        first, *others = found
        findings = [self.finding(first.fault, first.fact, rows), *(Finding(one.fault, one.fact) for one in others)]
        left = self._left_over(rows, description)
        return [] if left is None else findings + left

    def _left_over(self, rows: Array, description: operator.Description) -> list[Finding] | None:
        """What the description does not predict, where it says anything: a second mistake, or a note; None if that is
        most of it."""
        at = np.stack([facts["p"][self.table.wrong] for facts in self.table.facts])
        said = rows & (np.abs(at).max(axis=0) <= description.straight) & np.isfinite(self.x).all(axis=-1)
        off = np.abs(description.predict(self.x, at if self.check.plan.axes is not None else at[0]) - self.y).max(
            axis=-1
        )
        left = said & ~(off <= 0.4 * np.abs(self.x).max(axis=-1) * max(1.0, description.factor))
        if left.sum() <= (1 - MOST) * said.sum():
            return []
        if 2 * left.sum() > said.sum():
            return None
        rule = self.rule(left)
        if rule is not None and rule.exact:
            return [self.by_rule(left, self.became(left), rule)]
        self.check.notes.append(f"this explains {said.sum() - left.sum():,} of {said.sum():,} wrong rows")
        return []


def _rows_of(call: Call, index: tuple[Array, ...]) -> Call:
    """Some rows of a call, as a call of one head: x (k, d), positions (k,) or (axes, k)."""
    positions = call.each()[(slice(None), *index)]
    return Call(call.x[index], positions if call.several else positions[0])


def _share(x: Array, y: Array, close: float) -> float:
    """How many y are x."""
    return float((np.abs(y - x) <= close * np.abs(x)).mean())


def _simplest(columns: dict[str, Array], wrong: Array, speaks: Array) -> Rule | None:
    """A rule about the rows themselves; about earlier calls only if that says more."""
    rule = simplest({name: column for name, column in columns.items() if "call" not in name}, wrong, speaks)
    if rule is not None and rule.exact:
        return rule
    other = simplest(columns, wrong, speaks)
    return rule if rule is not None and other is not None and other.share < rule.share + 0.05 else other


def _name(rule: Rule) -> str:
    """The mistake that a rule shows, by what it is about."""
    about, words = rule.about, rule.words
    if about == "order" and all(
        any(label in COUNTED for label in [part]) for part in words.removeprefix("order: ").split(", or ")
    ):
        return CONSECUTIVE
    if REUSED in words:
        return STATE
    if about == "position":
        if "≤ -" in words:
            return "negative positions wrong"
        return "one position wrong" if " = " in words else "wrong beyond a position" if "≥" in words else ABOUT[about]
    if about.startswith("an earlier call"):
        return STATE
    return ABOUT.get(about, "some shapes wrong" if about.startswith("x has") else "some lengths wrong")


def _index(index: tuple[int, ...]) -> str:
    """Where an output stands, such as "head 0, row 3, feature 5"."""
    if len(index) > 4:
        return f"index {index}"
    return ", ".join(
        f"{axis} {i}" for axis, i in zip(("batch", "head", "row", "feature")[-len(index) :], index, strict=True)
    )
