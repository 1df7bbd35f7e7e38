"""A transposed conv is a conv that computes all pixels of a step at once, and the pixels put in their places.

With steps of s, output pixel s*q + r is the sum over j of input pixel q - j times weight s*j + r: for each of the
s remainders r a conv of its own with a picture of ceil(k/s) weights, over the same inputs. They are one conv with
s times s as many channels, which has no zeros between its inputs and the schedules that every conv has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from tasks.engines.relax.passes.rewriting import Array, constant_like


def as_conv(call: Any, data: Any, weights: Array) -> Any | None:
    """``call``, a ``conv2d_transpose`` of ``data`` (N, H, W, C) with ``weights`` (C, O, KH, KW), in NHWC.

    None where it has groups, dilation or more padding behind the picture than it computes.
    """
    attrs = call.attrs
    plain = (attrs.data_layout, attrs.out_layout, attrs.kernel_layout) == ("NCHW", "NCHW", "IOHW")
    if not plain or int(attrs.groups) != 1 or any(int(d) != 1 for d in attrs.dilation):
        return None
    outputs, inputs = [[int(n) for n in shape] for shape in (call.ty.shape, call.args[0].ty.shape)]
    steps = [int(step) for step in attrs.strides]
    taps = [-(-size // step) for size, step in zip(weights.shape[2:], steps, strict=True)]
    heights = [size + tap - 1 for size, tap in zip(inputs[2:], taps, strict=True)]
    before = [int(pad) for pad in attrs.padding[:2]]
    ends = [pad + size for pad, size in zip(before, outputs[2:], strict=True)]
    computed = [size * step for size, step in zip(heights, steps, strict=True)]
    if any(end > size for end, size in zip(ends, computed, strict=True)):
        return None
    around = [tap - 1 for tap in taps]
    conv = relax.op.nn.conv2d(
        data, constant_like(_kernels(weights, steps, taps), weights), padding=[*around, *around], data_layout="NHWC",
        kernel_layout="HWIO", out_dtype=attrs.out_dtype,
    )  # fmt: skip
    channels = outputs[1]
    apart = relax.op.reshape(conv, [inputs[0], *heights, *steps, channels])
    whole = relax.op.reshape(relax.op.permute_dims(apart, [0, 1, 3, 2, 4, 5]), [inputs[0], *computed, channels])
    if before == [0, 0] and ends == computed:
        return whole
    return relax.op.strided_slice(whole, axes=[1, 2], begin=before, end=ends)


def _kernels(weights: Array, steps: list[int], taps: list[int]) -> Array:
    """The weights by tap and remainder, (TH, TW, C, SH * SW * O); a tap is counted from the input behind."""
    inputs, outputs = weights.shape[:2]
    missing = [step * tap - size for size, step, tap in zip(weights.shape[2:], steps, taps, strict=True)]
    whole = np.pad(weights, [(0, 0), (0, 0), *((0, size) for size in missing)])
    apart = whole.reshape(inputs, outputs, taps[0], steps[0], taps[1], steps[1])[:, :, ::-1, :, ::-1, :]
    return apart.transpose(2, 4, 0, 3, 5, 1).reshape(*taps, inputs, steps[0] * steps[1] * outputs)
