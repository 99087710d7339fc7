"""Whatever comes in, only ValueError, TypeError or a documented error comes out; inputs stay as they are; and where a
call succeeds, its result is that of the definition in float64.

Every example has a number, and depends on it alone. PYROPE_FUZZ=100 runs a hundred times as many.
"""

from __future__ import annotations

import inspect
import math
import warnings

import numpy as np
import pytest
import references
from fuzzing import FLOATS, ROUNDOFF, TIMES, Draw, snapshot
from models import KINDS, by_definition

import pyrope
from pyrope import Axes, DynamicNTK, Linear, Rope, YaRN, definition, encodings, parallel
from pyrope.configs import MODEL_TYPES
from pyrope.oracle import adapters, traces

ROPES = [
    Rope(4, 10000.0, "half"), Rope(8, 500000.0, "interleaved"), Rope(8, 100.0, "interleaved-to-half", 4), Rope(4, 1e12, "half", direction=-1),
    Rope(8, 10000.0, "half", 4, "suffix"), Rope(8, 10000.0, "half", scaling=YaRN(4.0, 2048)), Rope(8, 10000.0, "half", scaling=Linear(8.0)),
    Rope(8, 10000.0, "half", scaling=DynamicNTK(2.0, 64)), Rope(8, 10000.0, "half", axes=Axes("sections", (2, 1, 1))),
    Rope(8, 10000.0, "interleaved", axes=Axes("axial")),
]  # fmt: skip
MODELS = {name: pyrope.random_model(config, 7) for name, config in KINDS.items()}


def broken(*arguments, **options):
    raise RuntimeError("this candidate always fails")


def candidates(draw):
    """Functions that fail, or return what is no answer: an oracle that got this far is quickly done with them."""
    bad = draw.silly()
    return draw.choice([broken, lambda *arguments: bad, lambda *arguments: None, lambda x: x, bad])


def _positions(draw, n, rope=None):
    m = np.array([draw.choice([0, 1, 5, 4095, 2**31, -(2**31), draw.randrange(10**6)]) for _ in range(n)])
    m = draw.choice([m, m, m.astype(np.int32) if n and abs(m).max() < 2**31 else m, m.tolist(), range(n), np.arange(n)])
    return m if rope is None or rope.axes is None else [m] * rope.axes.count


def _rotated(draw):
    rope, n = draw.choice(ROPES), draw.randrange(4)
    return (draw.array(*draw.choice([(), (2,), (1, 3)]), n, rope.head_dim), _positions(draw, n, rope), rope), {}


def _qkv(draw, n=None):
    g, r, e, m, d = (
        *(draw.randint(1, most) for most in (2, 2, 3)),
        draw.choice([0, 1, 2, 5, 70]),
        draw.choice([2, 4, 8]),
    )
    lead, dtype, n = draw.choice([(), (), (2,)]), draw.choice(FLOATS), m if n is None else n(m)
    shapes = ((g * r, n, d), (g, m, d), (g, m, e))
    return tuple(draw.array(*lead, *shape, dtype=dtype) for shape in shapes)


def _attention(draw):
    q, k, v = _qkv(draw, lambda m: draw.choice([m, m, 1, 3]))
    n, m = q.shape[-2], k.shape[-2]
    masks = [
        np.tri(n, m, dtype=bool),
        np.zeros((1, m), bool),
        np.triu(np.full((n, m), -np.inf), 1),
        np.ones((n, 1), q.dtype),
    ]
    more = draw.options(
        causal=[True, False], window=[1, 3, 10**6], softcap=[5.0, 1e-30, 1e30], scale=[1.0, 1e-6, 1e6], mask=masks,
        q_positions=[_positions(draw, n)], k_positions=[_positions(draw, m)],
    )  # fmt: skip
    return (q, k, v), more


