"""The oracle of linear attention: every known mistake is rejected and named, nothing that is right is rejected."""

import functools
from dataclasses import replace

import attention_forms as forms
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from oracle_cases import dealt
from strategies import DTYPES, layouts

import pyrope
from pyrope import DynamicNTK, Rope, YaRN
from pyrope.oracle import linear_checks
from pyrope.oracle.attention_faults import LINEAR
from pyrope.oracle.attention_steps import LinearSteps, attend_linearly, candidate
from pyrope.oracle.examination import make_spec
from pyrope.oracle.linear_checks import MAPS, assert_linear_attention, check_linear_attention
from pyrope.oracle.questions import Questions
from pyrope.oracle.report import Mismatch
from pyrope.oracle.truth import linear_attention

D = 32
SHAPES = {"grouped": {"heads": 4, "key_heads": 2}, "plain": {"heads": 3, "key_heads": 3}}
ROPE = Rope(D, 10000.0, "half")
YARN = Rope(D, 10000.0, "interleaved", scaling=YaRN(8.0, 1024))
PARTIAL = Rope(D, 100.0, "half", rotary_dim=16)
DYNAMIC = Rope(D, 10000.0, "half", scaling=DynamicNTK(4.0, 256, 4096))
LOW = ["float32", "float16", "bfloat16"]
pytestmark = pytest.mark.usefixtures("needed_trials")
MADE = [name for name, fault in LINEAR.items() if fault.make is not None]


def options(name):
    if name == "length taken from each call":
        return {"rope": DYNAMIC}
    chosen = {"rope": YARN if "factor" in name or "scaling" in name else PARTIAL if "whole" in name else ROPE}
    return chosen | ({"causal": False} if name == "causal by mistake" else {})


def broken(name, shape, dtype, variant=0):
    """The report about a candidate that makes a mistake, or None where the mistake changes nothing."""
    chosen, fault = options(name), LINEAR[name]
    spec = make_spec(**shape, head_dim=D, dtype=DTYPES[dtype], **({"causal": True} | chosen))
    if len(fault.changes(spec)) <= variant:
        return None
    fn, more = fault.make(spec, variant), {}
    if fault.step == "cache":
        fn, more = candidate(spec, LinearSteps()), {"incremental": fault.make(spec, variant, stepping=True)}
    return check_linear_attention(fn, **shape, dtype=DTYPES[dtype], **chosen, **more)


@pytest.mark.parametrize("name, dtype, shape", dealt(MADE))
def test_every_mistake_is_rejected_and_named(name, dtype, shape):
    report = broken(name, SHAPES[shape], dtype)
    if report is None:
        assert (name, shape) == ("heads tiled", "plain")
        return
    assert report.faults == (name,), str(report)
    assert report.findings[0].alternatives == ()
    assert max(map(len, str(report).splitlines())) <= 80


