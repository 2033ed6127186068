"""Fields that requests for whole texts share, and requests and responses for scores and labels.

Fields marked with :func:`~trioserve.http.api.schema.reading.only` are known and refused.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.http.api.schema import fields
from trioserve.http.api.schema.field_bounds import Text
from trioserve.http.api.schema.reading import (
    Exclusive,
    Identifier,
    Seconds,
    TokenId,
    about,
    hint,
    only,
)
from trioserve.http.api.schema.refused_fields import Refusal
from trioserve.protocol.sampling import MAX_LOGPROB_TOKEN_IDS

_Truncation = Annotated[int, msgspec.Meta(ge=-1)]
Texts = Annotated[list[Text], msgspec.Meta(min_length=1)]
Ids = Annotated[list[TokenId], msgspec.Meta(min_length=1)]
_IdsOrPair = Annotated[
    list[TokenId | Text],
    msgspec.Meta(
        min_length=1,
        extra_json_schema={
            "anyOf": [
                {"items": {"type": "integer"}},
                {"items": {"type": "string"}, "minItems": 2, "maxItems": 2},
            ]
        },
    ),
]
_InputsOrPairs = Annotated[
    list[Text | TokenId | _IdsOrPair],
    msgspec.Meta(
        min_length=1,
        extra_json_schema={
            "anyOf": [
                {"items": {"type": "integer"}},
                {"items": {"type": ["string", "array"]}},
            ]
        },
    ),
]
"""Texts, pairs of texts and lists of ids, or ids."""
_Labels = Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=MAX_LOGPROB_TOKEN_IDS)]


def text_only() -> msgspec.Meta:
    """Mark a field for other inputs than text."""
    return only([], {}, refusal=Refusal.READING_MEDIA)


def in_order() -> msgspec.Meta:
    """Mark a field that changes the order of computing."""
    return only(0, refusal=Refusal.POOLING_PRIORITIES)


class PoolingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that all requests for vectors, scores and labels share."""

    model: fields.Model = None
    truncate_prompt_tokens: Annotated[
        _Truncation | None,
        about(
            "Truncate each text to this many tokens, -1 for as many as the model takes. By "
            "default a longer text is refused."
        ),
    ] = None
    request_id: Annotated[Identifier | None, about("A name for the request.")] = None
    timeout: Annotated[Seconds | None, about("Seconds that the request may take.")] = None
    user: Annotated[str | None, hint()] = None
    priority: Annotated[int | None, in_order()] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None, only("right", refusal=Refusal.LEFT_TRUNCATION)
    ] = None
    padding: Annotated[
        Literal["max_length", "do_not_pad"] | None,
        only("do_not_pad", refusal=Refusal.PADDING),
    ] = None
    mm_processor_kwargs: Annotated[Any, text_only()] = None


class TextUsage(msgspec.Struct):
    """Tokens that a request used."""

    prompt_tokens: Annotated[int, about("Tokens of all texts, special ones included.")]
    total_tokens: Annotated[int, about("The same number.")]
    completion_tokens: Annotated[int, about("Always 0: no tokens are produced.")] = 0


