"""Which session is next: a pure function of the records and the budget.

Spending follows the expected gain in the model's latency. For a task of weight w whose best latency so
far is b, a session is expected to save ``w * b * r``. The rate r of a task that was never searched is
what separates it from the machine's demonstrated speed (the best FLOP rate and memory bandwidth that
any subgraph of this model has reached); afterwards it falls with every session, is pulled towards what
the last session really gave, and never exceeds what is left above that speed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tasks.records import FirstSessions, TuningRecord, TuningTask

#: The relative gain that the second, third, ... session of a task brings on average.
_LATER_RATES = (0.20, 0.10, 0.06, 0.04, 0.03)
#: A task whose best latency fell by less than this share over ``PATIENCE`` sessions is left alone.
_STALE_GAIN = 0.01
PATIENCE = 3
#: A first session had most of its gain once it had this share of it, where it gained as much as counts at all.
_MOST_OF_GAIN = 0.9
#: From so many first sessions that gained on, the next ones are as long as these needed: most of them (this share) at
#: least, in steps of so many trials.
_KNOWN_LENGTHS, _LONG_ENOUGH_FOR, _LENGTH_STEP = 3, 0.75, 4
#: A session of fewer trials does not say what a longer one would have brought.
_TELLING_TRIALS = 8
#: What a session may gain of a task that is as fast as anything seen here.
_LEAST_ROOM = 0.02
#: A task below this share of the model's latency gets small sessions.
_LIGHT_SHARE = 0.02
_SESSION_TRIALS = 16
_LIGHT_TRIALS = 8
#: What the first session of a task gains that has other implementations to measure, before any was.
_OTHERS_GAIN = 0.4
#: What the roofline promises counts as so many first sessions when it is weighed against those that were run.
_ROOFLINE_WEIGHT = 1.0
#: However many there were: kernels of one operator are not all alike.
_MOST_SESSIONS = 8
#: With so many trials, all failing alike, a task's set-up is broken rather than its candidates.
_FAILING_TRIALS = 8
#: Before anything ran fast: FLOPs per second and bytes per second that one core surely reaches.
_MODEST_FLOPS = 10e9
_MODEST_BANDWIDTH = 4e9
_NONE: Mapping[str, int] = MappingProxyType({})
NOTHING_BROUGHT = FirstSessions()


@dataclass(frozen=True)
class TaskState:
    """What the records say of a task. ``gains`` are the relative gains of its search sessions, in order.

    ``first_length`` is the number of trials after which the first one had most of its gain, 0 where it had none or
    was too short to tell.
    """

    task: TuningTask
    default_us: float | None
    best_us: float | None
    trials: int
    gains: tuple[float, ...]
    failing: str = ""
    exhausted: bool = False
    first_length: int = 0

    @property
    def cost_us(self) -> float:
        """The task's part of the model's latency, 0 where nothing could be measured."""
        return self.task.weight * (self.best_us or 0.0)


@dataclass(frozen=True)
class Limits:
    """What may still be spent: trials (None: no limit), and the least that every task is given."""

    trials_left: int | None
    floor_trials: int = 0


@dataclass(frozen=True)
class Decision:
    """The next session, or with no task the reason to stop."""

    task: TuningTask | None
    trials: int
    reason: str


def state_of(task: TuningTask, records: Sequence[TuningRecord], exhausted: bool = False) -> TaskState:
    """Summarise ``records`` of ``task``."""
    default_us: float | None = None
    best_us: float | None = None
    trials = 0
    failures: list[str] = []
    sessions: dict[str, tuple[float, float]] = {}
    first_bests: list[float] = []
    for record in sorted(records, key=lambda record: record.started_at):
        latency_us = record.latency_us
        if record.phase == "confirm":
            continue
        if not record.schedule and latency_us is not None:
            default_us = latency_us
        before = math.inf if best_us is None else best_us
        if latency_us is not None:
            best_us = min(before, latency_us)
        if record.phase != "search":
            continue
        trials += 1
        failures.append(record.failure.kind if record.failure else "")
        first = sessions.get(record.session_id, (before, 0.0))[0]
        sessions[record.session_id] = (first, math.inf if best_us is None else best_us)
        if len(sessions) == 1:
            first_bests.append(sessions[record.session_id][1])
    gains = tuple(
        0.0 if not math.isfinite(before) or before <= 0 else (before - after) / before
        for before, after in sessions.values()
    )
    alike = len(failures) >= _FAILING_TRIALS and failures[0] and len(set(failures)) == 1
    failing = failures[0] if alike else ""
    first_length = 0
    if gains and gains[0] >= _STALE_GAIN and len(first_bests) >= _TELLING_TRIALS:
        before = next(iter(sessions.values()))[0]
        enough_us = before - _MOST_OF_GAIN * (before - first_bests[-1])
        first_length = 1 + next(at for at, us in enumerate(first_bests) if us <= enough_us)
    return TaskState(task, default_us, best_us, trials, gains, failing, exhausted, first_length)


def model_latency_us(states: Sequence[TaskState], untuned: bool = False) -> float:
    """The sum of the subgraphs' latencies times their weights."""
    if untuned:
        return sum(state.task.weight * (state.default_us or state.best_us or 0.0) for state in states)
    return sum(state.cost_us for state in states)


