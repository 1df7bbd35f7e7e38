"""What one tuning run measured, as tables and sums: the input of reports, pictures and artifacts."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.engines import wire
from tasks.records import FusedModule, SubgraphChoice, TensorSpec, TuningRecord, TuningTask

#: The table in MLflow's UI leaves out what is long; the Parquet file has every column.
_LONG = ("schedule", "settings", "latencies_us", "record_id", "workload_key")

#: The curve of the best latency has a point at least every so many trials.
POINT_EVERY = 16


@dataclass
class TaskLog:
    """One tuning task, its child run in MLflow and the records logged so far, by record id."""

    task: TuningTask
    run_id: str
    records: dict[str, TuningRecord] = field(default_factory=dict)
    #: The last trial in order and the best latency up to it, so that a session costs what it adds.
    _last: tuple[int, float] = (-1, 0.0)
    _best_us: float = float("inf")
    #: The last measured trial and the best latency at it, where no point of the curve stands there yet.
    pending: tuple[TuningRecord, float] | None = None

    def take(self, new: Iterable[TuningRecord], pending: tuple[TuningRecord, float] | None) -> None:
        """Take in records that were logged, and what ``best_points`` said of them to wait."""
        self.pending = pending
        for record in new:
            self.records[record.record_id] = record
            self._last = max(self._last, _order(record))
            if record.latency_us is not None and record.phase != "confirm":
                self._best_us = min(self._best_us, record.latency_us)

    def curve_of(self, new: Iterable[TuningRecord]) -> list[tuple[TuningRecord, float]]:
        """The measured trials of ``new``, each with the best latency of all trials up to it."""
        fresh = sorted(new, key=_order)
        if not fresh or _order(fresh[0]) > self._last:
            return best_curve(fresh, self._best_us)
        added = {record.record_id for record in fresh}
        merged = sorted((*self.records.values(), *fresh), key=_order)
        return [(record, best) for record, best in best_curve(merged) if record.record_id in added]

    def best_points(
        self, new: Iterable[TuningRecord]
    ) -> tuple[list[tuple[TuningRecord, float]], tuple[TuningRecord, float] | None]:
        """The points that ``new`` adds to the curve of the best latency, and the trial after them that waits.

        A point stands where the latency falls, one trial before that, and at every ``POINT_EVERY``-th trial.
        Which ones does not depend on how many records come at a time, where they come in order.
        """
        points: list[tuple[TuningRecord, float]] = []
        best_us, pending = self._best_us, self.pending
        for record, at_us in self.curve_of(new):
            falls = at_us < best_us
            if falls and pending is not None:
                points.append(pending)
            if falls or record.trial % POINT_EVERY == 0:
                points.append((record, at_us))
                pending = None
            else:
                pending = record, at_us
            best_us = min(best_us, at_us)
        return points, pending

    @property
    def in_order(self) -> list[TuningRecord]:
        """The records by trial index."""
        return sorted(self.records.values(), key=_order)

    @property
    def untuned_us(self) -> float | None:
        """The best latency of the default schedule."""
        return _least(r for r in self.records.values() if r.phase == "default")

    @property
    def best_us(self) -> float | None:
        """The best latency, final checks left out: they measure what was measured before."""
        return _least(r for r in self.records.values() if r.phase != "confirm")

    @property
    def failures(self) -> Counter[str]:
        """How many trials failed, by kind."""
        return Counter(r.failure.kind for r in self.records.values() if r.failure)


@dataclass(frozen=True)
class SubgraphTime:
    """What one run of the model spends in a subgraph (all its calls), before and after, in microseconds."""

    name: str
    weight: int
    untuned_us: float
    tuned_us: float


def subgraph_times(logs: Iterable[TaskLog], choices: Iterable[SubgraphChoice] = ()) -> list[SubgraphTime]:
    """Time by subgraph, heaviest before tuning first; those without any measurement are left out.

    A choice's own latency is what was built, so it wins over the best that the search saw.
    """
    chosen = {c.workload_key: c.latency_us for c in choices}
    times = []
    for log in logs:
        tuned = chosen.get(log.task.workload_key) or log.best_us
        untuned = log.untuned_us or tuned
        if untuned and tuned:
            weight = log.task.weight
            times.append(SubgraphTime(log.task.name, weight, untuned * weight, tuned * weight))
    return sorted(times, key=lambda t: -t.untuned_us)


def best_curve(records: Sequence[TuningRecord], best: float = float("inf")) -> list[tuple[TuningRecord, float]]:
    """The best latency so far at each successful default or search trial; ``records`` in order, after ``best``."""
    curve = []
    for record in records:
        if record.latency_us is not None and record.phase != "confirm":
            best = min(best, record.latency_us)
            curve.append((record, best))
    return curve


def rows(records: Iterable[TuningRecord]) -> list[dict[str, Any]]:
    """One flat row a record; what a failed or a successful trial lacks is None."""
    return [_row(record) for record in records]


def write_parquet(path: Path, tables: Iterable[list[dict[str, Any]]]) -> None:
    """``tables`` as one Parquet file, a row group each: never all in memory. Raises OSError."""
    import pyarrow as pa
    from pyarrow import parquet

    with parquet.ParquetWriter(path, _schema(), compression="zstd") as writer:
        for table in tables:
            writer.write_table(pa.Table.from_pylist(table, schema=_schema()))


def write_ui_table(path: Path, table: list[dict[str, Any]]) -> None:
    """``table`` as MLflow's UI reads it: JSON of columns and rows, long columns left out."""
    columns = [name for name in (table[0] if table else {}) if name not in _LONG]
    data = [[row[name] for name in columns] for row in table]
    path.write_text(json.dumps({"columns": columns, "data": data}))


