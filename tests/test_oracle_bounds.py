"""How far a rotation may be off: every bound as its docstring derives it, written out pair by pair in plain Python;
and, of attention, the bounds of mean squares and of standard errors. Right ends just there."""

import math
from dataclasses import replace

import numpy as np
import pytest
from strategies import DTYPES
from test_oracle_attention_bounds import CASES, exam

import pyrope
from pyrope import Axes, DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN
from pyrope.oracle import vectors
from pyrope.oracle.attention_checks import SOFTMAX
from pyrope.oracle.linear_checks import LINEAR_KIND
from pyrope.oracle.tolerance import (
    ANGLE32,
    ANGLE64,
    BOTH,
    LOW_TABLES,
    ONCE,
    OWN,
    _moved,
    angle_errors,
    decides_up_to,
    float32_bound,
    linear_bounds,
    linear_sizes,
    pair_errors,
    softmax_bounds,
    theta_bound,
)
from pyrope.oracle.vector_cases import TRUTH, cases

U = 2.0**-24
UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
STEPS = {"float16": 2.0**-25, "bfloat16": 2.0**-134, "float32": 2.0**-150, "float64": 2.0**-1074}
SECOND = 1 + 2.0**-10
LISTS = tuple(1 + i / 8 for i in range(16)), tuple(1 + 5 * i / 8 for i in range(16))
ROPES = [
    Rope(32, 10000.0, "half"),
    Rope(32, 500000.0, "interleaved", 16, "suffix"),
    Rope(32, 10000.0, "half", scaling=Linear(3.0)),
    Rope(32, 10000.0, "half", scaling=Proportional(0.5)),
    Rope(32, 10000.0, "half", scaling=LongRoPE(*LISTS, 8.0, 4096, length=8192)),
    Rope(32, 10000.0, "half", scaling=YaRN(4.0, 4096)),
    Rope(32, 10000.0, "interleaved", scaling=YaRN(40.0, 1024, truncate=False)),
    Rope(32, 10000.0, "half", scaling=YaRN(4.0, 2**40)),  # the ramp ends beyond the last pair
    Rope(32, 500000.0, "half", scaling=Llama3(8.0, 1.0, 4.0, 8192)),
    Rope(32, 10000.0, "half", scaling=DynamicNTK(2.0, 4096, length=4100)),
    Rope(32, 10000.0, "half", scaling=DynamicNTK(2.0, 4096, length=100)),
    Rope(32, 10000.0, "interleaved-to-half", direction=-1),
    Rope(32, 10000.0, "half", axes=Axes("interleaved", (6, 5, 5))),
    Rope(32, 10000.0, "half", scaling=Llama3(8.0, 1.0, 1.25, 8192)),  # a ramp of less than one turn
]


def frequency_error(rope, i, tensor, logarithm):
    """Units in the last place of one frequency, by the docstring of `theta_bound`."""
    r, scaling, steps = rope.width, rope.scaling, 4 if logarithm else 1
    e = 2 * i / r
    units, w = 4 + steps * e * math.log(rope.base), rope.base**-e
    match scaling:
        case Linear() | LongRoPE() | Proportional():
            return units + 2
        case YaRN():
            s = scaling.factor
            ends = [
                r * math.log(scaling.original_length / (2 * math.pi * turns)) / (2 * math.log(rope.base))
                for turns in (32.0, 1.0)
            ]
            lo, hi = (math.floor(ends[0]), math.ceil(ends[1])) if scaling.truncate else ends
            lo, hi = max(lo, 0), min(hi, r - 1)
            gamma = (i - lo) / (hi - lo)
            theta = w * (1 - min(max(gamma, 0), 1) * (1 - 1 / s))
            own = 1.5 if scaling.truncate else 1.5 + lo / (hi - lo) + 2
            return units + 4 + 0.5 + ((1 - 1 / s) * w / theta * own if 0 <= gamma <= 1 else 0)
        case Llama3():
            s, turns, span = scaling.factor, scaling.original_length * w / (2 * math.pi), scaling.high - scaling.low
            t = (turns - scaling.low) / span
            own = (turns * (units + 3) + scaling.low) / span + 3 + 1
            theta = w * (1 - (1 - min(max(t, 0), 1)) * (1 - 1 / s))
            return units + 5 + ((1 - 1 / s) * w / theta * own if 0 <= t <= 1 else 0)
        case DynamicNTK():
            s, k, share = scaling.factor, r / (r - 2), max(scaling.length / scaling.original_length, 1)
            g = s * share - (s - 1)
            log = math.log(rope.base) + k * math.log(g)
            if not tensor:
                return 4 + steps * e * log
            rho = (3 * s * share + (s - 1) + g) / g
            return e * (k * rho + k * math.log(g) + 4) + steps * e * log + 3
    return units


