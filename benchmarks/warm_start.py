"""Tunes the recogniser with and without the records of other models: trials until the same latency."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.packaged_model import packaged_model, packaged_shapes
from benchmarks.stock_tuning import Ours, child_options, extract_tasks
from tasks.records import TuningRecord, TuningTask
from tests.flows.command import Command, wait_for

#: The goal is this share of what the cold run gained over the default schedules.
_GAIN_SHARE = 0.9


@dataclass(frozen=True)
class WarmStart:
    """Search trials until the goal (``total`` where it was not reached), latencies in microseconds.

    All latencies are timed again after both runs, taking turns: ``default_us`` is what both started with,
    ``cold_end_us`` and ``warm_end_us`` what they ended with, ``warm_first_us`` what the warm run had before
    its first trial.
    """

    goal_us: float
    cold_trials: int
    cold_total: int
    warm_trials: int
    warm_total: int
    reached: bool
    default_us: float
    cold_end_us: float
    warm_first_us: float
    warm_end_us: float


#: What was measured before a run, and by it.
_Run = tuple[Sequence[TuningRecord], Sequence[TuningRecord]]


@dataclass(frozen=True)
class _Curve:
    """The model's best latency (us) before the first search trial and after each."""

    latencies_us: tuple[float, ...]

    @property
    def total(self) -> int:
        return len(self.latencies_us) - 1

    def first_below(self, limit_us: float) -> int | None:
        return next((trial for trial, us in enumerate(self.latencies_us) if us <= limit_us), None)


@dataclass(frozen=True)
class Plan:
    """``trials`` for the recogniser, ``others`` for each of the other models, with which engine."""

    trials: int
    others: int
    seed: int
    engine: str


def warm_start(plan: Plan, threads: int, commands: tuple[Command, Command]) -> WarmStart:
    """Tune the recogniser in the first command's home, and in the second's after the other two models.

    The two recogniser runs come one after the other, since the machine's speed changes with time.
    """
    cold_command, warm_command = commands
    folder = cold_command.home.parent / "tasks"
    folder.mkdir(parents=True)
    options = child_options(threads, plan.seed, plan.engine)
    tasks, _ = extract_tasks("recogniser", folder, options)
    for name in ("classifier", "detector"):
        _tune(warm_command, name, plan.others, plan)
    earlier = warm_command.stored()
    cold: _Run = (), _tune(cold_command, "recogniser", plan.trials, plan)
    warm: _Run = earlier, _tune(warm_command, "recogniser", plan.trials, plan)
    ours = Ours(options, folder, plan.seed)
    try:
        return _evaluate(ours, tasks, cold, warm)
    finally:
        ours.engine.close()


def _evaluate(ours: Ours, tasks: Sequence[TuningTask], cold: _Run, warm: _Run) -> WarmStart:
    weights = {task.workload_key: task.weight for task in tasks}
    times_us: dict[tuple[str, str], float] = {}
    for task in tasks:
        leads = {record.candidate_key: record for run in (cold, warm) for record in _leads(task.workload_key, run)}
        again = ours.time_again(task, list(leads.values()))
        times_us |= {(task.workload_key, key): measurement.latency_us for key, measurement in again.items()}
    first, second = (_curve(weights, times_us, run) for run in (cold, warm))
    default_us, cold_end_us = first.latencies_us[0], first.latencies_us[-1]
    goal_us = default_us - _GAIN_SHARE * (default_us - cold_end_us)
    cold_at, warm_at = first.first_below(goal_us), second.first_below(goal_us)
    assert cold_at is not None, "a run reaches what it ended with"
    return WarmStart(
        goal_us, cold_at, first.total, second.total if warm_at is None else warm_at, second.total,
        warm_at is not None, default_us, cold_end_us, second.latencies_us[0], second.latencies_us[-1],
    )  # fmt: skip


def _leads(workload_key: str, run: _Run) -> list[TuningRecord]:
    """The records of a workload that were the fastest when they came: default schedule, earlier ones, search."""
    best_us = float("inf")
    found = []
    for record in _in_order(run):
        if record.workload_key == workload_key and record.latency_us is not None and record.latency_us < best_us:
            best_us = record.latency_us
            found.append(record)
    return found


def _in_order(run: _Run) -> list[TuningRecord]:
    """What a run knew before its search, then its search's records as they came; no confirmations."""
    earlier, own = run
    known = [*(r for r in own if r.phase == "default"), *(r for r in earlier if r.phase != "confirm")]
    return [*known, *sorted((r for r in own if r.phase == "search"), key=lambda record: record.started_at)]


def _curve(weights: Mapping[str, int], times_us: Mapping[tuple[str, str], float], run: _Run) -> _Curve:
    """The model's latency with the best lead so far of each task, as timed again, before the search and after each."""
    leads = {record.record_id for key in weights for record in _leads(key, run)}
    best = dict.fromkeys(weights, float("inf"))
    latencies: list[float] = []
    searched = {record.record_id for record in run[1] if record.phase == "search"}
    for record in _in_order(run):
        if record.record_id in searched and not latencies:
            latencies.append(_total_us(weights, best))
        if record.record_id in leads:
            again_us = times_us.get((record.workload_key, record.candidate_key), float("inf"))
            best[record.workload_key] = min(best[record.workload_key], again_us)
        if record.record_id in searched:
            latencies.append(_total_us(weights, best))
    return _Curve(tuple(latencies))


def _total_us(weights: Mapping[str, int], best: Mapping[str, float]) -> float:
    return sum(weights[key] * us for key, us in best.items())


def _tune(command: Command, name: str, trials: int, plan: Plan) -> list[TuningRecord]:
    """Run the command until it has searched (what follows adds no search trials); the run's records."""
    before = {record.record_id for record in command.stored()}
    shapes = [f"{key}={','.join(map(str, shape))}" for key, shape in packaged_shapes(name).items()]
    options = ["--engine", plan.engine, "--trials", str(trials), "--seed", str(plan.seed)]
    options += [part for shape in shapes for part in ("--shape", shape)]
    started = time.monotonic()
    process = command.start("tune", str(packaged_model(name)), *options)
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
