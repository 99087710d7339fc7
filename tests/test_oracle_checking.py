"""What `check_rotation` makes of a verdict: grades, notes, orders of features, findings. Trials of special calls, which
have tests of their own, are left out here, so that a check takes milliseconds."""

from types import SimpleNamespace

import numpy as np
import pytest
from optional import package
from oracle_cases import turn

import pyrope
from pyrope import DynamicNTK, Rope, check_rotation
from pyrope.oracle import checking
from pyrope.oracle.ask import Unreadable

ml_dtypes = package("ml_dtypes")

D = 16
ROPE, INTERLEAVED, MOVED = (Rope(D, 10000.0, layout) for layout in ("half", "interleaved", "interleaved-to-half"))


@pytest.fixture(autouse=True)
def trials(monkeypatch):
    """What the trials say, and with which arguments they were begun."""
    said, begun = ({}, []), []

    def run(probe, expected, *options, few):
        begun.append((expected, *options))
        return said

    monkeypatch.setattr(checking, "run_trials", run)
    return said, begun


TASK = checking._Task("rotation", repr(ROPE), checking.FAULTS)


def angles(m, d=D, base=10000.0, dtype=np.float64):
    return np.asarray(m, dtype)[..., None] * dtype(base) ** (-np.arange(0, d, 2, dtype=dtype) / dtype(d))


def right(x, m):
    return turn(x, angles(m))


def in_float32(x, m):
    return turn(x, angles(m, dtype=np.float32).astype(np.float64))


# --- Grades ---


def test_a_better_grade_is_asked_for():
    assert check_rotation(in_float32, ROPE).precision == "float32 angle"
    for grade, ok in (("float32 angle", True), ("tables or products in x's dtype", False), ("rounded once", False)):
        report = check_rotation(in_float32, ROPE, grade=grade)
        assert report.ok == ok and report.precision == "float32 angle"
        assert ok or report.faults == ("coarser than asked",) and report.findings[0].since is not None
    assert check_rotation(right, ROPE, grade="rounded once").verdict == "right"
    with pytest.raises(ValueError, match="grade must be one of 'rounded once', "):
        check_rotation(right, ROPE, grade="exact")


