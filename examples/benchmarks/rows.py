"""What the benchmarks measure, as values: one row for each thing, printed as it comes, or collected by all.py."""

from __future__ import annotations

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


def line(row: Row) -> str:
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    told = "; ".join(filter(None, (row.limit, row.note)))
    return f"{row.what:<38}{row.value:>11}{ratio:>8} {row.of:<17}{told}".rstrip()


def show(rows: Iterable[Row]) -> list[Row]:
    """Prints rows as they come, and returns them."""
    seen = []
    for row in rows:
        print(line(row), flush=True)
        seen.append(row)
    return seen
