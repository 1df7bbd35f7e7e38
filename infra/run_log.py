"""What people see in MLflow: one parent run a tuning run, one child run a tuning task.

Everything can be logged again: the same record leaves one row, a run that was interrupted is found by
its tag and continued. Nothing here is needed to tune or to build, it is all filled from the records.
"""

from __future__ import annotations

import getpass
import math
import shutil
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from infra import pictures
from infra.previous_run import find_previous, what_changed
from infra.run_figures import profile_rows
from infra.run_pictures import draw_run
from infra.run_report import description, report, task_note
from infra.run_tables import (
    TaskLog,
    rows,
    shapes,
    subgraph_rows,
    subgraph_times,
    write_parquet,
    write_ui_table,
)
from infra.tracking import Tracking
from tasks.engines import wire
from tasks.records import FusedModule, TuningRecord, TuningSummary, TuningTask

RUN_TAG = "tunewright.run_id"
KIND_TAG = "tunewright.kind"
WORKLOAD_TAG = "tunewright.workload_key"
PARENT_TAG = "mlflow.parentRunId"
NOTE_TAG = "mlflow.note.content"
FAILURE_TAG = "tunewright.failure"
#: The metrics of a child run that have a row a trial; the best latency where it changes, see TaskLog.
CURVES = ("latency_us", "best_latency_us", "predicted_us", "confirm_latency_us")
#: Child runs whose files are sent at a time: most of it is waiting for MLflow.
_SENDERS = 4


