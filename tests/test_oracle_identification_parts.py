"""What is said of a black box, part by part: words by hand, and rotations of four features, written as loops."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from pyrope import Axes, Linear, Rope, identify
from pyrope.oracle import identification as module
from pyrope.oracle.identification import Identification
from pyrope.oracle.measure import Measured, Pairs
from pyrope.oracle.probe import Probe

ROPE = Rope(4, 100.0, "half")
FOUND = Identification(
    head_dim=4, dtype="float32", layout="half", rotary_dim=4, placement="prefix", pairs=((0, 2), (1, 3)), direction=1, frequencies=(1.0, 0.1),
    uncertainty=(1e-9, 2e-10), offset=0.0, attention_factor=1.0, explanations=("base 100",), rope=ROPE, precision="rounded once", behaviour=(),
)  # fmt: skip


def turning(theta=(1.0, 0.1), factor=1.0, grows=0.0, offset=0.0, bend=0.0):
    """Features i and i + 2, in float64; with several axes, the first pair by the first axis, the second by the second."""

    def fn(x, m):
        y, axes = np.array(x, np.float64), np.atleast_2d(m).astype(np.float64)
        for i, angle in enumerate(theta):
            at = axes[min(i, len(axes) - 1)] + offset
            turned = at * angle + bend * (at > 40) * (at - 40)
            size = factor * np.exp(grows * at)
            a, b = x[..., i].astype(np.float64), x[..., i + 2].astype(np.float64)
            y[..., i], y[..., i + 2] = (
                size * (a * np.cos(turned) - b * np.sin(turned)),
                size * (a * np.sin(turned) + b * np.cos(turned)),
            )
        return y.astype(x.dtype)

    return fn


def found(fn, **options):
    return identify(fn, 4, **({"dtype": np.float64, "max_position": 100} | options))


# --- Words ---


def test_rows_of_a_rotation():
    assert FOUND.rows() == [
        ("turns", "4 of 4 features, prefix, half"), ("direction", "+1"), ("offset", "0 positions"),
        ("frequencies", "1 … 0.1, the last ±2.0e-10"), ("factor", "1"), ("rule", "base 100"), ("precision", "rounded once"),
    ]  # fmt: skip
    more = replace(
        FOUND,
        direction=-1,
        offset=-1.0,
        explanations=("a", "b", "c"),
        behaviour=("odd: why",),
        notes=("n",),
        axes=(0, 0, 1, 0, 2, 2, 2),
    )
    assert more.rows()[1:3] == [("direction", "-1"), ("offset", "-1 position")]
    assert more.rows()[4] == ("axes", "3, of the pairs in order: 0 × 2, 1, 0, 2 × 3")
    assert more.rows()[6:] == [
        ("rule", "a"),
        ("or", "b"),
        ("or", "c"),
        ("precision", "rounded once"),
        ("also", "odd: why"),
        ("note", "n"),
    ]


def test_rows_of_what_does_not_turn():
    still = replace(FOUND, pairs=(), frequencies=(), explanations=(), attention_factor=2.5)
    assert still.rows() == [("pairs", "no two features as a pair"), ("precision", "rounded once")]
    assert replace(still, multiple=True).rows()[:2] == [
        ("pairs", "nothing: every position returns x times a number"),
        ("factor", "2.5"),
    ]
    pairs = replace(FOUND, frequencies=(), explanations=()).rows()
    assert pairs[:2] == [
        ("pairs", "4 of 4 features, prefix, half"),
        ("frequencies", "cannot be read: the pairs do not turn"),
    ]


def test_an_identification_as_text_and_as_plain_values():
    lines = str(replace(FOUND, notes=("word " * 30,))).splitlines()
    assert lines[0] == "rotation of 4 features, float32" and lines[1] == "  turns       4 of 4 features, prefix, half"
    assert max(map(len, lines)) <= 79 and lines[-1].startswith(" " * 14 + "word")
    assert (
        max(map(len, str(replace(FOUND, notes=("x" * 66,))).splitlines())) == 79
    )  # with its margin, the word is 80 wide
    plain = replace(FOUND, uncertainty=(math.inf, math.nan)).to_dict()
    assert plain["uncertainty"] == (None, None) and plain["rope"] == repr(ROPE) and "readings" not in plain
    assert json.dumps(plain) and replace(FOUND, rope=None).to_dict()["rope"] is None
    assert "base 100" in FOUND._repr_html_()
    assert replace(FOUND, readings=module.Readings()) == FOUND and "readings" not in repr(FOUND)


# --- Rotations ---


def test_what_is_read_of_a_rotation():
    one = found(turning())
    assert (one.head_dim, one.dtype, one.layout, one.rotary_dim, one.placement) == (4, "float64", "half", 4, "prefix")
    assert one.pairs == ((0, 2), (1, 3)) and one.direction == 1 and one.offset == 0 and one.attention_factor == 1
    np.testing.assert_allclose(one.frequencies, [1, 0.1], rtol=1e-12)
    assert one.rope == ROPE and len(one.uncertainty) == 2 and one.notes == () and one.axes is None and not one.multiple
    assert one.readings.reference == "identified" and one.readings.operators.position == "3"
    back = found(turning((-1.0, -0.1), factor=1.5, offset=2.0))
    assert back.direction == -1 and back.offset == pytest.approx(2) and back.attention_factor == pytest.approx(1.5)
    unknown = found(turning((1.0, 0.7)))
    assert unknown.rope == Rope(4, 1 / 0.7**2, "half") or unknown.explanations
    odd = found(lambda x, m: turning((1.0, 0.7))(x, m), max_position=3)
    assert odd.readings.operators.position == "3"
    assert found(turning(), max_position=2).readings.operators.position == "2"


def test_frequencies_of_no_rule():
    def five(x, m):
        y = np.array(x)
        for i, angle in enumerate((1.0, 0.9, 0.2, 0.19, 0.15)):
            cos, sin = np.cos(m * angle), np.sin(m * angle)
            y[..., i], y[..., i + 5] = x[..., i] * cos - x[..., i + 5] * sin, x[..., i] * sin + x[..., i + 5] * cos
        return y

    one = identify(five, 10, dtype=np.float64, max_position=100)
    assert one.explanations == ("none of these: no published rule has these frequencies",) and one.rope is None
    assert one.precision == "cannot tell: no rope has exactly these numbers"


def test_what_is_no_rotation():
    def skewed(x, m):
        y = turning()(x, m)
        y[..., 0] *= 1.01
        return y

    one = found(skewed)
    assert one.rope is None and one.notes[0].startswith(
        "no rotation: within the pairs R is off by 0.01 from a rotation"
    )
    mixed = np.eye(4)
    mixed[1, 0] = mixed[2, 0] = 0.5
    three = found(lambda x, m: x @ mixed.T)
    assert three.notes[0].startswith("no rotation: 1 features belong to no pair, and within the pairs R is off by 0 ")


@pytest.mark.parametrize("factor, skew, odd", [(1.0, 48, True), (0.5, 48, True), (0.5, 24, False), (10.0, 48, False)])
def test_how_far_off_a_rotation_may_be(factor, skew, odd):
    """32 units, times the factor if that is above 1; the numbers themselves are rounded, to 16 units at 10."""

    def skewed(x, m):
        y = turning(factor=factor)(x.astype(np.float64), m)
        y[..., 0] += skew * 2.0**-24 * x[..., 0]
        return y.astype(np.float32)

    notes = found(skewed, dtype=np.float32).notes
    assert any(note.startswith("no rotation") for note in notes) is odd


def wide(reads, theta):
    def fn(x, m):
        y = np.array(x)
        for (i, j), angle in zip(reads, theta, strict=True):
            cos, sin = np.cos(m * angle), np.sin(m * angle)
            y[..., i], y[..., j] = x[..., i] * cos - x[..., j] * sin, x[..., i] * sin + x[..., j] * cos
        return y

    return fn


def test_frequencies_that_were_rounded():
    theta = np.float16(10000.0 ** (-np.arange(4) / 4)).astype(np.float64)
    one = identify(wide([(0, 4), (1, 5), (2, 6), (3, 7)], theta), 8, dtype=np.float64, max_position=100)
    assert one.rope == Rope(8, 10000.0, "half") and one.precision.endswith(": all frequencies are float16 numbers")
    odd = identify(wide([(0, 7), (1, 5), (2, 6), (3, 4)], theta), 8, dtype=np.float64, max_position=100)
    assert odd.layout == "none" and odd.rope is None and "float16" not in odd.precision


def test_what_it_does_beside_rotating():
    def first_head(x, m):
        y = turning()(x, m)
        if x.ndim > 2:
            y[1:] = x[1:]
        return y

    assert found(first_head).behaviour[0].startswith("only the first head rotated: ")
    assert not found(turning(offset=2.0)).readings.operators.differing.any()  # what was identified is not expected


def test_notes_on_phases():
    bent = found(turning(bend=0.05))
    assert any(note.startswith("phases are proportional to the position up to ") for note in bent.notes)
    last = found(lambda x, m: turning()(x, m + (m == 100)))  # the last position alone
    assert any(note.startswith("phases are proportional to the position up to ") for note in last.notes)
    assert not any(note.startswith("phases") for note in found(turning()).notes)
    grown = found(turning(factor=2.0, grows=0.01))
    assert any(
        note.startswith("pairs grow or shrink with the position, at rates from 0.01 to 0.01 of themselves: xPos")
        for note in grown.notes
    )
    assert grown.attention_factor == pytest.approx(2.0)
    assert any(note.startswith("at position 0 pairs are turned by up to ") for note in found(quarter).notes)


def quarter(x, m):
    """The second pair is a quarter of a turn ahead."""
    y = turning((1.0, 0.0))(x, m)
    angle = m * 0.1 + np.pi / 2
    y[..., 1], y[..., 3] = (
        x[..., 1] * np.cos(angle) - x[..., 3] * np.sin(angle),
        x[..., 1] * np.sin(angle) + x[..., 3] * np.cos(angle),
    )
    return y


def test_several_axes():
    one = found(turning(), axes=2)
    assert one.axes == (0, 1) and one.readings.operators.position == "(3, 4)"
    still = found(lambda x, m: 3 * x, axes=2)
    assert still.axes == () and still.multiple and still.attention_factor == 3
    assert found(turning(), axes=1).axes == (0, 0)
    with pytest.raises(ValueError, match="axes"):
        found(turning(), axes=65)


@pytest.mark.parametrize("offset", [-7, 2, 3, 10])
def test_several_axes_with_an_offset(offset):
    """Which axis turns a pair is told by how far it turns from position 0 on, wherever it is there."""
    one = found(turning(offset=offset), axes=2)
    assert one.axes == (0, 1) and one.offset == pytest.approx(offset)


def test_axes_that_turn_nothing():
    """As where a text model is handed positions (3, n): all pairs by the first axis, or none by the last."""
    for reads, expected in (((0, 0), (2, 0, 0)), ((0, 1), (1, 1, 0))):
        one = found(lambda x, m, reads=reads: turning()(x, m[list(reads)]), axes=3)
        assert one.axes == reads and one.rope == Rope(4, 100.0, "half", axes=Axes("sections", expected))
        assert not one.precision.startswith("cannot tell")
    last = found(lambda x, m: turning()(x, m[[2, 2]]), axes=3)
    assert last.axes == (2, 2) and last.rope == Rope(4, 100.0, "half", axes=Axes("sections", (0, 0, 2)))


def test_suspects_and_failures():
    with pytest.raises(TypeError, match="suspects must be a list of ropes, was int"):
        found(turning(), suspects=3)
    with pytest.raises(ValueError, match="the candidate cannot be read: it returns nothing"):
        found(lambda x, m: None)
    assert identify(turning(), 4, max_position=9).dtype == "float32"
    loud = found(lambda x, m: turning()(x, m).astype(np.float32))
    assert loud.behaviour == ("wrong dtype out: the input is float64, the result float32",)


# --- Single steps ---


def measured(phase=(0.0, 0.0, 0.0), theta=(1.0, 0.5, 0.25), pairs=((0, 3), (1, 4), (2, 5))):
    """R(0), a turn of each pair by its phase, and what was measured of it."""
    r = np.eye(6)[None].copy()
    for (a, b), angle in zip(pairs, phase, strict=True):
        r[0, a, a] = r[0, b, b] = math.cos(angle)
        r[0, a, b], r[0, b, a] = -math.sin(angle), math.sin(angle)
    at = np.array(pairs)
    return r, Measured(Pairs(at, at, 0, 0.0), np.array(theta), np.full(3, 1e-12), 1, 0.0, 0.0, 1.0, 100, 2.0**-53)


@pytest.mark.parametrize("phase, axis, offsets", [
    ((2.0, 1.0, 0.75), (0, 0, 1), (2.0, 3.0)),
    ((2.0, 1.5, 0.75), (0, 1, 1), (2.0, 3.0)),
    ((2.0, 0.0, 0.0), (0, 1, 1), (2.0, 0.0)),
    ((2.0, 0.5, -0.25), (0, 1, 2), (2.0, 1.0, -1.0)),
    ((2.0, 1.0, 0.5), (0, 0, 1), ()),  # the same on both
    ((0.0, 0.0, 0.0), (0, 1, 1), ()),
    ((2.0, 1.0, 0.625), (0, 0, 1), ()),  # two and a half positions
    ((2.0, 1.75, 0.75), (0, 0, 1), ()),  # pairs of one axis that are ahead by different numbers
    ((2.0, 1.05, 0.75), (0, 0, 1), (2.0, 3.0)),  # nearly: by 0.05
    ((2.0, 1.15, 0.75), (0, 0, 1), ()),
])  # fmt: skip
def test_offsets_by_axis(phase, axis, offsets):
    r, read = measured(phase)
    if phase[1] in (1.05, 1.15):  # the slow pair of the axis decides, and the other one has the rest
        r, read = measured((phase[0] + phase[1] - 1.0, 1.0, phase[2]))
    assert module._offsets(r, read, np.array(axis)) == offsets
    back, _ = measured([-angle for angle in phase])
    if phase[1] not in (1.05, 1.15):
        assert module._offsets(back, read._replace(direction=-1), np.array(axis)) == offsets


def test_offsets_of_no_pair():
    none = np.empty((0, 2), np.int64)
    read = Measured(Pairs(none, none, 0, 0.0), np.empty(0), np.empty(0), 1, 0.0, 0.0, 1.0, 100, 2.0**-53)
    assert module._offsets(np.eye(6)[None], read, np.empty(0, np.int64)) == ()
    assert module._explanations(read, 6, np.empty(0, np.int64), 2, ()) == ([], "")


def test_features_that_stay_among_others_that_turn():
    def still(d, count, axis=None):
        reads = np.arange(d - count).reshape(-1, 2)
        read = measured()[1]._replace(pairs=Pairs(reads, reads, 0, 0.0))
        return module._still(read, d, axis)

    assert still(8, 2) == ["features 6, 7 do not turn"] and still(8, 0) == [] and still(8, 4) == []
    assert still(9, 1) == ["features 8 do not turn"]
    assert still(9, 3) == ["features 6, 7, 8 do not turn"] and still(9, 5) == []
    assert still(32, 8) == ["features 24, 25, 26, 27, 28, 29, 30, 31 do not turn"]
    assert still(31, 9) == ["features 22, 23, 24, 25, 26, 27, 28, 29, … do not turn"]
    by_axis = ": they may follow an axis of the positions that was not given, or is always 0"
    assert still(8, 2, np.zeros(3, int)) == [f"features 6, 7 do not turn{by_axis}"]


def test_a_note_on_features_that_stay_where_nothing_else_is_said():
    """Pairs (0, 7), (1, 5), (2, 6) are of no layout; in a layout, what stays is said by its width."""
    odd = identify(wide([(0, 7), (1, 5), (2, 6)], [1.0, 0.5, 0.2]), 8, dtype=np.float64, max_position=100)
    assert odd.notes == ("features 3, 4 do not turn",) and odd.layout == "none" and odd.rope is None
    part = identify(wide([(0, 3), (1, 4), (2, 5)], [1.0, 0.5, 0.21]), 8, dtype=np.float64, max_position=100)
    assert part.notes == () and part.rotary_dim == 6
    known = identify(
        wide([(0, 3), (1, 4), (2, 5)], 100.0 ** (-np.arange(3) / 3)), 8, dtype=np.float64, max_position=100
    )
    assert known.notes == () and known.rope == Rope(8, 100.0, "half", rotary_dim=6)


def test_rows_of_axes_and_their_offsets():
    axes = Axes("sections", (1, 1))
    of_axes = replace(FOUND, axes=(0, 1), rope=replace(ROPE, axes=axes), offsets=(2.0, -3.0)).rows()
    assert ("as", repr(axes)) in of_axes and ("offset", "2, -3 positions, axis by axis") in of_axes
    assert "as" not in dict(replace(FOUND, axes=(0, 1), rope=None).rows())
    assert "as" not in dict(replace(FOUND, axes=(0, 1)).rows())


def test_frequencies_that_cannot_be_read_are_not_drawn():
    flipped = found(lambda x, m: x * np.array([1.0, 1.0, -1.0, -1.0]) + 0.5 * x[..., [2, 3, 0, 1]])
    assert flipped.frequencies == () and flipped.readings.frequencies is None
    assert found(turning()).readings.frequencies is not None


def test_multiples_of_the_identity():
    unit, eye = 2.0**-24, np.stack([np.eye(3)] * 2)
    assert module._multiple(3 * eye, 3.0, unit) and not module._multiple(3 * eye, 2.0, unit)
    off = 3 * eye
    for slip, same in ((3.9, True), (4.1, False)):
        off[1, 0, 2] = -slip * unit * 3
        assert module._multiple(off, 3.0, unit) is same
    assert module._multiple(-3 * eye, -3.0, unit)


def test_grades_that_cannot_be_told():
    probe = Probe(turning(), 4, np.float64, 100)

    class Read:
        offset = 0.0

    assert module._grade(probe, None, Read) == "cannot tell: no rope has exactly these numbers"
    assert module._grade(probe, ROPE, Read) not in ("", None)
    assert module._grade(probe, Rope(4, 100.000001, "half"), Read).startswith(
        "cannot tell: the base is not a round number"
    )
    assert (
        module._grade(probe, Rope(4, 7.0, "half"), Read) == "cannot tell: worse than a float32 angle with these numbers"
    )
    ahead = Probe(turning(offset=5.0), 4, np.float64, 100)
    Read.offset = 5.0
    assert not module._grade(ahead, ROPE, Read).startswith("cannot tell")
    Read.offset = 0.5
    assert module._grade(ahead, ROPE, Read) == "cannot tell: the position offset is not an integer"
    Read.offset = 0.0
    assert module._grade(Probe(lambda x, m: None, 4, np.float64, 100), ROPE, Read).startswith(
        "cannot tell: it returns nothing"
    )


def test_a_factor_of_linear_scaling_must_be_round_to_be_graded():
    """Digits beyond the tenth are unknown, and with a factor that is not round, so is what a large error means."""

    def graded(factor, taken, offsets=()):
        rope = Rope(4, 100.0, "half", scaling=Linear(factor))
        probe = Probe(turning((1 / taken, 0.1 / taken)), 4, np.float64, 100)
        return module._grade(probe, rope, measured()[1], offsets)

    words = "cannot tell: the factor is not a round number, so its last digits are unknown"
    assert not graded(4.0, 4.0).startswith("cannot tell") and not graded(2.0, 2.0).startswith("cannot tell")
    assert graded(10 / 3, 10 / 3) == words
    assert graded(3.1234567, 3.12347) == words
    assert graded(4.0, 4.001) == "cannot tell: worse than a float32 angle with these numbers"
    assert graded(4.0, 4.0, (1.0, 2.0)) == "cannot tell: the position offset differs from axis to axis"
