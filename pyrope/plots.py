"""Pictures of what RoPE does. Each function of `PLOTS` returns a matplotlib Figure; `draw` writes one to a file.

The colours are those of Okabe and Ito, which the colour-blind can tell apart. Lines also differ by dash, and negative
elements of a map are marked, so that everything can be read in grey. Figures are made without pyplot: no window, no
global state. matplotlib is an extra, imported when a picture is drawn.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from . import checks, definition, encodings
from .linear import linear_attention
from .oracle.candidate import Candidate, Unreadable
from .oracle.gallery import roformer_repeat
from .parallel import SCHEMES, shard_positions
from .phase import cos_sin
from .rotation import rotate
from .softmax import attention
from .theta import DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN, check_rope, frequencies, wavelengths

Float64: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Figure: TypeAlias = Any  # matplotlib.figure.Figure, which need not be installed
SUFFIXES = (".png", ".svg")
_BLUE, _RED, _GREEN, _ORANGE, _PURPLE, _GREY = "#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#999999"
_SIGNS = ("#053061", "#4393c3", "white", "#d6604d", "#67001f")  # −most … 0 … most
_LINES: tuple[dict[str, Any], ...] = (
    {"color": "black", "linestyle": "-"},
    {"color": _RED, "linestyle": (0, (6, 2))},
    {"color": _BLUE, "linestyle": (0, (1, 1.3))},
    {"color": _GREEN, "linestyle": (0, (6, 2, 1, 2))},
    {"color": _ORANGE, "linestyle": (0, (3, 1.5))},
    {"color": _PURPLE, "linestyle": (0, (3, 1, 1, 1, 1, 1))},
    {"color": _GREY, "linestyle": "-", "linewidth": 5, "zorder": 0},
)


def _matplotlib(module: str) -> Any:
    return checks.imported(f"matplotlib.{module}", "a picture", "plot")


def _figure(title: str, rows: int, columns: int, size: tuple[float, float], **sharing: Any) -> tuple[Figure, Any]:
    """A figure with its title and its axes, (rows·columns,)."""
    figure = _matplotlib("figure").Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.1)
    figure.suptitle(title)
    return figure, figure.subplots(rows, columns, squeeze=False, **sharing).ravel()


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _map(axes: Any, matrix: Float64, most: float, signed: bool = False) -> Any:
    """Draws a matrix: 0 is white, most dark blue; if signed, most dark red and −most dark blue; NaN is hatched.

    Negative elements of a signed map have a bar: in grey, blue and red are alike.
    """
    axes.patch.set(hatch="////", edgecolor="0.8", facecolor="white")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    if signed:
        row, column = np.nonzero(matrix < -most / 4)
        if row.size:
            size = min(8.0, 110 / len(matrix))
            axes.plot(column, row, color="white", linestyle="none", marker="_", markersize=size)
    signs = _matplotlib("colors").LinearSegmentedColormap.from_list("blue-white-red", _SIGNS)
    low, colours = (-most, signs) if signed else (0.0, "Blues")
    return axes.imshow(matrix, cmap=colours, vmin=low, vmax=most, interpolation="nearest")


def _bar(image: Any, axes: Any, label: str, **options: Any) -> Any:
    """The scale of the shades of a map, below it."""
    panels = list(np.atleast_1d(axes))
    return panels[0].figure.colorbar(
        image, ax=panels, label=label, location="bottom", aspect=20 * len(panels), **options
    )


def _vectors(n: int, head_dim: int, noise: float, seed: int) -> tuple[Float64, Float64]:
    """Queries and keys (1, n, d) at random around one common direction, as those of trained models are."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(head_dim)
    q, k = (common + noise * rng.standard_normal((1, n, head_dim)) for _ in "qk")
    return q, k


def _length(n: Any, least: int = 2) -> int:
    return checks.integer("length", n, least)


# ── Θ and the rotation ───────────────────────────────────────────────────────────────────────────────────────────────


