"""How far attention may be off: each bound as its docstring derives it, in plain loops; right inside, wrong outside."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
from strategies import DTYPES

import pyrope
from pyrope import Rope, YaRN
from pyrope.oracle import vectors
from pyrope.oracle.attention_checks import SOFTMAX, check_attention
from pyrope.oracle.attention_evidence import AttentionEvidence, Exam
from pyrope.oracle.attention_steps import LinearSteps, Steps, run
from pyrope.oracle.examination import examine, make_spec
from pyrope.oracle.floats import U32, U64, UNIT
from pyrope.oracle.linear_checks import LINEAR_KIND, check_linear_attention
from pyrope.oracle.questions import Question, Questions
from pyrope.oracle.tolerance import (
    ANGLE32,
    OWN,
    Allowed,
    angle_bound,
    angle_errors,
    attention_grades,
    linear_bounds,
    linear_sizes,
    softmax_bounds,
)
from pyrope.oracle.vector_cases import TRUTH, cases, exam_of

ROPE = Rope(8, 100.0, "interleaved", rotary_dim=6)
CASES = [(kind, dtype, rope) for kind in (SOFTMAX, LINEAR_KIND) for dtype in UNIT for rope in (None, ROPE)]


def exam(kind, dtype, rope, softcap=None, n=5):
    """A few tokens, two heads over one, two rows; the positions of linear attention are given without a rope, too."""
    spec = make_spec(2, 1, 8, True, rope, softcap=softcap, dtype=DTYPES[dtype])
    question = Questions(spec, DTYPES[dtype], 4096).random("small", n, batch=2, far=True)
    if kind is LINEAR_KIND and rope is None:
        question = replace(question, positions=np.zeros((2, n), np.int64))
    return Exam(kind, "", spec, dtype, [question])


def by_loops(q, k, q_at, k_at, rope, unit):
    """Σ |q_i||k_i|·ε_i of one query and one key."""
    total, t = 0.0, angle_bound(rope, by="logarithm") * (unit / U32)
    for i, theta in enumerate(pyrope.frequencies(rope)):
        error = theta * (abs(q_at - k_at) * t[i] + (q_at + k_at) * unit * (t[i] > 0))
        for x, at in ((q, q_at), (k, k_at)):
            exact = at == 0 and rope.attention_factor == 1 and all(float(np.float32(a)) == a for a in x)
            error += 0 if exact else 6 * unit
        total += math.hypot(*q[2 * i : 2 * i + 2]) * math.hypot(*k[2 * i : 2 * i + 2]) * error
    return total


@pytest.mark.parametrize("rope", [ROPE, Rope(8, 100.0, "interleaved", scaling=YaRN(4.0, 64))])
@pytest.mark.parametrize("unit", [U32, U64])
def test_angles_add_what_their_roundings_do(rope, unit):
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((2, 1, 1, 4, 8))
    q[..., 1, :] = np.float32(q[..., 1, :])
    at = np.array([[0, 0, 7, 4000]])
    most, standard = (angle_errors(rope, q, k, at, unit, norm) for norm in (1, 2))
    for i in range(4):
        for j in range(4):
            expected = by_loops(q[0, 0, i], k[0, 0, j], at[0, i], at[0, j], rope, unit)
            assert math.isclose(most[0, 0, i, j], expected, rel_tol=1e-12)
    assert (standard <= most).all() and (standard >= most / math.sqrt(rope.pairs)).all()
    assert (
        angle_errors(rope, q, k, at * 2**20, unit) > 2**20 * (most - most[0, 0, 0, 0])
    ).all()  # positions rounded too


def softmax_by_loops(exam, grade, parts, question, b, h, i, e):
    """The bound of one output, as the docstring of `softmax_bounds` derives it."""
    spec, u = exam.spec, UNIT[exam.dtype]
    fine, (m, d) = U64 if exam.dtype == "float64" else U32, parts.k.shape[-2:]
    w, v, o = parts.weights[b, h, i], parts.v[b, h, :, e], parts.out[b, h, i, e]
    seen, most, moved, total = [j for j in range(m) if w[j] > 0], 0.0, 0.0, 0.0
    top = max(abs(parts.scores[b, h, i, j]) for j in seen)
    for j in seen:
        q, k = parts.q[b, h, i], parts.k[b, h, j]
        t = spec.scale * math.sqrt(sum((x * y) ** 2 for x, y in zip(q, k, strict=True)))
        variance = (fine * math.sqrt(d + 8) * (t + top)) ** 2
        if grade == "scores rounded":
            roundings = 6 if spec.softcap else 3
            variance += u**2 / 3 * (10 * t**2 + roundings * parts.scores[b, h, i, j] ** 2)
        delta = 6 * math.sqrt(variance)
        if spec.rope is not None:
            at, unit = question.positions[b], U64 if grade == OWN else U32
            delta += spec.scale * by_loops(q, k, at[i], at[j], spec.rope, unit)
        moved, total, most = moved + w[j] * abs(v[j] - o) * delta, total + w[j] * delta, max(most, delta)
    worst = min(moved * math.exp(min(total, 6)), 2 * math.tanh(most / 2))
    worst += 2 * u if grade in ("weights rounded", "scores rounded") else 0
    worst += 4 * fine * top * abs(o)  # the logarithm of the sum
    return worst + 1.01 * u * abs(o) + 4 * (m + 8) * fine + ((m + 1) * 2.0**-24 if exam.dtype == "float16" else 0)


def linear_by_loops(exam, grade, parts, question, b, h, i, e):
    """The bound of one output, as the docstring of `linear_bounds` derives it."""
    u, fine = UNIT[exam.dtype], U64 if exam.dtype == "float64" else U32
    (n, d), o, total = parts.k.shape[-2:], abs(parts.out[b, h, i, e]), 0.0
    for j in range(i + 1):
        at, q, k = question.positions[b], parts.q[b, h, i], parts.k[b, h, j]
        share, w = parts.scores[b, h, i, j], parts.weights[b, h, i, j]
        size = math.hypot(*q) * math.hypot(*k) * share
        variance = (fine * size) ** 2 * (d + n + 8)
        if grade == "features rounded":
            variance += u**2 * (10 / 3 / d * size**2 + w**2)
        total += 6 * math.sqrt(variance)
        if exam.spec.rope is not None:
            total += share * by_loops(q, k, at[i], at[j], exam.spec.rope, U64 if grade == OWN else U32)
    return (1 + o) * total + 3 * u * o + 16 * fine + ((n + 1) * 2.0**-24 if exam.dtype == "float16" else 0)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind, dtype, rope", CASES)
def test_every_bound_is_what_its_docstring_derives(kind, dtype, rope, softcap):
    asked = exam(kind, dtype, rope, softcap if kind is SOFTMAX else None)
    ((_, parts),), (question,) = asked.right, asked.questions
    by_hand = softmax_by_loops if kind is SOFTMAX else linear_by_loops
    for grade in asked.grades:
        worst = asked.allowed(grade, question, parts).worst
        for index in np.ndindex(2, 2, 5, 8):
            assert math.isclose(
                worst[index], by_hand(asked, grade, parts, question, *index), rel_tol=1e-9, abs_tol=1e-18
            )


def test_scores_of_one_product_have_four_roundings():
    spec = make_spec(1, 1, 1, False, None, dtype=np.dtype(np.float16))
    question = Question("one product", *np.array([[[[2.0]]], [[[3.0]]], [[[1.0]]]])[:, None], random=False)
    parts = run(spec, Steps(), *question.wide())
    few, many = (softmax_bounds(spec, "float16", "scores rounded", parts, random=random) for random in (False, True))
    assert few.mean_square == math.inf > many.mean_square
    other = replace(parts, v=np.array([[[[1.0], [-1.0]]]]), weights=np.array([[[[0.5, 0.5]]]]), scores=np.full((1, 1, 1, 2), 6.0),
                    k=np.full((1, 1, 2, 1), 3.0))  # fmt: skip
    allowed = softmax_bounds(spec, "float16", "scores rounded", other, random=False).worst.item()
    delta = 6 * U32 * 3 * 12 + 4 * 2.0**-11 * 6
    assert math.isclose(allowed, 2 * math.tanh(delta / 2) + 2 * 2.0**-11 + 40 * U32 + 3 * U32, rel_tol=1e-12)


@pytest.mark.parametrize("kind, dtype, rope", CASES)
def test_the_mean_square_of_random_errors_is_bounded_by_three_standard_errors(kind, dtype, rope):
    """Errors of the size that the docstrings give to scores and weights, drawn at random, are well within."""
    asked, rng = exam(kind, dtype, rope), np.random.default_rng(5)
    ((out, parts),), (question,) = asked.right, asked.questions
    fine = U64 if dtype == "float64" else U32
    for grade in asked.grades:
        allowed = asked.allowed(grade, question, parts)
        d, n = 8, 5
        if kind is SOFTMAX:
            terms = asked.spec.scale * np.sqrt(np.square(parts.q) @ np.square(parts.k).swapaxes(-1, -2))
            top = np.where(parts.weights > 0, np.abs(parts.scores), 0).max(axis=-1, keepdims=True)
            off = rng.standard_normal(terms.shape) * fine * math.sqrt(d + 8) * (terms + top)
            powers = parts.weights * np.exp(off)
            moved = powers / powers.sum(axis=-1, keepdims=True) @ parts.v
        else:
            off = rng.standard_normal(parts.weights.shape) * fine * math.sqrt(d + n + 8) * linear_sizes(parts)
            moved = (parts.weights + off) @ parts.v
        spread = math.sqrt(np.square(moved - out).mean())
        assert spread < 0.5 * allowed.mean_square
        assert spread > 0.01 * allowed.mean_square or grade != OWN or rope  # others count other errors, too


@pytest.mark.parametrize("kind, dtype, rope", CASES)
def test_right_ends_where_the_bounds_do(kind, dtype, rope):
    """One output just inside of what is allowed, and just outside; then all outputs, by their mean square."""
    asked, margin = exam(kind, dtype, rope, n=16), 0.2 if dtype == "float64" else 0.001  # float64 rounds out itself
    ((out, parts),), (question,) = asked.right, asked.questions
    signs = np.sign(np.random.default_rng(7).standard_normal(out.shape))
    for grade in asked.grades:
        worst, mean_square = asked.allowed(grade, question, parts)
        size = mean_square / math.sqrt(np.square(worst).mean())
        one, least = np.zeros(out.shape), np.unravel_index(worst.argmin(), out.shape)
        one[least] = worst[least]
        assert worst[least] < 0.9 * mean_square * math.sqrt(out.size)
        assert size < 1 or grade == "rounded once"  # the worst of one rounding is below three standard errors
        for error in [one] + [signs * worst * size] * (size < 1):
            for share, failed in ((1 - margin, []), (1 + margin, [0])):
                assert AttentionEvidence(asked, [out + share * error], grade).failed == failed


def test_a_ratio_is_that_of_the_worst_output_or_of_the_mean_square():
    allowed = Allowed(np.array([1.0, 2.0]), 0.5)
    assert allowed.ratio(np.array([0.1, 0.6])) == pytest.approx(math.sqrt(0.185) / 0.5)
    assert Allowed(np.array([1.0, 2.0])).ratio(np.array([0.1, 0.6])) == 0.3
    assert Allowed(np.array([0.0])).ratio(np.array([0.0])) == 0 and allowed.ratio(np.array([0.0, np.inf])) == math.inf


@pytest.mark.parametrize("dtype", UNIT)
def test_better_grades_allow_less(dtype):
    for kind in (SOFTMAX, LINEAR_KIND):
        asked = exam(kind, dtype, ROPE)
        ((_, parts),), (question,) = asked.right, asked.questions
        listed = [asked.allowed(grade, question, parts) for grade in asked.grades]
        for better, worse in zip(listed, listed[1:], strict=False):
            assert (better.worst <= worse.worst).all() and better.mean_square < worse.mean_square
            assert (better.worst < 0.9 * worse.worst).mean() > 0.5
    assert attention_grades("float32", None, ()) == (OWN,) and attention_grades("float64", ROPE, ()) == (OWN, ANGLE32)


# One verdict for the same numbers


def rotated_in_single(x, at, rope):
    """Halves of vectors, with float32 angles."""
    theta = np.float32(1) / np.float32(rope.base) ** (np.arange(0, 16, 2, dtype=np.float32) / np.float32(16))
    angle = at[:, None, :, None].astype(np.float32) * theta
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate((a * cos - b * sin, a * sin + b * cos), axis=-1)


def kernel(spec, *, scale=1.0, scores=None, angles=False, later=0, out=None):
    """Softmax attention with something slightly off, in other code than the oracle's."""

    def fn(q, k, v, positions):
        turn = rotated_in_single if angles else pyrope.rotate
        q, k = turn(q, positions + later, spec.rope), turn(k, positions, spec.rope)
        s = q @ k.swapaxes(-1, -2) * q.dtype.type(scale * spec.scale)
        s = s if scores is None else s.astype(scores).astype(q.dtype)
        s = np.where(np.tri(q.shape[2], dtype=bool), s, -np.inf)
        w = np.exp(s - s.max(axis=-1, keepdims=True))
        o = w / w.sum(axis=-1, keepdims=True) @ v
        return o if out is None else o.astype(out).astype(q.dtype)

    return fn