@pytest.mark.parametrize("name", [name for name in MADE if "lost" not in name])
def test_every_variant_of_a_mistake_is_named(name):
    spec = make_spec(4, 2, D, name != "causal by mistake", ROPE, dtype=np.dtype(np.float32))
    changes = LINEAR[name].changes(spec)
    step = max(1, len(changes) // 8)  # of many, some
    for variant in range(1, len(changes), step):
        assert broken(name, SHAPES["grouped"], "float32", variant).faults == (name,)


@pytest.mark.parametrize("chunk", [16, 48, 100, 256])
@pytest.mark.parametrize("lost", ["state", "numerator", "normaliser"])
def test_a_chunk_of_any_length_is_measured(lost, chunk):
    spec = make_spec(4, 2, D, True, ROPE, dtype=np.dtype(np.float32))
    changes = {"chunk": chunk, "lost": {"state": "both", "numerator": "numerator", "normaliser": "denominator"}[lost]}
    report = check_linear_attention(candidate(spec, LinearSteps(**changes)), rope=ROPE)
    assert report.faults == (f"{lost} lost between chunks",)
    assert f"(after {chunk} tokens)" in report.findings[0].evidence


@pytest.mark.parametrize("decay", [0.6, 0.93, 0.9987])
def test_a_decay_is_measured(decay):
    spec = make_spec(4, 2, D, True, ROPE, dtype=np.dtype(np.float32))
    report = check_linear_attention(candidate(spec, LinearSteps(decay=decay)), rope=ROPE)
    assert report.faults == ("state decays",)
    assert f"({decay:.4g} for each token)" in report.findings[0].evidence


# What is right


@st.composite
def tasks(draw):
    g, r = draw(st.sampled_from([(1, 1), (2, 2), (2, 1), (1, 3)]))
    d, name = draw(st.sampled_from([2, 16, 64])), draw(st.sampled_from(MAPS))
    d = 16 if name.startswith("relu") and d < 16 else d
    return {
        "heads": g * r, "key_heads": g, "rope": Rope(d, draw(st.sampled_from([100.0, 10000.0, 5e5])), draw(layouts)),
        "feature_map": name, "causal": draw(st.booleans()), "dtype": DTYPES[draw(st.sampled_from([*LOW, "float64"]))],
    }  # fmt: skip


def by_pyrope(q, k, v, positions, rope, **named):
    return pyrope.linear_attention(q, k, v, positions, rope, **named)


def rounded(q, k, v, positions, *, rope, feature_map, causal, dtype):
    """All weights at once, every step rounded to the dtype, as eager code does it."""
    phi = {"elu+1": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))), "exp": np.exp,
           "relu": lambda x: np.maximum(x, 0), "relu2": lambda x: np.maximum(x, 0) ** 2}[feature_map]  # fmt: skip
    r, h = forms.rounder(dtype), q.shape[1]
    wide = np.float64 if dtype == np.float64 else np.float32
    q, k, v = (x.astype(wide) for x in (q, k, v))
    k, v = np.repeat(k, h // k.shape[1], axis=1), np.repeat(v, h // v.shape[1], axis=1)
    q, k = r(phi(q)), r(phi(k))
    lower = np.tri(q.shape[2]) if causal else 1.0
    turned = [r(forms.turned(x, positions, rope.pure, r)) for x in (q, k)]
    numerator = r(turned[0] @ turned[1].swapaxes(-1, -2)) * lower @ v
    denominator = ((q @ k.swapaxes(-1, -2)) * lower).sum(axis=-1, keepdims=True)
    # Sums over many tokens are beyond float16, and nobody keeps them in it.
    sums = r if dtype != np.float16 else forms.exactly
    return (sums(numerator) / sums(denominator)).astype(dtype)


def begin(rope, feature_map):
    state = None

    def step(q, k, v, positions):
        nonlocal state
        out, state = pyrope.linear_step(q, k, v, positions, rope, state=state, feature_map=feature_map)
        return out

    return step


@settings(max_examples=15, deadline=None)
@given(
    tasks(),
    st.sampled_from(["chunked", "recurrent", "quadratic", "parallel", "rounded"]),
    st.sampled_from([7, 64, 192]),
)
def test_what_is_right_is_never_rejected(task, form, chunk):
    named = {name: task[name] for name in ("rope", "feature_map", "causal")}
    if form == "rounded":
        fn = functools.partial(rounded, dtype=task["dtype"], **named)
    else:
        form = (
            form
            if form in (("chunked", "recurrent", "quadratic") if task["causal"] else ("parallel", "quadratic"))
            else "quadratic"
        )
        fn = functools.partial(by_pyrope, form=form, chunk=chunk, **named)
    step = functools.partial(begin, task["rope"], task["feature_map"]) if task["causal"] else None
    report = check_linear_attention(fn, incremental=step, max_position=1024, **task)
    assert report.verdict == "right", str(report)
    if form != "rounded" and task["dtype"].itemsize == 2:
        assert report.precision == "rounded once"


@settings(max_examples=10)
@given(tasks())
def test_the_steps_are_right_by_default(task):
    shape = {name: task[name] for name in ("heads", "key_heads", "causal", "rope", "dtype")}
    spec = replace(make_spec(head_dim=task["rope"].head_dim, **shape), feature_map=task["feature_map"])
    for question in linear_checks._questions(Questions(spec, np.dtype(np.float64), 4096), None):
        got = attend_linearly(spec, LinearSteps(), *question.wide()).out
        assert np.abs(got - linear_attention(spec, *question.wide())).max() < 1e-11


def rotated_in_single(x, positions, products=np.float64):
    theta = np.float32(1) / np.float32(10000) ** (np.arange(0, D, 2, dtype=np.float32) / np.float32(D))
    angle = positions[:, None, :, None].astype(np.float32) * theta
    a, b = np.split(x.astype(products), 2, axis=-1)
    cos, sin = np.cos(angle).astype(products), np.sin(angle).astype(products)
    return np.concatenate((a * cos - b * sin, a * sin + b * cos), axis=-1).astype(np.float64)


def by_weights(turn, phi, scores=np.float64, sums=np.float64):
    """All weights at once, with some steps in another dtype."""

    def fn(q, k, v, at):
        mapped = phi(q), phi(np.repeat(k, 2, axis=1))
        lower, (q, k) = np.tri(q.shape[2]), (turn(x, at) for x in mapped)
        numerator = (q.astype(scores) @ k.swapaxes(-1, -2).astype(scores)).astype(np.float64)
        total = (mapped[0].astype(sums) @ mapped[1].swapaxes(-1, -2).astype(sums) * lower.astype(sums)).sum(
            axis=-1, keepdims=True
        )
        return (numerator * lower @ np.repeat(v, 2, axis=1).astype(np.float64) / total).astype(v.dtype)

    return fn


PHI = {"elu+1": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))), "exp": np.exp,
       "relu2": lambda x: np.maximum(x, 0) ** 2}  # fmt: skip


