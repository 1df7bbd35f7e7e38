"""Throughput of many devices against one: simulated devices, the rest of the fleet real.

The devices sleep as long as recorded measurements took. Scheduler, TLS, Prefect, planning, the agents'
sessions, journals and store are what a fleet has; they share this machine's cores, where a fleet's agents
have their own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from benchmarks.simulated_engine import INFO
from infra.certificates import make_certificates
from tasks.records import FusedSubgraph, Measurement, MeasureSettings, TensorSpec, TuningRecord, TuningTask
from tests.services import free_port, prefect_server

ROOT = Path(__file__).parent.parent
#: Simulated agents in one process: their event loops share an interpreter.
_TOGETHER = 16
_TASKS = 96
_START_S = 300.0
#: The parts of a fleet and what is found in their command lines.
_PARTS = {
    "flow": "fleet_simulated run", "agents": "fleet_simulated agents", "devices": "simulated_engine",
    "scheduler": "flows.cli scheduler", "Prefect server": "prefect server start",
}  # fmt: skip


@dataclass(frozen=True)
class Throughput:
    """Trials a second of ``agents`` devices, and the share of this machine's cores that all of it took.

    ``gaps_s``: the median and the 95th percentile of what lay between a session's last trial and the next
    session's first on the same device, its search of ``SEARCH_S`` included. ``cpu_s``: CPU seconds that each
    part of the fleet took for a session.
    """

    agents: int
    trials_per_s: float
    busy: float
    doubled: int
    gaps_s: tuple[float, float]
    cpu_s: dict[str, float]


def throughputs(counts: Sequence[int], seconds: float) -> list[Throughput]:
    """Tune for ``seconds`` with each number of devices."""
    with tempfile.TemporaryDirectory(prefix="tunewright-fleet-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "prefect").mkdir()
        with prefect_server(folder / "prefect", _START_S) as prefect_url:
            return [_throughput(folder / str(count), prefect_url, count, seconds) for count in counts]


def _throughput(folder: Path, prefect_url: str, agents: int, seconds: float) -> Throughput:
    folder.mkdir()
    make_certificates(folder / "tls", ["127.0.0.1"])
    address = f"tls://127.0.0.1:{free_port()}"
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m benchmarks.simulated_engine "$3"\n')
    python.chmod(0o755)
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "PREFECT_API_URL": prefect_url, "TUNEWRIGHT_SCHEDULER": address,
        "TUNEWRIGHT_TLS_DIR": str(folder / "tls"), "TUNEWRIGHT_HOME": str(folder / "home"),
        "TUNEWRIGHT_STORE": str(folder / "store"), "TUNEWRIGHT_RELAX_PYTHON": str(python),
        "PREFECT_LOGGING_TO_API_ENABLED": "false", "PREFECT_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    with ExitStack() as stack:
        start = lambda *line: stack.enter_context(_process(line, environment, folder))  # noqa: E731
        start("-m", "flows.cli", "scheduler", "--port", address.rpartition(":")[2])
        for first in range(0, agents, _TOGETHER):
            start("-m", __spec__.name, "agents", str(first), str(min(_TOGETHER, agents - first)))
        line = [sys.executable, "-m", __spec__.name, "run", str(agents), str(seconds)]
        done = subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the run with {agents} devices failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    found = Throughput(**json.loads(done.stdout.strip().splitlines()[-1]))
    print(f"{found}", file=sys.stderr)
    return found


class _process:
    """A part of the fleet, ended with all that it started."""

    def __init__(self, line: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        log = (folder / f"{line[2]}-{free_port()}.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, *line], env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        below = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        for process in [*below, self._process]:
            process.kill()
        self._process.wait(30)


def serve_agents(first: int, count: int) -> None:
    """Be ``count`` agents, in this process."""
    from distributed import Worker

    from infra.cluster import resource_of, security
    from infra.settings import settings
    from tasks.agent import AgentOptions, AgentPlugin
    from tasks.engines.child import ChildOptions

    config = settings()

    async def serve() -> None:
        tls = security(config.scheduler, config.certificates)
        workers = []
        for number in range(first, first + count):
            child = ChildOptions("relax", str(config.relax_python), "cpu", f"cpu:{number}", 1)
            folder = config.home / "agents" / f"sim-{number}"
            name = f"simulated/{number}"
            options = AgentOptions(name, child, replace(INFO, device=f"cpu:{number}"), folder, ("prefect_dask",))
            workers.append(
                Worker(
                    config.scheduler, nthreads=1, name=name, resources={resource_of(INFO): 1}, memory_limit=0,
                    security=tls, plugins=(AgentPlugin(options),), local_directory=str(folder), death_timeout=120,
                    dashboard=False, dashboard_address="127.0.0.1:0",
                )
            )  # fmt: skip
        await asyncio.gather(*workers)
        await asyncio.gather(*(worker.finished() for worker in workers))

    asyncio.run(serve())


def run_once(agents: int, seconds: float) -> Throughput:
    """Tune made-up tasks for ``seconds`` with as many agents, as a flow does it."""
    from prefect import flow
    from prefect_dask import DaskTaskRunner

    from infra.cluster import security
    from infra.object_store import open_store
    from infra.record_store import RecordStore
    from infra.settings import settings
    from tasks.engines.child import ChildOptions
    from tasks.fleet import open_fleet
    from tasks.run import TuningRun
    from tasks.tune import Budget, search

    config = settings()
    runner = DaskTaskRunner(
        address=config.scheduler, client_kwargs={"security": security(config.scheduler, config.certificates)}
    )

    @flow(name="simulated", task_runner=runner, validate_parameters=False)
    def simulated() -> Throughput:
        fleet = open_fleet("cpu", "relax", f"simulated-{agents}", lambda _: None)
        deadline = time.monotonic() + _START_S
        while fleet.agents() < agents and time.monotonic() < deadline:
            time.sleep(0.5)
        store = open_store(config.store_url)
        child = ChildOptions("relax", str(config.relax_python), "cpu", "cpu:0", 1)
        run = TuningRun(
            f"simulated-{agents}", child, config.home, store, MeasureSettings(), 0, lambda _: None,
            store_url=config.store_url,
        )  # fmt: skip
        run.fleet = run.hands = fleet
        run.records = RecordStore(store, INFO.engine, INFO.tvm_version, INFO.target.key)
        run.tasks = tuple(_made_up(number) for number in range(_TASKS))
        for task in run.tasks:
            run.records.put_workload(task.workload_key, b"{}")
            run.book.add(_default(task))
        psutil.cpu_percent()
        before, started = _cpu_by_part(), time.time()
        search(run, lambda: Budget(stop_at=started + seconds))
        busy, elapsed = psutil.cpu_percent() / 100, time.time() - started
        sessions = max(1, len({record.session_id for record in run.book.of_run(run.run_id)}))
        cpu_s = {part: (spent - before.get(part, 0.0)) / sessions for part, spent in _cpu_by_part().items()}
        measured = run.book.of_run(run.run_id)
        stored = [record for found in run.records.load().values() for record in found]
        distinct = {record.candidate_key for record in stored if record.phase == "search"}
        fleet.close()
        doubled = len(measured) - len(distinct)
        return Throughput(agents, len(measured) / elapsed, busy, doubled, _gaps_s(measured), cpu_s)

    return simulated()


def _cpu_by_part() -> dict[str, float]:
    """CPU seconds so far of this process and of those that its environment's fleet and Prefect server consist of."""
    port = os.environ["PREFECT_API_URL"].split(":")[2].split("/")[0]
    spent: dict[str, float] = defaultdict(float)
    for process in psutil.process_iter(["cmdline", "cpu_times"]):
        line = " ".join(process.info["cmdline"] or [])
        part = next((name for name, text in _PARTS.items() if text in line), "")
        try:
            theirs = process.environ().get("TUNEWRIGHT_HOME") == os.environ["TUNEWRIGHT_HOME"]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if part and (theirs or (part == "Prefect server" and port in line)):
            spent[part] += process.info["cpu_times"].user + process.info["cpu_times"].system
    return dict(spent)


