"""`check_rotation`: right rotations are never accused, wrong ones always, and what a report says beside its verdict."""

import math
import subprocess
import sys
import threading
from dataclasses import replace

import by_hand
import numpy as np
import pytest
from by_hand import rotation
from hypothesis import given, settings, strategies as st
from strategies import DTYPES, ropes

import pyrope
from pyrope import Axes, DynamicNTK, LongRoPE, Mismatch, NotJudged, Rope, YaRN, assert_rotation, check_rotation
from pyrope.oracle.rotation import recorded_calls

ROPE = Rope(16, 10000.0, "half")
RIGHT = rotation(ROPE)


# ── Right ones ───────────────────────────────────────────────────────────────────────────────────────────────────────


def candidate_of(rope, kind, product=np.float32):
    """Float64 throughout, float32 from Θ on, or float32 tables of float64 angles."""
    f32 = {"angle": np.float32, "tables": np.float32, "product": product}
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
    options |= (
        {}
        if rope.scaling is None or not hasattr(rope.scaling, "length")
        else {"max_position": max(rope.scaling.length - 1, 1)}
    )
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


@settings(max_examples=25)
@given(rope=ropes(with_axes=False), kind=KINDS)
def test_float64_is_graded_by_its_angles(rope, kind):
    grade = "float64 angle" if kind == "float64" else "float32 angle"
    report = check_rotation(
        candidate_of(rope, kind, np.float64),
        rope,
        dtype=np.float64,
        effort="few",
        max_position=min(4096, _length(rope)),
    )
    assert report.verdict == "right", str(report)
    order = ["tables or products in x's dtype", "float64 angle", "float32 angle"]
    assert order.index(report.precision) <= order.index(grade)


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


@pytest.mark.parametrize(("least", "verdict"), [(0, "right"), (-1, "wrong"), (-200, "wrong")])
def test_negative_positions_are_tried_where_they_are_claimed(least, verdict):
    report = check_rotation(
        lambda x, positions: RIGHT(x, abs(positions)), ROPE, min_position=least, effort="few" if least < -1 else "usual"
    )
    assert report.verdict == verdict
    assert ("not tried: negative positions" in report.tried) == (least == 0)


def test_the_largest_position_is_tried_and_none_beyond():
    assert check_rotation(at_most(999), ROPE, max_position=999).verdict == "right"
    report = check_rotation(at_most(999), ROPE, max_position=1000)
    assert report.verdict == "wrong"
    assert report.findings[0].since == 1000
    seen = []
    check_rotation(
        lambda x, positions: (seen.append(positions.max(initial=0)), RIGHT(x, positions))[1], ROPE, max_position=77
    )
    assert max(seen) == 77


def test_positions_of_each_row_are_tried_where_they_are_claimed():
    def first_row(x, positions):
        return RIGHT(x, positions if positions.ndim == 1 else positions[:1])

    assert check_rotation(first_row, ROPE, effort="usual").verdict == "right"
    assert check_rotation(first_row, ROPE, batched=True).verdict == "wrong"
    assert check_rotation(each_row(RIGHT, ROPE), ROPE, batched=True).verdict == "right"

    def refuses(x, positions):
        if positions.ndim > 1:
            raise ValueError("one row of positions")
        return RIGHT(x, positions)

    report = check_rotation(refuses, ROPE, batched=True)
    assert report.verdict == "not judged"
    assert "one row of positions" in report.failure.reason
    assert "batched=" in report.failure.reason


# ── Lengths that decide Θ ────────────────────────────────────────────────────────────────────────────────────────────

LONG = LongRoPE((1.0,) * 8, (4.0,) * 8, 4.0, 512, 1.0, 1024)
BY_LENGTH = [replace(ROPE, scaling=DynamicNTK(2.0, 512, 1024)), replace(ROPE, scaling=LONG)]


@pytest.mark.parametrize("rope", BY_LENGTH)
def test_frequencies_may_follow_the_length_of_each_call_and_a_note_says_so(rope):
    made = {n: rotation(rope.at(n)) for n in (512, 513)}

    def by_call(x, positions):
        n = max(int(positions.max(initial=0)) + 1, 512)
        n = n if isinstance(rope.scaling, DynamicNTK) else 512 + (n > 512)
        if n not in made:
            made[n] = rotation(rope.at(n))
        return made[n](x, positions)

    fixed, follows = check_rotation(rotation(rope), rope), check_rotation(by_call, rope)
    assert (fixed.verdict, follows.verdict) == ("right", "right"), str(follows)
    assert fixed.notes == ()
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


def test_nan_from_the_candidate_is_wrong_and_nan_in_x_must_stay():
    lost = check_rotation(
        lambda x, positions: np.nan_to_num(RIGHT(x, positions), nan=0.0, posinf=9.0, neginf=9.0), ROPE
    )
    assert lost.verdict == "wrong"
    assert lost.precision is None
    some = check_rotation(lambda x, positions: np.where(positions[:, None] == 64, np.nan, RIGHT(x, positions)), ROPE)
    assert some.verdict == "wrong"
    assert some.findings[0].since == 64
    assert check_rotation(lambda x, positions: np.full_like(x, np.nan), ROPE, effort="few").verdict == "wrong"


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
    assert rest.startswith(f"up to n = {longest:,}, position {max(m for _, m, _ in calls):,}, {heads:,} heads, numbers")
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


