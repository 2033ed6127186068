"""A request that a plain thread has handed in: ``LLM.generate_async``."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterator
from typing import Any

from trioserve.engine.offline.engine_thread import EngineThread
from trioserve.engine.offline.handle import GenerationHandle
from trioserve.engine.offline.recording import Outputs, PartialOutput
from trioserve.protocol.errors import RequestAborted
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.generation import Completion, PromptLike


class Generation(GenerationHandle):
    """One request in flight. Any number of threads may wait for it or read along."""

    def __init__(
        self,
        owner: object,
        thread: EngineThread,
        prompt: PromptLike,
        params: SamplingParams | None,
        options: dict[str, Any],
    ) -> None:
        changed = self._changed = threading.Condition()

        def notify(*_: object) -> None:
            with changed:
                changed.notify_all()

        super().__init__(owner, thread, prompt, params, options, notify)

    def result(self, timeout: float | None = None) -> Completion:
        """Block until it has ended and return the whole output. May be called several times.

        Args:
            timeout: Seconds to wait; the request goes on afterwards. None for no limit.

        Raises:
            TimeoutError: The time ran out.
            RequestAborted: It was cancelled.
            TrioserveError: It failed; :meth:`trioserve.Engine.generate` says why it may.
        """
        try:
            completion: Completion = self._future.result(timeout)
            return completion
        except concurrent.futures.CancelledError:
            raise RequestAborted("the request was cancelled") from None
        except TimeoutError:
            if self._future.done():  # The request's own error.
                raise
            raise TimeoutError(f"the request has not ended after {timeout:g} seconds") from None

    def __iter__(self) -> Iterator[PartialOutput]:
        """Iterate over the output from its beginning, waiting for each next piece.

        Raises:
            RequestAborted: It was cancelled.
            TrioserveError: It failed.
        """
        outputs, chunks, index = Outputs(), self._recording.chunks, 0
        while True:
            with self._changed:
                while index == len(chunks) and not self._future.done():
                    self._changed.wait()
            if index == len(chunks):
                break
            yield outputs.add(chunks[index])
            index += 1
        self.result()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
