"""The flow that tunes one model: import, fuse, extract, tune, build, verify, publish."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from flows.outcome import log_outcome, request_tags
from flows.parameters import TuneParameters
from infra.background_log import BackgroundLog
from infra.cluster import security
from infra.dead_runs import end_dead_run
from infra.gain_store import GainStore
from infra.lease import Lease
from infra.object_store import open_store
from infra.patience import patiently
from infra.record_store import RecordStore
from infra.run_log import RunLog, origin
from infra.run_manifest import RunManifest
from infra.sample_store import SampleStore
from infra.settings import settings
from tasks import plan
from tasks.bisect import prove
from tasks.build import build_tuned, build_untuned
from tasks.cold_cache import for_model
from tasks.engines.interface import DEFAULT_SCHEDULES
from tasks.errors import InputError, TunewrightError
from tasks.explain import explain
from tasks.fuse import extract, fuse, translate
from tasks.import_step import import_step
from tasks.inside import look_inside
from tasks.layout import known_layout, race_layouts, worth_racing
from tasks.publish import look_up_champion, publish
from tasks.records import (
    Artifact,
    FusedModule,
    MeasureSettings,
    ModelFile,
    PublishedVersion,
    TuningSummary,
    short_hash,
)
from tasks.run import Progress, TuningRun, forget
from tasks.tune import Budget, confirm, measure_defaults, search, searched_trials
from tasks.verify import Verification, verify

logger = logging.getLogger("tunewright")

#: Wall-clock time that a run keeps for what follows the search, beside building and confirming.
_RESERVE_S = 25.0
#: Agents end what a dead run had given them after the trial in flight, and store it.
_LEFTOVERS_S = 120.0
#: Confirming one task: its candidates are built together and timed in three rounds.
_CONFIRM_S = 1.2


def _task_runner() -> Any:
    """Where sessions run: on the fleet of the scheduler that is set, or in this process."""
    config = settings()
    if not config.scheduler:
        return ThreadPoolTaskRunner()
    from prefect_dask import DaskTaskRunner

    try:
        tls = security(config.scheduler, config.certificates)
    except InputError:  # agents and the scheduler import this too; a run that wants agents says what is wrong
        tls = None
    return DaskTaskRunner(address=config.scheduler, client_kwargs={"security": tls})


@flow(name="tune-model", validate_parameters=True, task_runner=_task_runner())
def tune_model(parameters: TuneParameters, run_id: str = "") -> TuningSummary:
    """Tune one model. Raises what ``tasks.errors`` lists; nothing is published unless all of it worked."""
    run = open_run(parameters, run_id or new_run_id(parameters.model))
    with _failures_logged(run):
        model = import_step(run.run_id, parameters.model, parameters.shapes, parameters.name)
        imported = translate(run.run_id, model)
        run.measure = for_model(run.measure, settings().measure_flush_cache, model, run.info)
        _start_log(run, model, parameters)
        imported = known_layout(run, imported, parameters.layout)
        fused = fuse(run.run_id, imported, parameters.granularity)
        extract(run.run_id, fused)
        racing = worth_racing(run, imported, parameters.trials, parameters.minutes)
        if not racing:
            _store_tasks(run, fused)
        measure_defaults(run)
        if racing:
            fused = race_layouts(run.run_id, fused)
            _store_tasks(run, fused)
        _log_fused(run, fused)
        started = time.time()
        untuned = build_untuned(run.run_id, fused)
        _search(run, parameters, build_s=time.time() - started)
        run.notes.append(confirm(run))
        proven = prove(run.run_id, fused, build_tuned(run.run_id, fused), untuned)
        champion = look_up_champion(run.run_id, model.name)
        verification = verify(run.run_id, model, proven, untuned, champion)
        profile, roof = look_inside(run.run_id, fused, proven.artifact)
        published = publish(run.run_id, model, proven.artifact, verification.verdict, verification.race)
        summary = _summary(run, fused, verification, published, proven.artifact)
        summary = replace(summary, profile=profile, roof=roof)
        patiently("finishing the run", lambda: _finish(run, summary))
    return summary


def new_run_id(model: str) -> str:
    """A name for a run that sorts by time."""
    now = time.time()
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{short_hash(model, now, length=6)}"


#: Who is told of a run's progress; the command line puts its progress bar here.
observers: list[Callable[[Progress], None]] = []


def open_run(parameters: TuneParameters, run_id: str) -> TuningRun:
    """The run's state, with a store that can be written to. Raises StoreError."""
    config = settings()
    store = open_store(config.store_url, config.s3_endpoint_url or None)
    store.check()

    def tell(progress: Progress) -> None:
        for observer in observers:
            observer(progress)

    fleet = None
    if config.scheduler:
        from tasks.fleet import open_fleet

        said = lambda text: tell(Progress("wait", message=text))  # noqa: E731
        fleet = open_fleet(parameters.target, parameters.engine, run_id, said)
        fleet.priority = parameters.priority
    run = TuningRun(
        run_id=run_id, options=parameters.child_options(fleet.info if fleet else None), home=config.home, store=store,
        store_url=config.store_url, measure=_measure_settings(), seed=parameters.seed, observer=tell,
        asked_target=parameters.target,
    )  # fmt: skip
    if fleet is not None:
        run.fleet = run.hands = fleet
    _ = run.engine  # it starts while the model is fetched and normalised
    return run


