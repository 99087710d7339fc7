"""The definition against other people's: transformers' models and rotations, torch's attention, ONNX's node tests.

Models go through `definition.forward` with nothing of the engine but the reading of their folders.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from test_onnx_peers import CASES as NODES
from test_transformer_peers import (
    _cohere_rotation,
    _gptj_attention,
    _in_float64,
    _logits,
    _off,
    _tokens,
    _twin,
    saved,
)
from torch.nn import functional
from transformers.models.cohere import modeling_cohere
from transformers.models.glm4 import modeling_glm4
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama

import pyrope
from pyrope import definition
from pyrope.layers import Norm
from pyrope.models.architecture import Config, Layer

__all__ = ["saved"]  # pytest finds the fixture by its name: every family that pyrope loads, tiny and random


def turns(config, n):
    """The rotation of each layer at positions 0 … n − 1; where Θ is the paper's, its tables are the definition's."""

    def turn(rope):
        if rope.scaling is None:
            cos, sin = definition.tables(rope.direction * np.arange(n), definition.frequencies(rope.width, rope.base))
        else:
            cos, sin = pyrope.cos_sin(np.arange(n), rope.at(n))
        return lambda x: definition.rotate(x, cos, sin, *definition.pairs(rope.layout, rope.width, rope.start))

    return [(lambda x: x) if layer.rope is None else turn(layer.rope) for layer in config.layers]


@pytest.mark.parametrize("n", [1, 40])
def test_a_forward_pass_is_that_of_transformers(saved, n):  # noqa: F811
    """Their tables and norms are float32 even in a float64 model: 1e-6."""
    theirs, ours = _twin(saved, "float64")
    tokens = _tokens(2, n)
    logits = definition.forward(ours.config, ours.weights, tokens, turns(ours.config, n))
    assert logits.dtype == np.float64 and _off(logits, _logits(theirs, tokens)) <= 1e-6


def test_a_forward_pass_in_float64_throughout(saved, monkeypatch):  # noqa: F811
    """With their tables and norms in float64 too, rounding alone is left."""
    theirs, ours = _twin(saved, "float64")
    tokens = _tokens(2, 40)
    monkeypatch.setattr(modeling_cohere, "apply_rotary_pos_emb", _cohere_rotation)
    monkeypatch.setattr(modeling_gptj.GPTJAttention, "_attn", _gptj_attention)
    _in_float64(theirs, ours)
    logits = definition.forward(ours.config, ours.weights, tokens, turns(ours.config, 40))
    assert _off(logits, _logits(theirs, tokens)) <= 1e-10


def test_attention_is_that_of_torch():
    """Grouped heads, every mask that the definition makes, a bias, and a softcap that torch is given as a bias."""
    rng = np.random.default_rng(0)
    n, m, h, g, d = 5, 9, 6, 2, 8
    q, k, v = (rng.standard_normal(shape) for shape in ((2, h, n, d), (2, g, m, d), (2, g, m, 7)))
    bias, at, scale = rng.standard_normal((h, n, m)), torch.arange(m), 1 / math.sqrt(d)
    distance = at[-n:, None] - at  # the queries are the last of the keys
    everything = torch.ones(n, m, dtype=torch.bool)
    masks = {(False, None): everything, (True, None): everything.tril(m - n)}
    masks |= {(True, 3): (distance >= 0) & (distance <= 2), (False, 3): (distance >= -2) & (distance <= 2)}
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    plain = torch.einsum("bhnd,bhmd->bhnm", tensors[0], tensors[1].repeat_interleave(h // g, 1)) * scale
    capped = 2 * torch.tanh(plain / 2)
    for (causal, window), mask in masks.items():
        visible = definition.visible(np.arange(m - n, m), np.arange(m), causal, window)
        for softcap, more in ((None, 0), (None, bias), (2.0, 0), (2.0, bias)):
            added = torch.as_tensor(more) + (0 if softcap is None else capped - plain)
            added = torch.zeros(2, h, n, m, dtype=torch.float64) + added
            added = added.masked_fill(~mask, -math.inf)
            theirs = functional.scaled_dot_product_attention(*tensors, attn_mask=added, enable_gqa=True).numpy()
            ours = definition.attention(q, k, v, visible, scale, softcap, more)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-14)
    causal = functional.scaled_dot_product_attention(
        *(x[..., -n:, :] for x in tensors), is_causal=True, enable_gqa=True
    )
    ours = definition.attention(q, k[..., -n:, :], v[..., -n:, :], np.tri(n, dtype=bool), scale)
    np.testing.assert_allclose(ours, causal.numpy(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", NODES)
def test_rotations_are_the_node_tests_of_onnx(name):
    """Their tables are random numbers below 1: two roundings of products and one of a sum on either side."""
    node, (x, cos, sin, *ids), (expected,) = NODES[name]
    options = {a.name: a.i for a in node.attribute}
    heads = x if x.ndim == 4 else x.reshape(*x.shape[:2], options["num_heads"], -1).swapaxes(1, 2)
    cos, sin = (t[ids[0]] if ids else t for t in (cos, sin))
    r = options.get("rotary_embedding_dim", 0) or heads.shape[-1]
    pairs = definition.pairs("interleaved" if options.get("interleaved") else "half", r)
    for rotate in (definition.rotate, definition.rotate_complex):
        y = rotate(heads, cos[:, None], sin[:, None], *pairs)
        y = y if x.ndim == 4 else y.swapaxes(1, 2).reshape(x.shape)
        assert y.dtype == expected.dtype
        np.testing.assert_allclose(y, expected, rtol=0, atol=8 * 2.0**-24)


@pytest.mark.parametrize("layout, r", [("half", 16), ("half", 8), ("interleaved", 16), ("interleaved", 8)])
def test_rotations_are_those_of_transformers(layout, r):
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


def test_norms_are_those_of_torch():
    x, weight, bias = (np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate([(3, 4, 10), 10, 10]))
    given = [torch.from_numpy(t) for t in (x, weight, bias)]
    common = {"activation": "relu", "gated": False, "block": "sequential", "causal": True, "encoding": "none"}
    rms, layer = (Config(2, 2, 1, 1, 2, 1, (Layer(None),), norm=norm, eps=0.01, **common) for norm in ("rms", "layer"))
    theirs = functional.layer_norm(given[0], (10,), *given[1:], eps=0.01).numpy()
    np.testing.assert_allclose(definition.norm(layer, Norm(weight, bias), x), theirs, rtol=0, atol=1e-14)
    theirs = functional.rms_norm(given[0], (10,), given[1], eps=0.01).numpy()
    np.testing.assert_allclose(definition.norm(rms, Norm(weight, None), x), theirs, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "name, theirs",
    [
        ("relu", functional.relu),
        ("silu", functional.silu),
        ("gelu", functional.gelu),
        ("gelu_tanh", lambda x: functional.gelu(x, approximate="tanh")),
    ],
)
def test_activations_are_those_of_torch(name, theirs):
    x = np.linspace(-30, 30, 1201)
    np.testing.assert_allclose(definition.ACTIVATIONS[name](x), theirs(torch.from_numpy(x)).numpy(), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "name, theirs", [("elu+1", lambda x: functional.elu(x) + 1), ("relu2", lambda x: functional.relu(x) ** 2)]
)
def test_feature_maps_are_those_of_torch(name, theirs):
    x = np.linspace(-30, 30, 1201)
    np.testing.assert_allclose(
        definition.FEATURE_MAPS[name](x), theirs(torch.from_numpy(x)).numpy(), rtol=1e-15, atol=1e-15
    )
