"""The artifact as a registered MLflow model: object store first, then the model, the alias last.

Whatever breaks off on the way leaves a version without an alias at most; publishing the same artifact
from the same run again goes on from there.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.champion import ChampionAlias
from infra.object_store import ObjectStore, put_folder
from infra.promotion import CHALLENGER, CHAMPION, Decision, Race, decide_alias
from infra.promotion_log import Entry, Move, dropped_digests, who
from infra.signatures import mismatch, signature_of
from infra.tracking import TEXT_LENGTH, Tracking
from tasks.errors import VerificationError
from tasks.records import Artifact, EngineInfo, ModelFile, PublishedVersion, TensorSpec, Verdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Elements of the input example; it is stored twice, as JSON.
EXAMPLE_ELEMENTS = 1_000_000
CODE = Path(__file__).with_name("pyfunc_model.py")


@dataclass(frozen=True)
class Publication:
    """What is published: a verified artifact, under ``name``, from the parent run ``mlflow_run_id``."""

    name: str
    mlflow_run_id: str
    model: ModelFile
    engine: EngineInfo
    artifact: Artifact
    verdict: Verdict
    #: The target as the run was asked for it (``cpu``); the engine's own name is in ``engine.target``.
    requested_target: str = ""


def publish_model(tracking_uri: str, store: ObjectStore, publication: Publication, race: Race) -> PublishedVersion:
    """Store the artifact, log and register the model, decide on its alias, set it.

    Raises StoreError, TrackingError; VerificationError where the verdict says that the outputs are wrong.
    """
    if not publication.verdict.correct:
        raise VerificationError(f"{publication.name}: the artifact's outputs are wrong; it is not published")
    tracking = Tracking(tracking_uri)
    digest = publication.artifact.digest
    uri = put_folder(store, f"artifacts/{digest}", Path(publication.artifact.path))
    _create_name(tracking, publication.name)
    version = _existing_version(tracking, publication)
    if version is None:
        logged = _log_model(tracking, publication)
        version = _register(tracking, publication, logged, uri)
    alias, reason = _settle_alias(tracking, store, publication, version, race)
    return PublishedVersion(publication.name, version, alias, publication.mlflow_run_id, uri, reason)


def restore_version(tracking: Tracking, publication: Publication, artifact_uri: str, decision: str) -> str:
    """Log and register a model that was published before, into an MLflow that lost it; its version there."""
    _create_name(tracking, publication.name)
    version = _existing_version(tracking, publication)
    if version is None:
        version = _register(tracking, publication, _log_model(tracking, publication), artifact_uri)
    tag = methodcaller("set_model_version_tag", publication.name, version, "decision", decision[:TEXT_LENGTH])
    tracking.call(f"tag version {version} of {publication.name!r}", tag)
    return version


def requirements(engine: EngineInfo) -> list[str]:
    """What runs the model, pinned: the TVM packages that built it, and numpy."""
    packages = sorted(package for package in engine.versions if "tvm" in package)
    # TVMs with Relay are older than numpy 2, and their metadata do not say so.
    numpy = f"numpy=={engine.versions['numpy']}" if engine.engine == "relay" else "numpy"
    return [*(f"{package}=={engine.versions[package]}" for package in packages), numpy]


def environment(engine: EngineInfo) -> dict[str, Any]:
    """What MLflow writes of the environment that runs the model, as arguments of ``save_model``.

    A TVM with Relay is made for an older Python than this one: MLflow takes another from a conda environment only.
    """
    if engine.engine != "relay":
        return {"pip_requirements": requirements(engine)}
    pip = {"pip": ["mlflow", *requirements(engine)]}
    dependencies = [f"python={engine.python_version}", "pip", pip]
    return {"conda_env": {"name": "mlflow-env", "channels": ["conda-forge"], "dependencies": dependencies}}


def _name_python(path: Path, engine: EngineInfo) -> None:
    """Have MLflow make the model's environment with the engine's Python: it writes down the one that it runs in."""
    if engine.engine == "relay":
        lines = path.read_text().splitlines(keepends=True)
        lines = [f"python: {engine.python_version}\n" if line.startswith("python:") else line for line in lines]
        path.write_text("".join(lines))


def _create_name(tracking: Tracking, name: str) -> None:
    def create(client: Any) -> None:
        from mlflow.exceptions import MlflowException

        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    tracking.call(f"register the name {name!r}", create)


def _existing_version(tracking: Tracking, publication: Publication) -> str | None:
    """The version that an earlier attempt of this run registered with the same artifact."""

    def find(client: Any) -> str | None:
        wanted = f"name = '{publication.name}' and run_id = '{publication.mlflow_run_id}'"
        for version in client.search_model_versions(wanted):
            if version.tags.get("artifact_digest") == publication.artifact.digest:
                return str(version.version)
        return None

    return tracking.call(f"look for versions of {publication.name!r}", find)


def _log_model(tracking: Tracking, publication: Publication) -> Any:
    """Log the model into the parent run; returns MLflow's record of it.

    ``mlflow.pyfunc.log_model`` would load the model here to try its example, and with it TVM, and
    would take the run and the server from global state.
    """
    run_id = publication.mlflow_run_id

    def create(client: Any) -> Any:
        return client.create_logged_model(
            client.get_run(run_id).info.experiment_id, name=publication.name, source_run_id=run_id
        )

    logged = tracking.call("create the model", create)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        _save(folder, publication, logged)

        def upload(client: Any) -> None:
            from mlflow.entities import LoggedModelOutput

            client.log_model_artifacts(logged.model_id, str(folder))
            client.finalize_logged_model(logged.model_id, "READY")
            client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=0)])

        tracking.call("log the model", upload)
    return logged


def _save(folder: Path, publication: Publication, logged: Any) -> None:
    import mlflow.pyfunc
    from mlflow.models import Model

    model = Model(
        artifact_path=logged.artifact_location,
        run_id=publication.mlflow_run_id,
        model_uuid=logged.model_id,
        model_id=logged.model_id,
    )
    mlflow.pyfunc.save_model(
        folder,
        mlflow_model=model,
        python_model=str(CODE),
        artifacts={"artifact": publication.artifact.path},
        signature=signature_of(publication.model),
        input_example=_example(publication.model.inputs),
        **environment(publication.engine),
    )
    _name_python(folder / "python_env.yaml", publication.engine)
    for cache in list(folder.rglob("__pycache__")):
        shutil.rmtree(cache, ignore_errors=True)


def _example(inputs: tuple[TensorSpec, ...]) -> dict[str, NDArray[Any]] | None:
    """Seeded inputs; eighths, because JSON writes them short and exactly. None where they are too large."""
    import numpy as np

    generator = np.random.default_rng(0)
    arrays = {t.name: (generator.integers(0, 8, t.shape) / 8).astype(t.dtype) for t in inputs}
    return arrays if sum(array.size for array in arrays.values()) <= EXAMPLE_ELEMENTS else None


def _register(tracking: Tracking, publication: Publication, logged: Any, artifact_uri: str) -> str:
    verdict = publication.verdict
    every = {
        "target": publication.engine.target.key,
        "target_kind": publication.engine.target.kind,
        "requested_target": publication.requested_target,
        "engine": f"{publication.engine.engine} {publication.engine.tvm_version}",
        "source": publication.model.source,
        "source_version": publication.model.source_version,
        "model_digest": publication.model.digest,
        "artifact_digest": publication.artifact.digest,
        "tuned_ms": f"{verdict.tuned.median_ms:.6g}",
        "untuned_ms": f"{verdict.untuned.median_ms:.6g}",
        "onnxruntime_ms": f"{verdict.onnxruntime.median_ms:.6g}",
        "max_abs_error": f"{verdict.max_abs_error:.3g}",
        "verification": f"right on {len(verdict.seeds)} seeded inputs, tolerance {verdict.tolerance}",
        "artifact_uri": artifact_uri,
    }
    # A database's registry looks models:/ up in MLflow's global tracking URI, which may be another.
    source = f"models:/{logged.model_id}" if tracking.is_server else logged.artifact_location

    def create(client: Any) -> str:
        made = client.create_model_version(
            publication.name,
            source=source,
            run_id=publication.mlflow_run_id,
            model_id=logged.model_id,
            tags={key: value[:TEXT_LENGTH] for key, value in every.items()},
        )
        return str(made.version)

    return tracking.call(f"register a version of {publication.name!r}", create)


def _settle_alias(
    tracking: Tracking, store: ObjectStore, publication: Publication, version: str, race: Race
) -> tuple[str, str]:
    """Decide, write the decision down with its figures, set the alias; the alias and the reason."""
    champion = ChampionAlias(tracking, store, publication.name, publication.engine.target.key)
    entries, now = champion.up_to_date()
    raced = race.champion.version if race.champion else ""
    decision = _decide(tracking, publication, race, entries, now)
    if now == version:
        decision = Decision(True, "it was made champion before")
    elif decision.promoted:
        moved = champion.move(_move("promote", champion.alias(CHAMPION), version, raced, publication, decision))
        if not moved.done:
            against = f"version {raced}" if raced else "nobody"
            decision = replace(
                decision,
                promoted=False,
                reason=f"{moved.message}; the benchmark was against {against}: {decision.reason}",
            )
    holder = champion.holder()
    alias = holder.alias if decision.promoted and holder else champion.alias(CHALLENGER)
    last = entries[-1].move if entries else None
    if not decision.promoted and (last is None or (last.action, last.version) != ("challenge", version)):
        champion.write(_move("challenge", alias, version, raced, publication, decision))

    def write(client: Any) -> None:
        client.set_model_version_tag(publication.name, version, "decision", f"{alias}: {decision.reason}"[:TEXT_LENGTH])
        if not decision.promoted:
            client.set_registered_model_alias(publication.name, alias, version)

    tracking.call(f"set alias {alias!r} of {publication.name!r}", write)
    return alias, decision.reason


def _decide(tracking: Tracking, publication: Publication, race: Race, entries: Sequence[Entry], now: str) -> Decision:
    """The race's decision, unless callers of the champion would not be served by this model."""
    decision = decide_alias(race)
    dropped = dropped_digests(entries).get(publication.artifact.digest)
    if dropped is not None:
        return replace(decision, promoted=False, reason=f"this artifact was rolled back before ({dropped})")
    differs = mismatch(tracking, publication.name, now, publication.model) if now else ""
    if differs:
        reason = (
            f"the signature does not match the champion's: {differs}; "
            f"set the alias by hand once its callers are ready: {decision.reason}"
        )
        return replace(decision, promoted=False, reason=reason)
    return decision


def _move(action: str, alias: str, version: str, before: str, publication: Publication, decision: Decision) -> Move:
    digest, by = publication.artifact.digest, f"run {publication.mlflow_run_id}, {who()}"
    return Move(
        action, alias, version, before, decision.reason, by, time.time(), digest, numbers=dict(decision.numbers)
    )
