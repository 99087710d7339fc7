"""What becomes of single numbers: those that go in against those that come out, and the function that it is.

`FORMS` are functions as data, each with the number that is its own, if it has one, read from what came out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..backend import Array

Function: TypeAlias = Callable[[Array], Array]
# Dtypes by the bits of their significand, levels on each side of 0, and over whose axes (…, n, d) the largest is taken.
NARROW = {24: "float32", 8: "bfloat16", 11: "float16", 4: "float8 (e4m3)", 3: "float8 (e5m2)"}
LEVELS = {127: "8 bits", 128: "8 bits", 7: "4 bits"}
TOPS = (1.0, 1.75)  # what the largest number is made before it is rounded, up to a power of two: 1, or 448 in float8
GROUPS = {-1: "vector", -2: "feature", (-2, -1): "head", None: "array", 32: "group of 32", 64: "group of 64"}


class Response(NamedTuple):
    """A function in words, "" for x itself, and as a function, if it is one that is known."""

    words: str
    function: Function | None = None


def narrowed(x: Array, bits: int) -> Array:
    """Rounded to so many significant bits."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.asarray(np.ldexp(np.rint(mantissa * 2.0**bits) / 2.0**bits, exponent))


def over(x: Array, axes: Any, reduce: Callable[..., Any] = np.max) -> Array:
    """The largest x over these axes, or in each group of so many features, beside each number."""
    if axes in (32, 64):
        width = axes if x.shape[-1] % axes == 0 else x.shape[-1]
        return np.asarray(reduce(x.reshape(*x.shape[:-1], -1, width), axis=-1).repeat(width, axis=-1))
    return np.asarray(reduce(x, axis=axes, keepdims=True))


def quantised(x: Array, axes: Any, levels: int) -> Array:
    """Rounded to so many levels on each side of 0, of the largest number over these axes."""
    step = over(np.abs(x), axes) / levels
    return np.rint(x / np.where(step == 0, 1, step)) * step


def quantised_between(x: Array, axes: Any, levels: int) -> Array:
    """Rounded to one more than twice so many steps from the least number over these axes to the largest."""
    least = over(x, axes, np.min)
    step = (over(x, axes) - least) / (2 * levels + 1)
    return np.rint((x - least) / np.where(step == 0, 1, step)) * step + least


def scaled(x: Array, axes: Any, bits: int, top: float) -> Array:
    """Rounded to so many significant bits where the largest number over these axes is ``top``."""
    most = over(np.abs(x), axes) / top
    return narrowed(x / np.where(most == 0, 1, most), bits) * most


def roundings() -> Iterator[tuple[str, Function]]:
    """The usual ways to lose digits, coarse ones last."""
    for bits in sorted(NARROW, reverse=True):
        yield f"rounded to {NARROW[bits]}", partial(narrowed, bits=bits)
    for axes, group in GROUPS.items():
        for levels, words in LEVELS.items():
            how = f"quantised to {words}, by the largest number of each {group}"
            yield how, partial(quantised, axes=axes, levels=levels)
            if levels != 128:
                how = f"quantised to {words}, from the least to the largest number of each {group}"
                yield how, partial(quantised_between, axes=axes, levels=levels)


def forms(x: Array, y: Array) -> Iterator[tuple[str, Function]]:
    """The functions that y may be of x, the simplest first."""
    least, most, top = float(y.min()), float(y.max()), float(np.abs(y).max())
    yield "zeros", np.zeros_like
    yield "their sign only", np.sign
    yield "their absolute values", np.abs
    yield "zeros where they are negative", lambda x: np.maximum(x, 0)
    yield "squared", np.square
    yield f"clipped at ±{top:.4g}", lambda x: np.clip(x, -top, top)
    yield f"at most {most:.4g}", lambda x: np.minimum(x, most)
    yield f"at least {least:.4g}", lambda x: np.maximum(x, least)
    cap = _saturation(float(np.abs(x).max()), top)
    yield f"saturated at {cap:.4g}, as by c·tanh(x/c)", lambda x: cap * np.tanh(x / cap)
    for bits in (*NARROW, *range(2, 23)):
        words = NARROW.get(bits, f"{bits} significant bits")
        yield f"rounded to {words}", partial(narrowed, bits=bits)
    yield from list(roundings())[len(NARROW) :]
    for (axes, group), bits, top in product(GROUPS.items(), NARROW, TOPS):
        how = f"rounded to {NARROW[bits]}, scaled by the largest number of each {group}"
        yield how, partial(scaled, axes=axes, bits=bits, top=top)
    kept = np.abs(x)[(y != 0) & (x != 0)].min(initial=np.inf)
    yield f"zeros where they are below {kept:.3g}", lambda x: np.where(np.abs(x) < kept * (1 - 1e-9), 0, x)


def _saturation(most: float, top: float) -> float:
    """c of c·tanh(most/c) = top."""
    low, high = 1e-30, 1e6 * max(top, 1e-30)
    for _ in range(100):
        c = (low * high) ** 0.5
        low, high = (c, high) if c * np.tanh(most / c) < top else (low, c)
    return high


def examples(x: Array, y: Array) -> str:
    """Numbers of about 0.1, 1 and 10, if there are any, and the one that changes most, and what comes out of them."""
    size = np.where(np.isnan(y), np.inf, np.log(np.maximum(np.abs(x), 1e-300))).ravel()
    some = dict.fromkeys(int(np.abs(size - np.log(near)).argmin()) for near in (0.1, 1.0, 10.0))
    some[int(np.nan_to_num(np.abs(y - x)).argmax())] = None
    return ", ".join(f"{x.flat[i]:.5g} comes out as {y.flat[i]:.5g}" for i in some)


@np.errstate(all="ignore")
def response(x: Array, y: Array, close: float, scaled: bool = False) -> Response:
    """What y (…, 1, d) is of the first token of x (…, n, d), up to a relative error; NaN where it is not known.
    ``scaled``: up to a factor."""
    first, known = x[..., :1, :], ~np.isnan(y)
    if not known.any() or alike(first, y, close):
        return Response("")
    if np.isinf(y).any():
        return Response("not finite")
    for words, function in forms(first[known], y[known]):
        made = function(x)[..., :1, :]
        factor = (made * y)[known].sum() / np.square(made[known]).sum() if scaled else 1.0
        if alike(factor * made, y, close):
            return Response(words, function)
    return Response("another function of them")


def alike(x: Array, y: Array, close: float) -> bool:
    """Whether nearly all y that are known are x; a number that is halfway between two may be rounded to either."""
    near = np.abs(y - x) <= close * np.abs(x) + 1e-12 * np.abs(x).max(initial=0)
    return bool(near[~np.isnan(y)].mean() > 0.985)


def depends(x: Array, y: Array) -> bool:
    """Whether y is a function of x, as far as neighbours tell: from one x to the next it hardly changes."""
    each = y.ravel()[x.argsort(axis=None)]
    bends = each[1:-1] - (each[2:] + each[:-2]) / 2
    return bool(np.square(bends).sum() < 0.1 * np.square(each - each.mean()).sum())