def test_another_thread_does_not_change_a_report():
    def at_77(x, positions):
        return RIGHT(x, positions + (x.shape[-2] == 77))

    quiet, done = str(check_rotation(at_77, ROPE)), threading.Event()
    assert "77" in quiet

    def load():
        x = np.random.default_rng(0).standard_normal((200, 200))
        while not done.is_set():
            x = np.tanh(x @ x)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        assert str(check_rotation(at_77, ROPE)) == quiet
    finally:
        done.set()
        thread.join()


def test_recorded_calls_are_those_that_few_makes():
    answers = {(x.tobytes(), m.tobytes()): RIGHT(x, m) for x, m in recorded_calls(ROPE)}
    report = check_rotation(lambda x, positions: answers[x.tobytes(), positions.tobytes()], ROPE, effort="few")
    assert report.verdict == "right"
    off = {key: y * np.float32(1.001) for key, y in answers.items()}
    assert (
        check_rotation(lambda x, positions: off[x.tobytes(), positions.tobytes()], ROPE, effort="few").verdict
        == "wrong"
    )


def test_assert_rotation_raises_what_it_reports():
    assert_rotation(RIGHT, ROPE, effort="few")
    with pytest.raises(Mismatch, match="(?s)^rotation: WRONG: .*expected  Rope") as raised:
        assert_rotation(lambda x, positions: RIGHT(x, -positions), ROPE, effort="few")
    assert raised.value.report.verdict == "wrong"
    assert "R(m)" in raised.value.report.to_html()  # the page draws what was measured
    with pytest.raises(NotJudged, match="ZeroDivisionError") as raised:
        assert_rotation(lambda x, positions: 1 / 0, ROPE, effort="few")
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(("error", "words", "options"), [
    (ValueError, "grade must be one of .*, was 'best'", {"grade": "best"}),
    (ValueError, "grade must be one of .*, was 'float64 angle'", {"grade": "float64 angle"}),  # not in float32
    (ValueError, "equivalent must be .*, was 'maybe'", {"equivalent": "maybe"}),
    (ValueError, "effort must be one of .*, was 'huge'", {"effort": "huge"}),
    (ValueError, "max_position must be .*, was 0", {"max_position": 0}),
    (TypeError, "max_position must be .*, was 1.5|max_position must be", {"max_position": 1.5}),
    (ValueError, "min_position must be 0, or negative .*, was 3", {"min_position": 3}),
    (TypeError, "batched must be", {"batched": "yes"}),
    (TypeError, "backward must be", {"backward": 1}),
    (TypeError, "dtype must be one of .*int32", {"dtype": np.int32}),
    (TypeError, "dtype must be one of .*'float8'", {"dtype": "float8"}),
])  # fmt: skip
def test_bad_options_are_refused_with_their_rule(error, words, options):
    with pytest.raises(error, match=words):
        check_rotation(RIGHT, ROPE, **options)


def test_bad_arguments_are_refused_with_their_rule():
    with pytest.raises(TypeError, match="fn must be a function of x and positions, was int"):
        check_rotation(3, ROPE)
    with pytest.raises(TypeError, match="rope"):
        check_rotation(RIGHT, 10000.0)
    with pytest.raises(ValueError, match="length"):  # Θ is open
        check_rotation(RIGHT, replace(ROPE, scaling=DynamicNTK(2.0, 512)))


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


def test_the_oracle_imports_no_engine():
    code = """import sys, types
package = types.ModuleType("pyrope")
package.__path__ = [sys.argv[1]]
sys.modules["pyrope"] = package
import pyrope.oracle.rotation, pyrope.oracle.attention, pyrope.oracle.operator, pyrope.oracle.sharding
print(*sorted(name for name in sys.modules if name.startswith("pyrope.")))
"""
    out = subprocess.run(
        [sys.executable, "-c", code, *pyrope.__path__], capture_output=True, text=True, check=True
    ).stdout.split()
    engine = {
        f"pyrope.{name}"
        for name in ("rotation", "softmax", "linear", "layers", "encodings", "plots", "parallel", "cli")
    }
    assert "pyrope.oracle.steps" in out
    assert not engine & set(out)
    assert not [name for name in out if name in ("pyrope.model", "pyrope.checkpoints", "pyrope.configs")]


def test_axes_take_positions_with_a_first_axis():
    rope = Rope(16, 10000.0, "half", axes=Axes("sections", (2, 3, 3)))
    shapes = set()
    report = check_rotation(
        lambda x, positions: (shapes.add(positions.shape[0]), rotation(rope)(x, positions))[1], rope, effort="few"
    )
    assert (report.verdict, shapes) == ("right", {3})
    swapped = check_rotation(lambda x, positions: rotation(rope)(x, positions[[0, 2, 1]]), rope, effort="few")
    assert swapped.verdict == "wrong"
    text = check_rotation(lambda x, positions: RIGHT(x, positions.reshape(x.shape[-2])), rope, effort="few")
    assert text.verdict == "not judged"
    assert "this rope has 3 axes, so positions are (3, n)" in text.failure.fix


def test_the_table_of_errors_shows_what_is_wrong():
    fn = rotation(ROPE)
    report = check_rotation(lambda x, positions: fn(np.clip(x, -10, 10), positions), ROPE)
    assert report.verdict == "wrong" and any(row.worst > row.allowed for row in report.errors)
