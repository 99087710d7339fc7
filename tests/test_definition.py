"""The definition, held to numbers worked by hand, to loops in plain Python and to mpmath: no truth here is pyrope's.

Three parts, to be read beside the paper. First every equation with numbers that fit in the head: 0.6 and 0.8 are the
cosine and sine of one angle, and (0, 1) is a quarter turn. Then the same formulas as loops over lists, and as mpmath
at 50 digits, under Hypothesis. In every tolerance u is the unit roundoff of the dtype, and first-order terms are
counted; the loops in float64 add as much again, which the constants allow for.
"""

from __future__ import annotations

import math

import loops
import numpy as np
import pytest
import truth
from hypothesis import assume, given, strategies as st
from models import configs
from strategies import UNIT, layouts

from pyrope import definition, from_numpy, to_numpy
from pyrope.layers import Norm, Projection
from pyrope.model import Config, Layer, random_model, weight_shapes

PAIR = definition.pairs("interleaved", 2)
EVERY = np.ones((1, 1), bool)
seeds, floats, bases = st.integers(0, 2**32 - 1), st.sampled_from(["float32", "float64"]), st.floats(1.5, 1e6)
groups = st.sampled_from([(1, 1), (1, 3), (2, 2), (2, 6)])  # key heads and query heads
MP = truth.MP


@pytest.fixture(params=["float32", "float64"], scope="module")
def dtype(request):
    return request.param


def call(xp, dtype, function, *arguments):
    """What a function of the definition returns on a backend, in NumPy; lists become arrays of the dtype.

    No input may be changed, and what is not a mask must have the dtype that went in.
    """
    given = []

    def moved(x):
        if isinstance(x, list):
            x = np.array(x, dtype)
        if isinstance(x, Norm | Projection):
            return type(x)(*map(moved, x))
        if not isinstance(x, np.ndarray):
            return x
        given.append((from_numpy(x.copy(), xp), x))
        return given[-1][0]

    results = function(*map(moved, arguments))
    assert all(np.array_equal(to_numpy(after), before) for after, before in given)
    results = [to_numpy(y) for y in (results if isinstance(results, tuple) else (results,))]
    assert all(y.dtype in (dtype, bool) for y in results)
    return results[0] if len(results) == 1 else results


def check_by_hand(xp, dtype, expected, function, *arguments):
    """Holds a result to numbers worked by hand: 16u of the largest allows for the few roundings on the way."""
    result, expected = call(xp, dtype, function, *arguments), np.array(expected, np.float64)
    assert result.shape == expected.shape
    assert abs(result - expected).max() <= 16 * UNIT[dtype] * abs(expected).max()


