"""How sessions are divided among agents: no candidate belongs to two sessions of a task that are out at once."""

from __future__ import annotations

import random

from tasks.records import MeasureSettings, Session
from tasks.tune import _free_slice
from tests.infra.sample_records import task


def session(index: int, count: int, number: int = 0) -> Session:
    """A search session that keeps to a slice."""
    return Session(
        "s", "r", "search", (task(number),), 16, 0, "", MeasureSettings(), "", slice_index=index, slice_count=count
    )


def test_slices_that_are_out_share_no_candidate_however_their_number_changes() -> None:
    dice = random.Random(0)
    for _ in range(300):
        out: list[Session] = []
        for _ in range(12):
            if out and dice.random() < 0.4:
                out.remove(dice.choice(out))
            count = dice.choice((1, 2, 4, 8))  # agents come and go meanwhile
            index = _free_slice("workload0", out, count)
            if index is not None:
                out.append(session(index, count))
            owners = [[s for s in out if key % s.slice_count == s.slice_index] for key in range(64)]
            assert max(map(len, owners)) <= 1


def test_all_slices_are_used_and_other_tasks_are_not_in_the_way() -> None:
    out = [session(0, 1, number=1)]
    for index in range(4):
        assert _free_slice("workload0", out, 4) == index
        out.append(session(index, 4))
    assert _free_slice("workload0", out, 4) is None
    assert _free_slice("workload0", out, 1) is None
    assert _free_slice("workload2", out, 1) == 0
