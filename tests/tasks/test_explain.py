"""Why a task is no faster, as a sentence: pure functions of its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tasks import plan
from tasks.explain import explain
from tasks.records import Failure, TuningRecord
from tests.infra.sample_records import record, task

ENDED = "the trial budget is spent"


def reason(*records: TuningRecord, exhausted: bool = False) -> str:
    state = plan.state_of(task(0), records, exhausted)
    return explain([state], {task(0).workload_key: records}, ENDED)[task(0).name]


def searched(latencies_us: Sequence[float | None], session: str = "session", first: int = 1) -> list[TuningRecord]:
    return [record(first + n, us, session_id=session) for n, us in enumerate(latencies_us)]


def test_a_task_that_was_never_searched_says_how_much_of_the_model_it_is() -> None:
    assert reason(record(0, 100.0)) == f"never searched: 100.0% of the model's time; the run ended: {ENDED}"


def test_a_default_that_cannot_be_measured_says_why() -> None:
    broken = replace(record(0, None), failure=Failure("run_timeout", "not finished in 20 s"))
    assert reason(broken) == "its default schedule could not be measured: not finished in 20 s"


def test_all_failed_says_how_and_the_last_message() -> None:
    text = reason(record(0, 100.0), *searched([None] * 3))
    assert text == "all 3 trials failed (3 build): no"
    assert reason(record(0, 100.0), *searched([None])) == "its only trial failed (1 build): no"


def test_no_gain_and_a_gain_say_what_was_spent() -> None:
    assert reason(record(0, 100.0), *searched([120.0, None, 99.5])).startswith(
        "3 trials in 1 session found nothing faster than the default schedule; 100.0% of"
    )
    text = reason(record(0, 100.0), *searched([50.0]), *searched([49.0], "second", 9))
    assert text.startswith("2 trials in 2 sessions made it 2.04 times as fast, the last one by 2.0%;")


def test_what_closed_a_task_comes_before_the_end_of_the_run() -> None:
    assert reason(record(0, 100.0), *searched([50.0]), exhausted=True).endswith("; its search space is exhausted")


def test_a_timing_that_is_no_time_is_no_measurement() -> None:
    odd = [record(n, latency, session_id="s") for n, latency in ((1, float("nan")), (2, float("inf")), (3, 0.0))]
    assert [r.latency_us for r in odd] == [None, None, None]
    state = plan.state_of(task(0), [record(0, 100.0), *odd])
    assert (state.best_us, state.default_us) == (100.0, 100.0)
