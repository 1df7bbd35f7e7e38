"""Where a compiled model's time goes: its heaviest kernels, and how near each is to the machine's peak."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tasks.engines.child import EngineChild
from tasks.engines.interface import ExecutionRequest
from tasks.inside import read_profile
from tasks.records import Artifact, FusedModule

_WATCHED_RUNS = 9
_HEAVIEST = 3


@dataclass(frozen=True)
class Heavy:
    """A subgraph, its share of the run, and its share of the machine's float32 FLOP/s."""

    name: str
    calls: int
    share: float
    peak_share: float


@dataclass(frozen=True)
class Inside:
    """The share of a run that is spent inside kernels, and the heaviest of them."""

    kernel_share: float
    heaviest: tuple[Heavy, ...]


def look_inside(
    engine: EngineChild, fused: FusedModule, artifact: Artifact, inputs_path: Path, peak_flops: float
) -> Inside:
    """Watch some runs of ``artifact`` kernel by kernel."""
    path = Path(artifact.path).with_suffix(".profile.json")
    engine.execute(ExecutionRequest(artifact.path, str(inputs_path), _WATCHED_RUNS, profile_path=str(path)))
    profile = read_profile(path, fused, artifact)
    flops = {subgraph.workload_key: subgraph.flops for subgraph in fused.subgraphs}
    kernels_us = sum(kernel.in_run_us for kernel in profile.kernels)
    heaviest = tuple(
        Heavy(
            kernel.name, kernel.calls, kernel.in_run_us / kernels_us,
            flops.get(kernel.workload_key, 0.0) * kernel.calls / kernel.in_run_us * 1e6 / peak_flops,
        )
        for kernel in profile.kernels[:_HEAVIEST]
    )  # fmt: skip
    return Inside(min(1.0, kernels_us / profile.whole_us), heaviest)
