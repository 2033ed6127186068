"""Parts are read in other processes: refusals name them, and nothing else is hurt or left."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import trio

from tests.support.media_files import SVG, clip, encoded, hostile_images, noise, tone
from tests.support.process_ends import wait_ended
from tests.support.video_files import hostile_videos, lying_videos, video
from trioserve._util import job_server
from trioserve._util.job_processes import JobLost
from trioserve.config.media import MediaOptions
from trioserve.protocol.errors import EngineError, InvalidRequest
from trioserve.requests.media import pool
from trioserve.requests.media.child import MAX_SECONDS, memory_of
from trioserve.requests.media.messages import ArrayLayout, MediaJob
from trioserve.requests.media.parts import AudioPart, ImagePart, MediaPart, VideoPart
from trioserve.requests.media.pool import MediaProcesses, copy_arrays, num_processes
from trioserve.requests.media.reader import MediaReader, open_media_reader, setup_of
from trioserve.requests.media.sources import Payload

NAME = "messages[0].content[1]"
OPTIONS = MediaOptions(limit_mm_pixels=1 << 20, limit_mm_bytes=1 << 20, limit_mm_seconds=2)
IMAGE = noise()
PIXELS = np.asarray(IMAGE)


def processes() -> list[psutil.Process]:
    """Return the process that forks, and its forks, which read media."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is none
            if any("media.child" in argument for argument in child.cmdline()):
                found.append(child)
    return found


def children() -> list[psutil.Process]:
    """Return the processes that read media."""
    return [each for each in processes() if each.ppid() != os.getpid()]


