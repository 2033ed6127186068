"""SGLang's scores: probabilities of given tokens after each of several items."""

from __future__ import annotations

from trioserve.http.api.jobs import PromptJob
from trioserve.http.api.pooling.asked import Asked, check_truncation, text_usage
from trioserve.http.api.pooling.schemas import ScoreRequest, ScoreResponse
from trioserve.http.api.service import Service
from trioserve.pooling.labels import label_params, label_prompts, label_scores
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.prompts import Prompt

_NAMES = {"logprob_token_ids": "label_token_ids", "prompt": "items"}


async def score_labels(
    service: Service, request: ScoreRequest, asked: Asked, model: str
) -> ScoreResponse:
    """Return the answer to ``request``.

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
    params = service.sampling(label_params(labels, check_truncation(request)), _NAMES)
    adapter, field = service.adapter(request.model, None)
    jobs = [
        PromptJob(
            prompt=prompt,
            params=params,
            request_id=f"{asked.id}-{index}",
            timeout=asked.timeout,
            adapter=adapter,
            renames={**_NAMES, "adapter": field},
        )
        for index, prompt in enumerate(prompts)
    ]
    scores = label_scores(await service.complete(jobs), softmax=bool(request.apply_softmax))
    return ScoreResponse(
        id=asked.id,
        object="scoring",
        created=asked.created,
        model=model,
        scores=scores.values.tolist(),
        usage=text_usage(scores.usage),
    )


def _prompts(request: ScoreRequest) -> list[Prompt]:
    """Return the query and each item as one prompt, from either pair of names."""
    firsts = (request.query, request.text_1, request.queries, request.data_1)
    query = next(each for each in firsts if each is not None)
    seconds = (request.items, request.text_2, request.documents, request.data_2)
    items = next(each for each in seconds if each is not None)
    if isinstance(query, list) and len(query) == 1 and isinstance(query[0], str):
        query = query[0]
    return label_prompts(query, items, item_first=bool(request.item_first))
