"""Embeddings of media: each content is computed once, whatever asks for it and is lost."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import attrs
import msgspec
import numpy as np
import pytest
import trio
import trio.testing

from tests.support.metric_samples import value
from trioserve.observability.metrics import Metrics
from trioserve.protocol.embeddings import EmbeddingRows, ImageGrid
from trioserve.protocol.errors import (
    CallFailed,
    ContextTooLong,
    EngineError,
    InvalidRequest,
    ModelLoadError,
    WorkerLost,
)
from trioserve.protocol.media_arrays import read_arrays
from trioserve.requests.media import encoding
from trioserve.requests.media.embedding import (
    MAX_EMBEDDING_BYTES,
    MAX_PROMPTS_WITH_ARGUMENTS,
    MediaEmbedder,
)
from trioserve.requests.media.encoder import (
    CALLS_PER_WORKER,
    MAX_TRIES,
    MediaEncoder,
    WorkerMediaEncoder,
)
from trioserve.requests.media.encoding import INLINE_BYTES, EncoderClient
from trioserve.requests.media.parts import AudioPart, ImagePart, MediaPart, VideoPart
from trioserve.requests.media.reader import MediaReader, ProcessedMedia
from trioserve.requests.media_arguments import MediaArguments

PLACEHOLDER, WIDTH = 7, 2


class Reader:
    """A reader whose images have their own bytes as content, and two placeholders."""

    async def read_all(
        self, parts: Sequence[tuple[str, MediaPart]], arguments: MediaArguments
    ) -> list[ProcessedMedia]:
        return [
            ProcessedMedia("image", cast(bytes, part.source), [1, 7, 7], {"x": np.ones(3)}, 2, 5)
            for _, part in parts
        ]


class Worker:
    """A worker that notes its calls, and answers with ``rows`` or raises what is in ``errors``."""

    def __init__(self, *errors: Exception, num_rows: int = 2) -> None:
        self.errors = list(errors)
        self.rows = np.ones((num_rows, WIDTH), np.float32).tobytes()
        self.num_calls = self.running = self.most = 0

    async def call(self, name: str, arguments: bytes) -> Any:
        assert name == "encode_media"
        ((label, dtype, shape, content),) = msgspec.msgpack.decode(arguments)["arrays"]
        assert (label, dtype, shape, content) == ("x", "<f8", [3], np.ones(3).tobytes())
        self.num_calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await trio.sleep(1)
        finally:
            self.running -= 1
        if self.errors:
            raise self.errors.pop(0)
        return {"rows": self.rows, "number_format": "float32"}


def embedder(worker: Worker, max_bytes: int = 1000) -> MediaEmbedder:
    metrics = Metrics("m")
    return MediaEmbedder(
        reader=cast(MediaReader, Reader()),
        client=EncoderClient(
            WorkerMediaEncoder(
                call=worker.call,
                wait_attached=trio.lowlevel.checkpoint,
                count_workers=lambda: 1,
                max_bytes=max_bytes,
                metrics=metrics,
            )
        ),
        metrics=metrics,
        placeholders={"image": PLACEHOLDER},
        width=WIDTH,
    )


def parts(*contents: bytes) -> list[tuple[str, ImagePart]]:
    return [(f"part {index}", ImagePart(content)) for index, content in enumerate(contents)]


async def test_the_same_content_is_computed_once(autojump_clock: trio.testing.MockClock) -> None:
    worker = Worker()
    media = embedder(worker)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(media.embed, parts(b"a", b"b", b"a"))
    assert worker.num_calls == 2
    found = await media.embed(parts(b"b", b"c"))
    assert worker.num_calls == 3
    assert [each.digest for each in found] == [b"b", b"c"]
    assert [(each.kind, each.placeholder, each.token_ids) for each in found] == [
        ("image", PLACEHOLDER, [1, 7, 7])
    ] * 2
    for name, number in (
        ("mm_input_bytes_total", 5 * 11),
        ("mm_cache_queries_total", 11),
        ("mm_cache_hits_total", 8),
        ("mm_encode_seconds_count", 3),
        ("mm_encode_seconds_sum", 3),
    ):
        labels = {"kind": "image"} if "bytes" in name else {}
        assert value(media.metrics, name, **labels) == number, name


@pytest.mark.parametrize("shares_memory", [True, False])
async def test_large_arrays_are_in_no_message_on_one_host(shares_memory: bool) -> None:
    """They take one copy in a thread there."""
    pixels = np.random.default_rng(4).random((INLINE_BYTES // 8 + 1, 1))
    found: list[Any] = []

    class Encoder:
        async def kept_media(self, digest: bytes) -> None:
            return None

        async def encode_media(self, digest: bytes, arrays: bytes) -> EmbeddingRows:
            assert (len(arrays) < 1000) == shares_memory
            found.append(msgspec.msgpack.decode(arrays))
            found.append(read_arrays(found[0]))
            return EmbeddingRows(start=0, rows=b"", number_format="float32")

    processed = ProcessedMedia("image", b"digest", [1], {"x": pixels}, 2, 5)
    client = EncoderClient(cast(MediaEncoder, Encoder()), shares_memory)
    await client.embeddings_of(processed, "part")
    assert np.array_equal(found[1]["x"], pixels)
    if shares_memory:  # Nothing is left of it.
        with pytest.raises(ModelLoadError, match="isn't there any more"):
            read_arrays(found[0])


async def test_arrays_go_in_messages_where_memory_has_run_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: str) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(encoding, "host_memory", fail)
    sent: list[bytes] = []

    class Encoder:
        async def kept_media(self, digest: bytes) -> None:
            return None

        async def encode_media(self, digest: bytes, arrays: bytes) -> EmbeddingRows:
            sent.append(arrays)
            return EmbeddingRows(start=0, rows=b"", number_format="float32")

    pixels = np.zeros(INLINE_BYTES + 1, np.uint8)
    processed = ProcessedMedia("image", b"digest", [1], {"x": pixels}, 2, 5)
    await EncoderClient(cast(MediaEncoder, Encoder())).embeddings_of(processed, "part")
    assert [len(each) > INLINE_BYTES for each in sent] == [True]


async def test_more_tokens_than_a_message_takes_are_refused() -> None:
    """Before anything is computed: the second part is too much."""
    worker = Worker()
    media = attrs.evolve(embedder(worker), width=MAX_EMBEDDING_BYTES // 4 // 3)
    with pytest.raises(InvalidRequest, match=r"part 1: .* 4 tokens so far, and 3 of") as caught:
        await media.embed(parts(b"a", b"b"))
    assert caught.value.param == "part 1"
    assert worker.num_calls == 0


async def test_more_tokens_than_a_prompt_may_have_are_refused(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Before anything is computed; tokens beside the embeddings count."""
    worker = Worker()
    media = embedder(worker)
    with pytest.raises(ContextTooLong, match=r"part 1: .* 6 tokens so far: .* is 5 tokens"):
        await media.embed(parts(b"a", b"b"), max_tokens=5)
    assert worker.num_calls == 0
    assert len(await media.embed(parts(b"a", b"b"), max_tokens=6)) == 2


