"""The gradients of attention: the analytic ones against differences of the definition, and what people get wrong.

The candidates are those of `backward_kernels`, broken by hand.
"""

import dataclasses

import numpy as np
import pytest
from backward_kernels import D, Kernel, linear, turn
from hypothesis import given, settings, strategies as st

import pyrope
from pyrope import Rope, YaRN, check_attention, check_linear_attention
from pyrope.oracle import backward_checks, truth
from pyrope.oracle.gradients import Roundings, linear_gradients, softmax_gradients
from pyrope.oracle.truth import Spec

ROPE = Rope(D, 10000.0, "half")
SCALED = Rope(D, 10000.0, "interleaved-to-half", 8, "suffix", YaRN(4.0, 64))

# The truth: a directional derivative of the definition, by differences


def shifted(f, given, direction, i, by):
    return f(*(x + by * direction if j == i else x for j, x in enumerate(given)))


def derivative(f, given, direction, i, step=2e-3):
    """By differences of eighth order: their error is of the size of step⁸."""
    weights = {1: 4 / 5, 2: -1 / 5, 3: 4 / 105, 4: -1 / 280}
    return (
        sum(
            w * (shifted(f, given, direction, i, k * step) - shifted(f, given, direction, i, -k * step))
            for k, w in weights.items()
        )
        / step
    )


