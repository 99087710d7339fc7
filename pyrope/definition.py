"""RoFormer (arXiv 2104.09864v5), equations (2), (12) to (19) and (34) to (37), and the transformer around them.

This file is what must be trusted. It checks nothing, caches nothing, and prefers clarity to speed. Everything else in
pyrope computes the same values faster (`pyrope.rotation`, `.softmax`, `.linear`, `.layers`, `.model`) or more exactly
(`.theta`, `.phase`), or judges other people's code by them (`.oracle`); tests hold it all to this file.

Shapes: b batch, h query heads, g key and value heads, n queries, t keys, d features of a head, r of them rotated,
p = r/2 pairs, c features of a value (d in a model), e model width, f MLP width, v vocabulary; "…" is any number of
leading axes. In an equation, m and n are the positions of a query and a key, as in the paper. Arrays are NumPy's or
CuPy's, all floats of one call have one dtype, which is also the result's, and integers are signed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .backend import Array, from_numpy, namespace, to_numpy

if TYPE_CHECKING:  # for the annotations; what a model is, field by field: `pyrope.model`
    from .model import Config

Weights: TypeAlias = Mapping[str, Array]  # what a model, or a layer, has learnt, by the names of `model.weight_shapes`
Features: TypeAlias = tuple[slice, slice]  # where the first, and where the second feature of every pair stands
# A turn is x -> R(Θ, m)·x, for instance lambda x: rotate(x, *tables(positions, theta), *pairs(layout, r)).
Turn: TypeAlias = Callable[[Array], Array]

# ── The rotation: sections 3.2, 3.4.2 and 3.4.3 ──────────────────────────────────────────────────────────────────────


def frequencies(r: int, base: float = 10000.0) -> Array:
    """Θ, a NumPy array (p,). The paper counts i from 1, and rotates all features: its d is r here."""
    i = np.arange(r // 2)
    return base ** (-2 * i / r)  # Eq. (15)


def tables(positions: Array, theta: Array) -> tuple[Array, Array]:
    """cos mθ and sin mθ: (…, n) and (p,) -> two (…, n, p). `phase.cos_sin` is the same without the rounding of m·θ."""
    xp, angles = namespace(theta), positions[..., None].astype(theta.dtype) * theta
    return xp.cos(angles), xp.sin(angles)


def pairs(layout: str, r: int, start: int = 0) -> tuple[Features, Features]:
    """Which features make a pair, as they are read and as they are written; the r rotated features begin at start."""
    neighbours = slice(start, start + r, 2), slice(start + 1, start + r, 2)  # (0, 1), (2, 3), … as in the paper
    halves = slice(start, start + r // 2), slice(start + r // 2, start + r)  # (0, r/2), (1, r/2 + 1), … as in GPT-NeoX
    layouts = {"interleaved": (neighbours, neighbours), "half": (halves, halves)}
    layouts |= {"interleaved-to-half": (neighbours, halves), "half-to-interleaved": (halves, neighbours)}
    return layouts[layout]


def rotation_matrix(cos: Array, sin: Array, reads: Features, writes: Features, d: int) -> Array:
    """R(Θ, m) at one position: cos and sin (p,) -> (d, d). Features outside of the pairs stay as they are."""
    xp = namespace(cos)
    feature, matrix = xp.arange(d), xp.eye(d, dtype=cos.dtype)
    (x1, x2), (y1, y2) = [feature[s] for s in reads], [feature[s] for s in writes]
    matrix[y1, y1] = matrix[y2, y2] = 0
    matrix[y1, x1], matrix[y1, x2] = cos, -sin  # Eq. (13): the rotation of one pair by mθ
    matrix[y2, x1], matrix[y2, x2] = sin, cos  # Eq. (15): all pairs, each with its own θ
    return matrix


def rotate_complex(x: Array, cos: Array, sin: Array, reads: Features, writes: Features) -> Array:
    """R(Θ, m)·x with each pair as one complex number: x (…, n, d), tables that broadcast to (…, n, p) -> (…, n, d)."""
    y = x.copy()
    z = (x[..., reads[0]] + 1j * x[..., reads[1]]) * (cos + 1j * sin)  # Eq. (12): (W x)·e^{imθ}
    y[..., writes[0]], y[..., writes[1]] = z.real, z.imag
    return y


def rotate(x: Array, cos: Array, sin: Array, reads: Features, writes: Features) -> Array:
    """R(Θ, m)·x feature by feature: x (…, n, d), tables that broadcast to (…, n, p) -> (…, n, d)."""
    y, x1, x2 = x.copy(), x[..., reads[0]], x[..., reads[1]]
    y[..., writes[0]] = x1 * cos - x2 * sin  # Eq. (34): in the paper rows 1, 3, 5, …
    y[..., writes[1]] = x2 * cos + x1 * sin  # and rows 2, 4, 6, …
    return y


def decay(cos: Array, sin: Array) -> Array:
    """(2/r)·Σ|S_j|, the curve of Figure 2: the tables of the distances m − n, (…, n, p) -> (…, n)."""
    sums = (cos + 1j * sin).cumsum(axis=-1)  # the S_j of Eq. (36): the sums of the first j exponentials of Eq. (35)
    return abs(sums).mean(axis=-1)  # Eq. (37): its second factor, divided by r/2


# ── Softmax attention: sections 2.1 and 3.2 ──────────────────────────────────────────────────────────────────────────
# Positions that differ from sequence to sequence are (b, 1, n): the 1 stands for the heads.


def visible(q_places: Array, k_places: Array, causal: bool, window: int | None = None) -> Array:
    """Which keys a query sees, by their places in the sequence: (…, n) and (…, t) -> bool (…, n, t). A window counts
    the query's own place; without causal it reaches to both sides."""
    distance = q_places[..., :, None] - k_places[..., None, :]
    mask = distance >= 0 if causal else namespace(distance).ones_like(distance, dtype=bool)
    return mask if window is None else mask & (abs(distance) < window)


