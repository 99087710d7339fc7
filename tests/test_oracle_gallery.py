"""The well-known forms are right, the famous mistakes are named."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from oracle_cases import DTYPES

from pyrope import Rope, check_rotation
from pyrope.oracle import gallery
from pyrope.oracle.gallery import exhibits, run_gallery
from pyrope.oracle.rotation_faults import FAULTS

GOOD = [exhibit for exhibit in exhibits() if exhibit.verdict == "right"]


def test_the_gallery_is_as_expected():
    rows = list(run_gallery())
    assert [row.name for row in rows if not row.as_expected] == []
    assert sum(row.report.verdict == "wrong" for row in rows) >= 12 and sum(row.report.ok for row in rows) >= 8


def test_the_names_of_0_1_0_lead_to_the_same_things():
    assert gallery.Piece is gallery.Exhibit and gallery.pieces is gallery.exhibits


def test_every_broken_exhibit_has_a_fault_of_the_list():
    assert all(
        set(exhibit.faults) <= set(FAULTS) and bool(exhibit.faults) == (exhibit.verdict == "wrong")
        for exhibit in exhibits()
    )


@pytest.mark.parametrize("exhibit", GOOD, ids=[exhibit.name for exhibit in GOOD])
@pytest.mark.parametrize("dtype", DTYPES)
def test_good_exhibits_are_right_in_every_dtype(exhibit, dtype):
    assert check_rotation(exhibit.fn, exhibit.rope, dtype=DTYPES[dtype]).verdict == "right"


def test_good_exhibits_are_identified_and_one_that_is_not_is_reported(monkeypatch):
    rows = {row.name: row for row in run_gallery()}
    assert all(rows[exhibit.name].identified == replace(exhibit.rope, axes=None) for exhibit in GOOD)
    other = SimpleNamespace(rope=Rope(64, 10000.0, "interleaved"))
    monkeypatch.setattr("pyrope.oracle.gallery.identify", lambda *_, **__: other)
    monkeypatch.setattr("pyrope.oracle.gallery.exhibits", lambda: GOOD[:1])
    assert [row.as_expected for row in run_gallery()] == [False]


def test_an_exhibit_that_is_not_as_expected_is_reported(monkeypatch):
    broken = exhibits()[0]._replace(faults=("wrong base",), verdict="wrong")
    monkeypatch.setattr("pyrope.oracle.gallery.exhibits", lambda: [broken])
    assert [row.as_expected for row in run_gallery()] == [False]
