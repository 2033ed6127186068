"""Sessions and kept responses, which live on one server: later requests go to it."""

from __future__ import annotations

import re
from collections import OrderedDict

import attrs
import msgspec

from trioserve.http.router.upstream import Upstream

MAX_IDS = 100_000
"""Ids that are remembered, the latest ones."""
_RESPONSE = re.compile(rb'"id":\s*"(resp_[^"\\]{1,256})"')
_SESSION = re.compile(rb'\s*"([^"\\]{1,256})"\s*')


class SessionOfRequest(msgspec.Struct):
    """The session of a request to generate."""

    id: str | None = None


class NamedInRequest(msgspec.Struct):
    """The fields of a request by which a server may have to be chosen."""

    model: str | None = None
    session_id: str | None = None
    session_params: SessionOfRequest | None = None
    previous_response_id: str | None = None

    @property
    def lives_at(self) -> str | None:
        """The id of the session or the response that the request goes on from."""
        session = self.session_params.id if self.session_params else None
        return session or self.session_id or self.previous_response_id


def named_in(body: bytes) -> NamedInRequest:
    """Return what a body names; nothing if it isn't such a body, which its server then refuses."""
    try:
        return msgspec.json.decode(body, type=NamedInRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return NamedInRequest()


@attrs.define(eq=False)
class Affinity:
    """The server of each session and kept response that was begun through this router."""

    _servers: OrderedDict[str, Upstream] = attrs.field(init=False, factory=OrderedDict)

    def server_of(self, id: str) -> Upstream | None:
        """Return the server that has the session or response; None if it isn't known."""
        found = self._servers.get(id)
        if found is not None:
            self._servers.move_to_end(id)
        return found

    def note(self, id: str, upstream: Upstream) -> None:
        """Remember that ``upstream`` has the session or response."""
        self._servers[id] = upstream
        self._servers.move_to_end(id)
        if len(self._servers) > MAX_IDS:
            self._servers.popitem(last=False)

    def note_answer(self, rule: str, start: bytes, upstream: Upstream) -> None:
        """Remember the id in an answer.

        Args:
            rule: The request's route.
            start: The first bytes of the answer's body.
            upstream: The server that has answered.
        """
        found = None
        if rule == "/v1/responses":
            found = _RESPONSE.search(start)
        elif rule == "/open_session":
            found = _SESSION.fullmatch(start)
        if found is not None:
            self.note(found[1].decode("utf-8", "replace"), upstream)
