"""Whatever comes in, only ValueError, TypeError or a documented error comes out, and inputs stay as they are. Where a
rotation or attention succeeds, with numbers of any size, the result is that of the definition in float64.

Every example depends on its number alone. PYROPE_FUZZ=100 runs a hundred times as many.
"""

from __future__ import annotations

import inspect
import math
import os
import random
import warnings

import numpy as np
import pytest
import references
from models import KINDS
from strategies import DTYPES, UNIT

import pyrope
from pyrope import Axes, DynamicNTK, Linear, Rope, YaRN, encodings, parallel
from pyrope.configs import MODEL_TYPES
from pyrope.oracle import adapters, traces

ROPES = [
    Rope(4, 10000.0, "half"), Rope(8, 500000.0, "interleaved"), Rope(8, 100.0, "interleaved-to-half", 4), Rope(4, 1e12, "half", direction=-1),
    Rope(8, 10000.0, "half", 4, "suffix"), Rope(8, 10000.0, "half", scaling=YaRN(4.0, 2048)), Rope(8, 10000.0, "half", scaling=Linear(8.0)),
    Rope(8, 10000.0, "half", scaling=DynamicNTK(2.0, 64)), Rope(8, 10000.0, "half", axes=Axes("sections", (2, 1, 1))),
    Rope(8, 10000.0, "interleaved", axes=Axes("axial")),
]  # fmt: skip
FLOATS = [*DTYPES.values()]
TIMES = int(os.environ.get("PYROPE_FUZZ", "1"))
MODELS = {name: pyrope.random_model(config, 7) for name, config in KINDS.items()}


# ── Arguments ────────────────────────────────────────────────────────────────────────────────────────────────────────


def silly_values():
    """Values that no argument, or hardly any, means. Made anew each time, since some can be changed."""
    numbers = [None, True, 0, -1, 1, 2, 3, 2**16 + 1, 2**31 + 1, 2**63, 10**30, -(10**400), 0.0, -0.5, 1.5, 1e-320]
    numbers += [1e-46, 1e39, 1e308, math.nan, math.inf, -math.inf, 1j, np.int8(100), np.uint8(7), np.float16(2)]
    words = ["", "half", "nonsense", "\0", "θ" * 50, b"bytes"]
    others = [(), [], [1, 2, 3], [None], [[0, 1], [2]], {}, {"a": 1}, set(), object(), len, range(3), range(10**12)]
    kinds = [(3,), (0,), (), (1, 4), (2, 3, 4), (2, 0, 4), (1, 1, 1, 1, 1), (2, 3, 8)]
    types = ["?", "i1", "u8", "i8", "f2", "f4", "f8", "c8", "U3", "O", ">f4", "M8[s]"]
    arrays = [np.zeros(kinds[i % 8], t) for i, t in enumerate(types)]
    arrays += [np.full((2, 3, 4), x, "f4") for x in (np.nan, np.inf, 3e38, 1e-45)]
    arrays += [np.ma.masked_array([1.0]), np.broadcast_to(np.float32(1), (3, 4)), np.ones((2, 3, 2))[..., ::-1]]
    return [*numbers, *words, *others, *arrays, Exception, np.float32, iter(())]


class Draw(random.Random):
    """Draws from a seed, so that every example can be had again by its number."""

    def silly(self):
        return self.choice(silly_values())

    def options(self, **named):
        """Some of these options: each is a list of values to choose from."""
        return {name: self.choice(values) for name, values in named.items() if self.random() < 0.4}

    def array(self, *shape, dtype=None):
        """Normal numbers; at times large, tiny, zero, not finite, read-only, or not contiguous."""
        dtype = dtype or self.choice(FLOATS)
        rng = np.random.default_rng(self.getrandbits(32))
        x = rng.standard_normal(shape) * self.choice([1, 1, 1, 1, 1, 30, 1e-4, 1e-30, 1e30, 0])
        if self.random() < 0.1 and x.size:
            x.flat[self.randrange(x.size)] = self.choice([np.nan, np.inf, -np.inf, 1e300])
        with np.errstate(over="ignore"):
            x = x.astype(dtype)
        if self.random() < 0.2 and x.ndim:
            x = np.repeat(x, 2, axis=-1)[..., ::2]
        x.flags.writeable = self.random() > 0.3
        return x


def snapshot(value):
    """Something that compares equal as long as the value has not been changed."""
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype.str, value.tobytes() if value.dtype != object else repr(value))
    if isinstance(value, list | tuple):
        return [snapshot(one) for one in value]
    if isinstance(value, dict):
        return {key: snapshot(one) for key, one in value.items()}
    return repr(value)


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
    g, r, e, m, d = (draw.choice(sizes) for sizes in ((1, 2), (1, 2), (1, 2, 3), (0, 1, 2, 5, 70), (2, 4, 8)))
    lead, dtype, n = draw.choice([(), (), (2,)]), draw.choice(FLOATS), m if n is None else n(m)
    shapes = ((g * r, n, d), (g, m, d), (g, m, e))
    return tuple(draw.array(*lead, *shape, dtype=dtype) for shape in shapes)


