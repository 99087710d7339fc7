"""Drawings by hand: where each mark and line of a small one stands."""

import math
import re

import numpy as np
import pytest

from pyrope.oracle import drawings as module
from pyrope.oracle.drawings import Errors, Frequencies, Markup, element, joined

LEFT, RIGHT, TOP, BOTTOM = module._LEFT, module._RIGHT, module._TOP, module._BOTTOM


def test_elements():
    assert (
        element("p", "a < b", Markup("<b>"), class_="x", data_y='"', z=None)
        == '<p class="x" data-y="&quot;">a &lt; b<b></p>'
    )
    assert joined(["<", Markup("<")]) == "&lt;<" and isinstance(joined([]), Markup)


# --- Matrices ---


def test_shades_of_a_matrix():
    drawn = module.operator_drawing("R", np.array([[0, 1.0], [-2.0, np.nan]]), 2.0)
    assert 'aria-label="R"' in drawn and 'viewBox="-0.03125 -0.03125 2.062 2.062"' in drawn
    cells = dict(re.findall(r'<path d="([^"]*)" fill="([^"]*)">', drawn))
    assert cells == {
        "M1 0h1v1h-1z": module._colour(module._SHADES // 2),
        "M0 1h1v1h-1z": module._colour(-module._SHADES),
        "M1 1h1v1h-1z": "#8a8a8a",
    }
    assert '<rect width="2" height="2" fill="#ffffff">' in drawn and "framed" not in drawn
    framed = module.operator_drawing("R", np.eye(2), 1.0, np.array([[True, False], [False, False]]))
    assert 'd="M0 0h1M0 1h1M0 0v1M1 0v1" class="framed"' in framed
    assert "framed" not in module.operator_drawing("R", np.eye(2), 1.0, np.zeros((2, 2), bool))


def test_colours():
    full = module._SHADES
    assert module._colour(full) == "#" + "".join(f"{v:02x}" for v in module._RED)
    assert (
        module._colour(-full) == "#" + "".join(f"{v:02x}" for v in module._BLUE)
        and module._colour(full + 1) == "#8a8a8a"
    )
    half = [round(255 + (v - 255) / full) for v in module._RED]
    assert module._colour(1) == "#" + "".join(f"{v:02x}" for v in half)


def test_large_matrices_are_pooled():
    matrix = np.array([[1.0, 0, 3], [-5, 2, 0], [0, 0, -4]])
    assert module._pooled(matrix, 1) is matrix and module._pooled(matrix, 2).tolist() == [[-5, 3], [0, -4]]
    lost = module._pooled(np.array([[1, np.nan], [9, 2]]), 2)
    assert lost.shape == (1, 1) and np.isnan(lost).all()
    n = module._MOST_CELLS
    whole, pooled = (module.operator_drawing("", np.zeros((size, size)), 1.0) for size in (n, n + 1))
    assert f'<rect width="{n}"' in whole and f'<rect width="{-(-(n + 1) // 2)}"' in pooled


def test_frames_of_small_cells_grow():
    cells = np.zeros((24, 24), bool)
    cells[5, 7] = True
    assert np.argwhere(module._grown(cells)).tolist() == [[i, j] for i in (4, 5, 6) for j in (6, 7, 8)]
    assert module._grown(cells[:23, :23]).sum() == 1


# --- Axes ---


def test_places_on_a_scale():
    scale = module._Scale(0.0, 4.0, 100, 60)
    assert [scale(x) for x in (0, 1, 4, 9, -9)] == [100, 90, 60, 60, 100] and module._Scale(0, 3, 0, 10)(1) == 3.3
    assert (
        module._height(module._Scale(-2, 2, 0, 40), 10.0) == 30
        and module._height(module._Scale(-2, 2, 0, 40), 0.0) == 0
    )
    assert (
        module._height(module._Scale(-2, 2, 0, 40), math.nan)
        == module._height(module._Scale(-2, 2, 0, 40), math.inf)
        == 40
    )


def test_powers_of_ten():
    assert [module.power(k) for k in (-12, -1, 0, 1, 2, 3)] == ["10⁻¹²", "10⁻¹", "1", "10", "100", "10³"]


def test_the_decades_of_numbers():
    def decades(*values, least=0.0):
        return module._decades([np.array(x, float) for x in values], least)

    assert decades([3e-5, 20.0]) == (-5, 2) and decades([1e-3, 1.0]) == (-3, 0) and decades([5.0]) == (0, 1)
    assert decades([0.0, np.nan, np.inf]) == decades([]) == (-8, 0) and decades([1.0, 1.0]) == (0, 1)
    many = [1e-12, *[1.0] * 99]
    assert decades(many) == (-12, 0)
    assert decades(many, least=0.05)[0] == -2  # two below the quantile
    assert decades([1e-3], [1e-6, 0.5]) == (-6, 0)


def test_the_vertical_axis():
    scale, grid = module._vertical([np.array([1e-2, 1.0])])
    assert (
        scale == (-2, 0, BOTTOM, TOP)
        and len(grid) == 6
        and [x for x in grid if "text" in x][1].endswith(">10⁻¹</text>")
    )
    assert (
        f'x1="{LEFT}" x2="{RIGHT}" y1="{float(BOTTOM)}"' in grid[0] and f'x="{LEFT - 4}" y="{BOTTOM + 3.5}"' in grid[1]
    )
    scale, grid = module._vertical([np.array([1e-2, np.inf])])
    assert scale[:2] == (-2, 0) and grid[0].endswith(">NaN, ∞</text>") and f'y="{TOP + 3.5}"' in grid[0]
    _, grid = module._vertical([np.array([1e-13, 1.0])])
    assert sum("line" in x for x in grid) == 5  # of 13 decades every third


def test_the_horizontal_axis():
    marks = module._horizontal(module._Scale(0, 1, LEFT, RIGHT), [(0.0, "a"), (1.0, "b")], "words")
    assert len(marks) == 6 and f'x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}"' in marks[0]
    assert (
        f'x1="{float(RIGHT)}" x2="{float(RIGHT)}" y1="{BOTTOM}" y2="{BOTTOM + 4}"' in marks[3]
        and f'y="{BOTTOM + 15}"' in marks[4]
    )
    assert f'x="{(LEFT + RIGHT) / 2}" y="{module._HEIGHT - 5}"' in marks[5] and marks[5].endswith(">words</text>")


def test_the_axis_of_pairs():
    for count, ticks in ((1, 1), (6, 6), (7, 4), (12, 6), (64, 4), (0, 0)):
        scale, axis = module._pairs(count)
        assert (
            sum("<text" in x for x in axis) - 1 == ticks
            and scale[:2] == (0, max(1, count - 1))
            and scale[2:] == (LEFT + 4, RIGHT - 6)
        )


def test_marks_and_lines():
    assert module._mark(3, 4, False) == '<circle class="dot" cx="3" cy="4" r="2"></circle>'
    assert 'd="M0.4 1.4l5.2 5.2m0 -5.2l-5.2 5.2"' in module._mark(3, 4, True)
    assert (
        module._line([(1, 2), (3.5, 4)], "x")
        == '<polyline class="line x" points="1,2 3.5,4" fill="none" stroke-dasharray="none"></polyline>'
    )


# --- Charts ---


def test_errors_by_position():
    errors = Errors(
        "position",
        np.array([0, 9, 99]),
        np.array([0, 1e-3, 1e-1]),
        np.array([False, False, True]),
        {"a": np.full(3, 1e-2), "b": np.full(3, 1.0)},
    )
    drawn = module.errors_drawing(errors)
    x0, x1 = LEFT + 4, RIGHT - 4
    dots = re.findall(r'cx="([^"]*)" cy="([^"]*)"', drawn)
    assert (
        [float(x) for x, _ in dots] == [x0, (x0 + x1) / 2]
        and float(dots[0][1]) == BOTTOM
        and drawn.count('class="cross"') == 1
    )
    lines = re.findall(r'class="line (grade\d)" points="([^"]*)"', drawn)
    assert [name for name, _ in lines] == ["grade0", "grade1"] and all(len(points.split()) == 3 for _, points in lines)
    assert lines[1][1].endswith(f",{TOP:g}")  # 1, the largest
    assert [words for _, words in module.swatches(errors)] == ["a", "b"]
    assert all(f">{words}</text>" in drawn for words in ("0", "1", "10", "position"))


def test_errors_of_two_tokens():
    errors = Errors("token", np.array([0, 1]), np.array([1.0, 1.0]), np.array([False, False]), {})
    assert re.findall(r'cx="([^"]*)"', module.errors_drawing(errors)) == [f"{LEFT + 4}", f"{RIGHT - 4}"]


def test_frequencies_by_pair():
    right = Frequencies(np.array([1.0, -0.1]), np.array([1.0, 0.1]), np.array([1e-3, 1e-3]))
    drawn = module.frequencies_drawing(right)
    assert drawn.count("<circle") == 2 and "cross" not in drawn and 'class="line expected"' in drawn
    wrong = Frequencies(np.array([1.0, 0.2]), np.array([1.0, 0.1]), np.array([1e-3, 1e-3]))
    assert (
        module.differing(wrong).tolist() == [False, True]
        and module.frequencies_drawing(wrong).count('class="cross"') == 1
    )
    assert (
        module.deviations(wrong).tolist() == pytest.approx([0, 1])
        and module.deviations_drawing(wrong).count("<circle") == 1
    )
    alone = Frequencies(np.array([1.0, 0.2]), None, None)
    assert (
        module.deviations(alone) is None
        and module.deviations_drawing(alone) is None
        and not module.differing(alone).any()
    )
    assert "expected" not in module.frequencies_drawing(alone).replace("frequencies, expected and measured", "")
    fewer = Frequencies(np.array([1.0]), np.array([1.0, 0.1]), np.ones(2))
    assert module.differing(fewer).tolist() == [True] and module.deviations(fewer) is None
    still = Frequencies(np.array([1.0, 0.0]), np.array([1.0, 0.0]), np.ones(2))
    assert module.deviations(still) is None and module.differing(still).tolist() == [False, False]
    lost = Frequencies(np.array([1.0, np.nan]), np.array([1.0, 0.1]), np.ones(2))
    assert module.differing(lost).tolist() == [False, True]
