"""What a night writes down: a run in MLflow, an artifact in Prefect, and failures for the next night."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact

from flows.due import LastRun, Request
from flows.night_report import STATUSES, NightEntry, rows
from flows.night_runners import Ended
from flows.outcome import run_named
from infra.promotion import CHAMPION
from infra.run_log import KIND_TAG, NOTE_TAG
from infra.run_tables import write_ui_table
from infra.source_versions import FAILED_TAG, SourceVersions, target_slug
from infra.tracking import TEXT_LENGTH, Tracking
from tasks.errors import RunInProgress

ARTIFACT_KEY = "tunewright-night"
NIGHT_TAG = "tunewright.night"


def failures_of(request: Request, finished: LastRun | None) -> LastRun | None:
    """The last run of ``request``: the one that finished, or what a night noted of one that failed since."""
    text = request.source.tags.get(FAILED_TAG + target_slug(request.target), "")
    try:
        noted: dict[str, Any] = json.loads(text) if text else {}
        failed = LastRun(float(noted["at"]), str(noted["reason"]), int(noted["count"])) if noted else None
    except (ValueError, KeyError, TypeError):
        failed = None  # somebody else's text
    if failed is None or (finished and finished.ended_at > failed.ended_at):
        return finished
    return replace(failed, tuned_ms=finished.tuned_ms if finished else None)


def note_failure(registry: SourceVersions, request: Request, failure: str, last: LastRun | None) -> None:
    """Tag the version with how often and why its runs failed, or take the tag off. Raises TrackingError."""
    key = FAILED_TAG + target_slug(request.target)
    if RunInProgress.__name__ in failure:
        return  # somebody else tunes it just now: nothing is wrong with it
    if failure:
        count = 1 + (last.failures_in_a_row if last else 0)
        noted = {"count": count, "reason": failure[:1000], "at": time.time()}
        registry.mark(request.source, key, json.dumps(noted))
    elif key in request.source.tags:
        registry.unmark(request.source, key)


def outcome_entry(tracking: Tracking, experiment_id: str, request: Request, ended: Ended) -> NightEntry:
    """What a run did, from its figures in MLflow. Raises TrackingError."""
    run = run_named(tracking, experiment_id, ended.run_id)
    if RunInProgress.__name__ in ended.failure:
        return NightEntry(request.title, "skipped", ended.failure, run_id=ended.run_id)
    if ended.failure or run is None:
        return NightEntry(request.title, "failed", ended.failure or "it left no run in MLflow", run_id=ended.run_id)
    figures, published = run.data.metrics, run.data.tags.get("tunewright.published", "").split()
    name, version, alias = (*published, "", "", "")[:3]
    decision = SourceVersions(tracking).decision(name, version) if version else ""
    return NightEntry(
        title=request.title, status="faster" if alias.startswith(CHAMPION) else "not faster",
        why=decision.partition(": ")[2] or run.data.tags.get("tunewright.ended", ""),
        trials=int(figures.get("trials", 0)), untuned_ms=figures.get("untuned_ms"), tuned_ms=figures.get("tuned_ms"),
        published=f"{name} version {version} @{alias}" if version else "", run_id=ended.run_id,
    )  # fmt: skip


def log_night(
    tracking: Tracking, experiment_id: str, started: float, entries: Sequence[NightEntry], report: str
) -> str:
    """Write the night down once, however often it is tried; returns MLflow's run id. Raises TrackingError."""
    name = time.strftime("night %Y-%m-%d %H:%M", time.localtime(started))
    night_id = f"{started:.3f}"

    def find_or_create(client: Any) -> str:
        wanted = f"tags.`{NIGHT_TAG}` = '{night_id}'"
        found = client.search_runs([experiment_id], wanted, max_results=1)
        if found:
            return str(found[0].info.run_id)
        tags = {NIGHT_TAG: night_id, KIND_TAG: "night", "mlflow.source.name": "tunewright"}
        return str(client.create_run(experiment_id, int(started * 1000), tags, name).info.run_id)

    run_id = tracking.call("create the night's run", find_or_create)
    tracking.set_tags(run_id, {NOTE_TAG: _shortened(report)})
    counts = Counter(entry.status for entry in entries)
    figures = {"models": len(entries), **{status.replace(" ", "_"): counts[status] for status in STATUSES}}
    now = time.time_ns() // 1_000_000
    tracking.log_metrics(run_id, [(key, float(value), now, 0) for key, value in figures.items()])

    def write(folder: Path) -> None:
        (folder / "night.md").write_text(report)
        write_ui_table(folder / "night.json", rows(entries))

    tracking.log_files(run_id, write, tables=["night.json"])
    tracking.call("end the night's run", lambda client: client.set_terminated(run_id, "FINISHED"))
    create_markdown_artifact(report, ARTIFACT_KEY, f"{name}: what was tuned")
    return run_id


def _shortened(report: str) -> str:
    """The report as far as a tag can hold it, cut at a line."""
    if len(report) <= TEXT_LENGTH:
        return report
    more = "\n\n(The rest is in the artifact night.md.)"
    return report[: TEXT_LENGTH - len(more)].rpartition("\n")[0] + more
