"""An engine in this process as a target, without HTTP."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import trio

from trioserve.load.records import Record
from trioserve.load.target import Sender
from trioserve.load.work import Cancel
from trioserve.protocol.errors import InvalidRequest, TrioserveError
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from trioserve.engine.engine import Engine
    from trioserve.requests.generation import GenerationStream

_NOT_FOR_AN_ENGINE = frozenset({"model", "stream", "stream_options", "return_token_ids", "user"})
_PARAMETERS = frozenset(field.name for field in attrs.fields(SamplingParams))


@attrs.frozen(kw_only=True)
class EmbeddedTarget:
    """An open engine as a target. Every request has the ``fields``; ``timeout`` is in seconds."""

    engine: Engine
    chat: bool = False
    fields: Mapping[str, Any] = attrs.field(factory=dict)
    timeout: float = 600.0

    @contextlib.asynccontextmanager
    async def senders(self) -> AsyncIterator[Sender]:
        """Yield the target itself, because an engine has no connections."""
        yield self

    async def ask(
        self, fields: Mapping[str, Any], record: Record, cancel: Cancel | None = None
    ) -> None:
        """Send a request as :meth:`trioserve.load.target.Sender.ask` describes."""
        cancel = cancel or Cancel()
        leaves_after = math.inf if cancel.seconds is None else cancel.seconds
        record.started = trio.current_time()
        try:
            with trio.move_on_after(min(leaves_after, self.timeout)) as scope:
                await self._generate({**self.fields, **fields}, record, cancel)
            if scope.cancelled_caught and leaves_after < self.timeout:
                record.cancelled = True
            elif scope.cancelled_caught:
                record.fail("timeout", f"TooSlowError: not done within {self.timeout:g} s")
        except TrioserveError as error:
            record.fail(type(error).__name__, str(error))
        finally:
            record.ended = trio.current_time()

    async def _generate(self, fields: dict[str, Any], record: Record, cancel: Cancel) -> None:
        prompt = fields.pop("messages" if self.chat else "prompt")
        texts: list[str] = []
        try:
            async with self.engine.generate(prompt, **_parameters(fields)) as stream:
                await _read(stream, record, texts, cancel.events)
                if not record.cancelled:
                    usage = stream.usage
                    record.prompt_tokens = usage.prompt_tokens
                    record.completion_tokens = usage.completion_tokens
                    record.cached_tokens = usage.cached_tokens
        finally:
            record.text = "".join(texts)


async def _read(
    stream: GenerationStream, record: Record, texts: list[str], max_events: int | None
) -> None:
    async for chunk in stream:
        now = trio.current_time()
        record.chunks.append(now)
        if chunk.text:
            texts.append(chunk.text)
            if record.first_text is None:
                record.first_text = now
        record.token_ids += chunk.token_ids
        record.finish_reason = chunk.finish_reason
        if max_events is not None and len(record.chunks) >= max_events:
            record.cancelled = True
            return


def _parameters(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the fields of a request's body to arguments of ``Engine.generate``.

    Raises:
        InvalidRequest: A field is unknown.
    """
    parameters: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "max_completion_tokens":
            parameters["max_tokens"] = value
        elif name == "response_format":
            parameters["grammar"] = _grammar(value)
        elif name in _PARAMETERS:
            parameters[name] = value
        elif name not in _NOT_FOR_AN_ENGINE:
            raise InvalidRequest(f"an embedded engine doesn't know {name}", param=name)
    return parameters


def _grammar(response_format: Mapping[str, Any]) -> Grammar | None:
    kind = response_format.get("type")
    if kind == "json_schema":
        return Grammar("json_schema", json.dumps(response_format["json_schema"]["schema"]))
    if kind == "json_object":
        return Grammar("json_schema", '{"type": "object"}')
    return None
