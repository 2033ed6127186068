"""TLS contexts of connections. A file that can't be used is reported in one line."""

from __future__ import annotations

import ssl
from pathlib import Path

from hypercorn.config import Config

from trioserve.config import ServerConfig
from trioserve.protocol.errors import TrioserveError


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return a context for TLS 1.2 and later with hypercorn's ciphers; None without a certificate.

    It offers HTTP/2 and 1.1. If authorities are given, a client needs a certificate of one of them.

    Raises:
        TrioserveError: a file can't be read, or has other content.
    """
    certificate = config.ssl_certfile
    if certificate is None:
        return None
    key = config.ssl_keyfile or certificate
    for path in (certificate, key, config.ssl_ca_certs):
        _check_readable(path)
    settings = Config()
    settings.certfile = certificate
    settings.keyfile = key
    # Without a password, OpenSSL would ask for one at the terminal.
    settings.keyfile_password = config.ssl_keyfile_password or ""
    try:
        context = settings.create_ssl_context()
    except (ssl.SSLError, ValueError) as error:
        raise TrioserveError(_why(certificate, key, config, error)) from error
    assert context is not None
    context.options |= ssl.OP_NO_RENEGOTIATION
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except ssl.SSLError as error:
            raise TrioserveError(f"{config.ssl_ca_certs} holds no certificates") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_readable(path: str | None) -> None:
    if path is not None:
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise TrioserveError(f"can't read {path}: {error.strerror}") from error


def _why(certificate: str, key: str, config: ServerConfig, error: Exception) -> str:
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        return f"the key in {key} is not that of the certificate in {certificate}"
    if b"ENCRYPTED" in Path(key).read_bytes():
        if config.ssl_keyfile_password is None:
            return f"the key in {key} is encrypted: give --ssl-keyfile-password"
        return f"--ssl-keyfile-password doesn't open the key in {key}"
    if key == certificate:
        return f"{certificate} holds no certificate with its key, in PEM format (--ssl-keyfile)"
    return f"{certificate} and {key} are no certificate and its key, in PEM format"
