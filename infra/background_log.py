"""Logging behind the tuning: a thread brings curves to MLflow while the next session is already planned.

Nothing waits for MLflow but the end of the run. What is queued in memory is in the journal or the
store already: a killed process loses nothing that ``tunewright sync`` would not fill in.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from infra.run_log import RunLog
from tasks.errors import TrackingError
from tasks.records import FusedModule, TuningRecord, TuningSummary, TuningTask

logger = logging.getLogger("tunewright")

#: Pause before MLflow is tried again after it was away.
RETRY_S = 10.0


class BackgroundLog(RunLog):
    """A RunLog whose curves are sent by a thread of its own; everything else waits until they are sent.

    ``log_records`` and ``log_progress`` raise nothing: MLflow away is tried again, at last by the method
    that ends the run, which raises TrackingError where it is away still.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._waiting: dict[str, tuple[TuningTask, Sequence[TuningRecord]]] = {}
        self._progress: list[tuple[str, float, int, int]] = []
        self._changed = threading.Condition()
        #: Held by whoever sends: the thread, or a caller that drains.
        self._sending = threading.Lock()
        self._warned = False
        self._thread: threading.Thread | None = None

    def log_records(self, task: TuningTask, records: Sequence[TuningRecord]) -> None:
        """Queue all of the task's records so far; what is queued of the task already is replaced."""
        with self._changed:
            self._waiting[task.workload_key] = task, records
            self._wake()

    def log_progress(self, trials_done: int, estimate_us: float, elapsed_s: float) -> None:
        """Queue a point of the model's curve."""
        with self._changed:
            self._progress += self.progress_rows(trials_done, estimate_us, elapsed_s)
            self._wake()

    def drain(self) -> None:
        """Return when MLflow has all that is queued. Raises TrackingError."""
        while True:
            with self._sending:
                if not self._send_next():
                    return

    def log_fused(self, fused: FusedModule, share: Mapping[str, float]) -> None:
        """See RunLog."""
        with self._sending:
            super().log_fused(fused, share)

    def log_tables(self, records_by_task: Mapping[str, Sequence[TuningRecord]]) -> None:
        """See RunLog."""
        self.drain()
        super().log_tables(records_by_task)

    def finish(self, summary: TuningSummary, at: float | None = None) -> None:
        """See RunLog."""
        self.drain()
        super().finish(summary, at)

    def fail(self, reason: str, at: float | None = None) -> None:
        """See RunLog."""
        self.drain()
        super().fail(reason, at)

    def _wake(self) -> None:
        if self._thread is None:
            # A daemon: a flow that ends without draining must not be held by an MLflow that is away.
            self._thread = threading.Thread(target=self._work, name="mlflow-log", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._progress)
            try:
                self.drain()
                self._warned = False
            except TrackingError as error:
                if not self._warned:
                    logger.warning("%s; the measurements are kept and logged later", error)
                self._warned = True
                with self._changed:
                    self._changed.wait(RETRY_S)

    def _send_next(self) -> bool:
        """Send what one task has queued, or the model's curve; False where nothing is queued."""
        with self._changed:
            key = next(iter(self._waiting), None)
            queued = None if key is None else self._waiting.pop(key)
            rows, self._progress = self._progress, []
        try:
            if queued is not None:
                super().log_records(*queued)
            if rows:
                self._send(self.run_id, rows)
                rows = []
        except TrackingError:
            with self._changed:
                if queued is not None and key is not None:
                    self._waiting.setdefault(key, queued)
                self._progress = rows + self._progress
            raise
        return queued is not None
