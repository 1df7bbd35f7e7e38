"""Products of pairs of int16, summed in int32: what CPUs have for integers since AVX2.

One instruction does two multiplications for each of eight sums, exactly; a float one does eight.
"""

# TVMScript is no Python that a type checker knows.
# mypy: disable-error-code="untyped-decorator,valid-type,no-untyped-def"

from __future__ import annotations

from typing import Any

from tvm.s_tir import Schedule, TensorIntrin
from tvm.script import tirx as T
from tvm.target import Target, codegen

#: Sums in one vector, and terms that are added to each at once.
LANES, PAIR = 8, 2
_NAME = "tunewright_int16_dot_8x2"
#: Blocks with this annotation end in a sum over a pair.
PAIRED = "tunewright.pairs"


@T.prim_func(s_tir=True)
def _meaning(
    a: T.Buffer((2,), "int16", offset_factor=1),
    b: T.Buffer((8, 2), "int16", offset_factor=1),
    c: T.Buffer((8,), "int32", offset_factor=1),
) -> None:
    with T.sblock("root"):
        T.reads(c[0:8], a[0:2], b[0:8, 0:2])
        T.writes(c[0:8])
        for i in T.serial(0, 8):
            for k in T.serial(0, 2):
                with T.sblock("update"):
                    vi, vk = T.axis.remap("SR", [i, k])
                    c[vi] = c[vi] + T.cast(a[vk], "int32") * T.cast(b[vi, vk], "int32")


@T.prim_func(s_tir=True)
def _instruction(
    a: T.Buffer((2,), "int16", offset_factor=1),
    b: T.Buffer((8, 2), "int16", offset_factor=1),
    c: T.Buffer((8,), "int32", offset_factor=1),
) -> None:
    with T.sblock("root"):
        T.reads(c[0:8], a[0:2], b[0:8, 0:2])
        T.writes(c[0:8])
        c[T.ramp(T.int32(0), 1, 8)] = c[T.ramp(T.int32(0), 1, 8)] + T.call_llvm_pure_intrin(
            T.llvm_lookup_intrinsic_id("llvm.x86.avx2.pmadd.wd"),
            T.reinterpret("int16x16", T.broadcast(T.reinterpret("int32", a.vload([0], dtype="int16x2")), 8)),
            b.vload([0, 0], dtype="int16x16"),
            dtype="int32x8",
        )


TensorIntrin.register(_NAME, _meaning, _instruction, override=True)


def has_int16_dots(target: Target) -> bool:
    """Can kernels for ``target`` use the instruction?"""
    return str(target.kind.name) == "llvm" and bool(codegen.llvm_cpu_has_features("avx2", target))


def is_paired(schedule: Schedule, block: Any) -> bool:
    """Does ``block`` end in a sum over a pair?"""
    return PAIRED in schedule.get(block).annotations


def tensorise(schedule: Schedule, lane: Any) -> None:
    """The instruction in place of the loops ``lane`` (of eight sums) and the pair below it."""
    schedule.tensorize(lane, _NAME)