def rotation_figure(vector: Sequence[float] = (1.0, 0.0), count: int = 7) -> Figure:
    """One vector at positions 0, 1, 2, …, turned by a fast and by a slow pair."""
    count, rope = checks.integer("count", count, 1), Rope(4, 100.0, "interleaved")
    if len(vector) != 2 or not 0 < math.hypot(*vector) < math.inf:
        raise ValueError(f"vector must be two numbers, not both 0, was {tuple(vector)}")
    figure, axes = _figure("Position m turns each pair of features by the angle m·θ, Eq. (13)", 1, 2, (8.4, 4.9))
    x = np.broadcast_to([*vector, *vector], (count, 4)).astype(np.float64)
    turned = rotate(x, np.arange(count), rope)  # (count, 4)
    size = math.hypot(*vector)
    for i, (panel, pair) in enumerate(zip(axes, ("the first pair, θ = 1", "the second pair, θ = 0.1"), strict=True)):
        for m, (a, b) in enumerate(turned[:, 2 * i : 2 * i + 2]):
            fraction = 0.25 + 0.7 * m / count  # later positions are darker
            colour = importlib.import_module("matplotlib").colormaps["Blues"](fraction)
            panel.plot([0, a], [0, b], color=colour, linewidth=1.6, marker="o", markevery=[1], markersize=4)
            panel.text(1.14 * a, 1.14 * b, f"{m}", ha="center", va="center", fontsize="small")
        panel.add_patch(_matplotlib("patches").Circle((0, 0), size, fill=False, linestyle=":", color="0.6"))
        panel.set(xlim=(-1.3 * size, 1.3 * size), ylim=(-1.3 * size, 1.3 * size), aspect="equal")
        _label(panel, f"{pair} rad per position", f"feature {2 * i}", f"feature {2 * i + 1}")
    figure.supxlabel("the number at a point is its position m", fontsize="medium")
    return figure


def shift_figure(distance: int = 5, d: int = 16) -> Figure:
    """Sinusoidal positions, Eq. (4), and the matrix that turns each into that of a later position."""
    length = 64
    table, shift = encodings.sinusoidal(np.arange(length), d), encodings.sinusoidal_shift(distance, d)
    title = f"Sinusoidal positions: one matrix T takes p(m) to p(m + {distance}), whatever m is (d = {d})"
    figure, (left, right) = _figure(title, 1, 2, (9.6, 5.2))
    image = left.imshow(table.T, cmap="cividis", vmin=-1.0, vmax=1.0, interpolation="nearest", aspect="auto")
    _label(left, "the encoding p(m), Eq. (4)", "position m", "feature")
    _bar(image, left, "element of p(m)")
    image = _map(right, shift, 1.0, signed=True)
    _label(right, f"T({distance}): a rotation in each pair, as in RoPE", "feature in", "feature out")
    _bar(image, right, "element of T; white is 0, a bar marks the clearly negative ones")
    return figure


def cosines_figure(distances: int = 401) -> Figure:
    """The smallest picture of decay: three cosines and their sum, which falls at first and comes back."""
    at, speeds = np.arange(_length(distances)), (1.0, 0.3, 0.05)
    figure, (axes,) = _figure("Three cosines: their sum S falls at first, and comes back", 1, 1, (9.0, 4.6))
    waves = np.cos(np.multiply.outer(speeds, at))
    for style, speed, wave in zip(_LINES[2:], speeds, waves, strict=False):
        axes.plot(at, wave, label=f"cos {speed:g}Δ" if speed != 1 else "cos Δ", linewidth=1.1, **style)
    total = waves.sum(axis=0)
    axes.plot(at, total, label="their sum S(Δ)", **_LINES[0])
    for m in (m for m in (0, 2, 20, 50, 126, 377) if m < len(at)):  # those of docs/why-positions.md
        axes.plot([m], [total[m]], "o", color="black", markersize=4, zorder=3)
        place = (m, 3.2) if total[m] > 2.9 else (m + 5, total[m])
        paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.8}
        where = {"ha": "center" if total[m] > 2.9 else "left", "va": "center"}
        axes.text(*place, f"S({m}) = {total[m]:.2f}".replace("-", "−"), fontsize="small", bbox=paper, zorder=4, **where)
    axes.set(xlim=(-20, 1.03 * at[-1]), ylim=(-3.2, 3.6))
    _label(axes, "the score of a query and a key of ones, with three pairs", "distance Δ (positions)", "score")
    figure.legend(loc="outside lower center", ncols=4, fontsize="small", handlelength=3.5)
    return figure


