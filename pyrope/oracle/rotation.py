"""`check_rotation` and `assert_rotation`: is a black box the rotation that a Rope means, and if not, what went wrong?

The truth comes from the definition and from exact tables, never from the candidate. Every row of every call is compared
with it; `diagnosis` says what became of those that are wrong.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from .. import checks
from ..backend import Array
from ..theta import LENGTH_DEPENDENT, Rope, check_rope
from .calls import FARTHEST, USUAL, Maker, Plan, RotationCall, sizes
from .candidate import UNIT, Candidate, Unreadable
from .comparison import RotationCheck
from .diagnosis import diagnosed
from .report import ErrorRow, Finding, Report, power_of_two
from .tolerance import APPLICABLE, decides_up_to, float_dtype

SHOWN = 40  # wrong calls whose errors are in the table
BACKWARDS = {"direction": "backward equals forward", "zeros returned": "no gradient"}  # of a backward pass


def check_rotation(
    fn: Callable[..., Any], rope: Rope, *, dtype: Any = np.float32, max_position: int | None = None,
    grade: str | None = None, equivalent: str = "right", min_position: int = 0, batched: bool = False,
    backward: bool = False, effort: str = "usual", framework: str | None = None,
) -> Report:  # fmt: skip
    """Whether fn(x, positions) -> rotated x, a black box on NumPy arrays, is the rotation of this rope.

    ``dtype`` is that of x; ``max_position`` the largest position to be tried: 131071, or what the length of the rope
    allows. A rope with axes is tried with positions (axes, n), as `rotate` takes them. Any precision from a float32
    angle on is right; ``grade``, one of `tolerance.GRADES`, asks for a better one. Features in another order, with the
    same scores, are "equivalent", which is right unless ``equivalent="wrong"`` refuses it. ``min_position`` is for
    candidates that take negative positions: it says down to which. ``batched`` claims that it takes positions (b, n) or
    (b, 1, n) for x (b, h, n, d), each row of the batch its own. ``effort`` is "few", "usual" or "thorough".

    With ``backward``, fn(g, positions) -> gradient of x is its backward pass, where g is the gradient of the result:
    Rᵀ·g, the rotation of ``rope.transposed``. None is taken for zeros, and no other order of features is right. With
    ``framework``, "torch", "jax", "mlx", "paddle" or "cupy", fn works on the arrays of that library, and its backward
    pass is the one that the library derives.
    """
    checks.flag("backward", backward)
    rope = check_rope(rope).transposed if backward else check_rope(rope)
    strict = checks.choice("equivalent", equivalent, ("right", "wrong")) == "wrong" or backward
    plan = _plan(rope, dtype, max_position, min_position)
    grades = APPLICABLE[plan.dtype.name]
    plan = replace(
        plan, batched=checks.flag("batched", batched), strict=strict, backward=backward,
        effort=checks.choice("effort", effort, ("few", "usual", "thorough")), derived=framework if backward else None,
        worst=grades[-1] if grade is None else checks.choice("grade", grade, grades),
    )  # fmt: skip
    return _judged(_candidate(fn, framework, backward), plan)


def assert_rotation(fn: Callable[..., Any], rope: Rope, **options: Any) -> None:
    """Raises `Mismatch`, an AssertionError with the report of `check_rotation`, unless that is right or equivalent;
    `NotJudged`, from the candidate's own exception, if it could not be judged."""
    __tracebackhide__ = True
    check_rotation(fn, rope, **options).raise_unless_ok()


def _plan(rope: Rope, dtype: Any, max_position: int | None, min_position: int) -> Plan:
    scaling, limit = rope.scaling, FARTHEST
    if isinstance(scaling, LENGTH_DEPENDENT):  # the table may depend on the largest position
        limit = max(int(scaling.length or 0) - 1, 1)
    top = checks.integer("max_position", limit if max_position is None else max_position, 1, checks.MAX_POSITION)
    least = checks.integer("min_position", min_position, -checks.MAX_POSITION)
    if least > 0:
        raise ValueError(f"min_position must be 0, or negative where such positions are taken, was {least}")
    return Plan(rope, float_dtype(dtype), top, least)


def _candidate(fn: Callable[..., Any], framework: str | None, backward: bool) -> Candidate:
    if not callable(fn):
        raise TypeError(f"fn must be a function of x and positions, was {type(fn).__name__}")
    if framework is not None:
        from . import adapters

        fn = adapters.framework(fn, framework, "x" if backward else None)
    return Candidate(fn, none_is_zero=backward)


def _judged(candidate: Candidate, plan: Plan) -> Report:
    try:
        return _report(RotationCheck(candidate, plan))
    except Unreadable as error:
        failure, last = error.failure(), _last_position(candidate, plan, error)
        if last is not None:
            lower = _report(RotationCheck(candidate, replace(plan, top=last)))
            beyond = f"it takes positions up to {last}, and raises beyond"
            if not lower.ok:
                return replace(lower, notes=(*lower.notes, f"{beyond}: {failure.reason}"))
            end = f"if its table is meant to end there, give max_position={last} (--max-position {last})"
            failure = replace(failure, fix=f"{beyond}; up to there it is {lower.verdict}: {end}; if not, let it grow")
        return Report(_subject(plan), plan.expected, "not judged", failure=failure)


def _subject(plan: Plan) -> str:
    return "rotation, backward" if plan.backward else "rotation"


