"""Real models that installed packages ship, and small ones made here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

#: PP-OCR models with real weights, in the rapidocr-onnxruntime package: end of the file name, shape of "x".
_OCR = {
    "classifier": ("cls_infer.onnx", (1, 3, 48, 192)),
    "recogniser": ("rec_infer.onnx", (1, 3, 48, 320)),
    "detector": ("det_infer.onnx", (1, 3, 320, 320)),
}
#: Real architectures with constant weights, in the onnx package.
_LIGHT = ("squeezenet", "resnet50", "shufflenet", "densenet121", "inception_v1")

MODEL_NAMES = (*_OCR, *_LIGHT)


def packaged_model(name: str) -> Path:
    """The ONNX file of one of ``MODEL_NAMES``; its package is found, not imported."""
    if name in _OCR:
        distribution = importlib.metadata.distribution("rapidocr-onnxruntime")
        ending = _OCR[name][0]
        return next(Path(str(f.locate())) for f in distribution.files or () if f.name.endswith(ending))
    if name not in _LIGHT:
        raise ValueError(f"{name} is none of {', '.join(MODEL_NAMES)}")
    return Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / f"light_{name}.onnx"


def packaged_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """The shapes that ``packaged_model(name)`` needs, by input name: none for the static ones."""
    return {"x": _OCR[name][1]} if name in _OCR else {}


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


def save_with_external_data(model: onnx.ModelProto, path: Path, location: str = "weights.bin") -> Path:
    """Write ``model`` to ``path``, every weight in ``location`` beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / location).parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path, save_as_external_data=True, location=location, size_threshold=0)
    return path
