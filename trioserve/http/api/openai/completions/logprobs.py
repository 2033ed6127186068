"""The log-probabilities of a completion's tokens, column by column."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs

from trioserve.http.api.openai.completions.schemas import CompletionLogprobs
from trioserve.http.api.openai.writer import MIN_LOGPROB
from trioserve.requests.logprobs import PromptLogprobs
from trioserve.requests.stream import TokenLogprob
from trioserve.text.incremental import IncrementalDecoder


@attrs.define(eq=False)
class Offsets:
    """Positions of tokens in a choice's text; a hidden token has its would-be position."""

    _decoder: IncrementalDecoder
    _next: int

    def pass_over(self, token_id: int) -> int:
        """Return the position of the next token, which is ``token_id``."""
        offset = self._next
        self._next += len(self._decoder.push(token_id))
        return offset


def prompt_columns(
    found: PromptLogprobs,
    prompt_ids: Sequence[int],
    name: Callable[[int], str],
    offsets: Offsets,
    num_top: int,
) -> CompletionLogprobs:
    """Return all of a prompt's tokens; the first has no log-probability.

    ``name`` returns a token's name.
    """
    columns = CompletionLogprobs([], [None] * found.start, [], [None] * found.start)
    for token_id in prompt_ids:
        columns.text_offset.append(offsets.pass_over(token_id))
        columns.tokens.append(name(token_id))
    for entry in found.entries(list(prompt_ids)):
        columns.token_logprobs.append(max(entry.logprob, MIN_LOGPROB))
        columns.top_logprobs.append(_top(entry, name, num_top))
    return columns


def output_columns(
    entries: Iterable[TokenLogprob], name: Callable[[int], str], offsets: Offsets, num_top: int
) -> CompletionLogprobs:
    """Return the tokens of an output, or of a piece of it."""
    columns = CompletionLogprobs([], [], [], [])
    for entry in entries:
        columns.text_offset.append(offsets.pass_over(entry.token_id))
        columns.tokens.append(name(entry.token_id))
        columns.token_logprobs.append(max(entry.logprob, MIN_LOGPROB))
        columns.top_logprobs.append(_top(entry, name, num_top))
    return columns


def _top(entry: TokenLogprob, name: Callable[[int], str], num_top: int) -> dict[str, float]:
    """Return the token, the best ones and those asked for; of one name, the most probable."""
    named = {name(entry.token_id): max(entry.logprob, MIN_LOGPROB)}
    for token_id, logprob, _ in (*entry.top[:num_top], *entry.asked):
        text, value = name(token_id), max(logprob, MIN_LOGPROB)
        named[text] = max(value, named.get(text, value))
    return named