def subgraph_rows(fused: FusedModule, share: Mapping[str, float]) -> list[dict[str, Any]]:
    """One row a fused subgraph; ``share`` is its expected part of the run time, by name."""
    return [
        {
            "name": s.name,
            "operators": " + ".join(s.operators),
            "anchor": s.anchor_operator,
            "inputs": shapes(s.inputs),
            "outputs": shapes(s.outputs),
            "anchor_dtype": s.anchor_output_dtype,
            "output_dtype": s.output_dtype,
            "mflops": round(s.flops / 1e6, 3),
            "bytes_moved": s.bytes_moved,
            "weight": s.weight,
            "share": round(share.get(s.name, 0.0), 4),
        }
        for s in fused.subgraphs
    ]


def shapes(tensors: Iterable[TensorSpec]) -> str:
    """Shapes as people write them: ``1x3x48x192 float32, 64 float32``."""
    return ", ".join(f"{'x'.join(map(str, t.shape)) or 'scalar'} {t.dtype}" for t in tensors)


def _row(record: TuningRecord) -> dict[str, Any]:
    measured, failed = record.measurement, record.failure
    return {
        "task": record.task_name,
        "trial": record.trial,
        "phase": record.phase,
        "latency_us": record.latency_us,
        "predicted_us": _finite(record.predicted_us),
        "failure": failed.kind if failed else None,
        "message": failed.message[:300] if failed else None,
        "build_s": measured.build_s if measured else None,
        "run_s": measured.run_s if measured else None,
        "cut_short": measured.cut_short if measured else None,
        "started_at": record.started_at,
        "implementation": record.implementation,
        "candidate_key": record.candidate_key,
        "session_id": record.session_id,
        "run_id": record.run_id,
        "device": record.device,
        "host": record.host,
        "workload_key": record.workload_key,
        "record_id": record.record_id,
        "latencies_us": list(measured.comparable_us) if measured else None,
        "slowdown": statistics.median(measured.slowdowns) if measured and measured.slowdowns else None,
        "settings": json.dumps(wire.to_plain(measured.settings)) if measured else None,
        "schedule": record.schedule,
    }


def _schema() -> Any:
    """Named, not inferred: a column that is None throughout must keep its type."""
    import pyarrow as pa

    kinds = {
        "trial": pa.int64(),
        "cut_short": pa.bool_(),
        "latencies_us": pa.list_(pa.float64()),
        **dict.fromkeys(("latency_us", "predicted_us", "build_s", "run_s", "started_at", "slowdown"), pa.float64()),
    }
    names = (
        *("task", "trial", "phase", "latency_us", "predicted_us", "failure", "message", "build_s", "run_s"),
        *("cut_short", "started_at", "implementation", "candidate_key", "session_id", "run_id", "device"),
        *("host", "workload_key", "record_id", "latencies_us", "slowdown", "settings", "schedule"),
    )
    return pa.schema([(name, kinds.get(name, pa.string())) for name in names])


def _finite(value: float | None) -> float | None:
    """JSON, and with it the UI's table, has no other numbers."""
    return value if value is not None and math.isfinite(value) else None


def _least(records: Iterable[TuningRecord]) -> float | None:
    return min((r.latency_us for r in records if r.latency_us is not None), default=None)


def _order(record: TuningRecord) -> tuple[int, float]:
    return record.trial, record.started_at
