"""The relay engine's interpreter, and the mark of tests that need it."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.settings import Settings


def relay_python() -> Path:
    """TUNEWRIGHT_RELAY_PYTHON, or the environment that ``make relay-env`` sets up."""
    return Settings().relay_python


needs_relay = pytest.mark.skipif(
    not relay_python().exists(),
    reason="NOT TESTED: the relay engine, which needs Python 3.10: run 'make relay-env' or set TUNEWRIGHT_RELAY_PYTHON",
)