def random(seed, dtype, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def quarter_turns(x):
    """The rotation of the paper with mθ = m·90°, exactly: 1, i, −1, −i times pair after pair."""
    y = x.copy()
    for m in range(x.shape[-2]):
        for _ in range(m % 4):
            y[..., m, 0::2], y[..., m, 1::2] = -y[..., m, 1::2], y[..., m, 0::2].copy()
    return y


# ── The equations, by hand ───────────────────────────────────────────────────────────────────────────────────────────


def test_eq_2_attention_is_the_mean_of_the_values_by_the_softmax_of_the_scores(xp, dtype):
    """d = 4: qᵀk/√d = 0 and ln 3, whose exponentials are 1 and 3: weights ¼ and ¾. Of 4 and 8 that makes 1 + 6 = 7."""
    q, k, v = [[[2, 0, 0, 0]]], [[[0, 5, 0, 0], [math.log(3), 7, 0, 0]]], [[[4], [8]]]
    check_by_hand(xp, dtype, [[[7]]], definition.attention, q, k, v, np.ones((1, 2), bool), 1 / math.sqrt(4))


def test_eq_12_a_pair_is_a_complex_number_times_a_phase(xp, dtype):
    """(1 + 2i)·(0.6 + 0.8i) = (0.6 − 1.6) + (0.8 + 1.2)i = −1 + 2i."""
    check_by_hand(xp, dtype, [[-1, 2]], definition.rotate_complex, [[1, 2]], [[0.6]], [[0.8]], *PAIR)


def test_eq_13_the_matrix_of_one_pair(xp, dtype):
    """(cos, −sin; sin, cos), whose columns are the images of (1, 0) and (0, 1)."""
    check_by_hand(xp, dtype, [[0.6, -0.8], [0.8, 0.6]], definition.rotation_matrix, [0.6], [0.8], *PAIR, 2)


def test_eq_14_queries_and_keys_are_projected_then_rotated(xp, dtype):
    """Tokens (1, 0) and (0, 1), W = 1, a quarter turn each step: q and k are (1, 0) and R₁(0, 1) = (−1, 0). Scores ±1
    times ln 3/2 differ by ln 3: each token takes ¾ of its own value and ¼ of the other's, of (4, 0) and (0, 4)."""
    config = tiny(scale=math.log(3) / 2, causal=False)
    w = tiny_weights(xp, dtype, config, qkv=[[1, 0], [0, 1], [1, 0], [0, 1], [4, 0], [0, 4]])
    attend = lambda x, mask: definition.self_attention(config, layer_of(w), x, quarter_turns, mask)  # noqa: E731
    check_by_hand(xp, dtype, [[[3, 1], [1, 3]]], attend, [[[1, 0], [0, 1]]], EVERY)


def test_eq_15_theta_and_a_matrix_of_blocks(xp, dtype):
    """16^0 and 16^(−2/4) are 1 and ¼. The first pair turns by (0.6, 0.8), the second by (0, 1), the last two stay."""
    assert definition.frequencies(4, 16.0).tolist() == pytest.approx([1, 1 / 4], rel=4 * UNIT["float64"])
    assert definition.frequencies(4).tolist() == pytest.approx([1, 0.01], rel=4 * UNIT["float64"])
    blocks = [[0.6, -0.8, 0, 0, 0, 0], [0.8, 0.6, 0, 0, 0, 0], [0, 0, 0, -1, 0, 0], [0, 0, 1, 0, 0, 0]]
    blocks += [[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]]
    layout = definition.pairs("interleaved", 4)
    check_by_hand(xp, dtype, blocks, definition.rotation_matrix, [0.6, 0], [0.8, 1], *layout, 6)


def test_eq_16_a_score_is_that_of_the_distance(xp, dtype):
    """Two steps of (0.6, 0.8) are (−0.28, 0.96). The products of the queries R_m(1, 0) = (cos, sin) and the keys
    R_n(0, 1) = (−sin, cos) are sin(m − n), the same along every diagonal; the scale is 5."""
    tables = [[1], [0.6], [-0.28]], [[0], [0.8], [0.96]]
    q = call(xp, dtype, definition.rotate, [[1, 0]] * 3, *tables, *PAIR)
    k = call(xp, dtype, definition.rotate, [[0, 1]] * 3, *tables, *PAIR)
    expected = [[0, -4, -4.8], [4, 0, -4], [4.8, 4, 0]]
    check_by_hand(xp, dtype, expected, definition.attention_scores, q, k, np.ones((3, 3), bool), 5.0)


def test_eq_17_the_mean_of_the_values_by_similarity(xp, dtype):
    """Similarities 1 and 3 of the values 4 and 8: (1·4 + 3·8)/(1 + 3) = 7. A query that sees nothing gets 0."""
    arguments = [[[1], [1]]], [[[1], [3]]], [[[4], [8]]], lambda x: x, np.array([[True, True], [False, False]])
    check_by_hand(xp, dtype, [[[7], [0]]], definition.linear_attention, *arguments, lambda x: x)


def test_eq_18_similarity_is_the_product_of_features(xp, dtype):
    """elu + 1 takes (0, −ln 2) to (1, ½), and (1, 0) to (2, 1): φ(q)ᵀφ(k) = 2 + ½."""
    phi_q = call(xp, dtype, definition.FEATURE_MAPS["elu+1"], [[0, -math.log(2)]])
    for part in call(xp, dtype, definition.similarities, phi_q, [[2, 1]], lambda x: x, EVERY):
        assert part.tolist() == [[pytest.approx(2.5, rel=8 * UNIT[dtype])]]


def test_eq_19_the_numerator_is_rotated_and_the_denominator_is_not(xp, dtype):
    """q₁ = (1, 2) turns into (−2, 1): (−2, 1)·(3, 1) = −5 with k₀, and with k₁ = (1, 1) it is q·k = 3 as both turn.
    The sum below stays 5 + 3 = 8: of the values 8 and 16 that makes (−40 + 48)/8 = 1. Token 0 sees its own value, 8."""
    q, k, v = [[[1, 2], [1, 2]]], [[[3, 1], [1, 1]]], [[[8], [16]]]
    mask = np.array([[True, False], [True, True]])
    check_by_hand(xp, dtype, [[[8], [1]]], definition.linear_attention, q, k, v, quarter_turns, mask, lambda x: x)


def test_a_numerator_over_zero_is_infinite_and_zero_over_zero_is_zero():
    """φ(q) = (1, 0) and φ(k) = (0, 1) are not similar, 0, but turned apart by 1 they are: sin 1 · 2 over 0. With values of
    0, or with keys of 0, it is 0/0, which is 0."""
    q, k, mask = np.array([[[0.0, 0.0], [1.0, 0.0]]]), np.array([[[0.0, 1.0], [0.0, 0.0]]]), np.tri(2, dtype=bool)
    turn = lambda x: definition.rotate(x, *definition.tables(np.arange(2), np.ones(1)), *definition.pairs("half", 2))  # noqa: E731
    phi = definition.FEATURE_MAPS["relu"]
    with np.errstate(divide="ignore"):
        out = definition.linear_attention(q, k, np.array([[[2.0], [2.0]]]), turn, mask, phi)
    assert np.isinf(out[0, 1, 0]) and out[0, 0, 0] == 0
    assert (definition.linear_attention(q, k, np.zeros((1, 2, 1)), turn, mask, phi) == 0).all()
    assert (definition.linear_attention(q, 0 * k, np.ones((1, 2, 1)), turn, mask, phi) == 0).all()


def test_eq_34_the_rotation_feature_by_feature(xp, dtype):
    """(1, 2) by (0.6, 0.8) is (0.6 − 1.6, 1.2 + 0.8) = (−1, 2), (3, 4) by a quarter turn is (−4, 3), 5 stays."""
    layout = definition.pairs("interleaved", 4)
    check_by_hand(xp, dtype, [[-1, 2, -4, 3, 5]], definition.rotate, [[1, 2, 3, 4, 5]], [[0.6, 0]], [[0.8, 1]], *layout)


def test_eq_35_a_score_is_the_real_part_of_a_sum_of_phases(xp, dtype):
    """h = q·k* = (1 + 2i)(3 + i) = 1 + 7i; one quarter turn makes it −7 + i. By features: (−2, 1)·(3, −1) = −7."""
    turned = call(xp, dtype, definition.rotate, [[1, 2]], [[0]], [[1]], *PAIR)
    check_by_hand(xp, dtype, [[-7]], definition.attention_scores, turned, [[3, -1]], EVERY, 1.0)


def test_eq_36_the_sums_of_the_first_phases(xp, dtype):
    """Phases 1 and i: S₁ = 1 and S₂ = 1 + i, the mean size (1 + √2)/2. At distance 0, 1 and 2: 3/2."""
    check_by_hand(xp, dtype, [[(1 + math.sqrt(2)) / 2, 1.5]], definition.decay, [[[1, 0], [1, 1]]], [[[0, 1], [0, 0]]])


@given(seed=seeds, p=st.integers(1, 8), base=bases, m=st.integers(0, 1000))
def test_eq_37_the_decay_bounds_every_score(xp, seed, p, base, m):
    """|Re Σ h_j e^{imθ_j}| ≤ max|h_{j+1} − h_j|·Σ|S_j|, with h_p = 0; by hand p = 1: |h|·1. 1e-12 is for rounding."""
    q, k = random(seed, "float64", 2, 1, 2 * p)
    cos, sin = definition.tables(np.array([m]), definition.frequencies(2 * p, base))
    turned = call(xp, "float64", definition.rotate, q, cos, sin, *definition.pairs("interleaved", 2 * p))
    h = [complex(q[0, i], q[0, i + 1]) * complex(k[0, i], -k[0, i + 1]) for i in range(0, 2 * p, 2)] + [0]
    steps = max(abs(b - a) for a, b in zip(h, h[1:], strict=False))
    assert abs((turned @ k.T).item()) <= steps * p * call(xp, "float64", definition.decay, cos, sin).item() + 1e-12


@given(seed=seeds, base=bases, p=st.integers(1, 4), layout=layouts, at=st.tuples(*[st.integers(-999, 999)] * 3))
def test_eq_11_scores_depend_on_the_distance_only(seed, base, p, layout, at):
    """⟨R_m x, R_n y⟩ = ⟨R_{m+s} x, R_{n+s} y⟩ = ⟨R_{m−n} x, R_0 y⟩. Angles of up to 2e3 are off by 2e3·u."""
    (m, n, s), theta, layout = at, definition.frequencies(2 * p, base), definition.pairs(layout, 2 * p)

    def rotated(x, m):
        return definition.rotate(x, *definition.tables(np.array(m), theta), *layout)

    x, y = random(seed, "float64", 2, 2 * p)
    scores = [rotated(x, m) @ rotated(y, n), rotated(x, m + s) @ rotated(y, n + s), rotated(x, m - n) @ rotated(y, 0)]
    assert max(scores) - min(scores) <= 2e4 * UNIT["float64"] * np.linalg.norm(x) * np.linalg.norm(y)


# ── The rest, by hand ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "layout, r, start, reads, writes",
    [
        ("interleaved", 4, 0, ("ac", "bd"), ("ac", "bd")),
        ("half", 4, 0, ("ab", "cd"), ("ab", "cd")),
        ("interleaved-to-half", 4, 0, ("ac", "bd"), ("ab", "cd")),
        ("half-to-interleaved", 4, 0, ("ab", "cd"), ("ac", "bd")),
        ("interleaved", 4, 2, ("ce", "df"), ("ce", "df")),  # a suffix of six features
        ("half", 4, 2, ("cd", "ef"), ("cd", "ef")),
        ("interleaved-to-half", 2, 3, ("d", "e"), ("d", "e")),
    ],
)
def test_pairs_of_each_layout(layout, r, start, reads, writes):
    both = definition.pairs(layout, r, start)
    assert tuple(tuple("abcdef"[part] for part in side) for side in both) == (reads, writes)