def scaled_ropes(factor: float = 8.0, original_length: int = 4096, head_dim: int = 128) -> dict[str, Rope]:
    """A rope with base 10000 for each rescaling, for a context longer by this factor; LongRoPE's list is made up."""
    plain = Rope(head_dim, 10000.0, "half")
    made_up = tuple(float(f) for f in np.geomspace(1, factor, plain.pairs))
    scalings: dict[str, Any] = {
        "none": None,
        "linear": Linear(factor),
        "dynamic NTK": DynamicNTK(factor, original_length),
        "YaRN": YaRN(factor, original_length),
        "Llama 3": Llama3(factor, 1.0, 4.0, original_length),
        "LongRoPE (a list made up)": LongRoPE(made_up, made_up, factor, original_length),
        "proportional, ¼ of the pairs": Proportional(0.25),
    }
    longest = int(factor * original_length)
    return {name: replace(plain, scaling=scaling).at(longest) for name, scaling in scalings.items()}


def _rope(rope: Rope | None, usual: Rope) -> Rope:
    return usual if rope is None else check_rope(rope)


def _compared(rope: Rope | None) -> dict[str, Rope]:
    """All rescalings, or one rope and the same rope without its rescaling."""
    if rope is None:
        return scaled_ropes()
    if check_rope(rope).scaling is None:
        return {"none": rope}
    return {"none": replace(rope, scaling=None), type(rope.scaling).__name__: rope}


def wavelengths_figure(rope: Rope | None = None) -> Figure:
    """How many positions each pair takes for a turn, by rescaling."""
    ropes = _compared(rope)
    title = "each rescaling slows down, for a context of 8 × 4096" if rope is None else f"{list(ropes)[-1]} slows down"
    title = f"Which pairs {title}" if len(ropes) > 1 else "How long the pairs take for a turn"
    one = rope or ropes["none"]
    figure, (left, right) = _figure(f"{title} (d = {one.width}, base {one.base:g})", 1, 2, (9.6, 4.8))
    plain = wavelengths(ropes["none"])
    for style, (name, one) in zip(_LINES, ropes.items(), strict=False):
        turning = np.isfinite(wavelengths(one))
        pair = np.arange(one.pairs)[turning]
        left.plot(pair, wavelengths(one)[turning], label=name, **style)
        right.plot(pair, (wavelengths(one) / plain)[turning], **style)
    left.set_yscale("log")
    right.set_yscale("log", base=2)
    right.yaxis.set_major_formatter("{x:g}")
    still = (
        "" if all(np.isfinite(wavelengths(one)).all() for one in ropes.values()) else "; what does not turn is left out"
    )
    _label(left, f"wavelengths 2π/θ{still}", "pair i (0 is the fastest)", "positions per turn")
    _label(right, "against no rescaling", "pair i (0 is the fastest)", "times slower")
    figure.legend(loc="outside lower center", ncols=4, fontsize="small", handlelength=3.5)
    return figure


def decay_figure(rope: Rope | None = None, distances: int = 256, scores: int = 12) -> Figure:
    """Long-term decay: the curve of Figure 2, and scores, which stay below the bound that it gives."""
    rope, at = _rope(rope, Rope(128, 10000.0, "interleaved")), np.arange(_length(distances))
    title = f"Long-term decay: what bounds a score falls with the distance (d = {rope.width}, base {rope.base:g})"
    figure, (left, right) = _figure(title, 1, 2, (9.6, 4.6))
    curve = definition.decay(*cos_sin(at, rope.rotation_only))  # without the attention factor, as the paper has it
    left.plot(at, curve, color=_BLUE)
    left.set_ylim(bottom=0)
    _label(left, "Figure 2: (2/d)·Σ|Sⱼ₊₁|", "relative distance m − n (positions)", "relative upper bound")
    right.semilogy(at, curve, color=_BLUE, linewidth=2, label="bound")
    alike, *others = _bounded_scores(at, rope, checks.integer("scores", scores, 1))
    for i, score in enumerate(others):
        right.semilogy(
            at, score, color="0.7", linewidth=0.7, label=None if i else f"{scores - 1} random queries and keys"
        )
    right.semilogy(at, alike, label="query and key all ones", **_LINES[1])
    right.set_ylim(bottom=1e-3)
    unit = "|score| / ((d/2)·max|hⱼ₊₁ − hⱼ|)"
    _label(right, "scores stay below the bound, Eq. (37)", "relative distance m − n (positions)", unit)
    figure.legend(loc="outside lower right", ncols=3, fontsize="small", handlelength=3.5)
    return figure


