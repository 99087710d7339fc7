"""Every candidate of tests/candidates keeps its verdict and its names, and no right one is accused."""

import os

import candidates
import pytest
from candidates import CASES, judge

FROZEN = candidates.frozen()
NOT_SEEN = {  # wrong, but judged right, and why
    "rotation: base nearly right": "it is within what ggml's running product, which is accepted, may be off by",
    "rotation: running product": "it is ggml's way to make frequencies, which is accepted",
    "linear: state in bfloat16": 'it shows from about 4,096 tokens on, which effort="thorough" has',
    "softmax-backward: least exponent of 20": "weights change by 2e-9, which is below what float32 rounds",
}
# Every third candidate in a plain run, all of them where CI is set: a check takes about half a second.
STEP = 1 if os.environ.get("CI") else 3


def test_the_table_has_every_candidate():
    assert FROZEN.keys() == CASES.keys()
    assert {name for name, case in CASES.items() if FROZEN[name][0] != case.verdict} == NOT_SEEN.keys()


@pytest.mark.parametrize("name", list(CASES)[::STEP])
def test_a_candidate_is_judged_as_it_was(name):
    report = judge(CASES[name])
    assert [report.verdict, *report.faults] == FROZEN[name], str(report)


@pytest.mark.needs("ml_dtypes")
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.group == "right" and "dtype" not in case.options][::5]
)
def test_no_right_candidate_is_accused_in_another_dtype(name, dtype):
    report = judge(CASES[name], dtype=dtype, effort="few")
    assert report.verdict == CASES[name].verdict, str(report)


@pytest.mark.parametrize("name", list(CASES)[::61])
def test_the_same_candidate_gets_the_same_report(name):
    assert str(judge(CASES[name])) == str(judge(CASES[name]))
