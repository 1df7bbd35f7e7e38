"""When are two timings different? From their repeats, and from what measuring the same thing again shows."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence

#: A difference that chance alone would show in at most this share of comparisons is one.
ALPHA = 0.01
#: Every way to split the repeats is tried up to so many, beyond that as many random ones.
_SPLITS = 50_000
#: Fewer candidates that were measured twice say nothing about how measuring again varies.
_PAIRS = 8
#: The share of repeated measurements that stays within the margin.
_WITHIN = 0.95


def chance_of(before: Sequence[float], after: Sequence[float]) -> float:
    """How likely chance alone makes samples of the same thing differ so much: an exact rank-sum test.

    Two-sided, ties share their ranks, nothing is assumed about the distribution.
    """
    ranks = _ranks((*before, *after))
    count, expected = len(before), len(before) * (len(ranks) + 1) / 2
    seen = abs(sum(ranks[:count]) - expected) - 1e-9
    if math.comb(len(ranks), count) <= _SPLITS:
        sums = [sum(split) for split in itertools.combinations(ranks, count)]
    else:
        draw = random.Random(0)
        sums = [sum(draw.sample(ranks, count)) for _ in range(_SPLITS)]
    return sum(abs(value - expected) >= seen for value in sums) / len(sums)


def can_tell(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether so many repeats can show a difference at all: 5 of each can, 3 of each cannot."""
    return 2 / math.comb(len(before) + len(after), len(before)) <= ALPHA


def margin_of(ratios: Sequence[float]) -> float | None:
    """By which factor the second of two measurements of the same candidate strays: 1.04 is 4 %.

    ``ratios`` are second over first. Their median is no noise: what is measured again was chosen for
    being fast. None where there are too few to say.
    """
    if len(ratios) < _PAIRS:
        return None
    middle = statistics.median(ratios)
    strays = sorted(max(r / middle, middle / r) for r in ratios)
    return strays[min(len(strays) - 1, math.ceil(_WITHIN * len(strays)) - 1)]


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    for _, tied in itertools.groupby(enumerate(order, 1), key=lambda pair: values[pair[1]]):
        group = list(tied)
        shared = sum(rank for rank, _ in group) / len(group)
        for _, index in group:
            ranks[index] = shared
    return ranks
