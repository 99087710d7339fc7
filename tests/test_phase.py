"""cos and sin against mpmath: at any position, near their zeros, in every dtype; cost in memory; the same bits everywhere."""

import hashlib
import math

import numpy as np
import pytest
import truth
from hypothesis import given, strategies as st
from memory import little_memory
from optional import package
from strategies import DTYPES, dtypes, position_arrays, ropes

import pyrope
from pyrope import Axes, Linear, Rope, YaRN
from pyrope.checks import MAX_POSITION

ml_dtypes = package("ml_dtypes")

BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
LEAST = {"float64": -1074, "float32": -149, "float16": -24, "bfloat16": -133}  # exponents of the smallest subnormals


def ulps(got, true, dtype) -> float:
    """The error of a number in units of the last place of the true value."""
    exponent = truth.MP.frexp(true)[1] if true else -(10**6)
    unit = truth.MP.ldexp(1, max(exponent - BITS[dtype.name], LEAST[dtype.name]))
    return float(abs(truth.MP.mpf(float(got)) - true) / unit)


def bound(rope, dtype) -> float:
    if dtype.name == "float64":
        return 1.0 if truth.attention_factor(rope) == 1 else 2.5
    return 0.5 + 2.0**-27


def check(rope, m, dtype=DTYPES["float64"]):
    """Every entry of the table of one position lies within the promised bound."""
    for got, true in zip(pyrope.cos_sin(m, rope, dtype), truth.cos_sin(rope, m), strict=True):
        assert got.dtype == dtype
        for i, (g, t) in enumerate(zip(got.tolist(), true, strict=True)):
            assert ulps(g, t, dtype) <= bound(rope, dtype), f"pair {i}: {g!r}, true {truth.MP.nstr(t, 25)}"


@given(st.data(), dtypes)
def test_any_position_any_rope_any_dtype(data, dtype):
    rope = data.draw(ropes())
    check(rope, data.draw(position_arrays(rope, ())), dtype)


@given(ropes(with_axes=False), st.data())
def test_near_the_zeros_of_sin_and_cos(rope, data):
    # Convergents of θ/(π/2) give the positions that come nearest to a multiple of a quarter turn.
    t = truth.theta(rope)[data.draw(st.integers(0, rope.pairs - 1))]
    x, before, q, near = t / (truth.MP.pi / 2), 0, 1, [1]
    while x != truth.MP.floor(x) and q <= MAX_POSITION:
        x = 1 / (x - truth.MP.floor(x))
        before, q = q, int(truth.MP.floor(x)) * q + before
        near.append(q)
    m = data.draw(st.sampled_from([n for n in near if n <= MAX_POSITION]))
    check(rope, data.draw(st.sampled_from([m, -m])))


@pytest.mark.parametrize("m", [0, 1, -1, 2**31, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("base", [10000.0, 1e12, math.nextafter(1.0, 2.0)])
def test_the_ends_of_the_range(m, base):
    check(Rope(128, base, "half"), m)


@pytest.mark.parametrize(
    "rope, m",
    [
        (Rope(128, 122118858663.92845, "half"), 1073741825),
        (Rope(2, 1e4, "half", scaling=Linear(195304364.45040902)), 2**31),
        (Rope(4, 10000.007263183594, "half", scaling=Linear(13671300.546671242)), 2**31),
        (Rope(64, 236148842924.5494, "half"), 131071),
    ],
)
def test_ropes_tuned_to_hit_a_quarter_turn_at_a_large_position(rope, m):
    # Within 2⁻⁵⁹ of a turn: a 128-bit phase alone would be off by up to 50,000 ulp.
    assert min(abs(t) for table in truth.cos_sin(rope, m) for t in table) < 1e-15
    for k in (m, -m):
        check(rope, k)


@given(st.integers(2**10, 2**31), st.floats(1e-5, 0.6), st.sampled_from([1, -1]))
def test_any_position_can_be_hit(m, turn, sign):
    # A base whose second of two pairs stands at a quarter turn at m, as nearly as float64 allows.
    quarter = max(1, int(turn * m / (math.pi / 2)))
    base = float((quarter * truth.MP.pi / 2 / m) ** -2)
    if 1 < base <= 1e12:
        check(Rope(4, base, "half"), sign * m)


@given(st.data())
def test_table_is_the_same_entry_by_entry_and_in_any_shape(data):
    rope = data.draw(ropes(max_pairs=4))
    shape = data.draw(st.sampled_from([(), (0,), (1,), (5,), (2, 3), (2, 0, 3)]))
    m = data.draw(position_arrays(rope, shape))
    cos, sin = pyrope.cos_sin(m, rope)
    assert cos.shape == sin.shape == (*shape, rope.pairs)
    for index in np.ndindex(shape):
        one = m[index] if rope.axes is None else m[(slice(None), *index)]
        c, s = pyrope.cos_sin(one, rope)
        assert c.tobytes() == cos[index].tobytes() and s.tobytes() == sin[index].tobytes()


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.uint64, np.int64])
def test_positions_of_any_integer_dtype_and_layout(kind):
    rope = Rope(8, 10000.0, "half")
    expected = pyrope.cos_sin([0, 1, 2, 3], rope)
    m = np.array([[0, 9], [1, 9], [2, 9], [3, 9]], kind)[:, 0]
    for got in (pyrope.cos_sin(m, rope), pyrope.cos_sin(range(4), rope), pyrope.cos_sin((0, 1, 2, 3), rope)):
        assert all(g.tobytes() == e.tobytes() for g, e in zip(got, expected, strict=True))


