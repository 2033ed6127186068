"""Translation of a chat request to a job for the engine, and to a reader of its answers.

Every endpoint that takes a conversation uses this, with fields of its own.
"""

from __future__ import annotations

from typing import Any

import attrs
import trio

from trioserve.http.api.generations import renamed
from trioserve.http.api.jobs import PromptJob
from trioserve.http.api.openai.chat.answer import ReaderOptions, hidden_tokens, opens_reasoning
from trioserve.http.api.openai.chat.format import ChatFormat
from trioserve.http.api.openai.chat.legacy import LEGACY_WORDS
from trioserve.http.api.openai.chat.prompt import chat_prompt, embeds_characters
from trioserve.http.api.openai.chat.schemas import ChatCompletionRequest
from trioserve.http.api.openai.chat.tools import tool_use
from trioserve.http.api.openai.fields import make_job, sampling_fields
from trioserve.http.api.service import Service
from trioserve.http.api.threads import LONG_BODY, run_if_long
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.structural_tags import any_lark_of
from trioserve.requests.prompts import ChatPrompt
from trioserve.text.reasoning import CLOSE, after_reasoning
from trioserve.text.tool_parsers import ToolUse

_END_OF_PROMPT = 1000
"""Characters at the end of a prompt in which a mark is searched."""


@attrs.frozen
class PreparedChat:
    """A chat that is ready to be computed."""

    job: PromptJob
    options: ReaderOptions


class ChatPreparation:
    """Maker of jobs of chat requests, for one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.format = ChatFormat.of(service.engine.tokenizer, service.config)
        self._hidden = {
            with_tools: hidden_tokens(self.format, with_tools=with_tools)
            for with_tools in (False, True)
        }

    async def prepare(self, request: ChatCompletionRequest, id: str) -> PreparedChat:
        """Return the job of ``request`` under the name ``id``.

        Raises:
            InvalidRequest: it can't be served as it stands; ``param`` is a field of it.
        """
        try:
            use = self._tool_use(request)
            prompt = await run_if_long(
                embeds_characters(request.messages),
                lambda: chat_prompt(request, self.format, use),
                most=LONG_BODY,
            )
            options = self._reader_options(request, prompt, use)
            return PreparedChat(await self._job(request, options, id), options)
        except RecursionError:
            # Schemas and arguments that were just shallow enough to be parsed can be too deep to be
            # encoded.
            raise InvalidRequest("the body is nested too deeply") from None

    def _tool_use(self, request: ChatCompletionRequest) -> ToolUse | None:
        try:
            return tool_use(request, self.format)
        except InvalidRequest as error:
            if request.functions:
                raise LEGACY_WORDS.error(error) from error
            raise

    def _reader_options(
        self, request: ChatCompletionRequest, prompt: ChatPrompt, use: ToolUse | None
    ) -> ReaderOptions:
        shows_all = request.skip_special_tokens is False
        return ReaderOptions(
            format=self.format,
            prompt=prompt,
            use=use,
            separate_reasoning=request.separate_reasoning is not False,
            include_reasoning=request.include_reasoning is not False,
            functions=bool(request.functions),
            hidden=None if shows_all else self._hidden[use is not None],
        )

    async def _job(
        self, request: ChatCompletionRequest, options: ReaderOptions, id: str
    ) -> PromptJob:
        fields, renames = chat_sampling(request)
        if self.format.hides_marks(with_tools=options.use is not None):
            fields["skip_special_tokens"] = False
        try:
            await self._constrain(options, fields, renames)
        except InvalidRequest as error:
            raise renamed(error, renames) from error
        params = self._service.sampling(fields, renames)
        return make_job(self._service, request, options.prompt, id, params, renames)

    async def _constrain(
        self, options: ReaderOptions, fields: dict[str, Any], renames: dict[str, str]
    ) -> None:
        """Set one grammar for the form of the answer, its tools, and its reasoning."""
        format, use = self.format, options.use
        given: Grammar | None = fields.get("grammar")
        if given is None and (use is None or use.is_free):
            return
        if use is None and not format.reasons:
            return
        lark = None
        if given is not None:
            token_of = format.tokenizer.token_of
            lark = await trio.to_thread.run_sync(
                any_lark_of, given, token_of, abandon_on_cancel=True
            )
        if use is not None:
            if given is None or use.required:
                renames["grammar"] = "functions" if options.functions else "tools"
            assert format.family is not None
            use = attrs.evolve(use, answer=lark)
            lark = format.family.grammar(use, format.tokenizer.token_of, format.template)
        assert lark is not None
        if format.reasons:
            end = await self._end_of_prompt(options.prompt)
            if not end.rstrip().endswith(CLOSE):
                inside = opens_reasoning(end, options.prompt)
                lark = after_reasoning(lark, format.tokenizer.token_of, inside=inside)
        fields["grammar"] = Grammar("grammar", lark)

    async def _end_of_prompt(self, prompt: ChatPrompt) -> str:
        if self.format.tokenizer.chat_template is None:
            return ""  # The engine will refuse it.
        rendered = await self.format.tokenizer.render(prompt)
        return rendered[-_END_OF_PROMPT:]


def chat_sampling(request: ChatCompletionRequest) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the engine's sampling fields, and the chat's names of differently named ones."""
    fields, renames = sampling_fields(request)
    renames["prompt"] = "messages"
    if request.max_completion_tokens is not None:
        if request.max_tokens not in (None, request.max_completion_tokens):
            raise InvalidRequest(
                "max_tokens and max_completion_tokens differ; give one of them",
                param="max_completion_tokens",
            )
        fields["max_tokens"] = request.max_completion_tokens
        renames["max_tokens"] = "max_completion_tokens"
    if request.prediction is not None:
        fields["prediction"] = request.prediction.text
    if request.logprobs:
        # Tokens that are asked for by id take the place of the most probable ones.
        fields["logprobs"] = 0 if request.logprob_token_ids else request.top_logprobs or 0
        renames["logprobs"] = "top_logprobs"
    elif request.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return fields, renames
