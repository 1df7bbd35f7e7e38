"""The Dask cluster of the fleet: its scheduler, connections to it with TLS, and who works in it.

A Dask port without TLS lets anybody run code, so without certificates everything stays on loopback.
``distributed`` is imported by those who need it only: a run on one machine never does.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from tasks.engines.wire import from_plain, to_plain
from tasks.errors import FleetError, InputError
from tasks.records import EngineInfo

DEFAULT_PORT = 8786
#: A session whose agent dies under it so often is given up; its task is quarantined for the run.
ALLOWED_DEATHS = 2
#: An agent that is silent for so long is taken for lost; a hung or cut off machine is noticed only so.
WORKER_TTL_S = 60
_CONNECT_TIMEOUT_S = 15.0
#: What an agent and a run need of the certificates.
_AGENT_FILES = ("ca.pem", "agent.pem", "agent.key")
#: Where an agent's description and its figures stand among what Dask knows of a worker.
STARTUP_KEY = "tunewright"
#: Where the scheduler keeps, by agent, the session that it has begun and not stored yet.
_UNSTORED = "tunewright-unstored"


@dataclass(frozen=True)
class Activity:
    """What an agent is doing. Counts are since its start, ``trials_per_min`` over the last minutes."""

    state: str = "starting"
    run_id: str = ""
    task: str = ""
    since: float = 0.0
    trials: int = 0
    failures: int = 0
    trials_per_min: float = 0.0
    message: str = ""


@dataclass(frozen=True)
class Agent:
    """A worker of the fleet: where it is, what it measures, what it is doing."""

    address: str
    name: str
    info: EngineInfo
    offers: bool
    platform: str
    activity: Activity

    @property
    def resource(self) -> str:
        """What sessions that may run here ask for."""
        return resource_of(self.info)


def resource_of(info: EngineInfo) -> str:
    """The Dask resource of a target: records of another engine or TVM version would not be comparable."""
    return f"target:{info.target.key}@{info.engine}-{info.tvm_version}"


def describe_agent(info: EngineInfo, platform: str) -> dict[str, Any]:
    """What an agent tells the scheduler when it joins, as ``list_agents`` reads it."""
    return {"info": to_plain(info), "platform": platform}


def security(address: str, certificates: Path) -> Any:
    """The TLS context for ``address``; None for plain TCP, which only loopback may use. Raises InputError."""
    if urlparse(address).scheme != "tls":
        if urlparse(address).scheme != "tcp" or not is_loopback(urlparse(address).hostname or ""):
            raise InputError(
                f"the scheduler {address} is no tls:// address: without TLS anybody who reaches the port can run "
                "code, so that plain tcp:// is for 127.0.0.1 only; see 'tunewright certs'"
            )
        return None
    missing = [name for name in _AGENT_FILES if not (certificates / name).is_file()]
    if missing:
        raise InputError(
            f"{address} needs {', '.join(missing)} in {certificates}: copy them from where 'tunewright certs' "
            "made them, or set TUNEWRIGHT_TLS_DIR"
        )
    return _tls(certificates)


def is_loopback(host: str) -> bool:
    """Is ``host`` reachable from this machine only?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def connect(address: str, certificates: Path) -> Any:
    """A Dask client. Raises FleetError, InputError."""
    from distributed import Client

    try:
        return Client(
            address, security=security(address, certificates), timeout=_CONNECT_TIMEOUT_S, set_as_default=False
        )
    except OSError as error:
        raise FleetError(f"{away(address)}: {type(error).__name__}") from error


def away(address: str) -> str:
    """What to say where no scheduler answers."""
    return (
        f"no scheduler answers at {address}: start 'tunewright scheduler' there, check its port and that "
        "both sides have certificates of one authority"
    )


def list_agents(client: Any) -> list[Agent]:
    """The agents that the scheduler knows, by name. Raises FleetError."""
    try:
        workers = client.scheduler_info()["workers"]
    except (OSError, RuntimeError) as error:
        raise FleetError(f"the scheduler does not answer: {error}") from error
    agents = [_agent(address, worker) for address, worker in workers.items() if STARTUP_KEY in worker]
    return sorted(agents, key=lambda agent: agent.name)


