"""Where a model comes from: fetches it to this machine, reads its graph, finds its external data.

A source is an ONNX file or a folder that holds one, ``models:/name/version``, ``models:/name@alias``,
``runs:/run/path`` or ``s3://bucket/key.onnx``. mlflow and boto3 take seconds to import, so each is
imported by the source that needs it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx.external_data_helper import uses_external_data

from infra.settings import settings
from tasks.errors import ModelError, StoreError, TrackingError
from tasks.records import short_hash

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

#: MLflow's codes for "the address that you gave names nothing"; any other is MLflow's own trouble.
_MLFLOW_NOT_FOUND = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "NOT_FOUND")
_S3_NOT_FOUND = ("404", "NoSuchKey", "NoSuchBucket")
#: protobuf cannot hold more; larger models keep their weights in external data.
_PROTOBUF_LIMIT_BYTES = (1 << 31) - 1


@dataclass(frozen=True)
class FetchedModel:
    """A model on this machine, as its owner wrote it.

    ``name`` is what it is registered under unless the user says otherwise; ``source_version`` is
    the registry's version number, empty for other sources.
    """

    path: Path
    name: str
    source: str
    source_version: str = ""


def fetch(source: str, work_dir: Path) -> FetchedModel:
    """Bring the model at ``source`` to this machine, external data beside it.

    A file on this machine is used where it is; others are downloaded below ``work_dir``.

    Raises ModelError (there is no such model), TrackingError (MLflow) or StoreError (S3).
    """
    if source.startswith("s3://"):
        return _from_s3(source, work_dir)
    if source.startswith("models:/"):
        return _from_registry(source, work_dir)
    if source.startswith("runs:/"):
        return _from_run(source, work_dir)
    if "://" in source:
        raise ModelError(
            f"cannot fetch {one_line(source)}: give an ONNX file, models:/name/version, models:/name@alias, "
            "runs:/run/path or s3://bucket/key.onnx"
        )
    return _from_disk(source)


def one_line(text: object, limit: int = 400) -> str:
    """``text`` on one line, without passwords of URLs, cut to ``limit`` characters."""
    line = " ".join(re.sub(r"//[^/@\s]*@", "//***@", str(text)).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def read_model(path: Path) -> onnx.ModelProto:
    """The ONNX protobuf at ``path``, external data not read. Raises ModelError."""
    try:
        size_bytes = path.stat().st_size
        data = path.read_bytes() if size_bytes <= _PROTOBUF_LIMIT_BYTES else b""
    except OSError as err:
        raise ModelError(f"cannot read the model {path}: {err.strerror or err}; check the path") from err
    if size_bytes > _PROTOBUF_LIMIT_BYTES:
        raise ModelError(f"{path} has {size_bytes} bytes, protobuf ends at 2 GB: save it with external data")
    if not data:
        raise ModelError(f"{path} is empty (0 bytes), not an ONNX model: export or download it again")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as err:
        raise ModelError(
            f"{path} ({size_bytes} bytes) is not an ONNX model or is truncated: export or download it again"
        ) from err
    # Text and other protobufs can decode to a message with nothing in it, and so can a truncated model.
    if not model.graph.node or not model.graph.output or not model.opset_import:
        raise ModelError(
            f"{path} ({size_bytes} bytes) is not a complete ONNX model, it holds no graph with nodes, "
            "outputs and an opset: export or download it again"
        )
    return model


def external_locations(model: onnx.ModelProto) -> dict[str, list[onnx.TensorProto]]:
    """The tensors of ``model`` outside it, by the file that holds them, relative to its folder.

    Raises ModelError for a location that is absolute or leaves the folder.
    """
    found: dict[str, list[onnx.TensorProto]] = {}
    for tensor in _tensors(model):
        if uses_external_data(tensor):
            location = _external_entry(tensor, "location")
            if _leaves_folder(location):
                raise ModelError(
                    f"refused external data {location!r} of tensor {tensor.name}: it must be a path inside "
                    "the model's folder; save the model again with its data beside it"
                )
            found.setdefault(location, []).append(tensor)
    return dict(sorted(found.items()))


def external_files(model: onnx.ModelProto, path: Path) -> dict[str, Path]:
    """The external data of the model at ``path``, by location; nothing of it is read.

    Raises ModelError for a file that lies outside the model's folder (a symbolic link may lead
    there), is missing, or is too short for a tensor in it.
    """
    folder = path.parent.resolve()
    files: dict[str, Path] = {}
    for location, tensors in external_locations(model).items():
        file = (folder / location).resolve()
        if not file.is_relative_to(folder):
            raise ModelError(
                f"refused external data {location!r} of {path}: it leads to {file}, outside the model's "
                "folder; put the data itself there"
            )
        if not file.is_file():
            raise ModelError(f"external data {file} of {path} is missing: put it beside the model")
        size_bytes = file.stat().st_size
        for tensor in tensors:
            end_bytes = _end_bytes(tensor)
            if end_bytes > size_bytes:
                raise ModelError(
                    f"external data {file} of {path} is too short: tensor {tensor.name} ends at byte "
                    f"{end_bytes}, the file has {size_bytes}; download it again"
                )
        files[location] = file
    return files


def _leaves_folder(location: str) -> bool:
    posix, windows = PurePosixPath(location), PureWindowsPath(location)
    return not location or posix.is_absolute() or bool(windows.anchor) or ".." in windows.parts


def _external_entry(tensor: onnx.TensorProto, key: str) -> str:
    return next((str(entry.value) for entry in tensor.external_data if entry.key == key), "")


def _end_bytes(tensor: onnx.TensorProto) -> int:
    """Where in its file ``tensor`` ends, in bytes."""
    offset, length = _external_entry(tensor, "offset") or "0", _external_entry(tensor, "length")
    if not offset.isdecimal() or not (length or "0").isdecimal():
        raise ModelError(
            f"external data of tensor {tensor.name} has offset {offset!r} and length {length!r}, not "
            "byte counts: save the model again"
        )
    if not length:
        try:
            item_bytes = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        except (KeyError, ValueError) as err:
            raise ModelError(f"tensor {tensor.name} has the unknown dtype {tensor.data_type}") from err
        # Types below a byte are packed: without a length only the start is certain.
        length = str(math.prod(tensor.dims) * item_bytes if tensor.data_type <= onnx.TensorProto.BFLOAT16 else 0)
    return int(offset) + int(length)


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of the model: weights and attributes, subgraphs and functions included."""
    yield from _tensors_of_graph(model.graph)
    for function in model.functions:
        for node in function.node:
            yield from _tensors_of_node(node)


