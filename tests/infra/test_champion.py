"""Who serves a target: the alias moves only from where the mover thought it was, and can be moved back."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from infra.champion import ChampionAlias, find_champion, roll_back
from infra.object_store import DirectoryStore, ObjectStore
from infra.promotion import Race
from infra.promotion_log import Move, PromotionLog
from infra.published_model import publish_model
from infra.tracking import Tracking
from tasks.errors import InputError
from tasks.records import PublishedVersion, TensorSpec
from tests.infra.test_published_model import artifact, latency, publication

TARGET = "cpu-abc"
_names = itertools.count()

#: Publishes a version of that many milliseconds, raced against the champion of that moment.
Publish = Callable[[float], PublishedVersion]


@pytest.fixture
def name() -> str:
    return f"served-{next(_names)}"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return DirectoryStore(tmp_path / "store")


@pytest.fixture
def client(mlflow_url: str) -> MlflowClient:
    return MlflowClient(tracking_uri=mlflow_url)


@pytest.fixture
def publish(mlflow_url: str, name: str, store: ObjectStore, tmp_path: Path) -> Publish:
    served: list[float] = []

    def publish_one(new_ms: float) -> PublishedVersion:
        champion = find_champion(mlflow_url, name, TARGET)
        race = Race(latency(new_ms), champion, latency(min(served))) if champion else Race(latency(new_ms))
        served.append(new_ms)
        made = artifact(tmp_path / f"artifact-{new_ms}", new_ms)
        return publish_model(mlflow_url, store, publication(mlflow_url, name, made), race)

    return publish_one


def champion(client: MlflowClient, name: str) -> str:
    return str(client.get_model_version_by_alias(name, "champion").version)


def test_rolling_back_twice_leads_to_the_first_champion_and_says_who_and_why(
    client: MlflowClient, mlflow_url: str, name: str, store: ObjectStore, publish: Publish
) -> None:
    assert [publish(ms).alias for ms in (3.0, 2.0, 1.0)] == ["champion"] * 3
    move, moved = roll_back(mlflow_url, store, name, TARGET, "wrong scores in production")
    assert (moved.done, moved.holder, champion(client, name)) == (True, "2", "2")
    assert move.who.partition("@")[2]
    assert "wrong scores in production" in client.get_model_version(name, "3").tags["rollback"]
    roll_back(mlflow_url, store, name, TARGET, "this one too")
    assert champion(client, name) == "1"
    with pytest.raises(InputError, match="no version was champion before version 1"):
        roll_back(mlflow_url, store, name, TARGET, "still wrong")
    assert champion(client, name) == "1"
    entries = PromotionLog(store, name, TARGET).entries()
    assert [e.move.action for e in entries] == ["promote"] * 3 + ["rollback"] * 2
    assert [e.champion for e in entries] == ["1", "2", "3", "2", "1"]
    assert entries[1].move.numbers["ratio_high"] < 1


def test_an_artifact_that_was_rolled_back_is_not_promoted_again(
    client: MlflowClient, mlflow_url: str, name: str, store: ObjectStore, publish: Publish, tmp_path: Path
) -> None:
    publish(3.0)
    publish(1.0)
    roll_back(mlflow_url, store, name, TARGET, "wrong scores")
    same = replace(artifact(tmp_path / "again", 1.0), path=str(tmp_path / "artifact-1.0"))
    other_run = publication(mlflow_url, f"{name}-other-run", same)
    race = Race(latency(1.0), find_champion(mlflow_url, name, TARGET), latency(3.0))
    published = publish_model(mlflow_url, store, replace(other_run, name=name), race)
    assert (published.alias, published.version) == ("challenger", "3")
    assert "was rolled back before (wrong scores)" in published.reason
    assert champion(client, name) == "1"


def test_an_alias_that_was_moved_by_hand_is_respected_and_written_down(
    client: MlflowClient, mlflow_url: str, name: str, store: ObjectStore, publish: Publish, tmp_path: Path
) -> None:
    publish(3.0)
    publish(2.0)
    raced = Race(latency(1.0), find_champion(mlflow_url, name, TARGET), latency(2.0))
    client.set_registered_model_alias(name, "champion", "1")
    third = publish_model(mlflow_url, store, publication(mlflow_url, name, artifact(tmp_path / "third", 9.0)), raced)
    assert third.alias == "challenger"
    assert "the champion is version 1 by now, not version 2" in third.reason
    assert champion(client, name) == "1"
    found = PromotionLog(store, name, TARGET).entries()[2].move
    assert (found.action, found.before, found.version) == ("found", "2", "1")
    # The next race is against the version that was chosen by hand.
    assert publish(0.5).alias == "champion"


def test_an_alias_that_moves_between_deciding_and_setting_is_not_overwritten(
    client: MlflowClient, mlflow_url: str, name: str, store: ObjectStore, publish: Publish
) -> None:
    publish(3.0)
    publish(2.0)
    publish_slower = publish(4.0)
    alias = ChampionAlias(Tracking(mlflow_url), store, name, TARGET)
    # Decided in the log, and then this mover dies; before anybody finishes it a person moves the alias.
    move = Move("promote", "champion", publish_slower.version, "2", "made up", "run x", time.time())
    assert alias.log.append(move, alias.log.entries()[-1].number + 1)
    client.set_registered_model_alias(name, "champion", "1")
    entries, now = alias.up_to_date()
    assert (now, champion(client, name)) == ("1", "1")
    outcome = entries[-2].outcome
    assert outcome is not None
    assert (outcome.state, outcome.found) == ("withdrawn", "1")


def test_a_move_that_was_broken_off_is_finished_by_whoever_comes_next(
    client: MlflowClient, mlflow_url: str, name: str, store: ObjectStore, publish: Publish
) -> None:
    publish(3.0)
    challenger = publish(9.0)
    alias = ChampionAlias(Tracking(mlflow_url), store, name, TARGET)
    move = Move("promote", "champion", challenger.version, "1", "made up", "run x", time.time())
    assert alias.log.append(move, alias.log.entries()[-1].number + 1)
    assert champion(client, name) == "1"
    assert alias.up_to_date()[1] == challenger.version == champion(client, name)
    # And nobody takes it for a move by hand.
    assert [e.move.action for e in alias.log.entries()] == ["promote", "challenge", "promote"]


def test_of_two_runs_that_promote_at_once_one_becomes_challenger(
    client: MlflowClient, mlflow_url: str, name: str, store: ObjectStore, publish: Publish, tmp_path: Path
) -> None:
    publish(3.0)
    old = find_champion(mlflow_url, name, TARGET)
    both = [publication(mlflow_url, name, artifact(tmp_path / f"both-{ms}", ms)) for ms in (0.25, 0.5)]
    together = threading.Barrier(2)

    def go(number: int) -> PublishedVersion:
        together.wait()
        return publish_model(mlflow_url, store, both[number], Race(latency(1.0), old, latency(3.0)))

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(go, range(2)))
    assert sorted(d.alias for d in done) == ["challenger", "champion"]
    winner, loser = sorted(done, key=lambda d: d.alias, reverse=True)
    assert champion(client, name) == winner.version
    assert f"the champion is version {winner.version} by now, not version 1" in loser.reason
    entries = PromotionLog(store, name, TARGET).entries()
    assert [e.number for e in entries] == [1, 2, 3]
    assert [e.move.action for e in entries] == ["promote", "promote", "challenge"]


def test_a_model_with_another_signature_is_not_promoted(
    client: MlflowClient, mlflow_url: str, name: str, store: ObjectStore, publish: Publish, tmp_path: Path
) -> None:
    publish(3.0)
    wider = publication(mlflow_url, name, artifact(tmp_path / "wider", 1.0))
    image = TensorSpec("image", (1, 3, 48, 320), "float32")
    wider = replace(wider, model=replace(wider.model, inputs=(image,)))
    race = Race(latency(1.0), find_champion(mlflow_url, name, TARGET), latency(3.0))
    published = publish_model(mlflow_url, store, wider, race)
    assert published.alias == "challenger"
    assert "its inputs are image 1x3x48x320 float32, those of version 1 image 1x3x48x192 float32" in published.reason
    assert champion(client, name) == "1"


def test_rolling_back_skips_a_version_that_was_deleted(
    client: MlflowClient, mlflow_url: str, name: str, store: ObjectStore, publish: Publish
) -> None:
    for ms in (3.0, 2.0, 1.0):
        publish(ms)
    client.delete_model_version(name, "2")
    _, moved = roll_back(mlflow_url, store, name, TARGET, "slow")
    assert (moved.holder, champion(client, name)) == ("1", "1")


def test_the_first_versions_of_two_targets_get_an_alias_each(
    client: MlflowClient, mlflow_url: str, name: str, store: ObjectStore, tmp_path: Path
) -> None:
    targets = (TARGET, "cuda-90")
    made = [publication(mlflow_url, name, artifact(tmp_path / t, n + 1.0), t) for n, t in enumerate(targets)]
    together = threading.Barrier(2)

    def go(number: int) -> PublishedVersion:
        together.wait()
        return publish_model(mlflow_url, store, made[number], Race(latency(1.0)))

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(go, range(2)))
    aliases = client.get_registered_model(name).aliases
    for target, published in zip(targets, done, strict=True):
        assert published.alias in ("champion", f"champion-{target}")
        found = find_champion(mlflow_url, name, target)
        assert found is not None
        assert found.version == published.version
    assert len(aliases) == 2
