"""The command line: ``pyrope table`` prints what a rope does, in numbers. The only place that prints."""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from . import __version__
from .phase import cos_sin
from .theta import LAYOUTS, SCALINGS, Rope, frequencies, wavelengths

_EXAMPLES = """\
examples:
  pyrope table --head-dim 128 --base 10000 --layout half
  pyrope table --head-dim 64 --base 500000 --layout half --position 4096 \\
      --scaling "Llama3(factor=8.0, low=1.0, high=4.0, original_length=8192)"
  pyrope table --config path/to/config.json --length 131072 --json
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pyrope", description="Rotary position embeddings: a reference.")
    parser.add_argument("--version", action="version", version=f"pyrope {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    table = commands.add_parser(
        "table",
        help="frequencies and wavelengths of a rope",
        description="Frequencies and wavelengths of a rope; with --position also cos and sin there.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    table.add_argument("--config", metavar="PATH", help="a Hugging Face config.json, or its folder")
    table.add_argument("--layer-type", metavar="NAME", help="for configs whose layers have different ropes")
    table.add_argument("--head-dim", type=int, metavar="N", help="size of a head")
    table.add_argument("--rotary-dim", type=int, metavar="N", help="how many features of it turn (default: all)")
    table.add_argument("--base", type=float, metavar="X", help="the 10000 of the paper")
    table.add_argument("--layout", choices=LAYOUTS, help="which features make a pair")
    table.add_argument("--scaling", metavar="CALL", help='such as "Linear(factor=4.0)"')
    table.add_argument("--length", type=int, metavar="N", help="for scalings that depend on the length")
    table.add_argument("--position", type=int, metavar="M", help="also print cos and sin at this position")
    table.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _scaling(text: str) -> Any:
    """A scaling written as a call with literal arguments; nothing in it is executed."""
    classes = {kind.__name__: kind for kind in SCALINGS.values()}
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise ValueError
        kind = classes[call.func.id]
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        if None in arguments or len(arguments) < len(call.keywords):
            raise ValueError
    except (ValueError, SyntaxError, KeyError, RecursionError):
        told = ", ".join(classes)
        raise ValueError(f'--scaling must be a call such as "Linear(factor=4.0)", of {told}; was {text!r}') from None
    return kind(**{str(name): value for name, value in arguments.items()})


def _rope(options: argparse.Namespace) -> Rope:
    own = ("head_dim", "base", "rotary_dim", "scaling")
    if options.config is not None:
        if given := [f"--{name.replace('_', '-')}" for name in own if getattr(options, name) is not None]:
            raise ValueError(f"--config says everything already: leave out {', '.join(given)}")
        rope = Rope.from_config(options.config, layout=options.layout, layer_type=options.layer_type)
    else:
        if options.layer_type is not None:
            raise ValueError("--layer-type goes with --config")
        if missing := [name for name in ("head_dim", "base", "layout") if getattr(options, name) is None]:
            raise ValueError(f"give --config, or {', '.join('--' + name.replace('_', '-') for name in missing)}")
        scaling = None if options.scaling is None else _scaling(options.scaling)
        rope = Rope(options.head_dim, options.base, options.layout, options.rotary_dim, scaling=scaling)
    if options.length is None and not rope.resolved:
        raise ValueError(f"the frequencies of {type(rope.scaling).__name__} depend on the length: give --length")
    return rope if options.length is None else rope.at(options.length)


def _table(options: argparse.Namespace) -> None:
    rope = _rope(options)
    columns = {"theta": frequencies(rope), "wavelength": wavelengths(rope)}
    if options.position is not None:
        if rope.axes is not None:
            raise ValueError("--position is one number, and this rope has several axes: leave it out")
        columns["cos"], columns["sin"] = cos_sin(rope, options.position)
    if options.json:
        told = {
            name: [x if x != float("inf") else None for x in map(float, column)] for name, column in columns.items()
        }
        print(json.dumps({"rope": repr(rope), "attention_factor": rope.attention_factor, **told}, indent=1))
        return
    print(f"{rope}\nattention factor {rope.attention_factor:.17g}")
    print("pair" + "".join(f"{name:>19}" for name in columns))
    for i, row in enumerate(zip(*columns.values(), strict=True)):
        print(f"{i:4}" + "".join(f"{x:19.12g}" for x in row))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; 0 if all went well, 2 for misuse."""
    options = _parser().parse_args(arguments)
    try:
        _table(options)
        if sys.stdout is not None:  # it may be closed
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, TypeError, ArithmeticError, OSError) as error:
        print(f"pyrope: error: {error}", file=sys.stderr)
        return 2
    return 0
