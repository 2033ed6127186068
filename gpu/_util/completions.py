"""Events that pass one after the other, as a file descriptor."""

from __future__ import annotations

import os
import queue
import threading
from typing import Protocol


class Waitable(Protocol):
    """An event to wait for."""

    def synchronize(self) -> None:
        """Block until the event has passed."""


class Completions:
    """Events that pass one after the other, as a file descriptor.

    A thread waits for each in its order. It lives as long as the process: a worker has one device.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Waitable | None] = queue.SimpleQueue()
        flags = os.EFD_CLOEXEC | os.EFD_SEMAPHORE
        self.descriptor = os.eventfd(0, flags)
        """Readable while more events have passed than were taken."""
        threading.Thread(target=self._watch, name="completions", daemon=True).start()

    def add(self, event: Waitable | None) -> None:
        """Add the next event to wait for; None passes together with the event before it."""
        self._queue.put(event)

    def take(self) -> None:
        """Wait until one more event has passed, and count it as taken."""
        os.eventfd_read(self.descriptor)

    def _watch(self) -> None:
        while True:
            self._wait_for_next()
            os.eventfd_write(self.descriptor, 1)

    def _wait_for_next(self) -> None:
        """Wait for the next event; what it holds is free before the one behind it comes."""
        event = self._queue.get()
        try:
            if event is not None:
                event.synchronize()
        except RuntimeError:
            pass  # the user of the event synchronizes again, which raises the error
