"""``trioserve worker-certificates``: a private authority, and the certificates of all sides."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import TYPE_CHECKING

from trioserve.protocol.certificates import (
    AUTHORITY,
    ENGINE,
    ENGINE_FILES,
    ENGINE_NAME,
    FRONT_END,
    FRONT_END_NAME,
    WORKER,
    WORKER_FILES,
    WORKER_NAME,
    Credentials,
)
from trioserve.protocol.errors import TrioserveError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

DAYS = 3650
"""Days for which the certificates are valid."""
_AUTHORITY_KEY = "ca.key"


def make_certificates(folder: Path) -> list[Path]:
    """Make :func:`certificates` in a new ``folder``. Keys have the mode 0600.

    Returns:
        The files.

    Raises:
        TrioserveError: The folder isn't empty, can't be written, or the extra ``tls`` is missing.
    """
    made = certificates()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise TrioserveError(f"{folder} isn't empty: name a new folder")
        for name, data in made.items():
            _write(folder / name, data)
    except OSError as error:
        raise TrioserveError(f"can't write to {folder}: {error.strerror}") from error
    return [folder / name for name in made]


def new_credentials() -> tuple[Credentials, Credentials]:
    """Return those of an engine and of a worker, by a new authority.

    Raises:
        TrioserveError: The extra ``tls`` is missing.
    """
    made = {name: data.decode() for name, data in certificates().items()}
    engine, worker = (
        Credentials(*(made[name] for name in names)) for names in (ENGINE_FILES, WORKER_FILES)
    )
    return engine, worker


def certificates() -> dict[str, bytes]:
    """Return an authority, and a certificate of it for each side, by names of files.

    An engine's certificate is good for listening only, the others for dialing only.

    Raises:
        TrioserveError: The extra ``tls`` is missing.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise TrioserveError(
            "certificates of workers need the package cryptography: install trioserve[tls]"
        ) from error
    sides = {ENGINE: ENGINE_NAME, WORKER: WORKER_NAME, FRONT_END: FRONT_END_NAME}
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("ca", *sides)}
    authority = _certificate("trioserve workers", keys["ca"])
    made = {AUTHORITY: _pem(authority), _AUTHORITY_KEY: _key_pem(keys["ca"])}
    for side, name in sides.items():
        certificate = _certificate(name, keys[side], authority, keys["ca"])
        made |= {f"{side}.crt": _pem(certificate), f"{side}.key": _key_pem(keys[side])}
    return made


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None = None,
    issuer_key: ec.EllipticCurvePrivateKey | None = None,
) -> x509.Certificate:
    """Return a certificate for ``name``; an authority's own if it has no issuer."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # The clocks of the hosts may differ.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(
            x509.BasicConstraints(ca=issuer is None, path_length=0 if issuer is None else None),
            critical=True,
        )
    )
    if issuer is not None:
        usage = (
            ExtendedKeyUsageOID.SERVER_AUTH
            if name == ENGINE_NAME
            else ExtendedKeyUsageOID.CLIENT_AUTH
        )
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
        builder = builder.add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False
        )
    return builder.sign(issuer_key or key, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, data: bytes) -> None:
    mode = 0o600 if path.suffix == ".key" else 0o644
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
