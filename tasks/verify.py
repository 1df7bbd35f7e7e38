"""The verify step: how fast is an artifact against what the user has; whether it is right was proven before."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.object_store import get_folder
from infra.promotion import Champion, Race
from tasks.bisect import Proven
from tasks.engines.interface import ExecutionRequest
from tasks.errors import EngineError, StoreError
from tasks.import_model import OnnxRuntimeModel, seeded_inputs
from tasks.outputs import SEEDS, describe_tolerance, write_inputs
from tasks.records import Artifact, Latency, ModelFile, Verdict
from tasks.run import Progress, TuningRun, run_of

logger = logging.getLogger("tunewright")

#: A contender runs so many times and says how many milliseconds each run took.
Contender = Callable[[int], Sequence[float]]

_ROUNDS = 9
#: Each contender runs about so long in each round.
_ROUND_S = 0.25
_MOST_RUNS = 20
#: Pause between contenders: idle threads of one spin for some milliseconds and would disturb the next.
_SETTLE_S = 0.05


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
    session = OnnxRuntimeModel(model, threads)
    inputs = seeded_inputs(model, SEEDS[0])
    contenders: dict[str, Contender] = {
        "untuned": _artifact_contender(run, untuned.path, inputs_path),
        "tuned": _artifact_contender(run, proven.artifact.path, inputs_path),
        "onnxruntime": lambda repeats: session.time_ms(inputs, repeats),
    }
    if champion is not None and not failed:
        contenders |= _champion_contender(run, champion, inputs_path)
    latencies = interleaved(contenders)
    champion_latency = latencies.get("champion")
    dtypes = sorted({output.dtype for output in model.outputs})
    verdict = Verdict(
        correct=not failed, max_abs_error=proven.compared.max_abs_error,
        tolerance=describe_tolerance(dtypes), seeds=SEEDS,
        untuned=latencies["untuned"], tuned=latencies["tuned"], onnxruntime=latencies["onnxruntime"],
        threads=threads, failed_outputs=failed,
        champion=champion_latency, champion_version=champion.version if champion and champion_latency else "",
        repairs=proven.repairs,
    )  # fmt: skip
    return Verification(verdict, Race(latencies["tuned"], champion, champion_latency))


def interleaved(contenders: Mapping[str, Contender], rounds: int = _ROUNDS) -> dict[str, Latency]:
    """Time the contenders in turns, so that a slow minute of the machine hits all of them alike.

    Each round gives one sample a contender: the median of its runs in that round, after one that warms up.
    """
    repeats = {}
    for name, run in contenders.items():
        run(1)
        once_s = run(1)[0] / 1e3
        repeats[name] = max(1, min(_MOST_RUNS, int(_ROUND_S / max(once_s, 1e-6))))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(rounds):
        names = list(contenders)
        # Another order each round: nobody always runs after the same neighbour.
        for name in names[index % len(names) :] + names[: index % len(names)]:
            time.sleep(_SETTLE_S)
            timed = contenders[name](repeats[name] + 1)[1:]
            samples[name].append(float(np.median(timed)))
    return {name: Latency(tuple(values)) for name, values in samples.items()}


def _artifact_contender(run: TuningRun, folder: str, inputs_path: Path) -> Contender:
    def run_it(repeats: int) -> Sequence[float]:
        return run.engine.execute(ExecutionRequest(folder, str(inputs_path), repeats)).samples_ms

    return run_it


def _champion_contender(run: TuningRun, champion: Champion, inputs_path: Path) -> dict[str, Contender]:
    """The champion's artifact from the store; none where it cannot be had or run here."""
    folder = run.work_dir / "champion"
    try:
        get_folder(run.store, f"artifacts/{champion.artifact_digest}", folder)
        contender = _artifact_contender(run, str(folder), inputs_path)
        contender(1)
    except (StoreError, EngineError) as error:
        run.notes.append(f"the champion (version {champion.version}) cannot be compared with: {error}")
        return {}
    return {"champion": contender}
