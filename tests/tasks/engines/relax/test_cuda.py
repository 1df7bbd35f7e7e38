"""For CUDA, as far as it goes without a device: what the engine generates compiles for sm_80 and sm_90.

What needs a device is in benchmarks/gpu_check.sh.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tasks.engines.relax.bootstrap import choose_cuda_compiler
from tests.fresh import in_fresh
from tests.tasks.engines.relax import cuda_scenarios

needs_nvcc = pytest.mark.skipif(not cuda_scenarios.nvcc(), reason="NOT TESTED: CUDA code is not compiled, no nvcc here")


@needs_nvcc
@pytest.mark.parametrize(
    ("name", "archs", "anchors"),
    [
        ("classifier", ("sm_80", "sm_90"), ("conv2d", "matmul")),
        ("squeezenet", ("sm_90", "sm_80"), ("conv2d", "concatenate")),
    ],
)
def test_every_default_schedule_and_what_the_search_proposes_compile(
    name: str, archs: tuple[str, str], anchors: tuple[str, ...], tmp_path: Path
) -> None:
    done = in_fresh(cuda_scenarios.compile_model, name, archs, anchors, str(tmp_path), timeout_s=500)

    # All kernels of the model are one library, which is compiled at once.
    assert len(done["whole"]) == 1
    # 40 kernels and more: dozens of kilobytes of machine code.
    assert done["whole"][0] > 50_000
    assert done["artifact_bytes"] > 50_000
    assert done["uncovered"] == done["subgraphs"]
    assert done["proposed"].keys() == set(anchors)
    assert all(count >= 1 for count in done["proposed"].values())
    assert len(done["candidates"]) == sum(done["proposed"].values())
    assert all(size > 500 for size in done["candidates"])
    assert done["sample"] >= 3
    assert len(done["other"]) == 1
    assert done["other"][0] > 2_000
    # The kernels of gpu_check.sh, and source that is none: what fails to compile is heard of.
    assert len(done["check"]) == 1
    assert "undeclared" in done["broken"]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path with nothing on it, and no word of the environment on how to compile."""
    # Set first, so that what is chosen is taken back at the end.
    monkeypatch.setenv("TVM_CUDA_COMPILE_MODE", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tasks.engines.relax.bootstrap._has_nvrtc", lambda: False)
    monkeypatch.setattr("tasks.engines.relax.bootstrap._CUDA_TOOLS", str(tmp_path / "cuda"))
    return tmp_path


def an_nvcc(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "nvcc").write_text("#!/bin/sh\n")
    (folder / "nvcc").chmod(stat.S_IRWXU)


def test_without_a_cuda_compiler_none_is_chosen(tools: Path) -> None:
    assert choose_cuda_compiler() == ""
    assert os.environ["TVM_CUDA_COMPILE_MODE"] == ""


def test_nvcc_is_chosen_where_the_package_of_nvrtc_is_missing(tools: Path) -> None:
    """TVM's own default would need that package, and every build would fail."""
    an_nvcc(tools)
    assert choose_cuda_compiler() == "nvcc"
    assert os.environ["TVM_CUDA_COMPILE_MODE"] == "nvcc"


def test_nvcc_is_found_beside_the_path(tools: Path) -> None:
    an_nvcc(tools / "cuda")
    assert choose_cuda_compiler() == "nvcc"
    assert str(tools / "cuda") in os.environ["PATH"].split(":")


def test_what_the_environment_names_stays(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    an_nvcc(tools)
    monkeypatch.setenv("TVM_CUDA_COMPILE_MODE", "nvrtc")
    assert choose_cuda_compiler() == "nvrtc"
