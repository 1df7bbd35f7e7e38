"""The one boundary to MLflow: a client for an explicit URI, retries, foreign errors translated.

Nothing here touches MLflow's global state (active run, tracking URI), so that several runs can be
logged from one process. MLflow is imported late: it takes seconds.
"""

from __future__ import annotations

import json
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlparse

from tenacity import (
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential_jitter,
)

from tasks.errors import TrackingError

T = TypeVar("T")

#: MLflow's own retries take minutes, during which nobody is told anything. A user's values win.
_PATIENCE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    # Tuning machines often reach no address outside, and their owners did not ask to be counted.
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # The last line that a command prints is for programs.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_TRANSIENT = {"INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED"}
_DENIED = {"UNAUTHENTICATED", "PERMISSION_DENIED"}

#: MLflow's limits: metrics and parameters in one call, and a parameter's or tag's length.
METRICS_A_CALL = 1000
PARAMS_A_CALL = 100
TEXT_LENGTH = 5000


def run_page(server_url: str, experiment_id: str, run_id: str, tab: str = "") -> str:
    """A run's page. MLflow's UI takes a plain link for one to a language model's evaluation and hides the report."""
    return f"{server_url}/#/experiments/{experiment_id}/runs/{run_id}{tab}?workflowType=machine_learning"


