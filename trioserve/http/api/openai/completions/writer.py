"""Answers of ``/v1/completions``, whole or as events."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import msgspec
from msgspec import UNSET, UnsetType

from trioserve.http.api.generations import total_usage
from trioserve.http.api.openai.completions.logprobs import Offsets, output_columns, prompt_columns
from trioserve.http.api.openai.completions.schemas import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
)
from trioserve.http.api.openai.schemas import UsageReply
from trioserve.http.api.openai.writer import (
    OpenAIWriter,
    TextEvent,
    matched_stop,
    prompt_logprobs_reply,
    says_nothing,
    token_name,
    unset_if_none,
    usage_reply,
)
from trioserve.requests.generation import Completion, Output
from trioserve.requests.logprobs import PromptLogprobs
from trioserve.requests.prompts import Prompt, TextPrompt, TokensPrompt
from trioserve.requests.stream import Chunk
from trioserve.text.tokenizer import Tokenizer


@attrs.frozen(kw_only=True)
class Wanted:
    """Parts of a completion that a request wants."""

    tokenizer: Tokenizer
    n: int = 1
    echo: bool = False
    eos_token_ids: Sequence[int] = ()
    logprobs: int | None = None
    num_top: int = 0
    """Number of most probable tokens to return of an output; ``logprobs`` has that of an echo."""
    prompt_logprobs: int | None = None
    token_ids: bool = False
    tokens_as_ids: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncated: bool = False
    """True if prompts may have been truncated, so that a text may differ from the model's input."""

    def opening(
        self, prompt: Prompt, prompt_ids: Sequence[int], prompt_logprobs: PromptLogprobs | None
    ) -> CompletionChoice:
        """Return the beginning of every choice of a prompt, before any output."""
        columns = None
        if self.echo and self.logprobs is not None and prompt_logprobs is not None:
            decoder = self.tokenizer.incremental_decoder(
                [], skip_special_tokens=self._skips_special(prompt)
            )
            offsets = Offsets(decoder, 0)
            columns = prompt_columns(
                prompt_logprobs, prompt_ids, self._name, offsets, self.logprobs
            )
        choice = CompletionChoice(0, self._echo(prompt, prompt_ids), columns, None, None)
        if self.token_ids:
            choice.token_ids = []
            choice.prompt_token_ids = list(prompt_ids)
        if self.prompt_logprobs is not None and prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs_reply(
                prompt_logprobs, prompt_ids, self.tokenizer, num_top=self.prompt_logprobs
            )
        return choice

    def piece(self, index: int, piece: Chunk | Output, offsets: Offsets) -> CompletionChoice:
        """Return a choice that holds an output, or a piece of it."""
        columns = None
        if self.logprobs is not None and piece.logprobs is not None:
            columns = output_columns(piece.logprobs, self._name, offsets, self.num_top)
        matched = None
        if piece.finish_reason == "stop":
            matched = matched_stop(piece.stop_reason, piece.token_ids, self.eos_token_ids)
        return CompletionChoice(
            index,
            piece.text,
            columns,
            piece.finish_reason,
            piece.stop_reason,
            matched,
            token_ids=list(piece.token_ids) if self.token_ids else UNSET,
            cumulative_logprob=unset_if_none(piece.beam_logprob),
        )

    def offsets(self, prompt_ids: Sequence[int], opening: CompletionChoice) -> Offsets:
        """Return the positions of an output's tokens, which begin after the opening's text."""
        decoder = self.tokenizer.incremental_decoder(
            prompt_ids,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
        )
        return Offsets(decoder, len(opening.text))

    def _name(self, token_id: int) -> str:
        return token_name(token_id, self.tokenizer, as_id=self.tokens_as_ids)

    def _echo(self, prompt: Prompt, prompt_ids: Sequence[int]) -> str:
        if not self.echo:
            return ""
        if isinstance(prompt, TextPrompt) and not self.truncated:
            return prompt.text
        return self.tokenizer.decode(prompt_ids, skip_special_tokens=self._skips_special(prompt))

    def _skips_special(self, prompt: Prompt) -> bool:
        """Return whether an echo leaves out special tokens; ids of a client's own keep them."""
        return self.skip_special_tokens and not isinstance(prompt, TokensPrompt)


