"""Builds and times candidates: the rule of when which of the two may happen, and their failures.

The rule: on a device that the builders do not use (a GPU, or cores of its own) builds go on while
the device measures. Where builders and measurements share cores, a batch is built first and timed
afterwards, so that no builder is active inside a timing window. ``windows`` keeps both kinds of
interval, so that the rule can be checked and the time accounted for.

Free of any TVM version. Standard library only, Python 3.10.
"""

from __future__ import annotations

import math
import selectors
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.engines.measuring.zygote import Worker, WorkerDied, WorkerError, WorkerOptions, Zygote
from tasks.records import Failure, MeasureSettings


def never() -> bool:
    """Nobody asks for an end."""
    return False


@dataclass(frozen=True)
class Placement:
    """Where builders and the runner may run."""

    builders: int
    builder_cores: tuple[int, ...]
    runner_cores: tuple[int, ...]

    @property
    def overlap(self) -> bool:
        """May builds go on while a candidate is timed?"""
        return not set(self.builder_cores) & set(self.runner_cores)


@dataclass(frozen=True)
class Job:
    """A candidate on its way: what the builder and the runner need to know of it.

    Without ``run`` it is only built; without ``build`` it is built already, at ``run["path"]``. What was
    built is deleted after its run unless ``keep`` is set.
    """

    key: str
    build: Mapping[str, Any]
    run: Mapping[str, Any]
    keep: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of a job: the repeats of its timing or a failure, and what it cost."""

    key: str
    latencies_us: tuple[float, ...] = ()
    slowdowns: tuple[float, ...] = ()
    cut_short: bool = False
    failure: Failure | None = None
    build_s: float = 0.0
    run_s: float = 0.0
    path: str = ""


@dataclass
class Windows:
    """When builders and the runner were active: pairs of ``time.monotonic()``."""

    builds: list[tuple[float, float]] = field(default_factory=list)
    runs: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class _Busy:
    job: Job
    started: float
    deadline: float
    path: str = ""
    build_s: float = 0.0


@dataclass
class _Slot:
    """A place for a worker, refilled when its worker ends."""

    options: WorkerOptions
    worker: Worker | None = None
    busy: _Busy | None = None


@dataclass
class _Built:
    job: Job
    path: str
    build_s: float


class Pipeline:
    """The builders and the runner of one device. Not for use by several threads."""

    def __init__(self, zygote: Zygote, placement: Placement, settings: MeasureSettings, device: str) -> None:
        self._zygote = zygote
        self._settings = settings
        self.placement = placement
        self.windows = Windows()
        build = WorkerOptions("build", {}, placement.builder_cores, settings.build_memory_bytes)
        self._builders = [_Slot(build) for _ in range(placement.builders)]
        # A GPU's driver reserves address space without end: there the limit would end every run.
        limit_bytes = settings.run_memory_bytes if device.startswith("cpu") else 0
        self._runner = _Slot(WorkerOptions("run", {"device": device}, placement.runner_cores, limit_bytes))
        self._waiting: deque[Job] = deque()
        self._built: deque[_Built] = deque()

    def measure(
        self,
        jobs: Sequence[Job],
        on_start: Callable[[str], None],
        on_outcome: Callable[[Outcome], None],
        is_over: Callable[[], bool] = never,
    ) -> None:
        """Build and time ``jobs``. ``on_start`` hears a key before it is timed, ``on_outcome`` the result.

        Once ``is_over``, which is asked after each build and each run, nothing more is begun.
        """
        self._waiting.extend(job for job in jobs if job.build)
        self._built.extend(_Built(job, job.run["path"], 0.0) for job in jobs if not job.build)
        try:
            while self._waiting or self._built or self._active():
                self._start_builds()
                self._start_run(on_start)
                for slot, answered in self._ready():
                    outcome = self._finish(slot, answered)
                    if outcome is not None:
                        on_outcome(outcome)
                if is_over():
                    self._drop_waiting()
        except BaseException:
            # Nobody waits for these jobs any more, and the next batch must not meet them.
            self._drop_waiting()
            self.close()
            raise

    def _drop_waiting(self) -> None:
        """Forget the jobs that have not begun to run; what is in a worker is finished by ``measure``."""
        self._waiting.clear()
        while self._built:
            built = self._built.popleft()
            if not built.job.keep:
                Path(built.path).unlink(missing_ok=True)

    def close(self) -> None:
        """End all workers, and the jobs in them."""
        for slot in (*self._builders, self._runner):
            self._replace(slot)
            slot.busy = None

    def _active(self) -> bool:
        return any(slot.busy for slot in (*self._builders, self._runner))

    def _start_builds(self) -> None:
        if self._runner.busy and not self.placement.overlap:
            return
        for slot in self._builders:
            if self._waiting and slot.busy is None:
                job = self._waiting.popleft()
                self._start(slot, job, job.build, self._settings.build_timeout_s)

    def _start_run(self, on_start: Callable[[str], None]) -> None:
        if not self._built or self._runner.busy:
            return
        if not self.placement.overlap and (self._waiting or any(slot.busy for slot in self._builders)):
            return
        built = self._built.popleft()
        on_start(built.job.key)
        self._start(self._runner, built.job, {**built.job.run, "path": built.path}, self._settings.run_timeout_s)
        assert self._runner.busy is not None
        self._runner.busy.path, self._runner.busy.build_s = built.path, built.build_s

    def _start(self, slot: _Slot, job: Job, request: Mapping[str, Any], timeout_s: float) -> None:
        for attempt in (1, 2):
            if slot.worker is None:
                slot.worker = self._zygote.spawn(slot.options)
            try:
                slot.worker.submit(request)
                break
            except WorkerDied:
                # The worker ended between two jobs, through no fault of this one.
                slot.worker.kill()
                slot.worker = None
                if attempt == 2:
                    raise
        now = time.monotonic()
        slot.busy = _Busy(job, now, now + timeout_s)

    def _ready(self) -> list[tuple[_Slot, bool]]:
        """Wait until a worker answers, dies, or overstays: those that did, and whether they answered.

        An answer counts however late it is read, since what kept us is not the candidate's fault.
        """
        busy = [slot for slot in (*self._builders, self._runner) if slot.busy and slot.worker]
        if not busy:
            return []
        with selectors.DefaultSelector() as selector:
            for slot in busy:
                assert slot.worker is not None
                selector.register(slot.worker.socket, selectors.EVENT_READ, slot)
            nearest = min(slot.busy.deadline for slot in busy if slot.busy)
            events = selector.select(max(0.0, nearest - time.monotonic()))
            answered = [key.data for key, _ in events]
        now = time.monotonic()
        overdue = [slot for slot in busy if slot not in answered and slot.busy and slot.busy.deadline <= now]
        return [(slot, True) for slot in answered] + [(slot, False) for slot in overdue]

    def _finish(self, slot: _Slot, answered: bool) -> Outcome | None:
        """Take a worker's answer; an outcome where the job ends with it."""
        assert slot.busy is not None and slot.worker is not None
        busy, slot.busy = slot.busy, None
        building = slot is not self._runner
        failure: Failure | None = None
        value: Mapping[str, Any] = {}
        if not answered:
            what = "built" if building else "finished"
            limit_s = busy.deadline - busy.started
            failure = Failure("build_timeout" if building else "run_timeout", f"not {what} in {limit_s:g} s")
            self._replace(slot)
        else:
            try:
                value = slot.worker.result()
            except WorkerError as error:
                failure = _failure_of(error, building)
            except WorkerDied as error:
                failure = Failure("build" if building else "run", str(error))
                self._replace(slot)
        spent_s = time.monotonic() - busy.started
        return (
            self._after_build(busy, value, failure, spent_s)
            if building
            else self._after_run(busy, value, failure, spent_s)
        )

    def _after_build(
        self, busy: _Busy, value: Mapping[str, Any], failure: Failure | None, spent_s: float
    ) -> Outcome | None:
        self.windows.builds.append((busy.started, busy.started + spent_s))
        if failure is not None:
            return Outcome(busy.job.key, failure=failure, build_s=spent_s)
        if not busy.job.run:
            return Outcome(busy.job.key, build_s=spent_s, path=value["path"])
        self._built.append(_Built(busy.job, value["path"], spent_s))
        return None

    def _after_run(self, busy: _Busy, value: Mapping[str, Any], failure: Failure | None, spent_s: float) -> Outcome:
        self.windows.runs.append((busy.started, busy.started + spent_s))
        if not busy.job.keep:
            Path(busy.path).unlink(missing_ok=True)
        build_s = busy.build_s
        if failure is None and not all(math.isfinite(us) and us > 0 for us in value["latencies_us"]):
            failure = Failure("run", f"the timer gave {tuple(value['latencies_us'])} us, which is no time")
        if failure is not None:
            # What a failed candidate left behind (a broken context, spoilt memory) must not meet the next.
            self._replace(self._runner)
            return Outcome(busy.job.key, failure=failure, build_s=build_s, run_s=spent_s)
        return Outcome(
            busy.job.key,
            latencies_us=tuple(value["latencies_us"]),
            slowdowns=tuple(value.get("slowdowns", ())),
            cut_short=bool(value["cut_short"]),
            build_s=build_s,
            run_s=spent_s,
        )

    def _replace(self, slot: _Slot) -> None:
        if slot.worker is not None:
            slot.worker.kill()
        slot.worker = None


def _failure_of(error: WorkerError, building: bool) -> Failure:
    """A handler's exception as a failure; the last line of its text says most."""
    if error.kind == "WrongOutput":
        return Failure("wrong_output", str(error))
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    message = f"{error.kind}: {lines[-1][:500]}"
    return Failure("build" if building else "run", message)
