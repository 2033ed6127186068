"""Probabilities of given tokens after each of several items, by a generative model.

Only the prompts are computed, with the log-probabilities of the labels that would come next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trioserve.pooling.results import LabelScores
from trioserve.protocol.errors import InvalidRequest, RequestAborted
from trioserve.requests.generation import Completion, Usage
from trioserve.requests.prompts import Prompt, TextPrompt, TokensPrompt

Text = str | Sequence[int]
"""A text, or the token ids of one."""


def label_prompts(query: object, items: object, *, item_first: bool) -> list[Prompt]:
    """Return the query and each item as one prompt; with ``item_first`` the query comes last.

    The arguments are those of :meth:`trioserve.Engine.score_labels`, not yet checked.

    Raises:
        InvalidRequest: One is text and the other is token ids, or there are no items.
    """
    listed = [items] if isinstance(items, str) else items
    if not isinstance(listed, Sequence) or not listed:
        raise InvalidRequest("items is a text, or a list of texts or of token ids", param="items")
    return [_joined(query, item, item_first=item_first) for item in listed]


def _joined(query: object, item: object, *, item_first: bool) -> Prompt:
    if isinstance(query, str) and isinstance(item, str):
        return TextPrompt(item + query if item_first else query + item)
    ids = [_ids_of(query), _ids_of(item)]
    if item_first:
        ids.reverse()
    return TokensPrompt([*ids[0], *ids[1]])


def _ids_of(text: object) -> list[int]:
    values = list(text) if isinstance(text, Sequence) and not isinstance(text, str) else []
    ids = [each for each in values if isinstance(each, int) and not isinstance(each, bool)]
    if not ids or len(ids) != len(values):
        raise InvalidRequest(
            "query and items must both be texts or both be token ids, one query for all items",
            param="query",
        )
    return ids


def label_params(label_token_ids: Sequence[int], truncate: int | None) -> dict[str, Any]:
    """Return the sampling fields that report the labels' log-probabilities and generate one token.

    Raises:
        InvalidRequest: There are no labels.
    """
    if not label_token_ids:
        raise InvalidRequest("label_token_ids is empty", param="label_token_ids")
    return {
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": 0,
        "logprob_token_ids": label_token_ids,
        "ignore_eos": True,
        "truncate_prompt_tokens": truncate,
        "truncation_side": "right",
    }


def label_scores(completions: Sequence[Completion], *, softmax: bool) -> LabelScores:
    """Return the labels' probabilities after each prompt; with ``softmax`` they sum to 1.

    Raises:
        RequestAborted: A request was aborted.
    """
    num_tokens = sum(each.usage.prompt_tokens for each in completions)
    return LabelScores(
        np.array([_probabilities(each, softmax=softmax) for each in completions], np.float32),
        Usage(
            prompt_tokens=num_tokens,
            completion_tokens=0,
            cached_tokens=sum(each.usage.cached_tokens for each in completions),
        ),
    )


def _probabilities(completion: Completion, *, softmax: bool) -> list[float]:
    logprobs = completion.logprobs
    if not logprobs:
        raise RequestAborted("the request was aborted")
    found = [logprob for _, logprob, _ in logprobs[0].asked]
    if not softmax:
        return [math.exp(each) for each in found]
    weights = [math.exp(each - max(found)) for each in found]
    return [each / sum(weights) for each in weights]
