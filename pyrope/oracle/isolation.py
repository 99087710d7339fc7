"""Runs a command in a process of its own, so that a candidate that crashes or never returns gets a verdict too.

The child runs the command just as its parent would, and its standard output is a file. Lines of JSON announce each call
of the candidate before it is made, and hold what the command printed once it is done; all others are what
`faulthandler` writes when the child crashes or a call takes too long. What the candidate prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from .adapters import run_to_its_end
from .candidate import listeners
from .report import Failure


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
    root = os.path.dirname(__file__).removesuffix(os.path.join("", *__name__.split(".")[:-1]))
    search = f"path = {sys.path!r}; sys.path[:] = [{root!r}, *path]"  # so that the child runs this very pyrope
    start = f"import sys; {search}; from {__name__} import serve; sys.path[:] = path; serve({entry!r}, {timeout!r})"
    with tempfile.TemporaryFile() as log:
        # The child ends itself if a call takes too long. It has many small products: threads would wait for each other.
        one_thread = {"OPENBLAS_NUM_THREADS": "1", **os.environ}
        status = run_to_its_end([sys.executable, "-c", start, *words], stdout=log, env=one_thread)
        log.seek(0)
        return _result(status, log.read().decode(errors="replace"), timeout)


def _result(status: int, log: str, timeout: float) -> Finished | Failure:
    """What the child wrote at its end, or why it ended before."""
    lines = log.splitlines(keepends=True)
    dump = "".join(line for line in lines if not line.startswith("{"))
    last = next((json.loads(line) for line in reversed(lines) if line.startswith("{")), {"call": ""})
    if "code" in last:
        return Finished(**last)
    fix = "call it by itself with such arrays, or use --in-process to have the crash in a debugger"
    if dump.startswith("Timeout ("):
        reason, fix = f"it takes longer than {timeout:g} s", "let it return, or give it more time with --timeout"
    elif status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        reason = f"it crashes: its process was killed by {name}" + (", as when memory runs out" if status == -9 else "")
    else:
        reason = f"it ends its process, with status {status}"
    call = last["call"]
    received = call.removeprefix("for ") if call.startswith("for ") else ""
    where = "" if received else f", {call or 'between two calls'}"
    return Failure(f"{reason}{where}", received, fix, frames=_frames(dump))


def _frames(dump: str) -> tuple[str, ...]:
    """The innermost frames of the thread that called the candidate, in what `faulthandler` wrote: it comes last."""
    return tuple(line for line in dump.rpartition("hread 0x")[2].splitlines() if line.startswith("  File"))[:4]


def serve(entry: str, timeout: float) -> None:
    """The child: runs the command of `sys.argv` and writes to its standard output what `run_apart` reads."""
    log = open(os.dup(1), "w", encoding="utf-8")  # noqa: SIM115
    os.dup2(2, 1)
    faulthandler.enable(log)

    def send(**message: Any) -> None:
        log.write(json.dumps(message) + "\n")
        log.flush()

    def listen(call: str) -> None:
        send(call=call)
        if call:  # by a thread that needs no lock of the interpreter and no signal: nothing that hangs can stop it
            faulthandler.dump_traceback_later(timeout, exit=True, file=log)
        else:
            faulthandler.cancel_dump_traceback_later()

    listeners.append(listen)
    module, _, function = entry.partition(":")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = getattr(importlib.import_module(module), function)(sys.argv[1:])
    send(output=output.getvalue(), code=code)
    sys.stderr.flush()
    os._exit(0)  # threads of the candidate may never end
