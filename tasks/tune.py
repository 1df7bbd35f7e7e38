"""The tune step: sessions on an engine, one after the other, until the budget is spent."""

from __future__ import annotations

import logging
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks import plan
from tasks.engines.interface import best_first
from tasks.engines.measuring.journal import Journal
from tasks.errors import DeviceBusy, EngineCrashed, EngineTimeout, TuningFailed
from tasks.records import (
    EngineInfo,
    Failure,
    Session,
    SessionResult,
    TuningRecord,
    TuningTask,
    short_hash,
)
from tasks.run import Progress, TuningRun, run_of

logger = logging.getLogger("tunewright")

#: A session that kills its engine so often is given up; its task is not searched again in this run.
_DEATHS = 2
#: Candidates of each task that are measured again at the end.
_CONFIRMED = 3
#: Repeats in each of a confirmation's rounds.
_CONFIRM_REPEATS = 2
_BUSY_POLL_S = 2.0
#: A time budget that is left with fewer trials than these is spent.
_WORTHWHILE_TRIALS = 4
#: Seconds a trial, search included, before this run has a pace of its own.
_FIRST_PACE_S = 0.5


@dataclass(frozen=True)
class Budget:
    """Trials, or the Unix time at which searching ends; None is no limit."""

    trials: int | None = None
    stop_at: float | None = None
    floor_trials: int = 0


@task(cache_policy=NO_CACHE)
def measure_defaults(run_id: str) -> SessionResult:
    """Measure every task's default schedule, so that a run cut short never ends worse than untuned."""
    run = run_of(run_id)
    tasks = [t for t in run.tasks if all(record.schedule for record in run.book.of(t.workload_key))]
    result = SessionResult("", "default", 0, {}, {})
    if tasks:
        run.observer(Progress("default", message=f"{len(tasks)} tasks"))
        result = run_session(run, _session(run, "default", tasks, "the default schedule comes first"))
    for tuning_task in run.tasks:
        run.log_task(tuning_task)
    broken = [t.name for t in run.tasks if plan.state_of(t, run.book.of(t.workload_key)).best_us is None]
    if broken and len(broken) == len(run.tasks):
        raise TuningFailed(f"no default schedule can be measured: {_last_failure(run)}; run 'tunewright doctor'")
    return result


@task(cache_policy=NO_CACHE, task_run_name="search {name}")
def search_session(run_id: str, name: str, session: Session) -> SessionResult:
    """One session of one task."""
    run = run_of(run_id)
    started = time.monotonic()
    result = run_session(run, session)
    run.search_s += time.monotonic() - started
    if result.exhausted:
        run.exhausted.add(session.task.workload_key)
    run.log_task(session.task)
    logger.info("session %s of %s: %s trials, %s", session.session_id, name, result.records, session.reason)
    return result


@task(cache_policy=NO_CACHE)
def confirm(run_id: str) -> str:
    """Measure the best few of each searched task again, taking turns; how often the winner changed, as text."""
    run = run_of(run_id)
    confirmed, gains = 0, []
    run.observer(Progress("confirm"))
    for tuning_task in run.tasks:
        records = run.book.of(tuning_task.workload_key)
        if not _needs_confirmation(records, run.run_id):
            continue
        confirmed += 1
        first = best_first([record for record in records if record.phase != "confirm"])[0].candidate_key
        session = _session(run, "confirm", [tuning_task], "the best few are measured again", _CONFIRMED)
        run_session(run, replace(session, settings=replace(run.measure, repeat=_CONFIRM_REPEATS)))
        gains += _gain_over(first, run.book.of(tuning_task.workload_key), session.session_id)
        run.log_task(tuning_task)
    text = f"confirmation changed the winner of {len(gains)} of {confirmed} tasks"
    if gains:
        text += f", by {statistics.median(gains):.1%} in the median, {max(gains):.1%} at most"
    return text


