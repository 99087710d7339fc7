"""Softmax attention against other people's: ONNX's node cases of Attention 23, 24 and 25, and torch."""

import collections
import warnings

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import pyrope

onnx = pytest.importorskip("onnx")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ONNX's generators of other operators warn while they are imported
    from onnx.backend.test.case.node import collect_testcases

    CASES = {case.name.removeprefix("test_attention_"): case for case in collect_testcases("Attention")}

# Left out: the second copy of every case, in which the node is expanded into a graph of other operators. Inputs and
# outputs are those of the case itself. No case needs a quantised or string type: nothing else is left out.
EXPANDED = {name for name in CASES if name.endswith("_expanded")}
NODES = sorted(set(CASES) - EXPANDED)
# The result is rounded to the dtype once here and after every step there.
TOLERANCE = {"float32": (1e-4, 1e-6), "float16": (4e-3, 1e-3), "bfloat16": (3e-2, 1e-2)}


def _read(case):
    """Attributes, inputs and outputs of a case, by name."""
    (node,) = case.model.graph.node
    (inputs, outputs), attributes = (
        case.data_sets[0],
        {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute},
    )
    given = dict(zip([name for name in node.input if name], inputs, strict=True))
    return attributes, given, dict(zip([name for name in node.output if name], outputs, strict=True))


def _heads(x, count):
    """(b, n, h·d) as (b, h, n, d)."""
    return x if count is None else x.reshape(*x.shape[:2], count, -1).swapaxes(1, 2)


def _arguments(attributes, given):
    """q, k, v and the options of `attention` that say what a node says."""
    q = _heads(given["Q"], attributes.get("q_num_heads"))
    k, v = (_heads(given[name], attributes.get("kv_num_heads")) for name in "KV")
    past = 0
    if "past_key" in given:
        past = given["past_key"].shape[2]
        k, v = (np.concatenate((given[p], x), axis=2) for p, x in (("past_key", k), ("past_value", v)))
    (b, _, n, _), m = q.shape, k.shape[2]
    options = {"causal": bool(attributes.get("is_causal", 0)), "q_positions": past + np.arange(n)}
    masks = []
    if "nonpad_kv_seqlen" in given:  # a cache whose first keys are in use; queries are the last of those
        used = given["nonpad_kv_seqlen"].reshape(b, 1)
        options["q_positions"] = used - n + np.arange(n)
        masks.append((np.arange(m) < used)[:, None, None, :])
    left, right = attributes.get("left_window_size", -1), attributes.get("right_window_size", -1)
    if options["causal"] and left >= 0:
        options["window"] = left + 1
    elif left >= 0 or right >= 0:  # two sides of different widths: a mask
        away = options["q_positions"][..., :, None] - np.arange(m)
        masks.append((away <= left) & (-away <= right))
    if "attn_mask" in given:
        mask = given["attn_mask"]
        hidden = False if mask.dtype == bool else -np.inf
        missing = [(0, 0)] * (mask.ndim - 1) + [(0, m - mask.shape[-1])]
        masks.append(np.pad(mask, missing, constant_values=hidden))
    if len(masks) == 2 and masks[1].dtype != bool:
        masks = [np.where(masks[0], masks[1], masks[1].dtype.type(-np.inf))]
    elif len(masks) == 2:
        masks = [masks[0] & masks[1]]
    options |= {"mask": masks[0]} if masks else {}
    options |= {name: attributes[name] for name in ("scale", "softcap") if attributes.get(name)}
    return q, k, v, options


def _same(ours, theirs):
    rtol, atol = TOLERANCE[theirs.dtype.name]
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    np.testing.assert_allclose(ours.astype(np.float64), theirs.astype(np.float64), rtol=rtol, atol=atol)


def test_every_case_is_covered():
    opsets = collections.Counter(CASES[name].model.opset_import[0].version for name in NODES)
    assert opsets == {23: 69, 24: 13, 25: 11} and len(NODES) == 93
    assert len(EXPANDED) == 93 and {name.removesuffix("_expanded") for name in EXPANDED} == set(NODES)


