"""The sections of a page, piece by piece."""

import html.parser
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from pyrope import Rope
from pyrope.oracle import page as module
from pyrope.oracle.drawings import Errors, Frequencies, Operators, Readings, Side
from pyrope.oracle.identification import Identification
from pyrope.oracle.report import ErrorRow, Failure, Finding, Report

ONE = Finding("one", "seen", "why", "mend it", 7, ("three", "four"), "vllm#590, elsewhere#3")
WRONG = Report("rotation", "a rope", "wrong", (ONE,))
RIGHT = Report("rotation", "a rope", "right")


def test_where_a_page_may_be(tmp_path):
    assert (
        module.check_file(tmp_path / "x.HTML") == tmp_path / "x.HTML"
        and module.check_file(str(tmp_path / "x.htm")).name == "x.htm"
    )
    with pytest.raises(ValueError, match="a page must be a .html or .htm file, was 'x.txt'"):
        module.check_file("x.txt")
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        module.check_file(tmp_path / "no" / "x.html")
    module.write_page(tmp_path / "x.html", "a \ud800 title", module.element("p", "words"))
    text = (tmp_path / "x.html").read_text("utf-8")
    assert (
        r"<title>a \ud800 title</title>" in text
        and "<p>words</p>" in text
        and text.startswith("<!DOCTYPE html>\n<html lang")
    )


def test_long_lists():
    numbers = ", ".join(map(str, range(10)))
    assert (
        module.abbreviated(f"({numbers})") == "(0, 1, 2, …, 9: 10 numbers)"
        and module.abbreviated("(0, 1, 2, 3, 4, 5, 6, 7, 8)") == "(0, 1, 2, 3, 4, 5, 6, 7, 8)"
    )
    whole = f"<details><summary>in full</summary><code>({numbers})</code></details>"
    assert module._expected(f"({numbers})").endswith(whole) and "<details>" not in module._expected("short")


def test_links():
    linked = module.linked("see vllm#590, nowhere#3 & more")
    assert (
        linked
        == 'see <a href="https://github.com/vllm-project/vllm/issues/590" rel="noopener">vllm#590</a>, nowhere#3 &amp; more'
    )


def test_findings():
    drawn = module._finding(ONE)
    assert "<dt>shows</dt><dd>from position 7 on</dd>" in drawn and "three; four (cannot be told apart here)" in drawn
    assert "<dt>happened in</dt><dd><a href" in drawn and "<h3>one</h3>" in drawn
    plain = module._finding(Finding("one", "", "", ""))
    assert not any(f"<dt>{name}</dt>" in plain for name in ("shows", "or", "happened in"))


def test_reports():
    drawn = module.report_section(WRONG)
    assert (
        '<h1 class="verdict wrong"><span class="symbol" aria-hidden="true">✗</span><span><span class="name">WRONG</span> rotation: one</span></h1>'
        in drawn
    )
    assert "<h2>What is wrong</h2>" in drawn and "<h4>What is wrong</h4>" in module.report_section(WRONG, "h3")
    assert "<h2>What is wrong: 2 findings</h2>" in module.report_section(replace(WRONG, findings=(ONE, ONE)))
    failed = module.report_section(Report("x", "", "not judged", failure=Failure("why", "", "so", frames=("a", "b"))))
    assert (
        "<dl><dt>reason</dt><dd>why</dd><dt>fix</dt><dd>so</dd></dl><pre>a\nb</pre>" in failed
        and 'class="verdict not-judged"' in failed
    )
    assert "<pre>" not in module.report_section(Report("x", "", "not judged", failure=Failure("why", "", "")))
    noted = module.report_section(replace(RIGHT, notes=("n",), errors=(ErrorRow("x", 1.0, 1.0),)))
    assert "<h2>Notes</h2><ul><li>n</li></ul>" in noted and "<h2>Errors in numbers</h2>" in noted


def test_a_table_of_errors():
    drawn = module._errors_table([ErrorRow("near", 9.0, 0.5), ErrorRow("far", 99.0, 1.0)])
    assert (
        drawn.count('<td class="number">') == 4 and 'style="width: 50.0%"' in drawn and 'style="width: 100.0%"' in drawn
    )
    assert ">worst, in ulps</th>" in drawn and '<td class="number">9</td><td class="number">0.5</td>' in drawn
    sized = module._errors_table([ErrorRow("near", 9.0, 0.5, 1e-7), ErrorRow("lost", math.inf, math.nan, math.inf)])
    assert (
        '<td class="number">1e-07</td><td class="number">9</td>' in sized
        and '>not finite</td><td class="number">—</td><td class="number">—</td>' in sized
    )
    assert sized.count('class="bar"') == 1 and ">in ulps</th>" in sized
    assert 'style="width: 0.0%"' in module._errors_table([ErrorRow("x", 0.0, 0.0)])
    assert module._number(None) == "—" and module._number(0.123) == "0.12"


