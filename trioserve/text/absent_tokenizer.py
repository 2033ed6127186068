"""The tokenizer of a server that skips tokenizing: prompts and outputs are token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import tokenizers
from tokenizers import models

from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.embedded import EmbeddingsPrompt
from trioserve.requests.prompts import ChatPrompt, Prompt, TokensPrompt
from trioserve.text.chat_template import ChatTemplate
from trioserve.text.incremental import IncrementalDecoder, NoText
from trioserve.text.tokenizer import Tokenizer


class AbsentTokenizer(Tokenizer):
    """Tokenizer that knows only the vocabulary's size. Log-probabilities name tokens by id."""

    has_text = False

    def __init__(self, vocab_size: int) -> None:
        super().__init__(tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token="")))
        self.vocab_size = vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> NoReturn:
        """Refuse ``text``."""
        raise _refusal("text")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return an empty text."""
        return ""

    def token_of(self, text: str) -> None:
        """Return None: no token has a spelling."""

    def incremental_decoder(
        self,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> IncrementalDecoder:
        """Return a decoder that gives no text."""
        return NoText()

    def token_bytes(self, id: int) -> bytes:
        """Return no bytes."""
        return b""

    def token_text(self, id: int) -> str:
        """Return the token's id as text, as log-probabilities name it."""
        return f"token_id:{id}"

    def bad_word_ids(self, words: Sequence[str]) -> NoReturn:
        """Refuse bad words."""
        raise _refusal("bad_words")

    def fewest_tokens(self, prompt: Prompt) -> int:
        """Return the number of token ids in ``prompt``; refuse a text."""
        if isinstance(prompt, TokensPrompt):
            return len(prompt.token_ids)
        if isinstance(prompt, EmbeddingsPrompt):
            return len(prompt)
        raise _refusal("messages" if isinstance(prompt, ChatPrompt) else "prompt")

    def _template(self) -> ChatTemplate:
        raise _refusal("messages")


def _refusal(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param}: the server has no tokenizer (--skip-tokenizer-init); give token ids as a prompt",
        param=param,
    )
