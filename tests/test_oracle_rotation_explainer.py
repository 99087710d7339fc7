"""What is measured and said of a rotation that is not the expected one: step by step, on rotations of a few features."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from pyrope import Axes, Linear, Proportional, Rope, YaRN, frequencies
from pyrope.oracle.measure import Measured, Pairs
from pyrope.oracle.probe import Probe
from pyrope.oracle.recipes import BACKWARDS, FORWARDS, recipe_of
from pyrope.oracle.rotation_explainer import RotationExplainer
from pyrope.oracle.rotation_faults import FAULTS
from pyrope.oracle.sample import error_ratios, take_sample
from pyrope.oracle.tolerance import grades

ROPE = Rope(8, 10000.0, "half")  # θ = (1, 0.1, 0.01, 0.001)
W = np.array([1, 0.1, 0.01, 0.001])


def turning(
    theta=W,
    factor=1.0,
    block=lambda a, b, cos, sin: (a * cos - b * sin, a * sin + b * cos),
    place=lambda m: m,
    axes=None,
):
    """Features i and i + p, in float64; with axes, pair i by the position on axes[i]."""

    def fn(x, m):
        y, at = np.array(x, np.float64), np.asarray(place(m), np.float64)
        p = len(theta)
        for i in range(p):
            angle = (at if at.ndim == 1 else at[axes[i]]) * theta[i]
            a, b = (x[..., j].astype(np.float64) for j in (i, i + p))
            y[..., i], y[..., i + p] = (factor * part for part in block(a, b, np.cos(angle), np.sin(angle)))
        return y.astype(x.dtype)

    return fn


def explainer(fn, rope=ROPE, dtype=np.float64, top=500, faults=None):
    probe = Probe(fn, rope.head_dim, dtype, top, None if rope.axes is None else rope.axes.count)
    more = {} if faults is None else {"faults": faults}
    return RotationExplainer(probe, rope, take_sample(probe, rope), grades(probe.dtype)[-1], **more)


def ratio_of(one):
    return error_ratios(one.sample, one.rope, one.probe.dtype)[grades(one.probe.dtype)[-1]]


def findings(fn, **options):
    one = explainer(fn, **options)
    return one, one.findings(ratio_of(one))


def measurements(fn, rope=ROPE, **options):
    return explainer(fn, rope, **options)._measurements()


# --- Numbers ---


def test_what_is_measured():
    found = measurements(turning(factor=1.5, place=lambda m: m + 3))
    assert (
        found.offset == 3 and found.factor == 1.5 and found.width == 8 and found.axis is None and found.growth is None
    )
    assert found.block is None and found.narrow == "" and found.turn is None and found.offsets == ()
    assert any(base == pytest.approx(10000, rel=1e-6) for base in found.bases)
    slower = measurements(turning(W / 4))
    assert slower.stretches == pytest.approx((4, 4)) and slower.offset == 0
    assert measurements(turning(W, place=lambda m: m + 0.5)).offset is None
    none = measurements(lambda x, m: 2 * x)
    assert none.width is None and none.bases == () and none.factor is None
    fewer = measurements(turning(W[:3]), Rope(6, 1000.0, "half", 4))
    assert fewer.width == 6 and fewer.stretches == ()


def test_frequencies_that_are_narrow():
    rounded = np.float16(W).astype(np.float64)
    found = measurements(turning(rounded))
    assert found.narrow == "float16" and found.narrow_theta == pytest.approx(rounded)
    far = measurements(turning(np.float16(W / 3).astype(np.float64)))
    assert far.narrow == "float16" and far.narrow_theta is None
    assert measurements(turning()).narrow_theta is None


def test_whether_frequencies_are_near():
    one = explainer(turning())
    for off, near in ((1 / 33, True), (1 / 31, False)):
        one.measured = measured(W * [1, 1 + off, 1, 1])
        assert one._near() is near
    one.measured = measured(W[:3])
    assert not one._near()


def measured(theta=W, pairs=None, factor=1.0, direction=1, offset=0.0, uncertainty=1e-12, odd=0):
    theta = np.asarray(theta, float)
    reads = np.stack((np.arange(len(theta)), np.arange(len(theta)) + 4), -1) if pairs is None else np.array(pairs)
    return Measured(
        Pairs(reads, reads, odd, 0.0),
        theta,
        np.full(len(theta), uncertainty),
        direction,
        offset,
        0.0,
        factor,
        500,
        2.0**-53,
    )


def test_what_is_taken_for_a_turn():
    one = explainer(turning())

    def turn(first, **fields):
        one.measured = measured([first, 0.1, 0.01, 0.001], **fields)
        return one._turn()

    assert turn(1 + 1e-5) == pytest.approx(2 * math.pi / (1 + 1e-5), rel=1e-9)
    assert turn(1 + 1e-12) is None and turn(1 + 4e-12) is not None  # known to 2e-12
    assert turn(1.2) is None and turn(0.8) is None and turn(1.09) is not None and turn(0.92) is not None
    one.measured = measured(W[:3])
    assert one._turn() is None


def test_blocks_that_all_pairs_have():
    def block(of, rope=ROPE, **options):
        return measurements(turning(block=of, **options), rope).block

    assert block(lambda a, b, cos, sin: (a * cos - b * sin, a * sin + b * cos)) == FORWARDS
    assert block(lambda a, b, cos, sin: (a * cos + b * sin, -a * sin + b * cos)) == BACKWARDS
    assert block(lambda a, b, cos, sin: (a * cos, b - a * sin)) == (("cos", "0"), ("-sin", "1"))
    assert block(lambda a, b, cos, sin: (a * cos, 0.5 * b)) is None
    assert block(lambda a, b, cos, sin: (a * cos - b * sin, a * sin + b * cos), theta=2 * W) is None
    backwards = block(lambda a, b, cos, sin: (a * cos - b * sin, a * sin + b * cos), replace(ROPE, direction=-1))
    assert backwards == FORWARDS


GRID = Rope(8, 10000.0, "half", axes=Axes("sections", (1, 2, 1)))


def test_axes_that_are_measured():
    found = measurements(turning(axes=[0, 1, 1, 2]), GRID)
    assert found.axis.tolist() == [0, 1, 1, 2] and found.offsets == (0, 0, 0) and found.offset == 0
    moved = turning(axes=[0, 1, 1, 2], place=lambda m: m + np.array([0, 5, 0])[:, None])
    assert measurements(moved, GRID).offsets == (0, 5, 0)
    half = turning(axes=[0, 1, 1, 2], place=lambda m: m + np.array([0, 0.5, 0])[:, None])
    assert measurements(half, GRID).offsets == (0, None, 0)
    assert measurements(lambda x, m: x, GRID).axis is None


def test_the_first_wrong_position():
    def first(limit, top=500):
        one = explainer(turning(place=lambda m: np.where(m >= limit, m + 1, m)), top=top)
        return one._first_wrong(ratio_of(one))

    assert [first(limit) for limit in (100, 257, 300, 301, 499, 500)] == [100, 257, 300, 301, 499, 500]
    assert first(3) is None and first(0) is None and first(4000, 131071) == 4000


def test_the_first_position_that_tests_see():
    def since(limit, by=1.0):
        one = explainer(turning(place=lambda m: np.where(m >= limit, m + by, m)), dtype=np.float32)
        return one.since

    assert since(300) == 300 and since(1000) is None and since(300, 1e-9) is None
    coarse = explainer(turning(place=lambda m: np.where(m >= 300, m + 1, m)), dtype=np.float32, top=131071)
    assert 300 <= coarse.since <= 310


# --- Words ---


def explained(fn, **options):
    """With the ratio, as `findings` leaves it."""
    one = explainer(fn, **options)
    one._ratio = ratio_of(one)
    one._length = one._first_wrong(one._ratio)
    return one


def test_where_outputs_are_wrong():
    assert explained(turning()).where() == "no output is beyond what the worst grade allows"
    beyond = explained(turning(place=lambda m: np.where(m >= 100, m + 1, m))).where()
    assert beyond.startswith("right below position 100, wrong from there on; ") and beyond.endswith(
        ", in 8 of 8 features"
    )

    def one_feature(x, m):
        y = turning()(x, m)
        y[..., 2] += 1
        return y

    assert explained(one_feature).where().endswith(", in 1 of 8 features, feature 2 alone")
    some = explained(turning(place=lambda m: np.where(m % 2 == 1, m + 1, m))).where()
    assert some.startswith("wrong at positions 1, 3, 5, 7, 9, 13, …, right at 2, 4, 8, 10, 16, 32, …; ")

    def lost(x, m):
        y = turning()(x, m)
        y[..., m == 256, :] = np.nan
        return y

    assert explained(lost).where().endswith("; NaN or infinity from position 256 on")


def test_whether_it_switches():
    assert explained(turning(place=lambda m: np.where(m >= 100, m + 1, m)))._switches()
    assert not explained(turning(place=lambda m: np.where(m >= 15, m + 1, m)))._switches()
    assert explained(turning(place=lambda m: np.where(m >= 16, m + 1, m)))._switches()
    assert not explained(turning(W * (1 + 1e-9)))._switches()  # which grows slowly
    assert not explained(turning(place=lambda m: np.where(m % 3 == 0, m + 1, m)))._switches()
    one = explained(turning(place=lambda m: np.where(m >= 100, m + 1, m)))
    order = np.argsort(one.sample.at)
    wrong = np.flatnonzero(one.sample.at[order] >= 100)
    for allowed, switches in ((65.0, True), (64.0, False)):
        one._ratio = np.zeros_like(one._ratio)
        one._ratio[:, order[wrong]] = allowed
        assert one._switches() is switches
    one._length, one._ratio = 256, np.where(one.sample.at >= 256, 65.0, 0.0)[None, :, None] + 0 * one._ratio
    assert one._switches()
    one._ratio[:, one.sample.at == 256] = 30.0  # the first wrong position itself
    assert not one._switches()
    one._length = 100
    one._ratio[:, order[wrong[4:]]] = np.where(np.arange(len(wrong) - 4) < 0.12 * len(wrong), 0.0, 65.0)[None, :, None]
    one._ratio[:, order[wrong[:4]]] = 65.0
    assert not one._switches()  # only 88 % are wrong


def test_one_position_alone():
    one = explained(turning(place=lambda m: np.where(m == 100, m + 1, m)))
    assert one._alone(np.array([100])) and not one._alone(np.array([100, 101])) and one._alone(np.array([50]))
    two = explained(turning(place=lambda m: np.where((m == 100) | (m == 116), m + 1, m)))
    assert not two._alone(np.array([100]))
    far = explained(turning(place=lambda m: np.where((m == 100) | (m == 117), m + 1, m)))
    assert far._alone(np.array([100])) and not far._alone(np.array([101]))
    assert explained(turning(place=lambda m: np.where(m == 2, m + 1, m)))._alone(np.array([2]))
    assert explained(turning(place=lambda m: np.where(m == 499, m + 1, m)))._alone(np.array([499]))


def test_the_rule_beyond_a_position():
    slower = turning(np.array([1, 0.1, 0.01, 0.001]) ** 1.0)

    def beyond(x, m):
        y, other = slower(x, m), turning(500.0 ** (-np.arange(4) / 4))(x, m)
        return np.where((m >= 100)[:, None], other, y)

    one = explained(beyond)
    assert one._length == 100 and one._rule_beyond().startswith("from there on the frequencies are those of base 500,")
    one._length = 495
    assert one._rule_beyond() == ""


def test_oddities():
    def said(rope=ROPE, fn=None, **fields):
        one = explained(fn or turning(), rope=rope)
        one.measured = measured(**fields)
        return [words for words in one._oddities(one.measured) if "is multiplied with" not in words]

    assert said() == [
        "the frequencies are those of base 10000, not rescaled (NTK scaling of a smaller base, at a fixed length, is the same)"
    ]
    assert "6 features turn, 8 expected" in said(theta=W[:3]) and "2 features belong to no pair" in said(odd=2)
    assert "it turns the other way" in said(direction=-1) and "the position offset is 2" in said(offset=2.0)
    assert "the factor is 1.5, 1 expected" in said(factor=1.5) and not any(
        "factor" in words for words in said(factor=1.0009)
    )
    assert any("factor" in words for words in said(factor=1.0011))
    crossed = said(pairs=[[0, 1], [2, 3], [4, 5], [6, 7]])
    assert "the pairs are 0 and 1, 2 and 3, 4 and 5, …, expected 0 and 4, 1 and 5, 2 and 6, …" in crossed
    assert not any("the pairs" in words for words in said(theta=W[:2], pairs=[[4, 0], [1, 5]]))
    assert any(
        words == "pair 1 turns by 0.2, 0.1 expected, all others as expected"
        for words in said(theta=[1, 0.2, 0.01, 0.001])
    )


def test_frequencies_that_are_off():
    def said(theta, expected):
        return explained(turning())._other_frequencies(np.array(theta, float), np.array(expected, float))

    wide = 10000.0 ** (-np.arange(8) / 8)
    assert said(W, W) == [] == said(W * (1 + 9e-6), W)
    assert said(W * [1, 1, 1, 1.1], W) == ["pair 3 turns by 0.0011, 0.001 expected, all others as expected"]
    (slower,) = said(wide / 2, wide)
    assert slower.startswith(
        "the frequencies of 8 of 8 pairs are off by -0.5 to -0.5 of themselves: pair 0 turns by 0.5, 1 expected, pair 1 "
    )
    assert slower.endswith(", …") and slower.count("turns by") == 4
    (reverse,) = said(wide[[1, 0, 3, 2, 5, 4, 7, 6]], wide)
    assert "of themselves, which are the expected ones in another order: pair 0" in reverse
    (up,) = said(wide + 1e-4, wide)
    assert up.startswith("the frequencies of 8 of 8 pairs are off by")  # another rule, no rounding
    (phase,) = said(wide + 1e-4 * np.where(np.arange(8) % 2, 1, -1), wide)
    bits = round(math.log2(math.pi / 1e-4))
    assert phase.startswith(
        f"the error of the angle grows with the position, by up to 0.0001 for each, in fast and slow pairs alike, as that of a phase of {bits} bits"
    )


def test_features_that_should_stay():
    part = Rope(8, 10000.0, "half", 4)

    def rest(change):
        def fn(x, m):
            y = np.array(x)
            y[..., :4] = turning(np.array([1, 0.01]))(x[..., :4], m)
            y[..., 4:] = change(x[..., 4:], m)
            return y

        return explained(fn, rope=part)._rest()

    assert rest(lambda x, m: x) == [] and rest(lambda x, m: 3 * x) == [
        "features 4 to 7, which should stay, are multiplied with 3"
    ]
    assert (
        rest(lambda x, m: x[..., ::-1]) == ["features 4 to 7 should stay, and do not"]
        and explained(turning())._rest() == []
    )


def test_the_worst_block():
    words = explained(turning(W * [1, 2, 1, 1]))._worst_block()
    # The first wrong position is 1, where the second pair turns by 0.2 instead of 0.1.
    assert words.startswith(
        "at position 1, pair 1 is multiplied with [[ 0.9801 -0.1987] [ 0.1987  0.9801]], expected [[ 0.995  -0.0998]"
    )
    fine = explained(turning(W * [1, 1 + 1e-7, 1, 1]))._worst_block()
    assert fine.startswith("at position ") and ", pair 1 is multiplied with " in fine and fine.count("[[") == 2
    shown, expected = fine.partition(", expected ")[::2]
    assert shown.rpartition("with ")[2] != expected


# --- Findings ---


FEW = {name: FAULTS[name] for name in ("wrong base", "direction", "positions one too high")}


def skewed(a, b, cos, sin):
    return a * cos - 0.9 * b * sin, a * sin + b * cos


def faults_of(fn, **options):
    return [finding.fault for finding in findings(fn, **options)[1]]


def test_mistakes_that_are_found():
    one, (found,) = findings(turning(500.0 ** (-np.arange(4) / 4)))
    assert found.fault == "wrong base" and found.evidence.startswith("base 500 instead of 10000; this predicts all ")
    assert one.expected is not None and "where the expected rotation is off by up to" in found.evidence
    assert float(re.search("outputs to ([^,]*),", found.evidence)[1]) < 1e-9
    assert faults_of(turning(-W)) == ["direction"] and faults_of(turning(W, place=lambda m: m + 1)) == [
        "positions one too high"
    ]
    one, (found,) = findings(turning(block=skewed), faults=FEW)
    assert found.fault == "unexplained" and found.cause == "not among the known mistakes" and "pair" in found.evidence
    both = findings(turning(500.0 ** (-np.arange(4) / 4), place=lambda m: m + 1), faults=FEW)[1]
    assert {finding.fault for finding in both} == {"wrong base", "positions one too high"}
    assert "; with " in both[0].evidence and " it predicts all " in both[0].evidence


def test_behaviour_that_spoils_or_explains():
    one = explainer(turning(2 * W))
    one.probe.behaviour["not linear"] = "…"
    assert one.findings(ratio_of(one)) == []
    odd = explainer(turning(block=skewed), faults=FEW)
    odd.probe.behaviour["rows differ"] = "…"
    assert odd.findings(ratio_of(odd)) == []


def test_one_position_and_positions_beyond():
    assert faults_of(turning(place=lambda m: np.where(m == 256, m + 1, m)), faults=FEW) == ["one position wrong"]
    _, (found,) = findings(turning(place=lambda m: np.where(m >= 100, m + 7.3, m)), faults=FEW)
    assert found.fault == "wrong beyond a position" and found.since is not None


def test_rules_that_were_not_expected():
    one = explainer(turning(recipe_of(replace(ROPE, scaling=YaRN(4.0, 256))).theta))
    one._measurements()
    assert one._rules() and all(fault.name == "another rescaling" for fault, _ in one._rules())
    right = explainer(turning())
    right._measurements()
    assert right._rules() == []


def test_running_products():
    rope, p = Rope(256, 10000.0, "half"), 128
    ratio, theta, product = np.float32(10000.0 ** (-1 / p)), [], np.float32(1)
    for _ in range(p):
        theta.append(float(product))
        product = product * ratio
    one = explainer(turning(np.array(theta)), rope, np.float32)
    assert one.recursive().fault == "recursive frequencies" and not one.recurrence()
    right = explainer(turning(frequencies(rope)), rope, np.float32)
    assert right.recursive() is None and not right.recurrence()

    def angles(x, m):
        y = np.array(x, np.float64)
        angle = m.astype(np.float32)
        for i in range(p):
            a, b = (x[..., j].astype(np.float64) for j in (i, i + p))
            cos, sin = np.cos(angle.astype(np.float64)), np.sin(angle.astype(np.float64))
            y[..., i], y[..., i + p] = a * cos - b * sin, a * sin + b * cos
            angle = angle * ratio
        return y.astype(x.dtype)

    assert explainer(angles, rope, np.float32).recurrence()
    assert not explainer(turning(W[:2]), Rope(4, 10000.0, "half")).recurrence()
    assert not explainer(turning(W / 2), replace(ROPE, scaling=Linear(2.0))).recurrence()


def test_whether_errors_drift():
    one = explainer(turning())
    u = 2.0**-24
    for step, drifts in ((7.9, True), (8.3, False)):
        one.measured = measured(W * (1 + step * u * np.arange(4)), uncertainty=0.0)
        assert one._drifts() is drifts
    one.measured = measured(W * (1 + 20 * u * np.arange(4)), uncertainty=1e-9)
    assert not one._drifts()
    one.measured = measured(W * (1 + 20 * u * np.arange(4)), uncertainty=1e-7)
    assert one._drifts()
    one.measured = measured(W[:3])
    assert one._drifts()
    one.rope = replace(ROPE, scaling=Proportional(0.5))
    assert one._drifts()


def test_pairs_that_are_off_in_the_last_digits():
    one = explainer(turning())

    def subtle(feature, theta=W):
        one.measured = measured(theta, uncertainty=0.0)
        ratio = np.zeros_like(one.sample.y)
        ratio[0, 0, feature] = 2.5
        return one._subtle(ratio)

    uneven = W * (1 + 100 * 2.0**-24 * np.array([0, 1, 0, 1]))
    drifting = subtle(1)
    assert drifting.fault == "recursive frequencies" and drifting.alternatives == ("fast sine",)
    assert drifting.evidence == "1 of 4 pairs, from pair 1 on, are off by up to 2.5 times what a float32 angle allows"
    assert subtle(1, uneven) is None  # no running product
    assert subtle(0).fault == subtle(4).fault == subtle(0, uneven).fault == "unexplained"


def test_rows_that_are_right_beyond_a_wrong_one():
    for theta, mixed in ((W, True), (W * (1 + 1e-6), False)):  # the second: off by more than 16 roundings everywhere
        one = explainer(turning(theta))
        ratio = np.zeros_like(one.sample.y)
        ratio[:, one.sample.at == 3] = 2
        found = one._scattered(ratio)
        assert (found is not None) is mixed
        if found is not None:
            assert one.sample.at[found[0]].tolist() == [3] and one.sample.at[found[1]].min() == 4


def test_rows_are_right_within_sixteen_roundings():
    for slip, mixed in ((0.9, True), (1.1, False)):
        one = explainer(turning())
        size = np.abs(one.truth).max()
        assert size > 2
        one.sample = one.sample._replace(y=one.truth + slip * 16 * 2.0**-53 * size)
        ratio = np.zeros_like(one.sample.y)
        ratio[:, one.sample.at == 3] = 2
        assert (one._scattered(ratio) is not None) is mixed


def test_the_last_digits():
    one = explainer(turning(W * (1 + 2e-7)), dtype=np.float32, top=131071)
    ratio = ratio_of(one)
    one._ratio = ratio
    assert one._to_the_last(replace(recipe_of(ROPE), theta=W * (1 + 2e-7))) and not one._to_the_last(recipe_of(ROPE))
    far = explainer(turning(2 * W), dtype=np.float32)
    far._measurements()
    assert far._subtle(ratio_of(far)) is None
    one._measurements()
    subtle = one._subtle(ratio)
    assert (
        subtle is not None
        and subtle.fault == "unexplained"
        and "the error of the angle grows with the position" in subtle.evidence
    )
    assert (
        "4 of 4 pairs, from pair 0 on, are off by up to " in subtle.evidence
        or "pairs, from pair 0 on" in subtle.evidence
    )
    rates = one._angle_errors()
    assert rates.startswith("the error of the angle grows with the position, by up to 2e-07 for each in the first pair")
    assert rates.endswith("and up to 2e-08 in others")
