"""The step that looks inside the finished model: where a run's time goes, how near the machine's limits it is.

For people only: where it cannot be done the run goes on, and says why.
"""

from __future__ import annotations

import json
import logging
import platform
from collections import Counter
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.engines.interface import ExecutionRequest
from tasks.errors import TunewrightError
from tasks.outputs import SEEDS, write_inputs
from tasks.records import Artifact, EngineInfo, FusedModule, KernelTime, Profile, Roof
from tasks.run import TuningRun, run_of

logger = logging.getLogger("tunewright")

#: Runs that are watched kernel by kernel.
_WATCHED_RUNS = 9


@task(cache_policy=NO_CACHE)
def look_inside(run_id: str, fused: FusedModule, artifact: Artifact) -> tuple[Profile | None, Roof | None]:
    """The profile of ``artifact`` and the machine's limits; None for what this engine or target cannot tell."""
    run = run_of(run_id)
    inputs_path = str(write_inputs(run, fused.imported.model, SEEDS[0]))
    path = run.work_dir / "profile.json"
    try:
        run.executor.execute(ExecutionRequest(artifact.path, inputs_path, _WATCHED_RUNS, profile_path=str(path)))
        profile = read_profile(path, fused, artifact) if path.exists() else None
        return profile, _roof(run, fused, artifact, inputs_path)
    except (TunewrightError, OSError, ValueError, KeyError) as error:
        logger.warning("no look inside the finished model: %s", error)
        run.notes.append(f"no profile of the finished model: {error}")
        return None, None


def read_profile(path: Path, fused: FusedModule, artifact: Artifact) -> Profile:
    """An engine's profile, its kernels named as the subgraphs are. Raises ValueError."""
    told = json.loads(path.read_text())
    names = {subgraph.workload_key: subgraph.name for subgraph in fused.subgraphs}
    alone = {choice.workload_key: choice.latency_us for choice in artifact.choices}
    spent_us: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for call in told["calls"]:
        key = call["workload_key"] or call["function"]
        spent_us[key] += call["us"]
        calls[key] += 1
    kernels = []
    for key, us in spent_us.most_common():
        once_us = alone.get(key)
        alone_us = None if once_us is None else once_us * calls[key]
        kernels.append(KernelTime(names.get(key, key), key, calls[key], us, alone_us))
    outside_us = max(0.0, told["whole_us"] - sum(spent_us.values()))
    return Profile(tuple(kernels), outside_us, told["whole_us"])


def _roof(run: TuningRun, fused: FusedModule, artifact: Artifact, inputs_path: str) -> Roof | None:
    """The limits of this machine: measured once a target, and again where a kernel has exceeded them."""
    info = fused.imported.engine
    kept = run.home / "roofs" / f"{platform.node()}-{info.target.key}.json"
    known = _read_roof(kept, info)
    if known is not None and _fastest_flops_per_s(fused, artifact) <= known.flops_per_s:
        return known
    path = run.work_dir / "roof.json"
    run.executor.execute(ExecutionRequest(artifact.path, inputs_path, 1, roof_path=str(path)))
    found = _read_roof(path, info)
    if found is None:
        return None
    if known is not None:  # the better of two measurements is nearer to what the machine can do
        found = Roof(
            max(found.flops_per_s, known.flops_per_s), max(found.bytes_per_s, known.bytes_per_s),
            max(found.cache_bytes_per_s, known.cache_bytes_per_s), info.device, info.target.threads,
        )  # fmt: skip
    kept.parent.mkdir(parents=True, exist_ok=True)
    speeds = {name: getattr(found, name) for name in ("flops_per_s", "bytes_per_s", "cache_bytes_per_s")}
    kept.write_text(json.dumps(speeds) + "\n")
    return found


def _read_roof(path: Path, info: EngineInfo) -> Roof | None:
    if not path.exists():
        return None
    try:
        told = json.loads(path.read_text())
        return Roof(
            float(told["flops_per_s"]), float(told["bytes_per_s"]), float(told["cache_bytes_per_s"]),
            info.device, info.target.threads,
        )  # fmt: skip
    except (ValueError, KeyError, TypeError):
        return None  # cut by a power failure: it is measured again


def _fastest_flops_per_s(fused: FusedModule, artifact: Artifact) -> float:
    flops = {subgraph.workload_key: subgraph.flops for subgraph in fused.subgraphs}
    return max((flops[c.workload_key] / c.latency_us * 1e6 for c in artifact.choices if c.latency_us), default=0.0)
