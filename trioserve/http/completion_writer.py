"""What the engine gives, in the words of ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from msgspec import UnsetType

from trioserve.generation import Completion, GenerationStream
from trioserve.http.completion_schemas import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
)
from trioserve.http.generations import total_usage
from trioserve.http.openai_schemas import UsageReply
from trioserve.http.openai_writer import MIN_LOGPROB, OpenAIWriter, says_nothing, usage_reply
from trioserve.stream import Chunk, TokenLogprob

__all__ = ["CompletionWriter", "completion_response"]


def completion_response(
    completions: Sequence[Completion],
    *,
    id: str,
    model: str,
    created: int,
    echoes: Sequence[str],
) -> CompletionResponse:
    """The whole answer: a choice per prompt, each after its echo."""
    choices = [
        CompletionChoice(
            index=index,
            text=echo + completion.text,
            logprobs=_logprobs(completion.logprobs, len(echo)),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        for index, (completion, echo) in enumerate(zip(completions, echoes, strict=True))
    ]
    total = total_usage(completion.usage for completion in completions)
    return CompletionResponse(
        id=id, created=created, model=model, choices=choices, usage=usage_reply(total)
    )


def _logprobs(entries: Sequence[TokenLogprob] | None, offset: int) -> CompletionLogprobs | None:
    """The tokens column by column; the first begins at character ``offset`` of the text."""
    if entries is None:
        return None
    columns = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for entry in entries:
        chosen = max(entry.logprob, MIN_LOGPROB)
        columns.text_offset.append(offset)
        columns.token_logprobs.append(chosen)
        columns.tokens.append(entry.text)
        columns.top_logprobs.append(
            {
                entry.text: chosen,
                **{text: max(logprob, MIN_LOGPROB) for _, logprob, text in entry.top},
            }
        )
        offset += len(entry.text)
    return columns


@attrs.define(eq=False, kw_only=True)
class CompletionWriter(OpenAIWriter):
    """The events of a streamed completion."""

    echoes: Sequence[str]
    _offsets: list[int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._offsets = [len(echo) for echo in self.echoes]

    def start(self, streams: list[GenerationStream]) -> bytes:
        """The prompts, where they are to be echoed."""
        return b"".join(
            self._event([CompletionChoice(index, echo, None, None, None)])
            for index, echo in enumerate(self.echoes)
            if echo
        )

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """A chunk; none where a step added no text yet and nothing else."""
        if says_nothing(chunk):
            return b""
        logprobs = _logprobs(chunk.logprobs, self._offsets[index])
        self._offsets[index] += sum(len(entry.text) for entry in chunk.logprobs or ())
        choice = CompletionChoice(
            index, chunk.text, logprobs, chunk.finish_reason, chunk.stop_reason
        )
        return self._event([choice])

    def _response(
        self, choices: list[CompletionChoice], usage: UsageReply | UnsetType | None
    ) -> CompletionResponse:
        return CompletionResponse(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )
