"""Every candidate of tests/candidates keeps its verdict and its names, and no right one is accused."""

import candidates
import pytest
from candidates import CASES, judge

FROZEN = candidates.frozen()


def test_the_table_has_every_candidate():
    assert FROZEN.keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_a_candidate_is_judged_as_it_deserves(name):
    report = judge(CASES[name])
    assert report.verdict == CASES[name].verdict, str(report)
    assert [report.verdict, *report.faults] == FROZEN[name], str(report)


@pytest.mark.needs("ml_dtypes")
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "dtype" not in case.options][::11])
def test_verdicts_hold_in_other_dtypes(name, dtype):
    verdict = judge(CASES[name], dtype=dtype).verdict
    assert verdict == CASES[name].verdict or CASES[name].group != "right"


@pytest.mark.parametrize("name", list(CASES)[::37])
def test_the_same_candidate_gets_the_same_report(name):
    assert str(judge(CASES[name])) == str(judge(CASES[name]))
