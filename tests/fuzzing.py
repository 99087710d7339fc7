"""Silly arguments, damaged files, and what must hold whatever comes in."""

from __future__ import annotations

import copy
import json
import math
import os
import random

import numpy as np
from optional import Dtypes, package

ml_dtypes = package("ml_dtypes")

# How many times as many examples as in CI: PYROPE_FUZZ=100 pytest tests/test_fuzz.py
TIMES = int(os.environ.get("PYROPE_FUZZ", "1"))
FLOATS = list(Dtypes(float16="f2", bfloat16=ml_dtypes.bfloat16, float32="f4", float64="f8").values())
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


def silly_values():
    """Values that no argument, or hardly any, means. Made anew each time, since some can be changed."""
    numbers = [None, True, 0, -1, 1, 2, 3, 2**16 + 1, 2**31 + 1, 2**63, 10**30, -(10**400), 0.0, -0.5, 1.5, 1e-320]
    numbers += [1e-46, 1e39, 1e308, math.nan, math.inf, -math.inf, 1j, np.int8(100), np.uint8(7), np.float16(2)]
    words = [
        "",
        "half",
        "nonsense",
        "\0",
        "θ" * 50,
        b"bytes",
        (),
        [],
        [1, 2, 3],
        [None],
        [[0, 1], [2]],
        {},
        {"a": 1},
        set(),
    ]
    kinds = [(3,), (0,), (), (1, 4), (2, 3, 4), (2, 0, 4), (1, 1, 1, 1, 1), (2, 3, 8)]
    types = ["?", "i1", "u8", "i8", "f2", "f4", "f8", "c8", "U3", "O", ">f4", "M8[s]"]
    arrays = [np.zeros(kinds[i % 8], t) for i, t in enumerate(types)]
    arrays += [np.full((2, 3, 4), x, "f4") for x in (np.nan, np.inf, 3e38, 1e-45)]
    arrays += [
        np.ma.masked_array([1.0]),
        np.broadcast_to(np.float32(1), (3, 4)),
        np.arange(12.0).reshape(2, 3, 2)[..., ::-1],
    ]
    return [*numbers, *words, *arrays, object(), len, range(3), range(10**12), Exception, np.float32, iter(())]


class Draw(random.Random):
    """Draws from a seed, so that every example can be had again by its number."""

    def silly(self):
        return self.choice(silly_values())

    def some(self, *choices):
        return self.choice(choices)

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


# --- Files ----------------------------------------------------------------------------------------------------------


def damaged(draw: Draw, content: bytes) -> bytes:
    """Bytes that are flipped, cut off, doubled, moved, or replaced by numbers of eight bytes."""
    for _ in range(draw.randint(1, 3)):
        at, other = (int(draw.random() ** draw.choice([1, 3]) * len(content)) for _ in range(2))
        low, high = min(at, other), min(max(at, other), min(at, other) + draw.choice([1, 8, 100, 10**9]))
        number = draw.choice([0, 1, 31, 2**31, 2**32, 2**40, 2**63, 2**64 - 1]).to_bytes(8, "little")
        content = draw.choice([
            content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :],
            content[:at] + bytes([draw.randrange(32, 127)]) + content[at + 1 :],
            content[:at],
            content[:low] + content[high:],
            content[:high] + content[low:],
            content[:at] + number + content[at + 8 :],
            content[:at] + number + content[at:],
            content + bytes(draw.randrange(1, 9)),
        ])  # fmt: skip
    return content


def damaged_json(draw: Draw, value):
    """A JSON value with some parts of it replaced, left out, doubled or renamed; as text, which may have a key twice."""
    value = copy.deepcopy(value)
    for _ in range(draw.randint(1, 2)):
        holder, place = _place(draw, value)
        kind = draw.random()
        if kind < 0.6:
            holder[place] = _silly_json(draw, holder[place])
        elif kind < 0.8:
            del holder[place]
        elif isinstance(holder, dict):
            holder[draw.choice(["", "a", "../../outside/evil", "rope_scaling", place + "x"])] = holder[place]
        else:
            holder.append(holder[place])
        if not value:
            break
    text = json.dumps(value)
    if draw.random() < 0.05 and isinstance(value, dict) and value:
        name = json.dumps(draw.choice(list(value)))
        text = f"{{{name}: 1, " + text[1:]
    return text.encode()


def _silly_json(draw: Draw, old):
    numbers = [0, -1, 1, 2, 3, 63, 65537, 2 * 10**9, 2**63, 10**400, 1.5, 1e-300, 1e39, 1e308, math.nan, math.inf]
    others = [
        None,
        True,
        False,
        "",
        "x",
        "../../outside/evil",
        "\ud800",
        "1",
        [],
        {},
        [[]],
        [None],
        {"a": {}},
        ["x"] * 3,
    ]
    near = [old, [old], {"a": old}]
    if isinstance(old, int) and abs(old) < 2**60:
        near = [old * 2, -old, old + 1, float(old)]
    return draw.choice([draw.choice(numbers), draw.choice(others), draw.choice(near)])


def _place(draw: Draw, value):
    """A random place in a JSON value, as (what holds it, key or index)."""
    places, todo = [], [value]
    while todo:
        holder = todo.pop()
        for place in list(holder) if isinstance(holder, dict) else range(len(holder)):
            places.append((holder, place))
            if isinstance(holder[place], dict | list):
                todo.append(holder[place])
    return draw.choice(places[: max(1, len(places) // 10)] + places)  # those near the top twice