@pytest.mark.parametrize("name", NODES)
def test_onnx(name):
    attributes, given, outputs = _read(CASES[name])
    q, k, v, options = _arguments(attributes, given)
    y = pyrope.attention(q, k, v, **options)
    if "q_num_heads" in attributes:
        y = y.swapaxes(1, 2).reshape(outputs["Y"].shape)
    _same(y, outputs["Y"])
    for present, ours in (("present_key", k), ("present_value", v)):
        if present in outputs:
            assert (outputs[present] == ours).all()


@pytest.mark.parametrize("name", [name for name in NODES if "qk_matmul_output" in _read(CASES[name])[2]])
def test_onnx_scores(name):
    """The scores that some nodes return: with the identity as values, attention returns its weights.

    The logarithm of the weights is the scores up to one number for each row.
    """
    attributes, given, outputs = _read(CASES[name])
    q, k, _, options = _arguments(attributes, given)
    mode, scores = attributes.get("qk_matmul_output_mode", 0), outputs["qk_matmul_output"]
    dropped = {0: ("mask", "softcap"), 1: ("mask",), 2: (), 3: ()}[mode]  # raw, soft capped, masked, softmax
    options = {key: value for key, value in options.items() if key not in dropped} | (
        {} if mode > 1 else {"causal": False}
    )
    identity = np.broadcast_to(np.eye(k.shape[2], dtype=k.dtype), (*k.shape[:3], k.shape[2]))
    weights = pyrope.attention(q, k, identity, **options)
    if mode == 3:
        _same(weights, scores)
        return
    assert ((weights == 0) == np.isneginf(scores)).all()
    visible = weights > 0
    logs = np.log(weights, where=visible, out=np.zeros_like(weights))
    gap = np.where(visible, logs - np.where(visible, scores, 0), np.nan)
    assert (np.nanmax(gap, axis=-1) - np.nanmin(gap, axis=-1) <= 2e-5).all()


def _torch(*arrays, **options):
    return scaled_dot_product_attention(*(torch.from_numpy(x) for x in arrays), **options).numpy()


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("float64", 1e-14), ("float16", 2e-3)])
@pytest.mark.parametrize("n, heads, groups", [(1, 2, 2), (7, 4, 2), (129, 6, 3), (300, 4, 1)])
def test_torch(dtype, tolerance, n, heads, groups):
    rng = np.random.default_rng(n)
    q, k, v = (rng.standard_normal((2, h, n, 16)).astype(dtype) for h in (heads, groups, groups))
    mask, bias = rng.random((2, 1, n, n)) < 0.7, rng.standard_normal((2, heads, n, n)).astype(dtype)
    mask[..., 0] = True
    options = [
        ({}, {}),
        ({"is_causal": True}, {"causal": True}),
        ({"attn_mask": torch.from_numpy(mask)}, {"mask": mask}),
        ({"attn_mask": torch.from_numpy(bias)}, {"mask": bias}),
        ({"scale": 0.3}, {"scale": 0.3}),
    ]
    for theirs, ours in options:
        np.testing.assert_allclose(
            pyrope.attention(q, k, v, **ours), _torch(q, k, v, enable_gqa=heads != groups, **theirs), rtol=tolerance, atol=tolerance
        )  # fmt: skip


def test_torch_at_length():
    # 1,024 positions in several blocks, with values of another width and a cache: the queries are the last 200.
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, 3, n, 32)).astype(np.float32) for n in (200, 1024))
    v = rng.standard_normal((1, 3, 1024, 24)).astype(np.float32)
    visible = np.arange(1024) <= np.arange(824, 1024)[:, None]
    theirs = _torch(q, k, v, attn_mask=torch.from_numpy(visible))
    np.testing.assert_allclose(pyrope.attention(q, k, v, causal=True), theirs, rtol=1e-5, atol=2e-6)
    near = visible & (np.arange(1024) > np.arange(824, 1024)[:, None] - 100)
    theirs = _torch(q, k, v, attn_mask=torch.from_numpy(near))
    np.testing.assert_allclose(pyrope.attention(q, k, v, causal=True, window=100), theirs, rtol=1e-5, atol=2e-6)
