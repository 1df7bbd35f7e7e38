"""Which schedules are wrong, by halving: a pure search over a predicate. The whole path: tests/flows/test_repair.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tasks.bisect import find_culprits

NAMES = [f"s{number:02d}" for number in range(60)]


class Model:
    """A model that is wrong with any of ``wrong``, or with all of a group in ``together``."""

    def __init__(self, wrong: Sequence[str], together: Sequence[Sequence[str]] = ()) -> None:
        self.wrong, self.together = set(wrong), [set(group) for group in together]
        self.builds = 0

    def is_right(self, names: Sequence[str]) -> bool:
        self.builds += 1
        used = set(names)
        return not (used & self.wrong) and not any(group <= used for group in self.together)


@pytest.mark.parametrize("at", [0, 1, 29, 30, 59])
def test_one_wrong_schedule_of_sixty_takes_a_dozen_builds(at: int) -> None:
    model = Model([NAMES[at]])
    assert find_culprits(NAMES, model.is_right) == [(NAMES[at],)]
    # 60 halve six times, each half at most one build for either part; one before and one after.
    assert model.builds <= 2 + 2 * 6


def test_several_wrong_schedules_are_all_found() -> None:
    wrong = [NAMES[3], NAMES[4], NAMES[40]]
    assert sorted(find_culprits(NAMES, Model(wrong).is_right)) == [(name,) for name in wrong]
    assert sorted(find_culprits(NAMES[:5], Model(NAMES[:5]).is_right)) == [(name,) for name in NAMES[:5]]


def test_what_is_wrong_only_together_is_named_together() -> None:
    model = Model([], [[NAMES[0], NAMES[59]]])
    (group,) = find_culprits(NAMES, model.is_right)
    assert {NAMES[0], NAMES[59]} <= set(group)


def test_a_single_one_is_found_beside_a_group() -> None:
    model = Model([NAMES[7]], [[NAMES[0], NAMES[59]]])
    found = find_culprits(NAMES, model.is_right)
    assert (NAMES[7],) in found
    assert Model([NAMES[7]], [[NAMES[0], NAMES[59]]]).is_right([n for n in NAMES if not any(n in g for g in found)])


def test_nothing_is_found_where_all_is_right_after_all() -> None:
    model = Model([])
    assert find_culprits(NAMES, model.is_right) == []
    assert model.builds == 1
    assert find_culprits([], model.is_right) == []
