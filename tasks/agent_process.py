"""The process of ``tunewright agent``: a nanny that keeps one worker, bound to the device, in the cluster.

The worker's death is the nanny's to heal; a scheduler that goes away is joined again when it is back.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from distributed import Client, Nanny

from infra.cluster import resource_of, security
from infra.settings import settings
from tasks.agent import AgentOptions, AgentPlugin, hand_back
from tasks.engines.child import ChildOptions, EngineChild
from tasks.errors import TunewrightError

logger = logging.getLogger("tunewright")

_AGAIN_S = 3.0
#: An engine that does not start is tried again after ever longer times, up to this.
_ENGINE_AGAIN_AT_MOST_S = 120.0
#: Handing back waits for the trial in flight and for the store.
_HAND_BACK_S = 120.0


async def serve_agent(options: AgentOptions, address: str, tell: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. Raises InputError."""
    tls = security(address, settings().certificates)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    said = False
    while not stop.is_set():
        try:
            async with _nanny(options, address, tls) as nanny:
                tell(f"agent {options.name} serves {address}")
                said = False
                await _first(stop.wait(), nanny.finished())
                if stop.is_set():
                    tell("ending after the trial in flight")
                    await _hand_back(nanny, address, tls)
            await _until_the_engine_starts(options.child, stop, tell)
        except (OSError, TimeoutError) as error:
            if not said:
                tell(f"no scheduler at {address} ({error}); trying again")
                said = True
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _AGAIN_S)
    tell("ended")


def _nanny(options: AgentOptions, address: str, tls: Any) -> Nanny:
    folder = options.folder / "dask"
    folder.mkdir(parents=True, exist_ok=True)
    # The worker only waits for its engine: Dask's own limits on memory would measure the wrong process.
    return Nanny(
        address, nthreads=1, name=options.name, resources={resource_of(options.info): 1}, memory_limit=0,
        local_directory=str(folder), security=tls, dashboard=False, dashboard_address="127.0.0.1:0",
        plugins=(AgentPlugin(options),),
    )  # fmt: skip


async def _until_the_engine_starts(child: ChildOptions, stop: asyncio.Event, tell: Callable[[str], None]) -> None:
    """Return once the engine starts, or ``stop`` is set: an agent without one would fail whatever it is given."""
    pause_s = _AGAIN_S
    while not stop.is_set():
        try:
            await asyncio.to_thread(_try_engine, child)
            break
        except TunewrightError as error:
            tell(f"its engine does not start; tried again in {pause_s:.0f} s: {error}")
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), pause_s)
        pause_s = min(2 * pause_s, _ENGINE_AGAIN_AT_MOST_S)


def _try_engine(child: ChildOptions) -> None:
    with EngineChild(child) as engine:
        engine.describe()


async def _first(*waits: Any) -> None:
    """Return when one of ``waits`` does."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    _, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()


async def _hand_back(nanny: Nanny, address: str, tls: Any) -> None:
    """Have the worker end its session early and leave the cluster, so that nothing is taken for a death."""
    with suppress(OSError, TimeoutError, RuntimeError):
        async with asyncio.timeout(_HAND_BACK_S), Client(address, security=tls, asynchronous=True) as client:
            await client.run(hand_back, workers=[nanny.worker_address])
            await client.retire_workers([nanny.worker_address], close_workers=True)
