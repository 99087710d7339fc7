"""Drives Chromium over a pipe by its DevTools protocol: messages of JSON with a zero byte behind each. No packages."""

from __future__ import annotations

import base64
import json
import os
import pathlib
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
INSTALL = "apt-get update && apt-get install -y chromium"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
         "--hide-scrollbars", "--remote-debugging-pipe")  # fmt: skip
_LIMIT = 60.0  # seconds for an answer, against hangs


class Chromium:
    """A browser with one tab, as a context; what the console or the network complain about is in `complaints`."""

    def __enter__(self) -> Chromium:
        self.folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        (to_read, self.write), (self.read, to_write) = os.pipe(), os.pipe()

        def pipes() -> None:  # Chromium reads from 3 and writes to 4
            os.dup2(os.dup2(to_read, 10), 3)
            os.dup2(os.dup2(to_write, 11), 4)

        words = [str(PROGRAM), *FLAGS, f"--user-data-dir={self.folder.name}", "about:blank"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(words, preexec_fn=pipes, close_fds=False, start_new_session=True, **quiet)
        os.close(to_read), os.close(to_write)
        self.buffer, self.number, self.session = b"", 0, None
        self.complaints: list[str] = []
        target = next(info for info in self.ask("Target.getTargets")["targetInfos"] if info["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.write), os.close(self.read)
        self.folder.cleanup()

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + _LIMIT
        while b"\0" not in self.buffer:
            if not select.select([self.read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium did not answer within {_LIMIT:g} s")
            data = os.read(self.read, 2**20)
            if not data:
                raise RuntimeError("Chromium ended")
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._listen(message.get("method", ""), message.get("params", {}))
        return message

    def _listen(self, method: str, params: dict[str, Any]) -> None:
        if method == "Log.entryAdded":
            self.complaints.append(str(params["entry"]["text"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(params["args"]))
        elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(
            ("file:", "about:", "data:")
        ):
            self.complaints.append(f"the page asks for {params['request']['url']}")
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"a dialogue opens: {params['message']}")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self.number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, path: pathlib.Path, width: int, scheme: str = "light", media: str = "") -> None:
        """Opens a file, in a window of this width, with a colour scheme, for the screen or for ``media="print"``."""
        self.complaints.clear()
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        preferred = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", media=media, features=preferred)
        self.ask("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + _LIMIT
        while self.value("document.readyState + location.href") != f"complete{path.resolve().as_uri()}":
            assert time.monotonic() < end, f"{path} was not loaded"

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript is, as plain values."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def screenshot(self, path: pathlib.Path) -> None:
        """The whole page as a PNG file."""
        picture = self.ask("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(picture["data"]))
