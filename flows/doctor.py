"""``tunewright doctor``: is everything here that a tuning run needs, and what to do where it is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from infra.object_store import open_store
from infra.settings import Settings
from infra.tracking import Tracking
from tasks.engines.child import ChildOptions, EngineChild
from tasks.errors import TunewrightError

#: Packages that must be exactly what they were tested with, and what happens otherwise.
_EXACT = {
    "apache-tvm": ("0.27.0.post1", "the engine reads TVM's internals"),
    "apache-tvm-ffi": ("0.1.14.post0", "with 0.1.15 every search ends in a segmentation fault"),
}


@dataclass(frozen=True)
class Finding:
    """One check: ``ok`` or not, what was found, and what to do."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


def examine(config: Settings, target: str) -> Iterator[Finding]:
    """Run every check, one after the other; none raises."""
    yield _interpreter()
    yield from _packages()
    yield _compiler()
    yield _guarded("engine relax", lambda: _engine(config, target), "see the message; reinstall with 'make venv'")
    yield _relay(config, target)
    yield _devices()
    yield _guarded("object store", lambda: _store(config), "set TUNEWRIGHT_STORE to a place you can write to")
    yield _guarded("MLflow", lambda: _mlflow(config), "start it, or set MLFLOW_TRACKING_URI")
    yield _guarded("Prefect", _prefect, "start it, or unset PREFECT_API_URL to use the embedded server")


def _interpreter() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    return Finding("Python", sys.version_info >= (3, 11), found, "use Python 3.11 or later")


def _packages() -> Iterator[Finding]:
    for name, (wanted, why) in _EXACT.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "not installed"
        yield Finding(name, found == wanted, found, f"pip install {name}=={wanted} ({why})")


def _compiler() -> Finding:
    for name in ("g++", "gcc", "clang++", "clang"):
        path = shutil.which(name)
        if path:
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            return Finding(
                "C compiler", answer.returncode == 0, answer.stdout.splitlines()[0] if answer.stdout else path
            )
    return Finding("C compiler", False, "none found", "install g++ or clang: it links the compiled model")


def _engine(config: Settings, target: str, engine: str = "relax") -> str:
    options = ChildOptions(
        engine, config.python_of(engine), target, "cpu:0", config.core_count,
        start_timeout_s=config.engine_start_timeout_s, extra_environment=config.engine_environment(engine),
    )  # fmt: skip
    with EngineChild(options) as child:
        info = child.describe()
    return f"TVM {info.tvm_version} on Python {info.python_version}, target {info.target.key}"


def _relay(config: Settings, target: str) -> Finding:
    """The relay engine is checked where it is set up; only ``--engine relay`` needs it."""
    python = config.relay_python
    if not python.exists() and "relay_python" not in config.model_fields_set:
        return Finding("engine relay", True, "not set up; only --engine relay needs it ('make relay-env')")
    # TVM's JSON differs between the versions; the short names are the same.
    name = target if target in ("cpu", "cuda") else "cpu"
    remedy = "see the message; 'make relay-env' sets up an environment, TUNEWRIGHT_RELAY_PYTHON names another"
    return _guarded("engine relay", lambda: _engine(config, name, "relay"), remedy)


def _devices() -> Finding:
    cores = len(os.sched_getaffinity(0))
    found = [f"cpu ({cores} cores)"]
    tool = shutil.which("nvidia-smi")
    if tool:
        answer = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
        found += [line.split(" (UUID")[0] for line in answer.stdout.splitlines() if line.startswith("GPU")]
    return Finding("devices", True, ", ".join(found))


def _store(config: Settings) -> str:
    store = open_store(config.store_url, config.s3_endpoint_url or None)
    store.check()
    return store.uri("")


def _mlflow(config: Settings) -> str:
    Tracking(config.tracking).check()
    return config.tracking


def _prefect() -> str:
    url = os.environ.get("PREFECT_API_URL", "")
    if not url:
        return f"embedded server, its database in {Path(os.environ.get('PREFECT_HOME', '~/.prefect'))}"
    import httpx

    httpx.get(f"{url.rstrip('/')}/health", timeout=10).raise_for_status()
    return url


def _guarded(name: str, check: Callable[[], str], remedy: str) -> Finding:
    try:
        return Finding(name, True, check())
    except TunewrightError as error:
        return Finding(name, False, str(error), remedy)
    except Exception as error:  # a check may fail in ways of its own; the others are still of use
        return Finding(name, False, f"{type(error).__name__}: {error}".splitlines()[0], remedy)
