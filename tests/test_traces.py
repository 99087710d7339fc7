"""Traces: what is written comes back in its order, and the first difference of two is found, measured and named."""

import json

import numpy as np
import pytest
from optional import package
from strategies import DTYPES

import pyrope
from pyrope import Config, Layer, Rope, YaRN
from pyrope.files import save_safetensors
from pyrope.oracle.mistakes import TRACES
from pyrope.oracle.traces import diff_traces, read_trace, write_trace

ml_dtypes = package("ml_dtypes")

B, H, N, D, E = 2, 3, 12, 16, 48
ROPE = Rope(D, 10000.0, "half")


def traced(dtype="float32", rope=ROPE, at=range(N)):
    """The trace of a small transformer with random weights."""
    config = Config(
        vocabulary=97, width=E, heads=H, key_heads=H, head_dim=D, mlp_width=E, layers=(Layer(rope),) * 3, norm="rms",
        eps=1e-6, activation="silu", gated=False, block="sequential", causal=True,
    )  # fmt: skip
    trace, wide = {}, "float64" if dtype == "float64" else "float32"
    tokens = np.random.default_rng(0).permutation(97)[: B * N].reshape(B, N)
    pyrope.forward(pyrope.random_model(config, 0, dtype=wide), tokens, at, trace=trace.__setitem__)
    return {name: array.astype(DTYPES[dtype]) for name, array in trace.items()}


GOOD = traced()


def replaced(where, change):
    return lambda: {**GOOD, where: np.asarray(change(GOOD[where]))}


def turning(at=range(N), **fields):
    return lambda: traced(rope=Rope(D, **{"base": 10000.0, "layout": "half", **fields}), at=at)


