"""The bounds of the oracle: each holds for pipelines as libraries have them, and is refused a little beyond."""

import math

import by_hand
import numpy as np
import pytest
import truth
from by_hand import rescaled32, rotation, rounded
from hypothesis import assume, example, given
from strategies import DTYPES, ropes

from pyrope import DynamicNTK, Linear, Llama3, Rope, YaRN, check_attention, check_linear_attention, check_rotation
from pyrope.oracle import tolerance
from pyrope.oracle.tolerance import ANGLE32, ANGLE64, BOTH, ONCE, TABLES, decides_up_to, theta_errors

U16, U32, U64 = 2.0**-11, 2.0**-24, 2.0**-53
PLAIN = Rope(64, 10000.0, "half")
SCALED = {
    "none": PLAIN,
    "linear": Rope(64, 10000.0, "half", scaling=Linear(3.0)),
    "llama3": Rope(128, 500000.0, "half", scaling=Llama3(8.0, 1.0, 4.0, 8192)),
    "yarn": Rope(64, 10000.0, "interleaved", scaling=YaRN(5.0, 4096, attention_factor=1.0)),
    "dynamic": Rope(64, 10000.0, "half", scaling=DynamicNTK(3.0, 2048, 2100)),
}


# ── Frequencies ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("series", [by_hand.power, by_hand.exponential, by_hand.running])
@given(rope=ropes(max_pairs=48, with_axes=False))
@example(rope=Rope(96, 500000.0, "half", scaling=Llama3(64.0, 4.0, 4.25, 2000)))  # a pair within a steep ramp
@example(rope=Rope(96, 500000.0, "half", scaling=Llama3(64.0, 4.0, 4.25, 5959)))
def test_float32_frequencies_as_libraries_make_them_are_within_their_errors(series, rope):
    assume(not isinstance(rope.scaling, Llama3) or rope.scaling.high != rope.scaling.low)  # a step may fall either way
    due, got = by_hand.theta(rope), rescaled32(rope, series).astype(np.float64)
    assert (np.abs(got - due) <= theta_errors(rope) * due * U32 * (1 + 1e-6)).all()


@pytest.mark.parametrize("series", [by_hand.power, by_hand.exponential, by_hand.running])
@pytest.mark.parametrize("name", SCALED)
def test_float32_pipelines_are_right_as_a_whole(name, series):
    rope, f32 = SCALED[name], dict.fromkeys(("angle", "tables", "product"), np.float32)
    report = check_rotation(rotation(rope, w=rescaled32(rope, series), **f32), rope, effort="few")
    assert (report.verdict, report.precision) == ("right", ANGLE32), str(report)


