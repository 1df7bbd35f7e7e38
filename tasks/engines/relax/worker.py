"""The engine child's main program: ``python -m tasks.engines.relax.worker '{"target": "cpu", ...}'``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.engines.measuring.serving import serve
from tasks.engines.measuring.zygote import Zygote


def _start(options: Mapping[str, Any]) -> Any:
    """Import TVM, fork the zygote while there are no threads, make the engine."""
    from tasks.engines.relax.bootstrap import import_tvm

    kind = "cuda" if "cuda" in options["target"] else "llvm"
    import_tvm(kind)
    from tasks.engines.measuring.engine import EngineOptions
    from tasks.engines.relax import candidates, execution
    from tasks.engines.relax.engine import RelaxEngine

    zygote = Zygote(
        {
            "build": candidates.make_builder,
            "run": candidates.make_runner,
            "execute": execution.make_executor,
        }
    )
    return RelaxEngine(EngineOptions(**options), zygote)


if __name__ == "__main__":
    serve(_start)
