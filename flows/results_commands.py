"""``tunewright compare``, ``history``, ``rollback`` and ``sync``: what came of the runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows.command_line import one_line_errors
from tasks.errors import InputError

console = Console()

RunArgument = Annotated[str, typer.Argument(help="A run's id: ours, as in its name, or MLflow's.")]
NameArgument = Annotated[str, typer.Argument(help="Name in the model registry.")]
DebugOption = Annotated[bool, typer.Option(help="Show tracebacks.")]


def compare(
    before: RunArgument,
    after: RunArgument,
    html: Annotated[Path | None, typer.Option(help="Write a page into this file.")] = None,
    every: Annotated[bool, typer.Option("--all", help="List subgraphs without a change as well.")] = False,
    debug: DebugOption = False,
) -> None:
    """What changed between two runs: by subgraph, whole model, budget, versions, parameters."""
    with one_line_errors(debug):
        from flows.results_page import comparison_page
        from flows.results_tables import show_comparison
        from infra.compare import compare_runs
        from infra.settings import settings

        comparison = compare_runs(settings().tracking, before, after)
        show_comparison(console, comparison, every)
        if html is not None:
            _write(html, comparison_page(comparison).encode())
            console.print(f"page: {html}", highlight=False, markup=False)


def history(
    name: NameArgument,
    picture: Annotated[Path | None, typer.Option(help="Draw a PNG into this file.")] = None,
    debug: DebugOption = False,
) -> None:
    """A model's latency by version and night."""
    with one_line_errors(debug):
        from flows.results_tables import show_history
        from infra.history import draw_history, history_of
        from infra.settings import settings

        entries = history_of(settings().tracking, name)
        show_history(console, name, entries)
        if picture is not None:
            try:
                draw_history(picture, name, entries)
            except OSError as error:
                raise InputError(f"cannot write {picture}: {error.strerror or error}") from error
            console.print(f"picture: {picture}", highlight=False, markup=False)


def rollback(
    name: NameArgument,
    target: Annotated[str, typer.Option(help="Target key, where a name serves several.")] = "",
    why: Annotated[str, typer.Option(help="The reason, for the log.")] = "rolled back by hand",
    debug: DebugOption = False,
) -> None:
    """Give the alias champion back to the version that had it before; again: further back."""
    with one_line_errors(debug):
        from infra.champion import roll_back, targets_of
        from infra.object_store import open_store
        from infra.settings import settings

        config = settings()
        target_key = target or _only_target(name, targets_of(config.tracking, name))
        store = open_store(config.store_url, config.s3_endpoint_url or None)
        move, moved = roll_back(config.tracking, store, name, target_key, why)
        if not moved.done:
            raise InputError(f"{name} is not rolled back: {moved.message}; look at it and call again")
        before = f"version {move.before}" if move.before else "nobody"
        console.print(
            f"{name}: {move.alias} is version {moved.holder} again, it was {before}; by {move.who}: {move.reason}",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip


def sync(
    run: Annotated[str, typer.Argument(help="The run's id, as in its name: 20261130-221503-1a2b3c.")],
    over: Annotated[bool, typer.Option("--over", help="The run will not go on; it died.")] = False,
    debug: DebugOption = False,
) -> None:
    """Fill what MLflow lacks of a run from the object store; into an empty MLflow as well."""
    with one_line_errors(debug):
        from infra.object_store import open_store
        from infra.run_sync import sync_run
        from infra.settings import settings

        config = settings()
        store = open_store(config.store_url, config.s3_endpoint_url or None)
        synced = sync_run(config.tracking, store, run, over)
        for note in synced.notes:
            console.print(f"- {note}", highlight=False, markup=False, soft_wrap=True)
        console.print(
            f"{run}: {synced.measurements} measurements of {synced.tasks} tasks are in MLflow, {synced.rows} rows "
            f"were missing; {synced.status.lower()}; MLflow run {synced.mlflow_run_id}",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    for command in (compare, history, rollback, sync):
        app.command()(command)


def _only_target(name: str, champions: dict[str, str]) -> str:
    """The target that has a champion. Raises InputError where it is not one."""
    if len(champions) == 1:
        return next(iter(champions))
    if not champions:
        raise InputError(f"{name} has no champion; give --target to bring one back")
    named = ", ".join(f"{target} ({alias})" for target, alias in sorted(champions.items()))
    raise InputError(f"{name} has a champion for several targets, give one with --target: {named}")


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
