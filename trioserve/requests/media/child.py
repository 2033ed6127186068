"""The processes that decode media, with limited time and memory.

The first one reads a :class:`.messages.MediaSetup`, loads the model's processor, and forks. Each
fork reads one :class:`.messages.MediaJob` after another, each with its payload, and answers it.
Arrays go into shared memory. A job past the limits ends its process.
"""

from __future__ import annotations

import binascii
import contextlib
import functools
import hashlib
import json
import os
import stat
import sys
from typing import IO, Any

import msgspec
import numpy as np

from trioserve._util.job_child import (
    go_behind,
    limit_memory,
    limit_processor_time,
    serve_forks,
)
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.frames import framed, read_bytes, read_frame
from trioserve.requests.media.audio import DEFAULT_RATE, decode_audio
from trioserve.requests.media.images import decode_image, image_of_pixels, import_decoders
from trioserve.requests.media.messages import ArrayLayout, MediaAnswer, MediaJob, MediaSetup
from trioserve.requests.media.processor_arguments import Arrays, PartArguments
from trioserve.requests.media.processors import MediaProcessor, ProcessedPart
from trioserve.requests.media.refusals import ArgumentsRefused, Refused
from trioserve.requests.media.videos import decode_video

MAX_SECONDS = 20
"""Processor seconds for one part. Usual ones take less than a tenth."""
NICENESS = 10
"""Niceness of the processes: decoding takes a tenth of the cores that steps need."""
DIGEST_BYTES = 16
_BASE_MEMORY = 256 << 20
_PIXEL_MEMORY = 24
"""Bytes for a pixel: decoded, without transparency, upright, and copies in the processor."""
_SECOND_MEMORY = 512_000
"""Bytes for a second of audio: samples at 16 kHz, in pieces, joined, and in the processor."""
_FRAME_MEMORY = 8 << 20
"""Bytes for a processed frame of a video: 512 x 512 pixels and their mask, each of them, joined."""


def memory_of(setup: MediaSetup) -> int:
    """Return the bytes that a process may take for a part."""
    return (
        _BASE_MEMORY
        + 3 * setup.max_bytes
        + _PIXEL_MEMORY * setup.max_pixels
        + int(_SECOND_MEMORY * setup.max_seconds)
        + _FRAME_MEMORY * setup.num_frames
    )


def main() -> None:
    """Load what the jobs need, and fork."""
    os.dup2(2, 1)  # Nothing reads what a library prints.
    setup = msgspec.msgpack.decode(read_frame(sys.stdin.buffer), type=MediaSetup)
    reader = PartReader(setup)
    go_behind(NICENESS)
    serve_forks(int(sys.argv[1]), functools.partial(answer_jobs, reader, memory_of(setup)))


def answer_jobs(
    reader: PartReader, max_memory: int, source: IO[bytes], target: IO[bytes], memory: int
) -> None:
    """Answer the jobs in ``source``, until it ends or a job needs too much memory.

    Args:
        reader: Reader of parts.
        max_memory: Bytes that may be taken beyond those that were taken before.
        source: Jobs, each with its payload.
        target: Answers.
        memory: Descriptor of the memory for arrays.
    """
    limit_memory(max_memory)
    with contextlib.suppress(EOFError, MemoryError):
        while True:
            job = msgspec.msgpack.decode(read_frame(source), type=MediaJob)
            payload = read_bytes(source, job.size)
            limit_processor_time(MAX_SECONDS)
            target.write(framed(reader.answer(job, payload, memory)))
            target.flush()