def _linear(draw):
    q, k, v = _qkv(draw)
    ropes = [rope for rope in ROPES if rope.head_dim == q.shape[-1]]
    rope = draw.choice([None, *ropes])
    at = (_positions(draw, q.shape[-2], rope), rope) if rope is not None else ()
    maps = ["elu+1", "relu", "relu2", "exp", "identity"]
    more = draw.options(feature_map=maps, denominators=["positive", "nonzero"])
    return (q, k, v, *at), more


def _linear_attention(draw):
    arguments, more = _linear(draw)
    causal = draw.random() < 0.5
    return arguments, {"causal": causal, **more}


def _without(draw, call, i, *names):
    arguments, more = call(draw)
    return arguments[:i] + arguments[i + 1 :], {name: value for name, value in more.items() if name not in names}


def _forward(draw):
    model = MODELS[draw.choice(list(MODELS))]
    n = draw.randint(1, 6)
    tokens = [draw.randrange(11) for _ in range(n)]
    options = draw.options(positions=[list(range(n)), _positions(draw, n)], logits=["all", "last"], segments=[[0] * n])
    return (model, draw.choice([tokens, np.array(tokens), [tokens, tokens]])), options


def _config(draw):
    config = KINDS[draw.choice(list(KINDS))]
    return (), {name: getattr(config, name) for name in config.__dataclass_fields__}


def _scaling(draw, kind):
    names = [field for field in kind.__dataclass_fields__ if field != "length"]
    good = {"original_length": 2048, "short": [1.0] * 4, "long": [2.0] * 4, "fraction": 0.5, "truncate": True, "low": 1.0, "high": 4.0}  # fmt: skip
    return (), {name: good.get(name, 2.0) for name in names if name in good or draw.random() < 0.7}


