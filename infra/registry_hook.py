"""Registers the receiver with MLflow, as often as one likes."""

from __future__ import annotations

from typing import Any

from infra.tracking import Tracking

NAME = "tunewright"
_EVENTS = ["model_version.created"]


def install(tracking: Tracking, url: str, secret: str) -> str:
    """Have MLflow send new versions to ``url``; returns the webhook's id. Raises TrackingError.

    A webhook of our name is brought to this address and secret: a second call leaves one. MLflow's server
    keeps webhooks in a database only, and refuses addresses that its own settings do not allow.
    """

    def put(client: Any) -> str:
        for hook in _all(client):
            if hook.name == NAME:
                made = client.update_webhook(hook.webhook_id, url=url, events=_EVENTS, secret=secret, status="ACTIVE")
                return str(made.webhook_id)
        about = "Tells Tunewright of new model versions."
        return str(client.create_webhook(NAME, url, _EVENTS, about, secret).webhook_id)

    return tracking.call(f"register the webhook {url}", put)


def try_out(tracking: Tracking, webhook_id: str) -> tuple[bool, str]:
    """Have MLflow send an example; whether the receiver took it, and what was answered. Raises TrackingError."""

    def send(client: Any) -> tuple[bool, str]:
        result = client.test_webhook(webhook_id)
        return bool(result.success), str(result.error_message or f"status {result.response_status}")

    return tracking.call("send an example delivery", send)


def _all(client: Any) -> list[Any]:
    found: list[Any] = []
    token = None
    while True:
        page = client.list_webhooks(page_token=token)
        found += page
        token = page.token
        if not token:
            return found
