"""Reports as pages: everything is escaped, nothing is loaded, and the pictures show the numbers that were read."""

import html.parser
import itertools
import math
import re
import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st

import pyrope
from pyrope import Axes, Proportional, Rope, check_attention, check_rotation, identify
from pyrope.oracle import gallery, page
from pyrope.oracle.mistakes import ISSUE, MISTAKES
from pyrope.oracle.readings import Readings, Side, errors_by_place
from pyrope.oracle.report import ErrorRow, Failure, Finding, Report, printable

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
    readings = Readings((Side(words, words, words, False),))  # pictures have no words of a candidate
    finding, table = Finding(words, words, words, 3), (ErrorRow(words, 1.0, 0.5, 0.1),)
    yield Report(words, words, "wrong", (finding,), words, words, (), table, (words,), None, words, readings)
    failure = Failure(words, words, words, RuntimeError(words))
    yield Report(words, words, "not judged", measured=((words, words, words),), failure=failure)


HOSTILE = "</style></title><script>alert(1)</script><img src=x onerror=alert(1)>\" ' & <!-- ]]> \x1b[2J\x00"


@given(st.one_of(st.just(HOSTILE), st.text(max_size=40)).map("<{}>x".format))
def test_text_of_a_report_never_becomes_markup(words):
    plain, other = (Parts(page.document(text, *map(page.report_section, every_field(text)))) for text in ("x", words))
    assert other.tags == plain.tags and len(other.attributes) == len(plain.attributes)
    assert other.text.count(printable(words)) >= 14


def test_a_page_loads_nothing_and_its_style_stays_in_the_report():
    report = Report("rotation", "x", "wrong", (Finding("first chunk repeated", "a fact"),))
    parts, fragment = Parts(report.to_html()), report._repr_html_()
    addresses = [value for name, value in parts.attributes if name in ("src", "href", "srcset")]
    assert addresses == ["https://github.com/NVIDIA/Megatron-LM/issues/5243"]
    assert not {"script", "link", "img", "image", "use", "iframe", "object"} & set(parts.tags)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in parts.attributes
    assert not re.search(r"url\(|@import|javascript:", report.to_html())
    assert fragment in report.to_html() and fragment.startswith('<div class="pyrope">') and "<html" not in fragment
    style = fragment.partition("<style>")[2].partition("</style>")[0].strip()
    assert style.startswith(".pyrope {")
    depth = list(itertools.accumulate({"{": 1, "}": -1}.get(character, 0) for character in style))
    assert depth[-1] == 0 and depth.index(0, len(".pyrope {")) == len(style) - 1  # one rule, with all others inside


def test_every_issue_that_is_named_is_a_link():
    happened = " ".join(mistake.happened for mistake in MISTAKES.values())
    assert happened.count("#") == len(ISSUE.findall(happened)) > 30
    parts = Parts(page.linked("nobody#1, <b>#2, vllm-project/vllm#590."))
    assert [x for x in parts.attributes if x[0] == "href"] == [
        ("href", "https://github.com/vllm-project/vllm/issues/590")
    ]
    assert parts.text == "nobody#1, <b>#2, vllm-project/vllm#590."


def test_what_a_page_says():
    finding = Finding("positions lost", "the fact", "the place", since=7)
    errors = (ErrorRow("here", math.nan, 1e-3), ErrorRow("there", 2e-7, 0.0051, 3.0))
    long, readings = f"LongRoPE({tuple(range(20))})", Readings(sides=(Side("base", "1", "2", False),))
    told = "wrong", (finding,), "a grade", "9 calls", (), errors, ("a note",)
    text = page.report_section(Report("sharding", long, *told, readings=readings))
    assert re.findall("<table.*?>", text) == ['<table class="sides">', "<table>"]  # columns of numbers are narrow
    cells = [Parts(cell).text for cell in re.findall("<t[dh].*?</t[dh]>", text)]
    assert cells == ["", "expected", "measured", "base", "1", "≠ 2", "error", "worst", "allowed", "ulps",
                     "here", "not finite", "0.001", "—", "there", "2e-07", "0.0051", "3"]  # fmt: skip
    words = ["WRONG", long, "a grade", "the fact", "the place", finding.cause,
             finding.fix, "9 calls", "a note"]  # fmt: skip
    measured = Report("sharding", long, "right", measured=(("base", "1", "2"), ("layout", "half", "half")))
    assert "≠ 2" in page.report_section(measured) and "≠ half" not in page.report_section(measured)
    places = [Parts(text).text.find(word) for word in words]
    assert -1 not in places and places == sorted(places) and "<dd></dd>" not in text


