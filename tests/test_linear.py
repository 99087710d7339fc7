"""Linear attention in every form against the definition in float64, with mpmath's cosines and sines."""

import dataclasses
import tracemalloc

import numpy as np
import pytest
import truth
from hypothesis import assume, given, strategies as st
from strategies import COMPUTE_UNIT, DTYPES, UNIT, arrays, dtypes, position_arrays, ropes, to_backend

import pyrope
from pyrope import Axes, DynamicNTK, LinearState, LongRoPE, Rope, YaRN, definition, linear

LIMIT = 2**30
HALF8 = Rope(8, 10000.0, "half")
HALF64 = Rope(64, 10000.0, "half")
MAPS = tuple(definition.FEATURE_MAPS)


def turning(rope: Rope | None, m: np.ndarray | None) -> definition.Turn:
    """x -> R(m)x by the definition, without the attention factor; without a rope x itself."""

    def turn(x: np.ndarray) -> np.ndarray:
        if rope is None:
            return x
        cos, sin = (table / float(truth.attention_factor(rope)) for table in truth.tables(rope, m, x.ndim))
        return definition.rotate(x, cos, sin, *definition.pairs(rope.layout, rope.width, rope.start))

    return turn


def expected(q, k, v, m, rope, *, causal, feature_map="elu+1"):
    """Eq. (19) by the definition: the outputs, and how far arithmetic in the dtype of q may be off.

    Each product of two features, each sum over d features or n keys and each feature itself (a feature map and a
    rotation of a few operations) costs a unit roundoff u of what is summed, taken in absolute value: so
    (d + n + 16)·u·(Σ|φ(q)||φ(k)||v| + |out|·Σ|φ(q)ᵀ||φ(k)|)/denominator, and one rounding to a shorter dtype. In
    float64 the definition is off as far.
    """
    if q.ndim == 2:  # the definition has a head axis
        heads = (x[None] for x in (q, k, v))
        return tuple(x[0] for x in expected(*heads, m, rope, causal=causal, feature_map=feature_map))
    name, (n, d), keys, phi = q.dtype.name, q.shape[-2:], k.shape[-2], definition.FEATURE_MAPS[feature_map]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    seen = definition.visible(np.arange(n), np.arange(keys), causal)
    out = definition.linear_attention(q, k, v, turning(rope, m), seen, phi)
    phi_q, phi_k = phi(q), phi(definition.repeat_heads(k, q.shape[-3]))
    norms = np.linalg.norm(phi_q, axis=-1)[..., :, None] * np.linalg.norm(phi_k, axis=-1)[..., None, :] * seen
    size = norms @ abs(definition.repeat_heads(v, q.shape[-3]))
    _, total = definition.similarities(abs(phi_q), abs(phi_k), lambda x: x, seen)
    _, denominator = definition.similarities(phi_q, phi_k, lambda x: x, seen)
    units = (d + keys + 16) * COMPUTE_UNIT[name] * (2 if name == "float64" else 1)
    allowed = units * (size + abs(out) * total) / np.where(denominator == 0, 1, denominator)
    return out, allowed + UNIT[name] * abs(out) + 2.0**-24 * (name == "float16")


@st.composite
def cases(draw, with_rope=None, dtype=dtypes, most=6, maps=MAPS):
    """q, k, v, positions or None, a rope or None, and the name of a feature map that is positive on q and k."""
    rope = draw(ropes(max_pairs=3)) if with_rope or (with_rope is None and draw(st.booleans())) else None
    d = draw(st.integers(1, 5)) if rope is None else rope.head_dim
    lead, g, r, n = draw(st.sampled_from([(), (2,), (1, 2)])), draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(0, most))  # fmt: skip
    heads = draw(st.booleans())
    q_lead, k_lead = ((*lead, g * r), (*lead, g)) if heads else ((), ())
    kind, name = draw(dtype), draw(st.sampled_from(maps))
    q, k, v = (draw(arrays(shape, kind)) for shape in ((*q_lead, n, d), (*k_lead, n, d), (*k_lead, n, draw(st.integers(1, 3)))))  # fmt: skip
    if name in ("relu", "relu2", "identity"):
        q, k = abs(q) + np.array(0.25, kind), abs(k) + np.array(0.25, kind)
    shapes = [(n,), (*lead[:1], n), (*(1 for _ in lead), n)] if heads and len(lead) < 2 else [(n,)]
    m = None if rope is None else draw(position_arrays(rope, draw(st.sampled_from(shapes)), LIMIT))
    return q, k, v, m, rope, name


def assert_close(got, exact, allowed) -> None:
    got = pyrope.to_numpy(got).astype(np.float64)
    assert got.shape == exact.shape
    worst = np.max(abs(got - exact) - allowed, initial=-1)
    assert (abs(got - exact) <= allowed).all(), worst


