"""Which webhook deliveries were accepted: one small object each, so that none is accepted twice.

The object store and not a local database: receivers may be several, may move, and are restarted, and the
store is the one thing that all of them share already. A delivery's identity and time are signed together
and only five minutes are allowed, so objects older than that may be removed by a lifecycle rule; the
day in the key is for that.
"""

from __future__ import annotations

import re
import time

from infra.object_store import ObjectStore

#: What a delivery may be called: it becomes part of a key.
_IDENTITY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class Deliveries:
    """The accepted deliveries in ``store``. Methods raise StoreError where it is away."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @staticmethod
    def is_identity(delivery_id: str) -> bool:
        """Whether ``delivery_id`` can be one."""
        return _IDENTITY.fullmatch(delivery_id) is not None

    def known(self, delivery_id: str, sent_at: int) -> bool:
        """Whether the delivery that was sent at the Unix time ``sent_at`` has been accepted."""
        return self._store.exists(_key(delivery_id, sent_at))

    def accept(self, delivery_id: str, sent_at: int) -> bool:
        """Write it down; False where it was there already."""
        return self._store.put(_key(delivery_id, sent_at), b"")


def _key(delivery_id: str, sent_at: int) -> str:
    return f"deliveries/{time.strftime('%Y-%m-%d', time.gmtime(sent_at))}/{delivery_id}"
