"""An agent: a Dask worker bound to a device, with an engine that stays warm as long as the worker lives.

``AgentPlugin`` makes a worker one; what runs on it finds it with ``this_agent``. Runs in the worker's
process, which its nanny starts anew when it dies: then the journals that it left are stored before the
scheduler hears of the new one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import logging
import platform
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distributed import Worker, WorkerPlugin, get_client, get_worker

from infra.cluster import (
    STARTUP_KEY,
    Activity,
    describe_agent,
    missing_agents,
    note_stored,
    note_unstored,
    resource_of,
)
from infra.object_store import ObjectStore, open_store
from infra.patience import patiently
from infra.record_store import RecordStore
from infra.sample_store import SampleStore
from infra.settings import settings
from tasks.engines.child import ChildOptions, EngineChild
from tasks.engines.interface import counts_for
from tasks.engines.measuring.journal import is_live
from tasks.engines.wire import to_plain
from tasks.errors import EngineUnavailable, FleetError, StoreError
from tasks.records import EngineInfo, Session, SessionResult, TuningRecord, TuningTask
from tasks.sessions import Errand, SessionHost, SessionOutcome, run_session

logger = logging.getLogger("tunewright")

PLUGIN = "tunewright-agent"
#: Trials a minute are counted over this time.
_RATE_S = 120.0
#: What other agents have learned is asked for no more often than this.
_SAMPLES_EVERY_S = 10.0
#: A session waits so long for an agent that went away while it measured the same workload to come back and store
#: its journal. Where it does come back that is a matter of seconds, but on a machine that is busy of half a minute.
_RECOVERY_S = 60.0
#: The engine of a worker that died ends by itself; its journal is waited for so long.
_ORPHAN_S = 20.0
#: An engine that is so old is replaced between two runs: what it keeps of every workload only grows.
_ENGINE_AGE_S = 6 * 3600.0
#: Between the failure of a session and its agent's leaving: the failure must be told first.
_BEFORE_LEAVING_S = 0.5
#: Files of single sessions and of what was run here are kept so long.
_KEPT_S = 24 * 3600.0


@dataclass(frozen=True)
class AgentOptions:
    """What makes a worker an agent. ``info`` is what its engine answered when it was tried.

    ``modules`` are imported before it joins: reading an errand would import them on the event loop, for
    seconds in which the worker seems dead.
    """

    name: str
    child: ChildOptions
    info: EngineInfo
    folder: Path
    modules: tuple[str, ...] = ()


class BusyAgent:
    """What an agent is doing, for whoever asks; its counts are of the worker's life."""

    def __init__(self) -> None:
        self._now = Activity(state="idle")
        self._times: deque[float] = deque(maxlen=4096)

    def begin(self, state: str, run_id: str, task: str) -> None:
        """The agent turns to ``task``."""
        self._now = replace(self._now, state=state, run_id=run_id, task=task, since=time.time(), message="")

    def end(self) -> None:
        """It is free again."""
        self._now = replace(self._now, state="idle", run_id="", task="", since=time.time(), message="")

    def say(self, message: str) -> None:
        """Why it does not go on."""
        self._now = replace(self._now, message=message)

    def count(self, record: TuningRecord) -> None:
        """A trial has ended."""
        self._times.append(time.time())
        failed = self._now.failures + (record.failure is not None)
        self._now = replace(self._now, trials=self._now.trials + 1, failures=failed, message="")

    @property
    def activity(self) -> Activity:
        """For the scheduler, with every heartbeat."""
        recent = sum(at > time.time() - _RATE_S for at in list(self._times))
        return replace(self._now, trials_per_min=round(recent * 60 / _RATE_S, 1))


