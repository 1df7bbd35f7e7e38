"""Small ONNX models, each with what one pass is about. Seeded; weights are such that every term is seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Arrays = dict[str, np.ndarray[Any, Any]]


def _model(nodes: list[Any], shape: tuple[int, ...], constants: Arrays) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    weights = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    outputs = [value("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "small", [value("x", TensorProto.FLOAT, shape)], outputs, weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return onnx.shape_inference.infer_shapes(made)


def _random(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).uniform(0.2, 1.0, shape).astype(np.float32)


def _number(value: float) -> np.ndarray[Any, Any]:
    return np.array(value, np.float32)


def clips() -> onnx.ModelProto:
    """A clip whose bounds are inputs, as exporters of opset 11 and later write it."""
    node = helper.make_node("Clip", ["x", "low", "high"], ["y"])
    return _model([node], (2, 8), {"low": _number(-0.5), "high": _number(0.5)})


def arithmetic() -> onnx.ModelProto:
    """(x / 6 - 2) squared."""
    nodes = [
        helper.make_node("Div", ["x", "six"], ["a"]),
        helper.make_node("Sub", ["a", "two"], ["b"]),
        helper.make_node("Pow", ["b", "two"], ["y"]),
    ]
    return _model(nodes, (2, 8), {"six": _number(6), "two": _number(2)})


def sums() -> onnx.ModelProto:
    """A Sum of three."""
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Sum", ["x", "r", "x"], ["y"])]
    return _model(nodes, (2, 8), {})


def chain() -> onnx.ModelProto:
    """A scale, a shift, a scale and a shift, a number and one a channel; half of it is used elsewhere too."""
    nodes = [
        helper.make_node("Add", ["x", "a"], ["1"]),
        helper.make_node("Mul", ["1", "b"], ["2"]),
        helper.make_node("Add", ["2", "c"], ["3"]),
        helper.make_node("Mul", ["d", "3"], ["4"]),
        helper.make_node("Relu", ["4"], ["5"]),
        helper.make_node("Add", ["4", "5"], ["y"]),
    ]
    constants = {"a": _random(1, 4, 1, 1), "b": _number(3), "c": _random(1, 4, 1, 1), "d": _random(1, 4, 1, 1)}
    return _model(nodes, (1, 4, 3, 3), constants)


def scale_after(groups: int = 1) -> onnx.ModelProto:
    """conv, bias, a scale a channel, a shift."""
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["1"], pads=[1, 1, 1, 1], group=groups),
        helper.make_node("Mul", ["1", "s"], ["2"]),
        helper.make_node("Add", ["2", "t"], ["y"]),
    ]
    constants = {"w": _random(8, 4 // groups, 3, 3), "b": _random(8), "s": _random(1, 8, 1, 1), "t": _number(0.3)}
    return _model(nodes, (1, 4, 5, 5), constants)


def scale_before(groups: int = 1, padding: int = 0) -> onnx.ModelProto:
    """A scale and a shift a channel, then a conv; a padded zero is not shifted."""
    nodes = [
        helper.make_node("Mul", ["x", "s"], ["1"]),
        helper.make_node("Add", ["1", "t"], ["2"]),
        helper.make_node("Conv", ["2", "w"], ["y"], pads=[padding] * 4, group=groups),
    ]
    constants = {"w": _random(8, 4 // groups, 3, 3), "s": _random(1, 4, 1, 1), "t": _random(1, 4, 1, 1)}
    return _model(nodes, (1, 4, 5, 5), constants)


def matmul_between() -> onnx.ModelProto:
    """A matmul with a scale and a shift on both sides."""
    nodes = [
        helper.make_node("Mul", ["x", "s"], ["1"]),
        helper.make_node("Add", ["1", "t"], ["2"]),
        helper.make_node("MatMul", ["2", "w"], ["3"]),
        helper.make_node("Mul", ["3", "u"], ["4"]),
        helper.make_node("Add", ["4", "v"], ["y"]),
    ]
    constants = {"s": _random(6), "t": _random(6), "w": _random(6, 8), "u": _random(8), "v": _random(8)}
    return _model(nodes, (3, 6), constants)


def network() -> onnx.ModelProto:
    """What channels last must carry: convs of three kinds, pools, a gate, a concatenation, a shuffle, a residual."""
    conv = [
        helper.make_node("Conv", ["x", "w0"], ["c0"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Conv", ["c0", "w1", "b1"], ["c1"], group=16, pads=[2, 2, 2, 2]),
        helper.make_node("GlobalAveragePool", ["c1"], ["g"]),
        helper.make_node("Conv", ["g", "w2"], ["g2"]),
        helper.make_node("HardSigmoid", ["g2"], ["g3"]),
        helper.make_node("Mul", ["c1", "g3"], ["m"]),
        helper.make_node("Add", ["m", "c0"], ["r"]),
        helper.make_node("Reshape", ["r", "split"], ["s1"]),
        helper.make_node("Transpose", ["s1"], ["s2"], perm=[0, 2, 1, 3, 4]),
        helper.make_node("Reshape", ["s2", "merge"], ["s3"]),
        helper.make_node("Conv", ["s3", "w3"], ["c3"], group=2),
        helper.make_node("MaxPool", ["c3"], ["p1"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("AveragePool", ["c3"], ["p2"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Concat", ["p1", "p2"], ["p"], axis=1),
        helper.make_node("ReduceMean", ["p"], ["y"], axes=[2], keepdims=0),
    ]
    constants = {
        "w0": _random(16, 3, 3, 3) - 0.6, "w1": _random(16, 1, 5, 5) - 0.6, "b1": _random(16),
        "w2": _random(16, 16, 1, 1) - 0.6, "w3": _random(8, 8, 1, 1) - 0.6,
        "split": np.array([1, 2, 8, 8, 8]), "merge": np.array([1, 16, 8, 8]),
    }  # fmt: skip
    return _model(conv, (1, 3, 16, 16), {name: array.astype(array.dtype) for name, array in constants.items()})


def weights_to_pack() -> onnx.ModelProto:
    """A padded, strided conv, and a matmul whose columns fill no vector."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["1"], pads=[1, 0, 1, 2], strides=[2, 1], dilations=[1, 2]),
        helper.make_node("Relu", ["1"], ["2"]),
        helper.make_node("MatMul", ["2", "m"], ["y"]),
    ]
    return _model(nodes, (1, 4, 8, 8), {"w": _random(16, 4, 3, 3) - 0.6, "m": _random(6, 67) - 0.6})


