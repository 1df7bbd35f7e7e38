"""One task's search: which candidates to measure next. Spaces and evolution are TVM's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule.trace import Trace
from tvm.target import Target

from tasks.engines.measuring.workshop import BATCH, is_in_slice
from tasks.engines.relax import spaces, transfer
from tasks.engines.relax.cost_model import MIN_SAMPLES, Rows, Samples, XgbCostModel, features_of
from tasks.engines.relax.defaults import cpu_default
from tasks.engines.relax.implementations import Workload, is_other
from tasks.engines.relax.subgraphs import arguments, structural_key
from tasks.errors import EngineError
from tasks.records import TuningRecord, TuningTask

#: Records of a task that the search starts from; the cost model learns from all of them.
_SEEDS = 64
#: Of a slice so many candidates are enough to measure: more would take more rounds.
_FEW = 4
#: Rounds of evolution that may bring nothing new before a task counts as exhausted.
_EMPTY_ROUNDS = 3
#: Schedules of similar workloads that a search starts from.
_DONORS = 12
#: Of so many candidates one is drawn from all that were proposed, however slow the model says it is.
_EXPLORE_EVERY = 8
#: Candidates that are kept for later when others look better now.
_POOL = 48
#: Where a transplanted schedule stands in the database that evolution starts from: behind all measured ones.
_UNMEASURED_S = 1e3
_ENDLESS = 10**6
#: Where another implementation takes less than this share of the time, no schedule of the own one will be faster.
_OUT_OF_REACH = 0.75


@dataclass(frozen=True)
class Candidate:
    """A schedule to measure: its name within the workload, its trace as JSON, its scheduled module.

    ``measure`` is TVM's candidate, None for another ``implementation``, of which the cost model knows nothing.
    """

    key: str
    trace: str
    mod: Any
    measure: Any
    predicted_us: float | None
    implementation: str = ""


class TaskSearch:
    """The search of one workload, warm from session to session. ``group`` names it among the cost model's samples."""

    def __init__(self, task: TuningTask, target: Any, model: XgbCostModel, group: str = "") -> None:
        self.task = task
        self.group = group or task.workload_key
        workload = Workload.from_text(Path(task.workload_path).read_text())
        self.mod = workload.mod
        self.args = arguments(self.mod)
        self.exhausted = False
        #: Index and number of the slices of the space, by candidate key; only candidates in it are proposed.
        self.part = (0, 1)
        self.skipped: list[str] = []
        self._target = target
        self._model = model
        self._samples: Samples = model.samples
        self._measured: set[str] = set()
        self._known: set[str] = set()
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(self.mod)
        self._sketches = spaces.register_tiles(self.mod, target) if target.kind.name == "llvm" else []
        #: The sketches that are not the default schedule, by candidate key.
        self._variants = {structural_key(sketch.mod): self._measure(sketch) for sketch in self._sketches[:-1]}
        #: What other implementations offer; the fastest that was measured of them, and of this one.
        self._others = {
            structural_key(sketch.mod): (name, sketch) for name, sketch in workload.sketches(target).items()
        }
        self._other_us = self._own_us = math.inf
        self._spaces: list[Any] | None = None
        self._spaces_are_all = False
        self._pool: dict[str, Any] = {}
        self._transplanted = False
        self._proposer: tuple[bool, Any] | None = None
        self.best_us = math.inf

    def learn(self, records: Iterable[TuningRecord]) -> None:
        """Take in records that exist already; one that does not replay is skipped and named in ``skipped``."""
        fresh = [record for record in records if record.record_id not in self._known]
        fresh.sort(key=lambda record: record.latency_us or math.inf)
        context = self._context(1, 0, 1) if fresh else None
        for rank, record in enumerate(fresh):
            self._known.add(record.record_id)
            self._measured.add(record.candidate_key)
            if is_other(record):
                self._note(record.latency_us, other=True)
                continue
            if not record.schedule:
                self._note(record.latency_us)
            if (record.phase == "search" and rank < _SEEDS) or (not record.schedule and self._sketches):
                self._learn_one(record, context)

    def _learn_one(self, record: TuningRecord, context: Any) -> None:
        try:
            # A default schedule that is a sketch of ours is one of the space.
            schedule = replay(self.mod, record.schedule) if record.schedule else self._sketches[-1]
        except Exception as error:
            self.skipped.append(f"{record.record_id}: {type(error).__name__}")
            return
        self._measured.add(structural_key(schedule.mod))
        self._commit(schedule.trace, record.latency_us)
        if record.latency_us is not None and record.schedule:
            self._samples.add_schedule(self.group, record.latency_us, record.schedule)
        if not self._samples.has(self.group, record.candidate_key):
            rows = features_of(self._model.extractor, context, [self._measure(schedule)])[0]
            self._add_sample(record.candidate_key, rows, record.latency_us)
        self._note(record.latency_us)

    def propose(self, count: int, seed: int) -> list[Candidate]:
        """Up to ``count`` candidates that were never measured; none when the space is exhausted.

        Other implementations first; then what the cost model thinks best of all that was proposed so far and not
        yet measured, unless another implementation is so much faster that no schedule of this one will be.
        """
        slices = self.part[1]
        others = [key for key in self._others if key not in self._measured and self._is_mine(key)][:count]
        if others:
            self._measured.update(others)
            return [self._other(key) for key in others]
        if self._measured.issuperset(self._others) and self._other_us < _OUT_OF_REACH * self._own_us:
            self.exhausted = True
            return []
        context = self._searching(seed)
        mine: list[str] = []
        for key, measure in self._variants.items():
            if key not in self._measured:
                self._pool.setdefault(key, measure)
        # Of a slice each round brings only its share; a whole space is content with any candidate.
        for _ in range(_EMPTY_ROUNDS * slices):
            self._fill_pool(context.generate_measure_candidates() or [])
            # Another agent may have measured what this one has proposed before.
            mine = [key for key in self._pool if key not in self._measured and self._is_mine(key)]
            if mine and (slices == 1 or len(mine) >= min(count, _FEW)):
                break
        if mine:
            return self._pick(context, mine, count)
        self.exhausted = slices == 1
        return []

    def _is_mine(self, key: str) -> bool:
        """Is the candidate in the slice of the space that is searched here?"""
        return is_in_slice(key, self.part)

    def _other(self, key: str) -> Candidate:
        name, sketch = self._others[key]
        return Candidate(key, trace_text(sketch.trace), sketch.mod, None, None, name)

    def _note(self, latency_us: float | None, other: bool = False) -> None:
        """A latency was measured, of another implementation or of the operators' own."""
        if latency_us is not None and other:
            self._other_us = min(self._other_us, latency_us)
        elif latency_us is not None:
            self._own_us = min(self._own_us, latency_us)
        self.best_us = min(self._own_us, self._other_us)

    def _measure(self, schedule: Any) -> Any:
        return ms.MeasureCandidate(schedule, ms.arg_info.ArgInfo.from_entry_func(self.mod, True))

    def _fill_pool(self, measures: Iterable[Any]) -> None:
        for measure in measures:
            key = structural_key(measure.sch.mod)
            if key not in self._measured:
                self._pool.setdefault(key, measure)

    def _pick(self, context: Any, keys: list[str], count: int) -> list[Candidate]:
        """Take ``count`` of ``keys`` out of the pool, the best predicted first and a few by chance."""
        predicted = dict(zip(keys, self._predict(context, [self._pool[key] for key in keys]), strict=True))
        if self._model.booster is not None:
            keys.sort(key=lambda key: predicted[key] or math.inf)
            chance = self._model.random.permutation(keys[count:])[: count // _EXPLORE_EVERY]
            first = keys[: count - len(chance)] + [str(key) for key in chance]
            keys = first + [key for key in keys if key not in first]
        picked = {key: self._pool[key] for key in keys[:count]}
        self._measured.update(picked)
        rest = [key for key in (*keys, *self._pool) if key not in self._measured]
        self._pool = {key: self._pool[key] for key in list(dict.fromkeys(rest))[:_POOL]}
        return [
            Candidate(key, trace_text(measure.sch.trace), measure.sch.mod, measure, predicted[key])
            for key, measure in picked.items()
        ]

    def _searching(self, seed: int) -> Any:
        """The context that proposes, kept between sessions since it knows what it proposed before."""
        informed = self._model.booster is not None or len(self._samples) >= MIN_SAMPLES
        if self._proposer is None or self._proposer[0] != informed:
            # A model that knows nothing gives evolution nothing to climb: then it only samples.
            population, generations = (64, 2) if informed else (32, 0)
            context = self._context(population, generations, seed)
            if informed and not self._transplanted:
                self._transplanted = True
                self._transplant(context)
            context.pre_tuning(_ENDLESS, BATCH, self._design_spaces(), self._database, self._model)
            self._proposer = (informed, context)
        return self._proposer[1]

    def _transplant(self, context: Any) -> None:
        """Start from the best schedules of similar workloads: candidates themselves, and evolution's first parents."""
        sketches = [transfer.sketch_of(trace_text(space.trace)) for space in self._design_spaces()]
        stored = self._samples.best_schedules()
        donors = [
            transfer.sketch_of(trace)
            for workload, traces in stored.items()
            if workload != self.group
            for trace in traces
        ]
        for sketch, donor in transfer.most_alike(sketches, donors, _DONORS):
            trace = transfer.transplant(sketch, donor)
            schedule = transfer.scheduled(self.mod, trace, context.space_generator.postprocs)
            if schedule is not None:
                self._fill_pool([self._measure(schedule)])
                self._commit(schedule.trace, _UNMEASURED_S * 1e6)

    def _context(self, population: int, generations: int, seed: int) -> Any:
        strategy = ms.search_strategy.EvolutionarySearch(
            population_size=population,
            init_min_unmeasured=population // 2,
            genetic_num_iters=generations,
            eps_greedy=0.1,
        )
        return ms.TuneContext(
            self.mod,
            target=self._target,
            space_generator="post-order-apply",
            search_strategy=strategy,
            task_name=self.task.name,
            rand_state=seed % (2**30) + 1,
            num_threads=self._model.threads,
        )

    def _design_spaces(self) -> list[Any]:
        """Our sketches; the generic ones beside them once a model knows enough to choose among both."""
        informed = self._model.booster is not None
        if self._spaces is None or (informed and not self._spaces_are_all):
            self._spaces_are_all = informed or not self._sketches
            generic = list(self._context(1, 0, 1).generate_design_space()) if self._spaces_are_all else []
            self._spaces = [*self._sketches, *generic]
        return self._spaces

    def _predict(self, context: Any, measures: Sequence[Any]) -> list[float | None]:
        if not measures or self._model.booster is None or not math.isfinite(self._own_us):
            return [None] * len(measures)
        scores = self._model.predict(context, measures)
        return [self._own_us / float(score) if score > 0.01 else None for score in scores]

    def report(self, candidates: Sequence[Candidate], latencies_us: Sequence[float | None]) -> None:
        """What the measurements gave; None for a failed one."""
        own = []
        for candidate, latency_us in zip(candidates, latencies_us, strict=True):
            if candidate.implementation:
                self._note(latency_us, other=True)
            else:
                own.append((candidate, latency_us))
        if not own:
            return
        context = self._context(1, 0, 1)
        rows = features_of(self._model.extractor, context, [candidate.measure for candidate, _ in own])
        for (candidate, latency_us), features in zip(own, rows, strict=True):
            self._commit(candidate.measure.sch.trace, latency_us)
            if latency_us is not None:
                self._samples.add_schedule(self.group, latency_us, candidate.trace)
            self._add_sample(candidate.key, features, latency_us)
            self._note(latency_us)

    def take_back(self, candidates: Sequence[Candidate]) -> None:
        """Candidates that were proposed, but not measured; they may be proposed again."""
        for candidate in candidates:
            self._measured.discard(candidate.key)
            if candidate.measure is not None:
                self._pool[candidate.key] = candidate.measure

    def _add_sample(self, candidate_key: str, rows: Rows, latency_us: float | None) -> None:
        self._samples.add(self.group, candidate_key, rows, latency_us or math.inf)

    def _commit(self, trace: Any, latency_us: float | None) -> None:
        if latency_us is not None:
            seconds = [latency_us / 1e6]
            record = ms.database.TuningRecord(trace, self._workload, seconds, self._target, None)
            self._database.commit_tuning_record(record)


def trace_text(trace: Any) -> str:
    """A trace as compact JSON text."""
    return json.dumps(_plain(trace.as_json()), separators=(",", ":"))


def _plain(value: Any) -> Any:
    """TVM's containers and numbers as JSON types."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (tvm.tirx.IntImm, tvm.tirx.FloatImm)):
        return value.value
    if isinstance(value, (list, tuple)) or hasattr(value, "__getitem__"):
        return [_plain(item) for item in value]
    return value


def replay_record(workload: Workload, record: TuningRecord, target: Target) -> Any:
    """The workload scheduled as ``record`` says, in its implementation.

    Raises whatever TVM raises where it no longer applies, ValueError where the implementation is another by now.
    """
    schedule = replay(workload.implemented(record.implementation, target), record.schedule)
    if is_other(record) and structural_key(schedule.mod) != record.candidate_key:
        raise ValueError(f"{record.implementation} has changed since record {record.record_id}")
    return schedule


def replay(mod: Any, trace: str) -> Any:
    """``mod`` scheduled as ``trace`` says. Raises whatever TVM raises where it no longer applies."""
    schedule = Schedule(mod, debug_mask="none")
    Trace.apply_json_to_schedule(json.loads(trace), schedule)
    return schedule


def default_schedule(mod: Any, target: Target) -> Any:
    """``mod`` as it is built untuned: with our own schedule on a CPU, with dlight's rules on a GPU.

    Raises EngineError.
    """
    if target.kind.name == "llvm":
        return cpu_default(mod, target)
    from tvm.s_tir import dlight

    rules = dlight.gpu
    try:
        with target:
            return dlight.ApplyDefaultSchedule(
                rules.Matmul(), rules.GEMV(), rules.Reduction(), rules.GeneralReduction(), rules.Fallback()
            )(mod)
    except Exception as error:
        raise EngineError(f"no default schedule for {target.kind.name}: {error}") from error