def _gain_over(first: str, records: Sequence[TuningRecord], session_id: str) -> list[float]:
    """By how much the confirmed winner is faster than the candidate that led before, where it is another."""
    again = {r.candidate_key: r.latency_us for r in records if r.session_id == session_id and r.latency_us}
    winner = best_first(records)[0].candidate_key
    if winner == first or first not in again or winner not in again:
        return []
    return [1.0 - again[winner] / again[first]]


def plan_session(run_id: str, budget: Budget) -> tuple[Session | None, str]:
    """The next session, or None and the reason why tuning ends. Raises TuningFailed."""
    run = run_of(run_id)
    states = [plan.state_of(t, run.book.of(t.workload_key), t.workload_key in run.exhausted) for t in run.tasks]
    searched = [state for state in states if state.trials]
    if searched and all(state.failing for state in searched) and len(searched) >= min(3, len(states)):
        raise TuningFailed(
            f"every trial of {len(searched)} tasks failed alike ({searched[0].failing}): "
            f"{_last_failure(run)}; the set-up is broken, run 'tunewright doctor'"
        )
    spent = searched_trials(run)
    left = _trials_left(run, budget, spent)
    if budget.stop_at is not None and left is not None and left < _WORTHWHILE_TRIALS:
        return None, "the time budget is spent"
    decision = plan.next_session(states, plan.Limits(left, budget.floor_trials, run.known_samples + spent))
    show_progress(run, states, budget)
    if decision.task is None:
        return None, decision.reason
    session = _session(run, "search", [decision.task], decision.reason, decision.trials)
    return replace(session, stop_at=budget.stop_at), decision.reason


def _trials_left(run: TuningRun, budget: Budget, spent: int) -> int | None:
    """What both budgets still allow, the time counted in trials of this run's own pace; None: no limit."""
    left = None if budget.trials is None else budget.trials - spent
    if budget.stop_at is None:
        return left
    pace_s = run.search_s / spent if spent else _FIRST_PACE_S
    in_time = int((budget.stop_at - time.time()) / pace_s)
    return max(0, in_time if left is None else min(left, in_time))


def searched_trials(run: TuningRun) -> int:
    """The search trials of this run."""
    return sum(record.phase == "search" for record in run.book.of_run(run.run_id))


def show_progress(run: TuningRun, states: Sequence[plan.TaskState], budget: Budget) -> None:
    """Tell the observer and MLflow where the run is."""
    best_us = plan.model_latency_us(states)
    trials = searched_trials(run)
    left_s = None if budget.stop_at is None else max(0.0, budget.stop_at - time.time())
    untuned_us = plan.model_latency_us(states, untuned=True)
    run.observer(Progress("tune", trials, budget.trials, best_us, untuned_us, left_s))
    if run.log is not None and not run.unlogged:
        run.log.log_progress(trials, best_us, time.time() - run.started)


def run_session(run: TuningRun, session: Session) -> SessionResult:
    """Run ``session`` to its end, through deaths of the engine, and store what it measured."""
    deaths = 0
    while True:
        run.pending.append(run.journals / f"{session.session_id}.jsonl")
        try:
            result = _wait_for_device(run, session)
            break
        except (EngineCrashed, EngineTimeout) as error:
            deaths += 1
            _record_loss(run, session, run.engine.in_flight, str(error))
            run.engine.restart()
            run.flush_journals()
            if deaths >= _DEATHS:
                run.exhausted.update(t.workload_key for t in session.tasks if session.phase == "search")
                run.notes.append(f"{session.task.name}: given up, it ended {deaths} engines ({error})")
                result = SessionResult(session.session_id, session.phase, 0, {"device_lost": deaths}, {})
                break
            session = _rest_of(run, session)
    for what, seconds in result.seconds.items():
        run.seconds[what] = run.seconds.get(what, 0.0) + seconds
    run.session_log.append(_session_row(session, result))
    run.flush_journals()
    return result


