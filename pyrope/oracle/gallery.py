"""The well-known forms of RoPE, written out in NumPy as people write them, and a dozen famous broken ones.

Each is a candidate fn(x, positions) with the Rope that it is meant to be, and what the oracle must say of it. None of
them uses pyrope's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..theta import Axes, Linear, Llama3, Rope, YaRN
from .ask import Candidate
from .checking import check_rotation
from .identification import identify
from .report import Report

_D = 64


class Exhibit(NamedTuple):
    """A candidate, the rope that it is meant to be, and what the oracle must say of it."""

    name: str
    fn: Candidate
    rope: Rope
    verdict: str = "right"
    faults: tuple[str, ...] = ()  # if it is wrong: all that the report must name
    dtype: str = "float32"


class Row(NamedTuple):
    """One line of the gallery's report."""

    name: str
    report: Report
    identified: Rope | None  # what `identify` reads from it; with several axes, when all have the same position
    as_expected: bool

    @property
    def remark(self) -> str:
        """The faults, or layout, base and rescaling as they were identified."""
        rope, words = self.identified, ", ".join(self.report.faults)
        if not words and rope is not None:
            words = f"{rope.layout} {rope.base:g}" + (f" {type(rope.scaling).__name__}" if rope.scaling else "")
        return words if self.as_expected else f"UNEXPECTED: {words}"


def _angles(positions: Any, d: int, base: float) -> Any:
    """m·θ in float32, (n, d/2), as nearly everybody computes it."""
    inverse = 1.0 / np.float32(base) ** (np.arange(0, d, 2, dtype=np.float32) / np.float32(d))
    return positions.astype(np.float32)[:, None] * inverse


def llama_complex(x: Any, positions: Any) -> Any:
    """Meta's Llama: adjacent features as complex numbers, times e^{imθ}."""
    freqs_cis = np.exp(1j * _angles(positions, x.shape[-1], 500000.0)).astype(np.complex64)
    z = x.astype(np.float32).reshape(*x.shape[:-1], -1, 2)
    turned = (z[..., 0] + 1j * z[..., 1]) * freqs_cis
    return np.stack((turned.real, turned.imag), -1).reshape(x.shape).astype(x.dtype)


def _rotate_half(x: Any) -> Any:
    half = x.shape[-1] // 2
    return np.concatenate((-x[..., half:], x[..., :half]), axis=-1)


def _rotate_adjacent(x: Any) -> Any:
    return np.stack((-x[..., 1::2], x[..., ::2]), axis=-1).reshape(x.shape)


def rotate_half(x: Any, positions: Any, base: float = 10000.0) -> Any:
    """Hugging Face's Llama: the table concatenated, the features split in halves, all in the dtype of x."""
    angles = _angles(positions, x.shape[-1], base)
    table = np.concatenate((angles, angles), axis=-1)
    return x * np.cos(table).astype(x.dtype) + _rotate_half(x) * np.sin(table).astype(x.dtype)


def roformer_repeat(x: Any, positions: Any) -> Any:
    """RoFormer: the table repeated for adjacent features, Eq. (34)."""
    table = np.repeat(_angles(positions, x.shape[-1], 10000.0), 2, axis=-1)
    return (x * np.cos(table) + _rotate_adjacent(x) * np.sin(table)).astype(x.dtype)


def concatenating(x: Any, positions: Any) -> Any:
    """Adjacent features in, halves out: DeepSeek's, and RoFormer's concatenating form."""
    angles = _angles(positions, x.shape[-1], 10000.0)
    cos, sin, first, second = np.cos(angles), np.sin(angles), x[..., ::2], x[..., 1::2]
    return np.concatenate((first * cos - second * sin, first * sin + second * cos), axis=-1).astype(x.dtype)


def _cos_sin_cache() -> Any:
    """A row of (cos, sin) for each position: (131072, d)."""
    angles = _angles(np.arange(131072), _D, 10000.0)
    return np.concatenate((np.cos(angles), np.sin(angles)), axis=-1)


def stacked_cache() -> Candidate:
    """A cache of (cos, sin) rows, indexed by position ids, for features split in halves: vLLM's for GPT-NeoX."""
    cache = _cos_sin_cache()

    def fn(x: Any, positions: Any) -> Any:
        cos, sin = np.split(cache[positions], 2, axis=-1)
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(x.dtype)

    return fn


def interleaved_cache() -> Candidate:
    """The same cache for adjacent features, each entry repeated, as Hugging Face does it for GPT-J."""
    cache = _cos_sin_cache()

    def fn(x: Any, positions: Any) -> Any:
        cos, sin = (np.repeat(part, 2, axis=-1) for part in np.split(cache[positions], 2, axis=-1))
        return (x * cos + _rotate_adjacent(x) * sin).astype(x.dtype)

    return fn


