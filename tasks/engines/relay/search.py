"""One task's search: which implementation and config to measure next. Spaces and tuners are AutoTVM's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.engines.measuring.workshop import is_in_slice
from tasks.engines.relay.candidates import load_func
from tasks.engines.relay.lowering import Choice
from tasks.engines.relay.memory import Memory
from tasks.engines.relay.spaces import Space, candidate_key, spaces_of
from tasks.engines.relay.tuners import SpaceTuner, Task
from tasks.records import TuningRecord, TuningTask

#: Configs of other workloads that a search begins with.
_DONORS = 6
#: After so many trials an implementation this much slower than the best gets few more.
_TRIED = 8
_BEHIND_RATIO = 1.5


@dataclass(frozen=True)
class Candidate:
    """An implementation with a config. ``index`` is its place in its space, None without a template."""

    key: str
    trace: str
    implementation: str
    index: int | None
    predicted_us: float | None = None


@dataclass
class _Arm:
    """One implementation under search."""

    space: Space
    tuner: SpaceTuner | None
    trials: int = 0
    best_us: float = math.inf
    donors: list[int] | None = None

    @property
    def exhausted(self) -> bool:
        return self.trials > 0 if self.tuner is None else self.tuner.exhausted


@dataclass(frozen=True)
class SearchOptions:
    """``tuner`` is one of AutoTVM's: xgb, ga, random, grid."""

    tuner: str
    threads: int


