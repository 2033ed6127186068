"""Runs long calls in threads, beside the loop that serves plans."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_log = logging.getLogger("gpu.worker")


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
        """Run ``work`` in a thread. An exception ends the process, as one of the loop does."""
        future = self._threads.submit(work)
        self._unfinished.add(future)
        future.add_done_callback(self._end)

    def close(self) -> None:
        """Cancel queued functions. Running ones go on until they finish or the process exits."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _end(self, future: Future[object]) -> None:
        self._unfinished.discard(future)
        error = None if future.cancelled() else future.exception()
        if error is not None:
            _log.error("a thread of the worker failed", exc_info=error)
            os._exit(1)
