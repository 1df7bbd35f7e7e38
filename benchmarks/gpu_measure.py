"""The real engine on the device: default schedules and candidates of a real model, then tuned against untuned."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.gpu_check import Place
from benchmarks.packaged_model import packaged_model, packaged_shapes
from tasks.engines.child import ChildOptions, EngineChild
from tasks.engines.interface import BuildRequest, ExecutionRequest, best_first
from tasks.engines.measuring.journal import read_journal
from tasks.engines.wire import to_line
from tasks.import_model import import_model_file, reference_outputs, seeded_inputs
from tasks.model_source import fetch
from tasks.records import FusedModule, MeasureSettings, ModelFile, Session, TuningRecord, TuningTask

_TASKS = 3
_TRIALS = 8
#: Every call finds cold caches: one call a repeat, the L2 overwritten before each.
_COLD = MeasureSettings(number=1, repeat=20, min_repeat_ms=0, flush_cache=True)
_WARM = MeasureSettings(repeat=10)
#: As verification has it for float32: docs/architecture.md.
_ABSOLUTE, _RELATIVE = 1e-4, 1e-3
_ROUNDS = 7


def measure(place: Place) -> dict[str, Any]:
    """Three tasks: default schedules with cold and with warm caches, candidates with cold ones."""
    with _engine(place) as engine:
        started = time.monotonic()
        info = engine.describe()
        start_s = time.monotonic() - started
        _, fused = _fused(engine, place)
        tasks = engine.extract(fused, str(place.scratch / "workloads"))[:_TASKS]
        tune = _Tuning(engine, place)
        cold = tune.run("cold", tasks, phase="default")
        warm = tune.run("warm", tasks, phase="default", settings=_WARM)
        searched = [tune.run(f"search{i}", [t], known=cold, trials=_TRIALS) for i, t in enumerate(tasks)]
        records = [*cold, *(record for found in searched for record in found)]
        (place.scratch / "records.jsonl").write_text("".join(to_line(record) for record in records))
        (place.out / "records.jsonl").write_text("".join(to_line(record) for record in [*records, *warm]))
    rows = [_row(task, cold, warm, found) for task, found in zip(tasks, searched, strict=True)]
    return {
        "ok": all(row["ok"] for row in rows), "target": info.target.key, "start_s": round(start_s, 1),
        "subgraphs": len(fused.subgraphs), "tasks": rows, "seconds_by_session": tune.seconds,
    }  # fmt: skip


def latency(place: Place) -> dict[str, Any]:
    """The whole model, tuned with what ``measure`` found and untuned, beside onnxruntime; outputs compared."""
    from tasks.racing import Contender, interleaved

    with _engine(place) as engine:
        model, fused = _fused(engine, place)
        path = place.scratch / "records.jsonl"
        known = list(read_journal(str(path))) if path.exists() else []
        folders, figures = {}, {}
        for name, best in (("untuned", {}), ("tuned", _best(known))):
            started = time.monotonic()
            folders[name] = engine.build(BuildRequest(fused, best, str(place.scratch / name), name == "tuned")).path
            figures[f"build_{name}_s"] = round(time.monotonic() - started, 1)
        inputs_path = place.scratch / "inputs.npz"
        np.savez(inputs_path, **seeded_inputs(model, 0))
        errors = {name: _error(engine, model, folder, place) for name, folder in folders.items()}
        contenders: dict[str, Contender] = {
            name: _artifact(engine, folder, str(inputs_path)) for name, folder in folders.items()
        }
        contenders |= _onnxruntimes(model)
        raced = interleaved(contenders, _ROUNDS)
    times = {name: {"ms": round(x.median_ms, 4), "quartiles": x.spread_ms} for name, x in raced.items()}
    return {
        "ok": all(error["within"] for error in errors.values()), "tuned_tasks": len(_best(known)),
        "errors": errors, "latency": times, **figures,
    }  # fmt: skip


class _Tuning:
    """Sessions on one engine, and what they took."""

    def __init__(self, engine: EngineChild, place: Place) -> None:
        self._engine, self._place = engine, place
        self.seconds: dict[str, dict[str, float]] = {}

    def run(
        self, name: str, tasks: Sequence[TuningTask], known: Sequence[TuningRecord] = (), **rest: Any
    ) -> list[TuningRecord]:
        """The session's records."""
        known_path = self._place.scratch / f"{name}-known.jsonl"
        known_path.write_text("".join(to_line(record) for record in known))
        session = Session(
            session_id=name, run_id="gpu-check", phase="search", tasks=tuple(tasks), trials=0, seed=3,
            reason="the check of a GPU", settings=_COLD, journal_path=str(self._place.scratch / f"{name}.jsonl"),
            known_path=str(known_path), first_trial=1,
        )  # fmt: skip
        found: list[TuningRecord] = []
        result = self._engine.tune(replace(session, **rest), found.append)
        self.seconds[name] = {what: round(seconds, 2) for what, seconds in result.seconds.items()}
        print(f"{name}: {result}", flush=True)
        return found


