"""The build step: the model with its best records, and once without any, to compare with."""

from __future__ import annotations

from collections.abc import Collection

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.engines.interface import BuildRequest, best_first
from tasks.records import NO_SCHEDULE, Artifact, FusedModule
from tasks.run import Progress, TuningRun, run_of


@task(cache_policy=NO_CACHE)
def build_untuned(run_id: str, fused: FusedModule) -> Artifact:
    """The model with every default schedule."""
    run = run_of(run_id)
    run.observer(Progress("build", message="the untuned model, to compare with"))
    artifact = run.engine.build(BuildRequest(fused, {}, str(run.work_dir / "untuned"), tuned=False))
    run.notes += [f"{choice.name}: {choice.note}" for choice in artifact.choices if choice.note == NO_SCHEDULE]
    return artifact


@task(cache_policy=NO_CACHE)
def build_tuned(run_id: str, fused: FusedModule) -> Artifact:
    """The model with the best record of every subgraph; names the subgraphs that none covers."""
    run = run_of(run_id)
    run.observer(Progress("build", message="the tuned model"))
    artifact = build_with(run, fused, "tuned", sources=True)
    if artifact.uncovered:
        names = ", ".join(artifact.uncovered)
        run.notes.append(f"built with the default schedule, since no record covers them: {names}")
    others = [f"{choice.name} ({choice.implementation})" for choice in artifact.choices if choice.implementation]
    if others:
        run.notes.append(f"computed otherwise than the operators say, which was faster: {', '.join(others)}")
    return artifact


def build_with(
    run: TuningRun, fused: FusedModule, folder: str, leave_out: Collection[str] = (), sources: bool = False
) -> Artifact:
    """The model in the run's ``folder`` with the best records, the tuned workloads in ``leave_out`` at their default.

    With ``sources`` what was built is written for people, see ``BuildRequest``. Raises EngineError.
    """
    best = {key: best_first(records) for key, records in run.book.all().items() if key not in leave_out}
    sources_dir = str(run.sources) if sources else ""
    return run.engine.build(BuildRequest(fused, best, str(run.work_dir / folder), tuned=True, sources_dir=sources_dir))