def _json_config(draw):
    config = {"model_type": draw.choice(list(MODEL_TYPES)), "hidden_size": 64, "num_attention_heads": 4}
    config |= draw.options(
        head_dim=[16, 8], rope_theta=[1e4, 5e5], rope_scaling=[{"type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 4.0}],
        max_position_embeddings=[2048], partial_rotary_factor=[0.5], rotary_dim=[8], qk_rope_head_dim=[8], qk_nope_head_dim=[8],
    )  # fmt: skip
    key = draw.choice(list(config))
    return ({**config, key: draw.silly()} if draw.random() < 0.3 else config,), draw.options(
        layout=["half"], layer_type=["full_attention"]
    )


def _trace(draw):
    names = ["embedding", "layers.0.q", "layers.0.q_rotated", "layers.0.scores", "logits"]
    return {name: draw.array(1, draw.randint(1, 4), draw.choice([2, 8, 8, 8])) for name in names if draw.random() < 0.8}


CALLS = {
    # Ropes and tables
    "Rope": lambda d: ((d.choice([2, 8, 64]), 1e4, "half"), d.options(rotary_dim=[2, None], placement=["suffix"], direction=[-1], scaling=[Linear(2.0)], axes=[Axes("axial")])),
    "Axes": lambda d: (("sections", (2, 1, 1)), {}),
    **{kind.__name__: (lambda d, kind=kind: _scaling(d, kind)) for kind in pyrope.theta.SCALINGS.values()},
    "Rope.from_config": _json_config,
    "Rope..at": lambda d: ((d.choice([1, 10**6]),), {}),
    "frequencies": lambda d: ((d.choice(ROPES),), {}),
    "wavelengths": lambda d: ((d.choice(ROPES),), {}),
    "cos_sin": lambda d: ((_positions(d, 3, r := d.choice(ROPES)), r), d.options(dtype=FLOATS)),
    # Rotations
    "rotate": _rotated,
    "unrotate": _rotated,
    "rotation_tables": lambda d: ((*(made := _rotated(d)[0])[1:], made[0]), {}),
    "permute_weights": lambda d: ((d.array(16, 3), 2, *d.choice([("half", "interleaved"), ("interleaved", "half")])), d.options(rotary_dim=[4], placement=["suffix"])),
    # Attention
    "attention": _attention,
    "linear_attention": _linear_attention,
    "linear_step": _linear,
    # Models
    "Config": _config,
    "Layer": lambda d: ((d.choice(ROPES),), d.options(window=[3])),
    "Model": lambda d: ((MODELS["plain"].config, MODELS["plain"].weights), {}),
    "random_model": lambda d: ((KINDS["plain"], 1), d.options(dtype=["float64"], backend=["numpy"])),
    "forward": _forward,
    "Cache": lambda d: ((MODELS["plain"], d.choice([1, 9])), d.options(batch=[1, 2])),
    "generate": lambda d: ((MODELS["plain"], [1, 2], 3), d.options(sampling=[pyrope.Sampling(1e-300, 2, 0.5, 1)], stop=[(), [3]])),
    "Sampling": lambda d: ((), {"temperature": d.some(1.0, 1e-300), **d.options(top_k=[2], top_p=[0.5], seed=[1])}),
    "load": lambda d: (("/nowhere/at/all",), d.options(backend=["numpy"], dtype=["float64"], ignore=[["x"]])),
    "load_tokenizer": lambda d: (("/nowhere/at/all",), {}),
    # The backend
    "from_numpy": lambda d: ((d.array(3), "numpy"), {}),
    "to_numpy": lambda d: ((d.array(3),), {}),
    # Encodings
    "encodings.sinusoidal": lambda d: ((_positions(d, 3), d.choice([2, 8])), d.options(base=[100.0])),
    "encodings.sinusoidal_shift": lambda d: ((d.randrange(9), d.choice([2, 8])), d.options(base=[100.0])),
    "encodings.sinusoidal_decay": lambda d: ((_positions(d, 3), d.choice([2, 8])), d.options(base=[100.0])),
    "encodings.learned": lambda d: (([0, 2], d.array(3, 4)), {}),
    "encodings.shaw_embeddings": lambda d: ((range(3), range(4), d.array(5, 4)), {}),
    "encodings.shaw_scores": lambda d: ((d.array(3, 4, dtype=np.float32), range(3), range(4), d.array(5, 4, dtype=np.float32)), {}),
    "encodings.shaw_values": lambda d: ((d.array(3, 4, dtype=np.float32), range(3), range(4), d.array(5, 4, dtype=np.float32)), {}),
    "encodings.t5_buckets": lambda d: ((_positions(d, 3),), {"causal": d.some(True, False), **d.options(buckets=[8, 64], max_distance=[100, 2**31])}),
    "encodings.t5_bias": lambda d: ((d.array(8, 2), range(3), range(4)), {"causal": d.some(True, False)}),
    "encodings.alibi_slopes": lambda d: ((d.randint(1, 20),), {}),
    "encodings.alibi_bias": lambda d: ((d.randint(1, 20), _positions(d, 2), _positions(d, 3)), {}),
    # Several ranks: without mpiexec there is one
    "parallel.shard_positions": lambda d: ((d.randrange(20), d.randrange(3), 3), d.options(scheme=list(parallel.SCHEMES))),
    # The oracle
    "check_rotation": lambda d: ((candidates(d), d.choice(ROPES)), d.options(dtype=FLOATS, max_position=[8, 100], min_position=[0, -3], batched=[True], grade=[None], equivalent=["wrong"])),
    "check_attention": lambda d: ((candidates(d),), {"heads": 2, "head_dim": 8, "causal": True, **d.options(rope=ROPES, window=[3], softcap=[2.0], scale=[1.0], key_heads=[1], max_position=[600], dtype=FLOATS)}),
    "check_linear_attention": lambda d: ((candidates(d),), {"rope": d.choice(ROPES), **d.options(heads=[2], feature_map=["exp"], causal=[False], dtype=FLOATS, max_position=[600])}),
    "check_sharding": lambda d: ((d.choice([candidates(d), lambda n, rank, size: range(rank, n, size), lambda *a: d.silly()]),), {}),
    "identify": lambda d: ((candidates(d), d.choice([2, 8])), d.options(dtype=FLOATS, max_position=[8, 100])),
    "traces.diff_traces": lambda d: ((_trace(d), _trace(d)), d.options(tolerance=[0, 1e-3])),
    "adapters.with_axes": lambda d: ((broken, d.choice(["bnhd", "n(hd)"])), {}),
    "adapters.cached": lambda d: ((np.zeros((9, 2)),), d.options(limit=[5])),
    "adapters.from_command": lambda d: (("true {x} {positions} {y}",), d.options(timeout=[1.0])),
    "adapters.from_sequential": lambda d: ((broken,), d.options(limit=[5])),
    "adapters.load_target": lambda d: ((d.choice(["math:hypot", "math:nothing", "no_such:thing", "nowhere.py:f", ":", "a"]),), {}),
}  # fmt: skip
EXEMPT = {
    "definition": "checks nothing, by design",
    "encodings": "its functions are listed one by one",
    "parallel": "needs a communicator, which test_parallel.py has; shard_positions is listed",
    "Report": "made by the checks",
    "Mismatch": "an error",
    "NotJudged": "an error",
    **dict.fromkeys(("assert_rotation", "assert_attention", "assert_linear_attention", "assert_sharding"), "calls the check of the same name"),
}  # fmt: skip
DOCUMENTED = {
    "traces.diff_traces": OSError,
    "load": OSError,
    "load_tokenizer": OSError,
    "Rope.from_config": OSError,
    "from_numpy": (ImportError, RuntimeError),
}
DOCUMENTED["random_model"] = DOCUMENTED["from_numpy"]
SLOW = {"forward", "generate", "Cache", "Model"}
QUIET = {"traces.diff_traces"}  # no warning may leave these, whatever the numbers are


def test_every_public_name_is_fuzzed():
    functions = {
        f"encodings.{name}"
        for name, value in vars(encodings).items()
        if inspect.isfunction(value) and value.__module__ == encodings.__name__ and name[0] != "_"
    }
    assert set(pyrope.__all__) | functions <= set(CALLS) | set(EXEMPT)


def _function(name):
    owner, _, last = name.rpartition(".")
    owners = {"": pyrope, "Rope.": ROPES[7], "traces": traces, "adapters": adapters}
    return getattr(owners[owner] if owner in owners else getattr(pyrope, owner), last)


def _example(draw, name):
    """Arguments, some of them silly."""
    arguments, options = CALLS[name](draw)
    rate = draw.choice([0, 0, 0.15, 0.4])
    arguments = [draw.silly() if draw.random() < rate else value for value in arguments]
    options = {key: draw.silly() if draw.random() < rate else value for key, value in options.items()}
    return arguments, options


def _called(function, arguments, options):
    result = function(*arguments, **options)
    return list(zip(range(3), result)) if inspect.isgenerator(result) else result  # noqa: B905


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    for i in range((30 if name in SLOW else 120) * TIMES):
        draw = Draw(f"{name} {i}")
        arguments, options = _example(draw, name)
        before, words = snapshot([arguments, options]), f"{name}, example {i}: {arguments!r:.500}, {options!r:.500}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error" if name in QUIET else "ignore", RuntimeWarning)
                result = _called(_function(name), arguments, options)
        except (ValueError, TypeError, *np.atleast_1d(DOCUMENTED.get(name, ()))) as error:
            assert str(error), words
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__}: {error}, from {words}") from error
        else:
            if name in RESULTS:
                with np.errstate(all="ignore"):
                    RESULTS[name](words, result, *arguments, **options)
        assert snapshot([arguments, options]) == before, f"an argument was changed: {words}"