def _tensors_of_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from _tensors_of_node(node)


def _tensors_of_node(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    for attribute in node.attribute:
        yield from (attribute.t, *attribute.tensors)
        for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
            yield from (sparse.values, sparse.indices)
        for graph in (attribute.g, *attribute.graphs):
            yield from _tensors_of_graph(graph)


def _registry_name(text: str) -> str:
    """``text`` with only letters, digits, dash and underscore: safe in file names and registries."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-") or "model"


def _from_disk(source: str) -> FetchedModel:
    path = Path(source)
    if path.is_dir():
        return FetchedModel(_onnx_file_in(path), _registry_name(path.resolve().name), source)
    if not path.is_file():
        raise ModelError(f"there is no model file {source}: check the path")
    return FetchedModel(path.absolute(), _registry_name(path.stem), source)


def _onnx_file_in(folder: Path) -> Path:
    """The model of a folder as ``mlflow.onnx`` writes it: model.onnx, or else the only .onnx file."""
    files = sorted(folder.glob("*.onnx"))
    if folder / "model.onnx" in files:
        return (folder / "model.onnx").absolute()
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise ModelError(f"folder {folder} must hold model.onnx or one .onnx file; it holds: {names}")
    return files[0].absolute()


def _from_registry(source: str, work_dir: Path) -> FetchedModel:
    """``models:/name/version`` or ``models:/name@alias``: an alias becomes the version it means now."""
    match = re.fullmatch(r"models:/+([^/@]+)(?:/(\d+)|@([^/@]+))/?", source)
    if match is None:
        raise ModelError(f"cannot read {source}: give models:/name/version (a number) or models:/name@alias")
    name, version, alias = match.groups()
    if alias:
        version = _ask_mlflow(source, lambda: _version_of_alias(name, alias))
    uri = f"models:/{name}/{version}"
    folder = _download_artifacts(source, uri, _download_folder(work_dir, uri))
    return FetchedModel(_onnx_file_in(folder), _registry_name(name), source, str(version))


def _version_of_alias(name: str, alias: str) -> str:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=settings().tracking)
    return str(client.get_model_version_by_alias(name, alias).version)


def _from_run(source: str, work_dir: Path) -> FetchedModel:
    """``runs:/run/path``, where path is a logged model's folder or an .onnx file of the run."""
    uri = source.rstrip("/")
    target = _download_folder(work_dir, uri)
    path = _download_artifacts(source, uri, target)
    if path.is_dir():
        return FetchedModel(_onnx_file_in(path), _registry_name(path.name), source)
    parent = uri.rpartition("/")[0]
    for location in external_locations(read_model(path)):
        # Where below the target MLflow puts a file depends on what logged it.
        data = _download_artifacts(source, f"{parent}/{location}", target / "external")
        (path.parent / location).parent.mkdir(parents=True, exist_ok=True)
        data.replace(path.parent / location)
    return FetchedModel(path, _registry_name(path.stem), source)


def _download_folder(work_dir: Path, uri: str) -> Path:
    """A folder of its own for each source: files of two models never mix."""
    # A registry elsewhere may use the same names and versions.
    return work_dir / "fetched" / short_hash(uri, settings().tracking, settings().s3_endpoint_url)


def _download_artifacts(source: str, uri: str, target: Path) -> Path:
    def download() -> str:
        import mlflow.artifacts

        return str(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=str(target)))

    return Path(_ask_mlflow(source, download)).absolute()


