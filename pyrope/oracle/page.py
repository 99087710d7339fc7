"""Reports as HTML: one file without scripts and without the network, in light and dark, on paper and on a phone.

`document` makes a page, `fragment` the same for a notebook. Everything that is text is escaped by `element`. The pages
say nothing that the reports do not: they show it, in pictures where matplotlib is installed, in tables everywhere.
"""

from __future__ import annotations

import base64
import contextlib
import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import plots
from ..files import PathLike, atomic_path
from .gallery import LEGEND
from .mistakes import ISSUE
from .readings import Readings, of_description
from .report import NUMBERS, Part, Report, number, printable, summary

if TYPE_CHECKING:
    from .gallery import Row
    from .operator import Identification

SYMBOLS = {"right": "✓", "equivalent": "≈", "wrong": "✗", "not judged": "?"}
_HEAD = """<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
"""  # so a page loads nothing and runs nothing
_STYLE = """
.pyrope { color-scheme: light dark; --paper: light-dark(#ffffff, #15181c); --card: light-dark(#f6f7f9, #1e2329);
  --ink: light-dark(#1b1f24, #e6e9ec); --quiet: light-dark(#57606a, #a3adb8); --rule: light-dark(#d5dae0, #3a424b);
  --link: light-dark(#0a5bb5, #7db8ff); --right: light-dark(#1a6e33, #7fd897); --wrong: light-dark(#a8201a, #ff9d95);
  --equivalent: light-dark(#14606b, #7fd3de); --not-judged: light-dark(#7a4f00, #f3c46b);
  background: var(--paper); color: var(--ink); padding: 1rem; border-radius: 8px; text-align: left;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: anywhere;
  * { box-sizing: border-box; }
  h1, h2, h3, h4 { line-height: 1.25; margin: 1.25rem 0 .5rem; color: inherit; font-size: 1.05rem; }
  a { color: var(--link); }
  code, pre { font: .875em/1.45 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; background: none;
    color: inherit; padding: 0; border: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
  pre { background: var(--card); padding: .75rem; border-radius: 6px; margin: .5rem 0; }
  .verdict { display: flex; gap: .75rem; align-items: baseline; padding: .6rem .8rem; border-radius: 8px;
    border-left: 6px solid; background: var(--card); font-weight: 650; margin: .75rem 0; }
  h1.verdict { font-size: 1.3rem; padding: .9rem 1rem; margin-top: 0; }
  .right { color: var(--right); } .equivalent { color: var(--equivalent); }
  .wrong { color: var(--wrong); } .not-judged { color: var(--not-judged); }
  .finding { background: var(--card); border: 1px solid var(--rule); border-left: 4px solid var(--wrong);
    border-radius: 8px; padding: .1rem 1rem .8rem; margin: .75rem 0; }
  dl { display: grid; grid-template-columns: minmax(5.5rem, auto) 1fr; gap: .35rem 1rem; margin: .5rem 0 0; }
  dt { color: var(--quiet); font-weight: 400; } dd { margin: 0; }
  table { border-collapse: collapse; width: 100%; font-size: .93rem; margin: .25rem 0; background: none; }
  th, td { text-align: left; vertical-align: top; padding: .35rem .6rem .35rem 0; white-space: normal;
    border-bottom: 1px solid var(--rule); background: none; color: inherit; overflow-wrap: break-word; }
  table.sides { table-layout: fixed; } .sides th:first-child { width: 27%; }
  th { color: var(--quiet); font-weight: 500; }
  .number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
  td.differs { color: var(--wrong); font-weight: 600; }
  figure { margin: 1rem 0 0; overflow-x: auto; }
  img { display: block; height: auto; max-width: 100%; min-width: min(34rem, 100vw * 1.6); background: #ffffff;
    border-radius: 6px; }
  details { margin: .5rem 0; border: 1px solid var(--rule); border-radius: 8px; padding: .5rem .75rem; }
  summary { cursor: pointer; font-weight: 600; }
  @media (max-width: 480px) { padding: .75rem; dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; }
    table { font-size: .87rem; } }
  @media print { color-scheme: light; font-size: 11pt; padding: 0; figure, .finding, tr { break-inside: avoid; }
    .verdict { border: 2px solid; } h2, h3, h4, thead { break-after: avoid; } } }
"""
_BODY = """
html { color-scheme: light dark; background: light-dark(#ffffff, #15181c); -webkit-text-size-adjust: 100%; }
body { margin: 0; } .pyrope { max-width: 64rem; margin: 0 auto; border-radius: 0; }
@media print { html { color-scheme: light; } }
"""


