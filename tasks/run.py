"""A tuning run in the process that leads it: its engine, its records, its place in MLflow and the store.

Prefect tasks take the run's id and look the run up here, since engines and clients are no parameters
that could be stored or sent.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from infra.gain_store import GainStore
from infra.lease import Lease
from infra.object_store import ObjectStore
from infra.record_store import RecordStore
from infra.run_log import RunLog
from infra.sample_store import SampleStore
from tasks.engines.child import ChildOptions, EngineChild
from tasks.engines.interface import counts_for
from tasks.errors import TrackingError
from tasks.records import EngineInfo, Failure, FirstSessions, MeasureSettings, TuningRecord, TuningTask
from tasks.sessions import SessionHost, SessionOutcome

if TYPE_CHECKING:
    from tasks.errands import Finished, Hands
    from tasks.executing import Executor
    from tasks.fleet import Fleet

logger = logging.getLogger("tunewright")

_engines: dict[ChildOptions, EngineChild] = {}
_runs: dict[str, TuningRun] = {}


def engine_for(options: ChildOptions) -> EngineChild:
    """The engine of this process with these options: started at the first call, warm from then on."""
    if options not in _engines:
        _engines[options] = EngineChild(options)
    return _engines[options]


def close_engines() -> None:
    """End every engine of this process, and all that they started."""
    while _engines:
        _engines.popitem()[1].close()


atexit.register(close_engines)


@dataclass(frozen=True)
class Progress:
    """Where a run is, for whoever shows it. Latencies are of the whole model, in microseconds."""

    step: str
    trials: int = 0
    budget_trials: int | None = None
    best_us: float = 0.0
    untuned_us: float = 0.0
    seconds_left: float | None = None
    message: str = ""


class RecordBook:
    """The records of a run's workloads: those stored before, and those that come in."""

    def __init__(self) -> None:
        self._records: dict[str, dict[str, TuningRecord]] = {}
        self.reused = 0
        self.new = 0

    def load(self, stored: Mapping[str, Iterable[TuningRecord]], settings: MeasureSettings) -> None:
        """Take over the records of earlier runs that count for measurements with ``settings``."""
        for records in stored.values():
            for record in records:
                if counts_for(record, settings):
                    self.reused += self._put(record)

    def add(self, record: TuningRecord) -> None:
        """Take in a record of this run; one that is there already counts once."""
        self.new += self._put(record)

    def of(self, workload_key: str) -> tuple[TuningRecord, ...]:
        """The records of one workload."""
        return tuple(self._records.get(workload_key, {}).values())

    def of_run(self, run_id: str) -> list[TuningRecord]:
        """The records that one run has measured."""
        return [r for records in self._records.values() for r in records.values() if r.run_id == run_id]

    def all(self) -> dict[str, tuple[TuningRecord, ...]]:
        """All records by workload."""
        return {key: tuple(records.values()) for key, records in self._records.items()}

    def condemn(self, workload_key: str, candidate_key: str, failure: Failure) -> None:
        """Let every record of a candidate that computes something wrong say so, instead of how fast it is."""
        for record in self.of(workload_key):
            if record.candidate_key == candidate_key:
                wrong = replace(record, measurement=None, failure=failure)
                self._records[workload_key][record.record_id] = wrong

    def _put(self, record: TuningRecord) -> int:
        known = self._records.setdefault(record.workload_key, {})
        if record.record_id in known:
            return 0
        known[record.record_id] = record
        return 1


