"""Functions of arrays, of the engine and of the definition, against other people's: the node tests of ONNX's
RotaryEmbedding and Attention, torch's attention, norms and activations, transformers' rotations, T5 and ALiBi."""

import collections
import warnings

import numpy as np
import onnx
import pytest
import references
import torch
from onnx.backend.test.case import node as shared
from onnx.backend.test.case.node import rotaryembedding  # noqa: F401
from torch.nn import functional
from transformers.models.bloom import modeling_bloom
from transformers.models.glm4 import modeling_glm4
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.t5 import modeling_t5

import pyrope
from pyrope import Rope, definition, encodings
from pyrope.layers import Norm
from pyrope.model import Config, Layer
from pyrope.rotation import Tables

# ── ONNX ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the generators of other operators warn while they are imported
    COLLECTED = shared.collect_testcases("Attention")  # a list that has the cases of imported modules, too
# The second copy of a case is the node expanded into a graph of other operators, with the same inputs and outputs.
CASES = {case.name.removeprefix("test_"): case for case in COLLECTED if not case.name.endswith("_expanded")}
ROTATIONS = [name for name in CASES if name.startswith("rotary")]
ATTENTIONS = [name for name in CASES if name.startswith("attention")]
# The result is rounded to the dtype once here and after every step there.
TOLERANCE = {"float32": (1e-4, 1e-6), "float16": (4e-3, 1e-3), "bfloat16": (3e-2, 1e-2)}


def read(name):
    """Attributes, inputs and outputs of a case, by name."""
    case = CASES[name]
    (node,) = case.model.graph.node
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    inputs, outputs = case.data_sets[0]
    given = dict(zip([name for name in node.input if name], inputs, strict=True))
    return attributes, given, dict(zip([name for name in node.output if name], outputs, strict=True))


def heads(x, count):
    """(b, n, h·d) as (b, h, n, d)."""
    return x if count is None else x.reshape(*x.shape[:2], count, -1).swapaxes(1, 2)


def assert_same(ours, theirs):
    rtol, atol = TOLERANCE[theirs.dtype.name]
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    np.testing.assert_allclose(ours.astype(np.float64), theirs.astype(np.float64), rtol=rtol, atol=atol)


def test_every_case_of_onnx_is_covered():
    opsets = collections.Counter(CASES[name].model.opset_import[0].version for name in ATTENTIONS)
    assert opsets == {23: 69, 24: 13, 25: 11} and len(ROTATIONS) == 8


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations_of_onnx(name):
    """Their tables are random numbers below 1, no cosines at all: two roundings of products and one of a sum on either
    side. They go where `pyrope.rotation_tables` puts its own."""
    attributes, given, outputs = read(name)
    x, cos, sin, *ids = given.values()
    (expected,) = outputs.values()
    x = heads(x, attributes.get("num_heads"))
    cos, sin = (t[ids[0]] if ids else t for t in (cos, sin))
    layout = "interleaved" if attributes.get("interleaved") else "half"
    rope = Rope(x.shape[-1], 10000.0, layout, attributes.get("rotary_embedding_dim") or None)
    at = ids[0] if ids else np.broadcast_to(np.arange(x.shape[2]), (len(x), x.shape[2]))
    half = (np.concatenate((cos, cos), -1), np.concatenate((-sin, sin), -1))
    tables = Tables(rope, at, *(half if layout == "half" else (cos + 1j * sin, None)))
    turn = (cos[:, None], sin[:, None], *definition.pairs(layout, rope.width))
    for y in (
        pyrope.rotate(x, at, rope, tables=tables),
        definition.rotate(x, *turn),
        definition.rotate_complex(x, *turn),
    ):
        y = y.swapaxes(1, 2).reshape(expected.shape) if "num_heads" in attributes else y
        assert y.dtype == expected.dtype == np.float32
        np.testing.assert_allclose(y, expected, rtol=0, atol=8 * 2.0**-24)


