"""Test vectors: true, the same bytes everywhere, written whole; right results pass and wrong ones are named."""

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import truth
from strategies import DTYPES

import pyrope
from pyrope import Rope
from pyrope.oracle import manifest as manifests, vectors
from pyrope.oracle.adapters import from_command
from pyrope.oracle.attention_faults import ATTENTION, LINEAR
from pyrope.oracle.floats import BITS
from pyrope.oracle.vector_cases import POSITIONS, TRUTH, cases, exam_of
from pyrope.oracle.vectors import read_manifest, verify_vectors, write_vectors
from pyrope.tensors import load_safetensors, save_npy, save_safetensors

# On every platform: `LC_ALL=C; sha256sum npy/rotation-*.npy rotation.safetensors | sha256sum`. It changes with the cases
# of rotations and with how tensors are written, and with nothing else: not the version, nor a word of the manifest.
ROTATION_SHA256 = "995ec3b107d830b1488d4a3e4662dedbd7d02b389270d2a741785599a2ab9673"
CASES_SHA256 = "2807bca9e9a9a3e65d293a34706d723dccb10c54d71d1cd97f493d1b64871e0f"
ROTATIONS = {case.name: case for case in cases("rotation")}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("vectors") / "all"
    write_vectors(path)
    return path


def computed(case, **changes):
    """What pyrope gives, in the dtype of the case; changes are for the rope or, below, for the options."""
    own = {name: a if a.dtype == np.int64 else a.astype(DTYPES[case.dtype]) for name, a in case.inputs.items()}
    rope, options = changes.pop("rope", case.rope), {**case.options, **changes}
    if case.kind == "rotation":
        return pyrope.rotate(own["x"], own["positions"], rope)
    q, k, v, q_at, k_at = (own[name] for name in ("q", "k", "v", "q_positions", "k_positions"))
    if case.kind == "linear":
        return pyrope.linear_attention(q, k, v, None if rope is None else q_at, rope, **options)
    if rope is not None:
        q, k = pyrope.rotate(q, q_at, rope), pyrope.rotate(k, k_at, rope)
    return pyrope.attention(q, k, v, q_positions=q_at, k_positions=k_at, **options)


def test_the_cases_are_those_that_were_published():
    """Their frequencies, options and inputs, number by number: whoever has results of an earlier version can still compare
    them."""
    digest, shape = hashlib.sha256(), ("head_dim", "base", "layout", "width", "start", "direction", "attention_factor")
    for case in cases():
        rope = []
        if case.rope is not None:
            rope = [getattr(case.rope, name) for name in shape] + [pyrope.frequencies(case.rope).tolist()]
            rope += [[axis for axis, _ in case.rope.axes.assign(case.rope.pairs)]] if case.rope.axes else []
        digest.update(repr((case.name, case.kind, case.dtype, rope, sorted(case.options.items()))).encode())
        for name, array in case.inputs.items():
            digest.update(f"{name} {array.shape} ".encode() + array.astype(array.dtype.newbyteorder("<")).tobytes())
    assert digest.hexdigest() == CASES_SHA256


def rotation_digest(directory):
    files = sorted(path for path in directory.rglob("*rotation*") if path.is_file())
    lines = (f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(directory).as_posix()}\n" for p in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def test_rotation_vectors_are_the_same_bytes_everywhere(directory, tmp_path):
    assert rotation_digest(directory) == ROTATION_SHA256
    write_vectors(tmp_path / "again", "rotation")
    manifest = read_manifest(tmp_path / "again")
    digests = {name: digest for name, digest in read_manifest(directory)["files"].items() if "rotation" in name}
    assert manifest["files"] == digests and {case["kind"] for case in manifest["cases"]} == {"rotation"}
    tensors, _ = load_safetensors(directory / "rotation.safetensors")
    for name, array in tensors.items():
        bits = np.load(directory / "npy" / f"{name}.npy")
        assert bits.tobytes() == array.tobytes() and bits.shape == array.shape


def test_cases_cover_what_they_promise():
    ropes = [case.rope for case in cases("rotation")]
    assert {case.dtype for case in cases("rotation")} == set(BITS)
    assert {rope.layout for rope in ropes} == {"interleaved", "half", "interleaved-to-half"}
    assert {type(rope.scaling).__name__ for rope in ropes} == {
        "NoneType", "Linear", "DynamicNTK", "YaRN", "LongRoPE", "Llama3", "Proportional"}  # fmt: skip
    assert {rope.axes.style for rope in ropes if rope.axes} == {"sections", "interleaved", "axial", "pixtral"}
    assert {(rope.placement, rope.rotary_dim is None) for rope in ropes} >= {("prefix", False), ("suffix", False)}
    assert min(POSITIONS) == 0 and max(POSITIONS) == 2**31
    assert len({case.name for case in cases()}) == len(cases())


