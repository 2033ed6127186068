"""The media of a prompt, as a caller gives them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import attrs

from trioserve.protocol.errors import InvalidRequest

URL_BEGINNINGS = ("http://", "https://")
"""Beginnings of URLs that may be fetched, in small letters."""
DATA_BEGINNING = "data:"
MODES = ("RGB", "RGBA")
"""Pillow's modes of decoded pixels."""


@attrs.frozen
class Pixels:
    """A decoded image: rows of pixels from the top, each a byte for each letter of ``mode``."""

    mode: str
    width: int
    height: int
    data: bytes = attrs.field(repr=False)

    def __attrs_post_init__(self) -> None:
        sizes = (self.width, self.height)
        if self.mode not in MODES or min(sizes) < 1:
            raise InvalidRequest(f"an image can't be {self.mode} of {sizes}", param="image")
        if len(self.data) != self.width * self.height * len(self.mode):
            raise InvalidRequest(f"{len(self.data)} bytes aren't {sizes} pixels", param="image")


@attrs.frozen
class DecodedAudio:
    """Mono audio at the sample rate of the model's processor: float32 [samples]."""

    data: bytes = attrs.field(repr=False)


Source = bytes | Path | str | Pixels | DecodedAudio
"""Bytes of a file, its path, text (a URL, a data URL or base64), or what is decoded already."""


def _from_pillow(image: Any) -> Pixels:
    """Return the pixels of a Pillow image; transparent ones keep their transparency."""
    is_transparent = (
        image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info
    )
    mode = "RGBA" if is_transparent else "RGB"
    try:
        converted = image if image.mode == mode else image.convert(mode)
        width, height = converted.size
        return Pixels(mode, width, height, converted.tobytes())
    except (OSError, ValueError, SyntaxError) as error:
        raise InvalidRequest(f"the image can't be decoded: {error}", param="image") from error


def _as_source(value: Any, kind: str) -> Source:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, os.PathLike):
        # The child that reads it runs in the same folder only as long as this process stays there.
        return Path(os.path.abspath(os.fsdecode(value)))
    if isinstance(value, str):
        _check_text(value, kind)
        return value
    if kind == "image" and isinstance(value, Pixels):
        return value
    if kind == "audio" and isinstance(value, DecodedAudio):
        return value
    if kind == "image" and all(hasattr(value, name) for name in ("mode", "convert", "tobytes")):
        return _from_pillow(value)
    more = ", a Pillow image" if kind == "image" else ""
    raise InvalidRequest(
        f"{kind} must be bytes, a path{more}, or text with a URL or base64; "
        f"got {type(value).__name__}",
        param=kind,
    )


def _check_text(text: str, kind: str) -> None:
    beginning = text[:64].lower()
    if not text:
        raise InvalidRequest(f"{kind} must not be empty", param=kind)
    if ":" in beginning and not beginning.startswith((*URL_BEGINNINGS, DATA_BEGINNING)):
        raise InvalidRequest(
            f"{kind} must be an http or https URL, a data URL or base64; got {text[:40]!r}",
            param=kind,
        )


def _as_image(value: Any) -> Source:
    return _as_source(value, ImagePart.kind)


def _as_audio(value: Any) -> Source:
    return _as_source(value, AudioPart.kind)


def _as_video(value: Any) -> Source:
    return _as_source(value, VideoPart.kind)


@attrs.frozen
class ImagePart:
    """An image.

    Args:
        source: Bytes of a file, its path (:class:`os.PathLike`; text is never a path), an http,
            https or data URL, base64, or a Pillow image.

    Raises:
        InvalidRequest: ``source`` is something else.
    """

    kind: ClassVar[str] = "image"
    source: Source = attrs.field(converter=_as_image, repr=False)


@attrs.frozen
class AudioPart:
    """An audio clip.

    Args:
        source: Bytes of a file, its path (:class:`os.PathLike`; text is never a path), an http,
            https or data URL, base64, or :class:`DecodedAudio`.

    Raises:
        InvalidRequest: ``source`` is something else.
    """

    kind: ClassVar[str] = "audio"
    source: Source = attrs.field(converter=_as_audio, repr=False)


@attrs.frozen
class VideoPart:
    """A video.

    Args:
        source: Bytes of a file, its path (:class:`os.PathLike`; text is never a path), an http,
            https or data URL, or base64.

    Raises:
        InvalidRequest: ``source`` is something else.
    """

    kind: ClassVar[str] = "video"
    source: Source = attrs.field(converter=_as_video, repr=False)


MediaPart = ImagePart | AudioPart | VideoPart
