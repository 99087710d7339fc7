"""What a check found, as a value: `Report`, its words and its JSON, and `Mismatch`, which carries one.

A report is no bool: ``if check(…)`` would pass for every result. Ask for ``report.ok``, or use the ``assert_…`` form.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

VERDICTS = ("right", "equivalent", "wrong")
_WIDTH = 79


@dataclass(frozen=True)
class Finding:
    """One difference between what was expected and what was found."""

    fault: str  # its name in `faults.FAULTS`, or "unexplained"
    evidence: str  # what was seen, with numbers
    cause: str
    fix: str
    since: int | None = None  # the first position where it shows at usual tolerances
    alternatives: tuple[str, ...] = ()  # names of faults that look the same here


@dataclass(frozen=True)
class ErrorRow:
    """Errors over a range of positions (or whatever `where` says), in units of the last place of the dtype."""

    where: str
    worst: float
    typical: float  # the median


@dataclass(frozen=True)
class Report:
    """The verdict about a candidate, and why."""

    subject: str  # what was checked, such as "rotation"
    expected: str  # in words or as a repr
    verdict: str  # one of VERDICTS
    findings: tuple[Finding, ...] = ()  # the faults, gravest first: none unless wrong
    precision: str | None = None  # the grade, where there is one
    errors: tuple[ErrorRow, ...] = ()
    notes: tuple[str, ...] = ()  # what must match on the other side, what could not be decided

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict must be one of {', '.join(VERDICTS)}, was {self.verdict!r}")
        if (self.verdict == "wrong") != bool(self.findings):
            raise ValueError("a report has findings if, and only if, its verdict is wrong")

    @property
    def ok(self) -> bool:
        return self.verdict != "wrong"

    @property
    def faults(self) -> tuple[str, ...]:
        """The names of the faults found."""
        return tuple(finding.fault for finding in self.findings)

    def __bool__(self) -> NoReturn:
        raise TypeError("a Report is neither true nor false: ask report.ok, or use the assert_… function")

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
        if self.errors:
            lines += ["", f"  {'error, in ulps':<36}{'worst':>12}{'typical':>12}"]
            lines += [f"  {row.where:<36}{row.worst:>12.3g}{row.typical:>12.3g}" for row in self.errors]
        for note in self.notes:
            lines += ["", *textwrap.wrap(f"note: {note}", _WIDTH, subsequent_indent="  ")]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, which has no NaN and no infinity: these become None."""
        return {"ok": self.ok, **{name: finite(value) for name, value in asdict(self).items()}}


def finite(value: Any) -> Any:
    """Plain values with None for NaN and infinity."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(finite(part) for part in value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _field(name: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"  {name:<10}", subsequent_indent=" " * 12)


class Mismatch(AssertionError):
    """What the ``assert_…`` functions raise; its message is the report."""

    def __init__(self, report: Report) -> None:
        super().__init__(f"\n{report}")
        self.report = report
