"""How recipes are held against what a rotation returned: single steps, with numbers worked by hand, and no check."""

import math
from dataclasses import replace

import numpy as np
import pytest

from pyrope import Rope
from pyrope.oracle.explain import Change, Fault, Hypothesis
from pyrope.oracle.floats import U32, to_bfloat16
from pyrope.oracle.recipes import OnOneAxis, recipe_of
from pyrope.oracle.rotation_evidence import RotationEvidence, _apart
from pyrope.oracle.sample import Sample

ROPE = Rope(4, 100.0, "half")  # θ = (1, 0.1)
AT = np.array([1, 0, 2, 5, 30, 64, 100])
RIGHT = recipe_of(ROPE)


def turned(x, at, theta=(1.0, 0.1)):
    """Feature i and i + 2, pair by pair."""
    y = np.array(x, float)
    for i, angle in enumerate(theta):
        cos, sin = np.cos(at * angle), np.sin(at * angle)
        y[..., i], y[..., i + 2] = x[..., i] * cos - x[..., i + 2] * sin, x[..., i] * sin + x[..., i + 2] * cos
    return y


X = np.random.default_rng(0).standard_normal((2, len(AT), 4))


def about(y, x=X, at=AT, dtype="float32", ratio=None, **fields):
    """Evidence in which an output is wrong if it is further off than 1e-5."""
    ratio = np.abs(y - turned(x, at)) / 1e-5 if ratio is None else ratio
    return RotationEvidence(Sample(x, y, at), ROPE, dtype, ratio, **fields)


def fault(name, *fields, **more):
    return Fault(name, "", "", "", changes=lambda rope, measured: [Change("", one) for one in fields], **more)


def one(named, fields):
    return Hypothesis((named,), (Change("", fields),))


SLOWER = {"theta": np.array([1.0, 0.05])}
WRONG = turned(X, AT, (1.0, 0.05))


def test_what_is_true():
    np.testing.assert_allclose(about(WRONG).truth, turned(X, AT), atol=1e-14)


def test_what_is_known():
    faults = {"a": fault("a", {"factor": 2.0}, {"factor": 3.0}), "b": fault("b", {"rest": 2.0}, right_in=("bfloat16",))}
    assert [(f.name, c.fields) for f, c in about(WRONG, faults=faults).known(None)] == [
        ("a", {"factor": 2.0}), ("a", {"factor": 3.0}), ("b", {"rest": 2.0})
    ]  # fmt: skip
    assert len(about(WRONG, dtype="bfloat16", faults=faults).known(None)) == 2


def test_what_may_be_one_of_two_mistakes():
    some = about(WRONG)
    assert some.matters(Change("", SLOWER)) and not some.matters(Change("", {"ratio": 0.5}))
    assert not some.matters(Change("", {"place": OnOneAxis(lambda m: m, 0)}))
    assert some.matters(Change("", {"place": lambda m: m}))
    assert some.recipe(one(fault("a"), SLOWER)).theta.tolist() == [1.0, 0.05]


def test_those_that_hold_the_nearest_first():
    some = about(WRONG)
    plain, near, own = fault("plain"), fault("near"), fault("own", generic=True)
    slower, nearly = one(plain, SLOWER), one(near, {"theta": np.array([1.0, 0.05 * (1 + 2e-7)])})
    assert some.fitting([one(plain, {}), one(plain, {"factor": 2.0})]) == []
    assert some.fitting([nearly, slower]) == [slower, nearly] == some.fitting([slower, nearly])
    assert some.fitting([one(own, SLOWER), slower]) == [slower]
    assert some.fitting([one(own, SLOWER)])[0].faults == (own,)
    pair = [Hypothesis((first, plain), (Change("", SLOWER), Change("", {}))) for first in (own, near)]
    assert [h.faults[0].name for h in some.fitting(pair)] == ["near", "own"]


