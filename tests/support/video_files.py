"""Videos for tests, made by FFmpeg's encoders, and hostile ones of a few kilobytes."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from typing import Any

import av
import numpy as np
import PIL.Image

CONTAINERS = {"libx264": "mp4", "mpeg4": "mp4", "libvpx": "webm", "libvpx-vp9": "matroska"}
"""Containers by the encoders that tests use."""
LARGE = 65535
_FAST: Mapping[str, dict[str, str]] = {
    # Frames between key frames, some of which others don't need.
    "libx264": {"preset": "ultrafast", "bf": "2", "g": "8"},
    "mpeg4": {"bf": "2", "g": "8"},
    "libvpx": {"deadline": "realtime", "g": "8"},
    "libvpx-vp9": {"deadline": "realtime", "g": "8"},
}


def pattern(number: int, size: tuple[int, int] = (48, 32)) -> np.ndarray[Any, Any]:
    """Return frame ``number``: a bright bar that moves from the left, uint8 [height, width, 3]."""
    width, height = size
    pixels = np.full((height, width, 3), (16, 64, 96 + number % 64), np.uint8)
    pixels[:, : 2 + number % (width - 2)] = 224
    return pixels


def video(
    encoder: str = "libx264",
    num_frames: int = 20,
    *,
    rate: int = 10,
    size: tuple[int, int] = (48, 32),
    num_streams: int = 1,
    fragmented: bool = False,
) -> bytes:
    """Return a video of :func:`pattern`, ``rate`` frames a second, the same in all its streams."""
    file = io.BytesIO()
    options = {"movflags": "frag_keyframe+empty_moov"} if fragmented else {}
    with av.open(file, "w", format=CONTAINERS[encoder], options=options) as container:
        streams: list[Any] = []
        for _ in range(num_streams):
            stream: Any = container.add_stream(encoder, rate=rate, options=dict(_FAST[encoder]))
            stream.width, stream.height = size
            stream.pix_fmt = "yuv420p"
            stream.codec_context.thread_count = 1
            streams.append(stream)
        frames = [av.VideoFrame.from_ndarray(pattern(n, size), "rgb24") for n in range(num_frames)]
        for frame in (*frames, None):
            for stream in streams:
                container.mux(stream.encode(frame))
    return file.getvalue()


def all_frames(data: bytes) -> list[tuple[float, PIL.Image.Image]]:
    """Return the times and the pixels of all frames, in seconds from the first one."""
    with av.open(io.BytesIO(data)) as container:
        frames = [(frame.time, frame.to_image()) for frame in container.decode(video=0)]
    return [(time - frames[0][0], image) for time, image in frames]


def sound() -> bytes:
    """Return an MP4 file of silence."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def patched(data: bytes, place: int, form: str, *numbers: int) -> bytes:
    """Return ``data`` with other numbers at a place."""
    changed = bytearray(data)
    struct.pack_into(form, changed, place, *numbers)
    return bytes(changed)


def box(data: bytes, name: bytes) -> int:
    """Return the place behind the name of an MP4 file's box."""
    return data.index(name) + 4


def turned(data: bytes, quarters: int) -> bytes:
    """Return an MP4 file whose matrix turns what is shown clockwise."""
    a, b = ((1, 0), (0, 1), (-1, 0), (0, -1))[quarters]
    one = 1 << 16
    matrix = (a * one, b * one, 0, -b * one, a * one, 0, 0, 0, 1 << 30)
    return patched(data, box(data, b"tkhd") + 40, ">9i", *matrix)


def with_edits(data: bytes, count: int) -> bytes:
    """Return an MP4 file that shows its first second ``count`` times, by an edit list."""
    entries = struct.pack(">IiI", 1000, 0, 1 << 16) * count
    size = 8 + 8 + len(entries)
    edits = struct.pack(">I4sII", size, b"elst", 0, count) + entries
    edits = struct.pack(">I4s", len(edits) + 8, b"edts") + edits
    old = data.index(b"edts") - 4
    (old_size,) = struct.unpack_from(">I", data, old)
    made = data[:old] + edits + data[old + old_size :]
    return _grown(made, len(edits) - old_size, b"trak", b"moov")


def with_tracks(data: bytes, count: int) -> bytes:
    """Return an MP4 file whose first track comes ``count`` times."""
    start = data.index(b"trak") - 4
    (size,) = struct.unpack_from(">I", data, start)
    track = data[start : start + size]
    made = data[:start] + track * count + data[start + size :]
    return _grown(made, size * (count - 1), b"moov")


def _grown(data: bytes, more: int, *names: bytes) -> bytes:
    for name in names:
        place = data.index(name) - 4
        (size,) = struct.unpack_from(">I", data, place)
        data = patched(data, place, ">I", size + more)
    return data


def lying_videos() -> dict[str, bytes]:
    """Return videos whose headers say what their frames don't."""
    data = video()
    webm, matroska = video("libvpx"), video("libvpx-vp9")
    duration = matroska.index(b"\x44\x89\x88") + 3
    return {
        "sides": patched(data, data.index(b"avc1") + 28, ">HH", LARGE, LARGE),
        "duration": patched(data, box(data, b"mdhd") + 16, ">I", 0xFFFF_FFF0),
        "Matroska duration": patched(matroska, duration, ">d", 10**15),
        "number of frames": patched(data, box(data, b"stts") + 8, ">I", 0xFFFF_FFF0),
        "edits": with_edits(data, 30_000),
        "sides of a frame": patched(webm, webm.index(b"\x9d\x01\x2a") + 5, "<H", 12_000),
    }


def hostile_videos() -> dict[str, bytes]:
    """Return files that are refused."""
    data, webm = video(), video("libvpx")
    sizes = box(data, b"stsz")
    streamed = video(fragmented=True)
    return {
        "sides in frames": patched(webm, webm.index(b"\x9d\x01\x2a") + 3, "<HH", 16383, 16383),
        "slow": patched(data, box(data, b"mdhd") + 12, ">I", 1),
        "long frame": patched(data, box(data, b"stts") + 12, ">I", 0x7FFF_FFF0),
        "many frames": patched(data, sizes + 4, ">II", 10, 10_000_000),
        "many more frames": patched(data, sizes + 4, ">II", 1, 0xFFFF_FFFF),
        "large table": patched(data, sizes + 4, ">II", 0, 0xFFFF_FFFF),
        "large frame": patched(data, sizes + 12, ">I", 0x7FFF_FFFF),
        "no frames": video(num_frames=1, fragmented=True)[:-200],
        "cut off": data[: len(data) // 2],
        "cut off within a frame": streamed[: streamed.rindex(b"mdat") + 20],
        "sound": sound(),
        "streams": video("mpeg4", 1, num_streams=17),
        "many streams": with_tracks(data, 999),
        "too many streams": with_tracks(data, 3000),
        "WebM called MP4": b"\0\0\0\x18ftypisom" + webm,
        "MP4 called WebM": b"\x1a\x45\xdf\xa3" + data,
    }
