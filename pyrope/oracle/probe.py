"""Reads the operator R(m) out of a black box, and watches how the box behaves while it does so.

A candidate is any callable fn(x, positions) -> rotated x on NumPy arrays: x (…, n, d) of one float dtype, positions
int64 (n,), or (axes, n) where several axes are meant: then what is tried at position m has m, m/2, m/3, … on them, and
the operator is read with m on each. RoPE is linear in x, so unit vectors return R(m) column by column; dense random
vectors show what unit vectors cannot, such as products in a low precision. What a candidate does beside the rotation
(it keeps a state, mixes rows, changes its input, …) is noted in `Probe.seen` under the name that it has in
`faults.FAULTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from .. import checks
from .tensors import UNIT, dtype_named

Float64: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Int64: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Candidate: TypeAlias = Callable[[Any, Any], Any]

DEFAULT_MAX_POSITION = 131071  # what a cache of 131072 rows still has
_CALL_LIMIT = 2**20  # elements of x in one call
_LONG, _HEADS = 525, 130  # more rows and heads than a block or a loop of usual size has


class Unreadable(Exception):
    """The candidate failed, or returned what is no rotated x: nothing can be read from it."""


def float_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype, or the one of this name, if it is one that can be probed."""
    try:
        found: np.dtype[Any] = dtype_named(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f"dtype must be one of {', '.join(UNIT)}, was {dtype!r}") from error
    if found.name not in UNIT or not found.isnative:
        raise TypeError(f"dtype must be one of {', '.join(UNIT)}, was {found}")
    return found


