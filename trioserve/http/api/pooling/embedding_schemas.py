"""Requests and responses of the endpoints for embeddings, as classes.

Fields marked with :func:`~trioserve.http.api.schema.reading.only` are known and refused.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from trioserve.http.api.pooling.schemas import (
    Ids,
    PoolingRequest,
    Texts,
    TextUsage,
    in_order,
    text_only,
)
from trioserve.http.api.schema.field_bounds import Text
from trioserve.http.api.schema.reading import (
    Exclusive,
    Identifier,
    Salt,
    Seconds,
    TokenId,
    about,
    hint,
    only,
)
from trioserve.http.api.schema.refused_fields import Refusal

_Inputs = Annotated[
    list[Text | TokenId | Ids],
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
"""Texts and lists of ids, or ids."""


class EmbeddingRequest(PoolingRequest, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /v1/embeddings``."""

    EXCLUSIVE: ClassVar = (
        Exclusive(("request_id", "rid")),
        Exclusive(("normalize", "use_activation")),
    )

    input: Annotated[
        Text | _Inputs,
        about(
            "A text or the token ids of one, or a list of either. Ids are taken as they are, "
            "special tokens included."
        ),
    ]
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        about(
            "Encoding of a vector: a list of numbers, the default, or the base64 of its "
            "float32 numbers, little-endian."
        ),
    ] = None
    dimensions: Annotated[
        Annotated[int, msgspec.Meta(ge=1)] | None,
        about(
            "Keep this many numbers of each vector and scale it to length 1 again, for models "
            "that were trained for it (Matryoshka)."
        ),
    ] = None
    normalize: Annotated[
        bool | None,
        about("Whether vectors are scaled to length 1; the model's files decide by default."),
    ] = None
    use_activation: Annotated[bool | None, about("vLLM's newer name of `normalize`.")] = None
    pooling: Annotated[
        Literal["last", "mean", "cls", "max"] | None,
        about(
            "For a decoder: the hidden state of the `last` token or the `mean` of all; by "
            "default as the model's files say, else `last`. An encoder has its own."
        ),
    ] = None
    rid: Annotated[Identifier | None, about("A name for the request.")] = None

    add_special_tokens: Annotated[
        bool | None, only(True, refusal=Refusal.MISSING_SPECIAL_TOKENS)
    ] = None
    cache_salt: Annotated[
        Salt | None, about("Share cached prefixes only with requests of the same salt.")
    ] = None
    embed_dtype: Annotated[str | None, only("float32", refusal=Refusal.VECTOR_TYPES)] = None
    endianness: Annotated[str | None, only("native", "little", refusal=Refusal.BIG_ENDIAN)] = None
    messages: Annotated[Any, only(refusal=Refusal.EMBEDDED_CHATS)] = None
    lora_path: Annotated[
        Identifier | None, about("The name of an adapter; `model` may name it as well.")
    ] = None
    embed_override_token_id: Annotated[Any, only(refusal=Refusal.EMBEDDED_EMBEDDINGS)] = None
    embed_overrides: Annotated[Any, only(refusal=Refusal.EMBEDDED_EMBEDDINGS)] = None


class EmbeddedText(msgspec.Struct, kw_only=True):
    """The vector of one text."""

    index: Annotated[int, about("The number of the text, from 0.")]
    object: Annotated[str, about("Always `embedding`.")] = "embedding"
    embedding: Annotated[list[float] | str, about("The vector, or its base64.")]


class EmbeddingResponse(msgspec.Struct, kw_only=True):
    """The vectors of texts, in their order."""

    id: Annotated[str, about("The request's id: the client's own, or a new one.")]
    object: Annotated[str, about("Always `list`.")] = "list"
    created: Annotated[int, about("Time of creation, in Unix seconds.")]
    model: Annotated[str, about("The name that the model is served under.")]
    data: Annotated[list[EmbeddedText], about("A vector for each text.")]
    usage: Annotated[TextUsage, about("Tokens that were used.")]


class EncodeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /encode``: a text or several, in the form of SGLang's engine."""

    EXCLUSIVE: ClassVar = (Exclusive(("text", "input_ids"), required=True),)

    text: Annotated[
        Text | Texts | None,
        about("A text, or a list of texts; it or `input_ids` is required."),
    ] = None
    input_ids: Annotated[
        Annotated[
            list[TokenId | Ids],
            msgspec.Meta(
                min_length=1,
                extra_json_schema={
                    "anyOf": [{"items": {"type": "integer"}}, {"items": {"type": "array"}}]
                },
            ),
        ]
        | None,
        about("The token ids of a text, or a list of such lists; taken as they are."),
    ] = None
    dimensions: Annotated[
        Annotated[int, msgspec.Meta(ge=1)] | None,
        about("Keep this many numbers of each vector, and scale it to length 1 again."),
    ] = None
    rid: Annotated[Identifier | None, about("A name for the request.")] = None
    timeout: Annotated[Seconds | None, about("Seconds that the request may take.")] = None
    return_prompt_token_ids: Annotated[bool | None, only(False, refusal=Refusal.RETURNED_IDS)] = (
        None
    )
    sampling_params: Annotated[Any, hint()] = None
    log_metrics: Annotated[bool | None, hint()] = None
    priority: Annotated[int | None, in_order()] = None
    is_cross_encoder_request: Annotated[bool | None, only(False, refusal=Refusal.ENCODED_PAIRS)] = (
        None
    )
    return_pooled_hidden_states: Annotated[
        bool | None, only(False, refusal=Refusal.POOLED_HIDDEN_STATES)
    ] = None
    input_embeds: Annotated[Any, only(refusal=Refusal.EMBEDDED_EMBEDDINGS)] = None
    embed_override_token_id: Annotated[Any, only(refusal=Refusal.EMBEDDED_EMBEDDINGS)] = None
    embed_overrides: Annotated[Any, only(refusal=Refusal.EMBEDDED_EMBEDDINGS)] = None
    positional_embed_overrides: Annotated[Any, only(refusal=Refusal.EMBEDDED_EMBEDDINGS)] = None
    image_data: Annotated[Any, text_only()] = None
    video_data: Annotated[Any, text_only()] = None
    audio_data: Annotated[Any, text_only()] = None
    modalities: Annotated[Any, text_only()] = None
    lora_path: Annotated[
        Identifier | None, about("The name of an adapter, for a model that generates.")
    ] = None
    lora_id: Annotated[Any, only(refusal=Refusal.ADAPTER_NUMBERS)] = None
    multi_item_delimiter_indices: Annotated[Any, only(refusal=Refusal.MULTI_ITEM_ENCODING)] = None


class EncodedMeta(msgspec.Struct, kw_only=True):
    """Metadata of one text."""

    id: Annotated[str, about("The request's id.")]
    finish_reason: Annotated[dict[str, str], about("Always of type `stop`.")]
    prompt_tokens: Annotated[int, about("Tokens of the text, special ones included.")]


class EncodeResponse(msgspec.Struct, kw_only=True):
    """The vector of one text; a list of texts gives a list of these."""

    embedding: Annotated[list[float], about("The vector.")]
    meta_info: Annotated[EncodedMeta, about("Metadata of the text.")]
