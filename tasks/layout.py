"""The layout of a model's activations is measured, not guessed: once a model and target, where there is time.

The model is fused for each layout that its engine offers, and the heaviest tasks are tuned both ways. A layout
whose heaviest tasks alone take longer than the whole model in another has lost, and no more of it is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.layout_store import LayoutDecision, LayoutStore
from infra.patience import patiently
from tasks import plan
from tasks.engines.interface import DEFAULT_SCHEDULES
from tasks.errors import TuningFailed
from tasks.fuse import adopt
from tasks.records import FusedModule, ImportedModule, TuningTask
from tasks.run import Progress, TuningRun, run_of
from tasks.tune import measure_defaults, search_each

#: Tasks of each layout that are tuned, and by how many trials.
HEAVY_TASKS = 3
TRIALS = 16
#: The layout that loses may take a tenth of a budget: of one that is smaller it takes nothing.
LEAST_TRIALS = 10 * HEAVY_TASKS * TRIALS
LEAST_MINUTES = 10.0


def known_layout(run: TuningRun, imported: ImportedModule, asked: str) -> ImportedModule:
    """``imported`` for the layout that was asked for, else for the one that an earlier run decided on."""
    if not run.info.layouts or asked:
        return replace(imported, layout=asked if run.info.layouts else "")
    found = patiently("reading the layout", lambda: _store(run).get(imported.model.digest))
    if found is None or found.chosen not in run.info.layouts:
        return imported
    run.notes.append(f"layout {found.chosen}: decided by an earlier run ({_text(found)})")
    return replace(imported, layout=found.chosen)


def worth_racing(run: TuningRun, imported: ImportedModule, trials: int | None, minutes: float | None) -> bool:
    """Is there a choice, none made yet, and a budget that has room for a race?"""
    if len(run.info.layouts) < 2 or imported.layout:
        return False
    return (trials is None or trials >= LEAST_TRIALS) and (minutes is None or minutes >= LEAST_MINUTES)


@task(cache_policy=NO_CACHE)
def race_layouts(run_id: str, fused: FusedModule) -> FusedModule:
    """The model fused for the fastest layout; the run tunes its tasks from then on. Raises StoreError, EngineError.

    ``fused`` is for the preferred layout, its default schedules are measured.
    """
    run = run_of(run_id)
    first, *others = run.info.layouts
    contenders = {first: (fused, run.tasks)}
    latency_us = {first: math.nan}
    for layout in others:
        run.observer(Progress("layout", message=layout))
        other = run.engine.fuse(replace(fused.imported, layout=layout), fused.granularity)
        tasks = run.engine.extract(other, str(run.work_dir / "workloads"))
        if {t.workload_key for t in tasks} == {t.workload_key for t in run.tasks}:
            continue  # nothing in the model has a layout
        if math.isnan(latency_us[first]):
            heaviest = sorted(run.tasks, key=lambda t: -_latency_us(run, [t]))[:HEAVY_TASKS]
            search_each(run, heaviest, TRIALS, f"heavy tasks in both layouts, here {first}")
            latency_us[first] = _latency_us(run, run.tasks)
        with _aside(run):
            adopt(run, tasks[:HEAVY_TASKS])
            latency_us[layout] = _tuned_us(run, layout)
            if latency_us[layout] < min(latency_us[name] for name in contenders):
                adopt(run, tasks)
                latency_us[layout] = _tuned_us(run, layout)
                contenders[layout] = (other, tasks)
    if len(latency_us) == 1:
        return fused
    chosen = min(contenders, key=lambda name: latency_us[name])
    decision = LayoutDecision(chosen, {name: us for name, us in latency_us.items() if math.isfinite(us)})
    patiently("storing the layout", lambda: _store(run).put(fused.imported.model.digest, decision))
    run.notes.append(f"layout {chosen}: measured ({_text(decision)})")
    fused, run.tasks = contenders[chosen]
    return fused


def _tuned_us(run: TuningRun, layout: str) -> float:
    """The latency of the run's tasks, the heaviest of them tuned; infinite where one cannot be measured."""
    try:
        measure_defaults(run)
    except TuningFailed:
        return math.inf
    search_each(run, run.tasks[:HEAVY_TASKS], TRIALS, f"heavy tasks in both layouts, here {layout}")
    return _latency_us(run, run.tasks)


def _latency_us(run: TuningRun, tasks: Sequence[TuningTask]) -> float:
    states = [plan.state_of(t, run.book.of(t.workload_key)) for t in tasks]
    return math.inf if any(state.best_us is None for state in states) else plan.model_latency_us(states)


@contextmanager
def _aside(run: TuningRun) -> Iterator[None]:
    """Tune other tasks than the run's: MLflow, which shows the model's, hears nothing of them."""
    tasks, log = run.tasks, run.log
    run.log = None
    try:
        yield
    finally:
        run.tasks, run.log = tasks, log


def _store(run: TuningRun) -> LayoutStore:
    return LayoutStore(run.store, run.info, DEFAULT_SCHEDULES.get(run.info.engine, ""))


def _text(decision: LayoutDecision) -> str:
    return ", ".join(f"{name} {us / 1e3:.3g} ms" for name, us in decision.latency_us.items())