@given(cases(), st.booleans(), st.integers(1, 8))
def test_every_form_equals_the_definition(xp, case, causal, chunk):
    q, k, v, m, rope, name = case
    before, device = [x.copy() for x in (q, k, v)], [to_backend(x, xp) for x in (q, k, v)]
    exact, allowed = expected(q, k, v, m, rope, causal=causal, feature_map=name)
    for form in (None, *linear.FORMS[causal]):
        out = pyrope.linear_attention(*device, m, rope, causal=causal, feature_map=name, form=form, chunk=chunk)
        assert out.dtype == q.dtype and pyrope.namespace(out) is xp
        assert_close(out, exact, allowed)
    assert all((pyrope.to_numpy(x) == y).all() for x, y in zip(device, before, strict=True))


@given(cases(), st.data())
def test_any_sequence_of_parts_equals_the_definition(xp, case, data):
    q, k, v, m, rope, name = case
    n = q.shape[-2]
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
    state, outs = None, []
    for start, stop in zip([0, *cuts], [*cuts, n], strict=True):
        part = [to_backend(x[..., start:stop, :], xp) for x in (q, k, v)]
        at = None if m is None else m[..., start:stop]
        held = None if state is None else [pyrope.to_numpy(x).copy() for x in (state.numerator, state.denominator)]
        out, after = pyrope.linear_step(
            *part, at, rope, state=state, feature_map=name, chunk=data.draw(st.integers(1, 4))
        )
        if state is not None:  # it is a value: what continues from it leaves it as it is
            assert (pyrope.to_numpy(state.numerator) == held[0]).all()
            assert (pyrope.to_numpy(state.denominator) == held[1]).all()
        state = after
        outs.append(pyrope.to_numpy(out))
    assert_close(np.concatenate(outs, axis=-2), *expected(q, k, v, m, rope, causal=True, feature_map=name))
    assert state.count == n and state.rope == rope and state.feature_map == name
    # The states of two halves add up to the state of all; so does that of keys alone.
    cut = data.draw(st.integers(0, n))
    halves = [
        pyrope.linear_state(
            *(to_backend(x[..., s, :], xp) for x in (k, v)), None if m is None else m[..., s], rope, feature_map=name
        )
        for s in (slice(0, cut), slice(cut, n))
    ]
    total = halves[0] + halves[1]
    assert total.count == n
    unit = 64 * COMPUTE_UNIT[q.dtype.name] * (n + 1)
    for part in ("numerator", "denominator"):
        a, b = (pyrope.to_numpy(getattr(x, part)).astype(np.float64) for x in (total, state))
        np.testing.assert_allclose(a, b, rtol=unit, atol=unit * np.max(abs(a), initial=0) * 8)
        assert getattr(state, part).dtype == DTYPES["float64" if q.dtype == np.float64 else "float32"]


@given(cases(with_rope=True, dtype=st.just(DTYPES["float64"])), st.data(), st.booleans())
def test_only_distances_matter(xp, case, data, causal):
    q, k, v, m, rope, name = case
    shift = data.draw(st.integers(-LIMIT, LIMIT))
    device = [to_backend(x, xp) for x in (q, k, v)]
    here, there = (
        pyrope.linear_attention(*device, at, rope, causal=causal, feature_map=name)
        for at in (m, m.astype(np.int64) + shift)
    )
    assert_close(
        there, pyrope.to_numpy(here), expected(q, k, v, m, rope, causal=causal, feature_map=name)[1] * 2 + 1e-13
    )


def test_rotating_before_the_map_makes_positions_matter():
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 16, 8))
    m, outs, wrong = np.arange(16), [], []
    for shift in (0, 1000):
        outs.append(pyrope.linear_attention(q, k, v, m + shift, HALF8, causal=True))
        before = (pyrope.rotate(x, m + shift, HALF8) for x in (q, k))
        wrong.append(pyrope.linear_attention(*before, v, causal=True))
    assert abs(outs[0] - outs[1]).max() < 1e-14
    assert abs(wrong[0] - wrong[1]).max() > 0.1


@pytest.mark.parametrize("form", ["parallel", "quadratic"])
def test_at_one_position_it_is_the_equation_without_positions(xp, form):
    q, k, v = (pyrope.from_numpy(x, xp) for x in np.random.default_rng(0).standard_normal((3, 2, 5, 8)))
    with_rope = pyrope.linear_attention(q, k, v, [7] * 5, HALF8, causal=False, form=form)
    without = pyrope.linear_attention(q, k, v, causal=False, form=form)  # Eq. (18)
    np.testing.assert_allclose(pyrope.to_numpy(with_rope), pyrope.to_numpy(without), rtol=1e-13)


