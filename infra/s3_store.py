"""The object store on S3 or anything that speaks it and honours If-None-Match."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlparse

from tenacity import (
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential_jitter,
)

from infra.object_store import PROBE, ObjectMissing, checked_key, probe
from tasks.errors import StoreError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")

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
        return self._call(f"read {key}", lambda: self._client.get_object(Bucket=self.bucket, Key=name)["Body"].read())

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
            yield from (key for key in keys if not key.startswith(PROBE))
            more = page["IsTruncated"]
            place["ContinuationToken"] = page.get("NextContinuationToken", "")

    def uri(self, key: str) -> str:
        """See ObjectStore. Raises StoreError."""
        return f"s3://{self.bucket}/{self._name(key) if key else self.prefix}"

    def check(self) -> None:
        """See ObjectStore. Raises StoreError, also where the endpoint ignores If-None-Match."""
        key = f"{PROBE}/{uuid.uuid4().hex}"
        probe(self, key)
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


def _status(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _is_transient(error: BaseException) -> bool:
    from botocore import exceptions as boto

    if isinstance(error, boto.ClientError):
        throttled = error.response["Error"].get("Code") in _THROTTLED
        return throttled or _status(error) == 429 or _status(error) >= 500
    lost = (boto.ConnectionError, boto.HTTPClientError, boto.IncompleteReadError, boto.ResponseStreamingError)
    return isinstance(error, lost)
