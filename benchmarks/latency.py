"""Tuned, untuned, onnxruntime and OpenVINO on the same threads, taking turns: ``make bench-latency`` (docs/latency.md).

Builds with the records in the store of --home, or with those of a file (--records). --minutes tunes each
model first. Prints one table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.latency_inside import Inside, look_inside
from benchmarks.latency_records import read_records, write_records
from benchmarks.packaged_model import packaged_model, packaged_shapes
from benchmarks.randomised_model import randomise
from infra.object_store import open_store
from infra.record_store import RecordStore
from tasks.engines.child import ChildOptions, EngineChild
from tasks.engines.interface import BuildRequest, ExecutionRequest, best_first, is_outdated
from tasks.engines.measuring.workshop import DEFAULT_KEY
from tasks.import_model import OnnxRuntimeModel, import_model_file, seeded_inputs
from tasks.model_source import fetch
from tasks.outputs import wrong_outputs
from tasks.racing import Contender, interleaved
from tasks.records import FusedModule, Latency, ModelFile, TuningRecord

ROOT = Path(__file__).parent.parent
#: The four that the goal is stated for, and three more.
MODELS = ("classifier", "recogniser", "squeezenet", "resnet50", "detector", "shufflenet", "densenet121")
GOAL_MODELS = MODELS[:4]
_OCR = ("classifier", "recogniser", "detector")
_CONTENDERS = ("tuned", "untuned", "onnxruntime", "openvino")
_SEED = 0
#: A small model's kernels are measured within minutes; the largest needs an hour and a half at most.
_TUNING_LIMIT_S = 6 * 3600


@dataclass(frozen=True)
class Result:
    """One model: milliseconds by contender, share of the machine's peak, largest error and what is out of tolerance.

    ``searched``: the share of its subgraphs that were built with a schedule that a search found.
    """

    latencies: Mapping[str, Latency]
    peak_share: float
    max_abs_error: float
    wrong: tuple[str, ...]
    searched: float
    inside: Inside

    @property
    def ratio(self) -> float:
        """Tuned over onnxruntime."""
        return self.latencies["tuned"].median_ms / self.latencies["onnxruntime"].median_ms


@dataclass(frozen=True)
class Bench:
    """The engine, its folder, and where records come from: those of ``stored``, else the store below ``home``."""

    engine: EngineChild
    folder: Path
    home: Path
    stored: Mapping[str, Sequence[TuningRecord]] | None
    threads: int
    rounds: int


def main() -> None:
    """Tune where asked for, then race all contenders of every model."""
    arguments = _arguments()
    threads = min(arguments.threads, len(os.sched_getaffinity(0)))
    home = arguments.home.absolute()
    stored = read_records(arguments.records) if arguments.records else None
    results: dict[str, Result] = {}
    used: list[TuningRecord] = []
    with tempfile.TemporaryDirectory(prefix="tunewright-latency-", ignore_cleanup_errors=True) as name:
        for model in arguments.models:
            if arguments.minutes:
                _tune(model, Path(name), home, arguments.minutes, threads)
            with EngineChild(ChildOptions("relax", sys.executable, "cpu", _device(threads), threads)) as engine:
                bench = Bench(engine, Path(name) / model, home, stored, threads, arguments.rounds)
                results[model] = _measure(model, bench, used)
            print(f"{model}: {results[model].ratio:.2f} of onnxruntime", file=sys.stderr)
    if arguments.export:
        write_records(arguments.export, used)
    _show(results, threads)
    print(json.dumps(_line(results)))
    if any(result.wrong for result in results.values()):
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Latency of tuned models against onnxruntime.")
    parser.add_argument("--models", default=",".join(MODELS), type=lambda text: text.split(","))
    parser.add_argument("--minutes", type=float, default=0.0, help="tune each model so long first")
    parser.add_argument("--rounds", type=int, default=15, help="samples of each contender")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--home", type=Path, default=ROOT / ".cache" / "latency", help="where tuning keeps its records")
    parser.add_argument("--records", type=Path, help="build with this file's records and nothing else")
    parser.add_argument("--export", type=Path, help="write the records that were built with")
    arguments = parser.parse_args()
    unknown = set(arguments.models) - set(MODELS)
    if unknown:
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    return arguments


def _device(threads: int) -> str:
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return f"cpu:{cores[0]}-{cores[-1]}"


def _model_path(name: str, folder: Path) -> Path:
    """The model's file; of a light one with weights of its own."""
    if name in _OCR:
        return packaged_model(name)
    path = folder / f"light_{name}.onnx"
    return path if path.exists() else randomise(packaged_model(name), path)


