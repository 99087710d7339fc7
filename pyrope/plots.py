"""Pictures of what RoPE does, and of what a check has read, drawn from numbers by matplotlib.

The functions of `PLOTS` return a Figure each, and `draw` writes one to a file; `operator_map`, `errors_chart` and
`frequencies_chart` are those of the pages of reports. Colours are those of Okabe and Ito, which the colour-blind can
tell apart; lines also differ by dash, so that they can be read in grey.
There is no pyplot: no window, no global state. The engine and matplotlib, an extra, are imported where they are needed.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from . import checks, definition
from .files import atomic_path
from .phase import cos_sin
from .theta import DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN, check_rope, frequencies, wavelengths

Float64: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Figure: TypeAlias = Any  # matplotlib.figure.Figure, which need not be installed
TOKENS = 48  # in maps of attention
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
_LEGEND: dict[str, Any] = {"loc": "outside lower center", "ncols": 4, "fontsize": "small", "handlelength": 3.5}


def _matplotlib(module: str) -> Any:
    return checks.imported(f"matplotlib{module}", "a picture", "plot")


def _figure(title: str, rows: int, columns: int, size: tuple[float, float], **sharing: Any) -> tuple[Figure, Any]:
    """A figure with its title and its axes, (rows·columns,)."""
    figure = _matplotlib(".figure").Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.1)
    figure.suptitle(title)
    return figure, figure.subplots(rows, columns, squeeze=False, **sharing).ravel()


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set(xlabel=x, ylabel=y)


def _map(axes: Any, matrix: Float64, most: float, signed: bool = False) -> Any:
    """Draws a matrix: 0 is white, most dark blue; if signed, most dark red and −most dark blue; NaN is hatched."""
    axes.patch.set(hatch="////", edgecolor="0.8", facecolor="white")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    signs = _matplotlib(".colors").LinearSegmentedColormap.from_list("blue-white-red", _SIGNS)
    low, colours = (-most, signs) if signed else (0.0, "Blues")
    return axes.imshow(matrix, cmap=colours, vmin=low, vmax=most, interpolation="nearest")


def _bar(image: Any, axes: Any, label: str, **options: Any) -> Any:
    """The scale of the shades of a map, below it."""
    panels = list(np.atleast_1d(axes))
    where = {"location": "bottom", "aspect": 20 * len(panels)}
    return panels[0].figure.colorbar(image, ax=panels, label=label, **where, **options)


# ── Θ and the rotation ───────────────────────────────────────────────────────────────────────────────────────────────


def rotation_figure() -> Figure:
    """One vector at positions 0, 1, 2, …, turned by a fast and by a slow pair."""
    figure, axes = _figure("Position m turns each pair of features by the angle m·θ, Eq. (13)", 1, 2, (8.4, 4.9))
    colours, count = _matplotlib("").colormaps["Blues"], 7
    for i, (panel, pair) in enumerate(zip(axes, ("the first pair, θ = 1", "the second pair, θ = 0.1"), strict=True)):
        for m in range(count):
            a, b = math.cos(m * 0.1**i), math.sin(m * 0.1**i)
            shade = colours(0.25 + 0.7 * m / count)  # later positions are darker
            panel.plot([0, a], [0, b], color=shade, linewidth=1.6, marker="o", markevery=[1], markersize=4)
            panel.text(1.14 * a, 1.14 * b, f"{m}", ha="center", va="center", fontsize="small")
        panel.add_patch(_matplotlib(".patches").Circle((0, 0), 1, fill=False, linestyle=":", color="0.6"))
        panel.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
        _label(panel, f"{pair} rad per position", f"feature {2 * i}", f"feature {2 * i + 1}")
    figure.supxlabel("the number at a point is its position m", fontsize="medium")
    return figure


def scaled_ropes() -> dict[str, Rope]:
    """A rope with base 10000 for each rescaling, for a context of 8 × 4096; LongRoPE's list is made up."""
    plain = Rope(128, 10000.0, "half")
    made_up = tuple(float(f) for f in np.geomspace(1, 8, plain.pairs))
    scalings: dict[str, Any] = {
        "none": None, "linear": Linear(8.0), "dynamic NTK": DynamicNTK(8.0, 4096), "YaRN": YaRN(8.0, 4096),
        "Llama 3": Llama3(8.0, 1.0, 4.0, 4096), "LongRoPE (a list made up)": LongRoPE(made_up, made_up, 8.0, 4096),
        "proportional, ¼ of the pairs": Proportional(0.25),
    }  # fmt: skip
    return {name: replace(plain, scaling=scaling).at(8 * 4096) for name, scaling in scalings.items()}


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
    shown, plain, still = rope or ropes["none"], wavelengths(ropes["none"]), ""
    times, title = wavelengths(shown) / plain, "How long the pairs take for a turn"
    if rope is None:
        title = "Which pairs each rescaling slows down, for a context of 8 × 4096"
    elif (np.isfinite(times) & (times > 1)).any():
        title = f"Which pairs {list(ropes)[-1]} slows down"
    figure, (left, right) = _figure(f"{title} (d = {shown.width}, base {shown.base:g})", 1, 2, (9.6, 4.8))
    for style, (name, one) in zip(_LINES, ropes.items(), strict=False):
        turning = np.isfinite(wavelengths(one))
        pair = np.arange(one.pairs)[turning]
        left.plot(pair, wavelengths(one)[turning], label=name, **style)
        right.plot(pair, (wavelengths(one) / plain)[turning], **style)
        still = still if turning.all() else "; what does not turn is left out"
    left.set_yscale("log")
    right.set_yscale("log", base=2)
    right.yaxis.set_major_formatter("{x:g}")
    _label(left, f"wavelengths 2π/θ{still}", "pair i (0 is the fastest)", "positions per turn")
    _label(right, "against no rescaling", "pair i (0 is the fastest)", "times slower")
    figure.legend(**_LEGEND)
    return figure


