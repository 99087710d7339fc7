"""What attention is meant to compute, what is right for one call, and how far off rounding may make it.

`weigh` is Eq. (2) or Eq. (19) by the steps of `pyrope.definition`, with a `Rounding` after every step. Without noise it
is the truth; with the noise of a right implementation it shows by how much that one may differ: no bound is derived by
hand, neither forwards nor backwards (`gradients`).

Shapes are those of `pyrope.definition`: q (b, h, n, d), k and v (b, g, t, d), weights (b, h, n, t).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from .. import definition
from ..backend import Array
from ..phase import cos_sin
from ..theta import Rope, frequencies
from .candidate import UNIT

U32, U64 = UNIT["float32"], UNIT["float64"]
STEP = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149}  # the smallest number: below it nothing is
ROUGH = {"float16": 2.0**-24}  # weights of this size may be lost
TABLE = 4200  # positions whose cos and sin are kept
FAR = 0.3  # of the size of the values: no rounding is so large
SAMPLES, FEW = 3, 100  # noisy runs of one call with fewer keys than this; of others one
MANY, DOUBTFUL = 6, 3  # times as many, where errors are no more than this times too large


@dataclass(frozen=True)
class Spec:
    """What an implementation is meant to compute; ``feature_map`` is None for softmax attention."""

    heads: int
    key_heads: int
    head_dim: int
    causal: bool
    dtype: np.dtype[Any]
    scale: float = 1.0
    window: int | None = None
    softcap: float | None = None
    rope: Rope | None = None
    feature_map: str | None = None

    @property
    def turns(self) -> Rope | None:
        """The rope that rotates inside; linear attention has no attention factor."""
        return self.rope if self.rope is None or self.feature_map is None else self.rope.rotation_only


@dataclass(frozen=True)
class Call:
    """What a candidate is given at once, or in several calls of so many tokens (``chunks``)."""

    name: str
    q: Array  # (b, h, n, d)
    k: Array  # (b, g, t, d)
    v: Array  # (b, g, t, d)
    positions: Array | None = None  # (b, t)
    options: dict[str, Array] = field(default_factory=dict)  # mask (b, 1, n, t), segments (b, t)
    g: Array | None = None  # of a backward pass: the gradient of the output, (b, h, n, d)
    chunks: tuple[int, ...] = ()
    caches: int = 1  # alive at once, each with its share of the rows: what is cut into chunks is dealt to them
    needed: bool = False  # a candidate that refuses this call cannot be judged
    judged: Any = field(default_factory=lambda: slice(None))  # queries
    held: str = ""  # how its arrays are held in memory, if not plainly
    slack: float = 0.0  # relative error that is allowed besides
    alike: bool = False  # numbers are alike, so that errors add up
    top_left: bool = False  # the queries are the first of the tokens, not the last

    @property
    def shape(self) -> tuple[Any, ...]:
        """What a compiler would compile it for."""
        return (self.q.shape, self.k.shape, self.chunks, *self.options)

    @property
    def square(self) -> bool:
        """Whether there are as many queries as keys."""
        return bool(self.q.shape[2] == self.k.shape[2])

    @property
    def size(self) -> float:
        """Of its values."""
        return float(np.abs(self.v[0, 0].astype(np.float64)).max(initial=0))

    @property
    def places(self) -> tuple[Array, Array]:
        """The places of the judged queries, which are the last of the tokens, and of the keys."""
        n, t = self.q.shape[-2], self.k.shape[-2]
        return (np.arange(n) if self.top_left else np.arange(t - n, t))[self.judged], np.arange(t)

    @property
    def of(self) -> Array:
        """The call with a cache that each token comes in, (t,)."""
        return np.repeat(np.arange(len(self.chunks)), self.chunks)

    @property
    def first(self) -> Array:
        """The first token of that call, (t,)."""
        return np.repeat(np.cumsum((0, *self.chunks[:-1])), self.chunks)

    def at(self) -> tuple[Any, Any]:
        """The positions of the judged queries and of the keys, (b, 1, n) and (b, 1, t)."""
        if self.positions is None:
            return None, None
        at = self.positions[:, None].astype(np.int64)
        return at[..., self.places[0]], at


@dataclass(frozen=True)
class Rounding:
    """How an implementation rounds, by its unit roundoffs; without them it is exact."""

    fine: float = 0.0
    coarse: float = 0.0
    weights: float = 0.0
    angle: float = 0.0
    seed: int = 0

    @cached_property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    @property
    def unit(self) -> float:
        """Of what is kept between two steps."""
        return max(self.coarse, self.fine)

    def noisy(self, x: Array, sigma: Any) -> Array:
        return x + sigma * self.rng.standard_normal(x.shape, np.float32)

    def stored(self, x: Array, times: float = 1, unit: float | None = None) -> Array:
        """Rounded so often: each time uniform in ±u, a variance of u²/3."""
        unit = self.unit if unit is None else unit
        return self.noisy(x, unit * math.sqrt(times / 3) * np.abs(x)) if unit else x

    def summed(self, out: Array, a: Array, b: Array, times: Any = 1.0) -> Array:
        """out, which is a·b times a factor, as a sum of rounded products has it."""
        if not self.fine:
            return out
        return self.stored(self.added(out, np.square(times) * (np.square(a) @ np.square(b)), a.shape[-1]))

    def added(self, out: Array, squares: Array, count: int) -> Array:
        """A sum of so many rounded terms: its standard error is U·√(count + 8) times the root of the sum of their
        squares; factors that are rounded coarsely add their own."""
        return self.noisy(out, np.sqrt((self.fine**2 * (count + 8) + 4 / 3 * self.coarse**2) * squares))

    def turned(self, x: Array, at: Any, rope: Rope | None) -> Array:
        """R(Θ, m)·x. An angle m·θ is off by m times the error of θ, which is the same for queries and keys, by its own
        rounding; tables and products with them have the same unit; angles of position 0 are exact."""
        if rope is None or at is None:
            return x
        cos, sin = exact_tables(rope, at)
        if self.angle:
            at = np.abs(at)[..., None]
            theta = np.random.default_rng(self.seed).standard_normal(cos.shape[-1]) * angle_errors(rope)
            off = at * theta + self.noisy(np.zeros(cos.shape), at * np.abs(frequencies(rope)) + 6.0 * (at > 0))
            c, s = np.cos(self.angle * off), np.sin(self.angle * off)
            cos, sin = cos * c - sin * s, sin * c + cos * s
            unit = self.unit * math.sqrt(2 / 3) + 2 * self.angle * (at > 0)  # of tables, and products with them
            cos, sin = self.noisy(cos, unit * np.abs(cos)), self.noisy(sin, unit * np.abs(sin))
        return self.stored(definition.rotate(x, cos, sin, *definition.pairs(rope.layout, rope.width, rope.start)))

    def mapped(self, x: Array, feature_map: str) -> Array:
        """φ(x). elu(x) is rounded before 1 is added: below 0 that is no error of the size of the sum, but of elu's."""
        y = definition.FEATURE_MAPS[feature_map](x)
        if self.fine and feature_map == "elu+1":
            y = self.noisy(y, self.unit * (1 - np.minimum(y, 1)))
        return self.stored(y, 2)


