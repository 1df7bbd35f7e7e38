"""Why a task is no faster than it is: the plan's decisions and the records, as a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tasks import plan
from tasks.records import TuningRecord

#: A gain below this one is none: two timings of one kernel differ by as much.
_NO_GAIN = 1.02


def explain(
    states: Sequence[plan.TaskState], records: Mapping[str, Sequence[TuningRecord]], ended: str
) -> dict[str, str]:
    """Why each task is no faster, by its name; ``ended`` is why the run searched no further."""
    closed = plan.closed_tasks(states)
    total_us = plan.model_latency_us(states) or 1.0
    return {
        state.task.name: _reason(
            state, closed.get(state.task.name, ""), records.get(state.task.workload_key, ()),
            f"{state.cost_us / total_us:.1%} of the model's time; the run ended: {ended}",
        )
        for state in states
    }  # fmt: skip


def _reason(state: plan.TaskState, closed: str, records: Sequence[TuningRecord], ended: str) -> str:
    if state.best_us is None:
        return f"its default schedule could not be measured{_last_message(records)}"
    searched = [record for record in records if record.phase == "search"]
    if not searched:
        return f"never searched: {ended}"
    failed = Counter(record.failure.kind for record in searched if record.failure)
    if len(searched) == sum(failed.values()):
        kinds = ", ".join(f"{count} {kind}" for kind, count in failed.most_common())
        which = "its only trial" if len(searched) == 1 else f"all {len(searched)} trials"
        return f"{which} failed ({kinds}){_last_message(records)}"
    sessions = len({record.session_id for record in searched})
    spent = f"{len(searched)} trials in {sessions} session{'s' if sessions > 1 else ''}"
    if not state.default_us or state.default_us / state.best_us < _NO_GAIN:
        spent += " found nothing faster than the default schedule"
    else:
        spent += f" made it {state.default_us / state.best_us:.2f} times as fast"
    last = f", the last one by {state.gains[-1]:.1%}" if len(state.gains) > 1 else ""
    return f"{spent}{last}; {closed or ended}"


def _last_message(records: Sequence[TuningRecord]) -> str:
    failed = [record for record in records if record.failure]
    latest = max(failed, key=lambda record: record.started_at, default=None)
    return f": {latest.failure.message[:200]}" if latest and latest.failure and latest.failure.message else ""
