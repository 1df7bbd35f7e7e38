"""What a run leaves in MLflow for the nights that follow: what was asked, why it ended, what is left to gain."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from flows.due import LastRun, Request
from flows.parameters import TuneParameters
from infra.run_log import KIND_TAG, RUN_TAG
from infra.settings import settings
from infra.source_versions import literal
from infra.tracking import Tracking
from tasks import plan
from tasks.run import TuningRun

SOURCE_TAG, REQUESTED_TAG, ENDED_TAG = "tunewright.source", "tunewright.requested_target", "tunewright.ended"
REMAINING = "remaining_share"
#: The parameter of a run that names the compiler's version.
_TVM = "version.apache-tvm"


def request_tags(parameters: TuneParameters) -> dict[str, str]:
    """What the parent run is found by: the model and the target as they were asked for."""
    return {SOURCE_TAG: parameters.model, REQUESTED_TAG: parameters.target}


def log_outcome(run: TuningRun) -> None:
    """Why the search ended, and what more of it is expected to gain. Raises TrackingError."""
    assert run.log is not None
    known = run.exhausted
    states = [plan.state_of(t, run.book.of(t.workload_key), t.workload_key in known) for t in run.tasks]
    tracking = Tracking(settings().tracking)
    tracking.set_tags(run.log.run_id, {ENDED_TAG: run.ended})
    share = plan.remaining_share(states, run.brought_before)
    tracking.log_metrics(run.log.run_id, [(REMAINING, share, time.time_ns() // 1_000_000, 0)])


def last_finished(tracking: Tracking, experiment_id: str, request: Request) -> LastRun | None:
    """The last run of ``request`` that ended well. Raises TrackingError, and InputError where it cannot be searched."""
    wanted = (
        f"tags.`{SOURCE_TAG}` = {literal(request.source.model)} and tags.`{REQUESTED_TAG}` = {literal(request.target)} "
        f"and tags.`{KIND_TAG}` = 'run' and attributes.status = 'FINISHED'"
    )
    found = _search(tracking, experiment_id, wanted)
    if not found:
        return None
    data, info = found[0].data, found[0].info
    return LastRun(
        ended_at=(info.end_time or info.start_time) / 1000, tuned_ms=data.metrics.get("tuned_ms"),
        remaining_share=data.metrics.get(REMAINING), reason=data.tags.get(ENDED_TAG, ""),
        tvm_version=data.params.get(_TVM, ""),
    )  # fmt: skip


def run_named(tracking: Tracking, experiment_id: str, run_id: str) -> Any | None:
    """MLflow's parent run of the tuning run ``run_id``, None where it did not get that far. Raises TrackingError."""
    found = _search(tracking, experiment_id, f"tags.`{RUN_TAG}` = '{run_id}' and tags.`{KIND_TAG}` = 'run'")
    return found[0] if found else None


def _search(tracking: Tracking, experiment_id: str, wanted: str) -> Sequence[Any]:
    def find(client: Any) -> Sequence[Any]:
        found: Sequence[Any] = client.search_runs(
            [experiment_id], wanted, order_by=["attributes.start_time DESC"], max_results=1
        )
        return found

    return tracking.call("look for runs", find)
