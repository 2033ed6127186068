"""Admission of requests that may wait outside of the engine's queue for as long as it is full."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import trio

from trioserve.protocol.errors import QueueFull
from trioserve.requests.generation import GenerationStream

Generation = contextlib.AbstractAsyncContextManager[GenerationStream]


class Room:
    """Room in an engine's queue, shared by all requests of one ``LLM``.

    Args:
        max_requests: requests that may be in the queue or running at the same time. Those beyond
            wait here. The queue's other limits become known when it refuses a request, which
            then waits until another one leaves.
    """

    def __init__(self, max_requests: int) -> None:
        self._limiter = trio.CapacityLimiter(max_requests)
        self._refused = trio.lowlevel.ParkingLot()
        self._num_open = 0

    @contextlib.asynccontextmanager
    async def admitted(self, generate: Callable[[], Generation]) -> AsyncIterator[GenerationStream]:
        """Enter ``generate()``, again and again while the queue is full.

        Raises:
            TrioserveError: whatever entering raises, but for
                :exc:`~trioserve.protocol.errors.QueueFull`.
        """
        async with self._limiter, contextlib.AsyncExitStack() as stack:
            stream = await self._enter(generate, stack)
            try:
                yield stream
            finally:
                self._num_open -= 1
                # Two places for each that leaves: so the queue fills up again.
                self._refused.unpark(count=2)

    async def _enter(
        self, generate: Callable[[], Generation], stack: contextlib.AsyncExitStack
    ) -> GenerationStream:
        while True:
            self._num_open += 1
            try:
                return await stack.enter_async_context(generate())
            except BaseException as error:
                self._num_open -= 1
                if not isinstance(error, QueueFull):
                    self._refused.unpark(count=2)
                    raise
                seconds = error.retry_after
            if self._num_open:
                await self._refused.park()
            else:  # Requests from elsewhere fill the queue.
                await trio.sleep(seconds)
