"""Every error that Tunewright raises.

    TunewrightError
    |-- InputError            what the user gave cannot be used       exit 2, never retried
    |   |-- ModelError        the model: unreadable, unsupported
    |   |-- ShapeError        an input dimension without a size
    |   `-- TargetError       the target: unknown, or not on this machine
    |-- SetupError            this machine or its services             exit 2, never retried
    |   |-- EngineUnavailable the engine's interpreter does not start, or its versions do not match
    |   |-- StoreError        the object store refuses or is away      retried
    |   |-- TrackingError     MLflow refuses or is away                retried
    |   |-- PrefectError      Prefect's server refuses or is away      retried
    |   |-- FleetError        the Dask scheduler is away, or no agent fits      retried
    |   |-- RunInProgress     the model is being tuned for this target already  never retried
    |   `-- DeviceBusy        somebody else is measuring on the device retried
    |-- EngineError           the engine failed at a step
    |   |-- EngineCrashed     its process died                         retried with a new process
    |   `-- EngineTimeout     its process was ended at its time limit  retried with a new process
    |-- TuningFailed          every trial fails alike: the set-up is broken     exit 3, never retried
    `-- VerificationError     the artifact's outputs are wrong         exit 3, never retried

A failed *trial* is none of these: it is data, see ``records.Failure``.
Standard library only, Python 3.10: engines import this file in their own interpreters.
"""

from __future__ import annotations


class TunewrightError(Exception):
    """Base of all. ``str()`` is one line: what failed, with which values, what to do."""

    retried: bool = False
    exit_status: int = 1


class InputError(TunewrightError):
    """What the user gave cannot be used. Raised by the CLI and the import step."""

    exit_status = 2


class ModelError(InputError):
    """The model cannot be read, or holds something no engine translates. Raised by the import step."""


class ShapeError(InputError):
    """An input dimension has no size. Raised by the import step; names input, dimension and flag."""


class TargetError(InputError):
    """The target is unknown or its device is not here. Raised by engines."""


class SetupError(TunewrightError):
    """This machine or one of its services is not ready. Raised by engines and infra."""

    exit_status = 2


class EngineUnavailable(SetupError):
    """An engine's interpreter does not start or its package versions do not match. Raised by child.py."""


class StoreError(SetupError):
    """The object store refuses or cannot be reached. Raised by infra/object_store.py."""

    retried = True


class TrackingError(SetupError):
    """MLflow refuses or cannot be reached. Raised by infra/run_log.py."""

    retried = True


class PrefectError(SetupError):
    """Prefect's server refuses or cannot be reached. Raised by infra/flow_runs.py."""

    retried = True


class FleetError(SetupError):
    """The scheduler cannot be reached, or no agent can do the work. Raised by infra/cluster.py, tasks/fleet.py."""

    retried = True


class RunInProgress(SetupError):
    """Another run tunes the same model for the same target; names its holder. Raised by infra/lease.py."""


class DeviceBusy(SetupError):
    """Another run is measuring on the device. Raised by tasks/engines/measuring/device_lock.py."""

    retried = True


class EngineError(TunewrightError):
    """A step failed inside the engine. Raised by child.py from the engine's reply."""


class EngineCrashed(EngineError):
    """The engine's process died. Raised by child.py; a new process may succeed."""

    retried = True


class EngineTimeout(EngineError):
    """The engine's process was killed at its time limit. Raised by child.py."""

    retried = True


class TuningFailed(TunewrightError):
    """Every trial of every task failed alike: the set-up is broken. Raised by the tune step."""

    exit_status = 3


class VerificationError(TunewrightError):
    """The artifact's outputs differ from the reference. Raised by the verify step; nothing is published."""

    exit_status = 3


def all_errors() -> dict[str, type[TunewrightError]]:
    """Every class of the tree by name: how an engine's error reply becomes an exception again."""
    found: dict[str, type[TunewrightError]] = {}
    pending: list[type[TunewrightError]] = [TunewrightError]
    while pending:
        cls = pending.pop()
        found[cls.__name__] = cls
        pending.extend(cls.__subclasses__())
    return found
