"""What operators do to a running engine: pause it, end requests by name, empty its cache."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from trioserve.backend import Backend
from trioserve.errors import InvalidRequest
from trioserve.request import Finish, FinishReason, Request, State
from trioserve.scheduler.quiet import Quiet

__all__ = ["PAUSE_MODES", "Control"]

PAUSE_MODES = ("abort", "wait", "retract", "in_place")
"""What may become of the requests there are when the engine is paused."""

_OPERATOR = "operator"


@attrs.define(eq=False)
class Control:
    """The controls of one engine; each is described where the engine offers it.

    Args:
        scheduler: the engine's.
        open_requests: those whose caller's scope is open, at any moment.
    """

    _scheduler: Backend
    _open_requests: Iterable[Request]
    refuses: bool = attrs.field(init=False, default=False)
    """Whether requests that come are to be refused for a pause."""

    async def pause(self, mode: str, *, refuse: bool) -> None:
        """See :meth:`trioserve.engine.Engine.pause`."""
        if mode not in PAUSE_MODES:
            modes = ", ".join(PAUSE_MODES)
            raise InvalidRequest(f"mode is one of {modes}, not {mode!r}", param="mode")
        self.refuses = refuse
        quiet = self._quiet
        if mode == "wait":
            await quiet.pause_when_done(_OPERATOR)
            return
        if mode == "abort":
            self.abort("", prefix=True)
        await quiet.pause(_OPERATOR, retract=mode == "retract")

    def resume(self) -> None:
        """See :meth:`trioserve.engine.Engine.resume`."""
        self.refuses = False
        self._quiet.resume(_OPERATOR)

    def abort(self, request_id: str, *, prefix: bool) -> int:
        """See :meth:`trioserve.engine.Engine.abort`."""
        finish = Finish(FinishReason.ABORT)
        named = [
            request
            for request in self._open_requests
            if (request.id.startswith(request_id) if prefix else request.id == request_id)
        ]
        num_aborted = 0
        for request in named:
            alive = [each for each in request.sequences if each.state is not State.FINISHED]
            # The last one first: nobody is to compute the prompt in place of one that has left.
            for sequence in reversed(alive):
                self._scheduler.abort(sequence, finish)
            num_aborted += bool(alive)
        return num_aborted

    def flush_cache(self) -> int:
        """See :meth:`trioserve.engine.Engine.flush_cache`."""
        return self._quiet.flush_prefixes()

    @property
    def _quiet(self) -> Quiet:
        quiet = self._scheduler.quiet
        assert quiet is not None, "it is the engine process that is asked"
        return quiet
