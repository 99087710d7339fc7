"""Every mistake by its name: its cause, its fix, and the projects in which it happened. Data, no code.

A name may be followed by what was measured: "window: one too wide" has the cause and the fix of "window".
"""

from __future__ import annotations

import re
from typing import NamedTuple

ISSUE = re.compile(r"([\w.-]+/[\w.-]+)#(\d+)")  # of a repository, as GitHub writes it


class Mistake(NamedTuple):
    cause: str
    fix: str
    happened: str = ""  # issues and pull requests of other projects, or their versions


def mistake(name: str) -> Mistake:
    """The mistake of this name, or of its part before the colon."""
    return MISTAKES.get(name) or MISTAKES.get(name.partition(":")[0]) or MISTAKES["unexplained"]


_WIDER = "keep inverse frequencies, positions and angles in float32 (or wider), and cast cos and sin"
_ROUNDED = {
    f"{dtype} {what}": Mistake(cause.format(dtype), fix, happened)
    for dtype in ("bfloat16", "float16")
    for what, cause, fix, happened in (
        ("inverse frequencies", "inverse frequencies kept in {0}, by model.to({0}) or in the checkpoint", _WIDER,
         "EleutherAI/gpt-neox#1003"),
        ("positions", "positions cast to {}", _WIDER, "huggingface/diffusers#13920"),
        ("angle", "m·θ computed in {0}, by autocast or model.to({0})", _WIDER, "EleutherAI/gpt-neox#1003"),
        ("tables", "cos and sin cast to {}, or computed there, though x is wider", "tables in the dtype of x, or wider",
         ""),
        ("results", "the rotated x goes through {}, though x is wider", "keep the dtype of x to the end", ""),
        ("input", "x goes through {} before it is rotated", "keep the dtype of x from the beginning", ""),
    )
}  # fmt: skip

