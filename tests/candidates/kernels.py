"""Kernels as people write them, as text in which the tables of this folder make one slip each. All of these are right."""

from .registry import edited

ROTATION = """import numpy as np

D, BASE = 64, 10000.0
KEPT, CALLS = {}, []  # for slips that remember something


def bf16(x):
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent)


def yarn(w, factor, length=4096, fast=32, slow=1, down=np.floor, up=np.ceil):
    low, high = (D * np.log(length / (2 * np.pi * turns)) / (2 * np.log(BASE)) for turns in (fast, slow))
    low, high = down(low), up(high)
    ramp = np.clip((np.arange(D // 2) - low) / (high - low), 0, 1)
    return w * (1 - ramp + ramp / factor)


def llama3(w, factor=8, low=1, high=4, length=8192, blend=lambda t: t):
    wave = 2 * np.pi / w
    t = blend((length / wave - low) / (high - low))
    return np.where(wave < length / high, w, np.where(wave > length / low, w / factor, (1 - t) * w / factor + t * w))


def turn(x, angle):
    x = x.astype(np.float64)
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = np.split(x, 2, axis=-1)
    out = a * cos - b * sin, a * sin + b * cos
    return np.concatenate(out, axis=-1)


def fn(x, positions):
    m, i = np.asarray(positions, np.float64), np.arange(D // 2)
    w = BASE ** (-2 * i / D)
    y = turn(x, m[..., None] * w)
    return y.astype(x.dtype)
"""
READS = ("np.split(x, 2, axis=-1)", "x[..., ::2], x[..., 1::2]")  # neighbours instead of halves
WRITES = ("np.concatenate(out, axis=-1)", "np.stack(out, axis=-1).reshape(x.shape)")
WOVEN = edited(ROTATION, READS, WRITES)
PARTIAL = edited(ROTATION, ("D, BASE = 64", "D, BASE = 32"),
                 ("turn(x, m[..., None] * w)", "np.concatenate((turn(x[..., :32], m[..., None] * w), x[..., 32:]), axis=-1)"))  # fmt: skip
# Positions (axes, n): which axis and which frequency each pair has, as (n, pairs).
AXES = edited(ROTATION, ("D, BASE = 64", "D, BASE = 16"), ("    w = BASE", "    at = m[[0, 0, 1, 1, 1, 2, 2, 2]].T\n    w = BASE"),
              ("m[..., None] * w", "at * w"))  # fmt: skip
SERIES = ("-2 * i / D", "-np.array([0, 1 / 2, 0, 1 / 3, 2 / 3, 0, 1 / 3, 2 / 3])")  # Flux: each axis its own
FLUX = edited(AXES, READS, WRITES, SERIES)

_TURN = """import numpy as np

BASE = 10000.0
KEPT, CALLS = {}, []  # for slips that remember something


def bf16(x):
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent)


def repeat(x, h):
    return np.repeat(x, h // x.shape[1], axis=1)


def turn(x, at, sign=1):
    p = x.shape[-1] // 2
    w = BASE ** (-np.arange(p) / p)
    angle = sign * at[:, None, :, None] * w
    cos, sin, a, b = np.cos(angle), np.sin(angle), x[..., :p], x[..., p:]
    return np.concatenate((a * cos - b * sin, a * sin + b * cos), axis=-1)

"""
SOFTMAX = f"""{_TURN}
def fn(q, k, v, positions=None):
    dtype, h, n, m, d = q.dtype, q.shape[1], q.shape[2], k.shape[2], q.shape[3]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    if positions is not None:
        q, k = turn(q, positions), turn(k, positions)
    k, v = repeat(k, h), repeat(v, h)
    s = q @ k.swapaxes(-1, -2) * d**-0.5
    i, j = np.arange(m - n, m)[:, None], np.arange(m)
    seen = j <= i
    s = np.where(seen, s, -np.inf)
    top = s.max(axis=-1, keepdims=True, initial=-np.inf)
    with np.errstate(all="ignore"):
        e = np.where(seen, np.exp(s - top), 0.0)
        total = e.sum(axis=-1, keepdims=True)
        w = e / np.where(total == 0, 1.0, total)
        o = w @ v
    return o.astype(dtype)
"""
MASKED = edited(SOFTMAX, ("positions=None)", "positions=None, mask=None, segments=None)"), ("    s = np.where", """\
    if mask is not None:
        seen = seen & mask
    if segments is not None:
        seen = seen & (segments[:, None, -n:, None] == segments[:, None, None, :])
    s = np.where"""))  # fmt: skip
