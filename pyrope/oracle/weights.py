"""The weights of attention, read with values that are unit vectors, taken apart and compared factor by factor.

W = seen · numerator / total, of softmax attention and of Eq. (19) alike. Each factor is measured and compared by itself
(`masks`, `numerators`, and the totals here), so that two mistakes need no search over pairs. What is in no list is told
by its step, its place and its numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .. import definition
from ..backend import Array
from .candidate import UNIT
from .measured import Ask, Measured, as_rounded, blocks, coarser, elsewhere, masked, masks, read, where
from .numerators import Numerators, fits, numerators, rounded
from .report import Finding, side_by_side
from .steps import Allowed, Call, Spec, same, weigh
from .turning import products, right_way
from .values import FEW, NOT_SUMMED, Values, order, reordered, sources

MOST_BLANK = 2**16  # keys of zeros that a kernel may pad with
# The relative error of a measured weight; a second, finer look is taken if the first one finds nothing.
CLOSE = {"float64": (1e-4, 1e-7), "float32": (1e-4, 8e-6), "float16": (1e-2, 2e-3), "bfloat16": (5e-2, 1e-2)}


def diagnose(spec: Spec, ask: Ask, call: Call, answer: Array, allowed: Allowed) -> list[Finding]:
    """What is wrong with the answer to a call, causes before consequences; may raise `Unreadable`."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rows of NaN alone have no median
        if whole := next(_whole(spec, call, answer, allowed), None):
            return [whole]
        if (places := order(ask, call)) is not None:
            back = np.argsort(places)
            rest, right = answer[..., back], (allowed.error(answer[..., back]) <= allowed.worst).all()
            others = [] if right else diagnose(spec, lambda call: ask(call)[..., back], call, rest, allowed)
            return [reordered(places), *others]
        values, taken = Values(spec, ask, call, *read(ask, call)), list[Finding]()
        listed, due = _carried(values, answer, allowed) if np.isfinite(answer).any() else ([*values.added()], call)
        if any(x.fault == NOT_SUMMED or "mixed" in x.fault for x in listed):  # so that there are no weights
            return listed
        for close in CLOSE[spec.dtype.name]:
            taken = apart(Measured(spec, values.ask, call, values.weights, close, due))
            if taken or listed:
                break
        if any(x.fault.startswith("precision") for x in taken):  # of a state or a sum, that shows in values, too
            listed = [x for x in listed if x.fault != FEW]
        if any(x.fault.startswith("output") for x in listed):  # which is rounded where it is a weight, too
            taken = [x for x in taken if not x.fault.startswith("precision")]
        if np.isfinite(answer).all() and listed:  # what is not finite are then the weights of values of zeros
            taken = [x for x in taken if x.fault != "not finite"]
        return [*listed, *taken] or values.changed(answer)


def _carried(values: Values, answer: Array, allowed: Allowed) -> tuple[list[Finding], Call]:
    """What becomes of values on their way to the output, and the call with what each head reads."""
    spec, due, close = values.spec, values.call, CLOSE[values.spec.dtype.name][0]
    listed = [*values.added()]
    if not values.summed(due, answer, allowed):
        listed += values.turned()
    measured = Measured(spec, values.ask, due, values.weights, close, due)
    made = fits(measured) or _functions(measured) is not None
    if not (made and values.summed(due, answer, allowed)):
        moved, due = sources(values.ask, due, 10 * close)
        listed += moved
    mixed = any("mixed" in x.fault for x in listed)
    return [*listed, *([] if mixed or values.summed(due, answer, allowed) else values.changed(answer))], due


def _whole(spec: Spec, call: Call, answer: Array, allowed: Allowed) -> Iterator[Finding]:
    """Mistakes that predict the answer, in all its numbers."""
    room = 2 * allowed.worst.max(axis=-1, keepdims=True) + allowed.worst.max() / 4
    error = float(np.square(answer - allowed.truth).mean())
    if not call.alike and (words := elsewhere(allowed.truth, answer, 2 * float(allowed.worst.max()))):
        yield Finding("output: in other places", words)
    for fault, other in _other_calls(call):
        out = weigh(spec, other).out
        near = (np.abs(out - answer) <= room + CLOSE[spec.dtype.name][1] * np.abs(out)).all()
        if near and np.square(out - answer).mean() <= 0.01 * min(error, np.square(answer).mean()):
            yield Finding(fault, f"all {answer.size} outputs are those of this mistake")


