"""How gradients of attention are asked for, judged and explained: each step by itself, on gradients worked by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from pyrope import Rope, YaRN
from pyrope.oracle import backward_checks as module
from pyrope.oracle.ask import Unreadable
from pyrope.oracle.backward_checks import TENSORS, Asked, GradientCheck, Gradients
from pyrope.oracle.explain import Change, Fault
from pyrope.oracle.gradients import Backward, Noisy, Roundings
from pyrope.oracle.questions import ORDERS, Question, Questions
from pyrope.oracle.tolerance import ANGLE32, OWN
from pyrope.oracle.truth import Spec

SPEC = Spec(2, 2, 4, True, scale=0.5)
ROPE = Rope(4, 100.0, "half")
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)


def question(name="a question", n=3, heads=2, key_heads=2, **fields):
    q, k = np.ones((1, heads, n, 4), np.float32), np.ones((1, key_heads, n, 4), np.float32)
    return Question(name, q, k, 2 * k, **fields)


def truth(spec, roundings, q, k, v, g, steps=None, **options):
    """q, k and v times g's first number and, with another scale, times that; off by 1/8 at most."""
    size = g.flat[0] * spec.scale / 0.5 * (1 if steps is None else steps.times)
    return tuple(Noisy(x * size, 0.0, np.full(x.shape, 0.125)) for x in (q, k, v))


def way(name, **fields):
    return Fault(name, "", "", "", changes=lambda spec, measured: [Change("a note", fields)])


def check(*faults, dtype="float32", **fields):
    kind = Gradients("gradients", truth, {fault.name: fault for fault in faults})
    return GradientCheck(kind, dtype, "what is meant", **fields)


def backward(q, k, v, g, **options):
    return q * g.flat[0], k * g.flat[0], v * g.flat[0]


def judged(*answers, faults=(), names=None, spec=SPEC):
    """A check of questions whose answers are the right ones times these numbers, for dq, dk and dv."""
    own = check(*faults)
    for i, factors in enumerate(answers):
        asked = module._asked(spec, question(names[i] if names else f"question {i}"))
        right = asked.gradients(own.kind, Roundings.of("float32", True), {})
        given = {name: right[name].value * factor for name, factor in zip(TENSORS, factors, strict=True)}
        own.asked.append(replace(asked, answers=given))
    return own, *own._judged()


# --- What may be wrong ---


def test_forward_passes_that_may_be_meant():
    full = replace(SPEC, window=5, softcap=2.0, rope=Rope(4, 100.0, "half", scaling=YaRN(8.0, 64)))
    turned = full.rope
    expected = {
        "not causal": {"causal": False}, "window ignored": {"window": None}, "softcap missing": {"softcap": None}, "scale missing": {"scale": 1.0},
        "not rotated": {"rope": None}, "direction": {"rope": replace(turned, direction=-1)}, "wrong pairing": {"rope": replace(turned, layout="interleaved")},
        "scaling ignored": {"rope": Rope(4, 100.0, "half")}, "attention factor missing": {"rope": turned.pure},
    }  # fmt: skip
    for name, fields in expected.items():
        (change,) = module._forward(module._FORWARD[name], full)
        assert change.fields == {"spec": replace(full, **fields)}
        for kind in (module.SOFTMAX_GRADIENTS, module.LINEAR_GRADIENTS):
            if name in kind.faults:
                assert list(kind.faults[name].changes(full, None)) == [change]
    assert expected.keys() < module.SOFTMAX_GRADIENTS.faults.keys()
    assert list(module._forward(module._FORWARD["causal by mistake"], full)) == []
    plain = replace(SPEC, scale=1.0, causal=False)
    assert [name for name, other in module._FORWARD.items() if other(plain) is not None] == ["causal by mistake"]
    assert module._FORWARD["causal by mistake"](plain) == replace(plain, causal=True)
    other = replace(full, rope=Rope(4, 100.0, "interleaved"))
    assert module._FORWARD["wrong pairing"](other).rope == ROPE and module._FORWARD["scaling ignored"](other) is None


