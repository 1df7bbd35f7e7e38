"""A night over a few models, and the next one: real tuning, Prefect and MLflow."""

from __future__ import annotations

import contextvars
import json
import threading
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient
from prefect.client.schemas.objects import State, StateType

from flows.night_report import NightEntry, night_report
from flows.nightly import nightly
from tests.flows.command import Command
from tests.flows.service import log_onnx, prefect_client, register, service
from tests.models import conv_model

#: Of this test only, on a server that others use as well; no other test's model asks for the night.
EXPERIMENT = "nights"
GOOD = {"tunewright.target": "cpu", "tunewright.trials": "4", "tunewright.minutes": "5"}


@pytest.fixture(scope="module")
def client(mlflow_url: str) -> MlflowClient:
    return MlflowClient(mlflow_url, mlflow_url)


def ask(client: MlflowClient, name: str, tags: dict[str, str], nightly_tag: str = "true") -> str:
    """A model of the night whose version holds no model."""
    version = register(client, name, tags)
    client.set_registered_model_tag(name, "tunewright.nightly", nightly_tag)
    return version


@pytest.fixture(scope="module")
def night(
    client: MlflowClient, mlflow_url: str, prefect_url: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Command, str]:
    """The command, and what it printed in a night with one good model and several others."""
    register(client, "good", GOOD, conv_model())
    client.set_registered_model_tag("good", "tunewright.nightly", "true")
    version = ask(client, "broken", GOOD)
    run_id = client.get_model_version("broken", version).run_id
    model = conv_model()
    del model.graph.output[:]
    log_onnx(client, run_id, model)
    ask(client, "wrong-tag", {**GOOD, "tunewright.minutes": "soon"})
    ask(client, "asks-for-nothing", {})
    ask(client, "not-tonight", GOOD, nightly_tag="false")
    register(client, "never-asked", GOOD)
    home = tmp_path_factory.mktemp("night") / "home"
    command = Command(
        home, {"PREFECT_API_URL": prefect_url, "MLFLOW_TRACKING_URI": mlflow_url, "TUNEWRIGHT_EXPERIMENT": EXPERIMENT}
    )
    done = command.run("nightly", "--hours", "0.2", timeout_s=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return command, done.stdout


def night_run(client: MlflowClient) -> tuple[str, dict[str, dict[str, object]]]:
    """The newest night's description, and its table by title."""
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    run = client.search_runs([experiment], "tags.`tunewright.kind` = 'night'", order_by=["start_time DESC"])[0]
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "night.json")).read_text())
    entries = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    return run.data.tags["mlflow.note.content"], {str(entry["title"]): entry for entry in entries}


def test_one_model_failing_does_not_end_the_night(night: tuple[Command, str], client: MlflowClient) -> None:
    note, entries = night_run(client)
    good = entries["good version 1 for cpu"]
    assert good["status"] == "faster", good
    assert good["trials"] == 4
    assert float(str(good["tuned_ms"])) > 0
    assert good["published"] == "good version 2 @champion"
    assert entries["broken version 1 for cpu"]["status"] == "failed"
    assert "ModelError" in str(entries["broken version 1 for cpu"]["why"])
    assert "tunewright.minutes" in str(entries["wrong-tag version 1"]["why"])
    assert "no version of it carries tunewright.target" in str(entries["asks-for-nothing"]["why"])
    assert len(entries) == 4
    for part in ("2 failed, 1 faster, 1 skipped", "**faster**", "ModelError", "good version 2 @champion"):
        assert part in note
    assert "1 faster" in night[1]


def test_the_morning_has_an_artifact_in_prefect(night: tuple[Command, str], prefect_url: str) -> None:
    with prefect_client(prefect_url) as client:
        found = [a for a in client.read_artifacts() if a.key == "tunewright-night"]
    assert any("**faster**" in str(artifact.data) and artifact.type == "markdown" for artifact in found)


