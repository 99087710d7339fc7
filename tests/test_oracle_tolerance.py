"""The bounds hold for pipelines that deserve their grade, and bite for those that do not."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from optional import Dtypes, package
from oracle_cases import DTYPES, by_the_sample_alone, right, ropes

import pyrope
from pyrope import DynamicNTK, Linear, Rope, YaRN, check_rotation
from pyrope.oracle import tolerance
from pyrope.oracle.probe import Probe
from pyrope.oracle.recipes import recipe_of
from pyrope.oracle.sample import error_ratios, take_sample
from pyrope.oracle.tolerance import ANGLE32, ANGLE64, BOTH, LOW_TABLES, ONCE, U32, angle_bound, grades, theta_bound
from pyrope.oracle.truth import rotated

mpmath = package("mpmath")

ALL = Dtypes(**DTYPES, float64=np.float64)


def ratios(rope, fn, dtype):
    probe = Probe(fn, rope.head_dim, dtype, None)
    return {grade: float(r.max()) for grade, r in error_ratios(take_sample(probe, rope), rope, probe.dtype).items()}


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("rope", ropes(64), ids=repr)
def test_every_pipeline_keeps_the_bound_of_its_grade(rope, dtype):
    wide = np.dtype(ALL[dtype]).itemsize
    grade = {"rounded once": ONCE if wide < 8 else LOW_TABLES, "engine": ONCE if wide == 2 else LOW_TABLES,
             "float32 angle": ANGLE32 if wide < 8 else ANGLE64,
             "low tables": {2: BOTH, 4: ANGLE32, 8: ANGLE64}[wide]}  # fmt: skip
    for kind, fn in right(rope).items():
        assert ratios(rope, fn, ALL[dtype])[grade[kind]] <= 1, kind


@pytest.mark.parametrize(("dtype", "kind", "too_good"), [
    ("bfloat16", "low tables", ANGLE32), ("bfloat16", "float32 angle", LOW_TABLES), ("float16", "low tables", ANGLE32),
    ("float16", "float32 angle", LOW_TABLES), ("float32", "float32 angle", LOW_TABLES), ("float32", "engine", ONCE),
    ("float64", "float32 angle", LOW_TABLES),
])  # fmt: skip
def test_no_pipeline_keeps_a_better_one(dtype, kind, too_good):
    rope = Rope(64, 10000.0, "half")
    assert ratios(rope, right(rope)[kind], ALL[dtype])[too_good] > 1


def test_bounds_are_not_loose():
    """A rounding to nearest uses up the bound of one rounding; twice its error breaks it."""
    rope = Rope(64, 10000.0, "half")
    for dtype in DTYPES.values():
        assert 0.95 < ratios(rope, right(rope)["rounded once"], dtype)[ONCE] <= 1


def test_the_truth_is_the_truth():
    """Against 40 digits, without pyrope's phases."""
    rope, m = Rope(8, 500000.0, "interleaved", 4, "suffix", direction=-1), 98765
    x = np.random.default_rng(0).standard_normal((1, 1, 8))
    turned = rotated(x, np.array([m]), rope)[0, 0]
    np.testing.assert_array_equal(turned[:4], x[0, 0, :4])
    with mpmath.workdps(40):
        for i, theta in enumerate((mpmath.mpf(1), mpmath.mpf(500000) ** (-mpmath.mpf(1) / 2))):
            z = mpmath.mpc(*x[0, 0, 4 + 2 * i : 6 + 2 * i]) * mpmath.expj(-m * theta)
            np.testing.assert_allclose(turned[4 + 2 * i : 6 + 2 * i], (float(z.real), float(z.imag)), rtol=1e-14)


@pytest.mark.parametrize("rope", [r for r in ropes(128) if isinstance(r.scaling, Linear | None)], ids=repr)
def test_float32_frequencies_keep_their_bound(rope):
    """The usual float32 formula; the rescaled ones are held against transformers' own in tests/peers."""
    r = rope.width
    theta = 1 / np.float32(rope.base) ** (np.arange(0, r, 2, dtype=np.float32) / np.float32(r))
    theta = theta / np.float32(getattr(rope.scaling, "factor", 1))
    off = np.abs(theta.astype(np.float64) / pyrope.frequencies(rope) - 1)
    assert (off <= theta_bound(rope)).all() and off[0] == 0


def test_an_exact_first_angle_is_allowed_no_error():
    assert angle_bound(Rope(64, 10000.0, "half"))[0] == 0
    assert angle_bound(Rope(64, 10000.0, "half", scaling=YaRN(4.0, 4096)))[0] == 0  # kept by the ramp
    assert angle_bound(Rope(64, 10000.0, "half", scaling=Linear(4.0)))[0] == 0
    assert angle_bound(Rope(64, 10000.0, "half", scaling=Linear(3.0)))[0] > 4 * U32


def test_a_length_in_float32_grows_the_bound_of_dynamic_ntk():
    rope = Rope(128, 10000.0, "half", scaling=DynamicNTK(64.0, 4096, 4097))
    assert theta_bound(rope, tensor_length=True)[-1] > 10 * theta_bound(rope)[-1]


def test_beyond_a_turn_nothing_is_decided():
    rope = Rope(64, 10000.0, "half")
    limit = tolerance.decides_up_to(rope)
    error = pyrope.frequencies(rope) * angle_bound(rope)
    assert (error * limit).max() <= np.pi < (error * (limit + 1)).max()
    fn = right(rope)["engine"]
    note = pyrope.check_rotation(fn, rope, max_position=4 * limit).notes[0]
    assert f"beyond position {limit}" in note
    assert not pyrope.check_rotation(fn, rope).notes


def test_grades_are_known():
    assert all(set(grades(np.dtype(dtype))) <= set(tolerance.GRADES) for dtype in ALL.values())


