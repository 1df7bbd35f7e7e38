"""What granularity.py measured, as figures, tables and the page docs/granularity.md."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

_RESAMPLES = 400
#: Below this a kernel's time is mostly that of telling the cores, if it tells them, and no model's.
_LONGER_US = 2.0
#: The RFC's own figures, in microseconds: an int8 conv with requantise on a Xavier GPU.
_RFC = (
    ("schedule that wins alone", 237, 224),
    ("schedule that wins in the subgraph", 329, 104),
)


@dataclass(frozen=True)
class Interval:
    """A figure with its 95% confidence interval."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        """``0.93 (0.88 to 0.96)``."""
        return f"{self.value:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass(frozen=True)
class Finding:
    """One subgraph: correlations of ranks, and what the two winners take in the subgraph, in microseconds."""

    name: str
    candidates: int
    between: Interval
    alone_itself: float
    fused_itself: float
    operator_us: float
    subgraph_us: float
    regret: Interval

    def line(self) -> str:
        """For the terminal."""
        return (
            f"rank correlation {self.between.text()}, with itself {self.alone_itself:.2f} alone and "
            f"{self.fused_itself:.2f} fused; winners {self.operator_us:.0f} and {self.subgraph_us:.0f} us, "
            f"regret {self.regret.text()}"
        )


def analyse(result: Mapping[str, Any]) -> Finding | None:
    """The figures of one case; None where fewer than three candidates were measured."""
    alone, fused = np.array(result["alone"], dtype=float), np.array(result["fused"], dtype=float)
    if len(alone) < 3:
        return None
    between, regrets = [], []
    random = np.random.default_rng(0)
    for _ in range(_RESAMPLES):
        # Candidates are resampled for the correlation, rounds for the latencies: each is where its doubt comes from.
        rows = random.integers(0, len(alone), len(alone))
        if len(set(rows.tolist())) > 2:
            between.append(_between(alone[rows], fused[rows]))
        first, second = _halves(alone.shape[1], random)
        regrets.append(_regret(alone, fused, (first, second))[0])
    point, operator_us, subgraph_us = _regret(alone, fused, _halves(alone.shape[1]))
    first, second = _halves(alone.shape[1])
    return Finding(
        name=result["case"], candidates=len(alone), between=_interval(_between(alone, fused), between),
        alone_itself=_rank_correlation(_medians(alone, first), _medians(alone, second)),
        fused_itself=_rank_correlation(_medians(fused, first), _medians(fused, second)),
        operator_us=operator_us, subgraph_us=subgraph_us, regret=_interval(point, regrets),
    )  # fmt: skip


def _halves(rounds: int, random: Any = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every second round and the others; with ``random`` both drawn anew from themselves."""
    first, second = np.arange(0, rounds, 2), np.arange(1, rounds, 2)
    if random is None:
        return first, second
    return random.choice(first, len(first)), random.choice(second, len(second))


def _medians(times: Matrix, rounds: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.asarray(np.median(times[:, rounds], axis=1))


def _between(alone: Matrix, fused: Matrix) -> float:
    """Halves of different rounds, as when a measurement is compared with its own repetition."""
    first, second = _halves(alone.shape[1])
    one = _rank_correlation(_medians(alone, first), _medians(fused, second))
    other = _rank_correlation(_medians(alone, second), _medians(fused, first))
    return (one + other) / 2


def _regret(
    alone: Matrix, fused: Matrix, halves: tuple[NDArray[np.int64], NDArray[np.int64]]
) -> tuple[float, float, float]:
    """The ratio of the winners' latencies in the subgraph, and these: chosen by one half, timed by the other."""
    ratios, operator, subgraph = [], [], []
    for chosen, timed in (halves, halves[::-1]):
        by_operator = int(np.argmin(_medians(alone, chosen)))
        by_subgraph = int(np.argmin(_medians(fused, chosen)))
        latency = _medians(fused, timed)
        operator.append(float(latency[by_operator]))
        subgraph.append(float(latency[by_subgraph]))
        ratios.append(operator[-1] / subgraph[-1])
    return statistics.geometric_mean(ratios), statistics.mean(operator), statistics.mean(subgraph)


def _rank_correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Spearman's; ties share their mean rank. 0 where one of them is constant."""
    ranks = [_ranks(a), _ranks(b)]
    if min(float(np.std(r)) for r in ranks) == 0.0:
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2.0)[inverse])


