"""The weights of attention, read with values that are unit vectors, taken apart and compared factor by factor.

W = seen · numerator / total, of softmax attention and of Eq. (19) alike. Each factor is measured and compared by
itself (`masks`, `numerators`, `totals`), so that two mistakes need no search over pairs; what it is instead is looked
for in `ways`. What is in no list is told by its step, its place and its numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..backend import Array
from . import ways
from .masks import Masks
from .measured import Ask, Measured, read
from .numerators import Numerators, numerators
from .report import Finding
from .steps import Allowed, Call, Spec, seen
from .totals import counts, totals
from .values import UNREADABLE, Values

__all__ = ["apart", "diagnose", "read", "seen"]
# The relative error of a measured weight; a second, finer look is taken if the first one finds nothing.
CLOSE = {"float64": (1e-4, 1e-7), "float32": (1e-4, 8e-6), "float16": (1e-2, 2e-3), "bfloat16": (5e-2, 1e-2)}
MOST = 64  # heads of all rows whose results are looked for in other places


def diagnose(spec: Spec, ask: Ask, call: Call, answer: Array, allowed: Allowed) -> list[Finding]:
    """What is wrong with the answer to a call, causes before consequences; may raise `Unreadable`."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rows of NaN alone have no median
        return _diagnosed(spec, ask, call, answer, allowed)


def _diagnosed(spec: Spec, ask: Ask, call: Call, answer: Array, allowed: Allowed) -> list[Finding]:
    if whole := next(_whole(spec, call, answer, allowed), None):
        return [whole]
    values, taken = Values(spec, ask, call, *read(ask, call)), list[Finding]()
    listed = values.found(answer, allowed)
    if any(x.fault in UNREADABLE for x in listed):
        return listed
    for close in CLOSE[spec.dtype.name]:
        taken = apart(Measured(spec, values.ask, call, values.weights, close))
        if taken or listed:
            break
    if any(x.fault.startswith("output") for x in listed):  # which is rounded where it is a weight, too
        taken = [x for x in taken if not x.fault.startswith("precision")]
    if np.isfinite(answer).all() and listed:  # what is not finite are then the weights of values of zeros
        taken = [x for x in taken if x.fault != "not finite"]
    return _merged([*listed, *taken])


def _merged(found: list[Finding]) -> list[Finding]:
    """Each fault once; what keys and values have alike is one."""
    names = {finding.fault: finding for finding in found}
    for fault in [fault for fault in names if ": values " in fault]:
        if (keys := names.get(fault.replace(": values ", ": keys "))) is not None:
            del names[keys.fault]
            both = f"{names[fault].fact}; {keys.fact}"
            names[fault] = replace(names[fault], fault=fault.replace(": values ", ": "), fact=both)
    return list(names.values())


# ── The whole answer ─────────────────────────────────────────────────────────────────────────────────────────────────


def _whole(spec: Spec, call: Call, answer: Array, allowed: Allowed) -> Iterator[Finding]:
    """Mistakes that predict the answer, in all its numbers."""
    room = 2 * allowed.worst.max(axis=-1, keepdims=True) + allowed.worst.max() / 4
    error = float(np.square(answer - allowed.truth).mean())
    for step, how, out in ways.outputs(spec, call):
        near = (np.abs(out - answer) <= room + CLOSE[spec.dtype.name][1] * np.abs(out)).all()
        if near and np.square(out - answer).mean() < 0.01 * error:
            yield Finding(f"{step}: {how}", f"all {answer.size} outputs are those of this mistake")
    (b, h), whose = answer.shape[:2], places(answer, allowed)
    rows, heads = whose // h, whose % h
    if (whose < 0).any() or not answer.any():
        return
    if (heads != np.arange(h)).any():
        numbers = ", ".join(map(str, heads[-1]))
        yield Finding("output: of other heads", f"heads 0, 1, … return the results of heads {numbers}")
    elif (rows != np.arange(b)[:, None]).any():
        numbers = ", ".join(map(str, rows[:, 0]))
        yield Finding("batch: results of other rows", f"rows 0, 1, … return the results of rows {numbers}")


