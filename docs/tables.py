"""Writes what the pages show of data and of code: mistakes.md, the table of model types in conventions.md, and the
numbers of lines in the READMEs. Run `python docs/tables.py` after a change; a test compares."""

from __future__ import annotations

import pathlib
import re
import sys

HERE = pathlib.Path(__file__).parent
if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))  # what this very tree says

from pyrope import configs  # noqa: E402
from pyrope.oracle import mistakes  # noqa: E402

HEAD = """\
# Mistakes, by name

Every name that a report may use, with its cause, its fix and the projects in which it happened. A fault of attention is
a step and what was measured of it: "window: one too wide" has the cause and the fix of "window", unless it has a row of
its own.
This page is made from `pyrope/oracle/mistakes.py` by `python docs/tables.py`. [How a check works](check.md).
"""
SECTIONS = {
    "Of rotations": mistakes.ROTATION,
    "Of calls and memory": mistakes.CALLS,
    "Of attention": mistakes.ATTENTION,
    "Of backward passes": mistakes.BACKWARD,
    "Of sharding": mistakes.SHARDING,
    "Of traces": mistakes.TRACES,
}


def linked(text: str) -> str:
    """Text in which issues, such as vllm-project/vllm#590, are links."""
    return mistakes.ISSUE.sub(r"[\g<0>](https://github.com/\1/issues/\2)", text)


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, in a cell of a table."""
    return re.sub(r"(?<!`)\b(\w+_\w+)\b(?!`)", r"`\1`", text.replace("|", "\\|").replace("*", "\\*"))


def row(name: str, mistake: mistakes.Mistake) -> str:
    fields = [
        ("cause", escaped(mistake.cause)),
        ("fix", escaped(mistake.fix)),
        ("happened in", linked(mistake.happened)),
    ]
    return f"| **{escaped(name)}** | {' <br> '.join(f'*{word}* {text}' for word, text in fields if text)} |"


def mistakes_page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, rows in SECTIONS.items():
        lines = "\n".join(row(name, mistake) for name, mistake in rows.items())
        parts.append(f"## {title}\n\n| mistake | |\n|---|---|\n{lines}\n")
    return "\n".join(parts)


def traits(convention: configs.Convention) -> tuple[str, str, str]:
    """What types have in common: layout, rotated part, and what is particular."""
    width = "all" if convention.fraction == 1 else f"first {convention.fraction:g}"
    if convention.latent or convention.rotary_dim:
        where = "first" if convention.placement == "prefix" else "last"
        width = "`qk_rope_head_dim`, last" if convention.latent else f"{where} {convention.rotary_dim} features"
    particular = {
        "direction −1": convention.direction == -1,
        f'axes "{convention.axes}"': convention.axes,
        "a rope for each type of layer": convention.layers or convention.by_layer,
        f"{convention.still} layers do not turn": convention.still,
        f"one layer in {abs(convention.every or 0)} does not turn": convention.every,
        "only if the config says `{}: {}`".format(*(convention.switch or ("", ""))): convention.switch,
        "`alpha` in dynamic: another base": convention.alpha,
        "the config must say its scaling": convention.explicit,
        f"original length {convention.original_length}": convention.original_length,
    }
    return convention.layout or "", width, "; ".join(words for words, holds in particular.items() if holds)


def base_and_size(convention: configs.Convention) -> str:
    """What a single type has where its config says nothing, unless that is 10000 and width / heads."""
    base = f"{convention.base:.0f}" if convention.base != 10000 and not convention.by_layer else ""
    if convention.layers:
        base = ", ".join(f"{layer.base:.0f} {kind.partition('_')[0]}" for kind, layer in convention.layers.items())
    size = f"d = {convention.head_dim}" if convention.head_dim else ""
    return f" ({', '.join(filter(None, (base, size)))})" if base or size else ""


def conventions_table() -> str:
    """The model types with the same traits in one row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, convention in configs.MODEL_TYPES.items():
        rows.setdefault(traits(convention), []).append(f"`{name}`{base_and_size(convention)}")
    lines = [f"| {' | '.join(key)} | {', '.join(names)} |" for key, names in rows.items()]
    return "\n".join(["| layout | rotated | particular | `model_type` |", "|---|---|---|---|", *lines]) + "\n"


def with_table(text: str) -> str:
    """A page whose table of model types is made anew."""
    head, _, rest = text.partition("| layout | rotated |")
    return head + conventions_table() + re.sub(r"\A(?:.*\|\n)+", "", rest)


EXACT, TOOLS = ("theta", "phase"), ("checks", "backend", "tiles", "files")
ENGINE = ("rotation", "softmax", "linear", "layers", "encodings", *EXACT, *TOOLS)
SIZE = re.compile(r"([\d,]+)(?= lines|(?<=\d) 行)")


def sizes() -> list[int]:
    """Lines of the definition, of RoPE in it, of the engine and of the oracle, in the order of the READMEs."""

    def lines(*paths: pathlib.Path) -> int:
        return sum(len(path.read_text("utf-8").splitlines()) for path in paths)

    package = HERE.parent / "pyrope"
    rotation = (package / "definition.py").read_text("utf-8").split("# ── ")[1].strip()
    engine, oracle = lines(*(package / f"{name}.py" for name in ENGINE)), lines(*package.glob("oracle/*.py"))
    return [lines(package / "definition.py"), len(rotation.splitlines()), round(engine, -2), round(oracle, -2)]


def with_sizes(text: str) -> str:
    """A README with the sizes of today."""
    new = iter(sizes())
    return SIZE.sub(lambda old: f"{next(new, old[0]):,}", text)


if __name__ == "__main__":
    (HERE / "mistakes.md").write_text(mistakes_page(), "utf-8")
    made = {HERE / "conventions.md": with_table, HERE.parent / "README.md": with_sizes}
    made[HERE.parent / "README.zh.md"] = with_sizes
    for path, renew in made.items():
        path.write_text(renew(path.read_text("utf-8")), "utf-8")