@pytest.mark.parametrize(
    "scaling",
    [
        YaRN(4.0, 4096, attention_factor=3.0),
        YaRN(40.0, 64),
        LongRoPE((1.0,) * 4, (8.0,) * 4, 8.0, 64, length=128),
        LongRoPE((1.0,) * 4, (8.0,) * 4, 8.0, 64, attention_factor=0.5, length=32),
    ],
)
@pytest.mark.parametrize("causal, form", [(c, f) for c, forms in linear.FORMS.items() for f in forms])
def test_the_attention_factor_is_left_out(scaling, causal, form):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 8))
    rope = Rope(8, 10000.0, "half", scaling=scaling)
    assert rope.attention_factor != 1
    plain = dataclasses.replace(rope, scaling=dataclasses.replace(scaling, attention_factor=1.0))
    a, b = (pyrope.linear_attention(q, k, v, range(5), r, causal=causal, form=form) for r in (rope, plain))
    assert (a == b).all()
    np.testing.assert_allclose(a, expected(q, k, v, np.arange(5), rope, causal=causal)[0], rtol=1e-12, atol=1e-14)


@given(cases(with_rope=True, dtype=st.sampled_from([DTYPES["float32"], DTYPES["float64"]])), st.booleans())
def test_weights_equal_the_definition(xp, case, causal):
    q, k, _, m, rope, name = case
    for at, r in ((m, rope), (None, None)):
        weights, sums = pyrope.attention_weights(
            to_backend(q, xp), to_backend(k, xp), at, r, causal=causal, feature_map=name
        )
        assert weights.dtype == sums.dtype == q.dtype
        assert weights.shape == (*q.shape[:-1], k.shape[-2]) and sums.shape == q.shape[:-1]
        host = pyrope.to_numpy(weights).astype(np.float64)
        each = np.broadcast_to(np.eye(k.shape[-2], dtype=k.dtype), (*k.shape[:-1], k.shape[-2]))  # values say which key
        assert_close(host, *expected(q, k, each, at, r, causal=causal, feature_map=name))
        size = abs(host).sum(axis=-1) + 1
        assert (abs(host.sum(axis=-1) - pyrope.to_numpy(sums)) <= 16 * UNIT[q.dtype.name] * size).all()
        if causal:
            assert (host == np.tril(host)).all()
        if r is None:
            assert (abs(pyrope.to_numpy(sums) - 1) <= 32 * UNIT[q.dtype.name]).all() and (host >= 0).all()


@pytest.mark.parametrize("n, low, high, negative", [(16, 0.6, 0.9, 0.0), (1024, 0.2, 0.35, 0.05)])
def test_what_the_equation_gives_up(n, low, high, negative):
    # With elu+1, d = 64, Gaussian, causal: the sums of the last row fall with n, weights become negative.
    q, k = np.random.default_rng(0).standard_normal((2, 4, n, 64))
    weights, sums = pyrope.attention_weights(q, k, range(n), HALF64, causal=True)
    assert low < sums[:, -1].mean() < high
    share = (weights < 0).sum() / (4 * n * (n + 1) / 2)
    assert 0.5 * negative <= share <= negative


