"""What becomes of the numbers of x before they turn, or of the results: rounded, clipped, normalised, added to."""

from __future__ import annotations

import numpy as np

from ..backend import Array
from .calls import FEW, Call, Maker
from .comparison import Check
from .responses import Function, response
from .tolerance import Expected

CLOSE = {"float64": 1e-9, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}  # of what is read at position 0
ROUNDED = ("rounded", "cut", "quantised")
NAMED = ("bfloat16", "float16")  # which have names of their own


def damaged(check: Check) -> tuple[str, str] | None:
    """The name and the fact, if numbers are changed before or after they turn. Raises `Unreadable`."""
    for size in sizes(check.dtype):
        x, y = at_zero(check, size)
        found = response(x, y[..., :1, :], CLOSE[check.dtype])
        if found.function is not None and (named := _explained(check, found.words, found.function)):
            return named
    one, four, zero = (np.nan_to_num(y) for y in multiples(check))
    if zero.any():
        return "not linear", f"f(0) is not 0 but up to {np.abs(zero).max():.4g}: something is added"
    if (off := np.abs(four - 4 * one).max()) > 0.02 * np.abs(four).max():
        lengths = np.linalg.norm(at_zero(check)[1], axis=-1)
        alike = f"; rows come out with lengths from {lengths.min():.4g} to {lengths.max():.4g}"
        return "not linear", f"f(4x) and 4·f(x) differ by up to {off:.4g}{alike}"
    return None


def sizes(dtype: str) -> tuple[float, ...]:
    """Of the numbers that are followed."""
    return (1.0, 2.0**6, 2.0**-6) if dtype == "float16" else (1.0, 2.0**10, 2.0**-14)


def at_zero(check: Check, size: float = 1.0) -> tuple[Array, Array]:
    """Numbers at position 0, where nothing turns, and what comes out: two float64 (2, n, d). Raises `Unreadable`."""
    maker = Maker(check.plan)
    x = maker.x(2, 4 * FEW) * check.plan.dtype.type(size)
    y = check.ask(Call(x, maker.at(np.zeros(4 * FEW, np.int64))))
    return x.astype(np.float64), y / check.rope.attention_factor


def multiples(check: Check) -> list[Array]:
    """f(x), f(4x) and f(0), in calls alike. Raises `Unreadable`."""
    maker = Maker(check.plan)
    call = maker.call((2,), maker.scattered(FEW))
    return [check.ask(call._replace(x=(call.x * k).astype(call.x.dtype))) for k in (1, 4, 0)]


def _explained(check: Check, words: str, function: Function) -> tuple[str, str] | None:
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