def rows_to_fill() -> onnx.ModelProto:
    """Convs over 13 columns of a picture, whose rows make no good tile, and whose channels make no whole vectors."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["1"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["1"], ["2"]),
        helper.make_node("Conv", ["2", "v", "b"], ["3"]),
        helper.make_node("Relu", ["3"], ["y"]),
    ]
    weights = {"w": _random(48, 8, 3, 3) - 0.6, "v": _random(168, 48, 1, 1) - 0.6, "b": _random(168)}
    return _model(nodes, (1, 8, 13, 13), {name: array.astype("float32") for name, array in weights.items()})


def concatenated() -> onnx.ModelProto:
    """Convs over concatenations: one at once, one behind a pool, one whose result is larger."""
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"]),
        helper.make_node("Conv", ["x", "w1"], ["b"], pads=[1, 1, 1, 1]),
        helper.make_node("Concat", ["a", "b"], ["c"], axis=1),
        helper.make_node("Conv", ["c", "w2", "b2"], ["d"], pads=[1, 1, 1, 1]),
        helper.make_node("Concat", ["a", "d"], ["e"], axis=1),
        helper.make_node("MaxPool", ["e"], ["f"], kernel_shape=[3, 3], strides=[2, 2]),
        helper.make_node("Conv", ["f", "w3"], ["g"]),
        helper.make_node("Relu", ["g"], ["r"]),
        helper.make_node("Concat", ["g", "r"], ["h"], axis=1),
        helper.make_node("Conv", ["h", "w4"], ["y"]),
    ]
    weights = {"w0": _random(24, 8, 1, 1), "w1": _random(16, 8, 3, 3), "w2": _random(16, 40, 3, 3),
               "b2": _random(16), "w3": _random(16, 40, 1, 1), "w4": _random(64, 32, 1, 1)}  # fmt: skip
    return _model(nodes, (1, 8, 9, 9), {name: (array - 0.6).astype(array.dtype) for name, array in weights.items()})


def groups_to_pack() -> onnx.ModelProto:
    """Grouped convs with columns a group that make whole vectors, half ones, and none."""
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["1"], group=2),
        helper.make_node("Relu", ["1"], ["2"]),
        helper.make_node("Conv", ["2", "w1"], ["3"], group=2, pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["3"], ["4"]),
        helper.make_node("Conv", ["4", "w2"], ["y"], group=4),
    ]
    weights = {"w0": _random(16, 2, 1, 1), "w1": _random(24, 8, 3, 3), "w2": _random(24, 6, 1, 1)}
    return _model(nodes, (1, 4, 8, 8), {name: (array - 0.6).astype(array.dtype) for name, array in weights.items()})


def transposed() -> onnx.ModelProto:
    """Transposed convs: all of whose pixels are kept, cut on all sides, with more behind than before, and grouped."""
    nodes = [
        helper.make_node("ConvTranspose", ["x", "w0", "b0"], ["1"], strides=[2, 2]),
        helper.make_node("Relu", ["1"], ["2"]),
        helper.make_node("ConvTranspose", ["2", "w1"], ["3"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("ConvTranspose", ["3", "w2"], ["4"], strides=[2, 1], pads=[1, 0, 1, 2], output_padding=[1, 0]),
        helper.make_node("ConvTranspose", ["4", "w3"], ["y"], group=2),
    ]
    weights = {"w0": _random(6, 5, 2, 2), "b0": _random(5), "w1": _random(5, 4, 4, 4), "w2": _random(4, 6, 3, 5),
               "w3": _random(6, 2, 2, 2)}  # fmt: skip
    return _model(nodes, (1, 6, 3, 4), {name: (array - 0.6).astype(array.dtype) for name, array in weights.items()})


def queries_and_keys(rows: int) -> onnx.ModelProto:
    """Three products over one input, one of them behind another."""
    nodes = [
        helper.make_node("MatMul", ["x", "wq"], ["q"]),
        helper.make_node("MatMul", ["x", "wk"], ["k"]),
        helper.make_node("Add", ["k", "b"], ["kb"]),
        helper.make_node("Mul", ["q", "kb"], ["p"]),
        helper.make_node("MatMul", ["x", "wv"], ["v"]),
        helper.make_node("MatMul", ["v", "wo"], ["o"]),
        helper.make_node("Add", ["p", "o"], ["y"]),
    ]
    weights = {"wq": _random(16, 8), "wk": _random(16, 8), "b": _random(8), "wv": _random(16, 24), "wo": _random(24, 8)}
    return _model(nodes, (1, rows, 16), weights)


def exponentials() -> onnx.ModelProto:
    """What is computed from exponentials, over a range in which these span seven decades."""
    nodes = [
        helper.make_node("Mul", ["x", "eight"], ["1"]),
        helper.make_node("Sigmoid", ["1"], ["2"]),
        helper.make_node("Softmax", ["1"], ["3"], axis=-1),
        helper.make_node("Neg", ["1"], ["4"]),
        helper.make_node("Relu", ["4"], ["5"]),
        helper.make_node("Neg", ["5"], ["6"]),
        helper.make_node("Exp", ["6"], ["7"]),
        helper.make_node("Sum", ["2", "3", "7"], ["y"]),
    ]
    return _model(nodes, (5, 33), {"eight": _number(8)})


def spread_output() -> onnx.ModelProto:
    """A 1x1 conv over one point, whose result is added to every point of a picture."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["mean"]),
        helper.make_node("Conv", ["mean", "w"], ["c"]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Add", ["x", "r"], ["y"]),
    ]
    return _model(nodes, (1, 16, 40, 40), {"w": _random(16, 16, 1, 1)})


MODELS = {
    "clips": clips(), "arithmetic": arithmetic(), "sums": sums(), "chain": chain(),
    "scale_after": scale_after(), "scale_after_grouped": scale_after(groups=2),
    "scale_before": scale_before(), "scale_before_grouped": scale_before(groups=2),
    "scale_before_padded": scale_before(padding=1), "matmul_between": matmul_between(),
    "network": network(), "weights_to_pack": weights_to_pack(),
    "groups_to_pack": groups_to_pack(), "rows_to_fill": rows_to_fill(),
    "exponentials": exponentials(), "concatenated": concatenated(), "transposed": transposed(),
    "few_rows": queries_and_keys(8), "many_rows": queries_and_keys(9),
}  # fmt: skip
