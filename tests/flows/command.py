"""The command as a user starts it, against services of the tests' own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tasks.engines.wire import from_line
from tasks.records import TuningRecord

#: Marks every process that a command started, so that orphans are found.
MARK = "TUNEWRIGHT_TEST_MARK"


@dataclass
class Command:
    """How ``tunewright`` is called in one test: a home folder and an environment of its own."""

    home: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def run(self, *arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Call and wait."""
        return subprocess.run(
            self._line(arguments), env=self.environment(), cwd=self.home.parent, text=True,
            capture_output=True, timeout=timeout_s, check=False,
        )  # fmt: skip

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Call and go on."""
        return subprocess.Popen(
            self._line(arguments), env=self.environment(), cwd=self.home.parent, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def processes(self) -> list[psutil.Process]:
        """Every living process that a call has started."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def engine(self) -> psutil.Process | None:
        """The engine child: the oldest process of its group."""
        engines = [p for p in self.processes() if any("relax.worker" in part for part in p.cmdline())]
        return min(engines, key=lambda p: p.create_time(), default=None)

    def journalled(self) -> int:
        """Records in this machine's journals."""
        return sum(path.read_bytes().count(b"\n") for path in (self.home / "journals").glob("*.jsonl"))

    def stored(self) -> list[TuningRecord]:
        """Every record line in the directory store."""
        lines = [
            line
            for path in sorted((self.home / "store" / "records").rglob("*.jsonl"))
            for line in path.read_bytes().splitlines()
        ]
        return [from_line(TuningRecord, line) for line in lines]

    def _line(self, arguments: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-m", "flows.cli", *arguments]

    def environment(self) -> dict[str, str]:
        """What a call sees."""
        root = str(Path(__file__).parents[2])
        own = {"TUNEWRIGHT_HOME": str(self.home), "PYTHONPATH": root, MARK: self.mark, "COLUMNS": "200"}
        return {**os.environ, **own, **self.settings}


def last_json(output: str) -> dict[str, Any]:
    """The last line that a command printed, which is JSON."""
    parsed = json.loads(output.strip().splitlines()[-1])
    assert isinstance(parsed, dict)
    return parsed


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until ``condition`` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
