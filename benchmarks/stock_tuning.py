"""Ours against stock MetaSchedule: the same tasks, trials, seeds and threads, task by task in turn.

Both tune the workloads that our extract writes. Stock is one process for all tasks, its time limits
raised since with its defaults it measures nothing; ours is one engine. The order of the two alternates
from task to task. After each task the best schedule of stock and every schedule that once led ours are
timed again together, taking turns, on our runner: only those latencies are compared.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.packaged_model import packaged_model, packaged_shapes
from benchmarks.stock_child import BATCH
from infra.settings import settings
from tasks.engines.child import ChildOptions, EngineChild
from tasks.engines.wire import to_line
from tasks.import_model import import_model_file
from tasks.model_source import fetch
from tasks.records import Measurement, MeasureSettings, Session, TuningRecord, TuningTask, short_hash

_SEARCH_SHARES = ("search", "build_wall", "run_wall")
#: How many times the trials ours may use until it reaches what stock ended with.
_EXTRA = 3
_STOCK_KEY = "stock"


def child_options(threads: int, seed: int, engine: str = "relax") -> ChildOptions:
    """An engine on this machine's first ``threads`` cores."""
    return ChildOptions(engine, settings().python_of(engine), "cpu", f"cpu:0-{threads - 1}", threads, seed)


def extract_tasks(name: str, folder: Path, options: ChildOptions) -> tuple[tuple[TuningTask, ...], str]:
    """The tasks of a packaged model, heaviest (estimated) first, and the target's JSON; workloads go to ``folder``."""
    model = import_model_file(fetch(str(packaged_model(name)), folder), packaged_shapes(name), folder)
    with EngineChild(options) as engine:
        fused = engine.fuse(engine.import_model(model), "subgraph")
        return engine.extract(fused, str(folder / "workloads")), engine.describe().target.spec


class Stock:
    """The stock tuner: starts its process and speaks with it."""

    def __init__(self, target: str, threads: int, log: Path) -> None:
        """Start it and wait until it is ready; ``start_s`` is what that took, ``import_s`` the imports' part."""
        config = json.loads(target)
        config.pop("opt-level", None)  # ours; stock builds at LLVM's level as it comes
        command = [sys.executable, "-m", "benchmarks.stock_child", json.dumps({"target": config, "threads": threads})]
        self._log = log
        started = time.monotonic()
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env={**os.environ, "TVM_NUM_THREADS": str(threads)}, start_new_session=True,
            )  # fmt: skip
        ready = self._reply()
        self.start_s = time.monotonic() - started
        self.import_s = float(ready["import_s"])

    def tune(self, task: TuningTask, trials: int, seed: int, work_dir: Path) -> dict[str, Any]:
        """Tune one task: ``wall_s`` and ``records``. Raises RuntimeError where the process has ended."""
        request = {
            "workload_path": task.workload_path, "trials": trials, "seed": seed, "work_dir": str(work_dir),
        }  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def close(self) -> None:
        """End it with all its workers."""
        for process in [*psutil.Process(self._process.pid).children(recursive=True), self._process]:
            process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _reply(self) -> dict[str, Any]:
        pipe: IO[str] | None = self._process.stdout
        assert pipe is not None
        line = pipe.readline()
        if not line:
            raise RuntimeError(f"the stock tuner has ended:\n{self._log.read_text()[-2000:]}")
        reply: dict[str, Any] = json.loads(line)
        return reply


@dataclass
class TaskRun:
    """What ours did on one task: each record with the wall seconds spent on the task until it came."""

    task: TuningTask
    timeline: list[tuple[float, TuningRecord]] = field(default_factory=list)
    wall_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    exhausted: bool = False

    @property
    def searched(self) -> list[TuningRecord]:
        """The search's records, the default schedule's left out."""
        return [record for _, record in self.timeline if record.phase == "search"]

    def leads(self) -> list[tuple[float, TuningRecord]]:
        """The records that were the fastest when they came, in order."""
        found: list[tuple[float, TuningRecord]] = []
        best_us = float("inf")
        for elapsed_s, record in self.timeline:
            if record.latency_us is not None and record.latency_us < best_us:
                best_us = record.latency_us
                found.append((elapsed_s, record))
        return found