def test_where_mistakes_of_the_backward_pass_matter():
    def ways(name, spec, kind=module.SOFTMAX_GRADIENTS):
        return [change.fields["steps"] for change in kind.faults[name].changes(spec, None)]

    grouped, turned, capped = replace(SPEC, key_heads=1), replace(SPEC, rope=ROPE), replace(SPEC, softcap=1.0)
    assert ways("key heads not summed", SPEC) == [] and [x.groups for x in ways("key heads not summed", grouped)] == [
        "first",
        "last",
        "mean",
    ]
    assert ways("gradients not rotated back", SPEC) == [] and ways("gradients not rotated back", turned) == [
        Backward(turned="not")
    ]
    assert (
        ways("backward equals forward", turned) == [Backward(turned="forwards")]
        and ways("backward equals forward", SPEC) == []
    )
    assert ways("accumulated twice", SPEC) == [Backward(times=2.0)] and ways("row term missing", SPEC) == [
        Backward(row_term=False)
    ]
    assert ways("gradient without the scale", SPEC) == [Backward(scale=0)] and ways("gradient scaled twice", SPEC) == [
        Backward(scale=2)
    ]
    assert (
        ways("gradient without the scale", replace(SPEC, scale=1.0))
        == ways("gradient scaled twice", replace(SPEC, scale=1.0))
        == []
    )
    assert ways("softcap's derivative missing", SPEC) == [] and ways("softcap's derivative missing", capped) == [
        Backward(softcap=False)
    ]
    linear = module.LINEAR_GRADIENTS
    assert ways("denominator's derivative missing", SPEC, linear) == [Backward(denominator=False)]
    assert ways("feature map's derivative missing", SPEC, linear) == [Backward(feature_map=False)]
    assert (module.SOFTMAX_GRADIENTS.subject, linear.subject) == ("attention, backward", "linear attention, backward")


# --- Questions ---


def test_what_is_asked():
    def asked(questions):
        return {one.name: one.q.shape[0::2] for one in questions}

    plain = {"random": (3, 24), "one token": (3, 1), "a few tokens": (2, 7), "64 tokens": (1, 64), "128 tokens": (1, 128), "130 tokens": (1, 130),
             "a batch of four": (4, 5), module.VIEWS: (3, 24)}  # fmt: skip
    draw = Questions(SPEC, F64, 4096)
    assert asked(module.linear_questions(draw)) == asked(module.softmax_questions(draw, set())) == plain
    turned = Questions(replace(SPEC, rope=ROPE), F64, 4096)
    assert asked(module.linear_questions(turned)) == plain | {"far apart": (3, 24), ORDERS: (3, 24)}
    more = module.softmax_questions(Questions(SPEC, F32, 4096), {"mask", "segments"})
    assert (
        asked(more).keys() - plain.keys() == {module.SHARP, "mask", "padding on the left", "packed"}
        or len(more) == len(plain) + 4
    )
    sharp = next(one for one in more if one.name == module.SHARP)
    assert sharp.q.shape[0] == 1 and sharp.q.std() == pytest.approx(32 * sharp.k.std(), rel=0.3)
    for window, n in ((5, 29), (48, 72), (49, 24)):
        wide = Questions(replace(SPEC, window=window), F64, 4096)
        assert asked(module.softmax_questions(wide, set()))["random"] == (3, n)


def test_views_have_the_same_numbers():
    asked = Questions(SPEC, F32, 4096).random("", 5)
    view = module._view(asked)
    for x, y in ((asked.q, view.q), (asked.k, view.k), (asked.v, view.v)):
        assert np.array_equal(x, y) and not y.flags.c_contiguous and y.swapaxes(1, 2).flags.c_contiguous


def test_gradients_of_outputs_are_drawn():
    asked = module._asked(SPEC, question())
    assert asked.g.shape == asked.question.q.shape and asked.g.dtype == np.float32 and asked.g.std() > 0.5
    assert [*asked.arguments] == ["q", "k", "v", "g"]
    turned = Asked(SPEC, question(positions=np.zeros((1, 3), int)), asked.g)
    assert [*turned.arguments] == ["q", "k", "v", "g", "positions"]
    zero = replace(question(), q=np.zeros((1, 2, 3, 4), np.float32))
    assert (module._asked(replace(SPEC, feature_map="relu"), zero).question.q == 0.5).all()
    assert (module._asked(replace(SPEC, feature_map="relu2"), zero).question.k == 1).all()
    assert not module._asked(SPEC, zero).question.q.any()


