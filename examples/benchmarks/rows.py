"""The measurements of the benchmarks as values: each Row is printed when it comes, and all.py collects them."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
COUNTS = (1, CORES) if CORES > 1 else (1,)  # of threads: what is measured is measured with each
CONTROL = importlib.util.find_spec("threadpoolctl") is not None


class Row(NamedTuple):
    """One measurement."""

    what: str
    value: str = ""  # with its unit
    ratio: float | None = None
    of: str = ""  # what the ratio is to
    limit: str = ""  # of the ratio, unless it says otherwise
    note: str = ""


def in_turns(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """The times of each, in seconds, shortest first: taken in turns, so that a busy moment hits all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return {name: sorted(times) for name, times in seconds.items()}


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for pyrope, for NumPy's products if threadpoolctl is there to say so, and for torch."""
    before = os.environ.get("PYROPE_THREADS")
    os.environ["PYROPE_THREADS"] = str(count)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)
    try:
        if CONTROL:
            from threadpoolctl import threadpool_limits

            with threadpool_limits(count, "blas"):
                yield
        else:
            yield
    finally:
        if before is None:
            del os.environ["PYROPE_THREADS"]
        else:
            os.environ["PYROPE_THREADS"] = before


def counted(count: int) -> str:
    return "one thread" if count == 1 else f"{count} threads"


def line(what: str, value: str, ratio: str, of: str, limit: str) -> str:
    return f"{what:<35}{value:>10}{ratio:>8} {of:<15} {limit}".rstrip()


def text(row: Row) -> str:
    """A row in 80 columns, with its note below it; a row without a value is the heading of those that follow."""
    if not row.value:
        return f"\n{row.what}"
    first = line(row.what, row.value, "" if row.ratio is None else f"{row.ratio:.2f}", row.of, row.limit)
    return "\n    ".join([first, *textwrap.wrap(row.note, 76)])


def show(rows: Iterable[Row]) -> list[Row]:
    """Prints rows as they come, and returns them."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal or a file that cannot hold a µ gets a ?
    shown = []
    print(line("", "measured", "ratio", "to", "limit"))
    for row in rows:
        print(text(row), flush=True)
        shown.append(row)
    return shown
