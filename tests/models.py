"""Real models that installed packages ship, and small ones made here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.utils
from onnx import helper, numpy_helper

from benchmarks.packaged_model import MODEL_NAMES, packaged_model, packaged_shapes

__all__ = [
    "MODEL_NAMES",
    "beginning_of_classifier",
    "conv_model",
    "matmul_model",
    "packaged_model",
    "packaged_shapes",
    "save_with_external_data",
]


def matmul_model(*, opset: int = 13, rows: int | str = "N", seed: int = 0) -> onnx.ModelProto:
    """y = x @ w for x (rows, 64) and seeded w (64, 8), float32: the smallest model with a weight."""
    weight = np.random.default_rng(seed).standard_normal((64, 8)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "matmul",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [rows, 64])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [rows, 8])],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def conv_model(seed: int = 0, size: int = 28) -> onnx.ModelProto:
    """Two convs with bias and relu on x (1, 8, size, size), float32: two tuning tasks, seconds to tune."""
    random = np.random.default_rng(seed)
    w0 = (random.standard_normal((16, 8, 3, 3)) / 8).astype(np.float32)
    w1 = (random.standard_normal((8, 16, 1, 1)) / 4).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w0", "b0"], ["c0"], name="conv0", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c0"], ["r0"], name="relu0"),
        helper.make_node("Conv", ["r0", "w1", "b1"], ["c1"], name="conv1"),
        helper.make_node("Relu", ["c1"], ["y"], name="relu1"),
    ]
    weights = {"w0": w0, "b0": w0[:, 0, 0, 0], "w1": w1, "b1": w1[:, 0, 0, 0]}
    shape = [1, 8, size, size]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "convs", [value("x", onnx.TensorProto.FLOAT, shape)], [value("y", onnx.TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def beginning_of_classifier(path: Path) -> Path:
    """PP-OCR's classifier up to its second sum of two branches, written to ``path``.

    Convs of all kinds and a gate; the whole has twice as many tasks, which differ in their shapes.
    """
    model = onnx.shape_inference.infer_shapes(onnx.load(packaged_model("classifier")))
    path.parent.mkdir(parents=True, exist_ok=True)
    inputs = [value.name for value in model.graph.input]
    onnx.save(onnx.utils.Extractor(model).extract_model(inputs, ["elementwise_add_1"]), path)
    return path


def save_with_external_data(model: onnx.ModelProto, path: Path, location: str = "weights.bin") -> Path:
    """Write ``model`` to ``path``, every weight in ``location`` beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / location).parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path, save_as_external_data=True, location=location, size_threshold=0)
    return path
