"""The service's flows in the test's own process, against the tests' Prefect and MLflow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings

from infra.settings import settings

_numbers = itertools.count()


@contextmanager
def service(
    prefect_url: str, mlflow_url: str, home: Path, monkeypatch: pytest.MonkeyPatch, **more: str
) -> Iterator[None]:
    """Settings of this process as a worker would have them."""
    values = {"TUNEWRIGHT_TRACKING_URI": mlflow_url, "TUNEWRIGHT_HOME": str(home), "TUNEWRIGHT_STORE": "", **more}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    settings.cache_clear()
    try:
        with temporary_settings({PREFECT_API_URL: prefect_url}):
            yield
    finally:
        settings.cache_clear()


def register(client: MlflowClient, name: str, tags: Mapping[str, str], model: onnx.ModelProto | None = None) -> str:
    """A version of the model ``name``, of a file that people would have logged; without a model, of nothing."""
    known = client.search_registered_models(f"name = '{name}'")
    if not known:
        client.create_registered_model(name)
    run = client.create_run(client.create_experiment(f"{name}-{next(_numbers)}"))
    if model is not None:
        log_onnx(client, run.info.run_id, model)
    source = f"{run.info.artifact_uri}/model"
    return str(client.create_model_version(name, source, run.info.run_id, tags=dict(tags)).version)


def log_onnx(client: MlflowClient, run_id: str, model: onnx.ModelProto) -> None:
    """The model's file as an artifact of a run."""
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        onnx.save(model, Path(scratch) / "model.onnx")
        client.log_artifact(run_id, str(Path(scratch) / "model.onnx"), "model")


def runs_of(prefect_url: str, deployment: str, name: str) -> list[FlowRun]:
    """The flow runs of a deployment whose parameters name the registered model ``name``."""
    with temporary_settings({PREFECT_API_URL: prefect_url}), get_client(sync_client=True) as client:
        found = client.read_flow_runs(
            deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=[deployment])), limit=200
        )
    return [run for run in found if name in _names(run.parameters)]


def prefect_client(prefect_url: str) -> SyncPrefectClient:
    """A client of the tests' server."""
    with temporary_settings({PREFECT_API_URL: prefect_url}):
        return get_client(sync_client=True)


def _names(parameters: Mapping[str, Any]) -> list[str]:
    model = parameters.get("parameters", {}).get("model", "")
    return [str(parameters.get("name", "")), model.removeprefix("models:/").partition("/")[0]]