ROTATION: dict[str, Mistake] = {
    # Pairs
    "wrong pairing": Mistake("half and interleaved layouts exchanged, pairs half a head apart where a part of it "
        "turns, or the reverse; or q and k weights not permuted for the layout that is used",
        "use the layout that the checkpoint was trained with, or permute the rows of W_q and W_k (permute_weights); "
        "pair i with i + r/2 where r features turn, with i + d/2 in a proportional rotation",
        "vllm-project/vllm#590, ggml-org/llama.cpp#22611, pie-project/pie#602, NVIDIA-NeMo/Megatron-Bridge#4195"),
    "features mixed": Mistake("pairs are written over x while others are still being read from it, or features are "
        "summed", "write to another array, or permute after the rotation"),
    "two angles in one pair": Mistake("a table repeated as θ₀θ₀θ₁θ₁… with features split in halves, or concatenated as "
        "θ₀θ₁…θ₀θ₁… with adjacent pairs; or the two features of a pair follow different axes",
        "concatenate the table (θ₀θ₁…θ₀θ₁…) for halves, repeat it (θ₀θ₀θ₁θ₁…) for interleaved pairs",
        "baidu/ERNIE-Image#6"),
    "whole head rotated": Mistake("partial_rotary_factor, or the fraction of a proportional rotation, ignored: all d "
        "features turn", "rotate the first r features only, with 2i/r in the exponent", "vllm-project/vllm#43770"),
    "wrong rotary width": Mistake("rotary_dim, or the fraction of the head that turns, of another model; or divided by "
        "two once too often", "rotate rotary_dim features, partial_rotary_factor·head_dim, in half as many pairs"),
    "wrong end rotated": Mistake("prefix and suffix exchanged: [rope, nope] for [nope, rope]",
        "rotate the first r features for [rope, nope], the last r for [nope, rope]"),
    "some pairs not turned": Mistake("a loop over pairs that ends early, a last part of a vector left out, slow "
        "frequencies rounded to zero, or an axis of the positions that is always 0",
        "cover all pairs, whatever the width of a vector"),
    "rest zeroed": Mistake("the result begins as zeros, and only the rotated part is written to it",
        "copy the rest of x"),
    "rest changed": Mistake("what belongs to the pairs, such as a factor, is applied to the whole head",
        "leave the features that do not turn"),
    # Terms and signs
    "direction": Mistake("the transpose of the textbook matrix: rotated by −mθ",
        "exchange the signs of sin, or say direction=-1 if the model was trained so", "karpathy/nanochat#489"),
    "wrong sign of one term": Mistake("rotate_half without its minus, or with the minus in the wrong half",
        "(x₁ cos − x₂ sin, x₁ sin + x₂ cos)"),
    "wrong term in the pairs": Mistake("cosine and sine exchanged, or a term dropped; the first result stored over x "
        "before the second one is computed (sin·cos); cos and sin applied to tables that already are cos and sin; a "
        "sine by √(1 − cos²); an attention factor on one of the two tables; or, backwards, the sine at the feature "
        "that is written",
        "(x₁ cos − x₂ sin, x₁ sin + x₂ cos), with the same cos and sin in both; keep both inputs until both outputs "
        "are computed; backwards, multiply g with sin first, then exchange the features",
        "megatron-core 0.16.1, PaddlePaddle/Paddle#74716"),
    "no rotation": Mistake("the two outputs of a pair are not made with the cosine and sine of one angle; or lengths "
        "change with the position, as by the scale of xPos (queries times ζ^(m/s), keys times its inverse)",
        "(x₁ cos − x₂ sin, x₁ sin + x₂ cos), with the same cos and sin in both; check xPos without its scale"),
    "zeros returned": Mistake("the kernel did not run, or its result was not written",
        "check the launch, and the array that is returned"),
    "not rotated": Mistake("the call is missing, or its result dropped", "use what the function returns"),
    # Lengths
    "attention factor": Mistake("cos and sin are not multiplied by the attention factor, or twice, or by another "
        "number; the rope has none (YaRN: 0.1·ln s + 1; mscale over mscale_all_dim if both are set); or the scale of "
        "the softmax is folded in",
        "multiply both tables by the attention factor of the config, once, and nothing else: scores get its square",
        "turboderp-org/exllamav3#259, NVIDIA/TensorRT-LLM#16378, vllm-project/vllm#48623"),
    "features multiplied differently": Mistake("a weight, such as that of a norm, or a factor of one feature is "
        "applied on the way", "rotate, and do nothing else to x"),
    "features not written": Mistake("a loop over pairs that ends early, or a last part of a vector left out, where the "
        "result begins as zeros", "cover all pairs, whatever the width of a vector"),
    # Frequencies
    "wrong base": Mistake("rope_theta not read, or read from where it is no longer kept",
        "read it from the config, under its new and its old name (rope_parameters, rope_scaling)",
        "deepspeedai/DeepSpeed#8345"),
    "wrong exponent": Mistake("another number in the place of 2i/r: i/r, 2i over the number of pairs, over the whole "
        "head, over r − 2 (linspace), over the width of the model, a quotient of integers, or with the other sign",
        "1/base^(2i/r), r the rotary width of one head, divided as floats: arange(0, r, 2)/r", "pie-project/pie#602"),
    "index counted from 1": Mistake("i = 1 … r/2, or 1, 3, 5, … for 2i, put into base^(−2i/r)",
        "Eq. (15) counts from 1 and subtracts it: 2(i − 1)"),
    "frequencies in another order": Mistake("the table is flipped, or dealt to axes (Pixtral's order) where there are "
        "none", "θ₀, θ₁, θ₂, … in order, the fastest pair first"),
    "wrong unit of the angle": Mistake("degrees, turns or half turns taken for radians",
        "angles in radians: m·θ, without 2π and without 180/π"),
    "angles multiplied": Mistake("positions or frequencies are multiplied by a number", "the angle is m·θ"),
    "rotated twice": Mistake("applied in the model and again in the kernel", "rotate once",
        "NVIDIA/TensorRT-LLM#16378"),
    "inexact frequencies": Mistake("frequencies or phases of too few bits, or powers by an approximation",
        "compute them in float64, or in float32 by one power each"),
    "wrong frequencies": Mistake("a rule for the frequencies that is not known here, or numbers of another model",
        "compare the measured frequencies with base^(−2i/r) and with the rescaling of the config"),
    # Rescalings
    "scaling ignored": Mistake("rope_scaling not read",
        "read it from the config, under its new and its old name (rope_parameters, rope_scaling)",
        "Blaizzy/mlx-vlm#1710, unslothai/unsloth#6907"),
    "scaling applied twice": Mistake("both positions and frequencies were interpolated, or frequencies that are "
        "rescaled already, from a checkpoint or a config, are rescaled again", "rescale once",
        "NVIDIA/TensorRT-LLM#16378"),
    "scaling inverted": Mistake("the factor, or its reciprocal (as ggml's freq_scale), taken for the other",
        "divide by the factor"),
    "another rescaling": Mistake("one rescaling taken for another, or one applied where the config has none",
        "dispatch on rope_type, and refuse a type that is not known", "pytorch/torchtitan#3787"),
    "wrong scaling parameter": Mistake("a factor, original length (max_position_embeddings for "
        "original_max_position_embeddings), limit or truncation of another model, or a default",
        "read them from the config: factor, original length, betas or low and high, truncate",
        "pytorch/torchtitan#3787"),
    "wrong ramp": Mistake("the two sides of the blend, or its limits, exchanged; the ramp made linear in something "
        "else, of wavelengths, cut off, or without a blend",
        "YaRN: w·((1 − γ) + γ/s) with γ = (i − lo)/(hi − lo), lo from beta_fast, hi = min(hi, r − 1) from beta_slow; "
        "llama3: wavelengths above L₀/low are divided, below L₀/high kept",
        "litgpt 0.5.13, OLMo-core 3.0.0, pytorch/torchtitan#3787"),
    "dynamic NTK formula": Mistake("a term of base·(s·N/L − (s − 1))^(r/(r−2)) is missing or another, or the length is",
        "base·(s·N/L − (s − 1))^(r/(r−2)), N ≥ L"),
    "wrong list of factors": Mistake("short and long exchanged, the switch at < instead of <=, or a list that is not "
        "in the order of the pairs", "θ_i = base^(−2i/r)/factor_i, long if N > L₀, else short",
        "unslothai/unsloth#10681"),
    # Positions at which pairs begin
    "positions one too high": Mistake("m + 1 for m: counted from 1, or the position of the token that comes next",
        "count positions from 0, and pass the position of the token itself",
        "sgl-project/sglang#25015, likejazz/llama3.np"),
    "positions one too low": Mistake("m − 1 for m",
        "count positions from 0, and pass the position of the token itself"),
    "positions shifted": Mistake("padding counted, or the row count of a cache used as position",
        "count positions from 0, and pass the position of the token itself",
        "unslothai/unsloth#3699, rajveer43/VeloxQuant-MLX#389"),
    "turned at position 0": Mistake("a constant is added to the angles", "the angle is m·θ, which is 0 at position 0"),
    # Axes
    "wrong axes": Mistake("positions of text, (n,), used where (axes, n) are meant; (t, w, h) or (x, y) for (t, h, w) "
        "or (row, column); sections of Qwen2-VL for the interleaved axes of Qwen3-VL, or counted in features where "
        "mrope_section counts pairs; or positions of several axes added up",
        "follow mrope_section and mrope_interleaved, or the model's vision code; test with t, h and w that differ",
        "sgl-project/sglang#36763, alibaba/MNN#4133, Blaizzy/mlx-vlm#576"),
    "series of the axes": Mistake("a table for each axis where one series runs over all of them, or the reverse",
        "deal one series of frequencies to the axes (M-RoPE), or give each axis base^(−j/k) for its k pairs (Flux)"),
    # Precision
    **_ROUNDED,
    "inexact sine": Mistake("a sine read from a table without interpolation, or by a short polynomial, or a table in "
        "integers of few bits", "a full sine for the table"),
    "angle too coarse": Mistake("a hardware sine (__sinf, fast math), sincospi of a float32 number, a short phase, or "
        "a 2π of few digits (float32's): turns are rounded before they are reduced",
        "a full sine for the table, or turns that are reduced in float64 or in integers of 32 bits", "kekzl/imp#1316"),
    # Positions that rows are turned by
    "positions ignored": Mistake("arange(n) instead of the positions given", "index with the positions",
        "lucidrains/x-transformers#346"),
    "consecutive positions assumed": Mistake("positions[0] + arange(n)", "index with the positions"),
    "first position taken as 0": Mistake("an offset is lost: positions − positions[0]",
        "use the positions as they are, in a cache too"),
    "another row's position": Mistake("positions are sorted, reversed, shifted by a row, or those of one row are used "
        "for all; or, in context parallel, a rank that holds several chunks repeats those of the first",
        "give each row its own position, as it is: [0, 3, 4, 7], not [0, 3, 0, 3]", "NVIDIA/Megatron-LM#5243"),
    "positions of a batch misread": Mistake("the positions of the first row, or the batch stride of a table left out, "
        "for all rows", "index the table with every row's positions, or refuse what is not (n,)"),
    "positions modulo a length": Mistake("a ring buffer's row as position, a table that is read from its beginning "
        "again, or positions that overflow 8 or 16 bits", "int32 or int64 positions, unwrapped"),
    "positions divided in integers": Mistake("position // factor instead of position / factor, or positions that lose "
        "their last bits", "divide as floats, or divide the frequencies"),
    "table clamped at its end": Mistake("a lookup that clips its index (JAX does)",
        "make the table as long as the largest position asks for, or raise an error beyond its end"),
    "wrong beyond a position": Mistake("a table that ends there, is read beyond its end, or was grown by another rule",
        "make the table as long as the positions; grow it by the rule that made it", "sglang 0.5.23"),
    "one position wrong": Mistake("a row of the table is overwritten, or filled by something else",
        "compare this row with its neighbours"),
    "some positions wrong": Mistake("a part of the table is filled by something else, or positions lose some of their "
        "bits", "compare these rows of the table with their neighbours"),
    "negative positions wrong": Mistake("a table indexed from its end, an unsigned type, or |m| instead of m",
        "turn backwards for negative positions, or refuse them"),
    "depends on the length": Mistake("a base that grows with the length where none is meant; a switch at another "
        "length: < for <=, or the largest position taken for the length, which is one more",
        "fix the length beforehand; the original length L₀ itself is short: switch where the largest position + 1 > L₀",
        "huggingface/transformers#25104"),
    # Numbers on their way
    "not linear": Mistake("x is normalised, clipped or cleaned of NaN on the way, or something is added that does not "
        "depend on x", "rotate, and do nothing else to x"),
    "input rounded": Mistake("x goes through a dtype of fewer bits, or a quantiser, before it is rotated",
        "keep the dtype of x from the beginning"),
    "results rounded": Mistake("the rotated x goes through a dtype of fewer bits, or a quantiser",
        "keep the dtype of x to the end"),
    "coarser than asked": Mistake("angles in float32, or tables or products in the dtype of x",
        "exact or float64 angles; round the result once"),
    "another order of features": Mistake("pairs are written in another layout, or the rows of a weight are permuted; "
        "of gradients, they are written where the forward pass writes its result, not where it reads x",
        "use one layout for queries and keys, and write features where the model expects them"),
    # Backwards
    "backward equals forward": Mistake("the forward rotation is used for gradients",
        "use the transpose: −sin for sin; where pairs are written in another layout, read them from there"),
    "no gradient": Mistake("the backward pass is missing, or x was detached from the graph",
        "implement the backward pass, Rᵀ·g, and keep x in the graph", "huggingface/candle#3568, Blaizzy/mlx-vlm#1475"),
    "gradient negated": Mistake("a minus too many: the gradient of −y, or a result that is subtracted where it should "
        "be added", "return Rᵀ·g, and let the optimizer subtract it"),
}  # fmt: skip

