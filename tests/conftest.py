"""Hypothesis profiles and the one ``xp`` fixture: NumPy, the device double, and CuPy where a device answers."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys

import cupy_contract
import numpy as np
import optional
import pytest
from cupy_contract import DEVICE, NO_DEVICE, ON_CPU
from device_double import DeviceDouble
from hypothesis import HealthCheck, Phase, settings

import pyrope

# Each of pytest's workers has a core: one thread, unless a test asks for more, or you do for all of them.
os.environ.setdefault("PYROPE_THREADS", "1")

# The comparisons need other people's software: `tox -e peers` installs it, and fails where some of it is missing.
collect_ignore = [] if all(map(importlib.util.find_spec, optional.PEERS)) else ["peers"]

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
# The same examples in every run: a failure comes from the change that was made. `tox -e thorough` draws new ones.
settings.register_profile("quick", max_examples=30, derandomize=True, **_COMMON)
settings.register_profile("ci", max_examples=100, derandomize=True, **_COMMON)
settings.register_profile("brief", max_examples=15, derandomize=True, **_COMMON)  # the oldest interpreter, and MPI
# On CuPy every example takes long: there are few, and those that fail are not made simpler.
settings.register_profile(
    "device", max_examples=15, derandomize=True, phases=(Phase.explicit, Phase.generate), **_COMMON
)
settings.register_profile("thorough", max_examples=500, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "quick"))


if ON_CPU:
    cupy_contract.real.cuda.set_allocator(None)  # no pool, so that every new array is new memory, which is poisoned
BACKENDS = [
    pytest.param("numpy"),
    pytest.param("double", marks=pytest.mark.skipif(cupy_contract.real is None, reason=cupy_contract.REASON)),
    pytest.param("cupy", marks=pytest.mark.skipif(not DEVICE, reason="not run on a GPU: no device answers")),
]


def pytest_report_header() -> str:
    if ON_CPU:
        return f"GPU: NOT TESTED; the tests with cupy in their names run {DEVICE}, with poisoned memory"
    return (
        f"GPU: the suite runs on {DEVICE} too" if DEVICE else f"GPU: NOT TESTED, a device double stands in: {NO_DEVICE}"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ctrl_c: sends SIGINT; skipped where that is ignored, as in the background")
    config.addinivalue_line("markers", "needs(package): skipped where the package is not installed")


def pytest_sessionstart(session: pytest.Session) -> None:
    manager = session.config.pluginmanager
    if terminal := manager.getplugin("terminalreporter"):
        manager.register(FailuresAtOnce(terminal))


class FailuresAtOnce:
    """Prints the name of a test that fails as it happens, and not only at the end."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.write_line(f"\nFAILED {report.nodeid} ({report.when})", red=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        optional.package(marker.args[0])
    if item.get_closest_marker("ctrl_c") and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        pytest.skip("SIGINT is ignored in this process, and so in those that it starts")


@pytest.fixture(params=BACKENDS, scope="module")
def xp(request: pytest.FixtureRequest):
    """An array module; arrays reach it by ``pyrope.from_numpy(array, xp)`` and leave it by ``pyrope.to_numpy``."""
    if request.param == "numpy":
        yield np
    elif request.param == "cupy":
        yield pyrope.backend.get("cupy")
    else:
        before = sys.modules.get("cupy")
        sys.modules["cupy"] = double = DeviceDouble()
        yield double
        del sys.modules["cupy"]
        if before is not None:
            sys.modules["cupy"] = before
