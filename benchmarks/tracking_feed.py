"""The process that logs a made-up run, as a tuning run does: a session's records when the session ends."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from benchmarks.made_up_run import ENGINE, MODEL, SESSION, MadeUpRun
from infra.background_log import BackgroundLog
from infra.run_log import origin
from tasks.errors import TrackingError
from tasks.records import TuningRecord

EXPERIMENT = "benchmark"
#: How often MLflow, away, is asked again for what is left at the end.
_TRIES = 300


def main() -> None:
    """Log the run that the first argument describes; the last line says how long that took."""
    options = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.WARNING)
    run = MadeUpRun(**options["run"])
    records = {number: list(run.records(number)) for number in range(run.tasks)}
    log = start_log(options["url"], run)
    started = time.monotonic()
    waited_s = feed(log, run, records)
    _drain(log)
    seconds = time.monotonic() - started
    if options["finish"]:
        finish(log, run, records)
    print(json.dumps({"seconds": seconds, "waited_s": waited_s, "sessions": sessions_of(run)}), flush=True)


def _drain(log: BackgroundLog) -> None:
    """Wait until MLflow has everything, also while it is away: the benchmark ends it."""
    for _ in range(_TRIES):
        try:
            return log.drain()
        except TrackingError:
            time.sleep(1.0)
    raise TimeoutError("MLflow stayed away")


def start_log(url: str, run: MadeUpRun) -> BackgroundLog:
    """The run in MLflow."""
    return BackgroundLog.start(url, EXPERIMENT, f"{MODEL} {run.run_id}", params_of(run), tags_of(run))


def params_of(run: MadeUpRun) -> dict[str, object]:
    """Parameters as the flow logs them."""
    versions = {f"version.{name}": version for name, version in ENGINE.versions.items()}
    return {"trials": run.tasks * run.trials, "seed": run.seed, "target_key": ENGINE.target.key, **versions}


def tags_of(run: MadeUpRun) -> dict[str, str]:
    """Tags as the flow sets them."""
    return {**origin(), "tunewright.run_id": run.run_id, "tunewright.model": MODEL}


def sessions_of(run: MadeUpRun) -> int:
    """How many sessions the run has."""
    return run.tasks * -(-run.trials // SESSION)


def feed(log: BackgroundLog, run: MadeUpRun, records: dict[int, list[TuningRecord]]) -> float:
    """Give the log each session's records, all of the task's so far, as fast as it takes them; seconds in it."""
    waited_s = 0.0
    for end in range(SESSION, run.trials + SESSION, SESSION):
        for number in range(run.tasks):
            so_far = tuple(records[number][:end])
            before = time.monotonic()
            log.log_records(run.task(number), so_far)
            waited_s += time.monotonic() - before
    return waited_s


def best_of(run: MadeUpRun, records: dict[int, list[TuningRecord]]) -> dict[str, tuple[str, float]]:
    """The best record's id and latency (us) by workload."""
    best: dict[str, Any] = {}
    for number, found in records.items():
        winner = min((r for r in found if r.latency_us is not None), key=lambda r: r.latency_us or 0.0)
        best[run.task(number).workload_key] = winner.record_id, winner.latency_us
    return best


def finish(log: BackgroundLog, run: MadeUpRun, records: dict[int, list[TuningRecord]]) -> None:
    """Tables, figures, report and pictures."""
    by_key = {run.task(number).workload_key: found for number, found in records.items()}
    log.log_fused(run.fused(), {run.task(n).name: 1 / run.tasks for n in range(run.tasks)})
    log.log_tables(by_key)
    log.finish(run.summary(best_of(run, records)))


if __name__ == "__main__":
    main()
