"""Runs flows from the command line: what takes longest to start goes first, bad input is found before it."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Protocol

from rich.console import Console

from flows.embedded_server import EmbeddedServer, is_configured
from flows.parameters import TuneParameters
from infra.object_store import open_store
from infra.settings import settings
from infra.tracking import Tracking
from tasks.engines.child import ChildOptions
from tasks.errors import TrackingError
from tasks.import_model import import_source
from tasks.records import EngineInfo, FusedModule, ModelFile, TuningSummary, TuningTask
from tasks.run import close_engines, engine_for
from tasks.stopping import interruptible


class _Server(Protocol):
    def join(self) -> None: ...


def run_in_terminal(parameters: TuneParameters, console: Console) -> TuningSummary:
    """Tune with a progress bar; the table at the end, a line of JSON last."""
    # The server takes longest to start. A run on agents needs one that they reach too, and says so itself.
    server: _Server | None = None
    if not settings().scheduler and not is_configured():
        server = EmbeddedServer()
    options = parameters.child_options(_target_of_agents(parameters, console))
    engine_for(options)
    server = server or _start_prefect()
    _check(parameters, options)
    from flows.terminal import ProgressBar, show_summary, summary_line
    from flows.tune_model import observers, tune_model

    server.join()
    with ProgressBar(console) as bar, interruptible():
        observers.append(bar)
        try:
            summary = tune_model(parameters)
        finally:
            observers.remove(bar)
            close_engines()
    show_summary(console, summary)
    page = _page_of(summary.published.mlflow_run_id)
    if page:
        console.print(page, highlight=False, markup=False, soft_wrap=True)
    console.print(summary_line(summary), highlight=False, markup=False, soft_wrap=True)
    return summary


def _page_of(run_id: str) -> str:
    """The run's page in MLflow; a link is no reason to fail."""
    try:
        return Tracking(settings().tracking).run_page(run_id)
    except TrackingError:
        return ""


def inspect_model(parameters: TuneParameters) -> tuple[FusedModule, tuple[TuningTask, ...]]:
    """Import, fuse and extract without Prefect, MLflow or a store."""
    engine = engine_for(parameters.child_options())
    fused = engine.fuse(engine.import_model(_import(parameters)), parameters.granularity)
    with tempfile.TemporaryDirectory() as scratch:
        tasks = engine.extract(fused, str(Path(scratch)))
    close_engines()
    return fused, tasks


def _start_prefect() -> threading.Thread:
    """Have Prefect's client find its server, or start one as its settings say, while other things are done."""

    def start() -> None:
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True):
            pass

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    return thread


def _target_of_agents(parameters: TuneParameters, console: Console) -> EngineInfo | None:
    """What the fleet's agents measure, where a scheduler is set. Raises InputError, FleetError."""
    config = settings()
    if not config.scheduler:
        return None
    from infra.cluster import connect
    from tasks.fleet import wait_for_target

    client = connect(config.scheduler, config.certificates)
    try:
        said = lambda text: console.print(text, highlight=False)  # noqa: E731
        return wait_for_target(client, parameters.target, parameters.engine, said)
    finally:
        client.close()


def _check(parameters: TuneParameters, options: ChildOptions) -> None:
    """What would end the run later ends it now. Raises what the steps raise.

    The engine keeps what it imports here: the flow's own import and fusion find it done.
    """
    config = settings()
    _make_home(config.home)
    open_store(config.store_url, config.s3_endpoint_url or None).check()
    model = _import(parameters)
    engine = engine_for(options)
    engine.fuse(engine.import_model(model), parameters.granularity)
    Tracking(config.tracking).check()


def _make_home(home: Path) -> None:
    """Raises StoreError."""
    from tasks.errors import StoreError

    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make the folder {home}: {error.strerror}; set TUNEWRIGHT_HOME") from error
    if not os.access(home, os.W_OK):
        raise StoreError(f"cannot write to {home}; set TUNEWRIGHT_HOME to a folder that you can write to")


def _import(parameters: TuneParameters) -> ModelFile:
    """The model, fetched and normalised; the flow's own import finds it done."""
    return import_source(parameters.model, parameters.shapes, settings().home)
