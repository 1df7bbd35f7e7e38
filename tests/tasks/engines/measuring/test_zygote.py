"""The fork server with real crashes, loops and leaks. No TVM: the handlers are in scenarios.py."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import psutil
import pytest

from tests.fresh import in_fresh, start_fresh, wait_until_gone
from tests.tasks.engines.measuring import scenarios
from tests.tasks.engines.measuring.scenarios import CORES


def one_worker(*jobs: dict[str, Any], memory_bytes: int = 0, cores: tuple[int, ...] = (), **options: str) -> Any:
    return in_fresh(scenarios.one_worker, list(jobs), options, list(cores), memory_bytes)


def test_a_worker_handles_one_job_after_another_in_the_same_process() -> None:
    done = one_worker({"echo": [1, "a"]}, {"echo": None}, {"inflate": 3_000_000})

    assert [kind for kind, *_ in done["answers"]] == ["ok", "ok", "ok"]
    assert len({answer["pid"] for _, answer in done["answers"]}) == 1
    assert done["answers"][0][1]["echo"] == [1, "a"]
    assert len(done["answers"][2][1]["echo"]) == 3_000_000  # larger than a socket's buffer


@pytest.mark.parametrize(
    ("what", "says"), [("segfault", "killed by SIGSEGV"), ("exit", "exited with status 7")], ids=str
)
def test_a_death_names_its_cause_and_the_last_words(what: str, says: str) -> None:
    done = one_worker({"do": what, "say": "about to do it"})

    assert done["answers"][0] == ["died", f"the worker {'was ' if 'SEGV' in says else ''}{says}; "
                                  "its last words: about to do it"]  # fmt: skip
    assert done["beside"][0] == "ok"


def test_last_words_are_those_of_the_job_that_died() -> None:
    done = one_worker({"do": "raise", "say": "an earlier trouble"}, {"do": "segfault", "say": "the last straw"})

    assert done["answers"][0][0] == "error"
    assert "the last straw" in done["answers"][1][1]
    assert "earlier" not in done["answers"][1][1]


def test_only_the_tail_of_a_long_stderr_is_kept() -> None:
    done = one_worker({"do": "exit", "say": "start " + "x" * 100_000 + " end"})

    died, text = done["answers"][0]
    assert died == "died"
    assert text.endswith(" end")
    assert "start" not in text
    assert len(text) < 5000


def test_an_exception_is_an_answer_and_the_worker_goes_on() -> None:
    done = one_worker({"do": "raise"}, {"echo": 1})

    kind, name, message, detail = done["answers"][0]
    assert (kind, name, message) == ("error", "ValueError", "first line\nthe reason")
    assert "Traceback" in detail
    assert done["answers"][1][0] == "ok"


def test_an_answer_that_cannot_be_sent_costs_the_worker_and_says_why() -> None:
    done = one_worker({"answer": "unpicklable"})

    assert done["answers"][0][0] in ("died", "error")
    assert "pickle" in done["answers"][0][-1].lower()
    assert done["beside"][0] == "ok"


def test_a_handler_that_cannot_be_made_says_why() -> None:
    # Its exception must end that worker, not run on into what called the server's constructor.
    done = one_worker({"echo": 1}, **{"raise": "no artifact in /nowhere"})

    assert done["answers"][0][0] == "died"
    assert "no artifact in /nowhere" in done["answers"][0][1]
    assert done["beside"][0] == "ok"


def test_memory_is_limited_for_this_worker_alone() -> None:
    done = one_worker({"do": "eat"}, {"echo": 1}, memory_bytes=512 << 20)

    assert done["answers"][0][:2] == ["error", "MemoryError"]
    assert done["answers"][1][0] == "ok"
    assert done["beside"][0] == "ok"


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_cores_are_pinned() -> None:
    done = one_worker({}, cores=CORES[1:2])

    assert done["answers"][0][1]["cores"] == list(CORES[1:2])
    assert done["beside"][1]["cores"] == list(CORES)


def test_what_a_job_prints_stays_out_of_the_parents_stdout() -> None:
    process = start_fresh(scenarios.one_worker, [{"print": "hello"}], {}, [], 0)
    out, _ = process.communicate(timeout=60)

    assert process.returncode == 0
    assert "hello" not in out
    assert "descriptor" not in out


def test_workers_that_come_and_go_leave_nothing_behind() -> None:
    done = in_fresh(scenarios.many_workers, 30)

    assert done["before"] == done["after"]  # open files here, open files and processes in the server
    assert done["left"] == 0


def test_a_worker_that_has_ended_is_not_signalled_again() -> None:
    # Its number may be another process's by then: 32768 numbers go round in a night of forks.
    done = in_fresh(scenarios.kill_twice)

    assert done["answer"][0] == "died"
    assert not done["signalled"]


@pytest.mark.parametrize("victim", ["parent", "zygote"])
def test_nothing_outlives_its_parent(victim: str) -> None:
    process = start_fresh(scenarios.workers_at_work)
    assert process.stdout is not None
    pids = json.loads(process.stdout.readline())
    below = [psutil.Process(pid) for pid in (pids["zygote"], *pids["workers"])]
    try:
        os.kill(process.pid if victim == "parent" else pids["zygote"], signal.SIGKILL)
        assert wait_until_gone(below) == []
    finally:
        process.kill()
        process.communicate()
