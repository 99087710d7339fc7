"""The one way to call a candidate, and what is watched in every call: failures, changed inputs, the result's dtype.

What a candidate does wrong beside its arithmetic is its *behaviour*: a dict from the name of a known mistake to the
evidence for it. Every call is announced before it is made, by `ask` and by each adapter on the way: so the last
description is of what the user's own function received.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import numpy as np

from .floats import UNIT, plain
from .report import Failure, shortened

Candidate: TypeAlias = Callable[..., Any]
Behaviour: TypeAlias = dict[str, str]
_question: ContextVar[str] = ContextVar("_question", default="")  # what `ask` handed over, while it does so
_last_call: ContextVar[str] = ContextVar("_last_call", default="")  # what the user's function received
_compiles: ContextVar[bool] = ContextVar("_compiles", default=False)  # whether a call compiled for its shapes
_counts: ContextVar[bool] = ContextVar("_counts", default=False)  # whether it was for positions in a row alone
listeners: list[Callable[[str], None]] = []  # called with the description of each call, and with "" when it has ended


class Unreadable(TypeError, ValueError):
    """The candidate raised, or returned something that cannot be read as a result."""

    def __init__(self, reason: str, received: str, kind: str) -> None:
        super().__init__(f"it {reason} {received}")
        self.reason, self.received = f"it {reason}".rstrip(","), received
        self.kind = (
            kind  # "raised", "reshaped", or what is wrong with the result: "type", "shape", "dtype", "gradients"
        )

    def failure(self) -> Failure:
        """What a report says about it."""
        fix = next((fix for words, fix in _FIXES[self.kind] if words in message_of(self.__cause__)), "")
        return Failure(self.reason, self.received.removeprefix("for "), fix, self.__cause__)


_WRAP = "wrap it by pyrope.oracle.adapters"
_AXES = (
    f'if it takes its axes in another order, or more of them, {_WRAP}.with_axes, or say --axes, such as "bhnd"; a '
    "rotation gets positions (n,), attention (b, n)"
)
_CALLED = (
    "a rotation is called as fn(x, positions), attention as fn(q, k, v), or with RoPE as fn(q, k, v, positions), "
    "and its backward pass with g after v"
)
_SHORT = "if its table is meant to be short, give max_position= (--max-position); if not, let it grow"
_DEVICE = "run it where its device is, or hand over a version for the CPU"
# What the words of the candidate's own exception suggest, the first that fits; "" fits all.
_FIXES = {
    "raised": (
        ("positional argument", f"{_CALLED}; if its arguments are others, {_WRAP}, such as from_cos_sin"),
        ("keyword argument", f"if its arguments are others, {_WRAP}, such as from_cos_sin"),
        ("numpy.ndarray", f"if it takes other arrays, {_WRAP}, such as from_torch, or say --framework torch"),
        ("out of bounds", _SHORT),
        ("out of range", _SHORT),
        ("CUDA", _DEVICE),
        ("NVIDIA", _DEVICE),
        ("Unable to allocate", "give it what it takes: with these shapes, it asks for more memory than there is"),
        ("took longer", "let the program end, or give it more time: --timeout, or timeout= of from_command"),
        ("it printed", "run the program by itself on .npy files: docs/other-languages.md says what it must do"),
        ("broadcast", _AXES),
        ("values to unpack", _AXES),
        ("shape", _AXES),
        ("", "mend the exception, whose last frames are below, or wrap the function so that it takes these arrays"),
    ),
    "reshaped": (("", "work on a view, x.reshape(…) or x.view(…), and leave the shape and dtype of x alone"),),
    "gradients": (("", "return three gradients, (dq, dk, dv)"),),
    "type": (("", "return the result alone, an array like x: of a tuple fn(…)[0]; of what works in place, x"),),
    "shape": (("", _AXES),),
    "dtype": (("", "return floats, of the dtype of the input"),),
}  # fmt: skip


def message_of(error: BaseException | None) -> str:
    """The message of an exception, even of one that cannot be printed."""
    try:
        return "" if error is None else str(error)
    except Exception as another:
        return f"a message that cannot be printed: {type(another).__name__}"


@contextmanager
def announced(call: str) -> Iterator[None]:
    """Tells the listeners of a call, and of its end."""
    _question.set(call.removeprefix("for "))
    try:
        _announce(call)
        yield
    finally:
        _question.set("")
        for listener in listeners:
            listener("")


def _announce(call: str) -> None:
    _last_call.set(call)
    for listener in listeners:
        listener(call)


def hand_over(fn: Candidate, *arguments: Any) -> Any:
    """fn(*arguments), for adapters: a failure says what fn received, not what the adapter did."""
    adapted = f", adapted from {question}" if (question := _question.get()) else ""
    _announce(f"for {'; '.join(map(_described, arguments))}{adapted}")
    return fn(*arguments)


def _marked(fn: Candidate, mark: ContextVar[bool]) -> Candidate:
    def call(*arguments: Any, **options: Any) -> Any:
        mark.set(True)
        return fn(*arguments, **options)

    return wrapping(call, fn)


def wrapping(call: Candidate, fn: Candidate) -> Candidate:
    """call, which hands its options on to fn: the signature of fn says which, such as a mask."""
    call.__wrapped__ = fn  # type: ignore[attr-defined]
    return call


class Counted:
    """A candidate that counts its positions, so that all rows of a batch begin at one. It is a type of its own: a
    user's function may have any attributes."""

    def __init__(self, call: Candidate, fn: Candidate, first: int) -> None:
        self.call, self.__wrapped__, self.starts = call, fn, (first,) * 4

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.call(*arguments, **options)


