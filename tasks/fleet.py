"""The flow's side of the fleet: which agents can measure its target, and the errands that are out with them."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import dask
from distributed import KilledWorker, wait
from prefect.context import FlowRunContext

from infra.cluster import ALLOWED_DEATHS, Agent, away, list_agents, missing_agents, resource_of, security
from infra.settings import settings
from tasks.agent import Running, is_busy_with, machine, on_agent
from tasks.errands import Finished, run_errand
from tasks.errors import FleetError, InputError, TunewrightError
from tasks.records import EngineInfo
from tasks.sessions import Errand

logger = logging.getLogger("tunewright")

T = TypeVar("T")
#: Errands an agent, so that the next one is at hand when one ends.
_AHEAD = 2
_AGENTS_EVERY_S = 2.0
_LIMITS_EVERY_S = 5.0
_WAIT_S = 1.0
#: After an errand failed for no reason of its own, pause so long before others are given out.
_PAUSE_S = 2.0


@dataclass
class _Out:
    """An errand that is with an agent or waits for one. ``begun`` are the agents that began its last session."""

    errand: Errand
    prefect: Any
    begun: tuple[str, ...] = ()
    begun_at: float = 0.0

    @property
    def future(self) -> Any:
        """Dask's side of it."""
        return self.prefect.wrapped_future


def flow_client() -> Any:
    """The Dask client of the flow that runs now. Raises FleetError."""
    context = FlowRunContext.get()
    assert context is not None, "asked for outside of a flow"
    try:
        return context.task_runner.client  # type: ignore[attr-defined]
    except AttributeError as error:
        raise FleetError("TUNEWRIGHT_SCHEDULER was set after this process had started: start it anew") from error
    except OSError as error:
        raise FleetError(f"{away(settings().scheduler)}: {error}") from error


def choose_target(agents: list[Agent], wanted: str, engine: str) -> EngineInfo | None:
    """What to tune for: ``wanted`` is cpu, cuda, a target's key or its JSON; None while nobody offers it.

    Raises InputError where several different targets are meant, and where the artifact could not be
    built on this machine.
    """
    fitting = [a for a in agents if a.offers and a.info.engine == engine and _means(wanted, a.info)]
    offered = {agent.resource: agent for agent in fitting}
    if len(offered) > 1:
        names = ", ".join(f"{a.info.target.key} (TVM {a.info.tvm_version}, {a.name})" for a in offered.values())
        raise InputError(f"the agents offer several targets for {wanted!r}: {names}; name one of their keys")
    for agent in offered.values():
        if agent.platform != machine():
            raise InputError(
                f"the agent {agent.name} is {agent.platform} and this machine {machine()}: an artifact for it "
                "cannot be linked here; run the flow on a machine like the agent's"
            )
        return agent.info
    return None


def open_fleet(wanted: str, engine: str, run_id: str, tell: Callable[[str], None]) -> Fleet:
    """The agents that can measure ``wanted``, for the flow that runs now. Raises InputError, FleetError."""
    if not os.environ.get("PREFECT_API_URL"):
        raise InputError(
            "agents report to Prefect's server: set PREFECT_API_URL to one that they reach too, "
            "or unset TUNEWRIGHT_SCHEDULER to tune on this machine"
        )
    security(settings().scheduler, settings().certificates)
    client = flow_client()
    return Fleet(client, wait_for_target(client, wanted, engine, tell), run_id)


def wait_for_target(client: Any, wanted: str, engine: str, tell: Callable[[str], None]) -> EngineInfo:
    """``choose_target``, waiting for agents to come. Raises InputError, FleetError."""
    deadline, told = time.monotonic() + settings().outage_patience_s, False
    while True:
        agents = list_agents(client)
        info = choose_target(agents, wanted, engine)
        if info is not None:
            return info
        there = ", ".join(f"{a.name} ({a.info.target.key})" for a in agents) or "none"
        message = f"no agent offers the target {wanted!r}; agents are: {there}"
        if time.monotonic() > deadline:
            raise FleetError(f"{message}; start 'tunewright agent' where the device is")
        if not told:
            tell(f"{message}; waiting")
            told = True
        time.sleep(_AGENTS_EVERY_S)


