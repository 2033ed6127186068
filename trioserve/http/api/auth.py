"""API keys: identity and rights of callers, and limits on their open requests."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
from collections import Counter
from collections.abc import Iterator, Sequence

import attrs
from werkzeug.datastructures import Headers

from trioserve.http.api.errors import Forbidden, KeyLimit, Unauthorized

OPEN_PATHS = frozenset({"/health", "/ping", "/console", "/console/static/<path:name>"})
"""Rules of the routes that need no key: a load balancer's checks, and the page of the console,
which holds no data.
"""


def authorization_of(headers: Headers) -> str | None:
    """Return a request's ``Authorization`` header, or ``X-Api-Key``, which Anthropic's clients
    send.
    """
    authorization = headers.get("Authorization")
    key = headers.get("X-Api-Key")
    return f"Bearer {key}" if authorization is None and key is not None else authorization


@attrs.frozen
class Caller:
    """Name of the API key of a request; it may be logged, because it reveals nothing of the key.

    The number in it is the position of the key among the server's keys, from 1 up.
    """

    name: str
    admin: bool = False
    has_priority: bool = False
    """True if requests with the key may name a priority."""


class Keys:
    """The keys of a server.

    A key sent by a client is compared as a digest with every key. So the time of the comparison
    reveals neither how much of a key was right, nor its length, nor which one it was.

    Args:
        keys: keys for all routes except those that control the server; without any, no key is
            needed.
        admin_keys: keys for all routes, without a limit on open requests.
        priority_keys: further ``keys``; if there are some, requests with other keys can't name a
            priority.
        max_requests: requests of one key that may be open at a time (default: any number).
    """

    def __init__(
        self,
        keys: Sequence[str],
        admin_keys: Sequence[str] = (),
        *,
        priority_keys: Sequence[str] = (),
        max_requests: int | None = None,
    ) -> None:
        self._is_open = not keys
        self._num_keys = len({*keys, *priority_keys})
        self._has_priority_keys = bool(priority_keys)
        self._has_admins = bool(admin_keys)
        self._max_requests = max_requests
        callers = [
            *((key, Caller(f"key-{i}")) for i, key in enumerate(keys, 1)),
            *(
                (key, Caller(f"priority-{i}", has_priority=True))
                for i, key in enumerate(priority_keys, 1)
            ),
            *((key, Caller(f"admin-{i}", admin=True)) for i, key in enumerate(admin_keys, 1)),
        ]
        self._callers = [(_digest(key), caller) for key, caller in callers]
        self._num_open: Counter[Caller] = Counter()

    def caller(self, authorization: str | None, *, control: bool = False) -> Caller | None:
        """Return the caller that sends this ``Authorization`` header; None if no key is needed.

        Args:
            authorization: the header's value, its bytes as latin-1.
            control: whether the route controls the server.

        Raises:
            Unauthorized: a key is needed, and there is none or a wrong one.
            Forbidden: the route controls the server, and the server has no admin key.
        """
        if control and not self._has_admins:
            raise Forbidden("this route needs an admin key, and the server has none")
        if self._is_open and not control:
            return None
        kind = "an admin key" if control else "a key"
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthorized(f"{kind} is needed here: send Authorization: Bearer <key>")
        given = hashlib.sha256(token.strip().encode("latin-1", "replace")).digest()
        matches = [hmac.compare_digest(given, digest) for digest, _ in self._callers]
        # A key that is given several times has the rights of the last one.
        found = [caller for (_, caller), is_it in zip(self._callers, matches, strict=True) if is_it]
        if not found or (control and not found[-1].admin):
            raise Unauthorized(f"the key is not valid here, where {kind} is needed")
        return found[-1]

    def may_control(self, authorization: str | None) -> bool:
        """Return whether a request with this ``Authorization`` header may control the server."""
        try:
            return self.caller(authorization, control=True) is not None
        except (Forbidden, Unauthorized):
            return False

    def tenant(self, caller: Caller | None) -> str:
        """Return the name under which the shares of ``caller`` count; empty if it has none.

        Keys share the server's capacity if there are several. An administrator has no share.
        """
        return "" if caller is None or caller.admin or self._num_keys < 2 else caller.name

    def may_set_priority(self, caller: Caller | None) -> bool:
        """Return whether requests of ``caller`` may name a priority."""
        return not self._has_priority_keys or caller is None or caller.admin or caller.has_priority

    def limits(self, caller: Caller) -> bool:
        """Return whether the number of open requests of ``caller`` is limited."""
        return self._max_requests is not None and not caller.admin

    def refusal(self) -> KeyLimit:
        """Return the error for a request past that limit."""
        return KeyLimit(
            f"{self._max_requests} requests with this key are open; that is the limit "
            "(--max-requests-per-key)"
        )

    @contextlib.contextmanager
    def counted(self, caller: Caller | None) -> Iterator[None]:
        """Count one request of ``caller`` as open for the duration of the block.

        Raises:
            KeyLimit: as many as allowed are open already.
        """
        if caller is None or not self.limits(caller):
            yield
            return
        if self._num_open[caller] >= (self._max_requests or 0):
            raise self.refusal()
        self._num_open[caller] += 1
        try:
            yield
        finally:
            self._num_open[caller] -= 1


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
