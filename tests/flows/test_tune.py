"""The whole path, as a user runs it: real TVM, Prefect server, MLflow and S3 over HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import onnx
import pytest

from tasks.engines.wire import from_line
from tasks.import_model import OnnxRuntimeModel, import_model_file, seeded_inputs
from tasks.model_source import fetch
from tasks.records import TuningRecord
from tests.flows.command import Command, last_json
from tests.models import beginning_of_classifier, conv_model

BUCKET = "tunewright-test"


@pytest.fixture(scope="module")
def service_run(
    tmp_path_factory: pytest.TempPathFactory, prefect_url: str, mlflow_url: str, s3_url: str
) -> tuple[Command, dict[str, Any], str]:
    """One run of the beginning of a real model over all services: the command, its JSON line, its output."""
    home = tmp_path_factory.mktemp("services") / "home"
    command = Command(
        home,
        {
            "PREFECT_API_URL": prefect_url, "MLFLOW_TRACKING_URI": mlflow_url,
            "TUNEWRIGHT_STORE": f"s3://{BUCKET}/run", "AWS_ENDPOINT_URL": s3_url,
        },
    )  # fmt: skip
    done = command.run(*_classifier(home), "--trials", "24", timeout_s=580)
    assert done.returncode == 0, done.stderr[-3000:]
    return command, last_json(done.stdout), done.stdout


def _classifier(home: Path) -> tuple[str, ...]:
    path = beginning_of_classifier(home.parent / "classifier.onnx")
    return ("tune", str(path), "--shape", "x=1,3,48,192", "--name", "direction")


def _s3_records(s3_url: str) -> list[TuningRecord]:
    client = boto3.session.Session().client("s3", endpoint_url=s3_url)
    found = []
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="run/records/"):
        for entry in page.get("Contents", []):
            body = client.get_object(Bucket=BUCKET, Key=entry["Key"])["Body"].read()
            found += [from_line(TuningRecord, line) for line in body.splitlines()]
    return found


def test_the_last_line_says_what_came_out(service_run: tuple[Command, dict[str, Any], str]) -> None:
    _, line, output = service_run
    assert set(line) == {
        "tasks", "trials", "untuned_ms", "tuned_ms", "onnxruntime_ms",
        "max_abs_error", "mlflow_run_id", "artifact_uri",
    }  # fmt: skip
    assert line["trials"] == 24
    assert line["tasks"] > 10
    # Which is faster is not for a busy machine and 24 trials to say: default schedules are good ones.
    assert line["tuned_ms"] > 0
    assert line["untuned_ms"] > 0
    # Of outputs up to some tens: float32 sums in another order.
    assert line["max_abs_error"] < 1e-4
    assert "tuned" in output
    assert "onnxruntime" in output
    assert f"/runs/{line['mlflow_run_id']}?workflowType=machine_learning" in output


def test_every_measurement_is_in_the_store_once(service_run: tuple[Command, dict[str, Any], str], s3_url: str) -> None:
    command, line, _ = service_run
    records = _s3_records(s3_url)
    phases = Counter(record.phase for record in records)
    assert phases["search"] == line["trials"]
    assert phases["default"] == line["tasks"]
    assert phases["confirm"] > 0
    assert max(Counter(record.record_id for record in records).values()) == 1
    assert command.journalled() == 0, "a journal whose records are stored is removed"


def test_what_the_cost_model_learned_is_stored(service_run: tuple[Command, dict[str, Any], str], s3_url: str) -> None:
    client = boto3.session.Session().client("s3", endpoint_url=s3_url)
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix="run/cost-model/relax/")["Contents"]
    assert listed
    assert all(entry["Key"].endswith(".npz") for entry in listed)


def test_mlflow_has_a_best_latency_curve_for_every_task(
    service_run: tuple[Command, dict[str, Any], str], mlflow_url: str, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    _, line, _ = service_run
    client = MlflowClient(mlflow_url)
    parent = client.get_run(line["mlflow_run_id"])
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["tuned_ms"] == pytest.approx(line["tuned_ms"], rel=1e-3)
    assert "times" in parent.data.tags["mlflow.note.content"]
    children = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'", max_results=1000
    )
    assert len(children) == line["tasks"]
    searched = 0
    for child in children:
        best = client.get_metric_history(child.info.run_id, "best_latency_us")
        every = client.get_metric_history(child.info.run_id, "latency_us")
        assert best, child.info.run_name
        assert [point.value for point in best] == sorted((point.value for point in best), reverse=True)
        searched += len([point for point in every if point.step > 0])
    assert searched == line["trials"]
    artifacts = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert {
        "subgraphs.json",
        "sessions.json",
        "profile.json",
        "report.md",
        "pictures",
        "measurements.parquet",
    } <= artifacts
    drawn = {Path(file.path).stem for file in client.list_artifacts(parent.info.run_id, "pictures")}
    assert drawn == {
        "best_latency", "failures_by_kind", "fused_graph", "model_latency", "profile", "roofline",
        "savings_by_subgraph", "time_by_subgraph",
    }  # fmt: skip
    for child in children:
        files = {Path(file.path).name for file in client.list_artifacts(child.info.run_id, "built")}
        schedule = Path(client.download_artifacts(child.info.run_id, "built/schedule.py", str(tmp_path)))
        heading = schedule.read_text().splitlines()[0]
        # Whether a candidate beats a good default schedule within 24 trials is not for this test to say.
        assert ("trace.json" in files) is (": record " in heading), heading
        assert ("trace.json" in files) is not ("the default schedule" in heading), heading
    assert all("Why it is no faster" in child.data.tags["mlflow.note.content"] for child in children)
    assert any(client.get_metric_history(child.info.run_id, "predicted_us") for child in children)


def test_prefect_shows_the_run_and_its_sessions(
    service_run: tuple[Command, dict[str, Any], str], prefect_url: str
) -> None:
    import httpx

    everything = httpx.post(f"{prefect_url}/flow_runs/filter", json={}).json()
    # The server is shared: the runs of other flows are there too, with parameters of their own.
    found = [run for run in everything if run["parameters"].get("parameters", {}).get("name") == "direction"]
    assert found
    assert {run["state_type"] for run in found} == {"COMPLETED"}
    chosen = {"flow_runs": {"id": {"any_": [run["id"] for run in found]}}, "limit": 200}
    tasks = httpx.post(f"{prefect_url}/task_runs/filter", json=chosen).json()
    names = [task["name"] for task in tasks]
    assert any(name.startswith("search ") for name in names), names
    assert {task["state_type"] for task in tasks} == {"COMPLETED"}


def test_the_registered_model_predicts_in_a_fresh_process(
    service_run: tuple[Command, dict[str, Any], str], mlflow_url: str, tmp_path: Path
) -> None:
    path = beginning_of_classifier(tmp_path / "classifier.onnx")
    model = import_model_file(fetch(str(path), tmp_path), {"x": (1, 3, 48, 192)}, tmp_path)
    inputs = seeded_inputs(model, 7)
    expected = OnnxRuntimeModel(model, 1).run(inputs)
    np.savez(tmp_path / "inputs.npz", allow_pickle=False, **inputs)
    script = (
        "import sys, mlflow, numpy as np\n"
        "inputs = dict(np.load(sys.argv[1]))\n"
        "out = mlflow.pyfunc.load_model('models:/direction@champion').predict(inputs)\n"
        "np.savez(sys.argv[2], **out)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "inputs.npz"), str(tmp_path / "outputs.npz")],
        env={"PATH": "/usr/bin:/bin", "MLFLOW_TRACKING_URI": mlflow_url, "HOME": str(tmp_path)},
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(tmp_path / "outputs.npz") as stored:
        for name, want in expected.items():
            # float32: another order of summation moves the outputs by some 1e-6 of the largest.
            np.testing.assert_allclose(stored[name], want, atol=1e-5 * np.abs(want).max())


def test_a_second_run_starts_from_the_records_and_measures_nothing_twice(
    service_run: tuple[Command, dict[str, Any], str], s3_url: str, mlflow_url: str
) -> None:
    from mlflow import MlflowClient

    command, _, _ = service_run
    before = {record.record_id for record in _s3_records(s3_url)}
    done = command.run(*_classifier(command.home), "--trials", "16", timeout_s=400)
    assert done.returncode == 0, done.stderr[-3000:]
    records = _s3_records(s3_url)
    fresh = [record for record in records if record.record_id not in before]
    assert not [record for record in fresh if record.phase == "default"]
    line = last_json(done.stdout)
    assert line["trials"] == len([r for r in fresh if r.phase == "search"]) == 16
    note = MlflowClient(mlflow_url).get_run(line["mlflow_run_id"]).data.tags["mlflow.note.content"]
    assert "Against the run before" in note
    assert "Model, versions and machine are the same" in note
    assert "| champion (version 1) |" in note
    searched = Counter((r.workload_key, r.candidate_key) for r in records if r.phase == "search")
    assert max(searched.values()) == 1


def test_a_wrong_artifact_is_not_published(tmp_path: Path, prefect_url: str, mlflow_url: str) -> None:
    """The normalised model in the cache is damaged, so that the engine compiles other weights."""
    path = tmp_path / "convs.onnx"
    onnx.save(conv_model(), path)
    settings = {"PREFECT_API_URL": prefect_url, "MLFLOW_TRACKING_URI": mlflow_url}
    command = Command(tmp_path / "home", settings)
    assert command.run("inspect", str(path)).returncode == 0
    (normalised,) = (tmp_path / "home" / "models").glob("*.onnx")
    model = onnx.load(normalised)
    weight = next(w for w in model.graph.initializer if len(w.dims) == 4)
    damaged = onnx.numpy_helper.to_array(weight) * 1.5
    weight.CopyFrom(onnx.numpy_helper.from_array(damaged, weight.name))
    onnx.save(model, normalised)
    done = command.run("tune", str(path), "--trials", "0", "--name", "damaged")
    assert done.returncode == 3, done.stderr
    assert "wrong and was not published" in done.stderr
    assert "its import is at fault, not a schedule" in done.stderr
    assert "Traceback" not in done.stderr
    from mlflow import MlflowClient

    client = MlflowClient(mlflow_url)
    assert not client.search_registered_models("name = 'damaged'")
    experiment = client.get_experiment_by_name("tunewright")
    (run,) = client.search_runs([experiment.experiment_id], "tags.`tunewright.model` = 'damaged'")
    assert run.info.status == "FAILED"
    assert not list((tmp_path / "home" / "store").glob("artifacts/*"))


def test_operator_granularity_tunes_the_anchors_and_still_builds_the_right_model(
    tmp_path: Path, prefect_url: str, mlflow_url: str
) -> None:
    path = tmp_path / "convs.onnx"
    onnx.save(conv_model(seed=3), path)
    settings = {"PREFECT_API_URL": prefect_url, "MLFLOW_TRACKING_URI": mlflow_url}
    command = Command(tmp_path / "home", settings)
    out = tmp_path / "artifact"
    done = command.run(
        "tune", str(path), "--trials", "24", "--granularity", "operator", "--name", "anchors", "--out", str(out)
    )
    assert done.returncode == 0, done.stderr
    records = command.stored()
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["granularity"] == "operator"
    tuned = {record.workload_key for record in records}
    # A transpose at a border is its own anchor.
    built = {choice["workload_key"] for choice in manifest["subgraphs"] if "conv2d" in choice["name"]}
    assert len(built) == 2
    assert not tuned & built, "what was measured are the anchors, what was built are the subgraphs around them"
    used = {choice["record_id"] for choice in manifest["subgraphs"]}
    assert used <= {record.record_id for record in records}
