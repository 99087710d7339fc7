"""Every picture has what a reader needs, and shows the numbers that it says it shows."""

import subprocess
import sys

import numpy as np
import pytest
import references
from optional import package

import pyrope
from pyrope import Axes, Linear, Proportional, Rope, YaRN, plots

FigureCanvasAgg = package("matplotlib.backends.backend_agg").FigureCanvasAgg

ROPE = Rope(8, 10000.0, "half")
GRID = Rope(16, 10000.0, "half", axes=Axes("sections", (2, 3, 3)))
OF_A_ROPE = ("wavelengths", "decay", "scores", "precision", "attention", "linear", "operator")


def _panels(figure):
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


def _lines(axes):
    return {line.get_label(): line.get_ydata() for line in axes.lines}


def _maps(figure):
    return [np.ma.filled(axes.images[0].get_array(), np.nan) for axes in _panels(figure) if axes.images]


@pytest.mark.parametrize("name", [*plots.PLOTS, "of another rope"])
def test_every_picture_can_be_read(name):
    rope = Rope(16, 12345678.0, "interleaved-to-half", scaling=YaRN(8.0, 8192))
    figures = [plots.PLOTS[one](rope=rope) for one in OF_A_ROPE] if " " in name else [plots.PLOTS[name]()]
    for figure in figures:
        assert figure.get_suptitle()
        for axes in _panels(figure):
            assert axes.get_title() and axes.get_xlabel() and axes.get_ylabel(), axes
            dashes = [(line.get_linestyle(), line._dash_pattern, line.get_linewidth())
                      for line in axes.lines if not line.get_label().startswith("_")]  # fmt: skip
            assert len(set(map(str, dashes))) == len(dashes), "two lines that cannot be told apart in grey"
        assert all(axes.get_xlabel() for axes in figure.axes), "a colour bar without a word"
        _check_texts(figure)


def _check_texts(figure):
    """No title, label or legend reaches beyond the picture or into another one."""
    FigureCanvasAgg(figure).draw()
    texts = [figure._suptitle, *figure.legends, *([figure._supxlabel] if figure._supxlabel else [])]
    texts += [text for axes in figure.axes for text in (axes.title, axes.xaxis.label, axes.yaxis.label)]
    boxes = [text.get_window_extent() for text in texts if not hasattr(text, "get_text") or text.get_text()]
    width, height = figure.canvas.get_width_height()
    for i, box in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, texts[i]
        assert not any(box.overlaps(other) for other in boxes[:i]), texts[i]


def test_no_picture_leaves_a_trace_in_pyplot_and_the_engine_is_imported_late():
    code = "import sys; from pyrope import plots; engine = 'pyrope.softmax' in sys.modules; plots.PLOTS['decay']()"
    run = f"{code}; print(engine, 'matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", run], capture_output=True, text=True).stdout == "False False\n"


def test_rotation_ends_where_the_vector_is_turned_to():
    for i, axes in enumerate(_panels(plots.rotation_figure())):
        z = np.array([complex(line.get_xdata()[1], line.get_ydata()[1]) for line in axes.lines])
        np.testing.assert_allclose(z, np.exp(1j * np.arange(7) * (1.0, 0.1)[i]), rtol=1e-14)


def test_wavelengths_are_those_of_each_rescaling():
    left, right = _panels(plots.wavelengths_figure())
    lines, ropes = _lines(left), plots.scaled_ropes()
    assert list(lines) == list(ropes) and len(ropes) == 7
    for name, rope in ropes.items():
        expected = pyrope.wavelengths(rope)
        np.testing.assert_array_equal(lines[name], expected[np.isfinite(expected)])
    np.testing.assert_allclose(right.lines[1].get_ydata(), 8.0, rtol=1e-15)  # linear
    left, _ = _panels(plots.wavelengths_figure(Rope(8, 500.0, "half", scaling=Linear(2.0))))
    assert list(_lines(left)) == ["none", "Linear"]
    assert list(_lines(_panels(plots.wavelengths_figure(ROPE))[0])) == ["none"]
    for scaling, title in ((Linear(2.0), "Which pairs Linear slows"), (Proportional(0.5), "How long the pairs")):
        assert plots.wavelengths_figure(Rope(8, 500.0, "half", scaling=scaling)).get_suptitle().startswith(title)


