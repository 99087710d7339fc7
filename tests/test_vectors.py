"""Test vectors: outputs that NumPy code, written by hand from the manifest alone, computes are judged, and named if wrong."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import by_hand
import numpy as np
import pytest
from candidates import kernels, registry
from optional import package

from pyrope import Axes, DynamicNTK, Rope
from pyrope.files import dtype_named, save_safetensors
from pyrope.oracle import vectors
from pyrope.oracle.vectors import LEAST_POSITION, last_position, verify_vectors, write_vectors

package("ml_dtypes")


# ── A program in another language, as its author would write it from docs/other-languages.md ─────────────────────────


def read(folder, entry, name):
    array = np.load(folder / entry["arrays"][name]["npy"])
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64) if array.dtype != np.int64 else array


def stored(array, dtype):
    """As it is written to .npy; to bfloat16 by rounding to the nearest."""
    if dtype != "bfloat16":
        return array.astype(dtype)
    bits = array.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def turned(x, at, rope, back=False):
    """x (…, n, d), at (…, n) or (axes, n)."""
    if rope is None:
        return x
    d, r = rope["head_dim"], rope["rotary_dim"] or rope["head_dim"]
    at = at[rope["axis_of_pair"]].T if rope["axes"] else at[..., None]
    angle = at * np.array(rope["theta"]) * rope["direction"]
    c, s = np.cos(angle) * rope["attention_factor"], np.sin(angle) * rope["attention_factor"] * (-1 if back else 1)
    start, i = (d - r if rope["placement"] == "suffix" else 0), np.arange(r // 2)
    pairs = {"half": (start + i, start + i + r // 2), "interleaved": (start + 2 * i, start + 2 * i + 1)}
    reads, _, writes = rope["layout"].partition("-to-")
    (a, b), (to_a, to_b) = (pairs[name] for name in ((reads, writes or reads)[:: -1 if back else 1]))
    y = x.copy()
    y[..., to_a], y[..., to_b] = x[..., a] * c - x[..., b] * s, x[..., a] * s + x[..., b] * c
    return y


SOURCES = {"attention": kernels.SOFTMAX_BACKWARD, "linear": kernels.LINEAR_BACKWARD}


def attended(arrays, entry, *slips):
    """Attention by hand, of what the options of a case ask for; slips are edits of a kernel for its gradients."""
    options, rope, arrays = entry["options"], entry["rope"], dict(arrays)
    if rope is not None:
        rope = Rope(**{name: rope[name] for name in ("head_dim", "base", "layout", "rotary_dim")})
    elif entry["kind"] == "linear":  # which is by hand not without RoPE: at position 0, that does nothing
        rope, arrays["positions"] = Rope(8, 10000.0, "half"), np.zeros((len(arrays["q"]), arrays["k"].shape[2]), int)
    if entry["backward"]:
        exec(registry.edited(SOURCES[entry["kind"]], *slips), space := {})
        return space["fn"](**arrays)
    if entry["kind"] == "linear":
        return [by_hand.linear_attention(rope, options["feature_map"], options["causal"])(*arrays.values())]
    known = {name: options[name] for name in ("causal", "window", "softcap", "scale") if name in options}
    return [by_hand.softmax_attention(**known, rope=rope)(*arrays.values())]


def program(folder, entry, attend=attended, turn=turned):
    """The outputs of a case, by the names under which they are written."""
    arrays = {name: read(folder, entry, name) for name in entry["inputs"]}
    is_rotation = entry["kind"] == "rotation"
    results = [turn(*arrays.values(), entry["rope"], entry["backward"])] if is_rotation else attend(arrays, entry)
    return {name: stored(y, entry["dtype"]) for name, y in zip(entry["outputs"].values(), results, strict=True)}


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """Writes a suite once: its folder, and its cases by name."""
    written = {}

    def get(name):
        if name not in written:
            folder = tmp_path_factory.mktemp("vectors") / name
            written[name] = folder, {entry["name"]: entry for entry in write_vectors(folder, name)["cases"]}
        return written[name]

    return get


# ── Right programs ───────────────────────────────────────────────────────────────────────────────────────────────────


BY_HAND = re.compile("rotation|causal|grouped|attention-backward-unrotated")  # gradients whose kernels are by hand


@pytest.mark.parametrize("name", ["rotation", "attention", "linear", "gradients"])
def test_a_right_program_is_right_in_every_case(suite, name, tmp_path):
    folder, entries = suite(name)
    entries = {key: entry for key, entry in entries.items() if name != "gradients" or BY_HAND.search(key)}
    outputs = {key: array for entry in entries.values() for key, array in program(folder, entry).items()}
    for key, array in outputs.items():
        np.save(tmp_path / f"{key}.npy", array)
    reports = [report for report in verify_vectors(folder, tmp_path) if report.subject in entries]
    assert [report.subject for report in reports] == list(entries)
    assert {report.verdict for report in reports} == {"right"}, [str(x) for x in reports if not x.ok][:1]
    for entry in entries.values():  # what is allowed, without pyrope
        for result, key in entry["outputs"].items():
            y, most = (read(folder, entry, part) for part in (result, f"{result}.allowed"))
            bits = outputs[key]
            got = (bits.astype(np.uint32) << 16).view(np.float32) if bits.dtype == np.uint16 else bits
            assert (abs(got.astype(np.float64) - y) <= most).all()
            # Rows of linear attention share the mean square of all rows, in which small denominators weigh most.
            assert name == "linear" or np.median(most) < 0.05 * abs(y).max()


@pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")
def test_the_example_in_c_computes_the_cases_of_its_kind(suite, tmp_path):
    folder, _ = suite("rotation")
    source = Path(__file__).parent.parent / "examples" / "other_languages" / "my_rope.c"
    subprocess.run(["cc", "-O2", "-o", tmp_path / "my_rope", source, "-lm"], check=True)
    name = "rotation-half-float32"
    paths = [folder / "npy" / f"{name}.x.npy", folder / "npy" / f"{name}.positions.npy", tmp_path / f"{name}.npy"]
    subprocess.run([tmp_path / "my_rope", *paths], check=True)
    (report,) = verify_vectors(folder, tmp_path, only=name)
    assert (report.verdict, report.precision) == ("right", "rounded once")


def test_positions_go_far_and_files_are_small(suite):
    folder, entries = suite("rotation")
    entry = entries["rotation-yarn-float32"]
    assert read(folder, entry, "positions").max() == 131071 and entry["options"] == {"max_position": 131071}
    # Angles in float32, which most libraries have, are off by half an ulp of a position there, 0.004.
    assert 0.004 < read(folder, entry, "y.allowed").max() < 0.1
    files = [path for name in ("rotation", "attention", "linear") for path in suite(name)[0].rglob("*.*")]
    assert sum(path.stat().st_size for path in files) < 42e6


# ── Wrong programs ───────────────────────────────────────────────────────────────────────────────────────────────────


def rope_with(**fields):
    return lambda x, at, rope, back: turned(x, at, {**rope, **fields}, back)


WRONG_ROTATIONS = {
    "wrong pairing": rope_with(layout="interleaved"),
    "wrong base": rope_with(theta=[500000.0 ** (-i / 8) for i in range(8)]),
    "positions one too high": lambda x, at, rope, back: turned(x, at + 1, rope, back),
    "not finite": lambda x, at, rope, back: np.where(at[:, None] > 1000, np.nan, turned(x, at, rope)),
    "equivalent": rope_with(layout="half-to-interleaved"),
}


@pytest.mark.parametrize("fault", WRONG_ROTATIONS)
def test_a_wrong_rotation_is_named(suite, fault):
    folder, entries = suite("rotation")
    outputs = program(folder, entries["rotation-half-float32"], turn=WRONG_ROTATIONS[fault])
    (report,) = verify_vectors(folder, outputs, only="rotation-half-float32")
    assert report.subject == "rotation-half-float32"
    if fault == "equivalent":  # features in another order
        assert report.verdict == fault and "interleaved" in report.notes[0]
    else:
        assert report.verdict == "wrong" and report.faults[0].partition(":")[0] == fault, str(report)
        assert report.findings[0].where


def with_(arrays=None, rope=None, **options):
    """Attention of which something is otherwise than its case says."""

    def attend(given, entry):
        given = {name: (arrays or {}).get(name, lambda x: x)(x) for name, x in given.items()}
        return attended(
            given, {**entry, "rope": {**entry["rope"], **(rope or {})}, "options": {**entry["options"], **options}}
        )

    return attend


def without_the_row_term(arrays, entry):
    return attended(arrays, entry, ("dw - (w * dw).sum(axis=-1, keepdims=True)", "dw"))


CLIPPED = with_({"v": lambda v: np.clip(v, -1, 1)})
WRONG_ATTENTION = [
    (with_(causal=False), "linear-causal-float32", "causality: missing"),
    (with_({"positions": lambda at: 0 * at}), "attention-causal-float64", "not rotated"),
    (with_(rope={"base": 500000.0}), "attention-causal-float32", "wrong base"),
    (CLIPPED, "attention-causal-float32", "values: clipped at ±1"),
    (CLIPPED, "attention-continued-float32", "values: clipped at ±1"),
    (without_the_row_term, "attention-backward-causal-float32", "chain rule: row term missing"),
]


@pytest.mark.parametrize("attend, name, fault", WRONG_ATTENTION, ids=[fault for *_, fault in WRONG_ATTENTION])
def test_wrong_attention_is_named(suite, attend, name, fault):
    folder, entries = suite("gradients" if "backward" in name else name.partition("-")[0])
    (report,) = verify_vectors(folder, program(folder, entries[name], attend), only=name)
    assert report.verdict == "wrong" and report.faults == (fault,), str(report)


# ── One's own rope ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_vectors_of_ones_own(tmp_path):
    own = {"rope": Rope(16, 10000.0, "interleaved", rotary_dim=8), "heads": 6, "key_heads": 2}
    entries = write_vectors(tmp_path / "v", **own, max_position=LEAST_POSITION, dtype="float32")["cases"]
    names = ["rotation-own", "attention-own", "attention-own-continued", "linear-own", "linear-own-continued"]
    assert [entry["name"] for entry in entries] == [f"{name}-float32" for name in names]
    assert all(read(tmp_path / "v", entry, "positions").max() <= LEAST_POSITION for entry in entries)
    outputs = {name: y for entry in entries for name, y in program(tmp_path / "v", entry).items()}
    assert all(report.ok for report in verify_vectors(tmp_path / "v", outputs))
    assert read(tmp_path / "v", entries[2], "q").shape[1:] == (6, 3, 16)


HALF = Rope(16, 10000.0, "half")


def test_a_large_case_has_the_rows_of_a_right_program_alone(tmp_path, monkeypatch):
    counts = []
    for largest in (vectors.LARGEST, 0):
        monkeypatch.setattr(vectors, "LARGEST", largest)
        (entry,) = write_vectors(tmp_path / str(largest), "rotation", rope=HALF, dtype="float32")["cases"]
        counts.append(entry["arrays"]["x"]["shape"][0])
    assert counts[0] > counts[1] > 0


AXES = Rope(16, 10000.0, "half", axes=Axes("axial"))


@pytest.mark.parametrize("kind, words, make", [
    (ValueError, "max_position must be at least 63", lambda path: write_vectors(path, rope=HALF, max_position=62)),
    (ValueError, "key_heads must divide heads, 4, was 3", lambda path: write_vectors(path, rope=HALF, key_heads=3)),
    (TypeError, "rope must be a Rope", lambda path: write_vectors(path, rope=5)),
    (ValueError, "rotations alone", lambda path: write_vectors(path, "attention", rope=AXES)),
    (ValueError, "suite must be one of", lambda path: write_vectors(path, "x")),
    (ValueError, "dtype must be one of", lambda path: write_vectors(path, dtype="int8")),
])  # fmt: skip
def test_what_is_asked_for_is_checked(tmp_path, kind, words, make):
    with pytest.raises(kind, match=words):
        make(tmp_path / "v")
    assert not (tmp_path / "v").exists()


def test_without_ml_dtypes_there_is_no_bfloat16(monkeypatch):
    monkeypatch.setattr(vectors.importlib.util, "find_spec", lambda name: None)
    assert {case.dtype for case in vectors.cases("rotation")} == {"float16", "float32", "float64"}


def test_positions_end_where_the_rope_does(tmp_path):
    assert last_position(HALF) == 131071 and last_position(HALF, 500) == 500
    assert last_position(Rope(16, 10000.0, "half", scaling=DynamicNTK(2.0, 64, length=100))) == 99
    assert len(write_vectors(tmp_path / "v", rope=AXES, dtype="float16")["cases"]) == 1


# ── Outputs and folders that are not what they should be ─────────────────────────────────────────────────────────────


@pytest.fixture
def small(tmp_path):
    """Vectors of one rotation in bfloat16, and its right output."""
    manifest = write_vectors(tmp_path / "v", "rotation", rope=Rope(4, 10000.0, "half"), dtype="bfloat16")
    return tmp_path / "v", program(tmp_path / "v", manifest["cases"][0])["rotation-own-bfloat16"]


def test_outputs_are_read_from_files_of_two_kinds_and_from_a_dict(small, tmp_path):
    folder, y = small
    save_safetensors(tmp_path / "y.safetensors", {"rotation-own-bfloat16": y.view(dtype_named("bfloat16"))}, {})
    for outputs in (tmp_path / "y.safetensors", {"rotation-own-bfloat16": y, "more": y}):
        assert [report.verdict for report in verify_vectors(folder, outputs)] == ["right"]


@pytest.mark.parametrize("change, words", [
    (lambda y: None, "there is no file"),
    (lambda y: y[:-1], "must be .* of shape"),
    (lambda y: y.astype(np.float32), "was float32"),
    (lambda y: y.astype(">u2"), "big-endian"),
])  # fmt: skip
def test_an_output_that_cannot_be_judged_says_why(small, tmp_path, change, words):
    folder, y = small
    (tmp_path / "out").mkdir()
    if change(y) is not None:
        np.save(tmp_path / "out" / "rotation-own-bfloat16.npy", change(y))
    (report,) = verify_vectors(folder, tmp_path / "out")
    assert report.verdict == "not judged" and "uint16 bits" in report.failure.fix
    assert re.search(words, report.failure.reason), report.failure.reason


def test_a_folder_that_is_in_use_is_neither_overwritten_nor_read(small, tmp_path):
    folder, _ = small
    (tmp_path / "file").write_text("")
    for path in (folder, tmp_path / "file"):
        with pytest.raises(ValueError, match="must be a new or an empty directory"):
            write_vectors(path, "rotation")
    assert (folder / "manifest.json").exists()
    with pytest.raises(ValueError, match="no case has a name like 'x\\*'"):
        verify_vectors(folder, {}, only="x*")
    with pytest.raises(FileNotFoundError, match="manifest.json"):
        verify_vectors(tmp_path, {})
    with pytest.raises(FileNotFoundError, match="nowhere"):
        verify_vectors(folder, tmp_path / "nowhere")


def test_vectors_from_elsewhere_get_an_error_that_names_the_file(small):
    folder, y = small
    path, x = folder / "manifest.json", folder / "npy" / "rotation-own-bfloat16.x.npy"
    manifest, numbers = json.loads(path.read_text()), np.load(x)
    entry = manifest["cases"][0]
    for change, words in (
        ({"format": "else"}, 'must have "format": "pyrope-vectors"'),
        ({"version": 1}, "\"version\": 2, has 'pyrope-vectors', 1: write it anew"),
        ({"cases": 3}, "not iterable"),
        ({"cases": [{}]}, "'name'"),
        ({"cases": [{**entry, "rope": 3}]}, ""),
        ({"cases": [{**entry, "options": {"fn": 1}}]}, "fn"),
    ):
        path.write_text(json.dumps({**manifest, **change}))
        with pytest.raises(ValueError, match=f"manifest.json: .*{words}"):
            verify_vectors(folder, {"rotation-own-bfloat16": y})
    path.write_text(json.dumps(manifest))
    np.save(x, numbers[::-1] ^ 1)  # other numbers than those that are asked
    (report,) = verify_vectors(folder, {"rotation-own-bfloat16": y})
    assert report.verdict == "not judged" and "write the vectors anew" in report.failure.reason
    x.write_text("hello")
    with pytest.raises(ValueError, match=r"rotation-own-bfloat16.x.npy: "):
        verify_vectors(folder, {})
