"""The backward pass of a rotation: Rᵀ·g is right, and what people write instead is named.

The broken candidates are written here as a person would write them, on arrays and tables, not made of recipes.
"""

import dataclasses
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from oracle_cases import listed_fields
from strategies import ropes

import pyrope
from pyrope import Rope, YaRN, check_rotation, cli
from pyrope.oracle.adapters import from_cos_sin
from pyrope.oracle.attention_faults import ATTENTION, LINEAR
from pyrope.oracle.backward_checks import LINEAR_GRADIENTS, SOFTMAX_GRADIENTS
from pyrope.oracle.backward_faults import BACKWARD
from pyrope.oracle.rotation_faults import FAULTS

D, BASE = 32, 10000.0
HALF, WOVEN, MIXED = (Rope(D, BASE, layout) for layout in ("half", "interleaved", "interleaved-to-half"))
SCALED = Rope(D, BASE, "half", scaling=YaRN(4.0, 4096))
PART = Rope(D, BASE, "half", 16)
A = SCALED.attention_factor


def angles(m):
    return m[:, None] / BASE ** (np.arange(0, D, 2) / D)


def halves(g, m, sign=1.0, factor=1.0):
    """The gradient for pairs (i, i + d/2), by hand; sign −1 is the forward rotation."""
    cos, sin, (a, b) = np.cos(angles(m)), sign * np.sin(angles(m)), np.split(g.astype(np.float64), 2, axis=-1)
    return (factor * np.concatenate((a * cos + b * sin, b * cos - a * sin), axis=-1)).astype(g.dtype)


def neighbours(g, m, sign=1.0):
    z = (g[..., ::2] + 1j * g[..., 1::2]) * np.exp(-1j * sign * angles(m))
    out = np.empty(g.shape)
    out[..., ::2], out[..., 1::2] = z.real, z.imag
    return out.astype(g.dtype)