def compiling(fn: Candidate) -> Candidate:
    """fn, for adapters of libraries that compile anew for every shape."""
    return _marked(fn, _compiles)


def counting(fn: Candidate) -> Candidate:
    """fn, for adapters of functions that count their positions: other positions take several calls, or longer ones."""
    return _marked(fn, _counts)


def compiles() -> bool:
    """Whether the candidate that was called last compiles for every shape, so that each new one takes long."""
    return _compiles.get()


def counts() -> bool:
    """Whether the candidate that was called last counts its positions, so that others are no call of so many rows."""
    return _counts.get()


def last_call() -> str:
    """What the user's function received in the last call."""
    return _last_call.get()


def _described(argument: Any) -> str:
    if not (hasattr(argument, "shape") and hasattr(argument, "dtype")):
        return repr(argument)[:40]
    kind = type(argument)
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__} of shape {tuple(argument.shape)}, {argument.dtype}"


def ask(
    fn: Candidate, arguments: Mapping[str, Any], options: Mapping[str, Any], received: str, behaviour: Behaviour
) -> np.ndarray[Any, Any]:
    """The floats that a candidate returns for arrays by position and options by keyword, which ``received`` describes.

    Raises `Unreadable` if the candidate fails or returns no array of floats. Adds to ``behaviour`` if it changed an
    input, which is restored, or if the result has another dtype than the first argument.
    """
    given = {name: array.view() for name, array in {**arguments, **options}.items()}  # whose shape it may change
    before = {name: array.copy() for name, array in given.items()}
    _compiles.set(False)
    _counts.set(False)
    process = os.getpid()
    try:
        with announced(received), np.errstate(all="ignore"):
            out = fn(*(given[name] for name in arguments), **{name: given[name] for name in options})
    except (KeyboardInterrupt, Unreadable):
        raise
    except BaseException as error:
        lines = message_of(error).splitlines() or ["no message"]
        words = lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1].strip()}"  # a program says most at its end
        raise Unreadable(f"raises {type(error).__name__} ({shortened(words)})", last_call(), "raised") from error
    finally:
        if os.getpid() != process:  # a child that the candidate made by fork: it would ask, and fork, in its turn
            os._exit(0)
    received = last_call()
    for name, array in given.items():
        if array.shape != before[name].shape:
            raise Unreadable(f"changes the shape of {name} to {array.shape}", received, "reshaped")
        if array.dtype != before[name].dtype:
            raise Unreadable(f"changes the dtype of {name} to {array.dtype}", received, "reshaped")
    if (numbers := plain(out)) is None:
        what = "nothing" if out is None else f"{type(out).__name__}, which is no NumPy array,"
        raise Unreadable(f"returns {what}", received, "type")
    out = numbers
    if out.dtype.name not in UNIT:
        raise Unreadable(f"returns {out.dtype}", received, "dtype")
    for name, array in given.items():
        if changed := _changed(before[name], array):
            evidence = f"{changed} of {array.size} elements of {name} are changed after the call"
            behaviour.setdefault("mutates its input", evidence)
            out = out.copy()  # it may be the input itself
            array[...] = before[name]
    dtype = next(iter(before.values())).dtype
    if out.dtype != dtype:
        behaviour.setdefault("wrong dtype out", f"the input is {dtype}, the result {out.dtype}")
    return out


def _changed(before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> int:
    """How many elements have other bits; NaN is equal to itself."""
    a, b = (np.ascontiguousarray(x).view(np.uint8).reshape(x.size, x.itemsize) for x in (before, after))
    return 0 if np.array_equal(a, b) else int((a != b).any(axis=-1).sum())


def position_range(positions: Any) -> str:
    """Positions (…, n) in a few words."""
    if not positions.size:
        return "no positions"
    return f"positions of shape {positions.shape}, from {positions.min()} to {positions.max()}"
