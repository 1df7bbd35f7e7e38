"""What earlier sessions have found, on this machine and others: the configs of every workload of the target.

A file holds one session's: ``schedules`` with their ``schedule_workloads`` and ``schedule_latencies_us``, and
what the object store counts and merges for every engine (``rows``, ``lengths``, ...).
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from tasks.engines.relay.lowering import Choice

#: A config of another workload is tried only if it was at most so much slower than that one's best.
_GOOD_RATIO = 1.15


class Memory:
    """Measured choices by implementation; kept in files, one a session."""

    def __init__(self) -> None:
        self._latency_us: dict[tuple[str, str], float] = {}
        self._best_us: dict[str, float] = {}
        self._loaded: set[str] = set()
        self._fresh: list[tuple[str, str, str, float]] = []

    def add(self, workload: str, candidate: str, schedule: str, latency_us: float) -> None:
        """One candidate that this process has measured."""
        if (workload, schedule) not in self._latency_us:
            self._fresh.append((workload, candidate, schedule, latency_us))
        self._put(workload, schedule, latency_us)

    def load(self, folder: Path) -> None:
        """Take in the files of ``folder`` that were not read yet; one that is damaged is left out."""
        for path in sorted(folder.glob("*.npz")):
            if path.name in self._loaded:
                continue
            self._loaded.add(path.name)
            try:
                with np.load(path, allow_pickle=False) as stored:
                    columns = [stored[name] for name in ("schedule_workloads", "schedules", "schedule_latencies_us")]
                for workload, schedule, latency_us in zip(*columns):  # noqa: B905 - Python 3.9 has no strict
                    self._put(str(workload), str(schedule), float(latency_us))
            except (OSError, ValueError, KeyError, zipfile.BadZipFile):
                continue

    def save(self, path: Path) -> None:
        """Write what came in since the last ``save``."""
        if not self._fresh:
            return
        workloads, candidates, schedules, latencies = zip(*self._fresh)  # noqa: B905
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            np.savez(
                file, rows=np.zeros((len(schedules), 1), "float32"), lengths=np.ones(len(schedules), "int64"),
                workloads=np.array(workloads), candidates=np.array(candidates),
                latencies_us=np.array(latencies), schedules=np.array(schedules),
                schedule_workloads=np.array(workloads), schedule_latencies_us=np.array(latencies),
            )  # fmt: skip
        temporary.replace(path)
        self._loaded.add(path.name)
        self._fresh.clear()

    def donors(self, implementation: str, workload: str, count: int) -> list[Choice]:
        """The best choices of other workloads for ``implementation``, those nearest to their workload's best first."""
        ranked = sorted(
            (latency_us / self._best_us[other], schedule)
            for (other, schedule), latency_us in self._latency_us.items()
            if other != workload and f'"{implementation}"' in schedule
        )
        found: list[Choice] = []
        for ratio, schedule in ranked:
            if ratio > _GOOD_RATIO or len(found) >= count:
                break
            try:
                choice = Choice.from_text(schedule)
            except (ValueError, KeyError, TypeError):
                continue
            if choice.config is not None and choice.implementation == implementation:
                found.append(choice)
        return found

    def _put(self, workload: str, schedule: str, latency_us: float) -> None:
        if latency_us > 0 and np.isfinite(latency_us):
            known = self._latency_us.get((workload, schedule), latency_us)
            self._latency_us[workload, schedule] = min(known, latency_us)
            self._best_us[workload] = min(self._best_us.get(workload, latency_us), latency_us)
