"""What the user calls a target, as TVM's target and as our record of it."""

from __future__ import annotations

import json
import platform
from typing import Any

import tvm

from tasks.errors import TargetError
from tasks.records import Target, short_hash

#: What this machine is called in LLVM's triples.
_TRIPLES = {
    "x86_64": "x86_64-linux-gnu",
    "aarch64": "aarch64-linux-gnu",
    "riscv64": "riscv64-unknown-linux-gnu",
}
#: By a flag of /proc/cpuinfo, best first: the oldest x86 CPU that has what the schedules make use of.
_X86_CPUS = (("avx512_vnni", "cascadelake"), ("avx512bw", "skylake-avx512"), ("avx2", "core-avx2"))


def resolve(text: str, threads: int) -> Target:
    """``cpu``, ``cuda``, TVM's JSON or its options (``llvm -mcpu=core-avx2``) as a Target.

    Raises TargetError.
    """
    config = _config_of(text, threads)
    try:
        target = tvm.target.Target(config)
    except Exception as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise TargetError(f"TVM does not know the target {text}: {reason[:300]}") from error
    kind = str(target.kind.name)
    _require_codegen(kind)
    spec = json.dumps(config, sort_keys=True)
    name = str(config.get("mcpu") or config.get("arch") or config.get("model") or kind)
    return Target(kind=kind, spec=spec, key=f"{kind}-{name}-{short_hash(spec, length=8)}", threads=threads)


def to_tvm(target: Target) -> Any:
    """The ``tvm.target.Target`` of ``target``."""
    return tvm.target.Target(json.loads(target.spec))


def _config_of(text: str, threads: int) -> dict[str, Any]:
    host = {"kind": "llvm", "num-cores": threads, **_this_cpu()}
    if text == "cpu":
        return host
    if text == "cuda":
        return {"kind": "cuda", "host": host}
    if text.lstrip().startswith("{"):
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise TargetError(f"the target is not valid JSON: {error}") from error
        if not isinstance(config, dict) or "kind" not in config:
            raise TargetError(f'the target {text} names no "kind"')
    else:
        config = _from_options(text)
    if config["kind"] == "llvm":
        return {"num-cores": threads, **config}
    return {"host": host, **config}


def _from_options(text: str) -> dict[str, Any]:
    """TVM's text such as ``llvm -mtriple=x86_64-linux-gnu -mcpu=core-avx2``. Raises TargetError."""
    try:
        exported = dict(tvm.target.Target(text).export())
    except Exception as error:
        raise TargetError(
            f"the target {text!r} is unknown to TVM {tvm.__version__}: give cpu, cuda, TVM's JSON or its options "
            "such as 'llvm -mtriple=x86_64-linux-gnu -mcpu=core-avx2'"
        ) from error
    config = {name: _plain(exported[name]) for name in sorted(exported) if name not in ("tag", "keys")}
    return {name: value for name, value in config.items() if value not in (None, "", [])}


def _plain(value: Any) -> Any:
    """TVM's containers and numbers as JSON types."""
    if isinstance(value, (str, int, float, bool)) or value is None:
        return str(value) if isinstance(value, str) else value
    if hasattr(value, "value"):
        return value.value
    if hasattr(value, "items"):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value]


def _this_cpu() -> dict[str, str]:
    """Triple and CPU of this machine. A vendor's TVM may have another triple as its default."""
    machine = platform.machine()
    found = {"mtriple": _TRIPLES.get(machine, f"{machine}-linux-gnu")}
    if machine == "x86_64":
        with open("/proc/cpuinfo") as lines:  # noqa: PTH123 - read line by line
            flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
        found["mcpu"] = next((cpu for flag, cpu in _X86_CPUS if flag in flags), "x86-64")
    return found


def _require_codegen(kind: str) -> None:
    """Raises TargetError where this TVM was built without the target's code generator."""
    name = "target.build.llvm" if kind == "llvm" else f"target.build.{kind}"
    if tvm.get_global_func(name, allow_missing=True) is None:
        raise TargetError(
            f"this TVM ({tvm.__version__}) was built without {kind}: name another target, or the interpreter of a "
            "TVM that has it with TUNEWRIGHT_RELAY_PYTHON"
        )
