"""The well-known forms of RoPE, written out in NumPy as people write them, and a dozen famous broken ones.

Each is a candidate fn(x, positions) with the Rope that it is meant to be, and what the oracle must say of it. None of
them uses pyrope's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..theta import Axes, Linear, Llama3, Rope, YaRN
from .report import Report
from .rotation import check_rotation

LEGEND = (
    ("error", "the worst up to position 131071, absolute; a float32 angle, which most libraries have, is off by about "
     "0.01 there, and right"),
    ("equivalent", "other vectors than expected, the same scores"),
    ("half 10000", "layout and base"),
)  # fmt: skip
Rotation: TypeAlias = Callable[[Any, Any], Any]
_D = 64


class Exhibit(NamedTuple):
    """A candidate, the rope that it is meant to be, and what the oracle must say of it."""

    name: str
    fn: Rotation
    rope: Rope
    faults: tuple[str, ...] = ()  # all that the report must name
    verdict: str = "right"  # if there are no faults
    dtype: str = "float32"


class Row(NamedTuple):
    """One line of the gallery's report."""

    exhibit: Exhibit
    report: Report

    @property
    def as_expected(self) -> bool:
        return (self.report.verdict, self.report.faults) == (self.exhibit.verdict, self.exhibit.faults)

    @property
    def worst(self) -> float:
        return max((error.worst for error in self.report.errors), default=0.0)

    @property
    def remark(self) -> str:
        """The faults, or layout, base and rescaling of what is right."""
        rope, words = self.exhibit.rope, ", ".join(self.report.faults)
        words = words or f"{rope.layout} {rope.base:g}" + (f" {type(rope.scaling).__name__}" if rope.scaling else "")
        return words if self.as_expected else f"UNEXPECTED: {words}"

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.exhibit.name, "as_expected": self.as_expected} | self.report.to_dict()


def _angles(positions: Any, d: int, base: float) -> Any:
    """m·θ in float32, (n, d/2), as nearly everybody computes it."""
    inverse = 1.0 / np.float32(base) ** (np.arange(0, d, 2, dtype=np.float32) / np.float32(d))
    return positions.astype(np.float32)[:, None] * inverse


def _rotate_half(x: Any) -> Any:
    half = x.shape[-1] // 2
    return np.concatenate((-x[..., half:], x[..., :half]), axis=-1)


def _rotate_adjacent(x: Any) -> Any:
    return np.stack((-x[..., 1::2], x[..., ::2]), axis=-1).reshape(x.shape)


def _halves(x: Any, angles: Any) -> Any:
    """The table concatenated, the features split in halves."""
    table = np.concatenate((angles, angles), axis=-1)
    return (x * np.cos(table) + _rotate_half(x) * np.sin(table)).astype(x.dtype)


# ── Right ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def llama_complex(x: Any, positions: Any) -> Any:
    """Meta's Llama: adjacent features as complex numbers, times e^{imθ}."""
    freqs_cis = np.exp(1j * _angles(positions, x.shape[-1], 500000.0)).astype(np.complex64)
    z = x.astype(np.float32).reshape(*x.shape[:-1], -1, 2)
    turned = (z[..., 0] + 1j * z[..., 1]) * freqs_cis
    return np.stack((turned.real, turned.imag), -1).reshape(x.shape).astype(x.dtype)


def rotate_half(x: Any, positions: Any, base: float = 10000.0) -> Any:
    """Hugging Face's Llama: the table concatenated, the features split in halves, all in the dtype of x."""
    angles = _angles(positions, x.shape[-1], base)
    table = np.concatenate((angles, angles), axis=-1)
    return x * np.cos(table).astype(x.dtype) + _rotate_half(x) * np.sin(table).astype(x.dtype)


def roformer_repeat(x: Any, positions: Any, rotated: Callable[[Any], Any] = _rotate_adjacent) -> Any:
    """RoFormer: the table repeated for adjacent features, Eq. (34)."""
    table = np.repeat(_angles(positions, x.shape[-1], 10000.0), 2, axis=-1)
    return (x * np.cos(table) + rotated(x) * np.sin(table)).astype(x.dtype)


