"""How fast this machine is at most, on the threads that the model runs on: small kernels written by hand.

Runs in a worker that is pinned as the model's is. CPU only.
"""

# TVMScript is no Python that a type checker knows.
# mypy: disable-error-code="untyped-decorator,valid-type,no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
from tvm.script import tirx as T

from tasks.engines.relax.candidates import BUILD_CONFIG

#: Multiply-adds in flight: enough for two units of four cycles each, and they still fit in 16 registers.
_CHAINS = 12
#: Lanes of a vector register: AVX2 and NEON twice, AVX-512.
_LANES = (8, 16)
_ROUNDS = 200_000
#: Far larger than any cache, and small enough for the nearest ones.
_MEMORY_BYTES = 64 << 20
_CACHE_BYTES = 128 << 10
#: A machine is shared: only the best of many short tries says what it can do.
_TRIES = 60
_MEMORY_TRIES = 12


def measure_roof(target: Any, threads: int) -> dict[str, float]:
    """``flops_per_s`` (float32), ``bytes_per_s`` and ``cache_bytes_per_s`` of ``threads`` threads."""
    flops = max(_flops_per_s(target, threads, lanes) for lanes in _LANES)
    memory = _bytes_per_s(target, threads, _MEMORY_BYTES, _MEMORY_TRIES)
    cache = _bytes_per_s(target, threads, _CACHE_BYTES * threads, _TRIES)
    return {"flops_per_s": flops, "bytes_per_s": memory, "cache_bytes_per_s": max(memory, cache)}


def _flops_per_s(target: Any, threads: int, lanes: int) -> float:
    x = np.ones((threads, _CHAINS, lanes), "float32")
    factors = np.full(2, 0.5, "float32")
    seconds = _least_s(_multiply_adds(threads, lanes), target, [x, factors], _TRIES)
    return 2.0 * threads * _CHAINS * lanes * _ROUNDS / seconds


def _bytes_per_s(target: Any, threads: int, size_bytes: int, tries: int) -> float:
    """Half of ``size_bytes`` is read, half is written."""
    rows = size_bytes // (2 * threads * _LANES[0] * 4)
    x = np.ones((threads, rows, _LANES[0]), "float32")
    # A call of what fits in a cache is so short that many are timed at once.
    number = max(1, (8 << 20) // size_bytes)
    return 2.0 * x.nbytes / _least_s(_copy(threads, rows, _LANES[0]), target, [x, np.zeros_like(x)], tries, number)


def _least_s(func: Any, target: Any, arrays: Sequence[Any], tries: int, number: int = 1) -> float:
    named = func.with_attr("global_symbol", "main").with_attr("tirx.noalias", True)
    with tvm.transform.PassContext(opt_level=3, config=BUILD_CONFIG):
        library = tvm.tirx.build(tvm.IRModule({"main": named}), target=target)
    if hasattr(library, "jit"):
        library = library.jit()
    evaluator = library.time_evaluator("main", tvm.cpu(), number=number, repeat=tries)
    return float(min(evaluator(*(tvm.runtime.tensor(array) for array in arrays)).results))


def _multiply_adds(threads: int, lanes: int) -> Any:
    """Independent chains of multiply-adds that never leave the registers."""

    @T.prim_func(s_tir=True)
    def chains(x: T.Buffer((threads, _CHAINS, lanes), "float32"), f: T.Buffer((2,), "float32")):
        for t in T.parallel(threads):
            a = T.alloc_buffer((_CHAINS, lanes), "float32", scope="local")
            for i in T.unroll(_CHAINS):
                for v in T.vectorized(lanes):
                    a[i, v] = x[t, i, v]
            for _ in range(_ROUNDS):
                for i in T.unroll(_CHAINS):
                    for v in T.vectorized(lanes):
                        a[i, v] = a[i, v] * f[0] + f[1]
            for i in T.unroll(_CHAINS):
                for v in T.vectorized(lanes):
                    x[t, i, v] = a[i, v]

    return chains


def _copy(threads: int, rows: int, lanes: int) -> Any:
    @T.prim_func(s_tir=True)
    def copy(x: T.Buffer((threads, rows, lanes), "float32"), y: T.Buffer((threads, rows, lanes), "float32")):
        for t in T.parallel(threads):
            for i in range(rows):
                for v in T.vectorized(lanes):
                    y[t, i, v] = x[t, i, v]

    return copy