def index_of(rope, pair):
    return pair if rope.axes is None else rope.axes.assign(rope.pairs)[pair][1]


@pytest.mark.parametrize("logarithm", [False, True])
@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("rope", ROPES, ids=repr)
def test_the_error_of_a_frequency_is_what_its_docstring_derives(rope, tensor, logarithm):
    chosen = {name: True for name, given in (("tensor_length", tensor), ("logarithm", logarithm)) if given}
    got = theta_bound(rope, **chosen)  # neither is the default
    for pair in range(rope.pairs):
        expected = frequency_error(rope, index_of(rope, pair), tensor, logarithm)
        assert math.isclose(got[pair], expected * U * SECOND, rel_tol=1e-12), pair


def angle_error(rope, pair, m):
    """Relative, of a float32 angle."""
    large = abs(m) > 2**24
    first = float(pyrope.frequencies(rope)[0])
    if pair == 0 and math.log2(first).is_integer():
        return large * U
    return frequency_error(rope, index_of(rope, pair), True, False) * U * SECOND + (1 + large) * U


def allowed(rope, dtype, grade, x, y, pair, m, first):
    """Of the first or of the second feature of a pair (x, y) at m, as the top of `tolerance` has it."""
    theta, a = float(pyrope.frequencies(rope)[pair]), rope.attention_factor
    at = (
        [m]
        if rope.axes is None
        else [[m] if axis == rope.axes.assign(rope.pairs)[pair][0] else [0] for axis in range(rope.axes.count)]
    )
    cos, sin = (float(table[0, pair]) for table in pyrope.cos_sin(rope, np.array(at)))
    u, w = UNITS[dtype], 2.0**-24 if UNITS[dtype] > U else 2.0**-53
    out = x * cos - y * sin if first else x * sin + y * cos
    sums = abs(x * cos) + abs(y * sin) if first else abs(y * cos) + abs(x * sin)
    length, angle = a * math.hypot(x, y), angle_error(rope, pair, m)
    turned = length * abs(m) * theta * angle
    total = u * abs(out) + 4 * w * sums + STEPS[dtype] * (2 + 2 * length)
    if dtype != "float64" or grade not in (ONCE, LOW_TABLES):
        total += turned * 2.0**-29  # a float64 angle
    if grade in (LOW_TABLES, ANGLE64, BOTH):
        total += (3 if a != 1 else 2) * u * sums
    if grade == ANGLE64:
        total += 6 * 2.0**-53 * sums
    if grade in (ANGLE32, BOTH):
        total += turned + 6 * U * sums + 2.0**-20 * length
    if grade == BOTH:
        total += u / 16 * length  # tables in fixed point
    return min(total * SECOND, 2.1 * length)


JUDGED = ["half-float32", "half-float64", "half-bfloat16", "interleaved-float16", "yarn-float16", "yarn-float64", "yarn-float32",
          "llama3-float32", "suffix-interleaved-float32", "head-2-float32", "axes-interleaved-float32"]  # fmt: skip