def _measure_settings() -> MeasureSettings:
    config = settings()
    return MeasureSettings(
        number=config.measure_number, repeat=config.measure_repeat, min_repeat_ms=config.measure_min_repeat_ms,
        cooldown_ms=config.measure_cooldown_ms,
    )  # fmt: skip


def _search(run: TuningRun, parameters: TuneParameters, build_s: float) -> None:
    """Sessions until the budget is spent or nothing is expected to improve."""
    reason = search(run, lambda: _budget(run, parameters, build_s))
    run.ended = reason
    run.notes.append(f"tuning ended: {reason}")
    states = [plan.state_of(task, run.book.of(task.workload_key)) for task in run.tasks]
    run.notes += [f"{name}: {why}" for name, why in plan.closed_tasks(states).items() if "improvement" not in why]


def _budget(run: TuningRun, parameters: TuneParameters, build_s: float) -> Budget:
    """A wall-clock budget is for the whole run: building, confirming and verifying have their part."""
    stop_at = None
    if parameters.minutes is not None:
        searched = {r.workload_key for r in run.book.of_run(run.run_id) if r.phase == "search"}
        reserve_s = _RESERVE_S + 1.2 * build_s + _CONFIRM_S * len(searched)
        stop_at = run.started + parameters.minutes * 60 - reserve_s
    return Budget(parameters.trials, stop_at, parameters.floor_trials)


def _start_log(run: TuningRun, model: ModelFile, parameters: TuneParameters) -> None:
    config = settings()
    info = run.engine.describe()
    run.records = RecordStore(run.store, info.engine, info.tvm_version, info.target.key, config.home / "cache")
    run.samples = SampleStore(run.store, info, config.home)
    run.gains = GainStore(run.store, info, DEFAULT_SCHEDULES.get(info.engine, ""), run.measure.flush_cache)
    _take_lease(run, model)
    described = {
        **parameters.model_dump(exclude={"shapes"}), "target": info.target.spec, "target_key": info.target.key,
        "threads": info.target.threads, "device": info.device, "model_digest": model.digest,
        **{f"measure.{key}": value for key, value in asdict(run.measure).items()},
        **{f"version.{key}": value for key, value in info.versions.items()},
    }  # fmt: skip
    tags = {
        **origin(), "tunewright.run_id": run.run_id, "tunewright.model": model.name, **request_tags(parameters),
    }  # fmt: skip
    title = f"{model.name} {run.run_id}"
    run.log = patiently(
        "opening the run in MLflow",
        lambda: BackgroundLog.start(config.tracking, config.experiment, title, described, tags),
    )
    patiently("storing the run", lambda: _manifest(run).write_start(title, config.experiment, described, tags, info))


def _manifest(run: TuningRun) -> RunManifest:
    """The run as the object store has it, from which MLflow can be filled again."""
    return RunManifest(run.store, run.run_id)