@given(cases(dtype=st.just(DTYPES["float32"]), most=5), st.data())
def test_the_past_does_not_see_the_future(xp, case, data):
    q, k, v, m, rope, name = case
    assume(q.shape[-2] > 1)
    cut, chunk = data.draw(st.integers(1, q.shape[-2] - 1)), data.draw(st.integers(1, 6))
    other = [x.copy() for x in (q, k, v)]
    for x in other:
        x[..., cut:, :] += np.float32(1)
    runs = [
        pyrope.linear_attention(*(to_backend(x, xp) for x in each), m, rope, causal=True, feature_map=name, chunk=chunk)
        for each in ((q, k, v), other)
    ]
    a, b = (pyrope.to_numpy(x)[..., :cut, :] for x in runs)
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_grouped_heads_read_the_key_head_of_their_group(xp):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((2, 6, 5, 8)), rng.standard_normal((2, 3, 5, 8)), rng.standard_normal((2, 3, 5, 4))
    wide = [np.stack([x[:, i * 3 // 6] for i in range(6)], axis=1) for x in (k, v)]
    for causal, forms in linear.FORMS.items():
        for form in forms:
            a, b = (
                pyrope.to_numpy(
                    pyrope.linear_attention(*(to_backend(x, xp) for x in kv), range(5), HALF8, causal=causal, form=form)
                )
                for kv in ((q, k, v), (q, *wide))
            )
            np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("name", MAPS)
def test_feature_maps(xp, name):
    x = np.array([[-np.inf, -800.0, -1.0, -1e-3, 0.0, 1e-3, 2.0, 80.0]], np.float32)
    got = linear.FEATURE_MAPS[name](to_backend(x, xp))
    assert got.dtype == np.float32
    exact = definition.FEATURE_MAPS[name](x.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(pyrope.to_numpy(got), exact, rtol=2e-6)


def test_elu_does_not_overflow():
    assert linear.FEATURE_MAPS["elu+1"](np.array([1e30], np.float32)) == np.float32(1e30)  # a warning is an error here


def test_any_function_is_a_feature_map(xp):
    dtypes = []

    def positive_and_negative(x):  # relu(x), relu(−x): twice as wide
        dtypes.append(x.dtype)
        return xp.concatenate((xp.maximum(x, 0), xp.maximum(-x, 0)), axis=-1)

    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 9, 4)).astype(np.float16)
    wide = [np.concatenate((np.maximum(x, 0), np.maximum(-x, 0)), axis=-1) for x in (q, k)]
    for causal, forms in linear.FORMS.items():
        for form in forms:
            for rope, m in ((None, None), (HALF8, range(9))):
                out = pyrope.linear_attention(
                    *(to_backend(x, xp) for x in (q, k, v)),
                    m,
                    rope,
                    causal=causal,
                    form=form,
                    chunk=4,
                    feature_map=positive_and_negative,
                )
                named = pyrope.linear_attention(*wide, v, m, rope, causal=causal, form=form, chunk=4, feature_map="identity")  # fmt: skip
                assert out.shape == (2, 9, 4)
                np.testing.assert_allclose(pyrope.to_numpy(out).astype("d"), named.astype("d"), rtol=2e-3, atol=2e-3)
    assert set(dtypes) == {np.dtype(np.float32)}  # never float64, never float16
    state = pyrope.linear_state(*(to_backend(x, xp) for x in (k, v)), feature_map=positive_and_negative)
    assert state.numerator.shape == (2, 8, 4) and state.denominator.shape == (2, 8)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_rounded_once(dtype):
    # 16-bit inputs: the float32 result of the same numbers, rounded to nearest.
    x = np.random.default_rng(0).standard_normal((3, 2, 300, 8)).astype(DTYPES[dtype])
    wide = x.astype(np.float64 if dtype == "float64" else np.float32)
    for causal, forms in linear.FORMS.items():
        for form in forms:
            got, single = (pyrope.linear_attention(*y, range(300), HALF8, causal=causal, form=form) for y in (x, wide))
            assert got.dtype == DTYPES[dtype] and (got == single.astype(DTYPES[dtype])).all()


def test_forms_agree_in_float32_over_many_chunks():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 2500, 16)).astype(np.float32)
    rope = Rope(16, 10000.0, "interleaved")
    exact = pyrope.linear_attention(q, k, v, range(2500), rope, causal=True, form="quadratic")
    for more in ({}, {"chunk": 2500}, {"chunk": 1000}, {"chunk": 3}, {"form": "recurrent"}):
        out = pyrope.linear_attention(q, k, v, range(2500), rope, causal=True, **more)
        np.testing.assert_allclose(out, exact, atol=2e-6)
    both = [pyrope.linear_attention(q, k, v, range(2500), rope, causal=False, form=f) for f in ("parallel", "quadratic")]  # fmt: skip
    np.testing.assert_allclose(*both, atol=1e-6)


def test_float32_sums_stay_accurate():
    n = 2**15
    q, k, v = np.random.default_rng(0).standard_normal((3, n, 16)).astype(np.float32)
    rope = Rope(16, 10000.0, "interleaved")
    exact = pyrope.linear_attention(*(x.astype(np.float64) for x in (q, k, v)), range(n), rope, causal=True)
    out = pyrope.linear_attention(q, k, v, range(n), rope, causal=True)
    assert (abs(out - exact).max(axis=-1) <= 1e-5 * abs(exact).max(axis=-1)).all()


def peak(function) -> int:
    """Bytes that a call needs at most beyond what was there before."""
    function()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept = function()
    most = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    del kept
    return most


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_memory_does_not_grow_with_the_length(layout):
    rope, sizes = Rope(32, 10000.0, layout), []
    for n in (8192, 24576):
        q, k, v = np.ones((3, 1, n, 32), np.float32)
        m = np.arange(n)
        for causal in (True, False):
            sizes.append(peak(lambda: pyrope.linear_attention(q, k, v, m, rope, causal=causal)) - q.nbytes)  # noqa: B023
    assert max(sizes[2:]) <= 1.1 * max(sizes[:2]) and max(sizes) < 8 * 2**20  # one n × n array of 8192 would be 256 MB


def test_decoding_needs_constant_memory():
    rope, state, sizes = HALF64, None, []
    x = np.ones((2, 1, 64), np.float32)
    for m in range(300):
        _, state = pyrope.linear_step(x, x, x, [m], rope, state=state)
        if m in (10, 299):
            sizes.append(peak(lambda: pyrope.linear_step(x, x, x, [m], rope, state=state)))  # noqa: B023
            assert state.numerator.base is None and state.denominator.base is None
            assert state.numerator.nbytes == 2 * 64 * 64 * 4 and state.denominator.nbytes == 2 * 64 * 4
    assert sizes[1] <= 1.2 * sizes[0] and state.count == 300


X = np.random.default_rng(3).standard_normal((2, 4, 8))


@pytest.mark.parametrize("causal, form", [(c, f) for c, forms in linear.FORMS.items() for f in forms])
def test_denominators_that_are_not_positive(xp, causal, form):
    q = k = np.ones((2, 4, 8), np.float32)
    q = q.copy()
    q[1, 2] = -1
    v = np.ones((2, 4, 3), np.float32)
    q, k, v = (to_backend(x, xp) for x in (q, k, v))
    count = r"1 of \d+ looked at were not"
    with pytest.raises(
        ValueError, match=rf"denominators must be finite and positive, {count}, the first at \(1, 2\): -"
    ):
        pyrope.linear_attention(q, k, v, causal=causal, form=form, chunk=3, feature_map="identity")
    out = pyrope.linear_attention(q, k, v, causal=causal, form=form, feature_map="identity", denominators="nonzero")
    np.testing.assert_allclose(pyrope.to_numpy(out), 1, rtol=1e-6)


@pytest.mark.parametrize("causal, form", [(c, f) for c, forms in linear.FORMS.items() for f in forms])
@pytest.mark.parametrize("rule", ["positive", "nonzero"])
def test_zero_denominators(xp, causal, form, rule):
    # q and k have no feature in common, but R(m)φ(q) and R(n)φ(k) have: something over nothing.
    q, k = np.zeros((2, 3, 8)), np.zeros((2, 3, 8))
    q[..., 0], k[..., 4] = 1, 1
    v = np.ones((2, 3, 2))
    q, k, v = (to_backend(x, xp) for x in (q, k, v))
    more = {"causal": causal, "form": form, "feature_map": "relu", "denominators": rule}
    with pytest.raises(
        ValueError, match=rf"finite and {rule}, \d of \d looked at were not, the first at \(0, [01]\): 0;"
    ):
        pyrope.linear_attention(q, k, v, range(3), HALF8, **more)
    # Nothing over nothing is nothing: a query that is similar to no key.
    assert (pyrope.to_numpy(pyrope.linear_attention(q, k, v, **more)) == 0).all()


@pytest.mark.parametrize("name", ["elu+1", "relu", "relu2", "exp"])
@pytest.mark.parametrize("causal, form", [(c, f) for c, forms in linear.FORMS.items() for f in forms])
def test_padding_of_minus_infinity(xp, name, causal, form):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 6, 8)) + 1
    padded = k.copy()
    padded[:, :2] = -np.inf
    for rope, m in ((None, None), (HALF8, np.arange(6))):
        more = {"causal": causal, "form": form, "feature_map": name, "chunk": 3}
        out = pyrope.linear_attention(*(to_backend(x, xp) for x in (q, padded, v)), m, rope, **more)
        at = None if m is None else m[2:]
        alone = pyrope.linear_attention(q[:, 2:], k[:, 2:], v[:, 2:], at, rope, **more)
        out = pyrope.to_numpy(out)
        np.testing.assert_allclose(out[:, 2:], alone, rtol=1e-12, atol=1e-14)
        assert not causal or (out[:, :2] == 0).all()


