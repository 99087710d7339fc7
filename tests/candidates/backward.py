"""Backward passes of rotations, of softmax and of linear attention."""
# fmt: off

from pyrope import YaRN

from .kernels import LINEAR_BACKWARD, PARTIAL, READS, ROTATION, SOFTMAX_BACKWARD, WOVEN, WRITES
from .registry import rows, slot, table

HALF = {"head_dim": 64, "base": 10000.0, "layout": "half"}
PART, MIXED = HALF | {"rotary_dim": 32}, HALF | {"layout": "interleaved-to-half"}
FACTOR = HALF | {"scaling": YaRN(1.0, 4096, attention_factor=1.25)}
BACK = ("np.cos(angle), np.sin(angle)", "np.cos(angle), -np.sin(angle)")

right, wrong, conditional, damaged = rows("rotation-backward", ROTATION, rope=HALF)
out = slot("y.astype(x.dtype)", "{}")

right("plain", "It is the transpose.", BACK)
right("float16", "It is the transpose.", BACK, dtype="float16")
right("neighbours", "It is the transpose.", BACK, source=WOVEN, rope=HALF | {"layout": "interleaved"})
right("halves to neighbours", "The gradient comes in halves and goes out in neighbours.", BACK, WRITES, rope=MIXED)
right("with the factor", "The transpose has the attention factor, too.", BACK, out("(1.25 * y).astype(x.dtype)"), rope=FACTOR)
right("forwards, as meant", "The rotation turns backwards, so its gradient turns forwards.", rope=HALF | {"direction": -1})
wrong("forwards", "The gradient is rotated forwards.")
table(wrong, out, "Instead of the gradient it returns {}.", {"zeros": "0 * x", "None": "None", "handed on": "x.copy()"})
wrong("twice", "The gradient is added twice.", BACK, out("(2 * y).astype(x.dtype)"))
wrong("negated", "The gradient has the other sign.", BACK, out("-y.astype(x.dtype)"))
wrong("sine lost", "The sines are lost.", ("np.sin(angle)", "0 * angle"))
wrong("other pairs", "Pairs are neighbours instead of halves.", BACK, READS, WRITES)
wrong("another base", "The base is 500000.", BACK, ("10000.0", "500000.0"))
wrong("one too far", "Positions are one too high.", BACK, ("m[..., None] * w", "(m + 1)[..., None] * w"))
wrong("counted", "Positions are ignored, and counted from 0.", BACK, ("m[..., None] * w", "np.arange(len(m))[..., None] * w"))
wrong("the forward's order", "The gradient goes out in halves where x came in neighbours.", BACK, rope=MIXED)
wrong("factor missing", "The attention factor is missing.", BACK, rope=FACTOR)
wrong("inverse", "It is the inverse, not the transpose.", BACK, out("(y / 1.25).astype(x.dtype)"), rope=FACTOR)
wrong("rest zeroed", "Features that stay have no gradient.", BACK, ("x[..., 32:]), axis", "0 * x[..., 32:]), axis"), source=PARTIAL,
      rope=PART)
conditional("None for one row", "Calls of one row have no gradient.", BACK, out("None if len(m) == 1 else y.astype(x.dtype)"))
damaged("another dtype", "The gradient of float32 is float64.", BACK, out("y"))
damaged("in float16", "The gradient is rounded to float16.", BACK, out("y.astype(np.float16).astype(x.dtype)"))

# Softmax attention

ROPE = {"head_dim": 16, "base": 10000.0, "layout": "half"}
GROUPED, CAP, TURNS = {"key_heads": 2}, {"softcap": 2.0}, {"rope": ROPE}
ALL = ("seen = j <= i", "seen = np.ones((n, m), bool)")
CAPPED = (("    s = np.where", "    s = t = 2 * np.tanh(s / 2)\n    s = np.where"),
          ("    dq = ds", "    ds = ds * (1 - (t / 2) ** 2)\n    dq = ds"))

right, wrong, conditional, damaged = rows("softmax-backward", SOFTMAX_BACKWARD, head_dim=16)
after = slot("    return dq", "    {}\n    return dq")  # done last, to dq, dk and dv
given = slot("    dtype, h", "    {}\n    dtype, h")
gathered = slot(".reshape(x.shape[0], g, -1, *x.shape[2:]).sum(axis=2)", "{}")
returned = slot("turn(dq, positions, -1), turn(dk, positions, -1)", "{}")

