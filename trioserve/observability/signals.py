"""What a server's processes do at SIGUSR1."""

from __future__ import annotations

import _thread
import contextlib
import contextvars
import signal
import time
from collections.abc import Iterator

from trioserve.observability.logs import ASKED_FOR, get_logger
from trioserve.observability.task_dump import ask_others, dump_tasks

TURN = 0.2
"""Seconds that a process has for writing a dump."""

_dump_log = get_logger(ASKED_FOR)


@contextlib.contextmanager
def dumping_tasks(place: int = 0) -> Iterator[None]:
    """At SIGUSR1, log all tasks and their stacks; processes that belong to this one show theirs.

    Also while Python code holds up the event loop: this is no signal for a task to receive.

    Args:
        place: when it is this process's turn to write, among those that write to one log: a dump
            is long, and pieces of several would mix.
    """

    def write(tasks: str) -> None:
        time.sleep(place * TURN)
        _dump_log.info("task dump", tasks=tasks)

    def dump(*_: object) -> None:
        try:
            tasks = dump_tasks()
        except Exception as error:
            tasks = f"there is no dump: {error!r}"
        ask_others()
        # Not in this thread: it may have been interrupted in the middle of a write to the log.
        context = contextvars.copy_context()
        _thread.start_new_thread(context.run, (write, tasks))

    previous = signal.signal(signal.SIGUSR1, dump)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, previous)
