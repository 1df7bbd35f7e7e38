"""All pictures of a finished run, into a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infra import pictures
from infra.roofline import roofline
from infra.run_figures import model_curve, roofline_dots
from infra.run_tables import TaskLog, best_curve, subgraph_times
from tasks.records import TuningSummary


def draw_run(folder: Path, logs: Sequence[TaskLog], summary: TuningSummary, run_id: str) -> None:
    """Draw what the records of ``logs`` and ``summary`` allow; ``run_id`` is the tuning run's own, not MLflow's."""
    times = subgraph_times(logs, summary.artifact.choices)
    if times:
        curves = {log.task.name: [(record.trial, best) for record, best in best_curve(log.in_order)] for log in logs}
        before = {t.name: t.untuned_us for t in times}
        after = {t.name: t.tuned_us for t in times}
        pictures.best_latency_curves(folder / "best_latency.png", {t.name: curves[t.name] for t in times})
        pictures.time_by_subgraph(folder / "time_by_subgraph.png", before, after)
        pictures.savings_by_subgraph(folder / "savings_by_subgraph.png", before, after)
    if points := model_curve(logs, run_id):
        untuned_us = sum(log.task.weight * (log.untuned_us or log.best_us or 0.0) for log in logs)
        pictures.model_latency(folder / "model_latency.png", points, untuned_us)
    dots = roofline_dots(logs, summary.artifact.choices)
    if summary.roof is not None and dots:
        roofline(folder / "roofline.png", dots, summary.roof)
    if summary.profile is not None and summary.profile.kernels:
        pictures.profile_by_kernel(folder / "profile.png", summary.profile)
    pictures.failures_by_kind(folder / "failures_by_kind.png", summary.failures)
