"""The command line: what it prints, its exit codes, and what it says about misuse."""

import dataclasses
import inspect
import io
import json
import os
import pathlib
import py_compile
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from optional import package

import pyrope
from pyrope import cli, plots
from pyrope.cli import COMMANDS, main
from pyrope.oracle import gallery, vectors

tokenizers, save_file = package("tokenizers"), package("safetensors.numpy").save_file

PLAIN = ["table", "--head-dim", "8", "--base", "10000", "--layout", "half"]
ROPE = ["--head-dim", "32", "--base", "10000", "--layout", "half"]
LLAMA3 = "Llama3(factor=8.0, low=1.0, high=4.0, original_length=8192)"


@pytest.fixture
def run(capfd):
    """The exit code of a command in this process, what it prints, and what it says on standard error."""

    def ended(*words):
        try:
            code = main(words)
        except SystemExit as error:  # of argparse
            code = error.code
        return code, *capfd.readouterr()

    return ended


def by_shell(*words, **options):
    """The command as a person calls it: its words come from sys.argv."""
    options = {"capture_output": True, "text": True, **options}
    run = subprocess.run([sys.executable, "-m", "pyrope", *words], timeout=300, **options)
    return run.returncode, run.stdout, run.stderr


def write_config(folder, **config):
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


# ── table, and what names a rope ─────────────────────────────────────────────────────────────────────────────────────


def test_table(run):
    code, output, _ = run(*PLAIN, "--position", "1")
    lines = output.splitlines()
    assert code == 0 and lines[:2] == ["Rope(head_dim=8, base=10000.0, layout='half')", "attention factor 1"]
    assert lines[2].split() == ["pair", "theta", "wavelength", "cos", "sin"]
    assert lines[4].split() == ["1", "0.1", "62.8318530718", "0.995004165278", "0.0998334166468"]
    assert len(lines) == 7 and max(map(len, lines)) <= 80
    factors = tuple(1 + k / 10 for k in range(16))
    scaling = f"LongRoPE(short={factors}, long={factors}, factor=4.0, original_length=64)"
    words = ["table", *ROPE, "--length", "128", "--scaling", scaling]
    assert run(*words)[1].partition("\n")[0].count("(1.0, 1.1, 1.2, …, 2.5: 16 numbers)") == 2
    assert str(factors) in json.loads(run(*words, "--json")[1])["rope"]
    output = json.loads(run("table", *ROPE, "--scaling", LLAMA3, "--json")[1])
    rope = pyrope.Rope(32, 10000.0, "half", scaling=pyrope.Llama3(8.0, 1.0, 4.0, 8192))
    assert output["rope"] == repr(rope) and output["theta"] == pyrope.frequencies(rope).tolist()
    still = json.loads(run(*PLAIN, "--scaling", "Proportional(fraction=0.5)", "--json")[1])
    assert still["wavelength"][2:] == [None, None]


def test_table_of_a_config(run, tmp_path):
    scaling = {"type": "dynamic", "factor": 2.0}
    folder = write_config(tmp_path, model_type="llama", head_dim=8, max_position_embeddings=64, rope_scaling=scaling)
    _, output, noted = run("table", "--config", folder, "--length", "128")
    assert "DynamicNTK(factor=2.0, original_length=64, length=128)" in output and not noted
    assert "depend on the length: give --length" in run("table", "--config", folder)[2]


# ── generate, trace, diff, vectors ───────────────────────────────────────────────────────────────────────────────────

