"""The messages of a request to ``/v1/messages``, and the blocks of their content, as classes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from trioserve.http.api.openai.chat.messages import MAX_PARTS
from trioserve.http.api.schema.field_bounds import Text
from trioserve.http.api.schema.reading import about, hint, only
from trioserve.http.api.schema.refused_fields import Refusal

ToolName = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern="^[a-zA-Z0-9_.-]+$")]


class TextInput(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="text"
):
    """Text in a message."""

    text: Annotated[Text, about("The text.")]
    cache_control: Annotated[Any, hint()] = None
    citations: Annotated[Any, only([], refusal=Refusal.DOCUMENTS)] = None


class Base64Source(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="base64"
):
    """An image in the request."""

    media_type: Annotated[
        Text, about("Its format; the data is what counts, so another one does no harm.")
    ]
    data: Annotated[Text, about("Its base64.")]


class UrlSource(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="url"
):
    """An image that the server fetches."""

    url: Annotated[Text, about("URL of a host that `--allowed-media-domains` names.")]


class ImageInput(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="image"
):
    """An image in a user's message."""

    source: Annotated[Base64Source | UrlSource, about("The image.")]
    cache_control: Annotated[Any, hint()] = None


class ThinkingInput(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="thinking"
):
    """Reasoning of an earlier answer."""

    thinking: Annotated[Text, about("The reasoning, for the chat template.")]
    signature: Annotated[Any, hint()] = None


class ToolUseInput(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="tool_use"
):
    """An earlier tool call."""

    id: Annotated[str, about("The name that the tool's result refers to.")]
    name: Annotated[ToolName, about("The tool's name.")]
    input: Annotated[dict[str, Any], about("The tool's input.")]
    cache_control: Annotated[Any, hint()] = None
    caller: Annotated[Any, hint()] = None
    toolset_name: Annotated[Any, only(refusal=Refusal.TOOLSETS)] = None


class ToolResultInput(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="tool_result"
):
    """A tool's result."""

    tool_use_id: Annotated[str, about("The call that this answers.")]
    content: Annotated[
        Text | Annotated[list[TextInput], msgspec.Meta(max_length=MAX_PARTS)] | None,
        about("The result, as a whole or in blocks of text."),
    ] = None
    is_error: Annotated[
        bool | None, about("Whether the call failed; the model reads `Error:` before the content.")
    ] = None
    cache_control: Annotated[Any, hint()] = None
    toolset_name: Annotated[Any, only(refusal=Refusal.TOOLSETS)] = None


Blocks = Annotated[
    list[TextInput | ImageInput | ThinkingInput | ToolUseInput | ToolResultInput],
    msgspec.Meta(max_length=MAX_PARTS),
]


class InputMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One message of a conversation."""

    role: Annotated[
        Literal["user", "assistant", "system"], about("The role of the message's author.")
    ]
    content: Annotated[Text | Blocks, about("The content, as a whole or in blocks.")]
