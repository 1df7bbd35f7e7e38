"""A new version is registered: one run of tune-model, whatever is lost, sent twice or done at the same time."""

from __future__ import annotations

import contextvars
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from mlflow import MlflowClient
from prefect.client.schemas.objects import FlowRun, State, StateType

from flows.reconcile import Reconciled, reconcile
from tests.flows.command import Command, wait_for
from tests.flows.service import prefect_client, register, runs_of, service
from tests.services import free_port

ROOT = Path(__file__).parents[2]
SECRET = "between MLflow and the receiver"


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, deployed_url: str, mlflow_url: str) -> Command:
    """The command against the tests' services, with the deployments of prefect.yaml registered."""
    home = tmp_path_factory.mktemp("service") / "home"
    settings = {"PREFECT_API_URL": deployed_url, "MLFLOW_TRACKING_URI": mlflow_url, "TUNEWRIGHT_WEBHOOK_SECRET": SECRET}
    return Command(home, {**settings, "PREFECT_HOME": str(home.parent / "prefect")})


@pytest.fixture(scope="module")
def receiver(command: Command, mlflow_url: str) -> Iterator[str]:
    """``tunewright webhook serve``, registered with MLflow by ``tunewright webhook install``."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = command.start("webhook", "serve", "--port", str(port))
    try:
        wait_for(lambda: _answers(f"{url}/health", process), 120, "the receiver answers")
        for _ in range(2):
            done = command.run("webhook", "install", "--url", f"{url}/mlflow", "--check")
            assert done.returncode == 0, done.stderr
        hooks = [hook for hook in MlflowClient(mlflow_url, mlflow_url).list_webhooks() if hook.name == "tunewright"]
        assert [hook.url for hook in hooks] == [f"{url}/mlflow"]
        yield url
    finally:
        for hook in MlflowClient(mlflow_url, mlflow_url).list_webhooks():
            MlflowClient(mlflow_url, mlflow_url).delete_webhook(hook.webhook_id)
        process.terminate()
        out, err = process.communicate(timeout=60)
        assert SECRET not in out + err


@pytest.fixture
def client(mlflow_url: str) -> MlflowClient:
    return MlflowClient(mlflow_url, mlflow_url)


@pytest.fixture
def here(
    command: Command, prefect_url: str, mlflow_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Flows that the test calls run as a worker would run them."""
    with service(prefect_url, mlflow_url, tmp_path / "home", monkeypatch, TUNEWRIGHT_START_ATTEMPTS="2"):
        yield


def _answers(url: str, process: subprocess.Popen[str]) -> bool:
    assert process.poll() is None, process.stderr.read() if process.stderr else ""
    with suppress(OSError), urllib.request.urlopen(url, timeout=2):
        return True
    return False


def tuning_runs(prefect_url: str, name: str) -> list[FlowRun]:
    return runs_of(prefect_url, "tune-model", name)


def test_a_registered_version_leads_to_one_run_however_often_both_fire(
    command: Command, receiver: str, client: MlflowClient, prefect_url: str, here: None
) -> None:
    tags = {"tunewright.target": "cpu", "tunewright.shapes": "x=1,8,28,28", "tunewright.trials": "4"}
    version = register(client, "fired", tags)
    wait_for(lambda: bool(runs_of(prefect_url, "reconcile", "fired")), 120, "the event has triggered reconcile")
    (triggered,) = runs_of(prefect_url, "reconcile", "fired")
    assert triggered.parameters == {"name": "fired", "version": version}
    assert triggered.work_queue_name == "control"
    assert tuning_runs(prefect_url, "fired") == []
    # What the worker would run for the event, and the scheduled one, at the same time; and once more.
    calls = [("fired", version), ("", ""), ("fired", version), ("", "")]
    with ThreadPoolExecutor() as pool:
        # Prefect's settings are those of a context, which threads do not share.
        looks = [pool.submit(contextvars.copy_context().run, reconcile, *call) for call in calls]
        assert any("fired version 1 for cpu" in look.result().started for look in looks)
    done = command.run("reconcile")
    assert done.returncode == 0, done.stderr
    assert "waiting: fired version 1 for cpu" in done.stdout
    (run,) = tuning_runs(prefect_url, "fired")
    asked = run.parameters["parameters"]
    assert asked["model"] == f"models:/fired/{version}"
    assert (asked["target"], asked["trials"], asked["shapes"]) == ("cpu", 4, {"x": [1, 8, 28, 28]})
    assert run.work_queue_name == "triggered"
    assert run.state is not None and run.state.type is StateType.SCHEDULED


def test_a_version_that_asks_for_nothing_or_is_ours_starts_nothing(
    receiver: str, client: MlflowClient, prefect_url: str, here: None
) -> None:
    register(client, "silent", {})
    register(client, "ours", {"tunewright.target": "cpu", "artifact_digest": "a" * 64})
    # A later delivery has come: so would theirs have.
    register(client, "later", {"tunewright.target": "cpu"})
    wait_for(lambda: bool(runs_of(prefect_url, "reconcile", "later")), 120, "the later delivery has come")
    assert runs_of(prefect_url, "reconcile", "silent") == runs_of(prefect_url, "reconcile", "ours") == []
    done = reconcile()
    assert [title for title in done.started if title.startswith(("silent", "ours"))] == []
    assert len(tuning_runs(prefect_url, "later")) == 1
    assert tuning_runs(prefect_url, "silent") == tuning_runs(prefect_url, "ours") == []


