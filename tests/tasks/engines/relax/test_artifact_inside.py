"""What the relax engine tells people of an artifact: sources of what was built, a profile, the machine's limits."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from tasks.engines.child import ChildOptions, EngineChild
from tasks.engines.interface import BuildRequest, ExecutionRequest
from tasks.import_model import import_model_file, seeded_inputs
from tasks.inside import read_profile
from tasks.model_source import fetch
from tasks.records import Artifact, FusedModule, FusedSubgraph, Measurement, MeasureSettings, ModelFile, TuningRecord
from tests.models import conv_model

THREADS = min(2, len(os.sched_getaffinity(0)))
#: A schedule of TVM's own primitives, as a trace: the convolution's rows in parallel.
PARALLEL = (
    '[[["GetSBlock",[],["BLOCK","main"],["b0"]],["GetLoops",["b0"],[],["l1","l2","l3","l4","l5","l6","l7"]],'
    '["Parallel",["l3"],[],[]]],[]]'
)
#: One that computes something else: an intermediate result is kept in 8 bits.
WRONG = '[[["GetSBlock",[],["BLOCK","main"],["b0"]],["UnsafeSetDType",["b0"],[0,"int8"],[]]],[]]'


def engine(target: str) -> EngineChild:
    return EngineChild(ChildOptions("relax", sys.executable, target, "cpu:0-1", THREADS, step_timeout_s=500.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inside")


@pytest.fixture(scope="module")
def model(folder: Path) -> ModelFile:
    onnx.save(conv_model(), folder / "convs.onnx")
    return import_model_file(fetch(str(folder / "convs.onnx"), folder), {}, folder)


@pytest.fixture(scope="module")
def child() -> Iterator[EngineChild]:
    with engine("cpu") as started:
        yield started


@pytest.fixture(scope="module")
def fused(child: EngineChild, model: ModelFile) -> FusedModule:
    return child.fuse(child.import_model(model), "subgraph")


@pytest.fixture(scope="module")
def conv(child: EngineChild, fused: FusedModule, folder: Path) -> tuple[FusedSubgraph, str]:
    """The first convolution, and the name of its block, which tells its layout."""
    subgraph = next(s for s in fused.subgraphs if "conv2d" in s.anchor_operator)
    child.extract(fused, str(folder / "workloads"))
    text = (folder / "workloads" / f"{subgraph.workload_key}.json").read_text()
    found = re.search(r'"(conv2d(?:_n[a-z]+)?)"', text)
    assert found is not None
    return subgraph, found[1]


def tuned_record(child: EngineChild, workload_key: str, schedule: str) -> TuningRecord:
    info = child.describe()
    return TuningRecord(
        "r1", "run", "s1", info.engine, info.tvm_version, info.target.key, workload_key, "convs", "c1", 1, "search",
        schedule, 1.76e9, info.device, "host", Measurement((50.0,), MeasureSettings(), 0.1, 0.1),
    )  # fmt: skip


@pytest.fixture(scope="module")
def artifact(child: EngineChild, fused: FusedModule, conv: tuple[FusedSubgraph, str], folder: Path) -> Artifact:
    (folder / "sources" / "stale").mkdir(parents=True)
    key = conv[0].workload_key
    best = {key: (tuned_record(child, key, PARALLEL.replace("BLOCK", conv[1])),)}
    return child.build(BuildRequest(fused, best, str(folder / "built"), True, str(folder / "sources")))


@pytest.fixture(scope="module")
def inputs(model: ModelFile, folder: Path) -> str:
    np.savez(folder / "inputs.npz", **seeded_inputs(model, 0))
    return str(folder / "inputs.npz")


def test_sources_are_a_folder_a_subgraph(
    artifact: Artifact, fused: FusedModule, conv: tuple[FusedSubgraph, str], folder: Path
) -> None:
    built = {subgraph.workload_key: folder / "sources" / subgraph.workload_key for subgraph in fused.subgraphs}
    assert sorted((folder / "sources").iterdir()) == sorted(built.values()), "nothing is left of an earlier build"
    tuned = built.pop(conv[0].workload_key)
    assert json.loads((tuned / "trace.json").read_text()) == json.loads(PARALLEL.replace("BLOCK", conv[1]))
    schedule = (tuned / "schedule.py").read_text()
    assert schedule.startswith(f"# {conv[0].name}: record r1, 50.00 us")
    assert "T.parallel(" in schedule
    for other in built.values():
        assert not (other / "trace.json").exists()
        assert "the default schedule" in (other / "schedule.py").read_text()
    for place in (tuned, *built.values()):
        code = (place / "code.s").read_text()
        # The object's one function, and instructions in it.
        assert place.name in code
        assert "ret" in code
    left = {path.suffix for path in Path(artifact.path).rglob("*") if path.name != "loader.py"}
    assert not left & {".py", ".s"}, "they are no part of the artifact"


def test_without_a_disassembler_tvm_prints_the_code(
    model: ModelFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path with everything but objdump, as on a machine without binutils' tools."""
    tools = folder / "bin"
    tools.mkdir()
    for tool in ("cc", "gcc", "g++", "ld", "as", "ar", "sh"):
        if found := shutil.which(tool):
            (tools / tool).symlink_to(found)
    monkeypatch.setenv("PATH", str(tools))
    with engine("cpu") as child:
        fused = child.fuse(child.import_model(model), "subgraph")
        child.build(BuildRequest(fused, {}, str(folder / "plain"), False, str(folder / "printed")))
    code = (folder / "printed" / fused.subgraphs[0].workload_key / "code.s").read_text()
    assert ".text" in code
    assert "ret" in code


