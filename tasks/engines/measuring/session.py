"""Runs one session: proposes candidates, has them measured, and writes each outcome down.

What a candidate is and how it is compiled is the engine's: it gives a ``Workshop``. Free of any TVM
version. Standard library only, Python 3.10.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tasks.engines.interface import DEFAULT_SCHEDULES, best_first
from tasks.engines.measuring.journal import Journal, read_journal
from tasks.engines.measuring.pipeline import Job, Outcome, Pipeline, never
from tasks.engines.measuring.workshop import (
    BATCH,
    DEFAULT_KEY,
    Candidate,
    Search,
    Workshop,
    build_job,
    built_object,
)
from tasks.errors import StoreError
from tasks.records import (
    Failure,
    Measurement,
    Session,
    SessionResult,
    TuningRecord,
    TuningTask,
    short_hash,
)

#: Default schedules that are built before the first of them is measured.
_FIRST_BATCH = 4
#: How often the best candidates are timed again in a confirmation, taking turns.
_CONFIRM_ROUNDS = 3
#: Built candidates of a workload that are kept for confirmation and for the artifact.
_KEPT_OBJECTS = 4
#: A default schedule within this ratio of the best is confirmed too: noise might have hidden that it wins.
_NEAR_RATIO = 2.0


@dataclass(frozen=True)
class Surroundings:
    """What all sessions of an engine share."""

    engine: str
    tvm_version: str
    target_key: str
    device: str
    host: str
    scratch: Path


@dataclass
class _Progress:
    session: Session
    journal: Journal
    emit: Callable[[str, Any], None]
    next_trial: int
    stop: Callable[[], bool]
    #: What the default schedules took when they were measured, in microseconds, by workload.
    default_us: Mapping[str, float]
    failures: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    records: int = 0

    def spend(self, what: str, seconds: float) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds


@dataclass(frozen=True)
class _Trial:
    """What becomes of a candidate's outcome: the record around it."""

    task: TuningTask
    key: str
    trace: str
    phase: str
    predicted_us: float | None = None
    implementation: str = ""


