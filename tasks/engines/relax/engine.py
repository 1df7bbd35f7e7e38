"""The relax engine's verbs, as they run in the child process."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tvm

from tasks.engines.interface import BuildRequest, ExecutionRequest
from tasks.engines.measuring.device_lock import DeviceLock
from tasks.engines.measuring.pipeline import Job, Outcome, Pipeline, Placement
from tasks.engines.measuring.zygote import Worker, WorkerDied, WorkerError, WorkerOptions, Zygote
from tasks.engines.relax import building, frontend, targets
from tasks.engines.relax.cost_model import Samples, XgbCostModel
from tasks.engines.relax.search import TaskSearch
from tasks.engines.relax.session import SessionRunner, Surroundings, build_part, built_object
from tasks.engines.relax.subgraphs import Inventory, take_inventory
from tasks.errors import EngineError, TargetError
from tasks.records import (
    Artifact,
    EngineInfo,
    FusedModule,
    FusedSubgraph,
    ImportedModule,
    Latency,
    MeasureSettings,
    ModelFile,
    Session,
    SessionResult,
    TuningTask,
)

_PACKAGES = ("apache-tvm", "apache-tvm-ffi", "apache-tvm-ffi-orcjit", "xgboost", "numpy", "onnx")
#: Bytes that one floating-point operation is worth when tasks are ordered before anything is measured:
#: a core does some ten operations in the time that it moves a byte from memory.
_FLOPS_PER_BYTE = 10.0


@dataclass(frozen=True)
class EngineOptions:
    """How a child is started: the target as the user names it, device, threads, seed.

    ``scratch`` is a folder for built candidates, which the parent removes.
    """

    target: str
    device: str
    threads: int
    scratch: str
    seed: int = 0


class RelaxEngine:
    """Serves requests one at a time; keeps imported modules and searches warm."""

    def __init__(self, options: EngineOptions, zygote: Zygote) -> None:
        self._options = options
        self._zygote = zygote
        self._target = targets.resolve(options.target, options.threads)
        self._tvm_target = targets.to_tvm(self._target)
        self._scratch = Path(options.scratch)
        self._inventories: dict[str, tuple[frontend.Fused, Inventory]] = {}
        self._searches: dict[str, TaskSearch] = {}
        self._kept: dict[str, list[tuple[float, str]]] = {}
        self._executors: dict[str, Worker] = {}
        self._pipeline: tuple[MeasureSettings, Pipeline] | None = None
        self._model = XgbCostModel(Samples(), options.threads, options.seed)
        self._lock = DeviceLock(options.device)

    def describe(self) -> EngineInfo:
        return EngineInfo(
            engine="relax",
            tvm_version=str(tvm.__version__),
            python_version=platform.python_version(),
            target=self._target,
            device=self._options.device,
            versions=_versions(),
        )

    def import_model(self, model: ModelFile) -> ImportedModule:
        _, operators = frontend.translate(model.path)
        return ImportedModule(model, self.describe(), operators, model.inputs, model.outputs)

    def fuse(self, imported: ImportedModule, granularity: str) -> FusedModule:
        _, inventory = self._inventory(imported)
        return FusedModule(imported, granularity, inventory.subgraphs, inventory.calls)

    def extract(self, fused: FusedModule, out_dir: str) -> tuple[TuningTask, ...]:
        _, inventory = self._inventory(fused.imported)
        keys: dict[str, list[FusedSubgraph]] = {}
        for subgraph in fused.subgraphs:
            keys.setdefault(fused.tuned_key(subgraph), []).append(subgraph)
        work = {key: sum(_work(subgraph) for subgraph in group) for key, group in keys.items()}
        total = sum(work.values()) or 1.0
        tasks = []
        for key in sorted(keys, key=lambda key: (-work[key], key)):
            path = Path(out_dir) / f"{key}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(tvm.ir.save_json(inventory.workloads[key]))
            first = max(keys[key], key=_work)
            tasks.append(
                TuningTask(
                    workload_key=key, name=first.name, target_key=self._target.key,
                    weight=sum(subgraph.weight for subgraph in keys[key]), flops=first.flops,
                    bytes_moved=first.bytes_moved, expected_share=work[key] / total,
                    workload_path=str(path), subgraph=first,
                )
            )  # fmt: skip
        return tuple(tasks)

    def tune(self, session: Session, emit: Callable[[str, Any], None], stop: Callable[[], bool]) -> SessionResult:
        self._require_device()
        self._lock.acquire(session.run_id)
        runner = SessionRunner(self._pipeline_for(session.settings), self._surroundings(), self._search_of, self._kept)
        if not session.samples_dir:
            return runner.run(session, emit, stop)
        folder = Path(session.samples_dir)
        self._model.samples.load(folder)
        result = runner.run(session, emit, stop)
        self._model.samples.save(folder / f"{session.session_id}.npz")
        return result

    def build(self, request: BuildRequest) -> Artifact:
        fused, inventory = self._inventory(request.fused.imported)
        compile_kernels = self._compile_kernels if self._target.kind == "llvm" else None
        material = building.Material(fused.lowered, inventory.workloads, self._tvm_target, compile_kernels)
        return building.build(request, material)

    def execute(self, request: ExecutionRequest) -> Latency:
        self._require_device()
        folder = str(Path(request.artifact_dir).resolve())
        worker = self._executors.get(folder)
        if worker is None:
            options = {"artifact_dir": folder, "device": self._options.device.split("-")[0]}
            worker = self._zygote.spawn(WorkerOptions("execute", options, self._cores()))
            self._executors[folder] = worker
        try:
            worker.submit(
                {
                    "inputs_path": request.inputs_path,
                    "outputs_path": request.outputs_path,
                    "repeats": request.repeats,
                }
            )
            return Latency(tuple(worker.result()))
        except (WorkerError, WorkerDied) as error:
            self._executors.pop(folder).kill()
            raise EngineError(f"the artifact in {folder} does not run: {error}") from error

    def is_healthy(self) -> bool:
        """Is all here that requests need? A child that is not must end, so that it is replaced."""
        return self._zygote.is_alive()

    def _compile_kernels(self, kernels: Sequence[building.Kernel]) -> dict[str, str]:
        """Object files by workload key: those that were measured and kept, the others compiled in parallel."""
        around = self._surroundings()
        objects: dict[str, str] = {}
        jobs = []
        for kernel in kernels:
            path = built_object(around, kernel.workload_key, kernel.candidate_key)
            if path:
                objects[kernel.workload_key] = path
                continue
            mod = tvm.IRModule({"main": kernel.func})
            part = build_part(mod, around, kernel.workload_key, kernel.candidate_key)
            jobs.append(Job(kernel.workload_key, part, {}))
        failed: list[Outcome] = []

        def on_outcome(outcome: Outcome) -> None:
            objects[outcome.key] = outcome.path
            if outcome.failure is not None:
                failed.append(outcome)

        settings = self._pipeline[0] if self._pipeline else MeasureSettings()
        self._pipeline_for(settings).measure(jobs, lambda _: None, on_outcome)
        if failed and failed[0].failure:
            raise EngineError(f"the kernel {failed[0].key} cannot be built: {failed[0].failure.message}")
        return objects

    def close(self) -> None:
        """Ends all workers and gives the device back."""
        if self._pipeline is not None:
            self._pipeline[1].close()
        for worker in self._executors.values():
            worker.kill()
        self._lock.release()
        self._zygote.close()

    def _inventory(self, imported: ImportedModule) -> tuple[frontend.Fused, Inventory]:
        """The fused module; a child that was restarted makes it anew from the model's file."""
        digest = imported.model.digest
        if digest not in self._inventories:
            mod, _ = frontend.translate(imported.model.path)
            fused = frontend.fuse(mod, self._tvm_target)
            self._inventories[digest] = (fused, take_inventory(fused))
        return self._inventories[digest]

    def _search_of(self, task: TuningTask) -> TaskSearch:
        if task.workload_key not in self._searches:
            self._searches[task.workload_key] = TaskSearch(task, self._tvm_target, self._model)
        return self._searches[task.workload_key]

    def _pipeline_for(self, settings: MeasureSettings) -> Pipeline:
        if self._pipeline is None or self._pipeline[0] != settings:
            if self._pipeline is not None:
                self._pipeline[1].close()
            self._pipeline = (settings, Pipeline(self._zygote, self._placement(), settings, self._device()))
        return self._pipeline[1]

    def _placement(self) -> Placement:
        """Builders share the measured cores only where there are no others."""
        allowed = tuple(sorted(os.sched_getaffinity(0)))
        measured = self._cores()
        spare = tuple(core for core in allowed if core not in measured)
        if self._target.kind != "llvm":
            return Placement(max(1, len(allowed) - 1), allowed, ())
        return Placement(len(spare) or len(measured), spare or measured, measured)

    def _cores(self) -> tuple[int, ...]:
        """The cores that a CPU target is measured on; none to pin to for a GPU."""
        if self._target.kind != "llvm":
            return ()
        name, _, cores = self._options.device.partition(":")
        allowed = tuple(sorted(os.sched_getaffinity(0)))
        if name == "cpu" and "-" in cores:
            first, last = cores.split("-")
            return tuple(core for core in allowed if int(first) <= core <= int(last)) or allowed
        return allowed[: self._target.threads]

    def _device(self) -> str:
        """TVM's name of the device."""
        return "cpu" if self._target.kind == "llvm" else self._options.device

    def _require_device(self) -> None:
        if self._target.kind != "llvm" and not tvm.runtime.device(self._device()).exist:
            raise TargetError(
                f"{self._device()} is not on this machine: nothing can be measured for {self._target.kind} here; "
                "start an agent where the device is"
            )

    def _surroundings(self) -> Surroundings:
        return Surroundings(
            engine="relax", tvm_version=str(tvm.__version__), target=self._tvm_target,
            target_key=self._target.key, target_json=self._target.spec, device=self._options.device,
            host=socket.gethostname(), scratch=self._scratch,
        )  # fmt: skip


def _work(subgraph: FusedSubgraph) -> float:
    """A guess at a subgraph's share of the run time, before anything is measured."""
    return subgraph.weight * (subgraph.flops + _FLOPS_PER_BYTE * subgraph.bytes_moved)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "apache-tvm": str(tvm.__version__)}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    found["platform"] = f"{sys.platform}-{platform.machine()}"
    return found
