"""The import step: the model on this machine, every dimension bound, normalised."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.import_model import import_source
from tasks.records import ModelFile
from tasks.run import Progress, run_of


@task(cache_policy=NO_CACHE, name="import_model")
def import_step(run_id: str, source: str, shapes: Mapping[str, tuple[int, ...]], name: str) -> ModelFile:
    """Fetch and normalise the model at ``source``. Raises ModelError, ShapeError, StoreError, TrackingError."""
    run = run_of(run_id)
    run.observer(Progress("import", message=source))
    model = import_source(source, shapes, run.home)
    return dataclasses.replace(model, name=name) if name else model
