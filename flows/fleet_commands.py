"""The commands of whoever runs a fleet: ``scheduler``, ``agent``, ``agents``, ``certs``."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flows.command_line import one_line_errors, prepare_prefect
from tasks.errors import DeviceBusy, InputError

if TYPE_CHECKING:
    from infra.cluster import Agent
    from tasks.engines.child import ChildOptions

console = Console()
#: What the scheduler and agents read from runs needs these; imported on demand they would hold everybody up.
_MODULES = ("flows.tune_model", "prefect_dask")

SchedulerOption = Annotated[str, typer.Option(help="tls://host:port; by default TUNEWRIGHT_SCHEDULER.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    for command in (scheduler, agent, agents, certs):
        app.command()(command)


def scheduler(
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback only with TLS.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8786,
) -> None:
    """Be the fleet's scheduler, which agents and runs connect to."""
    from infra.cluster import serve_scheduler
    from infra.settings import settings

    with one_line_errors(False):
        prepare_prefect(False)
        for module in _MODULES:
            importlib.import_module(module)
        asyncio.run(serve_scheduler(host, port, settings().certificates))


def agent(
    device: Annotated[str, typer.Option(help="cuda:0, cores such as cpu:0-3, or cpu for all.")],
    scheduler: SchedulerOption = "",
    target: Annotated[str, typer.Option(help="By default what the device is; else TVM's JSON.")] = "",
    engine: Annotated[str, typer.Option(help="relax or relay.")] = "relax",
) -> None:
    """Measure on one device for every run that asks, until stopped; Ctrl-C finishes the trial first."""
    with one_line_errors(False):
        address = _address(scheduler)
        inside = _bind(device)
        _refuse_busy(device, inside)
        prepare_prefect(False)
        from infra.cluster import agent_name
        from tasks.agent import options_for
        from tasks.agent_process import serve_agent
        from tasks.engines.child import EngineChild

        child = _child_options(inside, target, engine)
        with EngineChild(child) as tried:
            info = tried.describe()
        console.print(f"{device} offers {info.target.key} with TVM {info.tvm_version}", highlight=False)
        options = options_for(child, info, agent_name(device), _MODULES)
        asyncio.run(serve_agent(options, address, lambda text: console.print(text, highlight=False)))


def agents(
    scheduler: SchedulerOption = "",
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON.")] = False,
) -> None:
    """List the agents: device, target, what each is doing, trials a minute, failures."""
    from infra.cluster import connect, list_agents
    from infra.settings import settings

    with one_line_errors(False):
        client = connect(_address(scheduler), settings().certificates)
        try:
            found = list_agents(client)
        finally:
            client.close()
        if as_json:
            rows = [{**dataclasses.asdict(a), "resource": a.resource} for a in found]
            console.print(json.dumps(rows), highlight=False, markup=False, soft_wrap=True)
        else:
            console.print(_table(found))


def certs(
    folder: Annotated[Path, typer.Argument(help="Where to write them; keep ca.key where nobody else reads it.")],
    host: Annotated[list[str] | None, typer.Option(help="Name or address of a machine of the fleet.")] = None,
) -> None:
    """Make the certificates with which scheduler, agents and runs know one another."""
    from infra.certificates import make_certificates

    with one_line_errors(False):
        for path in make_certificates(folder, host or ["localhost", "127.0.0.1", socket.gethostname()]):
            console.print(f"{path}", highlight=False, soft_wrap=True)
        console.print(
            "copy ca.pem, scheduler.pem and scheduler.key to the scheduler, ca.pem, agent.pem and agent.key to every "
            "agent and to where runs start, and name their folder with TUNEWRIGHT_TLS_DIR", highlight=False,
        )  # fmt: skip


def _address(given: str) -> str:
    from infra.settings import settings

    address = given or settings().scheduler
    if not address:
        raise InputError("no scheduler is named: give --scheduler tls://host:port, or set TUNEWRIGHT_SCHEDULER")
    return address


def _bind(device: str) -> str:
    """Bind this process and all that it starts to ``device``; its name from inside. Raises InputError."""
    kind, _, place = device.partition(":")
    first, _, last = place.partition("-")
    if device == "cpu":  # a container's cores, whichever they are
        return device
    if kind == "cpu" and first.isdigit() and (not last or last.isdigit()):
        cores = set(range(int(first), int(last or first) + 1))
        if not cores <= os.sched_getaffinity(0):
            raise InputError(f"the cores of {device} are not all on this machine: it has {_cores()}")
        os.sched_setaffinity(0, cores)
        return device
    if kind == "cuda" and place.isdigit():
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        if visible and int(place) >= len(visible):
            raise InputError(f"{device} is none of the devices in CUDA_VISIBLE_DEVICES={','.join(visible)}")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(place)] if visible else place
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        return "cuda:0"
    raise InputError(f"--device {device} is neither a GPU such as cuda:0 nor cores such as cpu:0-3, or cpu for all")


def _refuse_busy(device: str, inside: str) -> None:
    """Raises DeviceBusy where somebody uses the device now, whoever that is."""
    from tasks.engines.measuring.device_lock import DeviceLock

    lock = DeviceLock(inside)
    lock.acquire("an agent that starts")
    lock.release()
    smi = shutil.which("nvidia-smi")
    if not device.startswith("cuda") or smi is None:
        return
    query = [smi, "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    listed = subprocess.run(
        [*query, "-i", os.environ["CUDA_VISIBLE_DEVICES"]], capture_output=True, text=True, timeout=30, check=False
    )
    users = [line.strip() for line in listed.stdout.splitlines() if line.strip()] if listed.returncode == 0 else []
    if users:
        raise DeviceBusy(f"{device} is in use: process {'; process '.join(users)}; wait for it, or give another device")


def _child_options(inside: str, target: str, engine: str) -> ChildOptions:
    from infra.settings import settings
    from tasks.engines.child import ChildOptions

    config = settings()
    kind = inside.partition(":")[0]
    return ChildOptions(
        engine=engine, python=config.python_of(engine), target=target or kind, device=inside,
        extra_environment=config.engine_environment(engine),
        threads=len(os.sched_getaffinity(0)) if kind == "cpu" else config.core_count,
        start_timeout_s=config.engine_start_timeout_s, step_timeout_s=config.step_timeout_s,
    )  # fmt: skip


def _cores() -> str:
    return ", ".join(map(str, sorted(os.sched_getaffinity(0))))


def _table(found: list[Agent]) -> Table:
    table = Table("agent", "target", "is doing", "for", "trials", "a minute", "failed")
    for one in found:
        now = one.activity
        doing = " ".join(part for part in (now.state, now.task, now.message) if part)
        since = f"{max(0.0, time.time() - now.since):.0f} s" if now.since else ""
        row: list[Any] = [one.name, one.info.target.key, doing if one.offers else f"leaving; {doing}", since]
        table.add_row(*row, str(now.trials), f"{now.trials_per_min:g}", str(now.failures))
    return table
