"""An XGBoost cost model over TVM's features: predicts which unmeasured candidates are fast.

TVM's own model draws random scores for its first 100 samples and then trains up to 10,000 rounds with
two Python callbacks each. This one trains a fixed number of rounds on the same features (one row a
buffer store, summed over a candidate), from a handful of samples on, and starts from what is stored.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.cost_model import PyCostModel
from tvm.s_tir.meta_schedule.feature_extractor import FeatureExtractor

_ROUNDS = 60
MIN_SAMPLES = 8
#: Training time grows with the samples; beyond this many the oldest are left out.
_MAX_SAMPLES = 6000
#: Schedules that are kept of each workload, the fastest: others start their search from them.
_KEPT_SCHEDULES = 2

Rows = np.ndarray[Any, np.dtype[np.float32]]


class Samples:
    """Features and latencies of measured candidates; a failed candidate scores 0.

    Kept in files, one a session, so that what was learned tonight is known tomorrow, whatever the model.
    """

    def __init__(self) -> None:
        self.features: list[Rows] = []
        self.workloads: list[str] = []
        self.latencies_us: list[float] = []
        self._keys: dict[tuple[str, str], int] = {}
        self._schedules: dict[str, list[tuple[float, str]]] = {}
        self._unsaved: list[tuple[str, float, str]] = []
        self._loaded: set[str] = set()
        self._saved = 0

    def add_schedule(self, workload: str, latency_us: float, trace: str) -> None:
        """A schedule that was measured, its trace as JSON; the fastest few of each workload are kept."""
        if self._keep(workload, latency_us, trace):
            self._unsaved.append((workload, latency_us, trace))

    def _keep(self, workload: str, latency_us: float, trace: str) -> bool:
        kept = self._schedules.setdefault(workload, [])
        if (latency_us, trace) in kept:
            return False
        kept.append((latency_us, trace))
        kept.sort()
        del kept[_KEPT_SCHEDULES:]
        return (latency_us, trace) in kept

    def best_schedules(self) -> dict[str, list[str]]:
        """The traces of the fastest schedules by workload, the fastest first."""
        return {workload: [trace for _, trace in kept] for workload, kept in self._schedules.items()}

    def add(self, workload: str, candidate: str, features: Rows, latency_us: float) -> None:
        """One measured candidate, once; ``latency_us`` is infinite where the trial failed."""
        if len(features) and (workload, candidate) not in self._keys:
            self._keys[workload, candidate] = len(self.features)
            self.features.append(features)
            self.workloads.append(workload)
            self.latencies_us.append(latency_us)

    def has(self, workload: str, candidate: str) -> bool:
        """Is this candidate a sample already?"""
        return (workload, candidate) in self._keys

    def load(self, folder: Path) -> None:
        """Take in the files of ``folder`` that were not read yet; one that is damaged is left out."""
        for path in sorted(folder.glob("*.npz")):
            if path.name in self._loaded:
                continue
            self._loaded.add(path.name)
            try:
                with np.load(path, allow_pickle=False) as stored:
                    parts = {name: stored[name] for name in stored.files}
                pieces = np.split(parts["rows"], np.cumsum(parts["lengths"])[:-1])
                names = zip(parts["workloads"], parts["candidates"], pieces, parts["latencies_us"], strict=True)
                for workload, candidate, rows, latency_us in names:
                    self.add(str(workload), str(candidate), rows, float(latency_us))
                kept = (parts.get(name, ()) for name in ("schedule_workloads", "schedule_latencies_us", "schedules"))
                for workload, latency_us, trace in zip(*kept, strict=True):
                    self._keep(str(workload), float(latency_us), bytes(trace).decode())
            except (OSError, ValueError, KeyError, zipfile.BadZipFile):
                continue
        self._saved = len(self.features)

    def save(self, path: Path) -> None:
        """Write what came in since the last ``load`` or ``save``."""
        fresh = self.features[self._saved :]
        if not fresh:
            return
        keys = list(self._keys)[self._saved :]
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            np.savez_compressed(
                file, allow_pickle=False, rows=np.concatenate(fresh),
                lengths=np.array([len(rows) for rows in fresh]),
                workloads=np.array([workload for workload, _ in keys]),
                candidates=np.array([candidate for _, candidate in keys]),
                latencies_us=np.array(self.latencies_us[self._saved :]),
                schedule_workloads=np.array([workload for workload, _, _ in self._unsaved], dtype=str),
                schedule_latencies_us=np.array([latency_us for _, latency_us, _ in self._unsaved], dtype=float),
                schedules=np.array([trace.encode() for _, _, trace in self._unsaved], dtype=bytes),
            )  # fmt: skip
        temporary.replace(path)
        self._loaded.add(path.name)
        self._saved = len(self.features)
        self._unsaved.clear()

    def scores(self) -> np.ndarray[Any, Any]:
        """For each sample the best latency of its workload over its own: 1 is the best."""
        best: dict[str, float] = {}
        for key, us in zip(self.workloads, self.latencies_us, strict=True):
            best[key] = min(us, best.get(key, float("inf")))
        return np.array(
            [best[key] / us if np.isfinite(us) else 0.0
             for key, us in zip(self.workloads, self.latencies_us, strict=True)]
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.features)


@derived_object
class XgbCostModel(PyCostModel):  # type: ignore[misc]
    """The model as TVM's search asks it. Scores are best latency over latency: higher is faster."""

    def __init__(self, samples: Samples, threads: int, seed: int) -> None:
        super().__init__()
        self.samples = samples
        self.extractor = FeatureExtractor.create("per-store-feature")
        self.threads = threads
        self.booster: Any = None
        self.trained_on = 0
        self.parameters = {
            "max_depth": 8, "eta": 0.2, "min_child_weight": 0, "gamma": 0.001,
            "nthread": threads, "seed": seed, "tree_method": "hist", "base_score": 0.0,
        }  # fmt: skip
        self.random = np.random.default_rng(seed)

    def load(self, path: str) -> None:
        """Unused: samples come from stored records."""

    def save(self, path: str) -> None:
        """Unused: what is stored are records, features follow from them."""

    def update(self, context: Any, candidates: Sequence[Any], results: Sequence[Any]) -> None:
        """Unused: search.py adds samples, since it knows their workload."""

    def predict(self, context: Any, candidates: Sequence[Any]) -> np.ndarray[Any, Any]:
        """Scores of ``candidates``; random ones while there is nothing to learn from."""
        self.train()
        if self.booster is None:
            return self.random.uniform(size=len(candidates))
        rows = features_of(self.extractor, context, candidates)
        return predict_sums(self.booster, rows).astype("float64")

    def train(self) -> None:
        """Fit anew where a tenth more samples have come since the last time."""
        if len(self.samples) < max(MIN_SAMPLES, self.trained_on * 1.1):
            return
        import xgboost  # it takes seconds to import, which the first measurements need not wait for

        features = self.samples.features[-_MAX_SAMPLES:]
        scores = self.samples.scores()[-_MAX_SAMPLES:]
        rows, owner = stack(features)
        data = xgboost.DMatrix(rows, label=scores[owner])

        def objective(predicted: np.ndarray[Any, Any], _: Any) -> tuple[np.ndarray[Any, Any], ...]:
            # Fast candidates matter more than slow ones: each error is weighted by the score.
            sums = np.bincount(owner, weights=predicted, minlength=len(scores))
            weight = np.maximum(scores, 0.05)[owner]
            return (sums - scores)[owner] * weight, weight

        self.booster = xgboost.train(self.parameters, data, num_boost_round=_ROUNDS, obj=objective)
        self.trained_on = len(self.samples)


def features_of(extractor: Any, context: Any, candidates: Sequence[Any]) -> list[Rows]:
    """TVM's features: for each candidate one row a buffer store."""
    return [tensor.numpy().astype("float32") for tensor in extractor.extract_from(context, candidates)]


def stack(features: Sequence[Rows]) -> tuple[Rows, np.ndarray[Any, Any]]:
    """All rows in one matrix, and for each row the candidate it belongs to."""
    owner = np.repeat(np.arange(len(features)), [len(rows) for rows in features])
    return np.concatenate(features), owner


def predict_sums(booster: Any, features: Sequence[Rows]) -> np.ndarray[Any, Any]:
    """The booster's score of each candidate: the sum over its rows."""
    import xgboost

    rows, owner = stack(features)
    return np.bincount(owner, weights=booster.predict(xgboost.DMatrix(rows)), minlength=len(features))
