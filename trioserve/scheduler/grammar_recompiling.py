"""Compile grammars again on the worker, outside its steps.

A worker that opens a sequence with an unknown grammar compiles it in the thread of its steps, and
all sequences wait meanwhile. So after a worker's death, sequences with a grammar wait until the
next worker has compiled it in other threads; all other sequences run. A preempted sequence waits in
the same way, because the worker may have dropped its grammar. A worker has compiled each of these
grammars within the limits before, so it isn't tried in a child process again.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from trioserve._util.conditions import Conditions
from trioserve.observability.logs import get_logger
from trioserve.protocol.errors import EngineError
from trioserve.protocol.grammar import Grammar
from trioserve.requests.request import Finish, FinishReason, SequenceOutput
from trioserve.scheduler.calls import WorkerCall
from trioserve.scheduler.core import SchedulerCore

MAX_CALLS = 2
"""Number of grammars that the worker compiles at a time, beside those of new requests."""

_log = get_logger("trioserve.engine")


@attrs.frozen(eq=False)
class _Recompiling:
    core: SchedulerCore
    call: WorkerCall
    wake: Callable[[], None]
    deliver: Callable[[list[SequenceOutput]], None]
    begun: set[Grammar] = attrs.field(factory=set)
    """Grammars that are being compiled."""
    turns: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(MAX_CALLS))

    async def compile(self, grammar: Grammar) -> None:
        """Have ``grammar`` compiled, and let the sequences that follow it be computed."""
        async with self.turns:
            error = ""
            if self.core.requests_waiting_for(grammar):
                error = await self._ask(grammar)
        if error:
            _log.error("grammar not compiled again", reason=error)
            failure = EngineError(f"the request's grammar can't be compiled again: {error}")
            for request in self.core.requests_waiting_for(grammar):
                end = Finish(FinishReason.ERROR, error=failure)
                self.deliver(self.core.finish_all(request, end))
        self.begun.remove(grammar)
        self.core.on_compiled(grammar)
        self.wake()

    def next(self) -> Grammar | None:
        """Return a grammar to be compiled; None if all have begun."""
        return next((each for each in self.core.uncompiled if each not in self.begun), None)

    async def _ask(self, grammar: Grammar) -> str:
        """Call the worker; return why it can't compile ``grammar``, or an empty string."""
        arguments = {"grammar": [grammar.kind, grammar.text], "extra_args": {}, "tried": True}
        try:
            match await self.call("prepare", arguments):
                case {"error": str(message)}:
                    return message
        except EngineError as error:
            return str(error)
        return ""


async def recompile(
    core: SchedulerCore,
    call: WorkerCall,
    *,
    conditions: Conditions,
    wake: Callable[[], None],
    deliver: Callable[[list[SequenceOutput]], None],
) -> None:
    """Run the task for a worker's life: have it compile the grammars that sequences wait for.

    Args:
        core: Holds the grammars.
        call: Calls the worker.
        conditions: Notified after each plan.
        wake: Called when sequences may be computed again.
        deliver: Takes the ends of sequences with a grammar that can't be compiled.

    Raises:
        WorkerLost: The worker was lost.
    """
    recompiling = _Recompiling(core, call, wake, deliver)
    async with trio.open_nursery() as nursery:
        while True:
            while (grammar := recompiling.next()) is not None:
                recompiling.begun.add(grammar)
                nursery.start_soon(recompiling.compile, grammar)
            await conditions.wait_for(lambda: recompiling.next() is not None)
