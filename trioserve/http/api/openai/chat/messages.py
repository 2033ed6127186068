"""The messages and tools of a chat, as classes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.http.api.schema.field_bounds import Text
from trioserve.http.api.schema.reading import about, hint, only
from trioserve.http.api.schema.refused_fields import Refusal

MAX_TOOLS = 128
"""Functions that one request may describe, as in the OpenAI API."""

MAX_MESSAGES = 2048
MAX_PARTS = 1024
"""Parts that the content of one message may have."""

FunctionName = Annotated[
    str, msgspec.Meta(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_.-]+$")
]


class TextPart(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="text"
):
    """A piece of a message's content."""

    text: Annotated[Text, about("The text.")]


class RefusalPart(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="refusal"
):
    """A piece of an earlier answer that refused; the template sees it as text."""

    refusal: Annotated[Text, about("The reason of the refusal.")]


class EmbedsPart(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="prompt_embeds"
):
    """Embeddings in place of a piece of a user's message."""

    prompt_embeds: Annotated[
        Text,
        about(
            "Embeddings `[tokens, hidden size]`: base64 of a safetensors file with one tensor, or "
            "of NumPy's format."
        ),
    ]


class MediaPlace(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The place of an audio clip or a video."""

    url: Annotated[
        Text,
        about(
            "A data URL, base64, or an http or https URL of a host that `--allowed-media-domains` "
            "names."
        ),
    ]


class ImageUrl(MediaPlace, forbid_unknown_fields=True, kw_only=True):
    """The place of an image."""

    detail: Annotated[Any, hint()] = None


def _source_of(given: MediaPlace | str) -> str:
    return given if isinstance(given, str) else given.url


class ImageUrlPart(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="image_url"
):
    """An image in a user's message."""

    image_url: Annotated[ImageUrl | Text, about("The image.")]
    uuid: Annotated[Any, hint()] = None

    @property
    def url(self) -> str:
        """The image's URL or base64."""
        return _source_of(self.image_url)


class NamedImage(ImageUrlPart, kw_only=True, tag="image_url"):
    """An image of another API's request, in which its field has another name."""

    field: str


class InputAudio(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The content of an audio clip."""

    data: Annotated[Text, about("The base64 of a WAV, FLAC, Ogg or MP3 file.")]
    format: Annotated[Any, hint()] = None


class InputAudioPart(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="input_audio"
):
    """An audio clip in a user's message."""

    input_audio: Annotated[InputAudio, about("The clip.")]
    uuid: Annotated[Any, hint()] = None
    prompt_cache_breakpoint: Annotated[Any, hint()] = None

    @property
    def source(self) -> str:
        """The clip's base64."""
        return self.input_audio.data


class AudioUrlPart(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="audio_url"
):
    """An audio clip in a user's message, in vLLM's form."""

    audio_url: Annotated[MediaPlace | Text, about("The clip.")]
    uuid: Annotated[Any, hint()] = None

    @property
    def source(self) -> str:
        """The clip's URL or base64."""
        return _source_of(self.audio_url)


class VideoUrlPart(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="video_url"
):
    """A video in a user's message, in vLLM's form."""

    video_url: Annotated[MediaPlace | Text, about("The video.")]
    uuid: Annotated[Any, hint()] = None

    @property
    def source(self) -> str:
        """The video's URL or base64."""
        return _source_of(self.video_url)


class MessageFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The function of an earlier tool call."""

    name: Annotated[FunctionName, about("The function's name.")]
    arguments: Annotated[
        Text | dict[Text, Any] | None,
        about("JSON as text or as an object; the template sees the object, if it is one."),
    ] = None


class MessageToolCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An earlier tool call."""

    id: Annotated[str | None, about("The name that the tool's answer refers to.")] = None
    type: Annotated[Literal["function"], about("There is no other kind.")] = "function"
    function: Annotated[MessageFunction, about("The called function, with its arguments.")]
    index: Annotated[Any, hint()] = None


Part = (
    TextPart
    | RefusalPart
    | EmbedsPart
    | ImageUrlPart
    | InputAudioPart
    | AudioUrlPart
    | VideoUrlPart
)
Parts = Annotated[list[Part], msgspec.Meta(max_length=MAX_PARTS)]
_Calls = Annotated[list[MessageToolCall], msgspec.Meta(max_length=MAX_TOOLS)]


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One message of a conversation; the chat template sees every field that is given.

    Fields that are null count as left out, except for the content.
    """

    role: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)],
        about(
            "The role of the message's author: system, user, assistant, tool, or another "
            "one that the template knows."
        ),
    ]
    content: Annotated[
        Text | Parts | UnsetType | None,
        about("The text, as a whole or in parts."),
    ] = UNSET
    name: Annotated[str | None, about("The author's name; most templates don't print it.")] = None
    refusal: Annotated[Text | None, about("For the template, if it prints it.")] = None
    reasoning: Annotated[
        Text | None, about("Reasoning before an earlier answer; `reasoning_content` is the same.")
    ] = None
    reasoning_content: Annotated[
        Text | None, about("Reasoning before an earlier answer, by the name that templates know.")
    ] = None
    tool_calls: Annotated[_Calls | None, about("Earlier tool calls.")] = None
    tool_call_id: Annotated[str | None, about("The call that this message answers.")] = None
    annotations: Annotated[Any, only([], refusal=Refusal.WEB_SEARCH)] = None
    audio: Annotated[Any, only(refusal=Refusal.MEDIA)] = None
    function_call: Annotated[
        MessageFunction | None, about("An earlier call, by the older name of `tool_calls`.")
    ] = None
    provider_specific_fields: Annotated[Any, hint()] = None
    """litellm's notes on an answer, which come back with it."""


Messages = Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]


FunctionParameters = Annotated[
    dict[str, Any] | None, about("The JSON schema of its arguments; none by default.")
]


class FunctionDefinition(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """A function that the model may call."""

    name: Annotated[FunctionName, about("The function's name.")]
    description: Annotated[Text | None, about("A description for the model.")] = None
    parameters: FunctionParameters = None
    strict: Annotated[
        bool | None, about("Arguments have to follow the schema, enforced by a grammar.")
    ] = None
    defer_loading: Annotated[Any, only(False, refusal=Refusal.TOOL_SEARCH)] = None


class ChatTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool: a function."""

    type: Annotated[Literal["function"], about("There is no other kind.")] = "function"
    function: Annotated[FunctionDefinition, about("The function to call, with its arguments.")]


Tools = Annotated[
    Annotated[list[ChatTool], msgspec.Meta(max_length=MAX_TOOLS)] | None,
    about("Functions that the model may call."),
]


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A function, named."""

    name: Annotated[FunctionName, about("The name of one of the tools.")]


class ChosenTool(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="function"
):
    """The function that has to be called."""

    function: Annotated[ChosenFunction, about("The function.")]


class AllowedTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One of the tools that may be called."""

    function: Annotated[ChosenFunction, about("The tool.")]
    type: Annotated[Literal["function"], about("There is no other kind.")] = "function"


AllowedMode = Annotated[
    Literal["auto", "required"], about("`required` if one of them has to be called.")
]


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The tools that may be called, and whether one has to be."""

    mode: AllowedMode
    tools: Annotated[
        Annotated[list[AllowedTool], msgspec.Meta(min_length=1, max_length=MAX_TOOLS)],
        about("The tools that may be called; the prompt shows the others, too."),
    ]


class AllowedToolsChoice(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="allowed_tools"
):
    """A choice among some of the tools."""

    allowed_tools: Annotated[AllowedTools, about("The tools.")]


ToolChoice = Literal["none", "auto", "required"] | ChosenTool | AllowedToolsChoice
