"""`forward` is held to `definition.forward`, over every architecture that a `Config` can say; caches, packing and padding
to `forward` without them."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from models import KINDS, PLAIN, attentions, by_definition, configs, fewer, named_weights, turn
from test_families import CONFIGS

from pyrope import DynamicNTK, LongRoPE, Rope, definition, encodings, from_numpy, to_numpy
from pyrope.linear import FEATURE_MAPS
from pyrope.models import transformer
from pyrope.models.architecture import Layer, Model, Weights, random_model, weight_shapes
from pyrope.models.families import read_architecture
from pyrope.models.transformer import Cache, forward

causal = st.just(True)


def arrays_of(config, seed):
    """Weights by name, of the size that keeps activations near 1."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape) / math.sqrt(shape[1] if len(shape) == 2 else 10) + name.endswith("norm.weight")
        for name, shape in weight_shapes(config).items()
    }


def model_of(config, arrays, xp=np, dtype=np.float64):
    return Model(config, Weights.of(config, {k: from_numpy(x.astype(dtype), xp) for k, x in arrays.items()}))


def ran(model, tokens, **options):
    return to_numpy(forward(model, tokens, **options))


def close(actual, expected, tolerance=1e-9):
    assert actual.shape == expected.shape
    assert abs(actual - expected).max() <= tolerance * (1 + abs(expected).max())


# --- Places ---


@st.composite
def placements(draw, config, b, n):
    """Positions and segments of a batch, (b, n) each, or None; segments stand together."""
    segments, positions = None, None
    if draw(st.booleans()):
        changes = draw(st.lists(st.lists(st.sampled_from([0, 0, 1]), min_size=n, max_size=n), min_size=b, max_size=b))
        names = draw(st.permutations(range(-1, n)))  # any numbers do
        segments = np.array([[names[i] for i in np.cumsum(row)] for row in changes])
    if draw(st.booleans()):
        number = st.integers(-3, 9) | st.integers(-(2**31), 2**31)
        positions = np.array(draw(st.lists(st.lists(number, min_size=n, max_size=n), min_size=b, max_size=b)))
    return positions, segments


@st.composite
def cases(draw, config=None, max_b=3, max_n=6):
    """A config, weights, tokens (b, n), positions and segments."""
    config = draw(configs() if config is None else config)
    b, n = draw(st.integers(1, max_b)), draw(st.integers(1, max_n))
    tokens = draw(
        st.lists(st.lists(st.integers(0, config.vocabulary - 1), min_size=n, max_size=n), min_size=b, max_size=b)
    )
    return config, arrays_of(config, draw(st.integers(0, 999))), np.array(tokens), *draw(placements(config, b, n))


def _row(x, i):
    return None if x is None else x[i]


@fewer
@given(case=cases())
def test_forward_is_its_definition(xp, case):
    config, w, tokens, positions, segments = case
    model, given_tokens = model_of(config, w, xp), tokens.copy()
    logits = ran(model, tokens, positions=positions, segments=segments)
    assert logits.shape == (*tokens.shape, config.vocabulary) and logits.dtype == np.float64
    for i in range(len(tokens)):
        close(logits[i], by_definition(config, w, tokens[i], _row(positions, i), _row(segments, i)), 1e-11)
    assert np.array_equal(tokens, given_tokens)
    after = {name: to_numpy(x) for name, x in named_weights(model).items()}
    assert all(np.array_equal(after[name], w[name]) for name in w), "weights were changed"


