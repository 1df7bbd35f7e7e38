"""Imports TVM without its slow parts. Import this module before any other that imports tvm."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import shutil
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Where CUDA's tools are when nobody has put them on the path.
_CUDA_TOOLS = "/usr/local/cuda/bin"


def import_tvm(kind: str) -> None:
    """Import TVM and the tensor intrinsics that a target of ``kind`` can use.

    TVM imports every intrinsic it has for any of them, which takes most of a minute: each calls
    ``inspect.stack()``, and that walks ``sys.modules`` once a frame.
    """
    import tvm.s_tir

    name = "tvm.s_tir.tensor_intrin"
    package = types.ModuleType(name)
    package.__path__ = [f"{tvm.s_tir.__path__[0]}/tensor_intrin"]
    sys.modules[name] = package
    tvm.s_tir.tensor_intrin = package
    needed = ["x86", "arm_cpu"] if kind == "llvm" else [kind, "x86"]
    if kind == "cuda":
        choose_cuda_compiler()
    with _cheap_stacks():
        for part in needed:
            try:
                importlib.import_module(f"{name}.{part}")
            except ModuleNotFoundError:
                continue  # most kinds have no intrinsics


def choose_cuda_compiler() -> str:
    """``nvrtc`` or ``nvcc``, as TVM will find it in the environment; empty where this machine has neither.

    TVM's default is NVRTC through the package cuda-bindings, and without that package every build fails,
    though nvcc is there. What the environment names already stays.
    """
    chosen = os.environ.get("TVM_CUDA_COMPILE_MODE", "")
    if not chosen and _has_nvrtc():
        chosen = "nvrtc"
    if chosen != "nvrtc" and shutil.which("nvcc") is None and Path(_CUDA_TOOLS, "nvcc").exists():
        os.environ["PATH"] = f"{os.environ.get('PATH', '')}:{_CUDA_TOOLS}"
    if not chosen and shutil.which("nvcc"):
        chosen = "nvcc"
    if chosen:
        os.environ["TVM_CUDA_COMPILE_MODE"] = chosen
    return chosen


def _has_nvrtc() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings.nvrtc") is not None
    except ModuleNotFoundError:
        return False


@contextmanager
def _cheap_stacks() -> Iterator[None]:
    """Have ``inspect.stack()`` read no source lines and remember which module a file belongs to."""
    stack, getmodule = inspect.stack, inspect.getmodule
    known: dict[str, Any] = {}

    def remembered(thing: Any, filename: str | None = None) -> Any:
        key = filename or getattr(getattr(thing, "f_code", None), "co_filename", None)
        if key is None:
            return getmodule(thing, filename)
        if key not in known:
            known[key] = getmodule(thing, filename)
        return known[key]

    def without_context(context: int = 1) -> Any:  # noqa: ARG001 - the signature is inspect's
        return stack(0)

    inspect.stack, inspect.getmodule = without_context, remembered  # type: ignore[assignment]
    try:
        yield
    finally:
        inspect.stack, inspect.getmodule = stack, getmodule