def test_a_lost_delivery_is_found_with_all_targets(client: MlflowClient, prefect_url: str, here: None) -> None:
    version = register(client, "lost", {})
    # Nothing is sent where the tag comes later.
    cuda = '{"kind": "cuda", "arch": "sm_90"}'
    client.set_model_version_tag("lost", version, "tunewright.target", f"cpu, {cuda}")
    done = reconcile()
    assert [t for t in done.started if t.startswith("lost")] == [f"lost version 1 for {t}" for t in ("cpu", cuda)]
    assert sorted(run.parameters["parameters"]["target"] for run in tuning_runs(prefect_url, "lost")) == ["cpu", cuda]
    again = reconcile("lost", version)
    assert (len(again.waiting), again.started) == (2, [])


def _end(prefect_url: str, run: FlowRun, kind: StateType, message: str) -> None:
    with prefect_client(prefect_url) as client:
        client.set_flow_run_state(run.id, State(type=kind, message=message), force=True)


def _newest(prefect_url: str, name: str) -> FlowRun:
    return max(tuning_runs(prefect_url, name), key=lambda run: (run.created is not None, run.created))


def test_a_failed_run_is_tried_again_so_often_and_then_reported(
    client: MlflowClient, prefect_url: str, here: None
) -> None:
    version = register(client, "failing", {"tunewright.target": "cpu"})
    assert len(reconcile("failing", version).started) == 1
    # Another run of the same model was there: that is nobody's failure.
    _end(prefect_url, _newest(prefect_url, "failing"), StateType.FAILED, "RunInProgress: it is being tuned by run 7")
    for kind in (StateType.CRASHED, StateType.FAILED):
        assert len(reconcile("failing", version).started) == 1
        _end(prefect_url, _newest(prefect_url, "failing"), kind, "EngineCrashed: exit status -11")
    problems = reconcile("failing", version).problems
    assert "given up: 2 of its runs failed" in problems["failing version 1 for cpu"]
    assert "EngineCrashed" in problems["failing version 1 for cpu"]
    assert "EngineCrashed" in client.get_model_version("failing", version).tags["tunewright.given_up.cpu"]
    assert reconcile("failing", version) == Reconciled()
    assert len(tuning_runs(prefect_url, "failing")) == 3


def test_bad_input_is_not_tried_again(client: MlflowClient, prefect_url: str, here: None) -> None:
    version = register(client, "bad", {"tunewright.target": "cpu"})
    reconcile("bad", version)
    message = "Flow run encountered an exception: ShapeError: input x has no size; give --shape x=..."
    _end(prefect_url, _newest(prefect_url, "bad"), StateType.FAILED, message)
    assert "ShapeError" in reconcile("bad", version).problems["bad version 1 for cpu"]
    assert len(tuning_runs(prefect_url, "bad")) == 1


def test_tags_that_cannot_be_read_are_a_problem_of_their_version_only(
    client: MlflowClient, prefect_url: str, here: None
) -> None:
    register(client, "unreadable", {"tunewright.target": "cpu", "tunewright.trials": "many"})
    register(client, "readable", {"tunewright.target": "cpu"})
    done = reconcile()
    assert "tunewright.trials" in done.problems["unreadable version 1"]
    assert "readable version 1 for cpu" in done.started


def test_what_is_tuned_is_left_alone(client: MlflowClient, prefect_url: str, here: None) -> None:
    version = register(client, "tuned", {"tunewright.target": "cpu, cuda"})
    published = {"source": f"models:/tuned/{version}", "requested_target": "cpu", "artifact_digest": "b" * 64}
    register(client, "tuned", published)
    done = reconcile("tuned", version)
    assert done.tuned == ["tuned version 1 for cpu"]
    assert done.started == ["tuned version 1 for cuda"]
    assert client.get_model_version("tuned", version).tags["tunewright.tuned.cpu"] == "tuned version 2"
    # A run may end and publish between two looks at it.
    register(client, "tuned", {**published, "requested_target": "cuda"})
    _end(prefect_url, _newest(prefect_url, "tuned"), StateType.COMPLETED, "")
    assert reconcile("tuned", version).tuned == ["tuned version 1 for cpu", "tuned version 1 for cuda"]
    assert len(tuning_runs(prefect_url, "tuned")) == 1


def test_prefect_away_is_one_line(command: Command) -> None:
    away = Command(command.home, {**command.settings, "PREFECT_API_URL": f"http://127.0.0.1:{free_port()}/api"})
    done = away.run("reconcile", timeout_s=200)
    assert done.returncode == 2
    assert "PREFECT_API_URL" in done.stderr
    assert "Traceback" not in done.stderr


def test_deploying_again_leaves_a_pool_with_queues_of_different_urgency(command: Command, prefect_url: str) -> None:
    api = httpx.Client(base_url=prefect_url, timeout=30)
    again = command.run("deploy", "--folder", str(ROOT))
    assert again.returncode == 0, again.stderr
    found = {d["name"]: d for d in api.post("/deployments/filter", json={}).json()}
    assert {"tune-model", "nightly", "reconcile"} <= set(found)
    queues = {q["name"]: q["priority"] for q in api.post("/work_pools/tunewright/queues/filter", json={}).json()}
    order = sorted(("control", "triggered", "nightly"), key=lambda name: queues[name])
    assert order == ["control", "triggered", "nightly"]
    assert found["tune-model"]["work_queue_name"] == "triggered"
    assert found["tune-model"]["global_concurrency_limit"]["limit"] == 4
    (night,) = found["nightly"]["schedules"]
    assert night["schedule"] == {"cron": "0 22 * * *", "timezone": "Europe/Berlin", "day_or": True}
    names = [a["name"] for a in api.post("/automations/filter", json={}).json()]
    assert len(names) == len(set(names)) == 2, names
    assert os.environ.get("PREFECT_API_URL") != prefect_url