@fewer
@given(case=cases(configs(max_layers=2)))
def test_float32_stays_float32_and_is_near_the_definition(xp, case):
    config, w, tokens, positions, segments = case
    config = dataclasses.replace(config, eps=1e-2)  # a smaller one may divide by next to nothing
    w, trace = {name: x.astype(np.float32) for name, x in w.items()}, {}
    model, options = model_of(config, w, xp, np.float32), {"positions": positions, "segments": segments}
    logits = ran(model, tokens, **options, trace=trace.__setitem__)
    assert logits.dtype == np.float32 and {x.dtype for x in trace.values()} == {np.dtype(np.float32)}
    for i in range(len(tokens)):
        close(logits[i], by_definition(config, w, tokens[i], _row(positions, i), _row(segments, i)), 1e-4)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_is_the_definition(xp, name, dtype):
    """Over 12 tokens, which is more than any window of these configs."""
    config = read_architecture(CONFIGS[name])
    w = {name: x.astype(dtype) for name, x in arrays_of(config, 1).items()}
    tokens = np.random.default_rng(2).integers(0, config.vocabulary, (2, 12))
    logits = ran(model_of(config, w, xp, dtype), tokens)
    assert logits.dtype == dtype
    for row, ids in zip(logits, tokens, strict=True):
        close(row, by_definition(config, w, ids), 1e-12 if dtype == "float64" else 1e-5)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("causes", [True, False], ids=["causal", "both ways"])
def test_linear_attention_with_every_feature_map(xp, feature_map, causes):
    """With queries and keys that a bias keeps positive, so that no denominator is 0."""
    config = dataclasses.replace(
        KINDS["linear"], feature_map=feature_map, qkv_bias=True, heads=4, key_heads=2, causal=causes
    )
    w, tokens, segments = arrays_of(config, 5), [1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 1]
    for i in (0, 1):
        w[f"layers.{i}.qkv.weight"][:24] *= 0.1
        w[f"layers.{i}.qkv.bias"][:24] = 1.0
    model = model_of(config, w, xp)
    close(ran(model, tokens, segments=segments), by_definition(config, w, tokens, segments=segments))
    if causes:
        logits = _in_parts(model, Cache(model, 6), np.array([tokens]), None, None, [(0, 1), (1, 3), (3, 6)])
        close(logits[0], by_definition(config, w, tokens))


def test_one_sequence_is_a_batch_of_one(xp):
    model = random_model(PLAIN, 0, xp)
    one, two = ran(model, [3, 1, 4]), ran(model, [[3, 1, 4]])
    assert one.shape == (3, 11)
    close(one, two[0], 1e-6)
    for tokens in (np.array([3, 1, 4], np.uint8), range(3, 0, -1), from_numpy(np.array([3, 1, 4]), xp)):
        assert ran(model, tokens).shape == (3, 11)
    close(ran(model, from_numpy(np.array([3, 1, 4]), xp)), one, 1e-6)


