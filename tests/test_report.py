"""What a report and its errors say, the table of mistakes, and the one way to call a black box."""

import itertools
import json
import os
import pickle

import candidates
import numpy as np
import pytest
from hypothesis import given, strategies as st

from pyrope.oracle.candidate import Candidate, Unreadable
from pyrope.oracle.mistakes import FIXES, MISTAKES, mistake
from pyrope.oracle.report import ErrorRow, Failure, Finding, Mismatch, NotJudged, Report, by_faults, printable

FAULTS = (
    sorted({name for _, *names in candidates.frozen().values() for name in names}) if candidates.TABLE.exists() else []
)


# ── Reports ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def wrong(*faults, **fields):
    return Report(
        "rotation", "Rope(…)", "wrong", tuple(Finding(name, "a fact", "a place") for name in faults), **fields
    )


@given(
    words=st.text(max_size=300) | st.just("x" * 300),
    number=st.floats(),
    fault=st.sampled_from([*MISTAKES, "window: one too wide", "no such name"]),
)
def test_a_report_is_narrow_printable_and_json_whatever_it_says(words, number, fault):
    finding, row = Finding(fault, words, words), ErrorRow("positions 1 to 9", number, number, number)
    report = Report("rotation", words, "wrong", (finding,), tried=words, errors=(row,), notes=(words,))
    text = str(report)
    assert all(len(line) <= 80 for line in text.splitlines()) and printable(text) == text and text.encode("utf-8")
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert plain["verdict"] == "wrong" and plain["ok"] is False
    assert {"fault", "fact", "cause", "fix", "happened"} <= plain["findings"][0].keys()


@pytest.mark.parametrize("fault", [*MISTAKES, *FAULTS])
def test_every_mistake_has_a_cause_and_a_fix_and_fits_into_its_lines(fault):
    assert mistake(fault).cause and mistake(fault).fix
    assert fault in MISTAKES or fault.partition(":")[0] in MISTAKES
    text = str(wrong(fault))
    assert all(len(line) <= 80 for line in text.splitlines())
    order = [text.index(f"\n  {name}") for name in ("fact", "where", "cause", "fix")]
    assert order == sorted(order)


def test_what_a_report_looks_like():
    rows = (ErrorRow("position 0", 1e-9, 2e-7, 0.25), ErrorRow("positions 1 to 9", float("inf"), 2e-7))
    listed = f"LongRoPE({tuple(float(i) for i in range(64))})"
    text = str(Report("rotation", listed, "right", errors=rows, measured=(("base", "1", "2"),), notes=("a note", "x")))
    assert (
        text
        == """\
rotation: RIGHT
  expected  LongRoPE((0.0, 1.0, 2.0, …, 63.0: 64 numbers))

        expected  measured
  base  1         2

  error                  worst  allowed  ulps
  position 0             1e-09    2e-07  0.25
  positions 1 to 9  not finite    2e-07     —

  note      a note
  note      x"""
    )


def test_fixes_of_what_cannot_be_judged_end_with_one_that_fits_all():
    assert all(rows[-1][0] == "" and all(fix for _, fix in rows) for rows in FIXES.values())


def test_a_report_is_a_value_no_bool_and_has_three_findings_at_most():
    report = wrong("direction", "window", "scale", "unexplained")
    assert report.faults == ("direction", "window", "scale")
    assert report.headline == "rotation: WRONG: direction and 2 more"
    assert wrong("scale", "window").headline == "rotation: WRONG: scale and 1 more"
    with pytest.raises(TypeError, match=r"neither true nor false: use report\.ok"):
        bool(report)
    assert pickle.loads(pickle.dumps(report)) == report != wrong("window")
    groups = by_faults([report, wrong("window"), wrong("window"), Report("rotation", "", "right")])
    assert [(faults, len(some)) for faults, some in groups.items()] == [(("window",), 2), (report.faults, 1)]


def test_what_an_assertion_raises_carries_the_report():
    with pytest.raises(Mismatch, match="^rotation: WRONG: scale\n") as raised:
        wrong("scale").raise_unless_ok()
    assert raised.value.report.faults == ("scale",)
    error = ZeroDivisionError("1/0 \x1b[2J")
    report = Report("rotation", "", "not judged", failure=Failure("it raises", "x (2, 3)", "fix it", error))
    with pytest.raises(NotJudged, match="it raises") as raised:
        report.raise_unless_ok()
    assert raised.value.__cause__ is error and "\\x1b[2J" in str(report) and "\x1b" not in str(report)
    assert "error" not in report.to_dict()["failure"]
    assert Report("rotation", "", "equivalent").raise_unless_ok() is None