class Ours:
    """Our engine, driven session by session as the tune step does."""

    def __init__(self, options: ChildOptions, folder: Path, seed: int) -> None:
        """Start it and wait until it is ready, which takes ``start_s``."""
        self._folder = folder
        self._seed = seed
        self._sessions = 0
        self._settings = MeasureSettings()
        started = time.monotonic()
        self.engine = EngineChild(options)
        self.engine.describe()
        self.start_s = time.monotonic() - started

    def tune(self, task: TuningTask, trials: int) -> TaskRun:
        """The default schedule first, then ``trials`` trials of search."""
        run = TaskRun(task)
        self._session(run, "default", 0)
        self.search(run, trials)
        return run

    def search(self, run: TaskRun, trials: int) -> None:
        """Go on until the task has ``trials`` search trials or nothing is left to try."""
        while not run.exhausted and (done := len(run.searched)) < trials:
            self._session(run, "search", min(BATCH, trials - done))

    def confirm(self, run: TaskRun, rival: str) -> dict[str, Measurement]:
        """Time every lead of ``run`` and the trace ``rival`` again, taking turns; by candidate key."""
        leads = [record for _, record in run.leads()]
        stock = replace(leads[0], record_id=_STOCK_KEY, candidate_key=_STOCK_KEY, phase="search", schedule=rival)
        return self.time_again(run.task, [*leads, stock])

    def time_again(self, task: TuningTask, known: Sequence[TuningRecord]) -> dict[str, Measurement]:
        """Time the candidates of ``known`` again, taking turns; by candidate key."""
        session = self._prepare(task, "confirm", len(known), known)
        records: list[TuningRecord] = []
        self.engine.tune(replace(session, settings=replace(self._settings, repeat=3)), records.append)
        return {record.candidate_key: record.measurement for record in records if record.measurement}

    def _session(self, run: TaskRun, phase: str, trials: int) -> None:
        started = time.monotonic()
        session = self._prepare(run.task, phase, trials, [record for _, record in run.timeline])

        def on_record(record: TuningRecord) -> None:
            run.timeline.append((run.wall_s + time.monotonic() - started, record))

        before = len(run.timeline)
        result = self.engine.tune(session, on_record)
        run.wall_s += time.monotonic() - started
        run.exhausted = result.exhausted or len(run.timeline) == before
        for what, seconds in result.seconds.items():
            run.seconds[what] = run.seconds.get(what, 0.0) + seconds

    def _prepare(self, task: TuningTask, phase: str, trials: int, known: Sequence[TuningRecord]) -> Session:
        self._sessions += 1
        name = f"bench-{self._sessions:04d}"
        path = self._folder / f"{name}-known.jsonl"
        path.write_text("".join(to_line(record) for record in known))
        return Session(
            session_id=name, run_id="bench", phase=phase, tasks=(task,), trials=trials,
            seed=int(short_hash(self._seed, name, length=7), 16), reason="benchmark", settings=self._settings,
            journal_path=str(self._folder / "journals" / f"{name}.jsonl"), known_path=str(path),
            samples_dir=str(self._folder / "samples"), first_trial=len(known) + 1,
        )  # fmt: skip


@dataclass(frozen=True)
class TaskResult:
    """One task's comparison: the times at equal trials, then the latencies (us) timed again together."""

    name: str
    weight: int
    stock_s: float
    stock_valid: int
    ours_s: float
    ours_valid: int
    cut_short: int
    seconds: dict[str, float]
    stock_us: Measurement
    ours_us: Measurement
    #: Wall seconds on the task when each record came, the default schedule's first.
    elapsed_s: tuple[float, ...]
    #: Those records that led: their place among the records, and their latency timed again.
    leads: tuple[tuple[int, float], ...]

    @property
    def reached_s(self) -> float | None:
        """Wall seconds until a lead of ours was as fast as what stock ended with, None if none was."""
        limit_us = self.stock_us.latency_us
        return next((self.elapsed_s[at] for at, us in self.leads if us <= limit_us), None)

    @property
    def ratio(self) -> float:
        """Ours over stock in valid measurements a minute, the start-up of both left out."""
        return (self.ours_valid / self.ours_s) / (self.stock_valid / self.stock_s)


@dataclass(frozen=True)
class Comparison:
    """All tasks and both start-ups, in seconds."""

    tasks: tuple[TaskResult, ...]
    stock_start_s: float
    stock_import_s: float
    ours_start_s: float
    builders: int

    @property
    def stock_s(self) -> float:
        """Stock's wall seconds."""
        return self.stock_start_s + sum(task.stock_s for task in self.tasks)

    @property
    def ours_s(self) -> float:
        """Our wall seconds for the same number of trials."""
        return self.ours_start_s + sum(task.ours_s for task in self.tasks)

    @property
    def valid_per_min(self) -> float:
        """Our valid measurements a minute; the default schedules cost time and are not counted."""
        return 60 * sum(task.ours_valid for task in self.tasks) / self.ours_s

    @property
    def stock_valid_per_min(self) -> float:
        """Stock's valid measurements a minute."""
        return 60 * sum(task.stock_valid for task in self.tasks) / self.stock_s

    @property
    def stock_final_us(self) -> float:
        """What stock ended with: the weighted sum of latencies."""
        return sum(task.weight * task.stock_us.latency_us for task in self.tasks)

    @property
    def ours_final_us(self) -> float:
        """What ours ended with."""
        return sum(task.weight * task.ours_us.latency_us for task in self.tasks)

    @property
    def secs_to_stock_final(self) -> float | None:
        """Wall seconds until ours was as fast as stock's end in every single task; None if never."""
        reached = [task.reached_s for task in self.tasks if task.reached_s is not None]
        return self.ours_start_s + sum(reached) if len(reached) == len(self.tasks) else None

    @property
    def secs_to_stock_sum(self) -> float | None:
        """Wall seconds until the weighted sum was, with the same number of trials on each task."""
        for trial in sorted({lead[0] for task in self.tasks for lead in task.leads}):
            total_us, spent_s = 0.0, self.ours_start_s
            for task in self.tasks:
                total_us += task.weight * min((us for at, us in task.leads if at <= trial), default=float("inf"))
                spent_s += task.elapsed_s[min(trial, len(task.elapsed_s) - 1)]
            if total_us <= self.stock_final_us:
                return spent_s
        return None

    def shares(self) -> dict[str, float]:
        """Shares of our wall time. Idle: a builder that waits for the last one of its batch."""
        spent = {key: sum(task.seconds.get(key, 0.0) for task in self.tasks) for key in (*_SEARCH_SHARES, "build")}
        busy_s = min(spent["build"] / self.builders, spent["build_wall"])
        own_s = self.ours_s - self.ours_start_s - sum(spent[key] for key in _SEARCH_SHARES)
        parts = {
            "start-up": self.ours_start_s, "search": spent["search"], "build": busy_s,
            "run": spent["run_wall"], "idle": spent["build_wall"] - busy_s, "own overhead": own_s,
        }  # fmt: skip
        return {name: seconds / self.ours_s for name, seconds in parts.items()}

    def ratio_spread(self) -> tuple[float, float, float]:
        """Median, least and greatest ratio over the tasks."""
        ratios = [task.ratio for task in self.tasks]
        return statistics.median(ratios), min(ratios), max(ratios)


