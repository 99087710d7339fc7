"""What the installed CuPy wheel has: names and keywords, read without a GPU, and a checker for source code."""

from __future__ import annotations

import ast
import ctypes
import importlib
import inspect
import operator
import re

import pyrope.backend

try:
    import cupy as real  # imports without a device; any use of one raises
except ImportError:  # not installed, or no wheel for this platform: the tests that need one are skipped
    real = None

REASON = "needs the package cupy-cuda13x, on Linux and x86-64: pip install cupy-cuda13x==14.2.0"


def keywords(function: object) -> set[str] | None:
    """The parameter names of a CuPy function, method or ufunc; None if it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return None
        return {p.name for p in parameters}
    except (TypeError, ValueError):  # compiled: the signature is the first line of the docstring
        first = (getattr(function, "__doc__", None) or "").strip().partition("\n")[0]
        match = re.search(r"\((.*)\)", first)
        if not match or "**" in match.group(1):
            return None if match else set()
        return {part.partition("=")[0].strip(" \\*/") for part in match.group(1).split(",")} - {""}


def _dotted(node: ast.AST) -> str | None:
    """'linalg.norm' for the expression xp.linalg.norm, None if it does not begin with xp."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join(reversed(names)) if names and isinstance(node, ast.Name) and node.id == "xp" else None


def violations(source: str) -> list[str]:
    """What source code uses of xp that CuPy does not have."""
    tree, messages = ast.parse(source), []
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    given = {id(node.func): node.keywords for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in inner or not (path := _dotted(node)):
            continue
        try:
            known = keywords(operator.attrgetter(path)(real))
        except AttributeError:
            messages.append(f"line {node.lineno}: cupy has no {path}")
            continue
        for keyword in given.get(id(node), ()):
            if keyword.arg is None or (known is not None and keyword.arg not in known):
                messages.append(f"line {node.lineno}: cupy.{path} has no keyword {keyword.arg}")
    return messages


def uses(source: str) -> set[str]:
    """The names of xp that source code uses."""
    return {path for node in ast.walk(ast.parse(source)) if (path := _dotted(node))}


def _device() -> tuple[str, str]:
    """The device that CuPy computes on, and why there is none."""
    try:
        cupy = pyrope.backend.get("cupy")
    except (ImportError, RuntimeError) as error:
        return "", str(error)
    return f"CuPy {cupy.__version__} on {cupy.cuda.runtime.getDeviceProperties(0)['name'].decode()}", ""


def counts() -> tuple[int, int]:
    """How many kernels and products tests/cpucuda has launched so far, and how often the host fetched a result."""
    numbers = (ctypes.c_long * 2)()
    importlib.import_module("cpucuda_start").library.cpucuda_counts(numbers)
    return tuple(numbers)


DEVICE, NO_DEVICE = _device()
ON_CPU = DEVICE.endswith("CPU (cpucuda)")  # tests/cpucuda: CuPy itself, on a CPU
