"""Each pass on a small model: what is left of its operators, and that it computes the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fresh import in_fresh
from tests.tasks.engines.relax.passes import scenarios

#: By model the operators before its passes and after them.
EXPECTED = {
    "clips": ({"call_tir": 2}, {"clip": 1}),
    "arithmetic": ({"divide": 1, "subtract": 1, "power": 1}, {"multiply": 2, "add": 1}),
    "sums": (None, {"nn.relu": 1, "add": 2}),
    # Four in a row are one product and one sum, which relu and the last sum have in common.
    "chain": ({"add": 3, "multiply": 2, "nn.relu": 1}, {"multiply": 1, "add": 2, "nn.relu": 1}),
    "scale_after": ({"nn.conv2d": 1, "add": 2, "multiply": 1}, {"nn.conv2d": 1, "add": 1}),
    "scale_after_grouped": ({"nn.conv2d": 1, "add": 2, "multiply": 1}, {"nn.conv2d": 1, "add": 1}),
    "scale_before": ({"nn.conv2d": 1, "add": 1, "multiply": 1}, {"nn.conv2d": 1, "add": 1}),
    "scale_before_grouped": ({"nn.conv2d": 1, "add": 1, "multiply": 1}, {"nn.conv2d": 1, "add": 1}),
    "scale_before_padded": (
        {"nn.conv2d": 1, "add": 1, "multiply": 1},
        {"nn.conv2d": 1, "add": 1, "multiply": 1},
    ),
    # The last conv's result is larger than what it reads: its concatenation stays.
    "concatenated": (
        {"nn.conv2d": 5, "concat": 3, "nn.max_pool2d": 1, "add": 1, "nn.relu": 1},
        {"nn.conv2d": 7, "concat": 1, "nn.max_pool2d": 2, "add": 3, "nn.relu": 1},
    ),
    "few_rows": ({"matmul": 4, "add": 2, "multiply": 1}, {"matmul": 2, "strided_slice": 3, "add": 2, "multiply": 1}),
    "many_rows": ({"matmul": 4, "add": 2, "multiply": 1}, {"matmul": 4, "add": 2, "multiply": 1}),
    "matmul_between": ({"matmul": 1, "add": 2, "multiply": 2}, {"matmul": 1, "add": 1}),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All models in one interpreter: TVM is imported once."""
    found: dict[str, Any] = in_fresh(scenarios.run_all, str(tmp_path_factory.mktemp("models")), timeout_s=600)
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_a_pass_leaves_fewer_operators(name: str, outcomes: dict[str, Any]) -> None:
    before, after = EXPECTED[name]

    assert before is None or outcomes[name]["before"] == before
    assert outcomes[name]["after"] == after


@pytest.mark.parametrize("name", scenarios.PASSES)
def test_a_pass_computes_the_same(name: str, outcomes: dict[str, Any]) -> None:
    found = outcomes[name]

    assert found["magnitude"] > 0.1  # there is something to compare
    # Another order of float32 sums of at most some hundred terms.
    assert found["difference"] <= 1e-5 * found["magnitude"]


def test_channels_move_at_the_borders_only(outcomes: dict[str, Any]) -> None:
    before, after = outcomes["network"]["before"], outcomes["network"]["after"]

    # In at the beginning, the shuffle's own, and out where the last reduction wants the model's order.
    assert before["permute_dims"] == 1
    assert after["permute_dims"] == 3
    assert after["nn.conv2d"] == before["nn.conv2d"] == 4


def test_transposed_convs_are_convs(outcomes: dict[str, Any]) -> None:
    before, after = outcomes["transposed"]["before"], outcomes["transposed"]["after"]

    assert before["nn.conv2d_transpose"] == 4
    # The one with groups stays.
    assert (after["nn.conv2d"], after["nn.conv2d_transpose"]) == (3, 1)


def test_weights_are_packed_once(outcomes: dict[str, Any]) -> None:
    after = outcomes["weights_to_pack"]["after"]

    assert after["call_tir"] == 2
    assert "nn.conv2d" not in after
    assert "matmul" not in after


def test_the_weights_of_groups_are_packed_too(outcomes: dict[str, Any]) -> None:
    before, after = outcomes["groups_to_pack"]["before"], outcomes["groups_to_pack"]["after"]

    assert before["nn.conv2d"] == after["call_tir"] == 3
    assert "nn.conv2d" not in after


def test_exponentials_are_polynomials(outcomes: dict[str, Any]) -> None:
    before, after = outcomes["exponentials"]["before"], outcomes["exponentials"]["after"]

    assert {"sigmoid", "nn.softmax", "exp"} <= set(before)
    assert not {"sigmoid", "nn.softmax", "exp"} & set(after)
