"""The service as a whole: from a registered version to the champion unattended, and a night with nothing to do.

Everything is real: a Prefect server and its process worker, MLflow and S3 over HTTP, the webhook receiver,
and, where asked for, a scheduler and agents. Only the waiting is done here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import onnx

from tests.flows.command import Command, wait_for
from tests.models import conv_model
from tests.services import free_port, mlflow_server, prefect_server, s3_server

ROOT = Path(__file__).parent.parent
BUCKET = "tunewright-unattended"
SECRET = "benchmark secret, thirty-two letters"  # noqa: S105 - it protects nothing
_NAME = "unattended"
#: What a loaded machine of two cores needs for a worker's poll, two Python starts and a small tuning run.
_TUNED_WITHIN_S = 420.0
#: A server's start on a loaded machine.
_START_S = 400.0


@dataclass(frozen=True)
class Unattended:
    """What came of one registration: the version that is champion, and the tune-model runs that led there."""

    champion: str
    source: str
    states: tuple[str, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """One run, which completed, and the alias points at what was made from the registered version."""
        return self.states == ("COMPLETED",) and bool(self.champion) and self.source == f"models:/{_NAME}/1"


def unattended(agents: int = 2, trials: int = 8) -> Unattended:
    """What a registered version leads to without anybody's help; ``agents`` 0: no fleet.

    On services of its own: a worker takes every run of its pool, whoever left it there.
    """
    with tempfile.TemporaryDirectory() as folder, s3_server(BUCKET) as s3_url, _services(Path(folder)) as urls:
        found = _whole_path(Path(folder), {**urls, "AWS_ENDPOINT_URL": s3_url}, agents, trials)
    print(f"unattended: {found}", file=sys.stderr)
    return found


def _whole_path(folder: Path, urls: Mapping[str, str], agents: int, trials: int) -> Unattended:
    """Start receiver, worker and agents on the services at ``urls``, register a model, wait for its champion."""
    from mlflow import MlflowClient

    command = Command(folder / "home", _settings(folder, urls, agents))
    client = MlflowClient(urls["MLFLOW_TRACKING_URI"], urls["MLFLOW_TRACKING_URI"])
    with ExitStack() as stack:
        _start_fleet(stack, command, agents)
        _run(command, "deploy", "--folder", str(ROOT))
        port = free_port()
        stack.enter_context(_running(command, "webhook", "serve", "--port", str(port)))
        wait_for(lambda: _answers(f"http://127.0.0.1:{port}/health"), 180, "the receiver answers")
        _run(command, "webhook", "install", "--url", f"http://127.0.0.1:{port}/mlflow", "--check")
        stack.enter_context(_worker(command))
        started = time.monotonic()
        register_model(client, _NAME, conv_model(), {"tunewright.target": "cpu", "tunewright.trials": str(trials)})
        try:
            wait_for(lambda: _is_settled(client, urls["PREFECT_API_URL"]), _TUNED_WITHIN_S, "the model has a champion")
        except AssertionError as error:
            print(f"{error}\n{_logs(folder)}", file=sys.stderr)
        alias, source = _champion(client)
        return Unattended(alias, source, tuning_states(urls["PREFECT_API_URL"]), time.monotonic() - started)


def nightly_unchanged(count: int = 100) -> float:
    """Seconds of ``tunewright nightly`` over ``count`` models whose last run left nothing to gain; MLflow over HTTP.

    The runs are written as ``flows/outcome.py`` leaves them. Raises RuntimeError where a model was not skipped.
    """
    with tempfile.TemporaryDirectory() as scratch, _services(Path(scratch)) as urls:
        folder = Path(scratch)
        _write_unchanged(urls["MLFLOW_TRACKING_URI"], count)
        command = Command(folder / "home", {**urls, "TUNEWRIGHT_STORE": str(folder / "store")})
        started = time.monotonic()
        done = command.run("nightly", timeout_s=900)
        seconds = time.monotonic() - started
        opened = (folder / "home" / "runs").exists()
    last = done.stdout.strip().splitlines()[-1:]
    if done.returncode != 0 or last != [f"{count} skipped"] or opened:
        raise RuntimeError(f"not all of {count} models were skipped: {last}\n{done.stderr[-2000:]}")
    return seconds


def register_model(client: Any, name: str, model: onnx.ModelProto, tags: Mapping[str, str]) -> str:
    """Log ``model`` and register it as people do; returns the version."""
    experiment = client.get_experiment_by_name("training")
    experiment_id = experiment.experiment_id if experiment else client.create_experiment("training")
    run = client.create_run(experiment_id)
    with tempfile.TemporaryDirectory() as scratch:
        onnx.save(model, Path(scratch) / "model.onnx")
        client.log_artifact(run.info.run_id, str(Path(scratch) / "model.onnx"), "model")
    client.create_registered_model(name)
    source = f"{run.info.artifact_uri}/model"
    return str(client.create_model_version(name, source, run.info.run_id, tags=dict(tags)).version)


def tuning_states(prefect_url: str) -> tuple[str, ...]:
    """The states of all runs of tune-model."""
    wanted = {"deployments": {"name": {"any_": ["tune-model"]}}}
    return tuple(run["state_type"] for run in _post(f"{prefect_url}/flow_runs/filter", wanted))


def _settings(folder: Path, urls: Mapping[str, str], agents: int) -> dict[str, str]:
    found = {
        **urls,
        "TUNEWRIGHT_STORE": f"s3://{BUCKET}/store",
        "TUNEWRIGHT_WEBHOOK_SECRET": SECRET,
        "PREFECT_HOME": str(folder / "prefect-home"),
        "PREFECT_WORKER_QUERY_SECONDS": "2",
    }
    if agents:
        found["TUNEWRIGHT_SCHEDULER"] = f"tls://127.0.0.1:{free_port()}"
        found["TUNEWRIGHT_TLS_DIR"] = str(folder / "tls")
    return found


def _start_fleet(stack: ExitStack, command: Command, agents: int) -> None:
    """A scheduler and one agent a core, as operators start them, with TLS."""
    if not agents:
        return
    _run(command, "certs", command.settings["TUNEWRIGHT_TLS_DIR"])
    port = command.settings["TUNEWRIGHT_SCHEDULER"].rpartition(":")[2]
    stack.enter_context(_running(command, "scheduler", "--port", port))
    for core in range(agents):
        stack.enter_context(_running(command, "agent", "--device", f"cpu:{core}"))
    wait_for(lambda: _agents(command) >= agents, 300, f"{agents} agents are there")


def _agents(command: Command) -> int:
    done = command.run("agents", "--json")
    return len(json.loads(done.stdout.strip().splitlines()[-1])) if done.returncode == 0 else 0


def _is_settled(client: Any, prefect_url: str) -> bool:
    """The champion is there and its run is over, or a run ended that brought none."""
    time.sleep(1)
    states = tuning_states(prefect_url)
    over = [state for state in states if state in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")]
    return len(over) > 0 and (bool(_champion(client)[0]) or "COMPLETED" not in over)


def _champion(client: Any) -> tuple[str, str]:
    from mlflow.exceptions import MlflowException

    try:
        found = client.get_model_version_by_alias(_NAME, "champion")
    except MlflowException:
        return "", ""
    return f"version {found.version}", str(found.tags.get("source", ""))


def _write_unchanged(mlflow_url: str, count: int) -> None:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag

    client = MlflowClient(mlflow_url, mlflow_url)
    experiment_id = client.create_experiment("tunewright")
    for number in range(count):
        name = f"unchanged-{number:03d}"
        client.create_registered_model(name, tags={"tunewright.nightly": "true"})
        source = f"s3://training/{name}"
        version = client.create_model_version(name, source, tags={"tunewright.target": "cpu"}).version
        run = client.create_run(experiment_id, run_name=name)
        tags = {
            "tunewright.source": f"models:/{name}/{version}", "tunewright.requested_target": "cpu",
            "tunewright.kind": "run", "tunewright.ended": "no task is expected to improve any more",
        }  # fmt: skip
        now = time.time_ns() // 1_000_000
        client.log_batch(
            run.info.run_id, [Metric(k, v, now, 0) for k, v in {"remaining_share": 0.001, "tuned_ms": 3.0}.items()],
            [Param("seed", "0")], [RunTag(key, value) for key, value in tags.items()],
        )  # fmt: skip
        client.set_terminated(run.info.run_id)


@contextmanager
def _services(folder: Path) -> Iterator[dict[str, str]]:
    """MLflow and Prefect below ``folder``; yields the variables that name them."""
    for name in ("mlflow", "prefect"):
        (folder / name).mkdir()
    with (
        mlflow_server(folder / "mlflow", _START_S) as mlflow_url,
        prefect_server(folder / "prefect", _START_S) as prefect_url,
    ):
        yield {"MLFLOW_TRACKING_URI": mlflow_url, "PREFECT_API_URL": prefect_url}


@contextmanager
def _worker(command: Command) -> Iterator[None]:
    line = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "tunewright", "--limit", "4"]
    with _process(command, line, "worker"):
        yield


@contextmanager
def _running(command: Command, *arguments: str) -> Iterator[None]:
    with _process(command, [sys.executable, "-m", "flows.cli", *arguments], "-".join(arguments[:3]).replace("/", "_")):
        yield


@contextmanager
def _process(command: Command, line: list[str], name: str) -> Iterator[None]:
    """A service of the path, its output in a file, ended with all that it started."""
    with (command.home.parent / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            line, env=command.environment(), cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


def _run(command: Command, *arguments: str) -> None:
    done = command.run(*arguments)
    if done.returncode != 0:
        raise RuntimeError(f"tunewright {' '.join(arguments)}: {done.stdout[-1000:]}{done.stderr[-2000:]}")


def _logs(folder: Path) -> str:
    return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in folder.glob("*.log"))


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _post(url: str, content: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.post(url, json=content, timeout=30).raise_for_status().json()
    return found


if __name__ == "__main__":
    print(f"unattended: {unattended().ok}; {nightly_unchanged():.1f} s for 100 unchanged models")
