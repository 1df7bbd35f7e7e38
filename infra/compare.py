"""What changed between two tuning runs: subgraphs, the whole model, budget, versions and parameters."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from infra import noise
from infra.finished_run import FinishedRun, Timing, TunedSubgraph, read_run
from infra.tracking import Tracking

#: What a subgraph's change can be, in the order in which people look.
STATES = ("slower", "faster", "new", "vanished", "failed", "unknown", "noise", "same")
_MEANING = {
    "slower": "slower beyond noise",
    "faster": "faster beyond noise",
    "new": "only in the second run",
    "vanished": "only in the first run",
    "failed": "one of the runs has no latency of it",
    "unknown": "too few repeats were recorded to tell",
    "noise": "no difference beyond noise",
    "same": "the same measurement in both: the second run found nothing better",
}
_BUDGET = ("trials", "minutes", "floor_trials")


@dataclass(frozen=True)
class Change:
    """From ``before`` to ``after``; ``chance`` is how likely chance alone shows such a difference."""

    state: str
    before: Timing | None
    after: Timing | None
    chance: float | None = None

    @property
    def ratio(self) -> float | None:
        """After over before: below one is faster."""
        return self.after.latency_us / self.before.latency_us if self.before and self.after else None


@dataclass(frozen=True)
class SubgraphChange:
    """One workload in both runs, or in one. Weights are calls in one run of the model, 0 where it is not."""

    workload_key: str
    name: str
    operators: str
    weight_before: int
    weight_after: int
    change: Change

    @property
    def effect_us(self) -> float:
        """What it adds to one run of the model, in microseconds; negative: the model got faster."""
        before, after = self.change.before, self.change.after
        return (after.latency_us * self.weight_after if after else 0.0) - (
            before.latency_us * self.weight_before if before else 0.0
        )


@dataclass(frozen=True)
class Comparison:
    """Run ``before`` against run ``after``. ``model`` and ``machine`` hold whole-model latencies.

    ``machine`` is onnxruntime's change on the same model: what it shows is the machine's doing.
    ``margin`` is by what factor the same candidate strays when it is measured again; None: not known.
    """

    before: FinishedRun
    after: FinishedRun
    subgraphs: tuple[SubgraphChange, ...]
    model: Change | None
    machine: Change | None
    margin: float | None
    settings: dict[str, tuple[str, str]]
    budget: dict[str, tuple[str, str]]

    def count(self, state: str) -> int:
        """How many subgraphs changed so."""
        return sum(s.change.state == state for s in self.subgraphs)

    @property
    def by_chance(self) -> float:
        """How many subgraphs would look different if nothing had changed."""
        return noise.ALPHA * sum(s.change.chance is not None for s in self.subgraphs)


def compare_runs(tracking_uri: str, before: str, after: str) -> Comparison:
    """Compare two runs, by our ids or MLflow's. Reads MLflow only. Raises InputError, TrackingError."""
    tracking = Tracking(tracking_uri)
    tracking.check()
    return compare(read_run(tracking, before), read_run(tracking, after))


def compare(first: FinishedRun, second: FinishedRun) -> Comparison:
    """Compare what was read."""
    margin = noise.margin_of((*first.again, *second.again))
    keys = [*second.subgraphs, *(key for key in first.subgraphs if key not in second.subgraphs)]
    changes = [_subgraph_change(first.subgraphs.get(key), second.subgraphs.get(key), margin) for key in keys]
    changes.sort(key=lambda c: (STATES.index(c.change.state) > 4, -abs(c.effect_us)))
    return Comparison(
        first,
        second,
        tuple(changes),
        _whole(first, second, "tuned"),
        _whole(first, second, "onnxruntime") if _same_control(first, second) else None,
        margin,
        _differences(first, second),
        _budgets(first, second),
    )


def meaning(state: str) -> str:
    """What a state says, in words."""
    return _MEANING[state]


def judge(before: Timing, after: Timing, margin: float | None = None) -> Change:
    """Is it faster or slower? Both the repeats and the margin of measuring again must say so."""
    if before.record_ids and before.record_ids == after.record_ids:
        return Change("same", before, after)
    if not noise.can_tell(before.repeats_us, after.repeats_us):
        return Change("unknown", before, after)
    chance = noise.chance_of(before.repeats_us, after.repeats_us)
    ratio = after.latency_us / before.latency_us
    within = margin is not None and 1 / margin <= ratio <= margin
    if chance > noise.ALPHA or within:
        return Change("noise", before, after, chance)
    return Change("slower" if ratio > 1 else "faster", before, after, chance)


def _subgraph_change(first: TunedSubgraph | None, second: TunedSubgraph | None, margin: float | None) -> SubgraphChange:
    known = second or first
    assert known is not None
    before = first.timing if first else None
    after = second.timing if second else None
    if first is None or second is None:
        change = Change("new" if first is None else "vanished", before, after)
    elif before is None or after is None:
        change = Change("failed", before, after)
    else:
        change = judge(before, after, margin)
    weights = first.weight if first else 0, second.weight if second else 0
    return SubgraphChange(known.workload_key, known.name, known.operators, *weights, change)


def _whole(first: FinishedRun, second: FinishedRun, contender: str) -> Change | None:
    before, after = first.samples_ms.get(contender), second.samples_ms.get(contender)
    if not before or not after:
        return None
    return judge(_of_model(before), _of_model(after))


def _of_model(samples_ms: Sequence[float]) -> Timing:
    return Timing(statistics.median(samples_ms) * 1000, tuple(ms * 1000 for ms in samples_ms))


def _same_control(first: FinishedRun, second: FinishedRun) -> bool:
    """Whether onnxruntime did the same in both runs, so that its change is the machine's."""
    names = ("model_digest", "threads", "version.onnxruntime")
    return all(first.params.get(name) == second.params.get(name) for name in names)


def _differences(first: FinishedRun, second: FinishedRun) -> dict[str, tuple[str, str]]:
    """Parameters, versions of packages and the machine, where they are not the same."""
    sides = []
    for run in (first, second):
        named = {name: value for name, value in run.params.items() if name not in _BUDGET}
        host = run.tags.get("tunewright.host")
        sides.append({**named, **({"host": host} if host else {})})
    before, after = sides
    return {
        name: (before.get(name, ""), after.get(name, ""))
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    }


def _budgets(first: FinishedRun, second: FinishedRun) -> dict[str, tuple[str, str]]:
    """What each run was allowed, and what it spent."""
    rows = {f"allowed {name}": (first.params.get(name, ""), second.params.get(name, "")) for name in _BUDGET}
    for label, metric, unit in (
        ("trials", "trials", ""), ("tasks", "tasks", ""), ("reused records", "reused_records", ""),
        ("duration", "seconds.total", " s"),
    ):  # fmt: skip
        values = [run.metrics.get(metric) for run in (first, second)]
        rows[label] = tuple("" if v is None else f"{v:.0f}{unit}" for v in values)  # type: ignore[assignment]
    return {name: pair for name, pair in rows.items() if any(value not in ("", "None") for value in pair)}