def test_files(tmp_path):
    page.write_page(tmp_path / "page.html", "title \ud800", page.element("p", "text θ \udfff"))
    assert r"text θ \udfff" in (tmp_path / "page.html").read_text("utf-8") and len([*tmp_path.iterdir()]) == 1
    with pytest.raises(ValueError, match=r"a page must be a .html or .htm file, was 'report.md'"):
        page.check_file("report.md")
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        page.check_file(tmp_path / "none" / "report.html")


def test_many_reports_and_the_gallery():
    right = Report("one", "x", "right", errors=(ErrorRow("a", 1e-7, 1.0), ErrorRow("b", 2.5e-7, 1.0)))
    faults = enumerate(("direction", "rank ignored", "rank ignored"))
    wrong = [Report(f"case {i}", "x", "wrong", (Finding(name, "f"),)) for i, name in faults]
    every = [right, *wrong, Report("lost", "x", "not judged", failure=Failure("r", "", ""))]
    exhibit = gallery.Exhibit("first", len, ROPE)
    rows = [gallery.Row(exhibit, right), gallery.Row(exhibit._replace(name="second"), wrong[0])]
    for text, titles, words in (
        (page.verification_section(every),
         ["✗ wrong case 0: direction", "✗ wrong case 1: rank ignored", "✗ wrong case 2: rank ignored",
          "? not judged lost", "✓ right one"], "WRONG test vectors: 5 cases, 1 right, 3 wrong, 1 not judged"),
        (page.verification_section(every[:1]), ["✓ right one"], "RIGHT test vectors: 1 case, 1 right"),
        (page.gallery_section(rows),
         ["✓ right first: half 10000; error 2.5e-07", "✗ wrong second: UNEXPECTED: direction; error 0"],
         "2 implementations, 1 judged as they should be"),
    ):  # fmt: skip
        assert words in Parts(text).text and text.count("<h1 class=") == 1
        assert [Parts(x).text for x in re.findall("<summary>.*?</summary>", text)] == titles


# ── What was read ────────────────────────────────────────────────────────────────────────────────────────────────────


def readings(fn, rope=ROPE):
    return check_rotation(fn, rope).readings()


@pytest.mark.parametrize("fn, names", [
    (lambda x, m: rotated(x, m.astype(np.float32), THETA.astype(np.float32)), set()),
    (lambda x, m: rotated(x, m, DOUBLED), {"frequencies", "rule"}),
    (lambda x, m: rotated(x, m, -THETA), {"direction"}),
    (lambda x, m: rotated(x, m + 1, THETA), {"offset"}),
    (lambda x, m: 2 * rotated(x, m, THETA), {"factor"}),
    (lambda x, m: gallery.roformer_repeat(x, m), {"pairs"}),
])  # fmt: skip
def test_sides_say_what_differs(fn, names):
    shown = readings(fn)
    assert {side.name for side in shown.sides if not side.same} == names
    assert all(side.expected == side.measured for side in shown.sides if side.same)
    far = not np.allclose(shown.operators.measured, shown.operators.expected, atol=0.5)
    assert far == bool(names) and (shown.operators.position == "3") == (not names)
    assert shown.frequencies.wrong.any() == ("frequencies" in names)