def _ask_mlflow(source: str, call: Callable[[], str]) -> str:
    """``call()``, with whatever mlflow raises translated: its back ends raise errors of many libraries."""
    # MLflow's own default retries for minutes, in silence; Prefect retries the whole step.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    import mlflow

    settings().home.mkdir(parents=True, exist_ok=True)  # of the default database
    # Given as an argument, it would not reach the models that a registered version points at.
    mlflow.set_tracking_uri(settings().tracking)
    try:
        return call()
    except Exception as err:
        where = f"in MLflow at {one_line(settings().tracking)}"
        reason = one_line(err, limit=200)
        if getattr(err, "error_code", "") in _MLFLOW_NOT_FOUND:
            raise ModelError(f"there is no {source} {where}: {reason}; check its name") from err
        raise TrackingError(
            f"cannot fetch {source} {where}: {reason}; check MLFLOW_TRACKING_URI and that it answers"
        ) from err


def _from_s3(source: str, work_dir: Path) -> FetchedModel:
    bucket, _, key = source.removeprefix("s3://").partition("/")
    if not bucket or not key or key.endswith("/"):
        raise ModelError(f"cannot read {source}: give s3://bucket/key.onnx")
    target = _download_folder(work_dir, source)
    client = _s3_client(source)
    path = target / PurePosixPath(key).name
    _download_object(client, bucket, key, path)
    prefix = key.rpartition("/")[0]
    for location in external_locations(read_model(path)):
        _download_object(client, bucket, f"{prefix}/{location}".lstrip("/"), target / location)
    return FetchedModel(path.absolute(), _registry_name(path.stem), source)


def _s3_client(source: str) -> S3Client:
    """Endpoint from the settings, region and credentials from boto3's usual variables and files."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    config = Config(connect_timeout=10, retries={"mode": "standard", "max_attempts": 3})
    try:
        return boto3.client("s3", endpoint_url=settings().s3_endpoint_url or None, config=config)
    except (BotoCoreError, ValueError) as err:
        raise StoreError(one_line(f"cannot reach S3 for {source}: {err}; check the AWS_ variables")) from err


def _download_object(client: S3Client, bucket: str, key: str, path: Path) -> None:
    """Fetch one object; boto3 writes a temporary file first, so ``path`` is never half written."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(bucket, key, str(path))
    except (ClientError, BotoCoreError, Boto3Error, OSError) as err:
        place = f"s3://{bucket}/{key}"
        code = err.response.get("Error", {}).get("Code", "") if isinstance(err, ClientError) else ""
        where = f"at {one_line(settings().s3_endpoint_url or 'AWS')}"
        if code in _S3_NOT_FOUND:
            raise ModelError(f"there is no object {place} {where}: check bucket and key") from err
        raise StoreError(
            f"cannot fetch {place} {where}: {one_line(err, limit=200)}; check endpoint, region and AWS credentials"
        ) from err
