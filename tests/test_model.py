"""`forward` against the definition, over every option of a `Config`, at once and with a cache; generation; refusals."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from models import KINDS, PLAIN, by_definition, configs, turn

from pyrope import Axes, DynamicNTK, Rope, definition, from_numpy, to_numpy
from pyrope.model import Cache, Layer, Model, forward, generate, random_model, weight_shapes

ROPE = PLAIN.layers[0].rope


def but(**changes):
    return dataclasses.replace(PLAIN, **changes)


def close(got, expected, bound=1e-11):
    return abs(to_numpy(got) - expected).max() <= bound * (1 + abs(np.asarray(expected)).max())


# ── The pass ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(config=configs(), seed=st.integers(0, 99), data=st.data())
def test_forward_is_its_definition(xp, config, seed, data):
    """In one call, and in two with a cache; positions are those of the caller, or the next ones; a segment is alone."""
    model, rng = random_model(config, seed, xp, "float64"), np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocabulary, (2, n := data.draw(st.integers(1, 6))))
    at = data.draw(st.none() | st.just(rng.integers(-9, 9999, tokens.shape)))
    lengths = st.lists(st.integers(0, 2), min_size=n, max_size=n)
    segments = None if config.attention == "linear" else data.draw(st.none() | lengths.map(np.cumsum))
    before = {name: to_numpy(x).copy() for name, x in model.weights.items()}
    logits = to_numpy(forward(model, tokens, at, segments=segments))
    assert logits.shape == (2, n, config.vocabulary)
    for i, row in enumerate(logits):
        assert close(row, by_definition(config, before, tokens[i], None if at is None else at[i], segments))
    if config.causal:
        cut, cache = data.draw(st.integers(1, n)), Cache(model, n, 2)
        for part in (slice(0, cut), slice(cut, n))[: 1 + (cut < n)]:
            own = {} if segments is None else {"segments": segments[part]}
            got = forward(model, tokens[:, part], None if at is None else at[:, part], cache, **own)
            assert close(got, logits[:, part])
        assert cache.used == n and (at is None or (cache.positions == at).all())
        with pytest.raises(ValueError, match=f"the cache is full: it holds {n} of {n} tokens, and 1 more"):
            forward(model, tokens[:, :1], cache=cache)
    assert all(np.array_equal(to_numpy(model.weights[name]), x) for name, x in before.items())


def test_tokens_one_by_one_at_any_position():
    model, at = (
        random_model(PLAIN, 1, dtype="float64"),
        [5, 6, 3, 69, 200, 2**31, 70],
    )  # within what is ready, and beyond
    cache = Cache(model, len(at))
    parts = [forward(model, [i], [m], cache) for i, m in enumerate(at)]
    assert close(np.concatenate(parts), forward(model, range(len(at)), at))


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
    assert close(logits, by_definition(config, model.weights, [3, 1, 4, 1]))
    t = {name.removeprefix("layers.1."): x for name, x in trace.items() if name.startswith("layers.1.")}
    assert close(t["output"], trace["layers.0.output"] + t["attention"] + t["mlp"]) and t["q"].shape == (1, 2, 4, 4)
    if kind == "linear":
        rotated = turn(config, config.layers[1], np.arange(4))(definition.elu_plus_one(t["q"]))
        assert close(t["q_rotated"], rotated)
    else:
        heads = definition.softmax(t["scores"]) @ definition.repeat_heads(t["v"], config.heads)
        out = heads.swapaxes(1, 2).reshape(1, 4, -1) @ model.weights["layers.1.out.weight"].T
        assert close(out, t["attention"])
    assert close(forward(model, [3, 1, 4, 1], logits="last"), logits[-1:])
    single = forward(random_model(config, 0), [3, 1, 4, 1])
    assert single.dtype == np.float32 and close(single, logits, 1e-5)


@pytest.mark.parametrize("kind", ["plain", "alibi"])
def test_scores_of_a_trace_hide_other_segments(kind):
    model, packed, alone = random_model(KINDS[kind], 0, dtype="float64"), {}, {}
    forward(model, [3, 1, 4, 1], segments=[0, 0, 1, 1], trace=packed.__setitem__)
    forward(model, [4, 1], trace=alone.__setitem__)
    weights, expected = (definition.softmax(trace["layers.1.scores"]) for trace in (packed, alone))
    assert close(weights[..., 2:, 2:], expected) and not weights[..., 2:, :2].any()


@pytest.mark.parametrize("kind", ["plain", "windows", "alibi", "sinusoidal"])
def test_a_cache_goes_on_with_its_last_segment(xp, kind):
    """Padding is a segment, too. Positions begin anew with each, which sines see."""
    model = random_model(KINDS[kind], 4, xp, "float64")
    first, second = (to_numpy(forward(model, tokens)) for tokens in ([3, 1, 4, 1], [9, 2, 6]))
    cache = Cache(model, 12)
    packed = forward(model, [0, 0, 3, 1, 4, 1, 9], cache=cache, segments=[-1, -1, 5, 5, 5, 5, 7])
    assert close(packed[2:], [*first, second[0]])
    assert close(forward(model, [2, 6], cache=cache), second[1:])
    assert cache.segments[0, :9].tolist() == [-1] * 2 + [5] * 4 + [7] * 3
    assert close(forward(model, [3, 1], cache=cache, segments=[8, 8]), first[:2])


def test_a_call_that_fails_leaves_the_cache_as_it_was():
    model = random_model(PLAIN, 1)
    cache = Cache(model, 9, 2)
    forward(model, [[1, 2], [3, 4]], cache=cache)
    with pytest.raises(ZeroDivisionError):
        forward(model, [[5], [6]], cache=cache, trace=lambda *_: 1 / 0)
    assert cache.used == 2 and close(forward(model, [[5], [6]], cache=cache)[0], forward(model, [1, 2, 5])[-1:], 1e-5)
    for other, tokens, what in (
        (model, [1], "a batch of 2"),
        (random_model(PLAIN, 1), [[1], [2]], "another model: make"),
    ):
        with pytest.raises(ValueError, match=f"the cache was made for {what}"):
            forward(other, tokens, cache=cache)


def test_a_rope_that_depends_on_the_length(monkeypatch):
    rope = Rope(4, 100.0, "half", scaling=DynamicNTK(2.0, 4))
    model = random_model(but(layers=(Layer(rope),)), 0, dtype="float64")
    fixed = {n: random_model(but(layers=(Layer(rope.at(n)),)), 0, dtype="float64") for n in (6, 9)}
    assert np.array_equal(forward(model, range(6)), forward(fixed[6], range(6)))
    assert np.array_equal(forward(model, range(6), cache=Cache(model, 9)), forward(fixed[9], range(6)))
    packed = {"segments": [0, 0, 1], "positions": [0, 1, 8]}  # the longest counts
    assert np.array_equal(forward(model, [1, 2, 3], **packed), forward(fixed[9], [1, 2, 3], **packed))
    made, check = [], Cache.check
    monkeypatch.setattr(Cache, "check", lambda cache, *given: made.append(cache.length) or check(cache, *given))
    assert len(list(generate(model, [1, 2, 3], 6))) == 6 and set(made) == {9}  # the length of all that is to come


def test_nan_is_refused(xp):
    weights = random_model(PLAIN, 0).weights | {"norm.weight": np.full(8, np.nan, np.float32)}
    model = Model(PLAIN, {name: from_numpy(x, xp) for name, x in weights.items()})
    for call in (lambda: list(generate(model, [1], 1)), lambda: forward(model, [1])):
        with pytest.raises(ValueError, match="logits must be finite, and some are"):
            call()


# ── Models ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_how_much_every_option_learns():
    """In two layers of width 8, with 16 rows of q, k and v, an MLP of 6 and 11 tokens. Names are checked with the files."""

    def count(config):
        return sum(math.prod(shape) for shape in weight_shapes(config).values())

    assert count(PLAIN) == 2 * (8 + 16 * 8 + 8 * 8 + 8 + 12 * 8 + 6 * 8) + 11 * 8 + 8 + 11 * 8
    more = {
        "qkv_bias": 2 * 16, "out_bias": 2 * 8, "mlp_bias": 2 * (12 + 8), "norm_bias": 2 * 2 * 8 + 8, "qk_norm": 2 * 2 * 4,
        "post_norms": 2 * 2 * 8, "embedding_norm": 8, "embedding_bias": 8, "head_dense": 64 + 8 + 8, "head_bias": 11, "tied": -88,
    }  # fmt: skip
    assert {name: count(but(**{name: True})) - count(PLAIN) for name in more} == more
    others = {"gated": False}, {"block": "post-norm"}, {"block": "parallel", "one_norm": True}
    assert [count(but(**change)) - count(PLAIN) for change in others] == [-2 * 6 * 8, -8, -2 * 8]


def test_random_models(xp):
    first, second = (to_numpy(random_model(PLAIN, seed, xp).weights["embedding"]) for seed in (0, 1))
    assert np.array_equal(first, random_model(PLAIN, 0).weights["embedding"]) and not np.array_equal(first, second)
    wide = random_model(but(width=400, vocabulary=300), 0).weights
    assert abs(wide["norm.weight"].mean() - 1) < 0.05 and abs(wide["norm.weight"].std() - 0.1) < 0.02
    assert abs(wide["head.weight"].std() * 20 - 1) < 0.1 and abs(wide["embedding"].std() - 0.1) < 0.02


# ── Generation ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_generate_takes_the_likeliest_or_draws_by_the_probabilities():
    model, tokens = random_model(PLAIN, 3, dtype="float64"), [1, 2, 3]
    new = list(generate(model, tokens, 5))
    assert new == [forward(model, tokens + new[:i])[-1].argmax() for i in range(5)]
    assert list(generate(model, tokens, 5, stop=[new[2]])) == new[: new.index(new[2])]
    drawn = [next(generate(model, tokens, 1, 0.5, seed)) for seed in range(400)]
    assert drawn[:9] == [next(generate(model, tokens, 1, 0.5, seed)) for seed in range(9)]
    weights = np.exp(forward(model, tokens)[-1] / 0.5)
    assert abs(np.bincount(drawn, minlength=11) / 400 - weights / weights.sum()).max() < 0.12
    assert next(generate(model, tokens, 1, 1e-300, 1)) == new[0]  # quotients overflow


# ── What is refused ──────────────────────────────────────────────────────────────────────────────────────────────────

MODEL, LINEAR = random_model(PLAIN, 0), random_model(KINDS["linear"], 0)
NONE = (Layer(None),)


def with_weights(**changes):
    """The plain model with other weights; None takes one away."""
    weights = {name: x for name, x in (MODEL.weights | changes).items() if x is not None}
    return lambda: Model(PLAIN, weights)


def passed(tokens, **options):
    return lambda: forward(MODEL, tokens, **options)


def full():
    cache = Cache(MODEL, 3)
    forward(MODEL, [1], [2**31], cache=cache)
    forward(MODEL, [1], cache=cache)


@pytest.mark.parametrize("call, words", [
    (lambda: but(key_heads=3), "key_heads must divide heads, 2, was 3"),
    (lambda: but(head_dim=8), r"ropes must have head_dim 8, as the model, had \[4\]"),
    (lambda: but(attention="linear", layers=(Layer(ROPE, 3),), softcap=2.0), "softcap, windows would have no effect"),
    (lambda: but(attention="linear", encoding="alibi", layers=NONE), "ALiBi would have no effect"),
    (lambda: but(one_norm=True), 'one_norm goes with block "parallel"'),
    (lambda: but(post_norms=True, block="post-norm"), "post_norms go with"),
    (lambda: but(encoding="none"), "with encoding 'none' layers have no rope"),
    (lambda: but(layers=NONE), 'encoding "rope" needs a layer with a rope'),
    (lambda: but(encoding="sinusoidal", layers=NONE, width=7), "width must be even for sines, was 7"),
    (lambda: but(layers=(Layer(Rope(4, 9.0, "half", axes=Axes("axial"))),)), "several axes"),
    (lambda: but(layers=(Layer(ROPE, 0),)), r"layers\[0\].window must be at least 1"),
    (lambda: but(layers=(Layer(3),)), r"layers\[0\].rope must be a Rope"), (lambda: but(layers=[]), "layers must be a tuple"),
    (lambda: but(norm="batch"), "norm must be one of 'rms', 'layer', was 'batch'"), (lambda: but(gated=1), "gated must be True"),
    (lambda: but(width=0), "width must be at least 1"), (lambda: but(eps=-1.0), "eps must be finite and at least 0"),
    (lambda: but(scale=0.0), "scale must be finite and greater than 0"),
    (lambda: PLAIN.with_encoding("rope"), "encoding must be one of 'none', 'sinusoidal', 'alibi', was 'rope'"),
    (with_weights(**{"head.weight": None}), r"missing: head.weight \(11, 8\)"),
    (with_weights(extra=np.ones(8, "f4"), **{"norm.weight": np.ones(3, "f4")}), r"unexpected: extra \(8,\); norm.weight has shape \(3,\), not \(8,\)"),
    (with_weights(embedding=np.ones((11, 8))), "all be float32 or all float64"), (with_weights(embedding=[1.0]), "embedding must be a NumPy or CuPy array"),
    (lambda: Model(PLAIN, {}), r"do not fit the config: missing: embedding \(11, 8\); missing: layers.0"),
    (lambda: Model(PLAIN, {name: x.astype(np.float16) for name, x in MODEL.weights.items()}), "were float16"),
    (lambda: random_model(PLAIN, 0, dtype="float16"), "dtype must be one of 'float32', 'float64', was 'float16'"),
    (passed([11]), "0 … 10, were from 11 to 11"), (passed([-1]), "from -1"), (passed([]), "at least one token"),
    (passed([[[1]]]), "shape"), (passed([1.5]), "tokens must be integers"), (passed([True]), "tokens must be integers"),
    (passed([1, 2], positions=[1, 2, 3]), r"positions must have shape \(2,\) or \(1, 2\)"), (passed([1], positions=[2**31 + 1]), "2.31"),
    (passed([1], logits="first"), "logits must be one of"), (passed([1], cache=3), "cache must be a Cache"),
    (passed([1, 2, 3], segments=[0, 1, 0]), "one segment goes on after another"),
    (lambda: forward(LINEAR, [1, 2], segments=[0, 1]), "linear attention has no scores to mask"),
    (lambda: Cache(random_model(but(causal=False), 0), 3), "needs a causal model"), (lambda: Cache(MODEL, 0), "length must be at least 1"),
    (lambda: Cache(MODEL, 10**18), r"length must be at most 2\^31"),
    (full, r"within ±2\^31, the last would be 2147483649"),
    (lambda: generate(MODEL, [1], 3, -1), "temperature must be finite"), (lambda: generate(MODEL, [1], 3, seed=-1), "seed must be at"),
    (lambda: generate(MODEL, [1], 0), "max_new_tokens must be at least 1"), (lambda: generate(MODEL, [1], 3, stop=[-1]), "a token of stop must be"),
    (lambda: generate(MODEL, [[1]], 3), "tokens must be one sequence"),
])  # fmt: skip
def test_what_is_refused(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call()


def test_what_is_nearly_refused():
    weights = dict(MODEL.weights)
    model = Model(PLAIN, weights)
    del weights["embedding"]
    assert "embedding" in model.weights and forward(LINEAR, [1, 2], segments=[3, 3]).shape == (2, 11)
