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
    Credentials,
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


def engine_tls_of(own: Credentials) -> pynng.TLSConfig:
    """Return what :func:`engine_tls` does, from the contents of :data:`ENGINE_FILES`."""
    return _mutual(pynng.TLSConfig.MODE_SERVER, own)


def worker_tls_of(own: Credentials) -> pynng.TLSConfig:
    """Return what :func:`worker_tls` does, from the contents of :data:`WORKER_FILES`."""
    return _mutual(pynng.TLSConfig.MODE_CLIENT, own, server_name=ENGINE_NAME)


def _mutual(side: int, own: Credentials, **more: str) -> pynng.TLSConfig:
    """Return the configuration of one side that demands the other's certificate."""
    return pynng.TLSConfig(
        side,
        ca_string=own.authority,
        own_cert_string=own.certificate,
        own_key_string=own.key,
        auth_mode=pynng.TLSConfig.AUTH_MODE_REQUIRED,
        **more,
    )


def read_credentials(folder: str, names: tuple[str, str, str]) -> Credentials:
    """Return the contents of :data:`ENGINE_FILES`, or those of another side, in ``folder``.

    Raises:
        TrioserveError: A file is missing, or isn't text.
    """
    return Credentials(*(_read(Path(folder) / name) for name in names))


def _tls(
    folder: str, names: tuple[str, str, str], make: Callable[[Credentials], pynng.TLSConfig]
) -> pynng.TLSConfig:
    try:
        return make(read_credentials(folder, names))
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