def _interval(value: float, resampled: Sequence[float]) -> Interval:
    low, high = np.percentile(resampled, [2.5, 97.5]) if resampled else (value, value)
    return Interval(value, float(low), float(high))


def findings(engine: str, state: Mapping[str, Any]) -> list[Finding]:
    """The figures of every case of an engine."""
    analysed = [analyse(result) for result in state["cases"].get(engine, {}).values()]
    return [finding for finding in analysed if finding is not None]


def table(engine: str, state: Mapping[str, Any]) -> str:
    """A table in Markdown, which reads well in a terminal too."""
    rows = [
        "| subgraph | candidates | alone against fused | alone against itself | fused against itself "
        "| operator's winner | subgraph's winner | regret |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    rows += [
        f"| {f.name} | {f.candidates} | {f.between.text()} | {f.alone_itself:.2f} | {f.fused_itself:.2f} "
        f"| {f.operator_us:.4g} us | {f.subgraph_us:.4g} us | {f.regret.text()} |"
        for f in findings(engine, state)
    ]
    return f"### {engine}\n\n" + "\n".join(rows) + "\n"


def model_figures(engine: str, state: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Each whole model's milliseconds by either granularity: the medians of the race."""
    return {
        name: {f"{granularity}_ms": round(statistics.median(samples), 4) for granularity, samples in raced.items()}
        for name, raced in state["models"].get(engine, {}).items()
    }


def last_line(state: Mapping[str, Any]) -> dict[str, Any]:
    """What programs read."""
    line = {}
    for engine in state["cases"]:
        found = findings(engine, state)
        if found:
            line[engine] = {
                "subgraphs": len(found),
                "median_rank_correlation": round(statistics.median(f.between.value for f in found), 4),
                "max_regret": round(max(f.regret.value for f in found), 4),
                "geomean_regret": round(statistics.geometric_mean([f.regret.value for f in found]), 4),
                "models": model_figures(engine, state),
            }
    return line


def page(state: Mapping[str, Any]) -> str:
    """docs/granularity.md."""
    settings = state.get("settings", {})
    sizes = {name: settings.get(name, "?") for name in ("candidates", "rounds", "threads")}
    rfc = "\n".join(f"| {name} | {alone} us | {fused} us |" for name, alone, fused in _RFC)
    parts = [_INTRODUCTION.format(rfc=rfc, **sizes)]
    for engine in state["cases"]:
        parts.append(table(engine, state))
        found = findings(engine, state)
        parts.append(_reading(found, len(state["cases"][engine]) - len(found)))
    parts.append(_models(state))
    parts.append(_conclusion(state))
    return "\n".join(part.rstrip() + "\n" for part in parts if part)


def _reading(found: Sequence[Finding], left_out: int) -> str:
    """What the table says, in words that follow from the figures."""
    if not found:
        return "Nothing was measured yet.\n"
    sure = [f for f in found if f.regret.low > 1.0]
    same = [f for f in found if f.between.value > min(f.alone_itself, f.fused_itself) - 0.05]
    median = statistics.median(f.between.value for f in found)
    floor = statistics.median(min(f.alone_itself, f.fused_itself) for f in found)
    worst = max(found, key=lambda f: f.regret.value)
    mean = statistics.geometric_mean([f.regret.value for f in found])
    longer = [f for f in found if f.subgraph_us >= _LONGER_US]
    worst_long = max(longer, key=lambda f: f.regret.value, default=worst)
    return (
        f"Of {len(found)} subgraphs, {len(sure)} have a regret whose interval lies above 1: there the operator's "
        f"winner is slower in the subgraph than the subgraph's own winner, beyond the noise. The largest regret is "
        f"{worst.regret.text()} ({worst.name}), the geometric mean {mean:.3f}; of kernels that take at least "
        f"{_LONGER_US:g} us the largest is {worst_long.regret.text()} ({worst_long.name}). The median rank "
        f"correlation is {median:.2f}, with a noise floor of {floor:.2f}; in {len(same)} subgraphs the two forms "
        "rank the candidates as alike as one form ranks them twice, which is to say that no difference can be seen "
        "there."
        + (f" {left_out} more have fewer than three candidates, so that there is nothing to rank." if left_out else "")
        + "\n"
    )


def _models(state: Mapping[str, Any]) -> str:
    rows = []
    for engine in state["models"]:
        for name, figures in model_figures(engine, state).items():
            ratio = _paired(state["models"][engine][name]).text(3)
            times = f"{figures['operator_ms']:.3f} ms | {figures['subgraph_ms']:.3f} ms"
            rows.append(f"| {engine} | {name} | {times} | {ratio} |")
    if not rows:
        return ""
    head = "| engine | model | by operator | by subgraph | operator over subgraph |\n|---|---|--:|--:|--:|\n"
    trials = state.get("settings", {}).get("trials", "?")
    title = f"## Whole models\n\nTuned with {trials} trials by either granularity, then raced.\n\n"
    return title + head + "\n".join(rows) + "\n"


def _conclusion(state: Mapping[str, Any]) -> str:
    """What follows for users, as far as the figures carry it."""
    found = [f for engine in state["cases"] for f in findings(engine, state) if f.subgraph_us >= _LONGER_US]
    sure = [f for f in found if f.regret.low > 1.0]
    if not found:
        return ""
    head = f"## Reading\n\nOf {len(found)} subgraphs that take at least {_LONGER_US:g} us, {len(sure)} show a regret "
    # One in forty intervals lies above 1 by chance.
    if len(sure) > len(found) / 20:
        return head + "beyond the noise: there it matters what is tuned.\n"
    return head + (
        "beyond the noise, which chance alone explains. On this machine, a CPU, the experiment does **not** show what "
        "the RFC saw on a GPU: the schedule that wins alone wins in the subgraph as well. What tuning by subgraph "
        "gives here is that the measured kernel is the one that runs, not a faster one.\n"
    )


def _paired(raced: Mapping[str, Sequence[float]]) -> Interval:
    """The median ratio of the rounds, with its interval by bootstrap over them."""
    ratios = np.array(raced["operator"]) / np.array(raced["subgraph"])
    random = np.random.default_rng(0)
    resampled = [float(np.median(random.choice(ratios, len(ratios)))) for _ in range(_RESAMPLES)]
    return _interval(float(np.median(ratios)), resampled)


_INTRODUCTION = """# Does the granularity of tuning matter?

Written by `make granularity`, which repeats all of it.

Classic AutoTVM tunes single operators and assumes that the best schedule of a conv is still the best once cheap
operators are fused to it. TVM's RFC 64 showed a case where it is not, an int8 conv with requantise on a Xavier GPU:

| | alone | in its subgraph |
|---|--:|--:|
{rfc}

Tuning the operator picks the first (237 us alone), and the model runs at 224 us; the second, thrown away at 329 us,
would have run at 104 us. The regret is 2.15.

## The measurement

For each subgraph, {candidates} random candidates are built in two forms: the anchor operator alone, and the
subgraph. For `relay` both forms have the same implementation and AutoTVM config; for `relax` a MetaSchedule trace
of the operator is applied to its block in the subgraph. Every candidate is timed {rounds} times in each form on
{threads} cores, in random order, the forms taking turns. The rounds are split into two halves, which are two
measurements:

- *alone against fused*: the rank correlation (Spearman) of one form's half with the other form's other half, with
  its 95% interval over resampled candidates;
- *against itself*: the same of a form's two halves. This is the noise floor: nothing can correlate better than that;
- *winners*: chosen on one half, their latency in the subgraph taken from the other, so that a lucky timing does not
  choose itself;
- *regret*: the operator's winner over the subgraph's winner, with its 95% interval over resampled rounds. Below 1 is
  chance.
"""
