"""Linear attention, Eq. (19): right ones, the slips that people make, wrong in some calls alone, and damaged numbers."""
# fmt: off

from pyrope import YaRN

from .kernels import CHUNKED, LINEAR, LINEAR_CACHE
from .registry import rows, slot, table

ROPE = {"head_dim": 32, "base": 10000.0, "layout": "half"}
PHI = "np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))"

right, wrong, conditional, damaged = rows("linear", LINEAR, rope=ROPE, heads=4, key_heads=2)
see = slot("seen = j <= i", "seen = {}")  # who sees whom, and how much of it
phi = slot(PHI, "{}")
mapped = slot("phi(q), phi(k)", "{}")
rotated = slot("turn(q, positions), turn(k, positions)", "{}")
numerator = slot("tk.swapaxes(-1, -2) * seen", "tk.swapaxes(-1, -2) * ({})")
denominator = slot("k.swapaxes(-1, -2) * seen).sum", "k.swapaxes(-1, -2) * ({})).sum")
below = slot("np.where(den == 0, 1.0, den)", "{}")
heads = slot("np.repeat(x, h // x.shape[1], axis=1)", "{}")
given = slot("    dtype, (b", "    {}\n    dtype, (b")
out = slot("o.astype(dtype)", "{}")
times = slot("o.astype(dtype)", "(o * ({})).astype(dtype)")
before = slot("        tq, tk", "        {}\n        tq, tk")  # in a step of a cache
keeping = slot("        past[:]", "        {}\n        past[:]")

right("plain", "It is Eq. (19) in float64.")
for _dtype in ("float16", "bfloat16", "float64"):
    right(_dtype, "It is Eq. (19) in float64, rounded once.", dtype=_dtype)
right("chunked", "A state is carried through chunks of 16.", source=CHUNKED)
right("both sides", "Every query sees every key.", see("j <= i + n"), causal=False)
right("cache", "Features and values are kept from call to call.", source=LINEAR_CACHE, steps=True)
for _map, _phi in (("relu", "np.maximum(x, 0)"), ("relu2", "np.maximum(x, 0) ** 2"), ("exp", "np.exp(x)")):
    right(_map, "The feature map is the one that is meant.", phi(_phi), feature_map=_map)
right("a small eps", "10⁻⁶ is added to the denominator, which is lost in rounding.", below("(den + 1e-6)"))
right("float32 angles", "Angles are in float32, which is right in float64.",
      ("sign * at[:, None, :, None] * w", "at[:, None, :, None].astype('f4') * w.astype('f4')"), dtype="float64")
right("one row", "It refuses batches: not judged.", given("assert len(q) == 1 or q.shape[2] == 1"), verdict="not judged")

table(wrong, phi, "The feature map is {}.", {
    "relu instead": "np.maximum(x, 0)", "exp instead": "np.exp(x)", "no feature map": "x", "elu + 1.01": f"{PHI} + 0.01", "squares": "x**2",
})
table(wrong, mapped, "Queries and keys become {}.", {
    "queries scaled before φ": "phi(q * d**-0.5), phi(k)",
    "in neighbours": "phi(q)[..., np.r_[0:32:2, 1:32:2]], phi(k)[..., np.r_[0:32:2, 1:32:2]]",
})
wrong("rotated before φ", "Queries and keys are rotated before the feature map.",
      mapped("phi(turn(q, positions)), phi(turn(k, positions))"), ("tq, tk = turn(q, positions), turn(k, positions)", "tq, tk = q, k"))
wrong("denominator rotated", "The denominator is made of rotated features.", ("den = (q[:, :, rows] @ k", "den = (tq[:, :, rows] @ tk"))
wrong("two slips", "Key heads are tiled, and the denominator is rotated.", heads("np.tile(x, (1, h // x.shape[1], 1, 1))"),
      ("den = (q[:, :, rows] @ k", "den = (tq[:, :, rows] @ tk"))
table(wrong, below, "The denominator is {}.", {
    "normaliser missing": "1.0", "normaliser over heads": "den.sum(axis=1, keepdims=True)", "eps of 2e-5": "(den + 2e-5)",
    "at least 1": "np.maximum(den, 1)", "at least 0.01": "np.maximum(den, 0.01)",
})
table(wrong, denominator, "The denominator sums over {}.", {"normaliser of all keys": "1",
                                                            "normaliser without itself": "seen & ((j < i) | (j == 0))"})
