"""The object store: S3, or a directory. Keys are written once and never change.

Keys look like ``records/relax/0.27.0/cpu-8f3a/1c9d/session.jsonl``: segments between single slashes,
none of them empty, ``.`` or ``..``. Foreign errors become a StoreError here and nowhere else.
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
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import unquote, urlparse

from tenacity import (
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential_jitter,
)

from infra.settings import settings
from tasks.errors import StoreError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")

#: Keys below these are the store's own: ``list`` leaves them out.
_INCOMING = ".incoming"
_PROBE = ".probe"

_THROTTLED = {
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "RequestTimeout",
    "RequestLimitExceeded",
    # Another writer of the same key is not finished: asking again tells who was first.
    "ConditionalRequestConflict",
    "OperationAborted",
}
_DENIED = {
    "AccessDenied",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "403",
}


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
        return S3Store(url, settings().s3_endpoint_url if endpoint_url is None else endpoint_url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return DirectoryStore(Path(unquote(parts.path)))
    if url and "://" not in url:
        return DirectoryStore(Path(url))
    raise StoreError(
        f"object store {url!r} is neither s3://bucket/prefix nor a directory; set TUNEWRIGHT_STORE"
    )


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
        yield from sorted(key for key in keys if not key.startswith((_INCOMING, _PROBE)))

    def uri(self, key: str) -> str:
        """See ObjectStore. Raises StoreError."""
        return (self._file(key) if key else self.path).as_uri()

    def check(self) -> None:
        """See ObjectStore. Raises StoreError."""
        key = f"{_PROBE}/{uuid.uuid4().hex}"
        _probe(self, key)
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


class S3Store:
    """Objects in an S3 bucket, below a prefix. Region and credentials come from the usual variables."""

    def __init__(self, url: str, endpoint_url: str = "") -> None:
        parts = urlparse(url)
        if parts.scheme != "s3" or not parts.netloc:
            raise StoreError(f"{url!r} is not s3://bucket/prefix; set TUNEWRIGHT_STORE")
        self.bucket = parts.netloc
        self.prefix = parts.path.strip("/")
        self.endpoint_url = endpoint_url

    def put(self, key: str, data: bytes) -> bool:
        """See ObjectStore. Raises StoreError."""
        return self._create(key, lambda place: self._client.put_object(Body=data, **place))

    def put_file(self, key: str, path: Path) -> bool:
        """See ObjectStore. Raises StoreError."""

        def send(place: dict[str, Any]) -> None:
            with path.open("rb") as source:
                self._client.put_object(Body=source, **place)

        try:
            return self._create(key, send)
        except OSError as error:
            raise StoreError(f"cannot read {path} to store it as {key}: {error}") from error

    def get(self, key: str) -> bytes:
        """See ObjectStore. Raises ObjectMissing, StoreError."""
        name = self._name(key)
        return self._call(
            f"read {key}", lambda: self._client.get_object(Bucket=self.bucket, Key=name)["Body"].read()
        )

    def exists(self, key: str) -> bool:
        """See ObjectStore. Raises StoreError."""
        name = self._name(key)
        try:
            self._call(f"look for {key}", lambda: self._client.head_object(Bucket=self.bucket, Key=name))
        except ObjectMissing:
            return False
        return True

    def list(self, prefix: str) -> Iterator[str]:
        """See ObjectStore. Raises StoreError."""
        base = f"{self.prefix}/" if self.prefix else ""
        place: dict[str, Any] = {"Bucket": self.bucket, "Prefix": base + prefix}
        more = True
        while more:
            page = self._call(f"list {prefix}", partial(self._client.list_objects_v2, **place))
            keys = [item["Key"].removeprefix(base) for item in page.get("Contents", [])]
            yield from (key for key in keys if not key.startswith(_PROBE))
            more = page["IsTruncated"]
            place["ContinuationToken"] = page.get("NextContinuationToken", "")

    def uri(self, key: str) -> str:
        """See ObjectStore. Raises StoreError."""
        return f"s3://{self.bucket}/{self._name(key) if key else self.prefix}"

    def check(self) -> None:
        """See ObjectStore. Raises StoreError, also where the endpoint ignores If-None-Match."""
        key = f"{_PROBE}/{uuid.uuid4().hex}"
        _probe(self, key)
        # The right to delete is not needed for anything else: without it the probe stays.
        with suppress(StoreError):
            name = self._name(key)
            self._call("delete", lambda: self._client.delete_object(Bucket=self.bucket, Key=name))

    def _name(self, key: str) -> str:
        return f"{self.prefix}/{checked_key(key)}" if self.prefix else checked_key(key)

    def _create(self, key: str, send: Callable[[dict[str, Any]], object]) -> bool:
        # A put whose answer was lost is sent again and then finds itself: False, and the object is there.
        from botocore.exceptions import ClientError

        place = {"Bucket": self.bucket, "Key": self._name(key), "IfNoneMatch": "*"}

        def create() -> bool:
            try:
                send(place)
            except ClientError as error:
                if _status(error) == 412:
                    return False
                raise
            return True

        return self._call(f"write {key}", create)

    @cached_property
    def _client(self) -> S3Client:
        import boto3
        from botocore.config import Config

        own: dict[str, Any] = {}
        if self.endpoint_url:
            # Stores other than AWS often know neither bucket host names nor checksum trailers.
            own = {
                "s3": {"addressing_style": "path"},
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            }
        config = Config(connect_timeout=5, read_timeout=60, retries={"total_max_attempts": 1}, **own)
        # A session of our own: boto3's default one is shared by threads and keeps old credentials.
        session = boto3.session.Session()
        return session.client("s3", endpoint_url=self.endpoint_url or None, config=config)

    def _call(self, doing: str, call: Callable[[], T]) -> T:
        """``call`` with its transient failures retried and its last one translated."""
        from botocore.exceptions import BotoCoreError, ClientError

        attempts = Retrying(
            retry=retry_if_exception(_is_transient),
            stop=stop_after_attempt(5) | stop_after_delay(30),
            wait=wait_exponential_jitter(multiplier=0.2, max=5),
            reraise=True,
        )
        try:
            return attempts(call)
        except (BotoCoreError, ClientError, ValueError) as error:
            raise self._translated(doing, error) from error

    def _translated(self, doing: str, error: Exception) -> StoreError:
        from botocore.exceptions import ClientError, NoCredentialsError, PartialCredentialsError

        place = f"s3://{self.bucket}" + (f" at {self.endpoint_url}" if self.endpoint_url else "")
        code = error.response["Error"].get("Code", "") if isinstance(error, ClientError) else ""
        if code in ("NoSuchKey", "404"):
            return ObjectMissing(f"no object in {place}: cannot {doing}")
        if code == "NoSuchBucket":
            advice = "create the bucket or correct TUNEWRIGHT_STORE"
        elif code in _DENIED or isinstance(error, (NoCredentialsError, PartialCredentialsError)):
            advice = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to a key that may read, list and write"
        else:
            advice = "check the network, AWS_ENDPOINT_URL and AWS_DEFAULT_REGION"
        reason = " ".join(str(error).split())
        return StoreError(f"cannot {doing} in {place}: {reason}; {advice}")


def put_folder(store: ObjectStore, prefix: str, folder: Path) -> str:
    """Store every file of ``folder`` below ``prefix``, an index last; returns the folder's URI.

    The index says that the folder is whole: where it is there, nothing is sent. Raises StoreError,
    also where an interrupted upload left other contents under the same name.
    """
    index = _index_key(prefix)
    if store.exists(index):
        return store.uri(prefix)
    digests = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
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


def _probe(store: ObjectStore, key: str) -> None:
    text = b"tunewright probe\n"
    store.put(key, text)
    if store.put(key, b"overwritten") or store.get(key) != text:
        raise StoreError(
            f"{store.uri(key)} could be overwritten: the store must honour If-None-Match, "
            "or records get lost; use another store"
        )


def _status(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _is_transient(error: BaseException) -> bool:
    from botocore import exceptions as boto

    if isinstance(error, boto.ClientError):
        throttled = error.response["Error"].get("Code") in _THROTTLED
        return throttled or _status(error) == 429 or _status(error) >= 500
    lost = (boto.ConnectionError, boto.HTTPClientError, boto.IncompleteReadError, boto.ResponseStreamingError)
    return isinstance(error, lost)