def _store_tasks(run: TuningRun, fused: FusedModule) -> None:
    patiently("storing the run", lambda: _manifest(run).write_tasks(fused, run.tasks, run.book.all()))


def _take_lease(run: TuningRun, model: ModelFile) -> None:
    """No other run tunes this model for this target; what one that died had begun has ended. Raises RunInProgress."""
    lease = Lease(run.store, model.name, run.engine.describe().target.key, run.run_id)
    said = lambda text: run.observer(Progress("wait", message=text))  # noqa: E731
    patiently("taking the lease", lambda: lease.acquire(said))
    run.lease = lease
    config, reason = settings(), f"its process was gone; run {run.run_id} went on"
    for died in lease.died:
        if run.fleet is not None:
            run.fleet.wait_for_leftovers(died, _LEFTOVERS_S)
        end = partial(end_dead_run, config.tracking, config.experiment, died, reason)
        patiently("ending a dead run in MLflow", end)
    if lease.died:
        patiently("noting that a dead run has ended", lease.cleared)


def _log_fused(run: TuningRun, fused: FusedModule) -> None:
    states = [plan.state_of(task, run.book.of(task.workload_key)) for task in run.tasks]
    total_us = plan.model_latency_us(states, untuned=True) or 1.0
    share = {s.task.name: s.task.weight * (s.default_us or 0.0) / total_us for s in states}
    assert run.log is not None
    log = run.log
    patiently("logging the subgraphs", lambda: log.log_fused(fused, share))


def _summary(
    run: TuningRun, fused: FusedModule, verification: Verification, published: PublishedVersion, tuned: Artifact
) -> TuningSummary:
    states = [plan.state_of(task, run.book.of(task.workload_key)) for task in run.tasks]
    failures = Counter(record.failure.kind for record in run.book.of_run(run.run_id) if record.failure)
    seconds = {**run.seconds, "total": time.time() - run.started}
    return TuningSummary(
        model=fused.imported.model, engine=run.engine.describe(), granularity=fused.granularity,
        tasks=len(run.tasks), trials=searched_trials(run), reused_records=run.book.reused,
        failures=dict(failures), verdict=verification.verdict, published=published, artifact=tuned,
        seconds=seconds, notes=tuple(run.notes),
        reasons=explain(states, run.book.all(), run.ended),
    )  # fmt: skip


def _finish(run: TuningRun, summary: TuningSummary) -> None:
    """What could not be stored or logged on the way must get there now."""
    run.flush_journals(must=True)
    assert run.samples is not None
    run.samples.fetch_live(run.run_id)
    run.samples.publish(run.run_id)
    # Before MLflow is asked: where it is away now, 'tunewright sync' brings it what is here.
    _manifest(run).write_sources(run.sources)
    ended = _manifest(run).write_end(summary, sessions=run.session_log)
    for task in run.tasks:
        if task.workload_key in run.unlogged:
            run.log_task(task, must=True)
    assert run.log is not None
    run.log.log_tables({task.workload_key: run.book.of(task.workload_key) for task in run.tasks})
    run.log.log_sources(run.sources)
    run.log.log_sessions(run.session_log)
    log_outcome(run)
    run.log.finish(summary, ended)


def _tell_why(run: TuningRun, log: RunLog, reason: str) -> None:
    """Store and MLflow each hear why the run ended, whether or not the other can be reached."""
    try:
        _manifest(run).write_end(None, reason, run.session_log)
    except TunewrightError as error:
        logger.warning("%s", error)
    try:
        log.fail(reason)
    except TunewrightError as error:
        logger.warning("%s", error)


@contextmanager
def _failures_logged(run: TuningRun) -> Iterator[None]:
    """Whatever ends the run: what was measured is stored, and MLflow knows why it ended."""
    try:
        yield
    except BaseException as error:
        reason = str(error) if isinstance(error, TunewrightError) else f"{type(error).__name__}: {error}"
        if run.records is not None:
            run.flush_journals()
        if run.log is not None:
            _tell_why(run, run.log, reason or type(error).__name__)
        raise
    finally:
        if run.fleet is not None:
            run.fleet.close()
        if run.lease is not None:
            run.lease.release()
        forget(run.run_id)