def compare(count: int, trials: int, threads: int, seed: int, folder: Path) -> Comparison:
    """Tune the classifier's ``count`` heaviest tasks with both, ``trials`` trials each."""
    options = child_options(threads, seed)
    found, target = extract_tasks("classifier", folder, options)
    stock = Stock(target, threads, folder / "stock.log")
    try:
        ours = Ours(options, folder, seed)
        try:
            results = []
            for number, task in enumerate(found[:count]):
                results.append(_compare_task(number, task, trials, (stock, ours, seed, folder)))
                _say(results[-1])
        finally:
            ours.engine.close()
    finally:
        stock.close()
    cores = len(os.sched_getaffinity(0))
    return Comparison(tuple(results), stock.start_s, stock.import_s, ours.start_s, cores - threads or threads)


def _compare_task(number: int, task: TuningTask, trials: int, both: tuple[Stock, Ours, int, Path]) -> TaskResult:
    stock, ours, seed, folder = both
    run = ours.tune(task, trials) if number % 2 else None
    theirs = stock.tune(task, trials, seed + number + 1, folder / f"stock-{number}")
    run = run or ours.tune(task, trials)
    valid = [record for record in theirs["records"] if record["latency_us"] is not None]
    if not valid:
        raise RuntimeError(f"stock has no valid measurement of {task.name}: nothing to compare with")
    best = min(valid, key=lambda record: record["latency_us"])["trace"]
    measured = [record.measurement for record in run.searched if record.measurement]
    spent = {
        "name": task.name, "weight": task.weight, "stock_s": theirs["wall_s"], "stock_valid": len(valid),
        "ours_s": run.wall_s, "ours_valid": len(measured), "seconds": dict(run.seconds),
        "cut_short": sum(1 for measurement in measured if measurement.cut_short),
    }  # fmt: skip
    result = TaskResult(**spent, **_timed_again(ours, run, best))
    seen = len(run.leads())
    while result.reached_s is None and not run.exhausted and len(run.searched) < _EXTRA * trials:
        ours.search(run, min(_EXTRA * trials, len(run.searched) + BATCH))
        if len(run.leads()) > seen:
            seen = len(run.leads())
            result = TaskResult(**spent, **{**_timed_again(ours, run, best), "ours_us": result.ours_us})
    return result


def _timed_again(ours: Ours, run: TaskRun, best: str) -> dict[str, Any]:
    """Stock's best, ours and all that led before it, timed together: fields of a TaskResult."""
    leads = [record for _, record in run.leads()]
    again = ours.confirm(run, best) if leads else {}
    if _STOCK_KEY not in again or leads[-1].candidate_key not in again:
        raise RuntimeError(f"the best schedules of {run.task.name} cannot be timed again")
    place = {record.record_id: index for index, (_, record) in enumerate(run.timeline)}
    points = [(record, again[record.candidate_key]) for record in leads if record.candidate_key in again]
    return {
        "stock_us": again[_STOCK_KEY], "ours_us": again[leads[-1].candidate_key],
        "elapsed_s": tuple(elapsed_s for elapsed_s, _ in run.timeline),
        "leads": tuple((place[record.record_id], measurement.latency_us) for record, measurement in points),
    }  # fmt: skip


def _say(result: TaskResult) -> None:
    print(
        f"{result.name}: ours {result.ours_valid} valid in {result.ours_s:.1f} s, "
        f"stock {result.stock_valid} in {result.stock_s:.1f} s; "
        f"{result.ours_us.latency_us:.1f} us against {result.stock_us.latency_us:.1f} us",
        file=sys.stderr,
    )