def test_no_keys_at_all(xp):
    q, k, v = (to_backend(np.ones(shape, np.float32), xp) for shape in ((2, 3, 8), (2, 0, 8), (2, 0, 5)))
    for form in linear.FORMS[False]:
        out = pyrope.to_numpy(pyrope.linear_attention(q, k, v, causal=False, form=form))
        assert out.shape == (2, 3, 5) and (out == 0).all()


@pytest.mark.parametrize("causal, form", [(c, f) for c, forms in linear.FORMS.items() for f in forms])
def test_numbers_of_queries_and_of_keys_may_differ_without_causality(causal, form):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((2, 3, 8)), rng.standard_normal((2, 5, 8)), rng.standard_normal((2, 5, 4))
    if causal:
        with pytest.raises(ValueError, match=r"n = m if causal: q had shape \(2, 3, 8\)"):
            pyrope.linear_attention(q, k, v, causal=True, form=form)
    else:
        out = pyrope.linear_attention(q, k, v, causal=False, form=form)
        assert_close(out, *expected(q, k, v, None, None, causal=False))
        with pytest.raises(ValueError, match="positions must be"):
            pyrope.linear_attention(q, k, v, range(3), HALF8, causal=False, form=form)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_numbers_are_not_passed_on_as_weights(value):
    k = X.copy()
    k[1, 3, 0] = value
    with pytest.raises(ValueError, match=f"denominators must be finite .*{value}"):
        pyrope.linear_attention(X, k, X, causal=False)
    with np.errstate(invalid="ignore"), pytest.raises(ValueError, match="denominators must be finite"):
        pyrope.linear_attention(X, k, X, causal=True)


def test_the_error_gives_the_place_in_the_sequence_not_in_the_chunk():
    q = np.ones((1, 300, 8))
    q[0, 290] = -1
    with pytest.raises(ValueError, match=r"1 of 108 looked at were not, the first at \(0, 290\): -2328"):
        pyrope.linear_attention(q, np.ones((1, 300, 8)), q, causal=True, feature_map="identity")


