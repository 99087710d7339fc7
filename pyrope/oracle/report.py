"""The result of a check: `Report`, as a value, as text and as JSON, and the errors that carry one.

A report is not a bool: ``if check(…)`` would pass for every result. Use ``report.ok``, or the ``assert_…`` function.
"""

from __future__ import annotations

import math
import os
import textwrap
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

VERDICTS = ("right", "equivalent", "wrong", "not judged")
_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"
_WIDTH = 79


@dataclass(frozen=True)
class Finding:
    """One difference between the candidate and what was expected of it."""

    fault: str  # its name in a catalogue of faults, or "unexplained"
    evidence: str  # what was observed, with numbers
    cause: str
    fix: str
    since: int | None = None  # the first position where it shows at usual tolerances
    alternatives: tuple[str, ...] = ()  # names of faults that look the same here


@dataclass(frozen=True)
class ErrorRow:
    """Errors in units of the last place of the dtype, over the positions, or other places, that `where` names."""

    where: str
    worst: float
    typical: float  # the median


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
            frames = own_frames(traceback.extract_tb(self.error.__traceback__))
            object.__setattr__(self, "frames", (*frames, *raised))


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
        if self.errors:
            lines += ["", f"  {'error, in ulps':<36}{'worst':>12}{'typical':>12}"]
            lines += [f"  {row.where:<36}{row.worst:>12.3g}{row.typical:>12.3g}" for row in self.errors]
        for note in self.notes:
            lines += ["", *textwrap.wrap(f"note: {note}", _WIDTH, subsequent_indent="  ")]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with None for NaN and infinity, which JSON does not have."""
        failure = None if self.failure is None else replace(self.failure, error=None)
        plain = {"ok": self.ok, **finite(asdict(replace(self, failure=failure)))}
        if failure is not None:
            del plain["failure"]["error"]
        return plain


def finite(value: Any) -> Any:
    """Plain values with None for NaN and infinity."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(finite(part) for part in value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _field(name: str, text: str) -> list[str]:
    wrapper = textwrap.TextWrapper(_WIDTH, initial_indent=f"  {name:<10}", subsequent_indent=" " * 12)
    wrapper.break_on_hyphens = False  # options and the names of files stay in one line
    return wrapper.wrap(text)


class Mismatch(AssertionError):
    """What the ``assert_…`` functions raise about a wrong candidate; its message is the report."""

    def __init__(self, report: Report) -> None:
        super().__init__(f"\n{report}")
        self.report = report


class NotJudged(AssertionError):
    """What the ``assert_…`` functions raise about a candidate that raised, or returned nothing that can be judged."""

    def __init__(self, report: Report) -> None:
        super().__init__(f"\n{report}")
        self.report = report
