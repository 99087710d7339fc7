"""Every known mistake is rejected and named, in every dtype; nothing that is right ever is."""

import contextlib
import json
import pathlib
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from oracle_cases import DTYPES, by_the_sample_alone, cases, listed_fields, right, ropes, with_axes
from strategies import dtypes, ropes as any_rope

import pyrope
from pyrope import DynamicNTK, Linear, Llama3, Mismatch, Rope, YaRN, assert_rotation, check_rotation, frequencies
from pyrope.oracle import trials
from pyrope.oracle.floats import to_bfloat16, to_float16
from pyrope.oracle.recipes import BACKWARDS, recipe_of
from pyrope.oracle.rotation_faults import FAULTS

MADE = [name for name, fault in FAULTS.items() if fault.make]
TABLE = pathlib.Path(__file__).parent.parent / "docs/diagnosis.md"
HALF = Rope(64, 10000.0, "half")
EVERY_TRIAL = trials.trials
pytestmark = pytest.mark.usefixtures("needed_trials")


def judged_by(name, whole):
    """Whether a check makes the calls of special kinds, too: these mistakes show in nothing else."""
    by_calls = name in (trials.CONSECUTIVE, trials.POSITIONS, trials.MISREAD)
    return contextlib.nullcontext() if whole or by_calls else by_the_sample_alone()


def named(report):
    return {*report.faults, *(name for finding in report.findings for name in finding.alternatives)}


def figures(name):
    """How many cases of a fault there are, how many were rejected, and in how many it was named. One of them, another
    one for each fault, is tried with calls of special kinds, too."""
    reports, whole = [], MADE.index(name)
    for i, (rope, dtype, fn) in enumerate(listed := list(cases(name))):
        with judged_by(name, i == whole % len(listed)):
            reports.append(check_rotation(fn, rope, dtype=DTYPES[dtype]))
    for report in reports:
        assert len(report.findings) == 1 and len(report.findings[0].alternatives) <= 2, report
        assert max(map(len, str(report).splitlines())) <= 80
    return len(reports), sum(not r.ok for r in reports), sum(name in named(r) for r in reports)


def row(name, rejected=None, found=None):
    """The row of a fault in the docs, with its figures, if it has some."""
    fault = FAULTS[name]
    fields = {"shows": fault.symptom, "cause": fault.cause, "fix": fault.fix, "happened in": fault.happened}
    return listed_fields(name, fields | ({"rejected": rejected, "named": found} if rejected else {}))


@pytest.mark.parametrize("name", MADE)
def test_every_fault_is_rejected_and_named(name):
    count, rejected, found = figures(name)
    # Some are no faults in a dtype as narrow as theirs, and a running product hides in float32 where there are few pairs.
    assert count == {
        "recursive frequencies": 1,
        "bfloat16 input": 2,
        "float16 input": 1,
        "bfloat16 tables": 2,
        "float16 tables": 1,
        "bfloat16 results": 2,
        "float16 results": 1,
    }.get(name, 3)
    assert rejected == found == count
    expected = row(name, f"{rejected}/{count}", f"{found}/{count}")
    assert expected in TABLE.read_text().splitlines(), f"docs/diagnosis.md has another row, it should be:\n{expected}"


@pytest.mark.parametrize("name", MADE)
def test_with_another_rope_too(name):
    for rope, dtype, fn in cases(name, 1, {"bfloat16": 64}):
        with judged_by(name, False):
            report = check_rotation(fn, rope, dtype=DTYPES[dtype])
        assert not report.ok and name in named(report)


