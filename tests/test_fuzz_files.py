"""Damaged files and silly command lines: every reader refuses with ValueError or TypeError, or reads what is there; the
command line ends with 0, 1, 2 or 3, and never with a traceback.

Every example has a number, and depends on it alone. PYROPE_FUZZ=100 runs a hundred times as many.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import gguf_files
import numpy as np
import pytest
from fuzzing import TIMES, Draw, damaged, damaged_json, snapshot
from optional import needed
from test_checkpoints import _checkpoint, _gguf_llama, _save
from test_text import MERGES, SPECIAL, TOKENS, _metadata

import pyrope
from pyrope import cli
from pyrope.oracle.traces import diff_traces, read_trace, write_trace
from pyrope.oracle.vectors import Own, verify_vectors, write_vectors
from pyrope.tensors import load_npy, load_safetensors, save_npy

tokenizers = needed("tokenizers")
NPY = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
TRACE = {"embedding": NPY, "layers.0.q": NPY.astype(np.float16), "logits": NPY[0].astype(np.float64)}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a sound file of every kind."""
    root = tmp_path_factory.mktemp("fuzz")
    save_npy(root / "x.npy", NPY)
    write_trace(root / "trace.safetensors", TRACE)
    raw, _, tensors = _checkpoint("llama", rope_scaling={"rope_type": "yarn", "factor": 2.0, "beta_fast": 32.0})
    (root / "folder").mkdir()
    _save(root / "folder", raw, tensors)
    _, _, tensors = _gguf_llama(tied=True, dtype=np.float16)
    gguf_files.write(root / "model.gguf", tensors=tensors, others=_metadata("llama-bpe"))
    pairs = [tuple(merge.split(" ")) for merge in MERGES]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(TOKENS)}, pairs))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    inner.save(str(root / "folder" / "tokenizer.json"))
    write_vectors(root / "vectors", own=Own(pyrope.Rope(4, 10000.0, "half"), max_position=63), dtype="float32")
    (root / "rope.py").write_text(
        "def rotate(x, positions):\n    return x\n\n\ndef fails(x, positions):\n    return None\n"
    )
    return root


def _tokenizer(path):
    tokenizer = pyrope.load_tokenizer(path)
    ids = tokenizer.encode("hello 123 ½<|im_end|> zz")
    tokenizer.decode(ids)
    return list(tokenizer.stream(ids))


def _model(path):
    model = pyrope.load(path)
    with np.errstate(all="ignore"):  # weights may be anything
        return pyrope.forward(model, [0, 1])


def _rope(path):
    rope = pyrope.Rope.from_config(path)
    return pyrope.cos_sin(
        rope if rope.theta_is_fixed else rope.at(100), [0] if rope.axes is None else [[0]] * rope.axes.count
    )


# The file that is damaged, whether it is JSON, how many examples, and what reads it.
READERS = {
    "npy": ("x.npy", False, 400, lambda root: load_npy(root / "x.npy", "x", NPY.shape, NPY.dtype)),
    "safetensors": ("trace.safetensors", False, 300, lambda root: [x.sum() for x in load_safetensors(root / "trace.safetensors")[0].values()]),
    "trace": ("trace.safetensors", False, 200, lambda root: diff_traces(read_trace(root / "trace.safetensors"), TRACE)),
    "weights": ("folder/model.safetensors", False, 60, lambda root: _model(root / "folder")),
    "gguf": ("model.gguf", False, 150, lambda root: _model(root / "model.gguf")),
    "gguf tokenizer": ("model.gguf", False, 80, lambda root: _tokenizer(root / "model.gguf")),
    "config": ("folder/config.json", True, 300, lambda root: _rope(root / "folder")),
    "config and weights": ("folder/config.json", True, 100, lambda root: _model(root / "folder")),
    "tokenizer": ("folder/tokenizer.json", True, 150, lambda root: _tokenizer(root / "folder")),
    "manifest": ("vectors/manifest.json", True, 100, lambda root: verify_vectors(root / "vectors", {"attention-own-float32": NPY})),
    "vectors": ("vectors/npy/attention-own-float32.q.npy", False, 20, lambda root: verify_vectors(root / "vectors", {})),
}  # fmt: skip


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of models with weights of any size
def test_damaged_files(place, kind):
    name, is_json, count, read = READERS[kind]
    file = place / name
    sound = file.read_bytes()
    value, refused = json.loads(sound) if is_json else None, 0
    read(place)
    try:
        for i in range(count * TIMES):
            draw = Draw(f"{kind} {i}")
            content = damaged_json(draw, value) if is_json and draw.random() < 0.8 else damaged(draw, sound)
            gguf_files.rewrite(file, content)
            try:
                read(place)
            except (ValueError, TypeError) as error:
                refused += 1
                assert str(error), (kind, i)
            except BaseException as error:
                raise AssertionError(f"{type(error).__name__}: {error}, from {kind}, example {i}") from error
    finally:
        gguf_files.rewrite(file, sound)
    assert refused > count // 10, "the damage does nothing"


