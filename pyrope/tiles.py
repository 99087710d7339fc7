"""Cutting arrays into tiles, parts that fit the caches of a processor, and working on them on every core.

An array is cut the same way whatever the number of threads, so that every result has the same bits.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeVar

from .backend import Array

_Piece = TypeVar("_Piece")
_Spare = TypeVar("_Spare")


def tiles(shape: tuple[int, ...], limit: int) -> Iterator[tuple[int | slice, ...]]:
    """Indices that cut an array of this shape into tiles of at most limit elements, or of one row."""
    axis, inner = len(shape) - 1, shape[-1]
    while axis > 0 and inner * shape[axis - 1] <= limit:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield ()
        return
    step = max(1, limit // max(inner, 1))
    for index in itertools.product(*map(range, shape[: axis - 1])):
        for start in range(0, shape[axis - 1], step):
            yield (*index, slice(start, start + step))


_ONE = {int: 0, slice: slice(None)}  # what takes an axis of length 1, whatever the index


def tile_of(x: Array, index: tuple[Any, ...]) -> Array:
    """x[index], where an axis of length 1 stands for one of any length."""
    if 1 in x.shape:
        index = tuple([i if size != 1 else _ONE[type(i)] for i, size in zip(index, x.shape, strict=False)])
    return x[index]


# ── Every core ───────────────────────────────────────────────────────────────────────────────────────────────────────


def each(
    pieces: Iterable[_Piece], work: Callable[[_Piece, _Spare], object], spare: Callable[[], _Spare], *,
    spread: bool, products: bool = False,
) -> None:  # fmt: skip
    """Calls ``work(piece, spare())`` for every piece: on several threads if ``spread``, never so for arrays on a GPU.

    A piece writes where no other piece reads or writes; a thread makes one spare memory for all of its pieces.
    ``products`` says that the work has matrix products, whose library has threads of its own: it gets one for each
    piece if threadpoolctl is installed, and else the pieces are worked on in order. So are those of a call that comes
    while another is spread, be it from a piece or from another thread of the program: there are never more threads than
    cores. An error in a piece ends the call; of several it is that of the first piece.
    """
    todo, state = list(pieces), _state
    if not spread or len(todo) < 2:
        return _in_order(todo, work, spare)
    with state.one_blas_thread() if products else nullcontext(True) as allowed:
        count = min(threads(), len(todo)) if allowed else 1
        if count < 2 or not state.spreading.acquire(blocking=False):
            return _in_order(todo, work, spare)
        try:
            _spread(deque(enumerate(todo)), work, spare, count - 1)
        finally:
            state.spreading.release()


def _in_order(todo: list[_Piece], work: Callable[[_Piece, _Spare], object], spare: Callable[[], _Spare]) -> None:
    memory = spare()
    for piece in todo:
        work(piece, memory)


def threads() -> int:
    """How many pieces are worked on at a time: PYROPE_THREADS, but never more than the cores of this process."""
    wanted = os.environ.get("PYROPE_THREADS") or "9999"
    if not re.fullmatch("[1-9][0-9]{0,3}", wanted):
        fix = "set it to a number of threads, or unset it to use every core"
        raise ValueError(f"PYROPE_THREADS must be an integer from 1 to 9999, was {wanted!r}: {fix}")
    return min(int(wanted), _cores())


def _cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _spread(
    queue: deque[tuple[int, _Piece]], work: Callable[[_Piece, _Spare], object], spare: Callable[[], _Spare],
    count: int,
) -> None:  # fmt: skip
    """Pieces are taken in order, by so many threads of a pool and by this one, which waits for none that is late."""
    failures, helpers, pool = dict[int, BaseException](), list[Future[None]](), _state.pool(threads() - 1)

    def run() -> None:
        memory = spare()
        while queue:
            try:
                number, piece = queue.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                work(piece, memory)
            except BaseException as error:
                # Every piece before this one has been taken, so that the first to fail will be among the failures.
                queue.clear()
                failures[number if isinstance(error, Exception) else -1] = error

    try:
        try:
            for _ in range(count):
                helpers.append(pool.submit(copy_context().run, run))  # the context has the caller's np.errstate
        except RuntimeError:  # a thread cannot be started, as at the end of a program: this one does what is left
            pool.shutdown()
        run()
    finally:
        queue.clear()  # after Ctrl-C
        wait([helper for helper in helpers if not helper.cancel()])
    if failures:
        error = failures[min(failures)]
        failures.clear()  # its frames refer to these and to it: their arrays would stay in memory
        try:
            raise error
        finally:
            del error


class _State:
    """What there is once in a process. A child process has another: it inherits no threads, but locks as they are."""

    def __init__(self) -> None:
        self.spreading = threading.Lock()  # held while the pieces of a call are spread
        self.counting = threading.Lock()  # held while the next two change
        self.limited = 0  # calls that need products with one thread
        self.limit: Any = None  # what restores the threads of products when there is no such call any more
        self.pool = lru_cache(maxsize=1)(ThreadPoolExecutor)  # starts its threads when they are first needed

    @contextmanager
    def one_blas_thread(self) -> Iterator[bool]:
        """Within it every matrix product has one thread, if it is True: with others the last bits might differ."""
        if (blas := _blas()) is None:
            yield False
            return
        with self.counting:
            if not self.limited:
                self.limit = blas.limit(limits=1)
            self.limited += 1
        try:
            yield True
        finally:
            with self.counting:
                self.limited -= 1
                if not self.limited:
                    self.limit.restore_original_limits()


@lru_cache(maxsize=1)
def _blas() -> Any:
    """What sets the threads of NumPy's products: None without threadpoolctl, or if it does not know their library."""
    try:
        control = import_module("threadpoolctl").ThreadpoolController().select(user_api="blas")
    except ImportError:
        return None
    return control if control.lib_controllers else None


def _in_child() -> None:
    """After a fork."""
    global _state
    if _state.limited:
        _state.limit.restore_original_limits()
    _state = _State()


_state = _State()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
