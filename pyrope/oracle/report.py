"""The result of a check: `Report`, as a value, as text, as JSON and as a page, and the errors that carry one.

A report is not a bool: ``if check(…)`` would pass for every result. Use ``report.ok``, or the ``assert_…`` function.
"""

from __future__ import annotations

import math
import os
import re
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from .mistakes import mistake

VERDICTS = ("right", "equivalent", "wrong", "not judged")
MOST = 3  # findings: what comes after them is mostly a consequence
_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"
_WIDTH = 79
NUMBERS = ("worst", "allowed", "ulps")  # the heads of columns of numbers
_LINES, _LINE = 40, 400  # lines of what a candidate raised that are shown, and characters of one
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
# Ten numbers or more in brackets.
_LONG_LIST = re.compile(r"([\[(])((?:[-+.\w]+, ?){3})((?:[-+.\w]+, ?){6,})([-+.\w]+),?([\])])")
# What a terminal obeys, but tabs and newlines; what turns text around; surrogates, which no file has.
_NOT_TEXT = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")


class Part(NamedTuple):
    """A part of what a report says, which text and pages show in their own way; what is empty is left out."""

    title: str
    rows: Sequence[tuple[str, str]] = ()  # names, and what is said of each
    table: Sequence[tuple[str, ...]] = ()  # cells, those of the head first
    lines: Sequence[str] = ()  # as they are


@dataclass(frozen=True)
class Finding:
    """One difference between the candidate and what was expected of it; cause, fix and where it happened are those of
    the mistake with this name."""

    fault: str  # a name of `mistakes`, alone or with what was measured ("window: one too wide"), or "unexplained"
    fact: str  # what was measured, in a sentence with numbers
    where: str = ""  # which rows or calls are wrong; the first wrong number, with what was expected
    since: int | None = None  # the first position where it shows, for programs that read the report

    @property
    def cause(self) -> str:
        return mistake(self.fault).cause

    @property
    def fix(self) -> str:
        return mistake(self.fault).fix

    @property
    def happened(self) -> str:
        return mistake(self.fault).happened


@dataclass(frozen=True)
class ErrorRow:
    """The worst error over the positions, or other places, that `where` names."""

    where: str
    worst: float
    allowed: float  # how far off the least exact result that is accepted may be there
    ulps: float | None = None  # the same error in units of the last place: of right candidates alone


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
            object.__setattr__(self, "frames", tuple(map(printable, (*frames, *map(shortened, raised[:_LINES])))))


