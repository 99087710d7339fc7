"""Cutting arrays into tiles, parts that fit the caches of a processor, and working on them on every core.

An array is cut the same way whatever the number of threads, so that every result has the same bits.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from functools import cache
from importlib import import_module
from threading import Lock, get_native_id
from typing import Any, NamedTuple, TypeVar

import numpy as np

from .backend import Array

# glibc gives what is freed back to the system, and fresh pages cost more than the arithmetic on them, until a large
# block was freed once: from then on it keeps blocks of up to that size.
np.empty(2**25 - 2**16, np.uint8)

_Piece = TypeVar("_Piece")


def cuts(length: int, step: int) -> list[slice]:
    """Slices of at most step elements that make up an axis of this length."""
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def tiles(shape: tuple[int, ...], limit: int) -> Iterator[tuple[int | slice, ...]]:
    """Indices that cut an array of this shape into tiles of at most limit elements, or of one row."""
    axis, inner = len(shape) - 1, shape[-1]
    while axis > 0 and inner * shape[axis - 1] <= limit:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield ()
        return
    for index in itertools.product(*map(range, shape[: axis - 1])):
        for some in cuts(shape[axis - 1], max(1, limit // max(inner, 1))):
            yield (*index, some)


_ONE = {int: 0, slice: slice(None)}  # what takes an axis of length 1, whatever the index


def tile_of(x: Array, index: tuple[Any, ...]) -> Array:
    """x[index], where an axis of length 1 stands for one of any length."""
    if 1 in x.shape:
        index = tuple([i if size != 1 else _ONE[type(i)] for i, size in zip(index, x.shape, strict=False)])
    return x[index]


def each(
    work: Callable[[_Piece], object], pieces: Iterable[_Piece], *, spread: bool = True, products: bool = False
) -> None:
    """Calls ``work(piece)`` for every piece, on every core if ``spread``, which is not for arrays on a GPU.

    A piece writes where no other piece reads or writes. ``products`` says that the work has matrix products, whose
    library has threads of its own: it gets one for each piece if threadpoolctl is installed, and else the pieces are
    worked on in order. So are those of a call from a piece, or from another thread of the program while this one is at
    work: there are never more threads than cores. An error ends the call; of several it is that of the first piece.
    """
    todo = list(pieces)
    if spread and len(todo) > 1 and not (products and _blas() is None):
        count, pool = threads(), _shared(os.getpid())  # a child process has another lock, and no threads
        if pool.lock.acquire(blocking=False):
            try:
                with _blas().limit(limits=1) if products else nullcontext():
                    _spread(work, todo, pool, count - 1)
            finally:
                pool.lock.release()
            return
    for piece in todo:
        work(piece)


class _Pool(NamedTuple):
    """Threads, which start when they are first needed, their numbers, and a lock that is held while they work."""

    lock: Lock
    executor: ThreadPoolExecutor
    helpers: list[int]


def _spread(work: Callable[[_Piece], object], todo: list[_Piece], pool: _Pool, helpers: int) -> None:
    """Pieces are taken in order, by this thread and by so many others."""
    failures: dict[int, BaseException] = {}
    queue = enumerate(todo)  # which all threads share

    def run() -> None:
        for number, piece in queue:
            try:
                work(piece)
            except BaseException as error:
                failures[number if isinstance(error, Exception) else -1] = error  # Ctrl-C is never hidden by an error
            if failures:  # every piece before one that failed has been taken: the first to fail will be among them
                return

    started = []
    try:
        with suppress(RuntimeError):  # no thread can be started, as at the end of a program: this one does the rest
            for _ in range(min(helpers, len(todo) - 1)):
                started.append(pool.executor.submit(copy_context().run, run))  # has np.errstate
        with _apart(pool.helpers):
            run()
    finally:
        for _ in queue:  # after Ctrl-C nothing more is taken
            pass
        wait([helper for helper in started if not helper.cancel()])
    try:
        if failures:
            raise failures[min(failures)]
    finally:
        failures.clear()  # its frames refer to it and to these: their arrays would stay in memory


def threads() -> int:
    """How many pieces are worked on at a time: PYROPE_THREADS, but never more than the cores of this process."""
    wanted = os.environ.get("PYROPE_THREADS") or "9999"
    if not re.fullmatch("[1-9][0-9]{0,3}", wanted):
        fix = "set it to a number of threads, or unset it to use every core"
        raise ValueError(f"PYROPE_THREADS must be an integer from 1 to 9999, was {wanted!r}: {fix}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(int(wanted), cores)


@cache
def _shared(process: int) -> _Pool:
    helpers = list[int]()
    return _Pool(Lock(), ThreadPoolExecutor(9999, initializer=lambda: helpers.append(get_native_id())), helpers)


@contextmanager
def _apart(helpers: list[int]) -> Iterator[None]:
    """This thread on its core and these on others, where the system lets a program say so: a virtual machine may put
    them on one core though another is idle, and leave them there for many milliseconds."""
    before = set[int]()
    with suppress(AttributeError, OSError):
        cores, own = os.sched_getaffinity(0), {_system().sched_getcpu()}
        for helper in helpers if cores - own else ():
            os.sched_setaffinity(helper, cores - own)
            before = cores
        if before:
            os.sched_setaffinity(0, own)
    try:
        yield
    finally:
        with suppress(OSError):
            if before:
                os.sched_setaffinity(0, before)


@cache
def _system() -> Any:
    """The C library of this process."""
    return import_module("ctypes").CDLL(None)


@cache
def _blas() -> Any:
    """What sets the threads of NumPy's products: None without threadpoolctl, or if it does not know their library."""
    try:
        control = import_module("threadpoolctl").ThreadpoolController().select(user_api="blas")
    except ImportError:
        return None
    return control if control.lib_controllers else None
