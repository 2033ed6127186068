"""The pages of a request's prompt, told instead of an answer, for a router in front of servers.

A request with the header ``X-Prompt-Pages`` is read as any other, in every API, but its prompt is
only tokenized. So the router gets the hashes of exactly those pages that the request would look for
in the prefix cache, and needs neither the tokenizer nor the chat template.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import quart
import trio

from trioserve.engine.request_engine import RequestEngine
from trioserve.engine.validation import max_prompt_tokens
from trioserve.http.api.generations import renamed
from trioserve.http.api.jobs import PromptJob
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.prompt_size import characters_of
from trioserve.requests.prompts import ChatPrompt
from trioserve.scheduler.cache_events import namespace_hash, prompt_hashes
from trioserve.text.tokenizer_task import INLINE_CHARACTERS

HEADER = "X-Prompt-Pages"
MAX_THREADS = 2
"""Threads for tokenizing; few, as in the engine, because the worker needs the cores, too."""


class PromptPages(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as the prefix cache sees it."""

    num_tokens: int
    """Number of its tokens."""
    hashes: bytes
    """Hashes of the pages that it can find, as 64-bit integers, little-endian."""


class PromptPagesReply(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of a request."""

    page_size: int
    """Tokens of a page."""
    prompts: list[PromptPages]


class PromptPagesAsked(Exception):
    """The request asks for the pages of its prompts, which are those of ``jobs``."""

    def __init__(self, jobs: Sequence[PromptJob]) -> None:
        super().__init__("a request asks for the pages of its prompts")
        self.jobs = jobs


class PromptPagesReader:
    """The answers to such requests, by the model of ``engine``."""

    def __init__(self, engine: RequestEngine) -> None:
        self._engine = engine
        self._limiter = trio.CapacityLimiter(MAX_THREADS)

    async def reply(self, asked: PromptPagesAsked) -> quart.Response:
        """Return the answer.

        Raises:
            InvalidRequest: A prompt can't be tokenized.
        """
        prompts: list[PromptPages] = []
        for job in asked.jobs:
            try:
                prompts.append(await self._pages_of(job))
            except InvalidRequest as error:
                raise renamed(error, job.renames) from error
        reply = PromptPagesReply(page_size=self._engine.ready.page_size, prompts=prompts)
        return quart.Response(msgspec.json.encode(reply), content_type="application/json")

    async def _pages_of(self, job: PromptJob) -> PromptPages:
        prompt, params, tokenizer = job.prompt, job.params, self._engine.tokenizer
        keep = max_prompt_tokens(params, self._engine.max_model_len)
        side = params.truncation_side
        text = await tokenizer.render(prompt) if isinstance(prompt, ChatPrompt) else None

        def read() -> PromptPages | InvalidRequest:
            try:
                if text is None:
                    ids = tokenizer.prompt_ids(prompt, keep=keep, cut_side=side)
                else:
                    ids = tokenizer.ids_of(text, False, keep, side, "messages")
            except InvalidRequest as error:
                return error
            salt = self._engine.stored_salt(job.cache_salt, job.tenant)
            namespace = namespace_hash(salt, job.adapter)
            hashes = prompt_hashes(namespace, ids, self._engine.ready.page_size)
            return PromptPages(num_tokens=len(ids), hashes=hashes.tobytes())

        if characters_of(prompt) <= INLINE_CHARACTERS:
            pages = read()
        else:
            pages = await trio.to_thread.run_sync(
                read, limiter=self._limiter, abandon_on_cancel=True
            )
        if isinstance(pages, InvalidRequest):
            raise pages
        return pages
