"""Times candidates: arguments between guard zones, outputs compared with the default schedule's.

Free of any TVM version: what differs between them is a ``Runtime``. Needs numpy. Python 3.10.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tasks.engines.measuring.checking import GuardedArray, WrongOutput, compare, seed_of
from tasks.engines.measuring.workshop import kernel_symbol
from tasks.records import MeasureSettings

#: A candidate slower than the best by this factor in the first part of its repeats is not timed further.
_LOST_RATIO = 1.5
#: That part is one in so many repeats.
_FIRST_PART = 5
#: The default schedule is timed beside the candidates again once that is so old.
_FRESH_S = 0.5
#: Repeats of that, and from which latency on it has one; one that takes longer still is not timed beside others.
_BESIDE_REPEATS, _SLOW_US, _TOO_SLOW_US = 3, 2e4, 1e6
#: After so long without a timing the function is called for a while before it is timed: threads that slept and
#: cores that idled are slow at first (measured: 1.25 times for some 10 ms, on a shared host up to 2 times).
_IDLE_S, _WAKE_S = 0.1, 0.03
#: What is copied to flush the cache of a device that does not say how large it is; no GPU has more today.
_FLUSH_BYTES = 256 << 20


class Runtime(Protocol):
    """What the runner needs of TVM's runtime."""

    def device(self, name: str) -> Any:
        """The device ``cpu`` or ``cuda:0``."""

    def share(self, array: np.ndarray[Any, Any]) -> Any:
        """A tensor on the CPU in the array's own memory."""

    def place(self, array: np.ndarray[Any, Any], device: Any) -> Any:
        """A copy on the device."""

    def load(self, path: str) -> Any:
        """The library that a builder wrote."""


@dataclass
class _Task:
    """The arguments of the workload in work, allocated once, and the default schedule's outputs."""

    key: str
    guarded: list[GuardedArray]
    tensors: list[Any]
    n_outputs: int
    inputs: list[np.ndarray[Any, Any]]
    expected: list[np.ndarray[Any, Any]] | None = None
    reference: Any = None
    slowdown: float = 0.0
    slowdown_at: float = -math.inf


