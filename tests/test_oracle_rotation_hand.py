"""Every known mistake of a rotation as numbers worked by hand: what `rotation_faults` predicts must be these.

A broken candidate and the prediction of its mistake come from the same change, so that an error in it would cancel out in
a check. Here nothing but NumPy and the formulas of the rescalings is used. θ = (1, 0.1, 0.01, 0.001) unless said otherwise.
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from pyrope import Axes, DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN
from pyrope.oracle import rotation_faults as module
from pyrope.oracle.recipes import OnOneAxis, recipe_of
from pyrope.oracle.rotation_faults import FAULTS, Measurements

BASE = 10000.0
PLAIN = Rope(8, BASE, "half")
W = np.array([1, 0.1, 0.01, 0.001])
I = np.arange(4)  # noqa: E741
LINEAR = replace(PLAIN, scaling=Linear(4.0))
# 4·ln(4096/2πt)/ln 10000 is 1.309 for 32 turns and 2.814 for one: the ramp runs from pair 1 to pair 3.
YARN = replace(PLAIN, scaling=YaRN(4.0, 4096))
FAST, SLOW = (4 * math.log(4096 / (2 * math.pi * turns)) / math.log(BASE) for turns in (32, 1))
WHOLE = replace(YARN, scaling=replace(YARN.scaling, truncate=False))
A = 0.1 * math.log(4) + 1  # its attention factor
LLAMA = replace(PLAIN, scaling=Llama3(4.0, 1.0, 4.0, 4096))  # 651.9, 65.2, 6.52 and 0.652 turns
NTK = replace(PLAIN, scaling=DynamicNTK(2.0, 64, 256))  # 2·4 − 1 = 7
LONG = replace(PLAIN, scaling=LongRoPE((1.0, 2.0, 3.0, 4.0), (5.0, 6.0, 7.0, 8.0), 4.0, 64, length=256))
PART, END = Rope(8, BASE, "half", 4), Rope(8, BASE, "half", 4, "suffix")
GEMMA = replace(PLAIN, scaling=Proportional(0.5, 2.0))
NO = Measurements()


def changes(name, rope=PLAIN, measured=None):
    return list(FAULTS[name].changes(rope, measured))


def ramp(lo, hi, s=4.0):
    gamma = np.clip((I - lo) / (hi - lo), 0, 1)
    return W * (1 - gamma + gamma / s)


def by_turns(low, high, length=4096.0, s=4.0, w=W):
    t = np.clip((length * w / (2 * np.pi) - low) / (high - low), 0, 1)
    return w * ((1 - t) / s + t)


def powers(base, p=4):
    return base ** (-np.arange(p) / p)


def test_the_ropes_have_the_frequencies_of_the_formulas():
    for rope, theta in (
        (PLAIN, W),
        (LINEAR, W / 4),
        (YARN, ramp(1, 3)),
        (WHOLE, ramp(FAST, SLOW)),
        (LLAMA, by_turns(1, 4)),
    ):
        np.testing.assert_allclose(recipe_of(rope).theta, theta, rtol=1e-12)
    np.testing.assert_allclose(recipe_of(NTK).theta, powers(BASE * 7 ** (8 / 6)), rtol=1e-12)
    np.testing.assert_allclose(recipe_of(LONG).theta, W / [5, 6, 7, 8], rtol=1e-12)
    np.testing.assert_allclose(recipe_of(GEMMA).theta, [0.5, 0.05, 0, 0], rtol=1e-12)


# --- Frequencies ---

THETA = {
    "scaling ignored": [(LINEAR, [W]), (YARN, [W]), (PLAIN, []), (GEMMA, [[1, 0.1, 0, 0]]), (replace(GEMMA, scaling=Proportional(0.5)), [])],
    "linear scaling instead": [(LLAMA, [W / 4]), (YARN, [W / 4, W / 4]), (LINEAR, []), (PLAIN, []), (GEMMA, [])],
    "NTK scaling instead": [(LINEAR, [powers(BASE * 4 ** (8 / 6))]), (NTK, [])],
    "YaRN scaling instead": [(LINEAR, [ramp(1, 3)]), (YARN, [])],
    "llama3 scaling instead": [(LINEAR, [by_turns(1, 4)]), (LLAMA, [])],
    "YaRN ramp truncation": [(YARN, [ramp(FAST, SLOW)]), (WHOLE, [ramp(1, 3)]), (LLAMA, [])],
    "YaRN betas swapped": [(YARN, [W * [1, 1, 1, 0.25]]), (WHOLE, [ramp(SLOW, FAST)]), (LINEAR, [])],
    "YaRN ramp over turns": [(YARN, [by_turns(1, 32)]), (LINEAR, [])],
    "ramp inverted": [
        (YARN, [W * [0.25, 0.25, 0.625, 1]]), (WHOLE, [W / 4 + W - ramp(FAST, SLOW), W * [1, 1, 1.25 - ramp(FAST, SLOW)[2] / 0.01, 0.25]]),
        (LLAMA, [W * [0.25, 0.25, 0.25, 1]]), (LINEAR, []),
    ],
    "YaRN ramp clamped": [(YARN, []), (replace(YARN, scaling=YaRN(4.0, 65536)), [W * [1, 1, 1, 0.25]]), (LINEAR, [])],
    "original length mistaken": [(LLAMA, [by_turns(1, 4, 16384.0)]), (YARN, [ramp(1, 4)]), (LINEAR, [])],
    "llama3 low and high swapped": [(LLAMA, [W * [0.25, 0.25, 0.25, 1]]), (YARN, []), (replace(LLAMA, scaling=Llama3(4.0, 1.0, 4.0, 1024)), [
        W * [1, 1, 0.25, 0.25], W * [1, 1, 1, 0.25], W * [0.25, 0.25, 1.25 - by_turns(1, 4, 1024.0)[2] / 0.01, 1]])],
    "linear factor inverted": [(LINEAR, [W * 4]), (PLAIN, []), (replace(PLAIN, scaling=Linear(1.0)), [])],
    "linear factor applied twice": [(LINEAR, [W / 16]), (YARN, [])],
    "another factor": [(LINEAR, [W / 6]), (PLAIN, [W / 1.5]), (YARN, [ramp(1, 3, 6.0)] * 2), (NTK, []), (GEMMA, []), (LONG, [])],
    "NTK exponent missing": [(NTK, [powers(BASE * 7)]), (LINEAR, [])],
    "LongRoPE's other list": [(LONG, [W / [1, 2, 3, 4]]), (YARN, [])],
    "LongRoPE factors inverted": [(LONG, [W * [5, 6, 7, 8]]), (YARN, [])],
    "exponent over the head size": [(PART, [[1, BASE**-0.25]]), (PLAIN, [])],
    "exponent over r − 2": [(PLAIN, [BASE ** (-I / 3)]), (Rope(2, BASE, "half"), []), (LINEAR, [BASE ** (-I / 3) / 4]), (GEMMA, [])],
    "exponent without its 2": [(PLAIN, [BASE ** (-I / 8)]), (LLAMA, [by_turns(1, 4, w=BASE ** (-I / 8))])],
    "exponent doubled": [(PLAIN, [BASE ** (-I / 2)])],
    "exponent over another width": [(PLAIN, [BASE ** (-2 * I / 512)])],
    "index counted from 1": [(PLAIN, [BASE ** (-(I + 1) / 4), BASE ** (-(2 * I + 1) / 8)])],
    "degrees": [(PLAIN, [W * math.pi / 180, W * 180 / math.pi])],
    "frequencies times 2π": [(PLAIN, [W * 2 * math.pi, W * math.pi, W / 2 / math.pi])],
    "frequencies in reverse": [(PLAIN, [W[::-1]])],
    "frequencies dealt to axes": [(PLAIN, [W[[0, 2, 1, 3]]]), (Rope(10, 32.0, "half"), [(32 ** (-np.arange(5) / 5))[[0, 2, 4, 1, 3]]])],
    "rotated twice": [(PLAIN, [2 * W]), (Rope(8, BASE, "interleaved-to-half"), [])],
    "wrong base": [(PLAIN, [powers(500000.0)]), (Rope(8, 500000.0, "half"), [W]), (LINEAR, [powers(500000.0) / 4])],
}  # fmt: skip


@pytest.mark.parametrize("name", THETA)
def test_frequencies_of_mistakes(name):
    for rope, expected in THETA[name]:
        found = [change.fields["theta"] for change in changes(name, rope)]
        assert len(found) == len(expected), (name, rope)
        for theta, by_hand in zip(found, expected, strict=True):
            np.testing.assert_allclose(theta, by_hand, rtol=2e-7, atol=1e-300, err_msg=f"{name}, {rope}")


def test_another_factor_may_have_the_attention_factor_that_follows():
    alone, both = changes("another factor", YARN)
    assert "factor" not in alone.fields and both.fields["factor"] == pytest.approx(0.1 * math.log(6) + 1)


def test_a_ramp_over_wavelengths():
    wave, lo, hi = 2 * np.pi / W, 4096 / 32, 4096.0
    gamma = np.clip((wave - lo) / (hi - lo), 0, 1)
    (change,) = changes("YaRN ramp over wavelengths", YARN)
    np.testing.assert_allclose(change.fields["theta"], W * (1 - gamma + gamma / 4), rtol=1e-12)
    assert changes("YaRN ramp over wavelengths", replace(YARN, scaling=replace(YARN.scaling, beta_fast=1.0))) == []


def test_attention_factors_that_come_with_a_rule():
    assert A != 1 and recipe_of(YARN).factor == pytest.approx(A)
    assert [change.fields.get("factor") for change in changes("linear scaling instead", YARN)] == [1, None]
    assert changes("YaRN scaling instead", LINEAR)[0].fields["factor"] == pytest.approx(A)
    assert changes("scaling ignored", YARN)[0].fields["factor"] == 1
    assert (
        changes("rotated twice", YARN)[0].fields["factor"] == pytest.approx(A * A)
        and "factor" not in changes("rotated twice")[0].fields
    )
    (still,) = changes("not rotated", YARN)
    assert (
        not still.fields["theta"].any()
        and still.fields["factor"] == 1
        and np.array_equal(still.fields["reads"], still.fields["writes"])
    )


def test_bases_that_are_measured():
    def bases(rope, *measured):
        return [change.note for change in changes("wrong base", rope, Measurements(bases=measured))]

    assert bases(PLAIN, 500.0, 10000.0, 1.0, 2e12, 1e12) == ["base 500 instead of 10000", "base 1e+12 instead of 10000"]
    assert bases(PLAIN, 10000.04) == ["base 10000.04 instead of 10000"]
    grown = 7 ** (8 / 6)
    assert bases(NTK, 5000 * grown, 5123 * grown) == ["base 5000 instead of 10000"]  # nobody chooses 5123
    (change,) = changes("wrong base", NTK, Measurements(bases=(5000 * grown,)))
    np.testing.assert_allclose(change.fields["theta"], powers(5000 * grown), rtol=1e-12)


def test_formulas_of_dynamic_ntk():
    found = {change.note.partition(": ")[2]: change.fields["theta"] for change in changes("dynamic NTK formula", NTK)}
    power = 8 / 6
    stretches = {
        "factor·N/L, without − (factor − 1)": 8**power, "N/L, without the factor": 4**power, "factor, whatever the length": 2**power,
        "factor·N/L − factor": 6**power, "the exponent (r − 2)/r": 7 ** (6 / 8), "the exponent r/(r − 1)": 7 ** (8 / 7), "the exponent 1 + 2/r": 7**1.25,
        "the length 257 instead of 256": (2 * 257 / 64 - 1) ** power, "the length 255 instead of 256": (2 * 255 / 64 - 1) ** power,
    }  # fmt: skip
    assert found.keys() == {*stretches, ""}
    for name, stretch in stretches.items():
        np.testing.assert_allclose(found[name], powers(BASE * stretch), rtol=1e-12)
    np.testing.assert_allclose(found[""], W / 7, rtol=1e-12)
    wide = [change.note for change in changes("dynamic NTK formula", replace(NTK, rotary_dim=4))]
    assert any("the exponent d/(d − 2)" in note for note in wide)
    base = 51234.0 * 7**power
    notes = [change.note for change in changes("dynamic NTK formula", NTK, Measurements(bases=(base, 5e4 * 7**power)))]
    assert f"base times {base / BASE:.6g}, {7**power:.6g} expected" in notes and len(notes) == len(found) + 1
    short = replace(NTK, scaling=DynamicNTK(2.0, 64, 32))
    assert "factor, whatever the length" in [
        change.note.partition(": ")[2] for change in changes("dynamic NTK formula", short)
    ]
    assert changes("dynamic NTK formula", LINEAR) == []
    (missing,) = changes("NTK exponent missing", NTK)
    assert missing.note == "base times 7"


def test_factors_that_are_measured():
    def factors(rope, *stretches):
        return [
            (change.note, change.fields["theta"])
            for change in changes("another factor", rope, Measurements(stretches=stretches))
        ]

    ((note, theta),) = factors(LINEAR, 8.0, 4.0, 0.5)
    assert note == "factor 8 instead of 4" and theta == pytest.approx(W / 8)
    ((note, theta),) = factors(LINEAR, 1.5)
    assert note == "factor 1.5 instead of 4" and theta == pytest.approx(W / 1.5)
    ((note, theta),) = factors(PLAIN, 0.5)
    assert note == "all frequencies over 0.5" and theta == pytest.approx(2 * W)


def test_rules_that_are_measured():
    found = Measurements(rules=("one", "two"), theta=W / 3)
    (change,) = changes("another rescaling", PLAIN, found)
    assert change.note == "the frequencies are those of one, or of two" and change.fields["theta"] is found.theta
    assert changes("another rescaling", PLAIN, NO) == []
    twenty = 4 * math.log(4096 / (40 * math.pi)) / math.log(BASE)
    np.testing.assert_allclose(changes("another rescaling", WHOLE)[0].fields["theta"], ramp(twenty, SLOW), rtol=1e-12)
    np.testing.assert_allclose(changes("another rescaling", LLAMA)[0].fields["theta"], by_turns(0.5, 6), rtol=1e-12)
    np.testing.assert_allclose(changes("another rescaling")[0].fields["theta"], by_turns(1, 4, 8192.0, 8.0), rtol=1e-12)
    assert changes("another rescaling", LINEAR) == []


def test_exponents_over_any_width():
    rope = Rope(64, BASE, "half", 32)
    found = [change.note for change in changes("exponent over another width", rope, NO)]
    assert found == [f"2i/{k}" for k in (31, 33, 256, 512, 768, 1024, 1280, 1536, 2048, 3072, 4096, 5120, 8192)]
    (change,) = changes("exponent over another width", GEMMA, NO)
    assert change.note == "2i/4, over the features that turn"
    assert change.fields["theta"] == pytest.approx([0.5, 0.005, 0, 0])
    twice = Rope(256, BASE, "half", 128)  # 256 is both d and 2r
    assert "2i/256" not in [change.note for change in changes("exponent over another width", twice, NO)]
    four = Rope(1026, BASE, "half", 514)
    assert "2i/512" not in [change.note for change in changes("exponent over another width", four, NO)]


def test_running_products():
    rope = Rope(128, BASE, "half")
    ratio = np.float32(BASE ** (-1 / 64))
    theta, product = [], np.float32(1)
    for _ in range(64):
        theta.append(float(product))
        product = product * ratio
    (change,) = changes("recursive frequencies", rope)
    assert change.fields["theta"].tolist() == theta
    assert changes("recursive frequencies", Rope(8, 16.0, "half")) == []  # powers of two: no product is rounded
    three = changes("ggml's recurrence", rope, NO)
    assert [change.fields["ratio"] for change in three] == [
        float(ratio),
        float(np.nextafter(ratio, 1, dtype="f4")),
        float(np.nextafter(ratio, 0, dtype="f4")),
    ]
    assert (
        changes("recursive frequencies", Rope(4, BASE, "half"))
        == changes("recursive frequencies", replace(rope, scaling=Linear(2.0)))
        == []
    )


def test_positions_that_are_divided_in_integers():
    down, rounded = changes("positions divided in integers", LINEAR)
    assert down.fields["place"](np.array([0, 3, 4, 11])).tolist() == [0, 0, 1, 2] and down.note == "⌊m/4⌋, for m/4"
    assert rounded.fields["place"](np.array([0, 3, 4, 11])).tolist() == [0, 1, 1, 3]
    assert rounded.note == "m/4, rounded, for m/4"
    for change in (down, rounded):
        np.testing.assert_allclose(change.fields["theta"], W)
    assert changes("positions divided in integers", YARN) == []


# --- Pairs ---


def pairs_of(change, name="reads"):
    return [tuple(pair) for pair in change.fields[name].tolist()]


HALVES, NEIGHBOURS = [(0, 4), (1, 5), (2, 6), (3, 7)], [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_pairings():
    one, two = changes("wrong pairing")
    assert pairs_of(one) == pairs_of(one, "writes") == NEIGHBOURS and one.note == "interleaved instead of half"
    assert pairs_of(two) == NEIGHBOURS and pairs_of(two, "writes") == HALVES
    for layout, other in (
        ("interleaved", HALVES),
        ("interleaved-to-half", HALVES),
        ("half-to-interleaved", NEIGHBOURS),
    ):
        (change,) = changes("wrong pairing", Rope(8, BASE, layout))
        assert pairs_of(change) == pairs_of(change, "writes") == other
    assert changes("wrong pairing", Rope(2, BASE, "half")) == []
    assert pairs_of(changes("wrong pairing", END)[0]) == [(4, 5), (6, 7)]
    (mixed,) = changes("repeated table with split features")
    assert pairs_of(mixed) == HALVES and mixed.fields["angles"].tolist() == [[0, 2], [0, 2], [1, 3], [1, 3]]
    (mixed,) = changes("concatenated table with interleaved features")
    assert pairs_of(mixed) == NEIGHBOURS and mixed.fields["angles"].tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert changes("repeated table with split features", Rope(2, BASE, "half")) == []
    assert changes("interleaved-to-half in place", Rope(8, BASE, "interleaved-to-half"))[0].fields == {"in_place": True}
    assert changes("interleaved-to-half in place") == []


def test_widths():
    (whole,) = changes("whole head rotated", PART)
    assert (
        pairs_of(whole) == HALVES
        and whole.fields["theta"] == pytest.approx(W)
        and whole.note == "8 features turn instead of 4"
    )
    assert changes("whole head rotated") == []
    (gemma,) = changes("whole head rotated", GEMMA)
    np.testing.assert_allclose(gemma.fields["theta"], W / 2)
    (half,) = changes("half the width rotated")
    assert pairs_of(half) == [(0, 2), (1, 3)] and half.fields["theta"] == pytest.approx([1, 0.01])
    assert (
        changes("half the width rotated", Rope(8, BASE, "half", 2))
        == changes("half the width rotated", Rope(8, BASE, "half", 6))
        == []
    )
    made = changes("another rotary width")  # six of eight
    assert [pairs_of(change) for change in made] == [[(0, 3), (1, 4), (2, 5)]] * 2 + [[(2, 5), (3, 6), (4, 7)]] * 2
    assert made[0].fields["theta"] == pytest.approx(powers(BASE, 3)) and made[1].fields["theta"] == pytest.approx(W[:3])
    measured = changes("another rotary width", PART, Measurements(width=8))
    assert [change.note for change in measured] == ["8 features turn, 4 expected"] * 2
    for width in (None, 4, 10):
        assert changes("another rotary width", PART, Measurements(width=width)) == []
    assert changes("another rotary width", GEMMA, Measurements(width=4)) == []
    (end,) = changes("wrong end rotated", PART)
    assert pairs_of(end) == [(4, 6), (5, 7)] and end.note == "the last features turn"
    (end,) = changes("wrong end rotated", END)
    assert (
        pairs_of(end) == [(0, 2), (1, 3)]
        and end.note == "the first features turn"
        and changes("wrong end rotated") == []
    )


def test_proportional_rotations():
    one, two = changes("proportional instead of contiguous", PART)
    assert pairs_of(one) == pairs_of(two) == pairs_of(two, "writes") == [(0, 4), (1, 5)] and "theta" not in two.fields
    assert one.fields["theta"] == pytest.approx([1, 0.1])
    assert (
        changes("proportional instead of contiguous")
        == changes("proportional instead of contiguous", Rope(8, BASE, "interleaved", 4))
        == []
    )
    one, two = changes("contiguous instead of proportional", GEMMA)
    assert pairs_of(one) == pairs_of(two) == [(0, 2), (1, 3)]
    assert one.fields["theta"] == pytest.approx([0.5, 0.005]) and two.fields["theta"] == pytest.approx([0.5, 0.05])
    assert changes("contiguous instead of proportional", replace(PLAIN, scaling=Proportional(1.0, 2.0))) == []


# --- Positions ---

AT = np.array([3, 0, 5, 5000, 40000])
PLACES = {
    "positions one too high": [[4, 1, 6, 5001, 40001]], "positions one too low": [[2, -1, 4, 4999, 39999]], "positions shifted": [[20, 17, 22, 5017, 40017]],
    "positions in int16": [[3, 0, 5, 5000, 40000 - 65536]], "positions ignored": [[0, 1, 2, 3, 4]], "consecutive positions assumed": [[3, 4, 5, 6, 7]],
    "first position taken as 0": [[0, -3, 2, 4997, 39997], [3, 0, 5, 5000, 40000]], "positions of the first chunk repeated": [[3, 0, 5, 3, 0]],
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_positions_of_mistakes(name):
    found = changes(name)
    assert [np.asarray(change.fields["place"](AT)).tolist() for change in found] == PLACES[name]
    for change, expected in zip(found, PLACES[name], strict=True):  # (axes, n), each by itself
        assert np.asarray(change.fields["place"](np.stack((AT, AT)))).tolist() == [expected] * 2


def test_lengths_of_tables():
    found = changes("positions modulo a length")
    assert [int(change.note.split()[1]) for change in found] == [
        4096,
        *(2**k for k in range(4, 12)),
        *(2**k for k in range(13, 17)),
    ]
    assert found[0].fields["place"](AT).tolist() == [3, 0, 5, 904, 40000 % 4096]
    assert changes("positions modulo a length", PLAIN, Measurements(length=100))[0].fields["place"](AT).tolist() == [
        3,
        0,
        5,
        0,
        0,
    ]
    found = changes("table clamped at its end")
    assert found[0].note == "at row 4095" and found[0].fields["place"](AT).tolist() == [3, 0, 5, 4095, 4095]
    notes = [
        change.note
        for change in changes(
            "table clamped at its end", replace(YARN, scaling=YaRN(4.0, 100)), Measurements(length=50)
        )
    ]
    assert notes[:3] == ["at row 49", "at row 99", "at row 15"] and len(notes) == 15


def test_shifts_that_are_measured():
    (change,) = changes("positions shifted", PLAIN, Measurements(offset=-9))
    assert (
        change.note == "position m turns by (m − 9)·θ"
        and changes("positions one too high")[0].note == "position m turns by (m + 1)·θ"
    )
    for offset in (None, -1, 0, 1):
        assert changes("positions shifted", PLAIN, Measurements(offset=offset)) == []


# --- Roundings ---


@pytest.mark.parametrize(
    "kind, x, rounded", [("bfloat16", 1 + 2**-7 + 2**-9, 1 + 2**-7), ("float16", 1 + 2**-10 + 2**-12, 1 + 2**-10)]
)
def test_roundings(kind, x, rounded):
    x = np.array([x])
    for name, field in (
        ("positions", "round_position"),
        ("tables", "round_table"),
        ("results", "round_result"),
        ("input", "round_input"),
    ):
        (change,) = changes(f"{kind} {name}")
        assert [*change.fields] == [field] and change.fields[field](x) == rounded
    angles = [{*change.fields} for change in changes(f"{kind} angle")]
    assert angles == [
        {"round_angle"},
        {"round_angle", "round_theta"},
        {"round_angle", "round_position"},
        {"round_angle", "round_theta", "round_position"},
    ]
    (theta,) = changes(f"{kind} inverse frequencies")
    assert theta.fields["round_theta"](x) == rounded and theta.note.startswith("off by up to 0.00")
    assert changes(f"{kind} inverse frequencies", Rope(8, 16.0, "half")) == []  # powers of two
    narrow = Measurements(narrow=kind, narrow_theta=W)
    assert changes(f"{kind} inverse frequencies", PLAIN, narrow)[0].fields["theta"] is W
    assert len(changes(f"{kind} inverse frequencies", PLAIN, narrow._replace(narrow="other"))) == 1


def test_how_far_off_rounded_frequencies_are():
    off = max(abs(float(np.float16(w)) / w - 1) for w in W)
    assert changes("float16 inverse frequencies")[0].note == f"off by up to {off:.2g} of themselves"
    assert (
        changes("float16 inverse frequencies", GEMMA)[0].note
        == f"off by up to {abs(float(np.float16(0.05)) / 0.05 - 1):.2g} of themselves"
    )


def test_dtypes_in_which_roundings_are_right():
    for name in ("tables", "results", "input"):
        assert FAULTS[f"bfloat16 {name}"].right_in == ("bfloat16",) and FAULTS[f"float16 {name}"].right_in == (
            "bfloat16",
            "float16",
        )
        assert (
            FAULTS[f"bfloat16 {name}"].make(PLAIN, np.float32) is not None
            and FAULTS[f"float16 {name}"].make(PLAIN, np.float16) is None
        )


def test_sines():
    angle = np.array([[0.5, 4.0]])
    (change,) = changes("sign of the sine lost")
    cos, sin = change.fields["cos_sin"](angle)
    assert cos == pytest.approx(np.cos(angle)) and sin == pytest.approx(np.abs(np.sin(angle)))
    cos, sin = changes("cosine of a cosine")[0].fields["cos_sin"](angle)
    assert cos == pytest.approx(np.cos(np.cos(angle))) and sin == pytest.approx(np.sin(np.sin(angle)))
    found = changes("fast sine")
    assert len(found) == 3 and found[2].fields["theta"] == pytest.approx(
        np.float32(W / np.pi).astype(float) * np.pi, rel=1e-15
    )
    floor, rint = changes("2π rounded")
    for change, whole in ((floor, 15), (rint, 16)):  # 100 = 15.915 turns
        assert change.fields["cos_sin"](100.0)[0] == pytest.approx(math.cos(100 - whole * 6.2832), abs=1e-12)
    assert floor.note == "angles are reduced by 6.2832, 2π is 6.283185307"
    assert changes("2π rounded", PLAIN, NO) == [] and len(changes("2π rounded", PLAIN, Measurements(turn=6.28))) == 2


# --- Factors and blocks ---


def test_attention_factors():
    def factor(name, rope, measured=None):
        return [change.fields["factor"] for change in changes(name, rope, measured)]

    assert factor("attention factor missing", YARN) == [1] and factor("attention factor missing", PLAIN) == []
    assert factor("attention factor squared", YARN) == pytest.approx([A * A]) and factor(
        "attention factor inverted", YARN
    ) == pytest.approx([1 / A])
    assert factor("attention factor unwanted", PLAIN) == [1.277] and factor("attention factor unwanted", YARN) == []
    assert (
        factor("attention factor unwanted", PLAIN, Measurements(factor=3.0)) == [3]
        and factor("attention factor unwanted", PLAIN, NO) == []
    )
    assert (
        factor("attention factor unwanted", PLAIN, Measurements(factor=1 + 9e-6))
        == []
        != factor("attention factor unwanted", PLAIN, Measurements(factor=1 + 2e-5))
    )
    assert (
        factor("another attention factor", YARN) == pytest.approx([1.5 * A])
        and factor("another attention factor", PLAIN) == []
    )
    assert (
        factor("softmax scale folded in", PLAIN) == pytest.approx([8**-0.5, 8**-0.25])
        and factor("softmax scale folded in", Rope(2, BASE, "half")) == []
    )
    assert factor("softmax scale folded in", YARN) == pytest.approx([A * 8**-0.5, A * 8**-0.25])
    assert changes("attention factor missing", YARN)[0].note == f"1 instead of {A:.6g}"


BACK = replace(PLAIN, direction=-1)


def rotated(name, rope, x, y, cos, sin, k=0):
    """What becomes of one pair."""
    recipe = replace(recipe_of(rope), **changes(name, rope)[k].fields)
    one, two = recipe._pair(*(np.array([v]) for v in (x, y, cos, sin, cos, sin)))
    return float(one[0]), float(two[0])


@pytest.mark.parametrize("name, k, expected", [
    ("direction", 0, (2 * 0.6 + 3 * 0.8, -2 * 0.8 + 3 * 0.6)), ("sign missing", 0, (2 * 0.6 + 3 * 0.8, 2 * 0.8 + 3 * 0.6)),
    ("sine and cosine swapped", 0, (2 * 0.8 - 3 * 0.6, 2 * 0.6 + 3 * 0.8)), ("wrong term in the pairs", 0, (2 * 0.6 - 3 * 0.8, 2 * 0.8)),
    ("zeros returned", 0, (0, 0)), ("in-place aliasing", 0, (-1.2, -1.2 * 0.8 + 3 * 0.6)), ("in-place aliasing", 1, (2 * 0.6 - 3.4 * 0.8, 3.4)),
])  # fmt: skip
def test_one_pair(name, k, expected):
    assert rotated(name, PLAIN, 2, 3, 0.6, 0.8, k) == pytest.approx(expected)
    if name in (
        "direction",
        "sign missing",
        "sine and cosine swapped",
    ):  # of a rope that turns backwards, with −sin for sin
        mirrored = rotated(name, PLAIN, 2, 3, 0.6, -0.8, k)
        assert rotated(name, BACK, 2, 3, 0.6, 0.8, k) == pytest.approx(mirrored)


def test_blocks_in_words():
    measured = Measurements(block=(("cos", "sin"), ("-sin", "0")))
    (change,) = changes("wrong term in the pairs", PLAIN, measured)
    assert (
        change.note == "x·cos + y·sin, −x·sin instead of x·cos − y·sin, x·sin + y·cos"
        and change.fields["block"] == measured.block
    )
    assert (
        changes("wrong term in the pairs", PLAIN, NO)
        == []
        == changes("wrong term in the pairs", BACK, Measurements(block=recipe_of(BACK).block))
    )
    assert (
        module._as_equations((("0", "0"), ("1", "-cos"))) == "0, x − y·cos"
        and module._as_equations((("0", "-1"), ("0", "sin"))) == "−y, y·sin"
    )


def test_the_rest_of_a_head():
    (change,) = changes("rest zeroed", PART)
    assert change.note == "4 features are zero" and change.fields == {"rest": 0.0} and changes("rest zeroed") == []
    assert changes("in-place aliasing", Rope(8, BASE, "half-to-interleaved")) == []


def test_lengths_that_grow():
    zeta = [((2 * i + 0.4 * 8) / (1.4 * 8)) for i in range(4)]
    (change,) = changes("lengths grow with the position")
    np.testing.assert_allclose(change.fields["growth"], np.log(zeta) / 512, rtol=1e-12)
    assert (
        change.note.endswith("of themselves at every position, as in xPos, ζ^(m/512)")
        and f"by up to {-math.log(zeta[0]) / 512:.3g} of" in change.note
    )
    double = Measurements(growth=-2 * np.log(zeta) / 512)
    assert changes("lengths grow with the position", PLAIN, double)[0].note.endswith("as in xPos, ζ^(−m/256)")
    other = Measurements(growth=np.array([0.1, 0.1, 0.1, 0.2]))
    assert (
        changes("lengths grow with the position", PLAIN, other)[0].note
        == "by up to 0.2 of themselves at every position, not as in xPos"
    )
    assert (
        changes("lengths grow with the position", PLAIN, NO)
        == changes("lengths grow with the position", PLAIN, Measurements(growth=np.ones(3)))
        == []
    )


# --- Axes ---

GRID = Rope(8, BASE, "half", axes=Axes("sections", (1, 2, 1)))  # 0 1 1 2
OWN = replace(GRID, axes=Axes("sections", (2, 2), "own"))


def test_axes_of_mistakes():
    assert recipe_of(GRID).axis.tolist() == [0, 1, 1, 2]
    found = changes("one axis for all pairs", GRID)
    assert [change.fields["axis"].tolist() for change in found] == [[0] * 4, [1] * 4, [2] * 4] and found[
        1
    ].note == "axis 1 turns all pairs"
    found = changes("axes in another order", GRID)
    assert [change.fields["axis"].tolist() for change in found] == [
        [0, 2, 2, 1],
        [1, 0, 0, 2],
        [1, 2, 2, 0],
        [2, 0, 0, 1],
        [2, 1, 1, 0],
    ]
    assert found[0].note == "axes (0, 2, 1) for (0, 1, 2)"
    (wide,) = changes("sections too wide", GRID)
    assert wide.fields["axis"].tolist() == [0, 0, 1, 1]
    (other,) = changes("other sections", GRID)
    assert other.fields["axis"].tolist() == [2, 0, 1, 1] and other.note.startswith(
        "3 pairs turn with another axis, the first of them pair 0, with axis 2 "
    )
    measured = Measurements(axis=np.array([0, 1, 2, 2]))
    assert (
        changes("other sections", GRID, measured)[0].note
        == "1 pairs turn with another axis, the first of them pair 2, with axis 2 instead of 1"
    )
    assert (
        changes("other sections", GRID, NO)
        == []
        == changes("other sections", GRID, Measurements(axis=np.array([0, 1, 1, 2])))
    )
    for name in ("one axis for all pairs", "axes in another order", "other sections", "sections too wide"):
        assert changes(name) == []  # of a rope without axes


def test_series_of_axes():
    one, two = changes("frequencies restart with each axis", GRID)
    assert one.fields["theta"] == pytest.approx([1, 1, 0.1, 1]) and two.fields["theta"] == pytest.approx(
        [1, 1, BASE**-0.5, 1]
    )
    assert changes("frequencies restart with each axis", OWN) == [] and changes("one series for all axes", GRID) == []
    assert recipe_of(OWN).theta == pytest.approx([1, 0.01, 1, 0.01])
    (shared,) = changes("one series for all axes", OWN)
    assert shared.fields["theta"] == pytest.approx(W)


def test_pairs_that_are_dealt_otherwise():
    rope = Rope(12, BASE, "half", axes=Axes("sections", (2, 2, 2)))
    (change,) = changes("pairs dealt otherwise", rope)
    assert change.fields["axis"].tolist() == [0, 1, 2, 0, 1, 2] and change.note == "interleaved instead of sections"
    back = changes("pairs dealt otherwise", replace(rope, axes=Axes("interleaved", (2, 2, 2))))
    assert back[0].fields["axis"].tolist() == [0, 0, 1, 1, 2, 2]


def test_other_mistakes_with_axes():
    found = changes("positions one too high", GRID)
    assert [type(change.fields["place"]) for change in found[1:]] == [OnOneAxis] * 3 and len(found) == 4
    at = np.array([[1, 2], [3, 4], [5, 6]])
    assert found[2].fields["place"](at).tolist() == [[1, 2], [4, 5], [5, 6]] and found[2].note.endswith(
        "θ, on axis 1 alone"
    )
    (base,) = changes("wrong base", GRID)
    assert base.fields["theta"] == pytest.approx(powers(500000.0))
    (base,) = changes("wrong base", OWN)  # each series is that of a head of four features
    assert base.fields["theta"] == pytest.approx([1, 500000.0**-0.5] * 2)
    shifted = changes("positions shifted", GRID, Measurements(offset=None, offsets=(None, 7, 1)))
    assert [change.note for change in shifted] == ["position m turns by (m + 7)·θ, on axis 1 alone"]
    assert changes("another rotary width", GRID, Measurements(width=4)) == []  # frequencies of fewer pairs


# --- Candidates ---


def test_candidates_are_made_where_they_differ():
    x, at = np.random.default_rng(0).standard_normal((1, 3, 8)), np.array([0, 7, 50])
    made = FAULTS["degrees"].make(PLAIN, np.float64)
    y = np.array(x)
    for i, theta in enumerate(W * math.pi / 180):
        cos, sin = np.cos(at * theta), np.sin(at * theta)
        y[..., i], y[..., i + 4] = x[..., i] * cos - x[..., i + 4] * sin, x[..., i] * sin + x[..., i + 4] * cos
    np.testing.assert_allclose(made(x, at), y, atol=1e-12)
    assert FAULTS["scaling ignored"].make(PLAIN) is None and FAULTS["ggml's recurrence"].make is None
    assert FAULTS["table clamped at its end"].make(NTK) is not None


# --- Behaviour ---


def right(x, m):
    """Every feature plus its position."""
    return x + np.asarray(m, x.dtype)[..., None]


def behaviour(name, rope=PLAIN):
    """A candidate with a mistake of behaviour, made of the one above."""
    wrap = FAULTS[name].make.args[0]
    return wrap(right, rope)


ONES = np.ones((3, 5, 8), np.float32)
M = np.array([10, 20, 30, 40, 50])


@pytest.mark.parametrize("name, heads, rows", [
    ("only the first head rotated", [0], range(5)), ("only the first row rotated", range(3), [0]), ("last row not rotated", range(3), range(4)),
    ("heads differ", [0, 1], range(5)), ("rows differ", range(3), range(3)), ("some lengths wrong", range(3), range(5)),
])  # fmt: skip
def test_parts_that_are_rotated(name, heads, rows):
    moved = (behaviour(name)(ONES, M) != 1).all(axis=-1)
    assert [*np.flatnonzero(moved.any(axis=1))] == [*heads] and [*np.flatnonzero(moved.any(axis=0))] == [*rows]
    assert (behaviour(name)(ONES[0], M) != 1).all(axis=-1)[0]
    long = behaviour("some lengths wrong")(np.ones((1, 130, 8)), np.arange(130) + 1)
    assert (long[0, :128] != 1).all() and (long[0, 128:] == 1).all()
    assert (behaviour("some lengths wrong")(np.ones((1, 63, 8)), np.arange(63) + 1) != 1).all()


def test_calls_that_are_misread():
    assert (
        behaviour("heads read as positions")(ONES, M)[:, 0, 0].tolist() == [11, 21, 31]
        and behaviour("heads read as positions")(ONES[0], M)[1, 0] == 21
    )
    assert (
        behaviour("one row differs")(ONES[:, :1], M[:1])[0, 0, 0] == 1
        and behaviour("one row differs")(ONES[:, :2], M[:2])[0, 1, 0] == 21
    )
    counted = behaviour("consecutive positions wrong")
    assert (
        counted(ONES, np.arange(3, 8))[0, 0, 0] == 5
        and counted(ONES, M)[0, 0, 0] == 11
        and counted(ONES[:, :1], M[:1])[0, 0, 0] == 11
    )
    order = behaviour("order of positions matters")
    assert (
        order(ONES, M[::-1])[0, 0, 0] == 11
        and order(ONES, M)[0, 0, 0] == 11
        and order(ONES[:, :2], M[1::-1])[0, 0, 0] == 21
        and order(ONES[:, :3], M[2::-1])[0, 0, 0] == 11
    )
    misread = behaviour("positions misread")
    assert misread(ONES, M)[0, 1, 0] == 21 and misread(ONES, np.repeat(M, 2)[::2])[0, 1, 0] == 11


def test_memory_that_is_used_again():
    buffer = behaviour("result overwritten")
    first = buffer(ONES, M)
    assert first is buffer(ONES, M + 1) and first[0, 0, 0] == 12 and buffer(ONES[:1], M) is not first
    unwritten = behaviour("output not written")(ONES, M)
    assert (unwritten[..., :4] != 1).all() and unwritten.shape == ONES.shape
    x = ONES.copy()
    assert behaviour("mutates its input")(x, M) is x and x[0, 0, 0] == 11
    wide = np.arange(240, dtype=np.float32).reshape(3, 5, 16)
    strides = behaviour("strides ignored")
    assert strides(ONES, M)[0, 0, 0] == 11 and strides(wide[..., ::2], M)[0, 0, 1] == 11


def test_states_and_lengths():
    stale, grown = (
        FAULTS["state between calls"].make(PLAIN, np.float64),
        FAULTS["depends on the length"].make(PLAIN, np.float64),
    )
    x = np.eye(8)[None, 1:2]  # the second pair, which a base that has grown turns less

    def angle(fn, *at):
        y = fn(np.repeat(x, len(at), axis=1), np.array(at))[0, 0]
        return math.atan2(y[5], y[1])

    assert angle(grown, 2) == pytest.approx(0.2) and angle(grown, 2, 2047) == pytest.approx(0.2)
    assert angle(grown, 2, 4095) == pytest.approx(0.2 * 2 ** (-1 / 3)) and angle(grown, 2) == pytest.approx(0.2)
    assert angle(stale, 2) == pytest.approx(0.2) and angle(stale, 2, 4095) == pytest.approx(
        angle(stale, 2)
    ) == pytest.approx(0.2 * 2 ** (-1 / 3))
    assert (
        FAULTS["depends on the length"].make(Rope(4, BASE, "half")) is not None
        and FAULTS["depends on the length"].make(NTK) is None
        and FAULTS["depends on the length"].make(Rope(2, BASE, "half")) is None
    )


def test_results_that_are_changed():
    assert (
        behaviour("wrong dtype out")(ONES, M).dtype == np.float64
        and behaviour("wrong dtype out")(ONES.astype(float), M).dtype == np.float32
    )
    lost = behaviour("not finite")(ONES, np.array([0, 1, 2, 3, 4]))
    assert np.isnan(lost[:, 0]).all() and lost[0, 1, 0] == 2 and lost.dtype == np.float32
    x = ONES.copy()
    x[0, 1] = np.nan
    leak = behaviour("rows leak into each other")(x, M)
    assert np.isnan(leak[0]).all() and np.isfinite(leak[1:]).all()
    assert behaviour("not linear")(4 * ONES, M)[0, 0, 0] == pytest.approx(11)


def test_the_words_of_widths_and_of_axes():
    """Base 100 over 4 features is base 10000 over 8; of a proportional rope, half of 8 features turn."""
    assert module._as_width(PLAIN, 100.0) == " (exponents over 16 instead of 8 are the same)"
    assert module._as_width(PLAIN, 1e8) == " (exponents over 4 instead of 8 are the same)"
    assert module._as_width(PLAIN, BASE) == "" == module._as_width(PLAIN, 12345.0)
    (other,) = module._other_width(GEMMA, Measurements(width=6))
    assert other.note == "6 features turn, 4 expected"
    rope = replace(PLAIN, axes=Axes("sections", (2, 2)))
    assert list(module._sections_otherwise(rope, Measurements(axis=np.array([0, 0, 1, 1])))) == []
    swapped = list(module._sections_otherwise(rope, Measurements(axis=np.array([1, 1, 0, 0]))))
    assert swapped[0].note.startswith(
        "4 pairs turn with another axis, the first of them pair 0, with axis 1 instead of 0"
    )


def test_positions_of_other_rows_by_hand():
    at = np.array([9, 4, 17, 4])
    left = {
        change.note: np.asarray(change.fields["place"](at)).tolist() for change in module._of_other_rows(PLAIN, None)
    }
    assert left == {
        "positions in reverse": [4, 17, 4, 9], "positions sorted": [4, 4, 9, 17], "positions of the row before": [4, 9, 4, 17],
        "positions of the row after": [4, 17, 4, 9], "positions of the first row for all": [9] * 4, "positions of the last row for all": [4] * 4,
        "positions the largest for all": [17] * 4, "positions minus that of the last row": [5, 0, 13, 0],
        "positions subtracted from that of the last row": [-5, 0, -13, 0], "positions by their rank": [1, 0, 2, 0],
    }  # fmt: skip
