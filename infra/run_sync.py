"""``tunewright sync``: what MLflow lacks of a run, from the object store, also into an empty MLflow.

Everything is logged as the run itself logs it, so that syncing again, or a run that is whole already,
doubles nothing.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from pathlib import Path
from typing import Any

from infra.champion import ChampionAlias
from infra.object_store import ObjectStore, get_folder
from infra.promotion import CHAMPION
from infra.published_model import Publication, restore_version
from infra.record_store import RecordStore
from infra.run_log import KIND_TAG, PARENT_TAG, RUN_TAG, RunLog
from infra.run_manifest import RunEnd, RunManifest, RunStart, RunTasks
from infra.run_tables import TaskLog, best_curve
from infra.tracking import Tracking
from tasks.errors import StoreError
from tasks.records import TuningRecord, TuningSummary

#: A run without an end, without a record for so long, is over: it was killed.
SILENT_S = 3600.0

Records = Mapping[str, Sequence[TuningRecord]]


@dataclass(frozen=True)
class Synced:
    """What MLflow has of the run now. ``rows`` were missing; ``notes`` say what was restored."""

    mlflow_run_id: str
    tasks: int
    measurements: int
    rows: int
    status: str
    notes: tuple[str, ...]


def sync_run(tracking_uri: str, store: ObjectStore, run_id: str, over: bool = False) -> Synced:
    """Bring the run ``run_id`` to MLflow as far as the store has it.

    ``over``: the run will not go on, also where it gave a sign of life lately. Raises InputError where
    the store does not know the run, StoreError, TrackingError.
    """
    manifest = RunManifest(store, run_id)
    start, tasks, end = manifest.start(), manifest.tasks(), manifest.end()
    tracking = Tracking(tracking_uri)
    tracking.check()
    notes = _restore_experiment(tracking, start)
    created, found = _restore_runs(tracking, start)
    log = RunLog.start(tracking_uri, start.experiment, start.run_name, start.params, start.tags)
    log.started_ms = int(start.at * 1000)
    log.origin = {k: v for k, v in start.tags.items() if k.startswith("mlflow.") or k == "tunewright.host"}
    records = _records(store, start, tasks)
    if tasks is not None:
        _log_tasks(tracking, log, start, tasks, records)
        with tempfile.TemporaryDirectory() as scratch:
            if manifest.sources(Path(scratch)):
                log.log_sources(Path(scratch))
    if end is not None and end.sessions:
        log.log_sessions(end.sessions)
    notes += found
    if created and end is not None and end.summary is not None:
        notes += _restore_version(tracking, store, log.run_id, end.summary)
    rows, measured = log.rows_sent, sum(map(len, records.values()))
    status, said = _end(log, start, end, records, over)
    return Synced(log.run_id, len(tasks.tasks) if tasks else 0, measured, rows, status, (*notes, *said))


def _restore_experiment(tracking: Tracking, start: RunStart) -> list[str]:
    def restore(client: Any) -> list[str]:
        experiment = client.get_experiment_by_name(start.experiment)
        if experiment is None:
            return [f"experiment {start.experiment!r} was not there and is made anew"]
        if experiment.lifecycle_stage == "active":
            return []
        client.restore_experiment(experiment.experiment_id)
        return [f"experiment {start.experiment!r} was deleted and is restored, with all its runs"]

    return tracking.call(f"restore experiment {start.experiment!r}", restore)


def _restore_runs(tracking: Tracking, start: RunStart) -> tuple[bool, list[str]]:
    """Restore the run and its children where they are deleted, make the parent where it is gone.

    Whether it was made, and what there is to say.
    """
    experiment_id = tracking.experiment_id(start.experiment)
    tags = {KIND_TAG: "run", **start.tags, RUN_TAG: start.run_id}

    def restore(client: Any) -> tuple[bool, list[str]]:
        from mlflow.entities import ViewType

        def search(wanted: str) -> list[Any]:
            return list(client.search_runs([experiment_id], wanted, ViewType.ALL, max_results=5000))

        parents = search(f"tags.`{RUN_TAG}` = '{start.run_id}' and tags.`{KIND_TAG}` = 'run'")
        if not parents:
            made = client.create_run(experiment_id, int(start.at * 1000), tags, start.run_name)
            return True, [f"the run was not there and is made anew: {made.info.run_id}"]
        active = [run for run in parents if run.info.lifecycle_stage == "active"]
        parent = (active or parents)[0]
        family = [parent, *search(f"tags.`{PARENT_TAG}` = '{parent.info.run_id}'")]
        deleted = [run.info.run_id for run in family if run.info.lifecycle_stage != "active"]
        for gone in deleted:
            client.restore_run(gone)
        return False, [f"{len(deleted)} of its runs in MLflow were deleted and are restored"] if deleted else []

    return tracking.call(f"restore run {start.run_id}", restore)


def _records(store: ObjectStore, start: RunStart, tasks: RunTasks | None) -> Records:
    """The records that the run had: its own, and those of the sessions that it started from."""
    if tasks is None:
        return {}
    info = start.engine
    records = RecordStore(store, info.engine, info.tvm_version, info.target.key)
    known = set(tasks.sessions)
    loaded = records.load(task.workload_key for task in tasks.tasks)
    return {
        key: tuple(r for r in found if r.run_id == start.run_id or r.session_id in known)
        for key, found in loaded.items()
    }


def _log_tasks(tracking: Tracking, log: RunLog, start: RunStart, tasks: RunTasks, records: Records) -> None:
    for task in tasks.tasks:
        log.log_records(task, records[task.workload_key])
    default_us = {
        task.name: task.weight * (TaskLog(task, "", _by_id(records[task.workload_key])).untuned_us or 0.0)
        for task in tasks.tasks
    }
    total_us = sum(default_us.values()) or 1.0
    log.log_fused(tasks.fused, {name: us / total_us for name, us in default_us.items()})
    if not _has_tables(tracking, log.run_id):
        log.log_tables(records)
    steps = tracking.call("read the model's curve", methodcaller("get_metric_history", log.run_id, "model_latency_us"))
    last = max((row.step for row in steps), default=-1)
    log.send([row for row in _model_curve(start, tasks, records) if row[3] > last])


def _has_tables(tracking: Tracking, run_id: str) -> bool:
    """Whether the run's own tables are there. They may hold what was quarantined since."""
    found = tracking.call("list the run's files", methodcaller("list_artifacts", run_id))
    return any(file.path == "measurements.parquet" for file in found)


