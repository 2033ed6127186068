"""The end of a process with its parent, whose death closes the pipe to standard input."""

from __future__ import annotations

import os
import threading


def exit_with_stdin(status: int) -> threading.Thread:
    """Start a thread that ends the process with ``status`` when standard input ends."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(status)

    thread = threading.Thread(target=watch, name="parent-watch", daemon=True)
    thread.start()
    return thread
