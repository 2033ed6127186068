"""Handler of SGLang's ``/generate``.

:mod:`trioserve.http.api.sglang.fields` reads the request; :mod:`trioserve.http.api.sglang.writer`
writes the answer in SGLang's form.
"""

from __future__ import annotations

import quart

from trioserve.http.api.service import Service, json_response
from trioserve.http.api.sessions.turns import as_turn
from trioserve.http.api.sglang.fields import read_batch
from trioserve.http.api.sglang.schemas import GenerateRequest, GenerateResponse
from trioserve.http.api.sglang.writer import NativeWriter
from trioserve.http.api.threads import num_logprobs, run_if_long


class NativeEndpoints:
    """The handler, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def generate(self) -> quart.Response:
        """Handle ``POST /generate``."""
        request = await self._service.read(GenerateRequest)
        with self._service.deadline(request.timeout).enforced():
            return await self._answer(request)

    async def _answer(self, request: GenerateRequest) -> quart.Response:
        service = self._service
        batch = read_batch(request, service)
        jobs = as_turn(service, request.session_params, batch.jobs)
        writer = NativeWriter(
            batch=batch,
            tokenizer=service.engine.tokenizer,
            eos_token_ids=service.engine.eos_token_ids,
            with_text=bool(request.return_text_in_logprobs),
            with_prompt_ids=bool(request.return_prompt_token_ids),
            with_mean=bool(request.return_normalized_logprob),
            only_new=bool(request.stream_output),
        )
        if request.stream:
            return service.stream(jobs, writer)
        completions = await service.complete(jobs)

        def all_replies() -> list[GenerateResponse]:
            return [
                reply
                for index, server_api in enumerate(completions)
                for reply in writer.replies(index, server_api)
            ]

        replies = await run_if_long(num_logprobs(completions), all_replies)
        return json_response(replies if batch.listed else replies[0])