CALLS: dict[str, Mistake] = {  # what a candidate does beside its arithmetic
    "random": Mistake("dropout, a race between threads, or memory that was not written",
        "use no randomness, and write all of the result"),
    "state between calls": Mistake("a table cached without its key, or grown by a longer call",
        "make the table's key complete, or fix the length beforehand",
        "equinox 0.13.8, huggingface/transformers#25104"),
    "result overwritten by the next call": Mistake("one output buffer is used for all calls",
        "allocate the result, or copy it"),
    "output not written": Mistake("the result is allocated without being filled, and a part of it is not written",
        "write every feature of every row, those that do not turn too"),
    "mutates its input": Mistake("arithmetic in place, such as x *= cos",
        "write to a new array, or rotate a copy of x"),
    "wrong dtype out": Mistake("the result keeps the dtype that tables or arithmetic gave it, wider or narrower than "
        "that of x", "cast the result to the dtype of x"),
    "wrong shape out": Mistake("a reshape, a squeeze or a slice that is right for some shapes alone",
        "return an array of the shape of x"),
    "not finite": Mistake("an overflow, of exp(score), of a square or in a narrow dtype; 0/0 or ∞ − ∞; or a table that "
        "ends",
        "check the extreme positions and numbers; in attention, subtract the greatest score, and guard empty rows"),
    "rows leak into each other": Mistake("a reduction over rows, memory that is read before it is written, or an index "
        "of the output that is another one than that of the input",
        "compute each row from its own numbers alone"),
    "strides ignored": Mistake("memory read as if it were contiguous, or a path for some views",
        "use the strides, or copy first"),
    "positions misread": Mistake("the bytes of the positions are read as if they were contiguous and int64",
        "convert the positions first"),
    "order of positions matters": Mistake("positions are sorted, made unique, or only their first and last are read",
        "index with the positions as they are"),
    "consecutive positions wrong": Mistake("a fast path for a prompt, which takes an offset or a slice of the table "
        "instead of the positions", "compare the fast path with the general one, from 0 and from other positions"),
    "some lengths wrong": Mistake("a block of the kernel at its edge: the last, partial block dropped; a path for "
        "certain lengths, such as one row in decoding",
        "cover partial blocks; test lengths around powers of two, one row, and n = d", "oxiglade/mlx-rs#359"),
    "some shapes wrong": Mistake("a path for certain shapes, or an index or a grid that ends before large ones",
        "use one path for all shapes, and 64-bit indices"),
    "rows differ": Mistake("a row's place in the call is used beside its position, or a loop is left too early",
        "cover all rows, and let the position alone decide"),
    "heads differ": Mistake("a kernel's grid, or a loop, that covers one head; heads that share no table; a wrong "
        "axis, or a path for certain shapes", "use one table and one path for all heads", "oxiglade/mlx-rs#359"),
    "batch rows differ": Mistake("a grid or a loop that ends before the batch does, or a stride of the batch left out",
        "use one table and one path for all rows of a batch"),
    "heads read as positions": Mistake("(b, h, n, d) read as (b, n, h, d)", "transpose, or say which axis is which"),
    "unexplained": Mistake("no single mistake that is known here has these outputs",
        "compare what was measured with what was expected, then step by step with pyrope.definition"),
}  # fmt: skip

