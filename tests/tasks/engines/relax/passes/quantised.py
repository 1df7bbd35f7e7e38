"""A quantised model of which every number is exact in float32: its scales are powers of two, its sums are small."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Arrays = dict[str, np.ndarray[Any, Any]]


class _Graph:
    """Nodes and constants, written in the way of onnxruntime's quantisation tool."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: Arrays = {}

    def node(self, operator: str, inputs: list[str], name: str, **attributes: Any) -> str:
        """Adds a node; its output is called ``name``."""
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def constant(self, name: str, array: Any) -> str:
        self.constants[name] = np.ascontiguousarray(array)
        return name

    def pair(self, x: str, scale: float, zero: int, dtype: str) -> str:
        """``x`` through a quantize and a dequantize."""
        inputs = [self.constant(f"{x}_s", np.float32(scale)), self.constant(f"{x}_z", np.array(zero, dtype))]
        return self.node("DequantizeLinear", [self.node("QuantizeLinear", [x, *inputs], f"{x}_q"), *inputs], f"{x}_d")

    def weights(self, name: str, values: Any, scales: Any, axis: int) -> str:
        """``values``, integers, with a scale for each index along ``axis``."""
        zeros = np.zeros(len(scales), values.dtype)
        inputs = [
            self.constant(name, values),
            self.constant(f"{name}_s", np.asarray(scales, np.float32)),
            self.constant(f"{name}_z", zeros),
        ]
        return self.node("DequantizeLinear", inputs, f"{name}_d", axis=axis)


def exact(dtype: str, zero: int) -> onnx.ModelProto:
    """x (1, 3, 16, 16) through a padded conv, a maximum, a depthwise, a grouped and a 1x1 conv, a gate and a matmul.

    Activations are ``dtype`` with the zero point ``zero``, weights int8 with a scale a channel. The result
    is float32.
    """
    random, graph = np.random.default_rng(3), _Graph()

    def conv(x: str, name: str, shape: tuple[int, ...], scale: float, **attributes: Any) -> str:
        values = random.integers(-127, 128, shape).astype(np.int8)
        scales = 2.0 ** -random.integers(7, 10, shape[0])
        bias = random.integers(-2000, 2000, shape[0]).astype(np.int32)
        inputs = [x, graph.weights(f"{name}_w", values, scales, 0), graph.weights(f"{name}_b", bias, scales / 64, 0)]
        return graph.pair(graph.node("Conv", inputs, name, **attributes), scale, zero, dtype)

    x = graph.pair("x", 1 / 64, zero, dtype)
    x = conv(x, "padded", (16, 3, 3, 3), 1 / 64, pads=[1, 1, 1, 1])
    x = graph.pair(graph.node("MaxPool", [x], "pool", kernel_shape=[2, 2], strides=[2, 2]), 1 / 64, zero, dtype)
    x = conv(x, "depthwise", (16, 1, 3, 3), 1 / 64, group=16, pads=[1, 1, 1, 1])
    x = conv(x, "grouped", (16, 8, 1, 1), 1 / 64, group=2)
    x = conv(x, "pointwise", (24, 16, 1, 1), 1 / 64)
    gate = graph.pair(graph.node("GlobalAveragePool", [x], "mean"), 1 / 256, zero, dtype)
    x = graph.pair(graph.node("Mul", [x, gate], "gated"), 1 / 64, zero, dtype)
    x = graph.pair(graph.node("Flatten", [x], "flat"), 1 / 64, zero, dtype)
    values = random.integers(-127, 128, (24 * 64, 80)).astype(np.int8)
    product = graph.node("MatMul", [x, graph.weights("m", values, np.full(80, 1 / 512), 1)], "product")
    graph.node("Identity", [graph.pair(product, 1 / 16, zero, dtype)], "y")
    value = helper.make_tensor_value_info
    made = helper.make_graph(
        graph.nodes, "exact", [value("x", TensorProto.FLOAT, (1, 3, 16, 16))], [value("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in graph.constants.items()],
    )  # fmt: skip
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)
