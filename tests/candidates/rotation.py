"""Rotations: right in unusual ways, with the slips that people make, wrong in some calls alone, and with damaged numbers."""
# fmt: off

from dataclasses import fields

from pyrope import Axes, DynamicNTK, Linear, Llama3, LongRoPE, Proportional, YaRN
from pyrope.oracle.gallery import exhibits

from .kernels import AXES, FLUX, PARTIAL, READS, ROTATION, SERIES, WOVEN, WRITES
from .registry import case, rows, slot, table

PLAIN = {"head_dim": 64, "base": 10000.0, "layout": "half"}
NEIGHBOURS, MOVED, PART = PLAIN | {"layout": "interleaved"}, PLAIN | {"layout": "interleaved-to-half"}, PLAIN | {"rotary_dim": 32}
LINEAR, SHARE, NTK = (PLAIN | {"scaling": scaling} for scaling in (Linear(4.0), Proportional(0.25), DynamicNTK(2.0, 4096, 16384)))
YARN, WHOLE = (PLAIN | {"scaling": YaRN(8.0, 4096, attention_factor=1.0, truncate=cut)} for cut in (True, False))
FACTOR = PLAIN | {"scaling": YaRN(1.0, 4096, attention_factor=1.25)}  # rescales nothing
LLAMA = PLAIN | {"base": 500000.0, "scaling": Llama3(8.0, 1.0, 4.0, 8192)}
_LISTS = [1.0] * 32, [1 + i / 8 for i in range(32)]
LONG, SHORT = (PLAIN | {"scaling": LongRoPE(*_LISTS, 8.0, 4096, attention_factor=1.0, length=n)} for n in (8192, 4096))
GRID = {"head_dim": 16, "base": 10000.0, "layout": "half", "axes": Axes("sections", (2, 3, 3))}
BLOCKS = GRID | {"layout": "interleaved", "axes": Axes("sections", (2, 3, 3), "own")}

right, wrong, conditional, damaged = rows("rotation", ROTATION, rope=PLAIN)
ROOT = ("BASE = 64, 10000.0", "BASE = 64, 500000.0")  # the base of Llama 3
at = slot("m[..., None] * w", "({})[..., None] * w")  # other positions, of m
theta = slot("m[..., None] * w", "m[..., None] * ({})")  # other frequencies, of w and i
by = slot("turn(x, m[..., None] * w)", "turn(x, {})")  # other angles
power = slot("-2 * i / D", "{}")
tables = slot("np.cos(angle), np.sin(angle)", "{}")
pair = slot("a * cos - b * sin, a * sin + b * cos", "{}")
first = slot("    y = ", "    {}\n    y = ")
after = slot("    return y.as", "    {}\n    return y.as")
out = slot("y.astype(x.dtype)", "{}")
times = slot("y.astype(x.dtype)", "(y * ({})).astype(x.dtype)")

# Right

right("halves", "It is the definition in float64, rounded once.")
for _dtype in ("float16", "bfloat16", "float64"):
    right(f"halves, {_dtype}", "It is the definition in float64, rounded once.", dtype=_dtype)
right("neighbours", "Pairs are neighbours, as they should be.", source=WOVEN, rope=NEIGHBOURS)
right("neighbours to halves", "Read as neighbours, written in halves, as it should be.", READS, rope=MOVED)
right("part of a head", "The first 32 features turn.", source=PARTIAL, rope=PART)
right("backwards, as meant", "It turns backwards, as it should.", at("-m"), rope=PLAIN | {"direction": -1})
table(right, by, "The angle is {}, whose error is below that of a float32 angle.", {
    "float32 angle": "m[..., None].astype(np.float32) * w.astype(np.float32)",
    "half turns": "np.float32(np.pi) * np.fmod(m[:, None] * w / np.pi, 2).astype('f4')",
    "phase of 32 bits": "m[:, None] * np.rint(w / (2 * np.pi) * 2**32) % 2**32 * (2 * np.pi / 2**32)",
    "phase, a unit off": "m[..., None] * (w + 0.98 * 2 * np.pi / 2**32)",
    "by a logarithm": "m[:, None] * (w * (1 + (i > 0) * (4 + 3.9 * 2 * i / D * np.log(BASE)) * 2.0**-24))",
})
right("fixed point", "Tables have steps of 2⁻²².", tables("*np.rint(np.stack((np.cos(angle), np.sin(angle))) * 2**22) / 2**22,"))
for _d, _base in ((64, 10000.0), (128, 500000.0)):
    right(f"ggml, {_d}", "Each float32 angle is the one before times a ratio, as in ggml, which is accepted.",
          ("D, BASE = 64, 10000.0", f"D, BASE = {_d}, {_base}"),
          first("ratio = np.full((len(m), D // 2), np.float32(BASE) ** np.float32(-2 / D))"),
          first("ratio[:, 0] = m"), by("np.multiply.accumulate(ratio, axis=1)"), rope=PLAIN | {"head_dim": _d, "base": _base})
