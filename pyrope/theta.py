"""The definition of a rotary embedding, `Rope`, and its frequencies Θ, Eq. (15).

Θ is computed in 60-digit decimal arithmetic and rounded once. A float parameter means its exact
binary value. Each published rescaling of Θ is one small frozen dataclass that cites its source.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from decimal import Context, Decimal, localcontext
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from . import checks

if TYPE_CHECKING:
    from .configs import Source

LAYOUTS = ("interleaved", "half", "interleaved-to-half", "half-to-interleaved")
PLACEMENTS = ("prefix", "suffix")
TWO_PI = Decimal("6.28318530717958647692528676655900576839433879875021164194988918461563")
# All settings are spelt out, since an application may have changed the defaults.
_TRAPS = [decimal.InvalidOperation, decimal.DivisionByZero, decimal.Overflow]
DECIMAL = Context(60, decimal.ROUND_HALF_EVEN, Emin=-999999, Emax=999999, traps=_TRAPS)

# Below this a 128-bit phase no longer holds the 53 bits of a float64 sine; far below any frequency in
# use (base 1e12 and factor 1000 give 1e-15). The upper limit only keeps absurd lists out.
MIN_FREQUENCY, MAX_FREQUENCY = Decimal("1.1102230246251565e-16"), Decimal(2**20)  # 2⁻⁵³, 2²⁰


class _Checked:
    """Checks and normalises the fields of a frozen dataclass by their names; None stays where it is the default."""

    _RULES: ClassVar[dict[str, Callable[[str, Any], Any]]] = {
        **dict.fromkeys(("beta_fast", "beta_slow", "low", "high"), partial(checks.real, low=0, open=True)),
        **dict.fromkeys(("mscale", "mscale_all_dim"), partial(checks.real, low=0)),
        **dict.fromkeys(("short", "long"), checks.reals),
        "attention_factor": partial(checks.real, low=2**-20, high=2**20),
        "factor": partial(checks.real, low=1),
        "fraction": partial(checks.real, low=0, high=1, open=True),
        "original_length": partial(checks.integer, least=2),
        "length": partial(checks.integer, least=1),
        "truncate": checks.flag,
    }
    _RISING: ClassVar[tuple[str, str] | None] = None  # two fields, of which the second must not be the smaller one

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # every heir is a dataclass
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                _set(self, field.name, self._RULES[field.name](field.name, value))
        if self._RISING is not None:
            (less, low), (more, high) = ((name, getattr(self, name)) for name in self._RISING)
            if high < low:
                raise ValueError(f"{more} must be at least {less}, {low:g}, was {high:g}")


def _set(instance: object, name: str, value: Any) -> None:
    object.__setattr__(instance, name, value)  # the dataclass is frozen once it is made


@lru_cache(maxsize=256)  # ropes that differ in their rescaling alone share them
def _geometric(base: Decimal, r: int, denominator: int | None = None) -> tuple[Decimal, ...]:
    """w_i = base^(−2i/r), i = 0 … r/2−1; Eq. (15) counts i from 1."""
    with localcontext(DECIMAL):
        step = -2 * base.ln() / (denominator or r)
        return tuple((i * step).exp() for i in range(r // 2))  # Eq. (15)


@dataclass(frozen=True)
class Linear(_Checked):
    """Position interpolation (Chen et al., arXiv 2306.15595): θ_i = w_i / factor."""

    factor: float

    def theta(self, base: Decimal, r: int) -> list[Decimal]:
        return [w / Decimal(self.factor) for w in _geometric(base, r)]


@dataclass(frozen=True)
class DynamicNTK(_Checked):
    """NTK-aware base that grows with the length (bloc97 and emozilla, 2023).

    base' = base·(s·N/L − (s−1))^(r/(r−2)), with N the current length, at least L = ``original_length``
    (``max_position_embeddings`` in a config). Θ is open until `Rope.at` sets ``length``.
    """

    factor: float
    original_length: int
    length: int | None = None

    def theta(self, base: Decimal, r: int) -> list[Decimal]:
        s, longest = Decimal(self.factor), Decimal(self.original_length)
        n = max(Decimal(self.length or 0), longest)
        stretch = 1 + s * (n - longest) / longest  # s·N/L − (s−1), without its cancellation
        return list(_geometric(base * (stretch.ln() * r / (r - 2)).exp(), r))


@dataclass(frozen=True)
class YaRN(_Checked):
    """YaRN (Peng et al., arXiv 2309.00071): slow pairs interpolated, fast ones kept, a ramp between.

    The attention factor is ``attention_factor``, or G(s, mscale)/G(s, mscale_all_dim) if both are given
    and not 0, or G(s, 1), where G(s, k) = 0.1·k·ln s + 1. An ``mscale`` alone changes nothing, as in
    transformers; vLLM, mlx-lm and TensorRT-LLM use it. Where the ramp falls outside the pairs, or runs backwards,
    the formula is followed to the letter, as in transformers: all pairs kept, or all interpolated.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    _RISING = ("beta_slow", "beta_fast")

    def theta(self, base: Decimal, r: int) -> list[Decimal]:
        def pair_that_turns(times: float) -> Decimal:  # that often within the original length
            return r * (Decimal(self.original_length) / (TWO_PI * Decimal(times))).ln() / (2 * base.ln())

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = low.to_integral_value(decimal.ROUND_FLOOR), high.to_integral_value(decimal.ROUND_CEILING)
        low, high = max(low, Decimal(0)), min(high, Decimal(r - 1))
        if low == high:
            high += Decimal("0.001")
        s = Decimal(self.factor)
        ramp = [min(max((i - low) / (high - low), Decimal(0)), Decimal(1)) for i in range(r // 2)]
        return [w * ((1 - g) + g / s) for w, g in zip(_geometric(base, r), ramp, strict=True)]

    def implied_attention_factor(self) -> Decimal:
        def g(k: float) -> Decimal:
            return Decimal(1) if self.factor <= 1 else Decimal("0.1") * Decimal(k) * Decimal(self.factor).ln() + 1

        if self.mscale and self.mscale_all_dim:
            return g(self.mscale) / g(self.mscale_all_dim)
        return g(1.0)


@dataclass(frozen=True)
class LongRoPE(_Checked):
    """LongRoPE (Ding et al., arXiv 2402.13753): θ_i = w_i / f_i, f = ``long`` if N > L₀ else ``short``.

    The attention factor is ``attention_factor`` or √(1 + ln s / ln L₀), s = ``factor``, L₀ = ``original_length``.
    Which list holds is open until `Rope.at` sets ``length``.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    factor: float
    original_length: int
    attention_factor: float | None = None
    length: int | None = None

    def theta(self, base: Decimal, r: int) -> list[Decimal]:
        factors = self.long if (self.length or 0) > self.original_length else self.short
        return [w / Decimal(f) for w, f in zip(_geometric(base, r), factors, strict=True)]

    def implied_attention_factor(self) -> Decimal:
        return (1 + Decimal(self.factor).ln() / Decimal(self.original_length).ln()).sqrt()


@dataclass(frozen=True)
class Llama3(_Checked):
    """The rule of Llama 3.1 (Grattafiori et al., arXiv 2407.21783): by wavelength λ = 2π/w_i.

    λ > L₀/low: w_i/s; λ < L₀/high: w_i; between them blended, with L₀ = ``original_length``. Where low = high, as in
    Llama 4 Scout, there is nothing between them: a step.
    """

    factor: float
    low: float
    high: float
    original_length: int
    _RISING = ("low", "high")

    def theta(self, base: Decimal, r: int) -> list[Decimal]:
        s, low, high = Decimal(self.factor), Decimal(self.low), Decimal(self.high)

        def rescaled(w: Decimal) -> Decimal:
            turns = self.original_length * w / TWO_PI  # L₀/λ
            t = (turns - low) / (high - low) if high > low else Decimal(turns > low)
            t = min(max(t, Decimal(0)), Decimal(1))
            return w * ((1 - t) / s + t)

        return [rescaled(w) for w in _geometric(base, r)]


@dataclass(frozen=True)
class Proportional(_Checked):
    """Gemma 4's partial rotation: pairs are d/2 apart, the exponent's denominator is d, only the
    first ``fraction`` of the pairs turn: θ_i = base^(−2i/d)/s for i < ⌊fraction·d/2⌋, then 0."""

    fraction: float
    factor: float = 1.0

    def theta(self, base: Decimal, r: int) -> list[Decimal]:
        turning = int(self.fraction * r // 2)  # a count: in float64, as transformers does
        rotated = [w / Decimal(self.factor) for w in _geometric(base, 2 * turning, r)]
        return rotated + [Decimal(0)] * (r // 2 - turning)


Scaling: TypeAlias = Linear | DynamicNTK | YaRN | LongRoPE | Llama3 | Proportional
SCALINGS: dict[str, type[Scaling]] = {
    "linear": Linear, "dynamic": DynamicNTK, "yarn": YaRN, "longrope": LongRoPE, "llama3": Llama3,
    "proportional": Proportional,
}  # fmt: skip
LENGTH_DEPENDENT = (DynamicNTK, LongRoPE)


@dataclass(frozen=True)
class Axes:
    """Which axis of the positions turns each pair, and with which frequency.

    - "sections", M-RoPE of Qwen2-VL: the axis of the section, of so many pairs, that pair i lies in;
    - "interleaved", M-RoPE of Qwen3-VL: with k axes, axis i mod k while its section lasts, then 0;
    - "listed": ``sections`` names the axis of every pair, in any order;
    - "axial", vision part of Qwen2-VL: the first half of the pairs turns with rows, the second with columns, each
      with the frequencies 0, 2, 4, …;
    - "pixtral": the same halves, rows with the frequencies 0, 2, 4, …, columns with 1, 3, 5, ….

    In the first three, pair i has frequency i of Θ; with ``series="own"`` each axis has a series of its own, that of a
    head as wide as its pairs: the j-th of its k pairs has base^(−j/k), as in Flux, Wan and Qwen-Image.
    """

    style: str
    sections: tuple[int, ...] = ()
    series: str = "shared"

    def __post_init__(self) -> None:
        checks.choice("axes style", self.style, ("sections", "interleaved", "listed", "axial", "pixtral"))
        _set(self, "sections", checks.integers("sections", self.sections, 0))
        checks.choice("series", self.series, ("shared", "own"))
        dealt = self.style in ("sections", "interleaved", "listed")
        if len(self.sections) < 2 if dealt else self.sections:
            wanted = "at least two" if dealt else "no"
            raise ValueError(f'axes style "{self.style}" takes {wanted} sections, was given {self.sections}')
        if self.style == "listed" and (listed := sorted(set(self.sections))) != list(range(self.count)):
            raise ValueError(f"the axes that are listed must be 0, 1, … without a gap, were {listed}")
        if self.series == "own" and not dealt:
            raise ValueError(f'series="own" is for sections: axes style "{self.style}" has frequencies of its own')

    @property
    def count(self) -> int:
        """How many axes the positions have."""
        return max(self.sections) + 1 if self.style == "listed" else len(self.sections) or 2

    def assign(self, p: int) -> list[tuple[int, int]]:
        """For each of p pairs the axis that turns it and the index of its frequency in Θ, or in its axis's series."""
        total = len(self.sections) if self.style == "listed" else sum(self.sections)
        if self.sections and total != p:
            raise ValueError(f"sections {self.sections} must add up to the number of pairs, {p}, but make {total}")
        if not self.sections and p % 2:
            raise ValueError(f'axes style "{self.style}" needs an even number of pairs, was {p}')
        if not self.sections:
            odd = 1 if self.style == "pixtral" else 0
            return [(0, 2 * j) for j in range(p // 2)] + [(1, 2 * j + odd) for j in range(p // 2)]
        axes = list(self.sections)
        if self.style == "sections":
            axes = [axis for axis, size in enumerate(self.sections) for _ in range(size)]
        elif self.style == "interleaved":
            axes = [i % self.count if i < self.count * self.sections[i % self.count] else 0 for i in range(p)]
        return [(axis, axes[:i].count(axis) if self.series == "own" else i) for i, axis in enumerate(axes)]

    def widths(self, p: int) -> list[int]:
        """For each of p pairs how many features its series spans: r, or with series of their own those of its axis."""
        axes = [axis for axis, _ in self.assign(p)]
        return [2 * (axes.count(axis) if self.series == "own" else p) for axis in axes]


@dataclass(frozen=True, repr=False)
class Rope:
    """Everything that decides the rotation R(Θ, m) of one head: a hashable value.

    >>> rope = Rope(head_dim=128, base=10000.0, layout="half", scaling=Linear(factor=4.0))
    >>> rope
    Rope(head_dim=128, base=10000.0, layout='half', scaling=Linear(factor=4.0))
    >>> float(frequencies(rope)[0])
    0.25

    ``layout`` says which two features make a pair: "interleaved" (2i, 2i+1), "half" (i, i + r/2), or
    "interleaved-to-half", which reads the first and writes the second; "half-to-interleaved" is what the transpose of
    that one does. ``rotary_dim`` = r features are rotated (None: all), the first ones or (``placement="suffix"``) the
    last ones; ``width`` is r as a number.
    ``direction=-1`` turns backwards.
    With ``axes`` positions have a first axis of their own, e.g. (time, row, column).
    """

    head_dim: int
    base: float
    layout: str
    rotary_dim: int | None = None
    placement: str = "prefix"
    scaling: Scaling | None = None
    axes: Axes | None = None
    direction: int = 1

    def __post_init__(self) -> None:
        _set(self, "head_dim", checks.size("head_dim", self.head_dim))
        if self.rotary_dim is not None:  # all features are always written as None, so that equal ropes compare equal
            width = checks.size("rotary_dim", self.rotary_dim)
            _set(self, "rotary_dim", None if width == self.head_dim else width)
        for name, size in (("head_dim", self.head_dim), ("rotary_dim", self.width)):
            if size % 2:
                raise ValueError(f"{name} must be even, was {size}: features turn in pairs")
        if self.width > self.head_dim:
            raise ValueError(f"rotary_dim must be at most head_dim, {self.head_dim}, was {self.width}")
        _set(self, "base", checks.real("base", self.base, 1, 1e12, open=True))
        checks.choice("layout", self.layout, LAYOUTS)
        checks.choice("placement", self.placement, PLACEMENTS)
        _set(self, "direction", int(checks.choice("direction", self.direction, (1, -1))))
        if self.axes is not None:
            if not isinstance(self.axes, Axes):
                raise TypeError(f'axes must be an Axes, such as Axes("sections", (16, 24, 24)), was {self.axes!r}')
            self.axes.assign(self.pairs)
        self._check_scaling()

    def _check_scaling(self) -> None:
        scaling, r = self.scaling, self.width
        if not isinstance(scaling, Scaling | None):
            known = "None, Linear, DynamicNTK, YaRN, LongRoPE, Llama3 or Proportional"
            raise TypeError(f"scaling must be {known}, was {scaling!r}")
        if isinstance(scaling, DynamicNTK) and r == 2:
            raise ValueError("DynamicNTK needs a rotary width of at least 4, was 2: its exponent r/(r−2) divides by 0")
        if isinstance(scaling, Proportional) and r != self.head_dim:
            fix = "leave rotary_dim out, since its fraction says how much turns"
            raise ValueError(f"Proportional spans all {self.head_dim} features, rotary_dim was {r}: {fix}")
        if isinstance(scaling, Proportional) and not int(scaling.fraction * r // 2):
            raise ValueError(f"Proportional's fraction, {scaling.fraction:g}, lets no pair of {r} features turn")
        if self.axes is not None and self.axes.series == "own" and not isinstance(scaling, Linear | None):
            raise ValueError(f"axes with a series of their own take no scaling but Linear, was {scaling!r}")
        if not 2.0**-20 <= self.attention_factor <= 2.0**20:
            raise ValueError(f"the attention factor must lie in [2^-20, 2^20], was {self.attention_factor:g}")
        for name in ("short", "long") if isinstance(scaling, LongRoPE) else ():
            if (count := len(getattr(scaling, name))) != r // 2:
                raise ValueError(f"LongRoPE's {name} list must have one factor for each of {r // 2} pairs, has {count}")

    def __repr__(self) -> str:
        values = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Rope({', '.join(values)})"

    @cached_property
    def width(self) -> int:
        """r: how many features are rotated."""
        return self.rotary_dim or self.head_dim

    @cached_property
    def pairs(self) -> int:
        """p = r/2."""
        return self.width // 2

    @cached_property
    def start(self) -> int:
        """The first feature that is rotated."""
        return 0 if self.placement == "prefix" else self.head_dim - self.width

    @cached_property
    def attention_factor(self) -> float:
        """a: multiplies cos and sin, so that scores get a²; 1 except for YaRN and LongRoPE."""
        scaling = self.scaling
        if not isinstance(scaling, YaRN | LongRoPE):
            return 1.0
        with localcontext(DECIMAL):
            given = scaling.attention_factor
            return float(scaling.implied_attention_factor()) if given is None else given

    @cached_property
    def rotation_only(self) -> Rope:
        """The rotation alone: this rope with an attention factor of 1, which is what linear attention turns with."""
        if self.attention_factor == 1.0 or not isinstance(self.scaling, YaRN | LongRoPE):
            return self
        return replace(self, scaling=replace(self.scaling, attention_factor=1.0))

    @property
    def transposed(self) -> Rope:
        """The rope of Rᵀ, which a backward pass multiplies gradients with: it turns the other way and reads pairs where
        this one writes them. The attention factor is the same.

        >>> Rope(4, 10000.0, "interleaved-to-half").transposed
        Rope(head_dim=4, base=10000.0, layout='half-to-interleaved', direction=-1)
        """
        reads, _, writes = self.layout.partition("-to-")
        return replace(self, layout=f"{writes}-to-{reads}" if writes else reads, direction=-self.direction)

    @cached_property
    def theta_is_fixed(self) -> bool:
        """Whether Θ is fixed: false for DynamicNTK and LongRoPE until `at` has set a length."""
        return not isinstance(self.scaling, LENGTH_DEPENDENT) or self.scaling.length is not None

    def at(self, length: int) -> Rope:
        """The same rope with Θ fixed for sequences of this length.

        >>> rope = Rope(64, 10000.0, "half", scaling=DynamicNTK(factor=2.0, original_length=2048))
        >>> rope.at(4096).scaling
        DynamicNTK(factor=2.0, original_length=2048, length=4096)
        """
        length = checks.integer("length", length, 1)
        if not isinstance(self.scaling, LENGTH_DEPENDENT):
            return self
        return replace(self, scaling=replace(self.scaling, length=length))

    @classmethod
    def from_config(cls, config: Source, *, layout: str | None = None, layer_type: str | None = None) -> Rope:
        """The rope of a Hugging Face config: a dict, or the path of a config.json or of its folder.

        >>> Rope.from_config({"model_type": "llama", "head_dim": 64, "rope_theta": 500000.0})
        Rope(head_dim=64, base=500000.0, layout='half')

        A config does not say the layout; it comes from ``model_type`` by convention, or from ``layout``.
        Models whose layers have different ropes need ``layer_type``.
        """
        from .configs import read_rope  # imported here, since the core reads no JSON

        return read_rope(config, layout, layer_type)


def check_rope(rope: Any) -> Rope:
    """The argument, if it is a Rope whose Θ is fixed."""
    if not isinstance(rope, Rope):
        raise TypeError(f"rope must be a Rope, was {type(rope).__name__}")
    if not rope.theta_is_fixed:
        raise ValueError(f"the frequencies of {rope.scaling} depend on the length: fix it first with rope.at(length)")
    return rope


@lru_cache(maxsize=256)
def exact_frequencies(rope: Rope) -> tuple[Decimal, ...]:
    """Θ in 60-digit decimal, one for each pair, in the order of the pairs."""
    p, scaling, axes = rope.pairs, rope.scaling, rope.axes
    widths, order = ([rope.width] * p, range(p)) if axes is None else (axes.widths(p), [i for _, i in axes.assign(p)])
    with localcontext(DECIMAL):
        base = Decimal(rope.base)
        series = {r: _geometric(base, r) if scaling is None else scaling.theta(base, r) for r in set(widths)}
    theta = [series[r][i] for r, i in zip(widths, order, strict=True)]
    for i, t in enumerate(theta):
        if t and not MIN_FREQUENCY <= t <= MAX_FREQUENCY:
            rule = "outside [2^-53, 2^20] where phases are exact"
            raise ValueError(f"frequency {i} is {t:.3e}, {rule}: lower the factor or the base")
    return tuple(theta)


def frequencies(rope: Rope) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Θ, float64 (p,), each the float64 nearest to its true value.

    >>> frequencies(Rope(8, 10000.0, "interleaved"))
    array([1.   , 0.1  , 0.01 , 0.001])
    """
    return np.array([float(t) for t in exact_frequencies(check_rope(rope))])


def wavelengths(rope: Rope) -> np.ndarray[Any, np.dtype[np.float64]]:
    """2π/θ, float64 (p,): how many positions each pair takes for a turn; inf where it does not turn.

    >>> wavelengths(Rope(4, 10000.0, "interleaved")).round(2)
    array([  6.28, 628.32])
    """
    with localcontext(DECIMAL):
        return np.array([float(TWO_PI / t) if t else math.inf for t in exact_frequencies(check_rope(rope))])
