"""What RoPE is compared with: sinusoidal, Eq. (4), Shaw's, T5's and ALiBi's positions, in a few lines each.

What depends on positions alone is computed on the host, in float64 or as integers; what reads a table of the model
belongs to the table's backend. Positions are integers, (n,); distances are those of the key from the query, j − i.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from . import checks
from .backend import Array, compute_dtype, from_numpy, namespace, on_host

Float64: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Int64: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


def _integers(name: str, values: Any) -> Int64:
    return checks.positions(name, on_host(values)).astype(np.int64)


def _distances(q_positions: Any, k_positions: Any) -> Int64:
    """j − i: (n,) and (t,) -> (n, t)."""
    i, j = _integers("q_positions", q_positions), _integers("k_positions", k_positions)
    if i.ndim != 1 or j.ndim != 1:
        raise ValueError(f"positions must be (n,), had shapes {i.shape} and {j.shape}")
    return np.asarray(j - i[:, None])


def _rows(table: Array, rows: Int64) -> Array:
    """table[rows], of rows that are in range: (N, …) and (…) -> (…, …)."""
    xp = namespace(table)
    return xp.take(table, from_numpy(rows, xp), axis=0)


def _check_table(table: Array, shape: str) -> None:
    namespace(table=table)
    if table.ndim != 2 or (shape.startswith("(2k") and table.shape[0] % 2 == 0):
        raise ValueError(f"table must be {shape}, had shape {table.shape}")


def sinusoidal(positions: Any, d: int, base: float = 10000.0) -> Float64:
    """Eq. (4): p(m)_2t = sin(m·base^(−2t/d)), p(m)_2t+1 = cos(…); (…, n) -> (…, n, d).

    >>> sinusoidal([0, 1], 4).round(4)
    array([[0.    , 1.    , 0.    , 1.    ],
           [0.8415, 0.5403, 0.01  , 1.    ]])
    """
    m, base = _integers("positions", positions), checks.real("base", base, 1, open=True)
    if checks.size("d", d, 2) % 2:
        raise ValueError(f"d must be even, was {d}: sines and cosines come in pairs")
    angles = m[..., None] * base ** (-2 * np.arange(d // 2) / d)
    return np.stack((np.sin(angles), np.cos(angles)), axis=-1).reshape(*m.shape, d)  # Eq. (4)


def shaw_embeddings(q_positions: Any, k_positions: Any, table: Array) -> Array:
    """Clipped relative embeddings (Shaw et al., arXiv 1803.02155): a_ij, (n, t, d), from a table (2k + 1, d).

    a_ij is row k + clip(j − i, −k, k). Scores are q_iᵀ(k_j + a_ij), outputs Σ α_ij (v_j + a_ij), each with its table:
    `shaw_scores` and `shaw_values` are what they add to a plain attention.
    """
    _check_table(table, "(2k + 1, d), a row for each distance −k … k")
    k = table.shape[0] // 2
    return _rows(table, k + np.clip(_distances(q_positions, k_positions), -k, k))


def shaw_scores(q: Array, q_positions: Any, k_positions: Any, table: Array) -> Array:
    """q_iᵀa_ij: q (…, n, d) -> (…, n, t)."""
    return _shaw("...nd,nmd->...nm", "q", q, shaw_embeddings(q_positions, k_positions, table), (0, 2))  # Eq. (5)


def shaw_values(weights: Array, q_positions: Any, k_positions: Any, table: Array) -> Array:
    """Σ_j α_ij a_ij: weights (…, n, t) -> (…, n, d)."""
    return _shaw("...nm,nmd->...nd", "weights", weights, shaw_embeddings(q_positions, k_positions, table), (0, 1))


def _shaw(rule: str, name: str, x: Array, embeddings: Array, axes: tuple[int, int]) -> Array:
    xp, dtype = namespace(**{name: x, "table": embeddings}), compute_dtype(name, x)
    wanted = tuple(embeddings.shape[axis] for axis in axes)
    if x.shape[-2:] != wanted or x.dtype != embeddings.dtype:
        rule = f"{name} must end in {wanted} and have the table's dtype, {embeddings.dtype}"
        raise ValueError(f"{rule}, had {x.shape} {x.dtype}")
    return xp.einsum(rule, x.astype(dtype), embeddings.astype(dtype)).astype(x.dtype)


def t5_buckets(distances: Any, *, causal: bool, buckets: int = 32, max_distance: int = 128) -> Int64:
    """The bucket of each distance j − i (Raffel et al., arXiv 1910.10683).

    >>> t5_buckets([0, -1, -7, -8, -16, -200, 1, 200], causal=False)
    array([ 0,  1,  7,  8, 10, 15, 17, 31])

    Half of the buckets hold one distance each, the others grow with its logarithm up to ``max_distance``, the last
    holds all beyond. Not causal, the two directions have half of the buckets each; causal, keys ahead share bucket 0.
    """
    distance = _integers("distances", distances)
    ahead = np.zeros_like(distance)
    if not checks.flag("causal", causal):
        if (buckets := checks.integer("buckets", buckets, 4, 1024)) % 2:
            raise ValueError(f"buckets must be even where there are two directions, was {buckets}")
        buckets //= 2
        ahead = np.where(distance > 0, buckets, 0)
        distance = -abs(distance)
    exact = (buckets := checks.integer("buckets", buckets, 2, 1024)) // 2
    max_distance = checks.integer("max_distance", max_distance, exact + 1, checks.MAX_POSITION)
    starts = _t5_starts(exact, buckets - exact, max_distance)
    size = np.maximum(-distance, 0)
    large = exact + np.searchsorted(np.array(starts, np.int64), size, side="right")
    return np.asarray(ahead + np.where(size < exact, size, large))


@lru_cache(maxsize=64)
def _t5_starts(exact: int, w: int, max_distance: int) -> list[int]:
    """The least distances of the buckets exact + 1 … exact + w − 1: exact·(max/exact)^(j/w) for j = 1 … w − 1."""
    # In integers: where that is one itself, the rounding of a logarithm would decide. At distance 16,
    # 8·ln(16/8)/ln(128/8) may become 1.99….
    powers = [max_distance**j * exact ** (w - j) for j in range(1, w)]
    return [bisect_left(range(max_distance), power, key=lambda x: x**w) for power in powers]


def t5_bias(table: Array, q_positions: Any, k_positions: Any, *, causal: bool, max_distance: int = 128) -> Array:
    """What T5 adds to the scores: its table (buckets, h) -> (h, n, t)."""
    _check_table(table, "(buckets, h)")
    # A distance may be twice as large as a position; those beyond max_distance share a bucket, so it may be clipped.
    distances = np.clip(_distances(q_positions, k_positions), -checks.MAX_POSITION, checks.MAX_POSITION)
    rows = t5_buckets(distances, causal=causal, buckets=table.shape[0], max_distance=max_distance)
    return _rows(table, rows).transpose(2, 0, 1)  # Eq. (8): b_{m,n}


def alibi_slopes(h: int) -> Float64:
    """2^(−8i/h), i = 1 … h (Press et al., arXiv 2108.12409).

    >>> alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625])

    Where h is not a power of two, the rule of the authors' code (ofirpress/attention_with_linear_biases): the slopes
    of the power of two below, then every other one of the power of two above, from its first.
    """
    h = checks.size("h", h)
    below = 1 << h.bit_length() - 1
    exponents = [-8 * i / below for i in range(1, below + 1)] + [-4 * i / below for i in range(1, 2 * (h - below), 2)]
    return np.exp2(exponents)


def alibi_bias(h: int, q_positions: Any, k_positions: Any) -> Float64:
    """What ALiBi adds to the scores, −slope·|j − i|: (h, n, t).

    >>> alibi_bias(1, [2], [0, 1, 2])
    array([[[-0.0078125 , -0.00390625, -0.        ]]])
    """
    return -alibi_slopes(h)[:, None, None] * abs(_distances(q_positions, k_positions))
