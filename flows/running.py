"""Runs flows from the command line: the engine first, since it takes longest to start."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from flows.parameters import TuneParameters
from flows.terminal import ProgressBar, show_summary, summary_line
from flows.tune_model import child_options, observers, tune_model
from infra.settings import settings
from tasks.import_model import import_model_file
from tasks.model_source import fetch
from tasks.records import FusedModule, TuningSummary, TuningTask
from tasks.run import close_engines, engine_for


def run_in_terminal(parameters: TuneParameters, console: Console) -> TuningSummary:
    """Tune with a progress bar; the table at the end, a line of JSON last."""
    engine_for(child_options(parameters))
    with ProgressBar(console) as bar:
        observers.append(bar)
        try:
            summary = tune_model(parameters)
        finally:
            observers.remove(bar)
            close_engines()
    show_summary(console, summary)
    console.print(summary_line(summary), highlight=False, markup=False, soft_wrap=True)
    return summary


def inspect_model(parameters: TuneParameters) -> tuple[FusedModule, tuple[TuningTask, ...]]:
    """Import, fuse and extract without Prefect, MLflow or a store."""
    engine = engine_for(child_options(parameters))
    folder = settings().home / "models"
    folder.mkdir(parents=True, exist_ok=True)
    model = import_model_file(fetch(parameters.model, folder), parameters.shapes, folder)
    fused = engine.fuse(engine.import_model(model), parameters.granularity)
    with tempfile.TemporaryDirectory() as scratch:
        tasks = engine.extract(fused, str(Path(scratch)))
    close_engines()
    return fused, tasks
