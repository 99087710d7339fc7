"""Frequencies: exact to the last bit against mpmath, the definition's checks, and its edge cases."""

import copy
import dataclasses
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import truth
from hypothesis import example, given
from strategies import ropes

import pyrope
from pyrope import Axes, DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN

HALF = {"head_dim": 8, "base": 10000.0, "layout": "half"}


@example(Rope(16, 10000.0, "half", scaling=Llama3(8.0, 1.0, 4.0, 64)))  # pairs that are kept, blended and divided
@example(Rope(**HALF, scaling=Proportional(0.5, 3.0)))
@example(Rope(**HALF, scaling=LongRoPE([1, 2, 3, 4], [5, 6, 7, 8], 2.0, 64, length=65)))
@given(ropes())
def test_frequencies_are_the_floats_nearest_to_the_truth(rope):
    assert pyrope.frequencies(rope).tolist() == [float(t) for t in truth.theta(rope)]  # Eq. (15)


@example(Rope(**HALF, scaling=YaRN(2.0, 64, attention_factor=2.0**20)))
@example(Rope(**HALF, scaling=YaRN(4.0, 64, mscale=0.7, mscale_all_dim=1.5)))
@example(Rope(**HALF, scaling=LongRoPE([1] * 4, [2] * 4, 2.0, 64, length=1)))
@given(ropes())
def test_attention_factor_is_the_float_nearest_to_the_truth(rope):
    assert rope.attention_factor == float(truth.attention_factor(rope))


@given(ropes())
def test_wavelengths_are_the_floats_nearest_to_the_truth(rope):
    expected = [float(2 * truth.MP.pi / t) if t else math.inf for t in truth.theta(rope)]
    assert pyrope.wavelengths(rope).tolist() == expected


@given(ropes())
def test_a_rope_is_a_value(rope):
    names = {name: getattr(pyrope, name) for name in dir(pyrope)}
    assert eval(repr(rope), names) == rope
    for twin in (copy.deepcopy(rope), pickle.loads(pickle.dumps(rope))):
        assert twin == rope and hash(twin) == hash(rope)
    with pytest.raises(AttributeError):
        rope.base = 2.0


def test_replacing_the_head_size_keeps_how_much_turns():
    assert dataclasses.replace(Rope(**HALF), head_dim=16) == Rope(16, 10000.0, "half")
    part = dataclasses.replace(Rope(**HALF, rotary_dim=6, placement="suffix"), head_dim=16)
    assert (part.width, part.pairs, part.start) == (6, 3, 10)


