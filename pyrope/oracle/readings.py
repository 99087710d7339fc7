"""What the page of a report shows beside its words: R(m), frequencies and errors, read once the verdict is known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..theta import Rope, frequencies
from .drawings import Errors, Flags, Frequencies, Operators, Readings, Side
from .floats import Float64, Int64
from .measure import Measured, measure
from .probe import Probe
from .recipes import recipe_of
from .rules import layout_of, rules
from .sample import Sample, expected_of
from .tolerance import angle_bound, grades
from .truth import rotated

if TYPE_CHECKING:
    from .attention_evidence import AttentionEvidence

ILLEGIBLE = "cannot be read: the pairs do not turn"
_QUESTIONS = 8  # of attention that are shown side by side, wrong ones first
_CLEAR = 0.5  # R(m) is shown at the first position where an error has this part of the largest one


def rotation_readings(
    probe: Probe, rope: Rope, sample: Sample, measured: Measured | None, beyond: Float64 | None, precision: Side
) -> Readings:
    """Of a candidate that was judged by this sample. ``beyond`` is the error of each output over what is accepted of
    it, None if all are accepted; ``measured`` is what was measured already."""
    measured = measured or _measured(probe)
    shown = frequency_readings(rope, measured, beyond is None) if measured.legible else None
    errors = _rotation_errors(sample, rope, probe, beyond)
    m = 3 if beyond is None else int(errors.at[np.argmax(errors.worst >= _CLEAR * errors.worst.max())])
    operators = operator_readings(probe, rope, min(m, probe.max_position), differing=beyond is not None)
    return Readings("expected", (*_sides(rope, measured, shown), precision), operators, shown, errors)


def _measured(probe: Probe) -> Measured:
    """What R(m) shows at positions that double: fewer than are needed to explain a mistake."""
    top = probe.max_position
    positions = np.array(sorted({0, *(2**k for k in range(top.bit_length())), top}), np.int64)
    return measure(probe.operator(positions), positions, probe.unit, probe.step)


def operator_readings(probe: Probe, rope: Rope | None, m: int, differing: bool = True) -> Operators:
    """R(m) of a candidate beside that of a rope; with several axes at m, m + 1, …, to tell the axes apart."""
    at = np.array([m]) if probe.axes is None else m + np.arange(probe.axes)[:, None]
    measured = probe.operator(at)[0]
    where = str(m) if probe.axes is None else f"({', '.join(str(m + k) for k in range(probe.axes))})"
    if rope is None:
        return Operators(where, measured, None, np.zeros(measured.shape, bool))
    units = np.eye(rope.head_dim)[:, None]
    expected = rotated(units, at, rope)[:, 0].T
    cells = np.zeros(measured.shape, bool)
    if differing:
        worst = grades(probe.dtype)[-1]
        allowed = expected_of(units, at, rope, probe.dtype, "logarithm", (worst,))[1][worst][:, 0].T
        cells = _of_pairs(~(np.abs(measured - expected) <= allowed), expected)
    return Operators(where, measured, expected, cells)


def _of_pairs(wrong: Flags, expected: Float64) -> Flags:
    """The wrong elements, and all elements of the pairs that they belong to."""
    rows = wrong.any(axis=1, keepdims=True)
    return np.asarray(wrong | ((expected != 0) & rows))


def frequency_readings(rope: Rope | None, measured: Measured, accepted: bool = False) -> Frequencies:
    """The measured frequencies beside those of a rope, as far as its pairs turn; those of a phase may be accepted."""
    if rope is None:
        return Frequencies(measured.theta, None, None)
    expected = frequencies(rope)
    turning = expected > 0
    allowed = np.maximum(angle_bound(rope, by="logarithm"), accepted * angle_bound(rope, by="phase"))[turning]
    if len(measured.theta) == len(allowed):
        allowed = allowed + 4 * measured.uncertainty / expected[turning]
    return Frequencies(measured.theta, expected[turning], allowed)


def _sides(rope: Rope, measured: Measured, shown: Frequencies | None) -> list[Side]:
    """Each property of a rotation, expected and measured."""
    d, expected = rope.head_dim, frequencies(rope)
    width = 2 * int(np.count_nonzero(expected))
    layout, turning, placement, _ = layout_of(measured.pairs, d)
    sides = [_side("pairs", rope.layout, layout if layout != "none" else _odd(rope, measured))]
    if shown is None:
        return [*sides, Side("frequencies", _span(expected[expected > 0]), _illegible(measured), False)]
    sides.append(_side("features that turn", _width(width, d, rope.placement), _width(turning, d, placement)))
    if turning:
        same = _same(shown)
        rule = f"base {rope.base:g}" + ("" if rope.scaling is None else f", {type(rope.scaling).__name__}")
        sides += [
            _side("direction", f"{rope.direction:+d}", f"{measured.direction:+d}"),
            Side("frequencies", *_spans(expected[expected > 0], measured.theta), same),
            Side("rule", rule, rule if same else _rule(measured, d), same),
            _side("position offset", "0", f"{measured.offset:g}"),
        ]
    factor = abs(measured.factor / rope.attention_factor - 1) < 1e-3
    return [*sides, Side("factor", f"{rope.attention_factor:.6g}", f"{measured.factor:.6g}", factor)]


def _span(theta: Float64) -> str:
    return f"{theta[0]:.4g} … {theta[-1]:.4g}" if len(theta) else "none"


def _spans(expected: Float64, measured: Float64) -> tuple[str, str]:
    """Both, with their numbers where these are not the same."""
    if len(expected) == len(measured):
        return _span(expected), _span(measured)
    return f"{_span(expected)}, of {len(expected)} pairs", f"{_span(measured)}, of {len(measured)} pairs"


def _illegible(measured: Measured) -> str:
    return ILLEGIBLE if math.isfinite(measured.factor) else "cannot be read: NaN or infinity"


def _side(name: str, expected: str, measured: str) -> Side:
    return Side(name, expected, measured, expected == measured)


def _width(width: int, head_dim: int, placement: str) -> str:
    return f"{width} of {head_dim}" if width in (0, head_dim) else f"{width} of {head_dim}, {placement}"


def _odd(rope: Rope, measured: Measured) -> str:
    reads = recipe_of(rope).reads, measured.pairs.reads
    meant, got = ({tuple(sorted(pair)) for pair in pairs.tolist()} for pairs in reads)
    if got and got < meant:
        return f"{rope.layout}, without {len(meant - got)} of the {len(meant)} pairs"
    pairs = [f"({a}, {b})" for a, b in measured.pairs.reads[:3].tolist()]
    return f"{', '.join(pairs)}, …: no known layout" if pairs else "no two features as a pair"


def _same(shown: Frequencies) -> bool:
    if shown.expected is None or shown.allowed is None or len(shown.measured) != len(shown.expected):
        return False
    return bool((np.abs(shown.measured / shown.expected - 1) <= shown.allowed).all())


def _rule(measured: Measured, head_dim: int) -> str:
    matches = rules(measured, head_dim)
    return matches[0].words if matches else "no published rule"


# ── Errors by position, or by row ────────────────────────────────────────────────────────────────────────────────────


def errors_by_place(place: str, at: Int64, off: Any, allowed: Mapping[str, Any], beyond: Any) -> Errors:
    """The largest of all errors (…, n, d) at each of n places, and of what each grade allows there."""

    def largest(x: Any) -> Any:
        return np.moveaxis(np.broadcast_to(x, off.shape), -2, 0).reshape(len(at), -1).max(axis=1)

    order = np.argsort(at, kind="stable")
    lines = {grade: largest(most)[order] for grade, most in allowed.items()}
    return Errors(place, at[order], largest(off)[order], largest(beyond)[order], lines)


def _rotation_errors(sample: Sample, rope: Rope, probe: Probe, beyond: Float64 | None) -> Errors:
    """Of the dense vectors: the combs have errors of their own."""
    dense = sample._replace(x=sample.x[:2], y=sample.y[:2])
    truth, allowed = expected_of(dense.x, dense.positions, rope, probe.dtype)
    off = _lost(np.abs(dense.y - truth))
    wrong = np.zeros(off.shape, bool) if beyond is None else (beyond > 1).any(axis=0, keepdims=True)
    return errors_by_place("position", dense.at, off, allowed, wrong)


def attention_readings(evidence: AttentionEvidence) -> Readings | None:
    """The errors of the first question that is answered wrongly, or of the first one, by row; and of each question the
    output that is furthest off, expected and measured."""
    exam, i = evidence.exam, evidence.failed[0] if evidence.failed else 0
    question, (out, parts), answer = exam.questions[i], exam.right[i], evidence.answers[i]
    if answer.shape != out.shape:
        return None
    allowed = {grade: exam.allowed(grade, question, parts).worst for grade in exam.grades}
    off = _errors(out, answer)
    place = f'token of the question "{question.name}"'
    errors = errors_by_place(place, np.arange(out.shape[-2]), off, allowed, off > allowed[exam.grades[-1]])
    some = [*evidence.failed, *(j for j in range(len(exam.questions)) if j not in evidence.failed)][:_QUESTIONS]
    sides = [
        _furthest(exam.questions[j].name, exam.right[j][0], evidence.answers[j], j in evidence.failed) for j in some
    ]
    return Readings(sides=tuple(side for side in sides if side is not None), errors=errors)


def _furthest(name: str, out: Float64, answer: Float64, wrong: bool) -> Side | None:
    """The output of a question that is furthest off, by its index, as expected and as it came."""
    if answer.shape != out.shape or not out.size:
        return None
    b, h, n, e = (int(i) for i in np.unravel_index(int(np.argmax(_errors(out, answer))), out.shape))
    place = f"{name}: row {b}, head {h}, token {n}, feature {e}"
    return Side(place, f"{out[b, h, n, e]:.7g}", f"{answer[b, h, n, e]:.7g}", not wrong)


def _errors(out: Float64, answer: Float64) -> Float64:
    """|answer − out|, (b, h, n, e); NaN is right where it is expected."""
    with np.errstate(invalid="ignore"):
        return np.asarray(_lost(np.where(np.isnan(out) & np.isnan(answer), 0.0, np.abs(answer - out))))


def _lost(off: Any) -> Any:
    return np.where(np.isnan(off), np.inf, off)