def test_rows_that_differ_differ_by_the_recipe_too():
    by_row = {"place": lambda m: m + np.arange(len(m))}
    some, differing = about(WRONG), about(WRONG, behaviour={"rows differ"})
    assert some._possible(replace(RIGHT, **SLOWER)) and not differing._possible(replace(RIGHT, **SLOWER))
    assert differing._possible(replace(RIGHT, **by_row)) and some._possible(replace(RIGHT, **by_row))
    assert some._possible(replace(RIGHT, growth=np.zeros(2))) and not some._possible(replace(RIGHT, growth=np.zeros(1)))


@np.errstate(over="ignore")
def test_what_is_not_finite_must_be_predicted():
    slower = replace(RIGHT, **SLOWER)
    assert about(WRONG)._holds(slower) and not about(WRONG, behaviour={"not finite"})._holds(slower)
    lost = WRONG.copy()
    lost[:, 3] = np.inf
    infinite = replace(
        slower, cos_sin=lambda angle: (np.where(np.abs(angle[:, :1]) == 5, np.inf, np.cos(angle)), np.sin(angle))
    )
    assert about(lost, ratio=np.full(X.shape, 2.0), behaviour={"not finite"})._holds(infinite)
    assert not about(lost, ratio=np.full(X.shape, 2.0))._holds(slower)


def test_the_error_that_is_left():
    some, x = about(WRONG), np.array([[[3.0, 4, 0, 0], [0, 1, 0, -2]]])
    rows, rounding = np.arange(2), 8 * 2 * U32
    relative = some._relative
    assert 64 * U32 < relative < 128 * U32
    at = np.array([10, 0])
    angles = np.array([[10, 1, 10, 1], [0, 0, 0, 0]])
    np.testing.assert_allclose(
        some._allowed(RIGHT, x, at, rows)[0], np.array([[4], [2]]) * (rounding + relative * angles), rtol=1e-12
    )
    doubled = some._allowed(replace(RIGHT, factor=2.0), x, at, rows)
    np.testing.assert_allclose(doubled, 2 * some._allowed(RIGHT, x, at, rows), rtol=1e-12)
    in_place = some._allowed(replace(RIGHT, in_place=True), x, at, rows)[0]
    np.testing.assert_allclose(
        in_place, np.array([[4 * (4 * rounding + 10 * relative)], [8 * rounding]]) + np.zeros(4), rtol=1e-12
    )
    crossed = some._allowed(replace(RIGHT, angles=np.array([[0, 1], [1, 1]])), x, at, rows)[0]
    np.testing.assert_allclose(crossed[0], 4 * (rounding + relative * np.array([10, 1, 1, 1])), rtol=1e-12)
    grown = some._allowed(replace(RIGHT, growth=np.array([0.01, 0.1])), x, at, rows)[0]
    np.testing.assert_allclose(grown[0], 4 * math.e * (rounding + 64 * U32 + relative * angles[0]), rtol=1e-12)
    np.testing.assert_allclose(grown[1], 2 * rounding, rtol=1e-12)
    shrunk = some._allowed(replace(RIGHT, growth=np.array([-0.01, -0.1])), x, at, rows)[0]
    np.testing.assert_allclose(shrunk[0], 4 * (rounding + 64 * U32 * 0.1 + relative * angles[0]), rtol=1e-12)
    far = some._allowed(replace(RIGHT, growth=np.array([20.0, 20.0])), x, at, rows)[0]
    np.testing.assert_allclose(far[0, 0], 4 * math.exp(80) * (rounding + 64 * U32 * 80 + relative * 10), rtol=1e-12)
    coarse = about(WRONG, dtype="float16")._allowed(RIGHT, x, at, rows)[0]
    np.testing.assert_allclose(coarse[1], 2 * 8 * (2.0**-11 + U32), rtol=1e-12)
    predicted, allowed = some.expected(RIGHT, x, at)
    np.testing.assert_allclose(predicted, turned(x, at), atol=1e-14)
    np.testing.assert_allclose(allowed, some._allowed(RIGHT, x, at, rows))


