"""``compare``, ``history``, ``rollback`` and ``sync`` as a user calls them, on a real MLflow over HTTP."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from rich.console import Console
from typer.testing import CliRunner, Result

from flows import results_commands
from flows.cli import app
from infra.champion import find_champion
from infra.object_store import DirectoryStore
from infra.promotion import Race
from infra.published_model import publish_model
from infra.run_log import RunLog
from infra.settings import settings
from tasks.records import Latency, Measurement, MeasureSettings, TuningRecord
from tests.infra.sample_records import record, summary, task
from tests.infra.test_published_model import artifact, latency, publication
from tests.infra.test_run_sync import Run, records_of

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def environment(mlflow_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    values = {"TRACKING_URI": mlflow_url, "HOME": str(tmp_path / "home"), "STORE": str(tmp_path / "store")}
    for name, value in values.items():
        monkeypatch.setenv(f"TUNEWRIGHT_{name}", value)
    monkeypatch.setattr(results_commands, "console", Console(width=250))
    settings.cache_clear()
    yield
    settings.cache_clear()


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def measured(number: int, trial: int, repeats: tuple[float, ...], run_id: str, phase: str = "search") -> TuningRecord:
    made = record(trial, 1.0, run_id=run_id, session_id=f"{run_id}-{phase}", workload_key=f"workload{number}")
    name = f"{run_id}-{number}-{trial}-{phase}"
    timed = Measurement(repeats, MeasureSettings(), 0.1, 0.1)
    return replace(made, record_id=name, measurement=timed, candidate_key=f"c{number}-{trial}", phase=phase)


def around(us: float) -> tuple[float, ...]:
    return tuple(us * (1 + n / 1000) for n in (-2, -1, 0, 1, 2, 3))


def finished_run(
    url: str, by_task: dict[int, list[TuningRecord]], tuned_ms: float, version: str, model: str, **params: object
) -> RunLog:
    run_id = f"20261130-10{next(_numbers):04d}-cccccc"
    tags = {"tunewright.run_id": run_id, "tunewright.model": model}
    described = {"trials": 8, "model_digest": "d", "threads": 2, "version.apache-tvm": version, **params}
    log = RunLog.start(url, "results", f"{model} {run_id}", described, tags)
    for number, records in by_task.items():
        log.log_records(task(number), records)
    log.log_tables({task(number).workload_key: records for number, records in by_task.items()})
    made = summary()
    samples = Latency(tuple(tuned_ms * (1 + n / 1000) for n in range(9)))
    same = Latency(tuple(1.8 + n / 1000 for n in range(9)))
    published = replace(made.published, version="", alias="")
    verdict = replace(made.verdict, tuned=samples, onnxruntime=same)
    log.finish(replace(made, verdict=verdict, published=published, artifact=replace(made.artifact, choices=())))
    return log


def test_compare_tells_what_changed_from_noise(mlflow_url: str, tmp_path: Path) -> None:
    old = [measured(3, 1, around(70.0), "night1")]
    night1 = finished_run(
        mlflow_url,
        {0: [measured(0, 1, around(100.0), "night1")], 1: [measured(1, 1, around(50.0), "night1")],
         2: [measured(2, 1, around(80.0), "night1")], 3: old},
        2.0, "0.27.0", "nights",
    )  # fmt: skip
    night2 = finished_run(
        mlflow_url,
        {0: [measured(0, 2, around(60.0), "night2")], 1: [measured(1, 2, around(50.05), "night2")],
         3: old, 4: [measured(4, 1, around(10.0), "night2")]},
        1.5, "0.28.0", "nights",
    )  # fmt: skip
    page = tmp_path / "page.html"
    done = call("compare", night1.tuning_run_id, night2.run_id, "--all", "--html", str(page))
    assert done.exit_code == 0, done.output
    states = {
        name: next(line for line in done.output.splitlines() if f"relu{name} " in line).split("│")[-2].strip()
        for name in range(5)
    }
    assert states == {0: "faster", 1: "noise", 2: "vanished", 3: "same", 4: "new"}
    assert "the model: faster, 0.750 times the latency" in done.output
    assert "shows the machine: noise, 1.000 times" in done.output
    assert "version.apache-tvm" in done.output
    html = page.read_text()
    for text in ("fused_conv2d_add_relu0", "0.28.0", "1 vanished", "exact rank-sum test"):
        assert text in html
    assert "src=" not in html
    assert "http" not in html


def test_a_run_that_died_is_compared_by_its_curves_and_nothing_is_claimed(mlflow_url: str) -> None:
    whole = finished_run(mlflow_url, {0: [measured(0, 1, around(100.0), "whole")]}, 2.0, "0.27.0", "died")
    tags = {"tunewright.run_id": f"{whole.tuning_run_id}-died"}
    died = RunLog.start(mlflow_url, "results", "died", {}, tags)
    died.log_records(task(0), [measured(0, 1, around(60.0), "died")])
    done = call("compare", whole.run_id, died.run_id)
    assert done.exit_code == 0, done.output
    assert "1 unknown (too few repeats were recorded to tell)" in done.output
    assert "running" in done.output


def test_compare_of_an_unknown_run_is_one_line() -> None:
    done = call("compare", "20200101-000000-000000", "x")
    assert done.exit_code == 2
    assert "tunewright sync 20200101-000000-000000" in done.output


def test_history_lists_versions_and_runs_without_one(mlflow_url: str, tmp_path: Path) -> None:
    name, store = f"history-{next(_numbers)}", DirectoryStore(tmp_path / "store")
    for ms in (3.0, 2.0):
        champion = find_champion(mlflow_url, name, "cpu-abc")
        race = Race(latency(ms), champion, latency(3.0)) if champion else Race(latency(ms))
        publish_model(mlflow_url, store, publication(mlflow_url, name, artifact(tmp_path / f"{ms}", ms)), race)
    failed = RunLog.start(mlflow_url, "results", "x", {}, {"tunewright.run_id": name, "tunewright.model": name})
    failed.fail("every trial failed alike")
    picture = tmp_path / "history.png"
    done = call("history", name, "--picture", str(picture))
    assert done.exit_code == 0, done.output
    rows = [line for line in done.output.splitlines() if line.startswith("│ 20")]
    assert [row.split("│")[2].strip() for row in rows] == ["1", "2", "-"]
    assert "champion" in rows[1]
    assert "every trial failed alike" in rows[2]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert call("history", f"{name}-unknown").exit_code == 2


def test_rollback_gives_the_alias_back(mlflow_url: str, tmp_path: Path) -> None:
    name, store = f"rolled-{next(_numbers)}", DirectoryStore(tmp_path / "store")
    assert "the registry has no model" in call("rollback", name).output
    for ms in (3.0, 2.0):
        champion = find_champion(mlflow_url, name, "cpu-abc")
        race = Race(latency(ms), champion, latency(3.0)) if champion else Race(latency(ms))
        publish_model(mlflow_url, store, publication(mlflow_url, name, artifact(tmp_path / f"{ms}", ms)), race)
    done = call("rollback", name, "--why", "wrong scores")
    assert done.exit_code == 0, done.output
    assert f"{name}: champion is version 1 again, it was version 2; by" in done.output
    assert MlflowClient(tracking_uri=mlflow_url).get_model_version_by_alias(name, "champion").version == "1"
    again = call("rollback", name)
    assert again.exit_code == 2
    assert "no version was champion before version 1" in again.output


def test_sync_says_what_it_did(mlflow_url: str, tmp_path: Path) -> None:
    run_id = f"20261130-11{next(_numbers):04d}-dddddd"
    run = Run(mlflow_url, DirectoryStore(tmp_path / "store"), run_id, records_of(run_id))
    run.keep(tmp_path)
    done = call("sync", run_id, "--over")
    assert done.exit_code == 0, done.output
    assert "the run was not there and is made anew" in done.output
    assert "13 measurements of 2 tasks are in MLflow" in done.output
    assert done.output.splitlines()[-1].startswith(run_id)
    assert "0 rows were missing" in call("sync", run_id, "--over").output
