"""The one way to call a black box, and what is watched in every call: failures, changed inputs, dtypes, reused results.

What a candidate does wrong beside its arithmetic is its *behaviour*: the name of a mistake, and the observation. Every
call is announced before it is made, by `Candidate` and by each adapter on the way: so the last description is of what
the user's own function received.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import numpy as np

from ..backend import Array
from .mistakes import FIXES
from .report import Failure, shortened

BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}  # of the significand, the first one included
UNIT = {name: 2.0**-bits for name, bits in BITS.items()}  # unit roundoff: half the step from 1 to the next number
KEPT, LARGEST_KEPT = 400, 2**16  # results that are looked at again, and their elements

listeners: list[Callable[[str], None]] = []  # called with the description of each call, and with "" when it has ended
_question: ContextVar[str] = ContextVar("_question", default="")  # what the oracle handed over, while it does so
_last_call: ContextVar[str] = ContextVar("_last_call", default="")  # what the user's function received
_traits: ContextVar[frozenset[str]] = ContextVar("_traits", default=frozenset())  # what its adapters know of it

COMPILES, COUNTS = "compiles for every shape, or starts a program", "counts its positions"


class Unreadable(TypeError, ValueError):
    """The candidate raised, or returned something that cannot be read as a result."""

    def __init__(self, reason: str, received: str, kind: str) -> None:
        super().__init__(f"it {reason} {received}")
        self.reason, self.received, self.kind = f"it {reason}".rstrip(","), received, kind  # a key of FIXES

    @property
    def depends_on_the_machine(self) -> bool:
        """Whether it may be another time, with more time or memory."""
        return "took longer" in self.reason or isinstance(self.__cause__, MemoryError)

    def failure(self) -> Failure:
        """What a report says about it."""
        fix = next((fix for words, fix in FIXES[self.kind] if re.search(words, message_of(self.__cause__))), "")
        return Failure(self.reason, self.received.removeprefix("for "), fix, self.__cause__)


class Candidate:
    """A black box: fn(*arrays, **options) -> an array, or several, each with the shape of one of those given."""

    def __init__(self, fn: Callable[..., Any], *, none_is_zero: bool = False) -> None:
        self.fn, self.none_is_zero = fn, none_is_zero
        self.behaviour: dict[str, str] = {}
        self.calls = 0  # made so far
        self.traits: frozenset[str] = frozenset()  # COMPILES, COUNTS: known after the first call
        self._kept: list[tuple[Array, Array, str]] = []

    def __call__(
        self, arrays: Mapping[str, Array], like: Sequence[str], options: Mapping[str, Array] = MappingProxyType({})
    ) -> list[Array]:
        """The results, each a float64 copy with the shape of the array that ``like`` names; as many as it names.

        Raises `Unreadable` if the candidate fails or returns anything else. Inputs that it changes are restored.
        """
        given = {name: array.view() for name, array in {**arrays, **options}.items()}  # whose shape it may change
        before = {name: array.copy() for name, array in given.items()}
        self.calls += 1
        out = self._run(given, arrays.keys(), options.keys())
        received = _last_call.get()
        for name, array in given.items():
            if (array.shape, array.dtype) != (before[name].shape, before[name].dtype):
                raise Unreadable(f"changes the shape or dtype of {name}", received, "reshaped")
        results = self._results(out, [before[name] for name in like], received)
        for result in results:
            self._keep(result, given, received)
        copies = [result.astype(np.float64) for result in results]  # before inputs are restored: one may be the other
        for name, array in given.items():
            self._restore(name, array, before[name])
        return copies

    def _run(self, given: Mapping[str, Array], names: Any, options: Any) -> Any:
        described = "; ".join(f"{name} {array.shape} {array.dtype}" for name, array in given.items())
        process, token = os.getpid(), _traits.set(frozenset())
        try:
            with announced(f"for {described}"), np.errstate(all="ignore"):
                return self.fn(*(given[name] for name in names), **{name: given[name] for name in options})
        except (KeyboardInterrupt, Unreadable):
            raise
        except BaseException as error:
            lines = message_of(error).splitlines() or ["no message"]
            words = " … ".join(dict.fromkeys((lines[0], lines[-1].strip())))  # a program says most at its end
            reason = f"raises {type(error).__name__} ({shortened(words)})"
            raise Unreadable(reason, _last_call.get(), "raised") from error
        finally:
            self.traits |= _traits.get()  # of a call that failed, too: it may be the first
            _traits.reset(token)
            if os.getpid() != process:  # a child that the candidate made by fork: it would ask, and fork, in its turn
                os._exit(0)

    def _results(self, out: Any, like: list[Array], received: str) -> list[Array]:
        """The arrays that were returned, without the arithmetic that a subclass may have of its own."""
        if len(like) > 1 and (not isinstance(out, tuple | list) or len(out) != len(like)):
            raise Unreadable(f"returns {type(out).__name__}, not {len(like)} arrays,", received, "gradients")
        results = list(out) if len(like) > 1 else [out]
        for i, (result, due) in enumerate(zip(results, like, strict=True)):
            if result is None and self.none_is_zero:
                results[i] = result = np.zeros_like(due)
            if not isinstance(result, np.ndarray) or isinstance(result, np.ma.MaskedArray):
                what = "nothing" if result is None else f"{type(result).__name__}, which is no NumPy array,"
                raise Unreadable(f"returns {what}", received, "type")
            results[i] = result = result.view(np.ndarray)
            if result.dtype.name not in UNIT:
                raise Unreadable(f"returns {result.dtype}", received, "dtype")
            if result.shape != due.shape:
                raise Unreadable(f"returns shape {result.shape}", received, "shape")
            if result.dtype != due.dtype:
                self.behaviour.setdefault("wrong dtype out", f"the input is {due.dtype}, the result {result.dtype}")
        return results

    def _restore(self, name: str, array: Array, before: Array) -> None:
        if changed := _changed(before, array):
            words = f"{changed} of {array.size} elements of {name} are changed after the call"
            self.behaviour.setdefault("mutates its input", words)
            array[...] = before

    def _keep(self, result: Array, given: Mapping[str, Array], received: str) -> None:
        """Keeps a result alive, as the layers of a model do, to see whether a later call writes over it."""
        own = not any(np.may_share_memory(result, array) for array in given.values())
        if own and result.size <= LARGEST_KEPT and len(self._kept) < KEPT:
            self._kept.append((result, result.copy(), received))

    def look_again(self) -> None:
        """Adds to the behaviour if an earlier result is not what it was."""
        changed = [received for result, copy, received in self._kept if _changed(copy, result)]
        if changed:
            words = f"{len(changed)} of {len(self._kept)} results change during later calls, the first {changed[0]}"
            self.behaviour["result overwritten by the next call"] = words

    def watched(self) -> tuple[str, ...]:
        """Its behaviour, in words."""
        return tuple(f"{name}: {observation}" for name, observation in self.behaviour.items())

    def accepts(self, *names: str) -> set[str]:
        """Which of these options its signature has."""
        try:
            return set(names) & set(inspect.signature(self.fn).parameters)
        except (TypeError, ValueError):
            return set()


def _changed(before: Array, after: Array) -> int:
    """How many elements have other bits; NaN is equal to itself."""
    a, b = (np.ascontiguousarray(x).view(np.uint8).reshape(x.size, x.itemsize) for x in (before, after))
    return 0 if np.array_equal(a, b) else int((a != b).any(axis=-1).sum())


def message_of(error: BaseException | None) -> str:
    """The message of an exception, even of one that cannot be printed."""
    try:
        return "" if error is None else str(error)
    except Exception as another:
        return f"a message that cannot be printed: {type(another).__name__}"


# ── What adapters say of the calls that they make ────────────────────────────────────────────────────────────────────


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


def last_call() -> str:
    """What the user's function received in the last call."""
    return _last_call.get()


