"""The oracle of softmax attention: every known mistake is rejected and named, nothing that is right is rejected."""

import functools
import math
import pathlib
import re
from dataclasses import replace

import attention_forms as forms
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from oracle_cases import dealt, listed_fields
from strategies import DTYPES, layouts

import pyrope
from pyrope import DynamicNTK, Rope, YaRN
from pyrope.oracle import attention_checks
from pyrope.oracle.attention_checks import assert_attention, check_attention
from pyrope.oracle.attention_faults import ATTENTION, BEHAVIOUR, LINEAR, in_words
from pyrope.oracle.attention_steps import Steps, attend, candidate
from pyrope.oracle.examination import make_spec
from pyrope.oracle.questions import Questions
from pyrope.oracle.recipes import recipe_of
from pyrope.oracle.report import Mismatch
from pyrope.oracle.rotation_faults import FAULTS, Measurements
from pyrope.oracle.truth import rotated, softmax_attention

D = 32
SHAPES = {"grouped": {"heads": 4, "key_heads": 2}, "plain": {"heads": 3, "key_heads": 3}}
ROPE = Rope(D, 10000.0, "half")
YARN = Rope(D, 10000.0, "interleaved", scaling=YaRN(8.0, 1024))
PARTIAL = [Rope(D, 100.0, "half", rotary_dim=16), Rope(D, 100.0, "interleaved", rotary_dim=8, placement="suffix")]
DYNAMIC = Rope(D, 10000.0, "half", scaling=DynamicNTK(4.0, 256, 4096))
LOW = ["float32", "float16", "bfloat16"]
pytestmark = pytest.mark.usefixtures("needed_trials")


def options(name):
    """Options in which a mistake changes something."""
    fault, chosen = ATTENTION[name], {}
    chosen |= {"window": 7} if "window" in name and name != "window not asked for" else {}
    chosen |= {"softcap": 20.0} if "softcap" in name else {}
    chosen |= {"scale": 0.3} if name == "scale ignored" else {}
    chosen |= {"causal": False} if name == "causal by mistake" else {}
    chosen |= {"rope": ROPE} if fault.step == "rotation" or "position" in name or "cached keys" in name else {}
    chosen |= {"rope": PARTIAL[0]} if name == "whole head rotated" else {}
    chosen |= {"rope": DYNAMIC} if name == "length taken from each call" else {}
    return chosen | ({"rope": YARN} if "factor" in name or name == "scaling ignored" else {})


def spec_of(shape, dtype, **chosen):
    return make_spec(**shape, head_dim=D, dtype=DTYPES[dtype], **({"causal": True, "rope": None} | chosen))


def broken(name, shape, dtype, variant=0):
    """The report about a candidate that makes a mistake, or None where the mistake changes nothing."""
    chosen, fault = options(name), ATTENTION[name]
    spec = spec_of(shape, dtype, **chosen)
    if len(fault.changes(spec)) <= variant:
        return None
    fn, more = fault.make(spec, variant), {"cache": True} if name == "causal from the top left" else {}
    if fault.step == "cache":
        fn, more = candidate(spec, Steps()), {"incremental": fault.make(spec, variant, stepping=True)}
    return check_attention(fn, **shape, head_dim=D, dtype=DTYPES[dtype], **chosen, **more)


@pytest.mark.parametrize("name, dtype, shape", dealt(ATTENTION))
def test_every_mistake_is_rejected_and_named(name, dtype, shape):
    report = broken(name, SHAPES[shape], dtype)
    if report is None:
        assert (name, shape) == ("heads tiled", "plain")
        return
    assert not report.ok
    assert report.faults == (name,), str(report)
    assert report.findings[0].alternatives == ()
    assert max(map(len, str(report).splitlines())) <= 80


@pytest.mark.parametrize("factor", [2.0, 4.0, 16.0])
@pytest.mark.parametrize("name", ["attention factor not squared", "attention factor missing"])
def test_small_factors_are_told_from_noise(name, factor):
    rope = Rope(64, 10000.0, "half", scaling=YaRN(factor, 1024))
    spec = make_spec(4, 2, 64, True, rope, dtype=DTYPES["bfloat16"])
    report = check_attention(ATTENTION[name].make(spec), rope=rope, dtype=DTYPES["bfloat16"])
    assert name in (report.findings[0].fault, *report.findings[0].alternatives)


