"""For CUDA, as far as it goes without a device: what the engine generates compiles for sm_80 and sm_90.

What needs a device is in benchmarks/gpu_check.sh.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from tasks.engines.relax.bootstrap import choose_cuda_compiler
from tests.fresh import in_fresh
from tests.tasks.engines.relax import cuda_scenarios

needs_nvcc = pytest.mark.skipif(
    not cuda_scenarios.has_nvcc(), reason="NOT TESTED: CUDA code is not compiled, no nvcc here"
)


@needs_nvcc
@pytest.mark.parametrize(
    ("name", "archs", "anchors", "layout"),
    [
        ("classifier", ("sm_80", "sm_90"), ("matmul", "mean"), "as-imported"),
        ("squeezenet", ("sm_90", "sm_80"), ("conv2d",), "channels-last"),
    ],
)
def test_every_default_schedule_and_what_the_search_proposes_compile(
    name: str,
    archs: tuple[str, str],
    anchors: tuple[str, ...],
    layout: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if shutil.which("nvidia-smi") is None:
        cuda_scenarios.driver_without_a_device(tmp_path)
        monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}")
    done = in_fresh(cuda_scenarios.compile_model, name, archs, anchors, layout, str(tmp_path), timeout_s=500)

    if not done["runtime"]:
        assert "libcudart.so.13" in done["refusal"]
        pytest.skip("NOT TESTED: CUDA code is not compiled, TVM's CUDA runtime needs CUDA 13's libcudart.so.13")
    assert "cuda" in done["kinds"]
    assert not done["holds_source"]
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
    assert done["sample"] >= 2
    assert len(done["other"]) == 1
    assert done["other"][0] > 1_000
    # The kernels of gpu_check.sh, and source that is none: what fails to compile is heard of.
    assert len(done["check"]) == 1
    assert "undeclared" in done["broken"]
    if shutil.which("nvidia-smi") is None:
        assert "no CUDA device is visible" in done["refusal"]


def test_a_device_with_memory_of_its_own_is_timed_and_checked(tmp_path: Path) -> None:
    names = ["parallel", "wrong", "nothing", "spoils_input"]
    timed = in_fresh(cuda_scenarios.time_as_on_a_gpu, names, str(tmp_path))

    assert [name for name, _ in timed] == names
    said = [answer for _, answer in timed]
    assert len(said[0]) == 4
    assert all(us > 0 for us in said[0])
    assert said[1].startswith("WrongOutput: output 0 differs")
    assert said[2].startswith("WrongOutput: output 0 differs")
    assert said[3].startswith("WrongOutput: the candidate overwrote its input 0")


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
