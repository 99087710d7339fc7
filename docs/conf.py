"""Sphinx: the pages are Markdown (MyST), the API reference comes from the docstrings. `tox -e docs` builds it all."""

from __future__ import annotations

import html
import pathlib
import re
import sys
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import pyrope  # noqa: E402, from this very tree
from pyrope.oracle import adapters  # noqa: E402

project = "pyrope"
version = release = pyrope.__version__
copyright = "the authors of pyrope, MIT licence"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]  # $…$ and ```math, as code hosts show them
myst_fence_as_directive = {"math"}
html_math_renderer = "mathml"  # browsers show it themselves: no script, no network
smartquotes = False  # θ', "half"
html_theme = "furo"
html_title = f"pyrope {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_js_files = [("filter.js", {"defer": "defer"})]
highlight_language = "none"  # a block without a language is a formula, a picture in letters, or a command

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
TYPES = ("Array", "NumPyArray", "Float64", "Int64", "Trace", "Scaling", "Source")
autodoc_type_aliases = {name: name for name in TYPES}
default_role = "literal"  # `name` in a docstring is code, as in Markdown

CODE = re.compile(r"(``.+?``|`[^`]+`)")


def escaped(text: str) -> str:
    """Escapes what is maths outside of code, |x|, R* and S_, so that it is not read as markup."""
    parts = CODE.split(text)
    return "".join(part if i % 2 else re.sub(r"([|*\\]|_(?!\w))", r"\\\1", part) for i, part in enumerate(parts))


def paragraph(text: str) -> str:
    """A paragraph of a docstring as reStructuredText: tables and indented lines become literal blocks."""
    lines = text.split("\n")
    if all(line.startswith(("    ", "|")) for line in lines):
        return "::\n\n" + "\n".join("    " + line for line in lines)
    if text.lstrip().startswith(">>>"):
        return text
    intro = re.match(r"(?!- )[^\n]*(?:\n(?!- )[^\n]*)*(?=\n- )", text)  # a list must have a blank line before it
    return escaped(text if intro is None else f"{intro[0]}\n{text[intro.end() :]}")


