"""Traces: what is written comes back in its order, and the difference of two is named."""

import json
import os

import numpy as np
import pytest
from hypothesis import given, strategies as st
from optional import package
from strategies import DTYPES

import pyrope
from pyrope import Linear, Rope, YaRN
from pyrope.oracle.traces import _scale, _turn, diff_traces, read_trace, write_trace
from pyrope.tensors import save_safetensors

ml_dtypes = package("ml_dtypes")

B, H, N, D, E = 2, 3, 12, 16, 48
ROPE = Rope(D, 10000.0, "half")


def model(layers=3, dtype=np.float32, rope=ROPE, change=None, at=range(N)):
    """A small transformer's trace, with random weights; change(name, array) may put another array in its place."""
    random, trace = np.random.default_rng(0), {}

    def keep(name, array):
        array = array.astype(dtype)
        trace[name] = array = array if change is None else np.asarray(change(name, array))
        return array

    def weights(*shape):
        return (random.standard_normal(shape) / np.sqrt(shape[-2])).astype(dtype)

    def heads(x):
        return x.reshape(B, N, H, D).swapaxes(1, 2)

    x = keep("embedding", random.standard_normal((B, N, E)))
    for i in range(layers):
        own = f"layers.{i}."
        y = keep(f"{own}norm", x / np.sqrt(np.square(x).mean(-1, keepdims=True)))
        q, k, v = (keep(own + name, heads(y @ weights(E, E))) for name in "qkv")
        q, k = (keep(f"{own}{name}_rotated", pyrope.rotate(z, at, rope)) for name, z in (("q", q), ("k", k)))
        scores = np.where(np.tri(N, dtype=bool), q @ k.swapaxes(-1, -2) / np.sqrt(D), -np.inf).astype(np.float64)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores = keep(f"{own}scores", scores / scores.sum(-1, keepdims=True))
        x = x + keep(f"{own}attention", (scores @ v).swapaxes(1, 2).reshape(B, N, E) @ weights(E, E))
        y = keep(f"{own}mlp_norm", x / np.sqrt(np.square(x).mean(-1, keepdims=True)))
        x = keep(f"{own}output", x + keep(f"{own}mlp", np.maximum(y @ weights(E, E), 0) @ weights(E, E)))
    y = keep("norm", x / np.sqrt(np.square(x).mean(-1, keepdims=True)))
    keep("logits", y @ weights(E, 97))
    return trace


GOOD = model()


@given(st.permutations([f"layers.{i}.q" for i in range(12)] + ["embedding", "logits", "ß"]))
def test_traces_come_back_in_their_order(tmp_path_factory, names):
    path = tmp_path_factory.mktemp("t") / "a.safetensors"
    arrays = {
        name: np.full((2, 3), i, [np.float32, ml_dtypes.bfloat16, np.int64][i % 3]) for i, name in enumerate(names)
    }
    write_trace(path, arrays)
    trace = read_trace(path)
    assert list(trace) == names
    assert all(trace[name].dtype == arrays[name].dtype and (trace[name] == arrays[name]).all() for name in names)
    assert diff_traces(path, arrays).verdict == "right"


def test_arrays_of_any_backend_are_written(tmp_path, xp):
    write_trace(tmp_path / "t", {"logits": pyrope.from_numpy(np.arange(3.0), xp)})
    assert read_trace(tmp_path / "t")["logits"].tolist() == [0, 1, 2]


def test_without_an_order_it_is_that_of_a_forward_pass(tmp_path):
    shuffled = sorted(GOOD, key=lambda name: hash(name) % 97)
    more = {"layers.10.q": np.ones(1, np.float32), "layers.1.extra": np.ones(1, np.float32), "rest": np.ones(1)}
    save_safetensors(tmp_path / "t", {name: {**GOOD, **more}[name] for name in [*more, *shuffled]}, {})
    names = list(read_trace(tmp_path / "t"))
    assert [name for name in names if name in GOOD] == list(GOOD)
    assert names[-3:] == ["norm", "logits", "rest"] and names.index("layers.2.output") < names.index("layers.10.q")
    assert names.index("layers.1.extra") == names.index("layers.1.output") + 1


