"""SGLang's scores: how probable given tokens are after each of several items.

Nothing but a prompt is computed, and the log-probabilities of the labels that would come next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trioserve.errors import InvalidRequest
from trioserve.generation import Completion
from trioserve.http.generations import Job
from trioserve.http.pooling.asked import Asked, check_truncation
from trioserve.http.pooling.schemas import ScoreRequest, ScoreResponse, TextUsage
from trioserve.http.service import Service
from trioserve.request import Prompt, TextPrompt, TokensPrompt

__all__ = ["score_labels"]

_NAMES = {"logprob_token_ids": "label_token_ids", "prompt": "items"}


async def score_labels(
    service: Service, request: ScoreRequest, asked: Asked, model: str
) -> ScoreResponse:
    """The answer to ``request``.

    Raises:
        InvalidRequest: it names no labels, or can't be served.
    """
    labels = request.label_token_ids
    if labels is None:
        raise InvalidRequest(
            f"label_token_ids has to be given: the model {service.engine.model_name} "
            f"{service.engine.pooling.purpose}, and scores items by the tokens that may come next",
            param="label_token_ids",
        )
    prompts = _prompts(request)
    service.check_number_of_prompts(len(prompts), "items")
    params = service.sampling(
        {
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": 0,
            "logprob_token_ids": labels,
            "ignore_eos": True,
            "truncate_prompt_tokens": check_truncation(request),
            "truncation_side": "right",
        },
        _NAMES,
    )
    adapter, field = service.adapter(request.model, None)
    jobs = [
        Job(
            prompt=prompt,
            params=params,
            request_id=f"{asked.id}-{index}",
            timeout=asked.timeout,
            adapter=adapter,
            renames={**_NAMES, "adapter": field},
        )
        for index, prompt in enumerate(prompts)
    ]
    completions = await service.complete(jobs)
    num_tokens = sum(each.usage.prompt_tokens for each in completions)
    return ScoreResponse(
        id=asked.id,
        object="scoring",
        created=asked.created,
        model=model,
        scores=[_scores(each, softmax=bool(request.apply_softmax)) for each in completions],
        usage=TextUsage(num_tokens, num_tokens),
    )


def _prompts(request: ScoreRequest) -> list[Prompt]:
    """The query and each item, as one prompt.

    Raises:
        InvalidRequest: one is text and the other is token ids, or there is no single query.
    """
    firsts = (request.query, request.text_1, request.queries, request.data_1)
    query = next(each for each in firsts if each is not None)
    seconds = (request.items, request.text_2, request.documents, request.data_2)
    items = next(each for each in seconds if each is not None)
    if isinstance(query, list) and len(query) == 1 and isinstance(query[0], str):
        query = query[0]
    listed = [items] if isinstance(items, str) else items
    return [_joined(query, item, item_first=bool(request.item_first)) for item in listed]


def _joined(query: str | Sequence[int | str], item: str | list[int], *, item_first: bool) -> Prompt:
    if isinstance(query, str) and isinstance(item, str):
        return TextPrompt(item + query if item_first else query + item)
    query_ids = [each for each in query if isinstance(each, int)]
    if isinstance(query, str) or isinstance(item, str) or len(query_ids) != len(query):
        raise InvalidRequest(
            "query and items must both be texts or both be token ids, one query for all items",
            param="query",
        )
    return TokensPrompt([*item, *query_ids] if item_first else [*query_ids, *item])


def _scores(completion: Completion, *, softmax: bool) -> list[float]:
    """The probability of each label, in their order; with ``softmax`` they are 1 in all."""
    logprobs = completion.logprobs
    assert logprobs is not None
    found = [logprob for _, logprob, _ in logprobs[0].asked]
    probabilities = [math.exp(each - max(found)) if softmax else math.exp(each) for each in found]
    return [each / sum(probabilities) for each in probabilities] if softmax else probabilities
