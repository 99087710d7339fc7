"""What each option of the command line means, by what is handed on: nothing is checked, loaded or drawn here."""

import io
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from pyrope import DynamicNTK, Linear, Rope, YaRN, cli
from pyrope.cli import main
from pyrope.oracle.isolation import Finished
from pyrope.oracle.report import ErrorRow, Failure, Finding, Report

ROPE = ["--head-dim", "32", "--base", "10000", "--layout", "half"]
HALF = Rope(32, 10000.0, "half")
RIGHT = Report("rotation", "a rope", "right", (), "rounded once")
WRONG = Report("rotation", "a rope", "wrong", (Finding("wrong base", "base 5", "a cause", "a fix", 7),))


def parsed(*words):
    return cli._parser().parse_args(list(words))


@pytest.fixture
def handed(monkeypatch):
    """What the checks are called with; they say that all is right."""
    calls, answers = [], {"check": RIGHT}

    def noted(name):
        def check(fn, *arguments, **options):
            print("what a candidate prints")
            calls.append((name, fn, arguments, options))
            return answers["check"]

        return check

    monkeypatch.setattr(cli.checking, "check_rotation", noted("rotation"))
    # The signatures say which options are known.
    for module, name in ((cli.attention_checks, "check_attention"), (cli.linear_checks, "check_linear_attention")):
        stub = noted(name)
        stub.__signature__ = cli.inspect.signature(getattr(module, name))
        monkeypatch.setattr(module, name, stub)
    monkeypatch.setattr(cli.adapters, "load_target", lambda target: f"loaded {target}")
    return calls, answers


# --- check ---


def test_a_rotation_is_checked_as_the_options_say(handed, capsys):
    calls, _ = handed
    assert main(["check", "--in-process", "m:f", *ROPE]) == 0
    output = capsys.readouterr()
    assert "rotation: RIGHT" in output.out and "what a candidate prints" not in output.out
    assert "what a candidate prints" in output.err
    ((name, fn, (rope,), options),) = calls
    assert (name, fn, rope) == ("rotation", "loaded m:f", HALF)
    assert options == {
        "dtype": np.float32, "max_position": None, "grade": None, "min_position": 0, "equivalent": "right", "batched": False,
    }  # fmt: skip
    more = [
        "--dtype",
        "float64",
        "--max-position",
        "9",
        "--min-position",
        "-3",
        "--batched",
        "--strict",
        "--grade",
        "rounded once",
    ]
    assert (
        main(["check", "--in-process", "m:f", *ROPE, "--rotary-dim", "16", "--scaling", "Linear(factor=4.0)", *more])
        == 0
    )
    *_, (rope,), options = calls[-1]
    assert rope == Rope(32, 10000.0, "half", 16, scaling=Linear(4.0))
    assert options == {
        "dtype": np.float64, "max_position": 9, "grade": "rounded once", "min_position": -3, "equivalent": "wrong", "batched": True,
    }  # fmt: skip


def test_exit_codes(handed, capsys):
    _, answers = handed
    failed = Report("rotation", "a rope", "not judged", failure=Failure("it raises", "", "mend it"))
    for report, code in ((RIGHT, 0), (Report("rotation", "", "equivalent"), 0), (WRONG, 1), (failed, 3)):
        answers["check"] = report
        assert main(["check", "--in-process", "m:f", *ROPE]) == code
    assert [cli._exit_code(some) for some in ([RIGHT, WRONG, failed], [RIGHT, failed], [RIGHT, RIGHT], [])] == [
        1,
        3,
        0,
        0,
    ]
    capsys.readouterr()
    assert main(["check", "--in-process", "m:f", *ROPE, "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["verdict"] == "not judged"


@pytest.mark.parametrize(
    "words, name, expected",
    [
        ([], "check_attention", {}),
        (["--heads", "8", "--key-heads", "2", "--not-causal", "--window", "5", "--softcap", "3", "--scale", "0.5", "--cache", "--head-dim", "16"],
         "check_attention", {"heads": 8, "key_heads": 2, "causal": False, "window": 5, "softcap": 3.0, "scale": 0.5, "cache": True, "head_dim": 16}),
        (["--no-cache", "--max-position", "600", "--grade", "rounded once"], "check_attention", {"cache": False, "max_position": 600, "grade": "rounded once"}),
        (ROPE, "check_attention", {"rope": HALF, "head_dim": 32}),
        ([*ROPE, "--feature-map", "exp", "--not-causal"], "check_linear_attention", {"rope": HALF, "head_dim": 32, "feature_map": "exp", "causal": False}),
    ],
)  # fmt: skip
def test_attention_is_checked_as_the_options_say(handed, capsys, words, name, expected):
    kind = "linear" if "linear" in name else "softmax"
    assert main(["check", "--in-process", "m:f", "--attention", kind, "--dtype", "float16", *words]) == 0
    ((got, fn, arguments, options),) = handed[0]
    assert (got, fn, arguments) == (name, "loaded m:f", ())
    assert options == {"rope": None, "dtype": np.float16, **expected}


@pytest.mark.parametrize(
    "words, message",
    [
        (["--call", "offset"], "--call offset is for attention with RoPE inside: give the rope, or leave it out"),
        (["--axes", "bnhd"], "--axes is for rotations"),
        (["--strict"], "--strict is for rotations"),
        (["--batched"], "--batched is for rotations"),
        (["--min-position", "-5"], "--min-position is for rotations"),
        (["--feature-map", "exp"], "--feature-map is not for softmax attention: leave it out"),
    ],
)
def test_options_of_a_rotation_are_refused_for_attention(handed, capsys, words, message):
    assert main(["check", "--in-process", "m:f", "--attention", "softmax", *words]) == 2
    assert message in capsys.readouterr().err and not handed[0]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--window", "5"], "--window needs --attention softmax or --attention linear"),
        (["--not-causal"], "--not-causal needs --attention"),
        (["--no-cache"], "--cache needs --attention"),
    ],
)
def test_options_of_attention_are_refused_for_a_rotation(handed, capsys, words, message):
    assert main(["check", "--in-process", "m:f", *ROPE, *words]) == 2
    assert message in capsys.readouterr().err and not handed[0]
    assert main(["check", "--in-process", "m:f", "--attention", "linear", "--window", "5", *ROPE]) == 2
    assert "--window is not for linear attention: leave it out" in capsys.readouterr().err