class PartReader:
    """Reader of parts in this process.

    Args:
        setup: Limits and processor.
    """

    def __init__(self, setup: MediaSetup) -> None:
        self._setup = setup
        self._processor: MediaProcessor | None = None
        self._failure = ""
        try:
            _import_libraries()
            if setup.processor_folder:
                self._processor = MediaProcessor(setup.processor_folder, setup.processor_arguments)
        except ImportError as error:
            self._failure = f"reading media needs the extra media: {error}"
        except ModelLoadError as error:
            self._failure = str(error)

    def answer(self, job: MediaJob, payload: bytes, memory: int) -> MediaAnswer:
        """Read a part, and put its arrays into the memory whose descriptor is given.

        Raises:
            MemoryError: There isn't enough memory.
        """
        if self._failure or not job.kind:
            names = () if self._processor is None else self._processor.argument_names
            return MediaAnswer(failure=self._failure, argument_names=sorted(names))
        try:
            digest, part = self._read(job, payload)
        except Refused as refusal:
            is_about_arguments = isinstance(refusal, ArgumentsRefused)
            return MediaAnswer(error=str(refusal), is_about_arguments=is_about_arguments)
        return MediaAnswer(
            digest=digest,
            token_ids=part.token_ids,
            num_placeholder_tokens=part.num_placeholder_tokens,
            text=part.text,
            arrays=_share(part.arrays, memory),
        )

    def _read(self, job: MediaJob, payload: bytes) -> tuple[bytes, ProcessedPart]:
        processor, setup = self._processor if job.is_processed else None, self._setup
        asked = PartArguments(given=job.arguments, max_array_bytes=job.max_array_bytes)
        if processor is not None:
            processor.check(asked)
        if job.kind == "audio":
            rate = DEFAULT_RATE if self._processor is None else self._processor.sample_rate
            if job.encoding == "samples":
                samples = np.frombuffer(payload, np.float32)
            else:
                samples = decode_audio(self._file(job, payload), rate, setup.max_seconds)
            digest = self._digest(job, [rate], samples.data)
            if processor is None:
                return digest, ProcessedPart([], 0, {"samples": samples})
            return digest, processor.of_audio(samples, asked)
        if job.kind == "video":
            return self._read_video(job, self._file(job, payload), processor, asked)
        if job.encoding == "pixels":
            image = image_of_pixels(job.mode, job.width, job.height, payload, setup.max_pixels)
        else:
            image = decode_image(self._file(job, payload), setup.max_pixels)
        digest = self._digest(job, image.size, image.tobytes())
        if processor is None:
            return digest, ProcessedPart([], 0, {"pixels": np.asarray(image)})
        return digest, processor.of_image(image, asked)

    def _read_video(
        self, job: MediaJob, file: bytes, processor: MediaProcessor | None, asked: PartArguments
    ) -> tuple[bytes, ProcessedPart]:
        video = decode_video(
            file,
            max_pixels=self._setup.max_pixels,
            max_seconds=self._setup.max_seconds,
            fps=job.fps,
            num_frames=job.num_frames,
        )
        digest = self._digest(job, [job.fps, job.num_frames], file)
        if processor is not None:
            return digest, processor.of_video(video, asked)
        times, images = zip(*video.frames, strict=True)
        arrays = {"seconds": np.array(times), "pixels": np.stack(images)}
        return digest, ProcessedPart([], 0, arrays)

    def _digest(self, job: MediaJob, numbers: Any, content: bytes | memoryview) -> bytes:
        """Return the hash of a content, its kind and the processor's arguments."""
        arguments = {**self._setup.processor_arguments, **job.arguments}
        about = json.dumps([job.kind, *numbers, arguments], sort_keys=True).encode()
        found = hashlib.blake2b(len(about).to_bytes(8, "little"), digest_size=DIGEST_BYTES)
        found.update(about)
        found.update(content)
        return found.digest()

    def _file(self, job: MediaJob, payload: bytes) -> bytes:
        """Return the file that a payload stands for."""
        if job.encoding == "base64":
            try:
                return binascii.a2b_base64(payload, strict_mode=True)
            except binascii.Error as error:
                raise Refused(f"the {job.kind} isn't valid base64: {error}") from error
        if job.encoding == "path":
            return _read_file(payload, job.kind, self._setup.max_bytes)
        return payload


def _share(arrays: Arrays, memory: int) -> list[ArrayLayout]:
    """Write the arrays into the memory, one after another."""
    layouts = []
    offset = 0
    for name, array in arrays.items():
        left = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        while left:
            written = os.pwrite(memory, left, offset)
            offset += written
            left = left[written:]
        layouts.append(ArrayLayout(name, array.dtype.str, array.shape))
    return layouts


def _import_libraries() -> None:
    """Import the decoders, before memory is limited.

    Raises:
        ImportError: One isn't installed.
    """
    import av  # noqa: F401
    import soundfile  # noqa: F401
    import soxr  # noqa: F401

    import_decoders()


def _read_file(path: bytes, kind: str, max_bytes: int) -> bytes:
    """Return the content of a regular file of at most ``max_bytes``."""
    try:
        # Opening a pipe would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise Refused(f"the {kind} isn't a regular file")
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise Refused(f"the {kind} can't be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise Refused(
            f"the {kind} has {found.st_size} bytes, more than --limit-mm-bytes ({max_bytes}) allows"
        )
    return data
