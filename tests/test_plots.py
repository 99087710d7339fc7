"""Every picture has what a reader needs, and shows the numbers that it says it shows."""

import subprocess
import sys

import numpy as np
import pytest
import references
from optional import needed

import pyrope
from pyrope import Axes, Linear, Rope, YaRN, plots

FigureCanvasAgg = needed("matplotlib.backends.backend_agg").FigureCanvasAgg

ROPE = Rope(8, 10000.0, "half")
GRID = Rope(16, 10000.0, "half", axes=Axes("sections", (2, 3, 3)))
TINY = {
    "shift": {},
    "cosines": {},
    "rotation": {"count": 3},
    "wavelengths": {},
    "decay": {"distances": 8, "scores": 2},
    "scores": {"distances": 8},
    "precision": {"rope": ROPE, "octaves": 3, "samples": 2},
    "attention": {"rope": ROPE, "length": 4},
    "linear": {"rope": ROPE, "length": 4},
    "time": {"lengths": (4, 8), "heads": 1, "head_dim": 4, "rounds": 1},
    "sharding": {"length": 8, "ranks": 2},
    "operator": {},
}


def _panels(figure):
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


def _lines(axes):
    return {line.get_label(): line.get_ydata() for line in axes.lines}


@pytest.mark.parametrize("name", plots.PLOTS)
def test_every_picture_can_be_read(name):
    figure = plots.PLOTS[name](**TINY[name])
    assert figure.get_suptitle()
    for axes in _panels(figure):
        assert axes.get_title() and axes.get_xlabel() and axes.get_ylabel(), axes
        assert axes.lines or axes.images, "an empty panel"
        for data in [line.get_ydata() for line in axes.lines] + [image.get_array() for image in axes.images]:
            assert np.isfinite(data).any()
        dashes = [(line.get_linestyle(), line.get_dashes() if hasattr(line, "get_dashes") else line._dash_pattern,
                   line.get_linewidth()) for line in axes.lines if not line.get_label().startswith("_")]  # fmt: skip
        assert len(set(map(str, dashes))) == len(dashes), "two lines that cannot be told apart in grey"
    for axes in set(figure.axes) - set(_panels(figure)):
        assert axes.get_xlabel(), "a colour bar without a word"
    _check_texts(figure)


def _check_texts(figure):
    """No title, label or legend reaches beyond the picture or into another one."""
    FigureCanvasAgg(figure).draw()
    texts = [figure._suptitle, *figure.legends, *([figure._supxlabel] if figure._supxlabel else [])]
    for axes in figure.axes:
        texts += [axes.title, axes.xaxis.label, axes.yaxis.label]
    boxes = [text.get_window_extent() for text in texts if not hasattr(text, "get_text") or text.get_text()]
    width, height = figure.canvas.get_width_height()
    for i, box in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, texts[i]
        assert not any(box.overlaps(other) for other in boxes[:i]), texts[i]


@pytest.mark.parametrize("name", ["wavelengths", "decay", "scores", "precision", "attention", "linear", "operator"])
def test_every_picture_of_another_rope_can_be_read(name):
    rope = Rope(16, 12345678.0, "interleaved-to-half", scaling=YaRN(8.0, 8192))
    _check_texts(plots.PLOTS[name](**{**TINY[name], "rope": rope}))


def test_no_picture_leaves_a_trace_in_pyplot():
    code = "import sys; from pyrope import plots; plots.PLOTS['decay'](); print('matplotlib.pyplot' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_rotation_ends_where_the_vector_is_turned_to():
    for i, axes in enumerate(_panels(plots.rotation_figure((3.0, 4.0), 5))):
        z = np.array([complex(line.get_xdata()[1], line.get_ydata()[1]) for line in axes.lines])
        np.testing.assert_allclose(z, (3 + 4j) * np.exp(1j * np.arange(5) * (1.0, 0.1)[i]), rtol=1e-14)
        low, high = axes.get_xlim()
        assert low < -5 and high > 5, "the circle is cut off"


def test_wavelengths_are_those_of_each_rescaling():
    left, right = _panels(plots.wavelengths_figure())
    lines, ropes = _lines(left), plots.scaled_ropes()
    assert list(lines) == list(ropes) and len(ropes) == 7
    for name, rope in ropes.items():
        expected = pyrope.wavelengths(rope)
        np.testing.assert_array_equal(lines[name], expected[np.isfinite(expected)])
    np.testing.assert_allclose(right.lines[1].get_ydata(), 8.0, rtol=1e-15)  # linear