def test_visible():
    def rows(*arguments):
        return ["".join(".x"[int(one)] for one in row) for row in definition.visible(*arguments)]

    four, last = np.arange(4), np.array([2, 3])
    assert rows(four, four, True) == ["x...", "xx..", "xxx.", "xxxx"]
    assert rows(four, four, False) == ["xxxx"] * 4
    assert rows(four, four, True, 2) == ["x...", "xx..", ".xx.", "..xx"]
    assert rows(four, four, False, 2) == ["xx..", "xxx.", ".xxx", "..xx"]
    assert rows(last, four, True) == ["xxx.", "xxxx"]
    assert rows(last, four, True, 3) == ["xxx.", ".xxx"]
    assert rows(last, four, False, 1) == ["..x.", "...x"]
    batch = definition.visible(np.array([[1], [0]]), np.array([[0, 1], [0, 1]]), True)
    assert batch.tolist() == [[[True, True]], [[True, False]]]


def test_softmax(xp, dtype):
    """Equal scores share alike; ln 3 more is three times as much, at any size; a row of −∞ is zeros, not NaN."""
    scores = [[5, 5, 5, 5], [-math.inf] * 4, [-math.inf, 0, math.log(3), -math.inf]]
    expected = [[1 / 4] * 4, [0] * 4, [0, 1 / 4, 3 / 4, 0]]
    check_by_hand(xp, dtype, expected, definition.softmax, scores)
    check_by_hand(
        xp, dtype, [[1, 0], [1, 0], [0.5, 0.5]], definition.softmax, [[3e4, -3e4], [-3e4, -6e4], [-1e30, -1e30]]
    )


