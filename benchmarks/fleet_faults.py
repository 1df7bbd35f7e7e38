"""Faults at random moments of runs with two agents: what is lost, measured twice, or left in a wrong state."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.kills import _write_model
from tasks.engines.measuring.journal import read_journal
from tasks.records import TuningRecord
from tests.fleet.fleet import LocalFleet, local_fleet, stored_records
from tests.flows.command import wait_for
from tests.services import free_port, mlflow_server, prefect_server, s3_server

#: What may happen, and how often in proportion.
KINDS = {"worker": 3, "engine": 3, "flow": 2, "prefect": 1, "mlflow": 1, "s3": 2}
_BUCKET = "tunewright-faults"
_DEVICES = ("cpu:0", "cpu:1")
#: A fault comes within this time after the run's first record since the last one.
SPAN_S = 15.0
#: A service that is stopped is away so long.
AWAY_S = 20.0
_TRIALS = 400
_FINAL_TRIALS = 8
_START_S = 400.0
#: The exit status of a run that does not begin, since a service does not answer; it ends so long after that is back.
_REFUSED = 2
_REFUSAL_S = 10.0
_RUN_S = 1200.0


@dataclass(frozen=True)
class FaultResult:
    """``acknowledged``: records seen in a journal. ``wrong``: what is in a state that it should not be in.

    ``refused``: runs that did not begin, since MLflow or the store did not answer when they were started.
    """

    faults: int
    kinds: dict[str, int]
    acknowledged: int
    stored: int
    lost: int
    doubled: int
    refused: int
    wrong: tuple[str, ...]
    seconds: float


class Gate:
    """A TCP port in front of a service, which can be shut: connections end, new ones are refused."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self._target = host, int(port)
        self.port = free_port()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.open()

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        """Let everybody through."""
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)

    def shut(self) -> None:
        """Be away."""
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(10)

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _shut(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            there_reader, there_writer = await asyncio.open_connection(*self._target)
            self._writers.add(there_writer)
            await asyncio.gather(_pump(reader, there_writer), _pump(there_reader, writer))
        except OSError:
            writer.close()


class Faults:
    """A fleet with its services, and what can be done to them."""

    def __init__(self, fleet: LocalFleet, gates: Mapping[str, Gate]) -> None:
        self.fleet = fleet
        self.gates = gates
        self.command = fleet.command()
        self.flow: subprocess.Popen[str] | None = None
        self.model = 0
        self.seen: set[str] = set()
        self.wrong: list[str] = []
        self.refused = 0
        self._away_until = 0.0
        self._ended = threading.Event()

    def start_flow(self) -> None:
        """Start a run of the model at hand; a run that has ended by itself must have ended well."""
        if self.flow is not None and self.flow.poll() is None:
            return
        if self.flow is not None and self.flow.returncode is not None:
            if self.flow.returncode == 0:
                self.model += 1
            elif self.flow.returncode == _REFUSED and time.monotonic() < self._away_until:
                self.refused += 1  # it was started while a service was away, and said so
            elif self.flow.returncode != -signal.SIGKILL:
                error = self.flow.stderr.read() if self.flow.stderr else ""
                self.wrong.append(f"a run ended with {self.flow.returncode}: {error[-300:]}")
        path = _write_model(self.fleet.folder, self.model)
        self.flow = self.command.start("tune", str(path), "--trials", str(_TRIALS), "--name", "faulty")

    def strike(self, kind: str) -> None:
        """Let it happen."""
        assert self.flow is not None
        with suppress(ProcessLookupError, psutil.Error, AssertionError):  # what is to be killed may be gone already
            if kind in ("worker", "engine"):
                worker = self.fleet.worker(random.choice(_DEVICES))
                victims = [worker] if kind == "worker" else worker.children()
                for victim in victims:
                    victim.kill()
            elif kind == "flow":
                os.killpg(self.flow.pid, signal.SIGKILL)
                self.flow.communicate(timeout=60)
            else:
                self.gates[kind].shut()
                time.sleep(AWAY_S)
                self.gates[kind].open()
                self._away_until = time.monotonic() + _REFUSAL_S

    def watch(self) -> None:
        """Note every record that an agent's journal ever held."""
        while not self._ended.wait(0.2):
            self.look()

    def look(self) -> None:
        """What the journals hold now."""
        for path in self.fleet.folder.glob("home-*/agents/*/journals/*.jsonl"):
            with suppress(OSError):
                self.seen |= {record.record_id for record in read_journal(path)}

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()


def strike_often(faults: int, seed: int, folder: Path) -> FaultResult:
    """Run, strike and go on ``faults`` times; then run to the end once, and count."""
    started, dice = time.monotonic(), random.Random(seed)
    random.seed(seed)
    struck: Counter[str] = Counter()
    with _fleet(folder) as (scene, s3_url):
        watcher = threading.Thread(target=scene.watch, daemon=True)
        watcher.start()
        while struck.total() < faults:
            scene.start_flow()
            before = len(scene.seen)
            wait_for(lambda: len(scene.seen) > before or _is_over(scene), _RUN_S, f"records after {dict(struck)}")  # noqa: B023
            if _is_over(scene):
                continue
            time.sleep(dice.uniform(0.0, SPAN_S))
            kind = dice.choices(list(KINDS), list(KINDS.values()))[0]
            scene.strike(kind)
            struck[kind] += 1
            at = f"{time.time():.1f}"
            print(f"{at}: {struck.total()} of {faults}: {kind}, {len(scene.seen)} records", file=sys.stderr)
        _finish(scene)
        scene.end()
        return _count(scene, s3_url, dict(struck), time.monotonic() - started)


def _finish(scene: Faults) -> None:
    """End the run that goes on, and let a last one say that all is well."""
    if scene.flow is not None and scene.flow.poll() is None:
        os.killpg(scene.flow.pid, signal.SIGKILL)
        scene.flow.communicate(timeout=60)
    scene.fleet.wait_for_agents(*_DEVICES)
    path = _write_model(scene.fleet.folder, scene.model)
    done = scene.command.run("tune", str(path), "--trials", str(_FINAL_TRIALS), "--name", "faulty", timeout_s=_RUN_S)
    if done.returncode != 0:
        scene.wrong.append(f"the last run ended with {done.returncode}: {done.stderr[-1000:]}")
    scene.look()


def _count(scene: Faults, s3_url: str, kinds: dict[str, int], seconds: float) -> FaultResult:
    records = stored_records(s3_url, _BUCKET, "store/records/")
    ids = Counter(record.record_id for record in records)
    # A record that is stored twice is no second measurement.
    tried: defaultdict[tuple[str, str], dict[str, TuningRecord]] = defaultdict(dict)
    for record in records:
        if record.phase == "search":
            tried[record.workload_key, record.candidate_key][record.record_id] = record
    again = [list(found.values()) for found in tried.values() if len(found) > 1]
    doubled = sum(count - 1 for count in ids.values()) + sum(len(found) - 1 for found in again)
    for found in again:
        said = "; ".join(f"{r.session_id} on {r.device} at {r.started_at:.1f}" for r in found)
        print(f"measured again: {found[0].task_name} {found[0].candidate_key}: {said}", file=sys.stderr)
    for record_id in (name for name, count in ids.items() if count > 1):
        print(f"stored twice: {record_id}", file=sys.stderr)
    wrong = (*scene.wrong, *_running_in_mlflow(scene.command.settings["MLFLOW_TRACKING_URI"]))
    return FaultResult(
        sum(kinds.values()),
        kinds,
        len(scene.seen),
        len(ids),
        len(scene.seen - set(ids)),
        doubled,
        scene.refused,
        wrong,
        seconds,
    )


def _running_in_mlflow(url: str) -> list[str]:
    """Runs that are still running though nobody works on them."""
    from mlflow import MlflowClient

    client = MlflowClient(url)
    experiment = client.get_experiment_by_name("tunewright")
    found = client.search_runs([experiment.experiment_id], "attributes.status = 'RUNNING'", max_results=1000)
    return [f"MLflow: {run.info.run_name} is running" for run in found]


@contextmanager
def _fleet(folder: Path) -> Iterator[tuple[Faults, str]]:
    """Services behind gates, a scheduler, two agents."""
    with ExitStack() as stack:
        for name in ("mlflow", "prefect"):
            (folder / name).mkdir(parents=True)
        s3_url = stack.enter_context(s3_server(_BUCKET))
        mlflow_url = stack.enter_context(mlflow_server(folder / "mlflow", _START_S))
        prefect_url = stack.enter_context(prefect_server(folder / "prefect", _START_S)).removesuffix("/api")
        gates = {"s3": Gate(s3_url), "mlflow": Gate(mlflow_url), "prefect": Gate(prefect_url)}
        settings = {
            "PREFECT_API_URL": f"{gates['prefect'].url}/api", "MLFLOW_TRACKING_URI": gates["mlflow"].url,
            "AWS_ENDPOINT_URL": gates["s3"].url, "TUNEWRIGHT_STORE": f"s3://{_BUCKET}/store",
        }  # fmt: skip
        fleet = stack.enter_context(local_fleet(folder, settings))
        for device in _DEVICES:
            fleet.start_agent(device)
        fleet.wait_for_agents(*_DEVICES)
        scene = Faults(fleet, gates)
        try:
            yield scene, s3_url
        finally:
            scene.end()
            if scene.flow is not None and scene.flow.poll() is None:
                os.killpg(scene.flow.pid, signal.SIGKILL)


def _is_over(scene: Faults) -> bool:
    return scene.flow is None or scene.flow.poll() is not None


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
