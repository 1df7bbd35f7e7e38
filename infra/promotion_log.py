"""Every decision on who serves a target, in the object store: append-only, and the real compare-and-set.

    promotions/<name>/<target key>/<number>.json           a decision, numbered from 1 without gaps
    promotions/<name>/<target key>/<number>.outcome.json   what became of a decision to move the alias
    promotions/<name>/plain.json                           the target that took the plain aliases first

MLflow sets an alias whatever it was before. Here a number can be taken once: of two runs that decide
from the same premise one gets it, the other sees that its premise is gone.
"""

from __future__ import annotations

import getpass
import json
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from infra.object_store import ObjectStore, checked_key
from tasks.engines import wire

#: What a decision is. ``promote`` and ``rollback`` move the champion's alias, ``challenge`` does not;
#: ``found`` says that somebody else had moved it.
ACTIONS = ("promote", "rollback", "challenge", "found")
SET, WITHDRAWN = "set", "withdrawn"
_KEY = re.compile(r"(\d+)(\.outcome)?\.json")


@dataclass(frozen=True)
class Move:
    """One decision. ``before`` and ``version`` are versions, empty for nobody; ``at`` is a Unix time.

    ``dropped_digest`` is the artifact that a rollback took the alias from: no run promotes it again.
    """

    action: str
    alias: str
    version: str
    before: str
    reason: str
    who: str
    at: float
    artifact_digest: str = ""
    dropped_digest: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    schema_version: int = 1


@dataclass(frozen=True)
class Outcome:
    """What became of a move: ``set``, or ``withdrawn`` because the alias was with ``found`` by then."""

    state: str
    found: str = ""
    who: str = ""


@dataclass(frozen=True)
class Entry:
    """A move as it lies in the log. ``outcome`` is None while its alias is being set."""

    number: int
    move: Move
    outcome: Outcome | None = None

    @property
    def pending(self) -> bool:
        """Whether the alias may still have to be set."""
        return self.outcome is None and self.move.action in ("promote", "rollback")

    @property
    def champion(self) -> str | None:
        """The version that this entry made champion, empty for nobody; None where it made none."""
        if self.move.action == "found" or (self.outcome and self.outcome.state == SET):
            return self.move.version
        return None


class PromotionLog:
    """The decisions of one model name and target. Every method raises StoreError."""

    def __init__(self, store: ObjectStore, name: str, target_key: str) -> None:
        self._store = store
        self._name = checked_key(f"promotions/{name}")
        self._target = target_key
        self._root = checked_key(f"{self._name}/{target_key}")

    def entries(self) -> list[Entry]:
        """All decisions, oldest first."""
        moves: dict[int, Move] = {}
        outcomes: dict[int, Outcome] = {}
        for key in self._store.list(f"{self._root}/"):
            named = _KEY.fullmatch(key.removeprefix(f"{self._root}/"))
            if named and named[2]:
                outcomes[int(named[1])] = wire.from_line(Outcome, self._store.get(key))
            elif named:
                moves[int(named[1])] = wire.from_line(Move, self._store.get(key))
        return [Entry(number, moves[number], outcomes.get(number)) for number in sorted(moves)]

    def append(self, move: Move, number: int) -> bool:
        """Take ``number``, the next one; False where another decision has it."""
        return self._store.put(f"{self._root}/{number:06d}.json", wire.to_line(move).encode())

    def close(self, number: int, outcome: Outcome) -> bool:
        """Write what became of a move; False where that is written already."""
        return self._store.put(f"{self._root}/{number:06d}.outcome.json", wire.to_line(outcome).encode())

    def owns_plain(self) -> bool:
        """Take the plain aliases for this target; False where another target took them first."""
        key = f"{self._name}/plain.json"
        if self._store.put(key, json.dumps({"target_key": self._target}).encode()):
            return True
        return bool(json.loads(self._store.get(key))["target_key"] == self._target)


def champions(entries: Iterable[Entry]) -> list[Entry]:
    """Who was champion and is still worth going back to, the present one last.

    Going back to a version drops those that came after it: a second rollback leads further back.
    """
    held: list[Entry] = []
    for entry in entries:
        if entry.champion is None:
            continue
        versions = [e.champion for e in held]
        if entry.champion in versions:
            held = held[: versions.index(entry.champion)]
        held.append(entry)
    return held


def dropped_digests(entries: Iterable[Entry]) -> dict[str, str]:
    """Artifacts that were rolled back, and why, by digest."""
    return {e.move.dropped_digest: e.move.reason for e in entries if e.move.dropped_digest and e.champion}


def who() -> str:
    """This user and machine, for people who ask who moved an alias."""
    user = "somebody"
    # Containers often run as a user without a name.
    with suppress(KeyError, OSError):
        user = getpass.getuser()
    return f"{user}@{socket.gethostname()}"
