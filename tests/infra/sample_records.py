"""Made-up records for the tests of infra: the smallest that are complete."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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

TARGET = Target("llvm", '{"kind": "llvm"}', "cpu-abc", 2)
ENGINE = EngineInfo("relax", "0.27.0", "3.11.7", TARGET, "cpu:0", {"apache-tvm": "0.27.0"})


def model() -> ModelFile:
    """A model with one image as its input."""
    image = TensorSpec("image", (1, 3, 48, 192), "float32")
    scores = TensorSpec("scores", (1, 2), "float32")
    return ModelFile("cls.onnx", "cls", "d" * 64, "/tmp/cls.onnx", "/tmp/cls0.onnx", (image,), (scores,), 13)


def subgraph(number: int = 0, **changes: Any) -> FusedSubgraph:
    """A fused conv, add, relu whose name and key tell its number."""
    channels = 16 * (number + 1)
    made = FusedSubgraph(
        name=f"fused_conv2d_add_relu{number}",
        workload_key=f"workload{number}",
        anchor_key=f"anchor{number}",
        operators=("conv2d", "add", "relu"),
        anchor_operator="conv2d",
        inputs=(
            TensorSpec("data", (1, channels, 24, 96), "float32"),
            TensorSpec("weight", (channels, channels, 3, 3), "float32"),
        ),
        outputs=(TensorSpec("out", (1, channels, 24, 96), "float32"),),
        anchor_output_dtype="float32",
        output_dtype="float32",
        flops=2e6 * (number + 1),
        bytes_moved=100_000 * (number + 1),
        weight=1 + number % 3,
    )
    return replace(made, **changes)


def task(number: int = 0) -> TuningTask:
    """The tuning task of ``subgraph(number)``."""
    graph = subgraph(number)
    return TuningTask(
        workload_key=graph.workload_key,
        name=graph.name,
        target_key=TARGET.key,
        weight=graph.weight,
        flops=graph.flops,
        bytes_moved=graph.bytes_moved,
        expected_share=0.1,
        workload_path="/tmp/w.json",
        subgraph=graph,
    )


def record(trial: int = 0, latency_us: float | None = 100.0, **changes: Any) -> TuningRecord:
    """A measured trial, or a failed build where ``latency_us`` is None."""
    measured = (
        None
        if latency_us is None
        else Measurement((latency_us, latency_us * 1.1, latency_us * 0.9), MeasureSettings(), 0.4, 0.2)
    )
    made = TuningRecord(
        record_id=f"r-{trial}",
        run_id="run",
        session_id="session",
        engine=ENGINE.engine,
        tvm_version=ENGINE.tvm_version,
        target_key=TARGET.key,
        workload_key="workload0",
        task_name="fused_conv2d_add_relu0",
        candidate_key=f"c-{trial}",
        trial=trial,
        phase="search" if trial else "default",
        schedule="[]" if trial else "",
        started_at=1_760_000_000.0 + trial,
        device="cpu:0",
        host="host",
        measurement=measured,
        failure=Failure("build", "no") if measured is None else None,
    )
    return replace(made, **changes)


def fused(subgraphs: int, calls: int) -> FusedModule:
    """A residual-like network of ``calls`` kernel calls over ``subgraphs`` distinct subgraphs."""
    info = ImportedModule(model(), ENGINE, {"conv2d": calls}, model().inputs, model().outputs)
    wired = []
    for at in range(calls):
        feeds = tuple(sorted({at - 1, *((at - 5,) if at % 4 == 0 and at >= 5 else ())})) if at else ()
        wired.append(SubgraphCall(subgraph(at % subgraphs).name, feeds))
    return FusedModule(info, "subgraph", tuple(subgraph(n) for n in range(subgraphs)), tuple(wired))


def summary(**changes: Any) -> TuningSummary:
    """A run that made the model of ``model()`` four times as fast."""
    verdict = Verdict(
        correct=True,
        max_abs_error=3e-6,
        tolerance="1e-3 + 1e-3 |reference| (float32)",
        seeds=(0, 1, 2),
        untuned=Latency((8.0, 8.2, 7.9, 8.1)),
        tuned=Latency((2.0, 2.1, 1.9, 2.0)),
        onnxruntime=Latency((1.8, 1.7, 1.9, 1.8)),
        threads=2,
    )
    choices = (SubgraphChoice(subgraph(0).name, "workload0", "r-3", "c-3", 40.0),)
    made = TuningSummary(
        model=model(),
        engine=ENGINE,
        granularity="subgraph",
        tasks=2,
        trials=6,
        reused_records=1,
        failures={"build": 2},
        verdict=verdict,
        published=PublishedVersion("cls", "3", "champion", "run", "file:///store/artifacts/a", "no champion"),
        artifact=Artifact("/tmp/artifact", "a" * 64, 1000, True, choices),
        seconds={"import": 3.0, "tune": 100.0},
    )
    return replace(made, **changes)