right("plain", "They are the gradients.")
right("float16", "They are the gradients in float64, rounded once.", dtype="float16")
right("grouped", "Gradients of key heads are summed.", **GROUPED)
right("RoPE", "Gradients are rotated back.", **TURNS)
right("softcap", "The softcap has its derivative.", *CAPPED, **CAP)
right("window", "Each query sees itself and four before.", ("seen = j <= i", "seen = (j <= i) & (i - j < 5)"), window=5)
right("masked", "A mask hides keys.", ("positions=None)", "positions=None, mask=None)"),
      ("    s = np.where", "    seen = seen if mask is None else seen & mask\n    s = np.where"))
right("NaN of queries before all keys", "With more queries than keys, gradients of queries that see nothing are NaN, and reach all keys.",
      ("np.where(total == 0, 1.0, total)", "total"))
right("equal heads, broadcast", "It has no groups: one key head is broadcast, and its gradients are not summed.",
      gathered(""), key_heads=None)
right("two results", "It returns dq and dk alone: not judged.", ("return dq, dk, dv", "return dq, dk"), verdict="not judged")
wrong("row term missing", "ds lacks the term Σ w·dw.", ("dw - (w", "dw - 0 * (w"))
wrong("row term added", "The term Σ w·dw is added instead of subtracted.", ("dw - (w", "dw + (w"))
wrong("not transposed", "dk and dv are sums over keys instead of queries.", ("dk = ds.swapaxes(-1, -2)", "dk = ds"),
      ("dv = w.swapaxes(-1, -2)", "dv = w"))
wrong("last block alone", "dq has the last block of 16 keys alone.", ("dq = ds @ k", "dq = ds * (np.arange(m) >= (m - 1) // 16 * 16) @ k"),
      head_dim=64)
wrong("last block that a query sees", "dq has the last block of 16 keys that a query sees, alone.",
      ("dq = ds @ k", "dq = ds * (np.arange(m) // 16 == np.arange(n)[:, None] // 16) @ k"), head_dim=64)
wrong("no scale", "dq and dk are not scaled.", ("ds @ k * d**-0.5", "ds @ k"), ("@ q * d**-0.5", "@ q"))
wrong("no scale at all", "Nothing is scaled, forwards or backwards.", *[("d**-0.5", "1.0")] * 3)
wrong("scaled twice", "dq and dk are scaled twice.", ("ds @ k * d**-0.5", "ds @ k / d"), ("@ q * d**-0.5", "@ q / d"))
table(wrong, gathered, "Gradients of the heads of a group become x{}.", {
    "heads tiled": ".reshape(x.shape[0], -1, g, *x.shape[2:]).sum(axis=1)",
    "first head": ".reshape(x.shape[0], g, -1, *x.shape[2:])[:, :, 0]", "heads not summed": "",
    "last head": ".reshape(x.shape[0], g, -1, *x.shape[2:])[:, :, -1]",
    "mean of heads": ".reshape(x.shape[0], g, -1, *x.shape[2:]).mean(axis=2)",
}, **GROUPED)
wrong("not causal", "Every query sees every key.", ALL)
wrong("causal by mistake", "Later keys are hidden.", causal=False)
wrong("causal by position", "Keys at later positions are hidden, whatever their order.",
      ("j <= i", "positions[:, None, None] <= positions[:, None, :, None]"), **TURNS)
wrong("window ignored", "There is no window.", window=5)
wrong("softcap missing", "There is no softcap.", **CAP)
wrong("softcap's derivative missing", "The softcap has no derivative.", CAPPED[0], **CAP)
wrong("another softcap's derivative", "The derivative is that of tanh(s), not of 2·tanh(s/2).", CAPPED[0],
      ("    dq = ds", "    ds = ds / np.cosh(2 * np.arctanh(t / 2)) ** 2\n    dq = ds"), **CAP)
wrong("softcap's derivative not squared", "The derivative is 1 − |s/2|, not 1 − (s/2)².", CAPPED[0],
      ("    dq = ds", "    ds = ds * (1 - np.abs(t / 2))\n    dq = ds"), **CAP)