def test_bfloat16_is_rounded_once():
    # Rounded by way of float32 about one entry in 2¹⁶ would come out on the wrong side.
    rope, m = Rope(64, 10000.0, "half"), np.arange(20000)
    exact = np.concatenate(pyrope.cos_sin(m, rope)).ravel()
    got = np.concatenate(pyrope.cos_sin(m, rope, ml_dtypes.bfloat16)).ravel()

    def has_a_nearer_neighbour(numbers):
        others = [(numbers.view(np.int16) + np.int16(step)).view(ml_dtypes.bfloat16) for step in (-1, 1)]
        first, *errors = (abs(x.astype(np.float64) - exact) for x in (numbers, *others))
        return any((error < first).any() for error in errors)

    assert not has_a_nearer_neighbour(got)
    assert has_a_nearer_neighbour(
        exact.astype(np.float32).astype(ml_dtypes.bfloat16)
    )  # the shortcut is wrong somewhere


def test_the_same_bits_on_every_platform():
    rope = Rope(128, 10000.0, "half", scaling=YaRN(4.0, 4096))
    m = np.concatenate([np.arange(16384), 2**31 - np.arange(16384), -np.arange(0, 2**31, 2**17 + 1)])
    digest = hashlib.sha256()
    for table in pyrope.cos_sin(m, rope):
        digest.update(table.astype("<f8").tobytes())
    assert digest.hexdigest() == "07aed7caf319815fd5972eb8fa9b1f331a61e8ab7484084a2dad40d72aada631"


@pytest.mark.parametrize("axes", [None, Axes("axial")])
def test_memory_beyond_the_result_does_not_grow_with_the_length(axes):
    rope = Rope(8, 10000.0, "half", axes=axes)
    m = np.broadcast_to(np.arange(2**20, dtype=np.int32), (2, 2**20) if axes else (2**20,))
    with little_memory(2 * 2**20 * rope.pairs * 8 + 16 * 2**20):  # the result, and tiles
        pyrope.cos_sin(m, rope)


@pytest.mark.parametrize(
    "m, error, match",
    [
        ([0.0, 1.0], TypeError, "positions must be integers, were float"),
        (np.array([0, 1], np.float32), TypeError, "positions must be integers, none of them masked, were float32"),
        (np.ma.array([0, 1], mask=[0, 1]), TypeError, "none of them masked, were int64"),
        ([True, 5], TypeError, "positions must be integers, were bool"),
        (np.array([True, False]), TypeError, "positions must be integers, none of them masked, were bool"),
        ("5", TypeError, "positions must be integers, were str"),
        ([[0, 1], [2]], TypeError, "positions must be integers, were list"),
        (np.zeros(0), TypeError, "positions must be integers, none of them masked, were float64"),
        ([10**30], ValueError, r"positions must lie within ±2\^31, were from 1000000000000000000000000000000"),
        ([2**31 + 1], ValueError, r"positions must lie within ±2\^31, were from 2147483649"),
        ([-(2**31) - 1], ValueError, r"positions must lie within ±2\^31, were from -2147483649"),
        (np.array([2**63 + 5], np.uint64), ValueError, "positions must lie within"),
        (np.array([-(2**63)]), ValueError, "positions must lie within"),
    ],
)
def test_bad_positions(m, error, match):
    rope = Rope(8, 10000.0, "half")
    with pytest.raises(error, match=match):
        pyrope.cos_sin(m, rope)
    with pytest.raises(error, match=match):
        pyrope.rotate(np.ones((2, 8)), m, rope)


@pytest.mark.parametrize("m", [0, [1, 2, 3], [[0, 1]]])
def test_positions_must_have_the_axes_of_the_rope(m):
    with pytest.raises(ValueError, match="positions must have a first axis of 2, one row for each axis of the rope"):
        pyrope.cos_sin(m, Rope(8, 10000.0, "half", axes=Axes("axial")))


@pytest.mark.parametrize("dtype", [np.int32, np.complex64, np.longdouble, ">f8", "float33"])
def test_bad_dtypes(dtype):
    with pytest.raises(TypeError, match="dtype must be float64, float32, float16 or (ml_dtypes.)?bfloat16"):
        pyrope.cos_sin([0], Rope(8, 10000.0, "half"), dtype)
