"""Calls that take long are answered in threads, while the loop that serves plans goes on."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """A few threads, and what they have found.

    ``descriptor`` is readable while there is something to :meth:`take`. Work beyond the threads
    waits its turn.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._results: deque[T] = deque()
        self._unfinished = 0
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @property
    def num_unfinished(self) -> int:
        """Number of pieces of work with a result that hasn't been taken."""
        return self._unfinished

    def start(self, work: Callable[[], T]) -> None:
        """Have ``work``, which never raises, done by a thread."""
        self._unfinished += 1
        self._threads.submit(self._run, work)

    def take(self) -> Iterator[T]:
        """Yield the results that are there, each once."""
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            return
        while self._results:
            self._unfinished -= 1
            yield self._results.popleft()

    def close(self) -> None:
        """Start nothing more. What a thread has begun it will finish, unless the process ends."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, work: Callable[[], T]) -> None:
        self._results.append(work())
        os.eventfd_write(self.descriptor, 1)
