"""The rotary embeddings of Hugging Face transformers: how each class is found, made and called.

Families differ in the form of their tables (doubled, repeated, complex, one for each type of layer), in the order of
axes and in the names of their functions; which of these a family has is tried out.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pyrope import Rope

# The order of axes that a function wants, from (b, h, n, d), and the way back.
ORDERS: tuple[tuple[Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    (lambda x: x, lambda y: y),
    (lambda x: x.transpose(1, 2), lambda y: y.transpose(1, 2)),
    (lambda x: x[0].transpose(0, 1), lambda y: y.transpose(0, 1)[None]),
)


def module_of(model_type: str) -> Any:
    return importlib.import_module(CONFIG_MAPPING[model_type].__module__.replace("configuration_", "modeling_"))


def class_of(model_type: str, ending: str = "RotaryEmbedding") -> type:
    """The one class of a model's text part whose name ends so, e.g. LlamaRotaryEmbedding."""
    module = module_of(model_type)
    own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
    classes = [c for c in own if c.__name__.endswith(ending) and not any(w in c.__name__ for w in ("Vision", "Audio"))]
    assert len(classes) == 1, classes
    return classes[0]


def their_config(model_type: str, config: dict[str, Any]) -> Any:
    """What transformers makes of a config.json: the part of it that says how text is rotated."""
    return CONFIG_MAPPING[model_type](**copy.deepcopy(config)).get_text_config()


def their_theta(model_type: str, config: dict[str, Any]) -> dict[str | None, Any]:
    """Θ as transformers computes it of a config.json, by layer type; None where all layers have the same."""
    buffers = dict(class_of(model_type)(their_config(model_type, config)).named_buffers())
    kinds = {
        name: name.removesuffix("inv_freq").removesuffix("_") or None for name in buffers if "original" not in name
    }
    return {kind: buffers[name].numpy() for name, kind in kinds.items() if name.endswith("inv_freq")}


def their_function(module: Any, config: Any) -> Any:
    """The function of a module that turns queries and keys."""
    names = ["apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb", "apply_rotary_emb"]
    if getattr(config, "rope_interleave", None) is False:
        names.remove("apply_rotary_pos_emb_interleave")
    if "axial" in str(getattr(config, "rope_parameters", None)):
        names = ["apply_rotary_pos_emb_vision", "apply_rotary_pos_emb_2d", "apply_rotary_pos_emb"]
    return next(getattr(module, name) for name in names if hasattr(module, name))


def their_tables(embedding: Any, config: Any, at: Any, kind: str | None, rope: Rope, x: Any) -> tuple[Any, ...]:
    """The tables of positions (n,) or (axes, n), in the form in which a class makes them, for the dtype of x."""
    layer = (kind,) if kind else ()
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


def their_rope(module: Any, embedding: Any, config: Any, kind: str | None, rope: Rope) -> Callable[..., Any]:
    """fn(x (b, h, n, d), positions) as a family turns the features that turn; the others are left as they are."""
    start, end = rope.start, rope.start + rope.width
    count = () if rope.axes is None else (rope.axes.count,)
    probe = torch.zeros(1, 2, 5, rope.width)
    tables = their_tables(embedding, config, torch.zeros((*count, 5), dtype=torch.int64), kind, rope, probe)
    turn = way_of(their_function(module, config), probe, tables)

    def fn(x: Any, at: Any) -> Any:
        part = x[..., start:end]
        y = turn(part, their_tables(embedding, config, at, kind, rope, part))
        return torch.cat((x[..., :start], y, x[..., end:]), -1)

    return fn