def _bounded_scores(distances: Any, rope: Rope, count: int) -> Float64:
    """|Σ h_j e^{i(m−n)θ_j}| over max|h_{j+1} − h_j|·(r/2), which Eq. (37) bounds by `decay`: (count, n).

    The first is of a query and a key of ones, the others are of random ones.
    """
    rng = np.random.default_rng(0)
    h = np.full((count, rope.pairs), 2.0 + 0j)
    q, k = (rng.standard_normal((2, count - 1, rope.pairs)) for _ in "qk")
    h[1:] = (q[0] + 1j * q[1]) * (k[0] - 1j * k[1])
    cos, sin = cos_sin(distances, rope.rotation_only)
    steps = np.abs(np.diff(np.pad(h, ((0, 0), (0, 1))))).max(axis=-1)
    return np.asarray(np.abs(h @ (cos + 1j * sin).T) / (steps * rope.pairs)[:, None])


def scores_figure(rope: Rope | None = None, distances: int = 1024) -> Figure:
    """The score of equal vectors by their distance, for each rescaling: (a²/p)·Σ cos (m−n)θ."""
    ropes, at = _compared(rope), np.arange(_length(distances))
    plain, others = ropes["none"], [item for item in ropes.items() if item[0] != "none"] or list(ropes.items())
    rows, columns = (2, 3) if len(others) > 1 else (1, 1)
    size = (10.5, 5.6) if len(others) > 1 else (6.4, 4.4)
    title = "How scores fall with the distance (query and key all ones)"
    figure, axes = _figure(title, rows, columns, size, sharex=True, sharey=True)
    for panel, (name, one) in zip(axes, others, strict=True):
        panel.plot(at, _score(at, plain), color=_ORANGE, linewidth=2.2, label="not rescaled")
        if one.scaling is not None:
            panel.plot(at, _score(at, one), color=_BLUE, linewidth=0.9, label="rescaled")
        factor = "" if one.attention_factor == 1 else f", a² = {one.attention_factor**2:.3f}"
        _label(panel, f"{name}{factor}", "distance m − n (positions)", "score / qᵀk")
    axes[0].legend(fontsize="small")
    return figure


def _score(distances: Any, rope: Rope) -> Float64:
    cos, _ = cos_sin(distances, rope)
    return np.asarray(cos.mean(axis=-1) * rope.attention_factor)  # cos has a already: Eq. (16) of two rotated vectors


def precision_figure(rope: Rope | None = None, octaves: int = 20, samples: int = 48) -> Figure:
    """The error of cos mθ and sin mθ by position, for the usual ways to lose digits."""
    rope = _rope(rope, Rope(128, 10000.0, "half"))
    figure, (axes,) = _figure(
        f"How precision dies with position, d = {rope.width}, base {rope.base:g}", 1, 1, (7.6, 4.8)
    )
    by_procedure = precision_errors(rope, octaves, samples)
    for style, marker, (name, (at, errors)) in zip(_LINES, "os^v", by_procedure.items(), strict=False):
        axes.loglog(at, errors, base=2, marker=marker, markersize=4, label=name, **style)
    axes.set_yscale("log", base=10)
    axes.axhline(2, color="0.8", linewidth=6, zorder=0)
    axes.text(1, 2.6, "as wrong as can be", fontsize="small", va="bottom")
    axes.set_ylim(1e-9, 20)
    _label(axes, "the worst pair, in each octave of positions", "position m", "largest error of cos mθ and sin mθ")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small", handlelength=3.5)
    return figure


def precision_errors(rope: Rope, octaves: int, samples: int) -> dict[str, tuple[Float64, Float64]]:
    """For each procedure, the starts of the octaves of positions and the largest error of cos and sin in each."""
    octaves, rng = checks.integer("octaves", octaves, 1), np.random.default_rng(0)
    starts: Any = 2 ** np.arange(octaves)
    within = checks.integer("samples", samples, 1)
    m = np.sort(starts[:, None] + rng.integers(0, starts[:, None], (octaves, within)), axis=1).ravel()
    truth, theta = np.stack(cos_sin(m, rope)), frequencies(rope)
    tables = {
        "rounded once (pyrope)": cos_sin(m, rope, np.float32),
        "float32 angle": _float32_tables(m, theta, rope),
        "bfloat16 frequencies": _float32_tables(m, _bfloat16(theta), rope),
        "bfloat16 positions": _float32_tables(_bfloat16(m), theta, rope),
    }
    worst = {name: np.abs(np.stack(table) - truth).max(axis=(0, 2)) for name, table in tables.items()}
    floor = 2.0**-40  # an error of exactly 0 has no place on a logarithmic axis
    return {name: (starts, np.maximum(off.reshape(octaves, -1).max(axis=1), floor)) for name, off in worst.items()}


