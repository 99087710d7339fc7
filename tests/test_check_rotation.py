"""`check_rotation`: right rotations are never accused, wrong ones always, and what a report says beside its verdict."""

import math
import re
from dataclasses import replace

import by_hand
import numpy as np
import pytest
from by_hand import rotation
from hypothesis import given, settings, strategies as st
from strategies import DTYPES, ropes

import pyrope
from pyrope import Axes, DynamicNTK, Mismatch, NotJudged, Rope, YaRN, assert_rotation, check_rotation

ROPE = Rope(16, 10000.0, "half")
RIGHT = rotation(ROPE)


# ── Right ones ───────────────────────────────────────────────────────────────────────────────────────────────────────


def candidate_of(rope, kind):
    """Float64 throughout, float32 from Θ on, or float32 tables of float64 angles."""
    f32 = dict.fromkeys(("angle", "tables", "product"), np.float32)
    return rotation(rope, **{"float64": {}, "float32": f32, "tables": {"tables": np.float32}}[kind])


def each_row(fn, rope):
    """fn, which also takes positions (b, n), or (axes, b, n), for x (b, h, n, d)."""
    whole = 2 if rope.axes is None else 3
    return lambda x, positions: fn(x, positions[..., None, :] if positions.ndim == whole else positions)


KINDS = st.sampled_from(["float64", "float32", "tables"])


@settings(max_examples=150)
@given(rope=ropes(), kind=KINDS, dtype=st.sampled_from(["float16", "bfloat16", "float32"]), backward=st.booleans())
def test_no_right_rotation_is_accused(rope, kind, dtype, backward):
    options = {"dtype": DTYPES[dtype], "effort": "few", "equivalent": "wrong"}
    options |= {"max_position": _length(rope)} if hasattr(rope.scaling, "length") else {}
    if backward:  # of R(m)ᵀ: the other direction, written where it is read
        reads, _, writes = rope.layout.partition("-to-")
        turned = replace(rope, layout=f"{writes}-to-{reads}" if writes else reads, direction=-rope.direction)
        options["backward"] = True
    report = check_rotation(candidate_of(turned if backward else rope, kind), rope, **options)
    assert report.verdict == "right", str(report)


@settings(max_examples=8)
@given(rope=ropes(max_pairs=8), kind=KINDS)
def test_no_right_rotation_is_accused_in_any_call(rope, kind):
    report = check_rotation(each_row(candidate_of(rope, kind), rope), rope, min_position=-300, batched=True)
    assert report.verdict == "right", str(report)


def _length(rope):
    return max(getattr(rope.scaling, "length", None) or 10**6, 2) - 1


# ── Wrong ones, each by a slip in one field ──────────────────────────────────────────────────────────────────────────


