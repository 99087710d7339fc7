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
from pyrope import Axes, LinearState, Rope, YaRN, definition, linear

HALF8 = Rope(8, 10000.0, "half")
MAPS = ("elu+1", "exp")  # whose denominators are positive, whatever the inputs


@st.composite
def cases(draw, dtype=dtypes, most=9):
    """q, k, v, positions, rope (or None for both), and the name of a feature map."""
    rope = draw(st.none() | ropes(max_pairs=3))
    batch = draw(st.sampled_from([None, (), (2,), (2, 3)]))
    g, r, n = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, most))
    d, e, kind = draw(st.integers(1, 5)) if rope is None else rope.head_dim, draw(st.integers(1, 4)), draw(dtype)
    shapes = [(n, w) if batch is None else (*batch, h, n, w) for h, w in ((g * r, d), (g, d), (g, e))]
    q, k, v = (draw(arrays(shape, kind)) for shape in shapes)
    lead = draw(st.sampled_from([(), (batch or ())[:1], *([batch] if batch else [])]))
    m = None if rope is None else draw(position_arrays(rope, (*lead, n)))
    return q, k, v, m, rope, draw(st.sampled_from(MAPS))


@given(cases(), st.booleans(), st.integers(1, 12), st.sampled_from([1, 4, 1024]), st.sampled_from([1, 2**16]))
def test_linear_attention_is_the_definition(xp, case, causal, chunk, stretch, small):
    q, k, v, m, rope, name = case
    device, before = [to_backend(x, xp) for x in (q, k, v)], [x.copy() for x in (q, k, v)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "_STRETCH", stretch)
        patch.setattr(linear, "_SMALL", small)
        got = pyrope.linear_attention(*device, m, rope, causal=causal, feature_map=name, chunk=chunk)
    assert got.dtype == q.dtype and got.shape == (*q.shape[:-1], v.shape[-1])
    close(got, *references.linear_attention(q, k, v, m, rope, causal, definition.FEATURE_MAPS[name]), xp)
    for x, old in zip(device, before, strict=True):
        assert (pyrope.to_numpy(x) == old).all()


@given(cases(), st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_any_sequence_of_parts_is_the_definition(xp, case, steps):
    q, k, v, m, rope, name = case
    exact, allowed = references.linear_attention(q, k, v, m, rope, True, definition.FEATURE_MAPS[name])
    device, options = [to_backend(x, xp) for x in (q, k, v)], {"feature_map": name}
    edges = sorted({0, q.shape[-2], *(min(sum(steps[:i]), q.shape[-2]) for i in range(len(steps) + 1))})
    state, parts = None, []
    for a, b in zip(edges, edges[1:], strict=False):
        at = None if m is None else m[..., a:b]
        tokens = [x[..., a:b, :] for x in device]
        add = pyrope.linear_state(*tokens[1:], at, rope, **options)
        before = state
        out, state = pyrope.linear_step(*tokens, at, rope, state=state, **options)
        parts.append(pyrope.to_numpy(out))
        both = add if before is None else before + add  # the states of two parts add up
        assert both.count == state.count == b
        for one, other in ((both.numerator, state.numerator), (both.denominator, state.denominator)):
            np.testing.assert_allclose(pyrope.to_numpy(one), pyrope.to_numpy(other), rtol=1e-4, atol=1e-4)
    got = np.concatenate(parts, axis=-2)
    close(got, exact, allowed)


@pytest.mark.parametrize("causal", [False, True])
def test_many_chunks_heads_and_threads(causal):
    rng, n = np.random.default_rng(0), 2500
    q, k, v = (rng.standard_normal((2, h, n, 8)).astype(np.float32) for h in (4, 2, 2))
    close(pyrope.linear_attention(q, k, v, range(n), HALF8, causal=causal), *references.linear_attention(q, k, v, range(n), HALF8, causal))  # fmt: skip
    rounded = pyrope.linear_attention(*(x.astype(np.float16) for x in (q, k, v)), range(n), HALF8, causal=causal)
    single = [x.astype(np.float16).astype(np.float32) for x in (q, k, v)]
    assert (rounded == pyrope.linear_attention(*single, range(n), HALF8, causal=causal).astype(np.float16)).all()


def test_float32_sums_stay_accurate():
    # Token by token every sum of n keys would be rounded n times.
    rng, n = np.random.default_rng(0), 2**15
    q, k, v = (rng.standard_normal((1, n, 4)).astype(np.float32) for _ in "qkv")
    single, double = (
        pyrope.linear_attention(*(x.astype(t) for x in (q, k, v)), range(n), Rope(4, 10000.0, "half"), causal=True)
        for t in (np.float32, np.float64)
    )
    assert (abs(single - double).max(axis=-1) <= 3e-6 * abs(double).max(axis=-1)).mean() > 0.99


def test_memory_does_not_grow_with_the_square_of_the_length():
    q, k, v = (np.ones((1, 8192, 8), np.float32) for _ in "qkv")
    out, tables = np.empty_like(q), pyrope.rotation_tables(HALF8, range(8192), like=q)
    with little_memory(3e6):
        pyrope.linear_attention(q, k, v, tables.positions, HALF8, causal=True, tables=tables, out=out)


def test_only_distances_matter_but_not_if_rotated_before_the_map():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 6, 8))
    near, far = (pyrope.linear_attention(q, k, v, np.arange(6) + s, HALF8, causal=True) for s in (0, 2**30))
    np.testing.assert_allclose(near, far, rtol=1e-11)
    before = [
        pyrope.linear_attention(*(pyrope.rotate(x, np.arange(6) + s, HALF8) for x in (q, k)), v, causal=True)
        for s in (0, 100)
    ]
    assert abs(before[0] - before[1]).max() > 0.01


