"""Parts of the portable test vectors, each by itself: no suite is written or judged here."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from pyrope import DynamicNTK, Linear, Rope
from pyrope.oracle import vectors
from pyrope.oracle.attention_checks import SOFTMAX
from pyrope.oracle.linear_checks import LINEAR_KIND
from pyrope.oracle.report import Failure
from pyrope.oracle.tolerance import ANGLE32, OWN, Allowed
from pyrope.oracle.vector_cases import TRUTH, Own, Truth, cases, exam_of

CASES = {case.name: case for case in cases()}
HALF, FLAT = CASES["rotation-half-float32"], CASES["attention-causal-float32"]


def part(case, rows):
    """A case with some of its rows alone, so that it is small."""
    x, at = case.inputs["x"], case.inputs["positions"]
    return replace(case, inputs={"x": x[:, rows], "positions": at[..., rows]})


# --- Numbers as they are stored ---


def test_bfloat16_is_stored_as_its_bits():
    stored = vectors._stored(np.array([1.0, -2.0, 0.5]), "bfloat16")
    assert stored.dtype == np.uint16 and stored.tolist() == [0x3F80, 0xC000, 0x3F00]
    assert vectors._stored(np.array([1.5]), "float16").dtype == np.float16
    assert vectors._stored(np.array([7]), "float16").dtype == np.int64


def test_bounds_are_rounded_up_to_three_digits():
    assert (
        vectors._rounded_up(1.0) == 1.0
        and vectors._rounded_up(1.2345) == 1.24
        and vectors._rounded_up(9.9e-8) == 9.95e-8
    )
    for x in (1.0049, 1.23456789, 9.96, 5.5e-9):
        assert x * 0.9999 <= vectors._rounded_up(x) <= 1.011 * x


def test_a_rope_in_a_manifest():
    assert vectors._rope_to_json(None) is None
    rope = vectors._rope_to_json(CASES["rotation-yarn-float32"].rope)
    assert rope["scaling"]["type"] == "yarn" and rope["scaling"]["factor"] == 4.0 and rope["axis_of_pair"] is None
    assert (
        rope["theta"][0] == 1.0
        and len(rope["theta"]) == 16
        and rope["attention_factor"] == pytest.approx(0.1 * math.log(4) + 1)
    )
    assert vectors._rope_to_json(HALF.rope)["scaling"] is None
    assert (
        vectors._rope_to_json(CASES["rotation-axes-sections-float32"].rope)["axis_of_pair"]
        == [0] * 4 + [1] * 6 + [2] * 6
    )


def test_an_entry_has_the_greatest_bound_of_each_position():
    out = np.zeros((2, 3, 4))
    worst = np.arange(24.0).reshape(2, 3, 4)
    truth = Truth(out, {"good": Allowed(worst), "worse": Allowed(2 * worst, 3.0)}, np.ones((2, 3, 4)), 1e-16)
    entry = vectors._entry(HALF, truth, {"x": ("float32", out)})
    assert entry["tolerances"] == {"good": [15.1, 19.1, 23.1], "worse": [30.1, 38.2, 46.2]}
    assert entry["mean_square"] == {"worse": vectors._rounded_up(3.0)} and entry["truth_error"] == vectors._rounded_up(
        1e-16
    )
    assert entry["tensors"] == {
        "x": {"dtype": "float32", "shape": [2, 3, 4], "key": f"{HALF.name}.x", "npy": entry["tensors"]["x"]["npy"]}
    }
    assert "any" not in entry["tolerances"] and entry["safetensors"] == "rotation.safetensors"
    other = vectors._entry(FLAT, truth, {})
    assert other["tolerances"]["any"] == other["tolerances"]["worse"] and other["options"] == {"causal": True}
    assert "mean_square" not in vectors._entry(HALF, truth._replace(bounds={"good": Allowed(worst)}), {})


# --- Files ---


@pytest.fixture
def two_cases(monkeypatch):
    """As if a suite had two small cases."""
    bits = part(CASES["rotation-half-bfloat16"], [0, 5])

    def cases(suite, own, dtype):
        assert isinstance(suite, str) and own is None and dtype in (None, "float32")
        return [part(HALF, [0, 5]), bits][: 1 if dtype else 2]

    monkeypatch.setattr(vectors, "cases", cases)


def test_vectors_are_written_into_a_directory_that_is_not_there_yet(two_cases, tmp_path):
    target = tmp_path / "a" / "b" / "vectors"
    manifest = vectors.write_vectors(target)
    assert json.loads((target / "manifest.json").read_text()) == manifest and len(manifest["cases"]) == 2
    names = sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())
    assert set(names) == {"manifest.json", *manifest["files"]}
    assert sum(name.startswith("npy/") for name in names) == 10 and "rotation.safetensors" in names
    assert {name: tensor["dtype"] for name, tensor in manifest["cases"][1]["tensors"].items()} == {
        "x": "bfloat16", "positions": "int64", "cos": "float64", "sin": "float64", "y": "float64",
    }  # fmt: skip
    packed = (target / "rotation.safetensors").read_bytes()
    header = json.loads(packed[8 : 8 + int.from_bytes(packed[:8], "little")])
    kinds = {name.removeprefix("rotation-half-"): tensor["dtype"] for name, tensor in header.items() if "half" in name}
    assert {name: kinds[name] for name in ("float32.x", "bfloat16.x", "bfloat16.y", "bfloat16.positions")} == {
        "float32.x": "F32", "bfloat16.x": "BF16", "bfloat16.y": "F64", "bfloat16.positions": "I64",
    }  # fmt: skip
    assert len(vectors.write_vectors(tmp_path / "one", dtype="float32")["cases"]) == 1
    assert not [path for path in target.parent.iterdir() if path != target]
    again = vectors.write_vectors(target)  # what holds nothing else is replaced
    assert again == manifest and not [path for path in target.parent.iterdir() if path != target]
    (target / "mine").symlink_to(tmp_path)  # a folder, but not ours to delete
    with pytest.raises(ValueError, match="holds something else than test vectors, such as mine:"):
        vectors.write_vectors(target)
    (target / "mine").unlink()
    (target / "mine.txt").write_text("keep me")
    with pytest.raises(ValueError, match="holds something else than test vectors, such as mine.txt"):
        vectors.write_vectors(target)
    with pytest.raises(ValueError, match="must be a directory, or nothing yet"):
        vectors.write_vectors(target / "mine.txt")
    assert (target / "mine.txt").read_text() == "keep me"


def test_what_was_written_is_judged(two_cases, tmp_path):
    vectors.write_vectors(tmp_path / "vectors")
    y = TRUTH["rotation"](part(HALF, [0, 5])).out.astype(np.float32)
    first, second = vectors.verify_vectors(tmp_path / "vectors", {HALF.name: y, "rotation-other": y})
    assert first.verdict == "right" and (second.verdict, second.subject) == ("not judged", "rotation-half-bfloat16")
    assert second.failure.reason.endswith("there is 'rotation-other', which is no case")
    (only,) = vectors.verify_vectors(tmp_path / "vectors", {HALF.name: -y}, only="*float32")
    assert only.verdict == "wrong"
    with pytest.raises(ValueError, match="no case has a name like 'attention-"):
        vectors.verify_vectors(tmp_path / "vectors", {}, only="attention-*")


def test_what_fails_leaves_what_was_there(two_cases, tmp_path, monkeypatch):
    target = tmp_path / "vectors"
    vectors.write_vectors(target)
    before = (target / "manifest.json").read_bytes()
    rename, calls = vectors.os.rename, []

    def failing(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError("the disk is full")
        rename(source, target)

    monkeypatch.setattr(vectors.os, "rename", failing)
    with pytest.raises(OSError, match="the disk is full"):
        vectors.write_vectors(target)
    assert (target / "manifest.json").read_bytes() == before and [path.name for path in tmp_path.iterdir()] == [
        "vectors"
    ]


# --- Outputs ---


@pytest.mark.parametrize("name", ["rotation-half-float32", "rotation-half-bfloat16"])
def test_outputs_are_read_from_a_folder_and_from_a_dict(name, tmp_path):
    case, y = CASES[name], np.array([[1.0, -2.5]])
    stored = vectors._stored(y, case.dtype)
    np.save(tmp_path / f"{name}.npy", stored)
    folder = vectors._Outputs(tmp_path)
    assert folder.names == {name} and folder.read(case, (1, 2)).tolist() == y.tolist()
    given = vectors._Outputs({name: stored})
    assert given.names == {name} and given.read(case, (1, 2)).tolist() == y.tolist()
    with pytest.raises(
        ValueError, match=rf"{name} must be {case.dtype} of shape \(2, 1\), was {stored.dtype} of shape \(1, 2\)"
    ):
        given.read(case, (2, 1))
    with pytest.raises(ValueError, match=f"{name} must be {case.dtype} of shape .*, was list"):
        vectors._Outputs({name: [[1.0, -2.5]]}).read(case, (1, 2))
    wrong = np.uint16 if case.dtype == "float32" else np.float32
    with pytest.raises(ValueError, match=f"must be {case.dtype}"):
        vectors._Outputs({name: y.astype(wrong)}).read(case, (1, 2))
    np.save(tmp_path / f"{name}.npy", y.astype(np.float64))
    with pytest.raises(ValueError, match=name):
        folder.read(case, (1, 2))


def judged(case, out, unknown=()):
    truth = TRUTH[case.kind](case)
    given = {} if out is None else {case.name: out(truth.out) if callable(out) else out}
    return vectors._judged(case, truth.out, vectors._Outputs(given), unknown)


def test_outputs_that_are_missing_or_of_another_kind_are_not_judged():
    small = part(HALF, [0, 5])
    report = judged(small, None, ["rotation-hlf"])
    assert report.verdict == "not judged" and report.failure == Failure(
        f"there is no output {HALF.name!r}; there is 'rotation-hlf', which is no case", "", "write it, or take vectors of the suites that you support")  # fmt: skip
    assert judged(small, None).failure.reason == f"there is no output {HALF.name!r}"
    report = judged(small, np.zeros(3, np.float32))
    assert report.verdict == "not judged" and report.failure.fix == "write float32, in .npy little-endian, of y's shape"
    bits = part(CASES["rotation-half-bfloat16"], [0, 5])
    assert (
        judged(bits, np.zeros(3)).failure.fix == "write bfloat16, in .npy little-endian, as uint16 bits, of y's shape"
    )


def test_what_is_judged_is_said():
    report = judged(part(HALF, [0, 5]), lambda y: y.astype(np.float32))
    assert (report.verdict, report.precision, report.subject) == ("right", "rounded once", HALF.name)
    assert report.expected == f"rotation in float32, {HALF.rope!r}"
    plain = CASES["attention-unrotated"]
    assert (
        vectors._judged(plain, np.zeros(1), vectors._Outputs({}), ()).expected
        == "attention in float32, not rotated, causal=True"
    )
    nan = judged(
        part(HALF, [0, 5]), lambda y: np.where(np.arange(y.size).reshape(y.shape) == 3, np.nan, y).astype(np.float32)
    )
    assert nan.faults == ("not finite",) and nan.errors[0].absolute == math.inf and nan.findings[0].since == 0


def test_a_swap_of_the_order_is_equivalent():
    """Interleaved pairs that come out in halves: feature 2i at i, 2i + 1 at i + 16; and back."""
    order = [*range(0, 32, 2), *range(1, 32, 2)]
    report = judged(part(CASES["rotation-interleaved-float32"], [0, 5, 7]), lambda y: y[..., order].astype(np.float32))
    assert report.verdict == "equivalent" and 'in the order of "interleaved-to-half"' in report.notes[0]
    assert report.subject == "rotation-interleaved-float32"
    back = judged(
        part(CASES["rotation-interleaved-to-half-float32"], [0, 5, 7]),
        lambda y: y[..., np.argsort(order)].astype(np.float32),
    )
    assert back.verdict == "equivalent" and 'in the order of "interleaved"' in back.notes[0]


def test_positions_in_int32_turn_backwards():
    """2³¹ becomes −2³¹, in a program that keeps 32 bits."""
    case = part(HALF, [0, 5, 21, 22])
    assert case.inputs["positions"].tolist() == [0, 8, 2**31 - 1, 2**31]

    def backwards(y):
        theta = np.array([10000.0 ** (-i / 16) for i in range(16)])
        angle = np.array([0, 8, 2**31 - 1, -(2**31)], float)[:, None] * theta
        a, b = case.inputs["x"][..., :16], case.inputs["x"][..., 16:]
        turned = np.concatenate((a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)), axis=-1)
        return np.where(np.arange(4)[:, None] == 3, turned, y).astype(np.float32)

    (change,) = vectors._INT32.changes(HALF.rope, None)
    assert change.fields["place"](np.array([0, 8, 2**31 - 1, 2**31, 2**31 + 5])).tolist() == [
        0,
        8,
        2**31 - 1,
        -(2**31),
        5 - 2**31,
    ]
    report = judged(case, backwards)
    assert report.faults == ("positions in int32",) and report.findings[0].since == 2**31


@pytest.mark.parametrize("seed", range(4))
def test_what_is_wrong_at_the_last_position_alone_is_not_named_by_chance(seed):
    """There a float32 angle may be anything: every pair is turned by an angle of its own."""
    angle = np.random.default_rng(seed).uniform(0, 2 * np.pi, 16)
    a, b = HALF.inputs["x"][:, 22, :16], HALF.inputs["x"][:, 22, 16:]

    def spoilt(y):
        out = y.copy()
        out[:, 22] = np.concatenate(
            (a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)), axis=-1
        )
        return out.astype(np.float32)

    report = judged(HALF, spoilt)
    assert report.faults == ("unexplained",) and report.findings[0].since == 2**31


# --- Cases ---


def test_shapes_of_ones_own():
    assert Own(HALF.rope, 6, 3).heads == 6
    with pytest.raises(ValueError, match="key_heads must divide heads, 6, was 4"):
        Own(HALF.rope, 6, 4)
    assert Own(HALF.rope).last == 2**31 and Own(HALF.rope, max_position=99).last == 99
    grown = Rope(32, 10000.0, "half", scaling=DynamicNTK(2.0, 64, 500))
    assert Own(grown).last == 499 and Own(grown, max_position=100).last == 100


def test_gradients_are_three_cases_each():
    listed = {case.name: case for case in cases("gradients")}
    assert {case.kind for case in listed.values()} == {"rotation-backward", "attention-gradient", "linear-gradient"}
    for of in "qkv":
        case = listed[f"attention-gradient-causal-float32-d{of}"]
        assert case.kind == "attention-gradient" and case.options["of"] == of and case.inputs["g"].shape == (4, 24, 16)
        assert exam_of(case).kind is SOFTMAX
    assert exam_of(listed["linear-gradient-19-causal-float32-dq"]).kind is LINEAR_KIND
    truth = TRUTH["attention-gradient"](listed["attention-gradient-causal-float32-dq"])
    assert truth.out.shape == (4, 24, 16) and truth.size == pytest.approx(math.sqrt((truth.out**2).mean()))
    grades = {
        dtype: tuple(TRUTH["attention-gradient"](listed[f"attention-gradient-causal-{dtype}-dv"]).bounds)
        for dtype in ("float64", "float32")
    }
    assert grades == {"float64": (OWN, ANGLE32), "float32": (OWN,)}


# --- Errors ---


def test_errors_in_units_of_the_last_place():
    truth = Truth(np.zeros((1, 1, 3)), {}, np.array([[[1.0, 3.0, 0.0]]]), 0.0)
    off = np.array([[[2.0**-23, 2.0**-22, 2.0**-149]]])
    assert vectors._ulps(HALF, off, truth)[0, 0].tolist()[:2] == [
        1.0,
        1.0,
    ]  # from 1 to 2 in steps of 2⁻²³, then twice that
    assert vectors._ulps(HALF, off, truth)[0, 0, 2] == 1.0  # below the least normal number the steps stay
    half = CASES["rotation-half-float16"]
    assert vectors._ulps(half, np.array([[[2.0**-10, 2.0**-9, 2.0**-24]]]), truth)[0, 0].tolist() == [1.0, 1.0, 1.0]


def test_ranges_of_positions():
    case = replace(HALF, inputs={"positions": np.array([0, 1, 9, -10, 99, 100, 2**31])})
    rows = {name: np.flatnonzero(where).tolist() for name, where in vectors._ranges(case, 7)}
    assert rows == {
        "position 0": [0], "positions 1 to 9": [1, 2], "positions 10 to 99": [3, 4], "positions 100 to 999": [5],
        "positions 1000000000 to 9999999999": [6],
    }  # fmt: skip
    ((name, where),) = vectors._ranges(FLAT, 24)
    assert name == "all rows" and where.shape == (24,) and where.all()
    axes = replace(HALF, inputs={"positions": np.array([[0, 3], [0, 20]])})
    assert [name for name, _ in vectors._ranges(axes, 2)] == ["position 0", "positions 10 to 99"]


def test_error_rows_and_readings():
    case = replace(HALF, inputs={"positions": np.array([12, 0])})
    truth = Truth(np.zeros((1, 2, 2)), {"": Allowed(np.full((1, 2, 2), 2.0))}, np.ones((1, 2, 2)), 0.0)
    off = np.array([[[4.0, 1.0], [0.0, 2.0]]])
    first, second = vectors._error_rows(case, off, truth)
    assert (first.where, first.worst, first.typical, first.absolute) == ("position 0", 2.0**24, 2.0**23, 2.0)
    assert (second.where, second.absolute) == ("positions 10 to 99", 4.0)
    errors = vectors._readings(case, off, truth, True).errors
    assert (errors.place, errors.at.tolist(), errors.worst.tolist(), errors.beyond.tolist()) == (
        "position",
        [0, 12],
        [2.0, 4.0],
        [False, True],
    )
    assert errors.bounds["allowed"].tolist() == [2.0, 2.0]
    assert vectors._readings(case, off, truth, False).errors.beyond.tolist() == [False, False]
    tokens = vectors._readings(FLAT, off, truth, True).errors
    assert (tokens.place, tokens.at.tolist()) == ("token", [0, 1])


def test_what_float32_leaves_open():
    assert vectors._limits(HALF, "rounded once") == () and vectors._limits(FLAT, "float32 angle") == ()
    (note,) = vectors._limits(HALF, "float32 angle")
    assert (
        note == "a float32 angle may be anything beyond position 16777216 in the fastest pair: not decided there"
    )  # 2²⁴
    slow = replace(HALF, rope=Rope(2, 10000.0, "half", scaling=Linear(2.0**20)))
    assert vectors._limits(slow, "float32 angle") == ()  # half a turn is beyond all positions


def test_what_is_off_in_words():
    case = replace(HALF, inputs={"positions": np.array([5, 0, 300])})
    off = np.array([[[0.0, 4.0], [0.0, 0.0], [1.0, 2.0]]])
    truth = Truth(np.zeros((1, 3, 2)), {}, np.ones((1, 3, 2)), 0.0)
    words, since = vectors._described(case, off > 0.5, off, truth)
    assert since == 5 and words == (
        "3 of 6 numbers are off, the worst by 4 (3.36e+07 ulps) at (0, 0, 1); first at position 5, within what is allowed at 0; in 2 of 2 features"
    )
    words, since = vectors._described(FLAT, off > 0.5, off, truth)
    assert since is None and words.endswith("at (0, 0, 1)")
    assert "within" not in vectors._described(case, off >= 0, off, truth)[0]


def test_a_rotation_by_no_rope_is_x_itself():
    case = replace(part(HALF, [0, 5]), rope=None)
    truth = TRUTH["rotation"](case)
    assert (truth.out == case.inputs["x"]).all() and (truth.size == np.abs(case.inputs["x"])).all() and truth.error == 0
    assert not truth.loosest.any()


# --- What is wrong, in words ---


def test_a_wrong_result_has_crosses_and_a_right_one_has_none():
    for case in (HALF, FLAT):
        right, wrong = (judged(case, lambda out, size=size: (out * size).astype(np.float32)) for size in (1, 1.5))
        assert right.verdict == "right" and not right.readings.errors.beyond.any()
        assert wrong.verdict == "wrong" and wrong.readings.errors.beyond.any()
        rows = case.inputs["q" if case is FLAT else "x"].shape[-2]
        assert len(wrong.readings.errors.beyond) == len(wrong.readings.errors.worst) <= rows


def test_a_factor_is_measured_where_the_whole_head_turns():
    report = judged(HALF, lambda out: (1.25 * out).astype(np.float32))
    assert report.faults == ("attention factor unwanted",) and "1.25" in report.findings[0].evidence
    partial = CASES["rotation-suffix-half-float32"]  # here the lengths say nothing of the features that turn
    assert judged(partial, lambda out: (1.25 * out).astype(np.float32)).verdict == "wrong"
    lost = judged(
        HALF, lambda out: np.where(np.arange(out.size).reshape(out.shape) == 7, np.nan, out).astype(np.float32)
    )
    assert lost.verdict == "wrong" and "attention factor unwanted" not in lost.faults


def test_gradients_are_named_with_their_own_mistakes():
    made = {case.name: case for case in cases("gradients")}
    back = made["rotation-backward-interleaved-float32"]
    order = [*range(0, 32, 2), *range(1, 32, 2)]
    report = judged(back, lambda out: out[..., order].astype(np.float32))
    assert report.verdict == "wrong" and report.faults == ("another order of features",), "there is no other order here"
    for name in ("q", "k", "v"):
        case = made[f"attention-gradient-causal-float32-d{name}"]
        report = judged(case, lambda out: (-out).astype(np.float32))
        assert report.verdict == "wrong" and report.faults == ("gradient times a number",), report