def decay_figure(rope: Rope | None = None) -> Figure:
    """Long-term decay: the curve of Figure 2, which bounds scores by their distance, Eq. (37)."""
    rope, at = rope or Rope(128, 10000.0, "interleaved"), np.arange(256)
    title = f"What bounds a score falls with the distance (d = {rope.width}, base {rope.base:g})"
    figure, (axes,) = _figure(title, 1, 1, (7.6, 4.6))
    axes.plot(at, definition.decay(*cos_sin(at, rope.rotation_only)), color=_BLUE)  # without the attention factor
    axes.set_ylim(bottom=0)
    _label(axes, "Figure 2: (2/d)·Σ|Sⱼ₊₁|", "relative distance m − n (positions)", "relative upper bound")
    return figure


def scores_figure(rope: Rope | None = None) -> Figure:
    """The score of equal vectors by their distance, for each rescaling: (a²/p)·Σ cos (m−n)θ."""
    ropes, at = _compared(rope), np.arange(400)
    # Tables have one factor a already: Eq. (16) of two rotated vectors has two.
    scores = {name: cos_sin(at, one)[0].mean(axis=-1) * one.attention_factor for name, one in ropes.items()}
    others = [name for name in ropes if name != "none"] or ["none"]
    rows, columns, size = (2, 3, (10.5, 5.6)) if len(others) > 1 else (1, 1, (6.4, 4.4))
    title = "How scores fall with the distance (query and key all ones)"
    figure, axes = _figure(title, rows, columns, size, sharex=True, sharey=True)
    for panel, name in zip(axes, others, strict=True):
        panel.plot(at, scores["none"], color=_ORANGE, linewidth=2.2, label="not rescaled")
        if name != "none":
            panel.plot(at, scores[name], color=_BLUE, linewidth=0.9, label="rescaled")
        factor = ropes[name].attention_factor
        words = "" if factor == 1 else f", a² = {factor**2:.3f}"
        _label(panel, f"{name}{words}", "distance m − n (positions)", "score / qᵀk")
    axes[0].legend(fontsize="small")
    return figure