class Running:
    """The agent in its worker's process."""

    def __init__(self, options: AgentOptions, worker: Worker) -> None:
        config = settings()
        self.options = options
        self.busy = BusyAgent()
        self.stopping = threading.Event()
        self._worker = worker
        self._patience_s = config.outage_patience_s
        self._store_url = config.store_url
        self.store: ObjectStore = open_store(config.store_url, config.s3_endpoint_url or None)
        info = options.info
        cache = options.folder / "cache"
        self.records = RecordStore(self.store, info.engine, info.tvm_version, info.target.key, cache)
        self.samples = SampleStore(self.store, info, options.folder)
        self._samples_at = 0.0
        self._engine_started = time.monotonic()
        self._last_run = ""
        self.engine = EngineChild(options.child)
        self._task_key: Any = None
        self.host = SessionHost(
            lambda: self.engine, options.folder, self.records, self.samples, self.busy.say,
            patience_s=self._patience_s, publishes=True, wanted=self.is_wanted, on_record=self.busy.count,
        )  # fmt: skip

    def recover(self) -> None:
        """Store the journals of a worker that died here, once its engine has ended too."""
        deadline = time.monotonic() + _ORPHAN_S
        while time.monotonic() < deadline and any(map(is_live, self.host.journals.glob("*.jsonl"))):
            time.sleep(0.2)
        found = self.host.recover_journals()
        if found:
            logger.warning("%d measurements were recovered from the journals of a worker that died", found)

    def run(self, errand: Errand) -> tuple[SessionOutcome, ...]:
        """Run the sessions, one after the other. Raises StoreError, EngineError, FleetError."""
        if self._store_url != errand.store_url:
            raise FleetError(
                f"the agent {self.options.name} writes to {self._store_url}, the run to {errand.store_url}: "
                "set TUNEWRIGHT_STORE to the same store on both"
            )
        self._freshen(errand.run_id)
        self._task_key = self._worker.get_current_task()
        outcomes = []
        for session in errand.sessions:
            if not self.is_wanted():
                outcomes.append(SessionOutcome(session, _nothing(session), (), self.options.name, handed_back=True))
                continue
            self.busy.begin(session.phase, errand.run_id, errand.title)
            try:
                outcomes.append(replace(self._run_one(session), agent=self.options.name))
            except EngineUnavailable as error:
                # Whatever is given to it would fail at once, and so it would be given more and more.
                self._worker.loop.add_callback(self._leave)
                raise FleetError(f"the agent {self.options.name} leaves, its engine does not start: {error}") from error
            finally:
                self.busy.end()
        return tuple(outcomes)

    def is_wanted(self) -> bool:
        """False once this agent is told to end, or the flow that asked has given the work up or is gone."""
        if self.stopping.is_set():
            return False
        task = self._worker.state.tasks.get(self._task_key)
        return task is not None and task.state in ("executing", "long-running")

    async def hand_back(self) -> None:
        """Take no more sessions, end the one that runs after the trial in flight, and return when it has ended."""
        await self._worker.set_resources(**{resource_of(self.options.info): 0})
        self.stopping.set()
        while self.busy.activity.state != "idle":
            await asyncio.sleep(0.1)

    def close(self) -> None:
        """End the engine."""
        self.stopping.set()
        self.engine.close()

    async def _leave(self) -> None:
        """End this worker; what waits here goes elsewhere. Its agent makes another once the engine starts."""
        await self._worker.set_resources(**{resource_of(self.options.info): 0})
        while self.busy.activity.state != "idle":
            await asyncio.sleep(0.1)
        await asyncio.sleep(_BEFORE_LEAVING_S)
        await self._worker.close_gracefully(restart=False, reason="its engine does not start")

    def _run_one(self, session: Session) -> SessionOutcome:
        self._note_begin(session)
        tasks = tuple(self._with_workload(task) for task in session.tasks)
        keys = [task.workload_key for task in tasks]
        known = patiently("reading records", lambda: self.records.load(keys), self._patience_s)
        self._fetch_samples(session.run_id)
        placed = replace(session, tasks=tasks)
        records = [record for found in known.values() for record in found if counts_for(record, session.settings)]
        try:
            outcome = run_session(self.host, placed, records)
        finally:
            if not self.host.pending:
                note_stored(get_client(), self.options.name)
        try:
            self.samples.publish_session(session.run_id, session.session_id)
        except StoreError as error:
            logger.warning("%s; other agents do without what this session learned", error)
        return replace(outcome, session=session)

    def _note_begin(self, session: Session) -> None:
        """Let everybody know that this agent begins; those that are away with trials of the same tasks come back first.

        Their last trials are in their journals, which they store before they join again.
        """
        client = get_client()
        path = ["tunewright", session.run_id, session.session_id]
        begun: list[str] = list(client.get_metadata(path, default=[]))
        client.set_metadata(path, [*begun, self.options.name])
        keys = [task.workload_key for task in session.tasks]
        deadline = time.monotonic() + _RECOVERY_S
        while missing := missing_agents(client, workloads=keys):
            self.busy.say(f"{missing[0]} was at the same task and may come back")
            if time.monotonic() > deadline:
                for name in missing:
                    note_stored(client, name)
            time.sleep(0.5)
        note_unstored(client, self.options.name, session.run_id, keys)

    def _with_workload(self, task: TuningTask) -> TuningTask:
        """The task with its workload's IR on this machine."""
        path = self.options.folder / "workloads" / self.options.info.engine / f"{task.workload_key}.json"
        if not path.exists():
            data = patiently(
                "fetching a workload", lambda: self.records.get_workload(task.workload_key), self._patience_s
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            incoming = path.with_suffix(".part")
            incoming.write_bytes(data)
            incoming.replace(path)
        return replace(task, workload_path=str(path))

    def _fetch_samples(self, run_id: str) -> None:
        """What the cost models of other agents and nights have learned; a session can do without it."""
        if time.monotonic() - self._samples_at < _SAMPLES_EVERY_S and run_id == self._last_run:
            return
        try:
            if run_id != self._last_run:
                self.samples.forget_sessions(_KEPT_S)
                self._prune()
                self.samples.fetch()
            self.samples.fetch_live(run_id)
        except StoreError as error:
            logger.warning("%s; the cost model starts from what is on this machine", error)
        self._samples_at, self._last_run = time.monotonic(), run_id

    def _prune(self) -> None:
        """Remove what was fetched to run it once, and what sessions were given to read."""
        for kind in ("transit", "known"):
            for path in (self.options.folder / kind).glob("*"):
                if path.stat().st_mtime < time.time() - _KEPT_S:
                    shutil.rmtree(path, ignore_errors=True)
                    with suppress(OSError):
                        path.unlink(missing_ok=True)

    def _freshen(self, run_id: str) -> None:
        if run_id != self._last_run and time.monotonic() - self._engine_started > _ENGINE_AGE_S:
            self.engine.restart()
            self._engine_started = time.monotonic()


class AgentPlugin(WorkerPlugin):  # type: ignore[misc]
    """Makes the Dask worker that it is given to an agent. Travels to the worker's process as it is made."""

    name = PLUGIN

    def __init__(self, options: AgentOptions) -> None:
        self.options = options
        self.running: Running | None = None

    async def setup(self, worker: Worker) -> None:
        """Before the worker joins: its engine starts, and what a dead predecessor measured is stored."""
        # Ctrl-C in a terminal reaches this process too; what to do about it is the nanny's.
        with suppress(ValueError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        for module in self.options.modules:
            await asyncio.to_thread(importlib.import_module, module)
        self.running = await asyncio.to_thread(Running, self.options, worker)
        described = describe_agent(self.options.info, machine())
        running = self.running
        worker.startup_information[STARTUP_KEY] = lambda _: described
        worker.metrics[STARTUP_KEY] = lambda _: to_plain(running.busy.activity)
        await asyncio.to_thread(running.recover)

    def teardown(self, worker: Worker) -> None:  # noqa: ARG002 - Dask's signature
        """The engine ends with the worker."""
        if self.running is not None:
            self.running.close()


def machine() -> str:
    """Operating system and processor: what decides whether code for one machine loads on another."""
    return f"{sys.platform}-{platform.machine()}"


def this_agent() -> Running | None:
    """The agent that the calling code runs on; None outside of one."""
    try:
        worker = get_worker()
    except ValueError:
        return None
    return _running(worker)


async def hand_back(dask_worker: Worker) -> None:
    """For ``Client.run``: the agent there gives its work back."""
    running = _running(dask_worker)
    if running is not None:
        await running.hand_back()


def is_busy_with(run_id: str, dask_worker: Worker) -> bool:
    """For ``Client.run``: does the agent there work for this run?"""
    running = _running(dask_worker)
    return running is not None and running.busy.activity.run_id == run_id


def on_agent(work: Callable[[Running, Any], Any], argument: Any) -> Any:
    """``work`` on the agent that the caller runs on."""
    running = this_agent()
    if running is None:
        raise FleetError("this runs on agents only")
    running.busy.begin("verify", "", "a finished artifact")
    try:
        return work(running, argument)
    finally:
        running.busy.end()


def _running(worker: Worker) -> Running | None:
    plugin = worker.plugins.get(PLUGIN)
    return plugin.running if isinstance(plugin, AgentPlugin) else None


def _nothing(session: Session) -> SessionResult:
    return SessionResult(session.session_id, session.phase, 0, {}, {}, note="handed back")


def options_for(child: ChildOptions, info: EngineInfo, name: str, modules: tuple[str, ...]) -> AgentOptions:
    """The agent's options; its files lie in a folder of its own, since agents share a machine's home."""
    child = dataclasses.replace(child, step_timeout_s=min(child.step_timeout_s, settings().session_timeout_s))
    folder = settings().home / "agents" / name.rpartition("/")[2].replace(":", "-")
    return AgentOptions(name, child, info, folder, modules)
