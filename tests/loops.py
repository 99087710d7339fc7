"""A transformer with rotary position embeddings in plain Python: lists, `math` and `cmath`, one number at a time.

The truth that tests/test_definition.py holds `pyrope.definition` to. It imports nothing of pyrope; a model comes in as
its config and its weights, whose arrays are read as lists. Every sum is exact but for one rounding (`math.fsum`).
"""

from __future__ import annotations

import cmath
import math

FEATURE_MAPS = {
    "elu+1": lambda x: x + 1 if x > 0 else math.exp(x),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "exp": math.exp,
    "identity": lambda x: x,
}
ACTIVATIONS = {
    "relu": lambda x: max(x, 0.0),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
}


def dot(x, y):
    return math.fsum(a * b for a, b in zip(x, y, strict=True))


def add(*rows):
    return [math.fsum(column) for column in zip(*rows, strict=True)]


def rotate(x, m, theta, layout, start):
    """One row of d numbers at position m."""
    y, p = list(x), len(theta)
    for i, t in enumerate(theta):
        near, apart = (start + 2 * i, start + 2 * i + 1), (start + i, start + i + p)
        a, b = apart if layout.startswith("half") else near
        c, e = near if layout.endswith("interleaved") else apart
        z = complex(x[a], x[b]) * cmath.exp(1j * m * t)
        y[c], y[e] = z.real, z.imag
    return y


def visible(q_at, k_at, causal, window):
    """For each query, whether it sees each key."""
    return [[(not causal or j <= i) and (window is None or i - window < j < i + window) for j in k_at] for i in q_at]


def weighted(weights, total, rows):
    """Σ weight·row / total; 0/0 is 0, where all of them are, and what is not 0 over 0 is infinite."""
    sums = [dot(weights, column) for column in zip(*rows, strict=True)]
    if total or not any(sums):
        return [one / (total or 1.0) for one in sums]
    return [math.copysign(math.inf, one) if one else math.nan for one in sums]


def attention(q, k, v, mask, scale, softcap, bias):
    """Heads of rows: q (h, n, d), k (g, m, d), v (g, m, e), mask (n, m), bias (h, n, m) -> (h, n, e)."""
    out = []
    for head, rows in enumerate(q):
        group = head * len(k) // len(q)
        out.append([])
        for x, allowed, more in zip(rows, mask, bias[head], strict=True):
            scores = [dot(x, key) * scale for key in k[group]]
            scores = scores if softcap is None else [softcap * math.tanh(s / softcap) for s in scores]
            powers = [math.exp(s + b) * one for s, b, one in zip(scores, more, allowed, strict=True)]
            out[-1].append(weighted(powers, math.fsum(powers), v[group]))
    return out


def linear_attention(q, k, v, turn, mask, phi):
    """As `attention`, with turn(row, m), the rotation of one row at position m."""
    q, k = ([[[phi(a) for a in x] for x in head] for head in heads] for heads in (q, k))
    out = []
    for head, rows in enumerate(q):
        group = head * len(k) // len(q)
        out.append([])
        for i, (x, allowed) in enumerate(zip(rows, mask, strict=True)):
            total = math.fsum(dot(x, y) * one for y, one in zip(k[group], allowed, strict=True))
            turned = [
                dot(turn(x, i), turn(y, j)) * one for j, (y, one) in enumerate(zip(k[group], allowed, strict=True))
            ]
            out[-1].append(weighted(turned, total, v[group]))
    return out


def norm(config, w, x):
    """One row; without weights, the row itself."""
    if w is None:
        return x
    centre = math.fsum(x) / len(x) if config.norm == "layer" else 0.0
    root = math.sqrt(math.fsum((a - centre) ** 2 for a in x) / len(x) + config.eps)
    y = [(a - centre) / root * b for a, b in zip(x, w.weight.tolist(), strict=True)]
    return y if w.bias is None else add(y, w.bias.tolist())


def project(w, x):
    """One row."""
    y = [dot(row, x) for row in w.weight.tolist()]
    return y if w.bias is None else add(y, w.bias.tolist())


def self_attention(config, w, rows, turn, mask, bias):
    """The n rows of one sequence."""
    h, g, d = config.heads, config.key_heads, config.head_dim
    made = [project(w.qkv, x) for x in rows]
    heads = [[x[i * d : (i + 1) * d] for x in made] for i in range(h + 2 * g)]
    q = [[norm(config, w.q_norm, x) for x in head] for head in heads[:h]]
    k = [[norm(config, w.k_norm, x) for x in head] for head in heads[h : h + g]]
    if config.attention == "linear":
        out = linear_attention(q, k, heads[h + g :], turn, mask, FEATURE_MAPS[config.feature_map])
    else:
        q, k = ([[turn(x, m) for m, x in enumerate(head)] for head in part] for part in (q, k))
        scale = d**-0.5 if config.scale is None else config.scale
        out = attention(q, k, heads[h + g :], mask, scale, config.softcap, bias)
    return [project(w.out, [a for head in out for a in head[m]]) for m in range(len(rows))]


def mlp(config, w, x):
    """One row."""
    inner, f = project(w.up, x), config.mlp_width
    gate = inner[f:] if config.gated else [1.0] * f
    return project(w.down, [ACTIVATIONS[config.activation](a) * b for a, b in zip(inner[:f], gate, strict=True)])


def block(config, w, rows, *where):
    """The n rows of one sequence through one layer."""
    if config.block == "post-norm":
        attended = self_attention(config, w, rows, *where)
        rows = [norm(config, w.attention_norm, add(x, y)) for x, y in zip(rows, attended, strict=True)]
        return [norm(config, w.mlp_norm, add(x, mlp(config, w, x))) for x in rows]
    read = [norm(config, w.attention_norm, x) for x in rows]
    attended = [norm(config, w.attention_post_norm, x) for x in self_attention(config, w, read, *where)]
    both = [add(x, y) for x, y in zip(rows, attended, strict=True)]
    if not config.one_norm:
        read = [norm(config, w.mlp_norm, x) for x in (rows if config.block == "parallel" else both)]
    return [add(x, norm(config, w.mlp_post_norm, mlp(config, w, y))) for x, y in zip(both, read, strict=True)]


def forward(config, w, tokens, turns, added, bias):
    """Logits of one sequence: turns[layer](row, m); added (n, e), bias (h, n, n)."""
    rows, at = [], range(len(tokens))
    for token, more in zip(tokens, added, strict=True):
        scale = 1.0 if config.embedding_scale is None else config.embedding_scale
        x = add([a * scale for a in w.embedding[token].tolist()], more)
        x = x if w.embedding_bias is None else add(x, w.embedding_bias.tolist())
        rows.append(norm(config, w.embedding_norm, x))
    for layer, weights, turn in zip(config.layers, w.layers, turns, strict=True):
        rows = block(config, weights, rows, turn, visible(at, at, config.causal, layer.window), bias)
    return [head(config, w, norm(config, w.norm, x)) for x in rows]


def head(config, w, x):
    """The logits of one row."""
    if w.head_dense is not None:
        x = norm(config, w.head_norm, [ACTIVATIONS[config.activation](a) for a in project(w.head_dense, x)])
    logits, cap = project(w.head, x), config.logit_softcap
    logits = logits if config.logit_scale is None else [a * config.logit_scale for a in logits]
    return logits if cap is None else [cap * math.tanh(a / cap) for a in logits]
