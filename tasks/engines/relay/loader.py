"""Loads and runs a compiled model. A copy of this file lies in every artifact, beside the library.

    from loader import CompiledModel
    model = CompiledModel("path/of/the/artifact")
    outputs = model.run({"x": array})          # a dict of numpy arrays by output name

Needs numpy and the TVM that ``manifest.json`` names. Where this Python does not have that TVM, which is made for
older Pythons, the model runs in a process of the interpreter that TUNEWRIGHT_RELAY_PYTHON names, and arrays go
there and back through pipes. Nothing of Tunewright is needed.
"""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_HEADER = struct.Struct("!BQ")
_OK, _FAILED = 0, 1


class CompiledModel:
    """A compiled model on one device. Inputs and outputs are those that the manifest lists."""

    def __init__(self, folder: str | Path, device: str = "") -> None:
        """Load the library in ``folder``; ``device`` is TVM's name of one, such as ``cuda:0``.

        Raises FileNotFoundError where the folder holds no artifact, ValueError where neither this Python nor
        TUNEWRIGHT_RELAY_PYTHON has the TVM that built it.
        """
        folder = Path(folder)
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        os.environ.setdefault("TVM_NUM_THREADS", str(self.manifest["threads"]))
        found = _installed_tvm()
        wanted = self.manifest["tvm"]
        python = os.environ.get("TUNEWRIGHT_RELAY_PYTHON", "")
        if found == wanted:
            self._runner: Any = _Here(folder, self.manifest, device)
        elif python:
            self._runner = _Elsewhere(python, folder, device)
        else:
            raise ValueError(
                f"this model was built by TVM {wanted}, installed is {found or 'none'}: set TUNEWRIGHT_RELAY_PYTHON "
                "to a Python that has it, or tune the model again"
            )

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Run once. Raises ValueError where an input is missing or of another shape or dtype."""
        outputs: dict[str, Any] = self._runner.run(self._checked(inputs))
        return outputs

    def time_ms(self, inputs: dict[str, Any], repeats: int) -> list[float]:
        """Run ``repeats`` times on inputs that are on the device already; each run's milliseconds."""
        samples: list[float] = self._runner.time_ms(self._checked(inputs), repeats)
        return samples

    def close(self) -> None:
        """End the process that the model runs in, if it is another one."""
        self._runner.close()

    def _checked(self, inputs: dict[str, Any]) -> dict[str, Any]:
        import numpy

        arrays = {}
        for spec in self.manifest["inputs"]:
            if spec["name"] not in inputs:
                raise ValueError(f"the input {spec['name']!r} is missing; given are {sorted(inputs)}")
            array = numpy.ascontiguousarray(inputs[spec["name"]])
            array = array.reshape(spec["shape"]) if not spec["shape"] else array
            if list(array.shape) != spec["shape"] or str(array.dtype) != spec["dtype"]:
                raise ValueError(
                    f"the input {spec['name']!r} must be {spec['dtype']} of shape {spec['shape']}, "
                    f"not {array.dtype} of shape {list(array.shape)}"
                )
            arrays[spec["name"]] = array
        return arrays