async def test_an_error_names_the_arguments_of_the_request() -> None:
    media = attrs.evolve(embedder(Worker()), merge_size=2)
    arguments = MediaArguments(processor={"size": 1})
    with pytest.raises(
        InvalidRequest, match=r"^part 0: .*with mm_processor_kwargs \(size\)$"
    ) as told:
        await media.embed(parts(b"a"), arguments)
    assert told.value.param == "mm_processor_kwargs"


async def test_few_prompts_with_arguments_are_read_at_a_time() -> None:
    running = most = 0

    class SlowReader(Reader):
        async def read_all(
            self, parts: Sequence[tuple[str, MediaPart]], arguments: MediaArguments
        ) -> list[ProcessedMedia]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await trio.sleep(1)
            running -= 1
            return await super().read_all(parts, arguments)

    media = attrs.evolve(embedder(Worker()), reader=cast(MediaReader, SlowReader()))
    async with trio.open_nursery() as nursery:
        for number in range(2 * MAX_PROMPTS_WITH_ARGUMENTS):
            content = parts(bytes([number]))
            nursery.start_soon(media.embed, content, MediaArguments(processor={"size": 1}))
        await trio.testing.wait_all_tasks_blocked()
        assert running == MAX_PROMPTS_WITH_ARGUMENTS
        nursery.start_soon(media.embed, parts(b"plain"))
        await trio.testing.wait_all_tasks_blocked()
        assert running == MAX_PROMPTS_WITH_ARGUMENTS + 1
        nursery.cancel_scope.cancel()
    assert most == MAX_PROMPTS_WITH_ARGUMENTS + 1


async def test_what_is_kept_is_bounded(autojump_clock: trio.testing.MockClock) -> None:
    worker = Worker()
    media = embedder(worker, max_bytes=2 * 16)
    for content in (b"a", b"b", b"a", b"c", b"a", b"b"):
        await media.embed(parts(content))
    assert worker.num_calls == 4  # a, b, c, and b again, which was the oldest


async def test_a_caller_that_leaves_lets_others_compute(
    autojump_clock: trio.testing.MockClock,
) -> None:
    worker = Worker()
    media = embedder(worker)
    async with trio.open_nursery() as nursery:

        async def leave() -> None:
            with trio.move_on_after(0.5):
                await media.embed(parts(b"a"))

        nursery.start_soon(leave)
        await trio.testing.wait_all_tasks_blocked()
        (found,) = await media.embed(parts(b"a"))
    assert (worker.num_calls, found.digest) == (2, b"a")