def _tune(name: str, folder: Path, home: Path, minutes: float, threads: int) -> None:
    """One ordinary run of the command, so that its records are in the store. Raises RuntimeError."""
    shapes = [f"{key}={','.join(map(str, shape))}" for key, shape in packaged_shapes(name).items()]
    command = [
        *(sys.executable, "-m", "flows.cli", "tune", str(_model_path(name, folder)), "--minutes", f"{minutes:g}"),
        *("--name", f"latency-{name}"),
        *[part for shape in shapes for part in ("--shape", shape)],
    ]
    environment = {
        **os.environ, "TUNEWRIGHT_HOME": str(home), "TUNEWRIGHT_STORE": str(home / "store"),
        "TUNEWRIGHT_THREADS": str(threads),
    }  # fmt: skip
    started = time.monotonic()
    done = subprocess.run(
        command, env=environment, cwd=ROOT, text=True, capture_output=True, check=False, timeout=_TUNING_LIMIT_S
    )
    if done.returncode != 0:
        raise RuntimeError(f"tuning {name}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
    print(f"{name}: tuned in {time.monotonic() - started:.0f} s: {done.stdout.splitlines()[-1]}", file=sys.stderr)


def _measure(name: str, bench: Bench, used: list[TuningRecord]) -> Result:
    """Build ``name`` with and without its records, compare the outputs, race. Adds to ``used`` what it was built of."""
    folder = bench.folder
    folder.mkdir(parents=True, exist_ok=True)
    model = import_model_file(
        fetch(str(_model_path(name, folder.parent)), folder), packaged_shapes(name), folder / "model"
    )
    fused = bench.engine.fuse(bench.engine.import_model(model), "subgraph")
    best = _best(bench, fused)
    used += [record for records in best.values() for record in records]
    built = {
        "tuned": bench.engine.build(BuildRequest(fused, best, str(folder / "tuned"), tuned=True)),
        "untuned": bench.engine.build(BuildRequest(fused, {}, str(folder / "untuned"), tuned=False)),
    }
    inputs_path = folder / "inputs.npz"
    np.savez(inputs_path, allow_pickle=False, **seeded_inputs(model, _SEED))
    error, wrong = _compare(bench, model, built["tuned"].path, inputs_path)
    latencies = interleaved(
        _contenders({key: artifact.path for key, artifact in built.items()}, bench, model, inputs_path), bench.rounds
    )
    peak_flops = _peak_flops(bench, built["tuned"].path, inputs_path)
    flops = sum(subgraph.flops * subgraph.weight for subgraph in fused.subgraphs)
    share = flops / latencies["tuned"].median_ms * 1e3 / peak_flops
    inside = look_inside(bench.engine, fused, built["tuned"], inputs_path, peak_flops)
    choices = built["tuned"].choices
    searched = sum(choice.candidate_key not in ("", DEFAULT_KEY) for choice in choices) / len(choices)
    return Result(latencies, share, error, wrong, searched, inside)


def _best(bench: Bench, fused: FusedModule) -> dict[str, tuple[TuningRecord, ...]]:
    """The fastest record of each workload."""
    info = fused.imported.engine
    keys = [subgraph.workload_key for subgraph in fused.subgraphs]
    if bench.stored is None:
        store = open_store(str(bench.home / "store"), None)
        stored: Mapping[str, Sequence[TuningRecord]] = RecordStore(
            store, info.engine, info.tvm_version, info.target.key
        ).load(keys)
    else:
        stored = bench.stored
    usable = {
        key: [r for r in stored.get(key, ()) if r.target_key == info.target.key and not is_outdated(r)] for key in keys
    }
    mine = {key: best_first(records) for key, records in usable.items()}
    return {key: records[:1] for key, records in mine.items() if records}


def _compare(bench: Bench, model: ModelFile, artifact: str, inputs_path: Path) -> tuple[float, tuple[str, ...]]:
    """The largest absolute error against onnxruntime, and what is out of tolerance."""
    path = bench.folder / "outputs.npz"
    bench.engine.execute(ExecutionRequest(artifact, str(inputs_path), 0, str(path)))
    expected = OnnxRuntimeModel(model, bench.threads).run(seeded_inputs(model, _SEED))
    with np.load(path) as stored:
        error, texts = wrong_outputs(expected, {name: stored[name] for name in stored.files})
    return error, tuple(texts)


def _contenders(
    artifacts: Mapping[str, str], bench: Bench, model: ModelFile, inputs_path: Path
) -> dict[str, Contender]:
    """Who runs: the artifacts, onnxruntime, and OpenVINO where it is installed."""

    def artifact(folder: str) -> Contender:
        return lambda repeats: bench.engine.execute(ExecutionRequest(folder, str(inputs_path), repeats)).samples_ms

    inputs = seeded_inputs(model, _SEED)
    session = OnnxRuntimeModel(model, bench.threads)
    found = {name: artifact(folder) for name, folder in artifacts.items()}
    found["onnxruntime"] = lambda repeats: session.time_ms(inputs, repeats)
    try:
        import openvino
    except ImportError:
        return found
    settings = {
        "INFERENCE_NUM_THREADS": bench.threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }  # fmt: skip
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model.path), "CPU", settings)
    request = compiled.create_infer_request()

    def openvino_runs(repeats: int) -> list[float]:
        samples_ms = []
        for _ in range(repeats):
            started = time.perf_counter()
            request.infer(inputs)
            samples_ms.append((time.perf_counter() - started) * 1e3)
        return samples_ms

    found["openvino"] = openvino_runs
    return found


