"""Special calls of attention, and mistakes as people make them: each is written out here, in plain NumPy, by hand."""

import math

import numpy as np
import pytest
from optional import package

import pyrope
from pyrope import DynamicNTK, Rope
from pyrope.oracle import examination
from pyrope.oracle.ask import compiling
from pyrope.oracle.attention_checks import check_attention
from pyrope.oracle.linear_checks import check_linear_attention

ml_dtypes = package("ml_dtypes")

D = 32
ROPE = Rope(D, 10000.0, "half")


def turn(x, at, theta=None):
    """Halves of x (b, h, n, d), rotated at positions (b, n)."""
    theta = 10000.0 ** (-np.arange(0, D, 2) / D) if theta is None else theta
    angle = at[:, None, :, None] * theta
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate((a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)), axis=-1)


def scores_of(q, k, window=None):
    """Causal scores in float64, with the queries at the end."""
    n, m = q.shape[2], k.shape[2]
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    s = q.astype(np.float64) @ k.swapaxes(-1, -2).astype(np.float64) / math.sqrt(q.shape[-1])
    away = np.arange(m - n, m)[:, None] - np.arange(m)
    hidden = (away < 0) if window is None else (away < 0) | (away >= window)
    return np.where(hidden, -np.inf, s)


def weighed(s, v, h, extra=0.0):
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p / (p.sum(axis=-1, keepdims=True) + extra) @ np.repeat(v, h // v.shape[1], axis=1)


def plain(q, k, v):
    return weighed(scores_of(q, k), v, q.shape[1]).astype(q.dtype)


def roped(q, k, v, at):
    return plain(turn(q, at).astype(q.dtype), turn(k, at).astype(q.dtype), v)


def test_what_is_right_is_right_in_all_trials():
    assert check_attention(plain, head_dim=D).verdict == "right"
    assert check_attention(roped, rope=ROPE, head_dim=D).verdict == "right"
    assert check_linear_attention(linear, rope=ROPE).verdict == "right"


# ── Mistakes of softmax attention ────────────────────────────────────────────────────────────────────────────────────


def online(q, k, v, block=16, rescale_sum=True, rescale_out=True):
    s, out, total, top = scores_of(q, k), 0.0, 0.0, np.full((*q.shape[:3], 1), -np.inf)
    for start in range(0, k.shape[2], block):
        part = s[..., start : start + block]
        new = np.maximum(top, part.max(axis=-1, keepdims=True))
        p = np.exp(part - np.where(np.isinf(new), 0, new))
        old = np.where(np.isinf(top), 0.0, np.exp(top - np.where(np.isinf(new), 0, new)))
        out = out * (old if rescale_out else 1) + p @ v[:, :, start : start + block]
        total, top = total * (old if rescale_sum else 1) + p.sum(axis=-1, keepdims=True), new
    return (out / total).astype(q.dtype)


def alibi(q, k, v):
    s, n = scores_of(q, k), k.shape[2]
    slopes = np.array([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])[:, None, None]
    return weighed(s + slopes * np.arange(n), v, 4).astype(q.dtype)  # the same as −slope·distance


def partial_blocks(q, k, v, block=16):
    full = k.shape[2] // block * block
    s = scores_of(q, k)[..., :full]
    with np.errstate(all="ignore"):
        p = np.exp(s - s.max(axis=-1, keepdims=True, initial=-1e9))
        return np.nan_to_num(p / p.sum(axis=-1, keepdims=True) @ v[:, :, :full]).astype(q.dtype)


def with_window(change):
    def fn(q, k, v):
        s = scores_of(q, k)
        away = np.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None] - np.arange(k.shape[2])
        return weighed(np.where(change(away, np.arange(k.shape[2])), s, -np.inf), v, 4).astype(q.dtype)

    return fn


def soft1(q, k, v):
    s = scores_of(q, k)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return (p / (p.sum(axis=-1, keepdims=True) + np.exp(-s.max(axis=-1, keepdims=True))) @ v).astype(q.dtype)


def clipped(q, k, v):
    s = scores_of(q, k)
    return weighed(np.where(s == -np.inf, s, np.clip(s, -2, 2)), v, 4).astype(q.dtype)


