"""The other encodings against their published formulas, and what they can and cannot do for linear attention."""

import math

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from optional import package
from strategies import to_backend

import pyrope
from pyrope import encodings

mpmath = package("mpmath")

positions = st.lists(st.integers(-(10**6), 10**6), max_size=5)
widths = st.integers(1, 6).map(lambda t: 2 * t)
bases = st.sampled_from([10000.0, 100.0, 500000.0])


@given(positions, widths, bases)
def test_sinusoidal_is_equation_4(m, d, base):
    got = encodings.sinusoidal(m, d, base)
    assert got.shape == (len(m), d) and got.dtype == np.float64
    for row, at in zip(got, m, strict=True):
        for t in range(d // 2):
            angle = at / mpmath.mpf(base) ** (mpmath.mpf(2 * t) / d)  # Eq. (4)
            # float64 angles: off by a few roundings of their size.
            allowed = 1e-15 + 6 * 2.0**-53 * float(abs(angle))
            assert abs(row[2 * t] - float(mpmath.sin(angle))) <= allowed
            assert abs(row[2 * t + 1] - float(mpmath.cos(angle))) <= allowed


@given(st.integers(-1000, 1000), st.integers(-1000, 1000), widths, bases)
def test_sinusoidal_positions_shift_by_the_rotation_of_rope(m, delta, d, base):
    p, q = encodings.sinusoidal([m, m + delta], d, base)
    backwards = pyrope.rotate(p, -delta, pyrope.Rope(d, base, "interleaved"))  # since Eq. (4) has the sine first
    np.testing.assert_allclose(backwards, q, atol=1e-12)


@given(positions, positions, st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_shaw_is_its_formula(xp, i, j, clip, seed):
    rng, d = np.random.default_rng(seed), 4
    table, q, weights = rng.standard_normal((2 * clip + 1, d)), rng.standard_normal((2, len(i), d)), rng.standard_normal((2, len(i), len(j)))  # fmt: skip
    device = to_backend(table, xp)
    scores = pyrope.to_numpy(encodings.shaw_scores(to_backend(q, xp), i, j, device))
    values = pyrope.to_numpy(encodings.shaw_values(to_backend(weights, xp), i, j, device))
    assert scores.shape == (2, len(i), len(j)) and values.shape == (2, len(i), d)
    for head in range(2):
        for a in range(len(i)):
            rows = [table[max(-clip, min(clip, at - i[a])) + clip] for at in j]
            np.testing.assert_allclose(scores[head, a], [q[head, a] @ row for row in rows], atol=1e-13)
            total = sum((w * row for w, row in zip(weights[head, a], rows, strict=True)), np.zeros(d))
            np.testing.assert_allclose(values[head, a], total, atol=1e-13)


def bucket(distance: int, causal: bool, buckets: int, max_distance: int) -> int:
    """The rule of the T5 paper's code, for one distance, with logarithms of 50 digits."""
    first = 0
    if causal:
        size = max(-distance, 0)
    else:
        buckets //= 2
        first, size = (buckets if distance > 0 else 0), abs(distance)
    exact = buckets // 2
    if size < exact:
        return first + size
    with mpmath.workdps(50):
        grown = mpmath.log(mpmath.mpf(size) / exact) / mpmath.log(mpmath.mpf(max_distance) / exact) * (buckets - exact)
        return first + min(exact + int(mpmath.floor(grown + mpmath.mpf(10) ** -40)), buckets - 1)


@example(16, 112, False, range(-300, 301))  # as in the model, everywhere
@example(16, 112, True, range(-300, 301))
@given(st.integers(2, 24), st.integers(1, 400), st.booleans(), st.lists(st.integers(-1000, 1000), max_size=20))
def test_t5_buckets_are_the_published_rule(half, more, causal, distances):
    buckets, max_distance = 2 * half, half + more
    got = encodings.t5_buckets(distances, causal=causal, buckets=buckets, max_distance=max_distance)
    assert got.dtype == np.int64
    assert got.tolist() == [bucket(x, causal, buckets, max_distance) for x in distances]


@pytest.mark.parametrize("causal", [True, False])
def test_t5_bias_is_the_table_at_the_buckets(xp, causal):
    table = np.random.default_rng(0).standard_normal((32, 3)).astype(np.float32)
    i, j = [0, 5, 200], [0, 1, 4, 16, 90]  # with max_distance 129, a distance of 16 would be in another bucket
    bias = pyrope.to_numpy(encodings.t5_bias(to_backend(table, xp), i, j, causal=causal))
    assert bias.shape == (3, 3, 5) and bias.dtype == np.float32
    for head, a, b in np.ndindex(3, 3, 5):
        assert bias[head, a, b] == table[bucket(j[b] - i[a], causal, 32, 128), head]


@given(st.integers(1, 200))
def test_alibi_slopes_of_any_number_of_heads(h):
    def slopes(n: int) -> list[float]:  # the rule of the authors' code, by recursion
        if n & (n - 1) == 0:
            return [2.0 ** (-8 * i / n) for i in range(1, n + 1)]
        below = 2 ** int(math.log2(n))
        return slopes(below) + slopes(2 * below)[::2][: n - below]

    got = encodings.alibi_slopes(h)
    assert got.shape == (h,)
    np.testing.assert_allclose(got, slopes(h), rtol=1e-14)
    np.testing.assert_allclose(encodings.alibi_slopes(8), [2.0**-i for i in range(1, 9)], rtol=1e-15)  # as published


@given(positions, positions, st.integers(1, 5))
def test_alibi_bias(i, j, h):
    bias, slopes = encodings.alibi_bias(h, i, j), encodings.alibi_slopes(h)
    assert bias.shape == (h, len(i), len(j))
    for head, a, b in np.ndindex(bias.shape):
        assert bias[head, a, b] == -slopes[head] * abs(i[a] - j[b])


@pytest.mark.parametrize(
    "call, error, match",
    [
        (lambda: encodings.sinusoidal([0], 3), ValueError, "d must be even, was 3"),
        (lambda: encodings.sinusoidal([0], 0), ValueError, "d must be at least 2, was 0"),
        (lambda: encodings.sinusoidal([0.5], 4), TypeError, "positions must be integers, (none of them masked, )?were float"),
        (lambda: encodings.sinusoidal([0], 4, 1.0), ValueError, "base must be finite and greater than 1, was 1.0"),
        (lambda: encodings.shaw_embeddings([0], [0], np.ones((4, 2))), ValueError, r"table must be \(2k \+ 1, d\), .* had shape \(4, 2\)"),
        (lambda: encodings.shaw_embeddings([[0]], [0], np.ones((3, 2))), ValueError, r"positions must be \(n,\), had shapes \(1, 1\) and \(1,\)"),
        (lambda: encodings.t5_buckets([0], causal=1), TypeError, "causal must be True or False, was 1"),
        (lambda: encodings.t5_buckets([0], causal=False, buckets=7), ValueError, "buckets must be even .* was 7"),
        (lambda: encodings.t5_buckets([0], causal=False, buckets=2), ValueError, "buckets must be at least 4, was 2"),
        (lambda: encodings.t5_buckets([0], causal=True, buckets=1), ValueError, "buckets must be at least 2, was 1"),
        (lambda: encodings.t5_buckets([0], causal=True, max_distance=16), ValueError, "max_distance must be at least 17, was 16"),
        (lambda: encodings.t5_bias(np.ones((32, 2)), [0], 0, causal=True), ValueError, r"positions must be \(n,\)"),
        (lambda: encodings.shaw_scores(np.ones((2, 6, 4)), [0], [0, 1], np.ones((3, 4))), ValueError, r"q must end in \(1, 4\)"),
        (lambda: encodings.shaw_scores(np.ones((1, 4), "f4"), [0], [0], np.ones((3, 4))), ValueError, "the table's dtype, float64"),
        (lambda: encodings.shaw_values(np.ones((2, 6, 1)), range(6), range(6), np.ones((3, 4))), ValueError, r"weights must end in \(6, 6\)"),
        (lambda: encodings.shaw_embeddings([0], [0], np.ones(())), ValueError, r"table must be \(2k \+ 1, d\)"),
        (lambda: encodings.t5_bias(np.ones(()), [0], [0], causal=True), ValueError, r"table must be \(buckets, h\)"),
        (lambda: encodings.alibi_slopes(0), ValueError, "h must be at least 1, was 0"),
    ],
)  # fmt: skip
def test_bad_input(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_biases_at_the_ends_of_the_range():
    far = [-(2**31), 2**31]
    assert encodings.t5_bias(np.arange(32.0)[:, None], far, far, causal=False)[0].tolist() == [[0, 31], [15, 0]]
    assert encodings.alibi_bias(1, far, far)[0].tolist() == [[0, -(2.0**24)], [-(2.0**24), 0]]
