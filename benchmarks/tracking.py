"""Shows that MLflow holds a night of measurements: ``make bench-tracking`` (see docs/results.md).

Two made-up runs go to a real MLflow server over HTTP on SQLite. The first as fast as it can: the rate,
and how long its page takes in headless Chromium. While the second is logged MLflow is killed and started
again, then the logging process is killed, and the rest is filled in from the object store. What MLflow's
database has is compared with what was given. Prints a table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.browser import Page, chromium, open_browser
from benchmarks.made_up_run import ENGINE, MODEL, MadeUpRun
from benchmarks.tracking_feed import EXPERIMENT, best_of, params_of, tags_of
from infra.object_store import DirectoryStore
from infra.record_store import RecordStore
from infra.run_log import WORKLOAD_TAG
from infra.run_manifest import RunManifest
from infra.run_sync import sync_run
from infra.tracking import Tracking, run_page
from tasks.engines import wire
from tests.services import free_port, mlflow_server

KEYS = ("measurements", "per_sec", "lost", "doubled", "run_page_s")
_LOADS = 3
#: MLflow is away so long.
_AWAY_S = 3.0
#: Charts take so long to be drawn once their page has its text.
_SETTLE_S = 6.0
#: Closes MLflow's assistant, and opens a long description.
_TIDY = """
[...document.querySelectorAll('button')].filter(b => /close/i.test(b.ariaLabel || '')).forEach(b => b.click());
[...document.querySelectorAll('button, a')].filter(b => b.innerText === 'Show more').forEach(b => b.click());
"""
_CURVES = ("latency_us", "best_latency_us", "predicted_us")

#: Of one workload: key, step, time in milliseconds, value.
Rows = Counter[tuple[str, int, int, float]]


def main() -> None:
    """Run both nights, look at them, count."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    now = time.time()
    size = arguments.tasks, arguments.trials
    nights = [
        MadeUpRun("20261129-230000-aaaaaa", *size, seed=1, began=now - 90_000),
        MadeUpRun("20261130-230000-bbbbbb", *size, seed=2, began=now - 3_600),
    ]
    line: dict[str, Any] = dict.fromkeys(KEYS)
    with tempfile.TemporaryDirectory(prefix="tunewright-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        port = free_port()
        with mlflow_server(folder, port=port) as url:
            fed = _feed(url, nights[0], finish=True)
            first = _count(folder, nights[0])
            notes = _durability(folder, port, nights[1], arguments)
        with mlflow_server(folder, port=port) as url:
            second = _count(folder, nights[1])
            page_s = _look(url, nights, arguments.images) if chromium() else None
    measurements = arguments.tasks * arguments.trials
    line |= {
        "measurements": measurements, "per_sec": round(measurements / fed["seconds"], 1),
        "lost": first[0] + second[0], "doubled": first[1] + second[1],
        "run_page_s": None if page_s is None else round(page_s, 2),
    }  # fmt: skip
    _show(fed, notes, line)
    print(json.dumps(line))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Log a night of measurements.")
    parser.add_argument("--tasks", type=int, default=50, help="tuning tasks in each run")
    parser.add_argument("--trials", type=int, default=2000, help="trials a task")
    parser.add_argument("--images", type=Path, help="folder for pictures of the pages")
    return parser.parse_args()


def _command(url: str, run: MadeUpRun, finish: bool) -> list[str]:
    options = {"url": url, "run": vars(run), "finish": finish}
    return [sys.executable, "-m", "benchmarks.tracking_feed", json.dumps(options)]


def _feed(url: str, run: MadeUpRun, finish: bool) -> dict[str, float]:
    """Log a run undisturbed; what the process says of it."""
    done = subprocess.run(_command(url, run, finish), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"logging failed:\n{done.stderr[-3000:]}")
    said: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return said


def _durability(folder: Path, port: int, run: MadeUpRun, arguments: argparse.Namespace) -> list[str]:
    """Kill MLflow at a third of the rows, the logging process at two thirds, and fill in the rest."""
    records = {number: list(run.records(number)) for number in range(run.tasks)}
    store = DirectoryStore(folder / "store")
    manifest = RunManifest(store, run.run_id)
    manifest.write_start(f"{MODEL} {run.run_id}", EXPERIMENT, params_of(run), tags_of(run), ENGINE)
    manifest.write_tasks(run.fused(), [run.task(n) for n in records], {})
    kept = RecordStore(store, ENGINE.engine, ENGINE.tvm_version, ENGINE.target.key)
    for number, found in records.items():
        journal = folder / f"journal-{number}.jsonl"
        journal.write_text("".join(map(wire.to_line, found)))
        kept.upload_session(journal)
    url = f"http://127.0.0.1:{port}"
    wanted = arguments.tasks * arguments.trials
    before = _rows_in(folder)
    with (folder / "feed.log").open("wb") as log:
        process = subprocess.Popen(_command(url, run, finish=False), stdout=log, stderr=log)
    try:
        at_kill = _wait_for_rows(folder, before + wanted // 3, process)
        _kill_server(port)
        time.sleep(_AWAY_S)
        with mlflow_server(folder, port=port):
            at_death = _wait_for_rows(folder, before + 2 * wanted // 3, process)
            process.kill()
            process.wait()
            manifest.write_end(run.summary(best_of(run, records)))
            started = time.monotonic()
            synced = sync_run(url, store, run.run_id)
    finally:
        process.kill()
    return [
        f"MLflow killed when it had {at_kill - before} measurements, back after {_AWAY_S:g} s",
        f"the logging process killed when MLflow had {at_death - before}",
        f"the rest filled in by sync: {synced.rows} rows in {time.monotonic() - started:.1f} s",
    ]


def _kill_server(port: int) -> None:
    """SIGKILL to the MLflow server on ``port``, workers included: each server has a process group."""
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if "mlflow" in process.cmdline() and str(port) in process.cmdline():
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _database(folder: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(f"file:{folder / 'mlflow.db'}?mode=ro", uri=True, timeout=60)
    try:
        yield connection
    finally:
        connection.close()


def _rows_in(folder: Path) -> int:
    """Measurements in MLflow's database; each has a predicted latency."""
    with _database(folder) as database:
        return int(database.execute("SELECT count(*) FROM metrics WHERE key = 'predicted_us'").fetchone()[0])


def _wait_for_rows(folder: Path, rows: int, process: subprocess.Popen[bytes]) -> int:
    while (found := _rows_in(folder)) < rows:
        if process.poll() is not None:
            raise RuntimeError(f"the logging process ended early:\n{(folder / 'feed.log').read_text()[-3000:]}")
        time.sleep(0.1)
    return found


def _count(folder: Path, run: MadeUpRun) -> tuple[int, int]:
    """Measurements that MLflow's database lacks of ``run``, and rows that it has more than once."""
    lost = doubled = 0
    with _database(folder) as database:
        runs = database.execute(
            "SELECT t.value, t.run_uuid FROM tags t JOIN tags p ON p.run_uuid = t.run_uuid "
            "JOIN tags r ON r.run_uuid = p.value WHERE t.key = ? AND p.key = 'mlflow.parentRunId' "
            "AND r.key = 'tunewright.run_id' AND r.value = ?",
            (WORKLOAD_TAG, run.run_id),
        )
        children: dict[str, list[str]] = {}
        for workload, child in runs:
            children.setdefault(workload, []).append(child)
        for number in range(run.tasks):
            found: Rows = Counter()
            for child in children.get(run.task(number).workload_key, ()):
                sql = "SELECT key, step, timestamp, value FROM metrics WHERE run_uuid = ?"
                found.update(row for row in database.execute(sql, (child,)) if row[0] in _CURVES)
            wanted, best = _given(run, number)
            lost += len({(step, at) for _, step, at, _ in wanted - found})
            at_one_point = Counter((key, step, at) for key, step, at, _ in found.elements())
            doubled += sum(count - 1 for count in at_one_point.values()) + sum((found - wanted - best).values())
    return lost, doubled


def _given(run: MadeUpRun, number: int) -> tuple[Rows, Rows]:
    """The rows that a task's records must leave, and points that the curve of the best latency may have besides."""
    rows: Rows = Counter()
    curve: Rows = Counter()
    best = float("inf")
    for record in run.records(number):
        at = int(record.started_at * 1000)
        if record.latency_us is not None:
            falls, best = record.latency_us < best, min(best, record.latency_us)
            rows["latency_us", record.trial, at, record.latency_us] += 1
            (rows if falls else curve)["best_latency_us", record.trial, at, best] += 1
        if record.predicted_us is not None:
            rows["predicted_us", record.trial, at, record.predicted_us] += 1
    return rows, curve


def _look(url: str, nights: list[MadeUpRun], images: Path | None) -> float:
    """Seconds until the parent run's page shows its report; with ``images`` pictures of all pages."""
    from flows.results_page import comparison_page
    from infra.compare import compare_runs

    comparison = compare_runs(url, *(night.run_id for night in nights))
    client = Tracking(url)
    run = comparison.after  # it has a night before it to differ from
    experiment = client.experiment_id(EXPERIMENT)
    wanted = f"tags.`{WORKLOAD_TAG}` = '{nights[1].task(0).workload_key}'"
    child = client.call("find a child", lambda c: c.search_runs([experiment], wanted)[0].info.run_id)
    parent = run_page(url, experiment, run.mlflow_run_id)
    with open_browser() as page:
        loads = [page.open(parent, ("times as fast",)) for _ in range(_LOADS)]
        if images is not None:
            images.mkdir(parents=True, exist_ok=True)
            _picture(page, images / "results-run.png")
            page.open(f"{url}/#/experiments/{experiment}/runs?workflowType=machine_learning", (run.name,))
            _picture(page, images / "results-runs.png")
            page.open(run_page(url, experiment, child, "/model-metrics"), ("best_latency_us",))
            _picture(page, images / "results-task.png")
            html = images.absolute() / "comparison.html"
            html.write_text(comparison_page(comparison))
            page.open(html.as_uri(), ("By subgraph",))
            _picture(page, images / "results-comparison.png")
            html.unlink()
    return statistics.median(loads)


def _picture(page: Page, path: Path) -> None:
    """The page as it is after a moment, since charts are drawn after the text; without the assistant's panel."""
    page.evaluate(_TIDY)
    time.sleep(_SETTLE_S)
    page.picture(path)


def _show(fed: dict[str, float], notes: list[str], line: dict[str, Any]) -> None:
    table = Table(show_header=False)
    table.add_row("measurements a run", str(line["measurements"]))
    table.add_row("logged a second", f"{line['per_sec']:g}")
    waited_ms = fed["waited_s"] / fed["sessions"] * 1000
    table.add_row("the tuning waited", f"{waited_ms:.2f} ms a session of 16 trials")
    for note in notes:
        table.add_row("", note)
    table.add_row("lost, doubled", f"{line['lost']}, {line['doubled']}")
    table.add_row("parent run's page", "no Chromium" if line["run_page_s"] is None else f"{line['run_page_s']:g} s")
    Console().print(table)


if __name__ == "__main__":
    main()