def arguments(attributes, given):
    """q, k, v and the options of `attention` that say what a node says."""
    q = heads(given["Q"], attributes.get("q_num_heads"))
    k, v = (heads(given[name], attributes.get("kv_num_heads")) for name in "KV")
    past = 0
    if "past_key" in given:
        past = given["past_key"].shape[2]
        k, v = (np.concatenate((given[p], x), axis=2) for p, x in (("past_key", k), ("past_value", v)))
    (b, _, n, _), m = q.shape, k.shape[2]
    options = {"causal": bool(attributes.get("is_causal", 0)), "q_positions": past + np.arange(n)}
    seen, added = np.True_, None
    if "nonpad_kv_seqlen" in given:  # a cache whose first keys are in use; queries are the last of those
        used = given["nonpad_kv_seqlen"].reshape(b, 1)
        options["q_positions"] = used - n + np.arange(n)
        seen = (np.arange(m) < used)[:, None, None, :]
    left, right = attributes.get("left_window_size", -1), attributes.get("right_window_size", -1)
    if options["causal"] and left >= 0:
        options["window"] = left + 1
    elif left >= 0 or right >= 0:  # two sides of different widths: a mask
        away = options["q_positions"][..., :, None] - np.arange(m)
        seen = seen & (away <= left) & (-away <= right)
    if "attn_mask" in given:
        mask = given["attn_mask"]
        hidden = False if mask.dtype == bool else -np.inf
        mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, m - mask.shape[-1])], constant_values=hidden)
        seen, added = (seen & mask, None) if mask.dtype == bool else (seen, mask)
    if added is not None:
        options["mask"] = np.where(seen, added, added.dtype.type(-np.inf))
    elif seen.ndim:
        options["mask"] = seen
    return q, k, v, options | {name: attributes[name] for name in ("scale", "softcap") if attributes.get(name)}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_of_onnx(name):
    attributes, given, outputs = read(name)
    q, k, v, options = arguments(attributes, given)
    y = pyrope.attention(q, k, v, **options)
    assert_same(y.swapaxes(1, 2).reshape(outputs["Y"].shape) if "q_num_heads" in attributes else y, outputs["Y"])
    if "qk_matmul_output" in outputs:
        assert_scores(q, k, options, outputs["qk_matmul_output"], attributes.get("qk_matmul_output_mode", 0))


def assert_scores(q, k, options, scores, mode):
    """With the identity as values attention returns its weights, whose logarithm is the scores up to one number for
    each row. The mode of a node says after which step it returns them: raw, soft capped, masked, softmax."""
    dropped = {0: ("mask", "softcap"), 1: ("mask",), 2: (), 3: ()}[mode]
    options = {key: value for key, value in options.items() if key not in dropped}
    options["causal"] = options["causal"] and mode > 1
    weights = pyrope.attention(
        q, k, np.broadcast_to(np.eye(k.shape[2], dtype=k.dtype), (*k.shape[:3], k.shape[2])), **options
    )
    if mode == 3:
        assert_same(weights, scores)
        return
    visible = weights > 0
    assert (visible != np.isneginf(scores)).all()
    logs = np.log(weights, where=visible, out=np.zeros_like(weights))
    gap = np.where(visible, logs - np.where(visible, scores, 0), np.nan)
    assert (np.nanmax(gap, axis=-1) - np.nanmin(gap, axis=-1) <= 2e-5).all()


# ── torch ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def lower(n, m, window=None):
    """What queries see that are the last of the keys."""
    away = np.arange(m - n, m)[:, None] - np.arange(m)
    return (away >= 0) & (away < (window or m + 1))


def near(n, m, window):
    return abs(np.arange(m - n, m)[:, None] - np.arange(m)) < window


def random_mask(n, m):
    """Every query sees the first key."""
    return (np.random.default_rng(7).random((2, 1, n, m)) < 0.7) | (np.arange(m) == 0)


