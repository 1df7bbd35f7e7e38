"""What every command does alike: errors in one line, Prefect's settings before it is imported."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

from tasks.errors import TunewrightError

#: Services of Prefect's embedded server that a single run has no use for. They poll, and what polls
#: disturbs measurements. A server of its own, named by PREFECT_API_URL, is not touched by this.
_IDLE_SERVICES = (
    "SCHEDULER",
    "LATE_RUNS",
    "CANCELLATION_CLEANUP",
    "PAUSE_EXPIRATIONS",
    "FOREMAN",
    "REPOSSESSOR",
    "TRIGGERS",
)

errors = Console(stderr=True)


@contextmanager
def one_line_errors(debug: bool) -> Iterator[None]:
    """What went wrong and what to do, in one line; the class of the error decides the exit status."""
    from tasks.run import close_engines

    try:
        yield
    except KeyboardInterrupt:
        close_engines()
        errors.print("stopped; what was measured is stored, the same command continues", highlight=False)
        raise typer.Exit(130) from None
    except TunewrightError as error:
        close_engines()
        if debug:
            traceback.print_exc()
            errors.print(error.__dict__.get("detail", ""), highlight=False, markup=False)
        text = " ".join(str(error).split())
        errors.print(f"tunewright: {text}", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(error.exit_status) from None


def prepare_prefect(debug: bool) -> None:
    """Settings that Prefect reads when it is imported; those that the user made stay."""
    quiet = {} if debug else {"PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL"}
    for name, value in {
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # A server that restarts or is away for some minutes delays a run, and does not end it.
        "PREFECT_CLIENT_MAX_RETRIES": "8",
        # The embedded server goes with the command: nobody browses it, nobody stores blocks in it.
        "PREFECT_SERVER_UI_ENABLED": "false",
        "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "tunewright",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        **{f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false" for service in _IDLE_SERVICES},
        **quiet,
    }.items():
        os.environ.setdefault(name, value)
    # Prefect's server does not make the folder of its database, and then waits for itself in vain.
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    home.mkdir(parents=True, exist_ok=True)
