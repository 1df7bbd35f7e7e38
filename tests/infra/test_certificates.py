"""Certificates of the fleet: those of one authority work together, another's are refused."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest
from distributed import Client, Scheduler

from infra.certificates import make_certificates
from infra.cluster import _tls, security
from tasks.errors import InputError


def test_keys_are_for_their_owner_only_and_the_authority_stays(tmp_path: Path) -> None:
    written = make_certificates(tmp_path / "tls", ["localhost", "127.0.0.1"])
    assert {path.name for path in written} == {
        f"{part}.{kind}" for part in ("ca", "scheduler", "agent") for kind in ("key", "pem")
    }
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in written if path.suffix == ".key")
    authority = (tmp_path / "tls" / "ca.pem").read_bytes()
    make_certificates(tmp_path / "tls", ["localhost"])
    assert (tmp_path / "tls" / "ca.pem").read_bytes() == authority


def test_a_client_of_another_authority_is_refused(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        make_certificates(folder, ["127.0.0.1"])

    async def connect(folder: Path, address: str) -> str:
        async with Client(address, security=security(address, folder), asynchronous=True, timeout=5) as client:
            return str(client.status)

    async def both() -> tuple[str, BaseException | str]:
        settings = {"host": "127.0.0.1", "protocol": "tls", "security": _tls(ours), "dashboard_address": "127.0.0.1:0"}
        async with Scheduler(**settings) as scheduler:
            good = await connect(ours, scheduler.address)
            bad = await asyncio.gather(connect(theirs, scheduler.address), return_exceptions=True)
            return good, bad[0]

    good, bad = asyncio.run(both())
    assert good == "running"
    assert isinstance(bad, OSError)


def test_only_loopback_may_do_without(tmp_path: Path) -> None:
    assert security("tcp://127.0.0.1:8786", tmp_path) is None
    with pytest.raises(InputError, match="anybody who reaches the port can run code"):
        security("tcp://192.0.2.7:8786", tmp_path)
    with pytest.raises(InputError, match=r"ca\.pem"):
        security("tls://192.0.2.7:8786", tmp_path)