def test_scores_are_scaled_then_capped_then_biased_then_hidden(xp, dtype):
    """qᵀk·½ = 3, capped at 2 that is 2·tanh(3/2), and 1 is added; what is hidden is −∞ whatever it was."""
    arguments = [[2, 1]], [[2, 2], [9, 9]], np.array([[True, False]])
    scores = call(xp, dtype, definition.attention_scores, *arguments, 0.5, 2.0, [[1, 1]])
    assert scores[0, 0] == pytest.approx(2 * math.tanh(1.5) + 1, rel=8 * UNIT[dtype]) and scores[0, 1] == -math.inf
    assert call(xp, dtype, definition.attention_scores, *arguments, 0.5)[0].tolist() == [3, -math.inf]


def test_feature_maps(xp, dtype):
    """At −ln 2, 0 and 3; e^x at −ln 2 is ½. A large x must not overflow in the half of elu that is not taken."""
    x, e3 = [-math.log(2), 0, 3], math.exp(3)
    expected = {"elu+1": [0.5, 1, 4], "relu": [0, 0, 3], "relu2": [0, 0, 9], "exp": [0.5, 1, e3], "identity": x}
    assert expected.keys() == definition.FEATURE_MAPS.keys()
    for name, y in expected.items():
        check_by_hand(xp, dtype, y, definition.FEATURE_MAPS[name], x)
    check_by_hand(xp, dtype, [1001], definition.FEATURE_MAPS["elu+1"], [1000])


