"""Who runs sessions: this process, or agents. Either way an errand is a Prefect task that gives its outcomes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Protocol

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.run import run_of
from tasks.sessions import Errand, SessionOutcome, run_session


@dataclass(frozen=True)
class Finished:
    """An errand that is over: its outcomes, or why there are none. ``poisonous``: it killed its agents."""

    errand: Errand
    outcomes: tuple[SessionOutcome, ...] = ()
    failure: str = ""
    poisonous: bool = False


class Hands(Protocol):
    """What runs errands."""

    def agents(self) -> int:
        """How many devices work for this run now."""

    def room(self) -> int:
        """How many errands may be given out now. Raises FleetError where nobody has come for too long."""

    def submit(self, errand: Errand) -> None:
        """Give an errand out. In the own process it runs now, and its errors are raised."""

    def out(self) -> tuple[Errand, ...]:
        """The errands whose end was not told by ``wait``."""

    def wait(self) -> list[Finished]:
        """Those that have ended; returns after a second at most, so that the caller sees agents come and go.

        Raises what an errand raises that no other agent could do better.
        """


class OwnHands:
    """This process: one errand at a time, run while it is submitted."""

    def __init__(self) -> None:
        self._finished: list[Finished] = []

    def agents(self) -> int:
        """See Hands."""
        return 1

    def room(self) -> int:
        """See Hands."""
        return 0 if self._finished else 1

    def submit(self, errand: Errand) -> None:
        """See Hands. Raises what sessions raise."""
        self._finished.append(Finished(errand, run_errand(errand.title, errand)))

    def out(self) -> tuple[Errand, ...]:
        """See Hands."""
        return tuple(finished.errand for finished in self._finished)

    def wait(self) -> list[Finished]:
        """See Hands."""
        finished, self._finished = self._finished, []
        return finished


@task(cache_policy=NO_CACHE, name="session", task_run_name="{title}")
def run_errand(title: str, errand: Errand) -> tuple[SessionOutcome, ...]:  # noqa: ARG001 - names the run
    """The sessions of ``errand`` on the device at hand: the agent's that this runs on, or this process's own."""
    if "distributed" in sys.modules:
        from tasks.agent import this_agent

        agent = this_agent()
        if agent is not None:
            return agent.run(errand)
    run = run_of(errand.run_id)
    outcomes = []
    for session in errand.sessions:
        known = [record for one in session.tasks for record in run.book.of(one.workload_key)]
        outcomes.append(run_session(run.host, session, known))
    return tuple(outcomes)
