"""Model versions that people register for Tunewright, and what their tags ask for.

A version asks to be tuned by the tag ``tunewright.target``. Versions that Tunewright itself published
have the tag ``artifact_digest`` and never ask for anything, whatever was copied onto them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any

from infra.tracking import TEXT_LENGTH, Tracking
from tasks.errors import InputError
from tasks.records import short_hash

TARGET_TAG = "tunewright.target"
NIGHTLY_TAG = "tunewright.nightly"
#: What reconcile and the night write onto a version, followed by the target.
TUNED_TAG = "tunewright.tuned."
GIVEN_UP_TAG = "tunewright.given_up."
FAILED_TAG = "tunewright.failed."
#: What ``infra/published_model.py`` writes onto its versions.
PUBLISHED_TAG, SOURCE_TAG, REQUESTED_TAG = "artifact_digest", "source", "requested_target"
_PAGE = 1000


@dataclass(frozen=True)
class SourceVersion:
    """A registered version as its owner made it; ``tags`` are its own, over those of its model."""

    name: str
    version: str
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """How a run names it."""
        return f"models:/{self.name}/{self.version}"


def is_published(tags: Mapping[str, str]) -> bool:
    """Whether Tunewright itself made the version."""
    return PUBLISHED_TAG in tags


def targets_of(tags: Mapping[str, str]) -> tuple[str, ...]:
    """The targets that a version asks for: none for a version of our own.

    They are separated by commas, or a JSON list; a target may itself be JSON: commas in braces do not count.
    Raises InputError where braces do not match.
    """
    text = "" if is_published(tags) else tags.get(TARGET_TAG, "").strip()
    if text.startswith("["):
        try:
            listed = json.loads(text)
        except ValueError as error:
            raise InputError(f"tag {TARGET_TAG} is not a JSON list: {text[:200]}") from error
        texts = [entry if isinstance(entry, str) else json.dumps(entry) for entry in listed]
    else:
        texts = _split(text)
    return tuple(dict.fromkeys(part.strip() for part in texts if part.strip()))


def target_slug(target: str) -> str:
    """``target`` as a part of a tag's key, of a flow run's name and of an idempotency key."""
    return target if re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", target) else f"json-{short_hash(target, length=8)}"


class SourceVersions:
    """The registry at ``tracking``. Every method raises TrackingError."""

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking

    def get(self, name: str, version: str) -> SourceVersion:
        """One version. Raises TrackingError where there is none, too."""
        find = methodcaller("get_model_version", name, version)
        return _source(self._tracking.call(f"look up {name} version {version}", find))

    def asking(self) -> list[SourceVersion]:
        """Every version with the tag ``tunewright.target`` that is not our own, the newest first."""
        wanted = f"tags.`{TARGET_TAG}` LIKE '%'"
        found = self._pages("search_model_versions", wanted, order_by=["creation_timestamp DESC"])
        return [source for version in found if not is_published((source := _source(version)).tags)]

    def nightly(self) -> tuple[list[SourceVersion], list[str]]:
        """The newest asking version of every model with the tag ``tunewright.nightly``, and models without one.

        The tags of the model count where the version has none of that name.
        """
        models = self._pages("search_registered_models", f"tags.`{NIGHTLY_TAG}` LIKE '%'")
        wanted = {m.name: dict(m.tags) for m in models if m.tags[NIGHTLY_TAG].lower() not in ("false", "no", "0", "")}
        newest: dict[str, SourceVersion] = {}
        for source in self.asking() if wanted else []:
            known = newest.get(source.name)
            if source.name in wanted and (known is None or int(source.version) > int(known.version)):
                newest[source.name] = source
        found = [SourceVersion(s.name, s.version, {**wanted[s.name], **s.tags}) for s in newest.values()]
        return found, sorted(wanted.keys() - newest.keys())

    def published(self, source: SourceVersion, target: str) -> str | None:
        """The newest version that was made from ``source`` for ``target``, as name and version.

        Raises InputError where MLflow cannot search for them.
        """
        wanted = f"tags.`{SOURCE_TAG}` = {literal(source.model)} and tags.`{REQUESTED_TAG}` = {literal(target)}"
        found = self._pages("search_model_versions", wanted)
        newest = max(found, key=lambda version: int(version.creation_timestamp), default=None)
        return f"{newest.name} version {newest.version}" if newest else None

    def mark(self, source: SourceVersion, key: str, text: str) -> None:
        """Write a tag onto the version, for people and for the next look."""
        write = methodcaller("set_model_version_tag", source.name, source.version, key, text[:TEXT_LENGTH])
        self._tracking.call(f"tag {source.name} version {source.version}", write)

    def unmark(self, source: SourceVersion, key: str) -> None:
        """Take a tag off the version."""
        remove = methodcaller("delete_model_version_tag", source.name, source.version, key)
        self._tracking.call(f"untag {source.name} version {source.version}", remove)

    def decision(self, name: str, version: str) -> str:
        """Why a published version has the alias that it has."""
        found = self._tracking.call(
            f"look up {name} version {version}", methodcaller("get_model_version", name, version)
        )
        return str(found.tags.get("decision", ""))

    def _pages(self, method: str, wanted: str, **how: Any) -> list[Any]:
        found: list[Any] = []
        token = None
        while True:
            ask: Callable[[Any], Any] = partial(_ask, method, wanted, token, how)
            page = self._tracking.call("search the model registry", ask)
            found += page
            token = page.token
            if not token:
                return found


def _ask(method: str, wanted: str, token: str | None, how: Mapping[str, Any], client: Any) -> Any:
    return getattr(client, method)(filter_string=wanted, max_results=_PAGE, page_token=token, **how)


def _source(version: Any) -> SourceVersion:
    return SourceVersion(str(version.name), str(version.version), dict(version.tags))


def literal(text: str) -> str:
    """``text`` as MLflow's filters take it, which know no escapes. Raises InputError."""
    for quote in ("'", '"'):
        if quote not in text:
            return f"{quote}{text}{quote}"
    raise InputError(f"MLflow cannot search for a text with both kinds of quotes: {text[:200]}")


def _split(text: str) -> list[str]:
    """Split at the commas outside braces and brackets. Raises InputError."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if depth != 0:
        raise InputError(f"tag {TARGET_TAG} has braces that do not match: {text[:200]}")
    return parts
