"""``tunewright webhook``, ``nightly``, ``reconcile`` and ``deploy``: what makes a service of it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows.command_line import one_line_errors, prepare_prefect
from infra import flow_runs
from tasks.errors import InputError, PrefectError

webhook = typer.Typer(no_args_is_help=True, help="Receive new model versions from MLflow.")
console = Console()

CertificateOption = Annotated[Path | None, typer.Option(help="TLS certificate, PEM.")]
KeyOption = Annotated[Path | None, typer.Option(help="The certificate's private key, PEM.")]


@webhook.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8087,
    certificate: CertificateOption = None,
    key: KeyOption = None,
) -> None:
    """Receive MLflow's deliveries at /mlflow; GET /health answers."""
    with one_line_errors(False):
        import uvicorn

        from infra.deliveries import Deliveries
        from infra.object_store import open_store
        from infra.settings import settings
        from infra.version_events import send_event
        from infra.webhook import Receiver, make_app

        config = settings()
        if (certificate is None) != (key is None):
            raise InputError("--certificate and --key belong together")
        store = open_store(config.store_url, config.s3_endpoint_url or None)
        secret = config.webhook_secret.get_secret_value()
        app = make_app(Receiver(secret, Deliveries(store), send_event, config.webhook_body_bytes))
        store.check()
        _log_to_stderr()
        uvicorn.run(
            app, host=host, port=port, ssl_certfile=certificate, ssl_keyfile=key, limit_concurrency=64,
            timeout_keep_alive=5, server_header=False,
        )  # fmt: skip


@webhook.command()
def install(
    url: Annotated[str, typer.Option(help="Where MLflow reaches the receiver: https://host:port/mlflow")],
    check: Annotated[bool, typer.Option(help="Have MLflow send an example delivery.")] = False,
) -> None:
    """Register the receiver with MLflow; a second call changes what is registered."""
    with one_line_errors(False):
        from infra.registry_hook import install as register
        from infra.registry_hook import try_out
        from infra.settings import settings
        from infra.tracking import Tracking

        secret = settings().webhook_secret.get_secret_value()
        if not secret:
            raise InputError("no secret that MLflow could sign with; set TUNEWRIGHT_WEBHOOK_SECRET")
        tracking = Tracking(settings().tracking)
        webhook_id = register(tracking, url, secret)
        console.print(f"webhook {webhook_id} sends new model versions to {url}", highlight=False)
        if check:
            taken, answer = try_out(tracking, webhook_id)
            if not taken:
                raise InputError(f"the receiver did not take an example delivery: {answer}; is it up at {url}?")
            console.print("the receiver took an example delivery")


def nightly(
    hours: Annotated[float | None, typer.Option(help="Wall-clock hours; default: TUNEWRIGHT_NIGHTLY_HOURS.")] = None,
    deployed: Annotated[bool, typer.Option(help="Tune by runs of the deployment, not in this process.")] = False,
    debug: Annotated[bool, typer.Option(help="Show tracebacks and Prefect's log.")] = False,
) -> None:
    """Tune every model that asks for it, the most to gain first, and report."""
    with one_line_errors(debug):
        prepare_prefect(debug)
        flow_runs.check()
        from flows.night_report import STATUSES
        from flows.nightly import nightly as night
        from tasks.run import close_engines

        try:
            entries = night(deployed, hours)
        finally:
            close_engines()
        counts = Counter(entry.status for entry in entries)
        for entry in entries:
            console.print(f"{entry.title}: {entry.status}, {entry.why}", highlight=False, markup=False, soft_wrap=True)
        console.print(", ".join(f"{counts[s]} {s}" for s in STATUSES if counts[s]) or "no model asks for it")


def reconcile(
    name: Annotated[str, typer.Option(help="Only this registered model ...")] = "",
    version: Annotated[str, typer.Option(help="... and this version.")] = "",
    debug: Annotated[bool, typer.Option(help="Show tracebacks and Prefect's log.")] = False,
) -> None:
    """Start what is missing: versions with the tag tunewright.target and no tuned artifact."""
    with one_line_errors(debug):
        if bool(name) != bool(version):
            raise InputError("--name and --version belong together")
        prepare_prefect(debug)
        flow_runs.check()
        from flows.reconcile import reconcile as look

        done = look(name, version)
        for what in ("tuned", "waiting", "started"):
            for title in getattr(done, what):
                console.print(f"{what}: {title}", highlight=False, markup=False, soft_wrap=True)
        for title, why in done.problems.items():
            console.print(f"{title}: {why}", highlight=False, markup=False, soft_wrap=True)


def deploy(
    folder: Annotated[Path, typer.Option(help="The checkout that holds prefect.yaml.")] = Path(),
) -> None:
    """Register work pool, queues, the end of zombie runs, and every deployment of prefect.yaml."""
    with one_line_errors(False):
        if not (folder / "prefect.yaml").is_file():
            raise InputError(f"there is no prefect.yaml in {folder.absolute()}; give --folder")
        from infra.work_pool import register

        register()
        command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
        if subprocess.run(command, cwd=folder, check=False).returncode:
            raise PrefectError("prefect deploy failed, see above")


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.add_typer(webhook, name="webhook")
    for command in (nightly, reconcile, deploy):
        app.command()(command)


def _log_to_stderr() -> None:
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
