"""Requests and answers of Ollama's computing endpoints, as classes.

The names and the meaning of the fields are Ollama's. Fields marked with
:func:`~trioserve.http.api.schema.reading.only` are known and refused; the others are served.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.http.api.openai.chat.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    FunctionName,
    Tools,
)
from trioserve.http.api.openai.chat.schemas import ChatLogprob
from trioserve.http.api.schema import fields
from trioserve.http.api.schema.field_bounds import Text
from trioserve.http.api.schema.reading import Count, Seed, about, hint, only
from trioserve.http.api.schema.refused_fields import Refusal


class OllamaOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Sampling options. The defaults are those of the model's own files.

    Options of loading are accepted: the server has loaded its model as its own options say.
    """

    num_predict: Annotated[
        Annotated[int, msgspec.Meta(ge=-2, le=2**31 - 1)] | None,
        about("Most tokens of the output; -1 or -2 for the server's default."),
    ] = None
    temperature: fields.Temperature = None
    top_k: fields.TopK = None
    top_p: fields.TopP = None
    min_p: fields.MinP = None
    seed: Annotated[
        Seed | None,
        about("With the same seed, the same request draws the same numbers; -1 for a random one."),
    ] = None
    stop: fields.Stop = None
    repeat_penalty: fields.RepetitionPenalty = None
    presence_penalty: fields.PresencePenalty = None
    frequency_penalty: fields.FrequencyPenalty = None

    repeat_last_n: Annotated[Any, only(-1, refusal=Refusal.PENALTY_WINDOW)] = None
    penalize_newline: Annotated[Any, only(True, refusal=Refusal.NEWLINE_PENALTY)] = None
    typical_p: Annotated[Any, only(1.0, refusal=Refusal.OTHER_SAMPLERS)] = None
    tfs_z: Annotated[Any, only(1.0, refusal=Refusal.OTHER_SAMPLERS)] = None
    mirostat: Annotated[Any, only(0, refusal=Refusal.OTHER_SAMPLERS)] = None
    mirostat_tau: Annotated[Any, hint()] = None
    mirostat_eta: Annotated[Any, hint()] = None

    num_ctx: Annotated[Any, hint()] = None
    num_keep: Annotated[Any, hint()] = None
    num_batch: Annotated[Any, hint()] = None
    num_gpu: Annotated[Any, hint()] = None
    main_gpu: Annotated[Any, hint()] = None
    num_thread: Annotated[Any, hint()] = None
    low_vram: Annotated[Any, hint()] = None
    f16_kv: Annotated[Any, hint()] = None
    numa: Annotated[Any, hint()] = None
    use_mmap: Annotated[Any, hint()] = None
    use_mlock: Annotated[Any, hint()] = None
    logits_all: Annotated[Any, hint()] = None
    vocab_only: Annotated[Any, only(False, refusal=Refusal.PARTIAL_LOADING)] = None
    embedding_only: Annotated[Any, only(False, refusal=Refusal.PARTIAL_LOADING)] = None


class OllamaRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that both requests share."""

    model: Annotated[
        str | None,
        about(
            "A name out of `/api/tags`, with or without `:latest`; the first of them by default."
        ),
    ] = None
    stream: Annotated[
        bool | None, about("Send the output as lines of JSON, as it is generated; true by default.")
    ] = None
    format: Annotated[
        Literal["", "json"] | dict[str, Any] | None,
        about("The form of the output: `json` for any object, or a JSON schema."),
    ] = None
    options: Annotated[OllamaOptions | None, about("Sampling options.")] = None
    think: Annotated[
        bool | Literal["low", "medium", "high", "max"] | None,
        about("Whether the model is to reason, or how much; the template decides by default."),
    ] = None
    logprobs: Annotated[
        bool | None, about("Return the log-probabilities of the output's tokens.")
    ] = None
    top_logprobs: Annotated[
        Count | None, about("Number of most probable tokens to return in each one's place.")
    ] = None
    keep_alive: Annotated[Any, hint()] = None
    truncate: Annotated[Any, only(False, refusal=Refusal.CHAT_TRUNCATION)] = None
    shift: Annotated[Any, only(False, refusal=Refusal.CONTEXT_SHIFT)] = None


class OllamaFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The function of an earlier tool call."""

    name: Annotated[FunctionName, about("The function's name.")]
    arguments: Annotated[dict[str, Any] | None, about("The function's arguments.")] = None
    description: Annotated[Any, hint()] = None
    index: Annotated[Any, hint()] = None


class OllamaToolCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An earlier tool call."""

    function: Annotated[OllamaFunction, about("The called function, with its arguments.")]
    id: Annotated[str | None, about("The name that the tool's answer may refer to.")] = None
    type: Annotated[Literal["function"] | None, about("There is no other kind.")] = None


Images = Annotated[
    Annotated[list[Text], msgspec.Meta(max_length=MAX_PARTS)] | None,
    about("Images in base64, which come before the text."),
]


class OllamaMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One message of a conversation."""

    role: Annotated[
        Literal["system", "user", "assistant", "tool"], about("The role of the message's author.")
    ]
    content: Annotated[Text | None, about("The text.")] = None
    thinking: Annotated[Text | None, about("Reasoning before an earlier answer.")] = None
    tool_calls: Annotated[
        Annotated[list[OllamaToolCall], msgspec.Meta(max_length=MAX_TOOLS)] | None,
        about("Earlier tool calls."),
    ] = None
    tool_name: Annotated[str | None, about("The function that returned this message.")] = None
    tool_call_id: Annotated[
        str | None, about("The call that it answers; the first open one by default.")
    ] = None
    images: Images = None


class OllamaChatRequest(OllamaRequest, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /api/chat``."""

    messages: Annotated[
        Annotated[list[OllamaMessage], msgspec.Meta(max_length=MAX_MESSAGES)] | None,
        about("The conversation so far. Without any, the model is loaded, which it is already."),
    ] = None
    tools: Tools = None


class OllamaGenerateRequest(OllamaRequest, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /api/generate``."""

    prompt: Annotated[
        Text | None,
        about("The user's text. If it is empty, the model is loaded, which it is already."),
    ] = None
    system: Annotated[Text | None, about("The system message.")] = None
    raw: Annotated[
        bool | None, about("If true, the prompt is the whole text, without a chat template.")
    ] = None
    suffix: Annotated[Any, only("", refusal=Refusal.FILLING_IN)] = None
    images: Images = None
    template: Annotated[Any, only("", refusal=Refusal.TEMPLATES_AS_PROGRAMS)] = None
    context: Annotated[Any, only([], refusal=Refusal.CONTEXT_TOKENS)] = None
    width: Annotated[Any, only(0, refusal=Refusal.MEDIA)] = None
    height: Annotated[Any, only(0, refusal=Refusal.MEDIA)] = None
    steps: Annotated[Any, only(0, refusal=Refusal.MEDIA)] = None


class OllamaFunctionReply(msgspec.Struct, kw_only=True):
    """The function that is called."""

    index: Annotated[int, about("The number of the call, from 0.")]
    name: Annotated[str, about("The function's name.")]
    arguments: Annotated[
        dict[str, Any],
        about("The function's arguments; empty if the model wrote no complete JSON object."),
    ]


class OllamaToolCallReply(msgspec.Struct, kw_only=True):
    """A call that the answer asks for."""

    id: Annotated[str, about("The name that the tool's answer may refer to.")]
    function: Annotated[OllamaFunctionReply, about("The function to call, with its arguments.")]


class OllamaAnswer(msgspec.Struct, kw_only=True):
    """The answer, or a line's addition to it."""

    role: Annotated[str, about("Always `assistant`.")] = "assistant"
    content: Annotated[str, about("The text.")]
    thinking: Annotated[
        str | UnsetType, about("Reasoning before the answer, without the marks.")
    ] = UNSET
    tool_calls: Annotated[
        list[OllamaToolCallReply] | UnsetType, about("Functions that the model wants called.")
    ] = UNSET


class OllamaReply(msgspec.Struct, kw_only=True):
    """Fields that both answers share. The last line of a stream has those of the whole."""

    model: Annotated[str, about("The name that the model is served under.")]
    created_at: Annotated[str, about("When the answer began, in ISO 8601.")]
    done: Annotated[bool, about("Whether this is the end.")] = False
    done_reason: Annotated[
        str | UnsetType,
        about("`stop` or `length`; `load` if nothing was asked."),
    ] = UNSET
    total_duration: Annotated[int | UnsetType, about("Nanoseconds that all of it took.")] = UNSET
    load_duration: Annotated[int | UnsetType, about("Always 0: the model was loaded before.")] = (
        UNSET
    )
    prompt_eval_count: Annotated[int | UnsetType, about("Tokens of the prompt.")] = UNSET
    prompt_eval_duration: Annotated[
        int | UnsetType, about("Nanoseconds from the prompt's first step to the first token.")
    ] = UNSET
    eval_count: Annotated[int | UnsetType, about("Tokens that were produced.")] = UNSET
    eval_duration: Annotated[
        int | UnsetType, about("Nanoseconds from the first token to the end.")
    ] = UNSET
    logprobs: Annotated[
        list[ChatLogprob] | UnsetType,
        about("One entry for each token, if the request asks for them."),
    ] = UNSET


class OllamaChatResponse(OllamaReply, kw_only=True):
    """The answer of ``/api/chat``, or a line of it."""

    message: Annotated[OllamaAnswer, about("The answer's message.")]


class OllamaGenerateResponse(OllamaReply, kw_only=True):
    """The answer of ``/api/generate``, or a line of it."""

    response: Annotated[str, about("The text.")]
    thinking: Annotated[
        str | UnsetType, about("Reasoning before the answer, without the marks.")
    ] = UNSET


class OllamaEmbedRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /api/embed``."""

    model: Annotated[
        str | None, about("A name out of `/api/tags`; the first of them by default.")
    ] = None
    input: Annotated[
        Text | Annotated[list[Text], msgspec.Meta(min_length=1)], about("A text, or several.")
    ]
    truncate: Annotated[
        bool | None,
        about("Truncate a text that is longer than the model takes; true by default."),
    ] = None
    dimensions: Annotated[
        Annotated[int, msgspec.Meta(ge=1)] | None,
        about(
            "Keep this many numbers of each vector, for models that were trained for it "
            "(Matryoshka)."
        ),
    ] = None
    options: Annotated[Any, hint()] = None
    keep_alive: Annotated[Any, hint()] = None


class OllamaEmbeddingsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /api/embeddings``, the older form of ``/api/embed``."""

    model: Annotated[
        str | None, about("A name out of `/api/tags`; the first of them by default.")
    ] = None
    prompt: Annotated[Text, about("A text.")]
    options: Annotated[Any, hint()] = None
    keep_alive: Annotated[Any, hint()] = None


class OllamaEmbeddingsResponse(msgspec.Struct):
    """The vector of a text."""

    embedding: Annotated[list[float], about("The vector, of the length that the model gives it.")]


class OllamaEmbedResponse(msgspec.Struct, kw_only=True):
    """The vectors of texts."""

    model: Annotated[str, about("The name that the model is served under.")]
    embeddings: Annotated[list[list[float]], about("One vector of length 1 for each text.")]
    total_duration: Annotated[int, about("Nanoseconds that all of it took.")]
    load_duration: Annotated[int, about("Always 0: the model was loaded before.")] = 0
    prompt_eval_count: Annotated[int, about("Tokens of all texts.")]
