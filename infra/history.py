"""How a model's latency went, version by version and night by night."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infra.run_log import FAILURE_TAG, KIND_TAG, RUN_TAG
from infra.tracking import Tracking
from tasks.errors import InputError

_MODEL_TAG = "tunewright.model"
#: An inch of picture for each target, at least.
_PANEL_IN = 3.2


@dataclass(frozen=True)
class HistoryEntry:
    """One version, or one run that made none. Latencies are in milliseconds, ``at`` is a Unix time.

    ``aliases`` are those that the version has now, ``decision`` what was decided when it was published.
    """

    at: float
    target: str
    version: str
    aliases: tuple[str, ...]
    tuned_ms: float | None
    untuned_ms: float | None
    onnxruntime_ms: float | None
    trials: int | None
    minutes: float | None
    decision: str
    run_id: str
    mlflow_run_id: str

    @property
    def night(self) -> str:
        """The day and minute, UTC."""
        return datetime.fromtimestamp(self.at, UTC).strftime("%Y-%m-%d %H:%M")

    @property
    def was_champion(self) -> bool:
        """Whether it was made champion when it was published."""
        return self.decision.startswith("champion")


def history_of(tracking_uri: str, name: str) -> list[HistoryEntry]:
    """Every version of ``name`` and every run of it without one, oldest first.

    Raises InputError where there is neither, TrackingError.
    """
    tracking = Tracking(tracking_uri)
    tracking.check()
    runs = {str(run.info.run_id): run for run in _runs(tracking, name)}
    versions = _versions(tracking, name)
    published = {str(version.run_id) for version in versions}
    for run_id in published - runs.keys():
        found = _run(tracking, run_id)
        if found is not None:
            runs[run_id] = found
    entries = [_of_version(version, runs.get(str(version.run_id))) for version in versions]
    entries += [_of_run(run) for run_id, run in runs.items() if run_id not in published]
    if not entries:
        raise InputError(f"MLflow at {tracking.uri} has neither versions nor runs of a model {name!r}")
    return sorted(entries, key=lambda entry: entry.at)


def draw_history(path: Path, name: str, entries: Sequence[HistoryEntry]) -> None:
    """Latency over time as a PNG, a panel a target; filled dots were made champion. Raises OSError."""
    from matplotlib.figure import Figure

    targets = sorted({e.target for e in entries if e.tuned_ms is not None})
    figure = Figure(figsize=(9, 0.8 + _PANEL_IN * max(1, len(targets))), dpi=110, layout="constrained")
    figure.suptitle(f"{name}: latency by night", fontsize=13)
    panels = figure.subplots(max(1, len(targets)), 1, squeeze=False)[:, 0]
    for panel, target in zip(panels, targets, strict=False):
        _draw_target(panel, target, [e for e in entries if e.target == target and e.tuned_ms is not None])
    if not targets:
        panels[0].text(0.5, 0.5, "no version has a latency", ha="center", va="center")
        panels[0].set_axis_off()
    figure.savefig(path)


def _draw_target(panel: Any, target: str, entries: Sequence[HistoryEntry]) -> None:
    at = [datetime.fromtimestamp(e.at, UTC) for e in entries]
    for key, style, label in (("untuned_ms", ":", "untuned"), ("onnxruntime_ms", "--", "onnxruntime")):
        panel.plot(at, [getattr(e, key) for e in entries], style, color="0.55", label=label)
    tuned = [e.tuned_ms or 0.0 for e in entries]
    panel.plot(at, tuned, "-", color="C0", label="tuned")
    for was_champion, face, label in ((True, "C0", "made champion"), (False, "white", "challenger")):
        dots = [(t, e) for t, e in zip(at, entries, strict=True) if e.was_champion is was_champion]
        if dots:
            panel.plot(
                [t for t, _ in dots], [e.tuned_ms for _, e in dots], "o", color="C0", mfc=face, ms=8, label=label
            )
    for t, entry in zip(at, entries, strict=True):
        panel.annotate(entry.version, (t, entry.tuned_ms), (0, 9), textcoords="offset points", ha="center", fontsize=9)
    panel.set_title(target, fontsize=10, loc="left")
    panel.set_ylabel("ms")
    panel.set_ylim(bottom=0)
    panel.margins(x=0.06)
    panel.grid(alpha=0.3)
    panel.tick_params(axis="x", rotation=20)
    panel.legend(fontsize=8, ncols=5, loc="lower left")


def _runs(tracking: Tracking, name: str) -> list[Any]:
    def find(client: Any) -> list[Any]:
        ids = [experiment.experiment_id for experiment in client.search_experiments()]
        quoted = name.replace("'", "")
        wanted = f"tags.`{_MODEL_TAG}` = '{quoted}' and tags.`{KIND_TAG}` = 'run'"
        page = client.search_runs(ids, wanted)
        found = list(page)
        while page.token:
            page = client.search_runs(ids, wanted, page_token=page.token)
            found += page
        return found

    return tracking.call(f"look for runs of {name!r}", find)


def _versions(tracking: Tracking, name: str) -> list[Any]:
    def find(client: Any) -> list[Any]:
        quoted = name.replace("'", "")
        page = client.search_model_versions(f"name = '{quoted}'")
        found = list(page)
        while page.token:
            page = client.search_model_versions(f"name = '{quoted}'", page_token=page.token)
            found += page
        aliases = client.get_registered_model(name).aliases if found else {}
        by_version: dict[str, list[str]] = {}
        for alias, version in aliases.items():
            by_version.setdefault(str(version), []).append(alias)
        for version in found:
            # What a search finds does not say which aliases a version has.
            version.aliases = sorted(by_version.get(str(version.version), ()))
        return found

    return tracking.call(f"look for versions of {name!r}", find)


def _run(tracking: Tracking, run_id: str) -> Any:
    def get(client: Any) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            return client.get_run(run_id)
        except MlflowException:
            return None  # purged: the version's tags say the rest

    return tracking.call(f"look up run {run_id}", get) if run_id else None


def _of_version(version: Any, run: Any) -> HistoryEntry:
    tags, metrics = version.tags, run.data.metrics if run else {}
    return HistoryEntry(
        at=version.creation_timestamp / 1000,
        target=tags.get("target", ""),
        version=str(version.version),
        aliases=tuple(version.aliases),
        tuned_ms=_number(tags.get("tuned_ms")),
        untuned_ms=_number(tags.get("untuned_ms")),
        onnxruntime_ms=_number(tags.get("onnxruntime_ms")),
        decision="; ".join(text for text in (tags.get("decision", ""), tags.get("rollback", "")) if text),
        run_id=run.data.tags.get(RUN_TAG, "") if run else "",
        mlflow_run_id=str(version.run_id or ""),
        **_spent(metrics),
    )


def _of_run(run: Any) -> HistoryEntry:
    tags, metrics = run.data.tags, run.data.metrics
    failure = tags.get(FAILURE_TAG, "")
    return HistoryEntry(
        at=run.info.start_time / 1000,
        target=run.data.params.get("target_key", ""),
        version="",
        aliases=(),
        tuned_ms=metrics.get("tuned_ms"),
        untuned_ms=metrics.get("untuned_ms"),
        onnxruntime_ms=metrics.get("onnxruntime_ms"),
        decision=f"no version: {failure or str(run.info.status).lower()}",
        run_id=tags.get(RUN_TAG, ""),
        mlflow_run_id=str(run.info.run_id),
        **_spent(metrics),
    )


def _spent(metrics: dict[str, float]) -> dict[str, Any]:
    seconds = metrics.get("seconds.total")
    return {
        "trials": int(metrics["trials"]) if "trials" in metrics else None,
        "minutes": None if seconds is None else seconds / 60,
    }


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
