"""What an engine is: the one interface that flows know. ``child.EngineChild`` implements it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tasks.records import (
    Artifact,
    EngineInfo,
    FusedModule,
    ImportedModule,
    Latency,
    MeasureSettings,
    ModelFile,
    Session,
    SessionResult,
    TuningRecord,
    TuningTask,
)


@dataclass(frozen=True)
class BuildRequest:
    """What to build: each workload's records, best first; none for an untuned artifact.

    With ``sources_dir`` the winners are written there for people, a folder a tuned workload: the schedule
    as readable IR, its trace, the code that was generated. No part of the artifact.
    """

    fused: FusedModule
    best: dict[str, tuple[TuningRecord, ...]]
    out_dir: str
    tuned: bool
    sources_dir: str = ""


@dataclass(frozen=True)
class ExecutionRequest:
    """Run the artifact in ``artifact_dir`` on the arrays of ``inputs_path`` (an .npz) ``repeats`` times.

    With ``outputs_path`` the outputs are written there as an .npz. With ``profile_path`` that many runs are
    watched kernel by kernel, and with ``roof_path`` it is measured how fast the machine is at most; each
    is written there as JSON. An engine that cannot tell writes nothing.
    """

    artifact_dir: str
    inputs_path: str
    repeats: int
    outputs_path: str = ""
    profile_path: str = ""
    roof_path: str = ""


class Engine(Protocol):
    """A compiler that imports, fuses, tunes and builds, wherever it runs.

    Every method raises ``EngineCrashed``, ``EngineTimeout`` or ``EngineError``, and what it lists.
    """

    def describe(self) -> EngineInfo:
        """Versions, target and device. Raises EngineUnavailable, TargetError."""

    def import_model(self, model: ModelFile) -> ImportedModule:
        """Translate. Raises ModelError."""

    def fuse(self, imported: ImportedModule, granularity: str) -> FusedModule:
        """Optimise and fuse."""

    def extract(self, fused: FusedModule, out_dir: str) -> tuple[TuningTask, ...]:
        """One task a distinct workload, heaviest first; writes each workload's IR into ``out_dir``."""

    def tune(self, session: Session, on_record: Callable[[TuningRecord], None]) -> SessionResult:
        """Run one session; each record is in the journal before ``on_record`` hears of it.

        Raises DeviceBusy where another process measures on the device.
        """

    def build(self, request: BuildRequest) -> Artifact:
        """Compile the model into a folder that ``loader.py`` in it can load."""

    def execute(self, request: ExecutionRequest) -> Latency:
        """Run an artifact in a process of its own."""


#: The version of an engine's default schedules, to be raised when they change. A record of one has no schedule that
#: could be replayed: the version, as its ``implementation``, is all that tells what was measured.
DEFAULT_SCHEDULES = {"relax": "tiles-4"}


def is_outdated(record: TuningRecord) -> bool:
    """Is this the measurement of a default schedule that is no longer built?"""
    return not record.schedule and record.implementation != DEFAULT_SCHEDULES.get(record.engine, "")


def counts_for(record: TuningRecord, settings: MeasureSettings) -> bool:
    """May a session with ``settings`` go by this record? Times with a cold cache and with a warm one do not compare."""
    measured = record.measurement
    return not is_outdated(record) and (measured is None or measured.settings.flush_cache == settings.flush_cache)


def best_first(records: Sequence[TuningRecord]) -> tuple[TuningRecord, ...]:
    """Measured records, one a candidate, fastest first; a confirmation overrides the search's figure.

    A candidate that was ever seen to compute something wrong is none, however it was timed otherwise.
    """
    wrong = {r.candidate_key for r in records if r.schedule and r.failure and r.failure.kind == "wrong_output"}
    latency: dict[str, tuple[int, float, TuningRecord]] = {}
    for record in records:
        if record.latency_us is None or record.candidate_key in wrong:
            continue
        confirmed = record.phase == "confirm"
        known = latency.get(record.candidate_key)
        if known is None or (confirmed, -record.latency_us) > (bool(known[0]), -known[1]):
            latency[record.candidate_key] = (confirmed, record.latency_us, record)
    confirmed_any = any(entry[0] for entry in latency.values())

    def rank(entry: tuple[int, float, TuningRecord]) -> tuple[bool, float]:
        confirmed, latency_us, record = entry
        # Where the best few were measured again, only they are comparable: a single lucky timing of
        # another candidate must not win over a confirmed one. The default schedule is what a build
        # falls back to, so nothing slower than it may replace it.
        return confirmed_any and not confirmed and bool(record.schedule), latency_us

    return tuple(record for _, _, record in sorted(latency.values(), key=rank))