def test_positions_and_segments_may_be_one_row_for_all(xp):
    model, tokens = random_model(PLAIN, 0, xp, "float64"), [[1, 2, 3], [4, 5, 6]]
    one = ran(model, tokens, positions=[5, 6, 9], segments=[1, 1, 2])
    for rows in ([5, 6, 9], [[5, 6, 9]], from_numpy(np.array([5, 6, 9]), xp)):
        close(ran(model, tokens, positions=rows, segments=[[1, 1, 2]]), one, 1e-12)
    both = {"positions": [[5, 6, 9]] * 2, "segments": [[1, 1, 2]] * 2}
    close(ran(model, tokens, **both), one, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_only_differences_of_positions_count(xp, kind):
    model, tokens = random_model(KINDS[kind], 0, xp, "float64"), [1, 2, 3, 4]
    near = ran(model, tokens, positions=[0, 1, 5, 6])
    for shift in (-(2**31), -7, 2**31 - 6):
        close(ran(model, tokens, positions=np.array([0, 1, 5, 6]) + shift), near, 1e-12)
    assert abs(ran(model, tokens) - near).max() > 1e-3


# --- Caches ---


@st.composite
def splits(draw, n):
    cuts = sorted(draw(st.sets(st.integers(1, n - 1)))) if n > 1 else []
    return list(zip([0, *cuts], [*cuts, n], strict=True))


def _part(x, a, b):
    return None if x is None else x[:, a:b]


def _in_parts(model, cache, tokens, positions, segments, parts):
    out = []
    for a, b in parts:
        out.append(
            ran(model, tokens[:, a:b], positions=_part(positions, a, b), segments=_part(segments, a, b), cache=cache)
        )
        assert cache.used == b
    return np.concatenate(out, axis=1)


@fewer
@given(data=st.data(), case=cases(configs(causal=causal), max_n=8), more=st.integers(0, 3))
def test_any_parts_are_one_pass(xp, data, case, more):
    config, w, tokens, positions, segments = case
    model, (b, n) = model_of(config, w, xp), tokens.shape
    at_once = ran(model, tokens, positions=positions, segments=segments)
    for parts in (data.draw(splits(n)), [(i, i + 1) for i in range(n)]):
        close(_in_parts(model, Cache(model, n + more, b), tokens, positions, segments, parts), at_once)


@fewer
@given(data=st.data(), attention=attentions)
def test_padded_batches_and_what_follows_them_are_separate_runs(xp, data, attention):
    """Rows of different lengths, padded on the left with anything, then decoded for a while."""
    config = data.draw(configs(causal=causal, attention=st.just(attention)))
    model = model_of(config, arrays_of(config, 0), xp)
    ids = st.integers(0, config.vocabulary - 1)
    rows, steps = data.draw(st.lists(st.lists(ids, min_size=1, max_size=5), min_size=1, max_size=3)), 3
    n = max(map(len, rows))
    tails = data.draw(st.lists(st.lists(ids, min_size=steps, max_size=steps), min_size=len(rows), max_size=len(rows)))
    padding = [data.draw(st.lists(ids, min_size=n - len(row), max_size=n - len(row))) for row in rows]
    tokens = np.array([left + row for left, row in zip(padding, rows, strict=True)])
    segments = np.array([[-1] * len(left) + [0] * len(row) for left, row in zip(padding, rows, strict=True)])
    cache = Cache(model, n + steps, len(rows))
    logits = ran(model, tokens, segments=segments, cache=cache)
    close(logits, ran(model, tokens, segments=segments))
    for j in range(steps):
        logits = np.concatenate((logits, ran(model, np.array(tails)[:, j : j + 1], cache=cache)), axis=1)
    for i, (row, tail) in enumerate(zip(rows, tails, strict=True)):
        close(logits[i, n - len(row) :], ran(model, row + tail))


@fewer
@given(data=st.data(), config=configs())
def test_packed_sequences_are_separate_runs(xp, data, config):
    model = model_of(config, arrays_of(config, 1), xp)
    ids = st.integers(0, config.vocabulary - 1)
    rows = data.draw(st.lists(st.lists(ids, min_size=1, max_size=4), min_size=1, max_size=4))
    logits = ran(model, sum(rows, []), segments=sum(([i] * len(row) for i, row in enumerate(rows)), []))
    close(logits, np.concatenate([ran(model, row) for row in rows]))


def test_positions_go_on_after_a_cache():
    """From its last one, whatever that was, and in its last segment."""
    model = random_model(PLAIN, 0, dtype="float64")
    tokens, cache = [1, 2, 3, 4, 5], Cache(model, 5)
    forward(model, tokens[:3], positions=[4, 9, 20], segments=[7, 8, 8], cache=cache)
    logits = forward(model, tokens[3:], cache=cache)
    assert cache.positions.tolist() == [[4, 9, 20, 21, 22]] and cache.segments.tolist() == [[7, 8, 8, 8, 8]]
    close(logits, forward(model, tokens, positions=[4, 9, 20, 21, 22], segments=[7, 8, 8, 8, 8])[3:])
    cache = Cache(model, 5)
    forward(model, tokens[:3], cache=cache)
    forward(model, tokens[3:], segments=[1, 1], cache=cache)
    assert cache.positions.tolist() == [[0, 1, 2, 0, 1]], "a new segment begins anew"


SCALINGS = [
    DynamicNTK(2.0, 4),
    LongRoPE((1.0, 2.0), (3.0, 5.0), 4.0, 4),
]


@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: type(s).__name__)
def test_a_cache_fixes_the_length_that_frequencies_depend_on(xp, scaling, attention):
    rope = Rope(4, 10000.0, "half", scaling=scaling)
    config = dataclasses.replace(PLAIN, layers=(Layer(rope), Layer(PLAIN.layers[0].rope)), attention=attention)
    w, tokens = arrays_of(config, 3), np.array([[1, 2, 3, 4, 5, 6]])
    model, results = model_of(config, w, xp), {}
    for length in (6, 20):
        fixed = dataclasses.replace(config, layers=(Layer(rope.at(length)), config.layers[1]))
        results[length] = by_definition(fixed, w, tokens[0])
        for parts in ([(0, 6)], [(0, 2), (2, 6)], [(0, 3), (3, 4), (4, 6)]):
            cache = Cache(model, length)
            assert cache.ropes[0] == rope.at(length)
            close(_in_parts(model, cache, tokens, None, None, parts)[0], results[length])
    close(ran(model, tokens)[0], results[6])  # without a cache, at the length of the sequence
    if isinstance(scaling, DynamicNTK):
        assert abs(results[6] - results[20]).max() > 1e-6
    later = ran(model, tokens, positions=[0, 1, 2, 3, 4, 19])[0]
    fixed = dataclasses.replace(config, layers=(Layer(rope.at(20)), config.layers[1]))
    close(later, by_definition(fixed, w, tokens[0], [0, 1, 2, 3, 4, 19]))


