"""What the command line adds to a report: pages, colours on a terminal, and one report for each finding of vectors."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import pyrope
from pyrope.cli import main
from pyrope.oracle import gallery
from pyrope.oracle.traces import write_trace

pty = pytest.importorskip("pty", reason="terminals are tried where there is a pty")

CANDIDATES = """
import os
import pyrope

ROPE = pyrope.Rope(32, 10000.0, "half")


def right(x, positions):
    return pyrope.rotate(x, positions, ROPE)


def ending(x, positions):
    os._exit(7)


def raising(x, positions):
    raise RuntimeError("<script>alert(1)</script>")
"""
ROPE = ["--head-dim", "32", "--base", "10000", "--layout", "half"]
OTHER = ["--head-dim", "32", "--base", "500000", "--layout", "half"]


@pytest.fixture
def candidates(tmp_path):
    (tmp_path / "candidates.py").write_text(CANDIDATES)
    return str(tmp_path / "candidates.py")


@pytest.mark.parametrize("more", [[], ["--in-process"], ["--json"]])
def test_check_writes_a_page_from_whichever_process_judges(more, capfd, candidates, tmp_path):
    file = tmp_path / "report.html"
    assert main(["check", f"{candidates}:right", *OTHER, "--html", str(file), *more]) == 1
    out, err = capfd.readouterr()
    assert f"report written to {file}" in err and "report written" not in out
    assert ("--json" in more) == out.startswith("{")
    text = file.read_text("utf-8")
    assert text.startswith("<!DOCTYPE html>") and text.count("<svg") >= 5
    assert "<title>pyrope: rotation: WRONG: wrong base</title>" in text


def test_a_crash_has_a_page_too(capfd, candidates, tmp_path):
    file = tmp_path / "report.html"
    assert main(["check", f"{candidates}:ending", *ROPE, "--html", str(file)]) == 3
    assert "it ends its process, with status 7" in file.read_text("utf-8")
    assert main(["identify", f"{candidates}:raising", "--head-dim", "32", "--html", str(file)]) == 3
    text = file.read_text("utf-8")
    assert "&lt;script&gt;alert(1)" in text and "<script" not in text


def test_identify_writes_a_page(capfd, candidates, tmp_path):
    file = tmp_path / "read.html"
    assert main(["identify", f"{candidates}:right", "--head-dim", "32", "--html", str(file)]) == 0
    assert "base 10000, not rescaled" in file.read_text("utf-8")


def test_the_gallery_writes_a_page(capsys, monkeypatch, tmp_path):
    chosen = [exhibit for exhibit in gallery.exhibits() if exhibit.name in ("rotated twice", "concatenating form")]
    monkeypatch.setattr(gallery, "exhibits", lambda: chosen)
    file = tmp_path / "gallery.html"
    assert main(["check", "--html", str(file)]) == 0
    text = file.read_text("utf-8")
    assert "gallery: 2 implementations, 2 judged as they should be" in text
    assert text.count("<details>") == 2 and "interleaved-to-half 10000" in text and "rotated twice" in text


def test_diff_writes_a_page(capsys, tmp_path):
    x = np.arange(1.0, 9.0).reshape(1, 2, 4)
    for name, scale in (("a", 1), ("b", 2)):
        write_trace(tmp_path / f"{name}.safetensors", {"embedding": x, "logits": scale * x})
    files = [str(tmp_path / f"{name}.safetensors") for name in "ab"]
    assert main(["diff", *files, "--html", str(tmp_path / "diff.html")]) == 1
    assert "the second is 2 times the first" in (tmp_path / "diff.html").read_text("utf-8")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["check", "x:y", *ROPE, "--html", "report.txt"], "a page must be a .html or .htm file"),
        (["identify", "x:y", "--head-dim", "8", "--html", "none/report.html"], "there is no directory none"),
        (["vectors", "v", "--html", "report.html"], "--html needs --verify"),
        (["vectors", "--verify", "v", "o", "--html", "x"], "a page must be a .html or .htm file"),
        (["diff", "a", "b", "--html", "x"], "a page must be a .html or .htm file"),
    ],
)
def test_pages_that_cannot_be_written_are_refused_first(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def backwards(tmp_path_factory):
    """Vectors of rotations, and outputs with one sign error in all of them."""
    folder = tmp_path_factory.mktemp("backwards")
    where, outputs = folder / "vectors", folder / "outputs"
    assert main(["vectors", str(where), "--suite", "rotation"]) == 0
    outputs.mkdir()
    for case in json.loads((where / "manifest.json").read_text())["cases"]:
        rope, read = case["rope"], {name: np.load(where / tensor["npy"]) for name, tensor in case["tensors"].items()}
        y = read["y"]
        if rope["axes"] is None and rope["layout"] == "half" and rope["rotary_dim"] is None:
            a, b = np.split(read["x"].astype(np.float64), 2, axis=-1)
            y = np.concatenate((a * read["cos"] + b * read["sin"], b * read["cos"] - a * read["sin"]), axis=-1)
        if case["dtype"] != "bfloat16":  # these are missing
            np.save(outputs / f"{case['name']}.npy", y.astype(read["x"].dtype))
    return str(where), str(outputs)


def test_verify_says_a_finding_once(backwards, capsys, tmp_path):
    file = tmp_path / "vectors.html"
    assert main(["vectors", "--verify", *backwards, "--html", str(file)]) == 1
    out = capsys.readouterr().out
    assert len(out.splitlines()) < 60 and max(map(len, out.splitlines())) <= 80
    assert out.count("\ndirection\n") == 1 and re.search(r"^wrong likewise, \d+: rotation-", out, re.M)
    *_, last = out.splitlines()
    cases, right, wrong, missing = re.fullmatch(
        r"(\d+) cases, (\d+) right, (\d+) wrong, (\d+) not judged", last
    ).groups()
    assert int(cases) == int(right) + int(wrong) + int(missing) and int(wrong) > 5 and int(right) > 5
    text = file.read_text("utf-8")
    assert last in text and f"the same in {int(wrong) - 1} cases more" in text
    assert text.count("<svg") > 100 and "R(m)" not in text  # errors by position of every case that was read


# ── A terminal ───────────────────────────────────────────────────────────────────────────────────────────────────────


def on_a_terminal(*words, **environment):
    """What a command prints when its output is a terminal."""
    here, there = pty.openpty()
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    plain |= {"TERM": "xterm", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    command = [sys.executable, "-m", "pyrope", *words]
    process = subprocess.Popen(command, stdout=there, stderr=subprocess.DEVNULL, env=plain)
    os.close(there)
    text = b""
    while True:
        try:
            part = os.read(here, 2**16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        text += part
    process.wait()
    os.close(here)
    return text.decode()


@pytest.mark.parametrize("more", [[], ["--in-process"]])
def test_the_verdict_has_a_colour_on_a_terminal(more, candidates):
    out = on_a_terminal("check", f"{candidates}:right", *ROPE, *more)
    assert out.startswith("rotation: \033[1;32mRIGHT\033[0m\r\n") and out.count("\033") == 2
    out = on_a_terminal("check", f"{candidates}:right", *OTHER, *more)
    assert out.startswith("rotation: \033[1;31mWRONG\033[0m\r\n") and out.count("\033") == 2


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colours_can_be_refused(environment, candidates):
    assert "\033" not in on_a_terminal("check", f"{candidates}:right", *ROPE, "--in-process", **environment)


def test_what_is_piped_has_no_colour(capsys, candidates):
    assert main(["check", f"{candidates}:right", *ROPE, "--in-process"]) == 0
    assert "\033" not in capsys.readouterr().out


def test_json_on_a_terminal_is_json(candidates):
    assert json.loads(on_a_terminal("check", f"{candidates}:right", *ROPE, "--json"))["verdict"] == "right"


def test_the_gallery_has_colours_in_its_column_alone(monkeypatch):
    from pyrope import cli

    (exhibit,) = [exhibit for exhibit in gallery.exhibits() if exhibit.name == "repeated table, halves"]
    report = pyrope.check_rotation(exhibit.fn, exhibit.rope)
    row = gallery.Row(exhibit.name, report, None, True)
    plain = cli._gallery_line(row)
    monkeypatch.setattr(sys, "stdout", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert cli._gallery_line(row) == plain.replace("wrong ", "\033[1;31mwrong\033[0m ", 1) and len(plain) == 80