def exact_tables(rope: Rope, at: Array) -> tuple[Array, Array]:
    """cos and sin of int64 positions, (…, n) -> (…, n, p) each."""
    if at.size and at.min() >= 0 and at.max() < TABLE:
        cos, sin = _first_tables(rope)
        return cos[at], sin[at]
    return cos_sin(at, rope, np.float64)


@lru_cache(16)
def _first_tables(rope: Rope) -> tuple[Array, Array]:
    return cos_sin(np.arange(TABLE), rope, np.float64)


@lru_cache(64)
def angle_errors(rope: Rope) -> Array:
    """The standard error of each θ, (p,), in units of the roundoff: by exp(−2i/r·ln base), as MLX has it, up to
    4 + 4·|ln θ| times θ; more where it is rescaled; none of a θ that is a power of two."""
    theta = np.abs(frequencies(rope))
    relative = 4 + 4 * np.abs(np.log(np.maximum(theta, 1e-30))) + 16 * (rope.scaling is not None)
    return theta * relative / 2 * (np.frexp(theta)[0] != 0.5)


EXACT = Rounding()


def grades(spec: Spec) -> dict[str, Rounding]:
    """The roundings that a right implementation may have, best first."""
    name, u = spec.dtype.name, UNIT[spec.dtype.name]
    if name in ("float16", "bfloat16"):
        once = {"rounded once": Rounding(U32, angle=U32)}
        if spec.feature_map is not None:
            return once | {"features rounded": Rounding(U32, u, u, U32)}
        return once | {"weights rounded": Rounding(U32, 0, u, U32), "scores rounded": Rounding(U32, u, u, U32)}
    own = {"the dtype's own": Rounding(u, angle=U64)}
    return own if spec.rope is None else own | {"float32 angle": Rounding(u, angle=U32)}


