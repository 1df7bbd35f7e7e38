"""Broken candidates on a device, each between two good ones, and builds that go on while the device measures."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from benchmarks.gpu_check import Place
from tasks.engines.measuring.pipeline import Job, Outcome, Pipeline, Placement
from tasks.engines.measuring.workshop import kernel_symbol
from tasks.engines.measuring.zygote import Zygote
from tasks.records import MeasureSettings

#: A broken kernel, and how it must end.
_FAULTS = {"wild": "run", "endless": "run_timeout", "wrong": "wrong_output"}
_RUN_LIMIT_S = 5.0
#: Kernels to build and time at once. Few builders, so that builds are left when the first kernel is timed.
_CHAINS = 16
_MOST_BUILDERS = 4


def faults(place: Place) -> dict[str, Any]:
    """An illegal address, a kernel without end, a wrong one: each costs itself, and the next is measured."""
    names = ["double", *(name for fault in _FAULTS for name in (fault, "double"))]
    settings = MeasureSettings(repeat=3, min_repeat_ms=2, run_timeout_s=_RUN_LIMIT_S)
    with _bench(place, settings) as bench:
        outcomes, at = bench.measure(names)
    rows, ok = [], True
    for index, (name, outcome) in enumerate(zip(names, outcomes, strict=True)):
        kind = outcome.failure.kind if outcome.failure else "measured"
        good = kind == _FAULTS.get(name, "measured")
        ok = ok and good
        since_s = at[index] - at[index - 1] if index else 0.0
        says = outcome.failure.message[:200] if outcome.failure else f"{min(outcome.latencies_us):.2f} us"
        rows.append({"kernel": name, "kind": kind, "as_expected": good, "after_s": round(since_s, 2), "says": says})
    sticky = "illegal" in rows[1]["says"].lower()
    return {"ok": ok and (sticky or not place.on_gpu), "sticky_error": sticky, "outcomes": rows}


def overlap(place: Place) -> dict[str, Any]:
    """While the device measures, builders work: the pipeline's windows say so."""
    settings = MeasureSettings(repeat=5, min_repeat_ms=20, check_output=False)
    with _bench(place, settings) as bench:
        started = time.monotonic()
        outcomes, _ = bench.measure([f"chain{8 * (1 + index)}" for index in range(_CHAINS)])
        wall_s = time.monotonic() - started
        windows = bench.line.windows
    pairs = sum(b[0] < r[1] and r[0] < b[1] for b in windows.builds for r in windows.runs)
    failed = [outcome.failure.message for outcome in outcomes if outcome.failure]
    return {
        "ok": pairs > 0 and not failed, "overlapping_pairs": pairs, "builds": len(windows.builds),
        "runs": len(windows.runs), "wall_s": round(wall_s, 2), "failed": failed[:3],
        "build_s": round(sum(end - start for start, end in windows.builds), 2),
        "run_s": round(sum(end - start for start, end in windows.runs), 2),
    }  # fmt: skip


class _Bench:
    """The real builder, runner and pipeline, on kernels by name."""

    def __init__(self, place: Place, line: Pipeline, target: str, settings: MeasureSettings) -> None:
        self._place, self._target, self._settings = place, target, settings
        self.line = line

    def measure(self, names: Sequence[str]) -> tuple[list[Outcome], list[float]]:
        """Build and time the kernels; outcomes in the order of ``names``, and when each came."""
        reference = self._build_only("double") if self._settings.check_output else ""
        run = {
            "workload": "w", "args": [[[4096], "float32"]] * 2, "outputs": 1, "best_us": 0.0,
            "settings": asdict(self._settings), "reference": reference,
        }  # fmt: skip
        found: dict[str, tuple[Outcome, float]] = {}
        # One at a time where the order matters: with several builders the first to be built is the first to run.
        batches = [list(enumerate(names))]
        if self._settings.check_output:
            batches = [[pair] for pair in enumerate(names)]
        for batch in batches:
            jobs = [Job(str(i), self._job(name, str(i)), run) for i, name in batch]
            self.line.measure(jobs, _nothing, lambda o: found.__setitem__(o.key, (o, time.monotonic())))
        ordered = [found[str(index)] for index in range(len(names))]
        return [outcome for outcome, _ in ordered], [at for _, at in ordered]

    def _build_only(self, name: str) -> str:
        built: list[Outcome] = []
        self.line.measure([Job("reference", self._job(name, "reference"), {})], _nothing, built.append)
        if built[0].failure:
            raise RuntimeError(f"the reference cannot be built: {built[0].failure.message}")
        return built[0].path

    def _job(self, name: str, stem: str) -> dict[str, Any]:
        import tvm

        from benchmarks import gpu_kernels

        gpu = self._place.on_gpu
        mod = gpu_kernels.chain(int(name[5:]), gpu) if name.startswith("chain") else gpu_kernels.named(name, gpu)
        stem = str(self._place.scratch / f"kernel-{stem}")
        return {"mod": tvm.ir.save_json(mod), "symbol": kernel_symbol("w"), "target": self._target, "stem": stem}


@contextmanager
def _bench(place: Place, settings: MeasureSettings) -> Iterator[_Bench]:
    """As in an engine: TVM is imported, the zygote forked while there are no threads, then the target is asked for."""
    from tasks.engines.relax.bootstrap import import_tvm

    import_tvm("cuda" if place.on_gpu else "llvm")
    from tasks.engines.relax import candidates, targets

    zygote = Zygote({"build": candidates.make_builder, "run": candidates.make_runner})
    cores = tuple(sorted(os.sched_getaffinity(0)))
    placement = Placement(min(_MOST_BUILDERS, max(1, len(cores) - 1)), cores, ())
    line = Pipeline(zygote, placement, settings, place.device if place.on_gpu else "cpu")
    try:
        yield _Bench(place, line, targets.resolve(place.target, len(cores)).spec, settings)
    finally:
        line.close()
        zygote.close()


def _nothing(_: str) -> None:
    """Nobody needs to hear when a kernel starts."""
