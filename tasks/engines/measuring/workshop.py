"""What an engine knows of its workloads, as sessions ask it, and where compiled kernels lie.

Free of any TVM version. Standard library only, Python 3.10.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tasks.records import TuningRecord, TuningTask

#: Candidates a round of search proposes; a session's trials are measured in such batches.
BATCH = 16
#: The candidate key of a workload's default schedule.
DEFAULT_KEY = "default"
#: And of the workload as it stands, which is built where its default schedule cannot be.
PLAIN_KEY = "plain"


class Candidate(Protocol):
    """A schedule to measure. ``trace`` is its text in a record, ``key`` its name within the workload."""

    @property
    def key(self) -> str: ...
    @property
    def trace(self) -> str: ...
    @property
    def predicted_us(self) -> float | None: ...


def is_in_slice(candidate_key: str, part: tuple[int, int]) -> bool:
    """Is the candidate in that slice of its space? ``part`` as in ``Search``."""
    index, slices = part
    return int(candidate_key[:8], 16) % slices == index


class Search(Protocol):
    """The search of one workload, warm from session to session.

    ``skipped`` names stored records that do not replay, ``best_us`` is infinite while nothing is measured.
    ``part``: index and number of the slices of the space; only candidates of that slice are proposed.
    """

    part: tuple[int, int]
    exhausted: bool
    skipped: list[str]
    best_us: float

    def learn(self, records: Iterable[TuningRecord]) -> None:
        """Take in records that exist already."""

    def propose(self, count: int, seed: int) -> Sequence[Any]:
        """Up to ``count`` candidates that were never measured; none when the space is exhausted."""

    def report(self, candidates: Sequence[Any], latencies_us: Sequence[float | None]) -> None:
        """What the measurements gave; None for a failed one."""

    def take_back(self, candidates: Sequence[Any]) -> None:
        """Candidates that were proposed, but not measured: the session ended before. They may be proposed again."""


class Workshop(Protocol):
    """An engine's knowledge of workloads. A *part* is what its builder needs to compile one candidate."""

    def search_of(self, task: TuningTask, cold: bool) -> Search:
        """The search of ``task``, the same one at each call; another where candidates are timed with a cold cache."""

    def arguments(self, task: TuningTask) -> Sequence[tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of the kernel's arguments, outputs last."""

    def default_part(self, task: TuningTask) -> Mapping[str, Any]:
        """The default schedule. Raises EngineError where the target has none."""

    def candidate_part(self, task: TuningTask, candidate: Any) -> Mapping[str, Any]:
        """A candidate that the search proposed."""

    def stored_part(self, task: TuningTask, record: TuningRecord) -> Mapping[str, Any]:
        """A stored record; raises whatever TVM raises where it no longer applies."""


def sample_group(task: TuningTask, cold: bool) -> str:
    """The name under which a cost model keeps what was measured of ``task``: latencies in a group compare."""
    return f"{task.workload_key}-cold" if cold else task.workload_key


def kernel_symbol(workload_key: str) -> str:
    """What a compiled workload is called: measured and shipped objects have the same name in them."""
    return f"k_{workload_key}"


def build_job(part: Mapping[str, Any], scratch: Path, workload_key: str, candidate_key: str) -> dict[str, Any]:
    """What a builder needs to compile ``part`` to an object in the scratch folder."""
    return {**part, "symbol": kernel_symbol(workload_key), "stem": str(scratch / f"{workload_key}-{candidate_key}")}


def built_object(scratch: Path, workload_key: str, candidate_key: str) -> str:
    """The path of a kernel that this process has compiled and kept, or an empty text."""
    for suffix in (".o", ".so"):
        path = scratch / f"{workload_key}-{candidate_key}{suffix}"
        if path.exists():
            return str(path)
    return ""


def is_plain(path: str) -> bool:
    """Is this the object of a workload that was built without any schedule?"""
    return Path(path).stem.endswith(f"-{PLAIN_KEY}")