def interleave(x):
    return np.stack((x[..., : D // 2], x[..., D // 2 :]), axis=-1).reshape(x.shape)


def unmasked(x):
    return np.where(np.isinf(x), np.float32(0.5), x)


def without_row_3(x):
    x = x.copy()
    x[0, 3] = np.nan
    return x


Q = GOOD["layers.0.q"]
# Where they begin to differ, the fault, some words of the fact, and the second trace.
CASES = [
    ("embedding", "scaled", "6.9282 times the first, √48", replaced("embedding", lambda x: x * np.sqrt(E))),
    ("layers.1.scores", "scaled", "0.25 times the first, 1/√16", replaced("layers.1.scores", lambda x: x / 4)),
    ("layers.1.v", "scaled", "-1 times the first, −√1", replaced("layers.1.v", lambda x: -x)),
    ("layers.1.v", "bias added", "a vector of size 0.5 added", replaced("layers.1.v", lambda x: x + np.float32(0.5))),
    ("embedding", "permuted rows", "rows from 0 on of the second are 3, 1, 0, 2", replaced("embedding", lambda x: x[:, [3, 1, 0, 2, *range(4, N)]])),
    ("layers.0.v", "permuted heads", "are 1, 2, 0 of the first", replaced("layers.0.v", lambda x: x[:, [1, 2, 0]])),
    ("logits", "permuted features", "features from 1 on of the second are 2, 1, 3", replaced("logits", lambda x: x[..., [0, 2, 1, *range(3, 97)]])),
    ("layers.1.attention", "NaN in one trace", "0 and 48 numbers are NaN", replaced("layers.1.attention", without_row_3)),
    ("layers.0.scores", "masked otherwise", "396 numbers are 0 or infinite in the first only", replaced("layers.0.scores", unmasked)),
    ("logits", "other shape", "(2, 12, 97) and (2, 11, 97)", replaced("logits", lambda x: x[:, 1:])),
    ("layers.1.mlp", "other numbers", "of their size", replaced("layers.1.mlp", np.tanh)),
    ("layers.0.q_rotated", "other pairs", "half, the second as interleaved", turning(layout="interleaved")),
    ("layers.0.q_rotated", "other pairs", "the second as half, 8 of 16 features, the prefix", turning(rotary_dim=8)),
    ("layers.0.q_rotated", "turned backwards", "the other way", turning(direction=-1)),
    ("layers.0.q_rotated", "other frequencies", "(base 500000", turning(base=500000.0)),
    ("layers.0.q_rotated", "other frequencies", "the second by 1 to 1.98e-05", turning(scaling=YaRN(16.0, 64, attention_factor=1.0))),
    ("layers.0.q_rotated", "scaled", "1.25 times the first", turning(scaling=YaRN(1.0, 64, attention_factor=1.25))),
    ("layers.0.q_rotated", "other positions", "ahead: 100 from row 0 on", turning(at=np.arange(N) + 100)),
    ("layers.0.q_rotated", "other positions", "0 from row 0 on, -7 from row 7 on", turning(at=np.arange(N) - 7 * (np.arange(N) >= 7))),
]  # fmt: skip


@pytest.mark.parametrize("where, fault, words, make", CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_the_first_difference_is_found_and_named(where, fault, words, make):
    report = diff_traces(GOOD, make())
    assert report.verdict == "wrong" and report.faults == (fault,), str(report)
    (finding,) = report.findings
    assert words in finding.fact and finding.where.startswith(f"first at {where}")
    assert fault in TRACES and finding.cause == TRACES[fault].cause and finding.fix


@pytest.mark.parametrize("fault, fields, start", [
    ("other pairs", {"layout": "interleaved"}, 0), ("turned backwards", {"direction": -1}, 0),
    ("other frequencies", {"base": 100.0}, 0), ("other positions", {}, 100),
])  # fmt: skip
def test_other_rotations_are_recognised_in_bfloat16(fault, fields, start):
    rope = Rope(D, **{"base": 10000.0, "layout": "half", **fields})
    report = diff_traces(traced("bfloat16"), traced("bfloat16", rope, np.arange(N) + start))
    assert report.faults == (fault,), str(report)
    assert "ahead: 100 from row 0 on" in report.findings[0].fact or not start


def test_one_row_or_one_side_that_does_not_rotate_is_no_rotation():
    q, turned = Q, GOOD["layers.0.q_rotated"]
    single = Q[:, :, 3:4], *(pyrope.rotate(Q[:, :, 3:4], [at], ROPE) for at in (3, 5))
    for before, one, other in (single, (q, turned, np.tanh(turned))):
        report = diff_traces({"q": before, "q_rotated": one}, {"q": before, "q_rotated": other})
        assert report.faults == ("other numbers",)


def test_weights_stored_for_another_layout_are_equivalent():
    """Features permuted and rotated in the other layout: q and k differ in order, the scores do not."""
    names = (".q", ".k", "_rotated")
    second = {name: interleave(x) if name.endswith(names) else x for name, x in GOOD.items()}
    report = diff_traces(GOOD, second)
    assert report.verdict == "equivalent" and "layers.0.q, layers.0.k, layers.0.q_rotated" in report.notes[0]


def test_the_same_is_the_same():
    report = diff_traces(GOOD, GOOD)
    assert (report.verdict, report.precision, report.notes) == ("right", "the same bits", ())
    assert [row.where for row in report.errors] == ["embedding", "layers.0", "layers.1", "layers.2", "norm", "logits"]
    assert json.loads(json.dumps(diff_traces(GOOD, CASES[2][3]()).to_dict()))["findings"][0]["fault"] == "scaled"


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_rounding_is_noise(name):
    report = diff_traces(traced("float64"), traced(name))
    assert report.verdict == "right" and report.precision.startswith("noise of at most"), str(report)
    assert 0 < max(row.ulps for row in report.errors) < 200


def test_noise_that_has_grown_too_far_is_called_noise():
    random = np.random.default_rng(1)
    first = {f"x{i}": np.ones((4, 64), np.float32) for i in range(12)}
    noise = (random.standard_normal((4, 64)).astype(np.float32) * 2.0**-23 * 4**i for i in range(12))
    second = {name: x + more for (name, x), more in zip(first.items(), noise, strict=True)}
    report = diff_traces(first, second)
    assert report.faults == ("grown noise",) and "grown step by step" in report.findings[0].fact
    assert diff_traces(first, second, tolerance=10.0).verdict == "right"


def test_one_wrong_row_among_many_is_seen_and_told_with_its_numbers():
    array = GOOD["layers.2.attention"].copy()
    array[1, 7] *= np.float32(1.001)
    report = diff_traces(GOOD, {**GOOD, "layers.2.attention": array})
    assert report.faults == ("other numbers",)
    assert "first at layers.2.attention, most at (1, 7, " in report.findings[0].where


def test_the_tolerance_is_the_callers():
    bit = {**GOOD, "logits": np.nextafter(GOOD["logits"], np.float32(99))}
    assert diff_traces(GOOD, bit).ok and diff_traces(GOOD, bit, tolerance=0).verdict == "wrong"
    with pytest.raises(ValueError, match="tolerance must be finite and at least 0"):
        diff_traces(GOOD, GOOD, tolerance=-1)


def test_names_that_are_missing():
    report = diff_traces(GOOD, dict(list(GOOD.items())[:9]))
    assert report.faults == ("missing names",) and "logits among them" in report.findings[0].fact
    few = {name: GOOD[name] for name in ("embedding", "layers.1.q_rotated", "logits")}
    for first, second, word in ((GOOD, few, "second"), (few, GOOD, "first")):
        report = diff_traces(first, second)
        assert report.ok and report.notes[0].startswith(f"missing in the {word} trace: layers.0.norm")
    for other in ({"other": np.ones(3)}, {}):
        with pytest.raises(ValueError, match="no name in common: embedding"):
            diff_traces(GOOD, other)


ODD = {"scalar": np.float32(3), "empty": np.ones((0, 3)), "zeros": np.zeros((2, 4)), "ids": np.arange(3),
       "big": np.full((2, 2), 1e300)}  # fmt: skip
OTHER = {"zeros": np.ones((2, 4)), "scalar": np.ones(()), "ids": np.array([0, 1, 3]), "empty": np.ones((0, 4)),
         "big": -ODD["big"]}  # fmt: skip


def test_odd_tensors_do_not_break_it():
    assert diff_traces(ODD, ODD).verdict == "right"
    for name, array in OTHER.items():
        report = diff_traces(ODD, {**ODD, name: array})
        assert report.verdict == "wrong" and report.findings[0].where.startswith(f"first at {name}")
    one, bare = ({name: part(array) for name, array in GOOD.items()} for part in (lambda x: x[:1], lambda x: x[0]))
    assert diff_traces(one, bare).ok and diff_traces(bare, one).ok, "a batch of one needs no axis"


def test_traces_come_back_in_their_order(tmp_path, xp):
    names = [*(f"layers.{i}.q" for i in (3, 11, 0)), "logits", "ß", "embedding"]
    kinds = [np.float32, ml_dtypes.bfloat16, np.int64]
    arrays = {name: np.full((2, 3), i, kinds[i % 3]) for i, name in enumerate(names)}
    write_trace(tmp_path / "t", {**arrays, "device": pyrope.from_numpy(np.arange(3.0), xp)})
    trace = read_trace(tmp_path / "t")
    assert list(trace) == [*names, "device"] and trace["device"].tolist() == [0, 1, 2]
    assert all(trace[name].dtype == arrays[name].dtype and (trace[name] == arrays[name]).all() for name in names)
    assert diff_traces(tmp_path / "t", arrays | {"device": np.arange(3.0)}).verdict == "right"


def test_without_an_order_it_is_that_of_a_forward_pass(tmp_path):
    more = {name: np.ones(1, np.float32) for name in ("layers.10.q", "layers.1.extra", "rest")}
    save_safetensors(tmp_path / "t", {name: (GOOD | more)[name] for name in sorted(GOOD | more, reverse=True)}, {})
    names = list(read_trace(tmp_path / "t"))
    assert [name for name in names if name in GOOD] == list(GOOD)
    assert names[-3:] == ["norm", "logits", "rest"] and names.index("layers.2.output") < names.index("layers.10.q")
    assert names.index("layers.1.extra") == names.index("layers.1.output") + 1


def test_files_that_are_no_traces_are_refused(tmp_path):
    for order in ('["a", "c"]', '["a"]', '["a", "b", "b"]', "{}", "3", "x", "[" * 100000):
        save_safetensors(tmp_path / "t", {"a": np.ones(1), "b": np.ones(1)}, {"order": order})
        with pytest.raises(ValueError, match=f"^{tmp_path / 't'}: "):
            read_trace(tmp_path / "t")
    with pytest.raises(FileNotFoundError, match="nothing.safetensors"):
        read_trace("nothing.safetensors")
