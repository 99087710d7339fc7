"""How errors go through the gradients of attention, step by step: every number here is worked by hand."""

import math

import numpy as np
import pytest

from pyrope import Rope
from pyrope.oracle.floats import U32, U64
from pyrope.oracle.gradients import Noisy, Roundings, _cap_derivative, _gathered, _places, _returned, _softmax, _turn

R = Roundings(fine=0.5, coarse=0.3, angle=0.0, step=0.6)
NONE = Roundings(0.0, 0.0, 0.0)


def noisy(value, noise, bound):
    return Noisy(*(np.array(part, np.float64) for part in (value, noise, bound)))


def check(got, value, noise, bound):
    for part, expected in zip((got.value, got.noise, got.bound), (value, noise, bound), strict=True):
        assert np.shape(part) == np.shape(expected)
        np.testing.assert_allclose(part, expected, rtol=1e-12, atol=1e-15)


def test_the_roundings_that_are_left_to_a_dtype():
    assert Roundings.of("float32", False) == Roundings.of("float32", True) == (U32, 0.0, U32, 0.0)
    assert Roundings.of("float64", False) == (U64, 0.0, U64, 0.0)
    assert Roundings.of("float64", True) == (U64, 0.0, U32, 0.0)
    assert Roundings.of("float16", False) == (U32, 2.0**-11, U32, 2.0**-25)
    assert Roundings.of("bfloat16", True) == (U32, 2.0**-8, U32, 0.0)


def test_products_sums_and_multiples():
    a, b = noisy(-2, 0.01, 0.1), noisy(3, 0.04, 0.2)
    check(a.times(b), -6, 0.16 + 0.09 + 0.0004, 0.4 + 0.3 + 0.02)
    check(b.times(a), -6, 0.2504, 0.72)
    check(a.plus(b), 1, 0.05, 0.3)
    check(a.plus(b, -1.0), -5, 0.05, 0.3)
    check(a.scaled(-3), 6, 0.09, 0.3)
    check(a.rounded(0.3, 0.6), -2, 0.01 + 0.45 / 3 * 4, 0.1)
    check(a.stored(R), -2, 0.01 + (0.36 + 0.36) / 3, 0.1)
    check(a.stored(R, 2), -2, 0.01 + 2 * 0.24, 0.1)


def test_what_is_the_same_everywhere_is_spread_over_all_numbers():
    check(Noisy(np.array([1.0, 2.0]), 0.5, 0.25).each(lambda part: part[::-1]), [2, 1], [0.5, 0.5], [0.25, 0.25])
    check(noisy([1, 2], [3, 4], [5, 6]).where(np.array([True, False])), [1, 0], [3, 0], [5, 0])
    check(noisy([[1, 2]], [[3, 4]], [[5, 6]]).swapped(), [[1], [2]], [[3], [4]], [[5], [6]])


def test_a_product_of_matrices():
    a, b = noisy([[1, -2]], [[0.1, 0.2]], [[0.01, 0.02]]), noisy([[3], [4]], [[0.3], [0.4]], [[0.03], [0.04]])
    carried = (0.3 + 4 * 0.4) + (0.1 * 9 + 0.2 * 16) + (0.03 + 0.08)
    own = (0.25 * (2 + 8) + 4 / 3 * 0.09) * (9 + 4 * 16)
    check(a.matmul(b, R), [[-5]], [[carried + own + (0.09 * 25 + 0.36) / 3]], [[0.11 + 0.11 + 0.0011]])


def test_a_sum():
    total = noisy([[1, -2]], [[0.1, 0.2]], [[0.01, 0.02]]).summed(-1, R)
    check(total, [[-1]], [[0.1 + 2.5 + 0.2 + 10 + (0.09 + 0.36) / 3]], [[0.03]])
    check(noisy([[1, -2]], [[0.1, 0.2]], [[0.01, 0.02]]).summed(0, NONE), [[1, -2]], [[0.1, 0.2]], [[0.01, 0.02]])


def test_one_over_numbers_and_over_zero():
    check(noisy([-2, 0], [0.1, 0.1], [0.2, 0.2]).inverted(), [-0.5, 0], [0.00625, 0], [0.05, 0])


def test_how_far_off_an_output_may_be():
    u = 2.0**-11
    allowed = noisy([-3.0], [0], [0.5]).allowed("float16")
    np.testing.assert_allclose(allowed.worst, [6 * math.sqrt(3) * u + 1.01 * u * 3 + 0.5 + 2.0**-24], rtol=1e-12)
    assert allowed.mean_square == pytest.approx(3 * math.sqrt(3) * u + 0.5 + 2.0**-24, rel=1e-12)
    mixed = noisy([0.0, 0.0], [0.04, 0.12], [0.3, 0.4]).allowed("float32")
    assert mixed.mean_square == pytest.approx(3 * math.sqrt(0.08) + math.sqrt(0.125), rel=1e-12)
    for dtype, tiny in (("float64", 1e-300), ("float32", 1e-24), ("bfloat16", 1e-24), ("float16", 2.0**-24)):
        assert Noisy(np.zeros(1)).allowed(dtype).worst == tiny


