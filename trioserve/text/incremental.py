"""Incremental detokenization, one token at a time, without I/O or tasks.

The rule
--------
The joined pieces of text equal the text after the prompt when prompt and output are decoded at
once. A piece is returned as soon as no later token can change it. Each decoder does constant work
per token.

Where characters end
--------------------
A token is a piece of a byte string, and a character may be spread over several tokens (emoji, CJK,
Hangul; every character of a byte-fallback run). Nearly every model has byte-level BPE or
SentencePiece with byte fallback, where a token adds the same bytes at any position. So
:class:`TokenBytes` looks the bytes up, and :class:`ByteDecoder` holds back at most the three bytes
that may be the start of a character. Invalid bytes become U+FFFD as soon as that is
certain, one for each maximal part of a character, as in Rust and Python.

A whole decode by ``tokenizers`` differs in one case: one bad byte in a byte-fallback run turns the
*whole* run into U+FFFD, its good characters included. These may have been sent already, so only the
bad bytes are replaced here. (DecodeStream of ``tokenizers`` raises on such runs, decodes all
pending tokens again with each token, returns the whole prompt if that ends within a character, and
can't be flushed.)

:class:`WindowDecoder` is for all other tokenizers (WordPiece, word level, Metaspace alone). It
decodes a few delivered tokens and the new one together.

Where the prompt ends
---------------------
Some decoders drop a space at the start of a text. An output is at the start if the prompt has no
text, so a decoder also takes the prompt's ids. A prompt given as ids may end within a character.
If the output completes the character, the character belongs to the output, otherwise to the prompt.
Nothing else of the prompt is returned.
"""

from __future__ import annotations

import json
from codecs import utf_8_decode
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import attrs
import tokenizers

from trioserve.model_files.native import panics_raised

_REPLACEMENT = "\ufffd"
_LONGEST_UNFINISHED_BYTES = 3


class IncrementalDecoder(Protocol):
    """Decoder of tokens into text, one at a time."""

    def push(self, token_id: int) -> str:
        """Return the text that no later token can change; often this token's, sometimes empty."""

    def flush(self) -> str:
        """Return the pending text, with U+FFFD for an incomplete character. No push may follow."""


class TokenBytes(dict[int, bytes]):
    """The bytes that each token adds to a text, filled on demand.

    With ``strips_first_space``, one space at the start of a text is dropped. Ids that the tokenizer
    doesn't know add nothing; a model's vocabulary may be padded.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        to_bytes: Callable[[str], bytes],
        *,
        strips_first_space: bool,
        hidden: Collection[int] = (),
    ) -> None:
        super().__init__()
        self._backend = backend
        self._to_bytes = to_bytes
        self.strips_first_space = strips_first_space
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        with panics_raised():
            token = None if token_id in self._hidden else self._backend.id_to_token(token_id)
        data = b"" if token is None else self._to_bytes(token)
        self[token_id] = data
        return data

    def hiding(self, token_ids: Collection[int]) -> TokenBytes:
        """Return a copy of the table in which ``token_ids`` add nothing."""
        return TokenBytes(
            self._backend,
            self._to_bytes,
            strips_first_space=self.strips_first_space,
            hidden=token_ids,
        )

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> TokenBytes | None:
        """Return the table of ``backend``, or None if a token's text depends on its neighbours."""
        steps = _decoder_steps(backend)
        if [step["type"] for step in steps] == ["ByteLevel"]:
            return cls(backend, _byte_level_bytes, strips_first_space=False)
        if steps[:3] == _SENTENCEPIECE_STEPS and steps[3:] in ([], [_STRIP_FIRST_SPACE]):
            return cls(backend, _sentencepiece_bytes, strips_first_space=len(steps) == 4)
        return None


_SENTENCEPIECE_STEPS: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP_FIRST_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    description = json.loads(backend.decoder.__getstate__())
    steps = description["decoders"] if description["type"] == "Sequence" else [description]
    return list(steps)


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's map of characters to bytes; printable ones map to themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + position): byte for position, byte in enumerate(others)})
    return alphabet


_BYTE_LEVEL = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_LEVEL[character] for character in token])
    except KeyError:  # An added token is plain text.
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode()


