"""A tuning run that nobody measured: as many tasks and trials as one likes, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tasks.records import (
    Artifact,
    EngineInfo,
    Failure,
    FusedModule,
    FusedSubgraph,
    ImportedModule,
    Latency,
    Measurement,
    MeasureSettings,
    ModelFile,
    PublishedVersion,
    SubgraphCall,
    SubgraphChoice,
    Target,
    TensorSpec,
    TuningRecord,
    TuningSummary,
    TuningTask,
    Verdict,
)

TARGET = Target("llvm", '{"kind": "llvm"}', "cpu-made-up", 2)
VERSIONS = {"apache-tvm": "0.27.0", "onnxruntime": "1.26.0"}
ENGINE = EngineInfo("relax", "0.27.0", "3.11.7", TARGET, "cpu:0-1", VERSIONS)
MODEL = "made-up"
#: Trials in a session, as the plan gives them.
SESSION = 16
_KINDS = (("conv2d", "add", "relu"), ("dense", "add"), ("depthwise_conv2d", "add", "relu6"), ("softmax",))
_FAILED = (("build_timeout", 0.03), ("run", 0.02), ("wrong_output", 0.01))


@dataclass(frozen=True)
class MadeUpRun:
    """``seed`` decides about every figure, ``began`` (Unix time) and ``run_id`` about names and times."""

    run_id: str
    tasks: int
    trials: int
    seed: int
    began: float

    def subgraph(self, number: int) -> FusedSubgraph:
        """The subgraph with this number, the heaviest first."""
        operators = _KINDS[number % len(_KINDS)]
        channels = 16 * (1 + number % 8)
        image = TensorSpec("data", (1, channels, 28, 28), "float32")
        return FusedSubgraph(
            name=f"fused_{'_'.join(operators)}_{number}", workload_key=f"{number:016x}", anchor_key=f"a{number:015x}",
            operators=operators, anchor_operator=operators[0], inputs=(image,), outputs=(image,),
            anchor_output_dtype="float32", output_dtype="float32", flops=4e7 / (1 + number), bytes_moved=800_000,
            weight=1 + number % 3,
        )  # fmt: skip

    def task(self, number: int) -> TuningTask:
        """Its tuning task."""
        graph = self.subgraph(number)
        return TuningTask(
            workload_key=graph.workload_key, name=graph.name, target_key=TARGET.key, weight=graph.weight,
            flops=graph.flops, bytes_moved=graph.bytes_moved, expected_share=1 / self.tasks, workload_path="",
            subgraph=graph,
        )  # fmt: skip

    def fused(self) -> FusedModule:
        """All subgraphs, one call after the other."""
        inside = ImportedModule(self.model(), ENGINE, {}, self.model().inputs, self.model().outputs)
        calls = tuple(
            SubgraphCall(self.subgraph(n % self.tasks).name, (n - 1,) if n else ()) for n in range(2 * self.tasks)
        )
        return FusedModule(inside, "subgraph", tuple(self.subgraph(n) for n in range(self.tasks)), calls)

    def model(self) -> ModelFile:
        """The model that the tasks are of."""
        x, y = TensorSpec("x", (1, 3, 224, 224), "float32"), TensorSpec("y", (1, 1000), "float32")
        return ModelFile(f"{MODEL}.onnx", MODEL, "d" * 64, "", "", (x,), (y,), 17)

    def records(self, number: int) -> Iterator[TuningRecord]:
        """The task's records in order: the default schedule, the search."""
        # From seed to seed one task in six ends elsewhere; the others differ by noise only.
        fate = random.Random(f"{self.seed if number % 6 == 0 else 0}-{number}")
        dice = random.Random(f"{self.run_id}-{number}")
        default_us = 4000.0 / (1 + number) ** 0.7
        floor_us = default_us * fate.uniform(0.15, 0.7)
        rate = fate.uniform(0.5, 3.0) / max(1, self.trials / 6)
        for trial in range(self.trials):
            reached = floor_us + (default_us - floor_us) * 2.718 ** (-rate * trial)
            latency_us = default_us if trial == 0 else reached * dice.lognormvariate(0.12, 0.15)
            yield self._record(number, trial, latency_us, dice)

    def summary(self, best_us: dict[str, tuple[str, float]]) -> TuningSummary:
        """How the run ended; ``best_us`` is the best record's id and latency by workload."""
        dice = random.Random(self.seed)
        tuned = sum(self.task(n).weight * best_us[self.task(n).workload_key][1] for n in range(self.tasks)) / 1e3
        untuned = sum(self.task(n).weight * 4.0 / (1 + n) ** 0.7 for n in range(self.tasks))
        choices = tuple(
            SubgraphChoice(t.name, t.workload_key, best_us[t.workload_key][0], "", best_us[t.workload_key][1])
            for t in map(self.task, range(self.tasks))
        )
        verdict = Verdict(
            True, 4e-6, "float32: 0.0001 + 0.001 * |expected|", (0, 1, 2), _latency(untuned, dice),
            _latency(tuned, dice), _latency(1.1 * tuned, dice), 2,
        )  # fmt: skip
        return TuningSummary(
            model=self.model(), engine=ENGINE, granularity="subgraph", tasks=self.tasks,
            trials=self.tasks * (self.trials - 1), reused_records=0, failures={}, verdict=verdict,
            published=PublishedVersion(MODEL, "", "", "", "", "nothing was built"),
            artifact=Artifact("", "a" * 64, 1, True, choices), seconds={"total": 3600.0},
        )  # fmt: skip

    def _record(self, number: int, trial: int, latency_us: float, dice: random.Random) -> TuningRecord:
        kind = next((kind for kind, share in _FAILED if dice.random() < share and trial), None)
        repeats = tuple(latency_us * dice.lognormvariate(0.0, 0.01) for _ in range(5))
        task = self.task(number)
        made = TuningRecord(
            record_id=f"{self.run_id[-6:]}{number:04x}{trial:06x}", run_id=self.run_id,
            session_id=f"{self.run_id}-{number:03d}-{trial // SESSION:04d}", engine=ENGINE.engine,
            tvm_version=ENGINE.tvm_version, target_key=TARGET.key, workload_key=task.workload_key,
            task_name=task.name, candidate_key=f"{self.seed}c{number:x}-{trial}", trial=trial,
            phase="search" if trial else "default", schedule='[["made up"]]' if trial else "",
            started_at=self.began + trial * 0.2 + number * 1e-3, device="cpu:0-1", host="made-up",
            measurement=Measurement(repeats, MeasureSettings(), 0.4, 0.2),
            predicted_us=latency_us * 1.05 if trial else None,
        )  # fmt: skip
        return replace(made, measurement=None, failure=Failure(kind, "made up")) if kind else made


def _latency(median_ms: float, dice: random.Random) -> Latency:
    return Latency(tuple(median_ms * dice.lognormvariate(0.0, 0.01) for _ in range(9)))