specs = st.builds(
    Spec, heads=st.just(4), key_heads=st.sampled_from([1, 2, 4]), head_dim=st.just(D), causal=st.booleans(), scale=st.sampled_from([0.25, 1.0]),
    window=st.sampled_from([None, 3]), softcap=st.sampled_from([None, 2.0]), rope=st.sampled_from([None, ROPE, SCALED]), feature_map=st.sampled_from(["elu+1", "exp"]),
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(specs, st.integers(0, 2**32 - 1), st.booleans(), st.integers(1, 6))
def test_gradients_are_the_derivatives_of_the_definition(spec, seed, linear, n):
    """⟨gradient, direction⟩ is the derivative of ⟨g, o⟩ along any direction of q, of k and of v."""
    rng = np.random.default_rng(seed)
    m = n if linear or spec.rope is not None else n + 2
    q, g = rng.standard_normal((2, 2, 4, n, D))
    k, v = rng.standard_normal((2, 2, spec.key_heads, m, D))
    q, k = (np.where(abs(x) < 0.1, 0.3, x) for x in (q, k))  # away from 0, where elu + 1 has no second derivative
    at = np.sort(rng.integers(0, 200, (2, m)), axis=-1)
    mask = None if linear else rng.random((2, 1, n, m)) < 0.8
    forward = truth.linear_attention if linear else truth.softmax_attention
    more = {} if linear else {"mask": mask}

    def loss(*given):
        return float((g * forward(spec, *given, at, **more)).sum())

    gradients = (linear_gradients if linear else softmax_gradients)(
        spec, Roundings.of("float64", False), q, k, v, g, at, **more
    )
    for i, gradient in enumerate(gradients):
        direction = rng.standard_normal(gradient.value.shape)
        expected = derivative(loss, (q, k, v), direction, i)
        size = np.abs(gradient.value * direction).sum() + 1
        assert abs((gradient.value * direction).sum() - expected) < 2e-9 * size


@pytest.mark.parametrize("dtype, kernel, least", [
    ("float32", Kernel(rotates=True, work=np.float32), 2e-3), ("float32", Kernel(work=np.float32), 0.05),
    ("float16", Kernel(), 0.02), ("float64", Kernel(), 0.05), ("float64", Kernel(softcap=2.0), 0.05),
])  # fmt: skip
def test_bounds_are_as_wide_as_they_must_be(dtype, kernel, least):
    """Right gradients use a good part of what is allowed: a tenth of it would be too little, or ten times it too much."""
    rng, spec = (
        np.random.default_rng(5),
        Spec(4, 2, D, True, D**-0.5, softcap=kernel.softcap, rope=ROPE if kernel.rotates else None),
    )
    q, g = rng.standard_normal((2, 3, 4, 24, D)).astype(dtype)
    k, v = rng.standard_normal((2, 3, 2, 24, D)).astype(dtype)
    at = np.arange(24) + np.zeros((3, 1), int)
    wide = [x.astype(np.float64) for x in (q, k, v, g)]
    right = softmax_gradients(spec, Roundings.of(dtype, dtype != "float64"), *wide, at)
    made = kernel(q, k, v, g, at)
    off = [np.abs(out.astype(np.float64) - x.value) for x, out in zip(right, made, strict=True)]
    allowed = [x.allowed(dtype) for x in right]
    ratios = [most.ratio(one) for most, one in zip(allowed, off, strict=True)]
    single = [float((one / most.worst).max()) for most, one in zip(allowed, off, strict=True)]
    assert least < max(ratios) < 1 and least < max(single) < 1, (ratios, single)


# Candidates

SPECS = {
    "plain": (Kernel(), {}), "two-sided": (Kernel(causal=False), {"causal": False}), "window": (Kernel(window=5), {"window": 5}),
    "softcap": (Kernel(softcap=2.0), {"softcap": 2.0}), "scale": (Kernel(scale=1.0), {"scale": 1.0}), "grouped": (Kernel(), {"key_heads": 2}),
    "rope": (Kernel(rotates=True), {"rope": ROPE}), "rope, grouped": (Kernel(rotates=True), {"rope": ROPE, "key_heads": 1}),
    "rope, window": (Kernel(rotates=True, causal=False, window=5), {"rope": ROPE, "causal": False, "window": 5}),
}  # fmt: skip
WRONG = {
    "row term": ("plain", {"row_term": 0.0}, ("row term missing",)),
    "sign of the row term": ("plain", {"row_term": -1.0}, ("another row term",)),
    "not transposed": ("plain", {"transposed": False}, ("not transposed",)),
    "blocks": ("plain", {"block": 16}, ("blocks not added up",)),
    "tiled": ("grouped", {"groups": "tiled"}, ("heads tiled",)),
    "values turned": ("rope", {"turns_values": True}, ("gradients of values rotated",)),
    "no scale": ("plain", {"gradient_scale": 1.0}, ("gradient without the scale",)),
    "scale twice": ("plain", {"gradient_scale": D**-1.0}, ("gradient scaled twice",)),
    "no scale at all": ("plain", {"scale": 1.0}, ("scale missing",)),
    "first head": ("grouped", {"groups": "first"}, ("key heads not summed",)),
    "mean": ("grouped", {"groups": "mean"}, ("key heads not summed",)),
    "not summed": ("grouped", {"groups": "none"}, ("key heads not summed",)),
    "grouped heads that were not asked for": ("plain", {"groups": "first"}, ("key heads not summed",)),
    "not causal": ("plain", {"causal": False}, ("not causal",)),
    "causal": ("two-sided", {"causal": True}, ("causal by mistake",)),
    "causal by position": ("rope", {"by_position": True}, ("causal by position",)),
    "a window by position": ("rope, window", {"by_position": True}, ("causal by position",)),
    "no window": ("window", {"window": None}, ("window ignored",)),
    "no softcap": ("softcap", {"softcap": None}, ("softcap missing",)),
    "softcap": ("softcap", {"cap_derivative": False}, ("softcap's derivative missing",)),
    "not turned": ("rope", {"back": 0}, ("gradients not rotated back",)),
    "turned on": ("rope, grouped", {"back": 1}, ("backward equals forward",)),
    "without rope": ("rope", {"rotates": False}, ("not rotated",)),
    "None": ("plain", {"after": lambda dq, dk, dv: None}, ("no gradient",) * 3),
    "no dk": ("plain", {"after": lambda dq, dk, dv: (dq, None, dv)}, ("no gradient",)),
    "twice": ("plain", {"after": lambda dq, dk, dv: (2 * dq, 2 * dk, 2 * dv)}, ("accumulated twice",)),
    "dv twice": ("plain", {"after": lambda dq, dk, dv: (dq, dk, 2 * dv)}, ("accumulated twice",)),
    "exchanged": ("plain", {"after": lambda dq, dk, dv: (dq, dv, dk)}, ("gradients exchanged",)),
    "dtype": ("plain", {"after": lambda *three: tuple(x.astype(np.float64) for x in three)}, ("wrong dtype out",)),
    "NaN": ("plain", {"after": lambda dq, dk, dv: (dq * np.nan, dk, dv)}, ("not finite",)),
    "narrow": ("plain", {"after": lambda *three: tuple(x.astype(np.float16).astype(x.dtype) for x in three)}, ("unexplained",)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("name", SPECS)
def test_right_gradients_are_right(name, dtype):
    kernel, options = SPECS[name]
    report = check_attention(kernel, head_dim=D, dtype=dtype, backward=True, **options)
    assert report.verdict == "right" and report.subject == "attention, backward", report
    assert report.precision == "the dtype's own" and len(report.errors) == 3


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_named(name):
    which, broken, faults = WRONG[name]
    kernel, options = SPECS[which]
    report = check_attention(dataclasses.replace(kernel, **broken), head_dim=D, backward=True, **options)
    assert report.verdict == "wrong" and report.faults == faults, report


def test_reports_on_gradients_of_attention_speak_of_attention():
    """Neither Rᵀ nor positions are said where nothing turns, and of a wrong dtype it is said whose it is."""

    def findings(after):
        return check_attention(Kernel(after=after), head_dim=D, backward=True).findings

    missing, *_ = findings(lambda dq, dk, dv: (dq, None, dv))
    lost, *_ = findings(lambda dq, dk, dv: (dq * np.nan, dk, dv))
    narrow, *_ = findings(lambda dq, dk, dv: (dq, dk.astype(np.float16), dv))
    assert [x.fault for x in (missing, lost, narrow)] == ["no gradient", "not finite", "wrong dtype out"]
    for finding in (missing, lost, narrow):
        assert not any(words in f"{finding.cause} {finding.fix}" for words in ("Rᵀ", "position", "of x", " x "))
    assert "dk = scale·dsᵀ·q" in missing.fix and "exp" in lost.cause
    assert narrow.evidence == "dk is float16, the input float32"
    wide, *_ = findings(lambda dq, dk, dv: (dq.astype(np.float64), dk.astype(np.float64), dv))
    assert wide.evidence == "dq is float64, the input float32, dk is float64, the input float32"


BACK_AT = {
    "positions ignored": lambda at: np.broadcast_to(np.arange(at.shape[1]), at.shape),
    "positions of a batch misread": lambda at: np.broadcast_to(at[:1], at.shape),
}


@pytest.mark.parametrize("name", BACK_AT)
def test_gradients_turned_back_by_other_positions_are_named(name):
    kernel = Kernel(rotates=True, back_at=BACK_AT[name])
    report = check_attention(kernel, head_dim=D, rope=ROPE, backward=True)
    assert report.faults == (name,) and "dq, dk: this predicts all numbers in all" in report.findings[0].evidence
    assert "turned back by" in report.findings[0].evidence
    report = check_linear_attention(
        lambda *given: linear(*given, back_at=BACK_AT[name]), rope=ROPE, head_dim=D, backward=True
    )
    assert report.faults == (name,), report


def test_a_mistake_in_a_part_of_the_calls_is_named_with_them():
    def long_ones(q, *rest):
        return Kernel(row_term=float(q.shape[2] <= 32))(q, *rest)

    report = check_attention(long_ones, head_dim=D, backward=True)
    assert report.faults == ("row term missing",)
    assert "in these questions, the others are right: 64 tokens, 128 tokens, 130 tokens" in report.findings[0].evidence


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_gradient_times_one_number_is_named_with_it(dtype):
    def after(dq, dk, dv):
        return (dq * np.log(2)).astype(dq.dtype), -dk, dv * dv.dtype.type(0.5)

    report = check_attention(Kernel(after=after), head_dim=D, dtype=dtype, backward=True)
    assert report.faults == ("gradient times a number",), report
    evidence = report.findings[0].evidence
    assert "dk is the right one times −1, " in evidence and "dq is the right one times 0.693" in evidence
    assert "dv is the right one times 0.5" in evidence and '; dq in the question "' in evidence


def test_a_gradient_times_one_number_leaves_others_unexplained():
    def after(dq, dk, dv):
        return dq[::-1].copy(), -dk, dv

    faults = check_attention(Kernel(after=after), head_dim=D, backward=True).faults
    assert faults == ("gradient times a number", "unexplained")


def test_how_much_of_a_term_there_is_is_said():
    report = check_attention(Kernel(row_term=-1.0), head_dim=D, backward=True)
    assert "dq, dk: wrong; dq has -1, -1, -1, -1 … times the term" in report.findings[0].evidence


def test_weights_may_have_a_least_exponent():
    """As Paddle's have: none is below e⁻⁶⁴."""
    assert check_attention(Kernel(least=-64.0), head_dim=D, backward=True).verdict == "right"
    assert check_attention(Kernel(least=-20.0), head_dim=D, backward=True).verdict == "wrong"


def test_the_tensor_and_the_index_are_said():
    def last(dq, dk, dv):
        dv[-1, 2, -1, 7] += 0.5
        return dq, dk, dv

    report = check_attention(Kernel(after=last), head_dim=D, backward=True)
    assert report.faults == ("unexplained",)
    assert (
        'dv: wrong; dv in the question "random": first at token 23 of row 2, head 2, feature 7: expected '
        in report.findings[0].evidence
    )
    with pytest.raises(pyrope.Mismatch, match="attention, backward: WRONG"):
        pyrope.assert_attention(Kernel(after=last), head_dim=D, backward=True)


def test_strides_orders_and_state():
    def contiguous(q, *rest):
        return Kernel()(q if q.flags.c_contiguous else np.resize(q.base.ravel(), q.shape), *rest)

    assert check_attention(contiguous, head_dim=D, backward=True).faults == ("strides ignored",)

    def ordered(q, k, v, g, at):
        return Kernel(rotates=True)(q, k, v, g, np.sort(at, axis=-1))

    assert check_attention(ordered, head_dim=D, rope=ROPE, backward=True).faults == ("order of positions matters",)
    calls = []

    def stale(*given):
        calls.append(1)
        return tuple(len(calls) * x for x in Kernel()(*given))

    assert check_attention(stale, head_dim=D, backward=True).faults == ("state between calls",)

    def mutating(q, k, v, g):
        out = Kernel()(q, k, v, g)
        g *= 2
        return out

    assert check_attention(mutating, head_dim=D, backward=True).faults == ("mutates its input",)


def test_special_calls_are_tried():
    """Each is right but in one kind of calls."""

    def multiples(dq, dk, dv):
        return (2 * dq if dq.shape[-2] % 64 == 0 else dq), dk, dv

    def rows(dq, dk, dv):
        dq[3:] = 0
        return dq, dk, dv

    buffers = {}

    def reused(*gradients):
        kept = buffers.setdefault(gradients[0].shape, [np.empty_like(x) for x in gradients])
        for x, y in zip(kept, gradients, strict=True):
            x[...] = y
        return tuple(kept)

    def overflowing(q, k, v, g):
        with np.errstate(all="ignore"):
            peak = np.exp(np.einsum("bhnd,bhmd->bhnm", q, k[:, : q.shape[1]]) / 4).max()
        return tuple(x + 0 * peak * x for x in Kernel()(q, k, v, g))

    for fn, fault in (
        (Kernel(after=multiples), "some lengths wrong"), (Kernel(after=rows), "unexplained"),
        (Kernel(after=reused), "result overwritten"), (overflowing, "softmax overflows"),
    ):  # fmt: skip
        report = check_attention(fn, head_dim=D, key_heads=4, backward=True)
        assert report.faults == (fault,), report


def test_what_cannot_be_judged():
    for fn, words in (
        (lambda q, k, v, g: q, "returns ndarray instead of (dq, dk, dv)"),
        (lambda q, k, v, g: (q, k), "returns 2 results instead of (dq, dk, dv)"),
        (lambda q, k, v, g: (q, k, v[..., :3]), "returns dv of shape (3, 4, 24, 3) instead of (3, 4, 24, 16)"),
        (lambda q, k, v, g: (q, k, "v"), "returns str as dv"),
        (lambda q, k, v: (q, k, v), "raises TypeError"),
    ):  # fmt: skip
        report = check_attention(fn, head_dim=D, backward=True)
        assert report.verdict == "not judged" and words in report.failure.reason, report
        assert 'in the question "random"' in report.failure.received


def test_calls_that_are_refused_are_a_note():
    def short(q, k, v, g):
        if q.shape[-2] > 64 or k.shape[1] != q.shape[1]:
            raise ValueError("at most 64 tokens, no groups")
        return Kernel()(q, k, v, g)

    report = check_attention(short, head_dim=D, backward=True)
    assert (
        report.verdict == "right" and "128 tokens, 130 tokens, grouped heads; it raises ValueError" in report.notes[-1]
    )


def test_key_heads_that_nobody_claimed_may_be_broadcast():
    """A kernel for as many key heads as query heads, which broadcasts one of them, has the gradients of all."""

    def broadcast(q, k, v, g):
        k, v = (np.broadcast_to(x, q.shape).copy() for x in (k, v))
        return Kernel()(q, k, v, g)

    report = check_attention(broadcast, heads=3, head_dim=D, backward=True)
    assert report.verdict == "right" and "grouped heads; dk has the shape (2, 3, 24, 16)" in report.notes[-1]
    report = check_attention(broadcast, heads=3, key_heads=1, head_dim=D, backward=True)
    assert report.faults == ("key heads not summed",)


def test_masks_are_tried_where_they_are_taken():
    def masked(q, k, v, g, mask=None):
        return Kernel()(q, k, v, g, mask=mask)

    report = check_attention(masked, head_dim=D, backward=True)
    assert report.verdict == "right" and "no such argument: segments" in report.notes[0]
    report = check_attention(lambda q, k, v, g, mask=None: Kernel()(q, k, v, g), head_dim=D, backward=True)
    assert report.verdict == "wrong" and 'in the question "mask"' in report.findings[0].evidence


def test_bad_arguments():
    with pytest.raises(ValueError, match="a backward pass has no cache"):
        check_attention(Kernel(), head_dim=D, backward=True, cache=True)
    with pytest.raises(ValueError, match="a backward pass has no cache"):
        check_linear_attention(Kernel(), rope=ROPE, backward=True, incremental=lambda: None)
    with pytest.raises(TypeError, match="backward must be True or False"):
        check_attention(Kernel(), backward=1)
    for check, options in ((check_attention, {}), (check_linear_attention, {"rope": ROPE})):
        with pytest.raises(ValueError, match="a backward pass has no grades"):
            check(Kernel(), grade="rounded once", backward=True, **options)


# Linear attention


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("key_heads", [None, 2])
def test_right_linear_gradients_are_right(dtype, key_heads):
    report = check_linear_attention(linear, rope=ROPE, dtype=dtype, key_heads=key_heads, backward=True)
    assert report.verdict == "right" and report.subject == "linear attention, backward", report


def test_what_float16_loses_below_its_normal_numbers_is_rounding():
    """A kernel that stores g/D, here about 1e-6, in float16, which has four bits left for it."""
    rng, spec, at = np.random.default_rng(6), Spec(4, 2, D, True, rope=ROPE), np.arange(24)[None]
    q, g = rng.standard_normal((2, 1, 4, 24, D)).astype(np.float16)
    k, v = rng.standard_normal((2, 1, 2, 24, D)).astype(np.float16)
    g = g / np.float16(512)
    made, wide = linear(q, k, v, g, at, stores=True), [x.astype(np.float64) for x in (q, k, v, g)]
    for step, right in ((2.0**-25, True), (0.0, False)):
        own = linear_gradients(spec, Roundings.of("float16", True)._replace(step=step), *wide, at)
        assert (Roundings.of("float16", True).step == step) == right
        off = [np.abs(out - x.value) / x.allowed("float16").worst for x, out in zip(own, made, strict=True)]
        assert (max(one.max() for one in off) < 1) == right


@pytest.mark.parametrize(
    "broken, faults",
    [
        ({"turn_back": False}, ("gradients not rotated back",)),
        ({"denominator": False}, ("denominator's derivative missing",)),
        ({"denominator": -1}, ("another derivative of the denominator",)),
        ({"slope": False}, ("feature map's derivative missing",)),
        ({"causal": False}, ("not causal",)),
        ({"by_position": True}, ("causal by position",)),
        ({"groups": "first"}, ("key heads not summed",)),
    ],
)
def test_mistakes_of_linear_gradients_are_named(broken, faults):
    report = check_linear_attention(lambda *given: linear(*given, **broken), rope=ROPE, key_heads=2, backward=True)
    assert report.faults == faults, report


@pytest.mark.parametrize("feature_map", ["relu", "relu2", "exp"])
def test_other_feature_maps(feature_map):
    """Against differences along random directions, of the engine, in float64: a candidate that is not analytic."""
    phi = {"relu": lambda x: np.maximum(x, 0), "relu2": lambda x: np.maximum(x, 0) ** 2, "exp": np.exp}[feature_map]
    slope = {"relu": lambda x: x > 0, "relu2": lambda x: 2 * np.maximum(x, 0), "exp": np.exp}[feature_map]

    def candidate(q, k, v, g, at):
        fq, fk = phi(q), phi(k)
        seen, tq, tk = np.tril(np.ones((q.shape[-2],) * 2)), turn(fq, at), turn(fk, at)
        fk, tk, vv = (x.repeat(q.shape[1] // k.shape[1], axis=1) for x in (fk, tk, v))
        d = np.einsum("bhnd,bhmd,nm->bhn", fq, fk, seen)[..., None]
        w = np.einsum("bhnd,bhmd,nm->bhnm", tq, tk, seen) / d
        dn = np.einsum("bhnd,bhmd,nm->bhnm", g, vv, seen) / d
        dd = -(g * (w @ vv)).sum(axis=-1, keepdims=True) / d
        dq, dk = turn(dn @ tk, at, -1) + dd * (seen @ fk), turn(dn.swapaxes(-1, -2) @ tq, at, -1) + seen.T @ (dd * fq)
        dk, dv = (Kernel()._collected(x, k.shape[1]) for x in (dk, w.swapaxes(-1, -2) @ g))
        return dq * slope(q), dk * slope(k), dv

    report = check_linear_attention(candidate, rope=ROPE, feature_map=feature_map, dtype="float64", backward=True)
    assert report.verdict == "right", report


def test_the_catalogues_have_all_their_words():
    for kind in (backward_checks.SOFTMAX_GRADIENTS, backward_checks.LINEAR_GRADIENTS):
        for name, fault in kind.faults.items():
            assert fault.name == name and fault.symptom and fault.cause and fault.fix