def next_session(
    states: Sequence[TaskState],
    limits: Limits,
    in_flight: Mapping[str, int] = _NONE,
    before: FirstSessions = NOTHING_BROUGHT,
) -> Decision:
    """The session that is expected to gain most, or why there is none.

    ``in_flight`` counts the sessions that run now, by workload key: until they end, a task is planned
    as if they had brought what such a session brings on average. ``before`` is what first sessions brought
    in earlier runs.
    """
    if limits.trials_left is not None and limits.trials_left <= 0:
        return Decision(None, 0, "the trial budget is spent")
    total_us = model_latency_us(states) or 1.0
    open_states = [state for state in states if _why_closed(state) == ""]
    for state in open_states:
        if state.trials < limits.floor_trials and not in_flight.get(state.task.workload_key):
            trials = _capped(limits.floor_trials - state.trials, limits)
            return Decision(state.task, trials, f"floor: {state.trials} of {limits.floor_trials} trials")
    knowledge = Knowledge.of(states, before)
    gains = {
        state.task.workload_key: expected_gain_us(state, knowledge, in_flight.get(state.task.workload_key, 0))
        for state in open_states
    }
    best = max(open_states, key=lambda state: gains[state.task.workload_key], default=None)
    if best is None:
        return Decision(None, 0, "no task is expected to improve any more")
    gain_us = gains[best.task.workload_key]
    if gain_us < 1e-4 * total_us:
        return Decision(None, 0, f"no session is expected to gain more than {gain_us:.1f} us of {total_us:.0f} us")
    number = len(best.gains) + in_flight.get(best.task.workload_key, 0) + 1
    size = _LIGHT_TRIALS if best.cost_us < _LIGHT_SHARE * total_us else _SESSION_TRIALS
    if number == 1:
        size = min(size, knowledge.first_length)
    reason = (
        f"expected gain {gain_us:.0f} us of {total_us:.0f} us: {best.cost_us / total_us:.1%} of the model, "
        f"session {number}"
    )
    return Decision(best.task, _capped(size, limits), reason)


@dataclass(frozen=True)
class Knowledge:
    """What tells how much a session may gain: the best speed that any task has reached, and earlier gains.

    ``first_length`` is how many trials a first session should have.
    """

    speed: tuple[float, float]
    first_gains: Mapping[str, Sequence[float]]
    first_length: int

    @classmethod
    def of(cls, states: Sequence[TaskState], before: FirstSessions = NOTHING_BROUGHT) -> Knowledge:
        """What this run's states and earlier runs tell."""
        here = first_sessions(states)
        found = {operator: list(gains) for operator, gains in before.gains.items()}
        for operator, gains in here.gains.items():
            found.setdefault(operator, []).extend(gains)
        return cls(_demonstrated_speed(states), found, _long_enough([*before.lengths, *here.lengths]))

    def first_gain(self, kind: str, room: float) -> float:
        """What a first session is expected to gain: ``room``, as far as others of its kind do not tell better."""
        known = self.first_gains.get(kind, ())
        if not known:
            return room
        weight = min(len(known), _MOST_SESSIONS)
        return (_ROOFLINE_WEIGHT * room + weight * statistics.mean(known)) / (_ROOFLINE_WEIGHT + weight)


