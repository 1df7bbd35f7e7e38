"""Where the real models lie that installed packages ship: ``packaged_model.py recogniser`` prints a path.

The packages are found, not imported: importing them takes seconds, and rapidocr-onnxruntime is
installed without its dependencies.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

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
    """The ONNX file of one of ``MODEL_NAMES``. Raises FileNotFoundError where its package is not installed."""
    if name in _OCR:
        return _ocr_model(_OCR[name][0])
    if name not in _LIGHT:
        raise ValueError(f"{name} is none of {', '.join(MODEL_NAMES)}")
    spec = importlib.util.find_spec("onnx")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("the package onnx is not installed: run 'make venv'")
    return Path(spec.submodule_search_locations[0]) / "backend" / "test" / "data" / "light" / f"light_{name}.onnx"


def packaged_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """The shapes that ``packaged_model(name)`` needs, by input name: none for the static ones."""
    return {"x": _OCR[name][1]} if name in _OCR else {}


def _ocr_model(ending: str) -> Path:
    try:
        files = importlib.metadata.distribution("rapidocr-onnxruntime").files or ()
    except importlib.metadata.PackageNotFoundError as error:
        raise FileNotFoundError("the package rapidocr-onnxruntime is not installed: run 'make venv'") from error
    found = next((file for file in files if file.name.endswith(ending)), None)
    if found is None:
        raise FileNotFoundError(f"rapidocr-onnxruntime holds no file *{ending}: its version is not the pinned one")
    return Path(str(found.locate()))


def main() -> None:
    """Print the path of the model that the command line names."""
    parser = argparse.ArgumentParser(description="Print the path of a model that an installed package ships.")
    parser.add_argument("name", choices=MODEL_NAMES)
    try:
        print(packaged_model(parser.parse_args().name))
    except FileNotFoundError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