def concatenating(x: Any, positions: Any) -> Any:
    """Adjacent features in, halves out: DeepSeek's, and RoFormer's concatenating form."""
    angles = _angles(positions, x.shape[-1], 10000.0)
    cos, sin, first, second = np.cos(angles), np.sin(angles), x[..., ::2], x[..., 1::2]
    return np.concatenate((first * cos - second * sin, first * sin + second * cos), axis=-1).astype(x.dtype)


def indexed_cache() -> Rotation:
    """A row of (cos, sin) for each position, indexed by position ids, as in vLLM; the table grows as in GPT-NeoX."""
    cache = [np.empty((0, _D), np.float32)]

    def fn(x: Any, positions: Any) -> Any:
        needed = int(positions.max(initial=-1)) + 1
        if needed > len(cache[0]):
            angles = _angles(np.arange(needed), _D, 10000.0)
            cache[0] = np.concatenate((np.cos(angles), np.sin(angles)), axis=-1)
        (cos, sin), (first, second) = (np.split(y, 2, axis=-1) for y in (cache[0][positions], x))
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(x.dtype)

    return fn


def glm_stacked(x: Any, positions: Any) -> Any:
    """GLM: the first r features in adjacent pairs, an axis of their own, stacked again; the rest passes."""
    r = _D // 2
    angles = _angles(positions, r, 10000.0)
    pairs, cos, sin = x[..., :r].reshape(*x.shape[:-1], r // 2, 2), np.cos(angles), np.sin(angles)
    turned = pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 1] * cos + pairs[..., 0] * sin
    return np.concatenate((np.stack(turned, -1).reshape(*x.shape[:-1], r), x[..., r:]), axis=-1).astype(x.dtype)


def llama3_scaled(x: Any, positions: Any) -> Any:
    """Llama 3.1's frequencies as its authors publish them, in halves."""
    out = []
    for f in 500000.0 ** -(np.arange(0, _D, 2) / _D):
        wave = 2 * np.pi / f
        smooth = (8192 / wave - 1) / (4 - 1)
        out.append(f if wave < 8192 / 4 else f / 8 if wave > 8192 else (1 - smooth) * f / 8 + smooth * f)
    return _halves(x, positions.astype(np.float64)[:, None] * np.array(out))


