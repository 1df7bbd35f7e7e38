"""What a search proposes first, and what is built where a default schedule cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tasks.import_model import OnnxRuntimeModel, import_model_file, seeded_inputs
from tasks.model_source import fetch
from tasks.records import NO_SCHEDULE
from tests.fresh import in_fresh
from tests.infra import sample_records
from tests.models import conv_model


def first_proposal(folder: str, informed: bool) -> dict[str, Any]:
    """In a fresh interpreter: the sketches of a padded conv, by candidate key, and what is proposed of them."""
    from tasks.engines.relax.bootstrap import import_tvm

    import_tvm("llvm")
    import tvm
    from tvm import te, topi

    from tasks.engines.relax import spaces, targets
    from tasks.engines.relax.cost_model import Samples, XgbCostModel
    from tasks.engines.relax.search import TaskSearch
    from tasks.engines.relax.subgraphs import structural_key

    def search(number: int, channels: int) -> TaskSearch:
        data = te.placeholder((1, 14, 14, channels), name="data")
        weight = te.placeholder((3, 3, channels, 32), name="weight")
        func = te.create_prim_func([data, weight, topi.nn.conv2d_nhwc(data, weight, 1, 1, 1)])
        path = Path(folder) / f"{number}.json"
        path.write_text(tvm.ir.save_json(tvm.IRModule({"main": func})))
        return TaskSearch(replace(sample_records.task(number), workload_path=str(path)), target, model)

    target = targets.to_tvm(targets.resolve("cpu", 2))
    model = XgbCostModel(Samples(), 2, 0)
    if informed:
        before = search(0, 16)
        for seed in range(2):
            measured = before.propose(16, seed)
            before.report(measured, [100.0 + 10 * index for index in range(len(measured))])
    this = search(1, 32)
    this._own_us = 500.0
    sketches = [structural_key(sketch.mod) for sketch in spaces.register_tiles(this.mod, target)]
    first, second = ([candidate.key for candidate in this.propose(4, seed)] for seed in (1, 2))
    waiting = list(this._pool)
    return {
        "sketches": sketches, "first": first, "second": second, "waiting": waiting,
        "predicted": model.booster is not None,
    }  # fmt: skip


def build_broken(folder: str) -> dict[str, Any]:
    """In a fresh interpreter: an untuned build of which LLVM refuses every default schedule but the first."""
    from tasks.engines.relax.bootstrap import import_tvm

    import_tvm("llvm")
    import tvm

    from tasks.engines.interface import BuildRequest, ExecutionRequest
    from tasks.engines.measuring.engine import EngineOptions
    from tasks.engines.measuring.zygote import Zygote
    from tasks.engines.relax import building, candidates, execution
    from tasks.engines.relax.engine import RelaxEngine

    whole = building.default_schedule
    seen: list[Any] = []

    def broken(workload: Any, target: Any) -> Any:
        seen.append(workload)
        if len(seen) == 1:
            return whole(workload, target)
        length = tvm.tirx.Var("length", "int32")
        endless = tvm.tirx.For(tvm.tirx.Var("i", "int32"), 0, length, tvm.tirx.ForKind.VECTORIZED, tvm.tirx.Evaluate(0))
        return tvm.IRModule({"main": workload["main"].with_body(endless)})

    home = Path(folder)
    onnx.save(conv_model(), home / "model.onnx")
    model = import_model_file(fetch(str(home / "model.onnx"), home), {}, home)
    inputs = seeded_inputs(model, 0)
    np.savez(home / "inputs.npz", **inputs)
    roles = {"build": candidates.make_builder, "run": candidates.make_runner, "execute": execution.make_executor}
    engine = RelaxEngine(EngineOptions("cpu", "cpu:0-1", 2, folder), Zygote(roles))
    building.default_schedule = broken
    artifact = engine.build(
        BuildRequest(engine.fuse(engine.import_model(model), "subgraph"), {}, f"{folder}/built", False)
    )
    engine.execute(ExecutionRequest(artifact.path, f"{folder}/inputs.npz", 1, f"{folder}/outputs.npz"))
    expected = OnnxRuntimeModel(model, 1).run(inputs)
    with np.load(home / "outputs.npz") as found:
        errors = [float(np.abs(found[name] - expected[name]).max()) for name in expected]
    engine.close()
    return {"errors": errors, "notes": [choice.note for choice in artifact.choices]}


def test_the_sketches_as_they_stand_are_candidates_of_a_search(tmp_path: Path) -> None:
    cold = in_fresh(first_proposal, str(tmp_path), False)
    warm = in_fresh(first_proposal, str(tmp_path), True)

    assert (cold["predicted"], warm["predicted"]) == (False, True)
    for found in (cold, warm):
        # The last one is the default schedule, which was measured before.
        others = list(dict.fromkeys(found["sketches"][:-1]))
        assert len(others) >= 2
        assert set(others) <= {*found["first"], *found["second"], *found["waiting"]}
        assert not set(found["second"]) & set(found["first"])
    # A model that knows nothing does not hold them back.
    assert set(others) <= set(cold["first"])


def test_a_default_schedule_that_cannot_be_built_is_left_out(tmp_path: Path) -> None:
    found = in_fresh(build_broken, str(tmp_path))

    assert found["errors"]
    assert max(found["errors"]) < 1e-4
    assert found["notes"].count(NO_SCHEDULE) == len(found["notes"]) - 1 > 0
