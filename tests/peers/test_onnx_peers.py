"""The node tests of ONNX's RotaryEmbedding, opset 23, all eight of them, through `pyrope.rotate`.

ONNX gives tables of cos and sin instead of a base, and they are random numbers there, no cosines at all. So they go
where `pyrope.rotation_tables` puts its own: into a `Tables`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs ONNX")

from onnx.backend.test.case import node as shared  # noqa: E402
from onnx.defs import get_schema  # noqa: E402
from onnx.helper import get_attribute_value  # noqa: E402

import pyrope  # noqa: E402
from pyrope import Rope  # noqa: E402
from pyrope.rotation import Tables  # noqa: E402

_COLLECTED = [*shared._NodeTestCases]
from onnx.backend.test.case.node import rotaryembedding  # noqa: E402, I001

shared._NodeTestCases[:] = _COLLECTED  # whoever imports a module of cases adds them to a list that others read


def collect() -> dict[str, tuple[Any, Any, Any]]:
    """Node, inputs and outputs of every case by its name, from the functions that make them."""
    cases: dict[str, tuple[Any, Any, Any]] = {}

    def keep(node: Any, inputs: Any, outputs: Any, name: str, **_: Any) -> None:
        cases[name] = node, inputs, outputs

    np.random.seed(0)  # their inputs are random
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotaryembedding, "expect", keep)
        for name, function in vars(rotaryembedding.RotaryEmbedding).items():
            if name.startswith("export"):
                function()
    return cases


CASES = collect()


def rotary_embedding(x: Any, cos: Any, sin: Any, position_ids: Any = None, **attributes: int) -> Any:
    """ONNX's operator by `pyrope.rotate`: x (b, h, n, d), or (b, n, h·d) if num_heads is given."""
    shape, heads = x.shape, attributes.get("num_heads", 0)
    if x.ndim == 3:
        x = x.reshape(*shape[:2], heads, -1).swapaxes(1, 2)
    if position_ids is None:  # then the tables are those of the tokens already, (b, n, p)
        position_ids = np.broadcast_to(np.arange(x.shape[2]), (x.shape[0], x.shape[2]))
    else:
        cos, sin = cos[position_ids], sin[position_ids]
    layout = "interleaved" if attributes.get("interleaved", 0) else "half"
    rope = Rope(x.shape[-1], 10000.0, layout, attributes.get("rotary_embedding_dim", 0) or None)
    assert cos.shape == sin.shape == (*position_ids.shape, rope.pairs)
    if layout == "half":
        tables = Tables(rope, position_ids, np.concatenate((cos, cos), -1), np.concatenate((-sin, sin), -1))
    else:
        tables = Tables(rope, position_ids, cos + 1j * sin, None)
    out = pyrope.rotate(x, position_ids, rope, tables=tables)
    return out if len(shape) == 4 else out.swapaxes(1, 2).reshape(shape)


def test_all_cases_are_here() -> None:
    """None is dropped: eight cases, with and without each attribute and positions, in both shapes."""
    assert len(CASES) == 8
    assert {node.op_type for node, _, _ in CASES.values()} == {"RotaryEmbedding"}
    assert get_schema("RotaryEmbedding").since_version == 23
    attributes = [{a.name for a in node.attribute} for node, _, _ in CASES.values()]
    assert sum("interleaved" in names for names in attributes) == 3
    assert sum("rotary_embedding_dim" in names for names in attributes) == 3
    assert sum("num_heads" in names for names in attributes) == 1
    assert sum(len(inputs) == 3 for _, inputs, _ in CASES.values()) == 3  # no positions


@pytest.mark.parametrize("name", CASES)
def test_node(name: str) -> None:
    """The expected output, to float32: two roundings of products and one of a sum on either side, all numbers ≤ 1."""
    node, inputs, (expected,) = CASES[name]
    result = rotary_embedding(*inputs, **{a.name: get_attribute_value(a) for a in node.attribute})
    assert result.dtype == expected.dtype == np.float32
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=0, atol=8 * 2.0**-24)
    assert np.abs(expected - inputs[0]).max() > 0.1
