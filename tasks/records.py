"""The frozen records that the steps hand to one another, in pipeline order.

    ModelFile -> ImportedModule -> FusedModule -> TuningTask... -> TuningRecord... -> Artifact
              -> Verdict -> PublishedVersion

Standard library only, Python 3.10: engines read and write these in their own interpreters.
Latencies are in microseconds (``_us``) or milliseconds (``_ms``), durations in seconds (``_s``),
sizes in bytes (``_bytes``). Weights of a model never travel in a record: records name files.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1

#: The kinds a failed trial can have, in the order of the steps at which they happen.
FAILURE_KINDS = (
    "instantiation",
    "build",
    "build_timeout",
    "run",
    "run_timeout",
    "wrong_output",
    "device_lost",
)

#: Why a trial was run: the untuned schedule, the search, or the final check of the best few.
PHASES = ("default", "search", "confirm")

GRANULARITIES = ("subgraph", "operator")


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: ``shape`` has only positive sizes, ``dtype`` is numpy's name."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ModelFile:
    """A model on this machine, every dimension bound, normalised, ready for an engine.

    ``digest`` is the sha256 of the original model with its external data and the bound shapes;
    ``path`` is the normalised ONNX file, ``original_path`` the one onnxruntime is compared on.
    """

    source: str
    name: str
    digest: str
    path: str
    original_path: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    opset: int
    source_version: str = ""


@dataclass(frozen=True)
class Target:
    """What is compiled for. ``spec`` is the engine's own JSON; ``key`` names it in the store."""

    kind: str
    spec: str
    key: str
    threads: int


@dataclass(frozen=True)
class EngineInfo:
    """An engine's answer to ``describe``: what it is and what it can measure here.

    ``cache_bytes`` is the size of a CPU's last-level cache, 0 where that is not known. ``layouts`` names the
    layouts of activations that it can fuse a model for, the preferred one first; empty where there is no choice.
    """

    engine: str
    tvm_version: str
    python_version: str
    target: Target
    device: str
    versions: dict[str, str]
    cache_bytes: int = 0
    layouts: tuple[str, ...] = ()


