"""``tunewright``: the command line, thin over the flows."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flows import fleet_commands, records_commands, results_commands, service_commands
from flows.command_line import one_line_errors, prepare_prefect
from flows.shapes import parse_shapes
from tasks.errors import InputError

if TYPE_CHECKING:
    from flows.parameters import TuneParameters

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console()

ModelArgument = Annotated[str, typer.Argument(help="ONNX file, models:/name/version or @alias, runs:/..., s3://...")]
ShapeOption = Annotated[list[str] | None, typer.Option("--shape", help="Sizes of an input: name=1,3,48,320.")]
TargetOption = Annotated[str, typer.Option(help="cpu, cuda, or TVM's JSON.")]
EngineOption = Annotated[str, typer.Option(help="relax or relay.")]
GranularityOption = Annotated[str, typer.Option(help="subgraph or operator.")]
DebugOption = Annotated[bool, typer.Option(help="Show tracebacks and Prefect's log.")]


@app.command()
def tune(
    model: ModelArgument,
    shape: ShapeOption = None,
    target: TargetOption = "cpu",
    trials: Annotated[int | None, typer.Option(help="Search trials to spend.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Wall-clock minutes for the whole run.")] = None,
    engine: EngineOption = "relax",
    granularity: GranularityOption = "subgraph",
    layout: Annotated[str, typer.Option(help="channels-last or as-imported; by default what is faster.")] = "",
    name: Annotated[str, typer.Option(help="Name in the model registry.")] = "",
    out: Annotated[Path | None, typer.Option(help="Copy the artifact into this folder.")] = None,
    device: Annotated[str, typer.Option(help="cuda:1, cpu:0-3.")] = "",
    seed: int = 0,
    debug: DebugOption = False,
) -> None:
    """Tune a model, build and verify it, publish it."""
    with one_line_errors(debug):
        parameters = _parameters(
            model=model, shapes=parse_shapes(shape or []), target=target, trials=trials, minutes=minutes,
            engine=engine, granularity=granularity, layout=layout, name=name, device=device, seed=seed,
        )  # fmt: skip
        prepare_prefect(debug)
        from flows.running import run_in_terminal

        summary = run_in_terminal(parameters, console)
        if out is not None:
            shutil.copytree(summary.artifact.path, out, dirs_exist_ok=True)


@app.command()
def inspect(
    model: ModelArgument,
    shape: ShapeOption = None,
    target: TargetOption = "cpu",
    engine: EngineOption = "relax",
    granularity: GranularityOption = "subgraph",
    debug: DebugOption = False,
) -> None:
    """Import, fuse and extract; print the subgraphs and tasks; tune nothing."""
    with one_line_errors(debug):
        parameters = _parameters(
            model=model, shapes=parse_shapes(shape or []), target=target, engine=engine, granularity=granularity,
        )  # fmt: skip
        prepare_prefect(debug)
        from flows.running import inspect_model
        from flows.terminal import show_subgraphs

        fused, tasks = inspect_model(parameters)
        show_subgraphs(console, fused, tasks)


@app.command()
def doctor(target: TargetOption = "cpu") -> None:
    """Check what a tuning run needs, and say what to do about each failure."""
    prepare_prefect(False)
    from flows.doctor import examine
    from infra.settings import settings

    failed = 0
    for finding in examine(settings(), target):
        mark = "[green]ok  [/]" if finding.ok else "[red]FAIL[/]"
        console.print(f"{mark} {finding.name}: ", end="")
        console.print(finding.found, highlight=False, markup=False)
        if not finding.ok:
            failed += 1
            console.print(f"     do: {finding.remedy}", highlight=False, markup=False)
    raise typer.Exit(2 if failed else 0)


@app.command()
def ui(port: int = 5000, host: str = "127.0.0.1") -> None:
    """Start the MLflow UI on the run store in use."""
    from infra.settings import settings

    uri = settings().tracking
    if uri.startswith(("http://", "https://")):
        console.print(f"MLflow is a server already: open {uri}")
        return
    settings().home.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri, "--host", host, "--port", str(port)]
    os.execv(sys.executable, command)  # noqa: S606 - it becomes the server, Ctrl-C goes to it


def _parameters(**values: object) -> TuneParameters:
    """The parameters, or one line that says which option is wrong. Raises InputError."""
    from pydantic import ValidationError

    from flows.parameters import TuneParameters

    try:
        return TuneParameters.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "parameters"
        raise InputError(f"--{where}: {first['msg'].lower()} (given: {first['input']!r})") from error


service_commands.add_to(app)
results_commands.add_to(app)
fleet_commands.add_to(app)
records_commands.add_to(app)


def main() -> None:
    """The entry point of the command."""
    app()


if __name__ == "__main__":
    main()
