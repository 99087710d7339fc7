"""The cases of the portable test vectors and their true results; `vectors` writes and reads them.

Inputs are exact multiples of a power of two, made by splitmix64, so that each dtype holds them exactly; the truth is
float64. That of rotations is the same bits on every platform: tables from `cos_sin`, which is integer arithmetic and
polynomials, and separate multiplications and additions of real numbers, since a complex product may be fused or not.
Attention goes by way of exp and matrix products, whose last bits differ.

Bounds, of rotations and of attention, are those of `tolerance`, by grade.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .. import checks
from ..tensors import NumPyArray
from ..theta import LENGTH_DEPENDENT, Axes, DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN, check_rope
from . import tolerance, truth
from .attention_checks import SOFTMAX
from .attention_evidence import Exam
from .backward_checks import LINEAR_GRADIENTS, SOFTMAX_GRADIENTS, Asked, Gradients
from .floats import BITS
from .gradients import Roundings
from .linear_checks import LINEAR_KIND
from .questions import Question
from .tolerance import ANGLE32, OWN, Allowed

KINDS = ("rotation", "attention", "linear", "rotation-backward", "attention-gradient", "linear-gradient")
SUITES: dict[str, tuple[str, ...]] = {
    **{kind: (kind,) for kind in KINDS[:3]},
    "gradients": KINDS[3:],
    "all": KINDS[:3],
}
POSITIONS = (
    0, 1, 2, 3, 7, 8, 100, 255, 256, 257, 2047, 2048, 2049, 4095, 4096, 8192, 65535, 65536, 131071, 2**20 + 1,
    2**24 + 1, 2**31 - 1, 2**31,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Case:
    """One test: inputs, as exact float64 values or int64 positions, and what is to be computed from them."""

    name: str
    kind: str  # one of KINDS
    dtype: str  # of the inputs and of the output that is asked for
    rope: Rope | None
    options: Mapping[str, Any]
    inputs: Mapping[str, NumPyArray]

    @property
    def rotates(self) -> bool:
        """Whether it is a rotation, or its backward pass."""
        return self.kind.startswith("rotation")

    @property
    def turn(self) -> Rope | None:
        """The rope of the rotation: that of the backward pass is the transpose."""
        return self.rope if self.rope is None or self.kind == "rotation" else self.rope.transposed

    @property
    def x(self) -> NumPyArray:
        """What is rotated: vectors, or gradients."""
        return self.inputs["x" if self.kind == "rotation" else "g"]


class Truth(NamedTuple):
    """What a case should give, and how far a right implementation may be from it."""

    out: NumPyArray  # float64
    bounds: dict[str, Allowed]  # by grade, the best first
    size: NumPyArray  # what errors are measured in ulps of
    error: float  # how far out itself may be from the exact result, at most

    @property
    def loosest(self) -> NumPyArray:
        """How far each number may be off in the worst grade."""
        return np.asarray(list(self.bounds.values())[-1].worst)


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


PROMPT = 64  # tokens of a prompt, so that its last position is 63: no table of one's own may be shorter


@dataclass(frozen=True)
class Own:
    """Shapes and positions of cases for one's own rope."""

    rope: Rope
    heads: int = 4
    key_heads: int | None = None  # as many as heads
    max_position: int | None = None  # the largest that is used: all of POSITIONS, or what the rope's length allows

    def __post_init__(self) -> None:
        check_rope(self.rope)
        heads = checks.size("heads", self.heads)
        key_heads = heads if self.key_heads is None else checks.size("key_heads", self.key_heads)
        if heads % key_heads:
            raise ValueError(f"key_heads must divide heads, {heads}, was {key_heads}")
        if self.max_position is not None:
            checks.integer("max_position", self.max_position, PROMPT - 1, checks.MAX_POSITION)

    @property
    def last(self) -> int:
        """The largest position."""
        scaling, last = self.rope.scaling, self.max_position or POSITIONS[-1]
        return min(last, max(int(scaling.length or 1) - 1, 0)) if isinstance(scaling, LENGTH_DEPENDENT) else last

    def rotations(self) -> Iterator[tuple[str, str, Rope, tuple[int, ...], int]]:
        scattered = (*(m for m in POSITIONS if m < self.last), self.last)
        for dtype in BITS:
            yield f"scattered-{dtype}", dtype, self.rope, scattered, self.heads
            yield f"prompt-{dtype}", dtype, self.rope, tuple(range(min(PROMPT, self.last + 1))), self.heads
            yield f"decode-{dtype}", dtype, self.rope, (self.last,), self.heads

    def attention(self, **options: Any) -> Iterator[tuple[str, str, Rope | None, dict[str, Any], tuple[int, ...]]]:
        m = min(24, self.last + 1)
        shape = (self.heads, self.key_heads or self.heads)
        for dtype in BITS:
            more = {"causal": True, **options}
            yield f"causal-{dtype}", dtype, self.rope, more, (*shape, m, m, self.rope.head_dim, 0)
            first = min(1000, self.last + 1 - m)
            yield f"continued-{dtype}", dtype, self.rope, more, (*shape, min(3, m), m, self.rope.head_dim, first)