def sorted_out(g, m):
    """Of y = R·x with x in neighbours and y in halves: the gradient comes in halves and goes out in neighbours."""
    woven = np.empty_like(g)
    woven[..., ::2], woven[..., 1::2] = g[..., : D // 2], g[..., D // 2 :]
    return neighbours(woven, m)


def as_the_forward_writes(g, m):
    """The same, but pairs read as neighbours and written in halves, as the forward pass has it, turned back."""
    out = neighbours(g, m)
    return np.concatenate((out[..., ::2], out[..., 1::2]), axis=-1)


def scaled(g, m, factor):
    cos, sin = pyrope.cos_sin(SCALED.pure, m)
    a, b = np.split(g.astype(np.float64), 2, axis=-1)
    return (factor * np.concatenate((a * cos + b * sin, b * cos - a * sin), axis=-1)).astype(g.dtype)


def partly(g, m, keep=1.0):
    a, b, rest = g[..., :8].astype(np.float64), g[..., 8:16].astype(np.float64), keep * g[..., 16:]
    angle = m[:, None] / BASE ** (np.arange(0, 16, 2) / 16)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate((a * cos + b * sin, b * cos - a * sin, rest), axis=-1).astype(g.dtype)


def narrowed(g, m):
    return halves(g, m).astype(np.float16).astype(g.dtype)


RIGHT = {
    "half": (HALF, halves), "interleaved": (WOVEN, neighbours), "interleaved-to-half": (MIXED, sorted_out),
    "YaRN": (SCALED, lambda g, m: scaled(g, m, A)), "partly": (PART, partly),
    "turned back": (dataclasses.replace(HALF, direction=-1), lambda g, m: halves(g, m, -1.0)),
}  # fmt: skip
WRONG = {
    "forward": (HALF, lambda g, m: halves(g, m, -1.0), "backward equals forward"),
    "forward, interleaved": (WOVEN, lambda g, m: neighbours(g, m, -1.0), "backward equals forward"),
    "forward, to half": (MIXED, lambda g, m: pyrope.rotate(g, m, MIXED), "backward equals forward"),
    "zeros": (HALF, lambda g, m: np.zeros_like(g), "no gradient"),
    "None": (HALF, lambda g, m: None, "no gradient"),
    "handed on": (HALF, lambda g, m: g.copy(), "not rotated"),
    "twice": (HALF, lambda g, m: halves(g, m) + halves(g, m), "accumulated twice"),
    "twice, partly": (PART, lambda g, m: 2 * partly(g, m), "accumulated twice"),
    "negated": (HALF, lambda g, m: -halves(g, m), "gradient negated"),
    "negated, partly": (PART, lambda g, m: -partly(g, m), "gradient negated"),
    "negated, scaled": (SCALED, lambda g, m: -scaled(g, m, A), "gradient negated"),
    "negated, to half": (MIXED, lambda g, m: -pyrope.rotate(g, m, MIXED.transposed), "gradient negated"),
    "factor missing": (SCALED, lambda g, m: scaled(g, m, 1.0), "attention factor missing"),
    "factor squared": (SCALED, lambda g, m: scaled(g, m, A * A), "attention factor squared"),
    "inverse": (SCALED, lambda g, m: pyrope.unrotate(g, m, SCALED), "attention factor inverted"),
    "rest dropped": (PART, lambda g, m: partly(g, m, 0.0), "rest zeroed"),
    "without sine": (HALF, lambda g, m: g * np.cos(np.tile(angles(m), 2)).astype(g.dtype), "sine of the other half"),
    "other pairs": (HALF, neighbours, "wrong pairing"),
    "not permuted": (MIXED, lambda g, m: neighbours(g, m), "wrong pairing"),
    "other base": (HALF, lambda g, m: pyrope.unrotate(g, m, Rope(D, 5e5, "half")), "wrong base"),
    "one too far": (HALF, lambda g, m: halves(g, m + 1), "positions one too high"),
    "narrowed": (HALF, narrowed, "float16 results"),
    "dtype": (HALF, lambda g, m: halves(g, m).astype(np.float64), "wrong dtype out"),
    "order": (MIXED, lambda g, m: halves(g, m), "another order of features"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_the_transpose_is_right(name):
    rope, fn = RIGHT[name]
    report = check_rotation(fn, rope, backward=True)
    assert report.verdict == "right" and report.subject == "rotation, backward"
    assert report.expected == f"the transpose of {rope!r}"


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_of_a_backward_pass_are_named(name):
    rope, fn, fault = WRONG[name]
    report = check_rotation(fn, rope, backward=True)
    assert report.verdict == "wrong" and report.faults == (fault,), report
    assert not report.findings[0].alternatives
    assert any("None" in note for note in report.notes) == (name == "None")


def test_a_negated_gradient_is_told_from_another_order_of_features():
    evidence = check_rotation(lambda g, m: -halves(g, m), HALF, backward=True).findings[0].evidence
    assert evidence == "at every position all outputs are those expected, with the other sign"
    signs = np.where(np.arange(D) % 2, -1, 1).astype(np.float32)
    some = check_rotation(lambda g, m: signs * halves(g, m), HALF, backward=True)
    assert (
        some.faults == ("another order of features",) and f"{D // 2} with the other sign" in some.findings[0].evidence
    )


def test_the_evidence_of_ignored_positions_begins_with_words():
    report = check_rotation(lambda g, m: halves(g, np.arange(len(m))), HALF, backward=True)
    assert report.faults == ("positions ignored",)
    assert report.findings[0].evidence.startswith("as in a call at 9, 4, 17, 17, 30, 4, 12; first at position")


def test_the_forward_pass_is_not_its_own_backward_pass_nor_the_reverse():
    assert check_rotation(lambda x, m: halves(x, m, -1.0), HALF).verdict == "right"
    assert check_rotation(halves, HALF).faults == ("direction",)
    pyrope.assert_rotation(halves, HALF, backward=True)
    with pytest.raises(pyrope.Mismatch, match="rotation, backward: WRONG: no gradient"):
        pyrope.assert_rotation(lambda g, m: None, HALF, backward=True)


def test_gradients_in_another_order_do_not_give_the_same_scores():
    report = check_rotation(halves, MIXED, backward=True, equivalent="right")
    assert report.faults == ("another order of features",) and "cores" not in report.findings[0].evidence
    assert "where its feature was read" in report.findings[0].fix


def test_none_in_some_calls_alone():
    report = check_rotation(lambda g, m: None if g.shape[-2] == 1 else halves(g, m), HALF, backward=True)
    assert report.faults == ("one row differs",) and any("None" in note for note in report.notes)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_dtypes(dtype):
    assert check_rotation(halves, HALF, dtype=dtype, backward=True).verdict == "right"
    assert check_rotation(lambda g, m: halves(g, m, -1.0), HALF, dtype=dtype, backward=True).faults == (
        "backward equals forward",
    )


def wide(m):
    return tuple(np.tile(f(angles(m)), 2).astype(np.float32) for f in (np.cos, np.sin))


def exchanged(g):
    a, b = np.split(g, 2, axis=-1)
    return np.concatenate((b, -a), axis=-1)


def test_the_sine_of_the_other_half_shows_where_halves_differ():
    right, wrong = (
        lambda g, cos, sin: g * cos + exchanged(g * sin),
        lambda g, cos, sin: g * cos + exchanged(g) * sin,
    )
    for fn, entries, faults in (
        (right, "equal", ()), (right, "half", ()), (wrong, "equal", ()), (wrong, "half", ("sine of the other half",)),
    ):  # fmt: skip
        report = check_rotation(from_cos_sin(fn, wide, part="x", entries=entries), HALF, backward=True)
        assert report.faults == faults, (entries, str(report))


def test_the_sine_of_the_other_neighbour_shows_too():
    def tables(m):
        return tuple(np.repeat(f(angles(m)), 2, axis=-1).astype(np.float32) for f in (np.cos, np.sin))

    def swapped(g):
        return np.stack((g[..., 1::2], -g[..., ::2]), axis=-1).reshape(g.shape)

    right = from_cos_sin(lambda g, c, s: g * c + swapped(g * s), tables, part="x", entries="interleaved")
    wrong = from_cos_sin(lambda g, c, s: g * c + swapped(g) * s, tables, part="x", entries="interleaved")
    assert check_rotation(right, WOVEN, backward=True).verdict == "right"
    assert check_rotation(wrong, WOVEN, backward=True).faults == ("sine of the other half",)


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="backward must be True or False"):
        check_rotation(halves, HALF, backward="yes")
    with pytest.raises(ValueError, match="entries must be one of"):
        from_cos_sin(halves, wide, entries="other")
    narrow = from_cos_sin(halves, lambda m: (np.cos(angles(m)), np.sin(angles(m))), part="x", entries="half")
    report = check_rotation(narrow, HALF, backward=True)
    assert report.verdict == "not judged" and "tables as wide as x" in report.failure.reason


def test_what_cannot_be_read_is_not_judged():
    report = check_rotation(lambda g, m: (g, g), HALF, backward=True)
    assert report.verdict == "not judged" and report.subject == "rotation, backward"


# The transpose of a rope


@settings(max_examples=60)
@given(ropes(), st.integers(-(2**31), 2**31), st.integers(0, 2**32 - 1))
def test_the_transposed_rope_is_the_adjoint(rope, m, seed):
    """⟨g, R·x⟩ = ⟨Rᵀ·g, x⟩, by the definition's matrix and by the engine."""
    at = m if rope.axes is None else np.full(rope.axes.count, m) // np.arange(1, rope.axes.count + 1)
    back = rope.transposed
    assert back.transposed == rope and back.attention_factor == rope.attention_factor
    assert np.array_equal(pyrope.rotation_matrix(at, back), pyrope.rotation_matrix(at, rope).T)
    g = np.random.default_rng(seed).standard_normal(rope.head_dim)
    turned = pyrope.rotate(g[None], at, back)[0]
    assert np.allclose(
        turned, pyrope.rotation_matrix(at, rope).T @ g, rtol=0, atol=1e-14 * rope.head_dim * back.attention_factor
    )


def test_the_catalogue_of_the_backward_pass():
    assert {"direction", "zeros returned"} == FAULTS.keys() - BACKWARD.keys()
    new = {"backward equals forward", "no gradient", "accumulated twice", "gradient negated", "sine of the other half"}
    assert new == BACKWARD.keys() - FAULTS.keys()
    for name, fault in BACKWARD.items():
        assert fault.name == name and fault.symptom and fault.cause and fault.fix


def test_the_page_has_every_mistake():
    """Those of a rotation that are new or have other words, and those of attention's gradients."""
    page = (pathlib.Path(__file__).parent.parent / "docs" / "backward.md").read_text()
    own = [fault for name, fault in BACKWARD.items() if fault.cause != getattr(FAULTS.get(name), "cause", "")]
    kinds = (SOFTMAX_GRADIENTS, LINEAR_GRADIENTS)
    own += [
        fault
        for kind in kinds
        for name, fault in kind.faults.items()
        if name not in {**ATTENTION, **LINEAR, **BACKWARD}
    ]
    assert len(own) > 10
    for fault in own:
        fields = {"shows": fault.symptom, "cause": fault.cause, "fix": fault.fix, "happened in": fault.happened}
        assert listed_fields(fault.name, fields) in page
    for name in (name for kind in kinds for name in kind.faults):
        assert name in page


# The command line

TARGET = """
import numpy as np

def angles(m):
    return m[:, None] / 10000.0 ** (np.arange(0, 32, 2) / 32)

def turned(g, m, sign):
    a, b = np.split(g.astype(np.float64), 2, axis=-1)
    cos, sin = np.cos(angles(m)), sign * np.sin(angles(m))
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(g.dtype)

def backward(g, m):
    return turned(g, m, -1)

def forward(g, m):
    return turned(g, m, 1)

def nothing(q, k, v, g):
    return None, None, None
"""


@pytest.mark.parametrize(
    "words, code, text",
    [
        (["{}:backward", "--backward"], 0, "rotation, backward: RIGHT"),
        (["{}:forward", "--backward"], 1, "backward equals forward"),
        (["{}:forward"], 0, "rotation: RIGHT"),
        (["{}:forward", "--autograd"], 2, "--autograd needs --framework torch, jax, mlx or paddle"),
        (["{}:missing_module", "--backward"], 2, "has no 'missing_module'"),
        (["{}:nothing", "--backward", "--attention", "softmax"], 1, "attention, backward: WRONG"),
        (["--exec", "cp {{q}} {{o}}", "--backward", "--attention", "softmax"], 2, "must say where {k} goes"),
    ],
)
def test_the_command_checks_backward_passes(tmp_path, capsys, words, code, text):
    (tmp_path / "own.py").write_text(TARGET)
    rope = [] if "--attention" in words else ["--head-dim", "32", "--base", "10000", "--layout", "half"]
    given = [word.format(tmp_path / "own.py") for word in words]
    assert cli.main(["check", *given, *rope, "--in-process"]) == code
    out, err = capsys.readouterr()
    assert text in out + err
