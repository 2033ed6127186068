"""Decoding of videos by FFmpeg: the frames that a model sees, and no others where it can be helped.

The times of all frames are known before any is decoded. It runs in a child process.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from trioserve.requests.media.images import check_pixels
from trioserve.requests.media.refusals import Refused, check_seconds, undecodable

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = "MP4, MOV, WebM and Matroska"
CODECS = ("av1", "h264", "hevc", "mpeg4", "vp8", "vp9")
MAX_STREAMS = 16
MAX_FRAMES = 1 << 18
"""Most frames of a file: more than half an hour of 120 a second."""
_MAX_EXPANSION = 2
"""Most bytes of all frames, still compressed, for each byte of a file. An index can name the same
bytes many times."""
_MAX_PADDING = 64 << 16
"""Pixels by which decoders round up a frame at most: 64 of each row."""
_OPTIONS = {
    # An edit list can repeat a frame as often as it likes.
    "mp4": {"ignore_editlist": "1"},
    "matroska": {},
}
"""Options of FFmpeg's demuxers."""
_MAX_OPENED_STREAMS = "64"
"""Streams at which FFmpeg gives up: it opens a decoder for each."""


@attrs.frozen(eq=False)
class Video:
    """A video, of which some frames are decoded."""

    duration: float
    """Seconds from the first frame to the end of the last one."""
    frames: Iterator[tuple[float, Image]]
    """Seconds from the first frame to each that is taken, and its pixels as RGB, all of one size,
    upright. They can be iterated once, and refuse what is damaged then."""


def decode_video(
    data: bytes, *, max_pixels: int, max_seconds: float, fps: float, num_frames: int
) -> Video:
    """Return the video in a file.

    Args:
        data: The file.
        max_pixels: Most pixels of a frame.
        max_seconds: Longest video.
        fps: Most frames that are taken for each second.
        num_frames: Most frames that are taken.

    Raises:
        Refused: The file isn't a video, is damaged, or is beyond a limit.
        MemoryError: There isn't enough memory.
    """
    with _refusals():
        return _opened(data, container_of(data), max_pixels, max_seconds, (fps, num_frames))


def container_of(data: bytes) -> str:
    """Return FFmpeg's name of the container format in which ``data`` begins.

    Raises:
        Refused: It is none that is read.
    """
    if data[4:8] == b"ftyp":
        return "mp4"
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    raise Refused(f"the video has an unknown format: {_FORMATS} are read")


def frames_taken(count: int, duration: float, fps: float, num_frames: int) -> list[int]:
    """Return the numbers of the frames that are taken of ``count``, evenly and with both ends.

    There is at least one.
    """
    most = max(min(num_frames, count, math.floor(fps * duration)), 1)
    return [int(number) for number in np.linspace(0, count - 1, most)]


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Refuse what FFmpeg can't read."""
    import av

    try:
        yield
    except Refused:
        raise
    except av.FFmpegError as error:  # its own MemoryError among them: nothing is held any more
        raise Refused(f"the video can't be decoded: {error.strerror}") from error
    except MemoryError:
        raise
    except Exception as error:  # PyAV raises others for lying headers.
        raise undecodable("video", error) from error


def _opened(
    data: bytes, name: str, max_pixels: int, max_seconds: float, sampling: tuple[float, int]
) -> Video:
    import av

    # With its format named, FFmpeg doesn't try those that would open other files.
    container = av.open(
        io.BytesIO(data),
        format=name,
        container_options={"max_streams": _MAX_OPENED_STREAMS, **_OPTIONS[name]},
        metadata_errors="ignore",
    )
    stream = _stream_of(container, max_pixels)
    packets = _packets(container, stream, _MAX_EXPANSION * len(data))
    order = sorted(range(len(packets)), key=lambda index: packets[index].pts)
    first, last = (packets[order[place]].pts for place in (0, -1))
    # Headers can lie, so the times are those of the frames. A second is exactly one.
    step = stream.time_base
    duration = float((last - first) * step * len(packets) / max(len(packets) - 1, 1))
    check_seconds("video", duration, max_seconds)
    taken = sorted(order[number] for number in frames_taken(len(order), duration, *sampling))

    # Frames may have other sizes, and change that of the stream.
    width, height = stream.width, stream.height

    def frames() -> Iterator[tuple[float, Image]]:
        with container, _refusals():
            has_frames = False
            for frame in _decoded(stream.codec_context, packets, taken):
                image = frame.to_image(width=width, height=height)
                yield float((frame.pts - first) * step), _turned(image, frame.rotation)
                has_frames = True
            if not has_frames:
                raise Refused("the video has no frames that can be decoded")

    return Video(duration, frames())


