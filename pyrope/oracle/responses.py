"""What a candidate for attention makes of single scores, features and keys, read from the weights that it gives.

With unit vectors as values, outputs are weights. Of tokens at one position, whose q and k have all features alike, the
ratio of two weights depends on two scores alone, exp(s − t), or on two features, φ(a)/φ(b). Weights that are the right
ones but for zeros, and for one factor in each row, say which keys were seen, and what they were divided by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..backend import Array
from .ask import Unreadable
from .attention_evidence import AttentionEvidence, Exam
from .attention_steps import MAPS, Steps
from .floats import UNIT
from .questions import Question

_SCORES = np.array([1.0, -8, -4, -2, -1, 2, 4, 8])
_FEATURES = np.array([1.0, -3, -2, -1, -0.5, 0.5, 2, 3])
_WHOLE, _MOST = 2**22, 2**25  # scores of a call whose weights are all read, and of one of which a few queries' are
_LAST = 12


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
    if (np.abs(got - meant) <= _slack(evidence.exam) * (1 + np.abs(_SCORES))).all():
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
    slack = _slack(evidence.exam)
    if any((np.abs(other - read) > slack * (1 + np.abs(read))).any() for other in (again, backwards)):
        return "", ""  # weights depend on more than on the features of the key
    phi = MAPS[spec.feature_map](_FEATURES)
    if (np.abs(read - phi / phi[0]) <= slack * (1 + np.abs(read))).all():
        return "", ""
    words = f"φ of {_listed(_FEATURES)}, over φ(1), is {_listed(read)}, expected {_listed(phi / phi[0])}"
    return "another feature map", words


def weights(asks: Callable[[Question], Array] | None, question: Question, begin: int = 0) -> Array | None:
    """The weights that a candidate gives, (b, h, n, m), as many keys at a time as a head has features, of all queries
    or from one on; None if they cannot be had, or are not finite."""
    d, m, parts = question.v.shape[-1], question.k.shape[-2], []
    for start in range(0, m, d):
        v, width = np.zeros_like(question.v), min(d, m - start)
        v[..., range(start, start + width), range(width)] = 1
        try:
            out = np.empty(0) if asks is None else asks(replace(question, v=v, random=False))
        except Unreadable:
            return None
        if out.shape != question.q.shape or not np.isfinite(out).all():
            return None
        parts.append(out[:, :, begin:, :width].copy())
    return np.concatenate(parts, axis=-1)


def some_weights(evidence: AttentionEvidence) -> str:
    """The weights of a few tokens beside the right ones, in words."""
    question = evidence.exam.questions[0]
    if question.q.shape[-2] != question.k.shape[-2] or question.options:
        return ""
    few = question.first(min(6, question.q.shape[-2], question.v.shape[-1]))
    got, right = weights(evidence.asks, few), evidence.exam.run({}, few).weights
    if got is None or (np.abs(got - right) <= _slack(evidence.exam)).all():
        return ""
    b, h, i, _ = np.unravel_index(int(np.abs(got - right).argmax()), got.shape)
    some = (" ".join(f"{x:.4g}" for x in listed[b, h, i]) for listed in (got, right))
    return "with unit vectors as values, token {} of row {}, head {}, has the weights {}, expected {}".format(
        i, b, h, *some
    )


def dropped_weights(evidence: AttentionEvidence) -> str:
    """How many weights are zeros, in words, if all others are the right ones times the factor that makes up for it."""
    question, spec = evidence.exam.questions[0], evidence.exam.spec
    few = question.first(min(24, question.q.shape[-2], spec.head_dim))
    got, right = weights(evidence.asks, few), evidence.exam.run({}, few).weights
    if got is None:
        return ""
    shares = got[right > 1e-3] / right[right > 1e-3]
    zeros, kept = float((shares == 0).mean()), shares[shares != 0]
    factor = float(np.median(kept)) if kept.size else 0.0
    alike = factor > 1.001 and (np.abs(kept / factor - 1) <= _slack(evidence.exam)).all()
    if not zeros or not alike or abs(factor * (1 - zeros) - 1) > 0.2:
        return ""
    return f"{zeros:.2%} of the weights are zeros, at random, and all others are the right ones times {factor:.4g}"


def weighed(exam: Exam, asks: Callable[[Question], Array] | None, question: Question) -> tuple[str, str]:
    """Which other keys are seen, or by what other sums their weights are divided, if all else about them is right: the
    name of the mistake, and words for it. Of a long call, the weights of the last queries alone are read."""
    n, whole = question.q.shape[-2], question.effort < _WHOLE
    if not whole and (question.effort >= _MOST or question.options or question.calls):
        return "", ""
    begin = 0 if whole else max(n - _LAST, 0)
    got = weights(asks, question, begin)
    if got is None:
        return "", ""
    question = question if whole else question.last(n, _LAST)
    softmax = isinstance(exam.kind.steps, Steps)
    every = {"causal": False, **({"window": "ignored", "mask": "ignored", "segments": "ignored"} if softmax else {})}
    full = exam.run(every, question).weights  # as if all keys were seen, with their share in the denominator
    share = full if softmax else exam.run({**every, "order": "no rotation"}, question).weights
    tells = np.abs(full) > 1e-3 * np.abs(full).max(axis=-1, keepdims=True)
    right = exam.run({}, question).weights != 0
    most = np.abs(got).max(axis=-1, keepdims=True)
    seen = np.where(tells, np.abs(got) > 1e-6 * most, right & (most > 0))
    used, slack = np.where(seen & tells, full, 0), _slack(exam) + 1e-3
    factor = (got * used).sum(axis=-1, keepdims=True) / np.maximum(np.square(used).sum(axis=-1, keepdims=True), 1e-300)
    if (np.abs(got - factor * used)[tells] > (slack * np.abs(factor * full))[tells]).any():
        return "", ""
    sums = np.where(seen.any(axis=-1), (factor * share * seen).sum(axis=-1), 1.0)
    if (seen != right).any():
        return _other_keys(exam, seen, right, tells, begin)
    off = np.abs(sums - 1)
    if (off <= slack).all() or np.ptp(sums) <= slack:  # the second: all outputs are times one number
        return "", ""
    b, h, _ = np.unravel_index(int(off.argmax()), off.shape)
    n = off.shape[-1]
    listed = ", ".join(f"{sums[b, h, i]:.4g} at token {begin + i}" for i in sorted({*range(min(3, n)), n - 1}))
    return "another normaliser", f"the weights of a query are the right ones times one number: {listed}"


def _other_keys(exam: Exam, seen: Array, right: Array, tells: Array, begin: int) -> tuple[str, str]:
    """The mistake by which other keys are seen than the right ones, (b, h, n, m), where the weights tell it; the first
    query is that of this token."""
    n, m = seen.shape[-2:]
    distance = np.arange(m - n, m)[:, None] - np.arange(m)
    reach = int(np.abs(np.where(seen & tells, distance, 0)).max()) + 1
    if exam.spec.window is None and (seen == (right & (np.abs(distance) < reach)))[tells].all():
        return "window not asked for", f"each query sees the {reach} nearest keys alone"
    tokens = np.flatnonzero((seen != right).any(axis=(0, 1, 3)))
    words = []
    for i in dict.fromkeys((tokens[0], tokens[-1])):
        b, h = np.argwhere((seen != right)[:, :, i].any(axis=-1))[0]
        runs, expected = _runs(seen[b, h, i]), _runs(right[b, h, i])
        words.append(f"{runs} by token {begin + i} of row {b}, head {h}, expected {expected}")
    later = exam.spec.causal and (seen & (distance < 0)).any()
    others = seen[(seen != right).any(axis=-1)].any()  # else these outputs are zeros, which is no mask
    name = "not causal" if later else "other keys seen" if others else ""
    return name, f"keys that are seen: {'; '.join(words)}"


def _runs(seen: Array) -> str:
    """Indices in words, such as "0 … 7, 9"."""
    at = np.flatnonzero(seen)
    runs = [(int(run[0]), int(run[-1])) for run in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1) if run.size]
    words = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} … {b}" for a, b in runs]
    return ", ".join([*words[:4], *["…"] * (len(words) > 4)]) or "none"


def _slack(exam: Exam) -> float:
    return 32 * max(UNIT[exam.dtype], 2.0**-24)


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
