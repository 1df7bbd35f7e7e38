"""What engines have in common: tasks from subgraphs, sessions, the measured device, running artifacts.

Free of any TVM version. Standard library only, Python 3.10.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.engines.interface import ExecutionRequest
from tasks.engines.measuring.caches import last_level_cache_bytes
from tasks.engines.measuring.device_lock import DeviceLock
from tasks.engines.measuring.pipeline import Job, Outcome, Pipeline, Placement
from tasks.engines.measuring.session import SessionRunner, Surroundings
from tasks.engines.measuring.workshop import PLAIN_KEY, Workshop, build_job, built_object
from tasks.engines.measuring.zygote import Worker, WorkerDied, WorkerError, WorkerOptions, Zygote
from tasks.errors import EngineError, TargetError
from tasks.records import (
    EngineInfo,
    FusedModule,
    FusedSubgraph,
    ImportedModule,
    Latency,
    MeasureSettings,
    Session,
    SessionResult,
    Target,
    TuningTask,
)

#: Bytes that one floating-point operation is worth when tasks are ordered before anything is measured:
#: a core does some ten operations in the time that it moves a byte from memory.
_FLOPS_PER_BYTE = 10.0
#: Artifacts that are kept ready to run: a race has three.
_MOST_EXECUTORS = 4


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


@dataclass(frozen=True)
class KernelPart:
    """A scheduled kernel of the artifact: its names, and what a builder needs to compile it.

    ``plain``: the same without any schedule, where a default schedule is what cannot be built.
    """

    workload_key: str
    candidate_key: str
    part: Callable[[], Mapping[str, Any]]
    plain: Callable[[], Mapping[str, Any]] | None = None


class MeasuringEngine(ABC):
    """Serves requests one at a time; keeps searches, compiled kernels and executors warm.

    The zygote must have the roles ``build``, ``run`` and ``execute``.
    """

    def __init__(self, options: EngineOptions, zygote: Zygote, target: Target) -> None:
        self._options = options
        self._zygote = zygote
        self._target = target
        self._scratch = Path(options.scratch)
        self._kept: dict[str, list[tuple[float, str]]] = {}
        self._executors: dict[str, Worker] = {}
        self._pipeline: tuple[MeasureSettings, Pipeline] | None = None
        self._lock = DeviceLock(options.device)

    @abstractmethod
    def describe(self) -> EngineInfo:
        """See Engine."""

    @abstractmethod
    def _workload_text(self, imported: ImportedModule, workload_key: str) -> str:
        """The IR of a workload of the model, as tasks name it by a file."""

    @abstractmethod
    def _workshop(self) -> Workshop:
        """What sessions ask."""

    @abstractmethod
    def _device_exists(self, device: str) -> bool:
        """Is TVM's ``device`` on this machine?"""

    @abstractmethod
    def _learn(self, folder: Path) -> None:
        """Take in what earlier sessions have learned."""

    @abstractmethod
    def _teach(self, path: Path) -> None:
        """Write what this session has learned to ``path``, if anything."""

    def extract(self, fused: FusedModule, out_dir: str) -> tuple[TuningTask, ...]:
        """See Engine."""
        keys: dict[str, list[FusedSubgraph]] = {}
        for subgraph in fused.subgraphs:
            keys.setdefault(fused.tuned_key(subgraph), []).append(subgraph)
        work = {key: sum(_work(subgraph) for subgraph in group) for key, group in keys.items()}
        total = sum(work.values()) or 1.0
        tasks = []
        for key in sorted(keys, key=lambda key: (-work[key], key)):
            path = Path(out_dir) / f"{key}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._workload_text(fused.imported, key))
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
        """See Engine."""
        self._require_device()
        self._lock.acquire(session.run_id)
        info = self.describe()
        around = Surroundings(
            engine=info.engine, tvm_version=info.tvm_version, target_key=self._target.key,
            device=self._options.device, host=socket.gethostname(), scratch=self._scratch,
        )  # fmt: skip
        runner = SessionRunner(self._pipeline_for(session.settings), around, self._workshop(), self._kept)
        if not session.samples_dir:
            return runner.run(session, emit, stop)
        folder = Path(session.samples_dir)
        self._learn(folder)
        result = runner.run(session, emit, stop)
        self._teach(folder / f"{session.session_id}.npz")
        return result

    def execute(self, request: ExecutionRequest) -> Latency:
        """See Engine."""
        self._require_device()
        folder = str(Path(request.artifact_dir).resolve())
        for gone in [path for path in self._executors if not Path(path).exists()]:
            self._executors.pop(gone).kill()
        worker = self._executors.get(folder)
        if worker is None:
            # Each holds an artifact and its memory on the device, and an agent's engine lives for days.
            while len(self._executors) >= _MOST_EXECUTORS:
                self._executors.pop(next(iter(self._executors))).kill()
            options = {"artifact_dir": folder, "device": self._options.device.split("-")[0]}
            worker = self._zygote.spawn(WorkerOptions("execute", options, self._cores()))
            self._executors[folder] = worker
        try:
            worker.submit(
                {
                    "inputs_path": request.inputs_path,
                    "outputs_path": request.outputs_path,
                    "repeats": request.repeats,
                    "profile_path": request.profile_path,
                    "roof_path": request.roof_path,
                }
            )
            return Latency(tuple(worker.result()))
        except (WorkerError, WorkerDied) as error:
            self._executors.pop(folder).kill()
            raise EngineError(f"the artifact in {folder} does not run: {error}") from error

    def is_healthy(self) -> bool:
        """Is all here that requests need? A child that is not must end, so that it is replaced."""
        return self._zygote.is_alive()

    def close(self) -> None:
        """Ends all workers and gives the device back."""
        if self._pipeline is not None:
            self._pipeline[1].close()
        for worker in self._executors.values():
            worker.kill()
        self._lock.release()
        self._zygote.close()

    def _compile_kernels(self, kernels: Sequence[KernelPart]) -> dict[str, str]:
        """Object files by workload key: those that were measured and kept, the others compiled in parallel.

        Raises EngineError.
        """
        objects: dict[str, str] = {}
        failures = self._build_kernels([(k.workload_key, k.candidate_key, k.part) for k in kernels], objects)
        plain = [(k.workload_key, PLAIN_KEY, k.plain) for k in kernels if k.workload_key in failures and k.plain]
        for key, _, _ in plain:
            del failures[key]
        failures |= self._build_kernels(plain, objects)
        for key, message in failures.items():
            raise EngineError(f"the kernel {key} cannot be built: {message}")
        return objects

    def _build_kernels(
        self, kernels: Sequence[tuple[str, str, Callable[[], Mapping[str, Any]]]], objects: dict[str, str]
    ) -> dict[str, str]:
        """Add the objects of ``kernels``, each its two keys and its part; why others failed, by workload key."""
        jobs = []
        for workload_key, candidate_key, part in kernels:
            path = built_object(self._scratch, workload_key, candidate_key)
            if path:
                objects[workload_key] = path
                continue
            build = build_job(part(), self._scratch, workload_key, candidate_key)
            jobs.append(Job(workload_key, build, {}))
        failures: dict[str, str] = {}

        def on_outcome(outcome: Outcome) -> None:
            if outcome.failure is None:
                objects[outcome.key] = outcome.path
            else:
                failures[outcome.key] = outcome.failure.message

        settings = self._pipeline[0] if self._pipeline else MeasureSettings()
        self._pipeline_for(settings).measure(jobs, lambda _: None, on_outcome)
        return failures

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

    def _cache_bytes(self) -> int:
        """Of the cores that are measured on; 0 for a GPU, whose cache is flushed where a user asks for it."""
        return last_level_cache_bytes(self._cores()[0]) if self._target.kind == "llvm" else 0

    def _device(self) -> str:
        """TVM's name of the device."""
        return "cpu" if self._target.kind == "llvm" else self._options.device

    def _require_device(self) -> None:
        if self._target.kind != "llvm" and not self._device_exists(self._device()):
            raise TargetError(
                f"{self._device()} is not on this machine: nothing can be measured for {self._target.kind} here; "
                "start an agent where the device is"
            )


def _work(subgraph: FusedSubgraph) -> float:
    """A guess at a subgraph's share of the run time, before anything is measured."""
    return subgraph.weight * (subgraph.flops + _FLOPS_PER_BYTE * subgraph.bytes_moved)
