"""What the operator R(m) of a black box shows by itself: its pairs, direction, frequencies, offset and factor.

Two unit vectors that reach the same two outputs make a pair; the phase of a pair over positions that double each time
gives its frequency, more exactly with each position. Nothing is expected beforehand.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .floats import Float64, Int64
from .probe import Probe

_TWO_PI = 2 * np.pi


class Pairs(NamedTuple):
    """Which features turn together, as R(m) shows."""

    reads: Int64  # (k, 2)
    writes: Int64  # (k, 2)
    odd: int  # features that belong to no pair and do not stay either
    skew: float  # how far R is from a rotation times a number within the pairs


class Measured(NamedTuple):
    """What the operator shows without any expectation."""

    pairs: Pairs
    theta: Float64  # (k,), positive unless a pair turns against the others
    uncertainty: Float64  # (k,)
    direction: int
    offset: float
    start: float  # how far phases at position 0 are from what the offset explains
    factor: float
    linear_up_to: int  # the last position up to which phases grow in proportion
    unit: float  # unit roundoff of what was measured

    @property
    def legible(self) -> bool:
        """Whether the pairs turn, be it coarsely: else the frequencies, the offset and the factor mean nothing."""
        return math.isfinite(self.factor) and self.pairs.skew <= 0.1 * max(1.0, self.factor)


def find_pairs(operator: Float64) -> Pairs:
    """The pairs of an operator (n, d, d): columns that reach the same two rows."""
    support = np.maximum(np.fmax.reduce(operator), -np.fmin.reduce(operator)) > 1e-9  # NaN is not looked at
    rows = [tuple(np.flatnonzero(column).tolist()) for column in support.T]
    reads, writes, odd = [], [], 0
    for a, reached in enumerate(rows):
        if len(reached) == 2:
            partners = [b for b, other in enumerate(rows) if other == reached]
            if len(partners) == 2 and partners[0] == a:
                reads.append(partners)
                writes.append(list(reached))
            odd += len(partners) != 2
        elif reached != (a,):
            odd += 1
    both = np.array(reads, np.int64).reshape(-1, 2), np.array(writes, np.int64).reshape(-1, 2)
    (aa, ab), (ba, bb) = _blocks(operator, *both)
    skew = np.nanmax(np.abs(np.stack((aa - bb, ab + ba))), initial=0.0)
    return Pairs(*both, odd, float(skew))


def _blocks(operator: Float64, reads: Int64, writes: Int64) -> Any:
    """The 2×2 block of each pair: [to][from] -> (n, k)."""
    return [[operator[:, writes[:, to], reads[:, source]] for source in (0, 1)] for to in (0, 1)]


def _turns(operator: Float64, pairs: Pairs) -> Any:
    """What each pair is multiplied with, as a complex number: (n, k)."""
    (aa, ab), (ba, bb) = _blocks(operator, pairs.reads, pairs.writes)
    return (aa + bb) / 2 + 1j * (ba - ab) / 2


def phases(operator: Float64, pairs: Pairs) -> Float64:
    """How far each pair is turned, (n, k)."""
    return np.asarray(np.angle(np.nan_to_num(_turns(operator, pairs))))


def measure(operator: Float64, positions: Int64, unit: float, step: float = 0.0) -> Measured:
    """Pairs, frequencies, offset and factor from R(m) at positions that begin with 0 and at most double."""
    pairs = find_pairs(operator)
    z, phase = _turns(operator, pairs), phases(operator, pairs)
    theta, uncertainty, limit = _unwrap(phase, positions, unit, step)
    direction = -1 if np.sum(np.sign(theta)) < 0 else 1
    size, rows = np.abs(z), positions <= max(limit, 1)
    # Near the axes one and the same rounding comes again and again.
    mixed = rows[:, None] & (np.abs(np.sin(2 * phase)) > 0.5)
    chosen = size[mixed] if mixed.sum() > 16 else size[rows]
    if not chosen.size:  # nothing turns
        chosen = operator.diagonal(axis1=1, axis2=2)
    factor = float(np.nanmedian(chosen)) if np.isfinite(chosen).any() else math.nan
    offset = offset_of(direction * phase[0], direction * theta, unit)
    start = float(np.abs(_wrapped(direction * phase[0] - offset * direction * theta)).max(initial=0.0))
    return Measured(pairs, direction * theta, uncertainty, direction, offset, start, factor, limit, unit)


def growth_of(operator: Float64, pairs: Pairs, positions: Int64) -> Float64 | None:
    """The logarithm of what the length of each pair is multiplied with from position to position, (k,), if lengths grow
    or shrink in this way and no other; None if they stay."""
    size = np.abs(np.nan_to_num(_turns(operator, pairs)))
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.nan_to_num(np.log(size) - np.log(size[0]), nan=-99.0, posinf=99.0, neginf=-99.0)
    if not size.size or np.abs(logs).max() < 0.05:
        return None
    known = np.abs(logs) < 8  # beyond it the smallest numbers of a narrow dtype would show
    last = known.shape[0] - 1 - np.argmax(known[::-1], axis=0)
    columns = np.arange(size.shape[1])
    growth = logs[last, columns] / np.maximum(positions[last], 1)
    straight = np.abs(logs - positions[:, None] * growth) <= 0.03 + 0.01 * np.abs(logs)
    return np.asarray(growth) if (straight | ~known).all() else None


def axis_of_pairs(probe: Probe, measured: Measured) -> Int64:
    """Which axis of the positions turns each pair, (k,): the one that, alone, turns it as far as all do."""
    top, axes, far = probe.max_position, probe.axes or 1, []
    at = np.array([0, top, top // 2, top // 3, min(7, top)])
    for axis in range(axes):
        positions = np.zeros((axes, len(at)), np.int64)
        positions[axis] = at
        turned = phases(probe.operator(positions), measured.pairs)
        off = turned - turned[0] - measured.direction * at[:, None] * measured.theta
        far.append(np.square(np.abs(np.exp(1j * off) - 1)).sum(axis=0))
    return np.asarray(np.argmin(far, axis=0))


def _unwrap(phase: Float64, positions: Int64, unit: float, step: float) -> tuple[Float64, Float64, int]:
    """Frequencies (k,) with their uncertainty, and the last position up to which phases are proportional to it."""
    theta, limit = np.zeros(phase.shape[1]), int(positions[0])
    uncertainty = np.full(phase.shape[1], np.inf)
    for j in range(1, len(positions)):
        m = int(positions[j])
        rest = _wrapped(phase[j] - phase[0] - theta * m)
        if j > 1 and (np.abs(rest) > 0.3 + 4 * unit).any():
            break
        # Components are rounded relative to themselves, so that a phase is known best near the axes: but no better than
        # a 16th of that once it has left the first one, where angles may have roundings of their own.
        known = np.maximum(np.abs(np.sin(2 * phase[j])), np.minimum(1 / 16, np.abs(theta * m)))
        noise = unit * (known + np.abs(np.sin(2 * phase[0]))) + 2 * step + 1e-15
        better = noise / m <= uncertainty
        theta = np.where(better, theta + rest / m, theta)
        uncertainty = np.where(better, noise / m, uncertainty)
        limit = m
    return theta, uncertainty, limit


def _wrapped(angle: Any) -> Any:
    return angle - _TWO_PI * np.rint(angle / _TWO_PI)


def offset_of(phase: Float64, theta: Float64, unit: float) -> float:
    """By how many positions the phases at position 0 are ahead: slow pairs first, which are unambiguous."""
    if not (np.abs(phase) > 8 * unit).any():
        return 0.0
    offset = 0.0
    for i in np.argsort(np.abs(theta)):
        if theta[i] > 1e-9 and (abs(phase[i]) > 8 * unit or offset):
            offset = (phase[i] + _TWO_PI * round((offset * theta[i] - phase[i]) / _TWO_PI)) / theta[i]
    return float(round(offset) if abs(offset - round(offset)) < 0.05 else offset)
