"""What the user calls a target, as TVM's target and as our record of it."""

from __future__ import annotations

import json
from typing import Any

import tvm
from tvm.target import codegen

from tasks.engines.relax.bootstrap import choose_cuda_compiler
from tasks.errors import TargetError
from tasks.records import Target, short_hash

#: At 3, TVM's default, LLVM unrolls naive loops until one kernel takes 6 s to compile (a depthwise conv of
#: PP-OCR; 0.3 s at 2). Of twenty tuned kernels the two levels' latencies differed by 0.7% in sum.
_LLVM_OPT_LEVEL = 2
_SHORT_NAMES = ("cpu", "cuda")
#: What MetaSchedule's space generator and dlight need to know of a GPU when none is at hand.
_CUDA_LIMITS = {
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
    "thread_warp_size": 32,
}


def resolve(text: str, threads: int) -> Target:
    """``cpu``, ``cuda`` or TVM's JSON as a Target with every attribute that decides about schedules.

    Raises TargetError.
    """
    config = _config_of(text, threads)
    try:
        target = tvm.target.Target(config)
    except Exception as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise TargetError(f"TVM does not know the target {text}: {reason}") from error
    spec = json.dumps(config, sort_keys=True)
    kind = str(target.kind.name)
    name = str(config.get("mcpu") or config.get("arch") or kind)
    return Target(kind=kind, spec=spec, key=f"{kind}-{name}-{short_hash(spec, length=8)}", threads=threads)


def to_tvm(target: Target) -> Any:
    """The ``tvm.target.Target`` of ``target``."""
    return tvm.target.Target(json.loads(target.spec))


def _config_of(text: str, threads: int) -> dict[str, Any]:
    host = {
        "kind": "llvm", "mcpu": str(codegen.llvm_get_system_cpu()), "num-cores": threads,
        "opt-level": _LLVM_OPT_LEVEL,
    }  # fmt: skip
    if text == "cpu":
        return host
    if text == "cuda":
        return {"kind": "cuda", "arch": _cuda_arch(), **_CUDA_LIMITS, "host": host}
    if not text.lstrip().startswith("{"):
        names = ", ".join(_SHORT_NAMES)
        raise TargetError(
            f"the target {text!r} is unknown: give {names}, or TVM's JSON such as "
            '\'{"kind": "llvm", "mcpu": "skylake-avx512", "num-cores": 8}\''
        )
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise TargetError(f"the target is not valid JSON: {error}") from error
    if not isinstance(config, dict) or "kind" not in config:
        raise TargetError(f'the target {text} names no "kind"')
    if config["kind"] == "llvm":
        return {"num-cores": threads, "opt-level": _LLVM_OPT_LEVEL, **config}
    if config["kind"] == "cuda":
        return {**_CUDA_LIMITS, "host": host, **config}
    return dict(config)


def _cuda_arch() -> str:
    """The compute architecture of the first GPU. Raises TargetError where there is none, or no compiler for it."""
    if not tvm.runtime.enabled("cuda"):
        raise TargetError(
            "TVM's CUDA runtime cannot be loaded here: it needs libcuda.so.1, which comes with the driver, and "
            "libcudart.so.13 of CUDA 13 on the library path (LD_LIBRARY_PATH). Or name the "
            'architecture to compile for another machine: \'{"kind": "cuda", "arch": "sm_90"}\''
        )
    if not choose_cuda_compiler():
        raise TargetError(
            "nothing compiles CUDA here: put nvcc of CUDA 12 or later on the path, or install the package cuda-bindings"
        )
    device = tvm.cuda(0)
    if not device.exist:
        raise TargetError(
            "no CUDA device is visible here: check nvidia-smi and CUDA_VISIBLE_DEVICES, or name the "
            'architecture to compile for another machine: \'{"kind": "cuda", "arch": "sm_90"}\''
        )
    return "sm_" + str(device.compute_version).replace(".", "")
