"""Embeddings and media among the parts of a conversation, and their marks in its text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.embedded import EmbeddedMedia, EmbeddingsPrompt

PART_TYPE = "prompt_embeds"
MEDIA_TYPES = {
    "image": "image",
    "image_url": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""Kinds of media by the types of content parts."""
PLURALS = {"image": "images", "audio": "audio clips"}
"""Words for several media, by their kind."""
_SECRET = secrets.token_hex(8)
"""Part of every mark, so that no text of a client has one."""
_MARK = re.compile(f"<embeds-{_SECRET}-([0-9]+)>")


@attrs.frozen
class OtherParts:
    """The parts of a conversation that aren't text, each kind in the order of the messages."""

    embedded: tuple[EmbeddingsPrompt, ...] = ()
    media: tuple[tuple[str, Any], ...] = ()
    """Name in the request of each, and the part itself."""

    def __bool__(self) -> bool:
        return bool(self.embedded or self.media)


def take_out_parts(messages: Sequence[Any]) -> tuple[tuple[Any, ...], OtherParts]:
    """Return ``messages`` for a template, and the parts that it doesn't get.

    A mark as text is in place of embeddings. Media leave a part of their kind.
    """
    embedded: list[EmbeddingsPrompt] = []
    media: list[tuple[str, Any]] = []

    def shown(part: Any, name: str) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == PART_TYPE:
            given = part.get(PART_TYPE)
            is_made = isinstance(given, EmbeddingsPrompt)
            embedded.append(given if is_made else EmbeddingsPrompt(given))
            return {"type": "text", "text": f"<embeds-{_SECRET}-{len(embedded) - 1}>"}
        if isinstance(kind, str) and kind in MEDIA_TYPES:
            media.append((part.get("name") or name, part))
            return {"type": MEDIA_TYPES[kind]}
        return part

    def without(message: Any, index: int) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, (list, tuple)):
            return message
        name = f"messages[{index}].content"
        parts = [shown(part, f"{name}[{place}]") for place, part in enumerate(content)]
        return {**message, "content": parts}

    found = tuple(without(message, index) for index, message in enumerate(messages))
    return found, OtherParts(tuple(embedded), tuple(media))


def ids_with_marks(
    text: str,
    embedded: Sequence[EmbeddingsPrompt],
    media: Sequence[EmbeddedMedia],
    media_token: str,
    encode: Callable[[str], list[int]],
    param: str,
) -> list[int]:
    """Return the ids of a text, with marks of its other parts in their places.

    The numbers of ``media`` follow those of ``embedded``. ``media_token`` is what a template prints
    for a medium.
    ``param`` is the field of the request that the text comes from.

    Raises:
        InvalidRequest: The text doesn't have the place of each of them once.
    """
    found = re.compile(f"{_MARK.pattern}|({re.escape(media_token)})" if media else _MARK.pattern)
    ids: list[int] = []
    numbers: list[int] = []
    num_media = end = 0
    for match in found.finditer(text):
        if match.start() > end:
            ids += encode(text[end : match.start()])
        end = match.end()
        if match[1] is None:
            num_media += 1
            if num_media <= len(media):
                number = len(embedded) + num_media - 1
                ids += media[num_media - 1].marks(number)
            continue
        numbers.append(int(match[1]))
        ids += embedded[numbers[-1]].marks(numbers[-1])
    if end < len(text):
        ids += encode(text[end:])
    if sorted(numbers) != list(range(len(embedded))):
        raise _not_printed(len(numbers), len(embedded), "prompt_embeds parts")
    if num_media != len(media):
        _refuse_count(num_media, media, media_token, param)
    return ids


def _refuse_count(count: int, media: Sequence[EmbeddedMedia], token: str, param: str) -> None:
    kind = PLURALS[media[0].kind]
    if count > len(media):
        raise InvalidRequest(
            f"{param} has the text {token!r}, which stands for {kind}, {count} times, and there "
            f"are {len(media)}",
            param=param,
        )
    if param == "messages":
        raise _not_printed(count, len(media), kind)
    raise InvalidRequest(
        f"{param} must have the text {token!r} once for each of its {len(media)} {kind}, and has "
        f"it {count} times",
        param=param,
    )


def _not_printed(count: int, given: int, kind: str) -> InvalidRequest:
    return InvalidRequest(f"the chat template printed {count} of {given} {kind}", param="messages")
