"""The tokenizer: texts, prompts and chats to token ids, and back."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

from trioserve.model_files.native import panics_raised
from trioserve.protocol.errors import ContextTooLong, InvalidRequest
from trioserve.requests.embedded import EmbeddedMedia, EmbeddingsPrompt, SpeechPrompt
from trioserve.requests.embedded_parts import ids_with_marks
from trioserve.requests.prompt_size import characters_of_contents, characters_of_roles
from trioserve.requests.prompts import ChatPrompt, Prompt, TextPrompt, TokensPrompt, embeddings_in
from trioserve.requests.stream import TokenLogprob
from trioserve.text.bounded_encoder import BoundedEncoder, cut
from trioserve.text.chat_template import ChatTemplate
from trioserve.text.incremental import ByteDecoder, IncrementalDecoder, TokenBytes, WindowDecoder
from trioserve.text.template_bounds import BeyondBounds
from trioserve.text.template_processes import TemplateProcesses

MAX_BAD_WORD_CHARACTERS = 8192
"""Most characters of bad words, which are encoded in the event loop: this takes about 4 ms."""


class Tokenizer:
    """A ``tokenizers.Tokenizer`` with the model's chat template.

    Truncation and padding that the tokenizer's file asks for are switched off.
    """

    has_text: bool = True
    """True: tokens stand for text."""

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
        """Token that begins a text, by the model's files; None if they name none."""
        self.eos_token = eos_token
        """Token that ends a text, by the model's files; None if they name none."""
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocab.values(), default=-1)
        """Largest id of the tokenizer plus one; the model's own vocabulary may differ."""
        self.encoder = BoundedEncoder(backend, longest_token=max(map(len, vocab), default=1))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._bytes = TokenBytes.of(backend)
        self._visible_bytes = None if self._bytes is None else self._bytes.hiding(self.special_ids)
        self._texts: dict[int, str] = {}
        self.templates = TemplateProcesses()
        """Processes for slow templates; :class:`~trioserve.text.tokenizer_task.TokenizerTask` runs
        them.
        """

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``: 20 µs for 100 characters, 2 ms for 10,000.

        Raises:
            InvalidRequest: The text can't be encoded, or has more than :attr:`max_characters`.
        """
        return self.encoder.encode(text, add_special_tokens=add_special_tokens)

    def bound(self, max_model_len: int) -> None:
        """Set the limit of a prompt's tokens, which the worker reports when it is ready."""
        self.encoder.max_model_len = max_model_len

    @property
    def max_characters(self) -> int:
        """Most characters of a text that is encoded."""
        return self.encoder.max_characters

    def token_of(self, text: str) -> int | None:
        """Return the id of the token spelled ``text``, special and added ones included."""
        with panics_raised():
            return self.backend.token_to_id(text)

    def name_of(self, id: int) -> str:
        """Return the token ``id`` as the vocabulary spells it; empty for an unknown id."""
        with panics_raised():
            return self.backend.id_to_token(id) or ""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids`` as a whole."""
        with panics_raised():
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def incremental_decoder(
        self,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> IncrementalDecoder:
        """Return a decoder of an output's text, token by token, after ``prompt_ids``.

        ``spaces_between_special_tokens`` matters only for tokenizers that put a space between any
        two tokens. If it is False, there is none between special tokens.
        """
        table = self._visible_bytes if skip_special_tokens else self._bytes
        if table is not None:
            return ByteDecoder.after(prompt_ids, table)
        hidden = self.special_ids if skip_special_tokens else frozenset[int]()
        unspaced = frozenset[int]() if spaces_between_special_tokens else self.special_ids
        return WindowDecoder.after(prompt_ids, self._decode_with_special, hidden, unspaced)

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes that a token adds to a text: a special token's name, none for an
        unknown id.
        """
        if self._bytes is not None:
            return self._bytes[id]
        return self._decode_with_special((id,)).encode()

    def token_text(self, id: int) -> str:
        """Return a token as text: special tokens by name, U+FFFD for a part of a character."""
        text = self._texts.get(id)
        if text is None:
            text = self._texts[id] = self.token_bytes(id).decode("utf-8", "replace")
        return text

    def with_texts(self, entry: TokenLogprob) -> TokenLogprob:
        """Return ``entry`` with the text of each token from :meth:`token_text`."""
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
        """Return the ids of a prompt at once. The tokenizer's task gives the same ids.

        Args:
            prompt: Text, token ids, a chat or embeddings, which have placeholders as ids.
            keep: Most tokens, those that the tokenizer adds included; None for all.
            cut_side: Side on which a longer prompt is cut, ``left`` or ``right``. Special tokens
                that the tokenizer adds stay.

        Raises:
            ContextTooLong: The prompt is certainly longer than the model allows.
            InvalidRequest: The prompt is empty or malformed, has unknown ids, or is a chat and
                there is no template.
            BeyondBounds: The prompt is a chat that must be rendered in another process.
        """
        if isinstance(prompt, TokensPrompt):
            ids = self._checked(prompt)
            return ids if keep is None else cut(ids, keep, cut_side)
        if isinstance(prompt, EmbeddingsPrompt | SpeechPrompt):
            return prompt.marks(0)
        text, add_special_tokens = self.text_of(prompt)
        if isinstance(prompt, ChatPrompt):
            return self.ids_of_chat(text, prompt, keep, cut_side)
        return self.ids_of(text, add_special_tokens, keep, cut_side, "prompt")

    def ids_of_chat(
        self,
        text: str,
        prompt: ChatPrompt,
        keep: int | None,
        cut_side: str,
        media: Sequence[EmbeddedMedia] = (),
    ) -> list[int]:
        """Return the ids of a rendered chat; see :meth:`prompt_ids`. Other parts have marks."""
        if not prompt.others:
            return self.ids_of(text, False, keep, cut_side, "messages")
        return self._ids_with_marks(text, prompt.others.embedded, media, "messages")

    def ids_of_text(self, prompt: TextPrompt, media: Sequence[EmbeddedMedia]) -> list[int]:
        """Return the ids of a text with marks of ``media``; see :meth:`prompt_ids`."""
        special = self.encode("", add_special_tokens=True) if prompt.add_special_tokens else []
        return special + self._ids_with_marks(prompt.text, (), media, "prompt")

    def _ids_with_marks(
        self,
        text: str,
        embedded: Sequence[EmbeddingsPrompt],
        media: Sequence[EmbeddedMedia],
        param: str,
    ) -> list[int]:
        return ids_with_marks(
            text,
            embedded,
            media,
            {each.kind: each.token or self.name_of(each.placeholder) for each in media},
            lambda part: self.ids_of(part, False, None, "", param),
            param,
        )

    def ids_of(
        self, text: str, add_special_tokens: bool, keep: int | None, cut_side: str, param: str
    ) -> list[int]:
        """Return the ids of ``text``; see :meth:`prompt_ids`."""
        try:
            if keep is None:
                self.encoder.check_length(text, param)
                ids = self.encode(text, add_special_tokens=add_special_tokens)
            else:
                ids = self.encoder.encode_part(text, keep, cut_side, add_special_tokens)
        except ContextTooLong:
            raise
        except InvalidRequest as error:
            raise InvalidRequest(str(error), param=param) from error
        if not ids:
            raise InvalidRequest("the prompt has no tokens", param=param)
        return ids

    def bad_word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token sequences of ``words``, which a sampler avoids.

        Each word comes twice: at the start of a text, and after a space. The second form is left
        out if it begins with the same token or has another number of tokens, because then it isn't
        the word within a text. (The rule is vLLM's.) Leading spaces of a word are ignored.

        Raises:
            InvalidRequest: A word has no tokens or can't be encoded, or all are too long together.
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
            except InvalidRequest as error:
                raise InvalidRequest(
                    f"a word in bad_words: {error}",
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

    async def render(self, prompt: ChatPrompt) -> str:
        """Return the text of a chat before it is encoded, special tokens included.

        Raises:
            InvalidRequest: There is no chat template, or it refuses the messages, or takes too long
                or too much memory.
            EngineError: The engine is closed.
        """
        try:
            return self._template().render_within_bounds(prompt)
        except BeyondBounds:
            return await self.render_in_process(prompt)

    async def render_in_process(self, prompt: ChatPrompt, *, is_cut: bool = False) -> str:
        """Return the text of a chat, rendered in a process.

        Raises:
            ContextTooLong: The text is too long for the model, and ``is_cut`` is False.
            InvalidRequest: As for :meth:`render`.
            EngineError: The engine is closed.
        """
        if not is_cut:
            characters = characters_of_contents(prompt) + characters_of_roles(prompt)
            self.encoder.check_characters(characters, "messages")
        return await self.templates.render(self._template(), prompt)

    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise InvalidRequest(
                "the model has no chat template; give it one with --chat-template",
                param="messages",
            )
        return self.chat_template

    def fewest_tokens(self, prompt: Prompt) -> int:
        """Return a lower bound of the number of tokens of ``prompt``, without encoding it.

        A token has at most as many characters as the longest one, and a normalizer merges at most a
        few characters into one.
        """
        if isinstance(prompt, TokensPrompt):
            return len(prompt.token_ids)
        embedded = sum(map(len, embeddings_in(prompt)))
        return embedded + characters_of_contents(prompt) // self.encoder.characters_per_token

    def _decode_with_special(self, ids: Sequence[int]) -> str:
        with panics_raised():
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

    def text_of(self, prompt: TextPrompt | ChatPrompt) -> tuple[str, bool]:
        """Return the text to encode, and True if the tokenizer adds its special tokens."""
        if isinstance(prompt, TextPrompt):
            return prompt.text, prompt.add_special_tokens
        # A template writes the special tokens itself.
        return self._template().render_within_bounds(prompt), False


def param_of(prompt: Prompt) -> str:
    """Return the name of the request's field that holds ``prompt``."""
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"
