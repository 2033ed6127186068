"""Description of a route: one endpoint, as it is served and documented."""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

GROUPS = (
    "Generation",
    "Embeddings and scores",
    "Speech",
    "Tokens",
    "Models",
    "The server",
    "Control",
    "Health",
)
"""Groups of routes, in the order of the documentation."""

GENERATING = (429, 503, 504)
"""Statuses of errors of computing routes: no room, no worker, no time."""


@attrs.frozen(kw_only=True)
class Route:
    """One endpoint. ``handler`` is the name of the method that serves it.

    ``response`` is the type of the answer, or a content type if the answer isn't JSON of a class;
    ``events`` is the class of a stream's events, or a union of classes, if there can be a stream; a
    class in a ``batch`` may come in a list.
    """

    method: str
    rule: str
    handler: str
    summary: str
    group: str
    peers: str = ""
    """Names of the servers that have the same endpoint."""
    aliases: tuple[str, ...] = ()
    """Other paths of the same endpoint."""
    request: type[msgspec.Struct] | None = None
    body_optional: bool = False
    """True if the body may be left out."""
    is_form: bool = False
    """True if the request is a form with a file, not JSON."""
    response: Any
    texts: tuple[str, ...] = ()
    """Further content types of an answer, which is text then."""
    query: type[msgspec.Struct] | None = None
    """Class of its query, if it reads one."""
    events: Any = None
    stream_type: str = "text/event-stream"
    """Content type of a stream: server-sent events, or lines of JSON."""
    batch: bool = False
    errors: tuple[int, ...] = ()
    """Statuses of errors that only some endpoints have."""
    unwell: type[msgspec.Struct] | None = None
    """Class of the answer with the status 503, if that isn't the usual error."""
    control: bool = False
    """True if it changes the server or shows an operator's data: it then needs an admin key."""

    @property
    def rules(self) -> tuple[str, ...]:
        """Return all paths, the usual one first."""
        return (self.rule, *self.aliases)
