"""What a builder and a runner do with one candidate. These run in workers forked by the zygote."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tvm
from tvm.contrib import cc

from tasks.engines.measuring.timing import Runner
from tasks.engines.relay import targets
from tasks.engines.relay.lowering import Choice, lower
from tasks.engines.relay.subgraphs import typed
from tasks.records import Target

#: Kernels check their arguments' shapes and dtypes at each call. Only we call them: the runner with arguments
#: made for them, the artifact's loader after a check of its own.
BUILD_CONFIG = {"tir.disable_assert": True}


def make_builder(options: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:  # noqa: ARG001
    """A handler that compiles ``{"func": JSON, "choice": text, "symbol", "target": JSON, "stem": path}``.

    ``choice`` is empty for TVM's own. Lowering is a part of it, so that builders share that work too. Answers
    ``{"path"}``: an object file, or a library where the target's code needs one.
    """

    def build(job: Mapping[str, Any]) -> dict[str, str]:
        target = targets.to_tvm(Target("", job["target"], "", 0))
        choice = Choice.from_text(job["choice"]) if job["choice"] else None
        library = compile_kernel(load_func(job["func"]), target, choice, job["symbol"])
        if target.kind.name == "llvm":
            path = job["stem"] + ".o"
            library.save(path)
        else:
            path = job["stem"] + ".so"
            library.export_library(path)
        return {"path": path}

    return build


def load_func(text: str) -> Any:
    """A workload from its JSON."""
    return typed(tvm.ir.load_json(text)["main"])


def kernel_module(func: Any, target: Any, choice: Choice | None, symbol: str) -> Any:
    """The lowered kernel of ``func`` as a module with one function, ``symbol``."""
    lowered = lower(func, target, choice)
    kernels = [f for f in (lowered[gv] for gv in lowered.get_global_vars()) if isinstance(f, tvm.tir.PrimFunc)]
    if len(kernels) != 1:
        raise RuntimeError(f"the subgraph was lowered to {len(kernels)} kernels instead of one")
    return tvm.IRModule({symbol: kernels[0].with_attr("global_symbol", symbol)})


def compile_kernel(func: Any, target: Any, choice: Choice | None, symbol: str) -> Any:
    """The compiled kernel of ``func``."""
    mod = kernel_module(func, target, choice, symbol)
    with tvm.transform.PassContext(opt_level=3, config=BUILD_CONFIG):
        return tvm.build(mod, target=target)


class TvmRuntime:
    """See ``Runtime``."""

    def device(self, name: str) -> Any:
        kind, _, index = name.partition(":")
        return tvm.device(kind, int(index or 0))

    def share(self, array: Any) -> Any:
        return tvm.nd.from_dlpack(array)

    def place(self, array: Any, device: Any) -> Any:
        return tvm.nd.array(array, device)

    def load(self, path: str) -> Any:
        """Objects are linked first, beside where they lie, so that the object is there for the artifact."""
        if not path.endswith(".o"):
            return tvm.runtime.load_module(path)
        library = Path(path[:-2] + ".linked.so")
        try:
            _link(path, library)
            return tvm.runtime.load_module(str(library))
        finally:
            library.unlink(missing_ok=True)


def _link(path: str, library: Path) -> None:
    """One object as a library: the linker alone, where it is there, takes a third of the compiler driver's time."""
    linker = shutil.which("ld")
    if linker is None:
        cc.create_shared(str(library), [path])
        return
    subprocess.run([linker, "-shared", "-o", str(library), path], check=True, capture_output=True)


def make_runner(options: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """A handler that times candidates on ``options["device"]``."""
    return Runner(TvmRuntime(), str(options["device"]))
