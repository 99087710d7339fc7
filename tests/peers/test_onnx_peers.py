"""The node tests of ONNX's RotaryEmbedding and Attention, by the engine and by the definition."""

import collections
import warnings

import numpy as np
import onnx
import pytest
from onnx.backend.test.case import node as shared
from onnx.backend.test.case.node import rotaryembedding  # noqa: F401

import pyrope
from pyrope import Rope, definition
from pyrope.rotation import Tables

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


def joined(y, shape):
    """The way back, where the result has three axes."""
    return y if len(shape) == 4 else y.swapaxes(1, 2).reshape(shape)


def test_every_case_is_covered():
    opsets = collections.Counter(CASES[name].model.opset_import[0].version for name in ATTENTIONS)
    assert opsets == {23: 69, 24: 13, 25: 11} and len(ROTATIONS) == 8


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotation(name):
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
        assert y.dtype == expected.dtype == np.float32
        np.testing.assert_allclose(joined(y, expected.shape), expected, rtol=0, atol=8 * 2.0**-24)


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
def test_attention(name):
    attributes, given, outputs = read(name)
    q, k, v, options = arguments(attributes, given)
    y, expected = pyrope.attention(q, k, v, **options), outputs["Y"]
    rtol, atol = TOLERANCE[expected.dtype.name]
    assert y.dtype == expected.dtype
    y, expected = (x.astype(np.float64) for x in (joined(y, expected.shape), expected))
    np.testing.assert_allclose(y, expected, rtol=rtol, atol=atol)