def test_decay_is_figure_2():
    rope = Rope(16, 10000.0, "interleaved")
    (panel,) = _panels(plots.decay_figure(rope))
    z = np.exp(1j * np.arange(256)[:, None] * pyrope.frequencies(rope))
    curve = np.abs(np.cumsum(z, axis=-1)).mean(axis=-1)
    np.testing.assert_allclose(panel.lines[0].get_ydata(), curve, rtol=1e-12)


def test_scores_are_those_of_rotated_ones():
    rope = Rope(8, 10000.0, "half", scaling=YaRN(4.0, 64))
    (panel,) = _panels(plots.scores_figure(rope))
    q = np.ones((400, 8))
    for name, one in {"rescaled": rope, "not rescaled": Rope(8, 10000.0, "half")}.items():
        expected = pyrope.rotate(q, np.arange(400), one) @ pyrope.rotate(q[:1], [0], one)[0] / 8
        np.testing.assert_allclose(_lines(panel)[name], expected, rtol=1e-12)
    assert "a² = 1.296" in panel.get_title()  # (0.1·ln 4 + 1)²


def test_precision_dies_as_it_should():
    drawn = _lines(_panels(plots.precision_figure(Rope(64, 10000.0, "half")))[0])
    errors = {name: worst for name, worst in drawn.items() if not name.startswith("_")}
    assert errors["rounded once (pyrope)"].max() <= 2.0**-25
    assert 2.0**-26 * 2**15 < errors["float32 angle"][15] < 2.0**-20 * 2**15
    assert errors["float32 angle"][-1] > 100 * errors["float32 angle"][2]
    exact = errors["bfloat16 positions"][:8] == errors["float32 angle"][:8]  # integers to 256 are exact
    assert exact.all() and errors["bfloat16 positions"][8] > 0.1 and errors["bfloat16 frequencies"][0] > 1e-4


def test_attention_and_linear_show_the_weights_of_the_engine():
    n, rng = 48, np.random.default_rng(0)
    common = rng.standard_normal(8)
    q, k = (common + rng.standard_normal((1, n, 8)) for _ in "qk")
    plain, rotated, linear = plots.causal_weights(ROPE, 1.0)
    at, eye = np.arange(n), np.eye(n)[None]
    turned = [pyrope.rotate(x, at, ROPE) for x in (q, k)]
    np.testing.assert_allclose(plain, pyrope.attention(q, k, eye, causal=True)[0], atol=1e-12)
    np.testing.assert_allclose(rotated, pyrope.attention(*turned, eye, causal=True)[0], atol=1e-12)
    np.testing.assert_allclose(linear, pyrope.linear_attention(q, k, eye, at, ROPE, causal=True)[0], atol=1e-12)
    for shown in _maps(plots.attention_figure(ROPE)):
        np.testing.assert_allclose(np.nansum(shown**2, axis=1), 1, rtol=1e-12)
        assert (np.isnan(shown) == ~np.tri(n, dtype=bool)).all()


def test_linear_marks_what_is_below_zero_and_shows_the_sums():
    softmax, weights, sums = _panels(plots.linear_figure())
    for panel, name in ((softmax, "softmax"), (weights, "linear")):
        shown = panel.images[0].get_array().filled(0) / np.arange(1, 49)[:, None]
        np.testing.assert_allclose(shown.sum(-1), _lines(sums)[name], rtol=1e-12)
    assert _lines(sums)["linear"].min() < 0.9 and _lines(sums)["linear, those below 0 alone"].min() < 0
    (marks,), below = weights.lines, weights.images[0].get_array().filled(0) < 0
    assert {*zip(marks.get_ydata(), marks.get_xdata(), strict=True)} == {*zip(*np.nonzero(below), strict=True)}


