"""Parts are checked when they are made, and measured before they are decoded."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from tests.support.media_files import noise
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.media.parts import AudioPart, ImagePart, Pixels
from trioserve.requests.media.sources import Payload, payload_of

NAME = "messages[0].content[1]"
LIMIT = 1000


def payload(source: Any, kind: str = "image") -> Payload:
    part = ImagePart(source) if kind == "image" else AudioPart(source)
    return payload_of(part.source, part.kind, NAME, LIMIT)


def sent(found: Payload) -> bytes:
    data = b"".join(map(bytes, found.pieces()))
    assert len(data) == found.size
    return data


@pytest.mark.parametrize("cls", [ImagePart, AudioPart])
def test_a_part_is_bytes_a_path_or_text(cls: type) -> None:
    assert cls(bytearray(b"ab")).source == cls(memoryview(b"ab")).source == cls(b"ab").source
    assert cls(Path("a")).source == Path.cwd() / "a"
    for text in ("AAAA", "https://a/b", "HTTP://a", "data:;base64,AA==", "Data:x"):
        assert cls(text).source == text
    for value in (None, 3, ["a"], object()):
        with pytest.raises(InvalidRequest, match=f"{cls.kind} must be bytes, a path") as raised:
            cls(value)
        assert raised.value.param == cls.kind
    with pytest.raises(InvalidRequest, match="must not be empty"):
        cls("")


@pytest.mark.parametrize(
    "text", ["file:///etc/passwd", "ftp://a/b", "gopher://a", "javascript:x()"]
)
def test_no_other_urls_are_taken(text: str) -> None:
    with pytest.raises(InvalidRequest, match="image must be an http or https URL, a data URL or"):
        ImagePart(text)


def test_text_is_never_a_path() -> None:
    assert payload("/etc/passwd").encoding == "base64"


def test_a_pillow_image_keeps_its_transparency() -> None:
    image = noise(3, 2)
    assert ImagePart(image).source == Pixels("RGB", 3, 2, image.tobytes())
    clear = noise(3, 2, "RGBA")
    assert ImagePart(clear).source == Pixels("RGBA", 3, 2, clear.tobytes())
    assert ImagePart(image.convert("L")).source.mode == "RGB"
    assert ImagePart(clear.convert("LA")).source.mode == "RGBA"
    with pytest.raises(InvalidRequest, match="audio must be bytes, a path, or text"):
        AudioPart(image)


@pytest.mark.parametrize(
    "values", [("CMYK", 1, 1, bytes(4)), ("RGB", 0, 1, b""), ("RGB", 2, 2, bytes(11))]
)
def test_pixels_have_their_size(values: Any) -> None:
    with pytest.raises(InvalidRequest):
        Pixels(*values)


def test_bytes_and_texts_are_sent_as_they_are() -> None:
    assert sent(payload(b"abc")) == b"abc"
    text = base64.b64encode(bytes(600)).decode()
    assert sent(payload(text)) == text.encode()
    assert sent(payload(f"data:image/png;base64,{text}")) == text.encode()
    assert sent(payload(f"DATA:;BASE64,{text}")) == text.encode()
    assert sent(payload("data:audio/x;charset=a;base64,AAAA", "audio")) == b"AAAA"
    assert sent(payload("ä" * 8)) == b"?" * 8  # which base64 doesn't have
    assert payload(Path("/a")).encoding == "path"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("data:image/png,abc", "a data URL must have the form data:image/…;base64,…"),
        ("data:image/png;base64", "a data URL must have the form"),
        ("data:" + "a" * 300 + ";base64,AAAA", "a data URL must have the form"),
        ("data:audio/wav;base64,AAAA", "has the type 'audio/wav', which is no image"),
        ("data:text/html;base64,AAAA", "has the type 'text/html', which is no image"),
    ],
)
def test_a_data_url_has_base64_of_its_kind(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        payload(text)
    assert str(raised.value).startswith(f"{NAME}: ")
    assert reason in str(raised.value)
    assert raised.value.param == NAME


def test_what_is_too_large_is_refused_before_it_is_decoded() -> None:
    for data in (bytes(LIMIT), base64.b64encode(bytes(LIMIT)).decode()):
        assert payload(data).size >= LIMIT
    large = base64.b64encode(bytes(LIMIT + 1)).decode()
    for source in (bytes(LIMIT + 1), large, f"data:image/png;base64,{large}"):
        with pytest.raises(InvalidRequest) as raised:
            payload(source)
        assert str(raised.value) == (
            f"{NAME}: the image has 1001 bytes, more than --limit-mm-bytes (1000) allows"
        )
        assert raised.value.param == NAME
