"""Runs long calls in threads, beside the loop that serves plans."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """A thread pool. Functions beyond the number of threads are queued."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._unfinished: set[Future[object]] = set()

    @property
    def num_unfinished(self) -> int:
        """Number of functions started that haven't ended."""
        return len(self._unfinished)

    def start(self, work: Callable[[], object]) -> None:
        """Run ``work`` in a thread."""
        future = self._threads.submit(work)
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)

    def close(self) -> None:
        """Cancel queued functions. Running ones go on until they finish or the process exits."""
        self._threads.shutdown(wait=False, cancel_futures=True)
