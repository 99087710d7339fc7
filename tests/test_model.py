"""`forward` against the definition, over every option of a `Config`; caches, segments and `generate` against full passes."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, strategies as st
from models import KINDS, PLAIN, by_definition, configs, fewer

from pyrope import Axes, DynamicNTK, Rope, YaRN, definition, from_numpy, to_numpy
from pyrope.model import Cache, Layer, Model, Sampling, forward, generate, random_model, weight_shapes

ROPE = PLAIN.layers[0].rope


def but(**changes):
    return dataclasses.replace(PLAIN, **changes)


def close(got, expected, bound=1e-11):
    return abs(to_numpy(got) - expected).max() <= bound * (1 + abs(np.asarray(expected)).max())


# ── The pass ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@fewer
@given(config=configs(), seed=st.integers(0, 99), data=st.data())
def test_forward_is_its_definition(xp, config, seed, data):
    model, rng = random_model(config, seed, xp, "float64"), np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocabulary, (2, data.draw(st.integers(1, 6))))
    at = data.draw(st.none() | st.just(rng.integers(-9, 9999, tokens.shape)))
    lengths = st.lists(st.integers(0, 2), min_size=tokens.shape[1], max_size=tokens.shape[1])
    segments = None if config.attention == "linear" else data.draw(st.none() | lengths.map(np.cumsum))
    before = {name: to_numpy(x).copy() for name, x in model.weights.items()}
    logits = to_numpy(forward(model, tokens, at, segments=segments))
    assert logits.shape == (*tokens.shape, config.vocabulary)
    for i, row in enumerate(logits):
        expected = by_definition(config, model.weights, tokens[i], None if at is None else at[i], segments)
        assert close(row, expected)
    assert all(np.array_equal(to_numpy(model.weights[name]), x) for name, x in before.items())


BIASES = dict.fromkeys(("norm_bias", "qkv_bias", "out_bias", "mlp_bias", "head_bias"), True)
MORE = dict.fromkeys(("qk_norm", "post_norms", "embedding_norm", "embedding_bias", "head_dense"), True) | BIASES
SCALES = {"embedding_scale": 2.0, "logit_scale": 0.5, "logit_softcap": 3.0, "softcap": 2.0, "scale": 0.7}
EVERY = KINDS | {
    "everything": but(**MORE, **SCALES, norm="layer", gated=False, activation="gelu", tied=True, eps=0.1),
    "everything, parallel": but(**MORE, **SCALES, block="parallel", heads=4, key_heads=2),
    "post-norm": but(**BIASES, block="post-norm", causal=False, norm="layer", layers=(Layer(ROPE, 2), Layer(None))),
    "linear, not causal": but(attention="linear", causal=False, feature_map="exp", qk_norm=True),
    "linear, with an attention factor": but(
        attention="linear", layers=(Layer(Rope(4, 100.0, "half", scaling=YaRN(4.0, 8))),)
    ),
    **{encoding: PLAIN.with_encoding(encoding) for encoding in ("none", "sinusoidal")},
}


@pytest.mark.parametrize("kind", EVERY)
def test_every_option_is_its_definition(xp, kind):
    """What Hypothesis may draw is here for certain; positions differ from row to row."""
    model, tokens = random_model(EVERY[kind], 5, xp, "float64"), np.arange(12).reshape(2, 6) % 11
    at = np.array([[0, 1, 2, 3, 4, 5], [7, 2, 9, 30, 1, 0]])
    logits = to_numpy(forward(model, tokens, at))
    for row in (0, 1):
        assert close(logits[row], by_definition(EVERY[kind], model.weights, tokens[row], at[row]))


def test_float32_is_near_float64():
    for kind, config in KINDS.items():
        exact, model = (random_model(config, 2, dtype=dtype) for dtype in ("float64", "float32"))
        logits = forward(model, range(9))
        assert logits.dtype == np.float32 and close(logits, forward(exact, range(9)), 1e-5), kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_gives_what_one_call_gives(xp, kind):
    model, tokens = random_model(KINDS[kind], 1, xp, "float64"), np.arange(14).reshape(2, 7) % 11
    cache, whole = Cache(model, 7, 2), forward(model, tokens, np.arange(5, 12))
    parts = [to_numpy(forward(model, tokens[:, :3], np.arange(5, 8), cache))]
    parts += [to_numpy(forward(model, tokens[:, a:b], cache=cache)) for a, b in ((3, 4), (4, 7))]
    assert close(np.concatenate(parts, axis=1), to_numpy(whole)) and cache.used == 7
    assert cache.positions.tolist() == [list(range(5, 12))] * 2
    with pytest.raises(ValueError, match="the cache is full: it holds 7 of 7 tokens, and 1 more"):
        forward(model, tokens[:, :1], cache=cache)


def test_tokens_one_by_one_at_any_position():
    model, at = (
        random_model(PLAIN, 1, dtype="float64"),
        [5, 6, 3, 69, 200, 2**31, 70],
    )  # within and beyond what is ready
    cache = Cache(model, len(at))
    parts = [forward(model, [i], [m], cache) for i, m in enumerate(at)]
    assert close(np.concatenate(parts), forward(model, range(len(at)), at))


def test_a_cache_belongs_to_one_model_and_stays_as_it_was_after_an_error():
    model = random_model(PLAIN, 1)
    cache = Cache(model, 9, 2)
    for other, tokens in ((model, [1]), (random_model(PLAIN, 1), [[1], [2]])):
        with pytest.raises(ValueError, match="made for another model, or for a batch of 2 and not of"):
            forward(other, tokens, cache=cache)
    forward(model, [[1, 2], [3, 4]], cache=cache)

    def fail(name, array):
        raise RuntimeError(name)

    with pytest.raises(RuntimeError):
        forward(model, [[5], [6]], cache=cache, trace=fail)
    assert cache.used == 2 and close(forward(model, [[5], [6]], cache=cache)[0], forward(model, [1, 2, 5])[-1:], 1e-5)


@pytest.mark.parametrize("kind", ["plain", "windows", "alibi", "sinusoidal"])
def test_segments_see_themselves_alone(xp, kind):
    """Packed into a row, after padding, and going on from a cache; sines see where a segment begins to count."""
    model = random_model(KINDS.get(kind) or PLAIN.with_encoding(kind), 4, xp, "float64")
    first, second = [3, 1, 4, 1], [9, 2, 6]
    alone = [to_numpy(forward(model, tokens)) for tokens in (first, second)]
    packed = forward(model, [0, 0, *first, *second], segments=[-1, -1, 0, 0, 0, 0, 1, 1, 1])
    assert close(packed[2:], np.concatenate(alone))
    cache = Cache(model, 9)
    forward(model, [*first, 9], cache=cache, segments=[5, 5, 5, 5, 7])
    assert close(forward(model, [2, 6], cache=cache), alone[1][1:])
    assert cache.segments[0, :7].tolist() == [5] * 4 + [7] * 3
    assert close(forward(model, [3, 1], cache=cache, segments=[8, 8]), alone[0][:2])
    with pytest.raises(ValueError, match="one came back after another segment"):
        forward(model, [1, 2, 3], segments=[0, 1, 0])
    with pytest.raises(ValueError, match="linear attention has no scores to mask"):
        forward(random_model(KINDS["linear"], 0), [1, 2], segments=[0, 1])
    assert forward(random_model(KINDS["linear"], 0), [1, 2], segments=[3, 3]).shape == (2, 11)


def test_a_rope_that_depends_on_the_length(monkeypatch):
    rope = Rope(4, 100.0, "half", scaling=DynamicNTK(2.0, 4))
    model = random_model(but(layers=(Layer(rope),)), 0, dtype="float64")
    fixed = {n: random_model(but(layers=(Layer(rope.at(n)),)), 0, dtype="float64") for n in (6, 9)}
    assert np.array_equal(forward(model, range(6)), forward(fixed[6], range(6)))
    assert np.array_equal(forward(model, range(6), cache=Cache(model, 9)), forward(fixed[9], range(6)))
    assert np.array_equal(forward(fixed[6], range(6), cache=Cache(fixed[6], 9)), forward(fixed[6], range(6)))
    assert forward(model, [1, 2, 3, 4], segments=[0, 0, 0, 1]).shape == (4, 11)  # both below 4, where Θ is the same
    alike = {
        "segments": [[0, 0], [1, 2]],
        "positions": [[0, 8], [0, 8]],
    }  # but in the second row there are two, of 1 and 9
    for places in ({"positions": [[0, 1], [7, 8]]}, alike):
        with pytest.raises(ValueError, match="of DynamicNTK depend on the length, and the sequences have different"):
            forward(model, [[1, 2], [3, 4]], **places)
    made, check = [], Cache.check
    monkeypatch.setattr(Cache, "check", lambda cache, *given: made.append(cache.length) or check(cache, *given))
    assert len(list(generate(model, [1, 2, 3], 6))) == 6 and set(made) == {9}  # the length of all that is to come


@pytest.mark.parametrize("kind", KINDS)
def test_the_trace_is_the_pass_step_by_step(kind, monkeypatch):
    monkeypatch.setattr("pyrope.layers._ROWS", 2)  # with a trace, tokens are not shared out
    config, trace = KINDS[kind], {}
    model = random_model(config, 0, dtype="float64")
    logits = forward(model, [3, 1, 4, 1], trace=trace.__setitem__)
    inner = ["state"] if kind == "linear" else ["scores"]
    parts = ["norm", "q", "k", "v", "q_rotated", "k_rotated"] + inner + ["attention", "mlp_norm", "mlp", "output"]
    assert list(trace) == ["embedding", *(f"layers.{i}.{part}" for i in (0, 1) for part in parts), "norm", "logits"]
    assert np.array_equal(trace["logits"][0], logits)
    t = {name.removeprefix("layers.1."): x for name, x in trace.items() if name.startswith("layers.1.")}
    assert close(t["output"], trace["layers.0.output"] + t["attention"] + t["mlp"])
    assert t["q"].shape == (1, 2, 4, 4)
    if kind != "linear":
        heads = definition.softmax(t["scores"]) @ definition.repeat_heads(t["v"], config.heads)
        out = heads.swapaxes(1, 2).reshape(1, 4, -1) @ model.weights["layers.1.out.weight"].T
        assert close(out, t["attention"])
    assert close(forward(model, [3, 1, 4, 1], logits="last"), logits[-1:])


def test_on_the_device_nan_is_refused(xp):
    weights = dict(random_model(PLAIN, 0).weights)
    weights["norm.weight"] = np.full(8, np.nan, np.float32)
    model = Model(PLAIN, {name: from_numpy(x, xp) for name, x in weights.items()})
    if xp is not np:
        with pytest.raises(ValueError, match="logits must be finite, and some are NaN"):
            forward(model, [1])
    with pytest.raises(ValueError, match="logits must be finite"):
        list(generate(model, [1], 1))


# ── What is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("change, words", [
    ({"key_heads": 3}, "key_heads must divide heads, 2, was 3"),
    ({"head_dim": 8}, r"ropes must have head_dim 8, as the model, had \[4\]"),
    ({"attention": "linear", "layers": (Layer(ROPE, 3),), "softcap": 2.0}, "softcap, windows would have no effect"),
    ({"attention": "linear", "encoding": "alibi", "layers": (Layer(None),)}, "ALiBi would have no effect"),
    ({"one_norm": True}, 'one_norm goes with block "parallel"'),
    ({"post_norms": True, "block": "post-norm"}, "post_norms go with"),
    ({"encoding": "none"}, "with encoding 'none' layers have no rope"),
    ({"layers": (Layer(None),)}, 'encoding "rope" needs a layer with a rope'),
    ({"encoding": "sinusoidal", "layers": (Layer(None),), "width": 7}, "width must be even for sines, was 7"),
    ({"layers": (Layer(Rope(4, 9.0, "half", axes=Axes("axial"))),)}, "several axes"),
    ({"layers": (Layer(ROPE, 0),)}, r"layers\[0\].window must be at least 1"),
    ({"norm": "batch"}, "norm must be one of 'rms', 'layer', was 'batch'"),
    ({"width": 0}, "width must be at least 1"), ({"eps": -1.0}, "eps must be finite and at least 0"),
    ({"scale": 0.0}, "scale must be finite and greater than 0"), ({"encoding": "x"}, "encoding must be one of"),
])  # fmt: skip
def test_configs_that_contradict_themselves(change, words):
    with pytest.raises(ValueError, match=words):
        but(**change)


@pytest.mark.parametrize("change", [
    {"heads": 2.0}, {"gated": 1}, {"layers": []}, {"layers": (ROPE,)}, {"layers": (Layer(3),)}, {"eps": "1"},
])  # fmt: skip
def test_options_of_another_type(change):
    with pytest.raises(TypeError, match=f"{next(iter(change))}.* must be"):
        but(**change)


def test_weights_that_do_not_fit():
    weights = dict(random_model(PLAIN, 0).weights)
    with pytest.raises(ValueError, match=r"missing: head.weight \(11, 8\)"):
        Model(PLAIN, {name: x for name, x in weights.items() if name != "head.weight"})
    with pytest.raises(ValueError, match=r"unexpected: extra \(8,\); norm.weight has shape \(3,\), not \(8,\)"):
        Model(PLAIN, weights | {"extra": np.ones(8, np.float32), "norm.weight": np.ones(3, np.float32)})
    with pytest.raises(TypeError, match="all be float32 or all float64"):
        Model(PLAIN, weights | {"embedding": weights["embedding"].astype(np.float64)})
    with pytest.raises(TypeError, match="were float16"):
        Model(PLAIN, {name: x.astype(np.float16) for name, x in weights.items()})
    model = Model(PLAIN, weights)
    del weights["embedding"]
    assert "embedding" in model.weights


@pytest.mark.parametrize("given, error, words", [
    ({"tokens": [11]}, ValueError, "0 … 10, were from 11 to 11"), ({"tokens": [-1]}, ValueError, "from -1"),
    ({"tokens": []}, ValueError, "one token at least"), ({"tokens": [[[1]]]}, ValueError, "shape"),
    ({"tokens": [1.5]}, TypeError, "tokens must be integers"), ({"tokens": [True]}, TypeError, "tokens must be integers"),
    ({"tokens": [1, 2], "positions": [1, 2, 3]}, ValueError, r"positions must have shape \(2,\) or \(1, 2\)"),
    ({"tokens": [1], "logits": "first"}, ValueError, "logits must be one of"), ({"tokens": [1], "trace": 3}, TypeError, "trace must be"),
    ({"tokens": [1], "cache": 3}, TypeError, "cache must be a Cache"), ({"tokens": [1], "positions": [2**31 + 1]}, ValueError, "2.31"),
])  # fmt: skip
def test_calls_that_are_refused(given, error, words):
    with pytest.raises(error, match=words):
        forward(random_model(PLAIN, 0), **given)


def test_caches_that_are_refused():
    with pytest.raises(ValueError, match="needs a causal model"):
        Cache(random_model(but(causal=False), 0), 3)
    with pytest.raises(ValueError, match="length must be at least 1"):
        Cache(random_model(PLAIN, 0), 0)
    with pytest.raises(ValueError, match=r"not enough memory: a cache for 10{18} tokens needs 6.4e\+10 GB"):
        Cache(random_model(PLAIN, 0), 10**18)
    model = random_model(PLAIN, 0)
    cache = Cache(model, 3)
    forward(model, [1], [2**31], cache=cache)
    with pytest.raises(ValueError, match=r"within ±2\^31, the last would be 2147483649"):
        forward(model, [1], cache=cache)


# ── Models, and what they say ────────────────────────────────────────────────────────────────────────────────────────


def test_the_weights_of_every_option():
    """A plain model has these; each option adds or takes away what its name says."""
    layer = {"attention_norm.weight": (8,), "qkv.weight": (16, 8), "out.weight": (8, 8), "mlp_norm.weight": (8,),
             "up.weight": (12, 8), "down.weight": (8, 6)}  # fmt: skip
    rest = {"embedding": (11, 8), "norm.weight": (8,), "head.weight": (11, 8)}
    one = but(layers=PLAIN.layers[:1])
    assert weight_shapes(PLAIN) == rest | {f"layers.{i}.{name}": s for i in (0, 1) for name, s in layer.items()}
    changes = {
        "qkv_bias": {"layers.0.qkv.bias": (16,)}, "out_bias": {"layers.0.out.bias": (8,)}, "tied": {"head.weight": None},
        "mlp_bias": {"layers.0.up.bias": (12,), "layers.0.down.bias": (8,)}, "head_bias": {"head.bias": (11,)},
        "norm_bias": {"layers.0.attention_norm.bias": (8,), "layers.0.mlp_norm.bias": (8,), "norm.bias": (8,)},
        "qk_norm": {"layers.0.q_norm.weight": (4,), "layers.0.k_norm.weight": (4,)},
        "post_norms": {"layers.0.attention_post_norm.weight": (8,), "layers.0.mlp_post_norm.weight": (8,)},
        "embedding_norm": {"embedding_norm.weight": (8,)}, "embedding_bias": {"embedding_bias": (8,)},
        "head_dense": {"head_dense.weight": (8, 8), "head_dense.bias": (8,), "head_norm.weight": (8,)},
    }  # fmt: skip
    for option, change in changes.items():
        expected = {name: shape for name, shape in (weight_shapes(one) | change).items() if shape is not None}
        assert weight_shapes(dataclasses.replace(one, **{option: True})) == expected, option
    assert "layers.0.mlp_norm.weight" not in weight_shapes(but(block="parallel", one_norm=True))
    assert "norm.weight" not in weight_shapes(but(block="post-norm"))
    assert weight_shapes(but(gated=False))["layers.1.up.weight"] == (6, 8)


def test_random_models(xp):
    first, second = random_model(PLAIN, 0, xp), random_model(PLAIN, 1, xp)
    assert np.array_equal(to_numpy(first.weights["embedding"]), random_model(PLAIN, 0).weights["embedding"])
    assert not np.array_equal(to_numpy(first.weights["embedding"]), to_numpy(second.weights["embedding"]))
    wide = random_model(but(width=400, vocabulary=300), 0).weights
    assert abs(wide["norm.weight"].mean() - 1) < 0.05 and abs(wide["norm.weight"].std() - 0.1) < 0.02
    assert abs(wide["head.weight"].std() * 20 - 1) < 0.1 and abs(wide["embedding"].std() - 0.1) < 0.02
    with pytest.raises(ValueError, match="dtype must be one of 'float32', 'float64', was 'float16'"):
        random_model(PLAIN, 0, dtype="float16")


def test_other_encodings():
    config = PLAIN.with_encoding("alibi")
    assert config.encoding == "alibi" and all(layer.rope is None for layer in config.layers)
    with pytest.raises(ValueError, match="encoding must be one of 'none', 'sinusoidal', 'alibi', was 'rope'"):
        PLAIN.with_encoding("rope")


# ── Generation ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_generate_takes_the_likeliest():
    model, tokens = random_model(PLAIN, 3, dtype="float64"), [1, 2, 3]
    new = list(generate(model, tokens, 5))
    for i, token in enumerate(new):
        assert token == forward(model, tokens + new[:i])[-1].argmax()
    assert len(new) == 5 and list(generate(model, tokens, 5, stop=[new[2]])) == new[: new.index(new[2])]


def test_generate_draws_by_the_probabilities():
    model, tokens = random_model(PLAIN, 3, dtype="float64"), [1, 2, 3]
    drawn = [next(generate(model, tokens, 1, Sampling(0.5, seed=seed))) for seed in range(400)]
    assert drawn[:9] == [next(generate(model, tokens, 1, Sampling(0.5, seed=seed))) for seed in range(9)]
    scores = forward(model, tokens)[-1] / 0.5
    weights = np.exp(scores) / np.exp(scores).sum()
    assert abs(np.bincount(drawn, minlength=11) / 400 - weights).max() < 0.12


@pytest.mark.parametrize("sampling, chosen", [
    (Sampling(1.0, 2), {1, 3}), (Sampling(1.0, None, 0.7), {1, 3}), (Sampling(1.0, None, 0.71), {1, 2, 3}),
    (Sampling(1.0, 3, 0.5), {1, 3}), (Sampling(1.0, 9, 1.0), {0, 1, 2, 3}), (Sampling(1e-300), {1}), (Sampling(), {1}),
])  # fmt: skip
def test_samples_of_the_likeliest_alone(sampling, chosen):
    logits, rng = np.log([0.1, 0.4, 0.2, 0.3]), np.random.default_rng(0)
    assert {sampling.draw(logits, rng) for _ in range(200)} == chosen


@pytest.mark.parametrize("change, words", [
    ({"temperature": -1}, "temperature must be finite"), ({"seed": 1}, "need a temperature above 0"),
    ({"temperature": 1.0, "top_k": 0}, "top_k must be at least 1"),
    ({"temperature": 1.0, "top_p": 1.5}, "top_p must be finite"), ({"temperature": 1.0, "seed": -1}, "seed must be at"),
])  # fmt: skip
def test_samplings_that_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**change)


@pytest.mark.parametrize("change, error, words", [
    ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1"), ({"stop": [-1]}, ValueError, r"stop\[0\] must be"),
    ({"tokens": [[1]]}, ValueError, "tokens must be one sequence"), ({"sampling": 0.7}, TypeError, "sampling must be a Sampling"),
])  # fmt: skip
def test_generation_that_is_refused_at_once(change, error, words):
    """Before the first token is asked for."""
    with pytest.raises(error, match=words):
        generate(**{"model": random_model(PLAIN, 0), "tokens": [1], "max_new_tokens": 3} | change)
