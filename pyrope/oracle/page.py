"""Reports as HTML: one file without scripts and without the network, in light and dark, on paper and on a telephone.

`document` makes a page, `fragment` the same for a notebook. Everything that is text is escaped by `drawings.element`.
The pages say nothing that the reports do not: they show it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..tensors import PathLike, atomic_path
from . import drawings
from .drawings import Markup, element, joined

if TYPE_CHECKING:
    from .drawings import Errors, Frequencies, Operators, Readings
    from .gallery import Row
    from .identification import Identification
    from .report import ErrorRow, Finding, Report

SUFFIXES = (".html", ".htm")
SYMBOLS = {"right": "✓", "equivalent": "≈", "wrong": "✗", "not judged": "?"}
# Where the issues are that a catalogue of faults names by the last part alone, such as vllm#590.
REPOSITORIES = {
    "DeepSpeed": "deepspeedai/DeepSpeed",
    "ERNIE-Image": "baidu/ERNIE-Image",
    "MNN": "alibaba/MNN",
    "Megatron-Bridge": "NVIDIA-NeMo/Megatron-Bridge",
    "Megatron-LM": "NVIDIA/Megatron-LM",
    "Paddle": "PaddlePaddle/Paddle",
    "TensorRT-LLM": "NVIDIA/TensorRT-LLM",
    "VeloxQuant-MLX": "rajveer43/VeloxQuant-MLX",
    "candle": "huggingface/candle",
    "diffusers": "huggingface/diffusers",
    "exllamav3": "turboderp-org/exllamav3",
    "gpt-neox": "EleutherAI/gpt-neox",
    "imp": "kekzl/imp",
    "llama.cpp": "ggml-org/llama.cpp",
    "mlx-rs": "oxiglade/mlx-rs",
    "mlx-vlm": "Blaizzy/mlx-vlm",
    "nanochat": "karpathy/nanochat",
    "pie": "pie-project/pie",
    "sglang": "sgl-project/sglang",
    "torchtitan": "pytorch/torchtitan",
    "transformers": "huggingface/transformers",
    "unsloth": "unslothai/unsloth",
    "vllm": "vllm-project/vllm",
    "x-transformers": "lucidrains/x-transformers",
}
_ISSUE = re.compile(r"([A-Za-z][\w.-]*)#(\d+)")
# Ten numbers or more in brackets.
_LONG_LIST = re.compile(r"([\[(])((?:[-+.\w]+, ?){3})((?:[-+.\w]+, ?){6,})([-+.\w]+),?([\])])")
# What a terminal obeys, but tabs and newlines; what turns text around; surrogates, which no file has.
_NOT_TEXT = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # a page loads nothing and runs nothing

_STYLE = """
.pyrope { --paper: #ffffff; --card: #f6f7f9; --ink: #1b1f24; --quiet: #57606a; --rule: #d5dae0; --link: #0a5bb5;
  --right: #1a6e33; --right-paper: #e3f4e7; --equivalent: #14606b; --equivalent-paper: #e0f2f4; --wrong: #a8201a;
  --wrong-paper: #fdeaea; --not-judged: #7a4f00; --not-judged-paper: #fdf1d8; --blue: #1f6fb2; --teal: #00796b;
  --violet: #7d3c98; color-scheme: light; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; padding: 1rem;
  border-radius: 8px; overflow-wrap: anywhere; text-align: left; }
