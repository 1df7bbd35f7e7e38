"""Which session is next: pure decisions over made-up records, and a simulated tuner."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from tasks.plan import (
    PATIENCE,
    Knowledge,
    Limits,
    TaskState,
    closed_tasks,
    expected_gain_us,
    first_sessions,
    model_latency_us,
    next_session,
    remaining_share,
    state_of,
)
from tasks.records import Failure, FirstSessions, TuningRecord, TuningTask
from tests.infra import sample_records as samples

NO_LIMIT = Limits(None)


def task(number: int, weight: int = 1, flops: float = 2e6) -> TuningTask:
    """With 2 MFLOP and 100 kB the modest machine needs 200 us: hardly less than what is measured here."""
    return replace(samples.task(number), weight=weight, flops=flops, bytes_moved=100_000)


def state(number: int, best_us: float | None, weight: int = 1, **changes: object) -> TaskState:
    made = TaskState(task(number, weight), best_us, best_us, 0, ())
    return replace(made, **changes)  # type: ignore[arg-type]


def default(latency_us: float | None = 1000.0) -> TuningRecord:
    return samples.record(0, latency_us)


def searched(session: str, *latencies_us: float | None, kind: str = "run") -> list[TuningRecord]:
    """The trials of one session, later than any made before."""
    made = []
    for latency_us in latencies_us:
        trial = next(_trials)
        record = samples.record(trial, latency_us, session_id=session)
        made.append(record if latency_us is not None else replace(record, failure=Failure(kind, "why")))
    return made


_trials = itertools.count(1)


def test_without_records_nothing_is_known() -> None:
    found = state_of(task(0), [])

    assert (found.default_us, found.best_us, found.trials, found.gains) == (None, None, 0, ())
    assert found.cost_us == 0.0


def test_the_default_schedule_is_the_first_best() -> None:
    found = state_of(task(0, weight=3), [default(1000.0)])

    assert (found.default_us, found.best_us, found.trials) == (1000.0, 1000.0, 0)
    assert found.cost_us == 3000.0


def test_gains_are_each_sessions_share_of_what_was_left() -> None:
    records = [default(1000.0), *searched("a", 900.0, 500.0), *searched("b", 700.0), *searched("c", None, 400.0)]
    found = state_of(task(0), records)

    assert found.gains == pytest.approx((0.5, 0.0, 0.2))
    assert (found.best_us, found.trials) == (400.0, 5)
    assert state_of(task(0), list(reversed(records))) == found  # the order of reading does not matter


def test_a_confirmation_is_no_trial_and_no_gain() -> None:
    records = [default(), *searched("a", 500.0), samples.record(900, 300.0, phase="confirm", session_id="z")]
    found = state_of(task(0), records)

    assert (found.best_us, found.trials, found.gains) == (500.0, 1, (0.5,))


def test_a_task_whose_default_failed_has_no_gain_to_speak_of() -> None:
    found = state_of(task(0), [default(None), *searched("a", None, 500.0)])

    assert found.default_us is None
    assert found.best_us == 500.0
    assert all(math.isfinite(gain) for gain in found.gains)


def test_trials_that_all_fail_alike_are_told_from_some_that_fail() -> None:
    assert state_of(task(0), [default(), *searched("a", *[None] * 8)]).failing == "run"
    assert state_of(task(0), [default(), *searched("a", *[None] * 7)]).failing == ""
    assert state_of(task(0), [default(), *searched("a", *[None] * 9, 400.0)]).failing == ""
    mixed = [*searched("a", *[None] * 5), *searched("a", *[None] * 5, kind="build")]
    assert state_of(task(0), [default(), *mixed]).failing == ""


def test_model_latency_is_the_weighted_sum() -> None:
    states = [state(0, 100.0, weight=2, default_us=300.0), state(1, 50.0), state(2, None)]

    assert model_latency_us(states) == 250.0
    assert model_latency_us(states, untuned=True) == 650.0


def test_the_heaviest_untouched_task_goes_first_whatever_the_order() -> None:
    states = [state(0, 5_000.0), state(1, 3_000.0, weight=4), state(2, 9_000.0)]
    for order in itertools.permutations(states):
        decision = next_session(order, NO_LIMIT)
        assert decision.task == states[1].task
        assert "us of" in decision.reason


def test_same_input_same_decision() -> None:
    states = [state(n, 1000.0 * (n + 1), weight=n + 1, gains=(0.1,) * n, trials=16 * n) for n in range(5)]
    assert len({str(next_session(states, Limits(100, 4))) for _ in range(5)}) == 1


def test_a_searched_task_yields_to_an_untouched_one_of_the_same_weight() -> None:
    states = [state(0, 5_000.0, gains=(0.3,), trials=16), state(1, 4_900.0)]
    assert next_session(states, NO_LIMIT).task == states[1].task


def test_a_task_that_still_improves_is_preferred() -> None:
    states = [state(n, 5_000.0, gains=(0.5, 0.1, gain), trials=48) for n, gain in enumerate((0.0, 0.15))]
    assert next_session(states, NO_LIMIT).task == states[1].task


def test_expected_gains_fall_from_session_to_session() -> None:
    speed = (1e12, 1e12)
    gains = [expected_gain_us(state(0, 1000.0, gains=(0.0,) * n), Knowledge(speed, {}, 16)) for n in range(6)]

    assert gains == sorted(gains, reverse=True)
    assert 0 < gains[-1] < gains[0] < 1000.0


def test_what_cannot_be_saved_is_not_expected() -> None:
    # 1 GFLOP/s is this machine's record, and the task runs at half of it: half can be saved at most.
    assert expected_gain_us(state(0, 4000.0), Knowledge((1e9, 1e12), {}, 16)) == pytest.approx(2000.0)


@pytest.mark.parametrize("latency_us", [1.0, 20.0, 1000.0])
def test_a_single_task_is_searched_however_fast_its_default_is(latency_us: float) -> None:
    # The only task holds every record of speed itself, which is no reason to leave it as it is.
    decision = next_session([state(0, latency_us)], NO_LIMIT)
    assert decision.task is not None


def test_the_floor_comes_before_the_gain() -> None:
    states = [state(0, 90_000.0, trials=16, gains=(0.5,)), state(1, 10.0, trials=3)]
    decision = next_session(states, Limits(None, floor_trials=8))

    assert decision.task == states[1].task
    assert decision.trials == 5
    assert "floor" in decision.reason
    done = [states[0], replace(states[1], trials=8, gains=(0.0,))]
    assert next_session(done, Limits(None, floor_trials=8)).task == states[0].task


def test_the_floor_does_not_reopen_a_closed_task() -> None:
    states = [state(0, 100.0, exhausted=True), state(1, None), state(2, 50.0, failing="run", trials=8)]
    assert next_session(states, Limits(None, floor_trials=32)).task is None


def test_a_stale_task_is_closed_and_says_why() -> None:
    stale = state(0, 9_000.0, gains=(0.5, *[0.002] * PATIENCE), trials=64)
    fresh = state(1, 1_000.0)

    assert next_session([stale, fresh], NO_LIMIT).task == fresh.task
    assert closed_tasks([stale, fresh]) == {stale.task.name: f"no improvement in {PATIENCE} sessions"}


@pytest.mark.parametrize("gains", [(0.0,) * PATIENCE, (0.5, *[0.01] * PATIENCE), (0.0, 0.0, 0.0, 0.2)], ids=str)
def test_a_task_is_not_stale_too_early(gains: tuple[float, ...]) -> None:
    assert closed_tasks([state(0, 9_000.0, gains=gains)]) == {}


def test_tasks_that_fail_alike_are_closed_with_their_kind() -> None:
    broken = state_of(task(0), [default(), *searched("a", *[None] * 16, kind="build_timeout")])

    assert "16" in closed_tasks([broken])[broken.task.name]
    assert "build_timeout" in closed_tasks([broken])[broken.task.name]
    assert next_session([broken], NO_LIMIT).task is None


@pytest.mark.parametrize(
    ("closed", "says"),
    [(state(0, 100.0, exhausted=True), "exhausted"), (state(0, None), "could not be measured")],
)
def test_other_reasons_to_close(closed: TaskState, says: str) -> None:
    assert says in closed_tasks([closed])[closed.task.name]


def test_a_spent_budget_ends_it() -> None:
    for left in (0, -3):
        decision = next_session([state(0, 1e6)], Limits(left))
        assert decision.task is None
        assert "budget" in decision.reason


def test_a_session_is_never_larger_than_the_budget() -> None:
    assert next_session([state(0, 1e6)], Limits(3)).trials == 3
    assert next_session([state(0, 1e6)], Limits(3, floor_trials=9)).trials == 3
    assert next_session([state(0, 1e6)], Limits(1000)).trials > 3


def test_a_light_task_gets_a_smaller_session() -> None:
    heavy = state(0, 1_000_000.0, gains=(0.0,) * 9, trials=144)  # stale, but still the model's weight
    light = next_session([heavy, state(1, 1_000.0)], NO_LIMIT)
    alone = next_session([state(1, 1_000.0)], NO_LIMIT)

    assert light.task == alone.task
    assert 0 < light.trials < alone.trials


def test_first_sessions_go_where_those_of_the_same_operator_gained_before() -> None:
    conv, softmax = state(0, 1e6), state(1, 4e5)
    softmax = replace(
        softmax, task=replace(softmax.task, subgraph=replace(softmax.task.subgraph, anchor_operator="softmax"))
    )
    states = [conv, softmax]
    poor_convs = FirstSessions({"conv2d": (0.01, 0.0, 0.02)})

    assert next_session(states, NO_LIMIT).task == conv.task
    assert next_session(states, NO_LIMIT, before=poor_convs).task == softmax.task
    assert next_session(states, NO_LIMIT, before=FirstSessions({"softmax": (0.0, 0.0, 0.0)})).task == conv.task
    # What is learned in the run itself counts as well.
    tried = [state(number, 3e5, gains=(0.0,), trials=16) for number in (2, 3, 4)]
    assert next_session([*states, *tried], NO_LIMIT).task == softmax.task
    assert remaining_share(states, poor_convs) < remaining_share(states)


def test_another_implementation_is_measured_before_schedules_of_the_only_one() -> None:
    heavy, two_ways = state(0, 5e2), state(1, 4e2)
    subgraph = replace(two_ways.task.subgraph, implementations=("winograd",))
    two_ways = replace(two_ways, task=replace(two_ways.task, subgraph=subgraph))
    # As fast as anything here: the roofline promises nothing.
    fast = FirstSessions({"conv2d": (0.0,) * 8})

    assert next_session([heavy, two_ways], NO_LIMIT, before=fast).task == two_ways.task
    # What it brought tonight counts for its like alone.
    tried = replace(two_ways, gains=(0.5,), trials=16)
    assert list(first_sessions([heavy, tried]).gains) == ["conv2d, other implementations"]
    # Of the anchor operator alone there is none.
    alone = replace(two_ways, task=replace(two_ways.task, workload_key="anchor"))
    assert next_session([heavy, alone], NO_LIMIT, before=fast).task == heavy.task


def test_no_number_of_sessions_makes_an_operator_hopeless() -> None:
    many = FirstSessions({"conv2d": (0.0,) * 1000})

    assert expected_gain_us(state(0, 1e6), Knowledge.of([state(0, 1e6)], many)) > 0.02 * 1e6


def test_the_gains_of_first_sessions_by_operator() -> None:
    states = [state(0, 1e6, gains=(0.3, 0.1), trials=32), state(1, 1e6, gains=(0.2,), trials=16), state(2, 1e6)]

    assert first_sessions(states).gains == {"conv2d": (0.3, 0.2)}


def test_a_task_that_is_being_searched_yields_to_the_next_best() -> None:
    states = [state(0, 1e6), state(1, 9e5)]

    assert next_session(states, NO_LIMIT).task == states[0].task
    assert next_session(states, NO_LIMIT, {states[0].task.workload_key: 1}).task == states[1].task


def test_a_task_alone_is_searched_by_several_at_once() -> None:
    alone = state(0, 1e6)
    decision = next_session([alone], NO_LIMIT, {alone.task.workload_key: 2})

    assert decision.task == alone.task
    assert "session 3" in decision.reason


def test_the_floor_counts_what_is_being_measured() -> None:
    states = [state(0, 1e6), state(1, 1e3)]
    decision = next_session(states, Limits(None, floor_trials=8), {states[0].task.workload_key: 1})

    assert decision.task == states[1].task
    assert "floor" in decision.reason


def test_no_tasks_is_the_end() -> None:
    assert next_session([], NO_LIMIT).task is None


class Simulation:
    """A tuner whose tasks fall by known curves: the best of n trials is ``end + (start - end) * exp(-n / pace)``."""

    def __init__(self, seed: int, tasks: int) -> None:
        draw = random.Random(seed)
        self.tasks = [task(n, weight=draw.choice([1, 1, 2, 5])) for n in range(tasks)]
        # As in a real model: few tasks hold most of the time, and defaults are up to thirty times too slow.
        self.start = [draw.lognormvariate(6.0, 1.8) for _ in self.tasks]
        self.end = [start / draw.uniform(1.2, 30.0) for start in self.start]
        self.pace = [draw.uniform(4.0, 40.0) for _ in self.tasks]
        self.trials = [0] * tasks
        self.gains: list[tuple[float, ...]] = [()] * tasks

    def best_us(self, n: int) -> float:
        return self.end[n] + (self.start[n] - self.end[n]) * math.exp(-self.trials[n] / self.pace[n])

    def spend(self, n: int, trials: int) -> None:
        before = self.best_us(n)
        self.trials[n] += trials
        self.gains[n] += ((before - self.best_us(n)) / before,)

    def states(self) -> list[TaskState]:
        return [
            TaskState(t, self.start[n], self.best_us(n), self.trials[n], self.gains[n])
            for n, t in enumerate(self.tasks)
        ]

    def run_plan(self, budget: int) -> float:
        while True:
            decision = next_session(self.states(), Limits(budget - sum(self.trials)))
            if decision.task is None:
                return model_latency_us(self.states())
            self.spend(self.tasks.index(decision.task), decision.trials)

    def run_evenly(self, budget: int) -> float:
        for n in itertools.cycle(range(len(self.tasks))):
            if sum(self.trials) >= budget:
                return model_latency_us(self.states())
            self.spend(n, min(8, budget - sum(self.trials)))
        raise AssertionError


@pytest.mark.parametrize("seed", range(12))
def test_spending_by_the_plan_beats_even_spending(seed: int) -> None:
    planned, evenly = Simulation(seed, 30), Simulation(seed, 30)
    latency_us, even_us = planned.run_plan(300), evenly.run_evenly(300)

    assert sum(planned.trials) <= 300 == sum(evenly.trials)
    assert latency_us < even_us


def test_spending_by_the_plan_is_much_better_on_the_whole() -> None:
    ratios = [Simulation(seed, 30).run_plan(300) / Simulation(seed, 30).run_evenly(300) for seed in range(12)]
    # Deterministic; ten trials a task on average leave most of a heavy task's gain behind.
    assert sum(ratios) / len(ratios) < 0.8


def test_a_plan_without_a_limit_comes_to_an_end() -> None:
    simulation = Simulation(1, 20)
    latency_us = simulation.run_plan(10**9)

    floor_us = sum(t.weight * end for t, end in zip(simulation.tasks, simulation.end, strict=True))
    assert latency_us < 1.1 * floor_us  # within a tenth of what the curves can give
    assert sum(simulation.trials) < 20 * 400


def test_first_sessions_are_as_long_as_those_before_needed() -> None:
    soon = FirstSessions(lengths=(1, 1, 2, 1))

    assert next_session([state(0, 1e6)], NO_LIMIT).trials == 16
    assert next_session([state(0, 1e6)], NO_LIMIT, before=soon).trials == 4
    assert next_session([state(0, 1e6)], NO_LIMIT, before=FirstSessions(lengths=(1, 9, 9, 16))).trials == 12
    # One that gained soon tells little; those of the run itself count as well.
    assert next_session([state(0, 1e6)], NO_LIMIT, before=FirstSessions(lengths=(1, 1))).trials == 16
    tried = replace(state(1, 1e5, gains=(0.3,), trials=16), first_length=2)
    assert next_session([state(0, 1e6), tried], NO_LIMIT, before=FirstSessions(lengths=(1, 1))).trials == 4
    # What other implementations brought tells nothing of schedules.
    subgraph = replace(tried.task.subgraph, implementations=("winograd",))
    two_ways = replace(tried, task=replace(tried.task, subgraph=subgraph))
    assert next_session([state(0, 1e6), two_ways], NO_LIMIT, before=FirstSessions(lengths=(1, 1))).trials == 16
    # A second session goes deeper.
    again = state(0, 1e6, gains=(0.4,), trials=4)
    assert next_session([again], NO_LIMIT, before=soon).trials == 16


def test_a_first_session_was_long_enough_once_it_had_most_of_its_gain() -> None:
    def length(*latencies_us: float | None) -> int:
        return state_of(task(0), [default(1000.0), *searched("a", *latencies_us), *searched("b", 10.0)]).first_length

    assert length(900.0, None, 510.0, 500.0, *[700.0] * 4) == 3
    assert length(500.0, 499.0, *[700.0] * 6) == 1
    assert length(1200.0, 999.0, *[1200.0] * 6) == 0
    assert length(*[None] * 8) == 0
    # Too short to tell what a longer one would have brought.
    assert length(900.0, 500.0) == 0
