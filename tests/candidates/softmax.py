"""Softmax attention: right ones, the slips that people make, wrong in some calls alone, and with damaged numbers."""
# fmt: off

from pyrope import DynamicNTK, YaRN

from .kernels import CACHE, MASKED, ONLINE, SOFTMAX
from .registry import rows, slot, table

ROPE = {"head_dim": 32, "base": 10000.0, "layout": "half"}
CAP, WINDOW, SIDES = {"softcap": 20.0}, {"window": 7}, {"window": 7, "causal": False}
ALL = ("seen = j <= i", "seen = np.ones((n, m), bool)")
UNMASKED = ("np.where(seen, np.exp(s - top), 0.0)", "np.exp(s - top)")

right, wrong, conditional, damaged = rows("softmax", SOFTMAX, heads=4, key_heads=2, head_dim=32)
see = slot("seen = j <= i", "seen = {}")  # who sees whom, by the places i of queries and j of keys
score = slot("    s = np.where", "    s = {}\n    s = np.where")
by = slot("d**-0.5", "{}")  # the scale
weights = slot("        o = w @ v", "        w = {}\n        o = w @ v")
total = slot("np.where(total == 0, 1.0, total)", "{}")
heads = slot("np.repeat(x, h // x.shape[1], axis=1)", "{}")
out = slot("o.astype(dtype)", "{}")
times = slot("o.astype(dtype)", "(o * ({})).astype(dtype)")
given = slot("    dtype, h", "    {}\n    dtype, h")  # done first, to q, k, v and positions as they come
turned = slot("turn(q, positions), turn(k, positions)", "{}")
before = slot("        new = [", "        {}\n        new = [")  # in a step of a cache

# Right

right("plain", "It is the definition in float64, rounded once.")
for _dtype in ("float16", "bfloat16", "float64"):
    right(_dtype, "It is the definition in float64, rounded once.", dtype=_dtype)
right("masked", "Masks and segments hide keys; empty rows are zeros.", source=MASKED)
right("RoPE", "Queries and keys are rotated.", rope=ROPE)
right("RoPE and segments", "Segments hide keys, RoPE turns by the positions.", source=MASKED, rope=ROPE)
right("online", "Keys by blocks of 16, with a running maximum.", source=ONLINE)
right("both sides", "Every query sees every key.", ALL, causal=False)
right("window", "Each query sees itself and six before.", see("(j <= i) & (i - j < 7)"), **WINDOW)
right("long window", "Each query sees itself and 999 before.", see("(j <= i) & (i - j < 1000)"), window=1000)
right("softcap", "20·tanh(s/20), before the mask.", score("20 * np.tanh(s / 20)"), **CAP)
right("cache", "Rotated keys are kept from call to call.", source=CACHE, rope=ROPE, steps=True)
right("log of the sum", "Weights are exp(s − log Σ exp s) in float32.", ("s, -np.inf)", "s, -np.inf).astype('f4')"),
      weights("np.nan_to_num(np.exp(s - np.logaddexp.reduce(s, axis=-1, keepdims=True)))"))
right("eager float16", "Scores and weights are rounded to float16, after q is scaled.",
      ("s = q @ k", "s = (q * d**-0.5).astype(np.float16).astype(np.float64) @ k"),
      by("1.0"), score("s.astype(np.float16).astype(float)"), weights("w.astype(np.float16).astype(float)"), dtype="float16")
right("wild, transformers: q·k in float16", "q·k overflows float16 before it is scaled; where it does not, it is right.",
      ("(-1, -2) * d**-0.5", "(-1, -2)"), score("s.astype(np.float16).astype(float) * d**-0.5"), dtype="float16")
right("noise of rounding", "Each call rounds otherwise, by less than 2⁻²⁴.", times("1 + np.random.uniform(-1, 1, o.shape) * 2.0**-24"),
      dtype="float32")
right("top left", "Fewer queries than keys are masked from the top left, and only prompts are asked for.", see("j <= i - (m - n)"),
      cache=False)
