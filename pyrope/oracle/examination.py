"""How a candidate for attention, softmax or linear, is examined: asked, judged, and its mistakes named in a report.

If its answers are not right, known mistakes are tried (`explain.search`), then the tolerance of a smaller dtype, then
who influences whom.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .. import checks
from ..backend import Array
from ..theta import Rope, check_rope
from .ask import Behaviour, Candidate, Unreadable, ask, compiles
from .attention_evidence import AttentionEvidence, Exam, call_by_call
from .attention_faults import BEHAVIOUR, Measurements
from .attention_trials import Trial, caches, decoding, orders, overwritten, run_trials
from .explain import Change, Fault, Hypothesis, Suspect, findings, search
from .floats import NARROW, UNIT
from .questions import ORDERS, PRODUCTS, Question, Questions
from .readings import attention_readings
from .report import Failure, Finding, Report
from .responses import dropped_weights, some_weights, weighed
from .tolerance import ANGLE32
from .truth import Spec

Begin: TypeAlias = Callable[[], Candidate] | None  # makes candidates with a cache


def make_spec(
    heads: int, key_heads: int, head_dim: int, causal: bool, rope: Rope | None, *, dtype: np.dtype[Any],
    window: int | None = None, softcap: float | None = None, scale: float | None = None,
) -> Spec:  # fmt: skip
    """What is meant, if it can be."""
    heads, key_heads, head_dim = (
        checks.size(*one) for one in (("heads", heads), ("key_heads", key_heads), ("head_dim", head_dim))
    )
    checks.size("heads·head_dim", heads * head_dim)
    if heads % key_heads:
        raise ValueError(f"key_heads must divide heads, {heads}, was {key_heads}")
    if rope is not None and (check_rope(rope).axes is not None or rope.head_dim != head_dim):
        raise ValueError(f"rope must have one axis and a head_dim of {head_dim}, was {rope!r}")
    return Spec(
        heads,
        key_heads,
        head_dim,
        checks.flag("causal", causal),
        scale=head_dim**-0.5 if scale is None else checks.in_range("scale", scale, dtype),
        window=None if window is None else checks.integer("window", window, 1),
        softcap=None if softcap is None else checks.in_range("softcap", softcap, dtype),
        rope=rope,
        low=dtype if dtype.itemsize == 2 else np.dtype(np.float16),
    )


@np.errstate(all="ignore")  # whatever the answers are
def examine(
    exam: Exam,
    fn: Candidate,
    incremental: Begin,
    asked: int,
    trials: Trials | None = None,
    grouped: Iterable[Exam] = (),
) -> Report:
    """The report about a candidate that is asked everything, twice; ``asked`` is the index of the worst grade that is
    accepted. If it is right, it is asked the trials, too, and, as far as it takes them, grouped key heads."""
    behaviour, notes = Behaviour(), list(exam.notes)
    try:
        exam, answers, refusal = _answered(exam, fn, incremental, behaviour, notes)
    except Unreadable as error:
        return _not_judged(exam, notes, error.failure())
    evidence, reached = _graded(exam, answers, lambda question: _ask(fn, incremental, question, Behaviour()))
    rest = _prefill(evidence) if reached is None and exam.prefill else None
    if rest and (changed := _mask_kept(evidence)):
        behaviour["state between calls"] = changed
    elif rest:
        notes.append(_TOP_LEFT)
        trials = trials and trials._replace(others=tuple(some for some in trials.others if some is not decoding))
        evidence, reached = _graded(*rest, evidence.asks)
    if reached is None and exam.dtype == "float16" and (rest := _within_float16(evidence)):
        notes.append(_OVERFLOW)
        evidence, reached = _graded(*rest, evidence.asks)
    behaviour |= _state(evidence, fn, incremental)
    wrong = [_behaviour(name, observation) for name, observation in behaviour.items()]
    try:
        changing = behaviour.get("state between calls", "")
        if (changing or reached is None) and (lost := dropped_weights(evidence)):
            wrong = [finding for finding in wrong if finding.fault != "state between calls"]
            wrong.append(_behaviour("dropout", f"{lost}; {changing}" if changing else lost))
        elif "state between calls" not in behaviour:  # what follows from it is not listed
            wrong += _arithmetic(evidence, reached, asked, fn)
            wrong = _with_trials(wrong, evidence, fn, incremental, None if refusal else trials, notes)
        if not wrong and not refusal:
            wrong += _grouped(grouped, fn, asked, notes)
    except Exception as error:  # whatever the candidate returns, its report is made
        reason = f"the search for what is wrong stopped, by an error of its own: {type(error).__name__}: {error}"
        if reached is None and not wrong:
            wrong.append(_unexplained(f"{len(evidence.failed)} of {len(answers)} questions have wrong answers"))
        if not wrong:  # what was asked so far is right, but not all that is asked for "right"
            fix = "this is a mistake of pyrope: please report it, with the function"
            return _not_judged(exam, notes, Failure(reason, "", fix))
        notes.append(reason)
    if refusal and {finding.fault for finding in wrong} <= {"unexplained"}:
        return _not_judged(exam, notes, refusal)
    precision, verdict = None if reached is None else exam.grades[reached], "wrong" if wrong else "right"
    errors, readings, parts = evidence.errors(), attention_readings(evidence), (exam.kind.subject, exam.expected)
    return Report(*parts, verdict, tuple(wrong), precision, errors, tuple(notes), readings=readings)


def _not_judged(exam: Exam, notes: Sequence[str], failure: Failure) -> Report:
    return Report(exam.kind.subject, exam.expected, "not judged", notes=tuple(notes), failure=failure)


class Trials(NamedTuple):
    """The special calls that a candidate is tried with."""

    draw: Questions
    lengths: Callable[[Questions], Iterator[Trial]]
    others: tuple[Callable[[Questions], Iterator[Trial]], ...]


_HARMLESS = ("wrong dtype out", "mutates its input", "coarser than asked")
_TOP_LEFT = (
    "with fewer queries than keys the causal mask begins at the top left, as torch's is_causal=True has it: judged for "
    "prefill alone, n = m; with a cache, give a mask from the bottom right, and ask by cache=True"
)

_OVERFLOW = (
    "q·k overflows float16 before it is scaled, as in eager code: judged where it does not; scale q first, or keep the "
    "products in float32, if q·k may be above 65504"
)


def _graded(
    exam: Exam, answers: Sequence[Array], asks: Callable[[Question], Array] | None
) -> tuple[AttentionEvidence, int | None]:
    """The evidence at the best grade that holds, and its index; if none does, at the worst."""
    by_grade = [AttentionEvidence(exam, answers, grade, asks=asks) for grade in exam.grades]
    reached = next((level for level, evidence in enumerate(by_grade) if evidence.holds), None)
    return by_grade[-1 if reached is None else reached], reached


def _cut(evidence: AttentionEvidence, kept: list[int]) -> tuple[Exam, list[Array]]:
    """Some of the questions, and their answers."""
    cut = replace(evidence.exam, questions=[evidence.exam.questions[i] for i in kept])
    return cut, [evidence.answers[i] for i in kept]


def _within_float16(evidence: AttentionEvidence) -> tuple[Exam, list[Array]] | None:
    """The questions whose products q·k are within float16, if their answers are finite and those of others are not."""
    finite = [bool(np.isfinite(answer).all()) for answer in evidence.answers]
    within = [question.name != PRODUCTS for question in evidence.exam.questions]
    if all(within) or finite != within:
        return None
    return _cut(evidence, [i for i, kept in enumerate(within) if kept])


def _prefill(evidence: AttentionEvidence) -> tuple[Exam, list[Array]] | None:
    """The questions with as many queries as keys, if all others are answered as a mask from the top left does."""
    questions = evidence.exam.questions
    square = [i for i, question in enumerate(questions) if question.q.shape[-2] == question.k.shape[-2]]
    others = [i for i in range(len(questions)) if i not in square]
    if not square or not others or not all(i in others for i in evidence.failed):
        return None
    for fields in ({"corner": "top left"}, {"corner": "top left", "empty": "NaN"}):
        if all(evidence.predict(fields, i).ratio(evidence.answers[i]) <= 1 for i in others):
            return _cut(evidence, square)
    return None


def _mask_kept(evidence: AttentionEvidence) -> str:
    """Whether few queries over a new number of keys are answered otherwise after a call of as many queries as keys, in
    words: then a mask is kept by its keys, and nothing begins at the top left but its first rows."""
    questions = evidence.exam.questions
    used = {question.k.shape[-2] for question in questions}
    square = next(question for question in questions if question.q.shape[-2] == question.k.shape[-2])
    few = next(question for question in questions if question.q.shape[-2] < question.k.shape[-2])
    few = next((x for n in range(few.q.shape[-2] - 1, 0, -1) if (x := few.last(n, n)).k.shape[-2] not in used), few)
    m = few.k.shape[-2]
    if evidence.asks is None or m in used or square.k.shape[-2] < m:
        return ""
    q, k, v = (np.ascontiguousarray(x) for x in (few.q, few.k, few.v))
    few = replace(few, q=q, k=k, v=v)
    try:
        first, _, again = (evidence.asks(question) for question in (few, square.first(m), few))
    except Unreadable:  # a shape that it need not take
        return ""
    if first.shape != again.shape:
        return ""
    out = evidence.exam.truth(few)
    most = 2 * evidence.exam.prediction(few, out).allowed.worst
    with np.errstate(all="ignore"):
        same = (np.abs(again - first) <= most) | (again == first) | (np.isnan(again) & np.isnan(first))
    n, wrong = few.q.shape[-2], int((~same).sum())
    return f"{wrong} of {same.size} outputs of {n} queries over {m} keys differ after {m} over {m}" if wrong else ""


def _arithmetic(evidence: AttentionEvidence, reached: int | None, asked: int, fn: Candidate) -> list[Finding]:
    """What is wrong with the answers."""
    exam = evidence.exam
    if reached is None:
        return _nothing_there(evidence) or explained(evidence, fn) or _symptoms(fn, evidence)
    if reached <= asked:
        return []
    grade = exam.grades[reached]
    more = f'; the grade "{exam.kind.narrow_grades[asked]}" was asked for, "{grade}" was reached'
    fault = BEHAVIOUR["coarser than asked"] if grade == ANGLE32 else exam.kind.low
    return [_noise(fault, replace(evidence, grade=exam.grades[asked]), more)]


def _with_trials(
    wrong: list[Finding],
    evidence: AttentionEvidence,
    fn: Candidate,
    incremental: Begin,
    trials: Trials | None,
    notes: list[str],
) -> list[Finding]:
    """The findings, with those of special calls, if no mistake is known yet. What is unexplained is tried at other
    lengths alone, or with other calls of a cache if it shows there only: that may say what it is."""
    if trials is None or {finding.fault for finding in wrong} - {"unexplained", *_HARMLESS}:
        return wrong
    exam, draw, seen = evidence.exam, trials.draw, Behaviour()

    def asks(question: Question) -> Array:
        return _ask(fn, incremental, question, seen)

    unexplained = any(finding.fault == "unexplained" for finding in wrong)
    listed: tuple[Callable[[Questions], Iterator[Trial]], ...] = (trials.lengths, *trials.others)
    draw.few_shapes = compiles()
    if draw.few_shapes:
        notes.append("each new shape is compiled: few lengths were tried")
    if unexplained:
        listed = (_likely(evidence, trials),)
    named, refused = run_trials(exam, asks, (trial for some in listed for trial in some(draw)))
    notes += refused
    if unexplained:
        part = [] if named else _confined(evidence) or _weighed(evidence)
        kept = [finding for finding in wrong if finding.fault != "unexplained"] if named or part else wrong
        return kept + part + [_behaviour(name, observation) for name, observation in named.items()]
    with contextlib.suppress(Unreadable):  # it took these shapes before
        if changed := overwritten(lambda question: _ask_raw(fn, question), draw):
            named["result overwritten"] = changed
    after = _state(evidence.part([0]), fn, incremental)
    named = {name: f"after longer calls, {observation}" for name, observation in after.items()} or named
    names = {finding.fault for finding in wrong}
    named = {**{name: words for name, words in seen.items() if name not in names}, **named}
    return wrong + [_behaviour(name, observation) for name, observation in named.items()]


def _likely(evidence: AttentionEvidence, trials: Trials) -> Callable[[Questions], Iterator[Trial]]:
    """The trials that may say what is special about the questions with wrong answers."""
    wrong = [evidence.exam.questions[i] for i in evidence.failed]
    if all(question.calls for question in wrong):
        return caches
    return orders if all(question.name == ORDERS for question in wrong) else trials.lengths


def _confined(evidence: AttentionEvidence) -> list[Finding]:
    """The known mistakes that give all wrong answers, where others are right: made in a part of the calls."""
    exam, failed = evidence.exam, evidence.failed
    part = evidence.part(failed)
    if len(failed) == len(exam.questions) or not (matches := part.alike()):
        return []
    names = ", ".join(f'"{exam.questions[i].name}"' for i in failed)
    where = f" It is made in a part of the calls: {names}; the others are right. {evidence.separated()}".rstrip()
    return findings(matches, lambda match, k: part.explained_by(match, k) + where, evidence.since(failed[0]))


def _weighed(evidence: AttentionEvidence) -> list[Finding]:
    """What the weights in the first wrong answer that has random numbers say about the keys that are seen."""
    asked = evidence.exam.questions
    i = next((i for i in evidence.failed if asked[i].random), None)
    name, words = ("", "") if i is None else weighed(evidence.exam, evidence.asks, asked[i])
    described = f'{evidence.described()}; question "{asked[i or 0].name}": {words}.'
    return [_behaviour(name, described, evidence.since(evidence.failed[0]))] if name else []


def _grouped(exams: Iterable[Exam], fn: Candidate, asked: int, notes: list[str]) -> list[Finding]:
    """What is wrong with fewer key heads than query heads, which a candidate need not take."""
    for exam in exams:
        heads = f"{exam.spec.key_heads} key head{'s' * (exam.spec.key_heads > 1)} for {exam.spec.heads}"
        try:
            answers = [_ask(fn, None, question, Behaviour()) for question in exam.questions]
        except Unreadable as error:
            notes.append(f"{heads} were not tried: {error.reason}")
            return []
        if any(answer.shape != question.q.shape for answer, question in zip(answers, exam.questions, strict=True)):
            notes.append(f"{heads} were not tried: the results have another shape")
            return []
        evidence, reached = _graded(exam, answers, lambda question: _ask(fn, None, question, Behaviour()))
        if wrong := _arithmetic(evidence, reached, asked, fn):
            return [replace(finding, evidence=f"With {heads}: {finding.evidence}") for finding in wrong]
    return []


# ── Asking ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _ask(fn: Candidate, incremental: Begin, question: Question, behaviour: Behaviour) -> Array:
    """The answer to a question, in float64. Raises `Unreadable` if it has neither the shape of q, nor that with heads
    and tokens exchanged, which is a mistake with a name."""
    call = f'for the question "{question.name}", {question.shapes}, {question.q.dtype}'
    arguments, options, own = question.arguments, question.options, Behaviour()
    if question.calls and incremental is not None:
        begin = incremental
        out = ask(lambda *arrays: call_by_call(begin(), question.calls, arrays), arguments, options, call, own)
    else:
        out = ask(fn, arguments, options, call, own)
    b, h, n, d = question.q.shape
    if out.shape not in ((b, h, n, d), (b, n, h, d)):
        raise Unreadable(f"returns the shape {out.shape} instead of {question.q.shape}", call, "shape")
    for name, observation in own.items():
        behaviour.setdefault(name, f'question "{question.name}": {observation}')
    return out.astype(np.float64)


def _ask_raw(fn: Candidate, question: Question) -> Array:
    """The very array that the candidate returns."""
    return ask(fn, question.arguments, question.options, f'in "{question.name}"', Behaviour())


def _answered(
    exam: Exam, fn: Candidate, incremental: Begin, behaviour: Behaviour, notes: list[str]
) -> tuple[Exam, list[Array], Failure | None]:
    """The exam with the questions that the candidate answers, the answers, and why they do not suffice for "right", if
    so. Raises the first `Unreadable` if it answers none, or none of a kind that was asked for by name."""
    answers, refused = dict[int, Array](), dict[int, Unreadable]()
    for i, question in enumerate(exam.questions):
        try:
            answers[i] = _ask(fn, incremental, question, behaviour)
        except Unreadable as error:
            refused[i] = error
    kinds = {exam.questions[i].demand for i in answers}
    for i, failure in refused.items():
        if not answers or (exam.questions[i].demand or "") not in {"", *kinds}:
            raise failure
    refusal = _refusal(exam.questions, refused)
    if refused and refusal is None:
        names, reason = [exam.questions[i].name for i in refused], next(iter(refused.values())).reason
        notes.append(f"not taken by the candidate: {', '.join(names)}; {reason}")
    return replace(exam, questions=[exam.questions[i] for i in answers]), list(answers.values()), refusal


def _refusal(questions: Sequence[Question], refused: Mapping[int, Unreadable]) -> Failure | None:
    """Why a candidate cannot be called right by what it takes: for that it must take the first question, and at least
    half of the plain ones. Whatever is special about the others it may refuse."""
    plain = [i for i, question in enumerate(questions) if question.plain]
    missed = [i for i in plain if i in refused]
    if 0 not in refused and 2 * len(missed) <= len(plain):
        return None
    taken = ", ".join(f'"{questions[i].name}" ({questions[i].shapes})' for i in plain if i not in refused)
    names, first = ", ".join(f'"{questions[i].name}"' for i in missed), refused[missed[0]]
    return Failure(
        f"it refuses {len(missed)} of {len(plain)} plain calls, {names}: {first.reason}; it takes {taken or 'none'}",
        first.received,
        "let it take any number of rows and tokens, with positions (b, n) where there are positions, or wrap it in a "
        "function that does, row by row or by padding",
        first.__cause__,
    )


def _state(evidence: AttentionEvidence, fn: Candidate, incremental: Begin) -> Behaviour:
    """Whether the same calls in the reverse order, the last one twice in a row, and the first wrong one twice
    more, return something else. Two right results may differ, by twice what rounding explains."""
    for i in (*reversed(range(len(evidence.answers))), *2 * evidence.failed[:1]):
        question = evidence.exam.questions[i]
        before, (out, allowed) = evidence.answers[i], evidence.right(i)
        try:
            again = _ask(fn, incremental, question, Behaviour())
        except Unreadable as error:
            return {"state between calls": f'question "{question.name}", the same call twice: then {error.reason}'}
        if again.shape != before.shape:
            changed = f"the shape was {before.shape}, then {again.shape}"
        else:
            most = 2 * (allowed.worst if before.shape == out.shape else allowed.worst.max())
            with np.errstate(all="ignore"):
                same = (np.abs(again - before) <= most) | (again == before) | (np.isnan(again) & np.isnan(before))
            changed = "" if same.all() else f"{int((~same).sum())} of {same.size} outputs differ"
        if changed:
            return {"state between calls": f'question "{question.name}", the same call twice: {changed}'}
    return {}


def _behaviour(name: str, evidence: str, since: int | None = None) -> Finding:
    return BEHAVIOUR[name].finding(evidence, since)


def _nothing_there(evidence: AttentionEvidence) -> list[Finding]:
    """Outputs that are all NaN or infinite, or all zeros, say nothing about what led to them."""
    if not any(np.isfinite(answer).any() for answer in evidence.answers):
        return [_behaviour("not finite", "no output of any question is finite")]
    if not any(answer.any() for answer in evidence.answers):
        return [_behaviour("zeros returned", "every output of every question is zero")]
    return []


# ── Names for what is wrong ──────────────────────────────────────────────────────────────────────────────────────────


def explained(evidence: AttentionEvidence, fn: Candidate | None = None) -> list[Finding]:
    """The mistakes that give the answers, or low precision. With the candidate, some numbers are read from it; without,
    they are searched for."""
    known = evidence.exam.known(Measurements())
    names = {fault.name for fault, _ in known}

    def measured() -> Iterator[Suspect]:
        numbers = evidence.exam.kind.measure(evidence, fn)
        return (named for named in evidence.exam.known(numbers) if named[0].name not in names)

    matches = [_by_parts(match, evidence) for match in search(evidence, known, measured)]
    matches.sort(key=lambda match: len(match.faults))  # one mistake before two that fit as well
    return findings(matches, evidence.explained_by, evidence.since(evidence.failed[0])) or _low_precision(evidence)


def _by_parts(match: Hypothesis, evidence: AttentionEvidence) -> Hypothesis:
    """A rope of another base that has another pairing or direction, too, is two mistakes."""
    meant, rope = evidence.exam.spec.rope, match.fields.get("rope")
    if meant is None or rope is None or [fault.name for fault in match.faults] != ["wrong base"]:
        return match
    parts = {
        "wrong pairing": (rope.layout != meant.layout, f"{rope.layout} instead of {meant.layout}"),
        "direction": (rope.direction != meant.direction, "turned by −mθ"),
    }
    others = [(evidence.exam.kind.faults[name], Change(note, {})) for name, (differs, note) in parts.items() if differs]
    faults, changes = zip(*others, (match.faults[0], match.changes[0]), strict=True)
    return Hypothesis(faults, changes)


def _low_precision(evidence: AttentionEvidence) -> list[Finding]:
    """Low precision inside: all would be well, or nearly so, at the tolerance of a smaller dtype, and the errors look
    like its rounding."""
    smaller = [name for name in ("float32", *NARROW) if UNIT[name] > evidence.eps]
    exams = [replace(evidence.exam, dtype=name) for name in smaller]
    others = [replace(evidence, exam=exam, grade=exam.grades[-1]) for exam in exams]
    within = [other for other in others if other.holds]
    fitting = [other for other in within if evidence.rounds_to(other.exam.dtype)]
    fitting = fitting or [other for other in others if other.loses_weights]
    if fitting:
        return [_noise(evidence.exam.kind.low, evidence, f", but within what {fitting[0].exam.dtype} allows")]
    evidence.remarks.extend(f"as small as {other.exam.dtype}'s rounding, but not like it" for other in within[:1])
    return []


def _noise(fault: Fault, evidence: AttentionEvidence, more: str) -> Finding:
    since = evidence.since(evidence.failed[0])
    return fault.finding(f"{evidence.described()}{more}.", since)


def _symptoms(fn: Candidate, evidence: AttentionEvidence) -> list[Finding]:
    """What can be said without a mistake that fits: who influences whom, by changing keys that must not matter."""
    exam, described = evidence.exam, evidence.described()
    if scales := evidence.exam.kind.subject == "attention" and evidence.scales():
        return [exam.kind.faults["scale by the length"].finding(f"{described}; {scales}.")]
    if elsewhere := _elsewhere(evidence):
        name, how = elsewhere
        return [exam.kind.faults[name].finding(f"{described}; {how}.")]
    (_, h, _, _), (_, g, _, _) = exam.questions[0].q.shape, exam.questions[0].k.shape
    every, own = slice(None), slice(0, h - h // g)
    trials: list[tuple[str, Any, Any, str]] = [
        ("batch rows mixed", (0,), (slice(1, None),), "keys of the first row change others"),
        ("batch rows mixed", (slice(1, None),), (0,), "keys of other rows change the first row"),
        ("heads mixed", (every, g - 1), (every, own), "keys of the last head change other heads"),
    ]
    if exam.spec.causal:
        last = (every, every, slice(-1, None)), (every, every, slice(0, -1))
        trials.append(("not causal", *last, "the last key changes outputs before it"))
    influences = {
        name: exam.kind.faults[name].finding(f"{described}; {how}.")
        for name, keys, outputs, how in trials
        if _moves(fn, evidence, keys, outputs)
    }
    if influences:
        return ([*influences] == ["not causal"] and _weighed(evidence)) or [*influences.values()]
    if not np.isfinite(evidence.answers[evidence.failed[0]]).all():
        return [_behaviour("not finite", described)]
    name, response = exam.kind.response(evidence)
    if name:
        return [exam.kind.faults[name].finding(f"{described}; {response}.")]
    more = (evidence.multiple(), *evidence.remarks, evidence.separated(), response, some_weights(evidence))
    return [_unexplained("; ".join((described, *(words for words in more if words))))]


def _elsewhere(evidence: AttentionEvidence) -> tuple[str, str] | None:
    """Whether some rows or heads are zeros or the right results of others, and all other outputs are right."""
    i = evidence.failed[0]
    (out, allowed), answer = evidence.right(i), evidence.answers[i]
    if answer.shape != out.shape or np.shape(allowed.worst) != out.shape:
        return None
    for axis, name, place in ((0, "batch rows mixed", "row"), (1, "heads mixed", "head")):
        got, right, most = (np.moveaxis(x, axis, 0) for x in (answer, out, allowed.worst))
        sources = {}
        for a, result in enumerate(got):
            others = [b for b in range(len(right)) if (np.abs(result - right[b]) <= np.maximum(most[a], most[b])).all()]
            sources[a] = a if a in others else others[0] if others else None
        wrong = {a: b for a, b in sources.items() if a != b}
        if wrong and None not in wrong.values():
            listed = ", ".join(f"{place} {a} is the right result of {place} {b}" for a, b in wrong.items())
            return name, f"{listed}, all others are right"
        if 0 < len(wrong) < len(got) and all(b is None and not got[a].any() for a, b in wrong.items()):
            evidence.remarks.append(f"{place}s {', '.join(map(str, wrong))} are zeros, all others are right")
    return None


def _unexplained(evidence: str) -> Finding:
    return Finding("unexplained", evidence, "none of the known mistakes gives these numbers", "compare step by step")


def _moves(fn: Candidate, evidence: AttentionEvidence, keys: Any, outputs: Any) -> bool:
    """Whether other keys and values there change the answer to the first question here."""
    question, before, (out, allowed) = evidence.exam.questions[0], evidence.answers[0], evidence.right(0)
    k, v = question.k.copy(), question.v.copy()
    k[keys], v[keys] = -k[keys], -v[keys]
    try:
        again, changed = (_ask(fn, None, asked, Behaviour()) for asked in (question, replace(question, k=k, v=v)))
    except Unreadable:  # though it took the same shapes before
        return False
    if not out.shape == before.shape == again.shape == changed.shape:
        return False
    with np.errstate(all="ignore"):
        by_itself, moved = (
            np.abs(x - before) > 2 * np.broadcast_to(allowed.worst, out.shape) for x in (again, changed)
        )
        return bool(moved[outputs].any() and not by_itself.any())
