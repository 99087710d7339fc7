"""Recipes of rotations, one field at a time: what each does to a pair or two, by loops and by hand."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest

from pyrope import Axes, Rope, frequencies
from pyrope.oracle.floats import float_dtype, to_float16
from pyrope.oracle.recipes import (
    BACKWARDS,
    OnOneAxis,
    Recipe,
    as_is,
    block_terms,
    fast_cos_sin,
    features,
    features_apart,
    frequency_order,
    one_series,
    recipe_of,
)

ROPE = Rope(4, 100.0, "half")  # θ = 1, 0.1; pairs (0, 2) and (1, 3)
RIGHT = recipe_of(ROPE)
X = np.array([[1.0, 2.0, 3.0, 5.0], [-7.0, 11.0, 13.0, 17.0]])
AT = np.array([2, 5])
THETA = (1.0, 0.1)


def by_hand(cos=math.cos, sin=math.sin, factor=1.0, rest=None):
    """out₁ = x₁·cos − x₂·sin, out₂ = x₁·sin + x₂·cos of halves, number by number."""
    out = np.empty_like(X)
    for row, m in enumerate(AT):
        for i, theta in enumerate(THETA):
            c, s, a, b = factor * cos(m * theta), factor * sin(m * theta), X[row, i], X[row, i + 2]
            out[row, i], out[row, i + 2] = a * c - b * s, a * s + b * c
    return out


def near(got, expected, rtol=1e-14):
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=1e-14)


def changed(**changes):
    return replace(RIGHT, **changes).predict(X, AT)


def test_the_right_one_and_the_other_direction():
    near(RIGHT.predict(X, AT), by_hand())
    near(changed(block=BACKWARDS), by_hand(sin=lambda angle: -math.sin(angle)))
    assert recipe_of(replace(ROPE, direction=-1)).block == BACKWARDS
    near(changed(factor=1.5), by_hand(factor=1.5))
    near(RIGHT.predict(X[1:], AT, rows=np.array([1])), by_hand()[1:])


def test_what_a_feature_may_be_multiplied_with():
    terms = block_terms(np.array([0.6]), np.array([0.8]))
    expected = {"cos": 0.6, "-cos": -0.6, "sin": 0.8, "-sin": -0.8, "0": 0.0, "1": 1.0}
    assert {name: float(term[0]) for name, term in terms.items()} == expected


def test_the_features_of_the_pairs():
    assert [x.tolist() for x in features("half", 2, 3)] == [[[3, 5], [4, 6]]] * 2
    assert [x.tolist() for x in features("interleaved", 2)] == [[[0, 1], [2, 3]]] * 2
    assert [x.tolist() for x in features("interleaved-to-half", 2)] == [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    assert features_apart(2, 32).tolist() == [[0, 32], [1, 33]]


def test_a_fast_sine_takes_whole_turns_off_in_float32():
    angle = np.float32(1000.5)
    turns = angle * np.float32(1 / (2 * math.pi))
    rest = np.float32(turns - np.float32(159)) * np.float32(2 * math.pi)
    cos, sin = fast_cos_sin(angle)
    assert (float(cos), float(sin)) == (float(np.cos(rest)), float(np.sin(rest)))
    assert 1e-7 < abs(float(cos) - math.cos(1000.5)) < 1e-4


@pytest.mark.parametrize("name", [field.name for field in fields(Recipe) if field.name.startswith("round_")])
def test_every_rounding_is_made_and_known(name):
    low = replace(RIGHT, **{name: to_float16})
    assert low.rounds and not RIGHT.rounds
    far, third = np.array([2049, 4099]), X / 3  # neither of them, nor 0.1, is a number of float16
    out, right = low.predict(third, far), RIGHT.predict(third, far)
    assert (out != right).any()
    if name == "round_input":
        near(out, RIGHT.predict(to_float16(third), far))
    elif name == "round_result":
        near(out, to_float16(right))
    elif name == "round_position":
        near(out, RIGHT.predict(third, np.array([2048, 4100])))


def test_positions_by_row_and_by_axis():
    assert RIGHT.spread(AT).tolist() == [[2], [5]] and RIGHT.spread(AT, np.array([1])).tolist() == [[5]]
    grid = np.array([[2, 5], [20, 50]])
    assert replace(RIGHT, axis=np.array([1, 0])).spread(grid).tolist() == [[20, 2], [50, 5]]
    assert not RIGHT.by_row(AT) and not replace(RIGHT, place=lambda m: m + 1).by_row(AT)
    assert replace(RIGHT, place=lambda m: np.arange(len(m))).by_row(AT)
    assert replace(RIGHT, place=lambda m: m - m[0]).by_row(AT)
    moved = OnOneAxis(lambda m: m + 100, 1)(grid)
    assert moved.tolist() == [[2, 5], [120, 150]] and grid.tolist() == [[2, 5], [20, 50]]


def test_lengths_that_grow_and_features_that_should_stay():
    grown = changed(growth=np.array([0.25, -0.5]))
    scale = np.exp(np.array([[0.25, -0.5, 0.25, -0.5]]) * AT[:, None])
    near(grown, by_hand() * scale)
    part = recipe_of(Rope(4, 100.0, "half", rotary_dim=2))
    out = replace(part, rest=3.0).predict(X, AT)
    near(out[:, 2:], 3 * X[:, 2:])
    near(out[:, :2], part.predict(X, AT)[:, :2])
    near(part.predict(X, AT)[:, 2:], X[:, 2:])


def test_angles_by_products_in_float32():
    second = float(np.float32(7) * np.float32(0.1))
    cos, sin = replace(RIGHT, ratio=0.1).tables(np.array([7]))
    assert second != 7 * 0.1
    assert cos[0].tolist() == [float(np.cos(7.0)), float(np.cos(second))]
    assert sin[0].tolist() == [float(np.sin(7.0)), float(np.sin(second))]


def test_outputs_with_the_angle_of_another_pair():
    both, second = (changed(angles=np.array(angles)) for angles in ([[1, 1], [0, 0]], [[0, 1], [1, 0]]))
    for row, m in enumerate(AT):
        for i, theta in enumerate(THETA):
            a, b, other = X[row, i], X[row, i + 2], THETA[1 - i] * m
            near(both[row, i], a * math.cos(other) - b * math.sin(other))
            near(second[row, i], a * math.cos(theta * m) - b * math.sin(theta * m))
            near(second[row, i + 2], a * math.sin(other) + b * math.cos(other))


def test_an_output_that_is_written_over_its_input():
    first, second = changed(aliased=0), changed(aliased=1)
    for row, m in enumerate(AT):
        for i, theta in enumerate(THETA):
            a, b, c, s = X[row, i], X[row, i + 2], math.cos(theta * m), math.sin(theta * m)
            near(first[row, [i, i + 2]], [a * c - b * s, (a * c - b * s) * s + b * c])
            near(second[row, [i, i + 2]], [a * c - (a * s + b * c) * s, a * s + b * c])


def test_pairs_that_are_written_where_others_are_still_read():
    """Neighbours are read, halves are written, one pair after the other: the second reads what the first wrote."""
    recipe = replace(recipe_of(Rope(4, 100.0, "interleaved-to-half")), in_place=True)
    for row, m in enumerate(AT):
        x = list(X[row])
        for i, theta in enumerate(THETA):
            a, b, c, s = x[2 * i], x[2 * i + 1], math.cos(theta * m), math.sin(theta * m)
            x[i], x[i + 2] = a * c - b * s, a * s + b * c
        near(recipe.predict(X, AT)[row], x)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_candidate_computes_as_people_do(dtype):
    x, wide = X.astype(dtype), np.float64 if dtype is np.float64 else np.float32
    angle = AT[:, None].astype(wide) * np.array(frequencies(ROPE)).astype(wide)
    for low in (False, True):
        cos, sin = (table.astype(dtype) if low else table for table in (np.cos(angle), np.sin(angle)))
        a, b = x[:, :2].astype(cos.dtype), x[:, 2:].astype(cos.dtype)
        expected = np.concatenate((a * cos - b * sin, a * sin + b * cos), axis=-1).astype(dtype)
        out = (RIGHT.candidate(low_tables=True) if low else RIGHT.candidate())(x, AT.tolist())
        assert out.dtype == dtype and np.array_equal(out, expected)


def test_the_order_of_frequencies_with_axes():
    assert frequency_order(ROPE).tolist() == [0, 1] and one_series(ROPE).tolist() == [0, 1]
    sections = Rope(16, 100.0, "half", axes=Axes("sections", (2, 6)))
    assert frequency_order(sections).tolist() == list(range(8)) and one_series(sections).tolist() == list(range(8))
    own = Rope(16, 100.0, "half", axes=Axes("sections", (2, 6), "own"))
    assert frequency_order(own).tolist() == [0, 1, 0, 1, 2, 3, 4, 5] and one_series(own).tolist() == [2, 3, 4, 5, 6, 7]
    assert recipe_of(own).axis.tolist() == [0, 0, 1, 1, 1, 1, 1, 1] and RIGHT.axis is None
    axial = Rope(16, 100.0, "half", axes=Axes("axial"))
    order, first = frequency_order(axial), one_series(axial)
    assert order[first].tolist() == sorted(set(order.tolist())) and len(order) == 2 * len(first)
    assert as_is(order) is order


def test_dtypes_by_name_and_by_themselves():
    for dtype in ("float16", np.float16, np.dtype("float16")):
        assert float_dtype(dtype) == np.dtype(np.float16)
    for dtype in ("int32", np.int32, "float", None.__class__, np.dtype(">f4")):
        with pytest.raises(TypeError, match="dtype must be one of .*, was"):
            float_dtype(dtype)