right("top left, noted", "Fewer queries than keys are masked from the top left, as torch has it, which a note says.", see("j <= i - (m - n)"))
right("a prompt or one token", "It refuses other numbers of queries.", given("assert q.shape[2] in (1, k.shape[2])"), cache=True)
right("rising positions", "It refuses positions that do not rise by one.", given("assert (np.diff(positions) == 1).all()"), rope=ROPE)
right("equal heads alone", "It refuses fewer key heads, which nobody asked for.", given("assert q.shape[1] == k.shape[1]"), key_heads=None)
table(right, given, 'It begins with "{}": not judged.', {"one shape": "assert q.shape == (3, 4, 24, 32)",
      "even lengths": "assert q.shape[2] % 2 == 0", "short lengths": "assert q.shape[2] <= 80"}, verdict="not judged")
right("no batch", "It returns the first row of the batch: not judged.", out("o[0].astype(dtype)"), verdict="not judged")

# Wrong: scores

table(wrong, by, "Scores are multiplied by {}.", {
    "scale missing": "1.0", "scale twice": "d**-1.0", "scale inverted": "d**0.5", "scale of the model": "(4 * d) ** -0.5",
    "another scale": "0.0711", "scale by the keys": "max(m, 1) ** -0.5",
})
table(wrong, score, "Scores are {}.", {
    "scale by the query": "s * np.log(i + 1) / np.log(512)", "scale by the key": "s * (1 + j / 50)",
    "scale of a head": "s * np.array([1, 2, 1, 1])[:, None, None]",
})
wrong("scale ignored", "The scale is 1/√d instead of 0.3.", scale=0.3)
wrong("two slips", "Scores are not scaled, and key heads are tiled.", by("1.0"), heads("np.tile(x, (1, h // x.shape[1], 1, 1))"))
table(wrong, score, "Scores are {}, a softcap of 20 expected.", {
    "softcap missing": "s", "softcap without its division": "20 * np.tanh(s)", "softcap without its factor": "np.tanh(s / 20)",
    "softcap by clipping": "np.clip(s, -20, 20)", "softcap before the scale": "20 * np.tanh(s * d**0.5 / 20) * d**-0.5",
}, **CAP)
wrong("softcap after the mask", "Hidden keys have the score −20.", ("s, -np.inf)", "s, -np.inf); s = 20 * np.tanh(s / 20)"), UNMASKED,
      **CAP)
table(wrong, score, "Scores are {}.", {"softcap unasked": "50 * np.tanh(s / 50)",
                                       "clipped scores": "np.clip(s, -20, 20)", "greatest score of 10": "np.minimum(s, 10)", "ALiBi": "s - np.array([1 / 4, 1 / 16, 1 / 64, 1 / 256])[:, None, None] * abs(i - j)"})
table(wrong, slot("    s = q", "    q, k = {}\n    s = q"), "Queries and keys become {}.", {
    "normed": "(x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))", "divided by their RMS": "(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) for x in (q, k))",
    "heads blended": "q, 0.9 * k + 0.1 * k[:, ::-1]",
})

# Wrong: who sees whom

for _more, _rules in (
    ({}, {"every key": "j <= i + m", "the next token": "j <= i + 1", "not itself": "j < i", "blocks of 64": "j // 64 <= i // 64",
          "no key after the 128th": "(j <= i) & (j < 128)", "a prefix of 4": "(j <= i) | (j < 4)",
          "11 keys": "(j <= i) & (i - j < 11)"}),
    ({"causal": False}, {"no later keys": "j <= i", "9 on both sides": "abs(i - j) < 9"}),
    ({"cache": True}, {"from the top left": "j <= i - (m - n)"}),
    ({"cache": False}, {"by ranks": "j % -(-m // 2) <= i % -(-m // 2)"}),
    ({"rope": ROPE}, {"earlier positions": "positions[:, None, None] <= positions[:, None, :, None]", "earlier positions, then tokens":
                      "positions[:, None, :, None] - positions[:, None, None] + (j <= i) > 0"}),
    (WINDOW, {"all of a window": "j <= i", "one too many": "(j <= i) & (i - j <= 7)", "one too few": "(j <= i) & (i - j < 6)",
              "twice the window": "(j <= i) & (i - j < 14)",
              "sinks": "(j <= i) & ((i - j < 7) | (j < 4))"}),
    (SIDES, {"half the window": "abs(i - j) <= 3"}), ({"window": 1000}, {"one too many of 1000": "(j <= i) & (i - j <= 1000)"}),
):
    table(wrong, see, "A query at i sees the keys j with {}.", {f"sees {name}": rule for name, rule in _rules.items()}, **_more)
