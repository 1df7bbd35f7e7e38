"""An engine that is real, and kills its agent's worker in a search of the task that the file $POISON names."""

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tasks.engines.measuring.engine import MeasuringEngine

_tune = MeasuringEngine.tune


def _poisoned(self: MeasuringEngine, session: Any, emit: Any, stop: Any) -> Any:
    poison = Path(os.environ["POISON"])
    if session.phase == "search" and poison.exists() and session.task.name == poison.read_text():
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    return _tune(self, session, emit, stop)


MeasuringEngine.tune = _poisoned  # type: ignore[method-assign]
# As the agent calls it: -m tasks.engines.relax.worker OPTIONS
sys.argv = sys.argv[2:]
runpy.run_module("tasks.engines.relax.worker", run_name="__main__", alter_sys=True)
