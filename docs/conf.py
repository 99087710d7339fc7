"""Sphinx: the pages are Markdown (MyST), the API reference comes from the docstrings. `tox -e docs` builds it all."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
import shlex
import sys
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import pyrope  # noqa: E402, from this very tree
from pyrope import cli  # noqa: E402

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
html_static_path = ["_static"]
html_css_files = ["pages.css"]
highlight_language = "none"  # a block without a language is a formula, a picture in letters, or a command

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
default_role = "literal"  # `name` in a docstring is code, as in Markdown

PICTURES = HERE / "_pictures"


class Picture(Directive):
    """A picture with its caption and, as the last lines, the command that draws it: `pyrope plot …`.

    That command draws it. On a code host, where pages are not built, a reader sees the caption and the command.
    The argument is a name of `pyrope.plots.PLOTS`; a picture without options may leave out its command.
    """

    optional_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        caption, start, options = "\n".join(self.content).partition("pyrope plot ")
        command = start + options if start else "pyrope plot {0} -o {0}.svg".format(*self.arguments)
        words = shlex.split(command.replace("\\\n", " "))[1:]
        at = words.index("-o") + 1
        file = PICTURES / words[at]
        PICTURES.mkdir(exist_ok=True)
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                code = cli.main([*words[:at], str(file), *words[at + 1 :]])
            except SystemExit as stopped:  # an unknown option
                code = stopped.code
        if code != 0:
            raise self.error(f"cannot be drawn: {command}")
        caption = " ".join(caption.split())
        figure = nodes.figure("", nodes.image(uri=f"_pictures/{file.name}", alt=caption))
        figure += nodes.caption(caption, caption)
        figure += nodes.legend("", nodes.literal_block(command, command, language="text"))
        return [figure]


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


def without_last_line(app: Any, page: str, source: list[str]) -> None:
    """Removes the empty line that ends a doctest."""
    source[0] = re.sub(r"(^ *```python\n.*?\n)\n( *```$)", r"\1\2", source[0], flags=re.M | re.S)


def setup(app: Any) -> None:
    app.connect("source-read", without_last_line)
    app.add_directive("picture", Picture)
    app.connect("autodoc-process-docstring", as_rst)
