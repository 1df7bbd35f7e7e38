"""The alias of the version that serves a target: looked up, moved, moved back.

MLflow cannot move an alias only if it is where one thinks it is. So a move is decided in the promotion
log, where a number is taken once, and MLflow's alias follows it: read before, read after. Whoever comes
next finishes a move that was broken off in between. A move that somebody made by hand is respected.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any

from infra.object_store import ObjectStore
from infra.promotion import CHAMPION, Champion, alias_for
from infra.promotion_log import SET, WITHDRAWN, Entry, Move, Outcome, PromotionLog, champions, who
from infra.tracking import TEXT_LENGTH, Tracking
from tasks.errors import InputError, StoreError

#: Decisions of others that are met on the way to one's own; more mean that something is wrong.
_TRIES = 20


@dataclass(frozen=True)
class Moved:
    """Whether the alias was moved, to whom it belongs now (empty: nobody), and what there is to say."""

    done: bool
    holder: str
    message: str = ""


def find_champion(tracking_uri: str, name: str, target_key: str) -> Champion | None:
    """The version that serves ``target_key`` now, to be raced against. Raises TrackingError."""
    return champion_of(Tracking(tracking_uri), name, target_key)


def champion_of(tracking: Tracking, name: str, target_key: str) -> Champion | None:
    """``find_champion`` through an open connection."""
    plain = by_alias(tracking, name, CHAMPION)
    if plain is not None and plain.target_key == target_key:
        return plain
    return by_alias(tracking, name, alias_for(CHAMPION, target_key, ""))


def by_alias(tracking: Tracking, name: str, alias: str) -> Champion | None:
    """The version that has ``alias``; None where no version has it. Raises TrackingError."""

    def find(client: Any) -> Champion | None:
        from mlflow.exceptions import MlflowException

        try:
            found = client.get_model_version_by_alias(name, alias)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise
        tags = found.tags
        return Champion(
            name,
            str(found.version),
            alias,
            tags.get("target", ""),
            tags.get("artifact_digest", ""),
            tags.get("artifact_uri", ""),
        )

    return tracking.call(f"look up {name}@{alias}", find)


class ChampionAlias:
    """The champion's alias of one model name and target. Methods raise TrackingError and StoreError."""

    def __init__(self, tracking: Tracking, store: ObjectStore, name: str, target_key: str) -> None:
        self.name = name
        self.target_key = target_key
        self.log = PromotionLog(store, name, target_key)
        self._tracking = tracking

    def alias(self, role: str) -> str:
        """``role``'s alias for this target: the plain one, unless it belongs to another target."""
        plain = by_alias(self._tracking, self.name, CHAMPION)
        if plain is not None:
            return alias_for(role, self.target_key, plain.target_key)
        own = by_alias(self._tracking, self.name, alias_for(CHAMPION, self.target_key, ""))
        # Two targets may publish a name's first versions at once: one of them takes the plain alias.
        is_plain = own is None and self.log.owns_plain()
        return alias_for(role, self.target_key, None if is_plain else "")

    def holder(self) -> Champion | None:
        """The champion in MLflow now."""
        return champion_of(self._tracking, self.name, self.target_key)

    def up_to_date(self) -> tuple[list[Entry], str]:
        """The log's entries and the champion's version (empty: none), which agree from now on.

        A move that was broken off is finished, one that was made by hand is written down.
        """
        for _ in range(_TRIES):
            entries = self.log.entries()
            for entry in entries:
                if entry.pending:
                    self._finish(entry)
            if any(entry.pending for entry in entries):
                continue
            champion = self.holder()
            now = champion.version if champion else ""
            known = next((e.champion for e in reversed(entries) if e.champion is not None), "")
            if now == known:
                return entries, now
            reason = f"somebody else moved it from {_version(known)} to {_version(now)}"
            alias = champion.alias if champion else self.alias(CHAMPION)
            digest = champion.artifact_digest if champion else ""
            found = Move("found", alias, now, known, reason, who(), time.time(), digest)
            self.log.append(found, _next(entries))
        raise StoreError(f"the promotion log of {self.name} for {self.target_key} does not come to rest")

    def write(self, move: Move) -> None:
        """Write down a decision that moves nothing."""
        for _ in range(_TRIES):
            if self.log.append(move, _next(self.log.entries())):
                return
        raise StoreError(f"the promotion log of {self.name} for {self.target_key} does not come to rest")

    def move(self, move: Move) -> Moved:
        """Give the alias to ``move.version``, if it still belongs to ``move.before``."""
        for _ in range(_TRIES):
            entries, now = self.up_to_date()
            if now == move.version:
                return Moved(True, now, "it has the alias already")
            if now != move.before:
                return Moved(False, now, f"the champion is {_version(now)} by now, not {_version(move.before)}")
            number = _next(entries)
            if self.log.append(move, number):
                return self._finish(Entry(number, move))
        raise StoreError(f"the promotion log of {self.name} for {self.target_key} does not come to rest")

    def _finish(self, entry: Entry) -> Moved:
        """Set the alias of a move that is in the log, unless somebody moved it by hand meanwhile."""
        move = entry.move
        champion = by_alias(self._tracking, self.name, move.alias)
        now = champion.version if champion else ""
        if now not in (move.before, move.version):
            self.log.close(entry.number, Outcome(WITHDRAWN, now, who()))
            return Moved(False, now, f"somebody else gave {move.alias} to {_version(now)} meanwhile, which stays")
        if now != move.version and not self._set(move):
            self.log.close(entry.number, Outcome(WITHDRAWN, now, who()))
            return Moved(False, now, f"version {move.version} is not in the registry any more")
        self.log.close(entry.number, Outcome(SET, now, who()))
        later = [e for e in self.log.entries() if e.number > entry.number and e.champion]
        if later:
            # This process was held up between reading and setting: the log is right.
            self._set(replace(move, version=later[-1].champion or ""))
        after = by_alias(self._tracking, self.name, move.alias)
        holder = after.version if after else ""
        if holder != move.version:
            return Moved(False, holder, f"somebody else gave {move.alias} to {_version(holder)} right after")
        return Moved(True, holder)

    def _set(self, move: Move) -> bool:
        """False where the version is gone."""

        def write(client: Any) -> bool:
            from mlflow.exceptions import MlflowException

            try:
                client.set_registered_model_alias(self.name, move.alias, move.version)
            except MlflowException as error:
                if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                    return False
                raise
            return True

        return self._tracking.call(f"set alias {move.alias!r} of {self.name!r}", write)