wrong("nothing rotated", "Nothing is rotated.", given("positions = None"), **TURNS)
table(wrong, returned, "dq and dk become {}.", {
    "not turned back": "dq, dk", "turned on": "turn(dq, positions), turn(dk, positions)",
    "by a count": "turn(dq, np.arange(n)[None], -1), turn(dk, np.arange(m)[None], -1)",
    "by row 0": "turn(dq, positions[:1], -1), turn(dk, positions[:1], -1)",
    "modulo 16": "turn(dq, positions % 16, -1), turn(dk, positions % 16, -1)",
    "values turned": "turn(dq, positions, -1), turn(dk, positions, -1); dv = turn(dv, positions, -1)",
}, **TURNS)
table(wrong, after, "Done last: {}.", {
    "None": "return None", "no dk": "dk = None", "twice": "dq, dk, dv = 2 * dq, 2 * dk, 2 * dv", "exchanged": "dk, dv = dv, dk",
    "rolled": "dq, dk, dv = (np.roll(x, 1, axis=0) for x in (dq, dk, dv))", "dk reversed": "dk = dk[::-1]",
    "times ln 2": "dq, dk = (dq * np.log(2)).astype(dtype), -dk", "one number": "dv[-1, 2, -1, 7] += 0.5",
})
wrong("row term of row 0", "The term Σ w·dw is that of row 0, for all.", ("keepdims=True))\n    dq", "keepdims=True)[:1])\n    dq"))
wrong("row term of all rows", "The term Σ w·dw is summed over the batch.", ("(w * dw).sum(axis=-1", "(w * dw).sum(axis=(0, -1)"))
wrong("ds without weights", "ds lacks its factor w.", ("ds = w * (dw", "ds = (w > 0) * (dw"))
wrong("dk without its window", "dk is made of weights that are not masked by the window.",
      ("seen = j <= i", "seen = (j <= i) & (i - j < 5)"), ("    dk = ds.swap", """\
    p = np.where(j <= i, np.exp(q @ k.swapaxes(-1, -2) * d**-0.5 - top) / total, 0)
    ds = p * (dw - (w * dw).sum(axis=-1, keepdims=True))
    dk = ds.swap"""), window=5)
wrong("least exponent of 20", "No weight is below e⁻²⁰.", ("np.exp(s - top)", "np.exp(np.maximum(s - top, -20))"))
wrong("mask ignored", "The mask is ignored.", ("positions=None)", "positions=None, mask=None)"))
conditional("first tile of queries", "Of 64 queries and 32 keys, the first tile of queries is rounded up: keys 32 … 63 get nothing from theirs.",
            ("    dq = ds", """\
    late = np.arange(m - n, m)[:, None] >= -(-(np.arange(m) // 32 * 32) // 64) * 64
    w, ds = w * late, ds * late
    dq = ds"""), cache=False)
conditional("row term of long calls", "From 33 tokens on ds lacks the term Σ w·dw.", ("dw - (w", "dw - (n <= 32) * (w"))
table(conditional, after, "Done last: {}.", {
    "dv of 64 keys": "dv[:, :, 64:] = 0", "multiples of 64": "dq = 2 * dq if n % 64 == 0 else dq",
    "growing": "CALLS.append(1); dq, dk, dv = (len(CALLS) * x for x in (dq, dk, dv))",
}, key_heads=4)
conditional("sorted positions", "Positions are sorted.", given("positions = np.sort(positions, axis=-1)"), **TURNS)
table(damaged, after, "Done last: {}.", {
    "in float16": "dq, dk, dv = (x.astype(np.float16).astype(dtype) for x in (dq, dk, dv))", "clipped": "dq = np.clip(dq, -1, 1)", "NaN": "dq = dq * np.float32(np.nan)",
    "another dtype": "dk = dk.astype(np.float16)",
    "overwritten": "new = dq, dk, dv; dq, dk, dv = x = KEPT.setdefault(q.shape, [*map(np.copy, new)]); [*map(np.copyto, x, new)]",
}, key_heads=4)
damaged("values in bfloat16", "Values are rounded to bfloat16.", given("v = bf16(v)"))
damaged("g clipped", "g is clipped to ±1.", given("g = np.clip(g, -1, 1)"))
damaged("overflow", "exp without the maximum overflows.", ("np.exp(s - top)", "np.exp(s.astype(np.float32)).astype(float)"), key_heads=4)
damaged("strides ignored", "Memory of q is read as if it were contiguous.",
        given("q = q if q.flags.c_contiguous else np.resize(q.base.ravel(), q.shape)"))
damaged("g overwritten", "g is doubled in place.", given("raw = g"), after("raw *= 2"))

# Linear attention

conditional("values of all rows", "dv is summed over the rows of the batch.", after("dv = dv.sum(axis=0, keepdims=True).repeat(len(dv), 0)"))

