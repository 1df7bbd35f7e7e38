"""Is an artifact right: its outputs against those of onnxruntime on seeded inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from tasks.engines.interface import ExecutionRequest
from tasks.import_model import OnnxRuntimeModel, seeded_inputs
from tasks.quantised import output_steps
from tasks.records import Artifact, ModelFile
from tasks.run import TuningRun

Arrays = Mapping[str, npt.NDArray[np.generic]]

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
    "int16": (1.0, 0.0),
    "uint8": (1.0, 0.0),
}
#: So many quantisation steps may lie between two runtimes' outputs of a quantised model: a number next to a
#: half is rounded up by one and down by the other. onnxruntime with and without its optimisations differs by one.
STEPS = 2


NO_STEPS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Comparison:
    """The largest absolute error, and a text for each output out of tolerance; ``seeds`` gave those."""

    max_abs_error: float
    failed: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()


class Reference:
    """What onnxruntime gives for a model's seeded inputs, computed once a seed. Raises ModelError."""

    def __init__(self, run: TuningRun, model: ModelFile) -> None:
        self._run = run
        self._model = model
        self._session: OnnxRuntimeModel | None = None
        self._steps = output_steps(Path(model.original_path))
        self._outputs: dict[int, Arrays] = {}

    def compare(self, artifact: Artifact, seeds: Sequence[int] = SEEDS) -> Comparison:
        """Run ``artifact`` on the inputs of each seed. Raises EngineError."""
        worst, failed, wrong_seeds = 0.0, [], []
        for seed in seeds:
            path = self._run.work_dir / f"outputs-{seed}.npz"
            inputs_path = write_inputs(self._run, self._model, seed)
            self._run.executor.execute(ExecutionRequest(artifact.path, str(inputs_path), 0, str(path)))
            with np.load(path) as stored:
                outputs = {name: stored[name] for name in stored.files}
            error, texts = wrong_outputs(self._expected(seed), outputs, self._steps)
            # A NaN is the worst of all, whatever other seeds give.
            worst = error if np.isnan(error) else worst if np.isnan(worst) else max(worst, error)
            failed += [f"{text} (seed {seed})" for text in texts]
            wrong_seeds += [seed] if texts else []
        return Comparison(worst, tuple(failed), tuple(wrong_seeds))

    def _expected(self, seed: int) -> Arrays:
        if seed not in self._outputs:
            self._session = self._session or OnnxRuntimeModel(self._model, self._run.options.threads, exact=True)
            self._outputs[seed] = self._session.run(seeded_inputs(self._model, seed))
        return self._outputs[seed]


def write_inputs(run: TuningRun, model: ModelFile, seed: int) -> Path:
    """A file with the model's seeded inputs."""
    path = run.work_dir / f"inputs-{seed}.npz"
    if not path.exists():
        np.savez(path, allow_pickle=False, **seeded_inputs(model, seed))
    return path


def wrong_outputs(expected: Arrays, actual: Arrays, steps: Mapping[str, float] = NO_STEPS) -> tuple[float, list[str]]:
    """The largest absolute difference over all outputs, and a text for each output out of tolerance.

    ``steps``: the size of a quantisation step of those outputs that are dequantised.
    """
    worst, failed = 0.0, []
    for name, want in expected.items():
        got = actual.get(name)
        if got is None or got.shape != want.shape:
            failed.append(f"{name}: shape {None if got is None else got.shape} instead of {want.shape}")
            continue
        absolute, relative = TOLERANCE.get(want.dtype.name, (0.0, 0.0))
        absolute += STEPS * steps.get(name, 0.0)
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


def describe_tolerance(dtypes: Sequence[str], steps: Mapping[str, float] = NO_STEPS) -> str:
    """The tolerances in use, as text."""
    parts = []
    for dtype in dtypes:
        absolute, relative = TOLERANCE.get(dtype, (0.0, 0.0))
        parts.append(f"{dtype}: {absolute:g} + {relative:g} * |expected|" if absolute else f"{dtype}: equal")
    parts += [f"{name}: + {STEPS} steps of {step:.3g}" for name, step in steps.items()]
    return ", ".join(parts)
