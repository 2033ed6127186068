"""Requests and responses of the endpoints beside the generating ones, as classes.

If vLLM and SGLang name one thing differently, an answer has both names.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from trioserve.http.api.openai.chat.messages import Messages, ToolChoice, Tools
from trioserve.http.api.schema import fields
from trioserve.http.api.schema.field_bounds import Text
from trioserve.http.api.schema.reading import Exclusive, TokenId, about, only
from trioserve.http.api.schema.refused_fields import Refusal

CHAT_FIELDS = (
    *("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"),
    *("tool_choice", "reasoning_effort"),
)
"""Fields of a chat that determine its prompt, in addition to the messages."""


_Model = Annotated[str | None, about("A served model's name; the first one by default.")]
_AddGenerationPrompt = Annotated[
    bool | None,
    about(
        "Let the template write the beginning of an answer; true if neither it nor "
        "`continue_final_message` is given."
    ),
]
_ContinueFinalMessage = Annotated[
    bool | None, about("Leave the last message open, for an answer that continues it.")
]
_TemplateArguments = Annotated[
    dict[str, Any] | None, about("More variables for the chat template.")
]
_ChosenTools = Annotated[
    ToolChoice | None, about("As in a chat; `none` leaves tools out of the text.")
]
_Template = Annotated[Any, only(refusal=Refusal.SERVED_TEMPLATE)]


def _text_only() -> msgspec.Meta:
    return only({}, refusal=Refusal.READING_MEDIA)


class ApplyTemplateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /apply-template``: the fields of a chat that determine its prompt."""

    model: _Model = None
    messages: Annotated[Messages, about("The messages of a chat.")]
    add_generation_prompt: _AddGenerationPrompt = None
    continue_final_message: _ContinueFinalMessage = None
    chat_template_kwargs: _TemplateArguments = None
    tools: Tools = None
    tool_choice: _ChosenTools = None
    reasoning_effort: fields.ReasoningEffort = None

    chat_template: _Template = None


class ApplyTemplateResponse(msgspec.Struct):
    """The text of a prompt."""

    prompt: Annotated[str, about("The prompt that the chat template makes of the messages.")]


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /tokenize``: texts, or the messages of a chat."""

    EXCLUSIVE: ClassVar = (
        Exclusive(("prompt", "messages"), required=True),
        *(Exclusive(("prompt", name)) for name in CHAT_FIELDS),
    )

    model: _Model = None
    prompt: Annotated[
        Text | Annotated[list[Text], msgspec.Meta(min_length=1)] | None,
        about("A text, or a list of texts; it or `messages` is required."),
    ] = None
    messages: Annotated[
        Messages | None,
        about("The messages of a chat, which the model's chat template puts into one text."),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        about(
            "Let the tokenizer add its special tokens, such as one for the beginning; by "
            "default true for a prompt and false for messages, for which the template writes "
            "its own."
        ),
    ] = None
    return_token_strs: Annotated[
        bool | None, about("Return the vocabulary's string of each token, too.")
    ] = None
    add_generation_prompt: _AddGenerationPrompt = None
    continue_final_message: _ContinueFinalMessage = None
    chat_template_kwargs: _TemplateArguments = None
    tools: Tools = None
    tool_choice: _ChosenTools = None
    reasoning_effort: fields.ReasoningEffort = None

    chat_template: _Template = None
    media_io_kwargs: Annotated[Any, _text_only()] = None
    mm_processor_kwargs: Annotated[Any, _text_only()] = None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """Token ids; a list of texts gives a list of counts, of lists of ids and of lists of strings.

    ``max_model_len`` is the limit of prompt and output tokens together.
    """

    count: Annotated[int | list[int], about("Number of tokens.")]
    max_model_len: Annotated[int, about("Most tokens of prompt and output together.")]
    tokens: Annotated[list[int | list[int]], about("Their ids.")]
    token_strs: Annotated[
        list[str | list[str]] | None,
        about("The vocabulary's strings of the tokens, if asked for."),
    ] = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /detokenize``."""

    model: _Model = None
    tokens: Annotated[
        list[TokenId | list[TokenId]],
        msgspec.Meta(
            description="Token ids, or a list of such lists.",
            extra_json_schema={
                "anyOf": [{"items": {"type": "integer"}}, {"items": {"type": "array"}}]
            },
        ),
    ]
    skip_special_tokens: Annotated[
        bool | None,
        about("Leave special tokens out; false by default, as in vLLM (SGLang: true)."),
    ] = None


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    """The text, or a list of texts: ``prompt`` is vLLM's name for it, ``text`` SGLang's."""

    prompt: Annotated[str | list[str], about("The text, by vLLM's name.")]
    text: Annotated[str | list[str], about("The text, by SGLang's name.")]


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """Properties of the tokenizer. Names are those of Hugging Face's ``tokenizer_config.json``."""

    tokenizer_class: Annotated[str, about("The library that runs it, and its kind.")]
    vocab_size: Annotated[int, about("Tokens in the vocabulary.")]
    model_max_length: Annotated[int, about("Most tokens of prompt and output together.")]
    special_tokens: Annotated[dict[str, int], about("Ids of special tokens by their text.")]
    bos_token: Annotated[str | None, about("The token at a text's beginning.")]
    eos_token: Annotated[str | None, about("The token at a text's end.")]
    eos_token_ids: Annotated[list[int], about("Tokens that end an output.")]
    chat_template: Annotated[str | None, about("The chat template, if there is one.")]