def tiny(**options):
    """A model of two features, one head, one layer and an MLP of one feature; no rope: tests say how they turn."""
    plain = {"norm": "rms", "eps": 0.0, "activation": "relu", "gated": False, "block": "sequential", "causal": True}
    return Config(2, 2, 1, 1, 2, 1, (Layer(None),), encoding="none", **plain | options)


def tiny_weights(xp, dtype, config, **given):
    """Weights by name, those of the layer without its number. The others are identities, and an MLP that returns 0."""
    ones, eye = [1, 1], [[1, 0], [0, 1]]
    layer = {"attention_norm": ones, "mlp_norm": ones, "qkv": eye * 3, "out": eye, "up": [[0, 0]], "down": [[0], [0]]}
    layer = {f"layers.0.{name}.weight": given.get(name) or default for name, default in layer.items()}
    rest = {"embedding": given.get("embedding", eye), "head.weight": given.get("head", eye), "norm.weight": ones}
    arrays = {name: from_numpy(np.array(x, dtype), xp) for name, x in (layer | rest).items()}
    return {name: arrays[name] for name in weight_shapes(config)}


def layer_of(weights):
    return {name.removeprefix("layers.0."): x for name, x in weights.items()}


# ── The definition against the loops ─────────────────────────────────────────────────────────────────────────────────


def turn_by(xp, dtype, theta, layout, start):
    """The rotation of the definition by Θ at positions 0, 1, …, and the loop's of one row."""

    def turn(x):
        cos, sin = (from_numpy(t.astype(dtype), xp) for t in definition.tables(np.arange(x.shape[-2]), theta))
        return definition.rotate(x, cos, sin, *definition.pairs(layout, 2 * len(theta), start))

    return turn, lambda row, m: loops.rotate(row, m, theta.tolist(), layout, start)


@given(seeds, floats, bases, st.integers(1, 4), st.tuples(*[st.integers(0, 3)] * 2), layouts)
def test_rotations_are_the_loop(xp, seed, dtype, base, p, extra, layout):
    """Angles are off by |mθ|u₆₄, tables by 2u, two products and their sum by 2u of |x₁| + |x₂|: 4u, 8 for complex z."""
    start, d = extra[0], 2 * p + sum(extra)
    x, at = random(seed, dtype, 2, 3, d), np.random.default_rng(seed).integers(-99, 99, (2, 3))
    theta, pairs = definition.frequencies(2 * p, base), definition.pairs(layout, 2 * p, start)
    rows = zip(x.reshape(6, d).tolist(), at.ravel().tolist(), strict=True)
    exact = np.reshape([loops.rotate(row, m, theta.tolist(), layout, start) for row, m in rows], x.shape)
    cos, sin = (t.astype(dtype) for t in call(xp, "float64", definition.tables, at, theta))
    bound = (8 * UNIT[dtype] + 4 * 99 * UNIT["float64"]) * 2 * abs(x).max()
    for function in (definition.rotate, definition.rotate_complex):
        assert abs(call(xp, dtype, function, x, cos, sin, *pairs) - exact).max() <= bound
    matrix = call(xp, dtype, definition.rotation_matrix, cos[0, 0], sin[0, 0], *pairs, d)
    assert abs(matrix @ x[0, 0] - exact[0, 0]).max() <= bound + d * UNIT[dtype] * abs(x).max()


