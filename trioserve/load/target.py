"""Whom a run asks: what the loops need of a server, whether it is far away or embedded."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

from trioserve.load.records import Record
from trioserve.load.work import Cancel


class Sender(Protocol):
    """What sends requests, any number at a time."""

    async def ask(
        self, fields: Mapping[str, Any], record: Record, cancel: Cancel | None = None
    ) -> None:
        """Send one request and read its answer into ``record``, to the end or until ``cancel``.

        ``fields`` are those of OpenAI's body. Failures are put into the record, not raised.
        """


class AnyTarget(Protocol):
    """A server."""

    @property
    def chat(self) -> bool:
        """Whether it takes messages; else it takes a prompt."""

    def senders(self) -> contextlib.AbstractAsyncContextManager[Sender]:
        """What sends to it for as long as the block lasts. Leaving it closes what is open."""