def test_what_the_truth_is_asked():
    seen = {}

    def noting(spec, roundings, q, k, v, g, **options):
        seen.update(spec=spec, roundings=roundings, dtypes={x.dtype.name for x in (q, k, v, g)}, **options)
        return "abc"

    mask = np.ones((1, 1, 3, 3), bool)
    asked = Asked(
        SPEC, question(positions=np.zeros((1, 3), int), options={"mask": mask}), np.ones((1, 2, 3, 4), np.float32)
    )
    kind = Gradients("", noting, {})
    assert asked.gradients(kind, "r", {}) == {"dq": "a", "dk": "b", "dv": "c"}
    assert seen["spec"] is SPEC and seen["dtypes"] == {"float64"} and seen["mask"] is mask and "steps" not in seen
    assert seen["positions"].tolist() == [[0, 0, 0]] and seen["roundings"] == "r"
    other = replace(SPEC, scale=3.0)
    asked.gradients(kind, "r", {"spec": other, "steps": "s"})
    assert seen["spec"] is other and seen["steps"] == "s"


# --- Answers ---


def test_answers_by_tensor():
    seen, asked = {}, module._asked(SPEC, question())
    answers = module._answered(lambda q, k, v, g: (q * 3, k * 4, v * 5), asked, seen).answers
    assert (
        [answers[name].flat[0] for name in TENSORS] == [3, 4, 10] and answers["dq"].dtype == np.float64 and seen == {}
    )
    assert all(not x.any() for x in module._answered(lambda q, k, v, g: None, asked, seen).answers.values())
    answers = module._answered(lambda q, k, v, g: [q, None, v], asked, seen).answers
    assert answers["dq"].all() and not answers["dk"].any() and answers["dv"].all() and seen == {}


@pytest.mark.parametrize("result, words", [
    (lambda q: q, "returns ndarray instead of (dq, dk, dv)"), (lambda q: (q, q), "returns 2 results instead of (dq, dk, dv)"),
    (lambda q: (q, 3, q), "returns int as dk, which is no NumPy array"), (lambda q: (q, q, q[..., :3]), "returns dv of shape (1, 2, 3, 3) instead of (1, 2, 3, 4)"),
    (lambda q: (q, q, q[0]), "returns dv of shape (2, 3, 4) instead of"), (lambda q: (q, q[:, :1], q), "returns dk of shape (1, 1, 3, 4) instead of"),
])  # fmt: skip
def test_answers_that_cannot_be_read(result, words):
    with pytest.raises(Unreadable) as caught:
        module._answered(lambda q, k, v, g: result(q), module._asked(SPEC, question()), {})
    assert words in str(caught.value) and 'the question "a question", q (1, 2, 3, 4)' in caught.value.received


def test_heads_that_are_not_summed():
    seen, asked = {}, module._asked(replace(SPEC, heads=4), question(heads=4))
    each = np.arange(4, dtype=np.float32)[None, :, None, None] + np.zeros((1, 4, 3, 4), np.float32)
    answers = module._answered(lambda q, k, v, g: (q, each, v), asked, seen).answers
    assert answers["dk"][0, :, 0, 0].tolist() == [1, 5]
    assert seen == {
        "key heads not summed": "dk has the shape (1, 4, 3, 4), one for each query head, expected (1, 2, 3, 4)"
    }


def test_what_is_refused_is_noted():
    def few(q, k, v, g):
        if q.shape[2] > 3:
            raise ValueError("too long")
        return q, k, v

    own = check()
    own._ask(few, [(SPEC, question()), (SPEC, question("long", 4)), (SPEC, question("longer", 5))], None)
    assert [asked.question.name for asked in own.asked] == ["a question"]
    assert own.notes == ["not taken by the candidate: long, longer; it raises ValueError (too long)"]
    with pytest.raises(Unreadable, match="too long"):
        check()._ask(few, [(SPEC, question("long", 4))], None)


def test_key_heads_that_are_shared():
    grouped = Questions(replace(SPEC, key_heads=1), F32, 4096)

    def ask(fn):
        own = check()
        own._ask(fn, [(SPEC, question())], grouped)
        return [asked.question.name for asked in own.asked], own.notes, own.behaviour

    assert ask(lambda q, k, v, g: (q, k, v)) == (["a question", "grouped heads"], [], {})
    names, notes, seen = ask(lambda q, k, v, g: (q, q, q))
    assert (
        names == ["a question"]
        and seen == {}
        and notes[0].startswith("not taken by the candidate: grouped heads; dk has the shape")
    )
    names, notes, _ = ask(lambda q, k, v, g: (q, k[:, :2], v) if k.shape[1] == 2 else 1 / 0)
    assert names == ["a question"] and notes == [
        "not taken by the candidate: grouped heads; it raises ZeroDivisionError (division by zero)"
    ]


