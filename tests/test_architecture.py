"""What a model is and has learnt: every rule of `Config` and `Weights`, and what their errors say."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from models import PLAIN, configs

from pyrope import Axes, Cache, Rope, checks, forward, from_numpy, generate, to_numpy
from pyrope.models.architecture import Config, Layer, Model, Weights, check_dtype, random_model, weight_shapes

ROPE = PLAIN.layers[0].rope


def _but(**options):
    return dataclasses.replace(PLAIN, **options)


# --- Config ---

WRONG = [
    *[({name: 0}, ValueError, f"{name} must be at least 1, was 0")
      for name in ("vocabulary", "width", "heads", "key_heads", "head_dim", "mlp_width")],
    *[({name: 2.0}, TypeError, f"{name} must be an integer, was 2.0")
      for name in ("vocabulary", "width", "heads", "key_heads", "head_dim", "mlp_width")],
    ({"vocabulary": True}, TypeError, "vocabulary must be an integer, was True"),
    ({"norm": "batch"}, ValueError, "norm must be one of 'rms', 'layer', was 'batch'"),
    ({"activation": "selu"}, ValueError, "activation must be one of 'gelu', 'gelu_tanh', 'silu', 'relu', was 'selu'"),
    ({"block": "serial"}, ValueError, "block must be one of 'sequential', 'parallel', 'post-norm', was 'serial'"),
    ({"encoding": "t5"}, ValueError, "encoding must be one of 'rope', 'none', 'sinusoidal', 'alibi', was 't5'"),
    ({"attention": None}, ValueError, "attention must be one of 'softmax', 'linear', was None"),
    ({"feature_map": "tanh"}, ValueError, "feature_map must be one of 'elu.1', .*, was 'tanh'"),
    *[({name: 1}, TypeError, f"{name} must be True or False, was 1")
      for name in ("gated", "causal", "tied", "norm_bias", "qkv_bias", "out_bias", "mlp_bias", "head_bias", "qk_norm",
                   "post_norms", "one_norm", "embedding_norm", "embedding_bias", "head_dense")],
    *[({name: bad}, ValueError, f"{name} must be finite and greater than 0, was {bad}")
      for name in ("scale", "softcap", "logit_softcap", "logit_scale", "embedding_scale")
      for bad in (0, -1.0, math.inf, math.nan)],
    ({"scale": "1"}, TypeError, "scale must be a number, was '1'"),
    ({"eps": -1e-9}, ValueError, "eps must be finite and at least 0, was -1e-09"),
    ({"eps": None}, TypeError, "eps must be a number, was None"),
    ({"heads": 3, "key_heads": 2}, ValueError, "key_heads must divide heads, 3, was 2"),
    ({"one_norm": True}, ValueError, 'one_norm goes with block "parallel", was \'sequential\''),
    ({"post_norms": True, "block": "post-norm"}, ValueError, 'post_norms go with the blocks "sequential" and "parallel"'),
    ({"layers": ()}, TypeError, r"layers must be a tuple of one Layer at least, was \(\)"),
    ({"layers": [Layer(ROPE)]}, TypeError, "layers must be a tuple of one Layer at least"),
    ({"layers": (ROPE,)}, TypeError, "layers must be a tuple of one Layer at least"),
    ({"layers": (Layer(ROPE), Layer("half"))}, TypeError, r"layers\[1\].rope must be a Rope or None, was str"),
    ({"layers": (Layer(Rope(6, 10000.0, "half")),)}, ValueError, r"layers\[0\].rope has head_dim 6, the model 4"),
    ({"layers": (Layer(Rope(4, 10000.0, "half", axes=Axes("axial"))),)}, ValueError,
     r"layers\[0\].rope has several axes of positions, a model of text has one"),
    ({"layers": (Layer(ROPE), Layer(ROPE, 0))}, ValueError, r"layers\[1\].window must be at least 1, was 0"),
    ({"layers": (Layer(ROPE, 2.5),)}, TypeError, r"layers\[0\].window must be an integer, was 2.5"),
    *[({"encoding": name}, ValueError, f"with encoding '{name}' layers have no rope: use with_encoding")
      for name in ("none", "sinusoidal", "alibi")],
    ({"layers": (Layer(None),)}, ValueError, 'encoding "rope" needs a layer with a rope, none has one'),
    ({"layers": (Layer(None),), "encoding": "sinusoidal", "width": 7}, ValueError, "width must be even .*, was 7"),
    ({"attention": "linear", "scale": 1.0}, ValueError, "linear attention has no scores, so that scale would have no"),
    ({"attention": "linear", "softcap": 1.0, "layers": (Layer(ROPE, 3),)}, ValueError, "so that softcap, windows would"),
    ({"attention": "linear", "encoding": "alibi", "layers": (Layer(None),)}, ValueError, "so that ALiBi would have no"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "says"), WRONG, ids=lambda x: str(x)[:40] if isinstance(x, dict) else "")
def test_config_says_what_is_wrong(options, error, says):
    with pytest.raises(error, match=says):
        _but(**options)


def test_config_takes_every_option_that_goes_together():
    for options in (
        {"eps": 0}, {"block": "parallel", "one_norm": True, "post_norms": True}, {"heads": 6, "key_heads": 3},
        {"layers": (Layer(ROPE, 1), Layer(None))}, {"width": 7}, {"scale": 2}, {"vocabulary": np.int64(5)},
    ):  # fmt: skip
        assert _but(**options) == _but(**options) != PLAIN


def test_config_has_no_silent_numbers():
    """Only options that are off, and what is said by a word, have defaults."""
    defaults = {f.name: f.default for f in dataclasses.fields(Config) if f.default is not dataclasses.MISSING}
    words = {"encoding": "rope", "attention": "softmax", "feature_map": "elu+1"}
    assert {name: value for name, value in defaults.items() if value not in (None, False)} == words


def test_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAIN.heads = 4


@pytest.mark.parametrize("encoding", ["none", "sinusoidal", "alibi"])
def test_with_encoding_takes_the_ropes_away_and_nothing_else(encoding):
    config = _but(layers=(Layer(ROPE, 3), Layer(ROPE)), softcap=2.0)
    other = config.with_encoding(encoding)
    assert other.encoding == encoding and other.layers == (Layer(None, 3), Layer(None))
    assert dataclasses.replace(other, encoding="rope", layers=config.layers) == config


@pytest.mark.parametrize("encoding", ["rope", "learned", None])
def test_with_encoding_cannot_bring_a_rope_back(encoding):
    with pytest.raises(ValueError, match=f"encoding must be one of 'none', 'sinusoidal', 'alibi', was {encoding!r}"):
        PLAIN.with_encoding(encoding)


# --- Weights ---


def _arrays(config, dtype=np.float32):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in weight_shapes(config).items()}


def test_weight_shapes_of_a_plain_model():
    layer = {
        "attention_norm.weight": (8,), "qkv.weight": (16, 8), "out.weight": (8, 8), "mlp_norm.weight": (8,),
        "up.weight": (12, 8), "down.weight": (8, 6),
    }  # fmt: skip
    expected = {"embedding": (11, 8), "norm.weight": (8,), "head.weight": (11, 8)}
    assert weight_shapes(PLAIN) == expected | {f"layers.{i}.{name}": s for i in (0, 1) for name, s in layer.items()}


MORE = {  # what an option adds to the weights of one layer, or takes away
    "tied": ({}, {"head.weight"}),
    "norm_bias": ({"layers.0.attention_norm.bias": (8,), "layers.0.mlp_norm.bias": (8,), "norm.bias": (8,)}, set()),
    "qkv_bias": ({"layers.0.qkv.bias": (16,)}, set()),
    "out_bias": ({"layers.0.out.bias": (8,)}, set()),
    "mlp_bias": ({"layers.0.up.bias": (12,), "layers.0.down.bias": (8,)}, set()),
    "head_bias": ({"head.bias": (11,)}, set()),
    "qk_norm": ({"layers.0.q_norm.weight": (4,), "layers.0.k_norm.weight": (4,)}, set()),
    "post_norms": ({"layers.0.attention_post_norm.weight": (8,), "layers.0.mlp_post_norm.weight": (8,)}, set()),
    "embedding_norm": ({"embedding_norm.weight": (8,)}, set()),
    "embedding_bias": ({"embedding_bias": (8,)}, set()),
    "head_dense": ({"head_dense.weight": (8, 8), "head_dense.bias": (8,), "head_norm.weight": (8,)}, set()),
}


@pytest.mark.parametrize("option", MORE)
def test_weight_shapes_by_option(option):
    one = _but(layers=(Layer(ROPE),))
    before, after = weight_shapes(one), weight_shapes(dataclasses.replace(one, **{option: True}))
    added, gone = MORE[option]
    assert after == {name: shape for name, shape in before.items() if name not in gone} | added


def test_weight_shapes_by_block_and_gate():
    one = _but(layers=(Layer(ROPE),))
    before = weight_shapes(one)
    after = weight_shapes(dataclasses.replace(one, block="parallel", one_norm=True))
    assert set(before) - set(after) == {"layers.0.mlp_norm.weight"} and set(after) < set(before)
    after = weight_shapes(dataclasses.replace(one, block="post-norm"))
    assert set(before) - set(after) == {"norm.weight"} and set(after) < set(before)
    after = weight_shapes(dataclasses.replace(one, gated=False))
    assert after == before | {"layers.0.up.weight": (6, 8)}
    # Four query heads of 4 read two of keys and two of values.
    after = weight_shapes(dataclasses.replace(one, heads=4, key_heads=2))
    assert after == before | {"layers.0.qkv.weight": (32, 8), "layers.0.out.weight": (8, 16)}


@given(config=configs())
def test_weights_hold_every_array_where_its_name_says(config):
    arrays = _arrays(config, np.float64)
    weights = Weights.of(config, arrays)
    assert len(weights.layers) == len(config.layers)
    collected = {}

    def collect(name, value):
        if isinstance(value, np.ndarray):
            collected[name] = value
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            for field in value._fields:
                collect(f"{name}.{field}", getattr(value, field))
        elif isinstance(value, tuple):
            for i, layer in enumerate(value):
                for field in dataclasses.fields(layer):
                    collect(f"{name}.{i}.{field.name}", getattr(layer, field.name))

    for field in dataclasses.fields(weights):
        collect(field.name, getattr(weights, field.name))
    if config.tied:
        assert collected.pop("head.weight") is weights.embedding
    assert collected.keys() == arrays.keys()
    assert all(collected[name] is array for name, array in arrays.items())


def test_all_that_is_wrong_with_weights_is_said_at_once():
    arrays = _arrays(PLAIN)
    del arrays["layers.1.qkv.weight"]
    arrays["norm.weight"] = None
    arrays |= {"layers.0.qkv.bias": np.zeros(16, "f4"), "extra": np.zeros(1, "f4")}
    arrays["layers.0.down.weight"] = np.zeros((6, 8), "f4")
    with pytest.raises(ValueError, match="weights do not fit the config: ") as caught:
        Weights.of(PLAIN, arrays)
    assert str(caught.value).partition(": ")[2].split("; ") == [
        "layers.1.qkv.weight is missing, (16, 8)",
        "norm.weight is missing, (8,)",
        "layers.0.qkv.bias is unexpected",
        "extra is unexpected",
        "layers.0.down.weight has shape (6, 8), not (8, 6)",
    ]


def test_a_tied_model_has_no_head_of_its_own():
    with pytest.raises(ValueError, match="head.weight is unexpected"):
        Weights.of(_but(tied=True), _arrays(PLAIN))


@pytest.mark.parametrize(
    ("kind", "says"),
    [("f2", "were float16, float32"), ("f8", "were float32, float64"), ("i4", "were float32, int32"), (">f4", "were >f4, float32")],
)  # fmt: skip
def test_weights_of_several_dtypes_are_refused(kind, says):
    arrays = _arrays(PLAIN)
    arrays["norm.weight"] = arrays["norm.weight"].astype(kind)
    with pytest.raises(TypeError, match=f"weights must all be float32 or all float64, {says}"):
        Weights.of(PLAIN, arrays)


def test_weights_of_one_wrong_dtype_are_refused():
    with pytest.raises(TypeError, match="weights must all be float32 or all float64, were float16"):
        Weights.of(PLAIN, _arrays(PLAIN, np.float16))


def test_weights_belong_to_a_config():
    with pytest.raises(TypeError, match="config must be a Config, was dict"):
        Weights.of({"vocabulary": 5}, {})


def test_weights_must_be_arrays_of_one_library(xp):
    arrays = _arrays(PLAIN)
    with pytest.raises(TypeError, match="norm.weight must be a NumPy or CuPy array, was list"):
        Weights.of(PLAIN, arrays | {"norm.weight": [1.0] * 8})
    with pytest.raises(ValueError, match="embedding is missing"):
        Weights.of(PLAIN, {})
    if xp is not np:
        with pytest.raises(TypeError, match="arrays of different libraries: .*norm.weight is a cupy array"):
            Weights.of(PLAIN, arrays | {"norm.weight": from_numpy(arrays["norm.weight"], xp)})


# --- Model ---


@given(config=configs(), dtype=st.sampled_from(["float32", "float64"]), seed=st.integers(0, 9))
def test_random_models_are_of_the_asked_kind_and_reproducible(xp, config, dtype, seed):
    model, again, other = (random_model(config, s, xp, dtype) for s in (seed, seed, seed + 1))
    assert model.config == config and model.weights.embedding.dtype == dtype
    assert type(model.weights.embedding) is type(from_numpy(np.zeros(1), xp))
    one, two, three = (to_numpy(m.weights.layers[0].up.weight) for m in (model, again, other))
    assert np.array_equal(one, two) and not np.array_equal(one, three)


def test_random_norms_are_near_one_and_the_rest_near_zero():
    model = random_model(_but(width=400, norm_bias=True, qkv_bias=True), 0)
    layer = model.weights.layers[0]
    assert abs(layer.attention_norm.weight.mean() - 1) < 0.03 and abs(layer.attention_norm.bias.mean()) < 0.03
    assert abs(layer.qkv.weight.std() * 20 - 1) < 0.05  # 1/√width
    assert abs(layer.qkv.bias.mean()) < 0.1 and abs(model.weights.embedding.std() - 0.1) < 0.01


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "f4", None, np.float32])
def test_models_are_computed_in_float32_or_float64(dtype):
    for refuse in (check_dtype, lambda name: random_model(PLAIN, 0, dtype=name)):
        with pytest.raises(ValueError, match="dtype must be one of 'float32', 'float64', was"):
            refuse(dtype)


def test_backends_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match='backend must be "numpy" or "cupy", was \'jax\''):
        random_model(PLAIN, 0, "jax")


@pytest.mark.parametrize("bad", [None, PLAIN, "llama"])
def test_what_is_no_model_is_refused(bad):
    for use in (lambda: forward(bad, [1]), lambda: Cache(bad, 3), lambda: generate(bad, [1], 1)):
        with pytest.raises(TypeError, match=f"model must be a Model, was {type(bad).__name__}"):
            use()
    model = random_model(PLAIN, 0)
    assert checks.instance("model", model, Model) is model


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"qk_norm": True}, "layers.0.q_norm.weight is missing"),
        ({"gated": False}, "layers.0.up.weight has shape"),
        ({"tied": True}, "head.weight is unexpected"),
        ({"vocabulary": 3}, "embedding has shape"),
        ({"post_norms": True}, "layers.1.mlp_post_norm.weight is missing"),
    ],
)
def test_a_model_is_a_config_and_weights_that_fit(changes, said):
    model = random_model(PLAIN, 0)
    assert Model(dataclasses.replace(PLAIN, causal=not PLAIN.causal), model.weights).weights is model.weights
    with pytest.raises(ValueError, match=said):
        Model(dataclasses.replace(PLAIN, **changes), model.weights)
    for layers in (PLAIN.layers * 2, PLAIN.layers[:1]):
        with pytest.raises(ValueError, match="is missing|is unexpected"):
            Model(dataclasses.replace(PLAIN, layers=layers), model.weights)
    with pytest.raises(TypeError, match="a Model is made of a Config and Weights, not of NoneType and NoneType"):
        Model(None, None)