def as_rst(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with Unicode maths and Markdown's backticks; Sphinx reads reStructuredText."""
    text = "\n".join(lines).strip("\n")
    if re.fullmatch(r"Alias for field number \d+", text):  # the default docstring of a NamedTuple's field
        text = ""
    lines[:] = "\n\n".join(map(paragraph, re.split(r"\n{2,}", text))).split("\n") + [""]


# What annotations do not say, by the names of arguments; api.md explains the words.
WORDS = {
    r"TypeAliasForwardRef\('(\w+)'\)": r"\1",
    r"~(?:\w+\.)+": "",
    r"<class 'numpy\.(\w+)'>": r"\1",
    r"\b((?:[qk]_)?positions|distances|tokens|segments): Any": r"\1: Integers",
    r"\bdtype: Any": "dtype: DType",
    r"\bsoftcap: Any": "softcap: float | None",
    r"\b(bias|added|tables): Any": r"\1: Array",
    r"\bcomm: Any": "comm: MPI.Comm",
    r"ndarray\[Any, dtype\[float64\]\]": "Float64",
    r"ndarray\[Any, Any\]": "NumPyArray",
    r"Callable\[\[\.\.\.\], Any\]": "Function",
    r"Callable\[\[Any\], Any\]": "Callable[[Array], Array]",
    r"tuple\[Any, Any\]": "tuple[Array, Array | None]",
    r"Mapping\[str, Any\]": "Mapping[str, Array]",
}


def named_types(app: Any, what: str, name: str, thing: Any, options: Any, *signature: str) -> tuple[Any, ...]:
    """Names of types that a reader knows."""
    parts = list(signature)
    for old, new in WORDS.items():
        parts = [part and re.sub(old, new, part) for part in parts]
    return tuple(parts)


# Tools outside of the public names, and the functions of theirs that the pages show.
TOOLS = {
    "oracle.adapters": [name for name in vars(adapters) if re.match(r"from_(?!numpy)|with_axes|cached", name)],
    "oracle.vectors": ["write_vectors", "verify_vectors"],
    "oracle.traces": ["write_trace", "read_trace", "diff_traces"],
    "plots": ["draw"],
}


def reference(app: Any, page: str, source: list[str]) -> None:
    """Puts the docstrings of all public names below the page of the API, module by module."""
    if page != "api":
        return
    modules: dict[str, list[str]] = dict(TOOLS)
    for name, module in pyrope._MODULE_OF.items():
        modules.setdefault(module or name, []).extend([name] if module else [])  # "" is that of whole modules
    order = sorted(modules, key=lambda name: (name.startswith("oracle"), name not in ("definition", "theta"), name))
    for name in order:
        members = f"   :members: {', '.join(modules[name])}".rstrip()
        source[0] += f"\n## pyrope.{name}\n\n```{{eval-rst}}\n.. automodule:: pyrope.{name}\n{members}\n```\n"


def without_last_line(app: Any, page: str, source: list[str]) -> None:
    """Removes the empty line that ends a doctest."""
    source[0] = re.sub(r"(^ *```python\n.*?\n)\n( *```$)", r"\1\2", source[0], flags=re.M | re.S)


TAG = re.compile(r"\\tag\{(.*?)\}")
NAMED = re.compile(r"(<mi>(?:cos|sin|ln|arg|Re)</mi>)(?!\s*<mo[^>]*>\()")


def mathml(node: nodes.math | nodes.math_block, block: bool) -> str:
    """A formula as MathML; the number of an equation, \\tag{12}, stands at the right margin."""
    tag = TAG.search(node.astext())
    try:
        formula = tex2mathml(TAG.sub("", node.astext()).strip(), as_block=block)
    except MathError as error:
        logging.getLogger(__name__).warning("%s in %s", error, node.astext(), location=node)
        return html.escape(node.astext())
    formula = NAMED.sub(r'\1<mspace width="0.17em"/>', formula)  # cos x, not cosx
    number = f'<span class="number">({html.escape(tag[1])})</span>' if tag else ""
    return f'<div class="equation">{formula}{number}</div>' if block else formula


def visit_inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(mathml(node, block=False))
    raise nodes.SkipNode


def visit_block(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(mathml(node, block=True))
    raise nodes.SkipNode


def card(row: nodes.row) -> nodes.container:
    """A mistake as a card: its name is the title, and each word in italics begins a field."""
    title, cell = row.children
    fields = nodes.field_list()
    for part in next(iter(cell.findall(nodes.paragraph))).children:
        if isinstance(part, nodes.emphasis):
            body = nodes.paragraph()
            fields += nodes.field("", nodes.field_name("", part.astext()), nodes.field_body("", body))
        elif not isinstance(part, nodes.raw):  # <br>
            body += part
    name = nodes.paragraph("", "", nodes.strong("", title.astext()))
    return nodes.container("", name, fields, classes=["card"], ids=[nodes.make_id(title.astext())])


def cards(app: Any, tree: nodes.document) -> None:
    """Shows the tables of the known mistakes as cards, with a field that filters them."""
    for table in list(tree.findall(nodes.table)):
        heads = [entry.astext() for entry in next(iter(table.findall(nodes.thead))).findall(nodes.entry)]
        if heads[0] != "mistake":
            continue
        shown = [card(row) for row in next(iter(table.findall(nodes.tbody))).findall(nodes.row)]
        field = nodes.raw("", '<input class="filter" type="search" placeholder="Filter the mistakes below" '
                          'aria-label="Filter the mistakes below">', format="html")  # fmt: skip
        table.replace_self([field, nodes.container("", *shown, classes=["cards"])])


def setup(app: Any) -> None:
    app.connect("source-read", without_last_line)
    app.connect("source-read", reference)
    app.connect("doctree-read", cards)
    app.connect("autodoc-process-docstring", as_rst)
    app.connect("autodoc-process-signature", named_types)
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