def repeat_heads(x: Array, h: int) -> Array:
    """Keys or values so that each query head has its own; head i reads head i·g//h: (…, g, t, d) -> (…, h, t, d)."""
    return x.repeat(h // x.shape[-3], axis=-3)


def softmax(scores: Array) -> Array:
    """exp(s)/Σ exp(s) over the last axis: (…, n, t) -> the same; zeros in a row that sees nothing."""
    # exp(s) overflows, so the greatest s of the row is subtracted first. In a row of −inf alone that would be
    # −inf − (−inf) = NaN, and 0/0 afterwards: there 0 is subtracted, and the sum of zeros is replaced by 1.
    xp = namespace(scores)
    top = scores.max(axis=-1, keepdims=True)
    powers = xp.exp(scores - xp.where(top == -math.inf, 0, top))
    total = powers.sum(axis=-1, keepdims=True)
    return powers / xp.where(total == 0, 1, total)


def attention_scores(q: Array, k: Array, mask: Array, scale: float, softcap: Any = None, bias: Any = 0) -> Array:
    """What the softmax is taken of: rotated q (…, n, d) and k (…, t, d), mask and bias that broadcast to (…, n, t) ->
    (…, n, t). Softcap (Gemma 2) and bias (ALiBi) are not in the paper."""
    xp = namespace(q)
    scores = q @ k.swapaxes(-1, -2) * scale  # Eq. (16): q_mᵀk_n depends on n − m alone; in Eq. (2) scale is 1/√d
    scores = scores if softcap is None else softcap * xp.tanh(scores / softcap)
    return xp.where(mask, scores + bias, -math.inf)


def attention(q: Array, k: Array, v: Array, mask: Array, scale: float, softcap: Any = None, bias: Any = 0) -> Array:
    """Rotated q (…, h, n, d) and k (…, g, t, d), v (…, g, t, c), mask and bias that broadcast to (…, h, n, t) ->
    (…, h, n, c)."""
    k, v = repeat_heads(k, q.shape[-3]), repeat_heads(v, q.shape[-3])
    return softmax(attention_scores(q, k, mask, scale, softcap, bias)) @ v  # Eq. (2)


# ── Linear attention: section 3.3 ────────────────────────────────────────────────────────────────────────────────────


def elu_plus_one(x: Array) -> Array:
    """elu(x) + 1, the paper's φ: x + 1 above 0, eˣ below: (…, n, d) -> the same."""
    xp = namespace(x)
    return xp.maximum(x, 0) + xp.exp(xp.minimum(x, 0))


FEATURE_MAPS: dict[str, Callable[[Array], Array]] = {
    "elu+1": elu_plus_one,
    "relu": lambda x: namespace(x).maximum(x, 0),
    "relu2": lambda x: namespace(x).maximum(x, 0) ** 2,
    "exp": lambda x: namespace(x).exp(x),
    "identity": lambda x: x,
}


def similarities(phi_q: Array, phi_k: Array, turn: Turn, mask: Array) -> tuple[Array, Array]:
    """What the values are weighed with, (…, n, t), and the sum that divides it, (…, n, 1): φ(q) (…, n, d), φ(k)
    (…, t, d). A turn is a rotation alone: an attention factor a in its tables would scale the results by a²."""
    xp = namespace(phi_q)
    plain = xp.where(mask, phi_q @ phi_k.swapaxes(-1, -2), 0)  # Eq. (18): sim(q, k) = φ(q)ᵀφ(k)
    turned = xp.where(mask, turn(phi_q) @ turn(phi_k).swapaxes(-1, -2), 0)  # Eq. (19): (R_m φ(q_m))ᵀ(R_n φ(k_n))
    return turned, plain.sum(axis=-1, keepdims=True)


def linear_attention(q: Array, k: Array, v: Array, turn: Turn, mask: Array, phi: Callable[[Array], Array]) -> Array:
    """q (…, h, n, d) and k (…, g, n, d), not rotated, v (…, g, n, c), mask as in `attention` -> (…, h, n, c)."""
    k, v = repeat_heads(k, q.shape[-3]), repeat_heads(v, q.shape[-3])
    weights, total = similarities(phi(q), phi(k), turn, mask)
    summed = weights @ v
    empty = (total == 0) & (summed == 0).all(axis=-1, keepdims=True)  # 0/0 is 0: nothing seen, or nothing similar
    return summed / namespace(q).where(empty, 1, total)  # Eq. (17), of which Eq. (19) rotates the numerator only


# ── The transformer around it ────────────────────────────────────────────────────────────────────────────────────────


def part(w: Weights, name: str) -> tuple[Any, Any]:
    """The weight and the bias of a norm or a projection, each None where there is none."""
    return w.get(f"{name}.weight"), w.get(f"{name}.bias")


def norm(config: Config, w: tuple[Any, Any], x: Array) -> Array:
    """RMSNorm, or LayerNorm, which is RMSNorm of x minus its mean: x (…, e) -> the same. No weights mean no norm."""
    if w[0] is None:
        return x
    x = x - x.mean(axis=-1, keepdims=True) if config.norm == "layer" else x
    y = x / namespace(x).sqrt((x * x).mean(axis=-1, keepdims=True) + config.eps) * w[0]
    return y if w[1] is None else y + w[1]


def project(w: tuple[Any, Any], x: Array) -> Array:
    """x·Wᵀ + b, with W as (out, in): (…, in) -> (…, out)."""
    return x @ w[0].T if w[1] is None else x @ w[0].T + w[1]


def gelu(x: Array) -> Array:
    """x·Φ(x), on the host, since NumPy has neither Φ nor erf: (…, f) -> the same."""
    cdf = np.vectorize(lambda t: math.erfc(-t / math.sqrt(2)) / 2, otypes=[x.dtype])
    return x * from_numpy(cdf(to_numpy(x)), namespace(x))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {  # (…, f) -> the same
    "gelu": gelu,
    "gelu_tanh": lambda x: x * (1 + namespace(x).tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + namespace(x).exp(-x)),
    "relu": lambda x: namespace(x).maximum(x, 0),
}


def mlp(config: Config, w: Weights, x: Array) -> Array:
    """down(act(up(x))), or gated down(act(gate(x))·up(x)), with gate and up in one matrix: (b, n, e) -> (b, n, e)."""
    act, inner, f = ACTIVATIONS[config.activation], project(part(w, "up"), x), config.mlp_width
    return project(part(w, "down"), act(inner[..., :f]) * inner[..., f:] if config.gated else act(inner))


def self_attention(config: Config, w: Weights, x: Array, turn: Turn, mask: Array, bias: Any = 0) -> Array:
    """(b, n, e) -> (b, n, e)."""
    (b, n, _), h, g, d = x.shape, config.heads, config.key_heads, config.head_dim
    heads = project(part(w, "qkv"), x).reshape(b, n, h + 2 * g, d).swapaxes(1, 2)
    q, k, v = heads[:, :h], heads[:, h : h + g], heads[:, h + g :]
    q, k = norm(config, part(w, "q_norm"), q), norm(config, part(w, "k_norm"), k)
    if config.attention == "linear":
        out = linear_attention(q, k, v, turn, mask, FEATURE_MAPS[config.feature_map])
    else:
        scale = config.scale or 1 / math.sqrt(d)
        out = attention(turn(q), turn(k), v, mask, scale, config.softcap, bias)  # Eq. (14): R_m W x_m, for q and k only
    return project(part(w, "out"), out.swapaxes(1, 2).reshape(b, n, h * d))


def block(config: Config, w: Weights, x: Array, turn: Turn, mask: Array, bias: Any = 0) -> Array:
    """One layer, (b, n, e) -> (b, n, e): attention and an MLP, whose results are added to x."""
    if config.block == "post-norm":
        x = norm(config, part(w, "attention_norm"), x + self_attention(config, w, x, turn, mask, bias))
        return norm(config, part(w, "mlp_norm"), x + mlp(config, w, x))
    read = norm(config, part(w, "attention_norm"), x)
    attended = norm(config, part(w, "attention_post_norm"), self_attention(config, w, read, turn, mask, bias))
    both = x + attended  # the MLP of a parallel block reads x instead, by its own norm or by that of the attention
    read = read if config.one_norm else norm(config, part(w, "mlp_norm"), x if config.block == "parallel" else both)
    return both + norm(config, part(w, "mlp_post_norm"), mlp(config, w, read))


def forward(config: Config, w: Weights, tokens: Array, turns: Sequence[Turn], added: Any = 0, bias: Any = 0) -> Array:
    """Logits: tokens, a NumPy array (b, n) -> (b, n, v). The i-th of turns is the rotation of layer i, or the identity.
    Other encodings add vectors, such as those of Eq. (4), to the embeddings, (b, n, e), or a bias to the scores."""
    xp = namespace(w["embedding"])
    x = w["embedding"][from_numpy(tokens, xp)] * (config.embedding_scale or 1) + added + w.get("embedding_bias", 0)
    x, places = norm(config, part(w, "embedding_norm"), x), xp.arange(tokens.shape[-1])
    for i, (layer, turn) in enumerate(zip(config.layers, turns, strict=True)):
        own = {name.removeprefix(f"layers.{i}."): x for name, x in w.items() if name.startswith(f"layers.{i}.")}
        x = block(config, own, x, turn, visible(places, places, config.causal, layer.window), bias)
    x = norm(config, part(w, "norm"), x)
    if config.head_dense:
        x = norm(config, part(w, "head_norm"), ACTIVATIONS[config.activation](project(part(w, "head_dense"), x)))
    head, cap = (w["embedding" if config.tied else "head.weight"], w.get("head.bias")), config.logit_softcap
    logits = project(head, x) * (config.logit_scale or 1)
    return logits if cap is None else cap * xp.tanh(logits / cap)
