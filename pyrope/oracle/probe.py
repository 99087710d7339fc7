"""Reads the operator R(m) out of a black box, and watches how the box behaves while it does so.

A candidate is any callable fn(x, positions) -> rotated x on NumPy arrays: x (…, n, d) of one float dtype, positions
int64 (n,), or (axes, n) where several axes are meant: then what is tried at position m has m, m/2, m/3, … on them, and
the operator is read with m on each. RoPE is linear in x, so unit vectors return R(m) column by column; dense random
vectors show what unit vectors cannot, such as products in a low precision. What a candidate does beside the rotation
(it keeps a state, mixes rows, changes its input, …) is noted in `Probe.behaviour` under the name that it has in
`rotation_faults.FAULTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from .. import checks
from .ask import Behaviour, Candidate, Unreadable, ask, counts, last_call, position_range
from .floats import UNIT, Float64, Int64, float_dtype

HARMLESS = frozenset({"mutates its input", "wrong dtype out"})  # behaviour that leaves all numbers right
DEFAULT_MAX_POSITION = 131071  # what a cache of 131072 rows still has
_CALL_LIMIT = 2**20  # elements of x in one call
_LONG, _HEADS = 525, 130  # more rows and heads than a block or a loop of usual size has
_KEPT, _KEPT_IN_ALL = 2**14, 2**20  # elements of a result that is kept to be looked at again, and of all of them


def probe_positions(max_position: int) -> Int64:
    """Where a rotation is read: each power of two and its neighbours, some at random near the end, and the end."""
    positions = {0, 1, 2, 3, 5, 7, 10, 13, max_position}
    positions |= {2**k + step for k in range(2, max_position.bit_length()) for step in (-1, 0, 1)}
    rng = np.random.default_rng(max_position)
    positions |= set(rng.integers(max_position // 2, max_position, 12, endpoint=True).tolist())
    return np.array(sorted(m for m in positions if m <= max_position), np.int64)


def along_axes(positions: Int64, axes: int | None) -> Int64:
    """Positions (n,) for so many axes, (axes, n): one axis after the other has them, the others less, at random; where
    all are equal, as in text, a pair that turns with the wrong axis cannot be seen."""
    if axes is None:
        return positions
    rng = np.random.default_rng(axes)
    spread = rng.integers(0, positions, (axes, len(positions)), endpoint=True)
    spread[np.arange(len(positions)) % axes, np.arange(len(positions))] = positions
    return spread


class Probe:
    """A candidate with its head size, dtype and largest position, and how it has behaved so far.

    >>> probe = Probe(lambda x, positions: 2 * x, 4, np.float32, 7)
    >>> probe.operator(np.array([0, 7]))[1].diagonal()
    array([2., 2., 2., 2.])
    """

    def __init__(
        self, fn: Candidate, head_dim: int, dtype: Any, max_position: int | None, axes: int | None = None
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn must be a function of x and positions, was {type(fn).__name__}")
        self.fn, self.axes = fn, axes
        self.head_dim = checks.size("head_dim", head_dim, 2)
        self.dtype = float_dtype(dtype)
        limit = DEFAULT_MAX_POSITION if max_position is None else max_position
        self.max_position = checks.integer("max_position", limit, 1, checks.MAX_POSITION)
        self.unit = UNIT[self.dtype.name]
        self.step = 2.0**-25 if self.dtype.name == "float16" else 0.0  # of the smallest numbers, where it shows
        self.behaviour: Behaviour = {}  # what it does wrong beside rotating
        self.notes: list[str] = []
        self.single: str | None = None  # "head", "row", "last" or "seven rows": how calls must be made to be right
        self._kept: list[tuple[Any, Any]] = []  # results as they were returned, and copies of them, to be compared
        self._kept_shapes: dict[tuple[int, ...], int] = {}  # of which shapes there is one, and how many elements it has

    def random(self, *shape: int, seed: int = 0) -> Any:
        """Dense vectors (…, d) of the candidate's dtype."""
        return np.random.default_rng(seed).standard_normal((*shape, self.head_dim)).astype(self.dtype)

    def everywhere(self, positions: Int64) -> Int64:
        """Positions (n,) as the candidate takes them, the same on each axis if it has several."""
        return positions if self.axes is None else np.repeat(positions[None], self.axes, axis=0)

    def apart(self, positions: Int64) -> Int64:
        """Positions (n,) as the candidate takes them, another on each axis: m, m/2, m/3, …."""
        return positions if self.axes is None else np.stack([positions // (j + 1) for j in range(self.axes)])

    def call(self, x: Any, positions: Any) -> Float64:
        """fn(x, positions) as float64, if it is an array like x; anything else that the candidate did is noted."""
        m = np.array(positions, np.int64)
        return self.hand_over(x, m if m.ndim == 2 else self.apart(m))

    def hand_over(self, x: Any, m: Any) -> Float64:
        """`call` with positions just as they are: (n,) or (axes, n), of any integer dtype, anyhow in memory."""
        received = f"for x of shape {x.shape}, dtype {x.dtype}, and {position_range(m)}"
        y = ask(self.fn, {"x": x, "positions": m}, {}, received, self.behaviour)
        if y.shape != x.shape:
            raise Unreadable(f"returns shape {y.shape}", last_call(), "shape")
        self._keep(x, y)
        return y.astype(np.float64)

    def _keep(self, x: Any, y: Any) -> None:
        """Keeps the first result of each shape, if it is not large: a buffer may be reused for some shapes alone."""
        room = _KEPT_IN_ALL - sum(self._kept_shapes.values())
        if x.shape not in self._kept_shapes and y.size <= min(_KEPT, room) and not np.may_share_memory(x, y):
            self._kept_shapes[x.shape] = y.size
            self._kept.append((y, y.copy()))

    def read(self, x: Any, positions: Int64) -> Float64:
        """fn(x, positions) for x (h, n, d), in calls that the candidate is known to get right."""
        y = np.empty(x.shape)
        if self.single == "last":  # a row more, which is not looked at
            x, positions = (np.concatenate((z, z[..., -1:, :]), axis=-2) for z in (x, positions[..., None]))
            return self.call(x, positions[..., 0])[:, :-1]
        if self.single == "row":
            for j in range(x.shape[1]):
                y[:, j : j + 1] = self.call(x[:, j : j + 1].copy(), positions[..., j : j + 1])
        elif self.single == "seven rows":
            for j in range(0, x.shape[1], 7):
                y[:, j : j + 7] = self.call(x[:, j : j + 7].copy(), positions[..., j : j + 7])
        elif self.single == "head":
            for j in range(len(x)):
                y[j] = self.call(x[j : j + 1].copy(), positions)[0]
        else:
            step = max(1, _CALL_LIMIT // x[0].size)
            for start in range(0, len(x), step):
                y[start : start + step] = self.call(x[start : start + step].copy(), positions)
        return y

    def operator(self, positions: Int64) -> Float64:
        """R(m) at these positions, (n, d, d): unit vector j at every position returns column j."""
        at = positions if positions.ndim == 2 else self.everywhere(positions)
        units, n = np.eye(self.head_dim, dtype=self.dtype), positions.shape[-1]
        columns, step = np.empty((self.head_dim, n, self.head_dim)), max(1, _CALL_LIMIT // (n * self.head_dim))
        for start in range(0, self.head_dim, step):
            some = slice(start, start + step)
            columns[some] = self.read(np.repeat(units[some, None], n, axis=1), at)
        return columns.transpose(1, 2, 0)

    def _differ(self, a: Float64, b: Float64, at: Any = 0, *, scale: float = 4.0, least: float = 2.0**-24) -> str:
        """How two results differ, in words; empty if only by the last bits that another order of operations changes.

        ``scale`` is the least size that results are taken to have. A difference of float32's size is none even in
        float64, since a candidate may compute in float32: the grades say how good that is. Calls of different shapes
        may round the angle at a position differently: there, the positions ``at`` of the rows are given.
        """
        unit = max(self.unit, least) + np.abs(np.asarray(at, np.float64))[..., None] * 2.0**-24
        with np.errstate(invalid="ignore"):  # ∞ − ∞
            off, largest = np.abs(a - b), float(np.abs(b[np.isfinite(b)]).max(initial=scale))
        bad = (off > 8 * unit * largest) | (np.isfinite(a) != np.isfinite(b))
        if not bad.any():
            return ""
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        places = zip(("head", "row", "feature")[-len(index) :], index, strict=False)
        where = f"first at {', '.join(f'{name} {i}' for name, i in places)}: {b[index]:.6g} and {a[index]:.6g}"
        words = f"{int(bad.sum())} of {bad.size} outputs differ, by up to {np.nanmax(off, initial=0):.3g}; {where}"
        heads = np.flatnonzero(bad.any(axis=(1, 2))) if bad.ndim == 3 else np.empty(0)
        if 0 < len(heads) < len(bad):
            words += f"; heads that differ: {', '.join(map(str, heads[:8]))}{', …' if len(heads) > 8 else ''}"
        return words

    def behave(self) -> None:
        """Tries what a rotation must do beside rotating, and notes in `behaviour` what the candidate does wrong."""
        self._keeps_no_state()
        self._owns_its_result()
        if self.behaviour.keys() & {"state between calls", "output not written"}:
            return  # what else shows may follow from it
        self._if_taken("equal rows and heads", self._agrees)
        if not self.behaviour.keys() & {"heads read as positions", "rows differ"}:
            self._if_taken("other orders and numbers of rows and heads", self._takes_any_shape)
        self._if_taken("NaN and infinity", self._poison)
        self._if_taken("sums and multiples", self._linear)
        self._if_taken("views of x", self._memory)
        if "state between calls" not in self.behaviour and self.behaviour.keys() - HARMLESS:
            self._keeps_to_itself()

    def _if_taken(self, what: str, trial: Callable[[], None]) -> None:
        """A trial, or a note where the candidate refuses what it is given in it."""
        try:
            trial()
        except Unreadable as error:
            self.notes.append(f"{what}: not tried to the end, since {error}")

    def _keeps_no_state(self) -> None:
        """A longer call must not change a later, shorter one; so this comes before any other call. Some calls are much
        shorter than others, since a table may change at any length below the largest position."""
        top = self.max_position
        short = np.array([0, min(1, top // 4), top // 4, top // 2])
        least = np.minimum([0, short[1], 3, 4], top // 2)
        x = self.random(3, 4)
        shortest, fresh = self.call(x, least), self.call(x, short)
        if difference := self._differ(fresh, self.call(x, short)):
            self.behaviour["state between calls"] = f"the same call twice: {difference}"
            return
        longer = self.call(x, [*short[:3], top])
        for before, at in ((fresh, short), (shortest, least)):
            if difference := self._differ(before, self.call(x, at)):
                when = f"positions up to {at.max()}, before and after a call with position {top}"
                self.behaviour["state between calls"] = f"{when}: {difference}"
                return
        # Rows 0 and 1 have the same positions in all three, row 2 in two of them.
        if difference := self._differ(fresh[:, :3], longer[:, :3], short[:3]) or self._differ(
            shortest[:, :2], longer[:, :2]
        ):
            self.behaviour["depends on the length"] = (
                f"rows that stay, when position {top} joins the call: {difference}"
            )

    def _keeps_to_itself(self) -> None:
        """Results that change from call to call, always or now and then, look like any mistake: only that is named."""
        x, at = self.random(3, 4, seed=6), np.array([0, 1, min(5, self.max_position), self.max_position])
        first = self.call(x, at)
        difference = next((difference for _ in range(12) if (difference := self._differ(self.call(x, at), first))), "")
        if difference:
            self.behaviour = {"state between calls": f"the same call, again and again: {difference}"}

    def _agrees(self) -> None:
        """Equal heads come out equal, and equal rows at equal positions."""
        m, one = min(5, self.max_position), self.random(1, 1)
        x = np.broadcast_to(one, (3, 6, self.head_dim)).copy()
        y, still = self.call(x, [m, self.max_position, m, m, m, m]), one[0, 0].astype(np.float64)
        rows = np.delete(y, 1, 1)
        if difference := self._differ(y, np.broadcast_to(y[:1], y.shape)):
            if not self._differ(y, np.broadcast_to(y[:, :1], y.shape)):
                self.behaviour["heads read as positions"] = f"equal heads: {difference}; equal along the positions"
                self.behaviour.pop("depends on the length", None)  # the positions of other rows reach a row by its head
            elif [bool((head == still).all()) for head in y] == [False, True, True]:
                self.behaviour["only the first head rotated"] = "of 3 equal heads, 2 come back as they were"
            else:
                self.behaviour["heads differ"] = f"equal heads: {difference}"
            self.single = "head"
        elif difference := self._differ(rows, np.broadcast_to(rows[:, :1], rows.shape)):
            untouched = [bool((rows[:, j] == still).all()) for j in range(5)]
            if untouched == [False, True, True, True, True]:
                self.behaviour["only the first row rotated"] = "rows after the first come back as they were"
            elif untouched == [False, False, False, False, True]:
                self.behaviour["last row not rotated"] = "the last of 6 rows comes back as it was"
            else:
                self.behaviour["rows differ"] = f"5 equal rows, all at position {m}: {difference}"
            self.single = {"only the first row rotated": "row", "last row not rotated": "last"}.get(
                [*self.behaviour][-1]
            )

    def _takes_any_shape(self) -> None:
        """The order of the rows, how many of them there are, and how many heads and axes, change nothing. All calls
        of several rows have the largest position among theirs, since tables may depend on that."""
        top, m = self.max_position, min(5, self.max_position)
        at = np.array([0, m, min(1, top), top, m, 0, m])
        x = np.broadcast_to(self.random(3, 1, seed=1), (3, 7, self.head_dim)).copy()
        y = self.read(x, self.apart(at))
        for order in ([3, 6, 1, 0, 2, 5, 4], [0, 5, 3, 2, 1, 4, 6]):  # the second keeps what a bad key may be made of
            other = self.read(x, self.apart(at[order]))
            if not (difference := self._differ(other, y[:, order])):
                continue
            if not self._differ(other, y) and "rows differ" not in self.behaviour:  # or the first call was wrong itself
                self.behaviour["state between calls"] = (
                    "the positions of an earlier call of the same length are used again"
                )
            else:
                self.behaviour["rows differ"] = f"the same rows and positions in another order: {difference}"
        if self.axes is not None:
            self._reads_every_axis(x[:, :2], m)
        if self.single is None and "state between calls" not in self.behaviour:
            self._takes_any_rows(x, y, at)
            self._takes_any_heads(x, y, at)

    def _reads_every_axis(self, x: Any, m: int) -> None:
        """Equal rows at equal positions, after a call that had other ones on all axes but the first."""
        one, two = np.full(self.axes or 1, m), np.where(np.arange(self.axes or 1) > 0, 0, m)
        mixed, same = self.read(x, np.stack((one, two), axis=-1)), self.read(x, np.stack((one, one), axis=-1))
        if difference := self._differ(same, mixed[:, [0, 0]]):
            difference = f"positions that differ from an earlier call's, but not on the first axis: {difference}"
            self.behaviour.setdefault("state between calls", difference)

    def _takes_any_rows(self, x: Any, y: Float64, at: Int64) -> None:
        """One row alone, two, and as many as a long prompt has, if the positions have room for them."""
        for j in (3,) if "depends on the length" in self.behaviour else (3, 0, 2, 1):
            alone = self.call(x[:, j : j + 1].copy(), at[j : j + 1])
            if difference := self._differ(alone, y[:, j : j + 1], at[j : j + 1]):
                self.behaviour.setdefault(
                    "one row differs", f"position {at[j]} alone and in a call of seven: {difference}"
                )
        for rows in (np.array([1, 3]), np.arange(min(_LONG, self.max_position + 1)) % 7):
            if counts() and len(rows) > 2:  # it would be called with a few rows many times
                continue
            difference = self._same_as(x[:, rows], at[rows], y[:, rows], f"{len(rows)} rows in one call are")
            if difference:
                self.behaviour.setdefault(
                    "some lengths wrong", f"{len(rows)} rows in one call, and in a call of seven: {difference}"
                )

    def _takes_any_heads(self, x: Any, y: Float64, at: Int64) -> None:
        """x of two axes; many heads; and many in two batches, which have other heads at the same place."""
        if counts() and "depends on the length" not in self.behaviour:  # up to the largest position, all rows are there
            x, y, at = x[:, :3], y[:, :3], at[:3]
        many = np.arange(2 * _HEADS) % 3
        batches = x[many].reshape(2, _HEADS, *x.shape[1:])
        for part, expected in ((x[0], y[:1]), (x[many[:_HEADS]], y[many[:_HEADS]]), (batches, y[many])):
            shape = f"{part.shape[-3]} heads" if part.ndim == 3 else f"{part.ndim} axes"
            if difference := self._same_as(part, at, expected, f"x of {shape} is"):
                self.behaviour.setdefault("heads differ", f"x of {shape}, and of 3 axes and 3 heads: {difference}")
                self.single = "head"

    def _same_as(self, x: Any, at: Int64, y: Float64, what: str) -> str:
        """How f(x) differs from y (h, n, d); a shape that is not taken is a note."""
        try:
            result = self.call(x.copy(), at)
        except Unreadable as error:
            self.notes.append(f"{what} not taken: {error}")
            return ""
        return self._differ(result.reshape(y.shape), y, at)

    def _poison(self) -> None:
        """NaN and infinity in one row of one head must stay in it, and must not reach any other row."""
        at, x = np.array([0, 1, 1, self.max_position]), self.random(2, 4, seed=2)
        clean = self.call(x, at)
        if not np.isfinite(clean).all():
            self.behaviour["not finite"] = "NaN or infinity comes out of finite x"
            return
        for poison in (np.nan, np.inf):
            bad = x.copy()
            bad[0, 1] = poison
            y = self.call(bad, at)
            if np.isfinite(y[0, 1]).all() and clean[0, 1].any():
                evidence = f"a row of {poison} comes out as finite numbers"
                self.call(-x, at)
                if not np.isfinite(self.call(bad, at)[0, 1]).all():
                    evidence = f"{evidence}, and as it is after another call: the result of an earlier one is returned"
                    self.behaviour = {"state between calls": evidence}
                    return
                self.behaviour.setdefault("not linear", evidence)
            y[0, 1] = 0
            if not np.isfinite(y).all():
                spread = int((~np.isfinite(y)).any(-1).sum())
                self.behaviour["rows leak into each other"] = (
                    f"{poison} in one row of one head reaches {spread} other rows"
                )

    def _linear(self) -> None:
        at = np.array([0, 1, min(5, self.max_position), self.max_position])
        x, y = self.random(2, 4, seed=3), self.random(2, 4, seed=4)
        x, y = (np.ldexp(np.rint(np.ldexp(v.astype(np.float64), 4)), -4) for v in (x, y))  # so that x + y is exact
        fx, fy, total = (self.call(v.astype(self.dtype), at) for v in (x, y, x + y))
        four = self.call((4 * x).astype(self.dtype), at)
        # A result that is rounded to a narrow dtype is four times as large for 4x, but no exact sum.
        if difference := self._differ(four, 4 * fx, scale=16.0):
            self.behaviour["not linear"] = f"4·f(x) and f(4x): {difference}{self._added(at)}"
        elif difference := self._differ(fx + fy, total, scale=8.0, least=2.0**-9):
            self.behaviour["not linear"] = f"f(x + y) and f(x) + f(y): {difference}{self._added(at)}"

    def _added(self, at: Int64) -> str:
        """What comes out of zeros, in words; empty if that is zeros, or nothing that can be read."""
        with suppress(Unreadable):
            zero = self.call(np.zeros((2, len(at), self.head_dim), self.dtype), at)
            low, high = float(zero.min()), float(zero.max())
            if low == high != 0:
                return f"; f(0) is not 0 but {low:.6g}: a constant is added"
            if low != high and np.isfinite(zero).all():
                return f"; f(0) is not 0 but from {low:.6g} to {high:.6g}: something is added that does not depend on x"
        return ""

    def _memory(self) -> None:
        at, x = np.array([0, 1, min(5, self.max_position), self.max_position]), self.random(2, 4, seed=5)
        y = self.call(x, at)
        wide = np.zeros((2, 4, 2 * self.head_dim), self.dtype)
        wide[..., ::2] = x
        swapped = np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2)
        for what, view in (("strided", wide[..., ::2]), ("transposed", swapped)):
            if difference := self._differ(self.call(view, at), y):
                self.behaviour["strides ignored"] = f"the same x, {what} in memory: {difference}"

    def look_again(self) -> None:
        """Whether the results that were kept are still what they were: to be called after as many other calls as
        possible, those of the same shapes among them."""
        for first, before in self._kept:
            changed = int((before != first).sum() - (np.isnan(before) & np.isnan(first)).sum())
            if changed:
                where = "" if first.shape == self._kept[0][0].shape else f", of shape {first.shape},"
                evidence = f"{changed} of {first.size} outputs of an earlier call{where} change in later ones"
                self.behaviour.setdefault("result overwritten", evidence)

    def _owns_its_result(self) -> None:
        """A result must stay what it is when the function is called again, and must hold nothing but what it wrote."""
        at, x = self.apart(np.array([0, 1, min(5, self.max_position), self.max_position])), self.random(2, 4, seed=7)
        received = f"for x of shape {x.shape}, dtype {x.dtype}, and {position_range(at)}"
        first = ask(self.fn, {"x": x, "positions": at}, {}, received, self.behaviour)
        before = first.copy()
        self._kept.insert(0, (before, before) if np.may_share_memory(first, x) else (first, before))
        ask(self.fn, {"x": -2 * x, "positions": at[..., ::-1].copy()}, {}, received, self.behaviour)
        self.look_again()
        self._writes_all(x, at, before.astype(np.float64))
        if "output not written" not in self.behaviour:
            with suppress(Unreadable):  # a candidate need not take a single row
                self._writes_all(x[:1, :1].copy(), at[..., :1])

    def _writes_all(self, x: Any, at: Int64, before: Float64 | None = None) -> None:
        """No output may hold what stood in memory before, or differ from what came out ``before``, if that is given.

        Memory that was just given back is what the next array gets: always if it is small, since NumPy keeps small
        pieces by their size; often if it is larger.
        """
        sentinel = self.dtype.type(97.25)
        for _ in range(4):
            freed = [np.full(x.shape, sentinel) for _ in range(8)]
            del freed
            again = self.call(x, at)
            if left := int((again == float(sentinel)).sum()):
                evidence = f"{left} of {x.size} outputs are what stood in memory before"
                self.behaviour = {"output not written": evidence}
                return
            if before is not None and (difference := self._differ(again, before)):
                self.behaviour.setdefault("state between calls", f"the same call, some calls later: {difference}")