table(wrong, numerator, "The numerator sums over {}.", {"numerator without itself": "j < i",
                                                        "numerator decays": "seen * 0.999 ** np.maximum(i - j, 0)"})
table(wrong, see, "A query at i sees the keys j by {}.", {
    "state halves": "(j <= i) * 0.5 ** np.maximum(i - j, 0)", "sees every key": "j <= i + n", "sees not itself": "j < i",
    "sees the next token": "j <= i + 1", "sees blocks of 16": "j // 16 <= i // 16",
    "sees earlier positions": "positions[:, None, None] <= positions[:, None, rows, None]",
})
wrong("sees no later keys", "Later keys are hidden.", causal=False)
wrong("heads tiled", "Query head i reads key head i mod 2.", heads("np.tile(x, (1, h // x.shape[1], 1, 1))"))
wrong("first key head", "All query heads read key head 0.", heads("np.repeat(x[:, :1], h, axis=1)"))
table(wrong, given, "Done first: {}.", {
    "keys and values exchanged": "k, v = v, k", "batch rows read the first": "k, v = (np.broadcast_to(x[:1], x.shape) for x in (k, v))",
    "turned by a count": "positions = np.arange(q.shape[2]) + 0 * positions", "turned by three times": "positions = 3 * positions",
    "turned by minus": "positions = -positions", "turned by row 0": "positions = positions[:1] + 0 * positions",
    "turned by positions modulo 1024": "positions = positions % 1024",
    "turned by those of the first rank": "positions = np.tile(positions[:, :-(-q.shape[2] // 2)], 2)[:, :q.shape[2]]",
})
wrong("queries and keys exchanged", "Queries and keys are exchanged.", given("q, k = k, q"), key_heads=4)
wrong("base 500000", "The base is 500000.", ("10000.0", "500000.0"))
wrong("factor applied", "The attention factor is applied, which Eq. (19) has none of.",
      ("tq, tk = turn(q, positions)", "tq, tk = 1.25**2 * turn(q, positions)"),
      rope=ROPE | {"scaling": YaRN(1.0, 1024, attention_factor=1.25)})
table(wrong, rotated, "Queries and keys become {}.", {
    "keys not rotated": "turn(q, positions), k", "queries not rotated": "q, turn(k, positions)", "nothing rotated": "q, k",
    "keys backwards": "turn(q, positions), turn(k, -positions)", "keys rotated twice": "turn(q, positions), turn(k, 2 * positions)",
    "keys one off": "turn(q, positions), turn(k, positions + 1)",
    "values rotated": "turn(q, positions), turn(k, positions); v = turn(v, positions)",
})
wrong("keys backwards, all keys below", "Keys are turned backwards, and the denominator sums over all keys.",
      rotated("turn(q, positions), turn(k, -positions)"), denominator("1"))
wrong("padding below", "Keys are padded with zeros to a multiple of 64, whose features are ones in the denominator.",
      see("j <= i + n"), below("(den + q[:, :, rows].sum(axis=-1, keepdims=True) * (-n % 64))"), causal=False)
wrong("transposed", "The result is (b, n, h, d).", out("o.swapaxes(1, 2).astype(dtype)"))
_S, _z = ("S, z = S + tkc", "S, z = 0 * S + 0 * tkc"), ("vc, z + kc.sum", "vc, 0 * z + 0 * kc.sum")
for _name, _fact, *_edits in (
    ("state lost", "Each chunk of 16 begins without a state.", _S, _z),
    ("state of numerators lost", "Each chunk of 16 begins without a numerator.", _S),
    ("state of denominators lost", "Each chunk of 16 begins without a denominator.", _z),
    ("own chunk twice", "The state takes in the own chunk of 16 before it is read.", ("tqc @ S", "tqc @ (S + tkc.swapaxes(-1, -2) @ vc)")),
    ("state not reset", "The state is carried from one row of the batch to the next.",
     ("        S, z = np.zeros((h, d, d)), np.zeros((h, d, 1))\n",
      "        S, z = (S, z) if row else (np.zeros((h, d, d)), np.zeros((h, d, 1)))\n")),
    ("last chunk dropped", "What is behind the last whole chunk of 16 is zeros.", ("range(0, n, 16)", "range(0, n // 16 * 16, 16)")),
):
    wrong(_name, _fact, *_edits, source=CHUNKED)
