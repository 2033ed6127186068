"""The task that turns prompts into token ids.

The task takes all waiting requests and tokenizes them together. Encoding takes about 0.2 ms for
1,000 characters, and ``encode_batch_fast`` lets other threads run meanwhile. A thread costs 60 µs,
or milliseconds when the loop is busy. So short prompts are encoded in the event loop, up to
``INLINE_CHARACTERS`` at a time. Other short ones share a thread, and a long prompt has its own
thread, so that it delays no other. ``tokenizers`` spreads a thread's batch over the cores.

A chat is rendered where it is encoded if that takes bounded time and memory. Otherwise, or if it
has media, a child task has another process render it (:mod:`~trioserve.text.template_processes`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import trio

from trioserve._util.channels import forward, receive_waiting
from trioserve.protocol.errors import EngineError, InvalidRequest, QueueFull
from trioserve.requests.embedded import EmbeddedMedia
from trioserve.requests.embedded_parts import MEDIA_TYPES
from trioserve.requests.media_arguments import NO_ARGUMENTS, MediaArguments
from trioserve.requests.prompt_size import characters_of
from trioserve.requests.prompts import (
    ChatPrompt,
    TextPrompt,
    TokenizedPrompt,
    embeddings_in,
    media_arguments_of,
    media_in,
)
from trioserve.requests.request import Request, State
from trioserve.text.guarded import room_to_encode
from trioserve.text.template_bounds import BeyondBounds
from trioserve.text.tokenizer import Tokenizer, param_of

INLINE_CHARACTERS = 2000
BATCH_CHARACTERS = 100_000
"""Most characters of a batch, about 20 ms on one core. Its requests wait for each other."""
MAX_THREADS = 2
"""Number of threads. It is low, because a batch uses all cores anyway, and the worker needs them,
too.
"""

IdsOrError = list[int] | InvalidRequest | BeyondBounds
PromptOrError = TokenizedPrompt | InvalidRequest | BeyondBounds


class PromptMedia(Protocol):
    """Makes embeddings of the media in prompts."""

    def check(self, arguments: MediaArguments) -> None:
        """Refuse a request's arguments for its media.

        Raises:
            InvalidRequest: The model's processor doesn't take one; ``param`` is the field.
        """

    async def embed(
        self,
        parts: Sequence[tuple[str, Any]],
        arguments: MediaArguments = NO_ARGUMENTS,
        max_tokens: int | None = None,
    ) -> list[EmbeddedMedia]:
        """Return the embeddings of a prompt's media, given their names and parts.

        Raises:
            InvalidRequest: One is refused, or they have more than ``max_tokens``.
            EngineError: They can't be computed.
        """


class TokenizerTask:
    """Task that tokenizes requests with ``tokenizer``, and runs its template processes.

    ``media`` makes the embeddings of media in prompts; None if they aren't served.
    """

    def __init__(self, tokenizer: Tokenizer, media: PromptMedia | None = None) -> None:
        self._tokenizer = tokenizer
        self._media = media

    async def run(
        self,
        requests: trio.MemoryReceiveChannel[Request],
        submit: trio.MemorySendChannel[Request],
    ) -> None:
        """Set ``prompt_ids`` of each request and forward it, or reject it, until ``requests`` is
        closed.

        ``submit`` is closed at the end. Cancelling abandons running threads, and their results are
        dropped.
        """
        limiter = trio.CapacityLimiter(MAX_THREADS)
        async with submit, trio.open_nursery() as owner:
            owner.start_soon(self._tokenizer.templates.run)
            async with trio.open_nursery() as nursery:
                async for first in requests:
                    arrived = [first, *receive_waiting(requests)]
                    started = [each for each in arrived if _start(each) and self._takes(each)]
                    with_media = [request for request in started if media_in(request.prompt)]
                    for request in with_media:
                        nursery.start_soon(self._prepare_alone, request, submit, limiter)
                    here, groups = _sort([each for each in started if each not in with_media])
                    for group in groups:
                        nursery.start_soon(self._prepare_in_thread, group, submit, limiter)
                    for request in here:
                        prompt = self._encode(request, self._ids_or_error(request))
                        if isinstance(prompt, BeyondBounds):
                            nursery.start_soon(self._prepare_alone, request, submit, limiter)
                        else:
                            await _forward(request, prompt, submit)
            owner.cancel_scope.cancel()

    def _takes(self, request: Request) -> bool:
        """Reject a request whose arguments for media can't be served; return True otherwise."""
        arguments = media_arguments_of(request.prompt)
        if not arguments:
            return True
        try:
            if self._media is None:
                raise InvalidRequest(
                    f"{arguments.param} isn't served: this model reads no media, or not with these "
                    "options",
                    param=arguments.param,
                    code="unsupported_parameter",
                )
            self._media.check(arguments)
        except InvalidRequest as error:
            request.reject(error)
            return False
        return True

    async def _prepare_in_thread(
        self,
        requests: list[Request],
        submit: trio.MemorySendChannel[Request],
        limiter: trio.CapacityLimiter,
    ) -> None:
        async with limiter:
            wanted = [request for request in requests if not request.ended]
            results = await trio.to_thread.run_sync(
                self._encode_all, wanted, abandon_on_cancel=True
            )
        async with trio.open_nursery() as nursery:
            for request, prompt in zip(wanted, results, strict=True):
                if isinstance(prompt, BeyondBounds):
                    nursery.start_soon(self._prepare_alone, request, submit, limiter)
                else:
                    await _forward(request, prompt, submit)

    async def _prepare_alone(
        self,
        request: Request,
        submit: trio.MemorySendChannel[Request],
        limiter: trio.CapacityLimiter,
    ) -> None:
        """Have a prompt's media read, render a chat in another process, and encode in a thread."""
        keep, side = request.max_prompt_tokens, request.params.truncation_side
        given = request.prompt
        assert isinstance(given, ChatPrompt | TextPrompt)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when_ended, request, nursery.cancel_scope)
            try:
                media = await self._media_of(given)
                if isinstance(given, TextPrompt):
                    ids_of = functools.partial(self._tokenizer.ids_of_text, given, media)
                else:
                    text = await self._tokenizer.render_in_process(given, is_cut=keep is not None)
                    ids_of = functools.partial(
                        self._tokenizer.ids_of_chat, text, given, keep, side, media
                    )
                prompt = await trio.to_thread.run_sync(
                    lambda: self._encode(request, ids_of(), media),
                    abandon_on_cancel=True,
                    limiter=limiter,
                )
            except (InvalidRequest, EngineError) as error:
                request.reject(error)
            else:
                await _forward(request, prompt, submit)
            nursery.cancel_scope.cancel()

    async def _media_of(self, prompt: ChatPrompt | TextPrompt) -> list[EmbeddedMedia]:
        """Return the embeddings of a prompt's media.

        Raises:
            InvalidRequest: They aren't served, or one is refused.
            EngineError: They can't be computed.
        """
        given = media_in(prompt)
        if not given:
            return []
        if self._media is None:
            name, part = given[0]
            kind = MEDIA_TYPES[part["type"]]
            raise InvalidRequest(
                f"{name}: parts of the kind {kind} aren't served by this model, or not with these "
                "options",
                param=name,
            )
        max_tokens = self._tokenizer.encoder.max_model_len
        return await self._media.embed(given, media_arguments_of(prompt), max_tokens)

    def _encode_all(self, requests: Sequence[Request]) -> list[PromptOrError]:
        together = self._ids_of_batch(requests) if len(requests) > 1 else {}
        return [
            self._encode(request, together.get(request) or self._ids_or_error(request))
            for request in requests
        ]

    def _encode(
        self, request: Request, prompt: IdsOrError, media: Sequence[EmbeddedMedia] = ()
    ) -> PromptOrError:
        """Return the prompt for the scheduler, with the output that it predicts, if any."""
        if not isinstance(prompt, list):
            return prompt
        prediction: list[int] = []
        if text := request.params.prediction:
            try:
                prediction = self._tokenizer.encode(text, add_special_tokens=False)
            except InvalidRequest as error:
                return InvalidRequest(f"prediction: {error}", param="prediction")
        return request.encoded(prompt, prediction, media)

    def _ids_of_batch(self, requests: Sequence[Request]) -> dict[Request, list[int]]:
        """Return the ids of the requests that can be encoded as one batch, on all cores.

        Requests to be truncated or refused aren't among them.
        """
        texts: dict[bool, dict[Request, str]] = {False: {}, True: {}}
        for request in requests:
            if request.max_prompt_tokens is not None or embeddings_in(request.prompt):
                continue
            if isinstance(request.prompt, TextPrompt | ChatPrompt):
                with contextlib.suppress(InvalidRequest, BeyondBounds):
                    text, add_special_tokens = self._tokenizer.text_of(request.prompt)
                    self._tokenizer.encoder.check_length(text, param_of(request.prompt))
                    texts[add_special_tokens][request] = text
        found: dict[Request, list[int]] = {}
        for add_special_tokens, own in texts.items():
            # One text is wrong, and the library doesn't say which.
            with contextlib.suppress(Exception), room_to_encode(sum(map(len, own.values()))):
                encodings = self._tokenizer.backend.encode_batch_fast(
                    list(own.values()), add_special_tokens=add_special_tokens
                )
                ids = [encoding.ids for encoding in encodings]
                found.update(zip(own, ids, strict=True))
        return found

    def _ids_or_error(self, request: Request) -> IdsOrError:
        keep, side = request.max_prompt_tokens, request.params.truncation_side
        try:
            return self._tokenizer.prompt_ids(request.prompt, keep=keep, cut_side=side)
        except (InvalidRequest, BeyondBounds) as error:
            return error


