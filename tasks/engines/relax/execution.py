"""Runs artifacts in worker processes of their own, so that a crash is one worker's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tasks.engines.relax.loader import CompiledModel


def make_executor(options: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """A handler that runs the artifact in ``options["artifact_dir"]``, loaded once."""
    model = CompiledModel(options["artifact_dir"], options["device"])

    def execute(job: Mapping[str, Any]) -> list[float]:
        with np.load(job["inputs_path"]) as stored:
            inputs = {name: stored[name] for name in stored.files}
        if job.get("roof_path"):
            _write_roof(model, job["roof_path"])
        if job.get("profile_path"):
            from tasks.engines.relax.profiling import profile

            Path(job["profile_path"]).write_text(json.dumps(profile(model, inputs, job["repeats"])))
            return []
        if job["outputs_path"]:
            np.savez(job["outputs_path"], **model.run(inputs))
        return model.time_ms(inputs, job["repeats"])

    return execute


def _write_roof(model: CompiledModel, path: str) -> None:
    """How fast this machine is at most; nothing is written for a GPU."""
    target = model.manifest["target"]
    if target["kind"] != "llvm":
        return
    import tvm

    from tasks.engines.relax.roof import measure_roof

    compiled_for = tvm.target.Target(json.loads(target["spec"]))
    Path(path).write_text(json.dumps(measure_roof(compiled_for, int(model.manifest["threads"]))))
