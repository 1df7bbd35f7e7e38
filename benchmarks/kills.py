"""Kills the command at random moments and counts what was lost and what was measured twice."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tasks.engines.measuring.journal import read_journal
from tests.flows.command import Command, wait_for

#: Channels from conv to conv: eleven tuning tasks, so that there is enough to search for all kills.
_CHANNELS = (8, 12, 16, 20, 24, 28, 32, 24, 20, 16, 12, 8)
#: More than the command can spend before it is killed.
_TRIALS = 400
_FINAL_TRIALS = 8
#: A kill comes within this many seconds after the first record that the run has journalled.
SPAN_S = 10.0
_START_S = 240.0


@dataclass(frozen=True)
class KillResult:
    """``acknowledged``: records that were on the disk after a kill. ``ended``: runs that ended before theirs."""

    kills: int
    ended: int
    acknowledged: int
    stored: int
    lost: int
    doubled: int
    seconds: float


def own_command(folder: Path, prefect_url: str, threads: int) -> Command:
    """A command with a home of its own in ``folder``: directory store, MLflow on SQLite."""
    home = folder / "home"
    folder.mkdir(parents=True, exist_ok=True)
    database = f"sqlite:///{folder / 'mlflow.db'}"
    return Command(
        home,
        {
            "PREFECT_API_URL": prefect_url, "MLFLOW_TRACKING_URI": database, "TUNEWRIGHT_TRACKING_URI": database,
            "TUNEWRIGHT_STORE": str(home / "store"), "TUNEWRIGHT_THREADS": str(threads),
            "PREFECT_HOME": str(folder / "prefect-home"),
        },
    )  # fmt: skip


def kill_runs(kills: int, seed: int, command: Command) -> KillResult:
    """Kill and start again ``kills`` times, then run to the end once."""
    started = time.monotonic()
    dice = random.Random(seed)
    acknowledged: set[str] = set()
    done = ended = 0
    model = _write_model(command.home.parent, ended)
    while done < kills:
        if _run_and_kill(command, model, dice.uniform(0.0, SPAN_S)):
            done += 1
        else:  # nothing was left to search in this model: the next one's workloads are new
            ended += 1
            if ended > 2 * kills + 2:
                raise RuntimeError("the runs end before they can be killed")
            model = _write_model(command.home.parent, ended)
        wait_for(lambda: not command.processes(), 60, "all processes of the killed run have ended")
        acknowledged |= _journalled_ids(command) | {record.record_id for record in command.stored()}
        print(f"kill {done} of {kills}: {len(acknowledged)} records acknowledged", file=sys.stderr)
    final = command.run("tune", str(model), "--trials", str(_FINAL_TRIALS), timeout_s=600)
    if final.returncode != 0:
        raise RuntimeError(f"the last run failed:\n{final.stderr[-2000:]}")
    stored = command.stored()
    ids = Counter(record.record_id for record in stored)
    tried = Counter((r.workload_key, r.candidate_key) for r in stored if r.phase == "search")
    doubled = sum(count - 1 for counts in (ids, tried) for count in counts.values() if count > 1)
    lost = len(acknowledged - set(ids)) + len(_journalled_ids(command) - set(ids))
    return KillResult(done, ended, len(acknowledged), len(ids), lost, doubled, time.monotonic() - started)


def _run_and_kill(command: Command, model: Path, delay_s: float) -> bool:
    """Start the command, kill its process group ``delay_s`` after its first record; False where it ended first."""
    before = {path.name for path in _journals(command)}
    process = command.start("tune", str(model), "--trials", str(_TRIALS))
    try:
        deadline = time.monotonic() + _START_S
        while process.poll() is None and not _has_record(command, before):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no record within {_START_S:g} s of the command's start")
            time.sleep(0.02)
        try:
            process.wait(delay_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return True
        _check_end(process)
        return False
    finally:
        process.kill()
        process.communicate(timeout=60)


def _check_end(process: subprocess.Popen[str]) -> None:
    """Raises RuntimeError where the command did not end well by itself."""
    if process.returncode != 0:
        error = process.stderr.read() if process.stderr else ""
        raise RuntimeError(f"the command failed with status {process.returncode}:\n{error[-2000:]}")


def _journals(command: Command) -> list[Path]:
    return list((command.home / "journals").glob("*.jsonl"))


def _has_record(command: Command, before: set[str]) -> bool:
    """Is there a whole record in a journal that was not there before the start?"""
    for path in _journals(command):
        try:
            if path.name not in before and b"\n" in path.read_bytes():
                return True
        except FileNotFoundError:  # it went to the store meanwhile, so it held records
            return True
    return False


def _journalled_ids(command: Command) -> set[str]:
    return {record.record_id for path in _journals(command) for record in read_journal(path)}


def _write_model(folder: Path, number: int) -> Path:
    """A chain of small convs, float32, whose workloads differ from those of every other ``number``."""
    folder.mkdir(parents=True, exist_ok=True)
    dice = np.random.default_rng(number)
    size = 24 + 2 * number
    nodes, weights = [], []
    last = "x"
    for index, (wide, out) in enumerate(itertools.pairwise(_CHANNELS)):
        kernel = 3 if index % 2 == 0 else 1
        weight = (dice.standard_normal((out, wide, kernel, kernel)) / (kernel * wide**0.5)).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"w{index}"))
        pads = [kernel // 2] * 4
        nodes.append(helper.make_node("Conv", [last, f"w{index}"], [f"c{index}"], pads=pads))
        last = "y" if index == len(_CHANNELS) - 2 else f"r{index}"
        nodes.append(helper.make_node("Relu", [f"c{index}"], [last]))
    shape = [1, _CHANNELS[0], size, size]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], weights)
    path = folder / f"chain{number}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return path
