"""What a route is: one endpoint, as the application serves it and the documentation tells it."""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

GROUPS = (
    "Generation",
    "Embeddings and scores",
    "Tokens",
    "Models",
    "The server",
    "Control",
    "Health",
)
"""What routes belong to, in the order in which the documentation shows them."""

GENERATING = (429, 503, 504)
"""Statuses of errors of what has a model compute: no room, no worker, no time."""


@attrs.frozen(kw_only=True)
class Route:
    """One endpoint. ``handler`` is the name of the method that serves it.

    ``response`` is the type of the answer, or the content type of what is no JSON of a class;
    ``events`` is the class of a stream's events where there can be one, or a union of classes; a
    class in a ``batch`` may come in a list.
    """

    method: str
    rule: str
    handler: str
    summary: str
    group: str
    peers: str = ""
    """Whose endpoint it is."""
    aliases: tuple[str, ...] = ()
    """Other paths of the same endpoint."""
    request: type[msgspec.Struct] | None = None
    body_optional: bool = False
    """Whether the body may be left out."""
    response: Any
    query: type[msgspec.Struct] | None = None
    """The class of its query, where it looks at one."""
    events: Any = None
    stream_type: str = "text/event-stream"
    """The content type of a stream: of server-sent events, or of lines of JSON."""
    batch: bool = False
    errors: tuple[int, ...] = ()
    """Statuses of errors that not every endpoint has."""
    unwell: type[msgspec.Struct] | None = None
    """The class of the answer with the status 503, where that isn't an error like others."""
    control: bool = False
    """Whether it changes or shows what is an operator's alone: it then needs an admin key."""

    @property
    def rules(self) -> tuple[str, ...]:
        """All paths, the usual one first."""
        return (self.rule, *self.aliases)
