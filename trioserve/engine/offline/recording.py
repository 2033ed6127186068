"""One request as it is read in the engine's thread, and what its readers make of its chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from trioserve.engine.engine import Engine
from trioserve.engine.offline.room import Room
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.generation import Completion, PromptLike, completion_of
from trioserve.requests.stream import Chunk, TokenLogprob


@attrs.frozen
class PartialOutput:
    """One output of a request as far as it has come, with what is new since the last one."""

    index: int
    """Number of the output, from 0 to ``n`` - 1."""
    text: str
    """The output's text so far."""
    text_diff: str
    """The end of ``text`` that is new."""
    token_ids_diff: tuple[int, ...]
    """The tokens that are new."""
    logprobs_diff: tuple[TokenLogprob, ...] | None
    """Their log-probabilities, if the request asked for them."""
    finish_reason: str | None
    """``stop``, ``length`` or ``abort`` in the last one of an output, else None."""
    stop_reason: int | str | None
    """The stop id or stop string that ended the output."""


@attrs.define(eq=False)
class Outputs:
    """The texts of one request's outputs as one reader has read them."""

    _texts: dict[int, str] = attrs.field(init=False, factory=dict)

    def add(self, chunk: Chunk) -> PartialOutput:
        """Return the chunk's output as it is with the chunk."""
        text = self._texts[chunk.index] = self._texts.get(chunk.index, "") + chunk.text
        return PartialOutput(
            index=chunk.index,
            text=text,
            text_diff=chunk.text,
            token_ids_diff=chunk.token_ids,
            logprobs_diff=chunk.logprobs,
            finish_reason=chunk.finish_reason,
            stop_reason=chunk.stop_reason,
        )


@attrs.define(eq=False)
class Recording:
    """The chunks of one request, kept for readers in other threads.

    Only the engine's thread appends to ``chunks``, and nothing is ever taken away.
    """

    on_chunk: Callable[[], object]
    """Called in the engine's thread after each chunk."""
    chunks: list[Chunk] = attrs.field(init=False, factory=list)

    async def record(
        self,
        engine: Engine,
        room: Room,
        prompt: PromptLike,
        params: SamplingParams | None,
        options: dict[str, Any],
    ) -> Completion:
        """Generate and keep every chunk; return the whole."""
        async with room.admitted(lambda: engine.generate(prompt, params, **options)) as stream:
            async for chunk in stream:
                self.chunks.append(chunk)
                self.on_chunk()
        return completion_of(stream, self.chunks)
