"""Prompts as callers give them, and as the scheduler gets them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs

from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.embedded import EmbeddedSpan, EmbeddingsPrompt, SpeechPrompt
from trioserve.requests.embedded_parts import MEDIA_TYPES, OtherParts, take_out_parts
from trioserve.requests.media_arguments import (
    NO_ARGUMENTS,
    MediaArguments,
    as_processor_arguments,
    as_reading_arguments,
)


def _check_text(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str):
        raise InvalidRequest(f"a prompt's {attribute.name} must be a string", param="prompt")


def _as_token_ids(ids: Iterable[int]) -> tuple[int, ...]:
    """Return the ids as plain integers, whatever kind of integer they were."""
    try:
        return tuple(map(operator.index, ids))
    except TypeError:
        raise InvalidRequest("a prompt's token ids must be integers", param="prompt") from None


def _as_parts(media: Iterable[Any]) -> tuple[Mapping[str, Any], ...]:
    """Return content parts of media."""
    parts: list[Mapping[str, Any]] = []
    for index, part in enumerate(media):
        is_map = isinstance(part, Mapping)
        kind = part.get("type") if is_map else getattr(part, "kind", None)
        if not isinstance(kind, str) or kind not in MEDIA_TYPES:
            name = f"media[{index}]"
            raise InvalidRequest(f"{name} must be an image, an audio clip or a video", param=name)
        parts.append(part if is_map else {"type": kind, kind: part})
    return tuple(parts)


def _as_messages(messages: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    try:
        return tuple(messages)
    except TypeError:
        raise InvalidRequest("messages must be a list of messages", param="messages") from None


def _check_mapping(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{attribute.name} must be a map", param=attribute.name)


# A prompt is checked where it is made: further in, a wrong type would fail all requests.


def _processor_arguments() -> Any:
    return attrs.field(converter=as_processor_arguments, factory=dict, hash=False)


def _reading_arguments() -> Any:
    return attrs.field(converter=as_reading_arguments, factory=dict, hash=False)


@attrs.frozen
class TextPrompt:
    """Text to be continued.

    ``media`` are images, audio clips and videos in place of the texts of the model's media tokens,
    those of each kind in order: parts as in a chat's messages, :class:`~trioserve.ImagePart`,
    :class:`~trioserve.AudioPart` or :class:`~trioserve.VideoPart`. ``mm_processor_kwargs`` and
    ``media_io_kwargs`` are laid over the options of these names.
    """

    text: str = attrs.field(validator=_check_text)
    add_special_tokens: bool = True
    media: tuple[Mapping[str, Any], ...] = attrs.field(converter=_as_parts, default=())
    mm_processor_kwargs: Mapping[str, Any] = _processor_arguments()
    media_io_kwargs: Mapping[str, Any] = _reading_arguments()


@attrs.frozen
class TokensPrompt:
    """Token ids to be continued."""

    token_ids: tuple[int, ...] = attrs.field(converter=_as_token_ids)


@attrs.frozen(kw_only=True)
class ChatPrompt:
    """A conversation, rendered by the model's chat template.

    ``messages`` are the OpenAI API's: maps with ``role`` and ``content``: a string, or a list of
    text parts, of ``{"type": "prompt_embeds", "prompt_embeds": array}``, and of media
    (:func:`.media.content.as_media_part`). The template gets ``template_arguments`` as they are.
    ``mm_processor_kwargs`` and ``media_io_kwargs`` are laid over the options of these names.
    """

    messages: tuple[dict[str, Any], ...] = attrs.field(converter=_as_messages)
    others: OtherParts = attrs.field(init=False, default=OtherParts())
    """Parts that were taken out of ``messages``."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_arguments: dict[str, Any] = attrs.field(factory=dict, validator=_check_mapping)
    mm_processor_kwargs: Mapping[str, Any] = _processor_arguments()
    media_io_kwargs: Mapping[str, Any] = _reading_arguments()

    def __attrs_post_init__(self) -> None:
        messages, others = take_out_parts(self.messages)
        if others:
            object.__setattr__(self, "messages", messages)
            object.__setattr__(self, "others", others)


Prompt = TextPrompt | TokensPrompt | ChatPrompt | EmbeddingsPrompt | SpeechPrompt


def embeddings_in(prompt: Prompt) -> Sequence[EmbeddingsPrompt | SpeechPrompt]:
    """Return the embeddings that a caller gives in a prompt, in the order of their marks."""
    if isinstance(prompt, EmbeddingsPrompt | SpeechPrompt):
        return (prompt,)
    return prompt.others.embedded if isinstance(prompt, ChatPrompt) else ()


def media_in(prompt: Prompt) -> Sequence[tuple[str, Any]]:
    """Return the media of a prompt: the name in the request of each, and the part itself."""
    if isinstance(prompt, TextPrompt):
        return [
            (part.get("name") or f"media[{index}]", part) for index, part in enumerate(prompt.media)
        ]
    return prompt.others.media if isinstance(prompt, ChatPrompt) else ()


def media_arguments_of(prompt: Prompt) -> MediaArguments:
    """Return what a prompt says about its media."""
    if isinstance(prompt, TextPrompt | ChatPrompt):
        return MediaArguments(processor=prompt.mm_processor_kwargs, reading=prompt.media_io_kwargs)
    return NO_ARGUMENTS


class TokenizedPrompt(NamedTuple):
    """The ids of a request's prompt, and those of the output that it predicts."""

    ids: list[int]
    column: bytes
    """Column of those ids, as on the wire."""
    prediction: bytes
    """Column of the output's ids; empty if it predicts none."""
    embedded: list[EmbeddedSpan]
    """Positions with embeddings in place of tokens."""