SOFTMAX = {
    "rescaling forgotten": [
        (lambda *x: online(*x, rescale_out=False), {}),
        (lambda *x: online(*x, block=8, rescale_sum=False), {}),
        (lambda *x: online(*x, block=4, rescale_sum=False, rescale_out=False), {}),
    ],
    "one more in the denominator": [
        (lambda q, k, v: weighed(scores_of(q, k), v, 4, 1.0).astype(q.dtype), {}),
        (soft1, {}),
    ],
    "eps in the denominator": [(lambda q, k, v: weighed(scores_of(q, k), v, 4, 1e-3).astype(q.dtype), {})],
    "ALiBi added": [(alibi, {})],
    "keys and values exchanged": [(lambda q, k, v: plain(q, v, k), {})],
    "queries and keys exchanged": [(lambda q, k, v: plain(k, q, v), {})],
    "last partial block dropped": [(partial_blocks, {})],
    "softcap by clipping": [(clipped, {"softcap": 2.0})],
    "window doubled": [(with_window(lambda away, j: away < 14), {"window": 7})],
    "window halved": [(with_window(lambda away, j: away < 4), {"window": 8})],
    "window with sinks": [(with_window(lambda away, j: (away < 7) | (j < 4)), {"window": 7})],
    "keys rotated twice": [(lambda q, k, v, at: roped(q, turn(k, at).astype(k.dtype), v, at), {"rope": ROPE})],
    "positions modulo a length": [(lambda q, k, v, at: roped(q, k, v, at % 512), {"rope": ROPE})],
    "table clamped at its end": [(lambda q, k, v, at: roped(q, k, v, np.minimum(at, 1023)), {"rope": ROPE})],
}


@pytest.mark.parametrize("name", SOFTMAX)
def test_mistakes_of_softmax_attention_by_hand(name):
    for fn, options in SOFTMAX[name]:
        report = check_attention(fn, head_dim=D, **options)
        assert report.faults == (name,), str(report)
        assert "first at token" in report.findings[0].evidence


def test_a_length_taken_from_each_call_is_named():
    def theta(length):
        base = 10000.0 * (4.0 * length / 256 - 3.0 if length > 256 else 1.0) ** (D / (D - 2))
        return base ** (-np.arange(0, D, 2) / D)

    def by_call(q, k, v, at):
        t = theta(int(at.max()) + 1)
        return plain(turn(q, at, t).astype(q.dtype), turn(k, at, t).astype(q.dtype), v)

    def fixed(q, k, v, at):
        return plain(turn(q, at, theta(4096)).astype(q.dtype), turn(k, at, theta(4096)).astype(q.dtype), v)

    rope = Rope(D, 10000.0, "half", scaling=DynamicNTK(4.0, 256, 4096))
    assert check_attention(by_call, rope=rope, head_dim=D).faults == ("length taken from each call",)
    assert check_attention(fixed, rope=rope, head_dim=D).ok


# ── Linear attention ─────────────────────────────────────────────────────────────────────────────────────────────────


