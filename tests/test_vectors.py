"""Test vectors: outputs that NumPy code, written by hand from the manifest alone, computes are judged, and named if wrong."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from optional import package

from pyrope import Axes, DynamicNTK, Rope
from pyrope.files import dtype_named, save_safetensors
from pyrope.oracle import vectors
from pyrope.oracle.vectors import LEAST_POSITION, Own, verify_vectors, write_vectors

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


class Attention:
    """Attention of q (b, h, n, d), k and v (b, g, t, d) and positions (b, t), and its backward pass."""

    def __init__(self, arrays, entry):
        self.options, self.rope = entry["options"], entry["rope"]
        self.q, self.k, self.v = (arrays[name] for name in "qkv")
        self.g, self.at = arrays.get("g"), arrays.get("positions")
        self.linear = "feature_map" in self.options
        if self.linear and self.rope:
            self.rope = {**self.rope, "attention_factor": 1.0}
        self.scale = 1.0 if self.linear else self.options.get("scale", self.q.shape[-1] ** -0.5)
        self.weights = self.weigh()

    def seen(self):
        n, t = self.q.shape[2], self.k.shape[2]
        i, j = np.arange(t - n, t)[:, None], np.arange(t)
        before = (j <= i) | (not self.options["causal"])
        return before & (abs(i - j) < self.options.get("window", 10**9))

    def key_head(self, h, g):
        return np.arange(h) * g // h

    def spread(self, x):
        return x[:, self.key_head(self.q.shape[1], x.shape[1])]

    def turn(self, x, back=False):
        return x if self.rope is None else turned(x, self.at[:, None, -x.shape[2] :], self.rope, back)

    def phi(self, x):
        if not self.linear:
            return x
        return np.exp(x) if self.options["feature_map"] == "exp" else np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    def cap(self, scores):
        c = self.options.get("softcap")
        return scores if c is None else c * np.tanh(scores / c)

    def total(self):
        sums = self.phi(self.q) @ self.phi(self.spread(self.k)).swapaxes(2, 3) if self.linear else self.powers
        return np.where(self.seen(), sums, 0).sum(-1, keepdims=True)

    def weigh(self):
        tq, tk = self.turn(self.phi(self.q)), self.turn(self.phi(self.spread(self.k)))
        self.scores = self.cap(tq @ tk.swapaxes(2, 3) * self.scale)
        self.powers = self.scores if self.linear else np.exp(self.scores)
        return np.where(self.seen(), self.powers, 0) / self.total()

    def forward(self):
        return self.weights @ self.spread(self.v)

    def backward(self):
        w, g, q, k, v = self.weights, self.g, self.q, self.spread(self.k), self.spread(self.v)
        dw = g @ v.swapaxes(2, 3)
        inner, c = (w * dw).sum(-1, keepdims=True), self.options.get("softcap")
        ds = np.where(self.seen(), dw, 0) / self.total() if self.linear else w * (dw - inner) * self.scale
        ds = ds if c is None else ds * (1 - (self.scores / c) ** 2)
        fq, fk = self.phi(q), self.phi(k)
        dq, dk = self.turn(ds @ self.turn(fk), True), self.turn(ds.swapaxes(2, 3) @ self.turn(fq), True)
        if self.linear:
            dz = np.where(self.seen(), -inner / self.total(), 0)
            exp = self.options["feature_map"] == "exp"
            slopes = [np.exp(x) if exp else np.exp(np.minimum(x, 0)) for x in (q, k)]
            dq, dk = (dq + dz @ fk) * slopes[0], (dk + dz.swapaxes(2, 3) @ fq) * slopes[1]
        groups = [x.reshape(len(q), self.k.shape[1], -1, *k.shape[2:]).sum(2) for x in (dk, w.swapaxes(2, 3) @ g)]
        return dq, *groups


def program(folder, entry, kind=Attention, turn=turned):
    """The outputs of a case, by the names under which they are written."""
    arrays = {name: read(folder, entry, name) for name in entry["inputs"]}
    if entry["kind"] == "rotation":
        results = [turn(*arrays.values(), entry["rope"], entry["backward"])]
    else:
        made = kind(arrays, entry)
        results = made.backward() if entry["backward"] else [made.forward()]
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


@pytest.mark.parametrize("name", ["rotation", "attention", "linear", "gradients"])
def test_a_right_program_is_right_in_every_case(suite, name, tmp_path):
    folder, entries = suite(name)
    outputs = {key: array for entry in entries.values() for key, array in program(folder, entry).items()}
    for key, array in outputs.items():
        np.save(tmp_path / f"{key}.npy", array)
    reports = verify_vectors(folder, tmp_path)
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


def test_the_tables_are_those_of_the_manifest(suite):
    folder, entries = suite("rotation")
    entry = entries["rotation-yarn-float32"]
    angle = read(folder, entry, "positions")[:, None] * np.array(entry["rope"]["theta"])
    for name, table in (("cos", np.cos(angle)), ("sin", np.sin(angle))):
        assert abs(read(folder, entry, name) - table * entry["rope"]["attention_factor"]).max() < 1e-9
    assert read(folder, entry, "positions").max() == 131071 and entry["options"] == {"max_position": 131071}


def test_a_suite_is_moderate_in_size(suite):
    sizes = [
        sum(path.stat().st_size for path in suite(name)[0].rglob("*.*")) for name in ("rotation", "attention", "linear")
    ]
    assert sum(sizes) < 31e6


# ── Wrong programs ───────────────────────────────────────────────────────────────────────────────────────────────────


def rope_with(**fields):
    return lambda x, at, rope, back: turned(x, at, {**rope, **fields}, back)


def at_positions(change):
    return lambda x, at, rope, back: turned(x, change(at), rope, back)


WRONG_ROTATIONS = {
    "wrong pairing": rope_with(layout="interleaved"),
    "direction": rope_with(direction=-1),
    "wrong base": rope_with(theta=[500000.0 ** (-i / 8) for i in range(8)]),
    "positions one too high": at_positions(lambda at: at + 1),
    "not finite": lambda x, at, rope, back: np.where(at[:, None] > 1000, np.nan, turned(x, at, rope)),
}


@pytest.mark.parametrize("fault", WRONG_ROTATIONS)
def test_a_wrong_rotation_is_named(suite, fault):
    folder, entries = suite("rotation")
    outputs = program(folder, entries["rotation-half-float32"], turn=WRONG_ROTATIONS[fault])
    (report,) = verify_vectors(folder, outputs, only="rotation-half-float32")
    assert report.verdict == "wrong" and report.faults[0].partition(":")[0] == fault, str(report)
    assert report.subject == "rotation-half-float32" and report.findings[0].where


def test_features_in_another_order_are_equivalent(suite):
    folder, entries = suite("rotation")
    outputs = program(folder, entries["rotation-half-float32"], turn=rope_with(layout="half-to-interleaved"))
    (report,) = verify_vectors(folder, outputs, only="rotation-half-float32")
    assert report.verdict == "equivalent" and "interleaved" in report.notes[0]


class TwoSided(Attention):
    def seen(self):
        return np.ones((self.q.shape[2], self.k.shape[2]), bool)


class Tiled(Attention):
    def key_head(self, h, g):
        return np.arange(h) % g


class Unrotated(Attention):
    def turn(self, x, back=False):
        return x


class OtherBase(Attention):
    def turn(self, x, back=False):
        theta = [500000.0 ** (-i / 4) for i in range(4)]
        return turned(x, self.at[:, None, -x.shape[2] :], {**self.rope, "theta": theta}, back)


class WiderWindow(Attention):
    def seen(self):
        i = np.arange(self.k.shape[2])
        return np.tri(i.size, dtype=bool) & (i[:, None] - i <= self.options["window"])


class TopLeft(Attention):
    def seen(self):
        return np.tri(self.q.shape[2], self.k.shape[2], dtype=bool)


class Sink(Attention):
    def total(self):
        return super().total() + 1


class Clipped(Attention):
    def forward(self):
        return self.weights @ np.clip(self.spread(self.v), -1, 1)


class Rowless(Attention):
    """The backward pass without the term of the whole row."""

    def backward(self):
        ds = self.weights * (self.g @ self.v.swapaxes(2, 3)) * self.scale
        dq, dk = self.turn(ds @ self.turn(self.k), True), self.turn(ds.swapaxes(2, 3) @ self.turn(self.q), True)
        return dq, dk, self.weights.swapaxes(2, 3) @ self.g


WRONG_ATTENTION = [
    (TwoSided, "linear-causal-float32", "causality: missing"),
    (Tiled, "attention-grouped-float32", "heads: tiled"),
    (Unrotated, "attention-causal-float32", "not rotated"),
    (Unrotated, "attention-causal-float64", "unexplained"),  # it has no rows that tell
    (OtherBase, "attention-causal-float32", "wrong base"),
    (WiderWindow, "attention-window-float32", "window: one too wide"),
    (TopLeft, "attention-continued-float32", "causality: from the top left"),
    (Sink, "attention-causal-bfloat16", "normaliser: 1 added (softmax1, a sink)"),
    (Clipped, "attention-causal-float32", "values: clipped at ±1"),
    (Rowless, "attention-backward-causal-float32", "chain rule: row term missing"),
]


@pytest.mark.parametrize("kind, name, fault", WRONG_ATTENTION, ids=lambda x: getattr(x, "__name__", None))
def test_wrong_attention_is_named(suite, kind, name, fault):
    folder, entries = suite("gradients" if "backward" in name else name.partition("-")[0])
    (report,) = verify_vectors(folder, program(folder, entries[name], kind=kind), only=name)
    assert report.verdict == "wrong" and report.faults == (fault,), str(report)
    assert any("explain mistakes" in note for note in report.notes) == (fault == "unexplained")


# ── One's own rope ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_vectors_of_ones_own(tmp_path):
    own = Own(Rope(16, 10000.0, "interleaved", rotary_dim=8), heads=6, key_heads=2, max_position=LEAST_POSITION)
    manifest = write_vectors(tmp_path / "v", own=own, dtype="float32")
    names = ["rotation-own", "attention-own", "attention-own-continued", "linear-own", "linear-own-continued"]
    assert [entry["name"] for entry in manifest["cases"]] == [f"{name}-float32" for name in names]
    outputs = {}
    for entry in manifest["cases"]:
        assert read(tmp_path / "v", entry, "positions").max() <= LEAST_POSITION
        outputs |= program(tmp_path / "v", entry)
    assert all(report.ok for report in verify_vectors(tmp_path / "v", outputs))
    assert read(tmp_path / "v", manifest["cases"][2], "q").shape[1:] == (6, 3, 16)


def test_what_is_ones_own_is_checked(tmp_path):
    rope = Rope(16, 10000.0, "half")
    assert Own(rope).last == 131071 and Own(rope, max_position=500).last == 500
    assert Own(Rope(16, 10000.0, "half", scaling=DynamicNTK(2.0, 64, length=100))).last == 99
    for options, words in (
        ({"max_position": LEAST_POSITION - 1}, "max_position must be at least 63"),
        ({"heads": 4, "key_heads": 3}, "key_heads must divide heads, 4, was 3"),
    ):
        with pytest.raises(ValueError, match=words):
            Own(rope, **options)
    with pytest.raises(TypeError, match=r"own must be None or Own\(rope\)"):
        write_vectors(tmp_path / "v", own=rope)
    axes = Own(Rope(16, 10000.0, "half", axes=Axes("axial")))
    with pytest.raises(ValueError, match="rotations alone"):
        write_vectors(tmp_path / "v", "attention", own=axes)
    for options, words in (({"suite": "x"}, "suite must be one of"), ({"dtype": "int8"}, "dtype must be one of")):
        with pytest.raises(ValueError, match=words):
            write_vectors(tmp_path / "v", **options)
    assert not (tmp_path / "v").exists()
    assert len(write_vectors(tmp_path / "v", own=axes, dtype="float16")["cases"]) == 1


# ── Outputs and folders that are not what they should be ─────────────────────────────────────────────────────────────


@pytest.fixture
def small(tmp_path):
    """Vectors of one rotation in bfloat16, and its right output."""
    manifest = write_vectors(tmp_path / "v", "rotation", own=Own(Rope(4, 10000.0, "half")), dtype="bfloat16")
    return tmp_path / "v", program(tmp_path / "v", manifest["cases"][0])["rotation-own-bfloat16"]


def test_outputs_are_read_from_files_of_two_kinds_and_from_a_dict(small, tmp_path):
    folder, y = small
    save_safetensors(tmp_path / "y.safetensors", {"rotation-own-bfloat16": y.view(dtype_named("bfloat16"))}, {})
    for outputs in (tmp_path / "y.safetensors", {"rotation-own-bfloat16": y, "more": y}):
        assert [report.verdict for report in verify_vectors(folder, outputs)] == ["right"]


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda y: None, "there is no"),
        (lambda y: y[:-1], "must be .* of shape"),
        (lambda y: y.T, "must be .* of shape"),
        (lambda y: y.astype(np.float32), "was float32"),
        (lambda y: y.astype(">u2"), "big-endian"),
    ],
)
def test_an_output_that_cannot_be_judged_says_why(small, tmp_path, change, words):
    folder, y = small
    (tmp_path / "out").mkdir()
    if change(y) is not None:
        np.save(tmp_path / "out" / "rotation-own-bfloat16.npy", change(y))
    (report,) = verify_vectors(folder, tmp_path / "out")
    assert report.verdict == "not judged" and "uint16 bits" in report.failure.fix
    assert re.search(words, report.failure.reason), report.failure.reason


def test_a_foreign_folder_is_neither_overwritten_nor_read(small, tmp_path):
    folder, y = small
    with pytest.raises(ValueError, match="no case has a name like 'x\\*'"):
        verify_vectors(folder, {}, only="x*")
    (folder / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match=r"something else than test vectors, such as mine\.txt"):
        write_vectors(folder)
    assert (folder / "mine.txt").read_text() == "keep" and (folder / "manifest.json").exists()
    (folder / "mine.txt").unlink()
    assert len(write_vectors(folder, "rotation", own=Own(Rope(4, 10000.0, "half")), dtype="float16")["cases"]) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="must be a directory"):
        write_vectors(tmp_path / "file")
    with pytest.raises(ValueError, match="there is no manifest"):
        verify_vectors(tmp_path, {})


def test_manifests_from_elsewhere_get_a_clear_error(small):
    folder, y = small
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    entry = manifest["cases"][0]
    for change, words in (
        ({"format": "else"}, "is no manifest of test vectors"),
        ({"version": 1}, "has version 1, this pyrope reads 2: write it anew"),
        ({"cases": [{}]}, "incomplete"),
        ({"cases": [{**entry, "rope": 3}]}, "incomplete"),
        ({"cases": [{**entry, "rope": None}]}, "incomplete"),
        ({"cases": [{**entry, "options": {"fn": 1}}]}, "incomplete"),
        ({"cases": [{**entry, "name": "../x"}]}, "letters, digits"),
        ({"cases": [{**entry, "name": "x"}]}, "g? of x cannot be read|x of x cannot be read"),
    ):
        path.write_text(json.dumps({**manifest, **change}))
        with pytest.raises(ValueError, match=words):
            verify_vectors(folder, {})
    path.write_text(json.dumps(manifest))
    x = np.load(folder / "npy" / "rotation-own-bfloat16.x.npy")
    np.save(folder / "npy" / "rotation-own-bfloat16.x.npy", x[::-1] ^ 1)  # other numbers than those that are asked
    (report,) = verify_vectors(folder, {"rotation-own-bfloat16": y})
    assert report.verdict == "not judged" and "write the vectors anew" in report.failure.reason


def test_nothing_is_left_of_an_interrupted_writing(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(vectors, "save_npy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_vectors(tmp_path / "v", "rotation", dtype="float64")
    assert os.listdir(tmp_path) == []