@pytest.mark.parametrize("kind", READERS)
def test_files_that_never_end_are_not_opened(place, kind):
    """A FIFO, which blocks whoever opens it."""
    name, _, _, read = READERS[kind]
    file, kept = place / name, place / "kept"
    shutil.move(file, kept)
    os.mkfifo(file)
    try:
        with pytest.raises((ValueError, FileNotFoundError), match="file|is missing|there is no"):
            read(place)
    finally:
        file.unlink()
        shutil.move(kept, file)


def test_outputs_of_any_kind(place):
    """Warnings are errors here: none may leave the judgement, whatever the numbers are."""
    for i in range(8 * TIMES):
        draw = Draw(f"outputs {i}")
        shapes = {
            "rotation-axes-pixtral-float32": (2, 23, 32),
            "attention-window": (4, 24, 16),
            "linear-19-causal-bfloat16": (4, 24, 16),
        }
        outputs = {
            name: draw.silly() if draw.random() < 0.2 else draw.array(*shape, dtype=np.dtype("float32"))
            for name, shape in shapes.items()
        }
        before = snapshot(outputs)
        try:
            verdicts = {report.verdict for report in verify_vectors(place / "vectors", outputs)}
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__}: {error}, from example {i}") from error
        assert verdicts <= {"wrong", "not judged"} and snapshot(outputs) == before, i
    for i in range(30 * TIMES):
        silly = Draw(f"silly outputs {i}").silly()
        try:
            verify_vectors(place / "vectors", silly)
        except (ValueError, TypeError, OSError) as error:
            assert str(error), i


# --- Command lines --------------------------------------------------------------------------------------------------

WORDS = [
    "",
    "0",
    "-1",
    "1",
    "2",
    "8",
    "64",
    "65537",
    "2147483649",
    "1e39",
    "nan",
    "inf",
    "-inf",
    "0.5",
    "1e-320",
    "x",
    "--",
    "-",
    "θ",
    "None",
    "9" * 5000,
]
WORDS += [
    "half",
    "float32",
    "numpy",
    "Linear(factor=2.0)",
    "Linear(factor=0)",
    "YaRN(factor=1e400, original_length=3)",
    "Linear(",
    "DynamicNTK(factor=2.0, original_length=64)",
]
FILES = [
    "x.npy",
    "trace.safetensors",
    "folder",
    "folder/config.json",
    "model.gguf",
    "vectors",
    "rope.py",
    "rope.py:fails",
    "rope.py:none",
    "nowhere/at/all",
    ".",
]
TARGETS = ["rope.py:fails", "rope.py:none", "no_such_module:f", "rope.py", ":", "json:dumps", "os:getcwd"]
COMMANDS = [
    "true {x} {positions} {y}",
    "false {x} {positions} {y}",
    "no-such-program {x} {positions} {y}",
    "cp {x} {positions}",
    "",
    "{x} {positions} {y}",
    "'",
]
# What a command needs to come far: silly values are put in place of some of it.
GOOD = {
    "check": [["TARGET", "--in-process", "--head-dim", "8", "--base", "10000", "--layout", "half"], ["--exec", "COMMAND", "--config", "folder"]],
    "identify": [["TARGET", "--in-process", "--head-dim", "8"], ["--exec", "COMMAND", "--head-dim", "8"]],
    "table": [["--head-dim", "8", "--base", "10000", "--layout", "half"], ["--config", "folder"]],
    "vectors": [["--verify", "vectors", "x.npy"], ["--verify", "vectors", "folder"], ["--verify", "vectors", "trace.safetensors"]],
    "trace": [["folder", "--tokens", "1,2", "-o", "out.safetensors"], ["model.gguf", "--text", "hello", "-o", "out.safetensors"]],
    "diff": [["trace.safetensors", "trace.safetensors"]],
    "generate": [["--model", "folder", "hello"], ["--model", "model.gguf", "--max-new-tokens", "2", "hello"]],
    "plot": [["decay", "-o", "out.svg", "--head-dim", "8", "--base", "1e4", "--layout", "half"]],
}  # fmt: skip