class _Here:
    """The model in this process."""

    def __init__(self, folder: Path, manifest: dict[str, Any], device: str) -> None:
        import tvm
        from tvm.contrib import graph_executor

        kind = manifest["target"]["kind"]
        name, _, index = (device or ("cpu" if kind == "llvm" else kind)).partition(":")
        self._device = tvm.device(name, int(index or 0))
        self._outputs = [spec["name"] for spec in manifest["outputs"]]
        # The names of the inputs in the graph, which Relay may have changed, in the manifest's order.
        nodes = json.loads((folder / "graph.json").read_text())["nodes"]
        names = [spec["name"] for spec in manifest["inputs"]]
        variables = [node["name"] for node in nodes if node["op"] == "null"]
        self._names = {name: name if name in variables else variables[i] for i, name in enumerate(names)}
        library = tvm.runtime.load_module(str(folder / "model.so"))
        self._module = graph_executor.create((folder / "graph.json").read_text(), library, self._device)
        self._module.load_params((folder / "params.bin").read_bytes())

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        self._place(inputs)
        self._module.run()
        return {name: self._module.get_output(i).numpy() for i, name in enumerate(self._outputs)}

    def time_ms(self, inputs: dict[str, Any], repeats: int) -> list[float]:
        self._place(inputs)
        samples = []
        for _ in range(repeats):
            start = time.perf_counter()
            self._module.run()
            self._device.sync()
            samples.append((time.perf_counter() - start) * 1e3)
        return samples

    def close(self) -> None:
        """Nothing to end."""

    def _place(self, inputs: dict[str, Any]) -> None:
        for name, array in inputs.items():
            self._module.set_input(self._names[name], array)


class _Elsewhere:
    """The model in a process of another interpreter, which runs this file."""

    def __init__(self, python: str, folder: Path, device: str) -> None:
        command = [python, str(Path(__file__).resolve()), str(folder), device]
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        environment["TUNEWRIGHT_RELAY_PYTHON"] = ""
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        except OSError as error:
            raise ValueError(f"TUNEWRIGHT_RELAY_PYTHON={python} does not start: {error.strerror}") from error
        self._answer()

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return self._ask(0, inputs)

    def time_ms(self, inputs: dict[str, Any], repeats: int) -> list[float]:
        return [float(sample) for sample in self._ask(repeats, inputs)["samples_ms"]]

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self._process.kill()
            self._process.wait()

    def _ask(self, repeats: int, inputs: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        data = _pack({f"in/{name}": array for name, array in inputs.items()} | {"repeats": repeats})
        self._process.stdin.write(_HEADER.pack(_OK, len(data)) + data)
        self._process.stdin.flush()
        return _unpack(self._answer())

    def _answer(self) -> bytes:
        assert self._process.stdout is not None
        header = self._process.stdout.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise ValueError(f"the model's process ended with status {self._process.wait()}")
        status, length = _HEADER.unpack(header)
        data = self._process.stdout.read(length)
        if status != _OK:
            raise ValueError(data.decode(errors="replace"))
        return data


def _installed_tvm() -> str:
    """The version of this Python's TVM, empty where it has none that runs Relay's graphs."""
    try:
        import tvm
        from tvm.contrib import graph_executor  # noqa: F401 - is it there?
    except Exception:
        return ""
    return str(tvm.__version__)


def _pack(arrays: dict[str, Any]) -> bytes:
    import numpy

    buffer = io.BytesIO()
    numpy.savez(buffer, **arrays)
    return buffer.getvalue()


def _unpack(data: bytes) -> dict[str, Any]:
    import numpy

    with numpy.load(io.BytesIO(data), allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


def _serve(folder: str, device: str) -> None:
    """Answer requests on stdin until it is closed: an .npz each way, a byte and its length before it."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what TVM prints must not be taken for a reply

    def reply(status: int, data: bytes) -> None:
        replies.write(_HEADER.pack(status, len(data)) + data)
        replies.flush()

    try:
        model = CompiledModel(folder, device)
    except Exception as error:
        reply(_FAILED, str(error).encode())
        return
    reply(_OK, b"")
    while len(header := sys.stdin.buffer.read(_HEADER.size)) == _HEADER.size:
        arrays = _unpack(sys.stdin.buffer.read(_HEADER.unpack(header)[1]))
        repeats = int(arrays.pop("repeats"))
        inputs = {name[3:]: array for name, array in arrays.items()}
        try:
            outputs = {"samples_ms": model.time_ms(inputs, repeats)} if repeats else model.run(inputs)
            reply(_OK, _pack(outputs))
        except Exception as error:
            reply(_FAILED, str(error).encode())


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2])
