"""Linear attention equals the definition, Eq. (18) and Eq. (19), whole, by chunks, and step by step."""

import re

import numpy as np
import pytest
import references
from hypothesis import given, strategies as st
from memory import little_memory
from references import close
from strategies import arrays, dtypes, position_arrays, ropes, to_backend

import pyrope
from pyrope import Axes, Rope, YaRN, definition, linear, linear_attention

HALF8 = Rope(8, 10000.0, "half")
both = pytest.mark.parametrize("causal", [False, True])


def on(xp, *hosts):
    return [to_backend(x, xp) for x in hosts]


@st.composite
def cases(draw, dtype=dtypes, most=9):
    """q, k, v, positions, rope (or None for both), and a feature map whose denominators are positive."""
    rope = draw(st.none() | ropes(max_pairs=3))
    batch = draw(st.sampled_from([(), (2,), (2, 3)]))
    g, r, n = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, most))
    d, e, kind = draw(st.integers(1, 5)) if rope is None else rope.head_dim, draw(st.integers(1, 4)), draw(dtype)
    q, k, v = (draw(arrays((*batch, h, n, w), kind)) for h, w in ((g * r, d), (g, d), (g, e)))
    lead = draw(st.sampled_from([(), batch[:1], batch]))
    m = None if rope is None else draw(position_arrays(rope, (*lead, n)))
    return q, k, v, m, rope, draw(st.sampled_from(("elu+1", "exp")))


@given(cases(), st.booleans(), st.integers(1, 12), st.sampled_from([1, 3, 32]), st.sampled_from([1, 2**16]))
def test_linear_attention_is_the_definition(xp, case, causal, chunk, stretch, small):
    q, k, v, m, rope, name = case
    device, before = on(xp, q, k, v), [x.copy() for x in (q, k, v)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "_STRETCH", stretch)
        patch.setattr(linear, "_SMALL", small)
        patch.setattr(linear, "_CHUNK", chunk)
        got = linear_attention(*device, m, rope, causal=causal, feature_map=name)
    assert got.dtype == q.dtype and got.shape == (*q.shape[:-1], v.shape[-1])
    close(got, *references.linear_attention(q, k, v, m, rope, causal, definition.FEATURE_MAPS[name]), xp)
    for x, old in zip(device, before, strict=True):
        assert (pyrope.to_numpy(x) == old).all()


@given(cases(), st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_any_sequence_of_parts_is_the_definition(xp, case, steps):
    q, k, v, m, rope, name = case
    exact, allowed = references.linear_attention(q, k, v, m, rope, True, definition.FEATURE_MAPS[name])
    device, state, parts = on(xp, q, k, v), None, []
    edges = sorted({0, q.shape[-2], *(min(sum(steps[:i]), q.shape[-2]) for i in range(len(steps) + 1))})
    for a, b in zip(edges, edges[1:], strict=False):
        at, tokens, before = None if m is None else m[..., a:b], [x[..., a:b, :] for x in device], state
        held = None if before is None else pyrope.to_numpy(before.numerator).copy()
        _, add = pyrope.linear_step(*tokens, at, rope, feature_map=name)
        out, state = pyrope.linear_step(*tokens, at, rope, state=state, feature_map=name)
        parts.append(pyrope.to_numpy(out))
        total = add if before is None else before + add  # the states of two parts add up
        assert total.count == state.count == b and (held is None or (pyrope.to_numpy(before.numerator) == held).all())
        for one, other in ((total.numerator, state.numerator), (total.denominator, state.denominator)):
            np.testing.assert_allclose(pyrope.to_numpy(one), pyrope.to_numpy(other), rtol=1e-4, atol=1e-4)
    close(np.concatenate(parts, axis=-2), exact, allowed)


@both
def test_many_chunks_and_heads_rounded_once(causal):
    rng, n = np.random.default_rng(0), 1300
    q, k, v = (rng.standard_normal((2, h, n, 8)).astype(np.float16) for h in (4, 2, 2))
    wide = [x.astype(np.float32) for x in (q, k, v)]
    got = linear_attention(*wide, range(n), HALF8, causal=causal)
    close(got, *references.linear_attention(*wide, range(n), HALF8, causal))
    assert (linear_attention(q, k, v, range(n), HALF8, causal=causal) == got.astype(np.float16)).all()


def test_float32_sums_stay_accurate_and_memory_small():
    # Token by token every sum of n keys would be rounded n times; n × n weights would take 4 GB.
    rng, n = np.random.default_rng(0), 2**15
    q, k, v = (rng.standard_normal((1, n, 8)).astype(np.float32) for _ in "qkv")
    with little_memory(12e6):  # of which tables and outputs are 4, and a tile of tables 6
        out = linear_attention(q, k, v, range(n), HALF8, causal=True)
    double = linear_attention(*(x.astype(float) for x in (q, k, v)), range(n), HALF8, causal=True)
    assert (abs(out - double).max(axis=-1) <= 3e-6 * abs(double).max(axis=-1)).mean() > 0.99


@both
def test_the_attention_factor_is_left_out(causal):
    rope = Rope(8, 10000.0, "half", scaling=YaRN(2.0, 64, attention_factor=3.0))
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 8))
    a = linear_attention(q, k, v, range(5), rope, causal=causal)
    assert (a == linear_attention(q, k, v, range(5), rope.rotation_only, causal=causal)).all()


