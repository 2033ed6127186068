"""Decoding of images by Pillow, within limits that are checked before anything is decoded.

It runs in a child process.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from trioserve.requests.media.refusals import Refused, undecodable

if TYPE_CHECKING:
    from PIL.Image import Image

_BEGINNINGS = {
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
}
_FORMATS = "PNG, JPEG, WebP, GIF, BMP and TIFF"
_WHITE = (255, 255, 255, 255)
_WEBP_HEADER = 30


def format_of(data: bytes) -> str:
    """Return Pillow's name of the format in which ``data`` begins.

    Raises:
        Refused: It is none that is read.
    """
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    for beginning, name in _BEGINNINGS.items():
        if data.startswith(beginning):
            return name
    raise Refused(f"the image has an unknown format: {_FORMATS} are read")


def decode_image(data: bytes, max_pixels: int) -> Image:
    """Return the first frame of an image as RGB, upright, with white behind what is transparent.

    Raises:
        Refused: The file isn't an image, is damaged, or has more than ``max_pixels``.
        MemoryError: There isn't enough memory.
    """
    import PIL.Image

    name = format_of(data)
    if name == "WEBP":
        # Pillow allocates the canvas when it opens such a file.
        check_pixels(*_webp_size(data), max_pixels)
    # Only the size in the header is known at first, and checked below.
    PIL.Image.MAX_IMAGE_PIXELS = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image: Image = PIL.Image.open(io.BytesIO(data), formats=[name])
            check_pixels(*image.size, max_pixels)
            PIL.Image.MAX_IMAGE_PIXELS = max_pixels
            image.load()
            _turn_upright(image)
            return as_rgb(image)
    except (Refused, MemoryError):
        raise
    except Exception as error:  # Pillow's plugins raise many kinds for damaged files.
        raise undecodable("image", error) from error


def import_decoders() -> None:
    """Import Pillow with the plugins of all formats that are read.

    Raises:
        ImportError: Pillow isn't installed.
    """
    # The others are among those that Pillow imports itself when it opens a file.
    from PIL import TiffImagePlugin, WebPImagePlugin  # noqa: F401


def image_of_pixels(mode: str, width: int, height: int, data: bytes, max_pixels: int) -> Image:
    """Return the image that decoded pixels are, as RGB.

    Raises:
        Refused: It has more than ``max_pixels``.
    """
    import PIL.Image

    check_pixels(width, height, max_pixels)
    return as_rgb(PIL.Image.frombytes(mode, (width, height), data))


def check_pixels(width: int, height: int, max_pixels: int, kind: str = "image") -> None:
    """Refuse an image, or a video of such frames, of more than ``max_pixels``.

    Raises:
        Refused: It has more, or none.
    """
    if width < 1 or height < 1:
        raise Refused(f"the {kind} has {width} x {height} pixels")
    if width * height > max_pixels:
        raise Refused(
            f"the {kind} has {width} x {height} pixels, more than --limit-mm-pixels "
            f"({max_pixels}) allows"
        )


def _turn_upright(image: Image) -> None:
    """Turn the image as its metadata says. Metadata that can't be read changes nothing."""
    import PIL.ImageOps

    try:
        PIL.ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:  # Pillow raises many kinds for damaged metadata.
        return


def as_rgb(image: Image) -> Image:
    """Return ``image`` as RGB, with white behind what is transparent."""
    import PIL.Image

    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):  # Pillow would take 16 bits for 8, and cut off large numbers.
        return PIL.Image.fromarray(_to_eight_bits(np.asarray(image))).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        return PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, _WHITE), image).convert(
            "RGB"
        )
    return image.convert("RGB")


def _to_eight_bits(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the upper eight of 16 bits."""
    upper: np.ndarray[Any, Any] = np.clip(numbers, 0, 0xFFFF) >> 8
    return upper.astype(np.uint8)


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return width and height of a WebP file's canvas.

    Raises:
        Refused: The header isn't valid.
    """
    if len(data) < _WEBP_HEADER:
        raise Refused("the image can't be decoded: it ends within its header")
    chunk = data[12:16]
    if chunk == b"VP8X":
        return _number(data[24:27]) + 1, _number(data[27:30]) + 1
    if chunk == b"VP8L":
        bits = _number(data[21:25])
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if chunk == b"VP8 ":
        return _number(data[26:28]) & 0x3FFF, _number(data[28:30]) & 0x3FFF
    raise Refused("the image can't be decoded: no WebP header")


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")