def roll_back(
    tracking_uri: str,
    store: ObjectStore,
    name: str,
    target_key: str,
    why: str,
) -> tuple[Move, Moved]:
    """Give the champion's alias back to the version that had it before; a second call goes further back.

    Raises InputError where there is no such version, StoreError, TrackingError.
    """
    tracking = Tracking(tracking_uri)
    alias = ChampionAlias(tracking, store, name, target_key)
    entries, now = alias.up_to_date()
    gone = []
    for entry in reversed(champions(entries)):
        version = entry.champion or ""
        if version == now:
            continue
        if _is_there(tracking, name, version, entry.move.artifact_digest):
            break
        gone.append(version)
    else:
        lost = f"; gone from the registry: version {', '.join(gone)}" if gone else ""
        raise InputError(
            f"{name} on {target_key}: no version was champion before {_version(now)}{lost}; set the alias by hand "
            f"(MlflowClient().set_registered_model_alias), the next run will respect it"
        )
    present = alias.holder()
    move = Move(
        "rollback", present.alias if present else alias.alias(CHAMPION), version, now, why, who(), time.time(),
        entry.move.artifact_digest, present.artifact_digest if present else "",
    )  # fmt: skip
    moved = alias.move(move)
    if moved.done:
        _note(tracking, name, move)
    return move, moved


def targets_of(tracking_uri: str, name: str) -> dict[str, str]:
    """Each target that has a champion, and the champion's alias. Raises TrackingError, InputError."""
    tracking = Tracking(tracking_uri)

    def find(client: Any) -> dict[str, str] | None:
        from mlflow.exceptions import MlflowException

        try:
            aliases = client.get_registered_model(name).aliases
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        named = [a for a in aliases if a == CHAMPION or a.startswith(f"{CHAMPION}-")]
        return {client.get_model_version(name, aliases[a]).tags.get("target", ""): a for a in named}

    found = tracking.call(f"look up {name!r}", find)
    if found is None:
        raise InputError(f"the registry has no model {name!r}; 'tunewright history' lists what a name has")
    return found


def _note(tracking: Tracking, name: str, move: Move) -> None:
    """Write a rollback onto both versions, where people look."""
    texts = {move.version: f"{move.alias}: given back by {_version(move.before)}"}
    if move.before:
        texts[move.before] = f"rolled back to version {move.version}"
    for version, text in texts.items():
        note = f"{text} by {move.who}: {move.reason}"[:TEXT_LENGTH]
        tag = methodcaller("set_model_version_tag", name, version, "rollback", note)
        tracking.call(f"tag version {version} of {name!r}", tag)


def _is_there(tracking: Tracking, name: str, version: str, digest: str) -> bool:
    """Whether the registry still has this version, and under its number the same artifact."""

    def look(client: Any) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            tags = client.get_model_version(name, version).tags
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return False
            raise
        return not digest or tags.get("artifact_digest", digest) == digest

    return bool(version) and tracking.call(f"look up version {version} of {name!r}", look)


def _next(entries: list[Entry]) -> int:
    return entries[-1].number + 1 if entries else 1


def _version(version: str) -> str:
    return f"version {version}" if version else "nobody"
