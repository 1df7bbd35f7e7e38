"""What a tuning run is, in the object store: enough to fill an MLflow that has lost it, or never had it.

    runs/<run id>/start.json     its parameters and tags, and where its records lie
    runs/<run id>/tasks.json     its fused subgraphs and tasks, and which sessions' records it started from
    runs/<run id>/built/         what was built of each task, for people to read
    runs/<run id>/end-<n>.json   how it ended: the summary, or the reason of the failure

Objects never change: a run that is continued and ends again writes a further end. One with a summary counts,
or else the last.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.object_store import ObjectMissing, ObjectStore, checked_key, get_folder, put_folder
from tasks.engines import wire
from tasks.errors import InputError, StoreError
from tasks.records import EngineInfo, FusedModule, TuningRecord, TuningSummary, TuningTask

_END = re.compile(r"end-(\d+)\.json")
#: Ends that one run can have.
_TRIES = 100


@dataclass(frozen=True)
class RunStart:
    """``params`` and ``tags`` are those of the parent run in MLflow; ``at`` is a Unix time."""

    run_id: str
    run_name: str
    experiment: str
    params: dict[str, str]
    tags: dict[str, str]
    engine: EngineInfo
    at: float
    schema_version: int = 1


@dataclass(frozen=True)
class RunTasks:
    """``sessions`` are those whose records the run found in the store when it started."""

    fused: FusedModule
    tasks: tuple[TuningTask, ...]
    sessions: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunEnd:
    """Exactly one of ``summary`` and ``failure`` is set; ``sessions`` is the table of the run's decisions."""

    at: float
    failure: str = ""
    summary: TuningSummary | None = None
    sessions: tuple[dict[str, Any], ...] = field(default=())


class RunManifest:
    """A run's manifest. Every method raises StoreError; reading raises InputError where a run is unknown."""

    def __init__(self, store: ObjectStore, run_id: str) -> None:
        self._store = store
        self.run_id = run_id
        self._root = checked_key(f"runs/{run_id}")

    def write_start(
        self, run_name: str, experiment: str, params: Mapping[str, object], tags: Mapping[str, str], engine: EngineInfo
    ) -> None:
        """Say that the run exists. Once: a run that is continued keeps its first parameters."""
        texts = {key: str(value) for key, value in params.items()}
        start = RunStart(self.run_id, run_name, experiment, texts, dict(tags), engine, time.time())
        self._store.put(f"{self._root}/start.json", wire.to_line(start).encode())

    def write_tasks(
        self, fused: FusedModule, tasks: Iterable[TuningTask], known: Mapping[str, Sequence[TuningRecord]]
    ) -> None:
        """Say what the run tunes and which records it found, by workload."""
        found = (record for records in known.values() for record in records)
        sessions = sorted({record.session_id for record in found if record.run_id != self.run_id})
        made = RunTasks(fused, tuple(tasks), tuple(sessions))
        self._store.put(f"{self._root}/tasks.json", wire.to_line(made).encode())

    def write_sources(self, folder: Path) -> None:
        """Store what was built of each task, where there is anything."""
        if folder.is_dir():
            put_folder(self._store, f"{self._root}/built", folder)

    def sources(self, folder: Path) -> bool:
        """Write what was built of each task into ``folder``; False where that was not stored."""
        try:
            get_folder(self._store, f"{self._root}/built", folder)
        except ObjectMissing:
            return False
        return True

    def write_end(
        self, summary: TuningSummary | None, failure: str = "", sessions: Iterable[Mapping[str, object]] = ()
    ) -> float:
        """Say how the run ended; when that was, as a Unix time."""
        end = RunEnd(time.time(), failure, summary, tuple(dict(s) for s in sessions))
        data = wire.to_line(end).encode()
        for number in range(1, _TRIES):
            if self._store.put(f"{self._root}/end-{number}.json", data):
                return end.at
        raise StoreError(f"run {self.run_id} has ended {_TRIES} times")

    def start(self) -> RunStart:
        """How the run started. Raises InputError where the store has no such run."""
        try:
            return wire.from_line(RunStart, self._store.get(f"{self._root}/start.json"))
        except ObjectMissing as error:
            raise InputError(
                f"the object store {self._store.uri('')} has no run {self.run_id!r}; a run's id is the tag "
                "tunewright.run_id in MLflow, and TUNEWRIGHT_STORE must be the store that it ran with"
            ) from error

    def tasks(self) -> RunTasks | None:
        """What the run tunes; None where it ended before that was known."""
        try:
            return wire.from_line(RunTasks, self._store.get(f"{self._root}/tasks.json"))
        except ObjectMissing:
            return None

    def end(self) -> RunEnd | None:
        """How the run ended; None where it still goes on, or died."""
        prefix = f"{self._root}/"
        numbers = [int(m[1]) for key in self._store.list(prefix) if (m := _END.fullmatch(key.removeprefix(prefix)))]
        ends = [wire.from_line(RunEnd, self._store.get(f"{prefix}end-{n}.json")) for n in sorted(numbers, reverse=True)]
        return next((end for end in ends if end.summary is not None), ends[0] if ends else None)
