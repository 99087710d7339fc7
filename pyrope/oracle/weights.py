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
from .measured import Ask, Measured, digits, elsewhere, masked, masks, read, where
from .numerators import Numerators, fits, numerators
from .report import Finding, side_by_side
from .steps import Allowed, Call, Spec, weigh
from .values import NOT_SUMMED, REORDERED, ROTATED, Values, sources, uneven

OTHER_SUM = "normaliser: another sum"
UNREAD = (NOT_SUMMED, ROTATED, REORDERED)  # what becomes of values where they do not show the weights
# The relative error of a measured weight; a second, finer look is taken if the first one finds nothing.
CLOSE = {"float64": (1e-4, 1e-7), "float32": (1e-4, 8e-6), "float16": (1e-2, 2e-3), "bfloat16": (5e-2, 1e-2)}


def diagnose(spec: Spec, ask: Ask, call: Call, answer: Array, allowed: Allowed) -> list[Finding]:
    """What is wrong with the answer to a call, causes before consequences; may raise `Unreadable`."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rows of NaN alone have no median
        if whole := next(_whole(spec, call, answer, allowed), None):
            return [whole]
        if odd := uneven(ask, call):
            return odd
        values, taken = Values(spec, ask, call, *read(ask, call)), list[Finding]()
        listed, due = _carried(values, answer, allowed) if np.isfinite(answer).any() else ([*values.added()], call)
        if any(x.fault in UNREAD or "mixed" in x.fault for x in listed):
            return listed
        for close in CLOSE[spec.dtype.name]:
            taken = apart(Measured(spec, values.ask, call, values.weights, close, due))
            if taken or listed:
                break
        if listed:  # what is rounded, or not finite, shows where it is a weight, too
            taken = [x for x in taken if not x.fault.startswith(("precision", "not finite"))]
        return [*listed, *taken] or values.changed(answer)


def _carried(values: Values, answer: Array, allowed: Allowed) -> tuple[list[Finding], Call]:
    """What becomes of values on their way to the output, and the call with what each head reads."""
    spec, due, close = values.spec, values.call, CLOSE[values.spec.dtype.name][0]
    listed, right = [*values.added()], values.summed(due, answer, allowed)
    if not right and (moved := values.moved()):
        return [*listed, moved], due
    measured = Measured(spec, values.ask, due, values.weights, close, due)
    if not right or not (fits(measured) or _functions(measured)):
        misread, due = sources(values.ask, due, 10 * close)
        listed += misread
    changed = any("mixed" in x.fault for x in listed) or values.summed(due, answer, allowed)
    return [*listed, *([] if changed else values.changed(answer))], due


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
            yield Finding(fault, f"all {answer.size} outputs are what this mistake makes")


def _other_calls(call: Call) -> Iterator[tuple[str, Call]]:
    """Arguments that may be taken for those that are given."""
    k, v = call.k, call.v
    yield "output: zeros", replace(call, v=np.zeros_like(v))
    yield "values: keys used as values", replace(call, v=k)
    yield "values: keys and values exchanged", replace(call, k=v, v=k)
    padded = np.concatenate((0 * v[:, :, :1], v, 0 * v[:, :, :1]), axis=2)
    yield "values: of the token before", replace(call, v=padded[:, :, :-2])
    yield "values: of the token after", replace(call, v=padded[:, :, 2:])


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
    few = any("precision" in x.fault for x in made.found)
    others = [hidden] if hidden else masked(m, _told(m, made))
    listed = [*lost, *others, *made.found]
    if made.number is not None and not hidden and not few:
        uneven = [*counts(m, made)] if m.linear else []
        listed += uneven or totals(m, made, bool(others))
    return listed


def _dropped(m: Measured) -> Finding | None:
    """Weights that are zeros at random, while all others are too large by the factor that makes up for it."""
    large = m.visible & (np.abs(m.right.weights) > 1e-3) & ~m.bad
    share = np.where(large & m.sees, m.weights / m.right.weights, np.nan)
    zeros, factor = float((large & ~m.sees).sum() / max(large.sum(), 1)), float(np.nanmedian(share))
    alike = np.nanmax(np.abs(share / factor - 1), initial=0) < 10 * m.close
    if not (0.001 < zeros < 0.9 and alike and factor > 1.0005 and abs(factor * (1 - zeros) - 1) < 0.2):
        return None
    return Finding("dropout", f"{zeros:.1%} of the weights are zeros, and all others the right ones times {factor:.4g}")


def _functions(m: Measured) -> Finding | None:
    """Another function of the right scores than their softmax over the keys, if it predicts all weights."""

    def off(w: Array, other: Array) -> float:
        return float((np.abs(w - other) / (np.abs(w) + 0.01)).max())

    if m.linear or off(m.weights, m.right.weights) <= m.close:
        return None
    masked = np.where(m.right.seen, m.right.scores, -np.inf)
    over, right = {"over the queries": -2, "over the heads": 1}, m.right.weights
    others = {how: np.moveaxis(definition.softmax(np.moveaxis(masked, x, -1)), -1, x) for how, x in over.items()}
    others["applied twice"] = definition.softmax(np.where(m.right.seen, right, -np.inf))
    others["relu instead of exp"] = np.maximum(masked, 0) / np.maximum(summed(np.maximum(masked, 0)), 1e-300)
    near = (how for how, w in others.items() if off(w, m.weights) <= m.close and off(w, right) > 10 * m.close)
    how = next(near, None)
    return Finding(f"softmax: {how}", m.sums()) if how else None


def _told(m: Measured, made: Numerators) -> Array:
    """Where a weight of 0 says that a key is not seen: too small a weight may be 0, too."""
    least = 1e-6 if m.spec.dtype.name == "float16" else 1e-30
    kinds = {x.fault.partition(":")[0] for x in made.found}
    small = kinds & {"bias", "precision", "weights"}  # what is rounded to 0 looks hidden
    large = np.bool_(not small) if made.number is None else np.abs(made.factors * made.number) > least
    lost = ~m.sees.any(axis=-1, keepdims=True) & (made.number is None or made.number.any(axis=-1, keepdims=True))
    return np.broadcast_to((m.sees | large | lost) & ~m.bad, m.sees.shape)


def _level(m: Measured, made: Numerators) -> Finding | None:
    """Hidden keys whose weights are not those of their scores: a number was added to these, or took their place."""
    extra = m.sees & ~m.visible & m.visible.any(axis=-1, keepdims=True)
    if made.number is None or m.linear or not extra.any() or made.near[extra].mean() > 0.5:
        return None
    low, high = np.nanquantile((m.weights / (made.factors * made.number))[extra], (0, 1))
    words = f"{int(extra.sum())} hidden keys have weights, {low:.3g} to {high:.3g} times those of their scores"
    return Finding("hidden keys: seen, with other weights", words)


# ── Totals ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def summed(x: Array) -> Array:
    """Over the keys."""
    return x.sum(axis=-1, keepdims=True)


def totals(m: Measured, made: Numerators, masked: bool) -> Iterator[Finding]:
    """What numerators are divided by, against the sum over the keys that are seen; ``masked``: these are others."""
    plain, c = made.plain, made.factors
    close = max(m.close / 5, 2 * UNIT[m.spec.dtype.name])  # results are rounded
    sees, rows = m.sees if masked else m.visible, (c != 0) & m.sees.any(axis=-1, keepdims=True) & ~m.bad
    right, total = summed(np.where(sees, plain, 0)), np.where(rows, 1 / c, np.nan)
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
    if not (masked or made.found) or finding.fault != OTHER_SUM:
        yield finding


def _other_totals(m: Measured, sees: Array, made: Numerators, unit: Array) -> Iterator[tuple[str, Array]]:
    """What else numerators may be divided by, (b, h, n, 1)."""
    total = summed(np.where(sees, made.plain, 0))
    yield from (("missing", x + 0 * total) for x in (unit, 1))
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
    """All weights times one number; a number that is added to the sum, or the least that it may be; or its place."""
    ratio, more, least = total / right, total - right, np.nanmin(total)
    times = 1 / float(np.nanmedian(ratio))
    low, high, _ = side_by_side(float(np.nanmin(ratio)), float(np.nanmax(ratio)), 1.0, digits=5)
    fact = f"they are divided by {low} to {high} times the right sum"
    if _even(ratio, 2 * m.close) and abs(times - 1) > 5 * m.close:
        words = f"all weights are {side_by_side(times, 1.0)[0]} times the right ones"
        return Finding(f"output: times {times:.4g}", words)
    for x in (more, more / unit):
        if _even(x, max(1e3 * m.close, 0.1)):
            return Finding(f"normaliser: {float(np.nanmedian(x)):.3g} added", fact)
    raised = ratio > 1 + m.close / 5
    if raised.sum() > 2 and np.abs(total[raised] / least - 1).max() < m.close:
        return Finding(f"normaliser: at least {least:.4g}", fact)
    wrong = np.abs(ratio - 1) > m.close / 5
    return Finding(OTHER_SUM, fact + where(m.call, wrong, np.ones(m.sees.shape, bool)))


def counts(m: Measured, made: Numerators) -> Iterator[Finding]:
    """How often each key is counted, by the factor of its row, where not once."""
    some = m.some & (np.abs(made.number) > 0.02 * np.abs(made.number).max(axis=-1, keepdims=True))
    wrong, times = some & ~made.near, np.where(some, m.weights / (made.factors * made.number), np.nan)
    if wrong.sum() < 0.02 * some.sum():
        return
    low, high, _ = side_by_side(float(np.nanmin(times)), float(np.nanmax(times)), 1.0, digits=3)
    fact = f"{int(wrong.sum())} of {int(some.sum())} weights are {low} to {high} times what their row says"
    few = digits(float(np.sqrt(np.nanmean(np.square(times[wrong] - 1)))), m.spec)
    yield few or Finding("keys: counted unevenly", fact + where(m.call, wrong, some))
