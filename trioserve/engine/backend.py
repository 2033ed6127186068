"""What an engine needs of whoever has its requests computed.

That is the :class:`~trioserve.scheduler.scheduler.Scheduler` in a process of one's own, and in a
front-end process what stands for it there
(:class:`trioserve.front_ends.client.scheduler.RemoteScheduler`).
"""

from __future__ import annotations

from typing import Any, Protocol

import trio

from trioserve.observability.scheduler_statistics import SchedulerStatistics
from trioserve.requests.adapters import Adapters
from trioserve.requests.request import Finish, Request, Sequence, SequenceOutput
from trioserve.scheduler.feeds import Feeds
from trioserve.scheduler.pause_control import PauseControl
from trioserve.scheduler.prefix_pins import PrefixPins
from trioserve.scheduler.weights import Weights
from trioserve.workers.power import WorkerPower


class Backend(Protocol):
    """Owns every request from the tokenizer's hand on, until it has finished."""

    async def run(
        self,
        requests: trio.MemoryReceiveChannel[Request],
        outputs: trio.MemorySendChannel[list[SequenceOutput]],
    ) -> None:
        """The task: take requests in, and send what they give to the detokenizer."""

    def abort(self, sequence: Sequence, finish: Finish) -> None:
        """End ``sequence`` now, whatever its state. Never blocks; idempotent."""

    async def call(self, name: str, arguments: object = None) -> Any:
        """Have the worker do something by name; raises ``EngineError`` or ``WorkerLost``."""

    @property
    def attached(self) -> bool:
        """Whether a worker is there."""

    @property
    def stalled(self) -> bool:
        """Whether there is no progress, though there could be."""

    @property
    def paused(self) -> bool:
        """Whether nobody is to be computed because somebody has asked for that."""

    @property
    def pause_control(self) -> PauseControl | None:
        """What pauses it; None where another process does."""

    @property
    def weights(self) -> Weights | None:
        """Which weights its workers serve; None where another process exchanges them."""

    @property
    def worker_power(self) -> WorkerPower | None:
        """What sends its worker away; None where another process does."""

    @property
    def feeds(self) -> Feeds | None:
        """What it tells whoever listens; None where another process does."""

    @property
    def adapters(self) -> Adapters:
        """The adapters that requests may name."""

    @property
    def pins(self) -> PrefixPins | None:
        """What keeps cached prefixes; None where another process does."""

    @property
    def idle(self) -> bool:
        """Whether nobody is to be computed."""

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""

    @property
    def num_waiting_tokens(self) -> int:
        """Their tokens, prompt and output so far."""

    def waiting_of(self, tenant: str) -> tuple[int, int]:
        """Return how many sequences of ``tenant`` wait for a slot, and their tokens."""

    def statistics(self) -> SchedulerStatistics:
        """Counts of this moment."""

    def check_integrity(self) -> None:
        """Assert the invariants."""