def _stream_of(container: Any, max_pixels: int) -> Any:
    """Return the stream of a file that is decoded."""
    if len(container.streams) > MAX_STREAMS:
        raise Refused(
            f"the video has {len(container.streams)} streams: at most {MAX_STREAMS} are read"
        )
    stream = container.streams.best("video")
    if stream is None:
        raise Refused("the file has no video")
    context = stream.codec_context
    codec = "unknown" if context is None else context.codec.canonical_name
    if codec not in CODECS:
        raise Refused(f"the video has the codec {codec}: {', '.join(CODECS)} are read")
    check_pixels(stream.width, stream.height, max_pixels, "video")
    if not stream.time_base:
        raise Refused("the video has no times")
    context.thread_count = 1
    context.options = {"max_pixels": str(max_pixels + _MAX_PADDING)}
    return stream


def _packets(container: Any, stream: Any, max_bytes: int) -> list[Any]:
    """Return the frames of a stream, still compressed, in the order in which they are decoded."""
    packets: list[Any] = []
    size = 0
    for packet in container.demux(stream):
        if not packet.size:
            continue
        size += packet.size
        if size > max_bytes:
            raise Refused("the video can't be decoded: its frames have more bytes than its file")
        if len(packets) == MAX_FRAMES:
            raise Refused(f"the video has more than {MAX_FRAMES} frames")
        if packet.pts is None:
            raise Refused("the video has a frame without a time")
        packets.append(packet)
    if not packets:
        raise Refused("the video has no frames")
    return packets


def _decoded(context: Any, packets: Sequence[Any], taken: Sequence[int]) -> Iterator[Any]:
    """Yield the frames of the packets whose numbers are ``taken``.

    Others are decoded as far as these need them.
    """
    wanted = {packets[index].pts for index in taken}
    chosen = frozenset(taken)
    for start, end in runs_of(packets, taken):
        for index in range(start, end):
            # Frames that no other one needs are left out.
            context.skip_frame = "DEFAULT" if index in chosen else "NONREF"
            yield from _wanted(context.decode(packets[index]), wanted)
        yield from _wanted(context.decode(None), wanted)
        context.flush_buffers()


def _wanted(frames: Sequence[Any], wanted: set[int]) -> Iterator[Any]:
    """Yield the frames of wanted times, and take these out of ``wanted``."""
    for frame in frames:
        if frame.pts in wanted:
            wanted.remove(frame.pts)
            yield frame


def runs_of(packets: Sequence[Any], taken: Sequence[int]) -> list[tuple[int, int]]:
    """Return what has to be decoded for the packets numbered ``taken``, as starts and ends.

    Each run begins with a key frame, and ends with a frame that is taken. A frame that is decoded
    behind a key frame and shown before it needs the key frame before.
    """
    keys = [index for index, packet in enumerate(packets) if packet.is_keyframe]
    runs: list[tuple[int, int]] = []
    for index in sorted(taken):
        place = bisect.bisect_right(keys, index)
        while place and packets[keys[place - 1]].pts > packets[index].pts:
            place -= 1
        start = keys[place - 1] if place else 0
        while runs and runs[-1][1] > start:
            start = min(start, runs.pop()[0])
        runs.append((start, index + 1))
    return runs


def _turned(image: Image, degrees: int) -> Image:
    """Return an image turned counterclockwise, if ``degrees`` are a number of quarters."""
    import PIL.Image

    turns = {
        90: PIL.Image.Transpose.ROTATE_90,
        180: PIL.Image.Transpose.ROTATE_180,
        270: PIL.Image.Transpose.ROTATE_270,
    }
    turn = turns.get(degrees % 360)
    return image if turn is None else image.transpose(turn)