def errors_by_hand(r, base):
    """4 + max(4·e·ln base, 1.5·e·r) of e = 2i/r: the roundings of MLX's and ggml's ways."""
    e = 2 * np.arange(r // 2) / r
    return 4 + np.maximum(4 * e * math.log(base), 1.5 * e * r)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("pair", [3, 9, 15])
def test_a_frequency_that_is_off_by_more_than_its_error_is_refused(name, pair):
    rope, options = SCALED[name], {"effort": "few", "max_position": 100_000}
    w, here = by_hand.theta(rope), np.arange(SCALED[name].pairs) == pair
    off = here * theta_errors(rope)[pair] * U32  # the rounding of m·θ is not made, 5 of them at least are in the bound
    inside = check_rotation(rotation(rope, w=w * (1 + off)), rope, **options)
    assert (inside.verdict, inside.precision) == ("right", ANGLE32)
    assert check_rotation(rotation(rope, w=w * (1 - 1.5 * off - 8 * U32 * here)), rope, **options).verdict == "wrong"


@pytest.mark.parametrize(("d", "base"), [(128, 10000.0), (64, 500000.0), (32, 1000.0)])
def test_beyond_half_a_turn_nothing_is_decided(d, base):
    relative, w = errors_by_hand(d, base) + 1, base ** (-2 * np.arange(d // 2) / d)
    relative[0] = 0  # exact up to 2²⁴
    rate = (w * relative * U32 + 2 * math.pi * 2.0**-32).max()  # and a phase of 32 bits
    limit, rope = int(math.pi / rate), Rope(d, base, "half")
    assert limit < 2**24
    assert decides_up_to(rope) == pytest.approx(limit, abs=1)
    tops = limit - 9, limit + 9
    before, after = (check_rotation(rotation(rope), rope, effort="few", max_position=top).notes for top in tops)
    assert before == () and f"beyond position {decides_up_to(rope)}: not decided" in after[0]


# ── Grades ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def off_by(rope, sums=0.0, angle=0.0):
    """The exact rotation by mpmath, with an error of so many times |x·cos| + |y·sin|, and angles that are off by so
    many times their errors; rounded to the dtype of x."""
    known = {}

    def fn(x, positions):
        for m in positions.tolist():
            if m not in known:
                known[m] = np.array([[float(part) for part in table] for table in truth.cos_sin(rope, m)])
        cos, sin = (np.array([known[m][i] for m in positions.tolist()]).reshape(len(positions), -1) for i in (0, 1))
        delta = angle * positions[:, None] * by_hand.theta(rope) * errors_by_hand(8, 10000.0) * [0, 1, 1, 1]
        cos, sin = cos - sin * delta, sin + cos * delta  # delta² is far below the bounds
        wide = x.astype(np.float64)
        y, size = by_hand.turn(wide, cos, sin, rope), by_hand.turn(np.abs(wide), np.abs(cos), -np.abs(sin), rope)
        half = rope.width // 2
        size[..., half:] = np.abs(wide[..., half:]) * np.abs(cos) + np.abs(wide[..., :half]) * np.abs(sin)
        return (y + sums * size).astype(x.dtype)

    return fn


SMALL = Rope(8, 10000.0, "half")
BOUNDS = [  # dtype, grade, what is off, inside, outside: each bound is at the head of tolerance.py
    ("float16", ONCE, "sums", 0.0, 0.25 * U16),
    ("float16", TABLES, "sums", 1.9 * U16, 2.6 * U16),
    ("float16", ANGLE32, "angle", U32, 4 * U32),
    ("float16", BOTH, "sums", 1.9 * U16, 2.6 * U16),
    ("bfloat16", ONCE, "sums", 0.0, 2.0**-10),
    ("bfloat16", TABLES, "sums", 1.9 * 2.0**-8, 2.6 * 2.0**-8),
    ("float32", ONCE, "sums", 0.0, 0.5 * U32),
    ("float32", TABLES, "sums", 1.9 * U32, 2.6 * U32),
    ("float32", ANGLE32, "angle", U32, 1.3 * U32),
    ("float64", TABLES, "sums", 3.9 * U64, 9 * U64),
    ("float64", ANGLE64, "angle", U64, 1.5 * U64),
    ("float64", ANGLE32, "angle", U32, 1.3 * U32),
]


@pytest.mark.parametrize(("dtype", "grade", "what", "inside", "outside"), BOUNDS)
def test_each_grade_is_held_inside_its_bound_and_refused_outside(dtype, grade, what, inside, outside):
    options = {"dtype": DTYPES[dtype], "effort": "few", "grade": grade, "max_position": 4096}
    report = check_rotation(off_by(SMALL, **{what: inside}), SMALL, **options)
    assert report.verdict == "right", str(report)
    assert check_rotation(off_by(SMALL, **{what: outside}), SMALL, **options).verdict == "wrong"


PIPELINES = [  # dtype, angle, tables, product, precision; None is the dtype of x
    ("float16", np.float64, np.float64, np.float64, ONCE),
    ("float16", np.float64, None, None, TABLES),
    ("float16", np.float32, np.float32, np.float32, ANGLE32),
    ("float16", np.float32, None, None, BOTH),
    ("bfloat16", np.float64, np.float64, np.float64, ONCE),
    ("bfloat16", np.float64, None, None, TABLES),
    ("bfloat16", np.float32, np.float32, np.float32, ANGLE32),
    ("bfloat16", np.float32, None, None, BOTH),
    ("float32", np.float64, np.float64, np.float64, ONCE),
    ("float32", np.float64, np.float32, np.float32, TABLES),
    ("float32", np.float32, np.float32, np.float32, ANGLE32),
    ("float32", np.float16, np.float32, np.float32, None),
    ("float64", np.float64, np.float64, np.float64, ANGLE64),
    ("float64", np.float32, np.float32, np.float64, ANGLE32),
    ("float64", np.float64, np.float16, np.float64, None),
]


@pytest.mark.parametrize(("dtype", "angle", "tables", "product", "precision"), PIPELINES)
def test_a_pipeline_has_the_grade_that_its_dtypes_make(dtype, angle, tables, product, precision):
    fn = rotation(PLAIN, angle=angle, tables=tables, product=product)
    report = check_rotation(fn, PLAIN, dtype=DTYPES[dtype], effort="few")
    assert report.precision == precision, str(report)
    assert report.verdict == ("wrong" if precision is None else "right")
    better = [g for g in tolerance.APPLICABLE[dtype] if precision and g != precision][:1]
    if better and tolerance.APPLICABLE[dtype].index(precision):
        asked = check_rotation(fn, PLAIN, dtype=DTYPES[dtype], grade=better[0], effort="few")
        assert asked.faults == ("coarser than asked",)


# ── Attention: noise of the steps ────────────────────────────────────────────────────────────────────────────────────

# Bits inside and outside: six standard errors are allowed, three in the mean.
STEPS = [("bfloat16", 8, 5), ("float16", 11, 8), ("float32", 24, 16), ("float64", 53, 40)]


@pytest.mark.parametrize("step", ["weighed", "scored"])
@pytest.mark.parametrize(("dtype", "inside", "outside"), STEPS)
def test_a_step_of_attention_may_be_rounded_to_its_dtype_and_not_far_below(dtype, step, inside, outside):
    def judged(bits, **options):
        fn = by_hand.softmax_attention(**{step: lambda x: rounded(x, bits)})
        options |= {"heads": 2, "head_dim": 32, "dtype": DTYPES[dtype], "effort": "few"}
        return check_attention(lambda q, k, v: fn(q, k, v), **options)

    report = judged(inside)
    assert report.verdict == "right", str(report)
    assert judged(outside).verdict == "wrong"
    if inside < 24:
        assert judged(24).precision == "rounded once" != report.precision
        assert judged(inside, grade="rounded once").faults == (f"grade: {report.precision}",)


@pytest.mark.parametrize(("dtype", "inside", "outside"), [("bfloat16", 8, 4), ("float16", 11, 7), ("float32", 24, 14)])
def test_features_of_linear_attention_may_be_rounded_to_their_dtype_and_not_far_below(dtype, inside, outside):
    rope = Rope(32, 10000.0, "half")

    def judged(bits):
        fn = by_hand.linear_attention(rope, stored=lambda x: rounded(x, bits))
        return check_linear_attention(fn, rope=rope, heads=2, dtype=DTYPES[dtype], effort="few")

    report = judged(inside)
    assert report.verdict == "right", str(report)
    assert report.precision == ("features rounded" if inside < 24 else "the dtype's own")
    assert judged(outside).verdict == "wrong"


@pytest.mark.parametrize(("share", "verdict"), [(0.005, "right"), (1.0, "wrong")])
def test_an_error_that_one_number_may_have_not_all_may_have(share, verdict):
    """In bfloat16, between three standard errors, which the mean square may have, and six."""
    right = by_hand.softmax_attention()

    def fn(q, k, v):
        rng, out = np.random.default_rng(0), right(q.astype(np.float64), k, v)
        noise = 0.02 * rng.choice([-1, 1], out.shape) * (rng.random(out.shape) < share)
        return (out + noise * (np.abs(v.astype(np.float64)).max() > 1)).astype(q.dtype)

    assert check_attention(fn, heads=2, head_dim=32, dtype=DTYPES["bfloat16"], effort="few").verdict == verdict
