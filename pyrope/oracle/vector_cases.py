"""The cases of the portable test vectors and their true results; `vectors` writes and reads them.

Inputs are exact multiples of a power of two, made by splitmix64, so that each dtype holds them exactly; the truth is
float64. That of rotations is the same bits on every platform: tables from `cos_sin`, which is integer arithmetic and
polynomials, and separate multiplications and additions of real numbers, since a complex product may be fused or not.
Attention goes by way of exp and matrix products, whose last bits differ.

The bounds of rotations are those of `tolerance`, by grade. Attention, with u the unit roundoff of the dtype and v that
of what sums are kept in, float32 at least: a rotated vector is off by 3√2·u of its length, so scores by
δ = (11u + d·v)·‖q‖‖k‖·scale; weights then by e^{2δ} − 1 + 4u + m·v of their size, outputs by that, 2u + m·v of Σ w|v|,
and u·|out|. Linear attention: features have 3u, rotated ones 3√2·u more, products and sums 2u + (d + m)·v: in all
20u + (d + m)·v of Σ ‖φ(q)‖‖φ(k)‖|v| / denominator, and 8u + (d + m)·v of |out| for the denominator itself.

With float32 angles, a grade of its own, q and k at positions m and n have the same θ, off by t of its size, and each
product with a position is rounded: the angle between pair i of both is off by ε_i = θ_i·(|m − n|·t + (|m| + |n|)·2⁻²⁴),
and 12·2⁻²⁴ for tables and products in float32. Scores are then off by δ = scale·Σ |q_i||k_i|·ε_i, and outputs by
Σ w(e^δ − 1)|v − out|·e^max δ; the numerator of linear attention by Σ δ|v| without scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .. import checks
from ..linear import FEATURE_MAPS
from ..phase import cos_sin
from ..theta import Axes, DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN, frequencies
from . import attention_steps, tolerance
from .attention_steps import Parts
from .tensors import BITS, UNIT, NumPyArray

SUITES = ("rotation", "attention", "linear")
POSITIONS = (
    0, 1, 2, 3, 7, 8, 100, 255, 256, 257, 2047, 2048, 2049, 4095, 4096, 8192, 65535, 65536, 131071, 2**20 + 1,
    2**24 + 1, 2**31 - 1, 2**31,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Case:
    """One test: inputs, as exact float64 values or int64 positions, and what is to be computed from them."""

    name: str
    kind: str  # one of SUITES
    dtype: str  # of the inputs and of the output that is asked for
    rope: Rope | None
    options: Mapping[str, Any]
    inputs: Mapping[str, NumPyArray]


class Truth(NamedTuple):
    """What a case should give, and how far a right implementation may be from it."""

    out: NumPyArray  # float64
    bounds: dict[str, NumPyArray]  # by grade, the best first: how far each number may be off
    size: NumPyArray  # what errors are measured in ulps of
    error: float  # how far out itself may be from the exact result, at most

    @property
    def loosest(self) -> NumPyArray:
        """The bound of the worst grade."""
        return list(self.bounds.values())[-1]


# Cases


def _numbers(seed: int, shape: tuple[int, ...], dtype: str) -> NumPyArray:
    """Signed fractions of as many bits as the dtype has, from splitmix64 (Steele et al., 2014)."""
    z = np.arange(1, math.prod(shape) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed << 32)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    z ^= z >> np.uint64(31)
    bits = BITS[dtype]
    return np.asarray((z.view(np.int64) >> (64 - bits)) * 2.0 ** (1 - bits)).reshape(shape)


def _rotation_cases() -> Iterator[tuple[str, str, Rope]]:
    for layout in ("interleaved", "half", "interleaved-to-half"):
        for dtype in BITS:
            yield f"{layout}-{dtype}", dtype, Rope(32, 10000.0, layout)
    short, long = (tuple(1 + (i * k) / 8 for i in range(16)) for k in (1, 5))
    yarn = YaRN(factor=4.0, original_length=4096)
    scalings: dict[str, Any] = {
        "linear": Linear(4.0),
        "dynamic": DynamicNTK(2.0, 4096, length=8192),
        "yarn": yarn,
        "yarn-mscale": replace(yarn, mscale=1.0, mscale_all_dim=0.5),
        "yarn-untruncated": replace(yarn, truncate=False),
        "longrope-short": LongRoPE(short, long, 8.0, 4096, length=4096),
        "longrope-long": LongRoPE(short, long, 8.0, 4096, length=4097),
        "llama3": Llama3(8.0, 1.0, 4.0, 8192),
        "proportional": Proportional(0.5),
    }
    for name, scaling in scalings.items():
        yield f"{name}-float32", "float32", Rope(32, 500000.0, "half", scaling=scaling)
    for dtype in ("float64", "float16", "bfloat16"):
        yield f"yarn-{dtype}", dtype, Rope(32, 500000.0, "interleaved", scaling=yarn)
    for layout in ("interleaved", "half"):
        yield f"prefix-{layout}-float32", "float32", Rope(32, 10000.0, layout, rotary_dim=16)
        yield f"suffix-{layout}-float32", "float32", Rope(32, 10000.0, layout, rotary_dim=12, placement="suffix")
    yield "backwards-float32", "float32", Rope(32, 10000.0, "half", direction=-1)
    for head_dim, base in ((2, 10000.0), (64, 500000.0), (128, 1000000.0)):
        yield f"head-{head_dim}-float32", "float32", Rope(head_dim, base, "half")
    for style, sections in (("sections", (4, 6, 6)), ("interleaved", (6, 5, 5)), ("axial", ()), ("pixtral", ())):
        yield f"axes-{style}-float32", "float32", Rope(32, 10000.0, "half", axes=Axes(style, sections))


def _attention_cases() -> Iterator[tuple[str, str, Rope | None, dict[str, Any], tuple[int, ...]]]:
    """Name, dtype, rope, options, and (h, g, n, m, d, first position)."""
    rope, causal, plain = Rope(16, 10000.0, "half"), {"causal": True}, (4, 4, 24, 24, 16, 0)
    for dtype in BITS:
        yield f"causal-{dtype}", dtype, rope, causal, plain
    yield "unrotated", "float32", None, causal, plain
    yield "two-sided", "float32", rope, {}, plain
    yield "window", "float32", rope, {"causal": True, "window": 5}, plain
    yield "two-sided-window", "float32", rope, {"window": 5}, plain
    yield "grouped", "float32", rope, causal, (6, 2, 24, 24, 16, 0)
    yield "softcap", "float32", rope, {"causal": True, "softcap": 0.5}, plain
    yield "scale", "float32", rope, {"causal": True, "scale": 1.0}, plain
    yield "continued", "float32", rope, causal, (4, 2, 3, 24, 16, 0)
    yield "continued-window", "float32", rope, {"causal": True, "window": 5}, (4, 2, 3, 24, 16, 0)
    yield "far", "float32", Rope(16, 500000.0, "interleaved"), causal, (4, 2, 24, 24, 16, 2**20)


def _linear_cases() -> Iterator[tuple[str, str, Rope | None, dict[str, Any], tuple[int, ...]]]:
    rope, plain = Rope(16, 10000.0, "half"), (4, 4, 24, 24, 16, 0)
    for equation in (18, 19):
        turning = rope if equation == 19 else None
        for dtype in BITS:
            yield f"{equation}-causal-{dtype}", dtype, turning, {"causal": True, "feature_map": "elu+1"}, plain
        yield f"{equation}-two-sided", "float32", turning, {"causal": False, "feature_map": "elu+1"}, plain
        yield f"{equation}-exp", "float32", turning, {"causal": True, "feature_map": "exp"}, plain
        yield f"{equation}-grouped", "float32", turning, {"causal": True, "feature_map": "elu+1"}, (6, 2, 24, 24, 16, 0)


def cases(suite: str = "all") -> list[Case]:
    """The cases of a suite: "rotation", "attention", "linear", or "all" of them."""
    checks.choice("suite", suite, (*SUITES, "all"))
    made, at = list[Case](), np.array(POSITIONS, np.int64)
    for name, dtype, rope in _rotation_cases():
        count = 1 if rope.axes is None else rope.axes.count
        positions = np.stack([np.roll(at, 5 * axis) for axis in range(count)])  # each axis goes its own way
        x = _numbers(len(made), (2, at.size, rope.head_dim), dtype)
        inputs = {"x": x, "positions": positions if rope.axes else at}
        made.append(Case(f"rotation-{name}", "rotation", dtype, rope, {}, inputs))
    for kind, listed in (("attention", _attention_cases()), ("linear", _linear_cases())):
        for name, dtype, own, options, (h, g, n, m, d, first) in listed:
            shapes = {"q": (h, n, d), "k": (g, m, d), "v": (g, m, d)}
            inputs = {key: _numbers(8 * len(made) + i, shape, dtype) for i, (key, shape) in enumerate(shapes.items())}
            keys = np.arange(first, first + m, dtype=np.int64)  # by default int32 on 32-bit platforms
            inputs |= {"k_positions": keys, "q_positions": keys[m - n :]}
            made.append(Case(f"{kind}-{name}", kind, dtype, own, options, inputs))
    return [case for case in made if suite in (case.kind, "all")]


# Truth


class _Kind(NamedTuple):
    """What `tolerance` asks of a dtype; NumPy alone has no bfloat16."""

    name: str
    itemsize: int


def _features(rope: Rope) -> tuple[list[NumPyArray], list[NumPyArray]]:
    """Which features the pairs are read from, the first and the second ones, and which they are written to."""
    start, i = 0 if rope.placement == "prefix" else rope.head_dim - rope.width, np.arange(rope.pairs)
    neighbours, halves = [start + 2 * i, start + 2 * i + 1], [start + i, start + i + rope.pairs]
    reads = halves if rope.layout == "half" else neighbours
    return reads, neighbours if rope.layout == "interleaved" else halves


def turn(x: NumPyArray, positions: NumPyArray, rope: Rope | None) -> NumPyArray:
    """R·x, float64, Eq. (34); not by `rotate`, whose complex product is fused or not by the array's length."""
    out = x.copy()
    if rope is not None:
        cos, sin = cos_sin(rope, positions)
        (a, b), (first, second) = _features(rope)
        out[..., first] = np.subtract(np.multiply(x[..., a], cos), np.multiply(x[..., b], sin))
        out[..., second] = np.add(np.multiply(x[..., a], sin), np.multiply(x[..., b], cos))
    return out


