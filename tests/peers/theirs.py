"""The rotary embeddings of Hugging Face transformers: how each class is made and called, and how far float32 may be off.

Families differ in the form of their tables (doubled, repeated, complex, one for each type of layer), in the order of
axes and in the names of their functions; which of these a family has is tried out.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pyrope import Rope
from pyrope.oracle.tolerance import ANGLE32, SECOND_ORDER, U32, ExactTables, Expected, theta_errors

# The order of axes that a function wants, from (b, h, n, d), and the way back.
ORDERS: tuple[tuple[Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    (lambda x: x, lambda y: y),
    (lambda x: x.transpose(1, 2), lambda y: y.transpose(1, 2)),
    (lambda x: x[0].transpose(0, 1), lambda y: y.transpose(0, 1)[None]),
)


def theta_bound(rope: Rope) -> Any:
    """Relative error allowed to each float32 θ_i, (p,)."""
    return theta_errors(rope) * U32 * SECOND_ORDER


def float32_bound(x: Any, positions: Any, rope: Rope) -> Any:
    """Error allowed to each feature of x (…, n, d), rotated with tables of float32 angles."""
    expected = Expected(ExactTables(rope, positions), np.asarray(x, np.float64), np.atleast_2d(positions), "float32")
    return expected.allowed(ANGLE32)


def module_of(model_type: str) -> Any:
    return importlib.import_module(CONFIG_MAPPING[model_type].__module__.replace("configuration_", "modeling_"))


def class_of(model_type: str) -> type:
    """The one class of a model's text part that makes tables, e.g. LlamaRotaryEmbedding."""
    module = module_of(model_type)
    own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
    named = [cls for cls in own if cls.__name__.endswith("RotaryEmbedding")]
    (cls,) = (cls for cls in named if not any(part in cls.__name__ for part in ("Vision", "Audio")))
    return cls


def their_config(config: dict[str, Any]) -> Any:
    """What transformers makes of a config.json: the part of it that says how text is rotated."""
    given = {key: value for key, value in copy.deepcopy(config).items() if key != "model_type"}
    return CONFIG_MAPPING[config["model_type"]](**given).get_text_config()


def layer_types(embedding: Any) -> list[str | None]:
    """The types of layers that a class has tables for; None where all have the same."""
    buffers = [name for name, _ in embedding.named_buffers() if "original" not in name]
    return [name.removesuffix("inv_freq").removesuffix("_") or None for name in buffers if name.endswith("inv_freq")]


def their_function(module: Any, config: Any) -> Any:
    """The function of a module that turns queries and keys."""
    names = ["apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb", "apply_rotary_emb"]
    if getattr(config, "rope_interleave", None) is False:
        names.remove("apply_rotary_pos_emb_interleave")
    if "axial" in str(getattr(config, "rope_parameters", None)):
        names = ["apply_rotary_pos_emb_vision", "apply_rotary_pos_emb_2d", "apply_rotary_pos_emb"]
    return next(getattr(module, name) for name in names if hasattr(module, name))


def their_tables(embedding: Any, config: Any, at: Any, layer_type: str | None, rope: Rope, x: Any) -> tuple[Any, ...]:
    """The tables of positions (n,) or (axes, n), in the form in which a class makes them, for the dtype of x."""
    layer = (layer_type,) if layer_type else ()
    if rope.axes is None:
        tables = embedding(x, at[None], *layer)
    elif "axial" not in str(config.rope_parameters):
        tables = embedding(x, at[:, None], *layer)
    else:
        tables = embedding(x, at.T)
    return tables if isinstance(tables, tuple) else (tables,)


def way_of(function: Any, x: Any, tables: tuple[Any, ...]) -> Callable[..., Any]:
    """How a function is called that takes queries and keys, or one of them, with axes in one order or another; x
    (1, 2, 5, d), so that no two axes are alike."""
    for to, back in ORDERS:
        for call in (lambda f, x, t: f(x, x, *t)[0], lambda f, x, t: f(x, *t)):
            try:
                y = call(function, to(x), tables)
            except (RuntimeError, TypeError):
                continue
            if y.shape == to(x).shape:
                return lambda x, t, call=call, to=to, back=back: back(call(function, to(x), t))
    raise AssertionError(f"{function} takes its arguments in another way")


def their_rope(module: Any, embedding: Any, config: Any, layer_type: str | None, rope: Rope) -> Callable[..., Any]:
    """fn(x (b, h, n, d), positions) as a family turns the features that turn; the others are left as they are."""
    start, end = rope.start, rope.start + rope.width
    count = () if rope.axes is None else (rope.axes.count,)
    probe = torch.zeros(1, 2, 5, rope.width)
    tables = their_tables(embedding, config, torch.zeros((*count, 5), dtype=torch.int64), layer_type, rope, probe)
    turn = way_of(their_function(module, config), probe, tables)

    def fn(x: Any, at: Any) -> Any:
        part = x[..., start:end]
        y = turn(part, their_tables(embedding, config, at, layer_type, rope, part))
        return torch.cat((x[..., :start], y, x[..., end:]), -1)

    return fn
