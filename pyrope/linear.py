"""Linear attention with rotary positions, Eq. (17) to Eq. (19).

With a feature map φ the similarity of query and key is φ(q)ᵀφ(k), and two sums over the keys, S = ΣR(m)φ(k)vᵀ and
z = Σφ(k), serve every query. Eq. (19) rotates the numerator only: the denominator stays positive where φ is, but
weights may be negative and need not add up to one. The rotation leaves out the rope's attention factor, which would
scale the outputs by a². If not causal, S and z come first; if causal, tokens are taken by chunks: matrix products in a
chunk, S and z between chunks, and a chunk of one token is the recurrent form. The public functions check their
arguments; `sums`, `read` and `step`, the core, do not.

float16 and bfloat16 are computed in float32 and rounded once, float32 and float64 in their own dtype. Keys are summed
by chunks: over 262,144 positions a float32 output is within 3e-6 of the largest in its row, token by token within 3e-5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from . import checks
from .backend import Array, namespace, to_numpy
from .definition import FEATURE_MAPS as FEATURE_MAPS  # models name them, too
from .rotation import Tables, check_fit, rotation_tables, turn
from .softmax import check_heads
from .theta import Rope, check_rope
from .tiles import cuts, each

FeatureMap: TypeAlias = str | Callable[[Array], Array]
_Pair: TypeAlias = tuple[Array, Array]
_CHUNK = 64  # tokens: longer chunks multiply more, shorter ones spend more on calls
_STRETCH = 32  # chunks that are worked on at a time, so that they stay in the caches
_SMALL = 2**16  # elements of the queries: with fewer, threads cost more than they spare


@dataclass(frozen=True, eq=False)
class LinearState:
    """The sums over the keys and values so far, of constant size; the states of two parts add up: a + b."""

    numerator: Array  # (…, g, d, c): S, with c features of a value
    denominator: Array  # (…, g, d): z
    count: int  # of tokens
    rope: Rope | None
    feature_map: FeatureMap

    def __add__(self, other: LinearState) -> LinearState:
        """Both states must be of one rope, feature map, shape, dtype and backend."""
        checks.instance("state", other, LinearState)
        namespace(here=self.numerator, state=other.numerator)
        own, others = ((x.rope, x.feature_map, x.numerator.shape, x.numerator.dtype) for x in (self, other))
        if own != others:
            raise ValueError(f"the state belongs to another rope, feature map, shape or dtype: {others}, not {own}")
        total = self.numerator + other.numerator, self.denominator + other.denominator
        return LinearState(*total, self.count + other.count, self.rope, self.feature_map)


@dataclass(frozen=True)
class LinearRule:
    """What all tokens share."""

    dtype: np.dtype[Any]  # of the arithmetic
    tables: Tables | None  # of all tokens, without the attention factor; None: Eq. (18)
    feature_map: FeatureMap = "elu+1"
    denominators: str = "positive"


@np.errstate(all="ignore")  # what is not finite is refused in the end
def linear_attention(
    q: Array, k: Array, v: Array, positions: Any = None, rope: Rope | None = None, *, causal: bool,
    feature_map: FeatureMap = "elu+1", denominators: str = "positive",
) -> Array:  # fmt: skip
    """Eq. (19), or without rope Eq. (18): q (…, h, n, d), k (…, g, n, d), v (…, g, n, c) -> (…, h, n, c).

    >>> x = np.ones((1, 3, 2))
    >>> linear_attention(x, x, x, range(3), Rope(2, 10000.0, "half"), causal=True)[0, :, 0].round(3)
    array([1.   , 0.77 , 0.375])

    ``feature_map`` is "elu+1", "relu", "relu2", "exp", "identity" or a function on arrays (…, n, d) that treats every
    token by itself, since it is called with some of them at a time. ``causal`` is by the order of the tokens.
    Denominators that are not positive and finite raise, and so do those below tiny/ε, whose last digits are lost;
    ``denominators="nonzero"`` allows negative ones. 0/0 is 0: a row without keys, or whose keys all map to 0 in the
    dtype of the arithmetic, as padding of −inf does but for identity, attends to nothing. Values must be
    finite, since those to come within a chunk are multiplied too, by 0.
    """
    rule = checked_rule((q, k, v), causal, positions, rope, feature_map, denominators)
    # Eq. (18): if not causal, the same sums for every query
    out = step(q, k, v, zeros(k, v, rule), rule) if causal else read(q, sums(k, v, rule), rule)
    return checked_outputs(out, rule, on_host=False)


@np.errstate(all="ignore")  # what is not finite is refused in the end
def linear_step(
    q: Array, k: Array, v: Array, positions: Any = None, rope: Rope | None = None, *, state: LinearState | None = None,
    feature_map: FeatureMap = "elu+1", denominators: str = "positive",
) -> tuple[Array, LinearState]:  # fmt: skip
    """Causal `linear_attention` to these tokens and those of the state, and the state to go on from; any n, also 1.

    >>> q = k = v = np.ones((2, 5, 4))
    >>> first, state = linear_step(q[:, :3], k[:, :3], v[:, :3])
    >>> last, state = linear_step(q[:, 3:], k[:, 3:], v[:, 3:], state=state)
    >>> last.shape, state.count
    ((2, 2, 4), 5)
    """
    rule = checked_rule((q, k, v), True, positions, rope, feature_map, denominators)
    after = LinearState(*zeros(k, v, rule), q.shape[-2], rope, feature_map)
    if state is not None:
        after += state
    out = step(q, k, v, (after.numerator, after.denominator), rule)
    return checked_outputs(out, rule, on_host=False), after


def checked_rule(
    qkv: tuple[Array, Array, Array], causal: Any, positions: Any, rope: Any, feature_map: Any, denominators: Any
) -> LinearRule:
    """The rule, if the arguments are what `linear_attention` says."""
    (q, k, v), tables = qkv, None
    namespace(q=q, k=k, v=v)
    dtype, n = check_heads(q, k, v), k.shape[-2]
    if checks.flag("causal", causal) and q.shape[-2] != n:
        raise ValueError(f"causal attention needs as many queries as keys, had {q.shape[-2]} and {n}")
    if not callable(feature_map):
        checks.choice("feature_map", feature_map, tuple(FEATURE_MAPS))
    checks.choice("denominators", denominators, ("positive", "nonzero"))
    if (positions is None) != (rope is None):
        raise ValueError("give both positions and rope, for Eq. (19), or neither, for Eq. (18)")
    if rope is not None:
        tables = rotation_tables(positions, check_rope(rope).rotation_only, like=k)
        if not tables.straight.shape[-2:-1] == q.shape[-2:-1] == k.shape[-2:-1]:
            shapes = f"had shape {tables.positions.shape}, q {q.shape} and k {k.shape}"
            raise ValueError(f"positions must be (…, n), one for each query and key: {shapes}")
        check_fit(q, tables)
        check_fit(k, tables)
    return LinearRule(dtype, tables, feature_map, denominators)


# ── The core: arguments are not checked from here on; S is (…, g, d, c), z (…, g, d) ─────────────────────────────────


def zeros(k: Array, v: Array, rule: LinearRule) -> _Pair:
    """S and z before the first token of k (…, g, n, d) and v (…, g, n, c)."""
    named = isinstance(rule.feature_map, str)
    width = k.shape[-1] if named else _given(rule.feature_map, k[..., :1, :].astype(rule.dtype)).shape[-1]
    xp, shape = namespace(k), (*k.shape[:-2], width)
    return xp.zeros((*shape, v.shape[-1]), rule.dtype), xp.zeros(shape, rule.dtype)


def sums(k: Array, v: Array, rule: LinearRule) -> _Pair:
    """S and z of all keys (…, g, n, d) and values (…, g, n, c)."""
    s, z = zeros(k, v, rule)

    def some(piece: tuple[slice, slice]) -> None:
        heads = piece[1]
        for tokens in cuts(k.shape[-2], _CHUNK * _STRETCH):
            phi, turned = _features(k[..., heads, tokens, :], rule, tokens)
            s[..., heads, :, :] += turned.swapaxes(-1, -2) @ v[..., heads, tokens, :].astype(rule.dtype, copy=False)
            z[..., heads, :] += phi.sum(axis=-2)

    _by_heads(some, k, k.shape[-3], rule)
    return s, z


def read(q: Array, state: _Pair, rule: LinearRule) -> Array:
    """Every query (…, h, n, d) against the same S and z: (…, h, n, c)."""
    out = namespace(q).empty((*q.shape[:-1], state[0].shape[-1]), q.dtype)

    def some(piece: tuple[slice, slice]) -> None:
        heads, key_heads = piece
        s, z = state[0][..., key_heads, None, :, :], state[1][..., key_heads, None, None, :]
        for tokens in cuts(q.shape[-2], _CHUNK * _STRETCH):
            phi, turned = _features(q[..., heads, tokens, :], rule, tokens)
            (*batch, h, n, d), g = phi.shape, s.shape[-4]
            grouped = (*batch, g, h // g, n, d)
            numerator = turned.reshape(grouped) @ s  # Eq. (19), without rope Eq. (18)
            _divide(numerator, phi.reshape(grouped), z, rule, out[..., heads, tokens, :])

    _by_heads(some, q, state[0].shape[-3], rule)
    return checked_outputs(out, rule, on_host=True)


def step(q: Array, k: Array, v: Array, state: _Pair, rule: LinearRule) -> Array:
    """Every query against the keys up to it and S and z: (…, h, n, c); the keys are added to S and z."""
    out, n, (s, z) = namespace(q).empty((*q.shape[:-1], v.shape[-1]), q.dtype), q.shape[-2], state
    even = n - n % _CHUNK
    parts = cuts(even, _CHUNK * _STRETCH) + ([slice(even, n)] if even < n else [])

    def some(piece: tuple[slice, slice]) -> None:
        heads, key_heads = piece
        before = s[..., key_heads, :, :], z[..., key_heads, :]
        for tokens in parts:
            queries, keys = q[..., heads, tokens, :], k[..., key_heads, tokens, :]
            terms = _features(queries, rule, tokens), _features(keys, rule, tokens)
            values = v[..., key_heads, tokens, :].astype(rule.dtype, copy=False)
            numerator, phi, total, before = _chunks(*terms, values, before, min(_CHUNK, tokens.stop - tokens.start))
            _divide(numerator, phi, total, rule, out[..., heads, tokens, :])
        s[..., key_heads, :, :], z[..., key_heads, :] = before

    _by_heads(some, q, k.shape[-3], rule)
    return checked_outputs(out, rule, on_host=True)


def _chunks(q: _Pair, k: _Pair, v: Array, before: _Pair, size: int) -> tuple[Array, Array, Array, _Pair]:
    """The numerators of Eq. (19), φ(q), what it is multiplied with in the denominators, and S and z after these tokens.

    q and k are φ(x) and R(m)φ(x), (…, heads, tokens, d); all chunks of this size are multiplied at once.
    """
    xp, (s, z), g = namespace(v), before, v.shape[-3]

    def cut(x: Array) -> Array:  # (…, heads, tokens, any) -> (…, g, heads/g, chunks, size, any)
        return x.reshape(*x.shape[:-3], g, x.shape[-3] // g, x.shape[-2] // size, size, x.shape[-1])

    (phi_q, turned_q), (phi_k, turned_k), values = map(cut, q), map(cut, k), cut(v)
    lower, columns = xp.tril(xp.ones((size, size), v.dtype)), turned_k.swapaxes(-1, -2)
    weights = turned_q @ columns
    weights *= lower
    numerator = weights @ values  # Eq. (19): the keys of this chunk,
    states, totals = columns @ values, lower @ phi_k  # these not rotated
    for i in range(states.shape[-3]):  # what there was before each chunk
        states[..., 0, i, :, :], s = s, s + states[..., 0, i, :, :]
        totals[..., 0, i, :, :] += z[..., None, :]
        z = totals[..., 0, i, -1, :]
    numerator += turned_q @ states  # and all before it
    return numerator, phi_q, totals, (s, z)


def _by_heads(work: Callable[[tuple[slice, slice]], None], x: Array, g: int, rule: LinearRule) -> None:
    """Calls ``work((heads, key_heads))`` for one of the g key heads after the other, or for all if x, (…, h, n, d), is
    small: on every core, but for a feature map of the caller's, which may not be made for several threads."""
    h, on_host, named = x.shape[-3], namespace(x) is np, isinstance(rule.feature_map, str)
    by_head = rule.tables is not None and rule.tables.straight.ndim == x.ndim  # positions differ by head
    key_heads = cuts(g, 1 if on_host and not by_head and x.size > _SMALL else g)
    pieces = [(slice(i.start * h // g, i.stop * h // g), i) for i in key_heads]
    each(work, pieces, spread=on_host and named, products=True)


def _features(x: Array, rule: LinearRule, tokens: slice) -> _Pair:
    """φ(x) and R(m)φ(x) of these tokens: x (…, tokens, d) -> two of them."""
    x, named = x.astype(rule.dtype, copy=False), isinstance(rule.feature_map, str)
    phi = FEATURE_MAPS[str(rule.feature_map)](x) if named else _given(rule.feature_map, x)
    if rule.tables is None:
        return phi, phi
    tables = rule.tables.part(tokens)
    if not named:
        check_fit(phi, tables)
    return phi, turn(phi, tables, namespace(phi).empty(phi.shape, phi.dtype))


def _given(feature_map: Any, x: Array) -> Array:
    """φ(x) by a function of the caller's, which may change the width: (…, n, d) -> (…, n, any)."""
    phi = feature_map(x.copy())  # on a copy, and copied, since it may work in place or return the same memory
    if phi is None:
        raise TypeError("feature_map must return an array, but it returned None")
    namespace(x=x, **{"what feature_map returns": phi})
    if (phi.shape[:-1], phi.dtype) != (x.shape[:-1], x.dtype):
        raise ValueError(f"feature_map must keep {x.dtype} and {x.shape[:-1]}, returned {phi.dtype} {phi.shape}")
    return phi.copy()


def _divide(numerator: Array, phi: Array, total: Array, rule: LinearRule, out: Array) -> None:
    """numerator (…, c) over Σ phi·total (…, d), into out (…, h, n, c); 0/0 is 0, and what is wrong NaN."""
    xp, limits = namespace(phi), np.finfo(rule.dtype)
    denominator = xp.einsum("...d,...d->...", phi, total)[..., None]
    # φ(q)ᵀφ(k) of small features, as of inputs around −52 in float32, is subnormal: a number of few bits, whose
    # quotients are off by a tenth or more. From tiny/ε on, every product that matters in the sum is a normal one.
    size, least = denominator if rule.denominators == "positive" else abs(denominator), float(limits.tiny / limits.eps)
    good = (size >= least) & (size < np.inf)
    if xp is not np or not good.all():
        # Of smaller features it is 0, which must not pass for that of a row that sees nothing.
        empty = ~((phi != 0) & (total != 0)).any(axis=-1, keepdims=True) & (numerator == 0).all(axis=-1, keepdims=True)
        denominator = xp.where(good | empty, denominator + empty, np.nan)
    numerator /= denominator
    if xp is not np or not np.isfinite(numerator).all():
        numerator = xp.where(xp.isfinite(numerator), numerator, np.nan)
    out[...] = numerator.reshape(out.shape)


def checked_outputs(out: Array, rule: LinearRule, on_host: bool) -> Array:
    """out (…, h, n, c), if nothing in it is NaN, the mark of a wrong output: looked at on the host, or on a device."""
    xp = namespace(out)
    if (xp is np) == on_host and bool((wrong := xp.isnan(out)).any()):
        where, limits = np.argwhere(to_numpy(wrong.any(axis=-1)))[0].tolist(), np.finfo(rule.dtype)
        least = f"at least {float(limits.tiny / limits.eps):.2g} in {rule.dtype}, below which digits are lost"
        rules = f"denominators must be finite and {rule.denominators}, {least}; values and their weighted sums must be"
        raise ValueError(f"{rules} finite: the output at {tuple(where)} is wrong")
    return out
