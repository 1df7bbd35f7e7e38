"""Measures the same candidates as single operators and in their subgraphs: one engine, in its own interpreter.

    <engine's python> -m benchmarks.granularity_child '{"engine": "relay", ...}'

One JSON line a case on stdout. Python 3.10; started by granularity.py, with this project on its path.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.engines.measuring.pipeline import Job, Outcome, Pipeline, Placement
from tasks.engines.measuring.workshop import build_job, built_object
from tasks.engines.measuring.zygote import Zygote
from tasks.records import MeasureSettings

#: Timings of one candidate in one round: many short rounds, since a slow minute must hit all alike.
TIMING = MeasureSettings(number=1, repeat=1, min_repeat_ms=10, check_output=False, hopeless_ratio=1e9)


@dataclass(frozen=True)
class Case:
    """A subgraph and its anchor operator alone, by the engine's own workload keys."""

    name: str
    subgraph: str
    anchor: str


@dataclass(frozen=True)
class Form:
    """A candidate in one of its two forms: what a builder compiles, and the kernel's arguments."""

    workload: str
    part: Mapping[str, Any]
    args: Sequence[tuple[tuple[int, ...], str]]


class Driver:
    """What the engines differ in. Made in the engine's interpreter."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def cases(self) -> list[Case]:
        """The subgraphs that are measured."""
        raise NotImplementedError

    def candidates(self, case: Case, count: int, seed: int) -> list[tuple[Form, Form]]:
        """Random candidates of the anchor's space, each alone and in the subgraph."""
        raise NotImplementedError


def main() -> None:
    """Measure every case that is not done yet."""
    options = json.loads(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    driver, zygote = _start(options)
    threads = int(options["threads"])
    cores = tuple(sorted(os.sched_getaffinity(0)))[:threads]
    pipeline = Pipeline(zygote, Placement(len(cores), cores, cores), TIMING, "cpu")
    deadline = time.monotonic() + float(options["minutes"]) * 60
    with tempfile.TemporaryDirectory(prefix="tunewright-granularity-") as scratch:
        for case in driver.cases():
            if case.name in options["done"]:
                continue
            if time.monotonic() > deadline:
                break
            result = measure(driver, case, pipeline, (Path(scratch), options))
            replies.write(json.dumps(result) + "\n")
    pipeline.close()
    zygote.close()


def _start(options: Mapping[str, Any]) -> tuple[Driver, Zygote]:
    """The engine's driver and a fork server, forked while there are no threads."""
    if options["engine"] == "relay":
        from tasks.engines.relay.bootstrap import import_tvm

        import_tvm()
        from benchmarks.granularity_relay import RelayDriver as Made
        from tasks.engines.relay import candidates
    else:
        from tasks.engines.relax.bootstrap import import_tvm as import_relax

        import_relax("llvm")
        from benchmarks.granularity_relax import RelaxDriver as Made  # type: ignore[assignment]
        from tasks.engines.relax import candidates  # type: ignore[no-redef]
    zygote = Zygote({"build": candidates.make_builder, "run": candidates.make_runner})
    return Made(options), zygote


def measure(driver: Driver, case: Case, pipeline: Pipeline, where: tuple[Path, Mapping[str, Any]]) -> dict[str, Any]:
    """Both forms of every candidate, in rounds: microseconds by candidate and round, None where a build failed."""
    scratch, options = where
    pairs = driver.candidates(case, int(options["candidates"]), int(options["seed"]))
    jobs = {}
    for index, pair in enumerate(pairs):
        for form, name in zip(pair, ("alone", "fused")):  # noqa: B905 - engines may run on Python 3.9
            jobs[f"{name}-{index}"] = (form, build_job(form.part, scratch, form.workload, f"{name}-{index}"))
    failed: list[str] = []
    pipeline.measure([Job(key, build, {}) for key, (_, build) in jobs.items()], _ignore, _note_failures(failed))
    usable = [i for i in range(len(pairs)) if not {f"alone-{i}", f"fused-{i}"} & set(failed)]
    times: dict[str, list[float]] = {f"{name}-{i}": [] for i in usable for name in ("alone", "fused")}
    shuffle = random.Random(options["seed"])
    for _ in range(int(options["rounds"])):
        order = list(usable)
        shuffle.shuffle(order)
        # All of one form, then all of the other: changing the workload allocates its arguments anew.
        for name in ("alone", "fused"):
            runs = [_timing(jobs[f"{name}-{i}"][0], scratch, f"{name}-{i}") for i in order]
            pipeline.measure(runs, _ignore, _note_times(times))
    for path in scratch.iterdir():
        path.unlink()
    rounds = int(options["rounds"])
    whole = [i for i in usable if all(len(times[f"{name}-{i}"]) == rounds for name in ("alone", "fused"))]
    return {
        "case": case.name, "candidates": len(pairs), "failed": len(pairs) - len(whole),
        "alone": [times[f"alone-{i}"] for i in whole], "fused": [times[f"fused-{i}"] for i in whole],
    }  # fmt: skip


def _timing(form: Form, scratch: Path, key: str) -> Job:
    run = {
        "workload": form.workload, "args": [[list(shape), dtype] for shape, dtype in form.args], "outputs": 1,
        "settings": asdict(TIMING), "best_us": 0.0, "reference": "",
        "path": built_object(scratch, form.workload, key),
    }  # fmt: skip
    return Job(key, {}, run, keep=True)


def _note_failures(failed: list[str]) -> Callable[[Outcome], None]:
    def note(outcome: Outcome) -> None:
        if outcome.failure is not None:
            failed.append(outcome.key)

    return note


def _note_times(times: dict[str, list[float]]) -> Callable[[Outcome], None]:
    def note(outcome: Outcome) -> None:
        if outcome.failure is None:
            times[outcome.key].append(outcome.latencies_us[0])

    return note


def _ignore(_: Any) -> None:
    """For what nobody needs to hear."""


#: Convolutions of the two kinds: input channels, output channels, size of the image, kernel.
SHAPES = (
    (64, 64, 56, 3), (64, 256, 56, 1), (128, 128, 28, 3), (256, 64, 56, 1), (256, 256, 14, 3), (512, 128, 28, 1),
    (32, 64, 112, 1),
)  # fmt: skip


def named_shapes(kind: str) -> Iterator[tuple[str, tuple[int, int, int, int]]]:
    """Each shape with a name for its case."""
    for cin, cout, size, kernel in SHAPES:
        yield f"{kind} {kernel}x{kernel} {cin}>{cout} {size}x{size}", (cin, cout, size, kernel)


if __name__ == "__main__":
    main()
