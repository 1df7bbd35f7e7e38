"""The engine child's main program: ``python -m tasks.engines.relay.worker '{"target": "cpu", ...}'``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.engines.measuring.serving import serve
from tasks.engines.measuring.zygote import Zygote


def _start(options: Mapping[str, Any]) -> Any:
    """Import TVM, fork the zygote while there are no threads, make the engine. Raises EngineUnavailable."""
    from tasks.engines.relay.bootstrap import import_tvm

    import_tvm()
    from tasks.engines.measuring.engine import EngineOptions
    from tasks.engines.relay import candidates, execution
    from tasks.engines.relay.engine import RelayEngine

    zygote = Zygote(
        {
            "build": candidates.make_builder,
            "run": candidates.make_runner,
            "execute": execution.make_executor,
        }
    )
    return RelayEngine(EngineOptions(**options), zygote)


if __name__ == "__main__":
    serve(_start)
