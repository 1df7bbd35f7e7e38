"""Calls a function in a fresh interpreter: one without threads, that may be forked, crashed and killed.

in_fresh(scenarios.segfault, "argument")    # arguments and the answer are JSON types
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]


def start_fresh(function: Callable[..., Any], *arguments: Any) -> subprocess.Popen[str]:
    """``function(*arguments)`` in a process of its own; its answer will be the last line of its stdout."""
    name = f"{function.__module__}:{function.__qualname__}"
    command = [sys.executable, "-m", "tests.fresh", name, json.dumps(arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def in_fresh(function: Callable[..., Any], *arguments: Any, timeout_s: float = 120.0) -> Any:
    """What ``function(*arguments)`` answers in a process of its own."""
    process = start_fresh(function, *arguments)
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"exit status {process.returncode}:\n{out[-1000:]}\n{err[-3000:]}"
    return json.loads(out.splitlines()[-1])


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below ``pid``, which is alive."""
    return psutil.Process(pid).children(recursive=True)


def wait_until_gone(processes: list[psutil.Process], limit_s: float = 5.0) -> list[psutil.Process]:
    """Those of ``processes`` that are still running after ``limit_s``. A zombie runs no more."""
    deadline = time.monotonic() + limit_s
    while (left := [p for p in processes if _runs(p)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main() -> None:
    """The fresh interpreter's side."""
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    answer = function(*json.loads(sys.argv[2]))
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
