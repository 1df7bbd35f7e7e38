"""The build step: the model with its best records, and once without any, to compare with."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.engines.interface import BuildRequest, best_first
from tasks.records import Artifact, FusedModule
from tasks.run import Progress, run_of


@task(cache_policy=NO_CACHE)
def build_untuned(run_id: str, fused: FusedModule) -> Artifact:
    """The model with every default schedule."""
    run = run_of(run_id)
    run.observer(Progress("build", message="the untuned model, to compare with"))
    return run.engine.build(BuildRequest(fused, {}, str(run.work_dir / "untuned"), tuned=False))


@task(cache_policy=NO_CACHE)
def build_tuned(run_id: str, fused: FusedModule) -> Artifact:
    """The model with the best record of every subgraph; names the subgraphs that none covers."""
    run = run_of(run_id)
    run.observer(Progress("build", message="the tuned model"))
    best = {key: best_first(records) for key, records in run.book.all().items()}
    artifact = run.engine.build(BuildRequest(fused, best, str(run.work_dir / "tuned"), tuned=True))
    if artifact.uncovered:
        names = ", ".join(artifact.uncovered)
        run.notes.append(f"built with the default schedule, since no record covers them: {names}")
    return artifact
