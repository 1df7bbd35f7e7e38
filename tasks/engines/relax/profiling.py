"""Where the time of a whole run goes: TVM's virtual machine tells of each call that it makes.

TVM's own VM profiler is not in the packaged runtime; the instrument hook costs a microsecond a call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

from tasks.engines.relax.loader import CompiledModel

#: What the virtual machine calls besides kernels: it allocates, checks and reshapes.
_OWN = "vm.builtin."


def profile(model: CompiledModel, inputs: Mapping[str, Any], repeats: int) -> dict[str, Any]:
    """``calls``: function, workload and the median microseconds of each kernel call, in order.

    ``whole_us`` is the median of as many runs that nobody watched.
    """
    arrays = dict(inputs)
    watch = _Watch(model)
    runs: list[list[tuple[str, float]]] = []
    whole_ms: list[float] = []
    # In turns, so that a slow moment of the machine hits both alike; the first of each warms up.
    for _ in range(repeats + 1):
        whole_ms += model.time_ms(arrays, 1)
        watch.calls = []
        model.watch(watch)
        model.time_ms(arrays, 1)
        model.watch(None)
        runs.append(watch.calls)
    workloads = model.manifest.get("kernels", {})
    calls = [
        {
            "function": same[0][0],
            "workload_key": workloads.get(same[0][0], ""),
            "us": statistics.median(us for _, us in same),
        }
        for same in zip(*runs[1:], strict=False)
    ]
    return {"calls": calls, "whole_us": statistics.median(whole_ms[1:]) * 1e3}


class _Watch:
    """Called before and after each call; on a GPU it waits for the kernel, which is what is timed."""

    def __init__(self, model: CompiledModel) -> None:
        self.calls: list[tuple[str, float]] = []
        self._model = model
        self._started = 0.0

    def __call__(self, _function: Any, name: str, before: bool, _result: Any, *_arguments: Any) -> int:
        if name.startswith(_OWN):
            return 0
        self._model.sync()
        now = time.perf_counter()
        if before:
            self._started = now
        else:
            self.calls.append((str(name), (now - self._started) * 1e6))
        return 0
