"""The step that makes sure of an artifact: where its outputs are wrong, the schedule at fault is found and replaced.

The model is built again with a part of its schedules, the others at their default, until the wrong ones
are left. Their records are quarantined, the next best take their place, and all is compared again.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.build import build_with
from tasks.engines.measuring.journal import Journal
from tasks.errors import VerificationError
from tasks.outputs import Comparison, Reference
from tasks.records import Artifact, Failure, FusedModule, SubgraphChoice, TuningRecord, short_hash
from tasks.run import Progress, TuningRun, run_of

#: How often wrong schedules are looked for and replaced; what is wrong after that gets the default schedule.
_ROUNDS = 4
#: Builds that one run may spend on finding wrong schedules: a halving of 100 subgraphs takes some ten.
_MOST_BUILDS = 60


@dataclass(frozen=True)
class Proven:
    """An artifact and how it compares with onnxruntime; ``repairs`` tells what had to be replaced for it."""

    artifact: Artifact
    compared: Comparison
    repairs: tuple[str, ...] = ()


@task(cache_policy=NO_CACHE)
def prove(run_id: str, fused: FusedModule, tuned: Artifact, untuned: Artifact) -> Proven:
    """``tuned`` if it is right, else the model without the schedules that are wrong.

    Raises VerificationError where no schedule is at fault: then the import is.
    """
    run = run_of(run_id)
    run.observer(Progress("verify"))
    reference = Reference(run, fused.imported.model)
    compared = reference.compare(tuned)
    if not compared.failed:
        return Proven(tuned, compared)
    if reference.compare(untuned, compared.seeds[:1]).failed:
        raise VerificationError(
            f"the tuned model is wrong and was not published: {'; '.join(compared.failed[:3])}; so is the model "
            "without tuning: its import is at fault, not a schedule; report it with the model"
        )
    return _Repair(run, fused, reference).mend(tuned, compared)


def find_culprits(suspects: Sequence[str], is_right: Callable[[Sequence[str]], bool]) -> list[tuple[str, ...]]:
    """The smallest groups of ``suspects`` with which the model is wrong, by halving.

    ``is_right`` says whether the model is right with these schedules and no others. A group of more than
    one is wrong only together. Empty where all together are right after all.
    """
    left, found = list(suspects), list[tuple[str, ...]]()
    while left and not is_right(left):
        group = left
        while len(group) > 1:
            half = len(group) // 2
            wrong = next((part for part in (group[:half], group[half:]) if not is_right(part)), None)
            if wrong is None:
                break
            group = wrong
        found.append(tuple(group))
        left = [suspect for suspect in left if suspect not in group]
    return found


class _Repair:
    """Finds and replaces the wrong schedules of one run. Schedules are named by the workload they were tuned for."""

    def __init__(self, run: TuningRun, fused: FusedModule, reference: Reference) -> None:
        self._run = run
        self._fused = fused
        self._reference = reference
        self._plain: set[str] = set()
        self._builds = 0
        self._repairs: list[str] = []

    def mend(self, tuned: Artifact, compared: Comparison) -> Proven:
        """A right artifact in the place of ``tuned``. Raises VerificationError."""
        for attempt in range(_ROUNDS + 1):
            chosen = self._chosen(tuned)
            seed = compared.seeds[:1]
            groups = find_culprits(sorted(chosen), lambda keys, seed=seed: self._is_right(keys, seed))  # type: ignore[misc]
            if not groups:
                raise VerificationError(
                    f"the tuned model is wrong and was not published: {'; '.join(compared.failed[:3])}; another "
                    "build of the same schedules is right: the outputs differ from run to run"
                )
            for group in groups:
                self._replace(group, chosen, compared.failed[0], last=attempt == _ROUNDS)
            tuned = build_with(self._run, self._fused, f"repaired-{attempt}", leave_out=self._plain, sources=True)
            compared = self._reference.compare(tuned)
            if not compared.failed:
                return Proven(tuned, compared, tuple(self._repairs))
        return Proven(tuned, compared, tuple(self._repairs))

    def _chosen(self, artifact: Artifact) -> dict[str, SubgraphChoice]:
        """The schedules in ``artifact`` that are not the default, by what they were tuned for."""
        tuned = {s.workload_key: self._fused.tuned_key(s) for s in self._fused.subgraphs}
        used = {tuned[choice.workload_key]: choice for choice in artifact.choices if choice.record_id}
        return {key: choice for key, choice in used.items() if self._record(key, choice).schedule}

    def _record(self, key: str, choice: SubgraphChoice) -> TuningRecord:
        return next(record for record in self._run.book.of(key) if record.record_id == choice.record_id)

    def _is_right(self, keys: Sequence[str], seeds: Sequence[int]) -> bool:
        """Whether the model is right with the schedules of ``keys`` alone. Raises VerificationError."""
        if self._builds == _MOST_BUILDS:
            raise VerificationError(
                f"the tuned model is wrong and was not published; {self._builds} builds did not tell which of "
                f"its schedules is at fault; last suspected: {', '.join(keys[:5])}"
            )
        self._builds += 1
        self._run.observer(Progress("verify", message=f"which of {len(keys)} schedules is wrong"))
        only = set(keys)
        leave_out = {task.workload_key for task in self._run.tasks} - only
        artifact = build_with(self._run, self._fused, f"bisect-{self._builds}", leave_out=leave_out)
        compared = self._reference.compare(artifact, seeds)
        shutil.rmtree(artifact.path)
        return not compared.failed

    def _replace(self, group: Sequence[str], chosen: dict[str, SubgraphChoice], what: str, last: bool) -> None:
        """Let the next best record, or the default schedule, take the place of those in ``group``."""
        if len(group) > 1:
            self._plain.update(group)
            names = ", ".join(chosen[key].name for key in group)
            self._say(f"{names}: wrong only together ({what}); built with their default schedules")
            return
        (key,) = group
        record = self._record(key, chosen[key])
        self._condemn(record, f"the model is wrong with it: {what}")
        instead = "the next best takes its place"
        if last:
            self._plain.add(key)
            instead = f"the {_ROUNDS} best after it were wrong as well: built with the default schedule"
        self._say(
            f"{chosen[key].name}: record {record.record_id} (candidate {record.candidate_key}, "
            f"{record.latency_us or 0:.1f} us) computes something wrong ({what}) and is quarantined; {instead}"
        )

    def _condemn(self, record: TuningRecord, reason: str) -> None:
        """Quarantine every record of the candidate, and leave one that tells later searches to pass it by."""
        run, key = self._run, record.workload_key
        assert run.records is not None
        failure = Failure("wrong_output", reason)
        session_id = run.next_session_id()
        warning = replace(
            record, record_id=short_hash(session_id, key, record.candidate_key, "confirm"), run_id=run.run_id,
            session_id=session_id, phase="confirm", started_at=time.time(), measurement=None, failure=failure,
        )  # fmt: skip
        path = run.journals / f"{session_id}.jsonl"
        with Journal(path) as journal:
            journal.append(warning)
        run.pending.append(path)
        run.flush_journals(must=True)
        for known in run.book.of(key):
            if known.candidate_key == record.candidate_key:
                run.records.quarantine(known.record_id, reason)
        run.book.condemn(key, record.candidate_key, failure)
        for tuning_task in run.tasks:
            if tuning_task.workload_key == key:
                run.log_task(tuning_task)

    def _say(self, text: str) -> None:
        self._repairs.append(text)
        self._run.observer(Progress("verify", message=text))