ONLINE = SOFTMAX.partition("    top = ")[0] + """\
    top, total, o = np.full((*q.shape[:3], 1), -np.inf), np.zeros((*q.shape[:3], 1)), np.zeros(q.shape)
    with np.errstate(all="ignore"):
        for start in range(0, m, 16):
            part = slice(start, start + 16)
            new = np.maximum(top, s[..., part].max(axis=-1, keepdims=True))
            p, old = np.nan_to_num(np.exp(s[..., part] - new)), np.nan_to_num(np.exp(top - new))
            total, o, top = total * old + p.sum(axis=-1, keepdims=True), o * old + p @ v[:, :, part], new
    return (o / np.where(total == 0, 1.0, total)).astype(dtype)
"""  # fmt: skip
CACHE = f"""{SOFTMAX}

def begin():
    past = []

    def step(q, k, v, positions):
        new = [turn(k.astype(np.float64), positions), v, positions]
        past[:] = [np.concatenate(x, axis=min(x[0].ndim - 1, 2)) for x in zip(past, new)] if past else new
        return fn(turn(q.astype(np.float64), positions), past[0], past[1]).astype(q.dtype)

    return step
"""
_PHI = """
def phi(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

"""
_PRODUCTS = """    dtype, (b, h, n, d) = q.dtype, q.shape
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = repeat(k, h), repeat(v, h)
    q, k = phi(q), phi(k)
    tq, tk = turn(q, positions), turn(k, positions)
"""
LINEAR = f"""{_TURN}{_PHI}
def fn(q, k, v, positions):
{_PRODUCTS}    o, j = np.zeros(q.shape), np.arange(n)
    for start in range(0, n, 256):  # queries in blocks, for the memory
        rows = slice(start, start + 256)
        i = j[rows, None]
        seen = j <= i
        num = (tq[:, :, rows] @ tk.swapaxes(-1, -2) * seen) @ v
        den = (q[:, :, rows] @ k.swapaxes(-1, -2) * seen).sum(axis=-1, keepdims=True)
        o[:, :, rows] = num / np.where(den == 0, 1.0, den)
    return o.astype(dtype)
"""
CHUNKED = f"""{_TURN}{_PHI}
def fn(q, k, v, positions):
{_PRODUCTS}    o = np.zeros(q.shape)
    for row in range(b):
        S, z = np.zeros((h, d, d)), np.zeros((h, d, 1))
        for start in range(0, n, 16):
            part = slice(start, start + 16)
            qc, kc, tqc, tkc, vc = (x[row, :, part] for x in (q, k, tq, tk, v))
            lower = np.tri(qc.shape[1])
            num = (tqc @ tkc.swapaxes(-1, -2) * lower) @ vc + tqc @ S
            den = (qc @ kc.swapaxes(-1, -2) * lower).sum(axis=-1, keepdims=True) + qc @ z
            o[row, :, part] = num / den
            S, z = S + tkc.swapaxes(-1, -2) @ vc, z + kc.sum(axis=1)[..., None]
    return o.astype(dtype)
"""
LINEAR_CACHE = f"""{LINEAR}

def begin():
    past = []

    def step(q, k, v, positions):
{_PRODUCTS.replace("    ", "        ")}        new = [tk, k, v, positions]
        past[:] = [np.concatenate(x, axis=min(x[0].ndim - 1, 2)) for x in zip(past, new)] if past else new
        tk, k, v, at = past
        m = k.shape[2]
        seen = np.tri(n, m, m - n)
        den = q @ k.swapaxes(-1, -2) * seen
        return ((tq @ tk.swapaxes(-1, -2) * seen) @ v / den.sum(axis=-1, keepdims=True)).astype(dtype)

    return step
"""
_SUMMED = """
def summed(x, g):
    return x.reshape(x.shape[0], g, -1, *x.shape[2:]).sum(axis=2)

"""
SOFTMAX_BACKWARD = edited(SOFTMAX, ("\ndef fn(q, k, v, p", f"{_SUMMED}\ndef fn(q, k, v, g, p"),
                          ("q, k, v = (x", "g0, q, k, v, g = k.shape[1], *(x"),
                          ("in (q, k, v))", "in (q, k, v, g))"), ("        o = w @ v\n    return o.astype(dtype)\n", """\
    dw = g @ v.swapaxes(-1, -2)
    ds = w * (dw - (w * dw).sum(axis=-1, keepdims=True))
    dq = ds @ k * d**-0.5
    dk = ds.swapaxes(-1, -2) @ q * d**-0.5
    dv = w.swapaxes(-1, -2) @ g
    dk, dv = summed(dk, g0), summed(dv, g0)
    if positions is not None:
        dq, dk = turn(dq, positions, -1), turn(dk, positions, -1)
    dq, dk, dv = (x.astype(dtype) for x in (dq, dk, dv))
    return dq, dk, dv
"""))  # fmt: skip
LINEAR_BACKWARD = f"""{_TURN}{_PHI}{_SUMMED}
def fn(q, k, v, g, positions):
    x, y, g0, g = q.astype(np.float64), k.astype(np.float64), k.shape[1], g.astype(np.float64)
{_PRODUCTS}    seen = np.arange(n) <= np.arange(n)[:, None]
    den = (q @ k.swapaxes(-1, -2) * seen).sum(axis=-1, keepdims=True)
    w = tq @ tk.swapaxes(-1, -2) * seen / den
    dn = (g / den) @ v.swapaxes(-1, -2) * seen
    dd = -(g / den * (w @ v)).sum(axis=-1, keepdims=True)
    dq, dk = turn(dn @ tk, positions, -1), turn(dn.swapaxes(-1, -2) @ tq, positions, -1)
    dq, dk = dq + (dd * seen) @ k, dk + (dd * seen).swapaxes(-1, -2) @ q
    dk, dv = summed(dk, g0), summed(w.swapaxes(-1, -2) @ g, g0)
    dq, dk = dq * np.where(x > 0, 1, np.exp(np.minimum(x, 0))), dk * np.where(y > 0, 1, np.exp(np.minimum(y, 0)))
    return tuple(x.astype(dtype) for x in (dq, dk, dv))
"""