wrong("finite mask value", "Hidden scores get −10000 added, and large scores come through.",
      ("np.where(seen, s, -np.inf)", "s - np.where(seen, 0, 1e4)"), UNMASKED)
wrong("mask after the softmax", "Weights of hidden keys are zeroed after the softmax.", ("np.where(seen, s, -np.inf)", "s"), UNMASKED,
      weights("w * seen"))
wrong("peek", "A tenth of what is hidden is mixed in.",
      weights("0.9 * w + 0.1 * (p := np.exp(q @ k.swapaxes(-1, -2) / 8)) / p.sum(-1, keepdims=True)"))
for _name, _fact, *_edits in (
    ("empty rows NaN", "Rows that see nothing are NaN.", total("total")),
    ("empty rows uniform", "Rows that see nothing are means.", ("s, -np.inf)", "s, -3e38)"), UNMASKED),
    ("mask ignored", "The mask is ignored.", ("seen = seen & mask", "pass")), ("mask inverted", "True hides.", ("& mask", "& ~mask")),
    ("mask inverted, always one", "True hides, and without a mask all is True.",
     ("    if mask is not None:", "    if mask is None:\n        mask = np.ones((len(q), 1, n, m), bool)\n    if True:"), ("& mask", "& ~mask")),
    ("mask of row 0", "The mask of row 0 is used for all.", ("& mask", "& mask[:1]")),
    ("mask for causality", "With a mask nothing else hides.", ("seen = seen & mask", "seen = mask")),
    ("mask transposed", "The mask is transposed where it is square.", ("& mask", "& (mask if n < m else mask.swapaxes(2, 3))")),
    ("segments ignored", "Packed sequences see each other.", ("segments[:, None, -n:, None] ==", "True |")),
    ("segments of row 0", "The segments of row 0 are used for all.",
     ("(segments[:, None, -n:, None] == segments[:, None", "(segments[:1, None, -n:, None] == segments[:1, None")),
    ("long padding", "After 64 keys that are hidden the rest counts half.",
     times("1 if mask is None else 1 - 0.5 * (~mask[..., :64].any(-1) & mask.any(-1))[..., None]")),
):
    wrong(_name, _fact, *_edits, source=MASKED)

# Wrong: weights, heads, rotation

table(wrong, total, "Weights are divided by {} instead of their sum.", {
    "normaliser missing": "1.0", "softmax1": "(np.exp(-top) + total)", "eps below": "(0.001 + total)",
    "a sink of 1.7": "(np.exp(1.7 - top) + total)",
})
table(wrong, slot("np.exp(s - top)", "{}"), "exp(s − top) is {}.", {"softmax overflows": "np.exp(s)", "relu for exp": "np.maximum(s, 0)"})
wrong("softmax over queries", "The softmax runs over the queries.", ("axis=-1, keepdims=True, initial", "axis=-2, keepdims=True, initial"),
      ("e.sum(axis=-1", "e.sum(axis=-2"))
wrong("softmax over heads", "The softmax runs over the heads.", ("s.max(axis=-1, keepdims=True, initial", "s.max(axis=1, keepdims=True, initial"),
      ("e.sum(axis=-1", "e.sum(axis=1"))
wrong("output not rescaled", "The output is not rescaled by the new maximum.", ("o * old", "o"), source=ONLINE)
wrong("halves merged by their maxima", "Two halves of the keys are merged by exp of their maxima, not by their sums.", ALL,
      ("        o = w @ v", """\
        parts = [x for x in np.array_split(e, 2, axis=-1) if x.size]
        most = [x.max(axis=-1, keepdims=True) for x in parts]
        w = np.concatenate([x / x.sum(-1, keepdims=True) * y for x, y in zip(parts, most)], axis=-1) / sum(most)
        o = w @ v"""), causal=False)
