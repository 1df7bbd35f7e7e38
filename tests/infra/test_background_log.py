"""Curves are sent behind the tuning: nobody waits for MLflow, and nothing is lost while it is away."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient

from infra import background_log
from infra.background_log import BackgroundLog
from tasks.errors import TrackingError
from tests.infra.sample_records import record, task
from tests.services import free_port, mlflow_server


def test_an_mlflow_that_was_away_gets_everything_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_log, "RETRY_S", 0.5)
    given = [record(trial, 100.0 - trial) for trial in range(40)]
    port = free_port()
    with mlflow_server(tmp_path, port=port) as url:
        log = BackgroundLog.start(url, "behind", "run", {}, {"tunewright.run_id": "behind"})
        log.log_records(task(0), given[:10])
        log.drain()
        child = log.task_run(task(0))
    # The server is gone: tuning goes on, only who must have it in MLflow is told.
    log.log_records(task(0), given[:30])
    log.log_progress(30, 70.0, 1.0)
    with pytest.raises(TrackingError, match="start it"):
        log.drain()
    log.log_records(task(0), given)
    log.log_progress(40, 60.0, 2.0)
    with mlflow_server(tmp_path, port=port) as url:
        log.drain()
        client = MlflowClient(tracking_uri=url)
        rows = client.get_metric_history(child, "best_latency_us")
        assert [(m.step, m.value) for m in rows] == [(trial, 100.0 - trial) for trial in range(40)]
        progress = client.get_metric_history(log.run_id, "model_latency_us")
        assert [(m.step, m.value) for m in progress] == [(30, 70.0), (40, 60.0)]