def test_inputs_are_exact_in_their_dtype_and_use_all_of_its_bits():
    for case in cases():
        for name, array in case.inputs.items():
            if array.dtype == np.float64:
                assert (array.astype(DTYPES[case.dtype]).astype(np.float64) == array).all()
                scaled = array * 2.0 ** (BITS[case.dtype] - 1)
                assert (scaled == np.rint(scaled)).all() and (np.abs(array) <= 1).all()
                assert (scaled % 2 == 1).mean() > 0.4, (case.name, name)


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations_are_true_within_the_stated_error(directory, name):
    case, entry = ROTATIONS[name], next(e for e in read_manifest(directory)["cases"] if e["name"] == name)
    y = np.load(directory / "npy" / f"{name}.y.npy")
    x, at = case.inputs["x"], case.inputs["positions"]
    for j in range(0, at.shape[-1], 2):
        matrix = truth.matrix(case.rope, at[..., j])
        assert np.abs(x[:, j] @ matrix.T - y[:, j]).max() <= entry["truth_error"] + 2.0**-53 * case.rope.head_dim
    assert entry["truth_error"] < 2e-15
    assert [float(t) for t in truth.theta(case.rope)] == entry["rope"]["theta"]


def test_attention_is_that_of_the_engine_within_the_stated_error(directory):
    for entry in read_manifest(directory)["cases"]:
        case = next(case for case in cases() if case.name == entry["name"])
        if case.kind == "rotation":
            continue
        own = {
            name: array.astype(np.float64) if array.dtype != np.int64 else array for name, array in case.inputs.items()
        }
        wide = vectors.Case(case.name, case.kind, "float64", case.rope, case.options, own)
        off = np.abs(computed(wide) - np.load(directory / "npy" / f"{case.name}.y.npy")).max()
        assert off <= entry["truth_error"] < 1e-12
        if case.kind == "attention":
            q, k = (
                (own["q"], own["k"])
                if case.rope is None
                else (pyrope.rotate(own[a], own[f"{a}_positions"], case.rope) for a in "qk")
            )
            at = {name: own[name] for name in ("q_positions", "k_positions")}
            definition = pyrope.attention_by_definition(q, k, own["v"], **at, **case.options)
            assert np.abs(definition - TRUTH["attention"](case).out).max() <= entry["truth_error"]


def test_the_manifest_tells_all(directory):
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["format"] == "pyrope-vectors" and manifest["version"] == 1
    assert sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) < 10e6
    stored = {
        kind: load_safetensors(directory / f"{kind}.safetensors")[0] for kind in ("rotation", "attention", "linear")
    }
    for entry in manifest["cases"]:
        for tensor in entry["tensors"].values():
            array = stored[entry["kind"]][tensor["key"]]
            assert (list(array.shape), array.dtype.name) == (tensor["shape"], tensor["dtype"])
            assert (directory / tensor["npy"]).is_file() and tensor["npy"] in manifest["files"]
        dtypes = {name: tensor["dtype"] for name, tensor in entry["tensors"].items()}
        wide = dict.fromkeys(("y", "cos", "sin"), "float64")
        assert dtypes == {name: "int64" if "positions" in name else wide.get(name, entry["dtype"]) for name in dtypes}
        for limits in entry["tolerances"].values():
            assert len(limits) == entry["tensors"]["y"]["shape"][-2] and min(limits) >= 0
        case = next(case for case in cases() if case.name == entry["name"])
        assert manifests._rope_from_json(entry["rope"]) == case.rope


def test_the_tolerances_are_those_of_the_judgement(directory):
    """A program without Python compares with them: right results are within, and not by a factor of a thousand."""
    for entry in read_manifest(directory)["cases"]:
        case = next(case for case in cases() if case.name == entry["name"])
        off = np.abs(computed(case).astype(np.float64) - np.load(directory / "npy" / f"{case.name}.y.npy"))
        rows = np.moveaxis(off, -2, 0).reshape(off.shape[-2], -1).max(axis=-1)
        tolerances = list(entry["tolerances"].values())
        assert any((rows <= limits).all() for limits in tolerances), case.name
        assert case.dtype == "float64" or rows.max() > 1e-3 * min(map(max, tolerances))


