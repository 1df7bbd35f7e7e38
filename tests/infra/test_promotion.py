"""The champion changes only for a version that is faster beyond noise, and the numbers say why."""

from __future__ import annotations

import random

import pytest

from infra.promotion import Champion, Race, alias_for, decide_alias, ratio_interval
from tasks.records import Latency

CHAMPION = Champion("cls", "3", "champion", "cpu-abc", "d", "s3://b/artifacts/d")


def samples(mean: float, noise: float = 0.02, seed: int = 0, count: int = 30) -> Latency:
    draw = random.Random(seed)
    return Latency(tuple(mean * draw.uniform(1 - noise, 1 + noise) for _ in range(count)))


def test_the_first_version_of_a_target_is_its_champion() -> None:
    decision = decide_alias(Race(samples(2.0)))
    assert decision.promoted
    assert "no champion for this target" in decision.reason


@pytest.mark.parametrize(
    ("new_ms", "promoted", "says"),
    [(1.8, True, "faster: "), (2.2, False, "slower: "), (2.0, False, "not faster beyond noise: ")],
)
def test_the_faster_one_wins(new_ms: float, promoted: bool, says: str) -> None:
    # The same noise backwards: what is equal in the median must not win by luck.
    old = Latency(samples(2.0).samples_ms[::-1])
    decision = decide_alias(Race(samples(new_ms), CHAMPION, old))
    assert decision.promoted is promoted
    assert decision.reason.startswith(says)
    assert "champion version 3" in decision.reason


def test_a_champion_that_was_not_measured_stays() -> None:
    assert not decide_alias(Race(samples(0.1), CHAMPION)).promoted


def test_pairs_see_through_a_machine_that_gets_slower_meanwhile() -> None:
    drift = [1 + n / 10 for n in range(30)]
    new = [1.9 * d for d in drift]
    old = [2.0 * d for d in drift]
    low, ratio, high = ratio_interval(new, old)
    assert (low, ratio, high) == pytest.approx((0.95, 0.95, 0.95))


def test_unpaired_samples_are_compared_by_medians() -> None:
    low, ratio, high = ratio_interval(samples(1.0).samples_ms, samples(2.0, count=20).samples_ms)
    assert low < ratio < high < 0.6


def test_an_alias_belongs_to_one_target() -> None:
    assert alias_for("champion", "cpu-abc", None) == "champion"
    assert alias_for("champion", "cpu-abc", "cpu-abc") == "champion"
    assert alias_for("challenger", "cuda.sm 90", "cpu-abc") == "challenger-cuda-sm-90"