@pytest.mark.parametrize("name", ATTENTION)
def test_every_variant_of_a_mistake_is_named(name):
    spec = spec_of(SHAPES["grouped"], "float32", **options(name))
    changes = ATTENTION[name].changes(spec)
    step = max(1, len(changes) // 8)  # of many, some
    for variant in range(1, len(changes), step):
        assert broken(name, SHAPES["grouped"], "float32", variant).faults == (name,)


def test_there_are_enough_and_each_says_what_to_do():
    assert len(ATTENTION) + len(LINEAR) >= 60
    for fault in (*ATTENTION.values(), *LINEAR.values()):
        assert all((fault.name, fault.step, fault.symptom, fault.cause, fault.fix))


def test_one_name_has_one_cause_in_all_catalogues():
    for faults in (ATTENTION, LINEAR, BEHAVIOUR):
        for others in (FAULTS, ATTENTION, LINEAR, BEHAVIOUR):
            for name in faults.keys() & others.keys():
                assert (faults[name].cause, faults[name].fix) == (others[name].cause, others[name].fix)
    assert len(ATTENTION.keys() & FAULTS.keys()) >= 11 and len(LINEAR.keys() & FAULTS.keys()) >= 10
    own = {"decoding wrong", "long sequences wrong", "cache wrong in some calls", "some values wrong", "dropout"}
    own |= {"other keys seen", "another normaliser"}
    assert BEHAVIOUR.keys() - FAULTS.keys() == own | {"batch rows mixed", "not causal", "window not asked for"}


def test_one_step_done_wrong_has_one_name_in_both_kinds_of_attention():
    spec = spec_of(SHAPES["grouped"], "float32", rope=YARN)
    names = {}
    for faults in (ATTENTION, LINEAR):
        for fault in faults.values():
            for change in fault.changes(spec):
                names.setdefault(change.note, set()).add(fault.name)
    assert {note for note, shared in names.items() if len(shared) > 1} == set()


@pytest.mark.parametrize("rope", [ROPE, YARN, *PARTIAL], ids=repr)
def test_a_rope_that_is_wrong_has_the_name_that_the_rotation_has(rope):
    """Whatever rotates in the place of the right rope: if a mistake of the rotation predicts it, that is its name."""
    spec, at = spec_of(SHAPES["grouped"], "float32", rope=rope), np.array([0, 1, 5, 100, 3000])
    x = np.random.default_rng(0).standard_normal((2, 5, D))
    wrong = [
        (fault.name, change.fields["rope"])
        for fault in (*ATTENTION.values(), *LINEAR.values())
        for change in fault.changes(spec)
        if change.fields.keys() == {"rope"}
    ]
    measured = Measurements(bases=tuple(other.base for _, other in wrong))
    known = [(fault.name, change.fields) for fault in FAULTS.values() for change in fault.changes(rope, measured)]
    names = set()
    for name, other in wrong:
        out = rotated(x, at, other)
        predicted = {n for n, fields in known if np.allclose(replace(recipe_of(rope), **fields).predict(x, at), out)}
        assert not predicted or name in predicted, (name, predicted)
        names |= {name} & predicted
    assert {"wrong pairing", "direction", "wrong base"} <= names


# What is right


@st.composite
def tasks(draw):
    g, r = draw(st.sampled_from([(1, 1), (2, 2), (2, 1), (1, 3), (3, 2)]))
    d = draw(st.sampled_from([4, 16, 64]))
    rope = Rope(d, draw(st.sampled_from([100.0, 10000.0, 5e5])), draw(layouts)) if draw(st.booleans()) else None
    return {
        "heads": g * r, "key_heads": g, "head_dim": d, "causal": draw(st.booleans()), "rope": rope,
        "window": draw(st.sampled_from([None, None, 1, 2, 9, 60])), "softcap": draw(st.sampled_from([None, None, 5.0, 50.0])),
        "scale": draw(st.sampled_from([None, None, 0.3, 1.0])), "dtype": DTYPES[draw(st.sampled_from([*LOW, "float64"]))],
    }  # fmt: skip


def by_pyrope(function, causal=True, rope=None, **rest):
    def fn(q, k, v, positions=None, mask=None):
        if rope is not None:
            q, k = pyrope.rotate(q, positions, rope), pyrope.rotate(k, positions, rope)
        return function(q, k, v, causal=causal, mask=mask, **rest)

    return fn


def stepping(fn):
    """A candidate with a cache, of one without: it keeps the keys as they are."""

    def begin():
        past = []

        def step(q, k, v, positions=None):
            new = (k, v) if positions is None else (k, v, positions)
            past[:] = (
                [np.concatenate(x, axis=-2 if x[0].ndim > 2 else -1) for x in zip(past, new, strict=True)]
                if past
                else new
            )
            k, v = past[:2]
            # The queries before are not asked again: any will do.
            before = np.zeros((*q.shape[:-2], k.shape[-2] - q.shape[-2], q.shape[-1]), q.dtype)
            return fn(np.concatenate((before, q), axis=-2), *past)[..., -q.shape[-2] :, :]

        return step

    return begin


@settings(max_examples=20, deadline=None)
@given(tasks(), st.sampled_from(["attention", "definition", "eager", "eager, exact", "online", "online, exact"]))
def test_what_is_right_is_never_rejected(task, form):
    named = {name: task[name] for name in ("causal", "rope", "window", "softcap", "scale")}
    kind, _, exact = form.partition(", ")
    if kind in ("attention", "definition"):
        function = pyrope.attention if kind == "attention" else pyrope.attention_by_definition
        fn = by_pyrope(function, **named)
    else:
        make = forms.eager if kind == "eager" else forms.online
        fn = make(task["dtype"], low=not exact and task["dtype"].itemsize == 2, **named)
    report = check_attention(fn, incremental=stepping(fn) if task["causal"] else None, **task)
    assert report.verdict == "right", str(report)
    if kind in ("attention", "definition") and task["rope"] is None and task["dtype"].itemsize == 2:
        assert report.precision == "rounded once"


def single(x, positions, products=np.float64):
    """Half pairs of float64 vectors, with float32 angles."""
    theta = np.float32(1) / np.float32(10000) ** (np.arange(0, D, 2, dtype=np.float32) / np.float32(D))
    angle = positions[:, None, :, None].astype(np.float32) * theta
    cos, sin = np.cos(angle).astype(products), np.sin(angle).astype(products)
    a, b = np.split(x.astype(products), 2, axis=-1)
    return np.concatenate((a * cos - b * sin, a * sin + b * cos), axis=-1).astype(x.dtype)


@pytest.mark.parametrize("products", [np.float64, np.float32])
def test_float32_angles_are_right_in_float64_and_said_so(products):
    def fn(q, k, v, at):
        return pyrope.attention(single(q, at, products), single(k, at, products), v, causal=True)

    report = check_attention(fn, rope=ROPE, head_dim=D, dtype=np.float64)
    assert (report.verdict, report.precision) == ("right", "float32 angle")
    asked = check_attention(fn, rope=ROPE, head_dim=D, dtype=np.float64, grade="rounded once")
    assert asked.faults == ("coarser than asked",) and '"float32 angle" was reached' in asked.findings[0].evidence
    own = check_attention(by_pyrope(pyrope.attention, rope=ROPE), rope=ROPE, head_dim=D, dtype=np.float64)
    assert own.precision == "the dtype's own"


def in_single(scores, powers, angles, sums=np.float64):
    """Attention in float64 with some of its steps in float32."""

    def fn(q, k, v, at):
        q, k = (single(x, at) if angles else pyrope.rotate(x, at, ROPE) for x in (q, np.repeat(k, 2, axis=1)))
        s = (q @ k.swapaxes(-1, -2) * D**-0.5).astype(scores).astype(powers)
        s = np.where(np.tri(q.shape[2], dtype=bool), s, -np.inf)
        w = np.exp(s - s.max(axis=-1, keepdims=True)).astype(sums)
        return w / w.sum(axis=-1, keepdims=True) @ np.repeat(v, 2, axis=1)

    return fn


@pytest.mark.parametrize("angles", [False, True])
@pytest.mark.parametrize("scores, powers", [(np.float32, np.float64), (np.float64, np.float32)])
def test_a_float32_softmax_of_float64_is_no_float32_angle(scores, powers, angles):
    options = {"rope": ROPE, "key_heads": 2, "head_dim": D, "dtype": np.float64}
    report = check_attention(in_single(scores, powers, angles), **options)
    assert report.faults == ("softmax in low precision",)
    assert "all at position 0" in report.findings[0].evidence and "float32 allows" in report.findings[0].evidence
    assert check_attention(in_single(np.float64, np.float64, angles), **options).ok


def test_the_evidence_is_the_output_that_is_furthest_off_for_its_tolerance():
    fn = in_single(np.float32, np.float32, angles=False, sums=np.float32)
    (finding,) = check_attention(fn, rope=ROPE, key_heads=2, head_dim=D, dtype=np.float64).findings
    numbers = re.search(r"by (?:up to )?([^ ]+) where rounding explains ([^ ,]+)", finding.evidence)
    assert "random" in finding.evidence and float(numbers[1]) > 1e3 * float(numbers[2])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_grade_says_what_was_rounded(dtype):
    kind, shape = DTYPES[dtype], {"heads": 4, "key_heads": 2, "head_dim": 64}
    grades = {}
    for name, fn in {
        "once": forms.online(kind, low=False),
        "weights": forms.online(kind),
        "scores": forms.eager(kind),
    }.items():
        grades[name] = check_attention(fn, dtype=kind, **shape).precision
    assert grades == {"once": "rounded once", "weights": "weights rounded", "scores": "scores rounded"}
    strict = check_attention(forms.eager(kind), dtype=kind, grade="weights rounded", **shape)
    assert strict.faults == ("softmax in low precision",) and "asked for" in strict.findings[0].evidence


@settings(max_examples=20)
@given(tasks())
def test_the_steps_are_right_by_default(task):
    # Predictions of mistakes start from these steps, what is right does not: the two must agree.
    spec = make_spec(**task)
    draw = Questions(spec, np.dtype(np.float64), 4096)
    questions, _ = attention_checks._questions(draw, {"mask", "segments"}, spec.rope is None, None)
    for question in questions:
        given = question.wide(), question.options
        got = attend(spec, Steps(), *given[0], **given[1]).out
        assert np.abs(got - softmax_attention(spec, *given[0], **given[1])).max() < 1e-9


@pytest.mark.parametrize("rope", [ROPE, YARN, *PARTIAL, None])
def test_large_scores_are_large_whatever_turns(rope):
    spec = spec_of(SHAPES["grouped"], "float32", rope=rope)
    question = Questions(spec, np.dtype(np.float32), 4096).large()
    scores = attend(spec, Steps(), *question.wide()).scores
    factor = 1.0 if rope is None else rope.attention_factor**2
    assert (np.abs(scores[np.isfinite(scores)]) > 0.95 * factor * 6144).all()


@pytest.mark.parametrize("rope", PARTIAL)
def test_partial_rotations_are_right_and_others_named(rope):
    options = {"rope": rope, "head_dim": D}
    assert check_attention(by_pyrope(pyrope.attention, rope=rope), **options).ok
    whole = Rope(D, 100.0, rope.layout)
    assert check_attention(by_pyrope(pyrope.attention, rope=whole), **options).faults == ("whole head rotated",)
    other = Rope(D, 700.0, rope.layout, rope.rotary_dim, rope.placement)
    assert check_attention(by_pyrope(pyrope.attention, rope=other), **options).faults == ("wrong base",)


# Mistakes written by hand, in other code than the catalogue's


def by_hand(q, k, v, *, scale=None, tile=False, away=0, window=None, low=None):
    h, g, n, m, d = q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3]
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    k, v = (np.tile(x, (1, h // g, 1, 1)) if tile else np.repeat(x, h // g, axis=1) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) * np.float32(d**-0.5 if scale is None else scale)
    s = s if low is None else s.astype(low).astype(np.float32)
    no = np.triu(np.ones((n, m), bool), 1 + m - n + away)
    if window is not None:
        no |= ~np.triu(np.ones((n, m), bool), m - n - window)
    s = np.where(no, -np.inf, s)
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True) @ v


HANDMADE = {
    "another scale": {"scale": 0.0711},
    "scale missing": {"scale": 1.0},
    "heads tiled": {"tile": True},
    "sees the next token": {"away": 1},
    "softmax in low precision": {"low": np.float16},
}


@pytest.mark.parametrize("name", HANDMADE)
def test_mistakes_made_by_hand(name):
    fn = functools.partial(by_hand, **HANDMADE[name])
    assert check_attention(fn, heads=4, key_heads=2, head_dim=D).faults == (name,)


def test_bfloat16_scores_within_float32():
    fn = functools.partial(by_hand, low=DTYPES["bfloat16"])
    report = check_attention(fn, head_dim=D)
    assert report.faults == ("softmax in low precision",) and "float16 allows" in report.findings[0].evidence


def test_a_window_off_by_one_by_hand():
    assert check_attention(functools.partial(by_hand, window=5), window=5, head_dim=D).faults == (
        "window one too wide",
    )
    assert check_attention(functools.partial(by_hand, window=4), window=5, head_dim=D).ok


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("window", [100, 1000])
def test_a_long_window_is_seen_at_its_edge(window, dtype):
    def fn(q, k, v, width):
        return pyrope.attention(q, k, v, causal=True, window=width)

    for width, faults in (
        (window, ()),
        (window + 1, ("window one too wide",)),
        (window - 1, ("window one too narrow",)),
    ):
        assert (
            check_attention(functools.partial(fn, width=width), window=window, dtype=DTYPES[dtype], head_dim=D).faults
            == faults
        )
    silent = check_attention(functools.partial(fn, width=window), window=window, cache=False, head_dim=D)
    assert silent.ok and any("could not be tried" in note for note in silent.notes) == (window > 512)


def test_the_scale_is_measured():
    report = check_attention(functools.partial(by_hand, scale=0.3 / math.sqrt(D)), head_dim=D)
    assert "a scale 0.3 times the expected one" in report.findings[0].evidence


@pytest.mark.parametrize("base", [123.4, 500000.0])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_base_is_read_from_scores(base, layout):
    fn = by_pyrope(pyrope.attention, rope=Rope(D, base, layout))
    report = check_attention(fn, rope=ROPE, head_dim=D)
    assert report.faults == (("wrong base",) if layout == ROPE.layout else ("wrong pairing", "wrong base"))
    measured = float(report.findings[-1].evidence.partition("base=")[2].partition(",")[0])
    assert abs(measured / base - 1) < 1e-3


def test_the_base_is_read_from_scores_in_bfloat16():
    fn = by_pyrope(pyrope.attention, rope=Rope(D, 123.4, "interleaved"))
    report = check_attention(fn, rope=ROPE, head_dim=D, dtype=DTYPES["bfloat16"])
    assert report.faults == ("wrong pairing", "wrong base")
    measured = float(report.findings[-1].evidence.partition("base=")[2].partition(",")[0])
    assert abs(measured / 123.4 - 1) < 1e-2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_running_sums_in_low_precision(dtype):
    """Numerator and denominator lose the same weights: seen where values differ."""
    low = DTYPES[dtype]

    def fn(q, k, v):
        k, v = (np.repeat(x, 2, axis=1) for x in (k, v))
        s = (q.astype(np.float32) @ k.swapaxes(-1, -2).astype(np.float32)) * np.float32(D**-0.5)
        s = np.where(np.tri(*s.shape[-2:], s.shape[-1] - s.shape[-2], dtype=bool), s, -np.inf)
        p = np.exp(s - s.max(axis=-1, keepdims=True)).astype(low)
        total, sums = np.zeros((*q.shape[:3], 1), low), np.zeros(q.shape, low)
        for j in range(k.shape[2]):
            total, sums = total + p[..., j : j + 1], sums + p[..., j : j + 1] * v[:, :, None, j]
        return sums / total

    assert check_attention(fn, key_heads=2, head_dim=D, dtype=low).faults == ("softmax in low precision",)


PAIRS = [
    ("scale missing", "heads tiled"), ("sees the next token", "softcap missing"), ("values rotated", "keys not rotated"),
    ("not causal", "values rotated"), ("window one too wide", "scale applied twice"), ("wrong pairing", "scale missing"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("first, second", PAIRS)
def test_two_mistakes_at_once(first, second, dtype):
    chosen = options(first) | options(second)
    spec = spec_of(SHAPES["grouped"], dtype, **chosen)
    one, two = (ATTENTION[name].changes(spec)[0].fields for name in (first, second))
    both = {**one, **two}
    fn = candidate(spec, Steps(**both))
    report = check_attention(fn, **SHAPES["grouped"], head_dim=D, dtype=DTYPES[dtype], **chosen)
    assert not report.ok
    if not set(one) & set(two):
        assert set(report.faults) == {first, second}


def attend_to_shuffled_rows(q, k, v):
    return pyrope.attention(q, np.roll(k, 1, axis=0), np.roll(v, 1, axis=0), causal=True)


def blend_heads(q, k, v):
    k = (0.9 * k + 0.1 * k[:, ::-1]).astype(k.dtype)
    return pyrope.attention(q, k, v, causal=True)


def peek(q, k, v):
    out = pyrope.attention(q, k, v, causal=True)
    return (0.9 * out + 0.1 * pyrope.attention(q, k, v)).astype(q.dtype)


@pytest.mark.parametrize(
    "fn, name", [(attend_to_shuffled_rows, "batch rows mixed"), (blend_heads, "heads mixed"), (peek, "not causal")]
)
def test_who_influences_whom_is_seen_without_a_mistake_that_fits(fn, name):
    assert name in check_attention(fn, head_dim=D).faults


def test_what_may_depend_on_later_tokens_is_not_called_so():
    def fn(q, k, v):
        return pyrope.attention(q, np.roll(k, 1, axis=0), np.roll(v, 1, axis=0))

    assert check_attention(fn, causal=False, head_dim=D).faults == ("batch rows mixed",)


def test_noise_is_unexplained():
    """No number of a mistake, measured on it, may be one that there cannot be, such as a negative base."""

    for size in (1.0, 100.0):

        def fn(q, k, v, positions, size=size):
            return (size * np.random.default_rng(q.shape[2]).standard_normal(q.shape)).astype(q.dtype)

        assert pyrope.check_linear_attention(fn, rope=ROPE).faults == ("unexplained",)
    assert check_attention(fn, rope=ROPE, head_dim=D).faults == ("unexplained",)


def test_what_nothing_explains_is_said_so():
    report = check_attention(lambda q, k, v: pyrope.attention(q, k, v, causal=True) + np.float32(0.01), head_dim=D)
    assert report.faults == ("unexplained",)
    assert "none of the known mistakes" in str(report)


def test_a_cache_that_restarts_is_named_though_the_full_pass_is_right():
    fn = by_pyrope(pyrope.attention, rope=ROPE)

    def begin():
        step = stepping(fn)()
        return lambda q, k, v, positions: step(q, k, v, positions - positions[:, :1])

    report = check_attention(fn, rope=ROPE, head_dim=D, incremental=begin)
    # One token at a time all are at position 0, as if nothing were rotated; a prompt first shows what it is.
    assert report.faults == ("cache positions restart",)
    assert check_attention(fn, rope=ROPE, head_dim=D, incremental=stepping(fn)).ok


def shards_of(split, n, ranks):
    """The tokens of each rank, by NumPy's own ways to cut an array."""
    chunks = np.array_split(np.arange(n), 2 * ranks if split == "zigzag" else ranks)
    if split == "zigzag":
        return [np.concatenate((chunks[rank], chunks[-1 - rank])) for rank in range(ranks)]
    if split == "rounded up":
        return [np.arange(n)[start : start + math.ceil(n / ranks)] for start in range(0, n, math.ceil(n / ranks))]
    return [np.arange(n)[rank::ranks] for rank in range(ranks)] if split == "striped" else chunks


@pytest.mark.parametrize(
    "split, ranks", [("rounded up", 4), ("chunks", 2), ("chunks", 3), ("chunks", 8), ("striped", 4), ("zigzag", 3)]
)
def test_positions_local_to_the_rank_by_hand(split, ranks):
    """Context parallel: every rank rotates its part of a row, or masks it, as if it were the first."""

    def fn(q, k, v, positions=None, *, rotates=True, masks=False, counts=False):
        at, seen_at = None if positions is None else positions.copy(), np.arange(q.shape[2])
        for own in shards_of(split, q.shape[2], ranks):
            if at is not None and rotates:
                at[:, own] = np.arange(own.size) if counts else positions[:, : own.size]
            if masks:
                seen_at[own] = np.arange(own.size)
        if at is not None:
            q, k = pyrope.rotate(q, at[:, None], ROPE), pyrope.rotate(k, at[:, None], ROPE)
        return pyrope.attention(q, k, v, causal=True, q_positions=seen_at, k_positions=seen_at)

    for how in ({}, {"counts": True}, {"counts": True, "masks": True}, {"rotates": False, "masks": True}):
        report = check_attention(functools.partial(fn, **how), rope=ROPE, head_dim=D)
        names = ["positions local to the rank"]
        if split == "striped" and not how.get("rotates", True):  # the i-th token of each rank: a block of tokens
            names = ["causal by blocks", *names]
        assert [*report.faults, *report.findings[0].alternatives] == names, (how, report)
        if split in ("rounded up", "chunks") and "masks" not in how:
            assert report.findings[0].since == 24 // ranks
    report = check_attention(functools.partial(fn, masks=True), head_dim=D, cache=False)
    assert report.faults == ("causal by blocks" if split == "striped" else "positions local to the rank",)


@pytest.mark.parametrize("ranks", [2, 4])
def test_positions_of_the_first_chunk_repeated_by_hand(ranks):
    """Context parallel: a rank with a chunk from the front and one from the back rotates both as if from the front."""

    def fn(q, k, v, positions):
        if q.shape[2] % (2 * ranks):
            raise ValueError("the length must be a multiple of twice the ranks")
        at = positions.copy()
        for own in shards_of("zigzag", q.shape[2], ranks):
            at[:, own] = np.tile(positions[:, own[: own.size // 2]], 2)
        return by_pyrope(pyrope.attention, rope=ROPE)(q, k, v, at)

    report = check_attention(fn, rope=ROPE, head_dim=D)
    assert report.faults == ("positions of the first chunk repeated",) and not report.findings[0].alternatives
    assert report.findings[0].since == 12
    assert any("not taken by the candidate" in note for note in report.notes)


# What shows without numbers


def right(q, k, v):
    return pyrope.attention(q, k, v, causal=True)


def zero_for_one(q, k, v):
    return 0 * q if q.shape[2] == 1 and k.shape[2] > 1 else right(q, k, v)


def first_key_for(count):
    return lambda q, k, v: right(q, k[:, :, :count], v[:, :, :count]) if q.shape[2] == count else right(q, k, v)


@pytest.mark.parametrize(
    "fn, queries", [(zero_for_one, "1 query"), (first_key_for(1), "1 query"), (first_key_for(2), "2")]
)
def test_one_query_and_two_against_a_cache_are_tried(fn, queries):
    report = check_attention(fn, head_dim=D)
    assert not report.ok and f'"cache, {queries}' in report.findings[0].evidence
    assert check_attention(fn, head_dim=D, cache=False).ok


@pytest.mark.parametrize("given, returned", [("float32", "float64"), ("bfloat16", "float32"), ("float16", "float32")])
def test_another_dtype_is_a_fault(given, returned):
    report = check_attention(lambda *x: right(*x).astype(returned), head_dim=D, dtype=DTYPES[given])
    assert report.faults == ("wrong dtype out",)
    assert f"the input is {given}, the result {returned}" in report.findings[0].evidence


def forgetful(after):
    """Right for so many calls."""
    calls = []

    def fn(q, k, v):
        calls.append(1)
        return right(q, k, v) * q.dtype.type(len(calls) <= after)

    return fn


def keeps_the_longest():
    """Right, until a call is shorter than one before: a buffer that is not cut."""
    longest = 0

    def fn(q, k, v):
        nonlocal longest
        longest = max(longest, k.shape[2])
        return right(q, k, v) * q.dtype.type(1 if longest < 130 or k.shape[2] > 24 else 0.5)

    return fn


@pytest.mark.parametrize("fn", [forgetful(9), forgetful(12), keeps_the_longest()])
def test_state_between_calls_is_a_fault(fn):
    assert "state between calls" in check_attention(fn, head_dim=D).faults


def test_noise_within_the_rounding_is_no_state():
    rng = np.random.default_rng(1)
    fn = lambda q, k, v: right(q, k, v) * (1 + rng.uniform(-1, 1, q.shape) * 2.0**-24).astype(q.dtype)  # noqa: E731
    assert check_attention(fn, head_dim=D).ok


def refuses(q, k, v):
    if q.shape[2] != k.shape[2]:
        raise NotImplementedError("n must be m")
    return right(q, k, v)


def test_what_a_candidate_does_not_take_is_noted():
    report = check_attention(refuses, head_dim=D)
    assert report.verdict == "right"
    assert any("not taken by the candidate: cache, " in note and "n must be m" in note for note in report.notes)
    demanded = check_attention(refuses, head_dim=D, cache=True)
    assert demanded.verdict == "not judged" and "it raises NotImplementedError (n must be m)" in demanded.failure.reason

    def short(q, k, v):
        assert k.shape[2] < 100, "too long"
        return right(q, k, v)

    assert check_attention(short, head_dim=D).verdict == "right"
    wrong = check_attention(lambda *x: 2 * short(*x), head_dim=D)
    assert wrong.verdict == "wrong" and any("130 tokens" in note for note in wrong.notes)


@pytest.mark.parametrize(
    "fn, reason",
    [
        (lambda q, k, v: None, "it returns nothing"),
        (lambda q, k, v: right(q, k, v) > 0, "it returns bool"),
        (lambda q, k, v: right(q, k, v)[0], "it returns the shape (4, 24, 32) instead of (3, 4, 24, 32)"),
    ],
)
def test_what_answers_nothing_is_not_judged(fn, reason):
    report = check_attention(fn, head_dim=D)
    assert report.verdict == "not judged" and report.failure.reason == reason


def test_inputs_that_change_are_a_fault():
    def fn(q, k, v):
        out = right(q, k, v)
        k[:, :, -1] *= np.float32(0.5)
        return out

    report = check_attention(fn, head_dim=D)
    assert report.faults == ("mutates its input",) and "elements of k are changed" in report.findings[0].evidence


def test_a_cache_that_fails_is_not_judged():
    def begin():
        raise RuntimeError("no memory")

    report = check_attention(right, head_dim=D, incremental=begin)
    assert report.verdict == "not judged" and "step by step, one each" in report.failure.received


def test_a_candidate_that_fails_only_where_it_is_examined_has_a_report():
    def fn(q, k, v, positions):
        if q.shape[0] > 3:
            raise MemoryError
        return by_pyrope(pyrope.attention, rope=Rope(D, 123.4, "half"))(q, k, v, positions)

    assert check_attention(fn, rope=ROPE, head_dim=D).faults == ("unexplained",)


def test_nothing_finite_is_named_so():
    report = check_attention(lambda q, k, v: np.full_like(q, np.nan), head_dim=D)
    assert report.faults == ("not finite",)
    some = lambda q, k, v: np.where(np.arange(D) == 3, np.inf, right(q, k, v)).astype(q.dtype)  # noqa: E731
    assert check_attention(some, head_dim=D).faults == ("not finite",)


# The rest of the contract


def test_the_report_is_an_assertion_too():
    assert_attention(functools.partial(by_hand), head_dim=D)
    with pytest.raises(Mismatch, match="scale missing") as caught:
        assert_attention(functools.partial(by_hand, scale=1.0), head_dim=D)
    assert caught.value.report.errors[0].worst > 1e3


def test_what_a_candidate_cannot_do_is_noted():
    notes = check_attention(lambda q, k, v: by_hand(q, k, v), head_dim=D).notes
    assert any("mask, segments" in note for note in notes)
    assert not check_attention(forms.eager(np.float32), head_dim=D).notes


@pytest.mark.parametrize(
    "options, message",
    [
        ({"heads": 3, "key_heads": 2}, "key_heads must divide"), ({"grade": "perfect"}, "grade must be one of"),
        ({"rope": Rope(16, 1e4, "half")}, "head_dim of 64"), ({"max_position": 5}, "max_position must be at least"),
        ({"dtype": np.int64}, "dtype must be"), ({"window": 0}, "window must be at least 1"),
        ({"scale": 0.0}, "scale must be finite and greater"), ({"softcap": 0.0}, "softcap must be finite and greater"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        check_attention(by_hand, **options)


@pytest.mark.parametrize("catalogue", [ATTENTION, LINEAR])
def test_changes_are_said_in_words(catalogue):
    """Names of fields are ours alone; what has a number says it."""
    rope = Rope(D, 10000.0, "half", scaling=YaRN(8.0, 64))
    words = set()
    for causal in (True, False):
        options = {"window": 7, "softcap": 3.0, "scale": 0.2, "dtype": np.dtype(np.float32)}
        spec = make_spec(4, 2, D, causal, rope, **options)
        words |= {in_words(change).replace(repr(rope), "") for f in catalogue.values() for change in f.changes(spec)}
    ropes = {text for text in words if text.startswith("Rope(")}
    assert len(ropes) > 3 and "" in words and not any(re.search(r"[=\[\]'()]", text) for text in words - ropes)
    assert {"2 ranks, split: even", "positions modulo 64", "blocks of 64 keys"} <= words


def test_the_document_is_the_catalogue():
    text = (pathlib.Path(__file__).parent.parent / "docs/diagnosis-attention.md").read_text()
    for title, faults in (("softmax", ATTENTION), ("linear", LINEAR), ("both", BEHAVIOUR)):
        rows = [
            listed_fields(f.name, {"step": f.step, "shows": f.symptom, "cause": f.cause, "fix": f.fix})
            for f in faults.values()
        ]
        missing = "\n".join(row for row in rows if row not in text.splitlines())
        assert "\n".join(rows) in text, f"{title}: these rows are missing, or their order is another:\n{missing}"
