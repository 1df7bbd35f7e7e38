"""A published model predicts in a fresh process, and its aliases move only when they should."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from mlflow import MlflowClient

from infra.champion import find_champion
from infra.object_store import DirectoryStore, ObjectStore, get_folder
from infra.promotion import Race
from infra.published_model import Publication, publish_model, requirements
from infra.run_log import RunLog
from tasks.errors import StoreError, VerificationError
from tasks.records import Artifact, Latency, PublishedVersion
from tests.infra.sample_records import ENGINE, model, summary
from tests.services import free_port, service

VERSIONS = {
    "apache-tvm": "0.27.0.post1",
    "apache-tvm-ffi": "0.1.14.post0",
    "numpy": "2.2.0",
    "xgboost": "3.1",
}
REQUIREMENTS = ["apache-tvm==0.27.0.post1", "apache-tvm-ffi==0.1.14.post0", "numpy"]
#: Computes with numpy what a compiled library would: the two means of the image's halves, scaled.
LOADER = """
from pathlib import Path
import numpy as np
class CompiledModel:
    def __init__(self, folder):
        self.factor = float((Path(folder) / "model.so").read_text())
    def run(self, inputs):
        image = inputs["image"]
        assert image.dtype == np.float32 and image.shape == (1, 3, 48, 192)
        halves = np.split(image, 2, axis=3)
        return {"scores": np.stack([h.mean(dtype="float32") * self.factor for h in halves])[None]}
"""
_names = itertools.count()


@pytest.fixture
def name() -> str:
    return f"classifier-{next(_names)}"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return DirectoryStore(tmp_path / "store")


def artifact(folder: Path, factor: float = 2.0) -> Artifact:
    folder.mkdir()
    (folder / "loader.py").write_text(LOADER)
    (folder / "model.so").write_text(str(factor))
    (folder / "manifest.json").write_text("{}")
    digest = hashlib.sha256(str(factor).encode()).hexdigest()
    return Artifact(str(folder), digest, 1, True, ())


def publication(url: str, name: str, made: Artifact, target_key: str = "cpu-abc") -> Publication:
    tag = {"tunewright.run_id": f"{name}-{made.digest[:8]}-{target_key}"}
    log = RunLog.start(url, "publishing", name, {}, tag)
    engine = replace(ENGINE, versions=VERSIONS, target=replace(ENGINE.target, key=target_key))
    return Publication(name, log.run_id, model(), engine, made, summary().verdict)


def latency(ms: float) -> Latency:
    return Latency(tuple(ms + n / 1000 for n in range(20)))


def first(url: str, name: str, store: ObjectStore, folder: Path) -> PublishedVersion:
    return publish_model(url, store, publication(url, name, artifact(folder)), Race(latency(2.0)))


@pytest.mark.parametrize("service", ["server", "database"])
def test_a_fresh_process_loads_the_champion_and_predicts(
    service: str, mlflow_url: str, name: str, store: ObjectStore, tmp_path: Path
) -> None:
    uri = mlflow_url if service == "server" else f"sqlite:///{tmp_path}/home/mlflow.db"
    published = first(uri, name, store, tmp_path / "artifact")
    assert (published.version, published.alias) == ("1", "champion")
    code = f"""
import sys, numpy as np, mlflow.pyfunc
model = mlflow.pyfunc.load_model("models:/{name}@champion")
image = np.ones((1, 3, 48, 192), "float32")
image[..., 96:] = 3
for given in ({{"image": image}}, image):
    out = model.predict(given)
    assert list(out) == ["scores"], out
    assert out["scores"].dtype == np.float32
    assert out["scores"].tolist() == [[2.0, 6.0]], out
try:
    model.predict(image[:, :2])
except mlflow.exceptions.MlflowException as error:
    assert "shape" in str(error)
else:
    raise AssertionError("a wrong shape was accepted")
folder = mlflow.artifacts.download_artifacts("models:/{name}@champion")
lines = open(folder + "/requirements.txt").read().split()
assert [n for n in lines if not n.startswith("mlflow")] == {REQUIREMENTS}, lines
# What a client of `mlflow models serve` would send and get.
from mlflow.models import Model, validate_serving_input
served = validate_serving_input(folder, Model.load(folder).get_serving_input(folder))
assert served["scores"].shape == (1, 2)
assert not any(n.split(".")[0] in ("infra", "tasks", "flows") for n in sys.modules)
print("predicted")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MLFLOW_TRACKING_URI": uri},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip().endswith("predicted"), done.stderr


def test_mlflow_models_serve_answers_a_request(mlflow_url: str, name: str, store: ObjectStore, tmp_path: Path) -> None:
    first(mlflow_url, name, store, tmp_path / "artifact")
    port = free_port()
    command = [
        *(sys.executable, "-m", "mlflow", "models", "serve", "--model-uri", f"models:/{name}@champion"),
        *("--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)),
    ]
    image = np.ones((1, 3, 48, 192), "float32")
    image[..., 96:] = 3
    # As in an activated environment: MLflow looks for uvicorn there.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"MLFLOW_TRACKING_URI": mlflow_url, "PATH": path}
    with service(command, f"http://127.0.0.1:{port}/ping", tmp_path / "serve.log", variables):
        answer = httpx.post(
            f"http://127.0.0.1:{port}/invocations",
            json={"inputs": {"image": image.tolist()}},
            timeout=60,
            trust_env=False,
        )
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"predictions": {"scores": [[2.0, 6.0]]}}