def _float32_tables(m: Any, theta: Any, rope: Rope) -> tuple[Any, Any]:
    """cos and sin (n, p) as most libraries make them: θ, the angle and the tables in float32."""
    angle = m.astype(np.float32)[:, None] * theta.astype(np.float32) * rope.direction
    return np.cos(angle) * np.float32(rope.attention_factor), np.sin(angle) * np.float32(rope.attention_factor)


def _bfloat16(x: Any) -> Any:
    """Rounded to the 8 bits of bfloat16, as float64."""
    significand, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(np.rint(np.ldexp(significand, 8)), exponent - 8)


# ── Attention ────────────────────────────────────────────────────────────────────────────────────────────────────────


def attention_figure(rope: Rope | None = None, length: int = 48, noise: float = 0.5, seed: int = 0) -> Figure:
    """The weights of causal softmax attention without positions and with RoPE, Eq. (2)."""
    rope = _rope(rope, Rope(64, 10000.0, "half"))
    q, k = _vectors(_length(length), rope.head_dim, noise, seed)
    at = np.arange(length)
    maps = {
        "without positions: near and far alike": softmax_weights(q, k),
        "with RoPE: near keys weigh more": softmax_weights(rotate(q, at, rope), rotate(k, at, rope)),
    }
    title = f"Who attends to whom: {length} random, similar tokens under causal softmax attention, Eq. (2)"
    figure, axes = _figure(title, 1, 2, (9.2, 5.6))
    most, ticks = 0.25, (0, 0.01, 0.04, 0.09, 0.16, 0.25)
    for panel, (name, weights) in zip(axes, maps.items(), strict=True):
        shown = np.where(np.tri(length, dtype=bool), weights, np.nan)
        image = _map(panel, np.sqrt(shown), math.sqrt(most))
        _label(panel, name, "key n (position)", "query m (position)")
    bar = _bar(image, axes, "weight of a key; hatched: hidden", extend="max")
    bar.set_ticks([math.sqrt(w) for w in ticks], labels=[f"{w:g}" for w in ticks])
    return figure


def softmax_weights(q: Float64, k: Float64) -> Float64:
    """The causal weights (n, n) of one head."""
    mask = np.tri(q.shape[-2], dtype=bool)
    return np.asarray(definition.softmax(definition.attention_scores(q, k, mask, 1 / math.sqrt(q.shape[-1])))[0])


def _matrix(rope: Rope, at: Any) -> Float64:
    """R(Θ, m), Eq. (15): (d, d)."""
    pairs = definition.pairs(rope.layout, rope.width, rope.start)
    return np.asarray(definition.rotation_matrix(*cos_sin(at, rope), *pairs, rope.head_dim))


def linear_weights(q: Float64, k: Float64, rope: Rope) -> Float64:
    """The causal weights (n, n) of one head of linear attention, Eq. (19), with φ = elu + 1."""
    at, phi = np.arange(q.shape[-2]), definition.elu_plus_one
    weights, total = definition.similarities(
        phi(q), phi(k), lambda x: rotate(x, at, rope.rotation_only), np.tri(len(at), dtype=bool)
    )
    return np.asarray((weights / total)[0])


