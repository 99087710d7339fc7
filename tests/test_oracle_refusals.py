"""A candidate that refuses calls that it must take is not judged, however right its other answers are."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import pyrope
from pyrope import Rope, check_attention, check_linear_attention, check_rotation

D = 32
ROPE = Rope(D, 10000.0, "half")
THETA = 10000.0 ** -(np.arange(D // 2) / (D // 2))


def turn(x, angle):
    a, b, cos, sin = x[..., : D // 2], x[..., D // 2 :], np.cos(angle), np.sin(angle)
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def attention(q, k, v):
    n, m = q.shape[2], k.shape[2]
    scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2) / np.sqrt(D)
    scores = np.where(np.arange(m) <= np.arange(m - n, m)[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True) @ v).astype(np.float32)


def linear(q, k, v, angle):
    q, k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))).astype(np.float64) for x in (q, k))
    seen = np.tri(q.shape[2])
    weights = seen * (turn(q, angle) @ turn(k, angle).swapaxes(-1, -2))
    return (weights @ v / (seen * (q @ k.swapaxes(-1, -2))).sum(axis=-1, keepdims=True)).astype(np.float32)


# Positions are (b, n): what is written for (n,) takes a batch of one, or one token, at most.


def one_table(q, k, v, positions):
    angle = np.outer(positions, THETA)
    return attention(turn(q, angle), turn(k, angle), v)


def one_column(q, k, v, positions):
    angle = positions[:, None] * THETA
    return attention(turn(q, angle), turn(k, angle), v)


def squeezed(q, k, v, positions):
    angle = np.squeeze(positions)[:, None] * THETA
    return attention(turn(q, angle), turn(k, angle), v)


@pytest.mark.parametrize(
    "fn, heads, takes",
    [(one_table, 4, '"130 tokens"'), (squeezed, 4, '"130 tokens"'), (one_column, 3, '"one token"')],
)
def test_positions_of_one_row_are_not_enough(fn, heads, takes):
    report = check_attention(fn, rope=ROPE, head_dim=D, heads=heads)
    assert report.verdict == "not judged" and not report.findings
    assert "it refuses 6 of 7 plain calls, " in report.failure.reason
    assert report.failure.reason.partition("it takes ")[2].startswith(takes)
    assert "could not be broadcast" in report.failure.reason and "positions (b, n)" in report.failure.fix
    assert f'"random", q (3, {heads}, 24, {D})' in report.failure.received
    assert "positions (3, 24)" in report.failure.received
    assert any(f"in {fn.__name__}" in line for line in report.failure.frames)  # the user's own lines
    with pytest.raises(pyrope.NotJudged) as caught:
        report.raise_unless_ok()
    assert isinstance(caught.value.__cause__, ValueError)


def test_positions_of_one_row_are_not_enough_for_linear_attention():
    fn = lambda q, k, v, positions: linear(q, k, v, np.outer(positions, THETA))  # noqa: E731
    report = check_linear_attention(fn, rope=ROPE)
    assert report.verdict == "not judged" and '"264 tokens" (q (1, 4, 264, 32)' in report.failure.reason
    by_row = lambda q, k, v, positions: linear(q, k, v, positions[:, None, :, None] * THETA)  # noqa: E731
    assert check_linear_attention(by_row, rope=ROPE, max_position=512).verdict == "right"


def test_known_mistakes_are_named_even_so_but_nothing_unexplained():
    """What a function gets wrong in calls for which it was not written is no mistake of its own."""
    scaled = check_attention(lambda *x: one_table(8 * x[0], *x[1:]), rope=ROPE, head_dim=D, heads=1)
    assert scaled.verdict == "wrong" and scaled.faults == ("another scale",)
    assert check_attention(lambda *x: one_table(*x) ** 3, rope=ROPE, head_dim=D, heads=1).verdict == "not judged"


def test_what_changes_the_shapes_of_its_inputs_is_not_judged():
    """Several questions share their arrays, and must not get what an earlier call made of them."""

    def fn(q, *others):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # NumPy 2.5 deprecates what this candidate does
            q.shape = (-1,)
        return q

    for report in (check_attention(fn, head_dim=D), check_linear_attention(fn, rope=ROPE)):
        assert report.verdict == "not judged" and "changes the shape of q to (9216,)" in report.failure.reason


# Any number of rows and tokens


def taking(condition):
    def fn(q, k, v):
        if not condition(*q.shape):
            raise ValueError("not written for this")
        return attention(q, k, v)

    return fn


@pytest.mark.parametrize(
    "condition",
    [lambda b, h, n, d: b == 1, lambda b, h, n, d: n % 64 == 0, lambda *q: q == (3, 4, 24, D), lambda b, h, n, d: n == 1],
    ids=["one row", "multiples of 64", "one shape", "one token"],
)  # fmt: skip
def test_few_shapes_are_not_enough(condition):
    report = check_attention(taking(condition), head_dim=D)
    assert report.verdict == "not judged" and "(not written for this)" in report.failure.reason
    assert "row by row or by padding" in report.failure.fix


@pytest.mark.parametrize(
    "condition",
    [lambda b, h, n, d: n % 8 == 0, lambda b, h, n, d: n < 100, lambda b, h, n, d: n > 1],
    ids=["multiples of 8", "short calls", "no decoding"],
)
def test_what_may_be_refused_is_a_note(condition):
    report = check_attention(taking(condition), head_dim=D, cache=False)
    assert report.verdict == "right" and any("(not written for this)" in note for note in report.notes)


def rising(q, k, v, positions):
    if (np.diff(positions) != 1).any():
        raise ValueError("consecutive positions only")
    angle = positions[:, None, :, None] * THETA
    return attention(turn(q, angle), turn(k, angle), v)


def test_a_rotation_that_is_written_for_rising_positions_is_judged():
    report = check_attention(rising, rope=ROPE, head_dim=D)
    assert report.verdict == "right" and any("far apart" in note for note in report.notes)


# Rotations: a sample of many positions, and at least half of the calls of many shapes


def rotating(condition):
    def fn(x, m):
        if not condition(x, m):
            raise ValueError("not written for this")
        return turn(x, m[:, None] * THETA).astype(x.dtype)

    return fn


@pytest.mark.parametrize(
    "condition",
    [lambda x, m: len(m) <= 7, lambda x, m: len(m) in (1, 4, 6, 7), lambda x, m: len(x) == 3],
    ids=["seven rows", "a few lengths", "three heads"],
)
def test_few_shapes_are_not_enough_for_a_rotation(condition):
    report = check_rotation(rotating(condition), ROPE)
    assert report.verdict == "not judged" and "(not written for this)" in report.failure.reason
    assert "positions of shape (" in report.failure.received and any("in fn" in line for line in report.failure.frames)


def test_what_a_rotation_takes_is_in_the_reason():
    report = check_rotation(rotating(lambda x, m: len(m) <= 7), ROPE)
    assert "calls of many shapes, and takes 1 row, " in report.failure.reason
    wrong = check_rotation(lambda x, m: rotating(lambda x, m: len(m) <= 7)(x, m + 1), ROPE)
    assert wrong.faults == ("positions one too high",)


@pytest.mark.parametrize(
    "condition",
    [lambda x, m: len(m) <= 64, lambda x, m: x.ndim == 3, lambda x, m: len(m) > 1, lambda x, m: np.isfinite(x).all()],
    ids=["64 rows", "three axes", "no single row", "finite x"],
)
def test_what_a_rotation_may_refuse_is_a_note(condition):
    report = check_rotation(rotating(condition), ROPE)
    assert report.verdict == "right" and any("(not written for this)" in note for note in report.notes)
