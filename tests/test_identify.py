"""`identify`: a rotation by hand goes in, and its rope comes out, as far as outputs can tell."""

import json

import by_hand
import numpy as np
import pytest
from by_hand import rotation
from hypothesis import example, given, settings, strategies as st
from strategies import DTYPES, ropes

from pyrope import Axes, DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN, identify

LAYOUTS = st.sampled_from(["half", "interleaved", "half-to-interleaved", "interleaved-to-half"])
ROPE = Rope(32, 10000.0, "half")


@st.composite
def plain_ropes(draw):
    """Of at least two pairs, by which layouts and bases can be told apart."""
    pairs, still = draw(st.integers(2, 24)), draw(st.sampled_from([0, 0, 2, 8]))
    base = draw(st.sampled_from([100.0, 10000.0, 500000.0, 1e6, 150000.0]))
    placement = draw(st.sampled_from(["prefix", "suffix"])) if still else "prefix"
    direction = draw(st.sampled_from([1, -1]))
    return Rope(2 * (pairs + still), base, draw(LAYOUTS), 2 * pairs, placement, direction=direction)


@settings(max_examples=80)
@given(
    rope=plain_ropes(),
    dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
    offset=st.sampled_from([0, 0, 1, -1, 7]),
)
@example(rope=Rope(42, 150000.0, "half"), dtype="float64", offset=7)
@example(rope=Rope(4, 1e6, "half"), dtype="float32", offset=0)
def test_a_rope_goes_in_and_comes_out(rope, dtype, offset):
    fn = rotation(rope)
    found = identify(lambda x, positions: fn(x, positions + offset), rope.head_dim, dtype=DTYPES[dtype])
    assert (found.layout, found.rotary_dim, found.placement) == (rope.layout, rope.width, rope.placement)
    assert (found.direction, found.offset) == (rope.direction, offset)
    assert found.attention_factor == pytest.approx(1, abs=2.0**-8)
    due, got, unsure = by_hand.theta(rope), np.array(found.frequencies), np.array(found.uncertainty)
    assert (np.abs(got - due) <= unsure + 2.0**-52 * due).all()  # each is a float64
    assert (unsure <= 0.01 * due).all()
    assert found.rope == rope, str(found)
    start = rope.head_dim - rope.width if rope.placement == "suffix" else 0
    pairs = start + np.array(by_hand.features(rope.layout.partition("-to-")[0], rope.width))
    assert found.pairs == tuple(map(tuple, pairs.T.tolist()))


@pytest.mark.parametrize("scaling", [
    Linear(4.0), Llama3(8.0, 1.0, 4.0, 8192), YaRN(8.0, 4096), YaRN(4.0, 32768, attention_factor=1.25),
    Proportional(0.25),
], ids=repr)  # fmt: skip
def test_a_rescaling_is_found_where_it_can_be_told(scaling):
    rope = Rope(128, 500000.0, "half", scaling=scaling)
    found = identify(rotation(rope), 128)
    assert found.rope == rope, str(found)


@pytest.mark.parametrize("base", [2.00001, 10000.01])
def test_a_base_of_few_digits_is_judged_by_what_was_measured(base):
    rope = Rope(64, base, "half")
    assert identify(rotation(rope), 64).rope == rope


def test_dynamic_ntk_is_told_as_the_larger_base_that_it_is():
    rope = Rope(128, 10000.0, "half", scaling=DynamicNTK(2.0, 4096, 16384))
    found = identify(rotation(rope), 128, max_position=16383)
    grown = 10000.0 * (2 * 16384 / 4096 - 1) ** (128 / 126)
    assert found.rope.base == pytest.approx(grown, rel=1e-4)
    assert "NTK" in found.explanations[0]


def test_longrope_is_named_if_it_is_suspected():
    scaling = LongRoPE((1.0,) * 8, (1.0, 1.5, 2.0, 3.0, 7.0, 9.0, 13.0, 20.0), 4.0, 4096, length=8192)
    rope = Rope(16, 10000.0, "half", scaling=scaling)
    alone, suspected = identify(rotation(rope), 16), identify(rotation(rope), 16, suspects=[ROPE, rope])
    assert alone.rope is None
    assert suspected.rope == rope
    assert suspected.attention_factor == pytest.approx(rope.attention_factor, rel=1e-6)


@pytest.mark.parametrize("axes", [Axes("sections", (4, 6, 6)), Axes("interleaved", (6, 5, 5)), Axes("axial"), Axes("pixtral"),
                                  Axes("listed", (0, 1, 0, 1) * 4), Axes("sections", (4, 6, 6), "own")], ids=repr)  # fmt: skip
def test_axes_are_read(axes):
    rope = Rope(32, 10000.0, "half", axes=axes)
    found = identify(rotation(rope), 32, axes=axes.count)
    assert found.axes == tuple(axis for axis, _ in axes.assign(16))
    rng = np.random.default_rng(0)
    x, at = rng.standard_normal((2, 30, 32)), rng.integers(0, 5000, (axes.count, 30))
    close = np.abs(rotation(found.rope)(x, at) - rotation(rope)(x, at)) <= 1e-9  # "listed" may be "interleaved"
    assert close.all()
    summed = identify(
        lambda x, positions: rotation(rope)(x, positions.sum(axis=0) + 0 * positions), 32, axes=axes.count
    )
    assert summed.rope is None and f"{'+'.join('012'[: axes.count])} × 16" in str(summed)