@pytest.mark.parametrize("name", JUDGED)
def test_the_bounds_of_test_vectors_are_those_of_a_rotation(name):
    case = next(case for case in cases("rotation") if case.name == f"rotation-{name}")
    truth, rope, p = TRUTH["rotation"](case), case.rope, case.rope.pairs
    at = np.atleast_2d(case.inputs["positions"])
    names = {
        "float16": (ONCE, LOW_TABLES, ANGLE32, BOTH),
        "float32": (ONCE, LOW_TABLES, ANGLE32),
        "float64": (LOW_TABLES, ANGLE64, ANGLE32),
    }
    assert tuple(truth.bounds) == names["float16" if case.dtype == "bfloat16" else case.dtype]
    assert (truth.loosest == truth.bounds[list(truth.bounds)[-1]].worst).all()
    for row in range(at.shape[1]):
        for pair in range(0, p, 3):
            i, j = (2 * pair, 2 * pair + 1) if rope.layout == "interleaved" else (pair, pair + p)
            i, j = i + rope.start, j + rope.start
            m = int(at[0 if rope.axes is None else rope.axes.assign(p)[pair][0], row])
            x, y = case.inputs["x"][1, row, [i, j]]
            assert math.isclose(truth.size[1, row, i], math.hypot(x, y) * rope.attention_factor)
            for grade, bound in truth.bounds.items():
                for feature, first in ((i, True), (j, False)):
                    expected = allowed(rope, case.dtype, grade, x, y, pair, m, first)
                    assert math.isclose(bound.worst[1, row, feature], expected, rel_tol=1e-7, abs_tol=1e-22), (
                        m,
                        pair,
                        grade,
                    )
    still = np.ones(rope.head_dim, bool)
    still[rope.start : rope.start + rope.width] = False
    assert all((bound.worst[..., still] == 0).all() for bound in truth.bounds.values())
    assert (truth.size[..., still] == np.abs(case.inputs["x"][..., still])).all()
    ulps = 2.5 if rope.scaling is not None and rope.attention_factor != 1 else 1.0
    sums = pair_errors(case.inputs["x"], case.inputs["positions"], rope).sums.max()
    assert math.isclose(truth.error, (2 * ulps + 2) * 2.0**-53 * sums)


@pytest.mark.parametrize("rope", ROPES[:3] + ROPES[5:7], ids=repr)
def test_the_measures_of_a_rotation_are_those_of_each_pair(rope):
    x, at = np.random.default_rng(1).standard_normal((3, 32)), np.array([0, 5, 2**25])
    measures, bound = pair_errors(x, at, rope), float32_bound(x, at, rope)
    for row, m in enumerate(at):
        for pair in range(rope.pairs):
            i, j = (2 * pair, 2 * pair + 1) if rope.layout == "interleaved" else (pair, pair + rope.pairs)
            a, b = x[row, rope.start + i], x[row, rope.start + j]
            cos, sin = (float(table[0, pair]) for table in pyrope.cos_sin(rope, at[row : row + 1]))
            length = rope.attention_factor * math.hypot(a, b)
            size = length * m * float(pyrope.frequencies(rope)[pair])
            sums = {i: abs(a * cos) + abs(b * sin), j: abs(b * cos) + abs(a * sin)}
            for feature, total in sums.items():
                got = [float(measure[row, feature]) for measure in measures]
                assert got == pytest.approx([total, size, angle_error(rope, pair, m), length], rel=1e-12)
                expected = (size * angle_error(rope, pair, m) + 6 * U * total) * SECOND
                assert bound[row, rope.start + feature] == pytest.approx(expected, rel=1e-12)


def test_float32_decides_up_to_half_a_turn_or_an_end():
    fast, slow = Rope(4, 10000.0, "half", scaling=Linear(3.0)), Rope(2, 10000.0, "half", scaling=Linear(2.0**20))
    # θ₀ = 1/3: 7 roundings and two of the position; below 2²⁴ one fewer would be enough for longer.
    error = (6 * SECOND + 2) * U / 3
    assert decides_up_to(fast) == int(math.pi / error)
    assert decides_up_to(slow) == 2**31


@pytest.mark.parametrize("grade", [ONCE, LOW_TABLES, ANGLE32])
def test_right_vectors_end_where_the_bounds_do(grade):
    """The largest bound of a case, just inside and just outside, as the output that float32 has next to it."""
    case = next(case for case in cases("rotation") if case.name == "rotation-half-float32")
    truth, order = TRUTH["rotation"](case), [ONCE, LOW_TABLES, ANGLE32]
    where = np.unravel_index(truth.bounds[grade].worst.argmax(), truth.out.shape)
    for share, expected in ((0.999, order.index(grade)), (1.001, order.index(grade) + 1)):
        out = truth.out.copy()
        out[where] += share * truth.bounds[grade].worst[where]
        off = np.abs(out - truth.out)
        reached = [i for i, name in enumerate(order) if truth.bounds[name].ratio(off) <= 1]
        assert (reached[0] if reached else 3) == expected


