"""What a candidate for attention is asked: `Question`, and `Questions`, which draws them for a `Spec`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .. import checks
from ..backend import Array
from ..theta import frequencies
from .floats import UNIT
from .truth import Spec

TOKENS = 2049  # of the longest calls with all heads
LENGTH = 24  # tokens of most questions
LARGE = 6144.0  # a score whose difference to −6144 is above 10000, and times √64 within float16
ORDERS, FAR = "positions in other orders", "far apart"
LARGE_SCORES, PRODUCTS = "large scores", "products beyond float16"  # the second: with scores, scaled, within it
MANY = "many small weights"  # the question of which a low-precision sum loses some


@dataclass(frozen=True)
class Question:
    """What is given to a candidate."""

    name: str
    q: Array  # (b, h, n, d), of the candidate's dtype
    k: Array  # (b, g, m, d)
    v: Array  # (b, g, m, d), ±1
    options: dict[str, Array] = field(default_factory=dict)  # mask, segments
    positions: Array | None = None  # (b, m), if they are given
    calls: tuple[int, ...] = ()  # how many tokens each call of a candidate with a cache gets
    random: bool = True  # values are random signs: errors cancel, so that their mean square says more than the worst
    demand: str = (
        ""  # what was asked for by name: the candidate cannot be judged if it answers no question of this kind
    )

    @property
    def arguments(self) -> dict[str, Array]:
        given = {"q": self.q, "k": self.k, "v": self.v}
        return given if self.positions is None else given | {"positions": self.positions}

    @property
    def shapes(self) -> str:
        """Those of its arguments, in words."""
        others = {**({} if self.positions is None else {"positions": self.positions}), **self.options}
        more = "".join(f", {name} {x.shape}" for name, x in others.items())
        return f"q {self.q.shape}, k and v {self.k.shape}{more}"

    def last(self, stop: int, count: int) -> Question:
        """The same for the queries before this one alone, so many of them, who see none of the keys after it."""
        n, m = self.q.shape[-2], self.k.shape[-2]
        keys = slice(0, m - n + stop)
        positions = None if self.positions is None else self.positions[:, keys]
        q = self.q[:, :, max(stop - count, 0) : stop]
        return replace(self, q=q, k=self.k[:, :, keys], v=self.v[:, :, keys], positions=positions)

    def first(self, n: int) -> Question:
        """The first tokens of as many queries as keys."""
        positions = None if self.positions is None else self.positions[:, :n]
        return replace(self, q=self.q[:, :, :n], k=self.k[:, :, :n], v=self.v[:, :, :n], positions=positions)

    def wide(self) -> list[Array]:
        """The arguments, in float64 but for the positions."""
        return [x if name == "positions" else x.astype(np.float64) for name, x in self.arguments.items()]

    @property
    def plain(self) -> bool:
        """Whether nothing is special about the call but its numbers: one that any attention must take."""
        special = self.options or self.calls or self.name in (ORDERS, FAR)
        return bool(not special and self.q.shape[-2] == self.k.shape[-2])

    @property
    def telling(self) -> bool:
        """Whether most mistakes would show: not in one token, and not in scores of all or nothing."""
        return bool(self.k.shape[-2] > 2 and (self.random or self.name == MANY))

    @property
    def effort(self) -> int:
        """About how long it takes to predict an answer, in scores: a call takes as long as 20,000 of them."""
        b, h, n, _ = self.q.shape
        calls = len(self.calls) or 1
        return int(20_000 * calls + b * h * n * self.k.shape[-2])

    @property
    def short(self) -> bool:
        return bool(self.k.shape[-2] <= 64)


class Questions:
    """Draws questions. The numbers come from the same seed each time, so that a report can be had again."""

    def __init__(self, spec: Spec, dtype: np.dtype[Any], max_position: int) -> None:
        self.spec, self.dtype, self.rng = spec, dtype, np.random.default_rng(2104)
        self.max_position = checks.integer("max_position", max_position, 512, checks.MAX_POSITION)
        self.few_shapes = False  # whether each new shape is compiled first, so that trials have few of them

    def _draw(self, b: int, heads: int, n: int, signs: bool = False) -> Array:
        x = self.rng.standard_normal((b, heads, n, self.spec.head_dim))
        return (np.sign(x) if signs else x * self._unit()).astype(self.dtype)

    def _unit(self) -> float:
        """What makes scores of a size of about 1."""
        return float((self.spec.scale * self.spec.head_dim**0.5) ** -0.5)

    def _positions(self, b: int, n: int, far: bool = False) -> Array | None:
        if self.spec.rope is None:
            return None
        if far:
            some = [np.sort(self.rng.choice(self.max_position, n, replace=False)) for _ in range(b)]
            return np.array(some, np.int64)
        return np.arange(n) + np.resize(self.spec.starts, b)[:, None]

    def random(self, name: str, n: int, *, queries: int | None = None, batch: int = 3, far: bool = False) -> Question:
        """Random numbers, values ±1, at consecutive positions or far apart."""
        q = self._draw(batch, self.spec.heads, n if queries is None else min(n, queries))
        k, v = self._draw(batch, self.spec.key_heads, n), self._draw(batch, self.spec.key_heads, n, signs=True)
        if self.spec.feature_map.startswith("relu"):  # or many would have no feature in common, and nothing to sum
            q, k = q + self.dtype.type(1), k + self.dtype.type(1)
        return Question(name, q, k, v, positions=self._positions(batch, n, far))

    @functools.cached_property
    def tokens(self) -> Question:
        """As many tokens as the longest calls have, of which others are the first ones."""
        return self.random("", TOKENS, batch=1)

    def orders(self, n: int) -> Question:
        """Positions that do not rise with the tokens: they start again, repeat after padding, fall."""
        counted = np.arange(n)
        rows = (counted % (n // 2), np.maximum(counted - 5, 0), counted[::-1] + 2)
        return replace(self.random(ORDERS, n), positions=np.stack(rows))

    def small(self, size: float = 0.3, name: str = "small features") -> Question:
        """Features so small that the first denominators are below 1, about 0.3, or so, at the first token."""
        question = self.random(name, 7, batch=2)
        size, phi = (size / self.spec.head_dim) ** 0.5, self.spec.feature_map
        features = [size * self.rng.uniform(0.5, 1.5, x.shape) for x in (question.q, question.k)]
        q, k = ({"relu": x, "relu2": np.sqrt(x)}.get(phi, np.log(x)).astype(self.dtype) for x in features)
        return replace(question, q=q, k=k)

    def at_zero(self) -> Question:
        """Float32 numbers at position 0, where angles have no error: what is off there comes from elsewhere."""
        question = self.random("all at position 0", LENGTH)
        q, k = (x.astype(np.float32).astype(self.dtype) for x in (question.q, question.k))
        return replace(question, q=q, k=k, positions=np.zeros((3, LENGTH), np.int64))

    def sharp(self, n: int) -> Question:
        """Scores of a size of about 6, of which roundings show most."""
        question = self.random("sharp", n)
        return replace(question, q=self._draw(3, self.spec.heads, n) * self.dtype.type(6))

    def _along(self, b: int, heads: int, sizes: Array) -> Array:
        """Vectors (b, heads, n, d) along one direction that RoPE hardly turns, with q·k·scale = size of q × of k."""
        x = np.zeros((b, heads, sizes.shape[-1], self.spec.head_dim))
        x[..., self._still()] = sizes[..., None, :] * self.spec.scale**-0.5
        return x.astype(self.dtype)

    def _still(self) -> int:
        """The feature that RoPE turns least."""
        rope = self.spec.rope
        if rope is None:
            return 0
        if rope.width < rope.head_dim:
            return rope.width if rope.start == 0 else 0
        return rope.pairs - 1 if rope.layout.startswith("half") else rope.width - 2

    def _turns(self, n: int) -> float:
        """By how much RoPE turns the still direction over so many tokens."""
        rope = self.spec.rope
        return 0.0 if rope is None or rope.width < rope.head_dim else float(frequencies(rope)[-1]) * n

    def large(self, score: float = LARGE, name: str = LARGE_SCORES) -> Question | None:
        """Scores of ±6144, or so, values of the same sign: a query that sees no positive key must return −1."""
        n = 2 * (min(LENGTH, self.spec.window or LENGTH) // 2) or 2
        if self._turns(n) > 0.5:
            return None
        size = math.sqrt(score)
        signs = np.array([np.ones(n), np.where(np.arange(n) < n // 2, -1.0, 1.0)])
        q, k = self._along(2, self.spec.heads, np.full((2, n), size)), self._along(2, self.spec.key_heads, signs * size)
        v = np.broadcast_to(signs[:, None, :, None], k.shape).astype(self.dtype)
        return Question(name, q, k, v, positions=self._positions(2, n), random=False)

    def saturated(self) -> Question | None:
        """Scores of 3 to 6 times the softcap, which all become nearly the same: values −1 for the lesser ones."""
        cap, n = self.spec.softcap, 16
        if cap is None or self._turns(n) > 0.3 or (self.spec.window or 4) < 4:
            return None
        sizes = np.broadcast_to(3.0 + np.arange(n) % 4, (1, n))
        q = self._along(1, self.spec.heads, np.full((1, n), math.sqrt(cap)))
        k = self._along(1, self.spec.key_heads, sizes * math.sqrt(cap))
        v = np.broadcast_to(np.where(sizes > 4, 1, -1)[:, None, :, None], k.shape).astype(self.dtype)
        return Question("saturated scores", q, k, v, positions=self._positions(1, n), random=False)

    def many(self) -> Question:
        """One weight near 1 and 127 that a low-precision sum loses, one by one: half an ulp of 1 and less."""
        n, sizes = 128, []
        for name in ("bfloat16", "float16"):
            score = -math.log(UNIT[name] / 2.5)
            cap = self.spec.softcap
            score = score if cap is None else cap * math.atanh(min(score / cap, 0.9))
            sizes.append(math.sqrt(score))
        first = np.zeros((2, n))
        first[:, 0] = sizes
        q = self._along(2, self.spec.heads, np.broadcast_to(np.array(sizes)[:, None], (2, n)))
        k = self._along(2, self.spec.key_heads, first)
        v = np.ones(k.shape, self.dtype)
        v[..., 0, :] = -1
        return Question(MANY, q, k, v, positions=self._positions(2, n), random=False)

    def edge(self, cache: bool) -> Question | None:
        """A window too long for the random questions: large scores at its edge alone."""
        w = self.spec.window
        if w is None or w > (16384 if cache else 512) or self._turns(w) > 0.5:
            return None
        n, queries = w + 12, 8 if cache else w + 12
        score = math.log(w) + 1
        near = np.zeros((1, n))
        near[:, :14] = 1.0  # the edges of the last 8 queries
        q = self._along(1, self.spec.heads, np.full((1, queries), math.sqrt(score)))
        k = self._along(1, self.spec.key_heads, near * math.sqrt(score))
        v = self._draw(1, self.spec.key_heads, n, signs=True)
        return Question("edge of the window", q, k, v, positions=self._positions(1, n), random=False)

    def masked(self, name: str, n: int) -> Question:
        question = self.random(name, n)
        mask = self.rng.random((3, 1, n, n)) < 0.6
        mask[:, :, 5] = False  # a row that sees nothing
        return replace(question, options={"mask": mask})

    def padded(self, n: int, name: str = "padding") -> Question:
        """Padding on the left, of another length in each row, up to more than a block; positions begin after it."""
        question, pad = self.random(name, n), np.array([0, 3, n - 6])
        visible = np.arange(n) >= pad[:, None]
        positions = None if question.positions is None else np.maximum(np.arange(n) - pad[:, None], 0)
        mask = np.broadcast_to(visible[:, None, None, :], (3, 1, n, n)).copy()
        return replace(question, positions=positions, options={"mask": mask})

    def packed(self, n: int) -> Question:
        question = self.random("packed", n)
        cuts = np.array([[n // 3, n // 2], [1, n - 1], [n, n]])
        segments = (np.arange(n) >= cuts[:, :1]).astype(np.int64) + (np.arange(n) >= cuts[:, 1:])
        begins = (cuts * (np.arange(n)[:, None, None] >= cuts)).max(axis=-1).T  # where each token's segment begins
        positions = None if question.positions is None else np.arange(n) - begins
        return replace(question, positions=positions, options={"segments": segments})
