"""The flow of a night: every model that asks for it, those with the most to gain first.

What is due is decided from registry tags and the last run's figures, one query a model; an engine is
started for those only that are tuned. One model's failure is a line of the report.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path

from prefect import flow, get_run_logger

from flows.due import Judgement, LastRun, Rules, in_order, judge, minutes_for, requests_of
from flows.night_log import failures_of, log_night, note_failure, outcome_entry
from flows.night_report import NightEntry, night_report
from flows.night_runners import Ended, Runner, runner_for
from flows.outcome import last_finished
from flows.tune_model import new_run_id
from infra.patience import patiently
from infra.settings import settings
from infra.source_versions import SourceVersion, SourceVersions
from infra.tracking import Tracking
from tasks.errors import InputError, TunewrightError

#: A run that is not over so long after the night's end is cancelled: something hangs.
_GRACE_S = 900.0


@dataclass
class Night:
    """A night in progress. Times are Unix times."""

    tracking: Tracking
    registry: SourceVersions
    experiment_id: str
    stop_at: float
    started: float = field(default_factory=time.time)
    entries: list[NightEntry] = field(default_factory=list)
    last: dict[str, LastRun] = field(default_factory=dict)
    running: dict[str, Judgement] = field(default_factory=dict)


@flow(name="nightly", validate_parameters=True)
def nightly(deployed: bool = False, hours: float | None = None) -> list[NightEntry]:
    """Tune what is due within ``hours``: as runs of the deployment tune-model, or one by one in this process.

    Raises TrackingError where MLflow stays away. Returns a line a model.
    """
    tracking = Tracking(settings().tracking)
    limit_s = 3600 * (hours or settings().nightly_hours)
    experiment_id = patiently(
        "open the experiment", lambda: tracking.experiment_id(settings().experiment), settings().outage_patience_s
    )
    night = Night(tracking, SourceVersions(tracking), experiment_id, time.time() + limit_s)
    due = _due(night)
    get_run_logger().info("%d due, %d not", len(due), len(night.entries))
    _work(night, due, runner_for(deployed))
    report = night_report(night.entries, (time.time() - night.started) / 3600)
    write = partial(log_night, tracking, experiment_id, night.started, night.entries, report)
    patiently("write the night down", write, settings().outage_patience_s)
    return night.entries


def _due(night: Night) -> list[Judgement]:
    """What is to be tuned, in order; what is not has its line in the night's entries."""
    sources, without = patiently("look for models", night.registry.nightly, settings().outage_patience_s)
    for name in without:
        night.entries.append(NightEntry(name, "skipped", "no version of it carries tunewright.target"))
    rules = Rules(
        settings().nightly_least_gain, settings().nightly_again_days, settings().start_attempts, time.time(), _tvm()
    )
    judged: list[Judgement] = []
    for source in sources:
        judged += _judge_source(night, source, rules)
    for judgement in judged:
        if judgement.gain is None:
            status = "given up" if judgement.reason.startswith("given up") else "skipped"
            night.entries.append(NightEntry(judgement.request.title, status, judgement.reason))
    return in_order(judged)


def _judge_source(night: Night, source: SourceVersion, rules: Rules) -> list[Judgement]:
    judged = []
    try:
        for request in requests_of(source):
            look = partial(last_finished, night.tracking, night.experiment_id, request)
            finished = patiently(f"look for runs of {request.title}", look, settings().outage_patience_s)
            last = failures_of(request, finished)
            if last:
                night.last[request.title] = last
            judged.append(judge(request, last, rules))
    except InputError as error:
        night.entries.append(NightEntry(f"{source.name} version {source.version}", "failed", str(error)))
    return judged


def _work(night: Night, due: Sequence[Judgement], runner: Runner) -> None:
    """Run what is due, as many at a time as may be, until all is done or the night is over."""
    waiting = list(due)
    while waiting or night.running:
        while waiting and len(night.running) < settings().nightly_models:
            _begin(night, waiting.pop(0), runner)
        for ended in runner.ended():
            _close(night, ended)
        if time.time() > night.stop_at + _GRACE_S:
            for run_id in list(night.running):
                runner.cancel(run_id)
                _close(night, Ended(run_id, "it was not over when the night was, and was cancelled"))


def _begin(night: Night, judgement: Judgement, runner: Runner) -> None:
    request = judgement.request
    minutes = minutes_for(request, (night.stop_at - time.time()) / 60, settings().nightly_minutes)
    if minutes is None:
        night.entries.append(NightEntry(request.title, "no time", f"the night was over; {judgement.reason}"))
        return
    run_id = new_run_id(request.source.model)
    night.running[run_id] = judgement
    try:
        runner.start(request, request.parameters(minutes), run_id)
    except (TunewrightError, ValueError) as error:  # pydantic's errors are ValueErrors
        _close(night, Ended(run_id, f"it could not be started: {error}"))


def _close(night: Night, ended: Ended) -> None:
    """The line of a run that is over; its failure is remembered by the nights that follow."""
    request = night.running.pop(ended.run_id).request
    last = night.last.get(request.title)
    try:
        read = partial(outcome_entry, night.tracking, night.experiment_id, request, ended)
        entry = patiently(f"read the figures of {request.title}", read, settings().outage_patience_s)
        note = partial(note_failure, night.registry, request, ended.failure, last)
        patiently(f"note how {request.title} ended", note, settings().outage_patience_s)
    except TunewrightError as error:
        entry = NightEntry(
            request.title, "failed", f"{ended.failure or 'it ended well'}; its figures are missing: {error}"
        )
    night.entries.append(replace(entry, before_ms=last.tuned_ms if last else None))
    get_run_logger().info("%s: %s, %s", entry.title, entry.status, entry.why)


def _tvm() -> str:
    """The version that the default engine uses, where it lives in this environment."""
    if settings().relax_python != Path(sys.executable):
        return ""
    try:
        return metadata.version("apache-tvm")
    except metadata.PackageNotFoundError:
        return ""