right("YaRN", "YaRN with whole ends of the ramp.", theta("yarn(w, 8)"), rope=YARN)
right("Llama 3.1", "The three cases of the checkpoints' code.", ROOT, theta("llama3(w)"), rope=LLAMA)
right("dynamic NTK of each call", "The base follows the largest position of a call, as in transformers.",
      theta("(BASE * (2 * max(m.max(initial=0) + 1, 4096) / 4096 - 1) ** (64 / 62)) ** (-i / 32)"), rope=NTK)
right("LongRoPE of each call", "The list follows the length of a call.", theta("w / (1 + i / 8 * (m.max(initial=0) >= 4096))"), rope=LONG)
right("Flux", "A block of features for each axis, each with a series of its own.", source=FLUX, rope=BLOCKS)
for _name, _owners, _series, _axes in (
    ("sections", "[0, 0, 1, 1, 1, 2, 2, 2]", "-2 * i / D", GRID["axes"]),
    ("interleaved axes", "[0, 1, 2, 0, 1, 2, 0, 0]", "-2 * i / D", Axes("interleaved", (4, 2, 2))),
    ("ERNIE's axes", "[1, 2, 1, 2, 0, 0, 0, 0]", "-2 * i / D", Axes("listed", (1, 2, 1, 2, 0, 0, 0, 0))),
    ("axial", "[0] * 4 + [1] * 4", "-(i % 4) / 4", Axes("axial")),
    ("Kimi's axes", "[1, 0] * 4", "-(i // 2) / 4", Axes("listed", (1, 0) * 4, "own")),
    ("Pixtral's axes", "[0] * 4 + [1] * 4", "-(2 * (i % 4) + i // 4) / 8", Axes("pixtral")),
):
    right(_name, "Each pair turns with its axis.", ("[0, 0, 1, 1, 1, 2, 2, 2]", _owners), power(_series), source=AXES,
          rope=GRID | {"axes": _axes})
table(right, out, "The outputs are {}: the same scores.", {
    "in reverse": "y[..., ::-1].astype(x.dtype)", "all negated": "-y.astype(x.dtype)",
}, verdict="equivalent")
right("moved, not asked for", "Neighbours are written in halves: the same scores.", READS, rope=NEIGHBOURS, verdict="equivalent")
right("rows of a batch", "Each row turns by its own positions.", at("m.reshape(len(m), 1, -1) if m.ndim > 1 else m"), batched=True)
right("refuses some calls", "Right where it answers.", first("assert len(m) <= 256 and positions.dtype == np.int64 and x.flags.writeable"))
table(right, first, 'It begins with "{}": not judged.', {
    "a table that ends early": "if m.max(initial=0) > 4095: raise IndexError('index 4096 is out of bounds')",
    "seven rows at most": "assert len(m) <= 7", "some sums only": "assert len(m) < 2 or m.sum() % 3",
    "nothing returned": "return",
    "an axis too many": "x = x[None]  # as sglang's DeepSeek has it",
}, verdict="not judged")
for _i, _exhibit in enumerate(exhibits()):
    _rope = {field.name: getattr(_exhibit.rope, field.name) for field in fields(_exhibit.rope)}
    case(f"rotation: gallery, {_exhibit.name}", "rotation", "wrong" if _exhibit.verdict == "wrong" else "right",
         ", ".join(_exhibit.faults) or "It is this rope.",
         lambda i=_i: exhibits()[i].fn, rope=_rope, verdict=_exhibit.verdict, dtype=_exhibit.dtype)

