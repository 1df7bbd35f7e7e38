"""The pipeline with real processes: failures cost one job, windows keep the rule. No TVM."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.fresh import in_fresh
from tests.tasks.engines.measuring import scenarios
from tests.tasks.engines.measuring.scenarios import CORES

#: As on a CPU target whose cores are all measured: builders use the same.
SHARED = {"builders": 2, "builder_cores": CORES, "runner_cores": CORES}
ONE_BUILDER = {**SHARED, "builders": 1}
#: As on a GPU: there are no measured cores.
DISJOINT = {"builders": 2, "builder_cores": CORES, "runner_cores": ()}

SETTINGS = {"build_timeout_s": 20.0, "run_timeout_s": 20.0}

needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def job(folder: Path, key: str, build: dict[str, Any] | None = None, run: dict[str, Any] | None = None) -> Any:
    return {"key": key, "build": {**(build or {}), "stem": str(folder / key)}, "run": {"run": True, **(run or {})}}


def measure(jobs: list[Any], placement: dict[str, Any] = ONE_BUILDER, **settings: Any) -> Any:
    return in_fresh(scenarios.pipeline_run, jobs, placement, {**SETTINGS, **settings})


def by_key(done: Any) -> dict[str, Any]:
    return {outcome["key"]: outcome for outcome in done["outcomes"]}


#: What goes wrong, the failure's kind when it does so in the builder and in the runner, and what the text holds.
FAULTS = [
    ("segfault", "build", "run", "SIGSEGV"),
    ("raise", "build", "run", "ValueError: the reason"),
    ("exit", "build", "run", "status 7"),
    ("loop", "build_timeout", "run_timeout", "in 1.5 s"),
]


@pytest.mark.parametrize(("what", "kind", "says"), [(w, b, s) for w, b, _, s in FAULTS], ids=lambda v: str(v))
def test_a_fault_in_the_builder_costs_one_job(what: str, kind: str, says: str, tmp_path: Path) -> None:
    jobs = [job(tmp_path, "a"), job(tmp_path, "bad", build={"do": what, "say": "last words"}), job(tmp_path, "c")]
    done = measure(jobs, build_timeout_s=1.5 if what == "loop" else 20.0)

    good = by_key(done)
    bad = good.pop("bad")
    assert bad["failure"]["kind"] == kind
    assert says in bad["failure"]["message"]
    if what in ("segfault", "exit"):
        assert "last words" in bad["failure"]["message"]
    assert bad["latencies_us"] == []
    assert list(good) == ["a", "c"]
    assert all(outcome["failure"] is None for outcome in good.values())
    # Latencies are process ids here (scenarios.py): one runner for both, a new builder where one ended.
    assert good["a"]["latencies_us"][0] == good["c"]["latencies_us"][0]
    assert (good["a"]["latencies_us"][1] == good["c"]["latencies_us"][1]) == (what == "raise")
    assert done["started"] == ["a", "c"]
    assert done["workers"] == 2


@pytest.mark.parametrize(("what", "kind", "says"), [(w, r, s) for w, _, r, s in FAULTS], ids=lambda v: str(v))
def test_a_fault_in_the_runner_costs_one_job(what: str, kind: str, says: str, tmp_path: Path) -> None:
    jobs = [job(tmp_path, "a"), job(tmp_path, "bad", run={"do": what, "say": "last words"}), job(tmp_path, "c")]
    done = measure(jobs, run_timeout_s=1.5 if what == "loop" else 20.0)

    assert [outcome["key"] for outcome in done["outcomes"]] == ["a", "bad", "c"]
    good = by_key(done)
    bad = good.pop("bad")
    assert bad["failure"]["kind"] == kind
    assert says in bad["failure"]["message"]
    if what in ("segfault", "exit"):
        assert "last words" in bad["failure"]["message"]
    assert all(outcome["failure"] is None for outcome in good.values())
    # One builder for all; the runner after the failed candidate is a new one, whatever the failure was.
    assert good["a"]["latencies_us"][1] == good["c"]["latencies_us"][1]
    assert good["a"]["latencies_us"][0] != good["c"]["latencies_us"][0]
    assert done["started"] == ["a", "bad", "c"]
    assert done["workers"] == 2


def test_a_builder_that_eats_memory_is_stopped_and_the_others_are_unharmed(tmp_path: Path) -> None:
    jobs = [job(tmp_path, "a"), job(tmp_path, "bad", build={"do": "eat"}), job(tmp_path, "c"), job(tmp_path, "d")]
    done = by_key(measure(jobs, SHARED, build_memory_bytes=512 << 20))

    assert done["bad"]["failure"]["kind"] == "build"
    assert "MemoryError" in done["bad"]["failure"]["message"]
    assert [done[key]["failure"] for key in ("a", "c", "d")] == [None, None, None]


def test_a_candidate_that_eats_memory_while_it_runs_is_stopped(tmp_path: Path) -> None:
    jobs = [job(tmp_path, "a"), job(tmp_path, "bad", run={"do": "eat"}), job(tmp_path, "c")]
    done = by_key(measure(jobs, SHARED, run_memory_bytes=512 << 20))

    assert done["bad"]["failure"]["kind"] == "run"
    assert "MemoryError" in done["bad"]["failure"]["message"]
    assert [done[key]["failure"] for key in ("a", "c")] == [None, None]


def test_every_job_failing_ends_too(tmp_path: Path) -> None:
    jobs = [job(tmp_path, f"{n}", build={"do": "segfault"}) for n in range(4)]
    jobs += [job(tmp_path, f"{n}", run={"do": "exit"}) for n in range(4, 8)]
    done = measure(jobs, SHARED)

    kinds = [outcome["failure"]["kind"] for outcome in done["outcomes"]]
    assert sorted(kinds) == ["build"] * 4 + ["run"] * 4


def test_a_wrong_output_is_its_own_kind(tmp_path: Path) -> None:
    # Only the runner of an engine raises it, so its message's way is tested with real candidates, in
    # relax/test_faults.py; here: the outcome of a handler that answers well is none.
    done = measure([job(tmp_path, "a")])
    assert done["outcomes"][0]["failure"] is None
    assert done["outcomes"][0]["build_s"] >= 0
    assert done["outcomes"][0]["run_s"] >= 0


def naps(folder: Path, count: int) -> list[Any]:
    """Jobs that take a while in both workers, of different lengths, so that any overlap shows."""
    return [
        job(folder, f"{n}", {"do": "sleep", "seconds": 0.04 * (1 + n % 3)}, {"do": "sleep", "seconds": 0.05})
        for n in range(count)
    ]


def overlapping(windows: Any) -> list[Any]:
    return [
        (build, run)
        for build in windows["builds"]
        for run in windows["runs"]
        if build[0] < run[1] and run[0] < build[1]
    ]


def test_with_shared_cores_no_builder_is_active_while_a_candidate_is_timed(tmp_path: Path) -> None:
    jobs = naps(tmp_path, 10)
    # Failures must not break the rule either: a builder that dies, one that is killed at its limit.
    jobs.insert(3, job(tmp_path, "dies", {"do": "segfault"}))
    jobs.insert(6, job(tmp_path, "hangs", {"do": "loop"}))
    done = measure(jobs, SHARED, build_timeout_s=1.5)

    assert len(done["windows"]["builds"]) == 12
    assert len(done["windows"]["runs"]) == 10
    assert overlapping(done["windows"]) == []


def test_the_rule_holds_from_batch_to_batch(tmp_path: Path) -> None:
    done = in_fresh(scenarios.pipeline_run, naps(tmp_path, 4), SHARED, SETTINGS, 2)

    assert len(done["windows"]["runs"]) == 8
    assert overlapping(done["windows"]) == []


@pytest.mark.parametrize("placement", [DISJOINT, {**SHARED, "builders": 1, "split": True}], ids=["gpu", "spare core"])
def test_with_cores_of_their_own_builders_go_on_while_candidates_are_timed(placement: Any, tmp_path: Path) -> None:
    if placement.pop("split", False):
        if len(CORES) < 2:
            pytest.skip("needs two cores")
        placement = {"builders": 1, "builder_cores": CORES[1:], "runner_cores": CORES[:1]}
    done = measure(naps(tmp_path, 8), placement)

    assert len(overlapping(done["windows"])) >= 4
    assert all(outcome["failure"] is None for outcome in done["outcomes"])


def test_two_builders_build_at_the_same_time_and_one_run_at_a_time(tmp_path: Path) -> None:
    windows = measure(naps(tmp_path, 6), DISJOINT)["windows"]

    builds, runs = sorted(windows["builds"]), sorted(windows["runs"])
    assert any(later[0] < earlier[1] for earlier, later in itertools.pairwise(builds))
    assert all(later[0] >= earlier[1] for earlier, later in itertools.pairwise(runs))


def test_what_was_built_is_deleted_after_its_run_unless_it_is_kept(tmp_path: Path) -> None:
    jobs = [job(tmp_path, "kept"), job(tmp_path, "gone"), job(tmp_path, "failed", run={"do": "segfault"})]
    jobs[0]["keep"] = True
    measure(jobs)

    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_job_that_is_only_built_and_one_that_is_only_run(tmp_path: Path) -> None:
    (tmp_path / "ready").write_text("42")
    only_built = {**job(tmp_path, "b"), "run": {}}
    only_run = {"key": "r", "build": {}, "run": {"path": str(tmp_path / "ready")}, "keep": True}
    bad = {**job(tmp_path, "bad", {"do": "raise"}), "run": {}}
    done = measure([only_run, only_built, bad])

    outcomes = by_key(done)
    assert outcomes["b"]["path"] == str(tmp_path / "b")
    assert outcomes["b"]["latencies_us"] == []
    assert outcomes["r"]["latencies_us"][1] == 42
    assert outcomes["bad"]["failure"]["kind"] == "build"
    assert done["started"] == ["r"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "ready"]


def test_workers_stay_warm_from_batch_to_batch(tmp_path: Path) -> None:
    done = in_fresh(scenarios.pipeline_run, [job(tmp_path, "a")], ONE_BUILDER, SETTINGS, 3)

    assert len(done["outcomes"]) == 3
    assert len({tuple(outcome["latencies_us"]) for outcome in done["outcomes"]}) == 1


def stop_after(folder: Path, placement: Any, how: str, **fault: Any) -> Any:
    batch = [job(folder, f"{n}", run=fault) for n in range(5)]
    return in_fresh(scenarios.stop_after, batch, placement, how, [job(folder, "next")])


def test_a_stop_while_a_batch_is_built_ends_it_before_anything_runs(tmp_path: Path) -> None:
    done = stop_after(tmp_path, ONE_BUILDER, "build")

    assert done["first"] == []
    assert done["second"] == ["next"]
    assert list(tmp_path.iterdir()) == []


def test_a_stop_ends_a_batch_after_the_job_in_work(tmp_path: Path) -> None:
    done = stop_after(tmp_path, ONE_BUILDER, "outcome")

    assert done["first"] == ["0"]
    assert done["second"] == ["next"]
    assert list(tmp_path.iterdir()) == []  # what was built and never run is not left behind either


def test_a_stop_with_builds_under_way(tmp_path: Path) -> None:
    done = stop_after(tmp_path, DISJOINT, "outcome", do="sleep", seconds=0.2)

    # What the two builders had in hand may still be measured, the rest not.
    assert done["first"][0] in ("0", "1")  # whichever of two builders was faster
    assert len(done["first"]) <= 3
    assert done["second"] == ["next"]


@pytest.mark.parametrize("placement", [ONE_BUILDER, DISJOINT], ids=["shared", "disjoint"])
def test_a_listener_that_raises_ends_the_batch_and_leaves_the_next_alone(placement: Any, tmp_path: Path) -> None:
    # What happens when the disk is full: the journal refuses the record.
    done = stop_after(tmp_path, placement, "raise")

    assert done["raised"]
    assert done["first"] in (["0"], ["1"])  # whichever of two builders was faster
    assert done["second"] == ["next"]


@needs_two_cores
def test_an_answer_that_came_in_time_counts_however_late_it_is_read(tmp_path: Path) -> None:
    # The parent writes journals and talks to its own parent; that is not the candidate's fault.
    jobs = [job(tmp_path, "a"), job(tmp_path, "b", {"do": "sleep", "seconds": 0.3})]
    done = in_fresh(scenarios.slow_listener, jobs, {"build_timeout_s": 1.5, "run_timeout_s": 20.0}, 2.0)

    assert [outcome["failure"] for outcome in done] == [None, None]