class VersionReply(msgspec.Struct):
    """The server's version."""

    version: Annotated[str, about("The server's version.")]


class Welcome(msgspec.Struct, kw_only=True):
    """The server's name, and where everything is described."""

    name: Annotated[str, about("Always `trioserve`.")]
    version: Annotated[str, about("The server's version.")]
    description: Annotated[str, about("The path where everything is described.")]


class HealthReply(msgspec.Struct):
    """``ok``, or the reason: ``draining``, ``no_worker``, ``stalled``, ``busy`` or ``timeout``."""

    status: Annotated[str, about("One word.")]


class SchedulerLoad(msgspec.Struct, kw_only=True):
    """A scheduler's load: its requests, the waiting ones, and the tokens held in the KV cache."""

    dp_rank: Annotated[int, about("Always 0.")]
    num_reqs: Annotated[int, about("Outputs that run or wait.")]
    num_waiting_reqs: Annotated[int, about("Outputs that wait.")]
    num_tokens: Annotated[int, about("Tokens of the KV cache that are held.")]


class Load(msgspec.Struct, kw_only=True):
    """The server's load: ``server_load`` is vLLM's count of requests being served.

    The sequences of requests run or wait; running ones hold ``num_tokens`` of
    ``max_total_num_tokens`` tokens of the KV cache.
    """

    server_load: Annotated[int, about("Requests that are being served.")]
    num_reqs: Annotated[int, about("Outputs that run or wait.")]
    num_running_reqs: Annotated[int, about("Outputs that run.")]
    num_waiting_reqs: Annotated[int, about("Outputs that wait.")]
    num_tokens: Annotated[int, about("Tokens of the KV cache that are held.")]
    max_total_num_tokens: Annotated[int, about("Tokens that fit into the KV cache.")]


class WorkerInfo(msgspec.Struct, kw_only=True):
    """The worker's device and limits."""

    device: Annotated[str, about("`cpu` or `cuda`.")]
    device_name: Annotated[str, about("Its name.")]
    computing: Annotated[str, about("The executor, and its weights.")]
    dtype: Annotated[str, about("The number format of weights and activations.")]
    num_pages: Annotated[int, about("Pages of the KV cache.")]
    page_size: Annotated[int, about("Tokens of a page.")]
    max_num_seqs: Annotated[int, about("Most outputs computed together.")]
    max_num_batched_tokens: Annotated[int, about("Most tokens computed in one step.")]


class ServerInfo(msgspec.Struct, kw_only=True):
    """The server's options, without secrets, and the values derived from them."""

    version: Annotated[str, about("The server's version.")]
    model: Annotated[str, about("The model's own name.")]
    served_model_name: Annotated[list[str], about("The names that it is served under.")]
    max_model_len: Annotated[int, about("Most tokens of prompt and output together.")]
    max_total_num_tokens: Annotated[int, about("Tokens that fit into the KV cache.")]
    default_sampling_params: Annotated[
        dict[str, Any],
        about(
            "Default sampling parameters of requests: those of the generation config, and "
            "`max_tokens`, if outputs are limited by default."
        ),
    ]
    page_size: Annotated[int, about("Tokens of a page of the KV cache.")]
    worker: Annotated[WorkerInfo, about("The worker.")]
    options: Annotated[dict[str, Any], about("All options by name.")]


class ModelInfo(msgspec.Struct, kw_only=True):
    """Properties of the model, in SGLang's form."""

    model_path: Annotated[str, about("The model that the options name.")]
    tokenizer_path: Annotated[str, about("Source of its tokenizer.")]
    is_generation: Annotated[bool, about("Always true.")] = True
    preferred_sampling_params: Annotated[
        dict[str, Any], about("The model's default sampling parameters.")
    ]
    weight_version: Annotated[
        str, about("`default`, or the version of the weights that replaced the first ones.")
    ]
    has_image_understanding: Annotated[bool, about("True if prompts may have images.")]
    has_audio_understanding: Annotated[bool, about("True if prompts may have audio clips.")]
    max_model_len: Annotated[int, about("Most tokens of prompt and output together.")]
    vocab_size: Annotated[int, about("Tokens in the vocabulary.")]