# Wrong: frequencies

table(wrong, power, "The exponent is {} instead of −2i/d.", {
    "over r − 2": "-2 * i / (D - 2)", "without its 2": "-i / D", "doubled": "-4 * i / D", "over the model": "-2 * i / 512",
    "in integers": "-2 * i // D * 0.0", "index from 1": "-2 * (i + 1) / D", "odd numbers": "-(2 * i + 1) / D", "not inverted": "2 * i / D",
})
table(wrong, theta, "The frequencies are {} instead of w.", {
    "to degrees": "np.degrees(w)", "times 2π": "2 * np.pi * w", "times 1.5": "1.5 * w",
    "w reversed": "w[::-1]", "even ones first": "np.r_[w[::2], w[1::2]]",
    "two exchanged": "w[np.r_[1, 0, 2:32]]", "the last pairs still": "w * (i < 24)",
})
wrong("over the head", "The exponent is 2i/64 instead of 2i/32.", power("-2 * i / 64"), source=PARTIAL, rope=PART)
wrong("base nearly right", "The base is 100000.4 instead of 100000.", ("10000.0", "100000.4"), rope=PLAIN | {"base": 100000.0})
wrong("running product", "Frequencies are a running product in float32, and drift.", ("D, BASE = 64", "D, BASE = 128"),
      theta("np.cumprod(np.r_[np.float32(1), np.full(63, np.float32(BASE) ** np.float32(-2 / 128))], dtype='f4').astype(float)"),
      rope=PLAIN | {"head_dim": 128})
wrong("linear factor twice", "The factor 4 is applied twice.", theta("w / 16"), rope=LINEAR)
wrong("⌊m/4⌋", "Positions are divided by 4 in integers.", at("m // 4"), rope=LINEAR)
table(wrong, theta, "The frequencies of YaRN by 8 are {}.", {
    "linear for YaRN": "w / 8", "YaRN over turns": "w * (1 / 8 + 7 / 8 * np.clip((4096 * w / (2 * np.pi) - 1) / 31, 0, 1))",
    "YaRN over wavelengths": "w * (1 - 7 / 8 * np.clip((2 * np.pi / w - 128) / (4096 - 128), 0, 1))", "YaRN by 16": "yarn(w, 16)",
    "YaRN, other betas": "yarn(w, 8, fast=24, slow=2)", "wild, exllamav2: the new length": "yarn(w, 8, length=32768)",
    "wild, litgpt: ramp inverted": "w * (1 + 1 / 8) - yarn(w, 8)",
}, rope=YARN)
wrong("YaRN betas swapped", "beta_fast and beta_slow are exchanged.", theta("yarn(w, 8, fast=1, slow=32, down=float, up=float)"),
      rope=WHOLE)
for _name, _llama in {"exchanged": "w, low=4, high=1", "blended the wrong way": "w, blend=lambda t: 1 - t", "times the factor": "w, 1 / 8",
                      "twice": "llama3(w)", "blends wavelengths": "w, blend=lambda t: (8 / (8 - 7 * t) - 1) / 7"}.items():
    wrong(f"llama3 {_name}", f"The frequencies are llama3({_llama}).", ROOT,
          theta("llama3(w) ** 2 / w" if _name == "twice" else f"llama3({_llama})"), rope=LLAMA)
table(wrong, slot("m[..., None] * w", "m[..., None] * (BASE * {}) ** (-i / 32)"), "The base is stretched by {} instead of 7^(64/62).", {
    "NTK without − (s − 1)": "8 ** (64 / 62)", "NTK, exponent upside down": "7 ** (62 / 64)", "NTK without its exponent": "7",
}, rope=NTK)
wrong("wild, keras-hub: NTK is linear", "Dynamic NTK divides all frequencies by the factor.", theta("w / 2"), rope=NTK)
wrong("LongRoPE multiplied", "Frequencies are multiplied by the list instead of divided.", theta("w * (1 + i / 8)"), rope=LONG)
conditional("LongRoPE, >=", "The length is compared by >=: one of 4096 has the long list.",
            theta("w / (1 + i / 8 * (m.max(initial=0) >= 4095))"), rope=LONG)
