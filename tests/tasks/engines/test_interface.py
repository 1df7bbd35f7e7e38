"""Which records are the best of a workload."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tasks.engines.interface import DEFAULT_SCHEDULES, best_first, counts_for, is_outdated
from tasks.records import MeasureSettings, TuningRecord
from tasks.run import RecordBook
from tests.infra import sample_records as samples


def found(key: str, latency_us: float | None, phase: str = "search", **changes: Any) -> TuningRecord:
    base = {"schedule": "" if phase == "default" else "[]", "record_id": f"{key}-{phase}"}
    return samples.record(1, latency_us, candidate_key=key, phase=phase, **{**base, **changes})


def keys(*records: TuningRecord) -> list[str]:
    """The order of the candidates, which no order of the records may change."""
    answers = set()
    for seed in range(6):
        shuffled = random.Random(seed).sample(records, len(records))
        answers.add(tuple(record.candidate_key for record in best_first(shuffled)))
    assert len(answers) == 1
    return list(answers.pop())


def test_fastest_first_failures_left_out() -> None:
    assert keys(found("b", 20.0), found("a", 10.0), found("x", None), found("default", 30.0, "default")) == [
        "a", "b", "default",
    ]  # fmt: skip
    assert best_first([]) == ()
    assert best_first([found("x", None)]) == ()


def test_one_record_a_candidate() -> None:
    assert keys(found("a", 12.0), found("a", 10.0, record_id="again"), found("b", 11.0)) == ["a", "b"]


def test_a_confirmation_overrides_the_searchs_figure() -> None:
    best = best_first([found("a", 10.0), found("b", 11.0), found("a", 15.0, "confirm"), found("b", 12.0, "confirm")])

    assert [(record.candidate_key, record.latency_us, record.phase) for record in best] == [
        ("b", 12.0, "confirm"), ("a", 15.0, "confirm"),
    ]  # fmt: skip


def test_a_single_lucky_timing_does_not_win_over_a_confirmed_one() -> None:
    assert keys(found("lucky", 5.0), found("a", 10.0), found("a", 12.0, "confirm")) == ["a", "lucky"]


def test_a_failed_confirmation_is_no_confirmation() -> None:
    assert keys(found("a", 10.0), found("b", 11.0), found("a", None, "confirm"), found("b", 11.5, "confirm"))[0] == "b"


def test_a_confirmed_candidate_slower_than_the_default_does_not_replace_it() -> None:
    records = [found("default", 100.0, "default"), found("a", 90.0), found("a", 120.0, "confirm")]
    assert keys(*records)[0] == "default"


def test_a_default_schedule_that_is_built_no_more_is_not_taken_over() -> None:
    version = DEFAULT_SCHEDULES["relax"]
    old, now = (samples.record(schedule="", phase="default", implementation=name) for name in ("", version))
    found = samples.record(1, schedule="[]", implementation="")
    book = RecordBook()
    book.load(
        {old.workload_key: [old, replace(now, record_id="now"), replace(found, record_id="found")]}, MeasureSettings()
    )

    assert [is_outdated(record) for record in (old, now, found)] == [True, False, False]
    assert {record.record_id for record in book.of(old.workload_key)} == {"now", "found"}
    assert book.reused == 2


def test_times_with_a_cold_and_with_a_warm_cache_do_not_compare() -> None:
    warm, cold = MeasureSettings(), MeasureSettings(flush_cache=True)
    record = found("a", 10.0)
    assert record.measurement is not None
    measured_cold = replace(record, record_id="cold", measurement=replace(record.measurement, settings=cold))
    failed = found("b", None)
    book = RecordBook()
    book.load({record.workload_key: [record, measured_cold, failed]}, cold)

    assert counts_for(record, warm)
    assert not counts_for(record, cold)
    # A candidate that cannot be built fails either way.
    assert [r.record_id for r in book.of(record.workload_key)] == ["cold", failed.record_id]