def test_empty_sequences(xp):
    x = to_backend(np.ones((2, 0, 8), np.float32), xp)
    for causal, forms in linear.FORMS.items():
        for form in forms:
            for rope, m in ((None, None), (HALF8, []), (HALF8, np.zeros(0, int))):
                out = pyrope.linear_attention(x, x, x, m, rope, causal=causal, form=form)
                assert out.shape == (2, 0, 8) and out.dtype == np.float32
    out, state = pyrope.linear_step(x, x, x, [], HALF8)
    assert out.shape == (2, 0, 8) and state.count == 0 and (pyrope.to_numpy(state.numerator) == 0).all()
    weights, sums = pyrope.attention_weights(x, x, causal=True)
    assert weights.shape == (2, 0, 0) and sums.shape == (2, 0)


@pytest.mark.parametrize("causal, form", [(causal, form) for causal, forms in linear.FORMS.items() for form in forms])
def test_out_takes_the_result(xp, causal, form):
    rng = np.random.default_rng(0)
    q, k, v = (to_backend(rng.standard_normal((2, 9, 8), np.float32), xp) for _ in "qkv")
    options = {"causal": causal, "form": form} | ({} if form == "recurrent" else {"chunk": 4})
    plain = pyrope.to_numpy(pyrope.linear_attention(q, k, v, range(9), HALF8, **options))
    out = xp.empty((2, 9, 8), np.float32)
    assert pyrope.linear_attention(q, k, v, range(9), HALF8, **options, out=out) is out
    assert (pyrope.to_numpy(out) == plain).all()
    with pytest.raises(ValueError, match="out must not share memory with q, k or v"):
        pyrope.linear_attention(q, k, v, range(9), HALF8, **options, out=v)
    with pytest.raises(ValueError, match="out must have the shape and dtype of the result"):
        pyrope.linear_attention(q, k, v, range(9), HALF8, **options, out=out[:1])


@pytest.mark.parametrize("causal, form", [(causal, form) for causal, forms in linear.FORMS.items() for form in forms])
@pytest.mark.parametrize("scaling", [None, YaRN(4.0, 64)])
def test_tables_that_are_ready_change_nothing(xp, causal, form, scaling):
    rope, rng = Rope(8, 10000.0, "half", scaling=scaling), np.random.default_rng(0)
    q, k, v = (to_backend(rng.standard_normal((2, 9, 8), np.float32), xp) for _ in "qkv")
    options = {"causal": causal, "form": form} | ({} if form == "recurrent" else {"chunk": 4})
    tables = pyrope.rotation_tables(rope.pure, range(9), like=q)
    with_tables = pyrope.linear_attention(q, k, v, range(9), rope, **options, tables=tables)
    plain = pyrope.linear_attention(q, k, v, range(9), rope, **options)
    np.testing.assert_allclose(pyrope.to_numpy(with_tables), pyrope.to_numpy(plain), rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match="tables were made for other positions"):
        pyrope.linear_attention(q, k, v, range(1, 10), rope, **options, tables=tables)
    with pytest.raises(ValueError, match="tables need positions and a rope"):
        pyrope.linear_attention(q, k, v, **options, tables=tables)
    if scaling is not None:
        factored = pyrope.rotation_tables(rope, range(9), like=q)
        with pytest.raises(
            ValueError, match="tables were made for Rope.*attention_factor=None.*not for .*attention_factor=1.0"
        ):
            pyrope.linear_attention(q, k, v, range(9), rope, **options, tables=factored)


def test_functions_that_work_in_place_or_return_the_same_memory(xp):
    rng, memory = np.random.default_rng(0), {}
    x = rng.standard_normal((2, 6, 8)).astype(np.float32)
    device, v = to_backend(x.copy(), xp), to_backend(rng.standard_normal((2, 6, 8)).astype(np.float32), xp)

    def in_place(x):
        return xp.exp(x, out=x)

    def same_memory(x):
        return xp.exp(x, out=memory.setdefault(x.shape, xp.empty(x.shape, x.dtype)))

    for causal, forms in linear.FORMS.items():
        for form in forms:
            for f in (in_place, same_memory):
                got, wanted = (
                    pyrope.linear_attention(device, device, v, range(6), HALF8, causal=causal, form=form, feature_map=g)
                    for g in (f, "exp")
                )
                np.testing.assert_allclose(pyrope.to_numpy(got), pyrope.to_numpy(wanted), rtol=1e-5, atol=1e-6)
    assert (pyrope.to_numpy(device) == x).all()


def test_a_function_must_return_an_array():
    x = np.ones((1, 3, 8))
    with pytest.raises(TypeError, match="feature_map must return an array, but it returned None"):
        pyrope.linear_attention(x, x, x, causal=True, feature_map=lambda x: None)


