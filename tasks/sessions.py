"""Running a session where its device is: through deaths of the engine, its journal brought to the store.

The same code runs in the flow's own process and on an agent. What it needs of either is a ``SessionHost``;
what it gives back is a ``SessionOutcome``. A session that runs again, here or elsewhere, measures only what
the store does not hold of it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from infra.patience import patiently
from infra.record_store import RecordStore
from infra.sample_store import SampleStore
from tasks.engines.child import EngineChild
from tasks.engines.measuring.journal import Journal, is_live
from tasks.engines.wire import from_line, to_line
from tasks.errors import DeviceBusy, EngineCrashed, EngineTimeout, StoreError
from tasks.records import EngineInfo, Failure, Session, SessionResult, TuningRecord, short_hash

logger = logging.getLogger("tunewright")

#: A session that kills its engine so often is given up; its task is not searched again in this run.
_DEATHS = 2
_BUSY_POLL_S = 2.0
#: How often a running session's new records are stored, and asked whether it is still wanted.
_WATCH_S = 1.0


@dataclass(frozen=True)
class Errand:
    """Sessions that one device runs one after the other: what is sent to an agent at a time.

    ``store_url`` is the flow's: records in another store would be lost to it.
    """

    run_id: str
    title: str
    sessions: tuple[Session, ...]
    store_url: str


@dataclass(frozen=True)
class SessionOutcome:
    """What came of a session: ``records`` are all that it measured, in whatever process.

    ``given_up`` says why its tasks should not be searched again; ``handed_back`` that its agent was told
    to end before it was through.
    """

    session: Session
    result: SessionResult
    records: tuple[TuningRecord, ...]
    agent: str = ""
    wall_s: float = 0.0
    given_up: str = ""
    handed_back: bool = False


@dataclass
class SessionHost:
    """Where sessions run. ``folder`` is for journals and for the files that sessions read.

    ``patience_s`` is how long the end of a session waits for a store that is away; with 0 its journal is
    kept in ``pending`` and the run goes on. ``publishes``: records are stored while they come in.
    """

    engine_of: Callable[[], EngineChild]
    folder: Path
    records: RecordStore
    samples: SampleStore | None
    say: Callable[[str], None]
    patience_s: float = 0.0
    publishes: bool = False
    wanted: Callable[[], bool] = lambda: True
    on_record: Callable[[TuningRecord], None] = lambda _: None
    pending: list[Path] = field(default_factory=list)

    @property
    def journals(self) -> Path:
        """Where sessions of this host write first."""
        return self.folder / "journals"

    def recover_journals(self) -> int:
        """Store what processes that died left in their journals; how many records those were."""
        self.pending += [path for path in sorted(self.journals.glob("*.jsonl")) if not is_live(path)]
        return self.store_journals()

    def store_journals(self, must: bool = False) -> int:
        """Bring pending journals to the object store. Raises StoreError only where they ``must`` get there."""
        stored = 0
        while self.pending:
            path = self.pending[0]
            try:
                stored += patiently("storing measurements", lambda: self.records.upload_session(path), self.patience_s)  # noqa: B023
            except StoreError as error:
                if must:
                    raise
                logger.warning("%s; the journal is kept and tried again", error)
                break
            self.pending.pop(0).unlink(missing_ok=True)
        return stored


def run_session(host: SessionHost, session: Session, known: Sequence[TuningRecord]) -> SessionOutcome:
    """Run ``session`` to its end and store what it measured. Raises what ``Engine.tune`` raises, StoreError."""
    started, deaths, given_up = time.monotonic(), 0, ""
    measured = {r.record_id: r for r in known if r.session_id == session.session_id}
    result = SessionResult(session.session_id, session.phase, 0, {}, {})
    host.pending.append(host.journals / f"{session.session_id}.jsonl")
    try:
        while (left := _rest_of(session, list(measured.values()))) is not None:
            placed = _placed(host, left, [*known, *measured.values()])

            def take(record: TuningRecord) -> None:
                measured[record.record_id] = record
                host.on_record(record)

            try:
                with _Watch(host, placed.journal_path):
                    result = _wait_for_device(host, placed, take)
                break
            except (EngineCrashed, EngineTimeout) as error:
                deaths += 1
                lost = _record_loss(host.engine_of(), placed, str(error))
                if lost is not None:
                    take(lost)
                host.engine_of().restart()
                if deaths >= _DEATHS:
                    given_up = f"{session.task.name}: given up, it ended {deaths} engines ({error})"
                    result = replace(result, failures={"device_lost": deaths})
                    break
    finally:
        # Also where the engine does not start again: whoever goes on elsewhere must know what was measured here.
        host.store_journals(must=host.patience_s > 0)
    return SessionOutcome(
        session, replace(result, records=len(measured)), tuple(measured.values()),
        wall_s=time.monotonic() - started, given_up=given_up, handed_back=not host.wanted(),
    )  # fmt: skip


def _rest_of(session: Session, done: Sequence[TuningRecord]) -> Session | None:
    """What is left of a session that has run before; None where that is nothing."""
    if not done or session.phase == "default":  # the engine leaves out what is measured
        return session
    left = session.trials - len(done)
    if session.phase == "confirm" or left <= 0:
        return None
    return replace(session, trials=left, first_trial=session.first_trial + len(done))


def _placed(host: SessionHost, session: Session, known: Sequence[TuningRecord]) -> Session:
    """The session with the files of this host."""
    path = host.folder / "known" / f"{session.session_id}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    keys = {task.workload_key for task in session.tasks}
    unique = {record.record_id: record for record in known if record.workload_key in keys}
    path.write_text("".join(map(to_line, unique.values())))
    return replace(
        session, journal_path=str(host.journals / f"{session.session_id}.jsonl"), known_path=str(path),
        samples_dir=str(host.samples.folder) if host.samples else "",
    )  # fmt: skip


def _wait_for_device(host: SessionHost, session: Session, take: Callable[[TuningRecord], None]) -> SessionResult:
    """Run the session once the device is free, saying who has it until then."""
    said = False
    while True:
        try:
            return host.engine_of().tune(session, take)
        except DeviceBusy as error:
            if not said:
                host.say(str(error))
                logger.warning("%s; waiting", error)
                said = True
            if not host.wanted():
                return SessionResult(session.session_id, session.phase, 0, {}, {}, note=str(error))
            time.sleep(_BUSY_POLL_S)


def _record_loss(engine: EngineChild, session: Session, why: str) -> TuningRecord | None:
    """The trial that was in flight when its engine died is a measurement too: ``device_lost``."""
    trial: dict[str, Any] | None = engine.in_flight
    if trial is None:
        return None
    info: EngineInfo = engine.last_info
    phase = trial["phase"]
    record = TuningRecord(
        record_id=short_hash(session.session_id, trial["workload_key"], trial["candidate_key"], phase),
        run_id=session.run_id, session_id=session.session_id, engine=info.engine, tvm_version=info.tvm_version,
        target_key=info.target.key, workload_key=trial["workload_key"], task_name=trial["task_name"],
        candidate_key=trial["candidate_key"], trial=trial["trial"] if phase != "default" else 0, phase=phase,
        schedule=trial["trace"], started_at=time.time(), device=info.device, host=socket.gethostname(),
        failure=Failure("device_lost", why[:500]),
    )  # fmt: skip
    with Journal(session.journal_path) as journal:
        journal.append(record)
    return record


class _Watch:
    """Beside a running session: stores what its journal has gained, and ends it where nobody wants it any more."""

    def __init__(self, host: SessionHost, journal_path: str) -> None:
        self._host = host
        self._path = Path(journal_path)
        self._read = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="session watch")

    def __enter__(self) -> None:
        if self._host.publishes:
            self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._host.publishes:
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_WATCH_S):
            if not self._host.wanted():
                self._host.engine_of().finish_trial()
            # Away for a while: the next round has them, the session's end must.
            with suppress(StoreError):
                self._publish()

    def _publish(self) -> None:
        with suppress(FileNotFoundError), self._path.open("rb") as journal:
            journal.seek(self._read)
            data = journal.read()
            whole = data[: data.rfind(b"\n") + 1]
            if whole:
                self._host.records.put_part([from_line(TuningRecord, line) for line in whole.splitlines()])
                self._read += len(whole)
