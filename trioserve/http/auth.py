"""API keys: bearer tokens, compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from trioserve.http.errors import Unauthorized

__all__ = ["OPEN_PATHS", "check_key"]

OPEN_PATHS = frozenset({"/health", "/ping"})
"""What a load balancer may ask without a key."""


def check_key(authorization: str | None, keys: Sequence[str]) -> None:
    """Check an ``Authorization`` header against the keys. Every key is compared, whole.

    Raises:
        Unauthorized: there is no bearer token, or it is none of ``keys``.
    """
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthorized("this server needs a key: send Authorization: Bearer <key>")
    given = token.strip().encode("latin-1", "replace")  # As the bytes came: headers are latin-1.
    matches = [hmac.compare_digest(given, key.encode("utf-8")) for key in keys]
    if not any(matches):
        raise Unauthorized("the key is not valid here")
