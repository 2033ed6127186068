"""The target of a run: the interface of a remote or embedded server."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

from trioserve.load.records import Record
from trioserve.load.work import Cancel


class Sender(Protocol):
    """A sender of any number of concurrent requests."""

    async def ask(
        self, fields: Mapping[str, Any], record: Record, cancel: Cancel | None = None
    ) -> None:
        """Send one request and read its answer into ``record``, to the end or until ``cancel``.

        ``fields`` are those of a body of OpenAI's API. Failures are recorded, not raised.
        """


class AnyTarget(Protocol):
    """A server as the target of a run."""

    @property
    def chat(self) -> bool:
        """True if the target takes messages, False if it takes a prompt."""

    def senders(self) -> contextlib.AbstractAsyncContextManager[Sender]:
        """Yield a sender for the block. Leaving the block closes its connections."""