def shared_memory() -> list[str]:
    """Return this process's descriptors of shared memory."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [link for link in links if "memfd" in link]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert processes() == []
    assert shared_memory() == []


async def check_serves(reader: MediaReader) -> None:
    """Read an image that is as it should be."""
    found = await reader.read(ImagePart(encoded(IMAGE, "PNG")), name=NAME)
    assert np.array_equal(found.arrays["pixels"], PIXELS)


async def refused(reader: MediaReader, part: MediaPart) -> str:
    with pytest.raises(InvalidRequest) as raised:
        await reader.read(part, name=NAME)
    assert raised.value.param == NAME
    name, _, reason = str(raised.value).partition(": ")
    assert name == NAME
    return reason


async def test_all_sources_of_an_image_are_the_same(tmp_path: Path) -> None:
    data = encoded(IMAGE, "PNG")
    text = base64.b64encode(data).decode()
    path = tmp_path / "image.jpeg"  # a name says nothing
    path.write_bytes(data)
    sources = (data, path, text, f"data:image/jpeg;base64,{text}", IMAGE)
    async with open_media_reader(OPTIONS) as reader:
        assert children() == []
        results = [await reader.read(ImagePart(each), name=NAME) for each in sources]
        assert len(children()) == 1
    for found in results:
        assert found.kind == "image"
        assert np.array_equal(found.arrays["pixels"], PIXELS)
        found.arrays["pixels"][0, 0] = 0  # it is the caller's own
        assert (found.token_ids, found.num_placeholder_tokens) == ([], 0)
    assert len({found.digest for found in results}) == 1


async def test_a_digest_tells_contents_and_arguments_apart() -> None:
    digests = set()
    for options in (OPTIONS, MediaOptions(mm_processor_kwargs='{"a": 1}')):
        async with open_media_reader(options) as reader:
            for image in (IMAGE, IMAGE.rotate(180), noise(16, 24)):
                digests.add((await reader.read(ImagePart(image), name=NAME)).digest)
    assert len(digests) == 6
    assert {len(each) for each in digests} == {16}


async def test_audio_is_read() -> None:
    async with open_media_reader(OPTIONS) as reader:
        found = await reader.read(AudioPart(clip()), name=NAME)
        assert np.abs(found.arrays["samples"] - tone(rate=16_000)).max() < 0.1
        assert found.arrays["samples"].dtype == np.float32
        long = await refused(reader, AudioPart(clip("FLAC", seconds=3)))
        assert long == "the audio has 3.0 seconds, more than --limit-mm-seconds (2) allows"


async def test_a_video_is_read(tmp_path: Path) -> None:
    data = video()
    path = tmp_path / "video.avi"
    path.write_bytes(data)
    text = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
    options = MediaOptions(media_io_kwargs='{"video": {"fps": 4, "num_frames": 3}}')
    digests = set()
    async with open_media_reader(options) as reader:
        for source in (data, path, text):
            found = await reader.read(VideoPart(source), name=NAME)
            assert found.arrays["pixels"].shape == (3, 32, 48, 3)
            assert found.arrays["seconds"].tolist() == [0.0, 0.9, 1.9]
            digests.add(found.digest)
    async with open_media_reader(OPTIONS) as reader:
        found = await reader.read(VideoPart(data), name=NAME)
        assert found.arrays["seconds"].tolist() == pytest.approx([0.0, 0.6, 1.2, 1.9])
        digests.add(found.digest)
        reason = await refused(reader, VideoPart(video(num_frames=21)))
        assert reason == "the video has 2.1 seconds, more than --limit-mm-seconds (2) allows"
        reason = await refused(reader, VideoPart("data:image/png;base64,AAAA"))
        assert "which is no video" in reason
    assert len(digests) == 2


async def test_hostile_parts_are_refused_by_name_and_others_go_on(tmp_path: Path) -> None:
    good = encoded(IMAGE, "PNG")
    large = tmp_path / "large"
    large.write_bytes(bytes((1 << 20) + 1))
    os.mkfifo(tmp_path / "pipe")
    parts = [*map(ImagePart, hostile_images().values())]
    parts += [ImagePart(data) for data in (b"x", SVG, clip(), good[: len(good) // 2])]
    parts += [AudioPart(data) for data in (b"x", good, clip()[:20])]
    parts += [VideoPart(data) for data in (b"x", good, clip(), *hostile_videos().values())]
    parts += [ImagePart(text) for text in ("AAA", "A A=", "AAAA====", "____", "data:;base64,ü==")]
    parts += [ImagePart(path) for path in (tmp_path, tmp_path / "none", tmp_path / "pipe", large)]
    parts += [ImagePart(Path("/dev/zero")), ImagePart("https://a.example/")]
    async with open_media_reader(OPTIONS) as reader:
        await check_serves(reader)
        (child,) = children()
        reasons = [await refused(reader, part) for part in parts]
        for data in lying_videos().values():
            assert (await reader.read(VideoPart(data), name=NAME)).arrays["pixels"].any()
        await check_serves(reader)
        assert children() == [child]
    assert all(reasons)
    assert reasons[0] == (
        "the image has 65535 x 65535 pixels, more than --limit-mm-pixels (1048576) allows"
    )
    assert "more than --limit-mm-bytes (1048576) allows" in reasons[-3]


async def test_a_process_has_no_keys_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIOSERVE_API_KEY", "a key")
    async with open_media_reader(OPTIONS) as reader:
        await check_serves(reader)
        for each in processes():
            assert "PATH" in each.environ()
            assert "TRIOSERVE_API_KEY" not in each.environ()


async def test_a_process_has_limits() -> None:
    async with open_media_reader(OPTIONS) as reader:
        await check_serves(reader)
        (child,) = children()
        seconds, _ = child.rlimit(psutil.RLIMIT_CPU)
        assert MAX_SECONDS <= seconds <= MAX_SECONDS + 2
        memory, _ = child.rlimit(psutil.RLIMIT_AS)
        assert 0 < memory - child.memory_info().vms <= memory_of(setup_of(OPTIONS))
        assert child.nice() > psutil.Process().nice()


async def test_what_is_too_large_never_reaches_a_process() -> None:
    """A data URL of 96 MiB is refused for its length."""
    async with open_media_reader(MediaOptions()) as reader:
        part = ImagePart("data:image/png;base64," + "A" * (96 << 20))
        started = time.thread_time()
        reason = await refused(reader, part)
        assert time.thread_time() - started < 0.05
        assert reason == (
            "the image has 75497472 bytes, more than --limit-mm-bytes (33554432) allows"
        )
        assert children() == []


async def test_the_parts_of_a_prompt_are_counted_and_keep_their_order() -> None:
    options = MediaOptions(limit_mm_per_prompt='{"image": 3, "audio": 0}')
    images = [noise(width) for width in (30, 20, 10, 5)]
    parts = [(f"images[{place}]", ImagePart(each)) for place, each in enumerate(images)]
    async with open_media_reader(options) as reader:
        found = await reader.read_all(parts[:3])
        assert [each.arrays["pixels"].shape[1] for each in found] == [30, 20, 10]
        assert await reader.read_all([]) == []
        for given, name, most in (
            (parts, "images[3]", "image than --limit-mm-per-prompt (3)"),
            ([("clip", AudioPart(b""))], "clip", "audio than --limit-mm-per-prompt (0)"),
        ):
            with pytest.raises(InvalidRequest) as raised:
                await reader.read_all(given)
            assert str(raised.value) == f"{name}: more parts of the kind {most} allows"
            assert raised.value.param == name
        bad = ("images[1]", ImagePart(b"x"))
        with pytest.raises(InvalidRequest, match=r"^images\[1\]: the image has an unknown"):
            await reader.read_all([parts[0], bad])


async def test_a_dead_process_costs_its_own_part_only() -> None:
    async with open_media_reader(OPTIONS) as reader:
        await check_serves(reader)
        (child,) = children()
        os.kill(child.pid, signal.SIGSTOP)

        async def refuse() -> None:
            reason = await refused(reader, ImagePart(IMAGE))
            assert reason.startswith("the image takes more than 20 s or ")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(refuse)
            await trio.testing.wait_all_tasks_blocked()
            await check_serves(reader)
            os.kill(child.pid, signal.SIGKILL)
        await check_serves(reader)
        assert child not in children()


async def test_an_idle_process_that_dies_costs_nothing() -> None:
    async with open_media_reader(OPTIONS) as reader:
        await check_serves(reader)
        (child,) = children()
        child.kill()
        await wait_ended(child)
        await check_serves(reader)
        assert child not in children()


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_first_process_is_replaced_and_its_forks_go_on(
    kind: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_server, "MAX_REPLY_SECONDS", 1.0)
    async with open_media_reader(OPTIONS) as reader:
        await check_serves(reader)
        (first, fork) = processes()
        fork.suspend()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(check_serves, reader)
            await trio.testing.wait_all_tasks_blocked()
            first.send_signal(kind)
            await check_serves(reader)
            assert fork.status() == psutil.STATUS_STOPPED
            fork.resume()
        assert first not in processes()
        assert len(processes()) == 2
    await wait_ended(first, fork)


async def test_a_process_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_media_reader(OPTIONS) as reader:
        await check_serves(reader)
        os.kill(children()[0].pid, signal.SIGSTOP)
        monkeypatch.setattr(pool, "MAX_WAIT", 0.2)
        await refused(reader, ImagePart(IMAGE))
        monkeypatch.undo()
        await check_serves(reader)


async def test_too_much_memory_ends_the_process() -> None:
    frames = '{"video": {"num_frames": 1}}'
    options = MediaOptions(
        limit_mm_bytes=1, limit_mm_pixels=1, limit_mm_seconds=1, media_io_kwargs=frames
    )
    found = MediaProcesses(setup_of(options))
    large = Payload("bytes", bytes(400 << 20))
    try:
        with pytest.raises(JobLost):
            await found.read(MediaJob(kind="image", size=large.size), large)
        answer = (await found.read(MediaJob(kind=""), None)).answer
        assert answer.failure == ""
    finally:
        await found.aclose()


async def test_a_cancelled_read_leaves_nothing() -> None:
    async with open_media_reader(OPTIONS) as reader:
        await check_serves(reader)
        os.kill(children()[0].pid, signal.SIGSTOP)
        with trio.move_on_after(0.2) as scope:
            await reader.read(ImagePart(IMAGE), name=NAME)
        assert scope.cancelled_caught
        assert children() == []
        assert shared_memory() == []
        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(check_serves, reader)
            while len(children()) < num_processes():
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        assert children() == []
        await check_serves(reader)


async def test_the_end_is_an_error_of_parts_that_wait() -> None:
    errors: list[str] = []

    async def read(reader: MediaReader) -> None:
        with pytest.raises(EngineError) as raised:
            await reader.read(ImagePart(IMAGE), name=NAME)
        errors.append(str(raised.value))

    async with trio.open_nursery() as nursery:
        async with open_media_reader(OPTIONS) as reader:
            await check_serves(reader)
            os.kill(children()[0].pid, signal.SIGSTOP)
            nursery.start_soon(read, reader)
            await trio.testing.wait_all_tasks_blocked()
        await read(reader)
    assert errors == ["the engine is closed"] * 2


class _Steps(trio.abc.Instrument):
    """Measures the processor time of the longest step of a task."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._started = time.thread_time()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._started = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.longest = max(self.longest, time.thread_time() - self._started)


