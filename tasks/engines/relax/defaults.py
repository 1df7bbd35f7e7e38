"""The default schedule of a kernel on a CPU: what is built untuned, and what every candidate is compared with."""

from __future__ import annotations

import contextlib
import math
from typing import Any

from tvm.s_tir import Schedule
from tvm.target import Target

from tasks.engines.relax import spaces

#: A loop along the last axis that is at least so long is better than one along the reduction.
_WORTH_A_LOOP = 4


def cpu_default(mod: Any, target: Target) -> Any:
    """``mod`` scheduled without any search: tiles in registers, else cores and vectors; as it stands if need be."""
    sketch = spaces.best_guess(mod, target)
    if sketch is not None:
        return sketch.mod
    schedule = Schedule(mod, debug_mask="none")
    try:
        _inline(schedule)
        blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    except Exception:
        return mod
    for block in blocks:
        with contextlib.suppress(Exception):  # what TVM refuses stays as it stands
            _spread(schedule, block, spaces.lanes_of(target))
    return schedule.mod


def _inline(schedule: Schedule) -> None:
    """Compute cheap elementwise blocks where they are used."""
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        readers = schedule.get_consumers(block)
        # What a reduction and others read is computed once and kept: softmax's exponentials.
        shared = len(readers) > 1 and any(spaces.is_reduction(schedule, reader) for reader in readers)
        if not spaces.is_reduction(schedule, block) and not shared:
            with contextlib.suppress(Exception):  # TVM refuses an output
                schedule.compute_inline(block)


def _spread(schedule: Schedule, block: Any, lanes: int) -> None:
    """The outer loops on all cores where there is enough to do, the last spatial one in vectors."""
    spatial, reduction = spaces.loops_by_kind(schedule, block)
    if len(spatial) + len(reduction) != len(schedule.get_loops(block)) or not spatial:
        return
    sizes = [spaces.extent(schedule, loop) for loop in (*spatial, *reduction)]
    *outer, last = spatial
    lane, split = None, False
    if sizes[len(spatial) - 1] % lanes == 0:
        rest, lane = schedule.split(last, [None, lanes])
        schedule.reorder(*outer, rest, *reduction, lane)
        outer.append(rest)
        split = True
    elif reduction and outer and sizes[len(spatial) - 1] >= _WORTH_A_LOOP:
        # Along the last axis lies what is read and written; of a plain loop LLVM makes vectors and a rest.
        schedule.reorder(*outer, *reduction, last)
        split = True
    elif reduction or not outer:
        outer.append(last)  # otherwise a plain loop along the last axis, of which LLVM makes vectors
    if outer and math.prod(sizes) >= spaces.WORTH_SHARING:
        schedule.parallel(schedule.fuse(*outer))
    if lane is not None:
        schedule.vectorize(lane)
    if reduction and split:
        # Last: TVM vectorizes no loop of a block without its initialisation.
        schedule.decompose_reduction(block, reduction[0])
