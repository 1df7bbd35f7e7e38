"""Imports a TVM that still has Relay and AutoTVM, or says in one line why this is none."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import warnings
from typing import Any

from tasks.engines.failure_text import last_line
from tasks.errors import EngineUnavailable

_REMEDY = "name an interpreter whose TVM has it with TUNEWRIGHT_RELAY_PYTHON ('make relay-env' makes one)"


def import_tvm() -> Any:
    """TVM, quiet. Raises EngineUnavailable."""
    # AutoTVM logs every fallback config; what matters of it is in the records.
    logging.getLogger("autotvm").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning)
    os.environ.setdefault("TVM_LOG_DEBUG", "")
    try:
        tvm = importlib.import_module("tvm")
    except Exception as error:  # a foreign library may fail to load in any way
        raise EngineUnavailable(f"the relay engine's Python has no TVM ({_one_line(error)}): {_REMEDY}") from error
    found = getattr(tvm, "__version__", "unknown")
    for part, what in (("tvm.relay", "Relay"), ("tvm.autotvm", "AutoTVM")):
        try:
            importlib.import_module(part)
        except Exception as error:
            reason = f"TVM {found} has no {what} ({_one_line(error)})"
            raise EngineUnavailable(f"{reason}: {_REMEDY}") from error
    for package in ("onnx", "xgboost"):
        if importlib.util.find_spec(package) is None:
            raise EngineUnavailable(f"the relay engine's Python has no {package}: install it beside TVM {found}")
    from tasks.engines.relay import lowering

    # Before anything is lowered: TVM looks the function up once.
    lowering.install()
    return tvm


def _one_line(error: Exception) -> str:
    return last_line(error, type(error).__name__)[:200]
