"""The simplest statement about attributes that holds for exactly the wrong ones: of rows, of calls, of weights.

Each attribute is a column: a flag (bool), a number, or a label (a string). Every statement here holds for all that is
wrong; the best one holds for the fewest that are right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array

PERIODS = (4096, 2048, 1024, 1000, 512, 500, 256, 128, 100, 64, 32, 16, 10, 8, 7, 6, 5, 4, 3, 2)
WORTH = 0.05  # what a second statement must add to the share, unless it makes the rule exact
BEST = 5  # single statements that a second one is sought for


class Rule(NamedTuple):
    """A statement, what it is about, what it holds for, and how many of those are wrong."""

    words: str
    about: str  # the column
    holds: Array  # bool (N,)
    share: float  # 1.0: exactly the wrong ones

    @property
    def exact(self) -> bool:
        return self.share == 1.0


def simplest(columns: Mapping[str, Any], wrong: Any, speaks: Any = None) -> Rule | None:
    """The rule for ``wrong``, bool (N,), or None if all or none are wrong. One statement is preferred to two, and the
    first column to others that say as much. What does not ``speak`` counts as neither right nor wrong."""
    wrong = np.asarray(wrong, bool)
    speaks = wrong | (np.ones_like(wrong) if speaks is None else np.asarray(speaks, bool))
    if not wrong.any() or wrong[speaks].all():
        return None
    wrong, table = wrong[speaks], {name: np.asarray(column)[speaks] for name, column in columns.items()}
    single = sorted(_statements(table, wrong), key=lambda rule: -rule.share)  # stable: the simplest first
    best = single[0] if single else None
    for first in () if best is None or best.exact else single[:BEST]:
        inside = {name: column[first.holds] for name, column in table.items()}
        for second in _statements(inside, wrong[first.holds]):
            better = best is not None and (second.share > best.share + WORTH or second.exact and not best.exact)
            if better and second.about != first.about:
                holds = first.holds.copy()
                holds[first.holds] = second.holds
                best = Rule(f"{first.words} and {second.words}", first.about, holds, second.share)
    if best is None:
        return None
    everywhere = np.zeros(len(speaks), bool)
    everywhere[speaks] = best.holds
    return best._replace(holds=everywhere)


def _statements(table: Mapping[str, Array], wrong: Array) -> Iterator[Rule]:
    """Every statement about one column that holds for all that is wrong and not for everything."""
    count = wrong.sum()
    for name, column in table.items():
        if (column == column[0]).all():
            continue
        kind = _flags if column.dtype == bool else _labels if column.dtype.kind in "UO" else _numbers
        for words, holds in kind(name, column, wrong):
            held = holds.sum()
            if held < len(holds):
                yield Rule(words, name, holds, float(count / held))


def _flags(name: str, column: Array, wrong: Array) -> Iterator[tuple[str, Array]]:
    if column[wrong].all():
        yield name, column
    if not column[wrong].any():
        denied = re.sub(r" (is|are) ", r" \1 not ", name, count=1)
        denied = re.sub(r"^with (a )?", "without ", denied)
        yield denied if denied != name else f"not: {name}", ~column


def _labels(name: str, column: Array, wrong: Array) -> Iterator[tuple[str, Array]]:
    some = sorted(set(column[wrong].tolist()))
    yield f"{name}: {', or '.join(some[:4])}{', …' * (len(some) > 4)}", np.isin(column, some)


def _numbers(name: str, column: Array, wrong: Array) -> Iterator[tuple[str, Array]]:
    bad, right = np.unique(column[wrong]), np.unique(column[~wrong])
    low, high = bad[0], bad[-1]
    below, above = right[right < low], right[right > high]
    f = "d" if column.dtype.kind in "iu" else ".6g"
    if low == high and low == np.rint(low):  # that another number is this one is chance
        yield f"{name} = {low:{f}}", column == low
    if below.size:
        yield f"{name} ≥ {low:{f}} ({below[-1]:{f}} is right)", column >= low
    if above.size:
        yield f"{name} ≤ {high:{f}} ({above[0]:{f}} is right)", column <= high
    if below.size and above.size and low < high:
        yield f"{low:{f}} ≤ {name} ≤ {high:{f}}", (column >= low) & (column <= high)
    if column.dtype.kind in "iu":
        yield from _periods(name, column, bad, right)


def _periods(name: str, column: Array, bad: Array, right: Array) -> Iterator[tuple[str, Array]]:
    own = int(np.gcd.reduce(bad - bad[0])) if len(bad) > 2 else 0  # of fewer numbers any difference would be a period
    for period in (own, *PERIODS) if own > 1 else PERIODS:
        rest = bad[0] % period
        if (bad % period == rest).all():
            words = f"is {rest} modulo {period}" if rest else f"is a multiple of {period}"
            yield f"{name} {words}", column % period == rest
        elif (bad % period).all() and (right % period == 0).sum() > 1:  # one alone may be so by chance
            yield f"{name} is no multiple of {period}", column % period != 0
            if (bad > period).all():
                yield f"{name} is above {period} and no multiple of it", (column > period) & (column % period != 0)