def linear_figure(rope: Rope | None = None, length: int = 48, noise: float = 1.0, seed: int = 0) -> Figure:
    """The effective weights and the row sums of Eq. (19), beside softmax."""
    rope = _rope(rope, Rope(16, 100.0, "half"))  # small: every pair turns in the picture, so that weights go below 0
    q, k = _vectors(_length(length), rope.head_dim, noise, seed)
    at, visible = np.arange(length), np.tri(length, dtype=bool)
    softmax = softmax_weights(rotate(q, at, rope), rotate(k, at, rope))
    weights = linear_weights(q, k, rope)
    sums = weights.sum(axis=-1)
    title = "With RoPE, the weights of linear attention may be negative and no longer add up to 1"
    figure, (left, middle, right) = _figure(title, 1, 3, (12.6, 5.4))
    name = f"linear, Eq. (19), φ = elu + 1, d = {rope.width}, base {rope.base:g}"
    for panel, matrix, title in ((left, softmax, "softmax, Eq. (2)"), (middle, weights, name)):
        image = _map(panel, np.where(visible, matrix * (at + 1)[:, None], np.nan), 3.0)
        _label(panel, title, "key n (position)", "query m (position)")
    query, key = np.nonzero(weights < 0)
    if key.size:
        middle.plot(key, query, color=_RED, linestyle="none", marker="x", markersize=3, label="below 0")
        middle.legend(loc="upper right", fontsize="small")
    _bar(image, [left, middle], "weight of a key, in equal shares 1/(m + 1); hatched: hidden", extend="max")
    negative = weights.clip(max=0).sum(axis=-1)
    lines = {"softmax": softmax.sum(axis=-1), "linear": sums, "linear, those below 0 alone": negative}
    for style, (name, total) in zip(_LINES, lines.items(), strict=False):
        right.plot(at, total, label=name, **style)
    _label(right, "what the weights of a query add up to", "query m (position)", "sum over its keys")
    right.set_ylim(top=1.5)  # room for the legend
    right.legend(loc="upper right", fontsize="small", handlelength=3.5)
    return figure


def time_figure(
    lengths: Sequence[int] = (256, 512, 1024, 2048, 4096), heads: int = 2, head_dim: int = 64, rounds: int = 9
) -> Figure:
    """Time over length, softmax against linear attention, measured while the picture is drawn."""
    lengths = [_length(n) for n in lengths]
    if not lengths:
        raise ValueError("lengths must be at least one, were none: give some, such as (256, 512)")
    seconds = _times_with_one_thread(lengths, heads, head_dim, rounds)
    title = f"Time of causal attention over its length ({heads} heads × {head_dim}, float32, NumPy)"
    figure, (axes,) = _figure(title, 1, 1, (7.2, 4.8))
    for line, marker, (name, taken) in zip(_LINES, "os", seconds.items(), strict=False):
        axes.loglog(lengths, np.array(taken) * 1e3, marker=marker, label=name, **line)
    guides = ((2, "∝ n²", "-"), (1, "∝ n", ":"))
    for (power, name, style), taken in zip(guides, seconds.values(), strict=True):  # from the longest length back
        guide = taken[-1] * 1e3 * (np.array(lengths) / lengths[-1]) ** power
        axes.loglog(lengths, guide, color="0.7", linewidth=1.2, linestyle=style, label=name, zorder=0)
    caption = f"measured on one machine with one thread: the least of {rounds} runs or more"
    _label(axes, caption, "length n (positions)", "processor time (ms)")
    axes.set_xticks(lengths, labels=[f"{n}" for n in lengths])
    axes.minorticks_off()
    axes.legend(fontsize="small", handlelength=3.5)
    return figure


def _times_with_one_thread(lengths: Sequence[int], *sizes: int) -> dict[str, list[float]]:
    """`attention_times`, in a process of its own: BLAS reads its number of threads once, when NumPy is imported."""
    checks.integer("rounds", sizes[-1], 1)
    times = f"from {__name__} import attention_times as times"
    code = f"import json, sys; {times}; print(json.dumps(times(*json.loads(sys.argv[1]))))"
    names = ("PYROPE_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    threads = dict.fromkeys(names, "1")
    here = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([list(lengths), *sizes])],
        env={**os.environ, **threads, "PYTHONPATH": here},
        stdout=subprocess.PIPE,
        check=True,
    )
    taken: dict[str, list[float]] = json.loads(done.stdout)
    return taken