def _other_calls(call: Call) -> Iterator[tuple[str, Call]]:
    """Arguments that may be taken for those that are given."""
    k, v = call.k, call.v
    yield "output: zeros", replace(call, v=np.zeros_like(v))
    yield "values: keys used as values", replace(call, v=k)
    yield "values: keys and values exchanged", replace(call, k=v, v=k)
    for by, words, edge in ((1, "before", np.s_[:1]), (-1, "after", np.s_[-1:])):
        cut = np.roll(v, by, axis=2)
        yield f"values: of the token {words}", replace(call, v=cut.copy())
        cut[:, :, edge] = 0
        yield f"values: of the token {words}", replace(call, v=cut)


def apart(m: Measured) -> list[Finding]:
    """What differs in which factor of the weights."""
    lost, empty = list[Finding](), ~m.visible.any(axis=-1, keepdims=True)
    if m.bad.any():
        words = f"{m.bad.sum()} of {m.bad.size} rows of weights are not finite"
        words += where(m.call, m.bad, np.ones(m.sees.shape, bool))
        lost.append(Finding("empty rows: NaN" if (m.bad <= empty).all() else "not finite", words))
    if m.bad.all():
        return lost
    if not m.sees.any():
        return [*lost, Finding("values: not used", "the output does not depend on the values")]
    if whole := _dropped(m) or _functions(m):
        return [*lost, whole]
    made = numerators(m)
    hidden = _level(m, made)
    few = any("precision" in x.fault for x in made.found)  # what is rounded to 0 looks hidden
    others = [hidden] if hidden else [] if few else masked(m, _telling(m, made))
    listed = [*lost, *others, *made.found]
    if made.number is not None and not hidden and not few:
        uneven = list(counts(m, made))
        listed += [*uneven, *(totals(m, made, bool(others)) if not (uneven and m.linear) else ())]
    return listed


def _dropped(m: Measured) -> Finding | None:
    """Weights that are zeros at random, while all others are too large by the factor that makes up for it."""
    large = m.visible & (np.abs(m.right.weights) > 1e-3) & ~m.bad
    share = np.where(large & m.sees, m.weights / m.right.weights, np.nan)
    zeros, factor = float((large & ~m.sees).sum() / max(large.sum(), 1)), float(np.nanmedian(share))
    alike = np.nanmax(np.abs(share / factor - 1), initial=0) < 10 * m.close
    if not (0.001 < zeros < 0.9 and alike and abs(factor * (1 - zeros) - 1) < 0.2 and factor > 1.0005):
        return None
    return Finding("dropout", f"{zeros:.1%} of the weights are zeros, and all others the right ones times {factor:.4g}")


def _functions(m: Measured) -> Finding | None:
    """Other functions of the right scores than their softmax, which predict all weights."""

    def off(w: Array, other: Array) -> float:
        return float((np.abs(w - other) / (np.abs(w) + 0.01)).max())

    for fault, w in () if m.linear or off(m.weights, m.right.weights) <= m.close else _other_weights(m):
        if off(w, m.weights) <= m.close and off(w, m.right.weights) > 10 * m.close:
            return Finding(fault, m.sums())
    return None


def _other_weights(m: Measured) -> Iterator[tuple[str, Array]]:
    visible, scores = m.right.seen, m.right.scores
    masked = np.where(visible, scores, -np.inf)
    for words, axis in (("over the queries", -2), ("over the heads", 1)):
        yield f"softmax: {words}", np.moveaxis(definition.softmax(np.moveaxis(masked, axis, -1)), -1, axis)
    yield "softmax: sigmoid instead", 1 / (1 + np.exp(-masked))
    yield "softmax: applied twice", definition.softmax(np.where(visible, m.right.weights, -np.inf))
    powers = np.maximum(masked, 0)
    yield "softmax: relu instead of exp", powers / np.maximum(summed(powers), 1e-300)
    for block in (1, *blocks(masked.shape[-1])):
        for kept in ("output", "sum", "output and sum"):
            words = f"{kept} not rescaled after blocks of {block} keys"
            yield f"online softmax: {words}", _blockwise(masked, kept, block)


