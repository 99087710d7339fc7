"""Linear attention with rotary positions, Eq. (17) to Eq. (19), in four equal forms.

With a feature map φ the similarity of query and key is φ(q)ᵀφ(k), and two sums over the keys, S = ΣR(m)φ(k)vᵀ and
z = Σφ(k), serve every query. Eq. (19) rotates the numerator only: the denominator stays positive where φ is, but
weights may be negative and need not add up to one. The rotation leaves out the rope's attention factor, which would
scale the outputs by a². The forms: "quadratic", the definition, all weights at once; "parallel", not causal, S and z
first; "chunked", causal, matrix products in a chunk, S and z between chunks; "recurrent", chunks of one token.

float16 and bfloat16 are computed in float32 and rounded once, float32 and float64 in their own dtype. Keys are summed
by chunks: over 262,144 positions a float32 output is within 3e-6 of the largest in its row, token by token within 3e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from . import checks, definition
from .backend import Array, compute_dtype, given, namespace, on_host, result_array, to_numpy
from .phase import check_positions
from .rotation import Tables, check_tables, rotate, rotate_complex, rotation_tables
from .theta import Rope, check_rope
from .tiles import each

FeatureMap: TypeAlias = str | Callable[[Array], Array]
FORMS = {True: ("chunked", "recurrent", "quadratic"), False: ("parallel", "quadratic")}  # by causal, the default first
CHUNK = 192  # tokens: longer chunks multiply more, shorter ones spend more on calls
_STRETCH = 4096  # tokens that share their tables
_SMALL = 2**16  # elements of the queries in a chunk: of fewer, calls cost too much beside arithmetic
_Spare: TypeAlias = dict[Any, Array]  # memory by its use


def _elu_plus_one(x: Array) -> Array:
    """x + 1 above 0, eˣ below (Katharopoulos et al., arXiv 2006.16236), in half the time of the definition's form."""
    xp = namespace(x)
    low = xp.minimum(x, 0)  # eˣ above 0 is not needed, and could overflow
    return xp.add(low, xp.maximum(x, 0), out=xp.exp(low, out=low))


FEATURE_MAPS = definition.FEATURE_MAPS | {"elu+1": _elu_plus_one}


@dataclass(frozen=True, eq=False)
class LinearState:
    """The sums over the keys and values so far, of constant size; the states of two parts add up: a + b."""

    numerator: Array  # (…, g, d, e): S, with e the width of the values
    denominator: Array  # (…, g, d): z
    count: int  # of tokens
    rope: Rope | None
    feature_map: FeatureMap

    def __add__(self, other: LinearState) -> LinearState:
        self._check(other)
        sums = self.numerator + other.numerator, self.denominator + other.denominator
        return LinearState(*sums, self.count + other.count, self.rope, self.feature_map)

    def _check(self, other: Any) -> None:
        namespace(here=self.numerator, state=checks.instance("state", other, LinearState).numerator)
        namespace(here=self.denominator, state=other.denominator)
        own, others = (
            (x.rope, x.feature_map, x.numerator.shape, x.numerator.dtype, x.denominator.shape, x.denominator.dtype)
            for x in (self, other)
        )
        if own != others:
            raise ValueError(f"the state belongs to another rope, feature map, shape or dtype: {others}, not {own}")


