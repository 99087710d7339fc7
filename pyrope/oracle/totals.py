"""What the numerators of weights are divided by, and how often each key counts, against what it should be."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..backend import Array
from . import ways
from .candidate import UNIT
from .measured import Measured
from .numerators import Numerators
from .report import Finding


def totals(m: Measured, made: Numerators, masked: bool) -> Iterator[Finding]:
    """The sum that divides, which is that of the keys that are seen; ``masked``: these are not the right ones."""
    number, plain, c, close = made.number, made.plain, made.fit.factors, m.close / 5
    sees, rows = m.sees if masked else m.visible, (c != 0) & m.sees.any(axis=-1, keepdims=True) & ~m.bad
    count = 1.0 if m.linear else np.rint(np.clip(np.nan_to_num(m.weights / (c * number), nan=1), 1, 9))
    right, total = np.where(sees, count * plain, 0).sum(axis=-1, keepdims=True), np.where(rows, 1 / c, np.nan)
    size = np.where(sees, np.abs(plain), 0).sum(axis=-1, keepdims=True)  # what a sum of both signs is exact to
    if not rows.any() or (np.abs(total - right) < close * (size if m.linear else right))[rows].all():
        return
    top = np.zeros_like(c) if m.linear else m.top(m.right.scores)
    if m.linear and _off(total, m.right.total) < close:
        return  # numerators of other features, over the right sum
    for step, how, other in ways.totals(m.call, ways.Sums(sees, m.visible, number, plain, top)):
        if _off(total, other) < 10 * close and np.nanmax(np.abs(np.where(rows, other / right - 1, 0))) > 0.3:
            yield Finding(f"{step}: {how}", m.sums())
            return
    yield _times(m, total / right) or _added(m, total, right, np.exp(top)) or _another(m, total / right)


def _off(total: Array, other: Array) -> float:
    return float(np.nanmax(np.abs(total / other - 1)))


def _even(x: Array, close: float) -> bool:
    return bool(np.nanmin(x) > 0 and np.nanmax(x) / np.nanmin(x) < 1 + close)


def _spread(ratio: Array) -> str:
    return f"they are divided by {np.nanmin(ratio):.5g} to {np.nanmax(ratio):.5g} times the right sum"


def _times(m: Measured, ratio: Array) -> Finding | None:
    """All weights times one number."""
    times = 1 / float(np.nanmedian(ratio))
    if not _even(ratio, 2 * m.close) or abs(times - 1) < 5 * m.close:
        return None
    factor = 1.0 if m.spec.rope is None else m.spec.rope.attention_factor
    applied = factor != 1 and abs(times / factor**2 - 1) < 20 * m.close
    how = "attention factor applied" if applied else f"times {times:.4g}"
    return Finding(f"output: {how}", f"all weights are {times:.5g} times the right ones")


def _added(m: Measured, total: Array, right: Array, unit: Array) -> Finding | None:
    """One number that is added to the sum, or the least that it may be."""
    ratio, more, least = total / right, total - right, np.nanmin(total)
    for x in (more, more * unit):
        if _even(x, max(1e3 * m.close, 0.1)):
            number = float(np.nanmedian(x))
            zeros = x is not more and number > 1.5 and abs(number - round(number)) < 1e-3
            return Finding(f"normaliser: {number:.3g} added{', as by so many keys of zeros' * zeros}", _spread(ratio))
    low = ratio > 1 + m.close / 5
    if low.sum() > 2 and np.abs(total[low] / least - 1).max() < m.close:
        return Finding(f"normaliser: at least {least:.4g}", _spread(ratio))
    return None


def _another(m: Measured, ratio: Array) -> Finding:
    """A sum with few digits, if it is too large as often as too small; or by its place."""
    off = float(np.sqrt(np.nanmean(np.square(ratio - 1))))
    near = [name for name, u in UNIT.items() if 0.1 * u < off < 8 * u and u > UNIT[m.spec.dtype.name]]
    if near and abs(np.nanmean(ratio) - 1) < 0.7 * off:
        return Finding(f"precision: normaliser as if rounded to {near[0]}", _spread(ratio))
    return Finding("normaliser: another sum", _spread(ratio) + m.where(np.abs(ratio - 1) > m.close / 5))


def counts(m: Measured, made: Numerators) -> Iterator[Finding]:
    """How often each key is counted, where not once."""
    some = m.some & (np.abs(made.number) > 0.02 * np.abs(made.number).max(axis=-1, keepdims=True))
    wrong = some & ~made.fit.near
    if wrong.sum() < 0.02 * some.sum():
        return
    i, j = m.call.places[0][:, None], m.call.places[1]
    count = np.where(some, m.weights / (made.fit.factors * made.number), np.nan)
    for block in ways.blocks(len(j)):
        same = i // block == j // block
        inside, outside = np.where(same, count, np.nan), np.where(same, np.nan, count)
        twice = abs(np.nanmedian(inside) / np.nanmedian(outside) - 2) < 0.02
        if twice and max(np.nanstd(inside), np.nanstd(outside)) < 0.3:
            yield Finding(f"blocks: own block of {block} counted twice", "its weights are twice as large as the others")
            return
    words = (
        f"{int(wrong.sum())} of {int(some.sum())} weights are {np.nanmin(count):.3g} to {np.nanmax(count):.3g} times"
    )
    yield Finding("keys: counted unevenly", f"{words} what their row says{m.where(wrong, some)}")
