"""A tuning run in the process that leads it: its engine, its records, its place in MLflow and the store.

Prefect tasks take the run's id and look the run up here, since engines and clients are no parameters
that could be stored or sent.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infra.object_store import ObjectStore
from infra.record_store import RecordStore
from infra.run_log import RunLog
from infra.sample_store import SampleStore
from tasks.engines.child import ChildOptions, EngineChild
from tasks.engines.measuring.journal import is_live
from tasks.engines.wire import to_line
from tasks.errors import StoreError, TrackingError
from tasks.records import MeasureSettings, TuningRecord, TuningTask

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

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records: dict[str, dict[str, TuningRecord]] = {}
        self.reused = 0
        self.new = 0

    def load(self, stored: Mapping[str, Iterable[TuningRecord]]) -> None:
        """Take over records of earlier runs."""
        for records in stored.values():
            for record in records:
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

    def write(self, tasks: Iterable[TuningTask], name: str) -> Path:
        """The records of ``tasks`` in a file, as a session reads them."""
        path = self._folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as lines:
            for task in tasks:
                lines.writelines(to_line(record) for record in self.of(task.workload_key))
        return path

    def _put(self, record: TuningRecord) -> int:
        known = self._records.setdefault(record.workload_key, {})
        if record.record_id in known:
            return 0
        known[record.record_id] = record
        return 1


@dataclass
class TuningRun:
    """The state of one run. ``pending`` are journals that the object store does not hold yet."""

    run_id: str
    options: ChildOptions
    home: Path
    store: ObjectStore
    measure: MeasureSettings
    seed: int
    observer: Callable[[Progress], None]
    started: float = field(default_factory=time.time)
    records: RecordStore | None = None
    samples: SampleStore | None = None
    known_samples: int = 0
    log: RunLog | None = None
    tasks: tuple[TuningTask, ...] = ()
    exhausted: set[str] = field(default_factory=set)
    sessions: int = 0
    search_s: float = 0.0
    pending: list[Path] = field(default_factory=list)
    unlogged: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    session_log: list[dict[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.work_dir = self.home / "runs" / self.run_id
        self.work_dir.mkdir(parents=True, exist_ok=True)
        self.book = RecordBook(self.work_dir / "known")
        _runs[self.run_id] = self

    @property
    def engine(self) -> EngineChild:
        """The run's engine."""
        return engine_for(self.options)

    @property
    def journals(self) -> Path:
        """Where sessions of this machine write first."""
        return self.home / "journals"

    def next_session_id(self) -> str:
        """A name for the next session, in order."""
        self.sessions += 1
        return f"{self.run_id}-{self.sessions:04d}"

    def recover_journals(self) -> int:
        """Store what runs that died left in their journals; how many records those were."""
        found = 0
        for path in sorted(self.journals.glob("*.jsonl")):
            if not is_live(path):
                self.pending.append(path)
        if self.pending:
            found = self.flush_journals()
        return found

    def flush_journals(self, must: bool = False) -> int:
        """Bring pending journals to the object store. Raises StoreError only where they ``must`` get there."""
        assert self.records is not None
        stored = 0
        while self.pending:
            try:
                stored += self.records.upload_session(self.pending[0])
            except StoreError as error:
                if must:
                    raise
                logger.warning("%s; the journal is kept and tried again", error)
                break
            self.pending.pop(0).unlink(missing_ok=True)
        return stored

    def log_task(self, task: TuningTask, must: bool = False) -> None:
        """Bring a task's records to MLflow. Raises TrackingError only where they ``must`` get there."""
        assert self.log is not None
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