wrong("proportional, all of it", "All pairs turn, a quarter expected.", rope=SHARE)

# Wrong: pairs, terms, factors

wrong("concatenated table, neighbours", "A table for halves meets neighbours, as in esm's interleaved=True.", READS, WRITES,
      tables("*(np.r_['-1', t, t] for t in (np.cos(angle), np.sin(angle))),"),
      pair("a * cos[..., ::2] - b * sin[..., ::2], a * sin[..., 1::2] + b * cos[..., 1::2]"), rope=NEIGHBOURS)
wrong("mirrored partners", "Pairs are (i, 63 − i).", ("np.split(x, 2, axis=-1)", "x[..., :32], x[..., :31:-1]"),
      ("(out, ", "((out[0], out[1][..., ::-1]), "))
wrong("moved, refused", "Neighbours are written in halves, which is refused here.", READS, rope=NEIGHBOURS, equivalent="wrong")
wrong("partners in the other half", "Pairs are (i, i + d/2) where (i, i + r/2) are meant.",
      first("a, b = np.split(turn(x[..., np.r_[0:16, 32:48]], m[..., None] * w), 2, axis=-1)"),
      ("(turn(x[..., :32], m[..., None] * w), x[..., 32:])", "(a, x[..., 16:32], b, x[..., 48:])"), source=PARTIAL, rope=PART)
table(wrong, slot("(turn(x[..., :32], m[..., None] * w), x[..., 32:])", "({})"), "The two halves of x become {}.", {
    "the last features": "x[..., :32], turn(x[..., 32:], m[..., None] * w)",
    "rest zeroed": "turn(x[..., :32], m[..., None] * w), 0 * x[..., 32:]",
}, source=PARTIAL, rope=PART)
table(wrong, pair, "A pair (a, b) becomes {}.", {
    "sign missing": "a * cos + b * sin, a * sin + b * cos", "sign in the second half": "a * cos - b * sin, b * cos - a * sin",
    "minus on a cosine": "a * cos - b * sin, a * sin - b * cos", "sine and cosine swapped": "a * sin - b * cos, a * cos + b * sin",
    "in place": "(a := a * cos - b * sin), a * sin + b * cos",
})
table(wrong, tables, "Cosine and sine are {}.", {
    "wild, megatron-core: cosine of a cosine": "np.cos(np.cos(angle)), np.sin(np.sin(angle))",
    "sine by a root": "np.cos(angle), np.sqrt(1 - np.cos(angle) ** 2)",
    "sine of the next pair": "np.cos(angle), np.concatenate((np.sin(angle)[..., 1:], np.cos(angle)[..., :1]), axis=-1)",
})
table(wrong, times, "Outputs are multiplied by {}.", {
    "zeros": "0", "1/√d folded in": "1 / 8", "factor unwanted": "1.277", "factor by feature": "np.linspace(1, 1.3, 64)",
    "one feature 0.1 % off": "1 + 0.001 * (np.arange(64) == 2)",
})
table(wrong, times, "Outputs are multiplied by {} instead of 1.25.", {"factor squared": "1.25**2", "factor inverted": "1 / 1.25"},
      rope=FACTOR)
wrong("factor on the cosine", "The attention factor is on the cosine alone.", tables("1.25 * np.cos(angle), np.sin(angle)"), rope=FACTOR)
wrong("xPos", "Lengths grow with the position, by ζ^(m/512), as in xPos.",
      times("np.tile(((2 * i + 0.4 * D) / (1.4 * D)) ** (m[:, None] / 512), 2)"), max_position=4095)

# Wrong: positions