def test_the_decimal_settings_of_an_application_do_not_matter():
    code = (
        "import decimal as d; d.DefaultContext.traps[d.FloatOperation] = True; d.DefaultContext.rounding = d.ROUND_UP; d.DefaultContext.prec = 3;"
        "d.setcontext(d.DefaultContext.copy()); import pyrope; r = pyrope.Rope(128, 500000.0, 'half', scaling=pyrope.YaRN(4.0, 4096));"
        "print(pyrope.frequencies(r).tolist(), r.attention_factor, pyrope.cos_sin(2**31, r)[0].tolist())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rope = Rope(128, 500000.0, "half", scaling=YaRN(4.0, 4096))
    numbers = (pyrope.frequencies(rope).tolist(), rope.attention_factor, pyrope.cos_sin(2**31, rope)[0].tolist())
    assert run.stdout.strip() == " ".join(map(str, numbers))


def test_numbers_of_any_kind_mean_the_same_rope():
    assert Rope(np.int64(8), 10000, "half", 8, scaling=Linear(4)) == Rope(8, 1e4, "half", scaling=Linear(4.0))
    assert LongRoPE(np.ones(4), np.arange(1.0, 5.0), 2.0, 64) == LongRoPE([1] * 4, [1, 2, 3, 4], 2.0, 64)
    assert Axes("sections", np.array([1, 2, 1])) == Axes("sections", (1, 2, 1))
    assert Proportional(0.5) == Proportional(0.5, 1) and YaRN(4, 64) == YaRN(4.0, 64, 32, 1, truncate=True)


def test_at_fixes_the_length_and_leaves_other_ropes_alone():
    rope = Rope(**HALF, scaling=DynamicNTK(2.0, 100))
    assert not rope.theta_is_fixed and rope.at(5).theta_is_fixed and rope.at(5).at(7) == rope.at(7)
    assert Rope(**HALF).at(5) is not None and Rope(**HALF).at(5) == Rope(**HALF)


def test_yarn_whose_ramp_has_no_width_or_runs_backwards():
    # Both ends of the ramp fall on pair 0: it alone is kept, all others are interpolated.
    theta = pyrope.frequencies(Rope(**HALF, scaling=YaRN(factor=4.0, original_length=6)))
    assert theta.tolist() == [1.0, *(pyrope.frequencies(Rope(**HALF))[1:] / 4)]
    slow = pyrope.frequencies(Rope(8, 1.5, "half", scaling=YaRN(4.0, 10**6)))
    np.testing.assert_allclose(slow, pyrope.frequencies(Rope(8, 1.5, "half")) / 4, rtol=1e-15)


@pytest.mark.parametrize("scaling", [DynamicNTK(1e300, 64), LongRoPE([1] * 4, [2] * 4, 2.0, 64)], ids=str)
def test_up_to_the_original_length_nothing_changes(scaling):
    rope, plain = Rope(**HALF, scaling=scaling), pyrope.frequencies(Rope(**HALF)).tolist()
    assert pyrope.frequencies(rope.at(1)).tolist() == pyrope.frequencies(rope.at(64)).tolist() == plain
    assert pyrope.frequencies(Rope(**HALF, scaling=LongRoPE([1] * 4, [2] * 4, 2.0, 64, length=65)))[0] == 0.5


@given(ropes())
def test_pure_is_the_rotation_alone(rope):
    assert rope.rotation_only.attention_factor == 1.0 and rope.rotation_only.rotation_only == rope.rotation_only
    assert pyrope.frequencies(rope.rotation_only).tolist() == pyrope.frequencies(rope).tolist()
    assert (rope.rotation_only == rope) == (rope.attention_factor == 1.0)


@pytest.mark.parametrize(
    "axes, expected",
    [
        (Axes("sections", (1, 2, 1)), [(0, 0), (1, 1), (1, 2), (2, 3)]),
        (Axes("interleaved", (2, 1, 1)), [(0, 0), (1, 1), (2, 2), (0, 3)]),
        (Axes("interleaved", (2, 2)), [(0, 0), (1, 1), (0, 2), (1, 3)]),
        (Axes("listed", (1, 2, 0, 0)), [(1, 0), (2, 1), (0, 2), (0, 3)]),
        (Axes("axial"), [(0, 0), (0, 2), (1, 0), (1, 2)]),
        (Axes("pixtral"), [(0, 0), (0, 2), (1, 1), (1, 3)]),
    ],
)
def test_axes_assign_axis_and_frequency(axes, expected):
    assert axes.assign(4) == expected
    theta = pyrope.frequencies(Rope(**HALF))
    assert pyrope.frequencies(Rope(**HALF, axes=axes)).tolist() == [theta[i] for _, i in expected]


def test_axes_with_a_series_of_their_own():
    """Flux: 4 features for the first axis and 6 for each of the others, each with the frequencies of so wide a head."""
    axes = Axes("sections", (2, 3, 3), series="own")
    assert axes.assign(8) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    small, large = (pyrope.frequencies(Rope(d, 10000.0, "half")).tolist() for d in (4, 6))
    assert pyrope.frequencies(Rope(16, 10000.0, "interleaved", axes=axes)).tolist() == small + large + large
    halves = Axes("sections", (4, 4), series="own")
    expected = pyrope.frequencies(Rope(16, 10000.0, "half", axes=Axes("axial")))
    assert pyrope.frequencies(Rope(16, 10000.0, "half", axes=halves)).tolist() == expected.tolist()


BAD_ROPES = [
    (ValueError, "head_dim must be even, was 7", {"head_dim": 7}),
    (ValueError, "head_dim must be at least 1, was 0", {"head_dim": 0}),
    (TypeError, "head_dim must be an integer, was 8.0", {"head_dim": 8.0}),
    (ValueError, "rotary_dim must be even, was 3", {"rotary_dim": 3}),
    (ValueError, "rotary_dim must be at least 1, was 0", {"rotary_dim": 0}),
    (ValueError, "rotary_dim must be at most head_dim, 8, was 10", {"rotary_dim": 10}),
    (ValueError, "base must be finite and greater than 1 and at most 1e[+]12, was 1", {"base": 1}),
    (ValueError, "base must be .* was 1000000000000.1", {"base": 1e12 + 0.1}),
    (ValueError, "base must be finite", {"base": 10**400}),
    (TypeError, "base must be a number, was '10000'", {"base": "10000"}),
    (ValueError, "layout must be one of .* was None", {"layout": None}),
    (ValueError, "layout must be one of", {"layout": np.array(["half", "half"])}),
    (ValueError, r"'half-to-interleaved', was 'neox' \(did you mean 'half'\?\)", {"layout": "neox"}),
    (ValueError, r"was 'Interleaved' \(did you mean 'interleaved'\?\)", {"layout": "Interleaved"}),
    (ValueError, "placement must be one of 'prefix', 'suffix', was 'middle'$", {"placement": "middle"}),
    (ValueError, "direction must be one of 1, -1, was 0", {"direction": 0}),
    (ValueError, "direction must be one of 1, -1, was True", {"direction": True}),
    (TypeError, "scaling must be None, Linear, .* was 'yarn'", {"scaling": "yarn"}),
    (TypeError, "axes must be an Axes", {"axes": (0, 0, 1, 1)}),
    (ValueError, r"sections \(1, 1, 1\) must add up to the number of pairs, 4, but make 3", {"axes": Axes("sections", (1, 1, 1))}),
    (ValueError, "needs an even number of pairs, was 3", {"rotary_dim": 6, "axes": Axes("axial")}),
    (ValueError, "a series of their own take no scaling but Linear", {"axes": Axes("sections", (2, 2), series="own"), "scaling": YaRN(4.0, 64)}),
    (ValueError, "DynamicNTK needs a rotary width of at least 4", {"head_dim": 2, "scaling": DynamicNTK(2.0, 64)}),
    (ValueError, "Proportional spans all", {"rotary_dim": 4, "scaling": Proportional(0.5)}),
    (ValueError, "fraction, 0.1, lets no pair of 8 features turn", {"scaling": Proportional(0.1)}),
    (ValueError, r"attention factor must lie in \[2\^-20, 2\^20\], was inf", {"scaling": YaRN(1e10, 64, mscale=1e308, mscale_all_dim=1e-308)}),
    (ValueError, "short list must have one factor for each of 4 pairs, has 3", {"scaling": LongRoPE([1] * 3, [1] * 4, 1, 64)}),
    (ValueError, "long list must have one factor for each of 4 pairs, has 5", {"scaling": LongRoPE([1] * 4, [1] * 5, 1, 64)}),
]  # fmt: skip


@pytest.mark.parametrize("error, match, fields", BAD_ROPES, ids=[match for _, match, _ in BAD_ROPES])
def test_bad_ropes(fields, error, match):
    with pytest.raises(error, match=match):
        Rope(**(HALF | fields))


@pytest.mark.parametrize(
    "make, error, match",
    [
        (lambda: Linear(0.5), ValueError, "factor must be finite and at least 1, was 0.5"),
        (lambda: Linear(math.nan), ValueError, "factor must be finite and at least 1, was nan"),
        (lambda: Linear(None), TypeError, "factor must be a number, was None"),
        (lambda: DynamicNTK(2.0, 0), ValueError, "original_length must be at least 2, was 0"),
        (lambda: DynamicNTK(2.0, 2048, 0), ValueError, "length must be at least 1, was 0"),
        (lambda: YaRN(2.0, 2048, beta_fast=1.0, beta_slow=32.0), ValueError, "beta_fast must be at least beta_slow, 32, was 1"),
        (lambda: YaRN(2.0, 2048, beta_slow=0.0), ValueError, "beta_slow must be finite and greater than 0, was 0.0"),
        (lambda: YaRN(2.0, 2048, beta_fast=None), TypeError, "beta_fast must be a number"),
        (lambda: YaRN(2.0, 2048, attention_factor=0.0), ValueError, "attention_factor must be .* at most 1.04858e[+]06, was 0.0"),
        (lambda: YaRN(2.0, 2048, mscale=-1.0), ValueError, "mscale must be finite and at least 0, was -1.0"),
        (lambda: YaRN(2.0, 2048, truncate=1), TypeError, "truncate must be True or False, was 1"),
        (lambda: LongRoPE("1234", [1] * 4, 1.0, 64), TypeError, "short must be a list of numbers"),
        (lambda: LongRoPE([1, 0], [1, 1], 1.0, 64), ValueError, r"short\[1\] must be finite and greater than 0, was 0"),
        (lambda: Llama3(8.0, 4.0, 1.0, 8192), ValueError, "high must be at least low, 4, was 1"),
        (lambda: Proportional(0.0), ValueError, "fraction must be finite and greater than 0 and at most 1, was 0.0"),
        (lambda: Axes("spiral"), ValueError, "axes style must be one of 'sections', "),
        (lambda: Axes("axial", (2, 2)), ValueError, 'axes style "axial" takes no sections'),
        (lambda: Axes("sections", (4,)), ValueError, "takes at least two sections"),
        (lambda: Axes("listed", (0, 2, 2)), ValueError, r"must be 0, 1, … without a gap, were \[0, 2\]"),
        (lambda: Axes("axial", series="own"), ValueError, 'series="own" is for sections'),
        (lambda: Axes("sections", (2, 2), "each"), ValueError, "series must be one of 'shared', 'own'"),
        (lambda: Axes("sections", (5, -1)), ValueError, r"sections\[1\] must be at least 0, was -1"),
        (lambda: Axes("sections", 4), TypeError, "sections must be a list of integers"),
        (lambda: Rope(**HALF).at(0), ValueError, "length must be at least 1, was 0"),
    ],
)  # fmt: skip
def test_bad_scalings_axes_and_lengths(make, error, match):
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize("scaling", [DynamicNTK(2.0, 64), LongRoPE([1] * 4, [2] * 4, 2.0, 64)])
def test_an_unresolved_length_is_refused_everywhere(scaling):
    rope, x = Rope(**HALF, scaling=scaling), np.ones((1, 8))
    for call in (
        lambda: pyrope.frequencies(rope), lambda: pyrope.wavelengths(rope), lambda: pyrope.cos_sin([0], rope),
        lambda: pyrope.rotate(x, [0], rope), lambda: pyrope.rotation_tables([0], rope, x),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"depend on the length: fix it first with rope.at\(length\)"):
            call()


def test_what_is_no_rope():
    with pytest.raises(TypeError, match="rope must be a Rope, was dict"):
        pyrope.frequencies({"head_dim": 8})


@pytest.mark.parametrize("beta, end", [(1 / 1024, 6), (1e-7, 7)])
def test_a_ramp_of_yarn_may_end_beyond_the_last_pair(beta, end):
    """r = 8 has pairs 0 to 3; the ramp from pair 2 to pair 6, or to where it is cut, r − 1 = 7: pair 3 is in it."""

    def pair(turns):
        return 8 * math.log(2**10 / (2 * math.pi * turns)) / (2 * math.log(10000))

    first, share = math.floor(pair(1.0)), 1 / (end - 2)
    assert first == 2 and min(math.ceil(pair(beta)), 7) == end
    rope = Rope(8, 10000.0, "half", scaling=YaRN(4.0, 2**10, beta_fast=1.0, beta_slow=beta))
    expected = [1.0, 0.1, 0.01, 0.001 * (1 - share + share / 4)]
    np.testing.assert_allclose(pyrope.frequencies(rope), expected, rtol=1e-15)


def test_frequencies_are_refused_just_outside_of_what_phases_are_exact_for():
    """[2⁻⁵³, 2²⁰], both ends included: a factor of LongRoPE divides the first frequency, which is 1."""

    def first(factor):
        lists = [factor, 1.0], [factor, 1.0]
        return pyrope.frequencies(Rope(4, 10000.0, "half", scaling=LongRoPE(*lists, 2.0, 64, length=64)))[0]

    assert first(2.0**-20) == 2.0**20 and first(2.0**53) == 2.0**-53
    for beyond in (np.nextafter(2.0**-20, 0), np.nextafter(2.0**53, 2.0**60)):
        with pytest.raises(ValueError, match=r"frequency 0 is .* outside \[2\^-53, 2\^20\]"):
            first(float(beyond))
