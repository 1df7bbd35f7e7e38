"""Real models, quantised by onnxruntime's own tool: QDQ, a scale a channel.

Weights have seven bits: with eight, onnxruntime's kernels for CPUs with AVX2 and no VNNI saturate at 16
bits, and are dozens of steps off.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from tasks.import_model import import_model_file
from tasks.model_source import fetch
from tests.models import packaged_model, packaged_shapes


class _Samples(CalibrationDataReader):  # type: ignore[misc]
    """Some seeded inputs."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self._left: Iterator[dict[str, Any]] = iter([{name: sample(shape, seed)} for seed in range(3)])

    def get_next(self) -> dict[str, Any] | None:
        """The next inputs, None at the end."""
        return next(self._left, None)


def sample(shape: tuple[int, ...], seed: int) -> Any:
    """Seeded float32 numbers in [-1, 1)."""
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def quantised_model(name: str, end: tuple[str, int], activations: str, folder: Path) -> tuple[Path, Path]:
    """The model ``name`` up to the input of its n-th operator of a kind (``end``), in float32 and quantised.

    ``activations`` is the dtype of these, "uint8" or "int8". What a softmax makes of nearly equal
    numbers would hide most differences, so that it is left out.
    """
    model = import_model_file(fetch(str(packaged_model(name)), folder), packaged_shapes(name), folder)
    # Scales a channel need opset 13.
    graph = onnx.version_converter.convert_version(onnx.load(model.path), 13)
    _randomise(graph)
    plain = folder / f"{name}.onnx"
    onnx.save(_until(graph, *end), plain)
    quantised = folder / f"{name}_{activations}.onnx"
    dtype = QuantType.QUInt8 if activations == "uint8" else QuantType.QInt8
    quantize_static(
        plain, quantised, _Samples(model.inputs[0].name, model.inputs[0].shape), quant_format=QuantFormat.QDQ,
        per_channel=True, reduce_range=True, activation_type=dtype, weight_type=QuantType.QInt8,
    )  # fmt: skip
    return plain, quantised


def _randomise(model: onnx.ModelProto) -> None:
    """Seeded weights instead of constant ones: the light models' are all the same."""
    random = np.random.default_rng(0)
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.float32 and array.size > 1 and np.all(array == array.flat[0]):
            spread = np.sqrt(2 / np.prod(array.shape[1:])) if array.ndim > 1 else 0.1
            made = (random.standard_normal(array.shape) * spread).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(made, tensor.name))


def _until(model: onnx.ModelProto, operator: str, number: int) -> onnx.ModelProto:
    """The part of ``model`` before its ``number``-th ``operator``."""
    inferred = onnx.shape_inference.infer_shapes(model)
    end = [node for node in inferred.graph.node if node.op_type == operator][number - 1]
    extractor = onnx.utils.Extractor(inferred)
    return extractor.extract_model([value.name for value in inferred.graph.input], [end.input[0]])
