"""What rounding does to the outputs of a statically quantised (QDQ) model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from tasks.model_source import read_model

#: What changes no difference between two tensors, or makes it smaller.
_NO_LARGER = {
    "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Relu", "Clip", "Softmax", "Sigmoid",
    "Tanh", "Slice", "Split", "ReduceMean", "GlobalAveragePool", "AveragePool", "MaxPool",
}  # fmt: skip


def output_steps(path: Path) -> Mapping[str, float]:
    """The size of one quantisation step of each output that is a dequantised tensor; empty for a float model.

    A number next to a half is rounded up by one runtime and down by another, and each such step moves what is
    computed from it. Raises ModelError.
    """
    graph = read_model(path).graph
    if not is_quantised(graph):
        return {}
    made_by = {name: node for node in graph.node for name in node.output}
    numbers = {tensor.name: tensor for tensor in graph.initializer}
    steps = {}
    for output in graph.output:
        node = made_by.get(output.name)
        while node is not None and node.op_type in _NO_LARGER:
            node = made_by.get(node.input[0])
        if node is not None and node.op_type == "DequantizeLinear" and node.input[1] in numbers:
            steps[output.name] = float(np.max(numpy_helper.to_array(numbers[node.input[1]])))
    return steps


def is_quantised(graph: onnx.GraphProto) -> bool:
    """Are there tensors that are quantised while the model runs?"""
    return any(node.op_type == "QuantizeLinear" for node in graph.node)
