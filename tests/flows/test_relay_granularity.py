"""The figures of the granularity experiment, on made-up timings whose answer is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.granularity_report import analyse, last_line, page

ROUNDS = 10


def timings(latencies_us: list[float], noise: float, seed: int) -> list[list[float]]:
    random = np.random.default_rng(seed)
    return [[us * float(np.exp(noise * random.standard_normal())) for _ in range(ROUNDS)] for us in latencies_us]


def case(alone: list[float], fused: list[float], noise: float = 0.01) -> dict[str, Any]:
    return {"case": "c", "alone": timings(alone, noise, 1), "fused": timings(fused, noise, 2)}


def test_the_same_ranking_has_no_regret() -> None:
    found = analyse(case([100, 200, 300, 400, 500], [110, 210, 310, 410, 510]))
    assert found is not None
    assert found.between.value == pytest.approx(1.0)
    assert found.alone_itself == pytest.approx(1.0)
    assert found.regret.value == pytest.approx(1.0)  # one candidate wins both
    assert found.operator_us == pytest.approx(110, rel=0.02)


def test_the_case_of_the_rfc() -> None:
    # Alone 237 beats 329; in the subgraph they take 224 and 104.
    found = analyse(case([237, 329, 500, 700], [224, 104, 500, 700]))
    assert found is not None
    assert (found.operator_us, found.subgraph_us) == (pytest.approx(224, rel=0.02), pytest.approx(104, rel=0.02))
    assert found.regret.low < 224 / 104 < found.regret.high or found.regret.value == pytest.approx(2.15, rel=0.02)
    assert found.regret.low > 1.9


def test_noise_lowers_the_correlation_with_itself_too() -> None:
    found = analyse(case([100.0, 101.0, 102.0, 103.0, 104.0, 105.0], [100.0, 101.0, 102.0, 103.0, 104.0, 105.0], 0.5))
    assert found is not None
    assert found.alone_itself < 0.9  # the noise floor shows that this measurement says nothing
    assert found.regret.low < 1.0 < found.regret.high


def test_too_few_candidates_give_no_figure() -> None:
    assert analyse(case([1.0, 2.0], [1.0, 2.0])) is None


def test_the_last_line_and_the_page() -> None:
    cases = {"a": case([1, 2, 3], [1, 2, 3]), "b": {**case([237, 329, 700], [224, 104, 700]), "case": "b"}}
    state = {
        "settings": {"trials": 8},
        "cases": {"relay": cases},
        "models": {"relay": {"m": {"operator": [2.0, 2.2, 2.1], "subgraph": [1.0, 1.1, 1.05]}}},
    }
    line = last_line(state)
    assert set(line) == {"relay"}
    assert line["relay"]["subgraphs"] == 2
    assert line["relay"]["max_regret"] == pytest.approx(2.15, rel=0.03)
    assert line["relay"]["models"] == {"m": {"operator_ms": 2.1, "subgraph_ms": 1.05}}
    text = page(state)
    for part in ("104 us", "224 us", "237 us", "329 us", "| b |", "2.000 (2.000 to 2.000)", "Of 2 subgraphs, 1 have"):
        assert part in text
