"""The one search for mistakes: what is tried, in which order, and what is said of those that cannot be told apart."""

import pytest

from pyrope.oracle.explain import Change, Fault, Hypothesis, findings, search

A, B, C = (Fault(name, "symptom", f"cause of {name}", f"fix of {name}", "a project") for name in "ABC")
FREE = Fault("free", "symptom", "cause", "fix", generic=True)


class Given:
    """Predictions are the sum of the numbers that the fields are set to; what was returned is a number."""

    def __init__(self, returned, blind=()):
        self.returned, self.blind, self.tried = returned, blind, []

    def fitting(self, hypotheses):
        asked = list(hypotheses)
        self.tried.append(["+".join(fault.name for fault in h.faults) for h in asked])
        return [h for h in asked if sum(h.fields.values()) == self.returned]

    def matters(self, change):
        return change.note not in self.blind


KNOWN = [
    (A, Change("a", {"x": 1})),
    (A, Change("other a", {"y": 2})),
    (B, Change("b", {"y": 4})),
    (C, Change("c", {"x": 8})),
]


@pytest.mark.parametrize(
    "returned, names, rounds",
    [
        (4, ["B"], 1),
        (16, ["free"], 2),
        (5, ["A+B"], 3),  # a and b
        (12, ["B+C"], 3),
        (10, ["A+C"], 3),  # other a and c
        (9, [], 3),  # a and c change the same field
        (3, [], 3),  # a and other a are one mistake
        (20, ["B+free"], 3),
        (99, [], 3),
    ],
)
def test_single_mistakes_come_before_measured_ones_and_these_before_two(returned, names, rounds):
    given, measured = Given(returned), []

    def measure():
        measured.append(True)
        return [(FREE, Change("free", {"z": 16}))]

    got = search(given, KNOWN, measure)
    assert ["+".join(fault.name for fault in h.faults) for h in got] == names
    assert len(given.tried) == rounds and len(measured) == (rounds > 1)
    assert given.tried[0] == ["A", "A", "B", "C"]
    if rounds == 3:
        assert given.tried[1:] == [["free"], ["A+B", "A+free", "A+C", "A+free", "B+C", "B+free", "C+free"]]


def test_two_mistakes_are_tried_only_if_both_show():
    given = Given(12, blind=("c",))
    assert search(given, KNOWN) == [] and given.tried == [["A", "A", "B", "C"], [], ["A+B"]]


def test_a_later_change_of_two_is_added_to_the_first():
    both = Hypothesis((A, B), (Change("a", {"x": 1}), Change("b", {"y": 2})))
    assert both.fields == {"x": 1, "y": 2}


def single(fault):
    return Hypothesis((fault,), (Change(fault.name, {}),))


def double(*faults):
    return Hypothesis(faults, tuple(Change(fault.name, {}) for fault in faults))


def said(matches, since=7):
    return findings(matches, lambda h, k: f"{h.changes[k].note}, {k}", since)


def test_the_best_match_is_what_is_said_and_the_others_are_named():
    assert said([]) == []
    (finding,) = said([single(B), single(A), single(FREE), single(B)])
    assert (finding.fault, finding.evidence, finding.since) == ("B", "B, 0", 7)
    assert (finding.cause, finding.fix, finding.happened) == ("cause of B", "fix of B", "a project")
    assert finding.alternatives == ("A", "free")


def test_of_two_each_has_what_could_stand_beside_the_other():
    first, second = said([double(A, B), double(A, C), double(FREE, B), double(C, FREE)])
    assert (first.fault, first.evidence, second.fault, second.evidence) == ("A", "A, 0", "B", "B, 1")
    assert first.alternatives == ()  # beside B there is one with a free number, which fits too much
    assert second.alternatives == ("C",)
    assert [finding.alternatives for finding in said([double(A, B), double(B, C)])] == [("C",), ()]


def test_a_mistake_that_is_none_of_a_procedure_has_no_changes():
    assert list(A.changes("anything", None)) == [] and A.make is None
