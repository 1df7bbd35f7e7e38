"""MLflow is filled from the object store: an empty one, one that lost a run, one whose run died half-way."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from infra.champion import find_champion
from infra.object_store import DirectoryStore, ObjectStore, put_folder
from infra.promotion import Race
from infra.published_model import publish_model
from infra.record_store import RecordStore
from infra.run_log import CURVES, RunLog
from infra.run_manifest import RunManifest
from infra.run_sync import Synced, sync_run
from tasks.engines import wire
from tasks.errors import InputError
from tasks.records import TuningRecord, TuningSummary
from tests.infra.sample_records import ENGINE, fused, record, summary, task
from tests.infra.test_published_model import artifact, latency, publication

_names = itertools.count()
NOW = time.time()


def records_of(run_id: str, began: float = NOW) -> list[TuningRecord]:
    """Two tasks, two sessions each, one record of a run before."""
    made = [record(0, 100.0, run_id="before", session_id="before-1", record_id=f"{run_id}-old", started_at=began - 99)]
    for number, session in itertools.product(range(2), range(2)):
        for trial in range(1, 4):
            at = 3 * session + trial
            made.append(
                record(
                    at,
                    90.0 - at if at != 2 else None,
                    run_id=run_id,
                    session_id=f"{run_id}-{number}{session}",
                    record_id=f"{run_id}-{number}-{at}",
                    workload_key=f"workload{number}",
                    predicted_us=80.0,
                    started_at=began + 10 * session + at,
                )
            )
    return made


@dataclass
class Run:
    """A tuning run as the store has it, in an experiment of its own."""

    url: str
    store: ObjectStore
    run_id: str
    records: list[TuningRecord]

    def __post_init__(self) -> None:
        self.experiment = f"experiment {self.run_id}"
        self.manifest = RunManifest(self.store, self.run_id)
        self.tags = {"tunewright.run_id": self.run_id, "tunewright.model": "cls"}
        self.tasks = (task(0), task(1))
        self.client = MlflowClient(tracking_uri=self.url)

    def keep(self, folder: Path) -> None:
        """Store manifest and records, which the run does before it logs anything."""
        self.manifest.write_start(f"cls {self.run_id}", self.experiment, {"trials": 12}, self.tags, ENGINE)
        found = {"workload0": [r for r in self.records if r.run_id != self.run_id]}
        self.manifest.write_tasks(fused(2, 3), self.tasks, found)
        journal = folder / "journal.jsonl"
        journal.write_text("".join(map(wire.to_line, self.records)))
        RecordStore(self.store, ENGINE.engine, ENGINE.tvm_version, ENGINE.target.key).upload_session(journal)

    def log(self, records: Sequence[TuningRecord]) -> RunLog:
        """What the run itself logs."""
        log = RunLog.start(self.url, self.experiment, f"cls {self.run_id}", {"trials": 12}, self.tags)
        for one in self.tasks:
            log.log_records(one, [r for r in records if r.workload_key == one.workload_key])
        return log

    def sync(self, over: bool = False) -> Synced:
        return sync_run(self.url, self.store, self.run_id, over)

    def seen(self) -> dict[str, Any]:
        """Everything that MLflow says about figures, by run name."""
        experiment = self.client.get_experiment_by_name(self.experiment)
        runs = self.client.search_runs([experiment.experiment_id])
        return {
            str(run.info.run_name): {
                "curves": {
                    key: [(m.step, m.timestamp, m.value) for m in self.client.get_metric_history(run.info.run_id, key)]
                    for key in {*run.data.metrics, *CURVES}
                },
                "params": run.data.params,
                "status": run.info.status,
                "ended": run.info.end_time,
            }
            for run in runs
        }


@pytest.fixture
def run(mlflow_url: str, tmp_path: Path) -> Run:
    run_id = f"20261130-2200{next(_names):02d}-abcdef"
    made = Run(mlflow_url, DirectoryStore(tmp_path / "store"), run_id, records_of(run_id))
    made.keep(tmp_path)
    return made


CHILDREN = ("fused_conv2d_add_relu0", "fused_conv2d_add_relu1")


def test_an_empty_mlflow_gets_the_whole_run_and_syncing_again_changes_nothing(run: Run) -> None:
    ended = run.manifest.write_end(unpublished())
    # MLflow was away at the end: the run itself counts it as a failure, sync brings what it had.
    run.manifest.write_end(None, "MLflow is away")
    first = run.sync()
    assert "is made anew" in first.notes[0]
    assert (first.status, first.tasks, first.measurements) == ("FINISHED", 2, 13)
    seen = run.seen()
    assert set(seen) == {f"cls {run.run_id}", *CHILDREN}
    parent = seen[f"cls {run.run_id}"]
    assert parent["params"]["trials"] == "12"
    assert parent["ended"] == int(ended * 1000)
    assert parent["curves"]["tuned_ms"][0][2] == 2.0
    # Five of six trials of each task succeeded; the first task has the earlier run's default besides.
    assert [len(seen[c]["curves"]["latency_us"]) for c in CHILDREN] == [6, 5]
    assert [step for step, _, _ in parent["curves"]["model_latency_us"]] == [5, 6, 11, 12]
    second = run.sync()
    assert second.notes == ()
    assert run.seen() == seen


def unpublished() -> TuningSummary:
    made = summary()
    return replace(made, published=replace(made.published, version="", alias=""))


def test_a_run_that_died_half_way_is_filled_up_without_doubling_and_ends_as_failed(run: Run) -> None:
    run.log(run.records[:5])
    half = run.seen()
    still = run.sync()
    assert still.status == "RUNNING"
    assert "has not ended, its last sign of life was 0 minutes ago" in still.notes[0]
    done = run.sync(over=True)
    assert done.status == "FAILED"
    assert "the run died" in done.notes[0]
    seen = run.seen()
    assert all(seen[name]["status"] == "FAILED" for name in seen)
    for name in CHILDREN:
        for key in CURVES:
            rows = seen[name]["curves"][key]
            assert len(rows) == len({row[:2] for row in rows})
            assert set(half[name]["curves"][key]) <= set(rows)
    assert len(seen[CHILDREN[1]]["curves"]["latency_us"]) == 5


def test_a_record_that_was_quarantined_since_makes_no_second_row(run: Run) -> None:
    run.manifest.write_end(unpublished())
    run.sync()
    before = run.seen()[CHILDREN[0]]["curves"]
    store = RecordStore(run.store, ENGINE.engine, ENGINE.tvm_version, ENGINE.target.key)
    store.quarantine(f"{run.run_id}-0-1", "wrong")
    run.sync()
    assert run.seen()[CHILDREN[0]]["curves"]["best_latency_us"] == before["best_latency_us"]


def test_a_deleted_experiment_and_a_deleted_run_are_restored(run: Run) -> None:
    log = run.log(run.records)
    run.manifest.write_end(unpublished())
    experiment = run.client.get_experiment_by_name(run.experiment).experiment_id
    run.client.delete_experiment(experiment)
    synced = run.sync()
    assert "was deleted and is restored, with all its runs" in synced.notes[0]
    assert synced.mlflow_run_id == log.run_id
    run.client.delete_run(log.run_id)
    again = run.sync()
    assert again.notes == ("1 of its runs in MLflow were deleted and are restored",)
    assert len(run.client.search_runs([experiment])) == 3


def test_the_published_model_is_registered_again_and_serves_again(run: Run, tmp_path: Path) -> None:
    made = artifact(tmp_path / "artifact")
    name = f"again-{run.run_id}"
    to_publish = publication(run.url, name, made)
    published = publish_model(run.url, run.store, replace(to_publish, engine=ENGINE), Race(latency(2.0)))
    assert published.alias == "champion"
    run.manifest.write_end(replace(summary(), published=published, artifact=made))
    empty = f"sqlite:///{tmp_path / 'empty' / 'mlflow.db'}"
    notes = sync_run(empty, run.store, run.run_id).notes
    assert any(f"{name} version 1, it was version 1" in note for note in notes)
    champion = find_champion(empty, name, ENGINE.target.key)
    assert champion is not None
    assert champion.artifact_digest == made.digest == hashlib.sha256(b"2.0").hexdigest()


def test_what_was_built_comes_back_too(run: Run, tmp_path: Path) -> None:
    (tmp_path / "built" / "workload0").mkdir(parents=True)
    (tmp_path / "built" / "workload0" / "schedule.py").write_text("sch = ...")
    put_folder(run.store, f"runs/{run.run_id}/built", tmp_path / "built")
    run.sync()
    experiment = run.client.get_experiment_by_name(run.experiment).experiment_id
    [child] = run.client.search_runs([experiment], "tags.`tunewright.workload_key` = 'workload0'")
    assert [f.path for f in run.client.list_artifacts(child.info.run_id, "built")] == ["built/schedule.py"]


def test_a_run_that_the_store_does_not_know_is_one_line(run: Run) -> None:
    with pytest.raises(InputError, match="has no run '20200101-000000-000000'") as caught:
        sync_run(run.url, run.store, "20200101-000000-000000")
    assert "\n" not in str(caught.value)
