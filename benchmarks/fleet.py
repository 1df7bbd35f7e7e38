"""Shows that the fleet works unattended, survives faults and scales: ``make bench-fleet`` (see docs/fleet.md).

Four parts: from a registered version to its champion with nobody watching; faults at random moments; 1, 4,
16 and 64 simulated devices; a night over unchanged models. Prints one table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PARTS = ("unattended", "faults", "simulated", "nightly")
#: The last line has exactly these, null where the part was not run.
KEYS = (
    "unattended_ok", "faults", "lost", "doubled", "wrong_states",
    "efficiency_4", "efficiency_16", "efficiency_64", "nightly_100_unchanged_s",
)  # fmt: skip

Row = tuple[str, str]


def main() -> None:
    """Run the parts that the command line asks for."""
    arguments = _arguments()
    # An end from outside runs the clean-up too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    rows: list[Row] = []
    line: dict[str, Any] = dict.fromkeys(KEYS)
    parts = {"unattended": _unattended, "faults": _faults, "simulated": _simulated, "nightly": _nightly}
    for name in PARTS:
        if name in arguments.only:
            started = time.monotonic()
            found, values = parts[name](arguments)
            rows += [*found, (f"{name}: seconds", f"{time.monotonic() - started:.0f}")]
            line |= values
    table = Table("figure", "value")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    print(json.dumps(line))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the fleet.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--faults", type=int, default=50, help="faults to survive")
    parser.add_argument("--seed", type=int, default=0, help="of the faults' moments and kinds")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 4, 16, 64], help="simulated devices")
    parser.add_argument("--seconds", type=float, default=90.0, help="of tuning for each number of devices")
    parser.add_argument("--models", type=int, default=100, help="unchanged models of a night")
    return parser.parse_args()


def _unattended(_: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    from benchmarks.fleet_service import unattended

    ok = unattended().ok
    return [("a registered version became a champion unattended", str(ok))], {"unattended_ok": ok}


def _faults(arguments: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    from benchmarks.fleet_faults import strike_often

    with tempfile.TemporaryDirectory(prefix="tunewright-faults-", ignore_cleanup_errors=True) as folder:
        found = strike_often(arguments.faults, arguments.seed, Path(folder))
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found.kinds.items()))
    rows = [
        ("faults", f"{found.faults}: {kinds}"), ("measurements seen in journals", str(found.acknowledged)),
        ("measurements in the store", str(found.stored)), ("lost", str(found.lost)), ("doubled", str(found.doubled)),
        ("in a wrong state", "; ".join(found.wrong) or "nothing"), ("runs that did not begin", str(found.refused)),
    ]  # fmt: skip
    values = {"faults": found.faults, "lost": found.lost, "doubled": found.doubled, "wrong_states": len(found.wrong)}
    return rows, values


def _simulated(arguments: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    from benchmarks.fleet_simulated import throughputs

    found = throughputs(arguments.devices, arguments.seconds)
    one = found[0].trials_per_s / found[0].agents
    rows, values = [], {}
    for each in found:
        efficiency = each.trials_per_s / each.agents / one
        text = f"{each.trials_per_s:.1f} trials a second, {efficiency:.2f} of linear, {each.busy:.0%} of the cores busy"
        gaps = "{:.1f} s (95%: {:.1f} s)".format(*each.gaps_s)
        rows.append((f"{each.agents} simulated devices", f"{text}, {each.doubled} measured twice"))
        rows.append((f"{each.agents} devices, from a session's end to the next trial", gaps))
        cpu = ", ".join(f"{part} {seconds:.2f}" for part, seconds in sorted(each.cpu_s.items()))
        rows.append((f"{each.agents} devices, CPU seconds a session", cpu))
        if f"efficiency_{each.agents}" in KEYS:
            values[f"efficiency_{each.agents}"] = round(efficiency, 3)
    return rows, values


def _nightly(arguments: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    from benchmarks.fleet_service import nightly_unchanged

    seconds = nightly_unchanged(arguments.models)
    return [(f"a night over {arguments.models} unchanged models", f"{seconds:.1f} s")], {
        "nightly_100_unchanged_s": round(seconds, 1)
    }


if __name__ == "__main__":
    main()
