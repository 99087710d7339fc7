"""Runs a command in a process of its own, so that a candidate that crashes or never returns gets a verdict too.

The child runs the command just as its parent would, and its standard output is a pipe of lines. Lines of JSON announce
each call of the candidate before it is made, and hold what the command printed once it is done; all others are what
`faulthandler` writes when the child crashes or a call takes too long. What the candidate prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import ask
from .adapters import kill
from .report import Failure, own_frames

_GRACE = 5.0  # seconds for a child to end by itself
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.M)
_SLOW = "let it return, or give it more time with --timeout"
_CRASHED = "call it by itself with such arrays, or use --in-process to have the crash in a debugger"


class Finished(NamedTuple):
    """What a command printed, and its exit code."""

    output: str
    code: int


def run_apart(entry: str, words: Sequence[str], timeout: float) -> Finished | Failure:
    """Runs "module:function", which takes the words of a command line and returns an exit code, in a new interpreter.

    Each call of the candidate, and its import, may take ``timeout`` seconds. The child and all that it started have
    ended when this returns or raises.
    """
    timeout = min(timeout, threading.TIMEOUT_MAX)
    start = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({entry!r}, {timeout!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", start, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if sys.stderr is not None else subprocess.DEVNULL,
        start_new_session=True,  # so that it can be killed together with all that it started
        env={"OPENBLAS_NUM_THREADS": "1", **os.environ},  # many small products: threads would wait for each other
    )
    call, dump, deadline, done = "", list[str](), math.inf, threading.Event()

    def watch() -> None:  # the child ends itself in time, unless the candidate or the system prevents that
        while not done.wait(1.0):
            if time.monotonic() > deadline:
                kill(process)

    threading.Thread(target=watch, daemon=True).start()
    try:
        for line in process.stdout or ():
            if not line.startswith(b"{"):
                dump.append(line.decode(errors="replace"))
                continue
            message = json.loads(line)
            if "code" in message:
                with contextlib.suppress(subprocess.TimeoutExpired):  # threads of the candidate may never end
                    process.wait(_GRACE)
                return Finished(**message)
            call, dump = message["call"], []
            deadline = time.monotonic() + timeout + _GRACE if call else math.inf
        status = process.wait()
        late = time.monotonic() > deadline or status == -getattr(signal, "SIGALRM", math.inf)
        return _failure(status, call, dump, timeout if late else None)
    finally:
        done.set()
        kill(process)
        if process.stdout is not None:
            process.stdout.close()


def _failure(status: int, call: str, dump: list[str], late: float | None) -> Failure:
    """Why a child ended before its command did; ``late`` is the time limit, if that was exceeded."""
    if late is not None:
        reason, fix = f"it takes longer than {late:g} s", _SLOW
    elif status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        reason = f"it crashes: its process was killed by {name}" + (", as when memory runs out" if status == -9 else "")
        fix = _CRASHED
    else:
        reason, fix = f"it ends its process, with status {status if status < 2**31 else hex(status)}", _CRASHED
    received = call.removeprefix("for ") if call.startswith("for ") else ""
    where = "" if received else f", {call or 'between two calls'}"
    return Failure(f"{reason}{where}", received, fix, frames=_frames(dump))


def _frames(dump: list[str]) -> tuple[str, ...]:
    """The candidate's frames in what `faulthandler` wrote, which lists the most recent of each thread first."""
    threads = [_FRAME.findall(text)[::-1] for text in "".join(dump).split("hread 0x")]
    frames = next((frames for frames in threads if any(file == __file__ for file, _, _ in frames)), [])
    calls = [index for index, frame in enumerate(frames) if os.path.dirname(frame[0]) == os.path.dirname(__file__)]
    after = frames[calls[-1] + 1 :] if calls else []
    return own_frames(traceback.FrameSummary(file, int(line), function) for file, line, function in after)


def serve(entry: str, timeout: float) -> None:
    """The child: runs the command of `sys.argv` and writes to its standard output what `run_apart` reads."""
    pipe = open(os.dup(1), "w", encoding="utf-8")  # noqa: SIM115
    os.dup2(2, 1)
    faulthandler.enable(pipe)
    alarm = getattr(signal, "setitimer", None)  # not on Windows, where the parent ends what takes too long
    if alarm:
        faulthandler.register(signal.SIGALRM, pipe, chain=True)  # writes where the child is; then the alarm ends it

    def send(**message: Any) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    def listen(call: str) -> None:
        if alarm:
            alarm(signal.ITIMER_REAL, timeout if call else 0)
        send(call=call)

    ask.listeners.append(listen)
    module, _, function = entry.partition(":")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = getattr(importlib.import_module(module), function)(sys.argv[1:])
    send(output=output.getvalue(), code=code)
