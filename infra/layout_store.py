"""Which layout a model is compiled with: decided once by measurement, then looked up.

    layouts/<engine>/<tvm version>/<target key>/<version of the default schedules>/<model digest>.json

An object is JSON, {"chosen": "channels-last", "latency_us": {"channels-last": 6900.0, "as-imported": 31000.0}}.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from infra.object_store import ObjectMissing, ObjectStore, checked_key
from tasks.records import EngineInfo


@dataclass(frozen=True)
class LayoutDecision:
    """``latency_us``: what each layout took, or for one that lost early what its heaviest tasks alone took."""

    chosen: str
    latency_us: dict[str, float]


class LayoutStore:
    """The decisions of one engine, TVM version and target, over one version of its default schedules."""

    def __init__(self, store: ObjectStore, info: EngineInfo, defaults: str) -> None:
        self._store = store
        self._root = checked_key(f"layouts/{info.engine}/{info.tvm_version}/{info.target.key}/{defaults or 'first'}")

    def put(self, digest: str, decision: LayoutDecision) -> None:
        """Store a decision; the first one stays. Raises StoreError."""
        self._store.put(self._key(digest), json.dumps(asdict(decision), sort_keys=True).encode())

    def get(self, digest: str) -> LayoutDecision | None:
        """What was decided for the model, if anything was. Raises StoreError."""
        try:
            found = json.loads(self._store.get(self._key(digest)))
        except ObjectMissing:
            return None
        return LayoutDecision(str(found["chosen"]), {str(k): float(v) for k, v in found["latency_us"].items()})

    def _key(self, digest: str) -> str:
        return f"{self._root}/{checked_key(digest)}.json"
