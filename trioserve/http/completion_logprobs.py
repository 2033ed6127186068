"""The log-probabilities of a completion's tokens, column by column."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from trioserve.http.completion_schemas import CompletionLogprobs
from trioserve.http.openai_writer import MIN_LOGPROB, token_name
from trioserve.incremental import IncrementalDecoder
from trioserve.logprobs import PromptLogprobs
from trioserve.stream import TokenLogprob
from trioserve.tokenizer import Tokenizer

__all__ = ["Offsets", "TokenNames", "output_columns", "prompt_columns"]


@attrs.frozen
class TokenNames:
    """How tokens are named: by their text, or as ``token_id:123``."""

    tokenizer: Tokenizer
    as_ids: bool

    def name(self, token_id: int) -> str:
        """A token's name."""
        return token_name(token_id, self.tokenizer, as_id=self.as_ids)

    def top(self, entry: TokenLogprob, num_top: int) -> dict[str, float]:
        """The token, the best ones and those asked for; of two of one name, the more probable."""
        named: dict[str, float] = {}
        entries = [(entry.token_id, entry.logprob, ""), *entry.top[:num_top], *entry.asked]
        for token_id, logprob, _ in entries:
            name = self.name(token_id)
            named[name] = max(logprob, MIN_LOGPROB, named.get(name, MIN_LOGPROB))
        return named


@attrs.define(eq=False)
class Offsets:
    """Where in a choice's text each token's own begins; a hidden token's is where it would be."""

    _decoder: IncrementalDecoder
    _next: int

    def pass_over(self, token_id: int) -> int:
        """The offset of the next token, which is ``token_id``."""
        offset = self._next
        self._next += len(self._decoder.push(token_id))
        return offset


def prompt_columns(
    found: PromptLogprobs,
    prompt_ids: Sequence[int],
    names: TokenNames,
    offsets: Offsets,
    num_top: int,
) -> CompletionLogprobs:
    """All of a prompt's tokens; nothing comes before the first, so it has no log-probability."""
    columns = CompletionLogprobs([], [None] * found.start, [], [None] * found.start)
    for token_id in prompt_ids:
        columns.text_offset.append(offsets.pass_over(token_id))
        columns.tokens.append(names.name(token_id))
    for entry in found.entries(list(prompt_ids)):
        columns.token_logprobs.append(max(entry.logprob, MIN_LOGPROB))
        columns.top_logprobs.append(names.top(entry, num_top))
    return columns


def output_columns(
    entries: Iterable[TokenLogprob], names: TokenNames, offsets: Offsets, num_top: int
) -> CompletionLogprobs:
    """The tokens of an output, or of a piece of it."""
    columns = CompletionLogprobs([], [], [], [])
    for entry in entries:
        columns.text_offset.append(offsets.pass_over(entry.token_id))
        columns.tokens.append(names.name(entry.token_id))
        columns.token_logprobs.append(max(entry.logprob, MIN_LOGPROB))
        columns.top_logprobs.append(names.top(entry, num_top))
    return columns
