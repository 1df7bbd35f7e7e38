"""The relax engine's verbs, as they run in the child process."""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tvm

from tasks.engines.interface import BuildRequest
from tasks.engines.measuring.engine import EngineOptions, KernelPart, MeasuringEngine
from tasks.engines.measuring.workshop import Workshop, sample_group
from tasks.engines.measuring.zygote import Zygote
from tasks.engines.relax import building, frontend, targets
from tasks.engines.relax.cost_model import Samples, XgbCostModel
from tasks.engines.relax.implementations import Workload
from tasks.engines.relax.search import Candidate, TaskSearch, default_schedule, replay_record
from tasks.engines.relax.subgraphs import Inventory, arguments, take_inventory
from tasks.records import Artifact, EngineInfo, FusedModule, ImportedModule, ModelFile, TuningRecord, TuningTask

_PACKAGES = ("apache-tvm", "apache-tvm-ffi", "apache-tvm-ffi-orcjit", "xgboost", "numpy", "onnx")


class RelaxEngine(MeasuringEngine):
    """Relax, its fusion and MetaSchedule; keeps imported modules and searches warm."""

    def __init__(self, options: EngineOptions, zygote: Zygote) -> None:
        super().__init__(options, zygote, targets.resolve(options.target, options.threads))
        self._tvm_target = targets.to_tvm(self._target)
        self._imported: dict[str, tuple[Any, dict[str, int]]] = {}
        self._inventories: dict[tuple[str, str], tuple[frontend.Fused, Inventory]] = {}
        self._model = XgbCostModel(Samples(), options.threads, options.seed)
        self._workloads = RelaxWorkshop(self._tvm_target, self._target.spec, self._model)

    def describe(self) -> EngineInfo:
        return EngineInfo(
            engine="relax",
            tvm_version=str(tvm.__version__),
            python_version=platform.python_version(),
            target=self._target,
            device=self._options.device,
            versions=_versions(),
            cache_bytes=self._cache_bytes(),
            layouts=frontend.layouts_for(self._target.kind),
        )

    def import_model(self, model: ModelFile) -> ImportedModule:
        _, operators = self._translated(model)
        return ImportedModule(model, self.describe(), operators, model.inputs, model.outputs)

    def fuse(self, imported: ImportedModule, granularity: str) -> FusedModule:
        _, inventory = self._inventory(imported)
        return FusedModule(imported, granularity, inventory.subgraphs, inventory.calls)

    def build(self, request: BuildRequest) -> Artifact:
        fused, inventory = self._inventory(request.fused.imported)
        compile_kernels = self._compile if self._target.kind == "llvm" else None
        material = building.Material(fused.lowered, inventory.workloads, self._tvm_target, compile_kernels)
        return building.build(request, material)

    def _compile(self, kernels: Sequence[building.Kernel]) -> dict[str, str]:
        """Object files by workload key."""

        def kernel_part(kernel: building.Kernel) -> KernelPart:
            plain = None if kernel.plain is None else lambda: self._workloads.part(kernel.plain)
            return KernelPart(
                kernel.workload_key, kernel.candidate_key, lambda: self._workloads.part(kernel.func), plain
            )

        return self._compile_kernels([kernel_part(kernel) for kernel in kernels])

    def _translated(self, model: ModelFile) -> tuple[Any, dict[str, int]]:
        """The imported module and how often it has each operator."""
        if model.digest not in self._imported:
            self._imported[model.digest] = frontend.translate(model.path)
        return self._imported[model.digest]

    def _inventory(self, imported: ImportedModule) -> tuple[frontend.Fused, Inventory]:
        """The fused module; a child that was restarted makes it anew from the model's file."""
        layout = imported.layout or frontend.layouts_for(self._target.kind)[0]
        key = (imported.model.digest, layout)
        if key not in self._inventories:
            mod, _ = self._translated(imported.model)
            fused = frontend.fuse(mod, self._tvm_target, layout)
            self._inventories[key] = (fused, take_inventory(fused))
        return self._inventories[key]

    def _workload_text(self, imported: ImportedModule, workload_key: str) -> str:
        return self._inventory(imported)[1].workloads[workload_key].to_text()

    def _workshop(self) -> Workshop:
        return self._workloads

    def _device_exists(self, device: str) -> bool:
        return bool(tvm.runtime.device(device).exist)

    def _learn(self, folder: Path) -> None:
        self._model.samples.load(folder)

    def _teach(self, path: Path) -> None:
        self._model.samples.save(path)


class RelaxWorkshop:
    """See ``Workshop``."""

    def __init__(self, target: Any, target_json: str, model: XgbCostModel) -> None:
        self._target = target
        self._target_json = target_json
        self._model = model
        self._searches: dict[str, TaskSearch] = {}
        self._workloads: dict[str, Workload] = {}

    def search_of(self, task: TuningTask, cold: bool) -> TaskSearch:
        group = sample_group(task, cold)
        if group not in self._searches:
            self._searches[group] = TaskSearch(task, self._target, self._model, group)
        return self._searches[group]

    def arguments(self, task: TuningTask) -> list[tuple[tuple[int, ...], str]]:
        return arguments(self._workload(task).mod)

    def default_part(self, task: TuningTask) -> Mapping[str, Any]:
        return self.part(default_schedule(self._workload(task).mod, self._target)["main"])

    def candidate_part(self, task: TuningTask, candidate: Candidate) -> Mapping[str, Any]:  # noqa: ARG002
        return self.part(candidate.mod["main"])

    def stored_part(self, task: TuningTask, record: TuningRecord) -> Mapping[str, Any]:
        return self.part(replay_record(self._workload(task), record, self._target).mod["main"])

    def part(self, func: Any) -> dict[str, Any]:
        """What a builder needs to compile ``func``, a scheduled workload."""
        return {"mod": tvm.ir.save_json(tvm.IRModule({"main": func})), "target": self._target_json}

    def _workload(self, task: TuningTask) -> Workload:
        if task.workload_key not in self._workloads:
            self._workloads[task.workload_key] = Workload.from_text(Path(task.workload_path).read_text())
        return self._workloads[task.workload_key]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "apache-tvm": str(tvm.__version__)}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    found["platform"] = f"{sys.platform}-{platform.machine()}"
    return found