def cases(suite: str = "all", own: Own | None = None, dtype: str | None = None) -> list[Case]:
    """The cases of a suite, one of SUITES: the standard ones, or those for one's own rope; of one dtype, or of all."""
    kinds = SUITES[checks.choice("suite", suite, tuple(SUITES))]
    if dtype is not None:
        checks.choice("dtype", dtype, tuple(BITS))
    if own is not None and not isinstance(own, Own):
        raise TypeError(f"own must be None or Own(rope), with a rope of your own, was {type(own).__name__}")
    if own is not None and own.rope.axes is not None:  # in attention positions are (b, n)
        kinds = tuple(kind for kind in kinds if kind.startswith("rotation"))
        if not kinds:
            raise ValueError("a rope with several axes has vectors for rotations alone: give --suite rotation")
    made = list[Case]()
    for kind in KINDS:
        made += (_rotations if kind.startswith("rotation") else _attentions)(kind, len(made), own)
    return [case for case in made if case.kind in kinds and dtype in (None, case.dtype)]


def _rotations(kind: str, seed: int, own: Own | None) -> list[Case]:
    """Each case has numbers of its own, of the next seed."""
    made, name_of_x = list[Case](), "x" if kind == "rotation" else "g"
    standard = ((*case, POSITIONS, 2) for case in _rotation_cases())
    for name, dtype, rope, listed, heads in standard if own is None else own.rotations():
        at, count = np.array(listed, np.int64), 1 if rope.axes is None else rope.axes.count
        positions = np.stack([np.roll(at, 5 * axis) for axis in range(count)])  # each axis goes its own way
        x = _numbers(seed + len(made), (heads, at.size, rope.head_dim), dtype)
        inputs = {name_of_x: x, "positions": positions if rope.axes else at}
        made.append(Case(f"{kind}-{name}", kind, dtype, rope, {}, inputs))
    return made


def _attentions(kind: str, seed: int, own: Own | None) -> list[Case]:
    """The cases of attention; three for each gradient, of the same inputs."""
    made, linear, gradient = list[Case](), kind.startswith("linear"), kind.endswith("gradient")
    if own is not None and own.rope.axes is not None:
        return made
    if own is None:
        listed = _linear_cases() if linear else _attention_cases()
    else:
        listed = own.attention(feature_map="elu+1") if linear else own.attention()
    for name, dtype, rope, options, (h, g, n, m, d, first) in listed:
        shapes = {"q": (h, n, d), "k": (g, m, d), "v": (g, m, d)} | ({"g": (h, n, d)} if gradient else {})
        at = 8 * (seed + len(made))
        inputs = {key: _numbers(at + i, shape, dtype) for i, (key, shape) in enumerate(shapes.items())}
        keys = np.arange(first, first + m, dtype=np.int64)  # by default int32 on 32-bit platforms
        inputs |= {"k_positions": keys, "q_positions": keys[m - n :]}
        if not gradient:
            made.append(Case(f"{kind}-{name}", kind, dtype, rope, options, inputs))
        for of in "qkv" if gradient else "":
            made.append(Case(f"{kind}-{name}-d{of}", kind, dtype, rope, {**options, "of": of}, inputs))
    return made


# Truth


