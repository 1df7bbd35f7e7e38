"""Broken candidates for real: compiled by TVM, run by the runner; each costs one trial and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fresh import in_fresh
from tests.tasks.engines.relax import scenarios

#: A kernel of kernels.py, the failure it must end in, and what the text must hold.
FAULTS = [
    ("wrong", ("wrong_output",), "output 0 differs"),
    ("nothing", ("wrong_output",), "output 0 differs"),
    ("half", ("wrong_output",), "output 0 differs"),
    ("outside", ("wrong_output",), "wrote outside the buffer of argument 1 of 2"),
    ("before", ("wrong_output",), "wrote outside the buffer of argument 1 of 2"),
    ("endless", ("run_timeout",), "in 2 s"),
    ("wild", ("run",), "SIGSEGV"),
    ("aborts", ("run",), "SIGABRT"),
    # The linker finds it where candidates are linked, the loader where they are loaded as objects.
    ("unknown_symbol", ("build", "run"), ""),
]
ORDER = ["double", *(name for fault, *_ in FAULTS for name in (fault, "parallel"))]
#: Last, lest its damage be met by the others.
SPOILING = ["spoils_input", "parallel"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Every fault between two good candidates, in one engine: TVM is imported once."""
    folder = tmp_path_factory.mktemp("candidates")
    found = in_fresh(scenarios.measure_kernels, [*ORDER, *SPOILING], str(folder), {"run_timeout_s": 2.0}, timeout_s=240)
    # Candidates are deleted after their run, whatever became of it.
    assert {Path(path.name).stem for path in folder.iterdir()} == {"reference"}
    return found


@pytest.mark.parametrize(("name", "kinds", "says"), FAULTS, ids=[name for name, *_ in FAULTS])
def test_a_fault_is_a_failure_of_its_kind(name: str, kinds: tuple[str, ...], says: str, outcomes: list[Any]) -> None:
    failure = dict(outcomes)[name]["failure"]

    assert failure is not None
    assert failure["kind"] in kinds
    assert says in failure["message"]
    assert failure["message"].strip()


def test_every_good_candidate_between_them_is_measured(outcomes: list[Any]) -> None:
    good = [outcome for name, outcome in outcomes[: len(ORDER)] if name in ("double", "parallel")]

    assert len(good) == len(FAULTS) + 1
    for outcome in good:
        assert outcome["failure"] is None
        assert len(outcome["latencies_us"]) == 2  # the settings' repeats
        assert all(latency_us > 0 for latency_us in outcome["latencies_us"])
        # 16 KiB in and out take some microseconds; a minute's share of one would be a broken clock.
        assert max(outcome["latencies_us"]) < 1e5


def test_a_candidate_that_writes_into_its_inputs_is_wrong_and_the_next_one_is_not(outcomes: list[Any]) -> None:
    (_, spoiling), (_, good) = outcomes[len(ORDER) :]

    assert spoiling["failure"] is not None
    assert spoiling["failure"]["kind"] == "wrong_output"
    assert good["failure"] is None
