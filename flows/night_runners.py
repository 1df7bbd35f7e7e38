"""How a night runs a model: as a flow run of the deployment, or in the night's own process."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from flows.due import Request
from flows.parameters import TuneParameters
from flows.tune_model import tune_model
from infra import flow_runs
from infra.patience import patiently
from infra.settings import settings
from infra.source_versions import target_slug
from tasks.model_source import one_line

logger = logging.getLogger("tunewright")
_POLL_S = 3.0


@dataclass(frozen=True)
class Ended:
    """A run that is over; ``failure`` says why it did not end well."""

    run_id: str
    failure: str = ""


class Runner(Protocol):
    """Starts tuning runs and tells which are over."""

    def start(self, request: Request, parameters: TuneParameters, run_id: str) -> None:
        """Begin a run under ``run_id``. Raises PrefectError."""

    def ended(self) -> list[Ended]:
        """The runs that have ended since the last call; may wait a moment. Raises PrefectError."""

    def cancel(self, run_id: str) -> None:
        """End a run. Raises PrefectError."""


def runner_for(deployed: bool) -> Runner:
    """The runner of a night."""
    return DeployedRunner() if deployed else OwnRunner()


@dataclass
class OwnRunner:
    """One after the other, in this process; ``start`` returns when the run is over."""

    done: list[Ended] = field(default_factory=list)

    def start(self, request: Request, parameters: TuneParameters, run_id: str) -> None:
        """See Runner. Whatever a model does, the night goes on."""
        logger.info("tuning %s", request.title)
        try:
            tune_model(parameters, run_id)
        except Exception as error:  # the boundary between models
            self.done.append(Ended(run_id, f"{type(error).__name__}: {one_line(error)}"))
        else:
            self.done.append(Ended(run_id))

    def ended(self) -> list[Ended]:
        """See Runner."""
        done, self.done = self.done, []
        return done

    def cancel(self, run_id: str) -> None:
        """See Runner. A run here is over when it can be asked for."""


@dataclass
class DeployedRunner:
    """Each in a process of its own, by the pool's worker, behind whatever a new version has triggered."""

    flow_run_ids: dict[str, str] = field(default_factory=dict)

    def start(self, request: Request, parameters: TuneParameters, run_id: str) -> None:
        """See Runner."""
        name = f"{request.source.name}-{request.source.version}-{target_slug(request.target)}-{run_id}"
        asked = {"parameters": parameters.model_dump(mode="json"), "run_id": run_id}
        # The key makes a start that is tried again find the run that it made.
        key = f"tunewright-night/{run_id}"
        started = patiently(
            f"start {name}", lambda: flow_runs.start(asked, key, name, flow_runs.NIGHTLY), settings().outage_patience_s
        )
        self.flow_run_ids[run_id] = started.run_id

    def ended(self) -> list[Ended]:
        """See Runner."""
        time.sleep(_POLL_S)
        done = []
        for run_id, flow_run_id in list(self.flow_run_ids.items()):
            run = patiently("look at a flow run", partial(flow_runs.look_up, flow_run_id), settings().outage_patience_s)
            if run.is_over:
                del self.flow_run_ids[run_id]
                failure = "" if run.state == "COMPLETED" else one_line(run.message or f"it ended as {run.state}")
                done.append(Ended(run_id, failure))
        return done

    def cancel(self, run_id: str) -> None:
        """See Runner."""
        end = partial(flow_runs.cancel, self.flow_run_ids.pop(run_id), "the night is over")
        patiently("cancel a flow run", end, settings().outage_patience_s)
