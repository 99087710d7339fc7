"""Whether a function computes attention, softmax or linear, forwards or backwards, and what it does wrong instead.

A candidate is ``fn(q, k, v) -> o`` on NumPy arrays, q (b, h, n, d), k and v (b, g, t, d), o (b, h, n, d), or, with
RoPE inside, ``fn(q, k, v, positions) -> o`` with n = t and positions (b, n). Where n < t the queries are the last of
the tokens. If its signature has them, it is also called with ``mask=``, bool (b, 1, n, t), True is seen, in addition
to causality, and with ``segments=``, integers (b, n): tokens of different segments do not see each other. Positions
decide the rotation alone: who sees whom goes by the order of the tokens. A row that sees nothing must be zeros.
``incremental`` makes a function that is called like fn with the next tokens, and remembers those before:
``step = incremental(); o = step(q, k, v[, positions])``. A backward pass is ``fn(q, k, v, g[, positions])`` ->
(dq, dk, dv).

Every call is compared with the truth. If some are wrong, the rule that separates them is looked for, and a small wrong
one is measured and taken apart (`weights`, `gradients`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .. import checks
from ..backend import Array
from ..theta import Rope, check_rope
from . import gradients, rules, weights
from .attention_calls import PRODUCTS, Draw, Scope, calls, traits
from .candidate import COMPILES, COUNTS, UNIT, Candidate, Unreadable, wrapping
from .gradients import TENSORS
from .measured import rows_where
from .report import ErrorRow, Failure, Finding, Report, power_of_two, side_by_side
from .steps import DOUBTFUL, Allowed, Call, Spec, allowed, grades
from .tolerance import float_dtype

Function: TypeAlias = Callable[..., Any]
Begin: TypeAlias = Callable[[], Function] | None  # makes functions with a cache

SOFTMAX_GRADES = ("rounded once", "weights rounded", "scores rounded")
LINEAR_GRADES = ("rounded once", "features rounded")
EFFORTS = ("few", "usual", "thorough")
MAPS = ("elu+1", "exp", "relu", "relu2")  # whose denominators are positive
GROUPS = ((1, 16), (17, 128), (129, 1024), (1025, 10**9))  # numbers of keys, in tables of errors
BLIND = "with more queries than keys, queries that see nothing are not zeros: not judged; see cache=True"
TOP_LEFT = (
    "with fewer queries than keys the causal mask begins at the top left, as torch's is_causal=True has it: judged for "
    "prefill alone, n = t; with a cache, give a mask from the bottom right, and ask by cache=True"
)
OVERFLOW = (
    "q·k overflows float16 before it is scaled, as in eager code: judged where it does not; scale q first, or keep the "
    "products in float32, if q·k may be above 65504"
)
TRANSPOSED = "output: (b, n, h, d)"
# What is to blame, whatever the numbers say, if a rule for the wrong calls is about this trait.
PATHS = {"NaN in another row": "leak", "held in memory": "strides", "caches at once": "cache"}
LONG = {"causality", "window", "blocks", "keys", "normaliser", "online softmax"}  # they show best among many keys
ENOUGH = 60  # calls, nearly all of them wrong: more say nothing
FIRST = 20  # calls, before the share of wrong ones says anything
AGAIN = 3  # refused calls, or a few more, that are made again
READABLE = 200_000  # queries · keys² / features of a long call whose weights are read


# ── Asking ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Asked:
    """The candidate, called at once or, if a call has chunks, step by step."""

    def __init__(self, fn: Function, incremental: Begin, backward: bool) -> None:
        self.fn, self.begin, self.made = fn, incremental, list[Function]()
        self.whole = Candidate(wrapping(self._tidy, fn), none_is_zero=backward)
        self.steps, self.notes = Candidate(self._step), set[str]()
        self.fewest = 0  # key heads: calls with fewer are made to see whether it takes them

    def __call__(self, call: Call) -> list[Array]:
        """The result, or the three gradients, in float64. Raises `Unreadable`."""
        given = {"q": call.q, "k": call.k, "v": call.v, "g": call.g, "positions": call.positions}
        given = {name: x for name, x in given.items() if x is not None}
        if call.chunks:
            return [self._by_steps(call, given)]
        answers = self.whole(given, ["q"] if call.g is None else ["q", "k", "v"], call.options)
        if (lost := np.isnan(call.q).any(axis=-1)).any() and np.isfinite(answers[0][lost]).all():
            self.notes.add("a query of NaN comes out as numbers, as of nan_to_num: not judged")
        return answers

    def _tidy(self, *arrays: Array, **options: Array) -> Any:
        """What fn returns; shapes that are mistakes with a name are put right, and the mistake is kept."""
        out, (b, h, n, d) = self.fn(*arrays, **options), arrays[0].shape
        if isinstance(out, np.ndarray) and out.shape == (b, n, h, d) and n != h:
            self.whole.behaviour[TRANSPOSED] = f"q is {(b, h, n, d)}, the result {out.shape}"
            return out.swapaxes(1, 2)
        if not self.whole.none_is_zero:
            return out
        out = (None, None, None) if out is None else out
        return list(map(self._gathered, out, arrays)) if isinstance(out, tuple | list) else out

    def _gathered(self, x: Any, like: Array) -> Any:
        """A gradient; that of a key head, if there is one of every query head that reads it, as their sum."""
        b, g, t, d = like.shape
        shape: tuple[int, ...] = x.shape if isinstance(x, np.ndarray) else ()
        if shape[1:2] == (g,) or shape[:1] + shape[2:] != (b, t, d) or shape[1] % g:
            return x
        words = f"a gradient has shape {shape}, the argument {like.shape}"
        if g < self.fewest:
            raise Unreadable(f"returns a gradient of shape {shape} for an argument of {like.shape}", "", "type")
        self.whole.behaviour["shared key heads: not summed"] = words
        return x.reshape(b, g, -1, t, d).sum(axis=2).astype(x.dtype)

    def _by_steps(self, call: Call, given: dict[str, Array]) -> Array:
        """Every cache gets its rows, chunk after chunk, in turn with the others."""
        out, rows, stop = np.zeros(call.q.shape), np.array_split(np.arange(len(call.q)), call.caches), 0
        caches: list[list[Function]] = [[] for _ in rows]
        for count in call.chunks:
            at, stop = slice(stop, stop + count), stop + count
            for self.made, part in zip(caches, rows, strict=True):
                tokens = {
                    name: x[part][..., at] if name == "positions" else x[part, :, at] for name, x in given.items()
                }
                out[part, :, at] = self.steps(tokens, ["q"])[0]
        return out

    def _step(self, *arrays: Array) -> Any:
        """A function with a cache is made when it is first called: a failure to make one is told like any other."""
        if not self.made:
            self.made.append(self.begin() if self.begin else self.fn)
        return self.made[0](*arrays)

    def behaviour(self) -> dict[str, str]:
        for candidate in (self.whole, self.steps):
            candidate.look_again()
        return {**self.steps.behaviour, **self.whole.behaviour}


class Tried(NamedTuple):
    """A call, its answers, of the judged queries, and how far off they are."""

    call: Call
    answers: list[Array]
    limits: list[Allowed]
    ratio: float

    @property
    def wrong(self) -> bool:
        return self.ratio > 1

    @property
    def worst(self) -> int:
        """The index of the answer that is furthest off."""
        return max(range(len(self.limits)), key=lambda i: self.limits[i].ratio(self.answers[i]))

    @property
    def effort(self) -> int:
        """What it takes to read all weights."""
        return int(self.call.q.shape[2] * self.call.k.shape[2] ** 2 // self.call.q.shape[3])


@dataclass
class Check:
    """One candidate, what is meant, and what has been seen of it."""

    spec: Spec
    asked: Asked
    scope: Scope
    top: int  # positions are below
    grade: int  # the index of the least exact grade that is accepted
    cache: bool | None = None
    tried: list[Tried] = field(default_factory=list)
    refused: list[tuple[Call, Unreadable]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[Tried]:
        return [t for t in self.tried if t.wrong]

    def ask(self, call: Call) -> Any:
        """For diagnoses: the result, or the three gradients."""
        answers = self.asked(call)
        return answers if self.scope.backward else answers[0]

    def limits(self, call: Call, answers: Any = None, wrong: float = 0.0) -> list[Allowed]:
        """What is allowed of the least exact implementation that is right; no more exactly than it takes to judge the
        answers, if they are given."""
        return allowed(self.spec, call, [*grades(self.spec).values()][-1], answers, wrong)

    def judged(self, call: Call, answers: list[Array]) -> Tried:
        """Once calls are wrong, others need fewer noisy runs."""
        answers = [answers[0][:, :, call.judged]] if call.g is None else answers
        wrong = 0.0 if call.alike else len(self.wrong) / max(FIRST, len(self.tried))
        limits = self.limits(call, answers, wrong)
        return Tried(call, answers, limits, max(map(Allowed.ratio, limits, answers)))

    def make(self, first: list[Array] | None) -> None:
        """Makes all calls, or so many that nearly all are wrong; the first one may have been made."""
        for i, call in enumerate(calls(Draw(self.spec, self.top, self.scope))):
            if i == ENOUGH and len(self.wrong) > 0.9 * ENOUGH:
                break
            try:
                self.tried.append(self.judged(call, self.asked(call) if i or first is None else first))
            except Unreadable as error:
                self.refused.append((call, error))


# ── The verdict ──────────────────────────────────────────────────────────────────────────────────────────────────────


@np.errstate(all="ignore")
def examine(check: Check, first: list[Array] | None = None) -> Report:
    """The report about a candidate; ``first``: its answers to the plain call, if it was made."""
    check.make(first)
    if failure := _failure(check):
        return _report(check, "not judged", failure=failure)
    check.notes += [*_refusals(check), *check.asked.notes]
    _set_aside(check)
    findings, precision = [*_findings(check)], None
    if not check.wrong:
        reached, names = _grade(check), [*grades(check.spec)]
        precision = names[reached]
        if reached > check.grade:
            words = f'the grade "{names[check.grade]}" was asked for, "{precision}" was reached'
            findings.append(Finding(f"grade: {precision}", words))
    findings += [Finding(name, words) for name, words in check.asked.behaviour().items()]
    return _report(check, "wrong" if findings else "right", findings, precision)


def _report(check: Check, verdict: str, findings: Any = (), precision: Any = None, failure: Any = None) -> Report:
    kind = "attention" if check.spec.feature_map is None else "linear attention"
    expected = f"{'the gradients of ' * check.scope.backward}{_meant(check.spec)}"
    parts = kind + ", backward" * check.scope.backward, expected, verdict, tuple(findings), precision
    if failure is not None:
        return Report(*parts, notes=tuple(check.notes), failure=failure)

    def readings() -> Any:
        from .readings import of_attention

        return of_attention(check)

    errors = tuple(_errors(check, verdict == "right"))
    return Report(*parts, _described(check), errors=errors, notes=tuple(check.notes), readings=readings)


def _meant(spec: Spec) -> str:
    words = [f"{spec.heads} heads over {spec.key_heads}, d = {spec.head_dim}", "not " * (not spec.causal) + "causal"]
    words += [f"scale {spec.scale:.6g}"] if spec.feature_map is None else [f"feature map {spec.feature_map}"]
    words += [f"{name} {x}" for name, x in (("window", spec.window), ("softcap", spec.softcap)) if x is not None]
    words += [f"with {spec.rope!r} inside"] if spec.rope is not None else []
    kind = "softmax attention" if spec.feature_map is None else "linear attention, Eq. (19),"
    return f"{kind} of {', '.join(words)}, {spec.dtype.name}"


def _failure(check: Check) -> Failure | None:
    """Why the candidate cannot be judged: it must take the plain call, three in four of those like it and, if it was
    asked for them by name, some with a cache."""
    demands: dict[Callable[[Call], Any], float] = {
        lambda call: call.needed: 1.0,
        lambda call: _usual(check.spec, call): 0.75,
        lambda call: call.chunks: 0.0,
        lambda call: check.cache and call.q.shape[2] < call.k.shape[2]: 0.0,
    }
    for kind, share in demands.items():
        taken, refused = sum(bool(kind(t.call)) for t in check.tried), [x for x in check.refused if kind(x[0])]
        if refused and taken <= share * (taken + len(refused)) and (share or not taken):
            call, error = refused[0]
            failure, made = error.failure(), taken + len(refused)
            reason = f'{failure.reason}; so it does in {len(refused)} of {made} calls like "{call.name}"'
            reason += _apart([t.call for t in check.tried if kind(t.call)], [call for call, _ in refused])
            return replace(failure, reason=reason) if made > 1 else failure
    return None


def _usual(spec: Spec, call: Call) -> bool:
    """Whether a call differs from the plain one in its numbers, lengths and batch alone: who refuses another kind of
    call, such as positions that do not rise by one or fewer key heads, has made a choice."""
    rising = call.positions is None or bool((np.diff(call.positions) == 1).all())
    return call.square and rising and call.k.shape[1] == spec.key_heads and not (call.chunks or call.options)


def _apart(taken: list[Call], refused: list[Call]) -> str:
    """Which calls are refused, if there is a simple rule, and how many are taken."""
    columns = {name: x for name, x in traits(taken + refused).items() if "earlier" not in name}
    rule = rules.simplest(columns, [False] * len(taken) + [True] * len(refused))
    words = f", where {rule.words.replace('is right', 'is taken')}" if rule is not None and rule.exact else ""
    return f"{words}; it takes {len(taken)} of them"


def _refusals(check: Check) -> Iterator[str]:
    """What the candidate did not take."""
    alike: dict[str, list[tuple[Call, Unreadable]]] = {}  # by their reasons, which may differ in their numbers
    for call, error in check.refused:
        alike.setdefault(re.sub(r"\d+", "0", error.reason), []).append((call, error))
    for some in list(alike.values())[:4]:
        names = ", ".join(call.name for call, _ in some[:4]) + ", …" * (len(some) > 4)
        yield f"{len(some)} call{'s' * (len(some) > 1)} not taken by the candidate ({names}): {some[0][1].reason}"
    if check.scope.compiled:
        yield "each new shape is compiled, or each call starts a program: few shapes were tried"


def _set_aside(check: Check) -> None:
    """Leaves out, with a note, calls that a right kernel may answer in another way: masks from the top left,
    queries before all keys, and products that overflow float16."""
    few = [t for t in check.tried if t.call.q.shape[2] < t.call.k.shape[2]]
    first = (check.limits(replace(t.call, top_left=True)) for t in few)
    uneven = check.spec.causal and check.cache is None and any(t.wrong for t in few)
    uneven = uneven and not any(t.wrong and t.call.square for t in check.tried)
    uneven = uneven and all(max(map(Allowed.ratio, x, t.answers)) <= 1 for x, t in zip(first, few, strict=True))
    overflow = (t for t in check.wrong if t.call.name == PRODUCTS and not np.isfinite(t.answers[0]).all())
    excused = {
        TOP_LEFT: {id(t) for t in check.tried if uneven and not t.call.square},
        BLIND: {id(t) for t in check.wrong if not check.cache and _blind(check, t)},
        OVERFLOW: set(map(id, overflow)),
    }
    check.notes += [note for note, some in excused.items() if some]
    check.tried = [t for t in check.tried if not any(id(t) in some for some in excused.values())]


def _blind(check: Check, t: Tried) -> bool:
    """Whether queries before the first key are wrong, and no others; a NaN in their gradients reaches all keys."""
    sees = t.call.places[0] >= 0
    if sees.all():
        return False
    limit = check.limits(t.call)[0]
    right = (limit.error(t.answers[0]) <= limit.worst).all(axis=(0, 1, 3))
    return bool(right[sees].all() and not right.all())


def _grade(check: Check) -> int:
    """The index of the best grade that holds for some calls; backwards there is one alone."""
    *better, _ = grades(check.spec).values()
    some = [t for t in check.tried if t.call.k.shape[2] <= 130][:12]
    for i, rounding in enumerate([] if check.scope.backward else better):
        if all(allowed(check.spec, t.call, rounding, t.answers)[0].ratio(t.answers[0]) <= 1 for t in some):
            return i
    return len(better)


# ── What is wrong ────────────────────────────────────────────────────────────────────────────────────────────────────


def _findings(check: Check) -> Iterator[Finding]:
    if whole := _changing(check) or _axes(check):
        yield whole
        return
    yield from _explained(check) if check.wrong else ()
    for call, error in [x for x in check.refused if x[1].kind == "shape"][:1]:
        yield Finding("output: another shape", f'"{call.name}": {error.reason}')


def _changing(check: Check) -> Finding | None:
    """Whether the plain call, the first with a cache and the first wrong one return something else if made again, and
    whether calls that were refused are taken now."""
    for call, error in check.refused[:: max(len(check.refused) // AGAIN, 1)]:
        try:
            check.asked(call)
        except Unreadable:
            continue
        return Finding("state: a refused call is taken later", f'"{call.name}", refused at first: {error.reason}')
    for t in [check.tried[0], *[t for t in check.tried if t.call.chunks][:1], *check.wrong[:1]]:
        try:
            again = [check.judged(t.call, check.asked(t.call)).answers for _ in range(2)]
        except Unreadable as error:
            return Finding("state: the same call is refused later", f'"{t.call.name}", made again: {error.reason}')
        room = [2 * limit.worst for limit in check.limits(t.call)]
        off = max(_differing(t.answers, x, room) for x in again)
        if off:
            fact = f'"{t.call.name}", made again, returns other numbers: {off} of {sum(x.size for x in t.answers)}'
            rule = _rule(check)
            where = f"first answers are wrong exactly where {rule.words}" if rule and rule.exact else ""
            return Finding("state: the same call gives other numbers", fact, where)
    return None


def _axes(check: Check) -> Finding | None:
    """Whether the plain call is right if heads and tokens are exchanged, in its arguments and its answers."""
    t, asked = check.tried[0], Asked(check.asked.fn, None, check.scope.backward)
    given = {name: x.swapaxes(1, 2).copy() for name in "qkvg" if (x := getattr(t.call, name)) is not None}
    try:
        answers = [x.swapaxes(1, 2) for x in asked(replace(t.call, **given))] if t.wrong else t.answers
    except Unreadable:
        return None
    if not t.wrong or check.judged(t.call, answers).wrong:
        return None
    check.notes.clear()  # of calls whose heads, read as tokens, were not taken
    alone = check.asked.whole.behaviour.pop(TRANSPOSED, None) is not None
    words = "the arguments alone are" if alone else "arguments and result are"
    fact = f'"{t.call.name}" is right with axes 1 and 2, heads and tokens, exchanged: {words} (b, n, h, d)'
    return Finding("axes: (b, n, h, d)", fact, _where(check, None, t))


def _differing(before: list[Array], after: list[Array], room: list[Array]) -> int:
    """How many numbers differ by more than rounding explains."""
    both = ([np.nan_to_num(x, nan=1e300) for x in answers] for answers in (before, after))
    return sum(int((np.abs(a - b) > most).sum()) for a, b, most in zip(*both, room, strict=True))


def _rule(check: Check) -> rules.Rule | None:
    """The statement that separates wrong calls from right ones; what is saturated hides most mistakes."""
    if check.scope.effort == "few":  # calls that differ in their values alone
        return None
    speaks, columns = [t.wrong or not t.call.alike for t in check.tried], traits([t.call for t in check.tried])
    if len(check.wrong) < 3:  # any call has a number
        del columns["earlier calls"]
    return rules.simplest(columns, [t.wrong for t in check.tried], speaks)


def _explained(check: Check) -> list[Finding]:
    """The step that differs in a small wrong call, and the calls that are wrong."""
    rule, small = _rule(check), _telling(check)
    found, where = _measured(check, small), _where(check, rule, small)
    few = check.tried[0].wrong and len(check.tried) - len(check.wrong) < 4  # right calls: any rule would do
    exact = rule if rule is not None and rule.exact and not few else None
    path = PATHS.get(exact.about) if exact else None
    if found and path is None and not (exact and all(x.fault.startswith("unexplained") for x in found)):
        return [replace(x, where="; ".join(words for words in (x.where, where) if words)) for x in found]
    path = path or ("state" if exact and "earlier" in exact.about else "some calls")
    fault = f"{path}: {exact.words.partition(' (')[0]}" if exact else "unexplained"
    like = "".join(f"; there: {x.fault}: {x.fact}" for x in found)
    return [Finding(fault, f"{len(check.wrong)} of {len(check.tried)} calls are wrong{like}", where)]


def _steps(found: list[Finding]) -> set[str]:
    return {x.fault.partition(":")[0] for x in found}


def _telling(check: Check) -> Tried:
    """A small wrong call of many kinds of numbers, whose answers are not zeros, which say little."""
    plain = "plain" if check.spec.softcap is None else "sharp scores"

    def order(t: Tried) -> tuple[Any, ...]:
        single = t.call.q.shape[2] < 2 and t.call.k.shape[2] > 1  # a query alone may be right by many rules
        odd = not t.call.needed, single, t.call.alike, t.call.caches > 1, t.call.k.shape[2] < 9, len(t.call.q) < 2
        return (not any(x.any() for x in t.answers), t.call.name != plain, *odd, t.call.k.size * t.call.q.shape[2])

    return min(check.wrong, key=order)


def _measured(check: Check, small: Tried) -> list[Finding]:
    """What is measured in a small wrong call, or in a longer one if it is about the keys that are seen: more of them
    tell more."""
    found = _diagnosed(check, small)
    if not _steps(found) & LONG or check.scope.backward:
        return found
    readable = [t for t in check.wrong if t.effort <= READABLE and not t.call.chunks]
    longest = max(readable, key=lambda t: (t.call.square, t.call.q.shape[2] > 1, t.call.k.shape[2]), default=small)
    more = _diagnosed(check, longest) if longest is not small else []
    return more if more and _steps(more) <= LONG else found


def _diagnosed(check: Check, t: Tried) -> list[Finding]:
    """What is measured in a wrong call; nothing if it takes too long or the candidate refuses what is asked for it."""
    if t.effort > 100 * READABLE:
        return []
    try:
        limits = check.limits(t.call)
        if check.scope.backward:
            return gradients.diagnose(check.spec, check.ask, t.call, t.answers, limits)
        return weights.diagnose(check.spec, check.ask, t.call, t.answers[0], limits[0])
    except Unreadable:
        return []
    except Exception as error:  # whatever the candidate returns, its report is made
        words = f"the search for what is wrong stopped, by an error of its own: {type(error).__name__}: {error}"
        check.notes.append(words)
        return []


def _where(check: Check, rule: rules.Rule | None, t: Tried) -> str:
    """Which calls are wrong, and which rows and which number of one of them."""
    wrong, right = check.wrong, len(check.tried) - len(check.wrong)
    words = f"wrong in {len(wrong)} of {len(check.tried)} calls"
    if rule and (rule.exact or rule.share > 0.8 and " and " not in rule.words) and right > 3:
        words += f", {'exactly ' * rule.exact}where {rule.words}"
    elif right > 0.1 * len(wrong):
        words += f" ({', '.join(t.call.name for t in wrong[:4])}{', …' * (len(wrong) > 4)})"
    i = t.worst
    limit, answer, places = t.limits[i], t.answers[i], t.call.places[min(i, 1)]
    what = "key" if i else "query" if t.call.square else "token"
    words += f'; in "{t.call.name}" {rows}' if (rows := rows_where(limit, answer, what, places)) else ""
    at = np.unravel_index(int(np.argmax(np.nan_to_num(limit.error(answer) / limit.worst, nan=np.inf))), answer.shape)
    tensor = f"{TENSORS[i]}, " if len(t.answers) > 1 else ""
    number = f"row {at[0]}, head {at[1]}, {what} {places[at[2]]}, feature {at[3]}"
    due, got = side_by_side(float(limit.truth[at]), float(answer[at]))
    return f"{words}; {tensor}{number}: expected {due}, got {got}"


# ── What it rests on ─────────────────────────────────────────────────────────────────────────────────────────────────


def _described(check: Check) -> str:
    """How many calls, up to where, and what was not tried."""
    made = [t.call for t in check.tried]
    words = [f"{len(made)} calls", f"up to {max(x.q.shape[2] for x in made):,} queries"]
    words += [f"{max(x.k.shape[2] for x in made):,} keys", f"a batch of {max(len(x.q) for x in made):,}"]
    if check.spec.rope is not None:
        words.append(f"position {max(int(np.max(x.positions)) for x in made if x.positions is not None):,}")
    sizes = [size for x in made if (size := x.size)]
    words.append(f"values from {power_of_two(min(sizes))} to {power_of_two(max(sizes))}")
    if some := [len(x.chunks) for x in made if x.chunks]:
        words.append(f"{len(some)} sequences with a cache, up to {max(some)} calls each")
    missing = [f"{x}=" for x in ("mask", "segments") if x not in check.scope.options and check.spec.feature_map is None]
    missing += ["fewer queries than keys"] if all(x.square for x in made) else []
    missing += [] if some or check.scope.backward else ["caches (incremental=)"]
    return ", ".join(words) + (f"; not tried: {', '.join(missing)}" if missing else "")


def _errors(check: Check, right: bool) -> Iterator[ErrorRow]:
    """The worst error by the number of keys, or of each gradient."""
    usual = [t for t in check.tried if not t.call.alike and 0.5 < t.call.size < 16]
    for low, high in ((2, 130),) if check.scope.backward else GROUPS:  # of one key alone, dq and dk are 0
        some = [t for t in usual if low <= t.call.k.shape[2] <= high]
        keys = f"{low:,} to {max((t.call.k.shape[2] for t in some), default=0):,} keys"
        for i in range(len(some[0].answers) if some else 0):
            large = [t for t in some if np.abs(t.limits[i].truth).max(initial=0) > 0.01]  # gradients may be 0
            t = max(large or some, key=lambda t: t.limits[i].ratio(t.answers[i]))
            limit = t.limits[i] if 1 < t.ratio <= DOUBTFUL else check.limits(t.call)[i]  # by enough noisy runs
            error, size = limit.error(t.answers[i]), np.abs(limit.truth).max(axis=-1, keepdims=True)
            ulps = error / (2 * UNIT[check.spec.dtype.name] * np.maximum(size, 0.01 * size.max() + 1e-300))
            where = f"{TENSORS[i]}, {keys}" if len(t.answers) > 1 else keys
            last = float(ulps.max(initial=0)) if right else None
            yield ErrorRow(where, float(error.max(initial=0)), float(limit.worst.max(initial=0)), last)


# ── The public functions ─────────────────────────────────────────────────────────────────────────────────────────────


def check_attention(
    fn: Function, *, heads: int = 4, key_heads: int | None = None, head_dim: int | None = None, causal: bool = True,
    rope: Rope | None = None, window: int | None = None, softcap: float | None = None, scale: float | None = None,
    dtype: Any = np.float32, cache: bool | None = None, max_position: int = 4096, grade: str = "scores rounded",
    incremental: Begin = None, backward: bool = False, effort: str = "usual", framework: str | None = None,
) -> Report:  # fmt: skip
    """The verdict about attention: fn(q, k, v) -> o, or fn(q, k, v, positions) -> o if it turns q and k by ``rope``.

    >>> from pyrope import attention
    >>> check_attention(lambda q, k, v: attention(q, k, v, causal=True)).verdict
    'right'
    >>> check_attention(lambda q, k, v: attention(q, k, v, causal=True, scale=1.0)).faults
    ('scale: missing',)

    Arrays are q and o (b, h, n, d), k and v (b, g, t, d), positions (b, n); the queries are the last n of t tokens. The
    head of `pyrope.oracle.attention` says more.

    The options say what it is meant to do. Without ``key_heads`` there are as many as query heads, and fewer are tried
    where it takes them. Without ``cache`` fewer queries than keys are tried where it takes them, and may be masked from
    the top left, with a note; True demands them, False does not ask. ``max_position`` is for candidates with short
    tables. ``grade`` asks for better rounding than the least that is accepted, of `SOFTMAX_GRADES`. With ``backward``
    the candidate is the backward pass. ``effort`` is "few", "usual" or "thorough". With ``framework``, "torch", "jax",
    "mlx", "paddle" or "cupy", fn works on the arrays of that library, and its backward pass is the derived one.
    """
    head_dim = (64 if rope is None else check_rope(rope).head_dim) if head_dim is None else head_dim
    spec = _spec(heads, key_heads, head_dim, causal, rope, dtype)
    spec = replace(
        spec,
        scale=head_dim**-0.5 if scale is None else checks.in_range("scale", scale, spec.dtype),
        softcap=None if softcap is None else checks.in_range("softcap", softcap, spec.dtype),
        window=None if window is None else checks.integer("window", window, 1),
    )
    if cache is not None and checks.flag("cache", cache) and rope is not None:
        raise ValueError(
            "cache=True demands calls with fewer queries than keys, but with RoPE inside every token has a query: "
            "give incremental= instead, or leave cache out"
        )
    few = rope is None and cache is not False
    scope = Scope(few_queries=few, groups=key_heads is None, effort=effort, backward=backward)
    return _judged(fn, incremental, framework, spec, scope, max_position, grade, SOFTMAX_GRADES, cache)


def check_linear_attention(
    fn: Function, *, rope: Rope, heads: int = 4, key_heads: int | None = None, head_dim: int | None = None,
    feature_map: str = "elu+1", causal: bool = True, dtype: Any = np.float32, max_position: int = 4096,
    grade: str = "features rounded", incremental: Begin = None, backward: bool = False, effort: str = "usual",
    framework: str | None = None,
) -> Report:  # fmt: skip
    """The verdict about linear attention with RoPE, Eq. (19): fn(q, k, v, positions) -> o, or with ``backward``
    fn(q, k, v, g, positions) -> (dq, dk, dv). The options are those of `check_attention`; ``grade`` is one of
    `LINEAR_GRADES`."""
    d = checks.instance("rope", rope, Rope).head_dim if head_dim is None else head_dim
    spec = _spec(heads, key_heads, d, causal, rope, dtype)
    spec = replace(spec, feature_map=checks.choice("feature_map", feature_map, MAPS), scale=d**-0.5)
    if feature_map.startswith("relu") and d < 16:
        raise ValueError(f"head_dim must be at least 16 for {feature_map}, was {d}: features would be all zeros")
    scope = Scope(groups=key_heads is None, effort=effort, backward=backward)
    return _judged(fn, incremental, framework, spec, scope, max_position, grade, LINEAR_GRADES)


def assert_attention(fn: Function, **options: Any) -> None:
    """Raises `Mismatch`, with the report of `check_attention`, unless the candidate is right; `NotJudged`, from its own
    exception, if it cannot be judged."""
    __tracebackhide__ = True
    check_attention(fn, **options).raise_unless_ok()


def assert_linear_attention(fn: Function, **options: Any) -> None:
    """Raises `Mismatch`, with the report of `check_linear_attention`, unless the candidate is right; `NotJudged`,
    from its own exception, if it cannot be judged."""
    __tracebackhide__ = True
    check_linear_attention(fn, **options).raise_unless_ok()


def _spec(heads: int, key_heads: int | None, head_dim: int, causal: bool, rope: Rope | None, dtype: Any) -> Spec:
    heads, head_dim = checks.size("heads", heads), checks.size("head_dim", head_dim)
    checks.size("heads·head_dim", heads * head_dim)
    g = heads if key_heads is None else checks.size("key_heads", key_heads)
    if heads % g:
        raise ValueError(f"key_heads must divide heads, {heads}, was {g}")
    if rope is not None and (check_rope(rope).axes is not None or rope.head_dim != head_dim):
        raise ValueError(f"rope must have one axis and the head_dim of the check, head_dim={head_dim}, was {rope!r}")
    return Spec(heads, g, head_dim, checks.flag("causal", causal), float_dtype(dtype), rope=rope)


def _judged(
    fn: Function, incremental: Begin, framework: str | None, spec: Spec, scope: Scope, top: int, grade: str,
    known: tuple[str, ...], cache: bool | None = None,
) -> Report:  # fmt: skip
    """The report, once the other arguments are checked."""
    for name, value, of in (("fn", fn, "of q, k and v"), ("incremental", incremental or len, "that makes one")):
        if not callable(value):
            raise TypeError(f"{name} must be a function {of}, was {type(value).__name__}")
    backward, exact = checks.flag("backward", scope.backward), checks.choice("grade", grade, known) != known[-1]
    if backward and exact:
        raise ValueError("a backward pass has no grades: leave out grade=, or backward=")
    if backward and (cache or incremental is not None):
        raise ValueError("a backward pass has no cache: leave out cache= and incremental=, or backward=")
    checks.choice("effort", scope.effort, EFFORTS)
    top, begin = checks.integer("max_position", top, 512, checks.MAX_POSITION), incremental
    if framework is not None:
        from . import adapters

        fn = adapters.framework(fn, framework, "qkv" if backward else None)
        begin = incremental and (lambda: adapters.framework(incremental(), framework))
    asked = Asked(fn, begin, backward)
    options = asked.whole.accepts("mask", "segments") if spec.feature_map is None else ()
    scope = replace(scope, options=frozenset(options), caches=begin is not None)
    asked.fewest = spec.key_heads if scope.groups else 0
    check = Check(spec, asked, scope, top, known.index(grade), cache)
    return examine(check, _first(check))


def _first(check: Check) -> list[Array] | None:
    """The answer to the plain call, as the candidate takes it: with the most key heads, if it was written for grouped
    heads alone, or with positions that are counted; None if it takes none. Where it compiles, few shapes are tried."""
    meant, scope = check.spec, check.scope
    for g in range(meant.key_heads, 0, -1) if scope.groups else (meant.key_heads,):
        for counted in (False, True) if meant.heads % g == 0 else ():
            spec, other = replace(meant, key_heads=g), replace(scope, counted=counted)
            try:
                first = check.asked(next(calls(Draw(spec, check.top, other))))
            except Unreadable:
                if COUNTS not in check.asked.whole.traits:
                    break
                check.scope = replace(scope, counted=True)  # a failure is that of a call that it should take
                continue
            check.spec, check.scope = spec, replace(other, compiled=COMPILES in check.asked.whole.traits)
            check.notes += [f"judged with {g} key heads, since it does not take {meant.key_heads}"] * (spec != meant)
            return first
    return None