def rotated_by_the_manifest(directory, entry):
    """What docs/other-languages.md says of a rotation, with nothing but the files and float64."""
    x, positions = (np.load(directory / entry["tensors"][name]["npy"]) for name in ("x", "positions"))
    if entry["dtype"] == "bfloat16":
        x = (x.astype(np.uint32) << 16).view(np.float32)
    rope, x = entry["rope"], x.astype(np.float64)
    d, r = rope["head_dim"], rope["rotary_dim"] or rope["head_dim"]
    start, i = {"prefix": 0, "suffix": d - r}[rope["placement"]], np.arange(r // 2)
    of_pair = (
        np.broadcast_to(positions, (r // 2, positions.size))
        if rope["axes"] is None
        else positions[rope["axis_of_pair"]]
    )
    angle = of_pair.T * np.array(rope["theta"])
    cos, sin = rope["attention_factor"] * np.cos(angle), rope["direction"] * rope["attention_factor"] * np.sin(angle)
    near, far = (start + 2 * i, start + 2 * i + 1), (start + i, start + i + r // 2)
    (a, b), (first, second) = {
        "interleaved": (near, near), "half": (far, far), "interleaved-to-half": (near, far)}[rope["layout"]]  # fmt: skip
    y = x.copy()
    y[..., first], y[..., second] = x[..., a] * cos - x[..., b] * sin, x[..., a] * sin + x[..., b] * cos
    return y.astype(DTYPES[entry["dtype"]]), cos, sin


def test_the_manifest_alone_is_enough_to_rotate(directory):
    entries = [entry for entry in read_manifest(directory)["cases"] if entry["kind"] == "rotation"]
    made = {entry["name"]: rotated_by_the_manifest(directory, entry) for entry in entries}
    reports = {
        report.subject: report for report in verify_vectors(directory, {name: y for name, (y, *_) in made.items()})
    }
    for entry in entries:
        y, *tables = made[entry["name"]]
        grade = "float64 angle" if entry["dtype"] == "float64" else "rounded once"
        assert reports[entry["name"]].precision == grade
        off = np.abs(y.astype(np.float64) - np.load(directory / entry["tensors"]["y"]["npy"]))
        assert (off.max(axis=(0, 2)) <= entry["tolerances"][grade]).all()
        for name, table in zip(("cos", "sin"), tables, strict=True):
            assert np.abs(table - np.load(directory / entry["tensors"][name]["npy"])).max() < 1e-6  # m·θ is rounded


def by_float32_angles(x, positions, rope):
    """Either pairing, float32 θ, angles and tables."""
    p = rope.pairs
    theta = np.float32(1) / np.float32(rope.base) ** (np.arange(0, 2 * p, 2, dtype=np.float32) / np.float32(2 * p))
    angle = positions.astype(np.float32)[:, None] * theta
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    pairs = (slice(0, p), slice(p, 2 * p)) if rope.layout == "half" else (slice(0, None, 2), slice(1, None, 2))
    out = np.empty_like(x)
    a, b = (x[..., pair] for pair in pairs)
    out[..., pairs[0]], out[..., pairs[1]] = a * cos - b * sin, a * sin + b * cos
    return out


def with_float32_angles(case):
    own = {name: a if a.dtype == np.int64 else a.astype(DTYPES[case.dtype]) for name, a in case.inputs.items()}
    q, k, v, q_at, k_at = (own[name] for name in ("q", "k", "v", "q_positions", "k_positions"))
    if case.kind == "attention":
        q, k = by_float32_angles(q, q_at, case.rope), by_float32_angles(k, k_at, case.rope)
        return pyrope.attention(q, k, v, q_positions=q_at, k_positions=k_at, **case.options)
    k, v = (np.repeat(x, len(q) // len(x), axis=0) for x in (k, v))
    phi = (
        (lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))) if case.options["feature_map"] != "exp" else np.exp
    )
    q, k = phi(q), phi(k)
    lower = np.tri(q.shape[-2], dtype=q.dtype) if case.options["causal"] else 1
    turned = by_float32_angles(q, q_at, case.rope), by_float32_angles(k, q_at, case.rope)
    return turned[0] @ turned[1].swapaxes(-1, -2) * lower @ v / (q @ k.swapaxes(-1, -2) * lower).sum(-1, keepdims=True)


def test_attention_with_float32_angles_is_right_as_its_rotations_are(directory):
    wide = [case for case in cases() if case.kind != "rotation" and case.rope and case.dtype in ("float32", "float64")]
    outputs = {case.name: computed(case) for case in cases()} | {case.name: with_float32_angles(case) for case in wide}
    reports = {report.subject: report for report in verify_vectors(directory, outputs)}
    assert all(report.verdict == "right" for report in reports.values()), {
        n: r.faults for n, r in reports.items() if not r.ok
    }
    for name in ("attention-far", "attention-causal-float64", "linear-19-causal-float64"):
        assert reports[name].precision == "float32 angle"


def test_float32_angles_excuse_no_mistake_far_away(directory):
    case = next(case for case in cases() if case.name == "attention-far")
    loosest = TRUTH["attention"](case).loosest
    for wrong in (computed(case, rope=None), computed(case, rope=replace(case.rope, layout="half"))):
        assert (np.abs(wrong - TRUTH["attention"](case).out) > loosest).any()


def test_right_results_are_right(directory, tmp_path):
    outputs = {case.name: computed(case) for case in cases()}
    for name, array in outputs.items():
        save_npy(tmp_path / f"{name}.npy", array)
    save_safetensors(tmp_path / "all.safetensors", outputs, {})
    for source in (outputs, tmp_path, tmp_path / "all.safetensors", str(tmp_path)):
        reports = verify_vectors(directory, source)
        assert [report.subject for report in reports] == [case.name for case in cases()]
        assert {report.verdict for report in reports} == {"right"}
    grades = {
        case.dtype: report.precision for case, report in zip(cases(), reports, strict=True) if case.kind == "rotation"
    }
    assert grades["bfloat16"] == grades["float16"] == "rounded once"
    assert grades["float32"] == grades["float64"] == "tables or products in x's dtype"
    assert all(row.worst < 4 for report in reports for row in report.errors)
    once = next(report for report in reports if report.subject == "rotation-half-bfloat16")
    assert all(0.25 < row.worst < 0.51 for row in once.errors if row.where != "position 0")


def test_every_position_is_in_one_range():
    for case in ROTATIONS.values():
        ranges = [rows for _, rows in vectors._ranges(case, case.x.shape[-2])]
        assert (np.sum(ranges, axis=0) == 1).all() and all(rows.any() for rows in ranges)


def in_float32(case):
    """The usual pipeline: frequencies, angle and tables in float32, products in the dtype of x."""
    rope, at = case.rope, case.inputs["positions"]
    theta = np.float32(rope.base) ** (-np.arange(0, rope.width, 2, dtype=np.float32) / np.float32(rope.width))
    angle = at[:, None].astype(np.float32) * theta
    dtype = DTYPES[case.dtype]
    cos, sin = np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)
    x = case.inputs["x"].astype(dtype)
    a, b = x[..., : rope.pairs], x[..., rope.pairs :]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


@pytest.mark.parametrize(
    "dtype, grade", [("float32", "float32 angle"), ("bfloat16", "float32 angle, and tables or products in x's dtype")]
)
def test_a_float32_angle_is_right_and_said_to_be_one(directory, dtype, grade):
    name = f"rotation-half-{dtype}"
    report = verify_one(directory, name, in_float32(ROTATIONS[name]))
    assert report.verdict == "right" and report.precision == grade
    assert "not decided" in report.notes[0]


def verify_one(directory, name, output):
    return next(report for report in verify_vectors(directory, {name: output}) if report.subject == name)


def round_to(k, bits):
    """To so many bits, half to even, by Python's integers."""
    shift = max(int(k).bit_length() - bits, 0)
    low, rest = divmod(int(k), 1 << shift)
    up = rest * 2 > (1 << shift) or (rest * 2 == (1 << shift) and low % 2)
    return (low + bool(up)) << shift


def moved(case, positions):
    """In float64 and rounded once, positions beyond the engine's limit included."""
    theta = [float(t) for t in truth.theta(case.rope)]
    out = case.inputs["x"].copy()
    for j, m in enumerate(positions):
        angles = [truth.MP.mpf(int(m)) * t for t in truth.theta(case.rope)]
        c, s = ([float(f(a)) for a in angles] for f in (truth.MP.cos, truth.MP.sin))
        p = len(theta)
        a, b = case.inputs["x"][:, j, :p], case.inputs["x"][:, j, p : 2 * p]
        out[:, j, :p], out[:, j, p : 2 * p] = a * np.array(c) - b * np.array(s), b * np.array(c) + a * np.array(s)
    return out.astype(DTYPES[case.dtype])


def axes_exchanged(case):
    at = case.inputs["positions"]
    return replace(case, inputs={**case.inputs, "positions": at[[0, 2, 1] if len(at) == 3 else [1, 0]]})


AT = np.array(POSITIONS)
HALF32 = "rotation-half-float32"
# Case, fault, what was done, the first position that shows it.
FAULTS = [
    ("rotation-interleaved-float32", "wrong pairing", lambda c: computed(c, rope=Rope(32, 10000.0, "half")), 1),
    ("rotation-half-bfloat16", "wrong pairing", lambda c: computed(c, rope=Rope(32, 10000.0, "interleaved")), 1),
    ("rotation-half-float16", "direction", lambda c: computed(c, rope=Rope(32, 10000.0, "half", direction=-1)), 1),
    (HALF32, "not rotated", lambda c: c.inputs["x"].astype(np.float32), 1),
    (HALF32, "wrong base", lambda c: computed(c, rope=Rope(32, 500000.0, "half")), 1),
    ("rotation-head-128-float32", "wrong base", lambda c: computed(c, rope=Rope(128, 10000.0, "half")), 1),
    (HALF32, "positions one too high", lambda c: moved(c, AT + 1), 0),
    ("rotation-half-bfloat16", "positions one too high", lambda c: moved(c, AT + 1), 0),
    (HALF32, "positions one too low", lambda c: moved(c, AT - 1), 0),
    (HALF32, "rotated twice", lambda c: moved(c, AT * 2), 1),
    (HALF32, "bfloat16 positions", lambda c: moved(c, [round_to(k, 8) for k in POSITIONS]), 257),
    (HALF32, "float16 positions", lambda c: np.where(np.abs(AT)[:, None] > 65504, np.float32("nan"), moved(c, [round_to(k, 11) for k in POSITIONS])), 2049),
    (HALF32, "positions in int32", lambda c: moved(c, [k - 2**32 * (k >= 2**31) for k in POSITIONS]), 2**31),
    (HALF32, "positions of the first chunk repeated", lambda c: moved(c, [*POSITIONS[:12], *POSITIONS[:11]]), 2049),
    (HALF32, "attention factor unwanted", lambda c: (1.25 * computed(c)).astype(np.float32), 0),
    *[(f"rotation-axes-{style}-float32", "axes in another order", lambda c: computed(axes_exchanged(c)), None) for style in ("sections", "interleaved", "axial", "pixtral")],
    ("rotation-axes-sections-float32", "pairs dealt otherwise", lambda c: computed(c, rope=replace(c.rope, axes=replace(c.rope.axes, style="interleaved"))), None),
    ("rotation-axes-axial-float32", "pairs dealt otherwise", lambda c: computed(c, rope=replace(c.rope, axes=replace(c.rope.axes, style="pixtral"))), None),
    ("rotation-llama3-float32", "scaling ignored", lambda c: computed(c, rope=Rope(32, 500000.0, "half")), 1),
    ("rotation-yarn-float32", "attention factor missing", lambda c: computed(c, rope=c.rope.pure), 0),
    ("rotation-prefix-half-float32", "whole head rotated", lambda c: computed(c, rope=Rope(32, 10000.0, "half")), 1),
    ("rotation-suffix-half-float32", "wrong end rotated", lambda c: computed(c, rope=Rope(32, 10000.0, "half", 12)), 1),
    ("rotation-prefix-interleaved-float32", "exponent over the head size",
     lambda c: computed(c, rope=Rope(32, 100.0, "interleaved", 16)), 1),
    ("attention-causal-float32", "not causal", lambda c: computed(c, causal=False), None),
    ("attention-causal-float32", "not rotated", lambda c: computed(c, rope=None), None),
    ("attention-causal-float32", "scale missing", lambda c: computed(c, scale=1.0), None),
    ("attention-scale", "scale ignored", lambda c: computed(c, scale=None), None),
    ("attention-scale", "another scale", lambda c: computed(c, scale=0.31), None),
    ("attention-causal-float16", "direction", lambda c: computed(c, rope=replace(c.rope, direction=-1)), None),
    ("attention-two-sided", "wrong pairing", lambda c: computed(c, rope=Rope(16, 10000.0, "interleaved")), None),
    ("attention-causal-float64", "wrong base", lambda c: computed(c, rope=Rope(16, 371.0, "half")), None),
    ("linear-19-exp", "wrong base", lambda c: computed(c, rope=Rope(16, 371.0, "half")), None),
    ("linear-19-two-sided", "direction", lambda c: computed(c, rope=replace(c.rope, direction=-1)), None),
    ("linear-18-grouped", "another feature map", lambda c: computed(c, feature_map="relu2"), None),
    ("attention-window", "window one too narrow", lambda c: computed(c, window=4), None),
    ("attention-window", "window one too wide", lambda c: computed(c, window=6), None),
    ("attention-two-sided-window", "window ignored", lambda c: computed(c, window=None), None),
    ("attention-softcap", "softcap missing", lambda c: computed(c, softcap=None), None),
    ("attention-continued", "causal from the top left", lambda c: top_left(turned(c)), None),
    ("attention-grouped", "heads tiled", lambda c: computed(tiled(c)), None),
    ("attention-causal-float32", "keys not rotated", lambda c: computed(turned(c, "q"), rope=None), None),
    ("attention-causal-float32", "queries not rotated", lambda c: computed(turned(c, "k"), rope=None), None),
    ("attention-causal-float32", "values rotated", lambda c: computed(turned(c, "v")), None),
    ("linear-19-causal-float32", "not rotated", lambda c: computed(c, rope=None), None),
    ("linear-19-causal-float32", "not causal", lambda c: computed(c, causal=False), None),
    ("linear-18-causal-float32", "not causal", lambda c: computed(c, causal=False), None),
    ("linear-19-causal-float32", "rotated before the feature map", lambda c: computed(turned(c, "qk"), rope=None), None),
    ("linear-19-causal-float32", "denominator rotated", lambda c: rotated_denominator(c), None),
    ("linear-19-grouped", "heads tiled", lambda c: computed(tiled(c)), None),
    ("linear-18-causal-float32", "normaliser summed over heads", lambda c: summed(c), None),
]  # fmt: skip


def with_inputs(case, **inputs):
    return vectors.Case(case.name, case.kind, case.dtype, case.rope, case.options, {**case.inputs, **inputs})


def turned(case, which="qk"):
    at = {"q": "q_positions", "k": "k_positions", "v": "k_positions"}
    return with_inputs(case, **{a: pyrope.rotate(case.inputs[a], case.inputs[at[a]], case.rope) for a in which})


def tiled(case):
    order = np.arange(6) % 2
    return with_inputs(case, k=case.inputs["k"][order], v=case.inputs["v"][order])


def weights(case, rope):
    q, k, at = (case.inputs[name] for name in ("q", "k", "q_positions"))
    phi_q, phi_k = (np.where(x > 0, x + 1, np.exp(x)) for x in (q, k))
    if rope is not None:
        phi_q, phi_k = (pyrope.rotate(x, at, rope) for x in (phi_q, phi_k))
    return np.tril(phi_q @ phi_k.swapaxes(-1, -2))


def rotated_denominator(case):
    w = weights(case, case.rope)
    return (w @ case.inputs["v"] / w.sum(-1, keepdims=True)).astype(np.float32)


def summed(case):
    w = weights(case, None)
    return (w @ case.inputs["v"] / w.sum(-1, keepdims=True).sum(0, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("name, fault, make, since", FAULTS, ids=[f"{name}-{fault}" for name, fault, *_ in FAULTS])
def test_wrong_results_are_named(directory, name, fault, make, since):
    report = verify_one(directory, name, make(next(case for case in cases() if case.name == name)))
    assert report.faults == (fault,)
    finding = report.findings[0]
    assert (finding.since == since) == (since is not None)  # of attention, a row
    assert ("within what is allowed at 0" in finding.evidence) == (since is not None and since > 0)
    assert "numbers are off, the worst by" in finding.evidence and "ulps" in finding.evidence


def made(case, fault):
    """What the mistakes of the catalogue give, in the dtype of the case; of the many ways to split a row, some."""
    own = {
        name: a[None] if a.dtype == np.int64 else a[None].astype(DTYPES[case.dtype]) for name, a in case.inputs.items()
    }
    changes = fault.changes(exam_of(case).spec)
    step = max(1, len(changes) // 8) if changes and "shards" in changes[0].fields else 1
    for variant in range(0, len(changes), step):
        with np.errstate(all="ignore"):
            yield fault.make(exam_of(case).spec, variant)(*(own[name] for name in ("q", "k", "v", "k_positions")))[0]


SHOWING = ["causal-float32", "grouped", "two-sided-window", "window", "softcap", "scale", "continued", "two-sided"]
WITHOUT = {  # what no case shows: one row, small scores, no mask, no cache, no rescaling, no part, positions 0, 1, 2, …
    "whole head rotated", "sums in low precision",
    "finite mask value", "empty rows are NaN", "empty rows are uniform", "mask ignored", "mask inverted",
    "packed sequences see each other", "softmax overflows", "batch rows mixed", "positions ignored", "scaling ignored",
    "attention factor not squared", "attention factor missing", "attention factor applied",
    "cache forgotten", "cache positions restart", "cache positions one too high", "cached keys rotated again",
    "cached keys not rotated", "normaliser not kept", "numerator not kept", "state not reset",
    "length taken from each call", "mask instead of causality", "mask of another row", "causal by position",
    "denominator at least 1", "positions of a batch misread", "float16 positions", "bfloat16 positions"}  # fmt: skip


@pytest.mark.parametrize("faults, prefix", [(ATTENTION, "attention"), (LINEAR, "linear-19")])
def test_every_mistake_of_the_catalogues_is_named_where_a_case_shows_it(faults, prefix):
    listed = {case.name: case for case in cases()}
    shown = set()
    for case in (listed[f"{prefix}-{name}"] for name in SHOWING if f"{prefix}-{name}" in listed):
        truth = TRUTH[case.kind](case).out
        for fault in (fault for name, fault in faults.items() if name not in shown):
            for output in (output for output in made(case, fault) if output.shape == truth.shape):
                report = vectors._judged(case, truth, vectors._Outputs({case.name: output}), ())
                if not report.ok:
                    named = {name for f in report.findings for name in (f.fault, *f.alternatives)}
                    assert fault.name in named, (case.name, fault.name, str(report))
                    shown.add(fault.name)
                    assert max(map(len, str(report).splitlines())) <= 80
    assert set(faults) - shown == WITHOUT & set(faults)


def top_left(case):
    q, k, v = (case.inputs[a].astype(np.float32) for a in "qkv")
    return pyrope.attention(q, k, v, q_positions=np.arange(3), k_positions=np.arange(24), causal=True)


def test_another_order_of_features_is_equivalent(directory):
    name = "rotation-interleaved-float32"
    output = computed(ROTATIONS[name], rope=Rope(32, 10000.0, "interleaved-to-half"))
    report = verify_one(directory, name, output)
    assert report.verdict == "equivalent" and 'in the order of "interleaved-to-half"' in report.notes[0]


def test_positions_that_a_program_keeps_in_int32_are_named(directory):
    """As a C program does it: the position is an int, whose largest value is followed by the least."""
    x, at = ROTATIONS[HALF32].inputs["x"], np.array(POSITIONS).astype(np.int32).astype(np.float64)
    assert at.min() == -(2.0**31)
    angle = at[:, None] * 10000.0 ** (-np.arange(16) / 16)
    a, b = x[..., :16], x[..., 16:]
    y = np.concatenate((a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)), -1)
    report = verify_one(directory, HALF32, y.astype(np.float32))
    assert report.faults == ("positions in int32",) and report.findings[0].since == 2**31


def test_only_the_cases_that_are_asked_for_are_judged(directory):
    output = {HALF32: computed(ROTATIONS[HALF32])}
    assert [report.subject for report in verify_vectors(directory, output, only=HALF32)] == [HALF32]
    with pytest.raises(ValueError, match=r"no case has a name like 'rotaton-\*'"):
        verify_vectors(directory, output, only="rotaton-*")


def test_a_mean_square_that_is_too_large_is_located_at_its_worst(directory):
    """Every number within its own bound, nine tenths of it, and all of them together beyond that of the mean square."""
    case = next(case for case in cases() if case.name == "attention-causal-float64")
    truth = TRUTH["attention"](case)
    signs = np.where(np.arange(truth.out.size).reshape(truth.out.shape) % 3, 1, -1)
    output = truth.out + 0.9 * signs * truth.loosest
    report = verify_one(directory, case.name, output)
    assert report.verdict == "wrong" and f"1 of {truth.out.size} numbers are off" in report.findings[0].evidence


def test_a_rotation_without_a_rope_leaves_what_it_is_given():
    case = replace(ROTATIONS[HALF32], rope=None)
    truth, x = TRUTH["rotation"](case), case.inputs["x"]
    assert (truth.out == x).all() and (truth.size == np.abs(x)).all() and truth.error == 0 and not truth.loosest.any()


def test_what_is_none_of_these_is_unexplained_and_located(directory):
    output = computed(ROTATIONS[HALF32])
    output[1, 9, 5] += 0.5
    report = verify_one(directory, HALF32, output)
    assert report.faults == ("unexplained",) and report.findings[0].since == 257
    assert "1 of 1472 numbers are off" in report.findings[0].evidence and "at (1, 9, 5)" in report.findings[0].evidence
    assert "in 1 of 32 features" in report.findings[0].evidence
    for value in (np.nan, np.inf):
        output = computed(ROTATIONS[HALF32])
        output[0, 0, 0] = value
        assert verify_one(directory, HALF32, output).faults == ("not finite",)


def test_features_that_do_not_turn_must_not_change(directory):
    name = "rotation-prefix-half-float32"
    output = computed(ROTATIONS[name])
    output[0, 3, 20] = np.nextafter(output[0, 3, 20], np.float32(9))
    assert verify_one(directory, name, output).faults == ("unexplained",)


def test_outputs_that_are_missing_or_of_another_form_are_reported(directory, tmp_path):
    reports = {report.subject: report for report in verify_vectors(directory, {"rotation-haf-float32": np.ones(3)})}
    assert all(report.verdict == "not judged" for report in reports.values()) and len(reports) == len(cases())
    assert reports[HALF32].failure.reason.startswith(f"there is no output {HALF32!r}; there is 'rotation-haf-float32'")
    for bad in (np.ones((2, 23, 32)), np.ones((2, 23, 31), np.float32), "text"):
        report = verify_one(directory, HALF32, bad)
        assert report.verdict == "not judged" and "must be float32 of shape (2, 23, 32)" in report.failure.reason
    np.save(tmp_path / f"{HALF32}.npy", np.ones((2, 23, 32), ">f4"))
    (report,) = (r for r in verify_vectors(directory, tmp_path) if r.subject == HALF32)
    assert "was big-endian float32" in report.failure.reason and "float32, in .npy little" in report.failure.fix
    (tmp_path / f"{HALF32}.npy").write_bytes(b"nothing")
    (report,) = (r for r in verify_vectors(directory, tmp_path) if r.subject == HALF32)
    assert "is not a valid .npy file" in report.failure.reason


# Files


def test_a_directory_of_others_is_not_overwritten(tmp_path):
    target = tmp_path / "deep" / "there"
    write_vectors(target, "linear")
    assert {entry["kind"] for entry in read_manifest(target)["cases"]} == {"linear"}
    write_vectors(target, "attention")  # its own, and replaced
    assert {entry["kind"] for entry in read_manifest(target)["cases"]} == {"attention"}
    assert sorted(os.listdir(target)) == ["attention.safetensors", "manifest.json", "npy"]
    (target / "npy" / "mine.npy").write_text("precious")
    with pytest.raises(ValueError, match="holds something else than test vectors, such as npy/mine.npy"):
        write_vectors(target)
    assert (target / "npy" / "mine.npy").read_text() == "precious"
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ValueError, match="must be a directory, or nothing yet"):
        write_vectors(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    write_vectors(tmp_path / "empty", "linear")
    assert sorted(os.listdir(tmp_path)) == ["deep", "empty", "file"] and os.listdir(tmp_path / "deep") == ["there"]
    with pytest.raises(
        ValueError, match="suite must be one of 'rotation', 'attention', 'linear', 'gradients', 'all', was 'rotations'"
    ):
        write_vectors(tmp_path / "new", "rotations")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("what", ["save_npy", "save_safetensors", "_replace", "shutil.rmtree"])
def test_ctrl_c_leaves_what_was_there(tmp_path, monkeypatch, what):
    write_vectors(tmp_path / "a", "linear")
    before = read_manifest(tmp_path / "a")

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    if what == "shutil.rmtree":  # in the middle of the exchange
        rename = os.rename
        calls = iter([rename, interrupted, rename])
        monkeypatch.setattr(os, "rename", lambda *paths: next(calls)(*paths))
    else:
        monkeypatch.setattr(vectors, what, interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_vectors(tmp_path / "a", "attention")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["a"] and read_manifest(tmp_path / "a") == before


def damage(path, change):
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def outside(manifest):
    """A case whose name leads out of the directory."""
    manifest["cases"][0].update(name="../../outside/evil")


def rewrite_npy(path, name, change):
    """Another array, with the right digest."""
    file = path / f"npy/{name}.npy"
    save_npy(file, change(np.load(file)))
    damage(path, lambda m: m["files"].update({f"npy/{name}.npy": hashlib.sha256(file.read_bytes()).hexdigest()}))


DAMAGE = [
    (lambda p: (p / "manifest.json").unlink(), "there is no manifest.json"),
    (lambda p: (p / "manifest.json").write_text("{"), "is no JSON"),
    (lambda p: (p / "manifest.json").write_text('{"version": 1, "version": 2}'), "the key 'version' occurs twice"),
    (lambda p: (p / "manifest.json").write_text("[]"), "the file must be a JSON object, was a list"),
    (lambda p: damage(p, lambda m: m.update(format="other")), "is no manifest of test vectors"),
    (lambda p: damage(p, lambda m: m.update(version=2)), "has version 2, this pyrope reads 1"),
    (lambda p: damage(p, lambda m: m.update(files=[])), "must list its files"),
    (lambda p: damage(p, lambda m: m["files"].update({"../outside": "0"})), "must list its files"),
    (lambda p: damage(p, lambda m: m["files"].update({"npy/../../outside": "0"})), "npy/../../outside is missing"),
    (lambda p: damage(p, lambda m: m.pop("cases")), "must list its cases"),
    (lambda p: damage(p, lambda m: m["cases"][0].pop("tensors")), "incomplete: KeyError"),
    (lambda p: damage(p, lambda m: m["cases"][0].update(name="../x")), "npy/../x.q.npy must be listed among its files"),
    (lambda p: damage(p, outside), "npy/../../outside/evil.q.npy must be listed among its files"),
    (lambda p: damage(p, lambda m: m["files"].pop("npy/linear-18-exp.q.npy")), "exp.q.npy must be listed among its files"),
    (lambda p: damage(p, lambda m: m["cases"][0].update(options={"causal": 1})), "causal must be True or False, was 1"),
    (lambda p: damage(p, lambda m: m["cases"][0].update(options={"casual": True})), "incomplete: KeyError"),
    (lambda p: damage(p, lambda m: m["cases"][0].update(options=[])), "incomplete: AttributeError"),
    (lambda p: damage(p, lambda m: m["cases"][0].update(options={"causal": True})), "must fit each other"),
    (lambda p: damage(p, lambda m: m["cases"][0]["options"].update(causal=False)), "y must be the true result"),
    (lambda p: damage(p, lambda m: m["cases"][0].update(tensors=[])), "incomplete: TypeError"),
    (lambda p: damage(p, lambda m: m["cases"][0]["tensors"].pop("v")), "incomplete: KeyError"),
    (lambda p: damage(p, lambda m: m["cases"][0]["tensors"]["v"].update(dtype="object")), "v.npy must be float64, was 'object'"),
    (lambda p: damage(p, lambda m: m["cases"][0]["tensors"]["v"].update(shape=[2**70])), "must be float64 of shape"),
    (lambda p: damage(p, lambda m: m["cases"][0].update(rope=[])), "incomplete: AttributeError"),
    (lambda p: ((p / "manifest.json").unlink(), os.mkfifo(p / "manifest.json")), "must be a file, and is something else"),
    (lambda p: damage(p, lambda m: m.update(words="x" * 2**24)), "must have at most 16777216 bytes"),
    (lambda p: rewrite_npy(p, "linear-18-exp.q", lambda x: x * np.float32("nan")), "its inputs must be finite"),
    (lambda p: rewrite_npy(p, "linear-18-exp.y", lambda x: x + 1e-12), "y must be the true result"),
    (lambda p: rewrite_npy(p, "linear-18-exp.q_positions", lambda x: x + 1), "must fit each other"),
    (lambda p: rewrite_npy(p, "linear-18-exp.k_positions", lambda x: x * 2**40), "must fit each other"),
    (lambda p: damage(p, lambda m: m["cases"][0].update(rope={"head_dim": 3})), "incomplete: KeyError"),
    (lambda p: damage(p, lambda m: m["cases"][0].update(kind="cube")), "kind must be one of"),
    (lambda p: damage(p, lambda m: m["cases"].append(3)), "incomplete: TypeError"),
    (lambda p: (p / "linear.safetensors").unlink(), "linear.safetensors is missing"),
    (lambda p: (p / "npy/linear-18-exp.q.npy").write_bytes(b"x"), "linear-18-exp.q.npy in .* is not what was written"),
]  # fmt: skip


@pytest.mark.parametrize("change, message", DAMAGE, ids=[message for _, message in DAMAGE])
def test_damaged_vectors_are_refused(tmp_path, change, message):
    write_vectors(tmp_path / "a", "linear")
    change(tmp_path / "a")
    with pytest.raises(ValueError, match=message):
        verify_vectors(tmp_path / "a", {})


def test_outputs_of_any_size_raise_no_warning(directory):
    """pytest makes an error of every warning: these numbers overflow when they are squared or divided."""
    for value in (1e300, -1e300, np.inf, -np.inf, np.nan, 5e-324):
        outputs = {
            name: np.full(case.inputs["x"].shape, value, case.dtype)
            for name, case in ROTATIONS.items()
            if case.dtype == "float64"
        }
        assert outputs and {r.verdict for r in verify_vectors(directory, outputs, only="rotation-*float64")} == {
            "wrong"
        }


def test_numpy_alone_is_enough(tmp_path):
    code = f"""if True:
        import sys
        sys.modules["ml_dtypes"] = None
        from pyrope.oracle.vectors import write_vectors, verify_vectors
        write_vectors({str(tmp_path / "v")!r})
        assert len(verify_vectors({str(tmp_path / "v")!r}, {{}})) == {len(cases())}
    """
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert rotation_digest(tmp_path / "v") == ROTATION_SHA256


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_program_in_c_tests_itself(directory, tmp_path):
    source = pathlib.Path(__file__).parent.parent / "examples/other_languages/my_rope.c"
    program = tmp_path / "my rope"
    subprocess.run(["cc", "-O2", "-o", program, source, "-lm"], check=True)
    files = [directory / "npy" / f"{HALF32}.{name}.npy" for name in ("x", "positions")]
    subprocess.run([program, *files, tmp_path / f"{HALF32}.npy"], check=True)
    (report,) = (report for report in verify_vectors(directory, tmp_path) if report.subject == HALF32)
    assert report.verdict == "right", str(report)
    fn = from_command([program, "{x}", "{positions}", "{y}"])
    x = np.random.default_rng(0).standard_normal((2, 3, 64)).astype(np.float32)
    assert (
        np.abs(fn(x, np.array([0, 7, 1000])) - pyrope.rotate(x, [0, 7, 1000], Rope(64, 10000.0, "half"))).max() < 1e-5
    )
