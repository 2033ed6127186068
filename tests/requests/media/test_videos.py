"""The frames of a video are those that decoding all gives; what lies or is damaged is refused."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import PIL.Image
import pytest

from tests.support.media_files import clip, encoded, noise
from tests.support.video_files import (
    CONTAINERS,
    all_frames,
    hostile_videos,
    lying_videos,
    pattern,
    turned,
    video,
)
from trioserve.requests.media import videos
from trioserve.requests.media.refusals import Refused
from trioserve.requests.media.videos import decode_video, frames_taken, runs_of

LIMITS: dict[str, Any] = {"max_pixels": 1 << 16, "max_seconds": 10, "fps": 4, "num_frames": 6}
LYING, HOSTILE = lying_videos(), hostile_videos()


def read(data: bytes, **limits: Any) -> tuple[float, list[tuple[float, PIL.Image.Image]]]:
    found = decode_video(data, **{**LIMITS, **limits})
    return found.duration, list(found.frames)


def assert_same(found: Any, wanted: Any) -> None:
    assert [time for time, _ in found] == pytest.approx([time for time, _ in wanted])
    for (_, image), (_, expected) in zip(found, wanted, strict=True):
        assert np.array_equal(np.asarray(image), np.asarray(expected))


@pytest.mark.parametrize("encoder", CONTAINERS)
@pytest.mark.parametrize("sampling", [(4, 6), (1, 32), (100, 100), (100, 3)])
def test_the_frames_are_those_that_decoding_all_gives(
    encoder: str, sampling: tuple[int, int]
) -> None:
    data = video(encoder)
    duration, frames = read(data, fps=sampling[0], num_frames=sampling[1])
    every = all_frames(data)
    assert len(every) == 20
    numbers = frames_taken(20, 2.0, *sampling)
    assert duration == pytest.approx(2.0)
    assert_same(frames, [every[number] for number in numbers])
    for (_, image), number in zip(frames, numbers, strict=True):
        assert np.abs(np.asarray(image).astype(int) - pattern(number)).mean() < 24


def test_frames_are_taken_evenly() -> None:
    assert frames_taken(20, 2.0, 2, 32) == [0, 6, 12, 19]
    assert frames_taken(20, 2.0, 2, 3) == [0, 9, 19]
    assert frames_taken(3, 2.0, 30, 32) == [0, 1, 2]
    assert frames_taken(20, 0.1, 2, 32) == [0]


@attrs.frozen
class Packet:
    pts: int
    is_keyframe: bool = False


def test_what_is_decoded_begins_with_key_frames() -> None:
    # Decoded in this order; two frames behind the second key frame are shown before it.
    group = [Packet(0, True), Packet(3), Packet(1), Packet(2)]
    open_group = [Packet(6, True), Packet(4), Packet(5), Packet(7)]
    closed = [Packet(8, True), Packet(9)]
    packets = [*group, *open_group, *closed]
    assert runs_of(packets, [0]) == [(0, 1)]
    assert runs_of(packets, [1, 9]) == [(0, 2), (8, 10)]
    assert runs_of(packets, [4]) == [(4, 5)]
    assert runs_of(packets, [5]) == [(0, 6)]
    assert runs_of(packets, [4, 5]) == [(0, 6)]
    assert runs_of(packets, [3, 4, 8]) == [(0, 4), (4, 5), (8, 9)]
    assert runs_of(packets[1:], [0, 1]) == [(0, 2)]


def test_only_what_frames_need_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[tuple[int, int]] = []

    def noted(*arguments: Any) -> list[tuple[int, int]]:
        decoded.extend(runs_of(*arguments))
        return decoded

    monkeypatch.setattr(videos, "runs_of", noted)
    data = video(num_frames=60)
    _, frames = read(data, num_frames=2)
    assert_same(frames, [all_frames(data)[number] for number in (0, 59)])
    # The last frame is decoded before the two that are shown before it.
    assert decoded == [(0, 1), (56, 58)]


@pytest.mark.parametrize("quarters", range(4))
def test_a_video_is_turned_upright(quarters: int) -> None:
    data = video()
    _, frames = read(turned(data, quarters))
    _, plain = read(data)
    expected = [(time, np.rot90(np.asarray(image), -quarters)) for time, image in plain]
    assert_same(frames, expected)


def test_a_video_in_fragments_is_read() -> None:
    assert_same(read(video(fragmented=True))[1], read(video())[1])


def test_a_video_of_one_frame_is_read() -> None:
    duration, frames = read(video(num_frames=1))
    assert (duration, [time for time, _ in frames]) == (0.0, [0.0])


@pytest.mark.parametrize("name", LYING)
def test_frames_are_believed_and_not_headers(name: str) -> None:
    duration, frames = read(LYING[name])
    assert duration == pytest.approx(2.0)
    if name == "sides of a frame":  # the first frame, which gets the size in the header
        assert {image.size for _, image in frames} == {(48, 32)}
        return
    honest = video("libvpx-vp9" if "Matroska" in name else "libx264")
    assert_same(frames, read(honest)[1])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_video_is_refused(name: str) -> None:
    reason = {
        "sides in frames": "can't be decoded",
        "slow": r"has \d+.0 seconds, more than --limit-mm-seconds \(10\) allows",
        "long frame": r"has \d+.\d seconds, more than --limit-mm-seconds \(10\) allows",
        "many more frames": "more than 262144 frames|has more bytes|no frames",
        "sound": "has no video",
        "streams": "has 17 streams: at most 16 are read",
    }.get(name, "can't be decoded|no frames")
    with pytest.raises(Refused, match=reason):
        read(HOSTILE[name])


def test_limits_are_checked_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = video()
    assert len(read(data, max_pixels=48 * 32, max_seconds=2)[1]) == 6

    def decoded(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(videos, "_decoded", decoded)
    for limits, reason in (
        ({"max_pixels": 48 * 32 - 1}, "has 48 x 32 pixels, more than --limit-mm-pixels"),
        ({"max_seconds": 1.9}, "has 2.0 seconds, more than --limit-mm-seconds"),
    ):
        with pytest.raises(Refused, match=reason):
            read(data, **limits)


def test_an_index_that_names_bytes_many_times_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = video()
    monkeypatch.setattr(videos, "_MAX_EXPANSION", 0.5)
    with pytest.raises(Refused, match="its frames have more bytes than its file"):
        read(data)
    monkeypatch.undo()
    monkeypatch.setattr(videos, "MAX_FRAMES", 19)
    with pytest.raises(Refused, match="more than 19 frames"):
        read(data)


def test_another_codec_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos, "CODECS", ("vp9",))
    with pytest.raises(Refused, match="has the codec h264: vp9 are read"):
        read(video())


@pytest.mark.parametrize(
    "data", [b"", b"#EXTM3U\n", b"ffconcat version 1.0", encoded(noise(), "PNG"), clip("OGG")]
)
def test_other_formats_are_unknown(data: bytes) -> None:
    with pytest.raises(Refused, match="unknown format: MP4, MOV, WebM and Matroska are read"):
        read(data)
