"""Reports as pages: everything is escaped, nothing is loaded, and the pictures show the numbers that were read."""

import html.parser
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pyrope import Axes, Rope
from pyrope.oracle import drawings, gallery, page
from pyrope.oracle.attention import Tried
from pyrope.oracle.calls import Plan
from pyrope.oracle.candidate import Candidate
from pyrope.oracle.comparison import Check, Task
from pyrope.oracle.drawings import Errors, Frequencies, Operators, Readings, Side, differing
from pyrope.oracle.mistakes import MISTAKES
from pyrope.oracle.operator import identify, read
from pyrope.oracle.readings import errors_by_place, of_attention, of_rotation, rotation_readings
from pyrope.oracle.report import ErrorRow, Failure, Finding, Report, by_faults, printable
from pyrope.oracle.steps import Allowed

ROPE = Rope(32, 10000.0, "half")
THETA = 10000.0 ** -(np.arange(16) / 16)
DOUBLED = THETA * np.where(np.arange(16) == 5, 2, 1)  # pair 5 turns twice as fast


def rotated(x, positions, theta):
    """Halves turned by positions times θ, in float64."""
    angle, (a, b) = positions[:, None] * theta, np.split(x.astype(np.float64), 2, axis=-1)
    turned = (a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle))
    return np.concatenate(turned, axis=-1).astype(x.dtype)


