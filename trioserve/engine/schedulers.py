"""The schedulers of an engine, one for each worker, and the calls that work over all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import trio

from trioserve._util.channels import receive_waiting
from trioserve._util.feed import DEFAULT_MAX_RECORDS, Subscription, subscribe_to
from trioserve._util.together import all_together
from trioserve.engine.adapters import EngineAdapters
from trioserve.engine.cache_feed import CacheFeed
from trioserve.engine.routing.placement import Placement
from trioserve.engine.routing.policy import Policy
from trioserve.observability.scheduler_statistics import SchedulerStatistics, sum_of
from trioserve.pooling.batcher import Batcher
from trioserve.pooling.columns import Columns, Floats
from trioserve.requests.adapters import Catalogue
from trioserve.requests.embedded import PLACEHOLDER, ContentIds, EmbeddedSpan
from trioserve.requests.request import Finish, Request, Sequence, SequenceOutput
from trioserve.scheduler.cache_events import CacheEvent
from trioserve.scheduler.iterations import Iteration
from trioserve.scheduler.pause_control import PauseControl
from trioserve.scheduler.prefix_pins import PrefixPins
from trioserve.scheduler.scheduler import Scheduler


class Schedulers:
    """The schedulers of an engine: a :class:`~trioserve.engine.backend.Backend`.

    Args:
        schedulers: One for each worker.
        batchers: The batchers of texts for the same workers, if the model is an encoder.
        placement: The choice of a scheduler for each request.
    """

    def __init__(
        self,
        schedulers: Seq[Scheduler],
        batchers: Seq[Batcher] = (),
        placement: Placement | None = None,
    ) -> None:
        self.placement = placement or Placement(Policy())
        """The choice of a scheduler for each request."""
        for each in schedulers:
            self.placement.add(each)
        self.cache_feed = CacheFeed(lambda: self)
        """The changes of all prefix caches."""
        self.batchers = tuple(batchers)
        self.adapters = EngineAdapters(lambda: [each.adapters for each in self])
        self.pins = PrefixPins(
            lambda: [each.core for each in self if each.core is not None], self._virtual_ids
        )
        self.changing = trio.Lock()
        """Held while workers are added or removed, or their weights are swapped."""
        self._outputs: trio.MemorySendChannel[list[SequenceOutput]] | None = None
        self._on_idle: Callable[[], None] = lambda: None
        self._contents = ContentIds()
        self._num_calls = 0
        """Number of calls to one worker."""

    def __iter__(self) -> Iterator[Scheduler]:
        return iter(self.placement.schedulers)

    def __getitem__(self, index: int) -> Scheduler:
        return self.placement.schedulers[index]

    # ---- requests

    def for_request(self, request: Request) -> Scheduler:
        """Return the scheduler that computes ``request``; any one before it is placed."""
        placed: Scheduler | None = request.scheduler
        return self[0] if placed is None else placed

    def add(self, scheduler: Scheduler) -> None:
        """Add a scheduler whose worker serves. It takes part in the pauses that are in force."""
        for other in self:
            if other.core is not None:  # Its first worker may still load.
                scheduler.pause_control.join(other.pause_control)
        scheduler.outputs = self._outputs
        scheduler.on_idle = self._on_idle
        self.placement.add(scheduler)
        self.cache_feed.add(scheduler)

    async def run(
        self,
        requests: trio.MemoryReceiveChannel[Request],
        outputs: trio.MemorySendChannel[list[SequenceOutput]],
    ) -> None:
        """Take requests in until ``requests`` is closed. This is a task.

        Args:
            requests: Tokenized requests. They wait in the channel until all first workers are
                attached. A request that has finished meanwhile is dropped.
            outputs: Outputs of steps and aborts, for the detokenizer. The buffer must be unbounded,
                because an abort can't wait.
        """
        self._outputs = outputs
        for each in self:
            each.outputs = outputs
        for each in self:
            await each.wait_attached()
        async for first in requests:
            # Requests that came together are submitted together, so that they share a plan.
            for request in (first, *receive_waiting(requests)):
                if spans := self.adapters.spans_of(request.adapter):
                    request.put_in_front(spans)
                if request.embedded:
                    self._make_room(request.embedded)
                    request.name_contents(self._contents)
                request.scheduler = self.placement.place(request)
                # A worker may have been attached after the grammar was checked.
                request.scheduler.submit(request, compiles=len(self.placement.schedulers) > 1)

    def _make_room(self, spans: Seq[EmbeddedSpan]) -> None:
        """Have enough ids for these embeddings in the prefix caches, which may have to forget."""
        if not self._contents.has_room(spans):
            for each in self:
                each.pause_control.flush_prefixes()
            self._contents.begin_anew()

    def _virtual_ids(self, adapter: int) -> list[int]:
        """Return the ids of an adapter's embeddings in the prefix caches; none of most adapters."""
        spans = self.adapters.spans_of(adapter)
        if not spans:
            return []
        self._make_room(spans)
        return self._contents.named([PLACEHOLDER] * spans[-1].stop, spans)

    def abort(self, sequence: Sequence, finish: Finish) -> None:
        """End ``sequence`` now, whatever its state. Never blocks; idempotent."""
        self.for_request(sequence.request).abort(sequence, finish)

    async def encode(self, columns: Columns, tenant: str = "") -> Floats:
        """Compute texts as :meth:`trioserve.pooling.batcher.Batcher.compute`, on one worker.

        It is the worker with the fewest tokens to be computed, of those that are there.
        """
        present = [each for each in self.batchers if each.attached] or self.batchers
        batcher = min(present, key=lambda each: each.core.num_waiting_tokens)
        return await batcher.compute(columns, tenant)

    @property
    def catalogue(self) -> Catalogue:
        """The adapters that requests may name."""
        return self.adapters.catalogue

    # ---- workers

    @property
    def attached(self) -> bool:
        """True while a scheduler has a worker."""
        return any(each.attached for each in self)

    @property
    def num_attached(self) -> int:
        """Number of workers attached since the start, including the present ones."""
        return sum(each.num_attached for each in self)

    async def wait_attached(self) -> None:
        """Block until a scheduler has a worker."""

        async def wait(scheduler: Scheduler) -> None:
            await scheduler.wait_attached()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for each in self:
                nursery.start_soon(wait, each)

    async def call(self, name: str, arguments: object = None, *, one: bool = False) -> Any:
        """Call all workers that are there by name, and return the first one's answer.

        Args:
            name: Name of the operation.
            arguments: Arguments of MessagePack's types; with ``one`` also an async function that
                returns them, called with True for a worker of another host.
            one: True to call only one of them, each in turn.

        Raises:
            EngineError: A worker reports why it can't.
            WorkerLost: There is none, or one was lost or hung before it answered.
        """
        if not one:
            return (await self.call_all(name, arguments))[0]
        present = self._present()
        self._num_calls += 1
        scheduler = present[self._num_calls % len(present)]
        if callable(arguments):
            core = scheduler.core
            arguments = await arguments(core is not None and core.limits.is_far)
        return await scheduler.call(name, arguments)

    async def call_all(self, name: str, arguments: object = None) -> list[Any]:
        """Call every worker as :meth:`call`, and return the answers of all."""

        async def call(_: int, scheduler: Scheduler) -> Any:
            return await scheduler.call(name, arguments)

        return await all_together(call, self._present())

    def _present(self) -> list[Scheduler]:
        """Return those with a worker, or all if none has one: a call to each says why."""
        return [each for each in self if each.attached] or list(self)

    # ---- pauses

    async def pause(self, holder: str, *, retract: bool = False) -> None:
        """Stop computing until :meth:`resume`; return once nothing is in flight, which is soon.

        Cancelling this leaves the pause in place.

        Args:
            holder: Key of the pause.
            retract: Preempt all running sequences, which resume from their tokens.
        """
        for each in self:
            each.pause_control.close(holder, retract=retract)
        for batcher in self.batchers:
            batcher.close(holder)
        for each in self:
            await each.pause_control.wait_drained()
        for batcher in self.batchers:
            await batcher.wait_drained()

    async def pause_when_done(self, holder: str) -> None:
        """Pause once all requests that have arrived so far have finished; later ones wait.

        Cancelling it before that ends the pause.
        """
        last = {each: each.close_behind(holder) for each in self._pausable()}

        def busy() -> list[PauseControl | Batcher]:
            # A request may have moved to any worker; it counts as older than all others there.
            return [each for each in self._pausable() if not each.has_finished(last.get(each, 0))]

        try:
            while unfinished := busy():
                await unfinished[0].wait_finished(last.get(unfinished[0], 0))
        except BaseException:
            self.resume(holder)
            raise
        await self.pause(holder)

    def _pausable(self) -> list[PauseControl | Batcher]:
        return [*(each.pause_control for each in self), *self.batchers]

    def resume(self, holder: str) -> None:
        """End the pause of that key. Idempotent."""
        for each in self._pausable():
            each.resume(holder)

    @property
    def paused(self) -> bool:
        """True while a pause keeps all sequences from being computed."""
        return all(each.paused for each in self)

    # ---- observation

    def notify_idle(self, note: Callable[[], None]) -> None:
        """Have ``note`` called whenever a scheduler becomes idle. Others may not be."""
        self._on_idle = note
        for each in self:
            each.on_idle = note

    @property
    def idle(self) -> bool:
        """True if no sequence and no text is left, and nothing is in flight."""
        return all(each.idle for each in self) and all(each.idle for each in self.batchers)

    @property
    def stalled(self) -> bool:
        """True if a scheduler makes no progress, though there could be some."""
        return any(each.stalled for each in self)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for a slot."""
        return sum(each.num_waiting for each in self)

    @property
    def num_waiting_tokens(self) -> int:
        """Number of tokens, prompt and output so far, of the sequences that wait for a slot."""
        return sum(each.num_waiting_tokens for each in self)

    def waiting_of(self, tenant: str) -> tuple[int, int]:
        """Return how many sequences of ``tenant`` wait for a slot, and their tokens."""
        waiting = [each.waiting_of(tenant) for each in self]
        return sum(number for number, _ in waiting), sum(tokens for _, tokens in waiting)

    def statistics(self) -> SchedulerStatistics:
        """Return the sum of the counts of this moment; texts count as sequences."""
        gone = [each.statistics().totals for each in self.placement.gone]
        total = sum_of([*(each.statistics() for each in self), *gone])
        for batcher in self.batchers:
            total = batcher.counted_in(total)
        return total

    def check_integrity(self) -> None:
        """Assert the invariants."""
        for each in (*self, *self.batchers):
            each.check_integrity()

    def iterations(
        self, max_records: int = DEFAULT_MAX_RECORDS
    ) -> contextlib.AbstractContextManager[Subscription[Iteration]]:
        """Subscribe to the steps of all: see :meth:`trioserve.Engine.iterations`."""
        return subscribe_to([each.feeds.iterations.feed for each in self], max_records)

    def cache_events(
        self, max_records: int = DEFAULT_MAX_RECORDS
    ) -> contextlib.AbstractContextManager[Subscription[CacheEvent]]:
        """Subscribe to the events of all prefix caches."""
        return self.cache_feed.events.subscribe(max_records)