def test_the_operator_is_the_one_that_the_candidate_has():
    shown = readings(lambda x, m: rotated(x, m, DOUBLED))
    units = np.eye(32)[:, None]
    at = np.array([int(shown.operators.position)])
    assert np.allclose(shown.operators.measured, rotated(units, at, DOUBLED)[:, 0].T, atol=1e-6)
    assert np.allclose(shown.operators.expected, rotated(units, at, THETA)[:, 0].T, atol=1e-12)
    assert shown.frequencies.wrong.tolist() == [i == 5 for i in range(16)]
    late = readings(lambda x, m: rotated(x, m, THETA + (m > 1000)[:, None] * 1e-3))  # R(3) is right
    assert int(late.operators.position) > 1000 and (late.errors.beyond == (late.errors.at > 1000)).all()
    rope = Rope(32, 10000.0, "half", rotary_dim=16, axes=Axes("sections", (4, 4)))
    mixed = readings(lambda x, m: np.concatenate((rotated(x[..., :16], m[1], THETA[::2]), x[..., 16:]), -1), rope)
    assert mixed.operators.position.endswith(", 0)") and "axes" in {side.name for side in mixed.sides if not side.same}
    assert (mixed.operators.measured[16:] == np.eye(32)[16:]).all()
    assert (np.diag(mixed.operators.expected)[:8] == 1).tolist() == [False] * 4 + [True] * 4  # of the first axis alone


def test_pairs_that_are_not_to_turn_are_not_compared():
    rope = Rope(32, 10000.0, "half", scaling=Proportional(0.5))
    shown = readings(lambda x, m: rotated(x, m, pyrope.frequencies(rope)), rope).frequencies
    assert len(shown.measured) == len(shown.expected) == 8 and not shown.wrong.any()


def test_a_candidate_that_fails_later_has_no_pictures():
    broken = []
    report = check_rotation(lambda x, m: 1 / 0 if broken else rotated(x, m, THETA), ROPE)
    broken.append(True)
    assert report.readings() is None and "RIGHT" in report.to_html()


def test_what_a_check_of_attention_shows():
    report = check_attention(lambda q, k, v: pyrope.attention(q, k, v, causal=True, scale=1.0))
    shown = report.readings()
    assert shown.errors.beyond.any() and "token" in shown.errors.place
    assert "Errors by token" in Parts(report.to_html()).text


def test_pages_have_pictures_where_matplotlib_is_and_tables_everywhere(monkeypatch):
    identified = identify(lambda x, m: rotated(x, m, THETA), 32)
    report = check_rotation(lambda x, m: rotated(x, m, -THETA), ROPE)
    with_pictures = Parts(identified._repr_html_()), Parts(report.to_html())
    assert [parts.tags.count("img") for parts in with_pictures] == [2, 3]
    assert all(value.startswith("data:image/svg+xml;base64,") for p in with_pictures for n, value in p.attributes
               if n == "src")  # fmt: skip
    assert "rotation of 32 features, float32: base 10000" in with_pictures[0].text
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    without = Parts(report.to_html())
    assert "img" not in without.tags and "≠ -1" in without.text and "Errors in numbers" in without.text
    unknown = identify(lambda x, m: x + x.mean(-1, keepdims=True), 32)  # of which no pairs can be read
    assert "R(m)" not in Parts(unknown._repr_html_()).text


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 9), st.booleans()), min_size=1, max_size=40))
def test_of_near_places_the_largest_error_is_shown(rows):
    at, worst, wrong = (np.array(column) for column in zip(*rows, strict=True))
    shown = errors_by_place("position", at, worst, {"a": worst + 1}, wrong)
    assert (np.diff(shown.at) > 0).all() and shown.worst.max() == worst.max() and shown.beyond.any() == wrong.any()
    assert (shown.bounds["a"] == shown.worst + 1).all()
    assert np.isinf(errors_by_place("position", at, worst * np.nan, {}, wrong).worst).all()