class RunLog:
    """A tuning run in MLflow. Every method raises TrackingError where MLflow is away or refuses."""

    def __init__(self, tracking: Tracking, experiment_id: str, run_id: str) -> None:
        self.run_id = run_id
        #: The tuning run's own id, which its records have.
        self.tuning_run_id = ""
        self._tables: list[str] = []
        self._tracking = tracking
        self._experiment_id = experiment_id
        self._logs: dict[str, TaskLog] = {}
        self._children = self._find_children()
        #: Rows that a continued run had before: run, key, time and step. One row a trial, whatever its value.
        self._known: set[tuple[str, str, int, int]] = set()
        self.rows_sent = 0
        #: When the run began (milliseconds; None: now) and by whom: for runs that are filled in later.
        self.started_ms: int | None = None
        self.origin: Mapping[str, str] = origin()

    @classmethod
    def start(
        cls,
        tracking_uri: str,
        experiment: str,
        run_name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str],
    ) -> RunLog:
        """Create the parent run, or continue the one whose tag ``tunewright.run_id`` is the same.

        ``tags`` must hold that tag. Parameters that a continued run has already stay as they are.
        Raises TrackingError within about 15 seconds where MLflow cannot be reached.
        """
        tracking = Tracking(tracking_uri)
        tracking.check()
        experiment_id = tracking.experiment_id(experiment)
        wanted = f"tags.`{RUN_TAG}` = '{tags[RUN_TAG]}' and tags.`{KIND_TAG}` = 'run'"
        made = {**origin(), KIND_TAG: "run", **tags}

        def find_or_create(client: Any) -> str:
            found = client.search_runs([experiment_id], wanted, order_by=["start_time ASC"], max_results=1)
            if not found:
                return str(client.create_run(experiment_id, tags=made, run_name=run_name).info.run_id)
            run_id = str(found[0].info.run_id)
            if found[0].info.status != "RUNNING":
                client.update_run(run_id, status="RUNNING")
            return run_id

        run_id = tracking.call(f"create run {run_name!r}", find_or_create)
        tracking.log_params(run_id, params)
        log = cls(tracking, experiment_id, run_id)
        log.tuning_run_id = tags[RUN_TAG]
        return log

    def task_run(self, task: TuningTask) -> str:
        """The id of the task's child run, which is created at the first call."""
        key = task.workload_key
        if key not in self._logs:
            run_id = self._children.get(key)
            if run_id is None:
                run_id = self._children[key] = self._create_child(task)
            else:
                self._learn_rows(run_id)
            self._tracking.log_params(run_id, _task_params(task))
            self._logs[key] = TaskLog(task, run_id)
        return self._logs[key].run_id

    def log_records(self, task: TuningTask, records: Sequence[TuningRecord]) -> None:
        """Log the curves of ``records``, which are all of the task's so far or the new ones only.

        The best latency so far is taken over all that this object was given: after a restart give
        the stored ones as well. Step is the trial index, the time is that of the trial.
        """
        self.task_run(task)
        log = self._logs[task.workload_key]
        new = [r for r in records if r.record_id not in log.records]
        # Taken in once MLflow has them: where it is away, the next call sends them again.
        points, pending = log.best_points(new)
        self._send(log.run_id, _curves(points, new))
        log.take(new, pending)
        # A candidate that turned out to be wrong says so from now on; what was measured of it stays in the curve.
        log.records.update((r.record_id, r) for r in records)

    def log_progress(self, trials_done: int, estimate_us: float, elapsed_s: float) -> None:
        """Log the model's estimated latency: its subgraphs' best latencies times their weights."""
        self._send(self.run_id, self.progress_rows(trials_done, estimate_us, elapsed_s))

    def send(self, rows: list[tuple[str, float, int, int]]) -> None:
        """Log rows of key, value, time (milliseconds) and step in the parent run."""
        self._send(self.run_id, rows)

    @staticmethod
    def progress_rows(trials: int, estimate_us: float, elapsed_s: float) -> list[tuple[str, float, int, int]]:
        """A point of the model's curve, as of now."""
        now = time.time_ns() // 1_000_000
        return [("model_latency_us", estimate_us, now, trials), ("elapsed_s", elapsed_s, now, trials)]

    def log_fused(self, fused: FusedModule, share: Mapping[str, float]) -> None:
        """Log the fused subgraphs as a table and a picture; ``share`` of the run time is by name."""

        def write(folder: Path) -> None:
            write_ui_table(folder / "subgraphs.json", subgraph_rows(fused, share))
            (folder / "pictures").mkdir()
            pictures.fused_graph(folder / "pictures" / "fused_graph.png", fused, share)

        self._tracking.log_files(self.run_id, write, tables=self._with_table("subgraphs.json"))

    def log_tables(self, records_by_task: Mapping[str, Sequence[TuningRecord]]) -> None:
        """Log every measurement: by workload key in the child runs, all together in the parent run."""
        in_order = {
            key: sorted(records, key=lambda r: (r.trial, r.started_at)) for key, records in records_by_task.items()
        }
        for key in in_order.keys() & self._logs.keys():
            table = rows(in_order[key])
            self._tracking.log_files(
                self._logs[key].run_id, partial(_write_tables, table=table), tables=["measurements.json"]
            )
        self._tracking.log_files(
            self.run_id,
            lambda folder: write_parquet(folder / "measurements.parquet", map(rows, in_order.values())),
        )

    def log_sessions(self, sessions: Sequence[Mapping[str, object]]) -> None:
        """Log the decisions of the run: each session, why it was chosen, what it did with its time."""
        table = [dict(session) for session in sessions]
        if table:
            self._tracking.log_files(
                self.run_id,
                lambda folder: write_ui_table(folder / "sessions.json", table),
                tables=self._with_table("sessions.json"),
            )

    def log_sources(self, folder: Path) -> None:
        """Log what was built of each task, a folder each by workload key, in the child runs."""

        def send(log: TaskLog) -> None:
            built = folder / log.task.workload_key
            self._tracking.log_files(log.run_id, partial(_copy_into, built), "built")

        built = [log for key, log in self._logs.items() if (folder / key).is_dir()]
        with ThreadPoolExecutor(_SENDERS) as pool:
            list(pool.map(send, built))

    def finish(self, summary: TuningSummary, at: float | None = None) -> None:
        """Log the final figures, the report and the pictures, and end all runs as finished.

        ``at`` is the Unix time of the end: finishing again with the same one leaves one row a figure.
        """
        ended = int((at or time.time()) * 1000)
        times = subgraph_times(self._logs.values(), summary.artifact.choices)
        self._tracking.log_params(self.run_id, _final_params(summary))
        self._send(self.run_id, _final_metrics(summary, ended))
        for log in self._logs.values():
            end_of_curve = [_best_row(*log.pending)] if log.pending else []
            self._send(log.run_id, [*end_of_curve, *_task_metrics(log)])
            note = task_note(log, summary.reasons.get(log.task.name, ""))
            self._tracking.set_tags(log.run_id, {NOTE_TAG: note})
        changed = what_changed(find_previous(self._tracking, self._experiment_id, self.run_id, summary), summary)
        text = report(summary, times, changed)
        tables = self._with_table("profile.json") if summary.profile else ()
        self._tracking.log_files(self.run_id, lambda folder: self._write_end(folder, summary, text), tables=tables)
        published = summary.published
        self._tracking.set_tags(
            self.run_id,
            {
                NOTE_TAG: description(text),
                "tunewright.artifact_uri": published.artifact_uri,
                "tunewright.artifact_digest": summary.artifact.digest,
                "tunewright.published": f"{published.name} {published.version} {published.alias}".strip(),
            },
        )
        self._end("FINISHED", ended)

    def fail(self, reason: str, at: float | None = None) -> None:
        """End all runs as failed (``at`` that Unix time), the reason in a tag and in the description."""
        self._tracking.set_tags(self.run_id, {FAILURE_TAG: reason, NOTE_TAG: f"## Failed\n{reason}"})
        self._end("FAILED", int((at or time.time()) * 1000))

    def _write_end(self, folder: Path, summary: TuningSummary, text: str) -> None:
        """The report, the profile as a table, all pictures."""
        (folder / "report.md").write_text(text + "\n")
        (folder / "summary.json").write_text(wire.to_line(summary))
        if summary.profile is not None:
            write_ui_table(folder / "profile.json", profile_rows(summary.profile))
        (folder / "pictures").mkdir()
        draw_run(folder / "pictures", list(self._logs.values()), summary, self.tuning_run_id)

    def _with_table(self, name: str) -> list[str]:
        """The tables of the parent run, ``name`` among them from now on."""
        self._tables += [] if name in self._tables else [name]
        return self._tables

    def _find_children(self) -> dict[str, str]:
        def find(client: Any) -> dict[str, str]:
            wanted = f"tags.`{PARENT_TAG}` = '{self.run_id}'"
            found = page = client.search_runs([self._experiment_id], wanted)
            while page.token:
                page = client.search_runs([self._experiment_id], wanted, page_token=page.token)
                found = [*found, *page]
            return {run.data.tags.get(WORKLOAD_TAG, ""): str(run.info.run_id) for run in found}

        return self._tracking.call("find child runs", find)

    def _create_child(self, task: TuningTask) -> str:
        tags = {**self.origin, PARENT_TAG: self.run_id, WORKLOAD_TAG: task.workload_key, KIND_TAG: "task"}

        def find_or_create(client: Any) -> str:
            # Looked for once more: an earlier try may have succeeded without our seeing its answer.
            wanted = f"tags.`{PARENT_TAG}` = '{self.run_id}' and tags.`{WORKLOAD_TAG}` = '{task.workload_key}'"
            found = client.search_runs([self._experiment_id], wanted, max_results=1)
            if found:
                return str(found[0].info.run_id)
            made = client.create_run(self._experiment_id, self.started_ms, tags, task.name)
            return str(made.info.run_id)

        return self._tracking.call(f"create child run {task.name!r}", find_or_create)

    def _learn_rows(self, run_id: str) -> None:
        """Which rows a child has already, so that what was logged before is not sent again."""

        def read(client: Any) -> list[Any]:
            return [row for key in CURVES for row in client.get_metric_history(run_id, key)]

        rows_there = self._tracking.call("read the curves of a run", read)
        self._known.update((run_id, row.key, row.timestamp, row.step) for row in rows_there)

    def _send(self, run_id: str, metrics: list[tuple[str, float, int, int]]) -> None:
        new = [row for row in metrics if (run_id, row[0], row[2], row[3]) not in self._known]
        self._tracking.log_metrics(run_id, new)
        self.rows_sent += len(new)

    def _end(self, status: str, at_ms: int) -> None:
        for run_id in (*self._children.values(), self.run_id):
            self._tracking.call("end a run", methodcaller("set_terminated", run_id, status=status, end_time=at_ms))