@dataclass
class Fleet:
    """The agents that offer one target, as one run uses them: the ``Hands`` of a run that has a scheduler."""

    client: Any
    info: EngineInfo
    run_id: str
    priority: int = 0
    _out: list[_Out] = field(default_factory=list)
    _agents: list[Agent] = field(default_factory=list)
    _agents_at: float = -1e9
    _limits_at: float = -1e9
    _alone_since: float = 0.0
    _failing_since: float = 0.0
    _paused_until: float = 0.0

    def present(self) -> list[Agent]:
        """The agents that offer the target, as of some seconds ago."""
        if time.monotonic() - self._agents_at > _AGENTS_EVERY_S:
            with suppress(FleetError):  # a scheduler that does not answer is noticed by the errands
                mine = resource_of(self.info)
                self._agents = [a for a in list_agents(self.client) if a.offers and a.resource == mine]
            self._agents_at = time.monotonic()
        return self._agents

    def agents(self) -> int:
        """See Hands."""
        most = settings().agents_per_run
        return min(len(self.present()), most) if most else len(self.present())

    def room(self) -> int:
        """See Hands."""
        if self.agents():
            self._alone_since = 0.0
        else:
            self._alone_since = self._alone_since or time.monotonic()
            if time.monotonic() - self._alone_since > settings().outage_patience_s:
                raise FleetError(f"no agent offers {self.info.target.key} any more; start 'tunewright agent'")
        if time.monotonic() < self._paused_until:
            return 0
        # Where the agents are limited, so is what is out: nobody may take what waits.
        ahead = 1 if self.agents() < len(self.present()) else _AHEAD
        return ahead * self.agents() - len(self._out)

    def submit(self, errand: Errand) -> None:
        """See Hands."""
        with dask.annotate(resources={resource_of(self.info): 1}, priority=self.priority):
            self._out.append(_Out(errand, run_errand.submit(errand.title, errand)))

    def out(self) -> tuple[Errand, ...]:
        """See Hands."""
        return tuple(out.errand for out in self._out)

    def wait(self) -> list[Finished]:
        """See Hands. Raises InputError and SetupError of the agents that are not worth another try."""
        self._end_overdue()
        if self._out:
            with suppress(TimeoutError, CancelledError), self.client.as_current():
                wait([out.future for out in self._out], timeout=_WAIT_S, return_when="FIRST_COMPLETED")
        else:
            time.sleep(_WAIT_S)
        over = [out for out in self._out if out.future.done()]
        self._out = [out for out in self._out if not out.future.done()]
        return [self._finish(out) for out in over]

    def on_one(self, work: Callable[[Running, Any], T], argument: Any) -> T:
        """``work(running agent, argument)`` on one agent, as an errand of its own. Raises what it raises."""
        while not self.room() and not self.present():
            time.sleep(_AGENTS_EVERY_S)
        future = self.client.submit(
            on_agent, work, argument, resources={resource_of(self.info): 1}, priority=self.priority, pure=False
        )
        try:
            result: T = future.result()
            return result
        except KilledWorker as error:
            raise FleetError(f"{ALLOWED_DEATHS} agents died over the artifact of this model: {error}") from error
        finally:
            future.release()

    def wait_for_leftovers(self, run_id: str, limit_s: float) -> None:
        """Until no agent works for ``run_id``, a run that has died, and none is away with trials of it.

        Its last trials are stored then.
        """
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            # First those that are away: one that comes back in between is seen as busy or has stored all.
            missing = missing_agents(self.client, run_id)
            busy = self.client.run(is_busy_with, run_id, on_error="ignore")
            if not missing and not any(busy.values()):
                return
            time.sleep(1.0)

    def close(self) -> None:
        """Give up what is out; agents notice and end after the trial in flight."""
        with suppress(Exception):
            self.client.cancel([out.future for out in self._out], force=True)
            self.client.set_metadata(["tunewright", self.run_id], {})
        self._out = []

    def _finish(self, out: _Out) -> Finished:
        try:
            outcomes = out.prefect.result()
        except KilledWorker:
            self._note_begun([out])
            # One that waited behind another's poison is not poisonous itself.
            poisonous = len(out.begun) >= ALLOWED_DEATHS
            return self._failed(out, f"{len(out.begun)} agents died over it", poisonous)
        except TunewrightError as error:
            if not error.retried:
                raise
            return self._failed(out, str(error))
        except CancelledError:
            return self._failed(out, "it was cancelled")
        except Exception as error:
            # Prefect's client or Dask, which a restart of theirs may cure; the pause limits how often.
            return self._failed(out, f"{type(error).__name__}: {error}")
        finally:
            out.future.release()
        self._failing_since = 0.0
        return Finished(out.errand, outcomes)

    def _failed(self, out: _Out, why: str, poisonous: bool = False) -> Finished:
        logger.warning("%s: %s", out.errand.title, why)
        if poisonous:
            return Finished(out.errand, failure=why, poisonous=True)
        self._paused_until = time.monotonic() + _PAUSE_S
        self._failing_since = self._failing_since or time.monotonic()
        if time.monotonic() - self._failing_since > settings().outage_patience_s:
            raise FleetError(f"nothing that was given to agents has come back well for long: {why}")
        return Finished(out.errand, failure=why)

    def _end_overdue(self) -> None:
        """Give up errands whose agent takes too long, and have that agent's worker started anew."""
        if time.monotonic() - self._limits_at < _LIMITS_EVERY_S:
            return
        self._limits_at = time.monotonic()
        self._note_begun(self._out)
        limit_s = settings().session_timeout_s
        for out in self._out:
            if not out.begun_at or time.monotonic() - out.begun_at < limit_s * len(out.errand.sessions):
                continue
            logger.warning("%s takes longer than %.0f s on %s: given up", out.errand.title, limit_s, out.begun[-1])
            out.future.cancel(force=True)
            addresses = [agent.address for agent in self._agents if agent.name == out.begun[-1]]
            with suppress(Exception):
                self.client.restart_workers(addresses, timeout=60, raise_for_error=False)

    def _note_begun(self, outs: list[_Out]) -> None:
        try:
            begun: Mapping[str, list[str]] = self.client.get_metadata(["tunewright", self.run_id], default={})
        except (OSError, RuntimeError):
            return
        for out in outs:
            names = [name for s in out.errand.sessions for name in begun.get(s.session_id, ())]
            last = [tuple(begun[s.session_id]) for s in out.errand.sessions if s.session_id in begun][-1:]
            if len(names) and (not out.begun_at or (last and last[0] != out.begun)):
                out.begun, out.begun_at = last[0], time.monotonic()


def _means(wanted: str, info: EngineInfo) -> bool:
    """Is ``info``'s target what the user calls ``wanted``?"""
    target = info.target
    if wanted.lstrip().startswith("{"):
        with suppress(ValueError):
            spec = json.loads(target.spec)
            return all(spec.get(key) == value for key, value in json.loads(wanted).items())
        return False
    return wanted == target.key or (wanted, target.kind) in (("cpu", "llvm"), ("cuda", "cuda"))