@pytest.mark.parametrize("scaling", [YaRN(4.0, 64), YaRN(2.0, 64, attention_factor=3.0)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_attention_factor_is_left_out(scaling, causal):
    rope, pure = Rope(8, 10000.0, "half", scaling=scaling), Rope(8, 10000.0, "half", scaling=scaling).pure
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 8))
    a, b = (pyrope.linear_attention(q, k, v, range(5), r, causal=causal) for r in (rope, pure))
    tables = pyrope.rotation_tables(pure, range(5), like=q)
    c = pyrope.linear_attention(q, k, v, range(5), rope, causal=causal, tables=tables)
    assert (a == b).all() and (a == c).all() and rope.attention_factor != 1


def test_grouped_heads_read_the_key_head_of_their_group(xp):
    v = np.broadcast_to(np.arange(2.0)[:, None, None], (2, 3, 1)).copy()
    for causal in (False, True):
        got = pyrope.linear_attention(
            *(to_backend(x, xp) for x in (np.ones((6, 3, 4)), np.ones((2, 3, 4)), v)), causal=causal
        )
        assert pyrope.to_numpy(got)[:, -1, 0].tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("name", sorted(definition.FEATURE_MAPS))
def test_feature_maps_are_those_of_the_definition(xp, name):
    x = np.array([-1e4, -2.5, -0.0, 0.0, 0.5, 3.0, 700.0])
    with np.errstate(over="ignore"):
        got, exact = linear.FEATURE_MAPS[name](to_backend(x, xp)), definition.FEATURE_MAPS[name](x)
    np.testing.assert_array_equal(pyrope.to_numpy(got), exact)