def origin() -> dict[str, str]:
    """The tags that say who runs this, and where."""
    tags = {"mlflow.source.name": "tunewright", "tunewright.host": socket.gethostname()}
    # Containers often run as a user without a name.
    with suppress(KeyError, OSError):
        tags["mlflow.user"] = getpass.getuser()
    return tags


def _copy_into(built: Path, folder: Path) -> None:
    shutil.copytree(built, folder, dirs_exist_ok=True)


def _write_tables(folder: Path, table: list[dict[str, Any]]) -> None:
    write_parquet(folder / "measurements.parquet", [table])
    write_ui_table(folder / "measurements.json", table)


def _task_params(task: TuningTask) -> dict[str, object]:
    graph = task.subgraph
    return {
        "operators": " + ".join(graph.operators),
        "anchor_operator": graph.anchor_operator,
        "inputs": shapes(graph.inputs),
        "outputs": shapes(graph.outputs),
        "anchor_output_dtype": graph.anchor_output_dtype,
        "output_dtype": graph.output_dtype,
        "flops": f"{task.flops:.0f}",
        "bytes_moved": task.bytes_moved,
        "weight": task.weight,
        "expected_share": f"{task.expected_share:.4f}",
        "target_key": task.target_key,
    }


def _curves(
    best_points: Sequence[tuple[TuningRecord, float]], new: Sequence[TuningRecord]
) -> list[tuple[str, float, int, int]]:
    """The rows of ``new``: one a trial, of the best latency fewer; whatever is measured later of the trials before."""
    metrics = [_best_row(*point) for point in best_points]
    for record in new:
        at = _milliseconds(record)
        if record.phase != "confirm" and record.latency_us is not None:
            metrics.append(("latency_us", record.latency_us, at, record.trial))
        if record.predicted_us is not None and math.isfinite(record.predicted_us):
            metrics.append(("predicted_us", record.predicted_us, at, record.trial))
        if record.phase == "confirm" and record.latency_us is not None:
            metrics.append(("confirm_latency_us", record.latency_us, at, record.trial))
    return metrics


