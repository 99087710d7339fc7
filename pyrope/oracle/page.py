"""Reports as HTML: one file without scripts and without the network, in light and dark, on paper and on a phone.

`document` makes a page, `fragment` the same for a notebook. Everything that is text is escaped by `element`. The pages
say nothing that the reports do not: they show it, in pictures where matplotlib is installed, in tables everywhere.
"""

from __future__ import annotations

import base64
import contextlib
import html
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import plots
from ..files import PathLike, atomic_path
from .readings import Readings, Side, rotation_readings
from .report import ErrorRow, Finding, Report, abbreviated, by_faults, cases_of, printable, summary

if TYPE_CHECKING:
    from .gallery import Row
    from .operator import Identification

SUFFIXES = (".html", ".htm")
SYMBOLS = {"right": "✓", "equivalent": "≈", "wrong": "✗", "not judged": "?"}
# Where the issues are that `mistakes` names by the last part alone, such as vllm#590.
REPOSITORIES = {place.rpartition("/")[2]: place for place in (
    "deepspeedai/DeepSpeed", "baidu/ERNIE-Image", "alibaba/MNN", "NVIDIA-NeMo/Megatron-Bridge", "NVIDIA/Megatron-LM",
    "PaddlePaddle/Paddle", "NVIDIA/TensorRT-LLM", "rajveer43/VeloxQuant-MLX", "huggingface/candle",
    "huggingface/diffusers", "turboderp-org/exllamav3", "EleutherAI/gpt-neox", "kekzl/imp", "ggml-org/llama.cpp",
    "oxiglade/mlx-rs", "Blaizzy/mlx-vlm", "karpathy/nanochat", "pie-project/pie", "sgl-project/sglang",
    "pytorch/torchtitan", "huggingface/transformers", "unslothai/unsloth", "vllm-project/vllm",
    "lucidrains/x-transformers",
)}  # fmt: skip
_ISSUE = re.compile(r"([A-Za-z][\w.-]*)#(\d+)")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # a page loads nothing and runs nothing
_PAPER = """--paper: #ffffff; --card: #f6f7f9; --ink: #1b1f24; --quiet: #57606a; --rule: #d5dae0; --link: #0a5bb5;
  --right: #1a6e33; --equivalent: #14606b; --wrong: #a8201a; --not-judged: #7a4f00; --blue: #1f6fb2;
  color-scheme: light;"""