OPERATORS = Operators("3", np.array([[0.5, -9.0], [0, 1]]), np.eye(2), np.array([[True, False], [False, False]]))
ERRORS = Errors("position", np.array([0, 1]), np.array([1e-3, 1.0]), np.array([False, True]), {"a": np.ones(2)})
FREQUENCIES = Frequencies(np.array([1.0, 0.2]), np.array([1.0, 0.1]), np.array([1e-3, 1e-3]))


def test_readings():
    assert module._readings(None, "right", "h2") == [] == module._readings(Readings(), "right", "h2")
    sides = module._readings(Readings(sides=(Side("a", "x", "x", True), Side("b", "x", "y", False))), "wrong", "h2")
    assert (
        "<tr><td>a</td><td>x</td><td>x</td></tr>" in sides[1]
        and '<tr class="differs"><td>b</td><td>x</td><td>≠ y</td></tr>' in sides[1]
    )
    heading, figure = module._readings(Readings(operators=OPERATORS), "wrong", "h2")
    assert heading == "<h2>R(m) at position 3</h2>" and figure.startswith("<figure>")
    heading, charts = module._readings(Readings(errors=ERRORS, frequencies=FREQUENCIES), "wrong", "h4")
    assert heading == "<h4>Errors by position, frequencies by pair</h4>" and charts.count("<figure>") == 3
    none = Frequencies(np.empty(0), np.ones(1), np.ones(1))
    assert module._readings(Readings(frequencies=none), "wrong", "h4") == []


def test_operators_side_by_side():
    drawn = module._operators(OPERATORS, "expected", "wrong")
    assert (
        drawn.index("<p>expected</p>") < drawn.index("<p>candidate</p>")
        and "The pairs that differ are framed." in drawn
    )
    scale = "<span>−4</span><span></span><span>+4</span>"  # at most
    assert f'<figcaption><div class="shades">{scale}</div>Column j is what unit vector j becomes.' in drawn
    same = replace(OPERATORS, measured=np.eye(2) * 2.5, differing=np.zeros((2, 2), bool))
    assert "No pair differs here" in module._operators(
        same, "expected", "wrong"
    ) and "<span>+2.5</span>" in module._operators(same, "expected", "right")
    assert "No pair differs" not in module._operators(same, "expected", "right")
    alone = module._operators(replace(same, expected=None, measured=np.eye(2) / 2), "identified", "right")
    assert "<p>identified</p>" not in alone and "<span>+1</span>" in alone
    lost = module._operators(replace(same, measured=np.full((2, 2), np.nan)), "expected", "right")
    assert "<span>+1</span>" in lost


def test_keys_of_charts():
    assert module._errors(ERRORS).count("<li>") == 3 and "beyond what is accepted" in module._errors(ERRORS)
    assert "beyond" not in module._errors(replace(ERRORS, beyond=np.zeros(2, bool)))
    two = module._frequencies(FREQUENCIES, "expected")
    assert (
        len(two) == 2
        and " measured, not as expected" in two[0]
        and "off the expected one" in two[1]
        and two[0].count("<li>") == 3
    )
    assert (
        '<path class="cross"' in two[0].partition("<li>")[2]
        and '<path class="cross"' in module._errors(ERRORS).partition("<li>")[2]
    )
    (one,) = module._frequencies(Frequencies(np.ones(1), None, None), "identified")
    assert one.count("<li>") == 1 and "not as" not in one


def test_an_identification():
    found = Identification(
        head_dim=4, dtype="float32", layout="half", rotary_dim=4, placement="prefix", pairs=((0, 2), (1, 3)), direction=1, frequencies=(1.0, 0.1),
        uncertainty=(1e-9, 2e-10), offset=0.0, attention_factor=1.0, explanations=("base 100 (or so)",), rope=Rope(4, 100.0, "half"), precision="once", behaviour=(),
    )  # fmt: skip
    drawn = module.identification_section(replace(found, readings=Readings("identified", operators=OPERATORS)))
    head = '<span class="symbol" aria-hidden="true">✓</span><span>rotation of 4 features, float32: base 100</span></h1>'
    assert (
        drawn.startswith(f'<section><h1 class="verdict right">{head}<dl><dt>turns</dt>') and "<p><code>Rope(" in drawn
    )
    assert "<h2>R(m) at position 3</h2>" in drawn and "<p>identified</p>" in drawn
    unknown = module.identification_section(replace(found, rope=None, explanations=()))
    assert (
        '<h1 class="verdict not-judged">' in unknown
        and ">?</span><span>rotation of 4 features, float32: no rotation<" in unknown
        and "<code>" not in unknown
    )