def test_one_rope_is_shown_against_itself_without_rescaling():
    rope = Rope(8, 500.0, "half", scaling=Linear(2.0))
    left, _ = _panels(plots.wavelengths_figure(rope))
    assert list(_lines(left)) == ["none", "Linear"]
    np.testing.assert_array_equal(_lines(left)["Linear"], pyrope.wavelengths(rope))
    (panel,) = _panels(plots.scores_figure(rope, 4))
    assert [len(data) for data in _lines(panel).values()] == [4, 4]
    assert list(_lines(_panels(plots.wavelengths_figure(ROPE))[0])) == ["none"]


def test_decay_is_figure_2_and_bounds_the_scores():
    rope = Rope(16, 10000.0, "interleaved")
    left, right = _panels(plots.decay_figure(rope, 50, 6))
    curve = pyrope.definition.decay(*pyrope.cos_sin(np.arange(50), rope.rotation_only))
    np.testing.assert_array_equal(left.lines[0].get_ydata(), curve)
    bound, *scores = (line.get_ydata() for line in right.lines)
    np.testing.assert_array_equal(bound, curve)
    assert len(scores) == 6 and all((score <= curve).all() and (score > 0).all() for score in scores)
    ones = _lines(right)["query and key all ones"]  # |Σe^{i(m−n)θ}|/p
    z = np.exp(1j * np.arange(50)[:, None] * pyrope.frequencies(rope))
    np.testing.assert_allclose(ones, np.abs(z.mean(-1)), rtol=1e-12)


def test_scores_are_those_of_rotated_ones():
    rope = Rope(8, 10000.0, "half", scaling=YaRN(4.0, 64))
    (panel,) = _panels(plots.scores_figure(rope, 30))
    q = np.ones((30, 8))
    for name, one in {"rescaled": rope, "not rescaled": Rope(8, 10000.0, "half")}.items():
        expected = pyrope.rotate(q, np.arange(30), one) @ pyrope.rotate(q[:1], [0], one)[0] / 8
        np.testing.assert_allclose(_lines(panel)[name], expected, rtol=1e-12)
    assert "a² = 1.296" in panel.get_title()  # (0.1·ln 4 + 1)²


def test_precision_dies_as_it_should():
    errors = {name: worst for name, (_, worst) in plots.precision_errors(Rope(64, 10000.0, "half"), 16, 16).items()}
    assert errors["rounded once (pyrope)"].max() <= 2.0**-25
    assert 2.0**-26 * 2**15 < errors["float32 angle"][-1] < 2.0**-20 * 2**15
    assert errors["float32 angle"][-1] > 100 * errors["float32 angle"][2]
    np.testing.assert_array_equal(
        errors["bfloat16 positions"][:8], errors["float32 angle"][:8]
    )  # integers to 256 are exact
    assert errors["bfloat16 positions"][8] > 0.1 and errors["bfloat16 frequencies"][0] > 1e-4
    drawn = _lines(_panels(plots.precision_figure(Rope(64, 10000.0, "half"), 16, 16))[0])
    assert all((drawn[name] == errors[name]).all() for name in errors)


def test_attention_is_the_softmax_of_the_scores():
    without, rotated = (axes.images[0].get_array() for axes in _panels(plots.attention_figure(ROPE, 6)))
    for shown in (without, rotated):
        weights = np.asarray(shown.filled(np.nan)) ** 2
        np.testing.assert_allclose(np.nansum(weights, axis=1), 1, rtol=1e-12)
        assert (np.isnan(weights) == ~np.tri(6, dtype=bool)).all()
    assert not np.allclose(np.nan_to_num(without.filled(0)), np.nan_to_num(rotated.filled(0)))
    q = np.random.default_rng(3).standard_normal((1, 5, 8))
    np.testing.assert_allclose(
        plots.softmax_weights(q, q) @ q[0], pyrope.attention(q, q, q, causal=True)[0], rtol=1e-12
    )


