"""How attention is examined: each step by itself, on small evidence, with answers that are worked by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from small_evidence import RIGHT, SIGNS, SPEC, evidence, fault, kind, like, question

from pyrope import Axes, Rope
from pyrope.oracle import examination as module, responses
from pyrope.oracle.ask import Behaviour, Unreadable
from pyrope.oracle.attention_evidence import Exam
from pyrope.oracle.attention_trials import caches, orders
from pyrope.oracle.examination import Trials, make_spec
from pyrope.oracle.explain import Change, Hypothesis
from pyrope.oracle.questions import ORDERS, PRODUCTS, Question
from pyrope.oracle.report import Failure
from pyrope.oracle.tolerance import ANGLE32, OWN, Allowed

F32, ROPE = np.dtype(np.float32), Rope(2, 100.0, "half")
MASKS = fault("masks", {"causal": False})
ALL = like(SIGNS, 1 / 3, 1 / 3, 1 / 3)  # without the causal mask


def named(findings):
    return [finding.fault for finding in findings]


def refuses(*arguments, **options):
    raise RuntimeError("no")


# --- What is meant ---


def test_what_is_meant():
    spec = make_spec(4, 2, 16, True, None, dtype=F32)
    assert (spec.heads, spec.key_heads, spec.head_dim, spec.causal, spec.scale) == (4, 2, 16, True, 0.25)
    assert spec.window is None and spec.softcap is None and spec.rope is None and spec.low == np.float16
    assert make_spec(4, 4, 2, False, ROPE, dtype=F32).rope is ROPE
    spec = make_spec(4, 2, 16, False, None, dtype=F32, window=1, softcap=3.0, scale=2.0)
    assert (spec.window, spec.softcap, spec.scale, spec.causal) == (1, 3.0, 2.0, False)
    assert make_spec(1, 1, 2, True, None, dtype=np.dtype(np.float64)).low == np.float16


@pytest.mark.parametrize("arguments, options, words", [
    ((4, 3, 16, True, None), {}, "key_heads must divide heads, 4, was 3"),
    ((0, 1, 16, True, None), {}, "heads must"),
    ((2**12, 1, 2**12, True, None), {}, "heads·head_dim must"),
    ((1, 1, 4, True, ROPE), {}, "rope must have one axis and a head_dim of 4"),
    ((1, 1, 4, True, Rope(4, 100.0, "half", axes=Axes("sections", (1, 1)))), {}, "rope must have one axis"),
    ((1, 1, 4, True, None), {"window": 0}, "window must"),
    ((1, 1, 4, True, None), {"scale": 1e39}, "scale must"),
    ((1, 1, 4, True, None), {"softcap": 1e39}, "softcap must"),
])  # fmt: skip
def test_what_cannot_be_meant(arguments, options, words):
    with pytest.raises(ValueError, match=words):
        make_spec(*arguments, dtype=F32, **options)


# --- Asking ---


def test_an_answer_has_the_shape_of_q_or_that_with_heads_and_tokens_exchanged():
    seen, square = Behaviour(), replace(SIGNS, q=np.zeros((1, 2, 3, 2), np.float32))
    answer = module._ask(lambda q, k, v: q + np.float32(2), None, SIGNS, seen)
    assert answer.dtype == np.float64 and (answer == 2).all() and seen == {}
    assert module._ask(lambda q, k, v: q.swapaxes(1, 2), None, square, seen).shape == (1, 3, 2, 2)
    assert module._ask(lambda q, k, v: q.astype(float), None, SIGNS, seen).shape == (1, 1, 3, 2)
    assert list(seen) == ["wrong dtype out"] and seen["wrong dtype out"].startswith('question "a question": ')
    with pytest.raises(Unreadable, match=r"returns the shape \(1, 1, 3, 1\) instead of \(1, 1, 3, 2\)") as caught:
        module._ask(lambda q, k, v: q[..., :1], None, SIGNS, seen)
    assert caught.value.kind == "shape" and '"a question", q (1, 1, 3, 2)' in caught.value.received


def test_steps_are_asked_of_what_has_a_cache():
    begun = []

    def begin():
        begun.append([])
        return lambda q, k, v: begun[-1].append(q.shape[-2]) or q + np.float32(1)

    steps = replace(SIGNS, calls=(2, 1))
    assert (module._ask(lambda q, k, v: q, begin, steps, Behaviour()) == 1).all() and begun == [[2, 1]]
    assert (module._ask(lambda q, k, v: q, begin, SIGNS, Behaviour()) == 0).all()
    assert (module._ask(lambda q, k, v: q, None, steps, Behaviour()) == 0).all() and len(begun) == 1


def answered(fn, questions):
    notes, exam = [], Exam(kind(), "", SPEC, "float32", questions)
    exam, answers, refusal = module._answered(exam, fn, None, Behaviour(), notes)
    return [one.name for one in exam.questions], [answer.shape[-2] for answer in answers], refusal, notes


def only(*lengths):
    def fn(q, k, v, mask=None):
        if k.shape[-2] not in lengths:
            raise RuntimeError("this length is not taken")
        return q

    return fn


ASKED = [question([1] * n, f"{n} tokens") for n in (1, 2, 3, 4)]


def test_what_is_refused():
    assert answered(only(1, 2, 3, 4), ASKED) == ([f"{n} tokens" for n in (1, 2, 3, 4)], [1, 2, 3, 4], None, [])
    names, answers, refusal, notes = answered(only(1, 3), ASKED)
    assert names == ["1 tokens", "3 tokens"] and answers == [1, 3] and refusal is None
    assert len(notes) == 1 and notes[0].startswith(
        "not taken by the candidate: 2 tokens, 4 tokens; it raises RuntimeError"
    )
    _, _, refusal, notes = answered(only(1), ASKED)  # more than half of the plain calls
    taken = '"1 tokens" (q (1, 1, 1, 2), k and v (1, 1, 1, 2))'
    reason = "it raises RuntimeError (this length is not taken)"
    assert (
        refusal.reason
        == f'it refuses 3 of 4 plain calls, "2 tokens", "3 tokens", "4 tokens": {reason}; it takes {taken}'
    )
    assert '"2 tokens"' in refusal.received and notes == [] and isinstance(refusal.error, RuntimeError)
    _, _, refusal, _ = answered(only(2, 3, 4), ASKED)  # the first must be taken
    assert refusal.reason.startswith('it refuses 1 of 4 plain calls, "1 tokens": ')
    with pytest.raises(Unreadable, match="this length is not taken"):
        answered(only(), ASKED)
    special = [*ASKED[:2], replace(ASKED[2], demand="cache"), replace(ASKED[3], demand="cache")]
    with pytest.raises(Unreadable, match="3 tokens"):
        answered(only(1, 2), special)
    assert answered(only(1, 2, 4), special)[0] == ["1 tokens", "2 tokens", "4 tokens"]
    cached = question([1] * 4, "cached", queries=2)
    assert answered(only(1), [ASKED[0], cached, cached])[2] is None  # which are not plain
    masked = replace(ASKED[3], name="masked", options={"mask": np.ones((1, 1, 4, 4), bool)})
    refusal = answered(only(4), [*ASKED[:2], masked])[2]
    assert refusal.reason.startswith("it refuses 2 of 2 plain calls") and refusal.reason.endswith("it takes none")


# --- State ---


def test_the_same_calls_again():
    questions, right = [SIGNS, replace(SIGNS, name="other")], [RIGHT, RIGHT]
    some, calls = evidence(right, questions), []

    def again(*answers):
        left = [np.asarray(x, np.float32) for x in answers]
        calls.clear()

        def fn(q, k, v):
            calls.append(q)
            return left.pop(0)

        return fn

    def state(*answers, of=some):
        return module._state(of, again(*answers), None)

    assert state(RIGHT, RIGHT) == {} and len(calls) == 2
    assert state(RIGHT + 0.19, RIGHT) == {}  # two right ones may differ by 0.2
    assert state(RIGHT + 0.21, RIGHT) == {
        "state between calls": 'question "other", the same call twice: 6 of 6 outputs differ'
    }
    off = RIGHT.copy()
    off[0, 0, 0, 0] += 1
    assert (
        state(RIGHT, off)["state between calls"] == 'question "a question", the same call twice: 1 of 6 outputs differ'
    )
    nan = evidence([RIGHT * np.nan, RIGHT], questions)  # the first is wrong, and asked twice more
    assert state(RIGHT, *[RIGHT * np.nan] * 3, of=nan) == {} and len(calls) == 4
    assert state(RIGHT, RIGHT * np.nan, RIGHT, of=nan)["state between calls"].endswith("6 of 6 outputs differ")
    infinite = evidence([RIGHT, RIGHT + np.inf], questions)
    assert state(RIGHT + np.inf, RIGHT, RIGHT + np.inf, RIGHT + np.inf, of=infinite) == {}
    wide = np.zeros((1, 2, 3, 2))
    asked = [replace(SIGNS, q=np.zeros((1, 2, 3, 2), np.float32), k=np.zeros((1, 2, 3, 2)), v=np.zeros((1, 2, 3, 2)))]
    turned = evidence([wide.swapaxes(1, 2)], asked, spec=replace(SPEC, heads=2, key_heads=2))
    assert state(*[wide.swapaxes(1, 2) + 0.19] * 3, of=turned) == {}
    words = "the shape was (1, 3, 2, 2), then (1, 2, 3, 2)"
    assert state(wide, of=turned)["state between calls"] == f'question "a question", the same call twice: {words}'
    found = module._state(some, refuses, None)["state between calls"]
    assert found == 'question "other", the same call twice: then it raises RuntimeError (no)'


# --- Parts of the questions ---


def test_the_best_grade_that_holds():
    def bounds(spec, dtype, grade, parts, positions, random):
        return Allowed(np.full(parts.out.shape, {OWN: 0.1, ANGLE32: 0.3}[grade]))

    def truth(spec, q, k, v, positions):
        return RIGHT

    asked = replace(SIGNS, positions=np.zeros((1, 3), int))
    exam = Exam(replace(kind(), bounds=bounds, truth=truth), "", replace(SPEC, rope=ROPE), "float32", [asked])
    for off, grade, level in ((0.05, OWN, 0), (0.2, ANGLE32, 1), (0.4, ANGLE32, None)):
        some, reached = module._graded(exam, [RIGHT + off], refuses)
        assert (some.grade, reached, some.asks) == (grade, level, refuses)


def test_products_beyond_float16():
    lost, other = replace(SIGNS, name=PRODUCTS), question([1, 1], "other")
    ones = np.ones((1, 1, 2, 2))
    for answers, questions, kept in (
        ([RIGHT * np.nan, ones], [lost, other], ["other"]),
        ([RIGHT, ones], [lost, other], None),
        ([RIGHT * np.nan, ones * np.nan], [lost, other], None),
        ([ones, ones], [other, other], None),
        ([ones, ones * np.nan], [other, other], None),
    ):
        found = module._within_float16(evidence(answers, questions))
        assert (None if found is None else [one.name for one in found[0].questions]) == kept
    exam, answers = module._within_float16(evidence([RIGHT * np.nan, ones], [lost, other]))
    assert answers[0] is ones and exam.spec is SPEC


def test_a_mask_from_the_top_left():
    cached = question([1, -1, 1], "cached", queries=2)  # right: 0, 1/3; from the top left the first sees one key
    right, top_left = like(cached, 0, 1 / 3), like(cached, 1, 0)
    exam, answers = module._prefill(evidence([RIGHT, top_left], [SIGNS, cached]))
    assert exam.questions == [SIGNS] and answers == [RIGHT]
    assert module._prefill(evidence([RIGHT, like(cached, 1, 0.5)], [SIGNS, cached])) is None
    assert module._prefill(evidence([RIGHT + 1, top_left], [SIGNS, cached])) is None
    assert (
        module._prefill(evidence([top_left], [cached])) is None and module._prefill(evidence([RIGHT], [SIGNS])) is None
    )
    assert module._prefill(evidence([RIGHT, right], [SIGNS, cached])) is None


# --- What is wrong ---


def test_nothing_there():
    def found(*answers):
        return named(module._nothing_there(evidence(answers, [SIGNS] * len(answers))))

    zeros, lost = RIGHT * 0, RIGHT * np.nan
    assert found(lost, lost + np.inf) == ["not finite"] and found(zeros, zeros) == ["zeros returned"]
    assert found(lost, RIGHT) == found(zeros, RIGHT) == found(RIGHT, zeros) == []


def test_a_grade_that_was_asked_for():
    def truth(spec, q, k, v, positions=None):
        return RIGHT

    def grade(reached, asked, dtype, rope=None):
        exam = Exam(kind(worst=1e-3, truth=truth), "", replace(SPEC, rope=rope), dtype, [replace(SIGNS, positions=None if rope is None else np.zeros((1, 3), int))])  # fmt: skip
        some, _ = module._graded(exam, [RIGHT + 0.5], None)
        return module._arithmetic(some, reached, asked, refuses)

    assert grade(0, 0, "float16") == grade(1, 1, "float16") == grade(0, 1, "float16") == []
    (coarse,) = grade(1, 0, "float16")
    assert coarse.fault == "low" and coarse.evidence.endswith('; the grade "a" was asked for, "b" was reached.')
    (angles,) = grade(1, 0, "float32", ROPE)
    assert angles.fault == "coarser than asked" and f'"{ANGLE32}" was reached' in angles.evidence
    assert grade(None, 0, "float32")[0].fault != "low"


def test_mistakes_are_named_with_their_first_token():
    (finding,) = module.explained(evidence([ALL], [SIGNS], kind(faults=[MASKS])))
    assert finding.fault == "masks" and finding.since == 0 and "gives the numbers of this case" in finding.evidence
    assert module.explained(evidence([RIGHT + 9], [SIGNS], kind(faults=[MASKS]))) == []


def test_another_base_with_another_pairing_is_two_mistakes():
    faults = [fault(name) for name in ("wrong pairing", "direction", "wrong base")]
    some = evidence([RIGHT], [SIGNS], kind(faults=faults), spec=replace(SPEC, rope=ROPE))

    def parts(rope, of=some, faults=faults[2:]):
        match = Hypothesis(tuple(faults), tuple(Change("", {"rope": rope}) for _ in faults))
        found = module._by_parts(match, of)
        return [(one.name, change.note) for one, change in zip(found.faults, found.changes, strict=True)]

    other = replace(ROPE, base=7.0)
    assert parts(other) == [("wrong base", "")]
    assert parts(replace(other, layout="interleaved")) == [
        ("wrong pairing", "interleaved instead of half"),
        ("wrong base", ""),
    ]
    assert parts(replace(other, direction=-1)) == [("direction", "turned by −mθ"), ("wrong base", "")]
    both = replace(other, direction=-1, layout="interleaved")
    assert [name for name, _ in parts(both)] == ["wrong pairing", "direction", "wrong base"]
    assert parts(both, evidence([RIGHT], [SIGNS], kind(faults=faults))) == [("wrong base", "")]
    assert parts(None) == [("wrong base", "")] and [name for name, _ in parts(both, faults=faults[:1])] == [
        "wrong pairing"
    ]


def test_low_precision_is_that_of_the_smallest_dtype_that_explains_it(monkeypatch):
    def bounds(spec, dtype, grade, parts, positions, random):
        return Allowed(
            np.full(parts.out.shape, {"float64": 1e-9, "float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}[dtype])
        )

    def low(off, dtype="float32", rounds=True, loses=()):
        monkeypatch.setattr(module.AttentionEvidence, "rounds_to", lambda self, name: rounds)
        monkeypatch.setattr(module.AttentionEvidence, "loses_weights", property(lambda self: self.exam.dtype in loses))
        some = evidence([RIGHT + off], [SIGNS], replace(kind(), bounds=bounds))
        some = replace(some, exam=replace(some.exam, dtype=dtype))
        found = module._low_precision(some)
        return [finding.evidence.partition(", but ")[2] for finding in found], some.remarks

    assert low(5e-4) == (["within what float16 allows."], []) and low(5e-3) == (["within what bfloat16 allows."], [])
    assert low(5e-2) == ([], []) and low(5e-7, "float64") == (["within what float32 allows."], [])
    assert low(5e-4, rounds=False) == ([], ["as small as float16's rounding, but not like it"])
    assert low(5e-2, loses=("bfloat16",)) == (["within what bfloat16 allows."], [])
    assert low(5e-3, "float16") == (["within what bfloat16 allows."], [])


# --- Symptoms ---


def heads_and_rows():
    """Two rows of two heads that see their own keys alone: the values of each are all one number."""
    q = np.zeros((2, 2, 3, 2), np.float32)
    v = np.zeros_like(q) + np.array([[1, 2], [3, 4]], np.float32)[..., None, None]
    return Question("rows and heads", q, q + 0, v), v.astype(float)


WIDE = replace(SPEC, heads=2, key_heads=2)


def test_rows_and_heads_that_are_those_of_others():
    asked, right = heads_and_rows()

    def elsewhere(answer):
        some = evidence([answer], [asked], spec=WIDE)
        return module._elsewhere(some), some.remarks

    name, words = elsewhere(right[[1, 0]])[0]
    assert name == "batch rows mixed"
    assert words == "row 0 is the right result of row 1, row 1 is the right result of row 0, all others are right"
    name, words = elsewhere(right[:, [0, 0]])[0]
    assert (name, words) == ("heads mixed", "head 1 is the right result of head 0, all others are right")
    zeros = right.copy()
    zeros[1] = 0
    assert elsewhere(zeros) == (None, ["rows 1 are zeros, all others are right"])
    zeros = right.copy()
    zeros[:, 0] = 0
    assert elsewhere(zeros) == (None, ["heads 0 are zeros, all others are right"])
    assert elsewhere(right * 0) == (None, []) and elsewhere(right + 0.5) == (None, [])
    assert elsewhere(right[..., :1]) == (None, [])


def attention(q, k, v, mask=None, causal=True):
    """As plain as it can be, in float64."""
    s = q.astype(float) @ k.astype(float).swapaxes(-1, -2)
    s = np.where(np.tri(*s.shape[-2:], dtype=bool), s, -np.inf) if causal else s
    w = np.exp(s - s.max(axis=-1, keepdims=True))
    return (w / w.sum(axis=-1, keepdims=True) @ v.astype(float)).astype(q.dtype)


def test_who_influences_whom():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 2, 4, 2)).astype(np.float32) for _ in "qkv")
    asked = Question("random", q, k, v)
    mixing = {name: fault(name) for name in ("batch rows mixed", "heads mixed", "not causal", "another feature map")}

    def symptoms(fn, spec=WIDE, **fields):
        of = replace(kind(worst=1e-4, faults=mixing.values()), **fields)
        some = evidence([fn(q, k, v).astype(float)], [asked], of, asks=lambda one: fn(one.q, one.k, one.v).astype(float), spec=spec)  # fmt: skip
        return module._symptoms(fn, some)

    def rows(q, k, v):
        return attention(q, k + k[::-1] / 4, v)

    def heads(q, k, v):
        return attention(q, k + k[:, ::-1] / 4, v)

    def ahead(q, k, v):
        return attention(q, k, v) + v[:, :, -1:] / 4

    def own(q, k, v):
        return attention(q, k, v) * np.float32(1.5) + np.float32(0.25)

    assert (
        named(symptoms(rows)) == ["batch rows mixed"]
        and "keys of other rows change the first row." in symptoms(rows)[0].evidence
    )
    assert (
        named(symptoms(heads)) == ["heads mixed"]
        and "keys of the last head change other heads." in symptoms(heads)[0].evidence
    )
    assert (
        named(symptoms(ahead)) == ["not causal"]
        and "the last key changes outputs before it." in symptoms(ahead)[0].evidence
    )
    assert named(symptoms(ahead, replace(WIDE, causal=False))) == ["unexplained"]
    assert named(
        symptoms(lambda q, k, v: own(q, k, v) * np.where(np.arange(4) == 2, np.nan, 1)[:, None].astype("f4"))
    ) == ["not finite"]
    (finding,) = symptoms(own)
    assert finding.fault == "unexplained" and "with unit vectors as values, token" in finding.evidence
    (finding,) = symptoms(own, response=lambda some: ("another feature map", "φ is odd"))
    assert finding.fault == "another feature map" and finding.evidence.endswith("; φ is odd.")
    (finding,) = symptoms(own, response=lambda some: ("", "scores act oddly"))
    assert "; scores act oddly; with unit vectors" in finding.evidence
    (finding,) = symptoms(lambda q, k, v: attention(q, k, v) * np.float32(1.5))
    assert "; all outputs are the right ones times 1.5" in finding.evidence


def test_a_scale_of_each_length_is_a_symptom():
    some = evidence([RIGHT + 1], [SIGNS], kind(faults=[fault("scale by the length")]))
    object.__setattr__(some, "scales", lambda: "scales differ")
    (finding,) = module._symptoms(refuses, some)
    assert finding.fault == "scale by the length" and finding.evidence.endswith("; scales differ.")
    linear = evidence([RIGHT + 1], [SIGNS], replace(kind(), subject="linear attention"))
    object.__setattr__(linear, "scales", lambda: "scales differ")
    assert named(module._symptoms(refuses, linear)) == ["unexplained"]


def test_what_moves():
    asked = heads_and_rows()[0]
    right = attention(asked.q, asked.k, asked.v).astype(float)
    some = evidence([right], [asked], spec=WIDE)
    first, second = (slice(0, 1),), (slice(1, 2),)
    assert module._moves(attention, some, first, first) and not module._moves(attention, some, first, second)
    assert not module._moves(refuses, some, first, first)
    calls = []

    def restless(q, k, v):
        calls.append(1)
        return attention(q, k, v) + np.float32(len(calls))

    assert not module._moves(restless, some, first, first)
    slightly = evidence([right], [asked], kind(worst=1.1), spec=WIDE)  # −1 instead of 1 is off by 2, and 2.2 allowed
    assert not module._moves(attention, slightly, (slice(0, 1), slice(0, 1)), (slice(0, 1), slice(0, 1)))
    slightly = evidence([right], [asked], kind(worst=0.9), spec=WIDE)
    assert module._moves(attention, slightly, (slice(0, 1), slice(0, 1)), (slice(0, 1), slice(0, 1)))


def test_the_weights_of_a_few_tokens():
    asked = question([1, -1, 1, 1])

    def weights(asks, one=asked):
        return responses.some_weights(evidence([RIGHT], [one], asks=asks))

    def uniform(few):
        assert few.v[0, 0].tolist() == [[1, 0], [0, 1]] and not few.random and few.q.shape[-2] == 2
        return np.full((1, 1, 2, 2), 0.5)

    start = "with unit vectors as values, token 0 of row 0, head 0, has the weights "
    assert weights(uniform) == f"{start}0.5 0.5, expected 1 0"
    assert weights(lambda few: np.array([[1, 0], [math.nan, 0.5]])[None, None]) == ""
    assert weights(lambda few: np.array([[1, 0], [0.5, 0.5]])[None, None]) == ""
    assert weights(lambda few: np.zeros((1, 1, 1, 2))) == weights(None) == ""

    def unreadable(few):
        raise Unreadable("", "", "raised")

    assert weights(unreadable) == ""
    assert weights(lambda few: np.array([[[[1.0, 0.0]]]]), question([1])) == ""  # a token alone
    assert weights(uniform, question([1, 1, 1], queries=2)) == ""
    assert weights(uniform, replace(asked, options={"mask": np.ones((1, 1, 4, 4), bool)})) == ""


# --- Trials ---


def test_which_trials_may_say_what_is_wrong():
    def lengths(draw):
        return iter(())

    trials = Trials(None, lengths, ())
    steps, order = replace(SIGNS, calls=(2, 1)), replace(SIGNS, name=ORDERS)

    def likely(*questions):
        return module._likely(evidence([RIGHT + 1] * len(questions) + [RIGHT], [*questions, SIGNS]), trials)

    assert likely(steps, steps) is caches and likely(order) is orders
    assert likely(SIGNS) is likely(order, SIGNS) is likely(steps, SIGNS) is lengths


def test_a_mistake_in_a_part_of_the_calls():
    more = question([-1, 1, 1], "more")
    of = kind(faults=[MASKS])
    (finding,) = module._confined(evidence([RIGHT, like(more, 1 / 3, 1 / 3, 1 / 3)], [SIGNS, more], of))
    assert finding.fault == "masks" and finding.since == 0
    assert finding.evidence.endswith('It is made in a part of the calls: "more"; the others are right.')
    assert module._confined(evidence([RIGHT, like(more, 9, 9, 9)], [SIGNS, more], of)) == []
    assert module._confined(evidence([ALL], [SIGNS], of)) == []


def test_no_trials_where_a_mistake_is_known():
    some, notes = evidence([RIGHT], [SIGNS]), []
    known = [MASKS.finding("")]
    assert module._with_trials(known, some, refuses, None, Trials(None, None, ()), notes) is known
    assert module._with_trials([], some, refuses, None, None, notes) == [] and notes == []


class Draw:
    """As much of `Questions` as is asked for."""

    few_shapes = None


@pytest.fixture
def tried(monkeypatch):
    """Trials that find what they are told, and note what they are asked."""

    def run(wrong, some, fn=attention, named=(), overwritten="", compiles=False, others=()):
        draw, notes, seen = Draw(), [], {}

        def run_trials(exam, asks, trials):
            seen.update(exam=exam, answer=asks(SIGNS), trials=list(trials))
            return dict(named), ["a refusal"]

        monkeypatch.setattr(module, "run_trials", run_trials)
        monkeypatch.setattr(module, "overwritten", lambda asks, draw: seen.update(raw=asks(SIGNS)) or overwritten)
        monkeypatch.setattr(module, "compiles", lambda: compiles)
        trials = Trials(draw, lambda draw: iter(["length"]), others)
        return module._with_trials(wrong, some, fn, None, trials, notes), notes, draw, seen

    return run


def test_trials_of_what_is_right(tried):
    some = evidence([RIGHT], [SIGNS])
    found, notes, draw, seen = tried([], some, others=(lambda draw: iter(["other"]),))
    assert found == [] and notes == ["a refusal"] and draw.few_shapes is False
    assert seen["trials"] == ["length", "other"] and seen["exam"] is some.exam and seen["raw"].dtype == np.float32
    np.testing.assert_allclose(seen["answer"], RIGHT, atol=1e-6)
    _, notes, draw, _ = tried([], some, compiles=True)
    assert draw.few_shapes and notes == ["each new shape is compiled: few lengths were tried", "a refusal"]
    found, *_ = tried([], some, named={"some lengths wrong": "at 7"}, overwritten="the first changes")
    assert [(one.fault, one.evidence) for one in found] == [
        ("some lengths wrong", "at 7"),
        ("result overwritten", "the first changes"),
    ]
    found, *_ = tried([], some, lambda q, k, v: attention(q, k, v).astype(float))
    assert named(found) == ["wrong dtype out"]
    harmless = module._behaviour("wrong dtype out", "said before")
    found, *_ = tried([harmless], some, lambda q, k, v: attention(q, k, v).astype(float))
    assert found == [harmless]
    calls = []

    def tires(q, k, v):
        calls.append(1)
        return attention(q, k, v) + np.float32(len(calls) > 2)

    found, *_ = tried([], some, tires, named={"some lengths wrong": "at 7"})
    assert named(found) == ["state between calls"] and found[0].evidence.startswith("after longer calls, question")


def test_trials_of_what_is_unexplained(tried):
    more = question([-1, 1, 1], "more")
    some = evidence([RIGHT, like(more, 9, 9, 9)], [SIGNS, more], kind(faults=[MASKS]))
    wrong = [module._unexplained("why"), module._behaviour("wrong dtype out", "it is")]
    found, _, _, seen = tried(wrong, some, others=(lambda draw: iter(["other"]),))
    assert found == wrong and seen["trials"] == ["length"] and "raw" not in seen
    found, *_ = tried(wrong, some, named={"some lengths wrong": "at 7"})
    assert [(one.fault, one.evidence) for one in found] == [
        ("wrong dtype out", "it is"),
        ("some lengths wrong", "at 7"),
    ]
    part = evidence([RIGHT, like(more, 1 / 3, 1 / 3, 1 / 3)], [SIGNS, more], kind(faults=[MASKS]))
    assert named(tried(wrong, part)[0]) == ["wrong dtype out", "masks"]
    assert named(tried(wrong, part, named={"some lengths wrong": ""})[0]) == ["wrong dtype out", "some lengths wrong"]


def test_fewer_key_heads():
    spec = replace(WIDE, key_heads=1)
    asked = replace(SIGNS, q=np.zeros((1, 2, 3, 2), np.float32))
    exam, notes = Exam(kind(faults=[MASKS]), "", spec, "float32", [asked]), []
    right = np.repeat(RIGHT, 2, axis=1).astype(np.float32)
    assert module._grouped([exam], lambda q, k, v: right, 0, notes) == [] and notes == []
    (finding,) = module._grouped([exam], lambda q, k, v: np.full((1, 2, 3, 2), np.float32(1 / 3)), 0, notes)
    assert finding.fault == "masks" and finding.evidence.startswith("With 1 key head for 2: question")
    assert module._grouped([exam], refuses, 0, notes) == []
    assert module._grouped([exam], lambda q, k, v: right.swapaxes(1, 2), 0, notes) == []
    assert notes == [
        "1 key head for 2 were not tried: it raises RuntimeError (no)",
        "1 key head for 2 were not tried: the results have another shape",
    ]


# --- The whole ---


def test_a_report_of_what_is_right():
    exam = Exam(kind(), "what is meant", SPEC, "float32", [SIGNS], ("a note",))
    report = module.examine(exam, attention, None, 0)
    assert (report.verdict, report.findings, report.notes, report.precision) == ("right", (), ("a note",), OWN)
    assert report.expected == "what is meant" and len(report.errors) == 1


def test_fewer_key_heads_are_tried_of_what_is_right():
    spec = replace(WIDE, key_heads=1)
    few = Exam(kind(), "", spec, "float32", [replace(SIGNS, q=np.zeros((1, 2, 3, 2), np.float32))])

    def report(fn, **fields):
        return module.examine(
            Exam(kind(faults=[MASKS]), "", SPEC, "float32", [SIGNS], **fields), fn, None, 0, grouped=[few]
        )

    assert report(attention).verdict == "right"
    found = report(lambda q, k, v: attention(q, k, v) + np.float32(q.shape[1] == 2))
    assert found.verdict == "wrong" and found.findings[0].evidence.startswith("With 1 key head for 2: ")
    assert report(lambda q, k, v: attention(q, k, v, causal=q.shape[1] == 2)).faults == ("masks",)


def test_results_of_other_rows_are_a_symptom():
    asked, right = heads_and_rows()
    some = evidence([right[[1, 0]]], [asked], kind(faults=[fault("batch rows mixed")]), spec=WIDE)
    (finding,) = module._symptoms(refuses, some)
    assert finding.fault == "batch rows mixed" and "; row 0 is the right result of row 1, row 1" in finding.evidence


def test_a_report_of_what_is_wrong():
    exam = Exam(kind(faults=[MASKS]), "", SPEC, "float32", [SIGNS])
    report = module.examine(exam, lambda q, k, v: attention(q, k, v, causal=False), None, 0)
    assert (report.verdict, report.faults, report.precision) == ("wrong", ("masks",), None)
    report = module.examine(exam, lambda q, k, v: q * np.float32(np.nan), None, 0)
    assert report.faults == ("not finite",)
    counts = []

    def restless(q, k, v):
        counts.append(1)
        return attention(q, k, v) + np.float32(len(counts))

    assert module.examine(exam, restless, None, 0).faults == ("state between calls",)
    report = module.examine(exam, refuses, None, 0)
    assert report.verdict == "not judged" and report.failure.reason == "it raises RuntimeError (no)"


def test_weights_that_are_dropped(monkeypatch):
    monkeypatch.setattr(module, "dropped_weights", lambda evidence: "some are zeros")
    exam = Exam(kind(faults=[MASKS]), "", SPEC, "float32", [SIGNS])
    assert module.examine(exam, attention, None, 0).verdict == "right"  # of which nothing is asked
    found = module.examine(exam, lambda q, k, v: attention(q, k, v, causal=False), None, 0)
    assert [(finding.fault, finding.evidence) for finding in found.findings] == [("dropout", "some are zeros")]
    counts = []

    def restless(q, k, v):
        counts.append(1)
        return attention(q, k, v) + np.float32(len(counts) - 1)

    (finding,) = module.examine(exam, restless, None, 0).findings
    assert finding.fault == "dropout" and finding.evidence.startswith('some are zeros; question "a question", the same')


def test_a_report_of_what_masks_from_the_top_left():
    cached = question([1, -1, 1], "cached", queries=2)
    for prefill, verdict in ((True, "right"), (False, "wrong")):
        exam = Exam(kind(), "", SPEC, "float32", [SIGNS, cached], prefill=prefill)
        report = module.examine(exam, attention, None, 0)
        assert report.verdict == verdict and any("top left" in note for note in report.notes) == prefill


def test_an_error_of_the_search_is_no_verdict(monkeypatch):
    def broken(*arguments):
        raise ZeroDivisionError("oh")

    exam = Exam(kind(), "", SPEC, "float32", [SIGNS])
    monkeypatch.setattr(module, "_arithmetic", broken)
    report = module.examine(exam, attention, None, 0)
    reason = "the search for what is wrong stopped, by an error of its own: ZeroDivisionError: oh"
    assert report.verdict == "not judged" and report.failure.reason == reason
    report = module.examine(exam, lambda q, k, v: q + np.float32(9), None, 0)
    assert report.verdict == "wrong" and report.faults == ("unexplained",) and report.notes == (reason,)
    assert report.findings[0].evidence == "1 of 1 questions have wrong answers"


def test_what_is_not_judged_says_what_was_expected():
    exam = Exam(kind(), "what is meant", SPEC, "float32", [SIGNS])
    report = module._not_judged(exam, ["a note"], Failure("a reason", "", "a fix"))
    assert (report.subject, report.expected, report.verdict) == ("attention", "what is meant", "not judged")
    assert report.notes == ("a note",) and report.failure.reason == "a reason" and not report.findings