ATTENTION: dict[str, Mistake] = {  # by the step that is done in another way
    # What the scores, or the numerators, are made of.
    "scale": Mistake("scores are not multiplied by the scale, or twice, or by its inverse; many kernels scale by "
        "themselves", "multiply q·k by the scale that is meant, usually 1/√d, once, before the softmax"),
    "softcap": Mistake("the cap is left out, elsewhere, of another form or number, or not meant",
        "scores become c·tanh(score/c): scaled before, masked after"),
    "bias": Mistake("a term in the distance or of each key, such as ALiBi or a decay, which the model does not have",
        "add nothing to the scores that the model does not have"),
    "operands": Mistake("a norm that is left in, arguments in another order, k·qᵀ instead of q·kᵀ, or anything else "
        "that is done to q and k before their product", "compare q with k, as they are given"),
    "scores": Mistake("scores are clipped, often against an overflow of exp, or otherwise changed before the softmax",
        "subtract the greatest score of each row, and leave scores as they are"),
    "precision": Mistake("a smaller dtype in scores, exponentials, weights, sums or a cache",
        "compute in float32 at least, and in float64 what is float64"),
    "rotation": Mistake("q or k alone is rotated, turned backwards or rotated again, in the model and in the kernel, "
        "or in a cache", "rotate both, once, in the same direction"),
    "feature map": Mistake("φ is another function, of scaled inputs, on one side alone, or applied after the rotation",
        "R·φ(x), for q and k, with the map of the model; what scales x is left out"),
    "weights": Mistake("an approximation of exp, or weights that are clipped, or dropped or made larger where they are "
        "small", "exp, and a division by the sum, of all of them"),
    # Which keys are seen, and how often.
    "causality": Mistake("the causal mask is missing, shifted, not meant, or made of blocks or of positions, which may "
        "repeat; the output of linear attention is taken before the state is updated",
        "query i of n sees keys j ≤ i + t − n of t, by the order of the tokens, itself included (torch.tril with "
        "diagonal=0); in linear attention, update the state first"),
    "causality: from the top left": Mistake("query i sees keys 0 … i of t, though the n queries are the last of them",
        "query i sees keys up to i + t − n"),
    "causality: not asked for": Mistake("a causal mask, or in linear attention running sums, where none belong",
        "leave the mask out; in linear attention, sums over the whole sequence"),
    "window": Mistake("the window is ignored, of another size, or not meant",
        "a window of w is the token itself and w − 1 others; some APIs want w − 1, or a half of it"),
    "mask=": Mistake("the mask that is given is ignored, inverted, of another row, or takes the place of the causal "
        "one", "both must hold: causal & mask, each row with its own; True is seen, as in torch's attention"),
    "segments=": Mistake("one causal mask over the whole row of packed sequences", "hide keys of other segments"),
    "hidden keys": Mistake("a finite number instead of −inf, or a softcap after the mask, tanh(−inf) = −1",
        "cap first, then mask by −inf"),
    "empty rows": Mistake("exp(−inf + inf) or 0/0 is NaN, and the lowest finite number as mask makes all scores equal",
        "let rows that see no key be zeros"),
    "blocks": Mistake("a loop over n // block blocks, or a state that is lost, replaced or read too late",
        "round the number of blocks up, and mask the last one; read the state, then add the block to it"),
    "keys": Mistake("a mask, or a loop over the keys that begins or ends elsewhere, counts some twice, drops the last "
        "partial block, or reads padding or slots that were never written",
        "compare the keys that are listed here with those expected"),
    "cache": Mistake("keys and values, or the state, or its normaliser, are not kept, cut, kept in the wrong place, or "
        "in one list for all caches",
        "n new tokens after m old ones must give the last n rows of one call with all m + n; each cache has its own"),
    # The division.
    "softmax": Mistake("the softmax is over another axis, is another function, or is applied twice",
        "softmax over the keys, axis −1, once"),
    "online softmax": Mistake("output, sum or both are not multiplied by exp(old maximum − new one), or parts of "
        "the keys are merged by their maxima without their sums",
        "rescale both when the maximum grows; merge parts by the logarithms of their sums"),
    "normaliser": Mistake("the sum that divides is missing, or has more terms than the keys that are seen, or fewer: a "
        "sink, an eps, hidden keys, other heads, rotated features",
        "divide by the sum over the keys that are seen: of exponentials, or of φ(q)ᵀφ(k), not rotated"),
    # The whole.
    "axes": Mistake("arrays are (b, h, n, d), and are read as (b, n, h, d)",
        "transpose each argument and the result, x.swapaxes(1, 2): in the function, or in a lambda around it"),
    "heads": Mistake("key heads 0 1 0 1 instead of 0 0 1 1, one head read for all, or a reshape without a transpose",
        "repeat each key head h/g times in a row: repeat_interleave, not repeat or tile"),
    "batch": Mistake("batch and heads folded in the wrong order, or one row, or one state, read for all",
        "keep the batch axis first"),
    "values": Mistake("values are rounded, clipped or otherwise changed, rotated, of another token or argument, or "
        "have their features in another order", "multiply the weights with the values as they are given, o = Σ w·v"),
    "output": Mistake("it is written elsewhere, not written, multiplied, clipped, or something is added to it",
        "return (b, h, n, d), transposed once, and nothing else"),
    # Some calls.
    "strides": Mistake("memory is read as if it were contiguous", "honour the strides, or copy first"),
    "leak": Mistake("rows are multiplied into each other, and 0·NaN is NaN", "compute each row by itself"),
    "state": Mistake("a mask, a table, a state or a buffer is kept from an earlier call; or numbers are random, as by "
        "dropout that is left on, or are read before they are written",
        "begin each call anew, or compare the key; model.eval(), dropout_p=0.0; write all of the result"),
    "some calls": Mistake("these calls take a path of their own: a tile, a grid or a branch for their sizes or numbers",
        "look at the code that runs for what they have in common, beside the general path"),
    "dropout": Mistake("dropout is left on outside of training", "model.eval(), dropout_p=0.0"),
    "grade": Mistake("a step rounds in a narrower dtype than was asked for", "keep it in float32, and round once"),
}  # fmt: skip

