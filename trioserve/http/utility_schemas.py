"""Requests and responses of the endpoints beside the generating ones, as classes.

Where vLLM and SGLang have different names for the same, an answer has both.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from trioserve.http.chat_messages import MAX_TOOLS, ChatMessage, ChatTool, ToolChoice
from trioserve.http.schemas import Exclusive, TokenId, about, only

__all__ = [
    "CHAT_FIELDS",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "HealthReply",
    "Load",
    "ModelInfo",
    "SchedulerLoad",
    "ServerInfo",
    "TokenizeRequest",
    "TokenizeResponse",
    "TokenizerInfo",
    "VersionReply",
    "Welcome",
    "WorkerInfo",
]

CHAT_FIELDS = (
    *("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"),
    *("tool_choice", "reasoning_effort"),
)
"""Fields of a tokenize request that are those of a chat, and go with messages only."""


def _text_only() -> msgspec.Meta:
    return only({}, why="the models that are served read text only")


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /tokenize``: texts, or the messages of a chat."""

    EXCLUSIVE: ClassVar = (
        Exclusive(("prompt", "messages"), required=True),
        *(Exclusive(("prompt", name)) for name in CHAT_FIELDS),
    )

    model: Annotated[
        str | None, about("A served model's name; the first one if it isn't given.")
    ] = None
    prompt: Annotated[
        str | Annotated[list[str], msgspec.Meta(min_length=1)] | None,
        about("A text, or a list of texts; it or `messages` has to be given."),
    ] = None
    messages: Annotated[
        Annotated[list[ChatMessage], msgspec.Meta(min_length=1)] | None,
        about("The messages of a chat, which the model's chat template puts into one text."),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        about(
            "Let the tokenizer add its special tokens, such as one for the beginning; if it isn't "
            "given, true for a prompt and false for messages, whose template writes its own."
        ),
    ] = None
    return_token_strs: Annotated[
        bool | None, about("Tell each token as it stands in the vocabulary, too.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None,
        about(
            "Let the template write what begins an answer; true if neither it nor "
            "`continue_final_message` is given."
        ),
    ] = None
    continue_final_message: Annotated[
        bool | None, about("Leave the last message open, as for an answer that goes on with it.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, about("More variables for the chat template.")
    ] = None
    tools: Annotated[
        Annotated[list[ChatTool], msgspec.Meta(max_length=MAX_TOOLS)] | None,
        about("Functions that the model may call."),
    ] = None
    tool_choice: Annotated[
        ToolChoice | None, about("As in a chat; `none` leaves tools out of the text.")
    ] = None
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        about("For the chat template; refused where that doesn't look at it."),
    ] = None

    chat_template: Annotated[
        Any, only(why="a template is a program; the server's own is given by --chat-template")
    ] = None
    media_io_kwargs: Annotated[Any, _text_only()] = None
    mm_processor_kwargs: Annotated[Any, _text_only()] = None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """Token ids; a list of texts gives a list of counts, of lists of ids and of lists of strings.

    ``max_model_len`` is how many tokens prompt and output may have together.
    """

    count: int | list[int]
    max_model_len: int
    tokens: list[int | list[int]]
    token_strs: list[str | list[str]] | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /detokenize``."""

    model: Annotated[
        str | None, about("A served model's name; the first one if it isn't given.")
    ] = None
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
        about("Leave special tokens out; false if it isn't given, as in vLLM (SGLang: true)."),
    ] = None


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    """The text, or a list of texts: ``prompt`` is vLLM's name for it, ``text`` SGLang's."""

    prompt: str | list[str]
    text: str | list[str]


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """What the tokenizer is. Names are those of Hugging Face's ``tokenizer_config.json``."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    special_tokens: dict[str, int]
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: list[int]
    chat_template: str | None


class VersionReply(msgspec.Struct):
    """The server's version."""

    version: str


class Welcome(msgspec.Struct, kw_only=True):
    """Who is here, and where everything is described."""

    name: str
    version: str
    description: str


class HealthReply(msgspec.Struct):
    """``ok``, or why not: ``draining``, ``no_worker``, ``busy`` or ``timeout``."""

    status: str


class SchedulerLoad(msgspec.Struct, kw_only=True):
    """A scheduler's load: requests there are, those that wait, and tokens held in the KV cache."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


class Load(msgspec.Struct, kw_only=True):
    """How much there is to do: ``server_load`` is vLLM's count of requests being served.

    The sequences of requests run or wait; ``num_tokens`` of ``max_total_num_tokens`` tokens of the
    KV cache are held by those that run.
    """

    server_load: int
    num_reqs: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    max_total_num_tokens: int


class WorkerInfo(msgspec.Struct, kw_only=True):
    """What computes, and its limits."""

    device: str
    device_name: str
    dtype: str
    num_pages: int
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


class ServerInfo(msgspec.Struct, kw_only=True):
    """The server's options, without secrets, and what came of them."""

    version: str
    model: str
    served_model_name: list[str]
    max_model_len: int
    max_total_num_tokens: int
    worker: WorkerInfo
    options: dict[str, Any]


class ModelInfo(msgspec.Struct, kw_only=True):
    """What the model is, in SGLang's words."""

    model_path: str
    tokenizer_path: str
    is_generation: bool = True
    preferred_sampling_params: dict[str, Any]
    weight_version: str = "default"
    has_image_understanding: bool = False
    has_audio_understanding: bool = False
    max_model_len: int
    vocab_size: int