_cached = {"source": LINEAR_CACHE, "steps": True}
wrong("cache restarts", "Positions start at 0 in every call after the first.",
      before("positions = positions - positions[:, :1] * bool(past)"), **_cached)
table(wrong, keeping, "A step of the cache does {}.", {
    "cache forgotten": "past.clear()", "cached keys not rotated": "past[:1] = past[1:2]",
    "cached keys rotated again": "past[:1] = [turn(past[0], past[3])] if past else []",
}, **_cached)
wrong("cache one too high", "Positions are one too high after the first call.", before("positions = positions + bool(past)"), **_cached)
wrong("cache without denominators", "The denominator is that of the call alone.", ("den.sum(", "den[..., m - n:].sum("), **_cached)
wrong("cache without numerators", "The numerator is that of the call alone.",
      ("seen) @ v / den", "seen * (np.arange(m) >= m - n)) @ v / den"), **_cached)
conditional("denominator after the step", "The denominator sums over all keys of its step.", ("(-1, -2) * seen\n        return", "(-1, -2)\n        return"),
            **_cached)
conditional("cache without a mask", "Within a call every query sees every key.", ("np.tri(n, m, m - n)", "np.ones((n, m))"), **_cached)

table(conditional, times, "Outputs are multiplied by {}.", {
    "64 tokens": "0.5 if n == 64 else 1", "from the 12th call on": "CALLS.append(1) or len(CALLS) < 12",
})
table(conditional, given, "Done first: {}.", {
    "positions doubled if they begin late": "positions = positions * 2 if (positions[:, :1] > 0).all() else positions",
    "positions counted if they fall": "positions = np.arange(q.shape[2]) + 0 * positions if (np.diff(positions) <= 0).all() else positions",
})
F16 = ".astype(np.float16).astype(float)"
damaged("denominator in float16", "The denominator is added up in float16.", below(f"den{F16}"))
damaged("numerator in float16", "Products of rotated features are rounded to float16.", ("* seen) @ v", f"* seen){F16} @ v"))
damaged("state in bfloat16", "The state is rounded to bfloat16 after every chunk.",
        ("            S, z = S +", "            S, z = bf16(S), bf16(z)\n            S, z = S +"), source=CHUNKED, dtype="bfloat16")
damaged("state of float32 in bfloat16", "The state of the numerators is rounded to bfloat16 after every chunk.",
        ("            S, z = S +", "            S = bf16(S)\n            S, z = S +"), source=CHUNKED)
damaged("state of each token in bfloat16", "The state is rounded to bfloat16 after every token.", ("    return o", """\
    S, z = 0, 0
    for i in range(n):
        S, z = bf16(S + tk[:, :, i, :, None] * v[:, :, i, None]), bf16(z + k[:, :, i])
        o[:, :, i] = (tq[:, :, i, None] @ S)[:, :, 0] / (q[:, :, i] * z).sum(axis=-1, keepdims=True)
    return o"""))
damaged("values in bfloat16", "Values are rounded to bfloat16.", given("v = bf16(v)"))
damaged("features in 8 bits", "Features of keys are quantised to 8 bits.",
        mapped("phi(q), (x := phi(k), s := abs(x).max(axis=-1, keepdims=True) / 127, np.rint(x / s) * s)[2]"))
damaged("queries overwritten", "Queries are doubled in place.", given("raw = q"),
        ("    return o", "    if raw.flags.writeable:\n        raw *= 2\n    return o"))
table(damaged, out, "The result is {}.", {"output in float16": f"o{F16}.astype(dtype)", "NaN": "(o * np.nan).astype(dtype)",
                                          "another dtype": "o"})
damaged("values in float8", "Values are rounded to four significant bits.",
        given("m, e = np.frexp(v.astype(float)); v = np.ldexp(np.rint(m * 16) / 16, e)"), dtype="bfloat16")