def places(answer: Array, allowed: Allowed) -> Array:
    """The head, counted over all rows, whose right result each head returns, (b, h); −1 if there is none."""
    (b, h), truth = answer.shape[:2], allowed.truth.reshape(-1, *answer.shape[2:])
    whose, room = np.full(b * h, -1), 3 * allowed.worst.reshape(truth.shape)
    for i, out in enumerate(answer.reshape(truth.shape) if b * h <= MOST else ()):
        near = (np.abs(truth - out) <= room).all(axis=(1, 2))
        whose[i] = i if near[i] else int(near.argmax()) if near.any() else -1
    return whose.reshape(b, h)


# ── Factor by factor ─────────────────────────────────────────────────────────────────────────────────────────────────


def apart(m: Measured) -> list[Finding]:
    """What differs in which factor of the weights."""
    lost = list(_not_finite(m))
    if m.bad.all():
        return lost
    if not m.sees.any():
        return [*lost, Finding("values: not used", "the output does not depend on the values")]
    if whole := _dropped(m) or _weights(m):
        return [*lost, whole]
    made = numerators(m)
    hidden = _level(m, made)
    masked = [hidden] if hidden else Masks(m.spec, m.call, m.sees, m.visible, m.sees_again).found(_telling(m, made))
    listed = [*lost, *masked, *made.found]
    if made.fit is not None and not hidden and not any("precision" in x.fault for x in listed):
        listed += [*counts(m, made), *totals(m, made, bool(masked))]
    return listed


def _not_finite(m: Measured) -> Iterator[Finding]:
    empty, rows = ~m.visible.any(axis=-1, keepdims=True), int(m.bad.sum())
    if rows:
        fault = "empty rows: NaN" if (m.bad <= empty).all() else "not finite"
        yield Finding(fault, f"{rows} of {m.bad.size} rows of weights are not finite{m.where(m.bad)}")


def _dropped(m: Measured) -> Finding | None:
    """Weights that are zeros at random, while all others are too large by the factor that makes up for it."""
    large = m.visible & (np.abs(m.right.weights) > 1e-3) & ~m.bad
    share = np.where(large & m.sees, m.weights / m.right.weights, np.nan)
    zeros, factor = float((large & ~m.sees).sum() / max(large.sum(), 1)), float(np.nanmedian(share))
    alike = np.nanmax(np.abs(share / factor - 1), initial=0) < 10 * m.close
    if not (0.001 < zeros < 0.9 and alike and abs(factor * (1 - zeros) - 1) < 0.2 and factor > 1.0005):
        return None
    return Finding("dropout", f"{zeros:.1%} of the weights are zeros, and all others the right ones times {factor:.4g}")


def _weights(m: Measured) -> Finding | None:
    """Other functions of the right scores, which predict all weights."""

    def near(w: Array, other: Array, close: float) -> bool:
        return bool((np.abs(w - other) <= close * (np.abs(w) + 0.01)).all())

    for step, how, w in () if near(m.weights, m.right.weights, m.close) else ways.weights(m.spec, m.call, m.right):
        if near(w, m.weights, m.close) and not near(w, m.right.weights, 10 * m.close):
            return Finding(f"{step}: {how}", m.sums())
    return None


def _telling(m: Measured, made: Numerators) -> Array:
    """Where a weight of 0 says that a key is not seen: too small a weight may be 0, too."""
    least = 1e-6 if m.spec.dtype.name == "float16" else 1e-30
    large = np.True_ if made.fit is None else np.abs(made.fit.factors * made.number) > least
    return np.broadcast_to((m.sees | large | ~m.sees.any(axis=-1, keepdims=True)) & ~m.bad, m.sees.shape)


def _level(m: Measured, made: Numerators) -> Finding | None:
    """Hidden keys that are only weakened: by a number added to their scores, or in the place of them."""
    extra = m.sees & ~m.visible & m.visible.any(axis=-1, keepdims=True)
    if made.fit is None or m.linear or not extra.any():
        return None
    kept = np.log(np.where(extra, m.weights / made.fit.factors, np.nan))
    for way, x in (("instead of", kept + m.top(m.right.scores)), ("added to", kept - np.log(made.number))):
        value, off = float(np.nanmedian(x)), float(np.nanmax(np.abs(x - np.nanmedian(x))))
        if off < min(100 * m.close, 0.3) and (abs(value) > 0.1 or way == "instead of"):
            how = f"{round(value, 3):g} {way} their scores"
            capped = m.spec.softcap is not None and abs(value / m.spec.softcap + 1) < 0.01
            fault = f"hidden keys: {'the softcap after the mask' if capped else how}"
            return Finding(fault, f"{int(extra.sum())} hidden weights are those of {how}")
    return None
