"""The calls that a kernel of attention may treat in a way of its own: lengths, decoding, caches, memory, values.

Each trial is one question whose answer must be right like any other, and carries the name of the mistake that it shows
if it is not. Trials are held against the truth alone: no known mistake is searched for in them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..backend import Array
from .ask import Behaviour, Unreadable
from .attention_evidence import AttentionEvidence, Exam, first_wrong
from .attention_faults import in_words
from .floats import U32, U64
from .questions import TOKENS, Question, Questions
from .responses import weighed
from .trials import PATIENCE, cpu_seconds, hollow, lengths_in_words, listed_names
from .truth import Spec

Asks: TypeAlias = Callable[[Question], Array]  # what a candidate answers, in float64
LENGTHS, CONSECUTIVE, ORDER = "some lengths wrong", "consecutive positions wrong", "order of positions matters"
DECODING, LONG = "decoding wrong", "long sequences wrong"
CACHE, ROWS, MEMORY, MISREAD = "cache wrong in some calls", "batch rows mixed", "strides ignored", "positions misread"
WINDOW = "window not asked for"
VALUES, LEAK, STATE = "some values wrong", "rows leak into each other", "state between calls"
_FAULTS = (LENGTHS, CONSECUTIVE, ORDER, DECODING, LONG, CACHE, ROWS, MEMORY, MISREAD, VALUES, LEAK)
_POWERS = (2, 16, 32, 64, 128, 256, 512)  # tokens at which kernels change their way, each tried with its neighbours
_MULTIPLES = (8, 24, 48, 96, 192, 320, 384)  # of blocks and of their halves: they tell how long a block is
_EVERY = 131  # all lengths below are tried
_LARGER = (*range(144, 257, 16), 200, 300, 320, 384, 400, 1000, 1024)
_LONGER = (1500, 2048, TOKENS)  # keys of one query
_KEYS = (2100, 2 * TOKENS)  # keys of one query and of four
_COMPILED = (2, 17, 64, 129, 512)  # where each new shape is compiled first
_FEW, _LONG = 9, 4096
_CALLS = {
    "one token each": (1,) * 40, "chunks of 16": (16,) * 5, "a prompt of 64, then one each": (64, 1, 1, 1, 1),
    "growing chunks": (1, 2, 3, 5, 8, 13, 21, 34), "a prompt of 300, then chunks": (300, 1, 17, 1),
}  # fmt: skip


class Trial(NamedTuple):
    """One call."""

    fault: str  # the name of the mistake that shows if this goes wrong
    question: Question
    judged: tuple[tuple[int, int], ...]  # the queries that are judged: before which one, and how many
    spoilt: int | None = None  # a token whose own output may be anything
    needed: bool = True  # even where calls are slow
    slack: float = 0.0  # how far off an output may be, over itself, beside what rounding explains


def _some(n: int, causal: bool) -> tuple[tuple[int, int], ...]:
    """The queries of a long call that are judged: the first, those around the middle, and the last. Without causality
    the last alone, since those before them see keys that come later."""
    if n <= 40:
        return ((n, n),)
    return ((8, 8), (n // 2 + 2, 4), (n, 12)) if causal else ((n, 12),)


def lengths(draw: Questions) -> Iterator[Trial]:
    """Every length, with positions that are apart and with consecutive ones, from 0 or from elsewhere."""
    spec, top = draw.spec, draw.max_position
    for n in _COMPILED if draw.few_shapes else sorted(_usual(spec)):
        if n > min(top, 1024):
            break
        question, judged = _first(draw.tokens, n, n, _tokens(n)), _some(n, spec.causal)
        if spec.rope is None:
            yield Trial(LENGTHS, question, judged)
            continue
        yield Trial(LENGTHS, replace(question, positions=_apart(n, top, spec)), judged)
        if n % 2 and n not in (1, _FEW, spec.head_dim, 65) or len(set(spec.starts)) == 1:
            continue
        start = 0 if n % 4 else min(1000 + n, top - n)
        name = f"positions {start} to {start + n - 1}"
        yield Trial(CONSECUTIVE, replace(question, name=name, positions=start + np.arange(n)[None]), judged)


def _usual(spec: Spec) -> set[int]:
    return {n + step for n in _POWERS for step in (-1, 0, 1)} | {_FEW, spec.head_dim, spec.heads, *_MULTIPLES, 600}


def more_lengths(draw: Questions) -> Iterator[Trial]:
    """Every length up to 130, and many beyond, of which the last queries are judged, and of some one in the middle."""
    spec, top = draw.spec, draw.max_position
    if draw.few_shapes:
        return
    lengths = [n for n in sorted({*range(_EVERY), *_LARGER} - _usual(spec)) if n <= top]
    for n in lengths:
        judged = ((n // 2 + 1, 1), (n, 3)) if spec.causal and n % 8 == 0 else ((n, 3),)
        question = _first(draw.tokens, n, n, _tokens(n))
        if spec.rope is not None:
            question = replace(question, positions=_apart(n, top, spec))
        yield Trial(LENGTHS, question, judged if n else (), needed=False)


def _first(tokens: Question, queries: int, keys: int, name: str) -> Question:
    """The first of many tokens: to draw them anew would take longer than to ask."""
    q, k, v = (np.ascontiguousarray(x[:, :, :n]) for x, n in ((tokens.q, queries), (tokens.k, keys), (tokens.v, keys)))
    return replace(tokens, name=name, q=q, k=k, v=v, positions=None)


def _tokens(n: int) -> str:
    return f"{n} token{'s' if n != 1 else ''}"


def _apart(n: int, top: int, spec: Spec) -> Array:
    """Positions (1, n) that rise from 0 on, not by one: a length is not to be blamed for where its positions begin. A
    candidate that counts its positions, so that all rows begin alike, takes none that rise otherwise."""
    if len(set(spec.starts)) == 1:
        return spec.starts[0] + np.arange(n)[None]
    at = np.sort(np.random.default_rng(n).choice(min(top, 2 * n + 8), n, replace=False))[None]
    return at - at[:, :1]


def orders(draw: Questions) -> Iterator[Trial]:
    """Positions that do not rise with the tokens."""
    if draw.spec.rope is None:
        return
    n, question = 2 * _FEW, draw.random("", 2 * _FEW, batch=2)
    at = np.arange(n)
    mixed = np.random.default_rng(n).permutation(n)
    rows = {
        "positions that start again": (at % (n // 2), at % (n // 3)), "each position twice": (at // 2, at // 2 + 3),
        "positions 0, 0, 0, 1, 2, …": (np.maximum(at - 2, 0), np.maximum(at - 5, 0)),
        "descending positions": (at[::-1], at[::-1] + 4), "one position for all tokens": (0 * at, 0 * at + 5),
        "unsorted positions": (mixed, mixed[::-1]),
    }  # fmt: skip
    for name, both in rows.items():
        yield Trial(ORDER, replace(question, name=name, positions=np.stack(both)), ((n, n),))
    one = replace(question, q=question.q[:1], k=question.k[:1], v=question.v[:1], positions=at[None] % (n // 2))
    yield Trial(ORDER, replace(one, name="positions that start again, in a batch of one"), ((n, n),))


def decoding(draw: Questions) -> Iterator[Trial]:
    """One query, some, and the chunk of a prompt, over many keys; and one query over every number of keys."""
    some = ((1, 128), (1, 129), (1, 300), (3, 300), (17, 300), (64, 192), (1, 1000), (4, 1000))
    for queries, keys in some[2:5] if draw.few_shapes else some:
        question = _first(draw.tokens, queries, keys, _over(queries, keys))
        if keys <= 300:
            question = draw.random(question.name, keys, queries=queries, batch=2)
        yield Trial(DECODING, question, ((queries, 24),))
    if draw.few_shapes:
        return
    for queries, keys in itertools.product((1, 4), _KEYS):
        k, v = (np.concatenate((x, x[..., ::-1]), axis=2) for x in (draw.tokens.k, draw.tokens.v))
        question = _first(replace(draw.tokens, k=k, v=v), queries, keys, _over(queries, keys))
        yield Trial(DECODING, question, ((queries, 4),))
    for keys in sorted({*range(2, _EVERY), *_LARGER, *_LONGER}):
        yield Trial(DECODING, _first(draw.tokens, 1, keys, _over(1, keys)), ((1, 1),), needed=False)


def _over(queries: int, keys: int) -> str:
    return f"{queries} quer{'y' if queries == 1 else 'ies'} over {keys} keys"


def caches(draw: Questions) -> Iterator[Trial]:
    """Calls of a candidate with a cache."""
    for name, calls in _CALLS.items():
        n = sum(calls)
        question = draw.random(f"cache: {name}", n, batch=4 if n < 64 else 1)
        yield Trial(CACHE, replace(question, calls=calls), _some(n, True))


def memory(draw: Questions) -> Iterator[Trial]:
    """The same numbers, held in memory in every way that an array can be, and batches of four."""
    spec, n = draw.spec, _FEW
    for name, batch in (("a batch of four", 4), ("a batch of 17", 17)):
        yield Trial(ROWS, draw.random(name, n, batch=batch), ((n, n),))
    question = draw.random("", n, batch=2)
    for name, view in _VIEWS.items():
        q, k, v = (view(x) for x in (question.q, question.k, question.v))
        yield Trial(MEMORY, replace(question, name=name, q=q, k=k, v=v), ((n, n),))
    k, v = (np.broadcast_to(x[:1, :1], x.shape) for x in (question.k, question.v))
    yield Trial(MEMORY, replace(question, name="k and v that are one head, expanded", k=k, v=v), ((n, n),))
    kept = replace(question, name="k and v as parts of a longer cache")
    yield Trial(MEMORY, replace(kept, k=_part(question.k), v=_part(question.v)), ((n, n),))
    if spec.rope is not None and question.positions is not None:
        at = question.positions
        one = np.broadcast_to(at[:1], at.shape)
        views = {"int32 positions": at.astype(np.int32), "strided positions": np.repeat(at, 2, axis=1)[:, ::2],
                 "positions that are one row, expanded": one}  # fmt: skip
        for name, positions in views.items():
            yield Trial(MISREAD, replace(question, name=name, positions=positions), ((n, n),))


def _part(x: Array) -> Array:
    """As a slice of something longer that holds other numbers."""
    longer = np.full((*x.shape[:2], x.shape[2] + 7, x.shape[3]), 9, x.dtype)
    longer[:, :, 3 : 3 + x.shape[2]] = x
    return longer[:, :, 3 : 3 + x.shape[2]]


def _unaligned(x: Array) -> Array:
    raw = np.ndarray(x.shape, x.dtype, np.zeros(x.nbytes + 1, np.uint8).data, offset=1)
    raw[...] = x
    return raw


def _read_only(x: Array) -> Array:
    x = x.copy()
    x.flags.writeable = False
    return x


_VIEWS: dict[str, Callable[[Array], Array]] = {
    "(b, n, h, d) in memory": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "arrays in Fortran order": np.asfortranarray,
    "arrays that are not aligned": _unaligned,
    "read-only arrays": _read_only,
}


def values(draw: Questions) -> Iterator[Trial]:
    """Rows of zeros, rows much larger or smaller than the others, and NaN in one row."""
    n, at = _FEW, _FEW // 2
    sparse, steep = draw.spec.feature_map.startswith("relu"), draw.spec.feature_map == "exp"
    power = 4 if draw.dtype.name == "float16" else 9
    scales = {"small": 2.0**-power} | ({} if sparse else {"zero": 0.0}) | ({} if steep else {"large": 2.0**power})
    for size, scale in scales.items():
        for x in "qk":
            question = draw.random(f"a {size} row of {x}", n, batch=2)
            if size != "large" or x == "q":  # a large key takes all weight: nothing else would show
                row = getattr(question, x)[0, :, at]
                row[...] = np.abs(row) * draw.dtype.type(scale)  # features of large negative numbers would be zeros
                yield Trial(VALUES, question, ((n, n),))
    question = draw.random("NaN in one row of q", n, batch=2)
    question.q[0, :, at] = np.nan
    yield Trial(LEAK, question, ((n, n),), at)


def small(draw: Questions) -> Iterator[Trial]:
    """Denominators of a thousandth at the first token: an eps of 1e-6 may show in the third digit, a bound must not."""
    question = draw.small(1e-3, "denominators of about 0.001")
    yield Trial(VALUES, question, ((question.q.shape[-2],) * 2,), slack=0.01)


def long(draw: Questions) -> Iterator[Trial]:
    """So many tokens that a sum in few bits stops growing: the last outputs of one call."""
    # Of many heads fewer tokens: a candidate may hold all weights, which would take too much memory.
    n = min(_LONG, draw.max_position, math.isqrt(2**26 // draw.spec.heads))
    question = draw.random(f"{n} tokens", n, batch=1)
    v = question.v.copy()
    v[..., : v.shape[-1] // 2] = 1
    positions = None if question.positions is None else np.arange(n)[None]
    yield Trial(LONG, replace(question, v=v, positions=positions, random=False), ((n, 8),))


# ── What came of them ────────────────────────────────────────────────────────────────────────────────────────────────


class Outcome(NamedTuple):
    """What came of a trial."""

    trial: Trial
    wrong: str  # the first wrong output, in words; empty where all are right
    answer: Array | None = None  # where it is wrong


def run_trials(exam: Exam, asks: Asks, listed: Iterator[Trial]) -> tuple[Behaviour, list[str]]:
    """What the candidate does wrong in some calls, by the name of the mistake, and what was not tried, in words."""
    outcomes, refused, late, begin = list[Outcome](), dict[str, list[str]](), list[str](), cpu_seconds()
    for trial in listed:
        if not trial.needed and cpu_seconds() - begin > PATIENCE:
            late.append(trial.question.name)
            continue
        try:
            answer = asks(trial.question)
            wrong = _compared(exam, trial, answer)
            first = wrong and not any(o.wrong and o.trial.fault == trial.fault for o in outcomes)
            if first and not _compared(exam, trial, asks(trial.question)):  # nothing but the time is to blame
                return {STATE: f'question "{trial.question.name}", the same call twice: {wrong}; then right'}, []
            question = trial.question
            if not wrong:
                question = replace(question, q=hollow(question.q), k=hollow(question.k), v=hollow(question.v))
            outcomes.append(Outcome(trial._replace(question=question), wrong, answer if wrong else None))
        except Unreadable as error:
            if trial.fault == LENGTHS and error.kind == "shape":
                outcomes.append(Outcome(trial, error.reason))
            elif trial.question.q.size:  # nothing at all may be refused
                refused.setdefault(error.reason, []).append(trial.question.name)
    notes = [f"not taken by the candidate: {listed_names(names)}; {reason}" for reason, names in refused.items()]
    notes += [f"its calls are slow: not tried were {listed_names(late)}"] if late else []
    return _named(exam, asks, outcomes), notes


def _compared(exam: Exam, trial: Trial, answer: Array) -> str:
    """The first wrong output, in words."""
    question = trial.question
    if answer.shape != question.q.shape:
        return f"the shape is {answer.shape}, must be {question.q.shape}"
    if trial.spoilt is not None:
        question = replace(question, q=np.nan_to_num(question.q))
    for stop, count in trial.judged:
        part, start = question.last(stop, count), max(stop - count, 0)
        out, got = exam.truth(part), answer[:, :, start:stop]
        if trial.spoilt is not None:
            got = got.copy()
            got[:1, :, trial.spoilt] = out[:1, :, trial.spoilt]
        if trial.slack:
            got = out + np.sign(got - out) * np.maximum(np.abs(got - out) - trial.slack * np.abs(out), 0)
        with np.errstate(all="ignore"):
            if np.abs(got - out).max() <= 8 * (U64 if exam.dtype == "float64" else U32):
                continue  # every bound is greater than that, and takes longer
        prediction = exam.prediction(part, out)
        if prediction.ratio(got) > 1:
            return first_wrong(prediction, got, start)
    return ""


def _named(exam: Exam, asks: Asks, outcomes: list[Outcome]) -> Behaviour:
    """The mistakes that show, and in which calls. Nothing else is to blame where a number of tokens goes wrong in any
    call, and nothing at all is said where every number of tokens does: up to three tokens show little. Where every
    greater number goes wrong, too, it is not the number that is to blame if the weights tell what is."""
    wrong = {fault: [o for o in outcomes if o.trial.fault == fault and o.wrong] for fault in _FAULTS}
    right = {fault: [o for o in outcomes if o.trial.fault == fault and not o.wrong] for fault in _FAULTS}
    right[LENGTHS] = [o for o in right[LENGTHS] if o.trial.question.q.size]
    lengths = {o.trial.question.k.shape[-2] for o in wrong[LENGTHS]}
    good = {o.trial.question.k.shape[-2] for o in right[LENGTHS]}
    if lengths and not any(n > 3 for n in good):
        return {}
    from_some_on = bool(lengths) and max(good) < min(lengths)
    if from_some_on:
        lengths |= set(range(min(lengths), 2 * TOKENS + 1))
    for fault in _FAULTS:
        if fault not in (LENGTHS, LONG, CACHE):
            wrong[fault] = [o for o in wrong[fault] if not _sizes(o.trial) & lengths]
    named = {}
    for fault, failed in ((fault, failed) for fault, failed in wrong.items() if failed):
        outcome = min(failed, key=lambda o: o.trial.question.k.shape[-2])
        least = outcome.trial.question
        name, words = weighed(exam, asks, least)
        observation = _evidence(failed, right[fault]) + _likeness(exam, failed)
        observation += f'; question "{least.name}": {words}' if words else ""
        if fault == LENGTHS and name and from_some_on and _begins_right(exam, outcome, max(good), name):
            return {name: observation}
        if fault == DECODING and name == WINDOW and _from_some_keys_on(failed, right[fault], good):
            fault = name
        named[fault] = observation
    return named


def _from_some_keys_on(wrong: list[Outcome], right: list[Outcome], good: set[int]) -> bool:
    """Whether few queries go wrong over every number of keys above those that are right, in calls of many queries, too:
    then a window is not one of a path for few queries."""
    keys, others = ([o.trial.question.k.shape[-2] for o in outcomes] for outcomes in (wrong, right))
    return bool(max([*others, *good], default=0) < min(keys))


def _begins_right(exam: Exam, outcome: Outcome, n: int, name: str) -> bool:
    """Whether the first tokens of a wrong call are right, as they are in a call of no others: then the number of tokens
    is not to blame. Without causality they see the others, and a window alone is known by its name."""
    if not exam.spec.causal:
        return name == WINDOW
    part = outcome.trial.question.first(n)
    answer = np.empty(0) if outcome.answer is None else outcome.answer[:, :, :n]
    return exam.prediction(part, exam.truth(part)).ratio(answer) <= 1


def _sizes(trial: Trial) -> set[int]:
    """The numbers of tokens to which a wrong answer may be due: of decoding, the keys, or more than one query."""
    n, m = trial.question.q.shape[-2], trial.question.k.shape[-2]
    return {m, *[n] * (n > 1)} if trial.fault == DECODING else {n}


def _likeness(exam: Exam, wrong: list[Outcome]) -> str:
    """The known mistakes that give the numbers of the least of these calls, in words. Of a long one the last queries
    are predicted alone."""
    given = sorted((o for o in wrong if o.answer is not None), key=lambda o: o.trial.question.k.size)
    questions, answers = [], []
    for question, answer in [(o.trial.question, o.answer) for o in given if o.trial.question.k.shape[-2] > 2][:2]:
        n, whole = question.q.shape[-2], question.calls or question.q.shape[-2] <= 40
        if answer is not None and answer.shape == question.q.shape:
            questions.append(question if whole else question.last(n, 12))
            answers.append(answer if whole else answer[:, :, -12:])
    evidence = AttentionEvidence(replace(exam, questions=questions), answers, exam.grades[-1])
    alike = evidence.alike() if evidence.answers and evidence.failed else []
    words = [(h.faults[0].name, in_words(h.changes[0])) for h in alike]
    names = dict.fromkeys(f"{name} ({how})" if how else name for name, how in words)
    return f"; the numbers there are those of: {', '.join(names)}" if names else ""


def _evidence(wrong: list[Outcome], right: list[Outcome]) -> str:
    names = list(dict.fromkeys(o.trial.question.name for o in wrong))
    others = f"; right: {listed_names(list(dict.fromkeys(o.trial.question.name for o in right)))}" if right else ""
    if wrong[0].trial.fault in (LENGTHS, DECODING):
        some = ([o.trial.question for o in outcomes] for outcomes in (wrong, right))
        one = wrong[0].trial.fault == DECODING  # of one query by its keys
        others += lengths_in_words(*({q.k.shape[-2] for q in qs if not one or q.q.shape[-2] == 1} for qs in some))
    return f"wrong: {listed_names(names)}{others}; {names[0]}: {wrong[0].wrong}"


def overwritten(call: Callable[[Question], Any], draw: Questions) -> str:
    """Whether a result changes when the candidate is called again, with other numbers of the same shape: a few tokens,
    many, and one query over many keys, of which a kernel may keep a buffer each."""
    shapes = [(_FEW, _FEW)]
    if not draw.few_shapes:
        shapes += [(1, 1), (64, 64), (128, 128)]
        shapes += [(1, 64), (1, 300)] if draw.spec.rope is None else []
    for queries, keys in shapes:
        with contextlib.suppress(Unreadable):  # a shape that it need not take
            if changed := _changed(call, draw, queries, keys):
                return changed
    return ""


def _changed(call: Callable[[Question], Any], draw: Questions, queries: int, keys: int) -> str:
    """How much of the result of one call changes during the next, in words."""
    batch = 2 if keys <= 64 else 1
    first = call(draw.random("a first call", keys, queries=queries, batch=batch))
    before = first.copy()
    call(draw.random("a second call", keys, queries=queries, batch=batch))
    changed = int((~((first == before) | (np.isnan(first) & np.isnan(before)))).sum())
    name = _tokens(keys) if queries == keys else _over(queries, keys)
    return f"{name}: {changed} of {first.size} outputs of a result changed during the next call" if changed else ""
