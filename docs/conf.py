"""Sphinx: the pages are Markdown (MyST), the API reference comes from the docstrings. `tox -e docs` builds it all."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import sys
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import pyrope  # noqa: E402, from this very tree

project = "pyrope"
version = release = pyrope.__version__
copyright = "the authors of pyrope, MIT licence"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_pictures"]
myst_heading_anchors = 3
smartquotes = False  # θ', "half"
html_theme = "furo"
html_title = f"pyrope {release}"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
default_role = "literal"  # `name` in a docstring is code, as in Markdown

PICTURES = HERE / "_pictures"


class Picture(Directive):
    """A drawing of `pyrope.plots` by its name, with a caption; nothing where it was not drawn."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        path = PICTURES / f"{self.arguments[0]}.svg"
        if not path.is_file():
            return []
        caption = " ".join(self.content)
        figure = nodes.figure("", nodes.image(uri=f"_pictures/{path.name}", alt=caption or self.arguments[0]))
        figure += nodes.caption(caption, caption)
        return [figure]


def draw_pictures(app: Any) -> None:
    """Every plot that can be drawn here: where pyrope.plots or matplotlib is missing, the pages go without."""
    if not (importlib.util.find_spec("pyrope.plots") and importlib.util.find_spec("matplotlib")):
        return
    from pyrope import plots

    PICTURES.mkdir(exist_ok=True)
    for name in plots.PLOTS:
        plots.draw(name, str(PICTURES / f"{name}.svg"))


CODE = re.compile(r"(``.+?``|`[^`]+`)")


def escaped(text: str) -> str:
    """Outside of code |x|, R* and S_ are maths: no markup."""
    parts = CODE.split(text)
    return "".join(part if i % 2 else re.sub(r"([|*\\]|_(?!\w))", r"\\\1", part) for i, part in enumerate(parts))


def paragraph(text: str) -> str:
    """A paragraph of a docstring as reStructuredText: tables and what is set in by four spaces stand as they are."""
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
    if re.fullmatch(r"Alias for field number \d+", text):  # the docstring of a NamedTuple's field, which says nothing
        text = ""
    lines[:] = "\n\n".join(map(paragraph, re.split(r"\n{2,}", text))).split("\n") + [""]


def setup(app: Any) -> None:
    app.add_directive("picture", Picture)
    app.connect("builder-inited", draw_pictures)
    app.connect("autodoc-process-docstring", as_rst)