def test_a_backward_pass_is_asked_for(handed, capsys, monkeypatch):
    calls, _ = handed
    drawn = []
    monkeypatch.setattr(cli.adapters, "from_torch", lambda fn, **options: (fn, options))
    monkeypatch.setattr(cli.plots, "check_file", lambda path: None)
    monkeypatch.setattr(cli.plots, "draw", lambda *given, **options: drawn.append(options["rope"]))
    assert main(["check", "--in-process", "m:f", *ROPE, "--backward", "--plot", "r.svg"]) == 0
    assert calls[-1][3]["backward"] is True and drawn == [HALF.transposed]
    assert main(["check", "--in-process", "m:f", "--attention", "softmax", "--backward"]) == 0
    assert calls[-1][0] == "check_attention" and calls[-1][3]["backward"] is True
    torch = ["--framework", "torch", "--autograd"]
    assert main(["check", "--in-process", "m:f", *ROPE, *torch]) == 0
    assert calls[-1][1] == ("loaded m:f", {"backward": "x"}) and calls[-1][3]["backward"] is True
    assert main(["check", "--in-process", "m:f", "--attention", "linear", *ROPE, *torch]) == 0
    assert calls[-1][1] == ("loaded m:f", {"backward": "qkv"}) and calls[-1][3]["backward"] is True
    for words, message in (
        (["m:f", *ROPE, "--autograd"], "--autograd needs --framework torch, jax, mlx or paddle"),
        (["--exec", "run", *ROPE, *torch], "--autograd needs --framework torch, jax, mlx or paddle"),
        (["--exec", "run", "--attention", "softmax", *torch], "--autograd needs --framework torch, jax, mlx or paddle"),
    ):
        assert main(["check", "--in-process", *words]) == 2 and message in capsys.readouterr().err
    monkeypatch.setattr(cli.isolation, "run_apart", lambda *arguments: Failure("it crashed", "", "look"))
    assert main(["check", "m:f", *ROPE, "--backward"]) == 3
    assert capsys.readouterr().out.startswith("rotation, backward: NOT JUDGED")


def test_linear_attention_needs_a_rope(handed, capsys):
    assert main(["check", "--in-process", "m:f", "--attention", "linear"]) == 2
    assert "give --config, or --head-dim, --base, --layout" in capsys.readouterr().err


def test_what_needs_a_target(capsys):
    assert main(["check", "--head-dim", "32"]) == 2
    assert "--head-dim needs a target: without one, the gallery is run" in capsys.readouterr().err
    assert main(["check", "--not-causal"]) == 2
    assert "--not-causal needs a target" in capsys.readouterr().err
    assert main(["identify", "--head-dim", "32"]) == 2
    assert "give a target such as module:function, or --exec" in capsys.readouterr().err


# --- Candidates ---


def test_a_program_is_called_as_the_options_say(monkeypatch):
    made = []
    monkeypatch.setattr(cli.adapters, "from_command", lambda *a, **k: made.append(("rotation", a, k)))
    monkeypatch.setattr(cli.adapters, "from_attention_command", lambda *a, **k: made.append(("attention", a, k)))
    for words, expected in (
        (["check", *ROPE], ("rotation", {"timeout": 60.0})),
        (["check", *ROPE, "--timeout", "5"], ("rotation", {"timeout": 5.0})),
        (["check", "--attention", "softmax"], ("attention", {"positions": False, "timeout": 60.0})),
        (["check", "--attention", "softmax", "--head-dim", "8"], ("attention", {"positions": False, "timeout": 60.0})),
        (["check", "--attention", "softmax", *ROPE], ("attention", {"positions": True, "timeout": 60.0})),
        (["check", "--attention", "linear"], ("attention", {"positions": True, "timeout": 60.0})),
        (
            ["check", "--attention", "linear", "--backward"],
            ("attention", {"positions": True, "timeout": 60.0, "backward": True}),
        ),
        (["identify", "--head-dim", "8"], ("rotation", {"timeout": 60.0})),
    ):
        cli._candidate(parsed(*words, "--exec", "run it"))
        assert made.pop() == (expected[0], ("run it",), expected[1])


