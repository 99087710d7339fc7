"""Checks of single arguments and of optional modules.

Each check returns the value, normalised, or raises an error that states the rule and the value that broke it.
"""

from __future__ import annotations

import importlib
import math
import numbers
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

_Kind = TypeVar("_Kind")


def instance(name: str, value: Any, kind: type[_Kind]) -> _Kind:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, was {type(value).__name__}")
    return value


MAX_SIZE = 2**16  # of what nothing else bounds: no model comes near, and beyond it there would be a long wait
MAX_POSITION = 2**31


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer of [least, most]."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, was {value!r}")
    number = int(value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, was {value}")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {'2^31' if most == MAX_POSITION else most}, was {value}")
    return number


def size(name: str, value: Any, least: int = 1) -> int:
    """An integer of [least, MAX_SIZE]."""
    return integer(name, value, least, MAX_SIZE)


def real(name: str, value: Any, low: float, high: float = math.inf, *, open: bool = False) -> float:
    """A finite number of [low, high], or of (low, high] if open."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, was {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (low < number if open else low <= number) or number > high or math.isinf(number):
        most = "" if high == math.inf else f" and at most {high:g}"
        rule = f"{'greater than' if open else 'at least'} {low:g}{most}"
        raise ValueError(f"{name} must be finite and {rule}, was {value!r}")
    return number


def in_range(name: str, value: Any, dtype: np.dtype[Any]) -> float:
    """A positive number that is normal in this dtype; bfloat16 has the range of float32."""
    number = real(name, value, 0, open=True)
    limits = np.finfo(dtype if dtype.name in ("float16", "float64") else np.float32)
    if not float(limits.tiny) <= number <= float(limits.max):  # in float32 1e39 is inf, and 1e-46 is 0
        within = f"{float(limits.tiny):.2g} … {float(limits.max):.2g}, the range of {dtype.name}"
        raise ValueError(f"{name} must lie within {within}, was {number:g}")
    return number


def reals(name: str, values: Any) -> tuple[float, ...]:
    """A sequence of positive numbers."""
    return tuple(real(f"{name}[{i}]", value, 0, open=True) for i, value in enumerate(_listed(name, values, "numbers")))


def integers(name: str, values: Any, least: int) -> tuple[int, ...]:
    return tuple(integer(f"{name}[{i}]", value, least) for i, value in enumerate(_listed(name, values, "integers")))


def _listed(name: str, values: Any, kind: str) -> Sequence[Any]:
    values = values.tolist() if isinstance(values, np.ndarray) else values
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a list of {kind}, was {values!r}")
    size(f"the length of {name}", len(values), 0)
    return values


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, was {value!r}")
    return value


# What others call a layout.
SYNONYMS = {
    **dict.fromkeys(("neox", "gpt-neox", "gptneox", "rotate_half", "rotate-half", "hf", "split"), "half"),
    **dict.fromkeys(("gpt-j", "gptj", "meta", "roformer", "adjacent", "rotate_every_two", "complex"), "interleaved"),
}


def choice(name: str, value: Any, choices: Sequence[Any]) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int) or value not in choices:
        word = value.lower() if isinstance(value, str) else ""
        meant = [one for one in choices if one in (word, SYNONYMS.get(word))]
        hint = f" (did you mean {meant[0]!r}?)" if meant else ""
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, was {value!r}{hint}")
    return value


def imported(module: str, purpose: str, extra: str | None = None) -> Any:
    """An optional module, or an ImportError that says what needs it, and which extra of pyrope, if any, installs it."""
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:  # mpi4py raises the latter where there is no MPI library
        package = module.partition(".")[0]
        fix = f"pip install {package}" if extra is None else f'pip install ".[{extra}]" in a clone of pyrope'
        raise ImportError(f"{purpose} needs {package}, and it cannot be imported ({error}): {fix}") from error


def positions(name: str, value: Any) -> np.ndarray[Any, np.dtype[np.integer[Any]]]:
    """Integers of at most 2³¹ in size, of any shape, as an array on the host."""
    if isinstance(value, range) and value and max(abs(value[0]), abs(value[-1])) > MAX_POSITION:  # before it is made
        raise ValueError(f"{name} must lie within ±2^31, were from {value[0]} to {value[-1]}")
    # Not np.asarray(value): it makes floats of [], objects of 10**20, and takes True for 1.
    m = np.asarray(value, None if isinstance(value, np.ndarray) or (isinstance(value, range) and value) else object)
    if m.dtype == object:
        for one in m.flat:
            if isinstance(one, bool | np.bool) or not isinstance(one, int | np.integer):
                raise TypeError(f"{name} must be integers, were {type(one).__name__}")
        if all(abs(int(one)) <= MAX_POSITION for one in m.flat):
            m = m.astype(np.int64)
    elif m.dtype.kind not in "iu" or isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} must be integers, none of them masked, were {m.dtype}")
    if m.size and (int(m.max()) > MAX_POSITION or int(m.min()) < -MAX_POSITION):
        raise ValueError(f"{name} must lie within ±2^31, were from {m.min()} to {m.max()}")
    return m
