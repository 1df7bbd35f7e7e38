"""A tuning run as MLflow has it: its figures, its parameters, and what each subgraph ended with."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.run_log import KIND_TAG, PARENT_TAG, RUN_TAG, WORKLOAD_TAG
from infra.tracking import Tracking
from tasks.errors import InputError

_COLUMNS = (
    *("workload_key", "candidate_key", "record_id", "session_id", "run_id", "phase", "latency_us"),
    *("latencies_us", "cut_short", "started_at"),
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Timing:
    """A subgraph's latency: the median of ``repeats_us``, which are empty where they were not recorded.

    ``record_ids`` are the measurements that the repeats come from, ``candidate_key`` the schedule.
    """

    latency_us: float
    repeats_us: tuple[float, ...] = ()
    record_ids: frozenset[str] = frozenset()
    candidate_key: str = ""


@dataclass(frozen=True)
class TunedSubgraph:
    """A tuning task of a run; ``timing`` is None where nothing of it could be measured."""

    workload_key: str
    name: str
    operators: str
    weight: int
    timing: Timing | None


@dataclass(frozen=True)
class FinishedRun:
    """``samples_ms`` are the whole model's timings by contender (tuned, untuned, onnxruntime), maybe one each.

    ``again`` are second over first latency of every candidate that was measured in two sessions.
    """

    run_id: str
    mlflow_run_id: str
    name: str
    status: str
    started_at: float
    params: dict[str, str]
    metrics: dict[str, float]
    samples_ms: dict[str, tuple[float, ...]]
    subgraphs: dict[str, TunedSubgraph]
    again: tuple[float, ...] = ()
    tags: dict[str, str] = field(default_factory=dict)


def read_run(tracking: Tracking, run: str) -> FinishedRun:
    """The run with this id: ours (the tag tunewright.run_id) or MLflow's. Raises InputError, TrackingError."""
    found = _find(tracking, run)
    tables = _Tables(tracking, str(found.info.run_id))
    by_workload: defaultdict[str, list[Row]] = defaultdict(list)
    for row in tables.measurements():
        by_workload[row["workload_key"]].append(row)
    summary = tables.summary()
    chosen = {c["workload_key"]: c["record_id"] for c in summary.get("artifact", {}).get("choices", ())}
    subgraphs = {
        child.data.tags[WORKLOAD_TAG]: _subgraph(child, by_workload, chosen)
        for child in _children(tracking, found)
        if WORKLOAD_TAG in child.data.tags
    }
    return FinishedRun(
        run_id=found.data.tags.get(RUN_TAG, ""),
        mlflow_run_id=str(found.info.run_id),
        name=str(found.info.run_name),
        status=str(found.info.status),
        started_at=found.info.start_time / 1000,
        params=dict(found.data.params),
        metrics=dict(found.data.metrics),
        samples_ms=_samples(summary, found.data.metrics),
        subgraphs=subgraphs,
        again=tuple(ratio for rows in by_workload.values() for ratio in _measured_again(rows)),
        tags=dict(found.data.tags),
    )


def _find(tracking: Tracking, run: str) -> Any:
    def find(client: Any) -> Any:
        from mlflow.entities import ViewType
        from mlflow.exceptions import MlflowException

        try:
            return client.get_run(run)
        except MlflowException:
            pass  # then it is none of MLflow's ids
        experiments = [e.experiment_id for e in client.search_experiments(ViewType.ACTIVE_ONLY)]
        quoted = run.replace("'", "")
        wanted = f"tags.`{RUN_TAG}` = '{quoted}' and tags.`{KIND_TAG}` = 'run'"
        found = client.search_runs(experiments, wanted, max_results=1) if experiments else []
        return found[0] if found else None

    found = tracking.call(f"look up run {run!r}", find)
    if found is None:
        raise InputError(
            f"MLflow at {tracking.uri} has no run {run!r}, neither as its own id nor as the tag {RUN_TAG}; "
            f"'tunewright sync {run}' brings it back from the object store"
        )
    if found.data.tags.get(KIND_TAG) == "task":
        raise InputError(f"run {run} is one task's; give its parent {found.data.tags.get(PARENT_TAG)}")
    return found