async def test_many_images_at_once_do_not_hold_up_the_event_loop() -> None:
    image = noise(600, 500)
    bitmap = base64.b64encode(encoded(noise(2500, 2000), "BMP")).decode()  # 20 MB
    parts = [ImagePart(base64.b64encode(encoded(image, "PNG")).decode())] * 31 + [ImagePart(bitmap)]
    async with open_media_reader(MediaOptions(limit_mm_per_prompt='{"image": 32}')) as reader:
        await check_serves(reader)
        steps = _Steps()
        trio.lowlevel.add_instrument(steps)
        found = await reader.read_all([(NAME, part) for part in parts])
        trio.lowlevel.remove_instrument(steps)
    assert all(np.array_equal(each.arrays["pixels"], np.asarray(image)) for each in found[:31])
    assert 0 < steps.longest < 0.02


async def test_memory_stays_flat() -> None:
    part = ImagePart(encoded(noise(300, 200), "PNG"))
    async with open_media_reader(OPTIONS) as reader:

        async def grow(count: int) -> int:
            before = sum(each.memory_info().rss for each in (psutil.Process(), *children()))
            for _ in range(count):
                await reader.read(part, name=NAME)
            return sum(each.memory_info().rss for each in (psutil.Process(), *children())) - before

        await check_serves(reader)
        await grow(50)
        # What 200 images take is 36 MB of pixels.
        assert await grow(200) < 8 << 20


@pytest.mark.parametrize(
    "layout",
    [
        ArrayLayout("a", "<f4", (3,)),
        ArrayLayout("a", "<f4", (5,)),
        ArrayLayout("a", "O", (2,)),
        ArrayLayout("a", "nonsense", (16,)),
        ArrayLayout("a", "|u1", (-4, -4)),
        ArrayLayout("a", "|V16", (1,)),
    ],
)
def test_memory_that_is_not_what_the_answer_says_is_refused(layout: ArrayLayout) -> None:
    for layouts in ([layout], [layout, ArrayLayout("b", "|u1", (0,))]):
        memory = os.memfd_create("test")
        os.pwrite(memory, bytes(16), 0)
        with pytest.raises(EOFError):
            copy_arrays(memory, layouts)
