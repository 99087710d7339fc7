"""The gallery: what it expects of itself. That the well-known forms are right, and the famous mistakes named, test_cli sees."""

import pytest
from optional import package

from pyrope import Rope
from pyrope.oracle import gallery
from pyrope.oracle.gallery import exhibits, run_gallery
from pyrope.oracle.mistakes import MISTAKES
from pyrope.oracle.rotation import check_rotation

GOOD = [exhibit for exhibit in exhibits() if exhibit.verdict == "right"]


def test_what_there_is():
    wrong = [exhibit for exhibit in exhibits() if exhibit.verdict == "wrong"]
    assert len(GOOD) >= 9 and len(wrong) >= 15
    assert all(fault.partition(":")[0] in MISTAKES and fault != "unexplained" for one in wrong for fault in one.faults)


@pytest.mark.parametrize("k", range(len(GOOD)), ids=[exhibit.name for exhibit in GOOD])
def test_good_exhibits_are_right_in_other_dtypes(k):
    dtype = ("float16", "bfloat16", "float64")[k % 3]
    assert dtype != "bfloat16" or package("ml_dtypes").bfloat16  # without which it is skipped
    assert check_rotation(GOOD[k].fn, GOOD[k].rope, dtype=dtype).verdict == "right"


@pytest.mark.parametrize(
    "change", [{"faults": ("wrong base",), "verdict": "wrong"}, {"rope": Rope(64, 10000.0, "half")}]
)
def test_what_is_not_as_expected_is_reported(monkeypatch, change):
    monkeypatch.setattr(gallery, "exhibits", lambda: [exhibits()[0]._replace(**change)])
    (row,) = run_gallery()
    assert not row.as_expected and row.remark.startswith("UNEXPECTED")