class NoText:
    """Decoder that returns only empty texts."""

    def push(self, token_id: int) -> str:
        """Return an empty text."""
        return ""

    def flush(self) -> str:
        """Return an empty text."""
        return ""


@attrs.define(eq=False)
class ByteDecoder:
    """Decoder by a table of bytes. It holds back at most three bytes."""

    table: TokenBytes
    _pending: bytes
    _at_start: bool
    """True while there was no text, so a first space may have to be dropped."""
    _started: bool = False

    @classmethod
    def after(cls, prompt_ids: Sequence[int], table: TokenBytes) -> ByteDecoder:
        """Return a decoder for tokens after ``prompt_ids``."""
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = table[token_id] + tail
            if len(tail) >= _LONGEST_UNFINISHED_BYTES:
                break
        _, used = utf_8_decode(tail, "replace", False)
        return cls(table, tail[used:], table.strips_first_space and not tail)

    def push(self, token_id: int) -> str:
        """Return the text that no later token can change."""
        data = self.table[token_id]
        if not data:
            return ""
        if not self._started:
            data = self._start(data)
        if self._pending:
            data = self._pending + data
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        """Return U+FFFD if the output ends within a character, else an empty text."""
        return self._pending.decode("utf-8", "replace") if self._started else ""

    def _start(self, data: bytes) -> bytes:
        self._started = True
        if self._at_start and data.startswith(b" "):
            return data[1:]
        if not _may_be_character(self._pending + data[:1]):
            self._pending = b""  # The output doesn't continue the prompt's last character.
        return data


def _may_be_character(data: bytes) -> bool:
    """Return True if ``data`` is a character or the beginning of one."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        # utf_8_decode would take halves of surrogates for beginnings.
        return error.start == 0 and error.reason == "unexpected end of data"
    return True


@attrs.define(eq=False)
class WindowDecoder:
    """Decoder that decodes a short window of tokens again for each new token.

    It is for tokenizers where a token's text depends on its neighbours. The window has some
    delivered tokens, so that no token is decoded as the first of a text, and the undelivered ones.
    Text that ends in U+FFFD may still change, so it is held back, but for at most ``MAX_PENDING``
    tokens: the vocabulary may have a real U+FFFD.
    """

    MAX_PENDING = 8
    CONTEXT = 8

    _decode: Callable[[Sequence[int]], str]
    _hidden: Collection[int]
    _window: list[int]
    _num_delivered: int
    """Number of delivered tokens at the beginning of the window."""
    _delivered_text: str
    _unspaced: Collection[int] = ()
    _last: int | None = None
    """Last token pushed; None if it was hidden."""

    @classmethod
    def after(
        cls,
        prompt_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        hidden: Collection[int] = (),
        unspaced: Collection[int] = (),
    ) -> WindowDecoder:
        """Return a decoder for tokens after ``prompt_ids``; ``decode`` decodes a list of ids.

        Tokens in ``hidden`` add nothing. Between two adjacent output tokens in ``unspaced``, the
        decoder's space is left out.
        """
        context: list[int] = []
        for token_id in reversed(prompt_ids):
            if len(context) == cls.CONTEXT:
                break
            if token_id not in hidden:
                context.append(token_id)
        context.reverse()
        return cls(decode, hidden, context, len(context), decode(context), unspaced)

    def push(self, token_id: int) -> str:
        """Return the text that no later token can change."""
        if token_id in self._hidden:
            return ""
        joins = token_id in self._unspaced and self._last in self._unspaced
        self._last = token_id
        self._window.append(token_id)
        text = self._decode(self._window)
        num_pending = len(self._window) - self._num_delivered
        unfinished = text.endswith(_REPLACEMENT) or len(text) <= len(self._delivered_text)
        if unfinished and num_pending < self.MAX_PENDING:
            return ""
        new = self._deliver(text)
        return new.removeprefix(" ") if joins else new

    def flush(self) -> str:
        """Return the pending text."""
        return self._deliver(self._decode(self._window))

    def _deliver(self, text: str) -> str:
        new = text[len(self._delivered_text) :]
        self._window = self._window[self._num_delivered :]
        self._num_delivered = len(self._window)
        self._delivered_text = self._decode(self._window)
        return new
