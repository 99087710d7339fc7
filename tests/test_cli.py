"""The command line: what it prints, its exit codes, and what it says about misuse."""

import configparser
import io
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from optional import package

import pyrope
from pyrope import plots
from pyrope.cli import main
from pyrope.oracle import gallery

tokenizers, save_file = package("tokenizers"), package("safetensors.numpy").save_file

LLAMA3 = "Llama3(factor=8.0, low=1.0, high=4.0, original_length=8192)"
PLAIN = ["table", "--head-dim", "8", "--base", "10000", "--layout", "half"]


def test_table(capsys):
    assert main([*PLAIN, "--position", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Rope(head_dim=8, base=10000.0, layout='half')" and lines[1] == "attention factor 1"
    assert lines[2].split() == ["pair", "theta", "wavelength", "cos", "sin"]
    assert lines[4].split() == ["1", "0.1", "62.8318530718", "0.995004165278", "0.0998334166468"]
    assert len(lines) == 7 and max(map(len, lines)) <= 80


def test_table_as_json_with_scaling(capsys):
    assert (
        main(["table", "--head-dim", "128", "--base", "500000", "--layout", "half", "--scaling", LLAMA3, "--json"]) == 0
    )
    output = json.loads(capsys.readouterr().out)
    rope = pyrope.Rope(128, 500000.0, "half", scaling=pyrope.Llama3(8.0, 1.0, 4.0, 8192))
    assert output["rope"] == repr(rope) and output["theta"] == pyrope.frequencies(rope).tolist()


def test_long_lists_are_abbreviated_in_a_table_and_whole_in_json(capsys):
    factors = tuple(1 + k / 10 for k in range(16))
    scaling = f"LongRoPE(short={factors}, long={factors}, factor=4.0, original_length=64)"
    words = ["table", *ROPE, "--length", "128", "--scaling", scaling]
    assert main(words) == 0
    assert capsys.readouterr().out.partition("\n")[0].count("(1.0, 1.1, 1.2, …, 2.5: 16 numbers)") == 2
    assert main([*words, "--json"]) == 0
    assert str(factors) in json.loads(capsys.readouterr().out)["rope"]


def test_pairs_that_do_not_turn_have_no_wavelength(capsys):
    assert main([*PLAIN, "--scaling", "Proportional(fraction=0.5)", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["wavelength"][2:] == [None, None]


def test_table_of_a_config(capsys, tmp_path):
    config = {
        "model_type": "llama",
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["table", "--config", str(tmp_path), "--length", "128"]) == 0
    assert "DynamicNTK(factor=2.0, original_length=64, length=128)" in capsys.readouterr().out
    assert main(["table", "--config", str(tmp_path)]) == 2
    assert "depend on the length: give --length" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["table"], "give --config, or --head-dim, --base, --layout"),
        (["table", "--head-dim", "7", "--base", "10000", "--layout", "half"], "head_dim must be even, was 7"),
        (["table", "--config", "no/such/config.json"], "error: no/such/config.json"),
        (["table", "--config", "x", "--base", "5", "--head-dim", "8"], "leave out --head-dim, --base"),
        ([*PLAIN, "--scaling", "Linear(4)"], "--scaling must be a call such as"),
        ([*PLAIN, "--scaling", "Nonlinear(factor=4)"], "--scaling must be a call such as"),
        ([*PLAIN, "--scaling", "Yarn(factor=4)"], "did you mean YaRN?"),
        ([*PLAIN, "--scaling", "Linear"], "with named arguments; was 'Linear'\n"),
        ([*PLAIN, "--scaling", "linear"], "was 'linear' (did you mean Linear?)\n"),
        (["generate", "--model", "smolm2", "hi"], "there is no model 'smolm2' (did you mean smollm2?)"),
        ([*PLAIN, "--scaling", "Linear(factor=open('x'))"], "--scaling must be a call such as"),
        ([*PLAIN, "--scaling", "Linear(fctor=4)"], "--scaling: Linear needs factor; was 'Linear(fctor=4)'"),
        (
            [*PLAIN, "--scaling", "DynamicNTK(factor=2)"],
            "DynamicNTK needs factor, original_length and may have length; was",
        ),
        ([*PLAIN, "--scaling", "Linear(factor=2, factor=3)"], "--scaling must be a call such as"),
        ([*PLAIN, "--scaling", "Linear(**{})"], "--scaling must be a call such as"),
        ([*PLAIN, "--layer-type", "full_attention"], "--layer-type needs --config"),
        (["table", "--head-dim", "8", "--base", "1e400", "--layout", "half"], "base must be finite"),
        ([*PLAIN, "--position", "9" * 30], "positions must lie within"),
        ([*PLAIN, "--scaling", "Linear(factor=0.5)"], "factor must be finite and at least 1"),
        ([*PLAIN, "--position", str(2**40)], "positions must lie within"),
    ],
)
def test_misuse_exits_with_2(capsys, arguments, message):
    assert main(arguments) == 2
    caught = capsys.readouterr()
    assert message in caught.err and caught.err.startswith("pyrope: error: ") and not caught.out


def test_no_word_at_all_is_answered_with_all_there_is(capsys):
    assert main([]) == 2
    output, errors = capsys.readouterr()
    assert not output and all(f"\n    {name} " in errors for name in ("check", "identify", "table", "generate", "plot"))


@pytest.mark.parametrize("arguments", [["tabel"], ["table", "--layout", "neox"], ["table", "--head-dim", "x"]])
def test_wrong_words_exit_with_2(capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    captured = capsys.readouterr()
    assert re.fullmatch(r"pyrope( table)?: error: .*; see pyrope( table)? --help\n", captured.err) and not captured.out


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
@pytest.mark.parametrize("module", ["pyrope.cli", "numpy", "pyrope.theta", "matplotlib.figure"])
def test_ctrl_c_is_quiet_also_during_the_imports(module, tmp_path):
    code = INTERRUPTED.format(module=module)
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "") and not list(tmp_path.iterdir())


def test_the_command_and_the_module_are_one():
    setup = configparser.ConfigParser()
    setup.read(pathlib.Path(__file__).parent.parent / "setup.cfg")
    assert setup["options.entry_points"]["console_scripts"].strip() == "pyrope = pyrope.__main__:main"


def by_shell(*words):
    """The command as a person calls it: its words come from sys.argv."""
    run = subprocess.run([sys.executable, "-m", "pyrope", *words], capture_output=True, text=True, timeout=300)
    return run.returncode, run.stdout, run.stderr


def test_the_words_of_a_shell_are_read_from_the_first_on(tmp_path):
    code, output, errors = by_shell()
    assert (code, output) == (2, "") and "check" in errors and "generate" in errors
    code, output, errors = by_shell("table", "--head-dm", "8")
    assert (code, output) == (2, "") and "did you mean --head-dim?" in errors
    (tmp_path / "mine.py").write_text("def turn(x, positions):\n    return x\n")
    code, output, errors = by_shell(
        "check", f"{tmp_path / 'mine.py'}:turn", *ROPE
    )  # hands its words to another process
    assert (code, errors) == (1, "") and "not rotated" in output


def test_a_verdict_is_not_lost_with_its_reader(tmp_path, monkeypatch):
    """As in ``pyrope check … | head``, where whoever reads has left before anything is printed."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    (tmp_path / "mine.py").write_text("def turn(x, positions):\n    return x\n")
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "pyrope", "check", f"{tmp_path / 'mine.py'}:turn", *ROPE]
    run = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, timeout=300)
    os.close(write)
    assert (run.returncode, run.stderr) == (1, b"")


def test_help_in_a_terminal_that_knows_only_ascii():
    run = subprocess.run(
        [sys.executable, "-m", "pyrope", "table", "--help"], env={"PYTHONIOENCODING": "ascii"}, capture_output=True
    )
    assert run.returncode == 0 and b"examples:" in run.stdout


# --- generate ---

WORDS = ["a", "b", "c", "d", "e", "f", "g", "h"]


@pytest.fixture
def folder(tmp_path):
    """A tiny random Llama with a tokenizer of eight words."""
    config = {
        "model_type": "llama", "vocab_size": 8, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
        "intermediate_size": 8, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0,
    }  # fmt: skip
    rng = np.random.default_rng(0)
    rows = {"q_proj": 16, "k_proj": 16, "v_proj": 16, "o_proj": 16}
    tensors = {f"model.layers.0.self_attn.{name}.weight": rng.standard_normal((n, 16)) for name, n in rows.items()}
    tensors |= {f"model.layers.0.mlp.{name}_proj.weight": rng.standard_normal((8, 16)) for name in ("gate", "up")}
    tensors["model.layers.0.mlp.down_proj.weight"] = rng.standard_normal((16, 8))
    norms = ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm")
    tensors |= {f"{name}.weight": np.ones(16) for name in norms}
    tensors |= {name: rng.standard_normal((8, 16)) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file({name: array.astype(np.float32) for name, array in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="h"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_generate_goes_on_from_a_prompt(capsys, folder, monkeypatch):
    asked = ["generate", "--model", str(folder), "--max-new-tokens", "5"]
    assert main([*asked, "a b c"]) == 0
    output = capsys.readouterr()
    expected = pyrope.generate(pyrope.load(folder), [0, 1, 2], 5)
    assert output.out.split() == [WORDS[i] for i in expected]
    assert "3 tokens read in" in output.err and "5 written" in output.err
    monkeypatch.setattr("sys.stdin", io.StringIO("a b c"))
    assert main([*asked, "-"]) == 0
    assert capsys.readouterr().out == output.out
    assert main([*asked, "--temperature", "5", "--seed", "1", "a b c"]) == 0
    assert capsys.readouterr().out != output.out


def test_generate_passes_over_keys_on_request(capsys, folder):
    config = json.loads((folder / "config.json").read_text()) | {"harmless": 1}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["generate", "--model", str(folder), "a"]) == 2
    assert "harmless is not known" in capsys.readouterr().err
    assert main(["generate", "--model", str(folder), "--ignore", "harmless", "--max-new-tokens", "2", "a"]) == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--temperature", "-1", "a"], "temperature must be finite and at least 0, was -1.0"),
        (["--top-k", "3", "a"], "need a temperature above 0"),
        (["--max-new-tokens", "0", "a"], "max_new_tokens must be at least 1, was 0"),
        (["--dtype", "float16", "a"], "dtype must be one of 'float32', 'float64', was 'float16'"),
        (["--backend", "torch", "a"], 'backend must be "numpy" or "cupy", was \'torch\''),
        ([""], "the prompt must not be empty"),
        (["  "], "the prompt gives no tokens"),
        (["--chat", "a"], "the tokenizer of this model has no token <|im_end|>"),
        (["--max-new-tokens", "1000000000000000", "a"], "a cache for 1000000000000001 tokens"),
    ],
)
def test_generate_says_what_is_wrong(capsys, folder, arguments, message):
    assert main(["generate", "--model", str(folder), *arguments]) == 2
    output = capsys.readouterr()
    assert message in output.err and not output.out.strip()


def test_generate_says_what_is_not_there(capsys, tmp_path):
    assert main(["generate", "--model", str(tmp_path / "none"), "a"]) == 2
    assert "does not exist" in capsys.readouterr().err


# --- the oracle ---

ROPE = ["--head-dim", "32", "--base", "10000", "--layout", "half"]
CANDIDATES = """
import numpy as np
import pyrope

ROPE = pyrope.Rope(32, 10000.0, "half")


def right(x, positions):
    return pyrope.rotate(x, positions, ROPE)


def talking(x, positions):
    print("compiling …")
    return pyrope.rotate(x, positions, ROPE)


def late(x, positions):
    return pyrope.rotate(x, positions + 1, ROPE)


def heads_last(x, positions):  # (b, n, h, d)
    return pyrope.rotate(x.swapaxes(1, 2), positions, ROPE).swapaxes(1, 2)


def offset(x, offset):
    return pyrope.rotate(x, np.arange(offset, offset + x.shape[-2]), ROPE)


def columns_first(x, positions):  # (axes, n)
    axes = pyrope.Axes("sections", (4, 6, 6))
    return pyrope.rotate(x, positions[[0, 2, 1]], pyrope.Rope(32, 1e6, "half", axes=axes))


number = 3
"""
PROGRAM = """
import sys
import numpy as np
import pyrope

x, positions = np.load(sys.argv[1]), np.load(sys.argv[2])
np.save(sys.argv[3], pyrope.rotate(x, positions, pyrope.Rope(32, {base}, "half")))
"""


@pytest.fixture
def candidates(tmp_path):
    (tmp_path / "candidates.py").write_text(CANDIDATES)
    return str(tmp_path / "candidates.py")


def test_check_without_a_target_runs_the_gallery():
    code, output, errors = by_shell("check")
    assert (code, errors) == (0, "")
    table, legend = output.split("\n\n")
    head, *lines, last = table.splitlines()
    assert max(map(len, legend.splitlines())) <= 80
    assert head.split()[:3] == ["implementation", "verdict", "error"]
    assert last == f"{len(lines)} implementations, {len(lines)} judged as they should be"
    assert max(map(len, lines)) <= 80
    assert sum(" right " in line for line in lines) >= 7 and sum(" wrong " in line for line in lines) >= 12
    assert any("wrong base" in line for line in lines) and any("half 500000 Llama3" in line for line in lines)


def test_the_gallery_says_where_it_was_not_as_expected(capsys, monkeypatch):
    (exhibit,) = [exhibit for exhibit in gallery.exhibits() if exhibit.name == "rope_theta not read"]
    monkeypatch.setattr(gallery, "exhibits", lambda: [exhibit._replace(faults=("direction",))])
    assert main(["check"]) == 1
    assert "UNEXPECTED" in capsys.readouterr().out
    assert main(["check", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["as_expected"] is False


def test_check_of_a_function(capfd, candidates):
    assert main(["check", f"{candidates}:right", *ROPE]) == 0
    assert capfd.readouterr().out.startswith("rotation: RIGHT")
    assert main(["check", f"{candidates}:late", *ROPE]) == 1
    output = capfd.readouterr().out
    assert "positions one too high" in output and max(map(len, output.splitlines())) <= 80
    assert main(["check", f"{candidates}:late", *ROPE, "--json"]) == 1
    output = json.loads(capfd.readouterr().out)
    assert output["ok"] is False and output["findings"][0]["fault"] == "positions one too high"
    assert main(["check", f"{candidates}:right", *ROPE[:3], "500000", *ROPE[4:]]) == 1
    assert "wrong base" in capfd.readouterr().out


def test_what_a_candidate_prints_is_not_in_the_report(capfd, candidates):
    assert main(["check", f"{candidates}:talking", *ROPE, "--json"]) == 0
    output = capfd.readouterr()
    assert json.loads(output.out)["ok"] and "compiling …" in output.err
    assert main(["identify", f"{candidates}:talking", "--head-dim", "32", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["layout"] == "half"


@pytest.mark.needs("ml_dtypes")
def test_check_in_another_shape_dtype_and_from_a_config(capfd, candidates, tmp_path):
    config = {"model_type": "llama", "head_dim": 32, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = ["--config", str(tmp_path), "--max-position", "2000"]
    assert main(["check", f"{candidates}:heads_last", "--axes", "bnhd", "--dtype", "bfloat16", *expected]) == 0
    assert main(["check", f"{candidates}:offset", "--call", "offset", "--dtype", "float64", *expected]) == 0
    assert "rounded once" in capfd.readouterr().out


ATTENTION = """
import os
import numpy as np
import pyrope

ROPE = pyrope.Rope(32, 10000.0, "half")


def right(q, k, v, mask=None):
    return pyrope.attention(q, k, v, causal=True, mask=mask)


def unscaled(q, k, v):
    return pyrope.attention(q, k, v, causal=True, scale=1.0)


def windowed(q, k, v):
    return pyrope.attention(q, k, v, causal=False, window=5, softcap=20.0, scale=0.3)


def fused(q, k, v, positions):
    q, k = (pyrope.rotate(x, positions[:, None], ROPE) for x in (q, k))
    return pyrope.attention(q, k, v, causal=True)


def linear(q, k, v, positions):
    return pyrope.linear_attention(q, k, v, positions, ROPE, causal=True)


def exp(q, k, v, positions):
    return pyrope.linear_attention(q, k, v, positions, ROPE, causal=True, feature_map="exp")


def crashes(q, k, v):
    os._exit(7)
"""
# Nothing but NumPy, so that it starts quickly: masked, packed and rotated, forward or backward, as its paths say.
ATTENTION_PROGRAM = """
import sys
import numpy as np

paths = dict(word.split("=") for word in sys.argv[1:])
q, k, v = (np.load(paths[name]).astype(np.float64) for name in "qkv")
turn = 1.0
if "positions" in paths:
    angle = np.load(paths["positions"])[:, None, :, None] * 10000.0 ** -(np.arange(16) / 16)
    turn = np.cos(angle) + 1j * np.sin(angle)


def turned(x, turn):
    z = (x[..., :x.shape[-1] // 2] + 1j * x[..., x.shape[-1] // 2:]) * turn
    return np.concatenate((z.real, z.imag), -1)


q, k = turned(q, turn), turned(k, turn)
n, m, shared = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
seen = np.tri(n, m, m - n, dtype=bool)[None, None]
if "mask" in paths:
    seen = seen & np.load(paths["mask"])
if "segments" in paths:
    segments = np.load(paths["segments"])
    seen = seen & (segments[:, None, m - n:, None] == segments[:, None, None, :])
k, v, scale = np.repeat(k, shared, 1), np.repeat(v, shared, 1), q.shape[3] ** -SCALE
scores = np.where(seen, q @ k.swapaxes(-1, -2) * scale, -np.inf)
weights = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e300))
weights = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)
made = {"o": weights @ v}
if "g" in paths:
    g = np.load(paths["g"]).astype(np.float64)
    row = (g * made["o"]).sum(-1, keepdims=True)
    ds = weights * (g @ v.swapaxes(-1, -2) - ROW) * scale
    made = {"dq": turned(ds @ k, np.conj(turn)), "dk": turned(ds.swapaxes(-1, -2) @ q, np.conj(turn))}
    made["dv"] = weights.swapaxes(-1, -2) @ g
    for name in ("dk", "dv"):
        made[name] = made[name].reshape(len(q), -1, shared, m, q.shape[3]).sum(2)