@pytest.mark.parametrize("name", ["rotation-half-float64", "attention-causal-float64", "linear-19-causal-float64"])
def test_a_verdict_about_vectors_changes_where_the_last_bound_does(name):
    case = next(case for case in cases() if case.name == name)
    truth = TRUTH[case.kind](case)
    where = np.unravel_index(truth.loosest.argmax(), truth.out.shape)
    last = list(truth.bounds.values())[-1]
    most = truth.loosest[where]
    if case.kind != "rotation":  # one number that is off has the mean square of all
        most = min(most, last.mean_square * math.sqrt(truth.out.size))
    for share, verdict in ((0.999, "right"), (1.001, "wrong")):
        out = truth.out.copy()
        out[where] += share * most
        judged = vectors._judged(case, truth.out, vectors._Outputs({case.name: out}), ())
        assert judged.verdict == verdict


# Attention, in the mean square


@pytest.mark.parametrize("unit", [2.0**-24, 2.0**-53])
def test_the_angles_of_pairs_with_random_signs_add_up_in_squares(unit):
    rope, rng = Rope(8, 100.0, "interleaved", rotary_dim=6), np.random.default_rng(3)
    q, k = rng.standard_normal((2, 1, 1, 3, 8))
    at = np.array([[0, 7, 4000]])
    got, theta = angle_errors(rope, q, k, at, unit, norm=2), pyrope.frequencies(rope)
    t = [0.0] + [(frequency_error(rope, i, True, True) * SECOND + 1) * unit for i in (1, 2)]
    for i in range(3):
        for j in range(3):
            squares = [0.0, 0.0, 0.0]
            for pair in range(3):
                size = math.hypot(*q[0, 0, i, 2 * pair : 2 * pair + 2]) * math.hypot(
                    *k[0, 0, j, 2 * pair : 2 * pair + 2]
                )
                rounded = theta[pair] * unit * (pair > 0)
                parts = (
                    theta[pair] * t[pair] * abs(at[0, i] - at[0, j]),
                    at[0, i] * rounded + 6 * unit,
                    at[0, j] * rounded + 6 * unit,
                )
                squares = [total + (size * part) ** 2 for total, part in zip(squares, parts, strict=True)]
            assert math.isclose(got[0, 0, i, j], sum(map(math.sqrt, squares)), rel_tol=1e-12)


def mean_square(exam, grade, parts, question):
    """By the docstrings of `softmax_bounds` and `linear_bounds`: three standard errors of all outputs."""
    softmax, u = exam.kind is SOFTMAX, UNITS[exam.dtype]
    fine, narrow = 2.0**-53 if exam.dtype == "float64" else U, exam.dtype in ("float16", "bfloat16")
    (b, h, n, m), d, e = parts.weights.shape, parts.q.shape[-1], parts.v.shape[-1]
    angles = np.zeros((b, h, n, m))
    if exam.spec.rope is not None:
        unit = 2.0**-53 if grade == OWN else U
        angles = angle_errors(exam.spec.rope, parts.q, parts.k, question.positions, unit, norm=2 if softmax else 1)
    total = 0.0
    for row, head, i in np.ndindex(b, h, n):
        w, out = parts.weights[row, head, i], parts.out[row, head, i]
        seen = [j for j in range(m) if w[j] != 0]
        top, noise = max(abs(parts.scores[row, head, i, j]) for j in seen), {}
        for j in seen:
            q, k, s = parts.q[row, head, i], parts.k[row, head, j], parts.scores[row, head, i, j]
            if softmax:
                t = exam.spec.scale * math.sqrt(np.square(q * k).sum())
                noise[j] = (fine * math.sqrt(d + 8) * (t + top)) ** 2
                noise[j] += u**2 / 3 * (10 * t**2 + 3 * s**2) if grade == "scores rounded" else 0
                noise[j] += (exam.spec.scale * angles[row, head, i, j] / 3) ** 2
            else:
                size = linear_sizes(parts)[row, head, i, j]
                noise[j] = (fine * size) ** 2 * (d + m + 8) + (s * angles[row, head, i, j] / 3) ** 2
                noise[j] += u**2 * (10 / 3 / d * size**2 + w[j] ** 2) if grade == "features rounded" else 0
        beyond = math.exp(min(4 * sum(w[j] * math.sqrt(noise[j]) for j in seen), 6)) if softmax else 1
        for feature in range(e):
            o, v = out[feature], parts.v[row, head, :, feature]
            if softmax:
                total += sum(w[j] ** 2 * noise[j] * (v[j] - o) ** 2 for j in seen) * beyond + u**2 / 3 * o**2
                total += (4 * fine * top * o) ** 2  # weights as exp(s − log Σ exp s)
                rounded = u**2 / 1.5 if narrow and grade != ONCE else 0
                total += sum(w[j] ** 2 for j in seen) * (rounded + (16 * fine) ** 2)
            else:
                total += sum(noise.values()) * (1 + o**2) + 3 * u**2 * o**2
    tiny = (m + 1) * 2.0**-24 if exam.dtype == "float16" else 0
    return 3 * math.sqrt(total / (b * h * n * e)) + (8 if softmax else 16) * fine + tiny