def _into(draw, x):
    """Where a rotation of x may be written: an array of its own, x itself, memory that overlaps x; or something silly."""
    if not isinstance(x, np.ndarray) or x.ndim < 2:
        return x, draw.silly()
    room = np.zeros((*x.shape[:-2], x.shape[-2] + 2, 2 * x.shape[-1] + 1), x.dtype)
    kinds = "own|own in part|x|rows before|rows after|features after|silly|read-only|dtype"
    kind = draw.choice(kinds.split("|"))
    if kind == "x" or "after" in kind or "before" in kind:
        inside = room[..., 1:-1, 1 : x.shape[-1] + 1]
        inside[...] = x
        shifts = {"x": (0, 0), "rows before": (-1, 0), "rows after": (1, 0), "features after": (0, draw.randint(1, 2))}
        shift = shifts[kind]
        rows, columns = (slice(1 + s, 1 + s + size) for s, size in zip(shift, x.shape[-2:], strict=True))
        return inside, inside if kind == "x" else room[..., rows, columns]
    own = {"own": np.full_like(x, 7), "own in part": room[..., 1:-1, 1:-1:2], "read-only": np.broadcast_to(x, x.shape)}
    other = np.zeros(x.shape, draw.choice([t for t in FLOATS if t != x.dtype]))
    return x, own[kind] if kind in own else other if kind == "dtype" else draw.silly()


@pytest.mark.parametrize("name", ["rotate", "unrotate"])
def test_results_are_written_where_they_should_be(name):
    """Whatever out is, and however it overlaps x: the result is in it, or an error leaves it as it was."""
    written = 0
    for i in range(300 * TIMES):
        draw = Draw(f"{name} into {i}")
        (x, positions, rope), _ = _example(draw, name)
        x, out = _into(draw, x)
        words, given, before = f"{name}, example {i}: {x!r:.500}, {out!r:.500}", snapshot(x), snapshot(out)
        read = x.copy() if isinstance(x, np.ndarray) else x
        try:
            with np.errstate(all="ignore"):
                options = {"tables": pyrope.rotation_tables(positions, rope, like=x)} if draw.random() < 0.3 else {}
                result = _function(name)(x, positions, rope, out=out, **options)
        except (ValueError, TypeError) as error:
            assert str(error) and snapshot(x) == given and snapshot(out) == before, words
            continue
        assert out is None or result is out, words
        assert np.may_share_memory(result, x) or snapshot(x) == given, f"x was changed: {words}"
        with np.errstate(all="ignore"):
            _check_rotation(words, result, read, positions, rope, inverse=name == "unrotate")
        written += 1
    assert written > 100 * TIMES


# --- What the results must be ---------------------------------------------------------------------------------------


def _units(x):
    """The roundoff of the arithmetic and of the result, and the least normal number of the arithmetic."""
    own = ROUNDOFF[x.dtype.name]
    return min(own, 2.0**-24), own, float(np.finfo(x.dtype if x.dtype == np.float64 else np.float32).tiny)


def _close(words, got, true, allowed, x):
    """Within what is allowed, and the rounding of a result like x, wherever the truth is a number of that dtype."""
    _, own, tiny = _units(x)
    tiny = max(tiny, 2.0**-14 if x.dtype == np.float16 else 0)
    assert got.dtype == x.dtype and got.shape == true.shape, words
    most = 65504 if x.dtype == np.float16 else 3e38 if x.dtype != np.float64 else 1e308
    judged = np.isfinite(true) & np.isfinite(allowed) & (abs(true) + allowed < most)
    off = np.where(judged, abs(got.astype(np.float64) - true), 0)
    limit = np.where(judged, allowed + 2 * own * abs(true) + tiny, 1)
    assert (off <= limit).all(), f"off by {np.nanmax(off / limit)} of what is allowed: {words}"


def _finite(*arrays):
    return all(np.isfinite(x.astype(np.float64)).all() for x in arrays)


def _check_rotation(words, got, x, positions, rope, inverse=False):
    if not _finite(x):
        return
    true, allowed = references.rotate(x, positions, rope.transposed if inverse else rope)
    if inverse:  # Rᵀ/a²
        turned, a2 = slice(rope.start, rope.start + rope.width), rope.attention_factor**2
        true[..., turned] /= a2
        allowed = allowed * max(1, 1 / a2)
    _close(words, got, true, allowed + 4 * _units(x)[2], x)


