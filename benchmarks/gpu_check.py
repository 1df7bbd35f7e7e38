"""One step of the checks that need a GPU; ``gpu_check.sh`` runs them all (docs/gpu.md).

    python -m benchmarks.gpu_check faults --out gpu-check --scratch /tmp/x

A step prints what it does, and writes ``<scratch>/<step>.json``: ok, seconds, figures, and an error where there is one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Where each step is. Modules are imported by the step alone: an environment without Prefect runs those without it.
STEPS = {
    "device": "benchmarks.gpu_device",
    "measure": "benchmarks.gpu_measure",
    "faults": "benchmarks.gpu_faults",
    "overlap": "benchmarks.gpu_faults",
    "latency": "benchmarks.gpu_measure",
    "fleet": "benchmarks.gpu_fleet",
    "busy": "benchmarks.gpu_fleet",
    "doctor": "benchmarks.gpu_fleet",
}


@dataclass(frozen=True)
class Place:
    """Where a step works: ``out`` is kept, ``scratch`` is not; ``device`` is ``cuda:0``, or cores for a rehearsal."""

    out: Path
    scratch: Path
    device: str

    @property
    def on_gpu(self) -> bool:
        """Is this the check itself, and no rehearsal on a CPU?"""
        return self.device.startswith("cuda")

    @property
    def target(self) -> str:
        """The target as a user names it."""
        return "cuda" if self.on_gpu else "cpu"


#: What a step gives: figures, and ``ok`` where they are not all well.
Step = Callable[[Place], dict[str, Any]]


def main() -> None:
    """Run the step that the command line names; exit status 1 where it is not well."""
    parser = argparse.ArgumentParser(description="One step of the checks that need a GPU.")
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0", help="cuda:0; cores such as cpu:0-1 rehearse without a GPU")
    arguments = parser.parse_args()
    # An end from outside runs the clean-up too: what a step started ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped at its time limit"))
    place = Place(arguments.out.resolve(), arguments.scratch.resolve(), arguments.device)
    sys.exit(0 if run_step(arguments.step, place) else 1)


def run_step(name: str, place: Place) -> bool:
    """Run one step and write what it found; no exception leaves it but an end from outside."""
    started = time.monotonic()
    entry: dict[str, Any] = {"ok": False}
    try:
        step: Step = getattr(importlib.import_module(STEPS[name]), name)
        entry = {"ok": True, **step(place)}
    except SystemExit as error:
        entry["error"] = str(error)
        raise
    except BaseException as error:  # whatever breaks is what this check is to tell
        traceback.print_exc()
        entry["error"] = f"{type(error).__name__}: {str(error).strip()[-600:]}"
    finally:
        entry = {"ok": entry.pop("ok"), "seconds": round(time.monotonic() - started, 1), **entry}
        (place.scratch / f"{name}.json").write_text(json.dumps(entry) + "\n")
        print(json.dumps(entry, indent=1), flush=True)
    return bool(entry["ok"])


if __name__ == "__main__":
    main()
