"""Candidates that crash, hang or leave things behind, each in a process of its own: the verdict, and nothing stays."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from pyrope.oracle.isolation import Finished, run_apart
from pyrope.oracle.report import Failure

COMMAND = """
import ctypes, os, signal, subprocess, sys, threading, time
import numpy as np
from pyrope.oracle.candidate import Candidate, announced


def right(x):
    os.write(1, b"from C")
    threading.Thread(target=time.sleep, args=(600,)).start()  # which is left behind
    return x


def crashes(x):
    return inner(x)


def inner(x):
    ctypes.string_at(0)


def ends(x):
    os._exit(0)


def stops(x):
    os.kill(os.getpid(), signal.SIGKILL)


def loops(x):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    start_a_child()
    while True:
        pass


def start_a_child():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open("pid.part", "w") as file:
        file.write(str(child.pid))
    os.rename("pid.part", "pid")


def forks_and_crashes(x):
    if os.fork() == 0:
        time.sleep(600)  # with all files of its parent open
    ctypes.string_at(0)


def forks(x):
    return x if os.fork() else 2 * x


def waits(x):
    start_a_child()
    time.sleep(600)


def main(words):
    name, *rest = words
    if name == "imports":
        with announced("while it is imported"):
            ctypes.string_at(0)
    if name == "between":
        ctypes.string_at(0)
    print("before", *rest)
    result = Candidate(globals()[name])({"x": np.ones((2, 3), np.float32)}, ["x"])
    print(result[0].sum())
    return 4
"""
RECEIVED = "x (2, 3) float32"


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "a_command.py").write_text(COMMAND)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda name, *words, timeout=600.0: run_apart("a_command:main", [name, *words], timeout)


@pytest.mark.parametrize("name", ["right", "forks"])
def test_a_command_that_ends_by_itself(run, name, capfd):
    assert run(name, "a b", "ü", timeout=float("inf")) == Finished("before a b ü\n6.0\n", 4)
    out, errors = capfd.readouterr()
    assert not out and (name != "right" or "from C" in errors)


@pytest.mark.parametrize("name, reason, received, frames", [
    ("crashes", "it crashes: its process was killed by SIGSEGV", RECEIVED, ["string_at", "inner", "crashes"]),
    ("forks_and_crashes", "it crashes: its process was killed by SIGSEGV", RECEIVED, ["string_at", "forks_and_crashes"]),
    ("ends", "it ends its process, with status 0", RECEIVED, []),
    ("stops", "it crashes: its process was killed by SIGKILL, as when memory runs out", RECEIVED, []),
    ("imports", "it crashes: its process was killed by SIGSEGV, while it is imported", "", ["string_at", "main"]),
    ("between", "it crashes: its process was killed by SIGSEGV, between two calls", "", ["string_at", "main"]),
])  # fmt: skip
def test_a_command_that_does_not(run, name, reason, received, frames):
    failure = run(name)
    assert isinstance(failure, Failure) and (failure.reason, failure.received) == (reason, received)
    assert [line.rpartition(" in ")[2] for line in failure.frames][: len(frames)] == frames and len(failure.frames) < 5
    assert "--in-process" in failure.fix


def gone(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_call_that_takes_too_long_ends_with_all_that_it_started(run):
    failure = run("loops", timeout=2.0)
    assert (failure.reason, failure.received) == ("it takes longer than 2 s", RECEIVED) and "--timeout" in failure.fix
    assert "in loops" in failure.frames[0] and "_bootstrap" not in "".join(failure.frames)
    child = pathlib.Path("pid").read_text()
    while not gone(child):
        time.sleep(0.01)


@pytest.mark.ctrl_c
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_ctrl_c_ends_the_candidate_too(run):
    code = "from pyrope.oracle.isolation import run_apart; run_apart('a_command:main', ['waits'], 600.0)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE)
    while not os.path.exists("pid"):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in process.communicate(timeout=60)[1]
    child = pathlib.Path("pid").read_text()
    while not gone(child):
        time.sleep(0.01)