def _last_position(candidate: Candidate, plan: Plan, error: Unreadable) -> int | None:
    """The last position that a candidate takes which raises for large positions alone; found by halving."""
    if error.kind != "raised" or error.depends_on_the_machine:
        return None
    maker = Maker(plan)

    def takes(m: int) -> bool:
        call = maker.call((3,), [0, min(1, m), m // 2, m])
        with suppress(Unreadable):
            candidate({"x": call.x, "positions": call.positions}, like=["x"])
            return True
        return False

    if takes(plan.top) or not takes(1):
        return None
    return bisect.bisect_left(range(plan.top), True, 2, key=lambda m: not takes(m)) - 1


def _report(check: RotationCheck) -> Report:
    """Raises `Unreadable` if the candidate does not take the sample, or refuses most calls."""

    def readings() -> Any:
        from .readings import of_rotation

        return of_rotation(check)

    plan = check.plan
    with np.errstate(all="ignore"):  # whatever the candidate returns
        check.run()
        findings, measured = diagnosed(check)
        if check.plan.backward:
            findings = [replace(one, fault=BACKWARDS.get(one.fault, one.fault)) for one in findings]
        findings += [Finding(name, words) for name, words in check.candidate.behaviour.items()]
        findings += [*_too_coarse(check), *_another_order(check)]
        right = not findings
        verdict = "wrong" if findings else "right" if check.order is None else "equivalent"
        notes = (*check.notes, *_undecided(check))
        if right and check.order is not None:
            notes = (*notes, f"{check.order_in_words()}: scores are the same if queries and keys are all made this way")
        moved = check.order is not None and not right  # numbers are right, in other places
        precision, errors = (None, ()) if moved else (check.precision, tuple(_errors(check, right)))
        return Report(
            _subject(plan), plan.expected, verdict, tuple(findings), precision, _tried(check), measured, errors, notes,
            readings=readings,
        )  # fmt: skip


def _too_coarse(check: RotationCheck) -> Iterator[Finding]:
    """The finding that a better grade was asked for."""
    worst = check.plan.worst
    if check.precision is None or not check.too_coarse:
        return
    call, y = check.coarse or check.sample
    ratio, at = check.expected(call).ratio(worst, y).max(axis=-1), call.each().max(axis=0)
    most = f"{ratio.max():.3g} times what is allowed in x {call.x.shape}, at position {at.flat[ratio.argmax()]}"
    since = int(np.abs(at[ratio > 1]).min(initial=check.plan.top))
    fact = f"it has {check.precision!r}; asked for was {worst!r}: off by {most}"
    yield Finding("coarser than asked", fact, since=since)


def _another_order(check: RotationCheck) -> Iterator[Finding]:
    if check.order is not None and check.plan.strict:
        negated = check.plan.backward and bool((check.order == -np.eye(len(check.order))).all())
        yield Finding("gradient negated" if negated else "another order of features", check.order_in_words())


def _undecided(check: RotationCheck) -> Iterator[str]:
    """Where no float32 angle can be judged."""
    if (limit := decides_up_to(check.rope)) < check.plan.top:
        yield f"a correct float32 angle may be half a turn off beyond position {limit}: not decided there"


def _tried(check: RotationCheck) -> str:
    """What the verdict rests on."""
    calls = [one.call for one in check.answers]
    rows = max((call.x.shape[-2] for call in calls), default=0)
    heads = max((math.prod(call.x.shape[:-2]) for call in calls), default=0)
    size, others = sizes(check.dtype), any(call.values != USUAL for call in calls)
    powers = f", numbers from {power_of_two(size[0])} to {power_of_two(size[-1])}" if others else ""
    left = [] if check.plan.least else ["negative positions"]
    left += [] if check.plan.batched else ["batches with positions of their own"]
    not_tried = f"; not tried: {', '.join(left)}" if left else ""
    return f"{len(calls)} calls, up to n = {rows:,}, position {check.plan.top:,}, {heads:,} heads{powers}{not_tried}"


def _errors(check: RotationCheck, right: bool) -> Iterator[ErrorRow]:
    """Errors by decade of the position, of the sample and of the first wrong calls with usual numbers, if there are
    any; ulps are those of the length of the pair, if all is right."""
    wrong = [(one.call, one.y) for one in check.answers if one.y is not None and one.wrong.any()]
    usual = [(call, y) for call, y in wrong if call.values == USUAL] or wrong
    shown = [check.sample, *([check.coarse] if check.coarse else []), *usual[:SHOWN]]
    rows = [_of_rows(check, call, y) for call, y in shown]
    at, off, allowed, ulps = (np.concatenate(column) for column in zip(*rows, strict=True))
    for k in range(-1, 10):
        low, high = (0, 0) if k < 0 else (10**k, min(10 ** (k + 1) - 1, int(at.max())))
        inside = (at >= low) & (at <= high)
        if inside.any():
            where = "position 0" if k < 0 else f"positions {low:,} to {high:,}"
            worst, most, last = (float(column[inside].max()) for column in (off, allowed, ulps))
            yield ErrorRow(where, worst, most, last if right else None)


def _of_rows(check: RotationCheck, call: RotationCall, y: Array) -> tuple[Array, ...]:
    """Of each row of a call, (N,): its position, its largest error, what is allowed, and the error in ulps."""
    expected = check.expected(call)
    off = np.where(np.isnan(y), np.inf, np.abs(y - expected.y)).max(axis=-1)
    allowed = np.broadcast_to(expected.allowed(check.plan.worst), y.shape).max(axis=-1)
    lengths = np.abs(call.x.astype(np.float64)).max(axis=-1) * check.rope.attention_factor
    ulps = off / (2 * UNIT[check.dtype] * 2.0 ** np.floor(np.log2(np.maximum(lengths, 1e-30))))
    at = np.broadcast_to(np.abs(call.each().max(axis=0)), off.shape)
    return tuple(column.ravel() for column in (at, off, allowed, ulps))