def precision_figure(rope: Rope | None = None) -> Figure:
    """The error of cos mθ and sin mθ by position, for the usual ways to lose digits."""
    rope, octaves = rope or Rope(128, 10000.0, "half"), 20
    title = f"How precision dies with position, d = {rope.width}, base {rope.base:g}"
    figure, (axes,) = _figure(title, 1, 1, (7.6, 4.8))
    for style, marker, (name, errors) in zip(_LINES, "os^v", precision_errors(rope, octaves).items(), strict=False):
        axes.loglog(2.0 ** np.arange(octaves), errors, base=2, marker=marker, markersize=4, label=name, **style)
    axes.set_yscale("log", base=10)
    axes.axhline(2, color="0.8", linewidth=6, zorder=0)
    axes.text(1, 2.6, "as wrong as can be", fontsize="small", va="bottom")
    axes.set_ylim(1e-9, 20)
    _label(axes, "the worst pair, in each octave of positions", "position m", "largest error of cos mθ and sin mθ")
    figure.legend(**{**_LEGEND, "ncols": 2})
    return figure


def precision_errors(rope: Rope, octaves: int, samples: int = 48) -> dict[str, Float64]:
    """The largest error of cos and sin in each octave of positions, (octaves,), by procedure."""
    rng, starts = np.random.default_rng(0), 2 ** np.arange(octaves)[:, None]
    m = np.sort(starts + rng.integers(0, starts, (octaves, samples)), axis=1).ravel()
    truth, theta = np.stack(cos_sin(m, rope)), frequencies(rope)

    def float32_tables(m: Any, theta: Any) -> Any:
        """As most libraries make them: θ, the angle and the tables in float32."""
        angle = m.astype(np.float32)[:, None] * theta.astype(np.float32) * rope.direction
        return np.stack((np.cos(angle), np.sin(angle))) * np.float32(rope.attention_factor)

    tables = {
        "rounded once (pyrope)": np.stack(cos_sin(m, rope, np.float32)),
        "float32 angle": float32_tables(m, theta),
        "bfloat16 frequencies": float32_tables(m, _bfloat16(theta)),
        "bfloat16 positions": float32_tables(_bfloat16(m), theta),
    }
    worst = {name: np.abs(table - truth).max(axis=(0, 2)).reshape(octaves, -1) for name, table in tables.items()}
    # An error of exactly 0 has no place on a logarithmic axis.
    return {name: np.maximum(errors.max(axis=1), 2.0**-40) for name, errors in worst.items()}


def _bfloat16(x: Any) -> Any:
    """Rounded to the 8 bits of bfloat16, as float64."""
    significand, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(np.rint(np.ldexp(significand, 8)), exponent - 8)


# ── Attention ────────────────────────────────────────────────────────────────────────────────────────────────────────


def causal_weights(rope: Rope, noise: float) -> tuple[Float64, Float64, Float64]:
    """Weights (n, n) of softmax without positions and with RoPE, Eq. (2), and of linear attention, Eq. (19), of
    queries and keys at random around one common direction, as those of trained models are."""
    rng, d = np.random.default_rng(0), rope.head_dim
    common = rng.standard_normal(d)
    q, k = (common + noise * rng.standard_normal((1, TOKENS, d)) for _ in "qk")
    mask, phi, scale = np.tri(TOKENS, dtype=bool), definition.elu_plus_one, d**-0.5

    def turn(x: Any, rope: Rope = rope) -> Any:
        pairs = definition.pairs(rope.layout, rope.width, rope.start)
        return definition.rotate(x, *cos_sin(np.arange(TOKENS), rope), *pairs)

    plain = definition.attention_scores(q, k, mask, scale)
    rotated = definition.attention_scores(turn(q), turn(k), mask, scale)
    weights, total = definition.similarities(phi(q), phi(k), lambda x: turn(x, rope.rotation_only), mask)
    return definition.softmax(plain)[0], definition.softmax(rotated)[0], (weights / total)[0]


