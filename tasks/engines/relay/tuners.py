"""AutoTVM's tuners over the config space of one implementation, asked batch by batch."""

from __future__ import annotations

import itertools
import random
from collections import deque, namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm.autotvm.tuner import GATuner, GridSearchTuner, RandomTuner
from tvm.autotvm.tuner.model_based_tuner import ModelBasedTuner
from tvm.autotvm.tuner.sa_model_optimizer import SimulatedAnnealingOptimizer
from tvm.autotvm.tuner.xgboost_cost_model import XGBoostCostModel

from tasks.errors import InputError

TUNERS = ("xgb", "ga", "random", "grid")
#: The cost model is trained anew after so many measurements.
_PLAN_SIZE = 8
#: Simulated annealing asks the model of so many configs at once, so often at most.
_ANNEALERS, _ANNEALING_STEPS = 64, 100
#: A failed candidate's cost where a tuner wants a number.
_FAILED_S = 1e9

#: What AutoTVM's tuners read of a task, and of a measurement.
Task = namedtuple("Task", "name workload target config_space flop")
Input = namedtuple("Input", "target task config")
Result = namedtuple("Result", "costs error_no all_cost timestamp")


class KnobCostModel(XGBoostCostModel):  # type: ignore[misc]
    """AutoTVM's XGBoost model over the knobs of a config, whose features are computed in this process.

    AutoTVM starts a pool of interpreters for them, each of which imports TVM for seconds; and its other
    features need a schedule of the operator alone, which is not what is measured here.
    """

    def __init__(self, task: Any, threads: int) -> None:
        super().__init__(task, feature_type="knob", loss_type="reg", num_threads=threads, log_interval=1000)

    def _reset_pool(self, space: Any, target: Any, task: Any) -> None:
        """There is none."""

    def _get_feature(self, indexes: Any) -> Any:
        known = self.feature_cache.get(self.fea_type)
        for index in indexes:
            if index not in known:
                known[index] = np.asarray(self.space.get(int(index)).get_flatten_feature(), dtype="float32")
        return np.stack([known[index] for index in indexes])


class SpaceTuner:
    """One of AutoTVM's tuners; it never proposes what was measured before."""

    def __init__(self, kind: str, task: Task, threads: int) -> None:
        """``kind`` is one of ``TUNERS``. Raises InputError."""
        self.space = task.config_space
        self._task = task
        self._measured: set[int] = set()
        self._latency: dict[int, float] = {}
        self._results: dict[int, float | None] = {}
        self._given: deque[int] = deque()
        #: What the tuner gave and nobody measured: it does not give it again.
        self._passed: list[int] = []
        if kind == "xgb":
            self.model: Any = KnobCostModel(task, threads)
            annealing = SimulatedAnnealingOptimizer(
                task, n_iter=_ANNEALING_STEPS, parallel_size=min(_ANNEALERS, len(self.space)), log_interval=None
            )
            self._tuner: Any = ModelBasedTuner(task, self.model, annealing, _PLAN_SIZE)
        elif kind in TUNERS:
            self.model = None
            classes = {"ga": GATuner, "random": RandomTuner, "grid": GridSearchTuner}
            self._tuner = classes[kind](task)
        else:
            raise InputError(f"there is no tuner {kind!r}: give one of {', '.join(TUNERS)}")

    @property
    def exhausted(self) -> bool:
        """Was every config measured?"""
        return len(self._measured) >= len(self.space)

    def has_measured(self, index: int) -> bool:
        """Was the config measured, or is it about to be?"""
        return index in self._measured

    def propose(self, count: int, seed: int, first: Sequence[int], is_mine: Callable[[int], bool]) -> list[int]:
        """Indices of up to ``count`` configs that were never measured: ``first``, in turns with the tuner's own.

        Only those that ``is_mine``; what was given before and not measured counts as ``first``.
        """
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._passed = [index for index in self._passed if index not in self._measured]
        wanted = dict.fromkeys([*self._passed, *first])
        given = [index for index in wanted if index not in self._measured and is_mine(index)][: (count + 1) // 2]
        found = list(given)
        for _ in range(20):
            if len(found) >= count or not self._tuner.has_next():
                break
            for config in self._tuner.next_batch(count - len(found)):
                self._given.append(config.index)
                if config.index in self._measured or config.index in found:
                    continue
                if is_mine(config.index):
                    found.append(config.index)
                else:
                    self._passed.append(config.index)
        # A tuner may have come to the end of what it wants; what is left of the space is still worth a trial.
        found += self._rest(count - len(found), set(found), is_mine)
        self._measured.update(found)
        own = found[len(given) :]
        turns = [index for both in itertools.zip_longest(given, own) for index in both]
        return [index for index in turns if index is not None]

    def _rest(self, count: int, found: set[int], is_mine: Callable[[int], bool]) -> list[int]:
        if count <= 0 or len(self.space) > 4096:
            return []
        left = [i for i in range(self.space.range_length) if i not in self._measured and i not in found]
        left = [i for i in left if self.space.is_index_valid(i)] if hasattr(self.space, "is_index_valid") else left
        random.shuffle(left)
        return list(itertools.islice(filter(is_mine, left), count))

    def take_back(self, index: int) -> None:
        """The config was proposed, but not measured."""
        self._measured.discard(index)
        self._passed.append(index)

    def report(self, indices: Sequence[int], latencies_us: Sequence[float | None]) -> None:
        """What the measurements gave; None for a failed one."""
        for index, latency_us in zip(indices, latencies_us):  # noqa: B905 - Python 3.9 has no strict
            self._measured.add(index)
            self._results[index] = latency_us
            if latency_us is not None:
                self._latency[index] = latency_us
        if self.model is not None:
            self._tell(indices)
            return
        # The genetic algorithm takes scores in the order in which it gave the genes.
        told = []
        while self._given and self._given[0] in self._results:
            told.append(self._given.popleft())
        self._tell(told)

    def _tell(self, indices: Sequence[int]) -> None:
        inputs, results = [], []
        for index in indices:
            latency_us = self._results[index]
            inputs.append(Input(self._task.target, self._task, self.space.get(index)))
            costs = (_FAILED_S,) if latency_us is None else (latency_us / 1e6,)
            results.append(Result(costs, int(latency_us is None), 0.0, 0.0))
        if inputs:
            self._tuner.update(inputs, results)

    def predict_us(self, indices: Sequence[int]) -> list[float | None]:
        """What the cost model thinks, None where it knows nothing."""
        if self.model is None or self.model.bst is None or not self._latency or not indices:
            return [None] * len(indices)
        best_us = min(self._latency.values())
        scores = self.model.predict(np.array(indices))
        return [best_us / float(score) if score > 0.01 else None for score in scores]
