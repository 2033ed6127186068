"""Decoding of audio by libsndfile, to mono at one sample rate, a block at a time.

It runs in a child process.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from trioserve.requests.media.refusals import Refused, check_seconds, undecodable

_BEGINNINGS = (b"fLaC", b"OggS", b"ID3")
_FORMATS = "WAV, FLAC, Ogg and MP3"
MAX_CHANNELS = 16
SAMPLE_RATES = (1_000, 768_000)
"""Lowest and highest sample rate of a file, in Hz."""
UNKNOWN_FRAMES = 1 << 62
"""Fewest frames that libsndfile gives for an unknown length; it can't read such files in blocks."""
BLOCK_FRAMES = 1 << 16
DEFAULT_RATE = 16_000
"""Sample rate of the result, in Hz, where no processor asks for another."""

Samples = np.ndarray[Any, np.dtype[np.float32]]


def check_format(data: bytes) -> None:
    """Refuse a file that doesn't begin like audio.

    Raises:
        Refused: It begins otherwise.
    """
    is_wave = data[:4] == b"RIFF" and data[8:12] == b"WAVE"
    is_mpeg = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0
    if not (is_wave or is_mpeg or data.startswith(_BEGINNINGS)):
        raise Refused(f"the audio has an unknown format: {_FORMATS} are read")


def decode_audio(data: bytes, rate: int, max_seconds: float) -> Samples:
    """Return the samples of a file: the mean of its channels at ``rate`` Hz, shape [samples].

    Raises:
        Refused: The file isn't audio, is damaged, or is longer than ``max_seconds``.
        MemoryError: There isn't enough memory.
    """
    import soundfile

    check_format(data)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_header(file, max_seconds)
            return _resampled(file, rate, max_seconds)
    except (Refused, MemoryError):
        raise
    except Exception as error:  # soundfile raises RuntimeError, and others for lying headers.
        raise undecodable("audio", error) from error


def _check_header(file: Any, max_seconds: float) -> None:
    low, high = SAMPLE_RATES
    if not low <= file.samplerate <= high:
        raise Refused(f"the audio has {file.samplerate} Hz: {low} to {high} are read")
    if not 1 <= file.channels <= MAX_CHANNELS:
        raise Refused(f"the audio has {file.channels} channels: at most {MAX_CHANNELS} are read")
    if file.frames >= UNKNOWN_FRAMES:
        raise Refused("the audio doesn't say in its header how long it is")
    # Headers can lie, so seconds are also counted as they are decoded.
    check_seconds("audio", file.frames / file.samplerate, max_seconds)


def _resampled(file: Any, rate: int, max_seconds: float) -> Samples:
    import soxr

    resampler = soxr.ResampleStream(file.samplerate, rate, 1, dtype="float32")
    parts: list[Samples] = []
    num_frames = 0
    while len(block := file.read(BLOCK_FRAMES, dtype="float32", always_2d=True)):
        num_frames += len(block)
        check_seconds("audio", num_frames / file.samplerate, max_seconds)
        mono = np.nan_to_num(block.mean(axis=1), nan=0.0, posinf=1.0, neginf=-1.0)
        parts.append(_changed(resampler, file.samplerate, rate, mono, last=False))
    if not num_frames:
        raise Refused("the audio has no samples")
    parts.append(_changed(resampler, file.samplerate, rate, np.zeros(0, np.float32), last=True))
    return np.concatenate(parts)


def _changed(resampler: Any, file_rate: int, rate: int, mono: Samples, *, last: bool) -> Samples:
    """Return a block at ``rate``; with equal rates, the block itself."""
    if file_rate == rate:
        return mono
    changed: Samples = resampler.resample_chunk(mono, last=last)
    return changed
