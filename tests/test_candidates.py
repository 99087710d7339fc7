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
STATED = {  # what else a report says: what was measured, where, and beside which expectation
    "rotation: four mistakes": "position 0 is turned as if it were at +1 cause",
    "rotation: base, and a scaled head": "fact the frequencies are those of base 50000, those of base 10000 expected",
    "rotation: all negated": "0 of 64 outputs come out in another place, 64 with the other sign",
    "rotation: gaps filled": "exactly where order: rising with gaps and row ≥ 1 (0 is right); x (2, 4, 64)",
    "rotation: a prompt from 0": "rows are turned as at p + 1 where exactly where order: counted from 0; x",
    "rotation: a prompt from elsewhere": "exactly where order: counted from another position; x (1, 2, 3, 64)",
    "rotation: the last row": "x comes back as it was where exactly where rows after it = 0; x (2, 4, 64)",
    "rotation: rows of a batch": "not tried: negative positions error",
    "rotation: factor squared": "the length of every pair is multiplied by 1.5625, where 1.25 is expected",
    "softmax: top left, noted": "note with fewer queries than keys the causal mask begins at the top left",
    "rotation: no rows": "note 2 of 534 calls are not taken, those where rows = 0: it returns shape (2, 0, 2)",
    "rotation: two sequences in a row": "exactly where a position twice and positions fall; x (2, 8, 64)",
    "rotation: axis 1 one too high": "rows are turned as at p + 1, on axis 1",
    "rotation: from the 51st call on": "the same call of shape (2, 4, 64), made again, has 507 other outputs",
    "rotation: heads in fours": "exactly where the head is after one or more full blocks of 4; x (5, 5, 64)",
    "rotation: YaRN betas swapped": "pairs 23 to 31 kept, pairs 0 to 10 divided by 8, where it should be pairs 0 to 10 kept",
    "rotation: w reversed": "pairs 0, 1, 2, 3, 4, 5, … turn as pairs 31, 30, 29, 28, 27, 26, … should",
    "rotation: rest zeroed": "features 32 to 63 should stay, and come back times 0",
    "rotation: factor by feature": "multiplied by 1 to 1.3 in features 0 to 63, by 1.15 in most others",
    "rotation: twice from 2048 on": "rows are turned as at p times 2 where exactly where position ≥ 2048 (2047 is right)",
    "rotation: consecutive if the ends fit": "where exactly where the last position is the first + rows − 1; x",
    "rotation: text if it begins alike": "turned as at the position on the first axis, on axis 1 where exactly where",
    "rotation: three axes interleaved to the end": "the axes that turn pair 7 are 1, where 0 is expected",
    "rotation: x scaled to float16": "the numbers of x are rounded to float16, scaled by the largest number of each arra",
    "rotation: x scaled to float8": "rounded to float8 (e4m3), scaled by the largest number of each vector",
    "rotation: wild, sglang: rows not rescaled": "rows are turned as at p times 4 where exactly where position ≥ 16384",
    "rotation: in reverse": "precision rounded once tried 534 calls",
    "rotation: LongRoPE, >=": "off by up to 6.8 where numbers are up to 3.57, in features 1, 2, 3, 4, 5, 6, … where",
    "softmax: values clipped": "1 comes out as 1, 2.6122 comes out as 1 where wrong in 59 of 60 calls; row 1",
    "softmax: values as sines": "0.093756 comes out as 0.093619, 1 comes out as 0.84147",
    "softmax: negative values lost": "2.6122 comes out as 2.6122, -2.3815 comes out as 0 where wrong in 60 of 60 calls",
    "softmax: dropout, seeded": "10.7% of the weights are zeros, and all others the right ones times 1.111",
    "softmax: from the tenth call on": "first answers are wrong exactly where earlier calls ≥ 9 (8 is right)",
    "softmax: turned by row 0, from each row's first": "13 of 201 calls, exactly where rows with unlike steps; in",
    "softmax: zeros in the last block": "wrong in 188 of 219 calls, where keys is no multiple of 16; row 2",
    "linear: squares": "over φ of the last, is 1, 0.4444, 0.1111, 0.02778, 0.02778, 0.1111, 0.4444, 1, expected 0.01245",
    "linear: numerator without itself": "query 0 of row 0, head 0, sees keys none, expected 0: missing 0; 520 queries",
}
# Every third candidate in a plain run, all of them where CI is set: a check takes about half a second.
STEP = 1 if os.environ.get("CI") else 3


def test_the_table_has_every_candidate():
    assert FROZEN.keys() == CASES.keys()
    assert {name for name, case in CASES.items() if FROZEN[name][0] != case.verdict} == NOT_SEEN.keys()


@pytest.mark.parametrize("name", dict.fromkeys([*STATED, *list(CASES)[::STEP]]))
def test_a_candidate_is_judged_as_it_was(name):
    report = judge(CASES[name])
    assert [report.verdict, *report.faults] == FROZEN[name], str(report)
    assert STATED.get(name, "") in " ".join(str(report).split()), str(report)


@pytest.mark.needs("ml_dtypes")
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.group == "right" and "dtype" not in case.options][::5]
)
def test_no_right_candidate_is_accused_in_another_dtype(name, dtype):
    report = judge(CASES[name], dtype=dtype, effort="few")
    # What refuses other shapes is not asked for them by few calls.
    assert report.verdict in ("right", CASES[name].verdict), str(report)


@pytest.mark.parametrize("name", list(CASES)[::61])
def test_the_same_candidate_gets_the_same_report(name):
    assert str(judge(CASES[name])) == str(judge(CASES[name]))
