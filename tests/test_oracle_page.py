"""Reports as pages: everything is escaped, nothing is loaded, and the pictures show the numbers that were read."""

import dataclasses
import html.parser
import json
import math
import re

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as npst

import pyrope
from pyrope import LongRoPE, Rope, check_attention, check_rotation, identify
from pyrope.oracle import (
    attention_faults,
    backward_faults,
    drawings,
    gallery,
    page,
    report as reports,
    rotation_faults,
    sharding,
)
from pyrope.oracle.drawings import Errors, Frequencies, Markup, element
from pyrope.oracle.readings import errors_by_place
from pyrope.oracle.report import ErrorRow, Failure, Finding, Report

ROPE = Rope(32, 10000.0, "half")


def rotated(x, positions, theta):
    """Halves turned by positions times θ, in float64."""
    angle = positions[:, None] * np.asarray(theta)
    a, b = np.split(x.astype(np.float64), 2, axis=-1)
    turned = (a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle))
    return np.concatenate(turned, axis=-1).astype(x.dtype)


THETA = 10000.0 ** -(np.arange(16) / 16)


@pytest.fixture(scope="module")
def right():
    return check_rotation(lambda x, m: rotated(x, m, THETA), ROPE)


@pytest.fixture(scope="module")
def one_pair():
    """Pair 5 turns twice as fast."""
    theta = THETA * np.where(np.arange(16) == 5, 2, 1)
    return check_rotation(lambda x, m: rotated(x, m, theta), ROPE)


