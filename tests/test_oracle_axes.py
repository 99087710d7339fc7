"""Positions of several axes: functions as people write them for Flux, Wan, ERNIE and Kimi, right ones and broken ones.

Each is a loop or a table of its own, in float64 and float32; none is made by the oracle.
"""

from dataclasses import replace

import numpy as np
import pytest

from pyrope import Axes, Linear, Rope, check_rotation, identify, rotate

PARTS = (4, 6, 6)  # features of each axis, as Flux has (16, 56, 56)
D = sum(PARTS)
pytestmark = pytest.mark.usefixtures("needed_trials")
FLUX = Rope(D, 10000.0, "interleaved", axes=Axes("sections", tuple(n // 2 for n in PARTS), series="own"))


def flux(x, at, parts=PARTS, theta=10000.0, factor=1.0):
    """A table for each axis, one behind the other, and complex products of neighbours."""
    turns = []
    for row, n in zip(at, parts, strict=True):
        omega = 1.0 / theta ** (np.arange(0, n, 2, dtype=np.float64) / n) / factor
        turns.append(np.exp(1j * row[:, None] * omega))
    z = x.astype(np.float64).reshape(*x.shape[:-1], -1, 2)
    z = (z[..., 0] + 1j * z[..., 1]) * np.concatenate(turns, axis=-1)
    return np.stack((z.real, z.imag), axis=-1).reshape(x.shape).astype(x.dtype)


def one_table(x, at):
    """One table of all pairs, cut into the parts."""
    omega, turns, start = 1.0 / 10000.0 ** (np.arange(0, D, 2) / D), [], 0
    for row, n in zip(at, PARTS, strict=True):
        turns.append(np.exp(1j * row[:, None] * omega[start : start + n // 2]))
        start += n // 2
    z = x.astype(np.float64).reshape(*x.shape[:-1], -1, 2)
    z = (z[..., 0] + 1j * z[..., 1]) * np.concatenate(turns, axis=-1)
    return np.stack((z.real, z.imag), axis=-1).reshape(x.shape).astype(x.dtype)


def moved(change):
    """flux with other positions on axis 1."""

    def fn(x, at):
        at = at.copy()
        at[1] = change(at[1])
        return flux(x, at)

    return fn


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_a_block_of_features_for_each_axis_is_right(dtype):
    assert check_rotation(flux, FLUX, dtype=dtype).verdict == "right"
    slower = Rope(D, 10000.0, "interleaved", axes=FLUX.axes, scaling=Linear(2.0))
    assert check_rotation(lambda x, at: flux(x, at, factor=2.0), slower, dtype=dtype).verdict == "right"


@pytest.mark.parametrize(
    "fn, fault, words",
    [
        (one_table, "one series for all axes", "θ₀, θ₁, … over all axes"),
        (lambda x, at: flux(x, at, theta=2000.0), "wrong base", "2000"),
        (lambda x, at: flux(x, at[[0, 2, 1]]), "axes in another order", "(0, 2, 1)"),
        (lambda x, at: flux(x, at[[0, 0, 0]]), "one axis for all pairs", "axis 0"),
        (lambda x, at: flux(x, at + 1), "positions one too high", "(m + 1)·θ; this"),
        (moved(lambda m: m + 1), "positions one too high", "on axis 1 alone"),
        (moved(lambda m: m - 1), "positions one too low", "on axis 1 alone"),
        (moved(lambda m: m + 23), "positions shifted", "(m + 23)·θ, on axis 1 alone"),
        (moved(lambda m: m % 64), "positions modulo a length", "modulo 64, on axis 1 alone"),
        (moved(lambda m: m % 1000), "positions modulo a length", "modulo 1000, on axis 1 alone"),
        (moved(lambda m: np.minimum(m, 127)), "table clamped at its end", "at row 127, on axis 1 alone"),
        (moved(lambda m: np.minimum(m, 49)), "table clamped at its end", "at row 49, on axis 1 alone"),
        (lambda x, at: flux(x, -at), "direction", ""),
    ],
)
def test_what_is_wrong_has_a_name(fn, fault, words):
    report = check_rotation(fn, FLUX)
    assert report.verdict == "wrong"
    (finding,) = report.findings
    assert finding.fault == fault and words in finding.evidence, report


def by_list(owners, theta):
    """Any axis and frequency for each pair of halves."""

    def fn(x, at):
        angle = at[list(owners)].T * np.asarray(theta)
        half = x.shape[-1] // 2
        a, b, cos, sin = x[..., :half].astype(float), x[..., half:].astype(float), np.cos(angle), np.sin(angle)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(x.dtype)

    return fn


def halves(base, axes, p=8, **more):
    return Rope(2 * p, base, "half", axes=axes, **more)


SERIES = 5000.0 ** -(np.arange(8) / 8)
OWN = 5000.0 ** -(np.arange(4) / 4)
READ = {
    "sections": ([0, 0, 1, 1, 1, 2, 2, 2], SERIES, halves(5000.0, Axes("sections", (2, 3, 3)))),
    "interleaved": ([0, 1, 2, 0, 1, 2, 0, 0], SERIES, halves(5000.0, Axes("interleaved", (4, 2, 2)))),
    "by turns": ([0, 1] * 4, SERIES, halves(5000.0, Axes("interleaved", (4, 4)))),
    "ERNIE": ([1, 2] * 2 + [0] * 4, SERIES, halves(5000.0, Axes("listed", (1, 2, 1, 2, 0, 0, 0, 0)))),
    "axial": ([0] * 4 + [1] * 4, [*OWN, *OWN], halves(5000.0, Axes("axial"))),
    "Pixtral": ([0] * 4 + [1] * 4, [*SERIES[::2], *SERIES[1::2]], halves(5000.0, Axes("pixtral"))),
    "Kimi": ([1, 0] * 4, np.repeat(OWN, 2), halves(5000.0, Axes("listed", (1, 0) * 4, "own"))),
    "linear": ([0] * 4 + [1] * 4, SERIES / 3, halves(5000.0, Axes("sections", (4, 4)), scaling=Linear(3.0))),
}


@pytest.mark.parametrize("name", READ)
def test_which_axis_turns_each_pair_is_read(name):
    owners, theta, rope = READ[name]
    fn = by_list(owners, theta)
    found = identify(fn, 16, axes=max(owners) + 1)
    assert found.axes == tuple(owners) and found.rope == rope, found
    assert f"axes        {len(set(owners))}" in str(found)
    assert check_rotation(fn, rope).verdict == "right"


def test_flux_is_read():
    found = identify(flux, D, axes=3)
    assert found.rope == FLUX and found.axes == (0, 0, 1, 1, 1, 2, 2, 2), found
    assert identify(lambda x, at: flux(x, at[None].repeat(3, 0)), D).axes is None
    other = identify(lambda x, at: flux(x, at, theta=33.3), D, axes=3)
    assert other.rope is not None and abs(other.rope.base - 33.3) < 1e-4 and other.rope.axes == FLUX.axes, other


def test_whose_the_series_is_is_said():
    """Flux's blocks and Qwen2-VL's sections have the same axes."""
    shared = replace(FLUX, axes=replace(FLUX.axes, series="shared"))
    texts = [str(identify(lambda x, at, rope=rope: rotate(x, at, rope), D, axes=3)) for rope in (FLUX, shared)]
    assert "as          Axes(style='sections', sections=(2, 3, 3), series='own')" in texts[0]
    assert "series='own'" not in texts[1] and "as          Axes(style='sections', sections=(2, 3, 3)" in texts[1]


def test_an_offset_of_one_axis_alone_is_said():
    rope = replace(FLUX, axes=replace(FLUX.axes, series="shared"))
    found = identify(lambda x, at: rotate(x, at + np.array([[0], [1], [0]]), rope), D, axes=3)
    assert ("offset", "0, 1, 0 positions, axis by axis") in found.rows() and found.notes == ()
    assert found.rope == rope and found.precision == "cannot tell: the position offset differs from axis to axis"
    every = identify(lambda x, at: rotate(x, at + 1, rope), D, axes=3)
    assert ("offset", "1 position") in every.rows() and every.offsets == ()


def dealt(still):
    """Pairs (i, i + 8) that three axes turn in turn, but for those that stay as they are."""

    def fn(x, at):
        turns = np.stack([at[i % 3] * 10000.0 ** -(i / 8) * (i not in still) for i in range(8)], axis=-1)
        z = (x[..., :8] + 1j * x[..., 8:].astype(np.float64)) * np.exp(1j * turns)
        return np.concatenate((z.real, z.imag), axis=-1).astype(x.dtype)

    return fn


def test_pairs_that_stay_among_others_are_said():
    """As ggml's IMROPE leaves those whose section has ended."""
    read = identify(dealt({4, 6}), 16, axes=3)
    assert read.rotary_dim == 12 and read.axes == (0, 1, 2, 0, 2, 1)
    (note,) = read.notes
    assert note == (
        "features 4, 6, 12, 14 do not turn: they may follow an axis of the positions that was not given, or is always 0"
    )
    one = identify(lambda x, at: dealt({4, 6})(x, np.stack((at, at, at))), 16)
    assert one.notes == ("features 4, 6, 12, 14 do not turn",)
    assert identify(dealt(set()), 16, axes=3).notes == ()
    assert (
        identify(lambda x, at: np.concatenate((dealt(set())(x[..., :16], at), x[..., 16:]), -1), 20, axes=3).notes == ()
    )


def test_frequencies_of_no_rule_are_read_too():
    found = identify(by_list([0, 1] * 4, np.linspace(1, 0.1, 8)), 16, axes=2)
    assert found.rope is None and found.axes == (0, 1) * 4 and found.explanations[0].startswith("none of these")


def test_a_function_of_text_is_told_what_positions_are():
    """Qwen2-VL's rope, and a function that takes positions (n,)."""
    rope = Rope(16, 1e6, "half", axes=Axes("sections", (2, 3, 3)))
    theta = 1e6 ** -(np.arange(8) / 8)

    def text(x, at):
        angle = at[:, None] * np.concatenate((theta, theta))
        swapped = np.concatenate((-x[..., 8:], x[..., :8]), axis=-1)
        return (x * np.cos(angle) + swapped * np.sin(angle)).astype(x.dtype)

    report = check_rotation(text, rope)
    assert report.verdict == "not judged" and "so positions are (3, n): for a function of text" in report.failure.fix


def test_a_function_of_the_rotated_part_is_told_what_x_is():
    """DeepSeek's heads of 24 features, of which 8 turn, and a function that has tables for these."""
    rope = Rope(24, 10000.0, "interleaved-to-half", 8, "suffix")
    theta = 10000.0 ** -(np.arange(4) / 4)

    def part(x, at):
        cos, sin = np.cos(at[:, None] * theta), np.sin(at[:, None] * theta)
        a, b = x[..., ::2], x[..., 1::2]
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(x.dtype)

    report = check_rotation(part, rope)
    words = "the last 8 turn: for a function of these alone, check Rope(8, 10000, 'interleaved-to-half')"
    assert report.verdict == "not judged" and words in report.failure.fix
    assert check_rotation(part, Rope(8, 10000.0, "interleaved-to-half")).verdict == "right"
