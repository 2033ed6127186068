"""Limits on what one HTTP request may ask for in all, in addition to the engine's limits per
prompt.

Only harmful clients come near these numbers. Limits that operators may want to change are options.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from trioserve.engine.request_engine import RequestEngine
from trioserve.http.api.jobs import PromptJob
from trioserve.http.api.schema.structure import count_outside_texts
from trioserve.http.api.threads import num_in_entries
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.embedded import EmbeddingsPrompt
from trioserve.requests.generation import GenerationStream
from trioserve.requests.prompts import Prompt, TokensPrompt
from trioserve.requests.stream import Chunk
from trioserve.requests.tensors import check_size, tensor_bytes
from trioserve.scheduler.limits import MAX_PROMPT_LOGPROBS

MAX_FIELDS = 1 << 17
"""Objects, lists and fields of objects in a body. Parsing as many takes a tenth of a second, in
which no other request is served.
"""
MAX_VALUES = 2 << 20
"""Items of lists and fields of objects in a body, mostly token ids."""
MAX_ANSWER_LOGPROBS = 2 << 20
"""Log-probabilities in an answer that is sent as a whole: about 100 bytes each in its JSON."""


def check_body(body: bytes) -> None:
    """Refuse a body that would take long to parse, before it is parsed.

    Raises:
        InvalidRequest: it holds too many lists, objects, fields or values.
    """
    _check_separators(body, b"{[:", MAX_FIELDS, "objects, lists and fields")
    _check_separators(body, b",", MAX_VALUES, "values")


def _check_separators(body: bytes, separators: bytes, most: int, what: str) -> None:
    """Refuse a body with more than ``most`` of ``separators`` outside its strings."""
    if len(body) <= most or sum(body.count(each) for each in separators) <= most:
        return
    number = count_outside_texts(body, separators)
    if number > most:
        raise InvalidRequest(f"the body holds {number} {what}; at most {most} are read")


def check_batch(
    jobs: Sequence[PromptJob], engine: RequestEngine, *, is_shared: bool = False
) -> None:
    """Refuse a batch that wouldn't fit even an empty queue.

    Args:
        jobs: The batch.
        engine: The engine that would generate it.
        is_shared: Whether it may take only half of the queue, because other keys have a share, too.

    Raises:
        InvalidRequest: it has too many outputs or tokens; ``param`` is the engine's name.
    """
    if len(jobs) == 1:
        return
    shares = 2 if is_shared else 1
    limit = engine.config.max_num_queued_reqs // shares
    outputs = sum(job.params.n for job in jobs)
    if outputs > limit:
        raise InvalidRequest(
            f"n asks for {outputs} outputs of {len(jobs)} prompts; at most {limit} can wait "
            "(--max-num-queued-reqs)",
            param="n",
        )
    tokens = sum(
        _num_tokens(job.prompt) * job.params.n
        for job in jobs
        if job.params.truncate_prompt_tokens is None
    )
    max_tokens = engine.max_num_queued_tokens // shares
    if tokens > max_tokens:
        raise InvalidRequest(
            f"prompt has {tokens} tokens in {outputs} outputs' prompts; at most "
            f"{max_tokens} can wait (--max-num-queued-tokens)",
            param="prompt",
        )


def _num_tokens(prompt: Prompt) -> int:
    """Return the tokens of a prompt that isn't text."""
    if isinstance(prompt, EmbeddingsPrompt):
        return len(prompt)
    return len(prompt.token_ids) if isinstance(prompt, TokensPrompt) else 0


def check_prompt_logprobs(jobs: Sequence[PromptJob], streams: Iterable[GenerationStream]) -> None:
    """Refuse a batch that asks for more of its prompts' log-probabilities than one prompt may.

    Raises:
        InvalidRequest: it does; ``param`` is the engine's name of the field.
    """
    total = sum(
        max(len(stream.prompt_token_ids) - stream.prompt_logprobs.start, 0)
        * stream.prompt_logprobs.num_for_each
        * job.params.n
        for job, stream in zip(jobs, streams, strict=True)
        if stream.prompt_logprobs is not None
    )
    if total > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs asks for {total} log-probabilities of {len(jobs)} prompts together: "
            f"at most {MAX_PROMPT_LOGPROBS} are served",
            param="prompt_logprobs",
        )


def check_output_tensors(streams: Iterable[GenerationStream], engine: RequestEngine) -> None:
    """Refuse a batch whose output tensors are larger together than those of one prompt may be.

    Raises:
        InvalidRequest: they are; ``param`` is the field that asks for the most.
    """
    sizes: Counter[str] = Counter()
    for stream in streams:
        params = stream.request.params
        if params.returned_tensors:
            sizes.update(
                tensor_bytes(
                    params,
                    len(stream.prompt_token_ids),
                    params.max_tokens or 0,
                    hidden_size=engine.ready.hidden_size,
                    vocab_size=engine.vocab_size,
                )
            )
    if sizes:
        check_size(sizes, engine.config.max_output_tensor_bytes, " for all prompts together")


class AnswerSize:
    """Counter of the log-probabilities of an answer that is collected as a whole."""

    def __init__(self) -> None:
        self._total = 0

    def add(self, chunk: Chunk) -> None:
        """Count those of ``chunk``.

        Raises:
            InvalidRequest: they are too many to be held; ``param`` is the engine's name.
        """
        self._total += num_in_entries(chunk.logprobs)
        if self._total > MAX_ANSWER_LOGPROBS:
            raise InvalidRequest(
                f"logprobs makes an answer of more than {MAX_ANSWER_LOGPROBS} log-probabilities, "
                "which isn't held: ask for fewer, or for a stream",
                param="logprobs",
            )
