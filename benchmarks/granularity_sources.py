"""The real models of the relay engine's benchmarks, which installed packages ship."""

from __future__ import annotations

from pathlib import Path

from benchmarks.packaged_model import MODEL_NAMES, packaged_model, packaged_shapes
from tasks.import_model import import_model_file
from tasks.model_source import fetch
from tasks.records import ModelFile

KNOWN = (*MODEL_NAMES, "squeezenet")


def source_of(name: str) -> tuple[Path, dict[str, tuple[int, ...]]]:
    """The file of a model and the shapes of its inputs."""
    if name in MODEL_NAMES:
        return packaged_model(name), packaged_shapes(name)
    import onnx

    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    return folder / f"light_{name}.onnx", {}


def named_model(name: str, folder: Path) -> ModelFile:
    """The model, normalised into ``folder``."""
    path, shapes = source_of(name)
    return import_model_file(fetch(str(path), folder), shapes, folder)