@pytest.mark.parametrize("products", [np.float64, np.float32])
@pytest.mark.parametrize("name", PHI)
def test_float32_angles_are_right_in_float64_and_said_so(name, products):
    fn = by_weights(functools.partial(rotated_in_single, products=products), PHI[name])
    options = {"rope": ROPE, "key_heads": 2, "feature_map": name, "dtype": np.float64}
    report = check_linear_attention(fn, **options)
    assert (report.verdict, report.precision) == ("right", "float32 angle")
    strict = check_linear_attention(fn, grade="rounded once", **options)
    assert strict.faults == ("coarser than asked",) and '"float32 angle" was reached' in strict.findings[0].evidence
    own = functools.partial(by_pyrope, rope=ROPE, causal=True, feature_map=name)
    assert check_linear_attention(own, **options).precision == "the dtype's own"


@pytest.mark.parametrize("name, low", [("elu+1", "scores"), ("elu+1", "sums"), ("relu2", "scores"), ("relu2", "sums")])
def test_float32_sums_of_float64_are_no_float32_angles(name, low):
    fn = by_weights(rotated_in_single, PHI[name], **{low: np.float32})
    report = check_linear_attention(fn, rope=ROPE, key_heads=2, feature_map=name, dtype=np.float64)
    assert report.faults == ("sums in low precision",)
    assert "all at position 0" in report.findings[0].evidence and "float32 allows" in report.findings[0].evidence


@pytest.mark.parametrize("low", ["scores", "sums"])
def test_float16_sums_of_float32_are_named(low):
    fn = by_weights(lambda x, at: pyrope.rotate(x, at, ROPE), PHI["elu+1"], **{low: np.float16})
    report = check_linear_attention(fn, rope=ROPE, key_heads=2)
    assert report.faults == ("sums in low precision",) and "float16 allows" in report.findings[0].evidence


# Mistakes written by hand


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "changes, name",
    [
        ({"chunk": 16, "lost": "both"}, "state lost between chunks"),
        ({"chunk": 32, "lost": "denominator"}, "normaliser lost between chunks"),
        ({"denominator": "missing"}, "normaliser missing"),
        ({"order": "rotation first"}, "rotated before the feature map"),
    ],
)
def test_a_mistake_of_large_numbers_does_not_explain_small_ones(changes, name, dtype):
    rope = Rope(64, 10000.0, "half")
    spec = make_spec(4, 2, 64, True, rope, dtype=DTYPES[dtype])
    report = check_linear_attention(candidate(spec, LinearSteps(**changes)), rope=rope, dtype=DTYPES[dtype])
    assert report.faults == (name,) and report.findings[0].alternatives == ()