_STYLE = """
.pyrope { PAPER background: var(--paper); color: var(--ink); padding: 1rem; border-radius: 8px; text-align: left;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) { .pyrope { --paper: #15181c; --card: #1e2329; --ink: #e6e9ec; --quiet: #a3adb8;
  --rule: #3a424b; --link: #7db8ff; --right: #7fd897; --equivalent: #7fd3de; --wrong: #ff9d95; --not-judged: #f3c46b;
  --blue: #6fb3f2; color-scheme: dark; } }
@media print { .pyrope { PAPER --card: #ffffff; --ink: #000000; --quiet: #444444; font-size: 11pt; padding: 0; }
  .pyrope figure, .pyrope .finding, .pyrope tr { break-inside: avoid; } .pyrope .verdict { border: 2px solid; }
  .pyrope h2, .pyrope h3, .pyrope h4, .pyrope thead { break-after: avoid; }
  .pyrope .bar { -webkit-print-color-adjust: exact; print-color-adjust: exact; } }
.pyrope * { box-sizing: border-box; }
.pyrope h1, .pyrope h2, .pyrope h3, .pyrope h4 { line-height: 1.25; margin: 0; color: inherit; font-size: 1.05rem; }
.pyrope h2 { font-size: 1.15rem; margin: 1.75rem 0 .6rem; padding-bottom: .25rem;
  border-bottom: 1px solid var(--rule); }
.pyrope h4 { font-size: 1rem; margin: 1.25rem 0 .5rem; }
.pyrope p { margin: .5rem 0; } .pyrope a { color: var(--link); }
.pyrope code, .pyrope pre { font: .875em/1.45 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  background: none; color: inherit; padding: 0; border: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.pyrope pre { background: var(--card); padding: .75rem; border-radius: 6px; margin: .5rem 0; }
.pyrope .verdict { display: flex; gap: .75rem; align-items: baseline; padding: .6rem .8rem; border-radius: 8px;
  border-left: 6px solid; background: var(--card); font-weight: 650; }
.pyrope h1.verdict { font-size: 1.3rem; padding: .9rem 1rem; } .pyrope h3.verdict { margin: .75rem 0; }
.pyrope .verdict .name { letter-spacing: .04em; margin-right: .4em; }
.pyrope .verdict .symbol { font-size: 1.5rem; line-height: 1; }
.pyrope .right { color: var(--right); } .pyrope .equivalent { color: var(--equivalent); }
.pyrope .wrong { color: var(--wrong); } .pyrope .not-judged { color: var(--not-judged); }
.pyrope .quiet, .pyrope figcaption { color: var(--quiet); font-size: .9rem; }
.pyrope .finding { background: var(--card); border: 1px solid var(--rule); border-left: 4px solid var(--wrong);
  border-radius: 8px; padding: .8rem 1rem; margin: .75rem 0; }
.pyrope dl { display: grid; grid-template-columns: minmax(5.5rem, auto) 1fr; gap: .35rem 1rem; margin: .5rem 0 0; }
.pyrope dt { color: var(--quiet); font-weight: 400; } .pyrope dd { margin: 0; }
.pyrope table { border-collapse: collapse; width: 100%; font-size: .93rem; margin: .25rem 0; background: none; }
.pyrope th, .pyrope td { text-align: left; vertical-align: top; padding: .35rem .6rem .35rem 0; white-space: normal;
  border-bottom: 1px solid var(--rule); background: none; color: inherit; overflow-wrap: break-word; }
.pyrope th { color: var(--quiet); font-weight: 500; }
.pyrope td.number, .pyrope th.number { text-align: right; font-variant-numeric: tabular-nums; }
.pyrope td.number { white-space: nowrap; }
.pyrope .sides table { table-layout: fixed; } .pyrope .sides th:first-child { width: 27%; }
.pyrope tr.differs td:last-child { color: var(--wrong); font-weight: 600; }
.pyrope .bar { display: block; height: .7rem; min-width: 2px; border-radius: 2px; background: var(--blue); }
.pyrope .bars { width: 30%; vertical-align: middle; padding-right: 0; }
@media (max-width: 480px) { .pyrope { padding: .75rem; } .pyrope dl { grid-template-columns: 1fr; gap: 0; }
  .pyrope dd { margin-bottom: .5rem; } .pyrope .bars { display: none; } .pyrope table { font-size: .87rem; } }
.pyrope figure { margin: 1rem 0 0; overflow-x: auto; } .pyrope figcaption { margin-top: .4rem; }
.pyrope img { display: block; height: auto; max-width: 100%; min-width: min(34rem, 100vw * 1.6); background: #ffffff;
  border-radius: 6px; }
.pyrope .key { list-style: none; padding: 0; margin: .3rem 0 0; display: flex; flex-wrap: wrap; gap: .1rem 1rem;
  font-size: .85rem; color: var(--quiet); }
.pyrope details { margin: .5rem 0; border: 1px solid var(--rule); border-radius: 8px; padding: .5rem .75rem; }
.pyrope summary { cursor: pointer; font-weight: 600; }
.pyrope .rows .head, .pyrope .rows > details > summary { display: grid; gap: 0 .75rem; align-items: baseline;
  grid-template-columns: minmax(0, 4fr) minmax(0, 2fr) minmax(0, 1.3fr) minmax(0, 5fr); padding-left: 1.2rem; }
.pyrope .rows .head { color: var(--quiet); font-size: .93rem; margin-top: 1rem; }
.pyrope .rows > details { border-width: 0 0 1px; border-radius: 0; margin: 0; padding: .35rem 0; }
.pyrope .rows > details > summary { font-weight: 400; position: relative; }
.pyrope .rows > details > summary::before { content: "▸"; position: absolute; left: 0; color: var(--quiet); }
.pyrope .rows > details[open] > summary::before { content: "▾"; }
@media (max-width: 600px) { .pyrope .rows .head, .pyrope .rows > details > summary {
  grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); } }
""".replace("PAPER", _PAPER)
_BODY = """
html { background: #ffffff; -webkit-text-size-adjust: 100%; } body { margin: 0; }
.pyrope { max-width: 64rem; margin: 0 auto; border-radius: 0; }
@media screen and (prefers-color-scheme: dark) { html { background: #15181c; } }
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
    return Markup(f"<{name}{words}>{joined(children)}" + ("" if name == "img" else f"</{name}>"))


def joined(parts: Iterable[str]) -> Markup:
    """Markup one after the other; plain text among it is escaped."""
    return Markup("".join(part if isinstance(part, Markup) else html.escape(part) for part in parts))


# ── Files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_file(path: PathLike) -> Path:
    """Returns the path if a page can be written there; to be called before anything is computed."""
    file = Path(path)
    if file.suffix.lower() not in SUFFIXES:
        raise ValueError(f"a page must be a {' or '.join(SUFFIXES)} file, was {str(path)!r}")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {file.parent} to put {file.name} into")
    return file


def write_page(path: PathLike, title: str, *sections: Markup) -> None:
    """Writes sections as a page."""
    with atomic_path(check_file(path)) as draft:
        draft.write_bytes(document(title, *sections).encode("utf-8"))


def document(title: str, *sections: Markup) -> str:
    """A whole page."""
    head = [
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        element("title", title),
        element("style", Markup(_BODY)),
    ]
    body = element("body", Markup(fragment(*sections)))
    return printable(f"<!DOCTYPE html>\n{element('html', element('head', *head), body, lang='en')}\n")


def fragment(*sections: Markup) -> str:
    """Sections with their style, as a part of another page, such as a notebook."""
    return printable(element("div", element("style", Markup(_STYLE)), *sections, class_="pyrope"))


# ── Pieces ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def linked(text: str) -> Markup:
    """Text in which issues of known projects, such as vllm#590, are links."""
    parts, end = list[str](), 0
    for match in _ISSUE.finditer(text):
        if (repository := REPOSITORIES.get(match[1])) is not None:
            address = f"https://github.com/{repository}/issues/{match[2]}"
            parts += [text[end : match.start()], element("a", match[0], href=address, rel="noopener")]
            end = match.end()
    return joined([*parts, text[end:]])


