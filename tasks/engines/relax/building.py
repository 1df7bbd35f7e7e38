"""Builds the artifact: each subgraph with its best schedule, the whole as one library and a manifest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import relax
from tvm.relax.backend.cpu_generic import pipeline as generic_pipeline
from tvm.s_tir import Schedule
from tvm.s_tir.meta_schedule.trace_apply import schedule_using_anchor_trace

from tasks.engines.interface import BuildRequest
from tasks.engines.relax import loader
from tasks.engines.relax.search import default_schedule, replay
from tasks.engines.relax.subgraphs import as_workload, prim_funcs, structural_key
from tasks.engines.wire import to_plain
from tasks.errors import EngineError
from tasks.records import Artifact, FusedSubgraph, SubgraphChoice, TuningRecord

MANIFEST_VERSION = 1


@dataclass(frozen=True)
class Material:
    """What is compiled: the module after fusion, its workloads by key, the TVM target."""

    lowered: Any
    workloads: Mapping[str, Any]
    target: Any


def build(request: BuildRequest, material: Material) -> Artifact:
    """Compile the fused module into ``request.out_dir``. Raises EngineError."""
    target = material.target
    replaced, choices = _schedule_kernels(request, material)
    executable = _compile(replaced, target)
    out = Path(request.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    executable.export_library(str(out / "model.so"))
    shutil.copyfile(str(loader.__file__), out / "loader.py")
    manifest = _manifest(request, choices)
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    digest = _digest(out)
    size = sum(path.stat().st_size for path in out.iterdir())
    return Artifact(str(out), digest, size, request.tuned, choices)


def _schedule_kernels(request: BuildRequest, material: Material) -> tuple[Any, tuple[SubgraphChoice, ...]]:
    """The module with every kernel scheduled, and which record each subgraph got."""
    by_key = {subgraph.workload_key: subgraph for subgraph in request.fused.subgraphs}
    choices: dict[str, SubgraphChoice] = {}
    scheduled: dict[str, Any] = {}
    mod = tvm.IRModule(dict(material.lowered.functions_items()), attrs=material.lowered.attrs)
    for name, func in prim_funcs(mod).items():
        workload = as_workload(func)
        key = structural_key(workload)
        subgraph = by_key.get(key)
        if subgraph is None:
            continue  # nothing calls it
        if key not in scheduled:
            scheduled[key], choices[key] = _schedule_one(request, material, subgraph)
        # The function keeps its own name and linkage; only its body is the scheduled one.
        mod.update_func(mod.get_global_var(name), scheduled[key].with_attr("global_symbol", name))
    return mod, tuple(choices.values())


def _schedule_one(request: BuildRequest, material: Material, subgraph: FusedSubgraph) -> tuple[Any, SubgraphChoice]:
    """The fastest record that still replays, else the default schedule; with what became of the choice."""
    key = subgraph.workload_key
    tuned_key = subgraph.anchor_key if request.fused.granularity == "operator" else key
    workload, notes = material.workloads[key], []
    default = default_schedule(workload, material.target)["main"]
    for record in request.best.get(tuned_key, ()):
        chosen = SubgraphChoice(subgraph.name, key, record.record_id, record.candidate_key, record.latency_us)
        if not record.schedule:
            note = "the default schedule is the fastest measured"
            return default, dataclasses.replace(chosen, note=note)
        try:
            scheduled = _replay(record, key, tuned_key, material)
        except Exception as error:
            notes.append(f"record {record.record_id} does not replay ({type(error).__name__})")
            continue
        return scheduled, dataclasses.replace(chosen, note="; ".join(notes))
    return default, SubgraphChoice(subgraph.name, key, "", "", None, "; ".join(notes))


def _replay(record: TuningRecord, key: str, tuned_key: str, material: Material) -> Any:
    """The subgraph ``key`` scheduled as ``record`` says, which was measured on ``tuned_key``."""
    tuned = replay(material.workloads[tuned_key], record.schedule)
    if tuned_key == key:
        return tuned.mod["main"]
    # Tuned on the anchor operator alone: its trace is applied to the block it has in common with
    # the subgraph, the operators around it are inlined.
    schedule = Schedule(material.workloads[key])
    schedule_using_anchor_trace(schedule, tuned.trace, material.target)
    return schedule.mod["main"]


def _compile(mod: Any, target: Any) -> Any:
    passes = [
        *generic_pipeline.dataflow_lower_passes(target),
        *generic_pipeline.finalize_passes(target),
    ]
    pipeline = tvm.transform.Sequential(passes)
    try:
        with tvm.transform.PassContext(opt_level=3):
            return relax.build(mod, target=target, relax_pipeline=pipeline)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise EngineError(f"TVM cannot build the model: {(lines or ['no message'])[-1][:400]}") from error


def _manifest(request: BuildRequest, choices: Sequence[SubgraphChoice]) -> dict[str, Any]:
    imported = request.fused.imported
    return {
        "manifest_version": MANIFEST_VERSION,
        "model": {
            "name": imported.model.name,
            "source": imported.model.source,
            "digest": imported.model.digest,
        },
        "engine": imported.engine.engine,
        "versions": imported.engine.versions,
        "target": to_plain(imported.engine.target),
        "threads": imported.engine.target.threads,
        "granularity": request.fused.granularity,
        "tuned": request.tuned,
        "inputs": to_plain(imported.inputs),
        "outputs": to_plain(imported.outputs),
        "subgraphs": to_plain(tuple(choices)),
    }


def _digest(folder: Path) -> str:
    """sha256 over the names and contents of the artifact's files."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
