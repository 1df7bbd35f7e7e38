"""Tuning: sessions planned and given out until the budget is spent, on one device or on many."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tasks import plan, stopping
from tasks.engines.interface import best_first
from tasks.errands import Finished
from tasks.errors import StoreError, TuningFailed
from tasks.records import Session, TuningRecord, TuningTask, short_hash
from tasks.run import Progress, TuningRun
from tasks.sessions import Errand

logger = logging.getLogger("tunewright")

T = TypeVar("T")
#: Candidates of each task that are measured again at the end.
_CONFIRMED = 3
#: A round of a confirmation has one in so many of a measurement's repeats, and two at least.
_CONFIRM_PART = 3
#: A time budget that is left with fewer trials than these is spent.
_WORTHWHILE_TRIALS = 4
#: Seconds a trial, search included, before this run has a pace of its own.
_FIRST_PACE_S = 0.5
#: Default schedules in one session, and confirmations in one errand, where several agents share them.
_MOST_TOGETHER = 16
#: A task's search space is divided into so many slices at most.
_MOST_SLICES = 8
#: Engines whose search keeps to a slice of its space.
_SLICING = ("relax",)


@dataclass(frozen=True)
class Budget:
    """Trials, or the Unix time at which searching ends; None is no limit."""

    trials: int | None = None
    stop_at: float | None = None
    floor_trials: int = 0


def measure_defaults(run: TuningRun) -> None:
    """Measure every task's default schedule, so that a run cut short never ends worse than untuned.

    Raises TuningFailed where none can be measured.
    """
    tasks = [t for t in run.tasks if all(record.schedule for record in run.book.of(t.workload_key))]
    if tasks:
        run.observer(Progress("default", message=f"{len(tasks)} tasks"))
        reason = "the default schedule comes first"
        _do_all(run, [_errand(run, "default", [_session(run, "default", c, reason)]) for c in _shares(run, tasks)])
    for tuning_task in run.tasks:
        run.log_task(tuning_task)
    broken = [t.name for t in run.tasks if plan.state_of(t, run.book.of(t.workload_key)).best_us is None]
    if broken and len(broken) == len(run.tasks):
        raise TuningFailed(f"no default schedule can be measured: {_last_failure(run)}; run 'tunewright doctor'")


def search_each(run: TuningRun, tasks: Sequence[TuningTask], trials: int, reason: str) -> None:
    """Search each of ``tasks`` until it has had ``trials`` trials, those of earlier runs included."""
    errands = []
    for tuning_task in tasks:
        left = trials - plan.state_of(tuning_task, run.book.of(tuning_task.workload_key)).trials
        if left > 0:
            session = _session(run, "search", [tuning_task], reason, left)
            errands.append(_errand(run, f"search {tuning_task.name}", [session]))
    _do_all(run, errands)


def search(run: TuningRun, budget_of: Callable[[], Budget]) -> str:
    """Sessions until the budget is spent or nothing is expected to improve; the reason why tuning ended.

    The plan is asked whenever a session ends and whenever an agent comes. Raises TuningFailed.
    """
    reason = ""

    def next_errand() -> Errand | None:
        nonlocal reason
        session, reason = plan_session(run, budget_of())
        return None if session is None else _errand(run, f"search {session.task.name}", [session])

    _keep_busy(run, next_errand, lambda _: None)
    _publish_gains(run)
    return reason


def _publish_gains(run: TuningRun) -> None:
    """Tell later runs what the first sessions of this one brought; they can do without."""
    if run.gains is None:
        return
    here = []
    for tuning_task in run.tasks:
        records = run.book.of(tuning_task.workload_key)
        first = min((r for r in records if r.phase == "search"), key=lambda r: r.started_at, default=None)
        if first is not None and first.run_id == run.run_id:
            here.append(plan.state_of(tuning_task, records))
    try:
        run.gains.publish(run.run_id, plan.first_sessions(here))
    except StoreError as error:
        logger.warning("%s; later runs do without what this one's sessions brought", error)


def confirm(run: TuningRun) -> str:
    """Measure the best few of each searched task again, taking turns; how often the winner changed, as text."""
    run.observer(Progress("confirm"))
    leaders, sessions = {}, []
    for tuning_task in run.tasks:
        records = run.book.of(tuning_task.workload_key)
        if not _needs_confirmation(records, run.run_id):
            continue
        first = best_first([record for record in records if record.phase != "confirm"])[0].candidate_key
        session = _session(run, "confirm", [tuning_task], "the best few are measured again", _CONFIRMED)
        repeat = max(2, run.measure.repeat // _CONFIRM_PART)
        sessions.append(replace(session, settings=replace(run.measure, repeat=repeat)))
        leaders[session.session_id] = first
    _do_all(run, [_errand(run, "confirm", share) for share in _shares(run, sessions)])
    gains = []
    for session in sessions:
        gains += _gain_over(leaders[session.session_id], run.book.of(session.task.workload_key), session.session_id)
    text = f"confirmation changed the winner of {len(gains)} of {len(sessions)} tasks"
    if gains:
        text += f", by {statistics.median(gains):.1%} in the median, {max(gains):.1%} at most"
    return text


def plan_session(run: TuningRun, budget: Budget) -> tuple[Session | None, str]:
    """The next session, or None and the reason why there is none, now or for good. Raises TuningFailed."""
    states = [plan.state_of(t, run.book.of(t.workload_key), t.workload_key in run.exhausted) for t in run.tasks]
    searched = [state for state in states if state.trials]
    if searched and all(state.failing for state in searched) and len(searched) >= min(3, len(states)):
        raise TuningFailed(
            f"every trial of {len(searched)} tasks failed alike ({searched[0].failing}): "
            f"{_last_failure(run)}; the set-up is broken, run 'tunewright doctor'"
        )
    out = [session for errand in run.hands.out() for session in errand.sessions if session.phase == "search"]
    left = _trials_left(run, budget, out)
    if budget.stop_at is not None and left is not None and left < _WORTHWHILE_TRIALS:
        return None, "the time budget is spent"
    slices = _slices(run, states)
    free = {s.task.workload_key: _free_slice(s.task.workload_key, out, slices) for s in states}
    open_now = [replace(s, exhausted=s.exhausted or free[s.task.workload_key] is None) for s in states]
    limits = plan.Limits(left, budget.floor_trials)
    in_flight = Counter(session.task.workload_key for session in out)
    decision = plan.next_session(open_now, limits, in_flight, run.brought_before)
    show_progress(run, states, budget)
    if decision.task is None:
        return None, decision.reason
    session = _session(run, "search", [decision.task], decision.reason, decision.trials)
    index = free[decision.task.workload_key]
    return replace(session, stop_at=budget.stop_at, slice_index=index or 0, slice_count=slices), decision.reason


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
    if run.log is not None:
        run.log.log_progress(trials, best_us, time.time() - run.started)


def _keep_busy(run: TuningRun, next_errand: Callable[[], Errand | None], on_end: Callable[[Finished], None]) -> None:
    """Give out errands while there is room, until there are none and all that were given out have ended."""
    while True:
        stopping.check()
        run.check_lease()
        errand: Errand | None = None
        while run.hands.room() > 0:
            errand = next_errand()
            if errand is None:
                if not run.hands.out():
                    return
                break
            run.hands.submit(errand)
        for finished in run.hands.wait():
            run.take(finished)
            on_end(finished)


def _do_all(run: TuningRun, errands: Iterable[Errand]) -> None:
    """Have all errands done; those that failed again, those that kill agents session by session."""
    waiting = deque(errands)

    def on_end(finished: Finished) -> None:
        handed_back = [outcome.session for outcome in finished.outcomes if outcome.handed_back]
        if finished.failure and not finished.poisonous:
            waiting.append(finished.errand)
        elif finished.poisonous:
            waiting.extend(_apart(run, finished.errand))
        elif handed_back:
            waiting.append(replace(finished.errand, sessions=tuple(handed_back)))

    _keep_busy(run, lambda: waiting.popleft() if waiting else None, on_end)


def _apart(run: TuningRun, errand: Errand) -> list[Errand]:
    """Errands of one task each, to find out which of them kills agents; none for an errand of one task."""
    every = [(session, t) for session in errand.sessions for t in session.tasks]
    if len(every) == 1:
        return []
    single = [replace(s, tasks=(t,), session_id=s.session_id if i == 0 else run.next_session_id())
              for i, (s, t) in enumerate(every)]  # fmt: skip
    return [_errand(run, f"{session.phase} {session.task.name}", [session]) for session in single]


def _shares(run: TuningRun, items: Sequence[T]) -> list[Sequence[T]]:
    """``items`` in portions: one for a single device, several for each of many agents."""
    agents = run.hands.agents()
    size = len(items) if run.fleet is None else min(_MOST_TOGETHER, math.ceil(len(items) / (2 * max(1, agents))))
    return [items[start : start + size] for start in range(0, len(items), max(1, size))]


def _trials_left(run: TuningRun, budget: Budget, out: Sequence[Session]) -> int | None:
    """What both budgets still allow beside what is out, the time counted in trials of this run's own pace.

    None: no limit.
    """
    spent = searched_trials(run)
    planned = sum(session.trials for session in out)
    left = None if budget.trials is None else budget.trials - spent - planned
    if budget.stop_at is None:
        return left
    # The pace is an agent's, and all of them work until the end.
    pace_s = run.search_s / spent if spent and run.search_s else _FIRST_PACE_S
    in_time = int((budget.stop_at - time.time()) / pace_s * max(1, run.hands.agents())) - planned
    return max(0, in_time if left is None else min(left, in_time))


def _slices(run: TuningRun, states: Sequence[plan.TaskState]) -> int:
    """Into how many slices a task's search space is divided, so that every agent has a session and one more."""
    if run.fleet is None or run.fleet.info.engine not in _SLICING:
        return 1
    open_tasks = len(states) - len(plan.closed_tasks(states))
    slices, wanted = 1, 2 * run.hands.agents() / max(1, open_tasks)
    while slices < min(wanted, _MOST_SLICES):
        slices *= 2
    return slices