@pytest.mark.parametrize("causal, form", [(causal, form) for causal, forms in linear.FORMS.items() for form in forms])
def test_all_forms_agree_on_what_is_nothing(causal, form):
    # φ(q)ᵀφ(k) is 0, the rotated product is not: nothing by nothing only where the values are 0.
    q, k = np.array([[[1.0, 0, 0, 0]] * 2]), np.array([[[0, 0, 1.0, 0]] * 2])
    options = {"causal": causal, "form": form, "feature_map": "relu"}
    rope = Rope(4, 10000.0, "half")
    assert (pyrope.linear_attention(q, k, np.zeros((1, 2, 3)), [0, 1], rope, **options) == 0).all()
    with pytest.raises(ValueError, match="denominators must be finite and positive"):
        pyrope.linear_attention(q, k, np.ones((1, 2, 3)), [0, 1], rope, **options)


def test_a_state_whose_parts_do_not_fit_is_refused():
    x = np.ones((2, 1, 8), np.float32)
    state = pyrope.linear_state(x, x)
    for bad in (state.denominator.astype(np.float64), state.denominator[:1]):
        with pytest.raises(ValueError, match="the state belongs to another"):
            pyrope.linear_step(x, x, x, state=dataclasses.replace(state, denominator=bad))


def test_positions_on_the_device_and_of_several_axes(xp):
    rope = Rope(8, 10000.0, "half", axes=Axes("axial"))
    m = np.array([[0, 0, 1, 1], [0, 1, 0, 1]])
    q = to_backend(X, xp)
    outs = [pyrope.linear_attention(q, q, q, at, rope, causal=True) for at in (m, m.tolist(), pyrope.from_numpy(m, xp))]
    for out in outs:
        assert_close(out, *expected(X, X, X, m, rope, causal=True))


A = np.ones((2, 4, 8))
SHAPES = r"q \(…, h, n, d\), k \(…, g, m, d\), v \(…, g, m, e\) need h a multiple of g"


