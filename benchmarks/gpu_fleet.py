"""What a user starts on a machine with a GPU: the doctor, an agent, a tuning run; and a device that is in use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import Place
from benchmarks.gpu_device import said

_ROOT = Path(__file__).parents[1]
_TRIALS = 24
_ANSWER_S = 45.0
#: No scheduler is there: an agent that gets as far as to look for one has not refused the device.
_NOWHERE = "tcp://127.0.0.1:9"

#: Holds the device, as another run of ours does with the lock, or as somebody else's process without it.
_HOLDER = """
import sys, time
from tasks.engines.relax.bootstrap import import_tvm
device, locked = sys.argv[1], sys.argv[2] == "locked"
if locked:
    from tasks.engines.measuring.device_lock import DeviceLock
    lock = DeviceLock(device)
    lock.acquire("the holder of this check")
if device.startswith("cuda"):
    import_tvm("cuda")
    import numpy, tvm
    kept = tvm.runtime.tensor(numpy.zeros(1 << 26, dtype="float32"), tvm.runtime.device(device))
print("holding", flush=True)
time.sleep(300)
"""


def doctor(place: Place) -> dict[str, Any]:
    """``tunewright doctor --target cuda``."""
    done = _command(place, "doctor", "--target", place.target, timeout_s=110)
    failed = [line.strip() for line in done.stdout.splitlines() if "FAIL" in line]
    return {"ok": done.returncode == 0, "failed": failed}


def busy(place: Place) -> dict[str, Any]:
    """An agent refuses a device that a second process holds, and names that process."""
    found: dict[str, Any] = {}
    kinds = ("locked", "foreign") if place.on_gpu else ("locked",)
    for kind in kinds:
        with _holder(place, kind) as pid:
            if place.on_gpu:
                query = "--query-compute-apps=pid,process_name,used_memory"
                found[f"{kind}_smi"] = said("nvidia-smi", query, "--format=csv,noheader")
            said_it, seconds = _agent_says(place)
        found[kind] = {
            "refused": "in use" in said_it, "named": str(pid) in said_it,
            "seconds": round(seconds, 1), "says": said_it[-300:],
        }  # fmt: skip
    return {"ok": all(found[kind]["refused"] and found[kind]["named"] for kind in kinds), **found}


def fleet(place: Place) -> dict[str, Any]:
    """A scheduler, an agent on the device, and a run on it from the model to the published version."""
    import onnx

    from tests.fleet.fleet import local_fleet
    from tests.flows.command import last_json
    from tests.models import conv_model
    from tests.services import prefect_server

    folder = place.scratch / "fleet"
    folder.mkdir(exist_ok=True)
    onnx.save(conv_model(size=56), folder / "convs.onnx")
    started = time.monotonic()
    (folder / "prefect").mkdir(exist_ok=True)
    with (
        prefect_server(folder / "prefect") as url,
        local_fleet(folder, {**_settings(folder), "PREFECT_API_URL": url}) as local,
    ):
        local.start_agent(place.device)
        local.wait_for_agents(place.device)
        joined_s = time.monotonic() - started
        listed = local.listed()[place.device]
        done = local.command().run(
            "tune", str(folder / "convs.onnx"), "--target", place.target, "--trials", str(_TRIALS), timeout_s=300
        )
        print(done.stdout, done.stderr[-4000:], local.log(place.device), sep="\n---\n", flush=True)
    if done.returncode != 0:
        return {"ok": False, "joined_s": round(joined_s, 1), "error": done.stderr.strip()[-600:]}
    line = last_json(done.stdout)
    return {
        "ok": line["trials"] > 0 and line["max_abs_error"] < 1e-3, "agent": listed["info"]["target"]["key"],
        "joined_s": round(joined_s, 1), "run_s": round(time.monotonic() - started - joined_s, 1), **line,
    }  # fmt: skip


def _settings(folder: Path) -> dict[str, str]:
    database = f"sqlite:///{folder / 'mlflow.db'}"
    return {
        "TUNEWRIGHT_STORE": str(folder / "store"), "MLFLOW_TRACKING_URI": database, "TUNEWRIGHT_TRACKING_URI": database,
        "PREFECT_HOME": str(folder / "prefect-home"),
    }  # fmt: skip


def _command(place: Place, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    home = place.scratch / "home"
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments], env=_environment(home), cwd=place.scratch, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, check=False,
    )  # fmt: skip
    print(done.stdout, flush=True)
    return done


def _environment(home: Path) -> dict[str, str]:
    own = {"TUNEWRIGHT_HOME": str(home), "PREFECT_HOME": str(home / "prefect"), "PYTHONPATH": str(_ROOT)}
    return {**os.environ, **own, "COLUMNS": "400"}


def _agent_says(place: Place) -> tuple[str, float]:
    """What an agent says that is started on the device, and after how long."""
    started = time.monotonic()
    arguments = ("agent", "--device", place.device, "--scheduler", _NOWHERE)
    try:
        done = _command(place, *arguments, timeout_s=_ANSWER_S)
    except subprocess.TimeoutExpired:
        return f"nothing: after {_ANSWER_S:g} s it was still starting, so it did not refuse", _ANSWER_S
    return done.stdout.strip(), time.monotonic() - started


@contextmanager
def _holder(place: Place, kind: str) -> Iterator[int]:
    """A process that holds the device; its process id."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, place.device, kind], env=_environment(place.scratch / "home"),
        cwd=place.scratch, text=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "holding":
            raise RuntimeError(f"the process that was to hold {place.device} ended")
        yield process.pid
    finally:
        process.kill()
        process.wait()
