"""What attention makes of single scores and features, read from candidates that are written by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from small_evidence import evidence, kind

from pyrope import Rope
from pyrope.oracle.ask import Unreadable
from pyrope.oracle.questions import Question
from pyrope.oracle.responses import dropped_weights, feature_response, score_response
from pyrope.oracle.truth import Spec

SPEC = Spec(2, 1, 16, True, scale=0.25)
FEATURES = (-3, -2, -1, -0.5, 0.5, 2, 3)


def asked(n=12, d=16):
    q, k = (np.random.default_rng(i).standard_normal((1, h, n, d)).astype(np.float32) / 4 for i, h in ((0, 2), (1, 1)))
    return Question("random", q, k, k)


def softmax(q, k, v, act=lambda s: s, scale=0.25):
    s = act(scale * (q @ k.swapaxes(-1, -2)))
    w = np.where(np.tri(*s.shape[-2:], dtype=bool), np.exp(s), 0)
    return w / w.sum(axis=-1, keepdims=True) @ v


def linear(q, k, v, phi=lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))):
    w = phi(q) @ phi(k).swapaxes(-1, -2)
    w = np.where(np.tri(*w.shape[-2:], dtype=bool), w, 0)
    return w / w.sum(axis=-1, keepdims=True) @ v


def about(fn, spec=SPEC, of=None, question=None):
    def asks(one):
        return fn(*(x.astype(np.float64) for x in (one.q, one.k, one.v)))

    return evidence([], [question or asked()], of or kind(), asks=None if fn is None else asks, spec=spec)


def test_scores_as_they_should_be_are_not_mentioned():
    assert score_response(about(softmax)) == ("", "")
    capped = replace(SPEC, softcap=5.0)
    assert score_response(about(lambda q, k, v: softmax(q, k, v, lambda s: 5 * np.tanh(s / 5)), capped)) == ("", "")


def test_scores_that_act_as_others():
    listed = "beside one of 1, scores of -8, -4, -2, -1, 2, 4, 8 act as "
    # Twice the score: beside a score of 1, which acts as 2, one of s acts as 2s − 2 + 1.
    assert score_response(about(lambda q, k, v: softmax(q, k, v, scale=0.5))) == ("", f"{listed}-17, -9, -5, -3, 3, 7, 15, expected themselves")  # fmt: skip
    clipped = score_response(about(lambda q, k, v: softmax(q, k, v, lambda s: np.clip(s, -3, 3))))[1]
    assert clipped == f"{listed}-3, -3, -2, -1, 2, 3, 3, expected themselves"
    capped = score_response(about(softmax, replace(SPEC, softcap=5.0)))[1]
    assert capped.endswith("expected -4.608, -3.32, -1.9, -0.9869, 1.9, 3.32, 4.608")


def test_what_is_within_rounding_is_no_response():
    u = 2.0**-24
    for slip, said in ((0.99, False), (1.01, True)):  # of 32 units for a score of 2, times 1 + 2
        fn = lambda q, k, v, slip=slip: softmax(q, k, v, lambda s: s + slip * 32 * 3 * u * (np.abs(s - 2) < 0.01))  # noqa: E731
        assert bool(score_response(about(fn))[1]) is said


@pytest.mark.parametrize(
    "fn", [None, lambda q, k, v: q[..., :1], lambda q, k, v: q * np.nan, lambda q, k, v: softmax(q, k, v) - 0.2]
)
def test_weights_that_cannot_be_read(fn):
    assert score_response(about(fn)) == ("", "")


def test_what_cannot_be_asked():
    def refuses(one):
        raise Unreadable("", "", "raised")

    some = replace(about(softmax), asks=refuses)
    assert score_response(some) == feature_response(some) == ("", "") and dropped_weights(some) == ""

    def double(q, k, v):
        return softmax(q, k, v, scale=0.5)

    for fields, said in (
        ({"head_dim": 7}, False),
        ({"head_dim": 8}, True),
        ({"window": 7}, False),
        ({"window": 8}, True),
    ):
        assert bool(score_response(about(double, replace(SPEC, **fields)))[1]) is said
    seen = []

    def note(one):
        seen.append(one)
        return np.zeros(1)

    score_response(replace(about(softmax, replace(SPEC, rope=Rope(16, 100.0, "half"))), asks=note))
    assert seen[0].positions.tolist() == [[3] * 8] and not seen[0].random and seen[0].q.dtype == np.float32
    assert seen[0].q.shape == (1, 2, 8, 16) and seen[0].k.shape == seen[0].v.shape == (1, 1, 8, 16)


def test_another_feature_map():
    assert feature_response(about(linear)) == ("", "")
    name, words = feature_response(about(lambda q, k, v: linear(q, k, v, lambda x: np.exp(x / 2))))
    shares = [f"{np.exp((x - 1) / 2):.4g}" for x in FEATURES]
    meant = [f"{(x + 1 if x > 0 else np.exp(x)) / 2:.4g}" for x in FEATURES]
    assert name == "another feature map"
    assert words == f"φ of -3, -2, -1, -0.5, 0.5, 2, 3, over φ(1), is {', '.join(shares)}, expected {', '.join(meant)}"


def test_weights_that_depend_on_more_are_no_feature_map():
    assert feature_response(about(softmax)) == ("", "")  # of the query, too

    def decaying(q, k, v):
        w = np.exp(k.mean(axis=-1, keepdims=True).swapaxes(-1, -2)) * 0.9 ** np.arange(k.shape[-2])[::-1]
        w = np.broadcast_to(w, (*q.shape[:-1], k.shape[-2]))
        return w / w.sum(axis=-1, keepdims=True) @ v

    assert feature_response(about(decaying)) == ("", "")  # of the place
    for slip, named in (
        (0.9, "another feature map"),
        (1.1, ""),
    ):  # of what rounding explains: 32 units, times 1 + φ(3)/φ(1)

        def fn(q, k, v, slip=slip):
            w = np.exp(k.mean(axis=-1, keepdims=True).swapaxes(-1, -2) / 2)
            w = w + (slip * 32 * 2.0**-24 * (1 + math.e) * math.exp(0.5)) * (w > math.exp(1.4)) * (q.max() == 2)
            w = np.broadcast_to(w, (*q.shape[:-1], k.shape[-2]))
            return w / w.sum(axis=-1, keepdims=True) @ v

        assert feature_response(about(fn))[0] == named
    assert feature_response(about(None)) == ("", "")


def test_weights_that_are_dropped():
    rng = np.random.default_rng(3)

    def dropping(share, factor=None, size=1.0):
        def fn(q, k, v):
            w = softmax(q, k, np.eye(k.shape[-2]))
            w = np.where(rng.random(w.shape) < share, 0, w) * (1 / (1 - share) if factor is None else factor)
            return (w @ v) * size

        return about(fn, question=asked(16))

    words = dropped_weights(dropping(0.25))
    assert words.endswith("of the weights are zeros, at random, and all others are the right ones times 1.333")
    assert 15 < float(words.partition("%")[0]) < 35
    assert (
        dropped_weights(dropping(0.0))
        == dropped_weights(dropping(0.25, 1.0))
        == dropped_weights(dropping(0.25, 2.0))
        == ""
    )
    assert dropped_weights(about(lambda q, k, v: softmax(q, k, v) * np.nan)) == ""
    assert dropped_weights(about(lambda q, k, v: softmax(q, k, v)[..., :1])) == ""
    assert (
        dropped_weights(about(lambda q, k, v: softmax(q, k, v) * (1.1 + v)))
        == dropped_weights(about(lambda q, k, v: 0 * q))
        == ""
    )
    assert dropped_weights(about(None)) == ""


def test_how_many_tokens_are_asked_for_dropped_weights():
    seen = []

    def note(one):
        seen.append(one)
        return np.zeros(1)

    for n, d, expected in ((40, 16, 16), (40, 64, 24), (9, 64, 9)):
        some = evidence([], [asked(n, d)], asks=note, spec=replace(SPEC, head_dim=d))
        assert dropped_weights(some) == "" and seen[-1].q.shape[-2] == expected and not seen[-1].random
        assert np.array_equal(seen[-1].v[0, 0, :, :expected], np.eye(expected))