def test_a_rope_that_is_fixed_already_stays_as_it_is():
    rope = Rope(4, 10000.0, "half", scaling=DynamicNTK(2.0, 4, 9))
    model = random_model(dataclasses.replace(PLAIN, layers=(Layer(rope),)), 0, dtype="float64")
    cache = Cache(model, 50)
    assert cache.ropes == [rope]
    close(forward(model, [1, 2, 3], cache=cache), forward(model, [1, 2, 3]))


def test_sequences_of_different_lengths_need_a_cache_where_frequencies_depend_on_it():
    rope = Rope(4, 10000.0, "half", scaling=SCALINGS[0])
    model = random_model(dataclasses.replace(PLAIN, layers=(Layer(rope),)), 0)
    with pytest.raises(ValueError, match=r"DynamicNTK depend on the length, .* different ones, \[2, 5\]: give a Cache"):
        forward(model, [1] * 7, segments=[0] * 5 + [1] * 2)
    assert forward(model, [1] * 7, segments=[0] * 5 + [1] * 2, cache=Cache(model, 8)).shape == (7, 11)
    assert forward(model, [1] * 7, segments=[0] * 4 + [1] * 3).shape == (7, 11)  # up to 4 they do not depend on it


# --- Rows, and the last logits ---


@fewer
@given(data=st.data(), case=cases(max_b=3))
def test_a_row_does_not_depend_on_the_others(xp, data, case):
    config, w, tokens, positions, segments = case
    model, row = model_of(config, w, xp), data.draw(st.integers(0, len(tokens) - 1))
    garbage = np.array(
        data.draw(st.lists(st.integers(0, config.vocabulary - 1), min_size=tokens.size, max_size=tokens.size))
    )
    other = garbage.reshape(tokens.shape)
    other[row] = tokens[row]
    options = {"positions": positions, "segments": segments}
    close(ran(model, other, **options)[row], ran(model, tokens, **options)[row], 1e-12)
    alone = {name: None if x is None else x[row] for name, x in options.items()}
    close(ran(model, tokens[row], **alone), ran(model, tokens, **options)[row], 1e-9)


@fewer
@given(case=cases())
def test_the_last_logits_are_the_last_of_all(xp, case):
    config, w, tokens, positions, segments = case
    model, options = model_of(config, w, xp), {"positions": positions, "segments": segments}
    last = ran(model, tokens, **options, logits="last")
    assert last.shape == (len(tokens), 1, config.vocabulary)
    close(last, ran(model, tokens, **options)[:, -1:], 1e-12)
    assert ran(model, tokens[0], logits="last").shape == (1, config.vocabulary)


# --- Traces ---


