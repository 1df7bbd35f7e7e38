"""Real TVM kernels of (a, b), both 4096 float32: good ones and broken ones. Imports TVM: fresh interpreters only.

A broken kernel takes the same arguments as the good ones, as when a schedule or the compiler is wrong.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T


@T.prim_func(s_tir=True)
def double(a: T.Buffer((4096,), "float32"), b: T.Buffer((4096,), "float32")):
    for i in range(4096):
        b[i] = a[i] * T.float32(2)


@T.prim_func(s_tir=True)
def parallel(a: T.Buffer((4096,), "float32"), b: T.Buffer((4096,), "float32")):
    for i in T.parallel(4):
        for j in range(1024):
            b[i * 1024 + j] = a[i * 1024 + j] + a[i * 1024 + j]


@T.prim_func(s_tir=True)
def wrong(a: T.Buffer((4096,), "float32"), b: T.Buffer((4096,), "float32")):
    for i in range(4096):
        b[i] = a[i] * T.float32(2.01)


@T.prim_func(s_tir=True)
def nothing(a: T.Buffer((4096,), "float32"), b: T.Buffer((4096,), "float32")):
    T.evaluate(0)


@T.prim_func(s_tir=True)
def half(a: T.Buffer((4096,), "float32"), b: T.Buffer((4096,), "float32")):
    for i in range(2048):
        b[i] = a[i] * T.float32(2)


@T.prim_func(s_tir=True)
def outside(a: T.Buffer((4096,), "float32"), b: T.Buffer((4096,), "float32")):
    # All outputs are right; one more is written behind them.
    for i in range(4097):
        b[i] = a[i % 4096] * T.float32(2)


@T.prim_func(s_tir=True)
def before(a: T.Buffer((4096,), "float32"), b: T.Buffer((4096,), "float32")):
    for i in range(4097):
        b[i - 1] = a[(i + 4095) % 4096] * T.float32(2)


@T.prim_func(s_tir=True)
def spoils_input(a: T.Buffer((4096,), "float32"), b: T.Buffer((4096,), "float32")):
    # Right, and within bounds; but whoever comes next computes from other numbers.
    for i in range(4096):
        b[i] = a[i] * T.float32(2)
    for i in range(4096):
        a[i] = T.float32(7)


@T.prim_func(s_tir=True)
def endless(a: T.Buffer((4096,), "float32"), b: T.Buffer((4096,), "float32")):
    for _ in T.serial(T.int64(1 << 44)):
        b[0] = b[0] * T.float32(0.5) + a[0]


@T.prim_func(s_tir=True)
def wild(a: T.Buffer((4096,), "float32"), b: T.Buffer((4096,), "float32")):
    # A pointer far outside everything: a segmentation fault.
    for i in T.serial(T.int64(2)):
        b[T.int64(1 << 42) * (i + T.int64(1))] = a[0]


@T.prim_func(s_tir=True)
def aborts(a: T.Buffer((4096,), "float32"), b: T.Buffer((4096,), "float32")):
    T.evaluate(T.call_extern("void", "abort"))


@T.prim_func(s_tir=True)
def unknown_symbol(a: T.Buffer((4096,), "float32"), b: T.Buffer((4096,), "float32")):
    T.evaluate(T.call_extern("void", "tunewright_no_such_function"))


def named(name: str) -> Any:
    """The kernel as a workload: a module with one function, main."""
    import tvm

    func = globals()[name]
    return tvm.IRModule({"main": func.with_attr("global_symbol", "main").with_attr("tirx.noalias", True)})
