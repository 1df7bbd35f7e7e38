"""The Prefect event of a new model version, which the deployment ``reconcile`` is triggered by."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from infra.webhook import NewVersion
from tasks.errors import PrefectError

EVENT = "tunewright.model-version.created"


async def send_event(found: NewVersion) -> None:
    """Hand the event to Prefect's server and wait until it has it. Raises PrefectError.

    Prefect's own ``emit_event`` returns before anything is sent, and tells nobody of a failure.
    """
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectException

    try:
        async with get_client() as client:
            await client.request("POST", "/events", json=[event_of(found)])
    except (PrefectException, httpx.HTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise PrefectError(f"cannot send an event to Prefect: {reason}; check PREFECT_API_URL") from error


def event_of(found: NewVersion) -> dict[str, Any]:
    """The event as Prefect's API takes it."""
    return {
        "id": str(found.event_id),
        "occurred": datetime.now(UTC).isoformat(),
        "event": EVENT,
        "resource": {
            "prefect.resource.id": f"tunewright.model-version.{found.name}.{found.version}",
            "prefect.resource.name": f"{found.name} version {found.version}",
        },
        "payload": {"name": found.name, "version": found.version, "targets": list(found.targets)},
    }