@pytest.mark.parametrize("causal", [False, True])
def test_any_function_is_a_feature_map(xp, causal):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 150, 4))
    rope, memory = Rope(8, 10000.0, "half"), {}

    def doubled(x):
        x **= 2  # in place
        y = memory.setdefault(x.shape, xp.zeros((*x.shape[:-1], 8), x.dtype))  # and always in the same memory
        y[..., :4], y[..., 4:] = x, x + 1
        return y

    def phi(x):
        return np.concatenate((x**2, x**2 + 1), axis=-1)

    device = [to_backend(x, xp) for x in (q, k, v)]
    with pytest.raises(ValueError, match="the last axis of x must be head_dim, 8"):
        pyrope.linear_attention(*device, range(150), rope, causal=causal)
    wide = [np.pad(x, [(0, 0), (0, 0), (0, 4)]) for x in (q, k)]

    def of_four(x):
        return doubled(x[..., :4].copy())

    got = pyrope.linear_attention(*(to_backend(x, xp) for x in wide), device[2], range(150), rope, causal=causal, feature_map=of_four)  # fmt: skip
    close(got, *references.linear_attention(*wide, v, range(150), rope, causal, lambda x: phi(x[..., :4])), xp)
    got = pyrope.linear_attention(*device, causal=causal, feature_map=doubled)
    close(got, *references.linear_attention(q, k, v, None, None, causal, phi), xp)


@pytest.mark.parametrize("returned, error, match", [
    (lambda x: None, TypeError, "feature_map must return an array, but it returned None"),
    (lambda x: x.tolist(), TypeError, "what feature_map returns must be a NumPy or CuPy array"),
    (lambda x: x[..., :1, :], ValueError, "feature_map must keep float64"),
    (lambda x: x.astype(np.float32), ValueError, "feature_map must keep float64 .* returned float32"),
])  # fmt: skip
def test_functions_that_are_no_feature_maps(returned, error, match):
    x = np.ones((2, 3, 8))
    with pytest.raises(error, match=match):
        pyrope.linear_attention(x, x, x, causal=True, feature_map=returned)


# ── Denominators ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("causal", [False, True])
def test_denominators_that_are_not_positive(xp, causal):
    q, k, v = np.ones((3, 1, 4, 2))
    k[0, :, 0] = -2
    device = [to_backend(x, xp) for x in (q, k, v)]
    with pytest.raises(ValueError, match="denominators must be finite and positive"):
        pyrope.linear_attention(*device, causal=causal, chunk=3, feature_map="identity")
    out = pyrope.linear_attention(*device, causal=causal, feature_map="identity", denominators="nonzero")
    np.testing.assert_allclose(pyrope.to_numpy(out), 1)
    k[0, :, 0] = -1
    for rule in ("positive", "nonzero"):
        with pytest.raises(ValueError, match=f"denominators must be finite and {rule}"):
            device = [to_backend(x, xp) for x in (q, k, v * [1, 2])]
            device[2][..., 0] = 5  # Σ φ(q)ᵀφ(k) is 0, and the numerator with a rope is not
            pyrope.linear_attention(*device, range(4), Rope(2, 10000.0, "half"), causal=causal, feature_map="identity", denominators=rule)  # fmt: skip


@pytest.mark.parametrize("n, chunk", [(40, 64), (2300, 64), (40, 7)])
def test_the_error_gives_the_place_in_the_sequence(n, chunk):
    q, k, v = np.ones((3, 2, 4, n, 8), np.float32)
    q[1, 3, n - 5] = -60  # exp(−60)·… is below tiny/ε
    q[1, 3, n - 2] = -np.inf
    for causal in (False, True):
        with pytest.raises(ValueError, match=re.escape(f"the first at (1, 3, {n - 5}): ")) as raised:
            k[...] = -30
            pyrope.linear_attention(q, k, v, causal=causal, chunk=chunk)
        assert "in float32 they must not be smaller than 9.9e-32" in str(raised.value)


@pytest.mark.parametrize("name", ["elu+1", "relu", "relu2", "exp"])
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_over_nothing_is_zero(xp, name, causal):
    # Padding of −inf in front: its rows see no key, and its keys are seen by no row.
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 6, 4)) ** 2 + 0.1
    q[:, :2], k[:, :2] = -np.inf, -np.inf
    got = pyrope.to_numpy(
        pyrope.linear_attention(*(to_backend(x, xp) for x in (q, k, v)), causal=causal, feature_map=name)
    )
    assert (got[:, :2] == 0).all()
    rest = references.linear_attention(
        *(x[:, 2:] for x in (q, k, v)), None, None, causal, definition.FEATURE_MAPS[name]
    )
    close(got[:, 2:], *rest)


