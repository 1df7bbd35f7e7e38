"""The steps that need only the engine: translate, fuse, extract."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.patience import patiently
from tasks.errors import StoreError
from tasks.records import FirstSessions, FusedModule, ImportedModule, ModelFile, TuningTask
from tasks.run import Progress, TuningRun, run_of

logger = logging.getLogger("tunewright")


@task(cache_policy=NO_CACHE)
def translate(run_id: str, model: ModelFile) -> ImportedModule:
    """The model as an IRModule. Raises ModelError."""
    run = run_of(run_id)
    run.observer(Progress("import"))
    return run.engine.import_model(model)


@task(cache_policy=NO_CACHE)
def fuse(run_id: str, imported: ImportedModule, granularity: str) -> FusedModule:
    """The fused subgraphs of the model."""
    run = run_of(run_id)
    run.observer(Progress("fuse"))
    return run.engine.fuse(imported, granularity)


@task(cache_policy=NO_CACHE)
def extract(run_id: str, fused: FusedModule) -> tuple[TuningTask, ...]:
    """One tuning task a distinct workload; their definitions go to the store, their records come from it."""
    run = run_of(run_id)
    run.observer(Progress("extract"))
    tasks = run.engine.extract(fused, str(run.work_dir / "workloads"))
    _fetch_samples(run)
    recovered = run.recover_journals()
    if recovered:
        run.notes.append(f"{recovered} measurements were recovered from the journals of a run that died")
    adopt(run, tasks)
    return run.tasks


def adopt(run: TuningRun, tasks: Sequence[TuningTask]) -> None:
    """Let the run tune ``tasks``: their workloads go to the store, their records come from it. Raises StoreError."""
    run.tasks = tuple(tasks)
    records, keys = run.records, [task.workload_key for task in run.tasks]
    assert records is not None

    def put() -> None:
        for tuning_task in run.tasks:
            records.put_workload(tuning_task.workload_key, Path(tuning_task.workload_path).read_bytes())

    patiently("storing the workloads", put)
    run.book.load(patiently("reading records", lambda: records.load(keys)), run.measure)


def _fetch_samples(run: TuningRun) -> None:
    """What other machines and nights have learned; a run can do without it."""
    assert run.samples is not None
    try:
        for run_id in run.samples.unpublished():
            run.samples.publish(run_id)
        run.samples.fetch()
    except StoreError as error:
        logger.warning("%s; the cost model starts from what is on this machine", error)
    try:
        run.brought_before = run.gains.load() if run.gains is not None else FirstSessions()
    except (StoreError, ValueError) as error:
        logger.warning("%s; the first sessions go by the roofline alone", error)
