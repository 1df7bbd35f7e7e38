"""Whether candidates are timed with a cold cache: as their model will run them.

Called again and again, a kernel finds its weights in the cache. In a model whose weights do not fit there it
reads them from memory at every run, and what wins a warm race may lose there.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tasks.records import EngineInfo, MeasureSettings, ModelFile

#: Of the last-level cache weights may take this part before they count as not fitting: a run has activations too.
_FOR_WEIGHTS = 0.5
#: Only the first call after a flush is a cold one: so many single calls are timed for each repeat.
_CALLS = 3


def for_model(settings: MeasureSettings, flush: bool | None, model: ModelFile, info: EngineInfo) -> MeasureSettings:
    """``settings`` for the candidates of ``model`` on the device of ``info``.

    ``flush``: what the user wants; None lets the size of the weights decide, which that of the model's files is.
    """
    if flush is None:
        path = Path(model.path)
        size = sum(file.stat().st_size for file in path.parent.glob(f"{path.stem}*"))
        flush = 0 < _FOR_WEIGHTS * info.cache_bytes < size
    if not flush:
        return settings
    return dataclasses.replace(settings, flush_cache=True, number=1, min_repeat_ms=0, repeat=_CALLS * settings.repeat)
