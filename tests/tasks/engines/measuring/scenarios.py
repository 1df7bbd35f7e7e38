"""What the tests of the zygote and the pipeline do in a fresh interpreter, with handlers of their own."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from tasks.engines.measuring.pipeline import Job, Outcome, Pipeline, Placement
from tasks.engines.measuring.zygote import Worker, WorkerDied, WorkerError, WorkerOptions, Zygote
from tasks.records import MeasureSettings

CORES = tuple(sorted(os.sched_getaffinity(0)))


def misbehave(job: Mapping[str, Any]) -> None:
    """Do what ``job["do"]`` says, for real."""
    what = job.get("do", "")
    if job.get("say"):
        print(job["say"], file=sys.stderr, flush=True)
    if what == "segfault":
        ctypes.string_at(0)
    elif what == "loop":
        while True:
            pass
    elif what == "eat":
        eaten = []
        while True:
            eaten.append(bytearray(64 << 20))
    elif what == "raise":
        raise ValueError("first line\nthe reason")
    elif what == "exit":
        os._exit(7)
    elif what == "sleep":
        time.sleep(job["seconds"])


def make_builder(options: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Writes its own process id to ``job["stem"]``: that is what it builds."""

    def build(job: Mapping[str, Any]) -> dict[str, str]:
        misbehave(job)
        Path(job["stem"]).write_text(str(os.getpid()))
        return {"path": job["stem"]}

    return build


def make_runner(options: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Answers with two process ids as latencies: its own, and the builder's that it reads from the file."""

    def run(job: Mapping[str, Any]) -> dict[str, Any]:
        misbehave(job)
        return {"latencies_us": (float(os.getpid()), float(Path(job["path"]).read_text())), "cut_short": False}

    return run


def make_anything(options: Mapping[str, Any]) -> Callable[[Any], Any]:
    """For the tests of single workers."""
    if options.get("raise"):
        raise FileNotFoundError(options["raise"])

    def handle(job: Mapping[str, Any]) -> Any:
        misbehave(job)
        if job.get("print"):
            print(job["print"], flush=True)
            os.write(1, b"and straight to descriptor 1\n")
        if job.get("answer") == "unpicklable":
            return lambda: None
        return {"pid": os.getpid(), "cores": sorted(os.sched_getaffinity(0)), "echo": job.get("echo")}

    return handle


def zygote() -> Zygote:
    return Zygote({"build": make_builder, "run": make_runner, "any": make_anything})


def ask(worker: Worker, job: Mapping[str, Any]) -> list[Any]:
    """A worker's answer with what it was: ok, error or died."""
    if "inflate" in job:
        job = {**job, "echo": "x" * job["inflate"]}
    try:
        worker.submit(job)
        return ["ok", worker.result()]
    except WorkerError as error:
        return ["error", error.kind, str(error), error.detail]
    except WorkerDied as error:
        return ["died", str(error)]


def one_worker(jobs: list[dict[str, Any]], options: dict[str, Any], cores: list[int], memory_bytes: int) -> Any:
    """The answers of one worker, and those of another that works beside it."""
    try:
        server = zygote()
    except Exception:  # as an engine's main program does: a fork's error that gets here has escaped
        os._exit(0)
    other = server.spawn(WorkerOptions("any", {}))
    worker = server.spawn(WorkerOptions("any", options, tuple(cores), memory_bytes))
    answers = [ask(worker, job) for job in jobs]
    beside = ask(other, {"echo": "well"})
    for each in (worker, other):
        each.kill()
    server.close()
    return {"answers": answers, "beside": beside}


def many_workers(count: int) -> Any:
    """Open files and processes before and after ``count`` workers have come and gone."""
    server = zygote()
    me, them = psutil.Process(), psutil.Process(server.pid)

    def use_and_kill(how_many: int) -> list[int]:
        for index in range(how_many):
            worker = server.spawn(WorkerOptions("any", {}))
            ask(worker, {"do": "segfault" if index % 2 else ""})
            worker.kill()
        return [me.num_fds(), them.num_fds(), len(them.children())]

    before, after = use_and_kill(2), use_and_kill(count)
    server.close()
    return {"before": before, "after": after, "left": len(me.children(recursive=True))}


def kill_twice() -> Any:
    """How often a worker that died by itself is signalled when it is forgotten: its number may be reused."""
    server = zygote()
    worker = server.spawn(WorkerOptions("any", {}))
    answer = ask(worker, {"do": "exit"})
    signalled: list[int] = []
    real_kill = os.kill
    os.kill = lambda pid, sign: signalled.append(pid) or real_kill(pid, sign)  # type: ignore[assignment]
    worker.kill()
    os.kill = real_kill
    server.close()
    return {"answer": answer, "signalled": worker.pid in signalled}


def workers_at_work() -> None:
    """Two workers loop for ever; never answers. Prints the process ids."""
    server = zygote()
    workers = [server.spawn(WorkerOptions("any", {})) for _ in range(2)]
    for worker in workers:
        worker.submit({"do": "loop"})
    print(json.dumps({"zygote": server.pid, "workers": [worker.pid for worker in workers]}), flush=True)
    signal.pause()


def pipeline_run(
    jobs: list[dict[str, Any]], placement: dict[str, Any], settings: dict[str, Any], rounds: int = 1
) -> Any:
    """``jobs`` through a pipeline: {"key", "build", "run", "keep"}; outcomes in order, and the windows."""
    server = zygote()
    line = Pipeline(server, _placement(placement), MeasureSettings(**settings), "cpu")
    outcomes: list[Outcome] = []
    started: list[str] = []
    for _ in range(rounds):
        line.measure([Job(**job) for job in jobs], started.append, outcomes.append)
    left = [worker.pid for worker in psutil.Process(server.pid).children()]
    line.close()
    server.close()
    return {
        "outcomes": [asdict(outcome) for outcome in outcomes],
        "started": started,
        "windows": asdict(line.windows),
        "workers": len(left),
    }


def stop_after(jobs: list[dict[str, Any]], placement: dict[str, Any], how: str, then: list[dict[str, Any]]) -> Any:
    """What ends a batch: its first build, its first outcome, or an exception; then another batch runs."""
    server = zygote()
    line = Pipeline(server, _placement(placement), MeasureSettings(), "cpu")
    first: list[str] = []
    second: list[str] = []

    def on_first(outcome: Outcome) -> None:
        first.append(outcome.key)
        if how == "raise":
            raise OSError(28, "no space left on device")

    def is_over() -> bool:
        return bool(line.windows.builds if how == "build" else first if how == "outcome" else [])

    raised = ""
    try:
        line.measure([Job(**job) for job in jobs], lambda _: None, on_first, is_over)
    except OSError as error:
        raised = str(error)
    line.measure([Job(**job) for job in then], lambda _: None, lambda outcome: second.append(outcome.key))
    line.close()
    server.close()
    return {"first": first, "second": second, "raised": raised}


def slow_listener(jobs: list[dict[str, Any]], settings: dict[str, Any], listens_s: float) -> Any:
    """The one who hears outcomes takes longer than a run may, while another run goes on."""
    server = zygote()
    line = Pipeline(server, Placement(1, CORES[:1], CORES[1:2]), MeasureSettings(**settings), "cpu")
    outcomes: list[Outcome] = []

    def on_outcome(outcome: Outcome) -> None:
        outcomes.append(outcome)
        time.sleep(listens_s)

    line.measure([Job(**job) for job in jobs], lambda _: None, on_outcome)
    line.close()
    server.close()
    return [asdict(outcome) for outcome in outcomes]


def _placement(plain: Mapping[str, Any]) -> Placement:
    return Placement(plain["builders"], tuple(plain["builder_cores"]), tuple(plain["runner_cores"]))
