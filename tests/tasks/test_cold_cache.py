"""When candidates are timed with a cold cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tasks.cold_cache import for_model
from tasks.engines.measuring.caches import last_level_cache_bytes
from tasks.records import MeasureSettings, ModelFile
from tests.infra.sample_records import ENGINE

WARM = MeasureSettings(repeat=5, min_repeat_ms=20)


@pytest.fixture
def model(tmp_path: Path) -> ModelFile:
    """Of 3,000 bytes, a third of them in another file."""
    path = tmp_path / "0123.onnx"
    path.write_bytes(b"m" * 2000)
    path.with_suffix(".data").write_bytes(b"w" * 1000)
    return ModelFile("m", "m", "0123", str(path), str(path), (), (), 17)


@pytest.mark.parametrize(("cache_bytes", "cold"), [(5999, True), (6000, False), (0, False)])
def test_weights_that_fill_more_than_half_of_the_cache_are_read_from_memory(
    model: ModelFile, cache_bytes: int, cold: bool
) -> None:
    settings = for_model(WARM, None, model, replace(ENGINE, cache_bytes=cache_bytes))
    assert settings.flush_cache is cold


def test_only_single_calls_are_cold(model: ModelFile) -> None:
    settings = for_model(WARM, True, model, ENGINE)
    assert (settings.flush_cache, settings.number, settings.min_repeat_ms, settings.repeat) == (True, 1, 0, 15)


def test_the_user_may_say_no(model: ModelFile) -> None:
    assert for_model(WARM, False, model, replace(ENGINE, cache_bytes=1)) == WARM


def test_the_largest_cache_counts(tmp_path: Path) -> None:
    for index, size in enumerate(["32K", "512K", "32768K", "unknown"]):
        (tmp_path / f"cpu1/cache/index{index}").mkdir(parents=True)
        (tmp_path / f"cpu1/cache/index{index}/size").write_text(f"{size}\n")

    assert last_level_cache_bytes(1, tmp_path) == 32 << 20
    assert last_level_cache_bytes(0, tmp_path) == 0