@dataclass(frozen=True)
class Report:
    """The verdict about a candidate, and why."""

    subject: str  # what was checked, such as "rotation"
    expected: str  # a description or a repr
    verdict: str  # one of VERDICTS
    findings: tuple[Finding, ...] = ()  # causes before consequences, at most `MOST`: none unless wrong
    precision: str | None = None  # the grade, where there is one
    tried: str = ""  # what the verdict rests on: how many calls, up to where, and what was not tried
    measured: tuple[tuple[str, str, str], ...] = ()  # name, expected, measured: what an unexplained candidate does
    errors: tuple[ErrorRow, ...] = ()
    notes: tuple[str, ...] = ()  # what the other side must do alike, and what could not be decided
    failure: Failure | None = None  # of a candidate that could not be judged
    target: str = ""  # how the command line names the candidate
    readings: Any = field(default=None, repr=False, compare=False)  # what its page draws

    def __post_init__(self) -> None:
        object.__setattr__(self, "findings", self.findings[:MOST])

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
        return printable(f"{self.subject}: {self.verdict.upper()}" + (f": {why}" if why else ""))

    def __bool__(self) -> NoReturn:
        raise TypeError("a Report is neither true nor false: use report.ok, or the assert_… function")

    def parts(self, sides: Sequence[tuple[str, str, str]] = ()) -> Iterator[Part]:
        """All that it says below its verdict, what matters most first; ``sides``, if given, are what was measured in
        more words."""
        head, tried = [("target", self.target), ("expected", self.expected)], ("tried", self.tried)
        head += [("precision", self.precision or "")]
        if (failure := self.failure) is not None:
            head += [("reason", failure.reason), ("received", failure.received), ("fix", failure.fix)]
        yield Part("", [*head, *[tried] * self.ok], lines=() if failure is None else failure.frames)
        for one in self.findings:
            said = [("fact", one.fact), ("where", one.where), ("cause", one.cause), ("fix", one.fix)]
            yield Part(one.fault, [*said, ("happened", one.happened)])
        if sides or self.measured:
            yield Part("Expected and measured", table=[("", "expected", "measured"), *(sides or self.measured)])
        if self.errors:
            in_ulps = any(row.ulps is not None for row in self.errors)
            rows = [(row.where, number(row.worst), number(row.allowed), number(row.ulps, ".3g")) for row in self.errors]
            table = [("error", "worst", "allowed", "ulps"), *rows]
            yield Part("Errors in numbers", table=[row[: 3 + in_ulps] for row in table])
        if self.notes or (self.tried and not self.ok):
            yield Part("Notes", [*[tried] * (not self.ok), *(("note", note) for note in self.notes)])

    def __str__(self) -> str:
        parts = "\n\n".join(map(_text, self.parts()))
        return printable(f"{self.subject}: {self.verdict.upper()}\n{parts}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with None for NaN and infinity, which JSON does not have."""
        failure = None if self.failure is None else replace(self.failure, error=None)
        plain = {"ok": self.ok, **finite(asdict(replace(self, failure=failure, readings=None)))}
        del plain["readings"]
        if failure is not None:
            del plain["failure"]["error"]
        for finding, row in zip(self.findings, plain["findings"], strict=True):
            row |= {"cause": finding.cause, "fix": finding.fix, "happened": finding.happened}
        return plain

    def to_html(self) -> str:
        """A page of its own, which needs no other file and no network."""
        from . import page

        return page.document(f"pyrope: {self.headline}", page.report_section(self))

    def _repr_html_(self) -> str:
        """The same, as a part of a notebook."""
        from . import page

        return page.fragment(page.report_section(self))


def by_faults(reports: Iterable[Report]) -> dict[tuple[str, ...], list[Report]]:
    """Wrong reports with the same faults together, the most frequent first."""
    groups: dict[tuple[str, ...], list[Report]] = {}
    for report in reports:
        if report.findings:
            groups.setdefault(report.faults, []).append(report)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def summary(reports: Sequence[Report]) -> str:
    """How many cases there are, and how many have each verdict."""
    verdicts = [report.verdict for report in reports]
    numbers = [f"{verdicts.count(name)} {name}" for name in VERDICTS if name in verdicts or name == "right"]
    return f"{len(reports)} case{'s' * (len(reports) != 1)}, {', '.join(numbers)}"


def finite(value: Any) -> Any:
    """Plain values with None for NaN and infinity."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(finite(part) for part in value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ── Text ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def printable(text: str) -> str:
    """Text that may come from a candidate, with escapes for what a terminal would obey and what UTF-8 does not have.

    >>> print(printable("\\x1b[2J\\x00 θ \\ud800"))
    \\x1b[2J\\x00 θ \\ud800
    """
    return _NOT_TEXT.sub(lambda character: character[0].encode("unicode_escape").decode(), text)


def abbreviated(text: str) -> str:
    """Long lists, such as LongRoPE's factors, by their first three numbers and their last.

    >>> abbreviated("LongRoPE((1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9))")
    'LongRoPE((1.0, 1.1, 1.2, …, 1.9: 10 numbers))'
    """
    return _LONG_LIST.sub(lambda m: f"{m[1]}{m[2]}…, {m[4]}: {m[3].count(',') + 4} numbers{m[5]}", text)


def shortened(line: str) -> str:
    """A line of a message; the middle of one that nobody would read to its end is left out."""
    return line if len(line) <= _LINE else f"{line[: _LINE // 2]} … {line[-_LINE // 2 :]}"


def own_frames(frames: Iterable[traceback.FrameSummary]) -> tuple[str, ...]:
    """The lines of the last four frames that are neither pyrope's nor the import system's."""
    own = [frame for frame in frames if not frame.filename.startswith((_PACKAGE, "<frozen importlib"))]
    return tuple("".join(traceback.format_list(own[-4:])).splitlines())


def number(value: float | None, form: str = ".2g") -> str:
    return "—" if value is None else f"{value:{form}}" if math.isfinite(value) else "not finite"


def power_of_two(value: float) -> str:
    """The power of two that a number is nearest to.

    >>> power_of_two(0.26)
    '2⁻²'
    """
    return "2" + str(round(math.log2(value))).translate(_RAISED)


def side_by_side(*values: float, digits: int = 6) -> list[str]:
    """Numbers with so many digits that each can be told from the others, if they differ.

    >>> side_by_side(2 / 3), side_by_side(1.0, 1.0000001)
    (['0.666667'], ['1', '1.0000001'])
    """
    while digits < 17 and len({f"{value:.{digits}g}" for value in values}) < len(set(values)):
        digits += 1
    return [f"{value:.{digits}g}" for value in values]


def fields(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Lines of names, and of what is said of each; what is empty is left out."""
    width = max([10, *(len(name) + 1 for name, _ in rows)])
    # Options and the names of files stay in one line.
    wrap = partial(textwrap.wrap, width=_WIDTH, subsequent_indent=" " * (width + 2), break_on_hyphens=False)
    return [line for name, words in rows for line in wrap(abbreviated(words), initial_indent=f"  {name:<{width}}")]


def _text(part: Part) -> str:
    """A part as text. Tables and notes have no title: they say what they are."""
    lines = textwrap.wrap(part.title, _WIDTH, subsequent_indent="  ") if part.rows and part.title != "Notes" else []
    lines += fields(part.rows)
    for row in part.table:
        cells = zip(row, part.table[0], zip(*part.table, strict=True), strict=True)
        sized = (f"{cell:{'>' if head in NUMBERS else '<'}{max(map(len, column))}}" for cell, head, column in cells)
        lines.append(f"  {'  '.join(sized)}".rstrip())
    return "\n".join([*lines, *([""] if part.lines else []), *(f"  {line}" for line in part.lines)])


class _Carrier(AssertionError):
    def __init__(self, report: Report) -> None:
        # A test runner shows the first line alone in its summary: the headline.
        super().__init__("\n".join([report.headline, *str(report).splitlines()[1:]]))
        self.report = report


class Mismatch(_Carrier):
    """What the ``assert_…`` functions raise about a wrong candidate; its message is the report."""


class NotJudged(_Carrier):
    """What the ``assert_…`` functions raise about a candidate that raised, or returned nothing that can be judged."""
