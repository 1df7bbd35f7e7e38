"""What every ObjectStore promises, run over a directory and over S3 through HTTP."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.object_store import (
    DirectoryStore,
    ObjectMissing,
    ObjectStore,
    get_folder,
    open_store,
    put_folder,
)
from infra.s3_store import S3Store
from tasks.errors import StoreError
from tests.services import free_port, s3_server

BUCKET = "tunewright-test"
_prefixes = itertools.count()


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    with s3_server(BUCKET) as endpoint:
        yield endpoint


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "directory":
        return DirectoryStore(tmp_path / "store")
    endpoint = request.getfixturevalue("s3_endpoint")
    return S3Store(f"s3://{BUCKET}/tests/{next(_prefixes)}", endpoint)


def test_an_object_comes_back_as_it_was(store: ObjectStore) -> None:
    data = bytes(range(256)) * 10
    assert store.put("a/b.bin", data)
    assert store.get("a/b.bin") == data
    assert store.exists("a/b.bin")


def test_a_second_put_changes_nothing(store: ObjectStore, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"third")
    assert store.put("key", b"first")
    assert not store.put("key", b"second")
    assert not store.put_file("key", other)
    assert store.get("key") == b"first"


def test_a_missing_object_is_not_retried(store: ObjectStore) -> None:
    assert not store.exists("a/missing")
    with pytest.raises(ObjectMissing, match="missing") as caught:
        store.get("a/missing")
    assert not caught.value.retried


def test_list_is_sorted_and_by_prefix_of_the_text(store: ObjectStore) -> None:
    for key in ("a/2", "a/10", "a/b/1", "ab/1", "b"):
        store.put(key, b"x")
    assert list(store.list("a/")) == ["a/10", "a/2", "a/b/1"]
    assert list(store.list("a")) == ["a/10", "a/2", "a/b/1", "ab/1"]
    assert list(store.list("")) == ["a/10", "a/2", "a/b/1", "ab/1", "b"]
    assert list(store.list("missing/")) == []


def test_a_file_is_put_without_being_changed(store: ObjectStore, tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    path.write_bytes(b"\x7fELF" * 500_000)
    assert store.put_file("artifacts/library.so", path)
    assert store.get("artifacts/library.so") == path.read_bytes()


def test_of_many_writers_of_one_key_one_wins_and_readers_see_its_whole_object(store: ObjectStore) -> None:
    results: list[tuple[int, bool]] = []
    payloads = [bytes([n]) * 200_000 for n in range(6)]

    def write(n: int) -> None:
        results.append((n, store.put("race/key", payloads[n])))

    threads = [threading.Thread(target=write, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [n for n, created in results if created]
    assert len(winners) == 1
    assert store.get("race/key") == payloads[winners[0]]


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/../../b", "a/./b", "a\n", "a/"])
def test_a_key_that_leads_elsewhere_is_refused(store: ObjectStore, key: str) -> None:
    with pytest.raises(StoreError, match="not an object key"):
        store.put(key, b"x")
    with pytest.raises(StoreError, match="not an object key"):
        store.get(key)


def test_check_leaves_nothing_behind(store: ObjectStore) -> None:
    store.check()
    store.check()
    assert list(store.list("")) == []


def test_uris_open_the_same_store_again(store: ObjectStore) -> None:
    store.put("some/key", b"x")
    endpoint = store.endpoint_url if isinstance(store, S3Store) else ""
    again = open_store(store.uri("some"), endpoint)
    assert again.get("key") == b"x"


def make_folder(path: Path) -> Path:
    (path / "sub").mkdir(parents=True)
    (path / "manifest.json").write_text("{}")
    (path / "sub" / "model.so").write_bytes(b"library")
    return path


def test_a_folder_comes_back_and_is_sent_once(store: ObjectStore, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "folder")
    uri = put_folder(store, "artifacts/abc", folder)
    assert uri == store.uri("artifacts/abc")
    assert put_folder(store, "artifacts/abc", folder) == uri
    back = get_folder(store, "artifacts/abc", tmp_path / "back")
    assert (back / "sub" / "model.so").read_bytes() == b"library"
    assert (back / "manifest.json").read_text() == "{}"


def test_half_a_folder_is_not_a_folder_until_the_upload_is_finished(store: ObjectStore, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "folder")
    store.put_file("artifacts/abc/manifest.json", folder / "manifest.json")
    with pytest.raises(ObjectMissing):
        get_folder(store, "artifacts/abc", tmp_path / "back")
    put_folder(store, "artifacts/abc", folder)
    assert (get_folder(store, "artifacts/abc", tmp_path / "back") / "sub" / "model.so").is_file()


def test_leftovers_with_other_contents_are_refused(store: ObjectStore, tmp_path: Path) -> None:
    store.put("artifacts/abc/manifest.json", b"something else")
    with pytest.raises(StoreError, match="two contents"):
        put_folder(store, "artifacts/abc", make_folder(tmp_path / "folder"))
    assert not store.exists("artifacts/abc.folder.json")


def test_a_hostile_index_writes_nothing_outside(store: ObjectStore, tmp_path: Path) -> None:
    store.put("artifacts/abc.folder.json", json.dumps({"../../evil": "0"}).encode())
    with pytest.raises(StoreError, match="not an object key"):
        get_folder(store, "artifacts/abc", tmp_path / "back")


def broken_directory(tmp_path: Path) -> ObjectStore:
    # A file where a directory should be: refused to root too, as a read-only mode is not.
    (tmp_path / "file").write_text("")
    return open_store(str(tmp_path / "file" / "store"))


def missing_bucket(tmp_path: Path) -> ObjectStore:
    return open_store("s3://no-such-bucket/x", missing_bucket.endpoint)  # type: ignore[attr-defined]


def nobody_listens(tmp_path: Path) -> ObjectStore:
    return open_store(f"s3://{BUCKET}/x", f"http://127.0.0.1:{free_port()}")


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (broken_directory, "Not a directory; make it a directory that this user can write"),
        (missing_bucket, "create the bucket or correct TUNEWRIGHT_STORE"),
        (nobody_listens, "check the network, AWS_ENDPOINT_URL"),
    ],
)
def test_an_unusable_store_is_one_line_that_says_what_to_do(
    broken: Callable[[Path], ObjectStore], says: str, tmp_path: Path, s3_endpoint: str
) -> None:
    missing_bucket.endpoint = s3_endpoint  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match=says) as caught:
        broken(tmp_path).check()
    assert caught.value.retried
    assert "\n" not in str(caught.value)


def test_missing_credentials_are_named(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreError, match="set AWS_ACCESS_KEY_ID"):
        S3Store(f"s3://{BUCKET}/x", s3_endpoint).check()


@pytest.mark.parametrize("url", ["", "ftp://host/x", "s3://", "s3:///prefix", "file://elsewhere/x"])
def test_an_unknown_kind_of_store_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match="TUNEWRIGHT_STORE"):
        open_store(url)


def test_a_file_url_is_a_directory(tmp_path: Path) -> None:
    store = open_store((tmp_path / "with space").as_uri())
    store.put("key", b"x")
    assert (tmp_path / "with space" / "key").read_bytes() == b"x"
