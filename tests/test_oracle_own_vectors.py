"""Test vectors for one's own rope, and of gradients: right results pass, wrong ones are named, files are not trusted."""

import hashlib
import json

import numpy as np
import pytest
from backward_kernels import D, Kernel, linear
from strategies import DTYPES

import pyrope
from pyrope import Axes, DynamicNTK, Llama3, Rope, cli
from pyrope.oracle.report import by_faults
from pyrope.oracle.vector_cases import POSITIONS, SUITES, TRUTH, Own, cases
from pyrope.oracle.vectors import verify_vectors, write_vectors
from pyrope.tensors import save_npy

ROPE = Rope(D, 10000.0, "half")
OWN = Own(ROPE, heads=4, key_heads=2, max_position=4095)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("vectors") / "own"
    write_vectors(path, "gradients", own=OWN)
    return path


def gradients(case, kernel=None):
    """The result of a case of attention's gradients, by a kernel that is not pyrope's."""
    q, k, v, g = (case.inputs[name].astype(DTYPES[case.dtype])[None] for name in "qkvg")
    kernel = kernel or (linear if case.kind == "linear-gradient" else Kernel(rotates=True))
    out = kernel(q, k, v, g, case.inputs["k_positions"][None])
    return out["qkv".index(case.options["of"])][0]


def results(kernel=None, turn=None):
    """By name; a linear attention with fewer queries than keys is left out, which the kernel above does not have."""
    made = {}
    for case in cases("gradients", OWN):
        if case.kind == "rotation-backward":
            g = case.inputs["g"].astype(DTYPES[case.dtype])
            made[case.name] = pyrope.rotate(g, case.inputs["positions"], turn or ROPE.transposed)
        elif case.kind == "attention-gradient" or "continued" not in case.name:
            made[case.name] = gradients(case, kernel if case.kind == "attention-gradient" else None)
    return made


@pytest.fixture(scope="module")
def right_results():
    return results()


def test_own_cases_have_the_rope_and_its_shapes():
    made = {case.name: case for suite in ("all", "gradients") for case in cases(suite, OWN)}
    assert {case.rope for case in made.values()} == {ROPE} and {case.kind for case in made.values()} == set(TRUTH)
    assert made["rotation-scattered-float32"].inputs["x"].shape == (4, len([m for m in POSITIONS if m < 4095]) + 1, D)
    assert made["rotation-scattered-float32"].inputs["positions"].max() == 4095
    assert made["rotation-prompt-bfloat16"].inputs["positions"].tolist() == list(range(64))
    assert made["rotation-decode-float16"].inputs["positions"].tolist() == [4095]
    assert made["attention-causal-float64"].inputs["k"].shape == (2, 24, D)
    assert made["attention-continued-float64"].inputs["q"].shape == (4, 3, D)
    assert made["linear-causal-float32"].options == {"causal": True, "feature_map": "elu+1"}
    one, other = made["attention-gradient-causal-float32-dq"], made["attention-gradient-causal-float32-dv"]
    assert all(np.array_equal(one.inputs[name], other.inputs[name]) for name in one.inputs)
    assert TRUTH[one.kind](one).out.shape == (4, 24, D) and TRUTH[other.kind](other).out.shape == (2, 24, D)


def test_one_dtype_of_the_standard_cases_or_of_ones_own():
    for own in (None, OWN):
        for suite in SUITES:
            some = cases(suite, own, "float16")
            assert some and {case.dtype for case in some} == {"float16"}
            assert {case.name for case in some} < {case.name for case in cases(suite, own)}


