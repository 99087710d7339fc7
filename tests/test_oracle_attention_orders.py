"""Positions that do not rise, small denominators, many keys, mistakes in a part of the calls: candidates by hand."""

import math

import numpy as np
import pytest

from pyrope import Rope
from pyrope.oracle.attention_checks import check_attention
from pyrope.oracle.linear_checks import check_linear_attention

D = 32
ROPE = Rope(D, 10000.0, "half")


def turn(x, at):
    """Halves of x (b, h, n, d), rotated at positions (b, n)."""
    angle = at[:, None, :, None] * 10000.0 ** (-np.arange(0, D, 2) / D)
    a, b = np.split(x.astype(np.float64), 2, axis=-1)
    return np.concatenate((a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)), axis=-1)


def lower(q, k):
    return np.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], dtype=bool)


def softmax(q, k, v, seen=None, scale=D**-0.5, score=lambda s: s):
    """In float64, with equal numbers of heads, or grouped ones."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1).astype(np.float64) for x in (k, v))
    s = np.where(lower(q, k) if seen is None else seen, score(q @ k.swapaxes(-1, -2) * scale), -np.inf)
    top = s.max(axis=-1, keepdims=True)
    p = np.exp(s - np.where(np.isinf(top), 0, top))
    total = p.sum(axis=-1, keepdims=True)
    return p / np.where(total == 0, 1, total) @ v


def plain(q, k, v, **options):
    return softmax(q, k, v, **options).astype(q.dtype)


def roped(q, k, v, at, **options):
    return softmax(turn(q, at), turn(k, at), v, **options).astype(q.dtype)


def phi(x):
    x = x.astype(np.float64)
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def linear(q, k, v, at, seen=None, total=lambda total: total):
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    seen = lower(q, k) if seen is None else seen
    scores = turn(phi(q), at) @ turn(phi(k), at).swapaxes(-1, -2) * seen
    sums = (phi(q) @ phi(k).swapaxes(-1, -2) * seen).sum(axis=-1, keepdims=True)
    return (scores @ v / total(sums)).astype(q.dtype)


KINDS = {
    "softmax": (roped, lambda fn: check_attention(fn, rope=ROPE, head_dim=D)),
    "linear": (linear, lambda fn: check_linear_attention(fn, rope=ROPE, max_position=1000)),
}


def counted(at):
    return np.broadcast_to(np.arange(at.shape[1]), at.shape)


# ── The order of positions ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_positions_in_any_order_are_right_if_causality_goes_by_the_order_of_tokens(kind):
    right, check = KINDS[kind]
    report = check(right)
    assert report.ok and not any("not taken" in note for note in report.notes)

    def by_position(q, k, v, at):
        return right(q, k, v, at, seen=at[:, None, :, None] >= at[:, None, None, :])

    assert check(by_position).faults == ("causal by position",)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "special, name",
    [
        (lambda at: (np.diff(at) < 0).any() and len(at) == 1, "in a batch of one"),
        (lambda at: at.shape[1] > 2 and (at[:, 0] == at[:, 2]).all() and at.max() > 5, "positions 0, 0, 0, 1, 2"),
        (lambda at: len(at) == 2 and at.shape[1] > 2 and (np.diff(at) <= 0).all(), "descending positions"),
        (lambda at: len(at) == 2 and (np.diff(at) % 2 == 0).any() and (np.diff(at) == 1).any(), "each position twice"),
    ],
)
def test_positions_that_are_replaced_by_a_count_in_some_orders_are_caught(kind, special, name):
    right, check = KINDS[kind]

    def fn(q, k, v, at):
        return right(q, k, v, counted(at) if special(at) else at)

    report = check(fn)
    assert report.faults == ("order of positions matters",), str(report)
    assert name in report.findings[0].evidence


@pytest.mark.parametrize("kind", KINDS)
def test_where_positions_begin_is_not_called_a_length(kind):
    right, check = KINDS[kind]
    report = check(lambda q, k, v, at: right(q, k, v, at * 2 if (at[:, 0] > 0).all() else at))
    assert report.faults == ("consecutive positions wrong",), str(report)


def test_packed_positions_start_again_with_each_segment():
    def fn(q, k, v, at, segments=None):
        seen = lower(q, k)
        if segments is not None:
            assert (np.diff(at)[np.diff(segments) > 0] <= 0).all() and at[0, 0] == 0
            seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
        return roped(q, k, v, at, seen=seen)

    report = check_attention(fn, rope=ROPE, head_dim=D)
    assert report.ok and not any("packed" in note for note in report.notes)


# ── Small denominators, many keys ────────────────────────────────────────────────────────────────────────────────────


def test_denominators_below_one_are_tried():
    def check(total):
        fn = lambda *x: linear(*x, total=total)  # noqa: E731
        return check_linear_attention(fn, rope=ROPE, max_position=1000)

    assert check(lambda total: np.maximum(total, 1)).faults == ("denominator at least 1",)
    assert check(lambda total: total + 1e-3).faults == ("eps in the denominator",)
    assert not check(lambda total: np.maximum(total, 0.5)).ok
    assert check(lambda total: np.maximum(total, 1e-6)).ok


@pytest.mark.parametrize("keys", [2050, 4097])
@pytest.mark.parametrize("queries", [1, 4])
def test_thousands_of_keys_are_tried(keys, queries):
    def fn(q, k, v):
        cut = k.shape[2] >= keys and q.shape[2] == queries
        return plain(q, k[:, :, 1:], v[:, :, 1:]) if cut else plain(q, k, v)

    report = check_attention(fn, head_dim=D, heads=2)
    assert report.faults == ("decoding wrong",) and f"over {2100 if keys < 2100 else 4098} keys" in str(report)


# ── Common mistakes of softmax attention ─────────────────────────────────────────────────────────────────────────────


def not_normalised(q, k, v, stable):
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1).astype(np.float64) for x in (k, v))
    s = np.where(lower(q, k), q @ k.swapaxes(-1, -2) / math.sqrt(D), -np.inf)
    with np.errstate(over="ignore"):
        return (np.exp(s - s.max(axis=-1, keepdims=True) * stable) @ v).astype(q.dtype)


def test_weights_that_are_not_divided_by_their_sum_are_named():
    for stable in (True, False):
        report = check_attention(lambda *x, s=stable: not_normalised(*x, s), head_dim=D)
        assert report.faults == ("normaliser missing",), str(report)


def test_masks_that_replace_causality_or_are_those_of_another_row_are_named():
    def replaces(q, k, v, mask=None):
        return plain(q, k, v, seen=mask)

    def first(q, k, v, mask=None):
        return plain(q, k, v, seen=lower(q, k) if mask is None else lower(q, k) & mask[:1])

    assert check_attention(replaces, head_dim=D).faults == ("mask instead of causality",)
    assert check_attention(first, head_dim=D).faults == ("mask of another row",)


# ── Small errors that are no rounding ────────────────────────────────────────────────────────────────────────────────


def decaying(q, k, v, at):
    away = np.maximum(np.arange(q.shape[2])[:, None] - np.arange(k.shape[2]), 0)
    return linear(q, k, v, at, seen=lower(q, k) * 0.9999**away)


def added(q, k, v, at):
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    fq, fk = phi(q) + 0.01, phi(k) + 0.01
    scores = turn(fq, at) @ turn(fk, at).swapaxes(-1, -2) * lower(q, k)
    return (scores @ v / (fq @ fk.swapaxes(-1, -2) * lower(q, k)).sum(axis=-1, keepdims=True)).astype(q.dtype)


def test_small_systematic_errors_are_not_called_low_precision():
    capped = check_attention(lambda *x: plain(*x, score=lambda s: 50 * np.tanh(s / 50)), head_dim=D)
    assert capped.faults == ("another softcap",), str(capped)
    for fn in (added, decaying):
        report = check_linear_attention(fn, rope=ROPE, max_position=1000)
        assert not report.ok and "sums in low precision" not in report.faults, str(report)


def test_noise_of_a_narrow_dtype_is_called_low_precision():
    def rounded(x):
        return x.astype(np.float16).astype(np.float64)

    report = check_attention(lambda *x: plain(*x, score=rounded), head_dim=D)
    assert report.faults == ("softmax in low precision",), str(report)
    features = check_linear_attention(lambda q, k, v, at: rounded(linear(q, k, v, at)).astype(q.dtype), rope=ROPE)
    assert features.faults == ("sums in low precision",), str(features)


def test_a_length_of_which_small_weights_are_wrong_is_not_called_low_precision():
    report = check_attention(lambda *x: plain(*x, scale=1.0 if x[0].shape[2] == 128 else D**-0.5), head_dim=D)
    assert report.faults == ("some lengths wrong",) and "128 tokens" in report.findings[0].evidence, str(report)
    assert "the numbers there are those of: scale missing" in report.findings[0].evidence


# ── Mistakes in a part of the calls ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name, wrong, special, where",
    [
        ("scale missing", {"scale": 1.0}, lambda q, k: q.shape[2] == 1 < k.shape[2], '"cache, 1 query"'),
        ("scale missing", {"scale": 1.0}, lambda q, k: len(q) > 1, "by rows: wrong 2, 3; right 1"),
        ("not causal", {"seen": True}, lambda q, k: 1 < q.shape[2] < k.shape[2], "queries and keys"),
    ],
)
def test_known_mistakes_in_a_part_of_the_questions_are_named(name, wrong, special, where):
    report = check_attention(lambda q, k, v: plain(q, k, v, **(wrong if special(q, k) else {})), head_dim=D, cache=True)
    assert report.faults == (name,), str(report)
    if where != "queries and keys":
        assert where in report.findings[0].evidence, str(report)
    assert "in a part of the calls" in report.findings[0].evidence


def test_zeros_are_named_and_unknown_weights_are_shown():
    assert check_attention(lambda q, k, v: 0 * q, head_dim=D).faults == ("zeros returned",)
    report = check_attention(lambda q, k, v: plain(q, k, v, seen=lower(q, k) & (np.arange(k.shape[2]) > 0)), head_dim=D)
    assert report.faults == ("other keys seen",)
    assert "seen: none by token 0 of row 0, head 0, expected 0; 1 … 23 by token 23" in report.findings[0].evidence
    report = check_attention(lambda q, k, v: plain(np.tanh(q), k, v), head_dim=D)
    assert report.faults == ("unexplained",) and " has the weights " in report.findings[0].evidence


def test_a_result_that_changes_by_itself_is_a_state():
    for every in (5, 7, 11):
        calls = []
        fn = lambda *x, c=calls, e=every: c.append(1) or plain(*x, scale=1.0 if len(c) % e == 0 else D**-0.5)  # noqa: E731
        assert check_attention(fn, head_dim=D).faults == ("state between calls",), every


def test_what_stops_the_check_itself_is_not_called_right(monkeypatch):
    """If all answers so far are right, the rest is still missing."""

    def broken(*arguments):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("pyrope.oracle.examination._with_trials", broken)
    report = check_attention(plain, head_dim=D)
    assert report.verdict == "not judged" and "ZeroDivisionError: ours" in report.failure.reason


def test_a_cache_cannot_be_demanded_of_rope_inside():
    """Every token has a position and a query there: what was demanded would never be asked."""
    with pytest.raises(ValueError, match="give incremental= instead"):
        check_attention(roped, rope=ROPE, head_dim=D, cache=True)


def test_a_softmax_in_float32_is_low_precision_beside_angles_in_float32():
    """As eager code has it in float64: its angles are accepted, and their errors stay when q and k change a little."""

    def rotated(x, at):
        angle = at[..., None].astype(np.float32) * (10000.0 ** (-np.arange(0, D, 2) / D)).astype(np.float32)
        cos, sin = (f(angle)[:, None].astype(np.float64) for f in (np.cos, np.sin))
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate((a * cos - b * sin, a * sin + b * cos), axis=-1)

    def eager(q, k, v, at):
        s = np.where(lower(q, k), rotated(q, at) @ rotated(k, at).swapaxes(-1, -2) * D**-0.5, -1e38).astype(np.float32)
        p = np.exp(s - s.max(axis=-1, keepdims=True))
        return (p / p.sum(axis=-1, keepdims=True)).astype(np.float64) @ v

    report = check_attention(eager, rope=ROPE, head_dim=D, dtype=np.float64)
    assert report.faults == ("softmax in low precision",)
