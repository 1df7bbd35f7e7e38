"""An engine child without TVM: speaks the wire format, and sleeps as long as a recorded measurement took.

python -m benchmarks.simulated_engine OPTIONS    OPTIONS as a real engine gets them
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

from tasks.engines.measuring.journal import Journal, read_journal
from tasks.engines.wire import WIRE_VERSION, from_plain, to_line
from tasks.records import (
    EngineInfo,
    Measurement,
    Session,
    SessionResult,
    Target,
    TuningRecord,
    TuningTask,
    short_hash,
)

#: Seconds that trials of a small conv took on one core of the machine in docs/benchmarks.md, build included.
TRIAL_S = (0.21, 0.24, 0.26, 0.29, 0.31, 0.33, 0.36, 0.38, 0.41, 0.44, 0.47, 0.52, 0.58, 0.66, 0.81, 1.12)
#: What a session spends before its first trial and between batches.
SEARCH_S = 0.6
#: Each session finds something by so much better: there is always something left to search for.
_BETTER = 0.95

INFO = EngineInfo("relax", "simulated", "3", Target("llvm", "{}", "llvm-simulated", 1), "cpu:0", {})


class Simulated:
    """Serves ``tune``; every candidate is new, and its latency near the best that is known."""

    def __init__(self, device: str) -> None:
        self.stopping = False
        self._device = device
        self._dice = random.Random(os.getpid())
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stopping", True))

    def tune(self, session: Session, emit: Any) -> SessionResult:
        """Run the session; records go through the journal as in any engine."""
        self.stopping = False
        time.sleep(SEARCH_S)
        known = [r.latency_us for r in read_journal(session.known_path) if r.latency_us]
        best_us = min(known, default=1000.0) * _BETTER
        done = 0
        with Journal(session.journal_path) as journal:
            for number in range(session.trials):
                if self.stopping or (session.stop_at is not None and time.time() >= session.stop_at):
                    break
                record = self._trial(session, session.task, session.first_trial + number, best_us, emit)
                journal.append(record)
                emit("record", record)
                done += 1
        return SessionResult(session.session_id, session.phase, done, {}, {"search": SEARCH_S})

    def _trial(self, session: Session, task: TuningTask, number: int, best_us: float, emit: Any) -> TuningRecord:
        key = f"{self._dice.getrandbits(64):016x}"
        emit("trial", {"candidate_key": key, "workload_key": task.workload_key, "trial": number, "trace": "[]",
                       "phase": session.phase, "task_name": task.name})  # fmt: skip
        started, seconds = time.time(), self._dice.choice(TRIAL_S)
        time.sleep(seconds)
        latency_us = best_us * self._dice.uniform(1.0, 2.0)
        return TuningRecord(
            record_id=short_hash(session.session_id, task.workload_key, key, session.phase), run_id=session.run_id,
            session_id=session.session_id, engine=INFO.engine, tvm_version=INFO.tvm_version,
            target_key=INFO.target.key, workload_key=task.workload_key, task_name=task.name, candidate_key=key,
            trial=number, phase=session.phase, schedule="[]", started_at=started, device=self._device,
            host="simulated", measurement=Measurement((latency_us,) * 5, session.settings, 0.1, seconds),
        )  # fmt: skip


def main() -> None:
    """Serve until stdin closes or the parent is gone."""
    parent, options = os.getppid(), json.loads(sys.argv[1])
    engine = Simulated(options["device"])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _say({"id": 0, "result": {"wire": WIRE_VERSION, "info": INFO}})
    for line in sys.stdin:
        request = json.loads(line)
        session = from_plain(Session, request["args"]["session"])
        result = engine.tune(session, lambda event, data: _say({"event": event, "data": data}))
        _say({"id": request["id"], "result": result})


def _say(message: Any) -> None:
    sys.stdout.write(to_line(message))
    sys.stdout.flush()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main()
