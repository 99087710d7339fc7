"""The oracle does not judge by the engine: with the engine broken it says so, and a right kernel stays right.

Each mistake is made in a copy of the package, by changing one line of its text; the oracle of that copy then judges the
broken engine, and kernels that are written here, in plain NumPy, and import nothing of pyrope's arithmetic.
"""

import ast
import pathlib
import shutil
import subprocess
import sys

import pytest

import pyrope

PACKAGE = pathlib.Path(pyrope.__file__).parent
ROPE = "Rope(16, 10000.0, 'half', scaling=YaRN(4.0, 4096))"
KERNELS = """
import numpy as np

def tables(at, factor):
    i = np.arange(8)
    w, ends = 10000.0 ** (-i / 8), [16 * np.log(4096 / (2 * np.pi * beta)) / (2 * np.log(10000.0)) for beta in (32, 1)]
    low, high = max(np.floor(ends[0]), 0), min(np.ceil(ends[1]), 15)
    slow = np.clip((i - low) / (high - low), 0, 1)
    angles = np.asarray(at)[..., None] * (w * (1 - slow + slow / 4))
    return np.cos(angles) * factor, np.sin(angles) * factor

def turn(x, at, factor):
    cos, sin = tables(at, factor)
    a, b = x[..., :8], x[..., 8:]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)

def rotation(x, at):
    return turn(x.astype(float), at, 0.1 * np.log(4.0) + 1).astype(x.dtype)

def softmax(q, k, v):
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1).astype(float) for x in (k, v))
    n, m = q.shape[-2], k.shape[-2]
    scores = q.astype(float) @ k.swapaxes(-1, -2) / 4
    away = np.arange(m - n, m)[:, None] - np.arange(m)
    scores[..., (away < 0) | (away >= 5)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True) @ v).astype(q.dtype)

def linear(q, k, v, at):
    dtype = q.dtype
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1).astype(float) for x in (k, v))
    q, k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q.astype(float), k))
    lower, at = np.tri(q.shape[-2]), np.asarray(at)[:, None]
    total = (q @ k.swapaxes(-1, -2) * lower).sum(axis=-1, keepdims=True)
    return (turn(q, at, 1) @ turn(k, at, 1).swapaxes(-1, -2) * lower @ v / total).astype(dtype)
"""
CHECKS = f"""
import kernels, pyrope
from pyrope import Rope, YaRN
from pyrope.oracle import attention_trials, trials
trials.PATIENCE = attention_trials.PATIENCE = -1  # every length has tests of its own
rope = {ROPE}
def words(report):
    return report.verdict, *report.faults
print(words(pyrope.check_rotation(kernels.rotation, rope)))
print(words(pyrope.check_attention(kernels.softmax, head_dim=16, window=5, key_heads=2)))
print(words(pyrope.check_linear_attention(kernels.linear, rope=rope, key_heads=2)))
print(words(pyrope.check_rotation(lambda x, at: pyrope.rotate(x, at, rope), rope)))
print(words(pyrope.check_attention(
    lambda q, k, v: pyrope.attention(q, k, v, causal=True, window=5), head_dim=16, window=5, key_heads=2)))
print(words(pyrope.check_linear_attention(
    lambda q, k, v, at: pyrope.linear_attention(q, k, v, at, rope, causal=True), rope=rope, key_heads=2)))
"""
RIGHT = ("right",)


def verdicts(folder: pathlib.Path, file: str | None = None, old: str = "", new: str = "") -> list[tuple[str, ...]]:
    """What the oracle of a copy of the package says of the kernels above and of its own engine: three of each."""
    shutil.copytree(PACKAGE, folder / "pyrope", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "kernels.py").write_text(KERNELS)
    if file is not None:
        text = (folder / "pyrope" / file).read_text()
        assert text.count(old) == 1, f"{file} no longer has this line once: choose another one to break"
        (folder / "pyrope" / file).write_text(text.replace(old, new))
    run = subprocess.run(
        [sys.executable, "-c", CHECKS],
        cwd=folder,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(folder), "OPENBLAS_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    return [ast.literal_eval(line) for line in run.stdout.splitlines()]


def test_the_kernels_and_the_engine_are_right(tmp_path):
    assert verdicts(tmp_path) == [RIGHT] * 6


@pytest.mark.parametrize(("file", "old", "new", "engine"), [
    ("softmax.py", "(lowest, window - 1)", "(lowest, window)", [RIGHT, ("wrong", "window one too wide"), RIGHT]),
    ("linear.py", "check_rope(rope).pure", "check_rope(rope)", [RIGHT, RIGHT, ("wrong", "attention factor applied")]),
    ("rotation.py", "(-sin, sin)", "(sin, -sin)", [("wrong", "direction"), RIGHT, ("wrong", "direction")]),
], ids=["a window one too wide", "the attention factor not dropped", "a sign"])  # fmt: skip
def test_a_broken_engine_is_named_and_right_kernels_stay_right(tmp_path, file, old, new, engine):
    judged = verdicts(tmp_path, file, old, new)
    assert judged[:3] == [RIGHT] * 3, "kernels that share no line with the engine"
    assert judged[3:] == engine
