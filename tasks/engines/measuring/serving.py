"""An engine child's main loop: requests from stdin, events and replies to stdout, its log to stderr.

See wire.py. Standard library only, Python 3.10.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from tasks.engines.interface import BuildRequest, ExecutionRequest
from tasks.engines.wire import WIRE_VERSION, error_to_plain, from_plain, to_line
from tasks.errors import EngineError
from tasks.records import FusedModule, ImportedModule, ModelFile, Session

_PARENT_POLL_S = 0.5


class Stop:
    """Set by SIGTERM: end the session after the trial in flight."""

    def __init__(self) -> None:
        self.wanted = False
        signal.signal(signal.SIGTERM, self._set)

    def _set(self, *_: Any) -> None:
        self.wanted = True


def serve(start: Callable[[Mapping[str, Any]], Any]) -> None:
    """Make the engine with ``start``, which gets the options of the command line; serve until stdin closes."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what TVM prints must not be taken for a reply
    stop = Stop()
    options = json.loads(sys.argv[1])
    try:
        engine = start(options)
    except BaseException as error:
        replies.write(to_line({"id": 0, "error": error_to_plain(error, traceback.format_exc())}))
        sys.exit(1)
    # Only now: a thread must not exist when the zygote is forked.
    threading.Thread(target=_die_with, args=(parent, options["scratch"]), daemon=True).start()
    replies.write(to_line({"id": 0, "result": {"wire": WIRE_VERSION, "info": engine.describe()}}))
    for line in sys.stdin:
        request = json.loads(line)
        stop.wanted = False

        def emit(event: str, data: Any) -> None:
            replies.write(to_line({"event": event, "data": data}))

        try:
            result = _serve(engine, request, emit, lambda: stop.wanted)
            replies.write(to_line({"id": request["id"], "result": result}))
        except Exception as error:
            traceback.print_exc()
            if not engine.is_healthy():
                sys.exit("the fork server has died")
            replies.write(to_line({"id": request["id"], "error": error_to_plain(error, traceback.format_exc())}))
    engine.close()


def _die_with(parent: int, scratch: str) -> None:
    """End this process and all that it started when its parent has ended, however it ended.

    The kernel's signal for that comes when the *thread* ends that started this process, which may be one
    of a pool.
    """
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _serve(engine: Any, request: Mapping[str, Any], emit: Callable[[str, Any], None], stop: Callable[[], bool]) -> Any:
    """Answer one request. Raises what the verb raises, EngineError for a verb that does not exist."""
    args = request["args"]
    verb = request["verb"]
    if verb == "describe":
        return engine.describe()
    if verb == "import_model":
        return engine.import_model(from_plain(ModelFile, args["model"]))
    if verb == "fuse":
        return engine.fuse(from_plain(ImportedModule, args["imported"]), args["granularity"])
    if verb == "extract":
        return engine.extract(from_plain(FusedModule, args["fused"]), args["out_dir"])
    if verb == "tune":
        return engine.tune(from_plain(Session, args["session"]), emit, stop)
    if verb == "build":
        return engine.build(from_plain(BuildRequest, args["request"]))
    if verb == "execute":
        return engine.execute(from_plain(ExecutionRequest, args["request"]))
    raise EngineError(f"engines have no verb {verb!r}")
