"""The experiment of TVM's RFC 64: does the best schedule of an operator stay the best in its subgraph?

    python -m benchmarks.granularity --engines relax,relay --candidates 32 --rounds 20 --models classifier,squeezenet

The same random candidates are timed alone and in their subgraph, taking turns, each many times. Half of the
rounds against the other half is the noise floor: how well a measurement ranks the candidates as its own
repetition does. Then whole models are tuned at an equal budget of trials by either granularity, and raced.

Results go to a state file as they come, and a later start goes on from there. Prints a table, writes
docs/granularity.md, and a line of JSON last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.granularity_report import analyse, last_line, page, table
from benchmarks.granularity_sources import KNOWN, named_model, source_of
from infra.settings import Settings
from tasks.engines.child import ChildOptions, EngineChild
from tasks.engines.interface import ExecutionRequest
from tasks.import_model import seeded_inputs
from tasks.racing import interleaved
from tasks.records import ModelFile

ROOT = Path(__file__).parent.parent
GRANULARITIES = ("operator", "subgraph")


def main() -> None:
    """Measure what is missing, then report."""
    options = _options()
    state = _load(options.state)
    state["settings"] = {
        name: getattr(options, name) for name in ("candidates", "rounds", "shapes", "trials", "threads", "seed")
    }
    with tempfile.TemporaryDirectory(prefix="tunewright-granularity-") as folder:
        models = {name: named_model(name, Path(folder)) for name in _names(options.models)}
        for engine in _names(options.engines):
            _measure_candidates(engine, options, models, state)
            for name, model in models.items():
                _tune_both(engine, (name, model), options, state)
    _report(options, state)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engines", default="relax,relay", help="relax, relay or both")
    parser.add_argument("--candidates", type=int, default=32, help="random candidates of each subgraph")
    parser.add_argument("--rounds", type=int, default=20, help="timings of each candidate in each of its two forms")
    parser.add_argument("--shapes", type=int, default=0, help="of the made convolutions only the first; 0: all seven")
    parser.add_argument("--models", default="classifier,squeezenet", help=f"of {', '.join(KNOWN)}; or none")
    parser.add_argument("--trials", type=int, default=512, help="search trials of a whole model, by either granularity")
    parser.add_argument("--minutes", type=float, default=600.0, help="time for the candidates of one engine")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=ROOT / ".cache" / "granularity.json", help="results so far")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "granularity.md")
    options = parser.parse_args()
    unknown = set(_names(options.engines)) - {"relax", "relay"} | set(_names(options.models)) - set(KNOWN)
    if unknown or options.candidates < 3 or options.rounds < 2:
        parser.error(f"unknown: {', '.join(sorted(unknown))}" if unknown else "at least 3 candidates and 2 rounds")
    return options


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name and name != "none"]


def _load(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    state.setdefault("cases", {})
    state.setdefault("models", {})
    return state


def _save(path: Path, state: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(state))
    temporary.replace(path)


def _measure_candidates(
    engine: str, options: argparse.Namespace, models: Mapping[str, ModelFile], state: dict[str, Any]
) -> None:
    """Run the engine's child, which measures the cases that are missing; each result is saved as it comes."""
    cases = state["cases"].setdefault(engine, {})
    request = {
        "engine": engine, "threads": options.threads, "candidates": options.candidates, "rounds": options.rounds,
        "shapes": options.shapes, "seed": options.seed, "minutes": options.minutes, "done": sorted(cases),
        "models": {name: model.path for name, model in models.items()},
    }  # fmt: skip
    python = Settings().python_of(engine)
    child = subprocess.Popen(
        [python, "-m", "benchmarks.granularity_child", json.dumps(request)], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, env=_environment(options.threads),
    )  # fmt: skip
    assert child.stdout is not None
    for line in child.stdout:
        result = json.loads(line)
        cases[result["case"]] = result
        _save(options.state, state)
        found = analyse(result)
        print(f"{engine}: {result['case']}: " + (found.line() if found else "too few candidates could be built"))
    if child.wait():
        sys.exit(f"the {engine} engine's part ended with status {child.returncode}; the same command goes on from here")


def _environment(threads: int) -> dict[str, str]:
    return {
        **os.environ, "PYTHONPATH": str(ROOT), "TVM_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE", "TVM_THREAD_POOL_SPIN_COUNT": "10000", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip


def _tune_both(engine: str, named: tuple[str, ModelFile], options: argparse.Namespace, state: dict[str, Any]) -> None:
    """Tune a model by either granularity with the same budget of trials, and race what came of it."""
    name, model = named
    done = state["models"].setdefault(engine, {})
    if name in done:
        return
    with tempfile.TemporaryDirectory(prefix="tunewright-granularity-") as folder:
        for granularity in GRANULARITIES:
            print(f"{engine}: tuning {name} by {granularity}, {options.trials} trials", flush=True)
            _tune(engine, name, granularity, (options, Path(folder)))
        samples = _race(engine, model, options, Path(folder))
    done[name] = {granularity: list(samples[granularity]) for granularity in GRANULARITIES}
    _save(options.state, state)


def _tune(engine: str, name: str, granularity: str, where: tuple[argparse.Namespace, Path]) -> None:
    options, folder = where
    path, shapes = source_of(name)
    command = [
        sys.executable, "-m", "flows.cli", "tune", str(path), "--engine", engine, "--granularity", granularity,
        "--trials", str(options.trials), "--seed", str(options.seed), "--name", f"{name}-{granularity}",
        "--out", str(folder / granularity),
    ]  # fmt: skip
    for input_name, sizes in shapes.items():
        command += ["--shape", f"{input_name}={','.join(map(str, sizes))}"]
    home = folder / f"home-{granularity}"  # of its own: neither may learn from the other
    environment = {
        **os.environ, "TUNEWRIGHT_HOME": str(home), "PREFECT_HOME": str(home / "prefect"),
        "TUNEWRIGHT_THREADS": str(options.threads),
    }  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, env=environment, stdout=sys.stderr)


def _race(engine: str, model: ModelFile, options: argparse.Namespace, folder: Path) -> dict[str, tuple[float, ...]]:
    """Milliseconds of both artifacts, taking turns."""
    inputs = folder / "inputs.npz"
    np.savez(inputs, allow_pickle=False, **seeded_inputs(model, options.seed))
    python = Settings().python_of(engine)
    with EngineChild(ChildOptions(engine, python, "cpu", f"cpu:0-{options.threads - 1}", options.threads)) as child:

        def contender(granularity: str) -> Any:
            return lambda repeats: (
                child.execute(ExecutionRequest(str(folder / granularity), str(inputs), repeats)).samples_ms
            )

        raced = interleaved({granularity: contender(granularity) for granularity in GRANULARITIES}, rounds=21)
    return {granularity: latency.samples_ms for granularity, latency in raced.items()}


def _report(options: argparse.Namespace, state: Mapping[str, Any]) -> None:
    print()
    for engine in state["cases"]:
        print(table(engine, state))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page(state))
    print(json.dumps(last_line(state)))


if __name__ == "__main__":
    main()
