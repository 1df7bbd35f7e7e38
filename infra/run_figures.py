"""What pictures and reports show of a run, as plain figures: everything comes from its records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from infra.run_tables import TaskLog
from tasks.records import Profile, SubgraphChoice, TuningRecord


@dataclass(frozen=True)
class ModelPoint:
    """The model's latency (us) by its best schedules so far: seconds since the first trial, trials so far."""

    elapsed_s: float
    trials: int
    latency_us: float


@dataclass(frozen=True)
class Dot:
    """A subgraph in the roofline: FLOPs a byte moved, and FLOPs a second before and after tuning."""

    name: str
    intensity: float
    before_flops_per_s: float | None
    after_flops_per_s: float
    share: float


def model_curve(logs: Iterable[TaskLog], run_id: str) -> list[ModelPoint]:
    """The sum of the best latencies so far times their weights, at each trial of ``run_id`` that changed it.

    What earlier runs have measured is where the curve begins; the trials of this run count. It begins when
    every task has a latency; a task that never has one is left out.
    """
    weights = {log.task.workload_key: log.task.weight for log in logs if log.best_us is not None}
    measured = [r for log in logs for r in log.records.values() if r.workload_key in weights]
    best: dict[str, float] = {}
    for record in measured:
        if record.run_id != run_id:
            _improve(best, record)
    own = sorted((r for r in measured if r.run_id == run_id), key=lambda r: r.started_at)
    points: list[ModelPoint] = []
    trials = 0
    for record in own:
        trials += record.phase == "search"
        changed = _improve(best, record)
        if best.keys() == weights.keys() and (changed or not points or record is own[-1]):
            latency_us = sum(weights[key] * us for key, us in best.items())
            points.append(ModelPoint(record.started_at - own[0].started_at, trials, latency_us))
    return points


def roofline_dots(logs: Iterable[TaskLog], choices: Iterable[SubgraphChoice]) -> list[Dot]:
    """One dot a tuned subgraph that does arithmetic, the one that takes most time first."""
    chosen = {choice.workload_key: choice.latency_us for choice in choices}
    found = []
    for log in logs:
        task = log.task
        after_us = chosen.get(task.workload_key) or log.best_us
        if after_us and task.flops > 0 and task.bytes_moved > 0:
            before = task.flops / log.untuned_us * 1e6 if log.untuned_us else None
            found.append((after_us * task.weight, task, before, task.flops / after_us * 1e6))
    total_us = sum(us for us, *_ in found) or 1.0
    dots = [
        Dot(task.name, task.flops / task.bytes_moved, before, after, us / total_us) for us, task, before, after in found
    ]
    return sorted(dots, key=lambda dot: -dot.share)


def profile_rows(profile: Profile) -> list[dict[str, Any]]:
    """One row a kernel of the whole run, the longest first, and one for what is outside of kernels."""
    whole_us = profile.whole_us or 1.0
    rows = [
        {
            "subgraph": kernel.name,
            "calls": kernel.calls,
            "in_run_us": round(kernel.in_run_us, 2),
            "alone_us": None if kernel.alone_us is None else round(kernel.alone_us, 2),
            "share": round(kernel.in_run_us / whole_us, 4),
        }
        for kernel in profile.kernels
    ]
    outside = {"in_run_us": round(profile.outside_us, 2), "share": round(profile.outside_us / whole_us, 4)}
    return [*rows, {"subgraph": "outside of kernels", "calls": None, "alone_us": None, **outside}]


def _improve(best: dict[str, float], record: TuningRecord) -> bool:
    """Whether ``record`` is the best of its workload so far, which ``best`` then says."""
    latency_us = record.latency_us
    if latency_us is None or record.phase == "confirm" or latency_us >= best.get(record.workload_key, float("inf")):
        return False
    best[record.workload_key] = latency_us
    return True