def _definitions(rows: Iterable[tuple[str, str]]) -> Markup:
    """Names and what is said of each; what is empty is left out."""
    pairs = ((element("dt", name), element("dd", words)) for name, words in rows if words)
    return element("dl", *(part for pair in pairs for part in pair))


def _verdict(verdict: str, words: str, level: str = "h1") -> Markup:
    symbol = element("span", SYMBOLS[verdict], class_="symbol", aria_hidden="true")
    name = element("span", verdict.upper(), class_="name")
    return element(level, symbol, element("span", name, f" {words}"), class_=f"verdict {_class(verdict)}")


def _class(verdict: str) -> str:
    return verdict.replace(" ", "-")


def _table(head: Mapping[str, str | None], rows: Iterable[Markup]) -> Markup:
    """A table with the names of its columns, and their classes."""
    cells = [element("th", name, class_=class_) for name, class_ in head.items()]
    return element("table", element("thead", element("tr", *cells)), element("tbody", *rows))


def _fold(title: str, parts: Iterable[Markup]) -> Markup:
    """What opens by a click."""
    return element("details", element("summary", title), *parts)


# ── A report ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def report_section(report: Report, level: str = "h1", pictures: bool = True) -> Markup:
    """All that a report says, and what was read of its candidate; pictures take a second, and 200 kB."""
    sub = "h2" if level == "h1" else "h4"
    about, _, why = report.headline.partition(f": {report.verdict.upper()}")
    parts = [_verdict(report.verdict, f"{about}{why}", level), _expected(report.expected)]
    parts.append(_definitions([("precision", report.precision or ""), ("tried", report.tried)]))
    if (failure := report.failure) is not None:
        parts.append(_definitions([("reason", failure.reason), ("received", failure.received), ("fix", failure.fix)]))
        parts += [element("pre", "\n".join(failure.frames))] if failure.frames else []
    if report.findings:
        title = "What is wrong" if len(report.findings) == 1 else f"What is wrong: {len(report.findings)} findings"
        parts += [element(sub, title), *map(_finding, report.findings)]
    parts += _readings(_shown(report), report.verdict, sub, pictures)
    if report.errors:
        parts += [element(sub, "Errors in numbers"), _errors_table(report.errors)]
    if report.notes:
        parts += [element(sub, "Notes"), element("ul", *(element("li", note) for note in report.notes))]
    return element("section", *parts)