def _model_curve(start: RunStart, tasks: RunTasks, records: Records) -> list[tuple[str, float, int, int]]:
    """The model's estimated latency after each of the run's sessions, as the run logs it while it goes on."""
    weights = {task.workload_key: task.weight for task in tasks.tasks}
    best = dict.fromkeys(weights, float("inf"))
    for key, found in records.items():
        for _, latency_us in best_curve([r for r in found if r.run_id != start.run_id]):
            best[key] = min(best[key], latency_us)
    own = sorted((r for found in records.values() for r in found if r.run_id == start.run_id), key=_time)
    last = {record.session_id: record.record_id for record in own}
    rows: list[tuple[str, float, int, int]] = []
    trials = 0
    for record in own:
        trials += record.phase == "search"
        if record.latency_us is not None and record.phase != "confirm":
            best[record.workload_key] = min(best[record.workload_key], record.latency_us)
        is_last = last[record.session_id] == record.record_id
        known = {key: us for key, us in best.items() if us != float("inf")}
        if is_last and known and record.phase != "confirm":
            when = int(record.started_at * 1000)
            estimate_us = sum(weights[key] * us for key, us in known.items())
            rows.append(("model_latency_us", estimate_us, when, trials))
            rows.append(("elapsed_s", record.started_at - start.at, when, trials))
    return rows


def _end(log: RunLog, start: RunStart, end: RunEnd | None, records: Records, over: bool) -> tuple[str, list[str]]:
    """End the runs in MLflow as the run ended; its status there and what there is to say."""
    if end is not None and end.summary is not None:
        log.finish(end.summary, end.at)
        return "FINISHED", []
    if end is not None:
        log.fail(end.failure, end.at)
        return "FAILED", [f"it had failed: {end.failure}"]
    last = max((r.started_at for found in records.values() for r in found if r.run_id == start.run_id), default=0.0)
    last = max(last, start.at)
    # A clock elsewhere may be ahead of this one.
    ago = f"{max(0.0, time.time() - last) / 60:.0f} minutes ago"
    if not over and time.time() - last < SILENT_S:
        return "RUNNING", [f"it has not ended, its last sign of life was {ago}; --over says that it will not go on"]
    reason = f"the run died: it has no end, and its last sign of life was at {_utc(last)}"
    log.fail(reason, last)
    return "FAILED", [reason]


def _restore_version(tracking: Tracking, store: ObjectStore, mlflow_run_id: str, summary: TuningSummary) -> list[str]:
    """Register the model that the run published once more, from the artifact in the store."""
    published = summary.published
    if not published.version:
        return []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            folder = get_folder(store, f"artifacts/{summary.artifact.digest}", Path(scratch) / "artifact")
        except StoreError as error:
            return [f"its model is not registered again: {error}"]
        artifact = replace(summary.artifact, path=str(folder))
        publication = Publication(
            published.name, mlflow_run_id, summary.model, summary.engine, artifact, summary.verdict
        )
        decision = f"{published.alias} when it was published: {published.reason}"
        version = restore_version(tracking, publication, published.artifact_uri, decision)
    notes = [f"its model is registered again: {published.name} version {version}, it was version {published.version}"]
    alias = ChampionAlias(tracking, store, published.name, summary.engine.target.key)
    champions = [e for e in alias.log.entries() if e.champion]
    was_champion = bool(champions) and champions[-1].move.artifact_digest == summary.artifact.digest
    if was_champion and alias.holder() is None:
        name = alias.alias(CHAMPION)
        tracking.call(f"set alias {name!r}", methodcaller("set_registered_model_alias", published.name, name, version))
        alias.up_to_date()
        notes.append(f"it was the champion and has the alias {name} again")
    return notes


def _by_id(records: Iterable[TuningRecord]) -> dict[str, TuningRecord]:
    return {record.record_id: record for record in records}


def _time(record: TuningRecord) -> tuple[float, int]:
    return record.started_at, record.trial


def _utc(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