def _peak_flops(bench: Bench, artifact: str, inputs_path: Path) -> float:
    """float32 FLOPs a second that this machine does at most on the threads, measured once a machine."""
    path = bench.folder.parent / "roof.json"
    if not path.exists():
        bench.engine.execute(ExecutionRequest(artifact, str(inputs_path), 1, roof_path=str(path)))
    return float(json.loads(path.read_text())["flops_per_s"])


def _show(results: Mapping[str, Result], threads: int) -> None:
    console = Console(highlight=False, width=150 if not sys.stdout.isatty() else None)
    table = Table("model", *(f"{name} ms" for name in _CONTENDERS), "ratio", "peak", "in kernels", "error", "searched")
    for name, result in results.items():
        cells = [_cell(result.latencies.get(contender)) for contender in _CONTENDERS]
        error = f"{result.max_abs_error:.1e}" + (" WRONG" if result.wrong else "")
        shares = (f"{result.peak_share:.0%}", f"{result.inside.kernel_share:.0%}")
        table.add_row(name, *cells, f"{result.ratio:.2f}", *shares, error, f"{result.searched:.0%}")
    console.print(table)
    heavy = Table("model", "heaviest subgraphs", "calls", "share of the run", "of peak")
    for name, result in results.items():
        for kernel in result.inside.heaviest:
            heavy.add_row(name, kernel.name, str(kernel.calls), f"{kernel.share:.0%}", f"{kernel.peak_share:.0%}")
    console.print(heavy)
    console.print(
        f"{threads} threads, batch 1; median (quartiles); ratio: tuned over onnxruntime; peak: of float32 FLOP/s"
    )


def _cell(latency: Latency | None) -> str:
    if latency is None:
        return "-"
    low, high = latency.spread_ms
    return f"{latency.median_ms:.2f} ({low:.2f}-{high:.2f})"


def _line(results: Mapping[str, Result]) -> dict[str, Any]:
    goal = [results[name].ratio for name in GOAL_MODELS if name in results]
    return {
        "geomean_vs_onnxruntime": round(math.exp(sum(map(math.log, goal)) / len(goal)), 4) if goal else None,
        "models": {
            name: {
                **{f"{contender}_ms": round(latency.median_ms, 3) for contender, latency in result.latencies.items()},
                "ratio": round(result.ratio, 4), "peak_share": round(result.peak_share, 4),
                "max_abs_error": float(f"{result.max_abs_error:.3g}"),
            }
            for name, result in results.items()
        },
    }  # fmt: skip


if __name__ == "__main__":
    main()
