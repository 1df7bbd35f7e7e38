"""Kernels for the checks on a device, as workloads: good ones, and broken ones in each way that matters.

Imports TVM: only for processes of their own. Arguments are (a, b), both of 4096 float32.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

SIZE = 4096
THREADS = 128


@T.prim_func(s_tir=True)
def double(a: T.Buffer((4096,), "float32"), b: T.Buffer((4096,), "float32")):
    for block in T.thread_binding(32, thread="blockIdx.x"):
        for lane in T.thread_binding(128, thread="threadIdx.x"):
            b[block * 128 + lane] = a[block * 128 + lane] * T.float32(2)


@T.prim_func(s_tir=True)
def wrong(a: T.Buffer((4096,), "float32"), b: T.Buffer((4096,), "float32")):
    for block in T.thread_binding(32, thread="blockIdx.x"):
        for lane in T.thread_binding(128, thread="threadIdx.x"):
            b[block * 128 + lane] = a[block * 128 + lane] * T.float32(2.01)


@T.prim_func(s_tir=True)
def wild(a: T.Buffer((4096,), "float32"), b: T.Buffer((4096,), "float32")):
    # Addresses far outside everything: an illegal address, after which the context is of no use.
    for _block in T.thread_binding(1, thread="blockIdx.x"):
        for lane in T.thread_binding(2, thread="threadIdx.x"):
            b[T.int64(1 << 42) * (T.Cast("int64", lane) + T.int64(1))] = a[0]


@T.prim_func(s_tir=True)
def endless(a: T.Buffer((4096,), "float32"), b: T.Buffer((4096,), "float32")):
    for _block in T.thread_binding(1, thread="blockIdx.x"):
        for _lane in T.thread_binding(1, thread="threadIdx.x"):
            for _ in T.serial(T.int64(1 << 44)):
                b[0] = b[0] * T.float32(0.5) + a[0]


def named(name: str, on_gpu: bool) -> Any:
    """The kernel ``name``; on a CPU the one of the tests that does the same, so that the check can be rehearsed."""
    import tvm

    if on_gpu:
        func = globals()[name]
    else:
        from tests.tasks.engines.relax import kernels

        func = getattr(kernels, name)
    return tvm.IRModule({"main": func.with_attr("global_symbol", "main").with_attr("tirx.noalias", True)})


def chain(length: int, on_gpu: bool) -> Any:
    """``length`` multiplications and additions an element: each length is another kernel to compile and to time."""
    import tvm
    from tvm import te
    from tvm.s_tir import Schedule

    a = te.placeholder((SIZE,), "float32", name="a")

    def element(i: Any) -> Any:
        value = a[i]
        for step in range(length):
            value = value * tvm.tirx.const(0.5 + step / 1000, "float32") + a[i]
        return value

    schedule = Schedule(tvm.IRModule({"main": te.create_prim_func([a, te.compute((SIZE,), element, name="b")])}))
    if on_gpu:
        (loop,) = schedule.get_loops(schedule.get_sblock("b"))
        block, lane = schedule.split(loop, [None, THREADS])
        schedule.bind(block, "blockIdx.x")
        schedule.bind(lane, "threadIdx.x")
    return schedule.mod
