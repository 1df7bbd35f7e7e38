"""What the cost model has learned, in the object store: one file a run, merged by reading.

    cost-model/<engine>/<tvm version>/<target key>/<run id>.<hash>.npz
    cost-model-live/<engine>/<tvm version>/<target key>/<run id>/<session id>.npz

Sessions write files of their own into a local folder; at the end of a run these become one object. While
a run is spread over several agents, each session's file is an object too, read only for the runs that go on.
A file holds ``rows`` (features, one row a buffer store), ``lengths`` (rows of each candidate),
``workloads``, ``candidates`` and ``latencies_us`` (infinite where the trial failed); and of the fastest
candidates ``schedules``, their traces, with ``schedule_workloads`` and ``schedule_latencies_us``.
"""

from __future__ import annotations

import io
import time
import uuid
from pathlib import Path

import numpy as np

from infra.object_store import ObjectStore, checked_key
from tasks.records import EngineInfo, short_hash

PARTS = (
    "rows", "lengths", "workloads", "candidates", "latencies_us",
    "schedules", "schedule_workloads", "schedule_latencies_us",
)  # fmt: skip


class SampleStore:
    """The samples of one engine, TVM version and target; ``folder`` is where the engine reads them."""

    def __init__(self, store: ObjectStore, info: EngineInfo, home: Path) -> None:
        self._store = store
        place = f"{info.engine}/{info.tvm_version}/{info.target.key}"
        self._prefix = checked_key(f"cost-model/{place}")
        self._live = checked_key(f"cost-model-live/{place}")
        self.folder = home / "samples" / info.engine / info.tvm_version / info.target.key
        self.folder.mkdir(parents=True, exist_ok=True)

    def fetch(self) -> int:
        """Bring what other machines and nights have learned; how many files came. Raises StoreError."""
        return sum(self._fetch(key) for key in self._store.list(f"{self._prefix}/"))

    def fetch_live(self, run_id: str) -> int:
        """Bring what the sessions of a run that goes on have learned; how many files came. Raises StoreError."""
        return sum(self._fetch(key) for key in self._store.list(f"{self._live}/{checked_key(run_id)}/"))

    def publish_session(self, run_id: str, session_id: str) -> bool:
        """Let the run's other agents have what this session learned; False where that is nothing new.

        Raises StoreError.
        """
        path = self.folder / f"{session_id}.npz"
        return path.exists() and self._store.put_file(f"{self._live}/{run_id}/{path.name}", path)

    def forget_sessions(self, before_s: float) -> None:
        """Remove the files of sessions that are older: their runs have ended and are objects of their own."""
        for path in self.folder.glob("*-[0-9][0-9][0-9][0-9].npz"):
            if path.stat().st_mtime < time.time() - before_s:
                path.unlink(missing_ok=True)

    def publish(self, run_id: str) -> int:
        """Put the samples of the run's sessions into one object; how many samples. Raises StoreError.

        The sessions' files go when the object is there, so a run that dies here is published next time.
        """
        files = sorted(self.folder.glob(f"{run_id}-*.npz"))
        loaded = []
        for path in files:
            with np.load(path, allow_pickle=False) as stored:
                loaded.append({part: stored[part] for part in stored.files})
        if not loaded:
            return 0
        merged = {
            part: np.concatenate([piece[part] for piece in loaded if part in piece])
            for part in PARTS
            if any(part in piece for piece in loaded)
        }
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **merged)
        # Named by its parts: another process may have published earlier sessions of the run, taking it for dead.
        name = f"{run_id}.{short_hash(*(path.name for path in files), length=8)}.npz"
        self._store.put(f"{self._prefix}/{name}", buffer.getvalue())
        (self.folder / name).write_bytes(buffer.getvalue())
        for path in files:
            path.unlink()
        return len(merged["lengths"])

    def unpublished(self) -> set[str]:
        """The runs whose sessions left files here without becoming an object: they died."""
        return {path.stem.rsplit("-", 1)[0] for path in self.folder.glob("*-[0-9][0-9][0-9][0-9].npz")}

    def _fetch(self, key: str) -> bool:
        """Whether the object was not here yet."""
        path = self.folder / key.rsplit("/", 1)[1]
        if path.exists():
            return False
        temporary = path.with_suffix(f".{uuid.uuid4().hex}.part")
        temporary.write_bytes(self._store.get(key))
        temporary.replace(path)
        return True