# ── Candidates ───────────────────────────────────────────────────────────────────────────────────────────────────────

X = np.arange(6, dtype=np.float32).reshape(2, 3)
AT = np.arange(2)


def ask(fn, times=1, **options):
    candidate, x = Candidate(fn, **options), X.copy()
    for _ in range(times):
        out = candidate({"x": x, "positions": AT.copy()}, like=["x"])[0]
        np.testing.assert_array_equal(x, X)  # restored, if it was changed
    candidate.look_again()
    return out, candidate.behaviour


class Lying(np.ndarray):
    """A subclass whose arithmetic lies."""

    def astype(self, *args, **kwargs):
        return np.zeros(self.shape)


def in_place(x, positions):
    x *= 2
    return x


BUFFER, COUNT = np.zeros_like(X), itertools.count()


def reused(x, positions):
    BUFFER[...] = x + next(COUNT)
    return BUFFER


@pytest.mark.parametrize(("fn", "expected", "behaviour"), [
    (lambda x, positions: x, X, {}),
    (lambda x, positions: x.view(Lying), X, {}),
    (in_place, 2 * X, {"mutates its input": "5 of 6 elements of x are changed after the call"}),
    (reused, X + 1, {"result overwritten by the next call":
                     "1 of 2 results change during later calls, the first for x (2, 3) float32; positions (2,) int64"}),
    (lambda x, positions: x.astype(np.float64) + 0.1, X.astype(np.float64) + 0.1,
     {"wrong dtype out": "the input is float32, the result float64"}),
])  # fmt: skip
def test_what_is_watched_in_every_call(fn, expected, behaviour):
    out, seen = ask(fn, times=2)
    np.testing.assert_array_equal(out, expected)
    assert out.dtype == np.float64 and not np.shares_memory(out, X) and seen == behaviour


@pytest.mark.parametrize(("fn", "words", "kind"), [
    (lambda x, positions: None, "returns nothing", "type"),
    (lambda x, positions: [1.0], "returns list, which is no NumPy array", "type"),
    (lambda x, positions: np.ma.masked_array(x, mask=x > 2), "returns MaskedArray", "type"),
    (lambda x, positions: x[:1], r"returns shape \(1, 3\)", "shape"),
    (lambda x, positions: x.astype(int), "returns int64", "dtype"),
    (lambda x, positions: x.astype(complex), "returns complex128", "dtype"),
    (lambda x: x, r"raises TypeError .*for x \(2, 3\) float32; positions \(2,\) int64", "raised"),
    (lambda x, positions: x.resize((3, 2), refcheck=False), "changes the shape or dtype of x", "reshaped"),
    (lambda x, positions: exec("raise SystemExit(3)"), "raises SystemExit", "raised"),
])  # fmt: skip
def test_what_is_no_result_is_refused_with_its_reason(fn, words, kind):
    with pytest.raises(Unreadable, match=words) as raised:
        ask(fn)
    assert raised.value.kind == kind and raised.value.failure().fix


def test_none_may_be_zeros_and_several_results_are_counted():
    assert not ask(lambda x, positions: None, none_is_zero=True)[0].any()
    pair = Candidate(lambda q, k: (2 * q, None), none_is_zero=True)({"q": X, "k": X}, like=["q", "k"])
    np.testing.assert_array_equal(pair, [2 * X, 0 * X])
    with pytest.raises(Unreadable, match="returns ndarray, not 2 arrays"):
        Candidate(lambda q, k: q)({"q": X, "k": X}, like=["q", "k"])


class Silent(Exception):
    def __str__(self):
        raise RuntimeError


def test_an_error_that_cannot_be_printed_is_still_told():
    def fails(x, positions):
        raise Silent

    with pytest.raises(Unreadable, match="Silent .*cannot be printed: RuntimeError"):
        ask(fails)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork")  # of JAX, if another test has imported it
def test_a_child_of_a_candidate_ends_with_its_call():
    """Or it would go on with the check, and with the tests, beside its parent."""
    parent, ends = os.getpid(), []

    def forks(x, positions):
        if child := os.fork():
            ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return x

    ask(forks)
    if os.getpid() != parent:
        os._exit(7)
    assert ends == [0]