def _session_row(session: Session, result: SessionResult) -> dict[str, object]:
    """A session's decision, its reason and what came of it, as MLflow's table shows them."""
    return {
        "session": session.session_id, "phase": session.phase,
        "task": session.task.name if len(session.tasks) == 1 else f"{len(session.tasks)} tasks",
        "reason": session.reason, "trials": result.records, "failed": sum(result.failures.values()),
        **{f"{what}_s": round(result.seconds.get(what, 0.0), 2) for what in ("search", "build", "run", "total")},
        "note": result.note,
    }  # fmt: skip


def _rest_of(run: TuningRun, session: Session) -> Session:
    """What is left of a session whose engine died, as a new session."""
    done = sum(1 for records in run.book.all().values() for r in records if r.session_id == session.session_id)
    fresh = _session(run, session.phase, session.tasks, f"{session.reason}; continued", session.trials)
    left = max(1, session.trials - done) if session.phase == "search" else session.trials
    return replace(fresh, trials=left, stop_at=session.stop_at)


def _wait_for_device(run: TuningRun, session: Session) -> SessionResult:
    """Run the session once the device is free, saying who has it until then."""
    said = False
    while True:
        try:
            return run.engine.tune(session, run.book.add)
        except DeviceBusy as error:
            if not said:
                run.observer(Progress("wait", message=str(error)))
                logger.warning("%s; waiting", error)
                said = True
            time.sleep(_BUSY_POLL_S)


def _session(run: TuningRun, phase: str, tasks: Sequence[TuningTask], reason: str, trials: int = 0) -> Session:
    session_id = run.next_session_id()
    name = tasks[0].workload_key if len(tasks) == 1 else phase
    first = max((r.trial for t in tasks for r in run.book.of(t.workload_key)), default=0) + 1
    return Session(
        session_id=session_id, run_id=run.run_id, phase=phase, tasks=tuple(tasks), trials=trials,
        seed=int(short_hash(run.seed, name, phase, first, length=7), 16), reason=reason, settings=run.measure,
        journal_path=str(run.journals / f"{session_id}.jsonl"),
        known_path=str(run.book.write(tasks, name)), first_trial=first,
        samples_dir=str(run.samples.folder) if run.samples else "",
    )  # fmt: skip


def _record_loss(run: TuningRun, session: Session, trial: dict[str, Any] | None, why: str) -> None:
    """The trial that was in flight when its engine died is a measurement too: ``device_lost``."""
    if trial is None:
        return
    info: EngineInfo = run.engine.last_info
    phase = trial["phase"]
    record = TuningRecord(
        record_id=short_hash(session.session_id, trial["workload_key"], trial["candidate_key"], phase),
        run_id=run.run_id, session_id=session.session_id, engine=info.engine, tvm_version=info.tvm_version,
        target_key=info.target.key, workload_key=trial["workload_key"], task_name=trial["task_name"],
        candidate_key=trial["candidate_key"], trial=trial["trial"] if phase != "default" else 0, phase=phase,
        schedule=trial["trace"], started_at=time.time(), device=info.device, host=socket.gethostname(),
        failure=Failure("device_lost", why[:500]),
    )  # fmt: skip
    with Journal(session.journal_path) as journal:
        journal.append(record)
    run.book.add(record)


def _needs_confirmation(records: Sequence[TuningRecord], run_id: str) -> bool:
    """Has this run searched the task, and is there a choice to be made?"""
    searched = [r for r in records if r.phase == "search" and r.latency_us is not None]
    return len(searched) > 1 and any(r.run_id == run_id for r in searched)


def _last_failure(run: TuningRun) -> str:
    failed = [r for records in run.book.all().values() for r in records if r.failure]
    latest = max(failed, key=lambda r: r.started_at, default=None)
    return latest.failure.message if latest and latest.failure else "no trial gave a reason"