@fewer
@given(case=cases(), cached=st.booleans())
def test_a_trace_has_every_intermediate_and_changes_nothing(xp, case, cached):
    config, w, tokens, positions, segments = case
    (b, n), h, g, d, e = tokens.shape, config.heads, config.key_heads, config.head_dim, config.width
    cached = cached and config.causal
    model, trace = model_of(config, w, xp), {}

    def spoil(name, array):
        assert name not in trace, f"{name} came twice"
        trace[name] = to_numpy(array).copy()
        array[...] = 0  # a copy: nothing depends on it

    make = lambda: Cache(model, 2 * n, b) if cached else None  # noqa: E731
    if cached and positions is not None:
        positions = np.minimum(positions, 2**31 - n)  # what follows goes on counting
    options = {"positions": positions, "segments": segments}
    first, second = make(), make()
    if cached:
        ran(model, tokens, **options, cache=first)
        ran(model, tokens, **options, cache=second)
        options = {}
    plain = ran(model, tokens, **options, cache=first)
    traced = ran(model, tokens, **options, cache=second, trace=spoil)
    close(traced, plain, 1e-12)  # not to the last bit: that hangs on where in memory an array lies
    layer = {"norm": (b, n, e), "q": (b, h, n, d), "k": (b, g, n, d), "v": (b, g, n, d), "q_rotated": (b, h, n, d)}
    layer |= {"k_rotated": (b, g, n, d), "attention": (b, n, e), "mlp_norm": (b, n, e), "mlp": (b, n, e)}
    layer |= {"output": (b, n, e)}
    if config.attention == "softmax":
        layer["scores"] = (b, h, n, 2 * n if cached else n)
    elif config.causal:
        layer["state"] = (b, g, d, d)
    shapes = {f"layers.{i}.{name}": shape for i in range(len(config.layers)) for name, shape in layer.items()}
    shapes |= {"embedding": (b, n, e), "logits": (b, n, config.vocabulary)}
    shapes |= {"norm": (b, n, e)} if config.block != "post-norm" else {}
    shapes |= {"head_norm": (b, n, e)} if config.head_dense else {}
    assert {name: x.shape for name, x in trace.items()} == shapes
    assert np.array_equal(trace["logits"], traced)


@fewer
@given(config=configs(causal=causal), seed=st.integers(0, 99), start=st.integers(-5, 2**30))
def test_what_a_trace_holds_fits_together(xp, config, seed, start):
    arrays, tokens, n = arrays_of(config, seed), np.arange(5) % config.vocabulary, 5
    positions, trace = np.arange(start, start + n), {}
    model, host = model_of(config, arrays, xp), Weights.of(config, arrays)
    logits = ran(model, tokens, positions=positions, trace=lambda k, x: trace.__setitem__(k, to_numpy(x)[0]))
    assert np.array_equal(trace["logits"], logits)
    for i, (layer, w) in enumerate(zip(config.layers, host.layers, strict=True)):
        t = {name.removeprefix(f"layers.{i}."): x for name, x in trace.items() if name.startswith(f"layers.{i}.")}
        source = trace["embedding"] if i == 0 else trace[f"layers.{i - 1}.output"]
        if config.block == "post-norm":
            assert np.array_equal(t["norm"], source)
        else:
            close(t["norm"], definition.norm(config, w.attention_norm, source), 1e-12)
        heads = definition.project(w.qkv, t["norm"]).reshape(n, -1, config.head_dim)
        close(t["v"].swapaxes(0, 1), heads[:, config.heads + config.key_heads :], 1e-12)
        if not config.qk_norm:
            close(t["q"].swapaxes(0, 1), heads[:, : config.heads], 1e-12)
            close(t["k"].swapaxes(0, 1), heads[:, config.heads : config.heads + config.key_heads], 1e-12)
        rotate, phi = turn(config, layer, positions), definition.FEATURE_MAPS[config.feature_map]
        phi = phi if config.attention == "linear" else lambda x: x
        for name in "qk":
            close(t[f"{name}_rotated"], rotate(phi(t[name])), 1e-12)
        if config.attention == "softmax":
            visible = definition.visible(np.arange(n), np.arange(n), True, layer.window)
            assert (np.isneginf(t["scores"]) == ~visible).all()
            out = definition.softmax(t["scores"]) @ definition.repeat_heads(t["v"], config.heads)
            attended = definition.project(w.out, out.swapaxes(0, 1).reshape(n, -1))
            close(t["attention"], definition.norm(config, w.attention_post_norm, attended), 1e-9)
        else:
            close(t["state"], t["k_rotated"].swapaxes(-1, -2) @ t["v"], 1e-12)
        close(t["mlp"], definition.norm(config, w.mlp_post_norm, definition.mlp(config, w, t["mlp_norm"])), 1e-9)
        if config.block != "post-norm":
            close(t["output"], source + t["attention"] + t["mlp"], 1e-12)