def test_what_is_coarser_says_where_and_by_how_much():
    """All is exact but at position 4096, where one pair is turned by 2⁻¹² too much."""

    def fn(x, m):
        return turn(x, angles(m) + (np.arange(D // 2) == 1) * 2.0**-12 * (np.asarray(m) == 4096)[:, None])

    report = check_rotation(fn, ROPE, grade="rounded once")
    assert report.faults == ("coarser than asked",)
    evidence = report.findings[0].evidence
    assert evidence.startswith(
        "float32 angle; asked for: rounded once, whose bound is exceeded "
    ) and evidence.endswith(" times at position 4096")


@pytest.mark.parametrize("k, noted", [(0.5, False), (2.0, True), (3.9, True)])
def test_frequencies_by_a_logarithm_are_noted(k, noted):
    """A float32 power of exponent e is off by 4 roundings and e·ln(base), one by a logarithm by four times the latter."""
    e = np.arange(0, D, 2) / D
    theta = 10000.0**-e * (1 + (e > 0) * (4 + k * e * np.log(10000.0)) * 2.0**-24)
    report = check_rotation(lambda x, m: turn(x, np.asarray(m, float)[:, None] * theta), ROPE)
    assert (
        report.verdict == "right" and any("as good as by a float32 logarithm" in note for note in report.notes) == noted
    )


def test_frequencies_by_a_running_product_are_named():
    rope, ratio, theta = Rope(128, 10000.0, "half"), np.float32(10000.0) ** np.float32(-2 / 128), [np.float32(1)]
    for _ in range(63):
        theta.append(theta[-1] * ratio)
    report = check_rotation(lambda x, m: turn(x, np.asarray(m, float)[:, None] * np.array(theta, float)), rope)
    assert report.faults == ("recursive frequencies",) and report.precision == "float32 angle"


def ggml(x, m):
    """Each angle is the one before times a ratio, in float32."""
    angle, ratio = np.empty((len(m), D // 2), np.float32), np.float32(10000.0) ** np.float32(-2.0 / D)
    angle[:, 0] = m
    for i in range(1, D // 2):
        angle[:, i] = angle[:, i - 1] * ratio
    return turn(x, angle.astype(np.float64))


def test_a_recurrence_is_taken_for_a_float32_angle():
    report = check_rotation(ggml, ROPE)
    assert (report.verdict, report.precision) == ("right", "float32 angle") and "as in ggml" in report.notes[0]
    assert not check_rotation(in_float32, ROPE).notes


@pytest.mark.parametrize("ratio, recurrence, grade", [(0.9, True, None), (1.5, True, "float32 angle"), (3.9, True, "float32 angle"), (4.1, True, None), (1.5, False, None)])  # fmt: skip
def test_a_recurrence_may_be_four_times_as_bad(ratio, recurrence, grade):
    probe = checking.Probe(right, D, np.float32, 1000)
    check = checking._Check(probe, ROPE, "float32 angle", False, 0, False, TASK)
    check.explainer = SimpleNamespace(recurrence=lambda: recurrence)
    result = checking.graded(checking.take_sample(probe, ROPE), ROPE, probe.dtype)
    ratios = {**result.ratios, "float32 angle": np.array([[0.5, ratio]])}
    graded = check._with_recurrence(result._replace(grade=None, ratios=ratios))
    assert graded.grade == grade
    if grade:
        assert (
            graded.ratios["float32 angle"].tolist() == [[0.5, 1.0]]
            and graded.ratios["rounded once"] is ratios["rounded once"]
        )
    known = result._replace(grade="rounded once", ratios=ratios)
    assert check._with_recurrence(known) is known


# --- The same scores ---


@pytest.mark.parametrize(
    "fn, rope, words",
    [
        (lambda x, m: pyrope.rotate(x, m, MOVED), INTERLEAVED, "pairs are written half, expected was interleaved. "),
        (lambda x, m: pyrope.rotate(x, m, INTERLEAVED), MOVED, "pairs are written interleaved, expected was interleaved-to-half. "),
        (lambda x, m: right(x, m)[..., ::-1], ROPE, "16 of 16 outputs come out in another place. "),
        (lambda x, m: right(x, m)[..., [1, 0, *range(2, D)]], ROPE, "2 of 16 outputs come out in another place. "),
        (lambda x, m: right(x, m) * np.where(np.arange(D) == 3, -1, 1).astype(x.dtype), ROPE, "0 of 16 outputs come out in another place, 1 with the other sign. "),
        (lambda x, m: -right(x, m), ROPE, "0 of 16 outputs come out in another place, 16 with the other sign. "),
    ],
)  # fmt: skip
def test_another_order_of_features_is_equivalent(fn, rope, words, trials):
    report = check_rotation(fn, rope)
    assert report.verdict == "equivalent" and report.ok and len(report.notes) == 1 and report.notes[0].startswith(words)
    assert report.notes[0].endswith("Scores are the same if queries and keys, cached ones too, are all made this way.")
    ((expected, *_),) = trials[1]  # of special calls, what this candidate does is expected, in its own order
    x, m = np.random.default_rng(0).standard_normal((2, 3, D)), np.array([5, 70, 9])
    out, allowed = expected.expected(x, m)
    np.testing.assert_allclose(out, fn(x, m), atol=1e-6)
    assert out.shape == allowed.shape and (allowed > 0).all() and (allowed < 1e-2).all()
    strict = check_rotation(fn, rope, equivalent="wrong")
    assert (
        strict.faults == ("another order of features",)
        and strict.findings[0].evidence == report.notes[0]
        and not strict.notes
    )


def test_what_is_expected_of_special_calls(trials):
    check_rotation(in_float32, ROPE)
    ((expected, by_call, least, batched),) = trials[1]
    assert (by_call, least, batched) == (False, 0, False)
    x, m = np.random.default_rng(0).standard_normal((2, 3, D)), np.array([5, 70, 9])
    out, allowed = expected.expected(x, m)
    np.testing.assert_allclose(out, right(x, m), rtol=1e-12)
    off = np.abs(in_float32(x, m) - out)
    assert (off <= allowed).all() and (allowed < 1e-3).all()
    check_rotation(right, ROPE, min_position=-7, batched=True)
    assert trials[1][1][1:] == (False, -7, True)


def test_a_matrix_that_is_nearly_a_permutation_is_none():
    order = np.eye(D)[::-1].copy()
    order[0, 0] = 0.01
    assert check_rotation(lambda x, m: (right(x, m) @ order).astype(x.dtype), ROPE).verdict == "wrong"


# --- Findings ---


def test_what_the_trials_find_is_added(trials):
    said, begun = trials
    said[0]["strides ignored"] = "wrong: a view"
    said[1].append("a note of theirs")
    report = check_rotation(right, ROPE)
    assert report.faults == ("strides ignored",) and report.findings[0].evidence == "wrong: a view"
    assert report.notes == ("a note of theirs",) and report.verdict == "wrong"
    wrong = check_rotation(lambda x, m: turn(x, angles(m, base=5e5)), ROPE)
    assert wrong.faults == ("wrong base", "strides ignored") and len(begun) == 2


def test_a_result_is_looked_at_once_more_after_all_calls(monkeypatch):
    """A ring of three buffers: it comes round in the trials, of which there is one here."""
    buffers, calls = [np.empty((2, 4, D), np.float32) for _ in range(3)], [0]

    def fn(x, m):
        if x.shape != (2, 4, D):
            return right(x, m)
        calls[0] += 1
        out = buffers[calls[0] % 3]
        out[...] = right(x, m)
        return out

    def three_more(probe, *arguments, few):
        for scale in (2, 3, 4):
            probe.call(np.full((2, 4, D), scale, np.float32), [1, 2, 3, 4])
        return {}, []

    monkeypatch.setattr(checking, "run_trials", three_more)
    report = check_rotation(fn, ROPE)
    assert (
        report.faults == ("result overwritten",)
        and "of 128 outputs of an earlier call change" in report.findings[0].evidence
    )


def test_nothing_special_is_tried_of_what_behaves_oddly_or_is_unexplained(trials):
    calls = []

    def fn(x, m):  # another result each time
        calls.append(1)
        return right(x, m) * x.dtype.type(1 + 1e-3 * len(calls))

    assert not check_rotation(fn, ROPE).ok and not trials[1]
    report = check_rotation(lambda x, m: right(x, m) * np.linspace(1, 1.3, D).astype(x.dtype), ROPE)
    assert report.faults == ("unexplained",) and not trials[1]


def test_what_is_known_to_be_wrong_stays_so_where_too_little_is_taken(monkeypatch):
    def refused(*arguments, few):
        given.append(few)
        raise Unreadable("refuses nearly all", "", "raised")

    given = []
    monkeypatch.setattr(checking, "run_trials", refused)
    assert check_rotation(lambda x, m: turn(x, angles(m, base=5e5)), ROPE).faults == ("wrong base",)
    assert check_rotation(right, ROPE).verdict == "not judged" and given == [
        True,
        False,
    ]  # fewer trials of what is wrong


def test_a_backward_pass_is_the_transpose():
    """Rᵀ·g: the rotation backwards. Forwards is the mistake of autograd functions written by hand; None means zeros."""
    back = lambda g, m: turn(g, -angles(m))  # noqa: E731
    report = check_rotation(back, ROPE, backward=True)
    assert (report.verdict, report.subject, report.expected) == (
        "right",
        "rotation, backward",
        f"the transpose of {ROPE!r}",
    )
    assert (
        check_rotation(right, ROPE, backward=True).verdict == "wrong" and check_rotation(back, ROPE).verdict == "wrong"
    )
    nothing = check_rotation(lambda g, m: None, ROPE, backward=True)
    assert nothing.verdict == "wrong" and "it returns None, which is taken for a gradient of zeros" in nothing.notes
    other = lambda g, m: pyrope.rotate(g, -np.asarray(m), MOVED)  # noqa: E731
    assert check_rotation(other, INTERLEAVED, backward=True).verdict == "wrong"  # there is no other order of a gradient


def test_a_backward_pass_with_the_other_sign_has_a_name_of_its_own():
    report = check_rotation(lambda g, m: -turn(g, -angles(m)), ROPE, backward=True)
    words = "at every position all outputs are those expected, with the other sign"
    assert len(report.findings) == 1 and words in report.findings[0].evidence
    forward = check_rotation(lambda x, m: -right(x, m), ROPE)
    assert forward.verdict == "equivalent" and words not in str(forward)


# --- Positions that a function takes ---


@pytest.mark.parametrize("size", [2, 3, 100, 999])
def test_a_table_that_is_too_short_is_measured(size):
    def fn(x, m):
        if max(m) >= size:
            raise IndexError("out of range")
        return right(x, m)

    report = check_rotation(fn, ROPE, max_position=1000)
    start = f"it takes positions up to {size - 1}, and raises from {size} on: "
    assert report.verdict == "not judged" and report.failure.fix.startswith(start)
    assert f"give max_position={size - 1} (--max-position {size - 1})" in report.failure.fix


def test_what_raises_otherwise_has_no_short_table():
    def always(x, m):
        raise IndexError("out of range")

    def odd_rows(x, m):  # whatever the positions are
        if len(m) != 4:
            raise IndexError("out of range")
        return right(x, m)

    def large(x, m):
        if max(m) > 99:
            raise MemoryError("a table of some terabytes")
        return right(x, m)

    for fn in (always, odd_rows, large):
        report = check_rotation(fn, ROPE, max_position=1000)
        assert report.verdict == "not judged" and "it takes positions up to" not in report.failure.fix


@pytest.mark.parametrize("length, largest", [(1, 1), (2, 1), (3, 2), (64, 63)])
def test_a_rope_that_depends_on_the_length_is_asked_within_it(length, largest):
    rope, asked = Rope(D, 10000.0, "half", scaling=DynamicNTK(2.0, 32, length)), []

    def fn(x, m):
        asked.append(int(max(m)))
        return pyrope.rotate(x, m, rope)

    assert check_rotation(fn, rope).verdict == "right" and max(asked) == largest


def test_the_least_position_is_0_or_below():
    assert check_rotation(right, ROPE, min_position=0).verdict == "right"
    for least in (1, 5):
        with pytest.raises(ValueError, match=f"min_position must be 0, or negative .*, was {least}"):
            check_rotation(right, ROPE, min_position=least)


def test_what_is_left_of_positions_whose_offset_is_lost():
    for given, left in (([5, 6, 7, 2, 3, 4, 9], [0, 1, 2, 0, 1, 2, 0]), ([0, 1, 2], [0, 1, 2]), ([3, 3, 4], [0, 0, 1]),
                        ([9, 4, 17], [0, 0, 0]), ([7], [0])):  # fmt: skip
        assert checking._from_zero(np.array(given)).tolist() == left
    assert checking._from_zero(np.array([[4, 5, 9], [1, 2, 3]])).tolist() == [[0, 1, 0], [0, 1, 2]]


def test_calls_of_seven_rows_stand_for_what_is_wrong_in_long_ones():
    report = check_rotation(lambda x, m: right(x, m) if len(m) < 40 else x.copy(), ROPE)
    assert report.faults == ("some lengths wrong",) and report.precision == "rounded once"
    ntk = Rope(D, 10000.0, "half", scaling=DynamicNTK(2.0, 64, 4096))
    report = check_rotation(lambda x, m: pyrope.rotate(x, m, ntk) if len(m) < 40 else x.copy(), ntk)
    assert report.verdict == "wrong" and report.precision is None  # where the length decides, short calls say nothing


def test_a_table_that_follows_the_largest_position_is_judged_where_it_may(trials):
    rope = Rope(D, 10000.0, "half", scaling=DynamicNTK(2.0, 64))

    def fn(x, m):
        return pyrope.rotate(x, m, rope.at(max(int(np.max(m, initial=0)) + 1, 1)))

    report = check_rotation(fn, rope.at(4096))
    assert report.verdict == "right" and "judged were only calls that hold position 4095" in report.notes[0]
    assert trials[1][0][1] is True
    plain = check_rotation(lambda x, m: turn(x, angles(m, base=1e4 * max(1.0, float(np.max(m, initial=0)) / 64))), ROPE)
    assert plain.verdict == "wrong"  # a rope without a length has one table


def test_what_is_not_finite_says_where(monkeypatch):
    fn = lambda x, m: np.where((np.asarray(m) >= 5000)[:, None], np.nan, right(x, m)).astype(x.dtype)  # noqa: E731
    report = check_rotation(fn, ROPE)
    assert report.faults == ("not finite",) and report.findings[0].evidence.endswith(
        "NaN or infinity from position 5000 on"
    )
    wrong = check_rotation(lambda x, m: turn(x, angles(m, base=5e5)), ROPE)
    assert "infinity" not in wrong.findings[0].evidence


@pytest.mark.needs("ml_dtypes")
def test_low_precision_of_the_angle_is_the_precision():
    narrow = lambda m: angles(m).astype(ml_dtypes.bfloat16).astype(float)  # noqa: E731
    report = check_rotation(lambda x, m: turn(x, narrow(m)), ROPE)
    assert report.faults == ("bfloat16 angle",) and report.precision == checking.LOW_ANGLE


@pytest.mark.parametrize("error, named", [(ZeroDivisionError("inside"), True), (KeyboardInterrupt(), False), (Unreadable("raises it", "", "raised"), False)])  # fmt: skip
def test_an_error_in_the_search_is_a_note_unless_it_is_the_candidates(monkeypatch, error, named):
    def broken(self, ratio):
        raise error

    monkeypatch.setattr(checking.RotationExplainer, "findings", broken)
    fn = lambda x, m: turn(x, angles(m, base=5e5))  # noqa: E731
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            check_rotation(fn, ROPE)
        return
    report = check_rotation(fn, ROPE)
    assert (report.verdict == "wrong") == named
    if named:
        assert report.faults == ("unexplained",) and report.notes == (
            "the search for an explanation ended in ZeroDivisionError: inside",
        )
    else:
        assert report.verdict == "not judged" and report.failure.reason == "it raises it"


def test_a_wrong_candidate_is_explained_by_how_far_it_is_beyond_the_worst_grade(monkeypatch):
    given, fn = [], lambda x, m: turn(x, angles(m, base=5e5))
    monkeypatch.setattr(
        checking.RotationExplainer, "findings", lambda self, ratio: given.append(ratio) or [self.unexplained()]
    )
    check_rotation(fn, ROPE)
    ratios = checking.graded(
        checking.take_sample(checking.Probe(fn, D, np.float32, None), ROPE), ROPE, np.dtype(np.float32)
    ).ratios
    np.testing.assert_array_equal(given[0], ratios["float32 angle"])
    assert (ratios["float32 angle"] < ratios["rounded once"]).any()


# --- Notes and rows ---


def test_what_is_not_decided_is_noted():
    assert not check_rotation(right, ROPE, dtype=np.float16).notes
    short = check_rotation(right, ROPE, dtype=np.float16, max_position=200)
    assert short.notes == ("up to position 200 this dtype cannot tell a float32 angle from an exact one",)
    assert not check_rotation(right, ROPE, max_position=200).notes
    far = check_rotation(right, ROPE, max_position=2**31 - 1)
    assert len(far.notes) == 1 and far.notes[0].startswith(
        "a correct float32 angle may be half a turn off beyond position 23"
    )


@pytest.mark.parametrize("share, count, noted", [(0.099, 16, False), (0.099, 15, True), (0.101, 16, True)])
def test_sixteen_outputs_whose_bound_is_a_tenth_of_a_float32_angle_decide(monkeypatch, share, count, noted):
    """The error of such an angle is |x|·mθ times its relative one: here 2 · 0.5."""
    probe = checking.Probe(right, D, np.float16, 1000)
    check = checking._Check(probe, ROPE, "rounded once", False, 0, False, TASK)
    some = np.where(np.arange(64) < count, share, 5.0)
    check.explainer = SimpleNamespace(sample=SimpleNamespace(x=None, positions=None), truth=np.zeros((1, 1, D)))
    monkeypatch.setattr(checking, "pair_errors", lambda *given: SimpleNamespace(size=np.full(64, 2.0), relative=0.5))
    monkeypatch.setattr(checking, "bound", lambda *given: some)
    assert bool(check._undecided("rounded once")) == noted
    assert not check._undecided("float32 angle") and not check._undecided(None)


def test_errors_by_decade():
    at = np.array([0, 1, 9, 10, 99, 100, 250])
    off = np.array([[0.0, 1.0, 2.0, 3.0, 5.0, 7.0, 8.0], [0.5, 0.0, 4.0, 1.0, 6.0, 9.0, 2.0]])
    rows = list(checking._decades(off[..., None], np.full((2, 7, 1), 0.5), at))
    assert [row.where for row in rows] == [
        "position 0",
        "positions 1 to 9",
        "positions 10 to 99",
        "positions 100 to 250",
    ]
    assert [(row.worst, row.typical, row.absolute) for row in rows] == [
        (1.0, 0.5, 0.5),
        (8.0, 3.0, 4.0),
        (12.0, 8.0, 6.0),
        (18.0, 15.0, 9.0),
    ]
    assert [row.where for row in checking._decades(np.ones((1, 1, 1)), np.ones((1, 1, 1)), np.array([12]))] == [
        "positions 10 to 12"
    ]


@pytest.mark.parametrize("dtype, unit", [(np.float32, 2.0**-24), (np.float64, 2.0**-53)])
def test_errors_are_in_steps_of_the_length_of_a_pair(dtype, unit):
    """One feature of every row is four steps too large; a step, from one number to the next, is 2u of a power of two."""

    def fn(x, m):
        y = pyrope.rotate(x, m, ROPE).astype(float)
        first, second = y[..., 0], y[..., D // 2]
        y[..., 0] += 4 * 2 * unit * 2.0 ** np.floor(np.log2(np.maximum(np.hypot(first, second), 1e-30)))
        return y.astype(x.dtype)

    rows = check_rotation(fn, ROPE, dtype=dtype).errors
    assert len(rows) == 7 and all(3 <= row.worst <= 5.5 for row in rows[1:])
    still = check_rotation(lambda x, m: pyrope.rotate(x, m, ROPE), ROPE, dtype=dtype).errors
    assert all(row.worst < 2 for row in still)


def test_a_picture_that_cannot_be_drawn_changes_nothing(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no picture")

    assert check_rotation(right, ROPE).readings is not None
    monkeypatch.setattr(checking, "rotation_readings", broken)
    report = check_rotation(right, ROPE)
    assert report.verdict == "right" and report.readings is None


def test_the_page_knows_whether_the_precision_is_accepted(monkeypatch):
    given = []
    monkeypatch.setattr(checking, "rotation_readings", lambda *arguments: given.append(arguments))
    check_rotation(in_float32, ROPE)
    check_rotation(in_float32, ROPE, grade="rounded once")
    check_rotation(lambda x, m: turn(x, angles(m, base=5e5)), ROPE)
    (*_, none, first), (*_, beyond, second), (*_, far, third) = given
    assert none is None and beyond.max() > 1 and far.max() > 1
    assert [side[-1] for side in (first, second, third)] == [True, False, False]
    assert (
        first[1] == "float32 angle, or better"
        and second[1:3] == ("rounded once, or better", "float32 angle")
        and third[2] == "worse"
    )


def test_whose_positions_rows_turn_by_is_not_asked_of_what_refuses_it():
    """Positions of a call are reversed, and positions that come twice side by side are refused: still it is wrong."""

    def fn(x, m):
        if (np.diff(m) == 0).any() and len(m) == 7:
            raise ValueError("not twice")
        return right(x, m[::-1])

    report = check_rotation(fn, ROPE)
    assert report.verdict == "wrong" and "another row's position" not in report.faults


def test_what_differs_within_a_call_says_what_was_expected():
    def fn(x, m):
        y = right(x, m)
        y[..., -1, :, :] = x[..., -1, :, :] if x.ndim > 2 else y
        return y

    (finding,) = check_rotation(fn, ROPE).findings
    assert finding.fault == "heads differ"
    assert "in a call of shape (3, 5, 16), first at position 1, head 2, row 4, feature 0: expected" in finding.evidence


# --- What no known mistake explains ---


def test_another_rule_beyond_a_position_is_told():
    def fn(x, m):
        base = np.where(np.asarray(m) < 100, 10000.0, 777.0)[:, None]
        return turn(x, np.asarray(m, float)[:, None] * base ** (-np.arange(0, D, 2) / D))

    (finding,) = check_rotation(fn, ROPE).findings
    assert finding.fault == "wrong beyond a position" and finding.since == 100
    assert "from there on the frequencies are those of base 777" in finding.evidence


def test_scattered_positions_that_are_wrong_in_every_feature():
    (finding,) = check_rotation(lambda x, m: right(x, np.where(np.asarray(m) % 7 == 3, 0, m)), ROPE).findings
    assert finding.fault == "some positions wrong"

    def part(x, m):  # of one feature alone
        y = right(x, m)
        y[..., np.asarray(m) % 7 == 3, 2] = 0
        return y

    assert "some positions wrong" not in check_rotation(part, ROPE).faults


def test_the_first_wrong_output_is_told_with_what_it_should_be():
    """One feature of one position is 100: that is what came, and the rest is what should have come."""

    def fn(x, m):
        y = right(x, m)
        y[..., np.asarray(m) == 512, 3] = 100
        return y

    evidence = check_rotation(fn, ROPE).findings[0].evidence
    assert "first at position 512, " in evidence and evidence.count("got 100;") == 1 and "expected 100" not in evidence


def test_a_factor_that_is_right_is_not_blamed():
    """Of a rope with an attention factor, 1.139, and a candidate with that and with frequencies of no rule."""
    rope = Rope(D, 10000.0, "half", scaling=pyrope.YaRN(4.0, 4096))
    theta = pyrope.frequencies(rope) * (1 + 0.03 * np.cos(np.arange(D // 2)))

    def fn(x, m, size=1.0):
        y = turn(x.astype(np.float64), np.asarray(m, float)[:, None] * theta)
        return (rope.attention_factor * size * y).astype(x.dtype)

    evidence = check_rotation(fn, rope).findings[0].evidence
    assert "the factor is" not in evidence and "frequencies of " in evidence
    assert "the factor is 2.27" in check_rotation(lambda x, m: fn(x, m, 2.0), rope).findings[0].evidence


@pytest.mark.parametrize(
    "count, words", [(4, "all others as expected"), (5, "the frequencies of 5 of 8 pairs are off by")]
)
def test_a_few_frequencies_that_differ_are_listed(count, words):
    theta = 10000.0 ** (-np.arange(0, D, 2) / D)
    theta[:count] *= 1 + 0.013 * np.arange(1, count + 1) ** 2
    found = check_rotation(lambda x, m: turn(x, np.asarray(m, float)[:, None] * theta), ROPE).findings[0]
    assert found.fault == "unexplained" and words in found.evidence


def test_a_sample_in_calls_of_seven_rows_is_noted():
    def short(x, m):
        if x.shape[-2] > 7:
            raise ValueError("too long")
        return right(x, m)

    report = check_rotation(short, ROPE)
    assert report.verdict == "right" and any(
        "is not taken: the sample is read in calls of seven" in n for n in report.notes
    )
    assert not any("calls of seven" in note for note in check_rotation(right, ROPE).notes)