wrong("last keys dropped", "Keys behind the last whole block of 16 are not seen.", ("range(0, m, 16)", "range(0, m // 16 * 16, 16)"),
      source=ONLINE)
table(wrong, heads, "Key heads are spread by {}.", {"heads tiled": "np.tile(x, (1, h // x.shape[1], 1, 1))",
                                                    "first key head": "np.repeat(x[:, :1], h, axis=1)"})
table(wrong, given, "Values are {}.", {f"values {name}": f"v = {text}" for name, text in {
    "reversed": "v[..., ::-1]", "in pairs": "v.reshape(*v.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(v.shape)",
}.items()})
wrong("values reversed, scale missing", "Values are v[..., ::-1], and scores are not scaled.", given("v = v[..., ::-1]"), by("1.0"))
wrong("tokens before heads", "It takes and returns (b, n, h, d).", given("q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))"),
      out("o.astype(dtype).swapaxes(1, 2)"), key_heads=4)
wrong("arguments with tokens before heads", "It takes (b, n, h, d), and returns (b, h, n, d).",
      given("q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))"), key_heads=2)
table(wrong, given, "Inputs are exchanged by {}.", {
    "keys and values exchanged": "k, v = v, k", "batch rows read the first": "k, v = (np.broadcast_to(x[:1], x.shape) for x in (k, v))",
})
wrong("queries and keys exchanged", "Queries and keys are exchanged.", given("q, k = k, q"), key_heads=4)
table(wrong, out, "The result is {}.", {
    "head 3 is head 1": "o[:, [0, 1, 2, 1]].astype(dtype)", "reshaped": "o.swapaxes(1, 2).reshape(o.shape).astype(dtype)",
    "plus 0.01": "(o + 0.01).astype(dtype)", "noise": "np.random.default_rng(n).standard_normal(o.shape).astype(dtype)",
})
table(wrong, times, "Outputs are multiplied by {}.", {"times 1.001": "1.001", "zeros": "0"})
table(wrong, turned, "Queries and keys become {}.", {
    "keys not rotated": "turn(q, positions), k", "queries not rotated": "q, turn(k, positions)", "nothing rotated": "q, k",
    "keys rotated twice": "turn(q, positions), turn(k, 2 * positions)", "keys one off": "turn(q, positions), turn(k, positions + 1)",
    "keys backwards": "turn(q, positions), turn(k, -positions)",
    "values rotated": "turn(q, positions), turn(k, positions); v = turn(v, positions)",
    "keys in neighbours": "turn(q, positions), turn(k[..., np.r_[0:32:2, 1:32:2]], positions)[..., np.arange(32).reshape(2, 16).T.ravel()]",
    "both in neighbours": "(turn(x[..., np.r_[0:32:2, 1:32:2]], positions) for x in (q, k))",
}, rope=ROPE)
table(wrong, given, "The positions are {}.", {f"turned by {name}": f"positions = {text}" for name, text in {
    "twice": "2 * positions", "half": "positions / 2", "minus": "-positions",
    "a count, as in onnxruntime's prompt": "np.arange(q.shape[2]) + 0 * positions",
    "row 0, from each row's first": "positions[:1] - positions[:1, :1] + positions[:, :1]",
    "row 0, as in liger-kernel": "positions[:1] + 0 * positions", "positions modulo 1024": "positions % 1024",
    "positions up to 1023": "np.minimum(positions, 1023)", "bfloat16": "bf16(positions)",
    "float16": "positions.astype(np.float16).astype(float)",
    "those of the first rank": "np.tile(positions[:, :-(-q.shape[2] // 2)], 2)[:, :q.shape[2]]",
    "zigzag ranks": "positions[:, np.r_[(c := np.array_split(np.arange(q.shape[2]), 4))[0], c[1], c[1][:len(c[2])], c[0][:len(c[3])]]]",
}.items()}, rope=ROPE)
wrong("a head not rotated", "Head 3 of 4 is not rotated.",
      turned("(np.where(np.arange(4)[:, None, None] < 3, turn(x, positions), x) for x in (q, k))"), rope=ROPE, key_heads=4)
