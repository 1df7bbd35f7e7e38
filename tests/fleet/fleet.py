"""A fleet on this machine: a scheduler with TLS and agents, each a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import psutil

from infra.certificates import make_certificates
from tasks.engines.wire import from_line
from tasks.records import TuningRecord
from tests.flows.command import Command, wait_for
from tests.services import free_port

#: An agent's engine imports TVM twice before it joins, on cores that may be busy.
START_S = 240.0


@dataclass
class LocalFleet:
    """Everything below ``folder``; ``settings`` are the environment of the runs as well."""

    folder: Path
    settings: dict[str, str]
    address: str
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def command(self, name: str = "flow") -> Command:
        """``tunewright`` as a run's machine calls it, with a home of its own."""
        return Command(self.folder / name, {**self.settings, "TUNEWRIGHT_SCHEDULER": self.address})

    def start_agent(self, device: str, settings: Mapping[str, str] | None = None) -> None:
        """Start ``tunewright agent``; it has joined when ``listed`` shows it."""
        self._start(device, ["agent", "--device", device, "--scheduler", self.address], settings or {})

    def start_scheduler(self) -> None:
        """Start ``tunewright scheduler``."""
        port = self.address.rpartition(":")[2]
        self._start("scheduler", ["scheduler", "--port", port], {})

    def listed(self) -> dict[str, dict[str, Any]]:
        """What ``tunewright agents`` says, by device; nothing while no scheduler answers."""
        done = self.command().run("agents", "--json", timeout_s=120)
        if done.returncode != 0:
            return {}
        return {agent["name"].rpartition("/")[2]: agent for agent in json.loads(done.stdout.strip().splitlines()[-1])}

    def wait_for_agents(self, *devices: str) -> None:
        """Return when all of ``devices`` offer their target."""

        def are_there() -> bool:
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} ended:\n{self.log(name)}"
            found = self.listed()
            return all(found.get(device, {}).get("offers") for device in devices)

        wait_for(are_there, START_S, f"agents {devices} have joined")

    def worker(self, device: str) -> psutil.Process:
        """The Dask worker's process of an agent: its nanny's child, whose child is the engine."""
        agent = psutil.Process(self.processes[device].pid)
        for child in agent.children(recursive=True):
            with suppress(psutil.Error):
                if any("relax.worker" in part for part in child.cmdline()):
                    return _parent_outside(child)
        raise AssertionError(f"{device} has no engine:\n{self.log(device)}")

    def log(self, name: str) -> str:
        """What a process printed."""
        return (self.folder / f"{name.replace(':', '-')}.log").read_text()[-4000:]

    def _start(self, name: str, arguments: list[str], settings: Mapping[str, str]) -> None:
        home = self.folder / f"home-{name.replace(':', '-')}"
        environment = {
            **os.environ, **self.settings, "TUNEWRIGHT_HOME": str(home), "COLUMNS": "200",
            "PYTHONPATH": str(Path(__file__).parents[2]), **settings,
        }  # fmt: skip
        with (self.folder / f"{name.replace(':', '-')}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "flows.cli", *arguments], env=environment, cwd=self.folder, text=True,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip


@contextmanager
def local_fleet(folder: Path, settings: Mapping[str, str]) -> Iterator[LocalFleet]:
    """A scheduler, and no agents yet; all processes end with the block."""
    make_certificates(folder / "tls", ["localhost", "127.0.0.1"])
    address = f"tls://127.0.0.1:{free_port()}"
    fleet = LocalFleet(folder, {**settings, "TUNEWRIGHT_TLS_DIR": str(folder / "tls")}, address)
    try:
        fleet.start_scheduler()
        yield fleet
    finally:
        end_processes(list(fleet.processes.values()))


def stored_records(s3_url: str, bucket: str, prefix: str) -> list[TuningRecord]:
    """Every record below ``prefix``, each as often as readers would find it.

    Parts count where no session's object holds their records, and then once.
    """
    client = boto3.session.Session().client("s3", endpoint_url=s3_url)
    whole: list[TuningRecord] = []
    parts: dict[str, TuningRecord] = {}
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for entry in page.get("Contents", []):
            lines = client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read().splitlines()
            found = [from_line(TuningRecord, line) for line in lines]
            if ".part-" in entry["Key"]:
                parts.update((record.record_id, record) for record in found)
            else:
                whole += found
    stored = {record.record_id for record in whole}
    return whole + [record for name, record in parts.items() if name not in stored]


def end_processes(processes: list[subprocess.Popen[str]]) -> None:
    """Kill whole groups, and the engines, which have groups of their own."""
    below = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            below += psutil.Process(process.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
    for left in below:
        with suppress(psutil.NoSuchProcess):
            left.kill()
    psutil.wait_procs(below, 10)


def wait_until(moment: float) -> None:
    """Sleep until ``time.monotonic()`` is ``moment``."""
    time.sleep(max(0.0, moment - time.monotonic()))


def _parent_outside(engine: psutil.Process) -> psutil.Process:
    """The process that started the engine."""
    parent = engine.parent()
    while parent is not None and any("relax.worker" in part for part in parent.cmdline()):
        parent = parent.parent()
    assert parent is not None
    return parent
