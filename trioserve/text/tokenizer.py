"""The tokenizer, and the task that turns prompts into token ids.

The task takes every request that waits, then prepares them together. Encoding costs about a fifth
of a millisecond for 1,000 characters, and ``encode_batch_fast`` lets other threads run meanwhile;
a thread costs 60 µs by itself, and milliseconds when the loop is busy. So short prompts are
encoded on the spot, as many as ``INLINE_CHARACTERS`` allow of those that were taken together;
short ones beyond that share a thread, and each long prompt has one to itself. Threads belong to
children of the task: a long prompt holds nobody up. Those that share a thread are encoded as a
batch, which ``tokenizers`` spreads over the cores (``python -m bench.tokenizing`` measures it).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TypeVar

import tokenizers
import trio

from trioserve.channels import all_waiting, pass_on
from trioserve.errors import InvalidRequest, QueueFull
from trioserve.request import ChatPrompt, Prompt, Request, State, TextPrompt, TokensPrompt
from trioserve.stream import TokenLogprob
from trioserve.text.chat_template import ChatTemplate
from trioserve.text.encoding_errors import reason_of
from trioserve.text.incremental import ByteDecoder, IncrementalDecoder, TokenBytes, WindowDecoder
from trioserve.text.prompt_size import characters_of, characters_of_contents

__all__ = ["Tokenizer"]

INLINE_CHARACTERS = 2000
BATCH_CHARACTERS = 100_000
"""About 20 ms on one core: those who wait together have their tokens no later than that."""
MAX_THREADS = 2
"""Few, because a batch is spread over the cores anyway, and the worker wants them too."""
_MOST_CHARACTERS_MADE_ONE = 4
MAX_BAD_WORD_CHARACTERS = 8192
"""They are encoded on the spot, when a request comes in: about 4 ms."""

IdsOrError = list[int] | InvalidRequest


class Tokenizer:
    """A ``tokenizers.Tokenizer`` with the model's chat template, and the task that runs them.

    Truncation and padding that the tokenizer's file asks for are switched off.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: ChatTemplate | None = None,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.chat_template = chat_template
        self.bos_token = bos_token
        """What the model's files name as what a text begins with, None for nothing."""
        self.eos_token = eos_token
        """What they name as a text's end."""
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocab.values(), default=-1)
        """One more than the largest id that the tokenizer knows; the model's own may differ."""
        self._longest_token = max(map(len, vocab), default=1)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._bytes = TokenBytes.of(backend)
        self._visible_bytes = None if self._bytes is None else self._bytes.hiding(self.special_ids)
        self._texts: dict[int, str] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of ``text``: 20 µs for 100 characters, 2 ms for 10,000."""
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def token_of(self, text: str) -> int | None:
        """The id of the token that is spelled ``text``, a special or added one too."""
        return self.backend.token_to_id(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids`` as a whole."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def incremental_decoder(
        self,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> IncrementalDecoder:
        """What gives the text of an output, token by token, after ``prompt_ids``.

        Only decoders that put a space between any two tokens put one between special ones, unless
        ``spaces_between_special_tokens`` is false.
        """
        table = self._visible_bytes if skip_special_tokens else self._bytes
        if table is not None:
            return ByteDecoder.after(prompt_ids, table)
        hidden = self.special_ids if skip_special_tokens else frozenset[int]()
        unspaced = frozenset[int]() if spaces_between_special_tokens else self.special_ids
        return WindowDecoder.after(prompt_ids, self._decode_with_special, hidden, unspaced)

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token adds to a text; a special token's name, none for an unknown id."""
        if self._bytes is not None:
            return self._bytes[id]
        return self._decode_with_special((id,)).encode()

    def token_text(self, id: int) -> str:
        """A token as text, special tokens by name, U+FFFD for a part of a character."""
        text = self._texts.get(id)
        if text is None:
            text = self._texts[id] = self.token_bytes(id).decode("utf-8", "replace")
        return text

    def with_texts(self, entry: TokenLogprob) -> TokenLogprob:
        """The same entry, each of its tokens with :meth:`token_text`."""
        text = self.token_text
        return TokenLogprob(
            entry.token_id,
            entry.logprob,
            text(entry.token_id),
            tuple((token_id, logprob, text(token_id)) for token_id, logprob, _ in entry.top),
            tuple((token_id, logprob, text(token_id)) for token_id, logprob, _ in entry.asked),
            entry.rank,
        )

    def prompt_ids(
        self, prompt: Prompt, *, keep: int | None = None, cut_side: str = "left"
    ) -> list[int]:
        """The ids of a prompt of any kind, on the spot. The task gives the same.

        Args:
            prompt: text, token ids or a chat.
            keep: the most tokens, those that the tokenizer adds included; None for all.
            cut_side: where to cut off what is too much, ``left`` or ``right``. Special tokens that
                the tokenizer adds stay.

        Raises:
            InvalidRequest: the prompt is empty or malformed, has ids that the tokenizer doesn't
                know, or is a chat and there is no template.
        """
        if isinstance(prompt, TokensPrompt):
            ids = self._checked(prompt)
            return ids if keep is None else _cut(ids, keep, cut_side)
        text, add_special_tokens = self._text(prompt)
        try:
            if keep is None:
                ids = self.encode(text, add_special_tokens=add_special_tokens)
            else:
                ids = self._encode_part(text, keep, cut_side, add_special_tokens)
        except Exception as error:
            # ``tokenizers`` raises plain Exceptions and TypeErrors, for lone surrogates too.
            raise InvalidRequest(
                f"the text can't be encoded: {reason_of(text, error)}", param=_param(prompt)
            ) from error
        if not ids:
            raise InvalidRequest("the prompt has no tokens", param=_param(prompt))
        return ids

    def bad_word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """The token sequences that stand for ``words``, which a sampler is to keep out.

        Each word comes twice, as it begins a text and as it follows a space. The second is left out
        where it begins with the same token or has another number of tokens: there it isn't the same
        word's spelling within a text. (The rule is vLLM's.) Leading spaces of a word don't count.

        Raises:
            InvalidRequest: a word has no tokens, can't be encoded, or all are too long together.
        """
        total = sum(map(len, words))
        if total > MAX_BAD_WORD_CHARACTERS:
            raise InvalidRequest(
                f"bad_words must have at most {MAX_BAD_WORD_CHARACTERS} characters together, "
                f"got {total}",
                param="bad_words",
            )
        spellings: list[list[int]] = []
        for word in words:
            bare = word.lstrip()
            try:
                plain = self.encode(bare, add_special_tokens=False)
                spaced = self.encode(f" {bare}", add_special_tokens=False)
            except Exception as error:
                raise InvalidRequest(
                    f"a word in bad_words can't be encoded: {reason_of(bare, error)}",
                    param="bad_words",
                ) from error
            if not plain:
                raise InvalidRequest(
                    f"bad_words must hold words of at least one token, got {word!r}",
                    param="bad_words",
                )
            spellings.append(plain)
            if spaced[0] != plain[0] and len(spaced) == len(plain):
                spellings.append(spaced)
        return spellings

    def render(self, prompt: ChatPrompt) -> str:
        """The text that a chat becomes before it is encoded, special tokens written out.

        Raises:
            InvalidRequest: there is no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise InvalidRequest(
                "the model has no chat template; give it one with --chat-template",
                param="messages",
            )
        return self.chat_template.render(prompt)

    def fewest_tokens(self, prompt: Prompt) -> int:
        """A number of tokens that ``prompt`` has at least, known without encoding it.

        A token stands for at most as many characters as it is long, and a normalizer makes at most
        a few characters one.
        """
        if isinstance(prompt, TokensPrompt):
            return len(prompt.token_ids)
        return characters_of_contents(prompt) // (_MOST_CHARACTERS_MADE_ONE * self._longest_token)

    def _encode_part(
        self, text: str, keep: int, cut_side: str, add_special_tokens: bool
    ) -> list[int]:
        """The first or last ``keep`` ids of ``text``, as the tokenizer's own truncation gives them.

        No more of the text is encoded than so many tokens can stand for. Usually that is a hundred
        times as much as they do stand for, so what the cut makes of a word doesn't show.
        """
        text = _cut(text, (keep + 1) * _MOST_CHARACTERS_MADE_ONE * self._longest_token, cut_side)
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=False)
        if not add_special_tokens:
            return _cut(encoding.ids, keep, cut_side)
        num_added = self.backend.num_special_tokens_to_add(False)
        encoding.truncate(max(keep - num_added, 0), direction=cut_side)
        return self.backend.post_process(encoding).ids[:keep]

    def _decode_with_special(self, ids: Sequence[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=False)

    def _checked(self, prompt: TokensPrompt) -> list[int]:
        if not prompt.token_ids:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        for id in (min(prompt.token_ids), max(prompt.token_ids)):
            if not 0 <= id < self.vocab_size:
                raise InvalidRequest(
                    f"token id {id} is not in the vocabulary of {self.vocab_size}", param="prompt"
                )
        return list(prompt.token_ids)

    def _text(self, prompt: TextPrompt | ChatPrompt) -> tuple[str, bool]:
        """The text to encode, and whether the tokenizer is to add its special tokens to it."""
        if isinstance(prompt, TextPrompt):
            return prompt.text, prompt.add_special_tokens
        return self.render(prompt), False  # a template writes them itself

    async def run(
        self,
        requests: trio.MemoryReceiveChannel[Request],
        submit: trio.MemorySendChannel[Request],
    ) -> None:
        """The task: set ``prompt_ids`` of each request and send it on, or reject it.

        Ends when ``requests`` is closed and everything was sent on, and then closes ``submit``.
        When it is cancelled it ends at once; threads are left behind, and what they find is
        dropped.
        """
        limiter = trio.CapacityLimiter(MAX_THREADS)
        async with submit, trio.open_nursery() as nursery:
            async for first in requests:
                waiting = [first, *all_waiting(requests)]
                here, groups = _sort([request for request in waiting if _start(request)])
                for group in groups:
                    nursery.start_soon(self._prepare_in_thread, group, submit, limiter)
                for request in here:
                    await _hand_on(request, self._ids_or_error(request), submit)

    async def _prepare_in_thread(
        self,
        requests: list[Request],
        submit: trio.MemorySendChannel[Request],
        limiter: trio.CapacityLimiter,
    ) -> None:
        async with limiter:
            wanted = [request for request in requests if not request.ended]
            results = await trio.to_thread.run_sync(
                self._all_ids_or_errors, wanted, abandon_on_cancel=True
            )
        for request, result in zip(wanted, results, strict=True):
            await _hand_on(request, result, submit)

    def _all_ids_or_errors(self, requests: Sequence[Request]) -> list[IdsOrError]:
        together = self._ids_of_batch(requests) if len(requests) > 1 else {}
        return [together.get(request) or self._ids_or_error(request) for request in requests]

    def _ids_of_batch(self, requests: Sequence[Request]) -> dict[Request, list[int]]:
        """The ids of those that can be encoded in one go, which the library spreads over the cores.

        What is to be cut, and what is refused, isn't among them.
        """
        texts: dict[bool, dict[Request, str]] = {False: {}, True: {}}
        for request in requests:
            if request.max_prompt_tokens is None and not isinstance(request.prompt, TokensPrompt):
                with contextlib.suppress(InvalidRequest):
                    text, add_special_tokens = self._text(request.prompt)
                    texts[add_special_tokens][request] = text
        found: dict[Request, list[int]] = {}
        for add_special_tokens, own in texts.items():
            with contextlib.suppress(Exception):  # It is one text's, and nobody says which.
                encodings = self.backend.encode_batch_fast(
                    list(own.values()), add_special_tokens=add_special_tokens
                )
                ids = [encoding.ids for encoding in encodings]
                found.update(zip(own, ids, strict=True))
        return found

    def _ids_or_error(self, request: Request) -> IdsOrError:
        keep, side = request.max_prompt_tokens, request.params.truncation_side
        try:
            return self.prompt_ids(request.prompt, keep=keep, cut_side=side)
        except InvalidRequest as error:
            return error


_Cuttable = TypeVar("_Cuttable", str, list[int])


def _cut(whole: _Cuttable, keep: int, side: str) -> _Cuttable:
    """``keep`` items of ``whole``, cut off on the left or on the right."""
    return whole[:keep] if side == "right" else whole[max(len(whole) - keep, 0) :]


def _param(prompt: Prompt) -> str:
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def _start(request: Request) -> bool:
    """Mark the request as being tokenized; False if it has ended already."""
    for sequence in request.sequences:
        if sequence.state is State.CREATED:
            sequence.move_to(State.TOKENIZING)
    return not request.ended


async def _hand_on(
    request: Request, result: IdsOrError, submit: trio.MemorySendChannel[Request]
) -> None:
    if request.ended:
        return
    if isinstance(result, InvalidRequest):
        request.reject(result)
        return
    try:
        request.tokenized(result)
    except QueueFull as error:
        request.reject(error)
        return
    await pass_on(submit, request)


def _sort(requests: list[Request]) -> tuple[list[Request], list[list[Request]]]:
    """Which requests to prepare on the spot, and groups that are to share a thread each."""
    here: list[Request] = []
    together: list[Request] = []
    alone: list[list[Request]] = []
    room = INLINE_CHARACTERS
    for request in requests:
        weight = characters_of(request.prompt)
        if weight <= room:
            room -= weight
            here.append(request)
        elif weight <= INLINE_CHARACTERS:
            together.append(request)
        else:
            alone.append([request])
    return here, [*_batches(together), *alone]


def _batches(requests: list[Request]) -> list[list[Request]]:
    """``requests`` in parts that take no longer than a few of them should wait for the others."""
    batches: list[list[Request]] = []
    room = 0
    for request in requests:
        weight = characters_of(request.prompt)
        if weight > room:
            batches.append([])
            room = BATCH_CHARACTERS
        batches[-1].append(request)
        room -= weight
    return batches