# ── Forwards ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Parts(NamedTuple):
    """Attention, step by step, (b, h, n, t)."""

    seen: Array
    scores: Array  # before the mask; of linear attention the numerators, (R φ(q))·(R φ(k)), of the keys that are seen
    total: Array  # what numerators are divided by, (b, h, n, 1): of softmax attention Σ exp(s − max s)
    weights: Array
    out: Array  # (b, h, n, d)


def seen(spec: Spec, call: Call) -> Array:
    """Which key each judged query sees, (n, t) or (b, 1, n, t)."""
    (i, j), n = call.places, call.q.shape[-2]
    visible = definition.visible(i, j, spec.causal, spec.window)
    if "mask" in call.options:
        visible = visible & call.options["mask"][..., np.arange(n)[call.judged], :]
    if "segments" in call.options:
        of = call.options["segments"][:, None]
        visible = visible & (of[..., i, None] == of[..., None, :])
    return visible


def spread(call: Call) -> tuple[Array, Array, Array]:
    """The judged q, and k and v for each query head, in float64."""
    q, h = call.q[:, :, call.judged].astype(np.float64), call.q.shape[1]
    k, v = (x.astype(np.float64) for x in (call.k, call.v))
    k, v = (x if x.shape[1] == h else definition.repeat_heads(x, h) for x in (k, v))
    return np.nan_to_num(q) if np.isnan(q.sum()) else q, k, v


def capped(scores: Array, softcap: float | None) -> Array:
    return scores if softcap is None else softcap * np.tanh(scores / softcap)


def cap_slope(scores: Array, softcap: float | None) -> Array:
    """The derivative of the cap, where its results are these scores."""
    return np.ones(1) if softcap is None else 1 - np.square(scores / softcap)


def weigh(spec: Spec, call: Call, r: Rounding = EXACT) -> Parts:
    """Eq. (2), or Eq. (19) if there is a feature map."""
    (q, k, v), (q_at, k_at), visible, rope = spread(call), call.at(), seen(spec, call), spec.turns
    q, k = r.stored(q, 2, r.coarse), r.stored(k, 2, r.coarse)
    if spec.feature_map is None:
        q, k = r.turned(q, q_at, rope), r.turned(k, k_at, rope)
        scores = definition.attention_scores(q, k, np.True_, spec.scale, spec.softcap)
        slope = spec.scale * cap_slope(scores, spec.softcap)
        scores = r.stored(r.summed(scores, q, k.swapaxes(-1, -2), slope), 3)
        return normalised(scores, visible, v, r)
    fq, fk = r.mapped(q, spec.feature_map), r.mapped(k, spec.feature_map)
    tq, tk = r.turned(fq, q_at, rope), r.turned(fk, k_at, rope)
    turned, total = definition.similarities(fq, fk, lambda x: tq if x is fq else tk, visible)
    if r.fine:
        squares = np.where(visible, np.square(fq) @ np.square(fk).swapaxes(-1, -2), 0).sum(axis=-1, keepdims=True)
        total = r.stored(r.added(total, squares, q.shape[-1] + k.shape[-2]), 2)
        turned = r.summed(turned, tq, tk.swapaxes(-1, -2), visible)
    weights = r.stored(turned / np.where(total == 0, 1, total), 1, max(r.weights, r.fine))
    return Parts(visible, turned, total, weights, r.stored(r.summed(weights @ v, weights, v)))


def normalised(scores: Array, visible: Array, v: Array, r: Rounding = EXACT) -> Parts:
    """The softmax over the keys that are seen, zeros in a row that sees nothing, and the means of the values.

    The greatest score is taken off, which rounds each difference; a kernel may do so with the logarithm of the sum,
    whose rounding is common to the row."""
    masked, common = np.where(visible, scores, -np.inf), np.ones(1)
    if r.fine:
        top = np.abs(masked).max(axis=-1, keepdims=True, where=visible, initial=0)
        masked, common = r.noisy(masked, r.fine * (top + 8)), r.noisy(np.ones(top.shape), 2 * r.fine * (top + 4))
    weights = definition.softmax(masked)
    most = weights.max(axis=-1, keepdims=True)
    total = np.where(most == 0, 0, 1 / np.where(most == 0, 1, most))
    weights = r.stored(weights * common, 2, max(r.weights, r.fine))
    return Parts(visible, scores, total, weights, r.summed(weights @ v, weights, v))


