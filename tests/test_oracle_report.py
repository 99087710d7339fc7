"""Reports as values, as text and as plain values for JSON."""

import json
import math
import traceback

import pytest

from pyrope.oracle import report as module
from pyrope.oracle.report import (
    ErrorRow,
    Failure,
    Finding,
    Mismatch,
    NotJudged,
    Report,
    by_faults,
    finite,
    own_frames,
    shortened,
)

ONE, TWO = Finding("one", "seen", "why", "mend it"), Finding("two", "seen, too", "why", "mend", 7, ("three", "four"))


def test_a_verdict_and_its_reasons():
    for fields in ({"verdict": "odd"}, {"verdict": "wrong"}, {"verdict": "right", "findings": (ONE,)}, {"verdict": "not judged"}, {"verdict": "right", "failure": Failure("", "", "")}):  # fmt: skip
        with pytest.raises(ValueError):
            Report("rotation", "", **fields)
    assert Report("rotation", "", "right").ok and Report("rotation", "", "equivalent").ok
    assert not Report("rotation", "", "wrong", (ONE,)).ok
    with pytest.raises(TypeError, match="neither true nor false"):
        bool(Report("rotation", "", "right"))


def test_the_headline():
    assert Report("rotation", "", "right").headline == "rotation: RIGHT"
    assert Report("rotation", "", "wrong", (ONE,)).headline == "rotation: WRONG: one"
    assert Report("rotation", "", "wrong", (ONE, TWO, TWO)).headline == "rotation: WRONG: one and 2 more"
    assert (
        Report("rotation", "", "not judged", failure=Failure("it fails\nhere", "", "")).headline
        == "rotation: NOT JUDGED: it fails"
    )


def test_what_is_raised():
    Report("rotation", "", "right").raise_unless_ok()
    with pytest.raises(Mismatch, match="^rotation: WRONG: one\n  expected") as caught:
        Report("rotation", "x", "wrong", (ONE,)).raise_unless_ok()
    assert caught.value.report.faults == ("one",)
    error = KeyError("k")
    with pytest.raises(NotJudged) as caught:
        Report("rotation", "", "not judged", failure=Failure("it raises", "", "", error)).raise_unless_ok()
    assert caught.value.__cause__ is error and caught.value.report.failure.reason == "it raises"


def test_a_report_as_text():
    rows = (ErrorRow("near", 1.5, 0.25), ErrorRow("far", 1234.5, 12))
    report = Report("rotation", "a rope", "wrong", (ONE, TWO), "a grade", rows, ("a note",))
    assert str(report).splitlines() == [
        "rotation: WRONG", "  expected  a rope", "  precision a grade",
        "", "one", "  evidence  seen", "  cause     why", "  fix       mend it",
        "", "two", "  evidence  seen, too", "  cause     why", "  fix       mend", "  shows     from position 7 on",
        "  or        three; four (cannot be told apart here)",
        "", f"  {'error, in ulps':<36}{'worst':>12}{'typical':>12}", f"  {'near':<36}{'1.5':>12}{'0.25':>12}",
        f"  {'far':<36}{'1.23e+03':>12}{'12':>12}", "", "note: a note",
    ]  # fmt: skip
    sized = (ErrorRow("near", 1.5, 0.25, 3e-7),)
    head, row = str(Report("attention", "x", "right", errors=sized)).splitlines()[-2:]
    assert head == f"  {'error':<34}{'worst':>12}{'in ulps':>12}{'typical, ulps':>16}"
    assert row == f"  {'near':<34}{'3e-07':>12}{'1.5':>12}{'0.25':>16}"
    failed = Report("attention", "x", "not judged", failure=Failure("it fails", "arrays", "", frames=("a frame",)))
    assert str(failed).splitlines()[2:] == ["  reason    it fails", "  received  arrays", "", "  a frame"]
    wide = str(Report("attention", "word " * 40, "right", notes=("word " * 40,))).splitlines()
    assert max(map(len, wide)) <= 79 and wide[2].startswith(" " * 12 + "word") and wide[-1].startswith("  word")


def test_a_report_as_plain_values():
    report = Report("rotation", "", "wrong", (ONE,), errors=(ErrorRow("x", math.inf, math.nan),))
    plain = report.to_dict()
    assert plain["ok"] is False and plain["errors"][0] == {
        "where": "x",
        "worst": None,
        "typical": None,
        "absolute": None,
    }
    assert "readings" not in plain and json.loads(json.dumps(plain))["findings"][0]["fault"] == "one"
    failed = Report("rotation", "", "not judged", failure=Failure("r", "", "", ValueError("v"))).to_dict()
    assert "error" not in failed["failure"] and failed["failure"]["frames"] == ("ValueError: v",)
    assert finite({"a": [1.0, math.inf, (math.nan, "b", 3)]}) == {"a": [1.0, None, (None, "b", 3)]}


def test_a_report_as_a_page():
    report = Report("rotation", "", "wrong", (ONE,))
    assert "<title>pyrope: rotation: WRONG: one</title>" in report.to_html() and "mend it" in report.to_html()
    assert "mend it" in report._repr_html_() and "<title>" not in report._repr_html_()


def test_what_a_candidate_raises_does_not_reach_the_terminal_raw():
    """It would clear the screen, and a page with a lone surrogate could not be written."""
    raw = "\x1b[2J\x00\r\x9b\u202e\ud800"
    shown = r"\x1b[2J\x00\r\x9b\u202e\ud800"
    failure = Failure(f"it raises {raw}", f"x {raw}", "", ValueError(raw.replace("\r", "")))
    report = Report("rotation", f"a {raw}", "not judged", failure=failure, notes=(f"see {raw}",))
    for text in (report.headline, str(report), report.to_html(), report._repr_html_(), "\n".join(failure.frames)):
        assert not set(raw) - set("[2J") & set(text) and r"\x1b[2J\x00" in text and text.encode()
    assert shown in report.headline
    assert all(line.isprintable() for line in str(NotJudged(report)).splitlines())


def test_reports_by_their_faults():
    a, b, c = (Report("x", "", "wrong", findings) for findings in ((ONE,), (TWO,), (TWO,)))
    assert [*by_faults([a, b, Report("x", "", "right"), c]).items()] == [(("two",), [b, c]), (("one",), [a])]


def test_long_lines_and_many_of_them():
    assert shortened("x" * 400) == "x" * 400 and shortened("a" * 250 + "b" * 250) == f"{'a' * 200} … {'b' * 200}"
    lines = Failure("", "", "", ValueError("\n".join(map(str, range(60))))).frames
    assert len(lines) == 41 and lines[20] == "…" and lines[19] == "19" and lines[21] == "40" and lines[-1] == "59"
    assert len(Failure("", "", "", ValueError("\n".join(map(str, range(40))))).frames) == 40


def test_frames_of_the_candidate():
    frames = [traceback.FrameSummary(f"/there/{i}.py", i, "f", line="x") for i in range(1, 7)]
    ours = traceback.FrameSummary(module.__file__, 1, "f", line="x")
    frozen = traceback.FrameSummary("<frozen importlib._bootstrap>", 1, "f", line="x")
    shown = own_frames([*frames, ours, frozen])
    assert [line for line in shown if "File" in line] == [
        f'  File "/there/{i}.py", line {i}, in f' for i in (3, 4, 5, 6)
    ]
    assert own_frames([ours, frozen]) == ()
