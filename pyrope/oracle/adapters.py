"""Wraps anything that rotates or attends as one kind of callable, fn(x, positions) or fn(q, k, v, …) on NumPy arrays.

Adapters are put around each other: the array library inside, the shape of the API outside, such as
``with_axes(from_torch(rope), "bnhd")``; a lambda does the rest, as docs/check.md shows for each well-known API. If a
function changes its input, x changes too, where x is writeable: an adapter hides no fault. Results are copies on the
host, in the dtype that the function returned, bit by bit.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import itertools
import math
import operator
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from .. import checks
from ..backend import from_numpy, get, to_numpy
from ..files import NumPyArray, dtype_named, load_npy, save_npy
from .candidate import COMPILES, COUNTS, Unreadable, hand_over, last_call, wrapping

Function: TypeAlias = Callable[..., Any]
_TAIL = 2000  # bytes of what a failing program printed that go into the error

# ── Array libraries ──────────────────────────────────────────────────────────────────────────────────────────────────


class Library(NamedTuple):
    """How NumPy arrays become arrays of a library and return, and how it derives a function."""

    module: str
    array: str  # the name of its arrays in the module
    there: Callable[[Any, NumPyArray], Any]  # (library, x) -> its array
    home: Callable[[Any], Any]  # its array -> one of NumPy
    gradients: Callable[[Any, Function, Sequence[Any], Any], Sequence[Any]] | None  # Jᵀg; None for one that is zero
    views: bool = False  # bfloat16, which it does not exchange with NumPy, crosses as int16
    trait: str = ""


def _to_jax(jax: Any, x: NumPyArray) -> Any:
    if not jax.config.jax_enable_x64 and x.dtype in (np.float64, np.int64):
        if x.dtype == np.float64 or (x.size and (x.max() >= 2**31 or x.min() < -(2**31))):
            fix = "call jax.config.update('jax_enable_x64', True), or use a narrower dtype and positions below 2^31"
            raise ValueError(f"JAX would halve the width of {x.dtype}: {fix}")
        x = x.astype(np.int32)
    return jax.numpy.array(x)


def _jax_gradients(jax: Any, fn: Function, inputs: Sequence[Any], g: Any) -> Any:
    out, pull = jax.vjp(fn, *inputs)
    return pull(g.astype(out.dtype))


def _by_leaves(grad: str, flag: str, value: bool) -> Any:
    """The gradients of torch and of Paddle, which record what is computed from leaves with this flag."""

    def gradients(module: Any, fn: Function, inputs: Sequence[Any], g: Any) -> Any:
        leaves = [x.detach().clone() for x in inputs]
        for leaf in leaves:
            setattr(leaf, flag, value)
        out = fn(*(leaf.clone() for leaf in leaves))  # which may be changed in place, as a leaf may not
        if getattr(out, flag) is not value:
            return [None] * len(leaves)
        return operator.attrgetter(grad)(module)([out], leaves, [g.to(out.dtype)], allow_unused=True)

    return gradients


LIBRARIES = {
    "torch": Library(
        "torch", "Tensor",  # with the memory and the strides of x where torch allows it, else a copy
        lambda torch, x: torch.from_numpy(x if x.flags.writeable and min(x.strides, default=0) >= 0 else x.copy()),
        lambda y: y.detach().resolve_conj().resolve_neg().cpu().numpy(),
        _by_leaves("autograd.grad", "requires_grad", True), views=True,
    ),
    # float64 and positions from 2³¹ on need jax_enable_x64
    "jax": Library("jax", "Array", _to_jax, np.asarray, _jax_gradients, trait=COMPILES),
    "mlx": Library(  # float64 on the CPU only; without a dtype, it would make float32 of it
        "mlx.core", "array", lambda mx, x: mx.array(np.array(x), dtype=getattr(mx, x.dtype.name)), np.asarray,
        lambda mx, fn, inputs, g: mx.vjp(lambda *x: [fn(*x)], list(inputs), [g])[1], views=True,
    ),
    "paddle": Library(
        "paddle", "Tensor", lambda paddle, x: paddle.to_tensor(np.array(x)), lambda y: y.detach().numpy(),
        _by_leaves("grad", "stop_gradient", False), views=True,
    ),
    "cupy": Library("cupy", "ndarray", lambda cupy, x: from_numpy(np.ascontiguousarray(x), cupy), to_numpy, None),
}  # fmt: skip


def framework(fn: Function, name: str, backward: str | None = None, device: Any = None) -> Function:
    """A function of the arrays of a library, one of `LIBRARIES`, as one of NumPy arrays; ``device`` is torch's.

    ``backward="x"`` makes the backward pass of fn(x, …) as the library derives it, (g, …) -> the gradient of x;
    ``backward="qkv"`` that of attention, fn(q, k, v, …), as (q, k, v, g, …) -> those of q, k and v. What has no
    gradient gets zeros. The gradient of x is taken at ones, so that a backward pass that reads x for g is wrong.
    """
    border = _Border(name, device)
    if backward not in (None, "x", "qkv"):
        raise ValueError(f'backward must be None, "x" or "qkv", was {backward!r}')
    if (count := len(backward or "")) and border.library.gradients is None:
        raise ValueError(f"{name} derives no backward pass: write one, and check that")

    def call(*arguments: Any, **options: Any) -> Any:
        given, named = [*map(border.there, arguments)], {key: border.there(x) for key, x in options.items()}
        run = functools.partial(fn, **named) if named else fn
        result = border.home(border.derived(run, count, given) if count else hand_over(run, *given))
        for x, after in zip((*arguments, *options.values()), (*given, *named.values()), strict=True):
            if isinstance(x, np.ndarray):
                changed = border.home(after)
                if x.flags.writeable and changed.shape == x.shape:
                    x[...] = changed
        return result

    return wrapping(call, fn, border.library.trait)


from_torch, from_jax, from_mlx, from_paddle, from_cupy = (
    functools.partial(framework, name=name) for name in ("torch", "jax", "mlx", "paddle", "cupy")
)


class _Border:
    """Between NumPy and a library."""

    def __init__(self, name: str, device: Any) -> None:
        self.library = LIBRARIES[checks.choice("framework", name, tuple(LIBRARIES))]
        self.module = get("cupy") if name == "cupy" else checks.imported(self.library.module, f"from_{name}")
        self.kind = getattr(self.module, self.library.array)
        self.device = device

    def there(self, x: Any) -> Any:
        """An array on the other side; anything else as it is."""
        if not isinstance(x, np.ndarray):
            return x
        if self.library.views and x.dtype.name == "bfloat16":
            y = self.library.there(self.module, x.view(np.int16)).view(self.module.bfloat16)
        else:
            y = self.library.there(self.module, x)
        return y if self.device is None else y.to(self.device)

    def home(self, y: Any) -> Any:
        """An array, or each of several, on this side: its own memory where the library shares it, so that a buffer that
        is used again shows."""
        if isinstance(y, tuple | list):
            return tuple(map(self.home, y))
        if self.library.views and str(self.checked(y).dtype).endswith("bfloat16"):
            return np.asarray(self.library.home(y.view(self.module.int16))).view(dtype_named("bfloat16"))
        return np.asarray(self.library.home(self.checked(y)))

    def checked(self, y: Any) -> Any:
        """y, if it is an array of the library."""
        if isinstance(y, self.kind):
            return y
        actual = "nothing" if y is None else type(y).__name__
        raise Unreadable(f"returns {actual}, not {self.library.module}.{self.library.array}", last_call(), "type")

    def derived(self, fn: Function, count: int, given: Sequence[Any]) -> Any:
        """The gradients of the first ``count`` arguments of fn, which g follows: one gradient at ones, or several."""
        given = given if count > 1 else (self.there(np.ones_like(self.home(given[0]))), *given)
        inputs, g, rest = given[:count], given[count], given[count + 1 :]
        derive = cast(Function, self.library.gradients)
        found = derive(self.module, lambda *x: self.checked(hand_over(fn, *x, *rest)), inputs, g)
        zeros = (self.there(np.zeros_like(self.home(x))) for x in inputs)
        made = [zero if dx is None else dx for zero, dx in zip(zeros, found, strict=True)]
        return made if count > 1 else made[0]


# ── Shapes of API ────────────────────────────────────────────────────────────────────────────────────────────────────


class Block(NamedTuple):
    """What one call of a function gets of x: an array of zeros of this shape, with a part of x in its places."""

    part: Any  # an index of x
    shape: tuple[int, ...]
    places: Any = None  # an index of the array; None: it is the part, with axes merged
    more: tuple[Any, ...] = ()  # what the call gets besides


def _by_blocks(fn: Function, x: NumPyArray, tight: bool, blocks: Iterable[Block]) -> NumPyArray:
    """What fn makes of x, block by block; if fn changes a block, x is changed.

    If x was not contiguous, a block is a part of a wider array: a function that ignores strides is right and wrong in
    the same calls as without an adapter.
    """
    y = x
    for part, shape, places, more in blocks:
        block = np.zeros((*shape[:-1], shape[-1] + 8 * (not tight)), x.dtype)[..., : shape[-1]]
        inside = block.reshape(x[part].shape) if places is None else block  # a view: axes are split, never merged
        inside[places or ...] = x[part]
        block.flags.writeable = x.flags.writeable
        result = hand_over(fn, block, *more)
        if not isinstance(result, np.ndarray):
            actual = "nothing" if result is None else type(result).__name__
            raise Unreadable(f"returns {actual} instead of one array", last_call(), "type")
        if result.shape != shape:
            raise Unreadable(f"returns shape {result.shape} instead of {shape}", last_call(), "shape")
        if x.flags.writeable:
            x[part] = inside[places or ...]
        y = np.empty(x.shape, result.dtype) if y is x else y
        y[part] = result.reshape(inside.shape)[places or ...]
    return y


def with_axes(fn: Function, axes: str) -> Function:
    """``fn(x, …)`` for x with these axes, in this order, out of b, h, n and d: "bnhd" and "bhnd" are usual; brackets
    merge axes, as in vLLM's "n(hd)", and a loop goes over those that are left out, as in "nd".

    >>> fn = with_axes(lambda x, positions: x + positions[:, None, None], "nhd")
    >>> fn(np.zeros((2, 3, 1)), np.array([0, 5, 9]))[1].ravel()
    array([0., 5., 9.])
    """
    groups = re.findall(r"\([bhnd]+\)|[bhnd]", axes)
    order = "".join(groups).replace("(", "").replace(")", "")
    if "".join(groups) != axes or len(set(order)) < len(order) or not {"n", "d"} <= set(order):
        raise ValueError(f'axes must be n, d and any of b and h, each once, such as "bnhd" or "n(hd)", was {axes!r}')
    looped = [axis for axis in "bh" if axis not in order]
    there = ["bhnd".index(axis) for axis in [*looped, *order]]

    def candidate(x: NumPyArray, *rest: Any) -> NumPyArray:
        four = x.reshape(math.prod(x.shape[:-3]), *(1, *x.shape)[-3:])  # (b, h, n, d): a view of x, or a copy
        moved = four.transpose(there)  # the axes of the loop first
        moved.flags.writeable = x.flags.writeable
        sizes = dict(zip(order, moved.shape[len(looped) :], strict=True))
        shape = tuple(math.prod(sizes.get(axis, 1) for axis in group) for group in groups)
        blocks = (Block(place, shape, more=rest) for place in np.ndindex(*moved.shape[: len(looped)]))
        y = _by_blocks(fn, moved, x.flags.c_contiguous, blocks)
        if x.flags.writeable:
            x[...] = four.reshape(x.shape)
        return y.transpose(np.argsort(there)).reshape(x.shape)

    return candidate


def from_sequential(fn: Function, limit: int = 8192) -> Function:
    """``fn(x)``, whose rows are positions 0 … n−1: it gets a sequence with zeros at the positions not asked for, which
    are below ``limit``; a position that repeats takes another call. Attention with RoPE inside, ``fn(q, k, v)``, gets
    tokens with positions from 0 on, or from where its last call ended, and no others."""
    ended = [0]

    def blocks(x: NumPyArray, positions: NumPyArray) -> Iterator[Block]:
        least, length = int(positions.min(initial=0)), int(positions.max(initial=-1)) + 1
        if least < 0 or length > limit:
            rule = f"positions must be from 0 to {limit - 1} for this function: set max_position"
            raise ValueError(f"{rule}; they were from {least} to {length - 1}")
        left = np.arange(positions.size)
        while True:
            at, first = np.unique(positions[left], return_index=True)
            yield Block((..., left[first], slice(None)), (*x.shape[:-2], length, x.shape[-1]), (..., at, slice(None)))
            left = np.delete(left, first)
            if not left.size:
                return

    def begin(first: int, length: int) -> tuple[int, ...]:
        if first not in (0, ended[0]):
            raise ValueError(f"this function counts its positions: they must begin at 0, began at {first}")
        ended[0] = first + length
        return ()

    return _counting(fn, blocks, begin)


def from_offset(fn: Function) -> Function:
    """``fn(x, offset)``, whose rows are positions offset, offset + 1, …: one call for each such run. Of attention with
    RoPE inside, ``fn(q, k, v, offset)``, all rows of a batch have one offset."""

    def blocks(x: NumPyArray, positions: NumPyArray) -> Iterator[Block]:
        edges = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), positions.size]
        for start, end in itertools.pairwise(edges):
            offset = int(positions[start]) if positions.size else 0
            part = (..., slice(start, end), slice(None))
            yield Block(part, x[part].shape, more=(offset,))

    return _counting(fn, blocks, lambda first, length: (first,))


def _counting(fn: Function, blocks: Function, begin: Callable[[int, int], tuple[int, ...]]) -> Function:
    """A function that counts its positions: a rotation, or attention, which gets what ``begin`` says."""

    def call(*arguments: NumPyArray, **options: NumPyArray) -> Any:
        *arrays, positions = arguments
        if len(arrays) == 1:
            if positions.ndim > 1:
                raise ValueError(f"positions must be (n,), had shape {positions.shape}: this function has one axis")
            return _by_blocks(fn, arrays[0], arrays[0].flags.c_contiguous, blocks(*arguments))
        first, length = int(positions.ravel()[:1].sum()), positions.shape[-1]
        if (positions != first + np.arange(length)).any():
            rule = "they must rise one by one, and be the same in all rows"
            raise ValueError(f"this function counts its positions: {rule}")
        return hand_over(functools.partial(fn, **options), *arrays, *begin(first, length))

    return wrapping(call, fn, COUNTS)


# ── Programs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class CommandFailed(RuntimeError):
    """A program did not start, failed, took too long, or wrote something else than it should."""


def from_command(
    command: str | Sequence[str], inputs: Sequence[str] | None = None, *, timeout: float = 60.0
) -> Function:
    """A program that reads and writes .npy files: ``"./my_rope {x} {positions} {y}"``, or
    ``"mpiexec -n 4 python mine.py {q} {k} {v} {o}"``, with {positions} if it rotates inside, {mask} or {segments} if it
    takes them, and for gradients {g}, and {dq} {dk} {dv} in place of {o}.

    The words in braces become paths in a private directory that lasts for one call; there is no shell. bfloat16 is
    exchanged as uint16, the bits of each number; a result must have the shape and dtype of its input (docs/check.md).
    After ``timeout`` seconds, or on Ctrl-C, the program and all that it started are killed. ``inputs``, if given, are
    those that the command must have, in the order of the arguments.
    """
    program = _Program(command, inputs, timeout)
    return wrapping(program, program, COMPILES)


# What a program may read besides, made from q and k where a call does not give it: every key is seen.
_OPTIONS: dict[str, Function] = {
    "mask": lambda q, k: np.ones((len(q), 1, q.shape[-2], k.shape[-2]), bool),
    "segments": lambda q, k: np.zeros((len(q), k.shape[-2]), np.int64),
}


class _Program:
    """A program as a function of arrays; each result has the shape and dtype of the input named beside it."""

    def __init__(self, command: Any, inputs: Sequence[str] | None, timeout: float) -> None:
        try:
            self.words = shlex.split(command) if isinstance(command, str) else [os.fspath(word) for word in command]
        except ValueError as error:
            raise ValueError(f"the command must be such as a shell splits, was {command!r}: {error}") from error
        placed = re.findall(r"\{(\w+)\}", " ".join(self.words))
        if inputs is None:
            inputs = [*"qkv", *(name for name in ("g", "positions") if name in placed)]
            inputs = inputs if {*"qkvo"} & {*placed} else ["x", "positions"]
        gradients = {f"d{name}": name for name in "qkv"}
        self.results = {"y": "x"} if "x" in inputs else gradients if "g" in inputs else {"o": "q"}
        needed, options = [*inputs, *self.results], () if "x" in inputs else _OPTIONS
        odd = [name for name in (*placed, *needed) if (name in placed) != (name in needed) and name not in options]
        if odd:
            example = " ".join(["./mine", *(f"{{{name}}}" for name in needed)])
            how = "is missing" if odd[0] in needed else "does not belong there"
            raise ValueError(f'the command must be such as "{example}": {{{odd[0]}}} {how}')
        self.names = [*inputs, *(name for name in options if name in placed)]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD  # from the signature a check reads what it may hand over
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in self.names])
        self.timeout = checks.real("timeout", timeout, 0, open=True)
        self.hung: CommandFailed | None = None  # a program that took too long once would do so in every other call

    def __call__(self, *arrays: NumPyArray, **options: NumPyArray) -> Any:
        if self.hung is not None:
            raise self.hung
        given = dict(zip(self.names, arrays, strict=False)) | options
        given |= {name: _OPTIONS[name](given["q"], given["k"]) for name in self.names if name not in given}
        given |= {"positions": np.asarray(given["positions"], np.int64)} if "positions" in given else {}
        with tempfile.TemporaryDirectory(prefix="pyrope-", ignore_cleanup_errors=True) as directory:
            paths = {name: os.path.join(directory, f"{name}.npy") for name in (*given, *self.results)}
            for name, array in given.items():
                save_npy(paths[name], array)
            words = [re.sub(r"\{(\w+)\}", lambda match: paths[match[1]], word) for word in self.words]
            log = Path(directory, "log")
            try:
                self._run(words, log)
                made = [
                    load_npy(paths[name], f"what the program wrote as {{{name}}}", given[like].shape, given[like].dtype)
                    for name, like in self.results.items()
                ]
            except (CommandFailed, ValueError) as error:
                failed = CommandFailed(_with_output(error, log, paths))
                self.hung = failed if isinstance(error.__cause__, subprocess.TimeoutExpired) else None
                raise failed from error.__cause__
        return made if len(made) > 1 else made[0]

    def _run(self, words: list[str], log: Path) -> None:
        """Runs it to its end; its output goes to a file."""
        try:
            with open(log, "wb") as output:
                status = run_to_its_end(words, self.timeout, stdout=output, stderr=subprocess.STDOUT)
        except subprocess.TimeoutExpired as error:
            raise CommandFailed(f"{words[0]} took longer than {self.timeout:g} s and was killed") from error
        except (OSError, ValueError) as error:
            raise CommandFailed(f"{words[0]} cannot be started: {error}") from error
        if status:
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            raise CommandFailed(f"{words[0]} {how}")


def _with_output(error: Exception, log: Path, paths: dict[str, str]) -> str:
    """What went wrong, and the last that the program printed; paths, which change with every call, by their names."""
    printed = log.read_bytes()[-_TAIL:].decode(errors="replace").strip()
    text = f"{error}; it printed:\n{printed}" if printed else f"{error}; it printed nothing"
    for name, path in paths.items():
        text = text.replace(path, f"{{{name}}}")
    return text


def run_to_its_end(words: Sequence[str], timeout: float | None = None, **streams: Any) -> int:
    """The exit status of a program. Whether this returns or raises, the program and all that it started have ended."""
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True, **streams)
    try:
        return process.wait(timeout)
    finally:  # of Ctrl-C, too, which does not reach a program with a session of its own
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (AttributeError, OSError):  # Windows has no groups, and macOS refuses those that have ended
            process.kill()
        process.wait()


# ── Names on the command line ────────────────────────────────────────────────────────────────────────────────────────


class ImportFailed(ValueError):
    """The module of a target exists, but raised while it was imported."""


def load_target(target: str) -> Function:
    """The function that "module:function" or "file.py:function" names; "module:object.method" works too.

    Imports work from the working directory and, for a file, from its own directory.
    """
    place, _, name = checks.instance("target", target, str).rpartition(":")
    if not (place and all(part.isidentifier() for part in name.split("."))):
        raise ValueError(f'target must be "module:function" or "file.py:function", was {target!r}')
    is_file = place.endswith(".py")
    if is_file and not os.path.isfile(place):
        raise ValueError(f"there is no file {place}")
    for directory in (os.getcwd(), *[os.path.dirname(os.path.abspath(place))] * is_file):
        if directory not in sys.path:
            sys.path.insert(0, directory)
    try:
        value = operator.attrgetter(name)(_imported(place))
    except AttributeError as error:
        raise ValueError(f"{place} has no {name!r}") from error
    if isinstance(value, type) or not callable(value):
        fix = "a class: make an object of it in the file, and name that"
        raise ValueError(f"{target} must be a function, was {fix if isinstance(value, type) else type(value).__name__}")
    return value  # type: ignore[no-any-return]


def _imported(place: str) -> Any:
    """The module of this name, or in this file."""
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        name = f"pyrope_target_{re.sub(r'[^0-9a-zA-Z]', '_', os.path.abspath(place))}"
        spec: Any = importlib.util.spec_from_file_location(name, place)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)  # dataclasses look there for their module
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (place == missing or place.startswith(f"{missing}.")):
            raise ValueError(f"there is no module {place}, here or installed ({error})") from error
        raise ImportFailed(f"{place} cannot be imported: {type(error).__name__}: {error}") from error