def _expected(text: str) -> Markup:
    short = abbreviated(text)
    whole = [_fold("in full", [element("code", text)])] if short != text else []
    return joined([element("p", "expected: ", element("code", short), class_="quiet"), *whole])


def _finding(finding: Finding) -> Markup:
    rows = [(name, linked(words) if name == "happened" else words) for name, words in finding.rows()]
    shows = "" if finding.since is None else f"from position {finding.since} on"
    return element("div", element("h3", finding.fault), _definitions([*rows, ("shows", shows)]), class_="finding")


def _shown(report: Report) -> Readings | None:
    """What is drawn of a report; where a check has made nothing for it, what it says it measured, as a table."""
    readings: Readings | None = report.readings() if callable(report.readings) else report.readings
    if readings is None and report.measured:
        return Readings(sides=tuple(Side(*row, row[1] == row[2]) for row in report.measured))
    return readings


def _errors_table(errors: Sequence[ErrorRow]) -> Markup:
    """The errors beside what is allowed, with bars on a logarithmic scale."""
    logs = [math.log10(row.worst) for row in errors if 0 < row.worst < math.inf]
    low, high = (math.floor(min(logs)), max(logs)) if logs else (-1, 0)
    in_ulps, rows = any(row.ulps is not None for row in errors), []
    for row in errors:
        part = (math.log10(row.worst) - low) / max(high - low, 1e-9) if 0 < row.worst < math.inf else None
        bar = "" if part is None else element("span", class_="bar", style=f"width: {100 * part:.1f}%")
        numbers = [_number(row.worst), _number(row.allowed), *[_number(row.ulps, ".3g")] * in_ulps]
        cells = [element("td", row.where), element("td", bar, class_="bars")]
        rows.append(element("tr", *cells, *(element("td", number, class_="number") for number in numbers)))
    names = ("worst", "allowed", *["ulps"] * in_ulps)
    return _table({"where": None, "on a logarithmic scale": "bars", **dict.fromkeys(names, "number")}, rows)


def _number(value: float | None, form: str = ".2g") -> str:
    return "—" if value is None else f"{value:{form}}" if math.isfinite(value) else "not finite"


# ── What was read ────────────────────────────────────────────────────────────────────────────────────────────────────


def _readings(readings: Readings | None, verdict: str, heading: str, pictures: bool = True) -> Iterator[Markup]:
    """A table of what differs, and pictures, if they can be drawn."""
    if readings is None:
        return
    if readings.sides:
        table = _table(dict.fromkeys(("", "expected", "measured")), (_side(*side) for side in readings.sides))
        yield from (element(heading, "Expected and measured"), element("div", table, class_="sides"))
    with contextlib.suppress(ImportError):  # without matplotlib, there are tables alone
        yield from _pictures(readings, verdict, heading) if pictures else ()


def _side(name: str, expected: str, measured: str, same: bool) -> Markup:
    cells = (element("td", cell) for cell in (name, expected, measured if same else f"≠ {measured}"))
    return element("tr", *cells, class_=None if same else "differs")


def _pictures(readings: Readings, verdict: str, heading: str) -> Iterator[Markup]:
    if (operators := readings.operators) is not None:
        where, measured, expected, differs = operators
        words = (
            "" if differs or verdict != "wrong" else "No pair differs here: the findings say in which calls one does."
        )
        yield element(heading, f"R(m) at position {where}")
        yield _picture(
            f"R(m) at position {where}", plots.operator_map(where, measured, expected, readings.reference), words
        )
    if readings.errors is not None:
        yield element(heading, f"Errors by {readings.errors.place}")
        yield _picture("the largest errors", plots.errors_chart(*readings.errors))
    if readings.frequencies is not None and len(readings.frequencies.measured):
        yield element(heading, "Frequencies by pair")
        yield _picture("the frequencies of the pairs", plots.frequencies_chart(*readings.frequencies))


