"""What graph-level layouts cost: the relay engine's untuned builds with several rules for channel blocks, raced.

    .venv/bin/python -m benchmarks.relay_layouts --models classifier,squeezenet

For each model: TVM's own layouts (each convolution packs as its fallback config says), NCHW without blocks, and
blocks of 4, 8, 16 and 32 channels that depend on a tensor's channels alone. Prints for each how many layout
transforms run in a call of the model, and its latency in a race; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.granularity_sources import named_model
from infra.settings import Settings

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Have a child in the engine's interpreter measure; print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default="classifier,squeezenet")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models.split(","):
            model = named_model(name, Path(folder))
            found = _measure(model.path, options)
            result[name] = found
            for rule, row in found.items():
                print(f"{name:12s} {rule:10s} {row['transforms']:3d} layout transforms {row['ms']:9.3f} ms")
    print(json.dumps(result))


def _measure(path: str, options: argparse.Namespace) -> dict[str, Any]:
    request = {"path": path, "rounds": options.rounds, "threads": options.threads}
    command = [Settings().python_of("relay"), "-m", "benchmarks.relay_layouts_child", json.dumps(request)]
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "TVM_NUM_THREADS": str(options.threads),
        "TVM_THREAD_POOL_SPIN_COUNT": "10000", "OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "PASSIVE",
    }  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"the relay engine's part ended with status {done.returncode}")
    rows: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for row in rows.values():
        row["ms"] = round(statistics.median(row.pop("samples_ms")), 4)
    return rows


if __name__ == "__main__":
    main()
