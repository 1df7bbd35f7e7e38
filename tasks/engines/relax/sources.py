"""What was built of each subgraph, for people: its schedule as TVMScript, its trace, the code of the machine."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm

from tasks.records import SubgraphChoice

#: Longer texts are cut: nobody reads a megabyte of assembly, and each is stored in every run.
_MOST_CHARACTERS = 300_000
#: One disassembly, and all compilations where there is no disassembler: people can do without the rest.
_DISASSEMBLE_S = 10.0
_COMPILE_S = 5.0
_KERNEL = re.compile(r'^extern "C" __global__', re.MULTILINE)


@dataclass(frozen=True)
class Winner:
    """A subgraph as it was built. ``folder`` is where its files go, ``trace`` is empty for the default.

    ``object_path`` is the object file that was linked; empty where the target has none.
    """

    choice: SubgraphChoice
    folder: Path
    function: str
    func: Any
    trace: str
    object_path: str = ""


def write_sources(winners: Sequence[Winner], target: Any, library: Any) -> None:
    """Write ``schedule.py``, ``trace.json`` and ``code.s`` or ``code.cu`` of each winner into its folder.

    ``library`` is the module that was built for a target without object files. Raises OSError.
    """
    for winner in winners:
        winner.folder.mkdir(parents=True, exist_ok=True)
        (winner.folder / "schedule.py").write_text(_cut(_heading(winner) + winner.func.script()))
        if winner.trace:
            (winner.folder / "trace.json").write_text(_cut(winner.trace) + "\n")
    if library is not None:
        _write_device_code(winners, device_code(library))
    elif shutil.which("objdump"):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(_disassemble, winners))
    else:
        _compile_again(winners, target)


def device_code(library: Any) -> str:
    """The CUDA source of every kernel in ``library``, empty where it has none."""
    pending, found = [library], []
    while pending:
        module = pending.pop()
        pending += list(module.imports)
        if str(module.kind) == "cuda":
            found.append(str(module.inspect_source("cuda")))
    return "\n".join(found)


def split_kernels(source: str) -> Mapping[str, str]:
    """The kernels in CUDA ``source`` by name, each with what stands before its body."""
    starts = [match.start() for match in _KERNEL.finditer(source)] + [len(source)]
    kernels: dict[str, str] = {}
    for start, end in itertools.pairwise(starts):
        text = source[start:end]
        name = re.search(r"(\w+)\s*\(", text[text.find(")") + 1 if "__launch_bounds__" in text[:200] else 0 :])
        if name:
            # A kernel is declared first and defined later: the longer text is the definition.
            kernels[name[1]] = max(text, kernels.get(name[1], ""), key=len)
    return kernels


def _write_device_code(winners: Sequence[Winner], source: str) -> None:
    kernels = split_kernels(source)
    for winner in winners:
        own = re.compile(rf"{re.escape(winner.function)}_kernel(_\d+)?$")
        texts = [text for name, text in kernels.items() if own.match(name)]
        if texts:
            (winner.folder / "code.cu").write_text(_cut("\n".join(texts)))


def _disassemble(winner: Winner) -> None:
    """The very instructions that were measured and shipped."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", "--reloc", winner.object_path]
    if not winner.object_path.endswith(".o"):
        return
    try:
        done = subprocess.run(command, capture_output=True, timeout=_DISASSEMBLE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return
    text = done.stdout.decode(errors="replace")
    # The first lines name a path of this machine, which says nothing to anybody.
    (winner.folder / "code.s").write_text(_cut(text[text.find("Disassembly") :]))


def _compile_again(winners: Sequence[Winner], target: Any) -> None:
    """As TVM prints it, where there is no disassembler: the heaviest first, as long as there is time."""
    stop_at = time.monotonic() + _COMPILE_S
    for winner in winners:
        if time.monotonic() > stop_at:
            break
        mod = tvm.IRModule({"main": winner.func.with_attr("global_symbol", "main")})
        text = str(tvm.tirx.build(mod, target=target).inspect_source("asm"))
        (winner.folder / "code.s").write_text(_cut(text))


def _heading(winner: Winner) -> str:
    choice = winner.choice
    measured = "not measured" if choice.latency_us is None else f"{choice.latency_us:.2f} us"
    schedule = f"record {choice.record_id}" if winner.trace else "the default schedule"
    return f"# {choice.name}: {schedule}, {measured}. Workload {choice.workload_key}.\n"


def _cut(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]}\n[cut: {len(text)} characters in all]\n"