def sectioned(x: Any, positions: Any) -> Any:
    """Qwen2-VL's M-RoPE: a table for each of (time, row, column), of which each section of features takes its own."""
    tables = np.stack([_angles(axis, _D, 1000000.0) for axis in positions])
    cuts = np.split(np.arange(_D // 2), np.cumsum((8, 12, 12))[:-1])
    return _halves(x, np.concatenate([tables[axis][:, cut] for axis, cut in enumerate(cuts)], axis=-1))


# ── Broken ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def turned_by(make: Callable[[Any, Any], Any]) -> Rotation:
    """Halves turned by the angles (n, p) that make(positions, θ) returns; θ in float32, base 10000."""
    inverse = np.float32(10000.0) ** -(np.arange(0, _D, 2, dtype=np.float32) / np.float32(_D))
    return lambda x, positions: _halves(x, make(positions, inverse))


def first_head_only(x: Any, positions: Any) -> Any:
    y = x.copy()
    heads = y.reshape(-1, *y.shape[-2:])
    heads[:1] = rotate_half(heads[:1], positions)
    return heads.reshape(x.shape)


def _bfloat16(values: Any) -> Any:
    """Rounded to 8 bits: what a checkpoint saved in bfloat16 holds."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent)


def yarn_without_factor(x: Any, positions: Any) -> Any:
    i = np.arange(_D // 2)
    ends = [_D * np.log(4096 / (2 * np.pi * turns)) / (2 * np.log(10000.0)) for turns in (32, 1)]
    low, high = np.floor(ends[0]), np.ceil(ends[1])
    ramp = np.clip((i - low) / (high - low), 0, 1)
    return _halves(x, positions[:, None] * (10000.0 ** -(2 * i / _D) * (1 - ramp + ramp / 4)))


def exhibits() -> list[Exhibit]:
    """The gallery: right implementations first, then broken ones."""
    half, adjacent = Rope(_D, 10000.0, "half"), Rope(_D, 10000.0, "interleaved")
    llama3 = Rope(_D, 500000.0, "half", scaling=Llama3(8.0, 1.0, 4.0, 8192))
    grid = Rope(_D, 1000000.0, "half", axes=Axes("sections", (8, 12, 12)))
    yarn, linear = (replace(half, scaling=scaling) for scaling in (YaRN(4.0, 4096), Linear(4.0)))
    right = [
        Exhibit("Llama, complex numbers", llama_complex, Rope(_D, 500000.0, "interleaved")),
        Exhibit("Hugging Face, rotate-half", rotate_half, half),
        Exhibit("rotate-half in float16", rotate_half, half, dtype="float16"),
        Exhibit("RoFormer, repeated table", roformer_repeat, adjacent),
        Exhibit("concatenating form", concatenating, Rope(_D, 10000.0, "interleaved-to-half")),
        Exhibit("concatenating, interleaved", concatenating, adjacent, verdict="equivalent"),
        Exhibit("indexed cache that grows", indexed_cache(), half),
        Exhibit("GLM, stacked, half the head", glm_stacked, replace(adjacent, rotary_dim=_D // 2)),
        Exhibit("Llama 3.1, rescaled", llama3_scaled, llama3),
        Exhibit("Qwen2-VL, three axes", sectioned, grid),
    ]
    wrong: list[tuple[str, Rotation, Rope, str]] = [
        ("GPT-J served as GPT-NeoX", roformer_repeat, half, "wrong pairing"),
        ("repeated table, halves", lambda x, m: roformer_repeat(x, m, _rotate_half), half,
         "two angles in one pair"),
        ("rope_theta not read", rotate_half, Rope(_D, 500000.0, "half"), "wrong base"),
        ("rope_scaling not read", lambda x, m: rotate_half(x, m, 500000.0), llama3, "scaling ignored"),
        ("YaRN without its factor", yarn_without_factor, yarn, "attention factor"),
        ("draft positions, off by one", turned_by(lambda m, t: (m + 1)[:, None] * t), half, "positions one too high"),
        ("bfloat16 frequencies", turned_by(lambda m, t: m[:, None] * _bfloat16(t)), half,
         "bfloat16 inverse frequencies"),
        ("bfloat16 positions", turned_by(lambda m, t: _bfloat16(m * 1.0)[:, None] * t), half, "bfloat16 positions"),
        ("rotated twice", lambda x, m: rotate_half(rotate_half(x, m), m), half, "rotated twice"),
        ("partial model, whole head", rotate_half, replace(half, rotary_dim=_D // 4), "whole head rotated"),
        ("only the first head", first_head_only, half, "heads differ"),
        ("interpolated the wrong way", turned_by(lambda m, t: (m * 4)[:, None] * t), linear, "scaling inverted"),
        ("transposed, on purpose", turned_by(lambda m, t: -m[:, None] * t), half, "direction"),
        ("rows counted instead", turned_by(lambda m, t: np.arange(len(m))[:, None] * t), half, "positions ignored"),
        ("rows and columns exchanged", lambda x, m: sectioned(x, m[[0, 2, 1]]), grid, "wrong axes"),
    ]  # fmt: skip
    return right + [Exhibit(name, fn, rope, (fault,), "wrong") for name, fn, rope, fault in wrong]


def run_gallery() -> Iterator[Row]:
    """Checks every exhibit, one after the other."""
    for exhibit in exhibits():
        yield Row(exhibit, check_rotation(exhibit.fn, exhibit.rope, dtype=exhibit.dtype))
