"""Kernels that are right but for some shapes, values, calls or positions, and what the evidence says about them.

Every candidate here is plain NumPy, written by hand: none is made by the code that has to recognise it.
"""

import warnings

import numpy as np
import pytest

from pyrope import Rope, check_rotation

D = 32
ROPE = Rope(D, 10000.0, "half")


def angles(m):
    return np.asarray(m, np.float64)[..., None] * 10000.0 ** (-np.arange(0, D, 2) / D)


def turn(x, m, cos=np.cos, sin=np.sin):
    c, s, p = cos(angles(m)), sin(angles(m)), D // 2
    a, b = x[..., :p].astype(float), x[..., p:].astype(float)
    return np.concatenate((a * c - b * s, b * c + a * s), axis=-1).astype(x.dtype)


def one_too_far_if(condition):
    return lambda x, m: turn(x, m + 1) if condition(x) else turn(x, m)


def heads(x):
    return x.shape[-3] if x.ndim > 2 else None


@pytest.mark.parametrize(("condition", "fault", "common"), [
    (lambda x: heads(x) == 1, "heads differ", "1 head"), (lambda x: heads(x) == 8, "heads differ", "8 heads"),
    (lambda x: heads(x) == 16, "heads differ", "16 heads"), (lambda x: heads(x) == 32, "heads differ", "32 heads"),
    (lambda x: heads(x) == 40, "heads differ", "40 heads"), (lambda x: x.ndim == 5, "heads differ", "x of 5 axes"),
    (lambda x: not x.flags.writeable, "strides ignored", "a read-only x"),
])  # fmt: skip
def test_what_all_wrong_calls_have_in_common_is_said(condition, fault, common):
    report = check_rotation(one_too_far_if(condition), ROPE)
    assert report.faults == (fault,)
    assert f"so all calls with {common} are wrong, and no others" in report.findings[0].evidence


def test_a_length_is_not_taken_for_a_number_of_heads():
    """Long calls of one head and of two are wrong: that is not one head."""
    report = check_rotation(one_too_far_if(lambda x: x.shape[-2] > 64), ROPE)
    assert report.faults == ("some lengths wrong",) and "wrong from 65 on" in report.findings[0].evidence
    report = check_rotation(one_too_far_if(lambda x: x.ndim == 3 and x.shape[0] == x.shape[1] == 8), ROPE)
    assert report.faults == ("heads read as positions",)


@pytest.mark.parametrize(("fn", "evidence"), [
    (lambda x, m: np.nan_to_num(turn(x, m)), "a row of nan comes out as finite numbers"),
    (lambda x, m: turn(np.where(np.isinf(x), 0, x), m), "a row of inf comes out as finite numbers"),
    (lambda x, m: turn(x, m) * (np.abs(x).max(initial=0) >= 1e-6), "small x, times 2^-60"),
    (lambda x, m: np.clip(turn(x, m), -1e30, 1e30).astype(x.dtype), "large x, times 2^100"),
    (lambda x, m: turn(x, m + 1) if x.size and (np.abs(x) == 1).all() else turn(x, m), "x of ones and minus ones"),
])  # fmt: skip
def test_values_that_are_not_rotated_are_not_linear(fn, evidence):
    report = check_rotation(fn, ROPE)
    assert report.faults == ("not linear",) and evidence in report.findings[0].evidence


@pytest.mark.parametrize("which", [6, 7, 9, 10, 11, 12])
def test_a_single_call_that_differs_is_noticed(which):
    count = [0]

    def fn(x, m):
        count[0] += 1
        return turn(x, m + (count[0] == which))

    assert check_rotation(fn, ROPE).faults == ("state between calls",)


def test_scattered_wrong_positions_are_listed_beside_right_ones():
    report = check_rotation(lambda x, m: turn(x, np.where((m % 16 == 0) & (m > 0), m - 1, m)), ROPE)
    (finding,) = report.findings
    assert "wrong at positions 16, 32, 64" in finding.evidence and "right at 17, 31, 33" in finding.evidence
    assert finding.since is None  # "from position 16 on" would not be true


def test_partners_that_are_not_expected_are_shown():
    def mirrored(x, m):
        y = turn(np.concatenate((x[..., : D // 2], x[..., : D // 2 - 1 : -1]), axis=-1), m)
        return np.concatenate((y[..., : D // 2], y[..., : D // 2 - 1 : -1]), axis=-1)

    (finding,) = check_rotation(mirrored, ROPE).findings
    assert "the pairs are 0 and 31, 1 and 30, 2 and 29, …, expected 0 and 16, 1 and 17, 2 and 18" in finding.evidence


def test_what_becomes_of_features_that_should_stay():
    partial = Rope(2 * D, 10000.0, "half", D)

    def scaled(x, m):
        return np.concatenate((turn(x[..., :D], m), (1.25 * x[..., D:]).astype(x.dtype)), axis=-1)

    def signed(x, m):  # something else is wrong too, so that no single mistake predicts it all
        return scaled(x, m) * np.where(np.arange(2 * D) == 3, -1, 1).astype(x.dtype)

    (finding,) = check_rotation(signed, partial).findings
    assert "features 32 to 63, which should stay, are multiplied with 1.25" in finding.evidence


def test_blocks_are_shown_with_digits_that_differ():
    """2π cut to 3.14159 · 2 in the cosine alone: at the first wrong position four digits are the same."""
    (finding,) = check_rotation(
        lambda x, m: turn(x, m, lambda a: np.cos(np.fmod(a, 2 * 3.14159)), np.sin), ROPE
    ).findings
    measured, expected = finding.evidence.partition("is multiplied with ")[2].split(", expected ")
    assert measured != expected


def test_a_changed_dtype_is_not_judged():
    def narrowed(x, m):
        y = turn(x, m)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # NumPy 2.5 deprecates what this candidate does
            x.dtype = np.int32
        return y

    report = check_rotation(narrowed, ROPE)
    assert report.verdict == "not judged" and "changes the dtype of x to int32" in report.failure.reason


@pytest.mark.parametrize("message", ["x" * 10**6, "a line\n" * 10**4])
def test_long_messages_are_cut(message):
    def raising(x, m):
        raise ValueError(message)

    assert len(str(check_rotation(raising, ROPE))) < 20_000


def test_predictions_do_not_use_a_function_that_a_candidate_replaced(monkeypatch):
    """A candidate that puts another function in the place of NumPy's cosine must not be predicted with it."""
    cos = np.cos

    def patching(x, m):
        monkeypatch.setattr(np, "cos", lambda a: cos(np.fmod(a, 6.2)))
        return turn(x, m, np.cos)

    report = check_rotation(patching, ROPE, max_position=4095)
    assert report.verdict == "wrong" and not any("modulo" in name for name in report.faults)


def test_what_a_float32_angle_may_miss_is_not_called_right():
    """One feature is off at every position; far out that is within the bound of a float32 angle, and still not right."""

    def fn(x, m):
        y = turn(x, m)
        y[..., 2] = (y[..., 2] * 1.001).astype(x.dtype)
        return y

    (finding,) = check_rotation(fn, ROPE).findings
    assert "right at" not in finding.evidence and "in 1 of 32 features, feature 2 alone" in finding.evidence
