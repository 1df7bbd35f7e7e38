"""What the deployments of ``prefect.yaml`` need on Prefect's server: the pool, its queues, the end of zombies.

Everything may be registered again and again; a second call changes nothing that is as it should be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from infra.flow_runs import CONTROL, NIGHTLY, TRIGGERED
from tasks.errors import PrefectError

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.events.schemas.automations import AutomationCore

POOL = "tunewright"
TAG = "tunewright"
#: The lower the number, the sooner its runs start.
PRIORITIES: Mapping[str, int] = {CONTROL: 1, TRIGGERED: 2, NIGHTLY: 3, "default": 4}
ZOMBIES = "tunewright: runs whose process is gone"
#: Three heartbeats of PREFECT_FLOWS_HEARTBEAT_FREQUENCY, which prefect.yaml sets to 30 s.
SILENCE_S = 100.0


def register(silence_s: float = SILENCE_S) -> None:
    """Create or correct pool, queues and automation. Raises PrefectError."""
    import httpx
    from prefect.exceptions import PrefectException

    try:
        asyncio.run(_register(silence_s))
    except (PrefectException, httpx.HTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise PrefectError(f"cannot register the work pool {POOL!r}: {reason}; check PREFECT_API_URL") from error


async def _register(silence_s: float) -> None:
    from prefect.client.orchestration import get_client

    async with get_client() as client:
        await _pool(client)
        await _queues(client)
        await _automation(client, zombie_automation(silence_s))


async def _pool(client: PrefectClient) -> None:
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectNotFound
    from prefect.workers.process import ProcessWorker

    try:
        await client.read_work_pool(POOL)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        await client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template))


async def _queues(client: PrefectClient) -> None:
    from prefect.exceptions import ObjectNotFound

    for name, priority in PRIORITIES.items():
        try:
            queue = await client.read_work_queue_by_name(name, POOL)
        except ObjectNotFound:
            queue = await client.create_work_queue(name, priority=priority, work_pool_name=POOL)
        if queue.priority != priority:
            await client.update_work_queue(queue.id, priority=priority)


async def _automation(client: PrefectClient, wanted: AutomationCore) -> None:
    found = await client.read_automations_by_name(wanted.name)
    for extra in found[1:]:
        await client.delete_automation(extra.id)
    if found:
        await client.update_automation(found[0].id, wanted)
    else:
        await client.create_automation(wanted)


def zombie_automation(silence_s: float) -> AutomationCore:
    """A run of ours that beat once and then was silent for ``silence_s`` without having ended is Crashed.

    Without it a run whose process or machine died stays in Running for ever, and keeps its concurrency slot.
    """
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
    from prefect.events.schemas.events import ResourceSpecification

    # Suspended runs and those that wait for another try have no process that could beat.
    names = ("Completed", "Failed", "Cancelled", "Crashed", "TimedOut", "AwaitingRetry", "Paused", "Suspended")
    ends = {f"prefect.flow-run.{name}" for name in names}
    message = f"no heartbeat for {silence_s:g} s: its process is gone"
    ended = ChangeFlowRunState(state=StateType.CRASHED, name=None, message=message, force=False)
    beat = "prefect.flow-run.heartbeat"
    return AutomationCore(
        name=ZOMBIES,
        description="Registered by 'tunewright deploy'.",
        trigger=EventTrigger(
            match=ResourceSpecification.model_validate({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=ResourceSpecification.model_validate(
                {"prefect.resource.id": f"prefect.tag.{TAG}", "prefect.resource.role": "tag"}
            ),
            after={beat},
            expect={beat, *ends},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=silence_s),
        ),
        actions=[ended],
    )