def test_ropes_with_a_length_or_with_axes():
    short = Own(Rope(D, 10000.0, "half", scaling=DynamicNTK(2.0, 16, length=20)))
    assert (
        max(int(x.max()) for case in cases("all", short) for name, x in case.inputs.items() if "positions" in name)
        == 19
    )
    axial = Own(Rope(D, 10000.0, "half", axes=Axes("axial")))
    assert {case.kind for case in cases("all", axial)} == {"rotation"}
    assert cases("rotation", axial)[0].inputs["positions"].shape[0] == 2
    assert {case.kind for case in cases("gradients", axial)} == {"rotation-backward"}
    with pytest.raises(ValueError, match="a rope with several axes has vectors for rotations alone"):
        cases("attention", axial)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"heads": 0}, "heads must be at least 1"),
        ({"heads": 6, "key_heads": 4}, "key_heads must divide heads, 6, was 4"),
        ({"max_position": 3}, "max_position must be at least 63"),
        ({"rope": Rope(D, 10000.0, "half", scaling=DynamicNTK(2.0, 16))}, "fix it first with rope.at"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Own(**{"rope": ROPE, **options})
    with pytest.raises(ValueError, match="dtype must be one of"):
        cases("all", None, "float8")


def test_a_table_of_64_rows_is_enough():
    made = cases("all", Own(ROPE, max_position=63))
    assert {int(array.max()) for case in made for name, array in case.inputs.items() if "positions" in name} == {23, 63}
    assert {case.inputs["positions"].size for case in made if "prompt" in case.name} == {64}


def test_right_results_are_right(directory, right_results):
    given = right_results
    reports = verify_vectors(directory, given)
    judged = {report.subject: report.verdict for report in reports}
    assert {name for name, verdict in judged.items() if verdict == "not judged"} == judged.keys() - given.keys()
    assert all(judged[name] == "right" for name in given), [str(r) for r in reports if r.verdict == "wrong"]


def test_forward_vectors_of_ones_own_are_right(tmp_path):
    rope = Rope(D, 500000.0, "interleaved", scaling=Llama3(8.0, 1.0, 4.0, 64))
    own = Own(rope, heads=2)
    write_vectors(tmp_path / "v", "rotation", own=own, dtype="float32")
    made = {
        c.name: pyrope.rotate(c.inputs["x"].astype(np.float32), c.inputs["positions"], rope)
        for c in cases("rotation", own, "float32")
    }
    reports = verify_vectors(tmp_path / "v", made)
    assert len(reports) == 3 and all(report.verdict == "right" for report in reports)
    made = {name: 1.5 * out for name, out in made.items()}
    assert list(by_faults(verify_vectors(tmp_path / "v", made))) == [("attention factor unwanted",)]


def test_wrong_gradients_are_named_and_grouped(directory):
    given = results(Kernel(rotates=True, row_term=False), turn=ROPE)
    reports = verify_vectors(directory, given, only="*-float32*")
    groups = {faults: {report.subject for report in some} for faults, some in by_faults(reports).items()}
    assert {"rotation-backward-scattered-float32", "rotation-backward-prompt-float32"} <= groups[
        ("backward equals forward",)
    ]
    right = {report.subject for report in reports if report.verdict == "right"}
    assert {f"attention-gradient-{name}-float32-d{of}" for name in ("causal", "continued") for of in "qk"} == groups[
        ("row term missing",)
    ]
    assert {"attention-gradient-causal-float32-dv", "linear-gradient-causal-float32-dq"} <= right
    assert groups.keys() == {("backward equals forward",), ("row term missing",)}


@pytest.mark.parametrize(
    "name, change, fault",
    [
        ("attention-gradient-causal-float32-dk", lambda y: 2 * y, "accumulated twice"),
        ("attention-gradient-causal-float32-dk", lambda y: 0 * y, "no gradient"),
        ("attention-gradient-causal-float32-dv", lambda y: y[::-1], "unexplained"),
        ("attention-gradient-causal-float32-dv", lambda y: y / 2, "key heads not summed"),
        ("attention-gradient-causal-float32-dq", lambda y: y * np.nan, "not finite"),
        ("rotation-backward-prompt-float32", lambda y: 0 * y, "no gradient"),
        ("rotation-backward-prompt-float32", lambda y: y + y, "accumulated twice"),
        ("rotation-backward-prompt-float32", lambda y: np.concatenate((y[..., ::2], y[..., 1::2]), -1), "unexplained"),
    ],
)
def test_single_wrong_results(directory, right_results, name, change, fault):
    (report,) = verify_vectors(directory, {name: change(right_results[name])}, only=name)
    assert report.faults == (fault,), report


def test_gradients_in_the_order_of_the_result_are_wrong(tmp_path):
    own = Own(Rope(D, 10000.0, "interleaved-to-half"), heads=2)
    write_vectors(tmp_path / "v", "gradients", own=own, dtype="float32")
    (case, *_) = cases("gradients", own, "float32")
    turned = pyrope.rotate(
        case.inputs["g"].astype(np.float32), case.inputs["positions"], Rope(D, 10000.0, "half", direction=-1)
    )
    (report,) = verify_vectors(tmp_path / "v", {case.name: turned}, only=case.name)
    assert report.verdict == "wrong" and report.faults == ("another order of features",)


# Nothing in the files is trusted


def broken(directory, tmp_path, change, arrays=()):
    """A copy with another entry for its first case of attention's gradients, or other arrays, all digests right."""
    copy = tmp_path / "copy"
    write_vectors(copy, "gradients", own=OWN, dtype="float32")
    manifest = json.loads((copy / "manifest.json").read_text())
    entry = next(entry for entry in manifest["cases"] if entry["kind"] == "attention-gradient")
    change(entry)
    for name, array in arrays:
        path = f"npy/{entry['name']}.{name}.npy"
        save_npy(copy / path, array)
        manifest["files"][path] = hashlib.sha256((copy / path).read_bytes()).hexdigest()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


@pytest.mark.parametrize(
    "change, arrays, message",
    [
        (lambda entry: entry["options"].pop("of"), (), "cannot be read|incomplete"),
        (lambda entry: entry["options"].update(of="w"), (), "of must be one of 'q', 'k', 'v', was 'w'"),
        (lambda entry: entry["options"].update(of="k"), (), "y must be the true result"),
        (lambda entry: entry["options"].update(feature_map="exp"), (), "must fit each other"),
        (lambda entry: entry.update(kind="attention-forward"), (), "kind must be one of"),
        (lambda entry: entry.update(kind="attention"), (), "must fit each other"),
        (
            lambda entry: entry["tensors"]["g"].update(shape=[4, 23, D]),
            (("g", np.ones((4, 23, D), np.float32)),),
            "must fit each other",
        ),
        (lambda entry: None, (("g", np.full((4, 24, D), np.inf, np.float32)),), "its inputs must be finite"),
        (lambda entry: None, (("y", np.zeros((4, 24, D))),), "y must be the true result"),
        (lambda entry: entry["tensors"].pop("g"), (), "incomplete: KeyError"),
        (lambda entry: entry.update(name="../outside"), (), "must be listed among its files"),
    ],
)
def test_manifests_are_not_trusted(directory, tmp_path, change, arrays, message):
    copy = broken(directory, tmp_path, change, arrays)
    with pytest.raises(ValueError, match=message):
        verify_vectors(copy, {})


# The command line


def run(capsys, *words):
    code = cli.main(list(words))
    out, err = capsys.readouterr()
    return code, out + err


def test_the_command_writes_ones_own_vectors(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "head_dim": D, "rope_theta": 10000.0}))
    where = str(tmp_path / "v")
    code, text = run(capsys, "vectors", where, "--config", str(config), "--heads", "4", "--key-heads", "2", "--dtype", "float32", "--suite", "gradients", "--max-position", "4095")  # fmt: skip
    assert code == 0 and "15 cases written" in text
    entry = json.loads((tmp_path / "v" / "manifest.json").read_text())["cases"][0]
    assert entry["rope"]["layout"] == "half" and entry["tensors"]["g"]["shape"][0] == 4
    given = {name: out for name, out in results(turn=ROPE).items() if "float32" in name}
    (tmp_path / "outputs").mkdir()
    for name, out in given.items():
        save_npy(tmp_path / "outputs" / f"{name}.npy", out)
    code, text = run(capsys, "vectors", "--verify", where, str(tmp_path / "outputs"))
    assert (
        code == 1
        and "backward equals forward" in text
        and "wrong likewise, 2: " in text
        and "missing outputs, 3" in text
    )


