"""Encoding in bounded time and memory, of texts that may be far too long."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import tokenizers

from trioserve.protocol.errors import ContextTooLong, InvalidRequest
from trioserve.text.encoding_errors import reason_of
from trioserve.text.guarded import max_characters, room_to_encode

PART_CHARACTERS = 1 << 18
"""Size of the part of a long text that is encoded first, to count its tokens."""
_PART_TOKENS = 256
"""Upper bound of the tokens at a part's end that differ from those of the whole text."""
_MOST_CHARACTERS_MADE_ONE = 4
"""Most characters that a normalizer merges into one."""

_Cuttable = TypeVar("_Cuttable", str, list[int])


def cut(whole: _Cuttable, keep: int, side: str) -> _Cuttable:
    """Return ``keep`` items of ``whole``; ``side`` is where it is cut, ``left`` or ``right``."""
    return whole[:keep] if side == "right" else whole[max(len(whole) - keep, 0) :]


@contextlib.contextmanager
def _encoding(text: str) -> Iterator[None]:
    """Guard a block that encodes ``text``: its errors become :exc:`InvalidRequest`."""
    try:
        with room_to_encode(len(text)):
            yield
    except Exception as error:
        # ``tokenizers`` raises plain Exceptions and TypeErrors, for lone surrogates too.
        raise InvalidRequest(f"the text can't be encoded: {reason_of(text, error)}") from error


class BoundedEncoder:
    """Encoder of prompts, with bounds.

    All methods raise :class:`~trioserve.protocol.errors.InvalidRequest` for a text that can't be
    encoded.

    Args:
        backend: The tokenizer.
        longest_token: Number of characters of its longest token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, longest_token: int) -> None:
        self._backend = backend
        self.characters_per_token = _MOST_CHARACTERS_MADE_ONE * longest_token
        """Most characters of one token."""
        self.max_model_len: int | None = None
        """Most tokens that a prompt may have, where that is known."""

    @property
    def max_characters(self) -> int:
        """Most characters of a text that is encoded."""
        return max_characters(self.max_model_len)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of ``text``.

        Raises:
            InvalidRequest: The text has more than :attr:`max_characters`.
        """
        if len(text) > self.max_characters:
            raise InvalidRequest(
                f"the text has {len(text)} characters; at most {self.max_characters} are encoded"
            )
        with _encoding(text):
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            ids = encoding.ids
            del encoding  # Frees its memory.
            return ids

    def check_characters(self, number: int, param: str) -> None:
        """Refuse a text of at least ``number`` characters if it can't fit the model.

        Raises:
            ContextTooLong: It can't fit.
        """
        if number > self.max_characters:
            raise ContextTooLong(
                f"the prompt has {number} characters, and at most {self.max_characters} are "
                f"encoded: this model's maximum context length is {self.max_model_len} tokens",
                param=param,
            )

    def check_length(self, text: str, param: str) -> None:
        """Refuse a text that can't fit the model, if possible before all of it is encoded.

        Raises:
            ContextTooLong: It can't fit.
        """
        self.check_characters(len(text), param)
        context = self.max_model_len
        maximum = f"this model's maximum context length is {context} tokens"
        size = PART_CHARACTERS
        while context is not None and size < len(text):
            num_tokens = self._num_tokens(text[:size])
            if num_tokens > context + _PART_TOKENS:
                raise ContextTooLong(
                    f"at least {num_tokens - _PART_TOKENS} tokens in the prompt: {maximum}",
                    param=param,
                )
            size *= 4

    def encode_part(
        self, text: str, keep: int, cut_side: str, add_special_tokens: bool
    ) -> list[int]:
        """Return the first or last ``keep`` ids of ``text``, like the tokenizer's own truncation.

        At most as many characters are encoded as ``keep`` tokens can have. Of a long text, a part
        is encoded first, which usually has enough tokens. The ids next to the part's end are
        dropped, because a cut word may have other tokens.
        """
        most = (keep + 1) * self.characters_per_token
        text = cut(text, min(most, max_characters(keep)), cut_side)
        size = PART_CHARACTERS
        while size < len(text):
            part = cut(text, size, cut_side)
            if self._num_tokens(part) > keep + _PART_TOKENS:
                text = part
            size *= 4
        with _encoding(text):
            return self._encode_whole_part(text, keep, cut_side, add_special_tokens)

    def _encode_whole_part(
        self, text: str, keep: int, cut_side: str, add_special_tokens: bool
    ) -> list[int]:
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        if not add_special_tokens:
            return cut(encoding.ids, keep, cut_side)
        num_added = self._backend.num_special_tokens_to_add(False)
        encoding.truncate(max(keep - num_added, 0), direction=cut_side)
        return self._backend.post_process(encoding).ids[:keep]

    def _num_tokens(self, text: str) -> int:
        with _encoding(text):
            return len(self._backend.encode_batch_fast([text], add_special_tokens=False)[0])
