"""What is made of the lines and the end of a child process: no process is started for that."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from pyrope.oracle import ask, isolation
from pyrope.oracle.isolation import Finished, _failure, _frames, run_apart, serve


@pytest.mark.parametrize("status, late, reason", [
    (-11, None, "it crashes: its process was killed by SIGSEGV"), (-9, None, "it crashes: its process was killed by SIGKILL, as when memory runs out"),
    (-99, None, "it crashes: its process was killed by signal 99"), (3, None, "it ends its process, with status 3"),
    (0, None, "it ends its process, with status 0"), (2**31, None, "it ends its process, with status 0x80000000"),
    (2**31 - 1, None, "it ends its process, with status 2147483647"), (-14, 2.5, "it takes longer than 2.5 s"), (1, 60.0, "it takes longer than 60 s"),
])  # fmt: skip
def test_why_a_child_ended(status, late, reason):
    failure = _failure(status, "for x of shape (2,)", [], late)
    assert (failure.reason, failure.received, failure.frames) == (reason, "x of shape (2,)", ())
    assert ("--timeout" in failure.fix) == (late is not None) and ("--in-process" in failure.fix) == (late is None)
    assert _failure(status, "", [], late).reason == f"{reason}, between two calls"
    assert _failure(status, "while it is imported", [], late).reason == f"{reason}, while it is imported"
    assert _failure(status, "while it is imported", [], late).received == ""


def test_frames_of_a_dump():
    own, other = isolation.__file__, os.path.join(os.path.dirname(isolation.__file__), "probe.py")
    waiting = ["Thread 0x1 (most recent call first):\n", '  File "/lib/threading.py", line 7 in wait\n']
    calling = [
        "Current thread 0x2 (most recent call first):\n", '  File "/there/deep.py", line 3 in inner\n',
        '  File "/there/fn.py", line 2 in fn\n', f'  File "{other}", line 50 in call\n', f'  File "{own}", line 9 in serve\n',
        '  File "<string>", line 1 in <module>\n',
    ]  # fmt: skip
    for dump in (calling, waiting + calling, calling + waiting):
        shown = [line.strip() for line in _frames(dump)]
        assert shown == ['File "/there/fn.py", line 2, in fn', 'File "/there/deep.py", line 3, in inner']
    assert _frames(waiting) == _frames([]) == ()


class Child:
    """A process that has written some lines, and ends with a status."""

    def __init__(self, lines, status=0, hangs=False):
        self.lines, self.status, self.hangs, self.waited = lines, status, hangs, []
        self.stdout = self

    def __call__(self, command, **options):
        self.command, self.options = command, options
        return self

    def __iter__(self):
        return iter(self.lines)

    def wait(self, timeout=None):
        self.waited.append(timeout)
        if self.hangs and timeout is not None:
            raise subprocess.TimeoutExpired("", timeout)
        return self.status

    def close(self):
        self.closed = True


def line(**message):
    return json.dumps(message).encode() + b"\n"


@pytest.fixture
def apart(monkeypatch):
    def run(lines, timeout=60.0, words=("a", "b"), **fields):
        child, killed = Child(lines, **fields), []
        monkeypatch.setattr(isolation, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": child}))
        monkeypatch.setattr(isolation, "kill", killed.append)
        result = run_apart("module:function", words, timeout)
        assert killed == [child] and child.closed
        return result, child

    return run


def test_what_a_child_printed(apart):
    done = line(output="printed", code=3)
    result, child = apart([line(call="for x"), line(call=""), done, line(call="later")])
    assert result == Finished("printed", 3) and child.waited == [5.0]
    assert child.command[0] == sys.executable and child.command[-2:] == ["a", "b"]
    assert child.command[2].endswith("serve('module:function', 60.0)") and child.options["start_new_session"]
    assert child.options["stdin"] == subprocess.DEVNULL and child.options["env"]["OPENBLAS_NUM_THREADS"]
    assert child.options["stderr"] is None
    assert apart([done], hangs=True)[0] == Finished("printed", 3)  # by threads that never end
    assert "serve('module:function', " in apart([done], timeout=math.inf)[1].command[2]
    assert str(threading.TIMEOUT_MAX) in apart([done], timeout=math.inf)[1].command[2]


def test_without_standard_error(apart, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert apart([line(output="", code=0)])[1].options["stderr"] == subprocess.DEVNULL


def test_a_child_that_ended_in_a_call(apart):
    dump = [b"Fatal Python error: Segmentation fault\n", b"\n", b"Current thread 0x7 (most recent call first):\n"]
    dump += [b'  File "/there/fn.py", line 2 in fn\n', f'  File "{isolation.__file__}", line 9 in serve\n'.encode()]
    failure, _ = apart([b"noise \xff\n", line(call="for x"), *dump], status=-11)
    assert failure.reason == "it crashes: its process was killed by SIGSEGV" and failure.received == "x"
    assert failure.frames == ('  File "/there/fn.py", line 2, in fn',)
    failure, _ = apart([*dump, line(call="for x")], status=-11)
    assert failure.frames == ()  # they were written in an earlier call
    assert apart([line(call="for x"), line(call="")], status=1)[0].reason.endswith("with status 1, between two calls")
    assert apart([line(call="for x")], 2.0, status=-signal.SIGALRM)[0].reason == "it takes longer than 2 s"


def test_a_child_that_ended_too_late(apart, monkeypatch):
    now = iter([100.0, 107.5])
    monkeypatch.setattr(isolation, "time", SimpleNamespace(monotonic=lambda: next(now, 107.5)))
    assert apart([line(call="for x")], 2.0, status=-9)[0].reason == "it takes longer than 2 s"
    now = iter([100.0, 106.5])
    monkeypatch.setattr(isolation, "time", SimpleNamespace(monotonic=lambda: next(now, 106.5)))
    assert apart([line(call="for x")], 2.0, status=-9)[0].reason.startswith("it crashes")


def test_what_a_child_writes(tmp_path, monkeypatch):
    """Everything that concerns the process is caught, so that this one can be the child."""
    alarms = []
    (tmp_path / "a_command.py").write_text(
        "from pyrope.oracle.ask import announced\n"
        "def main(words):\n"
        "    with announced('for x'):\n"
        "        print('printed', *words)\n"
        "    return 4\n"
    )
    pipes = []
    with monkeypatch.context() as patch:  # undone before the test ends: pytest captures by the same functions
        patch.syspath_prepend(tmp_path)
        patch.setattr(ask, "listeners", [])
        patch.setattr(os, "dup", lambda fd: os.open(tmp_path / "pipe", os.O_WRONLY | os.O_CREAT))
        patch.setattr(os, "dup2", lambda one, two: alarms.append((one, two)))
        patch.setattr(isolation.faulthandler, "enable", pipes.append)
        patch.setattr(isolation.faulthandler, "register", lambda number, pipe, chain: alarms.append((number, chain)))
        patch.setattr(signal, "setitimer", lambda which, seconds: alarms.append((which, seconds)))
        patch.setattr(sys, "argv", ["-c", "some", "words"])
        serve("a_command:main", 2.5)
    pipes.pop().close()
    assert [json.loads(text) for text in (tmp_path / "pipe").read_text().splitlines()] == [
        {"call": "for x"}, {"call": ""}, {"output": "printed some words\n", "code": 4}
    ]  # fmt: skip
    real = signal.ITIMER_REAL
    assert alarms == [(2, 1), (signal.SIGALRM, True), (real, 2.5), (real, 0)]