BACKWARD: dict[str, Mistake] = {  # of attention: by what is wrong with the chain rule, or with what is returned
    "chain rule": Mistake("a term, a factor, a derivative or a transpose of the backward pass is missing or wrong",
        "dv = wᵀ·g, ds = w∘(g·vᵀ − D) with D = Σ g∘o, times 1 − (s/c)² for capped scores s, dq = scale·Rᵀ(ds·k̃), dk = "
        "scale·Rᵀ(dsᵀ·q̃), where Rᵀ has −sin for sin; in linear attention, φ′, and −Σ g∘o/D of the denominator, too"),
    "shared key heads": Mistake("the gradient of one query head, or the mean of several, taken for that of the key "
        "head that they share", "sum over the query heads that read a key head: h/g in a row"),
    "chain rule: pairs missing": Mistake("dq is written by each block of keys, or dk and dv by each block of queries, "
        "not added to; or a mask of the backward pass is another one", "begin with zeros, and add; use one mask"),
    "gradients": Mistake("another sign, a factor that is left out or there twice, a smaller dtype, or another order of "
        "the results", "return dq, dk, dv, each in the dtype of its input, with every factor once"),
    "gradients: zero": Mistake("this input is cut off: detached, a constant to the backward pass, or its gradient is "
        "not computed", "compute it: dq = scale·ds·k, dk = scale·dsᵀ·q, dv = wᵀ·g, and return all three",
        "huggingface/candle#3568, Blaizzy/mlx-vlm#1475"),
    "gradients: not finite": Mistake("exp of a score that overflows, 0·∞ where keys are hidden, or a division by the "
        "sum of a row that sees nothing",
        "subtract the maximum of a row before exp, and give hidden keys a weight of 0"),
}  # fmt: skip