class Parts(html.parser.HTMLParser):
    """The tags of a page, their attributes, and the text between them."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.words = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.words.append(data)

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    @property
    def text(self):
        return "".join(self.words)


# ── Markup ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def every_field(words):
    """A report in which each text is the given words."""
    finding = Finding(words, words, words, words, 3, (words,), words)
    errors = (ErrorRow(words, 1.0, 0.5, 0.1),)
    side = drawings.Side(words, words, words, False)
    at, zeros = np.arange(2), np.zeros(2)
    errors_read = Errors(words, at, zeros, zeros > 1, {words: zeros + 1})
    operators = drawings.Operators(words, np.eye(2), np.eye(2), np.eye(2) > 2)
    readings = drawings.Readings(words, (side,), operators, None, errors_read)
    return Report(words, words, "wrong", (finding,), words, errors, (words,), None, readings)


@given(st.text(max_size=40).map("<{}>x".format))
def test_text_of_a_report_never_becomes_markup(words):
    plain, other = (Parts(page.document(text, page.report_section(every_field(text)))) for text in ("x", words))
    assert other.tags == plain.tags and len(other.attributes) == len(plain.attributes)
    assert other.text.count(page.printable(words)) >= 15


HOSTILE = "</style></title><script>alert(1)</script><img src=x onerror=alert(1)>\" ' & <!-- ]]>"


def test_what_a_candidate_raises_is_text():
    failure = Failure(HOSTILE, HOSTILE, HOSTILE, RuntimeError(HOSTILE))
    text = page.document(HOSTILE, page.report_section(Report(HOSTILE, HOSTILE, "not judged", failure=failure)))
    parts = Parts(text)
    assert not {"script", "img"} & set(parts.tags) and parts.tags.count("style") == 2
    assert parts.text.count(HOSTILE) >= 5


def test_markup_is_made_of_escaped_text_alone():
    assert element("p", "<b>", Markup("<i></i>"), title='"<') == '<p title="&quot;&lt;">&lt;b&gt;<i></i></p>'
    assert isinstance(element("p"), Markup) and element("p", class_=None) == "<p></p>"


def test_a_page_loads_nothing(right, one_pair):
    for report in (right, one_pair):
        text = page.document("title", page.report_section(report))
        parts = Parts(text)
        assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(parts.tags)
        addresses = [value for name, value in parts.attributes if name in ("src", "href", "xlink:href", "srcset")]
        assert all(address.startswith("https://github.com/") for address in addresses)
        assert not re.search(r"url\(|@import|javascript:", text)
        assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in parts.attributes


def test_issues_are_links():
    text = page.linked("vllm#590 and nobody#1, <b>#2, transformers#32330")
    assert re.findall(r'href="([^"]*)"', text) == [
        "https://github.com/vllm-project/vllm/issues/590",
        "https://github.com/huggingface/transformers/issues/32330",
    ]
    assert Parts(text).text == "vllm#590 and nobody#1, <b>#2, transformers#32330"


def test_every_issue_of_the_catalogues_can_be_linked():
    catalogues = (
        rotation_faults.FAULTS,
        attention_faults.ATTENTION,
        attention_faults.LINEAR,
        attention_faults.BEHAVIOUR,
        backward_faults.BACKWARD,
    )
    faults = [*sharding.FAULTS, *(fault for catalogue in catalogues for fault in catalogue.values())]
    named = {name for fault in faults for name in re.findall(r"([\w.-]+)#\d", fault.happened)}
    assert len(named) > 10 and named <= page.REPOSITORIES.keys()
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", place) for place in page.REPOSITORIES.values())


def test_a_finding_says_where_it_happened(one_pair):
    report = check_rotation(lambda x, m: rotated(x, m, THETA), dataclasses.replace(ROPE, layout="interleaved"))
    assert report.findings[0].happened == "vllm#590, llama.cpp#22611"
    assert "https://github.com/ggml-org/llama.cpp/issues/22611" in page.report_section(report)
    assert "happened in" not in page.report_section(one_pair)  # an unexplained one


# ── Files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_page_is_written_as_a_whole(tmp_path):
    file = tmp_path / "page.html"
    page.write_page(file, "title \ud800", element("p", "text θ \udfff"))
    assert r"text θ \udfff" in file.read_text("utf-8") and list(tmp_path.iterdir()) == [file]


def test_a_page_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a page must be a .html or .htm file, was 'report.md'"):
        page.check_file("report.md")
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        page.check_file(tmp_path / "none" / "report.html")


# ── A report and its readings ────────────────────────────────────────────────────────────────────────────────────────


def test_readings_are_no_part_of_the_value(right):
    bare = dataclasses.replace(right, readings=None)
    assert right.readings is not None and bare == right and hash(bare) == hash(right) and repr(bare) == repr(right)
    assert "readings" not in right.to_dict()
    assert bare.to_dict() == right.to_dict() and json.loads(json.dumps(right.to_dict()))["verdict"] == "right"
    found = identify(lambda x, m: rotated(x, m, THETA), 32)
    assert found.readings is not None and "readings" not in found.to_dict()
    assert dataclasses.replace(found, readings=None) == found


def sides(report):
    return {side.name: side for side in report.readings.sides}


def test_a_right_rotation_has_the_same_on_both_sides(right):
    assert all(side.same for side in right.readings.sides)
    assert sides(right)["rule"].measured == "base 10000" and sides(right)["pairs"].measured == "half"
    assert not right.readings.operators.differing.any() and not right.readings.errors.beyond.any()
    assert "✓" in page.report_section(right) and "differs" not in page.report_section(right)


def test_what_differs_is_said_and_framed(one_pair):
    read = one_pair.readings
    assert {name for name, side in sides(one_pair).items() if not side.same} == {"frequencies", "rule", "precision"}
    framed = np.zeros((32, 32), bool)
    framed[np.ix_([5, 21], [5, 21])] = True
    assert (read.operators.differing == framed).all()
    assert drawings.differing(read.frequencies).tolist() == [i == 5 for i in range(16)]
    assert read.errors.beyond[read.errors.at > 0].mean() > 0.9 and "The pairs that differ are framed" in str(
        page.report_section(one_pair)
    )


@pytest.mark.parametrize(
    "candidate, name, measured",
    [
        (lambda x, m: rotated(x, m, -THETA), "direction", "-1"),
        (lambda x, m: rotated(x, m + 1, THETA), "position offset", "1"),
        (lambda x, m: 2 * rotated(x, m, THETA), "factor", "2"),
        (lambda x, m: rotated(x, m, THETA[:16] ** 1.5), "rule", "base 1000000"),
        (lambda x, m: rotated(x, m, 0 * THETA), "features that turn", "0 of 32"),
        (lambda x, m: gallery.roformer_repeat(x, m), "pairs", "interleaved"),
    ],
)
def test_sides_name_what_was_measured(candidate, name, measured):
    side = sides(check_rotation(candidate, ROPE))[name]
    assert not side.same and side.measured.replace("1e+06", "1000000").startswith(measured)


def test_the_operator_is_the_one_that_the_candidate_has(one_pair):
    read = one_pair.readings.operators
    m = int(read.position)
    units = np.eye(32, dtype=np.float32)[:, None]
    theta = THETA * np.where(np.arange(16) == 5, 2, 1)
    assert np.allclose(read.measured, rotated(units, np.array([m]), theta)[:, 0].T, atol=1e-6)
    assert np.allclose(read.expected, pyrope.rotation_matrix(m, ROPE), atol=1e-12)


def test_bounds_hold_for_a_right_candidate_and_errors_are_those_of_the_report(right, one_pair):
    for report in (right, one_pair):
        errors = report.readings.errors
        assert (np.diff(errors.at) > 0).all() and list(errors.bounds) == [
            "rounded once", "tables or products in x's dtype", "float32 angle"
        ]  # fmt: skip
        assert errors.worst.max() == pytest.approx(max(row.absolute for row in report.errors))
    loosest = right.readings.errors.bounds["float32 angle"]
    assert (right.readings.errors.worst <= loosest).all() and loosest[-1] > 100 * loosest[1]


@given(st.data(), st.integers(1, 6))
def test_errors_are_the_largest_at_each_place_in_order(data, n):
    at = np.array(data.draw(st.lists(st.integers(0, 99), min_size=n, max_size=n, unique=True)))
    shape = (2, n, 3)
    off, most = (data.draw(npst.arrays(np.float64, shape, elements=st.floats(0, 9))) for _ in range(2))
    errors = errors_by_place("position", at, off, {"g": most, "one": 1.0}, off > most)
    assert errors.at.tolist() == sorted(at.tolist())
    for k, m in enumerate(errors.at):
        row = at.tolist().index(m)
        every = [(off[i, row, j], most[i, row, j]) for i in range(2) for j in range(3)]
        assert errors.worst[k] == max(a for a, _ in every) and errors.bounds["g"][k] == max(b for _, b in every)
        assert errors.beyond[k] == any(a > b for a, b in every) and errors.bounds["one"][k] == 1


def test_several_axes_and_wide_heads_have_pages():
    axes = pyrope.Axes("sections", (4, 6, 6))
    rope = Rope(32, 1e6, "half", axes=axes)
    report = check_rotation(lambda x, m: pyrope.rotate(x, m[[0, 2, 1]], rope), rope)
    read = report.readings.operators
    assert read.position.count(",") == 2 and read.differing.any()
    assert Parts(page.report_section(report)).tags.count("svg") >= 4


def test_a_candidate_that_fails_later_has_a_verdict_and_no_pictures():
    calls = []

    def candidate(x, m):
        calls.append(len(x))
        return rotated(x, m, THETA)

    check_rotation(candidate, ROPE)
    enough = len(calls) - 1

    def failing(x, m):
        calls.append(len(x))
        if len(calls) > enough:
            raise RuntimeError("no more")
        return rotated(x, m, THETA)

    calls.clear()
    report = check_rotation(failing, ROPE)
    assert report.verdict == "right" and report.readings is None
    assert "Expected and measured" not in page.report_section(report)


def test_attention_has_its_errors_by_token():
    report = check_attention(lambda q, k, v: pyrope.attention(q, k, v, causal=True, scale=1.0))
    errors = report.readings.errors
    assert report.faults == ("scale missing",) and errors.place == 'token of the question "random"'
    assert not errors.beyond[0] and errors.beyond[1:].all() and len(errors.at) == 24
    assert errors.worst.max() == pytest.approx(report.errors[0].absolute)
    text = Parts(page.report_section(report)).text
    assert "Errors by token" in text and "R(m)" not in text


def without_a_minus(x, positions):
    """Halves, with both sines added: no rotation."""
    angle = positions[:, None] * THETA
    a, b = np.split(x.astype(np.float64), 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate((a * cos + b * sin, b * cos + a * sin), axis=-1).astype(x.dtype)


@pytest.mark.parametrize(
    "candidate, reason",
    [(without_a_minus, "the pairs do not turn"), (lambda x, m: np.full_like(x, np.nan), "NaN or infinity")],
)
def test_frequencies_of_no_rotation_are_not_shown(candidate, reason):
    report = check_rotation(candidate, ROPE)
    assert sides(report)["frequencies"].measured == f"cannot be read: {reason}"
    assert not {"direction", "position offset", "factor", "rule"} & sides(report).keys()
    assert report.readings.frequencies is None and report.readings.operators is not None
    assert "by pair" not in Parts(page.report_section(report)).text


def test_pairs_that_are_missing_are_counted():
    """Feature 3 is NaN: its pair, (3, 19), cannot be read, the 15 others can."""

    def candidate(x, positions):
        y = rotated(x, positions, THETA)
        y[..., 3] = np.nan
        return y

    shown = sides(check_rotation(candidate, ROPE))
    assert shown["pairs"].measured == "half, without 1 of the 16 pairs"
    assert shown["frequencies"].expected.endswith(", of 16 pairs")
    assert shown["frequencies"].measured.endswith(", of 15 pairs")


def test_no_rotation_is_identified_as_none():
    found = identify(without_a_minus, 32)
    assert found.frequencies == () and len(found.pairs) == 16 and found.readings.frequencies is None
    assert ("frequencies", "cannot be read: the pairs do not turn") in found.rows()
    assert not any(name in ("direction", "offset", "factor", "rule") for name, _ in found.rows())
    assert "no rotation" in Parts(found._repr_html_()).text.splitlines()[-1]
    assert found.rows()[-1][1].startswith("no rotation: within the pairs R is off by ")
    odd = identify(lambda x, m: np.concatenate((x[..., :1] * 2, rotated(x, m, THETA)[..., 1:]), -1), 32)
    assert re.search(r"no rotation: \d features belong to no pair, and within", odd.rows()[-1][1])


def test_errors_that_are_not_finite_have_no_numbers():
    rows = (ErrorRow("here", math.nan, math.nan, math.nan), ErrorRow("there", 3.0, 1.0, 2e-7))
    finding = Finding("not finite", "x", "y", "z")
    text = page.report_section(Report("rotation", "x", "wrong", (finding,), errors=rows))
    cells = [Parts(cell).text for cell in re.findall("<td.*?</td>", text)]
    assert cells == ["here", "", "not finite", "—", "—", "there", "", "2e-07", "3", "1"]
    assert text.count('class="bar"') == 1


def test_the_gallery_has_a_line_for_each_report(right, one_pair):
    rows = [gallery.Row("one", right, ROPE, True), gallery.Row("two", one_pair, None, True)]
    text = page.gallery_section(rows)
    lines = [
        [Parts(cell).text for cell in re.findall("<span>.*?</span>", line)]
        for line in re.findall("<summary>(.*?)</summary>", text)
    ]
    worst = [max(row.absolute for row in report.errors) for report in (right, one_pair)]
    assert lines == [["one", "✓ right", f"{worst[0]:.2g}", "half 10000"],
                     ["two", "✗ wrong", f"{worst[1]:.2g}", "unexplained"]]  # fmt: skip
    assert all(str(page.report_section(report, "h3")) in text for report in (right, one_pair))


def test_identification_has_a_page():
    found = identify(lambda x, m: rotated(x, m, THETA), 32)
    text = Parts(found._repr_html_()).text
    assert "rotation of 32 features" in text and "base 10000" in text and "identified" in text
    title = Parts(re.search("<h1.*?</h1>", found._repr_html_())[0]).text
    assert found.explanations[0].startswith("base 10000, not rescaled (NTK") and title.endswith(", not rescaled")
    unknown = identify(lambda x, m: x * (1 + m[:, None] % 2).astype(x.dtype), 32)
    assert "rotation of 32 features" in Parts(unknown._repr_html_()).text


def test_a_notebook_shows_the_same_as_the_page(one_pair):
    fragment = one_pair._repr_html_()
    assert fragment.startswith('<div class="pyrope">') and fragment in one_pair.to_html()
    assert "<html" not in fragment and all(
        rule.strip().startswith((".pyrope", "@media", "}")) for rule in re.findall(r"(?:^|\})([^{}]*)\{", page._STYLE)
    ), "a style must not leave the report"


# ── The pictures ─────────────────────────────────────────────────────────────────────────────────────────────────────


def cells(svg):
    """(row, column) -> colour of every drawn cell."""
    paths = re.findall(r'<path d="([^"]*)" fill="(#\w+)"></path>', svg)
    return {(int(i), int(j)): fill for d, fill in paths for j, i in re.findall(r"M(\d+) (\d+)h1v1h-1z", d)}


def channels(colour):
    return tuple(int(colour[k : k + 2], 16) for k in (1, 3, 5))


MATRICES = npst.arrays(
    np.float64, st.integers(1, 9).map(lambda n: (n, n)), elements=st.floats(-3, 3, allow_subnormal=False)
)


@given(MATRICES)
def test_zero_is_white_and_signs_are_red_and_blue(matrix):
    drawn = cells(drawings.operator_drawing("", matrix, 2.0))
    for place, value in np.ndenumerate(matrix):
        if abs(value) < 2 / 24 - 1e-9:
            assert place not in drawn
        elif abs(value) > 2 / 24 + 1e-9:
            red, _, blue = channels(drawn[place])
            assert red > blue if value > 0 else blue > red
    strongest = {channels(drawn[place]) for place, value in np.ndenumerate(matrix) if abs(value) >= 2}
    assert strongest <= {drawings._RED, drawings._BLUE}


def test_what_is_not_finite_is_grey():
    assert cells(drawings.operator_drawing("", np.array([[np.nan, 1.0], [np.inf, 0.0]]), 1.0)) == {
        (0, 0): "#8a8a8a", (0, 1): "#b2182b", (1, 0): "#8a8a8a",
    }  # fmt: skip


@given(npst.arrays(bool, st.tuples(st.integers(1, 7), st.just(0)).map(lambda n: (n[0], n[0]))))
def test_a_frame_runs_where_framed_cells_meet_others(mask):
    edges = set(re.findall(r"M(\d+) (\d+)([hv])1", drawings._outline(mask)))
    n, inside = len(mask), lambda i, j: 0 <= i < len(mask) and 0 <= j < len(mask) and bool(mask[i, j])
    expected = {(str(j), str(i), "h") for i in range(n + 1) for j in range(n) if inside(i, j) != inside(i - 1, j)}
    expected |= {(str(j), str(i), "v") for i in range(n) for j in range(n + 1) if inside(i, j) != inside(i, j - 1)}
    assert edges == expected


@given(npst.arrays(np.float64, (7, 7), elements=st.floats(-9, 9)))
def test_of_large_matrices_the_largest_of_each_block_is_drawn(matrix):
    pooled = drawings._pooled(matrix, 3)
    for i in range(3):
        for j in range(3):
            block = matrix[3 * i : 3 * i + 3, 3 * j : 3 * j + 3]
            assert abs(pooled[i, j]) == np.abs(block).max() and pooled[i, j] in (*block.ravel(), 0.0)


def test_a_dense_matrix_of_a_wide_head_makes_no_huge_page():
    rng = np.random.default_rng(0)
    svg = drawings.operator_drawing("", rng.standard_normal((576, 576)), 1.0, np.ones((576, 576), bool))
    assert len(svg) < 600_000 and max(max(place) for place in cells(svg)) == 191


def marks(svg):
    """Places of the dots, and of the crosses."""
    dots = [(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg)]
    crosses = [
        (float(x) + 2.6, float(y) + 2.6) for x, y in re.findall(r'class="cross" d="M([\d.]+) ([\d.]+)l5.2 5.2m', svg)
    ]
    return dots, crosses


def ticks(svg):
    """Values of the labels of the vertical axis, and where they stand."""
    digits = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
    found = re.findall(r'x="38" y="([\d.]+)" text-anchor="end">([^<]*)<', svg)
    return {
        float(y) - 3.5: int(words[2:].translate(digits)) if words not in ("1", "10", "100") else len(words) - 1
        for y, words in found
    }


POSITIVE = st.floats(1e-9, 1e3)


@given(st.lists(st.tuples(POSITIVE, st.booleans()), min_size=2, max_size=12))
def test_marks_stand_where_the_axis_says(points):
    worst, beyond = np.array([value for value, _ in points]), np.array([wrong for _, wrong in points])
    svg = drawings.errors_drawing(Errors("position", np.arange(len(points)), worst, beyond, {"a": worst}))
    (y0, e0), *_, (y1, e1) = sorted(ticks(svg).items())
    dots, crosses = marks(svg)
    assert (len(dots), len(crosses)) == (int((~beyond).sum()), int(beyond.sum()))
    for value, (_, y) in zip([*worst[~beyond], *worst[beyond]], [*dots, *crosses], strict=True):
        drawn = max(math.log10(value), e1)  # of many errors, one that is far below the others is at the lower end
        assert drawn == pytest.approx(e0 + (y - y0) * (e1 - e0) / (y1 - y0), abs=0.02 * abs(e1 - e0))
    assert math.log10(np.sort(worst)[len(worst) // 10]) >= e1


def test_one_tiny_error_does_not_make_the_axis_long():
    """Of 21 errors two are far below: they are at the lower end, the others where the axis says; NaN is above it."""
    worst = np.array([1e-300, 1e-16, *np.geomspace(1e-7, 1e-6, 19)])
    drawn = ticks(drawings.errors_drawing(Errors("position", np.arange(21), worst, worst > 1, {})))
    assert min(drawn.values()) == -9 and max(drawn.values()) == -6
    svg = drawings.errors_drawing(Errors("position", np.arange(2), np.array([1e-3, np.nan]), worst[:2] > 1, {}))
    beside, *numbers = sorted(ticks(svg.replace(">NaN, ∞<", ">10⁹<")))
    assert min(y for _, y in marks(svg)[0]) == beside and beside + 10 < min(numbers) and len(numbers) == 2


def test_zero_and_infinity_have_a_place():
    errors = Errors("position", np.arange(3), np.array([0.0, 1e-3, np.inf]), np.array([False, False, True]), {})
    dots, crosses = marks(drawings.errors_drawing(errors))
    assert dots[0][1] == drawings._BOTTOM and crosses[0][1] == pytest.approx(drawings._TOP)


def test_frequencies_that_differ_are_crosses():
    expected = 10.0 ** -np.arange(5.0)
    measured = expected * [1, 1, 1.5, 1, 1]
    shown = Frequencies(measured, expected, np.full(5, 1e-6))
    dots, crosses = marks(drawings.frequencies_drawing(shown))
    assert len(dots) == 4 and len(crosses) == 1 and "deviations" not in str(drawings.deviations_drawing(shown))
    assert drawings.deviations(shown).round(6).tolist() == [0, 0, 0.5, 0, 0]
    fewer = Frequencies(measured[:3], expected, np.full(5, 1e-6))
    assert drawings.deviations_drawing(fewer) is None and drawings.differing(fewer).all()
    alone = Frequencies(measured, None, None)
    assert not drawings.differing(alone).any() and len(marks(drawings.frequencies_drawing(alone))[0]) == 5


# ── In words ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_long_lists_are_abbreviated_in_words_and_whole_in_json():
    factors = tuple(1 + k / 10 for k in range(16))
    rope = Rope(32, 10000.0, "half", scaling=LongRoPE(factors, factors, 4.0, 4096)).at(8192)
    report = check_rotation(lambda x, m: rotated(x, m, THETA), rope)
    assert str(report).count("(1.0, 1.1, 1.2, …, 2.5: 16 numbers)") == 2 and "1.7" not in str(report)
    assert report.to_dict()["expected"] == repr(rope)
    text = Parts(page.report_section(report)).text
    assert "1.1, 1.2, …, 2.5: 16 numbers" in text and repr(rope) in text


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=30))
def test_only_long_lists_are_abbreviated(numbers):
    text = f"f({tuple(numbers)!r}, x={numbers!r}, 3)"
    short = page.abbreviated(text)
    if len(numbers) < 10:
        assert short == text
    else:
        assert short.count(f"…, {numbers[-1]!r}: {len(numbers)} numbers") == 2 and short.endswith("], 3)")


def test_the_headline_has_the_verdict_and_the_first_fault(right):
    first, second = (Finding(name, "e", "c", "f") for name in ("wrong base", "direction"))
    assert right.headline == "rotation: RIGHT"
    assert Report("rotation", "x", "wrong", (first,)).headline == "rotation: WRONG: wrong base"
    assert Report("rotation", "x", "wrong", (first, second)).headline == "rotation: WRONG: wrong base and 1 more"
    failed = Report("rotation", "x", "not judged", failure=Failure("it raises E (a\nb)", "", "mend it"))
    assert failed.headline == "rotation: NOT JUDGED: it raises E (a"


def test_a_test_runner_shows_the_headline_in_its_summary(one_pair):
    with pytest.raises(pyrope.Mismatch) as caught:
        one_pair.raise_unless_ok()
    summary, *rest = caught.getrepr(style="short").reprcrash.message.splitlines()  # pytest prints its first line
    assert summary == "pyrope.oracle.report.Mismatch: rotation: WRONG: unexplained"
    assert rest == str(one_pair).splitlines()[1:]
    with pytest.raises(pyrope.NotJudged, match=r"\Arotation: NOT JUDGED: it raises ZeroDivisionError"):
        pyrope.assert_rotation(lambda x, m: 1 / 0, ROPE)


def test_reports_are_grouped_by_their_faults(right):
    def wrong(*names):
        return Report("case", "x", "wrong", tuple(Finding(name, "e", "c", "f") for name in names))

    every = [wrong("a"), right, wrong("b"), wrong("a", "b"), wrong("b")]
    assert [(faults, len(group)) for faults, group in reports.by_faults(every).items()] == [
        (("b",), 2), (("a",), 1), (("a", "b"), 1),
    ]  # fmt: skip
    assert page.summary(every) == "5 cases, 1 right, 4 wrong"


def test_absolute_errors_stand_beside_ulps(right):
    head, *lines = str(right).partition("\n\n  error ")[2].splitlines()
    assert head.split() == ["worst", "in", "ulps", "typical,", "ulps"]
    for line, row in zip(lines, right.errors, strict=True):
        assert line.split()[-3:] == [f"{row.absolute:.2g}", f"{row.worst:.3g}", f"{row.typical:.3g}"]
    units = Report("trace", "x", "right", errors=(ErrorRow("layer 1", 2.0, 1.0),))
    assert "error, in ulps" in str(units) and "worst, in ulps" in page.report_section(units)


def test_attention_shows_the_worst_output_of_each_question_side_by_side():
    """Head 2 is doubled: what is furthest off is there, expected half of what came; a right question is the same."""

    def doubled(q, k, v):
        out = pyrope.attention(q, k, v, causal=True)
        out[:, 2] *= 2
        return out

    readings = check_attention(doubled, head_dim=16).readings
    wrong = [side for side in readings.sides if not side.same]
    assert wrong and all("head 2" in side.name for side in wrong)
    for side in wrong:
        assert float(side.measured) == pytest.approx(2 * float(side.expected), rel=1e-5)
    right = check_attention(lambda q, k, v: pyrope.attention(q, k, v, causal=True), head_dim=16)
    assert right.readings.sides and all(side.same for side in right.readings.sides)