# ── Backwards ────────────────────────────────────────────────────────────────────────────────────────────────────────

SLOPES: dict[str, Callable[[Array], Array]] = {
    "elu+1": lambda x: np.exp(np.minimum(x, 0)),
    "relu": lambda x: np.where(x > 0, 1.0, 0.0),
    "relu2": lambda x: 2 * np.maximum(x, 0),
    "exp": np.exp,
    "identity": np.ones_like,
}


class How(NamedTuple):
    """How a backward pass is finished; None is as it should be."""

    back: Any = None  # how dq and dk are turned back, and dv, which is not turned
    plain: Any = None  # how the second term of linear attention is turned, which is not
    left: Any = None  # weights, or their gradients, as they are multiplied from the left
    gather: Any = None  # the query heads that share a key head: (b, g, h/g, m, d) -> (b, g, m, d)
    row: Any = None  # D, (b, h, n, 1)


RIGHT = How()


class Backward:
    """dq, dk and dv for the gradient g of the output, each as the sum of its terms.

    dv = wᵀg, dw = g·vᵀ, D = Σ w∘dw = Σ g∘o. Softmax: ds = w∘(dw − D), times 1 − (s/c)² if there is a softcap c, then
    dq = scale·Rᵀ(ds·k̃), dk = scale·Rᵀ(dsᵀ·q̃). Eq. (19): dN = dw/Z and dZ = −D/Z for numerators and their sum Z, then
    dφ(q) = Rᵀ(dN·k̃) + dZ·Σφ(k), and φ′.
    """

    def __init__(self, spec: Spec, call: Call, r: Rounding = EXACT) -> None:
        self.spec, self.call, self.r, self.parts = spec, call, r, weigh(spec, call, r)
        (q, k, v), (q_at, self.at), phi = spread(call), call.at(), spec.feature_map or "identity"
        self.g, fq, fk = np.asarray(call.g, np.float64), r.mapped(q, phi), r.mapped(k, phi)
        tq, tk = r.turned(fq, q_at, spec.turns), r.turned(fk, self.at, spec.turns)
        dw = self.g @ _t(v)
        row, dw = (self.parts.weights * dw).sum(axis=-1, keepdims=True), r.summed(dw, self.g, _t(v))
        if r.fine:  # D may be Σ g∘o, of an output that is rounded: dw's errors do not cancel in dw − D
            row = r.added(row, np.square(self.g * self.parts.out).sum(axis=-1, keepdims=True), self.g.shape[-1])
        rounded = r.fine and spec.feature_map is None  # the difference is
        self.both, self.sides = (dw - row,) if rounded else (dw, -row), ((q, q_at, tk, fk), (k, self.at, tq, fq))

    def terms(self, tensor: int, how: How = RIGHT) -> list[Array]:
        """Those of dq, dk or dv, made as they should be or in another way."""
        terms = self._of_values(how) if tensor == 2 else self._of_pairs(tensor, how)
        gather, shape = how.gather or (lambda x: x.sum(axis=2)), (len(self.g), self.call.k.shape[1], -1)
        return terms if tensor == 0 else [gather(x.reshape(*shape, *x.shape[2:])) for x in terms]

    def _product(self, a: Array, b: Array) -> Array:
        return self.r.summed(a @ b, a, b)

    def _of_values(self, how: How) -> list[Array]:
        return [(how.back or same)(self._product((how.left or _t)(self.parts.weights), self.g))]

    def _of_pairs(self, tensor: int, how: How) -> list[Array]:
        x, at, turned, plain = self.sides[tensor]
        spec, left, both = self.spec, how.left or (_t if tensor else same), self.both
        if how.row is not None:
            both = self.both[0], -how.row
        back = how.back or (lambda x: self.r.turned(x, at, spec.turns and spec.turns.transposed))
        if spec.feature_map is None:
            slope = spec.scale * cap_slope(self.parts.scores, spec.softcap)
            each = (self.r.stored(self.parts.weights * y, 2) * slope for y in both)
            return [back(self._product(left(ds), turned)) for ds in each]
        share, slope = 1 / np.where(self.parts.total == 0, 1, self.parts.total), SLOPES[spec.feature_map](x)
        dn, dz = (left(self.r.stored(np.where(self.parts.seen, y * share, 0), 2)) for y in both)
        return [back(self._product(dn, turned)) * slope, (how.plain or same)(self._product(dz, plain)) * slope]