def test_a_version_says_what_it_is_and_what_runs_it(
    mlflow_url: str, name: str, store: ObjectStore, tmp_path: Path
) -> None:
    published = first(mlflow_url, name, store, tmp_path / "artifact")
    client = MlflowClient(tracking_uri=mlflow_url)
    version = client.get_model_version(name, "1")
    assert version.run_id == published.mlflow_run_id
    assert version.tags["target"] == "cpu-abc"
    assert version.tags["model_digest"] == "d" * 64
    assert version.tags["tuned_ms"] == "2"
    assert version.tags["artifact_uri"] == published.artifact_uri
    assert version.tags["verification"].startswith("right on 3 seeded inputs")
    assert version.tags["decision"].startswith("champion: 2.0")
    assert requirements(replace(ENGINE, versions=VERSIONS)) == REQUIREMENTS


def test_the_artifact_is_in_the_object_store(mlflow_url: str, name: str, store: ObjectStore, tmp_path: Path) -> None:
    published = first(mlflow_url, name, store, tmp_path / "artifact")
    digest = artifact(tmp_path / "again").digest
    assert published.artifact_uri == store.uri(f"artifacts/{digest}")
    assert (get_folder(store, f"artifacts/{digest}", tmp_path / "back") / "model.so").read_text() == "2.0"
    champion = find_champion(mlflow_url, name, "cpu-abc")
    assert champion is not None
    assert (champion.artifact_digest, champion.artifact_uri) == (digest, published.artifact_uri)


def test_publishing_again_makes_no_second_version(
    mlflow_url: str, name: str, store: ObjectStore, tmp_path: Path
) -> None:
    once = first(mlflow_url, name, store, tmp_path / "artifact")
    made = replace(artifact(tmp_path / "same"), path=str(tmp_path / "artifact"))
    twice = publish_model(mlflow_url, store, publication(mlflow_url, name, made), Race(latency(2.0)))
    assert (twice.version, twice.alias) == (once.version, once.alias)
    assert len(MlflowClient(tracking_uri=mlflow_url).search_model_versions(f"name = '{name}'")) == 1


@pytest.mark.parametrize(("new_ms", "alias", "champion"), [(1.0, "champion", "2"), (3.0, "challenger", "1")])
def test_the_alias_moves_to_the_faster_one(
    mlflow_url: str, store: ObjectStore, tmp_path: Path, new_ms: float, alias: str, champion: str, name: str
) -> None:
    first(mlflow_url, name, store, tmp_path / "artifact")
    raced = Race(latency(new_ms), find_champion(mlflow_url, name, "cpu-abc"), latency(2.0))
    second = publication(mlflow_url, name, artifact(tmp_path / "second", 3.0))
    published = publish_model(mlflow_url, store, second, raced)
    assert (published.version, published.alias) == ("2", alias)
    client = MlflowClient(tracking_uri=mlflow_url)
    assert client.get_model_version_by_alias(name, "champion").version == champion
    assert client.get_model_version(name, "2").tags["decision"] == f"{alias}: {published.reason}"


def test_a_champion_that_changed_since_the_race_is_not_overwritten(
    mlflow_url: str, name: str, store: ObjectStore, tmp_path: Path
) -> None:
    first(mlflow_url, name, store, tmp_path / "artifact")
    stale = Race(latency(1.0))
    second = publication(mlflow_url, name, artifact(tmp_path / "second", 3.0))
    published = publish_model(mlflow_url, store, second, stale)
    assert published.alias == "challenger"
    assert "the champion is version 1 by now, not nobody" in published.reason


def test_another_target_gets_aliases_of_its_own(mlflow_url: str, name: str, store: ObjectStore, tmp_path: Path) -> None:
    first(mlflow_url, name, store, tmp_path / "artifact")
    assert find_champion(mlflow_url, name, "cuda-90") is None
    other = publication(mlflow_url, name, artifact(tmp_path / "second", 3.0), "cuda-90")
    published = publish_model(mlflow_url, store, other, Race(latency(0.1)))
    assert published.alias == "champion-cuda-90"
    for target, version in (("cuda-90", "2"), ("cpu-abc", "1")):
        champion = find_champion(mlflow_url, name, target)
        assert champion is not None
        assert champion.version == version


def test_nothing_is_published_of_a_wrong_artifact_or_without_a_store(
    mlflow_url: str, name: str, store: ObjectStore, tmp_path: Path
) -> None:
    right = publication(mlflow_url, name, artifact(tmp_path / "artifact"))
    wrong = replace(right, verdict=replace(right.verdict, correct=False))
    with pytest.raises(VerificationError, match="outputs are wrong"):
        publish_model(mlflow_url, store, wrong, Race(latency(2.0)))
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        publish_model(mlflow_url, DirectoryStore(tmp_path / "file" / "x"), right, Race(latency(2.0)))
    assert MlflowClient(tracking_uri=mlflow_url).search_registered_models(f"name = '{name}'") == []
    assert list(store.list("")) == []
