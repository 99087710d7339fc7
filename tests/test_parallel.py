"""Shards of a sequence; and programs under mpiexec, in tests/mpi, that hold the parallel functions to one process."""

import importlib.util
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pyrope import parallel
from pyrope.parallel import SCHEMES, shard_positions

ROOT = pathlib.Path(__file__).parent.parent
PATH = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))
MPIEXEC = shutil.which("mpiexec", path=PATH) if importlib.util.find_spec("mpi4py") else None
needs_mpi = pytest.mark.skipif(MPIEXEC is None, reason="no MPI here: pip install mpi4py mpich")
LIMIT = 420  # seconds: far beyond what any of these programs takes, so that only one that hangs meets it


def run(ranks, program, *arguments):
    """Exit code and output of a program on some ranks. One that hangs is ended and fails the test."""
    around = {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(
        [MPIEXEC, "-n", str(ranks), sys.executable, str(program), *map(str, arguments)], env=os.environ | around,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"{program} did not end: {process.communicate()[0].decode(errors='replace')[-2000:]}")
    return process.returncode, output.decode("utf-8", "replace")


# --- Shards ---


def test_shards_by_hand():
    # Ten tokens on three ranks. Zigzag cuts them at 10·i/6: chunks of 1, 2, 2, 1, 2 and 2 tokens.
    shards = {scheme: [shard_positions(10, rank, 3, scheme).tolist() for rank in range(3)] for scheme in SCHEMES}
    assert shards["contiguous"] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert shards["zigzag"] == [[0, 8, 9], [1, 2, 6, 7], [3, 4, 5]]
    assert shards["striped"] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    # Rank 0 of 2, eight tokens: 0, 1, 6, 7, and never 0, 1, 0, 1 (positions local to a chunk).
    assert shard_positions(8, 0, 2, "zigzag").tolist() == [0, 1, 6, 7]


@given(st.integers(0, 300), st.integers(1, 40), st.sampled_from(SCHEMES))
def test_every_position_belongs_to_one_rank(n, size, scheme):
    shards = [shard_positions(n, rank, size, scheme) for rank in range(size)]
    assert sorted(np.concatenate(shards).tolist()) == list(range(n))
    assert all(shard.dtype == np.int64 and (np.diff(shard) > 0).all() for shard in shards)
    lengths = list(map(len, shards))
    assert max(lengths) - min(lengths) <= (2 if scheme == "zigzag" else 1)


@pytest.mark.parametrize(
    "arguments, error, says",
    [
        ((-1, 0, 1), ValueError, "n must be at least 0, was -1"),
        ((4, 0, 0), ValueError, "size must be at least 1, was 0"),
        ((4, 2, 2), ValueError, "rank must be less than size, 2, was 2"),
        ((4, -1, 2), ValueError, "rank must be at least 0, was -1"),
        ((4.0, 0, 1), TypeError, "n must be an integer, was 4.0"),
        ((4, 0, 1, "zig-zag"), ValueError, "scheme must be one of 'contiguous', 'zigzag', 'striped', was 'zig-zag'"),
    ],
)
def test_wrong_shards_are_refused(arguments, error, says):
    with pytest.raises(error, match=says):
        shard_positions(*arguments)


def test_without_mpi4py_an_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    x = np.ones((1, 2, 2))
    for call in (parallel.world, lambda: parallel.ring_attention(None, x, x, x, [0, 1])):
        with pytest.raises(ImportError, match=r'pyrope.parallel needs mpi4py.*pip install "\.\[mpi\]" in a clone'):
            call()


# --- Programs under mpiexec ---


@needs_mpi
def test_any_number_of_ranks_equals_one_process_and_the_definition():
    # The same seed on every rank, so that all draw the same examples; without CI another one each time.
    seed = 0 if os.environ.get("CI") else random.randrange(2**32)
    code, output = run(8, ROOT / "tests/mpi/properties.py", seed, settings().max_examples)
    assert code == 0, output[-6000:]
    names = ["ring", "in_states", "whole_model", "length_of_all", "failures"]
    assert [line for line in output.splitlines() if line.endswith(" holds")] == [f"{name} holds" for name in names]


@needs_mpi
def test_what_is_sent_and_when_and_what_is_skipped():
    code, output = run(4, ROOT / "tests/mpi/messages.py")
    assert code == 0 and all(f"rank {rank} is right" in output for rank in range(4)), output[-4000:]


@needs_mpi
@pytest.mark.parametrize(
    "kind, code, says",
    [
        ("exception", 1, ["rank 1 of 3 failed:\n", "LookupError: no such file on this machine"]),
        ("exit", 5, ["rank 1 of 3 failed:\n", "SystemExit: 5"]),
        ("inside", 1, ["rank 1 of 3 failed:\n", "MemoryError: no room for the second shard"]),
        ("denominator", 1, ["rank 1 of 2 failed:\n", "ValueError: denominators must be finite and nonzero"]),
        (
            "overflow",
            1,
            ["rank 1 of 3 failed:\n", "ValueError: scores must not exceed float32, 3.4e+38: queries reach 1e+20"],
        ),
        ("dtype", 1, ["rank 0 made ring_attention(q float32", "rank 1 ring_attention(q float64"]),
        (
            "leaves",
            1,
            ["all ranks must make the same call: rank 0 made ring_attention(", "rank 1 fail_together(its end)"],
        ),
        ("leaves early", 1, ["rank 1 fail_together(its end)"]),
        ("killed", 9, []),
        ("nothing", 0, []),
    ],
)
def test_a_rank_that_fails_or_leaves_ends_all(kind, code, says):
    ended, output = run(3, ROOT / "tests/mpi/failing.py", kind)
    assert ended == code, output
    assert all(words in output for words in says), output
