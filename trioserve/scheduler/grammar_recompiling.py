"""Grammars that the worker has to compile again, away from its steps.

A worker compiles a grammar in the thread of its steps if a sequence is opened whose grammar it
doesn't have, and all sequences wait meanwhile. So after a worker's death the sequences with a
grammar wait until the next one has compiled it in its threads, and the others go on. The same holds
for a sequence that lost its slot: the worker may have dropped its grammar for others since.
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
"""Grammars that the worker compiles at a time, beside those of new requests."""

_log = get_logger("trioserve.engine")


@attrs.frozen(eq=False)
class _Recompiling:
    core: SchedulerCore
    call: WorkerCall
    wake: Callable[[], None]
    deliver: Callable[[list[SequenceOutput]], None]
    begun: set[Grammar] = attrs.field(factory=set)
    """Those that are being compiled."""
    turns: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(MAX_CALLS))

    async def compile(self, grammar: Grammar) -> None:
        """Have ``grammar`` compiled, and let the sequences go on that follow it."""
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
        """Return one that is to be compiled, None if all of them are."""
        return next((each for each in self.core.uncompiled if each not in self.begun), None)

    async def _ask(self, grammar: Grammar) -> str:
        """Return why the worker can't compile ``grammar``, nothing if it has."""
        arguments = {"grammar": [grammar.kind, grammar.text], "extra_args": {}}
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
    """The task, for a worker's life: have it compile what sequences wait for.

    Args:
        core: says which grammars those are.
        call: calls the worker.
        happenings: are looked at after each plan.
        wake: is called when sequences may go on.
        deliver: takes the ends of sequences whose grammar can't be compiled.

    Raises:
        WorkerLost: it is lost.
    """
    recompiling = _Recompiling(core, call, wake, deliver)
    async with trio.open_nursery() as nursery:
        while True:
            while (grammar := recompiling.next()) is not None:
                recompiling.begun.add(grammar)
                nursery.start_soon(recompiling.compile, grammar)
            await conditions.wait_for(lambda: recompiling.next() is not None)