class SessionRunner:
    """Runs sessions on one pipeline, one after the other."""

    def __init__(
        self,
        pipeline: Pipeline,
        around: Surroundings,
        workshop: Workshop,
        kept: dict[str, list[tuple[float, str]]],
    ) -> None:
        """``kept``: by workload the latencies and candidate keys whose objects are kept, over all sessions."""
        self._pipeline = pipeline
        self._around = around
        self._workshop = workshop
        self._kept = kept

    def run(self, session: Session, emit: Callable[[str, Any], None], stop: Callable[[], bool]) -> SessionResult:
        """Run ``session``. ``emit`` hears events; ``stop`` asks whether to end after the current trial."""
        started = time.monotonic()
        with Journal(session.journal_path) as journal:
            known = _known(session)
            progress = _Progress(session, journal, emit, session.first_trial, stop, _default_us(known))
            note, exhausted = "", False
            if session.phase == "default":
                self._defaults(progress, {record.workload_key for record in known if not record.schedule})
            elif session.phase == "confirm":
                note = self._confirm(progress, known)
            else:
                exhausted, note = self._search(progress, known)
        progress.seconds["total"] = time.monotonic() - started
        return SessionResult(
            session.session_id, session.phase, progress.records, progress.failures,
            progress.seconds, exhausted, note,
        )  # fmt: skip

    def _defaults(self, progress: _Progress, measured: set[str]) -> None:
        """Measure the default schedule of every task that has none yet."""
        tasks = [task for task in progress.session.tasks if task.workload_key not in measured]
        # In batches, the first one small, so that the first measurement need not wait until all are built.
        starts = [0, *range(_FIRST_BATCH, len(tasks), BATCH)]
        for start, end in zip(starts, [*starts[1:], len(tasks)], strict=True):
            if self._is_over(progress):
                break
            batch = tasks[start:end]
            version = DEFAULT_SCHEDULES.get(self._around.engine, "")
            trials = {
                task.workload_key: _Trial(task, DEFAULT_KEY, "", "default", implementation=version) for task in batch
            }
            self._measure(progress, [self._default_job(progress, task) for task in batch], trials)

    def _search(self, progress: _Progress, known: Sequence[TuningRecord]) -> tuple[bool, str]:
        session = progress.session
        started = time.monotonic()
        search = self._workshop.search_of(session.task, session.settings.flush_cache)
        search.part = (session.slice_index, session.slice_count)
        search.learn(known)
        progress.spend("search", time.monotonic() - started)
        note = self._build_reference(progress)
        left = session.trials
        while left > 0 and not self._is_over(progress):
            started = time.monotonic()
            candidates = search.propose(min(BATCH, left), session.seed + left)
            progress.spend("search", time.monotonic() - started)
            if not candidates:
                break
            left -= len(candidates)
            latencies = self._measure_batch(progress, search, candidates)
            started = time.monotonic()
            done = [c for c in candidates if c.key in latencies]
            if done:
                search.report(done, [latencies[c.key] for c in done])
            search.take_back([c for c in candidates if c.key not in latencies])
            progress.spend("search", time.monotonic() - started)
        if search.skipped:
            note = _both(note, f"{len(search.skipped)} stored records do not replay")
        return search.exhausted, note

    def _measure_batch(
        self, progress: _Progress, search: Search, candidates: Sequence[Candidate]
    ) -> dict[str, float | None]:
        session = progress.session
        trials, jobs = {}, []
        for candidate in candidates:
            trials[candidate.key] = _Trial(
                session.task, candidate.key, candidate.trace, "search", candidate.predicted_us,
                getattr(candidate, "implementation", ""),
            )  # fmt: skip
            jobs.append(self._job(progress, search, candidate))
        latencies = self._measure(progress, jobs, trials)
        self._keep_best(session.task.workload_key, latencies)
        return latencies

    def _keep_best(self, workload_key: str, latencies: dict[str, float | None]) -> None:
        """Keep the objects of the fastest candidates, which are confirmed and shipped; remove the others."""
        ranked = self._kept.setdefault(workload_key, [])
        ranked += [(us, key) for key, us in latencies.items() if us is not None]
        ranked.sort()
        failed = [key for key, us in latencies.items() if us is None]
        for key in [*failed, *(key for _, key in ranked[_KEPT_OBJECTS:])]:
            path = built_object(self._around.scratch, workload_key, key)
            if path:
                Path(path).unlink()
        del ranked[_KEPT_OBJECTS:]

    def _confirm(self, progress: _Progress, known: Sequence[TuningRecord]) -> str:
        """Time the best few again, taking turns, so that a slow minute hits all of them alike."""
        session = progress.session
        best = _to_confirm(known, session.trials)
        note = self._build_reference(progress)
        confirmed, builds, skipped = [], [], 0
        merged: dict[str, list[Outcome]] = {}
        for record in best:
            try:
                part = self._part_of(session.task, record)
            except Exception:
                skipped += 1
                continue
            confirmed.append(record)
            path = built_object(self._around.scratch, session.task.workload_key, record.candidate_key)
            if path:
                merged[record.candidate_key] = [Outcome(record.candidate_key, path=path)]
                continue
            builds.append(Job(record.candidate_key, self._to_build(session.task, record.candidate_key, part), {}))
        self._run(progress, builds, _ignore, lambda built: merged.__setitem__(built.key, [built]))
        run = self._run_part(progress, session.task, 0.0)
        for _ in range(_CONFIRM_ROUNDS):
            jobs = [
                Job(key, {}, {**run, "path": built[0].path}, keep=True)
                for key, built in merged.items()
                if built[0].path
            ]
            self._run(progress, jobs, _ignore, lambda timed: merged[timed.key].append(timed))
        for record in confirmed:
            key = record.candidate_key
            trial = _Trial(session.task, key, record.schedule, "confirm", None, record.implementation)
            self._record(progress, trial, _merge(merged.get(key, [])))
        return _both(note, f"{skipped} stored records do not replay") if skipped else note

    def _measure(self, progress: _Progress, jobs: Sequence[Job], trials: dict[str, _Trial]) -> dict[str, float | None]:
        """Measure and record; the latencies by candidate, None where it failed."""
        latencies: dict[str, float | None] = {}

        def on_outcome(outcome: Outcome) -> None:
            record = self._record(progress, trials[outcome.key], outcome)
            latencies[outcome.key] = record.latency_us

        def on_start(key: str) -> None:
            trial = trials[key]
            progress.emit("trial", {"candidate_key": trial.key, "workload_key": trial.task.workload_key,
                                    "trial": progress.next_trial, "trace": trial.trace,
                                    "phase": trial.phase, "task_name": trial.task.name})  # fmt: skip

        self._run(progress, jobs, on_start, on_outcome, lambda: self._is_over(progress))
        return latencies

    def _run(
        self,
        progress: _Progress,
        jobs: Sequence[Job],
        on_start: Callable[[str], None],
        on_outcome: Callable[[Outcome], None],
        is_over: Callable[[], bool] = never,
    ) -> None:
        """Have the pipeline do ``jobs``, and account for the wall-clock time that it was busy."""
        windows = self._pipeline.windows
        seen = len(windows.builds), len(windows.runs)
        self._pipeline.measure(jobs, on_start, on_outcome, is_over)
        run_wall_s = _covered_s(windows.runs[seen[1] :])
        busy_s = _covered_s([*windows.builds[seen[0] :], *windows.runs[seen[1] :]])
        progress.spend("run_wall", run_wall_s)
        progress.spend("build_wall", busy_s - run_wall_s)

    def _is_over(self, progress: _Progress) -> bool:
        stop_at = progress.session.stop_at
        return progress.stop() or (stop_at is not None and time.time() >= stop_at)

    def _record(self, progress: _Progress, trial: _Trial, outcome: Outcome) -> TuningRecord:
        session, around = progress.session, self._around
        measurement = None
        if outcome.failure is None:
            measurement = Measurement(
                outcome.latencies_us, session.settings, round(outcome.build_s, 4),
                round(outcome.run_s, 4), outcome.cut_short, outcome.slowdowns,
            )  # fmt: skip
        record = TuningRecord(
            record_id=short_hash(session.session_id, trial.task.workload_key, trial.key, trial.phase),
            run_id=session.run_id, session_id=session.session_id, engine=around.engine,
            tvm_version=around.tvm_version, target_key=around.target_key,
            workload_key=trial.task.workload_key, task_name=trial.task.name, candidate_key=trial.key,
            trial=progress.next_trial if trial.phase != "default" else 0, phase=trial.phase,
            schedule=trial.trace, started_at=time.time() - outcome.run_s, device=around.device,
            host=around.host, measurement=measurement, failure=outcome.failure,
            predicted_us=trial.predicted_us, implementation=trial.implementation,
        )  # fmt: skip
        try:
            progress.journal.append(record)
        except OSError as error:
            raise StoreError(
                f"cannot write the journal {session.journal_path}: {error}; free some disk space"
            ) from error
        progress.next_trial += 1
        progress.records += 1
        progress.spend("build", outcome.build_s)
        progress.spend("run", outcome.run_s)
        if outcome.failure:
            progress.failures[outcome.failure.kind] = progress.failures.get(outcome.failure.kind, 0) + 1
        progress.emit("record", record)
        return record

    def _part_of(self, task: TuningTask, record: TuningRecord) -> Mapping[str, Any]:
        """What builds ``record``'s schedule. Raises whatever TVM raises where it no longer applies."""
        return self._workshop.stored_part(task, record) if record.schedule else self._workshop.default_part(task)

    def _job(self, progress: _Progress, search: Search, candidate: Candidate) -> Job:
        task = progress.session.task
        best_us = search.best_us if math.isfinite(search.best_us) else 0.0
        part = self._workshop.candidate_part(task, candidate)
        run = self._run_part(progress, task, best_us)
        return Job(candidate.key, self._to_build(task, candidate.key, part), run, keep=True)

    def _default_job(self, progress: _Progress, task: TuningTask) -> Job:
        # Until it has run once itself, the default has nothing to be compared with.
        run = {**self._run_part(progress, task, 0.0), "reference": ""}
        return Job(task.workload_key, self._default_build(task), run, keep=True)

    def _default_build(self, task: TuningTask) -> Mapping[str, Any]:
        return self._to_build(task, DEFAULT_KEY, self._workshop.default_part(task))

    def _to_build(self, task: TuningTask, candidate_key: str, part: Mapping[str, Any]) -> Mapping[str, Any]:
        return build_job(part, self._around.scratch, task.workload_key, candidate_key)

    def _build_reference(self, progress: _Progress) -> str:
        """Have the default schedule at hand where an earlier process measured it; a note where it cannot be built."""
        task = progress.session.task
        failed: list[Failure] = []

        def on_outcome(outcome: Outcome) -> None:
            if outcome.failure is not None:
                failed.append(outcome.failure)

        if not self._reference(task):
            self._run(progress, [Job(task.workload_key, self._default_build(task), {})], _ignore, on_outcome)
        if not failed:
            return ""
        return f"outputs were not compared, since the default schedule does not build: {failed[0].message}"

    def _run_part(self, progress: _Progress, task: TuningTask, best_us: float) -> dict[str, Any]:
        return {
            "workload": task.workload_key,
            "args": [[list(shape), dtype] for shape, dtype in self._workshop.arguments(task)],
            "outputs": len(task.subgraph.outputs) if task.workload_key == task.subgraph.workload_key else 1,
            "settings": asdict(progress.session.settings),
            "best_us": best_us,
            "default_us": progress.default_us.get(task.workload_key, 0.0),
            "reference": self._reference(task),
        }

    def _reference(self, task: TuningTask) -> str:
        """The built default schedule of ``task``: what it computes is what every candidate must compute."""
        return built_object(self._around.scratch, task.workload_key, DEFAULT_KEY)