async def test_callers_that_leave_take_their_calls_with_them(
    autojump_clock: trio.testing.MockClock,
) -> None:
    worker = Worker()
    media = embedder(worker)
    with trio.move_on_after(1.5):
        await media.embed(parts(*(bytes([number]) for number in range(20))))
    assert (worker.num_calls, worker.most) == (2 * CALLS_PER_WORKER, CALLS_PER_WORKER)
    assert trio.current_time() == 1.5


async def test_lost_workers_and_errors(autojump_clock: trio.testing.MockClock) -> None:
    lost = [WorkerLost("lost") for _ in range(MAX_TRIES - 1)]
    worker = Worker(*lost)
    await embedder(worker).embed(parts(b"a"))
    assert worker.num_calls == MAX_TRIES
    with pytest.raises(EngineError, match=f"{MAX_TRIES} workers were lost"):
        await embedder(Worker(*lost, WorkerLost("lost"))).embed(parts(b"a"))
    for worker, told in (
        (Worker(CallFailed("encode_media", "too wide")), "can't read this image: .*too wide"),
        (Worker(num_rows=3), "gives 3 embeddings for 2 tokens"),
    ):
        with pytest.raises(InvalidRequest, match=told) as refused:
            await embedder(worker).embed(parts(b"a"))
        assert refused.value.param == "part 0"
    with pytest.raises(InvalidRequest, match="its processor is of another model"):
        await attrs.evolve(embedder(Worker()), merge_size=2).embed(parts(b"a"))


async def test_a_clip_may_have_other_embeddings_beside_images(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """It is computed apart for such prompts, and keeps its embeddings in others."""

    class AnyReader:
        """A reader of images and clips whose content is their source."""

        async def read_all(
            self, parts: Sequence[tuple[str, MediaPart]], arguments: MediaArguments
        ) -> list[ProcessedMedia]:
            return [
                ProcessedMedia(part.kind, cast(bytes, part.source), [7, 7], {}, 2)
                for _, part in parts
            ]

    calls: list[list[str]] = []

    async def call(name: str, arguments: bytes) -> Any:
        calls.append([each[0] for each in msgspec.msgpack.decode(arguments)["arrays"]])
        return {"rows": bytes(2 * WIDTH * 4), "number_format": "float32"}

    media = attrs.evolve(
        embedder(cast(Worker, SimpleNamespace(call=call))),
        reader=cast(MediaReader, AnyReader()),
        placeholders={"image": 7, "audio": 8},
        audio_depends_on_images=True,
    )
    clip, image = ("clip", AudioPart(b"clip")), ("image", ImagePart(b"image"))
    (alone,) = await media.embed([clip])
    beside, seen = await media.embed([clip, image])
    assert sorted(calls) == [[], [], ["is_beside_images"]]
    assert (alone.digest, seen.digest) == (b"clip", b"image")
    assert beside.digest not in (alone.digest, seen.digest)
    assert len(beside.digest) == len(alone.digest)
    assert [each.digest for each in await media.embed([clip, clip])] == [b"clip", b"clip"]
    (_, again) = await media.embed([image, clip])
    assert again.digest == beside.digest
    assert len(calls) == 3
    (found, _) = await attrs.evolve(media, audio_depends_on_images=False).embed([clip, image])
    assert found.digest == alone.digest


async def test_the_grid_of_a_video_is_that_of_its_frames_and_seconds(
    autojump_clock: trio.testing.MockClock,
) -> None:
    class VideoReader:
        """A reader of videos of three pairs of frames, each of which is half a second."""

        async def read_all(
            self, parts: Sequence[tuple[str, MediaPart]], arguments: MediaArguments
        ) -> list[ProcessedMedia]:
            arrays = {
                "image_grid_thw": np.array([[3, 2, 4]]),
                "second_per_grid_ts": np.array([0.5], np.float32),
            }
            return [ProcessedMedia("video", b"v", [7] * 6, arrays, 6)]

    async def call(name: str, arguments: msgspec.Raw) -> Any:
        return {"rows": bytes(6 * WIDTH * 4), "number_format": "float32"}

    base = embedder(cast(Worker, SimpleNamespace(call=call)))
    media = attrs.evolve(
        base, reader=cast(MediaReader, VideoReader()), placeholders={"video": 7}, merge_size=2
    )
    film = [("film", VideoPart(b"film"))]
    wanted = ImageGrid(start=0, rows=1, columns=2, frames=3)
    (found,) = await media.embed(film)
    assert found.grid == wanted
    (found,) = await attrs.evolve(media, tokens_per_second=5).embed(film)
    assert found.grid == attrs.evolve(wanted, interval=2.5)
    with pytest.raises(InvalidRequest, match="6 tokens are too few for the 7 positions") as refused:
        await attrs.evolve(media, tokens_per_second=6).embed(film)
    assert refused.value.param == "film"
