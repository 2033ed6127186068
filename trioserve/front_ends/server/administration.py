"""The engine process's handlers of operators' calls, for all front ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import msgspec

from trioserve.engine.local_administration import SharedAdministration
from trioserve.front_ends.calls import Collected, EngineState
from trioserve.front_ends.clock import SharedClock
from trioserve.front_ends.server.peers import Peers
from trioserve.http.api.openai.responses.store import KeptResponses, LocalResponses
from trioserve.observability.metrics.snapshot import MetricsSnapshot
from trioserve.pooling.columns import Columns
from trioserve.protocol import wire
from trioserve.protocol.errors import InvalidRequest
from trioserve.scheduler.iterations import Iteration


@attrs.define(eq=False, kw_only=True)
class HostedAdministration(SharedAdministration, LocalResponses):
    """The handlers of :class:`~trioserve.front_ends.calls.EngineCalls` for operators.

    Args:
        peers: all front ends.
        clock: translates times for front ends.
        snapshot: returns the counts of all processes.
        check_pause: raises ``Paused`` during a pause that refuses requests.
    """

    _peers: Peers
    _clock: SharedClock
    _snapshot: Callable[[], MetricsSnapshot]
    _check_pause: Callable[[], None]
    responses: KeptResponses = attrs.field(init=False, factory=KeptResponses)

    async def call_worker(self, name: str, arguments: Any) -> Any:
        """Call the worker by name."""
        return await self._engine.schedulers.call(name, arguments)

    async def encode(self, columns: Any, tenant: str) -> bytes:
        """Compute texts as a whole; return their vectors as a column of float32."""
        schedulers = self._engine.schedulers
        if not schedulers.batchers:
            raise InvalidRequest("the model is no encoder")
        self._check_pause()
        return wire.from_floats(await schedulers.encode(Columns.from_message(columns), tenant))

    async def state(self) -> EngineState:
        """Return the state of the engine process."""
        statistics, schedulers = self._engine.statistics(), self._engine.schedulers
        return EngineState(
            attached=schedulers.attached,
            stalled=schedulers.stalled,
            paused=schedulers.paused,
            memory_released=statistics.memory_released,
            worker_restarts=statistics.worker_restarts,
            scheduler=statistics.scheduler,
        )

    async def collect(self) -> Collected:
        """Return the counts of all processes, after asking the front ends for theirs."""
        await self._peers.count()
        return Collected(snapshot=self._snapshot(), statistics=self._engine.statistics())

    async def abort(self, ids: list[str], prefix: bool) -> int:
        """Abort requests by name; return how many were ended."""
        num_aborted = await self._peers.abort(ids, prefix)
        # A front end that didn't answer may have some left.
        control = self._engine.control
        return num_aborted + sum(control.abort(id, prefix=prefix) for id in ids)

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter. Its name and path have been checked."""
        await self._engine.schedulers.adapters.load(name, path)

    async def iterations(self) -> list[Iteration]:
        """Return the newest steps since the last call, with times as in messages."""
        return [
            msgspec.structs.replace(each, time=self._clock.shared(each.time))
            for each in await super().iterations()
        ]
