"""Starts a search from the best schedules of similar workloads.

MetaSchedule reads a database by workload: what was found for one shape says nothing of the next. But a
schedule is a list of decisions (tile sizes, unrolling, where to compute) over a sketch, and sketches of
like subgraphs ask for the same decisions in the same order. The decisions of a donor are put into the
new workload's sketch, tile sizes rounded to the divisors of its own extents.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.s_tir import Schedule
from tvm.s_tir.schedule.trace import Trace

#: Instructions that make two sketches ask for the same decisions.
_SHAPING = frozenset(
    {"SamplePerfectTile", "SampleCategorical", "SampleComputeLocation", "CacheWrite", "CacheRead",
     "ReverseComputeAt", "RFactor", "Reorder"}
)  # fmt: skip
_POSTPROC = "EnterPostproc"

Instructions = list[list[Any]]
Decisions = dict[int, Any]


@dataclass(frozen=True)
class Sketch:
    """A trace without its postprocessing: instructions, and the decision of each sampling one by its index."""

    instructions: Instructions
    decisions: Decisions

    @property
    def shape(self) -> tuple[str, ...]:
        """What a donor must have in common with a sketch."""
        return tuple(_named(instruction) for instruction in self.instructions if instruction[0] in _SHAPING)

    @property
    def extents(self) -> tuple[int, ...]:
        """The extents of the tiled loops, in order."""
        return tuple(
            math.prod(self.decisions[index])
            for index, instruction in enumerate(self.instructions)
            if instruction[0] == "SamplePerfectTile" and index in self.decisions
        )


def sketch_of(trace: str) -> Sketch:
    """The sketch behind a trace in JSON. Raises ValueError where it is none."""
    instructions, decisions = json.loads(trace)
    kinds = [instruction[0] for instruction in instructions]
    end = kinds.index(_POSTPROC) if _POSTPROC in kinds else len(kinds)
    return Sketch(instructions[:end], {index: decision for index, decision in decisions if index < end})


def most_alike(sketches: Sequence[Sketch], donors: Iterable[Sketch], count: int) -> list[tuple[Sketch, Sketch]]:
    """Up to ``count`` pairs of a sketch and a donor with its shape, the nearest extents first."""
    by_shape = {sketch.shape: sketch for sketch in sketches}
    pairs = [(by_shape[donor.shape], donor) for donor in donors if donor.shape in by_shape]
    pairs.sort(key=lambda pair: _distance(pair[0].extents, pair[1].extents))
    return pairs[:count]


def transplant(sketch: Sketch, donor: Sketch) -> str:
    """``sketch`` with the decisions of ``donor``, which has its shape; a trace in JSON."""
    given = iter([donor.decisions.get(i) for i, made in enumerate(donor.instructions) if _is_sampling(made)])
    decisions = []
    for index, instruction in enumerate(sketch.instructions):
        if not _is_sampling(instruction):
            continue
        own, decision = sketch.decisions.get(index), next(given)
        if decision is None or own is None:
            decision = own
        elif instruction[0] == "SamplePerfectTile":
            decision = fitted_tile(decision, math.prod(own), most_innermost=instruction[2][1])
        if decision is not None:
            decisions.append([index, decision])
    return json.dumps([sketch.instructions, decisions], separators=(",", ":"))


def fitted_tile(factors: Sequence[int], extent: int, most_innermost: int) -> list[int]:
    """Factors of ``extent`` near ``factors``: the inner ones are fitted first, the outermost takes the rest."""
    fitted: list[int] = []
    rest = extent
    for place, factor in enumerate(reversed(factors[1:])):
        limit = most_innermost if place == 0 and most_innermost > 0 else rest
        divisors = [n for n in range(1, min(rest, limit) + 1) if rest % n == 0]
        chosen = min(divisors, key=lambda n: (abs(math.log(n / factor)), -n))
        fitted.append(chosen)
        rest //= chosen
    return [rest, *reversed(fitted)]


def scheduled(mod: Any, trace: str, postprocs: Sequence[Any]) -> Any | None:
    """``mod`` scheduled by a transplanted trace and postprocessed; None where the decisions do not hold for it."""
    schedule = Schedule(mod, debug_mask="none")
    try:
        Trace.apply_json_to_schedule(json.loads(trace), schedule)
        schedule.enter_postproc()
        return schedule if all(postproc.apply(schedule) for postproc in postprocs) else None
    except Exception:
        # TVM raises what it likes here; a schedule that does not fit is one that is not tried.
        return None


def _is_sampling(instruction: Sequence[Any]) -> bool:
    return str(instruction[0]).startswith("Sample")


def _named(instruction: Sequence[Any]) -> str:
    """The kind, with the number of tiles where it has one."""
    return f"{instruction[0]}{instruction[2][0]}" if instruction[0] == "SamplePerfectTile" else str(instruction[0])


def _distance(ours: Sequence[int], theirs: Sequence[int]) -> float:
    return sum(abs(math.log(a / b)) for a, b in zip(ours, theirs, strict=True))
