"""What R(m) shows by itself, and which published rule has its frequencies: operators made of loops, numbers by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from pyrope import Linear, Llama3, Proportional, Rope, YaRN, frequencies
from pyrope.oracle import rules
from pyrope.oracle.floats import to_bfloat16, to_float16
from pyrope.oracle.measure import Measured, Pairs, axis_of_pairs, find_pairs, growth_of, measure, phases
from pyrope.oracle.probe import Probe
from pyrope.oracle.recipes import as_is

DOUBLING = np.array([0, *(2**k for k in range(18))])
U = 2.0**-24


def operator(theta, positions, reads, writes=None, d=8, factor=1.0, offset=0.0):
    """R(m) of pairs that turn by (m + offset)·θ, entry by entry; other features stay."""
    out = np.zeros((len(positions), d, d))
    for row, m in enumerate(positions):
        for feature in set(range(d)) - {feature for pair in reads for feature in pair}:
            out[row, feature, feature] = 1.0
        for angle, (a, b), (to_a, to_b) in zip(theta, reads, writes or reads, strict=True):
            cos, sin = (factor * f((m + offset) * angle) for f in (math.cos, math.sin))
            out[row, to_a, a], out[row, to_a, b], out[row, to_b, a], out[row, to_b, b] = cos, -sin, sin, cos
    return out


HALF, INTERLEAVED = [(0, 4), (1, 5), (2, 6), (3, 7)], [(0, 1), (2, 3), (4, 5), (6, 7)]
THETA = [1.0, 0.1, 0.01, 0.001]


# --- Pairs ---


@pytest.mark.parametrize(
    "reads, writes", [(HALF, HALF), (INTERLEAVED, INTERLEAVED), (INTERLEAVED, HALF), ([(1, 2)], [(1, 2)])]
)
def test_pairs_are_the_columns_that_reach_the_same_rows(reads, writes):
    read = find_pairs(operator(THETA[: len(reads)], [0, 1, 2], reads, writes))
    assert read.reads.tolist() == [list(pair) for pair in reads]
    assert read.writes.tolist() == [list(pair) for pair in writes]
    assert (read.odd, read.skew) == (0, 0.0)


def test_features_of_no_pair_are_counted():
    """Of eight features: 0 and 4 turn; 1 goes to 2 and 2 to 1; 3 reaches 3 and 5 alone; the others stay."""
    r = operator([0.5], [1, 2], [(0, 4)])
    r[:, [1, 2]] = r[:, [2, 1]]
    r[:, 5, 3] = 0.25
    read = find_pairs(r)
    assert read.reads.tolist() == [[0, 4]] and read.odd == 3
    r[:, 3, 5] = r[:, 7, 7] = 0.5
    assert find_pairs(r).odd == 2  # 3 and 5 are a pair now
    r[:, 3, 6], r[:, 5, 6], r[:, 6, 6] = 0.5, 0.5, 0.0
    assert find_pairs(r).odd == 5  # three columns that reach the same two rows are none


def test_what_is_nearly_0_is_not_reached():
    for size, pairs in ((1e-9, 0), (1.01e-9, 1), (-1.01e-9, 1)):
        r = np.eye(4)[None].repeat(2, 0)
        r[1, 0, 1] = r[1, 1, 0] = size
        assert len(find_pairs(r).reads) == pairs


def test_the_skew_is_the_greatest_difference_from_a_rotation():
    r = operator([0.5, 0.25], [1, 2, 3], HALF[:2])
    r[2, 4, 4] += 0.125
    assert find_pairs(r).skew == pytest.approx(0.125, rel=1e-14)
    r[1, 1, 5] -= 0.25
    assert find_pairs(r).skew == pytest.approx(0.25, rel=1e-14)
    r[0] = np.nan  # is not looked at
    assert find_pairs(r).skew == pytest.approx(0.25, rel=1e-14) and len(find_pairs(r).reads) == 2
    assert find_pairs(np.eye(4)[None]).skew == 0.0


def test_phases_are_how_far_pairs_are_turned():
    r = operator([0.5, -0.75], [0, 1, 2], INTERLEAVED[:2], factor=3.0)
    read = phases(r, find_pairs(r))
    np.testing.assert_allclose(read, [[0, 0], [0.5, -0.75], [1.0, -1.5]], atol=1e-15)
    r[1] = np.nan
    np.testing.assert_allclose(phases(r, find_pairs(r))[1], 0)


def test_pairs_whose_second_feature_comes_first():
    read = find_pairs(operator([0.5], [1, 2], [(5, 2)]))
    assert read.reads.tolist() == [[2, 5]] and read.writes.tolist() == [[2, 5]] and read.odd == 0


def test_what_can_be_read():
    """The pairs turn if they are off a rotation by at most a tenth, of the factor if that is above 1."""
    pairs = Pairs(np.array([[0, 1]]), np.array([[0, 1]]), 0, 0.0)
    for factor, skew, legible in ((1.0, 0.0, True), (1.0, 0.1, True), (1.0, 0.11, False), (3.0, 0.3, True), (3.0, 0.31, False),
                                  (0.5, 0.1, True), (0.5, 0.11, False), (math.nan, 0.0, False), (math.inf, 0.0, False)):  # fmt: skip
        read = Measured(pairs._replace(skew=skew), np.ones(1), np.ones(1), 1, 0.0, 0.0, factor, 9, U)
        assert read.legible is legible, (factor, skew)


# --- Lengths that grow, and axes ---


def grown(rates, positions, bend=0.0, first=1.0):
    """R(m) of pairs (i, i + 4) whose lengths are e^(rate·m), times what the first position has."""
    r = operator(THETA[: len(rates)], positions, HALF[: len(rates)])
    for i, rate in enumerate(rates):
        for row, m in enumerate(positions):
            r[row][np.ix_([i, i + 4], [i, i + 4])] *= first * math.exp(rate * m + bend * m * m)
    return r


AT = np.array([0, 1, 2, 4, 8, 16])


def test_lengths_that_grow_by_a_rate_of_each_pair():
    for rates in ([0.25, -0.125], [0.0, 0.01], [0.0, 0.0, -0.004]):
        for first in (1.0, 3.0):
            r = grown(rates, AT, first=first)
            np.testing.assert_allclose(growth_of(r, find_pairs(r), AT), rates, atol=1e-15)
    far = np.array([0, 1, 2, 4, 8, 1000])  # e^8 is as far as is looked at: by then it is known
    r = grown([0.5, -0.5], far)
    np.testing.assert_allclose(growth_of(r, find_pairs(r), far), [0.5, -0.5], rtol=1e-14)
    nothing = r.copy()
    nothing[-1] = 0.0  # it is said to have vanished, as it has
    np.testing.assert_allclose(growth_of(nothing, find_pairs(nothing), far), [0.5, -0.5], rtol=1e-14)


def test_lengths_that_stay_or_change_otherwise():
    def growth(*arguments, **options):
        r = grown(*arguments, **options)
        return growth_of(r, find_pairs(r), AT)

    assert growth([0.0, 0.0], AT) is None and growth([0.0, 0.003], AT) is None  # 0.048 in all
    assert growth([0.0, 0.0033], AT) is not None  # 0.053
    assert growth([0.01, 0.01], AT, bend=0.01) is None  # not by the same factor from each position to the next
    assert (
        growth([0.1, 0.1], AT, bend=0.0003) is not None
    )  # off the line by 0.02 at position 8, where 0.038 are allowed
    assert growth([0.1, 0.1], AT, bend=0.0009) is None
    assert growth_of(np.eye(8)[None].repeat(6, 0), find_pairs(np.eye(8)[None].repeat(6, 0)), AT) is None
    r = grown([0.25, 0.25], AT)
    r[3] = np.nan
    assert growth_of(r, find_pairs(r), AT) is None or np.isfinite(growth_of(r, find_pairs(r), AT)).all()


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("axis", [(0, 1, 2, 1), (2, 2, 0, 1), (0, 0, 0, 0)])
def test_the_axis_of_each_pair_is_the_one_that_turns_it(axis, direction):
    def fn(x, m):
        y, theta = np.array(x), [direction * angle for angle in THETA]
        for i, (a, b) in enumerate(HALF):
            cos, sin = np.cos(m[axis[i]] * theta[i]), np.sin(m[axis[i]] * theta[i])
            y[..., a], y[..., b] = x[..., a] * cos - x[..., b] * sin, x[..., a] * sin + x[..., b] * cos
        return y

    for top in (100, 3):
        positions = np.array([0, *(2**k for k in range(8) if 2**k <= top)])
        read = measure(operator([direction * angle for angle in THETA], positions, HALF), positions, 2.0**-53)
        found = axis_of_pairs(Probe(fn, 8, np.float64, top, 3), read)
        assert found.tolist() == list(axis) and found.dtype == np.int64


# --- Frequencies, offset, factor ---


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("factor", [1.0, 1.25])
@pytest.mark.parametrize("offset", [0.0, 3.0, -5.0, 0.5])
def test_what_is_measured_is_what_the_operator_was_made_of(offset, factor, direction):
    theta = [direction * angle for angle in THETA]
    read = measure(operator(theta, DOUBLING, HALF, factor=factor, offset=offset), DOUBLING, 2.0**-53)
    np.testing.assert_allclose(read.theta, THETA, rtol=1e-13)
    assert (read.direction, read.linear_up_to, read.unit) == (direction, 2**17, 2.0**-53)
    assert read.offset == pytest.approx(offset, abs=1e-12) and read.start < 1e-12
    assert read.factor == pytest.approx(factor, rel=1e-15)


def test_one_pair_against_the_others_has_the_other_sign():
    read = measure(operator([1.0, -0.1, 0.01, 0.001], DOUBLING, HALF), DOUBLING, 2.0**-53)
    assert read.direction == 1
    np.testing.assert_allclose(read.theta, [1.0, -0.1, 0.01, 0.001], rtol=1e-13)
    assert measure(operator([1.0, -0.1], DOUBLING, HALF[:2]), DOUBLING, 2.0**-53).direction == 1  # as many as others


def test_the_uncertainty_is_that_of_the_best_position():
    """Unit roundoff u of each entry: a phase φ is known to u·|sin 2φ|, here or where it begins, and to 2 steps and
    1e-15; but no better than u/16, or u times the angle so far while that is less."""
    theta, at, step = [0.7, 0.001], [0, 1, 2, 4], 2.0**-30
    read = measure(operator(theta, at, HALF[:2]), np.array(at), U, step)
    for angle, got in zip(theta, read.uncertainty, strict=True):
        expected = math.inf
        for m in (1, 2, 4):
            floor = min(1 / 16, 0 if m == 1 else angle * m)  # before the first position no frequency is known
            expected = min(expected, (U * max(abs(math.sin(2 * angle * m)), floor) + 2 * step + 1e-15) / m)
        assert got == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "theta, offset", [(0.001, 400), (0.001, math.pi / 0.002 - 4), (0.001, math.pi / 0.001 - 2), (1.5715, 0)]
)
def test_the_uncertainty_near_an_axis(theta, offset):
    """Where a phase begins it is as uncertain; on an axis, which one crosses at 4 or at 2, a 16th, or θm if that is less."""
    phase, expected = lambda m: theta * (m + offset), math.inf
    for m in (1, 2, 4):
        floor = min(1 / 16, 0 if m == 1 else theta * m)
        here = max(abs(math.sin(2 * phase(m))), floor) + abs(math.sin(2 * phase(0)))
        expected = min(expected, (U * here + 1e-15) / m)
    read = measure(operator([theta], [0, 1, 2, 4], HALF[:1], offset=offset), np.array([0, 1, 2, 4]), U)
    assert read.uncertainty[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("unit", [2.0**-53, 2.0**-8])
@pytest.mark.parametrize("excess, up_to", [(0.99, 2**17), (1.01, 64)])
def test_phases_are_proportional_up_to_where_they_leave_what_is_expected(excess, up_to, unit):
    """They may be off by 0.3 and 4 roundings."""
    r, theta = operator(THETA, DOUBLING, HALF), np.array(THETA)
    late = DOUBLING > 64
    spoilt = operator(theta, DOUBLING, HALF)
    for row in np.flatnonzero(late):
        more = excess * (0.3 + 4 * unit)
        (one,) = operator([DOUBLING[row] * THETA[3] + more], [1], [(3, 7)])
        spoilt[row][np.ix_([3, 7], [3, 7])] = one[np.ix_([3, 7], [3, 7])]
        if excess < 1:
            break
    assert measure(r, DOUBLING, unit).linear_up_to == 2**17
    if excess > 1 or unit < 1e-9:  # with few bits the spoilt phase is not believed, and the next ones are not expected
        assert measure(spoilt, DOUBLING, unit).linear_up_to == (up_to if excess > 1 else 128)


def test_the_first_position_after_0_may_turn_by_any_angle():
    read = measure(operator([3.0], [0, 1, 2], HALF[:1]), np.array([0, 1, 2]), U)
    assert read.linear_up_to == 2 and read.theta[0] == pytest.approx(3.0)


def test_an_offset_is_whole_if_it_nearly_is():
    for offset, said in ((0.04, 0.0), (0.06, 0.06), (2.96, 3.0), (-1.04, -1.0)):
        read = measure(operator(THETA, DOUBLING, HALF, offset=offset), DOUBLING, 2.0**-53)
        assert read.offset == pytest.approx(said, abs=1e-9)
        assert read.start == pytest.approx(abs(offset - said), abs=1e-9)  # of the fastest pair, which turns by 1
    small = 7 * U  # phases of less than 8 roundings are none
    assert measure(operator([1.0], [0, 1, 2], HALF[:1], offset=small), np.array([0, 1, 2]), U).offset == 0
    # 9 of them are: they begin an offset, which is rounded away only because it is near 0
    read = measure(operator([1e-5], DOUBLING, HALF[:1], offset=9 * U / 1e-5), DOUBLING, U)
    assert read.offset == pytest.approx(9 * U / 1e-5, rel=1e-3)


def test_far_offsets_are_unambiguous_by_the_slow_pairs():
    """At 3000 the fast pair has gone round 477 times: the slow one, at 3 radians, says how often."""
    assert measure(operator(THETA, DOUBLING, HALF, offset=3000), DOUBLING, 2.0**-53).offset == 3000
    still = measure(operator([1.0, 1e-12], DOUBLING, HALF[:2], offset=2), DOUBLING, 2.0**-53)
    assert still.offset == 2  # a pair that hardly turns says nothing
    r = operator([1.0], DOUBLING, HALF[:1], offset=2)
    r[:, [[1], [5]], [1, 5]] = operator([0.5], [1], [(1, 5)])[0][
        [[1], [5]], [1, 5]
    ]  # nor does one that is turned, and stays
    assert measure(r, DOUBLING, 2.0**-53).offset == 2


def test_the_factor_is_the_median_where_roundings_differ():
    """17 entries off the axes are enough; on the axes the same rounding would come again and again."""
    at = np.arange(20)
    r = operator([math.pi / 4], at, HALF[:1], factor=2.0)  # at odd positions on the diagonals
    on_axes = np.abs(np.sin(2 * at * math.pi / 4)) < 0.5
    r[on_axes] *= 1.5
    assert measure(r, at, U).factor == pytest.approx(2.5)  # ten of each are in the median: not enough off the axes
    at = np.arange(40)
    r = operator([math.pi / 4], at, HALF[:1], factor=2.0)
    r[np.abs(np.sin(2 * at * math.pi / 4)) < 0.5] *= 1.5
    assert measure(r, at, U).factor == pytest.approx(2.0)


def test_the_factor_is_read_off_the_axes_and_while_phases_are_proportional():
    at = np.arange(36)
    r, degrees = operator([math.pi / 6], at, HALF[:1]), 30 * at % 180
    for angle, factor in ((0, 3.0), (30, 1.0), (60, 2.0), (90, 5.0), (120, 2.0), (150, 1.0)):
        r[degrees == angle] *= factor
    assert measure(r, at, U).factor == pytest.approx(1.5)  # between 30 and 60 degrees, which are equally many
    r = operator([0.5], [0, 1, 2], HALF[:1])
    r[1] *= 2
    r[2] = 9 * operator([2.5], [1], HALF[:1])[0]  # breaks off at position 2
    read = measure(r, np.array([0, 1, 2]), U)
    assert read.linear_up_to == 1 and read.factor == pytest.approx(1.5)


def test_the_factor_of_what_does_not_turn_and_of_nothing():
    assert measure(3.0 * np.eye(4)[None].repeat(3, 0), np.array([0, 1, 2]), U).factor == 3.0
    assert math.isnan(measure(np.full((3, 4, 4), np.nan), np.array([0, 1, 2]), U).factor)


# --- Rules ---


def measured(theta, *, uncertainty=1e-12, direction=1, factor=1.0, pairs=None, unit=2.0**-53):
    theta = np.asarray(theta, np.float64)
    k = len(theta)
    both = np.array([[i, i + k] for i in range(k)]) if pairs is None else np.array(pairs)
    uncertain = np.broadcast_to(np.asarray(uncertainty, np.float64), theta.shape)
    return Measured(Pairs(both, both, 0, 0.0), theta, uncertain, direction, 0.0, 0.0, factor, 2**17, unit)


def of_rope(rope, **options):
    return measured(frequencies(rope), **options)


def test_rounded_tolerates_just_so_much():
    assert rules.rounded(1.05, 0.05) == 1.0 and rules.rounded(1.0527, 0.05) == 1.1
    assert rules.rounded(0.0, 1e-3) == 0.0 and rules.rounded(-9999.7, 1e-3) == -1e4
    assert rules.rounded(1.2345678, 1e-9) == 1.2345678 and rules.rounded(1.23456784, 1e-9) == 1.23456784


def test_possible_bases_are_the_short_ones_first():
    theta = 9999.7 ** -(np.arange(8) / 8)
    bases = rules.possible_bases(theta, 8)
    assert bases[0] == 1e4 and bases[1] == pytest.approx(9999.7, rel=1e-9)
    assert rules.possible_bases(theta, 8, 1e-6)[0] == pytest.approx(9999.7, rel=1e-6)
    # The first two pairs may say something else than the outermost, the middle and the last two.
    bent = np.array([1.0, 0.5, 0.125, 0.0625])
    spans = {(0, 3): 16 ** (4 / 3), (0, 1): 2.0**4, (0, 2): 8.0**2, (2, 3): 2.0**4}
    for base in spans.values():
        assert min(abs(found / base - 1) for found in rules.possible_bases(bent, 4, 1e-9)) < 1e-12
    for found in rules.possible_bases(bent, 4, 1e-9):  # that they differ from each other makes none of them rounder
        assert min(abs(found / base - 1) for base in spans.values()) < 1e-6
    assert rules.possible_bases(np.array([1.0]), 1) == () and rules.possible_bases(np.array([1.0, 0.0]), 2) == ()
    assert len(rules.possible_bases(np.array([1.0, 0.5]), 2)) == 1  # 4, whichever span is asked


def test_bases_are_numbers_above_1_and_up_to_a_million_millions():
    assert rules.possible_bases(np.array([1.0, 1.0]), 2) == ()
    assert rules.possible_bases(np.array([0.5, 1.0]), 2) == ()
    assert max(rules.possible_bases(np.array([1.0, 1e-6]), 2)) == 1e12
    assert rules.possible_bases(np.array([1.0, 0.99e-6]), 2) == ()


@pytest.mark.parametrize(
    "rope, words",
    [
        (Rope(16, 10000.0, "half"), "base 10000, not rescaled (NTK scaling of a smaller base"),
        (Rope(16, 500000.0, "half"), "base 500000, not rescaled"),
        (Rope(16, 4320.0, "half"), "base 4320, not rescaled"),
        (Rope(16, 10000.0, "half", scaling=Linear(4.0)), "base 10000, linear scaling by 4 (rotated twice with linear factor 8 is"),
        (Rope(16, 10000.0, "half", scaling=Linear(2.5)), "base 10000, linear scaling by 2.5 (rotated twice with linear factor 5 is"),
    ],
)  # fmt: skip
def test_powers_of_a_base_are_named(rope, words):
    (only,) = rules.rules(of_rope(rope), 16)
    assert only.words.startswith(words) and only.rope == rope


def test_faster_frequencies_have_no_rope():
    (only,) = rules.rules(measured(2 * frequencies(Rope(16, 10000.0, "half"))), 16)
    assert only.words == "base 10000, all frequencies times 2, as if rotated 2 times" and only.rope is None


def test_a_base_is_known_as_well_as_its_best_pair():
    """Pair i of p tells a base to p/i times what it tells its own frequency: 4 uncertainties and 80 roundings."""
    rope = Rope(8, 10000.0, "half")
    for slow in (1.0, 4.0):
        theta = frequencies(rope) / slow
        uncertainty = 1e-4 * theta
        (only,) = rules.rules(measured(theta, uncertainty=uncertainty), 8)
        own = 4e-4 + 80 * U
        known = min((own + own * (slow != 1)) * 4 / i for i in (1, 2, 3))
        assert f"base 10000 ± {float(f'{1e4 * known:.2g}'):g}," in only.words
    (only,) = rules.rules(measured(frequencies(rope), uncertainty=8e-6 * frequencies(rope)), 8)
    assert "±" not in only.words  # 4.9e-5 of it: less than 5e-5 is not said
    (only,) = rules.rules(measured(frequencies(rope), uncertainty=9e-6 * frequencies(rope)), 8)
    assert "base 10000 ± 0.54," in only.words


@pytest.mark.parametrize("base", [10000.0, 500000.0, 1e6, 150000.0, 1e5, 25000.0, 5e6, 1e7])
def test_a_base_that_many_have_is_meant_if_it_may_be(base):
    theta = (base * 1.0043) ** -(np.arange(8) / 8)
    (only,) = rules.rules(measured(theta, uncertainty=2e-3 * theta), 16)
    assert only.rope == Rope(16, base, "half")


@pytest.mark.parametrize("off, fits", [(0.98, True), (1.02, False)])
def test_frequencies_fit_within_four_uncertainties_and_80_roundings(off, fits):
    theta = frequencies(Rope(16, 10000.0, "half")).copy()
    theta[5] *= 1 + off * (4e-5 + 80 * U)
    found = rules.rules(measured(theta, uncertainty=1e-5 * theta), 16)
    assert [x.rope for x in found] == ([Rope(16, 10000.0, "half")] if fits else [])


@pytest.mark.parametrize("off, fits", [(0.98, True), (1.02, False)])
def test_suspects_fit_within_four_uncertainties_and_256_roundings(off, fits):
    rope, other = Rope(16, 10000.0, "half", scaling=Proportional(0.5)), Rope(16, 10000.0, "half")
    theta = frequencies(rope)[frequencies(rope) > 0].copy()
    theta[2] *= 1 + off * (4e-5 + 256 * U)
    found = rules.rules(
        measured(theta, uncertainty=1e-5 * theta, pairs=[[i, i + 8] for i in range(4)]), 16, [other, rope]
    )
    assert ([x.words for x in found] == [f"as {rope!r}"]) == fits and ([x.rope for x in found] == [rope]) == fits


def test_one_pair_says_little():
    (only,) = rules.rules(measured([1.0], pairs=[[0, 1]]), 2)
    assert only.words.startswith("one pair, which turns by 1: any base") and only.rope is None
    (only,) = rules.rules(measured([0.25], pairs=[[0, 1]]), 2)
    assert only.words == "one pair, which turns by 0.25: linear factor 4; its base does not show"


@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("fraction", [0.5, 0.25, 0.375])
def test_proportional_pairs_are_as_far_apart_as_in_a_whole_head(fraction, factor):
    rope = Rope(16, 10000.0, "half", scaling=Proportional(fraction, factor))
    p = int(8 * fraction)
    theta = [10000.0 ** (-i / 8) / factor for i in range(p)]
    (only,) = rules.rules(measured(theta, pairs=[[i, i + 8] for i in range(p)]), 16)
    # Pair p − 1 tells the base best: to 8/(p − 1) times 80 roundings, twice as many with a factor.
    known = 1e4 * 80 * U * factor * 8 / (p - 1)
    within = f" ± {float(f'{known:.2g}'):g}" if known > 0.5 else ""
    assert (
        only.words == "proportional, base 10000" + within + (", factor 2" if factor == 2 else "") and only.rope == rope
    )
    np.testing.assert_allclose(frequencies(only.rope)[:p], theta, rtol=1e-14)


BLENDS = [
    (Rope(128, 10000.0, "half", scaling=YaRN(4.0, 4096)), "yarn, base 10000, factor 4, ramp from pair 20 to 46 "),
    (Rope(128, 1e6, "half", scaling=YaRN(8.0, 32768, truncate=False)), "yarn, base 1e+06, factor 8, ramp from pair 23.6 to 39.65 "),
    (Rope(128, 500000.0, "half", scaling=Llama3(8.0, 1.0, 4.0, 8192)), "llama3, base 500000, factor 8, ramp from frequency 0.003068 to 0.000767 "),
]  # fmt: skip


@pytest.mark.parametrize("rope, words", BLENDS, ids=["yarn", "untruncated", "llama3"])
def test_ramps_are_named_with_their_ends(rope, words):
    """YaRN's are at r·ln(L/2πβ)/(2 ln base) for β of 32 and 1; llama3's where a length has 4 turns, and 1."""
    scaling, r = rope.scaling, 128
    if isinstance(scaling, YaRN):
        ends = [
            r * math.log(scaling.original_length / (2 * math.pi * beta)) / (2 * math.log(rope.base)) for beta in (32, 1)
        ]
        ends = [math.floor(ends[0]), math.ceil(ends[1])] if scaling.truncate else ends
    else:
        ends = [2 * math.pi * turns / scaling.original_length for turns in (4, 1)]
    assert words.endswith(f"{ends[0]:.4g} to {ends[1]:.4g} ")
    (only,) = rules.rules(of_rope(rope, factor=rope.attention_factor), 128)
    assert only.words.startswith(words + "(its lengths and limits show in nothing else)") and only.rope == rope
    limits = "low 1, high 4" if isinstance(scaling, Llama3) else "betas 32 and 1"
    assert only.words.endswith(f"; as with {limits}, original length {scaling.original_length}")


def test_another_attention_factor_is_yarns_own_field():
    rope = BLENDS[0][0]
    (only,) = rules.rules(of_rope(rope, factor=1.5), 128)
    assert only.rope == replace(rope, scaling=replace(rope.scaling, attention_factor=1.5))
    for off, same in ((0.9e-5, True), (1.1e-5, False)):
        (only,) = rules.rules(of_rope(rope, factor=rope.attention_factor * (1 + off)), 128)
        assert (only.rope == rope) == same
    # It is rounded to a quarter of what is known of it: 2⁻⁸/4 is 0.00098.
    for value, factor in ((1.2011, 1.2), (1.2013, 1.201)):  # off by 0.00092, and by 0.00108 of themselves
        (only,) = rules.rules(of_rope(rope, factor=value, unit=2.0**-8), 128)
        assert only.rope.scaling.attention_factor == factor
    llama = BLENDS[2][0]
    (only,) = rules.rules(of_rope(llama, factor=1.5), 128)
    assert only.rope == llama  # which has no such field


def test_a_blend_without_a_ramp():
    """Pairs 0 to 9 are kept, the other 22 are divided by 4."""
    theta = np.array([10000.0 ** (-i / 32) / (1 if i < 10 else 4) for i in range(32)])
    found = rules.rules(measured(theta), 64)
    assert [x.words for x in found] == [f"{name}, base 10000, factor 4, without a ramp: pairs up to 9 are kept, those after it slowed down" for name in ("yarn", "llama3")]  # fmt: skip
    assert all(x.rope is None for x in found)


def test_pairs_that_do_not_turn_forwards_are_no_blend():
    theta = frequencies(BLENDS[0][0]).copy()
    theta[-1] *= -1
    assert rules.rules(of_rope(BLENDS[0][0])._replace(theta=theta), 128) == []


def test_frequencies_that_are_all_slower_are_no_blend():
    """Of a blend the first pairs are kept."""
    assert rules.rules(measured(frequencies(BLENDS[0][0]) / 2), 128) == []


def test_what_is_known_of_the_first_pair_decides_whether_all_are_slower():
    theta = frequencies(Rope(16, 10000.0, "half")).copy()
    theta[0] *= 1.0003
    uncertainty = np.where(np.arange(8) == 0, 1e-4, 1e-12)
    (only,) = rules.rules(measured(theta, uncertainty=uncertainty), 16)
    assert only.rope == Rope(16, 10000.0, "half")


def test_the_slowest_pairs_tell_a_factor_together():
    """The last is known to 1 %, the one before it to 0.01 %, and they agree; the first is not alike."""
    given = measured([1.0, 0.1, 0.01], uncertainty=[1e-9, 2.5e-6, 2.5e-5])
    assert rules.slowed(np.array([1.0, 0.25, 0.251]), given) == 4.0
    assert rules.slowed(np.array([1.0, 1 / 3.337, 1 / 3.35]), given) == 3.337
    assert rules.slowed(np.array([1.0, 0.25, 0.26]), given) == pytest.approx(1 / 0.26, rel=1e-2)  # 4 % apart: not alike
    assert rules.slowed(np.array([0.5, 0.25]), given, 2) == 4.0
    assert rules.slowed(np.array([1.0, 1 / 4.00005]), measured([1.0, 0.1]), 2) == pytest.approx(4.00005, rel=1e-8)
    assert rules.slowed(np.array([1.0, 1 / 4.00003]), measured([1.0, 0.1]), 2) == 4.0  # within 10⁻⁵, the fewest digits


@pytest.mark.parametrize("name, rounding, bits", [("bfloat16", to_bfloat16, 8), ("float16", to_float16, 11)])
def test_frequencies_of_a_narrow_dtype_need_four_that_are_known_well(name, rounding, bits):
    exact = np.array([10000.0 ** (-i / 8) for i in range(8)])
    theta = np.asarray(rounding(exact), np.float64)
    assert rules.low_precision(measured(theta)) == (name, rounding)
    assert rules.low_precision(measured(exact)) == ("", as_is)
    just = np.full(8, 1.0)
    for count, said in ((4, name), (3, "")):
        just[:] = 1.01
        just[:count] = 0.99
        assert rules.low_precision(measured(theta, uncertainty=just * theta * 2.0 ** (-bits - 6)))[0] == said
    off = theta.copy()
    for excess, said in ((0.98, name), (1.02, "")):
        off[3] = theta[3] + excess * (4e-9 + 16 * U * theta[3])
        assert rules.low_precision(measured(off, uncertainty=1e-9))[0] == said


def test_narrow_frequencies_have_rules_too():
    rope = Rope(16, 10000.0, "half")
    theta = np.asarray(to_bfloat16(frequencies(rope)), np.float64)
    assert rules.rules(measured(theta), 16) == []
    (only,) = rules.rules(measured(theta), 16, rounding=to_bfloat16)
    assert only.rope == rope


# --- Layouts ---


def pairs(reads, writes=None):
    return Pairs(np.array(reads).reshape(-1, 2), np.array(writes or reads).reshape(-1, 2), 0, 0.0)


@pytest.mark.parametrize(
    "reads, writes, d, expected",
    [
        ([], None, 8, ("none", 0, "prefix", 0)),
        (INTERLEAVED, None, 8, ("interleaved", 8, "prefix", 4)),
        (HALF, None, 8, ("half", 8, "prefix", 4)),
        (INTERLEAVED, HALF, 8, ("interleaved-to-half", 8, "prefix", 4)),
        ([(0, 1), (2, 3)], None, 8, ("interleaved", 4, "prefix", 2)),
        ([(4, 5), (6, 7)], None, 8, ("interleaved", 4, "suffix", 2)),
        ([(4, 6), (5, 7)], None, 8, ("half", 4, "suffix", 2)),
        ([(0, 4), (1, 5)], None, 8, ("half", 4, "prefix", 4)),  # the first pairs of a whole head
        ([(0, 4), (1, 5)], [(0, 4), (1, 6)], 8, ("none", 4, "prefix", 4)),
        ([(0, 3), (1, 4)], None, 8, ("none", 4, "prefix", 3)),
        (HALF, INTERLEAVED, 8, ("half-to-interleaved", 8, "prefix", 4)),
    ],
)
def test_layouts_by_their_pairs(reads, writes, d, expected):
    assert rules.layout_of(pairs(reads, writes), d) == expected


def test_the_rope_has_the_shape_that_was_measured():
    theta = [1.0, 0.01]
    for reads, d, rope in (
        ([(4, 5), (6, 7)], 8, Rope(8, 10000.0, "interleaved", 4, "suffix")),
        ([(0, 2), (1, 3)], 8, Rope(8, 10000.0, "half", 4)),
        ([(0, 2), (1, 3)], 4, Rope(4, 10000.0, "half", direction=-1)),
    ):
        (only,) = rules.rules(measured(theta, pairs=reads, direction=rope.direction), d)
        assert only.rope == rope
    assert rules.rules(measured(theta, pairs=[(0, 3), (1, 2)]), 4) == []