def test_linear_shows_what_weights_add_up_to():
    softmax, weights, sums = _panels(plots.linear_figure(length=40))
    for panel, name in ((softmax, "softmax"), (weights, "linear")):
        shown = panel.images[0].get_array().filled(0) / np.arange(1, 41)[:, None]
        np.testing.assert_allclose(shown.sum(-1), _lines(sums)[name], rtol=1e-12)
    np.testing.assert_allclose(_lines(sums)["softmax"], 1, rtol=1e-12)
    assert _lines(sums)["linear"].min() < 0.9 and _lines(sums)["linear, those below 0 alone"].min() < 0
    (marks,) = weights.lines
    below = weights.images[0].get_array().filled(0) < 0
    assert below.any() and {*zip(marks.get_ydata(), marks.get_xdata(), strict=True)} == {
        *zip(*np.nonzero(below), strict=True)
    }


def test_time_is_measured_for_each_length():
    taken = plots.attention_times((4, 8, 16), 1, 4, 1)
    assert len(taken) == 2 and all(len(times) == 3 and min(times) > 0 for times in taken.values())
    (axes,) = _panels(plots.time_figure(**TINY["time"]))
    assert "with one thread: the least of 1 runs or more" in axes.get_title()


def test_time_is_measured_with_one_thread(monkeypatch):
    calls = []

    def run(command, **options):
        calls.append(options["env"])
        return subprocess.CompletedProcess(command, 0, b'{"softmax, Eq. (2)": [1.0], "linear, Eq. (19)": [1.0]}')

    names = ("PYROPE_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    for name in names:
        monkeypatch.setenv(name, "2")
    monkeypatch.setattr(plots.subprocess, "run", run)
    assert plots._times_with_one_thread([4], 1, 4, 1) == {"softmax, Eq. (2)": [1.0], "linear, Eq. (19)": [1.0]}
    assert all(calls[0][name] == "1" for name in names)


def test_shift_is_the_matrix_that_moves_sinusoids():
    encoding, matrix = (np.asarray(axes.images[0].get_array()) for axes in _panels(plots.shift_figure(5)))
    np.testing.assert_allclose(matrix @ encoding[:, :-5], encoding[:, 5:], atol=1e-12)


def test_cosines_are_a_score_of_three_pairs():
    (panel,) = _panels(plots.cosines_figure())
    total = _lines(panel)["their sum S(Δ)"]
    np.testing.assert_allclose(total[[0, 2, 20, 50, 377]], [3, 1.4042, 1.9086, -0.5959, 3], atol=6e-5)
    marked = ["S(0) = 3.00", "S(2) = 1.40", "S(20) = 1.91", "S(50) = −0.60", "S(126) = 2.94", "S(377) = 3.00"]
    assert [text.get_text() for text in panel.texts] == marked


@pytest.mark.parametrize("factor, arrows", [(1.0, False), (1.5, True)])
def test_a_colour_bar_has_arrows_only_where_values_are_beyond_it(factor, arrows):
    rope = Rope(8, 10000.0, "half")
    figure = plots.operator_figure(lambda x, m: (factor * pyrope.rotate(x, m, rope)).astype(x.dtype), rope)
    bars = [axes._colorbar.extend for axes in figure.axes if hasattr(axes, "_colorbar")]
    assert bars == ["both" if arrows else "neither", "neither"]


def test_zero_is_white_and_signs_can_be_read_in_grey():
    panel = _panels(plots.operator_figure())[0]
    image = panel.images[0]
    assert image.get_cmap()(image.norm(0.0)) == pytest.approx((1, 1, 1, 1), abs=0.01)
    red, _, blue, _ = image.get_cmap()(image.norm(-1.0))
    assert red < blue
    (marks,) = panel.lines
    marked = set(zip(marks.get_ydata(), marks.get_xdata(), strict=True))
    assert marked == set(zip(*np.nonzero(image.get_array() < -0.25), strict=True)) and marked


def test_a_description_changes_with_what_is_shown(tmp_path):
    plots.draw("decay", tmp_path / "a.svg", **TINY["decay"])
    figure = plots.decay_figure(**TINY["decay"])
    text = plots.description(figure)
    assert "relative upper bound" in text and "relative upper bound" in (tmp_path / "a.svg").read_text()
    line = figure.axes[0].lines[0]
    line.set_ydata(line.get_ydata()[::-1])
    assert plots.description(figure) != text


@pytest.mark.parametrize("n, ranks", [(16, 4), (10, 3), (3, 5), (40, 1)])
def test_sharding_shows_who_computes_which_score(n, ranks):
    panels = _panels(plots.sharding_figure(n, ranks))
    for scheme, above, below in zip(pyrope.parallel.SCHEMES, panels[:3], panels[3:], strict=True):
        shown = above.images[0].get_array()
        assert shown.mask.tolist() == (~np.tri(n, dtype=bool)).tolist() and scheme in above.get_title()
        for rank, bar in enumerate(below.patches):
            own = pyrope.parallel.shard_positions(n, rank, ranks, scheme)
            assert (shown[own].compressed() == rank).all() and bar.get_height() == (shown == rank).sum()
            assert [text.get_position()[0] for text in above.texts if text.get_text() == f"{rank}"] == (
                own.tolist() if n <= 32 else []
            )
        np.testing.assert_allclose(below.lines[0].get_ydata(), n * (n + 1) / 2 / ranks)
    assert "busiest: 1.71 × the mean" in panels[3].get_title() or n != 16


def test_operator_is_what_the_candidate_does():
    turned = Rope(8, 10000.0, "interleaved")
    figure = plots.operator_figure(lambda x, m: pyrope.rotate(x, m, turned), ROPE, position=7, dtype=np.float64)
    expected, actual, difference = (axes.images[0].get_array() for axes in _panels(figure))
    np.testing.assert_array_equal(expected, references.matrix(ROPE, 7))
    np.testing.assert_allclose(actual, references.matrix(turned, 7), atol=1e-15)
    np.testing.assert_array_equal(difference, actual - expected)
    assert "position 7" in figure.get_suptitle()


def test_operator_of_several_axes_has_another_position_on_each():
    rope = GRID
    figure = plots.operator_figure(lambda x, m: pyrope.rotate(x, m[::-1], rope), rope, position=7, dtype=np.float64)
    expected, actual, _ = (axes.images[0].get_array() for axes in _panels(figure))
    np.testing.assert_array_equal(expected, references.matrix(rope, [7, 8, 9]))
    np.testing.assert_allclose(actual, references.matrix(rope, [9, 8, 7]), atol=1e-15)
    assert "position (7, 8, 9)" in figure.get_suptitle()


def test_operator_of_a_candidate_that_returns_nan():
    figure = plots.operator_figure(lambda x, m: x * np.float32("nan"), ROPE)
    assert _panels(figure)[2].get_title() == "candidate − expected: not finite"


@pytest.mark.parametrize(
    "name, options, said",
    [
        ("operator", {"candidate": lambda x, m: x}, "a candidate needs the rope"),
        ("operator", {"candidate": lambda x, m: x[0], "rope": ROPE}, "the candidate cannot be drawn: it returns shape"),
        ("operator", {"position": -1}, "position must be"),
        ("operator", {"position": 10**30}, "position must be at most 2.31, was 1000"),
        ("operator", {"rope": GRID}, "without a candidate this picture is of ropes with one axis, this one has 3"),
        ("time", {"lengths": ()}, "lengths must be at least one, were none"),
        ("rotation", {"vector": (0.0, 0.0)}, "vector must be two numbers, not both 0"),
        ("rotation", {"vector": (1.0,)}, "vector must be two numbers"),
        ("decay", {"distances": 1}, "length must be"),
        ("decay", {"scores": 0}, "scores must be"),
        ("precision", {"octaves": 0}, "octaves must be"),
        ("time", {"lengths": (4,), "rounds": 0}, "rounds must be"),
        ("sharding", {"ranks": 0}, "ranks must be"),
        ("sharding", {"length": 0}, "length must be"),
        ("deacy", {}, "name must be one of 'rotation'"),
    ],
)
def test_misuse_is_refused_in_words(tmp_path, name, options, said):
    with pytest.raises(ValueError, match=said):
        plots.draw(name, tmp_path / "x.png", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["wavelengths", "decay", "scores", "precision", "attention", "linear", "operator"])
@pytest.mark.parametrize("rope", [3, 0, "half"])
def test_a_rope_is_a_rope(tmp_path, name, rope):
    with pytest.raises(TypeError, match="rope must be a Rope, was (int|str)"):
        plots.draw(name, tmp_path / "x.png", rope=rope)


def test_the_same_picture_is_the_same_file(tmp_path):
    for suffix in ("svg", "png"):
        for i in "ab":
            plots.draw("decay", tmp_path / f"{i}.{suffix}", **TINY["decay"])
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


def test_a_suffix_is_refused_before_anything_is_computed(tmp_path, monkeypatch):
    monkeypatch.setitem(plots.PLOTS, "time", lambda: pytest.fail("was computed"))
    with pytest.raises(ValueError, match=r"must be a \.png or \.svg file, was .*time\.pdf"):
        plots.draw("time", tmp_path / "time.pdf")