@pytest.mark.parametrize("kind, dtype, rope", CASES)
def test_the_mean_square_is_what_the_docstrings_derive(kind, dtype, rope):
    asked = exam(kind, dtype, rope)
    ((_, parts),), (question,) = asked.right, asked.questions
    for grade in asked.grades:
        expected = mean_square(asked, grade, parts, question)
        assert math.isclose(asked.allowed(grade, question, parts).mean_square, expected, rel_tol=1e-9)


@pytest.mark.needs("ml_dtypes")
def test_every_dtype_is_judged():
    assert set(UNITS) == set(DTYPES)


@pytest.mark.parametrize("check", [pyrope.check_rotation, pyrope.assert_rotation])
@pytest.mark.parametrize(
    "rope, options, most",
    [
        (Rope(16, 10000.0, "half"), {}, 131071),
        (Rope(16, 10000.0, "half"), {"max_position": 5000}, 5000),
        (Rope(16, 10000.0, "half", scaling=DynamicNTK(2.0, 64, length=1000)), {}, 999),
        (Rope(16, 10000.0, "half", scaling=DynamicNTK(2.0, 64, length=1)), {}, 1),
        (Rope(16, 10000.0, "half", scaling=YaRN(2.0, 64)), {}, 131071),
    ],
)
def test_the_greatest_position_that_is_asked(check, rope, options, most):
    """A table of exactly so many rows is enough, and all of it is looked at: its last row wrong is wrong."""
    asked = set()

    def fn(x, positions, spoilt=-1):
        assert positions.min() >= 0
        asked.add(int(positions.max()))
        y = pyrope.rotate(x, positions, rope)
        return np.where((positions == spoilt)[:, None], x * x.dtype.type(0.5), y)

    check(fn, rope, **options)
    assert max(asked) == most
    if check is pyrope.check_rotation:
        assert not check(lambda x, m: fn(x, m, most), rope, **options).ok
    else:
        with pytest.raises(pyrope.Mismatch):
            check(lambda x, m: fn(x, m, most), rope, **options)


@pytest.mark.parametrize("dtype, size", [("float16", 1600), ("bfloat16", 200)])
def test_what_is_not_linear_in_errors_is_bounded_too(dtype, size):
    """Equal scores of hundreds, whose roundings are beyond e⁶: exponents end there, in the mean square, too."""
    asked = exam(SOFTMAX, dtype, None)
    q, k = (np.full_like(x, value) for x, value in ((asked.questions[0].q, size), (asked.questions[0].k, 1)))
    asked = replace(asked, questions=[replace(asked.questions[0], q=q, k=k)])
    ((_, parts),), (question,) = asked.right, asked.questions
    got = asked.allowed("scores rounded", question, parts).mean_square
    assert math.isclose(got, mean_square(asked, "scores rounded", parts, question), rel_tol=1e-9)


def test_outputs_beyond_the_values_move_as_far_as_both_together():
    """|v − o| = 1 − v·o holds for v = ±1 and |o| ≤ 1 only; else it is |v| + |o| at most."""
    errors, v = np.array([[1.0, 3.0]]), np.array([[1.0], [-1.0]])
    assert _moved(errors, v, np.array([[0.5]])) == 1 * 0.5 + 3 * 1.5
    assert _moved(errors, v, np.array([[1.5]])) == 4 * (1 + 1.5)
    assert _moved(errors, 2 * v, np.array([[0.5]])) == 4 * (2 + 0.5)


@pytest.mark.parametrize("kind, bounds", [(SOFTMAX, softmax_bounds), (LINEAR_KIND, linear_bounds)])
def test_values_are_random_unless_it_is_said(kind, bounds):
    asked = exam(kind, "float32", None)
    ((_, parts),), (question,) = asked.right, asked.questions
    given = asked.spec, "float32", OWN, parts, question.positions
    assert bounds(*given).mean_square == bounds(*given, random=True).mean_square < math.inf
    assert bounds(*given, random=False).mean_square == math.inf
