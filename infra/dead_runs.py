"""Runs in MLflow whose process was killed: nobody ends them but the run that takes their place."""

from __future__ import annotations

from typing import Any

from infra.run_log import FAILURE_TAG, PARENT_TAG, RUN_TAG
from infra.tracking import Tracking


def end_dead_run(tracking_uri: str, experiment: str, run_id: str, reason: str) -> int:
    """End the run that was logged as ``run_id`` and its children, if they run still; how many those were.

    Raises TrackingError.
    """
    tracking = Tracking(tracking_uri)
    experiment_id = tracking.experiment_id(experiment)

    def end(client: Any) -> int:
        ended = 0
        for run in client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{run_id}'"):
            below = f"tags.`{PARENT_TAG}` = '{run.info.run_id}'"
            children = client.search_runs([experiment_id], below, max_results=1000)
            for one in (*children, run):
                if one.info.status == "RUNNING":
                    client.set_terminated(one.info.run_id, status="KILLED")
                    ended += 1
            client.set_tag(run.info.run_id, FAILURE_TAG, reason)
        return ended

    return tracking.call("end a run whose process is gone", end)
