"""Attention and models over a sequence that is split among MPI ranks (mpi4py): the same values as on one machine.

Every rank holds some tokens of the sequence (`shard_positions`) and rotates them by their positions in the sequence. In
`ring_attention` keys and values travel from rank to rank; in `parallel_linear_attention` only sums of constant size do;
`forward` is a model made of these, and `gather` puts shards together again. All ranks make the same call.

A call begins with an exchange of what was given: if the arguments of a rank are wrong, or differ from those of others,
every rank raises. What fails later ends all ranks, since some already wait for messages: see `fail_together`.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import numpy as np

from . import checks, linear, model as models, softmax
from .backend import Array, compute_dtype, from_numpy, namespace, on_host, to_numpy
from .linear import FeatureMap
from .model import Model
from .rotation import turn
from .theta import Rope
from .tiles import tile_of

Int64: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
_Checked = TypeVar("_Checked")

SCHEMES = ("contiguous", "zigzag", "striped")
_TAG = 19_864  # of all messages between two ranks; a receive for any tag that is still open would take them


def shard_positions(n: int, rank: int, size: int, scheme: str = "contiguous") -> Int64:
    """The positions of the tokens that a rank holds, ascending: each of 0 … n−1 belongs to one of the size ranks.

    >>> [shard_positions(10, rank, 2, "contiguous").tolist() for rank in range(2)]
    [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    >>> [shard_positions(10, rank, 2, "zigzag").tolist() for rank in range(2)]
    [[0, 1, 7, 8, 9], [2, 3, 4, 5, 6]]
    >>> [shard_positions(10, rank, 2, "striped").tolist() for rank in range(2)]
    [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]

    "zigzag" cuts the sequence into 2·size chunks and gives each rank one from the front and one from the back, so that
    under a causal mask all ranks have nearly the same work; "striped" deals the tokens out one by one. Lengths need not
    divide evenly, and with fewer tokens than ranks some ranks hold none.
    """
    n, size = checks.integer("n", n, 0, checks.MAX_POSITION), checks.integer("size", size, 1)
    if checks.integer("rank", rank, 0) >= size:
        raise ValueError(f"rank must be less than size, {size}, was {rank}")
    if checks.choice("scheme", scheme, SCHEMES) == "striped":
        return np.arange(rank, n, size, dtype=np.int64)
    if scheme == "contiguous":
        return np.arange(n * rank // size, n * (rank + 1) // size, dtype=np.int64)
    chunks = (np.arange(n * i // (2 * size), n * (i + 1) // (2 * size)) for i in (rank, 2 * size - 1 - rank))
    return np.concatenate(list(chunks)).astype(np.int64, copy=False)


# ── Ranks that agree, and that end together ──────────────────────────────────────────────────────────────────────────


@contextmanager
def fail_together(comm: Any) -> Iterator[None]:
    """Put this around a program, on every rank: an exception inside ends all ranks with this rank's traceback and exit
    code, 1 or that of a SystemExit, and so does a rank that comes to the end while others still make calls.

    Without it, the other ranks would wait forever for messages of the one that failed or left.
    """
    _mpi(comm)
    with _aborting(comm):
        leaving = None
        try:
            yield
        except SystemExit as error:
            if error.code:
                raise
            leaving = error
        _agreed(comm, "fail_together", lambda: (None, "its end", np.zeros(0, np.int64)))
        if leaving is not None:
            raise leaving


@contextmanager
def _aborting(comm: Any) -> Iterator[None]:
    """Ends all ranks if this one fails, for calls in which the others wait for it."""
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if comm.Get_size() == 1 or not code:
            raise
        sys.stdout.flush()
        sys.stderr.write(f"rank {comm.Get_rank()} of {comm.Get_size()} failed:\n{traceback.format_exc()}")
        sys.stderr.flush()
        time.sleep(0.2)  # a launcher that ends all ranks may throw away what it has not passed on yet
        world().Abort(code if isinstance(code, int) else 1)  # all, not comm: others may wait for one of comm


def world() -> Any:
    """The communicator of all ranks that mpiexec has started, mpi4py.MPI.COMM_WORLD; one rank without mpiexec."""
    return checks.imported("mpi4py.MPI", "pyrope.parallel", "mpi").COMM_WORLD


def _mpi(comm: Any) -> Any:
    """The module mpi4py.MPI, if comm is one of its communicators."""
    mpi = checks.imported("mpi4py.MPI", "pyrope.parallel", "mpi")
    if not isinstance(comm, mpi.Intracomm):
        raise TypeError(f"comm must be a communicator, such as pyrope.parallel.world(), was {type(comm).__name__}")
    return mpi


def _facts(options: Mapping[str, object], **arrays: Array) -> str:
    """What must be the same on all ranks: dtypes, all sizes but the number of tokens n, and options."""
    shapes = {name: ", ".join(map(str, (*x.shape[:-2], "n", x.shape[-1]))) for name, x in arrays.items()}
    described = [f"{name} {arrays[name].dtype} ({shape})" for name, shape in shapes.items()]
    return ", ".join(described + [f"{name}={value}" for name, value in options.items()])


def _agreed(
    comm: Any, function: str, check: Callable[[], tuple[_Checked, str, np.ndarray[Any, Any]]]
) -> tuple[_Checked, list[list[int]]]:
    """What the check of the arguments returns here, and the span of every rank, once all ranks have agreed.

    The check returns a value, the facts that must be the same on all ranks, and this rank's positions. A span says how
    many there are, the least and the greatest.
    """
    _mpi(comm)
    failure: Exception | None = None
    try:
        value, facts, at = check()
        own = "", f"{function}({facts})", [at.size, int(at.min()), int(at.max())] if at.size else [0, 0, 0]
    except Exception as error:  # the others must hear of it: they would wait for this rank
        failure, own = error, (f"{type(error).__name__}: {error}", "", [0, 0, 0])
    errors, calls, spans = zip(*comm.allgather(own), strict=True)
    if failure is not None:
        raise failure
    for rank, error_text in enumerate(errors):
        if error_text:
            raise RuntimeError(f"rank {rank} of {len(errors)} failed: {error_text}")
    for rank, call in enumerate(calls):
        if call != calls[0]:
            rule = "all ranks must make the same call"
            raise ValueError(f"{rule}: rank 0 made {calls[0]:.2000}, rank {rank} {call:.2000}")
    return value, list(spans)


def _check_spans(spans: list[list[int]]) -> list[int]:
    """How many tokens each rank has, if they can all have a position of their own; else raises, on every rank alike."""
    n, held = sum(count for count, _, _ in spans), [span for span in spans if span[0]]
    first, last = min((low for _, low, _ in held), default=0), max((high for _, _, high in held), default=-1)
    if n > last - first + 1:
        rule = f"{n} tokens cannot all have their own between {first} and {last}"
        fix = "does every rank count from 0? shard_positions says what a rank holds"
        raise ValueError(f"positions must be those in the whole sequence: {rule}; {fix}")
    return [count for count, _, _ in spans]


def _to_wire(x: Array) -> np.ndarray[Any, Any]:
    """The bytes of an array (…, features), for MPI, on the host."""
    return np.ascontiguousarray(to_numpy(x)).view(np.uint8)


# ── Softmax attention ────────────────────────────────────────────────────────────────────────────────────────────────


def ring_attention(
    comm: Any, q: Array, k: Array, v: Array, positions: Any, *, causal: bool = False, window: int | None = None,
    scale: float | None = None, softcap: float | None = None,
) -> Array:  # fmt: skip
    """`attention`, Eq. (2), of this rank's queries to the keys of all ranks: q (…, h, n, d), k (…, g, n, d) and
    v (…, g, n, c) of this rank's n tokens, q and k rotated -> (…, h, n, c).

    ``positions``, (n,), are those of this rank's tokens in the sequence, each once; they decide who sees whom, in any
    order, and a whole batch shares them. n may differ from rank to rank. While a rank computes with the shard that it
    holds, the next one arrives; it sends size − 1 shards, and holds three at most.
    """

    def check() -> tuple[softmax.ScoreRule, str, Any]:
        namespace(q=q, k=k, v=v)
        at = checks.positions("positions", on_host(positions))
        if at.ndim != 1:
            raise ValueError(f"positions must be (n,), one for each token of this rank, had shape {at.shape}")
        rule = softmax.checked_rule(q, k, v, (causal, window), (at, at), (scale, softcap))
        options = {"causal": causal, "window": window, "scale": scale, "softcap": softcap}
        return rule, _facts(options, q=q, k=k, v=v), at

    rule, spans = _agreed(comm, "ring_attention", check)
    return _ring(comm, q, k, v, rule, _check_spans(spans))


@np.errstate(all="ignore")  # what overflows is found in the end; 0/0 is where nothing is seen
def _ring(comm: Any, q: Array, k: Array, v: Array, rule: softmax.ScoreRule, lengths: list[int]) -> Array:
    """`ring_attention` without its checks; ``lengths`` says how many tokens each rank has."""
    with _aborting(comm):
        mpi, xp, rank, size, dtype = _mpi(comm), namespace(q), comm.Get_rank(), comm.Get_size(), compute_dtype("q", q)
        (*batch, h, n, d), g = q.shape, k.shape[-3]
        groups, shape = q.reshape(*batch, g, h // g, n, d), (*batch, g, h // g, n, v.shape[-1])
        running = [
            (index, softmax.Running(groups[index], replace(rule, q_at=tile_of(rule.q_at, index)), dtype, None))
            for index in softmax.pieces(xp, shape[:-1], max(lengths))
        ]
        held, at = _to_wire(xp.concatenate((k, v), axis=-1)), rule.k_at.reshape(-1).copy()
        largest, finite = [], True  # the greatest size of a key in each shard
        for step in range(size):
            requests, arriving = [], (held, at)
            if step < size - 1:
                m = lengths[(rank - step - 1) % size]
                arriving = np.empty((*held.shape[:-2], m, held.shape[-1]), np.uint8), np.empty(m, np.int64)
                requests = [comm.Irecv(x, (rank - 1) % size, _TAG) for x in arriving]
                requests += [comm.Isend(x, (rank + 1) % size, _TAG) for x in (held, at)]
            pair = from_numpy(held.view(k.dtype).astype(dtype, copy=False), xp)
            largest += [abs(pair[..., :d]).max()] if pair.size else []
            for index, some in running if len(at) else ():
                some.rule, own = replace(some.rule, k_at=at), pair[index[: len(batch) + 1]]
                some.see(own[..., :d], own[..., d:])
                mpi.Request.Testall(requests)  # most MPIs move data only while they are called
            mpi.Request.Waitall(requests)
            held, at = arriving
        for _, some in running:
            some.queries = xp.empty(0, dtype)  # the result takes their place
        out = xp.empty(shape, q.dtype)
        for index, some in running:
            out[index] = mean = some.mean()  # Eq. (2), rounded here
            empty = xp is np and some.total is not None and not some.total.all()  # or all of its scores are −inf
            finite = finite and not empty and bool(xp.isfinite(mean).all())
        if largest and not finite:
            softmax.check_overflow(q, xp.stack(largest), rule, dtype)
        return out.reshape(*q.shape[:-1], v.shape[-1])


# ── Linear attention ─────────────────────────────────────────────────────────────────────────────────────────────────


def parallel_linear_attention(
    comm: Any, q: Array, k: Array, v: Array, positions: Any = None, rope: Rope | None = None, *, causal: bool,
    feature_map: FeatureMap = "elu+1", denominators: str = "positive",
) -> Array:  # fmt: skip
    """`linear_attention`, Eq. (19), of this rank's queries to the keys of all ranks, or of those before it and its own:
    q (…, h, n, d), k (…, g, n, d) and v (…, g, n, c) of this rank's n tokens, not rotated -> (…, h, n, c).

    Ranks exchange S and z, d·(e + 1) numbers for each key head, whatever the length. If ``causal``, a rank's tokens
    come after those of the ranks before it, as in the scheme "contiguous"; other options are as in `linear_attention`.
    """

    def check() -> tuple[linear.LinearRule, str, Any]:
        rule = linear.checked_rule((q, k, v), causal, positions, rope, feature_map, denominators)
        name = feature_map if isinstance(feature_map, str) else "a function"
        options = {"rope": rope, "causal": causal, "feature_map": name, "denominators": denominators}
        ordered = causal and rope is not None and rope.axes is None and np.ndim(on_host(positions)) == 1
        at = np.asarray(rule.tables.positions if ordered and rule.tables is not None else [], np.int64)
        return rule, _facts(options, q=q, k=k, v=v), at

    rule, spans = _agreed(comm, "parallel_linear_attention", check)
    ordered = [(first, last) for count, first, last in spans if count]
    for (_, last), (first, _) in zip(ordered, ordered[1:], strict=False):
        if first < last:  # on every rank alike
            raise ValueError(f"a rank ends at position {last}, and the next begins at {first}; {_ORDER}")
    return linear.checked_outputs(_with_sums(comm, q, k, v, rule, causal), rule, on_host=False)


@np.errstate(all="ignore")  # what is not finite is refused in the end
def _with_sums(comm: Any, q: Array, k: Array, v: Array, rule: linear.LinearRule, causal: bool) -> Array:
    """`parallel_linear_attention` without its checks."""
    with _aborting(comm):
        mpi, xp, (s, z) = _mpi(comm), namespace(q), linear.sums(k, v, rule)
        own = np.concatenate([to_numpy(x).reshape(-1) for x in (s, z)])
        sums = np.zeros_like(own)
        if causal:
            comm.Exscan(own, sums, mpi.SUM)
            sums = sums if comm.Get_rank() else np.zeros_like(own)  # what rank 0 receives is undefined
        else:
            comm.Allreduce(own, sums, mpi.SUM)
        s, z = (from_numpy(x.reshape(y.shape), xp) for x, y in zip(np.split(sums, [s.size]), (s, z), strict=True))
        return linear.step(q, k, v, (s, z), rule) if causal else linear.read(q, (s, z), rule)


_ORDER = 'a sum over all tokens before needs them in the order of the ranks: shard by "contiguous"'

# ── Models ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def forward(model: Model, tokens: Any, positions: Any = None, *, comm: Any, scheme: str = "contiguous") -> Array:
    """`pyrope.forward` over several ranks: the logits of this rank's tokens, (b, n of this rank, v) or without b.

    Every rank has the model and all tokens, (b, n) or (n,), and computes those of `shard_positions(n, rank, size,
    scheme)`. Linear attention needs the scheme "contiguous" in a causal model; there is neither cache nor packing.
    """

    def check() -> tuple[tuple[Any, ...], str, Any]:
        config = checks.instance("model", model, Model).config
        ids = models.check_tokens(tokens, config.vocabulary)
        own = shard_positions(ids.shape[1], comm.Get_rank(), comm.Get_size(), scheme)
        if config.encoding == "alibi":
            raise ValueError("ALiBi adds a bias to all n × n scores, which no rank holds: use one process")
        if config.attention == "linear" and config.causal and scheme != "contiguous":
            raise ValueError(f"scheme must be 'contiguous' for causal linear attention, was {scheme!r}: {_ORDER}")
        at = models.rows("positions", np.arange(ids.shape[1]) if positions is None else positions, ids)
        ropes = models.fixed_ropes(config, max(int(at.max()), 0) + 1)  # at the length of all tokens
        digests = {name: hashlib.sha256(x.tobytes()).hexdigest() for name, x in (("tokens", ids), ("positions", at))}
        facts = _facts({"scheme": scheme, **digests, "config": config}, embedding=model.weights["embedding"])
        return (config, ids[:, own], own, at[:, own], ropes), f"{ids.shape} tokens, {facts}", own

    (config, ids, own, at, ropes), spans = _agreed(comm, "forward", check)
    h, g, places, lengths = config.heads, config.key_heads, own[None, None, None], _check_spans(spans)

    def attend(i: int, heads: Array) -> Array:
        q, k, v, table = heads[:, :h], heads[:, h : h + g], heads[:, h + g :], tables[i]
        if config.attention == "linear":
            return _with_sums(comm, q, k, v, linear.LinearRule(q.dtype, table, config.feature_map), config.causal)
        if table is not None:
            turn(heads[:, : h + g], table, heads[:, : h + g])
        reach = softmax.reach(config.causal, config.layers[i].window)
        return _ring(
            comm, q, k, v, softmax.ScoreRule(places, places, reach, config.score_scale, config.softcap), lengths
        )

    with _aborting(comm):
        x = models.embedded(model, ids, at)
        tables = models.rotations(config, ropes, at, x)
        logits = models.layers_and_head(model, x, attend)
        return logits if np.ndim(on_host(tokens)) == 2 else logits[0]


def gather(comm: Any, x: Array, positions: Any) -> Array | None:
    """The shards x (…, n of a rank, f) of all ranks in the order of their positions, on rank 0; None on the others."""

    def check() -> tuple[Int64, str, Any]:
        at = checks.positions("positions", on_host(positions)).astype(np.int64)
        namespace(x=x)
        if x.ndim < 2 or at.shape != x.shape[-2:-1]:
            raise ValueError(f"x must be (…, n, f) and positions (n,), had shapes {x.shape} and {at.shape}")
        return at, _facts({}, x=x), at

    at, spans = _agreed(comm, "gather", check)
    lengths = _check_spans(spans)
    with _aborting(comm):
        xp, at_root, n = namespace(x), comm.Get_rank() == 0, sum(lengths)
        rows = _to_wire(x.swapaxes(0, -2))
        parts, order, width = np.empty((n, *rows.shape[1:]), np.uint8), np.empty(n, np.int64), math.prod(rows.shape[1:])
        comm.Gatherv(rows, [parts, [count * width for count in lengths]] if at_root else None)
        comm.Gatherv(at, [order, lengths] if at_root else None)
        if not at_root:
            return None
        return from_numpy(parts.view(x.dtype)[np.argsort(order, kind="stable")].swapaxes(0, -2), xp)
