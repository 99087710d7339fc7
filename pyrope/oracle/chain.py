"""The terms of the gradients of attention, as the chain rule has them, and as they come out if a step is done in
another way: derivatives, the rotation back, the sums over tokens, and over the heads that share a key head.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from .. import definition
from ..backend import Array
from ..theta import Rope
from .responses import Function
from .steps import EXACT, SLOPES, Call, Spec, cap_slope, spread, weigh


class How(NamedTuple):
    """How a backward pass is finished: the name of the mistake for each step that is done in another way."""

    slope: str = ""  # of the softcap, or of the feature map
    turned: str = ""  # dq and dk back, dv not at all
    summed: str = ""  # over keys, for dq, or queries
    gathered: str = ""  # the heads that share a key head


GATHERED: dict[str, Function] = {  # (b, g, h/g, m, d) -> (b, g, m, d)
    "": lambda x: x.sum(axis=2),
    "shared key heads: the first query head alone": lambda x: x[:, :, 0],
    "shared key heads: the last query head alone": lambda x: x[:, :, -1],
    "shared key heads: the mean, not the sum": lambda x: x.mean(axis=2),
}
TILED, UNCROSSED, UNDIVIDED = "heads: tiled", "chain rule: not transposed", "chain rule: not divided by the normaliser"
TURNED = "chain rule: gradients of values rotated"
LAST = "blocks not added up: the last alone, from {} on"


def _turned(x: Array, at: Array, rope: Rope) -> Array:
    """R·x at positions (b, n): (b, h, n, d) -> the same."""
    return EXACT.turned(x, at[:, None], rope)


@dataclass
class Chain:
    """The terms of dq, dk and dv, in float64."""

    spec: Spec
    call: Call

    def __post_init__(self) -> None:
        spec, (self.q, self.k, self.v) = self.spec, spread(self.call)
        phi = definition.FEATURE_MAPS[spec.feature_map or "identity"]
        self.fq, self.fk, (self.q_at, self.k_at) = phi(self.q), phi(self.k), self.call.at()
        self.tq, self.tk = EXACT.turned(self.fq, self.q_at, spec.turns), EXACT.turned(self.fk, self.k_at, spec.turns)
        self.parts = weigh(spec, self.call)
        self.g = np.asarray(self.call.g, np.float64)
        self.dw = self.g @ self.v.swapaxes(-1, -2)
        self.row = (self.parts.weights * self.dw).sum(axis=-1, keepdims=True)

    @cached_property
    def slopes(self) -> dict[str, Any]:
        """Of the softcap, as a factor of ds; of the feature map, as a function of q and k."""
        if self.spec.feature_map is None:
            missing = {"chain rule: softcap's derivative missing": np.ones(1)} if self.spec.softcap else {}
            return {"": cap_slope(self.parts.scores, self.spec.softcap), **missing}
        own, name = SLOPES[self.spec.feature_map], "chain rule: feature map's derivative"
        others = {f"{name} that of {other}": slope for other, slope in SLOPES.items() if slope is not own}
        return {"": own, f"{name} missing": np.ones_like, **others}

    @cached_property
    def turns(self) -> dict[str, Function]:
        """How dq and dk are turned back, (b, h, n, d)."""
        if (rope := self.spec.turns) is None:
            return {"": lambda x: x}
        at, name = np.asarray(self.call.positions, np.int64), "chain rule: gradients"
        counted, back = np.arange(at.shape[1]), partial(_turned, rope=rope.transposed)
        return {
            "": partial(back, at=at),
            f"{name} not rotated back": lambda x: x,
            f"{name} rotated forwards, not back": partial(_turned, rope=rope, at=at),
            f"{name} rotated back by 0, 1, 2, …": partial(back, at=0 * at + counted),
            f"{name} rotated back by a count from the first position": partial(back, at=at[:, :1] + counted),
            f"{name} rotated back by the positions of row 0": partial(back, at=0 * at + at[:1]),
        }

    def _gathered(self, x: Array, how: str) -> Array:
        (b, _, m, d), g = x.shape, self.call.k.shape[1]
        if how == TILED:
            return x.reshape(b, -1, g, m, d).sum(axis=1)
        return GATHERED[how](x.reshape(b, g, -1, m, d))

    def ways(self, tensor: int) -> Iterator[tuple[How, list[Array]]]:
        """The terms of a tensor, as they are and in other ways: those that differ in the fewest steps first."""
        (n, m), shared = self.dw.shape[-2:], self.call.k.shape[1] < self.call.q.shape[1]
        gathered = ["", *([*GATHERED][1:] + [TILED] if shared else [])] if tensor else [""]
        starts = sorted({((n if tensor else m) - 1) // x * x for x in (4, 8, 16, 32, 64, 128)} - {0})
        summed = ["", *[UNCROSSED] * (tensor > 0 and n == m), *map(LAST.format, starts)]
        slopes = [*self.slopes] if tensor < 2 else ["", *[UNDIVIDED] * (self.spec.feature_map is not None)]
        turned = [*self.turns] if tensor < 2 else ["", *[TURNED] * (self.spec.rope is not None)]
        listed = itertools.product(slopes, turned, summed, gathered)
        few = (How(*x) for x in listed if x.count("") > (2 if x[2].startswith("blocks") else 1))
        for how in sorted(few, key=lambda x: -x.count("")):
            yield how, self._value(how) if tensor == 2 else self._terms(tensor, how)

    def _summed(self, x: Array, tensor: int, how: str) -> Array:
        """Weights, or their gradients, as they are multiplied from the left: over keys for dq, over queries else."""
        x = x if tensor == 0 or how == UNCROSSED else x.swapaxes(-1, -2)
        return np.where(np.arange(x.shape[-1]) >= int(how.split()[-2]), x, 0) if how.startswith("blocks") else x

    def _value(self, how: How) -> list[Array]:
        w = self.parts.weights * (self.parts.total if how.slope else 1)
        x = self._summed(w, 2, how.summed) @ self.g
        x = EXACT.turned(x, self.k_at, self.spec.rope.transposed) if how.turned and self.spec.rope else x
        return [self._gathered(x, how.gathered)]

    def _terms(self, tensor: int, how: How) -> list[Array]:
        turn, (other, plain) = self.turns[how.turned], ((self.tk, self.fk), (self.tq, self.fq))[tensor]
        if self.spec.feature_map is not None:
            share = np.where(self.parts.seen, 1 / np.where(self.parts.total == 0, 1, self.parts.total), 0)
            slope = self.slopes[how.slope]((self.q, self.k)[tensor])
            first, second = (self._summed(x * share, tensor, how.summed) for x in (self.dw, -self.row))
            both = [turn(first @ other) * slope, second @ plain * slope]
        else:
            ds = self.parts.weights * self.slopes[how.slope] * self.spec.scale
            both = [turn(self._summed(ds * x, tensor, how.summed) @ other) for x in (self.dw, -self.row)]
        return [x if tensor == 0 else self._gathered(x, how.gathered) for x in both]

    def terms(self, tensor: int) -> list[Array]:
        """The right ones."""
        return next(self.ways(tensor))[1]
