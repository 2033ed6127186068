"""The media among the parts of a conversation's messages, in the forms of the APIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.media.parts import AudioPart, ImagePart, MediaPart, VideoPart

_PARTS: dict[str, type[MediaPart]] = {each.kind: each for each in (ImagePart, AudioPart, VideoPart)}


def as_media_part(part: Any, name: str) -> MediaPart:
    """Return a content part's image, audio clip or video.

    Args:
        part: ``{"type": "image", "image": …}`` with an :class:`ImagePart` or what it takes, or the
            OpenAI API's ``image_url``, ``input_audio``, ``audio_url`` or ``video_url``.
        name: Its place in the request, for errors.

    Raises:
        InvalidRequest: It is none of these; ``param`` is ``name``.
    """
    if isinstance(part, MediaPart):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise InvalidRequest(f"{name}: a content part needs a type", param=name)
    given = part.get(kind)
    try:
        if kind in _PARTS:
            return given if isinstance(given, MediaPart) else _PARTS[kind](given)
        if kind.removesuffix("_url") in _PARTS:
            url = given.get("url") if isinstance(given, Mapping) else given
            return _PARTS[kind.removesuffix("_url")](url)
        if kind == "input_audio" and isinstance(given, Mapping):
            return AudioPart(given.get("data"))
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error}", param=name) from None
    raise InvalidRequest(f"{name}: a content part has the type {kind!r}", param=name)
