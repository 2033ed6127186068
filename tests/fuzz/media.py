"""Media of clients: damaged files are refused, or decoded within the limits."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from tests.fuzz.limits import address_space_bounded
from tests.fuzz.target import Target
from tests.support.media_files import (
    AUDIO_FORMATS,
    IMAGE_FORMATS,
    clip,
    encoded,
    hostile_images,
    noise,
)
from tests.support.video_files import CONTAINERS, hostile_videos, lying_videos, turned, video
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.media.audio import decode_audio
from trioserve.requests.media.fetching import MediaUrl
from trioserve.requests.media.images import decode_image
from trioserve.requests.media.parts import ImagePart
from trioserve.requests.media.public_addresses import is_public
from trioserve.requests.media.refusals import Refused
from trioserve.requests.media.sources import payload_of
from trioserve.requests.media.videos import decode_video
from trioserve.requests.media_arguments import (
    MAX_ARGUMENT_BYTES,
    MAX_ARGUMENTS,
    as_processor_arguments,
)

__all__ = ["TARGETS"]

MEMORY = 256 << 20
MAX_PIXELS = 1 << 16
MAX_SECONDS = 1.0
RATE = 16_000


def _check_image(data: bytes) -> None:
    with address_space_bounded(MEMORY):
        try:
            image = decode_image(data, MAX_PIXELS)
        except Refused:
            return
    assert image.mode == "RGB"
    assert 0 < image.width * image.height <= MAX_PIXELS


def _check_audio(data: bytes) -> None:
    with address_space_bounded(MEMORY):
        try:
            samples = decode_audio(data, RATE, MAX_SECONDS)
        except Refused:
            return
    assert samples.dtype == np.float32
    assert len(samples) <= MAX_SECONDS * RATE + 1
    assert np.isfinite(samples).all()


def _check_video(data: bytes) -> None:
    with address_space_bounded(MEMORY):
        try:
            found = decode_video(
                data, max_pixels=MAX_PIXELS, max_seconds=MAX_SECONDS, fps=8, num_frames=4
            )
            frames = list(found.frames)
        except Refused:
            return
    assert 0 <= found.duration <= MAX_SECONDS
    assert 0 < len(frames) <= 4
    assert len({image.size for _, image in frames}) == 1
    for seconds, image in frames:
        assert 0 <= seconds <= found.duration
        assert image.mode == "RGB"
        assert 0 < image.width * image.height <= MAX_PIXELS


def _images() -> list[bytes]:
    modes = (("PNG", "RGBA"), ("PNG", "L"), ("TIFF", "RGBA"), ("WEBP", "RGBA"))
    images = [encoded(noise(), name) for name in IMAGE_FORMATS]
    images += [encoded(noise(mode=mode), name) for name, mode in modes]
    images += [encoded(noise(), "TIFF", compression=name) for name in ("tiff_lzw", "jpeg")]
    return [*images, encoded(noise(), "JPEG", progressive=True), *hostile_images().values()]


def _clips() -> list[bytes]:
    return [clip(name, seconds=0.05, channels=count) for name in AUDIO_FORMATS for count in (1, 2)]


def _videos() -> list[bytes]:
    found = [video(encoder, 5) for encoder in CONTAINERS]
    others = [video(num_frames=5, fragmented=True), turned(found[0], 1)]
    return [*found, *others, *lying_videos().values(), *hostile_videos().values()]


def _check_url(text: str) -> None:
    try:
        url = MediaUrl.parse(text)
    except ValueError:
        return
    assert url.scheme in ("http", "https")
    assert url.target.startswith("/")
    assert 0 <= url.port < 65536
    # What goes into the head of a request can't end a line of it.
    assert f"{url.authority}{url.target}".isprintable()
    assert not set("@/?#\\ ") & set(url.host)
    assert is_public(url.host) in (False, True)


def _check_source(text: str) -> None:
    try:
        payload = payload_of(ImagePart(text).source, "image", "images[0]", 1000)
    except InvalidRequest:
        return
    sent = b"".join(map(bytes, payload.pieces()))
    assert len(sent) == payload.size <= 1400


def _check_arguments(given: object) -> None:
    try:
        found = as_processor_arguments(given)
    except InvalidRequest:
        return
    assert len(found) <= MAX_ARGUMENTS
    assert len(json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()) <= (
        MAX_ARGUMENT_BYTES
    )


_PIECES: Callable[..., st.SearchStrategy[str]] = lambda *pieces: st.lists(  # noqa: E731
    st.sampled_from(pieces) | st.text(max_size=3), max_size=12
).map("".join)
_URLS = _PIECES(
    *("http://", "https://", "HTTP:", "//", "a.example", "127.0.0.1", "[::1]", "[", "]", "@", ":"),
    *("80", "99999", "/", "?", "#", "\\", "\r\n", "%00", "..", " ", "\t", "ä", "0x7f.1", "。"),
)
_SOURCES = _PIECES(
    *("data:", "DATA:", "image/png", "audio/wav", ";base64", ",", ";", "=", "==", "AAAA" * 400),
    *("http://", "file:///", base64.b64encode(b"abc").decode(), "\0", "ä", "\ud800"),
)

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
)

TARGETS = (
    Target("image_file", _check_image, seeds=_images),
    Target("audio_file", _check_audio, seeds=_clips),
    Target("video_file", _check_video, seeds=_videos),
    Target("media_url", _check_url, _URLS),
    Target("media_source", _check_source, _SOURCES),
    Target("media_arguments", _check_arguments, _VALUES),
)
