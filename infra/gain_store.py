"""What the first search sessions of tasks have gained, and how soon: a small object a run.

    gains/<engine>/<tvm version>/<target key>/<version of the default schedules>[-cold]/<run id>.json

An object is JSON, {"gains": {"conv2d": [0.04, 0.0], "softmax": [0.61]}, "lengths": [3, 1]}; earlier versions
wrote the gains alone.

A gain is the share of the latency that the session took away, a length the trials after which it had most of it.
Where defaults are good already and where they are not is a property of engine and target, not of one model.
"""

from __future__ import annotations

import json
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

from infra.object_store import ObjectStore, checked_key
from infra.record_store import READERS
from tasks.records import EngineInfo, FirstSessions

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

    def publish(self, run_id: str, brought: FirstSessions) -> None:
        """Store what a run's first sessions brought; of a run once, and nothing for nothing. Raises StoreError."""
        if brought.gains:
            content = {"gains": brought.gains, "lengths": brought.lengths}
            self._store.put(f"{self._prefix}/{run_id}.json", json.dumps(content, sort_keys=True).encode())

    def load(self) -> FirstSessions:
        """What the first sessions of the latest runs brought. Raises StoreError."""
        keys = sorted(self._store.list(f"{self._prefix}/"))[-_RUNS:]
        with ThreadPoolExecutor(READERS) as readers:
            found = [json.loads(content) for content in readers.map(self._store.get, keys)]
        gains: dict[str, list[float]] = defaultdict(list)
        lengths: list[int] = []
        for content in found:
            for operator, values in content.get("gains", content).items():
                gains[operator] += values
            lengths += content.get("lengths", ())
        return FirstSessions({operator: tuple(values) for operator, values in gains.items()}, tuple(lengths))
