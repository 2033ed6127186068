"""Audio of every format becomes mono samples of one rate; what is too long is refused."""

from __future__ import annotations

import contextlib
import io
import struct

import numpy as np
import pytest
import soundfile

from tests.support.media_files import AUDIO_FORMATS, clip, encoded, noise, tone
from trioserve.requests.media.audio import decode_audio
from trioserve.requests.media.refusals import Refused


@pytest.mark.parametrize("name", AUDIO_FORMATS)
def test_a_format_is_read(name: str) -> None:
    found = decode_audio(clip(name, channels=2), 16_000, 1)
    assert found.dtype == np.float32
    assert found.shape == (8000,)
    inside = slice(800, 7200)  # the ends ring
    wanted = tone(rate=16_000)[inside]
    assert np.abs(found[inside] - wanted).max() < (0.002 if name in ("WAV", "FLAC") else 0.05)


def test_samples_of_the_same_rate_are_the_same() -> None:
    samples = np.random.default_rng(0).uniform(-1, 1, 200_000).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format="WAV", subtype="FLOAT")
    assert np.array_equal(decode_audio(file.getvalue(), 16_000, 20), samples)


def test_channels_are_averaged_and_what_is_no_number_is_silent() -> None:
    file = io.BytesIO()
    samples = np.array([[0.5, -0.25], [np.nan, 1.0], [np.inf, 0.0]], np.float32)
    soundfile.write(file, samples, 16_000, format="WAV", subtype="FLOAT")
    assert decode_audio(file.getvalue(), 16_000, 1).tolist() == [0.125, 0.0, 1.0]


def test_a_clip_that_is_too_long_is_refused() -> None:
    with pytest.raises(Refused) as raised:
        decode_audio(clip("FLAC", seconds=1.5), 16_000, 1)
    assert str(raised.value) == (
        "the audio has 1.5 seconds, more than --limit-mm-seconds (1) allows"
    )


def header(wave: bytes, **fields: int) -> bytes:
    """Return a WAV file with other numbers in its header."""
    places = {"channels": (22, "<H"), "rate": (24, "<I"), "riff": (4, "<I"), "data": (40, "<I")}
    changed = bytearray(wave)
    for name, value in fields.items():
        struct.pack_into(places[name][1], changed, places[name][0], value)
    return bytes(changed)


def test_a_header_that_lies_costs_nothing() -> None:
    honest = clip()
    assert len(decode_audio(header(honest, data=0xFFFF_FFF0, riff=0xFFFF_FFFF), 16_000, 1)) == 8000
    assert len(decode_audio(header(honest, data=100), 16_000, 1)) < 100
    for fields, reason in (
        ({"rate": 1}, "1 Hz: 1000 to 768000 are read"),
        ({"rate": 0x7FFF_FFFF}, "2147483647 Hz"),
        ({"channels": 1000}, "channels|can't be decoded"),
        ({"channels": 0}, "can't be decoded"),
    ):
        with pytest.raises(Refused, match=reason):
            decode_audio(header(honest, **fields), 16_000, 1)


def test_a_flac_file_of_unknown_length_is_refused() -> None:
    data = bytearray(clip("FLAC"))
    data[21] &= 0xF0  # 36 bits have the number of samples
    data[22:26] = bytes(4)
    with pytest.raises(Refused, match="doesn't say in its header how long it is"):
        decode_audio(bytes(data), 16_000, 1)


def test_a_clip_without_samples_is_refused() -> None:
    with pytest.raises(Refused, match="no samples"):
        decode_audio(clip(seconds=0), 16_000, 1)


@pytest.mark.parametrize("name", AUDIO_FORMATS)
def test_a_damaged_clip_is_refused_or_short(name: str) -> None:
    data = clip(name)
    with pytest.raises(Refused, match=r"can't be decoded|no samples"):
        decode_audio(data[:20], 16_000, 1)
    with contextlib.suppress(Refused):
        assert len(decode_audio(data[: len(data) // 2], 16_000, 1)) <= 8000


@pytest.mark.parametrize("data", [b"", b"\xff", encoded(noise(), "WEBP"), b"#EXTM3U", b"\0" * 99])
def test_other_formats_are_unknown(data: bytes) -> None:
    with pytest.raises(Refused, match="unknown format: WAV, FLAC, Ogg and MP3"):
        decode_audio(data, 16_000, 1)