table(wrong, at, "Rows turn by the positions {} instead of m.", {
    "one too low": "m - 1", "shifted by 17": "m + 17", "in int16": "m.astype(np.int64).astype(np.int16)", "modulo 4096": "m % 4096",
    "clamped at 49": "np.minimum(m, 49)", "minus the first": "m - m[:1]", "from the first on": "m[:1] + np.arange(len(m))",
    "reversed": "m[::-1]", "sorted": "np.sort(m)", "of the row before": "np.roll(m, 1)", "ranked": "np.searchsorted(np.unique(m), m)",
    "of the first chunk": "np.tile(m[:-(-len(m) // 2)], 2)[:len(m)]", "made even": "m // 2 * 2",
    "twice from 2048 on": "np.where(m < 2048, m, 2 * m)", "one more beyond 65535": "m + (m > 65535)",
    "10000 to 10999 as 9": "np.where(m // 1000 == 10, 9, m)", "position 0 alone": "m + (m == 0)", "position 77 alone": "m + (m == 77)",
})
wrong("handed on", "x is returned as it is.", out("x.copy()"))
wrong("four mistakes", "Base 50000, one position more, backwards, times 1.1.", ("10000.0", "50000.0"), at("-m - 1"), times("1.1"))
wrong("base, and a scaled head", "Base 50000, and the last of three or more heads is doubled.", ("10000.0", "50000.0"),
      after("if x.ndim > 2 and x.shape[-3] > 2:\n        y[..., -1, :, :] *= 2"))
wrong("|m|", "A negative position turns by |m|.", at("np.abs(m)"), min_position=-100)
table(wrong, by, "The angle is {}.", {
    "table grown by another rule": "m[:, None] * np.where(m[:, None] < 4096, w, w / 4)",
    "turns of 6.2832": "m[:, None] * w % 6.2832", "2π in float32": "np.fmod(np.float32(m[..., None] * w), np.float32(2 * np.pi))",
    "half turns in float32": "np.float32(np.pi) * np.fmod((m[..., None] * w / np.pi).astype('f4'), 2)",
    "phase of 24 bits": "m[:, None] * np.rint(w / (2 * np.pi) * 2**24) % 2**24 * (2 * np.pi / 2**24)",
    "phase, more than a unit off": "m[..., None] * (w + 1.1 * 2 * np.pi / 2**32)",
})
wrong("coarser than asked", "The angle is in float32 where one rounding is asked for.", by("m[..., None].astype('f4') * w.astype('f4')"),
      grade="rounded once")
conditional("coarser than asked in long calls", "The angle is in float32 where there are more than 1000 rows; asked for is one rounding.",
            by("m[..., None].astype('f4') * w.astype('f4') if len(m) > 1000 else m[..., None] * w"), grade="rounded once")
table(wrong, slot("at = m[", "m = {}; at = m["), "The positions of three axes are {} instead of m.", {
    "axes in another order": "m[[0, 2, 1]]", "axes as text": "m[[0, 0, 0]]", "axis 1 one too high": "m + np.array([[0], [1], [0]])",
    "axis 1 clamped": "np.stack((m[0], np.minimum(m[1], 127), m[2]))",
}, source=FLUX, rope=BLOCKS)
wrong("one series for all axes", "One series of frequencies runs over all axes.", SERIES[::-1], source=FLUX, rope=BLOCKS)
wrong("a series for each axis", "Frequencies restart with each axis.", SERIES, source=AXES, rope=GRID)
wrong("other sections", "The sections are (3, 2, 3) instead of (2, 3, 3).", ("[0, 0, 1, 1,", "[0, 0, 0, 1,"), source=AXES, rope=GRID)

# Wrong in some calls

