"""What a builder and a runner do with one candidate. These run in workers forked by the zygote."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tvm
from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

from tasks.engines.measuring.timing import Runner

try:  # loading an object file is faster than linking it and opening a library
    import tvm_ffi_orcjit
except ImportError:
    tvm_ffi_orcjit = None

#: Kernels check their arguments' shapes and dtypes at each call, which is a third of what LLVM compiles.
#: Only we call them: the runner with arguments made for them, the artifact's loader after a check of its own.
BUILD_CONFIG = {"tirx.disable_assert": True}


def make_builder(options: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:  # noqa: ARG001
    """A handler that compiles ``{"mod": JSON, "symbol", "target": JSON, "stem": path}`` to ``{"path"}``.

    ``mod`` has one function, ``main``; the library has it as ``symbol``.
    """

    def build(job: Mapping[str, Any]) -> dict[str, str]:
        target = tvm.target.Target(job["target"])
        mod = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(tvm.ir.load_json(job["mod"]))
        symbol = job["symbol"]
        mod = tvm.IRModule({symbol: mod["main"].with_attr("global_symbol", symbol)})
        # In its scope: CUDA's compiler is called for the architecture of the current target.
        with target, tvm.transform.PassContext(opt_level=3, config=BUILD_CONFIG):
            library = tvm.tirx.build(mod, target=target)
        if target.kind.name == "llvm" and tvm_ffi_orcjit is not None:
            path = job["stem"] + ".o"
            library.write_to_file(path)
        else:
            path = job["stem"] + ".so"
            library.export_library(path)
        return {"path": path}

    return build


class TvmRuntime:
    """See ``Runtime``."""

    def device(self, name: str) -> Any:
        return tvm.runtime.device(name)

    def share(self, array: Any) -> Any:
        return tvm.runtime.from_dlpack(array)

    def place(self, array: Any, device: Any) -> Any:
        return tvm.runtime.tensor(array, device)

    def load(self, path: str) -> Any:
        return load_library(path)


def make_runner(options: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """A handler that times candidates on ``options["device"]``."""
    return Runner(TvmRuntime(), str(options["device"]))


def load_library(path: str) -> Any:
    """The built candidate at ``path``; objects go through the JIT linker, libraries through dlopen."""
    if path.endswith(".o"):
        return tvm_ffi_orcjit.ExecutionSession().load_module(path)
    return tvm.runtime.load_module(path)