SHARDING: dict[str, Mistake] = {
    "positions local to the rank": Mistake("every rank counts its own tokens, so that all ranks but the first rotate "
        "by wrong positions",
        "add the position of the rank's first token, or cut the shard out of positions made for the whole sequence"),
    "first chunk repeated": Mistake("a rank with two chunks uses the positions of its first for both",
        "make the positions of each chunk from that chunk's own place in the sequence", "NVIDIA/Megatron-LM#5243"),
    "rank ignored": Mistake("every rank holds the same positions", "let the rank say where its positions begin"),
    "positions beyond the sequence": Mistake("the length is rounded up to a multiple of the ranks, and padding gets "
        "positions of its own; or positions, or ranks, are counted from 1",
        "drop positions from n on, and mask the padding; count positions and ranks from 0, as MPI counts ranks"),
    "positions held twice": Mistake("the end of a chunk is taken as included where the next begins with it; or padding "
        "repeats the last position", "let chunk i of c begin at n·i//c and end before n·(i + 1)//c, and mask padding"),
    "positions lost": Mistake("n//size tokens are given to each rank, and the n % size tokens at the end to none; or "
        "the end of a chunk is excluded twice",
        "let shards differ by a token, as n·rank//size … n·(rank + 1)//size do, or refuse such lengths"),
}  # fmt: skip