def test_sharding_shows_who_computes_which_score():
    panels = _panels(plots.sharding_figure())
    for scheme, above, below in zip(pyrope.parallel.SCHEMES, panels[:3], panels[3:], strict=True):
        shown = above.images[0].get_array()
        assert shown.mask.tolist() == (~np.tri(16, dtype=bool)).tolist() and scheme in above.get_title()
        shown = shown - 1
        for rank, bar in enumerate(below.patches):
            own = pyrope.parallel.shard_positions(16, rank, 4, scheme)
            assert (shown[own].compressed() == rank).all() and bar.get_height() == (shown == rank).sum()
    assert "busiest: 1.71 × the mean" in panels[3].get_title()


# ── What was read ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rope, at", [(ROPE, 3), (GRID, (3, 4, 5))])
def test_an_operator_stands_beside_the_expected_one(rope, at):
    figure = plots.operator_figure(rope)
    expected, actual, difference = _maps(figure)
    np.testing.assert_array_equal(expected, references.matrix(rope, np.array(at)))
    assert not np.allclose(actual, expected) and (difference == actual - expected).all()
    assert f"position {at} " in figure.get_suptitle()


def test_zero_is_white_and_signs_have_colours():
    matrix = np.array([[1.0, -1.0], [0.0, np.nan]])
    figure = plots.operator_map("3", 1.5 * matrix, matrix)
    image = _panels(figure)[0].images[0]
    assert image.get_cmap()(image.norm(0.0)) == pytest.approx((1, 1, 1, 1), abs=0.01)
    red, _, blue, _ = image.get_cmap()(image.norm(-1.0))
    assert red < blue and image.norm(1.5) == 1 and "not finite" in _panels(figure)[2].get_title()
    for nothing in (np.full((2, 2), np.nan), np.full((2, 2), -np.inf)):  # no number at all
        assert [len(_panels(plots.operator_map("3", nothing, expected))) for expected in (None, matrix)] == [1, 3]


def test_charts_mark_what_is_wrong_and_keep_what_has_no_logarithm():
    at, worst = np.arange(4), np.array([1e-7, 0.0, np.nan, 1e-2])
    (axes,) = _panels(plots.errors_chart("position", at, worst, worst > 1e-3, {"a grade": np.full(4, 1e-5)}))
    lines = {line.get_label(): (line.get_xdata(), line.get_ydata()) for line in axes.lines}
    assert lines["largest error"][0].tolist() == [0, 1, 2] and lines["beyond what is accepted"][0].tolist() == [3]
    assert lines["a grade"][1].tolist() == [1e-5] * 4
    for i, (low, high) in enumerate((axes.get_xlim(), axes.get_ylim())):
        assert all(low < place < high for line in lines.values() for place in line[i])
    theta = 10.0 ** -np.arange(5.0)
    left, right = _panels(plots.frequencies_chart(1.5 * theta, theta, np.full(5, 1e-6), np.arange(5) == 2))
    assert _lines(left)["measured, another one"] == [0.015] and np.allclose(right.lines[1].get_ydata(), 0.5)
    assert len(_panels(plots.frequencies_chart(theta[:3], theta, None, np.ones(3, bool)))) == 1
    assert list(_lines(_panels(plots.frequencies_chart(theta, None, None, np.zeros(5, bool)))[0])) == ["measured"]


# ── Files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_picture_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    for file in (tmp_path / "a.svg", tmp_path / "a.png"):
        file.write_text("old")
        with pytest.raises(OSError, match="full"), monkeypatch.context() as patched:
            patched.setattr("pyrope.files.os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
            plots.draw("decay", file)
        assert file.read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.png", "a.svg"]


def test_the_same_picture_is_the_same_small_file_with_its_words(tmp_path):
    for suffix in ("svg", "png"):
        for i in "ab":
            plots.draw("scores", tmp_path / f"{i}.{suffix}")
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    assert len((tmp_path / "a.svg").read_bytes()) < 100_000 and "score / qᵀk" in (tmp_path / "a.svg").read_text()
    for name, path, said in [
        ("deacy", "x.png", "name must be one of 'rotation'"),
        ("decay", "none/x.svg", "there is no directory"),
    ]:
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            plots.draw(name, tmp_path / path, rope=3)  # before the rope is looked at
