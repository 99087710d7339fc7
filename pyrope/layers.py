"""The parts of a transformer that do not depend on positions: projections, norms, activations, MLPs.

float32 and float64 arrays, computed in their own dtype; features last. Weights are (out, in), as checkpoints have them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import numpy as np

from .backend import Array, fused, namespace
from .tiles import cuts, each

_ROWS = 256  # tokens that a core takes at a time, or somewhat fewer: products of half as many are a tenth slower
NORMS = "rms", "layer"


class Projection(NamedTuple):
    """x -> x·Wᵀ + b."""

    weight: Array  # (out, in)
    bias: Array | None  # (out,)


class Norm(NamedTuple):
    """The factors of a norm, and what it adds."""

    weight: Array  # (e,)
    bias: Array | None  # (e,)


def by_rows(work: Callable[..., object], out: Array, *given: Array, cut: bool = True) -> Array:
    """Calls ``work(out, *given)``, which treats every row by itself, and returns out; on the host some rows at a time,
    on every core, so that what is between the products stays in the caches."""
    if cut and len(out) > _ROWS and namespace(out) is np:
        step = math.ceil(len(out) / math.ceil(len(out) / _ROWS))  # all parts alike
        each(lambda some: work(out[some], *[x[some] for x in given]), cuts(len(out), step), products=True)
    else:
        work(out, *given)
    return out


def project(x: Array, layer: Projection, out: Array | None = None) -> Array:
    """x·Wᵀ + b: (…, in) -> (…, out), a new array or, of rows (n, in), ``out``."""
    rows = x.reshape(-1, x.shape[-1])  # as one matrix: a stack of small products is slower than one large one
    y = namespace(x).matmul(rows, layer.weight.T, out=out)
    if layer.bias is not None:
        y += layer.bias
    return y.reshape(*x.shape[:-1], y.shape[-1])


def normalize(x: Array, norm: Norm, eps: float, centred: bool) -> Array:
    """x/√(mean x² + ε), times weights, plus bias; if centred, of what differs from the mean: x (…, e) -> the same.

    >>> normalize(np.array([3.0, 4.0]), Norm(np.ones(2), None), 0.0, centred=False).round(4)
    array([0.8485, 1.1314])
    >>> normalize(np.array([1.0, 3.0]), Norm(np.ones(2), None), 0.0, centred=True)
    array([-1.,  1.])
    """
    xp = namespace(x)
    if centred:
        x = x - x.mean(axis=-1, keepdims=True)
    squares = np.vecdot(x, x) if xp is np else _squares(xp, x)  # in one pass, both
    y = _scaled(xp, x, squares[..., None], 1 / x.shape[-1], eps, norm.weight)
    if norm.bias is not None:
        y += norm.bias
    return y


@fused
def _squares(xp: ModuleType, x: Array) -> Array:
    return xp.sum(x * x, axis=-1)


@fused
def _scaled(xp: ModuleType, x: Array, squares: Array, part: float, eps: float, weight: Array) -> Array:
    y = x / xp.sqrt(squares * part + eps)  # Python numbers keep float32
    y *= weight
    return y


# erfc(z)·exp(z²)/2 for z ≥ 0 as a Chebyshev series in 6/(3 + z) − 1; NumPy has no erf. The first 12 terms are within
# 3e-9, enough for float32; all of them within 5e-18.
_ERFC = (
    0.16493138737651838, 0.22683076026890103, 0.08019917041078148, 0.022454060575561412, 0.004820714325347849,
    0.0007212540388721977, 5.049718367689958e-05, -6.04251226722765e-06, -1.8127103013768778e-06,
    -3.5934053712382075e-08, 4.457117929949109e-08, 3.710783312479803e-09, -1.194668285132939e-09,
    -1.5311177677449626e-10, 3.894472694075544e-11, 5.486872914622792e-12, -1.5457603655958867e-12,
    -1.762716940861711e-13, 6.995226089885808e-14, 4.123018738419404e-15, -3.3199807134946607e-15,
    3.9891744123763055e-17, 1.5236206188020493e-16, -1.5160658555112836e-17, -6.091006106498576e-18,
)  # fmt: skip


@lru_cache(maxsize=2)
def _erfc_polynomial(terms: int) -> tuple[float, ...]:
    from numpy.polynomial.chebyshev import cheb2poly  # imported here, since most models do not need it

    return tuple(cheb2poly(_ERFC[:terms]).tolist()[::-1])


def gelu(xp: ModuleType, x: Array) -> None:
    """x·Φ(x), with Φ the normal distribution, in place."""
    z = xp.abs(x) * math.sqrt(0.5)
    xp.minimum(z, 30.0, out=z)  # z² would overflow; e⁻⁹⁰⁰ is 0
    y = 6 / (z + 3) - 1
    first, second, *others = _erfc_polynomial(len(_ERFC) if x.dtype == np.float64 else 12)
    tail = y * first
    tail += second
    for coefficient in others:
        tail *= y
        tail += coefficient
    tail *= xp.exp(xp.multiply(z, -z, out=z), out=z)  # Φ(−|x|)
    x *= xp.where(x > 0, 1 - tail, tail)


def gelu_tanh(xp: ModuleType, x: Array) -> None:
    """x·(1 + tanh(√(2/π)(x + 0.044715x³)))/2, in place."""
    near = xp.clip(x, -10.0, 10.0)  # x³ would overflow; the tanh of what is beyond is ±1
    inner = near * near
    inner *= 0.044715 * math.sqrt(2 / math.pi)
    inner += math.sqrt(2 / math.pi)
    inner *= near
    xp.tanh(inner, out=inner)
    inner += 1
    inner *= 0.5
    x *= inner


def silu(xp: ModuleType, x: Array) -> None:
    """x/(1 + e⁻ˣ), in place."""
    # e⁻ˣ overflows float32 below −88. What is below counts as −88 (both times: x/e⁸⁸ would grow again), off by 6e-37.
    xp.maximum(x, -88.0, out=x)
    e = xp.negative(x)
    xp.exp(e, out=e)
    e += 1
    x /= e


def relu(xp: ModuleType, x: Array) -> None:
    """max(x, 0), in place."""
    xp.maximum(x, 0, out=x)


def _gated(activation: Callable[..., None]) -> Callable[..., None]:
    """act(x), or with up act(x)·up, in place."""

    def gated(xp: ModuleType, x: Array, *up: Array) -> None:
        activation(xp, x)
        for one in up:
            x *= one

    return fused(gated)


ACTIVATIONS = {function.__name__: _gated(function) for function in (gelu, gelu_tanh, silu, relu)}


def mlp(x: Array, up: Projection, down: Projection, activation: str, gated: bool) -> Array:
    """down(act(up(x))), or gated down(act(gate(x))·up(x)) with the gate in the first half of up: x (…, e) -> the same.

    >>> one = Projection(np.eye(2), None)
    >>> mlp(np.array([[-1.0, 2.0]]), one, one, "relu", gated=False)
    array([[0., 2.]])
    """
    inner, f = project(x, up), down.weight.shape[1]
    hidden = inner[..., :f]
    ACTIVATIONS[activation](namespace(x), hidden, *([inner[..., f:]] if gated else []))
    return project(hidden, down)
