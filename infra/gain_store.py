"""What the first search session of a task has gained, by operator: a small object a run.

    gains/<engine>/<tvm version>/<target key>/<version of the default schedules>[-cold]/<run id>.json

An object is JSON, {"conv2d": [0.04, 0.0], "softmax": [0.61]}.

A gain is the share of the latency that the session took away. Where defaults are good already and where
they are not is a property of engine and target, not of one model.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from infra.object_store import ObjectStore, checked_key
from infra.record_store import READERS
from tasks.records import EngineInfo

#: Runs that are looked at, the latest ones.
_RUNS = 32


class GainStore:
    """The gains of one engine, TVM version and target, over one version of its default schedules."""

    def __init__(self, store: ObjectStore, info: EngineInfo, defaults: str, cold: bool = False) -> None:
        """``defaults``: the version of the engine's default schedules, empty for an engine that has but one.

        ``cold``: what was gained where kernels were timed with a cold cache.
        """
        self._store = store
        version = f"{defaults or 'first'}{'-cold' if cold else ''}"
        place = f"{info.engine}/{info.tvm_version}/{info.target.key}/{version}"
        self._prefix = checked_key(f"gains/{place}")

    def publish(self, run_id: str, gains: Mapping[str, Sequence[float]]) -> None:
        """Store what a run's first sessions gained; of a run once, and nothing for nothing. Raises StoreError."""
        if gains:
            self._store.put(f"{self._prefix}/{run_id}.json", json.dumps(gains, sort_keys=True).encode())

    def load(self) -> dict[str, tuple[float, ...]]:
        """The gains of the latest runs, by operator. Raises StoreError."""
        keys = sorted(self._store.list(f"{self._prefix}/"))[-_RUNS:]
        with ThreadPoolExecutor(READERS) as readers:
            found = list(readers.map(self._store.get, keys))
        gains: dict[str, list[float]] = defaultdict(list)
        for content in found:
            for operator, values in json.loads(content).items():
                gains[operator] += values
        return {operator: tuple(values) for operator, values in gains.items()}