def note_unstored(client: Any, agent: str, run_id: str, workloads: Iterable[str]) -> None:
    """Let everybody know that ``agent`` measures ``workloads`` for a run: its last trials are in its journal only."""
    client.set_metadata([_UNSTORED, agent], {"run_id": run_id, "workloads": list(workloads)})


def note_stored(client: Any, agent: str) -> None:
    """All that ``agent`` has measured is in the store, or is not waited for any longer."""
    client.set_metadata([_UNSTORED, agent], {})


def missing_agents(client: Any, run_id: str = "", workloads: Iterable[str] = ()) -> list[str]:
    """Agents that are away with measurements of the run, or of one of ``workloads``, that they may not have stored.

    An agent stores the journals that it left before it joins again. Raises FleetError.
    """
    notes: Mapping[str, Any] = client.get_metadata([_UNSTORED], default={})
    here, wanted = {agent.name for agent in list_agents(client)}, set(workloads)
    return [
        name
        for name, note in notes.items()
        if note and name not in here and (note["run_id"] == run_id or not wanted.isdisjoint(note["workloads"]))
    ]


async def serve_scheduler(host: str, port: int, certificates: Path) -> None:
    """Be the fleet's scheduler until cancelled. Raises InputError, FleetError."""
    import dask
    from distributed import Scheduler

    has_tls = (certificates / "scheduler.key").is_file()
    if not has_tls and not is_loopback(host):
        raise InputError(
            f"without TLS a scheduler listens on 127.0.0.1 only, not on {host}: anybody who reaches its port can "
            "run code. Make certificates with 'tunewright certs', or set TUNEWRIGHT_TLS_DIR"
        )
    protocol = "tls" if has_tls else "tcp"
    dask.config.set({"distributed.scheduler.worker-ttl": f"{WORKER_TTL_S}s"})
    try:
        async with Scheduler(
            host=host, port=port, protocol=protocol, security=_tls(certificates) if has_tls else None,
            allowed_failures=ALLOWED_DEATHS - 1, dashboard=False, dashboard_address="127.0.0.1:0",
        ) as scheduler:  # fmt: skip
            print(f"scheduler at {scheduler.address}", flush=True)  # noqa: T201 - what agents and flows are given
            await scheduler.finished()
    except OSError as error:
        raise FleetError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port") from error


def agent_name(device: str) -> str:
    """How an agent is known: one a device of a machine."""
    return f"{socket.gethostname()}/{device}"


def _agent(address: str, worker: Mapping[str, Any]) -> Agent:
    told = worker[STARTUP_KEY]
    info = from_plain(EngineInfo, told["info"])
    figures = worker.get("metrics", {}).get(STARTUP_KEY) or {}
    activity = from_plain(Activity, figures)
    if time.time() - float(worker.get("last_seen", 0.0)) > WORKER_TTL_S:
        activity = Activity(state="silent", message="it has not been heard of for a while")
    offers = worker.get("status") == "running" and worker.get("resources", {}).get(resource_of(info), 0) >= 1
    return Agent(address, str(worker["name"]), info, offers, str(told["platform"]), activity)


def _tls(certificates: Path) -> Any:
    from distributed import Security

    # Flows and agents show the agent's certificate: both connect to the scheduler, and to each other.
    return Security(
        require_encryption=True, tls_ca_file=str(certificates / "ca.pem"),
        tls_scheduler_cert=str(certificates / "scheduler.pem"), tls_scheduler_key=str(certificates / "scheduler.key"),
        tls_worker_cert=str(certificates / "agent.pem"), tls_worker_key=str(certificates / "agent.key"),
        tls_client_cert=str(certificates / "agent.pem"), tls_client_key=str(certificates / "agent.key"),
    )  # fmt: skip