def _children(tracking: Tracking, parent: Any) -> list[Any]:
    def find(client: Any) -> list[Any]:
        wanted = f"tags.`{PARENT_TAG}` = '{parent.info.run_id}'"
        page = client.search_runs([parent.info.experiment_id], wanted)
        found = list(page)
        while page.token:
            page = client.search_runs([parent.info.experiment_id], wanted, page_token=page.token)
            found += page
        return found

    return tracking.call("find child runs", find)


class _Tables:
    """The files of a run that hold figures; one that is not there is empty."""

    def __init__(self, tracking: Tracking, run_id: str) -> None:
        self._tracking = tracking
        self._run_id = run_id

    def measurements(self) -> Iterator[Row]:
        """The rows of the measurement table."""
        from pyarrow import parquet

        with tempfile.TemporaryDirectory() as scratch:
            path = self._download("measurements.parquet", scratch)
            if path is not None:
                yield from parquet.read_table(path, columns=list(_COLUMNS)).to_pylist()

    def summary(self) -> dict[str, Any]:
        """The run's summary as JSON types."""
        with tempfile.TemporaryDirectory() as scratch:
            path = self._download("summary.json", scratch)
            return dict(json.loads(path.read_text())) if path else {}

    def _download(self, name: str, folder: str) -> Path | None:
        def download(client: Any) -> Path | None:
            if all(file.path != name for file in client.list_artifacts(self._run_id)):
                return None
            return Path(client.download_artifacts(self._run_id, name, folder))

        return self._tracking.call(f"read {name}", download)


def _samples(summary: dict[str, Any], metrics: dict[str, float]) -> dict[str, tuple[float, ...]]:
    verdict = summary.get("verdict", {})
    samples = {}
    for name in ("tuned", "untuned", "onnxruntime"):
        if name in verdict:
            samples[name] = tuple(verdict[name]["samples_ms"])
        elif f"{name}_ms" in metrics:
            samples[name] = (metrics[f"{name}_ms"],)
    return samples


def _subgraph(child: Any, by_workload: dict[str, list[Row]], chosen: dict[str, str]) -> TunedSubgraph:
    key = child.data.tags[WORKLOAD_TAG]
    timing = _timing(by_workload.get(key, []), chosen.get(key, ""))
    if timing is None and "best_latency_us" in child.data.metrics:
        # A run that died has curves, but no tables.
        timing = Timing(child.data.metrics["best_latency_us"])
    params = child.data.params
    return TunedSubgraph(key, child.info.run_name, params.get("operators", ""), int(params.get("weight", 1)), timing)


def _timing(rows: Sequence[Row], record_id: str) -> Timing | None:
    """What the run ended with: the record that was built, or else the best; confirmed figures count first."""
    measured = [r for r in rows if r["latency_us"] is not None and not r["cut_short"]]
    if not measured:
        return None
    built = [r for r in measured if r["record_id"] == record_id]
    best = built[0] if built else min(measured, key=lambda r: (not _is_comparable(r, measured), r["latency_us"]))
    same = [r for r in measured if r["candidate_key"] == best["candidate_key"]]
    confirmed = [r for r in same if r["phase"] == "confirm"]
    if confirmed:
        last = max(confirmed, key=lambda r: r["started_at"])["session_id"]
        same = [r for r in confirmed if r["session_id"] == last]
    else:
        same = [best]
    repeats = tuple(us for row in same for us in row["latencies_us"])
    ids = frozenset(row["record_id"] for row in same)
    return Timing(statistics.median(repeats), repeats, ids, best["candidate_key"])


def _is_comparable(row: Row, measured: Sequence[Row]) -> bool:
    """Where the best few were measured again, only those figures and the default schedule's count."""
    again = any(other["phase"] == "confirm" for other in measured)
    return not again or row["phase"] in ("confirm", "default")


def _measured_again(rows: Sequence[Row]) -> Iterator[float]:
    by_candidate: defaultdict[str, dict[str, Row]] = defaultdict(dict)
    for row in sorted(rows, key=lambda r: r["started_at"]):
        if row["latency_us"] is not None and not row["cut_short"]:
            by_candidate[row["candidate_key"]].setdefault(row["session_id"], row)
    for sessions in by_candidate.values():
        first, *later = sessions.values()
        yield from (row["latency_us"] / first["latency_us"] for row in later)
