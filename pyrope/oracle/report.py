"""The result of a check: `Report`, as a value, as text, as JSON and as a page, and the errors that carry one.

A report is not a bool: ``if check(…)`` would pass for every result. Use ``report.ok``, or the ``assert_…`` function.
"""

from __future__ import annotations

import math
import os
import textwrap
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from . import page
from .drawings import Readings

VERDICTS = ("right", "equivalent", "wrong", "not judged")
_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"
_WIDTH = 79
_LINES, _LINE = 40, 400  # of what a candidate raised


@dataclass(frozen=True)
class Finding:
    """One difference between the candidate and what was expected of it."""

    fault: str  # its name in a catalogue of faults, or "unexplained"
    evidence: str  # what was observed, with numbers
    cause: str
    fix: str
    since: int | None = None  # the first position where it shows at usual tolerances
    alternatives: tuple[str, ...] = ()  # names of faults that look the same here
    happened: str = "—"  # in which projects it happened


@dataclass(frozen=True)
class ErrorRow:
    """Errors in units of the last place of the dtype, over the positions, or other places, that `where` names."""

    where: str
    worst: float
    typical: float  # the median
    absolute: float | None = None  # the worst one as a number, where all are of one kind


@dataclass(frozen=True)
class Failure:
    """Why a candidate could not be judged."""

    reason: str  # what it did instead of returning a result
    received: str  # what its function was called with
    fix: str
    error: BaseException | None = field(default=None, repr=False, compare=False)  # what it raised, if it raised
    frames: tuple[str, ...] = ()  # the last frames of its own code, as a traceback prints them, and what was raised

    def __post_init__(self) -> None:
        if self.error is not None:
            raised = "".join(traceback.format_exception_only(self.error)).rstrip().splitlines()
            raised = raised if len(raised) <= _LINES else [*raised[: _LINES // 2], "…", *raised[-_LINES // 2 :]]
            frames = own_frames(traceback.extract_tb(self.error.__traceback__))
            object.__setattr__(self, "frames", tuple(map(page.printable, (*frames, *map(shortened, raised)))))


def shortened(line: str) -> str:
    """A line of a message; the middle of one that nobody would read to its end is left out."""
    return line if len(line) <= _LINE else f"{line[: _LINE // 2]} … {line[-_LINE // 2 :]}"


def own_frames(frames: Iterable[traceback.FrameSummary]) -> tuple[str, ...]:
    """The lines of the last four frames that are neither pyrope's nor the import system's."""
    own = [frame for frame in frames if not frame.filename.startswith((_PACKAGE, "<frozen importlib"))]
    return tuple("".join(traceback.format_list(own[-4:])).splitlines())


@dataclass(frozen=True)
class Report:
    """The verdict about a candidate, and why."""

    subject: str  # what was checked, such as "rotation"
    expected: str  # a description or a repr
    verdict: str  # one of VERDICTS
    findings: tuple[Finding, ...] = ()  # the faults, gravest first: none unless wrong
    precision: str | None = None  # the grade, where there is one
    errors: tuple[ErrorRow, ...] = ()
    notes: tuple[str, ...] = ()  # what the other side must do alike, and what could not be decided
    failure: Failure | None = None  # of a candidate that could not be judged
    readings: Readings | None = field(default=None, repr=False, compare=False)  # what its page draws

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict must be one of {', '.join(VERDICTS)}, was {self.verdict!r}")
        if (self.verdict == "wrong") != bool(self.findings):
            raise ValueError("a report has findings if, and only if, its verdict is wrong")
        if (self.verdict == "not judged") != (self.failure is not None):
            raise ValueError("a report has a failure if, and only if, its verdict is not judged")

    @property
    def ok(self) -> bool:
        return self.verdict in ("right", "equivalent")

    def raise_unless_ok(self) -> None:
        """Raises `Mismatch` if the candidate is wrong, `NotJudged` from its own exception if it could not be judged."""
        __tracebackhide__ = True
        if self.failure is not None:
            raise NotJudged(self) from self.failure.error
        if not self.ok:
            raise Mismatch(self)

    @property
    def faults(self) -> tuple[str, ...]:
        """The names of its findings."""
        return tuple(finding.fault for finding in self.findings)

    @property
    def headline(self) -> str:
        """The verdict in one line, with the first fault, or the reason why there is none."""
        reason = self.failure.reason.partition("\n")[0] if self.failure is not None else ""
        more = f" and {len(self.findings) - 1} more" if len(self.findings) > 1 else ""
        why = f"{self.findings[0].fault}{more}" if self.findings else reason
        return page.printable(f"{self.subject}: {self.verdict.upper()}" + (f": {why}" if why else ""))

    def __bool__(self) -> NoReturn:
        raise TypeError("a Report is neither true nor false: use report.ok, or the assert_… function")

    def __str__(self) -> str:
        lines = [f"{self.subject}: {self.verdict.upper()}"]
        lines += _field("expected", self.expected)
        lines += _field("precision", self.precision) if self.precision else []
        for finding in self.findings:
            lines += ["", finding.fault]
            lines += _field("evidence", finding.evidence) + _field("cause", finding.cause) + _field("fix", finding.fix)
            if finding.since is not None:
                lines += _field("shows", f"from position {finding.since} on")
            if finding.alternatives:
                lines += _field("or", "; ".join(finding.alternatives) + " (cannot be told apart here)")
        if self.failure is not None:
            parts = (("reason", self.failure.reason), ("received", self.failure.received), ("fix", self.failure.fix))
            lines += [line for name, words in parts if words for line in _field(name, words)]
            lines += ["", *(f"  {line}" for line in self.failure.frames)] if self.failure.frames else []
        lines += ["", *_table(self.errors)] if self.errors else []
        for note in self.notes:
            lines += ["", *textwrap.wrap(f"note: {note}", _WIDTH, subsequent_indent="  ")]
        return page.printable("\n".join(lines))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with None for NaN and infinity, which JSON does not have."""
        failure = None if self.failure is None else replace(self.failure, error=None)
        plain = {"ok": self.ok, **finite(asdict(replace(self, failure=failure, readings=None)))}
        del plain["readings"]
        if failure is not None:
            del plain["failure"]["error"]
        return plain

    def to_html(self) -> str:
        """A page of its own, which needs no other file and no network."""
        return page.document(f"pyrope: {self.headline}", page.report_section(self))

    def _repr_html_(self) -> str:
        """The same, as a part of a notebook."""
        return page.fragment(page.report_section(self))


def by_faults(reports: Iterable[Report]) -> dict[tuple[str, ...], list[Report]]:
    """Wrong reports with the same faults together, the most frequent first."""
    groups: dict[tuple[str, ...], list[Report]] = {}
    for report in reports:
        if report.findings:
            groups.setdefault(report.faults, []).append(report)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def finite(value: Any) -> Any:
    """Plain values with None for NaN and infinity."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(finite(part) for part in value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table(errors: Iterable[ErrorRow]) -> Iterator[str]:
    """The errors, in ulps and, where they have one, as numbers."""
    rows = list(errors)
    if any(row.absolute is None for row in rows):
        yield f"  {'error, in ulps':<36}{'worst':>12}{'typical':>12}"
        yield from (f"  {row.where:<36}{row.worst:>12.3g}{row.typical:>12.3g}" for row in rows)
        return
    yield f"  {'error':<34}{'worst':>12}{'in ulps':>12}{'typical, ulps':>16}"
    yield from (f"  {row.where:<34}{row.absolute:>12.2g}{row.worst:>12.3g}{row.typical:>16.3g}" for row in rows)


def _field(name: str, text: str) -> list[str]:
    wrapper = textwrap.TextWrapper(_WIDTH, initial_indent=f"  {name:<10}", subsequent_indent=" " * 12)
    wrapper.break_on_hyphens = False  # options and the names of files stay in one line
    return wrapper.wrap(page.abbreviated(text))


def _message(report: Report) -> str:
    """The report, begun with its headline, which is all that a test runner shows in its summary."""
    return "\n".join([report.headline, *str(report).splitlines()[1:]])


class Mismatch(AssertionError):
    """What the ``assert_…`` functions raise about a wrong candidate; its message is the report."""

    def __init__(self, report: Report) -> None:
        super().__init__(_message(report))
        self.report = report


class NotJudged(AssertionError):
    """What the ``assert_…`` functions raise about a candidate that raised, or returned nothing that can be judged."""

    def __init__(self, report: Report) -> None:
        super().__init__(_message(report))
        self.report = report
