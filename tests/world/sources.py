"""Parts of packages that cannot be imported whole: their own imports need a GPU, or what is not installed."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import math
import pathlib
import sys
import types
from typing import Any

import ggml
import numpy as np
import pytest

from pyrope import Rope, cos_sin


def taken(module: str, *names: str, **given: Any) -> Any:
    """Functions and classes of a file, without the imports of its package."""
    import torch

    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(package)
    tree = ast.parse(pathlib.Path(spec.submodule_search_locations[0], *rest).with_suffix(".py").read_text("utf-8"))
    wanted = [node for node in ast.walk(tree) if getattr(node, "name", None) in names]
    tree.body = ast.parse("from __future__ import annotations").body + wanted
    space = {"torch": torch, "nn": torch.nn, "math": math, **given}
    exec(compile(tree, module, "exec"), space)
    return [space[name] for name in names]


def alone(name: str) -> Any:
    """A module without its packages' own imports: those of timm and torchtune need torchvision and torchao, whose
    compiled parts do not load beside a torch for the CPU, and those of EasyDeL a dozen other packages."""
    packages = list(itertools.accumulate(name.split(".")[:-1], "{}.{}".format))
    try:
        for package in packages:
            spec = importlib.util.find_spec(package)
            if spec is None:
                raise ModuleNotFoundError(package)
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = list(spec.submodule_search_locations or ())
        return importlib.import_module(name)
    finally:
        for package in packages:
            sys.modules.pop(package, None)


def onnx_session(node: Any, inputs: dict[str, tuple[Any, Any]], outputs: list[str]) -> Any:
    """What runs one node of onnxruntime's own; inputs by name: NumPy dtype and shape."""
    import onnx
    import onnxruntime
    from onnx.helper import make_graph, make_model, make_opsetid, make_tensor_value_info

    kinds = {name: onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) for name, (dtype, _) in inputs.items()}
    given = [make_tensor_value_info(name, kinds[name], shape) for name, (_, shape) in inputs.items()]
    results = [make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs]
    opsets = [make_opsetid("", 20), make_opsetid("com.microsoft", 1)]
    model = make_model(make_graph([node], "graph", given, results), opset_imports=opsets, ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def tables(rope: Rope, at: Any) -> Any:
    """cos and sin as torch's tensors of float32."""
    import torch

    return [torch.tensor(table, dtype=torch.float32) for table in cos_sin(np.asarray(at), rope)]


def need_ggml() -> None:
    if not ggml.library("cpu").exists():
        pytest.skip("ggml is not built here: python tests/world/ggml.py builds it, or says why not")