@dataclass
class TuningRun:
    """The state of one run. ``hands`` run its sessions: this process, or the agents of ``fleet``."""

    run_id: str
    options: ChildOptions
    home: Path
    store: ObjectStore
    measure: MeasureSettings
    seed: int
    observer: Callable[[Progress], None]
    store_url: str = ""
    started: float = field(default_factory=time.time)
    records: RecordStore | None = None
    samples: SampleStore | None = None
    gains: GainStore | None = None
    brought_before: FirstSessions = field(default_factory=FirstSessions)
    log: RunLog | None = None
    tasks: tuple[TuningTask, ...] = ()
    exhausted: set[str] = field(default_factory=set)
    sessions: int = 0
    search_s: float = 0.0
    ended: str = ""
    hands: Hands = field(default_factory=lambda: _own_hands())
    fleet: Fleet | None = None
    lease: Lease | None = None
    asked_target: str = ""
    unlogged: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    session_log: list[dict[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._host: SessionHost | None = None
        self._reserved: dict[str, int] = {}
        self._executor: Executor | None = None
        self.work_dir = self.home / "runs" / self.run_id
        self.work_dir.mkdir(parents=True, exist_ok=True)
        self.book = RecordBook()
        _runs[self.run_id] = self

    @property
    def engine(self) -> EngineChild:
        """The run's engine."""
        return engine_for(self.options)

    @property
    def info(self) -> EngineInfo:
        """What measures: the engine of the fleet's agents, or the run's own."""
        return self.fleet.info if self.fleet is not None else self.engine.describe()

    @property
    def executor(self) -> Executor:
        """What runs finished artifacts: an agent where there is a fleet, else the run's engine."""
        from tasks.executing import AgentExecutor, HereExecutor

        if self.fleet is None:
            return HereExecutor(self.engine.execute)
        if self._executor is None:
            self._executor = AgentExecutor(self.fleet, self.store)
        return self._executor

    @property
    def sources(self) -> Path:
        """Where the latest build of this run has put what people read of it."""
        return self.work_dir / "sources"

    @property
    def host(self) -> SessionHost:
        """Where this process runs sessions."""
        if self._host is None:
            assert self.records is not None
            self._host = SessionHost(
                lambda: self.engine, self.home, self.records, self.samples,
                lambda text: self.observer(Progress("wait", message=text)),
            )  # fmt: skip
        return self._host

    @property
    def journals(self) -> Path:
        """Where sessions of this process write first."""
        return self.host.journals

    @property
    def pending(self) -> list[Path]:
        """Journals of this process that the object store does not hold yet."""
        return self.host.pending

    def recover_journals(self) -> int:
        """Store what runs that died left in their journals; how many records those were."""
        return self.host.recover_journals()

    def flush_journals(self, must: bool = False) -> int:
        """Bring pending journals to the object store. Raises StoreError only where they ``must`` get there."""
        return self.host.store_journals(must)

    def check_lease(self) -> None:
        """Raise RunInProgress where another run has taken this one for dead."""
        if self.lease is not None:
            self.lease.check()

    def reserve_trials(self, workload_keys: Iterable[str], trials: int) -> int:
        """The number of the first of ``trials`` trials, beyond those of all sessions planned so far."""
        keys = list(workload_keys)
        known = max((r.trial for key in keys for r in self.book.of(key)), default=0)
        first = max([known, *(self._reserved.get(key, 0) for key in keys)]) + 1
        self._reserved.update(dict.fromkeys(keys, first + trials - 1))
        return first

    def take(self, finished: Finished) -> None:
        """Take in what came of an errand: its records, the time it took, what should not be tried again."""
        if finished.poisonous and len({t.workload_key for s in finished.errand.sessions for t in s.tasks}) == 1:
            task = finished.errand.sessions[0].task
            self.exhausted.add(task.workload_key)
            self.notes.append(f"{task.name}: quarantined for this run, {finished.failure}")
        for outcome in finished.outcomes:
            session, result = outcome.session, outcome.result
            for record in outcome.records:
                self.book.add(record)
            for what, seconds in result.seconds.items():
                self.seconds[what] = self.seconds.get(what, 0.0) + seconds
            if session.phase == "search":
                self.search_s += outcome.wall_s
            if session.phase == "search" and (result.exhausted or outcome.given_up):
                self.exhausted.update(t.workload_key for t in session.tasks)
            if outcome.given_up:
                self.notes.append(outcome.given_up)
            self.session_log.append(_session_row(outcome))
            for task in session.tasks:
                self._unreserve(task.workload_key)
                self.log_task(task)
            logger.info("session %s: %s trials, %s", session.session_id, result.records, session.reason)

    def _unreserve(self, workload_key: str) -> None:
        """Where no session of the task is out, the next one's trials follow those that were measured."""
        out = (t.workload_key for errand in self.hands.out() for s in errand.sessions for t in s.tasks)
        if workload_key not in out:
            self._reserved.pop(workload_key, None)

    def next_session_id(self) -> str:
        """A name for the next session, in order."""
        self.sessions += 1
        return f"{self.run_id}-{self.sessions:04d}"

    def log_task(self, task: TuningTask, must: bool = False) -> None:
        """Bring a task's records to MLflow. Raises TrackingError only where they ``must`` get there."""
        if self.log is None:
            return
        try:
            self.log.log_records(task, self.book.of(task.workload_key))
            self.unlogged.discard(task.workload_key)
        except TrackingError as error:
            if must:
                raise
            self.unlogged.add(task.workload_key)
            logger.warning("%s; the measurements are kept and logged later", error)


def run_of(run_id: str) -> TuningRun:
    """The run that this process leads under ``run_id``."""
    return _runs[run_id]


def forget(run_id: str) -> None:
    """The run is over."""
    _runs.pop(run_id, None)


def _own_hands() -> Hands:
    from tasks.errands import OwnHands

    return OwnHands()


def _session_row(outcome: SessionOutcome) -> dict[str, object]:
    """A session's decision, its reason and what came of it, as MLflow's table shows them."""
    session, result = outcome.session, outcome.result
    return {
        "session": session.session_id, "phase": session.phase,
        "task": session.task.name if len(session.tasks) == 1 else f"{len(session.tasks)} tasks",
        "reason": session.reason, "trials": result.records, "failed": sum(result.failures.values()),
        **{f"{what}_s": round(result.seconds.get(what, 0.0), 2) for what in ("search", "build", "run", "total")},
        "agent": outcome.agent, "note": result.note,
    }  # fmt: skip