for name, x in made.items():
    np.save(paths[name], x.astype(np.load(paths["q"]).dtype))
"""
SMALL = ["--heads", "2", "--key-heads", "1"]


@pytest.fixture
def attentions(tmp_path):
    (tmp_path / "attentions.py").write_text(ATTENTION)
    return str(tmp_path / "attentions.py")


@pytest.mark.parametrize(
    "name, options, code, says",
    [
        ("right", ["softmax", "--head-dim", "16"], 0, "attention: RIGHT"),
        ("right", ["softmax", *SMALL, "--not-causal"], 1, "causality: "),
        pytest.param("unscaled", ["softmax", "--dtype", "bfloat16"], 1, "scale: missing", marks=pytest.mark.needs("ml_dtypes")),
        ("windowed", ["softmax", *SMALL, "--not-causal", "--window", "5", "--softcap", "20", "--scale", "0.3"], 0, "window 5"),
        ("windowed", ["softmax", *SMALL, "--not-causal", "--window", "6", "--softcap", "20", "--scale", "0.3"], 1, "window: one too narrow"),
        ("fused", ["softmax", *SMALL, *ROPE], 0, "with Rope(head_dim=32, base=10000.0, layout='half') inside"),
        ("linear", ["linear", *SMALL, *ROPE, "--max-position", "600"], 0, "linear attention, Eq. (19), of 2 heads over 1"),
        ("exp", ["linear", *SMALL, *ROPE], 1, "feature map: "),
        ("exp", ["linear", *SMALL, *ROPE, "--feature-map", "exp"], 0, "exp"),
        ("crashes", ["softmax"], 3, "attention: NOT JUDGED"),
    ],
)  # fmt: skip
def test_check_of_attention(capfd, attentions, name, options, code, says):
    assert main(["check", f"{attentions}:{name}", "--attention", *options]) == code
    output = capfd.readouterr().out
    assert says in " ".join(output.split()) and max(map(len, output.splitlines())) <= 80, output


def test_without_a_launcher_an_error_says_what_to_install(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["check", "--attention", "softmax", "--exec", "mpiexec -n 4 python mine.py {q} {k} {v} {o}"]) == 2
    assert "there is no program 'mpiexec' that can be run: pip install \".[mpi]\" in a clone" in capfd.readouterr().err


def test_identify(capfd, candidates):
    assert main(["identify", f"{candidates}:right", "--head-dim", "32"]) == 0
    output = capfd.readouterr().out
    assert "base 10000" in output and "half" in output and max(map(len, output.splitlines())) <= 80
    assert main(["identify", f"{candidates}:late", "--head-dim", "32", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["offset"] == 1


def test_trace_and_diff(capsys, folder):
    first, second = str(folder / "a.safetensors"), str(folder / "b.safetensors")
    assert main(["trace", str(folder), "--tokens", "0,1,2", "-o", first]) == 0
    assert "of 3 tokens written to" in capsys.readouterr().out
    assert main(["trace", str(folder), "--text", "a b c", "-o", second]) == 0
    assert main(["diff", first, second]) == 0
    config = json.loads((folder / "config.json").read_text()) | {"rope_theta": 500.0}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["trace", str(folder), "--tokens", "0, 1, 2", "-o", second]) == 0
    assert main(["diff", first, second]) == 1
    assert "layers.0.q_rotated" in capsys.readouterr().out
    assert main(["diff", first, second, "--json"]) == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["check", "--base", "10000"], "--base needs a target: without one, the gallery is run"),
        (["check", "--dtype", "float16"], "--dtype needs a target: without one, the gallery is run"),
        (["check", "--max-position", "9"], "--max-position needs a target"),
        (
            ["check", "--exec", "./no-such-program {x} {positions} {y}", *ROPE],
            "there is no program './no-such-program'",
        ),
        (["check", "--exec", "true {x} {positions} {y}", "--axes", "bnhd", *ROPE], "are for functions"),
        (["check", "no_such_module:f", *ROPE], "no_such_module"),
        (["check", "json:nothing", *ROPE], "nothing"),
        (["check", "json", *ROPE], "module:function"),
        (["check", "json:dumps", *ROPE, "--timeout", "0"], "--timeout must be"),
        (["check", "json:dumps", "--exec", "x", *ROPE], "or --exec, not both"),
        (["check", "--exec", "./x {x}", *ROPE], "{positions}"),
        (["check", "json:dumps", "--head-dim", "32"], "give --config, or --base, --layout"),
        (["check", "--attention", "softmax"], "--attention needs a target: without one, the gallery is run"),
        (["check", "json:dumps", *ROPE, "--heads", "8"], "--heads is not for a rotation"),
        (["check", "json:dumps", *ROPE, "--not-causal"], "--not-causal is not for a rotation"),
        (["check", "json:dumps", "--attention", "linear"], "give --config, or --head-dim, --base, --layout"),
        (["check", "json:dumps", "--attention", "softmax", "--base", "5"], "give --config, or --head-dim, --layout"),
        (["check", "json:dumps", "--attention", "linear", "--window", "5"], "--window is not for linear"),
        (["check", "json:dumps", "--attention", "softmax", "--feature-map", "exp"], "--feature-map is not for softmax"),
        (["check", "json:dumps", "--attention", "softmax", "--axes", "bnhd"], "--axes is for rotations: leave it out"),
        (["check", "json:dumps", "--attention", "softmax", "--strict"], "--strict is for rotations"),
        (["check", "json:dumps", "--attention", "softmax", "--heads", "0"], "heads must be at least 1, was 0"),
        (["check", "json:dumps", "--attention", "softmax", "--max-position", "9"], "max_position must be at least 512"),
        (["check", "--attention", "softmax", "--exec", "true {x} {y}"], "must say where {q} goes, as in"),
        (
            ["check", "--attention", "softmax", "--exec", "true {q} {k} {v} {positions} {o}"],
            "must not have {positions}",
        ),
        (
            ["check", "--attention", "linear", "--exec", "true {q} {k} {v} {o}", *ROPE],
            "must say where {positions} goes",
        ),
        (["check", "--exec", "true {q} {k} {v} {o}", *ROPE], "must say where {x} goes"),
        (
            ["check", "--attention", "softmax", "--backward", "--exec", "true {q} {k} {v} {g} {o}"],
            'must say where {dq} goes, as in "./mine {q} {k} {v} {g} {dq} {dk} {dv}"',
        ),
        (["check", "json:dumps", *ROPE, "--grade", "perfect"], "grade must be one of"),
        (["identify", "--head-dim", "32"], "give a target such as module:function, or --exec"),
        (["vectors", "--verify", "only-one"], "--verify needs two paths"),
        (["vectors", "one", "two"], "need --verify"),
        (["diff", "no-such-file", "other"], "no-such-file"),
        (["trace", "x", "--tokens", "1,b", "-o", "t"], "--tokens must be integers with commas between them, was '1,b'"),
    ],
)
def test_the_oracle_says_what_is_misused(capfd, arguments, message):
    assert main(arguments) == 2
    output = capfd.readouterr().err
    assert output.startswith("pyrope: error: ") and message in output


@pytest.mark.parametrize(
    "arguments", [["table", "--config"], ["generate", "hi", "--model"], ["trace", "--tokens", "1", "-o", "t", ""]]
)
def test_a_hub_id_is_not_a_path(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    assert main([word for word in [*arguments, "some-lab/Model-1.5-8B"] if word]) == 2
    error = capsys.readouterr().err
    assert "some-lab/Model-1.5-8B does not exist: if this is the id of a model on the Hugging Face Hub" in error
    assert main([word for word in [*arguments, "gpt2"] if word]) == 2
    assert "gpt2" in (error := capsys.readouterr().err) and ("the Hugging Face Hub" in error or "smollm2" in error)
    (tmp_path / "some-lab").mkdir()
    assert main([word for word in [*arguments, "some-lab/Model-1.5-8B"] if word]) == 2
    assert "Hub" not in capsys.readouterr().err


def test_layers_without_rope_are_noted(capfd, tmp_path):
    config = {"model_type": "smollm3", "head_dim": 8, "num_hidden_layers": 40}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["table", "--config", str(tmp_path)]) == 0
    noted = "pyrope: layers 3, 7, 11, 15, 19, 23, 27, 31, … of this config are not rotated: the rope is of others\n"
    assert capfd.readouterr().err == noted
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 32}))
    assert main(["table", "--config", str(tmp_path)]) == 0
    assert capfd.readouterr().err == noted.replace(", …", ""), "eight layers, and none more"


def test_a_length_without_effect_is_noted(capfd, candidates):
    assert main([*PLAIN, "--length", "4096"]) == 0
    assert capfd.readouterr().err == "pyrope: --length has no effect: these frequencies do not depend on the length\n"
    assert main(["check", f"{candidates}:late", *ROPE, "--length", "4096"]) == 1
    assert capfd.readouterr().err.count("--length has no effect") == 1
    assert main([*PLAIN, "--length", "4096", "--scaling", "DynamicNTK(factor=2.0, original_length=64)"]) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["chekc"], "did you mean check?"),
        (["check", "--haed-dim", "3"], "did you mean --head-dim?"),
        (["generate", "--modle", "x", "y"], "did you mean --model?"),
        (["vectors", "x", "--suite", "rotatoin"], "did you mean rotation?"),
        ([*PLAIN[:-1], "neox"], "did you mean half?"),
        ([*PLAIN[:-1], "GPT-J"], "did you mean interleaved?"),
        ([*PLAIN[:-1], "llama"], "(llama is half in checkpoints of Hugging Face's form, interleaved in Meta's own)"),
        (["check", "x:f", "--dtype", "fp16"], "did you mean float16?"),
        (["check", "x:f", "--dtype", "bf16"], "did you mean bfloat16?"),
        (["identify", "x:f", "--head-dim", "8", "--dtype", "half"], "did you mean float16?"),
        (["check", "x:f", "--attention", "sofmax"], "did you mean softmax?"),
    ],
)
def test_a_typo_gets_a_suggestion(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "identify", "table", "vectors", "trace", "diff", "generate", "plot"])
def test_every_command_has_examples(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    output = capsys.readouterr().out
    assert stopped.value.code == 0 and f"pyrope {command}" in output.partition("examples:")[2]
    assert max(map(len, output.splitlines())) <= 80


# --- plot ---


@pytest.mark.needs("matplotlib")
@pytest.mark.parametrize("suffix, magic", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("SVG", b"<?xml")])
def test_plot_writes_a_picture(capsys, tmp_path, suffix, magic):
    file = tmp_path / f"decay.{suffix}"
    assert main(["plot", "decay", "-o", str(file)]) == 0
    assert file.read_bytes().startswith(magic) and capsys.readouterr().out == f"decay drawn in {file}\n"


@pytest.mark.needs("matplotlib")
def test_plot_is_of_the_rope_that_is_given(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setitem(plots.PLOTS, "decay", lambda rope=None: drawn.update(rope=rope) or plots.rotation_figure())
    assert main(["plot", "decay", "-o", str(tmp_path / "x.png"), *ROPE, "--scaling", "Linear(factor=4.0)"]) == 0
    assert drawn["rope"] == pyrope.Rope(32, 10000.0, "half", scaling=pyrope.Linear(4.0))
    assert main(["plot", "decay", "-o", str(tmp_path / "x.png")]) == 0 and drawn["rope"] is None


@pytest.mark.needs("matplotlib")
def test_check_draws_the_operator_where_the_fault_shows(capsys, candidates, tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setitem(plots.PLOTS, "operator", lambda **options: drawn.update(options) or plots.rotation_figure())
    file = tmp_path / "r.svg"
    few = ["--max-position", "64", "--dtype", "float64", "--in-process"]
    assert main(["check", f"{candidates}:late", *ROPE, *few, "--plot", str(file)]) == 1
    output, errors = capsys.readouterr()
    assert "positions one too high" in output and errors.endswith(f"R({drawn['position']}) drawn in {file}\n")
    assert file.read_bytes().startswith(b"<?xml") and drawn["rope"] == pyrope.Rope(32, 10000.0, "half")
    x = np.eye(32)[:, None]
    assert drawn["dtype"] == np.float64
    np.testing.assert_array_equal(drawn["candidate"](x, np.array([2])), pyrope.rotate(x, [3], drawn["rope"]))
    assert main(["check", f"{candidates}:right", *ROPE, *few, "--plot", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "right" and drawn["position"] == 1


@pytest.mark.needs("matplotlib")
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["plot", "decay", "-o", "x.pdf"], "a picture must be a .png or .svg file, was 'x.pdf'"),
        (["plot", "decay", "-o", "x"], "a picture must be a .png or .svg file"),
        (["plot", "decay", "-o", "no/such/x.png"], "there is no directory"),
        (["plot", "time", "-o", "x.png", "--base", "5"], "the picture time shows no rope: leave out --base"),
        (["plot", "decay", "-o", "x.png", "--base", "5"], "give --config, or --head-dim, --layout"),
        (["check", "--plot", "x.png"], "--plot needs a target"),
        (["check", "math:hypot", *ROPE, "--plot", "x.jpg"], "a picture must be a .png or .svg file"),
    ],
)
def test_plot_says_what_is_misused(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    caught = capsys.readouterr()
    assert caught.err.startswith("pyrope: error: ") and message in caught.err and not caught.out
    assert not list(tmp_path.iterdir())


@pytest.mark.needs("matplotlib")
def test_a_candidate_that_fails_is_reported_and_not_drawn(capfd, tmp_path):
    assert main(["check", "math:hypot", *ROPE, "--plot", str(tmp_path / "x.png")]) == 3
    caught = capfd.readouterr()
    assert caught.out.startswith("rotation: NOT JUDGED") and "no picture: the candidate could not be" in caught.err
    assert not list(tmp_path.iterdir())


def test_plot_knows_its_pictures(capsys):
    with pytest.raises(SystemExit):
        main(["plot", "dekay", "-o", "x.png"])
    assert "did you mean decay?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plot", "--help"])
    output = capsys.readouterr().out
    assert all(f"\n  {name:<13}" in output for name in plots.PLOTS) and max(map(len, output.splitlines())) <= 80


def test_without_matplotlib_plot_says_what_to_install(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plot", "decay", "-o", str(tmp_path / "x.png")]) == 2
    assert 'pip install ".[plot]"' in capsys.readouterr().err
