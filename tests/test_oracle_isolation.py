"""Candidates that fail, as a person checks them: the exit code, the words of the report, and nothing left behind."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

ROPE = ["--head-dim", "8", "--base", "10000", "--layout", "half"]
HANG = 300  # seconds, far beyond what anything here takes
CANDIDATES = """
import ctypes, os, signal, subprocess, sys, threading, time
import numpy as np

print("imported")


def right(x, positions):
    angles = positions[:, None] * 10000.0 ** -(np.arange(0, 8, 2) / 8)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(x.dtype)


def concatenating(x, positions):
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return right(x[..., order], positions)


def raises(x, positions):
    return inner(x)


def inner(x):
    raise RuntimeError("broken in line 26")


class Silent(Exception):
    def __str__(self):
        raise ValueError


def silent(x, positions):
    raise Silent


def pair(x, positions):
    return right(x, positions), x


def nothing(x, positions):
    right(x, positions)


def narrow(x, positions):
    return right(x, positions)[..., :6]


def exits(x, positions):
    sys.exit("used as a script")


def ends(x, positions):
    os._exit(0)


def crashes(x, positions):
    if positions.max() > 100:
        ctypes.string_at(0)
    return right(x, positions)


def loops(x, positions):
    while True:
        pass


def stops(x, positions):
    os.kill(os.getpid(), 9)


def needs_a_gpu(x, positions):
    raise RuntimeError("CUDA error: no CUDA-capable device is detected")


def talks(x, positions):
    os.write(1, b"from C " * 1000)
    print("from Python " * 1000)
    return right(x, positions)


def leaves_a_thread(x, positions):
    if threading.active_count() == 1:
        threading.Thread(target=time.sleep, args=(HANG,)).start()
    return right(x, positions)


def forks(x, positions):
    if not os.path.exists("forked"):  # once
        open("forked", "w").close()
        if os.fork() == 0:
            return 0 * x
    return right(x, positions)