def _rotation(case: Case) -> Truth:
    x, positions, rope = case.inputs["x"], case.inputs["positions"], case.rope
    if rope is None:  # as a wrong guess
        return Truth(x, {"": np.zeros(x.shape)}, np.abs(x), 0.0)
    out, kind = turn(x, positions, rope), _Kind(case.dtype, {"float64": 8, "float32": 4}.get(case.dtype, 2))
    measures, rotary = tolerance.pair_errors(x, positions, rope), np.sort(np.concatenate(_features(rope)[1]))
    bounds, size = {}, np.abs(x)
    size[..., rotary] = measures.length
    far = np.abs(np.atleast_2d(positions)).max(axis=0)[:, None] > 2**24  # these positions float32 does not hold
    measures = measures._replace(relative=measures.relative + tolerance.U32 * far)
    for grade in tolerance.grades(kind):  # type: ignore[arg-type]
        bounds[grade] = np.zeros(x.shape)  # what does not turn is not touched
        allowed = tolerance.bound(grade, measures, out[..., rotary], kind, rope.attention_factor)  # type: ignore[arg-type]
        bounds[grade][..., rotary] = np.minimum(allowed, 2.1 * measures.length)  # half a turn: more cannot be
    ulps = 2.5 if rope.attention_factor != 1 else 1.0  # of a table entry, 2u each; product and sum have u
    return Truth(out, bounds, size, float((2 * ulps + 2) * 2.0**-53 * measures.sums.max()))