@both
def test_any_function_is_a_feature_map(xp, causal):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 150, 4))
    wide, memory = [np.pad(x, [(0, 0), (0, 0), (0, 4)]) for x in (q, k)], {}

    def doubled(x):
        x **= 2  # in place
        y = memory.setdefault(x.shape, xp.zeros((*x.shape[:-1], 8), x.dtype))  # and always in the same memory
        y[..., :4], y[..., 4:] = x[..., :4], x[..., :4] + 1
        return y

    def phi(x):
        return np.concatenate((x[..., :4] ** 2, x[..., :4] ** 2 + 1), axis=-1)

    for narrow, options in (((q, k, v), {}), ((*wide, v), {"feature_map": lambda x: x[..., :4]})):
        with pytest.raises(ValueError, match="the last axis of x must be head_dim, 8, x had shape"):
            linear_attention(*on(xp, *narrow), range(150), HALF8, causal=causal, **options)
    for arguments, where in (((*wide, v), (range(150), HALF8)), ((q, k, v), (None, None))):
        got = linear_attention(*on(xp, *arguments), *where, causal=causal, feature_map=doubled)
        close(got, *references.linear_attention(*arguments, *where, causal, phi), xp)


@pytest.mark.parametrize("returned, error, match", [
    (lambda x: None, TypeError, "feature_map must return an array, but it returned None"),
    (lambda x: x.tolist(), TypeError, "what feature_map returns must be a NumPy or CuPy array"),
    (lambda x: x[..., :1, :], ValueError, "feature_map must keep float64"),
    (lambda x: x.astype(np.float32), ValueError, "feature_map must keep float64 .* returned float32"),
])  # fmt: skip
def test_functions_that_are_no_feature_maps(returned, error, match):
    with pytest.raises(error, match=match):
        linear_attention(*np.ones((3, 2, 3, 8)), causal=True, feature_map=returned)


@both
def test_denominators_that_are_not_positive(xp, causal):
    q, k, v = np.ones((3, 1, 4, 2))
    k[0, :, 0] = -2
    with pytest.raises(ValueError, match="denominators must be finite and positive"):
        linear_attention(*on(xp, q, k, v), causal=causal, feature_map="identity")
    out = linear_attention(*on(xp, q, k, v), causal=causal, feature_map="identity", denominators="nonzero")
    np.testing.assert_allclose(pyrope.to_numpy(out), 1)
    k[0, :, 0], v[..., 0] = -1, 5  # Σ φ(q)ᵀφ(k) is 0, and the numerator with a rope is not
    for rule in ("positive", "nonzero"):
        with pytest.raises(ValueError, match=f"denominators must be finite and {rule}"):
            where = range(4), Rope(2, 10000.0, "half")
            linear_attention(*on(xp, q, k, v), *where, causal=causal, feature_map="identity", denominators=rule)


@pytest.mark.parametrize("n, chunk", [(40, 64), (2300, 64), (40, 7)])
def test_the_error_gives_the_place_in_the_sequence(n, chunk, monkeypatch):
    monkeypatch.setattr(linear, "_CHUNK", chunk)
    q, k, v = np.ones((3, 2, 4, n, 8), np.float32)
    k[...], q[1, 3, n - 5], q[1, 3, n - 2] = -30, -60, -np.inf  # exp(−60)·… is below tiny/ε
    for causal in (False, True):
        place = re.escape(f"the output at (1, 3, {n - 5}) is wrong")
        with pytest.raises(ValueError, match=f"at least 9.9e-32 in float32, .*{place}"):
            linear_attention(q, k, v, causal=causal)


@pytest.mark.parametrize("name", ["elu+1", "relu", "relu2", "exp"])
@both
def test_nothing_over_nothing_is_zero(xp, name, causal):
    # Padding of −inf in front: its rows see no key, and its keys are seen by no row.
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 6, 4)) ** 2 + 0.1
    q[:, :2], k[:, :2] = -np.inf, -np.inf
    got = pyrope.to_numpy(linear_attention(*on(xp, q, k, v), causal=causal, feature_map=name))
    assert (got[:, :2] == 0).all()
    rest = (x[:, 2:] for x in (q, k, v))
    close(got[:, 2:], *references.linear_attention(*rest, None, None, causal, definition.FEATURE_MAPS[name]))


@both
def test_denominators_too_small_to_be_exact_are_refused(causal):
    x, v = np.ones((1, 3, 4), np.float32), np.ones((1, 3, 4), np.float32)
    for low in (-52, -90):  # subnormal, and 0 as a product
        with pytest.raises(ValueError, match="below which digits are lost"):
            linear_attention(x * low, x * low, v, causal=causal)
    assert (linear_attention(x * -110, x * -110, v, causal=causal) == 0).all()  # 0 as a feature: eˣ itself


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
@both
def test_values_that_are_not_finite_are_refused(xp, value, causal):
    q, k, v = np.ones((3, 1, 4, 2), np.float32)
    v[0, 1:] = value
    with pytest.raises(ValueError, match="values and their weighted sums must be finite"):
        linear_attention(*on(xp, q, k, v), causal=causal)
    q[0, 2] = np.nan
    with pytest.raises(ValueError, match="denominators must be finite"):
        linear_attention(*on(xp, q, k, k), causal=causal)