# --- Judgement ---


def test_where_gradients_are_wrong():
    own, precision, wrong = judged((1, 1, 1), (1, 1, 1))
    assert precision == OWN and wrong == {}
    own, precision, wrong = judged((1, 1, 1), (1, 3, 1), (9, 3, 1))
    assert precision is None and {name: [own.asked.index(x) for x in some] for name, some in wrong.items()} == {
        "dk": [1, 2],
        "dq": [2],
    }


def test_angles_of_float32():
    """Right in float64, or only with the angles that float32 has."""

    def angles(spec, roundings, q, k, v, g, **options):
        bound = 1.0 if roundings.angle > 2.0**-30 else 0.0
        return tuple(Noisy(x, 0.0, np.full(x.shape, bound)) for x in (q, k, v))

    def precision(off, rope, dtype="float64"):
        asked = module._asked(replace(SPEC, rope=rope), question())
        given = dict(
            zip(
                TENSORS,
                (x.astype(float) + off for x in (asked.question.q, asked.question.k, asked.question.v)),
                strict=True,
            )
        )
        own = GradientCheck(Gradients("", angles, {}), dtype, "", [replace(asked, answers=given)])
        return own._judged()[0]

    assert precision(0, ROPE) == OWN and precision(0.5, ROPE) == ANGLE32 and precision(2.0, ROPE) is None
    assert precision(0, None) == precision(0, ROPE, "float32") == precision(0.5, ROPE, "float32") == OWN


def test_the_same_call_again():
    def watched(fn):
        own = check()
        own._ask(backward, [(SPEC, question())], None)
        own._judged()
        return own._watched(fn)

    assert watched(backward) == {}
    assert watched(lambda q, k, v, g: (q * g.flat[0], k * g.flat[0] + 9, v * g.flat[0])) == {
        "state between calls": "dk of the same call differs later"
    }
    slightly = lambda off: lambda q, k, v, g: (q * g.flat[0] + np.float32(off), k * g.flat[0], v * g.flat[0])  # noqa: E731
    assert watched(slightly(0.249)) == {} and "state between calls" in watched(slightly(0.251))  # twice 1/8
    held = np.zeros((1, 2, 3, 4), np.float32)

    def reuses(q, k, v, g):
        held[...] = q * g.flat[0]
        return held, k * g.flat[0], v * g.flat[0]

    assert watched(reuses) == {"result overwritten": "gradients changed during the next call, with another g"}
    nan = check()
    nan._ask(lambda q, k, v, g: (q * np.float32(np.nan), k, v), [(SPEC, question())], None)
    nan._judged()
    assert nan._watched(lambda q, k, v, g: (q * np.float32(np.nan), k, v)) == {}
    none = check()
    none._ask(lambda q, k, v, g: None, [(SPEC, question())], None)
    none._judged()
    assert none._watched(lambda q, k, v, g: None) == {}


# --- Explanations ---

TWICE, SCALED = way("twice", steps=Backward(times=2.0)), way("scaled", spec=replace(SPEC, scale=1.5))


def explained(*answers, faults=(TWICE, SCALED), names=None):
    own, _, wrong = judged(*answers, faults=faults, names=names)
    return [(finding.fault, finding.evidence.partition(";")[0]) for finding in own._explained(wrong)]


def test_mistakes_that_predict_all_numbers():
    all_of_them = "this predicts all numbers in all questions"
    assert explained((2, 2, 2)) == [("twice", f"dq, dk, dv: {all_of_them}")]
    assert explained((3, 3, 1), (3, 3, 1)) == [("scaled", f"dq, dk: {all_of_them}")]
    assert explained((2, 3, 3)) == [("scaled", f"dk, dv: {all_of_them}"), ("twice", f"dq: {all_of_them}")]
    some_of_them = "this predicts all numbers in these questions, the others are right: question 0"
    assert explained((2, 1, 1), (1, 1, 1)) == [("twice", f"dq: {some_of_them}")]
    assert explained((2, 1, 1), (7, 1, 1)) == [("unexplained", "dq: wrong")]
    assert explained((2, 1, 0)) == [
        ("no gradient", "dv is zero, or None, in all questions"),
        ("twice", f"dq: {all_of_them}"),
    ]
    assert explained((7, 1, 1)) == [("gradient times a number", "dq is the right one times 7")]
    assert explained((-7, 1, 1), (-7, 1, 9)) == [
        ("gradient times a number", "dq is the right one times −7"),
        ("unexplained", "dv: wrong"),
    ]
    assert explained((1, 1, 1)) == []
    own, _, wrong = judged((2, 1, 1), (2, 1, 1), faults=[TWICE])
    (finding,) = own._explained(wrong)
    assert (
        '; a note; dq in the question "question 0": first at token 0 of row 0, head 0, feature 0: expected'
        in finding.evidence
    )
    assert finding.evidence.endswith("; also in 1 other questions")


