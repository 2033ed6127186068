"""A thread that logs a hang of the event loop, with the stack of the loop's thread.

The loop itself can log only afterwards. While C code holds the interpreter's lock, this thread
can't run either; then the later line about the loop's lag is the only trace.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

import attrs

from trioserve.observability.logs import get_logger

HANGS_AFTER = 2.0
"""Seconds without a beat after which the loop counts as hanging."""
AGAIN_AFTER = 10.0
"""Seconds until the next line; they double with each line about the same hang."""
MAX_FRAMES = 20

_log = get_logger("trioserve.loop")


@attrs.define(eq=False)
class HangWatch:
    """A watch over the thread that enters it, until it is left.

    The thread wakes once in ``hangs_after`` seconds as long as :meth:`beat` is called more often.
    """

    hangs_after: float = HANGS_AFTER
    _clock: Callable[[], float] = time.monotonic
    _watched: int = attrs.field(init=False, default=0)
    _alive_at: float = attrs.field(init=False, default=0.0)
    _left: threading.Event = attrs.field(init=False, factory=threading.Event)
    _thread: threading.Thread = attrs.field(init=False)

    def __enter__(self) -> HangWatch:
        self._watched = threading.get_ident()
        self.beat()
        self._thread = threading.Thread(target=self._run, name="trioserve-hangs", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._left.set()
        self._thread.join()

    def beat(self) -> None:
        """Record that the loop is alive."""
        self._alive_at = self._clock()

    def _run(self) -> None:
        told_of, again_at, pause = -1.0, 0.0, AGAIN_AFTER
        due = self._alive_at + self.hangs_after
        while not self._left.wait(max(due - self._clock(), 0.0)):
            now, alive_at = self._clock(), self._alive_at
            was_late = now - due > self.hangs_after / 2
            due = alive_at + self.hangs_after
            if due > now:
                continue
            if was_late:  # all threads stood still, as when the machine slept
                due = now + self.hangs_after
                continue
            if alive_at != told_of:
                told_of, again_at, pause = alive_at, now, AGAIN_AFTER
            if now >= again_at:
                frame = sys._current_frames().get(self._watched)
                _log.error(
                    "event loop hangs", seconds=round(now - alive_at, 1), stack=_shown(frame)
                )
                again_at, pause = now + pause, pause * 2
            due = now + self.hangs_after


def _shown(frame: FrameType | None) -> str:
    """Return the innermost calls of a stack in one line, the innermost first."""
    calls = traceback.extract_stack(frame, MAX_FRAMES)[::-1] if frame is not None else []
    return " < ".join(
        f"{call.name} ({'/'.join(Path(call.filename).parts[-2:])}:{call.lineno})" for call in calls
    )