@pytest.mark.parametrize(
    "base, beyond", [(10001.0, ", from position 2 on by more than tests usually allow"), (5e5, "")]
)
def test_the_first_wrong_position_and_the_first_that_tests_see(base, beyond):
    """At base 10001 position 1 is off by 8e-6, within torch's atol of 1e-5, and position 2 by twice that."""

    def candidate(x, positions):
        angles = positions[:, None] * base ** -(np.arange(32) / 32)
        a, b = np.split(x.astype(np.float64), 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(x.dtype)

    (finding,) = check_rotation(candidate, HALF).findings
    assert "first at position 1," in finding.evidence and finding.since == (2 if beyond else 1)
    assert ("tests usually allow" in finding.evidence) == bool(beyond) and beyond in finding.evidence


def test_the_table_has_every_fault_and_no_other():
    listed = re.findall(r"^\| \*\*([^|*]+)\*\* \|", TABLE.read_text().partition("## The known mistakes")[2], re.M)
    assert listed == list(FAULTS)
    assert len(MADE) >= 70


ROPES = [*ropes(64), *ropes(128)[::3], *with_axes(64), Rope(2, 10000.0, "half"), Rope(256, 1e6, "half", 64)]


@pytest.mark.parametrize("rope", ROPES, ids=repr)
def test_no_right_variant_is_rejected(rope, monkeypatch):
    """In each dtype, two of them, and one with calls of special kinds, too; of one rope all are, and every length."""
    if rope == HALF:
        monkeypatch.setattr(trials, "trials", EVERY_TRIAL)
    for row, dtype in enumerate((*DTYPES.values(), np.float64)):
        for column, (kind, fn) in enumerate(right(rope).items()):
            turn = (row + column + ROPES.index(rope)) % 4
            if turn > 1 and rope != HALF:
                continue
            with judged_by("", turn == 0 or rope == HALF):
                report = check_rotation(fn, rope, dtype=dtype)
            assert report.verdict == "right" and report.precision, f"{kind}\n{report}"


@given(any_rope(), dtypes, st.sampled_from(["rounded once", "engine", "float32 angle", "low tables"]),
       st.sampled_from([None, None, 1, 7, 40, 4095, 10**6]))  # fmt: skip
def test_no_right_rope_is_rejected(rope, dtype, kind, max_position):
    report = check_rotation(right(rope)[kind], rope, dtype=dtype, max_position=max_position)
    assert report.verdict == "right", report


@settings(max_examples=20)
@given(any_rope(with_axes=False, layout=st.sampled_from(["half", "interleaved"])), st.integers(1, 6))
def test_small_errors_beyond_the_bound_are_rejected(rope, where):
    """One output of one position, off by four times what is allowed."""
    fn = right(rope)["rounded once"]
    start = 0 if rope.placement == "prefix" else rope.head_dim - rope.width

    def off(x, positions):
        y = fn(x, positions)
        y[..., positions == 2**where, start] *= 1 + 2.0**-20
        return y

    assert not check_rotation(off, rope, dtype=np.float32, grade="rounded once", max_position=64).ok


PAIRS = [
    ("wrong base", "positions one too high", {"theta": frequencies(Rope(64, 500000.0, "half")), "place": lambda m: m + 1}),
    ("wrong base", "direction", {"theta": frequencies(Rope(64, 500000.0, "half")), "block": BACKWARDS}),
    ("wrong pairing", "positions one too high", {"reads": recipe_of(Rope(64, 1e4, "interleaved")).reads, "writes": recipe_of(Rope(64, 1e4, "interleaved")).reads, "place": lambda m: m + 1}),
    ("attention factor unwanted", "bfloat16 positions", {"factor": 1.25, "round_position": to_bfloat16}),
    ("direction", "float16 inverse frequencies", {"block": BACKWARDS, "round_theta": to_float16}),
]  # fmt: skip


@pytest.mark.parametrize(("one", "two", "fields"), PAIRS, ids=[f"{a} and {b}" for a, b, _ in PAIRS])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_faults_at_once_are_both_named(one, two, fields, dtype):
    report = check_rotation(replace(recipe_of(HALF), **fields).candidate(), HALF, dtype=DTYPES[dtype])
    assert len(report.findings) == 2 and {one, two} <= named(report)


def test_a_fault_that_explains_nearly_everything_is_not_named():
    """Neither with one pair nor with one position that it does not predict."""
    other = recipe_of(Rope(64, 500000.0, "half"))
    theta = other.theta.copy()
    theta[20] *= 1.01
    assert check_rotation(replace(other, theta=theta).candidate(), HALF).faults == ("unexplained",)
    skips = replace(other, place=lambda m: np.where(m == 4096, 0, m))
    assert check_rotation(skips.candidate(), HALF).faults == ("unexplained",)


@pytest.mark.parametrize(
    "name", ["positions ignored", "consecutive positions assumed", "float16 positions", "float16 angle"]
)
def test_faults_that_can_be_told_apart_are(name):
    for dtype in DTYPES.values():
        for rope in (HALF, Rope(64, 10000.0, "interleaved", 16, "suffix")):
            finding = check_rotation(FAULTS[name].make(rope, dtype), rope, dtype=dtype).findings[0]
            assert (finding.fault, finding.alternatives) == (name, ())


@pytest.mark.parametrize(("base", "fault"), [(10000.0, "one position wrong"), (500000.0, "unexplained")])
def test_one_position_that_is_not_finite_is_seen(base, fault):
    """And no fault is named that does not predict it."""

    def fn(x, positions):
        y = pyrope.rotate(x, positions, Rope(64, base, "half"))
        y[..., positions == 4096, 5] = np.nan
        return y

    assert check_rotation(fn, HALF).faults == (fault,)


@pytest.mark.parametrize("rope", [rope for rope in ropes(64) if rope.base != 150000.0], ids=repr)
def test_another_base_is_found_under_every_rescaling(rope):
    for dtype in (np.float32, DTYPES["bfloat16"]):
        report = check_rotation(right(replace(rope, base=150000.0))["float32 angle"], rope, dtype=dtype)
        assert report.faults == ("wrong base",) and "150000" in report.findings[0].evidence


def test_a_skipped_head_does_not_hide_the_base():
    def broken(x, positions):
        y = right(Rope(64, 500000.0, "half"))["engine"](x, positions)
        if x.ndim > 2:
            y[..., 1:, :, :] = x[..., 1:, :, :]
        return y

    assert set(check_rotation(broken, HALF).faults) == {"only the first head rotated", "wrong base"}


def test_three_faults_at_once_are_rejected():
    fields = {
        "theta": frequencies(Rope(64, 500000.0, "half")),
        "place": lambda m: m + 3,
        "block": BACKWARDS,
        "factor": 1.3,
    }
    report = check_rotation(replace(recipe_of(HALF), **fields).candidate(), HALF)
    assert report.faults == ("unexplained",) and report.findings[0].cause == "not among the known mistakes"
    assert "the factor is 1.3" in report.findings[0].evidence and "offset is 3" in report.findings[0].evidence


@pytest.mark.parametrize(("expected", "given", "words"), [
    ("interleaved", "interleaved-to-half", "pairs are written half, expected was interleaved"),
    ("interleaved-to-half", "interleaved", "pairs are written interleaved, expected was interleaved-to-half"),
])  # fmt: skip
def test_a_permuted_result_is_equivalent(expected, given, words):
    for dtype in DTYPES.values():
        ropes_ = [Rope(64, 10000.0, layout, 32, "suffix", scaling=YaRN(4.0, 4096)) for layout in (expected, given)]
        report = check_rotation(right(ropes_[1])["engine"], ropes_[0], dtype=dtype)
        assert report.verdict == "equivalent" and report.ok and report.precision
        assert words in report.notes[0] and "queries and keys" in report.notes[0]


def test_a_conjugated_result_is_equivalent_and_an_offset_is_not():
    def conjugated(x, positions):
        y = pyrope.rotate(x, positions, HALF)
        y[..., 32:] *= -1
        return y

    report = check_rotation(conjugated, HALF)
    assert report.verdict == "equivalent" and "32 with the other sign" in report.notes[0]
    assert check_rotation(lambda x, m: pyrope.rotate(x, m + 4, HALF), HALF).faults == ("positions shifted",)
    permuted_by_position = check_rotation(
        lambda x, m: np.where((m == 64)[:, None], x[..., ::-1], pyrope.rotate(x, m, HALF)), HALF
    )
    assert permuted_by_position.verdict == "wrong"


@pytest.mark.parametrize("base", [10001.0, 123456.0, 1e12])
def test_the_other_base_is_measured(base):
    evidence = check_rotation(right(Rope(64, base, "half"))["engine"], HALF).findings[0].evidence
    assert f"base {base:g} instead of 10000" in evidence


def test_grades_are_asked_for():
    fn = right(HALF)["float32 angle"]
    assert_rotation(fn, HALF, grade="float32 angle")
    report = check_rotation(fn, HALF, grade="rounded once")
    assert report.faults == ("coarser than asked",) and report.precision == "float32 angle"
    assert report.findings[0].since is not None
    with pytest.raises(ValueError, match="grade must be one of 'rounded once'"):
        check_rotation(fn, HALF, grade="perfect")


def test_bfloat16_says_what_it_cannot_tell():
    report = check_rotation(right(HALF)["engine"], HALF, dtype=DTYPES["bfloat16"], max_position=60)
    assert any("cannot tell a float32 angle" in note for note in report.notes)
    assert not check_rotation(right(HALF)["engine"], HALF, dtype=DTYPES["bfloat16"]).notes


def test_assert_raises_with_the_report():
    assert assert_rotation(right(HALF)["engine"], HALF) is None
    with pytest.raises(Mismatch, match="positions one too low") as caught:
        assert_rotation(lambda x, m: pyrope.rotate(x, m - 1, HALF), HALF)
    assert caught.value.report.findings[0].since == 0
    assert not any("__tracebackhide__" not in entry.locals for entry in caught.traceback[1:2])


def test_since_is_where_tests_would_notice():
    """float16 positions are exact up to 2048; 2049 is the first that is not."""
    report = check_rotation(replace(recipe_of(HALF), round_position=to_float16).candidate(), HALF)
    assert report.findings[0].since == 2049 and report.precision == "low-precision angle"
    clamped = check_rotation(replace(recipe_of(HALF), place=lambda m: np.minimum(m, 511)).candidate(), HALF)
    assert clamped.findings[0].since == 512


def test_errors_are_listed_by_decade():
    rows = check_rotation(right(HALF)["float32 angle"], HALF).errors
    assert [r.where for r in rows][:3] == ["position 0", "positions 1 to 9", "positions 10 to 99"] and len(rows) == 7
    assert rows[0].worst == 0 and rows[1].worst < 8 < rows[-1].worst and all(r.typical <= r.worst for r in rows)


def test_length_dependent_ropes_are_tried_within_their_length():
    largest = []
    rope = Rope(64, 10000.0, "half", scaling=DynamicNTK(2.0, 2048, 8192))

    def table_of_the_call(x, positions):  # as transformers does it, without its state
        largest.append(int(positions.max()))
        return pyrope.rotate(x, positions, rope.at(int(positions.max()) + 1))

    assert check_rotation(table_of_the_call, rope).verdict == "right"
    assert max(largest) == 8191
    assert check_rotation(table_of_the_call, Rope(64, 10000.0, "half")).faults == ("depends on the length",)


def test_a_table_that_may_depend_on_the_length_may_not_be_wrong():
    rope = Rope(64, 10000.0, "half", scaling=DynamicNTK(2.0, 2048, 8192))
    other = replace(rope, base=500000.0)
    report = check_rotation(lambda x, m: pyrope.rotate(x, m, other.at(int(m.max()) + 1)), rope)
    assert report.faults == ("wrong base",)


def test_a_length_dependent_rope_is_no_excuse():
    """A candidate whose table depends on the length, as it should, but is another one."""
    rope = Rope(64, 10000.0, "half", scaling=DynamicNTK(2.0, 2048))
    other = replace(rope, base=20000.0)

    def fn(x, positions):
        return pyrope.rotate(x, positions, other.at(int(positions.max()) + 1))

    for length in (2049, 3000, 8192):  # seen to depend on it, or not
        assert check_rotation(fn, rope.at(length)).faults == ("wrong base",)
        assert check_rotation(fn, other.at(length)).verdict == "right"


@pytest.mark.parametrize(("scaling", "instead", "words"), [
    (None, YaRN(32.0, 4096, attention_factor=1.0, truncate=False), "yarn, base 10000, factor 32"),
    (None, Llama3(8.0, 1.0, 4.0, 8192), "llama3, base 10000, factor 8"),
    (YaRN(8.0, 4096), YaRN(8.0, 4096, 24.0, 2.0), "yarn, base 10000, factor 8, ramp from pair"),
    (YaRN(8.0, 4096), YaRN(8.0, 2048), "original length 2048"),
    (Llama3(8.0, 1.0, 4.0, 8192), Llama3(16.0, 2.0, 7.0, 5000), "llama3, base 10000, factor 16, ramp from frequency"),
    (Linear(2.0), Llama3(4.0, 1.0, 4.0, 8192), "low 1, high 4, original length 8192"),
])  # fmt: skip
def test_a_rule_with_other_numbers_is_told(scaling, instead, words):
    for dtype in DTYPES.values():
        fn, expected = right(replace(HALF, scaling=instead))["float32 angle"], replace(HALF, scaling=scaling)
        (finding,) = check_rotation(fn, expected, dtype=dtype).findings
        assert finding.fault == "another rescaling" and words in re.sub(" ± [^ ,;]+", "", finding.evidence), finding


def test_a_rule_that_brings_its_factor_is_told_with_it():
    report = check_rotation(right(replace(HALF, scaling=YaRN(32.0, 4096)))["engine"], HALF)
    assert set(report.faults) == {"another rescaling", "attention factor unwanted"}


def test_axes_are_seen_only_where_they_differ():
    """What text hides: rows of equal positions are right whatever axis turns a pair."""
    for rope in with_axes(64):
        count = rope.axes.count
        fn = FAULTS["axes in another order"].make(rope)
        x, text = np.ones((count, 5, 64)), np.repeat(np.arange(5)[None], count, axis=0)
        assert np.allclose(fn(x, text), pyrope.rotate(x, text, rope), atol=1e-12)
        (finding,) = check_rotation(fn, rope).findings
        assert finding.fault == "axes in another order" and finding.since == 1, finding


def test_each_order_of_axes_is_told():
    rope = with_axes(64)[0]
    for order in ((0, 2, 1), (2, 1, 0), (1, 2, 0)):
        fn = lambda x, m, order=order: pyrope.rotate(x, m[list(order)], rope)  # noqa: E731
        assert f"axes {order} for (0, 1, 2)" in check_rotation(fn, rope).findings[0].evidence
    for axis in (0, 1, 2):
        fn = lambda x, m, axis=axis: pyrope.rotate(x, m[axis], replace(rope, axes=None))  # noqa: E731
        report = check_rotation(fn, rope)
        assert report.faults == ("one axis for all pairs",) and f"axis {axis} turns" in report.findings[0].evidence


@pytest.mark.parametrize("name", ["wrong base", "wrong pairing", "scaling ignored", "positions one too high", "direction",
                                  "bfloat16 positions", "rows differ", "heads read as positions", "not finite"])  # fmt: skip
def test_every_other_fault_is_named_with_axes_too(name):
    ways = zip(with_axes(64), [*DTYPES.values()] * 2, strict=True)  # each dtype with two of the six ropes
    made = [(rope, dtype, FAULTS[name].make(rope, dtype)) for rope, dtype in ways]
    for i, (rope, dtype, fn) in enumerate([case for case in made if case[2] is not None]):
        with judged_by(name, i == 0):
            report = check_rotation(fn, rope, dtype=dtype)
        assert name in named(report) and len(report.findings) == 1, report


def test_two_faults_of_which_one_is_of_the_axes_are_both_named():
    rope = with_axes(64)[0]
    fn = lambda x, m: pyrope.rotate(x, m[[0, 2, 1]], replace(rope, base=10000.0))  # noqa: E731
    assert set(check_rotation(fn, rope).faults) == {"axes in another order", "wrong base"}


def test_expectations_are_checked():
    fn = right(HALF)["engine"]
    with pytest.raises(TypeError, match="rope must be a Rope"):
        check_rotation(fn, "llama")
    with pytest.raises(ValueError, match="fix it first with rope.at"):
        check_rotation(fn, Rope(64, 1e4, "half", scaling=DynamicNTK(2.0, 2048)))


def test_faults_that_change_nothing_are_not_made():
    assert FAULTS["attention factor missing"].make(HALF) is None
    assert FAULTS["whole head rotated"].make(HALF) is None
    assert FAULTS["YaRN betas swapped"].make(Rope(64, 1e4, "half", scaling=Llama3(8.0, 1.0, 4.0, 8192))) is None
    assert FAULTS["scaling ignored"].make(Rope(64, 1e4, "half", scaling=Linear(1.0))) is None
    assert FAULTS["wrong pairing"].make(Rope(2, 1e4, "half")) is None
    assert FAULTS["positions in int16"].make(Rope(64, 1e4, "half", scaling=DynamicNTK(2.0, 2048, 4096))) is None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_report_is_json_whatever_comes_out(value):
    report = check_rotation(lambda x, m: np.full_like(x, value), HALF)
    told = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert told["ok"] is False and told["errors"][0]["worst"] is None
    json.dumps(pyrope.identify(lambda x, m: np.full_like(x, value), 64).to_dict(), allow_nan=False)


@pytest.mark.parametrize("factor", [1.003, 1.0035, 1.004, 1.0045, 1.006])
def test_a_fault_no_better_than_the_truth_is_not_named(factor):
    """In bfloat16 a base of 9999.85 is within the roundings of a factor of 1.004, and so is the truth."""
    fn = replace(recipe_of(HALF), factor=factor).candidate(low_tables=True)
    report = check_rotation(fn, HALF, dtype=DTYPES["bfloat16"])
    assert report.ok or set(report.faults) <= {"unexplained", "attention factor unwanted"}, report


@pytest.mark.parametrize(
    ("base", "dtype"), [(10000.1, "bfloat16"), (10000.1, "float32"), (10000.03, "float32"), (10001.0, "bfloat16")]
)
def test_a_base_that_is_nearly_right_is_named(base, dtype):
    for size in (64, 128):
        report = check_rotation(
            recipe_of(Rope(size, base, "half")).candidate(), Rope(size, 10000.0, "half"), dtype=DTYPES[dtype]
        )
        assert report.faults == ("wrong base",), report
        assert set(report.findings[0].alternatives) <= {"recursive frequencies"}  # whose first step is off


@pytest.mark.parametrize("length", [37, 3000, 40960, 100001, 131072])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lengths_are_measured(length, dtype):
    for name, place, told in (
        ("table clamped at its end", lambda m: np.minimum(m, length - 1), f"at row {length - 1};"),
        ("positions modulo a length", lambda m: m % length, f"modulo {length};"),
    ):
        fn = replace(recipe_of(HALF), place=place).candidate()
        (finding,) = check_rotation(fn, HALF, dtype=DTYPES[dtype], max_position=2**18).findings
        assert finding.fault == name and told in finding.evidence, finding


@pytest.mark.parametrize(("place", "fault"), [
    (lambda m: m * 1.00001, "another rescaling"), (lambda m: m + (m > 65535), "wrong beyond a position"),
    (lambda m: np.where(m > 65536, m // 2 * 2, m), "unexplained"),
])  # fmt: skip
def test_what_is_off_in_the_first_pair_is_no_fast_sine(place, fault):
    rope = Rope(128, 10000.0, "half")  # whose last pairs may drift as far as this
    for dtype in (np.float32, DTYPES["bfloat16"]):
        report = check_rotation(replace(recipe_of(rope), place=place).candidate(), rope, dtype=dtype)
        assert report.faults == (fault,), report


def test_frequencies_of_six_digits_are_no_running_product():
    theta = np.array([float(f"{t:.6g}") for t in frequencies(HALF)])
    assert check_rotation(replace(recipe_of(HALF), theta=theta).candidate(), HALF).faults == ("unexplained",)


@pytest.mark.parametrize("name", ["bfloat16 tables", "bfloat16 results", "float16 tables", "float16 results"])
def test_narrow_tables_and_narrow_results_are_told_apart(name):
    for dtype in (np.float16, np.float32, np.float64):
        for rope in (HALF, replace(HALF, scaling=YaRN(8.0, 4096))):
            fn = FAULTS[name].make(rope, dtype)
            assert (fn is None) == (name.startswith("float16") and dtype is np.float16)
            assert fn is None or check_rotation(fn, rope, dtype=dtype).faults == (name,)


@pytest.mark.parametrize(("one", "two"), [("consecutive positions assumed", "wrong base"), ("float16 positions", "wrong base"),
                                          ("positions ignored", "direction")])  # fmt: skip
def test_two_faults_of_which_one_shows_in_the_behaviour_are_both_named(one, two):
    (a,), (b, *_) = FAULTS[one].changes(HALF), FAULTS[two].changes(HALF)
    report = check_rotation(replace(recipe_of(HALF), **a.fields, **b.fields).candidate(), HALF)
    assert set(report.faults) == {one, two}, report


def test_the_direction_is_told_of_what_is_not_explained():
    fields = {
        "theta": frequencies(Rope(64, 50000.0, "half")),
        "place": lambda m: m + 1,
        "block": BACKWARDS,
        "factor": 1.1,
    }
    (finding,) = check_rotation(replace(recipe_of(HALF), **fields).candidate(), HALF).findings
    assert finding.fault == "unexplained" and "it turns the other way" in finding.evidence


@pytest.mark.parametrize("sections", [(12, 8, 12), (7, 12, 13), (8, 24, 0)])
def test_other_sections_are_measured(sections):
    rope = with_axes(64)[0]
    other = replace(rope, axes=replace(rope.axes, sections=sections))
    for dtype in DTYPES.values():
        (finding,) = check_rotation(lambda x, m: pyrope.rotate(x, m, other), rope, dtype=dtype).findings
        assert finding.fault == "other sections" and "pairs turn with another axis" in finding.evidence, finding
