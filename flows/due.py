"""Which models are due, and which of them first: pure functions of registry tags and the last run's figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flows.parameters import TuneParameters
from flows.shapes import parse_shapes
from infra.source_versions import SourceVersion, targets_of
from tasks.errors import InputError

SHAPES_TAG = "tunewright.shapes"
MINUTES_TAG = "tunewright.minutes"
TRIALS_TAG = "tunewright.trials"
WEIGHT_TAG = "tunewright.weight"
#: What a model is expected to gain, as a share of its latency, of which nothing is known yet.
_UNTUNED_SHARE = 0.5
#: After so many days without a run a model's expected gain counts twice.
_AGE_DAYS = 7.0
#: Less time than this is not begun at the end of a night.
LEAST_MINUTES = 1.0


@dataclass(frozen=True)
class Request:
    """One model version to be tuned for one target. ``weight`` is what its latency counts, 1 by default."""

    source: SourceVersion
    target: str
    shapes: Mapping[str, tuple[int, ...]]
    trials: int | None = None
    minutes: float | None = None
    weight: float = 1.0

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.source.name} version {self.source.version} for {self.target}"

    def parameters(self, minutes: float | None = None) -> TuneParameters:
        """What the run is started with; ``minutes`` limits it, whatever else the tags say. Raises ValidationError."""
        limits = [m for m in (self.minutes, minutes) if m is not None]
        return TuneParameters(
            model=self.source.model, target=self.target, shapes=dict(self.shapes), trials=self.trials,
            minutes=min(limits, default=None),
        )  # fmt: skip


@dataclass(frozen=True)
class LastRun:
    """The last run of a request. ``remaining_share`` is what its records let one more session of each task
    expect, as a share of the model's latency; None where the run did not get that far."""

    ended_at: float
    failure: str = ""
    failures_in_a_row: int = 0
    tuned_ms: float | None = None
    remaining_share: float | None = None
    reason: str = ""
    tvm_version: str = ""


@dataclass(frozen=True)
class Rules:
    """The settings that decide. ``tvm_version`` is what a run would use now, empty where that is not known."""

    least_share: float
    again_days: float
    attempts: int
    now: float
    tvm_version: str = ""


@dataclass(frozen=True)
class Judgement:
    """``gain`` orders those that are due: expected milliseconds saved a call, by weight and age; None: not due."""

    request: Request
    gain: float | None
    reason: str


def requests_of(source: SourceVersion) -> list[Request]:
    """What the tags of ``source`` ask for. Raises InputError that names the tag."""
    tags = source.tags
    shapes = parse_shapes([part.strip() for part in tags.get(SHAPES_TAG, "").split(";") if part.strip()], SHAPES_TAG)
    trials = _number(tags, TRIALS_TAG)
    minutes = _number(tags, MINUTES_TAG)
    weight = _number(tags, WEIGHT_TAG)
    return [
        Request(
            source, target, shapes, None if trials is None else int(trials), minutes, 1.0 if weight is None else weight
        )
        for target in targets_of(tags)
    ]


def judge(request: Request, last: LastRun | None, rules: Rules) -> Judgement:
    """Whether ``request`` is due, what it is worth, and why."""
    if last is None:
        return Judgement(request, math.inf, "it was never tuned")
    days = max(0.0, (rules.now - last.ended_at) / 86400)
    other_tvm = bool(rules.tvm_version and last.tvm_version and rules.tvm_version != last.tvm_version)
    share, reason = _UNTUNED_SHARE, f"its last run was with TVM {last.tvm_version}, now it is {rules.tvm_version}"
    if not other_tvm:
        if last.failure and last.failures_in_a_row >= rules.attempts and days < rules.again_days:
            return Judgement(request, None, f"given up after {last.failures_in_a_row} failed runs: {last.failure}")
        if last.failure or last.remaining_share is None:
            reason = f"its last run failed: {last.failure}" if last.failure else "its last run left no figures"
        elif last.remaining_share >= rules.least_share:
            share, reason = last.remaining_share, f"{last.remaining_share:.1%} of its latency may be gained"
        elif days >= rules.again_days:
            share, reason = rules.least_share, f"its last run was {days:.0f} days ago"
        else:
            return Judgement(request, None, f"nothing new, and nothing to gain: {last.reason}")
    latency_ms = last.tuned_ms or 1.0
    return Judgement(request, latency_ms * share * request.weight * (1 + days / _AGE_DAYS), reason)


def in_order(judgements: Iterable[Judgement]) -> list[Judgement]:
    """Those that are due, the most to gain first; among equals by weight, then by name."""
    due = [judgement for judgement in judgements if judgement.gain is not None]
    return sorted(due, key=lambda j: (-(j.gain or 0.0), -j.request.weight, j.request.title))


def minutes_for(request: Request, minutes_left: float, default_minutes: float) -> float | None:
    """What ``request`` may take of the rest of the night; None where too little is left to begin."""
    if minutes_left < LEAST_MINUTES:
        return None
    wanted = request.minutes
    if wanted is None:
        wanted = minutes_left if request.trials is not None else default_minutes
    return min(wanted, minutes_left)


def _number(tags: Mapping[str, str], key: str) -> float | None:
    text = tags.get(key, "").strip()
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise InputError(f"tag {key} is not a positive number: {text[:60]}")
    return number