class TaskSearch:
    """The search of one workload, warm from session to session. ``group`` names it in the memory."""

    def __init__(self, task: TuningTask, target: Any, options: SearchOptions, memory: Memory, group: str = "") -> None:
        self.task = task
        self.group = group or task.workload_key
        self.func = load_func(Path(task.workload_path).read_text())
        self.exhausted = False
        #: Index and number of the slices of the space, by candidate key; only candidates in it are proposed.
        self.part = (0, 1)
        self.skipped: list[str] = []
        self.best_us = math.inf
        self._memory = memory
        self._known: set[str] = set()
        self._measured: set[str] = set()
        self._arms = self._make_arms(target, options)

    def _make_arms(self, target: Any, options: SearchOptions) -> dict[str, _Arm]:
        arms = {}
        spaces = spaces_of(self.func, target)
        for rank, space in enumerate(spaces):
            if space.configs is None:
                if rank:  # the preferred one without a template is the default schedule
                    arms[space.implementation] = _Arm(space, None)
                continue
            flop = max(1.0, self.task.flops)
            name = space.workload[0]
            tuner = SpaceTuner(options.tuner, Task(name, space.workload, target, space.configs, flop), options.threads)
            arms[space.implementation] = _Arm(space, tuner)
        return arms

    def learn(self, records: Iterable[TuningRecord]) -> None:
        """Take in records that exist already; one that does not fit is skipped and named in ``skipped``."""
        fresh = [record for record in records if record.record_id not in self._known]
        for arm in self._arms.values():
            arm.donors = None  # of other workloads, too, more may be known by now
        for record in fresh:
            self._known.add(record.record_id)
            self._measured.add(record.candidate_key)
            if not record.schedule:
                self.best_us = min(self.best_us, record.latency_us or math.inf)
            elif record.phase == "search":
                self._learn_one(record)

    def _learn_one(self, record: TuningRecord) -> None:
        try:
            choice = Choice.from_text(record.schedule)
            arm = self._arms[choice.implementation]
            index = None if choice.config is None else arm.space.index_of(choice.config)
            if arm.tuner is not None and index is None:
                raise ValueError("the config is not in this space")
        except Exception as error:
            self.skipped.append(f"{record.record_id}: {type(error).__name__}")
            return
        self._note(arm, index, record.latency_us, record.candidate_key, record.schedule)

    def propose(self, count: int, seed: int) -> list[Candidate]:
        """Up to ``count`` candidates that were never measured; none when the space is exhausted."""
        found: list[Candidate] = []
        for arm, share in self._shares(count):
            found += self._propose_from(arm, min(share, count - len(found)), seed)
        for arm in self._ranked():  # what an exhausted implementation leaves goes to the others
            found += self._propose_from(arm, count - len(found), seed + 1)
        # What this slice leaves is for the agents that have the others.
        self.exhausted = not found and self.part[1] == 1
        return found

    def _ranked(self) -> list[_Arm]:
        return sorted(self._arms.values(), key=lambda arm: (arm.best_us, -arm.space.priority))

    def _shares(self, count: int) -> list[tuple[_Arm, int]]:
        """How many of the next candidates each implementation gives: the promising ones share alike."""
        open_arms = [arm for arm in self._ranked() if not arm.exhausted]
        best_us = min((arm.best_us for arm in open_arms), default=math.inf)
        behind = [arm for arm in open_arms if arm.trials >= _TRIED and arm.best_us > _BEHIND_RATIO * best_us]
        single = [arm for arm in open_arms if arm.tuner is None]
        leading = [arm for arm in open_arms if arm not in behind and arm not in single]
        few = [(arm, 1) for arm in (*single, *behind)]
        left = max(0, count - len(few))
        each, more = divmod(left, len(leading)) if leading else (0, 0)
        return [*few, *((arm, each + (rank < more)) for rank, arm in enumerate(leading))]

    def _propose_from(self, arm: _Arm, count: int, seed: int) -> list[Candidate]:
        if count <= 0 or arm.exhausted:
            return []
        is_mine = self._is_mine(arm.space)
        if arm.tuner is None:
            if not is_mine(None):
                return []
            arm.trials += 1
            return self._fresh(arm, [None], [None])
        indices = arm.tuner.propose(count, seed, self._donated(arm, arm.tuner), is_mine)
        return self._fresh(arm, indices, arm.tuner.predict_us(indices))

    def _is_mine(self, space: Space) -> Callable[[int | None], bool]:
        """Is the config in the slice of the space that is searched here?"""
        part = self.part
        return lambda index: part[1] == 1 or is_in_slice(candidate_key(space.choice(index)), part)

    def _fresh(self, arm: _Arm, indices: Sequence[int | None], predicted: Sequence[float | None]) -> list[Candidate]:
        found = []
        for index, us in zip(indices, predicted):  # noqa: B905 - Python 3.9 has no strict
            choice = arm.space.choice(index)
            key = candidate_key(choice)
            if key not in self._measured:
                self._measured.add(key)
                found.append(Candidate(key, choice.to_text(), choice.implementation, index, us))
        return found

    def _donated(self, arm: _Arm, tuner: SpaceTuner) -> list[int]:
        """What was good for other workloads of this implementation, as far as it fits here."""
        if arm.donors is None:
            donors = self._memory.donors(arm.space, self.group, 4 * _DONORS)
            places = [arm.space.nearest(choice.config) for choice in donors]
            fitting = dict.fromkeys(place for place in places if place is not None and not tuner.has_measured(place))
            arm.donors = list(fitting)[:_DONORS]
        return arm.donors

    def report(self, candidates: Sequence[Candidate], latencies_us: Sequence[float | None]) -> None:
        """What the measurements gave; None for a failed one."""
        for candidate, latency_us in zip(candidates, latencies_us):  # noqa: B905 - Python 3.9 has no strict
            arm = self._arms[candidate.implementation]
            self._note(arm, candidate.index, latency_us, candidate.key, candidate.trace)

    def take_back(self, candidates: Sequence[Candidate]) -> None:
        """Candidates that were proposed, but not measured; they may be proposed again."""
        for candidate in candidates:
            arm = self._arms[candidate.implementation]
            self._measured.discard(candidate.key)
            if arm.tuner is not None and candidate.index is not None:
                arm.tuner.take_back(candidate.index)
            else:
                arm.trials = 0

    def _note(self, arm: _Arm, index: int | None, latency_us: float | None, key: str, schedule: str) -> None:
        arm.trials += arm.tuner is not None
        arm.best_us = min(arm.best_us, latency_us or math.inf)
        self.best_us = min(self.best_us, latency_us or math.inf)
        if arm.tuner is not None and index is not None:
            arm.tuner.report([index], [latency_us])
        else:
            arm.trials = max(1, arm.trials)
        if latency_us is not None:
            self._memory.add(self.group, key, schedule, latency_us)