# Options of ours, and the mask of torch's that means the same, from (n, m); the softcap is made from the scores.
OPTIONS = {
    "plain": ({}, lambda n, m: None),
    "causal": ({"causal": True}, lower),
    "window": ({"causal": True, "window": 100}, lambda n, m: lower(n, m, 100)),
    "two-sided window": ({"window": 3}, lambda n, m: near(n, m, 3)),
    "mask": ({"mask": "mask"}, random_mask),
    "bias": ({"mask": "mask"}, lambda n, m: np.random.default_rng(7).standard_normal((2, 1, n, m))),
    "scale": ({"scale": 0.3}, lambda n, m: None),
    "softcap": ({"softcap": 2.0}, lambda n, m: None),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype, limit", [("float32", 2e-6), ("float64", 1e-14), ("float16", 2e-3)])
@pytest.mark.parametrize(
    "n, m, h, g", [(1, 1, 2, 2), (7, 7, 4, 2), (129, 129, 6, 3), (5, 300, 4, 1), (200, 1024, 2, 2)]
)
def test_attention_of_torch(n, m, h, g, dtype, limit, name):
    """By the engine, in tiles where the keys are many, and by the definition."""
    rng = np.random.default_rng(n)
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in ((2, h, n, 16), (2, g, m, 16), (2, g, m, 12)))
    ours, made = OPTIONS[name]
    mask = made(n, m)
    given = None if mask is None else mask if mask.dtype == bool else mask.astype(dtype)
    ours = ours | ({"mask": given} if "mask" in ours else {})
    theirs = {"attn_mask": None if given is None else torch.from_numpy(given), "scale": ours.get("scale")}
    q_, k_, v_ = (torch.from_numpy(x) for x in (q, k, v))
    if name == "softcap":
        s = torch.einsum("bhnd,bhmd->bhnm", q_.double(), k_.double().repeat_interleave(h // g, 1)) / 4
        theirs["attn_mask"] = (2 * torch.tanh(s / 2) - s).to(q_.dtype)
    expected = functional.scaled_dot_product_attention(q_, k_, v_, enable_gqa=True, **theirs).numpy()
    np.testing.assert_allclose(pyrope.attention(q, k, v, **ours), expected, rtol=5 * limit, atol=limit)
    if dtype == "float64":
        np.testing.assert_allclose(references.attention(q, k, v, **ours)[0], expected, rtol=0, atol=limit)


def test_norms_of_torch():
    x, weight, bias = (np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate([(3, 4, 10), 10, 10]))
    given = [torch.from_numpy(t) for t in (x, weight, bias)]
    common = {"activation": "relu", "gated": False, "block": "sequential", "causal": True, "encoding": "none"}
    rms, layer = (Config(2, 2, 1, 1, 2, 1, (Layer(None),), norm=norm, eps=0.01, **common) for norm in ("rms", "layer"))
    theirs = functional.layer_norm(given[0], (10,), *given[1:], eps=0.01).numpy()
    np.testing.assert_allclose(definition.norm(layer, Norm(weight, bias), x), theirs, rtol=0, atol=1e-14)
    theirs = functional.rms_norm(given[0], (10,), given[1], eps=0.01).numpy()
    np.testing.assert_allclose(definition.norm(rms, Norm(weight, None), x), theirs, rtol=0, atol=1e-14)


FUNCTIONS = [
    (definition.ACTIVATIONS["relu"], functional.relu),
    (definition.ACTIVATIONS["silu"], functional.silu),
    (definition.ACTIVATIONS["gelu"], functional.gelu),
    (definition.ACTIVATIONS["gelu_tanh"], lambda x: functional.gelu(x, approximate="tanh")),
    (definition.FEATURE_MAPS["elu+1"], lambda x: functional.elu(x) + 1),
    (definition.FEATURE_MAPS["relu2"], lambda x: functional.relu(x) ** 2),
]


@pytest.mark.parametrize("ours, theirs", FUNCTIONS)
def test_functions_of_torch(ours, theirs):
    x = np.linspace(-30, 30, 1201)
    np.testing.assert_allclose(ours(x), theirs(torch.from_numpy(x)).numpy(), rtol=1e-15, atol=1e-14)


# ── transformers ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout, r", [("half", 16), ("half", 8), ("interleaved", 16), ("interleaved", 8)])
def test_rotations_of_transformers(layout, r):
    """In float64 with the same tables; r < 16 is a part of a head. GPT-J takes each column once, the others twice."""
    q = np.random.default_rng(1).standard_normal((2, 3, 5, 16))
    cos, sin = definition.tables(np.arange(10).reshape(2, 5), definition.frequencies(r, 500.0))
    ours = definition.rotate(q, cos[:, None], sin[:, None], *definition.pairs(layout, r))
    x, cos, sin = (torch.from_numpy(t) for t in (q, cos, sin))
    doubled = [torch.cat((t, t), -1) for t in (cos, sin)]
    if layout == "half":
        theirs = [modeling_gpt_neox.apply_rotary_pos_emb(x, x, *doubled)[0]]
        if r == 16:  # Llama rotates whole heads
            theirs.append(modeling_llama.apply_rotary_pos_emb(x, x, *doubled)[0])
    else:
        turned = modeling_gptj.apply_rotary_pos_emb(x[..., :r].transpose(1, 2), sin, cos).transpose(1, 2)
        theirs = [torch.cat((turned, x[..., r:]), -1), modeling_glm4.apply_rotary_pos_emb(x, x, *doubled)[0]]
    for y in theirs:
        np.testing.assert_allclose(ours, y.numpy(), rtol=0, atol=1e-15 * abs(q).max() * 4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("buckets, max_distance", [(32, 128), (32, 256), (64, 128), (16, 64), (20, 100)])
def test_buckets_of_t5(causal, buckets, max_distance):
    distances = np.arange(-3000, 3001)
    options = {"num_buckets": buckets, "max_distance": max_distance, "bidirectional": not causal}
    theirs = modeling_t5.T5Attention._relative_position_bucket(torch.tensor(distances), **options)
    ours = encodings.t5_buckets(distances, causal=causal, buckets=buckets, max_distance=max_distance)
    assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("h", [1, 2, 3, 5, 8, 12, 16, 25, 64, 112])
def test_alibi_of_bloom(h):
    """Theirs is slope·j, which in a softmax is the same as −slope·(i − j): the two differ by a constant of the row."""
    theirs = modeling_bloom.build_alibi_tensor(torch.ones(1, 9), h, torch.float32).reshape(h, 1, 9).double().numpy()
    ours = encodings.alibi_bias(h, [8], range(9))
    np.testing.assert_allclose(ours - ours[..., :1], theirs, rtol=1e-6)
