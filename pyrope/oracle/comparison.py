"""Makes the calls of a rotation, and compares every row of every answer with the truth."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from ..backend import Array
from ..definition import pairs
from ..theta import LAYOUTS, LENGTH_DEPENDENT, DynamicNTK, Rope
from .calls import REUSED, USUAL, Maker, Plan, RotationCall
from .candidate import COMPILES, COUNTS, UNIT, Candidate, Unreadable, plan_calls
from .positions import STATE
from .rows import Answer, of_calls
from .rules import simplest
from .tolerance import APPLICABLE, ExactTables, Expected

BLOCK = 2**15  # numbers that are compared at a time: more do not fit into a cache
POISON, POISONED = 97.25, 2**14  # what stands in memory before a call of at most so many numbers
HOPELESS, EVERY = 60, 16  # after so many calls, of which nearly all rows are wrong, only each 16th is made
SHAPES = 12  # where each new one is compiled
AGAIN = 6  # calls that are made once more at the end, and refused ones
REFUSED, WITHOUT_RULE = 0.25, 0.1  # of the calls may be refused: where one statement tells which, and where none does
RUNS = 16  # of a candidate that counts its positions: so many runs of them in a call


class RotationCheck:
    """One run of a check: the calls, the answers, and which rows are wrong."""

    def __init__(self, candidate: Candidate, plan: Plan) -> None:
        self.candidate, self.plan, self.rope = candidate, plan, plan.rope
        self.dtype, self.unit = plan.dtype.name, UNIT[plan.dtype.name]
        self.grades = list(APPLICABLE[self.dtype])  # that hold so far, best first
        self.answers: list[Answer] = []
        self.refused: list[tuple[RotationCall, Unreadable]] = []
        self.notes: list[str] = []
        self.state: tuple[str, str] | None = None  # if a call that is made again differs: the mistake, the fact
        self.spoilt = False  # whether a call that was right is wrong when it is made again
        self.order: Array | None = None  # of an equivalent candidate: (d, d), brings outputs into the expected order
        self.by_call = False  # whether Θ follows the length of each call, where the rope's depends on a length
        self.right = self.turning = 0  # rows that turn, and how many of them are right
        self.coarse: tuple[RotationCall, Array] | None = None  # the first right call that is coarser than asked
        self._tables: dict[Rope, ExactTables] = {}
        self._known = np.zeros(0, np.int64)
        self._buffers: dict[tuple[int, ...], Array] = {}

    # ── Calls ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Makes all calls. Raises `Unreadable` if the candidate does not take the sample, or refuses most calls."""
        maker = Maker(self.plan)
        opening, sample = maker.opening(), maker.sample()
        first = self._taken(opening)
        y = self.ask(sample)
        calls = self._calls(maker, [opening, sample])
        plan_calls(len(calls))
        self._known = np.unique(np.concatenate([[0, self.plan.top], *(call.positions.ravel() for call in calls)]))
        y = self._begin(sample, y)
        self.sample = sample, y
        if first is not None:
            first = self._ordered(first)
            self._follow_lengths(opening, first)
            self._mark(opening, first)
        self._mark(sample, y)
        for k, call in enumerate(calls[2:]):
            hopeless = len(self.answers) > HOPELESS and self.right < 0.02 * self.turning
            if not (hopeless and k % EVERY and call.values == USUAL) and (y := self._taken(call)) is not None:
                self._mark(call, y)
        self._make_again()
        self._say_refused()
        self.candidate.look_again()

    def _calls(self, maker: Maker, first: list[RotationCall]) -> list[RotationCall]:
        if COMPILES in self.candidate.traits:
            maker.plan = replace(self.plan, compiled=True)
            made = [(call, (call.x.shape, call.positions.shape)) for call in [*first, *maker.all()]]
            shapes = list(dict.fromkeys(shape for _, shape in made))[:SHAPES]
            self.notes.append(f"shapes are compiled, or calls start programs: {len(shapes)} shapes were tried")
            return [call for call, shape in made if shape in shapes]
        calls = maker.all()
        if COUNTS in self.candidate.traits:
            calls = [call for call in calls if np.count_nonzero(np.diff(call.positions) != 1) <= RUNS]
        return first + calls

    def ask(self, call: RotationCall) -> Array:
        """The answer as float64, in the expected order of features."""
        if call.x.size <= POISONED:  # what is freed now is what the result may be allocated in
            _ = [np.full(call.x.shape, POISON, call.x.dtype) for _ in range(3)]
            del _
        x, positions = call.x, call.positions
        if REUSED in (call.memory, call.places):
            x, positions = (self._written(array) for array in (x, positions))
        y = self.candidate({"x": x, "positions": positions}, like=["x"])[0]
        return self._ordered(y)

    def _ordered(self, y: Array) -> Array:
        """y @ order, NaN and infinity too: a signed permutation."""
        if self.order is None:
            return y
        source = np.abs(self.order).argmax(axis=0)
        return y[..., source] * self.order[source, np.arange(len(source))]

    def _written(self, array: Array) -> Array:
        buffer = self._buffers.setdefault((*array.shape, array.itemsize), array.copy())
        buffer[...] = array
        return buffer

    def _taken(self, call: RotationCall) -> Array | None:
        try:
            return self.ask(call)
        except Unreadable as error:
            if call.x.size or error.kind != "raised":  # nothing at all may be refused
                self.refused.append((call, error))
            return None

    def _say_refused(self) -> None:
        """A note about calls that are not taken; results of another shape are wrong."""
        if not self.refused:
            return
        (_, first), count = self.refused[0], len(self.refused) + len(self.answers)
        own = [error for call, error in self.refused if call.own]
        if len(own) > sum(bool(one.call.own) for one in self.answers):
            reason = f"refuses positions (b, n) and (b, 1, n), which batched= claims: {own[0].reason}"
            raise Unreadable(reason, own[0].received, own[0].kind) from own[0].__cause__
        columns = of_calls([call for call, _ in self.refused] + [one.call for one in self.answers])
        rule = simplest(columns, np.arange(count) < len(self.refused))
        where = f", those where {rule.words}" if rule is not None and rule.exact else ""
        if len(self.refused) > (REFUSED if where else WITHOUT_RULE) * count and not self._is_wrong():
            reason = f"refuses {len(self.refused)} of {count} calls of many shapes{where}: {first.reason}"
            raise Unreadable(reason, first.received, first.kind) from first.__cause__
        self.notes.append(f"{len(self.refused)} of {count} calls are not taken{where}: {first}")
        for error in (error for _, error in self.refused if error.kind != "raised"):
            self.candidate.behaviour.setdefault("wrong shape out", f"{error}{where}")

    def _is_wrong(self) -> bool:
        """Whether what was taken is enough for a verdict."""
        return self.state is not None or any(one.wrong.any() for one in self.answers)

    def _make_again(self) -> None:
        """Calls that were made before must give the same again: the first ones, and the first that are wrong, twice.
        What was refused must be refused again."""
        bad = [one for one in self.answers if one.wrong.any()][:3]
        for call, y, wrong in [*self.answers[:AGAIN], *bad, *bad]:
            try:
                again = self.ask(call)
                self.spoilt = self.spoilt or (not wrong.any() and bool(self.compare(call, again).any()))
                if not self.state and (words := self._changed(call, y, again)):
                    twice = self.ask(call)
                    added = not self.compare(call, twice - again).any()  # to what was there before
                    after = [(self.ask(self.answers[0].call), self.ask(call))[1] for _ in range(2)]  # the same call
                    alike = not (self._changed(call, again, twice) and self._changed(call, *after))
                    self.state = STATE if added or alike else "random", words
            except Unreadable as error:
                self._say_refused_once(call, error, "is refused when it is made again:")
        lasting = [(call, first) for call, first in self.refused if not first.depends_on_the_machine]
        for call, first in lasting[:: -(-len(lasting) // AGAIN) or 1]:
            with suppress(Unreadable):
                self.ask(call)
                self._say_refused_once(call, first, "is taken when it is made again; at first")

    def _say_refused_once(self, call: RotationCall, error: Unreadable, what: str) -> None:
        """That a call is refused the first time or the second alone."""
        if not (self.state or error.depends_on_the_machine):
            self.state = STATE, f"the same call of shape {call.x.shape} {what} {error.reason}"

    def _changed(self, call: RotationCall, y: Any, again: Array) -> str:
        """How two answers to the same call differ by more than rounding, in words."""
        off = np.abs(again - y) > 64 * self.unit * np.abs(y).max(initial=0)
        off |= np.isfinite(again) != np.isfinite(y)
        if not off.any():
            return ""
        index = tuple(int(i) for i in np.argwhere(off)[0])
        words = f"the same call of shape {call.x.shape}, made again, has {int(off.sum())} other outputs"
        return f"{words}: {y[index]:.6g}, then {again[index]:.6g}"

    # ── Comparison ───────────────────────────────────────────────────────────────────────────────────────────────────

    def expected(self, call: RotationCall, rows: Any = slice(None), rope: Rope | None = None) -> Expected:
        """What is right for these rows of a call."""
        at = call.at[..., rows]
        rope = self.rope_of(call) if rope is None else rope
        return Expected(self.tables(rope), call.x[..., rows, :].astype(np.float64), at, self.dtype)

    def rope_of(self, call: RotationCall) -> Rope:
        """The rope whose Θ a call must have: another for each length, if the candidate takes that from the call."""
        scaling = self.rope.scaling
        if not self.by_call or not isinstance(scaling, LENGTH_DEPENDENT):
            return self.rope
        length, original = int(call.positions.max(initial=0)) + 1, scaling.original_length
        length = max(length, original) if isinstance(scaling, DynamicNTK) else original + (length > original)
        return self.rope.at(length)

    def tables(self, rope: Rope) -> ExactTables:
        """The exact tables of a rope, at the positions of all calls; made once."""
        if rope not in self._tables:
            self._tables[rope] = ExactTables(rope, self._known)
        return self._tables[rope]

    def compare(self, call: RotationCall, y: Array) -> Array:
        """Which rows are wrong, bool (…, n); the grades that do not hold for what is right are given up."""
        wrong, n, reached = np.zeros(call.x.shape[:-1], bool), call.x.shape[-2], 0
        step = max(1, BLOCK * n // max(call.x.size, 1))
        for start in range(0, n, step):
            rows = slice(start, start + step)
            expected, block = self.expected(call, rows), y[..., rows, :]
            for k in range(reached, len(self.grades)):
                wrong[..., rows] = expected.wrong(self.grades[k], block)
                reached = k
                if not wrong[..., rows].any():
                    break
        if not wrong.any():
            self.grades = self.grades[reached:]
            if self.coarse is None and self.too_coarse:
                self.coarse = call, y
        return wrong

    @property
    def too_coarse(self) -> bool:
        """Whether no grade holds that was asked for."""
        grades = APPLICABLE[self.dtype]
        return grades.index(self.grades[0]) > grades.index(self.plan.worst or grades[-1])

    @property
    def precision(self) -> str | None:
        """The best grade that holds, if all rows are right."""
        return None if any(one.wrong.any() for one in self.answers) else self.grades[0]

    def _mark(self, call: RotationCall, y: Array) -> None:
        wrong = self.compare(call, y)
        turning = call.each().any(axis=0)
        self.right, self.turning = self.right + int((turning & ~wrong).sum()), self.turning + int(turning.sum())
        self.answers.append(Answer(call, y if wrong.any() or len(self.answers) < AGAIN else None, wrong))

    def _begin(self, call: RotationCall, y: Array) -> Array:
        """The sample's answer in the expected order of features; leaves the grades that hold for it."""
        expected = self.expected(call)
        for order in (lambda: None, self.unpermuted):
            self.order = order()
            holding = [grade for grade in self.grades if not expected.wrong(grade, self._ordered(y)).any()]
            if holding:
                self.grades = holding
                return self._ordered(y)
        self.order, self.grades = None, self.grades[-1:]
        return y

    def _follow_lengths(self, opening: RotationCall, y: Array) -> None:
        """Whether Θ follows the length of each call, where the length of the rope may be meant so."""
        if not isinstance(self.rope.scaling, LENGTH_DEPENDENT) or self.compare(*self.sample).any():
            return
        if self.compare(opening, y).any():
            self.by_call = True
            self.by_call = not self.compare(opening, y).any()
        if self.by_call:
            self.notes.append("its frequencies follow the largest position of each call, which is judged by its length")

    # ── Equivalent: R' = U·R with the same signed permutation U at every position, so that scores are the same ───────

    def unpermuted(self) -> Array | None:
        """The signed permutation that brings outputs into the expected order, (d, d), if there is one."""
        d, at = self.rope.head_dim, np.array([0, self.plan.top])
        at = at if self.plan.axes is None else np.stack([at] * self.plan.axes)
        units = RotationCall(np.eye(d, dtype=self.plan.dtype)[:, None].repeat(2, 1), at)
        with suppress(Unreadable):
            got = self.ask(units)[:, 0].T
            u = np.nan_to_num(got @ np.linalg.inv(self.expected(units).y[:, 0].T), nan=9.0, posinf=9.0, neginf=9.0)
            order = np.rint(u)
            if np.abs(u - order).max() < 0.05 and (order @ order.T == np.eye(d)).all() and (order != np.eye(d)).any():
                return order
        return None

    def order_in_words(self) -> str:
        """How an equivalent candidate orders its outputs."""
        u, rope = self.order, self.rope
        assert u is not None
        feature, places = np.arange(rope.head_dim), [pairs(name, rope.width, rope.start)[1] for name in LAYOUTS]
        due = pairs(rope.layout, rope.width, rope.start)[1]
        for layout, sides in zip(LAYOUTS, places, strict=True):
            written = layout.rpartition("-to-")[2]
            held = all((u[feature[got], feature[part]] == 1).all() for got, part in zip(sides, due, strict=True))
            if held and written != rope.layout.rpartition("-to-")[2]:
                return f"pairs are written {written}, expected was {rope.layout}"
        moved, negative = int((u.diagonal() == 0).sum()), int((u < 0).sum())
        return f"{moved} of {len(u)} outputs come out in another place, {negative} with the other sign"