def test_denominators_too_small_to_be_exact_are_refused():
    x, v = np.full((1, 3, 4), -52.0, np.float32), np.ones((1, 3, 4), np.float32)
    for low in (-52.0, -90.0, -110.0):  # subnormal, 0 as a product, and 0 as a feature: eˣ itself
        x[...] = low
        for causal in (False, True):
            if np.exp(np.float32(low)) == 0:
                assert (pyrope.linear_attention(x, x, v, causal=causal) == 0).all()
                continue
            with pytest.raises(ValueError, match="must not be smaller than"):
                pyrope.linear_attention(x, x, v, causal=causal)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("causal", [False, True])
def test_values_that_are_not_finite_are_refused(xp, value, causal):
    q, k, v = np.ones((3, 1, 4, 2), np.float32)
    v[0, 1:] = value
    with pytest.raises(ValueError, match="values must be finite, and so must their sums"):
        pyrope.linear_attention(*(to_backend(x, xp) for x in (q, k, v)), causal=causal)
    q[0, 2] = np.nan
    with pytest.raises(ValueError, match="denominators must be finite"):
        pyrope.linear_attention(*(to_backend(x, xp) for x in (q, k, k)), causal=causal)


def test_empty_sequences_and_other_numbers_of_keys(xp):
    for causal in (False, True):
        for n, h in ((0, 2), (3, 0)):
            x = to_backend(np.ones((h, n, 8)), xp)
            assert pyrope.linear_attention(x, x, x, range(n), HALF8, causal=causal).shape == (h, n, 8)
    q, k = (to_backend(np.ones((2, n, 8)), xp) for n in (3, 0))
    assert (pyrope.to_numpy(pyrope.linear_attention(q, k, k, causal=False)) == 0).all()
    q, k, v = (np.random.default_rng(0).standard_normal((2, n, 8)) for n in (3, 5, 5))
    got = pyrope.linear_attention(*(to_backend(x, xp) for x in (q, k, v)), causal=False)
    close(got, *references.linear_attention(q, k, v, None, None, False), xp)


# ── Arguments ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("causal", [False, True])
def test_out_takes_the_result(xp, causal):
    q, k, v = (to_backend(x, xp) for x in np.random.default_rng(0).standard_normal((3, 2, 5, 8)))
    out = xp.zeros((2, 5, 16))[..., ::2]
    got = pyrope.linear_attention(q, k, v, range(5), HALF8, causal=causal, out=out)
    assert got is out
    expected = pyrope.linear_attention(q, k, v, range(5), HALF8, causal=causal)
    assert (pyrope.to_numpy(out) == pyrope.to_numpy(expected)).all()
    for shared in (q, k, v):
        with pytest.raises(ValueError, match="out must not share memory with q, k or v"):
            pyrope.linear_attention(q, k, v, causal=causal, out=shared)


def test_positions_by_axis_by_batch_and_by_head(xp):
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 8))
    q, k, v = (to_backend(y, xp) for y in (x, x[::-1].copy(), x * 2))
    axes = Rope(8, 10000.0, "half", axes=Axes("sections", (2, 2)))
    at = np.random.default_rng(1).integers(0, 99, (2, 2, 3, 4))
    for rope, m in ((axes, at), (HALF8, at[0, :, 0]), (HALF8, at[0]), (HALF8, pyrope.from_numpy(at[0, 0, 0], xp))):
        for causal in (False, True):
            got = pyrope.linear_attention(q, k, v, m, rope, causal=causal)
            m_host = pyrope.to_numpy(m) if xp is not np and pyrope.namespace(m) is xp else m
            close(got, *references.linear_attention(x, x[::-1], x * 2, m_host, rope, causal), xp)


A = np.ones((2, 4, 8), np.float32)


