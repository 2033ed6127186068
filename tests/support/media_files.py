"""Images and audio for tests: sound files, and hostile ones of a few bytes."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import PIL.Image
import soundfile

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
AUDIO_FORMATS = ("WAV", "FLAC", "OGG", "MP3")
LARGE = 65535
"""Width and height in the headers of hostile images."""
SVG = (
    b'<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">'
    b'<!ENTITY c SYSTEM "file:///etc/passwd">]><svg xmlns="http://www.w3.org/2000/svg">&b;&c;</svg>'
)


def noise(width: int = 24, height: int = 16, mode: str = "RGB", seed: int = 0) -> PIL.Image.Image:
    """Return an image of random pixels."""
    numbers = np.random.default_rng(seed).integers(0, 256, (height, width, len(mode)), np.uint8)
    return PIL.Image.fromarray(numbers.squeeze(), mode)


def encoded(image: PIL.Image.Image, format: str, **options: Any) -> bytes:
    """Return an image file."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def tone(seconds: float = 0.5, rate: int = 44_100, hertz: float = 440.0) -> np.ndarray[Any, Any]:
    """Return the samples of a tone, half as loud as can be."""
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)


def clip(format: str = "WAV", *, rate: int = 44_100, channels: int = 1, **more: float) -> bytes:
    """Return an audio file of a tone, the same in all channels."""
    file = io.BytesIO()
    samples = np.stack([tone(rate=rate, **more)] * channels, axis=1)
    soundfile.write(file, samples, rate, format=format)
    return file.getvalue()


def png_chunk(name: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *more: bytes) -> bytes:
    """Return a PNG file of that size in its header, with ``more`` chunks and a few rows."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = png_chunk(b"IDAT", zlib.compress(bytes(100_000)))
    chunks = (png_chunk(b"IHDR", header), *more, rows, png_chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def hostile_images() -> dict[str, bytes]:
    """Return small files of each format whose headers have ``LARGE`` x ``LARGE`` pixels or more."""
    small = {name: encoded(noise(), name) for name in IMAGE_FORMATS}
    jpeg = small["JPEG"]
    frame = jpeg.index(b"\xff\xc0") + 5
    gif, bmp, webp = small["GIF"], small["BMP"], small["WEBP"]
    lossless = encoded(noise(), "WEBP", lossless=True)
    canvas = struct.pack("<BBBB", 0, 0, 0, 0) + (LARGE - 1).to_bytes(3, "little") * 2
    extended = b"VP8X" + struct.pack("<I", 10) + canvas + webp[12:]
    tiff = struct.pack("<2sHIH", b"II", 42, 8, 5)
    for tag, value in ((256, LARGE), (257, LARGE), (258, 8), (262, 1), (273, 8)):
        tiff += struct.pack("<HHII", tag, 4, 1, value)
    return {
        "PNG": png(LARGE, LARGE),
        "JPEG": jpeg[:frame] + struct.pack(">HH", LARGE, LARGE) + jpeg[frame + 4 :],
        "GIF": gif[:6] + struct.pack("<HH", LARGE, LARGE) + gif[10:],
        "BMP": bmp[:18] + struct.pack("<ii", LARGE, LARGE) + bmp[26:],
        "WEBP": b"RIFF" + struct.pack("<I", len(extended) + 4) + b"WEBP" + extended,
        "WEBP lossless": lossless[:21] + struct.pack("<I", 0x0FFF_FFFF) + lossless[25:],
        "TIFF": tiff + struct.pack("<I", 0),
    }
