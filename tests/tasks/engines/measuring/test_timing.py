"""What a runner makes of a machine that is now fast, now slow; timers and libraries are scripted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.engines.measuring.timing import Runner
from tasks.records import Measurement, MeasureSettings

SETTINGS = MeasureSettings(repeat=5, min_repeat_ms=20)
KEY = "workload0"


@dataclass
class Machine:
    """Kernels by path, each with its latency in microseconds on a quiet machine; ``speed`` is how fast it is now."""

    kernels: dict[str, float]
    speed: float = 1.0
    timed: list[tuple[str, int]] = field(default_factory=list)
    called: list[str] = field(default_factory=list)
    #: How often the default schedule still takes twice its time.
    hiccups: int = 0

    def device(self, name: str) -> Any:
        return SimpleNamespace(sync=lambda: None)

    def share(self, array: Any) -> Any:
        return array

    def load(self, path: str) -> Any:
        return _Library(path, self)


class _Library:
    def __init__(self, path: str, machine: Machine) -> None:
        self._path, self._machine = path, machine

    def __getitem__(self, _: str) -> Callable[..., None]:
        def call(x: Any, y: Any) -> None:
            self._machine.called.append(Path(self._path).name)
            y[...] = x

        return call

    def time_evaluator(self, _: str, __: Any, repeat: int, **___: Any) -> Callable[..., Any]:
        machine = self._machine
        machine.timed.append((Path(self._path).name, repeat))
        seconds = machine.kernels[Path(self._path).name] / machine.speed / 1e6
        if Path(self._path).name == "default" and machine.hiccups:
            machine.hiccups -= 1
            seconds *= 2
        return lambda *_: SimpleNamespace(results=[seconds] * repeat)


@pytest.fixture
def machine() -> Machine:
    return Machine({"default": 1000.0, "candidate": 800.0})


def time_candidate(runner: Runner, folder: Path, default_us: float = 1000.0, **job: Any) -> Measurement:
    for name in ("default", "candidate"):
        (folder / name).touch()
    answer = runner(
        {"path": str(folder / "candidate"), "reference": str(folder / "default"), "default_us": default_us,
         "workload": KEY, "args": [[[8], "float32"]] * 2, "outputs": 1, "settings": asdict(SETTINGS), **job}
    )  # fmt: skip
    return Measurement(answer["latencies_us"], SETTINGS, 0.0, 0.0, answer["cut_short"], answer["slowdowns"])


def test_a_slow_moment_is_not_taken_for_a_slow_candidate(machine: Machine, tmp_path: Path) -> None:
    machine.speed = 0.5
    measured = time_candidate(Runner(machine, "cpu"), tmp_path, best_us=900.0)

    # Twice the best latency, which would have ended the timing at once.
    assert not measured.cut_short
    assert measured.latencies_us == (1600.0,) * 5
    assert measured.slowdowns == (2.0,) * 5
    assert measured.latency_us == pytest.approx(800.0)


def test_a_slow_candidate_is_cut_short_however_fast_the_machine_is(machine: Machine, tmp_path: Path) -> None:
    machine.speed, machine.kernels["candidate"] = 2.0, 1400.0
    measured = time_candidate(Runner(machine, "cpu"), tmp_path, best_us=900.0)

    assert measured.cut_short
    assert measured.latency_us == pytest.approx(1400.0)


def test_the_default_is_timed_beside_now_and_then(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("tasks.engines.measuring.timing.time.monotonic", lambda: now[0])
    runner = Runner(machine, "cpu")
    for at in (0.0, 0.2, 0.4, 0.6):
        now[0] = at
        time_candidate(runner, tmp_path, best_us=700.0)

    assert [repeat for name, repeat in machine.timed if name == "default"] == [3, 3]


def test_what_is_timed_after_an_idle_time_is_called_before(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("tasks.engines.measuring.timing.time.monotonic", lambda: now[0])
    runner = Runner(machine, "cpu")
    calls = []
    for at in (0.0, 0.05, 0.3):
        now[0] = at
        machine.called.clear()
        time_candidate(runner, tmp_path, default_us=0.0)
        calls.append(machine.called.count("candidate"))

    # Without an idle time only for its outputs: timing itself is scripted here.
    assert calls[1] == 1
    assert min(calls[0], calls[2]) > 2


@pytest.mark.parametrize("default_us", [0.0, 2e6])
def test_without_a_default_or_with_a_very_slow_one_times_are_as_taken(
    default_us: float, machine: Machine, tmp_path: Path
) -> None:
    measured = time_candidate(Runner(machine, "cpu"), tmp_path, default_us)

    assert measured.slowdowns == ()
    assert measured.latency_us == 800.0
    assert [name for name, _ in machine.timed] == ["candidate"] * 2


def test_a_winner_is_not_made_by_a_hiccup_of_the_default(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The default takes twice as long the first time it is timed; by that the candidate would seem to win.
    now = [0.0]
    monkeypatch.setattr("tasks.engines.measuring.timing.time.monotonic", lambda: now.append(0) or float(len(now)))
    machine.hiccups = 1
    measured = time_candidate(Runner(machine, "cpu"), tmp_path, best_us=700.0)

    assert measured.slowdowns == (1.0,) * 5
    assert measured.latency_us == 800.0
