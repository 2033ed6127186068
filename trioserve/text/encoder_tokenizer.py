"""Tokenizing of texts and text pairs for an encoder, truncated to its maximum length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import tokenizers

from trioserve.model_files.encoder_config import EncoderConfig
from trioserve.model_files.native import panics_raised
from trioserve.protocol.errors import InvalidRequest
from trioserve.text.encoding_errors import reason_of
from trioserve.text.guarded import max_characters, room_to_encode

_GROUP_CHARACTERS = 1 << 18
"""Most characters of a batch of texts; a longer text has its own batch."""


@attrs.frozen
class EncodedText:
    """Token ids of a text or text pair.

    ``type_ids`` has one number for each id: 0 for the first text and 1 for the second, if the model
    distinguishes them.
    """

    ids: list[int]
    type_ids: list[int]
    num_tokens: int
    """Number of tokens before truncation."""


class EncoderTokenizer:
    """The tokenizer of an encoder. It is thread-safe.

    Truncation and padding that the tokenizer's file asks for are switched off.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: EncoderConfig) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.max_length = config.max_length
        self._marks_pairs = config.marks_pairs

    def encode(self, text: str, second: str | None = None) -> EncodedText:
        """Return the ids of ``text``, or of the pair ``text`` and ``second``, with special tokens.

        Ids beyond the model's length are cut off at the end; a pair's longer text is cut first.

        Raises:
            InvalidRequest: A character is invalid, or there are no tokens.
        """
        (encoded,) = self.encode_batch([text if second is None else (text, second)])
        return encoded

    def encode_batch(
        self, inputs: Sequence[str | tuple[str, str]], keep: int | None = None
    ) -> list[EncodedText]:
        """Return the ids of several texts and pairs, in order. Other threads run meanwhile.

        Args:
            inputs: Texts and pairs.
            keep: Most tokens of each; None for the model's length.

        Raises:
            InvalidRequest: One of them is invalid.
        """
        keep = min(keep or self.max_length, self.max_length)
        for item in inputs:
            self._check_length(item)
        encoded: list[EncodedText] = []
        for group in _groups(inputs):
            with room_to_encode(sum(map(_length, group))):
                encoded += self._encode_together(group, keep)
        return encoded

    def _encode_together(
        self, inputs: Sequence[str | tuple[str, str]], keep: int
    ) -> list[EncodedText]:
        texts: list[str] = []
        for item in inputs:
            texts += [item] if isinstance(item, str) else item
        encodings = iter(self._encodings(texts))
        return [
            self._assemble(
                next(encodings), None if isinstance(item, str) else next(encodings), keep
            )
            for item in inputs
        ]

    def _check_length(self, item: str | tuple[str, str]) -> None:
        most = max_characters(self.max_length)
        if _length(item) > most:
            raise InvalidRequest(
                f"a text has {_length(item)} characters; at most {most} are encoded"
            )

    def _encodings(self, texts: list[str]) -> list[tokenizers.Encoding]:
        try:
            with panics_raised():
                return self.backend.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:
            if len(texts) == 1:
                reason = reason_of(texts[0], error)
                raise InvalidRequest(f"the text can't be encoded: {reason}") from error
        # The library doesn't say which text is wrong.
        return [self._encodings([text])[0] for text in texts]

    def _assemble(
        self, first: tokenizers.Encoding, second: tokenizers.Encoding | None, keep: int
    ) -> EncodedText:
        num_added = self.backend.num_special_tokens_to_add(second is not None)
        lengths = len(first), 0 if second is None else len(second)
        if keep < num_added:
            raise InvalidRequest(
                f"{keep} tokens are to be kept, and the tokenizer adds {num_added} by itself"
            )
        kept = longest_first(*lengths, keep - num_added)
        first.truncate(kept[0])
        if second is not None:
            second.truncate(kept[1])
        whole = self.backend.post_process(first, second)
        if not whole.ids:
            raise InvalidRequest("the text has no tokens")
        type_ids = whole.type_ids if self._marks_pairs else [0] * len(whole.ids)
        return EncodedText(whole.ids, type_ids, sum(lengths) + num_added)


def _length(item: str | tuple[str, str]) -> int:
    return len(item) if isinstance(item, str) else sum(map(len, item))


def _groups(
    inputs: Sequence[str | tuple[str, str]],
) -> Iterator[Sequence[str | tuple[str, str]]]:
    start = size = 0
    for place, item in enumerate(inputs):
        size += _length(item)
        if size > _GROUP_CHARACTERS and place > start:
            yield inputs[start:place]
            start, size = place, _length(item)
    if start < len(inputs):
        yield inputs[start:]


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the numbers of tokens to keep of two texts so that at most ``room`` remain.

    The longer text is cut to the length of the other, then both equally. An odd token goes to the
    longer text, or to the second of two equal ones. This is ``longest_first`` of ``tokenizers`` and
    transformers.
    """
    if first + second <= room:
        return first, second
    shorter = min(first, second, room // 2)
    return (shorter, room - shorter) if first <= second else (room - shorter, shorter)
