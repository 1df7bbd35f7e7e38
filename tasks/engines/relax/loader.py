"""Loads and runs a compiled model. A copy of this file lies in every artifact, beside the library.

    from loader import CompiledModel
    model = CompiledModel("path/of/the/artifact")
    outputs = model.run({"x": array})          # a dict of numpy arrays by output name

Needs apache-tvm in the version that ``manifest.json`` names, and numpy; nothing of Tunewright.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class CompiledModel:
    """A compiled model on one device. Inputs and outputs are those that the manifest lists."""

    def __init__(self, folder: str | Path, device: str = "") -> None:
        """Load the library in ``folder``; ``device`` is TVM's name of one, such as ``cuda:0``.

        Raises FileNotFoundError where the folder holds no artifact, ValueError where the installed TVM
        is not the one that built it.
        """
        folder = Path(folder)
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        # TVM reads these once, when its thread pool starts. Its threads would spin for 220 ms after each
        # run; with this count they do for some milliseconds, longer than between two kernels.
        os.environ.setdefault("TVM_NUM_THREADS", str(self.manifest["threads"]))
        os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "10000")
        import numpy
        import tvm
        from tvm.runtime.vm import VirtualMachine

        if tvm.__version__ != self.manifest["versions"]["apache-tvm"]:
            raise ValueError(
                f"this model was built by apache-tvm {self.manifest['versions']['apache-tvm']}, installed is "
                f"{tvm.__version__}: install the version that built it, or tune the model again"
            )
        kind = self.manifest["target"]["kind"]
        self._numpy, self._tvm = numpy, tvm
        self._device = tvm.runtime.device(device or ("cpu" if kind == "llvm" else kind))
        self._vm = VirtualMachine(tvm.runtime.load_module(str(folder / "model.so")), self._device)
        self._main = self._vm["main"]

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Run once. Raises ValueError where an input is missing or of another shape or dtype."""
        return self.fetch(self._main(*self.place(inputs)))

    def place(self, inputs: dict[str, Any]) -> list[Any]:
        """``inputs`` on the device, in the library's order."""
        tensors = []
        for spec in self.manifest["inputs"]:
            if spec["name"] not in inputs:
                raise ValueError(f"the input {spec['name']!r} is missing; given are {sorted(inputs)}")
            array = self._numpy.ascontiguousarray(inputs[spec["name"]])
            array = array.reshape(spec["shape"]) if not spec["shape"] else array
            if list(array.shape) != spec["shape"] or str(array.dtype) != spec["dtype"]:
                raise ValueError(
                    f"the input {spec['name']!r} must be {spec['dtype']} of shape {spec['shape']}, "
                    f"not {array.dtype} of shape {list(array.shape)}"
                )
            tensors.append(self._tvm.runtime.tensor(array, self._device))
        return tensors

    def fetch(self, result: Any) -> dict[str, Any]:
        """What the library returned, as numpy arrays by output name."""
        results = [result] if hasattr(result, "numpy") else list(result)
        return {spec["name"]: r.numpy() for spec, r in zip(self.manifest["outputs"], results, strict=True)}

    def watch(self, instrument: Any) -> None:
        """Have ``instrument(function, name, before, result, *arguments)`` called around every call; None ends it."""
        self._vm._set_instrument(instrument)

    def sync(self) -> None:
        """Wait until the device has nothing left to do."""
        self._device.sync()

    def time_ms(self, inputs: dict[str, Any], repeats: int) -> list[float]:
        """Run ``repeats`` times on inputs that are on the device already; each run's milliseconds."""
        tensors = self.place(inputs)
        samples = []
        for _ in range(repeats):
            start = time.perf_counter()
            self._main(*tensors)
            self._device.sync()
            samples.append((time.perf_counter() - start) * 1e3)
        return samples
