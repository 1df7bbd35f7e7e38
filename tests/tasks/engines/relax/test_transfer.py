"""A search starts from the schedules of similar workloads: their decisions, fitted to its own extents."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.fresh import in_fresh
from tests.infra import sample_records


def fitted(cases: list[Any]) -> list[list[int]]:
    """In a fresh interpreter: each case's factors, extent and limit, fitted."""
    from tasks.engines.relax.bootstrap import import_tvm

    import_tvm("llvm")
    from tasks.engines.relax.transfer import fitted_tile

    return [fitted_tile(*case) for case in cases]


def search_after_another(folder: str) -> dict[str, Any]:
    """In a fresh interpreter: search one matmul, then a larger one; what the second began with."""
    from tasks.engines.relax.bootstrap import import_tvm

    import_tvm("llvm")
    import tvm
    from tvm import te

    from tasks.engines.relax import targets, transfer
    from tasks.engines.relax.cost_model import Samples, XgbCostModel
    from tasks.engines.relax.search import TaskSearch

    def search(number: int, rows: int, inner: int, columns: int) -> TaskSearch:
        a, b = te.placeholder((rows, inner), name="a"), te.placeholder((inner, columns), name="b")
        k = te.reduce_axis((0, inner), name="k")
        c = te.compute((rows, columns), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
        relu = te.compute(c.shape, lambda i, j: te.max(c[i, j], 0.0), name="relu")
        path = Path(folder) / f"{number}.json"
        func = te.create_prim_func([a, b, relu])
        path.write_text(tvm.ir.save_json(tvm.IRModule({"main": func})))
        return TaskSearch(replace(sample_records.task(number), workload_path=str(path)), target, model)

    target = targets.to_tvm(targets.resolve("cpu", 2))
    model = XgbCostModel(Samples(), 2, 0)
    first = search(0, 64, 64, 64)
    measured = first.propose(16, seed=1)
    first.report(measured, [100.0 + index for index in range(len(measured))])
    second = search(1, 96, 128, 32)
    second._own_us = 500.0
    proposed = second.propose(16, seed=2)
    spaces = [transfer.sketch_of(text(space)) for space in second._design_spaces()]
    donors = [transfer.sketch_of(trace) for trace in model.samples.best_schedules()[first.task.workload_key]]
    wanted = [json.loads(transfer.transplant(*pair))[1] for pair in transfer.most_alike(spaces, donors, 9)]
    return {
        "donors": len(donors),
        "wanted": [dict(map(tuple, decisions)) for decisions in wanted],
        "proposed": [transfer.sketch_of(candidate.trace).decisions for candidate in proposed],
        "extents": [list(transfer.sketch_of(candidate.trace).extents) for candidate in proposed],
        "predicted": [candidate.predicted_us for candidate in proposed],
        "again": len({c.key for c in proposed} & {c.key for c in second.propose(16, seed=3)}),
    }


def text(space: Any) -> str:
    from tasks.engines.relax.search import trace_text

    return trace_text(space.trace)


def test_tiles_are_fitted_to_the_new_extent() -> None:
    cases = [([4, 2, 2, 4], 64, 64), ([1, 1, 4, 16], 96, 64), ([7, 1, 4, 1], 12, 64), ([1, 100], 100, 64), ([3], 5, 64)]
    found = in_fresh(fitted, cases)

    assert [math.prod(factors) for factors in found] == [extent for _, extent, _ in cases]
    assert found[0] == [4, 2, 2, 4], "what fits stays as it is"
    assert found[1][-2:] == [6, 16] or found[1][-2:] == [3, 16], "the innermost is kept, its neighbour comes near"
    assert found[3][-1] <= 64, "the innermost factor has a limit"


def test_a_search_begins_with_what_another_found(tmp_path: Path) -> None:
    answer = in_fresh(search_after_another, str(tmp_path))

    assert answer["donors"] == 2
    assert answer["wanted"], "a matmul's sketches ask for the same decisions as another's"
    assert any(wanted in answer["proposed"] for wanted in answer["wanted"])
    # The columns whole, or counted in vectors, as our own sketches do.
    assert all((rows, inner, 32 % columns) == (96, 128, 0) for rows, columns, inner in answer["extents"])
    assert answer["predicted"] == sorted(answer["predicted"][:-2]) + answer["predicted"][-2:], "best predicted first"
    assert answer["again"] == 0, "nothing is proposed twice"
