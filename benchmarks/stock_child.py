"""Stock MetaSchedule in a process of its own, which imports TVM as every user's script does.

Started by stock_tuning.py: options as JSON on the command line, a request a line on stdin, a reply a
line on stdout. The first reply says how long the imports and the set-up took. Nothing of Tunewright
is imported here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

#: Its defaults of 30 s end every build: each batch starts workers that import TVM for most of a minute.
TIMEOUT_S = 300
BATCH = 16
#: The latency in seconds that TVM stores for a failed candidate is above this.
_FAILED_S = 1e9


def main() -> None:
    """Serve until stdin closes."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what TVM prints must not be taken for a reply
    options = json.loads(sys.argv[1])
    started = time.monotonic()
    import tvm
    import tvm.s_tir.tensor_intrin
    from tvm.s_tir import meta_schedule as ms

    imported = time.monotonic()
    threads = int(options["threads"])
    target = tvm.target.Target(options["target"])
    shared = {
        "builder": ms.builder.LocalBuilder(timeout_sec=TIMEOUT_S),
        "runner": ms.runner.LocalRunner(timeout_sec=TIMEOUT_S),
        "cost_model": ms.cost_model.CostModel.create("xgb", num_tuning_cores=threads, tree_method="auto"),
        "num_tuning_cores": threads,
        "num_trials_per_iter": BATCH,
    }
    replies.write(json.dumps({"import_s": imported - started, "setup_s": time.monotonic() - imported}) + "\n")
    for line in sys.stdin:
        replies.write(json.dumps(_tune(json.loads(line), target, shared)) + "\n")


def _tune(request: dict[str, Any], target: Any, shared: dict[str, Any]) -> dict[str, Any]:
    """Tune one workload with stock's search, its evolution and cost model as they come."""
    import tvm
    from tvm.s_tir import meta_schedule as ms

    mod = tvm.ir.load_json(Path(request["workload_path"]).read_text())
    folder = Path(request["work_dir"])
    folder.mkdir(parents=True)
    started = time.monotonic()
    ms.tune_tir(
        mod, target, str(folder), max_trials_global=request["trials"], seed=request["seed"], **shared
    )  # fmt: skip
    wall_s = time.monotonic() - started
    return {"wall_s": wall_s, "records": _records(folder / "database_tuning_record.json")}


def _records(path: Path) -> list[dict[str, Any]]:
    """What its database holds: each trace as JSON text with its latency in microseconds, None where it failed."""
    found = []
    for line in path.read_text().splitlines():
        _, (trace, run_secs, *_) = json.loads(line)
        seconds = [float(value) for value in run_secs or ()]
        valid = bool(seconds) and max(seconds) < _FAILED_S
        latency_us = sum(seconds) / len(seconds) * 1e6 if valid else None
        found.append({"trace": json.dumps(trace, separators=(",", ":")), "latency_us": latency_us})
    return found


if __name__ == "__main__":
    main()
