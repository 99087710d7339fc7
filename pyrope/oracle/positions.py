"""The position that each row acts at, solved from its angles, and the relation by which it comes from those given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..backend import Array
from .responses import narrowed

TURN = 2 * np.pi
SOLVED = 2000  # rows whose positions are solved
MOST_TURNS = 100  # of the slowest pair
FASTEST = 8  # times as far as it should be that a row may be turned
ENOUGH = 0.98  # of the rows must agree with a relation
SHIFTS: dict[float, str] = {1: "positions one too high", -1: "positions one too low"}
BLOCKS = range(2, 257)  # sizes of blocks of positions that may act as one
ELSEWHERE = "some positions wrong"
ORDER, STATE, ANOTHER = "order of positions matters", "state between calls", "another row's position"
NEGATIVE = "negative positions wrong"


ROW = "the row's number in the call"
# What a row may be turned by in the place of its own position, in words: the mistake, and of the positions of its call.
OTHERS: dict[str, tuple[str, Callable[[Array], Any]]] = {
    ROW: ("positions ignored", lambda m: np.arange(len(m))),
    "the first position of the call plus the row's number": (
        "consecutive positions assumed", lambda m: m[:1] + np.arange(len(m))),
    "p minus the first position of the call": ("first position taken as 0", lambda m: m - m[:1]),
    "p minus the least position of the call": ("first position taken as 0", lambda m: m - m.min()),
    "the first position of the call": (ANOTHER, lambda m: m[:1]),
    "the last position of the call": (ANOTHER, lambda m: m[-1:]),
    "the position of the row before": (ANOTHER, lambda m: np.roll(m, 1)),
    "the position of the row after": (ANOTHER, lambda m: np.roll(m, -1)),
    "the positions of the call in sorted order": (ANOTHER, np.sort),
    "the positions of the call backwards": (ANOTHER, lambda m: m[::-1]),
    "the positions of the first half of the rows, twice": (ANOTHER, lambda m: m[np.arange(len(m)) % -(-len(m) // 2)]),
    "the rank of p among the distinct positions of the call": (ORDER, lambda m: np.searchsorted(np.unique(m), m)),
}  # fmt: skip
# The same, of more than the positions of the call.
AROUND = {
    "the position of the same row in the first row of the batch": "positions of a batch misread",
    "the position on the first axis": "wrong axes",
}


class Became(NamedTuple):
    """What became of rows: the name of the mistake, and the same in words."""

    fault: str
    words: str
    holds: Any = True  # bool (W,): which of the wrong rows it explains
    general: bool = False  # whether it is better named by where it happens
    silent: Any = False  # bool (N,): which of all rows would be right in spite of this mistake


Facts: TypeAlias = Mapping[str, Any]
Relation: TypeAlias = tuple[str, str, Callable[..., Any]]  # the mistake, in words, the position from the facts


def wrapped(angle: Any) -> Any:
    """The same angle in [−π, π]."""
    return angle - TURN * np.rint(angle / TURN)


def acts_at(turned: Array, theta: Array, most: float) -> tuple[Array, Array]:
    """The position that each row is turned as if it were at, and how badly that fits: (N, p) complex -> two (N,).

    The slowest pair says it up to whole turns, each faster one more exactly; of the turns, those that fit best.
    """
    order = [i for i in np.argsort(np.abs(theta)) if theta[i]]
    if not order:
        return np.zeros(len(turned)), np.full(len(turned), np.inf)
    angle, slow = np.angle(turned), theta[order[0]]
    turns = min(MOST_TURNS, math.ceil(most * abs(slow) / TURN))
    m = (angle[:, order[0], None] + TURN * np.arange(-turns, turns + 1)) / slow
    for i in order[1:]:
        m = m + wrapped(angle[:, i, None] - m * theta[i]) / theta[i]
    off = sum(np.abs(wrapped(angle[:, i, None] - m * theta[i])) for i in order) / len(order)
    best = np.argmin(off + 1e-9 * np.abs(m), axis=1)[:, None]
    return np.take_along_axis(m, best, 1)[:, 0], np.take_along_axis(off, best, 1)[:, 0]


def moved(turned: Array, theta: Array, facts: Facts, rows: Array, narrow: bool) -> Became | None:
    """The positions that rows are turned by instead of theirs.

    ``turned`` (W, p) is what each pair of the W wrong rows is multiplied with; ``facts`` has for all N rows the
    position p, whether the row is right, and what `OTHERS` and `AROUND` say; ``narrow``: x has few bits.

    A relation that would leave all right rows right is preferred, as it says which rows are wrong. Any other one holds
    in a part of the rows alone: it is ``general``. Positions in proportion to p are left to the frequencies, and those
    near p to their rounding.
    """
    some = np.unique(np.linspace(0, len(rows) - 1, SOLVED).astype(np.int64))  # of many rows these will do
    own, best, right = {name: fact[rows[some]] for name, fact in facts.items()}, None, facts["right"]
    acts, off = acts_at(turned[some], theta, float(FASTEST * np.abs(facts["p"]).max(initial=1) + 10))
    good = off <= (0.05 if narrow else 4e-3)
    if good.mean() < 0.9 or not (np.abs(acts[good]) > 0.2).any():
        return None  # or these features do not turn: others may
    acts, own = acts[good], {name: fact[good] for name, fact in own.items()}
    p = own["p"].astype(np.float64)
    pace = acts[p != 0] / p[p != 0]
    often = float(np.median(pace)) if pace.size else 1.0
    others: list[Relation] = [("angles multiplied", f"p times {often:.6g}", lambda f: f["p"] * often)]
    for fault, words, other in (*relations(acts, own), *others * bool(right.any())):
        if best is not None and fault == others[0][0]:
            break  # whole numbers that are near it
        at = other(own)
        if (np.abs(acts - at) < 0.2).mean() > ENOUGH and (np.abs(at - p) > 0.2).mean() > 0.5:
            silent = np.abs(other(facts) - facts["p"]) < 0.2
            fault = NEGATIVE if (p < 0).all() else fault
            found = Became(fault, f"rows are turned as at {words}", silent=silent)
            if not right.any() or silent[right].mean() > ENOUGH:
                return found
            best = best or found._replace(general=True)
    if best is not None or (np.abs(acts - p) > 0.2).mean() < 0.9 or (np.abs(pace - often) < 1e-3).mean() > 0.9:
        return best
    some_words = ", ".join(f"{m:g} as {e:.6g}" for m, e in list(zip(p, acts, strict=True))[:4])
    return Became(ELSEWHERE, f"rows are turned as at other positions: {some_words}", general=True)


def relations(acts: Array, facts: Facts) -> Iterator[Relation]:
    """Simple ways to come by a wrong position, with numbers read from what was measured."""
    p = facts["p"]
    lost = np.rint(p - acts).astype(np.int64)
    shift, of_row = (int(np.rint(np.median(acts - one))) for one in (p, facts[ROW]))
    period = int(np.gcd.reduce(lost))
    half, top, low = period // 2, float(np.rint(acts.max())), float(np.rint(acts.min()))
    yield SHIFTS.get(shift, "positions shifted"), f"p {_signed(shift)}", lambda f: f["p"] + shift
    yield "positions one too low", "p − 1, but at least 0", lambda f: np.maximum(f["p"] - 1, 0)
    if period > 1:
        few = f"p modulo {period}, from {-half} on, as in an integer of few bits"
        yield "positions modulo a length", f"p modulo {period}", lambda f: f["p"] % period
        yield "positions modulo a length", few, lambda f: (f["p"] + half) % period - half
    for words, fault in ({words: fault for words, (fault, _) in OTHERS.items()} | AROUND).items():
        yield fault, words, lambda f, words=words: f[words]
    yield "positions ignored", f"the row's number {_signed(of_row)}", lambda f: f[ROW] + of_row
    yield "table clamped at its end", f"p, but at most {top:g}", lambda f: np.minimum(f["p"], top)
    yield ELSEWHERE, f"p, but at least {low:g}", lambda f: np.maximum(f["p"], low)
    for dtype, count, most in (("bfloat16", 8, 3e38), ("float16", 11, 65504)):
        rounded = partial(lambda f, count, most: np.clip(narrowed(f["p"], count), -most, most), count=count, most=most)
        yield f"{dtype} positions", f"p rounded to {dtype}", rounded
    yield NEGATIVE, "|p|", lambda f: np.abs(f["p"])
    yield "direction", "−p", lambda f: -f["p"]
    for k in BLOCKS:
        blocks = "positions divided in integers"
        yield blocks, f"p // {k}", lambda f, k=k: f["p"] // k
        yield blocks, f"p // {k}·{k}, the first of its block", lambda f, k=k: f["p"] // k * k


def _signed(shift: int) -> str:
    return f"{'−' if shift < 0 else '+'} {abs(shift)}"
