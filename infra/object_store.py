"""The object store: a directory here, S3 in s3_store.py. Keys are written once and never change.

Keys look like ``records/relax/0.27.0/cpu-8f3a/1c9d/session.jsonl``: segments between single slashes,
none of them empty, ``.`` or ``..``. Foreign errors become a StoreError in these two files and nowhere else.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlparse

from infra.settings import settings
from tasks.errors import StoreError

#: Keys below these are the store's own: ``list`` leaves them out.
_INCOMING = ".incoming"
PROBE = ".probe"


class ObjectMissing(StoreError):
    """No object has this key. Raised by ``get`` and ``get_folder``; asking again does not help."""

    retried = False


class ObjectStore(Protocol):
    """Objects by key, created once, never overwritten, safe for any number of writers."""

    def put(self, key: str, data: bytes) -> bool:
        """Create the object; False, and nothing changed, where ``key`` exists already.

        A reader sees the whole object or none. Raises StoreError.
        """

    def put_file(self, key: str, path: Path) -> bool:
        """``put`` with the contents of ``path``, never whole in memory. Raises StoreError."""

    def get(self, key: str) -> bytes:
        """The object's bytes. Raises ObjectMissing, StoreError."""

    def exists(self, key: str) -> bool:
        """Whether the object is there. Raises StoreError."""

    def list(self, prefix: str) -> Iterator[str]:
        """Every key that starts with ``prefix``, sorted. Raises StoreError."""

    def uri(self, key: str) -> str:
        """Where people and other programs find ``key``. Raises StoreError for an impossible key."""

    def check(self) -> None:
        """Write and read a probe, so that hours of tuning do not end at an unwritable store.

        Raises StoreError, one line that says what to do.
        """


