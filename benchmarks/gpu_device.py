"""The first check on a machine with a GPU: the driver, the compiler, and whether TVM runs a kernel at all."""

from __future__ import annotations

import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from benchmarks.gpu_check import Place

_QUERY = "name,driver_version,memory.total,memory.used,clocks.sm,compute_mode"
_PACKAGES = ("apache-tvm", "apache-tvm-ffi", "cuda-bindings", "onnxruntime", "onnxruntime-gpu", "numpy")


def device(place: Place) -> dict[str, Any]:
    """What the machine has, and a kernel that is built and run as candidates are."""
    found: dict[str, Any] = {"smi": said("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader")}
    found["nvcc"] = (said("nvcc", "--version").splitlines() or [""])[-1]
    found["packages"] = {name: installed for name in _PACKAGES if (installed := _installed(name))}
    print(said("nvidia-smi"))
    from tasks.engines.relax.bootstrap import choose_cuda_compiler, import_tvm

    started = time.monotonic()
    import_tvm("cuda" if place.on_gpu else "llvm")
    found["import_s"] = round(time.monotonic() - started, 1)
    import tvm

    if place.on_gpu:
        found["compiler"] = choose_cuda_compiler()
        found["runtime"] = bool(tvm.runtime.enabled("cuda"))
        if not found["runtime"]:
            return {"ok": False, **found, "error": "TVM's CUDA runtime is not loaded: libcuda.so.1, libcudart.so.13"}
        chip = tvm.runtime.device(place.device)
        if not chip.exist:
            return {"ok": False, **found, "error": "TVM sees no CUDA device"}
        found |= _attributes(chip)
    return found | _one_kernel(place)


def _attributes(chip: Any) -> dict[str, Any]:
    return {
        "chip": str(chip.device_name), "compute": str(chip.compute_version),
        "multiprocessors": int(chip.multi_processor_count), "l2_bytes": int(chip.l2_cache_size_bytes or 0),
        "shared_bytes": int(chip.max_shared_memory_per_block),
    }  # fmt: skip


def _one_kernel(place: Place) -> dict[str, Any]:
    import tvm

    from benchmarks import gpu_kernels
    from tasks.engines.relax import candidates, targets

    target = targets.resolve(place.target, 2)
    job = {
        "mod": tvm.ir.save_json(gpu_kernels.named("double", place.on_gpu)), "symbol": "double",
        "target": target.spec, "stem": str(place.scratch / "double"),
    }  # fmt: skip
    started = time.monotonic()
    built = candidates.make_builder({})(job)
    build_s = time.monotonic() - started
    chip = tvm.runtime.device(place.device.partition("-")[0] if place.on_gpu else "cpu")
    values = np.arange(gpu_kernels.SIZE, dtype=np.float32)
    a, b = (tvm.runtime.tensor(array, chip) for array in (values, np.zeros_like(values)))
    started = time.monotonic()
    candidates.load_library(built["path"])["double"](a, b)
    chip.sync()
    right = bool((b.numpy() == 2 * values).all())
    first_s = time.monotonic() - started
    return {"ok": right, "target": target.key, "build_s": round(build_s, 2), "first_call_s": round(first_s, 3)}


def said(tool: str, *arguments: str) -> str:
    """What ``tool`` printed; empty where it is not here."""
    path = shutil.which(tool)
    if path is None:
        return ""
    done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout or done.stderr).strip()


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