def test_a_function_is_adapted_from_the_inside_out(monkeypatch):
    monkeypatch.setattr(cli.adapters, "load_target", lambda target: target)
    monkeypatch.setattr(cli.adapters, "from_torch", lambda fn: f"torch({fn})")
    monkeypatch.setattr(cli.adapters, "with_axes", lambda fn, axes: f"{axes}({fn})")
    monkeypatch.setattr(cli.adapters, "from_offset", lambda fn: f"offset({fn})")
    monkeypatch.setattr(cli.adapters, "from_sequential", lambda fn: f"sequential({fn})")
    for words, made in (
        ([], "m:f"), (["--framework", "torch"], "torch(m:f)"), (["--axes", "bnhd"], "bnhd(m:f)"), (["--call", "offset"], "offset(m:f)"),
        (["--call", "sequential", "--axes", "bnhd", "--framework", "torch"], "sequential(bnhd(torch(m:f)))"),
    ):  # fmt: skip
        assert cli._candidate(parsed("check", "m:f", *words)) == made


@pytest.mark.parametrize(
    "words, message",
    [
        (["m:f", "--exec", "run"], "give a target or --exec, not both"),
        (["--exec", "run", "--framework", "torch"], "--framework, --call and --axes are for functions"),
        (["--exec", "run", "--call", "offset"], "--framework, --call and --axes are for functions"),
        (["--exec", "run", "--axes", "bnhd"], "--framework, --call and --axes are for functions"),
        (["m:f", "--timeout", "0"], "--timeout must be finite and greater than 0, was 0.0"),
        (["m:f", "--config", "nowhere.json", "--base", "5"], "--config says everything already: leave out --base"),
    ],
)
def test_what_does_not_go_together(capsys, words, message):
    rope = [] if "--config" in words else ROPE
    assert main(["check", *words, *rope]) == 2
    assert message in capsys.readouterr().err


def test_functions_are_judged_in_another_process(monkeypatch, capsys):
    asked = []

    def apart(*arguments):
        asked.append(arguments)
        return Finished("rotation: WRONG\n", 1)

    monkeypatch.setattr(cli.isolation, "run_apart", apart)
    assert main(["check", "m:f", *ROPE, "--timeout", "7"]) == 1
    assert asked == [("pyrope.cli:main", ["check", "--in-process", "m:f", *ROPE, "--timeout", "7"], 7.0)]
    assert capsys.readouterr().out == "rotation: WRONG\n"


@pytest.mark.parametrize("words, subject", [([], "rotation"), (["--attention", "softmax"], "attention"), (["--attention", "linear"], "linear attention")])  # fmt: skip
def test_a_crash_in_the_other_process_is_not_judged(monkeypatch, capsys, words, subject):
    monkeypatch.setattr(cli.isolation, "run_apart", lambda *arguments: Failure("it crashed", "", "look"))
    assert main(["check", "m:f", *ROPE, *words, "--json"]) == 3
    said = json.loads(capsys.readouterr().out)
    assert (said["subject"], said["verdict"]) == (subject, "not judged")
    assert said["expected"] == (repr(HALF) if not words else f"{words[1]} attention with {HALF!r} inside")
    if words[1:] == ["softmax"]:
        assert main(["check", "m:f", *words, "--json"]) == 3
        assert json.loads(capsys.readouterr().out)["expected"] == "softmax attention"


def test_a_target_that_cannot_be_imported_is_not_judged(monkeypatch, capsys):
    def broken(target):
        raise ImportError("no module named m")

    monkeypatch.setattr(cli.adapters, "load_target", broken)
    assert main(["check", "--in-process", "m:f", *ROPE, "--json"]) == 3
    said = json.loads(capsys.readouterr().out)
    assert said["verdict"] == "not judged" and "no module named m" in json.dumps(said)


def test_listeners_are_taken_off_again(monkeypatch, handed):
    monkeypatch.setattr(cli.adapters, "from_command", lambda *a, **k: "program")
    before = list(cli.ask.listeners)
    assert main(["check", "--exec", "run", *ROPE]) == 0 and cli.ask.listeners == before
    monkeypatch.setattr(cli.checking, "check_rotation", lambda *a, **k: 1 / 0)
    assert main(["check", "--exec", "run", *ROPE]) == 2 and cli.ask.listeners == before


