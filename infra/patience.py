"""Waiting for services that are away for a while: a restart costs a run time, and nothing else."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from infra.settings import settings
from tasks.errors import TunewrightError

logger = logging.getLogger("tunewright")

T = TypeVar("T")
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 10.0


def patiently(doing: str, call: Callable[[], T], patience_s: float | None = None) -> T:
    """``call``, again and again while it raises an error that is worth another try.

    For ``patience_s`` at most, by default the setting. Raises what the last try raised.
    """
    deadline = time.monotonic() + (settings().outage_patience_s if patience_s is None else patience_s)
    wait_s = _FIRST_WAIT_S
    while True:
        try:
            return call()
        except TunewrightError as error:
            left_s = deadline - time.monotonic()
            if not error.retried or left_s <= 0:
                raise
            logger.warning("%s: %s; tried again for %.0f s", doing, error, left_s)
        time.sleep(min(wait_s, max(0.0, left_s)))
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