@pytest.mark.parametrize("dtype", LOW)
def test_what_is_no_known_mistake_is_not_named_as_one(dtype):
    rope = Rope(64, 10000.0, "half")
    faster = lambda q, k, v, at: pyrope.linear_attention(q, k, v, 3 * at, rope, causal=True)  # noqa: E731
    assert check_linear_attention(faster, rope=rope, dtype=DTYPES[dtype]).faults == ("unexplained",)


def test_mistakes_of_well_known_kinds_by_hand():
    linear = functools.partial(pyrope.linear_attention, causal=True)
    before = lambda q, k, v, at: linear(pyrope.rotate(q, at, ROPE), pyrope.rotate(k, at, ROPE), v)  # noqa: E731
    other = lambda q, k, v, at: linear(q, k, v, at, ROPE, feature_map="relu")  # noqa: E731
    other_pairs = lambda q, k, v, at: linear(q, k, v, at, Rope(D, 10000.0, "interleaved"))  # noqa: E731
    assert check_linear_attention(before, rope=ROPE).faults == ("rotated before the feature map",)
    assert check_linear_attention(other, rope=ROPE).faults == ("another feature map",)
    assert check_linear_attention(other_pairs, rope=ROPE).faults == ("wrong pairing",)


def test_two_mistakes_at_once():
    spec = make_spec(4, 2, D, True, ROPE, dtype=np.dtype(np.float32))
    fn = candidate(spec, LinearSteps(groups="tiled", denominator="rotated"))
    assert set(check_linear_attention(fn, rope=ROPE, key_heads=2).faults) == {"heads tiled", "denominator rotated"}


def test_the_report_is_an_assertion_too():
    assert_linear_attention(lambda q, k, v, at: pyrope.linear_attention(q, k, v, at, ROPE, causal=True), rope=ROPE)
    with pytest.raises(Mismatch, match="not rotated"):
        assert_linear_attention(lambda q, k, v, at: pyrope.linear_attention(q, k, v, causal=True), rope=ROPE)


def test_what_shows_without_numbers():
    def right(q, k, v, at):
        return pyrope.linear_attention(q, k, v, at, ROPE, causal=True)

    def raises(q, k, v, at):
        raise KeyError("positions")

    calls = []
    fading = lambda *x: calls.append(1) or right(*x) * np.float32(len(calls) < 12)  # noqa: E731

    def in_place(q, k, v, at):
        q *= np.float32(2)
        return right(q / 2, k, v, at)

    named = {
        "mutates its input": in_place,
        "not finite": lambda *x: right(*x) * np.float32(np.nan),
        "wrong dtype out": lambda *x: right(*x).astype(np.float64),
        "state between calls": fading,
    }
    for name, fn in named.items():
        assert check_linear_attention(fn, rope=ROPE).faults == (name,)
    assert check_linear_attention(raises, rope=ROPE).verdict == "not judged"


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="feature_map must be one of"):
        check_linear_attention(by_pyrope, rope=ROPE, feature_map="identity")
    with pytest.raises(ValueError, match="at least 16 for relu"):
        check_linear_attention(by_pyrope, rope=Rope(8, 1e4, "half"), feature_map="relu")
    with pytest.raises(ValueError, match="grade must be one of 'rounded once', 'features rounded'"):
        check_linear_attention(by_pyrope, rope=ROPE, grade="scores rounded")
    with pytest.raises(ValueError, match="max_position must be at least 512"):
        check_linear_attention(by_pyrope, rope=ROPE, max_position=100)


def test_no_position_is_above_the_greatest():
    last = []
    fn = lambda q, k, v, at: last.append(at.max()) or pyrope.linear_attention(q, k, v, at, ROPE, causal=True)  # noqa: E731
    assert check_linear_attention(fn, rope=ROPE, max_position=600).ok
    assert 500 < max(last) < 600