def attention_times(lengths: Sequence[int], heads: int, head_dim: int, rounds: int) -> dict[str, list[float]]:
    """The least processor time of each in seconds, by length; measured in turns, so that a busy moment hits all."""
    rope, rng = Rope(head_dim, 10000.0, "half"), np.random.default_rng(0)
    names = ("softmax, Eq. (2)", "linear, Eq. (19)")
    best = {name: [math.inf] * len(lengths) for name in names}
    inputs = [rng.standard_normal((3, heads, n, head_dim)).astype(np.float32) for n in lengths]
    for _ in range(checks.integer("rounds", rounds, 1)):
        for i, (n, (q, k, v)) in enumerate(zip(lengths, inputs, strict=True)):
            m = np.arange(n)
            for _ in range(max(1, 2048 // n)):  # short runs are easily disturbed
                start = time.process_time()
                attention(rotate(q, m, rope), rotate(k, m, rope), v, causal=True)
                middle = time.process_time()
                linear_attention(q, k, v, m, rope, causal=True)
                for name, spent in zip(names, (middle - start, time.process_time() - middle), strict=True):
                    best[name][i] = min(best[name][i], spent)
    return best


def sharding_figure(length: int = 16, ranks: int = 4) -> Figure:
    """Who computes which score of a causal mask, if a sequence is split among ranks, and how much work each has."""
    n, ranks = _length(length), checks.integer("ranks", ranks, 1)
    title = f"{n} tokens on {ranks} ranks: a rank computes the scores of the queries that it holds"
    figure, axes = _figure(title, 2, 3, (10.6, 7.4), sharey="row")
    colours = _matplotlib("cm").cividis.reversed()  # safe for the colour-blind, and in grey darker from rank to rank
    shades = [colours(rank / max(ranks - 1, 1)) for rank in range(ranks)]
    ink = ["black" if rank < ranks / 2 else "white" for rank in range(ranks)]
    for scheme, above, below in zip(SCHEMES, axes[:3], axes[3:], strict=True):
        shards = [shard_positions(n, rank, ranks, scheme) for rank in range(ranks)]
        owner, work = np.empty(n), [int((shard + 1).sum()) for shard in shards]  # a query at m sees m + 1 keys
        for rank, shard in enumerate(shards):
            owner[shard] = rank
            for m in shard.tolist() if n <= 32 else []:
                above.text(m, m, f"{rank}", ha="center", va="center", color=ink[rank])
        seen = np.where(np.tri(n, dtype=bool), owner[:, None], np.nan)
        above.patch.set(hatch="////", edgecolor="0.8", facecolor="white")
        above.imshow(seen, cmap=colours, vmin=0, vmax=max(ranks - 1, 1), interpolation="nearest")
        _label(above, f"{scheme}: the rank of each query", "key n (position)", "query m (position)")
        bars = below.bar(range(ranks), work, color=shades, edgecolor="black")
        for colour, text in zip(ink, below.bar_label(bars, label_type="center"), strict=True):
            text.set_color(colour)
        below.axhline(sum(work) / ranks, **_LINES[1])
        below.set_xticks(range(ranks))
        _label(below, f"busiest: {max(work) * ranks / sum(work):.2f} × the mean, dashed", "rank", "scores to compute")
    return figure


# ── A candidate ──────────────────────────────────────────────────────────────────────────────────────────────────────


def operator_figure(
    candidate: Callable[..., Any] | None = None, rope: Rope | None = None, position: int = 3, dtype: Any = np.float32
) -> Figure:
    """R(m) of a candidate beside the expected one, read column by column; by default of GPT-J's pairs taken for halves.

    ``candidate`` is fn(x, positions), as for `check_rotation`, and needs a ``rope``.
    """
    if candidate is not None and rope is None:
        raise ValueError("a candidate needs the rope that it is meant to be: give rope=")
    fn, rope = candidate or roformer_repeat, _rope(rope, Rope(16, 10000.0, "half"))
    if candidate is None and rope.axes is not None:
        what = f"without a candidate this picture is of ropes with one axis, this one has {rope.axes.count}"
        raise ValueError(f"{what}: give candidate=, or draw it by pyrope check --plot")
    position = checks.integer("position", position, 0, checks.MAX_POSITION)
    at = np.array(position) if rope.axes is None else position + np.arange(rope.axes.count)  # another on each axis
    actual, expected = operator_of(fn, rope, at, dtype), _matrix(rope, at)
    where = at.tolist() if at.ndim == 0 else tuple(at.tolist())
    title = f"What position {where} does to a head: column j of R is what unit vector j becomes"
    figure, axes = _figure(title, 1, 3, (12.6, 5.4))
    names = (
        f"expected: {rope.layout}, base {rope.base:g}",
        "candidate" if candidate else "candidate: pairs (2i, 2i+1)",
    )
    most = max(1.0, rope.attention_factor)
    beyond = np.abs(actual[np.isfinite(actual)]).max(initial=0) > most + 1e-6
    for panel, name, matrix in zip(axes, names, (expected, actual), strict=False):
        image = _map(panel, matrix, most, signed=True)
        _label(panel, name, "feature in, j", "feature out, i")
    _bar(
        image,
        axes[:2],
        "element (i, j) of R; white is 0, a bar marks the clearly negative ones, hatched is not finite",
        extend="both" if beyond else "neither",
    )
    off = actual - expected
    largest = float(np.abs(off[np.isfinite(off)]).max(initial=0))
    image = _map(axes[2], off, largest or 1.0, signed=True)  # on a scale of its own: most differences are small
    size = f"at most {largest:.2g}" if np.isfinite(off).all() else "not finite"
    _label(axes[2], f"candidate − expected: {size}", "feature in, j", "feature out, i")
    _bar(image, axes[2], "difference of the elements; white is 0")
    return figure


def operator_of(fn: Callable[..., Any], rope: Rope, at: Any, dtype: Any = np.float32) -> Float64:
    """R(m) of a candidate at one position, scalar or (axes,): (d, d), float64."""
    units = np.eye(rope.head_dim, dtype=dtype)[:, None]
    try:
        columns = Candidate(fn)({"x": units, "positions": np.asarray(at)[..., None]}, ["x"])[0]
        return np.asarray(columns[:, 0].T)
    except Unreadable as error:
        raise ValueError(f"the candidate cannot be drawn: {error}") from error


PLOTS: dict[str, Callable[..., Figure]] = {
    "rotation": rotation_figure,
    "shift": shift_figure,
    "cosines": cosines_figure,
    "wavelengths": wavelengths_figure,
    "decay": decay_figure,
    "scores": scores_figure,
    "precision": precision_figure,
    "attention": attention_figure,
    "linear": linear_figure,
    "time": time_figure,
    "sharding": sharding_figure,
    "operator": operator_figure,
}


def check_file(path: str | os.PathLike[str]) -> Path:
    """Returns the path if a picture can be written there; to be called before anything is computed."""
    file = Path(path)
    if file.suffix.lower() not in SUFFIXES:
        raise ValueError(f"a picture must be a {' or '.join(SUFFIXES)} file, was {str(path)!r}")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {file.parent} to put {file.name} into")
    _matplotlib("figure")
    return file


def description(figure: Figure) -> str:
    """What a figure shows, as JSON: its words, and of each line and map the style and a summary of the numbers.

    `draw` writes it into SVG files. A file is up to date if its description is that of the figure drawn anew; the
    strokes themselves differ between versions of matplotlib.
    """
    to_hex = _matplotlib("colors").to_hex
    panels = []
    for axes in figure.axes:
        texts = [axes.get_title(), axes.get_xlabel(), axes.get_ylabel(), *(text.get_text() for text in axes.texts)]
        lines = [
            [str(line.get_label()).replace("_child", "_"), to_hex(line.get_color()), line.get_linestyle(),
             line.get_marker(), _summary(line.get_xdata()), _summary(line.get_ydata())]
            for line in axes.lines
        ]  # fmt: skip
        maps = [[image.get_cmap().name, *image.get_clim(), _summary(image.get_array())] for image in axes.images]
        panels.append({"texts": texts, "lines": lines, "maps": maps})
    legends = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return json.dumps({"title": figure.get_suptitle(), "legends": legends, "panels": panels}, ensure_ascii=False)


def _summary(values: Any) -> list[float]:
    """The number of values, of finite ones, their least, greatest and mean, and a sum that their order changes."""
    numbers = np.ma.filled(np.ma.asarray(values, np.float64), np.nan).ravel()
    finite = np.nan_to_num(numbers)
    least, most = (float(f(finite, initial=0)) for f in (np.min, np.max))
    ordered = float(finite @ np.cos(np.arange(finite.size)))
    return [
        finite.size,
        int(np.isfinite(numbers).sum()),
        *(float(f"{x:.6g}") for x in (least, most, finite.mean(), ordered)),
    ]


def draw(name: str, path: str | os.PathLike[str], **options: Any) -> None:
    """Draws the picture of this name, one of `PLOTS`, into an SVG or PNG file; options are those of its function.

    >>> draw("decay", "decay.jpg")
    Traceback (most recent call last):
    ValueError: a picture must be a .png or .svg file, was 'decay.jpg'
    """
    make = PLOTS[checks.choice("name", name, tuple(PLOTS))]
    file = check_file(path)
    figure = make(**options)
    # Without a date and random ids, the same picture is the same file.
    with importlib.import_module("matplotlib").rc_context({"svg.hashsalt": "pyrope"}):
        about = {"Date": None, "Description": description(figure)} if file.suffix.lower() == ".svg" else None
        figure.savefig(file, dpi=150, metadata=about)
