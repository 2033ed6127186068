"""Positions of tokens in a completion's text, for all kinds of tokenizers."""

from __future__ import annotations

import numpy as np
import pytest

import tests.support.text_tokenizers as text_tokenizers
from trioserve.http.api.openai.completions.writer import Wanted, completion_response
from trioserve.http.api.threads import num_in_entries
from trioserve.protocol import wire
from trioserve.requests.generation import Completion, Output, Usage
from trioserve.requests.logprobs import PromptLogprobs
from trioserve.requests.prompts import TextPrompt, TokensPrompt
from trioserve.requests.stream import TokenLogprob
from trioserve.text.tokenizer import Tokenizer

TEXTS = {
    "byte_level": "The café two words 🌶️ 안녕하세요, <think> again!",
    "byte_fallback": "The stop that é 你 🙂 the stop",
    "words": "one two three stop four",
}


def prompt_logprobs(ids: list[int]) -> PromptLogprobs:
    found = PromptLogprobs(1, 0)
    count = len(ids) - 1
    zeros = np.zeros(count, np.float32).tobytes()
    ranks = np.ones(count, np.int32).tobytes()
    found.add(wire.PromptPiece(slot=0, start=1, logprobs=zeros, ranks=ranks))
    return found


def completion(tokenizer: Tokenizer, prompt_ids: list[int], output_ids: list[int]) -> Completion:
    """Return the engine's completion of a prompt and an output."""
    decoder = tokenizer.incremental_decoder(prompt_ids)
    text = "".join(map(decoder.push, output_ids)) + decoder.flush()
    entries = tuple(TokenLogprob(id, 0.0, tokenizer.token_text(id)) for id in output_ids)
    output = Output(0, text, tuple(output_ids), "length", None, entries)
    usage = Usage(len(prompt_ids), len(output_ids), 0)
    return Completion("id", tuple(prompt_ids), prompt_logprobs(prompt_ids), (output,), usage)


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("as_ids", [False, True])
def test_every_token_begins_where_what_was_before_it_ends(kind: str, as_ids: bool) -> None:
    """Compare positions with a reference that decodes everything before each token from scratch.

    An echo keeps the special tokens of a prompt of token ids, and shows none of a text's.
    """
    tokenizer = Tokenizer(getattr(text_tokenizers, kind)())
    ids = tokenizer.encode(TEXTS[kind])
    for split in range(1, len(ids)):
        prompt_ids, output_ids = ids[:split], ids[split:]
        echo = tokenizer.decode(prompt_ids)
        if echo.endswith("\ufffd"):
            continue  # a text can't end within a character
        prompt = TokensPrompt(tuple(prompt_ids)) if as_ids else TextPrompt(echo)
        (choice,) = completion_response(
            [completion(tokenizer, prompt_ids, output_ids)],
            [prompt],
            Wanted(tokenizer=tokenizer, echo=True, logprobs=0),
            id="id",
            model="model",
            created=0,
        ).choices
        shown = tokenizer.decode(prompt_ids, skip_special_tokens=not as_ids)
        assert choice.text == shown + TEXTS[kind].removeprefix(echo)
        assert choice.logprobs is not None
        for position, offset in enumerate(choice.logprobs.text_offset):
            if position <= split:
                before = tokenizer.decode(ids[:position], skip_special_tokens=not as_ids)
            else:  # an output shows no special tokens
                before = shown + tokenizer.decode(ids[:position]).removeprefix(echo)
            assert choice.text[:offset] == before.rstrip("\ufffd")


def test_hidden_tokens_take_no_room() -> None:
    tokenizer = Tokenizer(text_tokenizers.byte_fallback())
    ids = tokenizer.encode("the stop")
    assert ids[0] in tokenizer.special_ids
    for skip, text, second in ((True, "the stop", 0), (False, "<s> the stop", 3)):
        wanted = Wanted(
            tokenizer=tokenizer, echo=True, logprobs=0, skip_special_tokens=skip, truncated=True
        )
        opening = wanted.opening(TextPrompt("the stop"), ids, prompt_logprobs(ids))
        assert opening.text == text
        assert opening.logprobs is not None
        assert opening.logprobs.text_offset[:2] == [0, second]
        assert opening.logprobs.tokens[0] == "<s>"


def test_what_there_is_to_tell_is_counted_with_named_tokens() -> None:
    entry = TokenLogprob(5, -1.0, "", ((1, -1.0, ""),), ((2, -2.0, ""), (3, -3.0, "")))
    assert num_in_entries([entry, TokenLogprob(6, -1.0, "")]) == 5
    assert num_in_entries(None) == 0
    assert PromptLogprobs(start=1, num_top=2, token_ids=(7, 8)).num_for_each == 5