@given(st.data(), seeds, floats, groups, st.booleans(), st.none() | st.integers(1, 4), st.none() | st.floats(0.5, 5))
def test_attention_is_the_loop(xp, data, seed, dtype, groups, causal, window, softcap):
    """With S = max Σ|qk|·scale + max|bias| a score is off by (d + 8)uS, a weight relatively by twice that and (m + 4)u,
    the mean of the values by the same and m·u, times max|v|."""
    n, more, d, e = (data.draw(st.integers(low, 5)) for low in (1, 0, 1, 1))
    (g, h), m, scale = groups, n + more, data.draw(st.sampled_from([1 / math.sqrt(d), 0.3, 2.0]))
    q, k, v = (random(seed + i, dtype, 2, *shape) for i, shape in enumerate([(h, n, d), (g, m, d), (g, m, e)]))
    bias = data.draw(st.sampled_from([0, 1])) * random(seed, dtype, h, n, m)
    mask = np.array(loops.visible(range(more, m), range(m), causal, window))
    mask &= np.random.default_rng(seed).random((n, m)) < data.draw(st.sampled_from([1, 1, 0.5]))
    rest = mask, scale, softcap, bias
    listed = [x.tolist() if isinstance(x, np.ndarray) else x for x in rest]
    exact = np.array([loops.attention(*(x[i].tolist() for x in (q, k, v)), *listed) for i in range(2)])
    size = d * abs(q).max() * abs(k).max() * scale + abs(bias).max()
    y = call(xp, dtype, definition.attention, q, k, v, *rest)
    assert y.shape == exact.shape
    assert abs(y - exact).max() <= (2 * (d + 8) * size + 4 * m + 8) * UNIT[dtype] * abs(v).max()