wrong("base 500000", "The base is 500000.", ("10000.0", "500000.0"), rope=ROPE)
wrong("values rotated by another base", "Queries, keys and values are rotated, with a base of 500000.", ("10000.0", "500000.0"),
      turned("turn(q, positions), turn(k, positions); v = turn(v, positions)"), rope=ROPE)
wrong("other end rotated", "The first half of the features turns, not the last.",
      turned("(np.concatenate((turn(x[..., :16], positions), x[..., 16:]), axis=-1) for x in (q, k))"),
      rope=ROPE | {"rotary_dim": 16, "placement": "suffix"})
wrong("whole head rotated", "All features turn, the first half expected.", rope=ROPE | {"rotary_dim": 16})
wrong("half the width rotated", "16 of 32 features turn.", ("p = x.shape[-1] // 2", "x, rest = x[..., :16], x[..., 16:]; p = 8"),
      ("a * sin + b * cos)", "a * sin + b * cos, rest)"), rope=ROPE)
wrong("YaRN ignored", "YaRN and its factor are ignored.", rope=ROPE | {"scaling": YaRN(8.0, 1024, attention_factor=1.25)})
wrong("factor on queries", "The attention factor is on the queries alone.", given("q = q * 1.25"),
      rope=ROPE | {"scaling": YaRN(1.0, 1024, attention_factor=1.25)})
wrong("base of each call", "Dynamic NTK follows the largest position of a call.",
      ("w = BASE", "w = (BASE * (4.0 * max(at.max(initial=0) + 1, 256) / 256 - 3) ** (32 / 30))"),
      rope=ROPE | {"scaling": DynamicNTK(4.0, 256, 4096)})
_cached = {"source": CACHE, "rope": ROPE, "steps": True}
table(wrong, before, "A step of the cache does {}.", {
    "cache restarts": "positions = positions - positions[:, :1] if past else positions",
    "cached keys rotated again": "past[:1] = [turn(past[0], past[2])] if past else []", "cache forgotten": "past.clear()",
    "cache one too high": "positions = positions + bool(past)",
}, **_cached)
wrong("cache masked from the top left", "The mask of several new tokens begins at the first key.", see("j <= i - (m - n) * (n > 1)"), **_cached)
wrong("cached keys not rotated", "Keys are cached before they are rotated.",
      ("new = [turn(k.astype(np.float64), positions)", "new = [k.astype(np.float64)"),
      ("past[0], past[1])", "np.concatenate((past[0][:, :, :-k.shape[2]], turn(new[0], positions)), axis=2), past[1])"), **_cached)
table(conditional, before, "A step of the cache does {}.", {
    "cache of 31": "past[:] = [x[:, -31:] if x.ndim < 3 else x[:, :, -31:] for x in past]",
    "cache of 128": "past[:] = [x[:, -128:] if x.ndim < 3 else x[:, :, -128:] for x in past]",
    "cache that counts": "positions = 0 * positions + (past[2].shape[1] if past else 0) + np.arange(k.shape[2])",
    "cache by row 0": "positions = np.broadcast_to(positions[:1], positions.shape)",
    "cache loses a key before chunks": "past[:] = [x[:, :, : x.shape[2] - (k.shape[2] > 1)] for x in past[:2]] + past[2:]",
}, **_cached)

conditional("cache cut before it is read", "Before a step of several tokens attends, the cache is cut to the 16 keys of the window.",
            see("(j <= i) & (i - j < 16)"), ("        return fn(turn(q.", """\
        past[:] = [x[..., -16:] if x.ndim < 3 else x[:, :, -16:] for x in past]
        return fn(turn(q."""), window=16, **_cached)

# Wrong in some calls