@dataclass(frozen=True)
class _Plan:
    """The arguments that all forms share, checked by `_plan`."""

    xp: ModuleType
    dtype: np.dtype[Any]  # of the arithmetic
    rope: Rope | None  # without its attention factor
    positions: Any  # (…, n), on the host
    tables: Tables | None  # of all positions, if the caller has them
    feature_map: FeatureMap
    denominators: str
    first: tuple[int, int] = (0, 0)  # the first head and token that it is for

    def features(self, x: Array, tables: Tables | None = None, out: Array | None = None) -> tuple[Array, Array]:
        """φ(x) and R(m)φ(x), the latter into ``out`` where that fits: x (…, n, d) -> two of them."""
        x = x.astype(self.dtype, copy=False)
        if isinstance(self.feature_map, str):
            phi = FEATURE_MAPS[self.feature_map](x)
        else:  # called on a copy, and copied, since it may work in place or return the same memory every time
            phi = self.feature_map(x.copy())
            if phi is None:
                raise TypeError("feature_map must return an array, but it returned None")
            namespace(x=x, **{"what feature_map returns": phi})
            phi = phi.copy()
        if (phi.shape[:-1], phi.dtype) != (x.shape[:-1], x.dtype):
            raise ValueError(f"feature_map must keep {x.dtype} and {x.shape[:-1]}, returned {phi.dtype} {phi.shape}")
        if tables is None:
            return phi, phi
        out = out if out is not None and out.shape == phi.shape else None
        return phi, rotate(phi, tables.positions, tables.rope, tables=tables, out=out)

    def spread(self, work: _Work, chunk: int, by_token: list[Array], by_head: list[Array]) -> None:
        """Calls ``work(plan, spare, *arrays)`` for long stretches of tokens, one after the other, and there for some
        heads at a time, on every core; the arrays are parts of these, (…, h or g, n, any) and (…, g, any, any)."""
        n, length = by_token[0].shape[-2], chunk * max(1, _STRETCH // chunk)
        for start in range(0, n, length):
            tokens, tables = slice(start, min(start + length, n)), self.tables
            if tables is not None:
                tables = tables.part(tokens)
            elif self.rope is not None:
                tables = rotation_tables(self.rope, self.positions[..., tokens], by_token[0])
            parts = [x[..., tokens, :] for x in by_token]
            replace(self, tables=tables, first=(0, start))._spread_heads(work, min(chunk, n), parts, by_head)

    def _spread_heads(self, work: _Work, chunk: int, by_token: list[Array], by_head: list[Array]) -> None:
        q, g = by_token[0], by_head[0].shape[-3] if by_head[0].ndim > 2 else 1

        def some(heads: slice, spare: _Spare) -> None:
            plan, r = self, q.shape[-3] // g if q.ndim > 2 else 1
            if heads.start:
                plan = replace(self, first=(heads.start * r, self.first[1]))
            work(plan, spare, *(_of(heads, g, x) for x in (*by_token, *by_head)))

        # Positions may differ from head to head; a function of the caller's may not be made for several threads.
        whole = self.rope is not None and self.positions.ndim - (self.rope.axes is not None) > max(1, q.ndim - 2)
        count = 1 if self.xp is not np or whole else -(-q[..., 0, :].size * chunk // _SMALL)
        step = max(1, -(-g // (count + count % 2 if count > 1 else 1)))  # an even number, as that of cores mostly is
        pieces = [slice(start, min(start + step, g)) for start in range(0, g, step)]
        each(pieces, some, dict, spread=self.xp is np and isinstance(self.feature_map, str), products=True)

    def chunks(self, chunk: int, spare: _Spare, *arrays: Array) -> Iterator[tuple[slice, list[tuple[Array, Array]]]]:
        """Chunk by chunk the slice of n, and φ(x) and R(m)φ(x) of each array (…, n, d), valid until the next chunk."""
        n = arrays[0].shape[-2]
        for start in range(0, n, chunk):
            tokens = slice(start, min(start + chunk, n))
            tables = None if self.tables is None else self.tables.part(tokens)
            features = [self.features(x[..., tokens, :], tables, spare.get(i)) for i, x in enumerate(arrays)]
            if tables is not None:
                spare.update(enumerate(turned for _, turned in features))
            yield tokens, features

    def zeros(self, k: Array, v: Array) -> tuple[Array, Array]:
        """S and z before the first token."""
        shape = (*k.shape[:-2], self.features(k[..., :1, :])[0].shape[-1])  # a map may change the width
        return self.xp.zeros((*shape, v.shape[-1]), self.dtype), self.xp.zeros(shape, self.dtype)

    def sums(self, k: Array, v: Array) -> tuple[Array, Array]:
        """S (…, g, d, e) and z (…, g, d) of these keys and values."""
        s, z = self.zeros(k, v)
        self.spread(_add, CHUNK, [k, v], [s, z[..., None, :]])
        return s, z

    def read(self, q: Array, s: Array, z: Array, out: Array, chunk: int = CHUNK) -> Array:
        """Every query against the same sums S and z, into out (…, h, n, e)."""
        self.spread(partial(_read, chunk), chunk, [q, out], [s, z[..., None, :]])
        return out

    def result(self, q: Array, k: Array, v: Array, out: Array | None) -> Array:
        """Where the outputs (…, h, n, e) go."""
        namespace(q=q, **given(out=out))
        if out is not None and any(self.xp.may_share_memory(out, x) for x in (q, k, v)):
            raise ValueError("out must not share memory with q, k or v, which are read until the end")
        return result_array(self.xp, (*q.shape[:-1], v.shape[-1]), q.dtype, out)

    def divide(
        self, numerator: Array, denominator: Array, terms: tuple[Array, Array], shape: tuple[int, ...], start: int = 0
    ) -> Array:
        """numerator (…, e) over denominator (…), both grouped, in place -> (*shape, e); 0/0 is 0; shape (…, h, n).

        A denominator is Σ over d of the product of the two terms, (…, d).
        """
        numerator, denominator = numerator.reshape(*shape, numerator.shape[-1]), denominator.reshape(shape)
        # φ(q)ᵀφ(k) of small features, as of inputs around −52 in float32, is subnormal: a number of few bits, whose
        # quotients are off by a tenth or more. From tiny/ε on, every product that matters in the sum is a normal one.
        size, least = abs(denominator), float(np.finfo(self.dtype).tiny / np.finfo(self.dtype).eps)
        good = ((denominator if self.denominators == "positive" else size) >= least) & (size < np.inf)
        if not bool(good.all()):
            # Of smaller features it is 0, which must not pass for that of a row that sees nothing.
            empty = ~((terms[0] != 0) & (terms[1] != 0)).any(axis=-1).reshape(shape) & (numerator == 0).all(axis=-1)
            bad = np.argwhere(to_numpy(~(good | empty))).tolist()
            if bad:
                where, value = np.array(bad[0]), float(denominator[tuple(bad[0])])
                where[-2:] += (self.first[0], self.first[1] + start)[-len(where) :]
                count = f"{len(bad)} of {good.size} looked at were not, the first at {tuple(where.tolist())}: {value:g}"
                rule = f"denominators must be finite and {self.denominators}, {count}"
                raise ValueError(f"{rule}; see feature_map: in {self.dtype} they must not be smaller than {least:.2g}")
            denominator = denominator + empty
        numerator /= denominator[..., None]
        if not bool(self.xp.isfinite(numerator).all()):
            reason = f"values must be finite, and so must their sums, weighted by features, in {self.dtype}"
            raise ValueError(f"{reason}, and some are not: make them smaller, or use float64")
        return numerator


def _plan(
    causal: bool, positions: Any, rope: Any, feature_map: Any, denominators: str, tables: Any = None, **arrays: Array
) -> _Plan:
    xp = namespace(**arrays)
    shapes = ", ".join(f"{name} had shape {x.shape} {x.dtype!r}" for name, x in arrays.items())
    q, k, v = (arrays[name if name in arrays else "k"] for name in "qkv")
    (h, *_), (g, *_) = ((1, *x.shape)[-3:] for x in (q, k))
    fits = q.ndim == k.ndim == v.ndim >= 2 and q.shape[:-3] == k.shape[:-3] and k.shape[:-1] == v.shape[:-1]
    fits = fits and q.shape[-1] == k.shape[-1] and (h % g == 0 if g else h == 0)
    if not fits or (checks.flag("causal", causal) and q.shape[-2] != k.shape[-2]):
        rule = "q (…, h, n, d), k (…, g, m, d), v (…, g, m, e) need h a multiple of g, and n = m if causal"
        raise ValueError(f"{rule}: {shapes}")
    dtypes = {compute_dtype(name, x) for name, x in arrays.items()}
    if len({x.dtype for x in arrays.values()}) > 1:
        raise TypeError(f"q, k and v must have one dtype: {shapes}")
    if not callable(feature_map):
        checks.choice("feature_map", feature_map, tuple(FEATURE_MAPS))
    checks.choice("denominators", denominators, ("positive", "nonzero"))
    if (positions is None) != (rope is None):
        raise ValueError("positions and rope must be given both, for Eq. (19), or neither, for Eq. (18)")
    if rope is not None:
        rope = check_rope(rope).pure
        positions = check_positions(on_host(positions), rope)
        one = "…, n" if rope.axes is None else f"{rope.axes.count}, …, n"
        if {x.shape[-2:-1] for x in arrays.values()} != {positions.shape[rope.axes is not None :][-1:]}:
            raise ValueError(f"positions must be ({one}), one for each token, had shape {positions.shape}: {shapes}")
    dtype = dtypes.pop()
    if tables is not None:
        if rope is None:
            raise ValueError("tables need positions and a rope")
        check_tables(tables, positions, rope, dtype, k)
    return _Plan(xp, dtype, rope, positions, tables, feature_map, denominators)


_Work: TypeAlias = Callable[..., None]  # of a plan, spare memory and arrays


def _of(heads: slice, g: int, x: Array) -> Array:
    """x (…, g·r, any, any) for some of the g key heads; x itself if it has no axis of heads."""
    r = x.shape[-3] // g if x.ndim > 2 else 1
    return x if x.ndim == 2 else x[..., heads.start * r : heads.stop * r, :, :]


def _grouped(x: Array, k: Array) -> Array:
    """A view of x (…, h, n, d) as (…, g, h/g, n, d): head i reads head i·g//h of k."""
    heads = (k.shape[-3], x.shape[-3] // max(k.shape[-3], 1)) if k.ndim > 2 else (1,)
    return x.reshape(*x.shape[:-3], *heads, *x.shape[-2:])


def _repeated(x: Array, q: Array) -> Array:
    """x (…, g, n, d) with one head for each head of q; x itself if it has as many, or neither has a head axis."""
    return x if x.shape[-3:-2] == q.shape[-3:-2] else definition.repeat_heads(x, q.shape[-3])


def _add(plan: _Plan, spare: _Spare, k: Array, v: Array, s: Array, z: Array) -> None:
    """Adds keys and values to S and z (…, g, 1, d)."""
    for tokens, [(phi_k, turned_k)] in plan.chunks(CHUNK, spare, k):
        s += turned_k.swapaxes(-1, -2) @ v[..., tokens, :].astype(plan.dtype, copy=False)
        z += phi_k.sum(axis=-2, keepdims=True)


def _read(chunk: int, plan: _Plan, spare: _Spare, q: Array, out: Array, s: Array, z: Array) -> None:
    """Queries against S and z (…, g, 1, d), into out."""
    for tokens, [(phi_q, turned_q)] in plan.chunks(chunk, spare, q):
        numerator = _grouped(turned_q, s) @ s[..., None, :, :]  # Eq. (19), without rope Eq. (18)
        terms = _grouped(phi_q, s), z[..., None, :, :]
        denominator = terms[0] @ terms[1].swapaxes(-1, -2)
        out[..., tokens, :] = plan.divide(numerator, denominator, terms, phi_q.shape[:-1], tokens.start)


def _step(chunk: int, plan: _Plan, spare: _Spare, *arrays: Array) -> None:
    """Queries against the keys up to them and S and z (…, g, 1, d), into out; the keys are added to S and z."""
    q, k, v, out, s, z = arrays
    xp = plan.xp

    def product(name: str, a: Array, b: Array) -> Array:
        # a @ b makes a new array for each chunk, whose fresh pages cost as much as the product itself.
        shape = (*(a.shape[:-2] or b.shape[:-2]), a.shape[-2], b.shape[-1])  # b has the heads of a, or a has none
        if name not in spare or spare[name].shape != shape:
            spare[name] = xp.empty(shape, plan.dtype)
        return xp.matmul(a, b, out=spare[name])

    lower = xp.tril(xp.ones((min(chunk, q.shape[-2]),) * 2, plan.dtype))
    for tokens, [(phi_q, turned_q), (phi_k, turned_k)] in plan.chunks(chunk, spare, q, k):
        c, values = tokens.stop - tokens.start, v[..., tokens, :].astype(plan.dtype, copy=False)
        turned_q, turned_k = _grouped(turned_q, k), turned_k.swapaxes(-1, -2)
        scores = product("scores", turned_q, turned_k[..., None, :, :])
        scores *= lower[:c, :c]
        numerator = product("numerator", scores, values[..., None, :, :])  # Eq. (19): the keys of this chunk,
        numerator += product("before", turned_q, s[..., None, :, :])  # and all before it
        sums = product("sums", lower[:c, :c], phi_k)
        sums += z
        terms = _grouped(phi_q, k), sums[..., None, :, :]
        denominator = xp.einsum("...nd,...nd->...n", *terms)  # Eq. (19), not rotated
        out[..., tokens, :] = plan.divide(numerator, denominator, terms, phi_q.shape[:-1], tokens.start)
        s += product("state", turned_k, values)
        z[...] = sums[..., -1:, :]


def linear_state(
    k: Array, v: Array, positions: Any = None, rope: Rope | None = None, *, feature_map: FeatureMap = "elu+1"
) -> LinearState:
    """The state that keys k (…, g, n, d) and values v (…, g, n, e) leave behind."""
    plan = _plan(False, positions, rope, feature_map, "positive", k=k, v=v)
    return LinearState(*plan.sums(k, v), k.shape[-2], rope, feature_map)


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is refused in the end
def linear_step(
    q: Array, k: Array, v: Array, positions: Any = None, rope: Rope | None = None, *, state: LinearState | None = None,
    feature_map: FeatureMap = "elu+1", chunk: int = CHUNK, denominators: str = "positive",
    tables: Tables | None = None, out: Array | None = None,
) -> tuple[Array, LinearState]:  # fmt: skip
    """Causal `linear_attention` to these tokens and those of the state, and the state to go on from; any n, also 1.

    >>> q = k = v = np.ones((2, 5, 4))
    >>> first, state = linear_step(q[:, :3], k[:, :3], v[:, :3])
    >>> last, state = linear_step(q[:, 3:], k[:, 3:], v[:, 3:], state=state)
    >>> last.shape, state.count
    ((2, 2, 4), 5)
    """
    chunk = checks.integer("chunk", chunk, 1)
    plan = _plan(True, positions, rope, feature_map, denominators, tables, q=q, k=k, v=v)
    s, z = plan.zeros(k, v)
    if state is not None:
        LinearState(s, z, 0, rope, feature_map)._check(state)
        s, z = s + state.numerator, z + state.denominator
    out = plan.result(q, k, v, out)
    plan.spread(partial(_step, chunk), chunk, [q, k, v, out], [s, z[..., None, :]])
    return out, LinearState(s, z, q.shape[-2] + (state.count if state else 0), rope, feature_map)


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is refused in the end
def attention_weights(
    q: Array, k: Array, positions: Any = None, rope: Rope | None = None, *, causal: bool,
    feature_map: FeatureMap = "elu+1", denominators: str = "positive",
) -> tuple[Array, Array]:  # fmt: skip
    """The weights of the values for each query, (…, h, n, n), and their sums, (…, h, n), which are 1 without a rope.

    >>> weights, sums = attention_weights(*np.ones((2, 3, 2)), range(3), Rope(2, 10000.0, "half"), causal=True)
    >>> sums.round(3)
    array([1.   , 0.77 , 0.375])
    """
    plan = _plan(causal, positions, rope, feature_map, denominators, q=q, k=k)
    weights = plan.divide(*_similarities(plan, q, k, causal), q.shape[:-1])  # Eq. (19), without rope Eq. (18)
    return weights.astype(q.dtype), weights.sum(axis=-1).astype(q.dtype)


def _similarities(plan: _Plan, q: Array, k: Array, causal: bool) -> tuple[Array, Array, tuple[Array, Array]]:
    """By the definition: rotated, as they weigh the values, (…, h, n, m), and summed without rotation, (…, h, n, 1);
    and the two terms of these sums, as `_Plan.divide` takes them."""
    phi_q, phi_k = plan.features(q)[0], _repeated(plan.features(k)[0], q)
    mask = definition.visible(plan.xp.arange(q.shape[-2]), plan.xp.arange(k.shape[-2]), causal)

    def turn(phi: Array) -> Array:
        return phi if plan.rope is None else rotate_complex(phi, plan.positions, plan.rope)

    size = abs(phi_k)
    sums = size.cumsum(axis=-2) if causal else size.sum(axis=-2, keepdims=True)
    return *definition.similarities(phi_q, phi_k, turn, mask), (phi_q, sums)


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is refused in the end
def linear_attention(
    q: Array, k: Array, v: Array, positions: Any = None, rope: Rope | None = None, *, causal: bool,
    feature_map: FeatureMap = "elu+1", form: str | None = None, chunk: int = CHUNK, denominators: str = "positive",
    tables: Tables | None = None, out: Array | None = None,
) -> Array:  # fmt: skip
    """Eq. (19), or without rope Eq. (18): q (…, h, n, d), k (…, g, n, d), v (…, g, n, e) -> (…, h, n, e).

    >>> x = np.ones((1, 3, 2))
    >>> linear_attention(x, x, x, range(3), Rope(2, 10000.0, "half"), causal=True)[0, :, 0].round(3)
    array([1.   , 0.77 , 0.375])

    ``feature_map`` is "elu+1", "relu", "relu2", "exp", "identity" or a function on arrays (…, n, d) that treats every
    token by itself, since it is called with some of them at a time. ``causal`` is by the order of the tokens.
    Denominators that are not positive and finite raise, and so do those below tiny/ε, whose last digits are lost;
    ``denominators="nonzero"`` allows negative ones. 0/0 is 0: a row without keys, or whose keys all map to 0 in the
    dtype of the arithmetic, as padding of −inf does but for identity, attends to nothing. Values
    must be finite, since those to come within a chunk are multiplied too, by 0. ``tables``, for many layers at the same
    positions, are ``rotation_tables(rope.pure, positions, like=q)``.
    """
    forms = FORMS[checks.flag("causal", causal)]
    form = checks.choice("form", forms[0] if form is None else form, forms)
    chunk = checks.integer("chunk", chunk, 1) if form != "recurrent" else 1
    if form in ("chunked", "recurrent"):
        options: dict[str, Any] = {"feature_map": feature_map, "chunk": chunk, "denominators": denominators, "out": out}
        return linear_step(q, k, v, positions, rope, tables=tables, **options)[0]
    plan = _plan(causal, positions, rope, feature_map, denominators, tables, q=q, k=k, v=v)
    out = plan.result(q, k, v, out)
    if form == "quadratic":
        weights, total, terms = _similarities(plan, q, k, causal)
        values = _repeated(v.astype(plan.dtype, copy=False), q)
        out[...] = plan.divide(weights @ values, total, terms, q.shape[:-1])  # Eq. (17)
        return out
    return plan.read(q, *plan.sums(k, v), out, chunk)  # Eq. (18): the same sums for every query