def _gaps_s(records: Sequence[TuningRecord]) -> tuple[float, float]:
    """Median and 95th percentile; of none at all, zeros."""
    by_device: dict[str, list[TuningRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.started_at):
        by_device[record.device].append(record)
    gaps = sorted(
        after.started_at - before.started_at - before.measurement.run_s
        for of_device in by_device.values()
        for before, after in itertools.pairwise(of_device)
        if before.session_id != after.session_id and before.measurement
    )
    return (statistics.median(gaps), gaps[int(0.95 * (len(gaps) - 1))]) if gaps else (0.0, 0.0)


def _made_up(number: int) -> TuningTask:
    key = f"{number:016x}"
    tensor = TensorSpec("x", (1, 8, 28, 28), "float32")
    graph = FusedSubgraph(
        f"task{number}", key, key, ("conv2d",), "conv2d", (tensor,), (tensor,), "float32", "float32", 1e6, 100_000, 1
    )
    return TuningTask(key, graph.name, INFO.target.key, 1, 1e6, 100_000, 1 / _TASKS, "", graph)


def _default(task: TuningTask) -> TuningRecord:
    latency_us = 5000.0 + int(task.workload_key, 16)
    return TuningRecord(
        record_id=f"default-{task.workload_key}", run_id="before", session_id="before", engine=INFO.engine,
        tvm_version=INFO.tvm_version, target_key=INFO.target.key, workload_key=task.workload_key,
        task_name=task.name, candidate_key="default", trial=0, phase="default", schedule="", started_at=1.0,
        device="cpu:0", host="simulated", measurement=Measurement((latency_us,), MeasureSettings(), 0.1, 0.1),
    )  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "agents":
        serve_agents(int(sys.argv[2]), int(sys.argv[3]))
    else:
        print(json.dumps(run_once(int(sys.argv[2]), float(sys.argv[3])).__dict__))
