"""The turns of sessions as a front end runs them: the sessions are in the engine process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

import attrs

from trioserve.engine.request_engine import RequestEngine
from trioserve.engine.sessions.continuation import (
    Continuation,
    Said,
    check_turn_sampling,
    new_turn_id,
    session_closed,
    turn_prompt,
)
from trioserve.front_ends.client.scheduler import RemoteScheduler
from trioserve.front_ends.messages import LeaveTurn, numbers_of, packed
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.deadline import Deadline
from trioserve.requests.generation import GenerationStream, PromptLike


@attrs.define(eq=False)
class _Running:
    """A turn that the engine process may know."""

    stream: GenerationStream | None = None
    is_closed: bool = False
    """True once its session was closed."""


@attrs.define(eq=False)
class RemoteTurns:
    """The turns of one front end: :mod:`trioserve.front_ends.server.turns` is the other side.

    Args:
        engine: this process's.
        remote: its back end, which calls the engine process.
    """

    _engine: RequestEngine
    _remote: RemoteScheduler
    _num_begun: int = attrs.field(init=False, default=0)
    _running: dict[int, _Running] = attrs.field(init=False, factory=dict)

    @contextlib.asynccontextmanager
    async def generate(
        self,
        session_id: str,
        owner: str | None,
        continuation: Continuation,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
        arrived: float | None = None,
        **options: Any,
    ) -> AsyncIterator[GenerationStream]:
        """Open a turn, as ``Session.generate`` does; entering raises what that raises."""
        check_turn_sampling(params, options)
        id = request_id or new_turn_id()
        self._num_begun += 1
        number = self._num_begun
        running = self._running[number] = _Running()
        try:
            with Deadline.of(timeout, arrived, self._engine.config).enforced():
                begun = self._remote.calls.begin_turn(number, session_id, owner, id, continuation)
                prefix = numbers_of(await begun)
            generation = self._engine.generate(
                turn_prompt(prompt, prefix),
                params,
                request_id=id,
                timeout=timeout,
                arrived=arrived,
                prefix_ids=prefix,
                **options,
            )
            async with generation as stream:
                running.stream = stream
                if running.is_closed:
                    raise session_closed()
                stream.before_complete = functools.partial(self._keep, number, stream, len(prefix))
                yield stream
        finally:
            del self._running[number]
            # It may run there even if its beginning was never answered.
            self._remote.tell(LeaveTurn(number))

    async def _keep(
        self, number: int, stream: GenerationStream, cut: int, output_ids: list[int]
    ) -> None:
        """Have the turn kept before its reader can send the next one."""
        said = Said.of(stream, cut, output_ids)
        await self._remote.calls.keep_turn(
            number, packed(said.own), said.num_prompt_tokens, said.salt, said.adapter
        )

    def on_closed(self, number: int) -> None:
        """End a turn, because its session was closed."""
        running = self._running.get(number)
        if running is not None:
            running.is_closed = True
            if running.stream is not None:
                self._engine.end(running.stream.request, session_closed())