@media (prefers-color-scheme: dark) { .pyrope { --paper: #15181c; --card: #1e2329; --ink: #e6e9ec; --quiet: #a3adb8;
  --rule: #3a424b; --link: #7db8ff; --right: #7fd897; --right-paper: #16301e; --equivalent: #7fd3de;
  --equivalent-paper: #12303a; --wrong: #ff9d95; --wrong-paper: #3d1a1a; --not-judged: #f3c46b;
  --not-judged-paper: #372a10; --blue: #6fb3f2; --teal: #4fc3b1; --violet: #d29bea; color-scheme: dark; } }
@media print { .pyrope { --paper: #ffffff; --card: #ffffff; --ink: #000000; --quiet: #444444; --rule: #bbbbbb;
  --link: #003a80; --right: #14552a; --right-paper: #ffffff; --equivalent: #0f4a53; --equivalent-paper: #ffffff;
  --wrong: #8a1410; --wrong-paper: #ffffff; --not-judged: #5e3d00; --not-judged-paper: #ffffff; --blue: #1f6fb2;
  --teal: #00796b; --violet: #7d3c98; color-scheme: light; font-size: 11pt; padding: 0; }
  .pyrope figure, .pyrope .finding, .pyrope tr { break-inside: avoid; } .pyrope .verdict { border: 2px solid; }
  .pyrope h2, .pyrope h3, .pyrope h4, .pyrope thead { break-after: avoid; }
  .pyrope .bar, .pyrope .shades span { -webkit-print-color-adjust: exact; print-color-adjust: exact; } }
.pyrope * { box-sizing: border-box; }
.pyrope h1, .pyrope h2, .pyrope h3, .pyrope h4 { line-height: 1.25; margin: 0; color: inherit; }
.pyrope h4 { font-size: 1rem; margin: 1.25rem 0 .5rem; }
.pyrope h2 { font-size: 1.15rem; margin: 1.75rem 0 .6rem; padding-bottom: .25rem;
  border-bottom: 1px solid var(--rule); }
.pyrope h3 { font-size: 1.05rem; } .pyrope h3.verdict { margin: .75rem 0; }
.pyrope p { margin: .5rem 0; }
.pyrope a { color: var(--link); }
.pyrope code, .pyrope pre { font: .875em/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas,
  "DejaVu Sans Mono", monospace; background: none; color: inherit;
  padding: 0; border: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.pyrope pre { background: var(--card); padding: .75rem; border-radius: 6px; margin: .5rem 0; }
.pyrope .verdict { display: flex; gap: .75rem; align-items: baseline; padding: .9rem 1rem; border-radius: 8px;
  border-left: 6px solid; font-size: 1.3rem; font-weight: 650; }
.pyrope h3.verdict { font-size: 1.05rem; padding: .6rem .8rem; }
.pyrope .verdict .name { letter-spacing: .04em; margin-right: .4em; }
.pyrope .verdict .symbol { font-size: 1.5rem; line-height: 1; }
.pyrope .right { color: var(--right); } .pyrope .verdict.right { background: var(--right-paper); }
.pyrope .equivalent { color: var(--equivalent); } .pyrope .verdict.equivalent { background: var(--equivalent-paper); }
.pyrope .wrong { color: var(--wrong); } .pyrope .verdict.wrong { background: var(--wrong-paper); }
.pyrope .not-judged { color: var(--not-judged); } .pyrope .verdict.not-judged { background: var(--not-judged-paper); }
.pyrope .quiet, .pyrope figcaption { color: var(--quiet); font-size: .9rem; }
.pyrope .finding { background: var(--card); border: 1px solid var(--rule); border-left: 4px solid var(--wrong);
  border-radius: 8px; padding: .8rem 1rem; margin: .75rem 0; }
.pyrope dl { display: grid; grid-template-columns: minmax(5.5rem, auto) 1fr; gap: .35rem 1rem; margin: .5rem 0 0; }
.pyrope dt { color: var(--quiet); font-weight: 400; } .pyrope dd { margin: 0; }
@media (max-width: 480px) { .pyrope { padding: .75rem; } .pyrope dl { grid-template-columns: 1fr; gap: 0; }
  .pyrope dd { margin-bottom: .5rem; } }
.pyrope table { border-collapse: collapse; width: 100%; font-size: .93rem; margin: .25rem 0; background: none; }
.pyrope th, .pyrope td { text-align: left; vertical-align: top; padding: .35rem .6rem .35rem 0;
  border-bottom: 1px solid var(--rule); background: none; color: inherit; white-space: normal; }
.pyrope th { color: var(--quiet); font-weight: 500; }
.pyrope td.number, .pyrope th.number { text-align: right; font-variant-numeric: tabular-nums; }
.pyrope td.number { white-space: nowrap; }
.pyrope th, .pyrope td { overflow-wrap: break-word; }
.pyrope .sides table { table-layout: fixed; } .pyrope .sides th:first-child { width: 27%; }
@media (max-width: 480px) { .pyrope .bars { display: none; } .pyrope table { font-size: .87rem; } }
.pyrope tr.differs td:last-child { color: var(--wrong); font-weight: 600; }
.pyrope .bar { display: block; height: .7rem; min-width: 2px; border-radius: 2px; background: var(--blue); }
.pyrope .bars { width: 30%; vertical-align: middle; padding-right: 0; }
.pyrope figure { margin: 0; min-width: 0; }
.pyrope .charts { display: grid; gap: 1.5rem; margin-top: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
.pyrope .charts > figure:last-child:nth-child(odd) { grid-column: 1 / -1; display: grid; gap: 0 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); align-items: center; }
.pyrope .matrices { display: grid; grid-template-columns: 1fr 1fr; gap: .75rem; max-width: 56rem; }
.pyrope .matrices p { margin: 0 0 .25rem; font-weight: 600; font-size: .93rem; }
.pyrope figcaption { margin-top: .4rem; }
.pyrope svg { display: block; width: 100%; height: auto; } .pyrope svg.chart { max-width: 34rem; }
.pyrope svg.matrix { border: 1px solid var(--rule); background: #ffffff; shape-rendering: crispEdges; }
.pyrope svg.swatch { display: inline-block; width: 28px; height: 10px; vertical-align: baseline; }
.pyrope svg text { fill: var(--quiet); font-size: 10.5px; font-family: inherit; }
.pyrope svg .grid { stroke: var(--rule); stroke-width: .6; }
.pyrope svg .axis { stroke: var(--quiet); stroke-width: .8; }
.pyrope svg .line { stroke-width: 1.5; stroke: var(--quiet); } .pyrope svg .expected { stroke: var(--blue); }
.pyrope svg .grade0 { stroke: var(--teal); } .pyrope svg .grade1 { stroke: var(--blue); }
.pyrope svg .grade2 { stroke: var(--violet); } .pyrope svg .grade3 { stroke: var(--quiet); }
.pyrope svg .dot { fill: var(--ink); } .pyrope svg .cross { stroke: var(--wrong); stroke-width: 1.5; }
.pyrope .key { list-style: none; padding: 0; margin: .3rem 0 0; display: flex; flex-wrap: wrap; gap: .1rem 1rem;
  font-size: .85rem; color: var(--quiet); }
.pyrope .shades { display: flex; align-items: center; gap: .5rem; font-size: .85rem; color: var(--quiet); }
.pyrope .shades span:nth-child(2) { flex: 0 1 12rem; height: .8rem; border: 1px solid var(--rule);
  background: linear-gradient(to right, rgb(33, 102, 172), #ffffff, rgb(178, 24, 43)); }
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
.pyrope footer { margin-top: 2rem; color: var(--quiet); font-size: .85rem; }
"""
_BODY = """
html { background: #ffffff; -webkit-text-size-adjust: 100%; } body { margin: 0; }
.pyrope { max-width: 64rem; margin: 0 auto; border-radius: 0; }
@media screen and (prefers-color-scheme: dark) { html { background: #15181c; } }
"""


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


def printable(text: str) -> str:
    """Text that may come from a candidate, with escapes for what a terminal would obey and what UTF-8 does not have.

    >>> print(printable("\\x1b[2J\\x00 θ \\ud800"))
    \\x1b[2J\\x00 θ \\ud800
    """
    return _NOT_TEXT.sub(lambda character: character[0].encode("unicode_escape").decode(), text)


def abbreviated(text: str) -> str:
    """Long lists, such as LongRoPE's factors, by their first three numbers and their last.

    >>> abbreviated("LongRoPE((1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9))")
    'LongRoPE((1.0, 1.1, 1.2, …, 1.9: 10 numbers))'
    """
    return _LONG_LIST.sub(lambda m: f"{m[1]}{m[2]}…, {m[4]}: {m[3].count(',') + 4} numbers{m[5]}", text)


def linked(text: str) -> Markup:
    """Text in which issues of known projects, such as vllm#590, are links."""
    parts, end = list[str](), 0
    for match in _ISSUE.finditer(text):
        if (repository := REPOSITORIES.get(match[1])) is None:
            continue
        address = f"https://github.com/{repository}/issues/{match[2]}"
        parts += [text[end : match.start()], element("a", match[0], href=address, rel="noopener")]
        end = match.end()
    return joined([*parts, text[end:]])


def _definitions(rows: Iterable[tuple[str, str]]) -> Markup:
    return element("dl", *(part for name, words in rows for part in (element("dt", name), element("dd", words))))


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


# ── A report ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def report_section(report: Report, level: str = "h1") -> Markup:
    """All that a report says, and what was read of its candidate."""
    sub = "h2" if level == "h1" else "h4"
    about, _, why = report.headline.partition(f": {report.verdict.upper()}")
    parts = [_verdict(report.verdict, f"{about}{why}", level), _expected(report.expected)]
    if report.failure is not None:
        failure = report.failure
        named = (("reason", failure.reason), ("received", failure.received), ("fix", failure.fix))
        parts.append(_definitions((name, text) for name, text in named if text))
        parts.append(element("pre", "\n".join(failure.frames)) if failure.frames else Markup(""))
    if report.findings:
        title = "What is wrong" if len(report.findings) == 1 else f"What is wrong: {len(report.findings)} findings"
        parts += [element(sub, title), *map(_finding, report.findings)]
    parts += _readings(report.readings, report.verdict, sub)
    if report.errors:
        parts += [element(sub, "Errors in numbers"), _errors_table(report.errors)]
    if report.notes:
        parts += [element(sub, "Notes"), element("ul", *(element("li", note) for note in report.notes))]
    return element("section", *parts)


def _expected(text: str) -> Markup:
    short = abbreviated(text)
    whole = element("details", element("summary", "in full"), element("code", text)) if short != text else Markup("")
    return joined([element("p", "expected: ", element("code", short), class_="quiet"), whole])


def _finding(finding: Finding) -> Markup:
    rows = [("evidence", finding.evidence), ("cause", finding.cause), ("fix", finding.fix)]
    if finding.since is not None:
        rows.append(("shows", f"from position {finding.since} on"))
    if finding.alternatives:
        rows.append(("or", f"{'; '.join(finding.alternatives)} (cannot be told apart here)"))
    if finding.happened.strip("—"):
        rows.append(("happened in", linked(finding.happened)))
    return element("div", element("h3", finding.fault), _definitions(rows), class_="finding")


def _errors_table(errors: Sequence[ErrorRow]) -> Markup:
    """The errors with bars on a logarithmic scale, from an ulp on."""
    absolute = all(row.absolute is not None for row in errors)
    most = max((math.log10(row.worst + 1) for row in errors if math.isfinite(row.worst)), default=0.0) or 1.0
    rows = []
    for row in errors:
        numbers = [f"{row.worst:.3g}", f"{row.typical:.3g}"]
        numbers = [_number(row.absolute), *numbers] if absolute else numbers
        if math.isfinite(row.worst):
            part = math.log10(row.worst + 1) / most
            bar = element("span", class_="bar", style=f"width: {100 * part:.1f}%")
        else:
            bar, numbers = Markup(""), [_number(row.worst), *("—" for _ in numbers[1:])]
        cells = [element("td", row.where), element("td", bar, class_="bars")]
        rows.append(element("tr", *cells, *(element("td", number, class_="number") for number in numbers)))
    names = ["worst", "in ulps", "typical, in ulps"] if absolute else ["worst, in ulps", "typical, in ulps"]
    head = {"where": None, "on a logarithmic scale": "bars", **dict.fromkeys(names, "number")}
    return _table(head, rows)


def _number(value: float | None) -> str:
    """An absolute error in a table."""
    return "—" if value is None else f"{value:.2g}" if math.isfinite(value) else "not finite"


# ── What was read ────────────────────────────────────────────────────────────────────────────────────────────────────


def _readings(readings: Readings | None, verdict: str, heading: str) -> list[Markup]:
    if readings is None:
        return []
    parts, charts, titles = list[Markup](), list[Markup](), list[str]()
    if readings.sides:
        rows = [
            element("tr", element("td", side.name), element("td", side.expected), element("td", measured),
                    class_=None if side.same else "differs")
            for side in readings.sides
            for measured in [side.measured if side.same else f"≠ {side.measured}"]
        ]  # fmt: skip
        table = element("div", _table(dict.fromkeys(("", "expected", "measured")), rows), class_="sides")
        parts += [element(heading, "Expected and measured"), table]
    if readings.operators is not None:
        parts += [element(heading, f"R(m) at position {readings.operators.position}")]
        parts += [_operators(readings.operators, readings.reference, verdict)]
    if readings.errors is not None:
        charts.append(_errors(readings.errors))
        titles.append(f"errors by {readings.errors.place}")
    if readings.frequencies is not None and len(readings.frequencies.measured):
        charts += _frequencies(readings.frequencies, readings.reference)
        titles.append("frequencies by pair")
    if charts:
        title = ", ".join(titles)
        parts += [element(heading, title[:1].upper() + title[1:]), element("div", *charts, class_="charts")]
    return parts


def _operators(operators: Operators, reference: str, verdict: str) -> Markup:
    matrices = {"candidate": operators.measured}
    if operators.expected is not None:
        matrices = {reference: operators.expected, **matrices}
    finite = [abs(float(x)) for matrix in matrices.values() for x in (matrix.min(), matrix.max()) if math.isfinite(x)]
    most = min(max([1.0, *finite]), 4.0)
    drawn = [
        element("div", element("p", name),
                drawings.operator_drawing(f"R(m), {name}", matrix, most, operators.differing))
        for name, matrix in matrices.items()
    ]  # fmt: skip
    scale = element(
        "div", element("span", f"−{most:.3g}"), element("span"), element("span", f"+{most:.3g}"), class_="shades"
    )
    caption = "Column j is what unit vector j becomes. White is 0, red positive, blue negative, grey not finite."
    if operators.differing.any():
        caption += " The pairs that differ are framed."
    elif verdict == "wrong":
        caption += " No pair differs here: the evidence says in which calls something does."
    inner = element("div", *drawn, class_="matrices")
    return element("figure", inner, element("figcaption", scale, caption))


def _key(entries: Iterable[tuple[Markup, str]]) -> Markup:
    return element("ul", *(element("li", swatch, f" {words}") for swatch, words in entries), class_="key")


def _errors(errors: Errors) -> Markup:
    entries = [(drawings.dot_swatch(False), "largest error")]
    if errors.beyond.any():
        entries.append((drawings.dot_swatch(True), "beyond what is accepted"))
    key = _key([*entries, *drawings.swatches(errors)])
    caption = f"The largest absolute error by {errors.place}. Lines: the most that any output of a grade may be off."
    words = element("div", key, element("figcaption", caption))
    return element("figure", drawings.errors_drawing(errors), words)


def _frequencies(frequencies: Frequencies, reference: str) -> list[Markup]:
    marks = [(drawings.dot_swatch(False), "measured")]
    if drawings.differing(frequencies).any():
        marks.append((drawings.dot_swatch(True), f"measured, not as {reference}"))
    key = _key(marks if frequencies.expected is None else [(drawings.line_swatch(), reference), *marks])
    caption = element("figcaption", "The frequency θ of each pair, in radians per position.")
    figures = [element("figure", drawings.frequencies_drawing(frequencies), element("div", key, caption))]
    if (off := drawings.deviations_drawing(frequencies)) is not None:
        words = f"How far each frequency is off the {reference} one, relative to it. Dashed: what rounding explains."
        figures.append(element("figure", off, element("figcaption", words)))
    return figures


# ── An identification, many reports, the gallery ─────────────────────────────────────────────────────────────────────


def identification_section(result: Identification) -> Markup:
    """What was read of a candidate of which nothing is expected."""
    title, *_ = str(result).splitlines()
    named = result.rope is not None
    rule, *_ = result.explanations[0].split(" (") if result.explanations else ["no rotation"]  # the rest is in the rows
    words = f"{title}: {rule}"
    rows = _definitions(result.rows())
    head = element("h1", element("span", "✓" if named else "?", class_="symbol", aria_hidden="true"),
                   element("span", words), class_=f"verdict {'right' if named else 'not-judged'}")  # fmt: skip
    rope = [element("p", element("code", repr(result.rope)))] if named else []
    return element("section", head, rows, *rope, *_readings(result.readings, "right", "h2"))


def verification_section(reports: Sequence[Report], groups: Mapping[tuple[str, ...], list[Report]]) -> Markup:
    """Test vectors: wrong cases by what is wrong with them, then those that are not judged, then all the others."""
    verdict = next((name for name in ("wrong", "not judged") if any(r.verdict == name for r in reports)), "right")
    parts = [_verdict(verdict, f"test vectors: {summary(reports)}")]
    for faults, members in groups.items():
        parts.append(element("h2", f"{', '.join(faults)}: {_cases(len(members))}"))
        parts.append(report_section(members[0], "h3"))
        if others := members[1:]:
            parts.append(_fold(f"the same in {_cases(len(others))} more", map(_folded, others)))
    for name in ("not judged", "equivalent", "right"):
        if members := [report for report in reports if report.verdict == name]:
            parts.append(_fold(f"{SYMBOLS[name]} {name}: {_cases(len(members))}", map(_folded, members)))
    return element("section", *parts)


def summary(reports: Sequence[Report]) -> str:
    """How many cases there are, and how many have each verdict."""
    verdicts = [report.verdict for report in reports]
    numbers = [f"{verdicts.count(name)} {name}" for name in SYMBOLS if name in verdicts or name == "right"]
    return f"{_cases(len(reports))}, {', '.join(numbers)}"


def _cases(count: int) -> str:
    return f"{count} case{'' if count == 1 else 's'}"


def _fold(title: str, parts: Iterable[Markup]) -> Markup:
    """What opens by a click."""
    return element("details", element("summary", title), *parts)


def _folded(report: Report, title: str | None = None) -> Markup:
    symbol = element("span", f"{SYMBOLS[report.verdict]} ", class_=_class(report.verdict))
    return _fold(joined([symbol, title or report.subject]), [report_section(report, "h3")])


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
    parts = [_verdict(verdict, f"gallery: {len(rows)} implementations, {good} judged as they should be")]
    legend = [element("li", _judged(verdict), f": {words}") for verdict, words in _LEGEND.items()]
    parts.append(element("ul", *legend, class_="key"))
    parts.append(element("p", _GALLERY, class_="quiet"))
    names = ("implementation", "verdict", "error", "identified, or what is wrong")
    lines = [element("div", *(element("span", name) for name in names), class_="head")]
    for row in rows:
        worst = _number(max((e.absolute for e in row.report.errors if e.absolute is not None), default=None))
        cells = (row.name, _judged(row.report.verdict), worst, row.remark)
        title = joined(element("span", cell) for cell in cells)
        lines.append(_fold(title, [report_section(row.report, "h3")]))
    return element("section", *parts, element("div", *lines, class_="rows"))


def _judged(verdict: str) -> Markup:
    return element("b", f"{SYMBOLS[verdict]} {verdict}", class_=_class(verdict))