def attention_figure(rope: Rope | None = None) -> Figure:
    """The weights of causal softmax attention without positions and with RoPE, Eq. (2)."""
    names = ("without positions: near and far alike", "with RoPE: near keys weigh more")
    title = f"Who attends to whom: {TOKENS} random, similar tokens under causal softmax attention, Eq. (2)"
    figure, axes = _figure(title, 1, 2, (9.2, 5.6))
    maps = causal_weights(rope or Rope(64, 10000.0, "half"), noise=0.5)
    for panel, name, weights in zip(axes, names, maps, strict=False):
        shown = np.where(np.tri(TOKENS, dtype=bool), weights, np.nan)
        image = _map(panel, np.sqrt(shown), 0.5)
        _label(panel, name, "key n (position)", "query m (position)")
    bar = _bar(image, axes, "weight of a key; hatched: hidden", extend="max")
    ticks = (0, 0.01, 0.04, 0.09, 0.16, 0.25)
    bar.set_ticks([math.sqrt(w) for w in ticks], labels=[f"{w:g}" for w in ticks])
    return figure


def linear_figure(rope: Rope | None = None) -> Figure:
    """The effective weights and the row sums of Eq. (19), beside softmax."""
    rope = rope or Rope(16, 100.0, "half")  # small: every pair turns in the picture, so that weights go below 0
    _, softmax, weights = causal_weights(rope, noise=1.0)
    title = "With RoPE, the weights of linear attention may be negative and no longer add up to 1"
    figure, (left, middle, right) = _figure(title, 1, 3, (12.6, 5.4))
    name = f"linear, Eq. (19), φ = elu + 1, d = {rope.width}, base {rope.base:g}"
    at, visible = np.arange(TOKENS), np.tri(TOKENS, dtype=bool)
    for panel, matrix, title in ((left, softmax, "softmax, Eq. (2)"), (middle, weights, name)):
        image = _map(panel, np.where(visible, matrix * (at + 1)[:, None], np.nan), 3.0)
        _label(panel, title, "key n (position)", "query m (position)")
    query, key = np.nonzero(weights < 0)
    if key.size:
        middle.plot(key, query, color=_RED, linestyle="none", marker="x", markersize=3, label="below 0")
        middle.legend(loc="upper right", fontsize="small")
    _bar(image, [left, middle], "weight of a key, in equal shares 1/(m + 1); hatched: hidden", extend="max")
    parts = {"softmax": softmax, "linear": weights, "linear, those below 0 alone": weights.clip(max=0)}
    for style, (name, part) in zip(_LINES, parts.items(), strict=False):
        right.plot(at, part.sum(axis=-1), label=name, **style)
    _label(right, "what the weights of a query add up to", "query m (position)", "sum over its keys")
    right.set_ylim(top=1.5)  # room for the legend
    right.legend(loc="upper right", fontsize="small", handlelength=3.5)
    return figure


def sharding_figure() -> Figure:
    """Who computes which score of a causal mask, if a sequence is split among ranks, and how much work each has."""
    from .parallel import SCHEMES, shard_positions

    n, ranks = 16, 4
    title = f"{n} tokens on {ranks} ranks: a rank computes the scores of the queries that it holds"
    figure, axes = _figure(title, 2, 3, (10.6, 7.4), sharey="row")
    for scheme, above, below in zip(SCHEMES, axes[:3], axes[3:], strict=True):
        shards = [shard_positions(n, rank, ranks, scheme) for rank in range(ranks)]
        owner, work = np.empty(n), [int((shard + 1).sum()) for shard in shards]  # a query at m sees m + 1 keys
        for rank, shard in enumerate(shards):
            owner[shard] = rank
            for m in shard.tolist():
                above.text(m, m, f"{rank}", ha="center", va="center")
        seen = np.where(np.tri(n, dtype=bool), owner[:, None] + 1, np.nan)
        _map(above, seen, 2.0 * ranks)  # of the lighter half of the shades, so that numbers can be read
        _label(above, f"{scheme}: the rank of each query", "key n (position)", "query m (position)")
        below.bar_label(below.bar(range(ranks), work, color=_ORANGE), label_type="center")
        below.axhline(sum(work) / ranks, **_LINES[1])
        below.set_xticks(range(ranks))
        _label(below, f"busiest: {max(work) * ranks / sum(work):.2f} × the mean, dashed", "rank", "scores to compute")
    return figure


