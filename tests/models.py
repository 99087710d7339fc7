"""Hypothesis strategies: small models of every kind, made of the options of one block; and what they compute."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import strategies as st
from strategies import ropes

from pyrope import Rope, cos_sin, definition, encodings, to_numpy
from pyrope.layers import ACTIVATIONS, NORMS
from pyrope.model import Config, Layer

PLAIN = Config(
    vocabulary=11, width=8, heads=2, key_heads=1, head_dim=4, mlp_width=6, layers=(Layer(Rope(4, 10000.0, "half")),) * 2,
    norm="rms", eps=1e-5, activation="silu", gated=True, block="sequential", causal=True,
)  # fmt: skip
# Softmax and linear attention, one and several options at a time: what fixed examples run over.
KINDS = {
    "plain": PLAIN,
    "windows": dataclasses.replace(PLAIN, layers=(PLAIN.layers[0], Layer(PLAIN.layers[0].rope, 2))),
    "linear": dataclasses.replace(PLAIN, attention="linear"),
    **{name: PLAIN.with_encoding(name) for name in ("alibi", "sinusoidal")},
    "parallel": dataclasses.replace(PLAIN, block="parallel", one_norm=True, qk_norm=True, softcap=2.0),
}
_numbers = st.sampled_from([None, None, 0.5, 3.0])
flags = st.booleans()
attentions = st.sampled_from(["softmax", "softmax", "linear"])


@st.composite
def configs(draw, causal=flags, attention=attentions, max_layers: int = 3):
    """A Config with any options that go together."""
    attention, block = draw(attention), draw(st.sampled_from(["sequential", "parallel", "post-norm"]))
    linear = attention == "linear"
    rope = draw(ropes(max_pairs=3, with_axes=False))
    encoding = draw(st.sampled_from(["rope"] * 4 + ["none", "sinusoidal"] + ["alibi"] * (not linear)))
    windows = st.none() if linear else st.none() | st.integers(1, 9)
    other = st.sampled_from([rope, rope, dataclasses.replace(rope, base=77.0, scaling=None), None])
    layers = [Layer(rope, draw(windows))]
    layers += [Layer(draw(other), draw(windows)) for _ in range(draw(st.integers(0, max_layers - 1)))]
    g, width = draw(st.integers(1, 2)), draw(st.integers(4, 10))
    config = Config(
        vocabulary=draw(st.integers(1, 12)), width=width + width % 2 * (encoding == "sinusoidal"), heads=g * draw(st.integers(1, 3)),
        key_heads=g, head_dim=rope.head_dim, mlp_width=draw(st.integers(1, 7)), layers=tuple(layers),
        norm=draw(st.sampled_from(list(NORMS))), eps=draw(st.sampled_from([1e-6, 1e-2])),
        activation=draw(st.sampled_from(list(ACTIVATIONS))), gated=draw(flags), block=block, causal=draw(causal),
        attention=attention, feature_map=draw(st.sampled_from(_maps(linear, encoding == "rope"))),
        scale=None if linear else draw(_numbers), softcap=None if linear else draw(_numbers),
        logit_softcap=draw(_numbers), logit_scale=draw(_numbers), embedding_scale=draw(_numbers), tied=draw(flags),
        norm_bias=draw(flags), qkv_bias=draw(flags), out_bias=draw(flags), mlp_bias=draw(flags), head_bias=draw(flags),
        qk_norm=draw(flags), post_norms=block != "post-norm" and draw(flags), one_norm=block == "parallel" and draw(flags),
        embedding_norm=draw(flags), embedding_bias=draw(flags), head_dense=draw(flags),
    )  # fmt: skip
    return config if encoding == "rope" else config.with_encoding(encoding)


def _maps(linear: bool, turned: bool) -> list[str]:
    """The feature maps. Where denominators may not be positive, with a numerator that is rotated away from 0, they are
    refused: "identity", and with a rope those that may be 0, are left to a test that sees to it."""
    return ["elu+1", "exp"] + ["relu", "relu2"] * (not turned) if linear else ["elu+1"]


def close(actual, expected, tolerance=1e-9):
    assert actual.shape == expected.shape
    assert abs(actual - expected).max() <= tolerance * (1 + abs(expected).max())


def turn(config: Config, layer: Layer, positions) -> definition.Turn:
    """R(Θ, m) of one layer, by the exact tables; linear attention turns without an attention factor."""
    if layer.rope is None:
        return lambda x: x
    rope = layer.rope.rotation_only if config.attention == "linear" else layer.rope
    tables, pairs = cos_sin(positions, rope), definition.pairs(rope.layout, rope.width, rope.start)
    return lambda x: definition.rotate(x, *tables, *pairs)


def by_definition(config: Config, arrays, tokens, positions=None, segments=None) -> np.ndarray:
    """Logits (n, v) of one row of tokens (n,), in float64; ropes must be resolved, and a segment is a sequence alone."""
    n = len(tokens)
    starts = [0] if segments is None else [i for i in range(n) if i == 0 or segments[i] != segments[i - 1]]
    weights = {name: to_numpy(array).astype(np.float64) for name, array in arrays.items()}
    parts = []
    for a, b in zip(starts, [*starts[1:], n], strict=True):
        m = np.arange(b - a) if positions is None else np.array(positions[a:b])
        turns = [turn(config, layer, m) for layer in config.layers]
        added = encodings.sinusoidal(m, config.width) if config.encoding == "sinusoidal" else 0
        bias = encodings.alibi_bias(config.heads, m, m) if config.encoding == "alibi" else 0
        parts.append(definition.forward(config, weights, np.array(tokens)[None, a:b], turns, added, bias)[0])
    return np.concatenate(parts)