def _engine(place: Place) -> EngineChild:
    threads = len(os.sched_getaffinity(0))
    return EngineChild(ChildOptions("relax", sys.executable, place.target, place.device, threads, step_timeout_s=200.0))


def _fused(engine: EngineChild, place: Place) -> tuple[ModelFile, FusedModule]:
    name = "classifier"
    try:
        path = packaged_model(name)
    except FileNotFoundError:  # an environment without the package of the PP-OCR models
        name = "squeezenet"
        path = packaged_model(name)
    model = import_model_file(fetch(str(path), place.scratch), packaged_shapes(name), place.scratch)
    return model, engine.fuse(engine.import_model(model), "subgraph")


def _row(
    task: TuningTask, cold: Sequence[TuningRecord], warm: Sequence[TuningRecord], searched: Sequence[TuningRecord]
) -> dict[str, Any]:
    """One task's figures, in microseconds; spread is the range of the repeats over their median."""
    mine = {name: next((r for r in records if r.workload_key == task.workload_key), None)
            for name, records in (("cold", cold), ("warm", warm))}  # fmt: skip
    valid = best_first(searched)
    failures: dict[str, int] = {}
    for record in searched:
        if record.failure:
            failures[record.failure.kind] = failures.get(record.failure.kind, 0) + 1
    default = mine["cold"]
    return {
        "ok": default is not None and default.latency_us is not None and bool(valid), "task": task.name,
        "mflop": round(task.flops / 1e6, 2), "default_us": default and default.latency_us,
        "default_spread": default and _spread(default), "default_failure": _failure(default),
        "warm_us": mine["warm"] and mine["warm"].latency_us, "warm_spread": mine["warm"] and _spread(mine["warm"]),
        "best_us": valid[0].latency_us if valid else None, "best_spread": _spread(valid[0]) if valid else None,
        "trials": len(searched), "failures": failures,
        "first_failure": next((f for record in searched if (f := _failure(record))), ""),
    }  # fmt: skip


def _spread(record: TuningRecord) -> float | None:
    if record.measurement is None or not record.latency_us:
        return None
    us = record.measurement.latencies_us
    return round((max(us) - min(us)) / record.latency_us, 3)


def _failure(record: TuningRecord | None) -> str:
    return f"{record.failure.kind}: {record.failure.message}"[:300] if record and record.failure else ""


def _best(known: Sequence[TuningRecord]) -> dict[str, tuple[TuningRecord, ...]]:
    keys = {record.workload_key for record in known}
    ranked = {key: best_first([r for r in known if r.workload_key == key]) for key in keys}
    return {key: tuple(found) for key, found in ranked.items() if found}


def _artifact(engine: EngineChild, folder: str, inputs_path: str) -> Callable[[int], Sequence[float]]:
    return lambda repeats: engine.execute(ExecutionRequest(folder, inputs_path, repeats)).samples_ms


def _error(engine: EngineChild, model: ModelFile, folder: str, place: Place) -> dict[str, Any]:
    """The largest difference from onnxruntime's output, and whether verification would let it pass."""
    inputs_path, outputs_path = place.scratch / "inputs.npz", place.scratch / "outputs.npz"
    engine.execute(ExecutionRequest(folder, str(inputs_path), 0, str(outputs_path)))
    expected = reference_outputs(model, seeded_inputs(model, 0), 2)
    worst, within = 0.0, True
    with np.load(outputs_path) as stored:
        for name, want in expected.items():
            difference = np.abs(stored[name].astype(np.float64) - want)
            worst = max(worst, float(difference.max(initial=0.0)))
            within = within and bool((difference <= _ABSOLUTE + _RELATIVE * np.abs(want)).all())
    return {"within": within, "max_abs": worst}


def _onnxruntimes(model: ModelFile) -> dict[str, Callable[[int], Sequence[float]]]:
    """onnxruntime on the CPU, and with its CUDA provider where that is installed."""
    import onnxruntime

    providers = ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        providers.append("CUDAExecutionProvider")
    inputs = seeded_inputs(model, 0)
    found = {}
    for provider in providers:
        session = onnxruntime.InferenceSession(model.original_path, providers=[provider])
        name = f"onnxruntime_{provider.removesuffix('ExecutionProvider').lower()}"
        # A provider that cannot be loaded is replaced by the CPU's without an error.
        if session.get_providers()[0] == provider:
            found[name] = _session(session, inputs)
    return found


def _session(session: Any, inputs: dict[str, Any]) -> Callable[[int], Sequence[float]]:
    def run(repeats: int) -> list[float]:
        samples = []
        for _ in range(repeats):
            started = time.perf_counter()
            session.run(None, inputs)
            samples.append((time.perf_counter() - started) * 1e3)
        return samples

    return run