def hand_over(fn: Callable[..., Any], *arguments: Any) -> Any:
    """fn(*arguments), for adapters: a failure says what fn received, not what the adapter did."""
    adapted = f", adapted from {question}" if (question := _question.get()) else ""
    _announce(f"for {'; '.join(map(_described, arguments))}{adapted}")
    return fn(*arguments)


def wrapping(call: Callable[..., Any], fn: Callable[..., Any], trait: str = "") -> Callable[..., Any]:
    """call, which hands its options on to fn, so that the signature of fn says which, such as a mask; ``trait``, if
    given, COMPILES or COUNTS, is true of what it calls."""

    def wrapped(*arguments: Any, **options: Any) -> Any:
        if trait:
            _traits.set(_traits.get() | {trait})
        return call(*arguments, **options)

    wrapped.__wrapped__ = fn  # type: ignore[attr-defined]
    return wrapped


def _described(argument: Any) -> str:
    if not (hasattr(argument, "shape") and hasattr(argument, "dtype")):
        return repr(argument)[:40]
    kind = type(argument)
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__} of shape {tuple(argument.shape)}, {argument.dtype}"


# ── Progress ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_planned: ContextVar[int] = ContextVar("_planned", default=0)


def plan_calls(calls: int) -> None:
    """Says how many calls a check is going to make, at most, for whoever shows progress."""
    _planned.set(calls)


def planned(made: int) -> str:
    """Progress in words: "214 of 460 calls"."""
    return f"{made} of {max(_planned.get(), made)} calls" if _planned.get() else f"call {made}"
