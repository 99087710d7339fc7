"""What a known mistake is, and the one search for the mistakes that explain what a candidate returned.

A mistake is a change of some fields of a procedure: of a `Recipe` for a rotation, of `Steps` for attention, of
`LinearSteps` for linear attention. A procedure predicts every output, so that a change either explains what came back
or does not. Single mistakes are tried first, then those with a number that has to be measured, then two at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple, Protocol, TypeAlias

from .report import Finding


class Change(NamedTuple):
    """One way to make a mistake: new values for some fields of a procedure."""

    note: str  # its numbers in words, such as "base 10000 instead of 500000"
    fields: Mapping[str, Any]


def unmade(meant: Any, measurements: Any = None) -> Iterable[Change]:
    """The changes of a mistake that is not one of a procedure, but shows in how a candidate behaves."""
    return ()


@dataclass(frozen=True)
class Fault:
    """One known mistake."""

    name: str
    symptom: str
    cause: str
    fix: str
    happened: str = "—"  # in which projects it happened
    step: str = ""  # of attention: the step in which it is made
    changes: Callable[..., Iterable[Change]] = unmade  # (what is meant, measurements or None) -> the ways to make it
    make: Callable[..., Any] | None = (
        None  # (what is meant, …) -> a candidate with this mistake; None: it has no effect
    )
    generic: bool = False  # fits so much that a mistake without a free number is named before it
    right_in: tuple[str, ...] = ()  # dtypes of x in which it is no mistake

    def finding(self, evidence: str, since: int | None = None, alternatives: tuple[str, ...] = ()) -> Finding:
        """This mistake, as what a report says."""
        return Finding(self.name, evidence, self.cause, self.fix, since, alternatives, self.happened)


Suspect: TypeAlias = tuple[Fault, Change]


class Hypothesis(NamedTuple):
    """One mistake, or two at once."""

    faults: tuple[Fault, ...]
    changes: tuple[Change, ...]

    @property
    def fields(self) -> dict[str, Any]:
        return {name: value for change in self.changes for name, value in change.fields.items()}


class Evidence(Protocol):
    """What a candidate returned, and how predictions are held against it."""

    def fitting(self, hypotheses: Iterable[Hypothesis]) -> list[Hypothesis]:
        """Those that predict what the candidate returned, the best one first."""

    def matters(self, change: Change) -> bool:
        """Whether a change shows in what was asked; two mistakes at once are tried only if both do."""


def search(
    evidence: Evidence, known: Sequence[Suspect], measured: Callable[[], Iterable[Suspect]] = tuple
) -> list[Hypothesis]:
    """The hypotheses that explain the evidence, the best one first: single mistakes if any does, else those with a
    number that is measured only now, else two at a time."""
    if matches := evidence.fitting(_singles(known)):
        return matches
    more = list(measured())
    return evidence.fitting(_singles(more)) or evidence.fitting(
        _doubles([(fault, change) for fault, change in [*known, *more] if evidence.matters(change)])
    )


def _singles(named: Iterable[Suspect]) -> Iterator[Hypothesis]:
    return (Hypothesis((fault,), (change,)) for fault, change in named)


def _doubles(named: Sequence[Suspect]) -> Iterator[Hypothesis]:
    """Two different mistakes that change different fields."""
    for (one, a), (two, b) in combinations(named, 2):
        if one is not two and not a.fields.keys() & b.fields.keys():
            yield Hypothesis((one, two), (a, b))


def findings(
    matches: Sequence[Hypothesis], evidence_of: Callable[[Hypothesis, int], str], since: int | None
) -> list[Finding]:
    """The best of the matches as findings, one for each of its mistakes; the others as what cannot be told apart."""
    if not matches:
        return []
    best = matches[0]
    return [
        fault.finding(evidence_of(best, k), since, _instead(best, matches, k)) for k, fault in enumerate(best.faults)
    ]


def _instead(best: Hypothesis, matches: Sequence[Hypothesis], k: int) -> tuple[str, ...]:
    """The mistakes that could stand in the place of the k-th one of the best match; in a pair, beside its other one,
    and only those without a free number."""
    own, kept = best.faults[k], {fault.name for fault in best.faults} - {best.faults[k].name}
    others = (f for h in matches for f in h.faults if kept <= {fault.name for fault in h.faults})
    names = dict.fromkeys(fault.name for fault in others if not (kept and fault.generic))
    return tuple(name for name in names if name != own.name and name not in kept)
