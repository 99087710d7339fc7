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
    """Heads of rows: q (h, n, d), k (g, t, d), v (g, t, c), mask (n, t), bias (h, n, t) -> (h, n, c)."""
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


def part(w, name):
    """The weight and the bias of a part, as lists, or None."""
    return [None if (x := w.get(f"{name}.{kind}")) is None else x.tolist() for kind in ("weight", "bias")]


def norm(config, w, x):
    """One row; without weights, the row itself."""
    if w[0] is None:
        return x
    centre = math.fsum(x) / len(x) if config.norm == "layer" else 0.0
    root = math.sqrt(math.fsum((a - centre) ** 2 for a in x) / len(x) + config.eps)
    y = [(a - centre) / root * b for a, b in zip(x, w[0], strict=True)]
    return y if w[1] is None else add(y, w[1])


def project(w, x):
    """One row."""
    y = [dot(row, x) for row in w[0]]
    return y if w[1] is None else add(y, w[1])


def self_attention(config, w, rows, turn, mask, bias):
    """The n rows of one sequence."""
    h, g, d = config.heads, config.key_heads, config.head_dim
    made = [project(part(w, "qkv"), x) for x in rows]
    heads = [[x[i * d : (i + 1) * d] for x in made] for i in range(h + 2 * g)]
    q = [[norm(config, part(w, "q_norm"), x) for x in head] for head in heads[:h]]
    k = [[norm(config, part(w, "k_norm"), x) for x in head] for head in heads[h : h + g]]
    if config.attention == "linear":
        out = linear_attention(q, k, heads[h + g :], turn, mask, FEATURE_MAPS[config.feature_map])
    else:
        q, k = ([[turn(x, m) for m, x in enumerate(head)] for head in part] for part in (q, k))
        scale = d**-0.5 if config.scale is None else config.scale
        out = attention(q, k, heads[h + g :], mask, scale, config.softcap, bias)
    return [project(part(w, "out"), [a for head in out for a in head[m]]) for m in range(len(rows))]


def mlp(config, w, x):
    """One row."""
    inner, f = project(part(w, "up"), x), config.mlp_width
    gate = inner[f:] if config.gated else [1.0] * f
    return project(
        part(w, "down"), [ACTIVATIONS[config.activation](a) * b for a, b in zip(inner[:f], gate, strict=True)]
    )


def block(config, w, rows, *where):
    """The n rows of one sequence through one layer."""
    if config.block == "post-norm":
        attended = self_attention(config, w, rows, *where)
        rows = [norm(config, part(w, "attention_norm"), add(x, y)) for x, y in zip(rows, attended, strict=True)]
        return [norm(config, part(w, "mlp_norm"), add(x, mlp(config, w, x))) for x in rows]
    read = [norm(config, part(w, "attention_norm"), x) for x in rows]
    attended = [norm(config, part(w, "attention_post_norm"), x) for x in self_attention(config, w, read, *where)]
    both = [add(x, y) for x, y in zip(rows, attended, strict=True)]
    if not config.one_norm:
        read = [norm(config, part(w, "mlp_norm"), x) for x in (rows if config.block == "parallel" else both)]
    return [add(x, norm(config, part(w, "mlp_post_norm"), mlp(config, w, y))) for x, y in zip(both, read, strict=True)]


def forward(config, w, tokens, turns, added, bias):
    """Logits of one sequence: turns[layer](row, m); added (n, e), bias (h, n, n)."""
    rows, at = [], range(len(tokens))
    for token, more in zip(tokens, added, strict=True):
        scale = 1.0 if config.embedding_scale is None else config.embedding_scale
        x = add([a * scale for a in w["embedding"][token].tolist()], more)
        x = add(x, w["embedding_bias"].tolist()) if "embedding_bias" in w else x
        rows.append(norm(config, part(w, "embedding_norm"), x))
    for i, (layer, turn) in enumerate(zip(config.layers, turns, strict=True)):
        own = {name.partition(f"layers.{i}.")[2]: x for name, x in w.items()}
        rows = block(config, own, rows, turn, visible(at, at, config.causal, layer.window), bias)
    return [head(config, w, norm(config, part(w, "norm"), x)) for x in rows]


def head(config, w, x):
    """The logits of one row."""
    if config.head_dense:
        x = norm(
            config, part(w, "head_norm"), [ACTIVATIONS[config.activation](a) for a in project(part(w, "head_dense"), x)]
        )
    table = w["embedding" if config.tied else "head.weight"].tolist()
    logits, cap = project((table, part(w, "head")[1]), x), config.logit_softcap
    logits = logits if config.logit_scale is None else [a * config.logit_scale for a in logits]
    return logits if cap is None else [cap * math.tanh(a / cap) for a in logits]
