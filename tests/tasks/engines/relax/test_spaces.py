"""Sketches and default schedules of our own compute what the naive loops compute, on every kernel of small models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fresh import in_fresh

#: Vectors of eight in 16 registers: what makes a good tile, and so what is filled up, goes by these.
AVX2 = '{"kind": "llvm", "mcpu": "core-avx2"}'


def compare_all(folder: str, target_text: str) -> list[Any]:
    """In a fresh interpreter: by kernel its operators, how many sketches it has, the largest relative differences."""
    from tasks.engines.relax.bootstrap import import_tvm

    import_tvm("llvm")
    import numpy as np
    import tvm

    from tasks.engines.relax import defaults, frontend, spaces, subgraphs, targets
    from tests.tasks.engines.relax.passes.models import MODELS, spread_output

    target = targets.to_tvm(targets.resolve(target_text, 2))

    def outputs(mod: Any, count: int) -> list[Any]:
        arrays = [
            np.random.default_rng(place).uniform(-1, 1, shape).astype(dtype)
            for place, (shape, dtype) in enumerate(subgraphs.arguments(workload))
        ]
        tensors = [tvm.runtime.tensor(array) for array in arrays]
        tvm.tirx.build(mod, target=target)["main"](*tensors)
        return [tensor.numpy() for tensor in tensors[-count:]]

    found = []
    names = ("network", "weights_to_pack", "groups_to_pack", "rows_to_fill", "exponentials")
    made = {name: MODELS[name] for name in names}
    for name, model in {**made, "spread_output": spread_output()}.items():
        path = Path(folder) / f"{name}.onnx"
        path.write_bytes(model.SerializeToString())
        inventory = subgraphs.take_inventory(frontend.fuse(frontend.translate(str(path))[0], target))
        for subgraph in inventory.subgraphs:
            workload = inventory.workloads[subgraph.workload_key].mod
            sketches = spaces.register_tiles(workload, target)
            guess = spaces.best_guess(workload, target)
            assert (guess is None) == (not sketches), subgraph.name
            if guess is not None:
                assert subgraphs.structural_key(guess.mod) == subgraphs.structural_key(sketches[-1].mod), subgraph.name
            default = defaults.cpu_default(workload, target)
            scheduled = [*(sketch.mod for sketch in sketches), default]
            wanted = outputs(workload, len(subgraph.outputs))
            differences = [
                float(np.abs(want - got).max() / max(1e-3, np.abs(want).max()))
                for mod in scheduled
                for want, got in zip(wanted, outputs(mod, len(subgraph.outputs)), strict=True)
            ]
            vectors = str(default).count("T.vectorized")
            vain = "T.min(" in str(workload) and len(sketches) > 0
            flat = "conv2d = T.sblock_alloc_buffer((T.int64(1), T.int64(172), T.int64(" in str(workload)
            found.append([subgraph.name, list(subgraph.operators), len(sketches), differences, vectors, vain, flat])
    return found


def compared(tmp_path_factory: pytest.TempPathFactory, target: str) -> list[Any]:
    found: list[Any] = in_fresh(compare_all, str(tmp_path_factory.mktemp("models")), target, timeout_s=600)
    return found


@pytest.fixture(scope="module")
def on_avx2(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return compared(tmp_path_factory, AVX2)


@pytest.fixture(scope="module", params=["cpu", AVX2], ids=["cpu", "avx2"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, on_avx2: list[Any]) -> list[Any]:
    return on_avx2 if request.param == AVX2 else compared(tmp_path_factory, request.param)


def test_every_schedule_computes_what_the_naive_loops_do(kernels: list[Any]) -> None:
    for name, _, _, differences, *_ in kernels:
        # Another order of some hundred float32 terms.
        assert max(differences) <= 1e-5, name


def test_convs_and_matmuls_have_sketches(kernels: list[Any]) -> None:
    counts = [sketches for _, operators, sketches, *_ in kernels if {"conv2d", "matmul"} & set(operators)]

    # Those whose result is spread over a picture have none: their tile would be the whole picture.
    assert len([count for count in counts if count]) >= 5
    # Rows or columns first; a padded conv also with its padding in two places.
    assert set(counts) == {0, 2, 4}


def test_a_conv_whose_result_is_spread_over_a_picture_has_no_tile(kernels: list[Any]) -> None:
    (sketches,) = [sketches for _, operators, sketches, *_ in kernels if operators == ["conv2d", "relu", "add"]]

    assert sketches == 0


def test_a_softmax_runs_in_vectors_untuned(kernels: list[Any]) -> None:
    (vectors,) = [vectors for _, operators, _, _, vectors, *_ in kernels if "softmax" in operators]

    # Partial maxima and sums, each initialised and updated.
    assert vectors >= 4


def test_rows_that_make_no_good_tile_are_filled_up(on_avx2: list[Any]) -> None:
    filled = [operators for _, operators, _, _, _, vain, _ in on_avx2 if vain and "conv2d" in operators]

    assert filled == [["conv2d", "relu"], ["conv2d", "add", "relu"]]


def test_a_pointwise_conv_takes_the_pixels_of_short_rows_in_one(on_avx2: list[Any]) -> None:
    flat = [operators for _, operators, *_, flat in on_avx2 if flat]

    # 13 x 13 pixels are 43 tiles of four; rows of 13 would be four tiles each, three sixteenths of them in vain.
    assert flat == [["conv2d", "add", "relu"]]
