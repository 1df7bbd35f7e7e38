"""The relay engine's verbs, as they run in the child process."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

import tvm

from tasks.engines.interface import BuildRequest
from tasks.engines.measuring.engine import EngineOptions, KernelPart, MeasuringEngine
from tasks.engines.measuring.workshop import Workshop, built_object, sample_group
from tasks.engines.measuring.zygote import Zygote
from tasks.engines.relay import building, frontend, targets
from tasks.engines.relay.candidates import load_func
from tasks.engines.relay.lowering import Choice, lower
from tasks.engines.relay.memory import Memory
from tasks.engines.relay.search import Candidate, SearchOptions, TaskSearch
from tasks.engines.relay.subgraphs import Inventory, arguments, take_inventory
from tasks.engines.relay.tuners import TUNERS
from tasks.errors import TargetError
from tasks.records import Artifact, EngineInfo, FusedModule, ImportedModule, ModelFile, TuningRecord, TuningTask

_PACKAGES = ("xgboost", "numpy", "onnx")
#: Set by the flow from its settings.
TUNER_VARIABLE = "TUNEWRIGHT_RELAY_TUNER"


class RelayEngine(MeasuringEngine):
    """Relay, its fusion and AutoTVM by subgraph; keeps imported modules and searches warm."""

    def __init__(self, options: EngineOptions, zygote: Zygote) -> None:
        super().__init__(options, zygote, targets.resolve(options.target, options.threads))
        self._tvm_target = targets.to_tvm(self._target)
        self._imported: dict[str, tuple[Any, dict[str, int]]] = {}
        self._inventories: dict[str, Inventory] = {}
        self._memory = Memory()
        search = SearchOptions(_tuner(), options.threads)
        self._workloads = RelayWorkshop(self._tvm_target, self._target.spec, search, self._memory)

    def describe(self) -> EngineInfo:
        return EngineInfo(
            engine="relay",
            tvm_version=_tvm_version(),
            python_version=platform.python_version(),
            target=self._target,
            device=self._options.device,
            versions=_versions(),
            cache_bytes=self._cache_bytes(),
        )

    def import_model(self, model: ModelFile) -> ImportedModule:
        _, operators = self._translated(model)
        return ImportedModule(model, self.describe(), operators, model.inputs, model.outputs)

    def fuse(self, imported: ImportedModule, granularity: str) -> FusedModule:
        inventory = self._inventory(imported)
        return FusedModule(imported, granularity, inventory.subgraphs, inventory.calls)

    def build(self, request: BuildRequest) -> Artifact:
        inventory = self._inventory(request.fused.imported)
        compile_kernels = self._compile if self._target.kind == "llvm" else None

        def is_built(workload_key: str, candidate_key: str) -> bool:
            return bool(built_object(self._scratch, workload_key, candidate_key))

        material = building.Material(inventory, self._tvm_target, compile_kernels, is_built)
        return building.build(request, material)

    def _compile(self, kernels: Sequence[building.Kernel]) -> Mapping[str, str]:
        """Object files by workload key."""
        return self._compile_kernels([self._part_of(kernel) for kernel in kernels])

    def _part_of(self, kernel: building.Kernel) -> KernelPart:
        def part() -> Mapping[str, Any]:
            choice = kernel.choice.to_text() if kernel.choice else ""
            return self._workloads.part(_as_text(kernel.func), choice)

        return KernelPart(kernel.workload_key, kernel.candidate_key, part)

    def _translated(self, model: ModelFile) -> tuple[Any, dict[str, int]]:
        """The imported module and how often it has each operator."""
        if model.digest not in self._imported:
            self._imported[model.digest] = frontend.translate(model.path)
        return self._imported[model.digest]

    def _inventory(self, imported: ImportedModule) -> Inventory:
        """The fused module; a child that was restarted makes it anew from the model's file."""
        digest = imported.model.digest
        if digest not in self._inventories:
            mod, _ = self._translated(imported.model)
            self._inventories[digest] = take_inventory(frontend.fuse(mod, self._tvm_target))
        return self._inventories[digest]

    def _workload_text(self, imported: ImportedModule, workload_key: str) -> str:
        return _as_text(self._inventory(imported).workloads[workload_key])

    def _workshop(self) -> Workshop:
        return self._workloads

    def _device_exists(self, device: str) -> bool:
        kind, _, index = device.partition(":")
        return bool(tvm.device(kind, int(index or 0)).exist)

    def _learn(self, folder: Path) -> None:
        self._memory.load(folder)

    def _teach(self, path: Path) -> None:
        self._memory.save(path)


class RelayWorkshop:
    """See ``Workshop``."""

    def __init__(self, target: Any, target_json: str, search: SearchOptions, memory: Memory) -> None:
        self._target = target
        self._target_json = target_json
        self._search = search
        self._memory = memory
        self._searches: dict[str, TaskSearch] = {}
        self._texts: dict[str, str] = {}
        self._arguments: dict[str, list[tuple[tuple[int, ...], str]]] = {}

    def search_of(self, task: TuningTask, cold: bool) -> TaskSearch:
        group = sample_group(task, cold)
        if group not in self._searches:
            self._searches[group] = TaskSearch(task, self._target, self._search, self._memory, group)
        return self._searches[group]

    def arguments(self, task: TuningTask) -> list[tuple[tuple[int, ...], str]]:
        if task.workload_key not in self._arguments:
            self._arguments[task.workload_key] = arguments(load_func(self._text(task)))
        return self._arguments[task.workload_key]

    def default_part(self, task: TuningTask) -> Mapping[str, Any]:
        return self.part(self._text(task), "")

    def candidate_part(self, task: TuningTask, candidate: Candidate) -> Mapping[str, Any]:
        return self.part(self._text(task), candidate.trace)

    def stored_part(self, task: TuningTask, record: TuningRecord) -> Mapping[str, Any]:
        text = self._text(task)
        lower(load_func(text), self._target, Choice.from_text(record.schedule))
        return self.part(text, record.schedule)

    def part(self, func: str, choice: str) -> dict[str, Any]:
        """What a builder needs to compile the workload ``func`` (JSON) as ``choice`` says."""
        return {"func": func, "choice": choice, "target": self._target_json}

    def _text(self, task: TuningTask) -> str:
        if task.workload_key not in self._texts:
            self._texts[task.workload_key] = Path(task.workload_path).read_text()
        return self._texts[task.workload_key]


def _as_text(func: Any) -> str:
    return str(tvm.ir.save_json(tvm.IRModule({"main": func})))


def _tuner() -> str:
    name = os.environ.get(TUNER_VARIABLE, "") or TUNERS[0]
    if name not in TUNERS:
        raise TargetError(f"{TUNER_VARIABLE}={name} is no tuner: give one of {', '.join(TUNERS)}")
    return name


def _distribution() -> tuple[str, str]:
    """The package that TVM came in and its version; empty texts for one that was built here."""
    for name in packages_distributions().get("tvm", ()):
        with contextlib.suppress(PackageNotFoundError):
            return name, version(name)
    return "", ""


def _tvm_version() -> str:
    """TVM's version; of a vendor's build with the vendor's own, since they differ in more than the number says."""
    name, found = _distribution()
    own = str(tvm.__version__)
    return own if name in ("", "tvm", "apache-tvm") else f"{own}-{name}-{found}"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    name, number = _distribution()
    if name:
        found[name] = number
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    found["platform"] = f"{sys.platform}-{platform.machine()}"
    return found
