"""The report answers five questions in their order, whatever the run has to say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infra.previous_run import PreviousRun, what_changed
from infra.run_figures import model_curve, profile_rows, roofline_dots
from infra.run_report import DESCRIPTION_LENGTH, description, report, task_note
from infra.run_tables import SubgraphTime, TaskLog
from tasks.records import Failure, KernelTime, Latency, Profile, SubgraphChoice
from tests.infra.sample_records import record, summary, task

TIMES = [SubgraphTime(f"fused_conv2d_add_relu{n}", 2, 800.0 / (n + 1), 200.0 / (n + 1)) for n in range(8)]
FLAT = SubgraphTime("fused_softmax", 1, 50.0, 50.0)


def log(*records: object, number: int = 0) -> TaskLog:
    return TaskLog(task(number), "run", {r.record_id: r for r in records})  # type: ignore[attr-defined]


def test_the_questions_are_answered_in_their_order() -> None:
    made = summary(reasons={"fused_softmax": "all 8 trials failed (8 build): no compiler"})
    text = report(made, [*TIMES, FLAT], "Nothing changed.")
    places = [
        text.index(part)
        for part in ("### Faster?", "### Right?", "### What took the time?", "### Why did a task", "### What changed")
    ]
    assert places == sorted(places)
    assert "`fused_softmax`: all 8 trials failed (8 build): no compiler" in text
    assert "1 of 2 did not (less than 2% faster as built)" in text
    for part in ("`fused_conv2d_add_relu4`", "4 others", "version 3", "6 trials on 2 tasks"):
        assert part in text
    assert "`fused_conv2d_add_relu5`" not in text


def test_latencies_have_intervals_and_ratios_against_all_contenders() -> None:
    verdict = replace(summary().verdict, champion=Latency((2.2, 2.3, 2.1, 2.2)), champion_version="2")
    text = report(summary(verdict=verdict), TIMES)
    (tuned,) = [line for line in text.splitlines() if line.startswith("| **tuned**")]
    # Four rounds of 1.9 to 2.1 ms: the median's interval lies within.
    assert tuned == "| **tuned** | 2 ms (1.9 to 2.1, 4 rounds) |  |"
    (champion,) = [line for line in text.splitlines() if "champion (version 2)" in line]
    assert "2.2 ms" in champion
    assert "| 0.909 (0.905 to 0.913) |" in champion  # pairs: 0.909, 0.913, 0.905, 0.909
    assert len([line for line in text.splitlines() if line.startswith("| onnxruntime")]) == 1


def test_the_headline_says_where_noise_explains_the_gain() -> None:
    assert ": 4.03 times as fast as untuned\n" in report(summary(), TIMES)
    verdict = replace(summary().verdict, untuned=Latency((2.0, 1.9, 2.2, 2.1)))
    assert ": 1.02 times as fast as untuned, which noise explains\n" in report(summary(verdict=verdict), TIMES)


def test_the_report_says_what_the_tuning_took_its_time_for() -> None:
    seconds = {"search": 30.0, "build": 200.0, "build_wall": 90.0, "run_wall": 50.0, "total": 180.0}
    text = report(summary(seconds=seconds), TIMES)
    assert "in 3.0 minutes, 1 records of earlier runs reused." in text
    assert " On the devices: searching 30 seconds, building 1.5 minutes, timing 50 seconds." in text


def test_a_repair_is_told_where_rightness_is() -> None:
    verdict = replace(summary().verdict, repairs=("fused_conv2d: record r-1 computes something wrong",))
    text = report(summary(verdict=verdict), TIMES)
    right = text[text.index("### Right?") : text.index("### What took")]
    assert "**Right**" in right
    assert "- fused_conv2d: record r-1 computes something wrong" in right


def test_a_run_without_tasks_has_a_report() -> None:
    text = report(summary(tasks=0, trials=0, failures={}, reasons={}), [])
    assert "No subgraph of this model could be tuned and measured" in text
    assert "0 trials on 0 tasks" in text


def test_every_task_improved() -> None:
    assert "Every task improved" in report(summary(), TIMES)


def test_a_long_report_is_cut_at_a_line_and_says_where_the_rest_is() -> None:
    notes = tuple(f"note {n} " + "x" * 60 for n in range(200))
    whole = report(summary(notes=notes), TIMES)
    cut = description(whole)
    assert len(whole) > DESCRIPTION_LENGTH
    assert len(cut) < 5000
    assert cut.endswith("(The whole report is the artifact `report.md`.)")
    assert "### Published" in cut
    assert description("short") == "short"


def test_a_task_note_says_why() -> None:
    improved = task_note(log(record(0, 100.0), record(1, 40.0)), "its search space is exhausted")
    assert "2.50 times as fast" in improved
    assert improved.endswith("Why it is no faster: its search space is exhausted.")
    assert "No trial succeeded" in task_note(log(record(0, None), record(1, None)))


def test_the_curve_of_the_model_begins_with_what_was_known_and_counts_this_runs_trials() -> None:
    weight = task(1).weight
    first = log(record(0, 100.0, run_id="before"), record(1, 80.0), record(2, None), record(3, 40.0))
    other = log(record(0, 10.0, record_id="d", workload_key="workload1", started_at=1_760_000_000.5), number=1)
    never = log(record(0, None, record_id="n", workload_key="workload2"), number=2)
    points = model_curve([first, other, never], "run")
    rest = 10.0 * weight
    assert [(p.trials, p.latency_us) for p in points] == [(0, 100 + rest), (1, 80 + rest), (3, 40 + rest)]
    assert [p.elapsed_s for p in points] == pytest.approx([0, 0.5, 2.5])
    assert model_curve([], "run") == []
    assert model_curve([never], "run") == []


def test_roofline_dots_take_what_was_built_and_leave_out_what_does_no_arithmetic() -> None:
    idle = replace(log(record(0, 5.0)), task=replace(task(1), flops=0.0))
    choice = SubgraphChoice("a", "workload0", "r", "c", 20.0)
    (dot,) = roofline_dots([log(record(0, 100.0), record(1, 40.0)), idle], [choice])
    assert dot.intensity == pytest.approx(20.0)
    assert dot.before_flops_per_s == pytest.approx(2e6 / 100e-6)
    assert dot.after_flops_per_s == pytest.approx(2e6 / 20e-6)
    assert dot.share == 1.0


def test_profile_rows_add_up() -> None:
    profile = Profile((KernelTime("a", "k", 2, 60.0, 50.0), KernelTime("b", "l", 1, 30.0, None)), 10.0, 100.0)
    found = profile_rows(profile)
    assert [row["subgraph"] for row in found] == ["a", "b", "outside of kernels"]
    assert sum(row["share"] for row in found) == pytest.approx(1.0)
    assert len({tuple(sorted(row)) for row in found}) == 1


def test_what_changed_is_latency_then_and_now_against_the_reference_too() -> None:
    params = {"model_digest": "e" * 64, "threads": "2", "version.apache-tvm": "0.26.0", "device": "cpu:0"}
    before = PreviousRun("x", "cls last night", 1_760_000_000.0, {"tuned_ms": 2.5, "onnxruntime_ms": 1.0}, params)
    text = what_changed(before, summary())
    assert "tuned took 2.5 ms then and takes **2 ms** now (-20.0%)" in text
    assert "2.50 times onnxruntime's latency then, 1.11 times now" in text
    assert "apache-tvm 0.26.0 to 0.27.0" in text
    assert "model digest (another one)" in text
    assert "threads" not in text
    assert "no earlier finished run" in what_changed(None, summary())


def test_a_wrong_candidate_is_no_best() -> None:
    wrong = replace(record(1, 40.0), measurement=None, failure=Failure("wrong_output", "differs"))
    assert log(record(0, 100.0), wrong).best_us == 100.0