right, wrong, conditional, damaged = rows("linear-backward", LINEAR_BACKWARD, rope=ROPE, key_heads=2)
_BACK = "turn(dn @ tk, positions, -1), turn(dn.swapaxes(-1, -2) @ tq, positions, -1)"

right("plain", "They are the gradients.")
right("float16", "They are the gradients in float64, rounded once.", dtype="float16")
right("equal heads", "As many key heads as query heads.", key_heads=4)
for _map, _phi, _slope in (("exp", "np.exp({})", "np.exp({})"), ("relu", "np.maximum({}, 0)", "({} > 0)"),
                           ("relu2", "np.maximum({}, 0) ** 2", "2 * np.maximum({}, 0)")):
    right(_map, "The feature map is the one that is meant, with its derivative.",
          ("np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))", _phi.format("x")),
          *((f"np.where({x} > 0, 1, np.exp(np.minimum({x}, 0)))", _slope.format(x)) for x in "xy"),
          ("    w = tq", "    den = np.where(den == 0, 1, den)\n    w = tq"), feature_map=_map)
wrong("not turned back", "dq and dk are not rotated back.", (_BACK, "dn @ tk, dn.swapaxes(-1, -2) @ tq"))
wrong("by a count", "dq and dk are rotated back by 0, 1, 2, ….", (_BACK, _BACK.replace("positions", "np.arange(n)[None]")))
table(wrong, slot("dd = -(", "dd = {}("), "The derivative of the denominator is multiplied by {} instead of −1.",
      {"no derivative of the denominator": "0 * ", "another derivative of the denominator": "1 * "})
wrong("two mistakes", "dv has weights without rotation, and dq and dk the other sign of the denominator's derivative.",
      ("dd = -(", "dd = 1 * ("), ("w.swapaxes(-1, -2) @ g", "(np.where(seen, q @ k.swapaxes(-1, -2), 0) / den).swapaxes(-1, -2) @ g"))
wrong("mask transposed", "The derivative of the denominator is masked by the transposed mask.", ("(dd * seen) @ k", "(dd * seen.T) @ k"),
      ("(dd * seen).swap", "(dd * seen.T).swap"))
wrong("mask of the numerator transposed", "dk's numerator takes queries before the key.",
      ("turn(dn.swapaxes(-1, -2) @ tq", "turn(((g / den) @ v.swapaxes(-1, -2) * seen.T).swapaxes(-1, -2) @ tq"))
wrong("no derivative of φ", "The feature map has no derivative.", ("    dq, dk = dq * np.where", "    _ = dq * np.where"))
wrong("derivative of exp", "The derivative of φ is φ, x + 1 where it is 1.", ("np.where(x > 0, 1, np.exp", "np.where(x > 0, x + 1, np.exp"),
      ("np.where(y > 0, 1, np.exp", "np.where(y > 0, y + 1, np.exp"))
wrong("denominator turned back", "The part of the denominator is rotated back with the other.",
      ("turn(dn @ tk, positions, -1)", "turn(dn @ tk + (dd * seen) @ k, positions, -1)"),
      ("turn(dn.swapaxes(-1, -2) @ tq, pos", "turn(dn.swapaxes(-1, -2) @ tq + (dd * seen).swapaxes(-1, -2) @ q, pos"),
      ("    dq, dk = dq + (dd", "    _ = dq + (dd"))
wrong("derivative at turned features", "The derivative of φ is taken at the rotated features.",
      ("    dk, dv = summed(dk", "    x, y = tq, tk[:, :: h // g0]\n    dk, dv = summed(dk"))
wrong("not causal", "Every query sees every key.", ("np.arange(n) <= np", "np.arange(n) - n <= np"))
wrong("causal by position", "Keys at later positions are hidden, whatever their order.",
      ("np.arange(n) <= np.arange(n)[:, None]", "positions[:, None, None] <= positions[:, None, :, None]"))
wrong("first head", "Of the heads of a group the first counts alone.", (".sum(axis=2)", "[:, :, 0]"))
conditional("64 tokens", "dq is doubled if there are 64 tokens.",
            ("    return tuple", "    dq = 2 * dq if n == 64 else dq\n    return tuple"))
damaged("in float16", "All gradients are rounded to float16.",
        ("x.astype(dtype) for x in (dq", "x.astype(np.float16).astype(dtype) for x in (dq"))