@settings(max_examples=60)
@given(rope=ropes(max_pairs=16), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_what_is_found_is_what_the_candidate_does(rope, dtype):
    axes = None if rope.axes is None else rope.axes.count
    top = max((getattr(rope.scaling, "length", None) or 10**6) - 1, 1)
    found = identify(rotation(rope), rope.head_dim, dtype=DTYPES[dtype], axes=axes, max_position=min(top, 131071))
    assert all(len(line) <= 80 for line in str(found).splitlines())
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["head_dim"] == rope.head_dim
    if found.rope is None or axes is not None:
        return
    due, got = by_hand.theta(rope), by_hand.theta(found.rope)[: len(by_hand.theta(rope))]
    if found.layout == rope.layout and found.rotary_dim == rope.width:
        unsure = np.array(found.uncertainty)
        coarse = 1e-5 if dtype in ("float32", "float64") else 2e-3  # a base of few digits is preferred in narrow dtypes
        assert (np.abs(got - due) <= 2 * unsure + coarse * due).all(), str(found)


@pytest.mark.parametrize(("at", "words"), [
    (lambda m: m // 2, "angles, up to position 1 only"),
    (lambda m: np.maximum(m - 5, 0), "angles, up to position 5 only"),
    (lambda m: m * (m > 100), "angles, up to position 95 only"),
    (lambda m: m * (m == 77), "no pair, in proportion to positions"),
])  # fmt: skip
def test_where_angles_are_in_proportion_to_positions_is_said(at, words):
    found = identify(lambda x, positions: rotation(ROPE)(x, at(positions)), 32)
    text = " ".join(str(found).split())
    assert words in text


def test_a_factor_and_a_part_that_stays_are_told():
    rope = Rope(32, 10000.0, "interleaved", 16, "suffix")
    found = identify(lambda x, positions: rotation(rope)(x, positions) * np.float32(1.5), 32)
    assert found.attention_factor == pytest.approx(1.5, rel=1e-6)
    still = identify(lambda x, positions: x * np.float32(-2.0), 32)
    assert (still.attention_factor, still.rope, still.pairs) == (-2.0, None, ())
    assert "no pair, in proportion to positions" in str(still)
    assert identify(lambda x, positions: x.copy(), 3).attention_factor == 1  # of an odd number of features

    def first(x, positions):
        return np.concatenate((rotation(ROPE)(x[..., :32], positions), x[..., 32:]), axis=-1)

    assert identify(first, 33).rotary_dim == 32


@pytest.mark.parametrize(("fn", "words"), [
    (lambda x, positions: x.cumsum(axis=-1, dtype=x.dtype), "output 31 is made from"),
    (lambda x, positions: rotation(ROPE)(x, positions) / np.abs(x).max(axis=-1, keepdims=True), "not linear in x"),
    (lambda x, positions: np.random.standard_normal(x.shape).astype(x.dtype), "not the same twice"),
    (lambda x, positions: rotation(ROPE)(x, np.minimum(positions, 1000)), "proportional: angles, up to position"),
    (lambda x, positions: rotation(ROPE)(x, positions) * np.exp(positions[:, None] * np.float32(1e-5)), "lengths: "),
    (lambda x, positions: np.where(positions[:, None] > 5000, np.float32(np.nan), rotation(ROPE)(x, positions)), "NaN or infinity comes out"),
])  # fmt: skip
def test_what_no_rope_does_is_said(fn, words):
    found = identify(fn, 32)
    assert any(words in note for note in found.notes), str(found)
    json.dumps(found.to_dict(), allow_nan=False)


def test_frequencies_of_no_rule_are_listed_and_not_named():
    w = np.sort(np.random.default_rng(3).uniform(0.001, 1, 16))[::-1]
    found = identify(rotation(ROPE, w=w), 32)
    assert found.rope is None
    assert (np.abs(np.array(found.frequencies) - w) <= found.uncertainty).all()


def test_grades_and_behaviour_are_told_too():
    assert identify(rotation(ROPE), 32).precision == "rounded once"
    f32 = identify(rotation(ROPE, angle=np.float32, tables=np.float32, product=np.float32), 32)
    assert f32.precision == "float32 angle"
    wide = identify(lambda x, positions: rotation(ROPE)(x, positions).astype(np.float64), 32)
    assert any(words.startswith("wrong dtype out") for words in wide.behaviour)


@pytest.mark.parametrize(("name", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_a_narrow_table_of_frequencies_is_named(name, bits):
    w = by_hand.rounded(by_hand.theta(ROPE), bits)
    assert identify(rotation(ROPE, w=w), 32).precision == f"all frequencies are {name} numbers"


@pytest.mark.parametrize(("error", "words", "options"), [
    (ValueError, "head_dim must be .*, was 0", {"head_dim": 0}),
    (ValueError, "axes must be .*, was 0", {"head_dim": 8, "axes": 0}),
    (ValueError, "max_position must be .*, was 0", {"head_dim": 8, "max_position": 0}),
    (TypeError, "suspects must be a list of ropes, was int", {"head_dim": 8, "suspects": 3}),
    (TypeError, "dtype must be one of", {"head_dim": 8, "dtype": "int8"}),
    (ValueError, "the candidate cannot be read: it raises ZeroDivisionError", {"head_dim": 8}),
])  # fmt: skip
def test_bad_arguments_are_refused_with_their_rule(error, words, options):
    with pytest.raises(error, match=words):
        identify(lambda x, positions: 1 / 0, **options)