TRACES: dict[str, Mistake] = {
    "other pairs": Mistake("the two sides pair features differently", "use one layout, or permute_weights on one side"),
    "turned backwards": Mistake("one side has the sign of sin reversed", "negate sin on one side"),
    "other positions": Mistake("positions start elsewhere, or a cache counts them differently", "compare positions"),
    "other frequencies": Mistake("another base or rescaling of Θ", "compare rope_theta and rope_scaling"),
    "scaled": Mistake("a factor on one side only: √e of embeddings, the attention factor of a rotation, 1/√d of "
        "scores; or another norm", "compare how this name is computed"),
    "bias added": Mistake("a bias on one side only", "look for biases in the checkpoint"),
    "permuted features": Mistake("weights are stored for another layout", "permute_weights on one side"),
    "permuted rows": Mistake("tokens are in another order, or shifted", "compare the tokens"),
    "permuted heads": Mistake("heads are stored or grouped differently", "let query head i read key head i·g//h"),
    "other shape": Mistake("other tokens, heads or widths, or axes in another order",
        "compare the configs, and write (b, h, n, d) on both sides"),
    "NaN in one trace": Mistake("an overflow, or a row of a mask that hides everything",
        "look at the scores before it"),
    "masked otherwise": Mistake("masks differ: causal, window or padding", "compare positions and the window"),
    "grown noise": Mistake("rounding, which grows from layer to layer", "compare in a wider dtype"),
    "missing names": Mistake("the second trace ends early, or has other names", "write all names"),
    "other numbers": Mistake("no usual mistake gives this difference: other weights, biases, norms, masks, or another "
        "activation", "compare how this name is computed; of a rotation, run check_rotation on it"),
}  # fmt: skip