_PROMPT = "len(m) > 1 and (np.diff(m) == 1).all()"
table(conditional, slot("m[..., None] * w", "(m + 1 if {} else m)[..., None] * w"), "Positions are one too high if {}.", {
    "a prompt from 0": f"{_PROMPT} and m[0] == 0", "a prompt from elsewhere": f"{_PROMPT} and m[0] > 0",
    **{f"{n} rows": f"len(m) == {n}" for n in (1, 33, 100, 2048)}, "multiples of 48": "len(m) % 48 == 0",
    "falling positions": "len(m) > 2 and (np.diff(m) == -1).all()", "two sequences in a row": "len(m) > 3 and (m == np.arange(len(m)) % (len(m) // 2)).all()",
    "8 heads of 8 rows": "x.shape[:-1] == (8, 8)",
    "one head": "x.ndim > 2 and x.shape[-3] == 1", "a batch of four": "x.ndim == 4 and len(x) == 4", "five axes": "x.ndim == 5",
    "one head of a batch": "x.ndim > 3 and len(x) > 1 == x.shape[-3]", "decoding of whole batches": "x.ndim > 3 and len(x) > 3 and len(m) == 1",
    "read-only": "not x.flags.writeable", "not aligned": "not x.flags.aligned", "more than 2²⁰ numbers": "x.size > 2**20",
    "from the 51st call on": "CALLS.append(1) or len(CALLS) > 50", "the ninth call": "CALLS.append(1) or len(CALLS) == 9",
})
table(conditional, at, "Rows turn by the positions {} instead of m.", {
    "gaps filled": "m[0] + np.arange(len(m)) if len(m) > 1 and (np.diff(m) > 0).all() else m",
    "consecutive if the ends fit": "m[0] + np.arange(len(m)) if len(m) and m[-1] - m[0] == len(m) - 1 else m",
    "a table kept by its length": "KEPT.setdefault(len(m), m)",
    "a table kept by its first position": "KEPT.setdefault((m[:1].tobytes(), len(m)), m)",
})
table(conditional, after, "The result is changed by {}.", {
    "blocks of 64": "n = len(m) // 64 * 64 or len(m); y[..., n:, :] = x[..., n:, :]", "the last row": "y[..., -1:, :] = x[..., -1:, :]",
    "head 2": "if x.ndim > 2: y[..., 2:3, :, :] = x[..., 2:3, :, :]",
    "two heads exchanged": "if x.shape[:-2] == (4, 3): y = y[:, [0, 2, 1]]", "no rows": "if not len(m): return x[..., :2]",
    "a result kept by its first number": "k = x.shape, m.tobytes(), x.ravel()[:1].tobytes(); y = KEPT.get(k, y); KEPT.clear(); KEPT[k] = y",
})
table(conditional, first, 'It begins with "{}".', {
    "every third call is refused": "CALLS.append(1); assert len(CALLS) % 3",
    "the ninth call exits": "CALLS.append(1)\n    if len(CALLS) == 9: raise SystemExit",
    "each call once": "k = x.tobytes(), m.tobytes(); assert k not in KEPT or not x.size; KEPT[k] = 1",
})
conditional("a base of each length", "The base grows with the largest position of a call.",
            ("w = BASE", "w = (BASE * max(1, m.max(initial=0) / 4096))"))
conditional("wild, transformers: the longest call stays", "Dynamic NTK keeps the table of the longest call (5.22.2; also PaddleNLP 2.8.1).",
            first("KEPT['n'] = max(KEPT.get('n', 4096), m.max(initial=0) + 1)"),
            theta("(BASE * (2 * KEPT['n'] / 4096 - 1) ** (64 / 62)) ** (-i / 32)"), rope=NTK)
conditional("wild, liger-kernel: row 0", "All rows of a batch turn by the positions of the first (Llama 4, 0.8.5).",
            at("m.reshape(len(m), 1, -1)[:1] if m.ndim > 1 else m"), batched=True)

# Damaged

F16 = ".astype(np.float16).astype(float)"
table(damaged, tables, "Cosine and sine are {}.", {"tables in float16": f"np.cos(angle){F16}, np.sin(angle){F16}",
                                                   "wild, fish-speech: tables in bfloat16": "bf16(np.cos(angle)), bf16(np.sin(angle))"})
table(damaged, by, "The angle is {}.", {
    "angle in float16": f"(m[..., None] * w){F16}", "wild, vit-pytorch: angle in bfloat16": "bf16(m[..., None] * w)",
    "positions in float16": f"m{F16}[:, None] * w",
})
table(damaged, theta, "The frequencies are {}.", {"θ in float16": f"w{F16}",
                                                  "θ by bfloat16": "bf16(1 / bf16(bf16(BASE) ** bf16(2 * i / D)))"})
