"""What a tuning run leaves in a real MLflow, over HTTP, also when it is logged twice or dies between."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from pyarrow import parquet

from infra.run_log import RunLog
from infra.tracking import Tracking
from tasks.errors import TrackingError
from tasks.records import Latency, TuningRecord
from tests.infra.sample_records import fused, record, summary, task
from tests.services import free_port

EXPERIMENT = "tuning"
_names = itertools.count()


@pytest.fixture
def client(mlflow_url: str) -> MlflowClient:
    return MlflowClient(tracking_uri=mlflow_url)


@pytest.fixture
def name() -> str:
    return f"run-{next(_names)}"


def start(url: str, name: str, **params: object) -> RunLog:
    return RunLog.start(url, EXPERIMENT, name, params, {"tunewright.run_id": name})


def history(client: MlflowClient, run_id: str, key: str) -> list[tuple[int, float, int]]:
    return [(m.step, m.value, m.timestamp) for m in client.get_metric_history(run_id, key)]


def curve(client: MlflowClient, run_id: str, key: str) -> list[tuple[int, float]]:
    return [(step, value) for step, value, _ in history(client, run_id, key)]


RECORDS = (
    record(0, 100.0),
    record(1, 60.0, predicted_us=70.0),
    record(2, None),
    record(3, 40.0),
    record(4, 80.0),
    record(5, 38.0, phase="confirm"),
)


def test_the_curves_of_a_task_have_one_row_a_trial_however_often_they_are_logged(
    client: MlflowClient, mlflow_url: str, name: str
) -> None:
    log = start(mlflow_url, name)
    for part in (RECORDS[:2], RECORDS[:4], RECORDS[4:], RECORDS):
        log.log_records(task(0), part)
    again = start(mlflow_url, name)
    again.log_records(task(0), RECORDS)
    child = log.task_run(task(0))
    assert again.run_id == log.run_id
    assert again.task_run(task(0)) == child
    assert curve(client, child, "latency_us") == [(0, 100), (1, 60), (3, 40), (4, 80)]
    assert curve(client, child, "best_latency_us") == [(0, 100), (1, 60), (3, 40)]
    assert curve(client, child, "predicted_us") == [(1, 70)]
    assert curve(client, child, "confirm_latency_us") == [(5, 38)]
    # The time is the trial's, not that of logging.
    assert history(client, child, "latency_us")[1][2] == 1_760_000_001_000


@pytest.mark.parametrize("batch", [1, 7, 40])
def test_the_best_latency_has_points_where_it_falls_and_every_so_many_trials(
    client: MlflowClient, mlflow_url: str, name: str, batch: int
) -> None:
    latencies = [100.0, *[120.0] * 4, None, 60.0, *[80.0] * 27, 50.0, *[70.0] * 5]
    given = [record(trial, latency) for trial, latency in enumerate(latencies)]
    log = start(mlflow_url, name)
    for end in range(batch, len(given) + batch, batch):
        log.log_records(task(0), given[:end])
    points = [(0, 100), (4, 100), (6, 60), (16, 60), (32, 60), (33, 60), (34, 50)]
    child = log.task_run(task(0))
    assert curve(client, child, "best_latency_us") == points
    log.finish(summary())
    assert curve(client, child, "best_latency_us") == [*points, (39, 50)]
    again = start(mlflow_url, name)
    again.log_records(task(0), given)
    again.finish(summary())
    assert curve(client, child, "best_latency_us") == [*points, (39, 50)]


def test_a_child_run_says_what_was_tuned(client: MlflowClient, mlflow_url: str, name: str) -> None:
    log = start(mlflow_url, name)
    child = client.get_run(log.task_run(task(1)))
    assert child.info.run_name == "fused_conv2d_add_relu1"
    assert child.data.tags["mlflow.parentRunId"] == log.run_id
    assert child.data.tags["tunewright.workload_key"] == "workload1"
    assert child.data.params["operators"] == "conv2d + add + relu"
    assert child.data.params["inputs"] == "1x32x24x96 float32, 32x32x3x3 float32"
    assert child.data.params["weight"] == "2"


def test_every_task_has_a_curve_also_with_the_default_trial_only(
    client: MlflowClient, mlflow_url: str, name: str
) -> None:
    log = start(mlflow_url, name)
    for number in range(3):
        log.log_records(task(number), [record(0, 50.0, record_id=f"d{number}")])
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    children = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{log.run_id}'")
    assert sorted(c.data.metrics["best_latency_us"] for c in children) == [50.0, 50.0, 50.0]


def test_a_continued_run_keeps_its_parameters_and_runs_again(client: MlflowClient, mlflow_url: str, name: str) -> None:
    first = start(mlflow_url, name, trials=64)
    first.task_run(task(0))
    first.fail("interrupted")
    again = start(mlflow_url, name, trials=128, minutes=3)
    run = client.get_run(again.run_id)
    assert (again.run_id, run.info.status) == (first.run_id, "RUNNING")
    assert (run.data.params["trials"], run.data.params["minutes"]) == ("64", "3")


def test_progress_is_the_models_latency_by_trials(client: MlflowClient, mlflow_url: str, name: str) -> None:
    log = start(mlflow_url, name)
    log.log_progress(0, 8000.0, 1.0)
    log.log_progress(64, 2000.0, 30.0)
    assert curve(client, log.run_id, "model_latency_us") == [(0, 8000.0), (64, 2000.0)]


def download(client: MlflowClient, run_id: str, path: str, folder: Path) -> Path:
    return Path(client.download_artifacts(run_id, path, str(folder)))


def test_tables_hold_every_measurement_once(client: MlflowClient, mlflow_url: str, name: str, tmp_path: Path) -> None:
    log = start(mlflow_url, name)
    by_task = {"workload0": RECORDS, "workload1": [record(0, 5.0, workload_key="workload1")], "workload2": []}
    for number in range(2):
        log.task_run(task(number))
    for _ in range(2):
        log.log_tables(by_task)
    whole = parquet.read_table(download(client, log.run_id, "measurements.parquet", tmp_path)).to_pylist()
    assert len(whole) == 7
    assert whole[2]["failure"] == "build"
    assert whole[3]["latencies_us"] == pytest.approx([40.0, 44.0, 36.0])
    child = log.task_run(task(0))
    shown = json.loads(download(client, child, "measurements.json", tmp_path).read_text())
    assert [row[shown["columns"].index("trial")] for row in shown["data"]] == [0, 1, 2, 3, 4, 5]
    assert "schedule" not in shown["columns"]
    assert json.loads(client.get_run(child).data.tags["mlflow.loggedArtifacts"])[0]["type"] == "table"


def test_the_fused_graph_is_a_table_and_a_picture(
    client: MlflowClient, mlflow_url: str, name: str, tmp_path: Path
) -> None:
    log = start(mlflow_url, name)
    log.log_fused(fused(3, 5), {"fused_conv2d_add_relu0": 0.5})
    shown = json.loads(download(client, log.run_id, "subgraphs.json", tmp_path).read_text())
    assert dict(zip(shown["columns"], shown["data"][0], strict=True))["share"] == 0.5
    assert download(client, log.run_id, "pictures/fused_graph.png", tmp_path).stat().st_size > 1000


def finished(url: str, name: str) -> RunLog:
    log = start(url, name)
    log.log_records(task(0), RECORDS)
    log.log_records(task(1), [record(0, None, record_id="x", workload_key="workload1")])
    log.finish(summary())
    return log


def test_a_finished_run_reports_and_ends_with_its_children(client: MlflowClient, mlflow_url: str, name: str) -> None:
    log = finished(mlflow_url, name)
    run = client.get_run(log.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["speedup"] == pytest.approx(8.05 / 2.0)
    assert run.data.metrics["failures.build"] == 2
    assert run.data.metrics["onnxruntime_ms"] == 1.8
    assert run.data.params["version.apache-tvm"] == "0.27.0"
    note = run.data.tags["mlflow.note.content"]
    for part in ("4.03 times", "**Right**", "3e-06", "version 3", "`fused_conv2d_add_relu0`", "2 build"):
        assert part in note
    child = client.get_run(log.task_run(task(0)))
    assert child.info.status == "FINISHED"
    assert child.data.metrics["failures.build"] == 1
    assert "2.50 times as fast" in child.data.tags["mlflow.note.content"]
    broken = client.get_run(log.task_run(task(1)))
    assert "No trial succeeded" in broken.data.tags["mlflow.note.content"]
    pictures = {f.path for f in client.list_artifacts(log.run_id, "pictures")}
    assert {"pictures/best_latency.png", "pictures/time_by_subgraph.png"} <= pictures


def test_a_failed_run_says_why_and_ends_its_children(client: MlflowClient, mlflow_url: str, name: str) -> None:
    log = start(mlflow_url, name)
    child = log.task_run(task(0))
    log.fail("every trial fails alike: no compiler")
    run = client.get_run(log.run_id)
    assert run.info.status == "FAILED"
    assert run.data.tags["tunewright.failure"] == "every trial fails alike: no compiler"
    assert client.get_run(child).info.status == "FAILED"


def test_two_thousand_trials_are_one_page_of_history(client: MlflowClient, mlflow_url: str, name: str) -> None:
    many: list[TuningRecord] = [record(n, 1000.0 - n / 10, predicted_us=900.0) for n in range(2000)]
    log = start(mlflow_url, name)
    log.task_run(task(0))
    began = time.monotonic()
    log.log_records(task(0), many)
    # 6,000 rows; 1,000 trials a second on a quiet machine, a fifth of that where others run.
    assert time.monotonic() - began < 10
    # The history comes in pages of 25,000: one request.
    assert len(client.get_metric_history(log.task_run(task(0)), "latency_us")) == 2000


def test_an_unreachable_server_is_one_line_in_seconds() -> None:
    began = time.monotonic()
    with pytest.raises(TrackingError, match="set MLFLOW_TRACKING_URI") as caught:
        start(f"http://127.0.0.1:{free_port()}", "x")
    assert time.monotonic() - began < 15
    assert "\n" not in str(caught.value)
    assert caught.value.retried


def test_a_server_that_never_answers_is_one_line_in_seconds() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        began = time.monotonic()
        with pytest.raises(TrackingError, match="set MLFLOW_TRACKING_URI"):
            Tracking(f"http://127.0.0.1:{silent.getsockname()[1]}").check()
        assert time.monotonic() - began < 20


def test_an_unwritable_database_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrackingError, match="cannot write MLflow's database") as caught:
        start(f"sqlite:///{tmp_path}/file/mlflow.db", "x")
    assert "\n" not in str(caught.value)


def test_a_password_in_the_uri_is_not_shown() -> None:
    with pytest.raises(TrackingError) as caught:
        Tracking(f"http://user:hunter2@127.0.0.1:{free_port()}").check()
    assert "hunter2" not in str(caught.value)


def test_a_deleted_experiment_is_named(client: MlflowClient, mlflow_url: str) -> None:
    client.delete_experiment(client.create_experiment("deleted"))
    with pytest.raises(TrackingError, match=r"'deleted'.*is deleted; restore it"):
        RunLog.start(mlflow_url, "deleted", "x", {}, {"tunewright.run_id": "x"})


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    yield tmp_path / "cwd"


def test_without_a_server_everything_lies_beside_the_database(tmp_path: Path, elsewhere: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'home' / 'mlflow.db'}"
    log = start(uri, "local")
    log.log_tables({"workload0": RECORDS})
    assert list((tmp_path / "home" / "mlartifacts").rglob("measurements.parquet"))
    assert list(elsewhere.iterdir()) == []


def test_a_night_says_what_changed_since_the_one_before_and_shows_what_was_built(
    tmp_path: Path, elsewhere: Path
) -> None:
    uri = f"sqlite:///{tmp_path / 'home' / 'mlflow.db'}"
    client = MlflowClient(uri)
    built = tmp_path / "sources" / "workload0"
    built.mkdir(parents=True)
    (built / "schedule.py").write_text("# a schedule")
    slow = replace(summary().verdict, tuned=Latency((2.5, 2.5, 2.5, 2.5)))
    reasons = {task(0).name: "its search space is exhausted"}
    notes = []
    for night, made in enumerate((summary(verdict=slow), summary(reasons=reasons))):
        tags = {"tunewright.run_id": f"night-{night}", "tunewright.model": "cls"}
        log = RunLog.start(uri, "nights", f"night {night}", {}, tags)
        log.log_records(task(0), RECORDS)
        log.log_sources(tmp_path / "sources")
        log.finish(made)
        notes.append(client.get_run(log.run_id).data.tags["mlflow.note.content"])
    assert "no earlier finished run" in notes[0]
    assert "`night 0`" in notes[1]
    assert "tuned took 2.5 ms then and takes **2 ms** now (-20.0%)" in notes[1]
    assert "Model, versions and machine are the same" in notes[1]
    child = log.task_run(task(0))
    assert (
        "Why it is no faster: its search space is exhausted" in client.get_run(child).data.tags["mlflow.note.content"]
    )
    assert [file.path for file in client.list_artifacts(child, "built")] == ["built/schedule.py"]
    assert (Path(client.download_artifacts(log.run_id, "report.md")).read_text()).startswith("## cls")


def test_a_run_without_tasks_has_a_report_and_ends(tmp_path: Path, elsewhere: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'home' / 'mlflow.db'}"
    log = start(uri, "nothing")
    log.log_tables({})
    log.finish(summary(tasks=0, trials=0, failures={}))
    run = MlflowClient(uri).get_run(log.run_id)
    assert run.info.status == "FINISHED"
    assert "No subgraph of this model could be tuned" in run.data.tags["mlflow.note.content"]


def test_neither_mlflow_nor_matplotlib_nor_tvm_is_imported_before_it_is_needed() -> None:
    names: Any = ("mlflow", "matplotlib", "tvm", "boto3", "pyarrow")
    code = "import sys, infra.run_log, infra.published_model, infra.record_store;" + (
        f"print([n for n in {names} if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert done.stdout.strip() == "[]"