def open_store(url: str, endpoint_url: str | None = None) -> ObjectStore:
    """The store at ``s3://bucket/prefix``, ``file:///directory`` or a directory; connects to nothing yet.

    ``endpoint_url`` defaults to the setting. Raises StoreError for any other kind of URL.
    """
    parts = urlparse(url)
    if parts.scheme == "s3" and parts.netloc:
        from infra.s3_store import S3Store

        return S3Store(url, settings().s3_endpoint_url if endpoint_url is None else endpoint_url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return DirectoryStore(Path(unquote(parts.path)))
    if url and "://" not in url:
        return DirectoryStore(Path(url))
    raise StoreError(f"object store {url!r} is neither s3://bucket/prefix nor a directory; set TUNEWRIGHT_STORE")


class DirectoryStore:
    """Objects as files below ``path``, which is created when the first one is put."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path).expanduser().absolute()

    def put(self, key: str, data: bytes) -> bool:
        """See ObjectStore. Raises StoreError."""
        return self._create(key, lambda descriptor: _write_all(descriptor, data))

    def put_file(self, key: str, path: Path) -> bool:
        """See ObjectStore. Raises StoreError."""

        def copy(descriptor: int) -> None:
            with path.open("rb") as source, os.fdopen(os.dup(descriptor), "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)

        return self._create(key, copy)

    def get(self, key: str) -> bytes:
        """See ObjectStore. Raises ObjectMissing, StoreError."""
        with self._translated(f"read {key}"):
            try:
                return self._file(key).read_bytes()
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                raise ObjectMissing(f"no object {key!r} in {self.path}") from None

    def exists(self, key: str) -> bool:
        """See ObjectStore. Raises StoreError."""
        with self._translated(f"look for {key}"):
            return self._file(key).is_file()

    def list(self, prefix: str) -> Iterator[str]:
        """See ObjectStore. Raises StoreError."""
        folder, _, _ = prefix.rpartition("/")
        keys = []
        with self._translated(f"list {prefix}"):
            start = self._file(folder) if folder else self.path
            for where, _, names in os.walk(start):
                base = Path(where).relative_to(self.path)
                keys += [key for name in names if (key := (base / name).as_posix()).startswith(prefix)]
        yield from sorted(key for key in keys if not key.startswith((_INCOMING, PROBE)))

    def uri(self, key: str) -> str:
        """See ObjectStore. Raises StoreError."""
        return (self._file(key) if key else self.path).as_uri()

    def check(self) -> None:
        """See ObjectStore. Raises StoreError."""
        key = f"{PROBE}/{uuid.uuid4().hex}"
        probe(self, key)
        with suppress(OSError):
            self._file(key).unlink()

    def _file(self, key: str) -> Path:
        return self.path / checked_key(key)

    def _create(self, key: str, fill: Callable[[int], None]) -> bool:
        """Fill a file that nobody sees, then link it to its name: the link fails where the name is taken."""
        final = self._file(key)
        incoming = self.path / _INCOMING / uuid.uuid4().hex
        with self._translated(f"write {key}"):
            if final.exists():
                return False
            incoming.parent.mkdir(parents=True, exist_ok=True)
            final.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(incoming, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                fill(descriptor)
                # Before the name: after a power cut an object is whole or absent.
                os.fsync(descriptor)
                os.link(incoming, final)
            except FileExistsError:
                return False
            finally:
                os.close(descriptor)
                incoming.unlink(missing_ok=True)
            return True

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                advice = "the file system must support hard links"
            elif error.errno == errno.ENOSPC:
                advice = "free some space"
            else:
                advice = "make it a directory that this user can write"
            raise StoreError(
                f"cannot {doing} in object store {self.path}: {error.strerror or error}; "
                f"{advice}, or set TUNEWRIGHT_STORE to another place"
            ) from error


def put_folder(store: ObjectStore, prefix: str, folder: Path) -> str:
    """Store every file of ``folder`` below ``prefix``, an index last; returns the folder's URI.

    The index says that the folder is whole: where it is there, nothing is sent. Raises StoreError,
    also where an interrupted upload left other contents under the same name.
    """
    index = _index_key(prefix)
    if store.exists(index):
        return store.uri(prefix)
    digests = {}
    files = (p for p in folder.rglob("*") if p.is_file() and p.parent.name != "__pycache__")
    for path in sorted(files):
        name = path.relative_to(folder).as_posix()
        with path.open("rb") as source:
            digests[name] = hashlib.file_digest(source, "sha256").hexdigest()
        key = f"{prefix}/{name}"
        if not store.put_file(key, path) and _sha256(store.get(key)) != digests[name]:
            raise StoreError(f"{store.uri(key)} differs from {path}: one digest, two contents; remove it")
    store.put(index, json.dumps(digests, indent=1, sort_keys=True).encode())
    return store.uri(prefix)


def get_folder(store: ObjectStore, prefix: str, folder: Path) -> Path:
    """The folder that ``put_folder`` stored, written to ``folder``, every file checked.

    Raises ObjectMissing where it is not there or not whole, StoreError where a file was damaged.
    """
    for name, digest in json.loads(store.get(_index_key(prefix))).items():
        data = store.get(f"{prefix}/{checked_key(name)}")
        if _sha256(data) != digest:
            raise StoreError(f"{store.uri(f'{prefix}/{name}')} is damaged: its sha256 is not {digest}")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def checked_key(key: str) -> str:
    """``key`` where it is one. Raises StoreError: a key must not lead out of the store."""
    if any(part in ("", ".", "..") for part in key.split("/")) or not key.isprintable() or "\\" in key:
        raise StoreError(f"{key!r} is not an object key: segments must be printable, not empty, '.' or '..'")
    return key


def _index_key(prefix: str) -> str:
    return f"{prefix.rstrip('/')}.folder.json"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def probe(store: ObjectStore, key: str) -> None:
    """Write ``key``, try to overwrite it, read it: what every store's ``check`` does. Raises StoreError."""
    text = b"tunewright probe\n"
    store.put(key, text)
    if store.put(key, b"overwritten") or store.get(key) != text:
        raise StoreError(
            f"{store.uri(key)} could be overwritten: the store must honour If-None-Match, "
            "or records get lost; use another store"
        )