def test_every_output_must_be_predicted():
    slower = replace(RIGHT, **SLOWER)
    left = about(WRONG)._allowed(slower, X, AT, np.arange(len(AT)))
    for head, row, feature in ((0, 0, 0), (0, 3, 1), (1, 6, 3)):  # in each of the three comparisons
        for slip, holds in ((0.99, True), (1.01, False)):
            y = WRONG.copy()
            y[head, row, feature] += slip * left[head, row, feature]
            assert about(y)._predicts(slower) is holds
    y = WRONG.copy()
    y[1, 6, 3] = np.nan
    assert not about(y)._predicts(slower)


def test_low_precision_may_miss_a_few():
    x, at = np.random.default_rng(1).standard_normal((1, 50, 4)), np.arange(50)
    rounded = replace(RIGHT, round_table=to_bfloat16)
    y = rounded.predict(x, at)
    for missed, holds in ((5, True), (6, False)):  # of 200 outputs, 3 % are 6
        other = y.copy()
        other[0, 10 : 10 + missed, 0] += 1
        assert about(other, x, at)._predicts(rounded) is holds
    other = y.copy()
    other[0, 10, 0] += 1
    assert not about(turned(x, at) + (other - y), x, at)._predicts(RIGHT)  # which rounds nothing


def test_nearly_all_of_each_feature():
    some = about(WRONG)
    same, y = np.ones((1, 100, 4), bool), np.zeros((1, 100, 4))
    assert some._nearly(same, y)
    same[0, :11, 0] = False  # 2.75 % of all
    assert some._nearly(same, y)
    same[0, 11, 0] = False  # 3 %
    assert not some._nearly(same, y)
    few, wide = np.ones((1, 100, 4), bool), Rope(4, 100.0, "half", 2)
    few[0, :10, 0] = False  # 2.5 % of all, 5 % of what turns
    assert some._nearly(few, y) and not replace(some, rope=wide)._nearly(few, y)
    lost = y.copy()
    lost[0, :98] = np.nan
    early = np.ones((1, 100, 4), bool)
    early[0, 98, 0] = False
    assert some._nearly(early, y) and not some._nearly(early, lost)  # one of two finite rows
    assert not some._nearly(same, y * np.nan)


def test_a_recipe_must_be_much_nearer_than_the_truth():
    truth = turned(X, AT)
    y = truth + 1e-3 * (np.arange(4) % 2)  # two features of each row are wrong
    for share, explained in ((0.49, True), (0.51, False)):  # of the error that is left
        some = about(y)
        object.__setattr__(some, "_left", lambda one, share=share: share * np.abs(truth - y))
        assert some.explains(RIGHT) is explained
    y = truth.copy()
    y[0, 0, 0] += 1e-3  # one output is wrong, and the recipe makes all others wrong
    some = about(y)
    left = np.full(X.shape, 1e-3)
    left[0, 0, 0] = 0
    object.__setattr__(some, "_left", lambda one: left)
    assert not some.explains(RIGHT)
    left[...] = 0
    assert some.explains(RIGHT)


def test_how_far_off_a_recipe_is():
    y = turned(X, AT)
    y[0, 0, :2] += 3, 4
    some = about(y)
    assert some.distance(RIGHT) == pytest.approx(math.sqrt(12.5))
    np.testing.assert_allclose(some._missed[0, 0], [3, 4, 0, 0], atol=1e-12)


def test_what_fits_by_chance():
    y = turned(X, AT)
    y[0, 0, 0] += 1
    some = about(y)
    for left_open, distance, chance in (
        (0.5, 0.1, True),
        (0.49, 0.1, False),
        (0.5, 1 / 65, False),
        (0.5, 1 / 63, True),
    ):
        object.__setattr__(some, "_allowed", lambda *arguments, most=left_open: np.full(X.shape, most + 1e-9))
        object.__setattr__(some, "distance", lambda recipe, off=distance: off)
        assert some.by_chance(RIGHT) is chance


def test_how_far_apart_numbers_are():
    a, b = np.array([1.0, np.inf, np.nan, 2.0, np.inf]), np.array([1.5, np.inf, np.inf, np.nan, 3.0])
    assert _apart(a, b)[:3].tolist() == [0.5, 0, 0] and (_apart(a, b)[3:] > 1e308).all()