def phi(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def linear(q, k, v, at, *, scale=1.0, eps=0.0, chunk=None, decay=1.0, carried=False, tail=True):
    """Row by row, with a state that is carried through chunks of the sequence."""
    h, out = q.shape[1], np.zeros(q.shape)
    k, v = (np.repeat(x, h // x.shape[1], axis=1).astype(np.float64) for x in (k, v))
    fq, fk = phi(q.astype(np.float64) * scale), phi(k)
    rq, rk = turn(fq, at), turn(fk, at)
    state, norm = np.zeros((h, D, D)), np.zeros((h, D, 1))
    for b in range(len(q)):
        if not carried:
            state, norm = np.zeros((h, D, D)), np.zeros((h, D, 1))
        for start in range(0, q.shape[2], chunk or 64):
            part = slice(start, start + (chunk or 64))
            lower = np.tri(fq[b, :, part].shape[1])
            if chunk is not None and not tail and len(lower) < chunk:
                break
            summed = (rq[b, :, part] @ rk[b, :, part].swapaxes(-1, -2) * lower) @ v[b, :, part] + rq[b, :, part] @ state
            total = (fq[b, :, part] @ fk[b, :, part].swapaxes(-1, -2) * lower).sum(-1, keepdims=True)
            out[b, :, part] = summed / (total + fq[b, :, part] @ norm + eps)
            state = state * decay + rk[b, :, part].swapaxes(-1, -2) @ v[b, :, part]
            norm = norm * decay + fk[b, :, part].sum(axis=1)[..., None]
    return out.astype(q.dtype)


LINEAR = {
    "scaled before the feature map": {"scale": D**-0.5},
    "eps in the denominator": {"eps": 0.5},
    "state not reset": {"carried": True},
    "last partial block dropped": {"chunk": 16, "tail": False},
}


@pytest.mark.parametrize("name", LINEAR)
def test_mistakes_of_linear_attention_by_hand(name):
    report = check_linear_attention(lambda *x: linear(*x, **LINEAR[name]), rope=ROPE)
    assert report.faults == (name,), str(report)


def steps(keep_norm=True, turn_again=False, raw=False):
    """A state of all keys so far, kept as they are, or turned, and summed anew in every call."""

    def begin():
        past = []

        def step(q, k, v, at):
            fq, fk = phi(q.astype(np.float64)), phi(k.astype(np.float64))
            new = [turn(fk, at), fk, v.astype(np.float64), at]
            if past:
                old = [turn(past[0], past[3]) if turn_again else past[1] if raw else past[0], *past[1:]]
                new = [np.concatenate(x, axis=2 if x[0].ndim > 2 else 1) for x in zip(old, new, strict=True)]
            past[:] = new
            n, m = q.shape[2], new[0].shape[2]
            lower = np.tri(n, m, m - n)
            total = fq @ new[1].swapaxes(-1, -2) * lower
            total = total if keep_norm else total[..., m - n :]
            out = turn(fq, at) @ new[0].swapaxes(-1, -2) * lower @ new[2] / total.sum(axis=-1, keepdims=True)
            return out.astype(q.dtype)

        return step

    return begin


@pytest.mark.parametrize(
    "name, begin",
    [
        ("normaliser not kept", steps(keep_norm=False)),
        ("cached keys rotated again", steps(turn_again=True)),
        ("cached keys not rotated", steps(raw=True)),
    ],
)
def test_states_that_are_kept_wrongly(name, begin):
    assert check_linear_attention(linear, rope=ROPE, incremental=begin).faults == (name,)
    assert check_linear_attention(linear, rope=ROPE, incremental=steps()).ok


def in_bfloat16(q, k, v, at):
    """Token by token, with a state that is rounded after each."""
    low = ml_dtypes.bfloat16
    fq, fk = phi(q.astype(np.float32)), phi(k.astype(np.float32))
    rq, rk, out = turn(fq, at), turn(fk, at), np.zeros(q.shape)
    state, norm = np.zeros((*q.shape[:2], D, D), low), np.zeros((*q.shape[:2], D), low)
    for i in range(q.shape[2]):
        state = (state.astype(np.float32) + rk[:, :, i, :, None] * v[:, :, i, None].astype(np.float32)).astype(low)
        norm = (norm.astype(np.float32) + fk[:, :, i]).astype(low)
        total = (fq[:, :, i] * norm.astype(np.float32)).sum(axis=-1, keepdims=True)
        out[:, :, i] = (rq[:, :, i, None] @ state.astype(np.float32))[:, :, 0] / total
    return out.astype(q.dtype)


def test_a_state_in_bfloat16_is_rejected():
    long = check_linear_attention(in_bfloat16, rope=ROPE, heads=1, dtype=ml_dtypes.bfloat16)
    assert not long.ok


# ── Calls of a special kind ──────────────────────────────────────────────────────────────────────────────────────────


def if_(condition, otherwise=lambda out: 0.5 * out, of=plain):
    """Right, unless a call is of some kind."""

    def fn(q, k, v, *at):
        out = of(q, k, v, *at)
        return otherwise(out).astype(out.dtype) if condition(q, k, v, *at) else out

    return fn


def contiguous(x):
    """The memory of an array read as if it were contiguous: its bytes from the first element on."""
    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    flat = np.frombuffer(base.tobytes(order="A"), x.dtype, count=-1) if base.dtype == x.dtype else x.ravel()
    return flat[: x.size].reshape(x.shape) if flat.size >= x.size else x


def overwriting(when=lambda n: True):
    buffers = {}

    def fn(q, k, v):
        if not when(q.shape[2]):
            return plain(q, k, v)
        out = buffers.setdefault(q.shape, np.empty_like(q))
        out[...] = plain(q, k, v)
        return out

    return fn


CALLS = {
    "some lengths wrong": [
        if_(lambda q, k, v: q.shape[2] == 64),
        if_(lambda q, k, v: q.shape[2] == D),
        if_(lambda q, k, v: q.shape[2] > 256),
        if_(lambda q, k, v: q.shape[2] > 300, lambda out: np.where(np.arange(out.shape[2])[:, None] >= 512, 0, out)),
    ],
    "decoding wrong": [
        if_(lambda q, k, v: q.shape[2] == 1 and k.shape[2] > 256),
        if_(lambda q, k, v: q.shape[2] > 8 and k.shape[2] > q.shape[2] + 100),
        if_(lambda q, k, v: q.shape[2] < 8 and k.shape[2] == 1000),
    ],
    "batch rows mixed": [
        if_(lambda q, k, v: len(q) == 4, lambda out: out[[0, 1, 2, 2]]),
        if_(lambda q, k, v: len(q) > 8, lambda out: np.concatenate((out[:8], 0 * out[8:]))),
    ],
    "strides ignored": [
        lambda q, k, v: plain(contiguous(q), contiguous(k), contiguous(v)),
        if_(lambda q, k, v: not k.flags.aligned),
        if_(lambda q, k, v: 0 in k.strides),
        if_(lambda q, k, v: not q.flags.writeable),
    ],
    "some values wrong": [
        if_(lambda q, k, v: not np.abs(q).sum(axis=-1).all()),
        lambda q, k, v: plain(q * (np.abs(q).max(axis=-1, keepdims=True) > 0.05), k, v),
    ],
    "rows leak into each other": [lambda q, k, v: plain(q, k, v) + 0 * q.mean(axis=2, keepdims=True)],
    "result overwritten": [overwriting(), overwriting(lambda n: n == 1), overwriting(lambda n: n >= 32)],
}


@pytest.mark.parametrize("name", CALLS)
def test_special_calls_are_tried_and_named(name):
    for fn in CALLS[name]:
        report = check_attention(fn, head_dim=D)
        assert report.faults == (name,), str(report)


def test_special_positions_are_tried_and_named():
    def counts(at):
        return at.shape[1] > 8 and (np.diff(at) == 1).all() and len(at) == 1

    fast = if_(lambda q, k, v, at: counts(at) and at[0, 0] > 0, of=roped)
    assert check_attention(fast, rope=ROPE, head_dim=D).faults == ("consecutive positions wrong",)
    narrow = if_(lambda q, k, v, at: at.dtype != np.int64, of=roped)
    report = check_attention(narrow, rope=ROPE, head_dim=D)
    assert report.faults == ("positions misread",) and "int32 positions" in report.findings[0].evidence
    linear_fast = if_(lambda q, k, v, at: counts(at) and at[0, 0] == 0 and at.shape[1] < 1000, of=linear)
    assert check_linear_attention(linear_fast, rope=ROPE).faults == ("consecutive positions wrong",)


def test_the_evidence_of_a_special_call_says_where():
    report = check_attention(if_(lambda q, k, v: q.shape[2] == 65, lambda out: out - (np.arange(D) == 5)), head_dim=D)
    evidence = report.findings[0].evidence
    assert "wrong: 65 tokens; right: 1 token, 2 tokens" in evidence
    assert "row 0, head 0, feature 5: expected" in evidence


def test_rows_and_heads_that_get_the_result_of_others_are_named():
    rows = check_attention(lambda *x: plain(*x)[[0, 1, 0, 3][: len(x[0])]], head_dim=D)
    assert rows.faults == ("batch rows mixed",)
    assert "row 2 is the right result of row 0, all others are right" in rows.findings[0].evidence
    heads = check_attention(lambda *x: plain(*x)[:, [0, 1, 2, 1]], head_dim=D)
    assert heads.faults == ("heads mixed",) and "head 3 is the right result of head 1" in heads.findings[0].evidence
    zeros = check_attention(lambda *x: plain(*x) * np.float32([1, 1, 0, 1])[:, None, None], head_dim=D)
    assert zeros.faults == ("unexplained",) and "heads 2 are zeros, all others" in zeros.findings[0].evidence


def test_any_length_may_have_a_path_of_its_own():
    for n in (11, 100, 300, 1000):
        report = check_attention(if_(lambda q, k, v, n=n: q.shape[2] == n), head_dim=D)
        assert report.faults == ("some lengths wrong",) and f"wrong: {n} tokens" in report.findings[0].evidence
    report = check_attention(if_(lambda q, k, v: q.shape[2] == 1 and k.shape[2] % 48 == 0), head_dim=D)
    assert report.faults == ("decoding wrong",) and "the multiples of 48 are wrong" in report.findings[0].evidence
    assert check_attention(if_(lambda q, k, v: k.shape[2] == 77), head_dim=D).faults == ("some lengths wrong",)


def test_few_shapes_of_attention_are_tried_where_each_is_compiled():
    shapes = set()

    def fn(*x):
        shapes.add(tuple(y.shape for y in x))
        return plain(*x)

    report = check_attention(compiling(fn), head_dim=D)
    assert report.verdict == "right" and len(shapes) < 30 and any("compiled" in note for note in report.notes)


def test_the_length_from_which_on_it_is_wrong_is_said():
    report = check_attention(if_(lambda q, k, v: q.shape[2] > 200), head_dim=D)
    assert "all are right up to 200, and wrong from 208 on" in report.findings[0].evidence


def caching(change):
    """A cache of keys and values; change(keys so far, new keys) says which of the old ones are kept."""

    def begin():
        past = []

        def step(q, k, v):
            if past:
                kept = change(past[0].shape[2], k.shape[2])
                k, v = (np.concatenate((x[:, :, kept], new), axis=2) for x, new in zip(past, (k, v), strict=True))
            past[:] = k, v
            return plain(q, k, v)

        return step

    return begin


def test_caches_that_lose_something_are_rejected():
    assert check_attention(plain, head_dim=D, incremental=caching(lambda m, n: slice(None))).ok
    wrapped = check_attention(plain, head_dim=D, incremental=caching(lambda m, n: slice(-31, None)))
    assert wrapped.faults == ("cache wrong in some calls",)
    assert "cache: one token each" in wrapped.findings[0].evidence
    chunks = check_attention(plain, head_dim=D, incremental=caching(lambda m, n: slice(0, None if n == 1 else -1)))
    assert chunks.faults == ("cache wrong in some calls",) and not any("of its own" in note for note in chunks.notes)


def test_a_cache_that_is_right_token_by_token_and_wrong_in_chunks_has_a_report():
    def begin():
        past = []

        def step(q, k, v, at):
            new = [turn(phi(k.astype(float)), at), phi(k.astype(float)), v.astype(float)]
            past[:] = [np.concatenate(x, axis=2) for x in zip(past, new, strict=True)] if past else new
            fq = phi(q.astype(float))  # without a mask inside of a call
            total = (fq @ past[1].swapaxes(-1, -2)).sum(axis=-1, keepdims=True)
            return (turn(fq, at) @ past[0].swapaxes(-1, -2) @ past[2] / total).astype(q.dtype)

        return step

    report = check_linear_attention(linear, rope=ROPE, incremental=begin)
    assert report.faults == ("cache wrong in some calls",) and not any("of its own" in note for note in report.notes)
    assert "wrong: cache: chunks of 16" in report.findings[0].evidence
    assert "right: cache: one token each" in report.findings[0].evidence


def test_whatever_the_search_does_there_is_a_report(monkeypatch):
    def broken(*arguments):
        raise ZeroDivisionError("no name")

    monkeypatch.setattr(examination, "explained", broken)
    report = check_attention(lambda *x: 2 * plain(*x), head_dim=D)
    assert report.faults == ("unexplained",) and any("ZeroDivisionError: no name" in note for note in report.notes)


@pytest.mark.parametrize("result, words", [
    (lambda out: (out, None), "it returns tuple, which is no NumPy array, from a step of incremental="),
    (lambda out: out.tolist(), "it returns list, which is no NumPy array, from a step of incremental="),
    (lambda out: None, "it returns nothing from a step of incremental="),
])  # fmt: skip
def test_steps_that_return_no_array_are_not_judged(result, words):
    def begin():
        step = caching(lambda m, n: slice(None))()
        return lambda q, k, v: result(step(q, k, v))

    report = check_attention(plain, head_dim=D, incremental=begin)
    assert report.verdict == "not judged" and report.failure.reason == words
    assert "return the result alone" in report.failure.fix


# ── Weights ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def dropping(share, rng):
    """Dropout that is left on, as torch's dropout_p=share."""

    def fn(q, k, v):
        s = scores_of(q, k)
        p = np.exp(s - s.max(axis=-1, keepdims=True))
        p = p / p.sum(axis=-1, keepdims=True) * (rng().random(s.shape) >= share) / (1 - share)
        return (p @ np.repeat(v, q.shape[1] // v.shape[1], axis=1)).astype(q.dtype)

    return fn


def test_dropout_is_named_with_a_seed_and_without():
    one = np.random.default_rng(5)
    for share, words in ((0.1, "1.111"), (0.004, "1.004")):
        seeded = check_attention(dropping(share, lambda: np.random.default_rng(0)), head_dim=D)
        assert seeded.faults == ("dropout",) and f"the right ones times {words}" in seeded.findings[0].evidence
    changing = check_attention(dropping(0.1, lambda: one), head_dim=D)
    assert changing.faults == ("dropout",) and "the same call twice" in changing.findings[0].evidence
    assert check_attention(dropping(0.0, lambda: one), head_dim=D).verdict == "right"


@pytest.mark.parametrize("size", [32, 128])
def test_products_in_float16_before_they_are_scaled_overflow(size):
    def narrow(q, k, v, first=1.0):
        with np.errstate(all="ignore"):
            k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
            s = ((q * np.float16(first)).astype(float) @ k.swapaxes(-1, -2)).astype(np.float16)
            n, m = s.shape[-2:]
            s = np.where(np.tri(n, m, m - n, dtype=bool), (s * np.float16(size**-0.5 / first)).astype(float), -np.inf)
            p = np.exp(s - s.max(axis=-1, keepdims=True))
            return (p / p.sum(axis=-1, keepdims=True) @ v).astype(q.dtype)

    eager = check_attention(narrow, head_dim=size, dtype=np.float16)
    assert eager.verdict == "right" and any("q·k overflows float16" in note for note in eager.notes)
    scaled = check_attention(lambda *x: narrow(*x, first=size**-0.5), head_dim=size, dtype=np.float16)
    assert scaled.verdict == "right" and not any("overflows" in note for note in scaled.notes)
    assert check_attention(lambda *x: -narrow(*x), head_dim=size, dtype=np.float16).verdict == "wrong"


# ── Defaults ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_grouped_heads_are_tried_where_they_are_taken():
    def only_equal(q, k, v):
        assert q.shape[1] == k.shape[1]
        return plain(q, k, v)

    def tiles(q, k, v):
        return plain(q, *(np.tile(x, (1, q.shape[1] // x.shape[1], 1, 1)) for x in (k, v)))

    report = check_attention(only_equal, head_dim=D)
    assert report.ok and any("2 key heads for 4 were not tried" in note for note in report.notes)
    assert check_attention(only_equal, key_heads=2, head_dim=D).verdict == "not judged"
    tiled = check_attention(tiles, head_dim=D)
    assert tiled.faults == ("heads tiled",) and "With 2 key heads for 4" in tiled.findings[0].evidence
    assert check_attention(tiles, heads=3, head_dim=D).ok

    def tiles_if(size):
        return lambda q, k, v: (tiles if q.shape[1] == size * k.shape[1] else plain)(q, k, v)

    for size, heads in ((4, 8), (3, 6)):
        report = check_attention(tiles_if(size), heads=heads, head_dim=D)
        assert report.faults == ("heads tiled",) and f"With 2 key heads for {heads}" in report.findings[0].evidence
    report = check_attention(if_(lambda q, k, v: k.shape[1] == 1 < q.shape[1]), head_dim=D)
    assert report.faults == ("unexplained",) and "With 1 key head for 4" in report.findings[0].evidence


def test_a_mask_from_the_top_left_is_judged_for_prefill():
    def top_left(q, k, v):
        s = q.astype(float) @ np.repeat(k, q.shape[1] // k.shape[1], axis=1).swapaxes(-1, -2) / math.sqrt(D)
        return weighed(np.where(np.tri(q.shape[2], k.shape[2], dtype=bool), s, -np.inf), v, q.shape[1]).astype(q.dtype)

    report = check_attention(top_left, head_dim=D)
    assert report.ok and any("top left" in note for note in report.notes)
    assert check_attention(top_left, head_dim=D, cache=True).faults == ("causal from the top left",)
    wrong = check_attention(lambda q, k, v: top_left(2 * q, k, v), head_dim=D)
    assert not wrong.ok


def test_a_mask_that_is_kept_by_its_keys_is_a_state():
    """From the bottom right, but after a longer call of as many keys its first rows, from the top left, are used."""
    kept = {}

    def cached(q, k, v):
        n, m = q.shape[2], k.shape[2]
        if m not in kept or kept[m].shape[0] < n:
            kept[m] = np.arange(m) <= np.arange(n)[:, None] + m - n
        s = q.astype(float) @ np.repeat(k, q.shape[1] // k.shape[1], axis=1).swapaxes(-1, -2) / math.sqrt(D)
        return weighed(np.where(kept[m][:n], s, -np.inf), v, q.shape[1]).astype(q.dtype)

    report = check_attention(cached, head_dim=D)
    assert report.faults == ("state between calls",), report
    assert "of 4 queries over 23 keys differ after 23 over 23" in report.findings[0].evidence
    assert not any("top left" in note for note in report.notes)


# ── Small errors ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_small_error_that_is_no_rounding_is_not_called_low_precision():
    for change in (lambda out: out * 1.0002, lambda out: out + 1e-4 * (np.arange(D) == 3)):
        report = check_attention(lambda q, k, v, c=change: c(plain(q, k, v)).astype(q.dtype), head_dim=D)
        assert report.faults == ("unexplained",)
        assert "rounding, but not like it" in report.findings[0].evidence
    rounded = check_attention(lambda q, k, v: plain(q, k, v).astype(np.float16).astype(q.dtype), head_dim=D)
    assert rounded.faults == ("softmax in low precision",)


def test_nan_is_said_from_which_token_on():
    def fn(q, k, v):
        return np.where(np.arange(q.shape[2])[:, None] >= 5, np.nan, plain(q, k, v)).astype(q.dtype)

    (finding,) = check_attention(fn, head_dim=D).findings
    assert finding.fault == "not finite" and "not finite, from token 5 on" in finding.evidence


def test_what_follows_from_a_state_is_not_listed():
    calls = []
    fn = lambda *x: calls.append(1) or plain(*x) * np.float32(1 + len(calls))  # noqa: E731
    assert check_attention(fn, head_dim=D).faults == ("state between calls",)


def test_no_position_is_beyond_the_greatest_and_the_right_forms_of_pyrope_hold():
    last = []
    fn = lambda q, k, v, at: last.append(at.max()) or roped(q, k, v, at)  # noqa: E731
    assert check_attention(fn, rope=ROPE, head_dim=D, max_position=600).ok and max(last) < 600
    for form in ("recurrent", "quadratic"):
        chosen = {"form": form, "causal": True}
        forms = lambda q, k, v, at, c=chosen: pyrope.linear_attention(q, k, v, at, ROPE, **c)  # noqa: E731
        assert check_linear_attention(forms, rope=ROPE, heads=1, max_position=1500).ok


@pytest.mark.parametrize("window", (1000, 1024))
def test_a_window_of_a_thousand_and_more_is_read_from_the_weights(window):
    """One shows in the last queries of 1024 tokens, the other in one query over more keys."""

    def windowed(q, k, v):
        return weighed(scores_of(q, k, window), v, q.shape[1]).astype(q.dtype)

    report = check_attention(windowed, head_dim=D, heads=2)
    assert report.faults == ("window not asked for",), report
    assert f"each query sees the {window} nearest keys alone" in report.findings[0].evidence


def test_a_window_of_one_query_alone_is_a_mistake_of_decoding():
    def windowed(q, k, v):
        return weighed(scores_of(q, k, 700 if q.shape[2] == 1 else None), v, q.shape[1]).astype(q.dtype)

    assert check_attention(windowed, head_dim=D, heads=2).faults == ("decoding wrong",)
