"""The command ``trioserve``, with its event loop measured: ``python -m tests.attacks.victim``.

A system task sleeps 20 ms at a time. An interval counts as busy for as long as it was late, and for
no more than the processor time that the process used in it: a loop that waits for a processor on a
machine with other work isn't busy. The longest such time goes into the file ``$BUSY_FILE``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import trio

from trioserve.cli.commands import run

INTERVAL = 0.02
"""Seconds between two measurements."""


async def _measure(report: Path) -> None:
    longest = 0.0
    written = report.with_suffix(".new")
    while True:
        began, used = time.monotonic(), time.process_time()
        await trio.sleep(INTERVAL)
        late = time.monotonic() - began - INTERVAL
        busy = min(late, time.process_time() - used)
        if busy > longest or not report.exists():
            longest = busy
            # A reader finds a whole number at any time: writing in place empties the file first.
            written.write_text(repr(busy))
            written.replace(report)


def main() -> None:
    """Run the command with the measuring task in its event loop."""
    report = Path(os.environ["BUSY_FILE"])
    real = trio.run

    def measured(function: Any, *args: Any, **kwargs: Any) -> Any:
        async def wrapper(*args: Any) -> Any:
            trio.lowlevel.spawn_system_task(_measure, report)
            return await function(*args)

        return real(wrapper, *args, **kwargs)

    trio.run = measured
    sys.argv[0] = "trioserve"
    run()


if __name__ == "__main__":
    main()
