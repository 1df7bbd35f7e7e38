"""Where finished artifacts run: on the device at hand, or on an agent, to which they go through the store.

transit/<kind>/<digest>   what agents need for a moment; nothing reads it later, it may be removed any time
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import onnx

from infra.object_store import ObjectStore, get_folder, put_folder
from infra.patience import patiently
from infra.settings import settings
from tasks.engines.interface import ExecutionRequest
from tasks.racing import Execute, RaceOrder, race
from tasks.records import Latency, ModelFile, short_hash

if TYPE_CHECKING:
    from tasks.agent import Running
    from tasks.fleet import Fleet

#: Which fields of a request name files that it writes.
_OUTPUTS = ("outputs_path", "profile_path", "roof_path")


class Executor(Protocol):
    """What runs artifacts."""

    def execute(self, request: ExecutionRequest) -> Latency:
        """See Engine. Raises EngineError."""

    def race(self, order: RaceOrder) -> dict[str, Latency]:
        """See ``racing.race``. Raises EngineError, ModelError."""


class HereExecutor:
    """This machine's device."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute

    def execute(self, request: ExecutionRequest) -> Latency:
        """See Executor."""
        return self._execute(request)

    def race(self, order: RaceOrder) -> dict[str, Latency]:
        """See Executor."""
        return race(self._execute, order)


@dataclass(frozen=True)
class _Parcel:
    """Files in the store by their name here: folders and single files, and what to do with them."""

    folders: Mapping[str, str]
    request: ExecutionRequest | None = None
    order: RaceOrder | None = None


class AgentExecutor:
    """An agent of the fleet, whichever is free; a race is run by one from its beginning to its end."""

    def __init__(self, fleet: Fleet, store: ObjectStore) -> None:
        self._fleet = fleet
        self._store = store
        self._sent: dict[str, str] = {}

    def execute(self, request: ExecutionRequest) -> Latency:
        """See Executor."""
        folders = {request.artifact_dir: self._send(Path(request.artifact_dir))}
        folders[request.inputs_path] = self._send_files({"inputs.npz": Path(request.inputs_path)})
        latency, written = self._fleet.on_one(_execute_there, _Parcel(folders, request))
        for name, data in written.items():
            Path(getattr(request, name)).write_bytes(data)
        return latency

    def race(self, order: RaceOrder) -> dict[str, Latency]:
        """See Executor."""
        folders = {folder: self._send(Path(folder)) for folder in order.folders.values()}
        folders[order.inputs_path] = self._send_files({"inputs.npz": Path(order.inputs_path)})
        folders[order.model.original_path] = self._send_files(_files_of(order.model))
        return self._fleet.on_one(_race_there, _Parcel(folders, order=order))

    def _send(self, folder: Path) -> str:
        """Store the folder; its prefix. What was sent is not sent again while this run lasts."""
        names = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
        return self._send_files({n: p for n, p in names.items() if p.parent.name != "__pycache__"})

    def _send_files(self, files: Mapping[str, Path]) -> str:
        digest = hashlib.sha256()
        for name, path in files.items():
            digest.update(name.encode())
            with path.open("rb") as source:
                digest.update(hashlib.file_digest(source, "sha256").digest())
        prefix = f"transit/{digest.hexdigest()}"
        if prefix not in self._sent:
            parcel = Path(settings().home) / "transit" / digest.hexdigest()[:16]
            try:
                for name, path in files.items():
                    (parcel / name).parent.mkdir(parents=True, exist_ok=True)
                    (parcel / name).unlink(missing_ok=True)
                    (parcel / name).symlink_to(path.resolve())
                patiently("sending files", lambda: put_folder(self._store, prefix, parcel), _patience_s())
            finally:
                shutil.rmtree(parcel, ignore_errors=True)
            self._sent[prefix] = prefix
        return prefix


def _execute_there(agent: Running, parcel: _Parcel) -> tuple[Latency, dict[str, bytes]]:
    assert parcel.request is not None
    here = _unpack(agent, parcel)
    request = parcel.request
    scratch = agent.options.folder / "transit" / f"out-{short_hash(request, os.getpid())}"
    scratch.mkdir(parents=True, exist_ok=True)
    asked = {name: getattr(request, name) for name in _OUTPUTS}
    wanted: dict[str, Any] = {name: str(scratch / Path(path).name) for name, path in asked.items() if path}
    inputs = here[request.inputs_path] / "inputs.npz"
    placed = replace(request, artifact_dir=str(here[request.artifact_dir]), inputs_path=str(inputs), **wanted)
    try:
        latency = agent.engine.execute(placed)
        return latency, {name: Path(path).read_bytes() for name, path in wanted.items() if Path(path).exists()}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _race_there(agent: Running, parcel: _Parcel) -> dict[str, Latency]:
    order = parcel.order
    assert order is not None
    here = _unpack(agent, parcel)
    original = here[order.model.original_path] / Path(order.model.original_path).name
    placed = replace(
        order, folders={name: str(here[folder]) for name, folder in order.folders.items()},
        inputs_path=str(here[order.inputs_path] / "inputs.npz"),
        model=replace(order.model, original_path=str(original)),
    )  # fmt: skip
    return race(agent.engine.execute, placed)


def _unpack(agent: Running, parcel: _Parcel) -> dict[str, Path]:
    """The parcel's folders on the agent, by what they are called where they came from."""
    here = {}
    for name, prefix in parcel.folders.items():
        folder = agent.options.folder / "transit" / prefix.rpartition("/")[2]
        if not folder.exists():
            incoming = folder.with_name(f".{folder.name}")
            patiently("fetching files", lambda: get_folder(agent.store, prefix, incoming), _patience_s())  # noqa: B023
            incoming.replace(folder)
        here[name] = folder
    return here


def _patience_s() -> float:
    return settings().outage_patience_s


def _files_of(model: ModelFile) -> dict[str, Path]:
    """The model's files by name: the graph, and the weights that it keeps beside itself."""
    path = Path(model.original_path)
    files = {path.name: path}
    graph = onnx.load(path, load_external_data=False).graph
    for weight in graph.initializer:
        if weight.data_location == onnx.TensorProto.EXTERNAL:
            location = next(entry.value for entry in weight.external_data if entry.key == "location")
            files[location] = path.parent / location
    return files
