"""A request that an asyncio program has handed in: ``AsyncLLM.generate_async``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from trioserve.engine.offline.engine_thread import EngineThread
from trioserve.engine.offline.handle import GenerationHandle
from trioserve.engine.offline.recording import Outputs, PartialOutput
from trioserve.protocol.errors import RequestAborted
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.generation import Completion, PromptLike


class _Signal:
    """Wakes the tasks of one event loop from another thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._is_scheduled = False

    def notify(self, *_: object) -> None:
        """Wake all that wait. May be called from any thread; a burst is one wake-up."""
        if not self._is_scheduled:
            self._is_scheduled = True
            with contextlib.suppress(RuntimeError):  # The loop is closed: nothing waits there.
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_scheduled = False
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the next :meth:`notify`."""
        await self._event.wait()


class AsyncGeneration(GenerationHandle):
    """One request in flight, for the tasks of the event loop that it was made in.

    Cancelling a task that waits for it ends the wait alone.
    """

    def __init__(
        self,
        owner: object,
        thread: EngineThread,
        prompt: PromptLike,
        params: SamplingParams | None,
        options: dict[str, Any],
    ) -> None:
        self._signal = _Signal()
        super().__init__(owner, thread, prompt, params, options, self._signal.notify)

    async def result(self, timeout: float | None = None) -> Completion:
        """Wait until it has ended and return the whole output. May be called several times.

        Args:
            timeout: Seconds to wait; the request goes on afterwards. None for no limit.

        Raises:
            TimeoutError: The time ran out.
            RequestAborted: It was cancelled.
            TrioserveError: It failed.
        """
        try:
            async with asyncio.timeout(timeout):
                while not self._future.done():
                    await self._signal.wait()
        except TimeoutError:
            raise TimeoutError(f"the request has not ended after {timeout:g} seconds") from None
        if self._future.cancelled():
            raise RequestAborted("the request was cancelled")
        completion: Completion = self._future.result()
        return completion

    async def __aiter__(self) -> AsyncIterator[PartialOutput]:
        """Iterate over the output from its beginning, waiting for each next piece.

        Raises:
            RequestAborted: It was cancelled.
            TrioserveError: It failed.
        """
        outputs, chunks, index = Outputs(), self._recording.chunks, 0
        while True:
            while index == len(chunks) and not self._future.done():
                await self._signal.wait()
            if index == len(chunks):
                break
            yield outputs.add(chunks[index])
            index += 1
        await self.result()

    async def __aenter__(self) -> AsyncGeneration:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()
