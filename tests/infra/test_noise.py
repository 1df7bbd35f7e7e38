"""A difference is one only where chance and measuring again cannot explain it."""

from __future__ import annotations

import random

import pytest

from infra import noise


def test_the_chance_of_full_separation_is_counted_exactly() -> None:
    # Two of the 252 ways to split ten repeats into halves separate them fully.
    assert noise.chance_of([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(2 / 252)
    assert noise.chance_of([6, 7, 8, 9, 10], [1, 2, 3, 4, 5]) == pytest.approx(2 / 252)


def test_ties_share_their_ranks() -> None:
    assert noise.chance_of([1, 1, 1, 1], [1, 1, 1, 1]) == 1.0
    # Ranks 1 and 2 against 3.5 and 3.5: only the fully separated splits are as far apart.
    assert noise.chance_of([1, 2], [3, 3]) == pytest.approx(2 / 6)


def test_equal_things_differ_in_the_promised_share_of_comparisons() -> None:
    draw = random.Random(1)
    samples = [[draw.gauss(100, 3) for _ in range(12)] for _ in range(400)]
    called = sum(noise.chance_of(s[:6], s[6:]) <= noise.ALPHA for s in samples)
    # 4 are expected of 400; 12 or more have a chance of 1 in 1,000.
    assert called < 12


def test_many_repeats_are_sampled_and_say_the_same() -> None:
    assert noise.chance_of([float(n) for n in range(20)], [n + 0.5 for n in range(20)]) > 0.5
    assert noise.chance_of([float(n) for n in range(20)], [n + 30.0 for n in range(20)]) < 0.001


@pytest.mark.parametrize(("repeats", "can"), [(3, False), (4, False), (5, True), (9, True)])
def test_few_repeats_cannot_tell(repeats: int, can: bool) -> None:
    assert noise.can_tell([1.0] * repeats, [2.0] * repeats) is can


def test_the_margin_is_how_far_measuring_again_strays_from_its_median() -> None:
    # Chosen for being fast, all are 5 % slower the second time; around that they stray by up to 4 %.
    ratios = [1.05 * factor for factor in (1.0, 1.01, 0.99, 1.02, 0.98, 1.03, 0.97, 1.04, 1 / 1.04)]
    assert noise.margin_of(ratios) == pytest.approx(1.04)
    assert noise.margin_of(ratios[:5]) is None