def by_logarithm(rope, divided):
    """θ in float32 by exp(−i·(ln base/p)), or exp(−(i/p)·ln base)."""
    p, log = np.float32(rope.pairs), np.log(np.float32(rope.base))
    i = np.arange(rope.pairs, dtype=np.float32)
    return np.exp(-i * (log / p) if divided else -(i / p) * log)


@pytest.mark.parametrize("base", [100.0, 10000.0, 100000.0, 500000.0, 1e6, 1e7])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_frequencies_by_a_logarithm_are_right(base, head_dim):
    """As good as logarithms can be in float32, they are within their bound, often beyond that of a power; right."""
    rope = Rope(head_dim, base, "half")
    for divided in (True, False):
        theta = by_logarithm(rope, divided)
        off = np.abs(theta / pyrope.frequencies(rope) - 1)
        assert (off <= theta_bound(rope, logarithm=True)).all()
        for dtype in ALL.values():
            fn = replace(recipe_of(rope), theta=theta.astype(np.float64)).candidate()
            with contextlib.nullcontext() if (head_dim, base) == (64, 10000.0) else by_the_sample_alone():
                report = check_rotation(fn, rope, dtype=dtype)
            assert report.verdict == "right", report
            beyond = (off[1:] > angle_bound(rope)[1:]).any()
            assert any("float32 logarithm" in note for note in report.notes) <= beyond


@pytest.mark.parametrize(("share", "verdict"), [(0.5, "right"), (0.95, "right"), (1.3, "wrong")])
def test_the_bound_of_a_logarithm_is_where_right_ends(share, verdict):
    """Frequencies off by a share of what is allowed, before they are rounded: 55 u where a power has 17."""
    rope = Rope(64, 500000.0, "half")
    off = share * (theta_bound(rope, logarithm=True) - U32) * np.where(np.arange(32) % 2, 1, -1)
    off[0] = 0
    fn = replace(recipe_of(rope), theta=pyrope.frequencies(rope) * (1 + off)).candidate()
    report = check_rotation(fn, rope)
    assert report.verdict == verdict
    note = "the frequencies are worse than by a float32 power, and as good as by a float32 logarithm"
    assert (note in report.notes) == (verdict == "right")


@pytest.mark.parametrize("ulps", [-1, 0, 1])
@pytest.mark.parametrize("dtype", ALL)
def test_a_running_product_is_named_where_a_logarithm_is_as_bad(dtype, ulps):
    rope, step = Rope(128, 10000.0, "half"), np.float32(10000.0 ** (-1 / 64))
    theta = np.ones(64, np.float32)
    for i in range(1, 64):
        theta[i] = theta[i - 1] * (step + ulps * np.spacing(step))
    report = check_rotation(
        replace(recipe_of(rope), theta=theta.astype(np.float64)).candidate(), rope, dtype=ALL[dtype]
    )
    beyond = (np.abs(theta / pyrope.frequencies(rope) - 1) > 1.5 * angle_bound(rope)).any()
    assert report.faults == (("recursive frequencies",) if beyond else ())
    assert beyond or ulps


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("top", [2**24, 2**25, 2**31 - 1])
def test_a_position_above_2_24_may_be_rounded_to_float32(dtype, top):
    for rope in (
        Rope(64, 10000.0, "half"),
        Rope(2, 10000.0, "interleaved"),
        Rope(64, 1e6, "half", scaling=Linear(4.0)),
    ):
        theta = pyrope.frequencies(rope).astype(np.float32)

        def fn(x, m, theta=theta, rope=rope):
            angle = m.astype(np.float32)[:, None] * theta
            return recipe_of(rope).apply(x.astype(np.float32), np.cos(angle), np.sin(angle)).astype(x.dtype)

        with contextlib.nullcontext() if top == 2**25 else by_the_sample_alone():
            report = check_rotation(fn, rope, dtype=ALL[dtype], max_position=top)
        assert report.verdict == "right", report


def test_what_decides_one_pair_is_the_rounding_of_the_position():
    assert tolerance.decides_up_to(Rope(2, 10000.0, "half")) == int(np.pi * 2**24)


@pytest.mark.parametrize("rope", [Rope(64, 10000.0, "half"), Rope(64, 10000.0, "interleaved", 32)], ids=repr)
def test_float64_computed_in_float32_is_judged_by_its_grade(rope):
    report = check_rotation(
        lambda x, m: right(rope)["low tables"](x.astype(np.float32), m).astype(x.dtype), rope, dtype=np.float64
    )
    assert (report.verdict, report.precision) == ("right", ANGLE32)
    assert not check_rotation(
        lambda x, m: pyrope.rotate(x.astype(np.float16), m, rope).astype(x.dtype), rope, dtype=np.float64
    ).ok


@pytest.mark.parametrize(("dtype", "bits", "verdict"), [
    ("float16", 15, "right"), ("float16", 11, "wrong"), ("bfloat16", 12, "right"), ("bfloat16", 8, "wrong"),
])  # fmt: skip
def test_tables_in_fixed_point_beside_narrow_numbers(dtype, bits, verdict):
    """Whose sines near 0 are worse than those of the dtype, and all others better; up to sixteen times its grain."""

    def fixed(x, positions):
        angle, steps = positions[:, None] / 10000.0 ** (np.arange(32) / 32), 2.0**bits
        cos, sin = np.rint(np.cos(angle) * steps) / steps, np.rint(np.sin(angle) * steps) / steps
        a, b = np.split(x.astype(np.float64), 2, axis=-1)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(x.dtype)

    assert pyrope.check_rotation(fixed, pyrope.Rope(64, 10000.0, "half"), dtype=DTYPES[dtype]).verdict == verdict
