"""The flow that starts what is missing: versions that ask to be tuned and have no tuned artifact.

It runs every few minutes, and for one version whenever its webhook's event comes. However often both fire,
a version and target get one run: attempt n has one idempotency key, and attempt n + 1 is only begun
after attempt n has failed (docs/adr/0009-exactly-one-run.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prefect import flow, get_run_logger

from flows.due import Request, requests_of
from infra import flow_runs
from infra.flow_runs import StartedRun
from infra.settings import settings
from infra.source_versions import (
    GIVEN_UP_TAG,
    TARGET_TAG,
    TUNED_TAG,
    SourceVersion,
    SourceVersions,
    is_published,
    target_slug,
)
from infra.tracking import Tracking
from tasks.errors import InputError, RunInProgress, TunewrightError, all_errors

#: Attempts that met another run of the same model and target are not counted, but not without end either.
_IN_PROGRESS = 20


@dataclass
class Reconciled:
    """What one look at the registry did, by the titles of requests; ``problems`` say why."""

    tuned: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


@flow(name="reconcile", validate_parameters=True)
def reconcile(name: str = "", version: str = "") -> Reconciled:
    """Look at all versions that ask, or at one. Raises TrackingError, PrefectError."""
    logger = get_run_logger()
    registry = SourceVersions(Tracking(settings().tracking))
    sources = [registry.get(name, version)] if name else registry.asking()
    done = Reconciled()
    open_requests = _open_requests(registry, sources, done)
    keys = [run_key(request, n) for request in open_requests for n in _attempts()]
    runs = flow_runs.by_key(keys)
    for request in open_requests:
        try:
            _advance(registry, request, runs, done)
        except TunewrightError as error:  # one version's trouble is not the others'
            done.problems[request.title] = str(error)
    for title in done.started:
        logger.info("started %s", title)
    for title, why in done.problems.items():
        logger.warning("%s: %s", title, why)
    return done


def run_key(request: Request, attempt: int) -> str:
    """The idempotency key of an attempt, counted from 1."""
    source = request.source
    return f"tunewright/{source.name}/{source.version}/{target_slug(request.target)}/{attempt}"


def _attempts() -> range:
    return range(1, settings().start_attempts + _IN_PROGRESS + 1)


def _open_requests(registry: SourceVersions, sources: Iterable[SourceVersion], done: Reconciled) -> list[Request]:
    """What is asked for and neither tuned nor given up."""
    found = []
    for source in sources:
        if is_published(source.tags) or TARGET_TAG not in source.tags:
            continue
        try:
            found += [request for request in requests_of(source) if not _is_settled(registry, request, done)]
        except InputError as error:
            done.problems[f"{source.name} version {source.version}"] = str(error)
    return found


def _is_settled(registry: SourceVersions, request: Request, done: Reconciled) -> bool:
    """Whether the request was tuned or given up. Raises InputError, TrackingError."""
    source, slug = request.source, target_slug(request.target)
    if GIVEN_UP_TAG + slug in source.tags:
        return True
    if TUNED_TAG + slug not in source.tags:
        published = registry.published(source, request.target)
        if not published:
            return False
        # Written down, so that the next look need not search again.
        registry.mark(source, TUNED_TAG + slug, published)
    done.tuned.append(request.title)
    return True


def _advance(registry: SourceVersions, request: Request, runs: Mapping[str, StartedRun], done: Reconciled) -> None:
    """Start the attempt that is next, if any. Raises PrefectError, TrackingError."""
    failures: list[str] = []
    for attempt in _attempts():
        run = runs.get(run_key(request, attempt))
        if run is None:
            _start(request, attempt)
            done.started.append(request.title)
            return
        if not run.is_over:
            done.waiting.append(request.title)
            return
        if run.state == "COMPLETED" and (published := registry.published(request.source, request.target)):
            registry.mark(request.source, TUNED_TAG + target_slug(request.target), published)
            done.tuned.append(request.title)
            return
        reason = run.message or f"its run ended as {run.state}"
        if RunInProgress.__name__ not in reason:
            failures.append(reason)
        if run.state == "CANCELLED" or _is_final(reason) or len(failures) >= settings().start_attempts:
            break
    why = f"{len(failures)} of its runs failed, the last one: {failures[-1] if failures else 'another run was there'}"
    done.problems[request.title] = f"given up: {why}"
    registry.mark(request.source, GIVEN_UP_TAG + target_slug(request.target), why)


def _start(request: Request, attempt: int) -> StartedRun:
    name = f"{request.source.name}-{request.source.version}-{target_slug(request.target)}"
    parameters = {"parameters": request.parameters().model_dump(mode="json")}
    return flow_runs.start(parameters, run_key(request, attempt), name if attempt == 1 else f"{name}-{attempt}")


def _is_final(message: str) -> bool:
    """Whether the error that ended the run comes again however often it is tried: bad input stays bad."""
    named = re.findall(r"\b([A-Z][A-Za-z]+)\b:", message)
    known = all_errors()
    return any(issubclass(known[name], InputError) for name in named if name in known)