@dataclass(frozen=True)
class ImportedModule:
    """The model translated to an IRModule, before optimisation; the engine keeps the module itself.

    ``layout`` is the one of the engine's layouts that it is to be fused for; empty for the preferred one.
    """

    model: ModelFile
    engine: EngineInfo
    operators: dict[str, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    layout: str = ""


@dataclass(frozen=True)
class FusedSubgraph:
    """Operators lowered as one kernel.

    ``anchor_key`` is the workload key of the anchor operator alone, which is what operator granularity
    tunes. ``flops`` and ``bytes_moved`` are for one call: floating-point (or integer) operations, and the
    sizes of all inputs and outputs together. ``weight`` is how often one run of the model calls it.
    ``implementations`` names other ways to compute it than the operators' own, which a search measures too.
    """

    name: str
    workload_key: str
    anchor_key: str
    operators: tuple[str, ...]
    anchor_operator: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    anchor_output_dtype: str
    output_dtype: str
    flops: float
    bytes_moved: int
    weight: int
    implementations: tuple[str, ...] = ()


@dataclass(frozen=True)
class SubgraphCall:
    """One kernel call of the model: its subgraph's name and the indices of the calls that feed it."""

    subgraph: str
    feeds_from: tuple[int, ...]


@dataclass(frozen=True)
class FusedModule:
    """The model after operator fusion: its distinct subgraphs and the order of their calls."""

    imported: ImportedModule
    granularity: str
    subgraphs: tuple[FusedSubgraph, ...]
    calls: tuple[SubgraphCall, ...]

    def tuned_key(self, subgraph: FusedSubgraph) -> str:
        """The workload that is tuned for ``subgraph``: itself, or its anchor operator alone."""
        return subgraph.anchor_key if self.granularity == "operator" else subgraph.workload_key


@dataclass(frozen=True)
class TuningTask:
    """A workload, a target and its weight. ``workload_path`` holds the subgraph's IR, no weights."""

    workload_key: str
    name: str
    target_key: str
    weight: int
    flops: float
    bytes_moved: int
    expected_share: float
    workload_path: str
    subgraph: FusedSubgraph


@dataclass(frozen=True)
class MeasureSettings:
    """How a candidate is built and timed; stored with every measurement.

    With ``flush_cache`` a kernel finds its first input in the cache at most, the rest in memory, once a repeat.
    """

    number: int = 1
    repeat: int = 5
    min_repeat_ms: int = 20
    cooldown_ms: int = 0
    flush_cache: bool = False
    build_timeout_s: float = 30.0
    build_memory_bytes: int = 4 << 30
    run_timeout_s: float = 20.0
    run_memory_bytes: int = 8 << 30
    check_output: bool = True
    #: A candidate whose first call takes this many times the best latency is not timed further.
    hopeless_ratio: float = 4.0


@dataclass(frozen=True)
class Measurement:
    """A trial's run times as they were taken: every repeat, each the mean over the calls in it.

    ``slowdowns`` says for each repeat how much longer the task's default schedule took beside it than when that was
    measured itself; empty where it was not timed beside.
    """

    latencies_us: tuple[float, ...]
    settings: MeasureSettings
    build_s: float
    run_s: float
    cut_short: bool = False
    slowdowns: tuple[float, ...] = ()

    @property
    def comparable_us(self) -> tuple[float, ...]:
        """The repeats as they would have been while the default schedule was measured."""
        if not self.slowdowns:
            return self.latencies_us
        return tuple(us / slowdown for us, slowdown in zip(self.latencies_us, self.slowdowns))  # noqa: B905

    @property
    def latency_us(self) -> float:
        """The median of the comparable repeats."""
        return statistics.median(self.comparable_us)


@dataclass(frozen=True)
class Failure:
    """Why a trial has no run times: one of ``FAILURE_KINDS`` and a short text."""

    kind: str
    message: str


@dataclass(frozen=True)
class TuningRecord:
    """One trial as stored. Exactly one of ``measurement`` and ``failure`` is set.

    ``schedule`` is a MetaSchedule trace or an AutoTVM config entity as JSON text, empty for the
    default schedule. ``candidate_key`` names the schedule within its workload; ``record_id`` names
    the trial, so that a record read twice is still one. ``implementation`` says what ``schedule`` is a schedule
    of, where that is not the operators' own: another algorithm, a version of the default schedules, a template.
    """

    record_id: str
    run_id: str
    session_id: str
    engine: str
    tvm_version: str
    target_key: str
    workload_key: str
    task_name: str
    candidate_key: str
    trial: int
    phase: str
    schedule: str
    started_at: float
    device: str
    host: str
    measurement: Measurement | None = None
    failure: Failure | None = None
    predicted_us: float | None = None
    implementation: str = ""
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if (self.measurement is None) == (self.failure is None):
            raise ValueError(f"record {self.record_id} must hold a measurement or a failure, not both")

    @property
    def latency_us(self) -> float | None:
        """The median repeat, or None where the trial failed or its timing is no time."""
        latency_us = math.nan if self.measurement is None else self.measurement.latency_us
        return latency_us if math.isfinite(latency_us) and latency_us > 0 else None


@dataclass(frozen=True)
class FirstSessions:
    """What the first search sessions of tasks brought in earlier runs.

    ``gains``: by operator the shares of the latency that they took away. ``lengths``: of those that gained, after
    how many trials they had most of it.
    """

    gains: dict[str, tuple[float, ...]] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Session:
    """One stretch of tuning and the reason it was chosen.

    Phase ``search`` has one task and runs up to ``trials`` trials of it. Phase ``default`` measures the
    default schedule of each of ``tasks``, phase ``confirm`` the best ``trials`` records of its task
    again, interleaved. ``known_path`` names a file with the records that exist already, a line each;
    ``samples_dir`` a folder with what the cost model learned before, to which the session adds a file.
    ``stop_at`` is a Unix time after which no trial is begun. Of ``slice_count`` slices of the search space,
    divided by candidate key, a session measures only ``slice_index``: several agents may work on one task.
    """

    session_id: str
    run_id: str
    phase: str
    tasks: tuple[TuningTask, ...]
    trials: int
    seed: int
    reason: str
    settings: MeasureSettings
    journal_path: str
    known_path: str = ""
    samples_dir: str = ""
    first_trial: int = 0
    stop_at: float | None = None
    slice_index: int = 0
    slice_count: int = 1

    @property
    def task(self) -> TuningTask:
        """The task of a session that has one."""
        return self.tasks[0]


@dataclass(frozen=True)
class SessionResult:
    """What a session did with its time, beside its records."""

    session_id: str
    phase: str
    records: int
    failures: dict[str, int]
    seconds: dict[str, float]
    exhausted: bool = False
    note: str = ""


#: The note of a subgraph whose default schedule cannot be built.
NO_SCHEDULE = "its default schedule cannot be built; it runs without any"


@dataclass(frozen=True)
class SubgraphChoice:
    """Which schedule a subgraph was built with. ``record_id`` is empty for the default schedule.

    ``implementation`` names another way to compute it than the operators' own, where that is what was built.
    """

    name: str
    workload_key: str
    record_id: str
    candidate_key: str
    latency_us: float | None
    note: str = ""
    implementation: str = ""


@dataclass(frozen=True)
class Artifact:
    """A compiled library and its manifest, in the folder ``path``."""

    path: str
    digest: str
    size_bytes: int
    tuned: bool
    choices: tuple[SubgraphChoice, ...]

    @property
    def uncovered(self) -> tuple[str, ...]:
        """The subgraphs that no record covers."""
        return tuple(c.name for c in self.choices if not c.record_id)


@dataclass(frozen=True)
class Latency:
    """Latencies of whole-model runs, in milliseconds."""

    samples_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """The median run."""
        return statistics.median(self.samples_ms)

    @property
    def spread_ms(self) -> tuple[float, float]:
        """The first and the third quartile."""
        if len(self.samples_ms) < 2:
            return self.samples_ms[0], self.samples_ms[0]
        quartiles = statistics.quantiles(self.samples_ms, n=4)
        return quartiles[0], quartiles[2]


@dataclass(frozen=True)
class Verdict:
    """Is the artifact right, and how fast is it: interleaved medians on the same threads."""

    correct: bool
    max_abs_error: float
    tolerance: str
    seeds: tuple[int, ...]
    untuned: Latency
    tuned: Latency
    onnxruntime: Latency
    threads: int
    failed_outputs: tuple[str, ...] = ()
    #: The champion in the same benchmark, where it could be run here.
    champion: Latency | None = None
    champion_version: str = ""
    #: Wrong schedules that were found by bisection and replaced: subgraph, record and reason of each.
    repairs: tuple[str, ...] = ()

    @property
    def speedup(self) -> float:
        """Untuned over tuned: how many times as fast the tuned model is."""
        return self.untuned.median_ms / self.tuned.median_ms


@dataclass(frozen=True)
class KernelTime:
    """A kernel inside a run of the whole model: all its ``calls`` together, in microseconds.

    ``alone_us`` is what the same calls took when the schedule was measured by itself; None where nobody did.
    """

    name: str
    workload_key: str
    calls: int
    in_run_us: float
    alone_us: float | None


@dataclass(frozen=True)
class Profile:
    """Where the time of a whole run goes, in microseconds: the kernels, and what is outside of them."""

    kernels: tuple[KernelTime, ...]
    outside_us: float
    whole_us: float


@dataclass(frozen=True)
class Roof:
    """What the machine can do at most, as measured on the threads that the model runs on.

    ``flops_per_s`` in float32, ``bytes_per_s`` from memory, ``cache_bytes_per_s`` from the nearest caches.
    """

    flops_per_s: float
    bytes_per_s: float
    cache_bytes_per_s: float
    device: str
    threads: int


@dataclass(frozen=True)
class PublishedVersion:
    """The model-registry entry that points at the artifact."""

    name: str
    version: str
    alias: str
    mlflow_run_id: str
    artifact_uri: str
    reason: str


@dataclass(frozen=True)
class TuningSummary:
    """What one tuning run did: the last record of the flow, and what the terminal shows."""

    model: ModelFile
    engine: EngineInfo
    granularity: str
    tasks: int
    trials: int
    reused_records: int
    failures: dict[str, int]
    verdict: Verdict
    published: PublishedVersion
    artifact: Artifact
    seconds: dict[str, float]
    notes: tuple[str, ...] = field(default=())
    #: Why each task is no faster than it is, by its name.
    reasons: dict[str, str] = field(default_factory=dict)
    profile: Profile | None = None
    roof: Roof | None = None


def short_hash(*parts: Any, length: int = 16) -> str:
    """A stable name for ``parts``: hexadecimal sha256 of their text, cut to ``length``."""
    text = "\x1f".join(str(part) for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:length]
