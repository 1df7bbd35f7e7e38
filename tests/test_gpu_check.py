"""benchmarks/gpu_check.sh where there is no GPU: it says so of each step, and its steps can be rehearsed on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check import STEPS

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu_check.sh"


def check(folder: Path, *arguments: str, **settings: str) -> tuple[int, dict[str, Any]]:
    """The script's exit status and its last line, from another folder than the project's."""
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(folder / "out"), **settings}
    done = subprocess.run(
        [str(SCRIPT), *arguments], env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout, done.stderr
    line = done.stdout.strip().splitlines()[-1]
    assert (folder / "out" / "result.json").read_text().strip() == line
    said = json.loads(line)
    assert isinstance(said, dict)
    return done.returncode, said


def test_the_script_is_sound_bash_and_can_be_started() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    assert os.access(SCRIPT, os.X_OK)


def test_a_dry_run_says_of_each_step_that_there_is_no_device(tmp_path: Path) -> None:
    status, said = check(tmp_path, "--dry-run")
    assert status == 2
    assert list(said["steps"]) == list(STEPS)
    assert {entry["error"] for entry in said["steps"].values()} == {"no device"}
    assert not said["ok"]
    # Nothing of the environment is needed for that, not even an interpreter.
    assert check(tmp_path, "--dry-run", PYTHON="/nowhere/python")[0] == 2


def test_without_a_gpu_nothing_is_started(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o700)
    status, said = check(tmp_path, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", PYTHON="/nowhere/python")
    assert status == 2
    assert {entry["error"] for entry in said["steps"].values()} == {"no device"}


def test_a_step_that_ends_or_overstays_does_not_keep_the_others_from_running(tmp_path: Path) -> None:
    """An interpreter that breaks in one step, hangs in the next and does the third."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$3" in device) exit 7;; measure) exec sleep 60;; esac\n'
        'echo \'{"ok": true, "seconds": 1}\' >"$7/$3.json"\n'
    )
    python.chmod(0o700)
    settings = {"STEPS": "device measure faults", "DEVICE": "cpu:0", "PYTHON": str(python), "TOTAL_S": "10"}
    status, said = check(tmp_path, **settings)
    assert status == 1
    steps = said["steps"]
    assert "status 7" in steps["device"]["error"]
    assert not steps["measure"]["ok"]
    assert "error" in steps["measure"]
    # All the time went into the one that hung.
    assert steps["faults"]["error"] == "no time left"


@pytest.mark.parametrize("arguments", [("--help-me",), ()])
def test_what_it_does_not_know_is_refused(arguments: tuple[str, ...], tmp_path: Path) -> None:
    environment = {**os.environ, "STEPS": "nonsense", "OUT": str(tmp_path / "out"), "DEVICE": "cpu:0"}
    done = subprocess.run([str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert "usage" in done.stderr or "nonsense" in done.stderr


def test_the_faults_are_told_apart_in_a_rehearsal(tmp_path: Path) -> None:
    status, said = check(tmp_path, STEPS="faults", DEVICE="cpu:0-1")
    assert status == 0, (tmp_path / "out" / "log.txt").read_text()[-3000:]
    kinds = [outcome["kind"] for outcome in said["steps"]["faults"]["outcomes"]]
    assert kinds == ["measured", "run", "measured", "run_timeout", "measured", "wrong_output", "measured"]