def first_sessions(states: Sequence[TaskState]) -> FirstSessions:
    """What the first session of each task brought."""
    gains: dict[str, list[float]] = {}
    for state in states:
        if state.gains:
            gains.setdefault(_kind(state.task), []).append(state.gains[0])
    # Where other implementations come first, they have the gain, however good the schedules behind them are.
    lengths = [state.first_length for state in states if state.first_length and not _has_others(state.task)]
    return FirstSessions({operator: tuple(values) for operator, values in gains.items()}, tuple(lengths))


def _long_enough(lengths: Sequence[int]) -> int:
    """How many trials a first session should have, where these were enough for others."""
    if len(lengths) < _KNOWN_LENGTHS:
        return _SESSION_TRIALS
    # Rounded down: of three lengths the second counts, not the one outlier.
    needed = sorted(lengths)[math.floor(_LONG_ENOUGH_FOR * (len(lengths) - 1))]
    return min(_SESSION_TRIALS, math.ceil(needed / _LENGTH_STEP) * _LENGTH_STEP)


def _kind(task: TuningTask) -> str:
    """What first sessions gain alike: the anchor operator, apart where it has other implementations."""
    return (
        f"{task.subgraph.anchor_operator}, other implementations"
        if _has_others(task)
        else task.subgraph.anchor_operator
    )


def _has_others(task: TuningTask) -> bool:
    """Are there other implementations to measure? Of an anchor operator alone there are none."""
    return bool(task.subgraph.implementations) and task.workload_key == task.subgraph.workload_key


def expected_gain_us(state: TaskState, knowledge: Knowledge, in_flight: int = 0) -> float:
    """What one more session of this task, beside those ``in_flight``, is expected to save in a run of the model."""
    if state.best_us is None:
        return 0.0
    floor_us = _floor_us(state.task, knowledge.speed)
    room = max(0.0, 1.0 - floor_us / state.best_us)
    searched = len(state.gains) + in_flight
    # Even at the demonstrated speed a schedule may be improved; the model's own record is no law.
    room = max(room, _LEAST_ROOM)
    if searched == 0:
        if _has_others(state.task):
            room = max(room, _OTHERS_GAIN)
        return state.cost_us * knowledge.first_gain(_kind(state.task), room)
    rate = _LATER_RATES[min(searched - 1, len(_LATER_RATES) - 1)]
    if searched > 1 and state.gains:
        rate = 0.5 * rate + 0.5 * 0.5 * state.gains[-1]
    return state.cost_us * min(rate, room)


def remaining_share(states: Sequence[TaskState], before: FirstSessions = NOTHING_BROUGHT) -> float:
    """What one more session of every open task is expected to save, as a share of the model's latency."""
    knowledge = Knowledge.of(states, before)
    gain_us = sum(expected_gain_us(state, knowledge) for state in states if not _why_closed(state))
    return gain_us / (model_latency_us(states) or 1.0)


def closed_tasks(states: Sequence[TaskState]) -> Mapping[str, str]:
    """The tasks that get no more sessions, by name, and why."""
    return {state.task.name: why for state in states if (why := _why_closed(state))}


def _why_closed(state: TaskState) -> str:
    if state.failing:
        return f"all {state.trials} trials failed alike: {state.failing}"
    if state.exhausted:
        return "its search space is exhausted"
    if state.best_us is None:
        return "its default schedule could not be measured"
    if len(state.gains) > PATIENCE and sum(state.gains[-PATIENCE:]) < _STALE_GAIN:
        return f"no improvement in {PATIENCE} sessions"
    return ""


def _demonstrated_speed(states: Sequence[TaskState]) -> tuple[float, float]:
    """The best FLOPs per second and bytes per second that any task has reached."""
    flops, bandwidth = _MODEST_FLOPS, _MODEST_BANDWIDTH
    for state in states:
        if state.best_us:
            flops = max(flops, state.task.flops / state.best_us * 1e6)
            bandwidth = max(bandwidth, state.task.bytes_moved / state.best_us * 1e6)
    return flops, bandwidth


def _floor_us(task: TuningTask, speed: tuple[float, float]) -> float:
    """The latency that the demonstrated speed would give ``task``: a roofline of what was seen."""
    flops, bandwidth = speed
    return max(task.flops / flops, task.bytes_moved / bandwidth) * 1e6


def _capped(trials: int, limits: Limits) -> int:
    return trials if limits.trials_left is None else min(trials, limits.trials_left)