WORDS = ["a", "b", "c", "d", "e", "f", "g", "h"]
CONFIG = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
    "intermediate_size": 8, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0,
}  # fmt: skip
SHAPES = {
    **dict.fromkeys([f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"], (16, 16)), "model.layers.0.mlp.down_proj": (16, 8),
    **dict.fromkeys(("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj", "model.embed_tokens", "lm_head"), (8, 16)),
    **dict.fromkeys(("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm"), (16,)),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A tiny random Llama with a tokenizer of eight words."""
    rng = np.random.default_rng(0)
    tensors = {f"{name}.weight": rng.standard_normal(shape).astype("f4") for name, shape in SHAPES.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="h"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path, **CONFIG)
    return tmp_path


def test_generate_goes_on_from_a_prompt(run, folder, monkeypatch):
    asked = ["generate", "--model", str(folder), "--max-new-tokens", "5"]
    start = time.perf_counter()
    code, output, errors = run(*asked, "a b c")
    took = time.perf_counter() - start
    expected = pyrope.generate(pyrope.load(folder), [0, 1, 2], 5)
    assert code == 0 and output.split() == [WORDS[i] for i in expected]
    said = re.search(r"3 tokens read and 5 written in (\S+) s", errors)
    assert 0 <= float(said[1]) <= took + 0.005  # rounded
    monkeypatch.setattr("sys.stdin", io.StringIO("a b c"))
    assert run(*asked, "-")[1] == output
    assert run(*asked, "--temperature", "5", "--seed", "1", "a b c")[1] != output
    for words, message in [
        (["--temperature", "-1", "a"], "temperature must be finite and at least 0, was -1.0"),
        ([""], "the text is empty: it must have at least one token, was ''"),
        (["--chat", "a"], "the tokenizer of this model has no token <|im_end|>"),
    ]:  # fmt: skip
        code, output, errors = run(*asked, *words)
        assert code == 2 and message in errors and not output.strip()
    write_config(folder, **CONFIG, harmless=1)
    assert "harmless is not known" in run(*asked, "a")[2] and run(*asked, "--ignore", "harmless", "a")[0] == 0


def test_trace_and_diff(run, folder):
    first, second = str(folder / "a.safetensors"), str(folder / "b.safetensors")
    assert "of 3 tokens written to" in run("trace", str(folder), "--tokens", "0,1,2", "-o", first)[1]
    assert run("trace", str(folder), "--text", "a b c", "-o", second)[0] == 0
    assert run("diff", first, second)[0] == 0
    write_config(folder, **CONFIG | {"rope_theta": 500.0})
    assert run("trace", str(folder), "--tokens", "0, 1, 2", "-o", second)[0] == 0
    code, output, _ = run("diff", first, second)
    assert code == 1 and "layers.0.q_rotated" in output
    assert json.loads(run("diff", first, second, "--json")[1])["verdict"] == "wrong"


def test_vectors(run, tmp_path):
    folder, outputs, words = tmp_path / "v", tmp_path / "out", ("--suite", "rotation", *ROPE, "--max-position", "100")
    assert run("vectors", str(folder), *words)[:2] == (
        0,
        f"4 cases written to {folder}\npositions of rotations end at 100\n",
    )
    config = write_config(tmp_path, model_type="llama", head_dim=16, num_attention_heads=2, num_key_value_heads=1)
    own = "vectors", str(tmp_path / "own"), "--suite", "attention", "--dtype", "float32", "--max-position", "100"
    assert run(*own, "--config", config)[0] == 0
    inputs = np.load(next((tmp_path / "own/npy").glob("*.k.npy")))
    assert inputs.shape[1] == 1
    outputs.mkdir()
    for dtype, factor in (("float64", 1), ("float32", 2), ("float16", 2)):
        y = np.load(folder / f"npy/rotation-own-{dtype}.y.npy") * factor
        np.save(outputs / f"rotation-own-{dtype}.npy", y.astype(dtype))
    judge = "vectors", "--verify", str(folder), str(outputs)
    code, text, errors = run(*judge, "--html", str(tmp_path / "r.html"))
    assert code == 1 and text.endswith("4 cases, 1 right, 2 wrong, 1 not judged\n") and (tmp_path / "r.html").exists()
    assert "wrong likewise, 1: rotation-own-float16" in text
    assert "rotation-own-bfloat16: there is no file" in " ".join(text.split())
    assert "likewise" not in run(*judge, "--only", "*-float32")[1]
    code, text, _ = run(*judge, "--only", "*-float64", "--json")
    assert code == 0 and [report["verdict"] for report in json.loads(text)] == ["right"]
    assert run(*judge, "--only", "*-bfloat16")[0] == 3


def test_cases_that_are_wrong_alike_are_named_together(run, monkeypatch):
    wrong = pyrope.check_rotation(lambda x, positions: x, pyrope.Rope(8, 10000.0, "half"), effort="few")
    for others, more in ((8, ""), (9, ", …")):
        reports = [dataclasses.replace(wrong, subject=f"c{i}") for i in range(others + 1)]
        monkeypatch.setattr(vectors, "verify_vectors", lambda *_, reports=reports, **__: reports)
        code, text, _ = run("vectors", "--verify", "vectors", "outputs")
        named = f"c1, c2, c3, c4, c5, c6, c7, c8{more} {others + 1} cases"
        assert code == 1 and f"wrong likewise, {others}: {named}, " in " ".join(text.split())


# ── check, identify ──────────────────────────────────────────────────────────────────────────────────────────────────

CANDIDATES = """
import os, sys
import numpy as np
import pyrope
from pyrope import attention, rotate

ROPE = pyrope.Rope(32, 10000.0, "half")
SCORES = {"window": 5, "softcap": 20.0, "scale": 0.3}

def right(x, positions):
    print("compiling …")
    return rotate(x, positions, ROPE)

late = lambda x, positions: rotate(x, positions + 1, ROPE)
heads_last = lambda x, positions: rotate(x.swapaxes(1, 2), positions, ROPE).swapaxes(1, 2)  # (b, n, h, d)
counts = lambda x: rotate(x, np.arange(x.shape[-2]), ROPE)
offset = lambda x, offset: rotate(x, np.arange(offset, offset + x.shape[-2]), ROPE)
unscaled = lambda q, k, v: attention(q, k, v, causal=True, scale=1.0)
windowed = lambda q, k, v: attention(q, k, v, causal=False, **SCORES)
fused = lambda q, k, v, at: attention(*(rotate(x, at[:, None], ROPE) for x in (q, k)), v, causal=True)
exp = lambda q, k, v, at: pyrope.linear_attention(q, k, v, at, ROPE, causal=True, feature_map="exp")
top_left = lambda q, k, v: attention(q, k, v, causal=True, q_positions=range(q.shape[-2]))
crashes = lambda q, k, v: os._exit(7)

if __name__ == "__main__":  # with the names of three .npy files
    x, at = np.load(sys.argv[1]), np.load(sys.argv[2])
    z = (x[..., :16] + 1j * x[..., 16:]) * np.exp(1j * at[:, None] * 10000.0 ** -(np.arange(16) / 16))
    np.save(sys.argv[3], np.concatenate((z.real, z.imag), -1).astype(x.dtype))
"""


@pytest.fixture
def candidates(tmp_path):
    (tmp_path / "candidates.py").write_text(CANDIDATES)
    return str(tmp_path / "candidates.py")


def test_check_of_a_function_in_a_process_of_its_own(run, candidates):
    code, output, errors = run("check", f"{candidates}:right", *ROPE)
    assert code == 0 and output.startswith("rotation: RIGHT") and "compiling …" in errors
    code, output, _ = run("check", f"{candidates}:crashes", "--attention", "softmax", "--json")
    report = json.loads(output)
    assert code == 3 and (report["subject"], report["expected"]) == ("attention", "softmax attention")
    assert "ends its process, with status 7" in report["failure"]["reason"]
    code, output, _ = run("check", f"{candidates}.py:right", *ROPE)
    assert code == 2 and not output
    command = f"{sys.executable} {candidates} {{x}} {{positions}} {{y}}"
    code, output, _ = run("check", "--exec", command, *ROPE, "--max-position", "64", "--json")
    assert code == 0 and json.loads(output)["verdict"] == "right"


SCORES = ["--attention", "softmax", "--not-causal", "--softcap", "20", "--scale", "0.3", "--window"]


@pytest.mark.parametrize("name, options, code, says", [
    ("late", ROPE, 1, "positions one too high"), ("unscaled", ["--attention", "softmax", "--head-dim", "16"], 1, "scale: missing"),
    ("heads_last", [*ROPE, "--axes", "bnhd", "--dtype", "float16", "--max-position", "2000"], 0, "RIGHT"),
    ("counts", [*ROPE, "--call", "sequential"], 0, "position 8,191"),
    ("fused", ["--attention", "softmax", *ROPE, "--call", "sequential"], 3, "missing 1 required positional argument: 'at'"),
    ("offset", [*ROPE, "--call", "offset", "--dtype", "float64", "--max-position", "2000"], 0, "RIGHT"),
    ("windowed", [*SCORES, "5"], 0, "window 5"), ("windowed", [*SCORES, "6"], 1, "window: one too narrow"),
    ("top_left", ["--attention", "softmax", "--no-cache"], 0, "RIGHT"), ("top_left", ["--attention", "softmax", "--cache"], 1, "WRONG"),
    ("fused", ["--attention", "softmax", *ROPE], 0, "with Rope(head_dim=32, base=10000.0, layout='half') inside"),
    ("exp", ["--attention", "linear", "--heads", "2", "--key-heads", "1", *ROPE], 1, "feature map: "),
    ("exp", ["--attention", "linear", *ROPE, "--feature-map", "exp", "--max-position", "600"], 0, "exp"),
])  # fmt: skip
def test_options_reach_the_check(run, candidates, name, options, code, says):
    ended, output, _ = run("check", f"{candidates}:{name}", "--in-process", *options)
    assert ended == code and says in " ".join(output.split()) and max(map(len, output.splitlines())) <= 80, output


def test_attention_has_the_heads_of_a_config(run, candidates, tmp_path):
    folder = write_config(tmp_path, model_type="mistral", head_dim=32, num_attention_heads=8, num_key_value_heads=2,
                          sliding_window=16, rope_theta=10000.0, attn_logit_softcapping=9.0, query_pre_attn_scalar=7)  # fmt: skip
    words = "check", f"{candidates}:fused", "--in-process", "--attention", "softmax", "--config", folder
    code, output, noted = run(*words)
    assert code == 0 and "of 8 heads over 2" in output
    for key, flag in (
        ("sliding_window 16", "window"),
        ("attn_logit_softcapping 9.0", "softcap"),
        ("query_pre_attn_scalar 7", "scale"),
    ):
        assert f"the config has {key}, which is checked only with --{flag}" in noted
    assert "sliding_window" not in run(*words, "--window", "16")[2]


def test_identify(run, candidates):
    code, output, _ = run("identify", f"{candidates}:right", "--head-dim", "32", "--in-process")
    assert code == 0 and "base 10000" in output and "half" in output and max(map(len, output.splitlines())) <= 80
    assert json.loads(run("identify", f"{candidates}:late", "--head-dim", "32", "--json")[1])["offset"] == 1
    code, output, _ = run("identify", f"{candidates}:crashes", "--head-dim", "32", "--json")
    assert code == 3 and json.loads(output)["verdict"] == "not judged"


def test_the_gallery(run, monkeypatch):
    code, output, errors = run("check")
    table, legend = output.split("\n\n")
    head, *lines, last = table.splitlines()
    assert (code, errors) == (0, "") and head.split()[:2] == ["implementation", "verdict"] and "equivalent" in legend
    assert max(map(len, [*lines, *legend.splitlines()])) <= 80
    assert last == f"{len(lines)} implementations, {len(lines)} judged as they should be"
    assert "\n  equivalent other vectors" in output  # names stand apart from their words
    assert any("wrong base" in line for line in lines) and any("half 500000 Llama3" in line for line in lines)
    exhibit = gallery.exhibits()[0]
    monkeypatch.setattr(gallery, "exhibits", lambda: [exhibit._replace(faults=("direction",), verdict="wrong")])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    code, output, _ = run("check")
    assert code == 1 and "UNEXPECTED" in output and "\033[1;32mright\033[0m" in output
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in run("check")[1]
    assert json.loads(run("check", "--json")[1])[0]["as_expected"] is False


# ── plot ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.needs("matplotlib")
def test_plot_is_of_the_rope_that_is_given(run, tmp_path, monkeypatch):
    drawn, file = {}, tmp_path / "x.SVG"
    monkeypatch.setitem(plots.PLOTS, "decay", lambda rope=None: drawn.update(rope=rope) or plots.rotation_figure())
    code, output, _ = run("plot", "decay", "-o", str(file), *ROPE, "--scaling", "Linear(factor=4.0)")
    assert code == 0 and output == f"decay drawn in {file}\n" and file.read_bytes().startswith(b"<?xml")
    assert drawn["rope"] == pyrope.Rope(32, 10000.0, "half", scaling=pyrope.Linear(4.0))
    assert run("plot", "decay", "-o", str(tmp_path / "x.png"))[0] == 0 and drawn["rope"] is None
    without = [name for name, make in plots.PLOTS.items() if "rope" not in inspect.signature(make).parameters]
    assert f"({' and '.join(without)} show none)" in cli.plot.__doc__
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, errors = run("plot", "decay", "-o", str(tmp_path / "x.png"))
    assert code == 2 and 'pip install ".[plot]"' in errors


@pytest.mark.needs("matplotlib")
def test_check_writes_a_page(run, candidates, tmp_path):
    code, output, errors = run("check", f"{candidates}:late", *ROPE, "--html", str(tmp_path / "r.html"), "--in-process")
    assert code == 1 and "positions one too high" in output
    assert errors == f"report written to {tmp_path / 'r.html'}\n"
    page = (tmp_path / "r.html").read_text()
    assert "one too high" in page and ":late rotation: WRONG" in page


# ── End to end ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_words_of_a_shell_are_read_from_the_first_on(candidates, monkeypatch):
    code, output, errors = by_shell()
    assert (code, output) == (2, "") and all(f"\n    {name} " in errors for name in COMMANDS)
    code, output, errors = by_shell("check", f"{candidates}:late", *ROPE)  # hands its words to another process
    assert (code, errors) == (1, "") and "one too high" in output
    code, output, _ = by_shell("table", "--help", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert code == 0 and "examples:" in output
    # As in ``pyrope table … | head``, where whoever reads has left before anything is printed.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    read, write = os.pipe()
    os.close(read)
    code, _, errors = by_shell(*PLAIN, capture_output=False, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (code, errors) == (0, "")  # the verdict is not lost


def test_it_runs_without_its_source(tmp_path):
    package = pathlib.Path(pyrope.__file__).parent
    for file in package.rglob("*.py"):
        py_compile.compile(str(file), tmp_path / "pyrope" / file.relative_to(package).with_suffix(".pyc"), doraise=True)
    code, output, errors = by_shell(*PLAIN, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert (code, errors) == (0, "") and output.startswith("Rope(head_dim=8")


# Ctrl-C while a module is being imported, and where the command itself is at work.
INTERRUPTED = """
import runpy, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["pyrope", "plot", "decay", "-o", "never.svg"]
runpy.run_module("pyrope", run_name="__main__")
"""


@pytest.mark.needs("matplotlib")
@pytest.mark.ctrl_c
@pytest.mark.parametrize("module", ["numpy", "matplotlib.figure"])
def test_ctrl_c_is_quiet_also_during_the_imports(module, tmp_path):
    code = INTERRUPTED.format(module=module)
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "") and not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    code, output, _ = run(command, "--help")
    assert code == 0 and f"pyrope {command}" in output.partition("examples:")[2]
    assert max(map(len, output.splitlines())) <= 80
    assert command != "plot" or all(name in output for name in plots.PLOTS)


# ── Misuse ───────────────────────────────────────────────────────────────────────────────────────────────────────────

F = ["check", "json:dumps", "--in-process", *ROPE]
SOFTMAX = ["check", "json:dumps", "--in-process", "--attention", "softmax"]
LINEAR = [*SOFTMAX[:-1], "linear"]
PROGRAMS = ["check", "--attention", "softmax", "--exec"]


@pytest.mark.parametrize("words, message", [
    (["table"], "give --config, or --head-dim, --base, --layout"),
    (["table", "--config", "x", "--base", "5", "--head-dim", "8"], "--base, --head-dim must be left out: --config says"),
    ([*PLAIN, "--layer-type", "full_attention"], "--layer-type needs --config"), ([*PLAIN[:-1], "neox"], "(did you mean 'half'?)"),
    ([*PLAIN, "--position", str(2**40)], "positions must lie within"), ([*PLAIN, "--scaling", "Yarn(factor=4)"], "YaRN(factor, original_length, "),
    *(([*PLAIN, "--scaling", wrong], "--scaling must be a call with numbers, of Linear(factor), Dyn") for wrong in ("Linear(factor=open('x'))", "Linear", "Linear(**{})")),
    ([*PLAIN, "--scaling", "DynamicNTK(factor=2)"], "missing 1 required positional argument: 'original_length'"),
    (["generate", "--model", "some-lab/Model-8B", "hi"], "some-lab/Model-8B: No such file"),
    (["check", "--base", "10000"], "--base needs a target: without one, the gallery is run"), (["check", "json", "--in-process", *ROPE], "module:function"),
    (["check", "--exec", "./x {x}", *ROPE], ": {positions} is missing"),
    (["check", "--exec", "./x {x} {pos} {y}", *ROPE], ": {pos} does not belong there"),
    (["check", "--exec", "true {x} {positions} {y}", "--axes", "bnhd", *ROPE], "--axes must be left out: only functions"),
    (["check", "json:dumps", "--head-dim", "32"], "give --config, or --base, --layout"),  # as the other process says
    (["check", "json:dumps", *ROPE, "--timeout", "0"], "--timeout must be"), ([*F, "--timeout", "5"], "--timeout must be left out: --in-process has no time limit"),
    ([*F, "--exec", "x"], "or --exec, not both"), ([*F, "--grade", "perfect"], "grade must be one of"), ([*F, "--autograd"], "--autograd needs --framework torch"),
    ([*F, "--not-causal", "--heads", "8"], "--heads, --not-causal must be left out: not for a rotation"),
    (LINEAR, "give --config, or --head-dim, --base, --layout"), ([*LINEAR, *ROPE, "--window", "5"], "--window must be left out: not for linear attention"),
    ([*SOFTMAX, "--base", "5"], "give --config, or --head-dim, --layout"), ([*SOFTMAX, "--call", "offset"], "--call offset is for attention with RoPE inside"),
    ([*SOFTMAX, "--cache", "--no-cache"], "--no-cache: not allowed with argument --cache"),
    ([*SOFTMAX, "--max-position", "1000"], "--max-position needs the rope that is inside"),
    ([*SOFTMAX, "--strict", "--axes", "bnhd"], "--axes, --strict must be left out: not for softmax attention"),
    ([*PROGRAMS, "true {q} {k} {v} {positions} {o}"], ": {positions} does not belong there"),
    ([*PROGRAMS, "true {q} {k} {v} {g} {o}", "--backward"], 'such as "./mine {q} {k} {v} {g} {dq} {dk} {dv}": {o} does not'),
    (["identify", "json:dumps", "--in-process"], "give --head-dim, the size of a head"),
    (["identify", "--head-dim", "32"], "give a target such as module:function, or --exec"), (["vectors", "--verify", "only-one"], "--verify needs two paths"),
    (["vectors", "--verify", "vectors", "outputs", "--heads", "3"], "--heads is for writing vectors"), (["vectors", "one", "two"], "need --verify"),
    (["vectors", "one", "--heads", "3"], "--heads needs a rope of your own"), (["vectors", "--verify", "no-vectors", "other"], "no-vectors/manifest.json: No such file"),
    (["diff", "no-such-file", "other"], "no-such-file"), (["trace", "x", "-o", "t"], "give --tokens or --text"),
    (["diff", __file__, "other"], f"{__file__}: "),
    (["trace", "x", "--tokens", "1", "-o", "t.npz"], "a trace must be a .safetensors file, was 't.npz'"),
    (["trace", "x", "--tokens", "1,b", "-o", "t"], "argument --tokens: invalid integers value: '1,b'"),
    (["plot", "decay", "-o", "x.pdf"], "a picture must be a .png or .svg file, was 'x.pdf'"),
    (["plot", "rotation", "-o", "x.png", "--base", "5"], "--base must be left out: the picture rotation shows no rope"),
    ([*F, "--html", "x.md"], "a page must be a .html or .htm file"),
    (["chekc"], "invalid choice: 'chekc'"), (["check", "--haed-dim", "3"], "unrecognized arguments: --haed-dim"),
])  # fmt: skip
def test_misuse_exits_with_2(run, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    code, output, errors = run(*words)
    assert code == 2 and message in errors and not output and not list(tmp_path.iterdir())
    assert re.match("pyrope: error: ", errors) or re.fullmatch(
        r"pyrope( \w+)?: error: .*; see pyrope( \w+)? --help\n", errors
    )
