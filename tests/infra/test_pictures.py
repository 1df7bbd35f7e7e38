"""Pictures are drawn at the sizes that real models have; their looks are checked by eye."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from infra import pictures
from infra.graph_picture import BOX_HEIGHT, BOX_WIDTH, place
from infra.roofline import roofline
from infra.run_figures import Dot, ModelPoint
from tasks.records import FAILURE_KINDS, KernelTime, Profile, Roof
from tests.infra.sample_records import fused


def size(path: Path) -> tuple[int, int]:
    """Width and height, from the PNG's header."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


@pytest.mark.parametrize(("subgraphs", "calls"), [(1, 1), (3, 5), (60, 150), (90, 330)])
def test_the_boxes_of_a_graph_never_touch_and_the_picture_has_a_screens_shape(subgraphs: int, calls: int) -> None:
    placed = place(fused(subgraphs, calls))
    for (x0, y0), (x1, y1) in itertools.combinations(placed.centres, 2):
        assert abs(x0 - x1) >= BOX_WIDTH or abs(y0 - y1) >= BOX_HEIGHT
    assert all(0 < x < placed.width and 0 < y < placed.height for x, y in placed.centres)
    if calls >= 150:
        assert 1 < placed.width / placed.height < 3


def test_a_large_graph_is_drawn(tmp_path: Path) -> None:
    graph = fused(60, 150)
    share = {s.name: 1 / (3 + n) ** 2 for n, s in enumerate(graph.subgraphs)}
    pictures.fused_graph(tmp_path / "graph.png", graph, share)
    width, height = size(tmp_path / "graph.png")
    assert width > 1500
    assert height > 800


def test_a_graph_without_shares_is_drawn(tmp_path: Path) -> None:
    pictures.fused_graph(tmp_path / "graph.png", fused(2, 2), {})
    assert size(tmp_path / "graph.png")[0] > 500


@pytest.mark.parametrize("tasks", [1, 60])
def test_curves_are_drawn_also_of_tasks_with_one_trial_or_none(tmp_path: Path, tasks: int) -> None:
    curves = {
        f"fused_conv2d_add_relu_multiply_add{n}": [(t, 1000.0 / (t + 1)) for t in range(n % 20)]
        for n in range(1, tasks + 1)
    }
    pictures.best_latency_curves(tmp_path / "curves.png", curves)
    assert size(tmp_path / "curves.png")[0] > 300


@pytest.mark.parametrize("subgraphs", [1, 60])
def test_times_are_drawn(tmp_path: Path, subgraphs: int) -> None:
    before = {f"fused_conv2d_add_relu_multiply_add{n}": 9000.0 / (n + 1) for n in range(subgraphs)}
    after = {name: was / 8 for name, was in before.items()}
    pictures.time_by_subgraph(tmp_path / "times.png", before, after)
    assert size(tmp_path / "times.png")[0] > 900


@pytest.mark.parametrize("counts", [{}, {kind: 3 + n for n, kind in enumerate(FAILURE_KINDS)}])
def test_failures_are_drawn_also_where_there_are_none(tmp_path: Path, counts: dict[str, int]) -> None:
    pictures.failures_by_kind(tmp_path / "failures.png", counts)
    assert size(tmp_path / "failures.png")[1] > 100


@pytest.mark.parametrize("count", [1, 200])
def test_the_models_latency_is_drawn(tmp_path: Path, count: int) -> None:
    points = [ModelPoint(7.0 * n, 3 * n, 9000.0 / (n + 1)) for n in range(count)]
    pictures.model_latency(tmp_path / "model.png", points, 9000.0)
    assert size(tmp_path / "model.png")[0] > 1000


@pytest.mark.parametrize("subgraphs", [1, 60])
def test_the_waterfall_is_drawn_also_where_something_got_slower(tmp_path: Path, subgraphs: int) -> None:
    before = {f"fused_conv2d_add_relu_multiply_add{n}": 9000.0 / (n + 1) for n in range(subgraphs)}
    after = {name: was * (1.2 if at == 1 else 0.1) for at, (name, was) in enumerate(before.items())}
    pictures.savings_by_subgraph(tmp_path / "savings.png", before, after)
    assert size(tmp_path / "savings.png")[0] > 900


@pytest.mark.parametrize("kernels", [0, 1, 60])
def test_a_profile_is_drawn(tmp_path: Path, kernels: int) -> None:
    times = [KernelTime(f"kernel{n}", "k", 1, 100.0 / (n + 1), None if n % 3 else 90.0) for n in range(kernels)]
    profile = Profile(tuple(times), 20.0, 20.0 + sum(t.in_run_us for t in times))
    pictures.profile_by_kernel(tmp_path / "profile.png", profile)
    assert size(tmp_path / "profile.png")[0] > 900


@pytest.mark.parametrize("subgraphs", [1, 60])
def test_a_roofline_is_drawn(tmp_path: Path, subgraphs: int) -> None:
    roof = Roof(190e9, 13e9, 100e9, "cpu:0-1", 2)
    dots = [
        Dot(f"kernel{n}", 0.1 * 1.15**n, 1e9 if n % 2 else None, 2e9 * (n + 1), 1 / subgraphs) for n in range(subgraphs)
    ]
    roofline(tmp_path / "roofline.png", dots, roof)
    assert size(tmp_path / "roofline.png")[0] > 900
