"""Wraps anything that rotates as one kind of callable: fn(x, positions) on NumPy arrays, x (…, n, d), positions (n,).

For a rope with axes positions are (axes, n), which `from_sequential`, `from_offset` and `cached` do not take. Adapters
are put around each other: the array library inside, the shape of the API outside. One line each:

    from_torch(fn), from_jax(fn), from_cupy(fn)                                   # fn(x, positions) itself
    # Hugging Face, GPT-NeoX among them: apply_rotary_pos_emb(q, k, cos, sin), tables by the model's rotary module
    with_axes(from_torch(lambda x, at: apply_rotary_pos_emb(x, x, *rotary(x, at[None]))[0]), "bhnd")
    from_cos_sin(from_torch(apply_rotary_pos_emb), tables)                        # ... tables(positions) of your own
    from_cos_sin(from_torch(apply), cached(from_torch(lambda n: rotary(v, seq_len=n)), 4096))  # ... a cache that grows
    with_axes(from_complex(from_torch(apply_rotary_emb), cached(freqs_cis)), "bnhd")           # Meta's Llama
    with_axes(from_cos_sin(from_torch(apply_rotary_emb, device="cuda"), tables, part="x"), "bnhd")  # flash-attn
    with_axes(from_torch(lambda x, at: rope(x, input_pos=at[None])), "bnhd")      # torchtune
    with_axes(from_torch(lambda x, at: rope(at, x.clone(), x.clone())[0]), "n(hd)")  # vLLM: (positions, query, key)
    from_offset(with_axes(from_mlx(rope), "bhnd"))                                # mlx.nn.RoPE: (x, offset)
    from_sequential(with_axes(from_jax(rope), "nd"))                              # equinox: x (n, d), from 0
    from_torch(fn, backward="x")                                                  # its backward pass, by autograd
    from_command("./my_rope {x} {positions} {y}")                                 # a program in any language
    from_attention_command("mpiexec -n 4 python mine.py {q} {k} {v} {o}")         # one that computes attention
    from_attention_command("./mine {q} {k} {v} {g} {dq} {dk} {dv}", backward=True)  # ... its gradients

If a function changes its input, x changes too, where x is writeable: an adapter hides no fault. Results are copies on
the host, in the dtype that the function returned, bit by bit.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import itertools
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from .. import checks
from ..backend import from_numpy, get, to_numpy
from ..tensors import NumPyArray, dtype_named, load_npy, save_npy
from .ask import Counted, Unreadable, compiling, counting, hand_over, last_call, wrapping

Function: TypeAlias = Callable[..., Any]
Candidate: TypeAlias = Callable[[NumPyArray, NumPyArray], NumPyArray]

_TAIL = 2000  # bytes of what a failing program printed that go into the error


# Array libraries


def _crossing(fn: Function, kind: type, there: Callable[[NumPyArray], Any], back: Callable[[Any], NumPyArray]) -> Any:
    """fn with NumPy arrays for the arrays of another library, wherever they stand among its arguments and results."""

    def returned(result: Any) -> Any:
        if isinstance(result, tuple | list):
            return tuple(map(returned, result))
        if isinstance(result, kind):
            return back(result)
        actual = "nothing" if result is None else type(result).__name__
        raise Unreadable(f"returns {actual} instead of {kind.__module__}.{kind.__name__}", last_call(), "type")

    def candidate(*arguments: Any, **options: NumPyArray) -> Any:
        moved = [there(x) if isinstance(x, np.ndarray) else x for x in arguments]
        called = functools.partial(fn, **{name: there(x) for name, x in options.items()}) if options else fn
        result = returned(hand_over(called, *moved))
        for x, after in zip(arguments, moved, strict=True):
            if isinstance(x, np.ndarray):
                _write_back(x, back(after))
        return result

    return wrapping(candidate, fn)


def _write_back(x: NumPyArray, after: NumPyArray) -> None:
    """Does to x what was done to its copy, so that the caller notices a function that changes its input."""
    if x.flags.writeable and after.shape == x.shape:
        x[...] = after


# What a backward pass gets, and returns: of a rotation, which is linear, the gradient alone, for one of x; of attention
# q, k, v and the gradient, for those of all three.
_BACKWARD = {"x": 1, "qkv": 3}


def _differentiated(
    fn: Function, backward: str | None, product: Callable[[Function, tuple[Any, ...], Any], Any], ones: Function
) -> Function:
    """The backward pass of fn: (g, …) -> the gradient of x, or (q, k, v, g, …) -> those of q, k and v.

    product(fn, inputs, g) is the vector-Jacobian product, in the arrays of a library. The gradient of x is taken at
    x = ones(g), not at g, so that a backward pass that mistakes one for the other is wrong.
    """
    if backward is None:
        return fn
    count = _BACKWARD[checks.choice("backward", backward, tuple(_BACKWARD))]

    def call(*arguments: Any, **options: Any) -> Any:
        given = arguments if count > 1 else (ones(arguments[0]), *arguments)
        inputs, g, rest = given[:count], given[count], given[count + 1 :]
        gradients = product(lambda *x: hand_over(functools.partial(fn, **options), *x, *rest), inputs, g)
        return gradients if count > 1 else gradients[0]

    return wrapping(call, fn)


def from_torch(fn: Function, *, device: Any = None, backward: str | None = None) -> Function:
    """A function of torch tensors as one of NumPy arrays; tensors go to ``device``, the CPU if None.

    On the CPU a tensor has the memory and the strides of x where torch allows it, else it is a copy. ``backward="x"``
    makes the backward pass of fn(x, …) by autograd, as (g, …) -> the gradient of x; ``backward="qkv"`` that of
    attention, fn(q, k, v, …), as (q, k, v, g, …) -> the gradients of q, k and v. What has no gradient gets zeros.
    """
    torch = checks.imported("torch", "from_torch")

    def product(fn: Function, inputs: tuple[Any, ...], g: Any) -> Any:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = fn(*(leaf.clone() for leaf in leaves))  # which may be changed in place, as a leaf may not
        if not isinstance(out, torch.Tensor) or not out.requires_grad:
            return [torch.zeros_like(x) for x in inputs] if isinstance(out, torch.Tensor) else [out]
        found = torch.autograd.grad(out, leaves, g.to(out.dtype), allow_unused=True)
        return [torch.zeros_like(x) if dx is None else dx for x, dx in zip(inputs, found, strict=True)]

    def there(x: NumPyArray) -> Any:
        if not x.flags.writeable or min(x.strides, default=0) < 0:
            x = x.copy()
        bits = x.view(np.int16) if x.dtype.name == "bfloat16" else x
        tensor = torch.from_numpy(bits)
        tensor = tensor.view(torch.bfloat16) if bits is not x else tensor
        return tensor if device is None else tensor.to(device)

    def back(tensor: Any) -> NumPyArray:
        tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
        if tensor.dtype == torch.bfloat16:
            return np.array(tensor.view(torch.int16).numpy()).view(dtype_named("bfloat16"))
        return np.array(tensor.numpy())

    wrapped = _differentiated(fn, backward, product, torch.ones_like)
    return _crossing(wrapped, torch.Tensor, there, back)  # type: ignore[no-any-return]


def from_jax(fn: Function, *, backward: str | None = None) -> Function:
    """A function of JAX arrays as one of NumPy arrays; float64 and positions from 2³¹ on need ``jax_enable_x64``;
    ``backward`` as for `from_torch`, by jax.vjp."""
    jax = checks.imported("jax", "from_jax")

    def product(fn: Function, inputs: tuple[Any, ...], g: Any) -> Any:
        out, pull = jax.vjp(fn, *inputs)
        return pull(g.astype(out.dtype)) if isinstance(out, jax.Array) else [out]

    def there(x: NumPyArray) -> Any:
        if not jax.config.jax_enable_x64 and x.dtype.itemsize == (16 if x.dtype.kind == "c" else 8):
            if x.dtype.kind != "i" or (x.size and (x.max() >= 2**31 or x.min() < -(2**31))):
                raise ValueError(
                    f"JAX would halve the width of {x.dtype}: call jax.config.update('jax_enable_x64', True), or use a "
                    "narrower dtype and positions below 2^31"
                )
            x = x.astype(np.int32)
        return jax.numpy.array(x)

    wrapped = _differentiated(compiling(fn), backward, product, jax.numpy.ones_like)
    return _crossing(wrapped, jax.Array, there, np.array)  # type: ignore[no-any-return]


def from_mlx(fn: Function, *, backward: str | None = None) -> Function:
    """A function of MLX arrays as one of NumPy arrays; MLX computes float64 on the CPU only; ``backward`` as for
    `from_torch`, by mlx.core.vjp."""
    mx = checks.imported("mlx.core", "from_mlx")

    def product(fn: Function, inputs: tuple[Any, ...], g: Any) -> Any:
        return mx.vjp(lambda *x: [fn(*x)], list(inputs), [g])[1]

    def there(x: NumPyArray) -> Any:
        if x.dtype.name == "bfloat16":
            return mx.array(np.array(x).view(np.uint16)).view(mx.bfloat16)
        return mx.array(np.array(x), dtype=getattr(mx, x.dtype.name))  # without a dtype float64 becomes float32

    def back(y: Any) -> NumPyArray:
        if y.dtype == mx.bfloat16:
            return np.array(y.view(mx.uint16)).view(dtype_named("bfloat16"))
        return np.array(y)

    wrapped = _differentiated(fn, backward, product, mx.ones_like)
    return _crossing(wrapped, mx.array, there, back)  # type: ignore[no-any-return]


def from_paddle(fn: Function, *, backward: str | None = None) -> Function:
    """A function of Paddle tensors as one of NumPy arrays; ``backward`` as for `from_torch`, by paddle.grad."""
    paddle = checks.imported("paddle", "from_paddle")

    def product(fn: Function, inputs: tuple[Any, ...], g: Any) -> Any:
        leaves = [x.detach().clone() for x in inputs]
        for leaf in leaves:
            leaf.stop_gradient = False
        out = fn(*(leaf.clone() for leaf in leaves))  # which may be changed in place, as a leaf may not
        if not isinstance(out, paddle.Tensor) or out.stop_gradient:
            return [paddle.zeros_like(x) for x in inputs] if isinstance(out, paddle.Tensor) else [out]
        found = paddle.grad([out], leaves, [g.astype(out.dtype)], allow_unused=True)
        return [paddle.zeros_like(x) if dx is None else dx for x, dx in zip(inputs, found, strict=True)]

    def there(x: NumPyArray) -> Any:
        if x.dtype.name == "bfloat16":
            return paddle.to_tensor(np.array(x).view(np.int16)).view("bfloat16")
        return paddle.to_tensor(np.array(x))

    def back(tensor: Any) -> NumPyArray:
        if tensor.dtype == paddle.bfloat16:
            return np.array(tensor.detach().view("int16").numpy()).view(dtype_named("bfloat16"))
        return np.array(tensor.detach().numpy())

    wrapped = _differentiated(fn, backward, product, paddle.ones_like)
    return _crossing(wrapped, paddle.Tensor, there, back)  # type: ignore[no-any-return]


def from_cupy(fn: Function) -> Function:
    """A function of CuPy arrays as one of NumPy arrays."""
    cupy = get("cupy")
    there: Callable[[NumPyArray], Any] = lambda x: from_numpy(np.ascontiguousarray(x), cupy)  # noqa: E731
    return _crossing(fn, cupy.ndarray, there, lambda y: np.array(to_numpy(y)))  # type: ignore[no-any-return]


# Shapes of API


def from_cos_sin(
    apply: Function, tables: Callable[[NumPyArray], Any], *, part: str = "q", entries: str = "equal"
) -> Candidate:
    """``apply(q, k, cos, sin)``, where tables(positions) -> (cos, sin): x goes in as q and as k.

    ``part`` selects the result: "q" or "k", the first or the second, or "x" for ``apply(x, cos, sin)``.

    Tables as wide as x have each number twice, so that it does not show if a backward pass reads the wrong one of the
    two. ``entries="half"`` or "interleaved", by the layout of the tables, lets the gradients of the first and of the
    second features of all pairs go in by themselves, with zeros for the entries that must not be read then, and adds up
    the results: for backward passes that claim to take such tables with any numbers in them.

    >>> def turn(q, k, cos, sin):
    ...     a, b = q[..., :1], q[..., 1:]
    ...     return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1), k
    >>> fn = from_cos_sin(turn, lambda m: (np.cos(m)[:, None], np.sin(m)[:, None]))
    >>> fn(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([0, 1])).round(3)
    array([[1.   , 0.   ],
           [0.54 , 0.841]])
    """
    checks.choice("part", part, ("q", "k", "x"))
    checks.choice("entries", entries, ("equal", "half", "interleaved"))

    def candidate(x: NumPyArray, positions: NumPyArray) -> Any:
        if entries == "equal":
            return turned(x, tables(positions))
        every, feature = [np.asarray(table) for table in tables(positions)], np.arange(x.shape[-1])
        if any(table.shape[-1] != x.shape[-1] for table in every):
            raise ValueError(f'entries="{entries}" is for tables as wide as x, {x.shape[-1]} features')
        first = feature < len(feature) // 2 if entries == "half" else feature % 2 == 0
        total = np.zeros(x.shape)
        for own in (first, ~first):
            given = np.where(own, x, x.dtype.type(0))
            result = turned(given, [np.where(own, t, 0).astype(t.dtype) for t in every])
            if not isinstance(result, np.ndarray):
                return result  # which is for the caller to refuse
            total = total + result.astype(np.float64)
            _write_back(x, np.where(own, given, x))
        return total.astype(result.dtype)

    def turned(x: NumPyArray, every: Any) -> Any:
        operands = {"x": (x,), "q": (x, x.copy()), "k": (x.copy(), x)}[part]
        result = hand_over(apply, *operands, *every)
        if not isinstance(result, tuple | list):
            if part == "k":
                raise Unreadable('returns one array, but part="k" is the second of two,', last_call(), "type")
            return result
        return result[part == "k"]

    return candidate


def from_complex(apply: Function, tables: Callable[[NumPyArray], Any], *, part: str = "q") -> Candidate:
    """``apply(q, k, freqs_cis)``, where tables(positions) -> cos + i·sin; ``part`` as for `from_cos_sin`.

    >>> fn = from_complex(lambda x, z: (x.view(complex) * z).view(float), lambda m: np.exp(1j * m)[:, None], part="x")
    >>> fn(np.array([[1.0, 0.0]]), np.array([1])).round(3)
    array([[0.54 , 0.841]])
    """
    return from_cos_sin(apply, lambda positions: (tables(positions),), part=part)


def cached(tables: Any, limit: int | None = None) -> Callable[[NumPyArray], Any]:
    """tables(positions) for `from_cos_sin` and `from_complex`: rows of tables that begin at position 0.

    ``tables`` are arrays (…, length, p), one or a tuple, or a function of the length that returns them, which is never
    called with more than ``limit``.

    >>> cached((np.arange(10)[:, None], -np.arange(10)[:, None]))(np.array([3, 9]))
    (array([[3],
           [9]]), array([[-3],
           [-9]]))
    """
    limit = None if limit is None else checks.integer("limit", limit, 1)
    if callable(tables) and limit is None:
        raise ValueError("a function that makes tables needs a limit: give the greatest length to call it with")

    def rows(positions: NumPyArray) -> Any:
        positions = checks.positions("positions", positions)
        length = _length(positions, limit)
        made = hand_over(tables, length) if callable(tables) else tables
        several = isinstance(made, tuple | list)
        for table in made if several else (made,):
            if np.ndim(table) < 2 or np.shape(table)[-2] < length:
                raise ValueError(f"tables of shape {np.shape(table)} have no row for position {length - 1}")
        picked = tuple(np.asarray(table)[..., positions, :] for table in (made if several else (made,)))
        return picked if several else picked[0]

    return rows


def _check_one_axis(positions: NumPyArray) -> None:
    if positions.ndim > 1:
        raise ValueError(f"positions must be (n,), had shape {positions.shape}: this kind of function has one axis")


def _length(positions: NumPyArray, limit: int | None) -> int:
    """How long a sequence from 0 must be to hold these positions."""
    _check_one_axis(positions)
    if positions.size and int(positions.min()) < 0:
        raise ValueError(f"positions must be at least 0 for this kind of function, the least was {positions.min()}")
    length = int(positions.max(initial=-1)) + 1
    if limit is not None and length > limit:
        raise ValueError(f"positions must be below the limit, {limit}, the greatest was {length - 1}: set max_position")
    return length


def from_sequential(fn: Function, limit: int = 8192) -> Candidate:
    """``fn(x)``, whose rows are positions 0 … n−1: it gets a sequence with zeros at the positions not asked for.
    Attention with RoPE inside, ``fn(q, k, v)``, gets questions whose tokens have these positions, and no others.

    Positions from ``limit`` on are refused. A position that repeats takes another call: so checks try other numbers of
    rows at positions in a row alone.

    >>> fn = from_sequential(lambda x: x * np.arange(x.shape[-2])[:, None])
    >>> fn(np.ones((3, 1)), np.array([5, 2, 5])).ravel()
    array([5., 2., 5.])
    """
    limit, ended = checks.integer("limit", limit, 1), [0]

    def candidate(x: NumPyArray, *rest: NumPyArray, **options: NumPyArray) -> Any:
        *others, positions = rest
        if others:  # attention: from 0 on or, with a cache, from where the last call ended
            begin = int(positions[0, 0]) if positions.size else 0
            if begin not in (0, ended[0]):
                raise ValueError(f"this function counts its positions: they must begin at 0, began at {begin}")
            ended[0] = begin + positions.shape[-1]
            return _counted(fn, (x, *others), positions, (), options)
        length, left = _length(positions, limit), np.arange(positions.size)
        out: NumPyArray | None = None
        while out is None or left.size:
            at, first = np.unique(positions[left], return_index=True)
            rows = left[first]
            sequence = _blank(x, (*x.shape[:-2], length, x.shape[-1]))
            sequence[..., at, :] = x[..., rows, :]
            result = hand_over(counting(fn), sequence)
            _check_shape(result, sequence.shape)
            out = np.empty(x.shape, result.dtype) if out is None else out
            out[..., rows, :] = result[..., at, :]
            if x.flags.writeable:
                x[..., rows, :] = sequence[..., at, :]
            left = np.delete(left, first)
        return out

    return Counted(candidate, fn, 0)


def _counted(
    fn: Function, arrays: Sequence[NumPyArray], positions: NumPyArray, more: Sequence[int], options: Mapping[str, Any]
) -> Any:
    """fn(q, k, v, …), attention that counts its positions by itself."""
    if (positions != positions[:1, :1] + np.arange(positions.shape[-1])).any():
        raise ValueError("this function counts its positions: they must rise one by one, and be the same in all rows")
    return hand_over(functools.partial(fn, **options), *arrays, *more)


def from_offset(fn: Function) -> Candidate:
    """``fn(x, offset)``, whose rows are positions offset, offset + 1, …: one call for each such run, so that checks try
    other numbers of rows at positions in a row alone. Of attention with RoPE inside, ``fn(q, k, v, offset)``, all rows
    of a batch have one offset.

    >>> fn = from_offset(lambda x, offset: x * (offset + np.arange(x.shape[-2]))[:, None])
    >>> fn(np.ones((4, 1)), np.array([7, 8, 3, 4])).ravel()
    array([7., 8., 3., 4.])
    """

    def candidate(x: NumPyArray, *rest: NumPyArray, **options: NumPyArray) -> Any:
        *others, positions = rest
        if others:
            return _counted(fn, (x, *others), positions, positions[:1, :1].ravel().tolist(), options)
        _check_one_axis(positions)
        edges = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), positions.size]
        parts = []
        for start, end in itertools.pairwise(edges):
            view = x[..., start:end, :]
            part = _as_contiguous_as(x, view, view.shape)
            parts.append(hand_over(counting(fn), part, int(positions[start]) if positions.size else 0))
            _check_shape(parts[-1], part.shape)
            _write_back(view, part)
        return np.concatenate(parts, axis=-2)

    return Counted(candidate, fn, 3)


def _as_contiguous_as(x: NumPyArray, view: NumPyArray, shape: Sequence[int]) -> NumPyArray:
    """A view of x in this shape, as contiguous as x: so that a function that ignores strides is right and wrong in the
    same calls as without an adapter. It is a copy where x is contiguous and the view is not, or where it must be, and
    where its features are apart from each other: no model hands them over so, and complex views refuse them."""
    if x.flags.c_contiguous:
        given = np.ascontiguousarray(view).reshape(shape)
        given.flags.writeable = x.flags.writeable
        return given
    given = view.reshape(shape)
    if not np.may_share_memory(given, x) or given.strides[-1:] != (x.itemsize,):
        given, numbers = _blank(x, shape), given
        given[...] = numbers
    return given


def _blank(x: NumPyArray, shape: Sequence[int]) -> NumPyArray:
    """Zeros like x: where it is no contiguous array, they are a part of a wider one."""
    wide = 0 if x.flags.c_contiguous else 8
    return np.zeros((*shape[:-1], shape[-1] + wide), x.dtype)[..., : shape[-1]]


def _check_shape(result: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(result, np.ndarray):
        actual = "nothing" if result is None else type(result).__name__
        raise Unreadable(f"returns {actual} instead of one array", last_call(), "type")
    if result.shape != shape:
        raise Unreadable(f"returns shape {result.shape} instead of {shape}", last_call(), "shape")


def with_axes(fn: Function, axes: str) -> Function:
    """``fn(x, …)`` for x with these axes, in this order, out of b, h, n and d; brackets merge axes.

    "bnhd" and "bhnd" are usual, "n(hd)" is vLLM's; a loop goes over axes that are left out, as in "nd". x (…, n, d) of
    any number of axes is reshaped to (b, h, n, d), and the result back to the shape of x. If x is contiguous, so is
    what fn gets, as from a model; else fn gets a view of x with its strides, or a part of a wider array.

    >>> fn = with_axes(lambda x, positions: x + positions[:, None, None], "nhd")
    >>> fn(np.zeros((2, 3, 1)), np.array([0, 5, 9]))[1].ravel()
    array([0., 5., 9.])
    """
    groups = re.findall(r"\([bhnd]+\)|[bhnd]", axes)
    order = "".join(groups).replace("(", "").replace(")", "")
    if "".join(groups) != axes or len(set(order)) < len(order) or not {"n", "d"} <= set(order):
        raise ValueError(f'axes must be n, d and any of b and h, each once, such as "bnhd" or "n(hd)", was {axes!r}')
    there = [sorted(order, key="bhnd".index).index(letter) for letter in order]

    def once(x: NumPyArray, whole: NumPyArray, rest: tuple[Any, ...]) -> NumPyArray:
        """x, a part of the whole, has the axes that were named, in the order of bhnd."""
        turned = x.transpose(there)
        sizes = dict(zip(order, turned.shape, strict=True))
        shape = [math.prod(sizes.get(a, 1) for a in group) for group in groups]
        given = _as_contiguous_as(whole, turned, shape)
        result = hand_over(fn, given, *rest)
        _check_shape(result, given.shape)
        home = np.argsort(there)
        _write_back(x, given.reshape(turned.shape).transpose(home))
        return np.asarray(result).reshape(turned.shape).transpose(home)

    def candidate(x: NumPyArray, *rest: Any) -> NumPyArray:
        lead = (1, 1, *x.shape[:-2])[-2:] if x.ndim <= 4 else (math.prod(x.shape[:-3]), x.shape[-3])
        four = x.reshape(*lead, *x.shape[-2:])
        loops: Any = [[slice(None)] if axis in order else range(size) for axis, size in zip("bh", lead, strict=True)]
        results = [(place, once(four[place], x, rest)) for place in itertools.product(*loops)]
        out = np.empty(four.shape, results[0][1].dtype if results else x.dtype)
        for place, result in results:
            out[place] = result
        _write_back(x, four.reshape(x.shape))  # a view of x, or a copy
        return out.reshape(x.shape)

    return candidate


# Programs


class CommandFailed(RuntimeError):
    """A program did not start, failed, took too long, or wrote something else than it should."""


def from_command(command: str | Sequence[str], *, timeout: float = 60.0) -> Candidate:
    """A program that reads x and positions and writes y, all as .npy files: ``"./my_rope {x} {positions} {y}"``.

    The words in braces become paths in a private directory that lasts for one call. There is no shell: a string is
    split as a shell would split it, and a list is taken as it is. x is (…, n, d), C order, little-endian; bfloat16 is
    uint16, the bits of each number; positions are int64 (n,), or (axes, n) for a rope with axes. y must have the shape
    and dtype of x.
    After ``timeout`` seconds, or on Ctrl-C, the program and all that it started are killed.
    """
    words = _words(command)
    run = _program(words, ("x", "positions"), {"y": "x"}, timeout, "./my_rope {x} {positions} {y}")
    return lambda x, positions: run({"x": x, "positions": np.asarray(positions, np.int64)})[0]


def from_attention_command(
    command: str | Sequence[str], *, positions: bool = False, backward: bool = False, timeout: float = 60.0
) -> Function:
    """A program that computes attention, as fn(q, k, v): ``"mpiexec -n 4 python mine.py {q} {k} {v} {o}"``.

    Files and time limit are those of `from_command`; o must have the shape and dtype of q. With ``positions``, for
    attention that rotates inside, it is fn(q, k, v, positions), and the command has {positions}, int64 (b, n). If the
    command has {mask}, bool (b, 1, n, m), or {segments}, int64 (b, m), each call gets one: True, or 0, everywhere if
    nothing else is asked for. With ``backward`` the program computes gradients, as fn(q, k, v, g) -> (dq, dk, dv): the
    command has {g}, of the shape of q, and for {o} it has {dq}, {dk} and {dv}, of the shapes and dtype of q, k and v.
    """
    words, results = _words(command), {"dq": "q", "dk": "k", "dv": "v"} if backward else {"o": "q"}
    arrays = ("q", "k", "v", *["g"] * backward, *["positions"] * positions)
    options = [name for name in ("mask", "segments") if _placed(name, words)]
    names = (*arrays, *options)
    example = " ".join(["./my_attention", *(f"{{{name}}}" for name in (*arrays, *results))])
    run = _program(words, names, results, timeout, example)
    if not positions and _placed("positions", words):
        raise ValueError(
            "the command must not have {positions}, which only attention with RoPE inside gets: give its rope"
        )

    def candidate(*arrays: NumPyArray, **given: NumPyArray) -> Any:
        (b, _, n, _), m = arrays[0].shape, arrays[1].shape[-2]
        plain = {"mask": np.ones((b, 1, n, m), bool), "segments": np.zeros((b, m), np.int64)}
        every = plain | dict(zip(names, arrays, strict=False)) | given
        made = run({name: every[name] for name in names})
        return made if backward else made[0]

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD  # from the signature a check reads what it may hand over
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    candidate.__signature__ = signature  # type: ignore[attr-defined]
    return candidate


def _words(command: str | Sequence[str]) -> list[str]:
    return shlex.split(command) if isinstance(command, str) else [os.fspath(word) for word in command]


def _placed(name: str, words: Sequence[str]) -> bool:
    return any(f"{{{name}}}" in word for word in words)


def _program(
    words: Sequence[str], names: Sequence[str], results: Mapping[str, str], timeout: float, example: str
) -> Callable[[Mapping[str, NumPyArray]], tuple[NumPyArray, ...]]:
    """A program as a function of arrays by name; each result must have the shape and dtype of the array that is named
    beside it."""
    timeout = checks.real("timeout", timeout, 0, open=True)
    for name in (*names, *results):
        if not _placed(name, words):
            raise ValueError(f'the command must say where {{{name}}} goes, as in "{example}"')
    if shutil.which(words[0]) is None:
        launcher = ': pip install ".[mpi]" in a clone of pyrope' if words[0] in ("mpiexec", "mpirun") else ""
        raise ValueError(f"there is no program {words[0]!r} that can be run{launcher}")
    placeholder = re.compile(rf"\{{({'|'.join((*names, *results))})\}}")

    hung: list[CommandFailed] = []  # a program that took too long once would take as long again in every other call

    def run(given: Mapping[str, NumPyArray]) -> tuple[NumPyArray, ...]:
        if hung:
            raise hung[0]
        with tempfile.TemporaryDirectory(prefix="pyrope-", ignore_cleanup_errors=True) as directory:
            paths = {name: Path(directory, f"{name}.npy") for name in (*names, *results)}
            for name, array in given.items():
                save_npy(paths[name], array)
            log = Path(directory, "log")
            try:
                _run([placeholder.sub(lambda match: str(paths[match[1]]), word) for word in words], timeout, log)
            except CommandFailed as error:
                hung.extend([error] * isinstance(error.__cause__, subprocess.TimeoutExpired))
                raise
            try:
                return tuple(
                    load_npy(paths[name], f"what the program wrote as {{{name}}}", given[like].shape, given[like].dtype)
                    for name, like in results.items()
                )
            except ValueError as error:
                raise CommandFailed(f"{error}{_tail(log)}") from error

    return run


def _run(words: list[str], timeout: float, log: Path) -> None:
    """Runs a program to its end; its output goes to a file, and errors quote the last lines of that."""
    with open(log, "wb") as output:
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        except (OSError, ValueError) as error:
            raise CommandFailed(f"{words[0]} cannot be started: {error}") from error
    try:
        status = process.wait(timeout)
    except BaseException as error:  # Ctrl-C too: the program has a session of its own, so the signal did not reach it
        kill(process)
        if isinstance(error, subprocess.TimeoutExpired):
            raise CommandFailed(f"{words[0]} took longer than {timeout:g} s and was killed{_tail(log)}") from error
        raise
    if status:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        raise CommandFailed(f"{words[0]} {how}{_tail(log)}")


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the program and all that it started in its process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (AttributeError, OSError):  # Windows has no groups, and macOS refuses those that have ended
        process.kill()
    process.wait()


def _tail(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        text = file.read(_TAIL).decode(errors="replace").strip()
    return f"; it printed:\n{text}" if text else "; it printed nothing"


# Names on the command line


class ImportFailed(ValueError):
    """The module of a target exists, but raised while it was imported."""


def load_target(target: str) -> Function:
    """The function that "module:function" or "file.py:function" names; "module:object.method" works too.

    >>> load_target("math:hypot")(3, 4)
    5.0

    Imports work from the working directory and, for a file, from its own directory.
    """
    place, colon, name = checks.instance("target", target, str).rpartition(":")
    if not (colon and place and all(part.isidentifier() for part in name.split("."))):
        raise ValueError(f'target must be "module:function" or "file.py:function", was {target!r}')
    is_file = place.endswith(".py") or os.sep in place
    for directory in (os.path.dirname(os.path.abspath(place)) if is_file else os.getcwd(), os.getcwd()):
        if directory not in sys.path:
            sys.path.insert(0, directory)
    value: Any = _import_file(place) if is_file else _import(place, lambda: importlib.import_module(place))
    for part in name.split("."):
        if not hasattr(value, part):
            close = difflib.get_close_matches(part, dir(value), 1)
            raise ValueError(f"{place} has no {name!r}" + (f": did you mean {close[0]!r}?" if close else ""))
        value = getattr(value, part)
    if not callable(value):
        raise ValueError(f"{target} must be a function, was {type(value).__name__}")
    return value  # type: ignore[no-any-return]


def _import_file(place: str) -> Any:
    if not os.path.isfile(place):
        raise ValueError(f"there is no file {place}")
    name = f"pyrope_target_{re.sub(r'[^0-9a-zA-Z]', '_', os.path.abspath(place))}"
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise ValueError(f"{place} must be a Python file, its name ending in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # because dataclasses look there for their module
    loader = spec.loader
    _import(place, lambda: loader.exec_module(module))
    return module


def _import(place: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            raise ValueError(f"there is no module {place}, here or installed ({error})") from error
        raise ImportFailed(f"{place} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        raise ImportFailed(f"{place} cannot be imported: {type(error).__name__}: {error}") from error
