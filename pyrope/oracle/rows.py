"""Every row of every call with its attributes, as columns for `rules`, and what its position may be taken for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array
from .calls import RotationCall
from .positions import AROUND, ORDER, OTHERS

MOST_WRONG, MOST_RIGHT = 48, 64  # rows of one call that are looked at
LARGEST_BLOCK = 256  # rows of a block that a kernel may work on
COUNTED = "counted from 0", "counted from another position"
SHAPES = "some shapes wrong"
# Columns, the simplest first, and which mistake it is if something is said about them that holds for the wrong rows.
ABOUT = {
    "row": "rows differ", "rows": "some lengths wrong", "position": "some positions wrong", "head": "heads differ",
    "heads": "heads differ", "axes of x": SHAPES, "batch row": "batch rows differ", "batch": "batch rows differ",
    "head of all": "heads differ", "heads in all": "heads differ", "rows after it": "rows differ", "numbers": SHAPES,
    "positions of their own": "positions of a batch misread", "x": "strides ignored", "positions": "positions misread",
    "values of x": "not linear", "order": ORDER, "as many heads as rows": "heads read as positions",
    "as many rows as features": "some lengths wrong", "rows are a power of two": "some lengths wrong",
    "positions fall": ORDER, "a position twice": ORDER, "positions skip": ORDER,
    "the last position is the first + rows − 1": "consecutive positions wrong", "first position": ORDER,
    "greatest position": "depends on the length", "largest number": "not linear",
}  # fmt: skip


class Answer(NamedTuple):
    """A call that was made: the result (if rows are wrong), and which rows are wrong."""

    call: RotationCall
    y: Array | None  # (…, n, d)
    wrong: Array  # bool (…, n)


class Table(NamedTuple):
    """Some rows of all calls, (N,)."""

    columns: dict[str, Array]
    wrong: Array  # bool (N,)
    speaks: Array  # bool (N,): not at position 0, where nothing turns, and not zeros, which turn to zeros
    answer: Array  # (N,): which answer a row belongs to
    place: Array  # (N,): and which of its rows it is, counted over all axes
    facts: list[dict[str, Array]]  # of each axis: the position p, and `positions.OTHERS`


def tabulated(answers: list[Answer], axes: int | None) -> Table:
    """The table of these answers."""
    parts: list[dict[str, Array]] = []
    facts: list[list[dict[str, Array]]] = [[] for _ in range(axes or 1)]
    seen, top = dict[Any, Array](), 0
    for k, one in enumerate(answers):
        pick, call = _picked(one.wrong), one.call
        if not len(pick):
            continue
        each = call.at.reshape(len(call.at), *[-1] * bool(call.own), call.x.shape[-2])
        index = np.unravel_index(pick, one.wrong.shape)
        row = (index[0], index[-1]) if call.own else index[-1]
        own = {"answer": k, "place": pick, "wrong": one.wrong.ravel()[pick], **_attributes(call, index, each)}
        for name, at in _recalled(seen, call, each).items():
            own[f"an earlier call had {name}, but another position here"] = (at != each).any(axis=0)[row]
        own["an earlier call had a greater position"] = top > each.max(initial=0)
        parts.append({name: np.broadcast_to(value, pick.shape) for name, value in own.items()})
        for of_axis, at in zip(facts, each, strict=True):
            of_axis.append(_facts(at, index, each[0]))
        top = max(top, each.max(initial=0))
    rows, joined = _joined(parts), [_joined(of_axis) for of_axis in facts]
    answer, place, wrong, speaks = (rows.pop(name) for name in ("answer", "place", "wrong", "speaks"))
    known = rows | {name: column[answer] for name, column in of_calls([one.call for one in answers]).items()}
    for taken in joined:
        taken["right"] = ~wrong & speaks
    columns = {name: known[name] for name in ABOUT} | rows
    return Table(columns, wrong, speaks | wrong, answer, place, joined)


def _picked(wrong: Array) -> Array:
    """Some rows of a call, wrong and right ones, the first and the last among them."""
    some = [np.zeros(0, np.int64)]
    for part, most in ((np.flatnonzero(wrong), MOST_WRONG), (np.flatnonzero(~wrong), MOST_RIGHT)):
        some.append(part[np.unique(np.linspace(0, len(part) - 1, most).astype(np.int64))] if len(part) > most else part)
    return np.sort(np.concatenate(some))


def _joined(parts: list[dict[str, Array]]) -> dict[str, Array]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _attributes(call: RotationCall, index: tuple[Array, ...], each: Array) -> dict[str, Any]:
    """What may be said of these rows of a call."""
    n, row, lead, none = call.x.shape[-2], index[-1], index[:-1], 0 * index[-1]
    m = each.max(axis=0)[(index[0], row) if call.own else row]
    with np.errstate(all="ignore"):
        largest = np.abs(call.x[index].astype(np.float64)).max(axis=-1, initial=0)
    largest = np.where(np.isnan(largest), np.inf, largest)
    return {
        "speaks": (m != 0) & (largest > 0) & (largest < np.inf), "row": row, "position": m,
        "head": lead[-1] if lead else none,
        "batch row": lead[0] if len(lead) > 1 else none, "rows after it": n - 1 - row, "largest number": largest,
        "head of all": np.ravel_multi_index(lead, call.x.shape[:-2]) if lead else none,
    }  # fmt: skip


def of_calls(calls: list[RotationCall]) -> dict[str, Array]:
    """What may be said of calls, as columns."""
    said = [_of_call(call) for call in calls]
    return {name: np.array([one[name] for one in said]) for name in said[0]}


def _of_call(call: RotationCall) -> dict[str, Any]:
    *lead, n, d = call.x.shape
    heads, m = lead[-1] if lead else 0, call.positions.reshape(-1, n)[0] if n else np.zeros(0, np.int64)
    steps = np.diff(m)
    return {
        "rows": n, "heads": heads, "heads in all": math.prod(lead), "axes of x": str(len(lead) + 2),
        "batch": lead[0] if len(lead) > 1 else 0,
        "positions of their own": bool(call.own), "x": call.memory, "positions": call.places,
        "values of x": call.values,
        "order": _order(m, steps), "as many heads as rows": heads == n > 1, "as many rows as features": n == d,
        "rows are a power of two": n & (n - 1) == 0, "numbers": call.x.size,
        "positions fall": bool((steps < 0).any()), "a position twice": len(np.unique(m)) < n,
        "positions skip": bool((steps > 1).any()),
        "first position": int(m[0]) if n else 0, "greatest position": int(call.positions.max(initial=0)),
        "the last position is the first + rows − 1": n > 0 and bool(m[-1] == m[0] + n - 1),
    }  # fmt: skip


def _order(m: Array, steps: Array) -> str:
    if not len(steps):
        return "a single position"
    if (steps == 1).all():
        return COUNTED[int(m[0] != 0)]
    if not steps.any():
        return "all the same"
    if (np.diff(np.sort(m)) == 1).all():
        return "a range, falling or shuffled"
    return "falling" if (steps < 0).all() else "rising with gaps" if (steps > 0).all() else "in another order"


def tails(columns: dict[str, Array], wrong: Array) -> Iterator[tuple[str, Array]]:
    """What is left over by blocks of rows or of heads, if all wrong rows, bool (N,), are among it."""
    for what, of, among in (("row", "row", "rows"), ("head", "head of all", "heads in all")):
        place, count = columns[of], columns[among]
        for k in range(2, LARGEST_BLOCK + 1):
            if (place[wrong] >= count[wrong] // k * k).all():
                tail = place >= count // k * k
                yield f"the {what} is after the last full block of {k}", tail
                yield f"the {what} is after one or more full blocks of {k}", tail & (count >= k)


def _recalled(seen: dict[Any, Array], call: RotationCall, each: Array) -> dict[str, Array]:
    """The positions (axes, …, n) of the first call that had this in common, which may be the call itself: a cache may
    have been keyed by that alone."""
    m = call.positions.ravel()
    keys = {
        "as many rows": [], "as many rows and the same first position": m[:1].tolist(),
        "as many rows, the same first and last position": [*m[:1].tolist(), *m[-1:].tolist()],
    }  # fmt: skip
    return {name: seen.setdefault((name, call.positions.shape, *key), each) for name, key in keys.items()}


def _facts(at: Array, index: tuple[Array, ...], first: Array) -> dict[str, Array]:
    """The positions of rows, at, and what they may have been taken for, such as those on the ``first`` axis: both (n,)
    or (b, n); index of the rows in x."""
    j, m = index[-1], at.reshape(-1, at.shape[-1])
    of = index[0] if len(m) > 1 else 0 * j  # which positions are a row's own
    p = m[of, j]
    others = {
        words: np.stack([np.broadcast_to(way(row), row.shape) for row in m])[of, j]
        for words, (_, way) in OTHERS.items()
    }
    around = zip(AROUND, (m[0][j], first.reshape(m.shape)[of, j]), strict=True)
    return {"p": p, **others, **dict(around)}