def test_the_next_night_skips_what_is_unchanged_and_gives_up_what_always_fails(
    night: tuple[Command, str], client: MlflowClient, mlflow_url: str, prefect_url: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    (run,) = client.search_runs([experiment], "tags.`tunewright.source` = 'models:/good/1'")
    assert 0 < run.data.metrics["remaining_share"] < 1
    assert "budget" in run.data.tags["tunewright.ended"]
    more = {
        "TUNEWRIGHT_EXPERIMENT": EXPERIMENT,
        "TUNEWRIGHT_NIGHTLY_LEAST_GAIN": "0.99",
        "TUNEWRIGHT_START_ATTEMPTS": "1",
    }
    with service(prefect_url, mlflow_url, tmp_path / "home", monkeypatch, **more):
        entries = {entry.title: entry for entry in nightly(hours=0.1)}
    assert entries["good version 1 for cpu"].status == "skipped"
    assert "nothing to gain" in entries["good version 1 for cpu"].why
    assert entries["broken version 1 for cpu"].status == "given up"
    assert "ModelError" in entries["broken version 1 for cpu"].why
    # Nothing was opened: a run makes its folder first.
    assert not (tmp_path / "home" / "runs").exists()


def test_a_night_that_is_over_begins_nothing(
    night: tuple[Command, str], mlflow_url: str, prefect_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service(prefect_url, mlflow_url, tmp_path / "home", monkeypatch, TUNEWRIGHT_EXPERIMENT=EXPERIMENT):
        entries = {entry.title: entry for entry in nightly(hours=0.001)}
    assert entries["good version 1 for cpu"].status == "no time"
    assert not (tmp_path / "home" / "runs").exists()


def test_through_the_deployment_runs_queue_behind_triggered_ones(
    night: tuple[Command, str], mlflow_url: str, deployed_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test is the worker here: it ends the runs that the night has started."""
    seen = []

    def work() -> None:
        deadline = time.monotonic() + 120
        with prefect_client(deployed_url) as prefect:
            while len(seen) < 2 and time.monotonic() < deadline:
                time.sleep(0.5)
                for run in prefect.read_flow_runs(limit=50):
                    mine = (run.idempotency_key or "").startswith("tunewright-night/")
                    if mine and run.state and not run.state.is_final():
                        seen.append(run)
                        ended = State(type=StateType.CRASHED, message="no heartbeat for 100 s")
                        prefect.set_flow_run_state(run.id, ended, force=True)

    with service(deployed_url, mlflow_url, tmp_path / "home", monkeypatch, TUNEWRIGHT_EXPERIMENT=EXPERIMENT):
        worker = threading.Thread(target=contextvars.copy_context().run, args=(work,))
        worker.start()
        entries = {entry.title: entry for entry in nightly(deployed=True, hours=0.1)}
        worker.join()
    assert {run.work_queue_name for run in seen} == {"nightly"}
    assert sorted(run.parameters["parameters"]["model"] for run in seen) == ["models:/broken/1", "models:/good/1"]
    assert all(run.parameters["parameters"]["minutes"] <= 5 for run in seen)
    assert entries["good version 1 for cpu"].status == "failed"
    assert "no heartbeat" in entries["good version 1 for cpu"].why


def test_a_run_that_outlives_the_night_is_cancelled(
    night: tuple[Command, str], mlflow_url: str, deployed_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker is there: the runs wait for ever."""
    monkeypatch.setattr("flows.nightly._GRACE_S", -68.0)  # 72 s of night, 4 s of patience
    more = {"TUNEWRIGHT_EXPERIMENT": EXPERIMENT, "TUNEWRIGHT_NIGHTLY_MODELS": "2"}
    with service(deployed_url, mlflow_url, tmp_path / "home", monkeypatch, **more):
        entries = {entry.title: entry for entry in nightly(deployed=True, hours=0.02)}
    assert entries["good version 1 for cpu"].status == "failed"
    assert "cancelled" in entries["good version 1 for cpu"].why
    with prefect_client(deployed_url) as client:
        mine = [r for r in client.read_flow_runs(limit=50) if (r.idempotency_key or "").startswith("tunewright-night/")]
    newest = max(mine, key=lambda run: str(run.created))
    assert newest.state_type in (StateType.CANCELLING, StateType.CANCELLED)


def test_others_text_cannot_break_the_report() -> None:
    why = "a | b\n| c | <script>"
    report = night_report([NightEntry("m|x", "failed", why), NightEntry("n", "skipped", why)], 1.0)
    rows = [line for line in report.splitlines() if line.startswith("|")]
    assert len(rows) == 3
    assert "<script>" not in report
    assert "a \\| b \\| c" in rows[2]
