"""The publish step: the artifact into the store and the registry, the whole run into MLflow."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.champion import find_champion
from infra.patience import patiently
from infra.promotion import Champion, Race
from infra.published_model import Publication, publish_model
from infra.settings import settings
from tasks.errors import VerificationError
from tasks.records import Artifact, EngineInfo, ModelFile, PublishedVersion, Verdict
from tasks.run import Progress, run_of


@task(cache_policy=NO_CACHE)
def look_up_champion(run_id: str, name: str) -> Champion | None:
    """The version that serves now, which the new one is raced against."""
    run = run_of(run_id)
    key = run.engine.describe().target.key
    return patiently("looking for the champion", lambda: find_champion(settings().tracking, name, key))


@task(cache_policy=NO_CACHE)
def publish(run_id: str, model: ModelFile, artifact: Artifact, verdict: Verdict, race: Race) -> PublishedVersion:
    """Publish the artifact. Raises VerificationError where it is wrong: then nothing is published."""
    run = run_of(run_id)
    run.observer(Progress("publish"))
    if not verdict.correct:
        raise VerificationError(
            f"the tuned model is wrong and was not published: {'; '.join(verdict.failed_outputs[:3])}; "
            f"allowed is {verdict.tolerance}; the run in MLflow holds the schedules"
        )
    assert run.log is not None
    info: EngineInfo = run.engine.describe()
    publication = Publication(model.name, run.log.run_id, model, info, artifact, verdict, run.asked_target)
    return patiently("publishing", lambda: publish_model(settings().tracking, run.store, publication, race))
