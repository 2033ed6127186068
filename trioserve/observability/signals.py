"""The handler of SIGUSR1 in a server's processes."""

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
    """Log all tasks and their stacks at SIGUSR1; child processes log theirs.

    This works while Python code blocks the event loop, because the handler isn't a trio task.

    Args:
        place: the position of this process among those that write to one log. They write one after
            the other, since pieces of long dumps would mix.
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
        # in another thread, because the signal may have interrupted this one while it wrote to the
        # log
        context = contextvars.copy_context()
        _thread.start_new_thread(context.run, (write, tasks))

    previous = signal.signal(signal.SIGUSR1, dump)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, previous)
