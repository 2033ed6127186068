"""Runs long calls in threads, beside the loop that serves plans."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """A thread pool whose results are taken without blocking.

    ``descriptor`` is readable while there is a result to :meth:`take`. Functions beyond the number
    of threads are queued.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._results: deque[T] = deque()
        self._unfinished = 0
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @property
    def num_unfinished(self) -> int:
        """Number of functions started whose results haven't been taken."""
        return self._unfinished

    def start(self, work: Callable[[], T]) -> None:
        """Run ``work``, which must not raise, in a thread."""
        self._unfinished += 1
        self._threads.submit(self._run, work)

    def take(self) -> Iterator[T]:
        """Yield the finished results, each once."""
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            return
        while self._results:
            self._unfinished -= 1
            yield self._results.popleft()

    def close(self) -> None:
        """Cancel queued functions. Running ones go on until they finish or the process exits."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, work: Callable[[], T]) -> None:
        self._results.append(work())
        os.eventfd_write(self.descriptor, 1)