class ScoreRequest(PoolingRequest, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /score``: pairs of texts, or items to be judged by a generating model."""

    EXCLUSIVE: ClassVar = (
        Exclusive(("text_1", "queries", "query", "data_1"), required=True),
        Exclusive(("text_2", "documents", "items", "data_2"), required=True),
    )

    text_1: Annotated[
        Text | Texts | None,
        about("A text that goes with all of `text_2`, or one for each."),
    ] = None
    text_2: Annotated[Text | Texts | None, about("The other texts of the pairs.")] = None
    queries: Annotated[Text | Texts | None, about("Another name for `text_1`.")] = None
    documents: Annotated[Text | Texts | None, about("Another name for `text_2`.")] = None
    data_1: Annotated[Text | Texts | None, about("Another name for `text_1`.")] = None
    data_2: Annotated[Text | Texts | None, about("Another name for `text_2`.")] = None
    query: Annotated[
        Text | Ids | None,
        about("The text or token ids before each item; SGLang's name for `text_1`."),
    ] = None
    items: Annotated[
        Text | Annotated[list[Text | Ids], msgspec.Meta(min_length=1)] | None,
        about("A text, or a list of texts or lists of token ids; SGLang's name for `text_2`."),
    ] = None
    label_token_ids: Annotated[
        _Labels | None,
        about(
            "For a model that generates: the probabilities of these tokens after each item, in "
            "`scores`."
        ),
    ] = None
    apply_softmax: Annotated[
        bool | None,
        about("Scale the probabilities of the labels to a sum of 1; false by default."),
    ] = None
    item_first: Annotated[
        bool | None, about("Put each item before the query; false by default.")
    ] = None

    use_activation: Annotated[bool | None, only(True, refusal=Refusal.RAW_SCORES)] = None
    cache_salt: Annotated[str | None, hint()] = None
    return_pooled_hidden_states: Annotated[
        bool | None, only(False, refusal=Refusal.SCORED_HIDDEN_STATES)
    ] = None
    embed_override_token_id: Annotated[Any, only(refusal=Refusal.SCORED_EMBEDDINGS)] = None
    query_embed_overrides: Annotated[Any, only(refusal=Refusal.SCORED_EMBEDDINGS)] = None
    item_embed_overrides: Annotated[Any, only(refusal=Refusal.SCORED_EMBEDDINGS)] = None


class ScoredPair(msgspec.Struct, kw_only=True):
    """The score of one pair."""

    index: Annotated[int, about("The number of the pair, from 0.")]
    object: Annotated[str, about("Always `score`.")] = "score"
    score: Annotated[float, about("Larger for texts that match better.")]


class ScoreResponse(msgspec.Struct, kw_only=True):
    """The scores of pairs in ``data``, or those of labels in ``scores``."""

    id: Annotated[str, about("The request's id: the client's own, or a new one.")]
    object: Annotated[str, about("`list`, or `scoring` if labels were asked for.")]
    created: Annotated[int, about("Time of creation, in Unix seconds.")]
    model: Annotated[str, about("The name that the model is served under.")]
    data: Annotated[list[ScoredPair] | UnsetType, about("A score for each pair.")] = UNSET
    scores: Annotated[
        list[list[float]] | UnsetType, about("For each item, a probability for each label.")
    ] = UNSET
    usage: Annotated[TextUsage, about("Tokens that were used.")]


class RerankDocument(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A document in an object, as Jina takes and gives it."""

    text: Annotated[Text, about("Its text.")]


class RerankRequest(PoolingRequest, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /rerank``."""

    query: Annotated[Text, about("The query.")]
    documents: Annotated[
        Annotated[list[Text | RerankDocument], msgspec.Meta(min_length=1)],
        about("The documents: texts, or objects with a `text`."),
    ]
    top_n: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        about("Number of best documents to return; all by default, or if it is 0."),
    ] = None
    return_documents: Annotated[
        bool | None, about("Return the documents, too; true by default.")
    ] = None

    use_activation: Annotated[bool | None, only(True, refusal=Refusal.RAW_SCORES)] = None
    cache_salt: Annotated[str | None, hint()] = None
    instruct: Annotated[str | None, only(refusal=Refusal.RANKING_INSTRUCTIONS)] = None
    max_tokens_per_doc: Annotated[int | None, only(refusal=Refusal.DOCUMENT_TRUNCATION)] = None


class RankedDocument(msgspec.Struct, kw_only=True):
    """One document in the ranking, the best first."""

    index: Annotated[int, about("Its position in the request, from 0.")]
    document: Annotated[RerankDocument | UnsetType, about("The document, if asked for.")] = UNSET
    relevance_score: Annotated[float, about("Larger for a better match.")]


class RerankResponse(msgspec.Struct, kw_only=True):
    """The documents by their score, the best first."""

    id: Annotated[str, about("The request's id: the client's own, or a new one.")]
    model: Annotated[str, about("The name that the model is served under.")]
    results: Annotated[list[RankedDocument], about("The documents, the best first.")]
    usage: Annotated[TextUsage, about("Tokens that were used.")]


class ClassifyRequest(PoolingRequest, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /classify``."""

    EXCLUSIVE: ClassVar = (
        Exclusive(("request_id", "rid")),
        Exclusive(("use_activation", "activation", "softmax")),
    )

    input: Annotated[
        Text | _InputsOrPairs,
        about(
            "A text or the token ids of one, or a list of either; an item of a list may also be a "
            'pair of texts, `["query", "document"]`.'
        ),
    ]
    use_activation: Annotated[
        bool | None, about("Return probabilities, the default, or the logits if it is false.")
    ] = None
    activation: Annotated[bool | None, about("vLLM's older name of `use_activation`.")] = None
    softmax: Annotated[bool | None, about("A still older name of it.")] = None
    rid: Annotated[Identifier | None, about("A name for the request.")] = None

    add_special_tokens: Annotated[
        bool | None, only(True, refusal=Refusal.MISSING_SPECIAL_TOKENS)
    ] = None
    cache_salt: Annotated[str | None, hint()] = None
    messages: Annotated[Any, only(refusal=Refusal.CLASSIFIED_CHATS)] = None
    text: Annotated[Any, only(refusal=Refusal.CLASSIFIED_TEXT)] = None


class ClassifiedText(msgspec.Struct, kw_only=True):
    """Label of one text."""

    index: Annotated[int, about("The number of the text, from 0.")]
    label: Annotated[str, about("The most probable label.")]
    probs: Annotated[list[float], about("A probability for each label, or its logit.")]
    num_classes: Annotated[int, about("Number of labels.")]


class ClassifyResponse(msgspec.Struct, kw_only=True):
    """Labels of texts, in their order."""

    id: Annotated[str, about("The request's id: the client's own, or a new one.")]
    object: Annotated[str, about("Always `list`.")] = "list"
    created: Annotated[int, about("Time of creation, in Unix seconds.")]
    model: Annotated[str, about("The name that the model is served under.")]
    data: Annotated[list[ClassifiedText], about("A label for each text.")]
    usage: Annotated[TextUsage, about("Tokens that were used.")]
