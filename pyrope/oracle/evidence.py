"""The wrong rows of a rotation: which they are, how far off they are, and what they hold instead."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..backend import Array
from ..definition import pairs
from ..theta import frequencies
from .calls import Call
from .comparison import POISON, Check
from .frequencies import listed
from .positions import Became, moved
from .rows import tabulated, tails
from .rules import Rule, simplest
from .tolerance import APPLICABLE

SOME = 0.1  # of the rows are right: then there is a rule to be found
MOST = 0.98  # of the wrong rows became the same
UNCHANGED, ZEROS, LOST, STALE = "not rotated", "zeros returned", "not finite", "output not written"


class Evidence:
    """The wrong rows of a check, W of them; ``rows`` is everywhere a choice of these, bool (W,)."""

    def __init__(self, check: Check) -> None:
        self.check, self.table = check, tabulated(check.answers, check.plan.axes)
        parts = [*self._gathered()]
        self.x, self.y, self.truth, self.allowed = (np.concatenate([part[k] for part in parts]) for k in range(4))
        self.finite = np.isfinite(self.x).all(axis=-1)
        self.at = np.stack([facts["p"][self.table.wrong] for facts in self.table.facts])  # (axes, W)
        fully = np.mean([not one.wrong.any() for one in check.answers if one.call.positions.any()])
        self.some = check.right > SOME * check.turning or bool(fully > SOME / 2)  # whether some are right

    def _gathered(self) -> Iterator[tuple[Array, ...]]:
        """x, y, the truth and what is allowed of the wrong rows in the table, each (k, d)."""
        table, worst = self.table, APPLICABLE[self.check.dtype][-1]
        for k in np.unique(table.answer[table.wrong]):
            one, place = self.check.answers[k], table.place[table.wrong & (table.answer == k)]
            index = np.unravel_index(place, one.wrong.shape)
            at, y = one.call.each()[(slice(None), *index)], one.y
            assert y is not None
            expected = self.check.expected(Call(one.call.x[index], at if one.call.several else at[0]))
            yield expected.x, y[index], expected.y, expected.allowed(worst)

    def column(self, name: str) -> Array:
        """A column of the table for the wrong rows, (W,)."""
        return self.table.columns[name][self.table.wrong]

    # ── Where ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def rule(self, rows: Array, became: Became | None = None, among: bool = False) -> Rule | None:
        """The simplest statement about these wrong rows; about earlier calls only if that says more. Other wrong rows,
        unless it is about what is special ``among`` them, and those that would be right with what they became, say
        nothing."""
        table, wrong = self.table, np.zeros(len(self.table.wrong), bool)
        wrong[np.flatnonzero(table.wrong)[rows]] = True
        silent = np.asarray(False if became is None else became.silent)
        speaks, columns = table.speaks & (wrong | among | ~(table.wrong | silent)), self._columns(wrong)
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
        return columns

    def where(self, rows: Array, rule: Rule | None) -> str:
        """The rule, and the first wrong number."""
        if rule is not None and rule.exact:
            return f"exactly where {rule.words}; {self._first(rows)}"
        known = rule is not None and rule.share > 0.5 and self.some
        share = f", {rule.share:.0%} of those where {rule.words}" if rule is not None and known else ""
        return f"{int(rows.sum()):,} of {len(self.table.wrong):,} rows looked at{share}; {self._first(rows)}"

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
        due, got = self.truth[k, f], self.y[k, f]
        digits = next((n for n in range(6, 17) if f"{due:.{n}g}" != f"{got:.{n}g}"), 17)
        at = ", ".join(map(str, self.at[:, k]))
        return f"x {one.call.x.shape} at position {at}, {where}: expected {due:.{digits}g}, got {got:.{digits}g}"

    def off(self, rows: Array) -> str:
        """How far off rows are, and in how many features."""
        rows = rows & self.finite if (rows & self.finite).any() else rows
        off, size = np.abs(self.y - self.truth)[rows], np.abs(self.truth[rows]).max()
        features = np.flatnonzero((off > self.allowed[rows]).any(axis=0))
        some = f", in {listed(features, 'feature')}" if 0 < len(features) < off.shape[-1] else ""
        return f"off by up to {np.nanmax(off, initial=0):.3g} where numbers are up to {size:.3g}{some}"

    # ── What became of rows ──────────────────────────────────────────────────────────────────────────────────────────

    def became(self, rows: Array) -> Became | None:
        """What nearly all of these rows became, if that is one and the same thing."""
        return next((one for one in self.looks() if one.holds[rows].mean() >= MOST), None) or self._moved(rows)

    def looks(self) -> Iterator[Became]:
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
        owner = np.array([0] * rope.pairs if rope.axes is None else [axis for axis, _ in rope.axes.assign(rope.pairs)])
        for axis, facts in enumerate(self.table.facts):
            found = moved(turned[:, owner == axis], theta[owner == axis], facts, which, narrow)
            if found is not None:
                return found._replace(words=found.words + (f", on axis {axis}" if rope.axes is not None else ""))
        return None
