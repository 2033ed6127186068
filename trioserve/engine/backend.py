"""The back end of requests: it takes them from the tokenizer and computes them.

It is :class:`~trioserve.engine.schedulers.Schedulers` in a process of one's own. A front end
sends its requests to the engine process
(:class:`trioserve.front_ends.client.scheduler.RemoteScheduler`).
"""

from __future__ import annotations

from typing import Any, Protocol

import trio

from trioserve.observability.scheduler_statistics import SchedulerStatistics
from trioserve.requests.adapters import Catalogue
from trioserve.requests.request import Finish, Request, Sequence, SequenceOutput


class Backend(Protocol):
    """The owner of every request from the end of tokenization until it has finished."""

    async def run(
        self,
        requests: trio.MemoryReceiveChannel[Request],
        outputs: trio.MemorySendChannel[list[SequenceOutput]],
    ) -> None:
        """Take requests in, and send their outputs to the detokenizer. This is a task."""

    def abort(self, sequence: Sequence, finish: Finish) -> None:
        """End ``sequence`` now, whatever its state. Never blocks; idempotent."""

    async def call(self, name: str, arguments: object = None) -> Any:
        """Have the worker do something by name; raises ``EngineError`` or ``WorkerLost``."""

    @property
    def attached(self) -> bool:
        """True while a worker is attached."""

    @property
    def stalled(self) -> bool:
        """True if there is no progress, though there could be."""

    @property
    def paused(self) -> bool:
        """True while an operator's pause lasts: no request is computed."""

    @property
    def catalogue(self) -> Catalogue:
        """The adapters that requests may name."""

    @property
    def idle(self) -> bool:
        """True if no request is left to be computed."""

    @property
    def num_waiting(self) -> int:
        """The number of sequences that wait for a slot."""

    @property
    def num_waiting_tokens(self) -> int:
        """The tokens of waiting sequences, prompt and output so far."""

    def waiting_of(self, tenant: str) -> tuple[int, int]:
        """Return how many sequences of ``tenant`` wait for a slot, and their tokens."""

    def statistics(self) -> SchedulerStatistics:
        """Return the counts of this moment."""

    def check_integrity(self) -> None:
        """Assert the invariants."""