def _units(dtype: str) -> tuple[float, float]:
    """Unit roundoff of the dtype and of its sums."""
    unit = UNIT[dtype]
    return unit, min(unit, 2.0**-24)


def _norms(q: NumPyArray, k: NumPyArray) -> NumPyArray:
    return np.sqrt(np.square(q).sum(-1)[..., :, None] * np.square(k).sum(-1)[..., None, :])  # type: ignore[no-any-return]


def _angle_errors(case: Case, parts: Parts) -> NumPyArray:
    """By how much float32 angles change the products of rotated vectors, (..., n, m)."""
    rope, q_at, k_at = case.rope, case.inputs["q_positions"], case.inputs["k_positions"]
    if rope is None:
        return np.zeros(parts.weights.shape)
    first, second = _features(rope)[1]
    lengths = [np.hypot(x[..., first], x[..., second]) for x in (parts.q, parts.k)]
    theta, relative = frequencies(rope), tolerance.angle_bound(rope)
    far = np.abs(q_at)[:, None, None] + np.abs(k_at)[:, None]
    away = np.abs(q_at[:, None, None] - k_at[:, None])
    error = theta * (away * relative + far * tolerance.U32 * (relative > 0)) + 12 * tolerance.U32
    return np.asarray(np.einsum("...ni,...mi,nmi->...nm", *lengths, error))


def _heads(case: Case) -> tuple[NumPyArray, NumPyArray]:
    """Keys and values of each query head: head i reads key head i·g//h."""
    h, g = len(case.inputs["q"]), len(case.inputs["k"])
    head = np.arange(h) * g // h
    return case.inputs["k"][head], case.inputs["v"][head]


