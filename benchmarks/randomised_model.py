"""The light ONNX models with weights that are not all 0.02: seeded, of the size that training gives.

A model whose weights are one constant computes the same number everywhere, so that no wrong kernel shows,
and may be folded away. A softmax at the end goes: of random logits it leaves one 1 and zeros, whatever
the other logits are.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import numpy_helper

#: Inputs of BatchNormalization that are near one: scale and variance.
_NEAR_ONE = (1, 4)
#: Operators whose inputs behind the first are weights.
_WEIGHTED = ("Conv", "Gemm", "MatMul")


def randomise(source: Path, path: Path, seed: int = 0) -> Path:
    """Write the model at ``source`` to ``path``: seeded numbers for every ConstantOfShape, no softmax at the end."""
    model = onnx.load(str(source))
    graph = model.graph
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    factors = _factors(graph)
    generator = np.random.default_rng(seed)
    rest = []
    for node in graph.node:
        if node.op_type == "ConstantOfShape" and node.input[0] in shapes:
            weight = _numbers(generator, tuple(int(n) for n in shapes[node.input[0]]), node.output[0] in factors)
            graph.initializer.append(numpy_helper.from_array(weight, node.output[0]))
        else:
            rest.append(node)
    used = {name for node in rest for name in node.input}
    weights = [tensor for tensor in graph.initializer if tensor.name in used]
    inputs = [value for value in graph.input if value.name in used]
    del graph.node[:], graph.initializer[:], graph.input[:]
    graph.node.extend(rest)
    graph.initializer.extend(weights)
    graph.input.extend(inputs)
    if rest[-1].op_type == "Softmax" and rest[-1].output[0] == graph.output[0].name:
        graph.output[0].name = rest[-1].input[0]
        del graph.node[-1]
    _tame(model, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(path))
    return path


def _tame(model: onnx.ModelProto, seed: int) -> None:
    """Scale the last weights by a power of two, so that outputs are about one.

    Residual sums double what passes through again and again: outputs of 200,000 whose least are near zero
    cannot be compared by any tolerance for numbers of a trained model's size.
    """
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    generator = np.random.default_rng(seed)
    inputs = {i.name: generator.uniform(-1, 1, i.shape).astype(np.float32) for i in session.get_inputs()}
    size = float(np.std(session.run(None, inputs)[0]))
    last = [node for node in model.graph.node if node.op_type in _WEIGHTED][-1]
    for tensor in model.graph.initializer:
        if tensor.name in last.input[1:]:
            scaled = numpy_helper.to_array(tensor) * np.float32(2.0 ** -round(math.log2(size)))
            tensor.CopyFrom(numpy_helper.from_array(scaled, tensor.name))


def _numbers(generator: np.random.Generator, shape: tuple[int, ...], factor: bool) -> npt.NDArray[np.float32]:
    """Weights that keep the size of what passes through; a factor or a variance is near one."""
    if factor:
        return generator.uniform(0.5, 1.5, shape).astype(np.float32)
    scale = np.sqrt(2.0 / np.prod(shape[1:])) if len(shape) > 1 else 0.1
    return (scale * generator.standard_normal(shape)).astype(np.float32)


def _factors(graph: onnx.GraphProto) -> set[str]:
    """The values that something is multiplied by or normalised with, however they are reshaped before."""
    found = {node.input[i] for node in graph.node if node.op_type == "BatchNormalization" for i in _NEAR_ONE}
    found |= {name for node in graph.node if node.op_type == "Mul" for name in node.input}
    found |= {node.input[0] for node in graph.node if node.op_type == "Unsqueeze" and node.output[0] in found}
    return found