def test_cuda_sources_are_split_by_kernel_without_a_device(model: ModelFile, folder: Path) -> None:
    with engine('{"kind": "cuda", "arch": "sm_90"}') as child:
        fused = child.fuse(child.import_model(model), "subgraph")
        child.build(BuildRequest(fused, {}, str(folder / "cuda"), False, str(folder / "cuda-sources")))
    texts = [(folder / "cuda-sources" / s.workload_key / "code.cu").read_text() for s in fused.subgraphs]
    assert all("__global__" in text and "threadIdx.x" in text for text in texts)
    # Each has its own kernels and no others.
    first, *others = (f"{subgraph.name}_kernel" for subgraph in fused.subgraphs)
    assert first in texts[0]
    assert not any(re.search(rf"\b{other}\b", texts[0]) for other in others)


def test_a_profile_names_every_call_of_the_run(
    child: EngineChild, artifact: Artifact, fused: FusedModule, conv: tuple[FusedSubgraph, str], folder: Path,
    inputs: str,
) -> None:  # fmt: skip
    path = folder / "profile.json"
    child.execute(ExecutionRequest(artifact.path, inputs, 3, profile_path=str(path)))
    told = json.loads(path.read_text())
    assert len(told["calls"]) == len(fused.calls)
    profile = read_profile(path, fused, artifact)
    assert {kernel.name for kernel in profile.kernels} == {subgraph.name for subgraph in fused.subgraphs}
    assert sum(kernel.calls for kernel in profile.kernels) == len(fused.calls)
    assert all(kernel.in_run_us > 0 for kernel in profile.kernels)
    alone = {kernel.workload_key: kernel.alone_us for kernel in profile.kernels}
    calls = {kernel.workload_key: kernel.calls for kernel in profile.kernels}
    assert alone.pop(conv[0].workload_key) == 50.0 * calls[conv[0].workload_key]
    assert set(alone.values()) == {None}
    assert profile.outside_us >= 0
    # Nobody watches any more: the artifact runs as before.
    assert len(child.execute(ExecutionRequest(artifact.path, inputs, 2)).samples_ms) == 2


def test_the_roof_is_above_what_any_kernel_reaches(
    child: EngineChild, artifact: Artifact, inputs: str, folder: Path
) -> None:
    child.execute(ExecutionRequest(artifact.path, inputs, 1, roof_path=str(folder / "roof.json")))
    roof = json.loads((folder / "roof.json").read_text())
    # Between an old phone and a large server, on one thread or two.
    assert 1e9 < roof["flops_per_s"] < 1e13
    assert 1e8 < roof["bytes_per_s"] < 1e12
    assert roof["cache_bytes_per_s"] >= roof["bytes_per_s"]


def test_a_folder_that_is_gone_is_not_run_from_memory(
    child: EngineChild, fused: FusedModule, conv: tuple[FusedSubgraph, str], inputs: str, folder: Path
) -> None:
    """A bisection builds many artifacts and removes each: none may be kept running."""
    place, outputs = str(folder / "again"), []
    key = conv[0].workload_key
    # A candidate of its own: the object of one that was built already would be linked again.
    wrong = replace(tuned_record(child, key, WRONG.replace("BLOCK", conv[1])), candidate_key="c2")
    for best in ({}, {key: (wrong,)}):
        child.build(BuildRequest(fused, best, place, True))
        child.execute(ExecutionRequest(place, inputs, 0, str(folder / "outputs.npz")))
        with np.load(folder / "outputs.npz") as stored:
            outputs.append(stored["y"])
        shutil.rmtree(place)
        child.execute(ExecutionRequest(str(folder / "built"), inputs, 1))
    # What was built second computes with 8 bits.
    assert np.abs(outputs[0] - outputs[1]).max() > 0.1
