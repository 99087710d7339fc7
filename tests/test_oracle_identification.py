"""A rope that is hidden in a black box is read out of it; what cannot be told apart is said to be so."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from oracle_cases import DTYPES, right, ropes
from strategies import dtypes, ropes as any_rope

import pyrope
from pyrope import DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN, frequencies, identify
from pyrope.oracle.floats import to_bfloat16, to_float16
from pyrope.oracle.measure import find_pairs, measure
from pyrope.oracle.probe import Probe, probe_positions
from pyrope.oracle.recipes import recipe_of
from pyrope.oracle.rules import rounded

PLAIN = [
    Rope(64, 10000.0, "half"),
    Rope(64, 500000.0, "interleaved", 32, "suffix", direction=-1),
    Rope(128, 1e6, "interleaved-to-half"),
    Rope(128, 10000.0, "half", 32),
    Rope(64, 10000.0, "half", scaling=Linear(4.0)),
    Rope(128, 10000.0, "half", scaling=YaRN(4.0, 4096)),
    Rope(128, 1e6, "half", scaling=YaRN(4.0, 32768, truncate=False)),
    Rope(128, 500000.0, "half", scaling=Llama3(8.0, 1.0, 4.0, 8192)),
    Rope(128, 500000.0, "interleaved", scaling=Llama3(32.0, 1.0, 4.0, 8192)),
    Rope(128, 1e6, "half", scaling=Proportional(0.25)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["engine", "float32 angle", "low tables"])
@pytest.mark.parametrize("rope", PLAIN, ids=repr)
def test_ropes_are_identified_without_being_told(rope, kind, dtype):
    found = identify(right(rope)[kind], rope.head_dim, dtype=DTYPES[dtype])
    assert found.rope == rope
    assert found.offset == 0 and found.behaviour == () and len(found.explanations) == 1
    expected = {"engine": ("rounded once", "tables or products in x's dtype"), "float32 angle": ("float32 angle",),
                "low tables": ("float32 angle, and tables or products in x's dtype", "float32 angle")}  # fmt: skip
    assert found.precision in expected[kind]


@pytest.mark.parametrize("rope", ropes(64), ids=repr)
def test_every_frequency_lies_within_its_uncertainty(rope):
    for dtype in DTYPES.values():
        found = identify(right(rope)["rounded once"], 64, dtype=dtype)
        theta = frequencies(rope)[frequencies(rope) > 0]
        np.testing.assert_array_less(np.abs(found.frequencies - theta), 2 * np.array(found.uncertainty) + 1e-15)
        assert found.direction == rope.direction
        assert found.attention_factor == pytest.approx(rope.attention_factor, rel=2e-3)


@pytest.mark.parametrize("offset", [1, -1, 17, -300, 5000])
def test_offsets_are_whole_numbers(offset):
    rope = Rope(64, 10000.0, "half")
    found = identify(replace(recipe_of(rope), place=lambda m: m + offset).candidate(), 64)
    assert found.offset == offset and found.rope == rope


def test_what_cannot_be_told_apart_is_said():
    one = identify(right(Rope(2, 500000.0, "half"))["engine"], 2)
    assert "base does not show" in one.explanations[0] and one.rope is None
    ntk = Rope(64, 10000.0, "half", scaling=DynamicNTK(2.0, 4096, 8192))
    grown = identify(right(ntk)["engine"], 64)
    assert "NTK scaling of a smaller base, at a fixed length, is the same" in grown.explanations[0]
    np.testing.assert_allclose(frequencies(grown.rope), frequencies(ntk), rtol=1e-5)
    linear = identify(right(Rope(64, 10000.0, "half", scaling=Linear(4.0)))["engine"], 64)
    assert "rotated twice with linear factor 8 is the same" in linear.explanations[0]
    twice = identify(
        replace(recipe_of(Rope(64, 10000.0, "half")), theta=2 * frequencies(Rope(64, 10000.0, "half"))).candidate(), 64
    )
    assert "as if rotated 2 times" in twice.explanations[0]
    yarn = identify(right(Rope(128, 10000.0, "half", scaling=YaRN(4.0, 5000, 20.0, 2.0)))["engine"], 128)
    assert (
        "ramp from pair" in yarn.explanations[0]
        and "show in nothing else" in yarn.explanations[0]
        and yarn.rope is None
    )


def test_lengths_that_make_the_same_ramp_are_all_told():
    """With few pairs the rounded ends of a ramp are those of several lengths."""
    rope = Rope(16, 10000.0, "half", scaling=YaRN(8.0, 4096))
    (words,) = identify(right(rope)["engine"], 16).explanations
    assert words.endswith("as with betas 32 and 1, original length 2048 or 4096")


@pytest.mark.parametrize("base", [1234.5, 283461.0, 1638400.0, 11158840.0])
def test_bases_of_many_digits(base):
    for dtype in (np.float32, np.float64):
        rope = Rope(64, base, "half")
        for kind in ("engine", "float32 angle"):
            found = identify(right(rope)[kind], 64, dtype=dtype)
            assert found.rope == rope and not found.precision.startswith("cannot tell")


def test_a_base_that_is_no_short_number():
    base = 10000.0 * 1000 ** (64 / 62)
    found = identify(right(Rope(64, base, "half"))["engine"], 64, dtype=np.float64)
    assert found.rope.base == pytest.approx(base, rel=1e-12)
    assert found.precision == "cannot tell: the base is not a round number, so its last digits are unknown"


def test_longrope_is_named_only_if_suspected():
    lists = [1 + 0.01 * i for i in range(32)], [1 + i * i % 7 for i in range(32)]
    rope = Rope(64, 10000.0, "half", scaling=LongRoPE(*lists, 16.0, 4096, length=65536))
    unknown = identify(right(rope)["engine"], 64)
    assert unknown.rope is None and "none of these" in unknown.explanations[0]
    assert "no rope has exactly these numbers" in unknown.precision
    other = replace(rope, scaling=replace(rope.scaling, length=4096))
    assert identify(right(rope)["engine"], 64, suspects=[other, rope]).rope == rope


def test_what_is_no_rotation_is_said():
    sign = identify(
        replace(recipe_of(Rope(64, 10000.0, "half")), block=(("cos", "sin"), ("sin", "cos"))).candidate(), 64
    )
    assert sign.rope is None and any("no rotation" in note for note in sign.notes)
    still = identify(lambda x, positions: x.copy(), 64)
    assert still.rotary_dim == 0 and "nothing" in str(still)
    mixed = identify(lambda x, positions: x[..., ::-1] + x, 64)
    assert mixed.rope is None


def test_phases_that_are_not_proportional_are_said():
    rope = Rope(64, 10000.0, "half")
    found = identify(replace(recipe_of(rope), place=lambda m: m % 1024).candidate(), 64)
    assert "up to 1023 only" in found.notes[0]
    np.testing.assert_allclose(found.frequencies, frequencies(rope), rtol=1e-2)


@pytest.mark.parametrize(("name", "rounding"), [("bfloat16", to_bfloat16), ("float16", to_float16)])
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_frequencies_betray_the_dtype_they_were_kept_in(name, rounding, base):
    rope = Rope(128, base, "half")
    found = identify(replace(recipe_of(rope), round_theta=rounding).candidate(), 128)
    assert found.precision == f"low-precision angle: all frequencies are {name} numbers"
    assert found.rope == rope


def test_powers_of_two_betray_nothing():
    rope = Rope(32, 65536.0, "half")
    found = identify(right(rope)["engine"], 32)
    assert found.rope == rope and found.precision == "tables or products in x's dtype"


def test_a_quarter_turn_at_position_0_is_told():
    found = identify(
        replace(recipe_of(Rope(64, 10000.0, "half")), block=(("sin", "-cos"), ("cos", "sin"))).candidate(), 64
    )
    assert any("at position 0 pairs are turned" in note for note in found.notes)


def test_behaviour_is_told():
    def fn(x, positions):
        y = pyrope.rotate(x, positions, Rope(64, 10000.0, "half"))
        y[..., 1:, :, :] = x[..., 1:, :, :]
        return y

    found = identify(fn, 64)
    assert any("only the first head rotated" in words for words in found.behaviour)
    assert found.rope == Rope(64, 10000.0, "half")  # read from the first head


def test_a_candidate_that_fails_is_an_error():
    with pytest.raises(ValueError, match="the candidate cannot be read: it raises IndexError"):
        identify(lambda x, positions: x * np.arange(10)[positions, None], 64)
    with pytest.raises(TypeError, match="rope must be a Rope"):
        identify(right(PLAIN[0])["engine"], 64, suspects=["llama"])


@given(any_rope(with_axes=False), dtypes, st.sampled_from([None, 1, 7, 300, 4095]))
def test_any_rope_gives_words_and_json(rope, dtype, max_position):
    found = identify(right(rope)["engine"], rope.head_dim, dtype=dtype, max_position=max_position)
    assert max(map(len, str(found).splitlines())) <= 80
    json.dumps(found.to_dict())
    if rope.width > 2 and max_position is None and found.rope is not None and dtype.itemsize > 2:
        assert found.layout == rope.layout
        np.testing.assert_allclose(
            frequencies(found.rope)[: len(found.frequencies)], found.frequencies,
            atol=8 * max(found.uncertainty), rtol=1e-4,
        )  # fmt: skip


@settings(max_examples=20)
@given(any_rope(with_axes=False))
def test_measured_pairs_are_those_of_the_rope(rope):
    probe = Probe(right(rope)["engine"], rope.head_dim, np.float64, None)
    at = probe_positions(131071)
    operator = probe.operator(at)
    recipe, farthest = recipe_of(rope), frequencies(rope) * 131071
    turning = farthest > 1e-9  # what is seen to turn; whether more was seen of one in between is left to rounding
    assume(not ((farthest > 0.9e-9) & (farthest < 1.1e-9)).any())
    pairs = find_pairs(operator)
    np.testing.assert_array_equal(pairs.reads, recipe.reads[turning])
    if "-to-" not in rope.layout or turning.all():
        np.testing.assert_array_equal(pairs.writes, recipe.writes[turning])
    fast = frequencies(rope)[turning] < 3
    if fast.all():  # faster ones cannot be told from slower ones at whole positions
        np.testing.assert_allclose(
            measure(operator, at, 2.0**-53).theta, frequencies(rope)[turning], rtol=1e-6, atol=1e-15
        )


@pytest.mark.parametrize(
    ("value", "tolerance", "short"),
    [(9999.7, 1e-3, 1e4), (500012.0, 1e-3, 5e5), (30527.8, 1e-6, 30527.8), (1.277, 1e-5, 1.277)],
)
def test_rounded_takes_the_fewest_digits(value, tolerance, short):
    assert rounded(value, tolerance) == short


@pytest.mark.parametrize("factor", [0.0, 1.0, 2.0, -3.0])
def test_x_times_a_number_is_told_with_the_number(factor):
    found = identify(lambda x, m: x * x.dtype.type(factor), 16)
    assert found.multiple and found.attention_factor == factor and not found.pairs
    assert "every position returns x times a number" in str(found) and f"factor      {factor:g}\n" in str(found)


@pytest.mark.parametrize("made", ["random", "diagonal", "by position"])
def test_only_a_number_is_called_a_number(made):
    matrix = {"random": np.random.default_rng(0).standard_normal((16, 16)), "diagonal": np.diag(np.arange(16.0))}

    def fn(x, m):
        return (x @ matrix[made] if made in matrix else x * (1.0 + m[:, None])).astype(x.dtype)

    found = identify(fn, 16)
    assert not found.multiple and "times a number" not in str(found).split("precision")[0]


@pytest.mark.parametrize("base", [10000.0, 500000.0, 1e6])
@pytest.mark.parametrize("top", [15, 31, 127, 511])
@pytest.mark.parametrize("size", [64, 128])
def test_low_precision_and_a_short_cache_leave_a_common_base(base, top, size):
    rope = Rope(size, base, "half")
    found = identify(recipe_of(rope).candidate(), size, dtype=DTYPES["bfloat16"], max_position=top)
    assert found.rope == rope and f"base {base:g} ± " in found.explanations[0]


def test_what_is_said_of_a_base_holds():
    for base in (10010.0, 12345.0, 20000.0, 77777.0):
        for top in (15, 127, 2047):
            found = identify(
                recipe_of(Rope(64, base, "half")).candidate(), 64, dtype=DTYPES["bfloat16"], max_position=top
            )
            told, *within = found.explanations[0].removeprefix("base ").split(",")[0].split(" ± ")
            assert abs(float(told) - base) <= (float(within[0]) if within else 5e-5 * base)


def test_an_offset_is_no_reason_not_to_grade():
    rope = Rope(64, 10000.0, "half")
    for offset in (1, -1, 7):
        found = identify(
            lambda x, m, offset=offset: pyrope.rotate(x.astype(np.float64), m + offset, rope).astype(x.dtype), 64
        )
        assert (found.rope, found.offset, found.precision) == (rope, offset, "rounded once")
    assert "offset      1 position\n" in str(identify(lambda x, m: pyrope.rotate(x, m + 1, rope), 64))


def test_a_base_that_is_nearly_a_usual_one_is_not_taken_for_it():
    assert identify(right(Rope(128, 9999.9, "half"))["engine"], 128).rope.base == pytest.approx(9999.9, abs=0.01)


def test_suspects_are_a_list():
    with pytest.raises(TypeError, match="suspects must be a list of ropes, was Rope"):
        identify(right(Rope(64, 10000.0, "half"))["engine"], 64, suspects=Rope(64, 10000.0, "half"))


@pytest.mark.parametrize("factor", [4.1829, 2.71828, 1.00021])
def test_factors_of_many_digits(factor):
    rope = Rope(64, 500000.0, "half", scaling=Linear(factor))
    found = identify(lambda x, m: pyrope.rotate(x, m, rope), 64)
    assert found.rope == rope and f"linear scaling by {factor:g} " in found.explanations[0], found


@pytest.mark.parametrize("scaling", [YaRN(128.0, 8192), YaRN(40.0, 4096)])
def test_factors_in_bfloat16_are_given_with_their_uncertainty(scaling):
    rope = Rope(64, 10000.0, "half", scaling=scaling)
    found = identify(lambda x, m: pyrope.rotate(x, m, rope), 64, dtype=DTYPES["bfloat16"], max_position=4095)
    (number, off) = re.search(r"(?:factor|scaling by) ([\d.]+) ± ([\d.]+)", found.explanations[0]).groups()
    assert abs(float(number) - scaling.factor) <= float(off) <= 0.1 * scaling.factor, found


def xpos(x, m, sign=1, scale=512):
    """As torchscale has it, for queries (+1) or keys (-1), with m counted from 0."""
    half = x.shape[-1] // 2
    zeta = (np.arange(0, 2 * half, 2) + 0.4 * 2 * half) / (1.4 * 2 * half)
    angle = m[:, None] * (1.0 / 10000 ** (np.arange(half) / half))
    grown = zeta ** (sign * m[:, None] / scale)
    cos, sin = np.cos(angle) * grown, np.sin(angle) * grown
    out, a, b = np.empty_like(x), x[..., ::2].astype(float), x[..., 1::2].astype(float)
    out[..., ::2], out[..., 1::2] = a * cos - b * sin, b * cos + a * sin
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sign", [1, -1])
def test_xpos_is_named(sign, dtype):
    fn = lambda x, m: xpos(x, m, sign)  # noqa: E731
    found = identify(fn, 64, dtype=DTYPES[dtype], max_position=4095)
    assert found.layout == "interleaved" and "xPos" in " ".join(found.notes) and not found.behaviour, found
    assert found.attention_factor == 1.0 and found.rope == Rope(64, 10000.0, "interleaved")
    report = pyrope.check_rotation(fn, found.rope, dtype=DTYPES[dtype], max_position=4095)
    assert report.faults == ("lengths grow with the position",), report
    assert f"as in xPos, ζ^({'−' * (sign < 0)}m/512)" in report.findings[0].evidence


@pytest.mark.parametrize("factor", [3.14159265, 2.345678, 4.1829, 3.1416, 3.0])
def test_a_linear_factor_has_all_digits_that_were_measured(factor):
    """Of fewer the candidate would seem to be imprecise."""
    rope = Rope(32, 10000.0, "half", scaling=Linear(factor))
    read = identify(lambda x, m: pyrope.rotate(x, m, rope), 32)
    assert read.rope == rope and f"linear scaling by {factor:.9g} " in read.explanations[0]
    assert read.precision == "tables or products in x's dtype"


def test_the_last_digits_of_a_linear_factor_are_not_held_against_a_candidate():
    rope = Rope(32, 10000.0, "half", scaling=Linear(math.pi))
    read = identify(lambda x, m: pyrope.rotate(x, m, rope), 32)
    assert read.rope is not None and abs(read.rope.scaling.factor - math.pi) < 1e-9
    assert read.precision == "cannot tell: the factor is not a round number, so its last digits are unknown"
