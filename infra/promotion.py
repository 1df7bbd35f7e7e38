"""Which version serves: the decision is a pure function, its reason is written down with its numbers."""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from tasks.records import Latency

CHAMPION, CHALLENGER = "champion", "challenger"
#: The share of resamples between the ends of the confidence interval.
CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True)
class Champion:
    """The version that serves a target now. ``alias`` is the one it has."""

    name: str
    version: str
    alias: str
    target_key: str
    artifact_digest: str
    artifact_uri: str


@dataclass(frozen=True)
class Race:
    """The benchmark of a new version against the champion, both run in turns in one process.

    ``champion`` is None where the target has none. ``new.samples_ms[i]`` and
    ``champion_latency.samples_ms[i]`` were taken one right after the other.
    """

    new: Latency
    champion: Champion | None = None
    champion_latency: Latency | None = None


@dataclass(frozen=True)
class Decision:
    """Champion or challenger, why, and the figures that decided."""

    promoted: bool
    reason: str
    numbers: dict[str, float] = field(default_factory=dict)


def decide_alias(race: Race) -> Decision:
    """The new version is the champion where there is none, or where it is faster beyond noise.

    Noise: the 95 % confidence interval of the median ratio of the pairs must lie below one.
    """
    new_ms = race.new.median_ms
    if race.champion is None:
        return Decision(True, f"{new_ms:.4g} ms; there was no champion for this target", {"new_ms": new_ms})
    old = f"champion version {race.champion.version}"
    if race.champion_latency is None:
        return Decision(False, f"{new_ms:.4g} ms; {old} was not measured in the same benchmark", {"new_ms": new_ms})
    low, ratio, high = ratio_interval(race.new.samples_ms, race.champion_latency.samples_ms)
    figures = (
        f"{new_ms:.4g} ms against {race.champion_latency.median_ms:.4g} ms of {old}, "
        f"{ratio:.3f} times its latency (95% confidence: {low:.3f} to {high:.3f}, "
        f"{len(race.new.samples_ms)} pairs)"
    )
    numbers = {
        "new_ms": new_ms,
        "champion_ms": race.champion_latency.median_ms,
        "ratio": ratio,
        "ratio_low": low,
        "ratio_high": high,
        "pairs": float(len(race.new.samples_ms)),
    }
    if high < 1.0:
        return Decision(True, f"faster: {figures}", numbers)
    return Decision(False, f"{'slower' if low > 1.0 else 'not faster beyond noise'}: {figures}", numbers)


def ratio_interval(new: Sequence[float], old: Sequence[float]) -> tuple[float, float, float]:
    """Lower end, median and upper end of ``new / old`` over the pairs, by a seeded bootstrap.

    Where the lengths differ nothing was paired: the ratio of medians, resampled independently.
    """
    draw = random.Random(0)
    paired = len(new) == len(old)
    ratios = [a / b for a, b in zip(new, old, strict=False)]

    def resample() -> float:
        if paired:
            return statistics.median(draw.choices(ratios, k=len(ratios)))
        again = statistics.median(draw.choices(new, k=len(new)))
        return again / statistics.median(draw.choices(old, k=len(old)))

    medians = sorted(resample() for _ in range(RESAMPLES))
    tail = (1 - CONFIDENCE) / 2
    middle = statistics.median(ratios) if paired else statistics.median(new) / statistics.median(old)
    return medians[int(tail * RESAMPLES)], middle, medians[int((1 - tail) * RESAMPLES) - 1]


def alias_for(role: str, target_key: str, champion_target: str | None) -> str:
    """``role``, or ``role-<target key>`` where the plain champion serves another target.

    An alias names one version: a CUDA build must not take over the alias that CPU services load.
    """
    if champion_target in (None, target_key):
        return role
    return f"{role}-{re.sub(r'[^A-Za-z0-9_-]', '-', target_key)}"
