"""Inputs of pooling: texts, pairs of texts or token ids, one or a list of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import attrs
import trio

from trioserve.model_files import EncoderConfig
from trioserve.protocol.errors import ContextTooLong, InvalidRequest
from trioserve.requests.prompts import TokensPrompt
from trioserve.text.encoder_tokenizer import EncodedText, EncoderTokenizer

Pair = tuple[str, str]
Item = str | Pair | TokensPrompt
"""A text, a pair of texts, or token ids."""
Inputs = str | Sequence[int | str | Pair | Sequence[int | str] | TokensPrompt]
"""One item, where ids may be a plain list of them, or several. A pair in a list may be a list, too.
"""

INLINE_CHARACTERS = 2000
"""Characters that are encoded at once, because a thread would take longer; see
:mod:`trioserve.text.tokenizer_task`.
"""
MAX_THREADS = 2


def as_items(inputs: Inputs, param: str = "input") -> list[Item]:
    """Return the items of ``inputs``, one or several.

    Raises:
        InvalidRequest: They are of another kind, or none; ``param`` is their name in the error.
    """
    if isinstance(inputs, str):
        return [inputs]
    if isinstance(inputs, (bytes, bytearray, memoryview)) or not isinstance(inputs, Sequence):
        raise _refusal(param)
    items = list(inputs)
    if not items:
        raise InvalidRequest(f"{param} is empty", param=param)
    ids = _as_ids(items)
    if ids is not None:
        return [TokensPrompt(ids)]
    return [_as_item(item, param) for item in items]


def _as_item(item: object, param: str) -> Item:
    if isinstance(item, (str, TokensPrompt)):
        return item
    match item:
        case [str() as first, str() as second]:
            return first, second
        case [] if not isinstance(item, bytes | bytearray | memoryview):
            raise InvalidRequest(f"{param} holds an empty list of token ids", param=param)
        case [*parts] if (ids := _as_ids(parts)) is not None:
            return TokensPrompt(ids)
    raise _refusal(param)


def _as_ids(values: Sequence[object]) -> list[int] | None:
    """Return ``values`` if they are integers, else None."""
    kinds = set(map(type, values))
    if not all(issubclass(kind, int) and kind is not bool for kind in kinds):
        return None
    return cast(list[int], list(values))


def _refusal(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param} is a text, a list of token ids, or a list of texts or of such lists", param=param
    )


@attrs.define(eq=False)
class TextEncoder:
    """The encoding of items into the ids that an encoder reads.

    Args:
        config: Configuration of the encoder.
        tokenizer: Tokenizer of the encoder.
        max_length: Most tokens that a text or pair may have.
    """

    config: EncoderConfig
    tokenizer: EncoderTokenizer
    max_length: int
    _threads: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(MAX_THREADS))

    async def encode(
        self, items: Sequence[Item], truncate: int | None, param: str = "input"
    ) -> list[EncodedText]:
        """Return the items as the model reads them.

        Args:
            items: At least one.
            truncate: Cut each item to as many tokens, -1 for as many as the model takes; None to
                refuse longer items.
            param: Name of the items in errors.

        Raises:
            ContextTooLong: An item has more tokens than the model takes.
            InvalidRequest: An item can't be encoded.
        """
        keep = self.max_length if truncate in (None, -1) else min(truncate or 1, self.max_length)
        texts = [item for item in items if not isinstance(item, TokensPrompt)]
        num_characters = sum(
            len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts
        )
        try:
            if num_characters <= INLINE_CHARACTERS:
                encoded = self.tokenizer.encode_batch(texts, keep) if texts else []
            else:
                encoded = await trio.to_thread.run_sync(
                    self.tokenizer.encode_batch,
                    texts,
                    keep,
                    limiter=self._threads,
                    abandon_on_cancel=True,
                )
        except InvalidRequest as error:
            raise InvalidRequest(str(error), param=param) from error
        of_texts = iter(encoded)
        results = [
            self._of_ids(item.token_ids, keep, param)
            if isinstance(item, TokensPrompt)
            else next(of_texts)
            for item in items
        ]
        longest = max(each.num_tokens for each in results)
        if truncate is None and longest > self.max_length:
            raise ContextTooLong(
                f"{param} has {longest} tokens: the model takes {self.max_length}; "
                "with truncate_prompt_tokens = -1 the rest is cut off",
                param=param,
            )
        return results

    def _of_ids(self, ids: Sequence[int], keep: int, param: str) -> EncodedText:
        if min(ids) < 0 or max(ids) >= self.config.vocab_size:
            raise InvalidRequest(
                f"{param} holds a token id outside 0 to {self.config.vocab_size - 1}", param=param
            )
        kept = list(ids[:keep])
        return EncodedText(kept, [0] * len(kept), len(ids))