def _check_attention(words, got, q, k, v, q_positions=None, k_positions=None, **options):
    if not _finite(q, k, v):
        return
    n, (m, d) = q.shape[-2], k.shape[-2:]
    if k_positions is not None and q_positions is None:
        q_positions = np.asarray(k_positions)[m - n :]
    true, allowed = references.attention(q, k, v, q_at=q_positions, k_at=k_positions, **options)
    _close(words, got, true, allowed + (m + d) * _units(q)[2] + 0 * true, q)


def _check_linear(words, got, q, k, v, positions=None, rope=None, *, causal, feature_map="elu+1", denominators="positive", **others):  # fmt: skip
    if not _finite(q, k, v) or not q.size or not v.size or callable(feature_map):
        return
    u, _, tiny = _units(q)
    phi = definition.FEATURE_MAPS[feature_map]
    q64, k64, v64 = (x.astype(np.float64) for x in (q, k, v))
    k64, v64 = (definition.repeat_heads(x, q.shape[-3]) if x.ndim > 2 else x for x in (k64, v64))
    features = np.concatenate([abs(phi(x)).reshape(-1) for x in (q64, k64)])
    if ((features > 0) & (features < 2**24 * tiny)).any():  # in the dtype of the arithmetic these are rounded, or 0
        return

    def turn(x):
        return x if rope is None else references.rotate(x, positions, rope.rotation_only)[0]

    mask = definition.visible(np.arange(q.shape[-2]), np.arange(k.shape[-2]), causal)
    weights, total = definition.similarities(phi(q64), phi(k64), turn, mask)
    true = np.where(total == 0, 0, weights @ v64 / np.where(total == 0, 1, total))
    # What is summed, beside the sum: a rotation turns |φ(q)| and |φ(k)| into any direction, and keeps their lengths.
    lengths = [np.sqrt(np.square(phi(x)).sum(axis=-1)) for x in (q64, k64)]
    sizes = np.where(mask, lengths[0][..., :, None] * lengths[1][..., None, :], 0).sum(axis=-1, keepdims=True)
    terms, divisor = q.shape[-2] + 2 * q.shape[-1] + 32, np.where(total == 0, 1, abs(total))
    excess = sizes / divisor * u * terms
    reach = np.where(excess > 0.1, np.inf, 2 * excess) * (2 * abs(v64).max() + abs(true))
    lost = u * tiny * terms**2 * (2 + sum(x.max() for x in lengths)) / divisor  # products below tiny lose digits
    _close(words, got, true, reach + lost + tiny, q)


def _check_forward(words, got, model, tokens, positions=None, logits="all", segments=None):
    if logits != "all" or segments is not None or np.ndim(tokens) != 1:
        return
    true = by_definition(model.config, model.weights, np.asarray(tokens), positions)
    np.testing.assert_allclose(got, true, rtol=1e-4, atol=1e-4 * abs(true).max(), err_msg=words)


def _check_sinusoidal(words, got, positions, d, base=10000.0):
    m = np.asarray(positions, np.float64)
    angles = m[..., None] * float(base) ** (-2 * np.arange(d // 2) / d)
    true = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(*m.shape, d)
    assert got.shape == true.shape and (abs(got - true) <= 1e-15 * (1 + np.repeat(abs(angles), 2, -1))).all(), words


def _check_slopes(words, got, h):
    power = 2 ** math.floor(math.log2(h))
    true = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    true += [2 ** (-4 * (2 * i + 1) / power) for i in range(h - power)]
    np.testing.assert_allclose(got, true, rtol=1e-14, err_msg=words)


RESULTS = {
    "rotate": _check_rotation,
    "unrotate": lambda *arguments: _check_rotation(*arguments, inverse=True),
    "attention": _check_attention,
    "linear_attention": _check_linear,
    "linear_step": lambda words, got, *arguments, **options: _check_linear(words, got[0], *arguments, causal=True, **options),
    "forward": _check_forward,
    "encodings.sinusoidal": _check_sinusoidal,
    "encodings.alibi_slopes": _check_slopes,
}  # fmt: skip
