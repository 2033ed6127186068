"""API keys: who calls, what they may do, and how many of their requests may be open at a time."""

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
"""The rules of what may be asked without a key: what a load balancer wants to know, and the page of
the console, which holds no data."""


def authorization_of(headers: Headers) -> str | None:
    """A request's ``Authorization``, which Anthropic's clients call ``X-Api-Key``."""
    authorization = headers.get("Authorization")
    key = headers.get("X-Api-Key")
    return f"Bearer {key}" if authorization is None and key is not None else authorization


@attrs.frozen
class Caller:
    """Whose key a request brought: a name that may be logged, because it tells nothing of the key.

    The number in it is the key's place among those that the server was given, from 1 up.
    """

    name: str
    admin: bool = False
    has_priority: bool = False
    """Whether the key is one of those whose requests may name a priority."""


class Keys:
    """The keys of a server.

    What a client sends is compared as a digest, with every key's, so that the time it takes tells
    neither how much of a key was right, nor how long one is, nor which one it was.

    Args:
        keys: for all routes but those that control the server; nobody needs one if there is none.
        admin_keys: for all routes, and in any number of requests.
        priority_keys: further ``keys``; where there are some, requests of the others have no
            priority but the usual one.
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
        """Who sends a request with this ``Authorization`` header; None if everybody may.

        Args:
            authorization: the header's value, its bytes as latin-1.
            control: whether the route controls the server.

        Raises:
            Unauthorized: a key is needed, and there is none or a wrong one.
            Forbidden: nobody may call a route that controls the server, for want of an admin key.
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
        # A key that is given as several has the rights of the last.
        found = [caller for (_, caller), is_it in zip(self._callers, matches, strict=True) if is_it]
        if not found or (control and not found[-1].admin):
            raise Unauthorized(f"the key is not valid here, where {kind} is needed")
        return found[-1]

    def may_control(self, authorization: str | None) -> bool:
        """Whether who sends this ``Authorization`` header may control the server."""
        try:
            return self.caller(authorization, control=True) is not None
        except (Forbidden, Unauthorized):
            return False

    def tenant(self, caller: Caller | None) -> str:
        """Return the name under which the shares of ``caller`` count; empty where it has none.

        Keys share what the server has if there are several. An administrator has no share.
        """
        return "" if caller is None or caller.admin or self._num_keys < 2 else caller.name

    def may_set_priority(self, caller: Caller | None) -> bool:
        """Return whether requests of ``caller`` may name a priority."""
        return not self._has_priority_keys or caller is None or caller.admin or caller.has_priority

    def limits(self, caller: Caller) -> bool:
        """Whether only so many requests of ``caller`` may be open at a time."""
        return self._max_requests is not None and not caller.admin

    def refusal(self) -> KeyLimit:
        """What the request past that is answered."""
        return KeyLimit(
            f"{self._max_requests} requests with this key are open; that is the limit "
            "(--max-requests-per-key)"
        )

    @contextlib.contextmanager
    def counted(self, caller: Caller | None) -> Iterator[None]:
        """Count one request of ``caller`` as open, for as long as the block lasts.

        Raises:
            KeyLimit: as many as may be are open already.
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
