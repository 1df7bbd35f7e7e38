"""What earlier sessions have found, on this machine and others: the configs of every workload of the target.

A file holds one session's: ``schedules`` with their ``schedule_workloads`` and ``schedule_latencies_us``, and
what the object store counts and merges for every engine (``rows``, ``lengths``, ...).
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tasks.engines.relay.lowering import Choice
from tasks.engines.relay.spaces import Space

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

    def donors(self, space: Space, workload: str, count: int) -> list[Choice]:
        """The best choices of other workloads for the implementation of ``space``, the nearest sizes first.

        Of workloads as near as each other, those nearest to the best of their own.
        """
        wanted = sizes(space.workload)
        ranked = []
        for (other, schedule), latency_us in self._latency_us.items():
            ratio = latency_us / self._best_us[other]
            if other == workload or ratio > _GOOD_RATIO or f'"{space.implementation}"' not in schedule:
                continue
            choice = _parsed(schedule)
            if choice is not None and choice.implementation == space.implementation:
                ranked.append((_distance(sizes(choice.workload), wanted), ratio, schedule, choice))
        return [choice for *_, choice in sorted(ranked, key=lambda entry: entry[:3])[:count]]

    def _put(self, workload: str, schedule: str, latency_us: float) -> None:
        if latency_us > 0 and np.isfinite(latency_us):
            known = self._latency_us.get((workload, schedule), latency_us)
            self._latency_us[workload, schedule] = min(known, latency_us)
            self._best_us[workload] = min(self._best_us.get(workload, latency_us), latency_us)


def _parsed(schedule: str) -> Choice | None:
    try:
        choice = Choice.from_text(schedule)
    except (ValueError, KeyError, TypeError, RuntimeError):
        return None
    return choice if choice.config is not None else None


def sizes(workload: Any) -> tuple[int, ...]:
    """The numbers of what AutoTVM's workload computes, whatever blocks its tensors are in: sizes, strides, padding."""
    found: list[int] = []
    for arg in (workload or ())[1:]:
        if isinstance(arg, (list, tuple)) and arg and arg[0] == "TENSOR":
            found += _unblocked(arg[1])
        else:
            found += _numbers(arg)
    return tuple(found)


def _numbers(arg: Any) -> list[int]:
    if isinstance(arg, (list, tuple)):
        return [number for part in arg for number in _numbers(part)]
    return [] if arg is None or isinstance(arg, str) else [int(arg)]


def _distance(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """How far the sizes are apart, by ratios; infinite where they are not of one kind."""
    if len(ours) != len(theirs):
        return math.inf
    return sum(abs(math.log((1 + a) / (1 + b))) for a, b in zip(ours, theirs))  # noqa: B905 - Python 3.9 has no strict


def _unblocked(shape: Any) -> list[int]:
    sizes = [int(size) for size in shape]
    if len(sizes) == 5:  # N C/c H W c
        return [sizes[0], sizes[1] * sizes[4], *sizes[2:4]]
    if len(sizes) == 6:  # O/o I/i H W i o
        return [sizes[0] * sizes[5], sizes[1] * sizes[4], *sizes[2:4]]
    return sizes