def _known(session: Session) -> tuple[TuningRecord, ...]:
    """The records that exist already of the session's tasks."""
    if not session.known_path:
        return ()
    keys = {task.workload_key for task in session.tasks}
    return tuple(record for record in read_journal(session.known_path) if record.workload_key in keys)


def _default_us(known: Sequence[TuningRecord]) -> dict[str, float]:
    """By workload the latency of its default schedule; of several measurements the first, which never changes."""
    found: dict[str, float] = {}
    for record in sorted(known, key=lambda record: record.started_at):
        if record.phase == "default" and record.latency_us is not None:
            found.setdefault(record.workload_key, record.latency_us)
    return found


def _to_confirm(known: Sequence[TuningRecord], count: int) -> tuple[TuningRecord, ...]:
    """The best ``count`` candidates, and the default schedule where it comes near them."""
    ranked = best_first([record for record in known if record.phase != "confirm"])
    chosen = ranked[:count]
    default = next((record for record in ranked if not record.schedule), None)
    near = default is not None and (default.latency_us or 0.0) < _NEAR_RATIO * (ranked[0].latency_us or 0.0)
    if default is not None and near and default not in chosen:
        return (*chosen, default)
    return chosen


def _covered_s(windows: Sequence[tuple[float, float]]) -> float:
    """The seconds that lie in any of ``windows``; those in several count once."""
    covered_s, reached = 0.0, -math.inf
    for start, end in sorted(windows):
        covered_s += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered_s


def _both(first: str, second: str) -> str:
    return f"{first}; {second}" if first else second


def _ignore(_: Any) -> None:
    """For what nobody needs to hear."""


def _merge(outcomes: Sequence[Outcome]) -> Outcome:
    """The rounds of one candidate's confirmation as one outcome; a failure in any round is the outcome."""
    if not outcomes:
        return Outcome("", failure=Failure("device_lost", "no round of the confirmation was finished"))
    for outcome in outcomes:
        if outcome.failure is not None:
            return outcome
    latencies = tuple(us for outcome in outcomes for us in outcome.latencies_us)
    slowdowns = tuple(slowdown for outcome in outcomes for slowdown in outcome.slowdowns)
    if len(slowdowns) < len(latencies):
        slowdowns = ()
    spent = sum(outcome.run_s for outcome in outcomes)
    return Outcome(outcomes[0].key, latencies, slowdowns, build_s=outcomes[0].build_s, run_s=spent)