table(damaged, first, "x is changed by {}.", {
    "x in float16": f"x = x{F16}.astype(x.dtype)", "wild, Kandinsky 5: x in bfloat16": "x = bf16(x).astype(x.dtype)",
    "clipped at 1000": "x = np.clip(x, -1000, 1000)",
    "strides ignored": "x = np.resize(x.base.ravel(), x.shape) if isinstance(x.base, np.ndarray) and x.base.dtype == x.dtype else x",
    "int32 read as int64": "m = m if positions.dtype == 'i8' else np.resize(np.frombuffer(positions.tobytes(), 'i8'), len(m)) % 4096.0",
})
table(damaged, out, "The result is {}.", {
    "result in float16": f"y{F16}.astype(x.dtype)", "result in bfloat16": "bf16(y).astype(x.dtype)",
    "squares overflow": "(y * (1 + 0 * (x * x * x * x).sum(axis=-1, keepdims=True))).astype(x.dtype)", "small x lost": "(y * (abs(x).max(initial=0) >= 1e-6)).astype(x.dtype)", "NaN to 0": "np.nan_to_num(y).astype(x.dtype)",
    "another dtype": "y", "a constant added": "(y + 0.01).astype(x.dtype)", "NaN from 5000 on": "np.where(m[:, None] >= 5000, np.nan, y).astype(x.dtype)",
    "NaN at one number": "np.where((m[:, None] == 4096) & (np.arange(64) == 5), np.nan, y).astype(x.dtype)",
    "rows leak": "(y + 0 * x.sum(axis=(-1, -2), keepdims=True)).astype(x.dtype)",
    "input overwritten": "np.copyto(x, y.astype(x.dtype)) or x if x.flags.writeable else y.astype(x.dtype)",
    "overwritten": "np.copyto(KEPT.setdefault(x.shape, np.empty_like(x)), y.astype(x.dtype)) or KEPT[x.shape]",
})
damaged("half not written", "The features that stay are not written.", first("z = np.empty(x.shape, x.dtype)"),
        out("np.copyto(z[..., :32], y[..., :32]) or z"), source=PARTIAL, rope=PART)

# Found in the wild (docs/wild.md): what is not above

wrong("wild, DBRX: base", "rope_theta, 500000, is not read: base 10000 (transformers 5.22.2; also OLMo 3's sliding layers).",
      rope=PLAIN | {"base": 500000.0})
wrong("wild, MiniMax-M3: width", "rotary_dim, 32, is not read: all 64 features turn (transformers 5.22.2).", rope=PART)
wrong("wild, ggml: YaRN truncated", "The ends of YaRN's ramp are rounded where truncate is false (also transformers, mlx-lm).",
      theta("yarn(w, 8)"), rope=WHOLE)
wrong("wild, HunYuan-VL: pairs", "The two features of a pair follow different axes, so that it is no rotation.",
      ("at * w", "np.r_['-1', at * w, m[[0, 1, 1, 2, 2, 2, 0, 0]].T * w]"),
      pair("a * cos[..., :8] - b * sin[..., :8], a * sin[..., 8:] + b * cos[..., 8:]"), source=AXES, rope=GRID)
wrong("wild, equinox: key of a table", "Tables are kept under a key without the base, and are those of base 10000.",
      theta("KEPT.setdefault(D, w)"), rope=PLAIN | {"base": 500000.0})
wrong("wild, ggml: IMROPE", "Pairs whose section has ended follow a fourth axis, which is 0.",
      ("[0, 0, 1, 1, 1, 2, 2, 2]", "[0, 1, 2, 0, 1, 2, 0, 0]"), ("at * w", "at * w * (i < 7)"),
      source=AXES, rope=GRID | {"axes": Axes("interleaved", (4, 2, 2))})
conditional("wild, sglang: Phi-3", "In a call up to position 4096 that position is not rotated: it reads row 0 of the second table.",
            first("late = m.max(initial=0) > 4096"),
            by("np.where(m >= 4096, m - 4096 * (not late), m)[:, None] * np.where(late | (m[:, None] >= 4096), w / (1 + i / 8), w)"),
            rope=LONG)
wrong("wild, sglang: rows not rescaled", "Rows by which the table grows are not rescaled.",
      by("m[:, None] * np.where(m[:, None] < 16384, w / 4, w)"), rope=LINEAR)
wrong("wild, mlx-lm: long list", "LongRoPE always has the long list.", theta("w / (1 + i / 8)"), rope=SHORT)
wrong("wild, TransformerEngine: factor", "The factor of interpolation is ignored (2.20.2; also keras-hub).", rope=LINEAR)
wrong("wild, exllamav2: su", "LongRoPE has no attention factor in short calls.",
      rope=PLAIN | {"scaling": LongRoPE(*_LISTS, 8.0, 4096, length=4096)})