def test_the_operator_is_drawn_where_a_fault_shows_first(handed, monkeypatch, capsys, tmp_path):
    drawn, (_, answers) = [], handed
    monkeypatch.setattr(cli.plots, "check_file", lambda path: None)
    monkeypatch.setattr(cli.plots, "draw", lambda name, path, **options: drawn.append((name, path, options)))
    both = (Finding("a", "", "", "", 40), Finding("b", "", "", "", 12), Finding("c", "", "", ""))
    for report, at in ((RIGHT, 1), (WRONG, 7), (Report("rotation", "", "wrong", both), 12)):
        answers["check"] = report
        main(["check", "--in-process", "m:f", *ROPE, "--plot", "r.svg"])
        assert drawn.pop() == (
            "operator",
            "r.svg",
            {"position": at, "candidate": "loaded m:f", "rope": HALF, "dtype": np.float32},
        )
        assert f"R({at}) drawn in r.svg" in capsys.readouterr().err
    answers["check"] = Report("rotation", "", "not judged", failure=Failure("it raises", "", "mend it"))
    assert main(["check", "--in-process", "m:f", *ROPE, "--plot", "r.svg"]) == 3 and not drawn
    assert "no picture: the candidate could not be judged" in capsys.readouterr().err


# --- The gallery ---


def exhibit(name, verdict, errors=(), as_expected=True):
    findings = WRONG.findings if verdict == "wrong" else ()
    report = Report(
        "rotation", "a rope", verdict, findings, errors=tuple(ErrorRow("position 0", 1.0, 1.0, x) for x in errors)
    )
    return SimpleNamespace(name=name, report=report, as_expected=as_expected, identified=HALF, remark="half 10000")


def test_a_line_of_the_gallery():
    assert (
        cli._gallery_line(exhibit("mine", "right", (1e-7, 0.02))) == f"{'mine':<28}{'right':<11}{'0.02':<7}half 10000"
    )
    assert cli._gallery_line(exhibit("mine", "wrong"))[39:46] == "0      "
    assert len(cli._gallery_line(exhibit("n" * 90, "wrong"))) == 80


@pytest.mark.parametrize("expected, code", [(True, 0), (False, 1)])
def test_the_gallery_ends_with_how_many_are_as_they_should_be(monkeypatch, capsys, expected, code):
    rows = [exhibit("one", "right"), exhibit("two", "wrong", as_expected=expected)]
    monkeypatch.setattr(cli.gallery, "run_gallery", lambda: iter(rows))
    assert main(["check"]) == code
    assert f"2 implementations, {1 + expected} judged as they should be" in capsys.readouterr().out
    assert main(["check", "--json"]) == code
    said = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in said] == ["one", "two"] and [row["as_expected"] for row in said] == [True, expected]
    assert said[0]["identified"] == repr(HALF) and said[1]["verdict"] == "wrong"


# --- Ropes ---