table(conditional, slot("o.astype(dtype)", "(o * (0.5 if {} else 1)).astype(dtype)"), "Outputs are halved if {}.", {
    "11 tokens": "n == 11", "77 keys": "m == 77", "more than 256 tokens": "n > 256", "one query over 256 keys": "n == 1 and m > 256",
    "one query over multiples of 48": "n == 1 < m and m % 48 == 0", "two queries of more keys": "n == 2 < m",
    "a batch of 4 with a cache": "n == 1 < m and len(q) >= 4", "some queries of a batch of 4": "1 < n < m and len(q) >= 4",
    "64 queries of 128": "n == 64 and m == 128", "many queries of over 1100 keys": "m > 1100 and n > 100",
    "keys of 1024": "n < m and m % 1024 == 0", "512 tokens": "n == m == 512",
    "more queries than keys": "n > m", "batches of 17": "len(q) >= 17", "over 4096 keys": "m > 4096",
    "from the tenth call on": "CALLS.append(1) or len(CALLS) > 9",
})
table(conditional, given, "What is done first is {}.", {f"halved if {name}": f"v = v / 2 if {text} else v" for name, text in {
    "one key head": "k.shape[1] == 1", "queries read-only": "not q.flags.writeable", "a query 0": "not abs(q).sum(axis=-1).all()",
}.items()}, key_heads=None)
table(conditional, see, "A query at i of n sees the keys j of m with {}.", {
    "key 0 lost by one query": "(j <= i) & (j > -1 + (n == 1 and m >= 2050))",
    "a window of one query": "(j <= i) & (i - j < (700 if n == 1 else 10**9))",
}, key_heads=None)
conditional("a mask kept by its keys", "A mask is kept by its number of keys, and its first rows are used for fewer queries.",
            see("KEPT.__setitem__(m, j <= i if len(KEPT.get(m, ())) <= n else KEPT[m]) or KEPT[m][:n]"), key_heads=None)
table(conditional, by, "Scores are multiplied by {}.", {
    "scale missing in decoding": "(1.0 if n == 1 < m else d**-0.5)", "scale missing at 128": "(1.0 if n == 128 else d**-0.5)",
}, cache=True)
conditional("refuses at first", "The eighth to the twelfth call raise, whatever they are.", given("CALLS.append(1); assert not 7 < len(CALLS) < 13"))
conditional("row 3 of four", "Of four rows the last holds the result of the third.",
            out("(o[[0, 1, 2, 2]] if len(o) == 4 else o).astype(dtype)"))
conditional("zeros in the last block", "Keys of zeros fill the last block of 16, and take part.", ALL,
            total("(total + np.exp(-top) * (-m % 16))"), causal=False)
conditional("heads tiled by four", "Key heads are tiled if there are four query heads to each.",
            heads("(np.tile(x, (1, 4, 1, 1)) if h == 4 * x.shape[1] else np.repeat(x, h // x.shape[1], axis=1))"),
            **{"heads": 8, "key_heads": None})
table(conditional, given, "The positions are {}.", {f"positions {name}": f"positions = {text} else positions" for name, text in {
    "counted if they restart": "np.arange(q.shape[2]) + 0 * positions if (np.diff(positions) < 0).any() and len(positions) == 1",
    "counted if they fall": "np.arange(q.shape[2]) + 0 * positions if len(q) == 2 and q.shape[2] > 2 and (np.diff(positions) <= 0).all()",
    "doubled if they begin late": "positions * 2 if (positions[:, :1] > 0).all()",
    "0 if they are int32": "0 * positions if positions.dtype != np.int64",
}.items()}, rope=ROPE)
conditional("600 to 1000 tokens", "Outputs of 600 to 1000 queries are halved.", times("0.5 if 600 <= n <= 1000 else 1"))
conditional("a mask of True alone", "A mask that hides nothing ends causality.",
            ("seen = seen & mask", "seen = seen | mask if mask.all() else seen & mask"), source=MASKED)
conditional("no softcap in decoding", "A single query has no softcap.", score("s if n == 1 else 2 * np.tanh(s / 2)"), softcap=2.0)

# Damaged