def waits(x, positions):
    with open("pid", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(HANG)


def stubborn(x, positions):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(HANG)"])
    with open("pid", "w") as file:
        file.write(str(child.pid))
    time.sleep(HANG)


def crashes_in_heads_last(x, *rest):  # (b, n, h, d)
    ctypes.string_at(0)


def raises_in_heads_last(x, *rest):
    raise IndexError("list index out of range")


def pair_in_heads_last(x, *rest):
    return x, x
""".replace("HANG", str(HANG))
CALL = "x of shape (3, 4, 8), dtype float32, and positions of shape (4,)"
# By function: words of the report, in this order.
FAILURES = {
    "raises": ("raises RuntimeError (broken in line 26)", CALL, "in raises", "in inner", "RuntimeError: broken"),
    "silent": ("raises Silent", "cannot be printed", CALL, "in silent"),
    "pair": ("returns tuple", CALL, "fn(…)[0]"),
    "nothing": ("returns nothing", CALL, "return the result alone"),
    "narrow": ("returns shape (3, 4, 6)", CALL, "--axes"),
    "exits": ("raises SystemExit (used as a script)", CALL, "in exits"),
    "ends": ("ends its process, with status 0", CALL, "--in-process"),
    "crashes": ("crashes: its process was killed by SIGSEGV", CALL + ", from 0 to 65535", "in crashes"),
    "stops": ("crashes: its process was killed by SIGKILL, as when memory runs out", CALL),
    "loops": ("takes longer than 3 s", CALL, "--timeout", "in loops"),
    "needs_a_gpu": ("CUDA error", CALL, "run it where its device is", "in needs_a_gpu"),
}
HEADS_LAST = f"numpy.ndarray of shape (1, 4, 3, 8), float32; numpy.ndarray of shape (4,), int64, adapted from {CALL}"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "candidates.py").write_text(CANDIDATES)
    (tmp_path / "temporary").mkdir()
    yield tmp_path
    assert not list((tmp_path / "temporary").iterdir())  # no file is left


def started(folder, *words):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "pyrope", *words],
        cwd=folder,
        env={**environment, "TMPDIR": str(folder / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def run(folder, *words):
    """The exit code, the output and the errors of a command; no traceback may be pyrope's own."""
    process = started(folder, *words)
    output, errors = process.communicate(timeout=HANG)
    assert "Traceback" not in errors and f"pyrope{os.sep}oracle" not in output + errors
    return process.returncode, output, errors


def in_order(words, text):
    text, place = " ".join(text.split()), 0
    for word in words:
        place = text.find(word, place) + 1
        assert place, f"{word!r} is not in its place in {text}"
    return True


@pytest.mark.parametrize("function", FAILURES)
def test_a_failure_is_not_judged_and_says_why(folder, function):
    patience = ["--timeout", "3"] if function == "loops" else []
    code, output, errors = run(folder, "check", f"candidates.py:{function}", *ROPE, *patience)
    assert code == 3 and output.startswith("rotation: NOT JUDGED") and errors.startswith("imported")
    assert in_order(("reason it ", *FAILURES[function]), output)
    assert max(map(len, output.partition("\n\n")[0].splitlines())) <= 80


@pytest.mark.parametrize("function", ["crashes", "nothing"])
def test_identify_and_json_have_the_verdict_too(folder, function):
    code, output, _ = run(folder, "identify", f"candidates:{function}", "--head-dim", "8", "--json")
    value = json.loads(output)
    assert code == 3 and value["verdict"] == "not judged" and value["expected"] == "any rotation of 8 features"
    assert CALL in value["failure"]["received"] and value["failure"]["reason"] and value["failure"]["fix"]
    assert any("in crashes" in line for line in value["failure"]["frames"]) == (function == "crashes")


@pytest.mark.parametrize(
    "function, words",
    [
        ("crashes_in_heads_last", ("killed by SIGSEGV", f"received {HEADS_LAST}", "in crashes_in")),
        ("raises_in_heads_last", ("it raises IndexError", f"received {HEADS_LAST}", "max_position", "in raises_in")),
        ("pair_in_heads_last", ("it returns tuple instead of one array", f"received {HEADS_LAST}")),
    ],
)
def test_the_shapes_are_those_behind_the_adapters(folder, function, words):
    code, output, _ = run(folder, "check", f"candidates:{function}", "--axes", "bnhd", *ROPE)
    assert code == 3 and in_order(words, output)


@pytest.mark.parametrize("way", ["apart", "in this process"])
def test_right_ones_print_what_they_like(folder, way):
    flag = ["--in-process"] if way == "in this process" else []
    code, output, errors = run(folder, "check", "candidates.py:talks", *ROPE, "--json", *flag)
    assert code == 0 and "from Python" in errors
    assert json.loads(output if not flag else output.replace("from C ", ""))["verdict"] == "right"


def test_a_failure_in_this_process(folder):
    code, output, _ = run(folder, "check", "candidates.py:raises", *ROPE, "--in-process")
    assert code == 3 and in_order(FAILURES["raises"], output)


def test_a_thread_that_stays_does_not_keep_the_verdict(folder):
    assert run(folder, "check", "candidates.py:leaves_a_thread", *ROPE)[0] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("flags", [[], ["--in-process"]])
def test_a_child_that_a_candidate_makes_asks_nothing(folder, flags):
    (folder / "forked").unlink(missing_ok=True)
    code, output, _ = run(folder, "check", "candidates.py:forks", *ROPE, *flags)
    assert code == 0 and output.count("rotation: ") == 1 and output.startswith("rotation: RIGHT")


def test_strict_refuses_what_is_equivalent(folder):
    words = ["check", "candidates.py:concatenating", *ROPE[:-1], "interleaved"]
    code, output, _ = run(folder, *words)
    assert code == 0 and output.startswith("rotation: EQUIVALENT")
    code, output, _ = run(folder, *words, "--strict")
    assert code == 1 and output.startswith("rotation: WRONG")


@pytest.mark.parametrize(
    "source, words",
    [
        ("import no_such_package", ("cannot be imported: No module named 'no_such_package'", "line 1")),
        ("def (:", ("cannot be imported: SyntaxError", "def (:")),
        ("import sys\nsys.exit('a script')", ("cannot be imported: SystemExit: a script", "line 2")),
        ("import ctypes\nctypes.string_at(0)", ("killed by SIGSEGV, while it is imported", "line 2")),
        ("while True:\n    pass", ("it takes longer than 3 s, while it is imported", "line")),
        ("raise RuntimeError('CUDA is not here')", ("cannot be imported: RuntimeError: CUDA is not here", "line 1")),
    ],
)
def test_a_file_that_cannot_be_imported_is_not_judged(folder, source, words):
    (folder / "target.py").write_text(source)
    code, output, _ = run(folder, "check", "target.py:rope", *ROPE, "--timeout", "3" if "while" in source else "60")
    assert code == 3 and output.startswith("rotation: NOT JUDGED") and in_order(words, output)
    assert "importlib" not in output and "received" not in output


@pytest.mark.parametrize(
    "words",
    [
        ["no_such_file.py:rope", *ROPE],
        ["no_such_module:rope", *ROPE],
        ["candidates.py:no_such_function", *ROPE],
        ["candidates.py:right", *ROPE[:4]],
        ["candidates.py:right", *ROPE, "--grade", "perfect"],
        ["candidates.py:right", *ROPE, "--no-such-option"],
    ],
)
def test_a_wrong_command_line_is_misuse(folder, words):
    code, output, errors = run(folder, "check", *words)
    assert code == 2 and not output and "error: " in errors


def test_a_missing_framework_is_not_judged(folder):
    (folder / "mlx.py").write_text("raise ImportError('not for this machine')")
    code, output, _ = run(folder, "check", "candidates.py:right", *ROPE, "--framework", "mlx")
    assert code == 3 and in_order(("from_mlx needs mlx", "environment"), output)


@pytest.mark.parametrize("program", ["sys.exit(5)", "import time; time.sleep(1000)"])
def test_a_program_that_fails_is_not_judged(folder, program):
    (folder / "program.py").write_text(f"import sys\n{program}")
    command = f"'{sys.executable}' program.py {{x}} {{positions}} {{y}}"
    patience = ["--timeout", "3"] if "sleep" in program else []
    code, output, _ = run(folder, "check", "--exec", command, *ROPE, *patience)
    words = ("took longer than 3 s", "--timeout") if patience else ("ended with status 5", "languages.md")
    assert code == 3 and in_order(words, output)


@pytest.mark.ctrl_c
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_ctrl_c_ends_the_candidate_too(folder):
    process = started(folder, "check", "candidates.py:waits", *ROPE)
    noted = folder / "pid"
    for _ in range(100 * HANG):
        if noted.exists() and noted.read_text():
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=HANG)
    assert process.returncode == 130 and not output and "Traceback" not in errors
    assert not pathlib.Path(f"/proc/{noted.read_text()}").exists()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_candidate_that_ignores_the_alarm_is_killed_with_what_it_started(folder):
    code, output, _ = run(folder, "check", "candidates.py:stubborn", *ROPE, "--timeout", "3")
    assert code == 3 and in_order(("it takes longer than 3 s", CALL), output)
    grandchild = pathlib.Path(f"/proc/{(folder / 'pid').read_text()}/stat")
    for _ in range(100 * HANG):
        if not grandchild.exists() or grandchild.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.01)
    pytest.fail("what the candidate started is still alive")


def test_several_threads_show_the_candidates_frames(folder):
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    (folder / "target.py").write_text(
        source
        + textwrap.dedent("""
        def rope(x, positions):
            while True:
                pass
    """)
    )
    code, output, _ = run(folder, "check", "target.py:rope", *ROPE, "--timeout", "3")
    assert code == 3 and in_order(("it takes longer than 3 s", "in rope"), output) and "in _bootstrap" not in output
