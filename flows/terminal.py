"""What a run shows in the terminal: progress while it goes on, a table at its end."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tasks.records import FusedModule, Latency, TuningSummary, TuningTask
from tasks.run import Progress as RunProgress

_STEPS = {
    "import": "importing",
    "fuse": "fusing",
    "extract": "extracting tasks",
    "default": "measuring the default schedules of",
    "confirm": "measuring the best again",
    "wait": "waiting for the device",
    "tune": "tuning",
    "build": "building",
    "verify": "verifying",
    "publish": "publishing",
}


class ProgressBar:
    """Trials done, best latency of the model so far against untuned, time left."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.time()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None, figures="")
        self._shown = ""

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, progress: RunProgress) -> None:
        """Show ``progress``; where the output is no terminal, print a line a step."""
        name = _STEPS.get(progress.step, progress.step)
        figures = progress.message
        if progress.step == "tune":
            figures = _figures(progress)
            if progress.budget_trials:
                self._bar.update(self._task, total=progress.budget_trials, completed=progress.trials)
            elif progress.seconds_left is not None:
                spent_s = time.time() - self._started
                self._bar.update(self._task, total=spent_s + progress.seconds_left, completed=spent_s)
        self._bar.update(self._task, description=name, figures=figures)
        if not self._console.is_terminal:
            line = f"[{time.time() - self._started:6.1f} s] {name} {figures}".rstrip()
            if line[11:] != self._shown:
                self._console.print(line, highlight=False, markup=False)
                self._shown = line[11:]


def _figures(progress: RunProgress) -> str:
    of = f" of {progress.budget_trials}" if progress.budget_trials else ""
    parts = [f"{progress.trials}{of} trials"]
    if progress.best_us and progress.untuned_us:
        ratio = progress.untuned_us / progress.best_us
        parts.append(f"{progress.best_us / 1e3:.2f} ms, untuned {progress.untuned_us / 1e3:.2f} ms ({ratio:.1f}x)")
    if progress.seconds_left is not None:
        parts.append(f"{progress.seconds_left:.0f} s left")
    return ", ".join(parts)


def show_summary(console: Console, summary: TuningSummary) -> None:
    """The table that ends a run."""
    verdict = summary.verdict
    table = Table(title=f"{summary.model.name} on {summary.engine.target.key}", show_header=False)
    rows = [
        ("tasks", str(summary.tasks)),
        ("trials", f"{summary.trials} new, {summary.reused_records} records reused"),
        ("failed trials", ", ".join(f"{count} {kind}" for kind, count in summary.failures.items()) or "none"),
        ("untuned", _latency(verdict.untuned)),
        ("tuned", f"{_latency(verdict.tuned)}   {verdict.speedup:.1f} times as fast"),
        ("onnxruntime", f"{_latency(verdict.onnxruntime)}   on {verdict.threads} threads, interleaved"),
        ("maximum error", f"{verdict.max_abs_error:.2g} (allowed: {verdict.tolerance})"),
        ("published", f"{summary.published.name} version {summary.published.version} @{summary.published.alias}"),
        ("why", summary.published.reason),
        ("MLflow run", summary.published.mlflow_run_id),
        ("artifact", summary.published.artifact_uri),
        ("time", f"{summary.seconds.get('total', 0.0):.0f} s"),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for note in summary.notes:
        console.print(f"- {note}", highlight=False, markup=False)


def summary_line(summary: TuningSummary) -> str:
    """The summary as one line of JSON, for programs."""
    verdict = summary.verdict
    return json.dumps(
        {
            "tasks": summary.tasks,
            "trials": summary.trials,
            "untuned_ms": round(verdict.untuned.median_ms, 4),
            "tuned_ms": round(verdict.tuned.median_ms, 4),
            "onnxruntime_ms": round(verdict.onnxruntime.median_ms, 4),
            "max_abs_error": verdict.max_abs_error,
            "mlflow_run_id": summary.published.mlflow_run_id,
            "artifact_uri": summary.published.artifact_uri,
        }
    )


def show_subgraphs(console: Console, fused: FusedModule, tasks: Sequence[TuningTask]) -> None:
    """What ``tunewright inspect`` prints: the subgraphs, heaviest first, and the tasks."""
    share = {task.workload_key: task.expected_share for task in tasks}
    table = Table(title=f"{len(fused.subgraphs)} fused subgraphs in {len(fused.calls)} calls")
    for heading in ("workload", "operators", "anchor", "output", "dtypes", "MFLOP", "kB", "weight", "share"):
        right = heading in ("MFLOP", "kB", "weight", "share")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    ranked = sorted(fused.subgraphs, key=lambda subgraph: -share.get(fused.tuned_key(subgraph), 0.0))
    for subgraph in ranked:
        key = fused.tuned_key(subgraph)
        table.add_row(
            key,
            "+".join(subgraph.operators),
            subgraph.anchor_operator,
            " ".join("x".join(map(str, output.shape)) or "scalar" for output in subgraph.outputs),
            f"{subgraph.anchor_output_dtype} > {subgraph.output_dtype}",
            f"{subgraph.flops / 1e6:.2f}",
            f"{subgraph.bytes_moved / 1e3:.0f}",
            str(subgraph.weight),
            f"{share.get(key, 0.0):.1%}",
        )
    console.print(table)
    console.print(
        f"{len(tasks)} tuning tasks by {fused.granularity} granularity; "
        "the share is an estimate from FLOPs and bytes, nothing was measured",
        highlight=False,
    )


def _latency(latency: Latency) -> str:
    low, high = latency.spread_ms
    return f"{latency.median_ms:.3f} ms (quartiles {low:.3f} to {high:.3f})"