def test_summaries():
    failed = Report("x", "", "not judged", failure=Failure("why", "", ""))
    assert (
        module.summary([RIGHT, WRONG, WRONG]) == "3 cases, 1 right, 2 wrong"
        and module.summary([failed]) == "1 case, 0 right, 1 not judged"
    )
    drawn = module.verification_section([RIGHT, WRONG, WRONG, failed], {("one",): [WRONG, WRONG]})
    assert (
        '<section><h1 class="verdict wrong"' in drawn
        and "<h2>one: 2 cases</h2>" in drawn
        and "<summary>the same in 1 case more</summary>" in drawn
    )
    assert (
        "<summary>? not judged: 1 case</summary>" in drawn
        and "<summary>✓ right: 1 case</summary>" in drawn
        and "equivalent:" not in drawn
    )
    assert '<section><h1 class="verdict not-judged"' in module.verification_section(
        [RIGHT, failed], {}
    ) and '<section><h1 class="verdict right"' in module.verification_section([RIGHT], {})
    alone = module.verification_section([WRONG], {("one",): [WRONG]})
    assert "the same in" not in alone


@dataclass
class Row:
    name: str
    report: Report
    as_expected: bool
    remark: str = "a remark"


def test_the_gallery():
    rows = [
        Row(
            "a", replace(RIGHT, errors=(ErrorRow("x", 1, 1, 0.5), ErrorRow("y", 1, 1, 0.25), ErrorRow("z", 1, 1))), True
        ),
        Row("b", WRONG, False),
    ]
    drawn = module.gallery_section(rows)
    assert "gallery: 2 implementations, 1 judged as they should be" in drawn and 'class="verdict wrong"' in drawn
    assert (
        "<span>a</span>" in drawn
        and "<span>0.5</span><span>a remark</span>" in drawn
        and "<span>—</span><span>a remark</span>" in drawn
    )
    assert 'h1 class="verdict right"' in module.gallery_section(rows[:1])


class Tags(html.parser.HTMLParser):
    """Which elements a page has; each must be ended, in order, and be one of those that pages are made of."""

    known = (
        "section h1 h2 h3 h4 p dl dt dd ul li div span b code pre a table thead tbody tr th td details summary figure "
        "figcaption svg g rect path line text circle polyline html head body meta title style desc"
    )

    def __init__(self, drawn):
        super().__init__()
        self.open, self.seen = [], []
        self.feed(drawn)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert tag in self.known.split(), tag
        self.seen.append(tag)
        self.open += [tag] * (tag != "meta")

    def handle_startendtag(self, tag, attributes):
        assert tag in self.known.split(), tag

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_every_section_is_made_of_known_elements(tmp_path):
    drawn = Readings(sides=(Side("a", "x", "y", False),), operators=OPERATORS, errors=ERRORS, frequencies=FREQUENCIES)
    numbers = ", ".join(map(str, range(10)))
    whole = replace(WRONG, expected=f"a rope ({numbers})", readings=drawn, errors=(ErrorRow("near", 9.0, 0.5),))
    failed = Report("x", "", "not judged", failure=Failure("why", "", "so", frames=("a",)))
    reports = [whole, whole, failed, RIGHT]
    sections = {
        "report": module.report_section(whole), "verification": module.verification_section(reports, {("one",): [whole, whole]}),
        "gallery": module.gallery_section([Row("a", whole, True), Row("b", RIGHT, True)]),
    }  # fmt: skip
    for name, section in sections.items():
        tags = Tags(section).seen
        drawings = 11  # of a report: two matrices, three charts, and six marks in their keys
        assert tags.count("svg") == {"report": 1, "verification": 2, "gallery": 1}[name] * drawings
        module.write_page(tmp_path / f"{name}.html", name, section)
        page = Tags((tmp_path / f"{name}.html").read_text("utf-8")).seen
        assert page[:2] == ["html", "head"] and page.count("body") == 1 and page.count("style") == 2
    assert "<h2>R(m) at position 3</h2>" in sections["report"]
    assert "<h4>R(m) at position 3</h4>" in sections["verification"], "the first of each group is shown whole"
    assert sections["gallery"].count("<li><b") == 3 and "<p class=" in sections["gallery"]
    assert '<p class="quiet">expected: <code>' in sections["report"]


def test_the_first_mark_of_a_key_is_a_dot():
    for key in (module._errors(ERRORS), module._frequencies(FREQUENCIES, "expected")[0]):
        first = [item for item in key.split("<li>")[1:] if "largest error" in item or " measured</li>" in item]
        assert len(first) == 1 and "cross" not in first[0]


def test_errors_below_an_ulp_have_short_bars():
    """The longest bar is that of the worst error, however small; without any error, a bar is empty."""
    drawn = module._errors_table([ErrorRow("near", 0.0, 0.0), ErrorRow("far", 0.5, 0.5)])
    assert 'style="width: 0.0%"' in drawn and 'style="width: 100.0%"' in drawn
