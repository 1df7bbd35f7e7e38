"""A race between artifacts and onnxruntime on one device: everybody on the same threads, in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tasks.engines.interface import ExecutionRequest
from tasks.import_model import OnnxRuntimeModel, seeded_inputs
from tasks.records import Latency, ModelFile

#: A contender runs so many times and says how many milliseconds each run took.
Contender = Callable[[int], Sequence[float]]
Execute = Callable[[ExecutionRequest], Latency]

_ROUNDS = 9
#: Each contender runs about so long in each round.
_ROUND_S = 0.25
_MOST_RUNS = 20
#: Pause between contenders: idle threads of one spin for some milliseconds and would disturb the next.
_SETTLE_S = 0.05
#: A contender runs so long, and once at least, before its runs of a round count: after a pause cores and threads are
#: slow at first.
_WAKE_S, _MOST_WAKING_RUNS = 0.03, 100


@dataclass(frozen=True)
class RaceOrder:
    """Who runs: the artifacts in ``folders`` by name, and ``model`` in onnxruntime on ``threads`` threads.

    All get the model's inputs of ``seed``, which are in ``inputs_path`` too.
    """

    folders: Mapping[str, str]
    inputs_path: str
    model: ModelFile
    threads: int
    seed: int


def race(execute: Execute, order: RaceOrder) -> dict[str, Latency]:
    """Latencies by name, onnxruntime's as ``onnxruntime``. Raises EngineError, ModelError."""
    session = OnnxRuntimeModel(order.model, order.threads)
    inputs = seeded_inputs(order.model, order.seed)
    contenders = {name: _artifact(execute, folder, order.inputs_path) for name, folder in order.folders.items()}
    contenders["onnxruntime"] = lambda repeats: session.time_ms(inputs, repeats)
    return interleaved(contenders)


def interleaved(contenders: Mapping[str, Contender], rounds: int = _ROUNDS) -> dict[str, Latency]:
    """Time the contenders in turns, so that a slow minute of the machine hits all of them alike.

    Each round gives one sample a contender: the median of its runs in that round, after some that warm up.
    """
    warm_ups, repeats = {}, {}
    for name, run in contenders.items():
        run(1)
        once_s = max(run(1)[0] / 1e3, 1e-6)
        warm_ups[name] = min(_MOST_WAKING_RUNS, math.ceil(_WAKE_S / once_s))
        repeats[name] = max(1, min(_MOST_RUNS, int(_ROUND_S / once_s)))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(rounds):
        for name in _order(list(contenders), index):
            time.sleep(_SETTLE_S)
            timed = contenders[name](warm_ups[name] + repeats[name])[warm_ups[name] :]
            samples[name].append(float(np.median(timed)))
    return {name: Latency(tuple(values)) for name, values in samples.items()}


def _order(names: list[str], index: int) -> list[str]:
    """Another order each round, every other one backwards: nobody always runs after the same neighbour."""
    shift = index // 2 % len(names)
    turned = names[shift:] + names[:shift]
    return turned[::-1] if index % 2 else turned


def _artifact(execute: Execute, folder: str, inputs_path: str) -> Contender:
    return lambda repeats: execute(ExecutionRequest(folder, inputs_path, repeats)).samples_ms