# ── What was read of a candidate ─────────────────────────────────────────────────────────────────────────────────────


def operator_figure(rope: Rope | None = None) -> Figure:
    """R(m) of a candidate that takes other pairs, beside the expected one."""
    rope, position = rope or Rope(16, 10000.0, "half"), 3
    other = replace(rope, layout="half" if rope.layout == "interleaved" else "interleaved")
    at = np.array(position) if rope.axes is None else position + np.arange(rope.axes.count)  # another on each axis
    pairs = (definition.pairs(one.layout, one.width, one.start) for one in (other, rope))
    actual, expected = (definition.rotation_matrix(*cos_sin(at, rope), *both, rope.head_dim) for both in pairs)
    where = str(position) if at.ndim == 0 else str(tuple(at.tolist()))
    names = f"expected: {rope.layout}, base {rope.base:g}", f"candidate: {other.layout}"
    return operator_map(where, actual, expected, *names)


def operator_map(
    position: str, measured: Float64, expected: Float64 | None, reference: str = "expected", name: str = "candidate"
) -> Figure:
    """R(m), (d, d), beside the one that it is held to, if there is one, and their difference."""
    matrices = {name: measured} if expected is None else {reference: expected, name: measured}
    title = f"What position {position} does to a head: column j of R is what unit vector j becomes"
    count = 2 * len(matrices) - 1
    figure, axes = _figure(title if count > 1 else f"R(m) at position {position}", 1, count, (4.2 * count, 5.4))
    most = max(1.0, *(float(np.abs(x[np.isfinite(x)]).max(initial=0)) for x in matrices.values()))
    for panel, (words, matrix) in zip(axes, matrices.items(), strict=False):
        image = _map(panel, matrix, most, signed=True)
        _label(panel, words, "feature in, j", "feature out, i")
    words = "element (i, j) of R; white is 0, hatched: not finite"
    _bar(image, axes[: len(matrices)], words if count > 1 else "element (i, j)")
    if expected is not None:
        off = measured - expected
        largest = float(np.abs(off[np.isfinite(off)]).max(initial=0))
        image = _map(axes[2], off, largest or 1.0, signed=True)  # on a scale of its own: most differences are small
        size = f"at most {largest:.2g}" if np.isfinite(off).all() else "not finite"
        _label(axes[2], f"{name.partition(':')[0]} − expected: {size}", "feature in, j", "feature out, i")
        _bar(image, axes[2], "difference of the elements; white is 0")
    return figure


def errors_chart(place: str, at: Any, worst: Float64, beyond: Any, bounds: Mapping[str, Float64]) -> Figure:
    """The largest error at each place, both axes logarithmic, and the most that each grade allows there."""
    figure, (axes,) = _figure(f"The largest absolute error by {place}", 1, 1, (5.6, 4.4))
    for style, (grade, bound) in zip(_LINES[2:], bounds.items(), strict=False):
        axes.plot(at, bound, label=grade, **style)
    _marks(axes, at, worst, beyond, "largest error", "beyond what is accepted")
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(left=-0.2)
    _label(axes, "lines: the most that any output may be off", place, "error")
    return figure