def _picture(name: str, figure: Any, words: str = "") -> Markup:
    """A figure inside the page; as an image, so that its ids and fonts are its own."""
    data = base64.b64encode(plots.svg(figure).encode()).decode()
    image = element("img", alt=name, src=f"data:image/svg+xml;base64,{data}")
    return element("figure", image, *[element("figcaption", words)] * bool(words))


# ── An identification, many reports, the gallery ─────────────────────────────────────────────────────────────────────


def identification_section(result: Identification) -> Markup:
    """What was read of a candidate of which nothing is expected."""
    title, named = str(result).partition("\n")[0], result.rope is not None
    rule = result.explanations[0].partition(" (")[0] if result.explanations else "no rotation"
    symbol = element("span", "✓" if named else "?", class_="symbol", aria_hidden="true")
    verdict = f"verdict {'right' if named else 'not-judged'}"
    head = element("h1", symbol, element("span", f"{title}: {rule}"), class_=verdict)
    rope = [element("p", element("code", repr(result.rope)))] if named else []
    found = result.readings
    read = None if found is None else rotation_readings(found, result.rope, "identified")
    return element("section", head, _definitions(result.rows()), *rope, *_readings(read, "right", "h2"))


def verification_section(reports: Sequence[Report]) -> Markup:
    """Test vectors: wrong cases by what is wrong with them, then those that are not judged, then all the others."""
    verdict = next((name for name in ("wrong", "not judged") if any(r.verdict == name for r in reports)), "right")
    parts = [_verdict(verdict, f"test vectors: {summary(reports)}")]
    for faults, (first, *others) in by_faults(reports).items():
        parts.append(element("h2", f"{', '.join(faults)}: {cases_of(1 + len(others))}"))
        parts.append(report_section(first, "h3"))
        if others:
            parts.append(_fold(f"the same in {cases_of(len(others))} more", map(_folded, others)))
    for name in ("not judged", "equivalent", "right"):
        if members := [report for report in reports if report.verdict == name]:
            parts.append(_fold(f"{SYMBOLS[name]} {name}: {cases_of(len(members))}", map(_folded, members)))
    return element("section", *parts)


def _folded(report: Report) -> Markup:
    symbol = element("span", f"{SYMBOLS[report.verdict]} ", class_=_class(report.verdict))
    return _fold(joined([symbol, report.subject]), [report_section(report, "h3", pictures=False)])


_GALLERY = (
    "The error is the largest absolute one of any output, up to position 131071, where a float32 angle alone explains "
    "about 0.01. Each line opens its report."
)
_LEGEND = {
    "right": "all outputs are within the bounds",
    "equivalent": "the same attention, if the other side is written alike",
    "wrong": "with the name of the mistake",
}


def gallery_section(rows: Sequence[Row]) -> Markup:
    """A line for each implementation, which opens its report."""
    good = sum(row.as_expected for row in rows)
    verdict = "right" if good == len(rows) else "wrong"
    names = ("implementation", "verdict", "error", "identified, or what is wrong")
    lines = [element("div", *(element("span", name) for name in names), class_="head")]
    for row in rows:
        cells = (row.name, _judged(row.report.verdict), _number(row.worst), row.remark)
        lines.append(
            _fold(joined(element("span", cell) for cell in cells), [report_section(row.report, "h3", pictures=False)])
        )
    legend = [element("li", _judged(verdict), f": {words}") for verdict, words in _LEGEND.items()]
    head = _verdict(verdict, f"gallery: {len(rows)} implementations, {good} judged as they should be")
    key = element("ul", *legend, class_="key"), element("p", _GALLERY, class_="quiet")
    return element("section", head, *key, element("div", *lines, class_="rows"))


def _judged(verdict: str) -> Markup:
    return element("b", f"{SYMBOLS[verdict]} {verdict}", class_=_class(verdict))
