"""A certificate authority of the fleet's own, and the certificates that its parts show to one another."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tasks.errors import InputError

CA = "ca"
#: Who shows a certificate: the scheduler; agents and flows, which connect to it and to each other.
PARTS = ("scheduler", "agent")
_VALID_DAYS = 825
_CA_VALID_DAYS = 3650


def make_certificates(folder: Path, hosts: Sequence[str]) -> list[Path]:
    """Write ``ca``, ``scheduler`` and ``agent``, each as .pem and .key (readable by the owner only).

    An authority that is there already signs the new ones, so that those in use stay valid. Raises InputError.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        written = [] if _has(folder, CA) else _make_authority(folder)
        key = serialization.load_pem_private_key((folder / f"{CA}.key").read_bytes(), None)
        authority = x509.load_pem_x509_certificate((folder / f"{CA}.pem").read_bytes())
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        for part in PARTS:
            own = ec.generate_private_key(ec.SECP256R1())
            names = x509.SubjectAlternativeName([_general_name(host) for host in dict.fromkeys(hosts)])
            # Each of them listens and connects: agents fetch from one another.
            usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
            builder = _builder(f"tunewright {part}", authority.subject, own, _VALID_DAYS)
            signed = builder.add_extension(names, False).add_extension(usage, False).sign(key, hashes.SHA256())
            written += _write(folder, part, own, signed)
    except OSError as error:
        raise InputError(f"cannot write certificates to {folder}: {error.strerror}; name another folder") from error
    return written


def _make_authority(folder: Path) -> list[Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tunewright fleet")])
    builder = _builder("tunewright fleet", name, key, _CA_VALID_DAYS)
    signed = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True).sign(key, hashes.SHA256())
    return _write(folder, CA, key, signed)


def _builder(name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, valid_days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Machines' clocks differ.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=valid_days))
    )


def _write(folder: Path, name: str, key: ec.EllipticCurvePrivateKey, signed: x509.Certificate) -> list[Path]:
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = signed.public_bytes(serialization.Encoding.PEM)
    paths = [folder / f"{name}.key", folder / f"{name}.pem"]
    for path, data, mode in zip(paths, (secret, public), (0o600, 0o644), strict=True):
        incoming = path.with_suffix(".new")
        incoming.unlink(missing_ok=True)
        descriptor = os.open(incoming, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        incoming.replace(path)
    return paths


def _has(folder: Path, name: str) -> bool:
    return (folder / f"{name}.key").is_file() and (folder / f"{name}.pem").is_file()


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
