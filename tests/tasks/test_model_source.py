"""Every kind of source, from real services: files, MLflow on SQLite, S3 over HTTP."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from infra.settings import settings
from tasks.errors import ModelError, StoreError, TrackingError
from tasks.import_model import import_model_file, reference_outputs, seeded_inputs
from tasks.model_source import FetchedModel, fetch
from tests.models import matmul_model, save_with_external_data
from tests.services import free_port, s3_server

BUCKET = "models"


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TUNEWRIGHT_HOME", str(tmp_path / "home"))
    settings.cache_clear()
    yield
    settings.cache_clear()
    if "mlflow" in sys.modules:
        forget_tracking_uri()


def forget_tracking_uri() -> None:
    """MLflow keeps its URI in the process and in the environment: no later test may find it there."""
    import mlflow

    mlflow.set_tracking_uri(None)


def assert_is_matmul(fetched: FetchedModel, work_dir: Path, seed: int = 0) -> None:
    """The fetched model, external data and all, is ``matmul_model(seed=seed)``."""
    model = import_model_file(fetched, {"x": (2, 64)}, work_dir)
    inputs = seeded_inputs(model, 0)
    weight = numpy_helper.to_array(matmul_model(seed=seed).graph.initializer[0])
    # 64 products of standard normals in float32 round to about 1e-6.
    np.testing.assert_allclose(reference_outputs(model, inputs, 1)["y"], inputs["x"] @ weight, atol=1e-5)


def assert_one_line(error: BaseException, *parts: str) -> None:
    assert "\n" not in str(error)
    for part in parts:
        assert part in str(error)


# Files


def test_a_file_is_used_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "my model (v2).onnx"
    onnx.save(matmul_model(), path)
    assert fetch(str(path), tmp_path / "work") == FetchedModel(path, "my-model-v2", str(path))
    assert not (tmp_path / "work").exists()


def test_a_folder_with_its_one_model(tmp_path: Path) -> None:
    path = save_with_external_data(matmul_model(), tmp_path / "ranker" / "net.onnx")
    fetched = fetch(str(path.parent), tmp_path)
    assert (fetched.path, fetched.name) == (path, "ranker")
    onnx.save(matmul_model(), path.with_name("other.onnx"))
    with pytest.raises(ModelError, match=r"net\.onnx, other\.onnx"):
        fetch(str(path.parent), tmp_path)
    onnx.save(matmul_model(), path.with_name("model.onnx"))
    assert fetch(str(path.parent), tmp_path).path.name == "model.onnx"


@pytest.mark.parametrize("source", ["nowhere/m.onnx", "ftp://host/m.onnx", "models:/name", "s3://bucket"])
def test_sources_that_name_nothing(source: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        fetch(source, tmp_path)
    assert_one_line(caught.value, source)


def test_mlflow_and_boto3_are_imported_by_their_own_sources_only() -> None:
    program = "import sys, tasks.import_model; print(*({'mlflow', 'boto3', 'tvm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# MLflow


@dataclass(frozen=True)
class Registry:
    """An MLflow database with a registered model, "ranker": versions 1 and 2, by seed; 2 is champion."""

    uri: str
    run_ids: tuple[str, ...]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    import mlflow
    import mlflow.onnx

    folder = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("models", artifact_location=(folder / "artifacts").as_uri())
    run_ids = []
    mlflow.set_tracking_uri(uri)
    for seed in (1, 2):
        with mlflow.start_run(experiment_id=experiment) as run:
            mlflow.onnx.log_model(matmul_model(seed=seed), name="net", registered_model_name="ranker")
            mlflow.log_artifacts(str(plain_folder(folder, seed)), "plain")
        run_ids.append(run.info.run_id)
    forget_tracking_uri()
    client.set_registered_model_alias("ranker", "champion", "2")
    return Registry(uri, tuple(run_ids))


def plain_folder(folder: Path, seed: int) -> Path:
    """A folder with an ONNX file and its external data a folder deeper, no MLflow model."""
    path = save_with_external_data(matmul_model(seed=seed), folder / f"plain{seed}" / "m.onnx", "data/w.bin")
    return path.parent


@pytest.fixture
def registry(database: Registry, own_settings: None, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setenv("TUNEWRIGHT_TRACKING_URI", database.uri)
    settings.cache_clear()
    return database


@pytest.mark.parametrize(
    ("source", "version"),
    [("models:/ranker/1", 1), ("models:/ranker/2", 2), ("models:/ranker@champion", 2)],
)
def test_a_registered_model(registry: Registry, source: str, version: int, tmp_path: Path) -> None:
    fetched = fetch(source, tmp_path)
    assert (fetched.name, fetched.source, fetched.source_version) == ("ranker", source, str(version))
    assert (fetched.path.parent / "MLmodel").is_file()
    data = [file for file in fetched.path.parent.iterdir() if file.suffix == ".data"]
    assert data, "mlflow.onnx wrote no external data: this test checks less than it says"
    assert_is_matmul(fetched, tmp_path, seed=version)


@pytest.mark.parametrize(("path", "name"), [("net", "net"), ("plain/m.onnx", "m"), ("plain", "plain")])
def test_a_model_of_a_run(registry: Registry, path: str, name: str, tmp_path: Path) -> None:
    fetched = fetch(f"runs:/{registry.run_ids[0]}/{path}", tmp_path)
    assert (fetched.name, fetched.source_version) == (name, "")
    assert_is_matmul(fetched, tmp_path, seed=1)


@pytest.mark.parametrize("source", ["models:/ranker/9", "models:/nobody/1", "models:/ranker@nobody"])
def test_no_such_registered_model(registry: Registry, source: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no") as caught:
        fetch(source, tmp_path)
    assert_one_line(caught.value, source, registry.uri)


def test_no_such_run_or_path(registry: Registry, tmp_path: Path) -> None:
    for source in (f"runs:/{'0' * 32}/net", f"runs:/{registry.run_ids[0]}/nothing"):
        with pytest.raises(ModelError, match="there is no") as caught:
            fetch(source, tmp_path)
        assert_one_line(caught.value, source)


def test_mlflow_away_is_retried_and_hides_the_password(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TUNEWRIGHT_TRACKING_URI", f"http://user:secret@127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    settings.cache_clear()
    with pytest.raises(TrackingError, match="MLFLOW_TRACKING_URI") as caught:
        fetch("models:/ranker@champion", tmp_path)
    assert_one_line(caught.value, "models:/ranker@champion")
    assert "secret" not in str(caught.value)
    assert caught.value.retried


# S3


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server(BUCKET) as url:
        yield url


@pytest.fixture
def s3(endpoint: str, own_settings: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    import boto3

    monkeypatch.setenv("TUNEWRIGHT_S3_ENDPOINT_URL", endpoint)
    settings.cache_clear()
    return boto3.client("s3", endpoint_url=endpoint)


def upload(s3: Any, folder: Path, prefix: str) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            s3.upload_file(str(file), BUCKET, f"{prefix}{file.relative_to(folder).as_posix()}")


@pytest.mark.parametrize("prefix", ["", "team/ranker/"])
def test_an_object_and_its_external_data(s3: Any, prefix: str, tmp_path: Path) -> None:
    path = save_with_external_data(matmul_model(), tmp_path / "up" / "net.onnx", "data/w.bin")
    upload(s3, path.parent, prefix)

    source = f"s3://{BUCKET}/{prefix}net.onnx"
    fetched = fetch(source, tmp_path / "work")
    assert (fetched.name, fetched.source, fetched.source_version) == ("net", source, "")
    assert_is_matmul(fetched, tmp_path / "work")


def test_a_missing_object_bucket_or_data_file(s3: Any, tmp_path: Path) -> None:
    path = save_with_external_data(matmul_model(), tmp_path / "up" / "net.onnx")
    s3.upload_file(str(path), BUCKET, "lonely/net.onnx")
    cases = {
        f"s3://{BUCKET}/nothing.onnx": f"s3://{BUCKET}/nothing.onnx",
        "s3://no-such-bucket/m.onnx": "s3://no-such-bucket/m.onnx",
        f"s3://{BUCKET}/lonely/net.onnx": f"s3://{BUCKET}/lonely/weights.bin",
    }
    for source, missing in cases.items():
        with pytest.raises(ModelError, match="there is no object") as caught:
            fetch(source, tmp_path / "work")
        assert_one_line(caught.value, missing, settings().s3_endpoint_url)


def test_external_data_outside_the_prefix_is_not_even_asked_for(s3: Any, tmp_path: Path) -> None:
    path = save_with_external_data(matmul_model(), tmp_path / "up" / "net.onnx")
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].external_data[0].value = "../../secret.bin"
    s3.put_object(Bucket=BUCKET, Key="a/b/net.onnx", Body=model.SerializeToString())
    s3.put_object(Bucket=BUCKET, Key="secret.bin", Body=b"secret")

    with pytest.raises(ModelError, match="refused external data"):
        fetch(f"s3://{BUCKET}/a/b/net.onnx", tmp_path / "work")
    assert not list(tmp_path.rglob("secret.bin"))


def test_s3_away_or_without_credentials_is_retried(s3: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TUNEWRIGHT_S3_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    settings.cache_clear()
    with pytest.raises(StoreError, match="check endpoint") as caught:
        fetch(f"s3://{BUCKET}/net.onnx", tmp_path)
    assert_one_line(caught.value, f"s3://{BUCKET}/net.onnx")
    assert caught.value.retried

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StoreError, match="credentials") as caught:
        fetch(f"s3://{BUCKET}/net.onnx", tmp_path)
    assert_one_line(caught.value)