def test_a_wrong_order_is_refused(tmp_path):
    for order in ('["a", "c"]', '["a"]', '["a", "b", "b"]', "{}", "3"):
        save_safetensors(tmp_path / "t", {"a": np.ones(1), "b": np.ones(1)}, {"order": order})
        with pytest.raises(ValueError, match="the order in its metadata must name every tensor once"):
            read_trace(tmp_path / "t")
    save_safetensors(tmp_path / "t", {"a": np.ones(1)}, {"order": "[" * 10000})
    assert list(read_trace(tmp_path / "t")) == ["a"]


def test_the_same_is_the_same():
    report = diff_traces(GOOD, GOOD)
    assert (report.verdict, report.precision, report.notes) == ("right", "the same bits", ())
    assert [row.where for row in report.errors] == ["embedding", "layers.0", "layers.1", "layers.2", "norm", "logits"]


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16"])
def test_rounding_is_noise_and_grows(name):
    """The same model with the last bit of everything shaken."""
    random, dtype = np.random.default_rng(1), DTYPES[name]
    unit = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[name]

    def shake(_, x):
        return (x.astype(np.float64) * (1 + 2 * unit * random.uniform(-1, 1, x.shape))).astype(dtype)

    report = diff_traces(model(dtype=dtype), model(dtype=dtype, change=shake))
    assert report.verdict == "right", str(report)
    assert report.precision.startswith("noise of at most")
    assert 0 < report.errors[0].worst < 8 and report.errors[1].worst < report.errors[3].worst < 200


def test_a_wider_trace_is_judged_by_the_coarser():
    report = diff_traces(model(dtype=np.float64), model(dtype=ml_dtypes.bfloat16))
    assert report.verdict == "right", str(report)
    assert "names have other dtypes, the first of them embedding, float64 and bfloat16" in report.notes[0]


def replaced(where, change):
    return model(change=lambda name, x: change(x) if name == where else x)