def whole_head_stacked(x: Any, positions: Any) -> Any:
    """GLM's form over the whole head: adjacent pairs as an axis of their own, the turned ones stacked again."""
    return _stacked(x, positions, x.shape[-1])


def glm_stacked(x: Any, positions: Any) -> Any:
    """GLM: the first half of the features in adjacent pairs, stacked; the rest passes."""
    return _stacked(x, positions, x.shape[-1] // 2)


def _stacked(x: Any, positions: Any, r: int) -> Any:
    angles = _angles(positions, r, 10000.0)
    pairs = x[..., :r].reshape(*x.shape[:-1], r // 2, 2)
    cos, sin = np.cos(angles), np.sin(angles)
    turned = np.stack(
        (pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 1] * cos + pairs[..., 0] * sin), axis=-1
    ).reshape(*x.shape[:-1], r)
    return np.concatenate((turned, x[..., r:]), axis=-1).astype(x.dtype)


def growing_cache() -> Candidate:
    """Rotate-half with a table that grows when a longer sequence comes: GPT-NeoX's."""
    tables = [np.empty((2, 0, _D), np.float32)]

    def fn(x: Any, positions: Any) -> Any:
        needed = int(positions.max()) + 1
        if needed > tables[0].shape[1]:
            angles = _angles(np.arange(needed), _D, 10000.0)
            table = np.concatenate((angles, angles), axis=-1)
            tables[0] = np.stack((np.cos(table), np.sin(table)))
        cos, sin = tables[0][:, positions]
        return (x * cos + _rotate_half(x) * sin).astype(x.dtype)

    return fn


def llama3_scaled(x: Any, positions: Any) -> Any:
    """Llama 3.1's frequencies as its authors publish them, in halves."""
    w = 500000.0 ** -(np.arange(0, _D, 2) / _D)
    out = []
    for f in w:
        wave = 2 * np.pi / f
        smooth = (8192 / wave - 1) / (4 - 1)
        out.append(f if wave < 8192 / 4 else f / 8 if wave > 8192 else (1 - smooth) * f / 8 + smooth * f)
    return _halves(x, positions.astype(np.float64)[:, None] * np.array(out))


def sectioned(x: Any, positions: Any) -> Any:
    """Qwen2-VL's M-RoPE: a table for each of (time, row, column), of which each section of features takes its own."""
    tables = np.stack([_angles(axis, _D, 1000000.0) for axis in positions])
    cuts = np.split(np.arange(_D // 2), np.cumsum((8, 12, 12))[:-1])
    return _halves(x, np.concatenate([tables[axis][:, cut] for axis, cut in enumerate(cuts)], axis=-1))


def _halves(x: Any, angles: Any) -> Any:
    table = np.concatenate((angles, angles), axis=-1)
    return (x * np.cos(table) + _rotate_half(x) * np.sin(table)).astype(x.dtype)


def _broken(make: Callable[[Any, Any], Any]) -> Candidate:
    """Halves turned by the angles (n, p) that make(positions, θ) returns; θ in float32, base 10000."""
    inverse = np.float32(10000.0) ** -(np.arange(0, _D, 2, dtype=np.float32) / np.float32(_D))
    return lambda x, positions: _halves(x, make(positions, inverse))


def repeated_with_halves(x: Any, positions: Any) -> Any:
    table = np.repeat(_angles(positions, _D, 10000.0), 2, axis=-1)
    return (x * np.cos(table) + _rotate_half(x) * np.sin(table)).astype(x.dtype)


def first_head_only(x: Any, positions: Any) -> Any:
    y = x.copy()
    heads = y.reshape(-1, *y.shape[-2:])
    heads[0] = rotate_half(heads[0], positions)
    return heads.reshape(x.shape)


def _bfloat16(values: Any) -> Any:
    """Rounded to 8 bits: what a checkpoint saved in bfloat16 holds."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent)


def _yarn_without_factor(x: Any, positions: Any) -> Any:
    i = np.arange(_D // 2)
    ends = [_D * np.log(4096 / (2 * np.pi * turns)) / (2 * np.log(10000.0)) for turns in (32, 1)]
    low, high = np.floor(ends[0]), np.ceil(ends[1])
    ramp = np.clip((i - low) / (high - low), 0, 1)
    return _halves(x, positions[:, None] * (10000.0 ** -(2 * i / _D) * (1 - ramp + ramp / 4)))


def exhibits() -> list[Exhibit]:
    """The gallery: right implementations first, then broken ones."""
    half, adjacent = Rope(_D, 10000.0, "half"), Rope(_D, 10000.0, "interleaved")
    long = Rope(_D, 500000.0, "half")
    llama3 = Rope(_D, 500000.0, "half", scaling=Llama3(8.0, 1.0, 4.0, 8192))
    yarn = Rope(_D, 10000.0, "half", scaling=YaRN(4.0, 4096))
    grid = Rope(_D, 1000000.0, "half", axes=Axes("sections", (8, 12, 12)))
    return [
        Exhibit("Llama, complex numbers", llama_complex, Rope(_D, 500000.0, "interleaved")),
        Exhibit("Hugging Face, rotate-half", rotate_half, half),
        Exhibit("rotate-half in float16", rotate_half, half, dtype="float16"),
        Exhibit("RoFormer, repeated table", roformer_repeat, adjacent),
        Exhibit("concatenating form", concatenating, Rope(_D, 10000.0, "interleaved-to-half")),
        Exhibit("concatenating, interleaved", concatenating, adjacent, "equivalent"),
        Exhibit("indexed cache of (cos, sin)", stacked_cache(), half),
        Exhibit("indexed cache, interleaved", interleaved_cache(), adjacent),
        Exhibit("GLM, stacked, whole head", whole_head_stacked, adjacent),
        Exhibit("GLM, stacked, half the head", glm_stacked, Rope(_D, 10000.0, "interleaved", _D // 2)),
        Exhibit("rotate-half, growing cache", growing_cache(), half),
        Exhibit("Llama 3.1, rescaled", llama3_scaled, llama3),
        Exhibit("Qwen2-VL, three axes", sectioned, grid),
        Exhibit("GPT-J served as GPT-NeoX", roformer_repeat, half, "wrong", ("wrong pairing",)),
        Exhibit("repeated table, halves", repeated_with_halves, half, "wrong", ("repeated table with split features",)),
        Exhibit("rope_theta not read", rotate_half, long, "wrong", ("wrong base",)),
        Exhibit("rope_scaling not read", lambda x, m: rotate_half(x, m, 500000.0), llama3, "wrong",
                ("scaling ignored",)),
        Exhibit("YaRN without its factor", _yarn_without_factor, yarn, "wrong", ("attention factor missing",)),
        Exhibit("draft positions, off by one", _broken(lambda m, t: (m + 1)[:, None] * t), half, "wrong",
                ("positions one too high",)),
        Exhibit("bfloat16 frequencies", _broken(lambda m, t: m[:, None] * _bfloat16(t)), half, "wrong",
                ("bfloat16 inverse frequencies",)),
        Exhibit("bfloat16 positions", _broken(lambda m, t: _bfloat16(m.astype(np.float64))[:, None] * t), half, "wrong",
                ("bfloat16 positions",)),
        Exhibit("rotated twice", lambda x, m: rotate_half(rotate_half(x, m), m), half, "wrong", ("rotated twice",)),
        Exhibit("partial model, whole head", rotate_half, Rope(_D, 10000.0, "half", _D // 4), "wrong",
                ("whole head rotated",)),
        Exhibit("only the first head", first_head_only, half, "wrong", ("only the first head rotated",)),
        Exhibit("interpolated the wrong way", _broken(lambda m, t: (m * 4)[:, None] * t),
                Rope(_D, 10000.0, "half", scaling=Linear(4.0)), "wrong", ("linear factor inverted",)),
        Exhibit("transposed, on purpose", _broken(lambda m, t: -m[:, None] * t), half, "wrong", ("direction",)),
        Exhibit("rows counted instead", _broken(lambda m, t: np.arange(len(m))[:, None] * t), half, "wrong",
                ("positions ignored",)),
        Exhibit("rows and columns exchanged", lambda x, m: sectioned(x, m[[0, 2, 1]]), grid, "wrong",
                ("axes in another order",)),
    ]  # fmt: skip


def run_gallery() -> Iterator[Row]:
    """Checks and identifies every exhibit, one after the other."""
    for exhibit in exhibits():
        report = check_rotation(exhibit.fn, exhibit.rope, dtype=exhibit.dtype)
        identified = identify(_of_text(exhibit), _D, dtype=exhibit.dtype).rope
        judged = report.verdict == exhibit.verdict and report.faults == exhibit.faults
        known = exhibit.verdict != "right" or identified == replace(exhibit.rope, axes=None)
        yield Row(exhibit.name, report, identified, judged and known)


def _of_text(exhibit: Exhibit) -> Candidate:
    """The exhibit as a function of positions (n,): every axis of its rope has the same ones, as in text."""
    axes = exhibit.rope.axes
    return exhibit.fn if axes is None else lambda x, m: exhibit.fn(x, np.repeat(m[None], axes.count, axis=0))


Piece, pieces = Exhibit, exhibits  # their names in 0.1.0
