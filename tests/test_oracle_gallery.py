"""The well-known forms are right, the famous mistakes are named."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from oracle_cases import DTYPES

from pyrope import Rope, check_rotation
from pyrope.oracle.faults import FAULTS
from pyrope.oracle.gallery import pieces, run_gallery

GOOD = [piece for piece in pieces() if piece.verdict == "right"]


def test_the_gallery_is_as_expected():
    rows = list(run_gallery())
    assert [row.name for row in rows if not row.as_expected] == []
    assert sum(row.report.verdict == "wrong" for row in rows) >= 12 and sum(row.report.ok for row in rows) >= 8


def test_every_broken_piece_has_a_fault_of_the_list():
    assert all(
        set(piece.faults) <= set(FAULTS) and bool(piece.faults) == (piece.verdict == "wrong") for piece in pieces()
    )


@pytest.mark.parametrize("piece", GOOD, ids=[piece.name for piece in GOOD])
@pytest.mark.parametrize("dtype", DTYPES)
def test_good_pieces_are_right_in_every_dtype(piece, dtype):
    assert check_rotation(piece.fn, piece.rope, dtype=DTYPES[dtype]).verdict == "right"


def test_good_pieces_are_identified_and_one_that_is_not_is_told(monkeypatch):
    rows = {row.name: row for row in run_gallery()}
    assert all(rows[piece.name].identified == replace(piece.rope, axes=None) for piece in GOOD)
    other = SimpleNamespace(rope=Rope(64, 10000.0, "interleaved"))
    monkeypatch.setattr("pyrope.oracle.gallery.identify", lambda *_, **__: other)
    monkeypatch.setattr("pyrope.oracle.gallery.pieces", lambda: GOOD[:1])
    assert [row.as_expected for row in run_gallery()] == [False]


def test_a_piece_that_is_not_as_expected_is_told(monkeypatch):
    broken = pieces()[0]._replace(faults=("wrong base",), verdict="wrong")
    monkeypatch.setattr("pyrope.oracle.gallery.pieces", lambda: [broken])
    assert [row.as_expected for row in run_gallery()] == [False]
