"""Answers in Ollama's form: one object, or a line for each piece and a last one."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from datetime import UTC, datetime

import attrs
import msgspec
import trio
from msgspec import UNSET, UnsetType

from trioserve.http.api.ollama.schemas import (
    OllamaAnswer,
    OllamaChatResponse,
    OllamaFunctionReply,
    OllamaGenerateResponse,
    OllamaReply,
    OllamaToolCallReply,
)
from trioserve.http.api.openai.chat.answer import AnswerReader
from trioserve.http.api.openai.chat.arguments import arguments_object
from trioserve.http.api.openai.chat.schemas import ChatLogprob, Delta, ToolCallDelta
from trioserve.http.api.openai.chat.writer import WantedChat
from trioserve.http.api.openai.writer import TextEvent
from trioserve.http.api.sse import Framing
from trioserve.requests.generation import Completion, GenerationStream, Usage
from trioserve.requests.request import Times
from trioserve.requests.stream import Chunk, TokenLogprob

LINES = "application/x-ndjson"
_encoder = msgspec.json.Encoder()


def _line(reply: OllamaReply) -> bytes:
    return b"%b\n" % _encoder.encode(reply)


@attrs.define(eq=False)
class _Calls:
    """Tool calls, collected until they are complete."""

    _count: int = 0
    _begun: ToolCallDelta | None = None
    _arguments: list[str] = attrs.field(factory=list)

    def add(self, pieces: Sequence[ToolCallDelta], *, last: bool) -> list[OllamaToolCallReply]:
        """Return the calls that ``pieces`` complete; the ``last`` pieces end all."""
        server_api: list[OllamaToolCallReply] = []
        for piece in pieces:
            if piece.id is not None:
                server_api += self._end()
                self._begun = piece
            self._arguments.append(piece.function.arguments or "")
        return server_api + self._end() if last else server_api

    def _end(self) -> list[OllamaToolCallReply]:
        call = self._begun
        if call is None:
            return []
        function = OllamaFunctionReply(
            index=self._count,
            name=call.function.name or "",
            arguments=arguments_object("".join(self._arguments)),
        )
        self._count += 1
        self._begun = None
        self._arguments.clear()
        return [OllamaToolCallReply(id=call.id or "", function=function)]


@attrs.define(eq=False, kw_only=True)
class OllamaWriter(abc.ABC):
    """Lines of a streamed answer, or a whole answer. ``started`` is on trio's clock."""

    model: str
    wanted: WantedChat
    started: float
    created_at: str = attrs.field(
        factory=lambda: datetime.now(UTC).isoformat().replace("+00:00", "Z")
    )
    _reader: AnswerReader = attrs.field(factory=AnswerReader, init=False)
    _calls: _Calls = attrs.field(factory=_Calls, init=False)
    _text_event: TextEvent | None = attrs.field(default=None, init=False)
    """Event of all lines but the last, if the output is all text."""
    _reason: str = attrs.field(default="", init=False)

    @property
    def framing(self) -> Framing:
        """Return framing in lines of JSON. In silence a line without content is sent, as JSON has
        no comments.
        """
        return Framing(
            content_type=LINES,
            last=b"",
            keep_alive=_line(self._said(Delta(), [])),
            error=lambda body: b"%b\n" % body,
        )

    @abc.abstractmethod
    def _said(self, delta: Delta, calls: list[OllamaToolCallReply]) -> OllamaReply:
        """Return the object with a piece of an answer, or all of it."""

    def loaded(self) -> OllamaReply:
        """Return the answer to a request without a prompt."""
        return msgspec.structs.replace(self._said(Delta(), []), done=True, done_reason="load")

    def server_api(self, completion: Completion, times: Times, now: float) -> OllamaReply:
        """Return the whole answer, which ended at ``now``."""
        reader = self.wanted.options.reader(completion.prompt_token_ids)
        delta = reader.feed(completion.text, last=True)
        reply = self._said(delta, self._calls.add(delta.tool_calls or (), last=True))
        reply.logprobs = self._logprobs(completion.outputs[0].logprobs)
        self._reason = completion.finish_reason
        return self._ended(reply, completion.usage, times, now)

    def start(self, streams: list[GenerationStream]) -> bytes:
        """Return nothing; the first line follows."""
        (stream,) = streams
        self._reader = self.wanted.options.reader(stream.prompt_token_ids)
        if self._reader.plain and self.wanted.top_logprobs is None:
            self._text_event = TextEvent.of(lambda text: _line(self._said(Delta(content=text), [])))
        return b""

    def text(self, chunk: Chunk) -> bytes | None:
        """Return the line of a chunk that only adds text; None for any other."""
        if self._text_event is None or chunk.finish_reason is not None:
            return None
        return self._text_event.encoded(chunk.text) if chunk.text else b""

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """Return a chunk's line; empty if a step added nothing to send yet."""
        if (line := self.text(chunk)) is not None:
            return line
        ended = chunk.finish_reason is not None
        delta = self._reader.feed(chunk.text, last=ended)
        calls = self._calls.add(delta.tool_calls or (), last=ended)
        self._reason = chunk.finish_reason or ""
        if not (delta.content or delta.reasoning or calls or chunk.logprobs):
            return b""
        reply = self._said(delta, calls)
        reply.logprobs = self._logprobs(chunk.logprobs)
        return _line(reply)

    def end(self, streams: list[GenerationStream]) -> bytes:
        """Return the line with the reason of the end, the durations, and the token counts."""
        (stream,) = streams
        reply, now = self._said(Delta(), []), trio.current_time()
        return _line(self._ended(reply, stream.usage, stream.times, now))

    def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> list[ChatLogprob] | UnsetType:
        found = self.wanted.logprobs(entries)
        return UNSET if found is None else found.content

    def _ended(self, reply: OllamaReply, usage: Usage, times: Times, now: float) -> OllamaReply:
        """Return ``reply`` with the fields of the whole."""
        first = now if times.first_token is None else times.first_token
        began = first if times.first_scheduled is None else times.first_scheduled
        reply.done = True
        reply.done_reason = self._reason
        reply.total_duration = nanoseconds(now - self.started)
        reply.load_duration = 0
        reply.prompt_eval_count = usage.prompt_tokens
        reply.prompt_eval_duration = nanoseconds(first - began)
        reply.eval_count = usage.completion_tokens
        reply.eval_duration = nanoseconds(now - first)
        return reply


def nanoseconds(seconds: float) -> int:
    """Return a duration in Ollama's unit."""
    return max(int(seconds * 1e9), 0)


class ChatLines(OllamaWriter):
    """Lines of ``/api/chat``."""

    def _said(self, delta: Delta, calls: list[OllamaToolCallReply]) -> OllamaChatResponse:
        answer = OllamaAnswer(
            content=delta.content or "",
            thinking=delta.reasoning or UNSET,
            tool_calls=calls or UNSET,
        )
        return OllamaChatResponse(model=self.model, created_at=self.created_at, message=answer)


class GenerateLines(OllamaWriter):
    """Lines of ``/api/generate``, which has no calls."""

    def _said(self, delta: Delta, calls: list[OllamaToolCallReply]) -> OllamaGenerateResponse:
        return OllamaGenerateResponse(
            model=self.model,
            created_at=self.created_at,
            response=delta.content or "",
            thinking=delta.reasoning or UNSET,
        )
