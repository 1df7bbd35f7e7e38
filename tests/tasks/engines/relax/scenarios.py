"""Real kernels through the real builder and runner, in a fresh interpreter; tvm is imported in it alone."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks.engines.measuring.pipeline import Job, Outcome, Pipeline, Placement
from tasks.engines.measuring.workshop import kernel_symbol
from tasks.engines.measuring.zygote import Zygote
from tasks.records import MeasureSettings


def measure_kernels(names: list[str], folder: str, settings: dict[str, Any]) -> Any:
    """Each kernel of ``names`` as a candidate whose reference is the kernel ``double``; outcomes in order."""
    from tasks.engines.relax.bootstrap import import_tvm

    import_tvm("llvm")
    import tvm

    from tasks.engines.relax import candidates, targets
    from tests.tasks.engines.relax import kernels

    zygote = Zygote({"build": candidates.make_builder, "run": candidates.make_runner})
    limits = MeasureSettings(**{"repeat": 2, "min_repeat_ms": 1, **settings})
    cores = tuple(sorted(os.sched_getaffinity(0)))
    line = Pipeline(zygote, Placement(1, cores, cores), limits, "cpu")
    target = targets.resolve("cpu", len(cores)).spec

    def build(name: str, stem: str) -> dict[str, Any]:
        mod = tvm.ir.save_json(kernels.named(name))
        return {"mod": mod, "symbol": kernel_symbol("w"), "target": target, "stem": str(Path(folder) / stem)}

    outcomes: list[Outcome] = []
    line.measure([Job("reference", build("double", "reference"), {})], lambda _: None, outcomes.append)
    assert outcomes[0].path, outcomes[0].failure
    run = {
        "workload": "w", "args": [[[4096], "float32"]] * 2, "outputs": 1, "settings": asdict(limits),
        "best_us": 0.0, "reference": outcomes.pop().path,
    }  # fmt: skip
    jobs = [Job(f"{index}", build(name, f"{index}"), run) for index, name in enumerate(names)]
    line.measure(jobs, lambda _: None, outcomes.append)
    line.close()
    zygote.close()
    return [[name, asdict(outcome)] for name, outcome in zip(names, outcomes, strict=True)]
