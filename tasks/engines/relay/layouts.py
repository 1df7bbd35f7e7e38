"""The graph-level layout of convolutions on CPUs: which channel blocks they read and write.

TVM packs the tensors of each convolution as its own config says. Where two neighbours say different blocks,
a layout transform runs between them, and these eat what tuning gained. Here a tensor's block depends on
its number of channels alone, so that neighbours always agree.
"""

from __future__ import annotations

from typing import Any

from tvm.autotvm.task.dispatcher import DispatchContext
from tvm.autotvm.task.space import FallbackConfigEntity, SplitEntity

_BLOCKED = ("conv2d_NCHWc.x86", "depthwise_conv2d_NCHWc.x86")


class BlockedLayouts(DispatchContext):  # type: ignore[misc]
    """Answers AlterOpLayout: blocks of at most ``lanes`` channels."""

    def __init__(self, lanes: int) -> None:
        super().__init__()
        self._lanes = lanes

    def _query_inside(self, target: Any, workload: Any) -> Any:  # noqa: ARG002 - the signature is TVM's
        config = FallbackConfigEntity()
        if workload[0] not in _BLOCKED or len(workload[1][1]) != 4:
            return config
        data, kernel = workload[1:3]
        config.is_fallback = False
        config.cost = 0.0
        depthwise = workload[0].startswith("depthwise")
        read = channel_block(int(data[1][1]), self._lanes)
        written = channel_block(int(kernel[1][0]), self._lanes)
        # A depthwise convolution computes in the block that it reads, unless it multiplies the channels.
        config["tile_ic"] = SplitEntity([-1, read])
        config["tile_oc"] = SplitEntity([-1, read if depthwise and data[1][1] == kernel[1][0] else written])
        config["tile_ow"] = SplitEntity([-1, 1])
        return config

    def update(self, target: Any, workload: Any, cfg: Any) -> None:
        """Configs are chosen subgraph by subgraph later; AlterOpLayout's need not be kept."""


def channel_block(channels: int, lanes: int) -> int:
    """The largest divisor of ``channels`` that is at most ``lanes``."""
    return max(size for size in range(1, min(channels, lanes) + 1) if channels % size == 0)


def simd_lanes(target: Any) -> int:
    """How many floats of 32 bits a vector register of the target's CPU holds."""
    text = f"{target.attrs.get('mcpu', '')} {' '.join(map(str, target.attrs.get('mattr', []) or []))}"
    wide = ("avx512", "skylake-avx512", "cascadelake", "icelake", "cannonlake", "sapphirerapids", "znver4", "znver5")
    return 16 if any(name in text for name in wide) else 8
