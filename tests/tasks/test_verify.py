"""Comparison with the reference, and timing in turns; pure parts of the verify step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tasks.outputs import TOLERANCE, describe_tolerance, wrong_outputs
from tasks.quantised import output_steps
from tasks.racing import interleaved
from tests.models import conv_model


def arrays(**values: object) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in values.items()}


def test_equal_outputs_are_right() -> None:
    outputs = arrays(a=np.linspace(0, 1, 9, dtype=np.float32), b=np.array([1, 2], np.int64))
    assert wrong_outputs(outputs, outputs) == (0.0, [])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_difference_within_the_tolerance_is_told_and_right(dtype: str) -> None:
    absolute, relative = TOLERANCE[dtype]
    want = np.full(4, 8, dtype)
    room = absolute + relative * 8

    got = want.astype(np.float64)
    got[2] += room if np.dtype(dtype).kind in "iu" else 0.5 * room
    worst, failed = wrong_outputs({"y": want}, {"y": got.astype(dtype)})
    assert failed == []
    assert 0 < worst <= room

    got[2] += 2 * room
    worst, failed = wrong_outputs({"y": want}, {"y": got.astype(dtype)})
    assert len(failed) == 1
    assert "y: differs" in failed[0]
    assert worst > room


def test_a_dequantised_output_may_be_two_steps_off(tmp_path: Path) -> None:
    make, value = helper.make_node, helper.make_tensor_value_info
    nodes = [
        make("QuantizeLinear", ["x", "s", "z"], ["q"]),
        make("DequantizeLinear", ["q", "s", "z"], ["d"]),
        make("Softmax", ["d"], ["y"]),
        make("Exp", ["d"], ["e"]),
    ]
    weights = [numpy_helper.from_array(np.float32(0.05), "s"), numpy_helper.from_array(np.int8(0), "z")]
    outputs = [value(name, onnx.TensorProto.FLOAT, [4]) for name in ("y", "e")]
    graph = helper.make_graph(nodes, "small", [value("x", onnx.TensorProto.FLOAT, [4])], outputs, weights)
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph), path)
    steps = output_steps(path)
    want = arrays(y=np.float32([0.1, 0.2, 0.3, 0.4]))

    # An exponential enlarges a step: of it nothing is known.
    assert steps == {"y": pytest.approx(0.05)}
    assert wrong_outputs(want, {"y": want["y"] + np.float32(0.09)}, steps)[1] == []
    assert wrong_outputs(want, {"y": want["y"] + np.float32(0.11)}, steps)[1]
    assert wrong_outputs(want, {"y": want["y"] + np.float32(0.09)})[1]
    assert "y: + 2 steps of 0.05" in describe_tolerance(["float32"], steps)


def test_a_float_model_has_no_steps(tmp_path: Path) -> None:
    onnx.save(conv_model(), tmp_path / "model.onnx")
    assert output_steps(tmp_path / "model.onnx") == {}


@pytest.mark.parametrize("dtype", ["int32", "int64", "bool"])
def test_exact_dtypes_must_be_equal(dtype: str) -> None:
    want, got = np.array([0, 1, 1]).astype(dtype), np.array([0, 1, 0]).astype(dtype)
    assert wrong_outputs({"y": want}, {"y": got})[1]


def test_each_wrong_output_is_named() -> None:
    want = arrays(a=np.zeros(2, np.float32), b=np.zeros((2, 3), np.float32), c=np.zeros(1, np.float32))
    got = arrays(a=np.ones(2, np.float32), b=np.zeros((3, 2), np.float32))
    worst, failed = wrong_outputs(want, got)

    assert worst == 1.0
    assert [text.split(":")[0] for text in failed] == ["a", "b", "c"]
    assert "(3, 2) instead of (2, 3)" in failed[1]
    assert "None" in failed[2]


def test_the_worst_difference_is_over_all_outputs() -> None:
    want = arrays(a=np.float32([1]), b=np.float32([1]), c=np.float32([1]))
    got = arrays(a=np.float32([1.00001]), b=np.float32([1.0003]), c=np.float32([1]))
    worst, failed = wrong_outputs(want, got)

    assert worst == pytest.approx(3e-4, rel=1e-3)  # float32 near 1 has steps of 1.2e-7
    assert failed == []


def test_nan_and_infinities_equal_themselves_alone() -> None:
    special = np.float32([np.nan, np.inf, -np.inf, 1])
    assert wrong_outputs({"y": special}, {"y": special.copy()}) == (0.0, [])
    for index, value in ((0, 1), (2, np.nan), (3, np.nan), (3, np.inf)):
        got = special.copy()
        got[index] = value
        assert wrong_outputs({"y": special}, {"y": got})[1], (index, value)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("value", [1.0, -np.inf])
def test_nothing_else_passes_for_an_infinity(value: float) -> None:
    assert wrong_outputs({"y": np.float32([np.inf])}, {"y": np.float32([value])})[1]


def test_empty_outputs_are_right() -> None:
    assert wrong_outputs({"y": np.zeros((0, 4), np.float32)}, {"y": np.zeros((0, 4), np.float32)}) == (0.0, [])


def test_nothing_may_be_given_for_something() -> None:
    assert wrong_outputs({"y": np.zeros(1, np.float32)}, {})[1]


def test_tolerances_as_text() -> None:
    assert describe_tolerance(["float32", "int64"]) == "float32: 0.0001 + 0.001 * |expected|, int64: equal"


def test_contenders_take_turns_and_each_round_is_one_sample() -> None:
    order: list[str] = []
    asked: dict[str, list[int]] = {"a": [], "b": [], "c": []}

    def contender(name: str, each_ms: float) -> object:
        def run(repeats: int) -> list[float]:
            order.append(name)
            asked[name].append(repeats)
            slow = math.ceil(30 / each_ms)
            return [50 * each_ms] * slow + [each_ms] * (repeats - slow) if len(asked[name]) > 2 else [each_ms]

        return run

    latencies = interleaved({name: contender(name, ms) for name, ms in (("a", 1.0), ("b", 300.0), ("c", 40.0))}, 3)

    rounds = [order[6:][at : at + 3] for at in range(0, 9, 3)]  # the first six warm up and estimate
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert {turn[0] for turn in rounds} == {"a", "b", "c"}  # nobody is always first
    # The first 30 ms of each turn, and one run at least, fifty times as slow here, warm up and do not count.
    assert {name: latency.samples_ms for name, latency in latencies.items()} == {
        "a": (1.0,) * 3, "b": (300.0,) * 3, "c": (40.0,) * 3,
    }  # fmt: skip
    # Slow ones run less often, so that each has about the same time.
    assert asked["a"][-1] > asked["c"][-1] > asked["b"][-1] >= 2


def test_nobody_always_runs_after_the_same_neighbour() -> None:
    order: list[str] = []

    def contender(name: str) -> Callable[[int], list[float]]:
        return lambda repeats: order.append(name) or [0.1] * repeats  # type: ignore[func-returns-value]

    interleaved({name: contender(name) for name in "abc"}, 6)

    timed = order[6:]
    before = {name: {timed[at - 1] for at in range(1, len(timed)) if timed[at] == name} - {name} for name in "abc"}
    assert before == {"a": {"b", "c"}, "b": {"a", "c"}, "c": {"a", "b"}}


def test_timing_takes_no_longer_than_it_must() -> None:
    started = time.monotonic()
    interleaved({"fast": lambda repeats: [0.0] * repeats}, rounds=2)
    assert time.monotonic() - started < 5