def test_one_answer_is_explained_without_a_check():
    own, _, _ = judged((2, 1, 1))
    (asked,) = own.asked
    assert [finding.fault for finding in check(TWICE).explained(asked, "dq")] == ["twice"]
    (asked,) = judged((7, 1, 1))[0].asked
    asked.answers["dq"].flat[0] = 0
    assert check(TWICE, SCALED).explained(asked, "dq") == []


def test_fields_for_questions_with_other_key_heads():
    few = Asked(replace(SPEC, key_heads=1), question(), None)
    fields = {"spec": replace(SPEC, scale=3.0)}
    assert (
        check()._own(fields, few) == {"spec": replace(SPEC, scale=3.0, key_heads=1)} and fields["spec"].key_heads == 2
    )
    assert check()._own({"steps": 1}, few) == {"steps": 1}
    seen = []
    fault = Fault("", "", "", "", changes=lambda spec, measured: seen.append(spec.key_heads) or [])
    list(check(asked=[Asked(SPEC, question(), None), few])._changes(fault))
    assert seen == [1]


@pytest.mark.parametrize("name, fault", [
    (module.VIEWS, "strides ignored"), (ORDERS, "order of positions matters"), (module.SHARP, "softmax overflows"), ("64 tokens", "some lengths wrong"),
    ("random", "unexplained"),
])  # fmt: skip
def test_what_is_wrong_in_one_kind_of_calls(name, fault):
    assert explained((7, 1, 1), (1, 1, 1), names=[name, "other"])[0][0] == fault


def test_what_is_wrong_in_several_kinds_of_calls():
    assert (
        explained((7, 1, 1), (7, 1, 1), (1, 1, 1), names=["64 tokens", "130 tokens", "x"])[0][0] == "some lengths wrong"
    )
    assert explained((7, 1, 1), (9, 1, 1), names=["64 tokens", "x"])[0][0] == "unexplained"
    some = [(7, 1, 1), (8, 1, 1), (9, 1, 1)]
    assert explained(*some, names=["64 tokens", "128 tokens", "130 tokens"])[0][0] == "unexplained"
    assert explained((7, 1, 1), names=[module.VIEWS])[0][0] == "gradient times a number"  # nothing else was asked
    assert explained((math.nan, 1, 1), (1, 1, 1))[0][0] == "not finite"


def test_errors_in_ulps_of_the_typical_size():
    own, _, _ = judged((1, 1, 1), (1, 1, 1))
    own.asked[0].answers["dq"].flat[0] += 0.5
    right = np.concatenate([x["dq"].value.ravel() for x in own.right])
    row, ulp = own._error_row("dq"), 2.0**-23 * math.sqrt((right**2).mean())
    assert row.where == "dq, all questions" and row.absolute == pytest.approx(0.5) and row.typical == 0
    assert row.worst == pytest.approx(0.5 / ulp)
    for asked in own.asked:
        asked.answers["dq"].flat[1:] += 0.25
    assert own._error_row("dq").typical == pytest.approx(0.25 / ulp)


# --- The whole ---


def test_reports():
    questions = [question(), question("other", 2)]

    def report(fn, *faults):
        return check(*faults).report(fn, SPEC, questions, None)

    right = report(backward)
    assert (right.verdict, right.precision, right.subject, right.expected) == (
        "right",
        OWN,
        "gradients",
        "what is meant",
    )
    assert [row.where for row in right.errors] == [f"{name}, all questions" for name in TENSORS]
    double = report(lambda *given: tuple(2 * x for x in backward(*given)), TWICE)
    assert double.verdict == "wrong" and double.faults == ("twice",) and double.precision is None
    failed = report(lambda *given: 3)
    assert failed.verdict == "not judged" and failed.failure.reason == "it returns int instead of (dq, dk, dv)"
    calls = []

    def restless(*given):
        calls.append(1)
        return tuple(x + np.float32(len(calls)) for x in backward(*given))

    assert report(restless, TWICE).faults == ("state between calls",)