wrong("wild, OLMo-core: ramp", "The end of YaRN's ramp is clamped to d/2 − 1.",
      theta("yarn(w, 8, 262144, up=lambda end: min(np.ceil(end), 31))"),
      rope=PLAIN | {"scaling": YaRN(8.0, 262144, attention_factor=1.0)})

# Places, blocks and sizes

table(wrong, out, "The result is {}.", {
    "rows reversed": "y[..., ::-1, :].astype(x.dtype)",
    "one row further": "np.roll(y, 1, axis=-2).astype(x.dtype)",
})
conditional("heads in fours", "Heads beyond a multiple of four stay, if there are more than four.",
            after("flat, raw, k = y.reshape(-1, *x.shape[-2:]), x.reshape(-1, *x.shape[-2:]), x.size // max(1, x.shape[-2] * D) // 4 * 4"),
            after("if k:\n        flat[k:] = raw[k:]"), after("y = flat.reshape(x.shape)"))
conditional("a range is taken to rise", "Positions that fill a range are sorted.",
            at("np.sort(m) if len(m) > 1 and len(set(m.tolist())) == len(m) == np.ptp(m) + 1 else m"))
conditional("one too low far out", "Beyond 100000 positions are one too low.", at("np.where(m > 1e5, m - 1, m)"))
conditional("positions in float16, clamped", "Positions are float16 numbers, at most 65504.", at("np.minimum(m, 65504).astype(np.float16).astype(float)"))
damaged("small numbers are zeros", "Numbers below 0.001 are zeros.", first("x = np.where(np.abs(x) < 1e-3, 0, x).astype(x.dtype)"))

# Two mistakes in different calls, counts that go on, features that are lost, numbers scaled before they are rounded

conditional("in int16, and one row stays", "Positions overflow 16 bits, and a call of one row returns x.",
            at("m.astype(np.int64).astype(np.int16)"), after("y = x if len(m) == 1 else y"))
conditional("one row counts on", "A call of one row has the position after the last one of the call before.",
            first("m = np.array([KEPT['m'] + 1]) if len(m) == 1 and KEPT else m"), first("KEPT['m'] = m.max(initial=0)"))
conditional("text if it begins alike", "All pairs follow the first axis if the first row has the same position on all.",
            ("at = m[", "m = m[[0, 0, 0]] if (m[:, :1] == m[0, :1]).all() else m; at = m["), source=FLUX, rope=BLOCKS)
wrong("three axes interleaved to the end", "Pair 7 follows axis 1, where its section has ended.",
      ("[0, 0, 1, 1, 1, 2, 2, 2]", "[0, 1, 2, 0, 1, 2, 0, 1]"), source=AXES, rope=GRID | {"axes": Axes("interleaved", (4, 2, 2))})
damaged("the last pair lost", "Features 31 and 63 are zeros.", times("np.arange(64) % 32 < 31"))
damaged("x scaled to float16", "x is divided by the greatest of all its numbers, and rounded to float16.",
        first("s = abs(x).max(initial=1e-30); x = ((x / s).astype(np.float16) * s).astype(x.dtype)"))
damaged("x scaled to float8", "Each row is scaled to 448 at most, and rounded to four significant bits.",
        first("s = abs(x).max(axis=-1, keepdims=True, initial=1e-30) / 448; f, e = np.frexp(x / s)"),
        first("x = (np.ldexp(np.rint(f * 16) / 16, e) * s).astype(x.dtype)"))
damaged("tables in 8 bits", "Cosines and sines are multiples of 1/127.", tables("*np.rint(np.stack((np.cos(angle), np.sin(angle))) * 127) / 127,"))
table(damaged, after, "The result is changed by {}.", {
    "a mean over rows is added": "y = y + 1e-3 * y.mean(axis=-2, keepdims=True) if len(m) else y",
    "the row before leaks": "y[..., 1:, :] += 1e-3 * x[..., :-1, :]",
    "a mean over heads is added": "y = y + 1e-3 * y.mean(axis=-3, keepdims=True) if x.ndim > 2 else y",
})