@pytest.mark.parametrize(
    "q, k, v, more, error, match",
    [
        (np.ones((3, 4, 8)), A, A, {}, ValueError, SHAPES + r", and n = m if causal: q had shape \(3, 4, 8\)"),
        (A, np.ones((0, 4, 8)), np.ones((0, 4, 8)), {}, ValueError, SHAPES),
        (A, np.ones((4, 4, 8)), np.ones((4, 4, 8)), {}, ValueError, SHAPES),
        (np.ones((5, 2, 4, 8)), np.ones((6, 2, 4, 8)), np.ones((6, 2, 4, 8)), {}, ValueError, SHAPES),
        (A, np.ones((2, 4, 6)), A, {}, ValueError, SHAPES),
        (A, A, np.ones((2, 3, 8)), {}, ValueError, SHAPES),
        (A, A, np.ones((1, 4, 8)), {}, ValueError, SHAPES),
        (A, A, np.ones((4, 8)), {}, ValueError, SHAPES),
        (A, np.ones((4, 8)), np.ones((4, 8)), {}, ValueError, SHAPES),
        (np.ones(8), np.ones(8), np.ones(8), {}, ValueError, SHAPES),
        (A, A, A.astype(np.float32), {}, TypeError, r"q, k and v must have one dtype: .* v had shape .* dtype\('float32'\)"),
        (A.astype(int),) * 3 + ({}, TypeError, r"q must be float16, .*dtype\('int64'\)"),
        (A.astype(">f4"),) * 3 + ({}, TypeError, "native byte order, was dtype\\('>f4'\\)"),
        (A.astype(np.longdouble),) * 3 + ({}, TypeError, "q must be float16"),
        (A.tolist(), A, A, {}, TypeError, "q must be a NumPy or CuPy array, was list"),
        (A, A, A, {"positions": range(4)}, ValueError, "positions and rope must be given both"),
        (A, A, A, {"rope": HALF8}, ValueError, "positions and rope must be given both"),
        (A, A, A, {"rope": HALF8, "positions": range(5)}, ValueError, r"positions must be \(…, n\), one for each token, had shape \(5,\)"),
        (A, A, A, {"rope": HALF8, "positions": np.array(3)}, ValueError, r"positions must be \(…, n\).*had shape \(\)"),
        (A, A, A, {"rope": HALF8, "positions": 3}, ValueError, "positions must be .…, n., one for each token"),
        (A, A, A, {"rope": HALF8, "positions": np.full(4, np.nan)}, TypeError, "positions must be integers, (none of them masked, )?were float"),
        (A, A, A, {"rope": HALF8, "positions": [0.0, 1.0, 2.0, 3.0]}, TypeError, "positions must be integers, (none of them masked, )?were float"),
        (A, A, A, {"rope": HALF8, "positions": [0, 1, 2, 2**40]}, ValueError, r"positions must lie within ±2\^31"),
        (A, A, A, {"rope": HALF8, "positions": np.zeros((3, 4), int)}, ValueError, r"positions of shape \(3, \d\) do not fit"),
        (A, A, A, {"rope": Rope(6, 10000.0, "half"), "positions": range(4)}, ValueError, "the last axis of x must be head_dim, 6"),
        (A, A, A, {"rope": "half", "positions": range(4)}, TypeError, "rope must be a Rope, was str"),
        (A, A, A, {"rope": Rope(8, 10000.0, "half", scaling=DynamicNTK(2.0, 64)), "positions": range(4)}, ValueError, "fix it first with rope.at"),
        (A, A, A, {"chunk": 0}, ValueError, "chunk must be at least 1, was 0"),
        (A, A, A, {"chunk": -3}, ValueError, "chunk must be at least 1, was -3"),
        (A, A, A, {"chunk": 2.0}, TypeError, "chunk must be an integer, was 2.0"),
        (A, A, A, {"feature_map": "gelu"}, ValueError, "feature_map must be one of 'elu\\+1', 'relu', .* was 'gelu'"),
        (A, A, A, {"feature_map": None}, ValueError, "feature_map must be one of .* was None"),
        (A, A, A, {"feature_map": lambda x: x[..., :0, :]}, ValueError, r"feature_map must keep float64 and \(2, \d\), returned"),
        (A, A, A, {"feature_map": lambda x: x.astype("f")}, ValueError, "feature_map must keep float64 .* returned float32"),
        (A, A, A, {"feature_map": lambda x: x.tolist()}, TypeError, "what feature_map returns must be a NumPy or CuPy array, was list"),
        (A, A, A, {"denominators": "any"}, ValueError, "denominators must be one of 'positive', 'nonzero', was 'any'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("causal, form", [(c, f) for c, forms in linear.FORMS.items() for f in forms])
def test_bad_input(q, k, v, more, error, match, causal, form):
    if form == "recurrent" and "chunk" in more:
        pytest.skip("its chunk is 1")
    with pytest.raises(error, match=match):
        pyrope.linear_attention(q, k, v, **more, causal=causal, form=form)
    if form == "chunked":
        with pytest.raises(error, match=match):
            pyrope.linear_step(q, k, v, **more)


@pytest.mark.parametrize(
    "more, error, match",
    [
        ({"causal": 1}, TypeError, "causal must be True or False, was 1"),
        ({"causal": True, "form": "parallel"}, ValueError, "form must be one of 'chunked', 'recurrent', 'quadratic', was 'parallel'"),
        ({"causal": False, "form": "chunked"}, ValueError, "form must be one of 'parallel', 'quadratic', was 'chunked'"),
        ({"causal": False, "form": ""}, ValueError, "form must be one of 'parallel', 'quadratic', was ''"),
    ],
)  # fmt: skip
def test_bad_forms(more, error, match):
    with pytest.raises(error, match=match):
        pyrope.linear_attention(A, A, A, **more)


def test_weights_check_their_arguments():
    with pytest.raises(TypeError, match="causal must be True or False, was 'yes'"):
        pyrope.attention_weights(A, A, causal="yes")
    with pytest.raises(ValueError, match=SHAPES):
        pyrope.attention_weights(A, A[:, :3], causal=True)
    with pytest.raises(ValueError, match="denominators must be finite and positive"):
        pyrope.attention_weights(A, -A, causal=True, feature_map="identity")
    weights, _ = pyrope.attention_weights(A, -A, causal=True, feature_map="identity", denominators="nonzero")
    np.testing.assert_allclose(weights[:, -1], 0.25)


STATE = pyrope.linear_state(A, A, range(4), HALF8)
OTHER = "the state belongs to another rope, feature map, shape or dtype"


@pytest.mark.parametrize(
    "x, rope, more",
    [
        (A, Rope(8, 500.0, "half"), {}),
        (A, None, {}),
        (A, HALF8, {"feature_map": "relu"}),
        (A.astype(np.float32), HALF8, {}),
        (A[:1], HALF8, {}),
        (A[None], HALF8, {}),
    ],
)
def test_states_of_another_model(x, rope, more):
    m = None if rope is None else range(4)
    with pytest.raises(ValueError, match=OTHER):
        pyrope.linear_step(x, x, x, m, rope, state=STATE, **more)
    with pytest.raises(ValueError, match=OTHER):
        STATE + pyrope.linear_state(x, x, m, rope, **more)


def test_states_of_other_value_widths_and_kinds():
    with pytest.raises(ValueError, match=OTHER):
        pyrope.linear_step(A, A, A[..., :3], range(4), HALF8, state=STATE)
    with pytest.raises(TypeError, match="state must be a LinearState, was tuple"):
        pyrope.linear_step(A, A, A, range(4), HALF8, state=(1, 2))
    with pytest.raises(TypeError, match="state must be a LinearState, was int"):
        STATE + 1
    assert isinstance(STATE, LinearState)
    with pytest.raises(dataclasses.FrozenInstanceError):
        STATE.count = 7


def test_a_state_of_another_library(xp):
    if xp is np:
        pytest.skip("there is one library only")
    x = to_backend(A, xp)
    with pytest.raises(TypeError, match="here is a cupy array, state is a numpy array"):
        pyrope.linear_step(x, x, x, range(4), HALF8, state=STATE)