def _blockwise(scores: Array, kept: str, block: int) -> Array:
    """The weights of an online softmax that forgets to rescale what it summed when it meets a greater score."""
    m = scores.shape[-1]
    greatest = np.maximum.accumulate(scores, axis=-1)[..., np.minimum(np.arange(m) // block * block + block, m) - 1]
    greatest = np.where(greatest == -np.inf, 0, greatest)
    powers, right = np.exp(scores - greatest), np.exp(scores - greatest[..., -1:])
    total = summed(powers if "sum" in kept else right)
    return (powers if "output" in kept else right) / np.where(total == 0, 1, total)


def _telling(m: Measured, made: Numerators) -> Array:
    """Where a weight of 0 says that a key is not seen: too small a weight may be 0, too."""
    least = 1e-6 if m.spec.dtype.name == "float16" else 1e-30
    small = any(x.fault.startswith("bias") for x in made.found)  # far away, any weight may be too small
    large = np.bool_(not small) if made.number is None else np.abs(made.factors * made.number) > least
    lost = ~m.sees.any(axis=-1, keepdims=True) & (made.number is None or made.number.any(axis=-1, keepdims=True))
    return np.broadcast_to((m.sees | large | lost) & ~m.bad, m.sees.shape)


def _level(m: Measured, made: Numerators) -> Finding | None:
    """Hidden keys that are only weakened: by a number added to their scores, or in the place of them."""
    extra = m.sees & ~m.visible & m.visible.any(axis=-1, keepdims=True)
    if made.number is None or m.linear or not extra.any():
        return None
    kept = np.log(np.where(extra, m.weights / made.factors, np.nan))
    for way, x in (("instead of", kept + m.top(m.right.scores)), ("added to", kept - np.log(made.number))):
        value, off = float(np.nanmedian(x)), float(np.nanmax(np.abs(x - np.nanmedian(x))))
        if off < min(100 * m.close, 0.3) and (abs(value) > 0.1 or way == "instead of"):
            how = f"{round(value, 3):g} {way} their scores"
            capped = m.spec.softcap is not None and abs(value / m.spec.softcap + 1) < 0.01
            fault = f"hidden keys: {'the softcap after the mask' if capped else how}"
            return Finding(fault, f"{int(extra.sum())} hidden weights are those of {how}")
    return None


# ── Totals ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def summed(x: Array) -> Array:
    """Over the keys."""
    return x.sum(axis=-1, keepdims=True)


def totals(m: Measured, made: Numerators, masked: bool) -> Iterator[Finding]:
    """What numerators are divided by, against the sum over the keys that are seen; ``masked``: these are others."""
    number, plain, c = made.number, made.plain, made.factors
    close = max(m.close / 5, 2 * UNIT[m.spec.dtype.name])  # results are rounded
    sees, rows = m.sees if masked else m.visible, (c != 0) & m.sees.any(axis=-1, keepdims=True) & ~m.bad
    count = 1.0 if m.linear else np.rint(np.clip(np.nan_to_num(m.weights / (c * number), nan=1), 1, 9))
    right, total = summed(np.where(sees, count * plain, 0)), np.where(rows, 1 / c, np.nan)
    size = summed(np.where(sees, np.abs(plain), 0))  # what a sum of both signs is exact to
    if not rows.any() or (np.abs(total - right) < close * (size if m.linear else right))[rows].all():
        return
    if (m.linear or masked and m.call.g is not None) and _off(total, m.right.total) < close:
        return  # numerators of other features, or not all of them, over the right sum
    unit = np.ones_like(c) if m.linear else np.exp(-m.top(m.right.scores))  # 1, as numerators have it
    for how, other in _other_totals(m, sees, made, unit):
        if _off(total, other) < 10 * close and np.nanmax(np.abs(np.where(rows, other / right - 1, 0))) > 0.3:
            yield Finding(f"normaliser: {how}", m.sums())
            return
    finding = _unlisted(m, total, right, unit)
    if not (masked or made.found) or not finding.fault.startswith(("precision", "normaliser: a")):
        yield finding


def _other_totals(m: Measured, sees: Array, made: Numerators, unit: Array) -> Iterator[tuple[str, Array]]:
    """What else numerators may be divided by, (b, h, n, 1)."""
    total = summed(np.where(sees, made.plain, 0))
    yield from (("missing", x + 0 * total) for x in (unit, 1))
    yield "the number of keys", summed(sees) * unit + 0 * total
    yield "summed over the heads", np.broadcast_to(total.sum(axis=1, keepdims=True), total.shape)
    yield "rotated", summed(np.where(sees, made.number, 0))
    yield "of the keys that should be seen", summed(np.where(m.visible, made.plain, 0))
    yield from ((name, summed(np.where(mask, made.plain, 0))) for name, mask in masks(m.spec, m.call))


def _off(total: Array, other: Array) -> float:
    """By how much, at most, where the other is not 0."""
    return float(np.nanmax(np.abs(np.where(other == 0, np.nan, total / other) - 1)))


def _even(x: Array, close: float) -> bool:
    return bool(np.nanmin(x) > 0 and np.nanmax(x) / np.nanmin(x) < 1 + close)


def _unlisted(m: Measured, total: Array, right: Array, unit: Array) -> Finding:
    """All weights times one number, one that is added to the sum, or the least that it may be; a sum with few digits,
    if it is too large as often as too small; or by its place."""
    ratio, more, least = total / right, total - right, np.nanmin(total)
    times, off = 1 / float(np.nanmedian(ratio)), float(np.sqrt(np.nanmean(np.square(ratio - 1))))
    low, high, _ = side_by_side(float(np.nanmin(ratio)), float(np.nanmax(ratio)), 1.0, digits=5)
    fact = f"they are divided by {low} to {high} times the right sum"
    if _even(ratio, 2 * m.close) and abs(times - 1) > 5 * m.close:
        factor = 1.0 if m.spec.rope is None else m.spec.rope.attention_factor
        applied = factor != 1 and abs(times / factor**2 - 1) < 20 * m.close
        how = "attention factor applied" if applied else f"times {times:.4g}"
        return Finding(f"output: {how}", f"all weights are {side_by_side(times, 1.0)[0]} times the right ones")
    _, blank = products(m.spec, replace(way := right_way(m.spec, m.due), k=0 * way.k[..., :1, :], turn_k=same))
    empty = blank if m.linear else unit  # what a key of zeros adds
    count = np.rint(more / empty)
    if 1 < np.nanmax(count) <= MOST_BLANK and np.nanmax(np.abs(more / empty - count)) < 0.02:
        few, most = int(np.nanmin(count)), int(np.nanmax(count))
        words = f"{fact}, as keys of zeros, padding or never written, make it"
        return Finding(f"keys: {f'{few} to ' * (few < most)}{most} of zeros are seen", words)
    for x in (more, more / unit):
        if _even(x, max(1e3 * m.close, 0.1)):
            return Finding(f"normaliser: {float(np.nanmedian(x)):.3g} added", fact)
    raised = ratio > 1 + m.close / 5
    if raised.sum() > 2 and np.abs(total[raised] / least - 1).max() < m.close:
        return Finding(f"normaliser: at least {least:.4g}", fact)
    if (name := coarser(off, m.spec)) and abs(np.nanmean(ratio) - 1) < 0.7 * off:
        return Finding(f"precision: normaliser as if rounded to {name}", fact)
    wrong = np.abs(ratio - 1) > m.close / 5
    return Finding("normaliser: another sum", fact + where(m.call, wrong, np.ones(m.sees.shape, bool)))


def counts(m: Measured, made: Numerators) -> Iterator[Finding]:
    """How often each key is counted, where not once: by the factor of its row or, if those are whole numbers, by the
    right total of linear attention."""
    some = m.some & (np.abs(made.number) > 0.02 * np.abs(made.number).max(axis=-1, keepdims=True))
    wrong, times = some & ~made.near, np.where(some, m.weights / (made.factors * made.number), np.nan)
    if wrong.sum() < 0.02 * some.sum():
        return
    whole = np.where(some, m.weights / made.number * m.right.total, np.nan)
    if m.linear and np.nanmax(np.abs(whole - np.rint(whole))) < 0.02 and np.nanmax(whole) > 1.5:
        wrong, times = some & (np.abs(whole - 1) > 0.5), whole
    low, high, _ = side_by_side(float(np.nanmin(times)), float(np.nanmax(times)), 1.0, digits=3)
    fact = f"{int(wrong.sum())} of {int(some.sum())} weights are {low} to {high} times what their row says"
    off = float(np.sqrt(np.nanmean(np.square(times[wrong] - 1))))
    name = coarser(off, m.spec)
    if name and (predicted := rounded(m, off)):
        yield replace(predicted, fact=predicted.fact + where(m.call, wrong, some))
        return
    fault = as_rounded(name, m.spec) if name else "keys: counted unevenly"
    yield Finding(fault, fact + where(m.call, wrong, some))
