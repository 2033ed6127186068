"""The common part of the handles for plain threads and for asyncio."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable
from typing import Any

from trioserve.engine.offline.engine_thread import EngineThread
from trioserve.engine.offline.recording import Recording
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.generation import PromptLike


class GenerationHandle:
    """One request in flight, handed to an engine's thread.

    It ends early when it is cancelled, when a block around it is left, when the handle is
    garbage-collected, or when the engine is closed. All output is kept for as long as the handle.

    Args:
        owner: The object that the handle keeps alive, because it would close the engine.
        thread: The engine's.
        notify: Called in any thread whenever there is more output, or the end.
    """

    def __init__(
        self,
        owner: object,
        thread: EngineThread,
        prompt: PromptLike,
        params: SamplingParams | None,
        options: dict[str, Any],
        notify: Callable[..., object],
    ) -> None:
        self._owner = owner
        self.request_id: str = options.get("request_id") or f"req-{uuid.uuid4().hex}"
        self._recording = Recording(notify)
        options = {**options, "request_id": self.request_id}
        self._future = thread.submit(self._recording.record, thread.room, prompt, params, options)
        self._future.add_done_callback(notify)
        self._finalizer = weakref.finalize(self, self._future.cancel)
        self._finalizer.atexit = False

    def done(self) -> bool:
        """Return whether it has ended: with all of its output, with an error, or cancelled."""
        return self._future.done()

    def cancel(self) -> None:
        """End it now, and drop what is still to be computed. Never blocks; idempotent."""
        self._future.cancel()