@both
def test_empty_sequences(xp, causal):
    x, none = on(xp, np.ones((2, 3, 8)), np.ones((2, 0, 8)))
    assert linear_attention(none, none, none, [], HALF8, causal=causal).shape == (2, 0, 8)
    assert linear_attention(*[x[None][:0]] * 3, causal=causal).shape == (0, 2, 3, 8)
    assert causal or (pyrope.to_numpy(linear_attention(x, none, none, causal=False)) == 0).all()


def test_other_numbers_of_keys_and_groups_of_heads(xp):
    q, k, v = (np.random.default_rng(0).standard_normal((h, n, 8)) for h, n in ((6, 3), (2, 5), (2, 5)))
    close(
        linear_attention(*on(xp, q, k, v), causal=False), *references.linear_attention(q, k, v, None, None, False), xp
    )


def test_positions_by_axis_by_batch_and_by_head(xp, monkeypatch):
    monkeypatch.setattr(linear, "_SMALL", 1)  # head after head, unless positions differ by head
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 8))
    device = on(xp, x, x[::-1].copy(), x * 2)
    axes, at = Rope(8, 10000.0, "half", axes=Axes("sections", (2, 2))), np.arange(48).reshape(2, 2, 3, 4) * 7 % 99
    for rope, m in ((axes, at), (HALF8, at[0, :, 0]), (HALF8, at[0]), (HALF8, at[0, 0, 0])):
        for causal in (False, True):
            got = linear_attention(*device, pyrope.from_numpy(m, xp), rope, causal=causal)
            close(got, *references.linear_attention(x, x[::-1], x * 2, m, rope, causal), xp)


A = np.ones((2, 4, 8), np.float32)


@pytest.mark.parametrize(
    "q, k, v, more, error, match",
    [
        (A[0, 0], A, A, {}, ValueError, "must agree in …, g, t and d"),
        (A[:, :3], A, A, {}, ValueError, "causal attention needs as many queries as keys, had 3 and 4"),
        (A, A.tolist(), A, {}, TypeError, "k must be a NumPy or CuPy array, was list"),
        (A, A, A, {"feature_map": "gelu"}, ValueError, "feature_map must be one of"),
        (A, A, A, {"denominators": "any"}, ValueError, "denominators must be one of"),
        (A, A, A, {"positions": range(4)}, ValueError, "give both positions and rope"),
        (A, A, A, {"rope": HALF8}, ValueError, "give both positions and rope"),
        (A, A, A, {"rope": HALF8, "positions": range(5)}, ValueError, r"positions must be \(…, n\), one for each query"),
        (A, A, A, {"rope": HALF8, "positions": 3}, ValueError, "one for each query and key"),
        (A, A, A, {"rope": HALF8, "positions": np.zeros((3, 4), int)}, ValueError, "do not fit"),
        (A, A, A, {"rope": "half", "positions": range(4)}, TypeError, "rope must be a Rope"),
        (A, A, A, {"causal": 1}, TypeError, "causal must be True or False"),
    ],
)  # fmt: skip
def test_bad_input(q, k, v, more, error, match):
    with pytest.raises(error, match=match):
        linear_attention(q, k, v, **({"causal": True} | more))
    if "causal" not in more:
        with pytest.raises(error, match=match):
            pyrope.linear_step(q, k, v, **more)


STATE = pyrope.linear_step(A, A, A, range(4), HALF8)[1]


@pytest.mark.parametrize("x, rope, more", [
    (A, Rope(8, 500000.0, "half"), {}), (A, HALF8, {"feature_map": "exp"}), (A.astype(float), HALF8, {}),
    (A[:1], HALF8, {}),
])  # fmt: skip
def test_states_of_another_kind(x, rope, more):
    with pytest.raises(ValueError, match="the state belongs to another rope, feature map, shape or dtype"):
        pyrope.linear_step(x, x, x, range(4), rope, state=STATE, **more)
    with pytest.raises(ValueError, match="the state belongs to another"):
        STATE + pyrope.linear_step(x, x, x, range(4), rope, **more)[1]
    with pytest.raises(AttributeError):
        STATE.count = 5
    assert len({STATE, STATE, pyrope.linear_step(A, A, A, range(4), HALF8)[1]}) == 2  # each equals itself alone
    with pytest.raises(TypeError, match="state must be a LinearState"):
        pyrope.linear_step(A, A, A, range(4), HALF8, state=(1, 2))


def test_a_state_of_another_library(xp):
    if xp is not np:
        with pytest.raises(TypeError, match="different libraries: here is a cupy array, state is a numpy array"):
            pyrope.linear_step(*on(xp, A, A, A), range(4), HALF8, state=STATE)