def completion_response(
    completions: Sequence[Completion],
    prompts: Sequence[Prompt],
    wanted: Wanted,
    *,
    id: str,
    model: str,
    created: int,
) -> CompletionResponse:
    """Return the whole answer: ``wanted.n`` choices per prompt, each after its echo."""
    choices: list[CompletionChoice] = []
    for completion, prompt in zip(completions, prompts, strict=True):
        ids = completion.prompt_token_ids
        opening = wanted.opening(prompt, ids, completion.prompt_logprobs)
        for output in _best(completion.outputs, wanted.n):
            piece = wanted.piece(len(choices), output, wanted.offsets(ids, opening))
            choices.append(_joined(opening, piece))
    total = total_usage(completion.usage for completion in completions)
    return CompletionResponse(
        id=id, created=created, model=model, choices=choices, usage=usage_reply(total)
    )


def _best(outputs: Sequence[Output], n: int) -> Sequence[Output]:
    """Return all outputs, or the ``n`` with the highest mean log-probability, the best first."""
    if len(outputs) <= n:
        return outputs
    return sorted(outputs, key=lambda output: output.mean_logprob, reverse=True)[:n]


def _joined(opening: CompletionChoice, piece: CompletionChoice) -> CompletionChoice:
    """Return ``piece`` with the content of ``opening`` before it."""
    piece.text = opening.text + piece.text
    piece.prompt_token_ids = opening.prompt_token_ids or None
    piece.prompt_logprobs = opening.prompt_logprobs or None
    if opening.logprobs is not None and piece.logprobs is not None:
        piece.logprobs = CompletionLogprobs(
            opening.logprobs.text_offset + piece.logprobs.text_offset,
            opening.logprobs.token_logprobs + piece.logprobs.token_logprobs,
            opening.logprobs.tokens + piece.logprobs.tokens,
            opening.logprobs.top_logprobs + piece.logprobs.top_logprobs,
        )
    else:
        piece.logprobs = piece.logprobs or opening.logprobs
    return piece


@attrs.define(eq=False, kw_only=True)
class CompletionWriter(OpenAIWriter):
    """Events of a streamed completion. A choice begins with the opening of its prompt."""

    prompts: Sequence[Prompt]
    wanted: Wanted
    _openings: dict[int, CompletionChoice] = attrs.field(factory=dict, init=False)
    """Openings by the prompt's number."""
    _offsets: dict[int, Offsets] = attrs.field(factory=dict, init=False)
    """Positions of the choices that have begun."""

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """Return a chunk's event; empty if a step added no text yet and nothing else."""
        choice = index * self.wanted.n + chunk.index
        if index == 0 and (event := self.text(chunk)) is not None:
            return event
        opening = b""
        if choice not in self._offsets:
            opening = self._begin(index, choice)
        if says_nothing(chunk, token_ids=self.wanted.token_ids):
            return opening
        return opening + self._event([self.wanted.piece(choice, chunk, self._offsets[choice])])

    def _begin(self, index: int, choice: int) -> bytes:
        stream = self._streams[index]
        ids = stream.prompt_token_ids
        opening = self._openings.get(index)
        if opening is None:
            opening = self.wanted.opening(self.prompts[index], ids, stream.prompt_logprobs)
            self._openings[index] = opening
        self._offsets[choice] = self.wanted.offsets(ids, opening)
        if not self.wanted.token_ids and not self.continuous_usage:
            self._text_events[choice] = TextEvent.of(
                lambda text: self._event([CompletionChoice(choice, text, None, None, None)])
            )
        if not self.wanted.echo and not self.wanted.token_ids:
            return b""
        return self._event([msgspec.structs.replace(opening, index=choice)])

    def _response(
        self, choices: list[CompletionChoice], usage: UsageReply | UnsetType | None
    ) -> CompletionResponse:
        return CompletionResponse(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )
