"""What the webhook receiver accepts and refuses, over HTTP; MLflow itself delivers in tests/flows/test_reconcile.py."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import pytest

from infra.deliveries import Deliveries
from infra.object_store import DirectoryStore
from infra.webhook import NewVersion, Receiver, make_app, signature
from tasks.errors import InputError, PrefectError
from tests.infra.receiving import serving

SECRET = "a secret of the tests"
LIMIT = 4096


@dataclass
class Told:
    """Whom the receiver tells: it keeps what it hears, or is away."""

    heard: list[NewVersion] = field(default_factory=list)
    away: bool = False

    async def __call__(self, found: NewVersion) -> None:
        await asyncio.sleep(0.05)
        if self.away:
            raise PrefectError("away")
        self.heard.append(found)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def url(told: Told, tmp_path: Path) -> Iterator[str]:
    with serving(receiver(told, tmp_path)) as address:
        yield address


def receiver(told: Told, folder: Path) -> Receiver:
    return Receiver(SECRET, Deliveries(DirectoryStore(folder / "store")), told, LIMIT)


def event(**tags: str) -> dict[str, Any]:
    data = {"name": "detector", "version": "3", "source": "models:/m-1", "run_id": None, "tags": tags}
    return {"entity": "model_version", "action": "created", "timestamp": "2026-11-30T00:00:00+00:00", "data": data}


def delivery(body: bytes, delivery_id: str = "d-1", sent_at: int | None = None, secret: str = SECRET) -> dict[str, str]:
    stamp = str(int(time.time()) if sent_at is None else sent_at)
    return {
        "X-MLflow-Delivery-Id": delivery_id,
        "X-MLflow-Timestamp": stamp,
        "X-MLflow-Signature": signature(secret, delivery_id, stamp, body),
        "Content-Type": "application/json",
    }


def encoded(content: object) -> bytes:
    return json.dumps(content).encode()


ASKING = encoded(event(**{"tunewright.target": "cpu, cuda"}))


def test_a_version_that_asks_is_told_of(url: str, told: Told) -> None:
    assert httpx.post(url, content=ASKING, headers=delivery(ASKING)).status_code == 202
    (found,) = told.heard
    assert (found.name, found.version, found.targets) == ("detector", "3", ("cpu", "cuda"))


def test_the_signature_is_mlflows_own(url: str, told: Told) -> None:
    from mlflow.webhooks.delivery import _generate_hmac_signature

    headers = delivery(ASKING)
    stamp = headers["X-MLflow-Timestamp"]
    headers["X-MLflow-Signature"] = _generate_hmac_signature(SECRET, "d-1", stamp, ASKING.decode())
    assert httpx.post(url, content=ASKING, headers=headers).status_code == 202


def test_a_forged_delivery_is_refused(url: str, told: Told) -> None:
    other = encoded(event(**{"tunewright.target": "cpu"}))
    whole = delivery(ASKING)
    forged = [
        (ASKING, delivery(ASKING, secret="another")),
        (other, whole),
        (ASKING, {**whole, "X-MLflow-Timestamp": str(int(whole["X-MLflow-Timestamp"]) + 1)}),
        (ASKING, {**whole, "X-MLflow-Delivery-Id": "d-2"}),
        (ASKING, {**whole, "X-MLflow-Signature": whole["X-MLflow-Signature"].removeprefix("v1,")}),
        (ASKING, {k: v for k, v in whole.items() if k != "X-MLflow-Signature"}),
    ]
    for body, headers in forged:
        assert httpx.post(url, content=body, headers=headers).status_code == 401, headers
    assert told.heard == []


@pytest.mark.parametrize("offset_s", [-301, 302])
def test_a_delivery_of_another_time_is_refused(url: str, told: Told, offset_s: int) -> None:
    headers = delivery(ASKING, sent_at=int(time.time()) + offset_s)
    assert httpx.post(url, content=ASKING, headers=headers).status_code == 401
    assert told.heard == []


def test_a_replay_is_refused_also_after_a_restart(url: str, told: Told, tmp_path: Path) -> None:
    headers = delivery(ASKING)
    assert httpx.post(url, content=ASKING, headers=headers).status_code == 202
    assert httpx.post(url, content=ASKING, headers=headers).status_code == 409
    with serving(receiver(told, tmp_path)) as again:
        assert httpx.post(again, content=ASKING, headers=headers).status_code == 409
    assert len(told.heard) == 1


def test_of_the_same_delivery_many_times_at_once_one_is_accepted(url: str, told: Told) -> None:
    headers = delivery(ASKING)

    async def send() -> list[int]:
        async with httpx.AsyncClient() as client:
            answers = await asyncio.gather(*(client.post(url, content=ASKING, headers=headers) for _ in range(6)))
        return sorted(answer.status_code for answer in answers)

    assert asyncio.run(send()) == [202, 409, 409, 409, 409, 409]
    assert len(told.heard) == 1


def test_what_could_not_be_passed_on_is_accepted_at_the_next_try(url: str, told: Told) -> None:
    headers = delivery(ASKING)
    told.away = True
    assert httpx.post(url, content=ASKING, headers=headers).status_code == 503
    told.away = False
    assert httpx.post(url, content=ASKING, headers=headers).status_code == 202
    assert len(told.heard) == 1


def test_an_oversized_body_is_refused_while_it_is_read(url: str, told: Told) -> None:
    large = encoded({**event(), "more": "x" * LIMIT})
    assert httpx.post(url, content=large, headers=delivery(large)).status_code == 413
    # Without a length, and without an end: the answer comes long before all of it was sent.
    address = urlparse(url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=20) as sender:
        head = f"POST {address.path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        sender.sendall(head.encode())
        for _ in range(LIMIT // 1024 + 2):
            sender.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
        assert b" 413 " in sender.recv(4096).splitlines()[0]
    assert told.heard == []


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"not JSON", 400),
        (b"[]", 400),
        (encoded({"entity": "registered_model", "action": "created", "data": {}}), 422),
        (encoded({"entity": "model_version_tag", "action": "set", "data": {}}), 422),
        (encoded({"entity": "model_version", "action": "created", "data": {"name": "x"}}), 400),
        (encoded({"entity": "model_version", "action": "created"}), 400),
        (encoded(event()), 200),
        (encoded(event(**{"tunewright.target": " "})), 200),
        # Published by Tunewright: it would answer itself for ever.
        (encoded(event(**{"tunewright.target": "cpu", "artifact_digest": "a" * 64})), 200),
        (encoded(event(**{"tunewright.target": '{"kind": "llvm"'})), 200),
    ],
)
def test_what_names_no_asking_version_starts_nothing(url: str, told: Told, content: bytes, status: int) -> None:
    assert httpx.post(url, content=content, headers=delivery(content)).status_code == status
    assert told.heard == []


@pytest.mark.parametrize("delivery_id", ["", "../../x", "a/b", "x" * 200])
def test_a_delivery_cannot_choose_where_it_is_kept(url: str, told: Told, delivery_id: str) -> None:
    assert httpx.post(url, content=ASKING, headers=delivery(ASKING, delivery_id)).status_code == 400


def test_without_a_secret_nothing_is_served(told: Told, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="TUNEWRIGHT_WEBHOOK_SECRET"):
        make_app(Receiver("", Deliveries(DirectoryStore(tmp_path)), told, LIMIT))


def test_the_secret_is_not_logged(url: str, told: Told, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    for headers in (delivery(ASKING), delivery(ASKING, "d-2", secret="wrong")):
        httpx.post(url, content=ASKING, headers=headers)
    assert "refused (401)" in caplog.text
    assert SECRET not in caplog.text
    assert headers["X-MLflow-Signature"] not in caplog.text