@settings(max_examples=25)
@given(rope=ropes(max_pairs=8), data=st.data())
def test_a_rotation_with_one_field_changed_is_not_right(rope, data):
    slips = [
        {"direction": -rope.direction},
        {"base": 1 + (rope.base - 1) / 1.5},
        {"layout": "half" if rope.layout != "half" else "interleaved"},
    ]
    slips += [{"placement": "suffix" if rope.placement == "prefix" else "prefix"}] if rope.width < rope.head_dim else []
    other = replace(rope, **data.draw(st.sampled_from(slips)))
    x = np.random.default_rng(0).standard_normal((2, 40, rope.head_dim)).astype(np.float32)
    at = np.arange(40) * max(_length(rope) // 40, 1) % min(_length(rope) + 1, 131072)
    at = at if rope.axes is None else np.stack([at] * rope.axes.count)
    apart = np.abs(rotation(rope)(x, at) - rotation(other)(x, at)).max() > 0.01  # the layouts of one pair are the same
    verdict = check_rotation(rotation(other), rope, effort="few", equivalent="wrong").verdict
    assert verdict == "wrong" if apart else verdict in ("wrong", "right")


def test_features_in_another_order_are_equivalent_unless_refused():
    fn = rotation(replace(ROPE, layout="half-to-interleaved"))
    report = check_rotation(fn, ROPE, effort="few")
    assert (report.verdict, report.ok, report.faults) == ("equivalent", True, ())
    assert any("pairs are written interleaved, expected was half" in note for note in report.notes)
    strict = check_rotation(fn, ROPE, effort="few", equivalent="wrong")
    assert strict.faults == ("another order of features",)
    turned = rotation(replace(ROPE, layout="interleaved-to-half", direction=-1))
    assert check_rotation(turned, ROPE, effort="few", backward=True).verdict == "wrong"  # gradients have one order


def at_most(limit):
    """Wrong beyond a position alone."""
    return lambda x, positions: RIGHT(x, np.minimum(positions, limit))


@pytest.mark.parametrize(
    ("least", "effort", "verdict"), [(0, "usual", "right"), (-1, "usual", "wrong"), (-200, "few", "wrong")]
)
def test_negative_positions_are_tried_where_they_are_claimed(least, effort, verdict):
    report = check_rotation(lambda x, m: RIGHT(x, abs(m)), ROPE, min_position=least, effort=effort)
    assert report.verdict == verdict
    assert ("not tried: negative positions" in report.tried) == (least == 0)


def test_the_largest_position_is_tried_and_none_beyond():
    assert check_rotation(at_most(999), ROPE, max_position=999).verdict == "right"
    report = check_rotation(at_most(999), ROPE, max_position=1000)
    assert report.verdict == "wrong"
    assert report.findings[0].since == 1000
    seen = []
    check_rotation(
        lambda x, positions: (seen.append((positions.max(initial=0), len(positions))), RIGHT(x, positions))[1],
        ROPE, max_position=77,
    )  # fmt: skip
    assert max(seen)[0] == 77
    assert (77, 78) in seen  # all of them in one call


def test_a_candidate_that_refuses_what_it_claims_is_not_judged():
    def refuses(x, positions):
        if positions.ndim > 1 and len(set(positions.shape)) > 1:  # some shapes may be taken by chance
            raise ValueError("one row of positions")
        return RIGHT(x, positions.reshape(-1)[: x.shape[-2]])

    report = check_rotation(refuses, ROPE, batched=True)
    assert report.verdict == "not judged"
    assert "batched=" in report.failure.reason and "one row of positions" in report.failure.reason

    def picky(x, positions):
        assert x.ndim == 3 and not 4 < x.shape[-2] < 60, "of three axes"
        return RIGHT(x, positions)

    report = check_rotation(picky, ROPE)
    assert report.verdict == "not judged"
    assert re.match("it refuses .* calls of many shapes: .*of three axes", report.failure.reason)


# ── Lengths that decide Θ ────────────────────────────────────────────────────────────────────────────────────────────


def test_frequencies_may_follow_the_length_of_each_call_and_a_note_says_so():
    rope, made = replace(ROPE, scaling=DynamicNTK(2.0, 512, 1024)), {}

    def by_call(x, positions):
        n = max(int(positions.max(initial=0)) + 1, 512)
        return made.setdefault(n, rotation(rope.at(n)))(x, positions)

    fixed, follows = check_rotation(rotation(rope), rope), check_rotation(by_call, rope)
    assert (fixed.verdict, fixed.notes, follows.verdict) == ("right", (), "right"), str(follows)
    assert any("follow the largest position of each call" in note for note in follows.notes)
    assert check_rotation(rotation(rope.at(512)), rope, effort="few").verdict == "wrong"


# ── What cannot be judged ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_table_that_ends_is_judged_up_to_its_end():
    table = np.arange(1001)

    def short(x, positions):
        return RIGHT(x, table[positions])

    report = check_rotation(short, ROPE)
    assert report.verdict == "not judged"
    assert "max_position=1000" in report.failure.fix
    assert "up to there it is right" in report.failure.fix
    assert "IndexError" in report.failure.frames[-1]
    assert check_rotation(short, ROPE, max_position=1000).verdict == "right"
    wrong = check_rotation(lambda x, positions: short(x, positions) * 1.5, ROPE)
    assert wrong.verdict == "wrong"
    assert any("up to 1000" in note for note in wrong.notes)


# ── What a report says beside the verdict ────────────────────────────────────────────────────────────────────────────


def test_tried_counts_the_calls_and_the_largest_of_them():
    calls = []

    def watched(x, positions):
        calls.append((x.shape, int(positions.max(initial=0)), float(np.abs(x[np.isfinite(x)]).max(initial=0))))
        return RIGHT(x, positions)

    report = check_rotation(watched, ROPE)
    count, rest = report.tried.split(" calls, ")
    assert len(calls) * 0.95 < int(count) <= len(calls)  # some are made again
    longest, heads = max(shape[-2] for shape, *_ in calls), max(math.prod(shape[:-2]) for shape, *_ in calls)
    top = max(m for _, m, _ in calls)
    assert rest.startswith(f"up to n = {longest:,}, position {top:,}, {heads:,} heads, numbers from 2⁻¹⁰⁰ to 2¹⁰⁰;")
    assert longest > 8192
    assert heads > 1024
    assert max(size for *_, size in calls) > 2.0**99


def test_errors_are_measured_in_ulps_of_the_pair():
    def two_off(x, positions):
        y = RIGHT(x, positions)
        return np.where(positions[:, None] >= 1000, y + 2 * np.spacing(np.abs(y)), y)

    rows = {row.where: row for row in check_rotation(two_off, ROPE, effort="few").errors}
    assert rows["position 0"].worst == 0
    assert rows["positions 1 to 9"].ulps <= 1  # half of one, of a pair that is up to √2 times as long
    assert 2 <= rows["positions 1,000 to 9,999"].ulps <= 5
    assert all(row.worst <= row.allowed for row in rows.values())
    wrong = check_rotation(lambda x, positions: RIGHT(x, positions + 1), ROPE, effort="few").errors
    assert all(row.ulps is None and row.worst > row.allowed for row in wrong)
    clipped = check_rotation(lambda x, positions: RIGHT(np.clip(x, -10, 10), positions), ROPE)  # in some calls alone
    assert clipped.verdict == "wrong" and any(row.worst > row.allowed for row in clipped.errors)


def test_what_changes_without_a_reason_is_random():
    rng = np.random.default_rng(0)
    report = check_rotation(lambda x, m: RIGHT(x, m) * (rng.random(x.shape) > 0.01).astype(x.dtype), ROPE)
    assert report.faults == ("random",)


def test_assert_rotation_raises_what_it_reports():
    assert_rotation(RIGHT, ROPE, effort="few")
    with pytest.raises(Mismatch, match="(?s)^rotation: WRONG: .*expected  Rope") as raised:
        assert_rotation(lambda x, positions: RIGHT(x, -positions), ROPE, effort="few")
    assert raised.value.report.verdict == "wrong"
    page = raised.value.report.to_html()
    assert "R(m)" in page and "<td>rule</td><td>base 10000</td>" in page  # it draws and lists what was measured
    with pytest.raises(NotJudged, match="ZeroDivisionError") as raised:
        assert_rotation(lambda x, positions: 1 / 0, ROPE, effort="few")
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(("error", "words", "options"), [
    (ValueError, "grade must be one of .*, was 'best'", {"grade": "best"}),
    (ValueError, "grade must be one of .*, was 'float64 angle'", {"grade": "float64 angle"}),  # not in float32
    (ValueError, "equivalent must be .*, was 'maybe'", {"equivalent": "maybe"}),
    (ValueError, "effort must be one of .*, was 'huge'", {"effort": "huge"}),
    (ValueError, "max_position must be .*, was 0", {"max_position": 0}),
    (TypeError, "max_position must be", {"max_position": 1.5}),
    (ValueError, "min_position must be 0, or negative .*, was 3", {"min_position": 3}),
    (TypeError, "batched must be", {"batched": "yes"}),
    (TypeError, "backward must be", {"backward": 1}),
    (TypeError, "dtype must be one of .*int32", {"dtype": np.int32}),
    (TypeError, "dtype must be one of .*'float8'", {"dtype": "float8"}),
    (TypeError, "fn must be a function of x and positions, was int", {"fn": 3}),
    (TypeError, "rope", {"rope": 10000.0}),
    (ValueError, "length", {"rope": replace(ROPE, scaling=DynamicNTK(2.0, 512))}),  # Θ is open
])  # fmt: skip
def test_bad_arguments_are_refused_with_their_rule(error, words, options):
    with pytest.raises(error, match=words):
        check_rotation(**({"fn": RIGHT, "rope": ROPE} | options))


# ── Independence of the engine ───────────────────────────────────────────────────────────────────────────────────────


def test_a_broken_engine_changes_no_verdict(monkeypatch):
    rope, zeros = Rope(16, 10000.0, "half", scaling=YaRN(2.0, 4096)), lambda x, *_, **__: np.zeros_like(x)
    for name in ("rotate", "attention", "linear_attention"):
        monkeypatch.setattr(pyrope, name, zeros)
    monkeypatch.setattr("pyrope.rotation.rotate", zeros)
    monkeypatch.setattr("pyrope.softmax.attention", zeros)
    monkeypatch.setattr("pyrope.linear.linear_attention", zeros)
    assert check_rotation(rotation(rope), rope, effort="few").verdict == "right"
    assert check_rotation(lambda x, positions: pyrope.rotate(x, positions, rope), rope, effort="few").verdict == "wrong"
    softmax = by_hand.softmax_attention()
    assert pyrope.check_attention(lambda q, k, v: softmax(q, k, v), effort="few").verdict == "right"
    assert pyrope.check_attention(pyrope.attention, effort="few").verdict == "wrong"
    assert pyrope.check_linear_attention(by_hand.linear_attention(ROPE), rope=ROPE, effort="few").verdict == "right"


def test_axes_take_positions_with_a_first_axis():
    rope = Rope(16, 10000.0, "half", axes=Axes("sections", (2, 3, 3)))
    shapes = set()
    report = check_rotation(
        lambda x, positions: (shapes.add(positions.shape[0]), rotation(rope)(x, positions))[1], rope, effort="few"
    )
    assert (report.verdict, shapes) == ("right", {3})
    text = check_rotation(lambda x, positions: RIGHT(x, positions.reshape(x.shape[-2])), rope, effort="few")
    assert text.verdict == "not judged"


def test_errors_are_those_of_all_wrong_rows():
    def last_row_stays(x, positions):
        y = RIGHT(x, positions).copy()
        y[..., 1:, :][..., -1:, :] = x[..., 1:, :][..., -1:, :]
        return y

    rows = {row.where: row for row in check_rotation(last_row_stays, ROPE).errors}
    assert rows["positions 10 to 99"].worst > 1 and rows["positions 100,000 to 131,071"].worst > 1