# ── Markup ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Markup(str):
    """Text that is markup. Any other text is escaped before it becomes a part of one."""


def element(name: str, *children: str, **attributes: object) -> Markup:
    """An element of HTML. Underscores of attributes become hyphens, ``class_`` is class, None leaves one out.

    >>> element("p", "a < b", element("b", "!"), class_="x", data_y='"')
    '<p class="x" data-y="&quot;">a &lt; b<b>!</b></p>'
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    words = "".join(f' {key}="{html.escape(str(value))}"' for key, value in given.items())
    inside = "".join(child if isinstance(child, Markup) else html.escape(child) for child in children)
    return Markup(f"<{name}{words}>{inside}" + ("" if name == "img" else f"</{name}>"))


# ── Files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def write_page(path: PathLike, title: str, *sections: Markup) -> None:
    """Writes sections as a page."""
    with atomic_path(check_file(path)) as draft:
        draft.write_bytes(document(title, *sections).encode("utf-8"))


def check_file(path: PathLike) -> Path:
    """Returns the path if a page can be written there."""
    return plots.check_path(path, "a page", (".html", ".htm"))


def document(title: str, *sections: Markup) -> str:
    """A whole page."""
    head = element("head", Markup(_HEAD), element("title", title), element("style", Markup(_BODY)))
    body = element("body", Markup(fragment(*sections)))
    return printable(f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n")


def fragment(*sections: Markup) -> str:
    """Sections with their style, as a part of another page, such as a notebook."""
    return printable(element("div", element("style", Markup(_STYLE)), *sections, class_="pyrope"))


# ── Pieces ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def linked(text: str) -> Markup:
    """Text in which issues, such as vllm-project/vllm#590, are links."""
    link = r'<a href="https://github.com/\1/issues/\2" rel="noopener">\g<0></a>'
    return Markup(ISSUE.sub(link, html.escape(text)))


def _verdict(verdict: str, words: str, level: str = "h1") -> Markup:
    symbol = element("span", SYMBOLS[verdict], aria_hidden="true")
    return element(level, symbol, element("span", words), class_=f"verdict {_class(verdict)}")


def _class(verdict: str) -> str:
    return verdict.replace(" ", "-")


def _definitions(rows: Iterable[tuple[str, str]]) -> Markup:
    """Names and what is said of each; what is empty is left out."""
    said = ((name, linked(words) if name == "happened" else words) for name, words in rows if words)
    return element("dl", *(part for name, words in said for part in (element("dt", name), element("dd", words))))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    classes = ["number" if name in NUMBERS else None for name in head]
    names = [element("th", name, class_=class_) for name, class_ in zip(head, classes, strict=True)]
    lines = [
        element("tr", *(element("td", cell, class_="differs" if cell.startswith("≠ ") else class_)
                        for cell, class_ in zip(row, classes, strict=True))) for row in rows
    ]  # fmt: skip
    sides = None if "number" in classes else "sides"
    return element("table", element("thead", element("tr", *names)), element("tbody", *lines), class_=sides)