def test_weights_move_by_the_error_of_their_score_and_of_the_sum():
    small = _softmax(noisy([[0, 0]], [[1e-4, 1e-4]], [[1e-3, 3e-3]]), np.array([[0.5, 0.5]]), NONE)
    noise, bound = 1.5e-4, np.array([[3e-3, 5e-3]])
    most = np.exp(6 * math.sqrt(noise) + bound)
    check(small, [[0.5, 0.5]], (0.5 * most) ** 2 * noise, 0.5 * most * bound)
    large = _softmax(noisy([[0, -2]], [[0.01, 0.02]], [[0, 0]]), np.array([[0.75, 0.25]]), Roundings(0.1, 0.0, 0.0))
    noise = np.array([[0.15, 0.16]]) + (0.5625 * 0.15 + 0.0625 * 0.16)  # 0.01·(2² + 2 + 8) more, and the mean's
    check(large, [[0.75, 0.25]], np.array([[0.75, 0.25]]) ** 2 * math.e**4 * noise, [[0, 0]])
    stored = _softmax(noisy([[0]], [[0]], [[0]]), np.array([[1.0]]), Roundings(0.0, 0.3, 0.0))
    check(stored, [[1]], [[0.03]], [[0]])


def test_the_derivative_of_a_softcap():
    check(_cap_derivative(noisy([-1], [0.04], [0.2]), 2.0, Roundings(0.1, 0.3, 0.0)), [0.75], [0.01 + 0.22], [0.11])


def test_heads_that_were_spread_come_together():
    x = Noisy(np.array([1.0, 2, 3, 4]).reshape(1, 4, 1, 1), 0.5, 0.25)
    for how, values, noise in (("first", [1, 3], 0.5), ("last", [2, 4], 0.5), ("summed", [3, 7], 1.0)):
        got = _gathered(x, 2, how, NONE)
        check(got, np.reshape(values, (1, 2, 1, 1)), np.full((1, 2, 1, 1), noise), np.full((1, 2, 1, 1), noise / 2))
    check(_gathered(x, 1, "mean", NONE), [[[[2.5]]]], [[[[4 * 0.5 / 16]]]], [[[[0.25]]]])
    narrow = _gathered(x, 1, "summed", Roundings(0.0, 0.3, 0.0))  # each of them is stored, and so is the sum
    check(narrow, [[[[10]]]], [[[[2 + 0.03 * 30 + 0.03 * 100]]]], [[[[1]]]])


def test_positions_of_queries_are_the_last_ones():
    at = np.array([[0, 1, 2, 5, 9]])
    q_at, k_at = _places(at, 2, 5)
    assert q_at.tolist() == [[[5, 9]]] and k_at.tolist() == [[[0, 1, 2, 5, 9]]]
    assert _places(None, 2, 5) == (None, None)


@pytest.mark.parametrize("angle", [U32, U64])
def test_a_rotation_turns_errors_and_adds_its_own(angle):
    """At position 0 the angle is exact; a pair (3, 4) has the length 5, and x·cos and y·sin are 3 and 0."""
    rope, x = Rope(4, 10000.0, "half", rotary_dim=2), noisy([[3, 4, 7, 8]], [[0.09, 0.16, 1, 2]], [[0.3, 0.4, 1, 2]])
    got = _turn(x, np.array([0]), rope, Roundings(0.0, 0.3, angle))
    reduced = 5 * 2.0**-20 if angle == U32 else 0.0
    bound = [[0.5 + 18 * angle + reduced, 0.5 + 24 * angle + reduced, 1, 2]]
    check(got, [[3, 4, 7, 8]], [[0.25 + 5 / 3 * 0.09 * 25] * 2 + [1, 2]], bound)
    assert _turn(x, np.array([0]), None, R) is x


def test_the_gradient_is_turned_back():
    rope, x, at = Rope(2, 10000.0, "half"), noisy([[1, 0]], [[0, 0]], [[0, 0]]), np.array([1])
    back, forwards = (_returned(x, at, rope, how, NONE) for how in ("back", "forwards"))
    np.testing.assert_allclose(back.value, [[math.cos(1), -math.sin(1)]], rtol=1e-15)
    np.testing.assert_allclose(forwards.value, [[math.cos(1), math.sin(1)]], rtol=1e-15)
    assert _returned(x, at, rope, "not", NONE) is x and _returned(x, at, None, "back", NONE) is x
    stored = _returned(noisy([[3, 4]], [[0, 0]], [[0, 0]]), np.array([0]), rope, "back", Roundings(0.0, 0.3, 0.0))
    np.testing.assert_allclose(stored.noise, 0.03 * 25 + 5 / 3 * 0.09 * 25, rtol=1e-12)  # both numbers, then the pair