def test_the_scores_of_a_trace_are_those_of_the_definition(xp):
    """With everything that changes scores: scale, softcap, a window and ALiBi, over a cache."""
    config = dataclasses.replace(KINDS["alibi"], layers=(Layer(None, 3),), scale=0.7, softcap=1.5)
    model, traced = random_model(config, 0, xp, "float64"), {}
    cache = Cache(model, 6)
    trace = lambda name, x: traced.setdefault(name, []).append(to_numpy(x)[0])  # noqa: E731
    forward(model, [1, 2, 3, 4], cache=cache, trace=trace)
    forward(model, [5, 6], cache=cache, trace=trace)
    q, k = traced["layers.0.q_rotated"][1], np.concatenate(traced["layers.0.k_rotated"], axis=1)
    visible, bias = (
        definition.visible(np.arange(4, 6), np.arange(6), True, 3),
        encodings.alibi_bias(2, [4, 5], range(6)),
    )
    scores = definition.attention_scores(q, k, visible, 0.7, 1.5, bias)
    np.testing.assert_allclose(traced["layers.0.scores"][1], scores, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_trace_nothing_is_computed_for_one(xp, kind, monkeypatch):
    model = random_model(KINDS[kind], 0, xp)

    def never(*args, **options):
        raise AssertionError("computed, though nobody asked")

    expected = ran(model, [1, 2, 3])
    monkeypatch.setattr(transformer, "_scores", never)
    monkeypatch.setattr(transformer, "FEATURE_MAPS", {})
    close(ran(model, [1, 2, 3]), expected, 1e-6)
    with pytest.raises((AssertionError, KeyError)):
        forward(model, [1, 2, 3], trace={}.__setitem__)


# --- Bad input ---

TOKENS = [
    ([0, 11], ValueError, "tokens must lie in 0 … 10, were from 0 to 11"),
    ([-1, 3], ValueError, "tokens must lie in 0 … 10, were from -1 to 3"),
    ([10**20], ValueError, r"tokens must lie within ±2\^31"),
    ([1.0], TypeError, "tokens must be integers, were float"),
    (np.array([1.0]), TypeError, "tokens must be integers, .* were float64"),
    ([True], TypeError, "tokens must be integers, were bool"),
    (np.array([True]), TypeError, "tokens must be integers, .* were bool"),
    ("ab", TypeError, "tokens must be integers, were str"),
    (None, TypeError, "tokens must be integers, were NoneType"),
    ([[1, 2], [3]], TypeError, "tokens must be integers, were list"),
    ([], ValueError, r"tokens must have shape \(n,\) or \(b, n\) with one token at least, had \(0,\)"),
    (np.zeros((2, 0), int), ValueError, r"with one token at least, had \(2, 0\)"),
    (5, ValueError, r"tokens must have shape .* had \(\)"),
    ([[[1]]], ValueError, r"tokens must have shape .* had \(1, 1, 1\)"),
]
PLACES = [
    ({"positions": [0, 1]}, ValueError, r"positions must have shape \(3,\) or \(2, 3\), as the tokens, had \(2,\)"),
    ({"positions": 0}, ValueError, r"positions must have shape .* had \(\)"),
    ({"positions": [[0, 1, 2]] * 3}, ValueError, r"positions must have shape .* had \(3, 3\)"),
    ({"positions": [0.0, 1.0, 2.0]}, TypeError, "positions must be integers, were float"),
    ({"positions": [0, 1, 2**31 + 1]}, ValueError, r"positions must lie within ±2\^31"),
    ({"positions": [0, 1, -(2**31) - 1]}, ValueError, r"positions must lie within ±2\^31"),
    ({"segments": [0, 0]}, ValueError, r"segments must have shape \(3,\) or \(2, 3\), as the tokens, had \(2,\)"),
    ({"segments": [0, 1, 0]}, ValueError, "tokens of a segment must stand together, and one came back"),
    ({"segments": [[0, 0, 0], [3, 1, 3]]}, ValueError, "tokens of a segment must stand together, and one came back"),
    ({"segments": [False, True, True]}, TypeError, "segments must be integers, were bool"),
    ({"logits": "first"}, ValueError, "logits must be one of 'all', 'last', was 'first'"),
    ({"cache": {}}, TypeError, "cache must be a Cache, was dict"),
    ({"trace": {}}, TypeError, "trace must be a function of a name and an array, was dict"),
]


@pytest.mark.parametrize(("tokens", "error", "says"), TOKENS, ids=lambda x: repr(x)[:20])
def test_wrong_tokens_are_refused(xp, tokens, error, says):
    with pytest.raises(error, match=says):
        forward(random_model(PLAIN, 0, xp), tokens)


def test_tokens_on_the_device_are_checked_too(xp):
    """A GPU would silently wrap around."""
    with pytest.raises(ValueError, match="tokens must lie in 0 … 10, were from 3 to 11"):
        forward(random_model(PLAIN, 0, xp), from_numpy(np.array([3, 11]), xp))


@pytest.mark.parametrize(("options", "error", "says"), PLACES, ids=lambda x: str(x)[:30] if isinstance(x, dict) else "")
def test_wrong_options_are_refused(options, error, says):
    with pytest.raises(error, match=says):
        forward(random_model(PLAIN, 0), [[1, 2, 3], [4, 5, 6]], **options)


@pytest.mark.parametrize("bad", [None, PLAIN])
def test_a_model_is_needed(bad):
    for call in (lambda: forward(bad, [1]), lambda: Cache(bad, 3)):
        with pytest.raises(TypeError, match=f"model must be a Model, was {type(bad).__name__}"):
            call()


def test_wrong_caches_are_refused(xp):
    model = random_model(PLAIN, 0, xp)
    refused = "the cache was made for another model, dtype or backend"
    for other in (
        random_model(KINDS["linear"], 0, xp),
        random_model(PLAIN, 0, xp, "float64"),
        random_model(PLAIN, 1, xp),
    ):
        with pytest.raises(ValueError, match=refused):
            forward(model, [1], cache=Cache(other, 4))
    with pytest.raises(ValueError, match=refused):  # the same weights, read otherwise
        forward(model, [1], cache=Cache(Model(PLAIN.with_encoding("none"), model.weights), 4))
    if xp is not np:
        with pytest.raises(ValueError, match=refused):
            forward(model, [1], cache=Cache(random_model(PLAIN, 0), 4))
    with pytest.raises(ValueError, match="the cache was made for a batch of 2, tokens had 1"):
        forward(model, [1], cache=Cache(model, 4, 2))
    cache = Cache(model, 4)
    forward(model, [1, 2, 3], cache=cache)
    with pytest.raises(
        ValueError, match="the cache is full: it holds 3 of 4 tokens, and 2 more were given; make a longer"
    ):
        forward(model, [1, 2], cache=cache)
    with pytest.raises(ValueError, match="segment must stand together"):
        forward(model, [1], segments=[5], cache=_with_segments(model, [5, 5, 6]))
    with pytest.raises(ValueError, match="a cache needs a causal model"):
        Cache(random_model(dataclasses.replace(PLAIN, causal=False), 0, xp), 4)
    for name, arguments in (("length", (0,)), ("batch", (3, 0))):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, was 0"):
            Cache(model, *arguments)
    with pytest.raises(TypeError, match="length must be an integer, was 3.0"):
        Cache(model, 3.0)


def _with_segments(model, segments):
    cache = Cache(model, 8)
    forward(model, [1] * len(segments), segments=segments, cache=cache)
    return cache


def test_positions_past_the_end_of_all_positions_are_refused():
    model = random_model(PLAIN, 0)
    cache = Cache(model, 4)
    forward(model, [1], positions=[2**31], cache=cache)
    with pytest.raises(ValueError, match=r"positions must lie within ±2\^31, the last would be 2147483649"):
        forward(model, [1, 2][:1], cache=cache)
    assert cache.used == 1


def test_more_segments_than_can_be_told_apart_are_refused():
    model = random_model(PLAIN, 0)
    with pytest.raises(ValueError, match="3 segments of up to 600000000 tokens are too many"):
        forward(model, [1, 2, 3], segments=[0, 1, 2], cache=_long_cache(model))


def _long_cache(model):
    cache = Cache(model, 4)
    cache.length = 600_000_000  # as if: what is looked at is the length alone
    return cache


def _state(cache):
    arrays = [*cache.keys, *cache.values]
    arrays = [to_numpy(x)[:, :, : cache.used].copy() for x in arrays]
    states = [(to_numpy(x.numerator).copy(), to_numpy(x.denominator).copy()) for x in cache.states if x is not None]
    places = [x[:, : cache.used].copy() for x in (cache.positions, cache.segments, cache.order)]
    return [cache.used, *arrays, *[x for pair in states for x in pair], *places]


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_fails_leaves_the_cache_as_it_was(xp, kind):
    model = random_model(KINDS[kind], 0, xp, "float64")
    cache, names = Cache(model, 8), []
    forward(model, [1, 2, 3], segments=[0, 1, 1], cache=cache)
    before = _state(cache)
    forward(model, [4, 5], trace=lambda name, _: names.append(name))

    def fails(wanted):
        def trace(name, array):
            if name == wanted:
                raise RuntimeError(name)

        return {"trace": trace}

    calls = [
        ([4, 99], {}),
        ([4, 5], {"positions": [1]}),
        ([4, 5], {"segments": [1, 0]}),
        ([1] * 6, {}),
        ([1], {"logits": ""}),
    ]
    calls += [([4, 5], fails(name)) for name in names]
    for tokens, options in calls:
        with pytest.raises((ValueError, RuntimeError)):
            forward(model, tokens, cache=cache, **options)
        assert all(np.array_equal(x, y) for x, y in zip(before, _state(cache), strict=True))
    logits = ran(model, [4, 5], cache=cache)
    close(logits, ran(model, [1, 2, 3, 4, 5], segments=[0, 1, 1, 1, 1])[3:])


def test_a_cache_does_not_change_what_was_said_before(xp):
    """States of linear attention that were read from a cache are not worked on in place."""
    model = random_model(KINDS["linear"], 0, xp, "float64")
    cache = Cache(model, 8)
    forward(model, [1, 2, 3], cache=cache)
    kept = cache.states[0]
    before = to_numpy(kept.numerator).copy()
    forward(model, [4], cache=cache)
    assert np.array_equal(to_numpy(kept.numerator), before) and cache.states[0] is not kept


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_batch_begin_and_go_on_each_by_itself(xp, kind):
    """In the second part the first row begins a sequence, the second goes on, the third does both."""
    config = KINDS[kind]
    w, tokens = arrays_of(config, 7), np.array([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1], [3, 3, 2, 2, 1, 1]])
    segments = np.array([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 2, 2]])
    model = model_of(config, w, xp)
    logits = _in_parts(model, Cache(model, 6, 3), tokens, None, segments, [(0, 3), (3, 5), (5, 6)])
    for i in range(3):
        close(logits[i], by_definition(config, w, tokens[i], segments=segments[i]))
