"""Receives MLflow's registry webhooks and turns each new version that asks to be tuned into a Prefect event.

A delivery is untrusted until its signature has been checked over the raw body. What it leads to is only
an event that names a version: what is run, and whether, is decided from the registry (flows/reconcile.py).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from infra.deliveries import Deliveries
from infra.source_versions import targets_of
from tasks.errors import InputError, PrefectError, StoreError

logger = logging.getLogger("tunewright")

PATH = "/mlflow"
#: A delivery that was signed longer ago, or further ahead, is refused.
TOLERANCE_S = 300
#: How long the body may take to arrive.
_BODY_TIMEOUT_S = 10.0
_SIGNATURE, _TIMESTAMP, _DELIVERY = "x-mlflow-signature", "x-mlflow-timestamp", "x-mlflow-delivery-id"


class Refused(Exception):
    """A delivery that is not accepted: the status of the answer, and why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class NewVersion:
    """A version that was registered and asks for ``targets``; ``event_id`` is the same however often it is sent."""

    name: str
    version: str
    targets: tuple[str, ...]
    event_id: uuid.UUID


@dataclass
class Receiver:
    """What deliveries are checked against, and whom to ``tell`` of new versions (raises PrefectError)."""

    secret: str
    deliveries: Deliveries
    tell: Callable[[NewVersion], Awaitable[None]]
    body_bytes: int
    clock: Callable[[], float] = time.time
    in_hand: set[str] = field(default_factory=set)

    async def receive(self, request: Request) -> Response:
        """Answer one delivery: 202 accepted, 200 nothing to do, or the status of what is wrong with it."""
        try:
            body = await self._body(request)
            delivery_id, sent_at = self._checked(request.headers, body)
            found = new_version(body, delivery_id)
            if found is None:
                return JSONResponse({"status": "ignored"})
            return await self._accept(found, delivery_id, sent_at)
        except Refused as error:
            logger.warning("delivery refused (%d): %s", error.status, error)
            return JSONResponse({"status": "refused", "reason": str(error)}, error.status)
        except (PrefectError, StoreError) as error:
            # MLflow tries again a few times; after that the version is found by reconcile.
            logger.warning("delivery not accepted: %s", error)
            return JSONResponse({"status": "unavailable"}, 503, {"Retry-After": "5"})

    async def _body(self, request: Request) -> bytes:
        """The body, read no further than the limit: a length may be missing or a lie."""
        received = bytearray()
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    received += chunk
                    if len(received) > self.body_bytes:
                        raise Refused(413, f"the body has more than {self.body_bytes} bytes")
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {_BODY_TIMEOUT_S:g} s") from None
        except ClientDisconnect:
            raise Refused(400, "the sender went away") from None
        return bytes(received)

    def _checked(self, headers: Mapping[str, str], body: bytes) -> tuple[str, int]:
        """The delivery's identity and Unix time, if it was signed with our secret just now. Raises Refused."""
        delivery_id, stamp = headers.get(_DELIVERY, ""), headers.get(_TIMESTAMP, "")
        if not Deliveries.is_identity(delivery_id) or not (stamp.isascii() and stamp.isdigit() and len(stamp) <= 12):
            raise Refused(400, "the headers of an MLflow delivery are missing or malformed")
        expected = signature(self.secret, delivery_id, stamp, body)
        given = headers.get(_SIGNATURE, "")
        if not hmac.compare_digest(expected.encode(), given.encode("utf-8", "replace")):
            raise Refused(401, "the signature does not match")
        if abs(self.clock() - int(stamp)) > TOLERANCE_S:
            raise Refused(401, f"it was signed more than {TOLERANCE_S} s ago or ahead")
        return delivery_id, int(stamp)

    async def _accept(self, found: NewVersion, delivery_id: str, sent_at: int) -> Response:
        """Tell of the version, then write the delivery down: the other way round, a failure would lose it."""
        if delivery_id in self.in_hand:
            raise Refused(409, f"delivery {delivery_id} is being accepted")
        self.in_hand.add(delivery_id)
        try:
            if await run_in_threadpool(self.deliveries.known, delivery_id, sent_at):
                raise Refused(409, f"delivery {delivery_id} was accepted before")
            await self.tell(found)
            await run_in_threadpool(self.deliveries.accept, delivery_id, sent_at)
        finally:
            self.in_hand.discard(delivery_id)
        logger.info("%s version %s asks for %s", found.name, found.version, ", ".join(found.targets))
        return JSONResponse({"status": "accepted"}, 202)


def make_app(receiver: Receiver) -> Starlette:
    """``POST /mlflow`` receives deliveries, ``GET /health`` answers. Raises InputError where there is no secret."""
    if not receiver.secret:
        raise InputError("no secret to check deliveries with; set TUNEWRIGHT_WEBHOOK_SECRET")

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[Route(PATH, receiver.receive, methods=["POST"]), Route("/health", health, methods=["GET"])]
    )


def signature(secret: str, delivery_id: str, timestamp: str, body: bytes) -> str:
    """What MLflow puts into ``X-MLflow-Signature``."""
    signed = f"{delivery_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(secret.encode(), signed, hashlib.sha256).digest()).decode()


def new_version(body: bytes, delivery_id: str) -> NewVersion | None:
    """The version that an authentic delivery tells of; None where it asks for nothing. Raises Refused."""
    try:
        parsed: Any = json.loads(body)
        event = (parsed["entity"], parsed["action"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Refused(400, "the body is not an MLflow event") from None
    if event != ("model_version", "created"):
        raise Refused(422, "only model_version.created is received")
    data = parsed.get("data")
    name, version = (data.get("name"), str(data.get("version"))) if isinstance(data, dict) else (None, "")
    tags = data.get("tags") or {} if isinstance(data, dict) else None
    if not isinstance(name, str) or not name or not version.isdecimal() or not isinstance(tags, dict):
        raise Refused(400, "the event names no model version")
    try:
        targets = targets_of({str(key): str(value) for key, value in tags.items()})
    except InputError as error:
        # Reconcile reports it; to MLflow nothing is wrong.
        logger.warning("%s version %s: %s", name, version, error)
        return None
    return NewVersion(name, version, targets, uuid.uuid5(uuid.NAMESPACE_URL, delivery_id)) if targets else None