def interleave(x):
    y = np.empty_like(x)
    y[..., ::2], y[..., 1::2] = x[..., : D // 2], x[..., D // 2 :]
    return y


def masked(x):
    full = np.where(x == 0, 1.0, x)
    return full / full.sum(-1, keepdims=True)


# By kind: where they begin to differ, some words of the description, and the second trace.
CASES = {
    "scale": ("embedding", "√48", lambda: replaced("embedding", lambda x: x * np.sqrt(E))),
    "scale-scores": ("layers.1.scores", "0.25 times", lambda: replaced("layers.1.scores", lambda x: x / 4)),
    "sign": ("layers.1.v", "minus", lambda: replaced("layers.1.v", lambda x: -x)),
    "shift": ("embedding", "row m of the first is row m + 1 of", lambda: replaced("embedding", lambda x: np.roll(x, 1, 1))),
    "shift-back": ("embedding", "row m − 2 of", lambda: replaced("embedding", lambda x: np.roll(x, -2, 1))),
    "permuted rows": ("embedding", "has 3, 1, 0", lambda: replaced("embedding", lambda x: x[:, [3, 1, 0, 2, *range(4, N)]])),
    "permuted heads": ("layers.0.v", "has 1, 2, 0 of", lambda: replaced("layers.0.v", lambda x: x[:, [1, 2, 0]])),
    "permuted batch": ("embedding", "has 1, 0 of", lambda: replaced("embedding", lambda x: x[::-1])),
    "permuted features": ("layers.2.q", "in halves, the second interleaved", lambda: replaced("layers.2.q", interleave)),
    "permuted features-any": ("embedding", "has 47, 46", lambda: replaced("embedding", lambda x: x[..., ::-1])),
    "bias": ("layers.1.v", "the same vector added, of size 0.5", lambda: replaced("layers.1.v", lambda x: x + np.float32(0.5))),
    "nan": ("layers.1.attention", "0 and 48 numbers are NaN", lambda: spoilt("layers.1.attention", np.nan)),
    "mask": ("layers.0.scores", "396 numbers are hidden", lambda: replaced("layers.0.scores", masked)),
    "mask-inf": ("layers.1.attention", "48 in the second only", lambda: spoilt("layers.1.attention", np.inf)),
    "shape": ("logits", r"(2, 12, 97) and (2, 11, 97)", lambda: replaced("logits", lambda x: x[:, 1:])),
    "axes": ("layers.0.q", "axes (0, 2, 1, 3) of", lambda: moved_axes("layers.0.q")),
    "axes-joined": ("layers.0.q", "(2, 3, 12, 16), as (2, 12, 48)", lambda: moved_axes("layers.0.q", (B, N, E))),
    "other numbers": ("layers.1.mlp", "of a row", lambda: replaced("layers.1.mlp", np.tanh)),
    "pairing": ("layers.0.q_rotated", "half, the second as interleaved", lambda: model(rope=Rope(D, 10000.0, "interleaved"))),
    "pairing-partial": ("layers.0.q_rotated", "half, the second as half, 8 of 16 features, the prefix", lambda: model(rope=Rope(D, 10000.0, "half", 8))),
    "direction": ("layers.0.q_rotated", "the other way", lambda: model(rope=Rope(D, 10000.0, "half", direction=-1))),
    "offset": ("layers.0.q_rotated", "from 1 positions further", lambda: model(at=np.arange(N) + 1)),
    "offset-far": ("layers.0.q_rotated", "from 100 positions further", lambda: model(at=np.arange(N) + 100)),
    "offset-back": ("layers.0.q_rotated", "from -5 positions further", lambda: model(at=np.arange(N) - 5)),
    "frequencies": ("layers.0.q_rotated", "base 1e+04, the second frequencies from 1 to 1.03e-05, those of base 5e+05", lambda: model(rope=Rope(D, 500000.0, "half"))),
    "frequencies-linear": ("layers.0.q_rotated", "the second frequencies from 0.25", lambda: model(rope=Rope(D, 10000.0, "half", scaling=Linear(4.0)))),
    "frequencies-yarn": ("layers.0.q_rotated", "no geometric series", lambda: model(rope=Rope(D, 10000.0, "half", scaling=YaRN(16.0, 64, attention_factor=1.0)))),
    "scale-factor": ("layers.0.q_rotated", "vectors 1 as long, the second 1.25", lambda: model(rope=Rope(D, 10000.0, "half", scaling=YaRN(1.0, 64, attention_factor=1.25)))),
}  # fmt: skip


def spoilt(where, value):
    def change(x):
        x = x.copy()
        x[0, 3] = value
        return x

    bad = dict(GOOD)
    bad[where] = change(bad[where])
    return bad


def moved_axes(where, shape=None):
    return {**GOOD, where: GOOD[where].swapaxes(1, 2).reshape(shape or (B, N, H, D))}


@pytest.mark.parametrize("case", CASES)
def test_the_first_difference_is_found_and_named(case):
    kind, (where, words, make) = case.partition("-")[0], CASES[case]
    report = diff_traces(GOOD, make())
    assert report.verdict == "wrong" and report.faults == (kind,), str(report)
    (finding,) = report.findings
    assert finding.evidence.startswith(f"the first difference is at {where}: ") and words in finding.evidence
    assert finding.cause and finding.fix


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_rotations_are_recognised_in_any_dtype(dtype):
    first = model(dtype=dtype)
    for kind, rope in (
        ("pairing", Rope(D, 10000.0, "interleaved")),
        ("direction", Rope(D, 10000.0, "half", direction=-1)),
    ):
        assert diff_traces(first, model(dtype=dtype, rope=rope)).faults == (kind,)
    report = diff_traces(first, model(dtype=dtype, at=np.arange(N) + 100))
    assert report.faults == ("offset",) and "from 100 positions further" in report.findings[0].evidence
    report = diff_traces(first, model(dtype=dtype, rope=Rope(D, 100.0, "half")))
    assert report.faults == ("frequencies",) and "the second frequencies from 1 to 0.01" in report.findings[0].evidence
    assert "geometric" not in report.findings[0].evidence and "those of base 1" in report.findings[0].evidence


SUGGESTIONS = [
    ("embedding", "scale", "√e"), ("layers.0.norm", "scale", "1 + weight"), ("layers.3.scores", "scale", "1/√d"),
    ("layers.0.q_rotated", "pairing", "pair features"), ("layers.0.k_rotated", "frequencies", "base"),
    ("layers.0.q_rotated", "offset", "positions"), ("layers.0.q_rotated", "scale", "attention factor"),
    ("layers.0.q_rotated", "other numbers", "rotation differs"), ("layers.0.k", "permuted features", "layout"),
    ("layers.0.scores", "mask", "masks"), ("layers.0.v", "permuted heads", "grouped"), ("layers.0.v", "bias", "a bias"),
    ("layers.0.mlp", "other numbers", "activation"), ("logits", "other numbers", "tied"), ("else", "sign", "no usual mistake"),
    ("layers.0.attention", "nan", "overflow"), ("embedding", "shift", "tokens"), ("layers.1.v", "axes", "axes"),
]  # fmt: skip


@pytest.mark.parametrize("name, kind, words", SUGGESTIONS)
def test_what_a_difference_suggests(name, kind, words):
    from pyrope.oracle.traces import _hint

    assert words in _hint(name, kind)[0]


def test_weights_stored_for_another_layout_are_equivalent():
    """Rows permuted and rotated in the other layout: q and k differ in order, the scores do not."""

    def change(name, x):
        return interleave(x) if name.endswith((".q", ".k")) else x

    report = diff_traces(GOOD, model(rope=Rope(D, 10000.0, "interleaved"), change=change))
    assert report.verdict == "equivalent" and "layers.0.q, layers.0.k, layers.0.q_rotated" in report.notes[0]


@pytest.mark.parametrize("width, start", [(D, 0), (8, 0), (8, D - 8)])
def test_an_order_of_features_is_named_in_both_directions(width, start):
    """Neighbours to halves, of all features or of the first or last ones, and back."""
    x, order = GOOD["layers.0.q"], np.arange(D)
    order[start : start + width] = start + np.array([*range(0, width, 2), *range(1, width, 2)])
    part = "" if width == D else f", {width} of {D} features"
    for first, second, words in (
        (x, x[..., order], f"the first is interleaved, the second in halves{part}"),
        (x[..., order], x, f"the first is in halves, the second interleaved{part}"),
    ):
        report = diff_traces({"layers.0.q": first}, {"layers.0.q": second})
        assert report.faults == ("permuted features",) and report.findings[0].evidence.endswith(words)


def test_one_row_and_one_side_without_a_rotation_are_no_rotation():
    """Nothing can be said of turns where there is one row, or where one side keeps no lengths."""
    q, turned, rope = GOOD["layers.0.q"], GOOD["layers.0.q_rotated"], Rope(D, 10000.0, "half")
    row = q[:, :, 3:4]
    alone = row, *(pyrope.rotate(row, [at], rope) for at in (3, 5))
    for before, one, other in (alone, (q, turned, np.tanh(turned))):
        report = diff_traces({"q": before, "q_rotated": one}, {"q": before, "q_rotated": other})
        assert report.faults == ("other numbers",)


@pytest.mark.parametrize("base, series", [(1e5, "frequencies from 1 to"), (1000.0, "those of base")])
def test_few_clear_frequencies_are_named_by_their_ends(base, series):
    """Of the four pairs of a base of 10⁵ two turn by more than noise in a float16 trace, of one of 1000 three: enough."""
    x, at = np.random.default_rng(0).standard_normal((1, 1, 6, 8)), np.arange(6)
    one, other = (
        {"q": x.astype(np.float16), "q_rotated": pyrope.rotate(x, at, Rope(8, base, "half")).astype(np.float16)}
        for base in (base, base / 2)
    )
    (finding,) = diff_traces(one, other).findings
    assert finding.fault == "frequencies" and series in finding.evidence
    assert ("base" in finding.evidence) == (series == "those of base")


def test_one_wrong_row_among_many_is_seen():
    def change(x):
        x = x.copy()
        x[1, 7] *= np.float32(1.001)
        return x

    report = diff_traces(GOOD, replaced("layers.2.attention", change))
    assert report.faults == ("other numbers",) and "layers.2.attention" in report.findings[0].evidence


def test_names_that_are_missing():
    early = dict(list(GOOD.items())[:9])
    report = diff_traces(GOOD, early)
    assert report.faults == ("missing names",) and "the last among them" in report.findings[0].evidence
    few = {name: GOOD[name] for name in ("embedding", "layers.1.q_rotated", "logits")}
    report = diff_traces(GOOD, few)
    assert report.verdict == "right" and report.notes[0].startswith("missing in the second trace: layers.0.norm")
    report = diff_traces(few, GOOD)
    assert report.verdict == "right" and report.notes[0].startswith("missing in the first trace: layers.0.norm")
    with pytest.raises(ValueError, match="no name in common: embedding"):
        diff_traces(GOOD, {"other": np.ones(3)})
    with pytest.raises(ValueError, match="no name in common"):
        diff_traces({}, {})


def test_noise_that_has_grown_too_far_is_called_noise():
    random = np.random.default_rng(1)
    first = {f"x{i}": np.ones((4, 64), np.float32) for i in range(12)}
    second = {
        name: x + random.standard_normal(x.shape).astype(np.float32) * 2.0**-23 * 4**i
        for i, (name, x) in enumerate(first.items())
    }
    report = diff_traces(first, second)
    assert report.faults == ("noise",) and "grown step by step" in report.findings[0].evidence
    assert diff_traces(first, second, tolerance=10.0).verdict == "right"


def test_the_tolerance_is_the_callers():
    near = {**GOOD, "logits": GOOD["logits"] * np.float32(1.0001)}
    assert diff_traces(GOOD, near).faults == ("scale",)
    assert diff_traces(GOOD, near, tolerance=1e-3).verdict == "right"
    bit = {**GOOD, "logits": np.nextafter(GOOD["logits"], np.float32(99))}
    assert diff_traces(GOOD, bit).verdict == "right" and diff_traces(GOOD, bit, tolerance=0).verdict == "wrong"
    with pytest.raises(ValueError, match="tolerance must be finite and at least 0"):
        diff_traces(GOOD, GOOD, tolerance=-1)


def test_odd_tensors_do_not_break_it():
    odd = {
        "scalar": np.float32(3) * np.ones(()),
        "empty": np.ones((0, 3)),
        "zeros": np.zeros((2, 4)),
        "ids": np.arange(3),
        "one": np.ones((1, 1)),
    }
    assert diff_traces(odd, odd).verdict == "right"
    assert (
        diff_traces(odd, {**odd, "zeros": np.ones((2, 4))})
        .findings[0]
        .evidence.startswith("the first difference is at zeros")
    )
    assert diff_traces(odd, {**odd, "scalar": np.ones(())}).faults == ("scale",)
    assert diff_traces(odd, {**odd, "ids": np.array([0, 1, 3])}).verdict == "wrong"
    assert diff_traces(odd, {**odd, "empty": np.ones((0, 4))}).faults == ("axes",)


def test_a_report_is_json():
    report = json.loads(json.dumps(diff_traces(GOOD, CASES["pairing"][2]()).to_dict()))
    assert report["ok"] is False and report["findings"][0]["fault"] == "pairing"


def test_nothing_is_left_of_an_interrupted_trace(tmp_path):
    with pytest.raises(TypeError, match="must have a dtype"):
        write_trace(tmp_path / "t", {"a": np.ones(2), "b": np.ones(2, complex)})
    assert os.listdir(tmp_path) == []


def test_a_batch_of_one_may_have_no_axis_of_its_own():
    one = {name: array[:1] for name, array in GOOD.items()}
    alone = {name: array[0] for name, array in GOOD.items()}
    for a, b in ((one, alone), (alone, one)):
        assert diff_traces(a, b).verdict == "right"
    late = {name: array[0] for name, array in model(at=range(1, N + 1)).items()}
    report = diff_traces(one, late)
    assert report.faults == ("offset",) and "1 positions further on" in report.findings[0].evidence


@pytest.mark.parametrize("place, start", [("prefix", 0), ("suffix", 2)])
def test_a_single_pair_that_turns_is_found(place, start):
    x = np.random.default_rng(0).standard_normal((5, 4))
    z = (x[:, start] + 1j * x[:, start + 1]) * 2 * np.exp(1j * (0.5 + 0.3 * np.arange(5)))
    y = x.copy()
    y[:, start], y[:, start + 1] = z.real, z.imag
    turn = _turn(x, y, 1e-9)
    assert turn.pairing == f"half, 2 of 4 features, the {place}" and turn.factor == pytest.approx(2)
    assert turn.theta == pytest.approx([0.3]) and turn.start == pytest.approx([0.5])
    assert _turn(x[:1], y[:1], 1e-9) is None and _turn(x, y + x[:, ::-1], 1e-9) is None


@pytest.mark.parametrize(
    "factor, name", [(3.0, "√9"), (1 / 3, "1/√9"), (9.0, "9"), (1 / 9, "1/9"), (2.0, ""), (27.0, "")]
)
def test_factors_that_a_width_explains(factor, name):
    a = np.random.default_rng(0).standard_normal((4, 9))
    words = _scale(a, factor * a, 1e-6).description
    assert words == f"the second is {factor:.6g} times the first" + (f", which is {name}" if name else "")