def _best_row(record: TuningRecord, best_us: float) -> tuple[str, float, int, int]:
    return "best_latency_us", best_us, _milliseconds(record), record.trial


def _task_metrics(log: TaskLog) -> list[tuple[str, float, int, int]]:
    """The sums of a task, at its last trial's time, so that logging them again leaves one row."""
    if not log.records:
        return []
    at = max(_milliseconds(record) for record in log.records.values())
    sums: dict[str, float] = {f"failures.{kind}": count for kind, count in log.failures.items()}
    sums["trials"] = len(log.records)
    if log.untuned_us and log.best_us:
        sums["speedup"] = log.untuned_us / log.best_us
    return [(key, float(value), at, len(log.records)) for key, value in sums.items()]


def _final_metrics(summary: TuningSummary, at_ms: int) -> list[tuple[str, float, int, int]]:
    verdict = summary.verdict
    figures = {
        "untuned_ms": verdict.untuned.median_ms,
        "tuned_ms": verdict.tuned.median_ms,
        "onnxruntime_ms": verdict.onnxruntime.median_ms,
        **({"champion_ms": verdict.champion.median_ms} if verdict.champion else {}),
        "speedup": verdict.speedup,
        "max_abs_error": verdict.max_abs_error,
        "trials": summary.trials,
        "tasks": summary.tasks,
        "reused_records": summary.reused_records,
        **{f"failures.{kind}": count for kind, count in Counter(summary.failures).items()},
        **{f"seconds.{step}": seconds for step, seconds in summary.seconds.items()},
    }
    return [(key, float(value), at_ms, summary.trials) for key, value in figures.items()]


def _final_params(summary: TuningSummary) -> dict[str, object]:
    engine = summary.engine
    return {
        "model": summary.model.name,
        "model_digest": summary.model.digest,
        "model_source": summary.model.source,
        "engine": engine.engine,
        "granularity": summary.granularity,
        "target": engine.target.spec,
        "target_key": engine.target.key,
        "threads": summary.verdict.threads,
        "device": engine.device,
        "version.tvm": engine.tvm_version,
        "version.python": engine.python_version,
        **{f"version.{package}": version for package, version in engine.versions.items()},
    }


def _milliseconds(record: TuningRecord) -> int:
    return int(record.started_at * 1000)