@given(st.data(), seeds, floats, groups, st.booleans(), st.sampled_from(sorted(loops.FEATURE_MAPS)), layouts)
def test_linear_attention_is_the_loop(xp, data, seed, dtype, groups, causal, name, layout):
    """A numerator is off by (2d + n + 16)u·A·max|v| with A = n·d·max φ(q)·max φ(k), the total t by (d + n)u·A; over t,
    where A/t is small enough for first order."""
    (n, p, still, e), (g, h) = (data.draw(st.integers(low, 3)) for low in (1, 1, 0, 1)), groups
    d, phi = 2 * p + still, loops.FEATURE_MAPS[name]
    turn, loop_turn = turn_by(xp, dtype, definition.frequencies(2 * p, data.draw(bases)), layout, still)
    q, k, v = (random(seed + i, dtype, *shape) for i, shape in enumerate([(h, n, d), (g, n, d), (g, n, e)]))
    mask = np.array(loops.visible(range(n), range(n), causal, None))
    exact = np.array(loops.linear_attention(q.tolist(), k.tolist(), v.tolist(), loop_turn, mask.tolist(), phi))
    phi_q, phi_k = (np.vectorize(phi)(x.astype(float)) for x in (q, k))
    totals = abs((phi_q @ phi_k.repeat(h // g, 0).swapaxes(-1, -2) * mask).sum(axis=-1))
    size = n * d * abs(phi_q).max() * abs(phi_k).max() / totals[totals > 0].min(initial=1)
    assume(size * 100 * UNIT[dtype] < 0.1 and totals.all())  # what is over 0 has its own test
    y = call(xp, dtype, definition.linear_attention, q, k, v, turn, mask, definition.FEATURE_MAPS[name])
    assert y.shape == exact.shape
    assert abs(y - exact).max() <= 4 * (3 * d + 2 * n + 20) * UNIT[dtype] * size * (1 + size) * abs(v).max()


def hold_forward_to_the_loop(xp, config, seed, n, rotations):
    """float64: a few hundred roundings, and norms that magnify them by up to 1/√ε = 1e3: 1e-8 of the largest logit."""
    turns, loop_turns = zip(*(turn_by(xp, "float64", *rotation) for rotation in rotations), strict=True)
    bias, added = (random(seed, "float64", *shape) for shape in ((config.heads, n, n), (2, n, config.width)))
    tokens = np.random.default_rng(seed).integers(0, config.vocabulary, (2, n))
    w, host = (random_model(config, seed, module, "float64").weights for module in (xp, np))
    logits = call(xp, "float64", lambda *x: definition.forward(config, w, tokens, turns, *x), added, bias)
    sequences = zip(tokens, [loop_turns] * 2, added.tolist(), [bias.tolist()] * 2, strict=True)
    exact = np.array([loops.forward(config, host, *sequence) for sequence in sequences])
    assert logits.shape == exact.shape and abs(logits - exact).max() <= 1e-8 * abs(exact).max()
    assert all(np.array_equal(to_numpy(w[name]), host[name]) for name in host)


def test_a_forward_pass_adds_nothing_of_its_own():
    config = tiny()
    model = config, tiny_weights(np, "float64", config), np.array([[0, 1, 1]]), [quarter_turns]
    np.testing.assert_allclose(
        definition.forward(*model), definition.forward(*model, np.zeros((1, 3, 2)), np.zeros((3, 3)))
    )


@given(config=configs(), seed=seeds, n=st.integers(1, 5), data=st.data())
def test_a_forward_pass_is_the_loop(xp, config, seed, n, data):
    may_be_zero = config.attention == "linear" and config.feature_map.startswith("relu")  # a total, with turned keys

    def rotation():  # of one layer; p = 0 is none
        p = 0 if may_be_zero else data.draw(st.integers(0, config.head_dim // 2))
        start = data.draw(st.integers(0, config.head_dim - 2 * p))
        return data.draw(bases) ** (-np.arange(p) / max(p, 1)), data.draw(layouts), start

    hold_forward_to_the_loop(xp, config.with_encoding("none"), seed, n, [rotation() for _ in config.layers])


@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("block", ["sequential", "parallel", "one norm", "post-norm"])
def test_a_forward_pass_with_every_option_is_the_loop(xp, block, attention):
    """What Hypothesis may draw is here for certain: each option at a value that changes the logits."""
    names = "norm_bias qkv_bias out_bias mlp_bias head_bias qk_norm embedding_norm embedding_bias head_dense gated"
    options = dict.fromkeys(names.split(), True) | {"norm": "layer", "activation": "silu", "encoding": "none"}
    options |= {"one_norm": block == "one norm", "post_norms": block != "post-norm", "causal": block != "parallel"}
    options |= {"logit_softcap": 2.0, "logit_scale": 0.7, "embedding_scale": 3.0, "feature_map": "exp"}
    softmax = {"scale": None if block == "post-norm" else 0.4, "softcap": 1.5} if attention == "softmax" else {}
    layers = Layer(None), Layer(None, 2 if softmax else None)
    options |= softmax | {"block": "parallel" if block == "one norm" else block, "attention": attention}
    config = Config(9, 6, 4, 2, 6, 5, layers, eps=0.01, **options)
    rotations = (np.array([1.0, 0.3]), "half", 2), (np.array([0.7]), "interleaved", 0)
    hold_forward_to_the_loop(xp, config, 1, 5, rotations)


# ── The definition against mpmath ────────────────────────────────────────────────────────────────────────────────────


def close(values, exact, bounds):
    """Whether every value is as near to its exact one as its bound says."""
    triples = zip(np.ravel(values).tolist(), exact, bounds, strict=True)
    return all(abs(MP.mpf(value) - one) <= bound for value, one, bound in triples)


@given(base=bases, p=st.integers(1, 16), m=st.integers(-(10**6), 10**6))
def test_frequencies_and_tables_by_mpmath(xp, base, p, m):
    """θ: the exponent is off by 2u, so θ by 2u·|ln θ| and 2u for the power. cos and sin of m·θ: by u·|mθ| and 2u."""
    u, theta = UNIT["float64"], definition.frequencies(2 * p, base)
    exact = [MP.power(MP.mpf(base), MP.mpf(-i) / p) for i in range(p)]
    assert close(theta, exact, [2 * u * (abs(MP.log(t)) + 1) * t for t in exact])
    angles = [MP.mpf(t) * m for t in theta.tolist()]
    cos, sin = call(xp, "float64", definition.tables, np.array([m]), theta)
    for table, function in ((cos, MP.cos), (sin, MP.sin)):
        assert table.shape == (1, p)
        assert close(table, map(function, angles), [u * (abs(a) + 2) for a in angles])


@given(seed=seeds, dtype=floats, size=st.sampled_from([0.1, 1.0, 8.0]))
def test_activations_by_mpmath(xp, seed, dtype, size):
    """gelu: x√½ is off by 2u, which erfc magnifies by 2z² = x², at most; silu and tanh: by 6u of |x|, all absolute;
    what is below the normal numbers loses digits."""
    x = (size * random(seed, dtype, 5)).astype(dtype)
    at, tiny_number = x.tolist(), float(np.finfo(dtype).tiny)
    for name, function in definition.ACTIVATIONS.items():
        y, values = (
            call(xp, dtype, lambda x, function=function: function(x), x),
            [truth.activation(name, a) for a in at],
        )
        sizes = [(3 * a * a + 8) * abs(b) if name == "gelu" else 8 * abs(a) for a, b in zip(at, values, strict=True)]
        assert close(y, values, [UNIT[dtype] * size + 99 * tiny_number for size in sizes])
