"""Which keys each query sees, against which it should: a band along the diagonal, or one of the masks listed here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from ..backend import Array
from .measured import Measured, blocks, read, where
from .report import Finding
from .steps import Call, Spec

Ways: TypeAlias = Iterator[tuple[str, Any]]
MOST = 700  # tokens of a call that is made again with more of them


def runs(sees: Array) -> str:
    """Indices in words, such as "0 … 7, 9"."""
    at = np.flatnonzero(sees)
    parts = [(int(run[0]), int(run[-1])) for run in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1) if run.size]
    words = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} … {b}" for a, b in parts]
    return ", ".join([*words[:4], *["…"] * (len(words) > 4)]) or "none"


def masked(m: Measured, known: Array) -> list[Finding]:
    """What differs, where it is ``known`` whether a key is seen."""
    extra, missing = m.sees & ~m.visible & known, ~m.sees & m.visible & known
    if not (extra | missing).any():
        return []
    fact, empty = _fact(m, extra | missing), ~m.visible.any(axis=-1, keepdims=True)
    if extra.any() and not (extra & ~empty).any() and not missing.any():
        how = "mean of all values" if (m.sees | ~empty).all() else "not zeros"
        return [Finding(f"empty rows: {how}", f"queries that see no key have weights: {fact}")]
    bands = [Finding(fault, fact) for fault in _band(m, known)]
    several = (extra | missing).any(axis=(0, 1, 3)).sum() > 2 or m.call.q.shape[2] > 8
    if bands and several and not m.call.options:  # which may say it better
        return bands
    if names := [fault for fault, mask in _masks(m.spec, m.call, _sizes(m)) if (mask == m.sees)[known].all()]:
        return [Finding(_one_of(m, names), fact)]
    if bands:
        return bands
    if not extra.any() and not (missing & m.sees.any(axis=-1, keepdims=True)).any():
        rows = int((~m.sees.any(axis=-1, keepdims=True) & ~empty).sum())
        return [Finding("output: rows not written", f"{rows} rows are zeros{where(m.call, missing, m.visible)}")]
    both = (("seen though hidden", extra, ~m.visible), ("not seen", missing, m.visible))
    step = "cache: keys" if m.call.chunks else "keys:"
    return [Finding(f"{step} {how}", fact + where(m.call, x, some)) for how, x, some in both if x.any()]


def _sizes(m: Measured) -> list[int]:
    """Of blocks: the usual ones, and those that the first and the last key that is seen, or is not, suggest."""
    keys, count = np.flatnonzero(m.sees.any(axis=(0, 1, 2))), m.sees.shape[-1]
    ends = [int(keys.max()) + 1, count - int(keys.min()), count - 1 - int(keys.max())] if keys.size else []
    ends += (np.setdiff1d(np.arange(count), keys)[:1] + 1).tolist()
    return list(dict.fromkeys([*blocks(count), *(x for x in ends if 0 < x < count)]))


def _one_of(m: Measured, names: list[str]) -> str:
    """Of masks that are alike in this call, the one that also holds in longer ones, of the same numbers again."""
    (n, t), call = (m.call.q.shape[2], m.call.k.shape[2]), m.call
    for more in (1, t // 3 + 2, t + 5) if n * t < MOST**2 and not call.options and not call.chunks else ():
        if len(names) > 1:
            q = np.take(call.q, range(n + more if n == t else n), axis=2, mode="wrap")
            k, v = (np.take(x, range(t + more), axis=2, mode="wrap") for x in (call.k, call.v))
            at = None if call.positions is None else call.positions[:, :1] + np.arange(t + more)
            other = replace(call, q=q, k=k, v=v, positions=at, judged=slice(None))
            sees = Measured(m.spec, m.ask, other, read(m.ask, other).weights, m.close).sees
            masks = {name: mask for name, mask in _masks(m.spec, other, _sizes(m)) if name in names}
            names = [name for name, mask in masks.items() if (mask == sees).all()] or names
    return names[0]


def _fact(m: Measured, wrong: Array) -> str:
    b, h, i, _ = np.argwhere(wrong)[0]
    query, several = m.call.places[0][i], int(wrong.any(axis=-1).sum())
    got, due = runs(m.sees[b, h, i]), runs(m.visible[b, h, i])
    return f"query {query} of row {b}, head {h}, sees keys {got}, expected {due}; so do {several} queries in all"


# ── Bands ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _band(m: Measured, known: Array) -> list[str]:
    """How far back and ahead each query sees, if that is all that differs."""
    d = m.call.places[0][:, None] - m.call.places[1]
    inside = np.broadcast_to(d, m.sees.shape)[m.sees]
    low, high = int(inside.min()), int(inside.max())
    if (((d >= low) & (d <= high)) != m.sees)[known].any():
        return []
    return list(dict.fromkeys([*_ahead(m, low, int(d.min())), *_back(m, high, int(d.max()))]))


def _ahead(m: Measured, low: int, least: int) -> Iterator[str]:
    """The least distance that is seen, against the expected one."""
    causal, w = m.spec.causal, m.spec.window
    if low == max(0 if causal else -w + 1 if w else least, least):
        return
    if not causal:
        yield "causality: not asked for" if low == 0 else f"window: {_width(w, 1 - low)}"
        return
    corner = m.call.k.shape[2] - m.call.q.shape[2]
    named = {-1: "sees the next token", 1: "does not see itself", least: "missing"}
    named |= {corner: "from the top left"} if corner else {}
    other = f"sees {-low} tokens ahead" if low < 0 else f"sees no key nearer than {low}"
    yield f"causality: {named.get(low, other)}"


def _back(m: Measured, high: int, most: int) -> Iterator[str]:
    """The largest distance that is seen, against the expected one."""
    w = m.spec.window
    if high != (most if w is None else min(w - 1, most)):
        kept = f"cache: the last {high + 1} tokens alone are kept"
        window = "window: ignored" if w is not None and high == most else f"window: {_width(w, high + 1)}"
        yield kept if w is None and m.call.chunks else window


def _width(w: int | None, width: int) -> str:
    if w is None:
        return f"of {width}, not asked for"
    named = {w // 2: "half as wide", w // 2 + 1: "half as wide", 2 * w: "twice as wide", 2 * w - 1: "twice as wide"}
    named |= {w + 1: "one too wide", w - 1: "one too narrow"}
    return named.get(width, f"of {width}, not {w}")


# ── Other masks, (n, m) or (b, 1, n, m) ──────────────────────────────────────────────────────────────────────────────


def _masks(spec: Spec, call: Call, sizes: Iterable[int]) -> Ways:
    """Who else may see whom; ``sizes`` are those of blocks."""
    rows, j = call.places
    i, m, w = rows[:, None], call.k.shape[2], spec.window
    causal, near = (j <= i) | (not spec.causal), abs(i - j) < (m if w is None else w)
    right = causal & near
    yield from _options(call, causal, near)
    yield from _calls(call, i, j, right) if call.chunks else ()
    if w is not None:
        yield f"window: in blocks of {w}", causal & (i // w == j // w)
        yield from ((f"window: and the first {x} keys", causal & (near | (j < x))) for x in range(1, 9))
    if spec.causal:
        if call.positions is not None and (np.diff(call.positions) != 1).any():
            at = call.positions[:, None]
            yield "causality: by position", (at[..., np.clip(rows, 0, m - 1), None] >= at[..., None, :]) & near
        yield "causality: inverted: sees the future", (j >= i) & near
        for x in (2, 3, 4, 8, 1, 5, 6, 7, 16, 32):
            yield f"causality: the first {x} keys seen by all queries", ((j <= i) | (j < x)) & near
        for words, place in parts(m):
            yield f"causality: counted {words}", (place <= place[np.clip(i, 0, m - 1)]) & near
    for x in () if call.chunks else sizes:
        same, full = i // x == j // x, m // x * x
        if spec.causal:
            yield f"causality: by blocks of {x}", (j // x <= i // x) & near
        if m % x:
            yield f"blocks: keys after the last full block of {x} left out", right & (j < full)
            yield f"blocks: queries after the last full block of {x} left out", right & (i < full)
        yield f"blocks: the last block of {x} keys left out", right & ((j < (m - 1) // x * x) | (m <= x))
        yield f"blocks: state lost between blocks of {x}", right & same
        yield f"blocks: own block of {x} left out after the first", right & (~same | (i < x))
        yield f"keys: key {x - 1} is not seen", right & (j != x - 1)
        yield f"keys: the last {x} alone are read", right & (j >= m - x)
        yield f"keys: the first {x} alone are read", right & (j < x)


def _calls(call: Call, i: Array, j: Array, right: Array) -> Ways:
    """What may be lost between calls with a cache."""
    of, first = (np.repeat(x, call.chunks) for x in (range(len(call.chunks)), np.cumsum((0, *call.chunks[:-1]))))
    yield "cache: forgotten", right & (of[i] == of)
    for x in range(1, len(j)):
        yield f"cache: the last {x} tokens of earlier calls alone are kept", right & (j >= first[i] - x)
    yield "causality: missing within a call", of <= of[i]


def _options(call: Call, causal: Array, near: Array) -> Ways:
    """mask= and segments= as they may be misread."""
    right, (rows, _), n = causal & near, call.places, call.q.shape[2]
    mask, segments = call.options.get("mask"), call.options.get("segments")
    if mask is not None:
        mask = mask[..., np.arange(n)[call.judged], :]
        yield "mask=: ignored", right
        yield "mask=: inverted", right & ~mask
        yield "mask=: of row 0 for all", right & mask[:1]
        yield "mask=: instead of causality", mask & near
        if mask.shape[-1] == mask.shape[-2]:
            yield "mask=: transposed", right & mask.swapaxes(-1, -2)
    if segments is not None:
        own, of = segments[:, None, rows, None], segments[:, None, None]
        yield "segments=: ignored", right
        yield "segments=: instead of causality", (own == of) & near
        yield "segments=: of row 0 for all", right & (own[:1] == of[:1])
        yield "segments=: earlier segments are seen", right & (own >= of)


def parts(m: int) -> Iterator[tuple[str, Array]]:
    """The place of each of m tokens in its part, (m,), where a row is split among ranks."""
    j = np.arange(m)
    for ranks in (2, 4, 3, 8):
        cuts, chunks = [m * i // ranks for i in range(ranks + 1)], np.array_split(j, 2 * ranks)
        yield f"in each of {ranks} parts", j % -(-m // ranks)
        yield f"in each of {ranks} parts", j - np.repeat(cuts[:-1], np.diff(cuts))
        within, firsts = np.zeros(m, int), np.zeros(m, int)
        for one, other in zip(chunks[:ranks], chunks[::-1], strict=False):
            both = np.concatenate((one, other))
            within[both], firsts[both] = np.arange(len(both)), np.concatenate((one, np.resize(one, len(other))))
        yield f"by {ranks} ranks in a zigzag", within
        yield f"by {ranks} ranks in a zigzag, those of the first chunk for both", firsts
