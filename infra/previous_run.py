"""What changed since the run before: the last finished run of the same model and target."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from infra.tracking import Tracking
from tasks.records import TuningSummary

#: Parameters whose change explains another latency, beside the versions.
_TELLING = ("model_digest", "granularity", "threads", "device", "seed")
#: Longer values, digests above all, are not shown.
_SHOWN = 24


@dataclass(frozen=True)
class PreviousRun:
    """``began`` is a Unix time; ``metrics`` and ``params`` are those of its parent run in MLflow."""

    run_id: str
    name: str
    began: float
    metrics: dict[str, float]
    params: dict[str, str]


def find_previous(tracking: Tracking, experiment_id: str, run_id: str, summary: TuningSummary) -> PreviousRun | None:
    """The last run before ``run_id`` that finished with this model's name and target. Raises TrackingError."""

    def find(client: Any) -> PreviousRun | None:
        began = client.get_run(run_id).info.start_time
        wanted = (
            f"tags.`tunewright.kind` = 'run' and tags.`tunewright.model` = '{summary.model.name}' "
            f"and params.target_key = '{summary.engine.target.key}' "
            f"and attributes.status = 'FINISHED' and attributes.start_time < {began}"
        )
        found = client.search_runs([experiment_id], wanted, order_by=["start_time DESC"], max_results=1)
        if not found:
            return None
        run = found[0]
        return PreviousRun(
            run.info.run_id, run.info.run_name, run.info.start_time / 1e3, dict(run.data.metrics), dict(run.data.params)
        )

    return tracking.call("look for the run before", find)


def what_changed(previous: PreviousRun | None, summary: TuningSummary) -> str:
    """Latency then and now and what else is not the same, as a sentence or two of Markdown."""
    if previous is None:
        return "There is no earlier finished run of this model for this target."
    verdict = summary.verdict
    then_ms, now_ms = previous.metrics.get("tuned_ms"), verdict.tuned.median_ms
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(previous.began))
    text = f"Against the run before (`{previous.name}`, {when}): "
    if then_ms:
        text += f"tuned took {then_ms:.4g} ms then and takes **{now_ms:.4g} ms** now"
        text += f" ({now_ms / then_ms - 1:+.1%})" if abs(now_ms / then_ms - 1) >= 0.0005 else ""
        reference_ms = previous.metrics.get("onnxruntime_ms")
        if reference_ms:
            # The machine may have been slower that night: each run's own reference says so.
            text += (
                f"; that is {then_ms / reference_ms:.2f} times onnxruntime's latency then, "
                f"{now_ms / verdict.onnxruntime.median_ms:.2f} times now"
            )
    else:
        text += "it has no latency in MLflow"
    changed = _changed(previous, summary)
    return f"{text}. {'Changed: ' + ', '.join(changed) if changed else 'Model, versions and machine are the same'}."


def _changed(previous: PreviousRun, summary: TuningSummary) -> list[str]:
    engine = summary.engine
    now = {
        "model_digest": summary.model.digest, "granularity": summary.granularity, "device": engine.device,
        "threads": str(summary.verdict.threads),
        **{f"version.{package}": version for package, version in engine.versions.items()},
    }  # fmt: skip
    before = {k: v for k, v in previous.params.items() if k in _TELLING or k.startswith("version.")}
    found = []
    for key in sorted(now.keys() | before.keys()):
        was, becomes = before.get(key), now.get(key)
        if was is None or becomes is None or was == becomes:
            continue
        name = key.removeprefix("version.").replace("_", " ")
        long = max(len(was), len(becomes)) > _SHOWN
        found.append(f"{name} (another one)" if long else f"{name} {was} to {becomes}")
    return found