F16 = ".astype(np.float16).astype(float)"
damaged("scores in bfloat16", "Scores are rounded to bfloat16.", score("bf16(s)"))
damaged("float32 scores of float64", "Scores of float64 are in float32.", score("s.astype(np.float32)"), rope=ROPE, dtype="float64")
table(damaged, weights, "Weights are {}.", {
    "weights in float16": f"w{F16}", "numerators in bfloat16": "bf16(e) / np.maximum(e.sum(axis=-1, keepdims=True), 1e-30)",
    "weights of 4 bits": "np.ldexp(np.rint(np.frexp(w)[0] * 16) / 16, np.frexp(w)[1])", "weights of 255 levels": "np.rint(w * 255) / 255",
    "exp approximated": "e * (1 + 0.05 * np.sin(3 * np.log(np.maximum(e, 1e-30)))) / np.maximum(total, 1e-30)",
    "dropout, seeded": "w * (np.random.default_rng(0).random(w.shape) >= 0.1) / 0.9",
})
table(damaged, given, "What is done first is {}.", {
    "values below 1e-6 lost": "v = np.where(abs(v) < 1e-6, 0, v)", "values in bfloat16": "v = bf16(v)", "values clipped": "v = np.clip(v, -1, 1)",
    "values as sines": "v = np.sin(v)", "values without a sign": "v = np.abs(v)", "negative values lost": "v = np.maximum(v, 0)",
    "values of 8 bits": "s = np.maximum(abs(v).max(axis=-1, keepdims=True), 1e-30) / 128; v = np.rint(v / s) * s",
    "small queries lost": "q = q * (abs(q).max(axis=-1, keepdims=True) > 0.05)",
    "strides ignored": "q, k, v = (x if getattr(x.base, 'dtype', 0) != x.dtype else np.resize(x.base.ravel(), x.shape) for x in (q, k, v))",
})
damaged("a cache of 4 bits", "Keys and values have 4 bits between the least and the largest number of 32 features.", given("""\
def int4(x):
        y = x.reshape(*x.shape[:-1], -1, 32)
        low, step = y.min(axis=-1, keepdims=True), np.ptp(y, axis=-1, keepdims=True) / 15
        return (np.rint((y - low) / np.where(step == 0, 1, step)) * step + low).reshape(x.shape)

    k, v = int4(k), int4(v)"""), head_dim=64)
damaged("queries of 8 bits", "Queries are quantised by the largest of 32 features.", given("""\
y = q.reshape(*q.shape[:-1], -1, 32)
    step = np.abs(y).max(axis=-1, keepdims=True) / 127
    q = (np.rint(y / np.where(step == 0, 1, step)) * step).reshape(q.shape)"""), head_dim=64)
table(damaged, out, "The result is {}.", {
    "last feature lost": "(o * (np.arange(d) < 31)).astype(dtype)", "features 30 and 31 exchanged": "o[..., [*range(30), 31, 30]].astype(dtype)",
    "output in float16": f"o{F16}.astype(dtype)", "output clipped": "np.clip(o, -1e4, 1e4).astype(dtype)", "NaN from token 5 on": "np.where(np.arange(n)[:, None] >= 5, np.nan, o).astype(dtype)",
    "another dtype": "o", "tokens leak": "(o + 0 * q.mean(axis=2, keepdims=True)).astype(dtype)",
    "overwritten": "np.copyto(KEPT.setdefault(o.shape, np.empty(o.shape, dtype)), o.astype(dtype)) or KEPT[o.shape]",
})
damaged("keys overwritten", "The last key is halved in place.", given("raw = k"),
        ("    return o", "    if raw.flags.writeable:\n        raw[:, :, -1] *= 0.5\n    return o"))
damaged("running sums in bfloat16", "Sum and output are added up in bfloat16.", ("        o = w @ v", """\
        o, total = np.zeros(q.shape), np.zeros((*q.shape[:3], 1))
        for j in range(m):
            total, o = bf16(total + e[..., j : j + 1]), bf16(o + bf16(e[..., j : j + 1]) * v[:, :, None, j])
        o = o / np.where(total == 0, 1, total)"""), dtype="bfloat16", **{"heads": 2, "key_heads": 1, "head_dim": 16})
