"""A model's signature in MLflow: made from the model, and compared with the one that is registered."""

from __future__ import annotations

import tempfile
from typing import Any

from infra.tracking import Tracking
from tasks.records import ModelFile


def signature_of(model: ModelFile) -> Any:
    """MLflow's signature of ``model``: names, dtypes and shapes of its inputs and outputs."""
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def schema(tensors: tuple[Any, ...]) -> Schema:
        return Schema([TensorSpec(np.dtype(t.dtype), t.shape, t.name) for t in tensors])

    return ModelSignature(schema(model.inputs), schema(model.outputs))


def mismatch(tracking: Tracking, name: str, version: str, model: ModelFile) -> str:
    """How ``model`` differs for a caller from the registered ``version``, as text; empty where it does not.

    Raises TrackingError.
    """
    registered = _registered_signature(tracking, name, version)
    if registered is None:
        return f"version {version} has no signature that could be read"
    made = signature_of(model)
    for what, old, new in (
        ("inputs", registered.inputs, made.inputs),
        ("outputs", registered.outputs, made.outputs),
    ):
        if _texts(old) != _texts(new):
            return f"its {what} are {', '.join(_texts(new))}, those of version {version} {', '.join(_texts(old))}"
    return ""


def _registered_signature(tracking: Tracking, name: str, version: str) -> Any:
    """The signature in the version's MLmodel file; None where there is no file or no signature in it."""

    def read(client: Any) -> Any:
        import mlflow.artifacts
        from mlflow.exceptions import MlflowException
        from mlflow.models import Model

        found = client.get_model_version(name, version)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                location = (
                    client.get_logged_model(found.model_id).artifact_location
                    if found.model_id
                    else client.get_model_version_download_uri(name, version)
                )
                path = mlflow.artifacts.download_artifacts(
                    f"{location}/MLmodel", dst_path=scratch, tracking_uri=tracking.uri
                )
                return Model.load(path).signature
            except (MlflowException, OSError):
                return None

    return tracking.call(f"read the signature of {name} version {version}", read)


def _texts(schema: Any) -> list[str]:
    if schema is None:
        return ["none"]
    if not schema.is_tensor_spec():
        return [str(column) for column in schema.inputs]
    return [f"{t.name} {'x'.join(map(str, t.shape)) or 'scalar'} {t.type}" for t in schema.inputs]
