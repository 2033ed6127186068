"""The target of a run: the interface of a server, remote or embedded, for the loops."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

from trioserve.load.records import Record
from trioserve.load.work import Cancel


class Sender(Protocol):
    """A sender of requests, any number at a time."""

    async def ask(
        self, fields: Mapping[str, Any], record: Record, cancel: Cancel | None = None
    ) -> None:
        """Send one request and read its answer into ``record``, to the end or until ``cancel``.

        ``fields`` are those of OpenAI's body. Failures are put into the record, not raised.
        """


class AnyTarget(Protocol):
    """A server as the target of a run."""

    @property
    def chat(self) -> bool:
        """True if it takes messages, false if it takes a prompt."""

    def senders(self) -> contextlib.AbstractAsyncContextManager[Sender]:
        """Yield a sender for the block. Leaving the block closes its connections."""