def probe_positions(max_position: int) -> Int64:
    """Where a rotation is read: each power of two and its neighbours, some at random near the end, and the end."""
    found = {0, 1, 2, 3, 5, 7, 10, 13, max_position}
    found |= {2**k + step for k in range(2, max_position.bit_length()) for step in (-1, 0, 1)}
    rng = np.random.default_rng(max_position)
    found |= set(rng.integers(max_position // 2, max_position, 12, endpoint=True).tolist())
    return np.array(sorted(m for m in found if m <= max_position), np.int64)


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
    """A candidate with its head size, dtype and largest position, and what was seen of it so far.

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
        self.head_dim = checks.integer("head_dim", head_dim, 2)
        self.dtype = float_dtype(dtype)
        limit = DEFAULT_MAX_POSITION if max_position is None else max_position
        self.max_position = checks.integer("max_position", limit, 1)
        if self.max_position > checks.MAX_POSITION:
            raise ValueError(f"max_position must be at most 2^31, was {limit}")
        self.unit = UNIT[self.dtype.name]
        self.step = (
            2.0**-25 if self.dtype.name == "float16" else 0.0
        )  # rounding of the smallest numbers, where it shows
        self.seen: dict[str, str] = {}  # name of a fault -> evidence
        self.notes: list[str] = []
        self.single: str | None = None  # "head" or "row": what a call must have one of to be right

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
        """fn(x, positions) as float64, when it is an array like x; what else it did is noted."""
        m = np.array(positions, np.int64)
        m = m if m.ndim == 2 else self.apart(m)
        given, before = m.copy(), x.copy()
        told = f"for x of shape {x.shape}, dtype {x.dtype}, and {m.shape[-1]} positions from {m.min()} to {m.max()}"
        try:
            with np.errstate(all="ignore"):
                y = self.fn(x, given)
        except (Exception, SystemExit) as error:
            lines = str(error).splitlines() or ["no message"]
            words = lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1].strip()}"  # a program's last words
            raise Unreadable(f"it raises {type(error).__name__} ({words}) {told}") from error
        if y is None:
            raise Unreadable(f"it returns nothing, where the rotated x is wanted, {told}")
        if not isinstance(y, np.ndarray) or isinstance(y, np.ma.MaskedArray):
            raise Unreadable(f"it returns {type(y).__name__}, no NumPy array, {told}")
        if y.shape != x.shape:
            raise Unreadable(f"it returns shape {y.shape} {told}")
        if not np.array_equal(before.view(np.uint8), np.ascontiguousarray(x).view(np.uint8)):
            changed = int((before.astype(np.float64) != x.astype(np.float64)).sum())
            self.seen.setdefault("mutates its input", f"{changed} of {x.size} elements of x are others after the call")
            y = y.copy()  # it may be x itself
            x[...] = before
        elif not np.array_equal(m, given):
            self.seen.setdefault("mutates its input", "the positions are others after the call")
        if y.dtype != x.dtype:
            if y.dtype.name not in UNIT:
                raise Unreadable(f"it returns {y.dtype} {told}")
            self.seen.setdefault("wrong dtype out", f"x is {x.dtype}, the result {y.dtype}")
        return y.astype(np.float64)

    def read(self, x: Any, positions: Int64) -> Float64:
        """fn(x, positions) for x (h, n, d), in calls that the candidate is known to get right."""
        y = np.empty(x.shape)
        if self.single == "last":  # a row more, which is not looked at
            x, positions = (np.concatenate((z, z[..., -1:, :]), axis=-2) for z in (x, positions[..., None]))
            return self.call(x, positions[..., 0])[:, :-1]
        if self.single == "row":
            for j in range(x.shape[1]):
                y[:, j : j + 1] = self.call(x[:, j : j + 1].copy(), positions[..., j : j + 1])
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
        units = np.repeat(np.eye(self.head_dim, dtype=self.dtype)[:, None], positions.shape[-1], axis=1)
        at = positions if positions.ndim == 2 else self.everywhere(positions)
        return self.read(units, at).transpose(1, 2, 0)

    def _differ(self, a: Float64, b: Float64, scale: float = 4.0, least: float = 2.0**-24) -> str:
        """How two results differ by more than the last bits that another order of operations may change, or nothing;
        ``scale`` is the size of dense vectors, if the results are not larger. Even float64 may be computed in float32:
        how good that is, is for the grades to say."""
        unit = max(self.unit, least)
        with np.errstate(invalid="ignore"):  # ∞ − ∞
            off, largest = np.abs(a - b), float(np.abs(b[np.isfinite(b)]).max(initial=scale))
        bad = (off > 8 * unit * largest) | (np.isfinite(a) != np.isfinite(b))
        return (
            f"{int(bad.sum())} of {bad.size} outputs differ, by up to {np.nanmax(off, initial=0):.3g}"
            if bad.any()
            else ""
        )

    def behave(self) -> None:
        """Everything that a rotation does beside rotating: notes in `seen` what a candidate does otherwise."""
        self._keeps_no_state()
        self._agrees()
        if not self.seen.keys() & {"heads read as positions", "rows differ"}:
            self._takes_any_shape()
        self._poison()
        self._linear()
        self._memory()
        if "state between calls" not in self.seen and self.seen.keys() - {"mutates its input", "wrong dtype out"}:
            self._keeps_to_itself()

    def _keeps_no_state(self) -> None:
        """A shorter call must not know of a longer one; so this comes before any other call. Some calls are much
        shorter: tables that change at a length do so anywhere below the largest position."""
        top = self.max_position
        short, least = np.array([0, min(1, top // 2), top // 2, top // 4]), np.minimum([0, 1, 3, 2], top // 2)
        x = self.random(3, 4)
        shortest, fresh = self.call(x, least), self.call(x, short)
        if told := self._differ(fresh, self.call(x, short)):
            self.seen["state between calls"] = f"the same call twice: {told}"
            return
        longer = self.call(x, [*short[:3], top])
        for before, at in ((fresh, short), (shortest, least)):
            if told := self._differ(before, self.call(x, at)):
                when = f"positions up to {at.max()}, before and after a call with position {top}"
                self.seen["state between calls"] = f"{when}: {told}"
                return
        # Rows 0 and 1 have the same positions in all three, row 2 in two of them.
        if told := self._differ(fresh[:, :3], longer[:, :3]) or self._differ(shortest[:, :2], longer[:, :2]):
            self.seen["depends on the length"] = f"rows that stay, when position {top} joins the call: {told}"

    def _keeps_to_itself(self) -> None:
        """What differs from call to call, at random or every so often, looks like anything: then that is the name."""
        x, at = self.random(3, 4, seed=6), np.array([0, 1, min(5, self.max_position), self.max_position])
        first = self.call(x, at)
        told = next((told for _ in range(12) if (told := self._differ(self.call(x, at), first))), "")
        if told:
            self.seen = {"state between calls": f"the same call, again and again: {told}"}

    def _agrees(self) -> None:
        """Equal heads come out equal, and equal rows at equal positions."""
        m, one = min(5, self.max_position), self.random(1, 1)
        x = np.broadcast_to(one, (3, 6, self.head_dim)).copy()
        y, still = self.call(x, [m, self.max_position, m, m, m, m]), one[0, 0].astype(np.float64)
        rows = np.delete(y, 1, 1)
        if told := self._differ(y, np.broadcast_to(y[:1], y.shape)):
            if not self._differ(y, np.broadcast_to(y[:, :1], y.shape)):
                self.seen["heads read as positions"] = f"equal heads: {told}; equal along the positions"
                self.seen.pop("depends on the length", None)  # the positions of other rows reach a row by its head
            elif [bool((head == still).all()) for head in y] == [False, True, True]:
                self.seen["only the first head rotated"] = "of 3 equal heads, 2 come back as they were"
            else:
                self.seen["heads differ"] = f"equal heads: {told}"
            self.single = "head"
        elif told := self._differ(rows, np.broadcast_to(rows[:, :1], rows.shape)):
            untouched = [bool((rows[:, j] == still).all()) for j in range(5)]
            if untouched == [False, True, True, True, True]:
                self.seen["only the first row rotated"] = "rows after the first come back as they were"
            elif untouched == [False, False, False, False, True]:
                self.seen["last row not rotated"] = "the last of 6 rows comes back as it was"
            else:
                self.seen["rows differ"] = f"5 equal rows, all at position {m}: {told}"
            self.single = {"only the first row rotated": "row", "last row not rotated": "last"}.get([*self.seen][-1])

    def _takes_any_shape(self) -> None:
        """The order of the rows, how many of them there are, and how many heads and axes, change nothing. All calls
        of several rows have the largest position among theirs, since tables may depend on that."""
        top, m = self.max_position, min(5, self.max_position)
        at = np.array([0, m, min(1, top), top, m, 0, m])
        x = np.broadcast_to(self.random(3, 1, seed=1), (3, 7, self.head_dim)).copy()
        y = self.read(x, self.apart(at))
        for order in ([3, 6, 1, 0, 2, 5, 4], [0, 5, 3, 2, 1, 4, 6]):  # the second keeps what a bad key may be made of
            other = self.read(x, self.apart(at[order]))
            if not (told := self._differ(other, y[:, order])):
                continue
            if not self._differ(other, y):
                self.seen["state between calls"] = "the positions of an earlier call of the same length are used again"
            else:
                self.seen["rows differ"] = f"the same rows and positions in another order: {told}"
        if self.axes is not None:
            self._reads_every_axis(x[:, :2], m)
        if self.single is None and "state between calls" not in self.seen:
            self._takes_any_rows(x, y, at)
            self._takes_any_heads(x, y, at)

    def _reads_every_axis(self, x: Any, m: int) -> None:
        """Equal rows at equal positions, after a call that had other ones on all axes but the first."""
        one, two = np.full(self.axes or 1, m), np.where(np.arange(self.axes or 1) > 0, 0, m)
        mixed, same = self.read(x, np.stack((one, two), axis=-1)), self.read(x, np.stack((one, one), axis=-1))
        if told := self._differ(same, mixed[:, [0, 0]]):
            told = f"positions that differ from an earlier call's, but not on the first axis: {told}"
            self.seen.setdefault("state between calls", told)

    def _takes_any_rows(self, x: Any, y: Float64, at: Int64) -> None:
        """One row alone, two, and as many as a long prompt has, if the positions have room for them."""
        alone = (3,) if "depends on the length" in self.seen else (3, 0, 2, 1)
        for j in alone:
            if told := self._differ(self.call(x[:, j : j + 1].copy(), at[j : j + 1]), y[:, j : j + 1]):
                self.seen.setdefault("one row differs", f"position {at[j]} alone and in a call of seven: {told}")
        for rows in ([1, 3], np.arange(min(_LONG, self.max_position + 1)) % 7):
            told = self._same_as(x[:, rows], at[rows], y[:, rows], f"{len(rows)} rows in one call are")
            if told:
                self.seen.setdefault("rows differ", f"{len(rows)} rows in one call, and in a call of seven: {told}")

    def _takes_any_heads(self, x: Any, y: Float64, at: Int64) -> None:
        """x of two axes; many heads; and many in two batches, which have other heads at the same place."""
        many = np.arange(2 * _HEADS) % 3
        batches = x[many].reshape(2, _HEADS, *x.shape[1:])
        for part, expected in ((x[0], y[:1]), (x[many[:_HEADS]], y[many[:_HEADS]]), (batches, y[many])):
            shape = f"{part.shape[-3]} heads" if part.ndim == 3 else f"{part.ndim} axes"
            if told := self._same_as(part, at, expected, f"x of {shape} is"):
                self.seen.setdefault("heads differ", f"x of {shape}, and of 3 axes and 3 heads: {told}")
                self.single = "head"

    def _same_as(self, x: Any, at: Int64, y: Float64, what: str) -> str:
        """How f(x) differs from y (h, n, d); a shape that is not taken is a note."""
        try:
            found = self.call(x.copy(), at)
        except Unreadable as error:
            self.notes.append(f"{what} not taken: {error}")
            return ""
        return self._differ(found.reshape(y.shape), y)

    def _poison(self) -> None:
        """NaN and infinity in one row of one head must not reach another."""
        at, x = np.array([0, 1, 1, self.max_position]), self.random(2, 4, seed=2)
        if not np.isfinite(self.call(x, at)).all():
            self.seen["not finite"] = "finite x, positions 0, 1 and the largest: NaN or infinity comes out"
            return
        for poison in (np.nan, np.inf):
            bad = x.copy()
            bad[0, 1] = poison
            y = self.call(bad, at)
            y[0, 1] = 0
            if not np.isfinite(y).all():
                spread = int((~np.isfinite(y)).any(-1).sum())
                self.seen["rows leak into each other"] = f"{poison} in one row of one head reaches {spread} other rows"

    def _linear(self) -> None:
        at = np.array([0, 1, min(5, self.max_position), self.max_position])
        x, y = self.random(2, 4, seed=3), self.random(2, 4, seed=4)
        x, y = (np.ldexp(np.rint(np.ldexp(v.astype(np.float64), 4)), -4) for v in (x, y))  # so that x + y is exact
        fx, fy, total = (self.call(v.astype(self.dtype), at) for v in (x, y, x + y))
        four = self.call((4 * x).astype(self.dtype), at)
        # A result that is rounded to a narrow dtype is four times as large for 4x, but no exact sum.
        told = self._differ(four, 4 * fx, 16.0) or self._differ(fx + fy, total, 8.0, 2.0**-9)
        if told:
            self.seen["not linear"] = f"f(4x) against 4·f(x), f(x + y) against f(x) + f(y): {told}"

    def _memory(self) -> None:
        at, x = np.array([0, 1, min(5, self.max_position), self.max_position]), self.random(2, 4, seed=5)
        y = self.call(x, at)
        wide = np.zeros((2, 4, 2 * self.head_dim), self.dtype)
        wide[..., ::2] = x
        swapped = np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2)
        for what, view in (("strided", wide[..., ::2]), ("transposed", swapped)):
            if told := self._differ(self.call(view, at), y):
                self.seen["strides ignored"] = f"the same x, {what} in memory: {told}"