def _options():
    """The option strings of every command, with their choices, as the parser has them."""
    (commands,) = (action for action in cli._parser()._actions if action.dest == "command")
    return {
        name: [a for a in parser._actions if a.option_strings and a.dest != "help"]
        for name, parser in commands.choices.items()
    }


def _command_line(draw, options):
    command = draw.choice(list(options))
    words = [command, *draw.choice(GOOD.get(command, [[]]))]
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        action = draw.choice(options[command])
        value = (
            []
            if action.nargs == 0
            else [draw.choice([*WORDS, *FILES, *(action.choices or ())] if draw.random() < 0.6 else WORDS)]
        )
        words += [draw.choice(action.option_strings), *value]
    if draw.random() < 0.4 and len(words) > 1:
        words[draw.randrange(1, len(words))] = draw.choice(WORDS + FILES)
    if draw.random() < 0.1:
        words.append(draw.choice(WORDS + FILES))
    return [
        draw.choice(TARGETS) if word == "TARGET" else draw.choice(COMMANDS) if word == "COMMAND" else word
        for word in words
    ]


def _too_long(words):
    """The gallery, all test vectors, and downloads have tests of their own; a function apart is tried below."""
    runs = words[0] in ("check", "identify") and "--exec" not in words and "--in-process" not in words
    writes = words[0] == "vectors" and "--verify" not in words
    return runs or writes or "smollm2" in words or (words[0] == "plot" and words[1] not in ("decay", "-"))


def test_command_lines(place, monkeypatch, capfd):
    monkeypatch.chdir(place)
    options = _options()
    assert set(GOOD) <= set(options)
    codes = set()
    for i in range(150 * TIMES):
        words = _command_line(Draw(f"command line {i}"), options)
        if _too_long(words):
            continue
        try:
            code = cli.main(words)
        except SystemExit as error:  # argparse's
            code = error.code
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__}: {error}, from example {i}: {words}") from error
        shown = capfd.readouterr()
        assert code in (0, 1, 2, 3) and "Traceback" not in shown.err, (i, words, code, shown.err)
        assert code != 2 or "error: " in shown.err, (i, words)
        codes.add(code)
    assert codes >= {0, 2, 3}


@pytest.mark.parametrize(
    "words, code",
    [
        (["check", "rope.py:fails", "--head-dim", "8", "--base", "1e4", "--layout", "half"], 3),
        (["identify", "os:_exit", "--head-dim", "8"], 3),
        (["check", "rope.py:rotate", "--head-dim", "99999999999", "--base", "1e4", "--layout", "half"], 2),
        (["table", "--config", "folder", "--length", "0"], 2),
    ],
)
def test_command_lines_as_a_person_types_them(place, words, code):
    run = subprocess.run([sys.executable, "-m", "pyrope", *words], cwd=place, capture_output=True, text=True, timeout=120,
                         env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert run.returncode == code and "Traceback" not in run.stderr, run.stderr
