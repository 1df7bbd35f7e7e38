"""Flow runs on Prefect's server: started once a key, looked up by key, watched, cancelled.

Prefect holds flow and idempotency key unique in its database: however many processes start a run with one
key at the same time, there is one run. Foreign errors become a PrefectError here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from tasks.errors import PrefectError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

TUNE_MODEL = "tune-model/tune-model"
#: Work queues of the pool, the most urgent first (see ``infra/work_pool.py``).
CONTROL, TRIGGERED, NIGHTLY = "control", "triggered", "nightly"
_PAGE = 100


@dataclass(frozen=True)
class StartedRun:
    """A flow run as Prefect knows it. ``state`` is its type: SCHEDULED, RUNNING, COMPLETED, FAILED, ..."""

    run_id: str
    key: str
    state: str
    message: str

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, well or not."""
        return self.state in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")

    @property
    def has_failed(self) -> bool:
        """Whether the run ended by itself and not well; a cancelled one was ended by somebody."""
        return self.state in ("FAILED", "CRASHED")


def start(parameters: Mapping[str, Any], key: str, name: str, queue: str = TRIGGERED) -> StartedRun:
    """Start ``tune-model`` with ``parameters``, or find the run that was started with ``key``. Raises PrefectError."""
    from prefect.states import Scheduled

    with _client(f"start {name}") as client:
        deployment = client.read_deployment_by_name(TUNE_MODEL)
        run = client.create_flow_run_from_deployment(
            deployment.id, parameters=dict(parameters), state=Scheduled(), name=name, idempotency_key=key,
            work_queue_name=queue, tags=["tunewright", queue],
        )  # fmt: skip
    return _started(run)


def by_key(keys: Sequence[str]) -> dict[str, StartedRun]:
    """The runs that were started with ``keys``; those that were not are left out. Raises PrefectError."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey

    found: dict[str, StartedRun] = {}
    with _client("look for flow runs") as client:
        for first in range(0, len(keys), _PAGE):
            wanted = FlowRunFilterIdempotencyKey(any_=list(keys[first : first + _PAGE]))
            runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(idempotency_key=wanted), limit=_PAGE)
            found.update({run.idempotency_key: _started(run) for run in runs if run.idempotency_key})
    return found


def look_up(run_id: str) -> StartedRun:
    """The run's state now. Raises PrefectError."""
    with _client(f"look up flow run {run_id}") as client:
        return _started(client.read_flow_run(UUID(run_id)))


def cancel(run_id: str, reason: str) -> None:
    """Have the worker end the run. Raises PrefectError."""
    from prefect.client.schemas.objects import State, StateType

    with _client(f"cancel flow run {run_id}") as client:
        client.set_flow_run_state(UUID(run_id), State(type=StateType.CANCELLING, message=reason))


def check() -> None:
    """Raise PrefectError where the server cannot be reached; without one, Prefect's embedded server starts."""
    with _client("reach Prefect's server") as client:
        error = client.api_healthcheck()
        if error is not None:
            raise OSError(str(error) or type(error).__name__) from error


@contextmanager
def _client(doing: str) -> Iterator[SyncPrefectClient]:
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound, PrefectException

    try:
        with get_client(sync_client=True) as client:
            yield client
    except ObjectNotFound as error:
        what = "Prefect's server has no such run or deployment; register them with 'tunewright deploy'"
        raise PrefectError(f"cannot {doing}: {what}") from error
    except (PrefectException, httpx.HTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise PrefectError(f"cannot {doing}: {reason}; check PREFECT_API_URL and that the server answers") from error


def _started(run: FlowRun) -> StartedRun:
    state = run.state
    kind = state.type.value if state else "PENDING"
    return StartedRun(str(run.id), run.idempotency_key or "", kind, (state.message if state else None) or "")