# ── A report ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def report_section(report: Report, level: str = "h1", pictures: bool = True) -> Markup:
    """All that a report says, and what was read of its candidate; pictures take a second, and 200 kB."""
    readings: Readings | None = report.readings() if callable(report.readings) else report.readings
    sides = (readings.sides if readings is not None else ()) or [(*row, row[1] == row[2]) for row in report.measured]
    marked = [(name, due, got if same else f"≠ {got}") for name, due, got, same in sides]
    heading = "h2" if level == "h1" else "h4"
    shown = [_part(part, heading) for part in report.parts(marked)]
    drawn = _pictures(readings, heading) if pictures and readings is not None else ()
    return element("section", _verdict(report.verdict, report.headline, level), *shown, *drawn)


def _part(part: Part, heading: str) -> Markup:
    title = [element(heading, part.title)] if part.title else []
    rows = [_definitions(part.rows)] if part.rows else []
    table = [_table(part.table[0], part.table[1:])] if part.table else []
    lines = [element("pre", "\n".join(part.lines))] if part.lines else []
    return element("div", *title, *rows, *table, *lines, class_="finding" if "fact" in dict(part.rows) else None)


def _pictures(readings: Readings, heading: str) -> list[Markup]:
    """What was read, drawn; nothing without matplotlib."""
    drawn: list[tuple[str, Any]] = []
    with contextlib.suppress(ImportError):
        if readings.operators is not None:
            drawn.append((f"R(m) at position {readings.operators.position}", plots.operator_map(*readings.operators)))
        if readings.errors is not None:
            drawn.append((f"Errors by {readings.errors.place}", plots.errors_chart(*readings.errors)))
        if readings.frequencies is not None and len(readings.frequencies.measured):
            drawn.append(("Frequencies by pair", plots.frequencies_chart(*readings.frequencies)))
    return [part for title, figure in drawn for part in (element(heading, title), _figure(title, figure))]


def _figure(name: str, figure: Any) -> Markup:
    """A figure inside the page; as an image, so that its ids and fonts are its own."""
    data = base64.b64encode(plots.svg(figure).encode()).decode()
    return element("figure", element("img", alt=name, src=f"data:image/svg+xml;base64,{data}"))


# ── An identification, many reports, the gallery ─────────────────────────────────────────────────────────────────────


def identification_section(result: Identification) -> Markup:
    """What was read of a candidate of which nothing is expected."""
    title, named = str(result).partition("\n")[0], result.rope is not None
    rule = result.explanations[0].partition(" (")[0] if result.explanations else "no rotation"
    head = _verdict("right" if named else "not judged", f"{title}: {rule}")
    rope = [element("p", element("code", repr(result.rope)))] if named else []
    drawn = [] if result.readings is None else _pictures(of_description(result.readings), "h2")
    return element("section", head, _definitions(result.rows()), *rope, *drawn)


def verification_section(reports: Sequence[Report]) -> Markup:
    """Test vectors: a line for each case, which opens its report; wrong ones first."""
    order = ("wrong", "not judged", "equivalent", "right")
    listed = sorted(reports, key=lambda report: order.index(report.verdict))
    verdict = listed[0].verdict if listed[0].verdict in order[:2] else "right"
    lines = [_folded(report, ": ".join((report.subject, *report.faults[:1]))) for report in listed]
    return element("section", _verdict(verdict, f"{verdict.upper()} test vectors: {summary(reports)}"), *lines)


def gallery_section(rows: Sequence[Row]) -> Markup:
    """A line for each implementation, which opens its report."""
    good = sum(row.as_expected for row in rows)
    words = f"{len(rows)} implementations, {good} judged as they should be; each line opens its report"
    head = _verdict("right" if good == len(rows) else "wrong", words)
    lines = [_folded(row.report, f"{row.exhibit.name}: {row.remark}; error {number(row.worst)}") for row in rows]
    return element("section", head, *lines, _definitions(LEGEND))


def _folded(report: Report, title: str) -> Markup:
    """A line that opens the report by a click."""
    symbol = element("span", f"{SYMBOLS[report.verdict]} {report.verdict} ", class_=_class(report.verdict))
    return element("details", element("summary", symbol, title), report_section(report, "h3", pictures=False))