class Parts(html.parser.HTMLParser):
    """The tags of a page, their attributes, and the text between them."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.words = [], [], []
        self.feed(text)
        self.close()
        self.text = "".join(self.words)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.words.append(data)

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")


# ── Words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def every_field(words):
    """Reports in which each text is the given words."""
    zeros = np.zeros(2)
    errors = Errors(words, np.arange(2), zeros, zeros > 1, {words: zeros + 1})
    operators = Operators(words, np.eye(2), np.eye(2), np.eye(2) > 2)
    readings = Readings(words, (Side(words, words, words, False),), operators, None, errors)
    finding, table = Finding(words, words, words, 3), (ErrorRow(words, 1.0, 0.5, 0.1),)
    yield Report(words, words, "wrong", (finding,), words, words, (), table, (words,), None, readings)
    failure = Failure(words, words, words, RuntimeError(words))
    yield Report(words, words, "not judged", measured=((words, words, words),), failure=failure)


HOSTILE = "</style></title><script>alert(1)</script><img src=x onerror=alert(1)>\" ' & <!-- ]]> \x1b[2J\x00"


@given(st.one_of(st.just(HOSTILE), st.text(max_size=40)).map("<{}>x".format))
def test_text_of_a_report_never_becomes_markup(words):
    plain, other = (Parts(page.document(text, *map(page.report_section, every_field(text)))) for text in ("x", words))
    assert other.tags == plain.tags and len(other.attributes) == len(plain.attributes)
    assert other.text.count(printable(words)) >= 20


def test_a_page_loads_nothing_and_its_style_stays_in_the_report():
    report = Report("rotation", "x", "wrong", (Finding("first chunk repeated", "a fact"),))
    parts, fragment = Parts(report.to_html()), report._repr_html_()
    addresses = [value for name, value in parts.attributes if name in ("src", "href", "srcset")]
    assert addresses == ["https://github.com/NVIDIA/Megatron-LM/issues/5243"]
    assert not {"script", "link", "img", "image", "use", "iframe", "object"} & set(parts.tags)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in parts.attributes
    assert not re.search(r"url\(|@import|javascript:", report.to_html())
    assert fragment in report.to_html() and fragment.startswith('<div class="pyrope">') and "<html" not in fragment
    rules = re.findall(r"(?:^|\})([^{}]*)\{", fragment.partition("<style>")[2].partition("</style>")[0])
    assert len(rules) > 50 and all(rule.strip().startswith((".pyrope", "@media", "}")) for rule in rules)


def test_every_issue_that_is_named_can_be_linked():
    happened = [mistake.happened for mistake in MISTAKES.values()]
    assert {name for words in happened for name in re.findall(r"([\w.-]+)#\d", words)} <= page.REPOSITORIES.keys()
    assert Parts(page.linked("nobody#1, <b>#2, vllm#590.")).attributes[0][1].endswith("/vllm-project/vllm/issues/590")
    assert Parts(page.linked("nobody#1, <b>#2, vllm#590.")).text == "nobody#1, <b>#2, vllm#590."


def test_what_a_page_says():
    finding = Finding("off by one at the seams", "the fact", "the place", since=7)
    errors = (ErrorRow("here", math.nan, 1e-3), ErrorRow("there", 2e-7, 0.0051, 3.0), ErrorRow("nowhere", 0.0, 1.0))
    long = f"LongRoPE({tuple(range(20))})"
    report = Report(
        "sharding", long, "wrong", (finding,), "a grade", "9 calls", (("base", "1", "2"),), errors, ("a note",)
    )
    text = page.report_section(report)
    cells = [Parts(cell).text for cell in re.findall("<t[dh].*?</t[dh]>", text)]
    assert cells == ["", "expected", "measured", "base", "1", "≠ 2",
                     "where", "on a logarithmic scale", "worst", "allowed", "ulps",
                     "here", "", "not finite", "0.001", "—", "there", "", "2e-07", "0.0051", "3",
                     "nowhere", "", "0", "1", "—"]  # fmt: skip
    assert text.count('class="bar"') == 1
    words = ["WRONG", "(0, 1, 2, …, 19: 20 numbers)", long, "a grade", "9 calls", "the fact", "the place", finding.cause,
             finding.fix, "from position 7 on", "a note"]  # fmt: skip
    places = [Parts(text).text.find(word) for word in words]
    assert -1 not in places and places == sorted(places) and "<dd></dd>" not in text


def test_files(tmp_path):
    page.write_page(tmp_path / "page.html", "title \ud800", drawings.element("p", "text θ \udfff"))
    assert r"text θ \udfff" in (tmp_path / "page.html").read_text("utf-8") and len([*tmp_path.iterdir()]) == 1
    with pytest.raises(ValueError, match=r"a page must be a .html or .htm file, was 'report.md'"):
        page.check_file("report.md")
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        page.check_file(tmp_path / "none" / "report.html")


def test_many_reports_and_the_gallery():
    right = Report("one", "x", "right", errors=(ErrorRow("a", 1e-7, 1.0), ErrorRow("b", 2.5e-7, 1.0)))
    wrong = [
        Report(f"case {i}", "x", "wrong", (Finding(name, "f"),))
        for i, name in enumerate(("direction", *["not split"] * 2))
    ]
    every = [right, *wrong, Report("lost", "x", "not judged", failure=Failure("r", "", ""))]
    text = page.verification_section(every, by_faults(every))
    assert page.summary(every) == "5 cases, 1 right, 3 wrong, 1 not judged" and page.summary(every) in Parts(text).text
    assert [Parts(x).text for x in re.findall("<h2>.*?</h2>", text)] == ["not split: 2 cases", "direction: 1 case"]
    titles = [Parts(x).text for x in re.findall("<summary>.*?</summary>", text)]
    assert titles == [
        "the same in 1 case more",
        "✗ case 2",
        "? not judged: 1 case",
        "? lost",
        "✓ right: 1 case",
        "✓ one",
    ]
    rows = [gallery.Row("first", right, ROPE, True), gallery.Row("second", wrong[0], None, False)]
    text = page.gallery_section(rows)
    lines = [
        [Parts(x).text for x in re.findall("<span>.*?</span>", line)]
        for line in re.findall("<summary>(.*?)</summary>", text)
    ]
    assert lines == [["first", "✓ right", "2.5e-07", "half 10000"], ["second", "✗ wrong", "—", "UNEXPECTED: direction"]]
    assert "2 implementations, 1 judged as they should be" in Parts(text).text


# ── What was read ────────────────────────────────────────────────────────────────────────────────────────────────────


def readings(fn, rope=ROPE):
    axes = None if rope.axes is None else rope.axes.count
    return rotation_readings(read(Candidate(fn), rope.head_dim, "float32", 131071, axes)[0], rope)


@pytest.mark.parametrize("fn, names", [
    (lambda x, m: rotated(x, m, THETA), set()),
    (lambda x, m: rotated(x, m.astype(np.float32), THETA.astype(np.float32)), set()),
    (lambda x, m: rotated(x, m, DOUBLED), {"frequencies", "rule"}),
    (lambda x, m: rotated(x, m, -THETA), {"direction"}),
    (lambda x, m: rotated(x, m + 1, THETA), {"offset"}),
    (lambda x, m: 2 * rotated(x, m, THETA), {"factor"}),
    (lambda x, m: rotated(x, m, THETA**1.5), {"frequencies", "rule"}),
    (lambda x, m: gallery.roformer_repeat(x, m), {"pairs"}),
])  # fmt: skip
def test_sides_say_what_differs(fn, names):
    shown = readings(fn)
    assert {side.name for side in shown.sides if not side.same} == names
    assert all(side.expected == side.measured for side in shown.sides if side.same)
    assert shown.operators.differing.any() == bool(names) and (names or shown.operators.position == "3")
    assert ("are framed" in Parts(page._operators(shown.operators, "expected", "wrong")).text) == bool(names)


def test_the_operator_is_the_one_that_the_candidate_has():
    shown = readings(lambda x, m: rotated(x, m, DOUBLED))
    m, units = np.array([int(shown.operators.position)]), np.eye(32)[:, None]
    assert np.allclose(shown.operators.measured, rotated(units, m, DOUBLED)[:, 0].T, atol=1e-6)
    assert np.allclose(shown.operators.expected, rotated(units, m, THETA)[:, 0].T, atol=1e-12)
    assert [*map(tuple, np.argwhere(shown.operators.differing))] == [(5, 5), (5, 21), (21, 5), (21, 21)]
    assert differing(shown.frequencies).tolist() == [i == 5 for i in range(16)]
    sines = readings(
        lambda x, m: rotated(x, m, THETA) + np.where(np.arange(32) == 5, 0.5 * np.roll(x, 16, -1), 0).astype(x.dtype)
    )
    assert [*map(tuple, np.argwhere(sines.operators.differing))] == [(5, 5), (5, 21)]  # all of the output's pair
    assert readings(lambda x, m: rotated(x, m + 1, THETA)).operators.position == "0"  # the first where it is clear
    rope = Rope(32, 10000.0, "half", rotary_dim=16, axes=Axes("sections", (4, 4)))
    mixed = readings(lambda x, m: np.concatenate((rotated(x[..., :16], m[1], THETA[::2]), x[..., 16:]), -1), rope)
    assert mixed.operators.position.endswith(", 0)") and "axes" in {side.name for side in mixed.sides if not side.same}
    assert (mixed.operators.measured[16:] == np.eye(32)[16:]).all()


def test_what_a_check_of_a_rotation_shows():
    left = [10**9]  # calls until it fails

    def fn(x, m):
        left[0] -= 1
        return rotated(x, m, THETA + (m > 1000)[:, None] * 1e-3) if left[0] > 0 else 1 / 0

    check = Check(Candidate(fn), Plan(32, np.dtype("float32"), 131071, effort="few"), Task(ROPE))
    check.run()
    shown = of_rotation(check)
    assert (shown.errors.beyond == (shown.errors.at > 1000)).all() and "float32 angle" in shown.errors.bounds
    report = Report("rotation", "x", "wrong", (Finding("unexplained", "f"),), readings=lambda: of_rotation(check))
    assert int(shown.operators.position) > 1000 and "Errors by position" in report.to_html()
    left[0] = 0
    assert of_rotation(check) is None  # a candidate that fails later has no pictures


def test_what_a_check_of_attention_shows():
    truth = np.arange(24.0).reshape(1, 2, 3, 4)
    answers = {"right": truth, "wrong": truth * np.array([1, 1, 2.0])[:, None]}
    call = {name: SimpleNamespace(name=name, places=(np.arange(5, 8), None)) for name in answers}
    limit = Allowed(truth, np.full(truth.shape, 0.1), 0.1)
    tried = [Tried(call[name], [answer], [limit], limit.ratio(answer)) for name, answer in answers.items()]
    shown = of_attention(SimpleNamespace(tried=tried, wrong=tried[1:]))
    assert shown.sides[0] == ("wrong: row 0, head 1, query 2, feature 3", "23", "46", False) and shown.sides[1].same
    assert shown.errors.place == 'token of the call "wrong"' and shown.errors.at.tolist() == [5, 6, 7]
    assert shown.errors.beyond.tolist() == [False, False, True] and shown.errors.worst.tolist() == [0, 0, 23]


def test_an_identification_has_a_page():
    text = Parts(identify(lambda x, m: rotated(x, m, THETA), 32)._repr_html_()).text
    assert (
        "rotation of 32 features, float32: base 10000" in text and "identified" in text and "R(m) at position" in text
    )
    unknown = identify(lambda x, m: x + x.mean(-1, keepdims=True), 32)  # of which no pairs can be read
    assert "R(m)" not in Parts(unknown._repr_html_()).text


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 9), st.booleans()), min_size=1, max_size=40))
def test_of_near_places_the_largest_error_is_shown(rows):
    at, worst, wrong = (np.array(column) for column in zip(*rows, strict=True))
    shown = errors_by_place("position", at, worst, {"a": worst + 1}, wrong)
    assert (np.diff(shown.at) > 0).all() and shown.worst.max() == worst.max() and shown.beyond.any() == wrong.any()
    assert (shown.bounds["a"] == shown.worst + 1).all() and all(
        worst[at == m].max() == e for m, e in zip(shown.at, shown.worst, strict=True)
    )
    assert np.isinf(errors_by_place("position", at, worst * np.nan, {}, wrong).worst).all()


# ── Pictures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_signs_have_colours_and_pairs_that_differ_have_frames():
    svg = drawings.operator_drawing("", np.array([[np.nan, 1.0], [-2.0, 0.01]]), 1.0, np.array([[0, 1], [0, 0]]) > 0)
    cells = {(int(i), int(j)): fill for d, fill in re.findall(r'<path d="([^"]*)" fill="(#\w+)"></path>', svg)
             for j, i in re.findall(r"M(\d+) (\d+)h1v1h-1z", d)}  # fmt: skip
    assert cells == {(0, 0): "#8a8a8a", (0, 1): "#b2182b", (1, 0): "#2166ac"}
    assert set(re.findall(r"M(\d \d[hv])1(?!v)", svg)) == {"1 0h", "1 1h", "1 0v", "2 0v"}
    dense = drawings.operator_drawing("", np.ones((576, 576)), 1.0, np.ones((576, 576)) > 0)
    assert len(dense) < 600_000  # blocks of a wide head are drawn as one


@given(st.lists(st.tuples(st.floats(1e-9, 1e3), st.booleans()), min_size=2, max_size=9))
def test_marks_stand_where_the_axis_says(points):
    worst, beyond = np.array([value for value, _ in points]), np.array([wrong for _, wrong in points])
    svg = drawings.errors_drawing(Errors("position", np.arange(len(points)), worst, beyond, {"a": worst}))
    digits = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
    ticks = {float(y) - 3.5: math.log10(float(words)) if words in ("1", "10", "100") else int(words[2:].translate(digits))
             for y, words in re.findall(r'x="38" y="([\d.]+)" text-anchor="end">([^<]*)<', svg)}  # fmt: skip
    (y0, e0), *_, (y1, e1) = sorted(ticks.items())
    dots = [float(y) for y in re.findall(r'cy="([\d.]+)"', svg)]
    crosses = [float(y) + 2.6 for y in re.findall(r'class="cross" d="M[\d.]+ ([\d.]+)l', svg)]
    assert (len(dots), len(crosses)) == (int((~beyond).sum()), int(beyond.sum()))
    for value, y in zip([*worst[~beyond], *worst[beyond]], [*dots, *crosses], strict=True):
        assert math.log10(value) == pytest.approx(e0 + (y - y0) * (e1 - e0) / (y1 - y0), abs=0.02 * abs(e1 - e0) + 1e-9)


def test_frequencies_that_differ_are_crosses():
    expected, crosses = 10.0 ** -np.arange(5.0), lambda shown: drawings.frequencies_drawing(shown).count("cross")
    shown = Frequencies(expected * [1, 1, 1.5, 1, 1], expected, np.full(5, 1e-6))
    assert crosses(shown) == 1 and drawings.deviations_drawing(shown).count("cross") == 1
    fewer = Frequencies(shown.measured[:3], expected, shown.allowed)
    assert crosses(fewer) == 3 and drawings.deviations_drawing(fewer) is None
    assert crosses(Frequencies(shown.measured, None, None)) == 0
