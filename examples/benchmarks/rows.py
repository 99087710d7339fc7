"""The measurements of the benchmarks as values: each Row is printed when it comes, and all.py collects them."""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Iterable
from typing import NamedTuple


class Row(NamedTuple):
    """One measurement."""

    what: str
    value: str = ""  # with its unit
    ratio: float | None = None
    of: str = ""  # what the ratio is to
    limit: str = ""  # of the ratio, unless it says otherwise
    note: str = ""


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
