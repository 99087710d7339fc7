"""What a candidate for attention makes of single scores, or of single features, read from the weights that it gives.

With unit vectors as values, outputs are weights. Of tokens at one position, whose q and k have all features alike, the
ratio of two weights depends on two scores alone, exp(s − t), or on two features, φ(a)/φ(b).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..backend import Array
from .ask import Unreadable
from .attention_evidence import AttentionEvidence
from .attention_steps import MAPS
from .floats import UNIT
from .questions import Question

_SCORES = np.array([1.0, -8, -4, -2, -1, 2, 4, 8])
_FEATURES = np.array([1.0, -3, -2, -1, -0.5, 0.5, 2, 3])


def score_response(evidence: AttentionEvidence) -> tuple[str, str]:
    """No name, and how scores enter the softmax, in words, where that is not as they should."""
    spec = evidence.exam.spec
    size = (spec.scale * spec.head_dim) ** -0.5  # q and k of ones have a score of 1 so
    read = _ratios(evidence, size, size * _SCORES)
    if read is None or (read < 0).any():
        return "", ""
    cap = spec.softcap
    meant = _SCORES if cap is None else cap * np.tanh(_SCORES / cap)
    with np.errstate(divide="ignore"):  # a weight may be 0
        got = np.log(read) + meant[0]
    if (np.abs(got - meant) <= _slack(evidence) * (1 + np.abs(_SCORES))).all():
        return "", ""
    expected = "themselves" if cap is None else _listed(meant)
    return "", f"beside one of 1, scores of {_listed(_SCORES)} act as {_listed(got)}, expected {expected}"


def feature_response(evidence: AttentionEvidence) -> tuple[str, str]:
    """ "another feature map", if the weights show it, and its values in words."""
    spec = evidence.exam.spec
    read, again = (_ratios(evidence, q, _FEATURES) for q in (1.0, 2.0))
    backwards = _ratios(evidence, 1.0, _FEATURES, backwards=True)
    if read is None or again is None or backwards is None:
        return "", ""
    slack = _slack(evidence)
    if any((np.abs(other - read) > slack * (1 + np.abs(read))).any() for other in (again, backwards)):
        return "", ""  # weights depend on more than on the features of the key
    phi = MAPS[spec.feature_map](_FEATURES)
    if (np.abs(read - phi / phi[0]) <= slack * (1 + np.abs(read))).all():
        return "", ""
    words = f"φ of {_listed(_FEATURES)}, over φ(1), is {_listed(read)}, expected {_listed(phi / phi[0])}"
    return "another feature map", words


def dropped_weights(evidence: AttentionEvidence) -> str:
    """How many weights are zeros, in words, if all others are the right ones times the factor that makes up for it."""
    question, spec = evidence.exam.questions[0], evidence.exam.spec
    n = min(24, question.q.shape[-2], spec.head_dim)
    few = question.first(n)
    v = np.zeros_like(few.v)
    v[..., range(n), range(n)] = 1
    few = replace(few, v=v, random=False)
    try:
        got = few.v if evidence.asks is None else evidence.asks(few)
    except Unreadable:
        return ""
    right = evidence.exam.truth(few)
    if got.shape != right.shape or not np.isfinite(got).all():
        return ""
    shares = got[right > 1e-3] / right[right > 1e-3]
    zeros, kept = float((shares == 0).mean()), shares[shares != 0]
    factor = float(np.median(kept)) if kept.size else 0.0
    alike = factor > 1 and (np.abs(kept / factor - 1) <= _slack(evidence)).all()
    if not zeros or not alike or abs(factor * (1 - zeros) - 1) > 0.2:
        return ""
    return f"{zeros:.2%} of the weights are zeros, at random, and all others are the right ones times {factor:.4g}"


def _slack(evidence: AttentionEvidence) -> float:
    return 32 * max(UNIT[evidence.exam.dtype], 2.0**-24)


def _listed(numbers: Array) -> str:
    return ", ".join(f"{x:.4g}" for x in numbers[1:])


def _ratios(evidence: AttentionEvidence, query: float, keys: Array, backwards: bool = False) -> Array | None:
    """The weights that the last query gives to keys of these features, over that of the first; None if they cannot be
    had, or are not finite."""
    spec, n = evidence.exam.spec, len(keys)
    if evidence.asks is None or spec.head_dim < n or (spec.window or n) < n:
        return None
    order = np.arange(n)[::-1] if backwards else np.arange(n)
    dtype = evidence.exam.questions[0].q.dtype
    q = np.full((1, spec.heads, n, spec.head_dim), query, dtype)
    k, v = (np.zeros((1, spec.key_heads, n, spec.head_dim), dtype) for _ in "kv")
    k[...], v[..., range(n), range(n)] = keys[order][:, None], 1
    at = None if spec.rope is None else np.full((1, n), 3)
    try:
        out = evidence.asks(Question("keys of equal features", q, k, v, positions=at, random=False))
    except Unreadable:
        return None
    if out.shape != q.shape:
        return None
    with np.errstate(all="ignore"):
        weights = out[0, 0, -1, :n][np.argsort(order)]
        read = weights / weights[0]
    return read if np.isfinite(read).all() else None
