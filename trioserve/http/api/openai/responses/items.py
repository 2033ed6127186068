"""The items of a response's input, as classes; an earlier answer's output may be among them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from trioserve.http.api.openai.chat.messages import MAX_PARTS, FunctionName, RefusalPart
from trioserve.http.api.schema.field_bounds import Text
from trioserve.http.api.schema.reading import Identifier, about, hint, only
from trioserve.http.api.schema.refused_fields import Refusal

MAX_ITEMS = 4096

_Id = Annotated[str | None, hint()]
_Status = Annotated[Literal["in_progress", "completed", "incomplete"] | None, hint()]
_Caller = Annotated[Any, only({"type": "direct"}, refusal=Refusal.CALLING_PROGRAMS)]
_Namespace = Annotated[Any, only(refusal=Refusal.NAMESPACES)]
_Async = Annotated[Any, only(False, refusal=Refusal.ASYNCHRONOUS_CALLS)]


class InputText(
    msgspec.Struct,
    forbid_unknown_fields=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="type",
    tag="input_text",
):
    """Text for the model."""

    text: Annotated[Text, about("The text.")]
    prompt_cache_breakpoint: Annotated[Any, hint()] = None


class InputImage(
    msgspec.Struct,
    forbid_unknown_fields=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="type",
    tag="input_image",
):
    """An image for the model."""

    image_url: Annotated[
        Text, about("A data URL, or a URL of a host that `--allowed-media-domains` names.")
    ]
    detail: Annotated[Any, hint()] = None
    file_id: Annotated[Any, only(refusal=Refusal.FILES)] = None


class OutputText(
    msgspec.Struct,
    forbid_unknown_fields=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="type",
    tag="output_text",
):
    """Text of an earlier answer."""

    text: Annotated[Text, about("The text.")]
    annotations: Annotated[Any, hint()] = None
    logprobs: Annotated[Any, hint()] = None


ContentPart = InputText | InputImage | OutputText | RefusalPart
_Content = Annotated[list[ContentPart], msgspec.Meta(max_length=MAX_PARTS)]


class MessageItem(
    msgspec.Struct,
    forbid_unknown_fields=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="type",
    tag="message",
):
    """A message of the conversation. An item without a `type` is one."""

    role: Annotated[
        Literal["user", "assistant", "system", "developer"],
        about("The role of the message's author."),
    ]
    content: Annotated[Text | _Content, about("The content, as a whole or in parts.")]
    id: _Id = None
    status: _Status = None
    phase: Annotated[Literal["commentary", "final_answer"] | None, hint()] = None


class CallItem(
    msgspec.Struct,
    forbid_unknown_fields=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="type",
    tag="function_call",
):
    """An earlier call of a function."""

    call_id: Annotated[Identifier, about("The name that the call's output refers to.")]
    name: Annotated[FunctionName, about("The function's name.")]
    arguments: Annotated[Text, about("JSON as text.")]
    id: _Id = None
    status: _Status = None
    caller: _Caller = None
    namespace: _Namespace = None
    async_: _Async = msgspec.field(default=None, name="async")


class CallOutputItem(
    msgspec.Struct,
    forbid_unknown_fields=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="type",
    tag="function_call_output",
):
    """The result of a function call."""

    call_id: Annotated[Identifier, about("The call that this is the output of.")]
    output: Annotated[
        Text | Annotated[list[InputText], msgspec.Meta(max_length=MAX_PARTS)],
        about("The result, as a whole or in parts."),
    ]
    id: _Id = None
    status: _Status = None
    name: Annotated[str | None, hint()] = None
    caller: _Caller = None
    namespace: _Namespace = None


class ReasoningText(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="reasoning_text"
):
    """A piece of reasoning."""

    text: Annotated[Text, about("The model's reasoning, without the marks.")]


class ReasoningItem(
    msgspec.Struct,
    forbid_unknown_fields=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="type",
    tag="reasoning",
):
    """Reasoning before an earlier answer; most chat templates leave it out again."""

    content: Annotated[
        Annotated[list[ReasoningText], msgspec.Meta(max_length=MAX_PARTS)] | None,
        about("The reasoning, in plain words."),
    ] = None
    summary: Annotated[Any, hint()] = None
    id: _Id = None
    status: _Status = None
    encrypted_content: Annotated[Any, only(refusal=Refusal.ENCRYPTED_REASONING)] = None


InputItem = MessageItem | CallItem | CallOutputItem | ReasoningItem
InputItems = Annotated[list[InputItem], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]