def frequencies_chart(measured: Float64, expected: Float64 | None, allowed: Float64 | None, wrong: Any) -> Figure:
    """Θ by pair, and how far each is off, if as many are expected; those that differ are crosses."""
    compared = expected is not None and allowed is not None and len(expected) == len(measured)
    figure, (left, *right) = _figure("The frequency θ of each pair", 1, 1 + compared, (5.6 + 4.4 * compared, 4.4))
    pair, name = np.arange(len(measured)), "pair i (0 is the fastest)"
    if expected is not None:
        left.plot(np.arange(len(expected)), np.abs(expected), label="expected", **_LINES[2])
    _marks(left, pair, np.abs(measured), wrong, "measured", "measured, another one")
    _label(left, "radians per position", name, "θ")
    for axes in right:
        axes.plot(pair, allowed, label="what rounding explains", **_LINES[3])
        _marks(axes, pair, np.abs(np.abs(measured) / expected - 1), wrong, "", "")
        _label(axes, "how far off, relative to the expected one", name, "|measured/expected − 1|")
    return figure


def _marks(axes: Any, x: Any, y: Float64, wrong: Any, *names: str) -> None:
    """Dots, and crosses for what is wrong, on a logarithmic axis: what is 0 or not finite stands at its ends."""
    lines = [line.get_ydata() for line in axes.lines]
    usable = np.concatenate([values[np.isfinite(values) & (values > 0)] for values in (np.asarray(y), *lines)])
    low, high = (usable.min() / 3, usable.max() * 3) if usable.size else (1e-8, 1.0)
    low = max(low, high * 1e-12)
    y = np.clip(np.where(np.isnan(y), np.inf, y), low, high)
    for chosen, marker, colour, name in zip((~wrong, wrong), ".x", ("black", _RED), names, strict=True):
        if chosen.any():
            axes.plot(x[chosen], y[chosen], linestyle="none", marker=marker, color=colour, label=name or None)
    axes.set(yscale="log", ylim=(low / 1.5, high * 1.5))
    axes.legend(fontsize="small")


# ── Files ────────────────────────────────────────────────────────────────────────────────────────────────────────────

_FIGURES = (rotation_figure, wavelengths_figure, decay_figure, scores_figure, precision_figure,
            attention_figure, linear_figure, sharding_figure, operator_figure)  # fmt: skip
PLOTS: dict[str, Callable[..., Figure]] = {make.__name__.removesuffix("_figure"): make for make in _FIGURES}


def check_path(path: str | os.PathLike[str], what: str, suffixes: tuple[str, ...]) -> Path:
    """Returns the path if such a file can be written there; to be called before anything is computed."""
    file = Path(path)
    if file.suffix.lower() not in suffixes:
        raise ValueError(f"{what} must be a {' or '.join(suffixes)} file, was {str(path)!r}")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {file.parent} to put {file.name} into")
    return file


def svg(figure: Figure) -> str:
    """The picture as SVG with text as text, paths to a tenth of a point, no date and no random ids: the same picture is
    the same file, and a small one."""
    text, options = io.StringIO(), {"svg.hashsalt": "pyrope", "svg.fonttype": "none"}
    with _matplotlib("").rc_context(options):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return re.sub(r'\bd="([^"]*)"', lambda path: f'd="{_rounded(path[1])}"', text.getvalue())


def _rounded(path: str) -> str:
    return re.sub(r"-?\d+\.\d+", lambda x: f"{float(x[0]):.1f}".removesuffix(".0"), " ".join(path.split()))


def draw(name: str, path: str | os.PathLike[str], rope: Rope | None = None) -> None:
    """Draws the picture of this name, one of `PLOTS`, into an SVG or PNG file; of a rope, if it shows one.

    >>> draw("decay", "decay.jpg")
    Traceback (most recent call last):
    ValueError: a picture must be a .png or .svg file, was 'decay.jpg'
    """
    make = PLOTS[checks.choice("name", name, tuple(PLOTS))]
    file = check_path(path, "a picture", (".png", ".svg"))
    figure = make() if rope is None else make(rope=check_rope(rope))
    with atomic_path(file) as draft:
        if file.suffix.lower() == ".svg":
            draft.write_text(svg(figure), encoding="utf-8")
        else:
            figure.savefig(draft, dpi=150, format="png")
