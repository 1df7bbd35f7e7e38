"""What keeps the relay engine from starting: each is one line that says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tasks.engines.child import ChildOptions, EngineChild
from tasks.errors import EngineTimeout, EngineUnavailable, TargetError, TunewrightError
from tests.relay import needs_relay, relay_python


def refusal(python: str | Path, target: str = "cpu", start_timeout_s: float = 120.0) -> TunewrightError:
    """The error that an engine with that interpreter and target starts with."""
    options = ChildOptions("relay", str(python), target, "cpu:0", 1, start_timeout_s=start_timeout_s)
    with pytest.raises(TunewrightError) as caught, EngineChild(options) as child:
        child.describe()
    assert "\n" not in str(caught.value)
    return caught.value


def test_an_interpreter_that_does_not_exist() -> None:
    error = refusal("/nowhere/python")
    assert isinstance(error, EngineUnavailable)
    for part in ("/nowhere/python", "No such file", "TUNEWRIGHT_RELAY_PYTHON", "make relay-env"):
        assert part in str(error)


def test_an_interpreter_that_hangs(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    error = refusal(python, start_timeout_s=1.0)
    assert isinstance(error, EngineTimeout)
    for part in (str(python), "TUNEWRIGHT_RELAY_PYTHON", "TUNEWRIGHT_ENGINE_START_TIMEOUT_S"):
        assert part in str(error)


def test_a_tvm_without_relay() -> None:
    # This environment's own: apache-tvm, which Relay has left.
    error = refusal(sys.executable)
    assert isinstance(error, EngineUnavailable)
    for part in ("has no Relay", "TUNEWRIGHT_RELAY_PYTHON", "make relay-env"):
        assert part in str(error)


def test_a_python_without_tvm(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "empty")], check=True)
    error = refusal(tmp_path / "empty" / "bin" / "python")
    assert isinstance(error, EngineUnavailable)
    for part in ("has no TVM", "TUNEWRIGHT_RELAY_PYTHON", "make relay-env"):
        assert part in str(error)


@needs_relay
@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("gpu3000", "unknown"),
        ('{"kind": "nonsense"}', "does not know"),
        ('{"kind": ', "valid JSON"),
        ("llvm -no-such-option=3", "unknown"),
        ("cuda", "without cuda"),
    ],
)
def test_a_target_that_this_tvm_does_not_have(target: str, says: str) -> None:
    error = refusal(relay_python(), target)
    assert isinstance(error, TargetError)
    assert says in str(error)


@needs_relay
def test_a_tuner_that_does_not_exist() -> None:
    options = ChildOptions(
        "relay", str(relay_python()), "cpu", "cpu:0", 1, extra_environment=(("TUNEWRIGHT_RELAY_TUNER", "magic"),)
    )
    with (
        pytest.raises(TargetError, match="magic is no tuner: give one of xgb, ga, random, grid"),
        EngineChild(options) as child,
    ):
        child.describe()