class Tracking:
    """An MLflow server or database at ``uri``. Connects at the first call."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    @property
    def is_server(self) -> bool:
        """Whether MLflow is behind HTTP; otherwise this process works on its database."""
        return urlparse(self.uri).scheme in ("http", "https")

    def check(self) -> None:
        """Raise TrackingError within about 15 seconds where MLflow cannot be reached or written."""
        if self.is_server:
            self._check_server()
        elif urlparse(self.uri).scheme == "sqlite":
            self._check_file(Path(self.uri.split("///", 1)[-1]))
        self.call("list experiments", lambda client: client.search_experiments(max_results=1))

    def call(self, doing: str, call: Callable[[Any], T]) -> T:
        """``call`` with an MlflowClient; transient failures are tried again. Raises TrackingError.

        ``call`` may run more than once: it must leave one trace however often it runs.
        """
        from sqlalchemy.exc import SQLAlchemyError

        attempts = Retrying(
            retry=retry_if_exception(_is_transient),
            stop=stop_after_attempt(3) | stop_after_delay(20),
            wait=wait_exponential_jitter(multiplier=0.3, max=3),
            reraise=True,
        )
        try:
            return attempts(lambda: call(self._client))
        except (self._mlflow_exception, SQLAlchemyError, OSError) as error:
            raise self._translated(doing, error) from error

    def experiment_id(self, name: str) -> str:
        """The experiment's id; it is created where it is missing. Raises TrackingError."""

        def find_or_create(client: Any) -> str:
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                # Without its kind MLflow's UI files the runs under evaluations of language models.
                kind = {"mlflow.experimentKind": "custom_model_development"}
                return str(client.create_experiment(name, self._artifact_location(), kind))
            if experiment.lifecycle_stage != "active":
                raise TrackingError(
                    f"MLflow experiment {name!r} at {self.uri} is deleted; restore it "
                    f"(mlflow experiments restore -x {experiment.experiment_id}) "
                    "or set TUNEWRIGHT_EXPERIMENT"
                )
            return str(experiment.experiment_id)

        return self.call(f"open experiment {name!r}", find_or_create)

    def run_page(self, run_id: str) -> str:
        """Where a browser finds the run; empty where MLflow is no server. Raises TrackingError."""
        if not self.is_server:
            return ""
        run = self.call("look for a run", lambda client: client.get_run(run_id))
        base = urlparse(self.uri)._replace(netloc=urlparse(self.uri).netloc.rpartition("@")[2]).geturl().rstrip("/")
        return run_page(base, run.info.experiment_id, run_id)

    def log_params(self, run_id: str, params: Mapping[str, object]) -> None:
        """Log the parameters that the run does not have: MLflow refuses to change one."""

        def log(client: Any) -> None:
            from mlflow.entities import Param

            known = client.get_run(run_id).data.params
            new = [Param(k, str(v)[:TEXT_LENGTH]) for k, v in params.items() if k not in known]
            for start in range(0, len(new), PARAMS_A_CALL):
                client.log_batch(run_id, params=new[start : start + PARAMS_A_CALL])

        self.call("log parameters", log)

    def log_metrics(self, run_id: str, rows: Sequence[tuple[str, float, int, int]]) -> None:
        """Log rows of key, value, timestamp (ms) and step. The same row twice leaves one."""
        from mlflow.entities import Metric

        for start in range(0, len(rows), METRICS_A_CALL):
            batch = [Metric(*row) for row in rows[start : start + METRICS_A_CALL]]
            self.call("log metrics", methodcaller("log_batch", run_id, metrics=batch))

    def set_tags(self, run_id: str, tags: Mapping[str, object]) -> None:
        """Set the run's tags; later values replace earlier ones."""
        from mlflow.entities import RunTag

        made = [RunTag(key, str(value)[:TEXT_LENGTH]) for key, value in tags.items()]
        self.call("set tags", lambda client: client.log_batch(run_id, tags=made))

    def log_files(
        self, run_id: str, write: Callable[[Path], object], folder: str = "", tables: Sequence[str] = ()
    ) -> None:
        """Log what ``write`` puts into the directory it is given; files of the same name are replaced.

        ``tables`` names JSON files that the UI shows as tables. ``MlflowClient.log_table`` itself
        appends to what is there, so that logging again would double it.
        """
        with tempfile.TemporaryDirectory() as scratch:
            write(Path(scratch))
            self.call("log artifacts", lambda client: client.log_artifacts(run_id, scratch, folder or None))
        if tables:
            shown = [{"path": name, "type": "table"} for name in tables]
            self.set_tags(run_id, {"mlflow.loggedArtifacts": json.dumps(shown)})

    @cached_property
    def _client(self) -> Any:
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    @property
    def _mlflow_exception(self) -> type[Exception]:
        from mlflow.exceptions import MlflowException

        return MlflowException

    def _artifact_location(self) -> str | None:
        """Beside the database, where there is no server: MLflow's default is the working directory."""
        if urlparse(self.uri).scheme != "sqlite":
            return None
        return (Path(self.uri.split("///", 1)[-1]).absolute().parent / "mlartifacts").as_uri()

    def _check_server(self) -> None:
        attempts = Retrying(stop=stop_after_attempt(3), wait=wait_exponential_jitter(max=2), reraise=True)
        try:
            attempts(_answers, self.uri.rstrip("/") + "/health")
        except OSError as error:
            raise self._translated("reach it", error) from error

    def _check_file(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab"):
                pass
        except OSError as error:
            raise TrackingError(
                f"cannot write MLflow's database {path}: {error.strerror}; "
                "make its directory writable or set MLFLOW_TRACKING_URI"
            ) from error

    def _translated(self, doing: str, error: Exception) -> TrackingError:
        code = getattr(error, "error_code", "")
        if code in _DENIED:
            advice = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        elif code in _TRANSIENT or isinstance(error, OSError):
            advice = "start it, check the network, or set MLFLOW_TRACKING_URI"
        else:
            advice = f"MLflow refused this ({code or type(error).__name__})"
        reason = " ".join(str(error).split())[:300]
        return TrackingError(f"MLflow at {_without_password(self.uri)}: cannot {doing}: {reason}; {advice}")


def _without_password(uri: str) -> str:
    password = urlparse(uri).password
    return uri.replace(f":{password}@", ":***@") if password else uri


def _answers(url: str) -> None:
    """Any answer is a server, a refusal included; only a gateway's own error is none."""
    try:
        urllib.request.urlopen(url, timeout=4).close()  # noqa: S310 - the scheme is http or https
    except urllib.error.HTTPError as error:
        if error.code in (502, 503, 504):
            raise


def _is_transient(error: BaseException) -> bool:
    from sqlalchemy.exc import OperationalError

    if isinstance(error, TrackingError):
        return False
    return getattr(error, "error_code", "") in _TRANSIENT or isinstance(error, (OperationalError, OSError))
