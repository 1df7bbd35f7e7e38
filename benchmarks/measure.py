"""Shows how fast and how trustworthy measuring is: ``make bench-measure`` (see docs/benchmarks.md).

Three parts: ours against stock MetaSchedule, a run killed at random moments, a warm start. Prints one
table; the last line is JSON. Everything lies in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.kills import KillResult, kill_runs, own_command
from benchmarks.stock_tuning import Comparison, compare
from benchmarks.warm_start import Plan, WarmStart, warm_start
from tasks.records import Measurement
from tests.services import prefect_server

PARTS = ("stock", "kills", "warm")
#: The last line has exactly these, null where the part was not run.
KEYS = (
    "valid_per_min", "stock_valid_per_min", "ratio", "stock_final_us", "secs_to_stock_final", "stock_secs",
    "overhead_share", "lost", "doubled", "warm_start_trials", "cold_start_trials",
)  # fmt: skip

Row = tuple[str, str, str, str]


def main() -> None:
    """Run the parts that the command line asks for."""
    arguments = _arguments()
    # An end from outside runs the clean-up too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    threads = min(2, len(os.sched_getaffinity(0)))
    rows: list[Row] = []
    line: dict[str, Any] = dict.fromkeys(KEYS)
    with tempfile.TemporaryDirectory(prefix="tunewright-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for part, run in (("stock", _stock), ("kills", _kills), ("warm", _warm)):
            if part in arguments.only:
                found, values = _timed(part, lambda: run(arguments, folder / part, threads))  # noqa: B023
                rows += found
                line |= values
    _show(rows)
    print(json.dumps(line))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the measuring loop.")
    parser.add_argument("--tasks", type=int, default=3, help="heaviest tasks of the classifier to compare on")
    parser.add_argument("--trials", type=int, default=32, help="trials a task, ours and stock's")
    parser.add_argument("--kills", type=int, default=20, help="moments at which the command is killed")
    parser.add_argument("--warm-trials", type=int, default=160, help="the recogniser's trials, cold and warm")
    parser.add_argument("--other-trials", type=int, default=96, help="trials of each model tuned before it")
    parser.add_argument("--warm-engine", default="relax", choices=("relax", "relay"), help="that starts cold and warm")
    parser.add_argument("--only", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.only = arguments.only or list(PARTS)
    return arguments


def _timed(part: str, run: Callable[[], tuple[list[Row], dict[str, Any]]]) -> tuple[list[Row], dict[str, Any]]:
    """Run a part and say how long it took."""
    started = time.monotonic()
    try:
        return run()
    finally:
        print(f"part {part}: {time.monotonic() - started:.0f} s", file=sys.stderr)


def _stock(arguments: argparse.Namespace, folder: Path, threads: int) -> tuple[list[Row], dict[str, Any]]:
    folder.mkdir()
    found = compare(arguments.tasks, arguments.trials, threads, arguments.seed, folder)
    shares = found.shares()
    values = {
        "valid_per_min": round(found.valid_per_min, 2),
        "stock_valid_per_min": round(found.stock_valid_per_min, 2),
        "ratio": round(found.valid_per_min / found.stock_valid_per_min, 3),
        "stock_final_us": round(found.stock_final_us, 2),
        "secs_to_stock_final": _rounded(found.secs_to_stock_sum),
        "stock_secs": round(found.stock_s, 2),
        "overhead_share": round(shares["own overhead"], 4),
    }
    return [*_task_rows(found), *_total_rows(found), *_share_rows(shares)], values


def _task_rows(found: Comparison) -> list[Row]:
    """Two rows a task: valid measurements a minute, and the latency reached, timed again together."""
    rows = []
    for task in found.tasks:
        short = f"{task.ours_valid} in {task.ours_s:.1f} s"
        if task.cut_short:
            short += f", {task.cut_short} cut short"
        rows.append((f"{task.name}: valid", short, f"{task.stock_valid} in {task.stock_s:.1f} s", f"{task.ratio:.1f}x"))
        faster = task.stock_us.latency_us / task.ours_us.latency_us
        rows.append(("  best latency", _spread(task.ours_us), _spread(task.stock_us), f"{faster:.2f}x"))
    return rows


def _total_rows(found: Comparison) -> list[Row]:
    median, least, greatest = found.ratio_spread()
    reached, in_sum = found.secs_to_stock_final, found.secs_to_stock_sum
    stock_start = f"{found.stock_start_s:.1f} s, of which imports {found.stock_import_s:.1f} s"
    latency = f"{found.stock_final_us / found.ours_final_us:.2f}x"
    return [
        ("start-up", f"{found.ours_start_s:.1f} s", stock_start, ""),
        ("wall time, start-up included", f"{found.ours_s:.1f} s", f"{found.stock_s:.1f} s",
         f"{found.stock_s / found.ours_s:.1f}x"),
        ("valid measurements a minute", f"{found.valid_per_min:.1f}", f"{found.stock_valid_per_min:.1f}",
         f"{found.valid_per_min / found.stock_valid_per_min:.1f}x"),
        ("  without start-up, median of the tasks", "", "", f"{median:.1f}x ({least:.1f} to {greatest:.1f})"),
        ("weighted latency at the end", f"{found.ours_final_us:.1f} us", f"{found.stock_final_us:.1f} us", latency),
        ("time to stock's latency, each task", _seconds(reached), f"{found.stock_s:.1f} s", _part(reached, found)),
        ("time to stock's latency, weighted sum", _seconds(in_sum), f"{found.stock_s:.1f} s", _part(in_sum, found)),
    ]  # fmt: skip


def _share_rows(shares: dict[str, float]) -> list[Row]:
    return [(f"share of wall time: {name}", f"{share:.1%}", "", "") for name, share in shares.items()]


def _kills(arguments: argparse.Namespace, folder: Path, threads: int) -> tuple[list[Row], dict[str, Any]]:
    with _prefect(folder) as url:
        found: KillResult = kill_runs(arguments.kills, arguments.seed, own_command(folder / "run", url, threads))
    ended = f"{found.kills} kills, {found.ended} ended before, {found.seconds:.0f} s"
    rows = [
        ("killed at random moments", ended, "", ""),
        ("  records acknowledged", str(found.acknowledged), f"{found.stored} stored at the end", ""),
        ("  lost", str(found.lost), "", ""),
        ("  doubled", str(found.doubled), "", ""),
    ]
    return rows, {"lost": found.lost, "doubled": found.doubled}


def _warm(arguments: argparse.Namespace, folder: Path, threads: int) -> tuple[list[Row], dict[str, Any]]:
    with _prefect(folder) as url:
        commands = own_command(folder / "cold", url, threads), own_command(folder / "warm", url, threads)
        plan = Plan(arguments.warm_trials, arguments.other_trials, arguments.seed, arguments.warm_engine)
        found: WarmStart = warm_start(plan, threads, commands)
    more = "" if found.reached else " (never)"
    share = f"{found.warm_trials / max(1, found.cold_trials):.2f}x"
    rows = [
        (f"recogniser ({plan.engine}), warm against cold: goal", f"{found.goal_us / 1e3:.2f} ms", "", ""),
        ("  trials to the goal", f"{found.warm_trials}{more}", str(found.cold_trials), share),
        ("  search trials", str(found.warm_total), str(found.cold_total), ""),
        ("  before the search", f"{found.warm_first_us / 1e3:.2f} ms", f"{found.default_us / 1e3:.2f} ms", ""),
        ("  at the end", f"{found.warm_end_us / 1e3:.2f} ms", f"{found.cold_end_us / 1e3:.2f} ms", ""),
    ]
    return rows, {"warm_start_trials": found.warm_trials, "cold_start_trials": found.cold_trials}


def _prefect(folder: Path) -> Any:
    """One real Prefect server for all runs of a part: a context manager that yields its URL."""
    (folder / "prefect").mkdir(parents=True)
    return prefect_server(folder / "prefect")


def _show(rows: Sequence[Row]) -> None:
    table = Table("", "Tunewright", "stock / cold", "ratio (spread)", title="bench-measure")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def _spread(measurement: Measurement) -> str:
    """Median with least and greatest repeat, in microseconds."""
    samples = measurement.comparable_us
    return f"{measurement.latency_us:.1f} us ({min(samples):.1f} to {max(samples):.1f})"


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _part(value: float | None, found: Comparison) -> str:
    return "" if value is None else f"{value / found.stock_s:.2f}x"


if __name__ == "__main__":
    main()
