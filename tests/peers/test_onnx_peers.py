"""The node tests of ONNX's RotaryEmbedding, opset 23, all eight of them, through `pyrope.rotate`.

ONNX gives tables of cos and sin instead of a base, and they are random numbers there, no cosines at all. So they go
where `pyrope.rotation_tables` puts its own: into a `Tables`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs ONNX")

import onnx.backend.test.case.node.rotaryembedding  # noqa: E402, F401  # collects its cases when it is imported
from onnx.backend.test.case import node as cases  # noqa: E402
from onnx.helper import get_attribute_value  # noqa: E402

import pyrope  # noqa: E402
from pyrope import Rope, Tables  # noqa: E402

CASES = {
    case.name: case
    for case in cases._NodeTestCases  # the same nodes written out in other operators are left out
    if [node.op_type for node in case.model.graph.node] == ["RotaryEmbedding"]
}


def rotary_embedding(x: Any, cos: Any, sin: Any, position_ids: Any = None, **attributes: int) -> Any:
    """ONNX's operator by `pyrope.rotate`: x (b, h, n, d), or (b, n, h·d) if num_heads is told."""
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
    attributes = [{a.name for a in case.model.graph.node[0].attribute} for case in CASES.values()]
    assert sum("interleaved" in told for told in attributes) == 3
    assert sum("rotary_embedding_dim" in told for told in attributes) == 3
    assert sum("num_heads" in told for told in attributes) == 1
    assert sum(len(case.data_sets[0][0]) == 3 for case in CASES.values()) == 3  # no positions
    assert all(len(case.data_sets) == 1 for case in CASES.values())
    assert {case.model.opset_import[0].version for case in CASES.values()} == {23}


@pytest.mark.parametrize("name", CASES)
def test_node(name: str) -> None:
    """The expected output, to float32: two roundings of products and one of a sum on either side, all numbers ≤ 1."""
    case = CASES[name]
    attributes = {a.name: get_attribute_value(a) for a in case.model.graph.node[0].attribute}
    (inputs, (expected,)) = case.data_sets[0]
    result = rotary_embedding(*inputs, **attributes)
    assert result.dtype == expected.dtype == np.float32
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=0, atol=8 * 2.0**-24)
    assert np.abs(expected - inputs[0]).max() > 0.1