MISTAKES = {**ROTATION, **CALLS, **ATTENTION, **BACKWARD, **SHARDING, **TRACES}

_WRAP = "wrap it by pyrope.oracle.adapters"
_AXES = (
    f'if it takes its axes in another order, or more of them, {_WRAP}.with_axes, or say --axes, such as "bhnd"; a '
    "rotation gets positions (n,), attention (b, n)"
)
_CALLED = (
    "a rotation is called as fn(x, positions), attention as fn(q, k, v), or with RoPE as fn(q, k, v, positions), "
    "and its backward pass with g after v"
)
# Of a candidate that cannot be judged: what the words of its own exception suggest, a pattern, the first that fits.
FIXES = {
    "raised": (
        ("argument: '(mask|segments)'", "give it a default, mask=None or segments=None: most calls have none"),
        ("(positional|keyword) argument", f"{_CALLED}; if its arguments are others, wrap it in a lambda with these"),
        ("numpy.ndarray", f"if it takes other arrays, {_WRAP}, such as from_torch, or say --framework torch"),
        ("out of (bounds|range)", "if its table is meant to be short, give max_position= (--max-position); if not, let "
         "it grow"),
        ("CUDA|NVIDIA", "run it where its device is, or hand over a version for the CPU"),
        ("Unable to allocate", "give it what it takes: with these shapes, it asks for more memory than there is"),
        ("took longer", "let the program end, or give it more time: --timeout, or timeout= of from_command"),
        ("it printed", "run the program by itself on .npy files: docs/check.md says what it must do"),
        ("broadcast|values to unpack|shape", _AXES),
        ("", "fix the exception, whose last frames are below, or wrap the function so that it takes these arrays"),
    ),
    "reshaped": (("", "work on a view, x.reshape(…) or x.view(…), and leave the shape and dtype of x alone"),),
    "gradients": (("", "return three gradients, (dq, dk, dv)"),),
    "type": (("", "return one NumPy array of the shape of the input. If the function returns a tuple, wrap it in a "
             "lambda that selects the result; if it works in place, return x; if its array is one of torch, "
             "JAX or another library, say framework= (--framework)"),),
    "shape": (("", _AXES),),
    "dtype": (("", "return floats, of the dtype of the input"),),
}  # fmt: skip