def _attention(case: Case) -> Truth:
    q_at, k_at, options = case.inputs["q_positions"], case.inputs["k_positions"], case.options
    k, v = _heads(case)
    q, k = turn(case.inputs["q"], q_at, case.rope), turn(k, k_at, case.rope)
    cap, away, window = options.get("softcap"), q_at[:, None] - k_at, options.get("window") or k_at.size + 1
    scores = np.matmul(q, k.swapaxes(-1, -2)) * _scale(case)
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    seen = (away < window) & (away >= 0 if options.get("causal") else away > -window)
    weights = np.where(seen, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0.0)
    weights /= weights.sum(axis=-1, keepdims=True)
    return attention_bounds(case, Parts(q, k, v, scores, weights, weights @ v))


def _scale(case: Case) -> float:
    return float(case.options.get("scale") or case.inputs["q"].shape[-1] ** -0.5)


def as_steps(case: Case) -> attention_steps.Case:
    """A case of attention, as `attention_steps` has it."""
    (h, _, d), g, options = case.inputs["q"].shape, len(case.inputs["k"]), case.options
    return attention_steps.Case(
        h, g, d, bool(options.get("causal")), _scale(case), options.get("window"), options.get("softcap"), case.rope,
        options.get("feature_map", "elu+1"),
    )  # fmt: skip


def attention_bounds(case: Case, parts: Parts) -> Truth:
    """The result of these steps, right or wrong, and how far off it may be."""
    (m, d), scale = parts.k.shape[-2:], _scale(case)
    weights, v = np.abs(np.nan_to_num(parts.weights)), parts.v
    out, size = np.nan_to_num(parts.weights @ v), weights @ np.abs(v)
    norms = _norms(parts.q, parts.k).max(axis=-1, keepdims=True) * scale

    def bound(u: float, unit: float) -> NumPyArray:
        off = np.expm1(2 * (11 * u + d * unit) * norms) + 6 * u + 2 * m * unit
        return np.asarray(size * off + u * np.abs(out) + u * 2.0**-14 * m)  # the last: float16 weights may vanish

    bounds = {"": bound(*_units(case.dtype))}
    if case.rope is not None:
        delta = np.where(weights > 0, scale * _angle_errors(case, parts), 0)
        spread = np.exp(delta.max(axis=-1, keepdims=True))
        away = np.abs(v[..., None, :, :] - out[..., None, :])
        moved = np.einsum("...nm,...nme->...ne", weights * np.expm1(delta), away)
        bounds[tolerance.ANGLE32] = bounds[""] * spread**2 + moved * spread
    return Truth(parts.out, bounds, size, float(bound(2.0**-53, 2.0**-53).max()))


def _linear(case: Case) -> Truth:
    at, rope = case.inputs["q_positions"], None if case.rope is None else case.rope.pure
    k, v = _heads(case)
    q, k = (FEATURE_MAPS[case.options["feature_map"]](np, x) for x in (case.inputs["q"], k))
    turned_q, turned_k = turn(q, at, rope), turn(k, at, rope)
    lower = np.tri(at.size) if case.options["causal"] else 1.0
    total = (q @ k.swapaxes(-1, -2) * lower).sum(axis=-1, keepdims=True)
    weights = turned_q @ turned_k.swapaxes(-1, -2) * lower / total
    parts = Parts(turned_q, turned_k, v, _norms(q, k) * lower / total, weights, weights @ v)  # Eq. (19), or (18)
    return linear_bounds(case, parts)


def linear_bounds(case: Case, parts: Parts) -> Truth:
    """The result of these steps, right or wrong, and how far off it may be."""
    sizes, v = np.abs(np.nan_to_num(parts.scores)), np.abs(parts.v)
    size, out = sizes @ v, np.nan_to_num(parts.weights @ parts.v)
    # Features with signs, by mistake: their products cancel, and |φ(q)||φ(k)| is far above the denominator.
    cancelled = np.maximum(sizes.sum(axis=-1, keepdims=True) / 4, 1)

    def bound(u: float, unit: float) -> NumPyArray:
        sums = sum(parts.k.shape[-2:]) * unit
        return np.asarray(size * (20 * u + sums) + np.abs(out) * (8 * u + sums) * cancelled)

    bounds = {"": bound(*_units(case.dtype))}
    if case.rope is not None:
        relative = _angle_errors(case, parts) / np.maximum(_norms(parts.q, parts.k), 1e-300)
        bounds[tolerance.ANGLE32] = bounds[""] + (sizes * relative) @ v
    return Truth(parts.out, bounds, size, float(bound(2.0**-53, 2.0**-53).max()))


BOUNDS: dict[str, Callable[[Case, Parts], Truth]] = {"attention": attention_bounds, "linear": linear_bounds}
TRUTH: dict[str, Callable[[Case], Truth]] = {"rotation": _rotation, "attention": _attention, "linear": _linear}