class _Format(NamedTuple):
    """What `tolerance` asks of a dtype; NumPy alone has no bfloat16."""

    name: str
    itemsize: int


def _rotation(case: Case) -> Truth:
    x, positions, rope = case.x, case.inputs["positions"], case.turn
    if rope is None:  # as a wrong guess
        return Truth(x, {"": Allowed(np.zeros(x.shape))}, np.abs(x), 0.0)
    out: NumPyArray = truth.rotated(x, positions, rope)
    kind: Any = _Format(case.dtype, {"float64": 8, "float32": 4}.get(case.dtype, 2))
    measures, turning = tolerance.pair_errors(x, positions, rope), slice(rope.start, rope.start + rope.width)
    bounds, size = {}, np.abs(x)
    size[..., turning] = measures.length
    for grade in tolerance.grades(kind):
        worst = np.zeros(x.shape)  # what does not turn is not touched
        allowed = tolerance.bound(grade, measures, out[..., turning], kind, rope.attention_factor)
        worst[..., turning] = np.minimum(allowed, 2.1 * measures.length)  # half a turn: more cannot be
        bounds[grade] = Allowed(worst)
    ulps = 2.5 if rope.attention_factor != 1 else 1.0  # of a table entry, 2u each; product and sum have u
    return Truth(out, bounds, size, float((2 * ulps + 2) * 2.0**-53 * measures.sums.max()))


def exam_of(case: Case) -> Exam:
    """A case of attention as the checks ask it: one question, with a batch of one."""
    (h, _, d), g = case.inputs["q"].shape, len(case.inputs["k"])
    options = {name: value for name, value in case.options.items() if name in ("window", "softcap", "feature_map")}
    scale = float(case.options.get("scale") or d**-0.5)
    spec = truth.Spec(h, g, d, bool(case.options.get("causal")), scale, rope=case.rope, **options)
    q, k, v, positions = (case.inputs[name][None] for name in ("q", "k", "v", "k_positions"))
    kind = SOFTMAX if case.kind.startswith("attention") else LINEAR_KIND
    return Exam(kind, "", spec, case.dtype, [Question(case.name, q, k, v, positions=positions)])


def _attention(case: Case) -> Truth:
    exam = exam_of(case)
    ((out, parts),), (question,) = exam.right, exam.questions
    bounds = {grade: exam.allowed(grade, question, parts) for grade in exam.grades}
    sizes = np.abs(parts.weights if case.kind == "attention" else tolerance.linear_sizes(parts))
    exact = replace(exam, dtype="float64", spec=replace(exam.spec, rope=None))  # the tables have no error
    error = float(exact.allowed(OWN, question, parts).worst.max())
    one_row = {grade: allowed._replace(worst=allowed.worst[0]) for grade, allowed in bounds.items()}
    return Truth(out[0], one_row, (sizes @ np.abs(parts.v))[0], error)


def gradient_asked(case: Case) -> Asked:
    """A case of a gradient as the checks ask it."""
    exam = exam_of(case)
    return Asked(exam.spec, exam.questions[0], case.inputs["g"][None])


def gradients_of(case: Case) -> Gradients:
    return SOFTMAX_GRADIENTS if case.kind.startswith("attention") else LINEAR_GRADIENTS


def _gradient(case: Case) -> Truth:
    asked, bounds, name = gradient_asked(case), {}, f"d{case.options['of']}"
    angles = {OWN: False, ANGLE32: True} if case.dtype == "float64" and case.rope is not None else {OWN: True}
    for grade, float32 in angles.items():
        gradient = asked.gradients(gradients_of(case), Roundings.of(case.dtype, float32), {})[name]
        allowed = gradient.allowed(case.dtype)
        bounds[grade] = allowed._replace(worst=allowed.worst[0])
    exact = asked.gradients(gradients_of(case), Roundings.of("float64", False), {})[name]
    size = np.full(exact.value[0].shape, max(float(np.sqrt(np.square(exact.value).mean())), 1e-30))
    return Truth(exact.value[0], bounds, size, float(exact.allowed("float64").worst.max()))


TRUTH: dict[str, Callable[[Case], Truth]] = dict(
    zip(KINDS, (_rotation, _attention, _attention, _rotation, _gradient, _gradient), strict=True)
)