def test_ropes_by_options(tmp_path, capsys):
    assert cli._rope(parsed("table", *ROPE)) == HALF
    call = "YaRN(factor=4.0, original_length=64, truncate=False)"
    assert cli._rope(parsed("table", *ROPE, "--scaling", call)) == Rope(
        32, 10000.0, "half", scaling=YaRN(4.0, 64, truncate=False)
    )
    grows = "DynamicNTK(factor=2.0, original_length=64)"
    assert cli._rope(parsed("table", *ROPE, "--scaling", grows, "--length", "128")).scaling == DynamicNTK(2.0, 64, 128)
    with pytest.raises(ValueError, match="depend on the length: give --length"):
        cli._rope(parsed("table", *ROPE, "--scaling", grows))
    assert not capsys.readouterr().err
    assert cli._rope(parsed("table", *ROPE, "--length", "128")) == HALF
    assert "--length has no effect" in capsys.readouterr().err
    assert cli._rope(parsed("check", "--in-process", *ROPE, "--length", "128")) == HALF and not capsys.readouterr().err
    config = {"model_type": "llama", "head_dim": 32, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli._rope(parsed("table", "--config", str(tmp_path))) == HALF
    other = cli._rope(parsed("table", "--config", str(tmp_path), "--layout", "interleaved"))
    assert other == Rope(32, 10000.0, "interleaved")


def test_a_rope_is_there_if_more_than_the_size_of_a_head_is_given():
    assert not cli._has_rope(parsed("check", "--head-dim", "8")) and not cli._has_rope(parsed("check"))
    for words in (
        ["--base", "5"],
        ["--layout", "half"],
        ["--config", "c"],
        ["--scaling", "s"],
        ["--rotary-dim", "4"],
        ["--length", "4"],
        ["--layer-type", "x"],
    ):
        assert cli._has_rope(parsed("check", *words))


# --- The other commands ---


def test_identify_hands_on_its_options(monkeypatch, capsys):
    calls = []

    class Identified:
        def to_dict(self):
            return {"base": 5}

        def __str__(self):
            return "a rotation"

    def identify(fn, head_dim, **options):
        calls.append((fn, head_dim, options))
        return Identified()

    monkeypatch.setattr(cli.identification, "identify", identify)
    monkeypatch.setattr(cli.adapters, "load_target", lambda target: target)
    words = ["identify", "--in-process", "m:f", "--head-dim", "8"]
    assert main([*words, "--dtype", "float64", "--max-position", "50"]) == 0
    assert calls == [("m:f", 8, {"dtype": np.float64, "max_position": 50, "axes": None})]
    assert capsys.readouterr().out == "a rotation\n"
    assert main([*words, "--json"]) == 0 and json.loads(capsys.readouterr().out) == {"base": 5}
    assert calls[-1][2] == {"dtype": np.float32, "max_position": None, "axes": None}
    assert main([*words, "--position-axes", "3"]) == 0 and calls[-1][2]["axes"] == 3
    assert main([*words, "--position-axes", "3", "--call", "offset"]) == 2 and len(calls) == 3
    assert "--call offset is for one axis: leave out --position-axes" in capsys.readouterr().err
    assert main([*words, "--position-axes", "0"]) == 2 and len(calls) == 3
    assert "--position-axes must be at least 1, was 0" in capsys.readouterr().err


def test_plot_hands_on_its_options(monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr(cli.plots, "check_file", lambda path: drawn.append(path))
    monkeypatch.setattr(cli.plots, "draw", lambda *arguments, **options: drawn.append((arguments, options)))
    assert main(["plot", "wavelengths", "-o", "a.png", *ROPE]) == 0
    assert drawn == ["a.png", (("wavelengths", "a.png"), {"rope": HALF})]
    assert capsys.readouterr().out == "wavelengths drawn in a.png\n"
    assert main(["plot", "decay", "--output", "a.png"]) == 0 and drawn[-1] == (("decay", "a.png"), {})
    rest = len(drawn)
    assert main(["plot", "sharding", "-o", "a.png", "--base", "5"]) == 2 and len(drawn) == rest + 1
    assert "the picture sharding shows no rope: leave out --base" in capsys.readouterr().err


def test_vectors_hands_on_its_options(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(cli.vectors, "write_vectors", lambda *a, **k: calls.append((*a, k)) or {"cases": [1, 2, 3]})
    monkeypatch.setattr(cli.vectors, "verify_vectors", lambda *a, **k: calls.append((*a, k)) or [RIGHT, WRONG])
    assert main(["vectors", "there"]) == 0 and calls.pop() == ("there", "all", {"own": None, "dtype": None})
    assert capsys.readouterr().out == "3 cases written to there\n"
    assert main(["vectors", "there", "--suite", "linear"]) == 0 and calls.pop()[:2] == ("there", "linear")
    capsys.readouterr()
    assert main(["vectors", "--verify", "there", "mine", "--only", "rotation-*"]) == 1
    assert calls.pop() == ("there", "mine", {"only": "rotation-*"}) and "WRONG" in capsys.readouterr().out
    assert main(["vectors", "--verify", "there", "mine", "--json"]) == 1
    assert [x["verdict"] for x in json.loads(capsys.readouterr().out)] == ["right", "wrong"] and calls.pop()[-1] == {
        "only": "*"
    }
    for words, message in (
        (["there", "mine"], "a second path needs --verify"),
        (["there", "--html", "x.html"], "--html needs --verify"),
        (["--verify", "there"], "--verify needs two paths"),
    ):
        assert main(["vectors", *words]) == 2 and message in capsys.readouterr().err
    assert not calls


def test_vectors_of_ones_own(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(cli.vectors, "write_vectors", lambda *a, **k: calls.append(k) or {"cases": []})
    assert (
        main(
            [
                "vectors",
                "there",
                *ROPE,
                "--heads",
                "8",
                "--key-heads",
                "2",
                "--max-position",
                "99",
                "--dtype",
                "float16",
            ]
        )
        == 0
    )
    assert calls == [{"own": cli.Own(HALF, 8, 2, 99), "dtype": "float16"}]
    assert main(["vectors", "there", *ROPE]) == 0 and calls[-1] == {"own": cli.Own(HALF), "dtype": None}
    assert main(["vectors", "there", *ROPE, "--max-position", "63"]) == 0 and calls[-1]["own"].last == 63
    assert main(["vectors", "there", *ROPE, "--max-position", "62"]) == 2
    assert "--max-position must be at least 63, was 62" in capsys.readouterr().err
    assert main(["vectors", "there", "--key-heads", "2"]) == 2
    assert "--key-heads is for vectors of your own rope: give --config, or its numbers" in capsys.readouterr().err
    for words in (["--base", "5"], ["--heads", "8"], ["--dtype", "float16"], ["--max-position", "99"]):
        assert main(["vectors", "--verify", "there", "mine", *words]) == 2
        assert f"{words[0]} is for writing vectors: --verify reads all that" in capsys.readouterr().err
    assert len(calls) == 3


def test_vectors_of_a_config_end_where_its_positions_end(monkeypatch, capsys, tmp_path):
    """2^31, where its tables do not reach, would only be refused, or wrong."""
    calls, file = [], tmp_path / "config.json"
    monkeypatch.setattr(cli.vectors, "write_vectors", lambda *a, **k: calls.append(k["own"].last) or {"cases": []})
    config = {"model_type": "llama", "head_dim": 32}
    for length, words, last in (
        (8192, [], 8191), (8192, ["--max-position", "99"], 99), (8, [], 63), (2**40, [], 2**31), (None, [], 2**31),
    ):  # fmt: skip
        file.write_text(json.dumps(config | {"max_position_embeddings": length}))
        assert main(["vectors", "there", "--config", str(file), *words]) == 0 and calls.pop() == last
        said = "" if words else ": see --max-position"
        assert capsys.readouterr().out == f"0 cases written to there\npositions end at {last}{said}\n"
    grown = {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    file.write_text(json.dumps(config | grown))
    assert main(["vectors", "there", "--config", str(file), "--length", "500"]) == 0 and calls.pop() == 499


def test_reports_with_one_finding_are_said_once():
    def report(name, verdict="wrong", **more):
        return Report(name, "", verdict, (Finding("wrong base", "x", "y", "z"),) if verdict == "wrong" else (), **more)

    missing = [report(f"m{i}", "not judged", failure=Failure(f"there is no output 'm{i}'", "", "")) for i in range(2)]
    broken = [report(f"b{i}", "not judged", failure=Failure("of another shape", "", "")) for i in range(2)]
    first, second, last = cli._grouped([report(f"r{i}") for i in range(11)] + missing + broken + [RIGHT])
    assert first.startswith("r0: WRONG") and first.endswith("wrong likewise, 10: r1, r2, r3, r4, r5, r6, r7, r8, …")
    assert second.startswith("b0: NOT JUDGED") and second.endswith("not judged likewise, 1: b1")
    assert last == "missing outputs, 2: m0.npy, …; see --only"
    assert list(cli._grouped(missing[:1])) == ["missing outputs, 1: m0.npy; see --only"]
    nine = list(cli._grouped([report(f"r{i}") for i in range(9)]))
    assert nine[0].endswith("8: r1, r2, r3, r4, r5, r6, r7, r8") and list(cli._grouped([RIGHT])) == []
    assert "likewise" not in next(cli._grouped([WRONG]))


@pytest.fixture
def model(monkeypatch, tmp_path):
    """A model that says a, b, c, and what it was asked."""
    calls = {}
    (tmp_path / "smollm2.gguf").touch()

    class Tokenizer:
        stop, special = (9,), frozenset({"<|im_start|>", "<|im_end|>"})

        def encode(self, text, begin=True):
            calls["encode"] = (text, begin)
            return [1, 2, 3] if text.strip() else []

        def stream(self, tokens):
            return (chr(97 + token) for token in tokens)

    def generate(model, ids, count, **options):
        calls["generate"] = (model, ids, count, options)
        return iter(range(3))

    monkeypatch.setattr(cli, "find_smollm2", lambda: str(tmp_path / "smollm2.gguf"))
    monkeypatch.setattr(cli, "load_tokenizer", lambda path: calls.update(tokenizer=path) or Tokenizer())
    monkeypatch.setattr(cli, "load", lambda *a, **k: calls.update(load=(a, k)) or "a model")
    monkeypatch.setattr(cli, "generate", generate)
    return calls


def test_generate_hands_on_its_options(model, capsys, tmp_path):
    words = ["generate", "--model", str(tmp_path)]
    assert main([*words, "hello"]) == 0
    output = capsys.readouterr()
    assert output.out == "abc\n" and "3 tokens read in" in output.err and "3 written" in output.err
    assert (
        model["load"] == ((str(tmp_path), "numpy", "float32"), {"ignore": model["load"][1]["ignore"]})
        and not model["load"][1]["ignore"]
    )
    assert model["encode"] == ("hello", True)  # as it is
    *_, count, options = model["generate"]
    assert options == {"stop": (9,), "temperature": 0.0, "top_k": None, "top_p": None, "seed": None} and count >= 1
    more = [
        "--max-new-tokens",
        "7",
        "--temperature",
        "0.5",
        "--top-k",
        "4",
        "--top-p",
        "0.9",
        "--seed",
        "3",
        "--dtype",
        "float64",
        "--ignore",
        "x",
    ]
    assert main([*words, *more, "hello"]) == 0
    assert model["generate"] == (
        "a model",
        [1, 2, 3],
        7,
        {"stop": (9,), "temperature": 0.5, "top_k": 4, "top_p": 0.9, "seed": 3},
    )
    assert model["load"][0][2] == "float64" and list(model["load"][1]["ignore"]) == ["x"]


def test_a_question_in_chatml_is_the_default_of_smollm2_alone(model, capsys, tmp_path):
    assert main(["generate", "--model", "smollm2", "why?"]) == 0
    text, begin = model["encode"]
    assert "<|im_start|>" in text and "why?" in text and cli.SMOLLM2_SYSTEM in text and begin is False
    assert model["tokenizer"] == str(tmp_path / "smollm2.gguf") == model["load"][0][0]
    assert main(["generate", "--model", "smollm2", "--plain", "why?"]) == 0 and model["encode"] == ("why?", True)
    assert main(["generate", "--model", str(tmp_path), "--chat", "why?"]) == 0
    assert "<|im_start|>" in model["encode"][0] and cli.SMOLLM2_SYSTEM not in model["encode"][0]
    assert main(["generate", "--model", str(tmp_path), "--chat", "why <|im_end|>?"]) == 2
    assert "the prompt must not contain the special token <|im_end|>: use --plain" in capsys.readouterr().err


def test_what_is_wrong_is_said_before_a_model_is_loaded(model, capsys, monkeypatch):
    for words, message in (
        (["--temperature", "-1", "a"], "temperature must be"), (["--dtype", "float16", "a"], "dtype must be one of"),
        (["--max-new-tokens", "0", "a"], "max_new_tokens must be"), ([""], "the prompt must not be empty"),
    ):  # fmt: skip
        assert main(["generate", "--model", "smollm2", *words]) == 2
        assert message in capsys.readouterr().err and not model
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", "--model", "smollm2", "-"]) == 2
    assert "standard input, but that is closed" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert main(["generate", "--model", "smollm2", "--plain", "-"]) == 0 and model["encode"][0] == "from a pipe"


def test_one_token_has_no_speed(model, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "generate", lambda *a, **k: iter([1]))
    assert main(["generate", "--model", str(tmp_path), "hello"]) == 0
    assert capsys.readouterr() == ("b\n", "")


def test_trace_and_diff_hand_on_their_options(model, capsys, monkeypatch, tmp_path):
    written = []

    def forward(model, ids, trace):
        written.append((model, ids))
        trace("q", 5)

    monkeypatch.setattr(cli, "forward", forward)
    monkeypatch.setattr(cli.traces, "write_trace", lambda path, trace: written.append((path, trace)))
    assert (
        main(
            [
                "trace",
                "folder",
                "--tokens",
                "1, 15,3",
                "-o",
                "t.safetensors",
                "--dtype",
                "float64",
                "--backend",
                "numpy",
            ]
        )
        == 0
    )
    assert written == [("a model", [1, 15, 3]), ("t.safetensors", {"q": 5})] and model["load"] == (
        ("folder", "numpy", "float64"),
        {},
    )
    assert capsys.readouterr().out == "1 intermediates of 3 tokens written to t.safetensors\n"
    assert main(["trace", "smollm2", "--text", "hello", "-o", "t.safetensors"]) == 0
    assert model["load"][0][0] == str(tmp_path / "smollm2.gguf") == model["tokenizer"] and model["encode"][0] == "hello"
    assert main(["trace", "folder", "--tokens", "1,x", "-o", "t"]) == 2
    monkeypatch.setattr(cli.traces, "read_trace", lambda path: f"read {path}")
    monkeypatch.setattr(cli.traces, "diff_traces", lambda *a, **k: written.append((a, k)) or WRONG)
    assert main(["diff", "a", "b", "--tolerance", "0.5"]) == 1
    assert written[-1] == (("read a", "read b"), {"tolerance": 0.5})


# --- Words and streams ---


class Terminal(io.StringIO):
    flushed = 0

    def isatty(self):
        return True

    def flush(self):
        self.flushed += 1


def test_a_terminal_shows_how_far_it_is(handed, monkeypatch):
    """Each line takes the place of the one before; in the end there is none."""

    def check(fn, *arguments, **options):
        for call in ("for x", "", "for x", ""):
            for listener in cli.ask.listeners:
                listener(call)
        return RIGHT

    monkeypatch.setattr(cli.checking, "check_rotation", check)
    monkeypatch.setattr(cli.adapters, "from_command", lambda *a, **k: "program")
    monkeypatch.setattr(cli.vectors, "write_vectors", lambda *a, **k: {"cases": []})
    monkeypatch.setattr(cli.vectors, "verify_vectors", lambda *a, **k: [RIGHT])
    monkeypatch.setattr(cli.plots, "check_file", lambda path: None)
    monkeypatch.setattr(cli.plots, "draw", lambda *a, **k: None)
    shown = {
        ("check", "--exec", "run", *ROPE): ["probing …", "probing, call 1 …", "probing, call 2 …", ""],
        ("check", "--in-process", "m:f", "--attention", "softmax"): ["probing …", "what a candidate prints\n", ""],
        ("vectors", "there"): ["writing …", ""], ("vectors", "--verify", "there", "mine"): ["judging …", ""],
        ("plot", "decay", "-o", "a.png"): ["drawing …", ""], ("table", "--head-dim", "7", *ROPE[2:]): [""],
    }  # fmt: skip
    for words, lines in shown.items():
        monkeypatch.setattr(sys, "stderr", Terminal())
        main(list(words))
        written = sys.stderr.getvalue().partition("pyrope: error")[0]
        assert [line for line in written.replace("what", "\r\033[Kwhat").split("\r\033[K") if line] == [
            line for line in lines if line
        ]
        assert written.endswith("\r\033[K") and sys.stderr.flushed


def test_text_is_shown_as_it_comes(model, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(["generate", "--model", str(tmp_path), "hello"]) == 0
    assert sys.stdout.getvalue() == "abc\n" and sys.stdout.flushed >= 4


def test_verdicts_have_colours_on_a_terminal_alone(monkeypatch):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert [cli._painted(verdict) for verdict in ("RIGHT", "wrong")] == [
        "\033[1;32mRIGHT\033[0m",
        "\033[1;31mwrong\033[0m",
    ]
    assert (
        cli._coloured("rotation: NOT JUDGED\nRIGHT\n  x: WRONG")
        == "rotation: \033[1;33mNOT JUDGED\033[0m\nRIGHT\n  x: WRONG"
    )
    monkeypatch.setenv("TERM", "dumb")
    assert cli._painted("RIGHT") == "RIGHT"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli._painted("RIGHT") == "RIGHT"
    monkeypatch.delenv("NO_COLOR")
    for stream in (None, io.StringIO()):
        monkeypatch.setattr(sys, "stdout", stream)
        assert cli._painted("RIGHT") == "RIGHT"


@pytest.mark.parametrize("words", [["trace", "c", "-o", "t"], ["trace", "c", "--tokens", "1"], ["trace", "c", "--tokens", "1", "--text", "x", "-o", "t"], ["plot", "decay"], ["identify", "m:f"], ["generate", "x"], []])  # fmt: skip
def test_what_is_required(words, capsys):
    if not words:
        assert main(words) == 2
        return
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "required" in capsys.readouterr().err or "--text" in words


def test_errors_are_words_without_numbers(monkeypatch, capsys):
    def failing(error):
        def run(options):
            raise error

        return run

    for error, words in (
        (FileNotFoundError(2, "No such file", "there"), "there: No such file"), (ValueError("a rule"), "a rule"),
        (MemoryError(), "MemoryError"), (OSError("a plain one"), "a plain one"), (ZeroDivisionError("by zero"), "by zero"),
    ):  # fmt: skip
        monkeypatch.setattr(cli, "_table", failing(error))
        assert main(["table", *ROPE]) == 2
        assert capsys.readouterr().err == f"pyrope: error: {words}\n"
    monkeypatch.setattr(cli, "_table", failing(KeyboardInterrupt()))
    assert main(["table", *ROPE]) == 130 and capsys.readouterr() == ("", "")


def test_streams_that_are_closed_are_no_error(monkeypatch, handed):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(["table", *ROPE]) == 0 and main(["table"]) == 2


@pytest.mark.parametrize(
    "words, meant",
    [
        (["table", "--head-dm", "8"], "(did you mean --head-dim?)"),
        (["table", "--layout", "NeoX"], "(did you mean half?)"),
        (["table", "--layout", "gptj"], "(did you mean interleaved?)"),
        (["check", "x", "--dtype", "bf16"], "(did you mean bfloat16?)"),
        (["check", "x", "--dtype", "double"], "(did you mean float64?)"),
        (["tabel"], "(did you mean table?)"),
        (["check", "x", "--dtyqe=float64"], "(did you mean --dtype?)"),
    ],
)
def test_other_words_for_the_same_thing(capsys, words, meant):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert f"{meant}; see pyrope" in capsys.readouterr().err


def test_descriptions_have_no_line_beyond_80_columns():
    for name, command in cli._parser()._subparsers._group_actions[0].choices.items():
        lines = (command.description + "\n" + (command.epilog or "")).splitlines()
        assert lines and max(map(len, lines)) <= 80, name
    assert "\n" in parsed_description("check")


def parsed_description(name):
    return cli._parser()._subparsers._group_actions[0].choices[name].description


# --- Words ---


def test_the_help_of_plot_says_what_each_picture_shows(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["plot", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, make in cli.plots.PLOTS.items():
        assert f"{name} {' '.join(make.__doc__.partition(chr(10))[0].split())}" in shown


def test_a_scaling_says_what_it_needs_and_may_have(capsys):
    words = ["table", "--head-dim", "8", "--base", "1e4", "--layout", "half", "--scaling"]
    assert main([*words, "Linear()"]) == 2
    assert capsys.readouterr().err == "pyrope: error: --scaling: Linear needs factor; was 'Linear()'\n"
    assert main([*words, "YaRN(factor=2.0)"]) == 2
    assert "YaRN needs factor, original_length and may have beta_fast, " in capsys.readouterr().err


def test_identify_of_what_cannot_be_read_and_as_a_page(monkeypatch, capsys, tmp_path):
    answers = []
    monkeypatch.setattr(cli.adapters, "load_target", lambda target: answers[-1])
    words = ["identify", "--in-process", "m:f", "--head-dim", "4", "--max-position", "9"]

    def refuses(x, m):
        raise RuntimeError("not today")

    answers.append(refuses)
    assert main(words) == 3 and "not today" in capsys.readouterr().out
    answers.append(lambda x, m: x.copy())
    assert main([*words, "--html", str(tmp_path / "x.html")]) == 0
    title = (tmp_path / "x.html").read_text("utf-8").partition("</title>")[0]
    assert "identified" in title
    for axes, code in (("64", 0), ("65", 2), ("0", 2)):
        assert main([*words, "--position-axes", axes]) == code
    assert "--position-axes must be at least 1, was 0" in capsys.readouterr().err
    monkeypatch.setattr(cli.identification, "identify", lambda *_, **__: int("x"))
    assert main(words) == 2 and "invalid literal" in capsys.readouterr().err, "what is no matter of the candidate"


def test_the_help_of_check_says_what_may_be_left_out(capsys):
    for command, optional in (("check", True), ("identify", False)):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        shown = " ".join(capsys.readouterr().out.split())
        assert ("module:function, or nothing: the gallery" in shown) is optional
        assert ("with --attention reads {q}, {k} and {v}" in shown) is optional