def _start(request: Request) -> bool:
    """Mark the request as being tokenized; return False if it has already ended."""
    for sequence in request.sequences:
        if sequence.state is State.CREATED:
            sequence.move_to(State.TOKENIZING)
    return not request.ended


async def _cancel_when_ended(request: Request, scope: trio.CancelScope) -> None:
    await request.admitted.wait()
    scope.cancel()


async def _forward(
    request: Request,
    prompt: PromptOrError,
    submit: trio.MemorySendChannel[Request],
) -> None:
    if request.ended:
        return
    if not isinstance(prompt, TokenizedPrompt):
        request.reject(prompt)
        return
    try:
        request.tokenized(prompt)
    except QueueFull as error:
        request.reject(error)
        return
    await forward(submit, request)


def _sort(requests: list[Request]) -> tuple[list[Request], list[list[Request]]]:
    """Return the requests to tokenize in the event loop, and groups that share a thread each."""
    here: list[Request] = []
    together: list[Request] = []
    alone: list[list[Request]] = []
    room = INLINE_CHARACTERS
    for request in requests:
        weight = _characters_of(request)
        if weight <= room:
            room -= weight
            here.append(request)
        elif weight <= INLINE_CHARACTERS:
            together.append(request)
        else:
            alone.append([request])
    return here, [*_batches(together), *alone]


def _characters_of(request: Request) -> int:
    return characters_of(request.prompt) + len(request.params.prediction)


def _batches(requests: list[Request]) -> list[list[Request]]:
    """Split ``requests`` into batches, so that requests don't wait long for each other."""
    batches: list[list[Request]] = []
    room = 0
    for request in requests:
        weight = _characters_of(request)
        if weight > room:
            batches.append([])
            room = BATCH_CHARACTERS
        batches[-1].append(request)
        room -= weight
    return batches
