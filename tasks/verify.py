"""The verify step: is the artifact right, and how fast is it against what the user has."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.object_store import get_folder
from infra.promotion import Champion, Race
from tasks.engines.interface import ExecutionRequest
from tasks.errors import EngineError, StoreError
from tasks.import_model import OnnxRuntimeModel, reference_outputs, seeded_inputs
from tasks.records import Artifact, Latency, ModelFile, Verdict
from tasks.run import Progress, TuningRun, run_of

logger = logging.getLogger("tunewright")

Arrays = Mapping[str, npt.NDArray[np.generic]]
#: A contender runs so many times and says how many milliseconds each run took.
Contender = Callable[[int], Sequence[float]]

SEEDS = (0, 1, 2)
#: Absolute and relative tolerance by dtype of the output. Both compilers compute in that dtype but sum
#: in different orders; each reorder of K terms moves a result by about sqrt(K) units in the last place
#: (float32: 1.2e-7, float16: 9.8e-4), and a deep model stacks some dozens of them. The untuned builds
#: of the models we know stay below 1e-5. Integers have no rounding of sums; a requantisation may land
#: on the other side of a half, which is one step.
TOLERANCE = {
    "float64": (1e-8, 1e-6),
    "float32": (1e-4, 1e-3),
    "float16": (1e-2, 1e-2),
    "int8": (1.0, 0.0),
    "uint8": (1.0, 0.0),
}
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
def verify(
    run_id: str, model: ModelFile, tuned: Artifact, untuned: Artifact, champion: Champion | None
) -> Verification:
    """Compare with onnxruntime on seeded inputs, then time all contenders, taking turns."""
    run = run_of(run_id)
    run.observer(Progress("verify"))
    threads = run.options.threads
    worst, failed = _compare_outputs(run, model, tuned)
    inputs_path = _write_inputs(run, model, SEEDS[0])
    session = OnnxRuntimeModel(model, threads)
    inputs = seeded_inputs(model, SEEDS[0])
    contenders: dict[str, Contender] = {
        "untuned": _artifact_contender(run, untuned.path, inputs_path),
        "tuned": _artifact_contender(run, tuned.path, inputs_path),
        "onnxruntime": lambda repeats: session.time_ms(inputs, repeats),
    }
    if champion is not None and not failed:
        contenders |= _champion_contender(run, champion, inputs_path)
    latencies = interleaved(contenders)
    champion_latency = latencies.get("champion")
    dtypes = sorted({output.dtype for output in model.outputs})
    verdict = Verdict(
        correct=not failed, max_abs_error=worst, tolerance=describe_tolerance(dtypes), seeds=SEEDS,
        untuned=latencies["untuned"], tuned=latencies["tuned"], onnxruntime=latencies["onnxruntime"],
        threads=threads, failed_outputs=tuple(failed),
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


def wrong_outputs(expected: Arrays, actual: Arrays) -> tuple[float, list[str]]:
    """The largest absolute difference over all outputs, and a text for each output out of tolerance."""
    worst, failed = 0.0, []
    for name, want in expected.items():
        got = actual.get(name)
        if got is None or got.shape != want.shape:
            failed.append(f"{name}: shape {None if got is None else got.shape} instead of {want.shape}")
            continue
        absolute, relative = TOLERANCE.get(want.dtype.name, (0.0, 0.0))
        want64, got64 = want.astype(np.float64), got.astype(np.float64)
        both_nan = np.isnan(want64) & np.isnan(got64)
        same = both_nan | (want64 == got64)
        with np.errstate(invalid="ignore"):
            difference = np.where(same, 0.0, np.abs(want64 - got64))
        largest = float(np.max(difference, initial=0.0))
        worst = largest if np.isnan(largest) else max(worst, largest)
        # Where infinity is expected nothing else will do: a share of it would allow everything.
        scale = np.where(np.isfinite(want64), np.abs(want64), 0.0)
        if not (difference <= absolute + relative * scale).all():
            failed.append(f"{name}: differs by up to {largest:.3g}")
    return worst, failed


def describe_tolerance(dtypes: Sequence[str]) -> str:
    """The tolerances in use, as text."""
    parts = []
    for dtype in dtypes:
        absolute, relative = TOLERANCE.get(dtype, (0.0, 0.0))
        parts.append(f"{dtype}: {absolute:g} + {relative:g} * |expected|" if absolute else f"{dtype}: equal")
    return ", ".join(parts)


def _compare_outputs(run: TuningRun, model: ModelFile, artifact: Artifact) -> tuple[float, list[str]]:
    worst, failed = 0.0, []
    for seed in SEEDS:
        outputs_path = run.work_dir / f"outputs-{seed}.npz"
        request = ExecutionRequest(artifact.path, str(_write_inputs(run, model, seed)), 0, str(outputs_path))
        run.engine.execute(request)
        expected = reference_outputs(model, seeded_inputs(model, seed), run.options.threads)
        with np.load(outputs_path) as stored:
            error, texts = wrong_outputs(expected, {name: stored[name] for name in stored.files})
        worst = max(worst, error)
        failed += [f"{text} (seed {seed})" for text in texts]
    return worst, failed


def _write_inputs(run: TuningRun, model: ModelFile, seed: int) -> Path:
    path = run.work_dir / f"inputs-{seed}.npz"
    if not path.exists():
        np.savez(path, allow_pickle=False, **seeded_inputs(model, seed))
    return path


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