def gradients(spec: Spec, call: Call, r: Rounding = EXACT) -> tuple[Array, ...]:
    """dq, dk and dv; the first two are rounded once more, after a scale or a slope."""
    backward = Backward(spec, call, r)
    return tuple(r.stored(sum(backward.terms(i)), times) for i, times in enumerate((2, 2, 1)))


def _t(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def same(x: Array) -> Array:
    return x


# ── What is allowed ──────────────────────────────────────────────────────────────────────────────────────────────────


class Allowed(NamedTuple):
    """The truth, and how far off an answer may be: each number, and the root of the mean square of all."""

    truth: Array
    worst: Array
    mean: float

    def ratio(self, answer: Array) -> float:
        """How large the errors are: above 1, larger than rounding explains."""
        error = self.error(answer)
        if not error.size:
            return 0.0
        return float(max((error / self.worst).max(), np.sqrt(np.square(error).mean()) / self.mean))

    def error(self, answer: Array) -> Array:
        return np.abs(np.where(np.isfinite(answer), answer, np.inf) - self.truth)


def results(spec: Spec, call: Call, r: Rounding = EXACT) -> tuple[Array, ...]:
    """The output of a call, or its three gradients."""
    return (weigh(spec, call, r).out,) if call.g is None else gradients(spec, call, r)


def allowed(
    spec: Spec, call: Call, rounding: Rounding, answers: Sequence[Array] | None = None, wrong: float = 0.0
) -> list[Allowed]:
    """What each answer to this call must be. If they are given, no more noisy runs are made than it takes to accept
    them: none for those that are far off, where a share of the calls is ``wrong`` already; few, if that is most."""
    truth, noisy, t = results(spec, call), list[tuple[Array, ...]](), call.k.shape[2]
    keys = seen(spec, call).sum(axis=-1, keepdims=True) if call.g is None else np.full(1, t)
    sizes = [float(np.abs(x.astype(np.float64)).max(initial=0)) for x in ([call.v] if call.g is None else truth)]
    most = SAMPLES if call.g is not None or t < FEW or call.alike else 1

    def limits(runs: int) -> list[Allowed]:
        noisy.extend(results(spec, call, replace(rounding, seed=i)) for i in range(len(noisy) + 1, runs + 1))
        each = zip(truth, zip(*noisy, strict=True) if noisy else [()] * len(truth), sizes, strict=True)
        return [_tolerance(spec, call, x, samples, size, keys) for x, samples, size in each]

    if answers is None:
        return limits(most)
    now = limits(0)
    for runs, doubt in ((1, 1.0), (most, 0.5), (MANY * most, 1.0)):
        ratio = max(map(Allowed.ratio, now, answers))
        errors = (float(limit.error(x).max(initial=0)) for limit, x in zip(now, answers, strict=True))
        far = wrong and any(x > FAR * max(size, max(sizes) / 20) for x, size in zip(errors, sizes, strict=True))
        sure = ratio > DOUBTFUL or wrong > 0.5
        if ratio <= doubt or far or (len(noisy) == most and sure):
            break  # few samples may be small by chance, but not by so much
        now = limits(runs)
    return now


def _tolerance(spec: Spec, call: Call, truth: Array, noisy: Sequence[Array], size: float, keys: Array) -> Allowed:
    """Six standard errors for each number, three in the mean square, of values, or what takes their place, of this
    size. The standard error is that of a row of features, and of all rows, since few samples may be small by chance.
    Where errors add up, one for each of the keys of a row, which broadcast to the result, is allowed."""
    name, u = spec.dtype.name, UNIT[spec.dtype.name] + call.slack
    fine, tiny = min(UNIT[name], U32) * size, ROUGH.get(name, 0.0) * size + STEP.get(name, 0.0)
    square = np.mean([np.square(x - truth) for x in noisy], axis=0).mean(axis=-1, keepdims=True) if noisy else 0.0
    every = float(np.mean(square))
    worst = 6 * np.sqrt(square + every) + 1.01 * u * np.abs(truth)
    worst = worst + 4 * (keys + 8) * fine + (keys + 64) * tiny + 1e-300
    mean = 3 * math.sqrt(every) + u * float(np.sqrt(np.square(truth).mean())) if truth.size else 0.0
    mean += 16 * fine + 64 * tiny + 1e-300
    return Allowed(truth, worst, math.inf if call.alike else mean)
