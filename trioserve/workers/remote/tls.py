"""nng's TLS with the certificates of engine, workers and front ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pynng

from trioserve.protocol.certificates import (
    ENGINE_FILES,
    ENGINE_NAME,
    FRONT_END_FILES,
    WORKER_FILES,
)
from trioserve.protocol.errors import TrioserveError


def engine_tls(folder: str) -> pynng.TLSConfig:
    """Return the TLS of an engine, which wants a certificate of its peers.

    Raises:
        TrioserveError: A file of :data:`ENGINE_FILES` is missing, or has other content.
    """
    return _tls(folder, ENGINE_FILES, engine_tls_of)


def worker_tls(folder: str) -> pynng.TLSConfig:
    """Return the TLS of a worker's host, which wants an engine's certificate.

    Raises:
        TrioserveError: A file of :data:`WORKER_FILES` is missing, or has other content.
    """
    return _tls(folder, WORKER_FILES, worker_tls_of)


def front_end_tls(folder: str) -> pynng.TLSConfig:
    """Return the TLS of a front end's host, which wants an engine's certificate.

    Raises:
        TrioserveError: A file of :data:`FRONT_END_FILES` is missing, or has other content.
    """
    return _tls(folder, FRONT_END_FILES, worker_tls_of)


def engine_tls_of(authority: str, certificate: str, key: str) -> pynng.TLSConfig:
    """Return what :func:`engine_tls` does, from the contents of :data:`ENGINE_FILES`."""
    return _mutual(pynng.TLSConfig.MODE_SERVER, authority, certificate, key)


def worker_tls_of(authority: str, certificate: str, key: str) -> pynng.TLSConfig:
    """Return what :func:`worker_tls` does, from the contents of :data:`WORKER_FILES`."""
    side = pynng.TLSConfig.MODE_CLIENT
    return _mutual(side, authority, certificate, key, server_name=ENGINE_NAME)


def _mutual(side: int, authority: str, certificate: str, key: str, **more: str) -> pynng.TLSConfig:
    """Return the configuration of one side that demands the other's certificate."""
    return pynng.TLSConfig(
        side,
        ca_string=authority,
        own_cert_string=certificate,
        own_key_string=key,
        auth_mode=pynng.TLSConfig.AUTH_MODE_REQUIRED,
        **more,
    )


def _tls(
    folder: str, names: tuple[str, ...], make: Callable[..., pynng.TLSConfig]
) -> pynng.TLSConfig:
    try:
        return make(*(_read(Path(folder) / name) for name in names))
    except pynng.NNGException as error:
        raise TrioserveError(
            f"{folder}: {', '.join(names)} are no authority's certificate, and a certificate of it "
            f"with its key ({error}): make them with trioserve worker-certificates"
        ) from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it isn't text"
        raise TrioserveError(
            f"can't read {path}: {why}; trioserve worker-certificates FOLDER makes such files"
        ) from error