def _attention(draw):
    q, k, v = _qkv(draw, lambda m: draw.choice([m, m, 1, 3]))
    n, m = q.shape[-2], k.shape[-2]
    masks = [np.tri(n, m, dtype=bool), np.zeros((1, m), bool), np.triu(np.full((n, m), -np.inf), 1)]
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
    return (q, k, v, *at), draw.options(feature_map=maps, denominators=["positive", "nonzero"], chunk=[1, 3, 192])


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
    config = {**config, key: draw.silly()} if draw.random() < 0.3 else config
    return (config,), draw.options(layout=["half"], layer_type=["full_attention"])


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
    "linear_attention": lambda d: (lambda made, more: (made, {"causal": d.choice([True, False]), **more}))(*_linear(d)),
    "linear_step": _linear,
    "linear_state": lambda d: (_linear(d)[0][1:], d.options(feature_map=["exp"], chunk=[1, 3])),
    # Models
    "Config": _config,
    "Layer": lambda d: ((d.choice(ROPES),), d.options(window=[3])),
    "Model": lambda d: ((MODELS["plain"].config, MODELS["plain"].weights), {}),
    "random_model": lambda d: ((KINDS["plain"], 1), d.options(dtype=["float64"], backend=["numpy"])),
    "weight_shapes": lambda d: ((KINDS["plain"],), {}),
    "forward": _forward,
    "Cache": lambda d: ((MODELS["plain"], d.choice([1, 9])), d.options(batch=[1, 2])),
    "generate": lambda d: ((MODELS["plain"], [1, 2], 3), d.options(temperature=[0, 1.0, 1e-300], top_k=[2], top_p=[0.5], seed=[1], stop=[(), [3]])),
    "load": lambda d: (("/nowhere/at/all",), d.options(backend=["numpy"], dtype=["float64"], ignore=[["x"]])),
    "load_tokenizer": lambda d: (("/nowhere/at/all",), {}),
    "chat_prompt": lambda d: (("Why?",), d.options(system=["Be brief."])),
    # The backend
    "namespace": lambda d: ((d.array(3), None), {}),
    "get": lambda d: (("numpy",), {}),
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
    "encodings.t5_buckets": lambda d: ((_positions(d, 3),), {"causal": d.choice([True, False]), **d.options(buckets=[8, 64], max_distance=[100, 2**31])}),
    "encodings.t5_bias": lambda d: ((d.array(8, 2), range(3), range(4)), {"causal": d.choice([True, False])}),
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
    "parallel": "needs a communicator, which tests/mpi has; shard_positions is listed",
    "find_smollm2": "takes no argument",
    "Tokenizer": "made by load_tokenizer, from files",
    "LinearState": "made by linear_state",
    "Tables": "made by rotation_tables",
    "Report": "made by the checks",
    "Mismatch": "an error",
    "NotJudged": "an error",
    **dict.fromkeys(("assert_rotation", "assert_attention", "assert_linear_attention", "assert_sharding"), "calls the check of the same name"),
}  # fmt: skip
DOCUMENTED = {
    **dict.fromkeys(("traces.diff_traces", "load", "load_tokenizer", "Rope.from_config"), (OSError,)),
    **dict.fromkeys(("get", "from_numpy", "random_model"), (ImportError, RuntimeError)),
}
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
        except (ValueError, TypeError, *DOCUMENTED.get(name, ())) as error:
            assert str(error), words
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__}: {error}, from {words}") from error
        else:
            if name in RESULTS:
                with np.errstate(all="ignore"):
                    RESULTS[name](words, result, *arguments, **options)
        assert snapshot([arguments, options]) == before, f"an argument was changed: {words}"


# ── What the results must be ─────────────────────────────────────────────────────────────────────────────────────────


def _assert_close(words, got, true, allowed, x):
    """Within what is allowed, and the rounding of a result like x, wherever the truth is a number of that dtype."""
    least = float(np.finfo(x.dtype if x.dtype == np.float64 else np.float32).tiny)
    least, allowed = max(least, 2.0**-14 if x.dtype == np.float16 else 0), allowed + 100 * least
    assert got.dtype == x.dtype and got.shape == true.shape, words
    most = 65504 if x.dtype == np.float16 else 3e38 if x.dtype != np.float64 else 1e308
    judged = np.isfinite(true) & np.isfinite(allowed) & (abs(true) + allowed < most)
    off = np.where(judged, abs(got.astype(np.float64) - true), 0)
    limit = np.where(judged, allowed + 2 * UNIT[x.dtype.name] * abs(true) + least, 1)
    assert (off <= limit).all(), f"off by {np.nanmax(off / limit)} of what is allowed: {words}"


def _finite(*arrays):
    return all(np.isfinite(x.astype(np.float64)).all() for x in arrays)


def _assert_rotation(words, got, x, positions, rope, inverse=False):
    if not _finite(x):
        return
    true, allowed = references.rotate(x, positions, rope.transposed if inverse else rope)
    if inverse:  # Rᵀ/a²
        turned, a2 = slice(rope.start, rope.start + rope.width), rope.attention_factor**2
        true[..., turned] /= a2
        allowed = allowed * max(1, 1 / a2)
    _assert_close(words, got, true, allowed, x)


def _assert_attention(words, got, q, k, v, q_positions=None, k_positions=None, **options):
    if not _finite(q, k, v):
        return
    if k_positions is not None and q_positions is None:
        q_positions = np.asarray(k_positions)[k.shape[-2] - q.shape[-2] :]
    true, allowed = references.attention(q, k, v, q_at=q_positions, k_at=k_positions, **options)
    _assert_close(words, got, true, allowed + 0 * true, q)


RESULTS = {
    "rotate": _assert_rotation,
    "unrotate": lambda *given: _assert_rotation(*given, inverse=True),
    "attention": _assert_attention,
}
