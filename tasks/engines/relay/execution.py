"""Runs artifacts in worker processes of their own, so that a crash is one worker's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tasks.engines.relay.loader import CompiledModel


def make_executor(options: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """A handler that runs the artifact in ``options["artifact_dir"]``, loaded once."""
    model = CompiledModel(options["artifact_dir"], options["device"])

    def execute(job: Mapping[str, Any]) -> list[float]:
        with np.load(job["inputs_path"]) as stored:
            inputs = {name: stored[name] for name in stored.files}
        if job.get("profile_path"):
            return []  # the graph executor of these TVMs tells nothing of single kernels
        if job["outputs_path"]:
            np.savez(job["outputs_path"], **model.run(inputs))
        return model.time_ms(inputs, job["repeats"])

    return execute