class Runner:
    """Times candidates on one device."""

    def __init__(self, runtime: Runtime, device: str) -> None:
        self._runtime = runtime
        self._device = runtime.device(device)
        self._on_cpu = device.startswith("cpu")
        self._task: _Task | None = None
        self._timed_at = -math.inf

    def __call__(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Time the library at ``job["path"]``. Raises WrongOutput, or whatever the candidate raises."""
        settings = MeasureSettings(**job["settings"])
        task = self._prepare(job)
        library = self._runtime.load(job["path"])
        if settings.check_output and task.expected is None:
            self._learn_expected(task, job)
        slowdown = self._slowdown(task, job, settings, _FRESH_S)
        best_us = float(job.get("best_us") or 0.0) * (slowdown or 1.0)
        first_us = self._checked_call(library[kernel_symbol(task.key)], task, settings)
        if best_us and first_us > settings.hopeless_ratio * best_us:
            return _answer([first_us], slowdown, cut_short=True)
        if settings.cooldown_ms:
            time.sleep(settings.cooldown_ms / 1e3)
        first = math.ceil(settings.repeat / _FIRST_PART)
        latencies_us = self._time(library, task, dataclasses.replace(settings, repeat=first))
        if best_us and statistics.median(latencies_us) > _LOST_RATIO * best_us:
            return _answer(latencies_us, slowdown, cut_short=True)
        if settings.repeat > first:
            latencies_us += self._time(library, task, dataclasses.replace(settings, repeat=settings.repeat - first))
        self._check_guards(task)
        if slowdown is not None and not statistics.median(latencies_us) > best_us > 0:
            # It would win, or all of them are timed with care: the default must not have met a hiccup just before.
            slowdown = min(slowdown, self._slowdown(task, job, settings, 0.0) or slowdown)
        return _answer(latencies_us, slowdown, cut_short=False)

    def _prepare(self, job: Mapping[str, Any]) -> _Task:
        if self._task is None or self._task.key != job["workload"]:
            guarded = [GuardedArray(shape, dtype) for shape, dtype in job["args"]]
            for index, argument in enumerate(guarded):
                argument.fill(seed_of(f"{job['workload']}/{index}"))
            if self._on_cpu:
                tensors = [self._runtime.share(argument.array) for argument in guarded]
            else:
                tensors = [self._runtime.place(argument.array, self._device) for argument in guarded]
            inputs = [argument.array.copy() for argument in guarded[: -job["outputs"]]]
            self._task = _Task(job["workload"], guarded, tensors, job["outputs"], inputs)
        return self._task

    def _learn_expected(self, task: _Task, job: Mapping[str, Any]) -> None:
        """Run the default schedule once: its outputs are what every candidate must give."""
        if self._has_reference(task, job):
            task.reference[kernel_symbol(task.key)](*task.tensors)
            self._device.sync()
            task.expected = [output.copy() for output in self._outputs(task)]

    def _has_reference(self, task: _Task, job: Mapping[str, Any]) -> bool:
        """Is the task's default schedule at hand? It is loaded once."""
        path = job.get("reference")
        if task.reference is None and path and Path(path).exists():
            task.reference = self._runtime.load(path)
        return task.reference is not None

    def _slowdown(self, task: _Task, job: Mapping[str, Any], settings: MeasureSettings, fresh_s: float) -> float | None:
        """How much longer the default schedule takes now than when it was measured; None where that is not known.

        It is timed unless that was done ``fresh_s`` ago or less.

        A machine that others share is now fast, now slow, for seconds: what is timed in such a moment must not be
        taken for a good or a bad schedule.
        """
        default_us = float(job.get("default_us") or 0.0)
        if not 0 < default_us < _TOO_SLOW_US or not self._has_reference(task, job):
            return None
        if time.monotonic() - task.slowdown_at > fresh_s:
            repeat = _BESIDE_REPEATS if default_us < _SLOW_US else 1
            beside = dataclasses.replace(settings, repeat=repeat, min_repeat_ms=settings.min_repeat_ms // 2)
            task.slowdown = statistics.median(self._time(task.reference, task, beside)) / default_us
            task.slowdown_at = time.monotonic()
        return task.slowdown

    def _checked_call(self, function: Any, task: _Task, settings: MeasureSettings) -> float:
        """Call once and look at the result; the call's time in microseconds."""
        if settings.check_output:
            self._spoil_outputs(task)
        start = time.perf_counter()
        function(*task.tensors)
        self._device.sync()
        spent_us = (time.perf_counter() - start) * 1e6
        self._check_guards(task)
        if settings.check_output:
            self._check_inputs(task)
            if task.expected is not None:
                compare(task.expected, self._outputs(task))
        return spent_us

    def _check_inputs(self, task: _Task) -> None:
        """A candidate that overwrites its inputs spoils what the next one is given."""
        for index, before in enumerate(task.inputs):
            now = task.guarded[index].array if self._on_cpu else task.tensors[index].numpy()
            if now.tobytes() != before.tobytes():
                raise WrongOutput(f"the candidate overwrote its input {index}")

    def _spoil_outputs(self, task: _Task) -> None:
        """Overwrite the outputs, lest a candidate that writes nothing pass for its predecessor."""
        for guarded, tensor in zip(  # noqa: B905 - Python 3.9 has no strict
            task.guarded[-task.n_outputs :], task.tensors[-task.n_outputs :]
        ):
            guarded.array.reshape(-1).view(np.uint8)[...] = 0x7B
            if not self._on_cpu:
                tensor.copyfrom(guarded.array)

    def _outputs(self, task: _Task) -> list[np.ndarray[Any, Any]]:
        if self._on_cpu:
            return [argument.array for argument in task.guarded[-task.n_outputs :]]
        return [tensor.numpy() for tensor in task.tensors[-task.n_outputs :]]

    def _check_guards(self, task: _Task) -> None:
        if self._on_cpu:
            for index, argument in enumerate(task.guarded):
                argument.check_guards(f"{index} of {len(task.guarded)}")

    def _time(self, library: Any, task: _Task, settings: MeasureSettings) -> list[float]:
        """The latencies of all repeats, in microseconds, on a device that is awake."""
        if time.monotonic() - self._timed_at > _IDLE_S:
            self._wake(library[kernel_symbol(task.key)], task)
        evaluator = library.time_evaluator(
            kernel_symbol(task.key),
            self._device,
            number=settings.number,
            repeat=settings.repeat,
            min_repeat_ms=settings.min_repeat_ms,
            **self._flushing(settings),
        )
        latencies_us = [float(seconds) * 1e6 for seconds in evaluator(*task.tensors).results]
        self._timed_at = time.monotonic()
        return latencies_us

    def _wake(self, function: Any, task: _Task) -> None:
        stop_at = time.perf_counter() + _WAKE_S
        while time.perf_counter() < stop_at:
            function(*task.tensors)
            self._device.sync()

    def _flushing(self, settings: MeasureSettings) -> dict[str, Any]:
        """What has TVM's evaluator flush the cache before each repeat; a GPU's is overwritten by a copy."""
        if not settings.flush_cache:
            return {}
        if self._on_cpu:
            return {"f_preproc": "cache_flush_cpu_non_first_arg"}
        size_bytes = getattr(self._device, "l2_cache_size_bytes", None)
        return {"cache_flush_bytes": 2 * int(size_bytes) if size_bytes else _FLUSH_BYTES}


def _answer(latencies_us: list[float], slowdown: float | None, cut_short: bool) -> dict[str, Any]:
    slowdowns = () if slowdown is None else (slowdown,) * len(latencies_us)
    return {"latencies_us": tuple(latencies_us), "slowdowns": slowdowns, "cut_short": cut_short}