@pytest.mark.parametrize(
    "q, k, v, more, error, match",
    [
        (A[0, 0], A, A, {}, ValueError, "need h a multiple of g, and n = m if causal"),
        (A[:, :3], A, A, {}, ValueError, "n = m if causal"),
        (A[:1], A, A, {}, ValueError, "need h a multiple of g"),
        (A[..., :6], A, A, {}, ValueError, "need h a multiple of g"),
        (A, A, A[:, :3], {}, ValueError, "need h a multiple of g"),
        (A, A.astype(float), A, {}, TypeError, "q, k and v must have one dtype"),
        (A.astype(int), A, A, {}, TypeError, "q must be float16"),
        (A, A.tolist(), A, {}, TypeError, "k must be a NumPy or CuPy array, was list"),
        (A, A, A, {"feature_map": "gelu"}, ValueError, "feature_map must be one of"),
        (A, A, A, {"denominators": "any"}, ValueError, "denominators must be one of"),
        (A, A, A, {"positions": range(4)}, ValueError, "positions and rope must be given both"),
        (A, A, A, {"rope": HALF8}, ValueError, "positions and rope must be given both"),
        (A, A, A, {"rope": HALF8, "positions": range(5)}, ValueError, r"positions must be \(…, n\), one for each token"),
        (A, A, A, {"rope": HALF8, "positions": 3}, ValueError, "one for each token"),
        (A, A, A, {"rope": HALF8, "positions": np.zeros((3, 4), int)}, ValueError, "do not fit"),
        (A, A, A, {"rope": HALF8, "positions": [0.5] * 4}, TypeError, "positions must be integers"),
        (A, A, A, {"rope": "half", "positions": range(4)}, TypeError, "rope must be a Rope"),
        (A, A, A, {"tables": pyrope.rotation_tables(HALF8, range(4), A)}, ValueError, "tables need positions and a rope"),
        (A, A, A, {"rope": HALF8, "positions": range(1, 5), "tables": pyrope.rotation_tables(HALF8, range(4), A)}, ValueError, "other positions"),
        (A, A, A, {"chunk": 0}, ValueError, "chunk must be at least 1"),
        (A, A, A, {"causal": 1}, TypeError, "causal must be True or False"),
        (A, A, A, {"out": np.empty((2, 4, 7), np.float32)}, ValueError, "out must have the shape and dtype"),
    ],
)  # fmt: skip
def test_bad_input(q, k, v, more, error, match):
    with pytest.raises(error, match=match):
        pyrope.linear_attention(q, k, v, **({"causal": True} | more))
    if "causal" not in more:
        with pytest.raises(error, match=match):
            pyrope.linear_step(q, k, v, **more)


STATE = pyrope.linear_state(A, A, range(4), HALF8)


@pytest.mark.parametrize(
    "x, rope, more",
    [
        (A, Rope(8, 500000.0, "half"), {}),
        (A, HALF8, {"feature_map": "exp"}),
        (A.astype(np.float64), HALF8, {}),
        (A[:1], HALF8, {}),
    ],
)
def test_states_of_another_kind(x, rope, more):
    with pytest.raises(ValueError, match="the state belongs to another rope, feature map, shape or dtype"):
        pyrope.linear_step(x, x, x, range(4), rope, state=STATE, **more)
    with pytest.raises(ValueError, match="the state belongs to another"):
        STATE + pyrope.linear_state(x, x, range(4), rope, **more)
    with pytest.raises(TypeError, match="state must be a LinearState"):
        pyrope.linear_step(A, A, A, range(4), HALF8, state=(1, 2))
    broken = LinearState(STATE.numerator, STATE.denominator[:1], 4, HALF8, "elu+1")
    with pytest.raises(ValueError, match="the state belongs to another"):
        pyrope.linear_step(A, A, A, range(4), HALF8, state=broken)


def test_a_state_is_never_changed(xp):
    x = to_backend(A, xp)
    state = pyrope.linear_state(x, x)
    before = pyrope.to_numpy(state.numerator).copy()
    pyrope.linear_step(x, x, x, state=state)
    assert (pyrope.to_numpy(state.numerator) == before).all()
