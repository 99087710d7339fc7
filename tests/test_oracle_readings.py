"""What the page of a report shows: numbers and words by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from small_evidence import RIGHT, SIGNS, evidence, kind, question

from pyrope import Linear, Rope
from pyrope.oracle import readings as module
from pyrope.oracle.drawings import Frequencies, Side
from pyrope.oracle.measure import Measured, Pairs
from pyrope.oracle.probe import Probe
from pyrope.oracle.sample import Sample

ROPE = Rope(4, 100.0, "half")
READS = np.array([[0, 2], [1, 3]])


def turning(theta=(1.0, 0.1)):
    def fn(x, m):
        y, axes = np.array(x, np.float64), np.atleast_2d(m)
        for i, angle in enumerate(theta):
            at = axes[min(i, len(axes) - 1)]
            cos, sin = np.cos(at * angle), np.sin(at * angle)
            y[..., i], y[..., i + 2] = x[..., i] * cos - x[..., i + 2] * sin, x[..., i] * sin + x[..., i + 2] * cos
        return y

    return fn


def probe_of(theta=(1.0, 0.1), top=100, axes=None):
    return Probe(turning(theta), 4, np.float64, top, axes)


def measured(theta=(1.0, 0.1), pairs=READS, factor=1.0, direction=1, offset=0.0, skew=0.0, uncertainty=1e-12):
    theta = np.array(theta)
    return Measured(Pairs(np.array(pairs).reshape(-1, 2), np.array(pairs).reshape(-1, 2), 0, skew), theta, np.full(theta.shape, uncertainty), direction, offset, 0.0, factor, 100, 2.0**-53)  # fmt: skip


# --- R(m) ---


def test_operators_side_by_side():
    right = module.operator_readings(probe_of(), ROPE, 3)
    assert right.position == "3" and not right.differing.any()
    assert right.measured[0, 0] == pytest.approx(math.cos(3)) and right.measured[2, 0] == pytest.approx(math.sin(3))
    np.testing.assert_allclose(right.measured, right.expected, atol=1e-15)
    wrong = module.operator_readings(probe_of((1.0, 0.2)), ROPE, 3)
    assert np.argwhere(wrong.differing).tolist() == [[1, 1], [1, 3], [3, 1], [3, 3]]
    assert not module.operator_readings(probe_of((1.0, 0.2)), ROPE, 3, differing=False).differing.any()
    alone = module.operator_readings(probe_of(), None, 3)
    assert alone.expected is None and alone.differing.shape == (4, 4) and not alone.differing.any()
    assert module.operator_readings(probe_of(axes=2), None, 3).position == "(3, 4)"
    assert module.operator_readings(probe_of(axes=2), None, 3).measured[1, 1] == pytest.approx(math.cos(0.4))


def test_elements_of_wrong_pairs():
    expected, wrong = np.array([[1, 0, 2], [0, 3, 0], [4, 0, 5]]), np.zeros((3, 3), bool)
    wrong[0, 1] = True
    assert np.argwhere(module._of_pairs(wrong, expected)).tolist() == [[0, 0], [0, 1], [0, 2]]


def test_positions_that_double():
    asked = []
    fn = turning()
    probe = Probe(lambda x, m: asked.append(m.tolist()) or fn(x, m), 4, np.float64, 11)
    np.testing.assert_allclose(module._measured(probe).theta, [1, 0.1], rtol=1e-12)
    assert asked == [[0, 1, 2, 4, 8, 11]]


# --- Frequencies ---


def test_frequencies_side_by_side():
    shown = module.frequency_readings(ROPE, measured((1.0, 0.11)))
    assert shown.measured.tolist() == [1.0, 0.11] and shown.expected == pytest.approx([1, 0.1])
    assert (shown.allowed < 1e-5).all() and not module._same(shown)
    coarse = module.frequency_readings(ROPE, measured((1.0, 0.11), uncertainty=0.01))
    np.testing.assert_allclose(coarse.allowed - shown.allowed, [0.04, 0.4], rtol=1e-6)
    assert module._same(coarse)
    fewer = module.frequency_readings(ROPE, measured((1.0,), READS[:1], uncertainty=0.01))
    assert (fewer.allowed < 1e-5).all() and not module._same(fewer)
    accepted = module.frequency_readings(ROPE, measured(), True)
    assert (
        (accepted.allowed >= shown.allowed).all()
        and (accepted.allowed > shown.allowed).any()
        and (accepted.allowed < 1e-5).all()
    )
    assert module.frequency_readings(None, measured()).expected is None
    assert not module._same(Frequencies(np.ones(1), None, None))
    for slip, same in ((0.9, True), (1.1, False)):
        assert module._same(Frequencies(np.array([1 + slip * 1e-3]), np.ones(1), np.array([1e-3]))) is same


def test_properties_side_by_side():
    def sides(rope=ROPE, **fields):
        one = measured(**fields)
        return {side.name: side[1:] for side in module._sides(rope, one, module.frequency_readings(rope, one))}

    assert sides() == {
        "pairs": ("half", "half", True), "features that turn": ("4 of 4", "4 of 4", True), "direction": ("+1", "+1", True),
        "frequencies": ("1 … 0.1", "1 … 0.1", True), "rule": ("base 100", "base 100", True), "position offset": ("0", "0", True),
        "factor": ("1", "1", True),
    }  # fmt: skip
    other = sides(theta=(1.0, 0.2), direction=-1, offset=2.0, factor=1.5)
    assert other["direction"] == ("+1", "-1", False) and other["position offset"] == ("0", "2", False)
    assert other["frequencies"] == ("1 … 0.1", "1 … 0.2", False) and other["factor"] == ("1", "1.5", False)
    assert other["rule"][0] == "base 100" and other["rule"][1].startswith("base 25") and not other["rule"][2]
    assert sides(factor=1.0009)["factor"][2] and not sides(factor=1.0011)["factor"][2]
    assert sides(Rope(4, 100.0, "half", scaling=Linear(2.0)))["rule"][0] == "base 100, Linear"
    fewer = sides(theta=(1.0,), pairs=READS[:1])
    assert fewer["features that turn"][2] is False
    assert (
        module._odd(Rope(8, 100.0, "half"), measured((1.0, 0.1), [[0, 4], [3, 7]])) == "half, without 2 of the 4 pairs"
    )
    assert fewer["frequencies"] == ("1 … 0.1, of 2 pairs", "1 … 1, of 1 pairs", False)
    none = sides(theta=(), pairs=[])
    assert none["pairs"][1] == "no two features as a pair" and none.keys() == {"pairs", "features that turn", "factor"}
    assert none["features that turn"] == ("4 of 4", "0 of 4", False)
    odd = sides(pairs=[[0, 3], [1, 2]])
    assert odd["pairs"] == ("half", "(0, 3), (1, 2), …: no known layout", False)


def test_what_cannot_be_read():
    (pairs, frequencies) = module._sides(ROPE, measured(), None)
    assert pairs.same and frequencies == Side("frequencies", "1 … 0.1", "cannot be read: the pairs do not turn", False)
    lost = module._sides(ROPE, measured(factor=math.nan), None)[1]
    assert lost.measured == "cannot be read: NaN or infinity"


def test_widths_in_words():
    assert [module._width(n, 8, "suffix") for n in (0, 8, 4)] == ["0 of 8", "8 of 8", "4 of 8, suffix"]
    assert module._span(np.empty(0)) == "none"


# --- Errors ---


def test_errors_by_place():
    off = np.zeros((2, 3, 4))
    off[0, 1, 2], off[1, 2, 0] = 5, 7
    beyond = off > 6
    errors = module.errors_by_place("token", np.array([9, 3, 5]), off, {"a": 2.0, "b": off + 1}, beyond)
    assert errors.place == "token" and errors.at.tolist() == [3, 5, 9] and errors.worst.tolist() == [5, 7, 0]
    assert errors.beyond.tolist() == [False, True, False]
    assert errors.bounds["a"].tolist() == [2, 2, 2] and errors.bounds["b"].tolist() == [6, 8, 1]


def test_errors_of_dense_vectors():
    at, probe = np.array([1, 0, 50]), probe_of()
    x = np.random.default_rng(0).standard_normal((4, 3, 4))
    y = turning()(x, at)
    y[1, 2, 3] += 1
    y[3, 1, 0] += 9  # a comb
    errors = module._rotation_errors(Sample(x, y, at), ROPE, probe, None)
    assert (
        errors.at.tolist() == [0, 1, 50]
        and errors.worst == pytest.approx([0, 0, 1], abs=1e-12)
        and not errors.beyond.any()
    )
    ratio = np.zeros((4, 3, 4))
    ratio[1, 2, 3] = 2
    assert module._rotation_errors(Sample(x, y, at), ROPE, probe, ratio).beyond.tolist() == [False, False, True]
    y[0, 0, 0] = np.nan
    assert module._rotation_errors(Sample(x, y, at), ROPE, probe, ratio).worst[1] == np.inf


def test_where_a_rotation_is_shown():
    x, at = np.ones((4, 5, 4)), np.array([1, 0, 10, 60, 100])
    precision = Side("precision", "a", "b", True)

    def shown(theta, beyond=None, top=100):
        probe = probe_of(theta, top)
        own = np.minimum(at, top)
        return module.rotation_readings(probe, ROPE, Sample(x, turning(theta)(x, own), own), None, beyond, precision)

    right = shown((1.0, 0.1))
    assert right.operators.position == "3" and right.sides[-1] is precision and right.reference == "expected"
    assert not right.operators.differing.any() and len(right.sides) == 8 and right.frequencies is not None
    wrong = shown((1.0, 0.101), np.full((4, 5, 4), 2.0))
    assert wrong.operators.position == "60" and wrong.operators.differing.any()  # off by 0.06, half of 0.1 and more
    assert shown((1.0, 0.1), top=2).operators.position == "2"


def test_errors_of_attention():
    more = question([1, -1], "more")
    wrong = np.array([[1.0, 1], [0, -0.5]])[None, None]
    lost = question([1], "lost")
    some = evidence([RIGHT, wrong, np.zeros((1, 1, 1, 1))], [SIGNS, more, lost], kind(worst=0.25))
    shown = module.attention_readings(some)
    assert shown.errors.place == 'token of the question "more"' and shown.errors.worst.tolist() == [0, 0.5]
    assert shown.errors.beyond.tolist() == [False, True] and [x.tolist() for x in shown.errors.bounds.values()] == [
        [0.25, 0.25]
    ]
    assert shown.sides == (
        Side("more: row 0, head 0, token 1, feature 1", "0", "-0.5", False),
        Side("a question: row 0, head 0, token 0, feature 0", "1", "1", True),
    )
    right = module.attention_readings(evidence([RIGHT], [SIGNS]))
    assert right.errors.place == 'token of the question "a question"' and not right.errors.beyond.any()
    assert module.attention_readings(evidence([RIGHT[..., :1]], [SIGNS])) is None
    many = evidence([RIGHT] * 9 + [RIGHT + 1], [replace(SIGNS, name=str(i)) for i in range(10)])
    assert [side.name[:1] for side in module.attention_readings(many).sides] == list("90123456")


def test_nan_where_it_is_expected():
    out = np.array([[np.nan, np.nan, 1.0, 2.0]])
    assert module._errors(out, np.array([[np.nan, 3.0, np.nan, 2.5]])).tolist() == [[0, np.inf, np.inf, 0.5]]