def _free_slice(workload_key: str, out: Sequence[Session], count: int) -> int | None:
    """The first of ``count`` slices that no session of the task works on now; None where there is none.

    Slices are powers of two, and the key modulo the smaller number decides whether two overlap.
    """
    taken = [(s.slice_index, s.slice_count) for s in out if s.task.workload_key == workload_key]
    for index in range(count):
        if all(index % min(count, other) != at % min(count, other) for at, other in taken):
            return index
    return None


def _session(run: TuningRun, phase: str, tasks: Sequence[TuningTask], reason: str, trials: int = 0) -> Session:
    session_id = run.next_session_id()
    name = tasks[0].workload_key if len(tasks) == 1 else phase
    first = run.reserve_trials([t.workload_key for t in tasks], trials)
    return Session(
        session_id=session_id, run_id=run.run_id, phase=phase, tasks=tuple(tasks), trials=trials,
        seed=int(short_hash(run.seed, name, phase, first, length=7), 16), reason=reason, settings=run.measure,
        journal_path="", first_trial=first,
    )  # fmt: skip


def _errand(run: TuningRun, title: str, sessions: Sequence[Session]) -> Errand:
    return Errand(run.run_id, title, tuple(sessions), run.store_url)


def _gain_over(first: str, records: Sequence[TuningRecord], session_id: str) -> list[float]:
    """By how much the confirmed winner is faster than the candidate that led before, where it is another."""
    again = {r.candidate_key: r.latency_us for r in records if r.session_id == session_id and r.latency_us}
    winner = best_first(records)[0].candidate_key
    if winner == first or first not in again or winner not in again:
        return []
    return [1.0 - again[winner] / again[first]]


def _needs_confirmation(records: Sequence[TuningRecord], run_id: str) -> bool:
    """Has this run searched the task, and is there a choice to be made?"""
    searched = [r for r in records if r.phase == "search" and r.latency_us is not None]
    return len(searched) > 1 and any(r.run_id == run_id for r in searched)


def _last_failure(run: TuningRun) -> str:
    failed = [r for records in run.book.all().values() for r in records if r.failure]
    latest = max(failed, key=lambda r: r.started_at, default=None)
    return latest.failure.message if latest and latest.failure else "no trial gave a reason"