@pytest.mark.parametrize(("heads", "words", "shapes"), [
    ({"num_attention_heads": 6, "num_key_value_heads": 2}, [], (6, 2)), ({"num_attention_heads": 6}, [], (6, 6)),
    ({"num_attention_heads": 6, "num_key_value_heads": 2}, ["--heads", "3"], (3, 3)),
    ({}, [], (4, 4)), ({"num_key_value_heads": 8}, [], (4, 4)), ({"num_attention_heads": 6}, ["--key-heads", "2"], (4, 2)),
])  # fmt: skip
def test_heads_are_those_of_the_config(tmp_path, capsys, heads, words, shapes):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "head_dim": D, "rope_theta": 10000.0} | heads))
    arguments = [
        "--config",
        str(config),
        "--suite",
        "attention",
        "--dtype",
        "float32",
        "--max-position",
        "4095",
        *words,
    ]
    code, text = run(capsys, "vectors", str(tmp_path / "v"), *arguments)
    assert code == 0, text
    entry = json.loads((tmp_path / "v" / "manifest.json").read_text())["cases"][0]
    assert tuple(entry["tensors"][name]["shape"][-3] for name in "qk") == shapes


@pytest.mark.parametrize(
    "words, message",
    [
        (["--heads", "4"], "--heads is for vectors of your own rope"),
        (["--base", "10000"], "give --config, or --head-dim, --layout"),
        (["o", "--verify", "--dtype", "float32"], "--dtype is for writing vectors"),
        (["o", "--verify", "--config", "c"], "--config is for writing vectors"),
        (["--suite", "gradient"], "did you mean gradients"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(tmp_path, capsys, words, message):
    try:
        code, text = run(capsys, "vectors", str(tmp_path / "v"), *words)
    except SystemExit as error:
        code, text = error.code, capsys.readouterr().err
    assert code == 2 and message in text
