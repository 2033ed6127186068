"""Images of every format are decoded; damaged and hostile ones are refused before it."""

from __future__ import annotations

import os
import zlib

import numpy as np
import PIL.Image
import pytest

from tests.support.media_files import (
    IMAGE_FORMATS,
    LARGE,
    SVG,
    encoded,
    hostile_images,
    noise,
    png,
    png_chunk,
)
from trioserve.requests.media.images import decode_image, format_of, image_of_pixels
from trioserve.requests.media.refusals import Refused

MAX_PIXELS = 1 << 20
HOSTILE = hostile_images()


def pixels(data: bytes) -> np.ndarray:
    image = decode_image(data, MAX_PIXELS)
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize("name", IMAGE_FORMATS)
def test_a_format_is_read(name: str) -> None:
    image = noise()
    data = encoded(image, name)
    assert format_of(data) == name
    found = pixels(data)
    if name in ("PNG", "BMP", "TIFF"):
        assert np.array_equal(found, np.asarray(image))
    else:
        assert found.shape == (16, 24, 3)


@pytest.mark.parametrize("name", ["PNG", "GIF", "WEBP"])
def test_an_animation_is_its_first_frame(name: str) -> None:
    first, second = noise(seed=1).convert("P"), noise(seed=2).convert("P")
    options = {"save_all": True, "append_images": [second], "lossless": True}
    if name != "WEBP":
        del options["lossless"]
    assert np.array_equal(pixels(encoded(first, name, **options)), np.asarray(first.convert("RGB")))


def test_white_is_behind_what_is_transparent() -> None:
    image = PIL.Image.new("RGBA", (2, 1), (10, 20, 30, 255))
    image.putpixel((1, 0), (10, 20, 30, 0))
    assert pixels(encoded(image, "PNG")).tolist() == [[[10, 20, 30], [255, 255, 255]]]
    palette = PIL.Image.new("P", (1, 1), 0)
    assert pixels(encoded(palette, "PNG", transparency=0)).tolist() == [[[255, 255, 255]]]
    gray = PIL.Image.new("LA", (1, 1), (10, 0))
    assert pixels(encoded(gray, "PNG")).tolist() == [[[255, 255, 255]]]


def test_sixteen_bits_become_eight() -> None:
    image = PIL.Image.fromarray(np.array([[0, 0x1234, 0xFFFF]], np.uint16))
    assert pixels(encoded(image, "PNG"))[..., 0].tolist() == [[0, 0x12, 0xFF]]


def test_an_image_is_turned_upright() -> None:
    image = noise()
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # a quarter to the right
    turned = pixels(encoded(image, "PNG", exif=exif))
    assert np.array_equal(turned, np.rot90(np.asarray(image), -1))
    damaged = encoded(image, "PNG", exif=b"Exif\0\0" + os.urandom(50))
    assert np.array_equal(pixels(damaged), np.asarray(image))


@pytest.mark.parametrize("name", HOSTILE)
def test_an_image_of_too_many_pixels_is_refused_by_its_header(name: str) -> None:
    data = HOSTILE[name]
    assert len(data) < 4000
    with pytest.raises(Refused) as raised:
        decode_image(data, MAX_PIXELS)
    sides = "16384 x 16384" if "lossless" in name else f"{LARGE} x {LARGE}"
    assert str(raised.value) == (
        f"the image has {sides} pixels, more than --limit-mm-pixels ({MAX_PIXELS}) allows"
    )


def test_the_limit_is_exact() -> None:
    data = encoded(noise(24, 16), "PNG")
    assert decode_image(data, 24 * 16).size == (24, 16)
    with pytest.raises(Refused, match="24 x 16 pixels"):
        decode_image(data, 24 * 16 - 1)
    with pytest.raises(Refused, match="2 x 1 pixels"):
        image_of_pixels("RGB", 2, 1, bytes(6), 1)


@pytest.mark.parametrize("name", IMAGE_FORMATS)
def test_a_truncated_image_is_refused(name: str) -> None:
    data = encoded(noise(), name)
    for length in (12, 20, 40, len(data) // 2):
        with pytest.raises(Refused, match=r"^the image "):
            decode_image(data[:length], MAX_PIXELS)


def test_compressed_text_in_an_image_stays_small() -> None:
    bomb = png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(20 << 20)))
    assert len(bomb) < 30_000
    with pytest.raises(Refused, match=r"can't be decoded: .*too large"):
        decode_image(png(2, 2, bomb), MAX_PIXELS)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"R",
        SVG,
        b"%PDF-1.7\n" + encoded(noise(), "JPEG"),
        b"RIFF\x24\0\0\0WAVEfmt ",
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
        b"\0\0\1\0",  # an icon
        b"8BPS\0\1",
    ],
)
def test_other_formats_are_unknown(data: bytes) -> None:
    with pytest.raises(Refused, match="unknown format: PNG, JPEG, WebP, GIF, BMP and TIFF"):
        decode_image(data, MAX_PIXELS)


def test_an_image_is_of_the_format_in_which_it_begins() -> None:
    """A file of two formats is nothing but its first one."""
    image = noise()
    assert np.array_equal(pixels(encoded(image, "PNG") + b"PK\3\4" + SVG), np.asarray(image))
    for first, second in (("PNG", "JPEG"), ("BMP", "PNG"), ("TIFF", "GIF")):
        beginning = encoded(image, first)[:8]
        with pytest.raises(Refused, match="can't be decoded"):
            decode_image(beginning + encoded(image, second), MAX_PIXELS)