KERNELS = {
    "right": {}, "float32 angles": {"angles": True}, "scale off by 1e-3": {"scale": 1.001}, "float16 scores": {"scores": np.float16},
    "float16 outputs": {"out": np.float16}, "queries late": {"later": 1}, "scale missing": {"scale": 4.0},
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_softmax_kernels_have_one_verdict(dtype, name):
    case = next(case for case in cases("attention") if case.name == f"attention-causal-{dtype}")
    asked = exam_of(case)
    fn = kernel(asked.spec, **KERNELS[name])
    q, k, v, at = (case.inputs[x][None] for x in ("q", "k", "v", "k_positions"))
    with np.errstate(all="ignore"):
        out = fn(*(x.astype(dtype) for x in (q, k, v)), at)
    given = replace(
        asked,
        questions=[replace(asked.questions[0], **{x: y.astype(dtype) for x, y in zip("qkv", (q, k, v), strict=True)})],
    )
    checked = examine(given, fn, None, 2)
    judged = vectors._judged(case, TRUTH["attention"](case).out, vectors._Outputs({case.name: out[0]}), ())
    assert (checked.verdict, checked.precision, checked.faults) == (judged.verdict, judged.precision, judged.faults)
    options = {"heads": 4, "key_heads": 4, "head_dim": 16, "rope": asked.spec.rope, "dtype": DTYPES[dtype]}
    assert check_attention(fn, **options).verdict == judged.verdict
    assert (judged.verdict == "right") == (name in ("right", "float32 angles"))


@pytest.mark.parametrize("error", [0.0, 1e-7, 1e-4])
def test_linear_kernels_have_one_verdict(error):
    case = next(case for case in cases("linear") if case.name == "linear-19-causal-float32")
    asked = exam_of(case)

    def fn(q, k, v, positions):
        out = pyrope.linear_attention(q, k, v, positions, asked.spec.rope, causal=True)
        return (out * (1 + error * np.cos(np.arange(out.size)).reshape(out.shape))).astype(out.dtype)

    q, k, v = (case.inputs[x].astype(np.float32)[None] for x in "qkv")
    given = replace(asked, questions=[replace(asked.questions[0], q=q, k=k, v=v)])
    out = fn(q, k, v, case.inputs["k_positions"][None])[0]
    judged = vectors._judged(case, TRUTH["linear"](case).out, vectors._Outputs({case.name: out}), ())
    checked = check_linear_attention(fn, heads=4, key_heads=4, rope=asked.spec.rope)
    assert examine(given, fn, None, 1).verdict == checked.verdict == judged.verdict
    assert (judged.verdict == "right") == (error < 1e-5)


def test_the_steps_of_the_bounds_are_the_right_ones():
    asked = exam(LINEAR_KIND, "float64", ROPE)
    by_steps = functools.partial(run, asked.spec, LinearSteps(), *asked.questions[0].wide())
    assert np.abs(by_steps().out - asked.right[0][0]).max() < 1e-14
    assert linear_bounds(asked.spec, "float64", OWN, by_steps(), asked.questions[0].positions).worst.min() > 0
