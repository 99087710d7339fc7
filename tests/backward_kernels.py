"""Backward passes of attention as a person would write them, by einsum, with what can be broken in them.

They know nothing of pyrope: the rotation is that of base 10000 in halves.
"""

import dataclasses

import numpy as np

D = 16


def turn(x, at, sign=1):
    angle = sign * at[:, None, :, None] / 10000.0 ** (np.arange(0, D, 2) / D)
    cos, sin, a, b = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype), x[..., : D // 2], x[..., D // 2 :]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Softmax attention's backward pass, with what can be broken in it; called like a candidate."""

    rotates: bool = False
    scale: float = D**-0.5
    gradient_scale: float | None = None
    row_term: float = 1.0  # how often it is subtracted
    transposed: bool = True  # for the gradients of keys and values
    block: int = 0  # of keys, of which dq has the last alone
    turns_values: bool = False
    groups: str = "sum"
    back: int = -1  # the sign of the angle in the backward pass; 0: not turned at all
    back_at: object = None  # of the positions: those of the backward pass
    causal: bool = True
    by_position: bool = False  # causality and the window
    window: int | None = None
    softcap: float | None = None
    cap_derivative: bool = True
    after: object = None
    work: type = np.float64  # what it computes in
    least: float = -np.inf  # the least exponent of a weight

    def __call__(self, q, k, v, g, *positions, mask=None):
        dtype, h, kv = q.dtype, q.shape[1], k.shape[1]
        q, k, v, g = (x.astype(self.work) for x in (q, k, v, g))
        if self.rotates:
            q, k = turn(q, positions[0][:, -q.shape[-2] :]), turn(k, positions[0])
        k, v = k.repeat(h // kv, axis=1), v.repeat(h // kv, axis=1)
        s = np.einsum("bhnd,bhmd->bhnm", q, k) * self.scale
        s = s if self.softcap is None else self.softcap * np.tanh(s / self.softcap)
        n, m = s.shape[-2:]
        near = np.arange(m - n, m)[:, None] - np.arange(m)
        near = positions[0][:, None, -n:, None] - positions[0][:, None, None] if self.by_position else near
        hidden = (near < 0) & self.causal
        hidden = hidden | (abs(near) >= (self.window or np.inf))
        hidden = hidden if mask is None else hidden | ~mask
        top = np.where(hidden, s.min(), s).max(axis=-1, keepdims=True)
        w = np.where(hidden, 0, np.exp(np.where(hidden, 0, np.maximum(s - top, self.least))))
        total = w.sum(axis=-1, keepdims=True)
        w = w / np.where(total == 0, 1, total)
        dw = np.einsum("bhnd,bhmd->bhnm", g, v)
        ds = w * (dw - self.row_term * (w * dw).sum(axis=-1, keepdims=True))
        if self.softcap is not None and self.cap_derivative:
            ds = ds * (1 - (s / self.softcap) ** 2)
        scale = self.scale if self.gradient_scale is None else self.gradient_scale
        last = np.arange(m) >= (m - 1) // self.block * self.block if self.block else 1.0
        by_key = "bhnm,bhnd->bhmd" if self.transposed else "bhnm,bhmd->bhnd"
        dq, dk = np.einsum("bhnm,bhmd->bhnd", ds * last, k) * scale, np.einsum(by_key, ds, q) * scale
        dk, dv = (self._collected(x, kv) for x in (dk, np.einsum(by_key, w, g)))
        if self.rotates and self.back:
            at = positions[0] if self.back_at is None else self.back_at(positions[0])
            dq, dk = turn(dq, at[:, -n:], self.back), turn(dk, at, self.back)
            dv = turn(dv, positions[0], self.back) if self.turns_values else dv
        out = tuple(x.astype(dtype) for x in (dq, dk, dv))
        return out if self.after is None else self.after(*out)

    def _collected(self, x, kv):
        b, h, m, d = x.shape
        if self.groups == "none":
            return x
        apart = x.reshape(b, kv, h // kv, m, d)
        tiled = x.reshape(b, h // kv, kv, m, d).sum(axis=1)
        made = {"sum": apart.sum(axis=2), "first": apart[:, :, 0], "mean": apart.mean(axis=2), "tiled": tiled}
        return made[self.groups]


def linear(
    q, k, v, g, at, turn_back=True, denominator=True, slope=True, causal=True, groups="sum", stores=False, by_position=False,
    back_at=lambda at: at,
):  # fmt: skip
    """The gradients of Eq. (19), by sums over the pairs of tokens; it may store g/D in the dtype of q."""
    dtype, h, kv = q.dtype, q.shape[1], k.shape[1]
    q, k, v, g = (x.astype(np.float64) for x in (q, k, v, g))
    fq, fk = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k))
    tq, tk = turn(fq, at), turn(fk, at)
    fk, tk, vv = (x.repeat(h // kv, axis=1) for x in (fk, tk, v))
    seen = np.tril(np.ones((q.shape[-2],) * 2)) if causal else np.ones((q.shape[-2],) * 2)
    seen = at[:, :, None] >= at[:, None] if by_position else np.broadcast_to(seen, (len(q), *seen.shape))
    d = np.einsum("bhnd,bhmd,bnm->bhn", fq, fk, seen)[..., None]
    w = np.einsum("bhnd,bhmd,bnm->bhnm", tq, tk, seen) / d
    shares = (g / d).astype(dtype).astype(np.float64) if stores else g / d
    dn = np.einsum("bhnd,bhmd,bnm->bhnm", shares, vv, seen)
    dd = -(shares * np.einsum("bhnm,bhmd->bhnd", w, vv)).sum(axis=-1, keepdims=True) * denominator
    dq, dk = np.einsum("bhnm,bhmd->bhnd", dn, tk), np.einsum("bhnm,bhnd->bhmd", dn, tq)
    dk, dv = (
        Kernel(groups=groups)._collected(dk, kv),
        Kernel(groups=groups)._collected(np.einsum("bhnm,bhnd->bhmd", w * d, shares), kv),
    )
    plain = Kernel(groups=groups)._collected(np.einsum("bnm,bhnd->bhmd", seen, dd * fq), kv)
    dq, dk = (turn(dq, back_at(at), -1), turn(dk, back_at(at), -1)) if turn_back else (dq, dk)
    dq, dk = dq + dd * np.einsum("bnm,bhmd->bhnd", seen, fk), dk + plain
    if slope:
        dq, dk = dq * np.where(q > 0, 1, np.exp(np.minimum(q, 0))), dk * np.where(k > 0, 1, np.exp(np.minimum(k, 0)))
    return tuple(x.astype(dtype) for x in (dq, dk, dv))
