"""The verify step: how fast is an artifact against what the user has; whether it is right was proven before."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.object_store import get_folder
from infra.promotion import Champion, Race
from tasks.bisect import Proven
from tasks.engines.interface import ExecutionRequest
from tasks.errors import EngineError, StoreError
from tasks.outputs import SEEDS, describe_tolerance, write_inputs
from tasks.quantised import output_steps
from tasks.racing import RaceOrder
from tasks.records import Artifact, ModelFile, Verdict
from tasks.run import Progress, TuningRun, run_of

logger = logging.getLogger("tunewright")


@dataclass(frozen=True)
class Verification:
    """The verdict, and the race against the champion for the publish step."""

    verdict: Verdict
    race: Race


@task(cache_policy=NO_CACHE)
def verify(run_id: str, model: ModelFile, proven: Proven, untuned: Artifact, champion: Champion | None) -> Verification:
    """Time all contenders, taking turns; the verdict also says what the comparison of outputs gave."""
    run = run_of(run_id)
    run.observer(Progress("verify"))
    threads = run.options.threads
    failed = proven.compared.failed
    inputs_path = write_inputs(run, model, SEEDS[0])
    folders = {"untuned": untuned.path, "tuned": proven.artifact.path}
    if champion is not None and not failed:
        folders |= _champion_folder(run, champion, inputs_path)
    latencies = run.executor.race(RaceOrder(folders, str(inputs_path), model, threads, SEEDS[0]))
    champion_latency = latencies.get("champion")
    dtypes = sorted({output.dtype for output in model.outputs})
    verdict = Verdict(
        correct=not failed, max_abs_error=proven.compared.max_abs_error,
        tolerance=describe_tolerance(dtypes, output_steps(Path(model.original_path))), seeds=SEEDS,
        untuned=latencies["untuned"], tuned=latencies["tuned"], onnxruntime=latencies["onnxruntime"],
        threads=threads, failed_outputs=failed,
        champion=champion_latency, champion_version=champion.version if champion and champion_latency else "",
        repairs=proven.repairs,
    )  # fmt: skip
    return Verification(verdict, Race(latencies["tuned"], champion, champion_latency))


def _champion_folder(run: TuningRun, champion: Champion, inputs_path: Path) -> dict[str, str]:
    """The champion's artifact from the store; none where it cannot be had or run here."""
    folder = run.work_dir / "champion"
    try:
        get_folder(run.store, f"artifacts/{champion.artifact_digest}", folder)
        run.executor.execute(ExecutionRequest(str(folder), str(inputs_path), 1))
    except (StoreError, EngineError) as error:
        run.notes.append(f"the champion (version {champion.version}) cannot be compared with: {error}")
        return {}
    return {"champion": str(folder)}
