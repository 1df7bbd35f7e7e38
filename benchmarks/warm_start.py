"""Tunes the recogniser with and without the records of other models: trials until the same latency."""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.packaged_model import packaged_model, packaged_shapes
from benchmarks.stock_tuning import child_options, extract_tasks
from tasks.records import TuningRecord, TuningTask
from tests.flows.command import Command, wait_for

#: The latency that both must reach, as a multiple of the one that the cold run ended with.
_SLACK = 1.05


@dataclass(frozen=True)
class WarmStart:
    """Search trials until the goal (``total`` where it was not reached), latencies in microseconds.

    ``drift`` is the warm run's default schedules over the cold run's: how the machine's own speed
    changed between them. ``corrected_trials`` reaches the goal times that.
    """

    goal_us: float
    cold_trials: int
    cold_total: int
    warm_trials: int
    warm_total: int
    reached: bool
    cold_end_us: float
    warm_end_us: float
    warm_first_us: float
    drift: float
    corrected_trials: int


@dataclass(frozen=True)
class _Curve:
    """The model's best latency (us) before the first search trial and after each."""

    latencies_us: tuple[float, ...]

    @property
    def total(self) -> int:
        return len(self.latencies_us) - 1

    def first_below(self, limit_us: float) -> int | None:
        return next((trial for trial, us in enumerate(self.latencies_us) if us <= limit_us), None)


def warm_start(trials: int, others: int, threads: int, seed: int, commands: tuple[Command, Command]) -> WarmStart:
    """Tune the recogniser in the first command's home, and in the second's after the other two models.

    ``trials`` for the recogniser, ``others`` for each of the other models. The two recogniser runs come
    one after the other, since the machine's speed changes with time.
    """
    cold_command, warm_command = commands
    folder = cold_command.home.parent / "tasks"
    folder.mkdir(parents=True)
    tasks, _ = extract_tasks("recogniser", folder, child_options(threads, seed))
    for name in ("classifier", "detector"):
        _tune(warm_command, name, others, seed)
    earlier = warm_command.stored()
    cold = _tune(cold_command, "recogniser", trials, seed)
    warm = _tune(warm_command, "recogniser", trials, seed)
    return _evaluate(tasks, earlier, cold, warm)


def _evaluate(
    tasks: Sequence[TuningTask], earlier: Sequence[TuningRecord], cold: Sequence[TuningRecord],
    warm: Sequence[TuningRecord],
) -> WarmStart:  # fmt: skip
    curves = _curve(tasks, (), cold), _curve(tasks, earlier, warm)
    goal_us = _SLACK * curves[0].latencies_us[-1]
    cold_at, warm_at = (curve.first_below(goal_us) for curve in curves)
    drift = _drift(cold, warm)
    corrected = curves[1].first_below(goal_us * drift)
    assert cold_at is not None, "a run reaches what it ended with"
    return WarmStart(
        goal_us, cold_at, curves[0].total, curves[1].total if warm_at is None else warm_at, curves[1].total,
        warm_at is not None, curves[0].latencies_us[-1], curves[1].latencies_us[-1], curves[1].latencies_us[0],
        drift, curves[1].total if corrected is None else corrected,
    )  # fmt: skip


def _curve(tasks: Sequence[TuningTask], earlier: Sequence[TuningRecord], records: Sequence[TuningRecord]) -> _Curve:
    """Follow the best latencies in the order of measuring; default schedules and earlier records come first."""
    weights = {task.workload_key: task.weight for task in tasks}
    best = dict.fromkeys(weights, float("inf"))

    def take(record: TuningRecord) -> None:
        if record.workload_key in best and record.latency_us is not None:
            best[record.workload_key] = min(best[record.workload_key], record.latency_us)

    def total_us() -> float:
        return sum(weights[key] * us for key, us in best.items())

    for record in (*earlier, *(r for r in records if r.phase == "default")):
        if record.phase != "confirm":
            take(record)
    latencies = [total_us()]
    for record in sorted((r for r in records if r.phase == "search"), key=lambda r: r.started_at):
        take(record)
        latencies.append(total_us())
    return _Curve(tuple(latencies))


def _drift(cold: Sequence[TuningRecord], warm: Sequence[TuningRecord]) -> float:
    """Median ratio, warm over cold, of the default schedules that both runs measured; 1 without any."""
    first, second = (
        {r.workload_key: r.latency_us for r in records if r.phase == "default" and r.latency_us}
        for records in (cold, warm)
    )
    ratios = [second[key] / first[key] for key in first.keys() & second.keys()]
    return statistics.median(ratios) if ratios else 1.0


def _tune(command: Command, name: str, trials: int, seed: int) -> list[TuningRecord]:
    """Run the command until it has searched (what follows adds no search trials); the run's records."""
    before = {record.record_id for record in command.stored()}
    shapes = [f"{key}={','.join(map(str, shape))}" for key, shape in packaged_shapes(name).items()]
    options = [part for shape in shapes for part in ("--shape", shape)]
    started = time.monotonic()
    process = command.start("tune", str(packaged_model(name)), *options, "--trials", str(trials), "--seed", str(seed))
    try:
        status, error = _wait(command, process)
    finally:
        process.kill()
    if status not in (0, 130):
        raise RuntimeError(f"tuning the {name} failed with status {status}:\n{error[-2000:]}")
    wait_for(lambda: not command.processes(), 60, "all processes of the run have ended")
    records = [record for record in command.stored() if record.record_id not in before]
    searched = sum(1 for record in records if record.phase == "search")
    print(f"{name}: {searched} search trials in {time.monotonic() - started:.0f} s", file=sys.stderr)
    return records


def _wait(command: Command, process: subprocess.Popen[str]) -> tuple[int, str]:
    """Stop the command with Ctrl-C once it confirms, read its output meanwhile; its status and stderr."""
    journals = command.home / "journals"
    left = {path.name for path in journals.glob("*.jsonl")}
    asked = False
    while True:
        try:
            _, error = process.communicate(timeout=0.1)
            return process.returncode, error
        except subprocess.TimeoutExpired:
            if not asked and _confirms(journals, left):
                process.send_signal(signal.SIGINT)
                asked = True


def _confirms(journals: Path, left: set[str]) -> bool:
    """Does a journal hold a confirmation's record? The first comes after the last search session.

    ``left`` are journals of earlier runs, which do not count.
    """
    for path in journals.glob("*.jsonl"):
        try:
            if path.name not in left and b'"phase":"confirm"' in path.read_bytes():
                return True
        except FileNotFoundError:
            continue
    return False
